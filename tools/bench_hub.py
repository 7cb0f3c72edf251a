"""Transformers' modules in dsx beside dsx's own, and beside stock DeepSpeed's AutoTP.

    python tools/bench_hub.py [--part implementations autotp] [--family NAME ...] [--json FILE]

Two parts:

1. implementations: families that dsx has modules of its own for, trained with those and with transformers'
   (``dsx.model.implementation``), in layouts of one and two ranks.
2. autotp: families by transformers' modules, tensor parallelism 2 x data parallelism 2 under ZeRO-3, by dsx
   and by ``deepspeed.initialize`` with ``tensor_parallel.autotp_size``. What DeepSpeed refuses is told.

All engines of a table start from the same folder and train on the same micro-batches, in turns in the same
processes: every round times some steps of each, in an order that rotates from round to round. Printed are the
median of a step and the median of the ratios to the first engine within a round, the largest relative
difference of the losses to those of the first, and the peak of each engine's tensors on its fullest rank,
which other processes of each engine alone count operator by operator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from all_families import parity, tiny  # noqa: E402 (found there)

from dsx.launch.local_ranks import RankError, run_ranks  # noqa: E402

AUTOTP = "DeepSpeed AutoTP"
MICRO_BATCH, MICRO_BATCHES = 2, 4
TIMEOUT_SECONDS = 1800.0
BUCKET = 1_000_000

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Engines beside each other.

    Attributes:
        engines: Implementations of dsx, or :data:`AUTOTP`.
    """

    part: str
    family: str
    layout: parity.Layout
    engines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the command line sets."""

    hidden: int
    blocks: int
    length: int
    rounds: int
    steps: int


LAYOUTS = (
    parity.Layout(zero=1),
    parity.Layout(tp=2, zero=1, sequence_parallel=True),
    parity.Layout(pp=2, zero=1, schedule="zb_h1"),
    parity.Layout(dp=2, zero=3),
)
TABLES = (
    *(
        Table(part="implementations", family=family, layout=layout, engines=("dsx", "transformers"))
        for family in ("llama", "qwen3")
        for layout in LAYOUTS
    ),
    *(
        Table(
            part="autotp",
            family=family,
            layout=parity.Layout(tp=2, dp=2, zero=3),
            engines=(AUTOTP, "transformers"),
        )
        for family in ("llama", "qwen3", "gemma2", "phi", "gpt_neox", "olmo2", "starcoder2", "mixtral")
    ),
)


def main() -> None:
    """Run the tables that are asked for, and print them."""
    arguments = _arguments()
    sizes = Sizes(**{name: getattr(arguments, name) for name in Sizes.__dataclass_fields__})
    tables = []
    for table in TABLES:
        if table.part in arguments.part and (not arguments.family or table.family in arguments.family):
            tables.append(_bench(table, sizes))
            print(as_text(tables[-1]), flush=True)
    if arguments.json is not None:
        report = {
            "date": datetime.now(UTC).date().isoformat(),
            "cores": os.cpu_count(),
            **{name: metadata.version(name) for name in ("torch", "deepspeed", "transformers", "dsx")},
            "arguments": {name: getattr(sizes, name) for name in Sizes.__dataclass_fields__},
            "tables": tables,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parts = ("implementations", "autotp")
    parser.add_argument("--part", nargs="+", choices=parts, default=parts, help="(default both)")
    parser.add_argument("--family", nargs="+", metavar="NAME", help="these families alone")
    for flag, default, meaning in (
        ("--hidden", 256, "model width"),
        ("--blocks", 8, "transformer blocks"),
        ("--length", 128, "tokens per sequence"),
        ("--rounds", 10, "turns of every engine"),
        ("--steps", 2, "steps per turn"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{meaning} (default {default})"
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser.parse_args()


def _bench(table: Table, sizes: Sizes) -> Json:
    """The figures of one table; an engine that refuses the model is left out, and why is told."""
    with tempfile.TemporaryDirectory(prefix="bench-hub-") as name:
        folder = Path(name)
        _ranks(_save, 1, table.family, sizes, folder)
        peaks, refused = {}, {}
        for engine in table.engines:
            try:
                peaks[engine] = max(_ranks(_peak, table.layout.world_size, table, engine, sizes, folder))
            except RankError as error:
                refused[engine] = parity.reason(error)
        runs = _ranks(_turns, table.layout.world_size, table, list(peaks), sizes, folder)[0] if peaks else {}
    first = next(iter(runs), None)
    return {
        "part": table.part,
        "family": table.family,
        "layout": str(table.layout),
        "refused": refused,
        "engines": [_figures(engine, runs[first], run, peaks[engine]) for engine, run in runs.items()],
    }


def _ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    return run_ranks(function, world_size, *args, timeout_seconds=TIMEOUT_SECONDS, preload=parity.PRELOAD)


def _figures(engine: str, first: Json, run: Json, peak: int) -> Json:
    pairs = zip(run["losses"], first["losses"], strict=True)
    return {
        "engine": engine,
        "step_seconds": run["seconds"],
        "median_step_seconds": statistics.median(run["seconds"]),
        "median_ratio": statistics.median(
            mine / theirs for mine, theirs in zip(run["seconds"], first["seconds"], strict=True)
        ),
        "largest_relative_loss_difference": max(abs(mine / theirs - 1) for mine, theirs in pairs),
        "peak_bytes": peak,
    }


def _save(_rank: int, _world_size: int, family: str, sizes: Sizes, folder: Path) -> None:
    heads = max(4, sizes.hidden // 32)
    config = tiny.tiny_config(
        family,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=sizes.hidden // heads,
        max_position_embeddings=sizes.length,
        sliding_window=sizes.length,
    )
    parity.random_model(config).save_pretrained(folder)


def _batches(sizes: Sizes, layout: parity.Layout, dp_rank: int) -> list[tuple[Any, Any]]:
    """This replica's micro-batches, the same in every step.

    Id 0 pads: its embedding is trained by dsx's own modules, and not by transformers'.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = (MICRO_BATCH, sizes.length + 1)
    ids = [torch.randint(1, tiny.VOCABULARY, shape, generator=generator) for _ in range(MICRO_BATCHES)]
    return [(each[:, :-1], each[:, 1:]) for each in ids[dp_rank :: layout.dp]]


def _settings(layout: parity.Layout, folder: Path, implementation: str | None) -> Json:
    """With buckets that do not dwarf the model: DeepSpeed's are 2 GB in fp32."""
    settings = parity.dsx_config(layout, folder, implementation)
    settings["zero_optimization"]["reduce_bucket_size"] = BUCKET
    return settings


def _step(table: Table, engine: str, sizes: Sizes, folder: Path) -> Callable[[], float]:
    """A fresh engine's optimizer step, which gives the mean loss over all replicas."""
    layout = table.layout
    if engine == AUTOTP:
        return _autotp_step(layout, sizes, folder)
    import dsx
    from dsx.parallel.groups import make_groups

    settings = _settings(layout, folder, engine)
    settings["dsx"]["data"]["sequence_length"] = sizes.length
    config = dsx.load_config(settings, world_size=layout.world_size)
    groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
    run = dsx.initialize(model=dsx.recipe.build_model(config, groups), config=config)[0]
    batches = _batches(sizes, layout, groups.dp_rank)
    return lambda: float(run.train_batch(iter(batches)))


def _autotp_step(layout: parity.Layout, sizes: Sizes, folder: Path) -> Callable[[], float]:
    """As DeepSpeed's users do it: its engine around transformers' model, a backward per micro-batch."""
    import deepspeed
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = _settings(layout, folder, None)
    del config["dsx"]
    config |= {"tensor_parallel": {"autotp_size": layout.tp}, "steps_per_print": 1_000_000_000}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    replica = dist.get_rank() // layout.tp
    batches = _batches(sizes, layout, replica)

    def step() -> float:
        total = torch.zeros(())
        for inputs, labels in batches:
            logits = engine(input_ids=inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(batches)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    return step


def _peak(_rank: int, _world_size: int, table: Table, engine: str, sizes: Sizes, folder: Path) -> int:
    """Most bytes in tensors at once during the second step, which is like all that follow."""
    import torch

    from dsx.memory.meter import StorageMeter

    torch.autograd.set_multithreading_enabled(False)  # else backwards escape the meter
    meter = StorageMeter("cpu")
    with meter:
        step = _step(table, engine, sizes, folder)
        step()
        with meter.phase("step"):
            step()
    return meter.peak_bytes["step"]


def _turns(
    _rank: int, _world_size: int, table: Table, names: Sequence[str], sizes: Sizes, folder: Path
) -> dict[str, Json]:
    """Engine -> seconds of a step in each of its turns, and every loss."""
    steps = {name: _step(table, name, sizes, folder) for name in names}
    runs: dict[str, Json] = {name: {"seconds": [], "losses": []} for name in names}
    for turn in range(sizes.rounds + 1):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            losses, seconds = _timed(lambda name=name: [steps[name]() for _ in range(sizes.steps)])
            runs[name]["losses"] += losses
            if turn > 0:  # turn 0 warms up
                runs[name]["seconds"].append(seconds / sizes.steps)
    return runs


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Result and wall time from when every rank is ready to when every rank has finished."""
    import torch.distributed as dist

    dist.barrier()
    begun = time.perf_counter()
    result = work()
    dist.barrier()
    return result, time.perf_counter() - begun


def as_text(table: Json) -> str:
    """One table."""
    layout = "  {:<20} {:>9} {:>9} {:>10} {:>10} {:>9}"
    lines = [f"{table['part']}: {table['family']}, {table['layout']}"]
    lines.append(layout.format("engine", "ms/step", "of first", "loss diff.", "peak MiB", "of first"))
    lines += [
        layout.format(
            figures["engine"],
            f"{1000 * figures['median_step_seconds']:.1f}",
            f"{figures['median_ratio']:.3f}",
            f"{figures['largest_relative_loss_difference']:.0e}",
            f"{figures['peak_bytes'] / 2**20:.2f}",
            f"{figures['peak_bytes'] / table['engines'][0]['peak_bytes']:.3f}",
        )
        for figures in table["engines"]
    ]
    lines += [f"  {engine} does not take it: {why}" for engine, why in table["refused"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
