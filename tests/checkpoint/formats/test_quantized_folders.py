"""Quantised folders are read as transformers and bitsandbytes make plain weights of them, bit for bit."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)

import dsx
import ranks
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.formats.huggingface.names import read_config
from dsx.checkpoint.formats.huggingface.weights import HfWeights
from dsx.checkpoint.formats.slices import part_of
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.pieces import whole_part
from dsx.checkpoint.plain import as_numpy
from dsx.checkpoint.read import Reader, compare
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.errors import CheckpointError, DsxError
from dsx.hub.read import folder_names, hub_model
from dsx.models.params import stored_specs
from dsx.parallel.mesh import ALONE, Mesh
from dsx.train.generation import load_transformers
from often import often
from parity import dsx_run
from parity.dsx_run import Case

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **SIZES, "tie_word_embeddings": True},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **{key: value for key, value in SIZES.items() if key != "head_dim"},
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
    # Of square matrices, as the published one: whether they are turned does not show in their shape.
    "gpt_oss": {
        "model_type": "gpt_oss",
        **SIZES,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def plain(kind: str, folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIGS[kind] | changes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def written(folder: Path, tensors: dict[str, Tensor], **quantization: Any) -> Path:
    """A folder's tensors anew in two files, and how they are quantised."""
    (folder / "model.safetensors").unlink()
    homes = {name: f"model-{1 + at % 2:05d}-of-00002.safetensors" for at, name in enumerate(tensors)}
    for file in sorted(set(homes.values())):
        held = {name: tensor for name, tensor in tensors.items() if homes[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def in_fp8(folder: Path, block: tuple[int, int] | None, scales: torch.dtype = torch.float32) -> Path:
    """Matrices of blocks in fp8, by torch's own cast; scales are powers of two where these are all."""
    made: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("proj.weight") and "_a_proj" not in name and "_b_proj" not in name:
            made[name] = tensor
            continue
        rows, columns = block or tensor.shape
        grid = -(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns)
        scale = (torch.rand(grid) + 0.5).mul(0.01).log2().round().exp2().to(scales)
        whole = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        cut = whole[: tensor.shape[0], : tensor.shape[1]]
        made[name] = (tensor.float() / cut).to(torch.float8_e4m3fn)
        # In practice no powers of two.
        made[f"{name}_scale_inv"] = scale if scales.itemsize == 1 else scale * 1.1
        if block is None:
            made[f"{name}_scale_inv"] = made[f"{name}_scale_inv"].reshape(())
            made[f"{name.removesuffix('weight')}activation_scale"] = torch.ones(())
    told = {"weight_block_size": block, "activation_scheme": "dynamic" if block else "static"}
    return written(folder, made, quant_method="fp8", **told)


def in_mxfp4(folder: Path) -> Path:
    made: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            made[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        made[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        made[f"{name}_scales"] = torch.randint(0, 255, (experts, outputs, inputs // 32)).to(torch.uint8)
    return written(folder, made, quant_method="mxfp4")


def in_bits(folder: Path, **told: Any) -> Path:
    how = BitsAndBytesConfig(**told)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, dtype="auto", device_map="cpu"
    )
    model.save_pretrained(folder / "quantised")
    return folder / "quantised"


DOWN = "model.layers.0.mlp.down_proj.weight"
STATE = f"{DOWN}.quant_state.bitsandbytes__nf4"
BLOCKS = "model.layers.0.mlp.experts.down_proj_blocks"


def told(state: Tensor, **changes: Any) -> Tensor:
    """What bitsandbytes says of a matrix, changed."""
    text = json.dumps(json.loads(bytes(state.tolist())) | changes)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
KINDS: dict[str, tuple[Callable[[Path], Path], Any]] = {
    "fp8": (lambda at: in_fp8(plain("deepseek_v3", at), (16, 16)), FineGrainedFP8Config(dequantize=True)),
    "mxfp4": (lambda at: in_mxfp4(plain("gpt_oss", at)), Mxfp4Config(dequantize=True)),
    "nf4_twice": (
        lambda at: in_bits(plain("qwen3", at, intermediate_size=80), **FOUR, bnb_4bit_use_double_quant=True),
        None,
    ),
    "fp8_tied": (lambda at: in_fp8(plain("qwen3", at), (32, 16)), FineGrainedFP8Config(dequantize=True)),
    "fp8_tensors": (lambda at: in_fp8(plain("qwen3", at), None), FineGrainedFP8Config(dequantize=True)),
    "fp8_exponents": (
        lambda at: in_fp8(plain("qwen3", at), (16, 32), torch.float8_e8m0fnu),
        FineGrainedFP8Config(dequantize=True),
    ),
    "int8": (lambda at: in_bits(plain("deepseek_v3", at), load_in_8bit=True), None),
    "fp4": (lambda at: in_bits(plain("qwen3", at), load_in_4bit=True, bnb_4bit_quant_type="fp4"), None),
    "nf4_in_bf16": (
        lambda at: in_bits(plain("qwen3", at), **FOUR, bnb_4bit_quant_storage=torch.bfloat16),
        None,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


def made(kind: str, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """A quantised folder, and what transformers makes of it, by the names in memory."""
    make, how = KINDS[kind]
    at = folder / kind
    at = make(at) if not at.exists() else next(iter(at.glob("quantised")), at)
    given = {} if how is None else {"quantization_config": how}
    model = AutoModelForCausalLM.from_pretrained(at, dtype=torch.bfloat16, device_map="cpu", **given)
    model = model.dequantize() if how is None else model
    return at, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, but that one NaN is as good as another."""
    return torch.equal(one.nan_to_num(nan=1.25), other.to(one.dtype).nan_to_num(nan=1.25))


@pytest.fixture(autouse=True)
def rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AVX-512 bitsandbytes' kernel takes scales of other blocks where a row ends inside of a block."""
    kernel = torch.ops.bitsandbytes.dequantize_4bit.default

    def call(
        A: Tensor, absmax: Tensor, size: int, kind: str, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        return kernel(A, absmax, size, kind, (math.prod(shape),), dtype).reshape(shape)

    monkeypatch.setattr(torch.ops.bitsandbytes, "dequantize_4bit", SimpleNamespace(default=call))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_transformers(kind: str, folder: Path) -> None:
    at, expected = made(kind, folder)
    model, _ = load_transformers(at, tokenizer="bytes", precision="bf16")
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same(found[name], tensor), name
    assert found["model.layers.1.self_attn.o_proj.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", often(KINDS, 3))
def test_a_rank_reads_its_part_and_the_scales_that_cover_it(kind: str, folder: Path) -> None:
    at, _ = made(kind, folder)
    model = hub_model(read_config(at))
    mesh = Mesh.of(tp=2) if model.family == "qwen3" else Mesh.of(tp=2, dp=2, ep=2)
    with HfWeights(at, folder_names(model).of) as weights:
        for spec in (spec for spec in stored_specs(model) if not spec.buffer):
            whole, reads = weights.read(spec), []
            for here in (ALONE, *map(mesh.at, range(mesh.size))):
                before = weights.reader.read_bytes
                part = weights.read(spec, here)
                reads.append(weights.reader.read_bytes - before)
                assert same(part, part_of(spec, whole, here)), spec.name
            ways = whole.numel() // part.numel()
            # Cut blocks are whole in scales, and 32 numbers of 4 bits in a byte string.
            assert max(reads[1:]) <= reads[0] / ways + reads[0] / 8 + 1100, spec.name


@pytest.mark.parametrize("block", [(24, 40), (128, 128), (1, 64)])
def test_blocks_need_not_divide_a_matrix(block: tuple[int, int], tmp_path: Path) -> None:
    """transformers refuses these, of which DeepSeek-V3's own kv_a_proj_with_mqa is one."""
    at = in_fp8(plain("qwen3", tmp_path), block)
    stored = {name: each for file in at.glob("*.safetensors") for name, each in load_file(file).items()}
    catalog = open_checkpoint(at)
    with Reader(catalog) as reader:
        for entry in catalog.entries:
            scale = stored.get(f"{entry.name}_scale_inv")
            if scale is None:
                continue
            found = torch.zeros(entry.shape, dtype=torch.bfloat16)
            reader.fill(entry, [whole_part(entry.shape)], as_numpy(found), "bfloat16")
            wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            expected = stored[entry.name].float() * wide[: entry.shape[0], : entry.shape[1]]
            assert same(found, expected), entry.name


def there_and_back(rank: int, world_size: int, case: Case, folder: Path) -> None:
    engine, _ = dsx_run.build(case, folder)
    dsx.export_hf(engine, folder / "exported")
    engine.train_batch(dsx_run.batches(case, 0, engine.groups.dp_rank))


@pytest.mark.parametrize(
    ("kind", "case"),
    often(
        [
            ("nf4_twice", Case(tp=2, pp=2, implementation="transformers", bf16=True)),
            ("fp8", Case(family="deepseek_v3", tp=2, pp=2, dp=2, ep=2, zero=1, bf16=True, accumulation=2)),
            ("mxfp4", Case(family="gpt_oss", pp=2, dp=2, ep=2, bf16=True, zero=1, accumulation=2)),
            ("fp8_tied", Case(tp=2, dp=2, zero=3, bf16=True)),
        ],
        2,
    ),
    ids=str,
)
def test_ranks_export_the_plain_model(kind: str, case: Case, folder: Path) -> None:
    at, expected = made(kind, folder)
    ranks.run(there_and_back, case.world_size, case, at)
    assert "quantization_config" not in json.loads((at / "exported" / "config.json").read_text())
    plain = AutoModelForCausalLM.from_pretrained(at / "exported", dtype="auto").state_dict()
    for name, tensor in expected.items():
        assert same(plain[name], tensor), name


def test_a_conversion_writes_the_plain_model(folder: Path, tmp_path: Path) -> None:
    at, expected = made("mxfp4", folder)
    source = open_checkpoint(at)
    prepare(source, tmp_path / "plain", WantedTarget(format="hf")).run(ConversionOptions())
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    assert all(same(tensor, expected[name]) for name, tensor in model.state_dict().items())
    found = list(compare(source, open_checkpoint(tmp_path / "plain")))
    assert len(found) == len(source.entries)
    assert all(each.equal for each in found)


def adapted(rank: int, world_size: int, case: Case, base: Path, folder: Path) -> None:
    engine, _ = dsx_run.build(case, base)
    engine.train_batch(dsx_run.batches(case, 0, engine.groups.dp_rank))
    engine.save_checkpoint(folder / "run", tag="one")
    dsx.export_hf(engine, folder / "peft")


def test_an_adapter_is_merged_into_a_base_that_stays_quantised(folder: Path, tmp_path: Path) -> None:
    at, expected = made("fp8_tied", folder)
    keys = (("rank", 4), ("quantization", "int8"))
    case = Case(tp=2, bf16=True, adapter=(*keys, ("targets", ["q_proj"])), accumulation=1)
    ranks.run(adapted, 2, case, at, tmp_path)
    source = open_checkpoint(tmp_path / "run" / "one")
    prepare(source, tmp_path / "whole", WantedTarget(format="hf")).run(ConversionOptions())
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto").state_dict()
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**read_config(at)), dtype=torch.bfloat16)
    plain.load_state_dict(expected)
    merged = PeftModel.from_pretrained(plain, tmp_path / "peft").merge_and_unload().state_dict()
    moved = [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
    assert moved == [name for name in found if "q_proj" in name]
    for name, tensor in merged.items():
        assert torch.allclose(found[name].float(), tensor.float(), atol=1e-3, rtol=1e-2), name


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "fbgemm_fp8", None])
def test_other_methods_are_refused_by_name(method: str | None, tmp_path: Path) -> None:
    at = plain("qwen3", tmp_path)
    config = json.loads((at / "config.json").read_text())
    told = {"quantization_config": {"quant_method": method, "bits": 4}}
    (at / "config.json").write_text(json.dumps(config | told))
    for read in (open_checkpoint, read_config, lambda each: dsx_run.build(Case(), each)):
        with pytest.raises(DsxError, match=rf"quantization_config.quant_method = {method!r}: dsx reads"):
            read(at)


SCALES, DOUBLE = f"{DOWN}_scale_inv", f"{DOWN}.nested_absmax"
FAULTS: list[tuple[str, str, Any, str]] = [
    ("fp8", SCALES, None, f"{SCALES}: it is missing"),
    ("fp8", SCALES, lambda _: torch.ones(3, 3), r"needs .*\(4, 6\)"),
    ("fp8", SCALES, lambda held: held.int(), "it is int32"),
    ("nf4_twice", DOUBLE, None, "nested_absmax: it is missing"),
    ("nf4_twice", DOWN, lambda held: held[:-1].clone(), "the tensor needs uint8"),
    ("nf4_twice", STATE, lambda held: held[:9].clone(), "no shape and blocks"),
    ("nf4_twice", STATE, lambda held: told(held, blocksize=48), "in blocks of 48"),
    ("nf4_twice", STATE, lambda held: told(held, shape=[64, -80]), "64 by -80"),
    ("nf4_twice", STATE, lambda held: told(held, shape=[1 << 40, 80]), "needs uint8"),
    ("mxfp4", BLOCKS, lambda held: held[..., :8].clone(), "the tensor needs uint8"),
    ("int8", f"{DOWN.removesuffix('weight')}SCB", None, "SCB|I8"),
]


@pytest.mark.parametrize(("kind", "name", "harm", "words"), FAULTS)
def test_parts_that_do_not_fit_are_one_error(
    kind: str, name: str, harm: Any, words: str, folder: Path, tmp_path: Path
) -> None:
    at, _ = made(kind, folder)
    held = {key: each for file in at.glob("*.safetensors") for key, each in load_file(file).items()}
    harmed = held.pop(name)
    held |= {} if harm is None else {name: harm(harmed)}
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(at / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=words), HfWeights(tmp_path) as weights:
        weights.check(stored_specs(hub_model(read_config(tmp_path))))
