"""What failures leave: beside published runs, Daly's formulas, and closed forms of waiting."""

from dataclasses import replace
from math import inf
from pathlib import Path

import bench_goodput
import pytest
from bench_goodput import expected

from dsx.planner.goodput import Hazards, Rung, SaveCost, as_good, daly, enough_spares, simulate, young

GUIDE = Path(__file__).parents[2] / "docs/guides/planning.md"


def hazards(mttf=10_000.0, **more):
    return Hazards(**({"rungs": (Rung(nodes=1),), "failures_per_second": 1 / mttf} | more))


def left(happens, interval=1.0, pause=0.0, write=0.0):
    """Of a run that has as many failures as are simulated at most."""
    return simulate(happens, SaveCost(pause_seconds=pause, write_seconds=write), interval, days=1e9)


@pytest.mark.parametrize("run", bench_goodput.RUNS, ids=lambda run: run["name"])
def test_published_runs(run):
    """Within 5 points, as the guide's table says."""
    found = bench_goodput.compared(run)["simulated"]
    assert found == pytest.approx(run["published"], abs=0.05)
    assert found > run["published"] or not run.get("is_bound")
    row = next(line for line in GUIDE.read_text().splitlines() if line.startswith(f"| {run['name']} |"))
    assert f"{run['published']:.1%} | {found:.1%} |" in row


@pytest.mark.parametrize(("mttf", "minutes"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_intervals_of_daly_2006_figures_3_to_5(mttf, minutes):
    """Restarts of 10 and dumps of 5 minutes."""
    assert daly(mttf, 5) == pytest.approx(minutes, rel=0.01)


def test_spares_are_quantiles_of_poisson():
    """0.99 quantiles, as tables have them."""
    assert [enough_spares(mean, 999) for mean in (0.0, 1.0, 5.0, 10.0, 100.0)] == [0, 4, 11, 18, 124]


@pytest.mark.parametrize("mttf", [1_000.0, 10_000.0])
@pytest.mark.parametrize(("pause", "down", "interval"), [(5, 300, 300), (60, 600, 1200), (0, 1, 60)])
def test_simulation_is_dalys_complete_model(mttf, pause, down, interval):
    found = left(hazards(mttf, start_seconds=down), interval, pause)
    assert found["goodput"] == pytest.approx(expected(mttf, down, interval, pause), abs=0.01)
    assert sum(found.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(("mttf", "pause"), [(10_000.0, 0.5), (10_000.0, 30.0), (3_600.0, 2.0)])
def test_formulas_find_the_optimum(mttf, pause):
    """No interval of the simulation is better than Young's or Daly's by more than the optimum is flat."""
    happens, first = hazards(mttf, start_seconds=60.0), young(mttf, pause)
    of = {by: left(happens, first * by, pause)["goodput"] for by in (0.2, 0.5, 0.8, 1.0, 1.25, 2.0, 5.0)}
    assert max(of.values()) - min(of[1.0], left(happens, daly(mttf, pause), pause)["goodput"]) < 0.002
    assert 0.5 <= max(of, key=of.get) <= 2.0
    assert of[1.0] - max(of[0.2], of[5.0]) > 0.002  # which is flat, but not everywhere
    for end in as_good(mttf, pause, 0.005):
        assert of[1.0] - left(happens, end, pause)["goodput"] == pytest.approx(0.005, abs=0.002)


def test_nothing_fails():
    found = left(hazards(inf, start_seconds=300.0, lost_share=1.0), 594.0, 6.0)
    assert (found["goodput"], found["saves"]) == (pytest.approx(0.99), pytest.approx(0.01))
    assert expected(inf, 300.0, 594.0, 6.0) == pytest.approx(0.99)


def test_failures_faster_than_starts():
    """A start of 20 mean times to failure ends once in e^20."""
    assert left(hazards(1.0, start_seconds=20.0), pause=0.1)["goodput"] < 0.001


def test_a_save_that_is_still_being_written_is_lost():
    """Its write time more is trained again after each failure."""
    more = left(hazards(1e5), 1000.0, write=200.0)["again"] - left(hazards(1e5), 1000.0)["again"]
    assert more == pytest.approx(200 / 1e5, rel=0.05)


def test_waiting_for_repairs_is_a_renewal():
    """One node, which is away for D after each failure: M of every M + D + start seconds are left."""
    mttf, repair, start = 50_000.0, 20_000.0, 10.0
    away = hazards(mttf, lost_share=1.0, repair_seconds=repair, start_seconds=start)
    found, cycle = left(away), mttf + repair + start
    assert found["goodput"] == pytest.approx(mttf / cycle, rel=0.02)
    assert found["waiting"] == pytest.approx(repair / cycle, rel=0.03)
    assert left(replace(away, notice_seconds=600.0))["down"] > found["down"] + 0.9 * 600 / cycle


def test_enough_spares_hardly_wait():
    """An infinite-server queue (M/D/infinity): the nodes that are away are Poisson's, six in the mean."""
    away = hazards(1e4, rungs=(Rung(nodes=100),), lost_share=1.0, repair_seconds=6e4)
    waits = [left(replace(away, spares=spares))["waiting"] for spares in (0, 6, enough_spares(6.0, 999))]
    assert waits[0] > waits[1] > waits[2]
    assert waits[2] < 0.01


def test_a_smaller_layout_instead_of_waiting():
    rungs = (Rung(nodes=8), Rung(nodes=6, speed=0.75), Rung(nodes=4, speed=0.5))
    away = hazards(2e4, rungs=rungs, lost_share=1.0, repair_seconds=8e4, start_seconds=100.0)
    shrinks, waits = left(away), left(replace(away, rungs=rungs[:1]))
    assert shrinks["goodput"] > waits["goodput"] + 0.2
    assert shrinks["slower"] > 0.1
    assert sum(shrinks.values()) == pytest.approx(1.0)
    assert left(replace(away, other_layout_seconds=5_000.0))["down"] > shrinks["down"] + 0.05


def test_the_same_seed_gives_the_same():
    happens, saving = hazards(lost_share=0.5, repair_seconds=3600.0, spares=1), SaveCost(pause_seconds=1.0)
    assert simulate(happens, saving, 200.0) == simulate(happens, saving, 200.0)


@pytest.mark.parametrize("rate", [5e-324, 1e-310, 6e-309, 1e-300])
def test_failures_that_no_run_lives_to_see(rate):
    assert simulate(hazards(failures_per_second=rate), SaveCost(0.0), 100.0)["goodput"] == pytest.approx(1.0)
