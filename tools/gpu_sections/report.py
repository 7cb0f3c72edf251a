"""The report of a GPU day, in Markdown: every figure beside its peer and its estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gpu_sections.worker import Json

Row = Sequence[str]
Cases = Mapping[str, Json]


def as_markdown(
    sections: Mapping[str, Cases], *, remaining: int, seconds: float, command: Sequence[str]
) -> str:
    """The report.

    Args:
        sections: Section -> case -> its result.
        remaining: How many cases have no result yet.
        seconds: Of this run.
        command: Its arguments.
    """
    failed = [(s, name, r) for s, cases in sections.items() for name, r in cases.items() if "failed" in r]
    counted = sum(map(len, sections.values()))
    today = datetime.now(UTC).date().isoformat()
    said = f"{counted} cases have a result, {len(failed)} of them failed, {remaining} are left"
    ran = f"`python tools/gpu_day.py {' '.join(command)}`"
    lines = [f"# GPU day, {today}", "", f"{ran}: {said}; this run took {seconds:.0f} s."]
    if failed:
        lines += ["", "## What failed", ""]
        lines += [f"- **{section}: {name}**: {result['failed']}" for section, name, result in failed]
    for section, table in _SECTIONS.items():
        cases = {name: result for name, result in sections.get(section, {}).items() if "failed" not in result}
        here = {name: result for name, result in cases.items() if "not_here" not in result}
        if not cases:
            continue
        lines += ["", f"## {_TITLES[section]}", "", *table(here)]
        lines += [f"\nNot here: {name}: {r['not_here']}" for name, r in cases.items() if "not_here" in r]
    for section, name, result in failed:
        if result.get("trace"):
            lines += [
                "",
                f"### Trace of {section}: {name}",
                "",
                "```text",
                result["trace"].rstrip()[-3000:],
                "```",
            ]
    return "\n".join(lines) + "\n"


_TITLES = {
    "machine": "The machine",
    "correctness": "Right on one rank, in fp32, beside transformers on the CPU",
    "ranks": "Right on several ranks",
    "precision": "bf16 and fp16 beside Hugging Face + DeepSpeed",
    "memory": "Memory beside the estimate",
    "speed": "Speed beside Hugging Face + DeepSpeed and the planner",
    "kernels": "Kernels beside each other",
}


def _table(head: Row, rows: Iterable[Row]) -> list[str]:
    rows = list(rows)
    if not rows:
        return []
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _machine(cases: Cases) -> list[str]:
    facts = cases.get("facts", {}).get("facts", {})
    lines = [", ".join(f"{key} {value}" for key, value in facts.items()), ""]
    rates = [
        (name, _rate(r["rate"], r["unit"]), _rate(r["nominal"], r["unit"]), _share(r["rate"], r["nominal"]))
        for name, r in cases.items()
        if "rate" in r
    ]
    lines += _table(("", "measured", "data sheet", "share"), rates)
    constants = [
        (name, f"{built_in:.4g}", f"{found:.4g}", _share(found, built_in))
        for r in cases.values()
        for name, (built_in, found) in r.get("constants", {}).items()
    ]
    lines += ["", *_table(("planner's constant", "built in", "measured here", "ratio"), constants)]
    return lines + [f"\n{r['text']}" for r in cases.values() if "text" in r]


def _parity(cases: Cases) -> list[str]:
    rows = [
        (name, r.get("backend", ""), _far(r.get("losses")), _far(r.get("norms")), f"{r['seconds']:.1f}")
        for name, r in cases.items()
    ]
    return _table(("case", "backend", "losses differ by", "norms differ by", "s"), rows)


def _far(value: Any) -> str:
    return f"{value:.0e}" if isinstance(value, float) else "equal" if value is None else "fall"


def _precision(cases: Cases) -> list[str]:
    rows = [
        (
            name,
            f"{r['loss_difference']:.1e}",
            f"{r['norm_difference']:.1e}",
            f"{r['from_fp32']:.1e}",
            f"{r['stock_from_fp32']:.1e}",
            " / ".join(map(str, r["skipped"])),
            _scales(*r["scales"]),
        )
        for name, r in cases.items()
    ]
    head = (
        "case", "losses, dsx to DeepSpeed", "norm", "losses, dsx to fp32", "DeepSpeed to fp32",
        "skipped, dsx / DeepSpeed", "loss scales",
    )  # fmt: skip
    return _table(head, rows)


def _scales(mine: Sequence[float | None], theirs: Sequence[float | None]) -> str:
    if not any(theirs):
        return ""
    return "equal" if list(mine) == list(theirs) else f"{mine} / {theirs}"


def _memory(cases: Cases) -> list[str]:
    rows = [
        (
            name,
            _gib(r["peak"]),
            _gib(r["estimate"]),
            _off(r["estimate"], r["peak"]),
            _gib(r["reserved"]),
            _gib(r.get("stock")),
            _phases(r),
        )
        for name, r in cases.items()
    ]
    head = (
        "case", "peak, GiB", "estimate", "off by", "reserved", "Hugging Face + DeepSpeed", "off by phase",
    )  # fmt: skip
    return [*_table(head, rows), "", "Phases: the start (model, engine), the first step, a later step."]


def _phases(result: Json) -> str:
    """Of each phase, by how much the estimate is off."""
    peaks, estimated = result["peaks"], result["estimated"]
    starts = [size for name, size in estimated.items() if not name.startswith("step")]
    pairs = [(max(starts, default=0), peaks["start"])]
    pairs += [(estimated[name], peaks[name]) for name in ("step 1", "step 2") if name in estimated]
    return ", ".join(_off(mine, theirs) for mine, theirs in pairs)


def _speed(cases: Cases) -> list[str]:
    rows = []
    measured = {name: r for name, r in cases.items() if "tokens_per_second" in r}
    for name, r in measured.items():
        model, _, engine = name.rpartition(": ")
        peer = measured.get(f"{model}: Hugging Face + DeepSpeed{', compiled' * engine.endswith('compiled')}")
        step = sorted(r["seconds_of_steps"])[len(r["seconds_of_steps"]) // 2]
        rows.append(
            (
                name,
                f"{r['tokens_per_second']:,.0f}",
                "" if peer is None else f"{r['tokens_per_second'] / peer['tokens_per_second']:.3f}",
                _percent(r["mfu"]),
                f"{1000 * step:.1f} ({1000 * (max(r['seconds_of_steps']) - min(r['seconds_of_steps'])):.1f})",
                "" if "predicted_seconds" not in r else f"{1000 * r['predicted_seconds']:.1f}",
                "" if "predicted_seconds" not in r else _off(r["predicted_seconds"], step),
                _gib(r["peak"]),
                _gib(r.get("estimated_peak")),
                _gib(r["reserved"]),
                f"{r['losses'][0]:.3f}, {r['losses'][1]:.3f}",
            )
        )
    head = (
        "case", "tokens/s", "of Hugging Face + DeepSpeed", "MFU", "ms a step (spread)", "planner's ms",
        "planner is off by", "peak, GiB", "estimate", "reserved", "first and last loss",
    )  # fmt: skip
    lines = _table(head, rows)
    optimizers = {r["optimizer"] for r in measured.values()}
    lines += ["", f"Optimizer: {', '.join(sorted(optimizers))}."] if optimizers else []
    published = {r["published"]["of"]: r["published"] for r in measured.values() if r.get("published")}
    lines += [
        f"\nPublished: {p['tokens_per_second']:,} tokens/s, {_percent(p['mfu'])} MFU ({of})."
        for of, p in published.items()
    ]
    return lines


def _kernels(cases: Cases) -> list[str]:
    rows = [
        (
            name,
            f"{r['ms']:.3f}",
            _rate(r.get("rate"), "FLOP/s" if r.get("nominal") else "/s"),
            _share(r.get("rate"), r.get("nominal")),
            _gib(r.get("peak")),
        )
        for name, r in cases.items()
    ]
    return _table(("case", "ms", "rate", "of the data sheet's", "peak above its inputs, GiB"), rows)


_SECTIONS: dict[str, Callable[[Cases], list[str]]] = {
    "machine": _machine,
    "correctness": _parity,
    "ranks": _parity,
    "precision": _precision,
    "memory": _memory,
    "speed": _speed,
    "kernels": _kernels,
}


def _rate(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.1f} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _share(part: float | None, whole: float | None) -> str:
    return "" if part is None or not whole else f"{part / whole:.3f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _gib(size: float | None) -> str:
    return "" if not size else f"{size / 2**30:.3f}"


def _off(estimate: float, measured: float) -> str:
    return "" if not measured else f"{100 * (estimate / measured - 1):+.1f} %"
