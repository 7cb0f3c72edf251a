#!/usr/bin/env python
"""The analytic memory ledger against the traced one, over a seeded grid of layouts.

    python tools/bench_memory.py --cases 200 --seed 0
    python tools/bench_memory.py --only zero=3 precision=bf16 --show
    python tools/bench_memory.py --real
    python tools/bench_memory.py --states
    python tools/bench_memory.py --lists --cases 40 --seed 21
    python tools/bench_memory.py --hub --only name=mixtral-8x7b
    python tools/bench_memory.py --context 8192 16384 --only "window, transformers"

Each case is one rank of one layout: estimated without torch (dsx.memory) and traced through the real
engine on fake tensors (tests/meta_engine), in a process of its own. Prints the error of the peak of each case
and its distribution, and for bad ones the lines of both ledgers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

Case = dict[str, Any]

_SCHEDULES = {
    1: ("gpipe", "1f1b", "zb_h1"),
    2: ("interleaved", "zbv", "dualpipev", "interleaved_zb", "v_half", "v_min"),
}

_FAMILIES = {
    "llama": {"preset": "tiny"},
    "gpt2": {"preset": "tiny"},
}


def grid(count: int, seed: int) -> list[Case]:
    """``count`` distinct cases that a config accepts."""
    draw = random.Random(seed)  # noqa: S311 (a grid, no secret)
    found: dict[str, Case] = {}
    while len(found) < count:
        case = _drawn(draw)
        found.setdefault(json.dumps(case, sort_keys=True), case)
    return list(found.values())


def _drawn(draw: random.Random) -> Case:
    pp = draw.choice((1, 1, 2, 4))
    chunks = draw.choice((1, 2)) if pp > 1 else 1
    case = {
        "family": draw.choice(tuple(_FAMILIES)),
        "hidden": draw.choice((512, 1024, 2048)),
        "layers": draw.choice((8, 10)),
        "vocab": draw.choice((257, 8000, 32000)),
        "length": draw.choice((512, 1024)),
        "micro_batch": draw.choice((1, 2, 4)),
        "tp": draw.choice((1, 2, 4)),
        "sequence": draw.random() < 0.6,
        "pp": pp,
        "chunks": chunks,
        "dp": draw.choice((1, 2, 4)),
        "schedule": draw.choice(_SCHEDULES[chunks]) if pp > 1 else "1f1b",
        "m": draw.choice((1, 2, 3)) * pp,
        "zero": draw.choice((0, 1, 2, 3)),
        "precision": draw.choice(("bf16", "bf16", "fp32")),
        "accumulate": draw.choice((None, None, "fp32")),
        "recompute": draw.choice(("none", "selective", "full")),
        "optimizer": draw.choice(("AdamW", "AdamW", "FusedAdam", "Lion", "SGD")),
        "bucket": draw.choice((500_000, 5_000_000, 500_000_000)),
        "dropout": draw.choice((0.0, 0.0, 0.1)),
    }
    if case["precision"] == "fp32" or case["zero"] == 0:
        case["accumulate"] = None
    case["rank"] = draw.randrange(case["tp"] * case["pp"] * case["dp"])
    # A generator of its own leaves the rest of the grid as it was.
    more = random.Random(json.dumps(case))  # noqa: S311
    case["offload"] = more.choice((None, None, "optimizer")) if case["zero"] else None
    case["pinned"] = more.random() < 0.5
    case["keys"] = {}
    if case["zero"] == 3:
        case["offload"] = more.choice((None, None, None, "optimizer", "parameters", "both"))
        case["keys"] = _zero3_keys(more)
    later = random.Random(json.dumps(case, sort_keys=True))  # noqa: S311
    case["reduce"] = later.choice(("step", "micro_batch")) if case["zero"] == 2 else "step"
    return case


def _zero3_keys(draw: random.Random) -> dict[str, Any]:
    """Keys of ZeRO-3 off their defaults, in half of the cases, and what ``dsx.zero`` may keep."""
    if draw.random() < 0.5:
        return {}
    keys = {
        "stage3_prefetch_bucket_size": draw.choice((0, 1_000_000, 10_000_000, None)),
        "stage3_param_persistence_threshold": draw.choice((0, 2000, 1_000_000, None)),
        "stage3_model_persistence_threshold": draw.choice((10_000, None, None)),
        "stage3_max_live_parameters": draw.choice((3_000_000, 30_000_000, None)),
        "stage3_max_reuse_distance": draw.choice((0, 3_000_000, 30_000_000, None)),
        "sub_group_size": draw.choice((1_000_000, 10_000_000, None)),
        "contiguous_gradients": draw.choice((False, None, None)),
        "reduce_scatter": draw.choice((False, None, None)),
        "stage3_allgather_sequential": draw.choice((True, None, None)),
        "stage3_use_all_reduce_for_fetch_params": draw.choice((True, None, None, None)),
        "overlap_comm": draw.choice((False, None)),
        "keep_gathered_bytes": draw.choice((10_000_000, 300_000_000, None, None)),
    }
    return {key: value for key, value in keys.items() if value is not None}


def hub_grid() -> list[Case]:
    """Models of transformers' modules at their published sizes on 64 GPUs: tools/published_models.toml."""
    layouts = (
        {"tp": 8, "pp": 4, "zero": 1, "sequence": True, "recompute": "none"},
        {"tp": 1, "pp": 8, "zero": 3, "sequence": False, "recompute": "full"},
        {"tp": 1, "pp": 4, "zero": 2, "sequence": False, "recompute": "full"},
    )
    return [
        {"name": name, **layout, "dp": 64 // (layout["tp"] * layout["pp"]), "offload": None, "rank": 0}
        for layout in layouts
        for name in tomllib.loads(_PUBLISHED.read_text(encoding="utf-8"))
    ]


_PUBLISHED = Path(__file__).with_name("published_models.toml")


def _hub_config(case: Case) -> tuple[dict[str, Any], int]:
    model = tomllib.loads(_PUBLISHED.read_text(encoding="utf-8"))[case["name"]]
    parallel = {"tensor": case["tp"], "pipeline": case["pp"], "sequence_parallel": case["sequence"]}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case["pp"],
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": case["zero"]},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "dsx": {
            "model": {"config": model, "implementation": "transformers"},
            "parallel": parallel,
            "recompute": case["recompute"],
            "data": {"sequence_length": 4096},
            "train": {"steps": 2, "output": "runs/memory"},
        },
    }
    return config, case["tp"] * case["pp"] * case["dp"]


def config_of(case: Case) -> tuple[dict[str, Any], int]:
    """A config file's content and its world size."""
    if "name" in case:
        return _hub_config(case)
    hidden, heads = case["hidden"], case["hidden"] // 64
    if case["family"] == "llama":
        overrides = {
            "hidden_size": hidden,
            "num_hidden_layers": case["layers"],
            "num_attention_heads": heads,
            "num_key_value_heads": max(heads // 2, 4),
            "intermediate_size": hidden * 11 // 4,
            "vocab_size": case["vocab"],
            "head_dim": 64,
            "max_position_embeddings": case["length"],
        }
    else:
        rate = case["dropout"]
        overrides = {
            "n_embd": hidden,
            "n_layer": case["layers"],
            "n_head": heads,
            "vocab_size": case["vocab"],
            "n_positions": case["length"],
            "resid_pdrop": rate,
            "embd_pdrop": rate,
            "attn_pdrop": rate,
        }
    optimizers = {
        "AdamW": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True}},
        "FusedAdam": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "Lion": {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "SGD": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}},
    }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case["micro_batch"],
        "gradient_accumulation_steps": case["m"],
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": case["zero"], "reduce_bucket_size": case["bucket"]},
        "optimizer": optimizers[case["optimizer"]],
        "zero_allow_untested_optimizer": True,
        "dsx": {
            "model": {"family": case["family"], **_FAMILIES[case["family"]], "overrides": overrides},
            "parallel": {
                "tensor": case["tp"],
                "pipeline": case["pp"],
                "chunks": case["chunks"],
                "sequence_parallel": case["sequence"],
            },
            "schedule": {"name": case["schedule"]},
            "recompute": case["recompute"],
            "data": {"sequence_length": case["length"]},
            "train": {"steps": 2, "output": "runs/memory"},
        },
    }
    if case["precision"] == "bf16":
        config["bf16"] = {"enabled": True}
    if case["zero"] == 2:
        config["dsx"].setdefault("zero", {})["reduce"] = case["reduce"]
    if case["accumulate"]:
        config["data_types"] = {"grad_accum_dtype": case["accumulate"]}
    _add_zero(config, case)
    return config, case["tp"] * case["pp"] * case["dp"]


def _add_zero(config: dict[str, Any], case: Case) -> None:
    zero = config["zero_optimization"]
    zero.update({key: value for key, value in case["keys"].items() if key != "keep_gathered_bytes"})
    if "keep_gathered_bytes" in case["keys"]:
        config["dsx"]["zero"] = {"keep_gathered_bytes": case["keys"]["keep_gathered_bytes"]}
    block = {"device": "cpu", "pin_memory": case["pinned"]}
    if case["offload"] in ("optimizer", "both"):
        zero["offload_optimizer"] = block
        config["zero_force_ds_cpu_optimizer"] = False
    if case["offload"] in ("parameters", "both"):
        zero["offload_param"] = block


def run_case(case: Case, connection: Any, labels: bool) -> None:
    """Both ledgers of one case."""
    try:
        connection.send(_both(case, labels=labels))
    except Exception as error:  # noqa: BLE001 (told with the case)
        connection.send({"failed": f"{type(error).__name__}: {error}"})


def _both(case: Case, *, labels: bool = True) -> dict[str, Any]:
    import torch

    from dsx.config.resolve import resolve
    from dsx.errors import DsxError
    from dsx.memory.estimate import estimate
    from dsx.memory.job import job_of
    from meta_engine.run import trace

    # What a launcher would tell DeepSpeed.
    os.environ.update(RANK=str(case["rank"]), LOCAL_RANK="0", DS_ACCELERATOR="cpu")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    try:
        config, world = config_of(case)
        run = resolve(config, world_size=world)
    except DsxError as error:  # a drawn layout that dsx refuses
        return {"refused": str(error)}
    begin = time.perf_counter()
    job = job_of(run)
    if job.states.offload is not None:
        unrounded = dataclasses.replace(job.states.offload, rounds=False)
        job = dataclasses.replace(job, states=dataclasses.replace(job.states, offload=unrounded))
    analytic = estimate(job, case["rank"])
    middle = time.perf_counter()
    traced = trace(run, case["rank"], label=_caller if labels else None, host=case["offload"] is not None)
    end = time.perf_counter()
    return {
        "host": (analytic.host_bytes, max(traced.host_phases.values(), default=0)),
        "analytic": {phase.name: phase.peak_bytes for phase in analytic.phases},
        "traced": traced.phases,
        "steady": (analytic.steady_bytes, traced.steady_bytes),
        "parameters": run.layout.local_parameters(run.mesh.coords(case["rank"])["pp"]),
        "lines": {p.name: [(f"{k.category}: {k.name}", v) for k, v in p.lines[:20]] for p in analytic.phases},
        "sites": {
            name: sorted(lines.items(), key=lambda item: -item[1])[:20]
            for name, lines in traced.contents.items()
        },
        "seconds": (middle - begin, end - middle),
    }


def _caller() -> str:
    """The nearest lines of dsx, DeepSpeed or torch.optim that allocate."""
    frame, found = sys._getframe(2), []  # noqa: SLF001 (what a label is for)
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        ours = "/dsx/" in name or "/deepspeed/" in name or "torch/optim" in name
        if ours and "/meta_engine/" not in name and "nvtx" not in name and "profiling" not in name:
            found.append(f"{Path(name).name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


def measure(case: Case, *, labels: bool, run: Callable[..., None] = run_case) -> dict[str, Any]:
    """:func:`run_case` in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(case, theirs, labels))
    process.start()
    theirs.close()
    try:
        result: dict[str, Any] = ours.recv()
    except EOFError:
        result = {"failed": "the process died"}
    process.join()
    return result


def list_grid(count: int, seed: int) -> list[Case]:
    """``count`` distinct cases of layer lists that dsx did not write (tests/memory/own_lists.py)."""
    draw = random.Random(seed)  # noqa: S311 (a grid, no secret)
    found: dict[str, Case] = {}
    while len(found) < count:
        pipeline = draw.choice((1, 2, 4))
        chunks = draw.choice((1, 2)) if pipeline > 1 else 1
        ranks = pipeline * draw.choice((1, 2, 4))
        zero, name = (
            draw.choice((0, 1, 2, 3)),
            draw.choice(("mixers", "perceptrons", "encoders", "llama", "recipe")),
        )
        case = {
            "name": name,
            "rank": draw.randrange(ranks),
            "ranks": ranks,
            "pipeline": pipeline,
            "chunks": chunks if pipeline * chunks <= 4 else 1,
            "zero": zero,
            "bf16": draw.random() < 0.6,
            "schedule": draw.choice(("auto", "gpipe")) if chunks == 1 else "auto",
            "accumulation": pipeline * draw.choice((1, 2, 3)),
        }
        found.setdefault(json.dumps(case), case)
    return list(found.values())


def _run_list(case: Case, connection: Any, _: bool) -> None:
    """Estimate and trace of a list."""
    sys.path.insert(0, str(ROOT / "tests" / "memory"))
    try:
        import torch
        from own_lists import both

        torch.set_num_threads(1)
        result = both(**case)
        phases = {name: size for name, size in result["estimate"].items() if name != "steady"}
        traced = {name: size for name, size in result["trace"].items() if name != "steady"}
        connection.send({"analytic": phases, "traced": traced, "host": (0, 0)})
    except Exception as error:  # noqa: BLE001 (told with the case)
        connection.send({"failed": f"{type(error).__name__}: {error}"})


def _arguments() -> argparse.Namespace:
    """From the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="*", default=[], help="key=value that a case must have; words in its name with --real"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so long")
    parser.add_argument("--show", action="store_true", help="print the lines of every bad case")
    parser.add_argument(
        "--real", action="store_true", help="traced against real gloo ranks, and nothing else"
    )
    parser.add_argument("--lists", action="store_true", help="layer lists that dsx did not write")
    parser.add_argument("--hub", action="store_true", help="transformers' families at published sizes")
    parser.add_argument(
        "--states", action="store_true", help="bytes a parameter by stage and precision beside theory"
    )
    parser.add_argument(
        "--context", type=int, nargs="*", metavar="TOKENS", help="ranks that share rows so long, really"
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="how many, with --context")
    parser.add_argument("--out", type=Path, help="write one JSON line per case")
    return parser.parse_args()


def main() -> int:
    """Run the grid."""
    args = _arguments()
    warnings.filterwarnings("ignore")
    os.environ.update(LOCAL_RANK="0", DS_ACCELERATOR="cpu")
    import deepspeed  # noqa: F401 (once, before the forks)

    import meta_engine.run  # noqa: F401

    if args.real:
        from tools.memory_bench.real import compare

        return compare(args.only)
    if args.context:
        from tools.memory_bench.context import peaks

        return peaks(args.context, args.ranks, args.only)
    if args.states:
        from tools.memory_bench.states import table

        return table(lambda case: measure(case, labels=False), _wanted(args))
    _compare_grid(args)
    return 0


def _wanted(args: argparse.Namespace) -> dict[str, str]:
    return dict(item.split("=", 1) for item in args.only)


def _compare_grid(args: argparse.Namespace) -> None:
    """Estimate and trace of each case."""
    wanted = _wanted(args)
    begin, errors = time.perf_counter(), []
    cases = hub_grid() if args.hub else (list_grid if args.lists else grid)(args.cases, args.seed)
    for case in cases:
        if time.perf_counter() - begin > args.seconds:
            break
        if any(str(case[key]) != value for key, value in wanted.items()):
            continue
        result = measure(case, labels=args.show, run=_run_list if args.lists else run_case)
        short = " ".join(f"{key}={value}" for key, value in case.items())
        if "analytic" not in result:
            print("none ", (result.get("refused") or result["failed"])[:200], short, flush=True)
            continue
        analytic, traced = result["analytic"], result["traced"]
        # The run's peak, and that of a step, which is what a larger bucket or a longer run is judged by.
        error = max(analytic.values()) / max(traced.values()) - 1
        step = {name: analytic[name] / traced[name] - 1 for name in traced}
        errors.append(error)
        told = dict(step)
        if result["host"][1]:
            told["host"] = result["host"][0] / result["host"][1] - 1
        words = " ".join(f"{name} {100 * value:+.2f}%" for name, value in told.items())
        sizes = f"{max(analytic.values()) / 2**20:.1f} / {max(traced.values()) / 2**20:.1f} MiB"
        print(f"{100 * error:+.3f}% [{words}] {sizes} {short}", flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps({"case": case, "error": error, **result}) + "\n")
        if args.show and max(map(abs, step.values())) > 0.01:
            _show(result, step)
    if errors:
        _summary(errors, time.perf_counter() - begin)


def _show(result: dict[str, Any], step: dict[str, float]) -> None:
    for name, error in step.items():
        if abs(error) > 0.01:
            print(f"  {name}: analytic {result['analytic'][name]} traced {result['traced'][name]}")
            for label, size in result["lines"][name]:
                print(f"    A {size:>13} {label}")
            for label, size in result["sites"][name]:
                print(f"    T {size:>13} {label}")


def _summary(errors: list[float], seconds: float) -> None:
    size = sorted(map(abs, errors))
    p95 = size[min(len(size) - 1, int(0.95 * len(size)))]
    print(
        f"{len(errors)} cases in {seconds:.0f} s: |error| p50 {100 * statistics.median(size):.3f}% "
        f"p95 {100 * p95:.3f}% max {100 * size[-1]:.3f}%; lowest {100 * min(errors):+.3f}%"
    )


if __name__ == "__main__":
    raise SystemExit(main())
