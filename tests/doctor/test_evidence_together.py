"""Keys that do not go together: what DeepSpeed's own validation says of them, beside the doctor."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest

from dsx.config.refusals import refused
from dsx.doctor import examine
from dsx.doctor.examine import advice

WORLD = 8
# Values of AutoEP's keys and of those that they depend on; the first is the default.
EXPERTS = {
    "autoep_size": (1, 2),
    "expert_tensor_parallel_size": (1, 2),
    "comm_backend": ("comm", "deepep"),
    "comm_max_tokens_per_rank": (0, 64),
    "gate_up_impl": ("separate", "fused"),
    "use_grouped_mm": (True, False),
    "row_weighting_impl": ("auto", "fused"),
    "combine_impl": ("auto", "fused_weighted_sum"),
    "async_split_plan": (False, True),
    "num_expert_groups": (None, 2),
    "num_limited_groups": (None, 1, 4),
}
DEGREES = ((1, 1), (2, 1), (1, 2), (2, 2))


def config(experts, tensor=1, sequence=1):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": tensor},
        "sequence_parallel_size": sequence,
        "expert_parallel": {"enabled": True, **experts},
    }


def combinations():
    """Each pair of other values than the default, and a hundred of several."""
    others = [(key, value) for key, values in EXPERTS.items() for value in values[1:]]
    for pair in itertools.combinations(others, 2):
        if pair[0][0] != pair[1][0]:
            yield dict(pair)
    rng = random.Random(0)
    for _ in range(120):
        yield {key: rng.choice(values) for key, values in EXPERTS.items()}


def test_experts():
    """The doctor has an error for those that DeepSpeed refuses, and for no others."""
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config, validate_autoep_config

    refused = {True: 0, False: 0}
    for i, values in enumerate(combinations()):
        tensor, sequence = DEGREES[i % len(DEGREES)]
        experts = {key: value for key, value in values.items() if value is not None}
        try:
            validate_autoep_config(
                parse_autoep_config({"enabled": True, **experts}), WORLD, 1, tensor, sequence
            )
            theirs = False
        except ValueError:
            theirs = True
        report = examine(
            config(experts, tensor, sequence), world_size=WORLD, runner="deepspeed", version=(0, 19, 8)
        )
        assert bool(report.errors) == theirs, (experts, tensor, sequence)
        refused[theirs] += 1
    assert min(refused.values()) > 20


@pytest.mark.parametrize(
    ("compile_block", "offload"),
    [
        ({"offload_opt_states": True}, "cpu"),
        ({"offload_activation": True, "offload_parameters": True}, "none"),
        ({"offload_activation": True, "offload_opt_states": True}, "none"),
    ],
    ids=str,
)
def test_deepcompile_at_zero3(compile_block, offload):
    """What engine.compile() refuses before it touches the engine."""
    from deepspeed.compile.config import CompileConfig
    from deepspeed.compile.init_z3 import init_z3

    engine = SimpleNamespace(zero_use_cpu_optimizer=lambda: offload != "none")
    with pytest.raises(ValueError, match=r"compile\.offload"):
        init_z3(engine, "inductor", CompileConfig(deepcompile=True, **compile_block), {})
    zero = {"stage": 3, "offload_optimizer": {"device": offload}}
    right = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "compile": {"deepcompile": True}}
    wrong = right | {"compile": {"deepcompile": True, **compile_block}}
    assert not examine(right).errors
    assert {finding.check for finding in examine(wrong).errors} == {"conflict"}


def test_every_conflict_names_a_file_of_deepspeed():
    from pathlib import Path

    import deepspeed

    root = Path(deepspeed.__file__).parent
    rules = [rule for rule in (*refused(), *advice()) if rule.where]
    assert {rule.check for rule in refused() if not rule.where} >= {"nvme-path"}
    for conflict in rules:
        path, _, function = conflict.where.partition(": ")
        assert (root / path).exists(), conflict.where
        assert not function or f"def {function}(" in (root / path).read_text()
