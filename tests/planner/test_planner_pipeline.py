"""Short simulations of a pipeline against long ones."""

import random

import pytest

from dsx.planner.step_time import PipelineStep, least_seconds
from dsx.schedules.builders import NAMES, default_chunks, placement_of
from dsx.schedules.program import Program
from dsx.schedules.simulate import Costs, simulate


def costs(stages, wire, spread):
    drawn = random.Random(stages)
    forward, first, second = (tuple(1 + spread * drawn.random() for _ in range(stages)) for _ in range(3))
    return Costs(
        forward_seconds=forward,
        backward_seconds=tuple(a + b for a, b in zip(first, second, strict=True)),
        backward_input_seconds=first,
        backward_weight_seconds=second,
        transfer_seconds=wire,
    )


def chunks_of(name):
    if default_chunks(name) == 1:
        return (1,)
    return (2,) if placement_of(name) == "v" else (2, 4)


@pytest.mark.parametrize("name", NAMES)
def test_as_long_as_the_whole_simulation(name):
    """Equal stages within 0.1 %, stages that differ by up to 30 % within 1 %; busy time exactly."""
    for ranks, count, wire in ((4, 200, 0.0), (8, 130, 0.2), (8, 257, 0.0)):
        for chunks in chunks_of(name):
            for spread, tolerance in ((0.0, 1e-3), (0.3, 1e-2)):
                given = costs(ranks * chunks, wire, spread)
                program = Program(name=name)
                short, full = (
                    PipelineStep(program, ranks, chunks, count).run(given),
                    simulate(program.build(ranks, chunks, count), given),
                )
                where = (ranks, chunks, count, spread)
                assert short.seconds == pytest.approx(full.seconds, rel=tolerance), where
                assert short.busy_seconds == pytest.approx(full.busy_seconds, rel=1e-9), where
                assert least_seconds(program, ranks, count, given) <= full.seconds * (1 + 1e-9), where


def test_is_shorter_than_the_whole():
    pipeline = PipelineStep(Program(name="1f1b"), 64, 1, 512)
    assert max(pipeline.lengths) < 512
    assert {length % 64 for length in pipeline.lengths} == {0}


@pytest.mark.parametrize(("chunks", "name"), [(1, "1f1b"), (2, "interleaved")])
def test_bubble_is_the_papers(chunks, name):
    """(p - 1) / (v m), arXiv:2104.04473, section 2.2, at a size that is not simulated whole."""
    found = PipelineStep(Program(name=name), 16, chunks, 512).run(Costs())
    assert found.bubble == pytest.approx(15 / (chunks * 512), rel=1e-6)
    assert found.left_seconds[0] == pytest.approx(0.0)


def test_bound_is_met_by_equal_stages_without_wires():
    for name, chunks in (("1f1b", 1), ("interleaved", 4)):
        program = Program(name=name)
        whole = Costs(forward_seconds=(1.0,) * 8 * chunks, backward_seconds=(2.0,) * 8 * chunks)
        full = simulate(program.build(8, chunks, 64), whole).seconds
        assert least_seconds(program, 8, 64, whole) == pytest.approx(full)
