"""``dsx.faults``: JSON's lists, and what cannot do what it says."""

from __future__ import annotations

import pytest
from sample_config import changed

from dsx.config.resolve import resolve
from dsx.config.schema import FaultsConfig
from dsx.errors import ConfigError


def test_a_run_without_the_block_stops_at_nan_and_saves_at_sigterm() -> None:
    faults = resolve(changed({}), world_size=1).dsx.faults
    assert faults == FaultsConfig()
    assert (faults.nonfinite, faults.loss_spike, faults.stop_signals) == ("stop", "off", ("SIGTERM",))


def test_signals_are_a_list_of_names() -> None:
    config = changed({"dsx.faults.stop_signals": ["SIGUSR1", "SIGTERM"]})
    resolved = resolve(config, world_size=1)
    assert resolved.dsx.faults.stop_signals == ("SIGUSR1", "SIGTERM")
    assert resolve(resolved.resolved(), world_size=1).dsx.faults == resolved.dsx.faults


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stop_signals", ["SIGKILL"]),
        ("stop_signals", "SIGTERM"),
        ("hang_seconds", -1.0),
        ("grace_seconds", 0.0),
        ("nonfinite", "ignore"),
        ("replicas_differ", "skip"),
        ("spike_window", 1),
    ],
)
def test_other_values_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"dsx.faults.{key}"):
        resolve(changed({f"dsx.faults.{key}": value}), world_size=1)


@pytest.mark.parametrize("key", ["nonfinite", "loss_spike", "grad_norm_spike", "replicas_differ"])
def test_a_roll_back_needs_checkpoints(key: str) -> None:
    edits = {f"dsx.faults.{key}": "roll_back", "dsx.faults.check_replicas_every": 1}
    with pytest.raises(ConfigError, match=f'dsx.faults.{key} = "roll_back": dsx.train.save_every = 0'):
        resolve(changed(edits), world_size=1)
    resolve(changed({**edits, "dsx.train.save_every": 5}), world_size=1)
    if key == "replicas_differ":
        resolve(changed({f"dsx.faults.{key}": "roll_back"}), world_size=1)
