"""A run's weights in terms of logical (global) tensors, and what of them this rank stores and wants back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Catalog, numbers_in
from dsx.checkpoint.formats import slices
from dsx.checkpoint.formats.huggingface import weights as hf
from dsx.checkpoint.pieces import Part, local_parts
from dsx.checkpoint.plain import as_numpy
from dsx.checkpoint.read import Reader
from dsx.config.schema import NO_TOKENIZER
from dsx.config.sources import BYTES
from dsx.data.tokenizers import TransformersTokenizer
from dsx.engine.zero.held import Span, held, trained_parameters
from dsx.errors import CheckpointError, ModelError
from dsx.launch.processes import agree
from dsx.models.param import Init, ParamSpec

if TYPE_CHECKING:
    from dsx.engine.engine import PipelineEngine
    from dsx.engine.pipeline_module import PipelineModule
    from dsx.parallel.groups import Groups


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
    "generation_config.json",
}


@contextmanager
def layer_weights(
    folder: str | Path, specs: Sequence[ParamSpec], groups: Groups
) -> Iterator[Callable[[int, nn.Module], None]]:
    """What gives layers of dsx's families the weights of a Hugging Face folder, one by one.

    It is for ``load_layer`` of :class:`~dsx.PipelineModule`. Each rank reads only its own slices, and maps
    the files for one layer at a time. A collective call over all ranks.

    Args:
        folder: The Hugging Face model folder.
        specs: Every tensor of the model, which the folder must hold, and nothing else.
        groups: This rank's process groups.

    Raises:
        CheckpointError: The folder lacks a tensor, has another, or one has another shape.
    """
    agree(lambda: _check(folder, specs))
    with hf.open_weights(folder) as weights:

        @torch.no_grad()
        def load(_index: int, layer: nn.Module) -> None:
            for parameter in layer.parameters():
                parameter.copy_(weights.read(spec_of(parameter), groups.mesh.tp, groups.tp_rank))
            # Pages of a file that is mapped count as this process's memory until it is closed.
            weights.close()

        yield load


def logical_tensors(pipeline: PipelineModule) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
    """This stage's logical tensors one by one, whole, on the CPU. A collective call over the stage's ranks.

    A tied tensor is given once, by the first stage that holds it. Only the rank at dp 0 and tp 0 of each
    stage gets the contents; the others get an empty tensor.
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
            if pipeline.groups.dp_rank == 0:
                whole = _whole(parameter.detach(), spec, pipeline.groups)
            yield spec, whole


def export_weights(pipeline: PipelineModule, folder: str | Path, config: dict[str, Any]) -> Path:
    """Write a Hugging Face model folder: one safetensors file per pipeline stage, an index and the config.

    A collective call over all ranks. The folder appears whole or not at all.

    Args:
        pipeline: A module of dsx's families, trained or not.
        folder: Where to; must not exist with other content.
        config: The Hugging Face config.json to write.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    groups, folder = pipeline.groups, Path(folder)
    tensors = {}
    writer = groups.dp_rank == 0 and groups.tp_rank == 0
    for spec, tensor in logical_tensors(pipeline):
        if writer:
            tensors.update(hf.split(spec, tensor))
    names: dict[str, str] = {}
    if writer:
        names = hf.write_shard(folder, groups.pp_rank, groups.mesh.pp, tensors)
    gathered: list[dict[str, str]] = [{} for _ in range(groups.mesh.size)]
    dist.all_gather_object(gathered, names)
    if groups.rank == 0:
        hf.finish(folder, config, {name: file for part in gathered for name, file in part.items()})
    dist.barrier()
    return folder


def export_hf(engine: PipelineEngine, folder: str | Path, *, config: Mapping[str, Any] | None = None) -> Path:
    """Write an engine's weights as a Hugging Face model folder, which ``from_pretrained`` reads.

    Beside ``config.json`` and the safetensors, one per pipeline stage, stand the files of the tokenizer that
    ``dsx.data.tokenizer`` names. A collective call over all ranks; the folder appears whole or not at all.

    Args:
        engine: Of a model of dsx's families, trained or not, in any layout.
        folder: Where to; must not exist with other content.
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
    folder = export_weights(engine.pipeline, folder, dict(config))
    if run is not None:
        data = run.dsx.data
        agree(lambda: copy_tokenizer(data.tokenizer, folder, trust_remote_code=data.trust_remote_code))
    return folder


def copy_tokenizer(name: str, folder: Path, *, trust_remote_code: bool = False) -> None:
    """Put the tokenizer called ``name`` into a model folder, so that ``AutoTokenizer`` finds it there.

    From a folder its files come as they are, with the generation settings beside them, and with its Python
    files if its code is trusted; "bytes", which transformers does not have, and "none" leave nothing.

    Raises:
        CheckpointError: A file cannot be written.
    """
    source = Path(name).expanduser()
    if source.is_dir():
        for file in sorted(path for path in source.iterdir() if path.is_file()):
            if file.name in _TOKENIZER_FILES or (trust_remote_code and file.suffix == ".py"):
                store.write_atomically(folder / file.name, file.read_bytes())
    elif name not in (BYTES, NO_TOKENIZER):
        TransformersTokenizer(name, trust_remote_code=trust_remote_code).save(folder)


def spec_of(parameter: nn.Parameter) -> ParamSpec:
    """The logical tensor that ``parameter`` is a part of. Raises ModelError for layers that are not dsx's."""
    spec = getattr(parameter, "dsx_spec", None)
    if not isinstance(spec, ParamSpec):
        raise ModelError(
            f"parameter of shape {tuple(parameter.shape)}",
            "it has no logical description, so that it cannot be read or written by name",
            "use dsx's own model families for Hugging Face weights",
        )
    return spec


def _check(folder: str | Path, specs: Sequence[ParamSpec]) -> None:
    with hf.open_weights(folder) as weights:
        weights.check(specs)


def _whole(local: torch.Tensor, spec: ParamSpec, groups: Groups) -> torch.Tensor:
    """Assemble a logical tensor from its tensor-parallel parts, on tp rank 0."""
    shards = [local]
    if spec.split is not None and groups.mesh.tp > 1:
        shards = [torch.empty_like(local) for _ in range(groups.mesh.tp)]
        dist.all_gather(shards, local.contiguous(), group=groups.tensor)
    if groups.tp_rank != 0:
        return torch.empty(0)
    return slices.merge(spec, [shard.to("cpu", copy=True) for shard in shards])


MASTER, WEIGHT = "master", "weight"
Role = Literal["trained", "frozen", "buffer"]


@dataclass(frozen=True, slots=True)
class Content:
    """One state of one logical tensor in a flat tensor.

    Attributes:
        spec: The logical tensor.
        state: master, weight, exp_avg, ...
        role: What it is to training.
        parts: Boxes of it, and where they lie.
    """

    spec: ParamSpec
    state: str
    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A flat tensor and what it holds; elements of no part are padding.

    Attributes:
        values: One dim, the run's own memory.
        contents: What it holds.
        computes_as_master: The weights that the model computes with are as wide as their masters.
    """

    values: torch.Tensor
    contents: tuple[Content, ...]
    computes_as_master: bool = False

    @property
    def dtype(self) -> str:
        """As torch names it."""
        return str(self.values.dtype).removeprefix("torch.")


class Names:
    """Logical tensors of a rank's parameters and buffers.

    Tensor-parallel ranks hold the same of what a layer that is not dsx's does not mark as cut
    (``tensor_model_parallel``). What it does mark is cut in an unknown way: each rank's is a tensor of its
    own, which only the same tensor-parallel degree can load.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._groups = engine.groups
        self._names: dict[int, str] = {}
        for name, parameter in engine.pipeline.chunks.named_parameters():
            self._names.setdefault(id(parameter), name)

    def of(self, parameter: nn.Parameter) -> ParamSpec:
        """The logical tensor of a parameter."""
        spec = getattr(parameter, "dsx_spec", None)
        if isinstance(spec, ParamSpec):
            return spec
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        return self.local(self._names[id(parameter)], shape, parameter)

    def local(self, name: str, shape: tuple[int, ...], tensor: torch.Tensor) -> ParamSpec:
        """A tensor that is whole as it is."""
        cut = self._groups.mesh.tp > 1 and getattr(tensor, "tensor_model_parallel", False)
        here = f"{name}@tp{self._groups.tp_rank}" if cut else name
        return ParamSpec(name=here, layer=0, shape=shape, init=Init(kind="zeros"), hf=(here,))

    def parts(self, spec: ParamSpec, start: int, stop: int, offset: int) -> tuple[Part, ...]:
        """Elements ``start`` to ``stop`` of a local tensor that lie at ``offset`` of a flat one."""
        tp = (self._groups.mesh.tp, self._groups.tp_rank) if spec.split is not None else (1, 0)
        shift = offset - start
        return tuple(
            Part(part.start, part.shape, part.strides, part.flat + shift)
            for part in local_parts(spec, *tp, start, stop)
        )


def names_here(engine: PipelineEngine) -> list[str]:
    """This rank's tensors in the order of the model."""
    names = Names(engine)
    return [names.of(parameter).name for parameter in engine.pipeline.chunks.parameters()]


def stored_here(engine: PipelineEngine, *, everything: bool = False) -> Iterator[Stored]:
    """This rank's share of the checkpoint: every element of every state is some rank's, once.

    Args:
        engine: The run.
        everything: Also what another rank stores: what this rank must get back.
    """
    groups, names = engine.groups, Names(engine)
    optimizer, partitioned = held(engine.deepspeed_engine), engine.zero_optimization_stage() > 0
    turn = 0
    for kept in optimizer:
        states = {MASTER: kept.master.detach().view(-1), **kept.moments()}
        mine: list[tuple[Span, ParamSpec]] = []
        for span in kept.spans:
            spec = names.of(span.parameter)
            turn += 1
            if everything or _is_writer(span.parameter, spec, turn, groups, partitioned=partitioned):
                mine.append((span, spec))
        for state, values in states.items():
            contents = tuple(
                Content(spec, state, "trained", names.parts(spec, span.start, span.stop, span.offset))
                for span, spec in mine
            )
            if contents:
                same = all(span.parameter.dtype == kept.master.dtype for span in kept.spans)
                yield Stored(values, contents, same)
    yield from _untrained(engine, names, everything)


def load_stored(engine: PipelineEngine, catalog: Catalog) -> int:
    """Fill masters, moments, frozen weights and buffers from a checkpoint of any layout.

    Each rank reads what it holds, and nothing else. Weights are still to be made of the masters.

    Returns:
        Bytes of tensors that this rank read.

    Raises:
        CheckpointError: The checkpoint lacks a tensor, a state or a part of one, or is damaged.
    """
    groups = catalog.facts.get("param_groups") or ()
    numbers = {name: numbers_in(group, name) for group in groups for name in group.get("names", ())}
    moments = sorted({entry.state for entry in catalog.entries} - {MASTER, WEIGHT})
    names = Names(engine)
    for kept in held(engine.deepspeed_engine):
        found: dict[str, set[float]] = defaultdict(set)
        for span in kept.spans:
            for state, number in numbers.get(names.of(span.parameter).name, {}).items():
                found[state].add(number)
        kept.make(moments, {state: _one_of(catalog, state, values) for state, values in found.items()})
    frozen = {names.of(p).name for p in engine.pipeline.chunks.parameters() if not p.requires_grad}
    with Reader.open(catalog) as reader, torch.no_grad():
        for stored in stored_here(engine, everything=True):
            for content in stored.contents:
                _fill(reader, stored, content, frozen=content.spec.name in frozen)
        return reader.read_bytes


def _fill(reader: Reader, stored: Stored, content: Content, *, frozen: bool) -> None:
    """Read one content. Of a frozen parameter a layout keeps master and moments, or the weight alone."""
    name, state = content.spec.name, content.state
    where = f"{reader.catalog.root}: tensor {name}, {state}"
    entry, weight = reader.find(name, state), reader.find(name, WEIGHT)
    if entry is None and weight is not None:
        if frozen:
            low, high = extent(content.parts)
            stored.values[low:high].zero_()
            return
        if weight.role == "frozen":
            raise CheckpointError(
                where,
                "this parameter was frozen when the checkpoint was written, and is trained here",
                "freeze it, as it was (requires_grad_(False))",
            )
    if entry is None:
        raise CheckpointError(
            where, "the checkpoint has no such tensor", "give the model that it was trained with (dsx.model)"
        )
    if entry.shape != content.spec.shape:
        raise CheckpointError(
            where,
            f"its shape is {entry.shape} there, {content.spec.shape} here",
            "give the model that the checkpoint was trained with (dsx.model), or another checkpoint",
        )
    on_host = stored.values.device.type == "cpu"
    low, high = extent(content.parts)
    view = stored.values[low:high]
    host = view if on_host else view.cpu()
    parts = tuple(Part(p.start, p.shape, p.strides, p.flat - low) for p in content.parts)
    reader.fill(entry, parts, as_numpy(host), stored.dtype)
    if not on_host:
        view.copy_(host)


def extent(parts: Sequence[Part]) -> tuple[int, int]:
    """First element of parts in their flat tensor, and the one after the last."""
    ends = [
        part.flat + sum((size - 1) * step for size, step in zip(part.shape, part.strides, strict=True)) + 1
        for part in parts
    ]
    return min((part.flat for part in parts), default=0), max(ends, default=0)


def _is_writer(
    parameter: nn.Parameter, spec: ParamSpec, turn: int, groups: Any, *, partitioned: bool
) -> bool:
    """Of the ranks that hold the same elements, the writers take turns, parameter by parameter."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    if not _is_cut(spec) and groups.mesh.tp > 1 and turn % groups.mesh.tp != groups.tp_rank:
        return False
    return partitioned or turn // groups.mesh.tp % groups.mesh.dp == groups.dp_rank


def _is_cut(spec: ParamSpec) -> bool:
    """Whether tensor-parallel ranks hold different parts of it."""
    return spec.split is not None or "@tp" in spec.name


def _untrained(engine: PipelineEngine, names: Names, everything: bool) -> Iterator[Stored]:
    """Frozen parameters, as ZeRO-3 has cut them, and buffers that a module's state dict has."""
    chunks, groups = engine.pipeline.chunks, engine.groups
    trained = {id(parameter) for parameter in trained_parameters(engine.deepspeed_engine)}
    frozen: Any
    for frozen in chunks.parameters():
        if id(frozen) in trained:
            continue
        spec = names.of(frozen)
        cut = hasattr(frozen, "ds_id")
        if not (everything or _is_writer(frozen, spec, 0, groups, partitioned=cut)):
            continue
        if cut:
            size = frozen.partition_numel()
            start, numel = groups.dp_rank * size, int(frozen.ds_numel)
            stop = min(start + size, numel)
            values = frozen.ds_tensor.detach().view(-1)
        else:
            start, stop, values = 0, frozen.numel(), frozen.detach().view(-1)
        if start < stop:
            yield Stored(values, (Content(spec, WEIGHT, "frozen", names.parts(spec, start, stop, 0)),))
    kept = chunks.state_dict(keep_vars=True)
    for name, buffer in chunks.named_buffers():
        spec = names.local(name, tuple(buffer.shape), buffer)
        mine = groups.dp_rank == 0 and (groups.tp_rank == 0 or _is_cut(spec))
        if name in kept and buffer.numel() and (everything or mine):
            parts = names.parts(spec, 0, buffer.numel(), 0)
            yield Stored(buffer.detach().view(-1), (Content(spec, WEIGHT, "buffer", parts),))


def _one_of(catalog: Catalog, state: str, values: set[float]) -> float:
    """What a buffer of several tensors keeps once; steps differ where some had no gradients at first."""
    if state != "step" and len(values) > 1:
        raise CheckpointError(
            f"{catalog.root}: {state} of the optimizer",
            f"tensors that ZeRO keeps in one buffer here have different ones: {sorted(values)}",
            "load it with ZeRO 0 or 3, or train those tensors in optimizer groups of their own",
        )
    return max(values)
