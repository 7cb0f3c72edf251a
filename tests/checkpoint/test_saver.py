"""Saves beside the training, what they cost when they fail, and which checkpoints are kept."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from dsx.checkpoint.formats.native import read_manifest
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.read import verify
from dsx.checkpoint.run import saver
from dsx.errors import CheckpointError
from parity import dsx_run
from parity.dsx_run import Case

CASE = Case(dp=2, zero=2, accumulation=2, bf16=True)


def save_both_ways(rank: int, world_size: int, folder: str) -> list[float]:
    engine, _ = dsx_run.build(CASE, None)
    dsx_run.losses_of(engine, CASE, range(2))
    engine.save_checkpoint(folder, tag="before")
    # Held until the run has gone on: what is written must be what was there at the time.
    gone_on = threading.Event()
    write = saver.write_share

    def late(*args: Any) -> Any:
        assert gone_on.wait(60)
        return write(*args)

    saver.write_share = late
    engine.save_checkpoint(folder, tag="beside", background=True)
    assert not (Path(folder) / "beside").exists()
    losses = dsx_run.losses_of(engine, CASE, range(2, 4))
    gone_on.set()
    engine.wait_for_checkpoint()
    return losses


def load_and_go_on(rank: int, world_size: int, folder: str, tag: str) -> list[float]:
    engine, _ = dsx_run.build(CASE, None)
    engine.load_checkpoint(folder, tag=tag)
    return dsx_run.losses_of(engine, CASE, range(2, 4))


def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    losses = ranks.run(save_both_ways, 2, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "beside"
    both = [read_manifest(tmp_path / tag / "dsx.json") for tag in ("before", "beside")]
    assert [one.digest for one in both[0].checksums] == [one.digest for one in both[1].checksums]
    assert ranks.run(load_and_go_on, 2, str(tmp_path), "beside") == losses


def save_often(rank: int, world_size: int, folder: str) -> None:
    engine, _ = dsx_run.build(CASE, None)
    for step in range(5):
        dsx_run.losses_of(engine, CASE, [step])
        engine.save_checkpoint(folder, background=step % 2 == 1, keep=2)
    engine.wait_for_checkpoint()


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    ranks.run(save_often, 2, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step4", "global_step5", "latest"]


def client_state_of(rank: int, world_size: int, folder: str) -> tuple[Any, str]:
    engine, _ = dsx_run.build(CASE, None)
    dsx_run.losses_of(engine, CASE, [0])
    state = {"seen": {1: "a", 2: (3, 4.5, None)}, "mask": torch.arange(4), "best": float("inf")}
    engine.save_checkpoint(folder, client_state=state)
    _, back = engine.load_checkpoint(folder)
    with pytest.raises(CheckpointError) as raised:
        engine.save_checkpoint(folder, client_state={"model": torch.nn.Linear(1, 1)})
    return {**back, "mask": back["mask"].tolist()}, str(raised.value)


def test_client_state_is_plain_data_and_comes_back_as_it_was(tmp_path: Path) -> None:
    for back, message in ranks.run(client_state_of, 2, str(tmp_path)):
        assert back == {"seen": {1: "a", 2: (3, 4.5, None)}, "mask": [0, 1, 2, 3], "best": float("inf")}
        assert "client_state['model']: a Linear is no plain data" in message


def save_once(rank: int, world_size: int, folder: str) -> None:
    engine, _ = dsx_run.build(CASE, None)
    dsx_run.losses_of(engine, CASE, [0])
    engine.save_checkpoint(folder, tag="one")


def load_each(rank: int, world_size: int, folders: list[str]) -> list[str]:
    """What is said of each checkpoint, one after another in one engine."""
    engine, _ = dsx_run.build(CASE, None)
    said = []
    for folder in folders:
        try:
            engine.load_checkpoint(folder, tag="one")
            said.append("loaded")
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_a_flipped_bit_in_any_file_is_found_and_named(tmp_path: Path) -> None:
    ranks.run(save_once, 2, str(tmp_path / "good"))
    files = sorted(path.name for path in (tmp_path / "good" / "one").iterdir())
    assert [name for name in files if name.startswith("dsx_random_")] == [
        "dsx_random_0.safetensors",
        "dsx_random_1.safetensors",
    ]
    for number, name in enumerate(files):
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "good", folder)
        data = bytearray((folder / "one" / name).read_bytes())
        at = data.index(b"xxh3_128") if name.startswith("dsx_random_") else 20
        data[at] ^= 4  # in the header: of random states, the key of the checksum that the file itself has
        (folder / "one" / name).write_bytes(data)
        try:
            damage = [str(error) for error in verify(open_checkpoint(folder / "one"))]
        except CheckpointError as error:
            damage = [str(error)]
        assert name in damage[0]
    said = ranks.run(load_each, 2, [str(tmp_path / f"{number}") for number in range(len(files))])
    for by_rank in said:
        assert [name in words for name, words in zip(files, by_rank, strict=True)] == [True] * len(files)
    assert ranks.run(load_each, 2, [str(tmp_path / "good")]) == [["loaded"], ["loaded"]]
