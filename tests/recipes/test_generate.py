"""recipes/generate.py as a user calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from launching import REPOSITORY

from parity import oracle

PROMPT = "if x:"


def generate(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "recipes" / "generate.py"), *map(str, arguments)],
        capture_output=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_writes_what_transformers_generates(tmp_path: Path) -> None:
    model = oracle.hf_model("gpt2")
    model.save_pretrained(tmp_path / "model")
    ids = torch.tensor([list(PROMPT.encode())])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    expected = bytes(one for one in made[0].tolist() if one < 256).decode(errors="replace")
    options = ("--prompt", PROMPT, "--tokens", 9, "--temperature", 0, "--tokenizer", "bytes")
    assert generate("--checkpoint", tmp_path / "model", *options) == (0, f"{expected}\n", "")


def test_an_error_is_one_line(tmp_path: Path) -> None:
    code, out, err = generate("--checkpoint", tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {tmp_path / 'nowhere'}: there is no such folder. Fix: ")
    assert err.count("\n") == 1
