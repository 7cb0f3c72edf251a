"""The ledger of ZeRO-3 and of offload against DeepSpeed itself: its tensors, each of its gathers, its peaks.

DeepSpeed runs on paper (meta_engine.run: the real engine on fake tensors) in a process of its own, as rank
1 of a run whose other ranks are not there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from deepspeed.runtime.zero import partitioned_param_coordinator

from dsx.config.resolve import resolve
from dsx.memory.estimate import estimate
from dsx.memory.job import job_of
from dsx.memory.stage3 import Coordinator
from meta_engine import programs

RANK, WORLD = 1, 6

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 20000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "dsx": {
        "model": {
            "family": "llama",
            "preset": "tiny",
            "overrides": {"num_hidden_layers": 4, "hidden_size": 80, "vocab_size": 259},
        },
        "parallel": {"pipeline": 2, "tensor": 1, "chunks": 2},
        "partition": {"method": "uniform"},
        "schedule": {"name": "interleaved"},
        "recompute": "full",
        "data": {"sequence_length": 32},
        "train": {"steps": 2, "output": "runs/paper"},
    },
}

PREFETCHING = [
    "zero_optimization.stage3_prefetch_bucket_size=30000",
    "zero_optimization.stage3_max_live_parameters=90000",
    "zero_optimization.stage3_max_reuse_distance=40000",
    "zero_optimization.stage3_param_persistence_threshold=60",
    "zero_optimization.sub_group_size=20000",
]

CASES = {
    "prefetching": PREFETCHING,
    "keeping": [*PREFETCHING, "dsx.zero.keep_gathered_bytes=400000", "data_types.grad_accum_dtype=fp32"],
    "head_norms": [
        *PREFETCHING,
        "dsx.model.family=qwen3",
        'dsx.model.overrides={"hidden_size": 80, "head_dim": 16, "vocab_size": 259}',
    ],
    "offload": [
        "zero_optimization.offload_optimizer.device=cpu",
        "zero_optimization.offload_param.device=cpu",
        "zero_optimization.offload_param.pin_memory=false",
    ],
}


def traced(sets, host):
    """What DeepSpeed did: its peaks, the bytes of its states, and its gathers and drops in their order."""
    from meta_engine import run

    coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
    private = "_PartitionedParameterCoordinator"
    names = (f"{private}__all_gather_params_", f"{private}__release_param", "reset_step")
    events, engines = [], []
    gather, drop, reset = (getattr(coordinator, name) for name in names)
    make = run.initialize

    def gathering(self, params, forward, quantize=False):
        if absent := sorted(p.ds_numel for p in params if p.ds_status.name == "NOT_AVAILABLE"):
            events.append(["gather", absent])
        return gather(self, params, forward, quantize)

    def dropping(self, param, free_data=True):
        if param.ds_status.name == "AVAILABLE" and not param.ds_active_sub_modules:
            events.append(["drop", [param.ds_numel]])
        return drop(self, param, free_data)

    def resetting(self):
        events.append(["begin", []])
        return reset(self)

    def initialize(**arguments):
        made = make(**arguments)
        engines.append(made[0].deepspeed_engine)
        return made

    for name, call in zip(names, (gathering, dropping, resetting), strict=True):
        setattr(coordinator, name, call)
    run.initialize = initialize
    peaks = programs.trace_here(CONFIG, RANK, WORLD, sets, {"host": host})
    optimizer = engines[0].optimizer

    def size(*tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    masters = optimizer.fp32_partitioned_groups_flat
    values = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    return {
        "phases": peaks.phases,
        "host": max(peaks.host_phases.values(), default=None),
        "steady": peaks.steady_bytes,
        "states": {
            "partitions": size(*optimizer.fp16_partitioned_groups_flat),
            "master weights": size(*masters),
            "gradient partitions": size(optimizer.grad_partitions_flat_buffer),
            "fp32 gradients": size(*(t.grad for t in masters if t.grad is not None)),
            "moments": size(*(t for t in values if torch.is_tensor(t) and t.numel() > 1)),
        },
        "events": events,
    }


@pytest.fixture(scope="module", params=CASES)
def both(request):
    """What DeepSpeed did, and the ledger of the same rank with the gathers that it made."""
    sets = CASES[request.param]
    real = programs.alone(traced, sets, request.param == "offload")
    job = job_of(resolve(CONFIG, world_size=WORLD, overrides=sets))
    if job.states.offload is not None:
        # Pinned memory on paper is the host's own, of any size.
        job = replace(job, states=replace(job.states, offload=replace(job.states.offload, rounds=False)))
    events = []
    with pytest.MonkeyPatch.context() as patch:
        _record(patch, events)
        found = estimate(job, RANK)
    exact = estimate(job, RANK, rounding_bytes=1)
    return real, found, exact, events


def _record(patch, events):
    gather, drop, begin = Coordinator._gather, Coordinator._drop, Coordinator.begin

    def gathering(self, leaves):
        if leaves:
            events.append(["gather", sorted(leaf.numel for leaf in leaves)])
        gather(self, leaves)

    def dropping(self, leaf):
        if leaf.name in self.here and not self._active.get(leaf.name):
            events.append(["drop", [leaf.numel]])
        drop(self, leaf)

    def beginning(self):
        events.append(["begin", []])
        begin(self)

    patch.setattr(Coordinator, "_gather", gathering)
    patch.setattr(Coordinator, "_drop", dropping)
    patch.setattr(Coordinator, "begin", beginning)


def _steps(events):
    """The events of each step, neighbouring drops (a module's parameters, in no order) together."""
    steps = []
    for kind, numels in events:
        if kind == "begin":
            steps.append([])
        elif kind == "drop" and steps[-1] and steps[-1][-1][0] == "drop":
            steps[-1][-1][1] = sorted([*steps[-1][-1][1], *numels])
        else:
            steps[-1].append([kind, list(numels)])
    return steps


def test_states_are_deepspeeds_tensors_to_the_byte(both):
    real, _, exact, _ = both
    held = Counter()
    for label, size in (*exact.phases[-1].lines, *exact.host_lines):
        if label.category != "temporaries":
            held[label.name] += size
    assert {name: held[name] for name in real["states"]} == real["states"]
    # 1/3 of each parameter, and so padding.
    assert real["states"]["partitions"] % 2 == 0


def test_every_gather_is_deepspeeds(both):
    real, _, _, events = both
    assert _steps(events) == _steps(real["events"])
    assert len(_steps(events)) == 2


def test_peaks_are_those_of_the_trace(both):
    real, found, _, _ = both
    # What is left out: scalars, at 512 bytes each.
    for phase in found.phases:
        assert real["phases"][phase.name] - phase.peak_bytes in range(-8 * 512, 16 * 512)
    assert abs(found.steady_bytes - real["steady"]) <= 8 * 512


def test_the_hosts_bytes_are_those_of_the_trace(both):
    real, found, _, _ = both
    if real["host"] is not None:
        assert real["host"] - found.host_bytes in range(10_000)
