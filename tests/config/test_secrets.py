"""Values of keys that are secrets stand in nothing that is recorded, printed or sent."""

from __future__ import annotations

import json

import pytest

from config.sample_config import changed
from dsx.config.resolve import resolve
from dsx.config.wording import HIDDEN, at, without_secrets

KEYS = (
    "api_key",
    "apiKey",
    "API-KEY",
    "hf_token",
    "token",
    "password",
    "client_secret",
    "aws_secret_access_key",
)


@pytest.mark.parametrize("key", KEYS)
def test_a_secret_is_hidden_wherever_it_stands(key: str) -> None:
    given = {"comet": [{key: "sesame", "project": "p"}]}
    assert "sesame" not in json.dumps(without_secrets(given))
    assert at(f"comet.{key}", "sesame") == f'comet.{key} = "{HIDDEN}"'
    assert "sesame" not in at("comet", given)


def test_what_is_no_secret_stays() -> None:
    plain = {
        "pad_token_id": 3,
        "tokenizer": "bytes",
        "eos_token": "</s>",
        "chunk_tokens": 8,
        "key": "k",
        "api_key": "",
    }
    assert without_secrets(plain) == plain
    assert without_secrets({"url": "https://me:word@host/x"}) == {"url": f"https://{HIDDEN}@host/x"}


def test_a_run_records_no_secret() -> None:
    config = resolve(changed({"comet": {"enabled": False, "api_key": "sesame"}}), world_size=8)
    assert config.resolved()["comet"]["api_key"] == "sesame"  # DeepSpeed needs it
    assert config.recorded()["comet"] == {"enabled": False, "api_key": HIDDEN}


def test_findings_show_no_secret(dsx, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 1, "wandb": {"api_key": "sesame"}, "hf_token": "sesame"}))
    for style in ("table", "json"):
        _, out, err = dsx("check", path, "--format", style)
        assert "hf_token" in out
        assert "sesame" not in out + err
