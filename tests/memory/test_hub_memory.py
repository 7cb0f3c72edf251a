"""The estimate of models made of transformers' modules against the whole engine on paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from meta_engine import programs

_SCALARS_BYTES = 16 * 512
"""What the estimate leaves out: numbers such as norms and counts, which an allocator rounds up one by one."""


def _cases(first, count):
    found = programs.results(programs.start(Path(__file__).with_name("hub_cases.py"), first, count))
    assert len(found) == count
    return found


def _compare(found):
    for each in found:
        for phase, traced in each["trace"].items():
            error = each["estimate"][phase] - traced
            # What is made of positions is counted from a forward to its backward alone.
            share = 0.02 if each["case"]["documents"] == "apart" else 0.002
            assert abs(error) <= share * traced + _SCALARS_BYTES, (phase, error, traced, each)


def test_estimate_is_that_of_the_engine():
    _compare(_cases(0, 3))


@pytest.mark.slow
def test_estimate_is_that_of_the_engine_over_many_layouts():
    _compare(_cases(3, 40))
