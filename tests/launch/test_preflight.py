"""Which machine differs from the others, in what; ranks that take themselves for machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dsx
import ranks
from dsx.fault_tolerance.keepalive import Peer
from dsx.launch.differences import Difference, MachineFacts, differences

GIB = 1 << 30
NODES = [
    MachineFacts(
        name=f"rank {rank} on node{rank + 1}",
        versions={"dsx": "0.1.0", "torch": "2.13.0", "Python": "3.11"},
        files={"errors.py": "aa", f"only_{rank}.py": "cc"},
        config="c0ffee",
        clock=1_000_000.0 + rank / 10,
        unseen={},
        free_bytes={"/runs/a": 100 * GIB},
    )
    for rank in range(4)
]


def found(nodes: list[MachineFacts]) -> list[Difference]:
    return list(differences(nodes, checkpoint_bytes=10 * GIB))


def changed(which: int, **more: Any) -> list[Difference]:
    return found([replace(node, **more) if at == which else node for at, node in enumerate(NODES)])


def test_machines_that_are_alike_have_no_differences() -> None:
    assert found(NODES) == []


@pytest.mark.parametrize("which", range(4))
def test_the_machine_that_differs_is_named_wherever_it_is(which: int) -> None:
    other = {**NODES[0].versions, "torch": "2.12.1"}
    (difference,) = changed(which, versions=other)
    assert difference.where == f"rank {which} on node{which + 1}"
    assert difference.what.startswith("it has torch 2.12.1, rank ")
    assert difference.what.endswith("2.13.0")
    assert difference.stops
    (difference,) = changed(which, config="decaf")
    assert (difference.where, difference.stops) == (f"rank {which} on node{which + 1}", True)
    assert "a config with the digest decaf" in difference.what
    (difference,) = changed(which, files={"errors.py": "bb"})
    assert (difference.where, difference.stops) == (f"rank {which} on node{which + 1}", True)
    assert "dsx/errors.py with the digest bb" in difference.what


@pytest.mark.parametrize(
    ("seconds", "said"), [(3600, "1 h 00 min ahead"), (-120, "2 min 00 s behind"), (50, None)]
)
def test_a_clock_is_warned_of(seconds: float, said: str | None) -> None:
    differ = changed(2, clock=NODES[2].clock + seconds)
    assert [(one.where, said in one.what, one.stops) for one in differ if said] == (
        [("rank 2 on node3", True, False)] if said else []
    )
    assert bool(differ) == bool(said)


def test_a_folder_that_is_not_shared_and_a_full_disk() -> None:
    (difference,) = changed(1, unseen={"dsx.train.output": "/runs/a"})
    assert difference.where == "rank 1 on node2"
    assert difference.what == (
        "dsx.train.output there (/runs/a) is not the folder that rank 0 on node1 writes to"
    )
    (difference,) = changed(3, free_bytes={"/runs/a": 2 * GIB})
    assert (difference.where, difference.stops) == ("rank 3 on node4", False)
    assert difference.what == "/runs/a has 2.00 GiB left; a checkpoint takes about 10.00 GiB"


def test_many_are_named_by_three_and_of_two_the_first_is_right() -> None:
    apart = [NODES[0], *(replace(node, unseen={"dsx.train.output": "/x"}) for node in NODES[1:] * 2)]
    assert found(apart)[0].where.endswith("rank 3 on node4 and 3 more")
    (difference,) = found([NODES[0], replace(NODES[1], config="decaf")])
    assert difference.where == "rank 1 on node2"


def checked(rank: int, world_size: int, folder: str, kind: str) -> str:
    """What rank ``rank`` on a machine of its own is told."""
    from dsx.launch.preflight import check_machines

    output = f"{folder}/{rank if kind == 'apart' else 'one'}"
    settings = [f"dsx.train.output={output}"] if kind != "apart" else []
    if kind == "config" and rank == 1:
        settings.append("dsx.train.steps=7")
    config = dsx.load_config("configs/zero3.json", world_size=1, overrides=settings)
    if (
        kind == "apart"
    ):  # the same path leads to another folder there, which a test on one machine cannot have
        config = replace(config, dsx=config.dsx.model_copy(deep=True))
        object.__setattr__(config.dsx.train, "output", output)
    peers = [Peer(other, f"machine {other}", 1, f"node{other + 1}") for other in range(world_size)]
    try:
        check_machines(config, peers, rank)
    except dsx.RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["shared", "apart", "config"])
def test_the_machine_that_differs_is_named_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    found = ranks.run(checked, 3, str(tmp_path), kind)
    assert len(set(found)) == 1
    if kind == "shared":
        assert found[0] == ""
    elif kind == "apart":
        assert found[0].startswith("rank 1 on node2, rank 2 on node3: dsx.train.output there (")
        assert "is not the folder that rank 0 on node1 writes to" in found[0]
    else:
        assert found[0].startswith("rank 1 on node2: it has a config with the digest ")
    assert not list(tmp_path.rglob(".dsx-preflight-*"))


def test_one_machine_is_told_of_a_disk_that_has_no_room_for_its_checkpoint(tmp_path, monkeypatch, capsys):
    """Hours before the checkpoint is due: the folder need not be there yet."""
    from dsx.launch import preflight

    output = tmp_path / "not/there/yet"
    config = dsx.load_config("configs/zero3.json", world_size=1, overrides=[f"dsx.train.output={output}"])
    here = [Peer(0, "machine 0", 1, "node1")]
    preflight.check_machines(config, here, 0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    preflight.check_machines(config, here, 0)
    said = f"{output} has 1.00 MiB left; a checkpoint takes about 9.20 MiB. Fix: free space before it is due."
    assert capsys.readouterr().err == f"warning: this machine: {said}\n"
