"""Whether a family's blocks may be given a part of each sequence, found by trying a small model of it.

A block runs once for a whole sequence, in transformers' own way, and once as a rank of a context axis would
run it, with what the others would send taken from the first run. It must give its part of the same. A module
that does not, and in which nothing calls transformers' registry of attention, is one that mixes tokens by
itself: a convolution, the delta rule, a state space. Then the block is tried again with the whole sequence
gathered around that module, or its states are passed from rank to rank where outputs and gradients of the
module in parts are those of the whole (:func:`passes_states`). If something else is wrong, everything that
attends in the block is gathered around too, and called as if there were one rank: attention past the
registry, sparse indexers. So is what few tokens do not show: positions that a module counts by itself, which
begin at zero for a part too, and a choice by the name of the attention function, which is another one here.
What still gives something else, because the block itself mixes tokens, is refused by name.
"""

from __future__ import annotations

import copy
import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from dsx.errors import ModelError
from dsx.hub import values
from dsx.hub.block_arguments import BlockArguments
from dsx.hub.context import (
    ContextAttention,
    Gathered,
    check_kernels,
    gather_around,
    kernel_of,
    put_attention,
    put_context,
)
from dsx.hub.late_mask import LateMask
from dsx.hub.model_structure import BlockCall, structure_of
from dsx.hub.shrunk import kinds_of, random_model, shrunk
from dsx.hub.state_passing import Neighbours, StateRelay, What, parts_of
from dsx.models.spec import ContextMethod, HubModel
from dsx.models.transformers_settings import first_line, torch_forms
from dsx.nn.context import WHOLE, ContextParallel, DetachedContextParallel
from dsx.nn.documents import hidden_of
from dsx.nn.ring import Held, Ring

_ROWS, _TOKENS, _NEAR = 2, 32, 0.01  # more tokens than small windows and indexers see

FAR = 5e-5
"""How far outputs for a part may be off those for the whole, beside the largest of them."""


Mixers: TypeAlias = "Mapping[Hashable, Gathered]"
"""By kind of block, the modules of it that need tokens of other ranks."""


def no_context(model: HubModel, size: int, method: ContextMethod) -> str | None:
    """Why ``size`` ranks may not share sequences of a model; None if they may."""
    ranks = size if method == "ulysses" else 2
    return _found(model.config)[0] or (
        _found(model.config, ranks, method)[0] if method != "all_gather" else None
    )


@lru_cache(maxsize=8)
def no_selective(config: str) -> str | None:
    """Why blocks of a model may not compute their attention alone again; None if they may.

    A small model shows whether one of them attends by transformers' registry, and computes the same by the
    name of another function there.
    """
    uses = list[Use]()
    try:
        check_kernels(structure_of(config).model)
        with torch_forms(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            small = shrunk(json.loads(config))
            blocks = structure_of(json.dumps(small, sort_keys=True)).blocks
            for number, (block, call) in enumerate(block_calls(random_model(small).eval(), blocks, 1)):
                noted, own = (_Watched(copy.deepcopy(block)) for _ in range(2))
                put_attention(noted.module, partial(Noted, uses, WHOLE))
                for each in (noted, own):
                    each.run(call, call.hidden)
                if (path := noted.differs(own)) is not None:
                    return f"block {number}.{path} chooses by the name of its attention function"
    except ModelError as error:
        return f"{error.where}: {error.what}"
    except Exception as error:  # noqa: BLE001 - whatever the family's code does on this machine
        return f"a small model of it does not run ({first_line(error)})"
    return None if uses else "no block of it attends by transformers' registry of attention functions"


def mixers(config: str, ranks: int) -> list[Gathered]:
    """For every block of a model, what needs tokens of other ranks where ``ranks`` share sequences.

    Raises:
        ModelError: They may not share sequences of this model.
    """
    structure = structure_of(config)
    if ranks == 1:
        return [Gathered()] * len(structure.list_of_blocks)
    why, found = _found(config)
    if why is not None:
        raise ModelError("dsx.parallel.context", why, "use 1")
    return [found[kind] for kind in kinds_of(structure)]


@lru_cache(maxsize=8)
def _found(config: str, size: int = 2, method: ContextMethod = "all_gather") -> tuple[str | None, Mixers]:
    """Why ranks may not share sequences, and what then needs whole ones, which all_gather shows.

    There a module that attends is given a mask for a part, and so is not taken for one that mixes by itself.
    """
    try:
        check_kernels(structure_of(config).model)
    except ModelError as error:
        return f"{error.where}: {error.what}", {}
    try:
        with torch_forms(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            small = shrunk(json.loads(config), tensor=size)
            return _tried(small, size, method, {} if method == "all_gather" else _found(config)[1])
    except ModelError as error:
        why = f"whether that is right is not known, as no small model of it could be tried ({error.what})"
        return why, {}
    except Exception as error:  # noqa: BLE001 - whatever the family's code does on this machine
        return f"a small model of it does not run ({first_line(error)})", {}


def _tried(
    small: dict[str, Any], size: int, method: ContextMethod, known: Mixers
) -> tuple[str | None, Mixers]:
    """How a block's outputs for a rank's part differ from those for the whole, and what needs the whole."""
    text = json.dumps(small, sort_keys=True)
    structure, model = structure_of(text), random_model(small).eval()
    dtypes = values.buffer_dtypes(text, torch.float32)
    parts = [DetachedContextParallel(size, rank, method=method) for rank in (0, size - 1)]
    ranks = [(cp, BlockArguments(structure, torch.device("cpu"), torch.float32, dtypes, cp)) for cp in parts]
    kinds = kinds_of(structure)
    mixing = dict(known)
    for number, (block, call) in enumerate(block_calls(model, structure.blocks, size)):
        uses = list[Use]()
        if method == "ring" and (dropout := _dropout(block, call, parts[0])):
            return (
                f"block {number} drops scores of attention, a share of {dropout}, which a ring does not",
                {},
            )
        first, own = (_Watched(copy.deepcopy(block), uses) for _ in range(2))
        put_context(first.module, parts[0], partial(Noted, uses))
        for each in (first, own):
            each.run(call, call.hidden)
        trial, kind = _Trial(block, call.hidden, first, own, uses), kinds[number]
        around, told = mixing.get(kind, Gathered()), ""
        while wrong := next(filter(None, (trial.wrong(*each, number, around) for each in ranks)), None):
            path, why = wrong
            if method == "ring":
                why = f"does not attend as a ring does ({why})"
            told = told or f"{'.'.join(filter(None, (f'block {number}', path)))} {why}"
            wider = None if known else first.wider(around, path)
            if wider is None:
                return told, {}
            around = wider
        if kind not in mixing or around != mixing[kind]:
            mixing[kind] = replace(around, passing=_passing(block, first, around))
    return None, mixing


@dataclass(frozen=True, slots=True)
class _Trial:
    """A block, what it was given, and its runs for whole sequences: with attention noted, and as it is."""

    block: nn.Module
    x: Tensor
    first: _Watched
    own: _Watched
    uses: list[Use]

    def wrong(
        self, cp: ContextParallel, arguments: BlockArguments, number: int, around: Gathered
    ) -> tuple[str, str] | None:
        """The module that gives a rank another part than that of its output for the whole, and why."""
        part, whole = _Watched(copy.deepcopy(self.block)), self.own if around.alone else self.first
        named = self.first.differs(self.own)
        if not around.alone:
            put_context(part.module, cp, partial(Replayed, iter(self.uses)))
        for path in around.paths:
            gather_around(part.module, (path,), cp, partial(_replayed, whole.seen[path][0]))
        told = {"training": False, "whole": around.alone}
        try:
            mine = arguments.call(number, cp.cut(self.x), self.x.shape[1], None, **told)
            if _is_part(part.run(mine, cp.cut(self.x)), whole.seen[""][1], cp):
                if named is not None and not around.alone:
                    return named, "chooses by the name of its attention function"
                counted = part.counting(whole, self.x.shape[1] // cp.size)
                why = "counts positions by itself, which begin at 0 for a part too"
                return None if counted is None else (counted, why)
        except ModelError as error:
            return "".join(part.inside[-1:]), error.what
        except Exception as error:  # noqa: BLE001 - whatever the family's code does with a part
            path = "".join(part.inside[-1:])
            if not self.uses:
                return path, "attends past transformers' registry of attention functions"
            return path, f"does not run on a part of a sequence ({first_line(error)})"
        why = "mixes tokens in another way than by a function of transformers' registry of attention"
        return part.mixer(whole, cp), why


def _dropout(block: nn.Module, call: BlockCall, cp: ContextParallel) -> float:
    """The largest share of scores that a block's attention drops where it is trained."""
    uses = list[Use]()
    trained = _Watched(copy.deepcopy(block).train())
    put_context(trained.module, cp, partial(Noted, uses))
    trained.run(call, call.hidden)
    return max((each.dropout for each in uses), default=0.0)


def _replayed(wholes: list[Tensor], x: Tensor, cp: ContextParallel) -> Tensor:
    """The tensor among ``wholes`` that ``x`` is a rank's part of."""
    found = next((each for each in wholes if _is_part(x, each, cp)), None)
    _require(close=found is not None)
    assert found is not None
    return found


def block_calls(model: Any, blocks: str, size: int) -> Iterator[tuple[nn.Module, BlockCall]]:
    """Every block, and what it is called with in a forward of transformers."""
    found: list[tuple[nn.Module, BlockCall]] = []
    handles = [
        block.register_forward_pre_hook(
            lambda block, given, named: found.append((block, BlockCall.of(given, named))), with_kwargs=True
        )
        for block in model.get_submodule(blocks)
    ]
    shape, most = (_ROWS, max(_TOKENS, 4 * size)), model.get_input_embeddings().num_embeddings
    with torch.no_grad():
        model(input_ids=torch.randint(most, shape), use_cache=False)
    for handle in handles:
        handle.remove()
    yield from found


@dataclass(frozen=True, slots=True)
class Use:
    """One use of attention for whole sequences: [B, h or g, S, D] each, and the context [B, S, h, D].

    And the share of the scores that was dropped.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    context: Tensor
    dropout: float


class Noted(ContextAttention):
    """Attends for whole sequences, and notes what it is given.

    Args:
        seen: Where to.
        cp: Not used.
        kernel: As above.
    """

    def __init__(self, seen: list[Use], cp: ContextParallel, kernel: str) -> None:
        super().__init__(cp, kernel)
        self._seen = seen

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, named: Any
    ) -> tuple[Tensor, None]:
        """The family's own attention."""
        y = kernel_of(module, self.kernel)(module, query, key, value, mask, **named)[0]
        self._seen.append(Use(query, key, value, y, named.get("dropout") or 0.0))
        return y, None


class Replayed(ContextAttention):
    """A rank's attention without its peers: what they would send is what was noted of the whole.

    Args:
        uses: What was noted, in order.
        cp: As above.
        kernel: As above.

    Raises:
        ValueError: What this rank has is not its part of that.
    """

    def __init__(self, uses: Iterator[Use], cp: ContextParallel, kernel: str) -> None:
        super().__init__(cp, kernel)
        self._uses, self._next = uses, list[Tensor]()

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, named: Any
    ) -> tuple[Tensor, None]:
        """As of a rank among others."""
        seen = next(self._uses)
        queries = [seen.query] if self.cp.method == "ulysses" else []
        self._next = [*queries, seen.key, seen.value, seen.context]
        return super().attend(module, query, key, value, mask, named)

    def reached(self, x: Tensor, firsts: Sequence[int]) -> tuple[Tensor, Sequence[range]]:
        whole = self.gathered(x)
        held = self.cp.reached(whole.shape[2], firsts) if any(firsts) else (range(whole.shape[2]),)
        return torch.cat([whole[:, :, each.start : each.stop] for each in held], 2), held

    def rows(self, mask: LateMask, queries: range, keys: range) -> Tensor:
        with _disable_current_modes():  # what is watched are the module's own calls
            return mask.rows(queries, keys)

    def gathered(self, x: Tensor) -> Tensor:
        """What was noted of keys, values or queries, of which ``x`` is a part."""
        whole = self._next.pop(0)
        if whole.shape[1] != x.shape[1]:  # repeated, so that each rank has a head
            whole = whole.repeat_interleave(x.shape[1] // whole.shape[1], 1)
        _require(close=_close(x, self.cp.cut(whole, 2)))
        return whole

    def in_turn(self, q: Tensor, k: Tensor, v: Tensor, how: Ring, sinks: Tensor | None) -> Tensor:
        wholes = [self.gathered(each) for each in (k, v)]

        def turns() -> Iterator[Held]:
            yield self.cp.chunks(how.length), k, v
            for rank in {*range(self.cp.size)} - {self.cp.rank}:
                came = how.sent(self.cp.rank, rank)
                k_came, v_came = (torch.cat([x[:, :, at.start : at.stop] for at in came], 2) for x in wholes)
                yield came, k_came, v_came

        return how.attend(q, turns(), sinks)[0]

    def to_heads(self, x: Tensor) -> Tensor:
        return self.gathered(x).chunk(self.cp.size, 1)[self.cp.rank]

    def to_sequence(self, y: Tensor) -> Tensor:
        whole = self._next.pop(0)
        _require(close=_close(y, whole.chunk(self.cp.size, 2)[self.cp.rank]))
        return self.cp.cut(whole)


def _require(*, close: bool) -> None:
    if not close:
        raise ValueError("attention is given something else for a part of the sequence than for the whole")


class _Watched(TorchDispatchMode):
    """A block, of whose modules is noted what they were given and gave last, the first to end first.

    Args:
        module: The block.
        uses: Of attention, which grow while it runs.

    Attributes:
        inside: Paths of the modules that have begun and not ended.
        ops: What of torch was called in which module, and of ranges their lengths.
        seen: By path, the tensors that a module was given, hidden states first, and what it gave.
        attends: Paths of those in which attention was used.
        called: By path, the arguments of a module.
    """

    def __init__(self, module: nn.Module, uses: Sequence[Use] = ()) -> None:
        super().__init__()
        self.module, self.inside = module, list[str]()
        self.ops = list[tuple[str, Any, int]]()
        self.seen: dict[str, tuple[list[Tensor], Any]] = {}
        self.attends: set[str] = set()
        self.called: dict[str, tuple[Any, Any]] = {}
        self._uses, self._before = uses, list[int]()
        for path, inner in module.named_modules():
            inner.register_forward_pre_hook(partial(self._begun, path))
            inner.register_forward_hook(partial(self._ended, path), with_kwargs=True)

    def run(self, call: BlockCall, x: Tensor) -> Tensor:
        """What it gives for these hidden states."""
        with torch.no_grad(), self:
            return hidden_of(call.make(self.module, x))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, op = func(*args, **(kwargs or {})), func.overloadpacket
        self.ops.append(("".join(self.inside[-1:]), op, len(made) if op is torch.ops.aten.arange else 0))
        return made

    def counting(self, whole: _Watched, length: int) -> str | None:
        """A module that makes ranges of a part's length where it makes others of the whole; None if none."""
        more = Counter(self.ops) - Counter(whole.ops)
        return next((path for path, _, long in more if long == length), None)

    def differs(self, other: _Watched) -> str | None:
        """The first module that calls something else of torch; None if none does."""
        pairs = zip_longest(self.ops, other.ops)
        return next(((one or another)[0] for one, another in pairs if one != another), None)

    def wider(self, around: Gathered, path: str) -> Gathered | None:
        """What else to gather around where the module at ``path`` is not right so; None if nothing is left.

        First one that mixes by itself. Then all that attends: without a mask attention over ranks may look
        right beside arguments for whole sequences, and is not once there is one.
        """
        if not around.alone and path not in around.paths and self.mixes_alone(path):
            return Gathered(_outermost({path, *around.paths}))
        inner = {path for path in self.attends if not any(_is_below(each, path) for each in self.attends)}
        owner = next((each for each in around.paths if path == each or _is_below(path, each)), None)
        if around.alone and owner is not None:
            path = owner.rpartition(".")[0]
        paths = _outermost({*around.paths, *inner, path} - ({""} if not around.alone else set()))
        return Gathered(paths, alone=True) if paths and "" not in paths else None

    def mixes_alone(self, path: str) -> bool:
        """Whether a module made hidden states of hidden states, and attended nowhere."""
        xs, y = self.seen.get(path, ([], None))
        alike = isinstance(y, Tensor) and y.is_floating_point() and [y.shape] == [x.shape for x in xs[:1]]
        return bool(path) and alike and path not in self.attends

    def mixer(self, whole: _Watched, cp: ContextParallel) -> str:
        """The first module that was given a rank's part of what it is for the whole, and gave another.

        What does not go along the sequence, as routers' outputs for a flat list of tokens, shows in the
        module around it.
        """
        for path, (xs, y) in self.seen.items():
            (whole_xs, whole_y) = whole.seen.get(path, ([], None))
            along = isinstance(y, Tensor) and [y.shape[:2]] == [x.shape[:2] for x in xs[:1]]
            given = along and any(map(partial(_is_part, cp=cp), xs[:1], whole_xs))
            if given and not _is_part(y, whole_y, cp):
                return path
        return ""

    def _begun(self, path: str, *_: Any) -> None:
        self.inside.append(path)
        self._before.append(len(self._uses))

    def _ended(self, path: str, _module: nn.Module, given: Any, named: Any, gave: Any) -> None:
        self.inside.pop()
        if self._before.pop() < len(self._uses):
            self.attends.add(path)
        self.called[path] = given, named
        self.seen[path] = (
            [each for each in tree_leaves((given, named)) if isinstance(each, Tensor)],
            hidden_of(gave),
        )


def _is_below(path: str, owner: str) -> bool:
    return path != owner and (not owner or path.startswith(f"{owner}."))


def _outermost(paths: set[str]) -> frozenset[str]:
    """Those of them that are in no other one."""
    return frozenset(each for each in paths if not any(_is_below(each, other) for other in paths))


def _passing(block: nn.Module, whole: _Watched, around: Gathered) -> frozenset[str]:
    """The mixers of a block that hand their states on; none where it is called as if there were one rank."""
    tried = () if around.alone else around.paths
    return frozenset(path for path in tried if passes_states(block.get_submodule(path), *whole.called[path]))


def passes_states(module: nn.Module, given: Any, named: Any) -> bool:
    """Whether a mixer that is given states at each place of a chain gives what it gives for whole rows.

    And whether its gradients are the same. Recurrences enlarge roundings, so that these may be as far off as
    a hundredth of what they are where nothing is handed on.

    Args:
        module: The mixer.
        given: What it is called with for whole rows.
        named: The same by name.
    """
    module, queues = copy.deepcopy(module), _Queues()
    parts = parts_of((given, named), queues.shares)
    try:
        wanted = _with_gradients(module, [(given, named)])
        found = _with_gradients(module, parts, queues)
        alone = _with_gradients(module, parts, _Queues(forgets=True))
    except Exception:  # noqa: BLE001 - whatever the family's code does with what is no cache of its own
        return False
    if any(queues.sent.values()):
        return False
    each = zip(found, wanted, alone, strict=True)
    return all(_close(a, b) or (a - b).abs().max() < _NEAR * (c - b).abs().max() for a, b, c in each)


class _Queues(Neighbours):
    """All places of the chain of two ranks in one process, one of which runs at a time.

    Args:
        forgets: Whether zeros come instead of what was sent.

    Attributes:
        place: The one that runs.
        sent: What each has been sent and has not received.
    """

    shares = (1, 2, 1)

    def __init__(self, *, forgets: bool = False) -> None:
        super().__init__(DetachedContextParallel(2))
        self.place, self.sent = 0, defaultdict[int, list[tuple[What, Tensor]]](list)
        self._forgets = forgets

    def send(self, x: Tensor, to: int, what: What) -> None:
        self.sent[to].append((what, x.detach().clone()))

    def receive(self, room: Tensor, source: int, what: What) -> Any:
        """Whatever came first, as between two ranks."""
        del source
        sent, x = self.sent[self.place].pop(0)
        if (sent, x.shape, x.dtype) != (what, room.shape, room.dtype):
            raise ValueError("a mixer asks for its states in another order, or for others, than it leaves")
        room.copy_(torch.zeros_like(x) if self._forgets else x)
        return SimpleNamespace(wait=lambda: None)


def _with_gradients(module: nn.Module, parts: Sequence[Any], queues: _Queues | None = None) -> list[Tensor]:
    """What a module gives for a row in parts, and gradients of its inputs and parameters."""
    module.zero_grad()
    xs, ys, at = list[Tensor](), list[Tensor](), queues or _Queues()
    relay = None if queues is None else StateRelay(module, queues)
    for at.place, part in enumerate(parts):
        x = next(each for each in tree_leaves(part) if isinstance(each, Tensor))
        xs.append(x.detach().clone().requires_grad_())
        given, named = tree_map(lambda each, x=x: xs[-1] if each is x else each, part)
        gave = module(*given, **named) if relay is None else relay.run(at.place, given, named)
        ys.append(hidden_of(gave))
    whole = torch.cat(ys, 1).detach()
    seeds = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1))
    sizes = [y.shape[1] for y in ys]
    for at.place, (y, seed) in reversed([*enumerate(zip(ys, seeds.split(sizes, 1), strict=True))]):
        y.backward(seed)
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    return [whole, torch.cat([x.grad for x in xs if x.grad is not None], 1), *gradients]


def _is_part(own: Any, whole: Any, cp: ContextParallel) -> bool:
    """Whether a tensor is a rank's part of another one."""
    if not (isinstance(own, Tensor) and isinstance(whole, Tensor) and whole.dim() > 1):
        return False
    return whole.shape[1] == cp.size * own.shape[1] and _close(own, cp.cut(whole))


def _close(own: Tensor, wanted: Tensor) -> bool:
    if own.shape != wanted.shape:
        return False
    own, wanted = own.float(), wanted.float()
    return bool((own - wanted).abs().max() <= FAR * wanted.abs().max())
