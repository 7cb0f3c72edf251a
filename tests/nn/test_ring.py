"""What ranks of a ring compute and send each other, and its kernels beside torch's own attention."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from dsx.nn import ring
from dsx.nn.attention import CausalMask
from dsx.nn.context import DetachedContextParallel
from dsx.nn.ring import Ring

LENGTH = 48


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("window", [0, 1, 5, 13, 48])
@pytest.mark.parametrize("cuts", [None, [(9, 39), (30, 18)], [(3, 1, 20, 24), (16, 16, 16)]])
def test_every_pair_is_computed_once_and_nothing_else_is_sent(size, window, cuts):
    """What a query sees of any row is in one call of a kernel, and what nobody looks at is not sent."""
    documents = cuts and torch.stack(
        [torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in cuts]
    )
    place = torch.arange(LENGTH)
    seen = place[None] <= place[:, None]
    if window:
        seen &= place[None] > place[:, None] - window
    if documents is not None:
        seen = (seen & (documents[:, :, None] == documents[:, None])).any(0)
    mask = CausalMask(window)
    for rank in range(size):
        cp = DetachedContextParallel(size, rank)
        of = Ring(cp, LENGTH, mask.sights(cp, LENGTH, documents), lambda _: torch.empty(0))
        count, own = torch.zeros(LENGTH, LENGTH, dtype=torch.int64), cp.indices(LENGTH)
        for other in range(size):
            held = cp.chunks(LENGTH) if other == rank else of.sent(rank, other)
            tokens = [at for each in held for at in each]
            looked_at = seen[own][:, cp.indices(LENGTH) if other == rank else tokens].any(0)
            chunks = [range(*each.indices(LENGTH)) for each in map(_slice, cp.chunks(LENGTH, other))]
            needed = [at for each in chunks for at in each if seen[own, at].any()]
            assert set(needed) <= set(tokens)
            assert other == rank or not tokens or looked_at[0], "sent, and not looked at"
            for call in of.calls(held):
                queries, keys = own[call.rows], torch.tensor(tokens)[call.keys]
                allowed = torch.ones(len(queries), len(keys), dtype=torch.bool)
                if call.masked:
                    assert keys.tolist() == [at for each in call.stretches for at in each]
                    allowed = mask.between(documents, (torch.float32, torch.device("cpu")), call)
                    allowed = (allowed == 0).any(0)[0]
                elif call.causal:
                    allowed = keys[None] <= queries[:, None]
                count[queries[:, None], keys[None]] += allowed
        assert torch.equal(count[own], seen[own].long())


def _slice(each):
    return slice(each.start, each.stop)


@pytest.mark.parametrize(("heads", "causal"), itertools.product([1, 2, 4], [False, True]))
@pytest.mark.parametrize("cap", [None, 1e4])
def test_kernels_that_torch_has_and_that_are_written_out_are_the_same(heads, causal, cap):
    """Far below a cap, scores are themselves; without one values have a size that flash kernels refuse."""
    generator = torch.Generator().manual_seed(heads)
    q, k, v, dy = (
        torch.randn(2, n, 300, size, generator=generator)
        for n, size in ((4, 16), (heads, 16), (heads, 16 if cap else 24), (4, 16 if cap else 24))
    )
    y, lse = ring._forward(q, k, v, None, causal, None, cap)
    found = ring._backward(dy, y, lse, q, k, v, None, causal, None, cap)
    given = [each.requires_grad_() for each in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*given, is_causal=causal, enable_gqa=True)
    wanted.backward(dy)
    torch.testing.assert_close(y, wanted.detach(), atol=2e-6, rtol=1e-5)
    for each, one in zip(found, given, strict=True):
        torch.testing.assert_close(each, one.grad, atol=3e-5, rtol=1e-4)
