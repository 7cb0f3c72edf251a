"""What ZeRO-Offload moves to the host: settings, and the host's own ledger.

The device keeps parameters (or, with parameters offloaded, none between uses) and the reduce bucket. The host
keeps fp32 masters, their gradients, the moments and, at ZeRO-3, the partitions that gradients add up in.
Gradients go there parameter by parameter, by way of the device, where they are added up and squared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsx.plan.memory.tape import Label, Ledger, Storage, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """``offload_optimizer`` and ``offload_param``, of which dsx runs ``"device": "cpu"``.

    Attributes:
        optimizer: Whether the optimizer's state and its update are on the host.
        parameters: Whether partitions of parameters are (ZeRO-3).
        pinned: ``offload_optimizer.pin_memory``.
        pinned_parameters: ``offload_param.pin_memory``.
        ratio: ``offload_optimizer.ratio``, ZeRO-3: sub-groups on the host, of all; the first stay behind.
        state_bytes: What the update keeps for each element there.
        step_bytes: What the update takes besides, for each element of a group: torch's Adam on a CPU 8,
            DeepSpeed's nothing.
        rounds: Whether pinned memory comes in powers of two (torch's CachingHostAllocator does that).
        unified: Whether the device is the host: a run on CPUs, where nothing has to be moved or pinned.
    """

    optimizer: bool = False
    parameters: bool = False
    pinned: bool = True
    pinned_parameters: bool = False
    ratio: float = 1.0
    state_bytes: int = 0
    step_bytes: int = 0
    rounds: bool = True
    unified: bool = False


class Host:
    """The host's memory of one rank.

    Args:
        offload: Whether pinned memory is rounded, and whether the host's memory is the device's.
        device: The device's ledger.
    """

    def __init__(self, offload: Offload | None, device: Ledger) -> None:
        self._unified = offload is not None and offload.unified
        self.ledger = device if self._unified else Ledger()
        self._rounds = offload is not None and offload.rounds

    def new(
        self, category: str, name: str, formula: str, source: str, size_bytes: int, *, pinned: bool
    ) -> Tensor:
        """A flat tensor of so many bytes; page-locked ones take the next power of two."""
        if pinned and self._rounds and size_bytes:
            size_bytes = 1 << (size_bytes - 1).bit_length()
            formula += ", rounded up to a power of two"
        what = Label(category, name, formula, source)
        return Tensor((size_bytes,), 1, Storage(self.ledger, what, size_bytes))

    def pinned(
        self, category: str, name: str, formula: str, source: str, size_bytes: int, *, pin: bool
    ) -> Tensor:
        """Like :meth:`new`; ``pin`` copies from pageable memory, which is there until the copy is."""
        pageable = self.new(
            "temporaries", f"{name}, before pinning", formula, source, size_bytes, pinned=False
        )
        if not pin or self._unified:
            del pageable
            return self.new(category, name, formula, source, size_bytes, pinned=False)
        locked = self.new(category, name, formula, source, size_bytes, pinned=True)
        del pageable
        return locked

    def taken(self, source: str, elements: Sequence[int], step_bytes: int) -> None:
        """The temporaries of an update, group after group."""
        for size in elements:
            self.new("temporaries", "update", f"{step_bytes} P/N", source, size * step_bytes, pinned=False)
