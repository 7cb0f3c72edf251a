"""Weights that DeepSpeed's AutoEP trained and saved on real ranks, as transformers and dsx read them."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import dsx
import ranks
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.formats.deepspeed.cut import Rules
from dsx.checkpoint.formats.deepspeed.reader import catalog_of
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.errors import CheckpointError
from parity import dsx_run
from parity.dsx_run import Case

SIZES: dict[str, Any] = {
    "vocab_size": 261, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "moe_intermediate_size": 24, "head_dim": 4,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "norm_topk_prob": True,
}  # fmt: skip


def trained(rank: int, world_size: int, folder: Path, family: str, zero: int) -> Any:
    """Train with experts over two ranks, save, and give the logits of the model that was saved."""
    import deepspeed
    from deepspeed.module_inject.auto_ep_presets import base

    # AutoEP 0.19.8 stops where it has transformers 5.23 record router logits, of which no loss is made here.
    base._install_instance_transformers_output_recorders = lambda *_: True
    deepspeed.init_distributed(dist_backend="gloo")
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "expert_parallel": {
            "enabled": True, "autoep_size": 2, "preset_model": family, "use_grouped_mm": False,
        },
    }  # fmt: skip
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager")
    engine = deepspeed.initialize(model=model, config=content)[0]
    for step in range(2):
        ids = torch.randint(67, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(folder), tag="t")
    engine.eval()
    with torch.no_grad():
        return engine(input_ids=torch.arange(18).reshape(2, 9)).logits


def config_of(family: str) -> Any:
    kind = CONFIG_MAPPING[family]
    sizes = SIZES | ({"num_key_value_heads": 4} if family == "deepseek_v3" else {})
    return kind(**{key: value for key, value in sizes.items() if key in kind().to_dict()})


@pytest.fixture(scope="module", params=[("mixtral", 1), ("qwen3_moe", 0), ("deepseek_v3", 2)], ids=str)
def saved(request, tmp_path_factory) -> tuple[Path, str, torch.Tensor]:
    """A checkpoint, its family, and the logits of who saved it."""
    family, zero = request.param
    folder = tmp_path_factory.mktemp(family)
    logits = ranks.run(trained, 4 if zero == 1 else 2, folder, family, zero)[0]
    return folder / "t", family, logits


def stored(catalog: Any, entry: Any) -> torch.Tensor:
    """A tensor by its pieces."""
    found = torch.full(entry.shape, torch.nan)
    for piece in entry.pieces:
        flat = np.frombuffer((catalog.root / piece.file).read_bytes()[piece.offset :][: 1 << 20], np.uint8)
        numbers = flat[: len(flat) // 4 * 4].view(np.float32)
        values = np.lib.stride_tricks.as_strided(numbers, piece.shape, [4 * step for step in piece.strides])
        found[tuple(slice(at, at + n) for at, n in zip(piece.start, piece.shape, strict=True))] = (
            torch.tensor(values)
        )
    return found


def by_mappings(folder: Path, state: str) -> dict[str, torch.Tensor]:
    """Every parameter's ``state`` by what DeepSpeed writes of where it lies on each rank."""
    shapes = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)["param_shapes"]
    parts = defaultdict(list)
    for rank, path in enumerate(sorted(folder.glob("zero_pp_rank_*"))):
        saved = torch.load(path, weights_only=False)["optimizer_state_dict"]
        for group, places in enumerate(saved["param_slice_mappings"]):
            flat = saved["base_optimizer_state"]["state"][group][state]
            for name, at in places.items():
                parts[name, rank % 2 if ".experts.w" in name else 0].append(
                    flat[at.start : at.start + at.numel]
                )
    held = {key: torch.cat(each).view(*(shapes[0] | shapes[1])[key[0]]) for key, each in parts.items()}
    whole = {name: each for (name, rank), each in held.items() if not rank}
    return whole | {name: torch.cat([whole[name], each]) for (name, rank), each in held.items() if rank}


def in_the_family(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for stem in [name[:-3] for name in found if name.endswith(".experts.w1")]:
        gate, up, down = (found.pop(f"{stem}.w{number}") for number in (1, 3, 2))
        found |= {f"{stem}.gate_up_proj": torch.cat([gate, up], 1), f"{stem}.down_proj": down}
    return {name.replace("mlp.router.gate.", "mlp.gate."): each for name, each in found.items()}


def test_optimizer_states_of_autoep_are_read(saved) -> None:
    folder, family, _ = saved
    catalog = catalog_of(folder)
    if family == "qwen3_moe":
        assert any("at ZeRO-0" in each for each in catalog.facts["left_behind"])
        return
    values = {entry.key: stored(catalog, entry) for entry in catalog.entries}
    trained = {name for name, state in values if state == "master"}
    for name in trained:  # in other files
        assert torch.equal(values[name, "master"], values[name, "weight"])
    for state in ("exp_avg", "exp_avg_sq"):
        expected = in_the_family(by_mappings(folder, state))
        assert expected.keys() == trained
        for name, each in expected.items():
            assert torch.equal(values[name, state], each)


IN_DSX = Case(dp=2, ep=2, zero=2, implementation="transformers")


def go_on(rank: int, world_size: int, model: Path, folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The step and the moments of the last block."""
    from deepspeed.utils import safe_get_full_optimizer_state

    engine, _ = dsx_run.build(IN_DSX, model)
    engine.load_checkpoint(folder, tag="t")
    engine.deepspeed_engine.optimizer._lazy_init_hp_params_optimizer_state()  # DeepSpeed does after a step
    named = [(name, each) for name, each in engine.module.named_parameters() if name.startswith("2.")]
    return engine.global_steps, {name: safe_get_full_optimizer_state(each, "exp_avg") for name, each in named}


@pytest.mark.parametrize("saved", [("mixtral", 1)], indirect=True, ids=str)
def test_a_run_of_autoep_goes_on_in_dsx(saved, tmp_path: Path) -> None:
    folder, *_ = saved
    wanted = WantedTarget(format="hf", hf_config=hf_config("mixtral"))
    prepare(catalog_of(folder), tmp_path / "hf", wanted).run(ConversionOptions())
    run = dsx.load_config(dsx_run.config(IN_DSX, tmp_path / "hf"), world_size=2)
    prepare(catalog_of(folder), tmp_path / "dsx" / "t", WantedTarget(run=run)).run(ConversionOptions())
    expected = in_the_family(by_mappings(folder, "exp_avg"))
    for rank, (step, found) in enumerate(ranks.run(go_on, 2, tmp_path / "hf", tmp_path / "dsx")):
        assert step == 2
        for name, each in found.items():
            own = expected[f"model.layers.1.{name.removeprefix('2.block.')}"]
            assert torch.equal(each, own.chunk(2)[rank] if "experts" in name else own)


def hf_config(family: str) -> dict[str, Any]:
    return {**config_of(family).to_dict(), "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]}


def test_the_weights_of_autoep_are_a_model_of_transformers(saved, tmp_path: Path) -> None:
    folder, family, logits = saved
    config = hf_config(family)
    catalog = catalog_of(folder)
    assert catalog.facts["step"] == 2
    rules = Rules(source="rules.json", names=((r"model\.norm\.(.*)", r"last.\1"),))
    renamed = {entry.name for entry in catalog_of(folder, rules).entries}
    assert renamed - {entry.name for entry in catalog.entries} == {"last.weight"}
    prepare(catalog, tmp_path / "hf", WantedTarget(format="hf", hf_config=config)).run(ConversionOptions())
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        found = model.eval()(torch.arange(18).reshape(2, 9)).logits
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5 * float(logits.abs().max()))


def test_what_is_not_whole_or_not_of_autoep_is_refused(saved, tmp_path: Path) -> None:
    folder, _, _ = saved
    number = min(int(each.name.split("_")[1]) for each in folder.glob("layer_*_expert_0_*"))
    path = tmp_path / "copy"
    shutil.copytree(folder, path)
    name = f"layer_{number}_expert_3_mp_rank_00_model_states.pt"
    content = torch.load(path / name)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: it is missing"):
        catalog_of(path)
    torch.save({key: value[:, :-1] for key, value in content.items()}, path / name)
    with pytest.raises(CheckpointError, match=r"(its matrices|experts of its layer) are of shapes"):
        catalog_of(path)
    torch.save({key: value.half() for key, value in content.items()}, path / name)
    with pytest.raises(CheckpointError, match=r"dtypes .'float16', 'float32'."):
        catalog_of(path)
    torch.save(dict(list(content.items())[1:]), path / name)
    with pytest.raises(CheckpointError, match="its tensors are not"):
        catalog_of(path)
    torch.save(content, path / name)
    torch.save(content, path / name.replace("expert_3", "expert_4"))
    with pytest.raises(CheckpointError, match=r"expert_4.*: the layer has 4 experts"):
        catalog_of(path)
