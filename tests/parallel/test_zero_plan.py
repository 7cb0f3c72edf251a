"""ZeRO's partitions against what real DeepSpeed engines keep, element for element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ranks
from dsx.errors import LayoutError
from dsx.parallel.zero import Buffer, ZeroPiece, ZeroPlan

SHAPES = {"a": (5, 3), "b": (7,), "c": (1,), "d": (4, 6), "e": (13,), "f": (2,)}
SPLIT = 4  # the first four parameters are one optimizer group, the others a second one
NUMELS = [(name, torch.Size(shape).numel()) for name, shape in SHAPES.items()]
GROUPS = (tuple(NUMELS[:SPLIT]), tuple(NUMELS[SPLIT:]))


class _Module(nn.Module):
    """Parameter i holds 1000 (i + 1) + 0, 1, 2 ...: every element says which one it is."""

    def __init__(self) -> None:
        super().__init__()
        for index, (name, shape) in enumerate(SHAPES.items()):
            numel = torch.Size(shape).numel()
            values = 1000.0 * (index + 1) + torch.arange(numel, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(values.view(shape)))

    def forward(self, x):
        return x * sum(p.sum() for p in self.parameters())


def _flat_buffers(rank: int, world_size: int, cases: list[tuple[dict, dict]]) -> list[list[list[float]]]:
    """For each case, the fp32 flat buffers that this rank's engine keeps."""
    import deepspeed

    kept = []
    for zero, extra in cases:
        module = _Module()
        parameters = list(module.parameters())
        groups = [{"params": parameters[:SPLIT]}, {"params": parameters[SPLIT:], "weight_decay": 0.0}]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": zero,
            **extra,
        }
        engine, optimizer, _, _ = deepspeed.initialize(model=module, model_parameters=groups, config=config)
        buffers = next(
            getattr(optimizer, name)
            for name in (
                "single_partition_of_fp32_groups",
                "fp32_partitioned_groups_flat",
                "fp32_groups_flat_partition",
            )
            if hasattr(optimizer, name)
        )
        kept.append([buffer.detach().tolist() for buffer in buffers])
        engine.destroy()
    return kept


# zero_optimization, the rest of the config, and our plan for it
CASES = [
    ({"stage": 1}, {}, {"stage": 1}),
    ({"stage": 2}, {}, {"stage": 2}),
    ({"stage": 2, "round_robin_gradients": True}, {}, {"stage": 2, "round_robin": True}),
    ({"stage": 1, "parameter_alignment": True}, {}, {"stage": 1, "alignment": 4}),
    ({"stage": 3}, {}, {"stage": 3}),
    ({"stage": 3, "sub_group_size": 8}, {}, {"stage": 3, "sub_group_size": 8}),
    # BF16_Optimizer: ZeRO-1 with bf16 weights and fp32 accumulation
    ({"stage": 1}, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, {"stage": 1}),
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_deepspeed_keeps_exactly_what_the_plan_says(world_size):
    by_rank = ranks.run(_flat_buffers, world_size, [(zero, extra) for zero, extra, _ in CASES])
    values = {name: p.detach().flatten() for name, p in _Module().named_parameters()}
    for case, (_, extra, fields) in enumerate(CASES):
        plan = ZeroPlan(dp=world_size, groups=GROUPS, **fields)
        for rank in range(world_size):
            theirs, ours = by_rank[rank][case], plan.buffers(rank)
            assert [len(buffer) for buffer in theirs] == [buffer.numel for buffer in ours]
            for flat, buffer in zip(theirs, ours, strict=True):
                for piece in buffer.pieces:
                    expected = values[piece.name][piece.start : piece.stop]
                    if extra:
                        expected = expected.bfloat16().float()
                    assert flat[piece.offset : piece.offset + len(expected)] == expected.tolist()


@st.composite
def plans(draw):
    numels = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    cut = draw(st.integers(0, len(numels)))
    items = [(str(i), n) for i, n in enumerate(numels)]
    return ZeroPlan(
        stage=draw(st.integers(0, 3)),
        dp=draw(st.integers(1, 7)),
        groups=tuple(tuple(group) for group in (items[:cut], items[cut:]) if group),
        sub_group_size=draw(st.integers(0, 60)),
        alignment=draw(st.sampled_from([1, 4, 8])),
        round_robin=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(plans())
def test_ranks_cover_every_element_once(plan):
    numels = dict(item for group in plan.groups for item in group)
    for name, numel in numels.items():
        spans = sorted(plan.state(rank)[name] for rank in range(plan.dp))
        if plan.stage == 0:
            assert spans == [(0, numel)] * plan.dp
            continue
        held = [span for span in spans if span != (0, 0)]
        assert [start for start, _ in held] == [0, *(stop for _, stop in held[:-1])]
        assert held[-1][1] == numel
        owned = [(rank, *plan.state(rank)[name]) for rank in range(plan.dp)]
        assert plan.owners()[name] == [interval for interval in owned if interval[1] < interval[2]]
    for rank in range(plan.dp):
        for buffer in plan.buffers(rank):
            end = 0
            for piece in buffer.pieces:
                assert piece.offset >= end
                end = piece.offset + piece.stop - piece.start
            assert end <= buffer.numel
        expected = plan.state(rank) if plan.stage == 3 else {name: (0, n) for name, n in numels.items()}
        assert plan.weights(rank) == expected


def test_stage_1_by_hand():
    """10 + 3 elements on two ranks: padded to 16, eight each."""
    plan = ZeroPlan(stage=1, dp=2, groups=((("a", 10), ("b", 3)),))
    assert plan.buffers(0) == (Buffer(0, 8, (ZeroPiece("a", 0, 8, 0),)),)
    assert plan.buffers(1) == (Buffer(0, 8, (ZeroPiece("a", 8, 10, 0), ZeroPiece("b", 0, 3, 2))),)


def test_wrong_plans_are_refused():
    with pytest.raises(LayoutError, match="ZeRO stage 4"):
        ZeroPlan(stage=4, dp=1, groups=())
    with pytest.raises(LayoutError, match="degree 0"):
        ZeroPlan(stage=1, dp=0, groups=())
    with pytest.raises(LayoutError, match=r"\['a'\]"):
        ZeroPlan(stage=1, dp=1, groups=((("a", 1),), (("a", 1),)))
    with pytest.raises(LayoutError, match="dp rank 2"):
        ZeroPlan(stage=1, dp=2, groups=()).buffers(2)
