"""Text from checkpoints of every kind, against transformers' own loading of the exported model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import dsx
import ranks
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.data.tokenizers import ByteTokenizer
from dsx.errors import CheckpointError, ConfigError, DataError, DsxError
from parity import dsx_run, oracle
from parity.dsx_run import Case

PROMPT = "def é("
TRAINED = {
    "llama": Case(family="llama", tp=2, pp=2, chunks=2, zero=1, accumulation=4, bf16=True),
    "gpt2": Case(family="gpt2", tp=2, pp=2, zero=3, accumulation=4),
}
STEPS = 2


def train(rank: int, world_size: int, folder: str) -> None:
    """Of each family steps, so that nothing is as it was initialised, a checkpoint after each, an export."""
    for family, case in TRAINED.items():
        engine, config = dsx_run.build(case, None)
        for step in range(STEPS):
            engine.train_batch(dsx_run.batches(case, step, engine.groups.dp_rank))
            engine.save_checkpoint(f"{folder}/{family}/checkpoints", client_state={"tokenizer": "bytes"})
        where = f"{folder}/{family}/hf/step{STEPS}"
        engine.run_config = None  # as of an ordinary DeepSpeed config, which does not say what the model is
        with pytest.raises(dsx.ModelError, match="give the model's Hugging Face config"):
            dsx.export_hf(engine, where)
        dsx.export_hf(engine, where, config=config.hf_config)


def train_stock(rank: int, world_size: int, folder: str) -> None:
    """Hugging Face's model under stock DeepSpeed, and what that itself generates."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    config = dsx_run.config(Case(family="gpt2", dp=world_size, zero=2, accumulation=1), None)
    del config["dsx"]
    engine, *_ = deepspeed.initialize(model=oracle.hf_model("gpt2"), config=config)
    engine.save_checkpoint(folder, tag="saved")
    if rank == 0:
        engine.module.save_pretrained(f"{folder}/model")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    ranks.run(train, 4, str(folder))
    return folder


@pytest.fixture(params=TRAINED)
def run(request: pytest.FixtureRequest, trained: Path) -> Path:
    """A run's folder."""
    return trained / request.param


def greedy(model, tokens: int = 20) -> list[int]:
    """What transformers generates, with nothing of dsx but the bytes of the prompt."""
    ids = torch.tensor([list(PROMPT.encode())])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=256
    )
    return made[0, ids.shape[1] :].tolist()


def same_weights(a, b) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_any_layout_generates_as_its_export(run):
    """The run's folder, its folder of checkpoints, the checkpoint and the export are the same model."""
    exported = run / "hf" / "step2"
    reference = AutoModelForCausalLM.from_pretrained(exported)
    expected = greedy(reference)
    assert len(set(expected)) > 2  # no one token again and again, which a broken model writes as well
    for place in (run, run / "checkpoints", run / "checkpoints" / "global_step2", exported):
        words = {"tokenizer": "bytes"} if place == exported else {}
        model, tokenizer = dsx.load_transformers(place, **words)
        assert same_weights(model, reference)
        assert greedy(model) == expected
        said: list[str] = []
        text = dsx.generate(model, tokenizer, PROMPT, tokens=20, temperature=0, show=said.append)
        assert text == bytes(one for one in expected if one < 256).decode(errors="replace")
        assert "".join(said) == text
    first, _ = dsx.load_transformers(run, step=1)
    assert not same_weights(first, reference)


@pytest.mark.parametrize("kind", ["universal", "deepspeed", "hf"])
def test_other_formats_give_the_same_model(run, tmp_path, kind):
    wanted = WantedTarget(format=kind, names="hf")
    prepare(open_checkpoint(run / "checkpoints"), tmp_path / "other", wanted).run(ConversionOptions())
    reference = AutoModelForCausalLM.from_pretrained(run / "hf" / "step2")
    model, _ = dsx.load_transformers(tmp_path / "other", config=run / "hf" / "step2", tokenizer="bytes")
    assert same_weights(model, reference)


def test_stock_deepspeed(tmp_path):
    ranks.run(train_stock, 2, str(tmp_path))
    with pytest.raises(CheckpointError, match=r"saved: it does not say what model it is of.*--model"):
        dsx.load_transformers(tmp_path, tokenizer="bytes")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model, _ = dsx.load_transformers(tmp_path, config=tmp_path / "model", tokenizer="bytes")
    assert same_weights(model, reference)
    assert greedy(model) == greedy(reference)
    other = json.loads((tmp_path / "model" / "config.json").read_text())
    for change, what in (
        ({"n_embd": 32}, r"tensor transformer\.wte\.weight.*\(261, 24\).*\(261, 32\)"),
        ({"n_layer": 5}, r"tensor transformer\.h\.4\..*missing"),
        ({"n_layer": 3}, r"tensor transformer\.h\.3\..*no place"),
        ({"model_type": "bert"}, r"no place|does not have"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(other | change))
        with pytest.raises(CheckpointError, match=what):
            dsx.load_transformers(tmp_path, config=tmp_path / "config.json", tokenizer="bytes")


def test_the_tokenizer_is_the_runs(run, tmp_path):
    exported = run / "hf" / "step2"
    with pytest.raises(DataError, match=r"neither the checkpoint nor .* names one.*--tokenizer"):
        dsx.load_transformers(exported)
    (run / "config.json").write_text(json.dumps({"dsx": {"data": {"tokenizer": "bytes"}}}))
    assert dsx.load_transformers(exported)[1].name == "bytes"
    (run / "config.json").unlink()


def test_a_tokenizer_of_another_model(run, tmp_path):
    config = json.loads((run / "hf" / "step2" / "config.json").read_text()) | {"vocab_size": 200}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"tokenizer bytes: it has 257 tokens, and the model in .* has 200"):
        dsx.load_transformers(run, config=tmp_path)


def test_draws_follow_the_seed(run):
    model, tokenizer = dsx.load_transformers(run, precision="fp32")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    def drawn(**settings) -> str:
        return dsx.generate(model, tokenizer, "", tokens=12, **settings)

    assert drawn(seed=1, temperature=2.0) == drawn(seed=1, temperature=2.0)
    assert drawn(seed=1, temperature=2.0) != drawn(seed=2, temperature=2.0)
    assert drawn(seed=1, top_k=1) == drawn(temperature=0) == drawn(seed=2, top_p=1e-6)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"tokens": 0}, "tokens = 0"),
        ({"tokens": 30}, r"tokens = 30: the prompt has 7, and the model was made for 32 .*at most 25"),
        ({"temperature": -1.0}, "temperature = -1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0}, "top_p = 0"),
    ],
)
def test_numbers_out_of_range(settings, what):
    with pytest.raises(ConfigError, match=what):
        dsx.generate(oracle.hf_model("llama"), ByteTokenizer(), PROMPT, **settings)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"checkpoint": "nowhere"}, "nowhere: there is no such folder"),
        ({"step": 7}, r"there is no folder .*global_step7.*global_step1, global_step2"),
        ({"precision": "fp8"}, "precision = fp8"),
        ({"device": "abacus"}, "device = abacus"),
        ({"config": "nowhere.json"}, r"nowhere\.json"),
    ],
)
def test_what_cannot_be_read_is_one_error(run, settings, what):
    with pytest.raises(DsxError, match=what):
        dsx.load_transformers(**{"checkpoint": run, **settings})


def test_layers_that_the_config_leaves_out(run, tmp_path):
    """A folder whose config has a layer fewer is another model; what is no parameter may be there too."""
    folder = tmp_path / "model"
    shutil.copytree(run / "hf" / f"step{STEPS}", folder)
    for file in (folder / "model.safetensors.index.json", *folder.glob("*.safetensors")):
        file.unlink()
    state = AutoModelForCausalLM.from_pretrained(run / "hf" / f"step{STEPS}").state_dict()
    buffers = ("model.layers.0.self_attn.rotary_emb.inv_freq", "transformer.h.0.attn.masked_bias")
    state |= {name: torch.zeros(4) for name in buffers}
    tensors = {name: tensor.clone() for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dsx.load_transformers(folder, tokenizer="bytes")
    config = json.loads((folder / "config.json").read_text())
    key = "n_layer" if "n_layer" in config else "num_hidden_layers"
    last = config[key] = config[key] - 1
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"tensor [a-z.]+\.{last}\..*: .* no place for it"):
        dsx.load_transformers(folder, tokenizer="bytes")


def test_bytes_are_text():
    assert ByteTokenizer().decode([*"né".encode(), 256, 0xC3, 260]) == "né\ufffd"
