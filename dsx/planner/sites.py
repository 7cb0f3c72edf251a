"""One job over all sites of a cluster, beside islands of the best layout of a site."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dsx.errors import DsxError
from dsx.planner.cluster import Cluster
from dsx.planner.inputs import BestLayout, Calibration, ModelInputs, PinnedChoices, written
from dsx.planner.islands import NEAR, PAYS, IslandTask, RoundSettings
from dsx.planner.plan import Looked, looks_away
from dsx.terminal import amount

_SLACK = 0.05
"""Of the step of one job, while it is far slower than islands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteComparison:
    """What was found of both.

    Attributes:
        one: One job over all sites; None if none can be run, by ``refusal``.
        site: What an island trains.
        task: Islands of the best layout of a site.
        settings: How they meet.
        global_batch: Samples of a step, over all sites.
        length: Tokens of a sample.
    """

    cluster: Cluster
    one: BestLayout | None
    refusal: str
    site: BestLayout
    task: IslandTask
    settings: RoundSettings
    given: bool
    global_batch: int
    length: int

    @property
    def tokens_per_second(self) -> float:
        return self.global_batch * self.length / self.task.mean_step_seconds(self.settings)

    @property
    def one_tokens_per_second(self) -> float:
        """Of one job; 0 if there is none."""
        return 0.0 if self.one is None else self.global_batch * self.length / self.one.best.time.seconds

    @property
    def gain(self) -> float:
        """Tokens per second of islands over those of one job, if there is one."""
        return self.tokens_per_second / self.one_tokens_per_second

    @property
    def pays(self) -> bool:
        """Whether islands train so much faster that they are worth a little loss."""
        return self.one is None or self.gain > PAYS

    @property
    def taken(self) -> BestLayout:
        """What is faster: one job over all sites, or one of the islands; these if the config has them."""
        return self.site if self.given or self.one is None or self.pays else self.one

    def config(self, joined: ModelInputs) -> dict[str, Any]:
        """Of what is taken, with ``dsx.outer`` if that is islands."""
        content = self.taken.config()
        if self.taken is self.site:
            content["dsx"]["outer"] = self._outer(joined)
        return content

    def _outer(self, joined: ModelInputs) -> dict[str, Any]:
        """``dsx.outer`` of the islands: what is written, or what was chosen."""
        if joined.outer is not None:
            return written(joined.outer)
        settings = self.settings
        return {
            "islands": self.cluster.sites,
            "every": settings.every,
            "wire": settings.wire,
            **({"delay": settings.delay} if settings.delay else {}),
        }

    def facts(self) -> dict[str, Any]:
        task, settings = self.task, self.settings
        return {
            "sites": self.cluster.sites,
            "one_job": None
            if self.one is None
            else {
                "layout": self.one.best.layout.label,
                "step_seconds": self.one.best.time.seconds,
                "tokens_per_second": self.one_tokens_per_second,
            },
            "islands": {
                "every": settings.every,
                "wire": settings.wire,
                "shares": settings.shares,
                "delay": settings.delay,
                "given": self.given,
                "step_seconds": task.step_seconds,
                "round_seconds": task.round_seconds(settings),
                "round_bytes": round(task.sent_bytes(settings) / settings.shares),
                "tokens_per_second": self.tokens_per_second,
                "of_speed_without_link": task.speed(settings),
                "near_from_every": task.near_from(settings),
            },
            "islands_pay": self.pays,
        }

    def text(self) -> list[str]:
        link, task, settings = self.cluster.across, self.task, self.settings
        assert link is not None, "there are several sites"
        rate = f"{link.bytes_per_second * 8 / 1e6:,g} Mbit/s"
        lines = [f"{self.cluster.sites} sites, {rate} and {1000 * link.latency_seconds:g} ms between them"]
        if self.one is None:
            lines.append(f"  one job over all sites: {self.refusal}")
        else:
            lines.append(
                f"  one job over all sites: {self.one.best.time.seconds:.4g} s a step, "
                f"{self.one_tokens_per_second:,.0f} tokens/s ({self.one.best.layout.label})"
            )
        lines.append(
            f"  an island on each: {task.mean_step_seconds(settings):.4g} s a step, "
            f"{self.tokens_per_second:,.0f} tokens/s ({settings.words}{'' if self.given else '; chosen'})"
        )
        lines.append(
            f"  a round: {amount(task.sent_bytes(settings) / settings.shares)} from each site in "
            f"{task.round_seconds(settings):.4g} s; {task.speed(settings):.1%} of the speed without rounds, "
            f"{NEAR:.0%} from every {task.near_from(settings)} on"
        )
        if not self.pays:
            lines.append("islands do not pay: one job over all sites is about as fast, or faster")
            return lines
        words = ""
        if self.one is not None:
            words = f": {self.gain:.3g}x the tokens/s of one job"
        lines.append(f"islands pay{words}, for a loss that may differ a little after the same tokens")
        return lines


def compare(
    joined: ModelInputs,
    inputs: ModelInputs,
    cluster: Cluster,
    pinned: PinnedChoices,
    measured: Calibration | None,
    *,
    top: int,
    looked: Looked = looks_away,
) -> SiteComparison:
    """One job beside islands.

    ``joined`` is what one job over all sites would train, ``inputs`` what an island trains
    (:func:`~dsx.planner.inputs.site_inputs`). ``top`` meshes are looked for in each search.

    Raises:
        ConfigError: As :func:`~dsx.planner.inputs.plan_search`.
        LayoutError: No layout fits a site.
    """
    link, given = cluster.across, joined.outer
    assert link is not None, "there are several sites"
    site = BestLayout.of(inputs, pinned, measured, looked, top=top)
    if measured is not None:
        whole = replace(measured.cluster, sites=cluster.sites, across=link).joined(joined.gpus)
        measured = replace(measured, cluster=whole)
    one, refusal = None, ""
    try:
        one = BestLayout.of(joined, pinned, measured, looked, top=1, slack=_SLACK)
    except DsxError as error:
        refusal = str(error).partition("\n")[0]
    task = IslandTask.of(site.predictor, site.best.layout, cluster.sites, link)
    settings = task.chosen()
    if given is not None:
        settings = RoundSettings(every=given.every, wire=given.wire, shares=given.shares, delay=given.delay)
    found = SiteComparison(
        cluster=cluster,
        one=one,
        refusal=refusal,
        site=site,
        task=task,
        settings=settings,
        given=given is not None,
        global_batch=joined.global_batch,
        length=inputs.run.sequence_length,
    )
    if one is not None and found.gain <= PAYS * (1 + _SLACK):
        return replace(found, one=BestLayout.of(joined, pinned, measured, looked, top=top))
    return found
