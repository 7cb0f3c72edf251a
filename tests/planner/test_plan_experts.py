"""Ranks that hold experts together, in plans: bytes beside the formula, parameters, degrees tried."""

import json
from dataclasses import replace

import pytest
from all_families.tiny import tiny_config
from h100 import MACHINE, NETWORK, shape_of

from dsx.checkpoint.claims import model_of
from dsx.config.resolve import resolve
from dsx.errors import ConfigError, DsxError
from dsx.memory.record_cache import ModelRecords
from dsx.models.params import layer_kinds
from dsx.parallel.layout import Layout
from dsx.parallel.mesh import Mesh
from dsx.parallel.stages import StageMap
from dsx.planner.cluster import Group, preset
from dsx.planner.inputs import PinnedChoices, plan_inputs, plan_search
from dsx.planner.layers import model_task
from dsx.planner.layout import Candidate, Space, meshes, variants
from dsx.planner.profile import RECOMPUTE
from dsx.planner.step_time import Predictor, total
from dsx.schedules.schedule import Op

H, E, K, T, WIDTH = 128, 16, 2, 1024, 2
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 4,
    "hidden_size": H,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": E,
    "num_experts_per_tok": K,
}
MODEL = model_of(CONFIG)
FIRST = layer_kinds(MODEL).index("Block")


def block(**kwargs):
    return ModelRecords(shape_of(MODEL, T, **kwargs)).layer(FIRST, divided=False, hooked=False)


def sent(events):
    """Bytes of the rows that travel, each time, without the counts that go ahead."""
    sizes = [event[3] for event in events if event[0] == "begin" and event[4:] == ("expert",)]
    return [size for size in sizes if size != 8 * E]


@pytest.mark.parametrize("imbalance", [1.0, 1.5])
@pytest.mark.parametrize("expert", [2, 4])
def test_rows_travel_four_times_and_six_times_with_recomputation(expert, imbalance):
    """T k rows of H elements, there and back, forward and backward; what is computed again is sent again."""
    rows = int(imbalance * 2 * T * K * H * WIDTH)
    found = block(expert=expert, imbalance=imbalance)
    assert (sent(found.forward), sent(found.backward)) == ([rows] * 2, [rows] * 2)
    again = block(expert=expert, imbalance=imbalance, recompute="full")
    assert (sent(again.forward), sent(again.backward)) == ([rows] * 2, [rows] * 4)
    assert not sent(block().forward)


def test_what_experts_compute_is_what_comes_to_them():
    """A rank with 1/ep of the experts and as many rows computes as much; with more rows, more."""

    def products(**kwargs):
        found = block(**kwargs).forward
        return sum(m * n * k * count for _, m, n, k, count, _ in filter(_of_experts, found))

    def _of_experts(event):
        return event[0] == "mm" and event[4] > 1

    assert products(expert=4) == pytest.approx(products())
    assert products(expert=4, imbalance=2.0) == pytest.approx(2 * products(expert=4))


@pytest.mark.parametrize(("expert", "tensor"), [(1, 1), (4, 1), (2, 2)])
def test_parameters_are_those_of_the_layout(expert, tensor):
    mesh = Mesh.of(dp=8, tp=tensor, ep=expert)
    predictor = Predictor(model_task(MODEL, machine=MACHINE, global_batch=64, sequence_length=T))
    held = total(predictor.held(Candidate(mesh=mesh)))
    kinds = layer_kinds(MODEL)
    specs = predictor.task.layers.model.params
    layout = Layout(mesh=mesh, stages=StageMap((0, len(kinds)), 1), params=tuple(specs), zero_stage=1)
    assert held.total == pytest.approx(layout.local_parameters(0), rel=0.001)  # but for the padded vocabulary
    plan = layout.zero_plan(0)
    assert held.parts(Candidate(mesh=mesh)) == pytest.approx(sum(b.numel for b in plan.buffers(0)), rel=0.001)


def test_rows_take_the_links_of_their_ranks():
    """Eight neighbours are a node's; sixteen send half of their rows over the network."""
    predictor = Predictor(model_task(MODEL, machine=MACHINE, global_batch=64, sequence_length=T))

    def waits(expert):
        times = predictor.times(Candidate(mesh=Mesh.of(dp=64, ep=expert), micro_batch=2))
        return sum(each.expert_wait for each in times)

    rows, counts = 2 * T * K * H * WIDTH, 8 * E
    for expert in (8, 16):
        group = Group(expert)
        each = 4 * NETWORK.seconds("all_to_all", rows, group) + NETWORK.seconds("all_to_all", counts, group)
        assert waits(expert) == pytest.approx(4 * each, rel=1e-6)
    assert waits(16) > 2 * waits(8)


def test_degrees_that_are_tried():
    task = model_task(MODEL, machine=MACHINE, global_batch=64, sequence_length=T)
    found = {mesh.mesh.ep for mesh in meshes(task, Space.of(8, tensor=(1,), pipeline=(1,), expert=None))}
    assert found == {1, 2, 4, 8}
    tight = {mesh.mesh.ep for mesh in meshes(task, Space.of(8, tensor=(2,), pipeline=(2,), expert=None))}
    assert tight == {1, 2}
    assert {mesh.mesh.ep for mesh in meshes(task, Space.of(8, tensor=(1,), pipeline=(1,)))} == {1}
    with pytest.raises(DsxError, match="expert = 3"):
        list(meshes(task, Space.of(8, expert=(3,))))
    with pytest.raises(DsxError, match="experts of a layer do not divide"):
        list(meshes(task, Space.of(64, expert=(32,))))
    shared = Candidate(mesh=Mesh.of(dp=8, ep=2))
    assert {each.zero_stage for each in variants(task, Space.of(8), shared)} == {0, 1, 3}
    pinned = [*variants(task, Space.of(8, zero_stages=(2,)), shared)]
    assert pinned
    assert not any(each.reduces_micro_batches for each in pinned)


def planned(tmp_path, sets=(), **pinned):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    inputs = plan_inputs(
        model=str(tmp_path / "config.json"),
        config=None,
        cluster=preset("H100"),
        gpus=4,
        global_batch=8,
        sequence_length=T,
        overrides=sets,
    )
    choices = {"tensor": 1, "pipeline": 1, "micro_batch": 1, "zero": 1} | pinned
    search = plan_search(inputs, PinnedChoices(**choices))
    return inputs, search, search.run(3).best


def test_a_plan_writes_the_degree_that_it_chooses(tmp_path):
    inputs, search, best = planned(tmp_path)
    assert {each.layout.mesh.ep for each in best} == {1, 2, 4}
    for each in best:
        run = resolve(inputs.config_of(each.layout, search.predictor), world_size=4)
        assert run.mesh == each.layout.mesh
    shared = next(each for each in best if each.layout.mesh.ep == 2)
    assert shared.layout.label.startswith("tensor 1, pipeline 1, data 4, experts over 2 of them")
    assert "expert communication" in shared.time.parts()


def test_a_plan_keeps_a_degree_that_is_asked_for(tmp_path):
    _, _, best = planned(tmp_path, expert=4)
    assert [each.layout.mesh.ep for each in best] == [4]
    with pytest.raises(ConfigError, match="--expert 0"):
        planned(tmp_path, expert=0)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "dualpipev"])
def test_rows_that_weight_gradients_hide_are_no_part_of_a_step(name):
    """What is hidden is what the step is shorter; weight gradients only move from one part to the other."""
    predictor = Predictor(model_task(MODEL, machine=MACHINE, global_batch=64, sequence_length=T))
    chunks = 2 if name == "dualpipev" else 1
    stages, layout = 2 * chunks, Candidate(mesh=Mesh.of(dp=8, pp=2, ep=8), schedule=name, chunks=chunks)
    costs, step = predictor.costs(layout), predictor.predict(layout)
    found = costs.by_op(stages)
    waited = replace(costs, hidden_seconds=0.0, ahead_seconds=0.0).by_op(stages)
    for stage, (waits, hidden, _) in enumerate(costs.exchanges(stages)[Op.BACKWARD_INPUT]):
        parts, before = (
            op[Op.BACKWARD_INPUT][stage] + op[Op.BACKWARD_WEIGHT][stage] for op in (found, waited)
        )
        assert parts == pytest.approx(before - hidden)
        assert found[Op.BACKWARD][stage] == pytest.approx(waited[Op.BACKWARD][stage] - hidden)
        assert 0 <= hidden < waits + hidden
    assert sum(step.parts().values()) == pytest.approx(step.seconds)
    assert (step.hidden > 0) == (name == "zb_h1")  # the others have one block a stage, or divide nothing


def test_a_plan_draws_its_step(tmp_path, dsx):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    size = ("--gpus", 4, "--global-batch", 8, "--sequence-length", T, "--pipeline", 2, "--expert", 2)
    where = ("--model", tmp_path / "config.json", "--cluster", "H100", *size)
    code, _, err = dsx("plan", *where, "--output", tmp_path / "step.svg")
    assert (code, err) == (0, "")
    assert "rows travel for" in (tmp_path / "step.svg").read_text()


@pytest.mark.parametrize(("family", "modes"), [("gpt_oss", RECOMPUTE), ("bloom", ("none", "full"))])
def test_attention_alone_is_recomputed_where_transformers_registry_is_asked(family, modes, tmp_path):
    tiny_config(family, vocab_size=300).save_pretrained(tmp_path)
    inputs = plan_inputs(
        model=str(tmp_path / "config.json"),
        config=None,
        cluster=preset("H100"),
        gpus=1,
        global_batch=1,
        sequence_length=16,
        overrides=(),
    )
    assert inputs.decided["recompute"] == modes
