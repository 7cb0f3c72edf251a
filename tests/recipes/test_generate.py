"""recipes/generate.py as a user calls it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import torch
from launching import REPOSITORY

from parity import oracle
from said import own_words

PROMPT = "if x:"
COMMAND = (sys.executable, str(REPOSITORY / "recipes" / "generate.py"))


def generate(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout.decode(), own_words(done.stderr.decode())


def test_writes_what_transformers_generates(tmp_path: Path) -> None:
    model = oracle.hf_model("gpt2")
    model.save_pretrained(tmp_path / "model")
    ids = torch.tensor([list(PROMPT.encode())])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    expected = bytes(one for one in made[0].tolist() if one < 256).decode(errors="replace")
    options = ("--prompt", PROMPT, "--tokens", 9, "--temperature", 0, "--tokenizer", "bytes")
    assert generate("--checkpoint", tmp_path / "model", *options) == (0, f"{expected}\n", "")


def test_a_terminal_gets_nothing_that_it_would_obey(tmp_path: Path) -> None:
    """What the prompt and the model hold reaches a pipe as it is, and a terminal with escapes shown."""
    oracle.hf_model("gpt2").save_pretrained(tmp_path / "model")
    ours, theirs = pty.openpty()
    options = ("--checkpoint", tmp_path / "model", "--tokens", 9, "--tokenizer", "bytes")
    done = subprocess.run(
        [*COMMAND, *map(str, options), "--prompt", "\x1b[2Jif x:"], stdout=theirs, check=True, timeout=120
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0
    assert shown.startswith("\\u001b[2Jif x:")
    assert "\x1b" not in shown


def test_an_error_is_one_line(tmp_path: Path) -> None:
    code, out, err = generate("--checkpoint", tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {tmp_path / 'nowhere'}: there is no such folder. Fix: ")
    assert err.count("\n") == 1
