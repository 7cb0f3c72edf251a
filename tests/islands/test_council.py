"""The council's rules, message by message, and islands that lose messages, links and lives at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from dsx.islands.council import Council
from often import often

PATIENCE = 8.0


def ready(
    island: int, *, name: str = "", progress: int = 0, layout: str = "same", **more: Any
) -> dict[str, Any]:
    return {
        "kind": "ready", "island": island, "layout": layout, "name": name, "progress": progress,
        "version": progress, "addresses": [f"host{island}:1"], "samples": 10 * island, "seen": {},
        "moved": True, "facts": {"step": progress, "lr_scheduler": None}, **more,
    }  # fmt: skip


def hello(island: int, **more: Any) -> dict[str, Any]:
    return {**ready(island, **more), "kind": "hello"}


def done(
    attempt: str, *, well: bool = True, missed: tuple[int, ...] = (), progress: int = 2
) -> dict[str, Any]:
    return {
        "kind": "done", "attempt": attempt, "well": well, "missed": [*missed], "progress": progress,
        "version": 1,
    }  # fmt: skip


def kinds(said: list[Any]) -> list[tuple[int, str]]:
    return [(island, message["kind"]) for island, message in said]


def begun(council: Council, islands: list[int], now: float = 0.0, **more: Any) -> dict[str, Any]:
    """The decision of a round that these islands are ready for."""
    said: list[Any] = []
    for island in islands:
        said = council.hear(island, ready(island, **more), now)
    assert kinds(said) == [(island, "round") for island in islands]
    return said[0][1]


def test_a_round_begins_with_the_last_and_counts_when_all_have_come_through() -> None:
    council = Council(3, PATIENCE)
    assert council.hear(2, ready(2), 0.0) == council.hear(0, ready(0), 1.0) == []
    said = council.hear(1, ready(1), 2.0)
    assert kinds(said) == [(0, "round"), (1, "round"), (2, "round")]
    decision = said[0][1]
    assert all(message == decision for _, message in said)
    assert (decision["members"], decision["moved"], decision["takes_from"]) == ([0, 1, 2], [0, 1, 2], {})
    assert decision["seen"] == {"0": 0, "1": 10, "2": 20}
    attempt = decision["attempt"]
    assert council.hear(0, done(attempt), 3.0) == council.hear(2, done(attempt), 3.0) == []
    verdicts = council.hear(1, done(attempt), 4.0)
    assert sorted(kinds(verdicts)) == [(0, "counts"), (1, "counts"), (2, "counts")]
    assert len({message["name"] for _, message in verdicts}) == 1


def test_late_ones_are_called_once_and_then_left_out() -> None:
    council = Council(3, PATIENCE)
    begin = begun(council, [0, 1, 2])
    for island in range(3):
        council.hear(island, done(begin["attempt"]), 1.0)
    assert council.hear(0, ready(0), 10.0) == council.hear(1, ready(1), 11.0) == []
    assert council.tick(13.9) == []
    assert kinds(council.tick(14.0)) == [(2, "call")]
    assert council.tick(15.0) == []
    assert kinds(council.tick(18.0)) == [(0, "round"), (1, "round")]


def test_nobody_waits_for_who_was_silent_until_it_speaks() -> None:
    council = Council(2, PATIENCE)
    begin = begun(council, [0, 1])
    council.hear(0, done(begin["attempt"]), 0.0)
    council.hear(1, done(begin["attempt"]), 0.0)
    council.hear(0, ready(0), 1.0)
    alone = council.tick(9.0)
    assert kinds(alone) == [(0, "round")]
    council.hear(0, done(alone[0][1]["attempt"]), 9.0)
    again = council.hear(0, ready(0), 10.0)
    assert kinds(again) == [(0, "round")]  # at once
    council.hear(0, done(again[0][1]["attempt"]), 10.0)
    assert council.hear(1, ready(1), 11.0) == []
    assert kinds(council.hear(0, ready(0), 12.0)) == [(0, "round"), (1, "round")]


def test_at_the_start_all_islands_are_waited_for_then_those_that_are_there() -> None:
    council = Council(4, PATIENCE)
    council.hear(0, ready(0), 0.0)
    council.hear(1, ready(1), 0.0)
    first = council.tick(PATIENCE)
    assert kinds(first) == [(0, "round"), (1, "round")]
    for island in (0, 1):
        council.hear(island, done(first[0][1]["attempt"]), 9.0)
    council.hear(0, ready(0), 10.0)
    assert kinds(council.hear(1, ready(1), 10.0)) == [(0, "round"), (1, "round")]


def test_who_loses_its_connection_is_waited_for_no_more() -> None:
    council = Council(3, PATIENCE)
    council.hear(2, hello(2), 0.0)
    begin = begun(council, [0, 1, 2])
    for island in range(3):
        council.hear(island, done(begin["attempt"]), 0.0)
    council.hear(0, ready(0), 1.0)
    council.hear(1, ready(1), 1.0)
    assert kinds(council.lose(2, 1.5)) == [(0, "round"), (1, "round")]


def test_a_member_that_is_lost_in_a_round_is_one_that_the_others_try_again_without() -> None:
    council = Council(3, PATIENCE)
    attempt = begun(council, [0, 1, 2])["attempt"]
    council.hear(0, done(attempt, well=False, missed=(2,)), 1.0)
    assert council.lose(2, 1.0) == []
    assert kinds(council.hear(1, done(attempt, well=False, missed=(2,)), 2.0)) == [(0, "again"), (1, "again")]
    council.hear(0, ready(0), 3.0)
    assert kinds(council.hear(1, ready(1), 3.0)) == [(0, "round"), (1, "round")]


@pytest.mark.parametrize("message", [hello(2), ready(2)], ids=["hello", "ready"])
def test_a_member_that_begins_anew_says_nothing_more_of_the_round(message: dict[str, Any]) -> None:
    council = Council(3, PATIENCE)
    attempt = begun(council, [0, 1, 2])["attempt"]
    council.lose(2, 0.5)
    council.hear(2, message, 1.0)
    council.hear(0, done(attempt, well=False, missed=(2,)), 1.0)
    said = council.hear(1, done(attempt, well=False, missed=(2,)), 1.0)
    assert kinds(said)[-2:] == [(0, "again"), (1, "again")]


def test_a_member_that_is_frozen_in_a_round_ends_it_and_is_answered_when_it_thaws() -> None:
    council = Council(2, PATIENCE)
    attempt = begun(council, [0, 1])["attempt"]
    council.hear(1, {"kind": "busy", "attempt": attempt}, 4.0)
    assert council.hear(0, done(attempt, well=False, missed=(1,)), 5.0) == []
    assert council.tick(12.9) == []
    assert kinds(council.tick(13.0)) == [(0, "again")]
    assert kinds(council.hear(0, ready(0), 13.0)) == [(0, "round")]
    assert kinds(council.hear(1, done(attempt), 20.0)) == [(1, "again")]


def test_a_member_that_is_busy_is_waited_for() -> None:
    council = Council(2, PATIENCE)
    attempt = begun(council, [0, 1])["attempt"]
    council.hear(0, done(attempt), 0.0)
    for second in range(1, 40):
        assert council.hear(1, {"kind": "busy", "attempt": attempt}, float(second)) == []
        assert council.tick(second + 0.5) == []
    assert sorted(kinds(council.hear(1, done(attempt), 40.0))) == [(0, "counts"), (1, "counts")]


def test_of_two_that_miss_each_other_one_is_left_out() -> None:
    council = Council(3, PATIENCE)
    attempt = begun(council, [0, 1, 2])["attempt"]
    council.hear(0, done(attempt, well=True), 1.0)
    council.hear(1, done(attempt, well=False, missed=(2,)), 1.0)
    verdicts = council.hear(2, done(attempt, well=False, missed=(1,)), 1.0)
    assert sorted(kinds(verdicts)) == [(0, "again"), (1, "again"), (2, "left")]
    council.hear(0, ready(0), 2.0)
    assert kinds(council.hear(1, ready(1), 2.0)) == [(0, "round"), (1, "round")]


def test_who_is_ready_meanwhile_waits_for_those_who_come_out_of_a_round() -> None:
    council = Council(3, PATIENCE)
    council.hear(0, ready(0), 0.0)
    council.hear(1, ready(1), 0.0)
    attempt = council.tick(PATIENCE)[0][1]["attempt"]
    assert council.hear(2, ready(2), PATIENCE) == []
    council.hear(0, done(attempt, well=False), 30.0)
    assert kinds(council.hear(1, done(attempt, well=False), 30.0)) == [(0, "again"), (1, "again")]
    council.hear(0, ready(0), 31.0)
    assert kinds(council.hear(1, ready(1), 31.0)) == [(0, "round"), (1, "round"), (2, "round")]


def test_other_states_take_the_one_with_most_training_in_it_from_those_that_have_it() -> None:
    council = Council(4, PATIENCE)
    council.hear(0, ready(0, name="old", progress=4), 0.0)
    council.hear(1, ready(1, name="new", progress=6, seen={"1": 7}, facts={"step": 9}), 0.0)
    council.hear(2, ready(2, name="", progress=0), 0.0)
    _, decision = council.hear(3, ready(3, name="new", progress=6, moved=False), 0.0)[0]
    assert decision["takes_from"] == {"0": 1, "2": 3}
    assert decision["moved"] == [1]  # what others have moved is from elsewhere
    assert (decision["name"], decision["progress"], decision["facts"]["step"]) == ("new", 6, 9)
    assert decision["earlier_seen"] == {"1": 7}


def test_a_new_council_knows_from_the_islands_what_the_old_one_did() -> None:
    old, new = Council(2, PATIENCE), Council(2, PATIENCE)
    attempt = begun(old, [0, 1])["attempt"]
    old.hear(0, done(attempt), 1.0)
    name = old.hear(1, done(attempt), 1.0)[0][1]["name"]
    # Island 1 has heard that it counts, island 0 has not, and both come to the new one.
    new.hear(0, ready(0), 2.0)
    _, decision = new.hear(1, ready(1, name=name, progress=2), 2.0)[0]
    assert decision["takes_from"] == {"0": 1}
    assert kinds(new.hear(0, done(attempt), 2.0)) == [(0, "again")]  # of the other one's round


def test_an_island_with_another_layout_is_refused_by_the_earlier_one() -> None:
    council = Council(3, PATIENCE)
    council.hear(0, ready(0), 0.0)
    ((island, said),) = council.hear(2, ready(2, layout="another"), 0.0)
    assert (island, said["kind"], said["island"], said["layout"]) == (2, "refused", 0, "same")
    council.lose(2, 1.0)
    assert kinds(council.tick(PATIENCE)) == [(0, "round")]


def test_hello_tells_who_is_furthest() -> None:
    council = Council(3, PATIENCE)
    assert council.hear(0, hello(0), 0.0)[0][1]["newest"] is None
    council.hear(1, hello(1, name="x", progress=5), 0.0)
    assert council.hear(2, hello(2), 0.0)[0][1]["newest"]["island"] == 1
    council.lose(1, 1.0)
    assert council.hear(2, hello(2), 1.0)[0][1]["newest"]["island"] == 0


# ------------------------------------------------------------------------------------------- at random


@dataclass
class Player:
    """An island as its council sees it, without a model: its state is a name."""

    island: int
    name: str = ""
    progress: int = 0
    phase: str = "train"
    until: float = 0.0
    rounds: int = 0
    decision: dict[str, Any] = field(default_factory=dict)
    frozen_until: float = 0.0


class World:
    """Islands, their councils and a network, in simulated time."""

    def __init__(self, seed: int, count: int) -> None:
        self.chance, self.now, self.count = random.Random(seed), 0.0, count
        self.council, self.epoch = Council(count, PATIENCE), 0
        self.players = [Player(island) for island in range(count)]
        self.post: list[
            tuple[float, int, int, str, dict[str, Any]]
        ] = []  # when, epoch, island, to whom, what
        self.held: dict[str, dict[int, str]] = {}
        self.sums: dict[str, tuple[str, ...]] = {}
        self.counted = 0

    def send(self, island: int, to: str, message: dict[str, Any]) -> None:
        when = self.now + self.chance.uniform(0.01, 0.4)
        # A link keeps the order of what it carries.
        earlier = [w for w, _, i, t, _ in self.post if (i, t) == (island, to)]
        self.post.append((max([when, *earlier]) + 1e-6, self.epoch, island, to, message))

    def say(self, said: list[Any]) -> None:
        for island, message in said:
            self.send(island, "island", message)

    def cut(self, island: int) -> None:
        """The link to the council breaks, with all that is on it."""
        self.post = [entry for entry in self.post if entry[2] != island]
        self.say(self.council.lose(island, self.now))
        player = self.players[island]
        if player.phase in ("ready", "done"):
            player.phase, player.until = "train", self.now + 0.2  # its delegate hears nothing and comes again

    def begin(self, player: Player, *, moved: bool = True) -> None:
        player.phase = "ready"
        about = ready(player.island, name=player.name, progress=player.progress, moved=moved)
        self.send(player.island, "council", {**about, "kind": "hello"})
        self.send(player.island, "council", about)

    def disturb(self) -> None:
        player = self.chance.choice(self.players)
        what = self.chance.choice(["cut", "die", "freeze", "council", "nothing"])
        if what == "cut":
            self.cut(player.island)
        elif what == "die":
            self.cut(player.island)
            self.players[player.island] = Player(player.island, until=self.now + self.chance.uniform(0.5, 20))
        elif what == "freeze":
            player.frozen_until = self.now + self.chance.uniform(1, 25)
        elif what == "council":
            self.council, self.epoch, self.post = Council(self.count, PATIENCE), self.epoch + 1, []
            for each in self.players:
                if each.phase in ("ready", "done"):
                    each.phase, each.until = "train", self.now + 0.2

    def hear(self, player: Player, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "call" and player.phase == "train":
            player.until = min(player.until, self.now + 0.1)
        elif kind == "round" and player.phase == "ready":
            player.phase, player.decision = "exchange", message
            player.until = self.now + self.chance.uniform(0.1, 3)
        elif kind == "counts" and player.phase == "done":
            self.counts(player, message["name"])
        elif kind in ("again", "left") and player.phase == "done":
            player.phase, player.until = "train", self.now + 0.05

    def counts(self, player: Player, name: str) -> None:
        decision = player.decision
        # What a member holds after a round is what it held, or took, and the movements that were averaged.
        base = decision["name"] if str(player.island) in decision["takes_from"] else player.name
        assert base == decision["name"], "a member adds the mean to another state"
        holding = (base, decision["attempt"], *map(str, decision["moved"]))
        assert self.sums.setdefault(name, holding) == holding, "two states with one name"
        self.counted += name not in self.held
        self.held.setdefault(name, {})[player.island] = name
        player.name, player.progress = name, decision["progress"] + len(decision["moved"])
        player.rounds += 1
        player.phase, player.until = "train", self.now + self.chance.uniform(1, 4)

    def exchanged(self, player: Player) -> None:
        attempt, members = player.decision["attempt"], player.decision["members"]
        others = [self.players[other] for other in members if other != player.island]
        missed = tuple(
            other.island
            for other in others
            if other.decision.get("attempt") != attempt or other.frozen_until > self.now
        )
        well = not missed and self.chance.random() < 0.97
        player.phase = "done"
        progress = player.decision["progress"] + len(player.decision["moved"])
        self.send(player.island, "council", done(attempt, well=well, missed=missed, progress=progress))

    def step(self) -> None:
        self.now += 0.05
        due = sorted((e for e in self.post if e[0] <= self.now), key=lambda e: e[0])
        self.post = [e for e in self.post if e[0] > self.now]
        for _, epoch, island, to, message in due:
            player = self.players[island]
            if epoch != self.epoch:
                continue
            if to == "council":
                self.say(self.council.hear(island, message, self.now))
            elif player.frozen_until > self.now:
                self.post.append((player.frozen_until, epoch, island, to, message))
            else:
                self.hear(player, message)
        for player in self.players:
            if player.until <= self.now and player.frozen_until <= self.now:
                if player.phase == "train":
                    self.begin(player)
                elif player.phase == "exchange":
                    self.exchanged(player)
        self.say(self.council.tick(self.now))


@pytest.mark.parametrize("seed", often(range(60), 3))
def test_members_of_a_round_that_counts_hold_one_state_whatever_happens(seed: int) -> None:
    world = World(seed, count=2 + seed % 3)
    while world.now < 300:
        world.step()
        if world.chance.random() < 0.01:
            world.disturb()
    assert world.counted >= 10, "training went on"
    # Once nothing disturbs them any more, all of them come together again, and stay so.
    began = world.now
    while world.now < began + 60:
        world.step()
    rounds = {player.island: player.rounds for player in world.players}
    before = world.counted
    while world.now < began + 120:
        world.step()
    assert all(player.rounds > rounds[player.island] for player in world.players), rounds
    assert world.counted - before >= 5
    last = [name for name, its in world.held.items() if len(its) == world.count]
    assert last, "no round had all members"
    assert len({player.progress for player in world.players}) <= 2
