"""Which mistake makes a loss, a norm, a clipped gradient or an update differ as it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt

from dsx.plan.parity import causes
from dsx.plan.parity.facts import Degrees, Finding, LossFacts, NormFacts, UpdateFacts
from dsx.plan.parity.gradients import Said, near

_FIT = 0.02
"""Least part of a difference that an explanation may leave, relative."""


def diagnose_loss(facts: LossFacts, degrees: Degrees, tolerance: float, *, step: int) -> Finding:
    """The finding for a loss that differs at equal weights: the forward, or the data."""
    what = f"loss {facts.seen:.7g}, reference {facts.expected:.7g}, from the same weights"
    cause, why = _why_loss(facts, degrees, tolerance)
    tensor = "" if facts.first_layer is None else f"output of layer {facts.first_layer[0]}"
    if facts.first_layer is not None:
        what += f"; first layer whose output differs: {facts.first_layer[0]} ({facts.first_layer[1]:.2g})"
    return Finding(cause=cause, what=what, why=why, step=step, tensor=tensor)


def _why_loss(facts: LossFacts, degrees: Degrees, tolerance: float) -> Said:
    for (cause, why), value in _supposed(facts, degrees):
        if _equal(facts.seen, value, tolerance) and not _equal(value, facts.expected, tolerance):
            return cause, why
    if facts.other_family:
        return causes.FAMILY, (
            "the layout agrees with dsx's own layers in one process, which differ from the reference: it is "
            "the model, not the layout"
        )
    if facts.first_layer is None:
        return causes.FORWARD, "every layer's output agrees: the loss itself, or its sum over ranks, is wrong"
    layer = facts.first_layer[0]
    return causes.FORWARD, f"the forward of layer {layer} differs: its inputs agree and its output does not"


def _supposed(facts: LossFacts, degrees: Degrees) -> Iterator[tuple[Said, float]]:
    """Explanations with the loss that the layout has if they hold."""
    words = {
        causes.BIAS_PER_RANK: "a bias is added on every tensor-parallel rank and then summed: "
        f"{degrees.tp} times the bias",
        causes.PADDING: "rows that only pad the vocabulary take part in the softmax",
        causes.SAME_DATA: f"all {degrees.dp} data-parallel ranks read the same micro-batches",
    }
    for cause, value in facts.supposed.items():
        yield (cause, words[cause]), value
    for number, of_what in (
        (degrees.dp, "data-parallel ranks"),
        (degrees.micro_batches, "micro-batches"),
        (degrees.tp, "tensor-parallel ranks"),
    ):
        yield (causes.LOSS_SCALED, f"summed over {number} {of_what}, not averaged"), facts.expected * number
        yield (causes.LOSS_SCALED, f"divided by {number} {of_what} once more"), facts.expected / number


def diagnose_norm(facts: NormFacts, degrees: Degrees, *, step: int, from_clipping: bool = False) -> Finding:
    """The finding for a norm that differs though all gradients agree.

    Args:
        facts: ``seen`` is what the engine reports, or what its clipping implies.
        degrees: Of the layout.
        step: Training step, from 1.
        from_clipping: ``seen`` follows from how much the gradients were scaled.
    """
    assert facts.seen is not None
    tolerance = 2e-3 if from_clipping else 1e-3
    found = [said for said, value in _norms(facts, degrees) if _equal(facts.seen, value, tolerance)]
    ratio = facts.seen / facts.expected if facts.expected else 0.0
    said = found[0] if found else (causes.NORM, f"{ratio:.4g} times the norm: each element must count once")
    whose = "clipped as if the norm were" if from_clipping else "norm"
    what = f"all gradients agree; {whose} {facts.seen:.7g}, true norm {facts.expected:.7g}"
    return Finding(cause=said[0], what=what, why=said[1], step=step)


def _norms(facts: NormFacts, degrees: Degrees) -> Iterator[tuple[Said, float]]:
    """Explanations with the norm that they give."""
    total = sum(facts.squares.values())
    stages = sorted(set(facts.stages.values()))
    for stage in stages if len(stages) > 1 else ():
        own = sum(square for name, square in facts.squares.items() if facts.stages[name] == stage)
        yield (
            (causes.NORM_OF_ONE_STAGE, f"it is the norm of pipeline stage {stage}'s gradients alone"),
            sqrt(own),
        )
    tied = sum(square * (facts.holders[name] - 1) for name, square in facts.squares.items())
    if tied:
        said = causes.NORM_TIED, "tied weights count once per stage that holds a copy"
        yield said, sqrt(total + tied)
    replicated = sum(facts.squares[name] for name in facts.replicated) * (degrees.tp - 1)
    if replicated:
        said = causes.NORM_REPLICATED, "what every tensor-parallel rank holds whole counts once per rank"
        yield said, sqrt(total + replicated)
        if tied:
            said = causes.NORM_TIED, "tied and replicated weights count once per copy"
            yield said, sqrt(total + replicated + tied)
    if degrees.tp > 1:
        shard = sum(facts.first_shard.values())
        yield (
            (causes.NORM_OF_ONE_TENSOR_RANK, "it is the norm of tensor-parallel rank 0's shards alone"),
            sqrt(shard),
        )
    for number, of_what in (
        (degrees.dp, "data-parallel"),
        (degrees.tp, "tensor-parallel"),
        (degrees.pp, "pipeline"),
    ):
        if number > 1:
            said = causes.NORM, f"every element counts {number} times: summed over {of_what} ranks"
            yield said, sqrt(total * number)
            yield (
                (causes.NORM, f"averaged over {number} {of_what} ranks, which hold parts"),
                sqrt(total / number),
            )


def diagnose_clipping(
    norm: NormFacts, scales: dict[int, float], clipping: float, degrees: Degrees, *, step: int
) -> Finding:
    """The finding for gradients that agree until they are clipped.

    Args:
        norm: With the true norm; ``seen`` is not read.
        scales: Pipeline rank -> what its gradients were multiplied with.
        clipping: Largest norm.
        degrees: Of the layout.
        step: Training step, from 1.
    """
    values = sorted(scales.values())
    wanted = min(1.0, clipping / (norm.expected + 1e-6))
    if values[-1] - values[0] > _FIT * values[-1]:
        shown = ", ".join(f"{scale:.4g} on pipeline rank {rank}" for rank, scale in sorted(scales.items()))
        return Finding(
            cause=causes.CLIPPING,
            what=f"clipped gradients are {shown} times the true ones; right is {wanted:.4g} everywhere",
            why="stages clip by norms of their own",
            step=step,
        )
    scale = values[0]
    if near(scale, 1.0):
        return Finding(
            cause=causes.CLIPPING,
            what=f"gradients are as before clipping to {clipping:g}, at a norm of {norm.expected:.7g}",
            why="nothing is clipped",
            step=step,
        )
    implied = clipping / scale - 1e-6
    replaced = NormFacts(
        seen=implied,
        expected=norm.expected,
        squares=norm.squares,
        stages=norm.stages,
        holders=norm.holders,
        replicated=norm.replicated,
        first_shard=norm.first_shard,
    )
    return diagnose_norm(replaced, degrees, step=step, from_clipping=True)


def diagnose_updates(wrong: Sequence[UpdateFacts], right: Sequence[str], *, step: int) -> Finding:
    """The finding for weights that move otherwise than torch's optimizer moves them by the same gradients."""
    first = wrong[0]
    what = (
        f"gradients agree; update of {first.name} off by {first.max_abs:.3g} ({first.error:.2g} of the "
        f"largest); {len(wrong)} of {len(wrong) + len(right)} updates differ"
    )
    cause, why = _why_update(first, len(right))
    return Finding(cause=cause, what=what, why=why, step=step, tensor=first.name)


def _why_update(first: UpdateFacts, num_right: int) -> Said:
    some = "; the other tensors' is right: the wrong parameter group" if num_right else ""
    if first.fit.residual < _FIT and not near(first.fit.factor, 1.0):
        rate = first.fit.factor * first.learning_rate
        return causes.LEARNING_RATE, (
            f"the update is {first.fit.factor:.4g} times the expected one: a learning rate of {rate:.4g} "
            f"instead of {first.learning_rate:.4g}{some}"
        )
    if first.decay.residual < _FIT * 5 and first.learning_rate > 0.0:
        decay = first.weight_decay - first.decay.factor / first.learning_rate
        return causes.DECAY, (
            f"the difference is proportional to the weights: a weight decay of {decay:.4g} instead of "
            f"{first.weight_decay:.4g}{some}"
        )
    return causes.OPTIMIZER, f"torch's optimizer moves the weight elsewhere by the same gradient{some}"


def _equal(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(b), 1e-30)
