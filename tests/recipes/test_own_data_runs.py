"""A data set of one's own in recipes/own_data.py: what a run keeps of it, what others say to its config."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from launching import SMALL, ZERO3, launch, recipe, rows, series
from transformers import AutoModelForCausalLM

SETTINGS = SMALL | {
    "dsx.data.max_bytes": None,
    "dsx.data.sequence_length": 32,
    "dsx.train.steps": 8,
    "dsx.train.eval_every": 4,
    "dsx.train.save_every": 4,
    "dsx.parallel.chunks": 1,
    "dsx.train.export_hf": True,
}


@pytest.mark.slow
def test_a_run_goes_on_exactly_in_another_layout_and_exports(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pipeline = SETTINGS | {"dsx.parallel.pipeline": 2}
    data = SETTINGS | {"dsx.parallel.pipeline": 1}
    ended = launch("torchrun", "own_data.py", ZERO3, pipeline | {"dsx.train.output": whole})
    assert ended.code == 0, ended.text
    # the learning rate's schedule is longer than the run, so that its first half is the same
    first = launch(
        "torchrun", "own_data.py", ZERO3, pipeline | {"dsx.train.output": parts, "dsx.train.steps": 4}
    )
    assert first.code == 0, first.text
    then = launch("torchrun", "own_data.py", ZERO3, data | {"dsx.train.output": parts})
    assert then.code == 0, then.text
    assert rows(then.lines, "dsx")["resumed"] == "after step 4"
    assert rows(then.lines, "dsx")["data"] == "sums: 100,000 samples, read 0.00064 times, and 10,000 held out"
    for name in ("train/loss", "eval/loss"):
        there, here = series(whole, name), series(parts, name)
        assert here == pytest.approx(there, rel=2e-5)
    assert json.loads((parts / "config.json").read_text())["dsx"]["data"]["source"] == "own"
    model = AutoModelForCausalLM.from_pretrained(rows(then.lines, "done")["Hugging Face model"])
    with torch.no_grad():
        sample = torch.tensor([recipe("own_data").Sums(10_000, 32, "held out")[index] for index in range(64)])
        loss = model(sample[:, :-1]).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(loss, sample[:, 1:].flatten()).item()
    assert loss == pytest.approx(series(parts, "eval/loss")[8], abs=0.1)
    assert loss < math.log(257)


def test_a_program_that_reads_text_says_that_it_has_none(tmp_path: Path) -> None:
    ended = launch("python", "gpt_3d.py", ZERO3, {"dsx.data.source": "own", "dsx.train.output": tmp_path})
    assert ended.code == 2
    assert ended.lines[-1].startswith('error: dsx.data.source = "own": this program reads text')
