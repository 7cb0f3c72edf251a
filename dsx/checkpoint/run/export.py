"""A run's weights from and to Hugging Face model folders, layer by layer and stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from dsx.checkpoint import store
from dsx.checkpoint.base import Composite, composite_at, composite_fact, names_in
from dsx.checkpoint.claims import model_of, modules_in
from dsx.checkpoint.formats import slices
from dsx.checkpoint.formats.huggingface import catalog
from dsx.checkpoint.formats.huggingface import weights as hf
from dsx.checkpoint.formats.huggingface.names import (
    GENERATION,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    read_config,
)
from dsx.checkpoint.run.names import CheckpointedRun, spec_of
from dsx.checkpoint.staging import claimed
from dsx.config.adapter import WEIGHTS, peft_settings
from dsx.config.schema import NO_TOKENIZER
from dsx.config.sources import BYTES
from dsx.data.tokenizers import TransformersTokenizer
from dsx.errors import CheckpointError, ModelError
from dsx.launch.processes import agree
from dsx.models.adapters import PREFIX, in_peft, peft_specs, placed, targeted
from dsx.models.param import ParamSpec
from dsx.models.params import stored_specs, tower_specs
from dsx.models.spec import Adapter, Model
from dsx.nn.adapter import begin, left
from dsx.nn.quantized import is_quantized, quantize
from dsx.parallel.groups import Groups
from dsx.parallel.mesh import ALONE, Coordinates, Mesh


@contextmanager
def layer_weights(
    folder: str | Path | None,
    model: Model,
    groups: Groups,
    adapter: str | Path | None = None,
    *,
    given: Callable[[int, nn.Module], None] | None = None,
) -> Iterator[Callable[[int, nn.Module], None]]:
    """The function that gives a model's layers the weights of Hugging Face's folders, one by one.

    It is for ``load_layer`` of :class:`~dsx.PipelineModule`. Each rank reads only its own slices. A
    collective call over all ranks.

    Args:
        folder: The Hugging Face model folder; None leaves the model's own weights as they are.
        model: The model, every tensor of which the folder must hold, and nothing else.
        groups: This rank's process groups.
        adapter: PEFT's folder of the model's adapter, of which the same holds; None leaves it fresh.
        given: Gives layers the model's own weights in place of the folder.
    """
    theirs = (None, ()) if folder is None or given is not None else names_in(read_config(folder), model)
    names_of, apart = theirs
    specs = stored_specs(model)
    buffers = [spec for spec in specs if spec.buffer]
    at = groups.at
    with ExitStack() as files:
        fills: list[Callable[[int, nn.Module], None]] = []
        if given is not None:
            fills.append(given)
        elif folder is not None:
            own = [spec for spec in specs if not spec.adapts]
            base = files.enter_context(_checked(lambda: hf.HfWeights(folder, names_of, apart=apart), own))
            read = base.read if model.adapter is None else partial(_read_left, base, model.adapter)
            fills.append(partial(fill_base, read, buffers, at))
            fills.append(partial(_fill_tower, folder, model.adapter))
        if model.adapter is not None:
            fills.append(lambda _, layer: quantize(layer))
            fills.append(lambda _, layer: begin(layer))
        if adapter is not None:
            trained = peft_specs(specs)
            modules = {} if folder is None else modules_in(read_config(folder))
            inner = partial(_in_language_model, {there: here for here, there in modules.items()})
            tuned = files.enter_context(_checked(lambda: hf.HfWeights(adapter, inner, WEIGHTS), trained))
            fills.append(partial(_fill_trained, tuned, at))

        @torch.no_grad()
        def load(index: int, layer: nn.Module) -> None:
            for fill in fills:
                fill(index, layer)

        yield load


def _in_language_model(
    modules: Mapping[str, str], held: Collection[str], _folder: str | Path
) -> dict[str, str | None]:
    """Names of an adapter's tensors in the model by itself, where PEFT knows it inside a composite one."""
    return {name: PREFIX + placed(name.removeprefix(PREFIX), modules) for name in held}


def _read_left(
    base: hf.HfWeights, adapter: Adapter, spec: ParamSpec, at: Coordinates = ALONE
) -> torch.Tensor:
    """As :meth:`HfWeights.read`, less what the adapter's start has taken out of a matrix."""
    held = tuple(targeted(adapter, spec)) if adapter.start != "none" else ()
    if not held:
        return base.read(spec, at)
    device = get_accelerator().current_device_name()
    matrix = base.read(spec)
    for _, (first, stop) in held:
        matrix[first:stop] = left(adapter, matrix[first:stop].to(device))
    return slices.part_of(spec, matrix, at)


def fill_base(
    read: Callable[..., torch.Tensor],
    buffers: Sequence[ParamSpec],
    at: Coordinates,
    index: int,
    layer: nn.Module,
) -> None:
    """Give a layer the model's own weights.

    ``read`` gives a rank's part of a parameter as :meth:`HfWeights.read` does, or a whole buffer; ``buffers``
    are those of the model that are stored.
    """
    for parameter in layer.parameters():
        spec = spec_of(parameter)
        if not spec.adapts:
            parameter.copy_(read(spec, at))
    for spec in buffers:
        if spec.layer == index:
            layer.get_buffer(spec.name.partition(".")[2]).copy_(read(spec))


def _fill_tower(folder: str | Path, adapter: Adapter | None, index: int, layer: nn.Module) -> None:
    """Give the layer that reads pictures the tower of a composite model's folder."""
    tower = getattr(layer, "tower", None)
    if index == 0 and tower is not None:
        with hf.HfWeights(folder, tower.names_of) as weights:
            for spec in tower.specs:
                tower.fill(
                    spec, weights.read(spec) if adapter is None else _read_left(weights, adapter, spec)
                )
        tower.finish()


def _fill_trained(weights: hf.HfWeights, at: Coordinates, index: int, layer: nn.Module) -> None:
    """Give a layer what was trained of it."""
    del index
    for parameter in layer.parameters():
        spec = spec_of(parameter)
        if spec.trained:
            parameter.copy_(weights.read(in_peft(spec), at))


def _checked(open_weights: Callable[[], hf.HfWeights], specs: Sequence[ParamSpec]) -> hf.HfWeights:
    """A folder's weights, proved to be those of ``specs`` by a rank alone. A collective call."""

    def check() -> None:
        with open_weights() as weights:
            weights.check(specs)

    agree(check)
    return open_weights()


def logical_tensors(
    pipeline: Any, specs: Sequence[ParamSpec] = (), keep: Callable[[ParamSpec], bool] = lambda _: True
) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
    """This stage's logical tensors one by one, whole, on the CPU. A collective call over the stage's ranks.

    A tied tensor is given once, by the first stage that holds it. Only the first rank of each
    stage gets the contents; the others get an empty tensor. The buffers among ``specs`` come last. Those
    alone are given that ``keep`` wants.
    """
    for parameter in pipeline.chunks.parameters():
        spec = spec_of(parameter)
        if not keep(spec):
            continue
        gathered: Any = nullcontext()
        if hasattr(parameter, "ds_id"):
            gathered = deepspeed.zero.GatheredParameters([parameter])
        with gathered:
            if getattr(parameter, "ds_pipe_replicated", False):
                continue
            whole = torch.empty(0)
            groups = pipeline.groups
            if groups.mesh.replica_of(groups.rank, experts=spec.experts is not None) == 0:
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
    within: Composite | None = None,
    shard_bytes: int = catalog.SHARD_BYTES,
) -> Path:
    """Write a Hugging Face model folder: safetensors, each with layers of one stage, an index and the config.

    A collective call over all ranks. The folder appears whole or not at all.

    Args:
        pipeline: A module of dsx's layers, trained or not.
        folder: Where to write; must not exist with other content.
        config: The Hugging Face config.json to write.
        model: What the layers are made of; what dsx makes of ``config`` by default.
        within: The composite model that it is the language model of; the folder is then that model's.
        shard_bytes: Largest file, unless one parameter is larger.
    """
    if is_quantized(pipeline):
        raise CheckpointError(
            str(folder),
            "matrices of the model are quantised, and what they were made of is not there to be written",
            "write the adapter (dsx.recipe.export), and merge it into the original with dsx reshard",
        )
    folder, specs = Path(folder), stored_specs(model or model_of(config))
    own = [spec for spec in specs if not spec.adapts]

    def stored(spec: ParamSpec) -> ParamSpec | None:
        return None if spec.adapts else spec if within is None else within.inside(spec)

    with _claimed(folder):
        named = [spec for each in own if (spec := stored(each)) is not None]
        held = {name for spec in named for name in spec.hf}
        tower = [] if within is None else catalog.shards(within.tower(held), shard_bytes)
        beside = [partial(hf.tensors_of, within.folder, shard) for shard in tower if within is not None]
        files = _write(pipeline, folder, own, stored, shard_bytes, beside=beside)
        others = None if within is None else {entry.name for shard in tower for entry in shard}
        whole = config if within is None else within.config_with(config)
        agree(lambda: hf.finish(folder, whole, files, named, others))
    return folder


def export_adapter(
    pipeline: Any,
    folder: str | Path,
    model: Model,
    base: str | None = None,
    modules: Mapping[str, str] | None = None,
) -> Path:
    """Write a PEFT folder of what is trained of a model with an adapter, as :func:`export_weights` does.

    ``folder`` must not exist with other content. ``base`` is the folder of the model that the adapter belongs
    to, which PEFT's config names; ``modules`` where the composite model there has this one's modules.
    """
    folder, specs = Path(folder), stored_specs(model)
    settings, named = peft_settings(specs, model, base, modules), peft_specs(specs, modules)
    stored = lambda spec: in_peft(spec, modules) if spec.trained else None  # noqa: E731
    with _claimed(folder):
        files = _write(pipeline, folder, (), stored, None, copies=True)
        agree(lambda: hf.finish_adapter(folder, settings, files, named))
    return folder


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Nobody else makes the folder meanwhile. Collective: rank 0 holds the lock."""
    with ExitStack() as held:

        def claim() -> None:
            held.callback(claimed(folder, hf.may_be_left).release)

        agree(claim)
        yield


def _write(
    pipeline: Any,
    folder: Path,
    specs: Sequence[ParamSpec],
    stored: Callable[[ParamSpec], ParamSpec | None],
    shard_bytes: int | None,
    *,
    copies: bool = False,
    beside: Sequence[Callable[[], dict[str, torch.Tensor]]] = (),
) -> dict[str, str]:
    """Write the shards of an export; gives the file of every tensor. A collective call over all ranks.

    Args:
        pipeline: A module of dsx's layers.
        folder: The folder to make.
        specs: Every tensor of the model, of which the buffers count.
        stored: Gives a tensor under the names that it has in the files; None leaves it out.
        shard_bytes: Largest file, unless one parameter is larger; None for one file of each stage.
        copies: Whether tied tensors are written under all their names, as PEFT does.
        beside: Each gives the tensors of a shard that rank 0 writes as well.
    """
    groups = pipeline.groups
    writer = groups.replica == 0 and groups.tp_rank == 0
    shards = _shards(pipeline, specs, lambda spec: stored(spec) is not None, shard_bytes)
    counts = [0] * groups.mesh.size
    dist.all_gather_object(counts, len(shards) if writer else 0)
    first, count = sum(counts[: groups.rank]), sum(counts) + len(beside)
    names: dict[str, str] = {}
    failure: CheckpointError | None = None
    number, shard = 0, dict[str, torch.Tensor]()
    for spec, tensor in logical_tensors(pipeline, specs, lambda spec: stored(spec) is not None):
        if writer:
            kept = stored(spec) or spec
            shard |= hf.split(kept, tensor)
            shard |= {name: shard[kept.hf[0]].clone() for name in kept.hf_copies if copies}
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
    for place, read in enumerate(beside if groups.rank == 0 and failure is None else (), sum(counts)):
        try:
            names |= hf.write_shard(folder, place, count, read())
        except CheckpointError as error:
            failure = error
            break
    gathered = [(names, failure)] * groups.mesh.size
    dist.all_gather_object(gathered, (names, failure))
    failed = next((error for _, error in gathered if error is not None), None)
    if failed is not None:
        raise failed
    return {name: file for part, _ in gathered for name, file in part.items()}


def _shards(
    pipeline: Any, specs: Sequence[ParamSpec], keep: Callable[[ParamSpec], bool], shard_bytes: int | None
) -> list[int]:
    """How many of this stage's tensors go into each of its files, in their order."""
    sizes = [
        spec_of(parameter).numel * parameter.element_size()
        for parameter in pipeline.chunks.parameters()
        if keep(spec_of(parameter)) and not getattr(parameter, "ds_pipe_replicated", False)
    ]
    sizes += [spec.numel * buffer.element_size() for spec, buffer in _buffers(pipeline, specs)]
    shards, filled = list[int](), 0
    for size in sizes:
        if not shards or (shard_bytes is not None and filled + size > shard_bytes):
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
    names, and the generation settings of the folder that ``dsx.model.path`` names. Of a model with an
    adapter what is trained is written, in the folder that ``PeftModel.from_pretrained`` reads, with the
    tokenizer. A collective call over all ranks; the folder appears whole or not at all.

    Args:
        engine: An engine of a model that dsx made of a config, trained or not, in any layout.
        folder: Where to write; must not exist with other content.
        config: The Hugging Face config to write; that of the dsx config by default, which the engine knows
            if :func:`dsx.initialize` was given it.

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
    within = None if run is None else composite_at(run.weights, tower=bool(tower_specs(run.model)))
    if run is not None and run.model.adapter is not None:
        modules = (composite_fact(run) or {}).get("modules")
        folder = export_adapter(engine.pipeline, folder, run.model, run.dsx.model.path, modules)
    else:
        folder = export_weights(engine.pipeline, folder, dict(config), model, within=within)
    if run is not None:
        data, source = run.dsx.data, run.dsx.model.path
        agree(lambda: copy_tokenizer(data.tokenizer, folder, trust_remote_code=data.trust_remote_code))
        if source is not None and run.model.adapter is None:
            files = {GENERATION} if within is None else TOKENIZER_FILES | PROCESSOR_FILES
            agree(lambda: _copy(Path(source), folder, files))
    return folder


def copy_tokenizer(name: str, folder: Path, *, trust_remote_code: bool = False) -> None:
    """Put the tokenizer called ``name`` into a model folder, so that ``AutoTokenizer`` finds it there.

    A folder's files are copied as they are, with the generation settings beside them, and with its Python
    files if its code is trusted. "bytes", which transformers does not have, and "none" leave nothing.
    """
    source = Path(name).expanduser()
    if source.is_dir():
        code = {path.name for path in source.iterdir() if trust_remote_code and path.suffix == ".py"}
        _copy(source, folder, TOKENIZER_FILES | code)
    elif name not in (BYTES, NO_TOKENIZER):
        TransformersTokenizer(name, trust_remote_code=trust_remote_code).save(folder)


def _copy(source: Path, folder: Path, names: Collection[str]) -> None:
    for file in sorted(path for path in source.iterdir() if path.is_file() and path.name in names):
        store.write_atomically(folder / file.name, file.read_bytes())


def _whole(local: torch.Tensor, spec: ParamSpec, groups: Groups) -> torch.Tensor:
    """Assemble a logical tensor from the parts of a replica's ranks, on the first of them."""
    mesh, held = groups.mesh, local.contiguous()[None]
    tensor = mesh.tp if spec.split is not None else 1
    expert = mesh.ep if spec.experts is not None else 1
    for degree, group in ((tensor, groups.tensor), (expert, groups.experts)):
        if degree > 1:
            every = [torch.empty_like(held) for _ in range(degree)]
            dist.all_gather(every, held, group=group)
            held = torch.cat(every)
    if groups.tp_rank != 0 or groups.replica != 0:
        return torch.empty(0)
    places = Mesh.of(tp=tensor, dp=expert, ep=expert)
    return slices.merge(spec, [*held.cpu()], [places.at(rank) for rank in range(places.size)]).clone()
