"""Three machines of which one has another folder, another dsx or another clock: it is named before step 1.

Each machine is a network, a process table and an sshd of its own (tests/machines.py).
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

import machines
from fault_tolerance.test_lost_machines import BIN, environment, recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(machines.missing()), reason=machines.missing() or "-"),
]

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
