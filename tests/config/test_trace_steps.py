"""dsx.train.trace_steps: steps that the run has."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsx.config.resolve import resolve
from dsx.errors import ConfigError

CONFIG = Path(__file__).parents[2] / "configs" / "zero1.json"


def _resolved(*overrides):
    return resolve(CONFIG, world_size=1, overrides=["dsx.train.steps=6", *overrides])


def test_steps_of_the_run():
    assert _resolved().dsx.train.trace_steps == []
    assert _resolved("dsx.train.trace_steps=[5,6]").dsx.train.trace_steps == [5, 6]


@pytest.mark.parametrize(
    ("steps", "says"),
    [("[5,7]", "trace_steps names step 7, and steps = 6 is the last"), ("[0]", "trace_steps"), ("5", "list")],
)
def test_others_are_refused(steps, says):
    with pytest.raises(ConfigError, match=r"dsx\.train") as refused:
        _resolved(f"dsx.train.trace_steps={steps}")
    assert says in str(refused.value)
