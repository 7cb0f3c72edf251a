"""Ranks that take themselves for machines: notes through folders that they share, or do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import dsx
import ranks
from dsx.fault_tolerance.keepalive import Peer


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
