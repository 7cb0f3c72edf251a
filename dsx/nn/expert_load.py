"""How many tokens each expert of a layer is sent, counted where a block's modules of experts are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dsx.nn.experts import add_counts
from dsx.nn.parallel import uncompiled


class Tally:
    """The counts of one module of experts, whose calls in training it sees by a hook of the module.

    What backward computes again is not counted again.

    Args:
        number: Of the block, from 0.
        module: Called with the hidden states, and of each token weights and the numbers of its experts, the
            only tensor of integers.
        experts: E, of all ranks that hold them together.
        bias: Path in the block of the buffer [E] by which its router chooses; None without one.
        device: Of the counts.

    Attributes:
        counts: int64 [E + 1]: choices of each expert, and of none (E), since they were last set to zero.
    """

    def __init__(self, number: int, module: nn.Module, experts: int, bias: str | None, device: Any) -> None:
        self.number, self.bias = number, bias
        self.counts = torch.zeros(experts + 1, dtype=torch.int64, device=device)
        module.register_forward_pre_hook(
            lambda *called: uncompiled(self._count, *called) if called[0].training else None, with_kwargs=True
        )

    @property
    def name(self) -> str:
        """``block.path`` of its bias."""
        return f"{self.number}.{self.bias}"

    def _count(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() >= 0:  # noqa: SLF001 (in backward, as torch's FSDP asks)
            return
        tensors = (each for each in (*given, *named.values()) if isinstance(each, Tensor))
        chosen = next(each for each in tensors if not each.is_floating_point()).flatten().long()
        add_counts(self.counts, chosen)
