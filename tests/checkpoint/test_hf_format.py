"""Hugging Face folders against transformers itself and safetensors: slices in, shards out, and refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Model

from dsx.checkpoint.claims import model_of
from dsx.checkpoint.formats.huggingface import names
from dsx.checkpoint.formats.huggingface import weights as hf
from dsx.checkpoint.formats.slices import merge
from dsx.checkpoint.staging import claimed
from dsx.errors import CheckpointError
from dsx.models.params import param_specs
from dsx.parallel.mesh import Mesh
from tiny_configs import tiny

FIRST, SECOND = Mesh.of(tp=2).at(0), Mesh.of(tp=2).at(1)
_SIZES = {"vocabulary": 131, "width": 48, "heads": 8, "layers": 2, "bos_token_id": 0, "eos_token_id": 0}
_GROUPED = _SIZES | {"ffn": 56, "kv_heads": 4, "head_dim": 10}
CONFIGS = {
    "llama": tiny("llama", **_GROUPED, attention_bias=True, mlp_bias=True),
    "llama-tied": tiny(
        "llama", **_SIZES | {"heads": 4, "layers": 1}, ffn=56, kv_heads=4, tie_word_embeddings=True
    ),
    "gpt2": tiny("gpt2", **_SIZES | {"heads": 4}, n_positions=32),
    "qwen2-tied": tiny("qwen2", **_SIZES | {"layers": 1}, ffn=56, kv_heads=4, tie_word_embeddings=True),
    "qwen3": tiny("qwen3", **_GROUPED),
    "gemma2": tiny("gemma2", **_GROUPED),
    "gpt_neox": tiny("gpt_neox", **_SIZES | {"width": 64}, ffn=56),
}


def save(name, folder, dtype=torch.float32, max_shard_size="5GB"):
    """A folder as transformers writes it, and its model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    for p in model.parameters():
        torch.nn.init.normal_(p)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model.eval()


def specs_of(folder):
    return param_specs(model_of(names.read_config(folder)), pad_multiple=8)


def exported(weights, specs):
    """Hugging Face tensors of a model that one rank holds."""
    out = {}
    for spec in specs:
        out |= hf.split(spec, merge(spec, [weights.read(spec)]))
    return out


def tensors_in(folder):
    """Every tensor of every safetensors file, by name."""
    out = {}
    for file in Path(folder).glob("*.safetensors"):
        loaded = load_file(file)
        assert not out.keys() & loaded.keys()
        out |= loaded
    return out


def same_bytes(a, b):
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape
        and torch.equal(a[k].contiguous().view(torch.uint8), b[k].contiguous().view(torch.uint8))
        for k in a
    )  # fmt: skip


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_import_then_export_gives_the_same_bytes(tmp_path, name, dtype, tp, shards):
    save(name, tmp_path / "a", dtype)
    specs = specs_of(tmp_path / "a")
    with hf.HfWeights(tmp_path / "a") as weights:
        weights.check(specs)
        places = [Mesh.of(tp=tp).at(rank) for rank in range(tp)]
        shards_of = {spec: [weights.read(spec, at) for at in places] for spec in specs}
    for spec, shards_here in shards_of.items():
        assert all(tuple(t.shape) == spec.local_shape(places[0]) and t.is_contiguous() for t in shards_here)
    files = {}
    for index in range(shards):
        tensors = {}
        for spec in specs[index::shards]:
            tensors |= hf.split(spec, merge(spec, shards_of[spec]))
        files |= hf.write_shard(tmp_path / "b", index, shards, tensors)
    assert not (tmp_path / "b").exists()
    hf.finish(tmp_path / "b", names.read_config(tmp_path / "a"), files, specs_of(tmp_path / "a"))
    assert same_bytes(tensors_in(tmp_path / "a"), tensors_in(tmp_path / "b"))
    assert not (tmp_path / "b.partial").exists()


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_loads_in_transformers(tmp_path, name, shards):
    model = save(name, tmp_path / "a")
    specs = specs_of(tmp_path / "a")
    weights = hf.HfWeights(tmp_path / "a")
    files = {}
    for index in range(shards):
        tensors = exported(weights, specs[index::shards])
        files |= hf.write_shard(tmp_path / "b", index, shards, tensors)
    config = names.read_config(tmp_path / "a")
    del config["architectures"]
    hf.finish(tmp_path / "b", config, files, specs)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(report.values()), report
    ids = torch.arange(20)[None]
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_sharded_files_and_their_index_are_read(tmp_path, name):
    save(name, tmp_path / "one")
    save(name, tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    specs = specs_of(tmp_path / "one")
    with hf.HfWeights(tmp_path / "one") as one, hf.HfWeights(tmp_path / "many") as many:
        many.check(specs)
        for spec in specs:
            assert torch.equal(one.read(spec, SECOND), many.read(spec, SECOND))


def test_slices_are_the_rows_that_the_layout_says(tmp_path):
    """Against the linears of transformers, cut by hand: two of four key/value heads, and so on."""
    model = save("llama", tmp_path / "a")
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    specs = {spec.name: spec for spec in specs_of(tmp_path / "a")}
    weights = hf.HfWeights(tmp_path / "a")
    qkv = torch.cat(
        [attention.q_proj.weight[40:], attention.k_proj.weight[20:], attention.v_proj.weight[20:]]
    )
    assert torch.equal(weights.read(specs["2.attention.qkv.weight"], SECOND), qkv)
    assert torch.equal(weights.read(specs["2.attention.out.weight"], SECOND), attention.o_proj.weight[:, 40:])
    bias = torch.cat([mlp.gate_proj.bias[14:28], mlp.up_proj.bias[14:28]])
    assert torch.equal(weights.read(specs["2.mlp.gate_up.bias"], Mesh.of(tp=4).at(1)), bias)
    word = weights.read(specs["0.word.weight"], SECOND)  # 131 rows, 72 a rank
    assert torch.equal(word[:59], model.model.embed_tokens.weight[72:])
    assert not word[59:].any()
    assert word.shape == (72, 48)


def test_gpt2_is_turned_around(tmp_path):
    model = save("gpt2", tmp_path / "a")
    specs = {spec.name: spec for spec in specs_of(tmp_path / "a")}
    weights = hf.HfWeights(tmp_path / "a")
    attention = model.transformer.h[0].attn
    q, k, v = attention.c_attn.weight.split(48, dim=1)
    expected = torch.cat([t[:, 24:].t() for t in (q, k, v)])
    assert torch.equal(weights.read(specs["2.block.attn.c_attn.weight"], SECOND), expected)
    out = weights.read(specs["2.block.attn.c_proj.weight"], FIRST)
    assert torch.equal(out, attention.c_proj.weight[:24].t())


def test_a_rank_of_padding_only_gets_zeros(tmp_path):
    save("llama", tmp_path / "a")
    config = names.read_config(tmp_path / "a")
    word = param_specs(model_of(config), pad_multiple=64)[0]
    local = hf.HfWeights(tmp_path / "a").read(word, Mesh.of(tp=4).at(3))
    assert local.shape == (64, 48)
    assert not local.any()


def test_hub_names_without_the_prefix_are_found(tmp_path):
    """openai-community/gpt2 stores the bare model, with its causal masks."""
    model = save("gpt2", tmp_path / "a")
    bare = GPT2Model(CONFIGS["gpt2"])
    bare.load_state_dict(model.transformer.state_dict())
    state = {**bare.state_dict(), "h.0.attn.bias": torch.ones(1, 1, 32, 32)}
    (tmp_path / "b").mkdir()
    save_file(state, tmp_path / "b" / "model.safetensors", metadata={"format": "pt"})
    specs = specs_of(tmp_path / "a")
    with hf.HfWeights(tmp_path / "a") as full, hf.HfWeights(tmp_path / "b") as hub:
        hub.check(specs)
        assert "h.0.attn.bias" in hub.reader.catalog.by_name
        for spec in specs:
            assert torch.equal(full.read(spec, SECOND), hub.read(spec, SECOND))


def test_names_and_buffers_of_older_gpt_neox_files_are_known(tmp_path):
    """EleutherAI/pythia-* store causal masks and frequencies; transformers 5 names the head anew."""
    save("gpt_neox", tmp_path / "a")
    state = tensors_in(tmp_path / "a")
    state["lm_head.weight"] = state.pop("embed_out.weight")
    for name in ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"):
        state[f"gpt_neox.layers.1.{name}"] = torch.ones(4)
    (tmp_path / "b").mkdir()
    save_file(state, tmp_path / "b" / "model.safetensors", metadata={"format": "pt"})
    specs = specs_of(tmp_path / "a")
    with hf.HfWeights(tmp_path / "a") as full, hf.HfWeights(tmp_path / "b") as hub:
        hub.check(specs)
        for spec in specs:
            assert torch.equal(full.read(spec, SECOND), hub.read(spec, SECOND))


def test_only_the_slice_is_read(tmp_path):
    """Bytes of files, for one of four ranks."""
    save("llama", tmp_path / "a")
    specs = {spec.name: spec for spec in specs_of(tmp_path / "a")}
    weights = hf.HfWeights(tmp_path / "a")
    local = weights.read(specs["1.attention.qkv.weight"], Mesh.of(tp=4).at(2))
    assert weights.reader.read_bytes == local.numel() * local.element_size()


def edit(folder, change):
    file = folder / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model.norm.weight"), r"tensor model\.norm\.weight: it is missing"),
        (
            lambda s: s.update({"model.norm.weight": torch.zeros(47)}),
            r"model\.safetensors: tensor model\.norm\.weight, weight: it is float32 \(47,\).*needs .*\(48,\)",
        ),
        (
            lambda s: s.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}),
            "its type is I8",
        ),
        (
            lambda s: s.update({"model.layers.0.self_attn.q_norm.weight": torch.zeros(10)}),
            r"safetensors: tensor model\.layers\.0\.self_attn\.q_norm\.weight: the model has no place for it",
        ),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path, change, message):
    save("llama", tmp_path / "a")
    edit(tmp_path / "a", change)
    with pytest.raises(CheckpointError, match=message), hf.HfWeights(tmp_path / "a") as weights:
        weights.check(specs_of(tmp_path / "a"))


def test_broken_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: there is no such file"):
        names.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable"):
        names.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        names.read_config(tmp_path)
    save("llama", tmp_path / "a")
    index = tmp_path / "a" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    norm = next(spec for spec in specs_of(tmp_path / "a") if spec.hf == ("model.norm.weight",))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        hf.HfWeights(tmp_path / "a").read(norm)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        hf.HfWeights(tmp_path / "a")


def test_padded_tensors_are_not_exported(tmp_path):
    save("llama", tmp_path / "a")
    word = specs_of(tmp_path / "a")[0]
    padded = hf.HfWeights(tmp_path / "a").read(word)
    with pytest.raises(CheckpointError, match=r"its shape is \(136, 48\), not \(131, 48\)"):
        hf.split(word, padded)


def test_an_incomplete_export_never_appears(tmp_path):
    save("llama", tmp_path / "a")
    specs, config = specs_of(tmp_path / "a"), names.read_config(tmp_path / "a")
    tensors, out = exported(hf.HfWeights(tmp_path / "a"), specs), tmp_path / "b"
    first = dict(list(tensors.items())[:5])
    files = hf.write_shard(out, 0, 2, first)
    assert set(files.values()) == {"model-00001-of-00002.safetensors"}
    with pytest.raises(CheckpointError, match=r"missing tensors \['lm_head\.weight', 'model\.layers\.0"):
        hf.finish(out, config, files, specs)
    both = files | dict.fromkeys(tensors.keys() - first.keys(), "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: not a readable"):
        hf.finish(out, config, both, specs)
    assert not out.exists()
    files = hf.write_shard(out, 0, 1, tensors)  # another try, in one shard: what the first left is swept away
    hf.finish(out, config, files, specs)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(CheckpointError, match="it exists already"):
        hf.write_shard(out, 0, 1, tensors)


def test_a_stage_without_tensors_leaves_no_file(tmp_path):
    """The last stage of a pipeline may hold nothing but the tied head."""
    model = save("llama-tied", tmp_path / "a")
    tensors = exported(hf.HfWeights(tmp_path / "a"), specs_of(tmp_path / "a"))
    files = hf.write_shard(tmp_path / "b", 0, 2, tensors) | hf.write_shard(tmp_path / "b", 1, 2, {})
    hf.finish(tmp_path / "b", names.read_config(tmp_path / "a"), files, specs_of(tmp_path / "a"))
    assert not (tmp_path / "b" / "model-00002-of-00002.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert same_bytes(dict(loaded.state_dict()), dict(model.state_dict()))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        hf.write_shard(tmp_path / "file" / "b", 0, 1, {})
    (tmp_path / "b.partial" / "adapter_model.safetensors").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="cannot be written"):
        hf.finish_adapter(tmp_path / "b", {}, {}, [])


def test_one_export_at_a_time_makes_a_folder_and_removes_nothing_of_others(tmp_path: Path) -> None:
    out, aside = tmp_path / "out", tmp_path / "out.partial"
    first = claimed(out, hf.may_be_left)
    with pytest.raises(CheckpointError, match="another process is writing this folder now"):
        claimed(out, hf.may_be_left)
    (aside / "data.vm.1.of-a-conversion").mkdir()
    with pytest.raises(CheckpointError, match="another process is writing"):
        claimed(out, hf.may_be_left)
    (aside / "data.vm.1.of-a-conversion").rmdir()
    (aside / "model-00001-of-00002.safetensors").touch()
    (aside / ".config.json.partial").touch()
    first.release()
    claimed(out, hf.may_be_left).release()
    (aside / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match=r"thesis\.tex: it is in the way"):
        claimed(out, hf.may_be_left)
