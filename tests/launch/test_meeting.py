"""Ranks of one start meet, whatever an earlier start has left in the launcher's store."""

import json
import os
import socket
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import deepspeed.accelerator
import pytest
import torch.distributed as dist

from dsx.errors import ConfigError, RunError
from dsx.launch import processes
from dsx.launch.entry import refuse_alone
from dsx.parallel.islands import Islands
from dsx.parallel.mesh import Mesh

SOON = timedelta(seconds=20)
LAUNCHERS = {"torchrun": "GROUP_WORLD_SIZE", "deepspeed": "CROSS_SIZE"}


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
    for name in ("PATIENCE", "FAR_PATIENCE", "LOOK"):
        monkeypatch.setattr(processes, f"_{name}_SECONDS", 0.2)
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


@pytest.mark.parametrize(("launcher", "size"), LAUNCHERS.items())
def test_launchers_that_srun_has_started_know_of_each_other(monkeypatch, capfd, launcher, size):
    """``srun torchrun --nproc_per_node 8`` without --nnodes: each machine would train by itself."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")

    def said(*values: int) -> str:
        names = (size, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_LOCALID")
        for name, value in zip(names, values, strict=True):
            monkeypatch.setenv(name, str(value))
        processes._refuse_strangers()
        return capfd.readouterr().err

    refused = rf"^{launcher}: this run has 1 of the 2 that SLURM_STEP_NUM_TASKS=2 lets expect: "
    for step in ((2, 2, 0), (2, 1, 1)):
        with pytest.raises(ConfigError, match=refused):
            said(1, *step)
    with pytest.raises(ConfigError, match=refused), processes.distributed(Mesh.of(pp=1, dp=8, tp=1)):
        pass
    # An island each is right; so are a torchrun on each machine's first task alone, and one on all tasks.
    apart = Islands(count=2, index=1, ranks=8, meet="127.0.0.1:29711")
    monkeypatch.setattr(processes, "lean_on_cpu", lambda: sys.exit("it goes on"))
    with pytest.raises(SystemExit, match="it goes on"), processes.distributed(Mesh.of(pp=1), islands=apart):
        pass
    assert said(1, 8, 1, 0) + said(2, 16, 2, 0) + said(2, 2, 1, 1) == ""
    late = f"warning: {launcher}: this run has 3 of the 4 that SLURM_STEP_NUM_TASKS=4 lets expect; others, "
    assert said(3, 4, 4, 0).startswith(late)  # --nnodes 2:4
    monkeypatch.setenv("PET_NNODES", "1:4")
    assert said(1, 4, 4, 0).startswith(late.replace("3", "1"))
    _, *others = processes.job_steps()
    monkeypatch.setattr(processes, "job_steps", lambda: others)
    monkeypatch.delenv("PET_NNODES")
    for name, value in {"SIZE": "16", "LOCAL_SIZE": "8", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert said(2, 2, 2, 0) == ""
    with pytest.raises(ConfigError, match="1 of the 2 that OMPI_COMM_WORLD_SIZE=16"):
        said(1, 2, 2, 0)


def test_ranks_beyond_the_gpus_that_they_see_are_refused(monkeypatch):
    """``torchrun --nproc_per_node 8`` on four GPUs, or ``srun --gpus-per-task=1`` with LOCAL_RANK set."""
    gpus = SimpleNamespace(device_name=lambda: "cuda", device_count=lambda: 4)
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with (
        pytest.raises(ConfigError, match=r"^LOCAL_RANK 4: this process sees 4 GPUs, numbered from 0"),
        processes.distributed(Mesh.of(pp=1, dp=8, tp=1)),
    ):
        pass


def test_ranks_that_srun_has_bound_to_one_core_say_so(monkeypatch, capfd):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    for bound, lines in {8: 0, 1: 1}.items():
        monkeypatch.setattr(processes, "usable_cores", lambda bound=bound: bound)
        processes._warn_of_few_cores()
        said = capfd.readouterr().err
        assert said.count("\n") == said.count("warning: 8 ranks share 1 of the 96 cores of ") == lines


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
