"""What failures leave of the time of published runs, as dsx simulates it, beside what was published.

    python tools/bench_goodput.py [--json FILE] [--check]

Prints goodput_runs.toml row by row: published, simulated, by Daly's formula, and simulated with half and
twice the time of a restart, as that is what most sources are silent about. Then the intervals by Young and
Daly beside the best one that the simulation finds. --check ends with 1 unless all runs are within 5 points.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from dataclasses import replace
from math import exp, inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dsx.planner.goodput import DAY_SECONDS, Hazards, Rung, SaveCost, daly, simulate, young
from dsx.planner.what_is_left import figures, hazards_of
from dsx.terminal import aligned

MOST_POINTS = 0.05
RUNS: list[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("goodput_runs.toml").read_text(encoding="utf-8")
)["run"]


def case(run: dict[str, Any]) -> tuple[Hazards, SaveCost, float]:
    """What happens to a published run, what its saves take, and how often it saves."""
    if "usual" in run:
        of = run["usual"]
        inputs: Any = SimpleNamespace(
            content={}, gpus=of["gpus"], cluster=SimpleNamespace(hosts=lambda _: run["nodes"])
        )
        hazards, saving = hazards_of(
            figures(inputs, None, None), of["gpus"], run["nodes"], 12 * of["parameters"]
        )
        hazards = replace(hazards, lost_share=0.0, spares=0, failures_per_second=rate(run))
        return hazards, saving, daly(hazards.mttf_seconds, saving.pause_seconds)
    hazards = Hazards(
        rungs=(Rung(nodes=run["nodes"]),),
        failures_per_second=rate(run),
        notice_seconds=run.get("notice_seconds", 0.0),
        start_seconds=run["start_seconds"],
    )
    return hazards, SaveCost(pause_seconds=run.get("pause_seconds", 0.0)), run["interval_seconds"]


def expected(mttf: float, down: float, interval: float, pause: float) -> float:
    """Goodput by Daly's complete model (2006, equation 20), in which no failure takes a node away."""
    if mttf == inf:
        return 1 / (1 + pause / interval)
    return interval / mttf / (exp(down / mttf) * (exp((interval + pause) / mttf) - 1))


def rate(run: dict[str, Any]) -> float:
    """Failures per second."""
    daily = (
        run["failures"] / run["days"]
        if "failures" in run
        else run["nodes"] * run["per_thousand_node_days"] / 1000
    )
    return float(daily / DAY_SECONDS)


def compared(run: dict[str, Any]) -> dict[str, Any]:
    """A published run beside its simulation."""
    hazards, saving, interval = case(run)
    shares = [
        simulate(
            replace(
                hazards, notice_seconds=by * hazards.notice_seconds, start_seconds=by * hazards.start_seconds
            ),
            saving,
            interval,
            days=run.get("days", 30),
        )["goodput"]
        for by in (1.0, 0.5, 2.0)
    ]
    formula = expected(
        hazards.mttf_seconds, hazards.notice_seconds + hazards.start_seconds, interval, saving.pause_seconds
    )
    return {
        "name": run["name"],
        "published": run["published"],
        "simulated": shares[0],
        "formula": formula,
        "restart_halved_doubled": shares[1:],
    }


def intervals(mttf: float, pause: float, down: float) -> dict[str, float]:
    """Young's and Daly's interval, and the best one by simulation, with what each leaves."""
    hazards = Hazards(rungs=(Rung(nodes=1),), failures_per_second=1 / mttf, start_seconds=down)
    saving = SaveCost(pause_seconds=pause)
    first = young(mttf, pause)

    def left(interval: float) -> float:
        return simulate(hazards, saving, interval, days=1e9)["goodput"]  # as many failures as there may be

    best = max((first * 1.1**power for power in range(-12, 13)), key=left)
    found = {"young": first, "daly": daly(mttf, pause), "best": best}
    return {
        "mttf": mttf,
        "pause": pause,
        **found,
        **{f"{name}_goodput": left(at) for name, at in found.items()},
    }


def main() -> int:
    """Print both tables; the exit code is --check's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    found = [compared(run) for run in RUNS]
    rows = [("run", "published", "simulated", "Daly", "restart halved, doubled")]
    for run, each in zip(RUNS, found, strict=True):
        published = f"{'> ' if run.get('is_bound') else ''}{each['published']:.1%}"
        halved, doubled = each["restart_halved_doubled"]
        rows.append(
            (
                each["name"],
                published,
                f"{each['simulated']:.1%}",
                f"{each['formula']:.1%}",
                f"{halved:.1%}, {doubled:.1%}",
            )
        )
    print("\n".join(aligned(rows)))
    for run in RUNS:
        print(f"\n{run['name']}\n  {run['source']}\n  assumed: {run['assumed']}")
    tried = [
        intervals(mttf, pause, 300.0) for mttf in (3600.0, 10_000.0, 100_000.0) for pause in (0.2, 2.0, 60.0)
    ]
    titles = ("MTTF, s", "save, s", "Young, s", "Daly, s", "best, s", "goodput of each")
    rows = [titles]
    for one in tried:
        goodputs = ", ".join(f"{one[f'{name}_goodput']:.2%}" for name in ("young", "daly", "best"))
        rows.append(
            (
                *(f"{one[name]:,g}" for name in ("mttf", "pause")),
                *(f"{one[name]:,.0f}" for name in ("young", "daly", "best")),
                goodputs,
            )
        )
    print("\n" + "\n".join(aligned(rows)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"runs": found, "intervals": tried}, indent=2) + "\n")
    missed = [each["name"] for each in found if abs(each["simulated"] - each["published"]) > MOST_POINTS]
    print(f"\nmissed: {', '.join(missed)}" if missed else f"\nall within {100 * MOST_POINTS:g} points")
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
