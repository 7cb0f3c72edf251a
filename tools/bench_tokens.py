"""Tokens/s of a Llama under dsx beside transformers under torch and under DeepSpeed, in the same processes.

    python tools/bench_tokens.py [--ranks 1,2] [--zero 0,1,3] [--size 8M] [--rounds 8] [--plain] [--json FILE]

All engines start from the same weights, and train on the same micro-batches with the same AdamW (torch's
fused one) and clipping: dsx's own modules by a JSON, transformers' model by the same JSON under
DeepSpeed, and transformers' model in a loop under torch's DDP (ZeRO-0 and 1, its optimizer whole) or
FSDP2 (ZeRO-3). Each runs as it is and with its blocks compiled by inductor (`dsx.compile`;
`layer.compile()`), but for ZeRO-3 under DeepSpeed, whose hooks inside of blocks would break their graphs.
They take turns step by step, each round beginning with another one. Printed are the median and the
fastest step's tokens/s, the processor time of all ranks for a step, dsx's ratios to each of its peers of
the same kind, median of the rounds, and the losses' largest distance from dsx's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512},
    "8M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "vocab_size": 4096},
    "100M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "vocab_size": 16384},
}
ROWS, MICRO_BATCHES, CLIPPING = 2, 2, 1.0
ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.0, "fused": True}

Step = Callable[[], float]


def main() -> None:
    """Start the ranks of each run and print their figures; or be one of those ranks."""
    arguments = _arguments()
    if arguments.worker is not None:
        work(arguments)
        return
    runs = product(arguments.ranks, arguments.zero)
    told = ((ranks, [f"--ranks={ranks}", f"--zero={zero}"]) for ranks, zero in runs)
    report(__file__, told, as_text, arguments.json)


def numbers(text: str) -> list[int]:
    """What an option lists."""
    return [int(word) for word in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

    add = parser.add_argument
    add("--ranks", type=numbers, default=[1, 2], metavar="N,...", help="data-parallel ranks (default 1,2)")
    add("--zero", type=numbers, default=[0, 1, 3], metavar="STAGE,...", help="ZeRO stages (default 0,1,3)")
    add("--size", choices=SIZES, default="8M", help="parameters of the model (default 8M)")
    add("--sequence-length", type=int, default=256, metavar="N", help="tokens per sample (default 256)")
    add("--rounds", type=int, default=8, metavar="N", help="turns of every engine (default 8)")
    add("--plain", action="store_true", help="nothing compiled")
    add("--json", type=Path, metavar="FILE", help="write every figure there")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def report(
    program: str,
    runs: Iterable[tuple[int, list[str]]],
    as_text: Callable[[dict[str, Any]], str],
    file: Path | None,
) -> None:
    """Start a benchmark's runs, each by its ranks and arguments; print their figures, and write them."""
    print(f"load before {os.getloadavg()[0]:.1f}, torch {torch.__version__}, {' '.join(sys.argv[1:])}")
    reports = []
    for ranks, own in runs:
        reports.append(launched(program, ranks, own))
        print(f"\n{as_text(reports[-1])}", flush=True)
    if file is not None:
        file.write_text(json.dumps(reports, indent=2) + "\n")


def launched(program: str, ranks: int, own: list[str]) -> dict[str, Any]:
    """A benchmark on so many ranks, its arguments and then ``own``; rank 0's figures."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [program, *sys.argv[1:], *own, f"--worker={result}"]
        with log.open("w") as file:
            environ = {"OMP_NUM_THREADS": "1", **os.environ}
            done = subprocess.run(command, env=environ, stdout=file, stderr=file, check=False)  # noqa: S603
        if done.returncode != 0:
            sys.stderr.write(log.read_text())
            raise SystemExit(done.returncode)
        return dict(json.loads(result.read_text()))


def work(arguments: argparse.Namespace) -> None:
    """Be one rank; rank 0 writes the figures."""
    import dsx

    (ranks,), (zero,) = arguments.ranks, arguments.zero
    folder = arguments.worker.parent / "model"
    with dsx.distributed(dsx.Mesh.of(dp=ranks)) as groups:
        if groups.rank == 0:
            _model(arguments).save_pretrained(folder)
        dist.barrier()
        batches = _batches(arguments, groups.rank)
        steps: dict[str, Step] = {}
        for blocks in (False,) if arguments.plain else (False, True):
            end = ", compiled" if blocks else ""
            steps[f"dsx{end}"] = _dsx(arguments, folder, groups, zero, batches, blocks)
            steps[f"torch {'FSDP2' if zero == 3 else 'DDP'}{end}"] = _torch(folder, zero, batches, blocks)
            if not (blocks and zero == 3):
                steps[f"DeepSpeed{end}"] = _deepspeed(folder, zero, batches, blocks)
        figures = timed(steps, arguments.rounds)
        tokens = ranks * MICRO_BATCHES * ROWS * arguments.sequence_length
        figures |= {"ranks": ranks, "zero": zero, "size": arguments.size, "tokens": tokens}
        if groups.rank == 0:
            arguments.worker.write_text(json.dumps(figures))
        dist.barrier()


def started(
    engines: Mapping[str, Callable[[], Step]], only: str, always: Collection[str]
) -> tuple[dict[str, Step], dict[str, str]]:
    """Engines that have taken a first step, and why the others stopped.

    Of those that are not ``always`` wanted, the ones whose names hold a word of ``only``.
    """
    steps, stopped = dict[str, Step](), dict[str, str]()
    for name, make in engines.items():
        if name in always or any(word in name for word in only.split(",")):
            try:
                step = make()
                step()
                steps[name] = step
            except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
                stopped[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return steps, stopped


def timed(steps: dict[str, Step], rounds: int) -> dict[str, Any]:
    """Seconds, all ranks' processor seconds and the ranks' mean loss of each engine's every turn."""
    names = list(steps)
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 2):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            begun, busy = time.perf_counter(), time.process_time()
            loss = steps[name]()
            spent = torch.tensor([time.process_time() - busy, loss], dtype=torch.float64)
            dist.barrier()
            if turn > 1:  # the first two compile and warm up
                wall[name].append(time.perf_counter() - begun)
            dist.all_reduce(spent)
            cpu[name] += [spent[0].item()] if turn > 1 else []
            losses[name].append(spent[1].item() / dist.get_world_size())
    return {"wall": wall, "cpu": cpu, "losses": losses}


def _model(arguments: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False}
    sizes = SIZES[arguments.size] | {"max_position_embeddings": arguments.sequence_length}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def _batches(arguments: argparse.Namespace, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1 + rank)
    shape = (ROWS, arguments.sequence_length + 1)
    vocabulary = SIZES[arguments.size]["vocab_size"]
    drawn = (torch.randint(vocabulary, shape, generator=generator) for _ in range(MICRO_BATCHES))
    return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in drawn]


def _config(zero: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIPPING,
        "steps_per_print": 1 << 30,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": ADAMW | {"torch_adam": True}},
    }


def _dsx(
    arguments: argparse.Namespace, folder: Path, groups: Any, zero: int, batches: Any, blocks: bool
) -> Step:
    import dsx
    from dsx.train.recipe import build_engine

    block = {
        "model": {"path": str(folder)},
        "parallel": {"tensor": 1, "pipeline": 1},
        "compile": "blocks" if blocks else "none",
        "data": {"tokenizer": "bytes", "sequence_length": arguments.sequence_length},
        "train": {"steps": 1, "output": "unused"},
    }
    config = dsx.load_config(_config(zero) | {"dsx": block}, world_size=groups.mesh.size)
    engine = build_engine(config, groups)
    return lambda: float(engine.train_batch(iter(batches)))


def _hub_model(folder: Path, *, blocks: bool) -> Any:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers if blocks else ():
        layer.compile()
    return model


def _loss(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False).loss
    return loss


def _deepspeed(folder: Path, zero: int, batches: Any, blocks: bool) -> Step:
    import deepspeed

    model = _hub_model(folder, blocks=blocks)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=_config(zero))[0]

    def step() -> float:
        total = 0.0
        for batch in batches:
            loss = _loss(engine, *batch)
            engine.backward(loss)
            engine.step()
            total += loss.item() / MICRO_BATCHES
        return total

    return step


def _torch(folder: Path, zero: int, batches: Any, blocks: bool) -> Step:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = _hub_model(folder, blocks=blocks)
    sharded = zero == 3
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, **ADAMW)

    def step() -> float:
        total = 0.0
        for number, batch in enumerate(batches):
            last = number == MICRO_BATCHES - 1
            if sharded:
                model.set_requires_gradient_sync(last)
            waits = not last and isinstance(model, DistributedDataParallel)
            with model.no_sync() if waits else nullcontext():
                loss = _loss(model, *batch)
                (loss / MICRO_BATCHES).backward()
            total += loss.item() / MICRO_BATCHES
        torch.nn.utils.clip_grad_norm_(parameters, CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def as_text(report: dict[str, Any]) -> str:
    """A run's table."""
    lines = [
        f"{report['size']}, {report['ranks']} ranks, ZeRO-{report['zero']}, {report['tokens']} tokens a step"
    ]
    row = "{:<22} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}"
    lines.append(row.format("", "tok/s", "fastest", "CPU", "dsx's", "dsx's", "loss"))
    lines.append(row.format("engine", "median", "tok/s", "ms/step", "time", "CPU", "diff."))
    wall, cpu, losses = report["wall"], report["cpu"], report["losses"]
    for name in wall:
        ours = "dsx, compiled" if name.endswith("compiled") else "dsx"
        lines.append(
            row.format(
                name,
                f"{report['tokens'] / statistics.median(wall[name]):.0f}",
                f"{report['tokens'] / min(wall[name]):.0f}",
                f"{1000 * statistics.median(cpu[name]):.0f}",
                f"{ratio(wall[ours], wall[name]):.3f}",
                f"{ratio(cpu[ours], cpu[name]):.3f}",
                f"{max(abs(a - b) for a, b in zip(losses[name], losses['dsx'], strict=True)):.0e}",
            )
        )
    return "\n".join(lines)


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Median of the rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
