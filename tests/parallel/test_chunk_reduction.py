"""Which buckets leave when, over a transport that only notes what it is told."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.parallel.reduction import AT_ONCE, LEAST, PARTS, ChunkReduction
from dsx.schedules.gathers import ChunkHolds, StepTrace
from dsx.schedules.schedule import Action


class Notes:
    """Stands in for a transport: buckets are their pieces."""

    def __init__(self, *, in_place=False, apart=False, alone=False, waits=False):
        self.in_place, self.apart, self.alone, self.waits = in_place, apart, alone, waits
        self.watched, self.lacking_elsewhere = None, set()
        self.flying, self.landed, self.sent, self.most, self.ended = [], [], [], 0, []

    def watch(self, parameters, came):
        assert self.watched is None
        self.watched = set(parameters), came

        def end():
            self.watched = None

        return end

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

    def lacking(self, parameters):
        return {parameter for parameter, marked in parameters.items() if marked} | self.lacking_elsewhere

    def all_left(self):
        self.ended.append("left")

    def complete(self):
        self.ended.append("complete")


def of_actions(*row):
    return SimpleNamespace(rows=[[Action.parse(action) for action in row]])


def reduction(transport, sizes, uses, bucket, kinds=None):
    kinds = dict.fromkeys(sizes) if kinds is None else kinds
    return ChunkReduction(transport, sizes=sizes, uses=uses, kinds=kinds, bucket_elements=bucket, rank=0)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    users=st.lists(st.sets(st.integers(0, 2)), min_size=8, max_size=8),
    bucket=st.integers(0, 12),
    kind=st.sampled_from(["in place", "apart", "neither"]),
    alone=st.booleans(),
    waits=st.booleans(),
    order=st.permutations([0, 1, 2]),
    ops=st.lists(st.sampled_from("BW"), min_size=3, max_size=3),
    come=st.lists(st.permutations(range(8)), min_size=3, max_size=3),
    silent=st.sets(st.integers(0, 7)),
)
def test_every_element_is_reduced_once_in_a_step(
    sizes, users, bucket, kind, alone, waits, order, ops, come, silent
):
    names = {f"p{i}": size for i, size in enumerate(sizes)}
    uses = {stage: [f"p{i}" for i in range(len(sizes)) if stage in users[i]] for stage in range(3)}
    in_place = kind == "in place"
    transport = Notes(in_place=in_place, apart=kind == "apart", alone=alone, waits=waits)
    reduced = reduction(transport, names, uses, bucket)
    step = of_actions(*(f"{stage}{ops[stage]}0" for stage in order))
    for _ in range(2):
        transport.landed.clear()
        reduced.begin(step)
        for position, stage in enumerate(order):
            reduced.before_action(position)
            assert ops[stage] == "B" or transport.watched is None
            for place in come[stage]:
                if transport.watched is not None and place not in silent:
                    parameters, came = transport.watched
                    if f"p{place}" in parameters:
                        came(f"p{place}")
            reduced.chunk_done(stage)
        reduced.finish()
        expected = [(name, at) for name, size in names.items() for at in range(size)]
        if alone and in_place:
            expected = []
        assert sorted(transport.landed) == sorted(expected)
        assert transport.flying == []
    assert transport.ended == ["left", "complete"] * 2
    assert kind == "neither" or transport.most <= AT_ONCE


def test_a_bucket_leaves_in_the_last_backward_as_soon_as_it_and_those_before_it_are_complete():
    transport = Notes(apart=True)
    names = dict.fromkeys("abcd", 4)
    reduced = reduction(transport, names, {0: ["a", "b", "c"], 1: ["d", "a"]}, 4)
    reduced.begin(of_actions("0B0", "1B0", "0B1", "1B1"))
    for position in (0, 1):
        reduced.before_action(position)
        assert transport.watched is None
    reduced.before_action(2)
    parameters, came = transport.watched
    assert parameters == {"b", "c"}, "a belongs to two chunks"
    came("b")
    assert transport.sent == [], "it would overtake c on a rank where c comes first"
    came("c")
    assert transport.sent == [["c"], ["b"]]
    reduced.chunk_done(0)
    reduced.before_action(3)
    transport.watched[1]("d")
    assert transport.sent[2:] == [["d"]]
    assert len(transport.flying) == AT_ONCE
    reduced.chunk_done(1)
    reduced.finish()
    assert transport.sent[3:] == [["a"]]


def test_what_got_no_gradient_in_the_first_step_leaves_last_from_then_on():
    """On this rank or another: all have one order, and what comes need not wait for what does not."""
    transport = Notes(apart=True)
    transport.lacking_elsewhere = {"c"}
    reduced = reduction(transport, dict.fromkeys("abcde", 4), {0: "abcde"}, 4)
    for within, after in (([], "edcba"), ("dba", "ec"), ("dba", "ec")):
        transport.sent.clear()
        reduced.begin(of_actions("0B0"))
        reduced.before_action(0)
        for name in "dcba":
            transport.watched[1](name)
        assert transport.sent == [[name] for name in within]
        reduced.chunk_done(0)
        reduced.finish()
        assert transport.sent == [[name] for name in (*within, *after)]


def test_a_shared_parameter_leaves_after_its_last_chunk_and_an_unused_one_at_the_end():
    transport = Notes(in_place=False)
    reduced = reduction(transport, {"own": 4, "tied": 4, "loss": 1}, {0: ["own", "tied"], 1: ["tied"]}, 100)
    reduced.chunk_done(0)
    assert transport.sent == [["own"]]
    reduced.chunk_done(1)
    assert transport.sent == [["own"], ["tied"]]
    reduced.finish()
    assert transport.sent == [["own"], ["tied"], ["loss"]]


def test_a_large_chunk_leaves_in_many_buckets_but_at_once_where_landing_waits():
    names = dict.fromkeys(range(2 * PARTS), LEAST)
    for waits, expected in ((False, PARTS), (True, 1)):
        transport = Notes(apart=True, waits=waits)
        transport.land = transport.flying.remove  # without a note of each of 268 million elements
        reduced = reduction(transport, names, {0: list(names)}, 1 << 40)
        reduced.chunk_done(0)
        reduced.finish()
        assert len(transport.sent) == expected


def test_a_step_that_was_cut_off_is_forgotten():
    transport = Notes(apart=True, waits=True)
    reduced = reduction(transport, dict.fromkeys("abc", 4), {0: list("abc")}, 4)
    step = of_actions("0B0")
    reduced.begin(step)
    reduced.before_action(0)
    for parameter in "cba":
        transport.watched[1](parameter)
    assert transport.sent == [["c"], ["b"]], "nothing lands within a backward"
    transport.flying.clear()
    transport.sent.clear()
    reduced.begin(step)
    assert transport.watched is None
    reduced.before_action(0)
    reduced.chunk_done(0)
    reduced.finish()
    assert transport.sent == [["c"], ["b"], ["a"]]


def test_in_place_a_bucket_is_cut_to_size_and_the_next_leaves_before_an_action():
    transport = Notes(in_place=True)
    reduced = reduction(transport, {"a": 25, "b": 5}, {0: ["a", "b"]}, 10)
    reduced.chunk_done(0)
    assert transport.sent == [["b", "a"], ["a"]]
    reduced.before_action(7)
    assert transport.sent == [["b", "a"], ["a"], ["a"]]
    assert len(transport.flying) == AT_ONCE


def test_kinds_do_not_share_a_bucket_and_a_rank_alone_sends_each_gradient_by_itself():
    transport = Notes(in_place=False)
    kinds = {"a": "bf16", "b": "fp32", "c": "bf16"}
    reduction(transport, dict.fromkeys("abc", 2), {0: list("abc")}, 100, kinds).chunk_done(0)
    assert transport.sent == [["c", "a"], ["b"]]
    alone = Notes(in_place=False, alone=True)
    reduction(alone, dict.fromkeys("abc", 2), {0: list("abc")}, 100).chunk_done(0)
    assert alone.sent == [["c"], ["b"], ["a"]]


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
