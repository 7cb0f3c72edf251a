"""metrics.jsonl, and W&B's own record of a run read back from its file."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from wandb.sdk.lib.service.service_client import ServiceClient

from dsx.config.schema import WandbConfig
from dsx.errors import DataError
from dsx.train import tracking
from dsx.train.tracking import Tracker, environment
from wandb_file import by_step, history, of_kind

DISABLED = WandbConfig(mode="disabled")
OFFLINE = WandbConfig(mode="offline", project="proj", name="nice name", group="grp", tags=["a", "b"])
ONLINE = WandbConfig(mode="online")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def runs_in(output: Path) -> list[Path]:
    return sorted(path for path in (output / "wandb").iterdir() if path.name.startswith("offline-run-"))


def test_another_runs_metrics_stay(tmp_path: Path) -> None:
    """A run without checkpoints starts anew where another one was."""
    for number, name in ((0, None), (1, "metrics.1.jsonl"), (2, "metrics.2.jsonl")):
        with Tracker(tmp_path, DISABLED, run_config={}, first_step=1) as tracker:
            tracker.log(1, {"train/loss": float(number)})
        if name is not None:
            assert f'"train/loss": {number - 1}.0' in (tmp_path / name).read_text()
    assert len(list(tmp_path.glob("metrics*"))) == 3


def test_metrics_file(tmp_path: Path) -> None:
    with Tracker(tmp_path / "out", DISABLED, run_config={}) as tracker:
        tracker.log(1, {"train/loss": 2.5, "train/tokens": np.int64(512)})
        assert len(records(tracker.metrics_path)) == 1  # at once, not at the end
        tracker.log(2, {"train/loss": float("nan"), "train/grad_norm_preclip": float("inf")})
        tracker.log(2, {"eval/loss": 2.25, "eval/worst": -np.float32("inf")})
        assert tracker.run_id is None
        assert tracker.wandb_path is None
    assert tracker.metrics_path == tmp_path / "out/metrics.jsonl"
    assert records(tracker.metrics_path) == [
        {"train/step": 1, "train/loss": 2.5, "train/tokens": 512},
        {"train/step": 2, "train/loss": "NaN", "train/grad_norm_preclip": "Infinity"},
        {"train/step": 2, "eval/loss": 2.25, "eval/worst": "-Infinity"},
    ]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["metrics.jsonl"]  # no W&B folder


def test_resume_drops_what_is_done_again(tmp_path: Path) -> None:
    with Tracker(tmp_path, DISABLED, run_config={}) as tracker:
        for step in range(1, 8):
            tracker.log(step, {"train/loss": float(step)})
    with tracker.metrics_path.open("ab") as file:
        file.write(b'{"train/step": 8, "train/lo')  # killed in mid-write
        file.write(b"\xff\x00")  # what a power cut leaves of blocks that never came to the disk
    with Tracker(tmp_path, DISABLED, run_config={}, first_step=5) as tracker:  # the checkpoint was of step 4
        tracker.log(5, {"train/loss": 50.0})
    rows = [(row["train/step"], row["train/loss"]) for row in records(tracker.metrics_path)]
    assert rows == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0)]
    with Tracker(tmp_path, DISABLED, run_config={}):
        assert records(tracker.metrics_path) == []  # a new run
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.1.jsonl", "metrics.jsonl"]


def test_offline_run_holds_everything(tmp_path: Path) -> None:
    warnings: list[str] = []
    config = {"model": {"layers": 4, "path": Path("x")}, "notes": ("auto",), "none": None}
    with Tracker(tmp_path, OFFLINE, run_config=config, warn=warnings.append) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"train/loss": 3.0 / step, "train/tokens": 100 * step})
        tracker.log(3, {"eval/loss": 0.5})
        folder = tracker.wandb_path
        run_id = tracker.run_id
    assert warnings == []
    assert runs_in(tmp_path) == [folder]

    assert history(folder) == by_step(records(tracker.metrics_path))
    assert [row.step.num for row in of_kind("history", folder)] == [1, 2, 3]
    (run,) = of_kind("run", folder)
    assert (run.run_id, run.project, run.display_name, run.run_group) == (run_id, "proj", "nice name", "grp")
    assert list(run.tags) == ["a", "b"]
    sent = {item.key: json.loads(item.value_json) for item in run.config.update}
    del sent["_wandb"]
    assert sent == {"model": {"layers": 4, "path": "x"}, "notes": ["auto"], "none": None}
    metrics = of_kind("metric", folder)
    assert "train/step" in {metric.name for metric in metrics}
    axes = {metric.name or metric.glob_name: metric.step_metric for metric in metrics}
    assert axes["train/tokens"] == axes["eval/loss"] == axes["*"] == "train/step"
    assert [ended.exit_code for ended in of_kind("exit", folder)] == [0]


def test_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    with Tracker(tmp_path, OFFLINE, run_config={}, run_id="abc123") as tracker:
        tracker.log(7, {"train/loss": 1.0})
        assert tracker.run_id == "abc123"
    (folder,) = runs_in(tmp_path)
    (run,) = of_kind("run", folder)
    assert run.run_id == "abc123"
    with Tracker(tmp_path, DISABLED, run_config={}, run_id="abc123") as tracker:
        assert tracker.run_id == "abc123"  # a checkpoint of a run without W&B for a while does not forget it


def test_wandb_variables_hold_for_what_the_config_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MODE", "PROJECT", "NAME", "RUN_GROUP"):
        monkeypatch.setenv(f"WANDB_{name}", "disabled" if name == "MODE" else f"own {name}")
    monkeypatch.setenv("WANDB_TAGS", "c,d")
    warned: list[str] = []
    with Tracker(tmp_path, WandbConfig(mode="offline"), run_config={}, warn=warned.append):
        pass
    key, fix = "is not taken: dsx.tracking.wandb", "Fix: --set"
    own = "'dsx.tracking.wandb.project=own PROJECT'"
    assert warned == [
        f'WANDB_MODE=disabled {key}.mode = "offline" holds. {fix} dsx.tracking.wandb.mode=disabled',
        f'WANDB_PROJECT=own PROJECT {key}.project = "dsx" holds. {fix} {own}',
    ]
    monkeypatch.setattr(tracking, "_WandbThread", lambda *_: None)
    for said, lines in {"MODE=dryrun": 0, "MODE=OFFLINE": 0, "DISABLED=false": 0, "DISABLED=True": 1}.items():
        warned.clear()
        with monkeypatch.context() as patched:
            for name, value in (("MODE", ""), ("PROJECT", ""), said.split("=")):
                patched.setenv(f"WANDB_{name}", value)
            Tracker(tmp_path / "more", WandbConfig(mode="offline"), run_config={}, warn=warned.append)
        assert sum(line.startswith(f"WANDB_{said} is not taken") for line in warned) == len(warned) == lines
    (folder,) = runs_in(tmp_path)
    (run,) = of_kind("run", folder)
    assert (run.project, run.display_name, run.run_group) == ("dsx", "own NAME", "own RUN_GROUP")
    assert list(run.tags) == ["c", "d"]


def test_failed_training_is_marked(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Tracker(tmp_path, OFFLINE, run_config={}):
        raise RuntimeError
    (folder,) = runs_in(tmp_path)
    assert [ended.exit_code for ended in of_kind("exit", folder)] == [1]


def test_beside_a_run_of_somebody_else(tmp_path: Path) -> None:
    """DeepSpeed's own wandb block opens a global run in the same process."""
    theirs = wandb.init(project="other", mode="offline", dir=str(tmp_path))
    their_folder = Path(theirs.settings.sync_dir)
    with Tracker(tmp_path / "ours", OFFLINE, run_config={}) as tracker:
        tracker.log(1, {"train/loss": 1.0})
        wandb.log({"their": 2.0})
        folder = tracker.wandb_path
    wandb.finish()
    assert history(folder) == [{"train/step": 1, "train/loss": 1.0}]
    assert history(their_folder) == [{"their": 2.0}]


@pytest.fixture
def without_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path


def test_online_without_account_continues_offline(without_account: Path) -> None:
    warnings: list[str] = []
    with Tracker(without_account, ONLINE, run_config={}, warn=warnings.append) as tracker:
        tracker.log(1, {"train/loss": 1.0})
        folder = tracker.wandb_path
    (warning,) = warnings
    assert "offline" in warning
    assert f"wandb sync --id {tracker.run_id} {folder}" in warning
    assert history(folder) == records(tracker.metrics_path) == [{"train/step": 1, "train/loss": 1.0}]


def test_online_without_network_continues_offline(
    without_account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(tracking, "_INIT_SECONDS", 0.5)
    said: list[str] = []
    with socket.socket() as taken:  # bound, not listening: connections to it are refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        wandb.teardown()  # it reads the environment once
        with Tracker(without_account, ONLINE, run_config={}, run_id="abc123", warn=said.append) as tracker:
            tracker.log(8, {"train/loss": 1.0})
            folder = tracker.wandb_path
    (warning,) = said
    assert f"wandb sync --id abc123 {folder}" in warning
    assert tracker.run_id == "abc123"  # checkpoints keep the run that the curve belongs to
    assert history(folder) == [{"train/step": 8, "train/loss": 1.0}]


ON_A_TERMINAL = """
import sys
from dsx.config.schema import WandbConfig
from dsx.train.tracking import Tracker
online = WandbConfig(mode="online")
with Tracker(sys.argv[1], online, run_config={}, warn=lambda text: print("WARNED")) as tracker:
    tracker.log(1, {"train/loss": 1.0})
print("TRAINED")
"""


def test_a_terminal_is_not_asked_for_a_key(without_account: Path) -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, without_account],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={name: value for name, value in os.environ.items() if name != "WANDB_SILENT"},
    )
    try:
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    said = b""
    while select.select([controller], [], [], 0)[0]:
        try:
            said += os.read(controller, 4096)
        except OSError:  # everything has been read
            break
    os.close(controller)
    assert said.decode().split() == ["WARNED", "TRAINED"]


def test_a_user_without_a_home_has_the_cache_in_the_output_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    monkeypatch.setenv("WANDB_DATA_DIR", str(own))
    monkeypatch.setenv("WANDB_CACHE_DIR", "/dev/null/cache")
    tracking._keep_beside(tmp_path)
    assert Path(wandb.env.get_cache_dir()) == tmp_path / "wandb" / "kept"
    assert Path(wandb.env.get_data_dir()) == own


def test_wandb_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    warnings: list[str] = []
    with Tracker(tmp_path, OFFLINE, run_config={}, warn=warnings.append) as tracker:
        tracker.log(1, {"train/loss": 1.0})
        tracker.log(2, {"train/loss": 1.0})
    assert len(warnings) == 1
    assert "W&B could not start" in warnings[0]
    assert len(records(tracker.metrics_path)) == 2


def test_wandb_that_breaks_in_mid_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    log = wandb.Run.log

    def broken(self: wandb.Run, record: dict[str, Any], step: int) -> None:
        if record["train/step"] > 1:
            raise BrokenPipeError("service died\nlong story")
        log(self, record, step)

    monkeypatch.setattr(wandb.Run, "log", broken)
    with Tracker(tmp_path, OFFLINE, run_config={}, warn=warnings.append) as tracker:
        for step in (1, 2, 3, 4):
            tracker.log(step, {"train/loss": 1.0})
    (warning,) = warnings
    said, _, folder = warning.partition("; send what it has with: wandb sync ")
    why = "(BrokenPipeError: service died)"
    assert said == f"W&B could not take metrics, so it is left out from here on {why}"
    assert folder == str(tracker.wandb_path)
    assert [row["train/step"] for row in records(tracker.metrics_path)] == [1, 2, 3, 4]


HURT_SERVICE = """
import signal, sys
from pathlib import Path
from dsx.config.schema import WandbConfig
from dsx.train import tracking

tracking._INIT_SECONDS, tracking._FINISH_SECONDS, tracking._MARGIN_SECONDS = 30.0, 0.5, 0.5
offline = WandbConfig(mode="offline")
with tracking.Tracker(sys.argv[1], offline, run_config={}, warn=print) as tracker:
    tracker.log(1, {"train/loss": 1.0})
    assert tracker.wandb_path is not None
    (service,) = tracking._services()
    tracking._INIT_SECONDS = 0.5
    service.send_signal(getattr(signal, sys.argv[2]))
    for step in range(2, 100):
        tracker.log(step, {"train/loss": 1.0})
assert tracking._services() == []
"""


@pytest.mark.parametrize("hurt", ["SIGKILL", "SIGSTOP"])
def test_service_that_dies_or_hangs(tmp_path: Path, hurt: str) -> None:
    """The process trains on and ends, says so once, and leaves no process and no traceback behind."""
    done = subprocess.run(
        [sys.executable, "-c", HURT_SERVICE, tmp_path, hurt],
        env={name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},  # one of its own
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (folder,) = runs_in(tmp_path)
    (said,) = done.stdout.splitlines()
    assert said.startswith("W&B could not ")
    assert said.endswith(f"send what it has with: wandb sync {folder}")
    assert [row["train/step"] for row in records(tmp_path / "metrics.jsonl")] == list(range(1, 100))


def test_training_does_not_wait_for_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while it starts, and not while it takes a record; what waits is not without end."""
    held = threading.Event()
    log = wandb.Run.log

    def slow(self: wandb.Run, record: dict[str, Any], step: int) -> None:
        held.wait()
        log(self, record, step)

    monkeypatch.setattr(wandb.Run, "log", slow)
    monkeypatch.setattr(tracking, "_MOST_WAITING", 10)
    warnings: list[str] = []
    with Tracker(tmp_path, OFFLINE, run_config={}, warn=warnings.append) as tracker:
        for step in range(1, 50):
            tracker.log(step, {"train/loss": 1.0})  # returns, or this test never ends
        assert len(records(tracker.metrics_path)) == 49
        (warning,) = warnings
        assert "could not take metrics for 10 records" in warning
        held.set()


@pytest.mark.parametrize("seen", [True, False])
def test_an_end_of_the_service_is_not_one_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """W&B calls sys.exit with a killed service's exit code if its socket has not yet told it of the end."""
    wandb.teardown()  # a service of this test's own
    warnings: list[str] = []
    with Tracker(tmp_path, OFFLINE, run_config={}, warn=warnings.append) as tracker:
        assert tracker.wandb_path is not None
        (service,) = tracking._services()
        tracking._end_services()
        if not seen:
            monkeypatch.setattr(ServiceClient, "publish", lambda *_: asyncio.sleep(0))
        tracker._wandb._give_up("go on", f"{service.pid} is dead")
    assert len(warnings) == 1
    wandb.teardown()  # nothing is left to tear down


def test_disk_that_is_full(tmp_path: Path) -> None:
    """Training goes on; one warning for all the time that the disk is full."""
    warnings: list[str] = []
    tracker = Tracker(tmp_path, DISABLED, run_config={}, warn=warnings.append)
    tracker._file._file.close()
    tracker._file._file = Path("/dev/full").open("a")  # noqa: SIM115
    tracker.log(1, {"train/loss": 1.0})
    tracker.log(2, {"train/loss": 1.0})
    tracker.finish()
    assert ["from step 1 on: OSError: [Errno 28]" in warning for warning in warnings] == [True, False]
    assert "lacks its last records" in warnings[1]


def test_checkpoints_become_artifacts_by_reference(tmp_path: Path) -> None:
    checkpoint = tmp_path / "with space" / "global_step3"
    (checkpoint / "deep").mkdir(parents=True)
    (checkpoint / "dsx.json").write_text("{}")
    (checkpoint / "deep" / "rank_0.bin").write_bytes(b"x" * 1000)
    with Tracker(tmp_path, OFFLINE, run_config={}) as tracker:
        tracker.refer_to("checkpoint", checkpoint, step=3, about={"tokens": 9})
        taken = threading.Event()
        tracker._wandb.put("say so", lambda run: taken.set())
        assert taken.wait(60)
        (checkpoint / "dsx.json").write_text("[]")  # another one in its place
        tracker.refer_to("checkpoint", checkpoint, step=3, about={"tokens": 9})
        tracker.refer_to("model", tmp_path / "gone", step=3, about={})
        folder, run_id = tracker.wandb_path, tracker.run_id
    first, second = of_kind("artifact", folder)
    for artifact in (first, second):
        assert (artifact.name, artifact.type) == (f"checkpoint-{run_id}", "checkpoint")
        assert set(artifact.aliases) == {"latest", "step3"}
        assert json.loads(artifact.metadata) == {
            "step": 3,
            "path": str(checkpoint),
            "tokens": 9,
            "bytes": 1002,
        }
        found = {entry.path: (entry.ref, entry.size) for entry in artifact.manifest.contents}
        assert found == {
            "dsx.json": ((checkpoint / "dsx.json").as_uri(), 2),
            "deep/rank_0.bin": ((checkpoint / "deep" / "rank_0.bin").as_uri(), 1000),
        }
        assert not any(entry.local_path for entry in artifact.manifest.contents)  # nothing to send
    assert first.digest != second.digest
    with Tracker(tmp_path / "off", OFFLINE.model_copy(update={"artifacts": "off"}), run_config={}) as tracker:
        tracker.refer_to("checkpoint", checkpoint, step=3, about={})
        folder = tracker.wandb_path
    assert of_kind("artifact", folder) == []


def test_a_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    """Killed after step 7, resumed from a checkpoint of step 4: W&B, which cannot forget, has 5 and 6.

    The last row of a process that is killed does not reach W&B, so it gets 7 again. Later the run goes back
    from 9 to 8 by itself.
    """
    warnings: list[str] = []
    with Tracker(tmp_path, OFFLINE, run_config={}, warn=warnings.append) as tracker:
        for step in range(1, 8):
            tracker.log(step, {"train/loss": float(step)})
        first, run_id = tracker.wandb_path, tracker.run_id
    with Tracker(
        tmp_path, OFFLINE, run_config={}, first_step=5, run_id=run_id, warn=warnings.append
    ) as tracker:
        for step in range(5, 10):
            tracker.log(step, {"train/loss": step + 0.5})
            if step == 6:  # not done before
                tracker.log(step, {"eval/loss": 1.0})
        tracker.went_back(8)
        for step in (9, 10):
            tracker.log(step, {"train/loss": step + 0.25})
        second = tracker.wandb_path
    assert [row["train/step"] for row in history(first)] == [1, 2, 3, 4, 5, 6, 7]
    assert history(second) == [
        {"train/step": 6, "eval/loss": 1.0},
        {"train/step": 7, "train/loss": 7.5},
        {"train/step": 8, "train/loss": 8.5},
        {"train/step": 9, "train/loss": 9.5},
        {"train/step": 10, "train/loss": 10.25},
    ]
    assert {run.run_id for folder in (first, second) for run in of_kind("run", folder)} == {run_id}
    (warning,) = warnings
    assert "W&B keeps steps 5 to 6" in warning
    rows = records(tracker.metrics_path)[4:]
    assert [row.get("train/loss") for row in rows] == [5.5, 6.5, None, 7.5, 8.5, 9.25, 10.25]


def test_warnings_are_logged_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    Tracker(tmp_path, OFFLINE, run_config={}).finish()
    assert [record.name for record in caplog.records] == ["dsx.train.tracking"]


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot be written.*dsx\.train\.output"):
        Tracker(tmp_path / "file", DISABLED, run_config={})


def test_environment() -> None:
    import torch

    seen = environment()
    assert seen["torch"] == torch.__version__.partition("+")[0] or seen["torch"] == torch.__version__
    assert seen["wandb"] == wandb.__version__
    assert seen["git_commit"] is None or len(seen["git_commit"]) == 40
