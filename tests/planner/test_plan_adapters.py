"""Plans of adapters and frozen parameters: gradients, updates and backward work of what is trained alone."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from dsx.checkpoint.claims import model_of
from dsx.config.resolve import resolve
from dsx.memory.estimate import estimate
from dsx.memory.job import job_of
from dsx.models.hf_config import model_spec
from dsx.models.params import param_specs
from dsx.models.presets import presets
from dsx.models.spec import Adapter
from dsx.parallel.mesh import Mesh
from dsx.planner.cluster import preset
from dsx.planner.costs import Efficiency, Network, Software
from dsx.planner.inputs import PinnedChoices, plan_inputs, plan_search
from dsx.planner.layer_times import Machine
from dsx.planner.layers import model_task
from dsx.planner.layout import Candidate
from dsx.planner.step_time import Predictor

MODEL = model_spec(next(each.config for each in presets() if each.name == "llama-3.2-1b"))
LORA = replace(MODEL, adapter=Adapter(rank=16, targets=("q_proj", "layers.15.mlp.up_proj")))
LAST = replace(MODEL, freeze=(r"layers\.([0-9]|1[0-4])\.", "embed"))
CHAT = Path(__file__).parents[2] / "configs" / "chat_lora.json"


def predictor(model, *, compiled=False):
    software = Software(compiled=compiled)
    machine = Machine(network=Network(preset("H100"), Efficiency()), software=software, precision="bf16")
    return Predictor(model_task(model, machine=machine, global_batch=32, sequence_length=2048))


@pytest.mark.parametrize("model", [LORA, LAST], ids=["lora", "frozen"])
def test_what_is_trained_alone_has_gradients_and_updates(model):
    layout, full, part = (
        Candidate(mesh=Mesh.of(dp=8), zero_stage=1),
        predictor(replace(MODEL, tied_embeddings=False)),
        predictor(replace(model, tied_embeddings=False)),
    )
    trained = sum(spec.numel for spec in param_specs(replace(model, tied_embeddings=False)) if spec.trained)
    assert sum(part.elements(1, trained=True)) == trained
    assert sum(part.elements(1)) >= sum(full.elements(1))
    share = trained / sum(full.elements(1))
    whole, less = full.predict(layout), part.predict(layout)
    assert less.update == pytest.approx(share * whole.update, rel=1e-6)
    assert less.parameters < 1.1 * share * whole.parameters + 1e-3
    assert less.gradients <= whole.gradients


def test_a_frozen_matrix_has_no_backward_of_its_weights():
    layout = Candidate(mesh=Mesh.of(dp=8))
    full, lora, last = (predictor(model).times(layout) for model in (MODEL, LORA, LAST))
    assert lora[5].backward_weight_seconds < 0.1 * full[5].backward_weight_seconds
    assert lora[5].backward_input_seconds >= 0.9 * full[5].backward_input_seconds
    assert last[5].backward_weight_seconds == last[5].backward_input_seconds == 0.0, (
        "below the lowest trained layer"
    )
    assert last[16].backward_weight_seconds == pytest.approx(full[16].backward_weight_seconds)


def test_a_chat_config_is_planned_with_its_estimate():
    inputs = plan_inputs(
        model="llama-3.2-1b",
        config=CHAT,
        cluster=preset("A100-80"),
        gpus=2,
        global_batch=None,
        sequence_length=None,
    )
    search = plan_search(inputs, PinnedChoices(zero=1, micro_batch=1, tensor=1))
    best = search.run(1).best[0]
    config = inputs.config_of(best.layout, search.predictor)
    assert config["dsx"]["adapter"]["rank"] == 16
    run = resolve(config, world_size=2)
    ranks = [estimate(job_of(run, device="cuda"), run.mesh.rank(pp=at)) for at in range(run.mesh.pp)]
    assert best.peak_bytes == max(each.peak.peak_bytes for each in ranks)
    assert best.peak_bytes < 2 * 2 * run.num_parameters + (8 << 30), "no fp32 copy or moments of the base"


@pytest.mark.parametrize("zero", [1, 3])
def test_a_quantised_base_is_no_bf16_one(tmp_path, zero):
    """GPUs that the base's bf16 weights alone would fill: the bounds let the layout through that fits."""
    config = json.loads(CHAT.read_text())
    config["dsx"]["adapter"]["quantization"] = "nf4"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    inputs = plan_inputs(
        model="llama-3-8b",
        config=path,
        cluster=preset("A100-80"),
        gpus=1,
        global_batch=4,
        sequence_length=512,
    )
    search = plan_search(inputs, PinnedChoices(zero=zero, micro_batch=1, gpu_memory=16.0))
    best = search.run(1).best[0]
    assert best.peak_bytes < search.cap < 2 * inputs.num_parameters
    assert search._floor.of(best.layout) <= best.peak_bytes


@pytest.mark.parametrize("form", ["int8", "nf4"])
@pytest.mark.parametrize("how", [(1, 8, "none", False), (1, 8, "full", True), (2, 1, "selective", False)])
def test_a_quantised_base_takes_its_matrices_anew_longer(how, form):
    """At least their traffic: numbers and scales read and the matrix written, at every use."""
    tensor, micro_batch, recompute, compiled = how
    # The MLP's matrices are so large that products of their parts are added up in place.
    wide = replace(MODEL, hidden_size=4096, ffn_size=14336)
    layout = Candidate(mesh=Mesh.of(tp=tensor), micro_batch=micro_batch, recompute=recompute, zero_stage=0)
    plain, model = (replace(wide, adapter=Adapter(rank=16, quantization=each)) for each in ("none", form))
    found = predictor(model, compiled=compiled)
    one, other = predictor(plain, compiled=compiled).times(layout)[5], found.times(layout)[5]
    at = Mesh.of(tp=tensor).at()
    held = [spec for spec in param_specs(model) if spec.layer == 5 and spec.quantized != "none"]
    moved = sum(2 * prod(spec.local_shape(at)) + sum(spec.quantized_bytes(at)) for spec in held)
    least = 0.99 * found.task.machine.traffic(moved)
    uses = {"forward": 1, "backward": 1 + (recompute == "full"), "backward_input": 1 + (recompute == "full")}
    for part, times in uses.items():
        assert getattr(other, f"{part}_seconds") - getattr(one, f"{part}_seconds") >= times * least > 0


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("llama-8b", {}, 0.12),
        ("llama-8b", {"adapter": Adapter()}, 0.30),
        ("llama-8b", {"adapter": Adapter(quantization="nf4")}, "adapters or a base in nf4"),
        ("mixtral-8x7b", {}, "has experts"),
        ("gemma-2-2b", {}, "blocks without fused attention"),
    ],
)
def test_how_far_off_is_said_of_kinds_that_were_compared(name, change, said):
    published = tomllib.loads((Path(__file__).parents[2] / "tools/published_models.toml").read_text())
    config = published.get(name) or next(each.config for each in presets() if each.name == name)
    task, layout = predictor(replace(model_of(config), **change)).task, Candidate(mesh=Mesh.of(dp=8))
    assert task.evidence(layout) == "how far the steps may be off is not known"  # without constants of H100s
    network = replace(task.machine.network, efficiency=Efficiency.of(preset("H100")))
    evidence = replace(task, machine=replace(task.machine, network=network)).evidence(layout)
    assert said in evidence if isinstance(said, str) else evidence.error == said
