"""Ranks that share sequences, in plans: bytes and work beside formulas, and which degrees are tried."""

import json
from dataclasses import replace
from typing import get_args

import pytest
from all_families import tiny
from h100 import MACHINE, NETWORK, shape_of

import dsx
from dsx.checkpoint.claims import model_of
from dsx.config.resolve import resolve
from dsx.errors import ConfigError, DsxError
from dsx.hub.read import hub_model
from dsx.memory.record_cache import ModelRecords
from dsx.models.params import layer_kinds
from dsx.models.spec import ContextMethod, Recompute
from dsx.parallel.mesh import Mesh
from dsx.planner import layer_times as kernels
from dsx.planner import what_fits
from dsx.planner.cluster import Group, preset
from dsx.planner.costs import Efficiency
from dsx.planner.inputs import PinnedChoices, plan_inputs, plan_search
from dsx.planner.layer_times import layer_times, recorded_flops
from dsx.planner.layers import model_task
from dsx.planner.layout import LONG, Candidate, Space, meshes, variants
from dsx.planner.plan import Search
from dsx.planner.predicted import layout_of
from dsx.planner.step_time import Predictor

N, K, D, T, WIDTH = 8, 2, 32, 65_536, 2
CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "max_position_embeddings": 1 << 20,
    "num_hidden_layers": 4,
    "hidden_size": N * D,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "intermediate_size": 512,
}
MODEL = model_of(CONFIG)
FIRST = layer_kinds(MODEL).index("Block")


def shape(**kwargs):
    return shape_of(kwargs.pop("model", MODEL), T, **kwargs)


def block(found, place=FIRST):
    return ModelRecords(found).layer(place, divided=False, hooked=False)


def shared(events):
    """What the ranks of the axis send each other: kinds and bytes."""
    return [(event[2], event[3]) for event in events if event[0] == "begin" and event[4:] == ("context",)]


def task(batch=64, length=T):
    return model_task(MODEL, machine=MACHINE, global_batch=batch, sequence_length=length)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("context", [2, 4])
def test_bytes_are_those_of_the_formula(context, tensor):
    each = 2 * WIDTH * D * T // tensor  # a micro-batch of two
    gathered, given = 2 * K * each, (N + 2 * max(K, context * tensor)) * each // context
    for method, forward, back in (
        ("all_gather", [("all_gather", gathered)], [("reduce_scatter", gathered)]),
        (
            "ulysses",
            [("all_to_all", given), ("all_to_all", N * each // context)],
            [("all_to_all", N * each // context), ("all_to_all", given)],
        ),
    ):
        found = shape(context=context, context_method=method, tensor=tensor, sequence_parallel=tensor > 1)
        assert shared(block(found).forward) == forward, method
        assert shared(block(found).backward) == back, method
        again = block(replace(found, recompute="full"))
        assert shared(again.backward) == forward + back, "full recomputation sends it all again"


@pytest.mark.parametrize("context", [2, 3, 4])
def test_bytes_of_a_ring_are_those_of_the_formula(context):
    """Two chunks of keys and values a step; gradients go home beside those of the step after the next."""
    length = T // 8 * 3
    chunk = 2 * 2 * K * D * WIDTH * length // (2 * context)
    found = shape(context=context, context_method="ring", sequence_length=length)
    two, three = (("messages", count * chunk) for count in (2, 3))
    ends = [two] * min(2, context - 1)
    forward, back = [two] * (context - 1), [*ends, *[three] * (context - 3), *ends]
    assert shared(block(found).forward) == forward
    assert shared(block(found).backward) == back
    again = block(replace(found, recompute="full"))
    assert shared(again.backward) == forward + back


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("mistral", {"sliding_window": 1024}),
        ("mistral, transformers", {"sliding_window": 1024}),
        (
            "llama4_text, transformers",
            {"attention_chunk_size": T // 16 * 3, "attn_temperature_tuning": False},
        ),
    ],
)
def test_bytes_are_those_that_a_window_or_chunk_reaches(kind, sizes, context):
    """Of the rank that is sent the most: the second of four, for both of its chunks of queries."""
    family, _, modules = kind.partition(", ")
    if modules:
        changed = json.loads(tiny.tiny_config(family).to_json_string(use_diff=False)) | sizes
        model = hub_model(changed | {"max_position_embeddings": T})
        heads, head = changed["num_key_value_heads"], changed["head_dim"] or 0
        head = head or changed["hidden_size"] // changed["num_attention_heads"]
    else:
        model, heads, head = model_of({**CONFIG, "model_type": family, **sizes}), K, D
    found = shape(context=context, model=model)
    chunk, mine = T // (2 * context), (1, 2 * context - 2)
    reach, chunked = sizes.get("sliding_window", T), sizes.get("attention_chunk_size", T)
    firsts = [max(0, at - reach + 1, at // chunked * chunked) for at in range(0, T, chunk)]
    ways = [0, 0]  # what the rank is sent, and what it sends: keys, once to each rank
    for start, first in enumerate(firsts):
        for of in range(first // chunk, start):
            pair = {min(each, 2 * context - 1 - each) for each in (start, of)}
            if 1 in pair and len(pair) > 1:
                ways[start not in mine] += chunk - max(0, first - of * chunk)
    each = 2 * heads * head * WIDTH * max(ways)  # a micro-batch of two
    wanted = [("messages", each)] * 2 if modules else [("messages", 2 * each)]
    assert shared(block(found).forward) == wanted
    assert shared(block(found).backward) == wanted
    assert shared(block(replace(found, recompute="full")).backward) == 2 * wanted


@pytest.mark.parametrize("method", get_args(ContextMethod))
def test_attention_is_shared_out_evenly(method):
    """A rank's two stretches of queries, or its heads, are 1/cp of the causal half of the square."""
    pricing = kernels._Pricing(MACHINE, 1, WIDTH)

    def seconds(found):
        return sum(pricing._operator(event)[0] for event in block(found).forward if event[0] == "sdpa")

    for context in (2, 4, 8):
        part = seconds(shape(context=context, context_method=method))
        assert context * part == pytest.approx(seconds(shape()), rel=1e-12)


def test_nothing_hides_what_is_gathered():
    context = 4
    time = layer_times(MACHINE, shape(context=context))[FIRST]
    group = Group(context)
    size = 2 * 2 * K * D * T * WIDTH
    waits = [NETWORK.seconds(kind, size, group) for kind in ("all_gather", "reduce_scatter")]
    assert time.forward_wait == pytest.approx(waits[0])
    assert time.backward_wait == time.input_wait == pytest.approx(waits[1])
    assert time.context_wait == pytest.approx(sum(waits))
    again = layer_times(MACHINE, shape(context=context, recompute="full"))[FIRST]
    assert again.context_wait == pytest.approx(sum(waits) + waits[0])
    assert again.again_wait == pytest.approx(waits[0])


def test_a_ring_hides_behind_what_it_computes():
    """But for a gradient's last way home, and for what computing loses to messages beside it."""
    time = layer_times(MACHINE, shape(context=4, context_method="ring"))[FIRST]
    chunk = 2 * 2 * K * D * WIDTH * T // 8
    two, three = (NETWORK.seconds("messages", count * chunk, Group(4)) for count in (2, 3))
    share = NETWORK.efficiency.beside
    assert time.forward_wait == pytest.approx(share * 3 * two)
    assert time.backward_wait == pytest.approx(share * (3 * two + three) + two)


def test_an_exchange_takes_each_link_for_what_goes_over_it():
    """H100s: 8 of a node; of 16 ranks 8 are elsewhere, over one's own adapter."""
    cluster, link = NETWORK.cluster, Efficiency().link
    inside, between = cluster.inside, cluster.between
    assert NETWORK.seconds("all_to_all", 8e9, Group(8)) == pytest.approx(
        inside.latency_seconds + 7e9 / (inside.bytes_per_second * link)
    )
    assert NETWORK.seconds("all_to_all", 16e9, Group(16)) == pytest.approx(
        between.latency_seconds + 8e9 / (between.bytes_per_second * link)
    )
    assert NETWORK.seconds("all_to_all", 4e9, Group(4, 8)) == pytest.approx(
        between.latency_seconds + 3e9 / (between.bytes_per_second * link)
    )
    assert NETWORK.seconds("all_to_all", 8e9, Group(1)) == 0.0


def test_zero_cuts_and_reduces_over_data_times_context():
    """As over as many data-parallel ranks; what is sent for attention is the step's own part."""
    found = Predictor(task())
    alone = Candidate(mesh=Mesh.over(32, tp=2), zero_stage=1)
    shares = replace(alone, mesh=Mesh.over(32, tp=2, cp=4))
    one, other = found.predict(alone), found.predict(shares)
    assert (shares.data, shares.replicas) == (4, alone.data)
    assert (one.update, one.parameters) == (other.update, other.parameters)
    assert one.context == 0.0
    assert other.context > 0.0
    assert sum(other.parts().values()) == pytest.approx(other.seconds)
    assert "context communication" not in one.parts()
    count = shares.micro_batches(64)
    assert other.context == pytest.approx(count * sum(each.context_wait for each in found.times(shares)))
    assert other.communication_share > one.communication_share


def degrees(path, *, parallel=None, length=LONG, pinned=None, overrides=(), gpus=8, model=CONFIG):
    """The context degrees and methods that a plan of a config tries, and the search itself."""
    block = {
        "model": {"config": model},
        "data": {"source": "python-stdlib", "tokenizer": "bytes", "sequence_length": length},
        "train": {"steps": 2, "output": "runs/planned"},
    } | ({} if parallel is None else {"parallel": parallel})
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    content = {"train_batch_size": 8, "bf16": {"enabled": True}, "optimizer": optimizer, "dsx": block}
    path.write_text(json.dumps(content))
    given = {"model": None, "global_batch": None, "sequence_length": None, "overrides": overrides}
    inputs = plan_inputs(config=path, cluster=preset("H100"), gpus=gpus, **given)
    search = plan_search(inputs, pinned or PinnedChoices())
    tried = [each for mesh in meshes(search.task, search.space) for each in _variants(search, mesh)]
    found = {each.mesh.cp for each in tried}, {each.context_method for each in tried if each.mesh.cp > 1}
    return (*found, inputs, search)


def _variants(search, mesh):
    return variants(search.task, replace(search.space, micro_batches=(1,)), mesh)


ALL = {*get_args(ContextMethod)}


@pytest.mark.parametrize(
    ("given", "expected", "methods"),
    [
        ({}, {1, 2, 4, 8}, ALL),
        ({"length": LONG // 2}, {1}, set()),
        ({"length": LONG // 2, "parallel": {"tensor": 2}}, {1}, set()),
        ({"length": LONG // 8, "parallel": {"context": "auto"}}, {1, 2}, ALL),
        ({"length": 256, "parallel": {"context": 4}}, {4}, ALL),
        ({"parallel": {"context": 1}}, {1}, set()),
        ({"parallel": {"context": 4, "context_method": "ulysses"}}, {4}, {"ulysses"}),
        ({"parallel": {"context_method": "all_gather"}}, {1, 2, 4, 8}, {"all_gather"}),
        ({"parallel": {"context": 4}, "pinned": PinnedChoices(context=2)}, {2}, ALL),
        ({"length": 256, "overrides": ["dsx.parallel.context=2"]}, {2}, ALL),
    ],
)
def test_which_degrees_are_tried(tmp_path, given, expected, methods):
    assert degrees(tmp_path / "config.json", **given)[:2] == (expected, methods)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"parallel": {"context": 3}}, ("context = 3", "8 GPUs")),
        ({"length": 100, "parallel": {"context": 8}}, ("context = 8", "two chunks for each rank")),
        (
            {"gpus": 16, "parallel": {"context": 16, "context_method": "ulysses"}},
            ("context = 16", "8 attention heads", "use one of 1, 2, 4, 8"),
        ),
        ({"pinned": PinnedChoices(context=0)}, ("--context 0",)),
        ({"overrides": ["dsx.parallel.tensor=2"]}, ("dsx.parallel.tensor", "--context")),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, given, words):
    with pytest.raises(DsxError) as caught:
        degrees(tmp_path / "config.json", **given)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_family_that_cannot_is_planned_without_and_refused_by_name(tmp_path, monkeypatch):
    from transformers.models.seed_oss.modeling_seed_oss import SeedOssDecoderLayer

    own = SeedOssDecoderLayer.forward  # a family of which nothing else here asks

    def averaged(self, hidden_states, *arguments, **named):
        return own(self, hidden_states + hidden_states.mean(1, keepdim=True), *arguments, **named)

    monkeypatch.setattr(SeedOssDecoderLayer, "forward", averaged)
    other = tiny.tiny_config("seed_oss").to_dict() | {"vocab_size": 257}
    given = {"model": other, "length": 32, "gpus": 2}
    tried, *_, search = degrees(tmp_path / "a.json", parallel={"context": "auto"}, **given)
    assert tried == {1}
    assert "share" not in str(search._nothing_fits()), "what cannot be is not offered"
    *_, search = degrees(tmp_path / "c.json", length=256)
    assert "shorter sequences (or ranks that share them" in str(search._nothing_fits())
    with pytest.raises(ConfigError, match=r"dsx.parallel.context = 2: seed_oss: block 0"):
        degrees(tmp_path / "b.json", parallel={"context": 2}, **given)


def test_a_run_needs_a_number(tmp_path):
    inputs = degrees(tmp_path / "config.json", parallel={"context": "auto"})[2]
    block = inputs.content["dsx"] | {"parallel": {"context": "auto"}}
    with pytest.raises(ConfigError, match="a run needs a number"):
        resolve(inputs.content | {"dsx": block, "train_micro_batch_size_per_gpu": 1}, world_size=8)


def test_what_a_plan_names_is_loaded(tmp_path):
    """What is ranked, beside and above the best, is what its config resolves to."""
    path = tmp_path / "config.json"
    *_, inputs, search = degrees(path, length=1024, parallel={"context": "auto"}, pinned=TWO)
    plan = search.run(3)
    named = [*plan.best, *plan.others, *plan.too_large]
    assert any(each.layout.context_method != plan.best[0].layout.context_method for each in plan.others)
    for ranked in named:
        path.write_text(json.dumps(inputs.config_of(ranked.layout, search.predictor)))
        loaded = layout_of(dsx.load_config(path, world_size=8))
        assert replace(loaded, bounds=None) == replace(ranked.layout, bounds=None), ranked.layout.label
    assert plan.task.evidence(plan.best[0].layout) == (
        "one published run on H100 with ranks that share sequences was compared; "
        "it was 14% faster than predicted"
    )


TWO = PinnedChoices(context=2, tensor=1, micro_batch=1)


@pytest.mark.parametrize(
    ("length", "context", "doubled"), [(LONG, 1, 2), (LONG, 2, 4), (256, 2, 4), (256, 1, None)]
)
def test_twice_the_degree_is_a_change_that_may_fit(tmp_path, length, context, doubled):
    """And `--set` items give the layout that it is said to."""
    content = degrees(tmp_path / "config.json", length=length)[2].content
    parallel = {"tensor": 1, "pipeline": 1, "context": context}
    block = content["dsx"] | {"parallel": parallel}
    keys = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    run = resolve(content | keys | {"dsx": block}, world_size=8)
    found = {saving.words: saving for saving in what_fits._savings(run) if "context" in saving.words}
    assert list(found) == ([] if doubled is None else [f"context {doubled}"])
    for saving in found.values():
        items = what_fits._items(saving, run)
        changed = resolve(content | keys | {"dsx": block}, world_size=8, overrides=items)
        assert (changed.mesh.cp, changed.mesh.dp) == (doubled, 8 // doubled)
        assert changed.global_batch_size == run.global_batch_size


def test_tiles_are_taken_where_nothing_fits_without():
    cap = 1 << 45
    one = {"tensor": (1,), "pipeline": (1,), "context": (2,), "zero_stages": (1,), "recompute": ("full",)}
    space = Space.of(2, **one, micro_batches=(1,), mlp_tiles=(1, "auto"))
    times = []
    for memory, tiles in (
        (lambda _: 1, 1),
        (lambda layout: 1 if layout.mlp_tiles == "auto" else cap + 1, "auto"),
    ):
        (best,) = Search(task=task(), space=space, memory=memory, cap_bytes=cap).run(1).best
        assert best.layout.mlp_tiles == tiles
        assert best.layout.settings.get("dsx.mlp_tiles", 1) == tiles
        times.append(best.time)
    assert times[0].seconds < times[1].seconds < 1.3 * times[0].seconds
    assert times[0].recompute < times[1].recompute


def test_inputs_go_to_the_host_where_nothing_fits_without(tmp_path):
    cap = 1 << 45
    one = {"tensor": (1,), "pipeline": (1,), "context": (2,), "zero_stages": (1,)}
    search = degrees(tmp_path / "long.json")[-1]
    assert search.space.recompute == get_args(Recompute)
    assert "offload" not in degrees(tmp_path / "short.json", length=LONG // 2)[-1].space.recompute
    space = Space.of(2, **one, micro_batches=(1,), recompute=search.space.recompute)
    memory = lambda layout: 1 if layout.recompute == "offload" else cap + 1  # noqa: E731
    (best,) = Search(task=task(), space=space, memory=memory, cap_bytes=cap).run(1).best
    assert best.layout.settings["dsx.recompute"] == "offload"


def test_copies_that_a_block_does_not_hide_are_waited_for():
    found = {"context": 4, "micro_batch": 1}
    stays, away = (layer_times(MACHINE, shape(**found, recompute=how))[FIRST] for how in ("full", "offload"))
    assert away == stays, "a block of so many tokens computes for longer than its input is under way"
    slow = replace(NETWORK, cluster=replace(NETWORK.cluster, host_bytes_per_second=1e6))
    waits = layer_times(replace(MACHINE, network=slow), shape(**found, recompute="offload"))[FIRST]
    copy = T // 4 * N * D * WIDTH / (1e6 * NETWORK.efficiency.link)
    assert waits.forward_seconds == pytest.approx(copy)
    assert waits.backward_seconds == pytest.approx(copy)
    assert waits.host_wait == pytest.approx(2 * copy - stays.forward_seconds - stays.backward_seconds)
    predictor = Predictor(task(batch=4))
    predictor.task = replace(predictor.task, machine=replace(MACHINE, network=slow))
    step = predictor.predict(Candidate(mesh=Mesh.over(4, cp=4), recompute="offload"))
    assert step.parts()["copies to the host"] == pytest.approx(4 * 4 * waits.host_wait, rel=0.01)
    assert sum(step.parts().values()) == pytest.approx(step.seconds)


def test_a_block_in_tiles_keeps_and_holds_less():
    whole, tiled = (
        block(shape(recompute=mode, mlp_tiles=tiles)) for mode, tiles in (("none", 1), ("none", 64))
    )
    inner = 2 * T * WIDTH * 2 * CONFIG["intermediate_size"]  # gate and up of a micro-batch of two
    assert whole.kept_bytes - tiled.kept_bytes == inner + inner // 2


@pytest.mark.parametrize("context", [2, 4])
def test_mixers_that_hand_their_states_on_do_their_part_of_the_work_in_turn(context):
    config = json.loads(tiny.tiny_config("bamba").to_json_string(use_diff=False))
    model, rows, tokens, width = hub_model(config), 2, 4096, 4
    sizes = {"model": model, "micro_batch": rows, "sequence_length": tokens, "width": width}
    place = layer_kinds(model).index("Block")
    whole, part = (block(shape(**sizes, context=ranks), place) for ranks in (1, context))
    assert context * recorded_flops(part) == pytest.approx(recorded_flops(whole), rel=1e-3)

    heads, size, state, groups = (
        config[f"mamba_{name}"] for name in ("n_heads", "d_head", "d_state", "n_groups")
    )
    edge = (config["mamba_d_conv"] - 1) * (heads * size + 2 * groups * state) * rows * width
    states = heads * size * state * rows * 4  # in float32
    there = [("edge_sent", edge), ("edge", edge), ("state", states), ("state_sent", states)]
    assert shared(part.forward) == there
    assert shared(part.backward) == [*there[2:], *there[:2]]

    priced = kernels._Pricing(MACHINE, 1, width, context).price(part.operators("forward"))
    sent = sum(NETWORK.transfer_seconds(each, leaves_node=False) for each in (edge, states))
    events = [event[0] for event, _ in part.operators("forward")]
    after = [*part.operators("forward")][len(events) - events[::-1].index("wait") :]
    turn = after[: next(at for at, (event, _) in enumerate(after) if event[0] == "begin")]
    computing = sum(times * kernels._Pricing(MACHINE, 1, width)._operator(event)[0] for event, times in turn)
    assert computing > 0.0
    assert priced.context == pytest.approx(sent + (context - 1) * computing)
