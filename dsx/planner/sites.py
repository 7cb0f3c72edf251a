"""One job over all sites of a cluster, beside islands of the best layout of a site."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dsx.errors import DsxError
from dsx.planner.cluster import Cluster
from dsx.planner.inputs import Calibration, Fixed, PlanInputs, plan_search
from dsx.planner.islands import NEAR, PAYS, IslandTask, Terms
from dsx.planner.plan import Plan, Ranked, Search
from dsx.terminal import amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was found of both.

    Attributes:
        cluster: With its sites.
        one: The best layout of one job over all sites; None if none can be run, by ``refusal``.
        refusal: Why not.
        task: Islands of the best layout of a site.
        terms: How they meet.
        given: Whether the config says so.
        global_batch: Samples of a step, over all sites.
        length: Tokens of a sample.
    """

    cluster: Cluster
    one: Ranked | None
    refusal: str
    task: IslandTask
    terms: Terms
    given: bool
    global_batch: int
    length: int

    @property
    def tokens_per_second(self) -> float:
        """Of the islands together."""
        return self.global_batch * self.length / self.task.mean_step_seconds(self.terms)

    @property
    def one_tokens_per_second(self) -> float:
        """Of one job; 0 if there is none."""
        return 0.0 if self.one is None else self.global_batch * self.length / self.one.time.seconds

    @property
    def pays(self) -> bool:
        """Whether islands train so much faster that they are worth a little loss."""
        return self.tokens_per_second > PAYS * self.one_tokens_per_second

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        task, terms = self.task, self.terms
        return {
            "sites": self.cluster.sites,
            "one_job": None
            if self.one is None
            else {
                "layout": self.one.layout.label,
                "step_seconds": self.one.time.seconds,
                "tokens_per_second": self.one_tokens_per_second,
            },
            "islands": {
                "every": terms.every,
                "wire": terms.wire,
                "shares": terms.shares,
                "delay": terms.delay,
                "given": self.given,
                "step_seconds": task.step_seconds,
                "round_seconds": task.round_seconds(terms),
                "round_bytes": round(task.sent_bytes(terms) / terms.shares),
                "tokens_per_second": self.tokens_per_second,
                "of_speed_without_link": task.speed(terms),
                "near_from_every": task.near_from(terms),
            },
            "islands_pay": self.pays,
        }

    def text(self) -> list[str]:
        """In words."""
        link, task, terms = self.cluster.across, self.task, self.terms
        assert link is not None, "there are several sites"
        megabits = f"{link.bytes_per_second * 8 / 1e6:g} Mbit/s"
        lines = [
            f"{self.cluster.sites} sites, {megabits} and {1000 * link.latency_seconds:g} ms between them"
        ]
        if self.one is None:
            lines.append(f"  one job over all sites: {self.refusal}")
        else:
            lines.append(
                f"  one job over all sites: {self.one.time.seconds:.4g} s a step, "
                f"{self.one_tokens_per_second:,.0f} tokens/s ({self.one.layout.label})"
            )
        shares = f", shares {terms.shares}" if terms.shares > 1 else ""
        lines += [
            f"  an island on each, {'as written' if self.given else 'chosen'}: every {terms.every}, wire "
            f"{terms.wire}{shares}, delay {terms.delay}: {self.tokens_per_second:,.0f} tokens/s, "
            f"{task.speed(terms):.1%} of the speed over a link that costs nothing",
            f"  a round sends {amount(task.sent_bytes(terms) / terms.shares)} from each site, and takes "
            f"{task.round_seconds(terms):.4g} s; every >= {task.near_from(terms)} gives {NEAR:.0%} of that speed",
        ]
        if not self.pays:
            lines.append("islands do not pay here: one job over all sites is about as fast, or faster")
            return lines
        faster = self.tokens_per_second / self.one_tokens_per_second if self.one is not None else None
        words = "" if faster is None else f": {faster:.3g}x the tokens/s of one job"
        lines.append(
            f"islands pay{words}. Their loss after the same tokens may differ a little from one job's"
        )
        return lines


def compare(
    joined: PlanInputs,
    site: tuple[PlanInputs, Search, Plan],
    cluster: Cluster,
    fixed: Fixed,
    measured: Calibration | None,
) -> tuple[Comparison, Search | None]:
    """One job beside islands, and the search that found the job's layout.

    Args:
        joined: What one job over all sites would train.
        site: What an island trains, the search for its layout, and what that found.
        cluster: With its sites.
        fixed: What is not to be chosen.
        measured: Rates of the GPUs in place of the cluster's usual ones.
    """
    inputs, search, found = site
    assert cluster.across is not None, "there are several sites"
    if measured is not None:
        whole = replace(measured.cluster, sites=cluster.sites, across=cluster.across).joined(joined.gpus)
        measured = replace(measured, cluster=whole)
    one: Ranked | None = None
    refusal, over_all = "", None
    try:
        over_all = plan_search(joined, fixed, measured, looked=search.looked)
        one = over_all.run(1).best[0]
    except DsxError as error:
        refusal, over_all = str(error).partition("\n")[0], None
    link = cluster.across
    task = IslandTask.of(
        search.predictor,
        found.best[0].layout,
        cluster.sites,
        (link.bytes_per_second, link.latency_seconds),
    )
    given = joined.outer
    terms = task.chosen()
    if given is not None:
        terms = Terms(every=given.every, wire=given.wire, shares=given.shares, delay=given.delay)
    comparison = Comparison(
        cluster=cluster,
        one=one,
        refusal=refusal,
        task=task,
        terms=terms,
        given=given is not None,
        global_batch=joined.global_batch,
        length=inputs.run.sequence_length,
    )
    return comparison, over_all


def outer_block(joined: PlanInputs, comparison: Comparison) -> dict[str, Any]:
    """``dsx.outer`` of the islands: what is written, or what was chosen."""
    if joined.outer is not None:
        return joined.outer.model_dump(mode="json", exclude_defaults=True)
    terms = comparison.terms
    return {
        "islands": comparison.cluster.sites,
        "every": terms.every,
        "wire": terms.wire,
        **({"delay": terms.delay} if terms.delay else {}),
    }
