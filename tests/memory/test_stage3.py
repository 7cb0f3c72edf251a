"""ZeRO-3's states: how they are cut, what they take, what is whole when."""

from __future__ import annotations

import pytest

from dsx.errors import ConfigError
from dsx.memory.job import gathering_of
from dsx.memory.ledger import Leaf, Ledger
from dsx.memory.stage3 import Coordinator, Stage3
from dsx.memory.states import Gathering, Offload, Optimizer, StateSettings
from dsx.parallel.zero import ZeroPlan

ADAM = Optimizer(state_bytes=8, step_bytes=4)


def states(sizes, dp, *, width=2, rank=0, offload=None, **gathering):
    plan = ZeroPlan(stage=3, dp=dp, groups=(tuple((f"p{i}", size) for i, size in enumerate(sizes)),))
    leaves = {f"p{i}": Leaf(f"p{i}", (size,), width) for i, size in enumerate(sizes)}
    settings = StateSettings(
        width=width,
        accumulate=width,
        optimizer=ADAM,
        bucket=100,
        offload=offload,
        gathering=Gathering(**gathering),
    )
    made = Stage3(Ledger(), plan, rank, leaves, settings)
    made.build()
    made.start()
    return made


def by_name(ledger):
    totals = {}
    for label, size in ledger.live.items():
        if size:
            totals[label.name] = totals.get(label.name, 0) + size
    return totals


def test_model_states_of_the_zero_paper():
    """Rajbhandari et al. 2020 (arXiv:1910.02054), figure 1: 7.5e9 parameters on 64 ranks take 1.9 GB each."""
    held = states([7_500_000_000], 64, persistence=0)
    held.begin()
    held.step()
    totals = by_name(held.ledger)
    totals.pop("reduce bucket")
    assert sum(totals.values()) == 16 * 7_500_000_000 / 64
    assert round(sum(totals.values()) / 1e9, 1) == 1.9


@pytest.mark.parametrize("sub_group", [1, 10, 15, 16, 1000])
def test_sub_groups_are_those_of_the_checkpoints_plan(sub_group):
    """dsx.parallel.zero is checked against DeepSpeed's own cut (tests/spec)."""
    held = states([33, 7, 10, 2, 64], 4, sub_group=sub_group)
    assert held.sizes == [buffer.numel for buffer in held.plan.buffers(0)]
    assert sum(held.sizes) == 9 + 2 + 3 + 1 + 16
    assert by_name(held.ledger)["master weights"] == 4 * sum(held.sizes)


def test_padding_is_the_same_on_a_rank_with_nothing_of_its_own():
    first, last = states([3], 4), states([3], 4, rank=3)
    assert by_name(first.ledger) == by_name(last.ledger)
    assert by_name(first.ledger)["partitions"] == 2


def test_parameters_up_to_the_threshold_stay_while_all_together_are_few_enough():
    leaves = [Leaf(name, (size,), 2) for name, size in (("a", 5), ("b", 6), ("c", 2), ("d", 4), ("e", 3))]
    assert Gathering(persistence=5, model_persistence=10).persistent(leaves) == {"a", "c", "e"}
    assert Gathering(persistence=0).persistent(leaves) == set()


def walk(coordinator, modules):
    """One step, forward and backward; which parameters are whole as each module begins."""
    coordinator.begin()
    seen = []
    for module in modules:
        coordinator.fetch(module, forward=True)
        seen.append(sorted(coordinator.here) + sorted(f"{name}~" for name in coordinator.flying))
        coordinator.release(module, forward=True)
    for module in reversed(modules):
        coordinator.fetch(module, forward=False)
        coordinator.release(module, forward=False)
    coordinator.release_all()
    return seen


def test_the_second_step_prefetches_up_to_the_first_parameter_that_fills_the_bucket():
    a, b, c, d = (Leaf(name, (10,), 2) for name in "abcd")
    modules = [(a,), (b,), (c,), (d,)]
    coordinator = Coordinator(
        Ledger(), 2, Gathering(prefetch=11, reuse_distance=0, live=1000, persistence=0), frozenset()
    )
    assert walk(coordinator, modules) == [["a"], ["b"], ["c"], ["d"]]
    # With b, c comes too; with d also a, whose backward is the next use that nobody has yet. b's backward was
    # passed over while b was there, and so b stays.
    later = [["a", "b~", "c~"], ["b", "c", "a~", "d~"], ["b", "c", "a~", "d~"], ["a", "b", "c", "d"]]
    assert walk(coordinator, modules) == later
    assert walk(coordinator, modules) == later


def test_several_come_through_a_flat_buffer_and_one_alone_in_its_own():
    a, b, c = (Leaf(name, (10,), 2) for name in "abc")
    ledger = Ledger()
    coordinator = Coordinator(ledger, 4, Gathering(persistence=0), frozenset())
    coordinator.begin()
    coordinator.fetch((a,), forward=True)
    assert ledger.current_bytes == 2 * 12
    coordinator.fetch((b, c), forward=True)
    assert ledger.peak_bytes == 2 * 12 + 2 * 24 + 2 * 20
    assert ledger.current_bytes == 2 * 12 + 2 * 20
    coordinator.release((b, c), forward=True)
    assert ledger.current_bytes == 2 * 12


def test_what_a_recomputation_saved_keeps_a_gathered_parameter():
    a = Leaf("a", (10,), 2)
    ledger = Ledger()
    coordinator = Coordinator(ledger, 2, Gathering(persistence=0), frozenset())
    coordinator.begin()
    coordinator.fetch((a,), forward=True)
    saved = a.detach()
    coordinator.release((a,), forward=True)
    assert ledger.current_bytes == 20
    saved.release()
    assert ledger.current_bytes == 0


def test_one_rank_gathers_nothing_but_what_lies_on_the_host():
    a = Leaf("a", (10,), 2)
    for offloaded, size in ((False, 0), (True, 20)):
        ledger = Ledger()
        coordinator = Coordinator(ledger, 1, Gathering(persistence=0), frozenset(), offloaded=offloaded)
        coordinator.begin()
        coordinator.fetch((a,), forward=True)
        assert ledger.current_bytes == size
        coordinator.release((a,), forward=True)
        assert ledger.current_bytes == 0


def test_with_parameters_and_optimizer_offloaded_only_the_bucket_stays():
    held = states(
        [33, 70],
        4,
        offload=Offload(optimizer=True, parameters=True, state_bytes=8, rounds=False),
        persistence=0,
    )
    assert by_name(held.ledger) == {"reduce bucket": 200}
    held.begin()
    held.step()
    assert by_name(held.ledger) == {"reduce bucket": 200}
    local = 9 + 18
    assert by_name(held.host.ledger) == {
        "partitions": 2 * local,
        "master weights": 4 * local,
        "fp32 gradients": 4 * local,
        "gradient partitions": 2 * local,
        "moments": 8 * local,
    }


def test_keys_of_a_config():
    zero = {
        "stage": 3,
        "stage3_prefetch_bucket_size": 5e6,
        "max_live_parameters": 7,
        "contiguous_gradients": False,
    }
    assert gathering_of(zero, 9) == Gathering(prefetch=5_000_000, live=7, contiguous=False, keep_bytes=9)
    # deepspeed/runtime/engine.py sets prefetching to one element.
    assert gathering_of({"stage3_allgather_sequential": True}, 0) == Gathering(sequential=True, prefetch=1)


def test_auto_is_deepspeeds_default_and_anything_else_a_number():
    assert gathering_of({"stage3_prefetch_bucket_size": "auto", "leaf_module": {}}, 0) == Gathering()
    for value in ("many", -1, True):
        with pytest.raises(ConfigError, match="sub_group_size"):
            gathering_of({"sub_group_size": value}, 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("zero_quantized_weights", True), ("zero_hpz_partition_size", 8), ("leaf_module", {"a": 1})],
)
def test_a_key_of_unknown_effect_is_refused(key, value):
    with pytest.raises(ConfigError, match=key):
        gathering_of({"stage": 3, key: value}, 0)
