"""kill -9 in the middle of a save over the same tag: what was there or what is new stays, whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import ranks
from often import often
from parity import dsx_run
from parity.dsx_run import Case

CASE = Case(family="gpt2", dp=2, zero=2, accumulation=2)


def _train(engine, first: int, count: int) -> list[float]:
    return [
        engine.train_batch(dsx_run.batches(CASE, step, engine.groups.dp_rank)).item()
        for step in range(first, first + count)
    ]


def _die_at(monkey_target: object, name: str, nth: int, kill: bool) -> None:
    """Make the ``nth`` call of ``monkey_target.name`` on this rank its last act."""
    original, calls = getattr(monkey_target, name), [0]

    def counted(*args, **kwargs):
        calls[0] += 1
        if calls[0] == nth and kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(monkey_target, name, counted)


def save_then_die(rank: int, world_size: int, folder: str, module: str, name: str, nth: int) -> None:
    import importlib

    engine, _ = dsx_run.build(CASE, None)
    _train(engine, 0, 2)
    engine.save_checkpoint(folder, tag="same")
    _train(engine, 2, 1)
    _die_at(importlib.import_module(module), name, nth, kill=rank == 0)
    engine.save_checkpoint(folder, tag="same")


def load_and_go_on(rank: int, world_size: int, folder: str) -> tuple[int, list[float]]:
    engine, _ = dsx_run.build(CASE, None)
    engine.load_checkpoint(folder)
    steps = engine.global_steps
    return steps, _train(engine, steps, 1)


def uninterrupted(rank: int, world_size: int) -> list[float]:
    engine, _ = dsx_run.build(CASE, None)
    return _train(engine, 0, 4)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """Losses of the run that nobody kills."""
    return ranks.run(uninterrupted, CASE.world_size)[0]


@pytest.mark.parametrize(
    ("module", "name", "nth"),
    often(
        [
            ("dsx.checkpoint.run.saver", "write_share", 1),  # before the first file
            ("dsx.checkpoint.run.saver", "write_from", 3),  # in the middle of a rank's file
            ("dsx.checkpoint.store", "commit", 1),  # everything written, nothing renamed
            ("os", "fsync", 3),  # in the middle of syncing
            ("dsx.checkpoint.store", "point_latest", 1),  # renamed, `latest` still names the old one
        ],
        2,  # tests/checkpoint/test_store.py kills before every operation on files
    ),
)
def test_latest_always_loads(tmp_path: Path, expected: list[float], module: str, name: str, nth: int) -> None:
    with pytest.raises(ranks.RankError, match="died without a result"):
        ranks.run(save_then_die, CASE.world_size, str(tmp_path), module, name, nth)
    renamed = name == "point_latest"  # `latest` names the tag that has just been replaced
    for steps, losses in ranks.run(load_and_go_on, CASE.world_size, str(tmp_path)):
        assert steps == (3 if renamed else 2)
        assert losses == [expected[steps]]
