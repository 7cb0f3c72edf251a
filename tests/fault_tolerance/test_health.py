"""Spikes against scipy-free statistics: NumPy's median, and series with known outliers."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from dsx.fault_tolerance.health import Health, RecentSteps

BOTH = frozenset({"loss", "grad_norm"})


def healthy(count: int, *, seed: int = 0) -> list[tuple[float, float]]:
    """A loss that falls with noise, and a noisy gradient norm."""
    chance = np.random.default_rng(seed)
    losses = 10 * np.arange(1, count + 1) ** -0.2 + 0.02 * chance.standard_normal(count)
    norms = 1 + 0.1 * chance.standard_normal(count)
    return list(zip(losses.tolist(), norms.tolist(), strict=True))


def test_the_limit_is_median_and_median_absolute_deviation() -> None:
    values = [norm for _, norm in healthy(40)]
    window = RecentSteps(32, 5.0)
    for value in values:
        window.add(value)
    kept = np.array(values[-32:])
    middle = np.median(kept)
    assert window.limit() == pytest.approx(middle + 5.0 * 1.4826 * np.median(np.abs(kept - middle)))


def test_a_falling_loss_is_no_spike_and_outliers_are() -> None:
    health = Health(window=64, sigmas=8.0)
    found = []
    for step, (loss, norm) in enumerate(healthy(1000)):
        spiked = step in (200, 201, 700)
        figures = (loss + 3.0, norm) if spiked else (loss, norm * (20 if step == 500 else 1))
        finding = health.judge(*figures, spikes=BOTH)
        if finding is None:
            health.accept(*figures)
        else:
            found.append((step, finding.kind))
    assert found == [(200, "loss_spike"), (201, "loss_spike"), (500, "grad_norm_spike"), (700, "loss_spike")]


def test_nothing_is_a_spike_before_half_a_window_and_none_that_is_not_looked_for() -> None:
    health = Health(window=16, sigmas=3.0)
    for loss, norm in healthy(7):
        health.accept(loss, norm)
    assert health.judge(1e9, 1e9, spikes=BOTH) is None
    health.accept(5.0, 1.0)
    assert health.judge(5.0, 1e9, spikes=frozenset({"loss"})) is None
    assert health.judge(5.0, 1e9, spikes=BOTH).kind == "grad_norm_spike"
    assert health.judge(5.0, None, spikes=BOTH) is None


@pytest.mark.parametrize("figures", [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, -math.inf)])
def test_what_is_not_finite_is_found_from_the_first_step(figures: tuple[float, float]) -> None:
    assert Health(window=8, sigmas=3.0).judge(*figures, spikes=frozenset()).kind == "nonfinite"


def test_a_restored_judge_judges_alike() -> None:
    """Through the JSON of a checkpoint, to the last bit."""
    first, second = Health(window=16, sigmas=4.0), Health(window=16, sigmas=4.0)
    for loss, norm in healthy(50):
        first.accept(loss, norm)
    second.accept(99.0, 99.0)
    second.restore(json.loads(json.dumps(first.state)))
    assert second.state == first.state
    assert len(first.state["loss"]) == 16
    second.restore({})
    assert second.state == {"loss": [], "grad_norm": []}
