"""A machine of three is killed, or cut off: every other one's console says so at once, and training goes on.

Each machine is a network, a process table and an sshd of its own (tests/machines.py). Figures are printed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import machines
from dsx.checkpoint import store
from recipes.launching import REPOSITORY, SMALL, ZERO3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(machines.missing()), reason=machines.missing() or "-"),
]

NAMED_SECONDS, AGAIN_SECONDS, START_SECONDS = 5.0, 20.0, 300.0
BIN = REPOSITORY / ".venv/bin"
CLOCK = r"\d\d:\d\d:\d\d"
QUICK = "keep_alive_interval=2,last_call_timeout=5"
"""torchrun's own wait: 3 beats of 2 s are missed, and 5 s for a machine to come."""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[machines.Machine]]:
    with machines.started(3, tmp_path) as found:
        yield found


def recipe(output: Path, **settings: Any) -> list[str]:
    """A run that goes on until it is stopped."""
    wanted = {
        **SMALL,
        "train_batch_size": 12,
        "dsx.data.max_bytes": 300_000,
        "dsx.train.steps": 100_000,
        "dsx.train.save_every": 5,
        "dsx.train.keep_checkpoints": 2,
        "dsx.train.output": str(output),
        **settings,
    }
    words = [str(REPOSITORY / "recipes/gpt_3d.py"), str(ZERO3)]
    for key, value in wanted.items():
        words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return words


def environment(**more: str) -> dict[str, str]:
    path = f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": path, **more}


def wait_for_checkpoint(output: Path, consoles: list[machines.Console]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not (output / "checkpoints" / store.LATEST).exists():
        assert time.monotonic() < deadline, "\n".join(one.text for one in consoles)
        assert all(one.code is None for one in consoles), "\n".join(one.text for one in consoles)
        time.sleep(0.05)


def ended(text: str) -> bool:
    return "] ended because " in text


LOST = {
    "kill": rf"rank 2 on node3 is gone since {CLOCK}: its process has ended without a word \(killed\?\)",
    "cut": rf"node3 \(rank 2\) has not answered since {CLOCK}: it is down, or its network is",
}


@pytest.mark.parametrize("how", LOST)
def test_under_torchrun_the_others_name_it_and_train_on(
    nodes: list[machines.Machine], tmp_path: Path, how: str
) -> None:
    output = tmp_path / "run"
    words = recipe(output, **{"dsx.elastic.tensor": [1], "dsx.elastic.pipeline": [1]})
    consoles = []
    for node in nodes:
        meeting = f"is_host={int(node is nodes[0])},{QUICK}"
        torchrun = [
            str(BIN / "torchrun"),
            *("--nnodes=2:3", "--nproc_per_node=1", "--max-restarts=3", "--rdzv-backend=c10d"),
            *("--rdzv-endpoint=node1:20555", f"--rdzv-conf={meeting}", "--rdzv-id=lost"),
        ]
        switch = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", LOGLEVEL="INFO")
        consoles.append(node.run([*torchrun, *words], switch))
    wait_for_checkpoint(output, consoles)
    at = nodes[2].kill() if how == "kill" else nodes[2].cut()
    first, second, lost = consoles
    for rank, console in enumerate((first, second)):
        line = console.wait_for(ended, 30, after=at)
        assert re.fullmatch(rf"\[rank {rank} on node{rank + 1}\] ended because {LOST[how]}", line.text), line
        assert line.at - at < NAMED_SECONDS, line.at - at
        print(f"{how}: {console.name} names it after {line.at - at:.1f} s")
    again = first.wait_for(lambda text: text.startswith("step "), 120, after=line.at)
    met = first.wait_for(lambda text: "Rendezvous complete" in text, 1, after=line.at)
    waited, start = met.at - line.at, again.at - met.at
    print(f"{how}: {waited:.1f} s of torchrun's own wait, training again {start:.1f} s later")
    # On a machine so slow that a start takes longer, no longer than the first one.
    began = first.wait_for(lambda text: "Rendezvous complete" in text, 1)
    first_start = first.wait_for(lambda text: text.startswith("step "), 1).at - began.at
    assert (line.at - at) + start < max(AGAIN_SECONDS, NAMED_SECONDS + 1.2 * first_start)
    assert any(text.startswith("  resumed ") for text in (one.text for one in first.lines))
    assert not any("Traceback" in one.text for one in first.lines + second.lines if one.at > at)
    if how == "cut":
        line = lost.wait_for(ended, 10, after=at)
        assert "because this machine, node3 (rank 2), has heard nothing from any other since" in line.text
        assert line.text.endswith("(node1 (rank 0), node2 (rank 1)): its own network is cut")


def test_under_deepspeed_and_ssh_the_others_name_it_and_the_launcher_ends(
    nodes: list[machines.Machine], tmp_path: Path
) -> None:
    output, hostfile = tmp_path / "run", tmp_path / "hostfile"
    hostfile.write_text("".join(f"{node.name} slots=1\n" for node in nodes))
    options = ["--hostfile", str(hostfile), "--master_addr", "node1", "--master_port", "20777"]
    # Else ssh, and so the launcher, waits for ever for a machine that answers nothing.
    patience = environment(PDSH_SSH_ARGS_APPEND="-o ServerAliveInterval=5")
    console = nodes[0].run([str(BIN / "deepspeed"), *options, *recipe(output)], patience)
    wait_for_checkpoint(output, [console])
    at = nodes[1].cut()
    silent = rf"node2 \(rank 1\) has not answered since {CLOCK}: it is down, or its network is"
    for rank in (0, 2):
        name = f"node{rank + 1}"
        line = console.wait_for(lambda text, name=name: ended(text) and text.startswith(name), 30, after=at)
        assert re.fullmatch(rf"{name}: \[rank {rank} on {name}\] ended because {silent}", line.text), line
        assert line.at - at < NAMED_SECONDS, line.at - at
        print(f"cut, deepspeed: {name} names it after {line.at - at:.1f} s")
    assert console.end(90) != 0
    assert "Traceback" not in console.text


def test_a_message_that_does_not_arrive_is_named_where_nobody_looks_for_silence(
    nodes: list[machines.Machine], tmp_path: Path
) -> None:
    """As on a network that loses what the transfers send, and that alone: both wait until they are hung."""
    output, hostfile = tmp_path / "run", tmp_path / "hostfile"
    hostfile.write_text("node1 slots=1\nnode2 slots=1\n")
    options = ["--hostfile", str(hostfile), "--master_addr", "node1", "--master_port", "20777"]
    faults = {"dsx.faults.silent_seconds": 0, "dsx.faults.hang_seconds": 40}
    words = recipe(output, **faults, **{"dsx.parallel.pipeline": 2, "zero_optimization.stage": 1})
    console = nodes[0].run([str(BIN / "deepspeed"), *options, *words], environment())
    wait_for_checkpoint(output, [console])
    at = nodes[1].cut()
    line = console.wait_for(lambda text: "the run does not go on" in text, 120, after=at)
    way = r"was sent by rank (\d) on node(\d) and has not arrived at rank (\d) on node(\d) for \d+ s"
    found = re.search(
        rf"does not go on since {CLOCK}: \d[FB]\d+ {way}: look at the network between", line.text
    )
    assert found is not None, line.text
    assert sorted(found.groups()) == ["0", "1", "1", "2"]
    print(f"cut under a pipeline: {line.text} after {line.at - at:.1f} s")


AHEAD = """import time
own = time.time
time.time = lambda: own() + 3600.0
"""


def started(
    tmp_path: Path, output: Path, mounts: dict[Path, Path], **node3: str
) -> tuple[int, list[machines.Console]]:
    """Exit code of rank 0 and what the machines' consoles say; ``mounts`` and ``node3`` are the third's."""
    folder = tmp_path / "machines"
    folder.mkdir()
    with machines.started(3, folder, {"node3": mounts}) as nodes:
        consoles = []
        for rank, node in enumerate(nodes):
            place = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            place |= {"MASTER_ADDR": "node1", "MASTER_PORT": "20888"} | (node3 if rank == 2 else {})
            words = [str(BIN / "python"), *recipe(output, **{"dsx.train.steps": 2, "dsx.parallel.tensor": 1})]
            consoles.append(node.run(words, environment(**place)))
        return consoles[0].end(400), consoles


def test_an_output_folder_that_is_not_shared(tmp_path: Path) -> None:
    output, apart = tmp_path / "run", tmp_path / "apart"
    output.mkdir()
    apart.mkdir()
    code, consoles = started(tmp_path, output, {output: apart})
    assert code == 2
    assert (
        f"error: rank 2 on node3: dsx.train.output there ({output}) is not the folder that rank 0 on node1 "
        "writes to"
    ) in consoles[0].text
    assert "step 1/" not in consoles[0].text
    assert not list(tmp_path.rglob(".dsx-preflight-*"))


def test_another_version_of_dsx(tmp_path: Path) -> None:
    (own,) = [file for file in metadata.files("dsx") or () if file.name == "METADATA"]
    there = Path(str(own.locate())).resolve()
    other = tmp_path / "METADATA"
    other.write_text(re.sub(r"^Version: .*$", "Version: 0.0.9", there.read_text(), flags=re.MULTILINE))
    code, consoles = started(tmp_path, tmp_path / "run", {there: other})
    assert code == 2
    assert "error: rank 2 on node3: it has dsx 0.0.9, rank 0 on node1, rank 1 on node2 " in consoles[0].text
    assert "step 1/" not in consoles[0].text


def test_a_clock_that_is_an_hour_off(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(AHEAD)
    code, consoles = started(tmp_path, tmp_path / "run", {}, PYTHONPATH=str(tmp_path / "site"))
    assert code == 0, consoles[0].text
    said = "warning: rank 2 on node3: its clock is 1 h 00 min ahead"
    warned = consoles[0].wait_for(lambda text: text.startswith(said), 30)
    assert warned.at <= consoles[0].wait_for(lambda text: text.startswith("step 1/2"), 30).at
