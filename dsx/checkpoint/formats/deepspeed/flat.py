"""Which part of which local tensor lies where in a stock DeepSpeed checkpoint's files.

Over which ranks ZeRO-3 divided each parameter: those of its data-parallel group, or all.

A model that is made under ``deepspeed.zero.Init``, before AutoTP has its groups, is divided over all ranks.
AutoTP then divides anew, over data parallelism, what it cuts; everything else stays divided over all, in
sub-groups of its own (deepspeed/runtime/zero/partition_parameters.py:1094; stage3.py,
``_get_trainable_parameter_groups``). The files do not say which is which, but the sizes of the parts do.

Stages 1 and 2, and BF16_Optimizer: the parameters of a group, in the order of ``param_shapes``, lie end to
end (each followed by its ``param_alignment_paddings``), and data-parallel rank d has the d-th of dp equal
parts (stage_1_and_2.py, ``state_dict``). The fp32 part is saved without its padding, the moments with it; or
without, in the elastic form, where the states are a list.

Stage 3: of every parameter rank d has the d-th of dp parts of ceil(numel / dp) elements, or each rank has one
(:func:`over_all_ranks`); those of a sub-group lie end to end (stage3.py, ``_rigid_state_dict``).

Stage 0: the optimizer's own state dict, by the number of the parameter
(:mod:`dsx.checkpoint.formats.deepspeed.order` finds names).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from dsx.checkpoint.catalog import USE_ANOTHER, unusable
from dsx.checkpoint.formats.deepspeed.files import StockFiles, config_of
from dsx.checkpoint.formats.torch_file import TensorRef, TorchFile
from dsx.errors import CheckpointError
from dsx.models.param import ITEM_BYTES
from dsx.parallel.zero import part_numel, part_of


def numbers_of(state: Mapping[str, Any], group: Mapping[str, Any], file: TorchFile) -> dict[str, float]:
    """The states of one parameter that are one number for all of it; FusedAdam has ``step`` in its group."""
    found = {"step": group.get("step")}
    found |= {str(key): value for key, value in state.items() if _is_number(value)}
    return {key: number for key, value in found.items() if (number := number_of(value, file)) is not None}


def number_of(value: Any, file: TorchFile) -> float | None:
    """A number that a file has as such or as a tensor; None if there is none."""
    if isinstance(value, TensorRef):
        return file.value(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_number(value: Any) -> bool:
    """Whether a state is one number: torch's optimizers have them as tensors without dims."""
    return not value.shape if isinstance(value, TensorRef) else type(value) in (int, float)


def over_all_ranks(
    sizes: Sequence[int], shapes: Sequence[Iterable[Sequence[int]]], *, replicas: int, shards: int
) -> list[bool]:
    """Whether the parameters that have a part in each buffer are divided over all ranks.

    Where both divisions give parts of one size (parameters of a few elements), the other buffers decide: a
    model is made in one way.

    Args:
        sizes: Elements of each buffer on one rank.
        shapes: Local shapes of those parameters.
        replicas: Data-parallel degree.
        shards: Tensor-parallel degree.

    >>> over_all_ranks([6, 12, 1], [[(24,)], [(24,)], [(2,)]], replicas=2, shards=2)
    [True, False, True]
    """
    found: list[bool | None] = []
    for size, held in zip(sizes, map(tuple, shapes), strict=True):
        own = sum(part_numel(prod(shape), replicas) for shape in held)
        every = sum(part_numel(prod(shape), replicas * shards) for shape in held)
        found.append(size == every if own != every else None)
    return [any(found) if one is None else one for one in found]


Places = Mapping[str, tuple[int, int]]
"""Two numbers for every name."""


def in_turns_undone(group: Mapping[str, tuple[int, ...]], turns: int) -> Mapping[str, tuple[int, ...]]:
    """The optimizer's order of a group whose flat order takes every ``turns``-th parameter first."""
    numbers = [number for first in range(turns) for number in range(first, len(group), turns)]
    placed = sorted(zip(numbers, group.items(), strict=True))
    return dict(item for _, item in placed)


def spans(shapes: Mapping[str, tuple[int, ...]], gaps: Sequence[int]) -> Places:
    """(first element, the one after the last) of every parameter of a group."""
    found, end = {}, 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        found[name] = (end, end + prod(shape))
        end += prod(shape) + gap
    return found


def held(spans: Places, low: int, high: int) -> Places:
    """(start, elements) in a rank's part, from ``low`` to ``high``, of every parameter that is in it."""
    inside = {name: (max(low, start), min(high, stop)) for name, (start, stop) in spans.items()}
    return {name: (start - low, stop - start) for name, (start, stop) in inside.items() if start < stop}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """Elements ``start`` to ``stop`` of one state of a flattened local tensor, as they lie in a file.

    Attributes:
        name: DeepSpeed's name of the parameter.
        state: master, exp_avg, ...
        shape: Of the local tensor.
        dtype: As torch names it.
        stop: The element after the last.
        offset: Byte of the first element.
        strides: Of the local tensor in the file, where it is whole and not row-major; else None.
        over_all: Every rank has a part of it, those of other tensor-parallel ranks too.
        expert: Which of the ranks that hold a stack of experts together has it.
    """

    name: str
    state: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    file: str
    offset: int
    strides: tuple[int, ...] | None = None
    over_all: bool = False
    expert: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroup:
    """An optimizer's parameter group on one model-parallel rank.

    Attributes:
        names: DeepSpeed's names, in the optimizer's order.
        settings: Hyperparameters as the file has them.
        numbers: States that are one number for all of a parameter, by state and name; ``step`` is one.
    """

    names: tuple[str, ...]
    settings: Mapping[str, Any]
    file: TorchFile
    numbers: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The optimizer's share of one model-parallel rank, over all data-parallel ranks."""

    fragments: tuple[Fragment, ...]
    groups: tuple[OptimizerGroup, ...]


def sharded_state(
    files: StockFiles, rank: int, weights: Mapping[str, tuple[int, ...]], experts: int = 1
) -> OptimizerState:
    """The optimizer state of model-parallel ``rank`` under ZeRO or BF16_Optimizer.

    ``weights`` has the local shape of every one that is stored: BF16_Optimizer at stage 0 writes no others.
    ``experts`` is over how many neighbours DeepSpeed has its groups of experts (``moe``).
    """
    model = files.models[rank, 0]
    states = [_Saved.of(files.optimizers[rank, replica]) for replica in files.replicas]
    first = states[0]
    # Per group (stage 3: per sub-group) name -> local shape, in flat order; a dict: DeepSpeed before 0.5.4.
    told = model.content.get("param_shapes") or _mapped_shapes(states, weights)
    shapes: list[Mapping[str, tuple[int, ...]]] = [told] if isinstance(told, dict) else list(told)
    settings = config_of(model.content).get("zero_optimization") or {}
    turns = len(files.replicas) if isinstance(settings, dict) and settings.get("round_robin_gradients") else 1
    fragments: list[Fragment] = []
    if first.per_parameter:
        fragments += _per_parameters(files, states, shapes)
    else:
        for number, group in enumerate(shapes):
            ranks = experts if number < len(first.flats) and first.settings_of(number).get("moe") else 1
            for at in range(ranks) if group else ():
                own = _per_group(states[at::ranks], number, group, turns)
                fragments += (replace(one, expert=at) for one in own)
    if not first.per_parameter and turns > 1:
        shapes = [in_turns_undone(group, turns) for group in shapes]
    return OptimizerState(tuple(fragments), tuple(_groups(first, shapes)))


def whole(ref: TensorRef, file: TorchFile, name: str, state: str) -> Fragment:
    """A tensor that a file holds whole."""
    strides = None if ref.contiguous else ref.strides
    return Fragment(
        name=name,
        state=state,
        shape=ref.shape,
        dtype=ref.dtype,
        start=0,
        stop=ref.numel,
        file=file.name,
        offset=ref.offset,
        strides=strides,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """One optimizer file, its several forms made one."""

    file: TorchFile
    flats: Sequence[TensorRef]
    states: Mapping[int, Mapping[str, Any]]
    param_groups: Sequence[Mapping[str, Any]]
    paddings: Sequence[int]
    alignment: Sequence[Sequence[int]]
    mappings: Sequence[Mapping[str, Any]]
    per_parameter: bool
    unpadded: bool

    @classmethod
    def of(cls, file: TorchFile) -> _Saved:
        content = file.content.get("optimizer_state_dict")
        if not isinstance(content, dict):
            raise unusable(str(file.path), "it has no optimizer_state_dict")
        per_parameter = "fp32_flat_groups" in content
        flats = content.get("fp32_flat_groups" if per_parameter else "single_partition_of_fp32_groups")
        base = content.get("optimizer_state_dict" if per_parameter else "base_optimizer_state")
        if not isinstance(flats, list) or not isinstance(base, list | dict):
            raise unusable(str(file.path), f"an optimizer's file of unknown form: {sorted(content)}")
        step = content.get("base_optimizer_state_step")
        if isinstance(base, list):  # elastic: a list of states, without padding, and no hyperparameters
            states = {
                number: {**({} if step is None else {"step": step}), **one} for number, one in enumerate(base)
            }
            groups: Sequence[Mapping[str, Any]] = [{"params": [number]} for number in states]
        else:
            states, groups = base["state"], base["param_groups"]
        return cls(
            file=file,
            flats=flats,
            states=states,
            param_groups=groups,
            paddings=content.get("group_paddings") or [0] * len(flats),
            alignment=content.get("param_alignment_paddings") or [],
            mappings=content.get("param_slice_mappings") or [],
            per_parameter=per_parameter,
            unpadded="zero_stage" in content,  # BF16_Optimizer saves its parts as they are
        )

    def tensors(self, number: int) -> Iterator[tuple[str, TensorRef]]:
        """Every state of a flat buffer; the fp32 values are called master."""
        yield "master", self.flats[number]
        for state, value in self.states.get(self.key(number), {}).items():
            if isinstance(value, TensorRef) and value.shape:
                yield str(state), value

    def key(self, number: int) -> int:
        """The optimizer's number of a flat buffer. A buffer of its own group is the group's only one."""
        if self.per_parameter:
            return number
        params = self.param_groups[number].get("params", [number])
        return int(params[0]) if params else number

    def numbers(self, number: int) -> dict[str, float]:
        """The optimizer's states of a flat buffer that are one number."""
        held = self.states.get(self.key(number), {})
        return numbers_of(held, self.settings_of(number), self.file)

    def settings_of(self, number: int) -> Mapping[str, Any]:
        """Hyperparameters of a flat buffer's group."""
        return self.param_groups[self.group_of(number)]

    def group_of(self, number: int) -> int:
        if not self.per_parameter:
            return number
        return next(at for at, group in enumerate(self.param_groups) if number in group["params"])


def _mapped_shapes(
    states: Sequence[_Saved], weights: Mapping[str, tuple[int, ...]]
) -> list[Mapping[str, tuple[int, ...]]]:
    """Flat order by ``param_slice_mappings``, shapes by the weights."""
    first = states[0]
    if len(first.mappings) != len(first.flats):
        raise unusable(str(first.file.path), "neither param_shapes nor param_slice_mappings name its tensors")
    found: list[Mapping[str, tuple[int, ...]]] = []
    for number in range(len(first.flats)):
        order = [
            name
            for saved in states
            for name, _ in sorted(
                saved.mappings[number].items(), key=lambda item: int(item[1].state["start"])
            )
        ]
        unknown = next((name for name in order if name not in weights), None)
        if unknown is not None:
            raise unusable(f"{first.file.path}: tensor {unknown}", "no file has its weight, and so its shape")
        found.append({name: weights[name] for name in order})
    return found


def mapped(file: TorchFile) -> Iterator[tuple[str, int]]:
    """Names and numbers of elements that ``param_slice_mappings`` gives for one rank."""
    for group in _Saved.of(file).mappings:
        for name, one in group.items():
            yield str(name), int(one.state["numel"])


def _per_group(
    states: Sequence[_Saved], number: int, shapes: Mapping[str, tuple[int, ...]], turns: int
) -> Iterator[Fragment]:
    first = states[0]
    if number >= len(first.flats):
        raise unusable(str(first.file.path), f"it lacks optimizer group {number}")
    gaps = first.alignment[number] if number < len(first.alignment) else [0] * len(shapes)
    if len(gaps) != len(shapes):
        raise CheckpointError(
            f"{first.file.path}: optimizer group {number}",
            f"it has {len(gaps)} parameters, {len(shapes)} by param_shapes",
            "use the files of one save",
        )
    size = first.flats[number].numel + (first.paddings[number] if first.unpadded else 0)
    found = spans(shapes, gaps)
    _check_size(states, number, size, max(stop for _, stop in found.values()) + gaps[-1])
    # deepspeed 0.19.8 writes the mapping of round-robin groups in the order that they do not have, unless it
    # aligns parameters (stage_1_and_2.py, _link_all_hp_params); where the elements lie, param_shapes says.
    others = {} if turns == 1 or any(gaps) else spans(in_turns_undone(shapes, turns), gaps)
    for rank, saved in enumerate(states):
        low, high = rank * size, (rank + 1) * size
        mine = held(found, low, high)
        _check_mapping(saved, number, mine, held(others, low, high) if others else mine)
        for name, (at, numel) in mine.items():
            start = low + at - found[name][0]
            yield from _fragments(saved, number, name, tuple(shapes[name]), (start, start + numel), at)


def _per_parameters(
    files: StockFiles, states: Sequence[_Saved], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> Iterator[Fragment]:
    """Every sub-group of stage 3. AutoTP's ranks count tensor parallelism fastest."""
    flats = states[0].flats
    sizes = [flats[number].numel if number < len(flats) else 0 for number in range(len(shapes))]
    everywhere = over_all_ranks(sizes, [group.values() for group in shapes], **files.degrees)
    world = [_Saved.of(files.optimizers[at, replica]) for replica in files.replicas for at in files.shards]
    for number, (group, over_all) in enumerate(zip(shapes, everywhere, strict=True)):
        found = _per_parameter(world if over_all else states, number, group) if group else ()
        yield from (replace(one, over_all=over_all) for one in found)


def _per_parameter(
    states: Sequence[_Saved], number: int, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Fragment]:
    sizes = {name: part_numel(prod(shape), len(states)) for name, shape in shapes.items()}
    for rank, saved in enumerate(states):
        if number >= len(saved.flats) or saved.flats[number].numel != sum(sizes.values()):
            have = saved.flats[number].numel if number < len(saved.flats) else "none"
            raise CheckpointError(
                f"{saved.file.path}: sub-group {number}",
                f"it has {have} elements, {sum(sizes.values())} were expected"
                + (": they were swapped out to NVMe" if have == 0 else ""),
                "save it without NVMe offload" if have == 0 else USE_ANOTHER,
            )
        offset = 0
        for name, shape in shapes.items():
            start, stop = part_of(prod(shape), len(states), rank)
            if start < stop:
                yield from _fragments(saved, number, name, tuple(shape), (start, stop), offset)
            offset += sizes[name]


def _fragments(
    saved: _Saved,
    number: int,
    name: str,
    shape: tuple[int, ...],
    interval: tuple[int, int],
    at: int,
) -> Iterator[Fragment]:
    """One parameter's part of every state of a flat buffer; ``at`` is its first element there."""
    start, stop = interval
    flat = saved.flats[number].numel
    sizes = (flat, flat + (saved.paddings[number] if number < len(saved.paddings) else 0))
    is_muon = bool(saved.settings_of(number).get("use_muon"))
    for state, ref in saved.tensors(number):
        if (
            len(ref.shape) != 1
            or at + stop - start > ref.numel
            or not ref.contiguous
            or ref.numel not in sizes
        ):
            raise CheckpointError(
                f"{saved.file.path}: tensor {name}, {state}",
                f"its elements {at} to {at + stop - start} do not lie in a flat buffer {ref.shape} as the "
                f"master's do in one of {flat}" + (": Muon keeps whole tensors" if is_muon else ""),
                "save it with one data-parallel rank" if is_muon else USE_ANOTHER,
            )
        yield Fragment(
            name=name,
            state=state,
            shape=shape,
            dtype=ref.dtype,
            start=start,
            stop=stop,
            file=saved.file.name,
            offset=ref.offset + at * ITEM_BYTES[ref.dtype],
        )


def _check_size(states: Sequence[_Saved], number: int, size: int, needed: int) -> None:
    """Prove that all ranks' parts are equal (with padding) and together hold the group."""
    for saved in states:
        one = saved.flats[number].numel + (saved.paddings[number] if saved.unpadded else 0)
        if one != size or size * len(states) < needed:
            raise CheckpointError(
                f"{saved.file.path}: optimizer group {number}",
                f"it has {one} elements with padding, the first rank {size}; the {len(states)} ranks must "
                f"hold {needed}",
                "use the files of one save",
            )


def _check_mapping(saved: _Saved, number: int, expected: Places, other: Places) -> None:
    """Compare with ``param_slice_mappings``, (start, numel) in the rank's flat buffer, where it is there."""
    if number >= len(saved.mappings):
        return
    told = {
        name: (int(one.state["start"]), int(one.state["numel"]))
        for name, one in saved.mappings[number].items()
    }
    if told == other:
        return
    for name in sorted(told.keys() | expected.keys()):
        if told.get(name) != expected.get(name):
            raise CheckpointError(
                f"{saved.file.path}: tensor {name}",
                f"param_slice_mappings has it at (start, elements) {told.get(name)}, param_shapes at "
                f"{expected.get(name)}",
                "use the files of one save, as DeepSpeed has written them",
            )


def _groups(saved: _Saved, shapes: Sequence[Mapping[str, Any]]) -> Iterator[OptimizerGroup]:
    for place, settings in enumerate(saved.param_groups):
        numbers = [n for n in range(len(shapes)) if n < len(saved.flats) and saved.group_of(n) == place]
        kept: dict[str, dict[str, float]] = defaultdict(dict)
        for n in numbers:
            for state, value in saved.numbers(n).items():
                kept[state].update(dict.fromkeys(shapes[n], value))
        yield OptimizerGroup(
            names=tuple(name for n in numbers for name in shapes[n]),
            settings={key: value for key, value in settings.items() if key != "params"},
            file=saved.file,
            numbers=kept,
        )
