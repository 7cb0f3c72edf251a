"""Runs with a fresh adapter: alike in every layout, resumed in another, exported and merged as PEFT does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ranks
from dsx.checkpoint.base import of_today
from dsx.checkpoint.open import open_checkpoint
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case

DORA = (("type", "dora"), ("rank", 4))
# Dropout of inputs that every tensor-parallel rank has whole.
COLUMNS = (("dropout", 0.4), ("targets", ("q_proj", "v_proj", "up_proj")))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.save_model("llama", tmp_path_factory.mktemp("base") / "llama")


def train(
    rank: int, world_size: int, case: Case, base: Path | None, steps: range, folder: Path | None
) -> Any:
    """Losses of some steps, after those of a checkpoint in ``folder``, which gets another."""
    engine, resolved = dsx_run.build(case, base)
    if steps.start and folder is not None:
        engine.load_checkpoint(folder)
    losses = dsx_run.losses_of(engine, case, steps)
    if folder is not None:
        engine.save_checkpoint(folder)
    return losses, dsx_run.gather(engine, resolved, rank)


def losses_of(case: Case, base: Path | None, steps: range, folder: Path | None = None) -> list[float]:
    found: list[float] = ranks.run(train, case.world_size, case, base, steps, folder)[0][0]
    return found


@pytest.mark.parametrize("reads", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_fresh_adapter_changes_nothing_and_starts_alike_in_every_layout(base: Path, reads: bool) -> None:
    """From weights that are read, magnitudes are their norms; from fresh ones, those of the fresh ones."""
    folder, case = base if reads else None, Case(adapter=DORA)
    alone = losses_of(case, folder, range(3))
    assert alone == pytest.approx(losses_of(replace(case, tp=2), folder, range(3)), rel=1e-5)
    whole = losses_of(Case(), folder, range(2))
    assert alone[0] == pytest.approx(whole[0], rel=1e-6)
    assert alone[1] != pytest.approx(whole[1], rel=1e-3)


def test_dropout_is_the_same_on_all_ranks_that_have_the_same_inputs(base: Path) -> None:
    case = Case(adapter=COLUMNS)
    alone = losses_of(case, base, range(3))
    assert alone == pytest.approx(
        losses_of(replace(case, tp=2, sequence_parallel=False), base, range(3)), rel=1e-5
    )
    without = replace(case, adapter=COLUMNS[1:])
    assert alone[1:] != pytest.approx(losses_of(without, base, range(3))[1:], rel=1e-5)


@pytest.mark.slow
def test_bf16_follows_fp32(base: Path) -> None:
    case = Case(adapter=DORA, tp=2, zero=3)
    wide = losses_of(case, base, range(6))
    assert wide == pytest.approx(losses_of(replace(case, bf16=True), base, range(6)), rel=1e-2)


def test_recompute_draws_the_same_dropout(base: Path) -> None:
    case = Case(tp=2, adapter=(("dropout", 0.4), *DORA))
    again = losses_of(replace(case, recompute="full"), base, range(3))
    assert losses_of(case, base, range(3)) == pytest.approx(again, rel=1e-6)


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_layout_and_the_base_keeps_its_bits(
    base: Path, tmp_path: Path
) -> None:
    case = Case(adapter=(*DORA, ("train_also", ("norm",))), tp=2, zero=2)
    whole = losses_of(case, base, range(20))
    assert whole[:10] == losses_of(case, base, range(10), tmp_path)
    other = replace(case, tp=1, pp=2, zero=3)
    losses, own = ranks.run(train, 2, other, base, range(10, 20), tmp_path)[0]
    assert losses == pytest.approx(whole[10:], rel=1e-5)
    for name, tensor in load_file(base / "model.safetensors").items():
        assert torch.equal(own[name], tensor) != ("norm" in name), name


LORA = {"rank": 4, "alpha": 12.0, "targets": "all-linear", "train_also": ["norm"]}
CASES = [
    ("llama", {**LORA, "type": "dora"}),
    ("gpt2", {**LORA, "rslora": True, "train_also": []}),
    ("qwen2", {"rank": 2, "targets": ["q_proj", "up_proj", "down_proj"]}),
    ("gpt2", {**LORA, "type": "dora", "train_also": []}),
]


def _write(rank: int, world_size: int, case: Case, base: Path, to: Path, export: Path) -> None:
    from dsx.checkpoint.run.export import export_adapter

    engine, resolved = dsx_run.build(case, base)
    dsx_run.losses_of(engine, case, range(2))
    engine.save_checkpoint(to)
    export_adapter(engine.pipeline, export, resolved.model, str(base))


@pytest.mark.parametrize(("family", "adapter"), often(CASES, 6), ids=str)
def test_alone_and_merged(family: str, adapter: dict[str, Any], tmp_path: Path, dsx: Any) -> None:
    import dsx as package

    base = oracle.save_model(family, tmp_path / "base")
    case = Case(family=family, tp=2, pp=2, zero=1, accumulation=2, adapter=tuple(adapter.items()))
    ranks.run(_write, 4, case, base, tmp_path / "c", tmp_path / "exported")
    if family == "gpt2":  # as dsx's modules of the family, which are gone, would have written it
        source = open_checkpoint(tmp_path / "c")
        entries, specs = (
            tuple(replace(one, name=one.name.replace(".block.", ".old.")) for one in held)
            for held in (source.entries, source.specs)
        )
        fact = {"family": family, "rope": None, "adapter": source.facts["model"]["adapter"]}
        earlier = replace(source, entries=entries, specs=specs, facts={**source.facts, "model": fact})
        found = of_today(earlier)
        assert {one.name for one in found.entries} == {one.name for one in source.entries}
        assert found.facts["model"] == source.facts["model"]
    alone, merged = tmp_path / "alone", tmp_path / "merged"
    assert dsx("reshard", tmp_path / "c", alone, "--to", "peft")[0] == 0
    assert dsx("reshard", tmp_path / "c", merged, "--to", "hf")[0] == 0
    names = "adapter_model.safetensors"
    got, want = load_file(alone / names), load_file(tmp_path / "exported" / names)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())

    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(base)
        model = PeftModel.from_pretrained(model, alone)
        live = model(input_ids=ids).logits
        theirs = model.merge_and_unload()
        ours = AutoModelForCausalLM.from_pretrained(merged)
        assert torch.allclose(ours(input_ids=ids).logits, live, rtol=0, atol=1e-5)
        peft = dict(theirs.named_parameters())
        for name, tensor in ours.named_parameters():
            assert torch.allclose(tensor, peft[name], rtol=0, atol=1e-6), name
        written, _ = package.load_transformers(tmp_path / "c", tokenizer="bytes")
        assert torch.allclose(written(input_ids=ids).logits, live, rtol=0, atol=1e-5)
    code, _, said = dsx("reshard", tmp_path / "c", tmp_path / "no", "--to", "deepspeed")
    assert code == 2
    assert "with an adapter, which that format has no place for" in said
    assert "no adapter" in dsx("reshard", base, tmp_path / "no", "--to", "peft")[2]
