"""SIGTERM to a launcher: its ranks save and end, and the next run goes on where they were."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from launching import SMALL, ZERO3, launch, series, started


def test_a_stopped_run_saves_and_goes_on(tmp_path: Path) -> None:
    settings = SMALL | {"dsx.train.output": tmp_path, "dsx.parallel.pipeline": 2}
    with started("torchrun", "gpt_3d.py", ZERO3, settings | {"dsx.train.steps": 100_000}) as running:
        running.wait_for("step ")
        os.kill(running.pid, signal.SIGTERM)
        ended = running.end()
    assert ended.code == 1, ended.text  # torchrun's, whatever its ranks end with
    (told,) = [line for line in ended.lines if line.startswith("warning: a signal asked the run to stop")]
    (tag,) = [path.name for path in (tmp_path / "checkpoints").glob("global_step*")]
    step = int(tag.removeprefix("global_step"))
    assert f"saves step {step} and ends" in told
    saved = tmp_path / "checkpoints" / tag
    assert ended.lines[-1] == (
        f"stopped after step {step} of 100000; saved as {saved}: the same command goes on from there"
    )
    assert [*series(tmp_path, "train/loss")] == [*range(1, step + 1)]
    (tmp_path / "checkpoints" / "latest").unlink()  # as a kill before the very first one is named leaves it
    changed = {"dsx.train.steps": step + 2, "optimizer.params.weight_decay": 0.7}
    again = launch("torchrun", "gpt_3d.py", ZERO3, settings | changed)
    assert again.code == 0, again.text
    (warning,) = [line for line in again.lines if line.startswith("warning: ")]
    assert "optimizer.params.weight_decay = 0.7 is not taken" in warning
    assert warning.endswith("goes on with the checkpoint's 0.1")
    assert f"after step {step}" in again.text
    assert [*series(tmp_path, "train/loss")] == [*range(1, step + 3)]
    assert not (tmp_path / "faults").exists()
    longer = launch("torchrun", "gpt_3d.py", ZERO3, settings | changed | {"dsx.data.sequence_length": 32})
    assert longer.code == 1, longer.text  # torchrun's
    assert "dsx.data.sequence_length = 32 here: the data position would mean nothing" in longer.text
