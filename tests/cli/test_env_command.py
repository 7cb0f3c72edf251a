"""``dsx env``: what it tells of this machine, and of those in a hostfile."""

from __future__ import annotations

import json
import re
import socket
from contextlib import closing
from importlib import metadata
from pathlib import Path

import pytest

COMMAND = ("env",)


def test_it_tells_versions_limits_and_stale_locks_but_no_secrets(
    dsx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    for name, value in {
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "HF_TOKEN": "hf_secret",
        "NCCL_DEBUG": "INFO",
    }.items():
        monkeypatch.setenv(name, value)
    code, out, _ = dsx()
    assert code == 0
    assert re.search(rf"^  torch +{re.escape(metadata.version('torch'))}$", out, re.MULTILINE)
    assert f"{lock} is 0 minutes old and no process of this machine builds there" in out
    assert "hf_secret" not in out
    code, out, _ = dsx("--format", "json")
    found = json.loads(out)
    rows = {title: dict(rows) for title, rows in found.items()}
    assert rows["variables"]["HF_TOKEN"] == "(set)"
    assert rows["variables"]["NCCL_DEBUG"] == "INFO"
    assert "open files" in rows["limits"]
    assert rows["devices"]["CUDA"]
    assert "hosts" not in rows


def test_machines_of_a_hostfile_are_looked_up(dsx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=2\nno-such-machine.invalid slots=4\n")
    with closing(socket.socket()) as sshd:
        sshd.bind(("127.0.0.1", 0))
        sshd.listen()
        monkeypatch.setattr("dsx.launch.environment._SSH", sshd.getsockname()[1])
        code, out, _ = dsx("--hostfile", hostfile, "--format", "json")
        hostfile.write_text("localhost slots=1\n")
        assert dsx("--hostfile", hostfile)[0] == 0
    assert code == 1
    hosts = dict(json.loads(out)["hosts"])
    assert hosts["localhost"].startswith("2 slots, ")
    assert hosts["localhost"].endswith("sshd answers")
    assert "no address" in hosts["no-such-machine.invalid"]
    hostfile.write_text("localhost\n")
    code, _, err = dsx("--hostfile", hostfile)
    assert code == 2
    assert f"--hostfile {hostfile}" in err
    assert dsx("--hostfile", tmp_path / "none")[0] == 2
