"""Losses and predictions of a data set, from a pipeline whose last stage has the logits in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import EvalPrediction, denumpify_detensorize, has_length

from dsx.engine.engine import PipelineEngine
from dsx.nn.documents import MicroBatch
from dsx.nn.loss import IGNORED
from dsx.trainer.batches import Loading, epoch, filler, micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What came of one batch.

    Attributes:
        place: Which batch of the data set it is.
        loss: Mean over its trained tokens; None without labels.
        logits: float [B, S, V], or what was made of them; None if nobody asked.
        labels: As the collator gave them, int64 [B, S].
        inputs: Its ``input_ids``, if they were asked for.
    """

    place: int
    samples: int
    loss: float | None
    logits: Any = None
    labels: Tensor | None = None
    inputs: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass over a data set without training. Every rank makes the same and runs it alike.

    Attributes:
        multiple: Lengths are rounded up to a multiple of this.
        vocabulary: Columns of the whole logits.
        with_outputs: Whether logits are wanted.
        reduce: ``reduce(logits, labels)`` is kept instead of the logits.
    """

    engine: PipelineEngine
    loading: Loading
    multiple: int
    vocabulary: int
    with_outputs: bool
    with_inputs: bool
    reduce: Callable[[Any, Any], Any] | None

    def run(self, loader: DataLoader[Any]) -> Iterator[tuple[int, list[Scored]]]:
        """What came of the batches, a few at a time and in order, alike on every rank.

        Yields:
            The number of them that this rank has read, and all of them.
        """
        source, first = epoch(loader, self.loading, 0), 0
        length = len(loader.dataset) if has_length(loader.dataset) else None  # type: ignore[arg-type]
        at_once = max(self.engine.micro_batches, 2 * self.engine.num_stages)
        while True:
            batches = list(islice(source, at_once))
            there = torch.tensor([len(batches)], device=self.engine.pipeline.device)
            dist.all_reduce(there)
            if not int(there):
                return
            made = [micro_batch(batch, multiple=self.multiple, needs_labels=False) for batch in batches]
            made += [filler(self.multiple)] * (at_once - len(made))
            yield len(batches), self._gathered(self._scored(batches, made, first, length))
            first += at_once

    def _scored(
        self, batches: Sequence[Mapping[str, Any]], made: Sequence[MicroBatch], first: int, length: int | None
    ) -> list[Scored]:
        """This rank's batches; empty on ranks that do not speak for them."""
        groups, shares = self.engine.groups, self.loading.shares
        result = self.engine.eval_batch(
            iter(made), return_logits=self.with_outputs, reduce_output=None, num_micro_batches=len(made)
        )
        losses, outputs = result if self.with_outputs else (result, None)
        if not self.engine.is_last_stage():
            return []
        found = []
        for number, batch in enumerate(batches):
            labels, ids = batch.get("labels"), torch.as_tensor(batch["input_ids"])
            logits = None if outputs is None else self._whole(outputs[number], ids.shape[1])
            if logits is not None and self.reduce is not None:
                logits = self.reduce(logits, labels)
            if groups.speaks and groups.cp_rank == 0:
                place = (first + number) * shares + self.loading.index
                size = int(self.loading.args.per_device_eval_batch_size)
                found.append(
                    Scored(
                        place=place,
                        # A collator may lay several samples end to end in one row.
                        samples=ids.shape[0] if length is None else min(size, length - place * size),
                        loss=None if labels is None else float(losses[number]),
                        logits=_on_host(logits),
                        labels=labels if self.with_outputs else None,
                        inputs=ids if self.with_inputs else None,
                    )
                )
        return found

    def _whole(self, columns: Tensor, length: int) -> Tensor:
        """All columns of the logits, from the ranks that have some. Collective over them."""
        groups = self.engine.groups
        parts = [columns]
        if groups.tensor_parallel.size > 1:
            parts = [torch.empty_like(columns) for _ in range(groups.tensor_parallel.size)]
            dist.all_gather(parts, columns.contiguous(), group=groups.tensor)
        return torch.cat(parts, -1)[:, :length, : self.vocabulary]

    def _gathered(self, mine: list[Scored]) -> list[Scored]:
        everywhere: list[list[Scored]] = [[] for _ in range(self.engine.groups.mesh.size)]
        dist.all_gather_object(everywhere, mine)
        return sorted((each for part in everywhere for each in part), key=lambda each: each.place)


def _on_host(value: Any) -> Any:
    """Tensors of a nest in the host's memory, and without what they were cut from."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, list | tuple):
        return type(value)(_on_host(each) for each in value)
    return value


class Collected:
    """What came of all batches, as one process of transformers' Trainer has it.

    Args:
        concat: Whether batches are put together as one array, padded with -100; else there is a list of them.
    """

    def __init__(self, concat: bool) -> None:
        self._kept = {name: EvalLoopContainer(concat, IGNORED) for name in ("logits", "labels", "inputs")}
        self._losses: list[float] = []
        self.samples = 0

    def take(self, scored: Sequence[Scored]) -> None:
        for each in scored:
            self.samples += each.samples
            self._losses += [] if each.loss is None else [each.loss] * each.samples
            for name, container in self._kept.items():
                value = getattr(each, name)
                if value is not None:
                    container.add(value)
        for container in self._kept.values():
            container.to_cpu_and_numpy()

    def array(self, name: str) -> Any:
        """All ``logits``, ``labels`` or ``inputs``; None if nobody asked for them."""
        return self._kept[name].arrays

    def metrics(self, args: Any, compute: Callable[[Any], Mapping[str, Any]] | None, prefix: str) -> Any:
        """The mean loss and what ``compute`` makes of the predictions, by name."""
        found: dict[str, Any] = {}
        losses, wanted = np.asarray(self._losses), args.include_for_metrics
        if compute is not None and self.array("logits") is not None and self.array("labels") is not None:
            given = EvalPrediction(
                predictions=self.array("logits"),
                label_ids=self.array("labels"),
                inputs=self.array("inputs") if "inputs" in wanted else None,
                losses=losses if "loss" in wanted else None,
            )
            found = denumpify_detensorize(dict(compute(given)))
        if losses.size:
            finite = np.isfinite(losses)
            filtered = args.logging_nan_inf_filter and finite.any()
            found[f"{prefix}_loss"] = (losses[finite] if filtered else losses).mean().item()
        return {
            name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value
            for name, value in found.items()
        }
