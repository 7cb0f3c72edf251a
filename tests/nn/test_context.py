"""Which part of a row each rank of the context axis has."""

from __future__ import annotations

import pytest
import torch

from dsx.errors import LayoutError
from dsx.nn.context import ContextParallel


@pytest.mark.parametrize(("size", "length"), [(1, 7), (2, 8), (3, 12), (4, 40)])
def test_ranks_share_a_row_and_the_work_of_a_causal_mask(size, length):
    ranks = [ContextParallel(size, rank) for rank in range(size)]
    parts = [cp.indices(length) for cp in ranks]
    assert sorted(torch.cat(parts).tolist()) == list(range(length))
    assert all(torch.equal(part, part.sort().values) for part in parts)
    # A token attends to itself and all before it.
    assert len({int((part + 1).sum()) for part in parts}) == 1
    whole = torch.randn(2, length, 3)
    for cp, part in zip(ranks, parts, strict=True):
        assert torch.equal(cp.cut(whole), whole[:, part])
        assert torch.equal(cp.cut(whole.transpose(0, 1), dim=0), whole.transpose(0, 1)[part])


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(LayoutError, match=r"rows of 6 tokens on 2 .* of 4, or .* dsx\.parallel\.context"):
        ContextParallel(2, 1).cut(torch.zeros(1, 6))
    with pytest.raises(LayoutError, match=r"context-parallel rank 2: there are 2 ranks\. Fix: use 0 to 1\."):
        ContextParallel(2, 2)
