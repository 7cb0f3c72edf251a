"""Which mistake makes a gradient, loss, norm or update differ as it does, and a verdict as text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import sqrt
from textwrap import wrap

from dsx.parallel.mesh import AXES, Mesh
from dsx.terminal import aligned

BIASES = "biases of routers"
BIAS_PER_RANK = "bias added per tensor rank"
CLIPPING = "clipping"
DATA_NOT_AVERAGED = "not averaged over data parallelism"
DATA_ORDER = "data order"
DATA_SUMMED = "summed over data parallelism"
DECAY = "weight decay"
DIVIDED_TWICE = "divided twice"
DOCUMENTS = "documents see each other"
DROPOUT_DATA = "dropout masks equal over data parallelism"
DROPOUT_SCALE = "scale of dropout"
DROPOUT_TENSOR = "dropout masks over tensor parallelism"
DTYPE = "data type of a buffer"
FAMILY = "model differs from its reference"
FORWARD = "forward"
FROZEN = "frozen weights trained"
INITIAL_WEIGHTS = "initial weights"
JOINED = "documents not apart"
LAST_MICRO_BATCH = "weight of the last micro-batch"
LEARNING_RATE = "learning rate"
LOSS_SCALED = "loss scaled"
MEAN_OF_MEANS = "mean of micro-batches' means"
MEAN_PER_REPLICA = "mean of replicas' means"
MICRO_BATCH_MISSING = "micro-batch missing"
MICRO_BATCH_OVERWRITTEN = "micro-batches overwritten"
MICRO_BATCH_TWICE = "micro-batch counted twice"
MICRO_BATCHES_SUMMED = "summed over micro-batches"
NORM = "norm"
NORM_OF_ONE_STAGE = "norm of one stage"
NORM_OF_ONE_TENSOR_RANK = "norm of one tensor rank"
NORM_REPLICATED = "norm counts replicated tensors per rank"
NORM_TIED = "norm counts tied tensors per copy"
NOT_FINITE = "not finite"
NOT_GATHERED = "updated weights not gathered"
OPTIMIZER = "optimizer"
PADDING = "vocabulary padding"
PARTITION_ORDER = "partition order"
REPLICAS_DRIFT = "copies of a weight differ"
SAME_DATA = "replicas read the same data"
SCALED = "gradient scaled"
STALE = "gradient of an earlier step"
TENSOR_NOT_SUMMED = "not summed over tensor parallelism"
TENSOR_SUMMED_TWICE = "summed over tensor parallelism twice"
TIE_NOT_SUMMED = "tied copies not summed"
TIE_SUMMED_TWICE = "tied copies summed twice"
UNKNOWN = "unknown"


Shares = tuple[tuple[float, ...], ...]
"""[micro-batch][data-parallel replica] -> how often its gradient is in a sum; 1.0 everywhere is right."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The factor that brings one tensor closest to another, and the largest difference then left.

    Attributes:
        factor: The factor, by least squares.
        residual: The difference left, relative to the larger tensor's largest element.
    """

    factor: float
    residual: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSizes:
    """The degrees of the layout that is judged."""

    mesh: Mesh
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFacts:
    """One tensor's gradient in the layout against the reference's.

    Attributes:
        error: Largest difference, relative to the reference's largest element.
        stage: Pipeline rank that holds it first.
        replicated: Whether every tensor-parallel rank holds all of it.
        holders: Pipeline ranks that hold a copy (more than one for a tied weight).
        fit: Layout against reference.
        shares: How often each micro-batch's gradient is in it; None if no such sum explains it.
        shares_residual: The part that the sum leaves unexplained, relative.
        tensor_spread: Largest relative difference between tensor-parallel ranks' copies.
        tensor_sum: The sum of those copies against the reference.
        holder_spread: The same between the pipeline ranks that hold it.
        holder_sum: The sum of those copies against the reference.
        previous: Difference to the reference against the previous step's gradient; None in the first step.
        padding: Largest element in the rows that pad the vocabulary.
    """

    name: str
    error: float
    max_abs: float
    stage: int
    replicated: bool
    holders: int
    fit: Fit
    shares: Shares | None = None
    shares_residual: float = 0.0
    tensor_spread: float = 0.0
    tensor_sum: Fit | None = None
    holder_spread: float = 0.0
    holder_sum: Fit | None = None
    previous: Fit | None = None
    padding: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """The loss of one step against the reference's, from the same weights.

    Attributes:
        supposed: Cause -> the loss that the reference has under it.
        first_layer: The first layer whose output differs, and by how much, relative; None if none does.
        other_family: The layout agrees with dsx's own layers in one process, and those do not with the
            reference.
    """

    seen: float
    expected: float
    supposed: Mapping[str, float] = field(default_factory=dict)
    first_layer: tuple[str, float] | None = None
    other_family: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NormFacts:
    """The facts about a gradient norm, or about what clipping has made of one.

    Attributes:
        seen: The norm that the engine reports; None if it reports none.
        squares: Tensor -> sum of squares of the reference's gradient.
        stages: Tensor -> pipeline rank that holds it first.
        holders: Tensor -> number of pipeline ranks that hold it.
        replicated: Tensors that every tensor-parallel rank holds whole.
        first_shard: Tensor -> sum of squares of what tensor-parallel rank 0 holds.
    """

    seen: float | None
    expected: float
    squares: Mapping[str, float]
    stages: Mapping[str, int]
    holders: Mapping[str, int]
    replicated: frozenset[str]
    first_shard: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFacts:
    """One tensor's update against that of torch's optimizer, given the layout's own gradient.

    Attributes:
        error: Largest difference, relative to the largest update.
        fit: Update against expected update.
        decay: Difference of the two against the weights themselves.
    """

    name: str
    error: float
    max_abs: float
    fit: Fit
    decay: Fit
    learning_rate: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityFinding:
    """One thing that differs from one process.

    Attributes:
        cause: A short name, one of :mod:`dsx.verify.diagnosis`.
        why: The likely cause, in words.
        step: Training step, from 1.
        tensor: The first tensor that differs, in the order of the backward; empty if no tensor does.
    """

    cause: str
    what: str
    why: str
    step: int
    tensor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """How near one step of one pass is to the reference.

    Attributes:
        clipping: Largest norm of the pass; 0 for none.
        step: From 1.
        expected_loss: The reference's loss, at the same weights.
        gradient: Largest relative difference of a gradient.
        update: Largest relative difference of an update; None if updates are not compared.
    """

    clipping: float
    step: int
    loss: float
    expected_loss: float
    norm: float | None
    expected_norm: float
    gradient: float
    gradient_of: str
    update: float | None
    update_of: str


_CLOSE = 0.02
"""How near a measured factor must be to a round one, relative: rounding is far below, mistakes far above."""

Said = tuple[str, str]
"""(cause, why)."""


def near(value: float, wanted: float) -> bool:
    """Whether a fitted factor is that number."""
    return abs(value - wanted) <= _CLOSE * max(1.0, abs(wanted))


def diagnose_gradients(
    wrong: Sequence[GradientFacts], right: Sequence[str], degrees: AxisSizes, *, step: int, loss_equal: bool
) -> ParityFinding:
    """The finding for gradients that differ, named by the first of them.

    ``wrong``, in the order of the backward, has at least one; ``step`` counts from 1. If the step's loss
    agrees (``loss_equal``), forward and data are right.
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
    return ParityFinding(cause=cause, what=_what(first, wrong, right), why=why, step=step, tensor=first.name)


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
    return PADDING, (
        f"rows that only pad the vocabulary have a gradient ({first.padding:.3g} of the largest): they take "
        "part in the softmax or in the embedding"
    )


def _ties(wrong: Sequence[GradientFacts]) -> Said | None:
    """Causes for weights that several stages use."""
    tied = next((facts for facts in wrong if facts.holders > 1), None)
    if tied is None or len([facts for facts in wrong if facts.holders > 1]) < len(wrong):
        return None
    if tied.holder_spread > _CLOSE and _is_whole(tied.holder_sum):
        return TIE_NOT_SUMMED, (
            f"the {tied.holders} stages that hold this tied weight have each only their own use's gradient; "
            "together they are right: it is never summed over them"
        )
    if tied.fit.residual < _CLOSE and near(tied.fit.factor * tied.holders, 1.0):
        return TIE_NOT_SUMMED, "only the tied weight is too small: its copies' gradients are averaged"
    if tied.fit.residual < _CLOSE and any(near(tied.fit.factor, n) for n in {2, tied.holders}):
        return TIE_SUMMED_TWICE, (
            "only the tied weight is too large, by a whole factor: its gradient is summed over its copies "
            "twice"
        )
    return None


def _tensor(wrong: Sequence[GradientFacts], degrees: AxisSizes) -> Said | None:
    """Causes for weights that every tensor-parallel rank holds whole."""
    first = wrong[0]
    if degrees.mesh.tp == 1 or not all(facts.replicated for facts in wrong):
        return None
    if first.tensor_spread > _CLOSE and _is_whole(first.tensor_sum):
        return TENSOR_NOT_SUMMED, (
            f"the {degrees.mesh.tp} tensor-parallel ranks have each a part of it (their slice of the "
            "sequence's), together they are right: it is not all-reduced over tensor parallelism"
        )
    if first.fit.residual < _CLOSE and near(first.fit.factor, degrees.mesh.tp):
        return TENSOR_SUMMED_TWICE, (
            f"only tensors that every tensor-parallel rank holds whole are {degrees.mesh.tp} times too "
            "large: each rank's gradient is whole already, and is summed over tensor parallelism once more"
        )
    return None


def _scaled(first: GradientFacts, degrees: AxisSizes, *, everywhere: bool) -> Said | None:
    """Causes for one factor on the whole tensor."""
    if first.fit.residual >= _CLOSE or near(first.fit.factor, 1.0):
        return None
    factor, m = first.fit.factor, degrees.micro_batches
    axes = (degrees.mesh.num_shares, "data-parallel ranks"), (degrees.mesh.cp, "context-parallel ranks")
    counts = [(number, of_what) for number, of_what in (*axes, (m, "micro-batches")) if number > 1]
    found: list[Said] = [
        (DATA_SUMMED, f"summed over {number} {of_what} instead of averaged")
        for number, of_what in axes
        if number > 1 and near(factor, number)
    ]
    if m > 1 and near(factor, m):
        why = f"summed over {m} micro-batches instead of averaged: the loss is not divided by their number"
        found.append((MICRO_BATCHES_SUMMED, why))
    for (one, ones), (other, others) in combinations(counts, 2) if not found else ():
        if near(factor, one * other):
            found.append((DATA_SUMMED, f"summed over {one} {ones} and {other} {others}, neither averaged"))
    for number, of_what in counts:
        if near(factor * number, 1.0):
            found.append((DIVIDED_TWICE, f"divided by the number of {of_what}, {number}, twice"))
    if not found:
        place = "every gradient" if everywhere else "this gradient"
        found.append((SCALED, f"{place} is {factor:.4g} times too large: a loss scale, or a sum"))
    return found[0][0], "; or ".join(why for _, why in found)


def _shares(first: GradientFacts, degrees: AxisSizes, *, loss_equal: bool) -> Said | None:
    """Causes for a sum in which micro-batches or replicas have the wrong weight."""
    shares = first.shares
    if shares is None or first.shares_residual >= _CLOSE:
        return None
    columns = list(zip(*shares, strict=True))
    present = [d for d, column in enumerate(columns) if any(not near(c, 0.0) for c in column)]
    if degrees.mesh.num_shares > 1 and len(present) == 1:
        return _one_replica(present[0], degrees, loss_equal=loss_equal)
    if degrees.mesh.num_shares > 1 and any(not near(c, row[0]) for row in shares for c in row):
        return (
            DATA_ORDER,
            f"replicas and micro-batches weigh {show(shares)}: other data than it should",
        )
    return _one_micro_batch([row[0] for row in shares])


def _one_replica(replica: int, degrees: AxisSizes, *, loss_equal: bool) -> Said:
    if loss_equal:
        return DATA_NOT_AVERAGED, (
            f"it is the gradient of data-parallel rank {replica} alone: it is not averaged over the "
            f"{degrees.mesh.num_shares} ranks, which so drift apart"
        )
    return SAME_DATA, (
        f"all {degrees.mesh.num_shares} data-parallel ranks have computed on rank {replica}'s micro-batches: "
        "they read the same data"
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
        return MICRO_BATCH_OVERWRITTEN, (
            f"of {count} micro-batches only {kept} is in it: each one's gradient overwrites the one before "
            "instead of being added"
        )
    if gone == odd:
        return MICRO_BATCH_MISSING, (
            f"the contribution of micro-batch {numbers} (of 0 to {count - 1}) is missing: lost or overwritten"
        )
    if all(near(weights[j], 2.0) for j in odd):
        return (
            MICRO_BATCH_TWICE,
            f"the contribution of micro-batch {numbers} is in it twice: stale, not cleared",
        )
    if odd == [count - 1]:
        return LAST_MICRO_BATCH, (
            f"the last micro-batch weighs {weights[-1]:.4g} times what the others do: its loss is scaled "
            "otherwise"
        )
    shown = ", ".join(f"{weight:.3g}" for weight in weights)
    return MICRO_BATCH_TWICE, f"the micro-batches weigh {shown} instead of 1 each"


def _stale(first: GradientFacts) -> Said | None:
    previous = first.previous
    if previous is None or previous.residual >= _CLOSE or near(previous.factor, 0.0):
        return None
    return STALE, (
        f"the gradient of the step before is in it, {previous.factor:.3g} times: gradients are not cleared"
    )


def _unknown(wrong: Sequence[GradientFacts]) -> Said:
    stages = ", ".join(map(str, sorted({facts.stage for facts in wrong})))
    return UNKNOWN, (
        "it is no sum of the micro-batches' gradients: look at the backward of the layer that has "
        f"{wrong[0].name}, the first that differs on the way back (wrong ones on pipeline ranks {stages})"
    )


def _is_whole(fit: Fit | None) -> bool:
    return fit is not None and fit.residual < _CLOSE and near(fit.factor, 1.0)


def show(shares: Shares) -> str:
    """A matrix of weights, a row per micro-batch."""
    return "[" + ", ".join("[" + ", ".join(f"{c:.2g}" for c in row) + "]" for row in shares) + "]"


_FIT = 0.02
"""The relative part of a difference that an explanation may leave over."""


def diagnose_loss(facts: LossFacts, degrees: AxisSizes, tolerance: float, *, step: int) -> ParityFinding:
    """The finding for a loss that differs at equal weights: the forward, or the data."""
    what = f"loss {facts.seen:.7g}, reference {facts.expected:.7g}, from the same weights"
    cause, why = _why_loss(facts, degrees, tolerance)
    tensor = "" if facts.first_layer is None else f"output of layer {facts.first_layer[0]}"
    if facts.first_layer is not None:
        what += f"; first layer whose output differs: {facts.first_layer[0]} ({facts.first_layer[1]:.2g})"
    return ParityFinding(cause=cause, what=what, why=why, step=step, tensor=tensor)


def _why_loss(facts: LossFacts, degrees: AxisSizes, tolerance: float) -> Said:
    for (cause, why), value in _supposed(facts, degrees):
        apart, off = not _equal(value, facts.expected, tolerance), abs(facts.seen - facts.expected)
        if _equal(facts.seen, value, tolerance) and (apart or abs(facts.seen - value) <= _FIT * off):
            return cause, why
    if facts.other_family:
        return FAMILY, (
            "the layout agrees with dsx's own layers in one process, which differ from the reference: it is "
            "the model, not the layout"
        )
    if facts.first_layer is None and degrees.mesh.cp > 1:  # no layer's output has been compared
        return FORWARD, "attention over the parts of rows, the loss, or its sum over ranks is wrong"
    if facts.first_layer is None:
        return FORWARD, "every layer's output agrees: the loss itself, or its sum over ranks, is wrong"
    layer = facts.first_layer[0]
    return FORWARD, f"the forward of layer {layer} differs: its inputs agree and its output does not"


def _supposed(facts: LossFacts, degrees: AxisSizes) -> Iterator[tuple[Said, float]]:
    """Explanations with the loss that the layout has if they hold."""
    words = {
        BIAS_PER_RANK: "a bias is added on every tensor-parallel rank and then summed: "
        f"{degrees.mesh.tp} times the bias",
        PADDING: "rows that only pad the vocabulary take part in the softmax",
        SAME_DATA: f"all {degrees.mesh.num_shares} data-parallel ranks read the same micro-batches",
        DOCUMENTS: "tokens attend to the documents before theirs: the mask is of the row, not of documents",
        JOINED: "a pack is computed as one document: neither masks nor positions begin again in each",
        MEAN_OF_MEANS: "each micro-batch's mean counts alike, however many of its tokens are trained: "
        "sums are to be divided by the tokens of the global batch",
        MEAN_PER_REPLICA: f"each of {degrees.mesh.num_shares} data-parallel ranks divides by its own number "
        "of trained tokens: they are to be counted over all ranks",
    }
    for cause, value in facts.supposed.items():
        yield (cause, words[cause]), value
    for number, of_what in (
        (degrees.mesh.num_shares, "data-parallel ranks"),
        (degrees.mesh.cp, "context-parallel ranks"),
        (degrees.micro_batches, "micro-batches"),
        (degrees.mesh.tp, "tensor-parallel ranks"),
    ):
        yield (LOSS_SCALED, f"summed over {number} {of_what}, not averaged"), facts.expected * number
        yield (LOSS_SCALED, f"divided by {number} {of_what} once more"), facts.expected / number


def diagnose_norm(
    facts: NormFacts, degrees: AxisSizes, *, step: int, from_clipping: bool = False
) -> ParityFinding:
    """The finding for a norm that differs though all gradients agree.

    ``seen`` is what the engine reports or, ``from_clipping``, what the scale of the gradients implies.
    """
    seen = facts.seen
    assert seen is not None
    tolerance = 2e-3 if from_clipping else 1e-3
    ratio = seen / facts.expected if facts.expected else 0.0
    otherwise = NORM, f"{ratio:.7g} times the norm: each element must count once"
    found = [(said, value) for said, value in _norms(facts, degrees) if _equal(seen, value, tolerance)]
    # What counts twice may be so little that several explanations are near, and the truth itself.
    found = [(otherwise, facts.expected), *found]
    said, _ = min(found, key=lambda one: abs(one[1] - seen))
    whose = "clipped as if the norm were" if from_clipping else "norm"
    what = f"all gradients agree; {whose} {seen:.7g}, true norm {facts.expected:.7g}"
    return ParityFinding(cause=said[0], what=what, why=said[1], step=step)


def _norms(facts: NormFacts, degrees: AxisSizes) -> Iterator[tuple[Said, float]]:
    """Explanations with the norm that they give."""
    total = sum(facts.squares.values())
    stages = sorted(set(facts.stages.values()))
    for stage in stages if len(stages) > 1 else ():
        own = sum(square for name, square in facts.squares.items() if facts.stages[name] == stage)
        yield (
            (NORM_OF_ONE_STAGE, f"it is the norm of pipeline stage {stage}'s gradients alone"),
            sqrt(own),
        )
    tied = sum(square * (facts.holders[name] - 1) for name, square in facts.squares.items())
    if tied:
        said = NORM_TIED, "tied weights count once per stage that holds a copy"
        yield said, sqrt(total + tied)
    replicated = sum(facts.squares[name] for name in facts.replicated) * (degrees.mesh.tp - 1)
    if replicated:
        said = NORM_REPLICATED, "what every tensor-parallel rank holds whole counts once per rank"
        yield said, sqrt(total + replicated)
        if tied:
            said = NORM_TIED, "tied and replicated weights count once per copy"
            yield said, sqrt(total + replicated + tied)
    if degrees.mesh.tp > 1:
        shard = sum(facts.first_shard.values())
        yield (
            (NORM_OF_ONE_TENSOR_RANK, "it is the norm of tensor-parallel rank 0's shards alone"),
            sqrt(shard),
        )
    for axis in AXES:
        number, of_what = degrees.mesh.degree(axis.name), f"{axis.title}-parallel"
        if number > 1:
            said = NORM, f"every element counts {number} times: summed over {of_what} ranks"
            yield said, sqrt(total * number)
            yield (
                (NORM, f"averaged over {number} {of_what} ranks, which hold parts"),
                sqrt(total / number),
            )


def diagnose_clipping(
    norm: NormFacts, scales: dict[int, float], clipping: float, degrees: AxisSizes, *, step: int
) -> ParityFinding:
    """The finding for gradients that agree until they are clipped.

    ``scales``: pipeline rank -> what its gradients were multiplied with. ``seen`` of ``norm`` is not read.
    """
    values = sorted(scales.values())
    if values[-1] - values[0] > _FIT * values[-1]:
        shown = ", ".join(f"{scale:.4g} on pipeline rank {rank}" for rank, scale in sorted(scales.items()))
        wanted = min(1.0, clipping / (norm.expected + 1e-6))
        what = f"clipped gradients are {shown} times the true ones; right is {wanted:.4g} everywhere"
        why = "stages clip by norms of their own"
    elif near(values[0], 1.0):
        what = f"gradients are as before clipping to {clipping:g}, at a norm of {norm.expected:.7g}"
        why = "nothing is clipped"
    else:
        implied = replace(norm, seen=clipping / values[0] - 1e-6)
        return diagnose_norm(implied, degrees, step=step, from_clipping=True)
    return ParityFinding(cause=CLIPPING, what=what, why=why, step=step)


def diagnose_updates(wrong: Sequence[UpdateFacts], right: Sequence[str], *, step: int) -> ParityFinding:
    """The finding for weights that torch's optimizer would move otherwise by the same gradients."""
    first = wrong[0]
    what = (
        f"gradients agree; update of {first.name} off by {first.max_abs:.3g} ({first.error:.2g} of the "
        f"largest); {len(wrong)} of {len(wrong) + len(right)} updates differ"
    )
    cause, why = _why_update(first, len(right))
    return ParityFinding(cause=cause, what=what, why=why, step=step, tensor=first.name)


def _why_update(first: UpdateFacts, num_right: int) -> Said:
    some = "; the other tensors' is right: the wrong parameter group" if num_right else ""
    if first.fit.residual < _FIT and not near(first.fit.factor, 1.0):
        rate = first.fit.factor * first.learning_rate
        return LEARNING_RATE, (
            f"the update is {first.fit.factor:.4g} times the expected one: a learning rate of {rate:.4g} "
            f"instead of {first.learning_rate:.4g}{some}"
        )
    if first.decay.residual < _FIT * 5 and first.learning_rate > 0.0:
        decay = first.weight_decay - first.decay.factor / first.learning_rate
        return DECAY, (
            f"the difference is proportional to the weights: a weight decay of {decay:.4g} instead of "
            f"{first.weight_decay:.4g}{some}"
        )
    return OPTIMIZER, f"torch's optimizer moves the weight elsewhere by the same gradient{some}"


def _equal(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(b), 1e-30)


_WIDTH = 100
_LABEL = 11


def parity_table(rows: Iterable[StepRow], *, width: int = 0) -> list[str]:
    """Lines: a heading and a line per step, with how far each number is from the reference's, relative.

    They have at most ``width`` characters, unless it is 0.
    """
    heading = ("clipping", "step", "loss", "off", "norm", "off", "gradients off", "at most in", "updates off")
    cells = [heading, *map(_cells, rows)]
    return aligned(cells, left=range(len(heading)), width=width, names=2)


def findings_text(findings: Sequence[ParityFinding]) -> list[str]:
    """Lines on what differs, and why it may."""
    lines = []
    for finding in findings:
        place = f"step {finding.step}" if finding.step else "before the first step"
        lines += labelled("differs", f"{place}: {finding.cause}")
        if finding.tensor:
            lines += labelled("first", finding.tensor)
        lines += labelled("seen", finding.what)
        lines += labelled("likely", finding.why)
    return lines


def labelled(label: str, text: str) -> list[str]:
    """``text`` beside a label, its further lines aligned with the first."""
    first, *rest = wrap(text, _WIDTH - _LABEL, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{label:<{_LABEL}}{first}", *(f"{'':<{_LABEL}}{line}" for line in rest)]


def _off(seen: float, expected: float) -> str:
    return f"{abs(seen - expected) / max(abs(expected), 1e-30):.1e}"


def _cells(row: StepRow) -> tuple[str, ...]:
    return (
        f"{row.clipping:.4g}" if row.clipping else "none",
        str(row.step),
        f"{row.loss:.6f}",
        _off(row.loss, row.expected_loss),
        "not told" if row.norm is None else f"{row.norm:.6f}",
        "" if row.norm is None else _off(row.norm, row.expected_norm),
        f"{row.gradient:.1e}",
        row.gradient_of,
        "-" if row.update is None else f"{row.update:.1e}",
    )
