"""One rank's training step over the ledger: its schedule row as dsx/engine/executor.py runs it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dsx.memory.layers import Layers
from dsx.memory.ledger import Leaf, Replay, Storage, Tape, Tensor, leave
from dsx.memory.ops import label
from dsx.memory.states import States
from dsx.parallel.stages import StageMap
from dsx.schedules.receives import Channel, ReceivePlan, receive_plan
from dsx.schedules.schedule import TRANSFERS, Action, Kind, Op, Schedule

Key = tuple[int, int]

IN_FLIGHT = 2
"""Messages of a channel that are under way at most (dsx/engine/p2p.py)."""

_GONE = label("sent output's place", "w", "engine/executor.py _send_output", "transfers")

BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What goes between stages: [B, s, H] of ``width`` bytes."""

    shape: tuple[int, int, int]
    width: int


class Walk:
    """One rank's step; may be run again for the next.

    Args:
        schedule: Lowered.
        rank: Pipeline coordinate.
        stages: Layers over stages.
        layers: This rank's layers.
        states: Its parameters' states.
        boundary: What goes between stages.
        tokens: [B, S] of a micro-batch.
        receives: When receives are posted; None for the plan of the schedule.
        eager: Whether they are posted as soon as there is room, as on a CPU.
        replays: Whether micro-batches after the first ones may be :mod:`dsx.memory.ledger`'s: with states in
            which one does the same as the next.
        left_out: Micro-batches that the schedule does not have, but whose losses the last stage keeps.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        rank: int,
        stages: StageMap,
        layers: Layers,
        states: States,
        boundary: Boundary,
        tokens: tuple[int, int],
        receives: ReceivePlan | None = None,
        eager: bool = False,
        left_out: int = 0,
        replays: bool = False,
    ) -> None:
        self.schedule, self.rank, self.stages = schedule, rank, stages
        self.layers, self.states, self.boundary, self.tokens = layers, states, boundary, tokens
        self.eager, self.left_out = eager, left_out
        self.receives = receives or receive_plan(schedule, rank)
        self.row = schedule.rows[rank]
        self.tape: Tape = layers.ops.tape
        self.ledger = self.tape.ledger
        self.replay = Replay(self.ledger, self.row) if replays else None
        self.last = schedule.num_stages - 1
        places = [place for place, action in enumerate(self.row) if action.op in BACKWARDS]
        self.final = places[-1] if places else -1
        self.checked: set[tuple[str, int]] = set()
        self.ends = {action.stage: place for place, action in enumerate(self.row)}
        self._reset()

    def _reset(self) -> None:
        self.inputs: dict[Key, Tensor] = {}
        self.outputs: dict[Key, Tensor] = {}
        self.gradients: dict[Key, Tensor] = {}
        self.posted: dict[Channel, dict[Key, Tensor]] = {}
        self._planned = dict.fromkeys(self.receives.messages, 0)
        self._taken: list[Channel] = []
        self.flying: dict[tuple[str, int], deque[Tensor]] = {}
        self.next = dict.fromkeys(self.receives.messages, 0)
        self.losses: list[Tensor] = []
        self.kept: dict[Key, dict[Leaf, list[object]]] = {}

    def run(self, note: Callable[[Action | None], None]) -> None:
        """Walk the row; ``note`` is called after each action, and with None after the update."""
        self._reset()
        self.states.begin()
        does = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.RECV_F: self._receive_input,
            Op.SEND_F: self._send_output,
            Op.RECV_B: self._receive_gradient,
            Op.SEND_B: self._send_gradient,
        }
        if self.schedule.rank_of(self.last) == self.rank:
            what = label("losses", "4 m", "engine/executor.py losses", "logits")
            self.losses = [self.tape.scratch(what, 4) for _ in range(self.left_out)]
        for channel in self.next:
            self._post_ahead(channel)
        if self.replay is not None:
            self.replay.begin()
        for place, action in enumerate(self.row):
            self._post_planned(place)
            self.states.before_action(place)
            if self.replay is None or action.micro_batch in self.replay.walked:
                self._walk(does[action.op], action, place)
            else:
                self._again(self.replay, action)
            if self.ends[action.stage] == place:
                self.states.chunk_done(action.stage)
            note(action)
            if self.eager and self._is_quiet(place):
                while self._taken:
                    self._post_ahead(self._taken.pop())
        self.flying.clear()
        self.states.before_step()
        self.states.step()
        note(None)
        self.losses.clear()
        if self.replay is not None:
            self.replay.end()

    def _walk(self, does: Callable[[Action, int], None], action: Action, place: int) -> None:
        """An action with its tensors."""
        replay = self.replay
        if replay is None or action.op in TRANSFERS or not replay.wants(action):
            does(action, place)
        else:
            mark = self.ledger.mark()
            does(action, place)
            replay.note(action, self.ledger.since(mark))

    def _again(self, replay: Replay, action: Action) -> None:
        """An action like one before, without them."""
        stage, key = action.stage, (action.stage, action.micro_batch)
        like = Tensor(self.boundary.shape, self.boundary.width, None)
        match action.op:
            case Op.RECV_F:
                leave(self._take("F", stage - 1, key))
            case Op.RECV_B:
                leave(self._take("B", stage + 1, key))
            case Op.SEND_F:
                self.ledger.take(_GONE, self.ledger.rounded(self.boundary.width))
                self._send("F", self.schedule.rank_of(stage + 1), replay.like_sent("F", stage, like))
            case Op.SEND_B:
                self._send("B", self.schedule.rank_of(stage - 1), replay.like_sent("B", stage, like))
            case _:
                replay.again(action)
                if action.op is Op.FORWARD and stage == self.last:
                    replay.keeps_loss(None)

    def _wire(self, name: str) -> Tensor:
        what = label(name, "B s H w", "engine/p2p.py Inbox.post", "transfers")
        return self.tape.new(what, self.boundary.width, *self.boundary.shape)

    def _post_planned(self, place: int) -> None:
        for channel in self.receives.posts[place]:
            self._planned[channel] += 1
            if self.next[channel] < self._planned[channel]:
                self._post(channel)

    def _post(self, channel: Channel) -> None:
        kind, _ = channel
        message = self.receives.messages[channel][self.next[channel]]
        self.next[channel] += 1
        name = "received activations" if kind == "F" else "received gradients"
        self.posted.setdefault(channel, {})[message] = self._wire(name)

    def _post_ahead(self, channel: Channel) -> None:
        """On a CPU, as many receives as a sender lets be under way (executor.py _post_ahead)."""
        messages, posted = self.receives.messages[channel], self.posted.setdefault(channel, {})
        while self.eager and self.next[channel] < len(messages) and len(posted) < IN_FLIGHT:
            self._post(channel)

    def _is_quiet(self, place: int) -> bool:
        """executor.py _is_quiet."""
        after = self.row[place + 1 : place + 2]
        sends = bool(after) and after[0].op in (Op.SEND_F, Op.SEND_B)
        return not sends and self.row[place].op not in (Op.RECV_F, Op.RECV_B)

    def _take(self, kind: Kind, source_stage: int, key: Key) -> Tensor:
        channel = kind, self.schedule.rank_of(source_stage)
        if self.eager:
            self._taken.append(channel)
        return self.posted[channel].pop(key)

    def _receive_input(self, action: Action, _: int) -> None:
        key = (action.stage, action.micro_batch)
        self.inputs[key] = self._leaf(self._take("F", action.stage - 1, key))

    def _receive_gradient(self, action: Action, _: int) -> None:
        key = (action.stage, action.micro_batch)
        self.gradients[key] = self._take("B", action.stage + 1, key)

    def _leaf(self, x: Tensor) -> Leaf:
        """A stage's input. A gradient that somebody else holds too is copied (accumulate_grad.h)."""

        def accumulate(leaf: Leaf, gradient: Tensor) -> None:
            assert gradient.storage is not None
            if gradient.storage.holders > 1:
                what = label("copy of the input's gradient", "B s H w", "torch accumulate_grad.h")
                gradient = self.layers.ops.like(what, gradient)
            leaf.grad = gradient

        return Leaf("input", x.shape, x.width, storage=x.storage, accumulate=accumulate)

    def _ids(self, name: str) -> Tensor:
        return self.tape.new(
            label(name, "8 B S", "engine/micro_batches.py _to", "activations"), 8, *self.tokens
        )

    def _forward(self, action: Action, _: int) -> None:
        key = (action.stage, action.micro_batch)
        if action.stage == 0:
            self.inputs[key] = self._ids("token ids")
        is_last = action.stage == self.last
        labels = self._ids("labels") if is_last else None
        layers = self.stages.layers(action.stage)
        output = self.layers.run(layers, self.inputs[key], labels)
        del labels
        if is_last:
            self.losses.append(output.detach())
            if self.replay is not None:
                self.replay.keeps_loss(output)
        elif self.schedule.rank_of(action.stage + 1) == self.rank:
            self.inputs[action.stage + 1, action.micro_batch] = self._leaf(output)
        self.outputs[key] = output

    def _send_output(self, action: Action, _: int) -> None:
        output = self.outputs[action.stage, action.micro_batch]
        self._check("F", action.stage, output)
        self._send("F", self.schedule.rank_of(action.stage + 1), output.detach())
        if self.replay is not None:
            self.replay.sends("F", action.stage, output)
        source = output.source
        self.outputs[action.stage, action.micro_batch] = Tensor(
            output.shape, output.width, Storage(self.ledger, _GONE, output.width), source
        )

    def _check(self, kind: str, stage: int, tensor: Tensor) -> None:
        """Before a boundary's first message is cut over tensor-parallel ranks (engine/p2p.py, _alike)."""
        ops = self.layers.ops
        if ops.tp == 1 or ops.sequence or (kind, stage) in self.checked:
            return
        self.checked.add((kind, stage))
        what = label("check of a cut message", "4, 8 and 8 B s H", "engine/p2p.py _alike", "transfers")
        sizes = (4 * (tensor.width < 4), 8, 8)
        held = [self.tape.scratch(what, size * tensor.numel) for size in sizes if size]
        held.clear()

    def _send(self, kind: str, peer: int, tensor: Tensor) -> None:
        flying = self.flying.setdefault((kind, peer), deque())
        while len(flying) >= IN_FLIGHT:
            flying.popleft()
        flying.append(tensor)

    def _backward(self, action: Action, place: int) -> None:
        key = (action.stage, action.micro_batch)
        inputs, output = self.inputs.pop(key), self.outputs.pop(key)
        gradient = self.gradients.pop(key, None)
        seed = gradient.detach() if gradient is not None else self._scalar()
        later = self.layers.ops.later
        came = later is None or not later.active
        self.tape.backward(output, seed)
        self.states.reduce(boundary=place == self.final, came=came)
        del output, seed
        if action.stage > 0:
            assert isinstance(inputs, Leaf)
            assert inputs.grad is not None
            self.gradients[action.stage - 1, action.micro_batch] = inputs.grad.detach()

    def _scalar(self) -> Tensor:
        return self.tape.new(label("loss gradient", "4", "deepspeed engine.py backward", "temporaries"), 4)

    def _backward_input(self, action: Action, place: int) -> None:
        later = self.layers.ops.later
        assert later is not None
        later.active = True
        self._backward(action, place)
        later.active = False
        self.kept[action.stage, action.micro_batch] = dict(later.kept)  # type: ignore[arg-type]
        later.kept.clear()

    def _backward_weight(self, action: Action, place: int) -> None:
        later = self.layers.ops.later
        assert later is not None
        later.kept.update(self.kept.pop((action.stage, action.micro_batch)))  # type: ignore[arg-type]
        later.deliver(self.tape)
        self.states.reduce(boundary=place == self.final, came=True)

    def _send_gradient(self, action: Action, _: int) -> None:
        gradient = self.gradients.pop((action.stage - 1, action.micro_batch))
        if self.replay is not None:
            self.replay.sends("B", action.stage, gradient)
        self._check("B", action.stage, gradient)
        self._send("B", self.schedule.rank_of(action.stage - 1), gradient)
