"""Whether a family's blocks may be given a part of each sequence, found by trying a small model of it.

A block runs once for a whole sequence, in transformers' own way, and once as a rank of a context axis would
run it, with what the others would send taken from the first run. It must give its part of the same. What does
not is refused by name: convolutions, state spaces, attention past transformers' registry, sparse indexers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from dsx.errors import ModelError
from dsx.hub import values
from dsx.hub.block_arguments import BlockArguments
from dsx.hub.context import ContextAttention, check_kernels, kernel_of, put_context
from dsx.hub.model_structure import BlockCall, structure_of
from dsx.hub.shrunk import random_model, shrunk
from dsx.models.spec import ContextMethod, HubModel
from dsx.models.transformers_settings import first_line, torch_forms
from dsx.nn.context import ContextParallel
from dsx.nn.documents import hidden_of

_ROWS, _TOKENS, _FAR = 2, 16, 5e-5


def no_context(model: HubModel, size: int, method: ContextMethod) -> str | None:
    """Why ``size`` ranks may not share sequences of a model; None if they may."""
    return _found(model.config, size if method == "ulysses" else 2, method)  # heads divide by the ranks


@lru_cache(maxsize=8)
def _found(config: str, size: int, method: ContextMethod) -> str | None:
    try:
        check_kernels(structure_of(config).model)
    except ModelError as error:
        return f"{error.where}: {error.what}"
    try:
        with torch_forms(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            small = shrunk(json.loads(config), tensor=size)
            return _difference(small, size, method)
    except ModelError as error:
        return f"whether that is right is not known, as no small model of it could be tried ({error.what})"
    except Exception as error:  # noqa: BLE001 - whatever the family's code does on this machine
        return f"a small model of it does not run ({first_line(error)})"


def _difference(small: dict[str, Any], size: int, method: ContextMethod) -> str | None:
    """How a block's outputs for a rank's part differ from those for the whole; None if none does."""
    text = json.dumps(small, sort_keys=True)
    structure, model = structure_of(text), random_model(small).eval()
    dtypes = values.buffer_dtypes(text, torch.float32)
    ranks = [_Alone(size, rank, method=method) for rank in (0, size - 1)]
    arguments = [BlockArguments(structure, torch.device("cpu"), torch.float32, dtypes, cp) for cp in ranks]
    for number, (block, call) in enumerate(_calls(model, structure.blocks, size)):
        x, uses = call.hidden, list[Use]()
        first = _Watched(copy.deepcopy(block))
        put_context(first.module, ranks[0], partial(Noted, uses))
        whole = first.run(call, x)
        for cp, own in zip(ranks, arguments, strict=True):
            part = _Watched(copy.deepcopy(block))
            put_context(part.module, cp, partial(Replayed, iter(uses)))
            try:
                mine = own.call(number, cp.cut(x), x.shape[1], None, training=False)
                right = _is_part(part.run(mine, cp.cut(x)), whole, cp)
            except Exception as error:  # noqa: BLE001 - whatever the family's code does with a part
                place = _place(number, *part.inside[-1:])
                if not uses:
                    return f"{place} attends past transformers' registry of attention functions"
                return f"{place} does not run on a part of a sequence ({first_line(error)})"
            if not right:
                return (
                    f"{_place(number, part.mixer(first, cp))} mixes tokens in another way than by a function "
                    "of transformers' registry of attention"
                )
    return None


def _place(number: int, *paths: str) -> str:
    return ".".join(filter(None, (f"block {number}", *paths)))


def _calls(model: Any, blocks: str, size: int) -> Iterator[tuple[nn.Module, BlockCall]]:
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
    """One use of attention for whole sequences: [B, h or g, S, D] each, and the context [B, S, h, D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    context: Tensor


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
        self._seen.append(Use(query, key, value, y))
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

    def gathered(self, x: Tensor) -> Tensor:
        whole = self._next.pop(0)
        if whole.shape[1] != x.shape[1]:  # repeated, so that each rank has a head
            whole = whole.repeat_interleave(x.shape[1] // whole.shape[1], 1)
        _require(close=_close(x, self.cp.cut(whole, 2)))
        return whole

    def to_heads(self, x: Tensor) -> Tensor:
        return self.gathered(x).chunk(self.cp.size, 1)[self.cp.rank]

    def to_sequence(self, y: Tensor) -> Tensor:
        whole = self._next.pop(0)
        _require(close=_close(y, whole.chunk(self.cp.size, 2)[self.cp.rank]))
        return self.cp.cut(whole)


def _require(*, close: bool) -> None:
    if not close:
        raise ValueError("attention is given something else for a part of the sequence than for the whole")


class _Alone(ContextParallel):
    """One of the ranks that share a sequence without its peers."""

    def __post_init__(self) -> None:
        """Do nothing, because there is no group to check."""


class _Watched:
    """A block, of whose modules is noted what they were given and gave last, the first to end first.

    Attributes:
        inside: Paths of the modules that have begun and not ended.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.inside = module, list[str]()
        self._seen: dict[str, tuple[Any, Any]] = {}
        for path, inner in module.named_modules():
            inner.register_forward_pre_hook(partial(self._begun, path))
            inner.register_forward_hook(partial(self._ended, path), with_kwargs=True)

    def run(self, call: BlockCall, x: Tensor) -> Tensor:
        """What it gives."""
        with torch.no_grad():
            return hidden_of(call.make(self.module, x))

    def mixer(self, whole: _Watched, cp: ContextParallel) -> str:
        """The first module that was given a rank's part of what it is for the whole, and gave another."""
        for path, (x, y) in self._seen.items():
            (whole_x, whole_y) = whole._seen.get(path, (None, None))
            if _is_part(x, whole_x, cp) and not _is_part(y, whole_y, cp):
                return path
        return ""

    def _begun(self, path: str, *_: Any) -> None:
        self.inside.append(path)

    def _ended(self, path: str, _module: nn.Module, given: Any, named: Any, gave: Any) -> None:
        self.inside.pop()
        with suppress(StopIteration):  # some are given nothing
            x = given[0] if given else next(each for each in named.values() if isinstance(each, Tensor))
            self._seen[path] = x, hidden_of(gave)


def _is_part(own: Any, whole: Any, cp: ContextParallel) -> bool:
    """Whether a tensor is a rank's part of another one."""
    if not (isinstance(own, Tensor) and isinstance(whole, Tensor) and whole.dim() > 1):
        return False
    return whole.shape[1] == cp.size * own.shape[1] and _close(own, cp.cut(whole))


def _close(own: Tensor, wanted: Tensor) -> bool:
    if own.shape != wanted.shape:
        return False
    return bool((own - wanted).abs().max() <= _FAR * wanted.abs().max())
