"""The table of what cannot be, against what refuses the same by itself: builders, parameters, meshes."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from dsx.checkpoint.claims import model_of
from dsx.errors import LayoutError, ScheduleError
from dsx.models.params import param_specs
from dsx.models.presets import presets
from dsx.models.spec import ModelSpec
from dsx.parallel.limits import LayoutRequest, possible, violations
from dsx.parallel.mesh import Mesh
from dsx.schedules.builders import NAMES, build

MODELS = [each for each in presets() if each.name in ("tiny", "gpt2-xl", "qwen2.5-0.5b")]


def refused(**asked) -> set[str]:
    return {each.key for each in violations(LayoutRequest(**asked))}


@pytest.mark.parametrize("name", NAMES)
def test_chunks_without_objection_can_be_built(name):
    for ranks, chunks in product(range(1, 4), range(1, 5)):
        try:
            build(name, ranks, chunks, 6)
        except ScheduleError:
            assert ranks == 1 or refused(schedule=name, pipeline=ranks, chunks=chunks) == {"chunks"}


@pytest.mark.parametrize("preset", MODELS, ids=lambda preset: f"{preset.family} {preset.name}")
def test_tensor_degrees_without_objection_cut_every_parameter(preset):
    model = model_of(preset.config)
    queries, heads = (
        (model.num_heads, model.num_kv_heads) if isinstance(model, ModelSpec) else model.heads or (0, 0)
    )
    degrees = possible(LayoutRequest(model=model), "tensor", range(1, queries + 1))
    for tensor in degrees:
        for spec in param_specs(model.for_tensor(tensor)):
            if spec.split is not None and spec.pad_multiple is None:
                assert tensor * prod(spec.local_shape(Mesh.of(tp=tensor).at())) == spec.numel
    assert degrees == [n for n in degrees if heads % n == 0 or n % heads == 0]


def test_degrees_without_objection_make_a_mesh():
    for ranks, tensor, pipeline in product(range(1, 25), range(1, 5), range(1, 9)):
        asked = {"ranks": ranks, "tensor": tensor, "pipeline": pipeline}
        if not refused(**asked):
            assert Mesh.over(ranks, pp=pipeline, tp=tensor).size == ranks
            continue
        with pytest.raises(LayoutError):
            Mesh.over(ranks, pp=pipeline, tp=tensor)


def test_what_is_not_known_is_not_judged():
    assert not list(violations(LayoutRequest()))
    assert not refused(tensor=3, pipeline=7, chunks=5, zero_stage=1)
    assert refused(ranks=8, tensor=3) == {"tensor"}


def test_the_fix_lists_what_could_be():
    (found,) = violations(LayoutRequest(ranks=12, tensor=2, pipeline=4))
    assert (found.key, found.value) == ("pipeline", 4)
    assert "use 1, 2, 3 or 6" in found.fix
    assert possible(LayoutRequest(ranks=12, tensor=2), "pipeline", range(1, 13)) == [1, 2, 3, 6]
    (found,) = violations(LayoutRequest(layers=9, pipeline=2, chunks=5))
    assert "use at most 4" in found.fix


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ({"reduce": "micro_batch", "zero_stage": 3}, "reduce"),
        ({"keep_gathered_bytes": 1, "zero_stage": 2}, "keep_gathered_bytes"),
        ({"global_batch": 24, "data": 4, "micro_batch": 4}, "micro_batch"),
    ],
)
def test_combinations(asked, key):
    assert refused(**asked) == {key}
