"""What islands (``dsx.outer``) cannot be combined with is said before anything is spawned."""

from __future__ import annotations

import pytest
from sample_config import changed

from dsx.config.resolve import resolve
from dsx.errors import ConfigError

ISLANDS = {"dsx.outer": {"islands": 2}}

REFUSED = {
    "elastic": ({"dsx.elastic": {"tensor": [1]}}, "dsx.elastic changes the layout"),
    "streaming": ({"dsx.data.streaming": True}, "dsx.data.streaming reads samples in their order"),
    "nvme": (
        {"zero_optimization.offload_optimizer": {"device": "nvme"}, "zero_optimization.stage": 3},
        "nvme",
    ),
    "profile": ({"dsx.profile": "measure"}, "each island would measure itself"),
    "patience": (
        {"dsx.outer.patience_seconds": 300.0, "dsx.faults.hang_seconds": 300.0},
        r"patience_seconds = 300\.0: a run that waits so long .* dsx.faults.hang_seconds = 300",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_islands_cannot_have_is_refused(name):
    edits, said = REFUSED[name]
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        resolve(changed({**ISLANDS, **edits}), world_size=2)


@pytest.mark.parametrize("hang_seconds", [0.0, 301.0])
def test_a_hang_is_noticed_later_than_a_silent_island(hang_seconds):
    edits = {"dsx.outer.patience_seconds": 300.0, "dsx.faults.hang_seconds": hang_seconds}
    assert resolve(changed({**ISLANDS, **edits}), world_size=2).islands.patience_seconds == 300.0


def test_ranks_that_make_no_equal_islands_are_refused():
    with pytest.raises(ConfigError, match=r"dsx\.outer\.islands = 2: the 3 ranks that were started"):
        resolve(changed(ISLANDS), world_size=3)
