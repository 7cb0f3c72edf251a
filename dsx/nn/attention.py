"""Causal self-attention, its heads cut over the tensor-parallel ranks: rotary embedding, windows, documents.

Rotary position embedding (Su et al. 2021, arXiv:2104.09864) follows transformers' half-split convention. The
masks of sliding windows are those of Beltagy et al. 2020 (arXiv:2004.05150) and Mistral 7B
(arXiv:2310.06825).

On a context axis (:mod:`dsx.nn.context`) a rank's tokens attend to those of all its peers in one
of three ways:

- ``all_gather``: it gathers the keys and values of whole rows, 2 K D T elements, and its two chunks of
  queries attend one after the other, each to the keys up to its own end. Backward keeps what was gathered
  and a second copy of the context, unless attention is recomputed. No mask is stored where a causal one is
  enough.
- ``ulysses``: by all-to-all it gets whole rows of 1/cp of its heads, and gives their context back, of which
  backward keeps two copies too.
- ``ring``: the keys and values of the other ranks come one after the other while it computes
  (:mod:`dsx.nn.ring`), and again in backward, which keeps this rank's own alone. Masks of windows and of
  documents are made for what has come, and kept no longer.

By either, queries in a window or beside other documents attend block by block (:func:`blocks`), so that a
mask spans the keys that a block reaches and no whole rows.

Shapes: B micro-batch, S sequence, this rank's part of it on a context axis; s = S/tp under sequence
parallelism, else S; T the whole sequence; H hidden; N query heads and K key/value heads of this rank; D
head_dim, of which R elements are rotated; P = (N + 2 K) D, the fused projection of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsx.errors import ModelError
from dsx.models.spec import ModelSpec, Rope
from dsx.nn import collectives
from dsx.nn.context import WHOLE, ContextParallel, slices
from dsx.nn.documents import PerMicroBatch, Places
from dsx.nn.dropout import draw_seed, seeded
from dsx.nn.linear import ColumnParallelLinear, KeyValueLinear, RowParallelLinear
from dsx.nn.norm import RMSNorm
from dsx.nn.parallel import TensorParallel, uncompiled
from dsx.nn.parameters import Weights
from dsx.nn.ring import KernelCall, LowerRight, Ring, Sight, ring_attention, unseen


def inverse_frequencies(rope: Rope, size: int) -> Tensor:
    """The angle per position of each pair of ``size`` elements: float32 [R/2].

    As transformers computes them (modeling_rope_utils.py: _compute_linear_scaling_rope_parameters,
    _compute_llama3_parameters and _compute_yarn_parameters; modeling_llama.py:
    compute_default_rope_parameters).
    """
    frequency = 1.0 / (rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    if rope.kind == "default":
        return frequency
    if rope.kind == "linear":
        return frequency / rope.factor
    keep = _llama3_keep(rope, frequency) if rope.kind == "llama3" else _yarn_keep(rope, size)
    return (1 - keep) * frequency / rope.factor + keep * frequency


def _llama3_keep(rope: Rope, frequency: Tensor) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between interpolated: [R/2] in 0..1."""
    wavelength = 2 * math.pi / frequency
    span = rope.high_frequency_factor - rope.low_frequency_factor
    keep = (rope.original_positions / wavelength - rope.low_frequency_factor) / span
    return keep.clamp(0.0, 1.0)


def _yarn_keep(rope: Rope, size: int) -> Tensor:
    """The same by turns over the original positions, linear in the pair (arXiv:2309.00071, section 3.2)."""

    def pair(turns: float) -> float:
        """The pair that makes so many turns over the original positions."""
        return size * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    span = high - low if high != low else 0.001  # transformers avoids a division by zero so
    return 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)


Masks: TypeAlias = "tuple[Tensor | None, ...]"
"""What :class:`CausalMask` gives for each stretch of queries that attends by itself, in a row's order; by
``all_gather`` the numbers of the documents before them, in a ring these alone."""


class RopeAndMask(NamedTuple):
    """What attention needs of the places of a micro-batch, made before a compiled block runs.

    Attributes:
        tables: What :meth:`Rotary.found` gives.
        masks: What :class:`CausalMask` gives.
    """

    tables: tuple[Tensor, Tensor]
    masks: Masks


class Rotary:
    """Rotates queries and keys; one object serves all blocks of a rank.

    Args:
        size: Elements of each head that are rotated, R: ``ModelSpec.rotary_size``.
        cp: The ranks that share a sequence.
    """

    def __init__(self, rope: Rope, size: int, cp: ContextParallel = WHOLE) -> None:
        self.rope, self.size, self.cp = rope, size, cp
        self._frequency = inverse_frequencies(rope, size)
        self._tables: tuple[Tensor, Tensor] | None = None
        self._last = PerMicroBatch()

    def __repr__(self) -> str:
        return f"Rotary({self.rope})"

    def __call__(self, x: Tensor, places: Places | RopeAndMask | None = None) -> Tensor:
        """Turn each head by its position; [B, S, ..., D] keeps its shape.

        Args:
            x: Queries, keys or both.
            places: In whole rows, positions below T; None counts from 0 in every row. Or what was made so.
        """
        if self.size == x.shape[-1]:
            return self._turn(x, places)
        # One split joins the two gradients in its backward; two slices would each fill a whole tensor.
        turning, rest = x.split((self.size, x.shape[-1] - self.size), dim=-1)
        return torch.cat((self._turn(turning, places), rest), dim=-1)

    def _turn(self, x: Tensor, places: Places | RopeAndMask | None) -> Tensor:
        heads = (1,) * (x.dim() - 3)
        if isinstance(places, RopeAndMask):
            tables = places.tables
        else:
            tables = uncompiled(self.found, x.shape[1] * self.cp.size, x.dtype, x.device, places)
        cos, sin = (t.unflatten(-2, (-1, *heads)) for t in tables)
        left, right = x.chunk(2, dim=-1)
        half_turned = torch.cat((-right, left), dim=-1)
        y: Tensor = x * cos + half_turned * sin
        return y

    def found(
        self, length: int, dtype: torch.dtype, device: torch.device, places: Places | None
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of this rank's positions in rows of ``length``: [S, R], or [B, S, R] if given."""
        if places is None:
            return self.tables(length, dtype, device)
        positions_BT = places.positions

        def make() -> tuple[Tensor, ...]:
            if self.cp.size > 1:  # a table of T positions would be larger than what is looked up in it
                return self._turns(self.cp.cut(positions_BT), dtype)
            return tuple(table[positions_BT] for table in self.tables(length, dtype, device))

        found: tuple[Tensor, Tensor] = self._last.of(positions_BT, dtype, make)
        return found

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine [S, R] of this rank's places in rows of ``length``; the last call's are kept."""
        kept = self._tables
        if (
            kept is not None
            and kept[0].shape[0] * self.cp.size == length
            and (kept[0].dtype, kept[0].device) == (dtype, device)
        ):
            return kept
        # Not as inference tensors, which a later training step could not save for backward.
        with torch.inference_mode(mode=False), torch.no_grad():
            self._tables = self._turns(self.cp.indices(length, device), dtype)
        return self._tables

    def _turns(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., R], computed in float32."""
        angle = positions.float()[..., None] * self._frequency.to(positions.device)
        angle = torch.cat((angle, angle), dim=-1)
        scale = self.rope.attention_factor
        return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)


_ALIGNMENT = 8
"""The mask's rows are stored with a multiple of so many elements: else torch's memory-efficient kernel copies
the mask in every call (aten/native/transformers/attention.cpp, preprocess_mask)."""


_BLOCK = 1024
"""Queries of a block at least: enough for a kernel to be busy with."""


def blocks(queries: range, window: int, *, packed: bool) -> list[range]:
    """``queries`` cut so that a mask of each block with the keys that it reaches is small.

    Args:
        queries: A stretch of a row.
        window: Tokens that each attends to at most; 0 for all before it.
        packed: Whether rows are made of several documents.
    """
    windowed = 0 < window < queries.stop
    size = max(_BLOCK, window if windowed else 0) if windowed or packed else max(1, len(queries))
    return [queries[at : at + size] for at in range(0, len(queries), size)]


class CausalMask:
    """Which keys a token attends to: those before it and itself, in its window and its document.

    One object serves all blocks with the same window.

    Args:
        window: Each token attends to the last so many tokens, itself among them; 0 for all.
    """

    def __init__(self, window: int = 0) -> None:
        self.window = window
        self._form: Any = None
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._last = PerMicroBatch()

    def __repr__(self) -> str:
        return f"CausalMask({self.window})"

    def keys(self, queries: range) -> range:
        """The stretch of a row outside of which no token of ``queries`` attends to any."""
        return range(max(0, queries.start + 1 - self.window) if self.window else 0, queries.stop)

    def __call__(
        self,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        places: Places | None = None,
        queries: range | None = None,
    ) -> Tensor | None:
        """[T, T], or [B, 1, T, T] for documents, to be added to the scores: 0, or -inf for other keys.

        None if the window holds the whole sequence, which is one document: then a causal mask is enough, for
        which kernels need no tensor. The masks of the last call's length are kept.

        Args:
            length: T.
            dtype: Of queries.
            device: Of queries.
            places: In whole rows.
            queries: The stretch of rows whose tokens attend, to :meth:`keys`: the last two dims of the mask
                are these two, but for keys at their beginning that belong to other documents in all rows.
                None for all.
        """
        queries = range(length) if queries is None else queries
        document_BT = None if places is None else places.documents
        if document_BT is not None:
            mask: Tensor = self._last.of(
                document_BT, (dtype, queries), lambda: self._of_documents(document_BT, dtype, queries)
            )
            return mask
        size = len(queries), len(self.keys(queries))
        windowed = self.window and queries.stop > self.window
        if not windowed:
            return None
        if self._form != (length, dtype, device):
            self._masks.clear()
            self._form = length, dtype, device
        if size not in self._masks:
            # Not as inference tensors, which a later training step could not save for backward.
            with torch.inference_mode(mode=False), torch.no_grad():
                before = self._before(queries, self.keys(queries), dtype, device)
                self._masks[size] = before.log_()[:, : size[1]]
        return self._masks[size]

    def sights(self, cp: ContextParallel, length: int, document_BT: Tensor | None) -> tuple[Sight, ...]:
        """What the queries of each of a row's 2 cp chunks see of it, in any row of a micro-batch.

        Documents are numbered in their order. Where they are told apart, the host waits for them once.
        """
        chunk = length // (2 * cp.size)
        starts, begins = range(0, length, chunk), [(0, 0)] * 2 * cp.size
        if document_BT is not None:
            begins = self._last.of(document_BT, starts, lambda: _begins(document_BT, starts))
        if not self.window:
            return tuple(Sight(*each) for each in begins)
        reach = self.window - 1
        return tuple(
            Sight(max(first, start - reach), max(last, start + chunk - 1 - reach))
            for start, (first, last) in zip(starts, begins, strict=True)
        )

    def between(self, document_BT: Tensor | None, form: Any, call: KernelCall) -> Tensor:
        """The mask of one call in a ring, [1 or B, 1, queries, keys], of a dtype and on a device."""
        parts = []
        for keys in call.stretches:
            given = call.queries, keys, *form
            if document_BT is None:
                part = self._before(*given)[None]
            else:
                part = self._in_documents(document_BT, *given)
            parts.append(part[..., : len(keys)])
        return torch.cat(parts, -1).log_().clamp_(min=unseen(form[0])).unsqueeze(1)

    def _before(self, queries: range, keys: range, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Ones for the keys before a token and in its window, [queries, at least keys].

        Their logarithm is the mask: 0 inside and -inf outside, which takes no second tensor of this size.
        """
        columns, ahead = -(-len(keys) // _ALIGNMENT) * _ALIGNMENT, queries.start - keys.start
        ones = torch.ones(len(queries), columns, dtype=dtype, device=device).tril_(ahead)
        return ones.triu_(ahead + 1 - self.window) if self.window else ones

    def _of_documents(self, document_BT: Tensor, dtype: torch.dtype, queries: range) -> Tensor:
        keys = self.keys(queries)
        if queries.start and type(document_BT) is Tensor and not document_BT.is_meta:  # which has values
            others = document_BT < document_BT[:, queries.start, None]
            keys = range(max(keys.start, int(others.sum(1).min())), keys.stop)
        seen = self._in_documents(document_BT, queries, keys, dtype, document_BT.device)
        return seen.log_().unsqueeze(1)[..., : len(keys)]

    def _in_documents(
        self, document_BT: Tensor, queries: range, keys: range, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """:meth:`_before` of each row, inside of documents alone: [B, queries, at least keys]."""
        before = self._before(queries, keys, dtype, device)
        ours, others = (document_BT[:, each.start : each.stop] for each in (queries, keys))
        others = F.pad(others, (0, before.shape[1] - len(keys)))
        same = ours.unsqueeze(2) == others.unsqueeze(1)
        return same.to(dtype).mul_(before)


def _begins(document_BT: Tensor, starts: range) -> list[tuple[int, int]]:
    """Where the document of each chunk's first token begins at the earliest, of its last at the latest."""
    ends = [at for start in starts for at in (start, start + starts.step - 1)]
    begins = torch.searchsorted(document_BT.contiguous(), document_BT[:, ends].contiguous())
    firsts, lasts = begins[:, ::2].amin(0), begins[:, 1::2].amax(0)
    return [(int(first), int(last)) for first, last in zip(firsts, lasts, strict=True)]


def kv_heads(model: ModelSpec, tp: TensorParallel) -> range:
    """The key/value heads that this rank's queries attend to.

    Raises:
        ModelError: Query heads that the ranks cannot share out, or key/value heads that they can neither
            share out nor, in the form of the model that says so, share.
    """
    heads = model.num_kv_heads
    shared = model.shared_kv and tp.size % heads == 0
    for what, count in (("num_heads", model.num_heads), ("num_kv_heads", 0 if shared else heads)):
        if count % tp.size:
            raise ModelError(
                f"{what} = {count}",
                f"it does not divide by the tensor-parallel size {tp.size}",
                f"use a size that divides both {model.num_heads} and {heads}; one that {heads} divides needs "
                "ModelSpec.for_tensor",
            )
    first = tp.rank * heads // tp.size
    return range(first, first + max(1, heads // tp.size))


class Attention(nn.Module):
    """Grouped-query attention with one projection to queries, keys and values.

    Args:
        model: Sizes, biases and dropout.
        rotary: Rotates queries and keys.
        mask: Limits the keys of a query; None for all keys before it.
        recompute_core: Keep only the fused projection for backward and compute what is between it and the
            output projection again ("selective", arXiv:2205.05198, section 5).

    Raises:
        ModelError: As :func:`kv_heads`, :func:`check_heads` and :func:`check_dropout`, or a ``rotary`` that
            is made for another part of the rows.
    """

    def __init__(
        self,
        model: ModelSpec,
        weights: Weights,
        rotary: Rotary,
        mask: CausalMask | None = None,
        *,
        recompute_core: bool = False,
    ) -> None:
        super().__init__()
        tp = weights.tp
        self.num_heads, self.num_kv_heads = model.num_heads // tp.size, len(kv_heads(model, tp))
        self.head_dim, self.dropout = model.head_dim, model.attention_dropout
        self.tp, self.cp, self.rotary, self.recompute_core = tp, weights.cp, rotary, recompute_core
        check_heads(self.num_heads, self.cp)
        check_dropout(self.dropout, self.cp)
        if rotary.cp != self.cp:
            raise ModelError(
                f"{rotary!r} on {rotary.cp.size} context-parallel ranks",
                f"the attention that it rotates for is on {self.cp.size}",
                "give both the same ContextParallel",
            )
        self.mask = mask or CausalMask()
        sizes = (model.query_size, model.kv_size, model.kv_size)
        options: dict[str, Any] = {"bias": model.attention_bias, "init": None, **weights.form}
        self.qkv = (
            KeyValueLinear(
                model.hidden_size, model.num_kv_heads, model.head_dim, tp, queries=model.query_size, **options
            )
            if model.shared_kv
            else ColumnParallelLinear(model.hidden_size, sum(sizes), tp, parts=sizes, **options)
        )
        self.out = RowParallelLinear(
            model.query_size,
            model.hidden_size,
            tp,
            bias=model.attention_out_bias,
            init=None,
            **weights.form,
        )
        head_norm = partial(
            RMSNorm, model.head_dim, tp, epsilon=model.norm_epsilon, over_heads=True, **weights.form
        )
        self.q_norm = head_norm() if model.qk_norm else None
        self.k_norm = head_norm() if model.qk_norm else None

    def forward(self, x_BsH: Tensor, places: Places | RopeAndMask | None = None) -> Tensor:
        """[B, s, H] to the same."""
        qkv_BSP = self.qkv(x_BsH)
        dropping = self.training and self.dropout > 0.0
        if dropping or self.cp.size > 1:
            context = uncompiled(self._between, qkv_BSP, dropping, places)
        else:
            context = self._context(qkv_BSP, None, places)
        y: Tensor = self.out(context)
        return y

    def rope_and_mask(self, x_BsH: Tensor, places: Places | None) -> RopeAndMask:
        """What :meth:`forward` takes in the place of places, so that a graph need not make it."""
        length = x_BsH.shape[1] * (self.tp.size if self.tp.sequence else 1) * self.cp.size
        form = (length, x_BsH.dtype, x_BsH.device, places)
        return RopeAndMask(self.rotary.found(*form), self._masks(*form))

    def _masks(self, length: int, dtype: torch.dtype, device: torch.device, places: Places | None) -> Masks:
        form = length, dtype, device, places
        if self.cp.size == 1:
            return (self.mask(*form),)
        if self.cp.method == "ring":  # which makes masks of documents for what has come
            return (None if places is None else places.documents,)
        packed = places is not None and places.documents is not None
        stretches = self._stretches(length, packed=packed)
        masks = tuple(self.mask(*form, queries) for each in stretches for queries in each)
        if self.cp.method == "ulysses":
            return masks
        return (
            None if places is None else places.documents,
            *masks,
        )  # of which it also depends who sends what

    def _stretches(self, length: int, *, packed: bool) -> list[list[range]]:
        """The blocks of each stretch of whole rows whose queries this rank has when it attends."""
        whole = self.cp.method == "ulysses"
        stretches = (range(length),) if whole else self.cp.chunks(length)
        return [blocks(each, self.mask.window, packed=packed) for each in stretches]

    def _between(self, qkv_BSP: Tensor, dropping: bool, places: Places | RopeAndMask | None) -> Tensor:
        # Drawn outside the recomputed part, which then needs no generator; one per rank, as heads are cut.
        seed = draw_seed(self.tp, sharded=True) if dropping else None
        return self._context(qkv_BSP, seed, places)

    def _context(self, *given: Any) -> Tensor:
        if not self.recompute_core or not torch.is_grad_enabled():
            return self._core(*given)
        context: Tensor = checkpoint(self._core, *given, use_reentrant=False, preserve_rng_state=False)
        return context

    def _core(self, qkv_BSP: Tensor, seed: int | None, places: Places | RopeAndMask | None) -> Tensor:
        """Attention of this rank's heads: fused projection [B, S, P] to context [B, S, N D]."""
        q, k, v = self._heads(qkv_BSP, places)
        masks = (
            places.masks
            if isinstance(places, RopeAndMask)
            else uncompiled(self._masks, q.shape[1] * self.cp.size, q.dtype, q.device, places)
        )
        with nullcontext() if seed is None else seeded(q.device, seed):
            context_BSND = self._attend(q, k, v, 0.0 if seed is None else self.dropout, masks)
        return context_BSND.flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, masks: Masks) -> Tensor:
        """Queries [B, S, N, D], keys and values [B, S, K, D] to context [B, S, N, D]."""
        if self.cp.size == 1:
            return attended(q, k, v, dropout, masks[0])
        if self.cp.method == "ulysses":
            q, k, v = own_heads(q, k, v, self.cp)
            y = self._by_blocks(q, k, v, dropout, masks, [range(k.shape[1])])
            return collectives.rows_for_heads(y, self.cp, heads=2)
        if self.cp.method == "ring":
            length, form = q.shape[1] * self.cp.size, (q.dtype, q.device)
            sights = self.mask.sights(self.cp, length, masks[0])
            how = Ring(self.cp, length, sights, partial(self.mask.between, masks[0], form))
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            return ring_attention(q, k, v, how).transpose(1, 2)
        count, length = k.shape[2], q.shape[1] * self.cp.size
        firsts = [each.first for each in self.mask.sights(self.cp, length, masks[0])]
        pairs, held = collectives.gather_reached(torch.cat((k, v), dim=2), self.cp, firsts)
        k, v = pairs.split(count, dim=2)
        return self._by_blocks(q, k, v, dropout, masks[1:], held)

    def _by_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, masks: Masks, held: Sequence[range]
    ) -> Tensor:
        """As :meth:`_attend`, of ``held`` keys of whole rows, whatever stretches the queries are."""
        packed = masks[-1] is not None and masks[-1].dim() > 2
        length = q.shape[1] * (1 if self.cp.method == "ulysses" else self.cp.size)
        stretches, left, found = self._stretches(length, packed=packed), iter(masks), list[Tensor]()
        parts = q.split([sum(map(len, each)) for each in stretches], dim=1)
        for part, stretch in zip(parts, stretches, strict=True):
            own = [next(left) for _ in stretch]
            starts = [
                self.mask.keys(queries).start if mask is None else queries.stop - mask.shape[-1]
                for queries, mask in zip(stretch, own, strict=True)
            ]
            first = min(starts)  # so that a block's gradient is as long as what its stretch reaches
            (reach,) = slices(held, [range(first, stretch[-1].stop)])
            keys, values = (each[:, reach] for each in (k, v))
            each_part = part.split([len(queries) for queries in stretch], dim=1)
            for x, queries, start, mask in zip(each_part, stretch, starts, own, strict=True):
                reached = slice(start - first, queries.stop - first)
                found.append(attended(x, keys[:, reached], values[:, reached], dropout, mask))
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _heads(self, qkv_BSP: Tensor, places: Places | RopeAndMask | None) -> tuple[Tensor, ...]:
        """Queries [B, S, N, D], keys and values [B, S, K, D], as attention takes them."""
        heads = qkv_BSP.unflatten(-1, (-1, self.head_dim))
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        if self.q_norm is not None:
            assert self.k_norm is not None
            q, k, v = heads.split(counts, dim=2)
            # The norms keep the projection for backward, so that a copy of V would free nothing.
            return self.rotary(self.q_norm(q), places), self.rotary(self.k_norm(k), places), v
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=2)
        q, k = self.rotary(qk, places).split((self.num_heads, self.num_kv_heads), dim=2)
        # A copy of the small V frees the unrotated projection, which a view would keep for backward.
        return q, k, v.contiguous()


def check_heads(heads: int, cp: ContextParallel) -> None:
    """Raise ModelError unless ``heads`` query heads of a rank are something for each rank under Ulysses."""
    if cp.method == "ulysses" and heads % cp.size:
        raise ModelError(
            'dsx.parallel.context_method = "ulysses"',
            f"it shares out the {heads} query heads of a rank, which {cp.size} context ranks do not divide",
            'use "all_gather", or a dsx.parallel.context that divides them',
        )


def check_dropout(dropout: float, cp: ContextParallel) -> None:
    """Raise ModelError if scores are to be dropped in a ring, where no rank has all of a query's."""
    if cp.method == "ring" and cp.size > 1 and dropout > 0.0:
        raise ModelError(
            'dsx.parallel.context_method = "ring"',
            f"it drops no scores of attention, and the model's dropout of these is {dropout}",
            'use "all_gather", or set the attention dropout to 0',
        )


def repeated(pairs: Tensor, cp: ContextParallel, dim: int) -> Tensor:
    """Key/value heads along ``dim``, each so often that every rank gets equally many under Ulysses.

    As query heads divide by the ranks and by the key/value heads, each rank's attend to its own of these.
    """
    times = cp.size // math.gcd(pairs.shape[dim], cp.size)
    return pairs if times == 1 else pairs.repeat_interleave(times, dim)


def own_heads(q: Tensor, k: Tensor, v: Tensor, cp: ContextParallel) -> list[Tensor]:
    """Queries [B, S, N, D], keys and values [B, S, K, D] to those of N/cp heads in whole rows.

    Where ranks outnumber key/value heads, or share them unevenly, these are repeated first.
    """
    k, v = (repeated(each, cp, dim=2) for each in (k, v))
    by_rank = zip(*(each.chunk(cp.size, dim=2) for each in (q, k, v)), strict=True)
    fused = torch.cat([part for parts in by_rank for part in parts], dim=2)
    sizes = [each.shape[2] // cp.size for each in (q, k, v)]
    return list(collectives.heads_for_rows(fused, cp, heads=2).split(sizes, dim=2))


def attended(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None) -> Tensor:
    """:func:`scaled_dot_product` of [B, S, heads, D], as projections give them."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return scaled_dot_product(q, k, v, dropout, mask).transpose(1, 2)


def scaled_dot_product(
    q_BNSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    dropout: float,
    mask: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention, causal unless a mask says more; torch picks the fused kernel.

    Queries [B, N, S, D], keys and values [B, K, T, D], which end with the same token, a probability of
    dropout, which draws from torch's generator, and a mask [S, T] or [B, 1, S, T] to be added to the scores
    to context [B, N, S, D]. A ``scale`` of scores that is not 1 / sqrt(D) is given.
    """
    groups = q_BNSD.shape[1] // k_BKSD.shape[1]
    if groups > 1 and q_BNSD.is_cuda and (q_BNSD.dtype == torch.float32 or mask is not None):
        # The only fused kernel on CUDA for float32 or with a mask, the memory-efficient one, takes no
        # enable_gqa: without this, torch would fall back to a kernel that stores S x S scores.
        k_BKSD, v_BKSD = (t.repeat_interleave(groups, dim=1) for t in (k_BKSD, v_BKSD))
        groups = 1
    if mask is None and q_BNSD.shape[2] < k_BKSD.shape[2]:
        return ending_together(q_BNSD, k_BKSD, v_BKSD, dropout, scale)
    return F.scaled_dot_product_attention(
        q_BNSD,
        k_BKSD,
        v_BKSD,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=groups > 1,
    )


class _LowerRight(NamedTuple):
    """What torch reads of a CausalBias, which itself takes as much memory as several masks."""

    seq_len_q: int
    seq_len_kv: int
    variant: Any

    def _materialize(self, device: torch.device) -> Tensor:
        """For a device without such a kernel."""
        ones = torch.ones(self.seq_len_q, self.seq_len_kv, dtype=torch.bool, device=device)
        return ones.tril_(self.seq_len_kv - self.seq_len_q)


def ending_together(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float | None) -> Tensor:
    """Causal attention of the last S tokens to all T, which takes no mask but to drop scores on CPUs."""
    if q.device.type == "cpu" and not dropout:  # whose kernel is causal for as many queries as keys alone
        return ring_attention(q, k, v, LowerRight(WHOLE, k.shape[2] - q.shape[2], (), scale=scale))
    from torch.nn.attention.bias import CausalBias, CausalVariant  # here: it loads the compiler

    corner: Any = _LowerRight(q.shape[2], k.shape[2], CausalVariant.LOWER_RIGHT)
    gqa = q.shape[1] != k.shape[1]
    dispatch: Any = CausalBias._dispatch  # noqa: SLF001
    context: Tensor = dispatch(q, k, v, corner, dropout, scale=scale, enable_gqa=gqa)
    return context
