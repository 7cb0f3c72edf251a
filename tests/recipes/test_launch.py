"""The recipes as a user runs them: real launchers, two ranks, what they print and write, and SIGTERM."""

from __future__ import annotations

import json
import os
import re
import signal
from importlib import metadata
from pathlib import Path

import pytest
from launching import SMALL, ZERO3, Ended, held_out_loss, launch, records, rows, series, started
from transformers import AutoModelForCausalLM

from often import often
from wandb_file import by_step, history, of_kind

STEP = re.compile(
    r"step (\d+)/6 \| loss +([\d.]+) \| grad norm +([\d.]+)"
    r" \| lr ([\d.e+-]+) \| +[\d.]+k? tok/s \| +[\d.]+ m?s/step(?: \| ([\d.]+) MiB)?"
    r" \| [\d.hmins ]+(?:, [\d.hmins ]+ left)?"
)
EVALUATION = re.compile(r"eval 6/6 \| loss +([\d.]+) \| perplexity ([\d.]+) \| ([\d.]+) bits/byte")
TRAIN = {
    "train/step",
    "train/loss",
    "train/grad_norm_preclip",
    "train/lr",
    "train/tokens",
    "train/trained_tokens_percent",
    "perf/tokens_per_second_global",
    "perf/tokens_per_second_per_gpu",
    "perf/tflops_per_gpu",
    "perf/step_seconds",
    "perf/data_percent",
    "memory/estimated_gib",
}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run of :func:`whole` went."""
    return tmp_path_factory.mktemp("whole") / "out"


@pytest.fixture(scope="module")
def whole(output: Path) -> Ended:
    """Six steps on two data-parallel ranks under ZeRO-3, with all that a run can leave."""
    extras = {"dsx.tracking.wandb.mode": "offline", "dsx.train.export_hf": True, "dsx.train.output": output}
    return launch("deepspeed", "gpt_3d.py", ZERO3, SMALL | extras)


def test_one_rank_speaks_and_only_of_the_run(whole: Ended) -> None:
    assert whole.code == 0, whole.text
    told = [line for line in whole.lines if not line.startswith("  ")]
    assert told[0] == "dsx"
    steps = [STEP.fullmatch(line) for line in told[1:7]]
    assert [int(found[1]) for found in steps if found] == [1, 2, 3, 4, 5, 6], whole.text
    assert EVALUATION.fullmatch(told[7])
    assert told[8:] == ["done"]
    assert len(set(whole.lines)) == len(whole.lines)  # each line once: no second rank
    begin = rows(whole.lines, "dsx")
    assert begin["layout"] == "2 x CPU: pipeline 1 x data 2 x tensor 1"
    assert begin["training"] == "ZeRO-3, fp32"


def test_metrics_are_what_the_console_says(whole: Ended, output: Path) -> None:
    *steps, evaluation = records(output)
    assert [row["train/step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    said = [found for line in whole.lines if (found := STEP.fullmatch(line))]
    for row, line in zip(steps, said, strict=True):
        # Tensors are counted in the second step of a process on a CPU.
        counted = {"memory/peak_allocated_gib"} if row["train/step"] > 1 else set()
        assert set(row) == TRAIN | counted
        assert line[5] == (f"{1024 * row['memory/peak_allocated_gib']:.2f}" if counted else None)
        assert line[2] == f"{row['train/loss']:.4f}"
        assert line[3] == f"{row['train/grad_norm_preclip']:.3g}"
        assert line[4] == f"{row['train/lr']:.2e}"
        assert row["train/tokens"] == row["train/step"] * 8 * 64
        assert row["perf/tokens_per_second_global"] == pytest.approx(8 * 64 / row["perf/step_seconds"])
    names = {"train/step", "train/tokens", "eval/loss", "eval/perplexity", "eval/bits_per_byte"}
    assert set(evaluation) == names
    (found,) = (found for line in whole.lines if (found := EVALUATION.fullmatch(line)))
    assert found[1] == f"{evaluation['eval/loss']:.4f}"
    assert found[3] == f"{evaluation['eval/bits_per_byte']:.3f}"


def test_summary_names_what_is_there(whole: Ended, output: Path) -> None:
    end = rows(whole.lines, "done")
    assert end["trained"].startswith("6 steps, 3.07k tokens, ")
    evaluation = records(output)[-1]
    assert end["held-out loss"].startswith(f"{evaluation['eval/loss']:.4f} nats/token")
    assert end["held-out text"].startswith(f"{evaluation['eval/bits_per_byte']:.3f} bits/byte")
    paths = ("metrics", "checkpoints", "resolved config", "Hugging Face model", "W&B run")
    assert all(Path(end[label]).exists() for label in paths)


def test_wandb_has_the_same_records(whole: Ended, output: Path) -> None:
    """So W&B, metrics.jsonl and, by the test above, the console say the same; and W&B knows the files."""
    folder = Path(rows(whole.lines, "done")["W&B run"])
    assert history(folder) == by_step(records(output))
    checkpoint, model = of_kind("artifact", folder)
    for artifact, place in (
        (checkpoint, output / "checkpoints" / "global_step6"),
        (model, output / "hf" / "step6"),
    ):
        assert {entry.ref for entry in artifact.manifest.contents} == {
            path.as_uri() for path in place.iterdir()
        }
        assert json.loads(artifact.metadata)["tokens"] == 6 * 8 * 64
    (run,) = of_kind("run", folder)
    sent = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert sent["mesh"] == {"pp": 1, "dp": 2, "tp": 1}
    assert sent["config"]["dsx"]["train"]["steps"] == 6
    assert sent["environment"]["deepspeed"] == metadata.version("deepspeed")


def test_export_is_the_model_that_was_evaluated(whole: Ended, output: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(output / "hf" / "step6")
    loss = held_out_loss(model, output)
    assert loss == pytest.approx(series(output, "eval/loss")[6], rel=1e-5)


@pytest.mark.slow
def test_three_steps_and_three_more(whole: Ended, output: Path, tmp_path: Path) -> None:
    settings = SMALL | {"dsx.train.output": tmp_path, "dsx.tracking.wandb.mode": "offline"}
    first = launch("torchrun", "gpt_3d.py", ZERO3, settings | {"dsx.train.steps": 3})
    second = launch("torchrun", "gpt_3d.py", ZERO3, settings)
    assert (first.code, second.code) == (0, 0), first.text + second.text
    assert "resumed" not in rows(first.lines, "dsx")
    assert rows(second.lines, "dsx")["resumed"] == "after step 3"
    assert series(tmp_path, "train/loss") == series(output, "train/loss")
    assert series(tmp_path, "train/grad_norm_preclip") == series(output, "train/grad_norm_preclip")
    assert series(tmp_path, "eval/loss")[6] == series(output, "eval/loss")[6]
    runs = [Path(rows(ended.lines, "done")["W&B run"]) for ended in (first, second)]
    assert len({path.name.rpartition("-")[2] for path in runs}) == 1  # the same run goes on
    # No step twice, none left out.
    assert history(runs[0]) + history(runs[1]) == by_step(records(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("axis", often(["tensor", "pipeline"], 2))
def test_layouts_agree(whole: Ended, output: Path, tmp_path: Path, axis: str) -> None:
    """Fresh weights, the order of the data and the batch do not depend on the layout, so the run does not."""
    settings = SMALL | {"dsx.train.output": tmp_path, f"dsx.parallel.{axis}": 2}
    done = launch("torchrun", "gpt_3d.py", ZERO3, settings)
    assert done.code == 0, done.text
    assert f"{axis} 2" in rows(done.lines, "dsx")["layout"]
    for name in ("train/loss", "train/grad_norm_preclip", "eval/loss"):
        assert series(tmp_path, name) == pytest.approx(series(output, name), rel=1e-4)


@pytest.mark.slow
def test_ctrl_c_and_the_same_command_again(whole: Ended, output: Path, tmp_path: Path) -> None:
    settings = SMALL | {"dsx.train.output": tmp_path, "dsx.train.save_every": 2}
    with started("dsx", "gpt_3d.py", ZERO3, settings | {"dsx.train.steps": 1000}) as running:
        running.wait_for("step    3/1000")
        running.press_ctrl_c()
        stopped = running.end()
    assert stopped.code == 130
    assert stopped.text.splitlines()[0] == "... starting DeepSpeed's launcher"
    assert not any(line.startswith("[20") for line in stopped.text.splitlines()), "the launcher's noise"
    # The launcher passes it on as SIGTERM: the ranks save and end, or are killed before they have.
    assert not any("error" in line or "Traceback" in line for line in stopped.lines), stopped.text
    (line,) = [line for line in stopped.lines if line.startswith("stopped after step ")]
    last = int((tmp_path / "checkpoints" / "latest").read_text().removeprefix("global_step"))
    assert line.endswith(
        f"saved as {tmp_path}/checkpoints/global_step{last}: the same command goes on from there"
    )
    assert 'dsx.faults.stop_signals = ["SIGTERM", "SIGINT"]' in stopped.lines[stopped.lines.index(line) + 1]
    steps = last + 2
    again = launch("deepspeed", "gpt_3d.py", ZERO3, settings | {"dsx.train.steps": steps})
    assert again.code == 0, again.text
    assert rows(again.lines, "dsx")["resumed"] == f"after step {last}"
    losses = series(tmp_path, "train/loss")
    assert sorted(losses) == list(range(1, steps + 1))
    shared = [step for step in losses if step <= 6]
    assert {step: losses[step] for step in shared} == {
        step: series(output, "train/loss")[step] for step in shared
    }


def test_plain_python_without_held_out_text(tmp_path: Path) -> None:
    settings = SMALL | {"dsx.train.output": tmp_path, "dsx.data.held_out": 0}
    done = launch("python", "gpt_3d.py", ZERO3, settings)
    assert done.code == 0, done.text
    assert rows(done.lines, "dsx")["layout"] == "1 x CPU: pipeline 1 x data 1 x tensor 1"
    assert not any("eval" in line or "held-out" in line for line in rows(done.lines, "done"))
    assert not any(line.startswith("eval") for line in done.lines)
    assert len(series(tmp_path, "train/loss")) == 6

    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = launch("python", "gpt_3d.py", ZERO3, settings)
    assert again.code == 0, again.text
    assert "step 6 of dsx.train.steps = 6 is done" in rows(again.lines, "dsx")["complete"]
    assert [line for line in again.lines if not line.startswith("  ")] == ["dsx"]
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_stopped_run_saves_and_goes_on(tmp_path: Path) -> None:
    settings = SMALL | {"dsx.train.output": tmp_path, "dsx.parallel.pipeline": 2}
    with started("torchrun", "gpt_3d.py", ZERO3, settings | {"dsx.train.steps": 100_000}) as running:
        running.wait_for("step ")
        os.kill(running.pid, signal.SIGTERM)
        ended = running.end()
    assert ended.code == 1, ended.text  # torchrun's, whatever its ranks end with
    (told,) = [line for line in ended.lines if line.startswith("warning: a signal asked the run to stop")]
    (tag,) = [path.name for path in (tmp_path / "checkpoints").glob("global_step*")]
    step = int(tag.removeprefix("global_step"))
    assert f"saves step {step} and ends" in told
    saved = tmp_path / "checkpoints" / tag
    assert ended.lines[-1] == (
        f"stopped after step {step} of 100000; saved as {saved}: the same command goes on from there"
    )
    assert [*series(tmp_path, "train/loss")] == [*range(1, step + 1)]
    (tmp_path / "checkpoints" / "latest").unlink()  # as a kill before the very first one is named leaves it
    changed = {"dsx.train.steps": step + 2, "optimizer.params.weight_decay": 0.7}
    again = launch("torchrun", "gpt_3d.py", ZERO3, settings | changed)
    assert again.code == 0, again.text
    (warning,) = [line for line in again.lines if line.startswith("warning: ")]
    assert "optimizer.params.weight_decay = 0.7 is not taken" in warning
    assert warning.endswith("goes on with the checkpoint's 0.1")
    assert f"after step {step}" in again.text
    assert [*series(tmp_path, "train/loss")] == [*range(1, step + 3)]
    assert not (tmp_path / "faults").exists()
    longer = launch("torchrun", "gpt_3d.py", ZERO3, settings | changed | {"dsx.data.sequence_length": 32})
    assert longer.code == 1, longer.text  # torchrun's
    assert "dsx.data.sequence_length = 32 here: the data position would mean nothing" in longer.text
