"""The estimate of models made of transformers' modules against the whole engine on paper."""

from __future__ import annotations

import pytest

from dsx.config.resolve import resolve
from dsx.memory.estimate import estimate
from dsx.memory.job import job_of
from memory.hub_cases import case, config
from meta_engine import programs
from often import often

_SCALARS_BYTES = 16 * 512
"""What the estimate leaves out: numbers such as norms and counts, which an allocator rounds up one by one."""


@pytest.mark.parametrize("number", [99, *(pytest.param(n, marks=pytest.mark.slow) for n in (*range(43), 54))])
def test_estimate_is_that_of_the_engine(number):
    require_alike(case(number))


@pytest.mark.parametrize("number", often((4, 3, 0, 1, 2), 5))
def test_so_is_that_of_ranks_that_share_sequences(number):
    require_alike({**case(number), "context": 2, "method": ("all_gather", "ulysses")[number % 2]})


@pytest.mark.parametrize("zero", often((3, 1), 2))
def test_so_is_that_of_states_that_are_handed_on_where_backwards_are_divided(zero):
    layout = {"context": 2, "pipeline": 2, "chunks": 1, "rank": 1, "schedule": "zb_h1", "zero": zero}
    require_alike({**case(4), **layout})


@pytest.mark.parametrize("number", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_so_is_that_of_feed_forwards_in_tiles(number):
    require_alike({**case(number), "tiles": 3})


@pytest.mark.parametrize("number", often((0, 3, 1, 2, 4), 5))
def test_so_is_that_of_attention_that_alone_is_recomputed(number):
    """By the function that stores scores, in even cases; the others have what torch fuses."""
    require_alike({**case(number), "recompute": "selective", "eager": number % 2 == 0})


@pytest.mark.parametrize("number", often((1, 2), 2))
def test_so_is_that_of_adapters_beside_frozen_routers_at_zero_3(number):
    """DeepSpeed's linear keeps a router's input, though its weight gets no gradient."""
    require_alike({**case(number), "adapter": {"rank": 4}, "zero": 3, "recompute": "none", "offload": False})


def require_alike(drawn):
    context = drawn.get("context", 1)
    world = drawn["tensor"] * drawn["pipeline"] * drawn["data"] * context
    run = resolve(config(drawn), world_size=world)
    rank = run.mesh.rank(pp=drawn["rank"], cp=context - 1)
    found = {phase.name: phase.peak_bytes for phase in estimate(job_of(run), rank).phases}
    for phase, traced in programs.traced(config(drawn), rank, world).phases.items():
        error = found[phase] - traced
        # What is made of positions is counted from a forward to its backward alone.
        share = 0.02 if drawn["documents"] == "apart" else 0.002
        assert abs(error) <= share * traced + _SCALARS_BYTES, (phase, error, traced, drawn)
