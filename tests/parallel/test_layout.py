"""Layouts against what dsx engines over DeepSpeed hold, and the laws that holdings obey."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import made
import ranks
from dsx.checkpoint.claims import model_of
from dsx.errors import LayoutError
from dsx.models.params import layer_kinds, param_specs
from dsx.parallel.layout import Layout
from dsx.parallel.mesh import Mesh
from dsx.parallel.partition import partition

CONFIGS = {family: made.CONFIGS[family] for family in ("qwen2", "llama")}


def _layout(family: str, mesh: Mesh, chunks: int, zero_stage: int) -> Layout:
    model = model_of(CONFIGS[family])
    names = layer_kinds(model)
    stages = partition("uniform", mesh.pp * chunks, mesh.pp, parameters=[0] * len(names), names=names)
    return Layout(mesh=mesh, stages=stages, params=param_specs(model, pad_multiple=4), zero_stage=zero_stage)


def _engine_state(rank: int, world_size: int, family: str, layout: Layout) -> dict[str, list]:
    """Shapes of this rank's parameters by name, and its fp32 flat buffers with the weights they came from."""
    import torch

    import dsx
    from dsx.models import families
    from dsx.parallel.groups import make_groups

    model = model_of(CONFIGS[family])
    groups = make_groups(layout.mesh)
    tp = groups.tensor_parallel
    layers = families.layers(model, tp, dtype=torch.float32, pad_multiple=4)
    module = dsx.PipelineModule(
        layers=layers, loss_fn=families.loss(model, tp), groups=groups, stage_map=layout.stages,
        schedule="interleaved" if layout.stages.num_chunks > 1 else "1f1b",
    )  # fmt: skip
    weights = {p.dsx_spec.name: p.detach().clone() for p in module.chunks.parameters()}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": layout.zero_stage},
    }
    engine, *_ = dsx.initialize(model=module, config=config)
    optimizer = engine.optimizer
    name = "fp32_partitioned_groups_flat" if layout.zero_stage == 3 else "single_partition_of_fp32_groups"
    return {
        "weights": {name: (tuple(w.shape), w.flatten().tolist()) for name, w in weights.items()},
        "buffers": [buffer.detach().tolist() for buffer in getattr(optimizer, name)],
    }


@pytest.mark.parametrize(
    ("family", "degrees", "chunks", "zero_stage"),
    [("qwen2", (2, 1, 2), 2, 1), ("qwen2", (2, 2, 1), 1, 3), ("llama", (2, 2, 1), 2, 2)],
)
def test_engines_hold_what_the_layout_says(family, degrees, chunks, zero_stage):
    pp, dp, tp = degrees
    layout = _layout(family, Mesh.of(pp=pp, dp=dp, tp=tp), chunks, zero_stage)
    for rank, held in enumerate(ranks.run(_engine_state, layout.mesh.size, family, layout)):
        at = layout.mesh.coords(rank)
        shapes = {name: shape for name, (shape, _) in held["weights"].items()}
        here = layout.mesh.at(rank)
        assert {h.spec.name: h.spec.local_shape(here) for h in layout.holdings(rank)} == shapes
        buffers = layout.zero_plan(at["pp"]).buffers(at["dp"])
        assert [len(flat) for flat in held["buffers"]] == [buffer.numel for buffer in buffers]
        for flat, buffer in zip(held["buffers"], buffers, strict=True):
            for piece in buffer.pieces:
                weight = held["weights"][piece.name][1][piece.start : piece.stop]
                assert flat[piece.offset : piece.offset + len(weight)] == weight


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from(sorted(CONFIGS)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2])),
    st.integers(1, 2),
    st.integers(0, 3),
)
def test_holdings_cover_every_element_of_the_model(family, degrees, chunks, zero_stage):
    pp, dp, tp = degrees
    layout = _layout(family, Mesh.of(pp=pp, dp=dp, tp=tp), chunks, zero_stage)
    covered = {spec.name: 0 for spec in layout.params}
    state = {spec.name: 0 for spec in layout.params}
    for rank in range(layout.mesh.size):
        at = layout.mesh.coords(rank)
        for holding in layout.holdings(rank):
            spec = holding.spec
            if at["pp"] != layout.owners(spec)[0] or (spec.split is None and at["tp"] > 0):
                continue  # a replica
            state[spec.name] += holding.state[1] - holding.state[0]
            if at["dp"] == 0:
                boxes = spec.boxes(layout.mesh.at(rank))
                covered[spec.name] += sum(math.prod(hi - lo for lo, hi in box) for box in boxes)
    for spec in layout.params:
        assert covered[spec.name] == spec.numel
        local = math.prod(spec.local_shape(layout.mesh.at())) * (1 if spec.split is None else tp)
        assert state[spec.name] == local * (dp if zero_stage == 0 else 1)


def test_a_tied_weight_has_two_owners_and_its_own_group():
    layout = _layout("qwen2", Mesh.of(pp=2, dp=2), 1, 1)
    tied = layout.params[0]
    assert layout.owners(tied) == (0, 1)
    for pp_rank in (0, 1):
        assert layout.zero_plan(pp_rank).groups[-1] == ((tied.name, 40 * 12),)
    # Alike on both ranks, so that the copies stay equal under any ZeRO stage.
    assert layout.zero_plan(0).state(1)[tied.name] == layout.zero_plan(1).state(1)[tied.name]
    assert _layout("qwen2", Mesh.of(pp=1, dp=2), 1, 1).owners(tied) == (0,)


def test_layouts_that_cannot_be_are_refused():
    layout = _layout("llama", Mesh.of(pp=2), 1, 0)
    with pytest.raises(LayoutError, match="pp = 3"):
        Layout(mesh=Mesh.of(pp=3), stages=layout.stages, params=layout.params)
    with pytest.raises(LayoutError, match="does not divide by tp = 3"):
        Layout(mesh=Mesh.of(pp=2, tp=3), stages=layout.stages, params=layout.params)
    with pytest.raises(LayoutError, match="layer 5"):
        Layout(mesh=Mesh.of(pp=2), stages=type(layout.stages)((0, 2, 5), 2), params=layout.params)
    with pytest.raises(LayoutError, match="ZeRO stage 7"):
        Layout(mesh=Mesh.of(pp=2), stages=layout.stages, params=layout.params, zero_stage=7).holdings(0)
