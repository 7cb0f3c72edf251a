"""The planner's search, and the one search below it, against trying everything."""

from __future__ import annotations

import functools
import random
from dataclasses import fields, replace
from itertools import product

import pytest

from dsx.checkpoint.claims import model_of
from dsx.errors import LayoutError
from dsx.memory.estimate import Job, estimate
from dsx.memory.record_cache import ModelRecords
from dsx.memory.states import Optimizer, StateSettings
from dsx.models.params import param_specs
from dsx.models.presets import presets
from dsx.parallel.layout import Layout
from dsx.parallel.mesh import Mesh
from dsx.planner.best_first import best_first
from dsx.planner.cluster import preset
from dsx.planner.costs import Efficiency, Network, Software
from dsx.planner.inputs import PinnedChoices, plan_inputs, plan_search
from dsx.planner.layer_times import Machine
from dsx.planner.layers import ModelLayers, model_task
from dsx.planner.layout import Candidate, Space, meshes, scheduled, variants
from dsx.planner.plan import MemoryFloor, Plan, Search, reason
from dsx.planner.profile import LayerCost
from dsx.planner.step_time import Predictor
from dsx.schedules.schedule import lower
from often import often

LLAMA = model_of(next(each.config for each in presets() if each.name == "llama-3.2-1b"))
GPT2 = model_of(next(each.config for each in presets() if each.name == "gpt2-medium"))


def task(model=LLAMA, batch=32, length=2048):
    machine = Machine(network=Network(preset("H100"), Efficiency()), software=Software(), precision="bf16")
    return model_task(model, machine=machine, global_batch=batch, sequence_length=length)


def everything(found, space):
    for mesh in meshes(found, space):
        for layout in variants(found, space, mesh):
            yield from scheduled(found, space, layout)


def held(floor):
    """Memory for a search: somewhat above its own bound."""
    return lambda layout: int(1.2 * floor.of(layout))


@pytest.mark.parametrize("cap_gib", often([12, 80, 7], 3))
def test_finds_what_trying_everything_finds(cap_gib):
    found, space = task(), Space.of(8, micro_batches=(1, 2), recompute=("none", "full"))
    predictor = Predictor(found)
    floor, cap = MemoryFloor(predictor), cap_gib << 30
    seconds = [
        predictor.predict(layout).seconds for layout in everything(found, space) if held(floor)(layout) <= cap
    ]
    search = Search(found, space, held(floor), cap_bytes=cap)
    plan = search.run(3)
    best = plan.best[0]
    assert best.time.seconds == pytest.approx(min(seconds), rel=1e-9)
    assert best.fits
    assert best.peak_bytes <= cap
    assert plan.predicted < len(seconds)
    assert all(
        one.time.seconds <= two.time.seconds for one, two in zip(plan.best, plan.best[1:], strict=False)
    )
    assert len({(each.layout.tensor, each.layout.pipeline) for each in plan.best}) == len(plan.best)
    for each in plan.too_large:
        assert each.time.seconds < best.time.seconds
        assert each.peak_bytes > cap


class Whole(ModelLayers):
    """Layers of which nothing is known sooner than all."""

    soon = property(lambda self: self)


MIXTURE = model_of(
    {"model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256}
    | {"moe_intermediate_size": 64, "num_experts": 32, "num_experts_per_tok": 2}
)
HYBRID = model_of(
    {"model_type": "qwen3_next", "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256}
    | {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
    | {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 64}
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "max_position_embeddings": 65_536}
)
OPEN = {
    "dense": (LLAMA, 2048, {"micro_batches": (1, 2), "zero_stages": (1, 3)}),
    "context": (LLAMA, 65_536, {"micro_batches": (1,), "context": (1, 2), "zero_stages": (3,)}),
    "experts": (MIXTURE, 1024, {"micro_batches": (1, 4), "expert": None, "tensor": (1, 2)}),
    "loops": (HYBRID, 8192, {"micro_batches": (1, 4), "tensor": (1,)}),
}


LOOPS = pytest.param("loops", 0.5, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "share"), [*often(product(("dense", "context", "experts"), (0.5, 2.0, 0.1)), 3), LOOPS]
)
def test_what_is_soon_known_leaves_the_table_as_it_is(name, share):
    """Bounds by one large micro-batch are below, and tables those of a search that takes all for it alike.

    Args:
        name: The space, of 4 GPUs.
        share: The cap, over the mean of the floors of all layouts.
    """
    model, length, opened = OPEN[name]
    found = task(model, batch=8, length=length)
    space = Space.of(4, names=("1f1b", "interleaved", "zb_h1"), recompute=("none", "full"), **opened)
    given = {each.name: getattr(found.layers, each.name) for each in fields(found.layers)}
    whole = replace(found, layers=Whole(**given))
    floor, soon = (
        MemoryFloor(Predictor(replace(found, layers=of))) for of in (whole.layers, found.layers.soon)
    )
    layouts = [each for mesh in meshes(found, space) for each in variants(found, space, mesh)]
    for each in layouts[:: max(1, len(layouts) // 40)]:
        assert soon.of(each) <= floor.of(each), each.label
        least, exact = (LayerCost.total(of.predictor.times(each)) for of in (soon, floor))
        assert 0.95 * least.seconds <= exact.seconds, each.label
        assert 0.95 * least.forward_seconds <= exact.forward_seconds, each.label
    cap = int(share * sum(map(floor.of, layouts)) / len(layouts))
    tables = []
    for each in (found, whole):
        try:
            tables.append(Search(each, space, held(floor), cap_bytes=cap).run(4))
        except LayoutError as error:
            tables.append(str(error))
    if isinstance(tables[0], Plan):
        tables = [replace(each, task=found, predicted=0, estimated=0) for each in tables]
        best = {each.layout.mesh: each.time.seconds for each in tables[0].best}
        seconds = dict[Mesh, float]()
        for layout in everything(found, space):
            if held(floor)(layout) <= cap and floor.of(layout) <= cap:
                now = floor.predictor.predict(layout).seconds
                seconds[layout.mesh] = min(now, seconds.get(layout.mesh, now))
        assert sorted(best.values()) == pytest.approx(sorted(seconds.values())[:4])
    assert tables[0] == tables[1]


@pytest.mark.parametrize("cap_gib", [16, 3])
@pytest.mark.parametrize("grain_bytes", [1, 1 << 30])  # the second with many equals
def test_a_bound_that_is_soon_known_saves_estimates_and_changes_nothing(cap_gib, grain_bytes):
    found, space, answers = task(), Space.of(8, micro_batches=(1,), recompute=("none", "full")), []
    floor = MemoryFloor(Predictor(found))

    def memory(layout):
        return int(4 * floor.of(layout)) // grain_bytes * grain_bytes

    def within(layout, most_bytes):
        """As a walk that stops when it is above."""
        return min(memory(layout), most_bytes + 1)

    soon = functools.partial(Search, found, space, memory, lambda layout: int(0.99 * memory(layout)))
    searches = (functools.partial(Search, found, space, memory), soon, functools.partial(soon, within=within))
    for search in searches:
        plan = search(cap_bytes=cap_gib << 30)
        try:
            answers.append(plan.run(3))
        except LayoutError as error:
            answers.append(str(error))
    if cap_gib > 3:
        assert answers[1].estimated < answers[0].estimated
        answers[0] = replace(answers[0], estimated=answers[1].estimated)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("cluster", ["H100", "CPU"])
def test_the_bound_of_a_config_is_below_its_estimate(cluster):
    inputs = plan_inputs(
        model="llama/tiny",
        config=None,
        cluster=preset(cluster),
        gpus=4,
        global_batch=8,
        sequence_length=128,
    )
    search = plan_search(inputs, PinnedChoices(micro_batch=1))
    wide = replace(search.space, recompute=("full",), names=("1f1b", "zbv"))
    layouts = list(everything(search.task, wide))[::3]
    assert len(layouts) > 10
    for layout in layouts:
        peak = search.memory(layout)
        assert 0 < search.least(layout) <= peak
        assert search.within(layout, peak) == peak
        assert peak - 1 < search.within(layout, peak - 1) <= peak
        assert peak // 2 < search.within(layout, peak // 2) <= peak


def test_the_space_is_legal():
    found, space = task(batch=24), Space.of(16)
    layouts = list(everything(found, space))
    assert {each.gpus for each in layouts} == {16}
    for each in layouts:
        assert 24 % (each.data * each.micro_batch) == 0
        assert each.tensor <= 8
        assert each.pipeline * each.chunks <= LLAMA.num_layers
        assert LLAMA.num_kv_heads % each.tensor == 0
    assert {each.schedule for each in layouts} > {"1f1b", "interleaved", "zbv"}
    assert {each.zero_stage for each in layouts} == {0, 1, 2, 3}
    assert {each.sequence_parallel for each in layouts if each.tensor > 1} == {True, False}


def test_neighbours_differ_in_one_thing():
    found = task()
    search = Search(found, Space.of(8, pipeline=(2,), tensor=(2,)), lambda _: 1)
    plan = search.run(1)
    first = plan.best[0].layout
    knobs = ("micro_batch", "recompute", "zero_stage", "sequence_parallel")
    for other in plan.others:
        changed = [name for name in knobs if getattr(other.layout, name) != getattr(first, name)]
        schedule = (other.layout.schedule, other.layout.chunks) != (first.schedule, first.chunks)
        assert len(changed) + schedule == 1
        assert reason(plan, other)


def test_reasons_name_the_part_that_grows():
    found = task()
    search = Search(found, Space.of(8), lambda _: 1)
    plan = search.run(5)
    words = {other.layout.recompute: reason(plan, other) for other in plan.others}
    assert "recompute +" in words["full"]
    wide = search.judge(replace(plan.best[0].layout, mesh=Mesh.of(tp=8), zero_stage=0, micro_batch=1))
    assert "tensor-parallel communication +" in reason(plan, wide)
    deep = search.judge(Candidate(mesh=Mesh.of(pp=8), zero_stage=0))
    assert "bubble +" in reason(plan, deep)
    small = replace(plan, cap_bytes=10 << 30)
    large = replace(plan.best[1], fits=False, peak_bytes=20 << 30)
    assert reason(small, large).endswith("but takes 20.00 GiB of 10.00 GiB")


def test_nothing_fits():
    search = Search(task(), Space.of(8), lambda _: 1 << 60, cap_bytes=1 << 30)
    with pytest.raises(LayoutError, match=r"no layout .* fits; the nearest takes at least \d\.\d\d GiB"):
        search.run(1)


@pytest.mark.parametrize(
    ("space", "word"),
    [
        (Space.of(8, tensor=(3,)), "8 GPUs do not divide by it"),
        (Space.of(64, tensor=(64,)), "attention heads = 32"),
        (Space.of(64, pipeline=(32,)), "16 blocks"),
        (Space.of(8, tensor=(4,), pipeline=(4,)), "does not divide 8 GPUs"),
    ],
)
def test_degrees_that_cannot_be(space, word):
    with pytest.raises(LayoutError, match=word):
        list(meshes(task(), space))


def test_a_batch_that_nobody_can_share_out():
    with pytest.raises(LayoutError, match="global batch 7"):
        list(meshes(task(batch=7), Space.of(8, tensor=(1,), pipeline=(1, 2))))


@pytest.mark.parametrize("model", [LLAMA, GPT2])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_floor_is_below_the_ledger(model, zero, recompute):
    """It would hide layouts that fit if it were not."""
    found = task(model, length=1024)
    predictor = Predictor(found)
    layout = Candidate(
        mesh=Mesh.of(pp=2, dp=2, tp=2), zero_stage=zero, recompute=recompute, schedule="interleaved", chunks=2
    )
    stages = predictor.stages(layout)
    job = Job(
        records=ModelRecords(predictor.task.layers.shape(layout)),
        layout=Layout(mesh=layout.mesh, stages=stages, params=param_specs(model), zero_stage=zero),
        schedule=lower(layout.program.build(2, 2, 4)),
        states=StateSettings(width=2, accumulate=2, optimizer=Optimizer(state_bytes=8, step_bytes=4)),
    )
    peaks = [estimate(job, layout.mesh.rank(pp=rank)).peak.peak_bytes for rank in (0, 1)]
    assert MemoryFloor(predictor).of(layout) <= max(peaks)


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_all_in_order_and_the_first_with_little_work(seed):
    """Numbers are found digit by digit; a number with digits open is bounded by its smallest completion."""
    draw = random.Random(seed)
    wanted = sorted(draw.sample(range(10**6), 40))
    grown = []

    def bound(digits: str) -> int:
        return int(digits.ljust(6, "0"))

    def grow(digits: str) -> list[str] | None:
        if len(digits) == 6:
            return None
        grown.append(digits)
        return [digits + d for d in "9876543210" if any(f"{n:06}".startswith(digits + d) for n in wanted)]

    assert int(next(best_first([""], cost=bound, grow=grow))) == wanted[0]
    assert len(grown) <= 12  # six down to the first, and what is bounded below it
    assert [int(digits) for digits in best_first([""], cost=bound, grow=grow)] == wanted


def test_of_equals_the_first_comes_first_and_nothing_is_no_error():
    names = ["b", "a", "c"]
    assert list(best_first(names, cost=lambda _: 0, grow=lambda _: None)) == names
    assert list(best_first(names, cost=lambda _: 0, grow=lambda name: [] if name != "a" else None)) == ["a"]
    assert list(best_first([], cost=lambda _: 0, grow=lambda _: None)) == []
