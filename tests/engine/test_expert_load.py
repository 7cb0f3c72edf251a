"""Counts of experts' tokens, biases that follow them and the z-loss, beside transformers in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import ranks
from often import often
from parity import dsx_run
from parity.dsx_run import Case
from parity.oracle import ADAMW, CLIPPING, CONFIGS, MICRO_BATCH, tokens

SPEED, Z_LOSS, STEPS = 0.02, 0.05, 3
FAMILIES = {
    "qwen2_moe": CONFIGS["qwen2_moe"],
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 261,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "max_position_embeddings": 32,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    },
}
BALANCED = FAMILIES["qwen2_moe"] | {"output_router_logits": True, "router_aux_loss_coef": 0.2}
MOE = {"bias_update_speed": SPEED, "z_loss": Z_LOSS}


def model_of(config: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)


def by_hand(config: dict[str, Any], case: Case, moe: dict[str, float]) -> dict[str, Any]:
    """Losses, norms, counts of every step, and the biases after it, of transformers' model in one process."""
    model, seen = model_of(config), []
    routers = {name: each for name, each in model.named_modules() if type(each).__name__.endswith("Router")}
    for name, router in routers.items():
        router.register_forward_hook(lambda _, __, out, name=name: seen.append((name, out[0], out[2])))
    experts = int(config.get("num_experts") or config["n_routed_experts"])
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    found: dict[str, Any] = {"losses": [], "norms": [], "counts": [], "biases": []}
    for step in range(STEPS):
        total, counts = 0.0, {name: torch.zeros(experts, dtype=torch.int64) for name in routers}
        optimizer.zero_grad()
        batches = tokens(step, case.rows).split(MICRO_BATCH)
        for batch in batches:
            seen.clear()
            outputs = model(input_ids=batch[:, :-1], use_cache=False)
            loss = F.cross_entropy(outputs.logits.flatten(0, 1), batch[:, 1:].flatten())
            loss = loss + config.get("router_aux_loss_coef", 0) * (getattr(outputs, "aux_loss", None) or 0)
            loss = loss + moe.get("z_loss", 0) * sum((x.logsumexp(-1) ** 2).mean() for _, x, _ in seen)
            (loss / len(batches)).backward()
            total += loss.item() / len(batches)
            for name, _, index in seen:
                counts[name] += index.flatten().bincount(minlength=experts)
        found["losses"].append(total)
        found["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
        biases = []
        for name, count in counts.items():
            if "bias_update_speed" in moe:
                bias = routers[name].e_score_correction_bias
                bias += moe["bias_update_speed"] * torch.sign(count.float().mean() - count)
                biases.append(bias.tolist())
        found["biases"].append(biases)
        found["counts"].append([count.tolist() for count in counts.values()])
    return found


def engine_of(case: Case, folder: Path, moe: dict[str, float]) -> Any:
    import dsx
    from dsx.parallel.groups import make_groups
    from dsx.train.recipe import build_engine

    content = dsx_run.config(case, folder)
    content["dsx"]["moe"] = moe
    config = dsx.load_config(content, world_size=case.world_size)
    groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
    return build_engine(config, groups)


def trained(rank: int, world_size: int, case: Case, folder: Path, moe: dict[str, float]) -> dict[str, Any]:
    engine = engine_of(case, folder, moe)
    found: dict[str, Any] = {"losses": [], "norms": [], "counts": [], "biases": []}
    for step in range(STEPS):
        found["losses"] += dsx_run.losses_of(engine, case, [step])
        found["norms"].append(engine.get_global_grad_norm())
        engine.eval_batch(dsx_run.batches(case, step, engine.groups.dp_rank))  # is not counted
        found["counts"].append(list(engine.expert_load.of_all().values()))
        found["biases"].append(list(biases_of(engine)))
    return found


def biases_of(engine: Any) -> Iterator[list[float]]:
    for name, buffer in engine.pipeline.chunks.named_buffers():
        if name.endswith("e_score_correction_bias"):
            yield buffer.tolist()


def compare(config: dict[str, Any], case: Case, moe: dict[str, float], folder: Path) -> None:
    model_of(config).save_pretrained(folder)
    expected = by_hand(config, case, moe)
    runs = ranks.run(trained, case.world_size, case, folder, moe)
    for run in runs:
        assert run["counts"] == expected["counts"]
        assert run["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert run["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for step in range(STEPS):  # the stages' blocks in order, on each replica
        stages = [run["biases"][step] for run in runs[:: case.world_size // case.pp]]
        together = [bias for stage in stages for bias in stage]
        if case.chunks == 1:
            assert together == [pytest.approx(bias, abs=1e-6) for bias in expected["biases"][step]]
        for place, run in enumerate(runs):
            assert run["biases"][step] == stages[place // (case.world_size // case.pp)]


CASES = {
    "qwen2_moe": [
        (Case(dp=2, ep=2, zero=1), {"z_loss": Z_LOSS}),
        (Case(pp=2, recompute="full"), {"z_loss": Z_LOSS}),
        (Case(tp=2), {"z_loss": Z_LOSS}),
    ],
    "deepseek_v3": [
        (Case(), MOE),
        (Case(dp=2, ep=2, zero=3), MOE),
        (Case(pp=2, recompute="offload"), MOE),
        (Case(cp=2, ep=2, zero=2, recompute="full"), MOE),
        (Case(tp=2), MOE),
        (Case(dp=2, pp=2, ep=2, schedule="zb_h1", zero=1), MOE),
    ],
}


@pytest.mark.parametrize(
    ("family", "case", "moe"),
    often([(family, case, moe) for family, cases in CASES.items() for case, moe in cases], 3),
    ids=str,
)
def test_a_run_counts_moves_biases_and_adds_z_loss_as_one_process(family, case, moe, tmp_path):
    compare(FAMILIES[family], case, moe, tmp_path)


@pytest.mark.parametrize("case", often([Case(cp=2, ep=2), Case(dp=2, ep=2), Case(pp=2)], 3), ids=str)
def test_z_loss_stands_beside_the_familys_own_auxiliary_loss(case, tmp_path):
    compare(BALANCED, case, {"z_loss": Z_LOSS}, tmp_path)


def bf16_then_again(rank: int, world_size: int, folder: Path, saved: Path) -> dict[str, Any]:
    """Biases after a step, after one that is refused, and as another layout loads them."""
    first = Case(dp=2, ep=2, zero=1, bf16=True)
    engine, found = engine_of(first, folder, MOE), {}
    dsx_run.losses_of(engine, first, [0])
    found["moved"] = list(biases_of(engine))
    found["dtypes"] = {each.dtype for n, each in engine.pipeline.chunks.named_buffers() if "correction" in n}
    engine.step_control.refuses = lambda _loss, _norm: True
    dsx_run.losses_of(engine, first, [1])
    found["refused"] = list(biases_of(engine))
    engine.save_checkpoint(saved)
    other = engine_of(Case(pp=2, bf16=True), folder, MOE)
    other.load_checkpoint(saved)
    found["loaded"] = list(biases_of(other))
    return found


def test_biases_stay_fp32_are_saved_and_stand_still_in_a_step_that_is_not_applied(tmp_path):
    model_of(FAMILIES["deepseek_v3"]).save_pretrained(tmp_path / "model")
    runs = ranks.run(bf16_then_again, 2, tmp_path / "model", tmp_path / "saved")
    moved = runs[0]["moved"]
    assert {round(abs(each), 6) for bias in moved for each in bias} in ({SPEED}, {0.0, SPEED})
    for run in runs:
        assert run["dtypes"] == {torch.float32}
        assert run["moved"] == run["refused"] == moved
    assert runs[0]["loaded"] + runs[1]["loaded"] == moved
