"""Step time of dsx's pipeline engine beside stock DeepSpeed's, in the same processes.

    python tools/bench_engine.py [--bf16] [--json FILE]

Two parts, each in ranks of its own (torch.distributed.run):

1. steps: stock deepspeed.pipe.PipelineModule and dsx.PipelineModule train the same layer list from the same
   weights on the same micro-batches, in turns. Every round times some steps of each engine, in an order that
   rotates from round to round, so that whatever else the machine does hits all of them. Printed are the
   median and the fastest turn, the median of the ratios to stock within a round, the ratio of the fastest
   turns, which a busy machine disturbs less, and the processor time of all ranks, which it disturbs least but
   which does not see ranks wait. The losses are compared too.
2. calls: what dsx's executor adds to a forward or backward call of a plain DeepSpeedEngine, on a model that
   computes next to nothing, per ZeRO stage. It is the slope of the fastest steps over the number of
   micro-batches, so that what a step costs once (optimizer, norm, mean loss) does not enter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

import dsx
from dsx.models import families
from dsx.models.hf_config import model_spec
from dsx.models.params import num_parameters
from dsx.schedules.builders import build
from dsx.schedules.simulate import simulate

PIPELINE = 2
MICRO_BATCH = 2
VOCABULARY = 257
FEW, MANY = 8, 72  # micro-batches between which part 2 takes the slope

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One engine of part 1; ``chunks`` is 0 for stock DeepSpeed's."""

    name: str
    zero: int
    chunks: int


CONTENDERS = (
    Contender(name="stock DeepSpeed, 1F1B, ZeRO-1", zero=1, chunks=0),
    Contender(name="dsx, 1F1B, ZeRO-1", zero=1, chunks=1),
    Contender(name="dsx, interleaved v=2, ZeRO-1", zero=1, chunks=2),
    Contender(name="dsx, 1F1B, ZeRO-3", zero=3, chunks=1),
)


def main() -> None:
    """Start the ranks of both parts, gather their figures, print them; or be one of those ranks."""
    arguments = _arguments()
    if arguments.worker is not None:
        figures = bench_steps(arguments) if arguments.part == "steps" else bench_calls(arguments)
        if int(os.environ["RANK"]) == 0:
            arguments.worker.write_text(json.dumps(figures))
        return
    passed_on = ("blocks", "sequence_length", "micro_batches", "data_parallel", "bucket", "rounds", "steps")
    sizes = {name: getattr(arguments, name) for name in passed_on} | {"bf16": arguments.bf16}
    ranks = PIPELINE * arguments.data_parallel
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "arguments": {**sizes, "micro_batch_size": MICRO_BATCH, "pipeline": PIPELINE},
        "steps": [launch("steps", ranks, {**sizes, "hidden": hidden}) for hidden in arguments.hidden],
        "calls": launch("calls", 1, sizes | {"bf16": False}),
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(as_text(report))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for flag, default, meaning in (
        ("--blocks", 8, "transformer blocks"),
        ("--sequence-length", 128, "tokens per sequence"),
        ("--micro-batches", 8, "micro-batches per step"),
        ("--data-parallel", 1, f"replicas of the {PIPELINE}-rank pipeline"),
        ("--bucket", 500_000_000, "zero_optimization.reduce_bucket_size"),
        ("--rounds", 20, "turns of every engine"),
        ("--steps", 2, "steps per turn"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{meaning} (default {default})"
        )
    parser.add_argument(
        "--hidden", type=int, nargs="+", default=[64, 256], metavar="N", help="model widths (default 64 256)"
    )
    parser.add_argument("--bf16", action="store_true", help="bf16 parameters, gradients summed in fp32")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--part", choices=("steps", "calls"), help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(part: str, ranks: int, sizes: dict[str, int]) -> Json:
    """Run one part in fresh ranks; rank 0's figures."""
    with tempfile.TemporaryDirectory() as folder:
        figures, log = Path(folder, "figures.json"), Path(folder, "log")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [__file__, "--part", part, "--worker", str(figures)]
        for name, value in sizes.items():
            flag = f"--{name.replace('_', '-')}"
            command += [flag] * value if isinstance(value, bool) else [flag, str(value)]
        # A thread per rank: on a CPU, more of them would fight over the cores, in both engines.
        environ = {"OMP_NUM_THREADS": "1", **os.environ}
        with log.open("w") as file:
            done = subprocess.run(command, env=environ, stdout=file, stderr=file, check=False)  # noqa: S603
        if done.returncode != 0:
            sys.stderr.write(log.read_text())
            raise SystemExit(done.returncode)
        return dict(json.loads(figures.read_text()))


def bench_steps(arguments: argparse.Namespace) -> Json:
    """Part 1, on one rank."""
    mesh = dsx.Mesh.of(pp=PIPELINE, dp=arguments.data_parallel)
    with dsx.distributed(mesh) as groups:
        batches = list(_batches(arguments, groups.dp_rank))
        engines = {c.name: _engine(c, arguments, groups) for c in CONTENDERS}
        wall: dict[str, list[float]] = {name: [] for name in engines}
        cpu: dict[str, list[float]] = {name: [] for name in engines}
        losses: dict[str, list[float]] = {name: [] for name in engines}
        names = list(engines)
        for turn in range(arguments.rounds + 1):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                begun = time.process_time()
                taken, duration = _timed(lambda e=engines[name]: _train(e, batches, arguments.steps))
                losses[name] += [loss.item() for loss in taken]
                if turn > 0:  # turn 0 warms up
                    wall[name].append(duration / arguments.steps)
                    cpu[name].append((time.process_time() - begun) / arguments.steps)
        for name, mine in cpu.items():
            total = torch.tensor(mine, dtype=torch.float64, device=_device())
            dist.all_reduce(total)
            cpu[name] = total.tolist()
        dist.barrier()
    return {
        "hidden": arguments.hidden[0],
        "parameters": num_parameters(_model(arguments)),
        "engines": [_figures(c, wall, cpu, losses, arguments.micro_batches) for c in CONTENDERS],
    }


def _train(engine: Any, batches: Sequence[Any], steps: int) -> list[Any]:
    return [engine.train_batch(iter(batches)) for _ in range(steps)]


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Result and wall time from when every rank is ready to when every rank has finished."""
    dist.barrier()
    begun = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return result, time.perf_counter() - begun


def _figures(
    contender: Contender,
    wall: dict[str, list[float]],
    cpu: dict[str, list[float]],
    losses: dict[str, list[float]],
    micro_batches: int,
) -> Json:
    stock, mine = CONTENDERS[0].name, contender.name
    name = "interleaved" if contender.chunks > 1 else "1f1b"
    pairs = zip(losses[mine], losses[stock], strict=True)
    return {
        "name": mine,
        "step_seconds": wall[mine],
        "median_step_seconds": statistics.median(wall[mine]),
        "fastest_step_seconds": min(wall[mine]),
        "median_ratio_to_stock": statistics.median(
            ours / theirs for ours, theirs in zip(wall[mine], wall[stock], strict=True)
        ),
        "fastest_ratio_to_stock": min(wall[mine]) / min(wall[stock]),
        "cpu_seconds": cpu[mine],
        "median_cpu_seconds": statistics.median(cpu[mine]),
        "cpu_ratio_to_stock": statistics.median(cpu[mine]) / statistics.median(cpu[stock]),
        "bubble_in_theory": simulate(build(name, PIPELINE, max(contender.chunks, 1), micro_batches)).bubble,
        "largest_relative_loss_difference": max(abs(a - b) / abs(b) for a, b in pairs),
    }


def _device() -> torch.device:
    return torch.device(deepspeed.accelerator.get_accelerator().current_device_name())


def _model(arguments: argparse.Namespace) -> dsx.ModelSpec:
    """A Llama of the width asked for."""
    hidden = arguments.hidden[0]
    return model_spec(
        {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": arguments.blocks,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "max_position_embeddings": arguments.sequence_length,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }
    )


def _batches(arguments: argparse.Namespace, dp_rank: int) -> Iterator[tuple[Any, Any]]:
    """The micro-batches of every step: (inputs, labels) of int64 [MICRO_BATCH, sequence]."""
    generator = torch.Generator().manual_seed(1 + dp_rank)
    for _ in range(arguments.micro_batches):
        ids = torch.randint(VOCABULARY, (MICRO_BATCH, arguments.sequence_length + 1), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def _engine(contender: Contender, arguments: argparse.Namespace, groups: dsx.Groups) -> Any:
    """A fresh engine; all contenders start from the same weights and cut the layers into equal blocks."""
    spec, alone = _model(arguments), dsx.TensorParallel()
    config = _config(contender.zero, arguments.micro_batches, arguments.bucket)
    if arguments.bf16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    common = {
        "layers": families.layers(spec, alone, dtype=dtype, seed=7),
        "loss_fn": families.loss(spec, alone),
        "partition_method": "type:block",
    }
    if contender.chunks == 0:
        net = PipelineModule(num_stages=PIPELINE, **common)
        return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
    return dsx.initialize(
        model=dsx.PipelineModule(groups=groups, num_chunks=contender.chunks, **common), config=config
    )[0]


def _config(zero: int, micro_batches: int, bucket: int = 500_000_000) -> Json:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": {"stage": zero, "reduce_bucket_size": bucket},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }


def bench_calls(arguments: argparse.Namespace) -> Json:
    """Part 2, on its only rank: milliseconds per call, per ZeRO stage."""
    with dsx.distributed(dsx.Mesh.of()) as groups:
        return {f"zero{zero}": _calls(zero, groups, arguments.rounds) for zero in range(4)}


class _Plain(nn.Module):
    """The layer and loss of part 2 as one module, as a user of a plain DeepSpeedEngine writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layer(inputs), labels)


def _calls(zero: int, groups: dsx.Groups, rounds: int) -> Json:
    batch = (torch.ones(MICRO_BATCH, 8, device=_device()), torch.ones(MICRO_BATCH, 8, device=_device()))
    net = _Plain()
    plain = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=_config(zero, FEW))[0]
    module = dsx.PipelineModule([nn.Linear(8, 8)], loss_fn=nn.functional.mse_loss, groups=groups)
    ours = dsx.initialize(model=module, config=_config(zero, FEW))[0]

    def plain_step(micro_batches: int) -> None:
        """The loop that dsx's executor has to beat: no call that the step can do without."""
        plain.set_train_batch_size(MICRO_BATCH * micro_batches)
        for i in range(micro_batches):
            loss = plain(*batch)
            plain.set_gradient_accumulation_boundary(i == micro_batches - 1)
            plain.backward(loss)
        plain.step()

    def our_step(micro_batches: int) -> None:
        ours.set_train_batch_size(MICRO_BATCH * micro_batches)
        ours.train_batch(iter([batch] * micro_batches))

    best: dict[tuple[str, int], float] = {}
    for _ in range(3 * rounds):
        for name, step in (("plain", plain_step), ("dsx", our_step)):
            for count in (FEW, MANY):
                duration = _timed(lambda c=count, s=step: s(c))[1]
                best[name, count] = min(best.get((name, count), duration), duration)
    calls = 2 * (MANY - FEW)  # a forward and a backward per micro-batch
    per_call = {name: 1000 * (best[name, MANY] - best[name, FEW]) / calls for name in ("plain", "dsx")}
    return {
        "deepspeed_engine_ms_per_call": per_call["plain"],
        "dsx_ms_per_call": per_call["dsx"],
        "added_ms_per_call": per_call["dsx"] - per_call["plain"],
    }


def machine() -> Json:
    """What the figures depend on: processor, accelerator, versions."""
    names = [line for line in _cpuinfo() if line.startswith("model name")]
    return {
        "processor": names[0].split(":", 1)[1].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in ("torch", "deepspeed", "dsx")},
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def as_text(report: Json) -> str:
    """The report as tables."""
    lines = [
        ", ".join(f"{key} {value}" for key, value in {"date": report["date"], **report["machine"]}.items())
    ]
    lines.append(", ".join(f"{key} {value}" for key, value in report["arguments"].items()))
    for part in report["steps"]:
        lines += ["", f"hidden {part['hidden']}, {part['parameters']:,} parameters"]
        layout = "{:<30} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}"
        head = ("median", "of", "fastest", "of", "CPU", "of", "bubble,", "loss")
        lines.append(layout.format("", *head))
        head = ("ms/step", "stock's", "ms/step", "stock's", "ms/step", "stock's", "theory", "diff.")
        lines.append(layout.format("engine", *head))
        lines += [
            layout.format(
                engine["name"],
                f"{1000 * engine['median_step_seconds']:.0f}",
                f"{engine['median_ratio_to_stock']:.3f}",
                f"{1000 * engine['fastest_step_seconds']:.0f}",
                f"{engine['fastest_ratio_to_stock']:.3f}",
                f"{1000 * engine['median_cpu_seconds']:.0f}",
                f"{engine['cpu_ratio_to_stock']:.3f}",
                f"{engine['bubble_in_theory']:.4f}",
                f"{engine['largest_relative_loss_difference']:.0e}",
            )
            for engine in part["engines"]
        ]
    layout = "{:<8} {:>20} {:>10} {:>10}"
    lines += ["", "ms per forward or backward call, one rank, one 8 x 8 layer"]
    lines.append(layout.format("", "plain DeepSpeedEngine", "dsx", "added"))
    for stage, calls in report["calls"].items():
        lines.append(layout.format(stage, *(f"{value:.3f}" for value in calls.values())))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
