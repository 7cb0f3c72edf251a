"""Console lines, metric names and throughput."""

from __future__ import annotations

import io
import math
import os
import pty
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsx.config.resolve import resolve
from dsx.islands.standing import OuterReport
from dsx.terminal import seconds
from dsx.train.progress import (
    EvaluationReport,
    Progress,
    RunRates,
    StepReport,
    compact,
    end_rows,
    rounds_told,
    start_rows,
)

CONFIGS = Path(__file__).parents[2] / "configs"

RATES = RunRates(steps=100, world_size=4, tokens_per_step=4096, flops_per_token=6e6, peak_flops=None)
REPORT = StepReport(
    rates=RATES, step=10, loss=2.91234, grad_norm=1.2345, lr=3e-4, tokens=40_960, step_seconds=0.66
)
EVALUATION = EvaluationReport(step=100, steps=100, loss=2.0, bits_per_byte=2.8854)


def test_mfu_of_palm() -> None:
    """PaLM 540B, arXiv:2204.02311, appendix B: 238.3K tokens/s on 6144 TPU v4 are 46.2% MFU."""
    tokens = 2048 * 2048
    rates = RunRates(
        steps=1,
        world_size=6144,
        tokens_per_step=tokens,
        flops_per_token=6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048,
        peak_flops=275e12,
    )
    report = replace(REPORT, rates=rates, step_seconds=tokens / 238.3e3)
    assert report.mfu == pytest.approx(0.462, abs=0.0005)
    assert report.metrics()["perf/mfu_percent"] == pytest.approx(46.2, abs=0.05)
    assert report.line().endswith("| MFU 46.2%")


def test_metrics_of_a_cpu_run() -> None:
    assert REPORT.metrics() == pytest.approx(
        {
            "train/loss": 2.91234,
            "train/grad_norm_preclip": 1.2345,
            "train/lr": 3e-4,
            "train/tokens": 40_960,
            "perf/tokens_per_second_global": 4096 / 0.66,
            "perf/tokens_per_second_per_gpu": 1024 / 0.66,
            "perf/tflops_per_gpu": 1024 / 0.66 * 6e6 / 1e12,
            "perf/step_seconds": 0.66,
        }
    )


def test_metrics_of_a_gpu_run() -> None:
    report = replace(
        REPORT,
        rates=replace(RATES, peak_flops=1e12),
        bubble=0.125,
        peak_allocated_bytes=3 << 29,
        peak_reserved_bytes=2 << 30,
        estimated_bytes=1 << 30,
    )
    more = {name: value for name, value in report.metrics().items() if name not in REPORT.metrics()}
    assert more == pytest.approx(
        {
            "perf/mfu_percent": 100 * 1024 / 0.66 * 6e6 / 1e12,
            "perf/bubble_percent": 12.5,
            "memory/peak_allocated_gib": 1.5,
            "memory/peak_reserved_gib": 2.0,
            "memory/estimated_gib": 1.0,
        }
    )


def test_evaluation_metrics() -> None:
    assert EVALUATION.metrics() == pytest.approx(
        {"eval/loss": 2.0, "eval/perplexity": math.e**2, "eval/bits_per_byte": 2.8854}
    )
    assert replace(EVALUATION, loss=1e6, bits_per_byte=None).metrics() == {
        "eval/loss": 1e6,
        "eval/perplexity": math.inf,
    }


def test_lines_are_aligned() -> None:
    assert REPORT.line() == (
        "step  10/100 | loss  2.9123 | grad norm    1.23 | lr 3.00e-04 |  6.21k tok/s |  0.66 s/step"
    )
    others = [
        replace(REPORT, step=100, loss=10.5, grad_norm=123.4, lr=1e-5, step_seconds=0.0123),
        replace(REPORT, step=1, loss=0.01, grad_norm=0.00012, lr=0.0, step_seconds=45.678),
        replace(REPORT, step=7, loss=math.nan, grad_norm=None),
    ]
    bars = {
        tuple(i for i, letter in enumerate(report.line()) if letter == "|") for report in (REPORT, *others)
    }
    assert len(bars) == 1
    assert "loss     nan | grad norm       - |" in others[2].line()
    assert replace(REPORT, peak_allocated_bytes=3 << 29).line().endswith("/step | 1.50 GiB")
    assert EVALUATION.line() == "eval 100/100 | loss  2.0000 | perplexity 7.389 | 2.885 bits/byte"


def printed(show: Callable[[Progress], None]) -> list[str]:
    stream = io.StringIO()
    show(Progress(stream))
    return stream.getvalue().splitlines()


def everything(progress: Progress) -> None:
    progress.rows("dsx", [("model", "llama [tiny] " + "x" * 200), ("long label", "v")])
    progress.step(REPORT)
    progress.step(replace(REPORT, loss=math.nan))
    progress.evaluation(EVALUATION)
    progress.note("a [note] 12")
    progress.warning("careful")


PLAIN = [
    "dsx",
    "  model       llama [tiny] " + "x" * 200,
    "  long label  v",
    REPORT.line(),
    replace(REPORT, loss=math.nan).line(),
    EVALUATION.line(),
    "a [note] 12",
    "warning: careful",
]


def test_plain_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    assert printed(everything) == PLAIN  # whole lines, no colours, brackets as they are


def test_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        Progress(stream).step(REPORT)
    text = os.read(controller, 4096).decode()
    os.close(controller)
    assert "\x1b[1m" in text
    assert "2.9123" in text


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    everything(Progress(quiet=True))
    assert capsys.readouterr() == ("", "")
    everything(Progress())
    assert capsys.readouterr().out.splitlines()[-1] == "warning: careful"


def test_start_of_a_3d_run() -> None:
    run = resolve(CONFIGS / "zero3.json", world_size=8)  # degrees are "auto"
    rows = start_rows(run, device_name="CPU", more=[("data", "python-stdlib, 11.4M tokens")])
    text = dict(rows)
    assert text["layout"] == "8 x CPU: pipeline 2 x data 2 x tensor 2, 2 chunks, sequence parallel"
    assert text["training"].startswith(f"interleaved, ZeRO-{run.zero_stage}, fp32")
    assert f"{compact(run.num_parameters)} parameters, fresh weights" in text["model"]
    assert f"{run.global_batch_size} sequences x {run.sequence_length} = " in text["batch"]
    assert [value for label, value in rows if label == "note"] == list(run.notes)
    assert [label for label, _ in rows].index("data") < [label for label, _ in rows].index("note")
    ranks = text["stages"].removeprefix("pipeline rank ").replace("layers ", "").split(" · ")
    held = [span for rank in ranks for span in rank[3:].split(", ")]
    ends = [[int(end) for end in (span.split("-") * 2)[:2]] for span in held]
    layers = [layer for first, last in ends for layer in range(first, last + 1)]
    assert sorted(layers) == list(range(run.stage_map.num_layers))


def test_start_of_one_rank() -> None:
    run = resolve(CONFIGS / "zero3.json", world_size=1)
    text = dict(start_rows(run, device_name="CPU", resumed=True))
    assert text["model"] == f"llama, {compact(run.num_parameters)} parameters"
    assert text["layout"] == "1 x CPU: pipeline 1 x data 1 x tensor 1"
    assert text["training"] == "ZeRO-3, fp32"
    assert "stages" not in text


def test_rates_of_a_run() -> None:
    run = resolve(CONFIGS / "zero3.json", world_size=4)
    rates = RunRates.of(run, device_name="AMD EPYC")
    assert rates.peak_flops is None
    assert (rates.steps, rates.world_size) == (run.dsx.train.steps, 4)
    assert rates.tokens_per_step == run.global_batch_size * run.sequence_length
    assert rates.flops_per_token > 6 * run.num_parameters * 0.5
    bf16 = RunRates.of(replace(run, precision="bf16"), device_name="NVIDIA A100-SXM4-80GB")
    assert bf16.peak_flops == 312e12


def test_a_round_without_others_has_no_drift() -> None:
    alone = OuterReport(
        step=5, share=0, islands=(0,), moved=(0,), version=2, seconds=0.5, waited_seconds=0.5, drift=0.0
    )
    assert rounds_told([alone]) == "round 2: no other island, 0 B sent, 0.50 s"
    assert "drift 0.00" in rounds_told([replace(alone, islands=(0, 1), moved=(0, 1))])


def test_end() -> None:
    rows = end_rows(
        steps=100,
        tokens=409_600,
        elapsed_seconds=65.2,
        evaluation=EVALUATION,
        unigram_bits_per_byte=4.698,
        written={"checkpoint": Path("runs/x/step100"), "wandb": "runs/x/wandb"},
    )
    assert rows == [
        ("trained", "100 steps, 410k tokens, 1 min 05 s"),
        ("held-out loss", "2.0000 nats/token, perplexity 7.389"),
        ("held-out text", "2.885 bits/byte (the bytes' own frequencies: 4.698)"),
        ("checkpoint", "runs/x/step100"),
        ("wandb", "runs/x/wandb"),
    ]
    bare = end_rows(steps=1, tokens=1, elapsed_seconds=0.01, evaluation=None, written={})
    assert bare == [("trained", "1 step, 1 tokens, 10 ms")]
    again = end_rows(steps=12, tokens=12, elapsed_seconds=2.0, resumed_after=8, evaluation=None, written={})
    assert again == [("trained", "12 steps, 12 tokens, those after 8 in 2.00 s")]


def test_numbers() -> None:
    assert compact(math.nan) == "nan"
    assert [compact(n) for n in (0, 999.6, 1000, 6_738_415_616, 2e15)] == ["0", "1k", "1k", "6.74B", "2000T"]
    assert [seconds(s) for s in (59.96, 3599.6)] == ["60.0 s", "1 h 00 min"]
