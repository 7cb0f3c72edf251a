"""dsx reshard --check-loss: the loss of both checkpoints is that of the transformers model they came from."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import made
from dsx.checkpoint.check_loss import LossCheck
from dsx.checkpoint.open import open_checkpoint

COMMAND = ("reshard",)


@pytest.fixture(params=["gpt2", "llama"])
def folder(request, tmp_path):
    """A model folder that transformers saved, tokens, and the loss of them by transformers."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(**made.CONFIGS[request.param])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "model")
    rows = torch.randint(0, 37, (3, 7), generator=torch.Generator().manual_seed(1))
    (tmp_path / "ids").write_text("\n".join(" ".join(map(str, row)) for row in rows.tolist()) + "\n")
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows).loss.item()
    return tmp_path, loss


def test_the_loss_is_transformers_and_the_same_bits_in_every_format(dsx, folder):
    path, expected = folder
    check = ("--check-loss", path / "ids", "--format", "json")
    steps = [
        ("model", "a", ("--to", "tp=2,pp=2,dp=2,zero=3")),
        ("a", "b", ("--to", "tp=1,pp=1,dp=1")),
        ("b", "c", ("--to", "dcp", "--data", 2)),
        ("c", "d", ("--to", "hf")),
    ]
    for source, target, to in steps:
        code, out, err = dsx(path / source, path / target, *to, *check)
        assert code == 0, err
        losses = json.loads(out)["report"]["losses"]
        assert losses["source"] == losses["target"] == pytest.approx(expected, rel=1e-6)
        assert (losses["equal"], losses["tokens"]) == (True, 18)
    code, out, err = dsx(
        path / "a", path / "e", "--to", "hf", "--precision", "bf16", "--check-loss", "random"
    )
    assert (code, err) == (0, "")
    assert ": not the same bits" in out


def test_another_model_has_another_loss(dsx, folder):
    """The check is of what lies on the disk, and of nothing else: one flipped sign shows."""
    path, _ = folder
    assert dsx(path / "model", path / "a", "--to", "hf")[0] == 0
    source, target = open_checkpoint(path / "model"), open_checkpoint(path / "a")
    check = LossCheck(source.facts["hf_config"], None)
    assert check.compare(source, target).equal
    entry = next(entry for entry in target.entries if ".mlp." in entry.name and len(entry.shape) == 2)
    file = path / "a" / entry.pieces[0].file
    data = bytearray(file.read_bytes())
    data[entry.pieces[0].offset + 3] ^= 128
    file.write_bytes(data)
    found = check.compare(source, target)
    assert (found.equal, found.same_dtype) == (False, True)


def test_what_cannot_be_checked_is_said_before_anything_is_written(dsx, folder):
    path, _ = folder
    for content, what in [
        ("", "no line"),
        ("1 2 x", "cannot be read as token ids"),
        ("1 2 900", "ids from 0 to"),
        ("3", "a line of 1 ids"),
    ]:
        (path / "ids").write_text(content)
        code, _, err = dsx(path / "model", path / "out", "--check-loss", path / "ids")
        assert (code, what in err) == (2, True), err
    layout = made.layout("gpt2")
    made.reshard(made.plain(path / "p", layout.params, made.FP32), path / "run", layout)
    code, _, err = dsx(path / "run", path / "out", "--check-loss", "random")
    assert (code, "give --hf-config FILE" in err) == (2, True), err
    assert not (path / "out").exists()
