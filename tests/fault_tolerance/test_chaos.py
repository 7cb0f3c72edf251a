"""Saves and loads of a run on disks that fill up, vanish or rot: one error, the run goes on, nothing is lost.

Each kind of fault is tried on one engine after the other, in one launch of two ranks; the tests then look at
what came of each. What is random is drawn from seeds.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ranks
from dsx.checkpoint import store
from dsx.checkpoint.formats.native import read_manifest
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.read import verify
from dsx.checkpoint.run import saver
from dsx.errors import CheckpointError, RunError
from dsx.train.run_folder import RunLock
from fault_tolerance.guarded import Run
from parity import dsx_run
from parity.dsx_run import Case

CASE = Case(family="gpt2", dp=2, zero=1, accumulation=2)
ROOT = "checkpoints"


class Trainer:
    """A run that notes the loss of every step, however often it goes back."""

    def __init__(self, folder: str) -> None:
        self.run = Run(CASE, Path(folder))
        self.engine, self.root, self.losses = self.run.engine, self.run.root, {}
        self.run.guard.follow(self.engine, {})

    @property
    def step(self) -> int:
        return int(self.engine.global_steps)

    def train(self) -> float:
        loss = self.run.step()
        assert self.losses.setdefault(self.step, loss) == loss, f"step {self.step} came out different"
        return loss

    def refused(self, action: Callable[[], object]) -> str:
        """What the error says that ``action`` ends with."""
        with pytest.raises(CheckpointError) as caught:
            action()
        return str(caught.value)


# ---------------------------------------------------------------------------------------------------- saves


@contextmanager
def full_disk(at: int | None) -> Iterator[list[int]]:
    """Count what asks the disk for room; from call ``at`` on there is none. Yields the count."""
    calls, originals = [0], {name: getattr(os, name) for name in ("pwrite", "fsync", "mkdir")}

    def limited(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            calls[0] += 1
            if at is not None and calls[0] >= at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **named)

        return call

    try:
        for name, original in originals.items():
            setattr(os, name, limited(original))
        yield calls
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


FULL = {
    "foreground, rank 0": (False, "0", "any"),
    "foreground, rank 1 at once": (False, "1", "first"),
    "foreground, both": (False, "0 and 1", "any"),
    "background, rank 0 at the end": (True, "0", "late"),
    "background, rank 1": (True, "1", "any"),
    "background, both at the end": (True, "0 and 1", "late"),
}
"""In what kind of save which ranks' disk fills up, and at which write."""

REFUSED = ("a file in its place", "deleted while it is written")
GONE = (*REFUSED, "deleted before", "left by a killed save")


def saves(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What came of saves on a bad disk, and all losses."""
    trainer, found = Trainer(folder), {}
    trainer.train()
    with full_disk(None) as calls:
        trainer.engine.save_checkpoint(trainer.root)
    for seed, (name, (background, who, when)) in enumerate(FULL.items()):
        trainer.train()
        first = {"first": 1, "any": 1, "late": calls[0] - 14}[when]  # notes, manifest, commit
        at = random.Random(seed).randint(first, 1 if when == "first" else calls[0])
        found[name] = on_a_full_disk(trainer, at if str(rank) in who else None, background=background)
        if seed % 2:
            trainer.engine.load_checkpoint(trainer.root)
        found[name]["next"] = saved(trainer)
    for name in GONE:
        trainer.train()
        found[name] = without_the_folder(trainer, name)
        found[name]["next"] = saved(trainer)
    whole, _ = dsx_run.build(CASE, None)
    losses = dsx_run.losses_of(whole, CASE, range(len(trainer.losses)))
    return {"found": found, "losses": [*trainer.losses.values()], "undisturbed": losses}


def on_a_full_disk(trainer: Trainer, at: int | None, *, background: bool) -> dict[str, Any]:
    before = (trainer.root / store.LATEST).read_text()
    with full_disk(at):

        def save() -> None:
            trainer.engine.save_checkpoint(trainer.root, background=background)
            if background:
                trainer.train()
            trainer.engine.wait_for_checkpoint()

        said = trainer.refused(save)
    return {"said": said, **left(trainer, before)}


def left(trainer: Trainer, before: str) -> dict[str, Any]:
    """What rank 0 finds after a save that has failed."""
    if trainer.engine.groups.rank:
        return {}
    hidden = [path.name for path in trainer.root.iterdir() if path.name.startswith(".")]
    latest = (trainer.root / store.LATEST).read_text()
    same = store.tags(trainer.root)[-1] == latest == before
    return {"hidden": hidden, "same": same, "damaged": [*verify(open_checkpoint(trainer.root))]}


def saved(trainer: Trainer) -> bool:
    """Whether the save after the next step is whole and the latest."""
    trainer.train()
    path = trainer.engine.save_checkpoint(trainer.root)
    if trainer.engine.groups.rank:
        return True
    return store.find(trainer.root) == path and not [*verify(open_checkpoint(path))]


def without_the_folder(trainer: Trainer, name: str) -> dict[str, Any]:
    root, first, write = trainer.root, trainer.engine.groups.rank == 0, saver.write_share
    if first and name == "a file in its place":
        root.rename(root.with_name("aside"))
        root.write_text("")
    if first and name == "deleted before":
        shutil.rmtree(root)
    if first and name == "left by a killed save":
        for word in ("partial", "removed"):
            (root / f".global_step99.{word}").mkdir()
            (root / f".global_step99.{word}" / "rank_00000.safetensors").write_bytes(b"half")

    def delete_first(*args: Any) -> Any:
        shutil.rmtree(root)
        return write(*args)

    if name not in REFUSED:
        return {}
    saver.write_share = delete_first if first and root.is_dir() else write
    said = trainer.refused(lambda: trainer.engine.save_checkpoint(root))
    saver.write_share = write
    if first and root.is_file():
        root.unlink()
        root.with_name("aside").rename(root)
    return {"said": said}


@pytest.fixture(scope="module")
def saving(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(saves, 2, str(tmp_path_factory.mktemp("saves")))


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_costs_a_save_and_no_more(saving: list[dict[str, Any]], name: str) -> None:
    first, second = (found["found"][name] for found in saving)
    assert first["said"] == second["said"]
    assert "No space left on device" in first["said"]
    assert first["said"].count("Fix: ") == 1
    assert (first["hidden"], first["damaged"]) == ([], [])
    assert first["same"] or "latest" in first["said"]  # all but the last bytes were written
    assert first["next"]


@pytest.mark.parametrize("name", GONE)
def test_a_folder_that_is_gone_or_dirty(saving: list[dict[str, Any]], name: str) -> None:
    first, second = (found["found"][name] for found in saving)
    assert first.get("said") == second.get("said")
    assert (name in REFUSED) == (f"/{ROOT}" in first.get("said", ""))
    assert first["next"]


def test_saves_that_fail_do_not_change_the_run(saving: list[dict[str, Any]]) -> None:
    for found in saving:
        assert found["losses"] == found["undisturbed"]


# ---------------------------------------------------------------------------------------------------- loads

NEWEST, BEFORE = "global_step2", "global_step1"


def cut(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(1, path.stat().st_size)])


def flip(path: Path, chance: random.Random, low: int = 0, high: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(low, high or len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def flip_tensor(path: Path, chance: random.Random) -> None:
    """A bit of a tensor, not of the header."""
    sums = [one for one in read_manifest(path.parent / store.MANIFEST).checksums if one.file == path.name]
    one = chance.choice([one for one in sums if one.start])
    flip(path, chance, one.start, one.stop)


def lose(path: Path, chance: random.Random) -> None:
    path.unlink()


SHARE, STATES, MANIFEST = "rank_00001.safetensors", "dsx_random_1.safetensors", store.MANIFEST
DAMAGE: dict[str, tuple[str, Callable[[Path, random.Random], None], str]] = {
    "share cut short": (SHARE, cut, "tensor "),
    "share flipped": (SHARE, flip_tensor, "tensor "),
    "share missing": (SHARE, lose, "tensor "),
    "random states cut short": (STATES, cut, "random states of rank 1"),
    "random states flipped": (
        STATES,
        lambda path, chance: flip(path, chance, 300),
        "random states of rank 1",
    ),
    "random states missing": (STATES, lose, "all of it: the file"),
    "manifest cut short": (MANIFEST, cut, ""),
    "manifest flipped": (MANIFEST, flip, ""),
    "manifest missing": (MANIFEST, lose, ""),
}
LATEST: dict[str, bytes] = {
    "empty": b"",
    "noise": bytes(random.Random(0).randbytes(9)),
    "zeros": bytes(12),
    "a tag that is gone": b"global_step7",
    "a way out": b"../global_step1",
}


def loads(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What loading damaged checkpoints says, and whether the one before goes on as it should."""
    trainer, found = Trainer(folder), {}
    trainer.train()
    trainer.engine.save_checkpoint(trainer.root)
    trainer.train()
    trainer.engine.save_checkpoint(trainer.root)
    for seed, (name, (file, damage, _)) in enumerate(DAMAGE.items()):
        path = trainer.root / NEWEST / file
        found[name] = refused_load(
            trainer, path, lambda at, damage=damage, seed=seed: damage(at, random.Random(seed))
        )
    for name, content in LATEST.items():
        path = trainer.root / store.LATEST
        found[f"latest: {name}"] = refused_load(
            trainer, path, lambda at, content=content: at.write_bytes(content)
        )
    trainer.engine.load_checkpoint(trainer.root)
    trainer.train()
    return {"found": found, "steps": [*trainer.losses]}


def refused_load(trainer: Trainer, path: Path, damage: Callable[[Path], object]) -> dict[str, Any]:
    first, whole = trainer.engine.groups.rank == 0, path.read_bytes()
    dist.barrier()
    if first:
        damage(path)
    dist.barrier()
    before = contents(trainer.root)
    said = trainer.refused(lambda: trainer.engine.load_checkpoint(trainer.root))
    same = contents(trainer.root) == before
    trainer.engine.load_checkpoint(trainer.root, tag=BEFORE)
    resumed = trainer.step
    trainer.train()
    if first:
        path.write_bytes(whole)
    dist.barrier()
    return {"said": said, "same": same, "resumed": resumed}


def contents(root: Path) -> dict[str, str]:
    return {
        str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(root.rglob("*")) if p.is_file()
    }


@pytest.fixture(scope="module")
def loading(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(loads, 2, str(tmp_path_factory.mktemp("loads")))


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on(
    loading: list[dict[str, Any]], name: str
) -> None:
    file, _, what = DAMAGE[name]
    first, second = (found["found"][name] for found in loading)
    assert first == second
    assert (first["same"], first["resumed"]) == (True, 1)
    assert (f"{NEWEST}/{file}: {what}" if what or name != "manifest missing" else NEWEST) in first["said"]
    if name != "manifest missing":
        assert f"to go on from {BEFORE}, write that name into " in first["said"]


@pytest.mark.parametrize("name", LATEST)
def test_a_latest_that_leads_nowhere(loading: list[dict[str, Any]], name: str) -> None:
    first, second = (found["found"][f"latest: {name}"] for found in loading)
    assert first == second
    assert (first["same"], first["resumed"]) == (True, 1)
    assert f"{ROOT}/{store.LATEST}: " in first["said"]


def test_the_newest_loads_when_it_is_mended(loading: list[dict[str, Any]]) -> None:
    assert [found["steps"] for found in loading] == [[1, 2, 3]] * 2


# ----------------------------------------------------------------------------------------- a second run there


def second_run(rank: int, world_size: int, folder: str) -> tuple[str, bool]:
    """What a run says that begins in a folder where another is at work; it goes on when that has ended."""
    import dsx.train.run_folder as module

    module._SAME_MACHINE_SECONDS = 0.3
    run = Run(CASE, Path(folder))
    other = RunLock(Path(folder)) if rank == 0 else None
    with pytest.raises(RunError) as caught, run.guard:
        raise AssertionError("it began")
    if other is not None:
        other.release()
    dist.barrier()
    with run.guard:
        held = (Path(folder) / module.LOCK).is_file()
        dist.barrier()
    return str(caught.value), held


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    first, second = ranks.run(second_run, 2, str(tmp_path))
    assert first == second
    said, held = first
    assert held
    assert said.startswith(f"dsx.train.output = {tmp_path}: another run is at work there: process ")
    assert list(tmp_path.iterdir()) == []
