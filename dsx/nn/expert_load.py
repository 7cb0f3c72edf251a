"""How many tokens each expert of a layer is sent, counted where a block's modules of experts are called.

Shapes: E experts of a module, of all ranks that hold them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Tally:
    """The counts of one module of experts, whose calls it sees by a hook of the module.

    Args:
        module: The module, called with the hidden states, and of each token weights and the numbers of its
            experts, the only tensor of integers.
        name: Its layer's name in metrics.
        experts: E.
        device: Of the counts.

    Attributes:
        counts: int64 [E + 1]: choices of each expert, and of none (E), since they were last set to zero.
        counting: Whether calls are counted.
    """

    def __init__(self, module: nn.Module, name: str, experts: int, device: torch.device | str | None) -> None:
        self.name, self.experts, self.counting = name, experts, False
        self.counts = torch.zeros(experts + 1, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        module.register_forward_pre_hook(self._called, with_kwargs=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tally:
        """Itself: a copied module counts where the first one does, as its hook would."""
        return self

    def _called(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self.counting:
            return
        tensors = (each for each in (*given, *named.values()) if isinstance(each, Tensor))
        chosen = next(each for each in tensors if not each.is_floating_point()).flatten().long()
        # No bincount, for which the host would wait. The ones are one element, so that nothing is allocated.
        self.counts.scatter_add_(0, chosen, self._one.expand(len(chosen)))


@contextmanager
def counted(tallies: Sequence[Tally], *, training: bool) -> Iterator[None]:
    """Inside the block, calls are counted: in training, and not when backward computes them again."""
    counting = training and torch._C._current_graph_task_id() < 0  # noqa: SLF001 (as torch's FSDP asks)
    for tally in tallies:
        tally.counting = counting
    try:
        yield
    finally:
        for tally in tallies:
            tally.counting = False
