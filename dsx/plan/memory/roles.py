"""A whole run's memory: one estimate for all ranks that hold and do the same."""

from __future__ import annotations

from dataclasses import dataclass

from dsx.plan.memory.estimate import Estimate, Job, estimate
from dsx.plan.receives import receive_plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Ranks of one pipeline coordinate; tensor- and data-parallel peers differ by padding at most.

    Attributes:
        pp_rank: Their pipeline coordinate.
        ranks: Global ranks.
        estimate: Of the first of them.
    """

    pp_rank: int
    ranks: tuple[int, ...]
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """Memory of every rank.

    Attributes:
        roles: By pipeline coordinate.
    """

    roles: tuple[Role, ...]

    @property
    def highest(self) -> Role:
        """The role with the highest peak; the first of equals."""
        return max(self.roles, key=lambda role: role.estimate.peak.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The highest rank's peak."""
        return self.highest.estimate.peak.peak_bytes


def estimate_run(job: Job) -> RunMemory:
    """Estimates of all ranks of ``job``."""
    mesh = job.layout.mesh
    ranks: dict[int, list[int]] = {}
    for rank in range(mesh.size):
        ranks.setdefault(mesh.coords(rank)["pp"], []).append(rank)
    return RunMemory(
        roles=tuple(
            Role(
                pp_rank=pp_rank,
                ranks=tuple(ranks[pp_rank]),
                estimate=estimate(job, ranks[pp_rank][0], receives=receives),
            )
            for pp_rank, receives in enumerate(receive_plans(job.schedule))
        )
    )
