"""Bytes a parameter by ZeRO stage, precision, sums and layout, beside what theory asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

Case = dict[str, Any]

DP = 8
BUCKET = 1_000_000
SHOWN = 0.05
"""Lines of fewer bytes a parameter are left out."""

_WHOLE = {"pp": 1, "chunks": 1, "schedule": "1f1b", "m": 2}
_CUT = {"pp": 2, "chunks": 2, "schedule": "interleaved", "m": 4}
_BASE = {
    "family": "llama",
    "hidden": 2048,
    "layers": 4,
    "vocab": 8000,
    "length": 8,  # so few tokens that activations take next to nothing
    "micro_batch": 1,
    "tp": 1,
    "sequence": False,
    "dp": DP,
    "recompute": "none",
    "optimizer": "FusedAdam",  # takes nothing while it updates
    "bucket": BUCKET,
    "dropout": 0.0,
    "rank": 0,
    "offload": None,
    "pinned": False,
    "reduce": "step",
}
_PRECISIONS = (("fp32", None), ("bf16", None), ("bf16", "fp32"))


def cases() -> Iterator[Case]:
    """Every stage in every precision, whole and cut into chunks, and what else changes who holds what."""
    for layout, zero, (precision, sums) in product((_WHOLE, _CUT), range(4), _PRECISIONS):
        if (zero, sums) != (0, "fp32"):  # ZeRO-0 sums in the parameters' precision alone
            yield _case(layout, zero, precision, sums)
    for sums in (None, "fp32"):
        yield _case(_WHOLE, 2, "bf16", sums, reduce="micro_batch")
    for zero, sums in product((1, 2, 3), (None, "fp32")):
        yield _case(_WHOLE, zero, "bf16", sums, offload="optimizer")
        if zero == 2:  # what is done unless "step" is asked for
            yield _case(_WHOLE, zero, "bf16", sums, offload="optimizer", reduce="micro_batch")


def _case(layout: Case, zero: int, precision: str, sums: str | None, **more: Any) -> Case:
    # Nothing is gathered but what the layer at work needs.
    names = (
        "param_persistence_threshold",
        "prefetch_bucket_size",
        "max_live_parameters",
        "max_reuse_distance",
    )
    keys = {f"stage3_{name}": 0 for name in names} if zero == 3 else {}
    chosen = {"zero": zero, "precision": precision, "accumulate": sums, "keys": keys}
    return _BASE | layout | chosen | more


def theory(case: Case) -> float:
    """Bytes a parameter on the device (arXiv:1910.02054, section 3 and 5): weights, sums, Adam's states.

    In bf16 the states are an fp32 copy and two moments, in fp32 the moments alone; ZeRO-1 divides them by N,
    ZeRO-2 the sums too, ZeRO-3 all. With offload states and their gradients are the host's.
    """
    weight = 4 if case["precision"] == "fp32" else 2
    gradient = 4 if case["accumulate"] == "fp32" else weight
    states = 8 if weight == 4 else 12
    parts = (weight, gradient, states)
    whole = (case["zero"] < 3, case["zero"] < 2, case["zero"] < 1)
    if case["offload"]:
        parts = (weight, gradient, 0)
    return sum(part if kept else part / case["dp"] for part, kept in zip(parts, whole, strict=True))


def table(measure: Callable[[Case], dict[str, Any]], wanted: Mapping[str, str]) -> int:
    """Print it as Markdown; 1 if the engine on fake tensors holds anything else than the estimate.

    Args:
        measure: Both ledgers of a case.
        wanted: Key -> value that a case must have.
    """
    print(f"N = {DP}, reduce_bucket_size {BUCKET:,}, bytes a parameter of the rank")
    titles = ("ZeRO", "layout", "weights, sums", "theory", "between steps", "peak of a step", "traced")
    print(f"| {' | '.join(titles)} | what is held then |")
    print("|" + "---|" * (len(titles) + 1))
    worst = 0.0
    for case in cases():
        if any(str(case[key]) != value for key, value in wanted.items()):
            continue
        result = measure(case)
        if "analytic" not in result:
            print(f"| {case} | {result} |", flush=True)
            worst = 1.0
            continue
        ours, theirs = result["analytic"]["step 2"], result["traced"]["step 2"]
        worst = max(worst, abs(ours / theirs - 1))
        print(_row(case, result, ours, theirs), flush=True)
    print(f"largest difference of estimate and trace: {100 * worst:.3f} %")
    return int(worst > 0.001)


def _row(case: Case, result: dict[str, Any], ours: int, theirs: int) -> str:
    count = result["parameters"]
    layout = f"pp {case['pp']}, {case['chunks']} chunks" if case["pp"] > 1 else "whole"
    layout += ", reduce micro_batch" if case["reduce"] != "step" else ""
    layout += f", {case['offload']} offloaded" if case["offload"] else ""
    held = [
        f"{line.split(': ', 1)[1]} {size / count:.2f}"
        for line, size in result["lines"]["step 2"]
        if size / count >= SHOWN
    ]
    sums = case["accumulate"] or case["precision"]
    figures = (theory(case), result["steady"][0] / count, ours / count, theirs / count)
    shown = " | ".join(f"{figure:.2f}" for figure in figures)
    return f"| {case['zero']} | {layout} | {case['precision']}, {sums} | {shown} | {', '.join(held)} |"
