"""Training text that shrinks or goes while it is read, and a clock that jumps: told, or no harm at all."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import ranks
from fault_tolerance import crew

SAVED, STEPS, ATTEMPTS = 3, 6, 80
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
DAY_SECONDS = 86_400.0


def written(path: Path, documents: int) -> str:
    """A file of documents with blank lines between."""
    draw = random.Random(path.stem)
    texts = (f"{path.stem} {i} {' '.join(draw.choices('abcdefgh', k=40))}" for i in range(documents))
    path.write_text("\n\n".join(texts))
    return str(path)


def keys(folder: Path, *, sources: int, streaming: bool) -> dict[str, Any]:
    """A run on so many files below ``folder``."""
    names = [folder / f"{name}.txt" for name in ("wiki", "code")[:sources]]
    texts = [{"source": written(path, 1500)} for path in names]
    data = {"sources": texts} if sources > 1 else texts[0]
    stream = {"streaming": True, "lanes": 2, "shuffle_buffer": 4} if streaming else {}
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "dsx": {
            "model": {"family": "llama", "preset": "tiny", "overrides": SMALL},
            "data": {
                **data,
                **stream,
                "tokenizer": "bytes",
                "held_out": 0.3,
                "sequence_length": 256,
                "prefetch": 2,
            },
            "train": {"steps": ATTEMPTS, "output": str(folder / "run")},
            "tracking": {"wandb": {"mode": "disabled"}},
            "memory_check": "off",
        },
    }


def train(rank: int, world_size: int, wanted: dict[str, Any], last: int, hurt: str) -> list[float]:
    """The loop of the recipes to step ``last``; ``hurt`` befalls it behind SAVED. Losses of this start."""
    import dsx
    from dsx.data.text import prepare_text
    from dsx.parallel.groups import make_groups

    config = dsx.load_config(wanted, world_size=world_size)
    recipe, groups = dsx.recipe, make_groups(config.mesh)
    with recipe.Guard(config, groups) as guard:
        folders = None
        if rank == 0:
            folders = prepare_text(config.dsx.data, config.output / "data", held_out_tokens=2000)
        corpus = recipe.open_data(config, folders)
        engine = recipe.build_engine(config, groups)
        state = recipe.resume(config, engine, corpus)
        cursor = state.get("data_cursor", 0)
        batches = recipe.training_batches(config, corpus, dp_rank=groups.dp_rank, cursor=cursor)
        monitor = recipe.Monitor(config, engine, corpus, state)
        guard.follow(engine, state)
        losses = []
        while engine.global_steps < last:
            monitor.before_step()
            losses.append(engine.train_batch(batches).item())
            monitor.step(engine.step_control.sums[0])
            if engine.global_steps == SAVED:
                recipe.save(config, engine, corpus, monitor, guard)
                befall(hurt, config, rank)
    return losses


def befall(hurt: str, config: Any, rank: int) -> None:
    """What happens to the text or the clock."""
    if hurt == "clock jumps":
        now, days = time.time, itertools.cycle((1, -1, 0))
        time.time = lambda: now() + next(days) * DAY_SECONDS
    if rank:
        return
    prepared = sorted((config.output / "data").glob("*/train.bin"))
    if hurt == "prepared text shrinks":
        with prepared[0].open("r+b") as file:
            file.truncate(64)
    if hurt == "streamed text shrinks":
        with Path(config.dsx.data.parts()[0].source).open("r+b") as file:
            file.truncate(64)
    if hurt == "prepared text is deleted":
        shutil.rmtree(config.output / "data")


def hurt_run(rank: int, world_size: int, wanted: dict[str, Any], hurt: str) -> int:
    train(rank, world_size, wanted, ATTEMPTS, hurt)
    return 0


def rest_and_whole(
    rank: int, world_size: int, wanted: dict[str, Any], undisturbed: dict[str, Any]
) -> tuple[list[float], list[float]]:
    return train(rank, world_size, wanted, STEPS, ""), train(rank, world_size, undisturbed, STEPS, "")


@pytest.mark.parametrize(
    ("hurt", "sources", "said"),
    [
        ("prepared text shrinks", 1, "has changed since it was opened"),
        ("streamed text shrinks", 2, "has changed since the run started"),
    ],
)
def test_text_that_shrinks_ends_the_run_and_the_next_goes_on(
    tmp_path: Path, hurt: str, sources: int, said: str
) -> None:
    wanted = keys(tmp_path, sources=sources, streaming="streamed" in hurt)
    source = tmp_path / "wiki.txt"
    text, times = source.read_bytes(), source.stat()
    with crew.started(hurt_run, 2, wanted, hurt) as team:
        ended = team.end()
    assert {rank.code for rank in ended} == {2}
    whole = "".join(rank.said for rank in ended)
    assert said in whole
    assert "Traceback" not in whole
    if sources == 1:
        shutil.rmtree(tmp_path / "run" / "data")  # as the message says
    else:
        source.write_bytes(text)
        os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    other = json.loads(json.dumps(wanted))
    other["dsx"]["train"]["output"] = str(tmp_path / "undisturbed")
    for rest, undisturbed in ranks.run(rest_and_whole, 2, wanted, other):
        assert len(rest) == STEPS - SAVED
        assert rest == undisturbed[SAVED:]


def no_harm(rank: int, world_size: int, hurts: dict[str, dict[str, Any]]) -> list[list[float]]:
    return [train(rank, world_size, wanted, STEPS, hurt) for hurt, wanted in hurts.items()]


def test_what_does_no_harm(tmp_path: Path) -> None:
    """A prepared mixture that is deleted is read to the end; a clock that jumps is not what steps go by."""
    wanted = keys(tmp_path, sources=2, streaming=False)
    hurts = {}
    for hurt in ("", "prepared text is deleted", "clock jumps"):
        hurts[hurt] = json.loads(json.dumps(wanted))
        hurts[hurt]["dsx"]["train"]["output"] = str(tmp_path / (hurt or "undisturbed"))
    for undisturbed, *others in ranks.run(no_harm, 2, hurts):
        assert len(undisturbed) == STEPS
        assert others == [undisturbed, undisturbed]
    lines = (tmp_path / "clock jumps" / "metrics.jsonl").read_text().splitlines()
    figures = [value for line in lines for value in json.loads(line).values()]
    assert len(lines) == STEPS
    assert all(math.isfinite(value) and 0 <= value < DAY_SECONDS**2 for value in figures), figures
    assert not (tmp_path / "clock jumps" / "faults").exists()
