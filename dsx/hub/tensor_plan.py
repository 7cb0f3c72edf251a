"""Tensor parallelism of a transformers block by the family's own plan, with dsx's linears and collectives.

A plan names modules and parameters and gives each a style, in transformers' words
(transformers/distributed/tensor_parallel.py):

| style | of | cut |
|---|---|---|
| ``colwise`` | a linear, a parameter | outputs (the dim before the last one) |
| ``rowwise`` | a linear, a parameter | inputs (the last dim); partial outputs are summed |
| ``packed_colwise``, ``packed_rowwise`` | the same | two halves, gate and up, each cut |
| ``qkv_colwise`` | a linear | thirds: queries, keys and values, each cut (dsx's own word) |
| ``colwise_gather_output`` | a linear | outputs, which every rank then gets |
| ``rowwise_split_input`` | a linear | inputs, of which every rank takes its own |
| ``moe_tp_experts`` | a module | its own parameters have entries; its outputs are partial sums |
| ``mla_kv_a_proj`` | a linear | nothing: the gradient of its rotary outputs is summed |
| ``replicated_with_grad_allreduce`` | a module | nothing: its parameters' gradients are summed |
| ``all_reduce`` | a module | nothing: its outputs are partial sums |
| ``summand`` | a parameter | nothing: each rank adds its share of it to partial sums (dsx's own word) |
| ``moe_identity_expert`` | a module | nothing: its input is divided by the number of ranks |
| ``local_params``, ``replicate`` | a module | nothing |

Between the linears, sequence parallelism cuts hidden states along the sequence. A child of a block that mixes
tokens or features gets the whole sequence. If it is a column-parallel region that ends in one row-parallel
linear, its ends gather and reduce-scatter; else it computes as without sequence parallelism between a gather
and a slice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsx.errors import ModelError
from dsx.nn import collectives
from dsx.nn.dropout import Dropout
from dsx.nn.linear import ColumnParallelLinear, KeyValueLinear, LocalLinear, RowParallelLinear
from dsx.nn.parallel import TensorParallel
from dsx.nn.split import WeightGradients

LOCAL_COLUMN = frozenset(("colwise", "packed_colwise", "qkv_colwise"))
"""Styles by which a rank's outputs stay its own."""
COLUMN = LOCAL_COLUMN | {"colwise_gather_output", "colwise_rep"}
ROW = frozenset(("rowwise", "packed_rowwise", "rowwise_split_input", "rowwise_rep"))
SUMMED = "replicated_with_grad_allreduce"
SUMMAND = "summand"
GATHERS = frozenset(("colwise_gather_output", "colwise_rep"))
SPLITS = frozenset(("rowwise_split_input", "rowwise_rep"))
_PARTS = {"packed_colwise": 2, "packed_rowwise": 2, "qkv_colwise": 3}
_WRAPPED = frozenset(("moe_tp_experts", "mla_kv_a_proj", "all_reduce", "moe_identity_expert"))
STYLES = COLUMN | ROW | _WRAPPED | {SUMMED, SUMMAND, "local_params", "replicate"}
"""Every style that dsx knows inside blocks."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut: along which dim, and its parts along that, each cut on its own."""

    split: int | None = None
    parts: tuple[int, ...] = ()


UNCUT = Cut()


def check_plan(plan: Mapping[str, str | None], where: str) -> None:
    """Raise ModelError for a style that dsx does not know."""
    for pattern, style in plan.items():
        if style is not None and style not in STYLES:
            raise ModelError(
                f"{where}: {pattern} = {style!r}",
                "dsx knows no such style",
                f"use {', '.join(sorted(STYLES))}",
            )


def generic(name: str) -> str:
    """A name as plans have it, with ``*`` for numbers.

    >>> generic("model.layers.10.mlp")
    'model.layers.*.mlp'
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


@dataclass(frozen=True)
class BlockPlan:
    """The plan of one block.

    Attributes:
        styles: Style by path in the block, of modules and of parameters.
        pairs: Key/value heads, if key and value projections may be kept whole for want of heads; else 0.
        rotary: Outputs of an ``mla_kv_a_proj`` that are rotated.
        counts: Attributes that count heads, of modules with cut projections; of one module with its path.
        by_head: Named arguments that have something for each head, by the module's path.
        silent: Paths that the plan leaves alone by name.
    """

    styles: Mapping[str, str]
    pairs: int = 0
    rotary: int = 0
    counts: tuple[str, ...] = ()
    by_head: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()

    @classmethod
    def of(cls, block: nn.Module, prefix: str, plan: Mapping[str, str | None], **facts: Any) -> BlockPlan:
        """The entries of a model's plan that are about the block called ``prefix``.

        Numbers in names are ``*`` in a plan. An entry of a parameter counts before its module's. ``facts``
        are the other attributes.
        """
        names = [path for path, _ in block.named_modules() if path]
        names += [path for path, _ in block.named_parameters(remove_duplicate=False)]
        said = {path: plan[pattern] for path in names if (pattern := generic(f"{prefix}.{path}")) in plan}
        styles = {path: style for path, style in said.items() if style}
        return cls(styles, silent=frozenset(said.keys() - styles.keys()), **facts)

    def cut(self, block: nn.Module, path: str, parameter: Tensor) -> Cut:
        """How the parameter at ``path`` is cut."""
        owner, _, name = path.rpartition(".")
        style = self.styles.get(path)
        linear = isinstance(block.get_submodule(owner), nn.Linear)
        if style is None and linear:
            style = self.styles.get(owner)
        if style in COLUMN:
            dim = max(parameter.ndim - 2, 0)
            return Cut(dim, _parts(style, parameter.shape[dim]))
        if style in ROW and not (name == "bias" or (style == "packed_rowwise" and parameter.ndim == 1)):
            dim = parameter.ndim - 1
            return Cut(dim, _parts(style, parameter.shape[dim]))
        return UNCUT

    def give_own_heads(self, block: nn.Module, ranks: int, rank: int) -> None:
        """Have modules whose heads are divided take what arguments have for a rank's heads."""
        for path, module in block.named_modules():
            if names := self.by_head.get(generic(path), ()):
                counted = (n for key, n in vars(module).items() if "head" in key and key.endswith(_ALL_RANKS))
                if heads := max(counted, default=0):
                    own = slice(rank * heads // ranks, (rank + 1) * heads // ranks)
                    hook = partial(_own_heads, names=names, heads=heads, own=own)
                    module.register_forward_pre_hook(hook, with_kwargs=True)

    def keeps(self, path: str, heads: int) -> bool:
        """Whether a key or value projection is kept whole with ``heads`` ranks."""
        last = path.rpartition(".")[2]
        return (
            bool(self.pairs % heads) and last in ("k_proj", "v_proj") and self.styles.get(path) == "colwise"
        )


def heads_of(block: nn.Module, projection: str = "k_proj") -> int:
    """Heads of a block's attention by its own sizes; 0 where they do not say it."""
    for module in block.modules():
        linear, size = getattr(module, projection, None), getattr(module, "head_dim", None)
        if isinstance(linear, nn.Linear) and isinstance(size, int) and linear.out_features % size == 0:
            return linear.out_features // size
    return 0


_ALL_RANKS = " of all ranks"


def _own_heads(
    _module: nn.Module, given: Any, named: Any, *, names: tuple[str, ...], heads: int, own: slice
) -> tuple[Any, Any]:
    """Of [samples, heads, ...], or else [samples x heads, ...] or [heads, ...], a rank's heads."""
    held = {name: named[name] for name in names if isinstance(named.get(name), Tensor)}
    mine = {
        name: each[:, own] if each.shape[1] == heads else each.unflatten(0, (-1, heads))[:, own].flatten(0, 1)
        for name, each in held.items()
    }
    return given, {**named, **mine}


def _parts(style: str | None, size: int) -> tuple[int, ...]:
    """The equal parts of a dim of ``size`` that are each cut; empty if it is cut as one."""
    number = _PARTS.get(style or "", 1)
    if size % number:
        raise ModelError(
            f"a dim of {size}, {style}", f"it has no {number} equal parts", "mend the tensor plan"
        )
    return (size // number,) * number if number > 1 else ()


def apply_plan(
    block: nn.Module,
    plan: BlockPlan,
    tp: TensorParallel,
    split: WeightGradients | None,
    whole: Collection[str] = (),
) -> set[str]:
    """Put dsx's linears into a block, on the meta device, and communication at the ends of what is cut.

    Args:
        block: The family's block. Changed in place.
        plan: Its plan.
        tp: The tensor-parallel ranks.
        split: Takes gradients of weights while it defers.
        whole: Paths of modules whose inputs and outputs have the whole of what the ranks share.

    Returns:
        Paths of parameters whose gradients are summed over the ranks.
    """
    summed: set[str] = set()
    inside: set[str] = set()
    for path, child in list(children(block)):
        if type(child) is nn.Linear:
            style = plan.styles.get(path)
            _put(block, path, _linear(child, style, tp, split, tight=False))
            inside |= {f"{path}.{name}" for name, _ in child.named_parameters()} if style else set()
    for path, child in list(mixing_children(block, plan)):
        inside |= {f"{path}.{name}" for name, _ in child.named_parameters()}
        tight = tp.size > 1 and is_region(child, path, plan, tp.size)
        tight = tight and not (tp.sequence and any(f"{each}.".startswith(f"{path}.") for each in whole))
        within = tp if tight else replace(tp, sequence_parallel=False)
        _set_linears(child, path, plan, within, split, tight=tight)
        summed |= _wrap(child, path, plan, within)
        if tp.size > 1:
            _set_ends(child, tp, tight=tight)
        dropouts = set_dropouts(child, tp, sharded=tight)
        if tight and dropouts:  # a rank's own features before the row-parallel linear, hidden states after it
            child.register_forward_pre_hook(partial(_sharded, dropouts=dropouts, sharded=True))
            row = next(inner for inner in child.modules() if isinstance(inner, RowParallelLinear))
            row.register_forward_hook(partial(_sharded, dropouts=dropouts, sharded=tp.sequence))
    plan.give_own_heads(block, tp.size, tp.rank)
    set_dropouts(block, tp, sharded=bool(tp.sequence))
    outside = [path for path, _ in block.named_parameters() if path not in inside]
    if tp.size > 1:  # what stands between linears of the block itself has parts of its gradient
        owners = ((path, path.rpartition(".")[0]) for path in outside)
        summed |= {
            path for path, owner in owners if SUMMED in (plan.styles.get(path), plan.styles.get(owner))
        }
    return summed | ({*outside} if tp.sequence else set())


def set_dropouts(root: nn.Module, tp: TensorParallel, *, sharded: bool) -> list[Dropout]:
    """Put dsx's dropout, whose masks know what the ranks share, in the place of torch's below ``root``."""
    found: list[Dropout] = []
    for path, module in list(root.named_modules()):
        if type(module) is nn.Dropout and module.p and path:
            made: Any = Dropout(module.p, tp, sharded=sharded)
            made.p = module.p  # some families read it for a function of torch's
            _put(root, path, made)
            found.append(made)
    return found


def _sharded(*_: Any, dropouts: list[Dropout], sharded: bool) -> None:
    for dropout in dropouts:
        dropout.sharded = sharded


def mixing_children(block: nn.Module, plan: BlockPlan) -> Iterator[tuple[str, nn.Module]]:
    """The block's children that need the whole sequence, or all features; linears of its own aside."""
    for path, child in children(block):
        linear = isinstance(child, nn.Linear | LocalLinear | ColumnParallelLinear | RowParallelLinear)
        if not linear and _mixes(child, path, plan):
            yield path, child


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(root.get_submodule(owner), name, module)


def children(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The block's children; those of a list by themselves."""
    for name, child in block.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{place}", each) for place, each in child.named_children())
        else:
            yield name, child


def _mixes(child: nn.Module, path: str, plan: BlockPlan) -> bool:
    """Whether a child is more than a norm and its like, which works token by token."""
    cut = (name for name, style in plan.styles.items() if style != SUMMED)
    planned = any(name == path or name.startswith(f"{path}.") for name in cut)
    return planned or any(parameter.ndim > 1 for parameter in child.parameters())


def is_region(child: nn.Module, path: str, plan: BlockPlan, ranks: int) -> bool:
    """Whether it consists of column-parallel linears that end in one row-parallel one."""
    rows = 0
    for name, inner in child.named_modules(prefix=path):
        style = plan.styles.get(name)
        if style in LOCAL_COLUMN and type(inner) is nn.Linear:
            if plan.keeps(name, ranks):
                return False
        elif style in ("rowwise", "packed_rowwise") and type(inner) is nn.Linear:
            rows += 1
        elif any(True for _ in inner.parameters(recurse=False)) and style != SUMMED:
            return False
    return rows == 1 and not isinstance(child, nn.Linear)


def _set_linears(
    child: nn.Module,
    path: str,
    plan: BlockPlan,
    tp: TensorParallel,
    split: WeightGradients | None,
    *,
    tight: bool,
) -> None:
    for name, inner in list(child.named_modules(prefix=path)):
        if type(inner) is not nn.Linear or name == path:
            continue
        owner_path, _, last = name.removeprefix(f"{path}.").rpartition(".")
        owner = child.get_submodule(owner_path)
        made = _linear(inner, plan.styles.get(name), tp, split, tight=tight)
        if plan.keeps(name, tp.size) and tp.size > 1:
            head = inner.out_features // plan.pairs
            made = KeyValueLinear(inner.in_features, plan.pairs, head, tp, **_form(inner), split=split)
        if tp.size > 1:
            divide(owner, name, plan, tp.size)
        made.in_features, made.out_features = inner.in_features, inner.out_features  # type: ignore[assignment]
        setattr(owner, last, made)


def _form(linear: nn.Linear) -> dict[str, Any]:
    return {"bias": linear.bias is not None, "init": None, "device": "meta"}


def _linear(
    linear: nn.Linear, style: str | None, tp: TensorParallel, split: WeightGradients | None, *, tight: bool
) -> nn.Module:
    """Dsx's linear for a linear of the family."""
    sizes, form = (linear.in_features, linear.out_features), {**_form(linear), "split": split}
    if tp.size > 1 and style in ROW:
        made: nn.Module = RowParallelLinear(*sizes, tp, **form, parts=_parts(style, linear.in_features))
        if style in SPLITS:
            made.register_forward_pre_hook(lambda _, given: (collectives.scatter_to(given[0], tp, -1),))
        return made
    if tp.size > 1 and style in COLUMN:
        parts = _parts(style, linear.out_features)
        if tight:
            return LocalLinear(sizes[0], sizes[1] // tp.size, **form)
        return ColumnParallelLinear(*sizes, tp, **form, parts=parts, gather_output=style in GATHERS)
    return LocalLinear(*sizes, **form)


def divide(owner: Any, name: str, plan: BlockPlan, ranks: int) -> None:
    """Have the module of a cut linear count the heads of one of ``ranks``.

    A rank that has one key/value head uses it for all of its queries.
    """
    if plan.keeps(name, ranks) and name.endswith("k_proj"):
        groups = getattr(owner, "num_key_value_groups", None)
        if not isinstance(groups, int):
            raise ModelError(
                name,
                f"{plan.pairs} key/value heads are fewer than {ranks} tensor-parallel ranks, and the family "
                "does not say how many queries share one (num_key_value_groups)",
                f"use a tensor-parallel degree that divides {plan.pairs}",
            )
        owner.num_key_value_groups = groups * plan.pairs // ranks
    if plan.styles.get(name) in ("colwise", "qkv_colwise"):
        for place, _, count in (each.rpartition(".") for each in plan.counts):
            heads = vars(owner).get(count)
            here = not place or place == generic(name.rpartition(".")[0])
            if here and isinstance(heads, int) and f"{count}{_ALL_RANKS}" not in vars(owner):
                vars(owner)[f"{count}{_ALL_RANKS}"] = heads
                setattr(owner, count, max(heads // ranks, 1))  # one is shared where there are fewer


def _wrap(child: nn.Module, path: str, plan: BlockPlan, tp: TensorParallel) -> set[str]:
    """Communication of styles that are no linear's; gives parameters whose gradients are partial."""
    summed: set[str] = set()
    if tp.size == 1:
        return summed
    whole = replace(tp, sequence_parallel=False)
    for name, inner in child.named_modules(prefix=path):
        style = plan.styles.get(name)
        if style == SUMMED:
            summed |= {f"{name}.{own}" for own, _ in inner.named_parameters()}
        elif style == "moe_tp_experts":
            inner.register_forward_pre_hook(partial(_copied, tp=whole), with_kwargs=True)
            inner.register_forward_hook(partial(_reduced, tp=whole))
        elif style == "all_reduce":
            inner.register_forward_hook(partial(_reduced, tp=whole))
        elif style == "mla_kv_a_proj":
            inner.register_forward_hook(partial(_rotary_copied, rotary=plan.rotary, tp=whole))
        elif style == "moe_identity_expert":
            inner.register_forward_pre_hook(lambda _, given: (given[0] / tp.size, *given[1:]))
    named = {own: plan.styles.get(own) for own, _ in child.named_parameters(prefix=path)}
    for own in (own for own, style in named.items() if style == SUMMAND):
        inside, _, name = own.removeprefix(path).removeprefix(".").rpartition(".")
        owner = child.get_submodule(inside)
        owner.forward = partial(_with_share, owner, owner.forward, name, tp.size)
    return summed | {own for own, style in named.items() if style in (SUMMED, SUMMAND)}


def _with_share(
    module: nn.Module, forward: Callable[..., Any], name: str, ranks: int, /, *given: Any, **named: Any
) -> Any:
    """A module's forward with a share of one of its parameters in its place."""
    held = vars(module)
    held[name] = getattr(module, name) / ranks  # found before the parameter of this name
    try:
        return forward(*given, **named)
    finally:
        del held[name]


def _copied(_module: nn.Module, given: Any, named: Any, *, tp: TensorParallel) -> tuple[Any, Any]:
    """Hidden states and routing weights, whose gradients are partial."""

    def each(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return collectives.copy_to(value, tp) if floating else value

    return tuple([each(value) for value in given]), {name: each(value) for name, value in named.items()}


def _reduced(_module: nn.Module, _given: Any, gave: Any, *, tp: TensorParallel) -> Any:
    if isinstance(gave, tuple):
        return (collectives.reduce_from(gave[0].clone(), tp), *gave[1:])
    return collectives.reduce_from(gave.clone(), tp)


def _rotary_copied(
    _module: nn.Module, _given: Any, gave: Tensor, *, rotary: int, tp: TensorParallel
) -> Tensor:
    passed, rotated = torch.split(gave, [gave.shape[-1] - rotary, rotary], dim=-1)
    return torch.cat([passed, collectives.copy_to(rotated, tp)], dim=-1)


def _set_ends(child: nn.Module, tp: TensorParallel, *, tight: bool) -> None:
    """Communication where a child of a block begins and ends."""
    if tight:
        start: Callable[[Tensor], Tensor] = (
            partial(collectives.gather_sequence, tp=tp)
            if tp.sequence
            else partial(collectives.copy_to, tp=tp)
        )
        child.register_forward_pre_hook(partial(_begun, start=start), with_kwargs=True)
    elif tp.sequence:
        child.register_forward_pre_hook(partial(_gathered, tp=tp), with_kwargs=True)
        child.register_forward_hook(partial(_ended, tp=tp))


def _begun(
    _module: nn.Module, given: Any, named: Any, *, start: Callable[[Tensor], Tensor]
) -> tuple[Any, Any]:
    """Hidden states, the first argument, as they are wanted inside."""
    if given:
        return (start(given[0]), *given[1:]), named
    name = next(name for name, value in named.items() if isinstance(value, Tensor))
    return given, {**named, name: start(named[name])}


def _gathered(_module: nn.Module, given: Any, named: Any, *, tp: TensorParallel) -> tuple[Any, Any]:
    """Hidden states, and what comes with them for the same tokens, such as a residual, in whole sequences."""
    first = next(each for each in (*given, *named.values()) if isinstance(each, Tensor))
    along = first.shape[: collectives.SEQUENCE + 1]

    def whole(each: Any) -> Any:
        alike = isinstance(each, Tensor) and each.is_floating_point() and each.ndim > collectives.SEQUENCE + 1
        if each is not first and not (alike and each.shape[: len(along)] == along):
            return each
        return collectives.gather_from(each, tp, collectives.SEQUENCE)

    return tuple(map(whole, given)), {name: whole(each) for name, each in named.items()}


def _ended(_module: nn.Module, _given: Any, gave: Any, *, tp: TensorParallel) -> Any:
    return sequence_cut(gave, partial(collectives.scatter_to, tp=tp, dim=collectives.SEQUENCE))


def sequence_cut(gave: Any, cut: Callable[[Tensor], Tensor]) -> Any:
    """What a child of a block gave for a whole sequence, cut by ``cut`` wherever it has that length."""
    if not isinstance(gave, tuple):
        return cut(gave)
    length = gave[0].shape[: collectives.SEQUENCE + 1]
    along = (isinstance(each, Tensor) and each.shape[: collectives.SEQUENCE + 1] == length for each in gave)
    return tuple(cut(each) if alike else each for each, alike in zip(gave, along, strict=True))


def sum_gradients(parameters: Mapping[str, Any], paths: set[str], tp: TensorParallel) -> None:
    """Sum the gradients of these parameters over the ranks, in float32, as each backward gives them."""

    def total(gradient: Tensor) -> Tensor:
        whole = gradient.float().clone(memory_format=torch.contiguous_format)
        return collectives.all_reduce(whole, tp).to(gradient.dtype)

    for path in paths:
        if parameters[path].requires_grad:
            parameters[path].register_hook(total)
