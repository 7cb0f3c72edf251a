"""A run's memory beside its estimate: the check before anything is built, and the peak that was reached."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

from dsx.config.run import RunConfig
from dsx.errors import ConfigError
from dsx.launch.entry import ALONE, announce, local_rank, local_world_size, rank
from dsx.memory.meter import StorageMeter
from dsx.terminal import amount
from dsx.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dsx.memory.estimate import Estimate, RunMemory
    from dsx.memory.layer_record import DeviceKind
    from dsx.models.flops import Precision
    from dsx.parallel.groups import Groups

COUNTED_STEP = 2
"""Of a process on a CPU: the first step makes the optimizer's states, the second is like all that follow."""


def check_memory(config: RunConfig) -> None:
    """Compare the estimate of the fullest rank with the memory that a rank has, before anything is built.

    ``dsx.memory_check`` says what happens if it does not fit: a warning, or a refusal. What a config leaves
    to be measured (``dsx.profile``) is taken as it stands before.

    The first rank of each machine does this, as in :func:`dsx.recipe.prepare_data`.

    Raises:
        ConfigError: It does not fit, or is not known to, and ``dsx.memory_check`` is "refuse".
    """
    how = config.dsx.memory_check
    if local_rank() != 0 or how == "off" or config.dsx.recompute == "auto":
        return
    with Waiting("estimating the memory", quiet=rank() != 0):
        memory, capacity = estimated(config), capacity_bytes()
    if isinstance(memory, Exception):
        if how == "refuse":
            raise memory
        announce(f"warning: memory is not checked: {memory}")
        return
    if memory.peak_bytes <= capacity:
        return
    fullest = memory.highest
    where = f"memory of pipeline rank {fullest.pp_rank}"
    when = fullest.estimate.peak.when
    what = f"its peak is estimated at {amount(memory.peak_bytes)} ({when}), and a rank has {amount(capacity)}"
    fix = (
        "`dsx estimate CONFIG --gpus N --gpu-memory GIB` prints what takes it and which changes make it fit; "
        'dsx.memory_check "warn" or "off" lets it run'
    )
    if how == "refuse":
        error = ConfigError(where, what, fix)
        error.add_note(ALONE)
        raise error
    announce(f"warning: {where}: {what}. {fix}.")


def estimated(config: RunConfig) -> RunMemory | Exception:
    """The run's memory on this kind of device, or why it is unknown."""
    from dsx.memory.estimate import estimate_run  # here: a run that does not look needs none of it
    from dsx.memory.job import job_of

    try:
        return estimate_run(job_of(config, device=device_kind(), capacity_bytes=capacity_bytes()))
    except Exception as unknown:  # noqa: BLE001 (no run ends because its estimate cannot be made)
        return unknown


def device_kind() -> DeviceKind:
    """``cuda`` or ``cpu``, whose code paths the estimate follows."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def capacity_bytes() -> int:
    """What one rank of this machine can have: its GPU's memory, or its share of the host's."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(local_rank() % torch.cuda.device_count()).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world_size()


def describe(memory: RunMemory | Exception, precision: Precision = "fp32") -> str:
    """The estimate in a line of a run's start; in bf16 on a CPU with what a process holds besides."""
    if isinstance(memory, Exception):
        return f"not estimated: {str(memory).partition(chr(10))[0]}"
    where = f"pipeline rank {memory.highest.pp_rank}"
    told = f"estimated peak {amount(memory.peak_bytes)} on {where} ({memory.highest.estimate.peak.when})"
    told += f", {memory.supposed}" if memory.supposed else ""
    if device_kind() == "cuda" or precision != "bf16":
        return told
    from dsx.memory.table import beyond_tensors  # here: other runs need none of it

    return f"{told}; not counted: {beyond_tensors('cpu', precision)}"


def beside(peaks: Mapping[str, int], memory: RunMemory, by_pp_rank: Sequence[int] = ()) -> str | None:
    """The peaks that were reached, and how far off the estimates were; None if nothing is known.

    Args:
        peaks: Of the fullest rank: :meth:`PeakMemory.peaks`.
        memory: The estimate.
        by_pp_rank: Of the fullest rank of each pipeline coordinate: :attr:`PeakMemory.by_pp_rank`.
    """
    reached = peaks.get("peak_allocated_bytes")
    if reached is None:
        return None
    reserved = peaks.get("peak_reserved_bytes")
    room = "" if reserved is None else f", {amount(reserved)} reserved"
    from dsx.memory.islands import OUTER_STEP  # here: other runs need none of it

    if reserved is None and memory.highest.estimate.peak.name == OUTER_STEP:
        # On a CPU one step is counted, in which no round is, and a round's thread would not be.
        what = f"peak {amount(reached)} without rounds between islands"
        return f"{what}; estimated {amount(memory.peak_bytes)} with them"
    estimated = {role.pp_rank: _peak(role.estimate, steps_alone=reserved is None) for role in memory.roles}
    found = [
        (role.pp_rank, got, estimated[role.pp_rank])
        for role, got in zip(memory.roles, by_pp_rank, strict=False)
        if got
    ]
    if len(found) < 2:
        most = max(estimated.values())
        return f"peak {amount(reached)}{room}; estimated {amount(most)} ({most / reached - 1:+.1%})"
    room = "" if reserved is None else f"; {amount(reserved)} reserved at most"
    if len(found) <= _FEW:
        return f"peak on pipeline rank {', '.join(map(_of_rank, found))}{room}"
    offs = [due / got - 1 for _, got, due in found]
    least = min(got for _, got, _ in found)
    told = f"peak {amount(least)} to {amount(reached)} on {len(found)} pipeline ranks{room}"
    told += f"; estimates {min(offs):+.1%} to {max(offs):+.1%}; "
    far = sorted((one for one in found if abs(one[2] / one[1] - 1) > _USUAL), key=lambda one: one[2] / one[1])
    if not far:
        return f"{told}fullest {_of_rank(max(found, key=lambda one: one[1]))}"
    more = f" and {len(far) - _FEW} more" if len(far) > _FEW else ""
    return f"{told}further off than {_USUAL:.0%}: {', '.join(map(_of_rank, far[:_FEW]))}{more}"


def _peak(estimate: Estimate, *, steps_alone: bool) -> int:
    """On a CPU a step is counted, and not the building before it."""
    steps = [phase.peak_bytes for phase in estimate.phases if phase.name.startswith("step")]
    return max(steps) if steps_alone and steps else estimate.peak.peak_bytes


def _of_rank(one: tuple[int, int, int]) -> str:
    pp_rank, reached, estimated = one
    return f"{pp_rank}: {amount(reached)} (estimated {amount(estimated)}, {estimated / reached - 1:+.1%})"


_FEW = 4
"""So many pipeline ranks are all named."""

_USUAL = 0.02
"""How far estimates are off at most, nearly always (tools/RESULTS.md)."""


class PeakMemory:
    """The highest memory of this rank's training steps.

    On a GPU the allocator knows it. On a CPU the tensors of one step, the second of the process, are counted:
    counting takes about as long again as the step itself. In fp16 it is the first that updates the weights as
    the one before it has.

    Args:
        device: Where tensors are counted.
        groups: This rank's; None for one process.

    Attributes:
        by_pp_rank: Allocated bytes of the fullest rank of each pipeline coordinate, as last asked for.
    """

    def __init__(self, device: torch.device, groups: Groups | None = None) -> None:
        self._device = device
        self._place = (0, 1) if groups is None else (groups.pp_rank, groups.mesh.pp)
        self.by_pp_rank: list[int] = []
        self._meter: StorageMeter | None = None
        self._steps = 0
        self._counted = 0

    def before_step(self, *, counts: bool = True) -> None:
        """Called when a step begins; without ``counts``, nothing may slow it down."""
        self._steps += 1
        due = self._steps >= COUNTED_STEP and not self._counted and counts
        if self._device.type == "cpu" and due:
            self._meter = StorageMeter("cpu")
            for tensor in _tensors():
                if tensor.device.type == "cpu":
                    self._meter.add(tensor)
            self._meter.__enter__()

    def after_step(self, *, updated: bool = True) -> None:
        """Called when the step is over; one that has not ``updated`` the weights does not count."""
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            if updated:
                self._counted = self._meter.peak_bytes.get("", 0)  # nothing if no tensor lives
            self._meter = None

    def peaks(self) -> dict[str, int]:
        """``peak_allocated_bytes`` and, on a GPU, ``peak_reserved_bytes`` of the fullest rank so far.

        Empty while a CPU has not counted yet. A collective call over all ranks.
        """
        if self._device.type == "cpu":
            mine = [self._counted]
        else:
            accelerator = get_accelerator()
            mine = [accelerator.max_memory_allocated(), accelerator.max_memory_reserved()]
        pp_rank, pp = self._place
        peaks = torch.zeros(len(mine), pp, dtype=torch.float64, device=self._device)
        peaks[:, pp_rank] = torch.tensor(mine, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        of_ranks = [[int(value) for value in values] for values in peaks.tolist()]
        self.by_pp_rank = of_ranks[0]
        names = ("peak_allocated_bytes", "peak_reserved_bytes")
        return {name: max(values) for name, values in zip(names, of_ranks, strict=False) if any(values)}


def _tensors() -> Iterator[torch.Tensor]:
    """Every tensor that Python knows, and their gradients, but those without memory that compilers keep.

    What a vmap that failed has left around tensors has no memory of its own either.
    """
    for thing in gc.get_objects():
        # Not isinstance: some objects answer for their class with code of their own.
        kind = type(thing)
        if (
            issubclass(kind, torch.Tensor)
            and not issubclass(kind, FakeTensor)
            and not is_functorch_wrapped_tensor(thing)
        ):
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad
