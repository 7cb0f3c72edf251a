"""Values of keys that are secrets stand in nothing that is recorded, printed or sent."""

from __future__ import annotations

import glob
import json
import math
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from config.sample_config import changed
from dsx.config.keys import reference
from dsx.config.resolve import resolve
from dsx.config.schema import DsxConfig
from dsx.config.wording import HIDDEN, at, parted_from_secrets, without_secrets
from dsx.doctor.mend import Mended
from dsx.errors import ConfigError
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
    "clientSecret",
    "wandbApiKey",
    "api_keys",
    "session_id",
    "OPENAI_API_KEY",
)
# As others spell theirs: environments, cloud SDKs, trackers and hubs.
MORE_KEYS = """
apikey APIKey x-api-key X-Api-Key AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN awsSessionToken secretAccessKey
accessKeyId AZURE_STORAGE_KEY AzureStorageAccountKey account_key sas_token subscription_key
Ocp-Apim-Subscription-Key GITHUB_TOKEN GH_TOKEN gitlab_token GITHUB_PAT HF_TOKEN hub_token push_to_hub_token
HUGGINGFACEHUB_API_TOKEN hugging_face_token WANDB_API_KEY wandb_key COMET_API_KEY NEPTUNE_API_TOKEN
anthropic_api_key openai_key ANTHROPIC_KEY access_token accessToken refreshToken id_token auth_token
bearer_token jwt_token jwt oauth_token SLACK_BOT_TOKEN slack_webhook_url webhookUrl private_key privateKey
ssh_key signing_key encryption_key service_key license_key client_secret client_secrets secret secrets
secretKey db_pass PGPASSWORD MYSQL_PWD passphrase credentials cookie SENTRY_DSN connectionString sessionId
access_tokens authorization basic_auth login_token
"""
# Of tokenizers, data sets and multi-modal models.
PLAIN_KEYS = """
tokens token_ids num_tokens max_tokens max_new_tokens pad_token eos_token mask_token cls_token use_cls_token
image_tokens user_tokens id_tokens additional_special_tokens special_tokens_map tokens_per_second tokenizer
tokenizer_class key keys key_value_heads num_key_value_heads base_config_key hashing_key share_att_key
author authors keyfile key_file sort_key label_key keyword passes bypass_lm passages_path pattern patience
cookies_path session sessions secretary password_length dsn_path samples_per_token max_atoms_per_token
"""


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


def test_the_words_of_a_key_are_known_in_any_spelling() -> None:
    shown = without_secrets(dict.fromkeys(MORE_KEYS.split(), "sesame"))
    assert [key for key, value in shown.items() if value != HIDDEN] == []


def test_no_key_of_a_model_of_deepspeed_or_of_dsx_is_a_secret() -> None:
    library = Path(find_spec("transformers").origin).parent  # type: ignore[union-attr, arg-type]
    files = [*library.glob("models/*/configuration_*.py"), library / "generation/configuration_utils.py"]
    models = [
        re.findall(r"^    +(?:self\.)?(\w+)\b[^=\n(]*=", file.read_text(), re.MULTILINE) for file in files
    ]
    blocks = DsxConfig.model_json_schema()
    ours = {key for block in (blocks, *blocks["$defs"].values()) for key in block.get("properties", ())}
    theirs = {part for key in reference().rows for part in key.path.split(".")}
    keys = {*ours, *theirs, *PLAIN_KEYS.split(), *(key for model in models for key in model)}
    assert len(keys) > 2000
    plain = dict.fromkeys(keys - {"api_key", "token"}, "open")  # Comet's and the hub's
    assert without_secrets(plain) == plain


PATHS = (
    "models/llama-sk-translation-8b-v2-final",
    "/data/sk-wikipedia-20240101-cleaned/*.jsonl",
    "sk-wikipedia-20240101-cleaned",
    "runs/en-sk-Translation-2024-of-the-tenth",
    f"/data/hf_{'aZ09' * 8}/part.jsonl",
    f"hf_{'aZ09' * 8}.jsonl",
    f"/scratch/AKIA{'A1' * 8}",
    "You are a bearer of good news, and the bearer internationalization",
    "https://host/x?page_token=1&key=public",
    "https://host:8080/x/@user/1",
    "docker://ubuntu:22.04@sha256:0a1b",
)


@pytest.mark.parametrize("key", ["path", "note"])
def test_no_path_and_no_sentence_is_a_secret(key: str) -> None:
    given = {key: list(PATHS)}
    assert without_secrets(given) == given
    assert parted_from_secrets(given) == (given, [])
    # By itself it could be a key, but not as the name of a file.
    assert (without_secrets(f"hf_{'aZ09' * 8}", key) == HIDDEN) == (key == "note")


def test_no_record_names_other_files() -> None:
    path = "/data/sk-wikipedia-20240101-cleaned/*.jsonl"
    given = changed({"dsx.data.source": path, "dsx.data.tokenizer": "bytes", "comet.api_key": "sesame"})
    assert without_secrets(given)["dsx"]["data"]["source"] == path
    assert not glob.has_magic(HIDDEN)


@pytest.mark.parametrize(
    "text",
    [
        f"s3://AKIA{'A1' * 8}:abc/word@bucket",
        "https://me:w@word@host/x",
        f"https://ghp_{'aZ09' * 9}@github.com/me/x",
        f"sk-proj-{'aZ09' * 8}",
        f"sk-{'0a1b' * 8}",
        f"HF_TOKEN=hf_{'aZ09' * 8}.",
        f"glpat-{'aZ09' * 5}",
        f"curl -H 'Authorization: Bearer {'aZ09' * 5}'",
        "https://host/x?a=1&X-Amz-Signature=word&b=1",
        "https://host/x?access_token=word",
        "https://host/x?api_key=word",
        "https://host/x?sig=word",
    ],
)
def test_a_text_in_the_form_of_a_secret_is_hidden(text: str) -> None:
    shown = without_secrets(text, "note")
    assert HIDDEN in shown
    assert not any(secret in shown for secret in ("word", "aZ09", "A1A1", "0a1b"))
    assert without_secrets(shown, "note") == shown


def test_what_was_hidden_is_refused_when_it_is_read(dsx, tmp_path) -> None:  # type: ignore[no-untyped-def]
    given = changed({"comet": {"enabled": False, "api_key": "sesame"}})
    record = resolve(given, world_size=8).recorded()
    with pytest.raises(ConfigError, match=r'comet\.api_key = "<hidden-secret>".*put the secret back'):
        resolve(record, world_size=8)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(record))
    assert (
        resolve(path, world_size=8, overrides=["comet.api_key=mine"]).deepspeed["comet"]["api_key"] == "mine"
    )
    code, out, _ = dsx("check", path, "--no-machine")
    assert code != 0
    assert "comet.api_key" in out
    assert "hidden-secret" in out
    record["comet"]["api_key"] = "mine"
    path.write_text(json.dumps(record))
    assert "hidden-secret" not in dsx("check", path, "--no-machine")[1]


def test_not_a_number_is_no_secret() -> None:
    text = '{"a": NaN, "optimizer": {"params": {"lr": Infinity}}, "api_key": "sesame", "b": 1}'
    shown = Mended(before=text, after=text.replace('"b": 1', '"b": 2'), findings=()).diff("ds.json")
    assert '"a": NaN' in shown
    assert shown.count(HIDDEN) == 2  # before and after
    given = {"a": [math.nan], "b": math.inf}
    assert parted_from_secrets(given) == (given, [])


def test_a_copy_has_no_mark_of_a_secret() -> None:
    given = {"secrets": {"user": "me", "deep": [{"n": 1}]}, "comet": {"api_keys": ["a", "b"], "project": "p"}}
    parted, missing = parted_from_secrets(given)
    assert parted == {"secrets": {"deep": [{}]}, "comet": {"api_keys": [], "project": "p"}}
    assert len(missing) == 4


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
