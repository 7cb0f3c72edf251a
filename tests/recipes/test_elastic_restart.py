"""A run goes on when a machine is lost and when one joins, under torchrun's agents."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from launching import SMALL, ZERO3, free_port, launch, rows, series, started

from dsx.checkpoint import store

LIMITS = {"dsx.elastic.tensor": [2, 1], "dsx.elastic.pipeline": [2, 1]}
CASES = [(24, 1, False), pytest.param(60, 2, True, marks=pytest.mark.slow)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("steps", "ranks", "rejoins"), CASES)
def test_a_run_outlives_its_machines(tmp_path, steps, ranks, rejoins):
    """Two machines of so many ranks; one is lost, another may join. The losses are those of a whole run.

    That one runs under the deepspeed launcher, whose rank 0 holds the store that its spare rank waits at.
    """
    settings = {**SMALL, "dsx.train.steps": steps, "dsx.train.save_every": 4, "dsx.train.keep_checkpoints": 2}
    settings["optimizer.params.lr"] = 3e-4  # at high rates, rounding in another order of sums soon shows
    undisturbed, output = tmp_path / "undisturbed", tmp_path / "run"
    alone = {**settings, "dsx.elastic.tensor": [ranks], "dsx.train.output": undisturbed}
    ended = launch("deepspeed", "gpt_3d.py", ZERO3, alone | {"dsx.parallel.pipeline": 3 - ranks}, ranks=3)
    assert ended.code == 0, ended.text
    assert any(line.endswith("on 2 of 3 ranks; 1 more wait as spares") for line in ended.lines)

    settings |= {**LIMITS, "dsx.train.output": output}
    # One store for all starts keeps a new first machine from announcing itself (torch 2.13).
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    options = (
        "--nnodes=1:2",
        "--max-restarts=2",
        "--monitor-interval=0.5",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{free_port()}",
    )
    with ExitStack() as machines:

        def machine(*, is_host):
            meeting = f"--rdzv-conf=is_host={is_host},last_call_timeout=2,keep_alive_interval=1"
            running = started(
                "torchrun",
                "gpt_3d.py",
                ZERO3,
                settings,
                ranks=ranks,
                options=(*options, meeting),
                environment=environment,
                deadline_seconds=300,
            )
            return machines.enter_context(running)

        first = machine(is_host=True)
        lost = machine(is_host=False)
        first.wait_until((output / "checkpoints" / store.LATEST).exists)
        lost.kill()
        first.wait_for("  resumed ")
        others = [machine(is_host=False)] if rejoins else []
        gone, ends = lost.end(), [one.end() for one in (first, *others)]
    assert {end.code for end in ends} == {0}, "\n".join(end.text for end in ends)
    lines = [line for end in (gone, *ends) for line in end.lines]  # rank 0, which speaks, is on any machine
    layouts = [line.split(": ", 1)[1].rsplit(" of ", 1)[0] for line in lines if "dsx.elastic:" in line]
    both, one = (
        f"tensor {tensor} x pipeline {pipeline} x data 1, micro-batch 2 x 4, on {tensor * pipeline}"
        for tensor, pipeline in ((2, ranks), (ranks, 1))
    )
    assert set(layouts) == {both, one}
    assert layouts.count(both) > rejoins
    assert any(rows(end.lines, "done") for end in ends)
    expected, got = series(undisturbed, "train/loss"), series(output, "train/loss")
    assert list(got) == list(expected) == list(range(1, steps + 1))
    assert got == pytest.approx(expected, rel=1e-5)
