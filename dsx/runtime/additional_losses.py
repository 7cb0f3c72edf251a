"""Losses that a model reports beside the one it is trained with, as stock PipelineEngine gathers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dsx.errors import ModelError

if TYPE_CHECKING:
    from dsx.runtime.pipeline_module import PipelineModule


class AdditionalLosses:
    """Sums over a step's micro-batches of what ``PipelineModule.get_additional_losses`` gives.

    Args:
        model: Its class says by a method of its own that there are such losses; else nothing is asked.
        default: The method of a class that has none.
    """

    def __init__(self, model: PipelineModule, default: object) -> None:
        self._model = model
        self._given = getattr(model.get_additional_losses, "__func__", None) is not default
        self._sums: dict[str, torch.Tensor] = {}
        self._names: list[str] | None = None
        if self._given:
            model.chunks.loss_noted = self._note

    def begin(self) -> None:
        """Before a step."""
        self._sums.clear()

    def means(self, micro_batches: int) -> dict[str, torch.Tensor] | None:
        """Mean of each over micro-batches and replicas, float32 scalars, on every rank; None without any.

        A collective call over all ranks.

        Raises:
            ModelError: The losses have other names than before, or than on other replicas.
        """
        if not self._given:
            return None
        if self._names is None:
            self._names = self._agree()
        groups = self._model.groups
        # The last number says whether anybody has other names.
        total = torch.zeros(len(self._names) + 1, dtype=torch.float32, device=self._model.device)
        if self._is_last and sorted(self._sums) != self._names:
            total[-1] = 1
        elif self._is_last and groups.tp_rank == 0 and self._names:
            values = torch.stack([self._sums[name] for name in self._names])
            total[:-1] = values / (micro_batches * groups.mesh.dp)
        dist.all_reduce(total)
        if total[-1]:
            raise ModelError(
                "PipelineModule.get_additional_losses()",
                f"it gave {', '.join(self._names) or 'nothing'} at first, and other names later or elsewhere",
                "give losses of the same names for every micro-batch",
            )
        return dict(zip(self._names, total[:-1].unbind(), strict=True)) or None

    @property
    def _is_last(self) -> bool:
        stages = self._model.stage_map
        return self._model.groups.pp_rank == stages.rank_of(stages.num_stages - 1)

    def _agree(self) -> list[str]:
        """The names on the last stage of the first replica."""
        found: list[list[str] | None] = [None] * self._model.groups.mesh.size
        dist.all_gather_object(found, sorted(self._sums) if self._is_last else None)
        return next(names for names in found if names is not None)

    def _note(self) -> None:
        for name, value in (self._model.get_additional_losses() or {}).items():
            loss = value.detach().float().reshape(())
            self._sums[name] = self._sums[name] + loss if name in self._sums else loss
