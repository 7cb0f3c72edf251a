"""Values of keys that are secrets stand in nothing that is recorded, printed or sent."""

from __future__ import annotations

import json

import pytest

from config.sample_config import changed
from dsx.config.resolve import resolve
from dsx.config.wording import HIDDEN, at, parted_from_secrets, without_secrets
from dsx.doctor.mend import Mended
from dsx.launch.entry import parse_arguments

KEYS = (
    "api_key",
    "apiKey",
    "API-KEY",
    "hf_token",
    "token",
    "password",
    "client_secret",
    "aws_secret_access_key",
    "aws_access_key_id",
    "db_password",
    "wandb_key",
    "Authorization",
)


@pytest.mark.parametrize("key", KEYS)
def test_a_secret_is_hidden_wherever_it_stands(key: str) -> None:
    given = {"comet": [{key: "sesame", "project": "p"}], key: {"deeper": ["sesame"], "number": 5551}}
    shown = json.dumps(without_secrets(given))
    assert ("sesame" in shown, "5551" in shown, "project" in shown) == (False, False, True)
    parted, missing = parted_from_secrets(given)
    assert ("sesame" in json.dumps(parted), len(missing)) == (False, 3)
    text = json.dumps(given)
    assert "sesame" not in Mended(before=text, after=text.replace("project", "team"), findings=()).diff(
        "ds.json"
    )
    assert at(f"comet.{key}", "sesame") == f'comet.{key} = "{HIDDEN}"'
    assert "sesame" not in at("comet", given)


def test_what_is_no_secret_stays() -> None:
    plain = {
        "pad_token_id": 3,
        "tokenizer": "bytes",
        "eos_token": "</s>",
        "chunk_tokens": 8,
        "key": "k",
        "label_key": "answer",
        "compass": "north",
        "api_key": "",
        "path": "runs/hf_model_of_the_tenth_of_may_2026/sk-learn?step=3&monkey=x",
        "enabled_password": False,
    }
    assert without_secrets(plain) == plain
    for text in ("https://me:word@host/x", f"hf_{'aZ09' * 8}", "AKIA" + "A1" * 8, "x?token=word&y=1"):
        shown = without_secrets({"url": text})["url"]
        assert HIDDEN in shown
        assert not any(secret in shown for secret in ("word", "aZ09", "A1A1"))


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


SECRETS = {"comet": {"enabled": False, "api_key": "sesame", "project": "mine"}}


def test_a_copy_has_no_secret_and_says_so(dsx, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(changed(SECRETS)))
    code, out, err = dsx("init", tmp_path / "run", "--from", path, "--gpus", 8)
    assert (code, err) == (0, "")
    assert "comet.api_key: a secret, and not copied" in out
    written = {file.name: file.read_text() for file in (tmp_path / "run").iterdir()}
    assert "sesame" not in "".join([out, *written.values()])
    assert json.loads(written["train.json"])["comet"] == {"enabled": False, "project": "mine"}


def test_what_a_fix_shows_has_no_secret_and_what_it_writes_keeps_it(dsx, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "ds.json"
    text = """{
  // mine
  "train_batch_size": 1,
  api_key: sesame
  "hf_token": "sesame",
  "zero_optimisation": {"stage": 1}
}
"""
    path.write_text(text)
    said = dsx("check", path, "--diff=unsafe", "--no-machine")[1]
    assert "+" in said
    assert HIDDEN in said
    said += dsx("check", path, "--fix=unsafe", "--no-machine")[1]
    assert "sesame" not in said
    assert path.read_text() != text
    assert path.read_text().count("sesame") == 2


def test_the_command_line_that_others_record_has_no_secret(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """W&B and Comet read ``sys.argv`` when a run of theirs begins."""
    import wandb

    items = ["comet.api_key=sesame", 'comet={"api_key": "sesame", "project": "p"}', "dsx.train.steps=5"]
    words = ["a.json", *[word for item in items for word in ("--set", item)], f"--set={items[0]}"]
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    assert parse_arguments().overrides == (*items, items[0])
    recorded = wandb.Settings()._args
    assert recorded[:3] == ["a.json", "--set", f"comet.api_key={HIDDEN}"]
    assert "dsx.train.steps=5" in recorded
    assert "sesame" not in " ".join(recorded)
