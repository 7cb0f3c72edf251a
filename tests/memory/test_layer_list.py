"""Lists of layers that dsx did not write are estimated as exactly as its own; the unknown is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import dsx
from dsx.errors import ConfigError, DsxError, ModelError
from memory import own_lists
from meta_engine import programs
from often import often

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
    "zero3_in_a_pipeline": ["perceptrons", 0, 4, 2, 1, 3, False, "auto"],
    "zero3_torchs_attention": ["encoders", 1, 2, 1, 1, 3, False, "gpipe"],
    "zero3_parameters_that_another_module_uses": ["readers", 1, 2, 1, 1, 3, False, "gpipe"],
    "the_recipe": ["recipe", 0, 2, 2, 2, 1, True, "auto"],
    "transformers_layers": ["llama", 2, 4, 2, 1, 2, True, "gpipe"],
}


@pytest.mark.parametrize("name", often(CASES, 2))
def test_the_estimate_is_what_the_engine_holds(name):
    found = programs.alone(own_lists.both, *CASES[name])
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


USER = """
import torch
from torch import nn
import dsx
from deepspeed.pipe import LayerSpec

X = torch.zeros(2, 16, 32)


def listed(*layers, inputs=X, loss_fn=lambda y: y.mean()):
    return dsx.LayerList(layers=layers, inputs=inputs, loss_fn=loss_fn)


class Dictionary(nn.Linear):
    def forward(self, x):
        return {"x": super().forward(x)}


class Leaves(nn.Module):
    def forward(self, x):
        raise SystemExit(3)


class Unbuilt(nn.Module):
    def __init__(self):
        raise ValueError("boom")


class Convolves(nn.Module):
    def forward(self, x):
        return nn.functional.conv1d(x, torch.ones(16, 16, 3, device=x.device), padding=1)


def plain(): return listed(nn.Linear(32, 32))
def leaves(): raise SystemExit(7)
def needs(argument): return listed()
def nothing(): return listed()
def numbers(): return listed(nn.Linear(32, 32), inputs=X.tolist())
def dictionary(): return listed(Dictionary(32, 32))
def layer_leaves(): return listed(nn.Linear(32, 32), Leaves())
def unbuilt(): return listed(LayerSpec(Unbuilt))
def convolution(): return listed(nn.Conv1d(16, 16, 3, padding=1))
def convolves(): return listed(nn.Linear(32, 32), Convolves())
def recurrent(): return listed(nn.LSTM(32, 32, batch_first=True))
def vector(): return listed(nn.Linear(32, 32), loss_fn=lambda y: y.mean(-1))
def no_loss(): return listed(nn.Linear(32, 32), loss_fn=None)
def four(): return listed(*(nn.Linear(32, 32) for _ in range(4)))


def shared():
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    second.weight = first.weight
    return listed(first, second)
"""

WRONG = {
    "leaves": "it ends the program (line 35 of user_lists.py)",
    "needs": "needs() missing 1 required positional argument",
    "nothing": "it has no layers",
    "numbers": "its micro-batch holds list",
    "dictionary": "it returns dict",
    "layer_leaves": "layer 1 (Leaves)",
    "unbuilt": "it cannot be built: ValueError: boom",
    "convolution": "the kernels of Conv1d",
    "convolves": "the kernels of convolutions",
    "recurrent": "the kernels of LSTM",
    "vector": "its loss gives 2 x 16 float32",
    "no_loss": "its last layer gives 2 x 16 x 32 float32",
    "shared": "a parameter of it is layer 0's, too",
    "absent": "has no function absent. Fix: name one that it has.",
}


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A folder with lists of a user's and a config, which is the working directory."""
    (tmp_path / "user_lists.py").write_text(USER)
    (tmp_path / "broken.py").write_text("def f(:")
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    (tmp_path / "ds_config.json").write_text(json.dumps(config | {"zero_optimization": {"stage": 3}}))
    (tmp_path / "typo.json").write_text(json.dumps(config | {"gradient_acumulation_steps": 2}))
    (tmp_path / "block.json").write_text(json.dumps(config | {"dsx": {"recompute": "full"}}))
    monkeypatch.chdir(tmp_path)


def test_the_command_prints_the_list(user, dsx):
    asked = ("estimate", "ds_config.json", "--layers", "user_lists.py:four", "--gpus", 2, "--pipeline", 2)
    code, out, err = dsx(*asked)
    assert (code, err) == (0, "")
    assert "pipeline 2 x data 1" in out
    assert len(json.loads(dsx(*asked, "--format", "json")[1])["pipeline_ranks"]) == 2
    assert dsx(*asked, "--gpu-memory", "0.0001")[0]


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_recorded_is_one_error(name, user, dsx):
    code, out, err = dsx("estimate", "ds_config.json", "--layers", f"user_lists.py:{name}")
    assert (code, out) == (2, "")
    assert err.count("dsx: ") == 1
    assert WRONG[name] in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ds_config.json", "--layers", "broken.py:f"), "SyntaxError"),
        (("ds_config.json", "--layers", "user_lists.py"), "it names no function. Fix: write my_module:"),
        (("ds_config.json", "--layers", "absent.py:f"), "there is no file absent.py"),
        (("--layers", "user_lists.py:plain"), "--layers needs one"),
        (("ds_config.json", "--layers", "user_lists.py:plain", "--tensor", 2), "--tensor"),
        (("ds_config.json", "--layers", "user_lists.py:plain", "--model", "llama-3-8b"), "--model"),
        (("typo.json", "--layers", "user_lists.py:plain"), "gradient_acumulation_steps"),
        (("block.json", "--layers", "user_lists.py:plain"), "dsx.recompute"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_what_the_command_cannot_take_is_one_error(arguments, said, user, dsx):
    code, out, err = dsx("estimate", *arguments)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("block", "said"),
    [
        *(
            (block, f"dsx = {json.dumps(block)}: not a JSON object")
            for block in (3, 0, True, "ab", "", [], [1])
        ),
        ([["optimizer_bytes", 8]], 'dsx = [["optimizer_bytes", 8]]: not'),
        *(({"optimizer_bytes": size}, "dsx.optimizer_bytes = ") for size in ("8", -1, True, 1.5, [8])),
        ({"zero": {}, "recompute": "full"}, "dsx.recompute: the list"),
    ],
    ids=str,
)
def test_another_dsx_block_than_a_list_has_is_one_error(block, said, user, dsx):
    asked = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Lamb"}, "dsx": block}
    Path("odd.json").write_text(json.dumps(asked))
    lists = ("odd.json", "--layers", "user_lists.py:plain")
    for more in (("estimate",), ("plan", "--cluster", "CPU", "--gpus", 2, "--global-batch", 4, "--goodput")):
        code, out, err = dsx(more[0], *lists, *more[1:])
        assert (code, out, err.count("dsx: "), said in err) == (2, "", 1, True), err


def test_declared_bytes_of_an_optimizer_count(user, dsx):
    lamb = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Lamb"}, "dsx": {"optimizer_bytes": 8}}
    Path("lamb.json").write_text(json.dumps(lamb))
    code, out, err = dsx("estimate", "lamb.json", "--layers", "user_lists.py:plain", "--format", "json")
    assert (code, json.loads(out)["layers"]) == (0, "user_lists.py:plain"), err
