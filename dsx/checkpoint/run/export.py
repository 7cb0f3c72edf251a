"""A run's weights from and to Hugging Face model folders, layer by layer and stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from dsx.checkpoint import store
from dsx.checkpoint.claims import model_of
from dsx.checkpoint.formats import slices
from dsx.checkpoint.formats.huggingface import weights as hf
from dsx.checkpoint.formats.huggingface.catalog import SHARD_BYTES
from dsx.checkpoint.run.names import CheckpointedRun, spec_of
from dsx.config.schema import NO_TOKENIZER
from dsx.config.sources import BYTES
from dsx.data.tokenizers import TransformersTokenizer
from dsx.errors import CheckpointError, ModelError
from dsx.launch.processes import agree
from dsx.models.param import ParamSpec
from dsx.models.params import stored_specs
from dsx.models.spec import HubModel, Model
from dsx.parallel.groups import Groups

_GENERATION = "generation_config.json"
_TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    _GENERATION,
}


@contextmanager
def layer_weights(
    folder: str | Path, model: Model, groups: Groups
) -> Iterator[Callable[[int, nn.Module], None]]:
    """The function that gives a model's layers the weights of a Hugging Face folder, one by one.

    It is for ``load_layer`` of :class:`~dsx.PipelineModule`. Each rank reads only its own slices. A
    collective call over all ranks.

    Args:
        folder: The Hugging Face model folder.
        model: The model, every tensor of which the folder must hold, and nothing else.
        groups: This rank's process groups.

    Raises:
        CheckpointError: The folder lacks a tensor, has another, or one has another shape.
    """
    names_of = _names_of(model)
    buffers = [spec for spec in stored_specs(model) if spec.buffer]
    agree(lambda: _check(folder, model, names_of))
    with hf.HfWeights(folder, names_of) as weights:

        @torch.no_grad()
        def load(index: int, layer: nn.Module) -> None:
            for parameter in layer.parameters():
                parameter.copy_(weights.read(spec_of(parameter), groups.mesh.tp, groups.tp_rank))
            for spec in buffers:
                if spec.layer == index:
                    layer.get_buffer(spec.name.partition(".")[2]).copy_(weights.read(spec))

        yield load


def logical_tensors(
    pipeline: Any, specs: Sequence[ParamSpec] = ()
) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
    """This stage's logical tensors one by one, whole, on the CPU. A collective call over the stage's ranks.

    A tied tensor is given once, by the first stage that holds it. Only the first rank of each
    stage gets the contents; the others get an empty tensor. The buffers among ``specs`` come last.
    """
    for parameter in pipeline.chunks.parameters():
        spec = spec_of(parameter)
        gathered: Any = nullcontext()
        if hasattr(parameter, "ds_id"):
            gathered = deepspeed.zero.GatheredParameters([parameter])
        with gathered:
            if getattr(parameter, "ds_pipe_replicated", False):
                continue
            whole = torch.empty(0)
            if pipeline.groups.replica == 0:
                whole = _whole(parameter.detach(), spec, pipeline.groups)
            yield spec, whole
    for spec, buffer in _buffers(pipeline, specs):
        yield spec, buffer.cpu()


def export_weights(
    pipeline: Any,
    folder: str | Path,
    config: dict[str, Any],
    model: Model | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a Hugging Face model folder: safetensors, each with layers of one stage, an index and the config.

    A collective call over all ranks. The folder appears whole or not at all.

    Args:
        pipeline: A module of dsx's layers, trained or not.
        folder: Where to write; must not exist with other content.
        config: The Hugging Face config.json to write.
        model: What the layers are made of; what dsx makes of ``config`` by default.
        shard_bytes: Largest file, unless one parameter is larger.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    groups, folder = pipeline.groups, Path(folder)
    writer = groups.replica == 0 and groups.tp_rank == 0
    specs = stored_specs(model or model_of(config))
    shards = _shards(pipeline, specs, shard_bytes)
    counts = [0] * groups.mesh.size
    dist.all_gather_object(counts, len(shards) if writer else 0)
    first, count = sum(counts[: groups.rank]), sum(counts)
    names: dict[str, str] = {}
    failure: CheckpointError | None = None
    number, shard = 0, dict[str, torch.Tensor]()
    for spec, tensor in logical_tensors(pipeline, specs):
        if writer:
            shard |= hf.split(spec, tensor)
        shards[number] -= 1
        if shards[number]:
            continue
        # Ranks gather tensors together, so that one that cannot write goes on until all have done.
        if writer and failure is None:
            try:
                names |= hf.write_shard(folder, first + number, count, shard)
            except CheckpointError as error:
                failure = error
        number, shard = number + 1, {}
    gathered = [(names, failure)] * groups.mesh.size
    dist.all_gather_object(gathered, (names, failure))
    failed = next((error for _, error in gathered if error is not None), None)
    if failed is not None:
        raise failed
    files = {name: file for part, _ in gathered for name, file in part.items()}
    agree(lambda: hf.finish(folder, config, files, specs))
    return folder


def _shards(pipeline: Any, specs: Sequence[ParamSpec], shard_bytes: int) -> list[int]:
    """How many of this stage's tensors go into each of its files, in their order."""
    sizes = [
        spec_of(parameter).numel * parameter.element_size()
        for parameter in pipeline.chunks.parameters()
        if not getattr(parameter, "ds_pipe_replicated", False)
    ]
    sizes += [spec.numel * buffer.element_size() for spec, buffer in _buffers(pipeline, specs)]
    shards, filled = list[int](), 0
    for size in sizes:
        if not shards or filled + size > shard_bytes:
            shards.append(0)
            filled = 0
        shards[-1] += 1
        filled += size
    return shards


def _buffers(pipeline: Any, specs: Sequence[ParamSpec]) -> list[tuple[ParamSpec, torch.Tensor]]:
    """This stage's buffers that are stored with the weights."""
    held = dict(pipeline.chunks.named_buffers())
    return [(spec, held[spec.name]) for spec in specs if spec.buffer and spec.name in held]


def export_hf(
    engine: CheckpointedRun, folder: str | Path, *, config: Mapping[str, Any] | None = None
) -> Path:
    """Write an engine's weights as a Hugging Face model folder, which ``from_pretrained`` reads.

    Beside ``config.json`` and the safetensors stand the files of the tokenizer that ``dsx.data.tokenizer``
    names, and the generation settings of the folder that ``dsx.model.path`` names. A collective call over all
    ranks; the folder appears whole or not at all.

    Args:
        engine: An engine of a model that dsx made of a config, trained or not, in any layout.
        folder: Where to write; must not exist with other content.
        config: The Hugging Face config to write; that of the dsx config by default, which the engine knows
            if :func:`dsx.initialize` was given it.

    Returns:
        The folder.

    Raises:
        CheckpointError: The folder cannot be written.
        ModelError: The layers are not dsx's own, or there is no Hugging Face config.
    """
    run = engine.run_config
    if config is None and run is not None:
        config = run.hf_config
    if config is None:
        raise ModelError(
            "config = None",
            "the engine was made from an ordinary DeepSpeed config, which does not say what model it trains",
            "give the model's Hugging Face config: dsx.export_hf(engine, folder, config={...})",
        )
    model = None if run is None else run.model
    folder = export_weights(engine.pipeline, folder, dict(config), model)
    if run is not None:
        data, source = run.dsx.data, run.dsx.model.path
        agree(lambda: copy_tokenizer(data.tokenizer, folder, trust_remote_code=data.trust_remote_code))
        if source is not None:
            agree(lambda: _copy(Path(source), folder, {_GENERATION}))
    return folder


def copy_tokenizer(name: str, folder: Path, *, trust_remote_code: bool = False) -> None:
    """Put the tokenizer called ``name`` into a model folder, so that ``AutoTokenizer`` finds it there.

    A folder's files are copied as they are, with the generation settings beside them, and with its Python
    files if its code is trusted. "bytes", which transformers does not have, and "none" leave nothing.

    Raises:
        CheckpointError: A file cannot be written.
    """
    source = Path(name).expanduser()
    if source.is_dir():
        code = {path.name for path in source.iterdir() if trust_remote_code and path.suffix == ".py"}
        _copy(source, folder, _TOKENIZER_FILES | code)
    elif name not in (BYTES, NO_TOKENIZER):
        TransformersTokenizer(name, trust_remote_code=trust_remote_code).save(folder)


def _copy(source: Path, folder: Path, names: Collection[str]) -> None:
    for file in sorted(path for path in source.iterdir() if path.is_file() and path.name in names):
        store.write_atomically(folder / file.name, file.read_bytes())


def _names_of(model: Model) -> hf.NamesOf | None:
    if not isinstance(model, HubModel):
        return None
    from dsx.hub.read import folder_names

    return folder_names(model).of


def _check(folder: str | Path, model: Model, names_of: hf.NamesOf | None) -> None:
    with hf.HfWeights(folder, names_of) as weights:
        weights.check(stored_specs(model))


def _whole(local: torch.Tensor, spec: ParamSpec, groups: Groups) -> torch.Tensor:
    """Assemble a logical tensor from its tensor-parallel parts, on tp rank 0."""
    shards = [local]
    if spec.split is not None and groups.mesh.tp > 1:
        shards = [torch.empty_like(local) for _ in range(groups.mesh.tp)]
        dist.all_gather(shards, local.contiguous(), group=groups.tensor)
    if groups.tp_rank != 0:
        return torch.empty(0)
    return slices.merge(spec, [shard.to("cpu", copy=True) for shard in shards])
