"""A run on a streamed mixture: saved in one layout, continued in another, on the ranks that need it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import ranks

WORDS = "the quick brown fox jumps over a lazy dog while data flows through many lanes"


TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write(path: Path, count: int, form: str = "text") -> str:
    draw = random.Random(path.stem)
    texts = [
        f"{path.stem} {i} {' '.join(draw.choices(WORDS.split(), k=draw.randint(5, 60)))}"
        for i in range(count)
    ]
    rows: list[dict[str, Any]] = [{"text": text} for text in texts]
    if form == "chat":
        turns = [[("user", text[:9]), ("assistant", text[9:20])] for text in texts]
        rows = [{"messages": [{"role": role, "content": said} for role, said in each]} for each in turns]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train(
    rank: int, world_size: int, keys: dict[str, Any], last: int, save_after: int
) -> tuple[list[float], Any, bool, float]:
    """Losses of the steps to ``last``, the held-out losses, and whether and how long this rank read."""
    import dsx
    from dsx.data.text import prepare_text
    from dsx.parallel.groups import make_groups

    config = dsx.load_config(keys, world_size=world_size)
    recipe, groups = dsx.recipe, make_groups(config.mesh)
    folders = None
    if rank == 0:
        folders = prepare_text(config.dsx.data, config.output / "data", held_out_tokens=2000)
    corpus = recipe.open_data(config, folders)
    engine = recipe.build_engine(config, groups)
    state = recipe.resume(config, engine, corpus)
    batches = recipe.training_batches(
        config, corpus, dp_rank=groups.dp_rank, cursor=state.get("data_cursor", 0)
    )
    monitor = recipe.Monitor(config, engine, corpus, state)
    losses = []
    while engine.global_steps < last:
        monitor.before_step()
        loss = engine.train_batch(batches)
        monitor.step(loss)
        losses.append(loss.item())
        if engine.global_steps == save_after:
            recipe.save(config, engine, corpus, monitor)
    held_out = recipe.evaluate(config, engine, corpus)
    monitor.evaluation(held_out)
    return losses, held_out, batches._thread is not None, engine.batch_source.seconds


@pytest.mark.parametrize("form", ["text", "chat"])
def test_a_streamed_mixture_goes_on_in_another_layout(tmp_path: Path, form: str) -> None:
    keys = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "dsx": {
            "model": {"family": "llama", "preset": "tiny"},
            "data": {
                "sources": [
                    {"source": write(tmp_path / "wiki.jsonl", 1500), "weight": 0.7},
                    {"source": write(tmp_path / "code.jsonl", 500, form), "weight": 0.3, "format": form},
                ],
                "streaming": True,
                "lanes": 8,
                "shuffle_buffer": 64,
                "tokenizer": "bytes",
                "sequence_length": 32 if form == "text" else 64,
                **({"chat_template": TEMPLATE} if form == "chat" else {}),
            },
            "parallel": {"pipeline": 3, "tensor": 1},
            "train": {
                "steps": 6,
                "eval_tokens": 1280 if form == "text" else 1100,
                "output": str(tmp_path / "run"),
            },
            "memory_check": "off",
        },
    }
    whole = ranks.run(train, 3, keys, 6, 3)
    keys["dsx"]["parallel"]["pipeline"] = 1
    rest = ranks.run(train, 2, keys, 6, 0)
    assert [losses for losses, *_ in whole] == [whole[0][0]] * 3
    assert len(whole[0][0]) == 6
    assert rest[0][0] == pytest.approx(whole[0][0][3:], abs=1e-5)
    assert rest[0][1] == pytest.approx(whole[0][1], abs=1e-5)
    assert set(rest[0][1]) == {"wiki", "code"}
    # Of three stages the first takes inputs and the last labels; the one between reads no text.
    assert [reads for _, _, reads, _ in whole] == [True, False, True]
    assert [seconds > 0 for *_, seconds in whole] == [True, False, True]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"eval/loss/wiki", "eval/loss/code", "eval/loss"} <= rows[-1].keys()
    assert all(0 <= row["perf/data_percent"] <= 100 for row in rows if "perf/data_percent" in row)
    assert sum("perf/data_percent" in row for row in rows) == 6
