"""Ranks of one start meet, whatever an earlier start has left in the launcher's store."""

import json
import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from dsx.errors import ConfigError, RunError
from dsx.launch import processes
from dsx.launch.entry import refuse_alone

SOON = timedelta(seconds=20)


def gather(store, size):
    """What each rank of a start takes as its word; the others come before rank 0."""
    words = [""] * size

    def answer(place):
        words[place] = processes._answer(store, place, SOON)

    others = [threading.Thread(target=answer, args=(place,)) for place in range(1, size)]
    for other in others:
        other.start()
    words[0] = processes._call(store, size)
    for other in others:
        other.join()
    return words


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_agree_on_a_word_and_starts_do_not_share_it(size):
    store = dist.HashStore()
    first, second = gather(store, size), gather(store, size)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_a_start_that_failed_half_way_is_passed_over():
    """Its rank 0 has called, and perhaps heard other ranks than those that come now, or never did."""
    store = dist.HashStore()
    store.set("dsx/round", "dead")
    store.set("dead/rank/1", "someone")
    assert len(set(gather(store, 3))) == 1
    store.set("dsx/round", "gone")
    store.set("gone/heard", json.dumps(["", "someone", "another"]))
    assert len(set(gather(store, 3))) == 1


def test_a_spare_rank_ends_with_the_run():
    store = dist.HashStore()
    codes = []

    def spare():
        with pytest.raises(SystemExit) as ended:
            processes.stand_by(store)
        codes.append(ended.value.code)

    waiting = threading.Thread(target=spare)
    waiting.start()
    processes.dismiss(store, 1)
    waiting.join(20)
    assert codes == [0]


def test_a_rank_that_meets_nobody_says_so(monkeypatch, capfd):
    """Under DeepSpeed's launcher, whose ssh to the other machine failed, or has a firewall before it."""
    monkeypatch.setattr(processes, "_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(processes, "_FAR_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(processes, "_LOOK_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    told = {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "LOCAL_RANK": 0}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RunError, match="rank"):
        processes.meet(timedelta(seconds=1))
    assert "waits for ranks 1, 2 since" in capfd.readouterr().err
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(RunError, match="nothing answers"):
        processes._await_listener("127.0.0.1", port, timedelta(seconds=1))
    assert f"nothing answers at 127.0.0.1, port {port}" in capfd.readouterr().err


def test_one_of_several_that_no_launcher_of_ours_has_started_does_not_train_alone(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ConfigError, match=r"started 4 of it \(SLURM_STEP_NUM_TASKS\), and each would run by"):
        processes._join_world("gloo", None, 0, SOON, SOON)
    monkeypatch.setenv("SLURM_PTY_PORT", "40001")  # srun --pty bash: a person's shell
    refuse_alone()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE: it is set without RANK, MASTER_ADDR, MASTER_PORT"):
        processes._join_world("gloo", None, 0, SOON, SOON)
