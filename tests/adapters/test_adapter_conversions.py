"""An adapter's checkpoint as a folder of PEFT's, and merged: what PEFT makes of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ranks
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case

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
    for step in range(2):
        engine.train_batch(dsx_run.batches(case, step, engine.groups.dp_rank))
    engine.save_checkpoint(to)
    export_adapter(engine.pipeline, export, resolved.model, str(base))


@pytest.mark.parametrize(("family", "adapter"), often(CASES, 2), ids=str)
def test_alone_and_merged(family: str, adapter: dict[str, Any], tmp_path: Path, dsx: Any) -> None:
    import dsx as package

    base = oracle.save_model(family, tmp_path / "base")
    case = Case(family=family, tp=2, pp=2, zero=1, accumulation=2, adapter=tuple(adapter.items()))
    ranks.run(_write, 4, case, base, tmp_path / "c", tmp_path / "exported")
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
