"""A schedule that splits the backward, under every ZeRO stage: equal to the undivided one to the last bit.

Same losses, norms and weights after some steps, and no more communication over the data-parallel ranks.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import ranks
from often import often
from parity.oracle import LLAMA

TIED = LLAMA | {"tie_word_embeddings": True}
STEPS, MICRO_BATCHES, SEQUENCE = 2, 3, 12
REDUCE_ALL = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


@dataclass(frozen=True)
class Case:
    model: dict
    zero: int
    pp: int = 1
    dp: int = 1
    tp: int = 1
    chunks: int = 2
    recompute: str = "none"
    bf16: bool = False
    settings: tuple = ()
    precision: tuple = ()


CASES = {
    "zero0-tied-over-two-ranks": Case(TIED, 0, pp=2, chunks=1),
    "zero0-tied-on-one-rank": Case(TIED, 0, dp=2, recompute="full"),
    "zero1": Case(LLAMA, 1, dp=2),
    "zero1-bf16": Case(LLAMA, 1, dp=2, bf16=True, precision=(("immediate_grad_update", False),)),
    "zero2": Case(TIED, 2, dp=2, recompute="selective"),
    "zero2-overlap": Case(LLAMA, 2, dp=2, settings=(("overlap_comm", True), ("reduce_bucket_size", 2000))),
    "zero2-offload": Case(LLAMA, 2, dp=2, settings=(("offload_optimizer", {"device": "cpu"}),)),
    "zero3": Case(TIED, 3, dp=2, recompute="full", settings=tuple(REDUCE_ALL.items())),
    "zero3-prefetch-bf16": Case(LLAMA, 3, dp=2, bf16=True),
    "zero3-tensor-parallel": Case(LLAMA, 3, tp=2, recompute="full"),
}


def split_backwards(schedule):
    """Each B of a compute row as I, and as W after the next I."""
    from dsx.schedules.schedule import Action, Op

    rows = []
    for row in schedule.rows:
        out, waiting = [], []
        for action in row:
            if action.op is not Op.BACKWARD:
                out.append(action)
                continue
            out.append(Action(action.stage, Op.BACKWARD_INPUT, action.micro_batch))
            out.extend(waiting)
            waiting = [Action(action.stage, Op.BACKWARD_WEIGHT, action.micro_batch)]
        rows.append(tuple(out + waiting))
    return replace(schedule, rows=tuple(rows))


def settings_of(case):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "steps_per_print": 1000,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": case.zero, **dict(case.settings)},
        "bf16": {"enabled": case.bf16, **dict(case.precision)},
        **({"data_types": {"grad_accum_dtype": "fp32"}} if case.bf16 else {}),
    }


def engine_of(case, groups, layers, loss_fn, split):
    from dsx.engine.initialize import initialize
    from dsx.engine.pipeline_module import PipelineModule

    pipeline = PipelineModule(
        layers,
        loss_fn=loss_fn,
        groups=groups,
        num_chunks=case.chunks,
        partition_method="uniform",
        split=split,
    )
    engine = initialize(model=pipeline, config=settings_of(case))[0]
    if split is not None:
        schedule = pipeline.program.build(case.pp, case.chunks, MICRO_BATCHES)
        engine.programs.put(split_backwards(schedule))
    return engine


def count_communications(counts, mp):
    """Count what DeepSpeed asks of its backend, by kind."""
    from deepspeed.comm.torch import TorchBackend

    for name, real in list(vars(TorchBackend).items()):
        if not name.startswith(("all_gather", "all_reduce", "reduce", "broadcast")) or not callable(real):
            continue

        def counted(*args, name=name, real=real, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return real(*args, **kwargs)

        mp.setattr(TorchBackend, name, counted)


def train_family(case, groups, split):
    from dsx.checkpoint.run.export import logical_tensors
    from dsx.models import families
    from dsx.models.hf_config import model_spec

    spec, tp = model_spec(case.model), groups.tensor_parallel
    layers = families.layers(
        spec,
        tp,
        dtype=torch.bfloat16 if case.bf16 else torch.float32,
        seed=3,
        recompute=case.recompute,
        pad_multiple=8,
        split=split,
    )
    engine = engine_of(case, groups, layers, families.loss(spec, tp, overwrite_logits=True), split)
    results, counts = [], {}
    with pytest.MonkeyPatch.context() as mp:
        count_communications(counts, mp)
        for step in range(STEPS):
            g = torch.Generator().manual_seed(100 * step + groups.dp_rank)
            ids = torch.randint(spec.vocab_size, (MICRO_BATCHES, 2, SEQUENCE + 1), generator=g)
            loss = engine.train_batch(iter([(row[:, :-1], row[:, 1:]) for row in ids]))
            results.append((float(loss), engine.get_global_grad_norm()))
    weights = {s.name: w.clone() for s, w in logical_tensors(engine.pipeline)}
    return results, counts, weights


def compare_families(rank, world_size, case):
    from dsx.nn import WeightGradients
    from dsx.parallel.groups import make_groups
    from dsx.parallel.mesh import Mesh

    groups = make_groups(Mesh.of(pp=case.pp, dp=case.dp, tp=case.tp), sequence_parallel=case.tp > 1)
    split = WeightGradients()
    expected, got = train_family(case, groups, None), train_family(case, groups, split)
    assert split.kept_bytes() == 0
    unequal = [name for name, weight in expected[2].items() if not torch.equal(weight, got[2][name])]
    return expected[0], got[0], expected[1], got[1], unequal


@pytest.mark.parametrize("case", often(CASES.values(), 3), ids=CASES)
def test_equal_to_the_undivided_schedule(case):
    for results in ranks.run(compare_families, case.pp * case.dp * case.tp, case):
        expected, got, communications, divided_communications, unequal = results
        assert got == expected
        assert unequal == []
        assert divided_communications == communications


def train_others(rank, world_size, zero, divided):
    """Layers that are not dsx's: their whole backward runs in its first part."""
    from dsx.nn import WeightGradients
    from dsx.parallel.groups import make_groups
    from dsx.parallel.mesh import Mesh

    case = Case({}, zero, dp=world_size)
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    groups = make_groups(Mesh.of(dp=world_size))
    engine = engine_of(case, groups, layers, nn.functional.mse_loss, WeightGradients() if divided else None)
    results = []
    for step in range(3):
        x = torch.randn(MICRO_BATCHES, 2, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        results.append(
            (float(engine.train_batch(iter(zip(x, x.sin(), strict=True)))), engine.get_global_grad_norm())
        )
    return results


def compare_others(rank, world_size):
    return [
        train_others(rank, world_size, zero, False) == train_others(rank, world_size, zero, True)
        for zero in range(4)
    ]


def test_layers_of_others():
    assert ranks.run(compare_others, 2) == [[True] * 4] * 2
