"""What ZeRO-Offload puts on the host, and what of a config says so."""

from __future__ import annotations

import pytest

from dsx.errors import ConfigError
from dsx.memory.job import offload_of
from dsx.memory.ledger import Label, Leaf, Ledger, Storage, Tensor
from dsx.memory.partitioned import BucketedOffload, PartitionedOffload
from dsx.memory.states import Host, Offload, Optimizer, StateSettings, free
from dsx.parallel.zero import ZeroPlan

TORCH_ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def test_no_block_and_no_device_offload_nothing():
    for zero in ({}, {"offload_optimizer": None}, {"offload_optimizer": {"device": "none"}}):
        assert offload_of(zero, TORCH_ADAM, None) is None


def test_torchs_adam_takes_temporaries_there_and_deepspeeds_does_not():
    zero = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    expected = Offload(optimizer=True, pinned=False, pinned_parameters=True, state_bytes=8, step_bytes=8)
    assert offload_of(zero, TORCH_ADAM, None) == expected
    kernel = offload_of(zero, {"type": "AdamW"}, None)
    assert (kernel.state_bytes, kernel.step_bytes) == (8, 0)


def test_deepspeeds_lion_for_cpus_keeps_two_moments():
    """deepspeed/ops/lion/cpu_lion.py makes exp_avg_sq beside exp_avg."""
    zero = {"offload_optimizer": {"device": "cpu"}}
    assert offload_of(zero, {"type": "Lion"}, None).state_bytes == 8


@pytest.mark.parametrize(
    ("zero", "where"),
    [
        ({"offload_optimizer": {"device": "nvme"}}, "offload_optimizer.device"),
        ({"offload_param": {"device": "nvme"}}, "offload_param.device"),
        ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, "super_offload"),
        ({"cpu_offload": True}, "cpu_offload"),
    ],
)
def test_what_dsx_does_not_know_is_refused(zero, where):
    with pytest.raises(ConfigError, match=where):
        offload_of(zero, TORCH_ADAM, None)


def test_pinned_memory_comes_in_powers_of_two_and_is_copied_into():
    host = Host(Offload(), Ledger())
    held = host.pinned("gradients", "a", 1000, 1, pin=True)
    assert (host.ledger.current_bytes, host.ledger.peak_bytes) == (1024, 2024)
    exact = host.pinned("gradients", "b", 1024, 1, pin=True)
    pageable = host.pinned("gradients", "c", 1000, 1, pin=False)
    assert host.ledger.current_bytes == 1024 + 1024 + 1000
    free(held, exact, pageable)
    assert host.ledger.current_bytes == 0


def states(kind, *, bucket, dp=2, accumulate=2, sizes=(10, 6, 100)):
    plan = ZeroPlan(stage=2, dp=dp, groups=(tuple((f"p{i}", size) for i, size in enumerate(sizes)),))
    leaves = {f"p{i}": Leaf(f"p{i}", (size,), 2) for i, size in enumerate(sizes)}
    settings = StateSettings(
        width=2,
        accumulate=accumulate,
        optimizer=Optimizer(state_bytes=8, step_bytes=4),
        bucket=bucket,
        offload=Offload(optimizer=True, pinned=False, state_bytes=8, step_bytes=8),
    )
    made = kind(Ledger(), plan, 0, leaves, settings)
    made.build()
    made.start()
    return made


def gradient(held, leaf):
    what = Label("gradients", "gradient")
    return Tensor(leaf.shape, leaf.width, Storage(held.ledger, what, leaf.numel * leaf.width))


def backward(held, names):
    for name in names:
        leaf = held.leaves[name]
        leaf.receive(gradient(held, leaf))
    held.reduce(boundary=True, came=bool(names))


def test_the_device_keeps_parameters_and_one_gradients_room():
    held = states(BucketedOffload, bucket=50)
    total = 116
    assert held.ledger.current_bytes == 2 * total + 2 * 100
    backward(held, ["p2", "p1", "p0"])
    held.step()
    assert held.ledger.current_bytes == 2 * total + 2 * 100
    local = total // 2
    lines = {label.name: size for label, size in held.host.ledger.live.items() if size}
    assert lines == {
        "master weights": 4 * local,
        "updated": 2 * local,
        "gradient on its way": 2 * 100,
        "fp32 gradients": 4 * local,
        "moments": 8 * local,
        # Whole, of each parameter of which rank 0 updates a part.
        "gradients of parameters in the partition": 2 * total,
    }


def test_reduced_in_each_backward_or_whole_gradients_until_they_leave_for_the_host():
    each, once = states(BucketedOffload, bucket=500), states(PartitionedOffload, bucket=500)
    still = each.ledger.current_bytes
    backward(each, ["p2", "p1", "p0"])
    assert each.ledger.current_bytes == still
    still -= 2 * 100  # DeepSpeed's room for a gradient on its way
    assert once.ledger.current_bytes == still
    backward(once, ["p2", "p1", "p0"])
    assert once.ledger.current_bytes == still + 2 * 116
    for leaf in once.order:
        once.ledger.start()
        before, own = once.ledger.current_bytes, {"p0": 10, "p1": 6, "p2": 42}[leaf.name]
        taken = once.take(leaf)
        once.put(leaf, taken)
        free(taken)
        assert once.ledger.peak_bytes == before + 4 * own
    assert once.ledger.current_bytes == still
    lines = {label.name: size for label, size in once.host.ledger.live.items() if size}
    assert lines == {"master weights": 4 * 58, "updated": 2 * 58, "fp32 gradients": 4 * 58}


def test_slices_of_one_owner_go_without_a_copy():
    held = states(BucketedOffload, bucket=500, dp=1)
    held.ledger.start()
    before = held.ledger.current_bytes
    backward(held, ["p0", "p1"])
    assert held.ledger.peak_bytes == before + 2 * 500 + 2 * 10
    split = states(BucketedOffload, bucket=500, dp=2, sizes=(10, 10))
    split.ledger.start()
    before = split.ledger.current_bytes
    backward(split, ["p1", "p0"])
    assert split.ledger.peak_bytes == before + 2 * 500 + 2 * 20


def test_on_cpus_the_host_is_the_device():
    ledger = Ledger()
    host = Host(Offload(unified=True), ledger)
    held = host.pinned("gradients", "a", 1000, 1, pin=True)
    assert (ledger.current_bytes, ledger.peak_bytes) == (1000, 1000)
    free(held)
    assert ledger.current_bytes == 0
