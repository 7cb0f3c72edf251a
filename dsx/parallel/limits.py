"""Why a degree, or a combination of settings, cannot be: one table for all who choose or check a layout.

The config's resolution, the planner, an elastic restart and the conversion of a checkpoint ask it. What of
DeepSpeed's own keys does not go with a mesh stands in the table of :mod:`dsx.config.refusals`. Pure data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dsx.models.spec import ContextMethod, HubModel, Model, ModelSpec
from dsx.schedules.builders import default_chunks, placement_of

_Value = TypeVar("_Value")

_MANY = 8  # Numbers to list in a message.


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """Settings that are wanted together. What is None is open or not known, and no rule looks at it.

    Attributes:
        ranks: World size.
        context_method: How attention sees sequences that several ranks share.
        layers: How many layers there are to share out over the stages.
        row: Tokens of a sequence.
        sequence_length: The same, if tensor-parallel ranks cut activations along it.
        global_batch: Sequences per step, over all ranks.
        reduce: ``dsx.zero.reduce``.
        keep_gathered_bytes: ``dsx.zero.keep_gathered_bytes``.
        ranks_do: How the ranks are called where they do not divide.
        layers_are: What the layers are called.
    """

    ranks: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    context: int = 1
    context_method: ContextMethod = "all_gather"
    expert: int = 1
    chunks: int | None = None
    schedule: str | None = None
    model: Model | None = None
    layers: int | None = None
    row: int | None = None
    sequence_length: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    zero_stage: int | None = None
    reduce: str | None = None
    keep_gathered_bytes: int | None = None
    ranks_do: str = "the world size {} does"
    layers_are: str = "layers"


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a request breaks: ``key`` is the field of :class:`LayoutRequest` at fault."""

    key: str
    value: int | str
    why: str
    fix: str


def violations(asked: LayoutRequest) -> Iterator[Violation]:
    """The rules that a request breaks, in the order of the table."""
    for rule in _RULES:
        if (why := rule.broken(asked)) is not None:
            yield Violation(rule.key, getattr(asked, rule.key), why, _mended(rule, asked))


def possible(asked: LayoutRequest, key: str, values: Iterable[_Value]) -> list[_Value]:
    """Those of ``values`` that ``key``, a field of ``asked``, could have beside the others."""
    rules = [rule for rule in _RULES if key in rule.needs]

    def fits(value: _Value) -> bool:
        field: dict[str, Any] = {key: value}
        tried = replace(asked, **field)
        return all(rule.broken(tried) is None for rule in rules)

    return list(filter(fits, values))


def divisors(number: int) -> list[int]:
    """In ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True, slots=True)
class _Rule:
    """A row of the table: the field at fault, the fields that are looked at, the reason if any, the fix."""

    key: str
    needs: tuple[str, ...]
    why: Callable[..., str | None]
    fix: str = "use {either}"

    def broken(self, asked: LayoutRequest) -> str | None:
        """The reason; None if all is well, or not all of it is known."""
        values = [getattr(asked, name) for name in self.needs]
        return None if None in values else self.why(*values)


def _mended(rule: _Rule, asked: LayoutRequest) -> str:
    """The rule's fix with the numbers that could be."""
    if "{" not in rule.fix:
        return rule.fix
    shared_out = rule.key == "chunks" or asked.ranks is None  # else a degree, which divides the ranks
    values = range(1, (asked.layers or _MANY) + 1) if shared_out else divisors(asked.ranks or 1)
    legal = possible(asked, rule.key, values)
    *first, last = [str(value) for value in legal[:_MANY]] or ["another"]
    if len(legal) > _MANY:
        last += ", ..."
    either = f"{', '.join(first)} or {last}" if first else last
    return rule.fix.format(either=either, most=max(legal, default=1))


def _undivided(ranks: int, ranks_do: str, degree: int) -> str | None:
    return f"{ranks_do.format(ranks)} not divide by it" if ranks % degree else None


def _not_together(ranks: int, context: int, expert: int, tensor: int, pipeline: int) -> str | None:
    """Experts are shared out over neighbours of data x context."""
    left, rest = divmod(ranks, tensor * pipeline)
    if rest or left % context or left % expert == 0:
        return None
    beside = f"tensor {tensor} x pipeline {pipeline}"
    return f"{beside} leave {left} ranks of data x context, which do not divide by it"


def _whole_experts(model: Model, expert: int) -> str | None:
    if expert == 1:
        return None
    if not isinstance(model, HubModel):
        return f"{model.family}: the model has no experts"
    return model.unshared_experts(expert)


def _undivided_together(ranks: int, ranks_do: str, tensor: int, pipeline: int, context: int) -> str | None:
    """For degrees that each divide the ranks alone."""
    if (
        any(ranks % each for each in (tensor, pipeline, context))
        or ranks % (tensor * pipeline * context) == 0
    ):
        return None
    together = f"tensor {tensor} x pipeline {pipeline}" + f" x context {context}" * (context > 1)
    return f"{ranks_do.format(ranks)} not divide by {together}"


def _uncut(model: Model, tensor: int) -> str | None:
    """Each tensor-parallel rank has whole heads, and as much of the MLP as the others."""
    if isinstance(model, HubModel):
        return model.uncut(tensor)
    sizes = {
        "attention heads": model.num_heads,
        # Fewer heads than ranks are shared by as many ranks each.
        "key/value heads": model.num_kv_heads if tensor % model.num_kv_heads else 0,
        "MLP width": model.ffn_size,
    }
    bad = [f"{name} = {size}" for name, size in sizes.items() if size % tensor]
    return f"{', '.join(bad)}: not divisible by it" if bad else None


def row_multiple(context: int, tensor: int = 1) -> int:
    """What sequences divide by: each context rank has 2 chunks, which ``tensor`` cuts as one part."""
    return context * math.lcm(2, tensor) if context > 1 else tensor


def _uncut_sequence(sequence_length: int, tensor: int, context: int) -> str | None:
    if sequence_length % row_multiple(context, tensor) == 0 or sequence_length % row_multiple(context):
        return None
    beside = f" beside 2 chunks for each of {context} context ranks" if context > 1 else ""
    return f"sequence length = {sequence_length}: not divisible by it{beside}"


def _uncut_row(row: int, context: int) -> str | None:
    if row % row_multiple(context) == 0:
        return None
    return f"sequence length = {row}: not divisible by {row_multiple(context)}, two chunks for each rank"


def _too_few_heads(context_method: str, model: Model, tensor: int, context: int) -> str | None:
    if context_method != "ulysses" or context == 1:
        return None
    heads = model.num_heads if isinstance(model, ModelSpec) else model.query_heads
    # Attention in a tensor-parallel rank:
    is_whole = isinstance(model, HubModel) and model.for_tensor(tensor).heads is None
    own = heads if is_whole else heads // tensor
    if own % context == 0:
        return None
    return f"the {own} attention heads of a rank do not divide by context {context}"


def _drops(context_method: str, model: Model, context: int) -> str | None:
    if context_method != "ring" or context == 1:
        return None
    share = model.attention_dropout if isinstance(model, ModelSpec) else 0.0  # others are tried
    return f"the model drops scores of attention ({share}), which a ring does not" if share else None


def _too_deep(layers: int, layers_are: str, pipeline: int) -> str | None:
    if pipeline <= layers:
        return None
    return f"more stages than layers: the model has {layers} {layers_are}"


def _too_many_stages(layers: int, layers_are: str, pipeline: int, chunks: int) -> str | None:
    if pipeline * chunks <= layers or pipeline > layers:
        return None
    return f"more stages than layers: pipeline {pipeline} x chunks {chunks} on {layers} {layers_are}"


def _other_chunks(schedule: str, pipeline: int, chunks: int) -> str | None:
    """On one pipeline rank all schedules are alike."""
    if pipeline == 1:
        return None
    if default_chunks(schedule) == 1:
        return f"schedule {schedule} has one chunk per rank" if chunks > 1 else None
    if placement_of(schedule) == "v":
        return f"schedule {schedule} has two chunks per rank" if chunks != 2 else None
    return f"schedule {schedule} needs at least 2 chunks per rank" if chunks == 1 else None


def _unshared(global_batch: int, data: int, micro_batch: int) -> str | None:
    if global_batch % (data * micro_batch) == 0:
        return None
    return f"the global batch {global_batch} does not divide by micro-batches of it on {data} ranks"


def _fixed_reduction(reduce: str, zero_stage: int) -> str | None:
    if reduce != "micro_batch" or zero_stage == 2:
        return None
    return (
        "only zero_optimization.stage = 2 has the choice: below, gradients are reduced once per step, and "
        "stage 3 reduces them after every micro-batch"
    )


def _reduced_over_others(reduce: str, expert: int) -> str | None:
    if reduce != "micro_batch" or expert == 1:
        return None
    return (
        f"DeepSpeed then sums gradients, over ranks that hold other experts (dsx.parallel.expert = {expert})"
    )


def _nothing_gathered(keep_gathered_bytes: int, zero_stage: int) -> str | None:
    if not keep_gathered_bytes or zero_stage == 3:
        return None
    return f"zero_optimization.stage = {zero_stage} leaves parameters whole: there is nothing to gather"


_RANKS = "use {either}, or another number of ranks"

_RULES = (
    _Rule("tensor", ("ranks", "ranks_do", "tensor"), _undivided, _RANKS),
    _Rule("tensor", ("model", "tensor"), _uncut),
    _Rule(
        "tensor",
        ("sequence_length", "tensor", "context"),
        _uncut_sequence,
        "use {either} (or dsx.parallel.sequence_parallel = false)",
    ),
    _Rule("pipeline", ("ranks", "ranks_do", "pipeline"), _undivided, _RANKS),
    _Rule("pipeline", ("layers", "layers_are", "pipeline"), _too_deep),
    _Rule(
        "pipeline",
        ("ranks", "ranks_do", "tensor", "pipeline", "context"),
        _undivided_together,
        "use {either}, or another dsx.parallel.tensor or dsx.parallel.context",
    ),
    _Rule("context", ("ranks", "ranks_do", "context"), _undivided, _RANKS),
    _Rule(
        "context",
        ("row", "context"),
        _uncut_row,
        "use {either}, or another dsx.data.sequence_length",
    ),
    _Rule(
        "context_method",
        ("context_method", "model", "tensor", "context"),
        _too_few_heads,
        'use "all_gather", or another dsx.parallel.context',
    ),
    _Rule(
        "context_method",
        ("context_method", "model", "context"),
        _drops,
        'use "all_gather", or set the attention dropout to 0',
    ),
    _Rule("expert", ("ranks", "ranks_do", "expert"), _undivided, _RANKS),
    _Rule(
        "expert",
        ("ranks", "context", "expert", "tensor", "pipeline"),
        _not_together,
        "use {either}, or another dsx.parallel.tensor or dsx.parallel.pipeline",
    ),
    _Rule("expert", ("model", "expert"), _whole_experts),
    _Rule(
        "chunks",
        ("schedule", "pipeline", "chunks"),
        _other_chunks,
        'use {either}, or another schedule: "1f1b" has one chunk per rank, "interleaved" several',
    ),
    _Rule(
        "chunks",
        ("layers", "layers_are", "pipeline", "chunks"),
        _too_many_stages,
        "use at most {most}, or a smaller dsx.parallel.pipeline",
    ),
    _Rule("micro_batch", ("global_batch", "data", "micro_batch"), _unshared),
    _Rule("reduce", ("reduce", "zero_stage"), _fixed_reduction, 'use "step", or ZeRO stage 2'),
    _Rule("reduce", ("reduce", "expert"), _reduced_over_others, 'use "step"'),
    _Rule(
        "keep_gathered_bytes",
        ("keep_gathered_bytes", "zero_stage"),
        _nothing_gathered,
        "use 0, or ZeRO stage 3",
    ),
)
"""The table."""
