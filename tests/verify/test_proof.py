"""The proof at start: right layouts pass it, planted mistakes end the run, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from all_families.tiny import tiny_config
from deepspeed.pipe import LayerSpec
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import ranks
from dsx.config.resolve import resolve
from dsx.errors import DsxError, LayoutError
from dsx.hub.model_structure import structure_of
from dsx.models.params import param_specs
from dsx.models.spec import Adapter
from dsx.train import proof
from dsx.verify import diagnosis
from dsx.verify.diagnosis import FAMILY
from dsx.verify.reference import family_layers, fresh_weights
from often import often
from verify import user_pipeline
from verify.mistakes import FAULTS, Fault, replaced
from verify.test_verify_faults import CASES
from verify.test_verify_faults import LAYOUTS as LAYOUTS_OF_VERIFY

QWEN3 = {"model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
QWEN3 |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def content(output: Path, *, zero: int = 1, **block: Any) -> dict[str, Any]:
    """A config of a small model."""
    model = block.pop("model", {"config": QWEN3, "implementation": "transformers"})
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        "dsx": {
            "model": model,
            "data": {"source": "own", "sequence_length": 32},
            "train": {"steps": 2, "output": str(output)},
            **block,
        },
    }


def _proved(
    rank: int, world_size: int, given: dict[str, Any], home: str, plant: str
) -> tuple[str, list[float]]:
    """The line of the header, and numbers of a run that comes after the proof."""
    Path.home = lambda: Path(home)  # type: ignore[method-assign]
    if plant:
        PLANTS[plant](rank)
    from dsx.launch.processes import distributed
    from dsx.train import recipe
    from dsx.verify.subject import random_tokens

    config = resolve(given, world_size=world_size)
    parallel = config.dsx.parallel
    with distributed(config.mesh, sequence_parallel=parallel.sequence_parallel, seed=7) as groups:
        engine = recipe.build_engine(config, groups)
        figures = []
        for step in range(2):
            batches = (random_tokens(config, step, index) for index in range(config.accumulation))
            figures += [float(engine.train_batch(batches)), float(engine.get_global_grad_norm())]
        drawn = float(torch.rand(()))
    return engine.pipeline.proof or "", [*figures, drawn]


def proved(given: dict[str, Any], size: int, home: Path, plant: str = "") -> list[tuple[str, list[float]]]:
    return ranks.run(_proved, size, given, str(home), plant, proved=True)


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # name -> ranks, ZeRO stage, block
    "tensor x pipeline": (4, 1, {"parallel": {"tensor": 2, "pipeline": 2, "chunks": 2}}),
    "dsx's modules, ZeRO-3": (
        4,
        3,
        {
            "parallel": {"tensor": 2, "pipeline": 1},
            "model": {"config": {**QWEN3, "tie_word_embeddings": True}, "implementation": "dsx"},
        },
    ),
    "adapter": (2, 2, {"parallel": {"pipeline": 2}, "adapter": {"rank": 4}}),
    "frozen": (
        2,
        0,
        {"parallel": {"tensor": 2}, "train": {"steps": 2, "freeze": ["embed_tokens", r"layers\.0\."]}},
    ),
    "documents apart": (2, 1, {"parallel": {"tensor": 2}, "data": {"documents": "apart"}}),
    "zero-bubble": (2, 1, {"parallel": {"pipeline": 2}, "schedule": {"name": "zb_h1"}}),
    "context": (2, 3, {"parallel": {"context": 2}, "model": {"config": QWEN3, "implementation": "dsx"}}),
}


@pytest.mark.parametrize("name", often(LAYOUTS, 8))
def test_a_proof_says_how_near_and_changes_nothing(name: str, tmp_path: Path) -> None:
    size, zero, block = LAYOUTS[name]
    for key in ("data", "train"):
        if key in block:
            base = content(tmp_path, zero=zero)["dsx"][key]
            block = {**block, key: {**base, **block[key]}}
    given = content(tmp_path, zero=zero, **block)
    off = json.loads(json.dumps(given))
    off["dsx"]["proof"] = "off"
    told, plain = proved(given, size, tmp_path), proved(off, size, tmp_path)
    assert all(" as one process: loss " in line for line, _ in told)
    assert all(line == 'not: "dsx.proof" is off' for line, _ in plain)
    assert [figures for _, figures in told] == [figures for _, figures in plain]
    again = proved(given, size, tmp_path)
    assert all("kept from an earlier start" in line for line, _ in again)


def _large_loss(_rank: int) -> None:
    """The loss is a thousandth too large."""
    from dsx.nn import loss

    right = loss.TokenMean.__call__
    loss.TokenMean.__call__ = lambda self, *a, **k: right(self, *a, **k) * 1.001  # type: ignore[method-assign]


def _other_attention(rank: int) -> None:
    """One tensor-parallel rank's attention output is off."""
    right = nn.functional.scaled_dot_product_attention
    if rank % 2:
        nn.functional.scaled_dot_product_attention = lambda *a, **k: right(*a, **k) * 1.01  # type: ignore[assignment]


PLANTS: dict[str, Callable[[int], None]] = {"loss": _large_loss, "attention": _other_attention}


@pytest.mark.parametrize("plant", often(["attention", "loss"], 2))
def test_a_mistake_ends_the_run_before_it_trains(plant: str, tmp_path: Path) -> None:
    given = content(tmp_path, parallel={"tensor": 2, "pipeline": 1})
    with pytest.raises(ranks.RankError) as failed:
        proved(given, 2, tmp_path, plant)
    error = failed.value.error
    assert isinstance(error, LayoutError)
    assert "qwen3 over tensor 2: a small model of this config does not train here as one process" in str(
        error
    )
    assert '{"dsx": {"proof": "off"}}' in error.fix
    assert not list(tmp_path.rglob("*.json"))


def _own_keys(_rank: int) -> None:
    """Each rank's queries see its own keys in the place of the others'."""
    from dsx.nn import collectives

    collectives.gather_rows = lambda x, cp, dim=1: torch.cat([x] * cp.size, dim)  # type: ignore[assignment]


PLANTS["keys"] = _own_keys


def _other_plan(_rank: int) -> None:
    """The small model's attention stays whole."""
    from dsx.verify import small_step

    made = small_step.trial

    def trial(config: Any, **how: Any) -> Any:
        small = made(config, **how)
        small.content["dsx"]["parallel"]["tensor_plan"] = {"model.layers.*.self_attn.o_proj": None}
        return small

    small_step.trial = trial


PLANTS["plan"] = _other_plan


def test_a_small_model_that_is_cut_otherwise_vouches_for_nothing(tmp_path: Path) -> None:
    with pytest.raises(ranks.RankError) as failed:
        proved(content(tmp_path, parallel={"tensor": 2, "pipeline": 1}), 2, tmp_path, "plan")
    assert "dsx.parallel.tensor = 2: the tensor plan of the small model is another" in str(failed.value.error)


def test_attention_that_does_not_see_whole_rows_ends_the_run(tmp_path: Path) -> None:
    given = content(tmp_path, parallel={"context": 2}, model={"config": QWEN3, "implementation": "dsx"})
    with pytest.raises(ranks.RankError) as failed:
        proved(given, 2, tmp_path, "keys")
    error = failed.value.error
    assert "qwen3 over context 2: a small model" in str(error)
    assert "attention over the parts of rows" in str(error)
    assert error.fix.startswith("set dsx.parallel.context to 1, with which it trains right")


# `dsx verify` drops for these, and keeps low precisions; a proof does not.
_LATER = "dropout"
# It looks at dsx's own layers in one process, too, whose loss counts as the ranks' does.
_OTHERWISE = {"ignored labels counted": FAMILY}
PLANTED = [
    (layout, fault, _OTHERWISE.get(fault, cause))
    for layout, fault, cause, _, _ in CASES
    if layout not in ("bf16", "fp16") and _LATER not in fault
]


def _causes(_rank: int, world_size: int, planted: list[tuple[str, str]]) -> list[str | None]:
    """What the proof names under each mistake; None where it proves."""
    from dsx.launch import processes
    from dsx.parallel.groups import make_groups
    from dsx.verify import small_step

    found = []
    for layout, fault in planted:
        config = resolve(LAYOUTS_OF_VERIFY[layout], world_size=world_size)
        groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
        with FAULTS[fault]():
            processes.seed_generators(groups, 0)
            shown = small_step._tried(config, groups, 0.01 if fault == "never clipped" else 0.0)
        found.append(getattr(shown, "cause", None))
    return found


@pytest.mark.parametrize("first", often(range(10), 10))
def test_mistakes_in_layers_ties_reductions_and_optimizers_are_named(first: int) -> None:
    planted = PLANTED[first::10]
    found = ranks.run(_causes, 4, [(layout, fault) for layout, fault, _ in planted], proved=True)
    for of_rank in found:
        assert of_rank == [cause for *_, cause in planted]


def _of_other_kinds(original: Any) -> Any:
    def construct(self: Any, *given: Any) -> None:
        original(self, *given)
        self._number ^= 1

    return construct


def _short_chunk_lost(original: Any) -> Any:
    def run(self: Any, x_NH: Any, labels: Any, head: Any, dx_NH: Any) -> Any:
        loss = original(self, x_NH, labels, head, dx_NH)
        dx_NH[len(x_NH) - len(x_NH) % self.chunk_tokens :] = 0
        return loss

    return run


def _tiny(family: str) -> dict[str, Any]:
    config = json.loads(tiny_config(family).to_json_string(use_diff=False))
    return {"config": config, "implementation": "transformers"}


# What a run's own size would show, or its data type: its cause, the mistake, and the run.
AT_ITS_OWN_SIZE: list[tuple[str, Fault, dict[str, Any]]] = [
    (
        diagnosis.DTYPE,
        replaced("dsx.hub.values.buffer_dtypes", lambda _: lambda *_: {}),
        {"model": "minimax"},
    ),
    (
        diagnosis.INITIAL_WEIGHTS,
        replaced("dsx.checkpoint.run.export._read_left", lambda _: lambda base, _, *given: base.read(*given)),
        {"adapter": "pissa"},
    ),
    (
        diagnosis.FROZEN,
        replaced("dsx.models.params.frozen_names", lambda _: lambda spec, _: dict.fromkeys(spec.hf, False)),
        {"train": {"freeze": ["embed_tokens"]}},
    ),
    (
        diagnosis.FAMILY,
        replaced(
            "dsx.models.spec.Adapter.scale", lambda _: property(lambda self: self.alpha / self.rank**0.5)
        ),
        {"adapter": {"rank": 4}},
    ),
    (
        diagnosis.UNKNOWN,
        replaced("dsx.nn.loss._Chunked.run", _short_chunk_lost),
        {"model": {"config": QWEN3, "implementation": "dsx"}, "loss": {"chunk_tokens": 1024}},
    ),
    (diagnosis.FAMILY, replaced("dsx.hub.layers.HubBlock.__init__", _of_other_kinds), {"model": "gemma2"}),
]


def _with_and_without(_rank: int, world_size: int, runs: list[dict[str, Any]]) -> list[list[str | None]]:
    from dsx.parallel.groups import make_groups
    from dsx.verify import small_step

    found: list[list[str | None]] = []
    for (_, fault, _), given in zip(AT_ITS_OWN_SIZE, runs, strict=True):
        config = resolve(given, world_size=world_size)
        groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
        right = small_step._tried(config, groups)
        structure_of.cache_clear()
        with fault():
            found.append(
                [getattr(each, "cause", None) for each in (right, small_step._tried(config, groups))]
            )
    return found


def _started(folder: Path) -> dict[str, Any]:
    """Keys of a model, and of an adapter that PEFT has started from its singular vectors."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3))
    base.save_pretrained(folder / "base")
    lora = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], init_lora_weights="pissa"
    )
    get_peft_model(base, lora).save_pretrained(folder / "adapter")
    return {"model": {"path": str(folder / "base")}, "adapter": {"path": str(folder / "adapter")}}


def _with_optimizers(_rank: int, world_size: int, given: dict[str, Any], home: str) -> list[str]:
    Path.home = lambda: Path(home)  # type: ignore[method-assign]
    from dsx.parallel.groups import make_groups
    from dsx.verify import small_step

    found = []
    for kind in ("Muon", "Lion"):
        config = resolve(given | {"optimizer": {"type": kind, "params": {"lr": 0.01}}}, world_size=world_size)
        try:
            found.append(small_step.prove(config, make_groups(config.mesh), quiet=True).without)
        except DsxError as error:
            found.append(str(error))
    return found


def test_a_layout_is_proved_under_muon_and_an_optimizer_that_cpus_lack_is_named(tmp_path: Path) -> None:
    """DeepSpeed's ZeRO writes Muon's update over the gradients, which looked like wrong ones."""
    (found,) = ranks.run(_with_optimizers, 1, content(tmp_path), str(tmp_path), proved=True)
    fix = 'Fix: use "AdamW" with "torch_adam": true.'
    assert found == ["Muon", f'optimizer.type = "Lion": DeepSpeed has none for CPUs. {fix}']


SLOW: list[tuple[str, dict[str, Any]]] = [
    ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 1e-3}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.0}),
    ("WarmupLR", {"warmup_min_lr": [0.0], "warmup_max_lr": [1e-3]}),
    ("WarmupLR", {"warmup_min_lr": 1e-8, "warmup_max_lr": 1e-3}),
]
AT_RATES = [("AdamW", 1e-6, {}), ("SGD", 0.01, {})]
AT_RATES += [("AdamW", 1e-3, {"scheduler": {"type": kind, "params": given}}) for kind, given in SLOW]


def _at_rates(_rank: int, world_size: int, given: dict[str, Any]) -> list[tuple[str, str]]:
    """What is found, by optimizer and schedule, of a parameter that stays as it was gathered."""
    from dsx.parallel.groups import make_groups
    from dsx.verify import small_step

    found = []
    for kind, rate, block in AT_RATES:
        settings = block | {"optimizer": {"type": kind, "params": {"lr": rate}}, "gradient_clipping": 1.0}
        config = resolve(given | settings | {"zero_allow_untested_optimizer": True}, world_size=world_size)
        groups = make_groups(config.mesh)
        right = small_step._tried(config, groups, 0.01)
        with FAULTS["ZeRO-3 keeps what it gathered"]():
            wrong = small_step._tried(config, groups, 0.01)
        found.append((getattr(right, "cause", ""), getattr(wrong, "cause", "")))
    return found


def test_a_parameter_that_stays_gathered_shows_at_any_rate_and_schedule(tmp_path: Path) -> None:
    given = content(tmp_path, zero=3, model={"family": "llama", "preset": "tiny"})
    (found,) = ranks.run(_at_rates, 1, given, proved=True)
    assert [(right, bool(wrong)) for right, wrong in found] == [("", True)] * len(AT_RATES)


# What fails on which rank, with what, and what the proof is made without, or refused for.
FAILING = [
    ("small_step._made_by_peft", 0, ImportError("no peft"), "the adapter's start (ImportError: no peft)"),
    ("small_step.TemporaryDirectory", 1, OSError("full"), "the adapter's start (OSError: full)"),
    ("small_step._buffer_finding", 0, KeyError("inv_freq"), "buffers' data types (KeyError: 'inv_freq')"),
    (
        "small_step.family_plan",
        0,
        KeyError("out_proj"),
        "what a small model of it is to be compared with cannot be made (KeyError: 'out_proj')",
    ),
]


def _lacking(rank: int, world_size: int, given: dict[str, Any]) -> list[str]:
    from dsx.parallel.groups import make_groups
    from dsx.verify import small_step

    config = resolve(given, world_size=world_size)
    groups, found = make_groups(config.mesh, sequence_parallel=True), []
    for name, failing, error, _ in FAILING:
        fails = replaced(f"dsx.verify.{name}", lambda _, error=error: Mock(side_effect=error))
        with fails() if rank == failing else nullcontext():
            try:
                found.append(getattr(small_step._tried(config, groups), "without", "a finding"))
            except LayoutError as refused:
                found.append(refused.what)
    return found


def test_a_proof_goes_on_without_what_a_rank_cannot_make(tmp_path: Path) -> None:
    given = content(tmp_path, **_started(tmp_path), parallel={"tensor": 2, "pipeline": 1})
    given |= {"bf16": {"enabled": True}}
    assert ranks.run(_lacking, 2, given, proved=True) == [[without for *_, without in FAILING]] * 2
    settings = tmp_path / "adapter" / "adapter_config.json"
    places = {proof._place(resolve(given, world_size=2))}
    settings.write_text(settings.read_text().replace("pissa", "olora"))
    places.add(proof._place(resolve(given, world_size=2)))
    assert len(places) == 2  # an adapter's folder may change under its name


def test_what_is_wrong_at_the_runs_own_size_or_data_type_is_seen(tmp_path: Path) -> None:
    started, runs = _started(tmp_path), []
    for _, _, block in AT_ITS_OWN_SIZE:
        given = content(tmp_path, **block, parallel={"tensor": 2, "pipeline": 1})
        if block.get("adapter") == "pissa":
            given["dsx"] |= started
        if isinstance(family := given["dsx"]["model"], str):
            given["dsx"]["model"] = _tiny(family)
        given["dsx"]["train"] = {"steps": 1, "output": str(tmp_path)} | given["dsx"]["train"]
        runs.append(given | {"bf16": {"enabled": True}})
    causes = [cause for cause, *_ in AT_ITS_OWN_SIZE]
    assert ranks.run(_with_and_without, 2, runs, proved=True)[0] == [[None, cause] for cause in causes]


def test_fresh_weights_lack_what_starts_from_values_of_the_familys_own(tmp_path: Path) -> None:
    config = resolve(content(tmp_path, model=_tiny("mamba2")), world_size=1)
    # On every linear, as a family may have it that PEFT does not refuse.
    adapted = replace(config.model, adapter=Adapter(type="dora", rank=4))
    specs = param_specs(adapted, pad_multiple=config.dsx.model.vocab_multiple)
    config = replace(config, model=adapted, param_specs=specs)
    whole = family_layers(config).weights()
    found = fresh_weights(config, None)
    lacks = {name for name in whole.keys() - found.keys() if name.endswith("lora_magnitude")}
    assert {name.replace("lora_magnitude", "weight") for name in lacks} <= whole.keys() - found.keys()
    assert len(lacks) == len(config.model.kinds) - 3  # the out_proj of each block
    for name, values in found.items():
        torch.testing.assert_close(values, whole[name][: len(values)])  # without padding


def _filled(value: float) -> Callable[[nn.Parameter], object]:
    return lambda parameter: parameter.data.fill_(value)


def _gradient_times(factor: float) -> Callable[[nn.Parameter], object]:
    return lambda parameter: parameter.register_hook(lambda gradient: gradient * factor)


ON_QUERIES: dict[str, Callable[[nn.Parameter], object]] = {
    "": lambda _: None,
    "off by a hundredth": _gradient_times(1.01),
    "infinite gradient": _gradient_times(float("inf")),
    "no number for a weight": _filled(float("nan")),
}


def _with_queries(
    _rank: int, world_size: int, home: str, cases: list[tuple[float, int, str]]
) -> list[tuple[str, str, float]]:
    """Cause, words and difference of gradients of models of that steepness, with a plant on some queries."""
    from dsx.parallel.groups import make_groups
    from dsx.verify import small_step, subject

    found, right = [], subject.build_layers
    for multiplier, seed, plant in cases:
        config = {**QWEN3, "model_type": "granite", "attention_multiplier": multiplier}
        model = {"config": config, "implementation": "transformers"}
        given = content(Path(home), model=model, parallel={"tensor": 2, "pipeline": 1})
        resolved = resolve(given, world_size=world_size)
        groups = make_groups(resolved.mesh, sequence_parallel=True)

        def planted(*arguments: Any, plant: str = plant) -> Any:
            pipeline = right(*arguments)
            for name, parameter in pipeline.named_parameters():
                if name.endswith("2.block.self_attn.q_proj.weight"):
                    ON_QUERIES[plant](parameter)
            return pipeline

        subject.build_layers = planted  # type: ignore[assignment]
        try:
            shown = small_step._tried(resolved, groups, seed=seed)
        finally:
            subject.build_layers = right
        cause = getattr(shown, "cause", "")
        found.append((cause, getattr(shown, "what", ""), getattr(shown, "gradient", 0.0)))
    return found


STEEP = 300.0
"""A multiplier of attention's logits with which a rounding of all weights moves gradients by 1e-4."""


def test_steep_models_are_proved_and_what_is_wrong_in_them_is_seen(tmp_path: Path) -> None:
    cases = [(STEEP, seed, "") for seed in (3, 7)]
    cases += [(STEEP, 3, "off by a hundredth")]
    cases += [(1.0, 3, plant) for plant in ("infinite gradient", "no number for a weight")]
    cases += [(1e38, 3, "")]  # transformers overflows as well
    found = ranks.run(_with_queries, 2, str(tmp_path), cases, proved=True)[0]
    assert [cause for cause, *_ in found] == ["", "", found[2][0], *[diagnosis.NOT_FINITE] * 3]
    assert max(gradient for *_, gradient in found[:2]) > 1e-4  # or it is not steep
    assert "2.block.self_attn.q_proj.weight off by" in found[2][1]
    queries = "2.block.self_attn.q_proj.weight is not finite"
    assert f"in the run, the gradient of {queries}" in found[3][1]
    assert f"in the run, the weight {queries}" in found[4][1]
    assert found[5][1].startswith("in one process, the gradient of ")


def _fixes(_rank: int, world_size: int, planted: list[tuple[dict[str, Any], str]]) -> list[str]:
    from dsx.launch import processes
    from dsx.parallel.groups import make_groups
    from dsx.verify.small_step import prove

    found = []
    for given, fault in planted:
        config = resolve(given, world_size=world_size)
        groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
        processes.seed_generators(groups, 0)
        with FAULTS[fault](), pytest.raises(LayoutError) as error:
            prove(config, groups, quiet=True)
        found.append(error.value.fix)
    return found


@pytest.mark.slow
def test_the_way_out_is_what_a_small_model_trains_right_with(tmp_path: Path) -> None:
    llama = {"family": "llama", "preset": "tiny"}
    hybrid = {"config": json.loads(tiny_config("qwen3_next").to_json_string(use_diff=False))}
    ways = [
        (content(tmp_path, model=llama, parallel={"tensor": 2}), "norm gradients not all-reduced"),
        (content(tmp_path, model=llama, parallel={"pipeline": 2}), "norm of stage 0"),
        (content(tmp_path, model=llama, parallel={"tensor": 2}), "norm of tensor rank 0"),
        # Its recurrent blocks see the other documents of a pack, which transformers' own forward does, too.
        (
            content(
                tmp_path, model=hybrid, data={"source": "own", "sequence_length": 32, "documents": "apart"}
            ),
            "none",
        ),
        (content(tmp_path, model=llama, parallel={"pipeline": 2}), "loss not divided"),
    ]
    fixes, _ = ranks.run(_fixes, 2, ways, proved=True)
    assert all(fix.endswith("nothing vouches for") for fix in fixes)
    assert [fix.partition(", with which it trains right")[0] for fix in fixes[:4]] == [
        "set dsx.parallel.sequence_parallel to false",
        "set dsx.parallel.pipeline to 1",
        "set dsx.parallel.tensor to 1",
        'set dsx.data.documents to "joined"',
    ]
    assert "trains right" not in fixes[4]


SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
EXPERTS |= {"topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
SLIDING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
}
SLIDING |= {"hybrid_layer_pattern": [0, 1], "sliding_window": 8, "moe_layer_freq": [0, 1]}
SINKS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {  # what families' tensor plans do not name -> ranks, config
    "a list of norms by head": (2, {"model_type": "stablelm", "qk_layernorm": True}),
    "a list of norms, 4 ranks": (4, {"model_type": "stablelm", "qk_layernorm": True}),
    "one shared head": (2, {"model_type": "stablelm", "num_key_value_heads": 1}),
    "one head, norms": (2, {"model_type": "stablelm", "num_key_value_heads": 1, "qk_layernorm": True}),
    "norms alike": (2, {"model_type": "phi", "num_key_value_heads": 4, "qk_layernorm": True}),
    "norms, experts": (2, {"model_type": "glm4_moe", **EXPERTS, "head_dim": 16, "use_qk_norm": True}),
    "norms with a dimension of heads": (2, {"model_type": "cohere", "use_qk_norm": True}),
    "queries at once": (
        2,
        {"model_type": "glm4_moe_lite", **EXPERTS, **LATENT, "num_key_value_heads": 4, "v_head_dim": 16},
    ),
    "heads that differ by layer": (
        2,
        {
            "model_type": "mimo_v2_flash",
            **EXPERTS,
            **SLIDING,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "an activation with parameters": (
        2,
        {"model_type": "apertus", "rope_parameters": {"rope_type": "default"}},
    ),
    "norms of the full width": (2, {"model_type": "olmo2"}),
    "sinks, one shared head": (2, {**SINKS, "num_key_value_heads": 1}),
    "sinks, more ranks than heads for keys": (4, {**SINKS, "num_key_value_heads": 2}),
    "keys and values shared in one matrix": (
        2,
        {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": True},
    ),
    "biases, and all heads alike": (2, {"model_type": "gpt_bigcode", "multi_query": False}),
}


@pytest.mark.parametrize("name", often(OPTIONS, 4))
def test_what_a_tensor_plan_does_not_name_trains_as_in_one_process(name: str, tmp_path: Path) -> None:
    size, options = OPTIONS[name]
    model = {"config": {**SMALL, **options}, "implementation": "transformers"}
    given = content(tmp_path, model=model, parallel={"tensor": size, "pipeline": 1})
    for line, _ in proved(given, size, tmp_path):
        assert f"tensor {size} as one process: loss " in line


def _large_z_loss(_rank: int) -> None:
    from dsx.hub import balance

    right = balance.loss_of
    balance.loss_of = lambda sums, told: 1.05 * right(sums, told)


def _own_tokens_alone(_rank: int) -> None:
    """Biases follow the tokens of one's own rank."""
    from dsx.engine import expert_load

    expert_load.dist = Mock()  # type: ignore[attr-defined]


OF_ROUTERS = {f"{FAMILY}: loss": _large_z_loss, f"{diagnosis.BIASES}: block 1": _own_tokens_alone}
PLANTS |= OF_ROUTERS


@pytest.mark.parametrize("plant", ["", *OF_ROUTERS])
def test_a_z_loss_and_biases_of_routers_are_proved(plant: str, tmp_path: Path) -> None:
    model = {"config": {**SMALL, **EXPERTS, "model_type": "glm4_moe", "head_dim": 16}}
    moe = {"z_loss": 0.001, "bias_update_speed": 0.001}
    data = {"source": "own", "sequence_length": 32, "documents": "apart"}
    given = content(tmp_path, model=model, parallel={"expert": 2}, moe=moe, data=data)
    with pytest.raises(ranks.RankError, match=plant) if plant else nullcontext():
        for line, _ in proved(given, 2, tmp_path, plant):
            assert "data 2 as one process: loss " in line


@pytest.mark.slow
def test_experts_of_a_derived_plan_compile(tmp_path: Path) -> None:
    model = {"config": {**SMALL, **SINKS}, "implementation": "transformers"}
    given = content(tmp_path, model=model, parallel={"tensor": 2, "pipeline": 1}, compile="blocks")
    for line, _ in proved(given, 2, tmp_path):
        assert "tensor 2 as one process: loss " in line


def test_a_norm_of_shared_heads_and_blocks_left_out_are_refused_by_name(tmp_path: Path) -> None:
    def refused(tensor: int, **options: Any) -> str:
        model = {"config": {**SMALL, **options}, "implementation": "transformers"}
        with pytest.raises(DsxError) as error:
            resolve(
                content(tmp_path, model=model, parallel={"tensor": tensor, "pipeline": 1}), world_size=tensor
            )
        return str(error.value)

    said = refused(4, model_type="cohere", use_qk_norm=True)
    assert "self_attn.k_norm.weight: 2 of dim 0 are not divisible" in said
    assert "layerdrop = 0.1: its forward leaves out blocks at random" in refused(
        1, model_type="opt", layerdrop=0.1
    )


class OffOnOneRank(nn.Module):
    """Gives something else on the second rank than in one process, which is on the first."""

    def forward(self, inputs: Any) -> Any:
        hidden, mask = inputs
        return hidden + 0.01 * torch.distributed.get_rank() * hidden.square(), mask


def _layers(_rank: int, _world_size: int, broken: bool, home: str) -> tuple[str, list[str]]:
    """The words of the proof, and what initialize then says at ZeRO-1, which was proved, and without ZeRO."""
    import dsx

    os.environ["HOME"] = home
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    proved: dict[str, Any] = config | {"zero_optimization": {"stage": 1}}

    def make() -> dict[str, Any]:
        given = user_pipeline.make_model()
        return (
            given | {"layers": [*given["layers"][:-2], LayerSpec(OffOnOneRank), *given["layers"][-2:]]}
            if broken
            else given
        )

    words, said = dsx.prove(make, proved).words, []
    muon = proved | {"optimizer": {"type": "Muon", "params": {"lr": 1e-6}}}
    assert dsx.prove(make, muon).words.startswith("pipeline 2 as one process, without Muon: loss ")
    for each in (proved, config):
        module = dsx.PipelineModule(**{name: value for name, value in make().items() if name != "batch"})
        with redirect_stdout(StringIO()) as out:
            dsx.initialize(model=module, config=each)
        said.append(out.getvalue())
    return words, said


def test_layers_of_ones_own_are_proved_or_said_to_be_unproved(tmp_path: Path) -> None:
    home = str(tmp_path)
    for rank, (words, (proved, unproved)) in enumerate(ranks.run(_layers, 2, False, home, proved=True)):
        assert words.startswith("pipeline 2 as one process: loss ")
        assert "dsx:" not in proved
        assert ("not proved to train over tensor 1 x pipeline 2 x data 1" in unproved) is (rank == 0)
        assert ("gradient_clipping = 1 holds for the norm of the whole model" in unproved) is (rank == 0)
    with pytest.raises(ranks.RankError) as failed:
        ranks.run(_layers, 2, True, home, proved=True)
    assert "the layers over pipeline 2: the layers do not train here as in one process" in str(
        failed.value.error
    )


def test_products_are_exact_inside_however_a_program_has_them() -> None:
    from dsx.verify.small_step import _undisturbed

    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32"  # as TrainingArguments(tf32=True) does
    try:
        with _undisturbed():
            assert switch.fp32_precision == "ieee"
        assert switch.fp32_precision == "tf32"
    finally:
        switch.fp32_precision = before


def test_a_proof_is_kept_by_the_rows_of_a_schedules_file(tmp_path: Path) -> None:
    from dsx.train.proof import _place

    places = []
    for rows in ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n"):
        (tmp_path / "s.csv").write_text(rows)
        block = {"parallel": {"pipeline": 2}, "schedule": {"file": str(tmp_path / "s.csv")}}
        given = content(tmp_path, **block) | {"gradient_accumulation_steps": 2}
        places.append(_place(resolve(given, world_size=2)))
    assert places[0] != places[1]


def test_labels_of_chats_and_of_a_programs_own_samples_are_masked_in_a_trial(tmp_path: Path) -> None:
    from dsx.verify.shrunk import trial
    from dsx.verify.subject import random_tokens

    chats = {"source": "x.jsonl", "format": "chat", "tokenizer": "bytes", "documents": "joined"}
    masked = {}
    for name, data in {"chats": chats, "text": {"source": "x.txt"}, "own": {"source": "own"}}.items():
        given = content(tmp_path, data={**data, "sequence_length": 32}) | {"gradient_accumulation_steps": 2}
        small = resolve(trial(resolve(given, world_size=1)).content, world_size=1)
        masked[name] = any(bool((random_tokens(small, 0, n)[1] == -100).any()) for n in range(4))
    assert masked == {"chats": True, "text": False, "own": True}
