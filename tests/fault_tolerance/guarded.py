"""A small run under a guard, for ranks that tests let fail. Not a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from parity import dsx_run
from parity.dsx_run import Case

PIPELINE = Case(family="gpt2", pp=2, accumulation=2)


class Messages:
    """What a guard says to the user, and how often it went back."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.returns = 0

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def went_back(self) -> None:
        self.returns += 1


class Sequences:
    """Stands for the text, which the runs here are given batch by batch."""

    digest = "sequences"

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self._length + 1,), index % 7)


class Run:
    """An engine and its guard on this rank, with checkpoints below ``folder``.

    Args:
        faults: ``dsx.faults``.
    """

    def __init__(self, case: Case, folder: Path, **faults: Any) -> None:
        import dsx
        from dsx.fault_tolerance.guard import Guard
        from dsx.parallel.groups import make_groups
        from dsx.train.recipe import build_engine

        keys = dsx_run.config(case, None)
        keys["dsx"]["faults"] = faults
        keys["dsx"]["train"] |= {"output": str(folder), "save_every": 1}
        self.case, self.folder = case, folder
        self.config = dsx.load_config(keys, world_size=case.world_size)
        groups = make_groups(self.config.mesh, sequence_parallel=case.sequence_parallel)
        self.messages = Messages()
        self.guard = Guard(self.config, groups)
        self.engine = build_engine(self.config, groups)
        self.state: dict[str, Any] = {}
        self.root = folder / "checkpoints"

    def resume(self) -> None:
        """Continue from the newest checkpoint, if any, and guard the steps."""
        from dsx.train.recipe import resume

        self.state = resume(self.config, self.engine, Sequences(self.config.sequence_length))
        self.guard.follow(self.engine, self.state)

    def save(self) -> None:
        tokens = int(self.engine.global_samples) * self.config.sequence_length
        self.engine.save_checkpoint(self.root, client_state={"tokens": tokens, **self.guard.state})

    def batches(self) -> Iterator[Any]:
        """Of the step that the guard says comes next."""
        step = self.guard.data_cursor // self.config.global_batch_size
        return dsx_run.batches(self.case, step, self.engine.groups.dp_rank)

    def step(self, batches: Iterator[Any] | None = None) -> float:
        return float(self.engine.train_batch(self.batches() if batches is None else batches))

    def evaluate(self) -> float:
        """On the batches of the step that comes next."""
        return float(self.engine.eval_batch(self.batches()))

    def rolled_back(self) -> bool:
        return self.guard.rolled_back(self.messages)

    def weights(self) -> torch.Tensor:
        """This rank's, end to end; under ZeRO-3 its parts."""
        here = [getattr(p, "ds_tensor", p) for p in self.engine.pipeline.chunks.parameters()]
        return torch.cat([p.detach().float().flatten() for p in here])

    def touch(self, name: str) -> None:
        """Tell the test."""
        (self.folder / f"{name}-{self.engine.groups.rank}").touch()


def forever() -> None:
    """Wait for nothing, as Python code does that hangs."""
    read, _ = os.pipe()
    os.read(read, 1)
