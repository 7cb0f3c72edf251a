"""Which cases of a long list every run of the tests tries, and which ``pytest -m slow`` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def often(cases: Iterable[Any], every: int) -> list[Any]:
    """Each ``every``-th case from the first on as it is, the others marked slow.

    Args:
        cases: What ``pytest.mark.parametrize`` takes: values, or tuples of values.
        every: 3 keeps a third.
    """
    out = []
    for at, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        out.append(case if at % every == 0 else pytest.param(*values, marks=pytest.mark.slow))
    return out
