"""Parts of the planner's model, each against a figure from elsewhere; short simulations against long ones."""

import json
import random
from dataclasses import replace

import pytest

from dsx.checkpoint.claims import model_of
from dsx.errors import ConfigError
from dsx.memory.layer_record import Shape
from dsx.memory.record_cache import ModelRecords
from dsx.models.flops import layer_flops
from dsx.models.params import layer_kinds, num_parameters, param_specs
from dsx.models.presets import presets
from dsx.parallel.mesh import ALONE, Mesh
from dsx.planner import layer_times as kernels
from dsx.planner.cluster import PRESETS, ClusterConfig, Group, described, preset, read_cluster
from dsx.planner.costs import Efficiency, Network, Software
from dsx.planner.layer_times import Machine, layer_times
from dsx.planner.layers import model_task
from dsx.planner.layout import Candidate
from dsx.planner.step_time import PipelineStep, Predictor, least_seconds
from dsx.schedules.builders import NAMES, default_chunks, placement_of
from dsx.schedules.program import Program
from dsx.schedules.simulate import Costs, simulate
from often import often

LLAMA = model_of(next(each.config for each in presets() if each.name == "llama-3-8b"))


def machine(cluster="H100", software=None, efficiency=None):
    network = Network(preset(cluster), efficiency or Efficiency())
    return Machine(network=network, software=software or Software(), precision="bf16")


def task(model=LLAMA, batch=64, length=4096, **kwargs):
    return model_task(model, machine=machine(**kwargs), global_batch=batch, sequence_length=length)


def shape(model, tensor=1, **kwargs):
    sizes = {"sequence_parallel": True, "micro_batch": 2, "sequence_length": 128, "width": 2}
    return Shape(model=model, tensor=tensor, **sizes | kwargs)


def record(found, kind):
    """Of a layer of some kind."""
    return ModelRecords(found).layer(layer_kinds(found.model).index(kind), divided=False, hooked=False)


def products(found, kind):
    """Products of matrices in a layer's forward, those of attention included."""
    several = []
    for event in record(found, kind).forward:
        if event[0] == "mm":
            several.append(kernels.Product(*event[1:5]))
        elif event[0] == "sdpa":
            several += kernels.AttentionShape(*event[1:]).products
    return several


def traffic(found, kind):
    """Bytes that the other operators of a layer's forward move."""
    return sum(event[2] for event in record(found, kind).forward if event[0] == "op")


@pytest.mark.parametrize("preset", often(presets(), 4), ids=repr)
def test_products_are_the_flops_of_mfu(preset):
    """One recorded forward is a third of dsx.models.flops; vocabulary padding is on top of it."""
    model = model_of(preset.config)
    found = shape(model)
    tokens = found.micro_batch * found.sequence_length
    expected = dict(zip(layer_kinds(model), layer_flops(model, 128), strict=True))
    block = sum(each.flops for each in products(found, "Block"))
    assert 3 * block == pytest.approx(tokens * expected["Block"])
    (table,) = [spec for spec in param_specs(model) if spec.layer == 0 and spec.pad_multiple]
    padding = table.local_extent(ALONE) / model.vocab_size
    head = sum(each.flops for each in products(found, "Head"))
    assert 3 * head == pytest.approx(tokens * expected["Head"] * padding)
    # By chunks backward runs with forward, and sums its weight's gradient in place.
    chunked = products(replace(found, loss_chunk=64), "Head")
    assert sum(each.flops for each in chunked) == pytest.approx(3 * head)


@pytest.mark.parametrize("preset", often(presets(), 4), ids=repr)
def test_parameters_are_the_models(preset):
    """Apart from vocabulary padding; a tied table counts twice, on the first and on the last rank."""
    model = model_of(preset.config)
    whole = task(model)
    predictor = Predictor(replace(whole, layers=replace(whole.layers, vocab_multiple=1)))
    table = model.vocab_size * model.hidden_size
    tied = table if model.tied_embeddings else 0
    assert sum(predictor.elements(1)) == num_parameters(model) + tied


def test_tensor_parallelism_divides_the_products():
    whole, part = shape(LLAMA), shape(LLAMA, 8)
    for one, other in zip(products(whole, "Block"), products(part, "Block"), strict=True):
        assert one.flops == pytest.approx(8 * other.flops)
    # The copies of what two samples gather and scatter are on top of an eighth of the rest.
    alone = replace(part, micro_batch=1), replace(whole, micro_batch=1)
    assert traffic(alone[1], "Block") == pytest.approx(
        8 * traffic(alone[0], "Block"), rel=0.02
    )  # less tables
    alike = traffic(replace(alone[0], sequence_parallel=False), "Block")
    assert alike > 2 * traffic(alone[0], "Block")


def test_ranks_that_share_a_head_hold_all_and_compute_one():
    """Sixteen ranks on eight key/value heads: half of what eight have, but for keys and values."""
    layers = task().layers
    hidden, head, all_heads = LLAMA.hidden_size, 2 * LLAMA.head_dim, 2 * LLAMA.kv_size
    eight, sixteen = (layers.elements(tensor)[1] - 2 * hidden for tensor in (8, 16))  # without the norms
    assert sixteen == (eight - head * hidden) / 2 + all_heads * hidden
    fewer, more = (layers.shape(Candidate(mesh=Mesh.over(16, tp=tensor))) for tensor in (8, 16))
    eight, sixteen = (sum(each.flops for each in products(each, "Block")) for each in (fewer, more))
    one_head = 2 * layers.sequence_length * head * hidden
    assert sixteen == pytest.approx((eight + one_head) / 2)


def test_ring_all_reduce_in_a_node():
    """NCCL 2.10, src/graph/tuning.cc: bytes x 2 (n - 1) / n at the bus rate, and 2 (n - 1) steps."""
    network = Network(preset("A100-80"), Efficiency(link=235 / 300))
    seconds = network.seconds("all_reduce", 1e9, Group(8))
    assert seconds == pytest.approx(1e9 * 2 * 7 / 8 / 235e9 + 14 * 3.4e-6)
    halves = [network.seconds(kind, 1e9, Group(8)) for kind in ("all_gather", "reduce_scatter")]
    assert sum(halves) == pytest.approx(seconds)


def test_ring_all_reduce_between_nodes():
    """Data parallelism beside tensor parallelism of 8 has one adapter per ring, without it all eight."""
    network = Network(preset("A100-80"), Efficiency(link=1.0))
    assert network.rate(Group(32, 8)) == 25e9
    assert network.rate(Group(32, 1)) == 200e9
    assert network.rate(Group(16, 2)) == 100e9
    assert network.rate(Group(8, 1)) == 300e9
    lone = network.seconds("all_reduce", 1.0, Group(2, 8))
    assert lone == pytest.approx(2 * 9.6e-6, rel=1e-3)
    assert network.seconds("all_reduce", 1e9, Group(1)) == 0.0


def test_larger_matrices_are_more_efficient():
    found = machine()
    rates = [
        each.flops / found.product(each, 2) for each in (kernels.Product(n, n, n) for n in (256, 1024, 8192))
    ]
    assert rates[0] < rates[1] < rates[2] < 0.8 * 989.4e12
    thin = kernels.Product(8192, 8192, 8)
    assert found.product(thin, 2) >= thin.elements * 2 / 3.35e12


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved", "zbv"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_parts_add_up(schedule, zero):
    chunks = 1 if schedule in ("1f1b", "zb_h1") else 2
    layout = Candidate(
        mesh=Mesh.of(pp=4, dp=2, tp=2),
        schedule=schedule,
        chunks=chunks,
        zero_stage=zero,
        reduces_micro_batches=zero == 2,
        recompute="selective",
    )
    step = Predictor(task()).predict(layout)
    assert all(part >= -1e-9 * step.seconds for part in step.parts().values()), step.parts()
    assert step.seconds == pytest.approx(sum(step.parts().values()))
    assert 0 < step.communication_share < 1
    assert step.tensor > 0
    assert step.recompute > 0
    assert (step.gathers > 0) == (zero >= 2)
    assert (step.parameters > 0) == (zero in (1, 2))


def test_no_layout_beats_the_hardware():
    for layout in (
        Candidate(mesh=Mesh.of(dp=8)),
        Candidate(mesh=Mesh.of(tp=8)),
        Candidate(mesh=Mesh.of(pp=8), schedule="zbv", chunks=2),
    ):
        found = task()
        step = Predictor(found).predict(layout)
        assert found.flops / step.seconds / 8 < 989.4e12 * Efficiency().matmul


def test_what_slows_a_step():
    predictor = Predictor(task())

    def seconds(**changes):
        return predictor.predict(replace(Candidate(mesh=Mesh.of(pp=2, dp=2, tp=2)), **changes)).seconds

    assert seconds() < seconds(recompute="selective") < seconds(recompute="full")
    wide = Mesh.of(pp=2, dp=2, tp=4)
    assert seconds(mesh=wide) < seconds(mesh=wide, sequence_parallel=False)
    assert seconds(zero_stage=1) < seconds(zero_stage=2, reduces_micro_batches=True)
    assert seconds(schedule="interleaved", chunks=2) < seconds()


def test_gradients_of_several_chunks_are_reduced_beside_computation():
    """docs/adr/0008: all but the last chunk's reduction is hidden."""
    predictor = Predictor(task(batch=256))
    one = predictor.predict(Candidate(mesh=Mesh.of(pp=4, dp=16), chunks=1))
    four = predictor.predict(Candidate(mesh=Mesh.of(pp=4, dp=16), schedule="interleaved", chunks=4))
    assert one.gradients > 0
    assert four.gradients < 0.5 * one.gradients


def test_on_a_host_nothing_hides():
    found = machine("CPU")
    assert found.beside(2.0, 1.0) == 3.0
    assert found.host(2.0, 1.0) == 3.0
    device = machine("H100")
    assert 2.0 < device.beside(2.0, 1.0) < 3.0
    assert device.host(2.0, 1.0) == 2.0


def test_block_time_grows_with_everything():
    base = shape(LLAMA, 2)
    block = layer_kinds(LLAMA).index("Block")

    def seconds(found):
        return layer_times(machine(), found)[block].seconds

    assert seconds(replace(base, micro_batch=4)) < 2 * seconds(base) * 1.001
    assert seconds(replace(base, sequence_length=256)) > seconds(base)
    whole = layer_times(machine(), replace(base, recompute="full"))[block]
    # Recomputation stops once the last product has its inputs: what follows it is not done again.
    events = record(replace(base, recompute="full"), "Block").forward
    last = max(place for place, event in enumerate(events) if event[0] == "mm")
    rest = sum(event[2] for event in events[last:] if event[0] == "op")
    assert whole.again_seconds == pytest.approx(
        whole.forward_seconds - whole.forward_wait - machine().traffic(rest)
    )
    divided = whole.backward_input_seconds + whole.backward_weight_seconds
    assert divided > whole.backward_seconds


def test_a_window_costs_its_mask_and_only_where_it_ends_before_the_sequence():
    """With a mask the fused kernel computes the whole square: forward as twice the causal products."""
    base = replace(shape(LLAMA, 2), sequence_length=8192)
    plain, first = layer_times(machine(), base), layer_kinds(LLAMA).index("Block")
    long = replace(LLAMA, windows=(8192,) * LLAMA.num_layers)
    assert layer_times(machine(), replace(base, model=long)) == plain
    mixed = replace(LLAMA, windows=(0, 4096) * (LLAMA.num_layers // 2))
    times = layer_times(machine(), replace(base, model=mixed))
    assert times[first] == plain[first]
    assert times[first + 1] == times[first + 3]
    (shown,) = [event for event in record(base, "Block").forward if event[0] == "sdpa"]
    causal = sum(each.flops for each in kernels.AttentionShape(*shown[1:]).products) / 2
    rate = machine().network.cluster.peak("bf16") * Efficiency().matmul * Efficiency().attention
    more = times[first + 1].forward_seconds - plain[first].forward_seconds
    masked = replace(base, model=replace(mixed, windows=(4096,) * LLAMA.num_layers))
    copies = traffic(masked, "Block") - traffic(base, "Block")
    # Keys and values are read, and written once for each query head.
    tokens = base.micro_batch * base.sequence_length
    assert copies == 2 * (4096 + 1024) / 2 * tokens * base.width
    assert more == pytest.approx(causal / rate + machine().traffic(copies))


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    """Usual sizes: memory 79 to 191 GiB, a node's links faster than the network, half precision faster."""
    found = preset(name.lower())
    assert found.gpus_per_node == (72 if name == "GB200" else 8)
    assert found.inside.bytes_per_second > 5 * found.between.bytes_per_second
    assert found.inside.latency_seconds < found.between.latency_seconds
    assert 0 < found.usable_bytes <= found.memory_bytes
    if name in ("RTX-4090", "RTX-3090", "L40S"):  # cards of graphics, by PCIe
        assert (found.memory_bytes >> 30) in (23, 44)
        assert 70 < found.peak("bf16") / found.memory_bytes_per_second < 420
        assert found.inside.bytes_per_second == 32e9
    elif name != "CPU":
        assert 79 <= found.memory_bytes / 2**30 <= 191
        assert found.flops["bf16"] > 5 * found.flops["fp32"]
        assert 100 < found.peak("bf16") / found.memory_bytes_per_second < 400
    assert found.is_host == (name == "CPU")


@pytest.mark.parametrize("name", ["4090", "RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090"])
def test_cards_by_the_names_that_people_use(name):
    found = preset(name)
    assert described("file", ClusterConfig(gpu=name)).flops == found.flops
    assert (found.name, found.peak("bf16")) == ("RTX-4090", 165.2e12)


def test_unknown_cluster():
    with pytest.raises(ConfigError, match="H101"):
        preset("H101")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"gpus_per_node": 0}, "gpus_per_node = 0"),
        ({"nodes": -1}, "nodes = -1"),
        ({"memory_gib": 0}, "memory_gib = 0"),
        ({"teraflops": {"bf16": -1.0}}, r"teraflops\.bf16"),
        ({"inside": {"gigabytes_per_second": 0.0}}, r"inside\.gigabytes_per_second"),
        ({"between": {"latency_microseconds": -1.0}}, r"between\.latency_microseconds"),
        ({"reserved_gib": 1024}, "reserved_bytes"),
    ],
)
def test_clusters_that_cannot_be(change, word, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"gpu": "H100"} | change))
    with pytest.raises(ConfigError, match=word):
        read_cluster(str(file))


def test_precision_without_a_rate():
    only = replace(preset("H100"), flops={"bf16": 1e15})
    with pytest.raises(ConfigError, match=r"flops\.fp32"):
        only.peak("fp32")


def costs(stages, wire, spread):
    drawn = random.Random(stages)
    forward, first, second = (tuple(1 + spread * drawn.random() for _ in range(stages)) for _ in range(3))
    return Costs(
        forward_seconds=forward,
        backward_seconds=tuple(a + b for a, b in zip(first, second, strict=True)),
        backward_input_seconds=first,
        backward_weight_seconds=second,
        transfer_seconds=wire,
    )


def chunks_of(name):
    if default_chunks(name) == 1:
        return (1,)
    return (2,) if placement_of(name) == "v" else (2, 4)


@pytest.mark.parametrize("name", NAMES)
def test_as_long_as_the_whole_simulation(name):
    """Equal stages within 0.1 %, stages that differ by up to 30 % within 1 %; busy time exactly."""
    for ranks, count, wire in ((4, 200, 0.0), (8, 130, 0.2), (8, 257, 0.0)):
        for chunks in chunks_of(name):
            for spread, tolerance in ((0.0, 1e-3), (0.3, 1e-2)):
                given = costs(ranks * chunks, wire, spread)
                program = Program(name=name)
                short, full = (
                    PipelineStep(program, ranks, chunks, count).run(given),
                    simulate(program.build(ranks, chunks, count), given),
                )
                where = (ranks, chunks, count, spread)
                assert short.seconds == pytest.approx(full.seconds, rel=tolerance), where
                assert short.busy_seconds == pytest.approx(full.busy_seconds, rel=1e-9), where
                assert least_seconds(program, ranks, count, given) <= full.seconds * (1 + 1e-9), where


def test_is_shorter_than_the_whole():
    pipeline = PipelineStep(Program(name="1f1b"), 64, 1, 512)
    assert max(pipeline.lengths) < 512
    assert {length % 64 for length in pipeline.lengths} == {0}


@pytest.mark.parametrize(("chunks", "name"), [(1, "1f1b"), (2, "interleaved")])
def test_bubble_is_the_papers(chunks, name):
    """(p - 1) / (v m), arXiv:2104.04473, section 2.2, at a size that is not simulated whole."""
    found = PipelineStep(Program(name=name), 16, chunks, 512).run(Costs())
    assert found.bubble == pytest.approx(15 / (chunks * 512), rel=1e-6)
    assert found.left_seconds[0] == pytest.approx(0.0)


def test_bound_is_met_by_equal_stages_without_wires():
    for name, chunks in (("1f1b", 1), ("interleaved", 4)):
        program = Program(name=name)
        whole = Costs(forward_seconds=(1.0,) * 8 * chunks, backward_seconds=(2.0,) * 8 * chunks)
        full = simulate(program.build(8, chunks, 64), whole).seconds
        assert least_seconds(program, 8, 64, whole) == pytest.approx(full)
