"""Walks one rank's row of a schedule: forward, backward and the transfers between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dsx.errors import DataError, ModelError
from dsx.nn.split import WeightGradients
from dsx.plan.transfers import receive_order
from dsx.runtime.groups import Groups
from dsx.runtime.p2p import Inbox, Outbox, Signature, Tensors, channel
from dsx.spec.schedule import Action, Op, Schedule

Key = tuple[int, int]
"""(virtual stage, micro-batch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The two things that the executor asks of the model.

    Attributes:
        forward: ``forward(inputs, stage, labels)`` -> output, or loss on the last stage when labels are
            given.
        backward: ``backward(loss, stage, boundary, is_loss)``; ``boundary`` on this rank's last backward of
            the step.
        backward_weights: ``backward_weights(loss, stage, boundary)`` for the second part of a split backward;
            ``loss`` is None when there is nothing to compute, on the last backward of the step only.
    """

    forward: Callable[[Any, int, Any], Any]
    backward: Callable[[torch.Tensor, int, bool, bool], None]
    backward_weights: Callable[[torch.Tensor | None, int, bool], None]


class _Seed(torch.autograd.Function):
    """A scalar whose gradient with respect to a stage's outputs is what the next stage sent back.

    The value is never computed from the outputs, so that their memory may be gone, and the gradient is passed
    on unscaled whatever multiplies the scalar, so that loss scaling happens once, at the loss.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Tensors, *outputs: torch.Tensor) -> torch.Tensor:
        del outputs
        ctx.gradients = gradients
        return torch.zeros((), device=gradients[0].device)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        del upstream
        return (None, *ctx.gradients)


@dataclass(slots=True)
class MicroBatches:
    """The micro-batches of one step, pulled when first needed, dropped after their last use.

    Args:
        source: Yields ``(inputs, labels)``; None on a rank that needs neither.
        count: Micro-batches in the step.
        device: Where tensors are moved.
        uses: How often each micro-batch is read on this rank (inputs, labels or both).
    """

    source: Iterator[Any] | None
    count: int
    device: torch.device
    uses: int
    _loaded: dict[int, list[Any]] = field(default_factory=dict)
    _pulled: int = 0

    def part(self, micro_batch: int, index: int) -> Any:
        """Inputs (``index`` 0) or labels (1) of a micro-batch."""
        while self._pulled <= micro_batch:
            self._loaded[self._pulled] = [self._pull(), self.uses]
            self._pulled += 1
        entry = self._loaded[micro_batch]
        entry[1] -= 1
        if entry[1] == 0:
            del self._loaded[micro_batch]
        return _to(entry[0][index], self.device)

    def _pull(self) -> Any:
        if self.source is None:
            raise DataError(
                "data_iter = None", "this rank's stage needs data", "pass an iterator of micro-batches"
            )
        try:
            batch = next(self.source)
        except StopIteration:
            raise DataError(
                f"data_iter after {self._pulled} of {self.count} micro-batches",
                "it ended within the step",
                "give as many micro-batches as gradient_accumulation_steps, e.g. through RepeatingLoader",
            ) from None
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise DataError(f"batch of type {type(batch).__name__}", "not a pair", "yield (inputs, labels)")
        return batch


@dataclass(slots=True)
class Signatures:
    """What each boundary carries, learned from its first micro-batch; nothing is kept for dynamic shapes."""

    dynamic: bool
    _known: dict[tuple[int, bool], Signature] = field(default_factory=dict)
    _announced: set[tuple[int, bool]] = field(default_factory=set)

    def get(self, stage: int, training: bool) -> Signature | None:
        """Signature of virtual stage ``stage``'s input."""
        return self._known.get((stage, training))

    def learn(self, stage: int, training: bool, signature: Signature) -> None:
        """Remember what came in (static shapes only)."""
        if not self.dynamic:
            self._known[stage, training] = signature

    def announce(self, stage: int, training: bool, signature: Signature) -> bool:
        """Whether a header must go before this message. Raises ModelError if a static shape changed."""
        if self.dynamic:
            return True
        key = (stage, training)
        known = self._known.setdefault(key, signature)
        if known != signature:
            raise ModelError(
                f"input of virtual stage {stage}",
                f"its shape changed from {[m.shape for m in known.tensors]} to "
                f"{[m.shape for m in signature.tensors]}",
                "build the PipelineModule with dynamic_shape=True, or call reset_activation_shape()",
            )
        first = key not in self._announced
        self._announced.add(key)
        return first

    def reset(self) -> None:
        """Forget everything; the next message of each boundary brings its header again."""
        self._known.clear()
        self._announced.clear()


class StepRun:
    """One step on one rank: state and the meaning of every action.

    Args:
        schedule: Lowered schedule of the step (training or forward-only).
        groups: This rank's groups.
        compute: Forward and backward of the model.
        batches: Micro-batches for the first and last stage.
        signatures: Boundary signatures, kept between steps.
        training: False runs without labels' gradients.
        compute_loss: Give labels to the last stage.
        keep_outputs: Keep the last stage's outputs.
        release_outputs: Free a stage's output once sent.
        split: What the layers were built with, for schedules that split the backward. Layers without it do
            their whole backward in its first part.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        groups: Groups,
        compute: Compute,
        batches: MicroBatches,
        signatures: Signatures,
        training: bool,
        compute_loss: bool = True,
        keep_outputs: bool = False,
        release_outputs: bool = False,
        split: WeightGradients | None = None,
    ) -> None:
        self._schedule, self._groups, self._compute = schedule, groups, compute
        self._batches, self._signatures, self._training = batches, signatures, training
        self._compute_loss, self._keep_outputs, self._release = compute_loss, keep_outputs, release_outputs
        self._split = split or WeightGradients()
        self._row = schedule.rows[groups.pp_rank]
        self._last = schedule.num_stages - 1
        self._inputs: dict[Key, Any] = {}
        self._outputs: dict[Key, Any] = {}
        self._gradients: dict[Key, Tensors] = {}
        self._frozen: dict[int, bool] = {}
        self._outbox = Outbox(groups)
        self._inboxes = self._make_inboxes()
        self.losses: list[torch.Tensor] = []
        self.kept_outputs: list[Any] = []

    def run(self) -> None:
        """Execute the row. Returns when every send has left."""
        for inbox in self._inboxes.values():
            inbox.post(blocking=False)
        steps = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.RECV_F: self._receive_input,
            Op.SEND_F: self._send_output,
            Op.RECV_B: self._receive_gradient,
            Op.SEND_B: self._send_gradient,
        }
        for position, action in enumerate(self._row):
            steps[action.op](action, position)
        self._outbox.flush()

    def _make_inboxes(self) -> dict[tuple[str, int], Inbox]:
        """One inbox per (kind, source pipeline coordinate) that this rank receives from."""
        inboxes: dict[tuple[str, int], Inbox] = {}
        me = self._groups.pp_rank
        for kind in ("F", "B"):
            for source in range(self._schedule.num_ranks):
                messages = receive_order(self._schedule, me, kind, source)
                if not messages:
                    continue
                known = self._input_signature if kind == "F" else self._gradient_signature
                inboxes[kind, source] = Inbox(
                    messages=messages,
                    signature=known,
                    learn=lambda key, signature: self._signatures.learn(key[0], self._training, signature),
                    source=self._groups.pipe_peer(source),
                    group=self._groups.channels[channel(kind, source, me)],
                    device=self._batches.device,
                )
        return inboxes

    def _input_signature(self, key: Key) -> Signature | None:
        return self._signatures.get(key[0], self._training)

    def _gradient_signature(self, key: Key) -> Signature | None:
        """Gradients look like the outputs that want them."""
        if key not in self._outputs:
            return None
        output = Signature.of(self._outputs[key], f"virtual stage {key[0]}")
        return Signature(tuple(m for m in output.tensors if m.requires_grad), is_tuple=True)

    def _receive_input(self, action: Action, position: int) -> None:
        del position
        key = (action.stage, action.micro_batch)
        inbox = self._inboxes["F", self._schedule.rank_of(action.stage - 1)]
        signature, tensors = inbox.take(key)
        for meta, tensor in zip(signature.tensors, tensors, strict=True):
            tensor.requires_grad_(meta.requires_grad)
        self._inputs[key] = tensors if signature.is_tuple else tensors[0]

    def _forward(self, action: Action, position: int) -> None:
        del position
        key = (action.stage, action.micro_batch)
        if action.stage == 0:
            self._inputs[key] = self._batches.part(action.micro_batch, 0)
        is_last = action.stage == self._last
        labels = self._batches.part(action.micro_batch, 1) if is_last and self._compute_loss else None
        output = self._compute.forward(self._inputs[key], action.stage, labels)
        self._frozen[action.stage] = not any(t.requires_grad for t in _tensors(output))
        if is_last:
            self._finish(key, output)
        elif self._schedule.rank_of(action.stage + 1) == self._groups.pp_rank:
            self._inputs[action.stage + 1, action.micro_batch] = _hand_over(output)
        if self._training or not is_last:
            self._outputs[key] = output
        if not self._training:
            del self._inputs[key]

    def _finish(self, key: Key, output: Any) -> None:
        if self._keep_outputs:
            self.kept_outputs.append(output)
        if self._compute_loss:
            if not isinstance(output, torch.Tensor) or output.numel() != 1:
                raise ModelError(
                    f"loss of micro-batch {key[1]}",
                    f"it is {type(output).__name__}"
                    + (f" of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else ""),
                    "return a scalar tensor from loss_fn (or from the last layer without a loss_fn)",
                )
            self.losses.append(output.detach())

    def _send_output(self, action: Action, position: int) -> None:
        del position
        key = (action.stage, action.micro_batch)
        output = self._outputs[key] if self._training else self._outputs.pop(key)
        destination = self._schedule.rank_of(action.stage + 1)
        signature = Signature.of(output, f"virtual stage {action.stage}")
        if self._signatures.announce(action.stage + 1, self._training, signature):
            self._outbox.send([signature.encode().to(self._batches.device)], "F", destination)
        self._outbox.send(_tensors(output), "F", destination)
        if self._release and self._training:
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    # Only the graph is needed from here on: see _Seed. The shape stays, the storage goes.
                    tensor.data = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(
                        tensor.shape
                    )

    def _receive_gradient(self, action: Action, position: int) -> None:
        del position
        key = (action.stage, action.micro_batch)
        self._gradients[key] = self._inboxes["B", self._schedule.rank_of(action.stage + 1)].take(key)[1]

    def _backward_input(self, action: Action, position: int) -> None:
        with self._split.deferring((action.stage, action.micro_batch)):
            self._backward(action, position)

    def _backward_weight(self, action: Action, position: int) -> None:
        boundary = self._is_boundary(position)
        with self._split.delivering((action.stage, action.micro_batch)) as loss:
            if loss is not None or boundary:
                self._compute.backward_weights(loss, action.stage, boundary)

    def _backward(self, action: Action, position: int) -> None:
        key = (action.stage, action.micro_batch)
        inputs, output = self._inputs.pop(key), self._outputs.pop(key)
        gradients = self._gradients.pop(key, ())
        if not self._frozen[action.stage]:
            is_loss = action.stage == self._last
            if is_loss:
                scalar = output
            else:
                scalar = _Seed.apply(gradients, *(t for t in _tensors(output) if t.requires_grad))
            self._compute.backward(scalar, action.stage, self._is_boundary(position), is_loss)
        if action.stage == 0:
            return
        wanted = tuple(
            torch.zeros_like(t) if t.grad is None else t.grad for t in _tensors(inputs) if t.requires_grad
        )
        self._gradients[action.stage - 1, action.micro_batch] = wanted

    def _send_gradient(self, action: Action, position: int) -> None:
        del position
        gradients = self._gradients.pop((action.stage - 1, action.micro_batch))
        self._outbox.send(gradients, "B", self._schedule.rank_of(action.stage - 1))

    def _is_boundary(self, position: int) -> bool:
        """No later backward on this rank has anything to do."""
        backwards = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
        later = (a for a in self._row[position + 1 :] if a.op in backwards)
        return all(self._frozen.get(a.stage, False) for a in later)


def _tensors(value: Any) -> Tensors:
    return value if isinstance(value, tuple) else (value,)


def _hand_over(output: Any) -> Any:
    """An output as the next stage's input on the same rank: a new leaf on the same memory."""
    leaves = tuple(t.detach().requires_grad_(t.requires_grad) for t in _tensors(output))
    return leaves if isinstance(output, tuple) else leaves[0]


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, (tuple, list)):
        return tuple(_to(item, device) for item in value)
    return value
