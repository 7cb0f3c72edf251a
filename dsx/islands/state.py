"""What an island's rank keeps between rounds: the weights that all islands had last, and their momentum."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsx.engine.zero.held import Held, held
from dsx.parallel.islands import OUTER_ERROR, OUTER_MOMENTUM, OUTER_STATES, OUTER_WEIGHTS, cut


@dataclass(frozen=True, slots=True)
class Range:
    """Elements ``start`` to ``stop`` of master number ``part``, which are of one parameter."""

    part: int
    start: int
    stop: int
    parameter: nn.Parameter


class OuterState:
    """fp32 copies on the host of all masters of a rank, cut into the shares that have rounds of their own.

    Args:
        engine: The DeepSpeedEngine.
        shares: Number of shares. Each has its part of every parameter.
        settings: Of the outer optimizer: lr, momentum, nesterov.
        carries_errors: Whether the wire rounds so that what it keeps back is carried on.
    """

    def __init__(self, engine: Any, *, shares: int, settings: dict[str, Any], carries_errors: bool) -> None:
        self._parts: tuple[Held, ...] = held(engine)
        names = OUTER_STATES if carries_errors else (OUTER_WEIGHTS, OUTER_MOMENTUM)
        self._kept = {
            name: [torch.zeros(part.master.numel()) for part in self._parts] for name in names
        }
        self.ranges = tuple(self._ranges(share, shares) for share in range(shares))
        self.lock = threading.Lock()
        self._optimizer = torch.optim.SGD(
            [
                {"params": [nn.Parameter(view) for view in self._views(OUTER_WEIGHTS, ranges)]}
                for ranges in self.ranges
            ],
            **settings,
        )
        for group, ranges in zip(self._optimizer.param_groups, self.ranges, strict=True):
            for parameter, buffer in zip(group["params"], self._views(OUTER_MOMENTUM, ranges), strict=True):
                self._optimizer.state[parameter]["momentum_buffer"] = buffer

    @property
    def sizes(self) -> list[list[int]]:
        """Elements of every piece of each share."""
        return [[r.stop - r.start for r in ranges] for ranges in self.ranges]

    def of(self, part: Held) -> dict[str, Tensor]:
        """The states of one master, as large as it and flattened, by name."""
        at = next(at for at, mine in enumerate(self._parts) if mine.master is part.master)
        return {name: tensors[at] for name, tensors in self._kept.items()}

    def begin(self) -> None:
        """Take the weights of now for those that all islands had last, without momentum."""
        for ranges in self.ranges:
            for view, value in zip(self._views(OUTER_WEIGHTS, ranges), self.read(ranges), strict=True):
                view.copy_(value)
        for name in (OUTER_MOMENTUM, OUTER_ERROR):
            for tensor in self._kept.get(name, ()):
                tensor.zero_()

    def read(self, ranges: Sequence[Range]) -> list[Tensor]:
        """What masters are in ``ranges``: fp32 on the host."""
        if not ranges:
            return []
        masters = [part.master.detach().view(-1) for part in self._parts]
        flat = torch.cat([masters[r.part][r.start : r.stop] for r in ranges]).float().cpu()
        return list(flat.split([r.stop - r.start for r in ranges]))

    @torch.no_grad()
    def write(self, ranges: Sequence[Range], values: Sequence[Tensor]) -> None:
        """Make masters in ``ranges`` what ``values`` are. The model's weights are still to be refreshed."""
        if not ranges:
            return
        masters = [part.master.detach().view(-1) for part in self._parts]
        device = masters[0].device
        moved = torch.cat(list(values)).to(device).split([value.numel() for value in values])
        for r, value in zip(ranges, moved, strict=True):
            masters[r.part][r.start : r.stop].copy_(value)

    def weights(self, share: int) -> list[Tensor]:
        """The weights that all islands had last: views."""
        return self._views(OUTER_WEIGHTS, self.ranges[share])

    def momentum(self, share: int) -> list[Tensor]:
        """The outer momentum: views."""
        return self._views(OUTER_MOMENTUM, self.ranges[share])

    def errors(self, share: int) -> list[Tensor]:
        """What rounding has kept back: views; empty if nothing is carried on."""
        return self._views(OUTER_ERROR, self.ranges[share]) if OUTER_ERROR in self._kept else []

    def step(self, share: int, gradients: Sequence[Tensor]) -> None:
        """Move the common weights of a share by the outer optimizer.

        Args:
            share: Which.
            gradients: Weights before minus weights after, the mean over islands.
        """
        parameters = self._optimizer.param_groups[share]["params"]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _views(self, name: str, ranges: Sequence[Range]) -> list[Tensor]:
        tensors = self._kept[name]
        return [tensors[r.part][r.start : r.stop] for r in ranges]

    def _ranges(self, share: int, shares: int) -> tuple[Range, ...]:
        """A share's part of every span, so that ranks which hold the same parameter cut it alike."""
        found = []
        for index, part in enumerate(self._parts):
            for span in part.spans:
                low, high = cut(0, span.stop - span.start, share, shares)
                if high > low:
                    found.append(Range(index, span.offset + low, span.offset + high, span.parameter))
        return tuple(found)
