"""``dsx models``: families by their configs, and one model tried."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dsx.models.hf_config import FAMILIES

COMMAND = ("models",)
TINY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def config(folder: Path, family: str, **more: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": family, **TINY, **more}))
    return folder


def test_every_family_of_transformers_is_listed_with_what_runs_or_the_reason(dsx, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # in 80 it goes on below itself
    code, out, err = dsx("--format", "json")
    assert (code, err) == (0, "")
    rows = {row["family"]: row for row in json.loads(out)}
    assert rows.keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert {name for name, row in rows.items() if row["implementation"] == "dsx"} == FAMILIES.keys()
    assert rows["olmo2"]["implementation"] == "transformers"
    assert rows["olmo2"]["tensor_plan"]
    assert not rows["gpt_oss"]["tensor_plan"]
    assert "an encoder and a decoder" in rows["bart"]["refused"]
    assert "dsx trains the language model; name its folder" in rows["gemma3"]["refused"]
    code, out, _ = dsx()
    assert re.search(r"^bart +refused +no +it has an encoder and a decoder", out, re.MULTILINE)
    assert out.splitlines()[-1].startswith(f"dsx {len(FAMILIES)}, refused ")


def test_one_model_is_tried_without_its_weights(dsx, tmp_path: Path) -> None:
    folder = config(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    code, out, err = dsx(folder)
    assert (code, err) == (0, "")
    assert re.search(r"^tensor +1, 2, 4$", out, re.MULTILINE)
    assert re.search(r"^heads +4, key/value heads 2$", out, re.MULTILINE)
    assert ": loss and every gradient are those of transformers" in out
    assert "sequence parallelism is right" in out
    methods = "all_gather, ulysses and ring"
    assert re.search(rf"^context +ranks may share sequences by {methods}$", out, re.MULTILINE)
    assert re.search(r"^selective +attention alone may be computed again$", out, re.MULTILINE)
    code, out, _ = dsx(folder / "config.json", "--format", "json")
    found = json.loads(out)
    (gate,) = found["whole"]
    assert (code, gate["module"]) == (0, "mlp.gate")
    block = 4 * 32 * 8 * 2 + 2 * 32 * 2 * 8 * 2  # a head is 8 wide by the class's default of hidden / heads
    assert 0 < gate["parameters"] < gate["work"] < 4 * 32 / block
    assert found["parameters"] > 2 * 4 * 3 * 16 * 32


def test_what_sees_whole_sequences_is_told_with_its_share(dsx, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bloom", "vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4})
    )
    code, out, _ = dsx(tmp_path)
    attention, norms, mlp = 4 * 32 * 33, 4 * 32, 32 * 128 + 128 + 128 * 32 + 32  # with biases
    told = f"self_attention: whole sequences on every rank, {attention / (attention + norms + mlp):.1%}"
    assert (code, told in out) == (0, True), out
    assert re.search(r"^selective +refused: no block of it attends", out, re.MULTILINE)
    kept = json.loads(re.search(r"as dsx.parallel.tensor_plan:\n *({.*?})", out, re.DOTALL)[1])  # to be kept
    assert kept["transformer.h.*.self_attention.query_key_value"] == "colwise"


def test_what_is_refused_is_bad_and_named(dsx, tmp_path: Path) -> None:
    code, out, err = dsx(config(tmp_path, "bert"))
    assert code == 1, err
    assert "is_decoder = False" in err
    assert "refused" in out or "Fix: " in err
    code, out, err = dsx(config(tmp_path, "t5"))
    assert (code, out) == (1, "")
    assert "model_type = 't5'" in err
    code, out, err = dsx(config(tmp_path, "llama", num_hidden_layers=0))
    assert (code, out) == (1, "")
    assert "it has no list of blocks, or one of no blocks" in err
    (tmp_path / "config.json").unlink()
    code, out, err = dsx(tmp_path)
    assert (code, out) == (2, "")
    assert "config.json" in err
