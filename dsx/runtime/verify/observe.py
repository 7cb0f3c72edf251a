"""Look at an engine while it trains: weights, the optimizer's gradients and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsx.runtime.verify.seen import Known, Piece, RankSeen, RankStep, Weight
from dsx.runtime.zero_adapters.held import held

Batches = Callable[[int], Iterator[tuple[Any, Any]]]
"""Step -> this replica's micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine to look at.

    Attributes:
        engine: With ``train_batch`` and ``get_global_grad_norm``: dsx's, or stock DeepSpeed's.
        inner: The DeepSpeedEngine.
        module: This rank's layers; children with a number for a name are layers.
        known: This rank's parameters by logical name.
        parameters: The same, themselves.
        rank: In the mesh.
        dp_rank: Data-parallel coordinate.
        data: Ranks that hold the same parameters.
    """

    engine: Any
    inner: Any
    module: nn.Module
    known: dict[str, Known]
    parameters: dict[str, nn.Parameter]
    rank: int
    dp_rank: int
    data: dist.ProcessGroup


def observe(subject: Subject, built: dict[str, Tensor], batches: Batches, steps: int) -> RankSeen:
    """Train ``steps`` steps and note everything. A collective call over all ranks."""
    watch = _Watch(subject)
    weights, seen = [watch.weights()], []
    outputs: dict[str, Tensor] = {}
    for step in range(steps):
        with watch.outputs(outputs) if step == 0 and subject.dp_rank == 0 else nullcontext():
            seen.append(watch.step(batches(step)))
        weights.append(watch.weights())
    return RankSeen(
        rank=subject.rank, known=subject.known, built=built, weights=weights, steps=seen, outputs=outputs
    )


class _Watch:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._names = {id(parameter): name for name, parameter in subject.parameters.items()}
        self._given: dict[int, tuple[Tensor, Tensor | None]] = {}
        wrapper = subject.inner.optimizer
        # torch's own hook: whatever DeepSpeed wraps around it, this is the optimizer that moves the weights.
        getattr(wrapper, "optimizer", wrapper).register_step_pre_hook(self._before_step)
        self._partitioned = subject.inner.zero_optimization_stage() > 0

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for master in group["params"]:
                gradient = None if master.grad is None else _copy(master.grad)
                self._given[id(master)] = _copy(master), gradient

    def step(self, batches: Iterator[tuple[Any, Any]]) -> RankStep:
        """One training step."""
        subject = self._subject
        self._given.clear()
        loss = float(subject.engine.train_batch(batches))
        norm = subject.engine.get_global_grad_norm()
        pieces, spread = [], {}
        for kept in held(subject.inner):
            before, gradient = self._given.get(id(kept.master), (_copy(kept.master), None))
            after = _copy(kept.master)
            for span in kept.spans:
                name, at = (
                    self._names[id(span.parameter)],
                    slice(span.offset, span.offset + span.stop - span.start),
                )
                own = None if gradient is None else gradient[at]
                if not self._partitioned:
                    spread[name] = self._spread(after[at] if own is None else own)
                if self._partitioned or subject.dp_rank == 0:
                    pieces.append(
                        Piece(name=name, start=span.start, before=before[at], after=after[at], gradient=own)
                    )
        return RankStep(loss=loss, norm=None if norm is None else float(norm), pieces=pieces, spread=spread)

    def weights(self) -> dict[str, Weight]:
        """Every weight as the model computes with it."""
        found = {}
        for name, parameter in self._subject.parameters.items():
            gathered: Any = nullcontext()
            if hasattr(parameter, "ds_id"):
                gathered = deepspeed.zero.GatheredParameters([parameter])
            with gathered:
                values = parameter.detach().float().cpu().clone()
            spread = self._spread(values)
            if self._subject.dp_rank == 0:
                found[name] = Weight(values=values, spread=spread)
        return found

    def _spread(self, values: Tensor) -> float:
        """Largest difference over data-parallel ranks, each with all of ``values``."""
        if not values.numel() or dist.get_world_size(self._subject.data) == 1:
            return 0.0
        ends = torch.stack((values, -values)).to(self._subject.inner.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._subject.data)
        return float((ends[0] + ends[1]).abs().max())

    @contextmanager
    def outputs(self, into: dict[str, Tensor]) -> Iterator[None]:
        """Note the first output of every layer that is a module of its own."""

        def hook(name: str) -> Callable[..., None]:
            def note(_module: Any, _inputs: Any, output: Any) -> None:
                first = output[0] if isinstance(output, tuple) else output
                if name not in into and isinstance(first, Tensor) and first.is_floating_point():
                    into[name] = _copy(first).view(first.shape)

            return note

        children = self._subject.module.named_children()
        handles = [child.register_forward_hook(hook(name)) for name, child in children if name.isdigit()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _copy(tensor: Tensor) -> Tensor:
    """Flat, float32, on the host, its own memory."""
    return tensor.detach().float().reshape(-1).to("cpu", copy=True)
