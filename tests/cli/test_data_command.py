"""``dsx data show``: what is trained on, as people and programs see it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from said import own_words

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "É\x1b[2Jo"}]
    rows = [json.dumps({"messages": turns * n}) for n in (1, 2, 9)] + ["{"]
    (tmp_path / "chats.jsonl").write_text("\n".join(rows))
    data: dict[str, Any] = {
        "source": str(tmp_path / "chats.jsonl"),
        "format": "chat",
        "tokenizer": "bytes",
        "chat_template": TEMPLATE,
        "sequence_length": 128,
        "held_out": 0,
        "bad_records": "skip",
    }
    block = {
        "model": {"preset": "tiny", "family": "llama"},
        "data": data,
        "train": {"steps": 1, "output": "run"},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"train_batch_size": 1, "dsx": block}))
    return path


def test_trained_tokens_are_marked_where_there_are_no_colours(dsx, config):
    code, out, err = dsx("data", "show", config, "--samples", 2, "--tokens", 40)
    assert (code, err) == (0, "")
    assert "  train     3 documents, " in out
    assert re.search(
        r"packs     3 documents in 2 packs, 85\.2% full; 25\.7% of the tokens trained; 1 trunc", out
    )
    assert re.search(r"skipped   1 bad record: .*chats\.jsonl, line 4: is no line of JSON", out)
    (first, second) = out.split("\ndocument ")[1:]
    assert first.startswith("1: 30 tokens, 8 trained\n")
    shown = first.split("\n", 1)[1].replace("│", "").replace("\\n\n", "\n")
    assert shown == "<user>Why?\n<assistant>{+<0xC3><0x89>\\u001b[2Jo\n+}\n"
    assert second.endswith("... and 20 more tokens (--tokens)\n")


def test_json_has_every_token(dsx, config):
    code, out, _ = dsx("data", "show", config, "--format", "json")
    assert code == 0
    (found,) = json.loads(out)
    assert found["packs"]["documents"] == found["train"]["documents"] == len(found["samples"]) == 3
    assert found["bad_records"]["count"] == 1
    text = bytes(token["id"] for token in found["samples"][0] if token["trained"]).decode()
    assert text == "É\x1b[2Jo\n"


def test_on_a_terminal_it_is_colour(config):
    """Trained tokens green, the others dim, and no marks."""
    master, slave = pty.openpty()
    command = [str(Path(sys.executable).parent / "dsx"), "data", "show", str(config), "--samples", "1"]
    environment = {key: one for key, one in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    done = subprocess.run(
        command, stdout=slave, stderr=subprocess.PIPE, env=environment | {"TERM": "xterm"}, check=False
    )
    os.close(slave)
    said = b""
    while b"\x1b[1;32mo" not in said:
        said += os.read(master, 1 << 16)
    os.close(master)
    assert (done.returncode, own_words(done.stderr.decode())) == (0, "")
    assert b"\x1b[2mW" in said
    assert b"{+" not in said
    assert b"\\u001b[2J" in re.sub(rb"\x1b\[[\d;]*m|\xe2\x94\x82", b"", said)


def test_text_is_shown_by_sequences(dsx, tmp_path, config):
    (tmp_path / "a.txt").write_text("one two three\n" * 40)
    text = {"source": str(tmp_path / "a.txt"), "tokenizer": "bytes", "sequence_length": 16, "held_out": 0}
    content = json.loads(config.read_text())
    content["dsx"]["data"] = text
    config.write_text(json.dumps(content))
    code, out, _ = dsx("data", "show", config, "--samples", 1)
    assert code == 0
    assert "sequence 1: 16 tokens, 15 trained\no│{+n│e│" in out
    for setting, what in (
        ("streaming=true", "a stream is not prepared"),
        ("source=own", "the program's own"),
    ):
        code, _, err = dsx("data", "show", config, "--set", f"dsx.data.{setting}")
        assert code == 2
        assert what in err
