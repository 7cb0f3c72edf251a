"""Peaks of real gloo ranks that share sequences, beside the estimate and beside one rank's share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from tools.memory_bench import real

_SIZES = {
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 172,
}
_LLAMA = {"model_type": "llama", **_SIZES}
_MISTRAL = {"model_type": "mistral", "sliding_window": 1024, **_SIZES}

MODELS: dict[str, tuple[dict[str, Any], str, int]] = {
    "causal": (_LLAMA, "dsx", 0),
    "window": (_MISTRAL, "dsx", 0),
    "packs": (_LLAMA, "dsx", 8),
    "causal, transformers": (_LLAMA, "transformers", 0),
    "window, transformers": (_MISTRAL, "transformers", 0),
    "packs, transformers": (_LLAMA, "transformers", 8),
}
"""A model of 4 blocks of 64 in fp32, whose modules, and documents in each row."""

METHODS = ("all_gather", "ulysses", "ring")


def peaks(lengths: Sequence[int], ranks: Sequence[int], wanted: Sequence[str]) -> int:
    """Print what the largest rank holds at its peak beside its model's states, in MiB.

    Args:
        lengths: Tokens of a row.
        ranks: Context degrees.
        wanted: Words in the names of models; all if there are none.
    """
    print("| model | tokens | method | ranks | measured MiB | ranks x measured / one | estimate MiB | s |")
    for name, length in ((name, length) for name in MODELS for length in lengths):
        if wanted and name not in wanted:
            continue
        alone = 0.0
        for size, method in [(1, "-"), *((size, each) for size in ranks for each in METHODS)]:
            begin = time.perf_counter()
            found, estimated = _measured(name, length, size, method)
            alone = alone or found
            words = f"{found:.1f} | {size * found / alone:.2f} | {estimated:.1f}"
            seconds = time.perf_counter() - begin
            print(f"| {name} | {length:,} | {method} | {size} | {words} | {seconds:.0f} |", flush=True)
    return 0


def _measured(name: str, length: int, size: int, method: str) -> tuple[float, float]:
    from dsx.config.resolve import resolve
    from dsx.memory.estimate import estimate
    from dsx.memory.job import job_of

    model, modules, documents = MODELS[name]
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dsx": {
            "model": {"config": {**model, "max_position_embeddings": length}, "implementation": modules},
            "parallel": {"context": size} | ({"context_method": method} if size > 1 else {}),
            "data": {"sequence_length": length, "documents": "apart" if documents else "joined"},
            "recompute": "full",
            "train": {"steps": 2, "output": "runs/memory"},
        },
    }
    config = resolve(content, world_size=size)
    found = real.ranks(config, partial(_rows, length=length, documents=documents))
    told = estimate(job_of(config, device="cpu"), 0)
    short = resolve(content, world_size=size, overrides=["dsx.data.sequence_length=64"])
    states = estimate(job_of(short, device="cpu"), 0).steady_bytes  # masks may stay from step to step, too
    expected = max(each.peak_bytes for each in told.phases if each.name.startswith("step"))
    measured = max(each["phases"][f"step {at}"] for each in found for at in (1, 2))
    return (measured - states) / 2**20, (expected - states) / 2**20


def _rows(_: Any, *, length: int, documents: int) -> tuple[Any, Any]:
    import torch

    tokens = torch.zeros(1, length, dtype=torch.int64)
    if not documents:
        return tokens, tokens
    return (tokens, (torch.arange(length) % (length // documents)).view(1, -1)), tokens
