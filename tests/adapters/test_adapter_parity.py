"""Adapters train in any layout like one process of transformers and PEFT with torch's AdamW."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ranks
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case

STEPS = 4
ALSO = ("embed_tokens", "lm_head", "norm")


@dataclass(frozen=True)
class Kind:
    """An adapter, in PEFT's words."""

    dora: bool = False
    rslora: bool = False
    targets: str | tuple[str, ...] = "all-linear"
    also: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    def peft(self, rank: int = 4) -> LoraConfig:
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=12,
            use_dora=self.dora,
            use_rslora=self.rslora,
            target_modules=self.targets if isinstance(self.targets, str) else list(self.targets),
            modules_to_save=list(self.also) or None,
            target_parameters=list(self.parameters) or None,
            ensure_weight_tying=bool(self.also),
        )


PLAIN, DORA = Kind(), Kind(dora=True)
SOME = Kind(rslora=True, targets=("q_proj", "v_proj", "down_proj"))
EXPERTS = Kind(targets=("q_proj",), parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
GATHERED = (("stage3_param_persistence_threshold", 0),)
"""Under ZeRO-3 the smallest parameter is gathered too."""
CASES = [
    (Case(tp=2), PLAIN),
    (Case(tp=2), DORA),
    (Case(tp=2, sequence_parallel=False), DORA),
    (Case(pp=2, chunks=2), SOME),
    (Case(dp=2, zero=3, zero_keys=GATHERED), DORA),
    (Case(tp=2, pp=2, zero=2), PLAIN),
    (Case(tp=2, pp=2, zero=3, zero_keys=GATHERED), DORA),
    (Case(pp=2, schedule="zb_h1", zero=1), PLAIN),
    (Case(tp=2, pp=2, schedule="zbv", chunks=2), Kind(dora=True, targets=("q_proj", "v_proj", "up_proj"))),
    (Case(tp=2, pp=2, schedule="zbv", chunks=2, zero=3, zero_keys=GATHERED), replace(SOME, also=ALSO)),
    (Case(pp=2, recompute="full"), PLAIN),
    (Case(tp=2, recompute="selective"), SOME),
    (Case(tp=2, family="llama-one-head"), Kind(dora=True, targets=("q_proj", "v_proj"))),
    (Case(tp=2, family="llama-one-head", schedule="zb_h1", pp=2), Kind(targets=("v_proj",))),
    (Case(tp=2, family="qwen2"), replace(DORA, also=("embed_tokens",))),
    (Case(tp=2, pp=2, family="qwen2", zero=2), replace(SOME, also=("embed_tokens",))),
    (Case(tp=2, pp=2, family="gpt2", zero=1), DORA),
    (Case(dp=2, family="gpt2", zero=3, zero_keys=GATHERED), PLAIN),
    (Case(tp=2, pp=2, chunks=2, family="gpt_neox"), PLAIN),
    (Case(tp=2, family="gpt_neox", sequence_parallel=False), DORA),
    (Case(tp=2, pp=2, family="gemma2", zero=2), DORA),
    (Case(dp=2, family="gemma2", zero=3), SOME),
    (
        Case(cp=2, family="bamba-mamba", zero=3, zero_keys=GATHERED, recompute="full"),
        Kind(dora=True, targets=("in_proj", "q_proj")),
    ),
    (
        Case(cp=2, pp=2, family="qwen3_next-delta", zero=3, zero_keys=GATHERED, schedule="zb_h1"),
        Kind(targets=("out_proj", "o_proj")),
    ),
    (Case(tp=2, implementation="transformers", family="qwen2"), DORA),
    (Case(tp=2, implementation="transformers", family="qwen2", sequence_parallel=False), PLAIN),
    (
        Case(
            tp=2,
            pp=2,
            implementation="transformers",
            family="qwen2",
            zero=3,
            zero_keys=GATHERED,
            recompute="full",
        ),
        PLAIN,
    ),
    (Case(tp=2, implementation="transformers", family="llama-one-head"), DORA),
    (Case(tp=2, pp=2, implementation="transformers", schedule="zb_h1", zero=2), SOME),
    (Case(dp=2, pp=2, chunks=2, implementation="transformers", family="gpt_neox", zero=1), PLAIN),
    (Case(tp=2, pp=2, implementation="transformers", family="qwen2"), replace(SOME, also=("embed_tokens",))),
    (Case(tp=2, family="qwen2_moe"), PLAIN),
    (Case(dp=2, family="qwen2_moe", zero=3, zero_keys=GATHERED), EXPERTS),
    (Case(tp=2, family="qwen2_moe"), EXPERTS),
    (Case(tp=2, pp=2, family="qwen2_moe", zero=2, schedule="zb_h1"), EXPERTS),
    (Case(tp=2, family="qwen2_moe", sequence_parallel=False, recompute="full"), EXPERTS),
    (Case(tp=2, family="qwen2_moe"), replace(EXPERTS, parameters=("down_proj",), also=("lm_head",))),
]


def fresh(family: str, kind: Kind) -> Any:
    """A model with an adapter away from its trivial start."""
    model = get_peft_model(oracle.hf_model(family), kind.peft())
    torch.manual_seed(23)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
            elif "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
    return model


@dataclass(frozen=True)
class Trained:
    """What PEFT leaves: losses, gradient norms and its folder."""

    losses: list[float]
    norms: list[float]
    folder: Path


@cache
def reference(family: str, kind: Kind, rows: int, folder: Path) -> Trained:
    """Train with PEFT; its first folder is ``start``, its last one ``end``."""
    folder = folder / f"{family}-{abs(hash(kind))}-{rows}"
    oracle.save_model(family, folder / "base")
    model = fresh(family, kind)
    model.save_pretrained(folder / "start")
    losses, norms = steps(model, rows)
    model.save_pretrained(folder / "end")
    return Trained(losses, norms, folder)


def steps(model: Any, rows: int) -> tuple[list[float], list[float]]:
    """Train with torch's AdamW; gives losses and gradient norms."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **oracle.ADAMW)
    losses, norms = [], []
    for step in range(STEPS):
        batch = oracle.tokens(step, rows)
        logits = model(input_ids=batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, oracle.CLIPPING)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def train(rank: int, world_size: int, case: Case, base: Path, out: Path) -> Any:
    """Train and export what was trained; rank 0 gives losses, norms and the model's own weights."""
    from dsx.checkpoint.run.export import export_hf

    engine, resolved = dsx_run.build(case, base)
    losses, norms = dsx_run.losses_and_norms(engine, case, range(STEPS))
    export_hf(engine, out)
    own = dsx_run.gather(engine, resolved, rank)
    return (losses, norms, own) if rank == 0 else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.mark.parametrize(("case", "kind"), often(CASES, 19), ids=str)
def test_an_adapter_trains_as_with_peft(case: Case, kind: Kind, folder: Path, tmp_path: Path) -> None:
    expected = reference(case.family, kind, case.rows, folder)
    case = replace(case, adapter=(("path", str(expected.folder / "start")),))
    base = expected.folder / "base"
    results = ranks.run(train, case.world_size, case, base, tmp_path / "out")
    losses, norms, own = results[0]
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert norms == pytest.approx(expected.norms, rel=1e-5)
    ours, theirs = (
        load_file(at / "adapter_model.safetensors") for at in (tmp_path / "out", expected.folder / "end")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=0, atol=1e-5), name
    also = {name.removeprefix("base_model.model.") for name in theirs if "lora_" not in name}
    for name, tensor in load_file(base / "model.safetensors").items():
        assert name in also or torch.equal(own[name], tensor), name
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), expected.folder / "end")
    ids = oracle.tokens(99, 2)
    assert torch.allclose(model(ids).logits, again(ids).logits, rtol=0, atol=1e-4)
