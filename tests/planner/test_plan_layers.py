"""Plans for layer lists: times beside those of the same model of dsx's own, memory beside the estimate."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dsx
from dsx.models import families
from dsx.models.hf_config import model_spec
from dsx.models.presets import find_preset
from dsx.parallel.mesh import Mesh
from dsx.planner.cluster import preset
from dsx.planner.costs import Efficiency, Network, Software
from dsx.planner.inputs import PinnedChoices, plan_search
from dsx.planner.layer_times import Machine
from dsx.planner.layers import OwnLayers, model_task
from dsx.planner.layout import Candidate, Task
from dsx.planner.own_layers import OwnInputs
from dsx.planner.step_time import Predictor

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"train_batch_size": 64, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
MODEL = replace(
    model_spec(find_preset(None, "llama-3.2-1b").config), num_layers=6, vocab_size=4096, tied_embeddings=False
)
LENGTH = 512


def model_layers():
    """A model of dsx's own as anybody's list of layers."""
    tp = dsx.TensorParallel()
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    layers = [entry.build() for entry in families.layers(MODEL, tp, dtype=torch.bfloat16)]
    return dsx.LayerList(
        layers=layers, inputs=ids, labels=ids, loss_fn=families.loss(MODEL, tp, overwrite_logits=True)
    )


def inputs(**changed):
    options = {"cluster": preset("H100"), "gpus": 8, "global_batch": None} | changed
    return OwnInputs.of("model", model_layers, CONFIG | options.pop("config", {}), **options)


@pytest.mark.parametrize(
    "layout",
    [
        Candidate(mesh=Mesh.of(pp=1, dp=8, tp=1), micro_batch=2, zero_stage=1),
        Candidate(mesh=Mesh.of(pp=2, dp=4, tp=1), micro_batch=2, zero_stage=0),
        Candidate(
            mesh=Mesh.of(pp=2, dp=4, tp=1), micro_batch=2, schedule="interleaved", chunks=2, zero_stage=3
        ),
    ],
    ids=lambda layout: layout.label,
)
def test_the_step_is_that_of_the_same_model(layout):
    machine = Machine(network=Network(preset("H100"), Efficiency()), software=Software(), precision="bf16")
    recorded = inputs().list_for(0)
    own = Task(layers=OwnLayers(recorded, 2), machine=machine, global_batch=64)
    known = model_task(MODEL, machine=machine, global_batch=64, sequence_length=LENGTH)
    found, expected = (Predictor(task).predict(layout) for task in (own, known))
    assert found.seconds == pytest.approx(expected.seconds, rel=0.01)
    assert own.flops == pytest.approx(known.flops, rel=0.02)


@pytest.mark.parametrize("wanted", [{}, {"pipeline": 4}, {"zero": 3}], ids=str)
def test_the_best_takes_what_is_estimated_of_it(wanted):
    asked = inputs()
    search = plan_search(asked, PinnedChoices(**wanted))
    plan = search.run(1)
    best = plan.best[0]
    layout, stages = best.layout, search.predictor.stages(best.layout)
    counts = [len(stages.layers(stage)) for stage in range(stages.num_stages)]
    options = {"pipeline": layout.pipeline, "chunks": layout.chunks, "schedule": layout.schedule}
    memory = dsx.estimate_layers(
        model_layers,
        asked.config_of(layout, search.predictor),
        world_size=8,
        partition_method=counts,
        **options,
    )
    assert best.peak_bytes == memory.peak_bytes
    assert layout.pipeline == wanted.get("pipeline", layout.pipeline)
    assert layout.zero_stage == wanted.get("zero", layout.zero_stage)
    for ranked in (*plan.others, *plan.too_large):
        assert ranked.time.seconds >= best.time.seconds or not ranked.fits


def test_the_call_gives_what_the_command_prints(dsx, tmp_path):
    from dsx import plan_layers

    config, written = tmp_path / "ds_config.json", tmp_path / "best.json"
    config.write_text(json.dumps(CONFIG))
    options = ("--layers", f"{__file__}:model_layers", "--gpus", 8, "--cluster", "H100")
    code, out, _ = dsx("plan", config, *options, "--format", "json", "--output", written)
    assert code == 0
    plan = plan_layers(model_layers, CONFIG, cluster="H100", gpus=8)
    told = json.loads(out)
    assert [each["step_seconds"] for each in told["best"]] == [each.time.seconds for each in plan.best]
    assert json.loads(written.read_text()) == told["config"]
    assert told["config"]["train_batch_size"] == 64
    assert f"num_stages={plan.best[0].layout.pipeline}, " in told["module"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--zero", 2), "use 1 or 3"),
        (("--global-batch", 7), "use a multiple of 2"),
        (
            ("--global-batch", 8, "--pipeline", 1),
            "the layers' micro-batch = 2: it divides no rank's share of the global batch (1 samples",
        ),
        (("--pipeline", 3), "pipeline = 3"),
        (("--tensor", 2), "--tensor: it does not go with"),
        (("--micro-batch", 4), "--micro-batch: it does not go with"),
        (("--gpu-memory", 2.2), "no layout of the model fits"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_error(options, said, dsx, tmp_path):
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps(CONFIG))
    layers = ("--layers", f"{__file__}:model_layers", "--gpus", 8, "--cluster", "H100")
    code, out, err = dsx("plan", config, *layers, *options)
    assert code
    assert not out
    assert said in " ".join(err.split())


def test_torch_makes_tensors_on_a_device_as_before():
    """Else ``from_pretrained`` in the same process would leave rotary frequencies what the memory held."""
    code = "import dsx, sys, torch; from dsx.memory.device import without_storage"
    code += "\nwith without_storage('meta'), torch.device('cpu'): torch.empty(1)"
    code += "\nwith torch.device('meta'): sys.exit(not torch.tensor([]).is_meta)"
    subprocess.run([sys.executable, "-c", code], check=True)
