"""Records of layers that loop over a sequence: equal rounds are counted, and short records give long ones.

A mixer without a kernel of its own goes through its sequence in a loop of Python's, as transformers' delta
rule does in chunks of 64 tokens, and its record has as many events as the loop has rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm, prod
from typing import Any

from dsx.memory.layer_record import LABELLED, MEMORY, Event, LayerRecord

_ROUNDS = 4  # of equal stretches: fewer come by chance, and would not be there at another length


def fitted(records: Sequence[LayerRecord], lengths: Sequence[int], length: int) -> LayerRecord | None:
    """The record of a long sequence by folded ones of short ones, with polynomials of the length for numbers.

    These go through all records but the last; None if they do not give that.
    """
    *points, last = lengths
    found = []
    for at in (last, length):  # by Lagrange's polynomials
        weights = [prod(Fraction(at - each, one - each) for each in points if each != one) for one in points]
        common = lcm(*(weight.denominator for weight in weights))
        found.append(LayerRecord.between(records[:-1], ([int(each * common) for each in weights], common)))
    return found[1] if found[0] == records[-1] else None


def folded(record: LayerRecord) -> LayerRecord:
    """The record with equal rounds of loops counted, but for the first and the last, which stay as they are.

    From one round to the next there are more or fewer bytes by the same number wherever one looks. So no
    round between has more than both of these, and a ledger finds the same peak.
    Raises ValueError for a loop of which that is not known.
    """
    lists = [record.forward, record.backward, record.backward_input or ()]
    lists.append(tuple(event for use in record.weights for event in (*use.begin, *use.finish)))
    storages = _Storages(lists, record.output_ids)
    forward, backward, second, _ = map(tuple, map(storages.folded, storages.parts))
    first = None if record.backward_input is None else second
    return replace(record, forward=forward, backward=backward, backward_input=first)


class _Storages:
    """All events of a record, where among them storages begin and end, and which loops there are."""

    def __init__(self, lists: Sequence[Sequence[Event]], others: Iterable[Any]) -> None:
        # Places of the lists of events.
        self.parts = [range(*ends) for ends in pairwise(accumulate(map(len, lists), initial=0))]
        self._events = [event for part in lists for event in part]
        self._born, self._ends = dict[Any, int](), dict[Any, list[int]]()
        others = set(others)  # what a layer's caller may hold, or what comes again
        for at, event in enumerate(self._events):
            match event:
                case ("+" | "sum", key, *_):
                    others |= {key} & self._born.keys()
                    self._born[key] = at
                case ("-", key):
                    self._ends.setdefault(key, []).append(at)
                case ("in", keys):
                    others.update(keys)
                case ("grad", _, key):
                    others.add(key)
                case ("release", _, _, kept):
                    others.update(key for _, key in kept)
        own = self._born.keys() - others
        tokens = [self._token(at, event, own) for at, event in enumerate(self._events)]
        self._loops = sorted(loop for part in self.parts for loop in _loops(tokens, part))
        self._between = {  # events of counted rounds: their loop, and their place in a round
            at: (start, (at - start) % period)
            for start, period, rounds in self._loops
            for at in range(start + period, start + period * (rounds - 1))
        }
        self._first = {self._group(key): key for key in reversed(self._born)}

    def _token(self, at: int, event: Event, own: set[Any]) -> Hashable:
        """What equal events of two rounds have in common; of an event that no loop may have, its place."""
        if event[0] not in MEMORY:
            return at if event[0] in ("begin", "wait") else event
        if event[0] in ("+", "-", "sum") and own.issuperset((event[1], *event[4:])):
            return event[0], *self._events[self._born[event[1]]][2:4]
        return at

    def _group(self, key: Any) -> Hashable:
        """What storages have in common that begin and end in counted rounds; others stand for themselves."""
        found = tuple(map(self._between.get, (self._born[key], *self._ends.get(key, ()))))
        return key if None in found or len(found) == 1 else found

    def folded(self, part: range) -> Iterator[Event]:
        done = part.start
        for start, period, rounds in self._loops:
            if start in part:
                first, last = start + period, start + period * (rounds - 1)
                yield from (*self._events[done:first], *self._counted(start, range(first, last), rounds - 2))
                done = last
        yield from self._events[done : part.stop]

    def _counted(self, start: int, places: range, rounds: int) -> Iterator[Event]:
        """What some rounds of a loop do together: what goes, what comes and stays, and what they compute."""
        events = self._events[places.start : places.stop]
        times: Counter[tuple[bool, Hashable]] = Counter()
        for event in (event for event in events if event[0] in MEMORY):
            if event[0] == "sum" and not any(at in places for at in self._ends.get(event[4], ())):
                raise ValueError("a sum takes the place of a storage that a loop does not let go of")
            group = self._group(event[1])
            if not isinstance(group, tuple) or any(place[0] != start for place in group):
                times[event[0] in LABELLED, group] += 1
        for (comes, group), count in sorted(times.items(), key=lambda each: each[0][0]):
            _, *what = self._events[self._born[self._first[group]]][:4]
            new = ("many", *what, count) if isinstance(group, tuple) else ("+", *what)
            yield new if comes else ("-", what[0])
        yield from ((rounds, *event) for event in events[: len(places) // rounds] if event[0] not in MEMORY)


def _loops(tokens: Sequence[Hashable], part: range) -> Iterator[tuple[int, int, int]]:
    """Where loops of a part start, events of a round and rounds; of those that overlap the longest."""
    before: dict[Hashable, int] = {}
    periods: Counter[int] = Counter()
    for at in part:
        periods[at - before.get(tokens[at], at)] += 1
        before[tokens[at]] = at
    found = []
    for period in (each for each, times in periods.items() if 0 < each <= times):
        start = part.start
        for at in range(start, part.stop - period + 1):
            if at + period == part.stop or tokens[at] != tokens[at + period]:
                found.append((start, period, (at - start) // period + 1))
                start = at + 1
    taken: list[range] = []
    for start, period, rounds in sorted(found, key=lambda loop: (-loop[1] * loop[2], loop[1], loop[0])):
        places = range(start, start + period * rounds)
        apart = (places.stop <= other.start or places.start >= other.stop for other in taken)
        if rounds >= _ROUNDS and all(apart):
            taken.append(places)
            yield start, period, rounds
