"""A layout's training against the reference: findings, evidence, and a table of each step's differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsx.parallel.mesh import AXES, Mesh
from dsx.verify import diagnosis, observation
from dsx.verify.observation import FullTensor, Mask, ObservedStep, RunObservation, TensorInfo
from dsx.verify.reference import Batch, Evaluation, Reference, Updates

Weights = Mapping[str, Tensor]


def scale_of(tensor: Tensor) -> float:
    """The largest absolute value of a tensor."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference over b's largest element; infinite for different shapes or a NaN."""
    if a.shape != b.shape:
        return float("inf")
    off = float((a - b).abs().max()) / max(scale_of(b), 1e-30) if a.numel() else 0.0
    return float("inf") if off != off else off  # noqa: PLR0124 (NaN)


_ROUNDING, _TIMES, _STEEPEST = 1e-7, 3.0, 1e-3


def steepness(
    reference: Reference,
    weights: Weights,
    batches: Sequence[Batch],
    expected: Evaluation,
    names: Sequence[str],
) -> tuple[dict[str, float], float]:
    """How far from one process a right layout may be: in gradients, by their sizes, and in their norm.

    A few models are so steep that sums in another order move gradients by more than any tolerance. How steep
    a model is shows when all its weights move by one rounding. It excuses nothing above a tenth of the
    smallest mistake.
    """
    generator = torch.Generator().manual_seed(19)
    near = {
        name: values * (1 + _ROUNDING * torch.randn(values.shape, generator=generator))
        for name, values in weights.items()
    }
    moved, plain = reference.evaluate(near, batches).gradients, expected.gradients
    off = {name: float((moved[name] - plain[name]).abs().max()) / size_of(expected, name) for name in names}
    allowed = {name: min(_STEEPEST, _TIMES * each) for name, each in off.items()}
    return allowed, min(_STEEPEST, _TIMES * abs(norm_of(moved) / max(norm_of(plain), 1e-30) - 1))


def norm_of(gradients: Weights) -> float:
    """The norm of all gradients together."""
    return math.sqrt(sum(map(_square, gradients.values())))


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def not_finite(places: Mapping[str, Mapping[str, Tensor]], number: int) -> diagnosis.ParityFinding | None:
    """The finding for the first tensors with an infinity or NaN, which nothing can be compared with.

    ``places`` has tensors by name, by what and where they are; ``number`` is the step's.
    """
    for place, tensors in places.items():
        bad = [name for name, values in tensors.items() if not values.isfinite().all()]
        if bad:
            others = f", nor {'is' if len(bad) == 2 else 'are'} {len(bad) - 1} more" if len(bad) > 1 else ""
            what, why = f"{place} {bad[0]} is not finite{others}", _NOT_FINITE_WHY[place]
            return diagnosis.ParityFinding(
                cause=diagnosis.NOT_FINITE, what=what, why=why, step=number, tensor=bad[0]
            )
    return None


_OF_RUN, _OF_ONE = "in the run, the gradient of", "in one process, the gradient of"
_WEIGHTS, _LOSS_OF_ONE, _LOSS_OF_RUN = "in the run, the weight", "in one process,", "in the run,"
_OVERFLOWS = "the config itself overflows: one process of it trains no more than this layout does"
_OF_LAYOUT = (
    "an operation of this layout overflows or divides by 0, or a rank's optimizer was not given its part"
)
_NOT_FINITE_WHY = {
    _WEIGHTS: "the weights that are read or the values that are drawn, or the step before",
    _OF_ONE: _OVERFLOWS,
    _LOSS_OF_ONE: _OVERFLOWS,
    _OF_RUN: _OF_LAYOUT,
    _LOSS_OF_RUN: _OF_LAYOUT,
}


def fit(seen: Tensor, wanted: Tensor) -> diagnosis.Fit:
    """The factor on ``wanted`` that brings it nearest to ``seen``."""
    y, x = seen.double().flatten(), wanted.double().flatten()
    square = float(x @ x)
    factor = float(x @ y) / square if square else 0.0
    return diagnosis.Fit(factor, float((y - factor * x).abs().max()) / max(scale_of(y), 1e-30))


def shares_of(seen: Tensor, parts: Tensor, dp: int) -> tuple[diagnosis.Shares | None, float]:
    """Least-squares weights of the micro-batches' gradients in ``seen``, and the relative residual.

    Args:
        seen: The layout's gradient.
        parts: [m x dp, ...] what each micro-batch should contribute, replica fastest.
        dp: Data-parallel degree.

    Returns:
        None where the tensor has too few elements to tell the contributions apart.
    """
    columns, y = parts.flatten(1).double(), seen.double().flatten()
    if y.numel() < 2 * len(columns):
        return None, 0.0
    solved = torch.linalg.lstsq(columns.t(), y.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    left = float((y - solved @ columns).abs().max()) / max(scale_of(y), 1e-30)
    rows = solved.view(-1, dp).tolist()
    return tuple(tuple(row) for row in rows), left


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlaces:
    """Where a layout has its tensors.

    Attributes:
        known: Logical name -> what its first holder knows of it.
        holders: Logical name -> pipeline ranks that hold it, the first holder first.
    """

    known: Mapping[str, TensorInfo]
    holders: Mapping[str, tuple[int, ...]]
    degrees: diagnosis.AxisSizes

    def replicated(self, name: str) -> bool:
        """Whether several tensor-parallel ranks hold the whole tensor."""
        spec = self.known[name].spec
        return self.degrees.mesh.tp > 1 and (spec is None or spec.split is None)

    def copies(self, name: str, whole: FullTensor) -> list[Tensor]:
        """All copies of a tensor but the first."""
        return [*whole.copies, *(whole.shards[1:] if self.replicated(name) else ())]

    def first_shard(self, name: str, tensor: Tensor) -> Tensor:
        """What tensor-parallel rank 0 holds of a logical tensor, flat."""
        spec = self.known[name].spec
        if spec is None or spec.split is None:
            return tensor.flatten()
        boxes = spec.boxes(self.degrees.mesh.at())
        return torch.cat([tensor[tuple(slice(*span) for span in box)].flatten() for box in boxes])


def gradient_facts(
    places: TensorPlaces,
    name: str,
    step: ObservedStep,
    each: Sequence[Mapping[str, Tensor]],
    error: float,
    previous: Tensor | None,
) -> diagnosis.GradientFacts:
    """One tensor's gradient against the reference's.

    ``each`` has the micro-batches' gradients in the reference, replica fastest; ``previous`` is its gradient
    in the step before.
    """
    parts = torch.stack([gradients[name] for gradients in each]) / len(each)
    wanted = parts.sum(0)
    whole = step.gradients.get(name) or FullTensor(
        values=torch.zeros_like(wanted), shards=(), copies=(), padding=0.0
    )
    replicated = places.replicated(name)
    shards = whole.shards if replicated else whole.shards[:1]
    shares, left = shares_of(whole.values, parts, places.degrees.mesh.num_shares)
    return diagnosis.GradientFacts(
        name=name,
        error=error,
        max_abs=float((whole.values - wanted).abs().max()),
        stage=places.holders[name][0],
        replicated=replicated,
        holders=len(places.holders[name]),
        fit=fit(whole.values, wanted),
        shares=shares,
        shares_residual=left,
        tensor_spread=max((relative(shard, whole.values) for shard in shards[1:]), default=0.0),
        tensor_sum=fit(_sum_of(shards), wanted) if len(shards) > 1 else None,
        holder_spread=max((relative(t, whole.values) for t in whole.copies), default=0.0),
        holder_sum=fit(_sum_of([whole.values, *whole.copies]), wanted) if whole.copies else None,
        previous=None if previous is None else fit(whole.values - wanted, previous),
        padding=whole.padding / max(scale_of(wanted), 1e-30),
    )


def norm_facts(
    places: TensorPlaces, seen: float | None, norm: float, squares: Mapping[str, float], expected: Evaluation
) -> diagnosis.NormFacts:
    """A norm against the reference's, with the sums of squares that make it up."""
    return diagnosis.NormFacts(
        seen=seen,
        expected=norm,
        squares=squares,
        stages={name: places.holders[name][0] for name in squares},
        holders={name: len(places.holders[name]) for name in squares},
        replicated=frozenset(name for name in squares if places.replicated(name)),
        first_shard={
            name: float(places.first_shard(name, expected.gradients[name]).double().square().sum())
            for name in squares
        },
    )


def update_facts(
    name: str, before: Tensor, after: Tensor, expected: Tensor, *, rate: float, decay: float
) -> diagnosis.UpdateFacts:
    """One update against torch's; a difference below two roundings of the weight itself counts as none."""
    moved, wanted = after - before, expected - before
    rounding = 2 * torch.finfo(torch.float32).eps * before.abs()
    off = ((moved - wanted).abs() - rounding).clamp_min(0.0)
    size = max(scale_of(wanted), scale_of(moved) * 1e-3, 1e-30)
    return diagnosis.UpdateFacts(
        name=name,
        error=float(off.max()) / size,
        max_abs=float((moved - wanted).abs().max()),
        fit=fit(moved, wanted),
        decay=fit(moved - wanted, before),
        learning_rate=rate,
        weight_decay=decay,
    )


def not_gathered(step: ObservedStep, name: str, number: int) -> diagnosis.ParityFinding:
    """The finding for a weight in the model that is not what its optimizer holds after a step."""

    def flat(wholes: Mapping[str, FullTensor]) -> Tensor:
        return torch.cat([wholes[key].values.flatten() for key in sorted(step.after)])

    now, held, old = flat(step.next_weights), flat(step.after), flat(step.weights)
    what = f"weight {name} in the model is not what its optimizer holds after the step"
    if torch.equal(now, old):
        cause = diagnosis.NOT_GATHERED
        why = "the model has the weights from before the step: the new ones never came"
    elif any(torch.equal(now.sort().values, kept.sort().values) for kept in (held, held.bfloat16().float())):
        cause = diagnosis.PARTITION_ORDER
        why = "the model has the right numbers in the wrong places: ZeRO's parts are joined in another order"
    else:
        cause = diagnosis.NOT_GATHERED
        why = "parts of the new weights have not come, or others have come in their place"
    return diagnosis.ParityFinding(cause=cause, what=what, why=why, step=number, tensor=name)


def _sum_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def outputs_of(parts: Sequence[Tensor], wanted: Tensor) -> Iterator[Tensor]:
    """A layer's output on each tensor-parallel rank, or put together where it is cut, in the wanted shape."""
    if not parts:
        return
    if all(part.shape == wanted.shape for part in parts):
        yield from parts
        return
    for dim in range(wanted.dim()):
        whole = list(wanted.shape)
        rest = [size for at, size in enumerate(whole) if at != dim]
        if all([s for at, s in enumerate(p.shape) if at != dim] == rest for p in parts):
            joined = torch.cat(list(parts), dim)
            # Columns that pad the vocabulary are not compared.
            yield joined.narrow(dim, 0, min(joined.shape[dim], whole[dim]))
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """The largest relative differences that pass.

    Attributes:
        value: For losses.
        norm: For a norm, by that of the layout's own gradients; ten times ``value`` by the reference's.
        gradient: For a gradient's elements, by its largest one.
        update: For an update's elements, by the largest update.
        weight: For weights that should be the same, by their largest element.
        held: For a weight in the model, by what its optimizer holds.
    """

    value: float
    norm: float
    gradient: float
    update: float
    weight: float
    held: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a layout is compared with.

    Attributes:
        batches: Step -> the micro-batches of all replicas, replica fastest.
        suppose: (weights, micro-batches) -> losses under mistakes, by cause.
        layers: The layout's own layers in one process, for the outputs of each; None if they are the
            reference.
        built: The weights that the model should be built with; None if that is not known.
    """

    reference: Reference
    batches: Callable[[int], Sequence[Batch]]
    updates: Callable[[], Updates]
    tolerances: Tolerances
    suppose: Callable[[Weights, Sequence[Batch]], Mapping[str, float]]
    layers: Reference | None = None
    built: Weights | None = None


def size_of(expected: Evaluation, name: str) -> float:
    """What differences of a gradient are relative to.

    That is its largest element, but not less than a thousandth of the largest of all gradients, below which a
    gradient is nothing but rounding.
    """
    largest = max(scale_of(gradient) for gradient in expected.gradients.values())
    return max(scale_of(expected.gradients[name]), 1e-3 * largest, 1e-30)


def backward_order(expected: Evaluation, bench: Bench) -> Iterator[tuple[str, Tensor]]:
    """The reference's gradients in the order of its backward."""
    for name in reversed(bench.reference.order):
        if name in expected.gradients:
            yield name, expected.gradients[name]


def unlike(
    own: Evaluation, expected: Evaluation, bench: Bench, weights: Weights, batches: Sequence[Batch]
) -> tuple[str, str] | None:
    """What differs first between two evaluations of one process, and by how much; None if nothing does."""
    off = abs(own.loss - expected.loss) / max(1e-6, abs(expected.loss))
    if not off <= bench.tolerances.value:
        return "the loss", f"by {off:.1e}"
    for name in own.gradients.keys() - expected.gradients.keys():
        if own.gradients[name].any():
            return name, "as transformers has none"
    zero = torch.zeros(())
    errors = {
        name: float((own.gradients.get(name, zero) - wanted).abs().max()) / size_of(expected, name)
        for name, wanted in backward_order(expected, bench)
    }
    wrong = [name for name, error in errors.items() if not error <= bench.tolerances.gradient]
    if wrong:
        allowed, _ = steepness(bench.reference, weights, batches, expected, wrong)
        wrong = [name for name in wrong if not errors[name] <= allowed[name]]
    return next(((name, f"by {errors[name]:.1e} of its largest element") for name in wrong), None)


class TrainingComparison:
    """One pass of a layout beside the reference, step by step until something differs.

    Every step of the reference starts from the layout's own weights, so that rounding does not grow from
    step to step and a difference is that step's.
    """

    def __init__(self, run: RunObservation, bench: Bench) -> None:
        self._run, self._bench = run, bench
        mesh = run.mesh
        self._degrees = diagnosis.AxisSizes(mesh=mesh, micro_batches=run.micro_batches)
        self._places = TensorPlaces(
            known=observation.tensor_infos(run), holders=observation.holders(run), degrees=self._degrees
        )
        self._updates = bench.updates()
        self._previous: dict[str, Tensor] = {}
        self.rows: list[diagnosis.StepRow] = []

    def findings(self) -> list[diagnosis.ParityFinding]:
        """What differs; of several things that differ in one step, the first in the step's order."""
        found = self._built()
        if found is not None:
            return [found]
        for index, step in enumerate(observation.observed_steps(self._run)):
            finding = self._step(index, step)
            if finding is not None:
                return [finding]
        return []

    def _built(self) -> diagnosis.ParityFinding | None:
        expected = self._bench.built
        if expected is None:
            return None
        whole = observation.built_weights(self._run)
        finding = not_finite({_WEIGHTS: {name: each.values for name, each in whole.items()}}, 0)
        if finding is not None:
            return finding
        for name in filter(expected.__contains__, self._bench.reference.order):
            for values in (whole[name].values, *whole[name].copies):
                off = relative(values, expected[name])
                if off > self._bench.tolerances.weight:
                    what = f"weight {name} as built is off by {off:.2g} of its largest element"
                    why = "the layout starts from other weights than one process: its init, or what it "
                    why += "loads, depends on the layout"
                    return diagnosis.ParityFinding(
                        cause=diagnosis.INITIAL_WEIGHTS, what=what, why=why, step=0, tensor=name
                    )
        return None

    def _step(self, index: int, step: ObservedStep) -> diagnosis.ParityFinding | None:
        weights = {name: whole.values for name, whole in step.weights.items()}
        finding = not_finite({_WEIGHTS: weights}, index + 1) or self._copies(
            index, step.weights, step.weight_spread
        )
        if finding is not None:
            return finding
        batches = self._bench.batches(index)
        biases = {name: each for rank in self._run.ranks for name, each in rank.biases[index].items()}
        expected = self._bench.reference.evaluate(weights | biases, batches)
        places = {
            _OF_ONE: expected.gradients,
            _LOSS_OF_ONE: {"the loss": torch.tensor(expected.loss)},
            _OF_RUN: {name: whole.values for name, whole in step.gradients.items()}
            | {name: torch.tensor(torch.inf) for name in step.not_finite},
            _LOSS_OF_RUN: {
                "the loss": torch.tensor(step.losses[0]),
                "the norm of all gradients": torch.tensor(step.norms[0] or 0.0),
            },
        }
        finding = not_finite(places, index + 1)
        if finding is None:
            finding = self._compare(index, step, weights | biases, expected, batches)
        if finding is None:
            finding = self._bias_finding(index, expected)
        self._previous = expected.gradients
        return finding

    def _copies(
        self, index: int, weights: Mapping[str, FullTensor], spread: Mapping[str, float]
    ) -> diagnosis.ParityFinding | None:
        """The finding for ranks that should hold the same weight and do not, if there are any."""
        for name in self._bench.reference.order:
            whole = weights[name]
            same = self._places.copies(name, whole)
            axes = {
                "pipeline or tensor-parallel ranks": max(
                    (relative(t, whole.values) for t in same), default=0.0
                ),
                "data-parallel ranks": spread[name] / max(scale_of(whole.values), 1e-30),
            }
            for axis, off in axes.items():
                if off > self._bench.tolerances.weight:
                    start = "at the start" if index == 0 else f"after step {index}"
                    what = f"copies of {name} on {axis} differ by {off:.2g} {start}"
                    why = "they are not built alike" if index == 0 else "they are not updated alike"
                    return diagnosis.ParityFinding(
                        cause=diagnosis.REPLICAS_DRIFT, what=what, why=why, step=index, tensor=name
                    )
        return None

    def _compare(
        self, index: int, step: ObservedStep, weights: Weights, expected: Evaluation, batches: Sequence[Batch]
    ) -> diagnosis.ParityFinding | None:
        squares = {name: _square(gradient) for name, gradient in expected.gradients.items()}
        norm = sum(squares.values()) ** 0.5
        clipping = self._run.clipping
        scale = min(1.0, clipping / (norm + 1e-6)) if clipping else 1.0
        order = [name for name, _ in backward_order(expected, self._bench)]
        errors = {name: self._error(step, expected, name, scale) for name in order}
        worst = max(errors, key=lambda name: errors[name])
        self._row(index, step, expected, norm, (errors[worst], worst))
        tolerances = self._bench.tolerances
        loss_equal = abs(step.losses[0] - expected.loss) <= tolerances.value * max(1e-6, abs(expected.loss))
        wrong = [name for name, error in errors.items() if not error <= tolerances.gradient]
        if not loss_equal:
            return self._loss_finding(index, step, weights, expected, batches, wrong)
        off = 0.0 if step.norms[0] is None else abs(step.norms[0] - norm) / max(norm, 1e-30)
        norm_equal = off <= tolerances.value * 10
        if wrong or not norm_equal:
            allowed, of_norm = steepness(self._bench.reference, weights, batches, expected, wrong)
            wrong = [name for name in wrong if not errors[name] <= allowed[name]]
            norm_equal = norm_equal or off <= of_norm
        if wrong and clipping:
            return self._clipping_finding(index, step, expected, norm, squares)
        if wrong:
            return self._gradient_finding(index, step, weights, batches, wrong, errors, loss_equal=True)
        finding = self._frozen_finding(index, step)
        if finding is not None:
            return finding
        seen = step.norms[0]
        if seen is not None and not (norm_equal and self._counts_its_own(step, seen)):
            facts = norm_facts(self._places, seen, norm, squares, expected)
            return diagnosis.diagnose_norm(facts, self._degrees, step=index + 1)
        return self._update_finding(index, step)

    def _counts_its_own(self, step: ObservedStep, seen: float) -> bool:
        """Whether a norm is that of the gradients that the layout's optimizer was given, each element once.

        What a norm counts twice may be small: norms' weights are a ten-thousandth of it. Next to these
        gradients, which were clipped by this norm, nothing but the rounding of a sum is between.
        """
        clipping = self._run.clipping
        clipped = min(1.0, clipping / (seen + 1e-6)) if clipping else 1.0
        own = norm_of({name: whole.values for name, whole in step.gradients.items()}) / clipped
        return abs(seen - own) <= self._bench.tolerances.norm * own

    def _error(self, step: ObservedStep, expected: Evaluation, name: str, scale: float) -> float:
        """The largest relative difference of a gradient, over all its copies."""
        wanted = expected.gradients[name] * scale
        whole = step.gradients.get(name)
        if whole is None:
            return 0.0 if not float(wanted.abs().max()) else 1.0
        same = [whole.values, *self._places.copies(name, whole)]
        size = scale * size_of(expected, name)
        error = max(float((values - wanted).abs().max()) for values in same)
        # The copy of each data-parallel rank differs from the first one's by so much.
        return max(error, step.data_spread.get(name, 0.0), whole.padding) / size

    def _row(
        self, index: int, step: ObservedStep, expected: Evaluation, norm: float, worst: tuple[float, str]
    ) -> None:
        self.rows.append(
            diagnosis.StepRow(
                clipping=self._run.clipping,
                step=index + 1,
                loss=step.losses[0],
                expected_loss=expected.loss,
                norm=step.norms[0],
                expected_norm=norm,
                gradient=worst[0],
                gradient_of=worst[1],
                update=None,
                update_of="",
            )
        )

    def _loss_finding(
        self,
        index: int,
        step: ObservedStep,
        weights: Weights,
        expected: Evaluation,
        batches: Sequence[Batch],
        wrong: Sequence[str],
    ) -> diagnosis.ParityFinding:
        by_gradients = None
        if wrong and not self._run.clipping:
            # Data that is read twice, or by the wrong replica, shows in which micro-batches a gradient sums.
            errors = dict.fromkeys(wrong, 1.0)
            found = self._gradient_finding(index, step, weights, batches, wrong, errors, loss_equal=False)
            if found.cause == diagnosis.SAME_DATA:
                return found
            by_gradients = found if found.cause == diagnosis.DATA_ORDER else None
        supposed = dict(self._bench.suppose(weights, batches))
        own = expected if self._bench.layers is None else self._bench.layers.evaluate(weights, batches)
        first = self._first_layer(own) if index == 0 else None
        tolerance = self._bench.tolerances.value * 10
        facts = diagnosis.LossFacts(
            seen=step.losses[0],
            expected=expected.loss,
            supposed=supposed,
            first_layer=first,
            other_family=abs(own.loss - step.losses[0])
            <= min(tolerance * abs(own.loss), abs(own.loss - expected.loss)),
        )
        by_loss = diagnosis.diagnose_loss(facts, self._degrees, tolerance, step=index + 1)
        return by_loss if by_gradients is None or by_loss.cause in supposed else by_gradients

    def _first_layer(self, own: Evaluation) -> tuple[str, float] | None:
        """The first layer whose output for the first micro-batch differs from one process's."""
        for name, wanted in own.outputs.items():
            parts = [
                rank.outputs[name]
                for rank in self._run.ranks
                if self._run.mesh.replica(rank.rank) == 0 and name in rank.outputs
            ]
            real = wanted.isfinite()  # logits of padding are not
            errors = [relative(values[real], wanted[real]) for values in outputs_of(parts, wanted)]
            if errors and max(errors) > self._bench.tolerances.gradient:
                return name, max(errors)
        return None

    def _gradient_finding(
        self,
        index: int,
        step: ObservedStep,
        weights: Weights,
        batches: Sequence[Batch],
        wrong: Sequence[str],
        errors: Mapping[str, float],
        *,
        loss_equal: bool,
    ) -> diagnosis.ParityFinding:
        reference = self._bench.reference
        each = [reference.evaluate(weights, [batch], among=batches).gradients for batch in batches]
        facts = [
            gradient_facts(self._places, name, step, each, errors[name], self._previous.get(name))
            for name in wrong
        ]
        names = [name for name in step.gradients if name not in wrong]
        return diagnosis.diagnose_gradients(
            facts, names, self._degrees, step=index + 1, loss_equal=loss_equal
        )

    def _clipping_finding(
        self, index: int, step: ObservedStep, expected: Evaluation, norm: float, squares: Mapping[str, float]
    ) -> diagnosis.ParityFinding:
        """The finding for clipping: without it this step's gradients were right, or that pass has one."""
        scales: dict[int, list[tuple[float, float]]] = {}
        for name, gradient in expected.gradients.items():
            whole = step.gradients.get(name)
            if whole is not None:
                product = float((whole.values.double() * gradient.double()).sum())
                scales.setdefault(self._places.holders[name][0], []).append((product, squares[name]))
        by_stage = {
            stage: sum(p for p, _ in pairs) / max(sum(s for _, s in pairs), 1e-30)
            for stage, pairs in scales.items()
        }
        facts = norm_facts(self._places, None, norm, squares, expected)
        return diagnosis.diagnose_clipping(facts, by_stage, self._run.clipping, self._degrees, step=index + 1)

    def _bias_finding(self, index: int, expected: Evaluation) -> diagnosis.ParityFinding | None:
        """The finding for a router's bias that is on some rank another one than after this step."""
        for rank in self._run.ranks:
            for name, values in rank.biases[index + 1].items():
                off = float((values - expected.biases[name]).abs().max())
                if off > self._bench.tolerances.weight:
                    what = f"block {name} on rank {rank.rank} is off by {off:.2g} after the step"
                    why = "tokens of some ranks or micro-batches are not counted, or counted twice"
                    return diagnosis.ParityFinding(
                        cause=diagnosis.BIASES, what=what, why=why, step=index + 1, tensor=name
                    )
        return None

    def _frozen_finding(self, index: int, step: ObservedStep) -> diagnosis.ParityFinding | None:
        """The finding for a frozen weight that has a gradient, or that is not what it was to the last bit."""
        for name in (each for each in self._bench.reference.order if each in self._bench.reference.frozen):
            moved = not torch.equal(step.weights[name].values, step.next_weights[name].values)
            if moved or name in step.gradients:
                what = f"{name} is frozen, and {'changes in the step' if moved else 'has a gradient'}"
                why = "the optimizer is given it, or something writes over it"
                return diagnosis.ParityFinding(
                    cause=diagnosis.FROZEN, what=what, why=why, step=index + 1, tensor=name
                )
        return None

    def _update_finding(self, index: int, step: ObservedStep) -> diagnosis.ParityFinding | None:
        if self._updates.is_known:
            finding = self._moved(index, step)
            if finding is not None:
                return finding
        for name, weight in step.next_weights.items():
            held = step.after.get(name)
            if held is not None and relative(weight.values, held.values) > self._bench.tolerances.held:
                return not_gathered(step, name, index + 1)
        return self._copies(index + 1, step.next_weights, step.next_spread)

    def _moved(self, index: int, step: ObservedStep) -> diagnosis.ParityFinding | None:
        before = {name: whole.values for name, whole in step.before.items()}
        given = {name: whole.values for name, whole in step.gradients.items()}
        expected = self._updates.step(before, given)
        rate, decay = (self._updates.of_step(key) for key in ("lr", "weight_decay"))
        self._updates.advance()
        facts = {}
        for name in reversed(self._bench.reference.order):
            if name in before:
                facts[name] = update_facts(
                    name, before[name], step.after[name].values, expected[name], rate=rate, decay=decay
                )
        worst = max(facts.values(), key=lambda item: item.error)
        self.rows[-1] = replace(self.rows[-1], update=worst.error, update_of=worst.name)
        wrong = [item for item in facts.values() if not item.error <= self._bench.tolerances.update]
        right = [name for name, item in facts.items() if item not in wrong]
        return diagnosis.diagnose_updates(wrong, right, step=index + 1) if wrong else None


_OFF = 0.02  # above the rounding of bf16


def judge_masks(masks: Sequence[dict[str, Mask]], mesh: Mesh) -> Iterator[diagnosis.ParityFinding]:
    """Findings, at most one per axis and one of scales: the first layer at fault."""
    places = [mesh.coords(rank) for rank in range(len(masks))]
    names = list(dict.fromkeys(name for found in masks for name in found))
    by_tensor = [message for name in names for message in _over_tensor(name, masks, places)]
    by_data = [message for name in names for message in _over_data(name, masks, places)]
    by_scale = [
        (name, f"dropout {name}: what it keeps is {mask.scale_off:.2g} off", "that is divided by 1 - p")
        for found in masks
        for name, mask in found.items()
        if mask.scale_off > _OFF
    ]
    causes = (diagnosis.DROPOUT_TENSOR, by_tensor), (diagnosis.DROPOUT_DATA, by_data)
    for cause, messages in (*causes, (diagnosis.DROPOUT_SCALE, by_scale)):
        if messages:
            layer, what, why = messages[0]
            yield diagnosis.ParityFinding(cause=cause, what=what, why=why, step=1, tensor=layer)


Place = dict[str, int]
MaskSaid = tuple[str, str, str]
"""(module, what, why)."""


def _over_tensor(name: str, masks: Sequence[dict[str, Mask]], places: Sequence[Place]) -> Iterator[MaskSaid]:
    for group in _groups(name, masks, places, "tp"):
        different = len({mask.digest for mask in group})
        if group[0].sharded and different < len(group):
            what = f"dropout {name}: tensor-parallel ranks drop the same elements of different slices"
            yield name, what, "activations are cut here, so each rank must draw a mask of its own"
        if not group[0].sharded and different > 1:
            what = f"dropout {name}: tensor-parallel ranks drop different elements of the same activations"
            why = "activations are the same on every rank here: their seeds differ, or one drew more"
            yield name, what, why


def _over_data(name: str, masks: Sequence[dict[str, Mask]], places: Sequence[Place]) -> Iterator[MaskSaid]:
    for axis, group in ((a, g) for a in AXES if a.replicates for g in _groups(name, masks, places, a.name)):
        if len({mask.digest for mask in group}) < len(group):
            what = f"dropout {name}: {axis.title}-parallel ranks drop the same elements"
            yield name, what, "their generators are seeded alike: replicas should draw masks of their own"


def _groups(
    name: str, masks: Sequence[dict[str, Mask]], places: Sequence[Place], axis: str
) -> list[list[Mask]]:
    """The masks of ranks that differ in ``axis`` alone, where there are several."""
    found: dict[tuple[tuple[str, int], ...], list[Mask]] = {}
    for mask, place in zip(masks, places, strict=True):
        if name in mask:
            key = tuple((other, at) for other, at in place.items() if other != axis)
            found.setdefault(key, []).append(mask[name])
    return [group for group in found.values() if len(group) > 1]
