"""A -> B -> C -> A for formats and layouts that hypothesis draws: every state is the same, bit for bit."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import made
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.formats.deepspeed.module import as_model
from dsx.checkpoint.layouts import Pipeline, TargetDegrees
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.read import compare, only_in, verify
from dsx.checkpoint.reshard import WantedTarget, prepare

small = st.integers(1, 3)
halves = st.sampled_from([1, 2])
zeros = st.integers(0, 3)
dsx_layouts = st.builds(
    lambda tp, pp, chunks, dp, zero: WantedTarget(
        degrees=TargetDegrees(tensor=tp, pipeline=pp, chunks=chunks, data=dp, zero=zero)
    ),
    *(halves, small, halves, small, zeros),
)
engines = st.builds(
    lambda tp, dp, zero: WantedTarget(
        format="deepspeed", degrees=TargetDegrees(tensor=tp, data=dp, zero=zero)
    ),
    *(halves, small, zeros),
)
pipelines = st.builds(
    lambda tp, pp, dp, method: WantedTarget(
        format="deepspeed",
        degrees=TargetDegrees(tensor=tp, pipeline=pp, data=dp, zero=1),
        pipeline=Pipeline(partition=method),
    ),
    *(halves, small, small, st.sampled_from(["uniform", "parameters"])),
)
others = st.builds(
    lambda style, data, zero: WantedTarget(
        format=style, degrees=TargetDegrees(data=data, zero=None if style == "dcp" else zero)
    ),
    *(st.sampled_from(["universal", "dcp"]), small, st.integers(1, 3)),
)
hops = st.lists(st.one_of(dsx_layouts, engines, pipelines, others), min_size=1, max_size=3)


@pytest.fixture(scope="module", params=[("gpt2", "bf16", 1), ("llama", "fp32", 8)], ids=str)
def first(request, tmp_path_factory):
    """A checkpoint of a run: weights that are their masters, rounded, and moments; its tensors."""
    family, precision, multiple = request.param
    specs, folder = made.layout(family, multiple=multiple).params, tmp_path_factory.mktemp("first")
    chance = np.random.default_rng(4)
    bits = {
        (spec.name, state): chance.normal(size=spec.shape).astype("<f4").view("<u4")
        for spec in specs
        for state in made.FP32
    }
    names = [spec.name for spec in specs]
    vectors = [spec.name for spec in specs if len(spec.shape) == 1]
    facts = {
        "step": 9,
        "param_groups": [
            {"names": [name for name in names if name not in vectors], "step": 9, "lr": 0.5},
            {"names": vectors, "step": 9, "lr": 0.25},
        ],
    }
    source = made.plain(folder / "plain", specs, made.FP32, bits=bits, facts=facts)
    prepare(source, folder / "a", WantedTarget(precision=precision)).run(ConversionOptions(workers=1))
    return open_checkpoint(folder / "a"), specs


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(way=hops, back=dsx_layouts)
@example(
    way=[
        WantedTarget(format="deepspeed", degrees=TargetDegrees(pipeline=2, zero=1)),
        WantedTarget(format="deepspeed", degrees=TargetDegrees(data=2, zero=2)),
    ],
    back=WantedTarget(degrees=TargetDegrees(tensor=2, zero=3)),
)
def test_there_and_back_by_any_way(first, way, back):
    start, specs = first
    catalog = start
    with tempfile.TemporaryDirectory() as folder:
        for number, wanted in enumerate([*way, back]):
            target = Path(folder, str(number))
            asked = replace(wanted, precision=start.facts["precision"])
            prepare(catalog, target, asked).run(ConversionOptions(workers=1))
            catalog = open_checkpoint(target)
            assert not list(verify(catalog))
            catalog = as_model(catalog, specs)
        assert all(one.equal for one in compare(start, catalog))
        assert not only_in(start, catalog)
        assert {one for one in only_in(catalog, start) if one[1] != "master"} == set()
        assert catalog.facts["step"] == 9
        rates = {name: g["lr"] for g in catalog.facts["param_groups"] for name in g["names"]}
        assert rates == {spec.name: 0.25 if len(spec.shape) == 1 else 0.5 for spec in specs}
