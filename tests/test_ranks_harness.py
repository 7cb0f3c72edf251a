import importlib
import multiprocessing.util
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ranks
from dsx.errors import LayoutError
from dsx.launch.local_ranks import start_server


def _sum(rank, world_size, base):
    x = torch.tensor([float(base + rank)])
    dist.all_reduce(x)
    return rank, world_size, x.item()


def _one_raises(rank, world_size):
    if rank == 1:
        raise LayoutError("dsx.parallel.tensor = 3", "it does not divide", "use 2")
    dist.barrier()


def _unpicklable_error(rank, world_size):
    class LocalError(Exception):
        pass

    raise LocalError(f"from rank {rank}")


def _one_never_comes(rank, world_size):
    if rank == 0:
        _sleep_for_ever()
    dist.barrier()


def _sleep_for_ever():
    while True:
        signal.pause()


def _one_is_killed(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _leave_a_child_behind(rank, world_size, pid_file):
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    Path(pid_file).write_text(str(child.pid))
    raise RuntimeError("the child must die with the rank")


def _stay(rank, world_size, fifo):
    dist.barrier()
    with Path(fifo).open("w") as file:
        file.write(f"{os.getpid()}\n")
    _sleep_for_ever()


def _surroundings(rank, world_size):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CUDA_VISIBLE_DEVICES", "A_TEST_SET_THIS")
    print(f"hello from {rank}")
    return {name: os.environ.get(name) for name in names}, str(Path.cwd()), torch.get_num_threads()


def _deepspeed_step(rank, world_size):
    import deepspeed

    group = dist.group.WORLD
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    return dist.group.WORLD is group, engine.global_steps


def test_results_come_back_in_rank_order():
    assert ranks.run(_sum, 4, 10) == [(rank, 4, 46.0) for rank in range(4)]


def test_large_tensors_come_back():
    (x,) = ranks.run(_large, 1)
    assert torch.equal(x, torch.arange(1_000_000))


def _large(rank, world_size):
    return torch.arange(1_000_000)


def test_first_failure_is_raised_while_others_wait_in_a_collective():
    start = time.monotonic()
    with pytest.raises(ranks.RankError, match="rank 1 of 3 failed") as caught:
        ranks.run(_one_raises, 3, timeout=200)
    assert time.monotonic() - start < 60
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, LayoutError)
    assert caught.value.error.fix == "use 2"
    assert "in _one_raises" in str(caught.value)


def test_an_error_that_does_not_pickle_still_gives_its_traceback():
    with pytest.raises(ranks.RankError, match="from rank 0") as caught:
        ranks.run(_unpicklable_error, 1)
    assert caught.value.error is None


def test_deadline_dumps_the_stacks_of_all_ranks():
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(_one_never_comes, 2, timeout=8)
    message = str(caught.value)
    assert "2 of 2 ranks did not finish within 8 s: [0, 1]" in message
    assert "in _sleep_for_ever" in message
    assert "in barrier" in message


def test_a_killed_rank_is_reported_rather_than_the_peers_that_lost_it():
    with pytest.raises(ranks.RankError, match="rank 1 of 2 died without a result") as caught:
        ranks.run(_one_is_killed, 2, timeout=200)
    assert caught.value.rank == 1


def test_a_rank_that_crashes_after_its_result_is_reported():
    with pytest.raises(ranks.RankError, match="rank 1 gave its result but ended with 7"):
        ranks.run(_bad_exit, 2)


def _bad_exit(rank, world_size):
    if rank == 1:
        multiprocessing.util.Finalize(None, os._exit, args=(7,), exitpriority=10)


def test_processes_that_a_rank_started_end_with_it(tmp_path):
    with pytest.raises(ranks.RankError, match="must die with the rank"):
        ranks.run(_leave_a_child_behind, 1, str(tmp_path / "pid"))
    _wait_until_gone(int((tmp_path / "pid").read_text()))


def _wait_until_gone(pid):
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        assert select.select([descriptor], [], [], 60)[0]
        os.close(descriptor)


def test_ranks_end_when_their_caller_is_killed(tmp_path):
    fifo = tmp_path / "pids"
    os.mkfifo(fifo)
    code = f"import ranks, test_ranks_harness as h; ranks.run(h._stay, 2, {str(fifo)!r})"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    caller = subprocess.Popen([sys.executable, "-c", code], env=environ)
    try:
        with os.fdopen(os.open(fifo, os.O_RDWR)) as file:  # also for writing: no end of file between the two
            pids = [int(file.readline()), int(file.readline())]
    finally:
        caller.kill()
        caller.wait()
    for pid in pids:
        _wait_until_gone(pid)


def test_ranks_see_the_callers_environment_and_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("A_TEST_SET_THIS", "yes")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.chdir(tmp_path)
    for rank, (environ, cwd, threads) in enumerate(ranks.run(_surroundings, 2)):
        assert environ == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_SIZE": "2",
            "CUDA_VISIBLE_DEVICES": "",
            "A_TEST_SET_THIS": "yes",
        }
        assert Path(cwd) == tmp_path
        assert threads == 1
    assert "hello from 1" in capsys.readouterr().out
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_deepspeed_uses_the_group_that_is_there():
    assert ranks.run(_deepspeed_step, 2) == [(True, 1)] * 2


def test_functions_of_a_module_in_any_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere_for_ranks.py").write_text("def double(rank, world_size): return 2 * rank")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir("/")
    assert ranks.run(importlib.import_module("elsewhere_for_ranks").double, 2) == [0, 2]


def test_ranks_with_a_gpu_fork_before_anything_counts_the_gpus(monkeypatch):
    """DeepSpeed does when it is imported, and torch refuses CUDA in processes that are forked later."""
    imported = []
    monkeypatch.setattr(forkserver, "set_forkserver_preload", imported.extend)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: None)
    start_server(["dsx.train.recipe"], use_gpus=True)
    assert not {name for name in imported if name.startswith(("deepspeed", "dsx", "transformers"))}
    loaded = f"import sys, {', '.join(imported)}; sys.exit('deepspeed' in sys.modules)"
    subprocess.run([sys.executable, "-c", loaded], check=True)
