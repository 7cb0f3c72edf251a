"""What a tensor plan does not say, found out by what a block computes with the sizes of one rank.

The block runs on the meta device, its linears and parameters cut as for one of a few ranks. Operators are
watched: what comes of a cut linear's outputs or of a cut parameter is one rank's own, until a row-parallel
linear sums it. A parameter that meets such values has a part of its gradient on each rank, and so has what
the region is given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dsx.hub.model_structure import BlockCall, without_storage
from dsx.hub.tensor_plan import (
    COLUMN,
    GATHERS,
    ROW,
    SPLITS,
    SUMMED,
    BlockPlan,
    children,
    divide,
    is_mixer,
    is_region,
    segments_in,
)
from dsx.models.transformers_settings import torch_forms

RANKS = (2, 3, 5, 7)
"""Numbers of ranks that a region is looked at with: the first that its heads, which may be odd, divide by."""


_DTYPES = torch.bfloat16, torch.float32  # experts run in the first alone, some mixtures in the second


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of a value.

    Attributes:
        own: Whether ranks have different parts of it.
        summand: Whether it is, on each rank, a summand of what it stands for.
        parameters: Paths of parameters without a place in the plan that it is made of.
        of_input: Whether it depends on what the block is given.
    """

    own: bool = False
    summand: bool = False
    parameters: frozenset[str] = frozenset()
    of_input: bool = False

    def __or__(self, other: Kind) -> Kind:
        return Kind(
            self.own or other.own,
            self.summand or other.summand,
            self.parameters | other.parameters,
            self.of_input or other.of_input,
        )


_PLAIN, _GIVEN = Kind(), Kind(of_input=True)
_OWN, _SUMMAND = Kind(own=True, of_input=True), Kind(own=True, summand=True, of_input=True)


@dataclass
class UnnamedUses:
    """What the parameters without a place in the plan met.

    Attributes:
        used: Those that were used at all.
        partial: Those that met values of one rank by themselves: their gradients are partial.
        lost: Those that met them in another way: what is given to them gets a wrong gradient too.
        given: Whether what the region is given met them by itself: its gradient is partial.
        whole: Linears cut by inputs that were given what every rank has whole.
    """

    used: set[str] = field(default_factory=set)
    partial: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    given: bool = False
    whole: set[str] = field(default_factory=set)


class _Splits(TorchDispatchMode):
    """Notes into which sizes dims of tensors are split, while it is told to."""

    def __init__(self, found: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.inside, self.found = False, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note the sizes of its results."""
        del types
        gave = func(*args, **(kwargs or {}))
        if self.inside and func in (torch.ops.aten.split_with_sizes.default, torch.ops.aten.split.Tensor):
            dim = (kwargs or {}).get("dim", args[2] if len(args) > 2 else 0)
            self.found.add(tuple(each.shape[dim] for each in gave))
        return gave

    def stand(self, *_: Any, inside: bool) -> None:
        """Say whether a mixer computes."""
        self.inside = inside


@contextmanager
def splits_in(block: nn.Module, found: set[tuple[int, ...]]) -> Iterator[None]:
    """Inside the context, note in ``found`` into which sizes a block's mixers split dims of tensors."""
    seen, handles = _Splits(found), list[Any]()
    for child in (child for _, child in children(block) if is_mixer(child)):
        handles.append(child.register_forward_pre_hook(partial(seen.stand, inside=True)))
        handles.append(child.register_forward_hook(partial(seen.stand, inside=False)))
    try:
        with seen:
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Watch(TorchDispatchMode):
    """Notes what every tensor is made of."""

    def __init__(self, unnamed: Mapping[int, str], sliced: set[int], rows: set[int]) -> None:
        super().__init__()
        self.seen, self.inside = UnnamedUses(), False
        self._unnamed, self._sliced, self._rows = unnamed, sliced, rows
        self._kinds: dict[int, tuple[Tensor, Kind]] = {}
        """With the tensor, so that its identity is not another's later."""

    def kind(self, tensor: Tensor) -> Kind:
        """What is known of a tensor."""
        if id(tensor) in self._unnamed:
            return Kind(parameters=frozenset((self._unnamed[id(tensor)],)))
        if id(tensor) in self._sliced:
            return Kind(own=True)
        held = self._kinds.get(id(tensor))
        return _PLAIN if held is None else held[1]

    def stand(self, *, inside: bool) -> None:
        """Say whether it is the region that computes."""
        self.inside = inside

    def mark(self, tensor: Tensor, kind: Kind) -> None:
        """Say what a tensor is."""
        self._kinds[id(tensor)] = tensor, kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note what its results are made of."""
        del types
        result = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        kinds = [self.kind(each) for each in given]
        total = _PLAIN
        for kind in kinds:
            total |= kind
        self.seen.used |= total.parameters
        if any(id(each) in self._rows for each in given):
            total |= _SUMMAND
        if total.own:
            # Nothing that one rank has for itself may be made of a value that all ranks share.
            for each, kind in zip(given, kinds, strict=True):
                if self.inside and not kind.own:
                    into = self.seen.lost if kind.of_input or total.summand else self.seen.partial
                    into |= kind.parameters
                    self.seen.given |= kind.of_input and each.is_floating_point()
            total = Kind(own=True, summand=total.summand, of_input=total.of_input)
        for each in tree_leaves(result):
            if isinstance(
                each, Tensor
            ):  # no gradient goes through whole numbers, as of chosen experts or tokens
                self.mark(each, total if each.is_floating_point() else Kind(own=total.own))
        if func._schema.is_mutable and given:  # noqa: SLF001
            self.mark(given[0], total)
        return result


def completed(block: nn.Module, plan: BlockPlan, call: BlockCall) -> BlockPlan:
    """The plan of a block, with the styles of parts of cut regions that it does not name.

    Plans name what a family's defaults have, not what its options add: norms of queries and keys, activations
    with parameters, queries that are projected at once. What such a part meets in its region says what it is.
    Where a rank's part of a region does not run, or uses other parts than one process does, a linear or what
    has several dims is cut as well, if it runs then; else the region is left whole. So is one that cannot be
    looked at if its experts have such parts; others stay as they are, and the proof at start tells whether
    that is right.

    A linear cut by inputs that nothing cuts, as a plan may name it for other kinds of blocks, takes a rank's
    part of them.

    Args:
        block: The block.
        plan: What is said of it.
        call: What it is called with.
    """
    plan = replace(
        plan, styles={**plan.styles, **dict.fromkeys(_alone(block, plan, call), "rowwise_split_input")}
    )
    for path, child in children(block):
        inside = {name: style for name, style in plan.styles.items() if name.startswith(f"{path}.")}
        if isinstance(child, nn.Linear) or not COLUMN - GATHERS & {*inside.values()}:
            continue
        every = [name for name, _ in child.named_parameters(prefix=path)]
        unnamed = [name for name in every if not _is_named(name, plan)]
        if not unnamed:
            continue
        left = {name: style for name, style in plan.styles.items() if name not in inside}
        whole = seen_in(block, plan, call, unnamed, path, ranks=1)
        if whole is None:
            experts = tuple(f"{name}." for name, style in inside.items() if style == "moe_tp_experts")
            if any(name.startswith(experts) for name in unnamed):
                plan = replace(plan, styles=left)
            continue
        plan = _right(block, plan, call, unnamed, path, whole.used) or replace(plan, styles=left)
    return _between_own_linears(block, plan, call)


def _alone(block: nn.Module, plan: BlockPlan, call: BlockCall) -> set[str]:
    """Linears that are cut by inputs which are whole; sought in modules that have no outputs cut."""
    own = {name for name, style in plan.styles.items() if style in COLUMN - GATHERS}
    found = set[str]()
    for path, child in children(block):
        for name, inner in child.named_modules(prefix=path):
            row = isinstance(inner, nn.Linear) and plan.styles.get(name) in ROW - SPLITS
            if row and not any(each.startswith(name.removesuffix(name.rpartition(".")[2])) for each in own):
                seen = seen_in(block, plan, call, (), "" if name == path else path, ranks=1)
                found |= {name} & (seen.whole if seen else set())
    return found


def _between_own_linears(block: nn.Module, plan: BlockPlan, call: BlockCall) -> BlockPlan:
    """The same of parts that stand beside cut linears of the block itself, in no child that is cut.

    Where none of the candidates is right, the block's own linears are left whole.
    """
    own = {path for path, child in children(block) if isinstance(child, nn.Linear)}
    left = {path: style for path, style in plan.styles.items() if path not in own}
    if len(left) == len(plan.styles):
        return plan
    regions = _cut_children(block, plan)
    every = [name for name, _ in block.named_parameters() if not name.startswith(regions)]
    unnamed = [name for name in every if not _is_named(name, plan)]
    whole = seen_in(block, plan, call, unnamed, "", ranks=1) if unnamed else None
    if whole is None:
        return plan
    return _right(block, plan, call, unnamed, "", whole.used) or replace(plan, styles=left)


def _cut_children(block: nn.Module, plan: BlockPlan) -> tuple[str, ...]:
    """Beginnings of names in the block's children that the plan cuts inside."""
    found = (f"{path}." for path, child in children(block) if not isinstance(child, nn.Linear))
    return tuple(each for each in found if any(name.startswith(each) for name in plan.styles))


def _right(
    block: nn.Module, plan: BlockPlan, call: BlockCall, unnamed: list[str], path: str, used: set[str]
) -> BlockPlan | None:
    """The plan with the first of the candidates that is right, at the fewest ranks with which any runs."""
    for ranks in RANKS:
        runs = False
        for more in _candidates(block, unnamed):
            tried = replace(plan, styles={**plan.styles, **dict.fromkeys(more, "colwise")})
            rest = [name for name in unnamed if not _is_named(name, tried)]
            seen = seen_in(block, tried, call, rest, path, ranks)
            if seen is None:
                continue
            runs = True
            found = replace(tried, styles={**tried.styles, **dict.fromkeys(seen.partial, SUMMED)})
            # Only a region's ends sum the gradient of what it is given, and with fewer key/value heads than
            # ranks, as one more than there are, it may be none.
            ends = bool(path) and is_region(block.get_submodule(path), path, found, plan.pairs + 1)
            summed = ends or not seen.given
            if seen.used == used & {*rest} and not seen.lost and summed:
                return found
        if runs:
            return None
    return None


def _is_named(path: str, plan: BlockPlan) -> bool:
    """Whether a plan says something of a parameter, or of its module."""
    owner = path.rpartition(".")[0]
    known = plan.styles.get(owner) in COLUMN | ROW | {"mla_kv_a_proj", SUMMED}
    return known or path in plan.styles or not plan.silent.isdisjoint((path, owner))


def _candidates(block: nn.Module, unnamed: list[str]) -> Iterator[tuple[str, ...]]:
    """What may be cut besides: nothing, one linear, or all else that has several dims."""
    yield ()
    owners = dict.fromkeys(name.rpartition(".")[0] for name in unnamed)
    linears = [name for name in owners if isinstance(block.get_submodule(name), nn.Linear)]
    yield from ((name,) for name in linears)
    several = [name for name in unnamed if block.get_parameter(name).ndim > 1]
    yield tuple(name for name in several if name.rpartition(".")[0] not in linears)


def seen_in(
    block: nn.Module,
    plan: BlockPlan,
    call: BlockCall,
    unnamed: Sequence[str],
    within: str,
    ranks: int,
) -> UnnamedUses | None:
    """What parameters of a block meet that its plan does not name; None if such a block does not run.

    Args:
        block: On the meta device. Unchanged.
        plan: Its plan.
        call: What it is called with.
        unnamed: Paths of the parameters.
        within: The child of the block that they are in; what comes behind it need not run. Else empty:
            they are in no child that is cut.
        ranks: Number of ranks that share the block.
    """
    for dtype in _DTYPES:
        with suppress(Exception):  # whatever the family's code does with these sizes
            return _seen(copy.deepcopy(block).to("meta", dtype), dtype, plan, call, unnamed, within, ranks)
    return None


def _seen(
    small: nn.Module,
    dtype: torch.dtype,
    plan: BlockPlan,
    call: BlockCall,
    unnamed: Sequence[str],
    within: str,
    ranks: int,
) -> UnnamedUses:
    sliced, rows = _cut(small, plan, ranks)
    watch = _Watch({id(small.get_parameter(path)): path for path in unnamed}, sliced, rows)
    ended: list[bool] = []
    for path, module in small.named_modules():
        _listen(path, module, plan, watch, ranks)
    region = small.get_submodule(within)
    region.register_forward_pre_hook(lambda *_: watch.stand(inside=True))
    region.register_forward_hook(lambda *_: watch.stand(inside=False))
    for path in () if within else _cut_children(small, plan):
        child = small.get_submodule(path[:-1])
        child.register_forward_pre_hook(lambda *_: watch.stand(inside=False))
        child.register_forward_hook(lambda *_: watch.stand(inside=True))
    region.register_forward_hook(lambda *_: ended.append(True))
    there = _on_meta(call, dtype)
    with torch.no_grad(), torch_forms(), watch:
        watch.mark(there.hidden, _GIVEN)
        with suppress(Exception):  # what comes behind the child is of no interest
            there.make(small, there.hidden)
        if not ended:  # what stands in front of it may not run without values: it may run by itself
            watch.seen = UnnamedUses()
            region(there.hidden)
    return watch.seen


def _on_meta(call: BlockCall, dtype: torch.dtype) -> BlockCall:
    hidden, arguments, named = tree_map(
        lambda each: without_storage(each, dtype) if isinstance(each, Tensor) else each,
        (call.hidden, call.arguments, call.named),
    )
    return BlockCall(hidden, arguments, named, by_name=call.by_name)


def splits_of(block: nn.Module, call: BlockCall) -> dict[int, tuple[int, ...]]:
    """Parts of dims by their size, as the block's code splits them."""
    found = set[tuple[int, ...]]()
    for dtype in _DTYPES:
        small, there = copy.deepcopy(block).to("meta", dtype).eval(), _on_meta(call, dtype)
        with suppress(Exception), torch.no_grad(), torch_forms(), splits_in(small, found):
            there.make(small, there.hidden)  # whatever the family's code does behind its mixers
    return segments_in(block, found)


def _cut(block: nn.Module, plan: BlockPlan, ranks: int) -> tuple[set[int], set[int]]:
    """Give a block a rank's sizes; returns its cut parameters that are no linear's, and those by inputs.

    Raises:
        ValueError: The sizes do not divide.
    """
    sliced, rows = set[int](), set[int]()
    for path, module in list(block.named_modules()):
        for own, parameter in list(module.named_parameters(recurse=False)):
            name = f"{path}.{own}" if path else own
            split, shape = plan.cut(block, name, parameter).split, list(parameter.shape)
            if ranks > 1 and split is not None and not plan.keeps(path, ranks):
                if shape[split] % ranks:
                    raise ValueError(f"{name}: {shape[split]}")
                shape[split] //= ranks
            elif ranks > 1 and plan.keeps(path, ranks):
                shape[0] //= plan.pairs
            setattr(module, own, nn.Parameter(parameter.new_empty(shape), requires_grad=False))
            if split is not None and not isinstance(module, nn.Linear):
                into = rows if plan.styles.get(name) in ROW else sliced
                into.add(id(module.get_parameter(own)))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    for path, module in list(block.named_modules()):
        if isinstance(module, nn.Linear) and ranks > 1:
            divide(block.get_submodule(path.rpartition(".")[0]), path, plan, ranks)
    plan.give_own_heads(block, ranks, 0)
    return sliced, rows


def _listen(path: str, module: nn.Module, plan: BlockPlan, watch: _Watch, ranks: int) -> None:
    """Have the outputs of a planned module known for what they are."""
    style = plan.styles.get(path)
    if isinstance(module, nn.Linear) and style in COLUMN:
        gathers = style in GATHERS
        module.register_forward_hook(
            partial(_told, watch=watch, kind=_GIVEN if gathers else _OWN, times=ranks if gathers else 1)
        )
    elif isinstance(module, nn.Linear) and style in ROW:
        module.register_forward_pre_hook(partial(_met, path=path, watch=watch))
        if style in SPLITS:
            module.register_forward_pre_hook(lambda _, given: (given[0][..., : module.in_features],))
        module.register_forward_hook(partial(_told, watch=watch, kind=_GIVEN))
    elif style == "mla_kv_a_proj":
        module.register_forward_hook(partial(_told, watch=watch, kind=_PLAIN))
    elif style in ("moe_tp_experts", "all_reduce"):
        module.register_forward_pre_hook(partial(_copied, watch=watch), with_kwargs=True)
        module.register_forward_hook(partial(_told, watch=watch, kind=_GIVEN))


def _met(_module: nn.Module, given: Any, *, path: str, watch: _Watch) -> None:
    if not watch.kind(given[0]).own:
        watch.seen.whole.add(path)


def _told(_module: nn.Module, _given: Any, gave: Any, *, watch: _Watch, kind: Kind, times: int = 1) -> Any:
    if times > 1:
        gave = torch.cat([gave] * times, dim=-1)
    fresh: Callable[[Any], Any] = lambda each: each.clone() if isinstance(each, Tensor) else each  # noqa: E731
    gave = tree_map(fresh, gave)
    for each in tree_leaves(gave):
        if isinstance(each, Tensor):
            watch.mark(each, kind)
    return gave


def _copied(_module: nn.Module, given: Any, named: Any, *, watch: _Watch) -> None:
    for each in tree_leaves((given, named)):
        if isinstance(each, Tensor):
            watch.mark(each, _PLAIN)
