"""Masks of transformers' modules that are made where attention needs them, a block of queries at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dsx.nn.attention import blocks


class LateMask(Tensor):
    """A mask [B, 1, queries, keys] without memory. A family's code that looks into it is given all of it.

    Args:
        make: transformers' function that makes a mask.
        predicate: Of batch, head, query and key, these as they stand in the row.
        stretches: The queries.
        asked: What ``make`` is given beside these.
        dtype: Of what it makes: bool, or that of scores, to which it is then added.
        both_ways: Whether queries see what comes after them.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    def __new__(cls, *given: Any, **_: Any) -> Self:
        """A tensor of that shape."""
        _, _, stretches, asked, dtype = given
        size = asked["batch_size"], 1, sum(map(len, stretches)), asked["kv_length"]
        made: Self = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=asked.get("device"))  # noqa: SLF001
        return made

    def __init__(
        self,
        make: Any,
        predicate: Any,
        stretches: Sequence[range],
        asked: dict[str, Any],
        _: torch.dtype,
        *,
        both_ways: bool,
    ) -> None:
        super().__init__()
        plain = asked.pop("allow_is_causal_skip", True) and not both_ways
        # Predicates of others may see more than the window that comes with them.
        reach = 0 if both_ways or asked.get("use_vmap") else asked.get("local_size") or 0
        sizes = vars(asked["config"])
        self._chunks = plain and sizes.get("attention_chunk_size") == reach != sizes.get("sliding_window")
        self._make, self._asked = make, asked | {"mask_function": predicate, "allow_is_causal_skip": False}
        self._reach, self._plain = reach, plain
        self._sees, self._keys = both_ways * asked["kv_length"], dict[range, range]()
        self.blocks = [each for part in stretches for each in blocks(part, reach, packed=True)]

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        """As of the mask itself."""
        given, named = tree_map(
            lambda each: each.whole() if isinstance(each, cls) else each, (given, named or {})
        )
        return function(*given, **named)

    def whole(self) -> Tensor:
        """All of it."""
        every = range(self.shape[-1])
        return torch.cat([self.rows(each, every) for each in self.blocks], 2)

    def rows(self, queries: range, keys: range) -> Tensor:
        """The mask of stretches of the row, [B, 1, queries, keys]."""
        at = {"q_offset": queries.start, "kv_offset": keys.start}
        sizes = {"q_length": len(queries), "kv_length": len(keys)}
        made: Tensor = self._make(**self._asked | at | sizes)
        return made

    def first(self, query: int) -> int:
        """The first key that a query, and any after it, may see: by its window or chunk."""
        reach = self._reach or self.shape[-1]
        return query - query % reach if self._chunks else max(0, query + 1 - reach)

    def keys(self, queries: range) -> range:
        """The stretch of the row outside of which no token of a block attends to any.

        Without documents it follows from where they stand; else the mask itself says it, for which the host
        waits once for each block and micro-batch.
        """
        if queries not in self._keys:
            self._keys[queries] = range(self.first(queries.start), self._sees or queries.stop)
            mask = torch.empty(0, device="meta") if self._plain else self.rows(queries, range(self.shape[-1]))
            if type(mask) is Tensor and not mask.is_meta:  # else there are no values: one document all along
                seen = (mask if mask.dtype == torch.bool else mask == 0).flatten(0, -2).any(0).nonzero()
                self._keys[queries] = range(int(seen[0]), int(seen[-1]) + 1)
        return self._keys[queries]
