"""A tensor plan of a family of which transformers gives none, found by trying a small model of it.

Every kind of block runs with real numbers, and candidates of styles are tried on it one after another:
linears cut by outputs that end in one cut by inputs, stacks of experts, and attributes that count heads. Each
simulated rank runs the whole block with its slices; where its part ends, it hands on what one process had
there. The first candidate counts whose parts sum up to what one process computes there, and which gives no
gradient to anything that the ranks would not sum. As values are random, what is equal there is equal
anywhere, and so are gradients. Linears that belong to no such region are cut by outputs, which every rank
then gets, and what stands between them is computed whole. No family is known by name. The proof at start
compares real ranks of the run's own layout beside this.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, product
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dsx.hub.context_probe import FAR, block_calls
from dsx.hub.cut_regions import RANKS, splits_in
from dsx.hub.disk_names import is_turned
from dsx.hub.model_structure import BlockCall, structure_of
from dsx.hub.shrunk import kinds_of, random_model, shrunk
from dsx.hub.tensor_plan import (
    EVALUATED,
    MEAN,
    SEGMENTS,
    SUMMAND,
    SUMMED,
    BlockPlan,
    children,
    divide,
    generic,
    heads_of,
    is_mixer,
    is_region,
    outputs_of,
    put_means,
    reads,
    rotary_copied,
    segments_in,
)
from dsx.kept import cache_folder, code_version, keep
from dsx.models.transformers_settings import torch_forms

_COLUMNS = ("colwise", "qkv_colwise", "packed_colwise")
_STACKED = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
_BESIDE = ("rowwise", SUMMAND, "packed_rowwise")
_STACK = 3  # experts, and the two dims of each one's matrix
_SEQUENCES = 3  # samples, tokens, features


@dataclass(frozen=True)
class DerivedPlan:
    """What was found.

    Attributes:
        styles: Style by path in a block, with ``*`` for numbers.
        counts: As of :class:`~dsx.hub.tensor_plan.BlockPlan`.
        by_head: Likewise.
        no_sequence: Why sequence parallelism is refused; None if nothing of it is known yet.
        regions: Paths that count together or not at all.
    """

    styles: Mapping[str, str] = field(default_factory=dict)
    counts: tuple[str, ...] = ()
    by_head: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    no_sequence: str | None = None
    regions: tuple[frozenset[str], ...] = ()

    def within(self, blocks: str, names: Collection[str]) -> DerivedPlan:
        """What is about ``names`` alone, of a list of blocks at ``blocks``."""
        inside = [each for each in self.regions if {f"{blocks}.*.{path}" for path in each} <= {*names}]
        kept = frozenset().union(*inside)
        styles = {path: style for path, style in self.styles.items() if path in kept}
        return replace(self, styles=styles, regions=tuple(inside))

    def patterns(self, blocks: str) -> dict[str, str | None]:
        """The styles as ``dsx.parallel.tensor_plan`` has them, of a list of blocks at ``blocks``."""
        return {f"{blocks}.*.{path}": style for path, style in self.styles.items()}

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What ``asdict`` gave. Raises KeyError, TypeError or ValueError for other text."""
        held = json.loads(text)
        by_head = {name: tuple(names) for name, names in held["by_head"].items()}
        regions = tuple(frozenset(each) for each in held["regions"])
        return cls(**held | {"counts": tuple(held["counts"]), "by_head": by_head, "regions": regions})


@lru_cache(maxsize=8)
def derived_plan(config: str) -> DerivedPlan:
    """The plan of a model, by the JSON of its config.json: from the cache, if this machine has found it.

    It is empty where no small model of it runs, or nothing can be cut.
    """
    name = f"{hashlib.sha256(config.encode()).hexdigest()[:32]}.json"
    place = cache_folder("plans") / code_version() / name
    with suppress(OSError, KeyError, TypeError, ValueError):
        return DerivedPlan.from_json(place.read_text(encoding="utf-8"))
    try:
        with torch_forms(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            found = _tried(config)
    except Exception:  # noqa: BLE001 - whatever the family's code does on this machine
        return DerivedPlan()
    keep(place, json.dumps(asdict(found), default=sorted))
    return found


_Region: TypeAlias = tuple[str, BlockPlan]
"""Modules of a block that ranks share: below which path, empty for linears of the block itself, and how."""


@dataclass(frozen=True)
class _Run:
    """A block's forward in one process.

    Attributes:
        block: The block.
        call: What it is called with.
        uses: Of each module that ran, by path: arguments, named ones, result; in the order of their ends.
        read: Linears whose matrices the block's own code multiplies by.
        splits: As of :class:`~dsx.hub.tensor_plan.BlockPlan`.
        rotary: Likewise.
    """

    block: nn.Module
    call: BlockCall
    uses: Mapping[str, list[tuple[Any, Any, Any]]]
    read: Collection[str]
    splits: Mapping[int, tuple[int, ...]]
    rotary: int

    @classmethod
    def of(cls, block: nn.Module, call: BlockCall, read: Collection[str], rotary: int) -> _Run:
        uses = defaultdict[str, list[tuple[Any, Any, Any]]](list)
        handles = [
            inner.register_forward_hook(
                lambda _, given, named, gave, path=path: uses[path].append((given, named, _kept(gave))),
                with_kwargs=True,
            )
            for path, inner in block.named_modules()
            if path
        ]
        splits = set[tuple[int, ...]]()
        with torch.no_grad(), splits_in(block, splits):
            call.make(block, call.hidden)
        for handle in handles:
            handle.remove()
        return cls(block, call, uses, read, segments_in(block, splits), rotary)

    @property
    def names(self) -> set[str]:
        """What a plan may name in the block: modules that ran, parameters, buffers; ``*`` for numbers."""
        held = chain(self.block.named_parameters(), self.block.named_buffers())
        return {generic(path) for path in (*self.uses, *(name for name, _ in held))}

    def before_others(self, linears: Collection[str]) -> list[str]:
        """Those of some linears of whose outputs another one's inputs are made, as of low rank."""
        gave, given = dict[str, Tensor](), dict[str, Tensor]()

        def begins(_: Any, args: Any, path: str) -> None:
            given[path] = args[0]

        def ends(_module: Any, _args: Any, y: Tensor, path: str) -> Tensor:
            gave[path] = y.detach().requires_grad_()
            return gave[path].clone()  # the block may write into it

        block = copy.deepcopy(self.block)
        for path in linears:
            block.get_submodule(path).register_forward_pre_hook(partial(begins, path=path))
            block.get_submodule(path).register_forward_hook(partial(ends, path=path))
        found = set[str]()
        with suppress(Exception), torch.enable_grad():  # whatever the family's code does with gradients
            self.call.make(block, self.call.hidden)
            for each in (each for each in given.values() if each.requires_grad):
                every = torch.autograd.grad(
                    each.sum(), [*gave.values()], retain_graph=True, allow_unused=True
                )
                found |= {path for path, grown in zip(gave, every, strict=True) if grown is not None}
        return [path for path in linears if path in found]

    def linears(self, within: str) -> list[str]:
        """Linears below a path, or the block's own, which ran once, in their order."""
        return [
            path
            for path, each in self.uses.items()
            if type(self.block.get_submodule(path)) is nn.Linear
            and len(each) == 1
            and path not in self.read
            and (path.startswith(f"{within}.") if within else path in dict(children(self.block)))
        ]


def _kept(gave: Any) -> Any:
    """A result as it is now: a block may add to it in place."""
    return gave.clone() if isinstance(gave, Tensor) else gave


def _tried(config: str) -> DerivedPlan:
    small = shrunk(json.loads(config), tensor=2)
    structure, model = structure_of(json.dumps(small, sort_keys=True)), random_model(small).eval()
    for path, module in structure.model.named_modules():
        made: Any = model.get_submodule(path)
        if is_turned(module):
            model.set_submodule(path, turned := nn.Linear(*made.weight.shape))
            turned.weight, turned.bias = nn.Parameter(made.weight.detach().t()), made.bias
        elif type(module) is nn.Linear and isinstance(made, nn.Linear):
            made.__class__ = nn.Linear  # a family's own that does the same, which blocks have plain
    kinds, found = kinds_of(structure), dict[Any, tuple[_Run, list[_Region]]]()
    for number, (block, call) in enumerate(block_calls(model, structure.blocks, 1)):
        kind = kinds[number], frozenset(name for name, _ in block.named_parameters())
        if kind not in found:
            rotary = vars(model.config).get("qk_rope_head_dim") or 0
            run = _Run.of(block, call, structure.read[number], rotary)
            found[kind] = run, list(_regions(run, structure.width))
    return _agreed(found.values())


_Said: TypeAlias = tuple[_Run, str, BlockPlan]
"""A region and the run of the kind of blocks that has it."""


def _agreed(found: Collection[tuple[_Run, list[_Region]]]) -> DerivedPlan:
    """The plan of all kinds of blocks: the regions of which no kind says something else."""
    styles, counts, by_head = dict[str, str](), dict[str, None](), dict[str, tuple[str, ...]]()
    regions, flat = list[frozenset[str]](), False
    for said in _alike(found):
        plans = [plan for _, _, plan in said]
        own = {path: style for plan in plans for path, style in plan.patterns().items()}
        counted = tuple(dict.fromkeys(name for plan in plans for name in plan.counts))
        heads = {generic(name): names for plan in plans for name, names in plan.by_head.items()}
        if not all(_says(run, own, said) for run, _ in found):
            continue
        if not all(_holds(*each, counts=counted, by_head=heads) for each in said):
            continue
        styles |= own
        regions.append(frozenset(own))
        counts |= dict.fromkeys(counted)
        by_head |= heads
        if all(path for _, path, _ in said):
            continue
        uses = (use for run, _ in found for name in own for use in run.uses.get(name, ()))
        flat |= any(given[0].ndim != _SEQUENCES for given, *_ in uses)
    # Gradients of what a child hands on, and the block uses on its part of the tokens, nobody sums.
    held = [
        leaf for run, _ in found for uses in run.uses.values() for use in uses for leaf in tree_leaves(use[2])
    ]
    told = "its own linears work on a flat list of tokens" if flat else None
    if any(isinstance(leaf, nn.Parameter) for leaf in held):
        told = "its blocks use parameters that modules in them hand on"
    return DerivedPlan(styles, tuple(counts), by_head, told, tuple(regions))


def _alike(found: Collection[tuple[_Run, list[_Region]]]) -> list[list[_Said]]:
    """Regions that name the same modules, in whichever kinds of blocks, with each other."""
    groups = list[list[_Said]]()
    for each in ((run, path, plan) for run, regions in found for path, plan in regions):
        names = each[2].patterns().keys()
        same = [group for group in groups if any(names & plan.patterns().keys() for *_, plan in group)]
        groups = [group for group in groups if group not in same] + [[*chain(*same), each]]
    return groups


def _says(run: _Run, own: Mapping[str, str], said: Collection[_Said]) -> bool:
    """Whether a kind of blocks is cut by its own regions as by the patterns of all kinds."""
    mine = [plan for other, _, plan in said if other is run]
    named = {name for plan in mine for name in plan.patterns()} | {generic(path) for _, path, _ in said}
    # A pattern that would say two things of modules whose names differ in a number says none.
    once = all(own[generic(at)].split(":")[0] == style for plan in mine for at, style in plan.styles.items())
    same = all(own[name] == style for plan in mine for name, style in plan.patterns().items())
    return once and same and run.names & own.keys() <= named


def _holds(run: _Run, path: str, plan: BlockPlan, **facts: Any) -> bool:
    """Whether a region is right where modules count what those of other kinds of blocks have to count."""
    tried = replace(plan, **facts)
    rows = [name for name, style in plan.styles.items() if style in ("rowwise", "packed_rowwise")]
    return tried == plan or (
        len(rows) == 1 and any(_proved(run, tried, path, rows[0], ranks) == tried for ranks in RANKS)
    )


def _regions(run: _Run, width: int) -> Iterator[_Region]:
    """What of a block ranks can share."""
    for path, child in [*children(run.block), ("", run.block)]:
        if isinstance(child, nn.Linear) or (path and path not in run.uses):
            continue
        yield from (found := [*_inside(run, path, child)])
        for name, inner in child.named_modules(prefix=path) if path else ():
            if (experts := _experts(run, name, inner)) is not None:
                yield experts
        rest = [name for name in run.linears(path) if not any(name in plan.styles for _, plan in found)]
        if gathered := [name for name in rest if _can_be_gathered(run, name, width)]:
            yield path, BlockPlan(dict.fromkeys(gathered, "colwise_gather_output"))


def _inside(run: _Run, path: str, module: nn.Module) -> Iterator[_Region]:
    """The outermost regions of linears in a child of the block, or of the block's own linears."""
    region = _mixer(run, path) if path and is_mixer(module) else _linears(run, path)
    if region is not None:
        yield region
    elif path:
        for name, inner in module.named_children():
            yield from _inside(run, f"{path}.{name}", inner)


def _can_be_gathered(run: _Run, path: str, width: int) -> bool:
    """Whether a linear is worth it, and the code of its owner reads its matrix on no path, as kernels do."""
    owner, _, name = path.rpartition(".")
    worth = 2 * min(run.block.get_parameter(f"{path}.weight").shape) >= width
    return worth and not reads(run.block.get_submodule(owner), name)


def _linears(run: _Run, path: str) -> _Region | None:
    """A region of linears below ``path`` of which the last one to run sums the parts."""
    *columns, row = run.linears(path) or [""]
    first = run.before_others(columns)
    columns = [name for name in columns if name not in first]
    if not columns:
        return None
    rotated = [{name: "mla_kv_a_proj"} for name in first if run.rotary]
    owners = {name.rpartition(".")[0] for name in columns}
    parts = _COLUMNS if len(columns) == 1 else _COLUMNS[:1]
    parameters = [
        f"{owner}.{name}" if owner else name
        for owner in owners
        for name, each in run.block.get_submodule(owner).named_parameters(recurse=False)
        if each.ndim == 1
    ]
    ranks = _ranks(run, owners, columns)
    for style, last in product(parts, ("rowwise", "packed_rowwise")):
        for counts in _counts(run, owners, columns):
            for more, whole in product(((), parameters) if parameters else ((),), ({}, *rotated)):
                for by_head in _by_head(run, owners) if counts else ({},):
                    cut = {**dict.fromkeys(columns, style), row: last, **dict.fromkeys(more, "colwise")}
                    facts: dict[str, Any] = {"counts": counts, "by_head": by_head, "rotary": run.rotary}
                    plan = BlockPlan({**cut, **whole}, pairs=heads_of(run.block), **facts)
                    if (proved := _proved(run, plan, path, row, ranks)) is not None:
                        return path, proved
    return None


def _mixer(run: _Run, path: str) -> _Region | None:
    """A region of linears around convolutions and recurrences, by heads or channels."""
    *columns, row = run.linears(path) or [""]
    first = run.before_others(columns)
    columns = [name for name in columns if name not in first]
    if not columns:
        return None
    mixer = _Mixer.of(run, path, columns, row)
    for shared, over in product((0, *mixer.sizes), (False, True) if mixer.norms else (False,)):
        plan = mixer.plan(shared, mean=over)
        for counts in mixer.counts(plan):
            tried = replace(plan, counts=counts)
            if (found := _proved(run, tried, path, row, mixer.ranks)) is None:
                continue
            for name in (each for each in counts if not by_heads(each)):
                fewer = replace(tried, counts=tuple(each for each in tried.counts if each != name))
                if (with_fewer := _proved(run, fewer, path, row, mixer.ranks)) is not None:
                    tried, found = fewer, with_fewer  # what need not count a rank's own stays as it is
            return path, found
    return None


@dataclass(frozen=True)
class _Mixer:
    """What of a mixer ranks may share.

    Attributes:
        run: Of its block.
        columns: Linears that are cut by outputs.
        row: The one that sums the ranks' parts.
        others: Parameters and buffers beside linears that have something for each output, by path.
        convolutions: Those of them that are of convolutions.
        norms: Modules that may take means of all outputs.
    """

    run: _Run
    columns: list[str]
    row: str
    others: Mapping[str, Tensor]
    convolutions: Collection[str]
    norms: list[str]

    @classmethod
    def of(cls, run: _Run, path: str, columns: list[str], row: str) -> _Mixer:
        module, width = run.block.get_submodule(path), run.block.get_parameter(f"{row}.weight").shape[1]
        owners = {name.rpartition(".")[0] for name in columns}
        outputs = {len(run.block.get_parameter(f"{name}.weight")) for name in columns}
        others, norms, convolutions = dict[str, Tensor](), list[str](), list[str]()
        for name, inner in module.named_modules(prefix=path):
            if isinstance(inner, nn.Linear):
                continue
            held = dict(inner.named_parameters(recurse=False, prefix=name))
            if isinstance(inner, nn.Conv1d) or name in owners:
                others |= held
                convolutions += [*held] if isinstance(inner, nn.Conv1d) else []
                buffers = dict(inner.named_buffers(recurse=False, prefix=name))
                others |= {key: each for key, each in buffers.items() if not outputs.isdisjoint(each.shape)}
            elif wide := {key: each for key, each in held.items() if each.shape == (width,)}:
                others |= wide
                norms.append(name)
        return cls(run, columns, row, others, convolutions, norms)

    @property
    def _dims(self) -> dict[str, int]:
        """The size that is cut, by path of a linear, a parameter or a buffer."""
        linears = {name: len(self.run.block.get_parameter(f"{name}.weight")) for name in self.columns}
        return linears | {name: each.shape[outputs_of(each)] for name, each in self.others.items()}

    def _parts(self, name: str) -> tuple[int, ...]:
        """Parts of a linear's outputs, of a convolution or a buffer; other parameters are not split."""
        size, each = self._dims[name], self.others.get(name)
        split = name in self.columns or not isinstance(each, nn.Parameter) or name in self.convolutions
        return self.run.splits.get(size, (size,)) if split else (size,)

    @property
    def sizes(self) -> list[int]:
        """Sizes of segments that every rank may need as a whole, as what heads of one group share."""
        every = (self._parts(name) for name in self._dims)
        inner = self.run.block.get_parameter(f"{self.row}.weight").shape[1]
        return list(dict.fromkeys(size for each in every if len(each) > 1 for size in each if size != inner))

    @property
    def _modules(self) -> dict[str, nn.Module]:
        paths = dict.fromkeys(name.rpartition(".")[0] for name in (*self.columns, *self.others))
        return {path: self.run.block.get_submodule(path) for path in paths}

    @property
    def _heads(self) -> dict[str, int]:
        return {name: value for name, value in self._held().items() if by_heads(name)}

    @property
    def ranks(self) -> int:
        """The first number of simulated ranks that can share its heads."""
        shared = math.gcd(*(self._heads.values() or self._dims.values()))
        return next((ranks for ranks in RANKS if shared % ranks == 0), RANKS[0])

    def _held(self) -> dict[str, int]:
        """Its whole numbers, by path."""
        return {
            f"{generic(path)}.{name}": value
            for path, module in self._modules.items()
            if not isinstance(module, nn.Conv1d)
            for name, value in vars(module).items()
            if type(value) is int and value > 1
        }

    def plan(self, shared: int, *, mean: bool) -> BlockPlan:
        """A candidate.

        Args:
            shared: The size of segments that every rank is given; 0 for none.
            mean: Whether ranks take means together.
        """
        styles = {self.row: "rowwise"}
        for name in self._dims:
            parts = self._parts(name)
            marks = ("all" if part == shared else "own" for part in parts)
            plain = len(parts) == 1 and name not in self.convolutions
            styles[name] = "colwise" if plain else f"{SEGMENTS}:{','.join(marks)}"
        owner, _, name = self.row.rpartition(".")
        if reads(self.run.block.get_submodule(owner), name):
            mixed = (each.rpartition(".")[0] for each in self.convolutions)
            styles |= {each: EVALUATED for each in mixed if each.rpartition(".")[0] == owner}
        styles |= dict.fromkeys(self.norms if mean else (), MEAN)
        plan = BlockPlan({}, pairs=heads_of(self.run.block), splits=self.run.splits)
        return plan.with_styles(styles)

    def counts(self, plan: BlockPlan) -> Iterator[tuple[str, ...]]:
        """Attributes that may count a rank's heads and features: heads and groups, and sizes besides."""
        heads, block = self._heads, self.run.block
        whole = block.get_parameter(f"{self.row}.weight").shape
        sizes = {whole[1], *self._dims.values()}
        for name in plan.marks:
            every = zip(self._parts(name), plan.marks[name], strict=True)
            sizes |= {part for part, mark in every if mark == "own"}
        sizes -= {*heads.values()}
        wide = {name: each for name, each in self._held().items() if each in sizes and "head" not in name}
        yield (*heads, *wide)
        yield (*heads, *(name for name in wide if not name.startswith(tuple(map(generic, self.norms)))))
        yield (*heads, *(name for name, each in wide.items() if each != whole[0]))


def _ranks(run: _Run, owners: Collection[str], columns: Collection[str]) -> int:
    """The first number of simulated ranks that can share heads; features, where nothing counts heads."""
    modules = [run.block.get_submodule(owner) for owner in owners]
    heads = [each for module in modules for each in _heads_in(module)]
    widths = [len(run.block.get_parameter(f"{name}.weight")) for name in columns]
    sizes = [vars(module).get("head_dim") for module in modules]
    heads = heads or [width // size for width in widths for size in sizes if size and width > size]
    shared = math.gcd(*(heads or widths))
    return next((ranks for ranks in RANKS if shared % ranks == 0), RANKS[0])


def _counts(run: _Run, owners: Collection[str], columns: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Attributes that may count a rank's heads and features, the likeliest first."""
    held = {
        f"{generic(owner)}.{name}" if owner else name: value
        for owner in owners
        for name, value in vars(run.block.get_submodule(owner)).items()
        if type(value) is int and value > 1
    }
    heads = tuple(name for name in held if counts_heads(name))
    sizes = {size for name in columns for size in run.block.get_parameter(f"{name}.weight").shape}
    wide = tuple(name for name, value in held.items() if value in sizes and name not in heads)
    yield ()
    if heads:
        yield heads
        yield from ((*heads, name) for name in wide)
        yield (*heads, *wide)


def counts_heads(path: str) -> bool:
    """Whether an attribute of a module has a name as if it said how many heads there are."""
    name = path.rpartition(".")[2]
    return "head" in name and re.search("dim|size|group", name) is None


def by_heads(path: str) -> bool:
    """Whether an attribute has a name as if it said how many heads, or groups of them, there are."""
    return counts_heads(path) or path.endswith("groups")


def _heads_in(module: nn.Module) -> list[int]:
    held = vars(module).items()
    return [each for name, each in held if type(each) is int and each > 1 and counts_heads(name)]


def _by_head(run: _Run, owners: Collection[str]) -> Iterator[Mapping[str, tuple[str, ...]]]:
    """Arguments of a module that may have something for every head, as ALiBi's slopes and masks with them."""
    yield {}
    for owner in owners:
        for _, named, _ in run.uses.get(owner, ()):
            tensors = [key for key, each in named.items() if isinstance(each, Tensor) and each.ndim > 1]
            heads = max(_heads_in(run.block.get_submodule(owner)), default=1)
            likely = [key for key in tensors if named[key].shape[1] == heads or not len(named[key]) % heads]
            yield from ({owner: tuple(keys)} for keys in (likely, *([key] for key in tensors)))


def _proved(run: _Run, plan: BlockPlan, path: str, row: str, ranks: int) -> BlockPlan | None:
    """The plan, with what is summed, if the parts of simulated ranks are one process's; else None."""
    ((_, _, wanted),) = run.uses[row]
    bias = getattr(run.block.get_submodule(row), "bias", None)
    wanted = wanted if bias is None else wanted - bias
    total, used = torch.zeros_like(wanted), dict[str, bool]()
    try:
        for rank in range(ranks):
            part, grown = _part(run, plan, row, ranks, rank)
            total += part
            used |= {name: used.get(name, False) or grows for name, grows in grown.items()}
    except Exception:  # noqa: BLE001 - whatever the family's code does with these sizes
        return None
    if not _near(total, wanted):
        return None
    summed = [name for name, grows in used.items() if grows and name]
    for owner in {name.rpartition(".")[0] for name in summed} - {""}:
        held = {f"{owner}.{own}" for own, _ in run.block.get_submodule(owner).named_parameters()}
        if held <= {*summed}:
            summed = [*(name for name in summed if name not in held), owner]
    plan = replace(plan, styles={**plan.styles, **dict.fromkeys(summed, SUMMED)})
    # What a region is given is summed where it begins, if it has nothing but cut linears.
    outer = (each for each in children(run.block) if path and f"{path}.".startswith(f"{each[0]}."))
    begins = any(is_region(child, name, plan, ranks) for name, child in outer)
    return plan if begins or not used[""] else None


def _near(own: Tensor, wanted: Tensor) -> bool:
    return bool((own - wanted).abs().max() < FAR * wanted.abs().max())


def _part(run: _Run, plan: BlockPlan, row: str, ranks: int, rank: int) -> tuple[Tensor, dict[str, bool]]:
    """A rank's part of a row-parallel linear's outputs, and which whole parameters have a gradient of it.

    The key "" is what the block is given. What column-parallel linears are given is left out: ranks sum the
    gradient of that, and likewise what ``mla_kv_a_proj`` gives all heads.
    """
    block = _cut_for(run.block, plan, ranks, rank)
    whole = {
        name: each
        for name, each in block.named_parameters()
        if plan.cut(run.block, name, run.block.get_parameter(name)).split is None
        and not name.startswith(f"{row}.")
        and name not in plan.styles
    }
    found: list[Tensor] = []
    recorded: Tensor = run.uses[row][0][2].clone()

    def ends(module: Any, _given: Any, gave: Tensor) -> Tensor:
        found.append(gave if module.bias is None else gave - module.bias)
        return recorded

    block.get_submodule(row).register_forward_hook(ends)
    for name in plan.styles.keys() & run.uses.keys() - {row}:
        if plan.styles[name] == "mla_kv_a_proj":
            rotary_copied(block.get_submodule(name), plan.rotary, Tensor.detach)
        elif isinstance(linear := block.get_submodule(name), nn.Linear):
            linear.register_forward_pre_hook(lambda _, given: (given[0].detach(), *given[1:]))
        elif plan.styles[name] == MEAN:
            put_means(linear, _replayed(run, name))
    hidden = run.call.hidden.detach().clone().requires_grad_()
    with torch.enable_grad():
        run.call.make(block, hidden)
        (part,) = found
        of = {"": hidden, **whole}
        grown = torch.autograd.grad((part * torch.randn_like(part)).sum(), [*of.values()], allow_unused=True)
    told = {name: each is not None and bool(each.any()) for name, each in zip(of, grown, strict=True)}
    return part.detach(), told


def _replayed(run: _Run, path: str) -> Callable[[Tensor], Tensor]:
    """Gives the means that one process took in a module, one after another."""
    noted, ((given, named, _),) = list[Tensor](), run.uses[path]
    module = copy.deepcopy(run.block.get_submodule(path))
    put_means(module, lambda mean: noted.append(mean) or mean)  # type: ignore[func-returns-value]
    with torch.no_grad():
        module(*given, **named)
    every = iter(noted)
    return lambda _: next(every)


def _cut_for(block: nn.Module, plan: BlockPlan, ranks: int, rank: int) -> nn.Module:
    """A copy of a block as one rank has it, its linears and parameters cut by a plan."""
    made = copy.deepcopy(block)
    for path, module in list(made.named_modules()):
        for own, parameter in list(module.named_parameters(recurse=False)):
            name = f"{path}.{own}" if path else own
            value = _own_value(block, plan, name, parameter.detach(), ranks, rank)
            setattr(module, own, nn.Parameter(value.clone()))
        for own, buffer in list(module.named_buffers(recurse=False)):
            if (name := f"{path}.{own}") in plan.marks:
                setattr(module, own, plan.own(name, buffer, ranks, rank))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
            divide(made.get_submodule(path.rpartition(".")[0]), path, plan, ranks)
    plan.give_own_heads(made, ranks, rank)
    return made


def _own_value(block: nn.Module, plan: BlockPlan, name: str, value: Tensor, ranks: int, rank: int) -> Tensor:
    """What one rank uses of a parameter."""
    path, cut = name.rpartition(".")[0], plan.cut(block, name, value)
    if plan.styles.get(name) == SUMMAND:
        return value / ranks
    if marked := plan.marks.keys() & {name, path}:
        return plan.own(marked.pop(), value, ranks, rank)
    if plan.keeps(path, ranks) and isinstance(block.get_submodule(path), nn.Linear):
        kept: Tensor = value.unflatten(0, (plan.pairs, -1))[rank * plan.pairs // ranks]
        return kept
    if cut.split is None:
        return value
    pieces = value.split(cut.parts or (value.shape[cut.split],), cut.split)
    if any(piece.shape[cut.split] % ranks for piece in pieces):
        raise ValueError(f"{name}: {tuple(value.shape)}")
    return torch.cat([piece.chunk(ranks, cut.split)[rank] for piece in pieces], cut.split)


def _experts(run: _Run, path: str, module: nn.Module) -> _Region | None:
    """Stacks of experts of which every rank has a part of each."""
    own = dict(module.named_parameters(recurse=False))
    stacks = [name for name, each in own.items() if each.ndim == _STACK]
    uses = run.uses.get(path, ())
    if len(stacks) < 2 or len(uses) != 1 or not isinstance(uses[0][2], Tensor):
        return None
    others = [name for name in own if name not in stacks]
    ((given, named, wanted),) = uses
    for styles in product(*(_STACKED,) * len(stacks), *(_BESIDE,) * len(others)):
        plan = BlockPlan(dict(zip([*stacks, *others], styles, strict=True)))
        with suppress(Exception), torch.no_grad():  # whatever the family's code does with these sizes
            parts = [_cut_for(module, plan, 2, rank)(*given, **named) for rank in range(2)]
            if _near(torch.stack(parts).sum(0), wanted):
                found = {f"{path}.{name}": style for name, style in plan.styles.items()}
                return path, BlockPlan({**found, path: "moe_tp_experts"})
    return None
