"""What islands (``dsx.outer``) cannot be combined with is said before anything is spawned."""

from __future__ import annotations

import pytest
from sample_config import changed

from dsx.config.resolve import resolve
from dsx.errors import ConfigError

ISLANDS = {"dsx.outer": {"islands": 2}}
MEET = {"meet": "hostA:29700", "keys": "keys"}

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
    with pytest.raises(ConfigError, match=r"dsx\.outer\.islands = 2: 3 ranks cannot be divided"):
        resolve(changed(ISLANDS), world_size=3)


@pytest.mark.parametrize(
    ("outer", "said"),
    [
        ({"shares": 51}, "use at most 50 shares"),
        ({"every": 10, "delay": 5, "shares": 2}, "use at most 4, or a larger every"),
        ({"meet": "*:29700", "island": 0}, "to which no other island can connect"),
        ({"meet": "[0:0::0]:29700", "island": 0}, "to which no other island can connect"),
        (MEET, r"start each island with --set dsx\.outer\.island=0, 1 and so on"),
        ({**MEET, "island": 2}, r"island = 2, and islands = 2 are numbered from 0. Fix: use 0 to 1"),
        ({"island": 0}, "island = 0 is given without meet: one launcher starts all islands"),
        ({"meet": "hostA", "island": 0}, '"hostA", which is no host:port. Fix: write it as hostA:29700'),
        ({"meet": "hostA:99999", "island": 0}, '"hostA:99999", which is no host:port'),
        ({"meet": "fd00::5:29700", "island": 0}, r"or \[fd00::5\]:29700"),
        ({"meet": "0.0.0.0:29700", "island": 0}, "to which no other island can connect"),
        ({"meet": "[::]:29700", "island": 0}, "to which no other island can connect"),
        ({"meet": "10.0.0.6:29700", "island": 0}, "whoever reaches it could read .* dsx islands keys FOLDER"),
        ({**MEET, "island": 0, "insecure": True}, "keys are given, and insecure is true"),
    ],
)
def test_a_block_that_cannot_be(outer, said):
    with pytest.raises(ConfigError, match=said):
        resolve(changed({"dsx.outer": {"islands": 2, **outer}}), world_size=2)


def test_what_islands_must_have_in_common():
    first = resolve(changed(ISLANDS), world_size=2).fingerprint
    for edits in ({"dsx.data.seed": 7}, {"dsx.data.sequence_length": 16}, {"dsx.outer.wire": "int8"}):
        assert resolve(changed({"dsx.outer": {"islands": 2}, **edits}), world_size=2).fingerprint != first
    for edits in ({"dsx.train.seed": 7}, {"dsx.outer.patience_seconds": 7.0}, {"dsx.train.output": "other"}):
        assert resolve(changed({"dsx.outer": {"islands": 2}, **edits}), world_size=2).fingerprint == first


def test_each_island_may_have_a_launcher_of_its_own():
    meet = {"meet": "[fd00::5]:29700", "keys": "keys", "island": 1}
    run = resolve(changed({"dsx.outer": {"islands": 2, **meet}}), world_size=3)
    assert (run.islands.index, run.islands.ranks, run.islands.meet) == (1, 3, "[fd00::5]:29700")
    assert (run.islands.keys, run.islands.insecure) == ("keys", False)
    assert run.summary()["islands"] == {"count": 2, "index": 1, "ranks": 3}
    assert run.output.name == "island1"


@pytest.mark.parametrize(
    "outer",
    [{"meet": "localhost:29700"}, {"meet": "[::1]:29700"}, {"meet": "10.0.0.6:29700", "insecure": True}],
)
def test_keys_are_not_needed_on_one_machine_or_where_somebody_has_said_so(outer):
    run = resolve(changed({"dsx.outer": {"islands": 2, "island": 0, **outer}}), world_size=1)
    assert run.islands.keys is None


def test_a_run_without_a_round_before_its_end_says_so():
    notes = {
        every: [
            note
            for note in resolve(changed({"dsx.outer": {"islands": 2, "every": every}}), world_size=2).notes
            if "dsx.outer.every" in note
        ]
        for every in (1, 10_000)
    }
    assert notes[1] == []
    (said,) = notes[10_000]
    assert said.startswith("dsx.outer.every = 10000: with dsx.train.steps = ")
    assert said.endswith(" islands average after the last step alone")


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ({}, False),
        ({"dsx.outer.optimizer": {"lr": 0.7, "momentum": 0.9}}, True),
        ({"dsx.outer.optimizer": {"lr": 0.7, "momentum": 0.9}, "dsx.train.resume": "one-job"}, False),
    ],
)
def test_momentum_on_fresh_weights_is_noted(edits, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one-job").mkdir()
    notes = resolve(changed({**ISLANDS, **edits}), world_size=2).notes
    assert (
        any("momentum = 0.9 carries the first movements of fresh weights" in note for note in notes) == says
    )
