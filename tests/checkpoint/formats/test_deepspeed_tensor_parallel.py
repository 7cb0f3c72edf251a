"""Stock checkpoints with tensor parallelism: cut as what describes it says, and never by a guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ranks
from checkpoint.stock_checkpoints import converted, read_entry
from dsx.checkpoint.catalog import Catalog, check_files
from dsx.checkpoint.formats import universal
from dsx.checkpoint.formats.deepspeed.cut import Rules, ShardLayout
from dsx.checkpoint.formats.deepspeed.reader import catalog_of
from dsx.errors import CheckpointError
from often import often


def model_of(tied: bool, **more: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"num_key_value_heads": 2, **more},
        vocab_size=68,
        hidden_size=24,
        num_attention_heads=4,
        intermediate_size=40,
        num_hidden_layers=1,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def train_and_save(
    rank: int, world_size: int, zero: int, tp: int, tied: bool, folder: Path, more: dict[str, Any]
) -> None:
    """DeepSpeed's AutoTP, of a Llama of which ``more`` is said; saves before training and after two steps."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        **({"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}),
    }
    engine, *_ = deepspeed.initialize(model=model_of(tied, **more), config=config)
    engine.save_checkpoint(str(folder))
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank // tp)
        tokens = torch.randint(68, (2, 9), generator=generator)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(str(folder))


def tensors(catalog: Catalog) -> dict[tuple[str, str], torch.Tensor]:
    check_files(catalog)
    return {entry.key: read_entry(catalog, entry) for entry in catalog.entries}


@pytest.mark.parametrize(
    ("zero", "tied", "more"),
    [(1, False, {}), (3, False, {}), (2, True, {}), (1, False, {"num_key_value_heads": 1})],
    ids=["zero1", "zero3", "zero2-tied", "a rank without heads"],
)
def test_autotp(zero: int, tied: bool, more: dict[str, Any], tmp_path: Path) -> None:
    dp = 2 if zero == 3 else 1
    ranks.run(train_and_save, 2 * dp, zero, 2, tied, tmp_path / "tp", more)
    ranks.run(train_and_save, dp, zero, 1, tied, tmp_path / "dp", more)
    start = tensors(catalog_of(tmp_path / "tp" / "global_step0"))
    for name, expected in model_of(tied, **more).named_parameters():
        assert torch.equal(start[name, "master"], expected), name
    found = tensors(catalog_of(tmp_path / "tp" / "global_step2"))
    alone = tensors(catalog_of(tmp_path / "dp" / "global_step2"))
    for key, expected in alone.items():
        assert torch.allclose(found[key], expected, rtol=2e-3, atol=2e-6), key
        assert not expected.is_floating_point() or expected.abs().sum() > 0
    assert {state for _, state in found} >= {"master", "exp_avg", "exp_avg_sq"}


def save_made_under_init(rank: int, world_size: int, folder: Path, tied: bool) -> dict[str, Any]:
    """ZeRO-3 beside AutoTP of a model made under ``zero.Init``; what a rank holds of every tensor, whole."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "sub_group_size": 900},
        "tensor_parallel": {"autotp_size": 2},
        "zero_force_ds_cpu_optimizer": False,
    }
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = model_of(tied, attention_bias=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layernorm" not in name and "up_proj" not in name)
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and (len(p.ds_shape) > 1) == wide]}
        for wide in (True, False)
    ]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config
    )
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank // 2)
        tokens = torch.randint(68, (2, 9), generator=generator)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(str(folder))
    held: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            held[name, "master"] = safe_get_full_fp32_param(parameter).clone()
            for state in ("exp_avg", "exp_avg_sq"):
                held[name, state] = safe_get_full_optimizer_state(parameter, state).clone()
        else:
            with deepspeed.zero.GatheredParameters([parameter]):
                held[name, "weight"] = parameter.detach().clone()
    return held


@pytest.mark.parametrize("tied", often([False, True], 2))
def test_autotp_of_a_model_made_under_zero_init(tied: bool, tmp_path: Path) -> None:
    """What AutoTP does not cut stays divided over all ranks, and the rest over data parallelism."""
    lives = ranks.run(save_made_under_init, 4, tmp_path, tied)
    catalog = catalog_of(tmp_path / "global_step2")
    found = tensors(catalog)
    spread = {len({piece.file for piece in entry.pieces}) for entry in catalog.entries}
    assert spread == {4}
    assert found.keys() == lives[0].keys()
    for (name, state), whole in found.items():
        first, second = lives[0][name, state], lives[1][name, state]
        dims = [dim for dim in range(whole.dim()) if first.shape[dim] != whole.shape[dim]]
        expected = torch.cat([first, second], dims[0]) if dims else first
        assert torch.equal(whole, expected), (name, state)
    assert {entry.role for entry in catalog.entries} == {"trained", "frozen"}
    rules = Rules((("model.norm.weight", {"split": 0}),))
    with pytest.raises(CheckpointError, match=r"model.norm.weight, .*: its parts are divided over all ranks"):
        catalog_of(tmp_path / "global_step2", rules)


def test_universal_of_autotp(tmp_path: Path) -> None:
    """Whole tensors beside the model's local shapes; of a divided bias both are vectors."""
    ranks.run(train_and_save, 2, 1, 2, False, tmp_path, {"attention_bias": True})
    expected = tensors(catalog_of(tmp_path / "global_step2"))
    found = tensors(universal.catalog_of(converted(tmp_path / "global_step2")))
    assert found["model.layers.0.self_attn.q_proj.bias", "master"].shape == (24,)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items() if key[1] != "weight")


def test_without_a_description(tmp_path: Path) -> None:
    """DeepSpeed's converter joins such parts end to end and returns 0; here the user says how."""
    ranks.run(train_and_save, 2, 1, 2, False, tmp_path, {})
    path = tmp_path / "global_step2"
    expected = tensors(catalog_of(path))
    for file in path.glob("*.pt"):
        content = torch.load(file, weights_only=False)
        content.pop("universal_checkpoint_info", None)
        content.get("optimizer_state_dict", {}).pop("universal_checkpoint_info", None)
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight: nothing says how") as caught:
        catalog_of(path)
    assert '"model\\.embed_tokens\\.weight"' in caught.value.fix
    rules = tmp_path / "rules.json"
    split = {".*(o_proj|down_proj)\\.weight": {"split": 1}, ".*(proj|lm_head)\\.weight": {"split": 0}}
    rules.write_text(json.dumps({"tensors": {**split, "model\\.(norm|embed_tokens)\\.weight": "replicate"}}))
    with pytest.raises(CheckpointError, match=r"layernorm.weight: nothing says how"):
        catalog_of(path, Rules.read(rules))
    rules.write_text(json.dumps({"tensors": {**split, "model\\.(norm|embed_tokens)\\.weight": "average"}}))
    with pytest.raises(CheckpointError, match=r"layernorm.weight: nothing says how"):
        catalog_of(path, Rules.read(rules))
    rules.write_text(json.dumps({"tensors": {**split, ".*": "average"}}))
    found = tensors(catalog_of(path, Rules.read(rules)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not readable as JSON"),
        ("[]", "not a JSON object"),
        ('{"tensor": {}}', "its keys"),
        ('{"tensors": {"(": "replicate"}}', "no regular expression"),
        ('{"tensors": []}', "of the wrong type"),
        ('{"groups": {"a": 1}}', "of the wrong type"),
        ('{"groups": [["a", 1]]}', "of the wrong type"),
        ('{"names": {"a": 1}}', "of the wrong type"),
        ('{"tensors": {"a": "copy"}}', "a: no rule"),
        ('{"tensors": {"a": {"split": "0"}}}', "a: no rule"),
        ('{"tensors": {"a": {"split": 0, "part": [1]}}}', "a: no rule"),
        ('{"tensors": {"a": {"split": 0, "parts": [1, -1]}}}', "a: no rule"),
    ],
)
def test_rules_files_that_are_none(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "rules.json").write_text(content)
    with pytest.raises(CheckpointError, match=problem):
        Rules.read(tmp_path / "rules.json")


def joined(cut: ShardLayout, parts: list[torch.Tensor]) -> torch.Tensor:
    """What a cut says the parts make."""
    out = torch.full(cut.shape, -1.0)
    for rank, part in enumerate(parts):
        for box in cut.parts(rank, tuple(part.shape), 0, part.numel()):
            at = tuple(slice(low, low + size) for low, size in zip(box.start, box.shape, strict=True))
            out[at] = part.clone().contiguous().flatten().as_strided(box.shape, box.strides, box.flat)
    return out


def test_rules_against_torch() -> None:
    whole = torch.arange(1.0, 73).view(12, 6)
    q, k, v = whole.split([6, 4, 2])
    fused = [torch.cat([x.chunk(2)[rank] for x in (q, k, v)]) for rank in range(2)]
    padded = list(torch.cat([whole[:11], torch.zeros(3, 6)]).chunk(2))
    cases: list[tuple[Any, list[torch.Tensor], torch.Tensor]] = [
        ({"split": 0}, list(whole.chunk(3)), whole),
        ({"split": 1}, list(whole.chunk(2, 1)), whole),
        ({"split": 0}, list(whole.split([5, 4, 3])), whole),  # uneven
        ({"split": 0, "parts": [6, 4, 2]}, fused, whole),
        ({"split": 0, "extent": 11}, padded, whole[:11]),
        ("replicate", [whole, whole], whole),
    ]
    for rule, parts, expected in cases:
        cut = Rules((("w", rule),)).cut("w", [tuple(part.shape) for part in parts], "x")
        assert torch.equal(joined(cut, parts), expected), rule


def test_rules_that_do_not_fit() -> None:
    shapes = [(6, 4), (6, 4)]
    for rule, problem in [
        ({"split": 2}, "it has no dim 2"),
        ({"split": 0, "parts": [6, 4]}, "blocks"),
        ({"split": 0, "parts": [9, 3]}, "blocks"),
        ({"split": 0, "extent": 13}, "12 of 13 rows"),
    ]:
        with pytest.raises(CheckpointError, match=problem):
            Rules((("w", rule),)).cut("w", shapes, "x")
    with pytest.raises(CheckpointError, match="copies of shapes"):
        Rules((("w", "replicate"),)).cut("w", [(6, 4), (5, 4)], "x")
