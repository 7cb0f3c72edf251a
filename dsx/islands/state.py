"""What an island's rank keeps between rounds: the weights that all islands had last, and their momentum."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from dsx.engine.zero.master_shards import MasterShard, master_shards
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

    Attributes:
        ranges: Of each share, the pieces of masters that it is made of.
        sizes: Elements of these.
        lock: Held while the states change.
    """

    def __init__(self, engine: Any, *, shares: int, settings: dict[str, Any], carries_errors: bool) -> None:
        self._parts: tuple[MasterShard, ...] = master_shards(engine)
        names = OUTER_STATES if carries_errors else (OUTER_WEIGHTS, OUTER_MOMENTUM)
        self._kept = {name: [torch.zeros(part.master.numel()) for part in self._parts] for name in names}
        self.ranges = tuple(self._ranges(share, shares) for share in range(shares))
        self.sizes = [[r.stop - r.start for r in ranges] for ranges in self.ranges]
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

    def of(self, part: MasterShard) -> dict[str, Tensor]:
        """The states of one master, as large as it and flattened, by name."""
        at = next(at for at, mine in enumerate(self._parts) if mine.master is part.master)
        return {name: tensors[at] for name, tensors in self._kept.items()}

    def begin(self) -> None:
        """Take the weights of now for those that all islands had last, without momentum."""
        for share in range(len(self.ranges)):
            for view, value in zip(self.weights(share), self.read(share), strict=True):
                view.copy_(value)

    def digest(self) -> str:
        """A short name for the weights that all islands had last, as this rank holds them."""
        digest = xxhash.xxh3_128()
        for tensor in self._kept[OUTER_WEIGHTS]:
            digest.update(tensor.numpy().data)
        return digest.hexdigest()

    def read(self, share: int) -> list[Tensor]:
        """The masters of a share as they are, by piece: fp32 on the host, copies."""
        ranges = self.ranges[share]
        if not ranges:
            return []
        masters = self._masters()
        flat = torch.cat([masters[r.part][r.start : r.stop] for r in ranges]).float().cpu()
        return list(flat.split(self.sizes[share]))

    @torch.no_grad()
    def write(self, share: int, values: Sequence[Tensor]) -> None:
        """Set the masters of a share. What the model computes with is still to be made of them."""
        if not values:
            return
        masters = self._masters()
        moved = torch.cat(list(values)).to(masters[0].device).split(self.sizes[share])
        for r, value in zip(self.ranges[share], moved, strict=True):
            masters[r.part][r.start : r.stop].copy_(value)

    def shift(self, share: int, since: Sequence[Tensor]) -> None:
        """Put the common weights under what the masters of a share have moved since they were ``since``."""
        triples = zip(self.weights(share), self.read(share), since, strict=True)
        # What has not moved becomes the common weight itself, which a sum might round.
        moved = [torch.where(now == then, common, common + (now - then)) for common, now, then in triples]
        self.write(share, moved)

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

    def _masters(self) -> list[Tensor]:
        return [part.master.detach().view(-1) for part in self._parts]

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
