"""Which mistake makes a gradient differ as it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsx.plan.parity import causes
from dsx.plan.parity.facts import Degrees, Finding, Fit, GradientFacts, Shares

_CLOSE = 0.02
"""How near a measured factor must be to a round one, relative: rounding is far below, mistakes far above."""

Said = tuple[str, str]
"""(cause, why)."""


def near(value: float, wanted: float) -> bool:
    """Whether a fitted factor is that number."""
    return abs(value - wanted) <= _CLOSE * max(1.0, abs(wanted))


def diagnose_gradients(
    wrong: Sequence[GradientFacts], right: Sequence[str], degrees: Degrees, *, step: int, loss_equal: bool
) -> Finding:
    """The finding for gradients that differ, named by the first of them.

    Args:
        wrong: Tensors that differ, in the order of the backward; at least one.
        right: Those that do not.
        degrees: Of the layout.
        step: Training step, from 1.
        loss_equal: Whether the step's loss agrees, so that forward and data are right.
    """
    first = wrong[0]
    # A tensor with few elements cannot tell the micro-batches apart.
    telling = next((facts for facts in wrong if facts.shares is not None), first)
    everywhere = not right
    rules: tuple[Callable[[], Said | None], ...] = (
        lambda: _padding(first),
        lambda: _ties(wrong),
        lambda: _tensor(wrong, degrees),
        lambda: _scaled(first, degrees, everywhere=everywhere),
        lambda: _shares(telling, degrees, loss_equal=loss_equal),
        lambda: _stale(first),
    )
    cause, why = next((said for rule in rules if (said := rule()) is not None), _unknown(wrong))
    return Finding(cause=cause, what=_what(first, wrong, right), why=why, step=step, tensor=first.name)


def _what(first: GradientFacts, wrong: Sequence[GradientFacts], right: Sequence[str]) -> str:
    ratio = ""
    if first.fit.residual < _CLOSE:
        ratio = f", {first.fit.factor:.4g} times the reference's"
    return (
        f"gradient of {first.name} off by {first.max_abs:.3g} ({first.error:.2g} of its largest element)"
        f"{ratio}; {len(wrong)} of {len(wrong) + len(right)} gradients differ"
    )


def _padding(first: GradientFacts) -> Said | None:
    if first.padding <= 0.0:
        return None
    return causes.PADDING, (
        f"rows that only pad the vocabulary have a gradient ({first.padding:.3g} of the largest): they take "
        "part in the softmax or in the embedding"
    )


def _ties(wrong: Sequence[GradientFacts]) -> Said | None:
    """Weights used by several stages."""
    tied = next((facts for facts in wrong if facts.holders > 1), None)
    if tied is None or len([facts for facts in wrong if facts.holders > 1]) < len(wrong):
        return None
    if tied.holder_spread > _CLOSE and _is_whole(tied.holder_sum):
        return causes.TIE_NOT_SUMMED, (
            f"the {tied.holders} stages that hold this tied weight have each only their own use's gradient; "
            "together they are right: it is never summed over them"
        )
    if tied.fit.residual < _CLOSE and any(near(tied.fit.factor, n) for n in {2, tied.holders}):
        return causes.TIE_SUMMED_TWICE, (
            "only the tied weight is too large, by a whole factor: its gradient is summed over its copies "
            "twice"
        )
    return None


def _tensor(wrong: Sequence[GradientFacts], degrees: Degrees) -> Said | None:
    """Weights that every tensor-parallel rank holds whole."""
    first = wrong[0]
    if degrees.tp == 1 or not all(facts.replicated for facts in wrong):
        return None
    if first.tensor_spread > _CLOSE and _is_whole(first.tensor_sum):
        return causes.TENSOR_NOT_SUMMED, (
            f"the {degrees.tp} tensor-parallel ranks have each a part of it (their slice of the sequence's), "
            "together they are right: it is not all-reduced over tensor parallelism"
        )
    if first.fit.residual < _CLOSE and near(first.fit.factor, degrees.tp):
        return causes.TENSOR_SUMMED_TWICE, (
            f"only tensors that every tensor-parallel rank holds whole are {degrees.tp} times too large: "
            "each rank's gradient is whole already, and is summed over tensor parallelism once more"
        )
    return None


def _scaled(first: GradientFacts, degrees: Degrees, *, everywhere: bool) -> Said | None:
    """One factor on the whole tensor."""
    if first.fit.residual >= _CLOSE or near(first.fit.factor, 1.0):
        return None
    factor, dp, m = first.fit.factor, degrees.dp, degrees.micro_batches
    found: list[Said] = []
    if dp > 1 and near(factor, dp):
        found.append((causes.DATA_SUMMED, f"summed over {dp} data-parallel ranks instead of averaged"))
    if m > 1 and near(factor, m):
        why = f"summed over {m} micro-batches instead of averaged: the loss is not divided by their number"
        found.append((causes.MICRO_BATCHES_SUMMED, why))
    if dp > 1 and m > 1 and near(factor, dp * m) and not found:
        why = f"summed over {dp} data-parallel ranks and {m} micro-batches, neither averaged"
        found.append((causes.DATA_SUMMED, why))
    for number, of_what in ((dp, "data-parallel ranks"), (m, "micro-batches")):
        if number > 1 and near(factor * number, 1.0):
            found.append((causes.DIVIDED_TWICE, f"divided by the number of {of_what}, {number}, twice"))
    if not found:
        place = "every gradient" if everywhere else "this gradient"
        found.append((causes.SCALED, f"{place} is {factor:.4g} times too large: a loss scale, or a sum"))
    return found[0][0], "; or ".join(why for _, why in found)


def _shares(first: GradientFacts, degrees: Degrees, *, loss_equal: bool) -> Said | None:
    """A sum in which micro-batches or replicas have the wrong weight."""
    shares = first.shares
    if shares is None or first.shares_residual >= _CLOSE:
        return None
    columns = list(zip(*shares, strict=True))
    present = [d for d, column in enumerate(columns) if any(not near(c, 0.0) for c in column)]
    if degrees.dp > 1 and len(present) == 1:
        return _one_replica(present[0], degrees, loss_equal=loss_equal)
    if degrees.dp > 1 and any(not near(c, row[0]) for row in shares for c in row):
        return (
            causes.DATA_ORDER,
            f"replicas and micro-batches weigh {show(shares)}: other data than it should",
        )
    return _one_micro_batch([row[0] for row in shares])


def _one_replica(replica: int, degrees: Degrees, *, loss_equal: bool) -> Said:
    if loss_equal:
        return causes.DATA_NOT_AVERAGED, (
            f"it is the gradient of data-parallel rank {replica} alone: it is not averaged over the "
            f"{degrees.dp} ranks, which so drift apart"
        )
    return causes.SAME_DATA, (
        f"all {degrees.dp} data-parallel ranks have computed on rank {replica}'s micro-batches: they read "
        "the same data"
    )


def _one_micro_batch(weights: Sequence[float]) -> Said | None:
    """What is wrong with the weights of the micro-batches of every replica."""
    count = len(weights)
    gone = [j for j, weight in enumerate(weights) if near(weight, 0.0)]
    odd = [j for j, weight in enumerate(weights) if not near(weight, 1.0)]
    if not odd:
        return None
    numbers = ", ".join(map(str, odd))
    if (count > 2 and len(gone) == count - 1) or (count == 2 and gone == [0]):
        kept = next(j for j in range(count) if j not in gone)
        return causes.MICRO_BATCH_OVERWRITTEN, (
            f"of {count} micro-batches only {kept} is in it: each one's gradient overwrites the one before "
            "instead of being added"
        )
    if gone == odd:
        return causes.MICRO_BATCH_MISSING, (
            f"the contribution of micro-batch {numbers} (of 0 to {count - 1}) is missing: lost or overwritten"
        )
    if all(near(weights[j], 2.0) for j in odd):
        return (
            causes.MICRO_BATCH_TWICE,
            f"the contribution of micro-batch {numbers} is in it twice: stale, not cleared",
        )
    if odd == [count - 1]:
        return causes.LAST_MICRO_BATCH, (
            f"the last micro-batch weighs {weights[-1]:.4g} times what the others do: its loss is scaled "
            "otherwise"
        )
    shown = ", ".join(f"{weight:.3g}" for weight in weights)
    return causes.MICRO_BATCH_TWICE, f"the micro-batches weigh {shown} instead of 1 each"


def _stale(first: GradientFacts) -> Said | None:
    previous = first.previous
    if previous is None or previous.residual >= _CLOSE or near(previous.factor, 0.0):
        return None
    return causes.STALE, (
        f"the gradient of the step before is in it, {previous.factor:.3g} times: gradients are not cleared"
    )


def _unknown(wrong: Sequence[GradientFacts]) -> Said:
    stages = ", ".join(map(str, sorted({facts.stage for facts in wrong})))
    return causes.UNKNOWN, (
        "it is no sum of the micro-batches' gradients: look at the backward of the layer that has "
        f"{wrong[0].name}, the first that differs on the way back (wrong ones on pipeline ranks {stages})"
    )


def _is_whole(fit: Fit | None) -> bool:
    return fit is not None and fit.residual < _CLOSE and near(fit.factor, 1.0)


def show(shares: Shares) -> str:
    """A matrix of weights, a row per micro-batch."""
    return "[" + ", ".join("[" + ", ".join(f"{c:.2g}" for c in row) + "]" for row in shares) + "]"
