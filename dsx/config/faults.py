"""``dsx.faults``: what a run watches for, and what it does about it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dsx.config.block import Block

Policy = Literal["off", "stop", "skip", "roll_back"]
StopSignal = Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"]


class FaultsConfig(Block):
    """What ends, pauses or mends a run.

    Policies: stop ends the run with an error, the bad step not saved; skip does not apply the step and goes
    on with the next data; roll_back loads the newest checkpoint of the run and goes on with the data behind
    the bad batch.
    """

    hang_seconds: float = Field(
        default=1200.0,
        ge=0,
        description="End the run with a report when a rank has not moved for so long: no action of the "
        "schedule, no save, no load. 0: wait for ever. Peers that fail or die end it within seconds anyway.",
    )
    silent_seconds: int = Field(
        default=4,
        ge=0,
        description="End the run when a machine has answered nothing for so long. Its kernel answers, so a "
        "rank that computes, compiles or is stopped is not silent. Raise it for a network that pauses for "
        "longer. 0: only the broken connections of training itself are noticed, perhaps after minutes.",
    )
    stop_signals: tuple[StopSignal, ...] = Field(
        default=("SIGTERM",),
        strict=False,  # JSON has lists
        description="Signals, to any one rank, at which the run saves after the step under way and ends with "
        "128 + the signal's number. Empty: they kill.",
    )
    grace_seconds: float = Field(
        default=28.0,
        gt=0,
        description="From such a signal to the end, saved or not. Launchers, Slurm and Kubernetes kill after "
        "30 seconds unless they are told otherwise.",
    )
    nonfinite: Policy = Field(default="stop", description="When loss or gradient norm is NaN or infinite.")
    loss_spike: Policy = Field(
        default="off", description="When the loss lies spike_sigmas above the median of spike_window steps."
    )
    grad_norm_spike: Policy = Field(default="off", description="Likewise for the gradient norm.")
    spike_window: int = Field(
        default=128, ge=8, description="Steps that spikes are measured by, from half of them on."
    )
    spike_sigmas: float = Field(
        default=8.0,
        gt=0,
        description="In standard deviations, as estimated by the median absolute deviation x 1.4826.",
    )
    most_skips: int = Field(default=10, ge=1, description="End the run when more steps are skipped in a row.")
    most_roll_backs: int = Field(default=3, ge=0, description="End the run at one more, restarts included.")
    check_replicas_every: int = Field(
        default=0,
        ge=0,
        description="Steps between comparisons of what data- and tensor-parallel ranks hold alike, bit by "
        "bit. 0: never.",
    )
    replicas_differ: Literal["stop", "roll_back"] = Field(
        default="stop", description="When they find a difference."
    )

    @property
    def rolls_back(self) -> str | None:
        """The first policy that takes the run back to a checkpoint, of what is looked for."""
        keys = ("nonfinite", "loss_spike", "grad_norm_spike", "replicas_differ")
        looked_for = keys if self.check_replicas_every else keys[:-1]
        return next((key for key in looked_for if getattr(self, key) == "roll_back"), None)
