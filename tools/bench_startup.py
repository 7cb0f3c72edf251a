"""How long a start takes, from the launcher to the end of the first step, beside stock DeepSpeed's.

    python tools/bench_startup.py [--ranks 1 2 4] [--rounds 3] [--before CHECKOUT] [--json FILE]
    python tools/bench_startup.py --paper

Every round launches each program under DeepSpeed's own launcher, in turns: recipes/gpt_3d.py with
configs/zero1.json for one step, its text read before; with --before the same by another checkout of dsx; and
transformers' model of the same size in DeepSpeed's engine, which is kept from building its collectives for
CPUs, as dsx does. Wall time is from the launch to the line that tells the first step, processor time that of
all processes from their start to their end. --paper counts and times in one process what a start of 1,024
ranks computes: the config, the process groups beside those of DeepSpeed's pipeline, the estimate of memory.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

Json = dict[str, Any]
CONFIG = "configs/zero1.json"
PAPER = {"dsx.parallel.tensor": 8, "dsx.parallel.pipeline": 16, "dsx.parallel.chunks": 2}
PAPER |= {"dsx.schedule.name": "interleaved", "gradient_accumulation_steps": 128}
PAPER_RANKS = 1024


def main() -> None:
    """Launch, measure, print; or be one of stock DeepSpeed's ranks."""
    arguments = _arguments()
    if arguments.stock:
        stock()
        return
    report: Json = {"paper": paper()} if arguments.paper else {"starts": starts(arguments)}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(as_text(report))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="(default 1 2 4)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="launches of each (default 3)")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout of dsx")
    parser.add_argument("--paper", action="store_true", help="what 1,024 ranks compute, in one process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--stock", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def starts(arguments: argparse.Namespace) -> list[Json]:
    """Wall and processor seconds of every launch."""
    found = []
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(prefix="bench-startup-") as name:
            recipe = ["recipes/gpt_3d.py", CONFIG, *_settings(Path(name))]
            programs = {"dsx": (ROOT, recipe), "stock DeepSpeed": (ROOT, [str(Path(__file__)), "--stock"])}
            if arguments.before is not None:
                programs["dsx before"] = (arguments.before.resolve(), recipe)
            seconds: dict[str, list[tuple[float, float]]] = {program: [] for program in programs}
            for turn in range(arguments.rounds + 1):
                for program, (tree, words) in programs.items():
                    took = launch(tree, words, ranks)
                    if turn > 0:  # before, the text and what is recorded of layers are put into caches
                        seconds[program].append(took)
        for program, took in seconds.items():
            wall, cpu = (statistics.median(each) for each in zip(*took, strict=True))
            found.append(
                {"ranks": ranks, "program": program, "wall_seconds": wall, "cpu_seconds": cpu, "all": took}
            )
    return found


def _settings(folder: Path) -> list[str]:
    values = {
        "dsx.train.output": folder / "run",
        "dsx.train.steps": 1,
        "dsx.train.eval_every": 0,
        "dsx.train.export_hf": "false",
        "dsx.data.max_bytes": 1_000_000,
        "dsx.tracking.wandb.mode": "disabled",
    }
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def launch(tree: Path, words: Sequence[str], ranks: int) -> tuple[float, float]:
    """Seconds to the first step's line, and processor seconds of everything that the launch started."""
    environ = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", str(ranks)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        launcher += ["--master_port", str(free.getsockname()[1])]
    before, began, first = _children_seconds(), time.monotonic(), None
    with subprocess.Popen(  # noqa: S603
        [*launcher, *words],
        cwd=tree,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None, "it is a pipe"
        said = []
        for line in process.stdout:
            said.append(line)
            if first is None and line.startswith("step "):
                first = time.monotonic() - began
    _forget(words)
    if first is None:
        raise SystemExit("".join(said))
    return first, _children_seconds() - before


def _forget(words: Sequence[str]) -> None:
    """Let the next launch begin at the first step again; its text stays."""
    for word in words:
        if word.startswith("dsx.train.output="):
            folder = Path(word.partition("=")[2])
            for made in folder.iterdir() if folder.is_dir() else ():
                if made.name != "data":
                    shutil.rmtree(made) if made.is_dir() else made.unlink()


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def stock() -> None:
    """One step of transformers' model in DeepSpeed's engine."""
    import deepspeed
    import torch
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    import dsx
    from dsx.launch.spared import without_builds

    without_builds()
    content = json.loads((ROOT / CONFIG).read_text())
    run = dsx.load_config(content, world_size=int(os.environ["WORLD_SIZE"]))
    fields = {key: value for key, value in run.hf_config.items() if key != "model_type"}
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(run.hf_config["model_type"], **fields))
    config = {key: value for key, value in content.items() if key != "dsx"}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(engine.gradient_accumulation_steps()):
        shape = (engine.train_micro_batch_size_per_gpu(), run.sequence_length + 1)
        ids = torch.randint(run.model.vocab_size, shape, device=engine.device)
        logits = engine(input_ids=ids[:, :-1], use_cache=False).logits
        engine.backward(F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()))
        engine.step()
    if torch.distributed.get_rank() == 0:
        print("step 1", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def paper() -> Json:
    """Counts and seconds of what a rank of 1,024 computes at its start."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import dsx
    from dsx.memory.estimate import estimate_run
    from dsx.memory.job import job_of
    from dsx.parallel.groups import make_groups

    overrides = [f"{key}={value}" for key, value in PAPER.items()]
    config = str(ROOT / "configs" / "llama3_70b_64gpu.json")
    found: Json = {"ranks": PAPER_RANKS, "layout": PAPER}
    resolve = partial(dsx.load_config, config, world_size=PAPER_RANKS, overrides=overrides)
    found["config"], run = _timed(resolve)
    found["schedule and layers"], job = _timed(lambda: job_of(run))
    found["estimate"], _ = _timed(lambda: estimate_run(job))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PAPER_RANKS)
    known = dist.distributed_c10d._world.pg_map  # noqa: SLF001 (who else counts them?)
    found["groups"], _ = _timed(lambda: make_groups(run.mesh))
    found["number of groups"] = len(known) - 1
    with _counted_groups() as calls:
        found["stock groups"], _ = _timed(lambda: _stock_grid(run.mesh))
    found["number of stock groups"] = len(calls)  # each a collective call over all ranks
    dist.destroy_process_group()
    return found


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def _stock_grid(mesh: Any) -> Any:
    """The groups of DeepSpeed's pipeline engine for the same layout."""
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid

    from dsx.launch.spared import without_builds

    without_builds()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return PipelineParallelGrid(topology=_topology(mesh))


def _topology(mesh: Any) -> Any:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    return PipeModelDataParallelTopology(num_pp=mesh.pp, num_mp=mesh.tp, num_dp=mesh.num_replicas)


@contextmanager
def _counted_groups() -> Iterator[list[Any]]:
    """The groups that DeepSpeed asks for inside, which it does silently."""
    import deepspeed.comm

    original, calls = deepspeed.comm.new_group, []

    def counting(ranks: Any) -> Any:
        calls.append(ranks)
        return original(ranks)

    deepspeed.comm.new_group = counting
    try:
        with redirect_stdout(io.StringIO()):  # it prints all coordinates
            yield calls
    finally:
        deepspeed.comm.new_group = original


def as_text(report: Mapping[str, Any]) -> str:
    """The report as a table."""
    if "paper" in report:
        return "\n".join(
            f"{name:<32} {f'{1000 * value:.1f} ms' if isinstance(value, float) else value}"
            for name, value in report["paper"].items()
        )
    layout = "{:>5} {:<18} {:>8} {:>8} {:>10} {:>10}"
    lines = [layout.format("ranks", "program", "wall s", "CPU s", "of stock", "CPU of it")]
    stock_rows = {row["ranks"]: row for row in report["starts"] if row["program"] == "stock DeepSpeed"}
    for row in report["starts"]:
        peer = stock_rows[row["ranks"]]
        lines.append(
            layout.format(
                row["ranks"],
                row["program"],
                f"{row['wall_seconds']:.2f}",
                f"{row['cpu_seconds']:.2f}",
                f"{row['wall_seconds'] / peer['wall_seconds']:.3f}",
                f"{row['cpu_seconds'] / peer['cpu_seconds']:.3f}",
            )
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
