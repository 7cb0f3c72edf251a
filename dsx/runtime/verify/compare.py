"""A layout's training against the reference: findings, and a table of how near each step is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from dsx.plan.parity import causes
from dsx.plan.parity.facts import Degrees, Finding, LossFacts, StepRow
from dsx.plan.parity.gradients import diagnose_gradients
from dsx.plan.parity.values import diagnose_clipping, diagnose_loss, diagnose_norm, diagnose_updates
from dsx.runtime.verify import assemble
from dsx.runtime.verify.assemble import WholeStep
from dsx.runtime.verify.evidence import (
    Places,
    gradient_facts,
    norm_facts,
    not_gathered,
    outputs_of,
    update_facts,
)
from dsx.runtime.verify.measure import relative, scale_of
from dsx.runtime.verify.optimizer import Updates
from dsx.runtime.verify.reference import Batch, Evaluation, Reference
from dsx.runtime.verify.seen import Seen

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """Largest differences that pass, relative.

    Attributes:
        value: Of losses and norms.
        gradient: Of a gradient's elements to its largest.
        update: Of an update's elements to the largest update.
        weight: Of weights that should be the same to their largest element.
        held: Of a weight in the model to what its optimizer holds.
    """

    value: float
    gradient: float
    update: float
    weight: float
    held: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a layout is compared with.

    Attributes:
        reference: One process.
        batches: Step -> the micro-batches of all replicas, replica fastest.
        updates: Makes torch's optimizer.
        tolerances: What passes.
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


class Comparison:
    """One pass of a layout beside the reference, step by step until something differs.

    Every step of the reference starts from the layout's own weights, so that rounding does not grow from
    step to step and a difference is that step's.
    """

    def __init__(self, seen: Seen, bench: Bench) -> None:
        self._seen, self._bench = seen, bench
        mesh = seen.mesh
        self._degrees = Degrees(tp=mesh.tp, pp=mesh.pp, dp=mesh.dp, micro_batches=seen.micro_batches)
        self._places = Places(
            known=assemble.known(seen), holders=assemble.holders(seen), degrees=self._degrees
        )
        self._updates = bench.updates()
        self._previous: dict[str, Tensor] = {}
        self.rows: list[StepRow] = []

    def findings(self) -> list[Finding]:
        """What differs; of several things that differ in one step, what comes first in it."""
        found = self._built()
        if found is not None:
            return [found]
        for index, step in enumerate(assemble.whole_steps(self._seen)):
            finding = self._step(index, step)
            if finding is not None:
                return [finding]
        return []

    def _built(self) -> Finding | None:
        expected = self._bench.built
        if expected is None:
            return None
        whole = assemble.built_weights(self._seen)
        for name in self._bench.reference.order:
            for values in (whole[name].values, *whole[name].copies):
                off = relative(values, expected[name])
                if off > self._bench.tolerances.weight:
                    return Finding(
                        cause=causes.INITIAL_WEIGHTS,
                        what=f"weight {name} as built is off by {off:.2g} of its largest element",
                        why="the layout starts from other weights than one process: its init, or what it "
                        "loads, depends on the layout",
                        step=0,
                        tensor=name,
                    )
        return None

    def _step(self, index: int, step: WholeStep) -> Finding | None:
        copies = self._copies(index, step)
        if copies is not None:
            return copies
        batches = self._bench.batches(index)
        weights = {name: whole.values for name, whole in step.weights.items()}
        expected = self._bench.reference.evaluate(weights, batches)
        finding = self._compare(index, step, weights, expected, batches)
        self._previous = expected.gradients
        return finding

    def _copies(self, index: int, step: WholeStep) -> Finding | None:
        """Ranks that should hold the same weight hold the same."""
        for name in self._bench.reference.order:
            whole = step.weights[name]
            same = self._places.copies(name, whole)
            axes = {
                "pipeline or tensor-parallel ranks": max(
                    (relative(t, whole.values) for t in same), default=0.0
                ),
                "data-parallel ranks": step.weight_spread[name] / scale_of(whole.values),
            }
            for axis, off in axes.items():
                if off > self._bench.tolerances.weight:
                    start = "at the start" if index == 0 else f"after step {index}"
                    return Finding(
                        cause=causes.REPLICAS_DRIFT,
                        what=f"copies of {name} on {axis} differ by {off:.2g} {start}",
                        why="they are not built alike" if index == 0 else "they are not updated alike",
                        step=index,
                        tensor=name,
                    )
        return None

    def _compare(
        self, index: int, step: WholeStep, weights: Weights, expected: Evaluation, batches: Sequence[Batch]
    ) -> Finding | None:
        squares = {name: float(g.double().square().sum()) for name, g in expected.gradients.items()}
        norm = sum(squares.values()) ** 0.5
        clipping = self._seen.clipping
        scale = min(1.0, clipping / (norm + 1e-6)) if clipping else 1.0
        errors = {name: self._error(step, expected, name, scale) for name in self._backward(expected)}
        worst = max(errors, key=lambda name: errors[name])
        self._row(index, step, expected, norm, (errors[worst], worst))
        tolerances = self._bench.tolerances
        loss_equal = abs(step.losses[0] - expected.loss) <= tolerances.value * max(1e-6, abs(expected.loss))
        wrong = [name for name, error in errors.items() if not error <= tolerances.gradient]
        if not loss_equal:
            return self._loss_finding(index, step, weights, expected, batches, wrong)
        if wrong and clipping:
            return self._clipping_finding(index, step, expected, norm, squares)
        if wrong:
            return self._gradient_finding(index, step, weights, batches, wrong, errors, loss_equal=True)
        seen = step.norms[0]
        if seen is not None and not abs(seen - norm) <= tolerances.value * norm * 10:
            return diagnose_norm(
                norm_facts(self._places, seen, norm, squares, expected), self._degrees, step=index + 1
            )
        return self._update_finding(index, step)

    def _backward(self, expected: Evaluation) -> list[str]:
        """Tensors with a gradient, in the order of the backward."""
        return [name for name in reversed(self._bench.reference.order) if name in expected.gradients]

    def _error(self, step: WholeStep, expected: Evaluation, name: str, scale: float) -> float:
        """Largest difference of a gradient over all its copies, relative."""
        wanted = expected.gradients[name] * scale
        whole = step.gradients.get(name)
        if whole is None:
            return 0.0 if not float(wanted.abs().max()) else 1.0
        floor = self._floor(expected) * scale
        same = [whole.values, *self._places.copies(name, whole)]
        size = max(scale_of(wanted), floor)
        error = max(float((values - wanted).abs().max()) for values in same)
        # A data-parallel rank's own copy strays as the first one's does.
        return max(error, step.data_spread.get(name, 0.0), whole.padding) / size

    def _floor(self, expected: Evaluation) -> float:
        """What counts as large for a gradient that is nothing but rounding: a thousandth of the largest."""
        return 1e-3 * max(scale_of(gradient) for gradient in expected.gradients.values())

    def _row(
        self, index: int, step: WholeStep, expected: Evaluation, norm: float, worst: tuple[float, str]
    ) -> None:
        self.rows.append(
            StepRow(
                clipping=self._seen.clipping,
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
        step: WholeStep,
        weights: Weights,
        expected: Evaluation,
        batches: Sequence[Batch],
        wrong: Sequence[str],
    ) -> Finding:
        if wrong and not self._seen.clipping:
            # Data that is read twice, or by the wrong replica, shows in what the gradient is a sum of.
            errors = dict.fromkeys(wrong, 1.0)
            found = self._gradient_finding(index, step, weights, batches, wrong, errors, loss_equal=False)
            if found.cause in (causes.SAME_DATA, causes.DATA_ORDER):
                return found
        supposed = dict(self._bench.suppose(weights, batches))
        own = expected if self._bench.layers is None else self._bench.layers.evaluate(weights, batches)
        first = self._first_layer(own) if index == 0 else None
        tolerance = self._bench.tolerances.value * 10
        facts = LossFacts(
            seen=step.losses[0],
            expected=expected.loss,
            supposed=supposed,
            first_layer=first,
            other_family=self._bench.layers is not None
            and abs(own.loss - step.losses[0]) <= tolerance * abs(own.loss),
        )
        return diagnose_loss(facts, self._degrees, tolerance, step=index + 1)

    def _first_layer(self, own: Evaluation) -> tuple[str, float] | None:
        """The first layer whose output for the first micro-batch is another one than in one process."""
        for name, wanted in own.outputs.items():
            parts = [
                rank.outputs[name]
                for rank in self._seen.ranks
                if self._seen.mesh.coords(rank.rank)["dp"] == 0 and name in rank.outputs
            ]
            real = wanted.isfinite()  # logits of padding are not
            errors = [relative(values[real], wanted[real]) for values in outputs_of(parts, wanted)]
            if errors and max(errors) > self._bench.tolerances.gradient:
                return name, max(errors)
        return None

    def _gradient_finding(
        self,
        index: int,
        step: WholeStep,
        weights: Weights,
        batches: Sequence[Batch],
        wrong: Sequence[str],
        errors: Mapping[str, float],
        *,
        loss_equal: bool,
    ) -> Finding:
        each = [self._bench.reference.evaluate(weights, [batch]).gradients for batch in batches]
        facts = [
            gradient_facts(self._places, name, step, each, errors[name], self._previous.get(name))
            for name in wrong
        ]
        names = [name for name in step.gradients if name not in wrong]
        return diagnose_gradients(facts, names, self._degrees, step=index + 1, loss_equal=loss_equal)

    def _clipping_finding(
        self, index: int, step: WholeStep, expected: Evaluation, norm: float, squares: Mapping[str, float]
    ) -> Finding:
        """Without clipping the gradients of this step were right (else that pass has a finding)."""
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
        return diagnose_clipping(facts, by_stage, self._seen.clipping, self._degrees, step=index + 1)

    def _update_finding(self, index: int, step: WholeStep) -> Finding | None:
        if self._updates.is_known:
            finding = self._moved(index, step)
            if finding is not None:
                return finding
        for name, weight in step.next_weights.items():
            held = step.after.get(name)
            if held is not None and relative(weight.values, held.values) > self._bench.tolerances.held:
                return not_gathered(step, name, index + 1)
        return None

    def _moved(self, index: int, step: WholeStep) -> Finding | None:
        before = {name: whole.values for name, whole in step.before.items()}
        given = {name: whole.values for name, whole in step.gradients.items()}
        expected = self._updates.step(before, given)
        rate, decay = self._updates.learning_rate, self._updates.weight_decay
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
        return diagnose_updates(wrong, right, step=index + 1) if wrong else None
