"""What layers take for one micro-batch, and measured costs of a model's layers and its pipeline's links.

Seconds and bytes of layers, measured or predicted, add up to stages. A profile is the base of every measured
"auto".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby, pairwise
from math import isfinite
from typing import Any, Self

from dsx.errors import ConfigError
from dsx.models.spec import HubModel, Model, Recompute
from dsx.schedules.simulate import Costs

PARTS = (
    *("again_seconds", "forward_wait", "again_wait", "backward_wait", "input_wait", "weight_wait"),
    *("context_wait", "expert_wait", "expert_back_wait", "hidden_wait", "host_wait"),
)
"""Seconds of a :class:`LayerCost` that are a part of others, 0 where nobody tells them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer, or several one after the other, take on one rank for one micro-batch.

    Attributes:
        backward_seconds: A whole backward.
        backward_input_seconds: The first part of a divided backward, the gradient of the input.
        backward_weight_seconds: The second part.
        again_seconds: Of a whole backward and of the first part: computing forward again.
        forward_wait: Of a forward: communication that it waits for.
        again_wait: The same of the forward done again.
        backward_wait: The same of a whole backward, without what is done again.
        input_wait: The same of the first part of a divided backward.
        weight_wait: The same of its second part.
        context_wait: Of the waits of a forward, of what is done again, and of a backward in one part or two:
            that for the ranks that share a sequence.
        expert_wait: The same for those that hold experts together.
        expert_back_wait: Of that, a backward's.
        hidden_wait: Of that, what the weight gradients of such a layer above hide in a divided backward.
        host_wait: Of the waits of a forward, and of a backward in one part or two: that for copies to the
            host and back.
        kept_bytes: Activations kept from the forward to the backward.
        pending_bytes: What is kept between the two parts of a divided backward.
        working_bytes: What the backward computes again and holds at once, beyond ``kept_bytes``.
        boundary_bytes: The output, if a stage ends here; 0 for the last layer, whose output stays.
    """

    forward_seconds: float
    backward_seconds: float
    backward_input_seconds: float
    backward_weight_seconds: float
    again_seconds: float = 0.0
    forward_wait: float = 0.0
    again_wait: float = 0.0
    backward_wait: float = 0.0
    input_wait: float = 0.0
    weight_wait: float = 0.0
    context_wait: float = 0.0
    expert_wait: float = 0.0
    expert_back_wait: float = 0.0
    hidden_wait: float = 0.0
    host_wait: float = 0.0
    kept_bytes: int = 0
    pending_bytes: int = 0
    working_bytes: int = 0
    boundary_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and whole backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def computing_seconds(self) -> float:
        """The same without what is done again and without waiting."""
        again, wait = self.again_seconds + self.again_wait, self.forward_wait + self.backward_wait
        return self.seconds - again - wait

    @classmethod
    def total(cls, layers: Sequence[Self]) -> Self:
        """Of layers that run one after the other.

        Recomputation happens layer by layer, so the largest of the ``working_bytes`` counts.
        """
        return cls(
            forward_seconds=sum(x.forward_seconds for x in layers),
            backward_seconds=sum(x.backward_seconds for x in layers),
            backward_input_seconds=sum(x.backward_input_seconds for x in layers),
            backward_weight_seconds=sum(x.backward_weight_seconds for x in layers),
            **{name: sum(getattr(x, name) for x in layers) for name in PARTS},
            kept_bytes=sum(x.kept_bytes for x in layers),
            pending_bytes=sum(x.pending_bytes for x in layers),
            working_bytes=max(x.working_bytes for x in layers),
            boundary_bytes=layers[-1].boundary_bytes,
        )


def hidden(layers: Sequence[LayerCost]) -> tuple[float, float]:
    """Of a stage's divided backward: the waits for rows that are hidden, by what seconds of weight gradients.

    Each layer with experts hides its rows behind the one above, the stage's last one behind none.
    """
    found = [x for x in layers if x.expert_back_wait]
    weights = sum(x.backward_weight_seconds - x.weight_wait for x in found[1:])
    return sum(x.hidden_wait for x in found[:-1]), weights


def stage_costs(layers: Sequence[LayerCost], bounds: Iterable[int]) -> tuple[LayerCost, ...]:
    """Layers added up per virtual stage ``[bounds[s], bounds[s + 1])``."""
    return tuple(LayerCost.total(layers[start:stop]) for start, stop in pairwise(bounds))


def action_costs(stages: Iterable[LayerCost], transfer_seconds: float = 0.0) -> Costs:
    """Seconds of every virtual stage, for the simulator."""
    stages = [*stages]
    return Costs(
        forward_seconds=tuple(x.forward_seconds for x in stages),
        backward_seconds=tuple(x.backward_seconds for x in stages),
        backward_input_seconds=tuple(x.backward_input_seconds for x in stages),
        backward_weight_seconds=tuple(x.backward_weight_seconds for x in stages),
        transfer_seconds=transfer_seconds,
    )


VERSION = 1
"""Of the JSON format."""

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""Every mode that is measured, the one that computes least again first."""

_MOST_LAYERS = 100_000
_ANEW = 'measure anew (dsx.profile = "measure")'


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions of a profile, under which alone its figures mean something.

    ``model`` is the :func:`digest` of the architecture, or any name for a layer list of one's own, whose
    ``sequence_length`` is 0 where there is no such thing.
    """

    model: str
    micro_batch_size: int
    sequence_length: int
    tensor: int
    sequence_parallel: bool
    precision: str
    device: str
    dsx: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured figures of every layer of a layer list, per way of recomputing, and of the links.

    Attributes:
        layers: Recompute mode -> cost of every layer, in order. The modes have equally many.
        latency_seconds: Time of a transfer between pipeline neighbours, without its bytes.
        bytes_per_second: Rate of such a transfer; None if there was no neighbour to measure, so that
            transfers count as free.
    """

    conditions: Conditions
    layers: Mapping[Recompute, tuple[LayerCost, ...]]
    latency_seconds: float = 0.0
    bytes_per_second: float | None = None

    @property
    def num_layers(self) -> int:
        return len(next(iter(self.layers.values())))

    def transfer_seconds(self, recompute: Recompute) -> float:
        """Time of a transfer of the largest tensor that can cross between stages."""
        if self.bytes_per_second is None:
            return 0.0
        largest = max(layer.boundary_bytes for layer in self.layers[recompute])
        return self.latency_seconds + largest / self.bytes_per_second

    def require(self, wanted: Conditions, *, name: str, ignore: Collection[str] = ()) -> None:
        """Raise ConfigError, naming key and values, unless measured under ``wanted``, but for ``ignore``."""
        for field in fields(Conditions):
            have, want = getattr(self.conditions, field.name), getattr(wanted, field.name)
            if have != want and field.name not in ignore:
                raise ConfigError(
                    f"{name}, {field.name} = {have}", f"it was not measured for this run's {want}", _ANEW
                )

    def require_mode(self, recompute: Recompute, *, name: str) -> None:
        """Raise ConfigError unless ``recompute`` was measured."""
        if recompute not in self.layers:
            raise ConfigError(
                f"{name}, recompute {recompute}", f"only {', '.join(self.layers)} was measured", _ANEW
            )

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads; equal neighbours are written once, with their number."""
        layers = {
            mode: [{"count": len([*same]), **_measured(cost)} for cost, same in groupby(costs)]
            for mode, costs in self.layers.items()
        }
        content = {
            "version": VERSION,
            "conditions": asdict(self.conditions),
            "latency_seconds": self.latency_seconds,
            "bytes_per_second": self.bytes_per_second,
            "layers": layers,
        }
        return json.dumps(content, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, name: str = "profile") -> Self:
        try:
            content = json.loads(text)
            if content["version"] != VERSION:
                raise ConfigError(
                    f"{name}, version = {content['version']}", f"this dsx reads version {VERSION}", _ANEW
                )
            profile = cls(
                conditions=Conditions(**content["conditions"]),
                layers={m: _layers(content["layers"][m]) for m in RECOMPUTE if m in content["layers"]},
                latency_seconds=content["latency_seconds"],
                bytes_per_second=content["bytes_per_second"],
            )
            reason = _objection(profile)
        except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError, RecursionError) as error:
            reason = f"it is no profile that dsx wrote ({type(error).__name__}: {error})"
        if reason is not None:
            raise ConfigError(name, reason, _ANEW)
        return profile


def digest(model: Model, *, vocab_multiple: int, loss_chunk: int = 0, mlp_tiles: int = 1) -> str:
    """Name of an architecture, its loss and tiles: equal for equal numbers, 16 hexadecimal digits."""
    numbers: Any = [model.config, model.tensor_plan] if isinstance(model, HubModel) else asdict(model)
    if isinstance(numbers, dict):
        numbers.pop("adapter")
    adapter = () if model.adapter is None else (asdict(model.adapter),)
    chunk = (loss_chunk,) if loss_chunk else ()
    tiles = (f"{mlp_tiles} tiles",) if mlp_tiles > 1 else ()
    text = json.dumps([numbers, vocab_multiple, *adapter, *chunk, *tiles], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _measured(cost: LayerCost) -> dict[str, float]:
    """The figures of a layer, without parts of its seconds that nobody measured."""
    return {name: value for name, value in asdict(cost).items() if value or name not in PARTS}


def _layers(rows: Sequence[dict[str, Any]]) -> tuple[LayerCost, ...]:
    costs: list[LayerCost] = []
    for row in rows:
        values = dict(row)
        count = values.pop("count")
        if not isinstance(count, int) or len(costs) + count > _MOST_LAYERS:
            raise ValueError(f"count = {count!r}")
        costs += [LayerCost(**values)] * count
    return tuple(costs)


def _objection(profile: Profile) -> str | None:
    """Why the figures are impossible; None if they are possible."""
    if not profile.layers or len({len(costs) for costs in profile.layers.values()}) != 1:
        return "its recompute modes have no layers, or not equally many"
    if not profile.num_layers:
        return "it has no layers"
    numbers = [getattr(x, f.name) for costs in profile.layers.values() for x in costs for f in fields(x)]
    numbers.append(profile.latency_seconds)
    rate = profile.bytes_per_second
    if rate is not None and not (isinstance(rate, int | float) and isfinite(rate) and rate > 0):
        return f"bytes_per_second = {rate!r}"
    if not all(isinstance(n, int | float) and isfinite(n) and n >= 0 for n in numbers):
        return "it holds figures below 0, or that are no numbers"
    return None
