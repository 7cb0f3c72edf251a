"""Checks that the gradients of what every tensor-parallel rank holds whole are the same on all of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dsx.errors import ModelError
from dsx.launch.entry import AGREED
from dsx.parallel.groups import Groups

_ALIKE = 1e-3
"""Least relative difference that is not rounding; eight units in the last place of coarser data types."""
_FAINT = 1e-4
"""Share of the largest root mean square below which a gradient may be rounding alone, at most; in finer data
types than bf16 it is 32 units in the last place."""
_GROWN = 16.0
"""A gradient that was too faint to judge is looked at again when its square is this many times larger."""
_DOUBTS = 3
"""Comparisons in a row at which a faint gradient differs before there is a warning."""
_AT_LEAST_EVERY = 1024
_SHOWN = 3
_TILE = 1 << 22


class GradientPart(NamedTuple):
    """A parameter's gradient, or this rank's part of it.

    Attributes:
        gradient: The elements of the flattened gradient from ``start`` on.
        start: 0 where the gradient is whole.
    """

    parameter: nn.Parameter
    gradient: torch.Tensor
    start: int = 0


Parts = Iterable[GradientPart]


class ReplicaGradients:
    """Compares replicas' gradients over tensor parallelism: by their norms and by a random projection.

    All replicas are compared in steps 1, 2, 4, 8, ... 1024 and every 1024th from there on. A gradient that
    was zero, or too faint to be told from rounding, is compared as soon as it is more: each rank adds to the
    all-reduce of the norm whether it has such a one, so that all know without a collective of its own.
    The projection takes each element's sign from a hash of its place, so that ranks that cut a parameter for
    ZeRO in other ways still have the same sum.

    Args:
        replicas: The parameters with their names, in the same order on all tensor-parallel ranks.
    """

    def __init__(self, groups: Groups, replicas: Mapping[nn.Parameter, str]) -> None:
        self._groups, self._names = groups, tuple(replicas.values())
        self._place = {parameter: at for at, parameter in enumerate(replicas)}
        spacing = [torch.finfo(p.dtype).eps if p.is_floating_point() else 0.0 for p in replicas]
        precision = torch.tensor(spacing, dtype=torch.float32)
        self._tolerance = (8 * precision).clamp(min=_ALIKE)
        self._faint = (32 * precision).clamp(max=_FAINT)
        self._numel = torch.tensor([float(getattr(p, "ds_numel", p.numel())) for p in replicas])
        # Square of this rank's part above which it asks for a comparison: none once one has counted.
        self._asks_above = torch.zeros(len(replicas))
        self._doubts = torch.zeros(len(replicas), dtype=torch.int64)
        self._steps = 0
        self._due = groups.mesh.tp > 1
        # Of all ranks, on every rank; before the first step any may have replicas.
        self._waiting = self._any = self._due

    def begin(self) -> bool:
        """Called when a step's gradients are complete; says, alike on all ranks, if they ask in its norm."""
        self._steps += 1
        often = self._steps & (self._steps - 1) == 0
        self._due |= self._any and (often or self._steps % _AT_LEAST_EVERY == 0)
        return self._any and (self._due or self._waiting)

    def asks(self, parts: Parts, device: torch.device) -> torch.Tensor:
        """Whether this rank needs a comparison: a float32 scalar on ``device``, zero if not."""
        if self._due:
            return torch.full((), float(bool(self._place)), device=device)
        waiting = self._asks_above.isfinite().tolist()
        asked = torch.zeros((), device=device)
        for part in parts:
            at = self._place.get(part.parameter)
            if at is not None and waiting[at] and part.gradient.numel():
                asked += (square(part.gradient) > self._asks_above[at].item()).to(device)
        return asked

    def answer(
        self,
        asked: bool,
        parts: Parts,
        *,
        among: dist.ProcessGroup | None,
        partitioned: bool,
        device: torch.device,
    ) -> None:
        """Compare if any rank of ``among`` asked, in which case this is a collective call.

        Raises:
            ModelError: A gradient is not the same on all tensor-parallel ranks. On every rank.
        """
        if not asked:
            self._any = self._any and not self._due  # where it is due each rank that has replicas asks
            return
        self._due = False
        # Squared norm and projection of each replica's gradient, (2, replicas), from this rank's parts.
        mine = torch.zeros(2, len(self._place), device=device)
        for part in parts:
            at = self._place.get(part.parameter)
            if at is not None and part.gradient.numel():
                mine[0, at] += square(part.gradient).to(device)
                mine[1, at] += _projection(part.gradient, part.start).to(device)
        wrong = torch.zeros(0, dtype=torch.bool)
        if self._place:
            wrong = self._compare(mine, partitioned=partitioned)
        facts = torch.stack((wrong.sum(), self._asks_above.isfinite().sum())).to(device)
        dist.all_reduce(facts, group=among)
        bad, waiting = facts.tolist()
        self._waiting = waiting > 0
        if bad:
            everywhere: list[Sequence[str]] = [() for _ in range(dist.get_world_size(among))]
            dist.all_gather_object(everywhere, tuple(compress(self._names, wrong.tolist())), group=among)
            names = list(dict.fromkeys(name for names in everywhere for name in names))
            what = f"gradient of {_listed(names)} in step {self._steps}"
            error = ModelError(what, f"it {_DIFFERS}: {_WHY}", _FIX)
            error.add_note(AGREED)
            raise error

    def _compare(self, mine: torch.Tensor, *, partitioned: bool) -> torch.Tensor:
        """The gradients that certainly differ; notes what is still to be compared."""
        own = mine[0].clone().cpu()
        if partitioned:
            dist.all_reduce(mine, group=self._groups.data)
        extremes = torch.stack((mine, -mine))
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._groups.tensor)
        (high, most), (low, least) = (extremes[0].cpu(), -extremes[1].cpu())
        apart = (high - low > self._tolerance * high) | (most - least > self._tolerance * high.sqrt())
        mean_square = high / self._numel.clamp(min=1)
        counts = mean_square > self._faint.square() * mean_square.max()
        self._asks_above = torch.where(counts, torch.inf, _GROWN * own)
        self._doubts = torch.where(apart & ~counts, self._doubts + 1, 0)
        doubtful = (self._doubts == _DOUBTS).nonzero().view(-1).tolist()
        if doubtful and self._groups.pipe_peer(0) == 0:
            warnings.warn(
                f"{_listed([self._names[at] for at in doubtful])}: the gradient {_DIFFERS}, in each of "
                f"the last {_DOUBTS} comparisons, but is so small that it may be rounding. If it is not: "
                f"{_FIX}.",
                stacklevel=2,
            )
        certain: torch.Tensor = apart & counts
        return certain


_DIFFERS = "differs between tensor-parallel ranks, which all hold the parameter"
_WHY = (
    "they saw other data, drew other dropout masks, applied it to their part of the width alone, or under "
    "sequence parallelism only to their slice of the sequence"
)
_FIX = (
    "use dsx.nn.LayerNorm, RMSNorm or copy_parameters for what each rank applies to its slice of the "
    "sequence, and copy_parameters(cut=True) for what it applies to its heads or units; give these ranks the "
    "same batches and seeds; where the layer cuts the parameter itself, set "
    "parameter.tensor_model_parallel = True"
)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" and others" if len(names) > _SHOWN else "")


def square(gradient: torch.Tensor) -> torch.Tensor:
    """Squared 2-norm, taken in fp32: a float32 scalar."""
    norm: torch.Tensor = torch.linalg.vector_norm(gradient.float())
    return norm.square()


def sum_of_squares(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Squared 2-norm of all of them, taken in fp32: a float32 scalar on ``device``."""
    # Together, because the calls are half of the time of small ones; what has to be widened, one by one.
    wide = [gradient for gradient in gradients if gradient.dtype == torch.float32]
    squares = [square(gradient).to(device) for gradient in gradients if gradient.dtype != torch.float32]
    if wide:
        norms = torch._foreach_norm(wide)  # noqa: SLF001 - torch.nn.utils' way to it
        squares.append(torch.stack([norm.to(device) for norm in norms]).square().sum())
    return torch.stack(squares).sum() if squares else torch.zeros((), device=device)


def _projection(gradient: torch.Tensor, start: int) -> torch.Tensor:
    """Sum of the elements, each with a sign of its own: bit 31 of MurmurHash3's finaliser of its place."""
    total = torch.zeros((), device=gradient.device)
    flat = gradient.reshape(-1)
    for begin in range(0, flat.numel(), _TILE):
        tile = flat[begin : begin + _TILE].float()
        bits = torch.arange(start + begin, start + begin + tile.numel(), device=tile.device)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
        total += torch.dot(tile, 1.0 - 2.0 * (bits >> 31).float())
    return total
