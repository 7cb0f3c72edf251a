"""Walks one rank's row of a schedule: forward, backward and the transfers between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dsx.engine.chunks import Chunks
from dsx.engine.micro_batches import BatchSource, TrainedTokens
from dsx.engine.p2p import HEADER_NUMEL, Headers, Inbox, Outbox, Signature, Signatures, Tensors, channel
from dsx.engine.rank_progress import RankProgress
from dsx.errors import ModelError
from dsx.nn.split import WeightGradients
from dsx.parallel.groups import Groups
from dsx.schedules.hiding import in_parts
from dsx.schedules.host_copies import host_plan
from dsx.schedules.receives import Channel, ReceivePlan
from dsx.schedules.schedule import BACKWARDS, Action, Kind, Op, Schedule

Key = tuple[int, int]
"""(virtual stage, micro-batch)."""

Around = Callable[[Action], AbstractContextManager[None]]


class Calls(Protocol):
    """How the executor computes: forwards and backwards of the layers, by way of DeepSpeed or past it.

    Attributes:
        hooked: Whether parameters' hooks must be called as their gradients come.
    """

    hooked: bool

    def forward(
        self, inputs: Any, stage: int, labels: tuple[Any, ...] = (), *, with_outputs: bool = False
    ) -> Any:
        """Outputs of a virtual stage, or its loss: see :class:`dsx.engine.chunks.Chunks`."""

    def announce(self, loss: torch.Tensor) -> None:
        """Called before the backward of a ``loss`` that did not come from :meth:`forward`."""

    def backward(self, outputs: Tensors, gradients: Tensors, *, boundary: bool, is_loss: bool) -> None:
        """Gradients of everything below ``outputs``, and what ZeRO does around them.

        Args:
            outputs: The outputs that want a gradient; their memory may be gone.
            gradients: One per output; none for a scalar.
            boundary: Whether it is this rank's last backward of the step.
            is_loss: Whether the output is a micro-batch's loss, which counts by its share of the step.
        """


class StepHooks(Protocol):
    """What the executor calls as a step proceeds, so that gradients leave and parameters come in time."""

    def begin(self, schedule: Schedule) -> None:
        """Called when a step of a lowered schedule begins, an evaluation's included."""

    def before_action(self, position: int) -> None:
        """Called before the action at ``position`` of this rank's row."""

    def chunk_done(self, stage: int) -> None:
        """Called when virtual stage ``stage`` has nothing more to do on this rank in this training step."""


_NOTHING = Signature((), is_tuple=True)
"""Signature of the (empty) gradient message to a stage with nothing trained at or below it."""


class _Alias(torch.autograd.Function):
    """The same memory as a tensor that is no leaf, so that a first layer may write to it in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        del ctx
        return upstream[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What a step is for.

    Attributes:
        training: Whether backwards follow, in the schedule and in autograd.
        compute_loss: Give labels to the last stage.
        keep_outputs: Keep the last stage's outputs (evaluation only).
        release_outputs: Free a stage's output once sent.
    """

    training: bool
    compute_loss: bool = True
    keep_outputs: bool = False
    release_outputs: bool = False


class StepRun:
    """One step on one rank: state and the meaning of every action.

    Args:
        schedule: Lowered schedule of the step (training or forward-only).
        receives: When this rank posts the receives of ``schedule``.
        batches: Micro-batches for the first and last stage.
        signatures: Boundary signatures, kept between steps.
        split: The object that the layers were built with, for schedules that split the backward. Layers
            without it do their whole backward in its first part.
        around: Entered around every action, to record it (:mod:`dsx.engine.step_tracer`); None for none.
        rank_progress: Told of every action, for whoever watches the rank.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        receives: ReceivePlan,
        groups: Groups,
        stages: Chunks,
        calls: Calls,
        hooks: StepHooks,
        batches: BatchSource,
        signatures: Signatures,
        mode: Mode,
        split: WeightGradients | None = None,
        around: Around | None = None,
        rank_progress: RankProgress | None = None,
    ) -> None:
        self._rank_progress = rank_progress or RankProgress(batches.device)
        self._schedule, self._receives, self._groups = schedule, receives, groups
        self._stages, self._calls, self._hooks = stages, calls, hooks
        self._batches, self._signatures = batches, signatures
        self._mode, self._around = mode, around
        self._split = split or WeightGradients()
        self._row = schedule.rows[groups.pp_rank]
        self._last, self._position = schedule.num_stages - 1, 0
        self._in_parts = in_parts(self._row)
        # A chunk's last transfer included, so that nobody waits for what is done with its gradients.
        self._ends = {a.stage: i for i, a in enumerate(self._row)} if mode.training else {}
        self._inputs: dict[Key, Any] = {}
        self._outputs: dict[Key, Any] = {}
        self._gradients: dict[Key, Tensors] = {}
        self._frozen: dict[int, bool] = {}
        self._outbox = Outbox(groups, signatures.shards, signatures.headers)
        self._inboxes = {
            (kind, source): Inbox(
                messages=messages,
                source=groups.pipe_peer(source),
                group=groups.channels[channel(kind, source, groups.pp_rank)],
                device=batches.device,
                shards=signatures.shards,
                headers=self._headers(len(messages), source) if kind == "F" else None,
            )
            for (kind, source), messages in receives.messages.items()
        }
        self._planned = dict.fromkeys(self._inboxes, 0)
        self._taken: list[Channel] = []
        # The planned moments keep a GPU from waiting in a circle; where a posted receive holds nothing up,
        # earlier ones spare a sender the wait for its receiver. Shapes must be known.
        self._eager = batches.device.type == "cpu" and not signatures.dynamic
        hosts = [host for stage in set(self._ends) if (host := stages.offloaded(stage)[0]) is not None]
        self._host = host_plan(schedule, groups.pp_rank) if hosts else None
        for host in hosts:
            host.begin()
        self.losses: list[torch.Tensor] = []
        self.kept_outputs: list[Any] = []

    def run(self) -> None:
        """Execute the row. Returns when every send has left."""
        steps = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._whole_backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.RECV_F: self._receive_input,
            Op.SEND_F: self._send_output,
            Op.RECV_B: self._receive_gradient,
            Op.SEND_B: self._send_gradient,
        }
        varying = [inbox for inbox in self._inboxes.values() if inbox.headers is not None]
        self._rank_progress.enter("training step" if self._mode.training else "evaluation", self._schedule)
        self._hooks.begin(self._schedule)
        for due in self._inboxes:
            self._post_ahead(due)
        for position, action in enumerate(self._row):
            self._rank_progress.reach(position)
            self._position = position
            for due in self._receives.posts[position]:
                self._post(due)
            for inbox in varying:
                inbox.post_announced()
            self._hooks.before_action(position)
            for stage, micro_batch in self._host.returns.get(position, ()) if self._host else ():
                self._fetch(stage, micro_batch)
            with nullcontext() if self._around is None else self._around(action):
                steps[action.op](action)
            if self._ends.get(action.stage) == position:
                self._hooks.chunk_done(action.stage)
            if self._taken and self._is_quiet():
                while self._taken:
                    self._post_ahead(self._taken.pop())
        if self._frozen and all(self._frozen.values()):
            self._end_backwards()
        self._rank_progress.reach(len(self._row))
        self._outbox.flush()

    def _headers(self, count: int, source: int) -> Headers | None:
        """Headers of the activations that pipeline rank ``source`` sends; None where shapes do not vary."""
        group = self._signatures.headers
        if group is None:
            return None
        return Headers(count=count, numel=HEADER_NUMEL, source=self._groups.pipe_peer(source), group=group)

    def _post(self, due: Channel) -> None:
        """Post the receive that is planned for now, unless it was posted ahead."""
        inbox, (kind, _) = self._inboxes[due], due
        self._planned[due] += 1
        if inbox.num_posted >= self._planned[due]:
            return
        stage, micro_batch = inbox.due
        if kind == "B":
            output = self._outputs.get((stage, micro_batch), ())
            whole = Signature.of(output, f"virtual stage {stage}") if output != () else _NOTHING
            inbox.post(whole.gradient)
            return
        if inbox.headers is not None:
            inbox.expect()
            return
        known = self._signatures.get(stage, self._mode.training)
        signature = inbox.post(known)
        if known is None:
            self._signatures.learn(stage, self._mode.training, signature)
            self._post_ahead(due)

    def _post_ahead(self, due: Channel) -> None:
        """Post receives of a channel before their turn, as far as their shapes are known."""
        inbox, (kind, _) = self._inboxes[due], due
        while self._eager and inbox.has_room:
            stage = inbox.due[0]
            known = self._signatures.get(stage if kind == "F" else stage + 1, self._mode.training)
            if known is None:
                return
            inbox.post(known if kind == "F" else known.gradient)

    def _take(self, kind: Kind, source_stage: int, key: Key) -> tuple[Signature, Tensors]:
        source = kind, self._schedule.rank_of(source_stage)
        self._taken.append(source)
        return self._inboxes[source].take(key)

    def _is_quiet(self) -> bool:
        """Whether nobody waits for what this rank does next."""
        after = self._row[self._position + 1 : self._position + 2]
        sends = bool(after) and after[0].op in (Op.SEND_F, Op.SEND_B)
        return not sends and self._row[self._position].op not in (Op.RECV_F, Op.RECV_B)

    def _receive_input(self, action: Action) -> None:
        key = (action.stage, action.micro_batch)
        signature, tensors = self._take("F", action.stage - 1, key)
        for meta, tensor in zip(signature.tensors, tensors, strict=True):
            tensor.requires_grad_(meta.requires_grad)
        self._inputs[key] = tensors if signature.is_tuple else tensors[0]

    def _forward(self, action: Action) -> None:
        key, mode = (action.stage, action.micro_batch), self._mode
        if action.stage == 0:
            self._inputs[key] = self._batches.inputs(action.micro_batch)
        is_last = action.stage == self._last
        local = not is_last and self._schedule.rank_of(action.stage + 1) == self._groups.pp_rank
        # Read in any case, so that all ranks that share an iterator move it on alike.
        labels = self._batches.labels(action.micro_batch) if is_last else ()
        inputs = self._inputs[key] if mode.training else self._inputs.pop(key)
        with self._offloading(action):
            output = self._calls.forward(
                _writable(inputs),
                action.stage,
                labels if mode.compute_loss else (),
                with_outputs=mode.keep_outputs,
            )
        if is_last:
            output = self._finish(action.micro_batch, output)
        else:
            Signature.of(output, f"virtual stage {action.stage}")  # the same rule on every layout
        if mode.training:
            if not is_last and self._stages.trains(action.stage):
                known = self._signatures.get(action.stage + 1, mode.training)
                output = _if_skipped(inputs, output, known)
            self._frozen[action.stage] = frozen = not any(t.requires_grad for t in _tensors(output))
            if frozen and self._stages.trains(action.stage):
                raise ModelError(
                    f"{'loss' if is_last else 'output'} of virtual stage {action.stage}",
                    "it has no gradient, though the stage has parameters to train, which would get none",
                    "return it as it was computed, not detached or as integers; or freeze the parameters",
                )
        if local:
            self._inputs[action.stage + 1, action.micro_batch] = _hand_over(output)
        items = (*_tensors(inputs), *_tensors(output))
        if mode.training and not any(isinstance(t, torch.Tensor) and t.requires_grad for t in items):
            del self._inputs[key]  # no backward will ask for them
            if is_last or local:
                return
        if mode.training or not (is_last or local):
            self._outputs[key] = output

    @contextmanager
    def _offloading(self, action: Action) -> Iterator[None]:
        """Inside, blocks' inputs go to the host; the stage's own is then free where a block is its first."""
        stage, key = action.stage, (action.stage, action.micro_batch)
        host, blocks, begins = self._stages.offloaded(stage)
        if host is None or self._host is None:
            yield
            return
        leave = self._host.leave(stage, blocks)
        with host.forward(key, leave):
            yield
        if begins and leave and stage and self._mode.release_outputs:
            # With a stage before it on this rank, that one's output is the same memory.
            for value in (self._inputs[key], self._outputs.get((stage - 1, action.micro_batch))):
                if value is not None:
                    _let_go(_tensors(value)[0])

    def _fetch(self, stage: int, micro_batch: int) -> None:
        """Begin to bring back what a stage's last block kept on the host."""
        host, _, _ = self._stages.offloaded(stage)
        if host is not None:
            host.fetch((stage, micro_batch))

    def _finish(self, micro_batch: int, output: Any) -> Any:
        """Note the result of the last stage: the loss, or its outputs if there is none."""
        if self._mode.keep_outputs:
            loss, outputs = output if self._mode.compute_loss else (None, output)
            self.kept_outputs.append(outputs)
            output = loss
        if self._mode.compute_loss:
            if not isinstance(output, torch.Tensor) or output.numel() != 1:
                raise ModelError(
                    f"loss of micro-batch {micro_batch}",
                    f"it is {type(output).__name__}"
                    + (f" of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else ""),
                    "return a scalar tensor from loss_fn (or from the last layer without a loss_fn)",
                )
            self.losses.append(output.detach())
        return output

    def _send_output(self, action: Action) -> None:
        key, training = (action.stage, action.micro_batch), self._mode.training
        output = self._outputs[key] if training and key in self._inputs else self._outputs.pop(key)
        signature = Signature.of(output, f"virtual stage {action.stage}")
        header = None
        if self._signatures.announce(action.stage + 1, training, signature):
            header = signature.encode()
        self._signatures.check("F", action.stage + 1, training, _tensors(output))
        self._outbox.send(_tensors(output), "F", self._schedule.rank_of(action.stage + 1), header)
        if self._mode.release_outputs and training:
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    _let_go(tensor)

    def _receive_gradient(self, action: Action) -> None:
        key = (action.stage, action.micro_batch)
        self._gradients[key] = self._take("B", action.stage + 1, key)[1]

    def _whole_backward(self, action: Action) -> None:
        if self._position in self._in_parts and self._stages.hides(action.stage):
            self._backward_input(action)
            self._backward_weight(action)
        else:
            self._backward(action)

    def _backward_input(self, action: Action) -> None:
        key, direct = (action.stage, action.micro_batch), not self._calls.hooked
        with self._split.deferring(key, direct=direct):
            self._backward(action)

    def _backward_weight(self, action: Action) -> None:
        key, boundary = (action.stage, action.micro_batch), self._is_boundary
        if self._frozen[action.stage]:
            return
        if not self._calls.hooked:
            self._split.accumulate(key)
        with self._split.delivering(key) as loss:
            if loss is not None:
                self._calls.announce(loss)
                self._calls.backward((loss,), (), boundary=boundary, is_loss=False)
            elif boundary:
                self._end_backwards()

    def _end_backwards(self) -> None:
        """The last backward of a step that has nothing to compute: the boundary's reductions must run."""
        root = torch.zeros((), device=self._batches.device, requires_grad=True).clone()
        self._calls.announce(root)
        self._calls.backward((root,), (), boundary=True, is_loss=False)

    def _backward(self, action: Action) -> None:
        key = (action.stage, action.micro_batch)
        inputs, output = self._inputs.pop(key, ()), self._outputs.pop(key, ())
        gradients = self._gradients.pop(key, ())
        if not self._frozen[action.stage]:
            is_loss = action.stage == self._last
            roots = tuple(t for t in _tensors(output) if t.requires_grad)
            self._calls.backward(roots, gradients, boundary=self._is_boundary, is_loss=is_loss)
        if action.stage == 0:
            return
        wanted = tuple(
            torch.zeros_like(t) if t.grad is None else t.grad for t in _tensors(inputs) if t.requires_grad
        )
        self._gradients[action.stage - 1, action.micro_batch] = wanted

    def _send_gradient(self, action: Action) -> None:
        gradients = self._gradients.pop((action.stage - 1, action.micro_batch))
        self._signatures.check("B", action.stage - 1, self._mode.training, gradients)
        self._outbox.send(gradients, "B", self._schedule.rank_of(action.stage - 1))

    @property
    def tokens(self) -> TrainedTokens | None:
        """The trained tokens, for a loss that is the mean over them; None on ranks that do not compute it."""
        return self._batches.tokens

    @property
    def _is_boundary(self) -> bool:
        """No later backward on this rank has anything to do."""
        later = (a for a in self._row[self._position + 1 :] if a.op in BACKWARDS)
        return all(self._frozen.get(a.stage, False) for a in later)


def _tensors(value: Any) -> Tensors:
    return value if isinstance(value, tuple) else (value,)


def _let_go(tensor: torch.Tensor) -> None:
    """Free a tensor of which only the graph is needed from here on: see _Seed. The shape stays."""
    gone = torch.empty((), dtype=tensor.dtype, device=tensor.device)
    tensor.data = gone.expand(tensor.shape)


def _writable(inputs: Any) -> Any:
    """A stage's inputs as its first layer gets them: no leaves, which autograd lets nobody write to."""
    if isinstance(inputs, tuple):
        return tuple(_writable(item) for item in inputs)
    needs = isinstance(inputs, torch.Tensor) and inputs.requires_grad and torch.is_grad_enabled()
    return _Alias.apply(inputs) if needs else inputs


def _if_skipped(inputs: Any, output: Any, known: Signature | None) -> Any:
    """The output of a stage that trains: one that wants a gradient, if its layers passed a micro-batch on.

    Layers that are skipped at random may all be skipped at once, in the first stage of all. What follows
    sends gradients back as for any micro-batch.
    """
    given, outputs = _tensors(inputs), _tensors(output)
    if any(t.requires_grad for t in outputs) or not all(any(_is_same(t, s) for s in given) for t in outputs):
        return output
    wants = [t.is_floating_point() for t in outputs]
    if known is not None and len(known.tensors) == len(outputs):
        wants = [meta.requires_grad for meta in known.tensors]
    leaves = tuple(t.detach().requires_grad_(want) for t, want in zip(outputs, wants, strict=True))
    return leaves if isinstance(output, tuple) else leaves[0]


def _is_same(tensor: torch.Tensor, other: Any) -> bool:
    """Whether both are all of the same memory."""
    if not isinstance(other, torch.Tensor) or tensor.shape != other.shape or not tensor.numel():
        return False
    return tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride()


def _hand_over(output: Any) -> Any:
    """An output as the next stage's input on the same rank: a new leaf on the same memory."""
    leaves = tuple(t.detach().requires_grad_(t.requires_grad) for t in _tensors(output))
    return leaves if isinstance(output, tuple) else leaves[0]
