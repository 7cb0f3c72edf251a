"""Adapters on a base in 8 or 4 bits train like one process of transformers, PEFT and bitsandbytes."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import dsx
import ranks
from adapters.test_adapter_parity import DORA, PLAIN, STEPS, Kind, fresh, steps
from dsx.errors import CheckpointError, ConfigError
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case

NARROW = Kind(targets=("q_proj", "down_proj"))
CASES = [
    (Case(tp=2, pp=2, zero=2), PLAIN, "nf4"),
    (Case(tp=2), DORA, "int8"),
    (Case(dp=2, zero=3), DORA, "nf4"),
    (Case(), NARROW, "nf4"),
    (Case(), PLAIN, "int8"),
    (Case(tp=2, sequence_parallel=False), NARROW, "nf4"),
    (Case(pp=2, chunks=2, recompute="full"), PLAIN, "int8"),
    (Case(pp=2, schedule="zb_h1", zero=1), PLAIN, "nf4"),
    (Case(tp=2, pp=2, schedule="zbv", chunks=2, zero=3), DORA, "int8"),
    (Case(tp=2, recompute="selective"), PLAIN, "nf4"),
    (Case(tp=2, family="llama-one-head"), DORA, "nf4"),
    (Case(tp=2, pp=2, family="llama-one-head", schedule="zb_h1"), NARROW, "int8"),
    (Case(tp=2, implementation="transformers", zero=3), PLAIN, "nf4"),
    (Case(tp=2, pp=2, implementation="transformers", zero=2), DORA, "int8"),
    (Case(tp=2, implementation="transformers", family="llama-one-head"), PLAIN, "int8"),
    (Case(pp=2, implementation="transformers", schedule="zb_h1"), DORA, "nf4"),
    (Case(pp=2, zero=1, dp=2), PLAIN, "nf4_double"),
    (Case(implementation="transformers", zero=3, dp=2), DORA, "nf4_double"),
    (Case(recompute="full", family="llama-one-head"), PLAIN, "nf4_double"),
]

# LLM.int8 keeps columns of inputs above a threshold as they are and quantises the others, which dsx does not
# do. With this threshold it keeps all, so that the weights alone are quantised.
_ALL = 1e-30


def in_bits(form: str, threshold: float) -> BitsAndBytesConfig:
    if form == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=form == "nf4_double",
    )


@cache
def start(family: str, kind: Kind, folder: Path) -> Path:
    """A model's folder, and in it that of an adapter."""
    folder = folder / f"{family}-{abs(hash(kind))}"
    oracle.save_model(family, folder / "base")
    fresh(family, kind).save_pretrained(folder / "start")
    return folder


@cache
def reference(
    family: str, kind: Kind, rows: int, form: str, folder: Path, threshold: float = _ALL
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and the adapter of a run of PEFT's on bitsandbytes' linears."""
    at = start(family, kind, folder)
    model = AutoModelForCausalLM.from_pretrained(
        at / "base", quantization_config=in_bits(form, threshold), dtype=torch.float32, device_map="cpu"
    )
    model = PeftModel.from_pretrained(model, at / "start", is_trainable=True)
    losses, norms = steps(model.train(), rows)  # else bitsandbytes computes in bfloat16 on some CPUs
    end = at / f"end-{form}-{rows}-{threshold}"
    model.save_pretrained(end)
    return losses, norms, load_file(end / "adapter_model.safetensors")


def bits(engine: Any) -> list[str]:
    """Of every quantised matrix here what it holds."""
    from dsx.nn.quantized import Quantized

    held = [each for module in engine.pipeline.modules() for each in vars(module).values()]
    return [
        hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for each in held
        if isinstance(each, Quantized)
        for tensor in (each.numbers, each.scales)
    ]


def train(rank: int, world_size: int, case: Case, base: Path, out: Path) -> Any:
    """Train and export; gives losses and norms, and the base's bits before and after."""
    from dsx.checkpoint.run.export import export_hf

    engine, _ = dsx_run.build(case, base)
    before = bits(engine)
    losses, norms = dsx_run.losses_and_norms(engine, case, range(STEPS))
    export_hf(engine, out)
    return losses, norms, before, bits(engine)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.mark.parametrize(("case", "kind", "form"), often(CASES, 33), ids=str)
def test_an_adapter_trains_as_on_linears_of_bitsandbytes(
    case: Case, kind: Kind, form: str, folder: Path, tmp_path: Path
) -> None:
    family = f"{case.family}-wide"
    at = start(family, kind, folder)
    case = replace(case, family=family, adapter=(("path", str(at / "start")), ("quantization", form)))
    expected, expected_norms, theirs = reference(family, kind, case.rows, form, folder)
    results = ranks.run(train, case.world_size, case, at / "base", tmp_path / "out")
    losses, norms, *_ = results[0]
    # What both make of the same numbers differs by the order of sums alone.
    assert losses == pytest.approx(expected, rel=1e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    ours = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=0, atol=1e-5), name
    if form == "int8":  # bitsandbytes quantises most inputs, too, to 8 bits
        assert losses == pytest.approx(reference(family, kind, case.rows, form, folder, 6.0)[0], rel=1e-2)
    for *_, before, after in results:
        assert before
        assert before == after


def resumed(rank: int, world_size: int, case: Case, base: Path, folder: Path, start: int, stop: int) -> Any:
    """Train from the checkpoint there is, if any; gives losses, the base's bits and an export's error."""
    from dsx.checkpoint.run.export import export_weights

    engine, resolved = dsx_run.build(case, base)
    if start:
        engine.load_checkpoint(folder)
    losses = dsx_run.losses_of(engine, case, range(start, stop))
    engine.save_checkpoint(folder, tag=f"step{stop}")
    try:
        export_weights(engine.pipeline, folder / "whole", resolved.hf_config)
    except CheckpointError as error:
        return losses, bits(engine), str(error)
    return losses, bits(engine), ""


def test_a_resumed_run_quantises_the_same_base_to_the_same_bits(folder: Path, tmp_path: Path) -> None:
    at = start("llama-wide", PLAIN, folder)
    adapter = (("path", str(at / "start")), ("quantization", "nf4"))
    case = Case(family="llama-wide", dp=2, zero=1, adapter=adapter)
    args = (case, at / "base")
    whole = ranks.run(resumed, 2, *args, tmp_path / "once", 0, 4)[0]
    first = ranks.run(resumed, 2, *args, tmp_path / "twice", 0, 2)[0]
    second = ranks.run(resumed, 2, *args, tmp_path / "twice", 2, 4)[0]
    assert first[0] + second[0] == whole[0]
    assert first[1] == second[1] == whole[1]
    assert "merge it into the original with dsx reshard" in whole[2]
    held = sum(file.stat().st_size for file in (tmp_path / "once").rglob("*") if file.is_file())
    assert held < (at / "base" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("shape", [(96, 32), (3, 48), (64, 96), (130, 64)])
def test_parts_of_rows_are_read_back_as_blocks_of_64_numbers(shape: tuple[int, int]) -> None:
    """Beside the nearest of bitsandbytes' 16 numbers in each block; tensor parallelism cuts rows anywhere."""
    from bitsandbytes.functional import get_4bit_type

    from dsx.nn.parallel import TensorParallel
    from dsx.nn.quantized import _quantized

    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    blocks = torch.nn.functional.pad(matrix.flatten(), (0, -matrix.numel() % 64)).view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    numbers = get_4bit_type("nf4", device="cpu")
    nearest = numbers[((blocks / largest).unsqueeze(-1) - numbers).abs().argmin(-1)] * largest
    expected = nearest.flatten()[: matrix.numel()].view(shape)
    assert torch.equal(_quantized(matrix, "nf4", TensorParallel()).tensor(), expected)


def test_a_config_is_refused_where_bitsandbytes_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dsx_run.config(Case(adapter=(("quantization", "nf4"),)), None)
    monkeypatch.setattr("dsx.config.adapter.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"bitsandbytes is missing.*pip install"):
        dsx.load_config(config, world_size=1)
