"""Tensor parallelism of a transformers block by the family's own plan, with dsx's linears and collectives.

A plan names modules and parameters and gives each a style, in transformers' words
(transformers/distributed/tensor_parallel.py):

| style | of | cut |
|---|---|---|
| ``colwise`` | a linear, a parameter | outputs (the dim before the last one) |
| ``rowwise`` | a linear, a parameter | inputs (the last dim); partial outputs are summed |
| ``packed_colwise``, ``packed_rowwise`` | the same | two halves, gate and up, each cut |
| ``qkv_colwise`` | a linear | thirds: queries, keys and values, each cut (dsx's own word) |
| ``segments:own,all`` | a linear, a parameter | outputs: of parts that the code splits, a rank's or all |
| ``colwise_gather_output`` | a linear | outputs, which every rank then gets |
| ``rowwise_split_input`` | a linear | inputs, of which every rank takes its own |
| ``moe_tp_experts`` | a module | its own parameters have entries; its outputs are partial sums |
| ``mla_kv_a_proj`` | a linear | nothing: the gradient of its rotary outputs is summed |
| ``replicated_with_grad_allreduce`` | a module | nothing: its parameters' gradients are summed |
| ``all_reduce`` | a module | nothing: its outputs are partial sums |
| ``mean_over_ranks`` | a module | nothing: its means are over the features of all ranks (dsx's own word) |
| ``as_evaluated`` | a module | nothing: the code around it runs as in evaluation, past fused kernels |
| ``summand`` | a parameter | nothing: each rank adds its share of it to partial sums (dsx's own word) |
| ``moe_identity_expert`` | a module | nothing: its input is divided by the number of ranks |
| ``local_params``, ``replicate`` | a module | nothing |

Between the linears, sequence parallelism cuts hidden states along the sequence. A child of a block that mixes
tokens or features gets the whole sequence. If it is a column-parallel region that ends in one row-parallel
linear, its ends gather and reduce-scatter; else it computes as without sequence parallelism between a gather
and a slice.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, update_wrapper
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dsx.errors import ModelError
from dsx.nn import collectives
from dsx.nn.dropout import Dropout
from dsx.nn.linear import ColumnParallelLinear, KeyValueLinear, LocalLinear, RowParallelLinear
from dsx.nn.parallel import TensorParallel
from dsx.nn.split import WeightGradients

SEGMENTS = "segments"
LOCAL_COLUMN = frozenset(("colwise", "packed_colwise", "qkv_colwise", SEGMENTS))
"""Styles by which a rank's outputs stay its own."""
COLUMN = LOCAL_COLUMN | {"colwise_gather_output", "colwise_rep"}
ROW = frozenset(("rowwise", "packed_rowwise", "rowwise_split_input", "rowwise_rep"))
SUMMED = "replicated_with_grad_allreduce"
SUMMAND = "summand"
MEAN = "mean_over_ranks"
EVALUATED = "as_evaluated"
GATHERS = frozenset(("colwise_gather_output", "colwise_rep"))
SPLITS = frozenset(("rowwise_split_input", "rowwise_rep"))
_PARTS = {"packed_colwise": 2, "packed_rowwise": 2, "qkv_colwise": 3}
_WRAPPED = frozenset(("moe_tp_experts", "mla_kv_a_proj", "all_reduce", "moe_identity_expert"))
STYLES = COLUMN | ROW | _WRAPPED | {SUMMED, SUMMAND, MEAN, EVALUATED, "local_params", "replicate"}
"""Every style that dsx knows inside blocks."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut: along which dim, and its parts along that, each cut on its own."""

    split: int | None = None
    parts: tuple[int, ...] = ()


UNCUT = Cut()
_MARKS = re.compile(f"{SEGMENTS}:(own|all)(,(own|all))*")


def check_plan(plan: Mapping[str, str | None], where: str) -> None:
    """Raise ModelError for a style that dsx does not know."""
    for pattern, style in plan.items():
        if style is not None and (style not in STYLES - {SEGMENTS}) and not _MARKS.fullmatch(style):
            raise ModelError(
                f"{where}: {pattern} = {style!r}",
                "dsx knows no such style",
                f"use {', '.join(sorted(STYLES))} (as {SEGMENTS}:own,own,all)",
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
        marks: Of each path whose style is ``segments``, which of them a rank has of its own (``own``).
        splits: Parts of dims of a size, as the block's code splits them.
    """

    styles: Mapping[str, str]
    pairs: int = 0
    rotary: int = 0
    counts: tuple[str, ...] = ()
    by_head: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    marks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    splits: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, block: nn.Module, prefix: str, plan: Mapping[str, str | None], **facts: Any) -> BlockPlan:
        """The entries of a model's plan that are about the block called ``prefix``.

        Numbers in names are ``*`` in a plan. An entry of a parameter counts before its module's. ``facts``
        are the other attributes.
        """
        names = [path for path, _ in block.named_modules() if path]
        named = chain(block.named_parameters(remove_duplicate=False), block.named_buffers())
        names += [path for path, _ in named]
        said = {path: plan[pattern] for path in names if (pattern := generic(f"{prefix}.{path}")) in plan}
        styles = {path: style for path, style in said.items() if style}
        silent = frozenset(said.keys() - styles.keys())
        return cls({}, silent=silent, **facts).with_styles(styles)

    def with_styles(self, more: Mapping[str, str]) -> BlockPlan:
        """The plan with further styles, as plans have them."""
        words = {path: style.partition(":") for path, style in more.items()}
        marks = {path: tuple(each.split(",")) for path, (_, _, each) in words.items() if each}
        styles = {**self.styles, **{path: word for path, (word, _, _) in words.items()}}
        return replace(self, styles=styles, marks={**self.marks, **marks})

    def patterns(self) -> dict[str, str]:
        """The styles as plans have them, by path with ``*`` for numbers."""
        return {
            generic(path): ":".join((style, ",".join(self.marks[path]))) if path in self.marks else style
            for path, style in self.styles.items()
        }

    def parts(self, path: str, size: int) -> tuple[int, ...]:
        """Parts of a dim of a linear or a parameter at ``path`` that are each cut; empty if it is cut as one.

        Raises:
            ModelError: It has no such parts.
        """
        style, marks = self.styles.get(path), self.marks.get(path, ())
        if style != SEGMENTS:
            return _parts(style, size)
        parts = self.splits.get(size, (size,)) if len(marks) > 1 else (size,)
        if len(parts) != len(marks):
            told = f"the block's code splits a dim of {size} into {list(parts)}"
            raise ModelError(f"{path}: {style}:{','.join(marks)}", told, "leave it whole in the tensor plan")
        return parts

    def own(self, path: str, whole: Tensor, ranks: int, rank: int) -> Tensor:
        """Of what is in segments a rank's own ones and all of those that every rank has."""
        dim = outputs_of(whole)
        pieces = whole.split(self.parts(path, whole.shape[dim]), dim)
        every = zip(pieces, self.marks[path], strict=True)
        return torch.cat(
            [each if mark == "all" else each.chunk(ranks, dim)[rank] for each, mark in every], dim
        )

    def own_size(self, owner: str, size: int, ranks: int) -> int:
        """What one rank has of ``size`` features in a module with path ``owner``."""
        parts = self.splits.get(size, ())
        for path, marks in self.marks.items():
            if len(marks) == len(parts) and path.startswith(f"{owner}." if owner else ""):
                return sum(
                    part if mark == "all" else part // ranks for part, mark in zip(parts, marks, strict=True)
                )
        return max(size // ranks, 1)  # one is shared where there are fewer

    def cut(self, block: nn.Module, path: str, parameter: Tensor) -> Cut:
        """How the parameter at ``path`` is cut."""
        owner, _, name = path.rpartition(".")
        style = self.styles.get(path)
        linear = isinstance(block.get_submodule(owner), nn.Linear)
        if style is None and linear:
            path, style = owner, self.styles.get(owner)
        dim = max(parameter.ndim - 2, 0)
        if style == SEGMENTS:
            if "all" in self.marks[path] and not linear:
                return UNCUT  # a rank takes its own of it whenever it is used
            dim = outputs_of(parameter)
        if style in ROW and not (name == "bias" or (style == "packed_rowwise" and parameter.ndim == 1)):
            dim = parameter.ndim - 1
        elif style not in COLUMN:
            return UNCUT
        return Cut(dim, self.parts(path, parameter.shape[dim]))

    def give_own_heads(self, block: nn.Module, ranks: int, rank: int) -> None:
        """Have modules count a rank's heads and features, and take what arguments have for its heads."""
        cut = {
            generic(path).rpartition(".")[0] for path, style in self.styles.items() if style in LOCAL_COLUMN
        }
        for path, module in block.named_modules():
            place = generic(path)
            for owner, _, count in (each.rpartition(".") for each in self.counts if place in cut):
                if owner == place and ranks > 1:
                    self.divide(path, module, count, ranks)
            if names := self.by_head.get(generic(path), ()):
                counted = (n for key, n in vars(module).items() if "head" in key and key.endswith(_ALL_RANKS))
                if heads := max(counted, default=0):
                    own = slice(rank * heads // ranks, (rank + 1) * heads // ranks)
                    hook = partial(_own_heads, names=names, heads=heads, own=own)
                    module.register_forward_pre_hook(hook, with_kwargs=True)

    def divide(self, path: str, module: Any, count: str, ranks: int) -> None:
        """Have an attribute of the module at ``path`` count what one of ``ranks`` has."""
        every = vars(module).get(count)
        if isinstance(every, int) and f"{count}{_ALL_RANKS}" not in vars(module):
            vars(module)[f"{count}{_ALL_RANKS}"] = every
            setattr(module, count, self.own_size(path, every, ranks))

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


def is_mixer(child: nn.Module) -> bool:
    """Whether a child of a block has convolutions along the sequence, as recurrent mixers have."""
    return any(isinstance(inner, nn.Conv1d) for inner in child.modules())


def segments_in(block: nn.Module, splits: Collection[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Parts of dims by their size, given all sizes into which a block's code splits dims.

    What goes through a convolution may be a part, which is split once more behind it. A size that is split
    in two ways is left out.
    """
    once = {sum(each): each for each in splits if len(each) > 1 and all(each)}
    sums = [sum(each) for each in splits if len(each) > 1 and all(each)]
    once = {size: each for size, each in once.items() if sums.count(size) == 1}
    mixed = {inner.in_channels for inner in block.modules() if isinstance(inner, nn.Conv1d)}
    inner = {size: once.get(size, (size,)) if size in mixed else (size,) for size in {*chain(*splits)}}
    return {size: tuple(chain(*(inner[part] for part in each))) for size, each in once.items()}


def outputs_of(tensor: Tensor) -> int:
    """The first dim of a matrix, of a convolution's too, or of what is multiplied with outputs."""
    return next((dim for dim, size in enumerate(tensor.shape) if size > 1), 0)


def reads(module: nn.Module, name: str) -> bool:
    """Whether the code of a module reads the matrix of its linear ``name`` on any path, as kernels do."""
    source = inspect.getsource(type(module))
    return re.search(rf"self\.{re.escape(name)}\.(weight|bias)\b", source) is not None


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
            _put(block, path, _linear(child, path, plan, tp, split, tight=False))
            named = path in plan.styles
            inside |= {f"{path}.{name}" for name, _ in child.named_parameters()} if named else set()
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
        made = _linear(inner, name, plan, tp, split, tight=tight)
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
    linear: nn.Linear,
    path: str,
    plan: BlockPlan,
    tp: TensorParallel,
    split: WeightGradients | None,
    *,
    tight: bool,
) -> nn.Module:
    """Dsx's linear for a linear of the family."""
    sizes, form = (linear.in_features, linear.out_features), {**_form(linear), "split": split}
    style = plan.styles.get(path)
    if tp.size > 1 and style in ROW:
        made: nn.Module = RowParallelLinear(*sizes, tp, **form, parts=plan.parts(path, linear.in_features))
        if style in SPLITS:
            made.register_forward_pre_hook(lambda _, given: (collectives.scatter_to(given[0], tp, -1),))
        return made
    if tp.size > 1 and style in COLUMN:
        parts = plan.parts(path, linear.out_features)
        if tight:
            return LocalLinear(sizes[0], sizes[1] // tp.size, **form)
        made = ColumnParallelLinear(*sizes, tp, **form, parts=parts, gather_output=style in GATHERS)
        if "all" in (marks := plan.marks.get(path, ())):
            made.register_forward_hook(partial(_with_all, parts=made.parts, marks=marks, tp=tp))
        return made
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
        for count in (each for each in plan.counts if "." not in each):
            plan.divide(name.rpartition(".")[0], owner, count, ranks)


def _with_all(
    _module: nn.Module,
    _given: Any,
    gave: Tensor,
    *,
    parts: tuple[int, ...],
    marks: tuple[str, ...],
    tp: TensorParallel,
) -> Tensor:
    """A rank's outputs, with those of all ranks where every rank's own ones are made with these."""
    every = zip(gave.split(parts, -1), marks, strict=True)
    return torch.cat([_shared(each, tp) if mark == "all" else each for each, mark in every], -1)


def _shared(own: Tensor, tp: TensorParallel) -> Tensor:
    return collectives.copy_to(collectives.gather_from(own, tp), tp)


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
            rotary_copied(inner, plan.rotary, partial(collectives.copy_to, tp=whole))
        elif style == "moe_identity_expert":
            inner.register_forward_pre_hook(lambda _, given: (given[0] / tp.size, *given[1:]))
        elif style == MEAN:
            put_means(inner, partial(_over_ranks, tp=whole))
    return summed | _hold_own(child, path, plan, tp)


def _hold_own(child: nn.Module, path: str, plan: BlockPlan, tp: TensorParallel) -> set[str]:
    """Have a child's code find what a rank has of parameters and buffers that are stored whole."""
    summed: set[str] = set()
    for name in (name for name, style in plan.styles.items() if style == EVALUATED):
        if name.startswith(f"{path}."):
            around = _owner(child, path, name)[0]
            _hold(around, around, "training", lambda _: False)
    for own, each in (*child.named_parameters(prefix=path), *child.named_buffers(prefix=path)):
        style, trained = plan.styles.get(own), isinstance(each, nn.Parameter)
        owner, name = _owner(child, path, own)
        if style == SUMMAND:
            _hold(owner, owner, name, lambda whole: whole / tp.size)
        elif style == SEGMENTS and (not trained or "all" in plan.marks[own]):
            # The code around a convolution, say, reads its matrix past its forward.
            share = partial(plan.own, own, ranks=tp.size, rank=tp.rank)
            _hold(_owner(child, path, own.rpartition(".")[0])[0], owner, name, share)
        elif style != SUMMED:
            continue
        summed |= {own} if trained else set()
    return summed


def _owner(child: nn.Module, path: str, name: str) -> tuple[nn.Module, str]:
    """The module in a child at ``path`` that has what is called ``name`` in the block, and its name there."""
    place, _, last = name.removeprefix(path).removeprefix(".").rpartition(".")
    return child.get_submodule(place), last


def _wrapped(forward: Any, module: nn.Module) -> Any:
    """A forward in the place of a module's own, with its signature."""
    return update_wrapper(forward, module.forward)


def _hold(around: nn.Module, owner: nn.Module, name: str, made: Callable[[Any], Any]) -> None:
    """Have a module's code find what is made of an attribute or a parameter of ``owner`` in its place."""
    around.forward = _wrapped(partial(_with_held, around.forward, owner, name, made), around)


def _with_held(
    forward: Callable[..., Any],
    owner: nn.Module,
    name: str,
    made: Callable[[Any], Any],
    /,
    *given: Any,
    **named: Any,
) -> Any:
    held, own = vars(owner), getattr(owner, name)
    before = {name: held[name]} if name in held else {}
    held[name] = made(own)  # found before a parameter or a buffer of this name
    try:
        return forward(*given, **named)
    finally:
        del held[name]
        held |= before


class _Means(TorchFunctionMode):
    def __init__(self, over: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._over = over

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        gave = func(*args, **(kwargs or {}))
        return self._over(gave) if func in (torch.mean, Tensor.mean) else gave


def put_means(module: nn.Module, over: Callable[[Tensor], Tensor]) -> None:
    """Put what ``over`` makes of every mean that a module takes in its place."""
    module.forward = _wrapped(partial(_with_means, module.forward, over), module)


def _with_means(forward: Any, over: Callable[[Tensor], Tensor], /, *given: Any, **named: Any) -> Any:
    with _Means(over):
        return forward(*given, **named)


def _over_ranks(mean: Tensor, tp: TensorParallel) -> Tensor:
    return collectives.copy_to(collectives.reduce_from(mean / tp.size, tp), tp)


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


def rotary_copied(module: nn.Module, rotary: int, copied: Callable[[Tensor], Tensor]) -> None:
    """Put what ``copied`` makes of the last ``rotary`` outputs of a module in their place."""

    def ends(_module: nn.Module, _given: Any, gave: Tensor) -> Tensor:
        passed, rotated = torch.split(gave, [gave.shape[-1] - rotary, rotary], dim=-1)
        return torch.cat([passed, copied(rotated)], dim=-1)

    module.register_forward_hook(ends)


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
    """Hidden states, the first argument and whatever else is the same tensor, as they are wanted inside."""
    first = _first_of(given, named)
    begun = start(first)
    named = {name: begun if each is first else each for name, each in named.items()}
    return tuple(begun if each is first else each for each in given), named


def _gathered(_module: nn.Module, given: Any, named: Any, *, tp: TensorParallel) -> tuple[Any, Any]:
    """Hidden states, and what comes with them for the same tokens, such as a residual, in whole sequences."""
    first = _first_of(given, named)
    along = first.shape[: collectives.SEQUENCE + 1]

    def whole(each: Any) -> Any:
        alike = isinstance(each, Tensor) and each.is_floating_point() and each.ndim > collectives.SEQUENCE + 1
        if each is not first and not (alike and each.shape[: len(along)] == along):
            return each
        return collectives.gather_from(each, tp, collectives.SEQUENCE)

    return tuple(map(whole, given)), {name: whole(each) for name, each in named.items()}


def _first_of(given: Any, named: Any) -> Tensor:
    return next(each for each in (*given, *named.values()) if isinstance(each, Tensor))


def _ended(_module: nn.Module, _given: Any, gave: Any, *, tp: TensorParallel) -> Any:
    return sequence_cut(gave, partial(collectives.scatter_to, tp=tp, dim=collectives.SEQUENCE))


def sequence_cut(gave: Any, cut: Callable[[Tensor], Tensor]) -> Any:
    """What a child of a block gave for a whole sequence, cut by ``cut`` wherever it has that length."""
    if not isinstance(gave, tuple | list):
        return cut(gave)
    length = gave[0].shape[: collectives.SEQUENCE + 1]
    along = (isinstance(each, Tensor) and each.shape[: collectives.SEQUENCE + 1] == length for each in gave)
    found = (cut(each) if alike else each for each, alike in zip(gave, along, strict=True))
    return list(found) if isinstance(gave, list) else tuple(found)


def sum_gradients(parameters: Mapping[str, Any], paths: set[str], tp: TensorParallel) -> None:
    """Sum the gradients of these parameters over the ranks, in float32, as each backward gives them."""

    def total(gradient: Tensor) -> Tensor:
        whole = gradient.float().clone(memory_format=torch.contiguous_format)
        return collectives.all_reduce(whole, tp).to(gradient.dtype)

    for path in paths:
        if parameters[path].requires_grad:
            parameters[path].register_hook(total)
