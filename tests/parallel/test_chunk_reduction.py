"""Which buckets leave when, over a transport that only notes what it is told."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.parallel.reduction import AT_ONCE, ChunkReduction
from dsx.schedules.gathers import ChunkHolds, StepTrace


class Notes:
    """Stands in for a transport: buckets are their pieces."""

    def __init__(self, *, in_place, alone=False):
        self.in_place, self.alone = in_place, alone
        self.flying, self.landed, self.sent, self.most, self.ended = [], [], [], 0, []

    def leave(self, parameter):
        assert self.in_place

    def send(self, pieces):
        self.sent.append([piece.parameter for piece in pieces])
        self.flying.append(pieces)
        self.most = max(self.most, len(self.flying))
        return pieces

    def land(self, bucket):
        assert self.flying.pop(0) is bucket, "the oldest lands first"
        self.landed += [(p.parameter, at) for p in bucket for at in range(p.start, p.start + p.length)]

    def all_left(self):
        self.ended.append("left")

    def complete(self):
        self.ended.append("complete")


def reduction(transport, sizes, uses, bucket, kinds=None):
    kinds = dict.fromkeys(sizes) if kinds is None else kinds
    return ChunkReduction(transport, sizes=sizes, uses=uses, kinds=kinds, bucket_elements=bucket)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    users=st.lists(st.sets(st.integers(0, 2)), min_size=8, max_size=8),
    bucket=st.integers(0, 12),
    in_place=st.booleans(),
    order=st.permutations([0, 1, 2]),
)
def test_every_element_is_reduced_once_in_a_step(sizes, users, bucket, in_place, order):
    names = {f"p{i}": size for i, size in enumerate(sizes)}
    uses = {stage: [f"p{i}" for i in range(len(sizes)) if stage in users[i]] for stage in range(3)}
    transport = Notes(in_place=in_place)
    reduced = reduction(transport, names, uses, bucket)
    for _ in range(2):
        transport.landed.clear()
        for stage in order:
            reduced.before_action(stage)
            reduced.chunk_done(stage)
        reduced.finish()
        expected = [(name, at) for name, size in names.items() for at in range(size)]
        assert sorted(transport.landed) == sorted(expected)
        assert transport.flying == []
    assert transport.ended == ["left", "complete"] * 2
    assert not in_place or transport.most <= AT_ONCE


def test_a_shared_parameter_leaves_after_its_last_chunk_and_an_unused_one_at_the_end():
    transport = Notes(in_place=False)
    reduced = reduction(transport, {"own": 4, "tied": 4, "loss": 1}, {0: ["own", "tied"], 1: ["tied"]}, 100)
    reduced.chunk_done(0)
    assert transport.sent == [["own"]]
    reduced.chunk_done(1)
    assert transport.sent == [["own"], ["tied"]]
    reduced.finish()
    assert transport.sent == [["own"], ["tied"], ["loss"]]


def test_in_place_a_bucket_is_cut_to_size_and_the_next_leaves_before_an_action():
    transport = Notes(in_place=True)
    reduced = reduction(transport, {"a": 25, "b": 5}, {0: ["a", "b"]}, 10)
    reduced.chunk_done(0)
    assert transport.sent == [["a"], ["a"]]
    reduced.before_action(7)
    assert transport.sent == [["a"], ["a"], ["a", "b"]]
    assert len(transport.flying) == AT_ONCE


def test_kinds_do_not_share_a_bucket_and_a_rank_alone_sends_each_gradient_by_itself():
    transport = Notes(in_place=False)
    kinds = {"a": "bf16", "b": "fp32", "c": "bf16"}
    reduction(transport, dict.fromkeys("abc", 2), {0: list("abc")}, 100, kinds).chunk_done(0)
    assert transport.sent == [["a", "c"], ["b"]]
    alone = Notes(in_place=False, alone=True)
    reduction(alone, dict.fromkeys("abc", 2), {0: list("abc")}, 100).chunk_done(0)
    assert alone.sent == [["a"], ["b"], ["c"]]


def test_chunks_are_held_and_let_go_of_as_the_plan_changes():
    holds = ChunkHolds(
        {0: ["a", "small", "a"], 1: ["b", "a"]},
        persistent=lambda name: name == "small",
        size_bytes={"a": 8, "b": 4}.__getitem__,
        budget_bytes=0,
    )
    assert holds.parameters == {0: ("a",), 1: ("b", "a")}
    assert holds.stage_bytes == {0: 8, 1: 12}
    assert holds.change(frozenset({0})) == ([], [(0, "a")])
    assert holds.change(frozenset({1})) == ([(0, "a")], [(1, "b"), (1, "a")])
    assert holds.change(frozenset({1})) == ([], [])


def test_distance_counts_the_elements_before_a_parameters_next_use():
    trace = StepTrace([[("a", 5)], [("b", 2), ("c", 1)], [], [("a", 5)]])
    assert trace.distance("a", 0) == 0
    assert trace.distance("a", 1) == 3
    assert trace.distance("b", 0) == 5
    assert trace.distance("b", 2) == float("inf")
    assert trace.distance("nobody's", 0) == float("inf")
