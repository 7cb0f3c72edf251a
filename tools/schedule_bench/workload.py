"""What every engine of the benchmark is given to train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from dsx.nn.split import WeightGradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model in the form that each engine wants, and the micro-batches of a step.

    Attributes:
        layers: Number of chunks, and what takes weight gradients or None -> the layer list, for dsx and for
            stock DeepSpeed.
        loss_fn: ``loss_fn(outputs, labels)``, the mean over a micro-batch.
        partition_method: Cuts ``layers`` into equal virtual stages.
        module: Virtual stage, number of virtual stages -> that stage as one module, for torch.
        inputs: [num_micro_batches * rows, ...].
        labels: The same number of rows.
        num_micro_batches: Micro-batches per step.
    """

    layers: Callable[[int, WeightGradients | None], list[LayerSpec]]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    partition_method: str
    module: Callable[[int, int], nn.Module]
    inputs: torch.Tensor
    labels: torch.Tensor
    num_micro_batches: int

    @property
    def rows(self) -> int:
        """Samples per micro-batch."""
        return len(self.inputs) // self.num_micro_batches

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """One (inputs, labels) per micro-batch."""
        return list(zip(self.inputs.split(self.rows), self.labels.split(self.rows), strict=True))
