"""Text from checkpoints of adapters and from PEFT's folders, against PEFT's own; turns of a chat."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import dsx
import ranks
from data.chat_tokenizers import published, save_tokenizer
from dsx.errors import CheckpointError, DataError
from parity import dsx_run, oracle
from parity.dsx_run import Case

PROMPT, TOKENS = "def é(", 16
ALSO = ["embed_tokens", "lm_head"]
KINDS: dict[str, tuple[Case, dict[str, Any]]] = {
    "llama": (Case(tp=2, pp=2, zero=1), {"use_dora": True, "modules_to_save": ALSO}),
    "gpt2": (Case(family="gpt2", tp=2, pp=2, chunks=2), {"use_dora": True}),
    "qwen2": (Case(family="qwen2", pp=2, dp=2, zero=2, implementation="transformers"), {}),
}


def start(family: str, folder: Path) -> None:
    """A model, and an adapter of PEFT's that has learnt something."""
    oracle.save_model(family, folder / "base")
    settings = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", **KINDS[family][1])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), settings)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder / "start")


def train(rank: int, world_size: int, folder: str) -> None:
    for family, (case, _) in KINDS.items():
        place = Path(folder) / family
        own = replace(case, adapter=(("path", str(place / "start")),))
        engine, _ = dsx_run.build(own, place / "base")
        engine.train_batch(dsx_run.batches(own, 0, engine.groups.dp_rank))
        engine.save_checkpoint(str(place / "checkpoints"), client_state={"tokenizer": "bytes"})
        dsx.export_hf(engine, str(place / "peft"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    for family in KINDS:
        start(family, folder / family)
    ranks.run(train, 4, str(folder))
    return folder


def greedy(model: Any) -> list[int]:
    ids = torch.tensor([list(PROMPT.encode())])
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": 256, "pad_token_id": 256}
    made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    return made[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", KINDS)
def test_adapters_write_what_they_write_under_peft(trained: Path, family: str) -> None:
    place = trained / family
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    plain = greedy(base)
    reference = PeftModel.from_pretrained(base, place / "peft").eval()
    expected = greedy(reference)
    assert expected != plain
    assert greedy(reference.merge_and_unload()) == expected
    logits = reference.merge_and_unload()(torch.arange(20)[None]).logits
    for checkpoint in (place / "checkpoints", place / "peft"):
        model, _ = dsx.load_transformers(checkpoint, tokenizer="bytes")
        assert greedy(model) == expected, checkpoint
        assert torch.allclose(model(torch.arange(20)[None]).logits, logits, rtol=0, atol=1e-4)


def test_the_base_may_have_moved(trained: Path, tmp_path: Path) -> None:
    place = trained / "llama"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for file in (place / "peft").iterdir():
        (adapter / file.name).write_bytes(file.read_bytes())
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "gone")
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"adapter: .*gone.*--model"):
        dsx.load_transformers(adapter, tokenizer="bytes")
    model, _ = dsx.load_transformers(adapter, config=place / "base", tokenizer="bytes")
    again, _ = dsx.load_transformers(place / "peft", tokenizer="bytes")
    assert greedy(model) == greedy(again)


@pytest.mark.parametrize(("template", "end"), [("qwen2_5", "<|im_end|>"), ("llama3", "<|eot_id|>")])
def test_a_chat_ends_with_the_assistants_turn(tmp_path: Path, template: str, end: str) -> None:
    words = save_tokenizer(tmp_path, template=published(template))
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = LlamaConfig(vocab_size=1280, initializer_range=0.3, max_position_embeddings=2048, **sizes)
    model = LlamaForCausalLM(settings).eval()
    chat = [{"role": "user", "content": "How deep is it?"}]
    ids = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2}
    made = model.generate(**ids, **options, eos_token_id=[])[0, ids["input_ids"].shape[1] :].tolist()
    with torch.no_grad():  # the turn's end is now a little likelier than the fourth token
        model.lm_head.weight[words.convert_tokens_to_ids(end)] = 1.01 * model.lm_head.weight[made[3]]
    expected = made[: made.index(made[3])]
    model.save_pretrained(tmp_path)
    loaded, tokenizer = dsx.load_transformers(tmp_path)
    written = dsx.generate(loaded, tokenizer, chat[0]["content"], tokens=8, temperature=0, chat=True)
    assert written == words.decode(expected, skip_special_tokens=True)
    with pytest.raises(DataError, match="no chat template"):
        dsx.generate(loaded, dsx.load_transformers(tmp_path, tokenizer="bytes")[1], "Hi", chat=True)
