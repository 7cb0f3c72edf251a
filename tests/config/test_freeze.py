"""``dsx.train.freeze``: what it names, and what is refused with the word that is near."""

from __future__ import annotations

from typing import Any

import pytest

import dsx
from dsx.errors import ConfigError


def _resolved(freeze: list[str], **model: Any) -> Any:
    content = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "dsx": {
            "model": {"preset": "tiny", "family": "llama", **model},
            "data": {"sequence_length": 16},
            "train": {"steps": 2, "output": "unused", "freeze": freeze},
        },
    }
    return dsx.load_config(content, world_size=1)


def _frozen(config: Any) -> set[str]:
    return {name for spec in config.param_specs if not spec.trained for name in spec.hf}


def test_expressions_are_searched_for_in_hugging_face_names() -> None:
    block = "model.layers.1."
    found = _frozen(_resolved(["embed_tokens", r"^model\.layers\.1\."]))
    assert "model.embed_tokens.weight" in found
    assert {name for name in found if name.startswith(block)} == {
        name for spec in _resolved([]).param_specs for name in spec.hf if name.startswith(block)
    }
    assert len(found) == 10
    assert _frozen(_resolved(["self_attn.[qkv]_proj"])) > {"model.layers.0.self_attn.k_proj.weight"}
    alone = _frozen(_resolved([r"0\.self_attn\.q_proj"], implementation="transformers"))
    assert alone == {"model.layers.0.self_attn.q_proj.weight"}


@pytest.mark.parametrize(
    ("freeze", "words"),
    [
        (["embed_token$"], ("dsx.train.freeze[0]", "no parameter", 'write "embed_tokens"')),
        (["norm", "model.layer.0"], ("dsx.train.freeze[1]", 'write "model.layers.0"')),
        (["("], ("no regular expression", "'('")),
        ([""], ("leaves nothing to train",)),
        (["q_proj"], ("self_attn.q_proj.weight and not", "one tensor here", '"transformers"')),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_once(freeze: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        _resolved(freeze)
    assert all(word in str(caught.value) for word in words), caught.value
