"""dsx.Trainer beside transformers' Trainer: one process, no DeepSpeed, the same script, data and seed.

Samples have very different lengths, the last batch of an epoch is smaller, and its last step has fewer.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranks
from trainer import scripts_of_both as scripts

FIGURES = (
    "loss",
    "grad_norm",
    "learning_rate",
    "eval_loss",
    "eval_accuracy",
    "epoch",
    "num_input_tokens_seen",
)
TIMES = ("runtime", "per_second")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: str(scripts.write_model(family, folder / family)) for family in scripts.FAMILIES}


@functools.cache
def reference(model: str, **options: Any) -> dict[str, Any]:
    """What transformers' Trainer does, once for each script."""
    with tempfile.TemporaryDirectory() as folder:
        return ranks.run(scripts.theirs, 1, folder, model, options)[0]


def mine(layout: str, folder: Path, model: str, **options: Any) -> dict[str, Any]:
    return ranks.run(scripts.ours, scripts.RANKS[layout], layout, str(folder), model, options)[0]


def assert_same_history(found, wanted):
    assert [set(line) for line in found] == [set(line) for line in wanted]
    for here, there in zip(found, wanted, strict=True):
        for key in FIGURES:
            if key in there:
                assert here[key] == pytest.approx(there[key], rel=0, abs=1e-5), (key, there["step"])


def events_of_all(found):
    """Events in order, but for those of each micro-batch, of which data-parallel ranks have fewer each."""
    return [event for event in found["events"] if event[0] not in ("on_substep_end", "on_prediction_step")]


def assert_same(found, wanted):
    assert_same_history(found["history"], wanted["history"])
    assert events_of_all(found) == events_of_all(wanted)
    assert found["flos"] == wanted["flos"]
    assert found["metrics"]["train_loss"] == pytest.approx(wanted["metrics"]["train_loss"], rel=0, abs=1e-5)
    assert found["test"]["test_loss"] == pytest.approx(wanted["test"]["test_loss"], rel=0, abs=1e-5)
    assert found["test"]["test_accuracy"] == wanted["test"]["test_accuracy"]
    assert np.array_equal(found["predictions"], wanted["predictions"])


CASES = [(family, layout) for family in scripts.FAMILIES for layout in scripts.LAYOUTS]
QUICK = {("gpt2", "tp2-pp2")}


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_loss_curve_metrics_predictions_and_events(models, tmp_path, family, layout):
    found, wanted = (
        mine(layout, tmp_path, models[family], instance=layout != "dp2"),
        reference(models[family]),
    )
    assert_same(found, wanted)
    if scripts.SHARES[layout] == 1:
        assert found["events"] == wanted["events"]


@pytest.mark.parametrize(
    ("first", "second"),
    [("pp2", "dp2"), pytest.param("tp2-pp2", "tp2", marks=pytest.mark.slow)],
)
def test_a_training_goes_on_from_its_checkpoint_in_another_layout(models, tmp_path, first, second):
    """In the middle of an epoch, where parameters are in other optimizer groups on other ranks."""
    stopped = mine(first, tmp_path, models["qwen2"], stop_after=7)
    assert stopped["step"] == 7
    options = {"resume": True, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}
    went_on = mine(second, tmp_path, models["qwen2"], **options)
    wanted = reference(models["qwen2"])
    assert_same_history(went_on["history"], wanted["history"])
    assert np.array_equal(went_on["predictions"], wanted["predictions"])
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-10"]


@pytest.mark.parametrize(
    "layout", ["tp2-pp2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("dp2", "cp2"))]
)
def test_documents_laid_end_to_end_are_kept_apart(models, tmp_path, layout):
    """As DataCollatorWithFlattening lays them, in rows of other lengths each time."""
    options = {"packed": True, "shortest": 3, "longest": 12, "num_train_epochs": 1}
    found = mine(layout, tmp_path, models["llama"], **options)
    assert_same(found, reference(models["llama"], **options))


@pytest.mark.parametrize(
    ("layout", "start"),
    [
        ("tp2-pp2", "pissa"),  # whose base the given model has changed already
        pytest.param("tp2-pp2", True, marks=pytest.mark.slow),
        pytest.param("dp2", "olora", marks=pytest.mark.slow),
    ],
)
def test_a_model_under_lora_of_peft(models, tmp_path, layout, start):
    options = {"lora": start, "num_train_epochs": 1, "learning_rate": 1e-2}
    found, wanted = mine(layout, tmp_path, models["llama"], **options), reference(models["llama"], **options)
    assert_same({**found, "flos": wanted["flos"]}, wanted)  # transformers counts the adapter's parameters too


@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2-pp2", marks=pytest.mark.slow)])
def test_a_given_model_with_frozen_parameters(models, tmp_path, layout):
    options = {"frozen": True, "num_train_epochs": 1, "learning_rate": 1e-2, "save": True}
    found, wanted = mine(layout, tmp_path, models["llama"], **options), reference(models["llama"], **options)
    assert_same({**found, "flos": wanted["flos"]}, wanted)
    assert found["max_length"] == wanted["max_length"] == 77


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"train_sampling_strategy": "group_by_length", "num_train_epochs": 1},
        {"train_sampling_strategy": "sequential", "dataloader_drop_last": True},
        {"max_steps": 7, "logging_steps": 3, "logging_first_step": True, "eval_strategy": "no"},
        {"optim": "sgd", "lr_scheduler_type": "linear", "max_grad_norm": 0.0},
        {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 4, "logging_steps": 2},
        {"streamed": True, "samples": 40, "max_steps": 8},
    ],
    ids="-".join,
)
def test_scripts_with_other_arguments(models, tmp_path, options):
    found = mine("dp2", tmp_path, models["llama"], **options)
    assert_same(found, reference(models["llama"], **options))
