"""Weights that DeepSpeed's AutoEP trained and saved on real ranks, as transformers and dsx read them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import ranks
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.formats.deepspeed.cut import Rules
from dsx.checkpoint.formats.deepspeed.reader import catalog_of
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.errors import CheckpointError

SIZES: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "moe_intermediate_size": 24, "head_dim": 4,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "norm_topk_prob": True,
}  # fmt: skip


def trained(rank: int, world_size: int, folder: Path, family: str, zero: int) -> Any:
    """Train with AutoEP over two ranks, save, and give the logits of the model that was saved."""
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
            "enabled": True, "autoep_size": world_size, "preset_model": family, "use_grouped_mm": False,
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
    logits = ranks.run(trained, 2, folder, family, zero)[0]
    return folder / "t", family, logits


def test_the_weights_of_autoep_are_a_model_of_transformers(saved, tmp_path: Path) -> None:
    folder, family, logits = saved
    config = {**config_of(family).to_dict(), "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]}
    catalog = catalog_of(folder)
    assert {entry.state for entry in catalog.entries} == {"weight"}
    assert any("states of DeepSpeed's mixtures" in each for each in catalog.facts["left_behind"])
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
