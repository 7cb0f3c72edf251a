"""One rank's training step over the ledger: its schedule row as dsx/engine/executor.py runs it.

Chunks of recorded layers (:mod:`dsx.memory.layer_record`) go forward and backward as their events say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from dsx.memory.layer_record import Event, LayerRecord, TensorForm
from dsx.memory.ledger import Label, Leaf, Ledger, Message, Replay, Storage, Tensor, dropped
from dsx.memory.record_cache import LayerRecords
from dsx.memory.states import States
from dsx.memory.waiting_gradients import WaitingGradients
from dsx.parallel.stages import StageMap
from dsx.schedules.hiding import in_parts
from dsx.schedules.host_copies import HostPlan, host_plan
from dsx.schedules.receives import Channel, ReceivePlan, receive_plan
from dsx.schedules.schedule import BACKWARDS, TRANSFERS, Action, Kind, Op, Schedule


class Hooks(Protocol):
    """What happens before and after each module (ZeRO-3)."""

    def fetch(self, module: tuple[Leaf, ...], *, forward: bool) -> None:
        """Called before a module with these parameters of its own, maybe none, runs forward or backward."""

    def release(self, module: tuple[Leaf, ...], *, forward: bool) -> None:
        """Called after it, except after the backward of a module whose input wants no gradient."""


_TOKEN = Label("activations", "token", "4", "nn/split.py delivering")
_COPY = Label("activations", "copy of the input's gradient", "as the input", "torch accumulate_grad.h")
_AWAY = Label("activations", "block's input, on the host", "as the input", "nn/offload.py leave")
_BACK = Label("activations", "block's input, back from the host", "as the input", "nn/offload.py come")


@dataclass(slots=True)
class _Shared:
    """What the layers of a chunk share while one of its backwards runs.

    Attributes:
        waits: How many more gradients a parameter gets before autograd hands on their sum: a table that the
            chunk uses as embedding and as head gets two.
        sums: The sum of such a parameter's gradients so far.
        meanwhile: Called while rows travel to experts.
    """

    meanwhile: Callable[[], None]
    waits: dict[str, int] = field(default_factory=dict)
    sums: dict[str, Storage] = field(default_factory=dict)


class RecordedLayer:
    """One layer of a chunk with one micro-batch, from its forward to the end of its backward.

    Args:
        leaves: Its parameters by their names in the record.
        hooks: ZeRO-3's; None if parameters are always whole.
        last: Whether it is the model's last layer, whose outputs are the logits, or the loss.
        offloads: Whether its input may go to the host.
    """

    def __init__(
        self,
        ledger: Ledger,
        record: LayerRecord,
        leaves: Mapping[str, Leaf],
        hooks: Hooks | None,
        *,
        last: bool = False,
        offloads: bool = False,
    ) -> None:
        self.offloads, self._is_away = offloads, False
        self.record, self.leaves, self._ledger, self._hooks = record, leaves, ledger, hooks
        ends = last and not record.num_labels
        self._logits = frozenset(record.output_ids) if ends else frozenset[int | str]()
        self._held: dict[int | str, Storage] = {}
        self._meanwhile: Callable[[], object] = list  # in a forward, nothing
        self.exchanges = ("exchange",) in record.memory("backward_input")

    def forward(self, inputs: Message) -> Message:
        """The outputs; the inputs stay the caller's."""
        for place, storage in enumerate(inputs):
            self._held[f"x{place}"] = storage.hold()
        return self._replay(self.record.memory("forward"))

    def leave(self) -> int:
        """Let go of the input, which is on the host by now: bytes, 0 if the layer does not keep it."""
        kept = self._held.pop("x0", None)
        self._is_away = kept is not None
        if kept is None:
            return 0
        kept.drop()
        return self.record.inputs[0].size_bytes

    def come(self) -> None:
        """Have the input again, unless it is there."""
        if self._is_away:
            self._is_away = False
            self._held["x0"] = Storage(self._ledger, _BACK, self.record.inputs[0].size_bytes).hold()

    def backward(
        self, gradients: Sequence[Storage | None], phase: str, shared: _Shared, *, copies: bool
    ) -> Message:
        """Gradients of the inputs that want one.

        Args:
            gradients: Gradients of the outputs, each held once for this layer, which lets go of it.
            phase: ``backward`` or ``backward_input``.
            shared: The chunk's shared state.
            copies: Whether the inputs are a stage's, which copies a gradient that somebody else holds.
        """
        for place, storage in enumerate(gradients):
            if storage is not None:
                self._held[f"d{place}"] = storage
        self._meanwhile = shared.meanwhile
        found = self._replay(self.record.memory(phase), shared, copies=copies)
        for place, form in enumerate(self.record.inputs[1:], start=1):
            # Positions, which the recorder gives to every pass and does not let go of.
            if not form.differentiable and f"x{place}" in self._held:
                self._held.pop(f"x{place}").drop()
        return found

    def begin_use(self, place: int) -> None:
        """Begin the communication of a waiting gradient."""
        self._replay(self.record.uses[place].begin)

    def finish_use(self, place: int) -> Storage:
        """Finish a waiting gradient, held once for the caller."""
        (total,) = self._replay(self.record.uses[place].finish)
        return total

    def _handed(self, storage: Storage, *, copies: bool) -> Storage:
        if copies and storage.holders > 1:
            return Storage(self._ledger, _COPY, storage.size_bytes).hold()
        return storage.hold()

    def _give(self, name: str, gradient: Storage, shared: _Shared) -> bool:
        """Hand a gradient over; whether it is the last that the parameter gets in this backward."""
        leaf = self.leaves[name]
        shared.waits[leaf.name] -= 1
        before = shared.sums.pop(leaf.name, None)
        if before is not None:
            # Autograd's sum: in place if nobody else holds the first (torch/csrc/autograd/input_buffer.cpp).
            gradient = (
                before if before.holders == 1 else Storage(self._ledger, gradient.label, before.size_bytes)
            )
        waits = bool(shared.waits[leaf.name])
        if waits:
            shared.sums[leaf.name] = gradient.hold()
        else:
            leaf.receive(Tensor(leaf.shape, leaf.width, gradient))
        if before is not None:
            before.drop()
        return not waits

    def _replay(
        self, events: Sequence[Event], shared: _Shared | None = None, *, copies: bool = False
    ) -> Message:
        """Go through the events of a pass, or of a part of one: what it gives, held once for the caller.

        Args:
            events: The events.
            shared: Takes gradients of parameters; None gives them to the caller.
            copies: As :meth:`backward` has it.
        """
        held, new, logits = self._held, self._ledger.new, self._logits
        found: Message = []
        given: dict[int | str, Leaf] = {}
        for event in events:
            kind = event[0]  # comparisons, because this runs millions of times
            if kind == "+" and not logits:
                held[event[1]] = new(event[3], event[2])
            elif kind == "-":
                held.pop(event[1]).drop()
                if event[1] in given:
                    _tell(given.pop(event[1]))
            elif kind == "in":
                found = [self._handed(held[name], copies=copies) for name in event[1] if name is not None]
            elif kind == "grad" and shared is not None:
                if self._give(event[1], held[event[2]], shared):
                    given[event[2]] = self.leaves[event[1]]
            else:
                found += self._do(event)
        for leaf in given.values():
            _tell(leaf)
        return found

    def _do(self, event: Event) -> Message:
        """What is rarer; with what it gives."""
        kind, held = event[0], self._held
        if kind == "fetch":
            if self._hooks is not None:
                self._hooks.fetch(tuple(map(self.leaves.__getitem__, event[1])), forward=event[2])
        elif kind == "release":
            self._release(event)
        elif kind == "exchange":
            self._meanwhile()
        elif kind == "grad":
            return [held[event[2]].hold()]
        elif kind == "out":
            return [held[number].hold() for number in self.record.output_ids]
        elif kind == "many":
            held[event[1]] = self._ledger.new(event[3], self._ledger.rounded(event[2]) * event[4])
        else:
            _, number, size, label, *first = event
            if first and held[first[0]].holders == 1:
                held[first[0]].overwrite()
            if number in self._logits:
                label = label._replace(category="logits", name="logits")
            held[number] = self._ledger.new(label, size)
        return []

    def _release(self, event: Event) -> None:
        _, names, forward, kept = event
        for name, number in kept:  # what was gathered, as long as a recomputation has it saved
            storage = self.leaves[name].storage
            self._held[number] = (Storage(self._ledger, _TOKEN, 0) if storage is None else storage).hold()
        if self._hooks is not None:
            self._hooks.release(tuple(map(self.leaves.__getitem__, names)), forward=forward)


class RecordedChunk:
    """One micro-batch in the layers of one virtual stage.

    Args:
        layers: The layers in order, followed by the loss after the model's last layer.
        saves: Whether backward has saved what the layers share that is made of a micro-batch's positions.
        unified: Whether the device is the host, a run on CPUs: what has left lies beside what stays.

    Attributes:
        away: Sizes of what lies on the host.
    """

    def __init__(
        self,
        ledger: Ledger,
        layers: Sequence[RecordedLayer],
        hooks: Hooks | None,
        *,
        saves: bool,
        unified: bool = False,
    ) -> None:
        self._ledger, self.layers, self._hooks, self._saves = ledger, layers, hooks, saves
        self._made: Message = []
        self._unified = unified
        self._copies: dict[RecordedLayer, Storage] = {}
        self._waiting = WaitingGradients(hooked=hooks is not None)
        self.away: list[int] = []

    @property
    def hides(self) -> bool:
        """Whether weight gradients run behind exchanges of rows where the backward is divided."""
        return any(layer.exchanges for layer in self.layers)

    @property
    def blocks(self) -> int:
        """Layers whose inputs may go to the host."""
        return sum(layer.offloads for layer in self.layers)

    def forward(self, inputs: Message, labels: Message, leave: int = 0) -> Message:
        """The outputs. The inputs stay the caller's; so do the labels, which go to who computes the loss.

        Args:
            inputs: The stage's.
            labels: Of the loss.
            leave: Of how many blocks, the first ones, the inputs go to the host.
        """
        if self._hooks is not None:
            self._hooks.fetch((), forward=True)
        if self._saves:
            made = dict.fromkeys(kept for layer in self.layers for kept in layer.record.kept if kept.remade)
            self._made = [Storage(self._ledger, kept.label, kept.size_bytes).hold() for kept in made]
        value = [storage.hold() for storage in inputs]
        for layer in self.layers:
            given = value + labels if layer.record.num_labels else value
            leaves = layer.offloads and leave > 0
            if leaves and self._unified:
                size = layer.record.inputs[0].size_bytes
                self._copies[layer] = Storage(self._ledger, _AWAY, size).hold()
            outputs = layer.forward(given)
            if leaves:
                self._leave(layer)
                leave -= 1
            dropped(value)
            value = outputs
        if self._hooks is not None:
            self._hooks.release((), forward=True)
        return value

    def _leave(self, layer: RecordedLayer) -> None:
        size = layer.leave()
        if size:
            self.away.append(size)
        elif layer in self._copies:  # which nothing that goes back asks for
            self._copies.pop(layer).drop()

    def backward(self, gradients: Message, *, first: bool, divided: bool) -> Message:
        """Gradients of the inputs that want one.

        Args:
            gradients: Gradients of the outputs that have one; they stay the caller's.
            first: Whether the inputs are the model's, which want none.
            divided: Whether weight gradients wait for :meth:`weights`.
        """
        if self._hooks is not None:
            self._hooks.fetch((), forward=False)
        phase = "backward_input" if divided else "backward"
        shared = _Shared(self._waiting.meanwhile)
        for layer in self.layers:
            for given in layer.record.gives(phase):
                name = layer.leaves[given].name
                shared.waits[name] = shared.waits.get(name, 0) + 1
        found = [storage.hold() for storage in gradients]
        for place in reversed(range(len(self.layers))):
            layer = self.layers[place]
            if divided and layer.exchanges:
                self._waiting.block()
            due = iter(found)
            wanted = [next(due, None) if form.differentiable else None for form in layer.record.outputs]
            for near in (layer, *self.layers[place - 1 : place]) if layer.offloads else ():
                near.come()
            found = layer.backward(wanted, phase, shared, copies=not place)
            if layer in self._copies:
                self._copies.pop(layer).drop()
            for number, use in enumerate(layer.record.uses if divided else ()):
                how = partial(layer.begin_use, number), partial(layer.finish_use, number)
                self._waiting.keep(layer.leaves[use.parameter], how)
        dropped(self._made)
        if self._hooks is not None and not first:
            self._hooks.release((), forward=False)
        return found

    def modules(self, phase: str) -> list[tuple[Leaf, ...]]:
        """What is fetched in a phase, one after the other."""
        found: list[tuple[Leaf, ...]] = [()]
        for layer in self.layers if phase == "forward" else reversed(self.layers):
            fetched = (event[1] for event in layer.record.memory(phase) if event[0] == "fetch")
            found += (tuple(layer.leaves[name] for name in names) for names in fetched)
        return found

    def weights(self) -> None:
        """The second part of a divided backward (:meth:`dsx.nn.split.WeightGradients.delivering`).

        Parameter by parameter, each use's communication begun during the one before.
        """
        if self._waiting.rest():
            token = Storage(self._ledger, _TOKEN, 4).hold()
            self._waiting.deliver()
            token.drop()


def _tell(leaf: Leaf) -> None:
    if leaf.came is not None:
        leaf.came(leaf)


Key = tuple[int, int]

_PHASES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward_input"}

IN_FLIGHT = 2
"""Messages of a channel that are under way at most (dsx/engine/p2p.py)."""

_GONE = Label("transfers", "sent output's place", "one element", "engine/executor.py _send_output")
_CHECK = Label("transfers", "check of a cut message", "4, 8 and 8 B s H", "engine/p2p.py _alike")
_LOSSES = Label("logits", "losses", "4 m", "engine/executor.py losses")
_SEED = Label("temporaries", "loss gradient", "4", "deepspeed engine.py backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayers:
    """The layers of one rank, as records.

    Attributes:
        hooks: ZeRO-3's; None if parameters are always whole.
        divided: Whether backwards of this rank are split.
        unified: Whether the device is the host, a run on CPUs.
    """

    records: LayerRecords
    stages: StageMap
    states: States
    hooks: Hooks | None
    divided: bool
    unified: bool = False
    _known: dict[int, LayerRecord] = field(default_factory=dict)
    _own: dict[int, dict[str, Leaf]] = field(default_factory=dict)

    def chunk(self, stage: int) -> RecordedChunk:
        ledger, indices = self.states.ledger, self.stages.layers(stage)
        last = self.stages.num_layers - 1
        layers = [
            RecordedLayer(
                ledger,
                self.record(index),
                self._leaves(index),
                self.hooks,
                last=index == last,
                offloads=self.records.offloads(index),
            )
            for index in indices
        ]
        loss = self.records.loss() if last in indices else None
        if loss is not None:
            layers.append(RecordedLayer(ledger, loss, {}, self.hooks))
        saves = not self.records.remakes
        return RecordedChunk(ledger, layers, self.hooks, saves=saves, unified=self.unified)

    def record(self, index: int) -> LayerRecord:
        """The record of a layer of the layer list, this rank's or not."""
        if index not in self._known:
            self._known[index] = self.records.layer(
                index, divided=self.divided, hooked=self.hooks is not None
            )
        return self._known[index]

    def _leaves(self, index: int) -> dict[str, Leaf]:
        """Parameters of a layer of this rank, by their names in its record."""
        if index not in self._own:
            names = [each.name for each in self.record(index).parameters]
            leaves = self.states.leaves
            self._own[index] = {name: leaves[self.records.parameter(index, name)] for name in names}
        return self._own[index]

    def inputs(self, stage: int) -> Sequence[TensorForm]:
        return self.record(self.stages.layers(stage)[0]).stream

    def offloads(self, stage: int) -> bool:
        """Whether blocks of a virtual stage send their inputs to the host."""
        return any(map(self.records.offloads, self.stages.layers(stage)))

    def goes_back(self, stage: int) -> bool:
        """Whether a virtual stage runs backwards: not below everything that is trained."""
        last = self.stages.layers(stage)[-1]
        return last == self.stages.num_layers - 1 or self.record(last).goes_back

    def labels(self) -> Sequence[TensorForm]:
        """What the loss takes besides the last layer's outputs, or the head that computes it."""
        record = self.records.loss() or self.record(self.stages.num_layers - 1)
        return record.labels_taken


class Walk:
    """One rank's step; may be run again for the next.

    Args:
        rank: The pipeline coordinate.
        checks: Whether tensor-parallel ranks cut the messages that they hold alike, and check that they do.
        releases: Whether a stage frees what it has sent.
        receives: When receives are posted; None for the plan of the schedule.
        eager: Whether they are posted as soon as there is room, as on a CPU.
        replays: Whether micro-batches after the first ones may be replayed by :mod:`dsx.memory.ledger`, as
            with states in which each does the same as the next.
        left_out: Micro-batches that the schedule leaves out, but whose losses the last stage keeps.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        rank: int,
        layers: RankLayers,
        checks: bool,
        releases: bool = True,
        receives: ReceivePlan | None = None,
        eager: bool = False,
        left_out: int = 0,
        replays: bool = False,
    ) -> None:
        self.schedule, self.rank, self.layers, self.states = schedule, rank, layers, layers.states
        self.eager, self.left_out, self.checks, self.releases = eager, left_out, checks, releases
        self.receives = receives or receive_plan(schedule, rank)
        self.row = schedule.rows[rank]
        self.ledger: Ledger = self.states.ledger
        self.replay = Replay(self.ledger, self.row) if replays else None
        self.last = schedule.num_stages - 1
        self.backs = {action.stage: layers.goes_back(action.stage) for action in self.row}
        places = [place for place, action in enumerate(self.row) if action.op in BACKWARDS]
        self.final = next((place for place in reversed(places) if self.backs[self.row[place].stage]), -1)
        self.checked: set[tuple[str, int]] = set()
        self.ends = {action.stage: place for place, action in enumerate(self.row)}
        self._in_parts = in_parts(self.row)
        offloads = any(layers.offloads(stage) for stage in self.ends)
        self.host = host_plan(schedule, rank) if offloads else HostPlan(frozenset(), {})
        self._away: dict[int, list[int]] = {}
        self._reset()

    def _reset(self) -> None:
        self.inputs: dict[Key, Message] = {}
        self.outputs: dict[Key, Message] = {}
        self.gradients: dict[Key, Message] = {}
        self.chunks: dict[Key, RecordedChunk] = {}
        self.posted: dict[Channel, dict[Key, Message]] = {}
        self._planned = dict.fromkeys(self.receives.messages, 0)
        self._taken: list[Channel] = []
        self.flying: dict[tuple[str, int], deque[Message]] = {}
        self.next = dict.fromkeys(self.receives.messages, 0)
        self.losses: Message = []
        self.sent: Message = []

    def run(self, note: Callable[[Action | None], None]) -> None:
        """Walk the row; ``note`` is called after each action, and with None after the update."""
        self._reset()
        self.states.begin()
        does = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.RECV_F: self._receive_input,
            Op.SEND_F: self._send_output,
            Op.RECV_B: self._receive_gradient,
            Op.SEND_B: self._send_gradient,
        }
        if self.schedule.rank_of(self.last) == self.rank:
            self.losses = [self._new(_LOSSES, 4) for _ in range(self.left_out)]
        for channel in self.next:
            self._post_ahead(channel)
        if self.replay is not None:
            self.replay.begin()
        for place, action in enumerate(self.row):
            self._post_planned(place)
            self.states.before_action(place)
            self._come(place)
            if self.replay is None or action.micro_batch in self.replay.walked:
                self._walk(does[action.op], action, place)
            else:
                self._again(self.replay, action)
            self._moved(action)
            if self.ends[action.stage] == place:
                self.states.chunk_done(action.stage)
            note(action)
            if self.eager and self._is_quiet(place):
                while self._taken:
                    self._post_ahead(self._taken.pop())
        self._land()
        self.states.before_step()
        self.states.step()
        note(None)
        dropped(self.losses)
        if self.replay is not None:
            self.replay.end()

    def pass_over(self, order: list[tuple[Leaf, ...]]) -> None:
        """Stand for a first step under ZeRO-3: nothing but its update, and its modules put into ``order``.

        What it leaves behind is the same, and what it holds meanwhile is not known.
        """
        self.states.begin()
        modules: dict[tuple[int, Op], list[tuple[Leaf, ...]]] = {}
        for action in self.row:
            stage, op = key = action.stage, action.op
            if op in TRANSFERS:
                self.checked.add((op.name[-1], stage))
            elif op is Op.FORWARD or (op is not Op.BACKWARD_WEIGHT and self.backs[stage]):
                if key not in modules:
                    modules[key] = self.layers.chunk(stage).modules(_PHASES[op])
                order += modules[key]
        self.states.step()

    def _land(self) -> None:
        """Let pending messages arrive, and end a step without backwards."""
        if not any(self.backs.values()):
            self.states.reduce(boundary=True, came=False)
        for messages in self.flying.values():
            for message in messages:
                dropped(message)

    def _walk(self, does: Callable[[Action, int], None], action: Action, place: int) -> None:
        """Run an action with its tensors."""
        replay = self.replay
        if replay is None or action.op in TRANSFERS or not replay.wants(action):
            does(action, place)
        else:
            mark = self.ledger.mark()
            does(action, place)
            replay.note(action, self.ledger.since(mark))
        dropped(self.sent)

    def _come(self, place: int) -> None:
        """Have again what stages' last blocks kept on the host and what comes back now."""
        for stage, micro_batch in self.host.returns.get(place, ()):
            if self.replay is None or micro_batch in self.replay.walked:
                chunk = self.chunks.get((stage, micro_batch))
                blocks = [] if chunk is None else [layer for layer in chunk.layers if layer.offloads]
                for layer in blocks[-1:]:
                    layer.come()
            elif self._away.get(stage):
                self.ledger.take(_BACK, self.ledger.rounded(self._away[stage][-1]))

    def _moved(self, action: Action) -> None:
        """Count what a micro-batch has on the host of a GPU, in page-locked memory, in powers of two."""
        sizes = () if self.layers.unified else self._away.get(action.stage, ())
        size = sum(1 << (each - 1).bit_length() for each in sizes)
        if size and action.op is Op.FORWARD:
            self.states.host.ledger.take(_AWAY, size)
        elif size and action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            self.states.host.ledger.give(_AWAY, size)

    def _again(self, replay: Replay, action: Action) -> None:
        """Repeat an action without its tensors. A delta returns what it receives."""
        stage, key = action.stage, (action.stage, action.micro_batch)
        match action.op:
            case Op.RECV_F:
                self._take("F", stage - 1, key)
            case Op.RECV_B:
                self._take("B", stage + 1, key)
            case Op.SEND_F:
                sent = replay.like_sent("F", stage)
                if not self.backs[stage]:
                    pass
                elif self.releases:
                    for form in self.layers.inputs(stage + 1):
                        self.ledger.take(_GONE, self.ledger.rounded(form.width))
                else:
                    self.outputs[key] = [storage.hold() for storage in sent]
                self._send("F", self.schedule.rank_of(stage + 1), sent)
            case Op.SEND_B:
                self._send("B", self.schedule.rank_of(stage - 1), replay.like_sent("B", stage))
            case _:
                replay.again(action)
                if action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                    dropped(self.outputs.pop(key, []))
                if action.op is Op.FORWARD and stage == self.last:
                    replay.keeps_loss(None)

    def _new(self, what: Label, size_bytes: int) -> Storage:
        return Storage(self.ledger, what, size_bytes).hold()

    def _made(self, name: str, category: str, source: str, forms: Sequence[TensorForm]) -> Message:
        return [self._new(Label(category, name, str(form), source), form.size_bytes) for form in forms]

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
        forms = self.layers.inputs(message[0] if kind == "F" else message[0] + 1)
        wanted = [form for form in forms if kind == "F" or form.differentiable]
        made = self._made(name, "transfers", "engine/p2p.py Inbox.post", wanted)
        self.posted.setdefault(channel, {})[message] = made

    def _post_ahead(self, channel: Channel) -> None:
        """On a CPU, post as many receives as a sender may have pending (executor.py _post_ahead)."""
        messages, posted = self.receives.messages[channel], self.posted.setdefault(channel, {})
        while self.eager and self.next[channel] < len(messages) and len(posted) < IN_FLIGHT:
            self._post(channel)

    def _is_quiet(self, place: int) -> bool:
        """Whether nobody waits for what this rank does next (executor.py _is_quiet)."""
        after = self.row[place + 1 : place + 2]
        sends = bool(after) and after[0].op in (Op.SEND_F, Op.SEND_B)
        return not sends and self.row[place].op not in (Op.RECV_F, Op.RECV_B)

    def _take(self, kind: Kind, source_stage: int, key: Key) -> Message:
        channel = kind, self.schedule.rank_of(source_stage)
        if self.eager:
            self._taken.append(channel)
        return self.posted[channel].pop(key)

    def _receive_input(self, action: Action, _: int) -> None:
        key = (action.stage, action.micro_batch)
        self.inputs[key] = self._take("F", action.stage - 1, key)

    def _receive_gradient(self, action: Action, _: int) -> None:
        key = (action.stage, action.micro_batch)
        self.gradients[key] = self._take("B", action.stage + 1, key)

    def _forward(self, action: Action, _: int) -> None:
        key = (action.stage, action.micro_batch)
        source = "engine/micro_batches.py _to"
        if action.stage == 0:
            self.inputs[key] = self._made("inputs", "activations", source, self.layers.inputs(0))
        is_last = action.stage == self.last
        labels = self._made("labels", "activations", source, self.layers.labels() if is_last else ())
        chunk = self.chunks[key] = self.layers.chunk(action.stage)
        leave = self.host.leave(action.stage, chunk.blocks)
        output = chunk.forward(self.inputs[key], labels, leave)
        dropped(labels)
        self._away[action.stage] = chunk.away
        if leave and action.stage and chunk.layers[0].offloads and self.releases:
            self._let_go(self.inputs[key])
            self._let_go(self.outputs.get((action.stage - 1, action.micro_batch), []))
        if is_last:
            self.losses += [storage.hold() for storage in output]
            if self.replay is not None:
                self.replay.keeps_loss(output[0])
        elif self.schedule.rank_of(action.stage + 1) == self.rank:
            self.inputs[action.stage + 1, action.micro_batch] = [storage.hold() for storage in output]
        if self.backs[action.stage]:
            self.outputs[key] = output
            return
        del self.chunks[key]  # nothing of it goes back
        dropped(self.inputs.pop(key))
        if is_last or self.schedule.rank_of(action.stage + 1) == self.rank:
            dropped(output)
        else:
            self.outputs[key] = output

    def _let_go(self, message: Message) -> None:
        """Of what a stage was given, whose first block's input is on the host (executor.py _offloading)."""
        if message:
            width = self.layers.inputs(1)[0].width
            message[0].drop()
            message[0] = self._new(_GONE, width)

    def _send_output(self, action: Action, _: int) -> None:
        """Free the output's memory but for one element, because only its graph is needed from here on."""
        output = self.outputs.pop((action.stage, action.micro_batch))
        forms = self.layers.inputs(action.stage + 1)
        self._check("F", action.stage, forms)
        if self.replay is not None:
            self.replay.sends("F", action.stage, output)
        back = self.backs[action.stage]
        kept = [storage.hold() for storage in (output if back and not self.releases else [])]
        self._send("F", self.schedule.rank_of(action.stage + 1), output)
        kept += [self._new(_GONE, form.width) for form in forms if back and self.releases]
        self.outputs[action.stage, action.micro_batch] = kept

    def _check(self, kind: str, stage: int, forms: Sequence[TensorForm]) -> None:
        """Before a boundary's first message is cut over tensor-parallel ranks (engine/p2p.py, _alike)."""
        if not self.checks or (kind, stage) in self.checked:
            return
        self.checked.add((kind, stage))
        for form in forms:
            held = [self._new(_CHECK, size * form.numel) for size in (4 * (form.width < 4), 8, 8) if size]
            dropped(held)

    def _send(self, kind: str, peer: int, message: Message) -> None:
        flying = self.flying.setdefault((kind, peer), deque())
        while len(flying) >= IN_FLIGHT:
            dropped(flying.popleft())
        flying.append(message)

    def _backward(self, action: Action, place: int) -> None:
        key, divided = (action.stage, action.micro_batch), action.op is Op.BACKWARD_INPUT
        hides = place in self._in_parts and key in self.chunks and self.chunks[key].hides
        divided |= hides
        inputs, output = self.inputs.pop(key, []), self.outputs.pop(key, [])
        back, gradients = self.backs[action.stage], self.gradients.pop(key, None)
        if gradients is None:
            gradients = [self._new(_SEED, 4)] if back else []
        found: Message = []
        if back:
            first = not any(form.differentiable for form in self.layers.inputs(action.stage))
            chunk = self.chunks[key]
            found = chunk.backward(gradients, first=first, divided=divided)
            came = not divided or any(layer.record.gives("backward_input") for layer in chunk.layers)
            self.states.reduce(boundary=place == self.final, came=came)
        last = action.stage == self.last
        if self.releases or last or self.schedule.rank_of(action.stage + 1) == self.rank:
            dropped(output)
        self.sent = output  # which a message may hold longer, and is therefore no part of the action
        dropped(gradients)
        if action.stage > 0:
            self.gradients[action.stage - 1, action.micro_batch] = found
        dropped(inputs)
        if hides:
            self._backward_weight(action, place)
        elif not divided:
            self.chunks.pop(key, None)

    def _backward_weight(self, action: Action, place: int) -> None:
        if not self.backs[action.stage]:
            return
        self.chunks.pop((action.stage, action.micro_batch)).weights()
        self.states.reduce(boundary=place == self.final, came=True)

    def _send_gradient(self, action: Action, _: int) -> None:
        gradient = self.gradients.pop((action.stage - 1, action.micro_batch))
        if self.replay is not None:
            self.replay.sends("B", action.stage, gradient)
        wanted = [form for form in self.layers.inputs(action.stage) if form.differentiable]
        self._check("B", action.stage, wanted)
        self._send("B", self.schedule.rank_of(action.stage - 1), gradient)
