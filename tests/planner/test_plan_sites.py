"""Islands beside one job over a slow link: arithmetic by hand, and searches against trying everything."""

from dataclasses import replace

import pytest

from dsx.models.hf_config import model_spec
from dsx.models.presets import presets
from dsx.parallel.mesh import Mesh
from dsx.planner.cluster import Group, Link, preset
from dsx.planner.costs import Efficiency, Network, Software
from dsx.planner.inputs import PinnedChoices, plan_inputs, site_inputs
from dsx.planner.islands import NEAR, IslandTask, RoundSettings
from dsx.planner.layer_times import Machine
from dsx.planner.layers import model_task
from dsx.planner.layout import Candidate, Space, meshes, scheduled, variants
from dsx.planner.plan import Search
from dsx.planner.sites import compare
from dsx.planner.step_time import Predictor

LLAMA = model_spec(next(each.config for each in presets() if each.name == "llama-3.2-1b"))
MBIT = 1e6 / 8
LINK = Link(bytes_per_second=100 * MBIT, latency_seconds=0.02)
IDEAL = Efficiency(link=1.0)


def two_sites(link=LINK, gpus=16):
    return replace(preset("H100"), sites=2, across=link).joined(gpus)


def island(**changes):
    """A second a step, a million elements and bytes a second, and ranks, so that hosts have nothing to do."""
    figures = {"count": 2, "step_seconds": 1.0, "elements": 1_000_000, "ranks": 1_000_000}
    return IslandTask(**(figures | {"bytes_per_second": 1e6, "latency_seconds": 0.0} | changes))


@pytest.mark.parametrize(
    ("count", "wire", "num_bytes"),
    [
        # The first island gets a movement from each other, and sends each the mean.
        (2, "fp32", 4_000_000),
        (2, "bf16", 2_000_000),
        # A scale for each of 245 blocks of 4096.
        (2, "int8", 1_000_980),
        (3, "fp32", 8_000_000),
        (4, "bf16", 6_000_000),
    ],
)
def test_bytes_of_a_round(count, wire, num_bytes):
    assert island(count=count).sent_bytes(RoundSettings(wire=wire)) == pytest.approx(num_bytes)


def test_a_round_takes_its_bytes_and_eight_latencies():
    assert island().round_seconds(RoundSettings()) == pytest.approx(4.0)
    assert island(latency_seconds=0.1).round_seconds(RoundSettings()) == pytest.approx(4.8)
    # Half of the model in each of two rounds.
    assert island(latency_seconds=0.1).round_seconds(RoundSettings(shares=2)) == pytest.approx(2.8)
    assert island(ranks=1).round_seconds(RoundSettings()) == pytest.approx(4.03)  # a host's 30 ns an element


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        (RoundSettings(every=1), 5.0),
        (RoundSettings(every=10), 1.4),
        (RoundSettings(every=10, shares=2), 1.4),  # twice as many rounds, half as long
        (RoundSettings(every=10, delay=3), 1.1),  # three of its four seconds are hidden
        (RoundSettings(every=10, delay=5), 1.0),
        (RoundSettings(every=10, shares=2, delay=1), 1.2),
    ],
)
def test_a_mean_step_by_hand(settings, seconds):
    assert island().mean_step_seconds(settings) == pytest.approx(seconds)
    assert island().speed(settings) == pytest.approx(1 / seconds)


@pytest.mark.parametrize(
    "settings", [RoundSettings(), RoundSettings(wire="int8"), RoundSettings(shares=4), RoundSettings(delay=2)]
)
def test_the_least_every_is_the_least(settings):
    task = island(latency_seconds=0.05)
    every = task.near_from(settings)
    assert task.speed(replace(settings, every=every)) >= NEAR
    assert every > max(settings.delay * settings.shares, settings.shares - 1)
    assert task.speed(replace(settings, every=every - 1)) < NEAR


@pytest.mark.parametrize(
    ("bytes_per_second", "chosen"),
    [
        (1e8, RoundSettings(every=10)),  # a round takes 4 % of a step
        (2e6, RoundSettings(every=50)),
        (1e6, RoundSettings(every=50, wire="bf16")),  # 76 fp32
        (2e5, RoundSettings(every=100, wire="int8")),  # 190 bf16, 96 int8
        (1e4, RoundSettings(every=500, wire="int8", delay=101)),  # 100 s a round
        (1e3, RoundSettings(every=1002, wire="int8", delay=1001)),
    ],
)
def test_slower_links_have_rarer_rounds_then_narrower_wires_then_delay(bytes_per_second, chosen):
    task = island(bytes_per_second=bytes_per_second)
    assert task.chosen() == chosen
    assert task.speed(chosen) >= NEAR


PERCENT = (50, 80, 90, 95, 99)
TABLE_6 = [
    # Charles et al. 2025 (arXiv:2503.09799), table 6: billions of parameters, seconds a step, H, and Gbit/s
    # for so many percent of the time to be computation.
    (10, 0.8, 10, (16.0, 49.4, 86.8, 152.6, 222.3)),
    (10, 0.8, 50, (3.0, 11.0, 23.3, 41.0, 126.5)),
    (10, 0.8, 100, (1.4, 6.2, 13.3, 23.3, 86.8)),
    (10, 0.8, 300, (0.5, 2.0, 4.3, 9.1, 41.0)),
    (405, 26, 10, (19.3, 72.0, 126.5, 184.2, 268.3)),
    (405, 26, 50, (3.6, 13.3, 28.1, 59.6, 184.2)),
    (405, 26, 100, (2.0, 7.5, 16.0, 33.9, 126.5)),
    (405, 26, 300, (0.7, 3.0, 6.2, 13.3, 59.6)),
]


@pytest.mark.parametrize(("billions", "step_seconds", "every", "gbits"), TABLE_6)
def test_published_bandwidths_of_diloco(billions, step_seconds, every, gbits):
    """Its simulator hides a part of each round behind a backward pass, so that it is a little above."""
    for percent, gbit in zip(PERCENT, gbits, strict=True):
        task = island(
            elements=billions * 10**9,
            ranks=10**12,
            step_seconds=step_seconds,
            bytes_per_second=gbit * 1e9 / 8,
        )
        assert 0 <= percent / 100 - task.speed(RoundSettings(every=every, wire="bf16")) < 0.1


@pytest.mark.parametrize("stride", [1, 2])
def test_an_all_reduce_over_a_slow_link_is_a_rings(stride):
    """alpha-beta (Thakur et al. 2005): 2 (n-1) steps, 2 (n-1)/n of the bytes through the slowest link."""
    network = Network(two_sites(), IDEAL)
    members, num_bytes = 16 // stride, 8e6
    latency = 2 * ((members - 2) * preset("H100").inside.latency_seconds + LINK.latency_seconds)
    # Rings of the stride's groups share the link.
    bandwidth = 2 * (members - 1) / members * num_bytes * stride / LINK.bytes_per_second
    assert network.seconds("all_reduce", num_bytes, Group(members, stride)) == pytest.approx(
        latency + bandwidth
    )


def test_a_group_within_a_site_does_not_cross():
    joined = two_sites()
    alone = replace(preset("H100"), nodes=None)
    for group in (Group(8), Group(4, 2), Group(2, 4)):
        times = [Network(c, IDEAL).seconds("all_gather", 1e9, group) for c in (joined, alone)]
        assert times[0] == times[1]


def task(cluster, model=LLAMA, batch=32):
    machine = Machine(network=Network(cluster, IDEAL), software=Software(), precision="bf16")
    return model_task(model, machine=machine, global_batch=batch, sequence_length=2048)


def test_data_parallel_ranks_of_one_job_wait_for_the_link():
    """ZeRO-1 sends each gradient once, and then parameters: two times 15/16 of the model in bf16."""
    predictor = Predictor(task(two_sites()))
    layout = Candidate(mesh=Mesh.over(16, pp=1, tp=1), zero_stage=1)
    parameters = sum(predictor.elements(1))  # a tied table counts where it is used, too
    step = predictor.predict(layout)
    assert step.gradients + step.parameters == pytest.approx(
        2 * 15 / 16 * 2 * parameters / LINK.bytes_per_second, rel=0.01
    )


def test_messages_of_a_pipeline_queue_at_the_link():
    """Of 32 sequences each crosses once, and its gradient in the other direction."""
    predictor = Predictor(task(two_sites(), replace(LLAMA, tied_embeddings=False)))
    layout = Candidate(mesh=Mesh.over(16, pp=2, tp=1), micro_batch=1, zero_stage=1)
    hidden = 32 * 2048 * LLAMA.hidden_size * 2 / LINK.bytes_per_second
    assert predictor.predict(layout).seconds == pytest.approx(hidden, rel=0.05)


@pytest.mark.parametrize("mbit", [100, 100_000])
def test_what_crosses_is_a_bound(mbit):
    predictor = Predictor(task(two_sites(Link(mbit * MBIT, 0.02))))
    space = Space.of(16, micro_batches=(1, 4), names=("1f1b", "interleaved", "zbv"))
    layouts = [
        layout
        for mesh in meshes(predictor.task, space)
        for variant in variants(predictor.task, space, mesh)
        for layout in scheduled(predictor.task, space, variant)
    ]
    assert len(layouts) > 200
    for layout in layouts[::31]:
        beside, after = predictor.crossing(layout)
        assert beside + after > 0
        assert beside + after <= predictor.predict(layout).seconds * (1 + 1e-9)


@pytest.mark.parametrize("slack", [0.0, 0.05])
def test_a_search_over_sites_finds_what_trying_everything_finds(slack):
    found, space = (
        task(two_sites()),
        Space.of(16, micro_batches=(1, 2), recompute=("none",), names=("1f1b", "zbv")),
    )
    predictor = Predictor(found)
    seconds = [
        predictor.predict(layout).seconds
        for mesh in meshes(found, space)
        for variant in variants(found, space, mesh)
        for layout in scheduled(found, space, variant)
    ]
    plan = Search(found, space, lambda _: 0, slack=slack).run(1)
    assert min(seconds) * (1 - 1e-9) <= plan.best[0].time.seconds <= min(seconds) * (1 + slack + 1e-9)
    assert plan.predicted < len(seconds)


def compared(mbit, latency_seconds=0.025, batch=8):
    cluster = replace(preset("CPU"), sites=2, across=Link(mbit * MBIT, latency_seconds))
    joined = plan_inputs(
        model="llama/tiny",
        config=None,
        cluster=cluster.joined(4),
        gpus=4,
        global_batch=batch,
        sequence_length=128,
    )
    pinned = PinnedChoices(micro_batch=1, tensor=1)
    return compare(joined, site_inputs(joined, cluster), cluster, pinned, None, top=1), joined


def test_islands_pay_over_a_slow_link():
    found, joined = compared(100)
    assert found.pays
    assert found.tokens_per_second > 3 * found.one_tokens_per_second
    assert found.config(joined)["dsx"]["outer"] == {
        "islands": 2,
        "every": found.settings.every,
        "wire": found.settings.wire,
    }


def test_islands_do_not_pay_where_sites_are_as_near_as_nodes():
    """A site's link is that of its two processes between nodes."""
    between = preset("CPU").between
    found, joined = compared(2 * between.bytes_per_second / MBIT, between.latency_seconds, batch=512)
    assert not found.pays
    assert found.taken is found.one
    assert "outer" not in found.config(joined)["dsx"]
    assert found.text()[-1].startswith("islands do not pay")
    # A config that has islands is planned as islands, whatever is said of them.
    assert replace(found, given=True).taken is found.site
