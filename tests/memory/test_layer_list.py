"""Lists of layers that dsx did not write are estimated as exactly as its own; the unknown is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn
from typer.testing import CliRunner

import dsx
from dsx.cli.app import build
from dsx.errors import ConfigError, DsxError, ModelError
from dsx.memory.layer_list import read_layers

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}

_SCALARS = 20 * 512
"""Losses' sums, norms and the like, 512 bytes each on a GPU, which the ledger leaves out."""

CASES = {
    "several_chunks_of_plain_modules": ["mixers", 1, 4, 2, 2, 1, True, "auto"],
    "zero3_and_tuples_between_layers": ["perceptrons", 0, 2, 1, 1, 3, False, "auto"],
    "the_recipe": ["recipe", 0, 2, 2, 2, 1, True, "auto"],
    "transformers_layers": ["llama", 2, 4, 2, 1, 2, True, "gpipe"],
}


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_what_the_engine_holds(name):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("own_lists.py")), json.dumps(CASES[name])],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["estimate"] == pytest.approx(found["trace"], abs=_SCALARS)


def listed(*layers, inputs=None, **options):
    """A function that makes such a list."""
    x = torch.zeros(2, 8) if inputs is None else inputs
    return lambda: dsx.LayerList(layers=layers, inputs=x, **options)


def total(y):
    return y.sum()


class Peeks(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: [nn.Linear(8, 8)], "LayerList"),
        (listed(nn.Linear(4, 4), loss_fn=total), r"layer 0 \(Linear\)"),
        (listed(LayerSpec(nn.Linear, 8, 8), Peeks(), loss_fn=total), r"layer 1 \(Peeks\)"),
        (listed(LayerSpec(Frozen), loss_fn=total), "frozen"),
        (listed("Linear", loss_fn=total), r"layer 0 \(str\)"),
    ],
)
def test_what_cannot_be_known_is_refused(make, word):
    with pytest.raises(ModelError, match=word):
        dsx.estimate_layers(make, CONFIG)


def test_a_config_must_name_its_optimizer_and_fit_the_ranks():
    make = listed(LayerSpec(nn.Linear, 8, 8), loss_fn=total)
    with pytest.raises(ConfigError, match="optimizer"):
        dsx.estimate_layers(make, {"train_micro_batch_size_per_gpu": 2})
    with pytest.raises(DsxError, match="3 ranks"):
        dsx.estimate_layers(make, CONFIG, world_size=3, pipeline=2)


def test_the_command_prints_the_list(tmp_path):
    config, model = tmp_path / "config.json", tmp_path / "my_model.py"
    config.write_text(json.dumps(CONFIG))
    model.write_text(
        "import torch\nfrom torch import nn\nimport dsx\n"
        "def total(y):\n    return y.sum()\n"
        "def make():\n"
        "    layers = [nn.Linear(8, 8) for _ in range(4)]\n"
        "    return dsx.LayerList(layers=layers, inputs=torch.zeros(2, 8), loss_fn=total)\n"
    )
    asked = ["estimate", str(config), "--layers", f"{model}:make", "--gpus", "2", "--pipeline", "2"]
    app = build()
    told = CliRunner().invoke(app, asked)
    assert told.exit_code == 0, told.output
    assert "pipeline 2 x data 1" in told.output
    facts = json.loads(CliRunner().invoke(app, [*asked, "--format", "json"]).stdout)
    assert len(facts["pipeline_ranks"]) == 2
    assert CliRunner().invoke(app, [*asked, "--gpu-memory", "0.0001"]).exit_code != 0
    assert CliRunner().invoke(app, [*asked, "--model", "llama-3-8b"]).exit_code == 2
    with pytest.raises(ModelError, match="no such file"):
        read_layers("elsewhere.py:make")
    with pytest.raises(ModelError, match="no function"):
        read_layers(f"{model}:other")
