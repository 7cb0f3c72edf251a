"""``dsx verify`` as a user meets it: what it prints, its exit codes, and ranks that fail or hang."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import ranks
from dsx.config.resolve import resolve
from dsx.models.presets import Preset, presets
from often import often

COMMAND = ("verify",)
USER = Path(__file__).parents[1] / "verify" / "user_pipeline.py"


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    """The harness's fork server, which other tests' ranks need: the first to start one has it his way."""
    ranks.run(max, 1)


def deepspeed(tmp_path: Path, **more: Any) -> Path:
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-5, "torch_adam": True}},
        **more,
    }
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content))
    return file


def block_of(tmp_path: Path, model: dict[str, Any], sequence_length: int = 64) -> dict[str, Any]:
    return {
        "model": model,
        "data": {"sequence_length": sequence_length, "tokenizer": "bytes"},
        "train": {"steps": 1, "output": str(tmp_path / "out")},
    }


def children() -> set[int]:
    """Processes below this one that train: the fork server and its tracker stay, waiting."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                text = (folder / "environ").read_bytes()
                if b"DSX_VERIFY_TEST" in text and b"forkserver" not in (folder / "cmdline").read_bytes():
                    found.add(int(folder.name))
            except OSError:
                continue
    return found - {os.getpid()}


def test_stock_deepspeed_clips_by_one_stages_norm_in_fp32(dsx, tmp_path: Path) -> None:
    """deepspeed/runtime/utils.py, clip_grad_norm_: only model-parallel rank 0 counts what is not sharded."""
    code, out, err = dsx(deepspeed(tmp_path), "--gpus", 2, "--steps", 1, "--stock", f"{USER}:make_model")
    assert (code, err) == (1, "")
    guide = (Path(__file__).parents[2] / "docs/guides/checking.md").read_text()
    (shown,) = re.findall(
        r"^```text\n(differs    step 1: norm of one stage\n.*?)^```$", guide, re.DOTALL | re.MULTILINE
    )
    figure = r"\d+\.\d+"
    assert re.sub(figure, "#", shown) in re.sub(figure, "#", out)
    expected = [float(value) for value in re.findall(figure, shown)]
    got = [float(value) for value in re.findall(figure, out.partition("differs ")[2].partition("took ")[0])]
    assert got == pytest.approx(expected, rel=1e-5)


def test_the_same_model_under_dsx_is_equal(dsx, tmp_path: Path) -> None:
    code, out, err = dsx(
        deepspeed(tmp_path), "--gpus", 2, "--steps", 2, "--model", f"{USER}:make_model", "--format", "json"
    )
    assert (code, err) == (0, "")
    verdict = json.loads(out)
    assert verdict["equal"] is True
    assert verdict["findings"] == []
    assert [row["step"] for row in verdict["rows"]] == [1, 2, 1, 2]
    assert all(row["gradient"] < 1e-5 and row["update"] < 1e-5 for row in verdict["rows"])


def test_an_ordinary_json_takes_a_model_by_name(tmp_path: Path) -> None:
    """The same word as of estimate and plan, beside a function of one's own."""
    from dsx.cli.verify import _source

    file = tmp_path / "ds_config.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 2}')
    content, own = _source(file, "gpt2/tiny", ["zero_optimization.stage=2"])
    run = resolve(content, world_size=2)
    assert (own, run.model.family, run.zero_stage, run.micro_batch_size) == (None, "gpt2", 2, 2)
    assert _source(file, "mine.py:make", []) == (file, "mine.py:make")
    assert _source(file, None, []) == (file, None)


def test_a_config_of_dsx(dsx, tmp_path: Path) -> None:
    block = block_of(tmp_path, {"family": "llama", "preset": "tiny"})
    file = deepspeed(tmp_path, zero_optimization={"stage": 1}, dsx=block)
    code, out, _ = dsx(file, "--gpus", 2, "--steps", 1, "--set", "dsx.parallel.tensor=2")
    assert code == 0, out
    assert "layout     dsx, tensor 2 x pipeline 1 x data 1 = 2 ranks, sequence parallel" in out
    assert "reference  transformers LlamaForCausalLM, one process, fp32; updates: torch.optim.AdamW" in out
    assert "hidden_size: 128 -> 64" in out
    assert "equal      losses, norms, gradients and updates are those of one process" in out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("preset", often([p for p in presets() if p.name != "tiny"], every=19), ids=repr)
def test_every_published_model(dsx, tmp_path: Path, preset: Preset) -> None:
    """Its small likeness trains as transformers' does: the sizes it shrinks to are some its family takes."""
    block = block_of(tmp_path, {"family": preset.family, "preset": preset.name})
    pipeline = ("--set", "dsx.parallel.pipeline=2", "--set", "dsx.parallel.tensor=1")
    code, out, err = dsx(deepspeed(tmp_path, dsx=block), "--gpus", 2, "--steps", 1, *pipeline)
    assert (code, err) == (0, ""), out


@pytest.mark.parametrize(("tensor", "heads"), often([(3, 6), (2, 6), (2, 2)], every=3))
def test_a_vocabulary_that_tensor_parallelism_does_not_divide(
    dsx, tmp_path: Path, tensor: int, heads: int
) -> None:
    """Its rows are padded, also to a multiple of 1; heads x head_dim is not the hidden size."""
    llama = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": heads}
    sizes = {"num_key_value_heads": heads, "head_dim": 16, "intermediate_size": 96, "vocab_size": 257}
    block = block_of(tmp_path, {"config": llama | sizes, "vocab_multiple": 1}, sequence_length=24)
    block["parallel"] = {"tensor": tensor}
    file = deepspeed(tmp_path, zero_optimization={"stage": 1}, dsx=block)
    code, out, err = dsx(file, "--gpus", tensor, "--steps", 2, "--full")
    assert (code, err) == (0, ""), out


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("nowhere:make_model", "cannot import it (No module named 'nowhere')"),
        (f"{USER}:empty", "what it returns lacks layers, num_stages, batch"),
        (f"{USER}:nothing", "it returns NoneType, not a dict"),
    ],
)
def test_entry_points_that_are_none(dsx, tmp_path: Path, entry: str, says: str) -> None:
    code, out, err = dsx(deepspeed(tmp_path), "--gpus", 2, "--model", entry)
    assert (code, out) == (2, "")
    assert says in err


def test_usage(dsx, tmp_path: Path) -> None:
    file = deepspeed(tmp_path)
    model = f"{USER}:make_model"
    code, _, err = dsx(file, "--gpus", 3, "--model", model)
    assert code == 2
    assert "num_stages = 2, which does not divide it. Fix: use a multiple of 2." in err
    code, _, err = dsx(file, "--gpus", 2, "--model", model, "--stock", model)
    assert (code, "give one of --model and --stock" in err) == (2, True)
    code, _, err = dsx(file, "--gpus", 2)
    assert (code, "the config has no dsx block" in err) == (2, True)


@pytest.mark.parametrize(
    ("function", "timeout", "says"),
    [
        ("fails", 100, ["rank 1 of 2: it failed", "ValueError: no such luck", "in forward"]),
        ("hangs", 10, ["they had not ended after 10 s; where each was", '  File "', "--timeout"]),
    ],
)
def test_ranks_that_fail_or_hang(
    dsx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, timeout: int, says: list[str]
) -> None:
    monkeypatch.setenv("DSX_VERIFY_TEST", "1")
    code, out, err = dsx(
        deepspeed(tmp_path), "--gpus", 2, "--timeout", timeout, "--model", f"{USER}:{function}"
    )
    assert (code, out) == (2, "")
    for text in says:
        assert text in err
    assert not children(), "a rank is left"
