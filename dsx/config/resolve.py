"""From a config and a world size to a :class:`RunConfig`, before any process group exists."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import gcd, lcm, prod
from pathlib import Path
from typing import Any, TypeAlias

from dsx.config import elastic
from dsx.config.batch import ACCUMULATION, Batch, resolve_batch
from dsx.config.deepspeed import deepspeed_problems, mesh_problems, optimizer_notes, precision, zero_stage
from dsx.config.load import load, raise_all, told_of_set
from dsx.config.run import PENDING, RunConfig, cut_layers
from dsx.config.schema import MEASURE, DsxConfig, OuterConfig, ZeroConfig
from dsx.config.sources import read_model
from dsx.config.wording import at, suggest
from dsx.errors import ConfigError, ScheduleError
from dsx.hub.allowed import has_tiles, no_moe, unselected, unshared
from dsx.models.flops import WIDTHS
from dsx.models.params import frozen_names, in_float32, layer_kinds, param_specs, vocabulary_rows
from dsx.models.spec import ContextMethod, HubModel, Model, ModelSpec
from dsx.parallel.islands import Islands
from dsx.parallel.limits import LayoutRequest, possible, violations
from dsx.parallel.mesh import AXES, Mesh
from dsx.planner.best_first import best_first
from dsx.schedules.builders import Options, default_chunks
from dsx.schedules.interleaved import check_numbers
from dsx.schedules.program import Program
from dsx.terminal import amount

__all__ = ["RunConfig", "resolve"]


def read_file(dsx: DsxConfig) -> tuple[DsxConfig, Program | None]:
    """The schedule in ``dsx.schedule.file``, and the config with the degrees for which it is written."""
    if dsx.schedule.file is None:
        return dsx, None
    key = at("dsx.schedule.file", dsx.schedule.file)
    try:
        text = Path(dsx.schedule.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(key, f"it cannot be read ({reason})", "give a CSV file, one row per rank") from None
    try:
        program = Program.read(text, name=Path(dsx.schedule.file).name)
    except ScheduleError as error:
        raise ConfigError(key, f"{error.where}: {error.what}", error.fix) from None
    assert program.rows is not None
    degrees = {"pipeline": program.rows.num_ranks, "chunks": program.rows.num_chunks}
    for axis, count in degrees.items():
        wanted = getattr(dsx.parallel, axis)
        if wanted not in ("auto", count):
            raise ConfigError(
                at(f"dsx.parallel.{axis}", wanted),
                f"dsx.schedule.file {dsx.schedule.file} is written for {count}",
                f'use {count} or "auto", or another file',
            )
    return dsx.model_copy(update={"parallel": dsx.parallel.model_copy(update=degrees)}), program


def choose(dsx: DsxConfig, name: str, *, pp: int, chunks: int, accumulation: int) -> Program:
    """The builder ``name`` with the config's options; without them if measuring is still to find the name."""
    block = dsx.schedule
    keys = ("group_size", "warmup", "most_live")
    given = {key: value for key in keys if (value := getattr(block, key)) is not None}
    to_be_measured = block.name == "auto" and dsx.is_measured(pp)
    try:
        if not given or pp == 1 or to_be_measured:
            check_numbers(name, pp, chunks, accumulation)
            return Program(name=name)
        options = Options(
            group_size=block.group_size, warmup_per_rank=block.warmup, most_live=block.most_live
        )
        program = Program(name=name, options=options)
        program.build(pp, chunks, accumulation)
    except ScheduleError as error:
        # The name that the builders have for it.
        where, what, fix = (
            text.replace("warmup_per_rank", "warmup") for text in (error.where, error.what, error.fix)
        )
        key = at("dsx.schedule", given) if given else at(ACCUMULATION, accumulation)
        raise ConfigError(key, f"{where}: {what}", fix) from None
    return program


def check_file(dsx: DsxConfig, program: Program, *, pp: int, chunks: int, accumulation: int) -> None:
    """Raise ConfigError unless the file is written for this size."""
    try:
        program.build(pp, chunks, accumulation)
    except ScheduleError as error:
        raise ConfigError(
            at("dsx.schedule.file", dsx.schedule.file),
            error.what,
            "set the batch keys and degrees to the file's, or use dsx.schedule.name",
        ) from None


_KEYS = {
    "tensor": "dsx.parallel.tensor",
    "pipeline": "dsx.parallel.pipeline",
    "context": "dsx.parallel.context",
    "context_method": "dsx.parallel.context_method",
    "expert": "dsx.parallel.expert",
    "chunks": "dsx.parallel.chunks",
    "reduce": "dsx.zero.reduce",
    "keep_gathered_bytes": "dsx.zero.keep_gathered_bytes",
}


def _refusals(asked: LayoutRequest) -> list[ConfigError]:
    """The violations of the table of limits to ``asked``, the first one for each key."""
    first = {each.key: each for each in reversed([*violations(asked)])}
    return [
        ConfigError(at(_KEYS[each.key], each.value), each.why, each.fix) for each in reversed(first.values())
    ]


def zero_problems(zero: ZeroConfig, stage: int, expert: int = 1) -> list[ConfigError]:
    """Settings that have no effect at this ZeRO stage, or a wrong one with experts over ``expert`` ranks."""
    kept = zero.keep_gathered_bytes
    asked = LayoutRequest(reduce=zero.reduce, keep_gathered_bytes=kept, zero_stage=stage, expert=expert)
    return _refusals(asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts that the checks look at."""

    deepspeed: dict[str, Any]
    dsx: DsxConfig
    model: Model
    mesh: Mesh
    chunks: int
    batch: Batch


def check_positions(facts: Facts) -> Iterator[ConfigError]:
    """Check that a sequence fits the model's positions."""
    length, most = facts.dsx.data.sequence_length, facts.model.max_positions
    if length > most:
        key = at("dsx.data.sequence_length", length)
        fix = f"use at most {most}, or raise max_position_embeddings (or n_positions) in dsx.model.overrides"
        yield ConfigError(key, f"the model has {most} positions", fix)


def check_training(facts: Facts) -> Iterator[ConfigError]:
    """Check that there is what evaluation, the output's name, a roll-back and a resumption need."""
    every = facts.dsx.train.eval_every
    if every and not facts.dsx.data.held_out:
        yield ConfigError(
            at("dsx.train.eval_every", every),
            "dsx.data.held_out = 0 keeps no text for evaluation",
            "set dsx.data.held_out to 0.05, or eval_every to 0",
        )
    output = facts.dsx.train.output
    if re.search(r"[{}]", output.replace("{layout}", "")):
        key = at("dsx.train.output", output)
        yield ConfigError(key, "braces stand for a name that is not known", "use {layout}, or no braces")
    rolls_back = facts.dsx.faults.rolls_back
    if rolls_back is not None and facts.dsx.train.save_every == 0:
        yield ConfigError(
            at(f"dsx.faults.{rolls_back}", "roll_back"),
            "dsx.train.save_every = 0 saves nothing before the end",
            "set dsx.train.save_every, or another policy: stop",
        )
    resume = facts.dsx.train.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        yield ConfigError(
            at("dsx.train.resume", resume),
            "there is no such folder",
            'give the output folder of a run or one of its checkpoints, "auto" or "never"',
        )


def check_profile(facts: Facts) -> Iterator[ConfigError]:
    """Check that keys which mean nothing without a profile come with one, and that one can be made."""
    dsx, cap = facts.dsx, facts.dsx.schedule.activation_gib
    if facts.mesh.cp > 1 and dsx.profile_source is not None:
        yield ConfigError(
            at("dsx.profile", dsx.profile_source),
            f"dsx.parallel.context = {facts.mesh.cp}, and layers are measured on whole sequences",
            "leave it out, or use context 1",
        )
    if dsx.recompute == "offload" and dsx.profile_source is not None:
        yield ConfigError(
            at("dsx.profile", dsx.profile_source),
            'dsx.recompute = "offload", and layers are measured one by one: nothing hides a copy there',
            'leave it out, or use recompute "full"',
        )
    for key, value, is_set in (
        ("dsx.recompute", dsx.recompute, dsx.recompute == "auto"),
        ("dsx.schedule.activation_gib", cap, cap is not None),
    ):
        if is_set and dsx.profile_source is None:
            yield ConfigError(
                at(key, value), "nothing is measured that it could go by", 'set dsx.profile to "measure"'
            )


def check_own_modules(facts: Facts) -> Iterator[ConfigError]:
    """Check that nothing is asked of transformers' modules that only dsx's have."""
    why = unselected(facts.model) if facts.dsx.recompute == "selective" else None
    if why is not None:
        yield ConfigError(
            at("dsx.recompute", "selective"), f"{facts.model.family}: {why}", 'use "full" or "none"'
        )
    if facts.dsx.mlp_tiles != 1 and not has_tiles(facts.model):
        yield ConfigError(
            at("dsx.mlp_tiles", facts.dsx.mlp_tiles),
            f"{facts.model.family}: no module of its blocks is known to be a feed-forward, which takes "
            "hidden states alone and computes each token by itself",
            "use 1",
        )
    if isinstance(facts.model, HubModel) and facts.mesh.cp > 1:
        why = unshared(facts.model, facts.mesh.cp, facts.dsx.parallel.method)
        if why is not None:
            key, fix = at("dsx.parallel.context", facts.mesh.cp), "use 1"
            if unshared(facts.model) is None:
                key, fix = at("dsx.parallel.context_method", facts.dsx.parallel.method), 'use "all_gather"'
            yield ConfigError(key, f"{facts.model.family}: {why}", fix)


def check_experts(facts: Facts) -> Iterator[ConfigError]:
    """Check that nothing is asked of experts on several ranks that only ranks with all of them have."""
    dsx, key = facts.dsx, at("dsx.parallel.expert", facts.mesh.ep)
    if facts.mesh.ep > 1 and dsx.outer is not None:
        yield ConfigError(key, "islands average what every replica of theirs holds (dsx.outer)", "use 1")
    if facts.mesh.ep > 1 and dsx.profile_source is not None:
        what = f"layers are measured on a rank that has all experts ({at('dsx.profile', dsx.profile_source)})"
        yield ConfigError(key, what, "use 1, or leave dsx.profile out")


def check_gathering(facts: Facts) -> Iterator[ConfigError]:
    """Check that ZeRO-3's ranks would gather the same parameters."""
    why = facts.model.no_gathering if isinstance(facts.model, HubModel) else None
    if why is not None and zero_stage(facts.deepspeed) == 3:
        yield ConfigError(at("zero_optimization.stage", 3), why, "use ZeRO 0 to 2")
    zero = facts.deepspeed.get("zero_optimization") or {}
    all_reduce, nvme = (
        "stage3_use_all_reduce_for_fetch_params",
        (zero.get("offload_param") or {}).get("device"),
    )
    found = ((all_reduce, zero.get(all_reduce)), ("offload_param.device", nvme == "nvme" and nvme))
    wide = in_float32(facts.model, precision(facts.deepspeed)) if zero_stage(facts.deepspeed) == 3 else ()
    for name, value in found:
        if value and wide:
            what = f"it has buffers of one dtype, and {facts.model.family} keeps {wide[0].hf[0]} in fp32"
            yield ConfigError(at(f"zero_optimization.{name}", value), what, "leave it out")


def check_freeze(facts: Facts) -> Iterator[ConfigError]:
    """Check that dsx.train.freeze names parameters, all of those that are one tensor, and leaves some."""
    freeze = facts.dsx.train.freeze
    specs = param_specs(replace(facts.model.for_tensor(1), adapter=None)) if freeze else ()
    for place, pattern in enumerate(freeze):
        key = at(f"dsx.train.freeze[{place}]", pattern)
        found = [frozen_names(spec, [pattern]) for spec in specs]
        if not any(is_found for names in found for is_found in names.values()):
            known = {word for names in found for name in names for word in _words_of(name)}
            fix = suggest(pattern, known, otherwise=f"names are like {specs[-1].hf[0]}")
            yield ConfigError(key, "no parameter of the model has it in its Hugging Face name", fix)
    for spec in specs:
        names = frozen_names(spec, freeze)
        left = [name for name, is_frozen in names.items() if not is_frozen]
        if left and len(left) < len(names):
            caught = next(name for name, is_frozen in names.items() if is_frozen)
            yield ConfigError(
                at("dsx.train.freeze", list(freeze)),
                f"it freezes {caught} and not {left[0]}, which are one tensor here, {spec.name}",
                'freeze both or none, or set dsx.model.implementation to "transformers"',
            )
            return
    if specs and not any(spec.trained for spec in specs):
        yield ConfigError(
            at("dsx.train.freeze", list(freeze)), "it leaves nothing to train", "freeze less of the model"
        )


def _words_of(name: str) -> Iterator[str]:
    """What of a name somebody may have meant: each part between dots, and what it ends and begins with."""
    parts = name.split(".")
    yield from parts
    for at_part in range(1, len(parts)):
        yield from (".".join(parts[:at_part]), ".".join(parts[at_part:]))


def check_combinations(facts: Facts) -> Iterator[ConfigError]:
    """Check DeepSpeed's keys against the mesh, and ``dsx.zero`` against the ZeRO stage."""
    yield from mesh_problems(facts.deepspeed, facts.mesh)
    yield from zero_problems(facts.dsx.zero, zero_stage(facts.deepspeed), facts.mesh.ep)


def check_moe(facts: Facts) -> Iterator[ConfigError]:
    """Check that the model has the routers that ``dsx.moe`` is about."""
    moe, model = facts.dsx.moe, facts.model
    for name, value in ((name, value) for name, value in moe.model_dump().items() if value):
        key, off = at(f"dsx.moe.{name}", value), "set it to 0, or leave it out"
        why = no_moe(name, model, precision(facts.deepspeed))
        if name == "bias_update_speed" and facts.dsx.outer is not None:
            why = "islands average parameters, and biases would go their own ways (dsx.outer)"
        elif name == "bias_update_speed" and facts.dsx.adapter is not None:
            why = "biases belong to the model that an adapter leaves as it is (dsx.adapter)"
        if why is not None:
            yield ConfigError(key, f"{model.family}: {why}", off)


CHECKS = (
    check_positions,
    check_training,
    check_combinations,
    check_own_modules,
    check_experts,
    check_gathering,
    check_freeze,
    check_profile,
    check_moe,
)


def _tuning_notes(dsx: DsxConfig) -> Iterator[str]:
    """What fine-tuning can do by mistake."""
    if dsx.adapter is not None and (dsx.model.path is None or dsx.model.weights == "random"):
        yield "dsx.adapter: what it adapts is random and stays so; dsx.model.path loads a trained model"
    if any(part.format == "chat" for part in dsx.data.parts()) and not dsx.data.keeps_whole:
        yield (
            "dsx.data.documents: joined: chats are cut anywhere and attend to the chats before them in a "
            "sequence; apart keeps each by itself"
        )


def run_notes(facts: Facts) -> Iterator[str]:
    """What the user should know without having written it."""
    if "gradient_clipping" not in facts.deepspeed:
        yield "gradient_clipping: 1.0, DeepSpeed 0.19.8's default (0 turns it off)"
    yield from _tuning_notes(facts.dsx)
    pp, micro_batches = facts.mesh.pp, facts.batch.accumulation
    if pp > 1 and micro_batches < pp:
        yield (
            f"{at(ACCUMULATION, micro_batches)} feeds a pipeline of {pp}: some ranks always wait; "
            f"use at least {pp}, better several times that"
        )
    if pp > 1 and facts.mesh.num_replicas > 1 and zero_stage(facts.deepspeed) == 3:
        yield (
            f"ZeRO-3 under a pipeline gathers a parameter up to 2 x {micro_batches} times a step (each "
            "micro-batch, forward and backward); what fits into dsx.zero.keep_gathered_bytes stays gathered, "
            "and stage 1 gathers once"
        )
    if pp * facts.chunks > facts.model.num_layers:
        yield (
            f"pipeline {pp} x chunks {facts.chunks} stages, {facts.model.num_layers} blocks: "
            "some stages hold none"
        )
    params = facts.deepspeed.get("scheduler", {}).get("params", {})
    total, steps = params.get("total_num_steps"), facts.dsx.train.steps
    if isinstance(total, int) and total < steps:
        yield (
            f"{at('scheduler.params.total_num_steps', total)} ends before dsx.train.steps = {steps}: "
            "the learning rate stays at its floor after that"
        )


_MEASURABLE = ("parallel.chunks", "schedule.name")
_MAX_AUTO_TENSOR = 8  # One node's fast links; arXiv:2104.04473, takeaway 1.


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """A mesh, its virtual stages per rank, and how the config's "auto" led there."""

    mesh: Mesh
    chunks: int
    schedule_name: str
    context_method: ContextMethod
    notes: tuple[str, ...]


def left_to_plans(key: str) -> ConfigError:
    """What is wrong with a degree of "auto" that only plans choose, in a run."""
    return ConfigError(
        at(f"dsx.parallel.{key}", "auto"),
        "a plan chooses it, and a run needs a number",
        "use a number, or the config that `dsx plan CONFIG --output FILE` writes",
    )


def resolve_degrees(dsx: DsxConfig, model: Model, *, num_layers: int, world_size: int) -> Degrees:
    """Degrees for ``world_size`` ranks.

    The prime factors of world size / fixed degrees go in turn, largest first, to data, then pipeline, then
    tensor (data always takes part, the others if they are "auto"), skipping an axis that cannot legally take
    the factor: tensor must divide heads, key/value heads, MLP width and, with sequence parallelism, the
    sequence, and stays within 8; pipeline x chunks leaves every stage a block. So 1, 2, 4, 8 ranks become
    tensor x pipeline x data = 1x1x1, 1x1x2, 1x2x2, 2x2x2. ``num_layers`` counts the
    whole list: embedding, blocks, norm, head.
    """
    tensor, pipeline, context = dsx.parallel.tensor, dsx.parallel.pipeline, dsx.parallel.context
    expert = dsx.parallel.expert
    if context == "auto" or expert == "auto":
        raise left_to_plans("context" if context == "auto" else "expert")
    asked = LayoutRequest(
        ranks=world_size,
        tensor=None if tensor == "auto" else tensor,
        pipeline=None if pipeline == "auto" else pipeline,
        context=context,
        context_method=dsx.parallel.method,
        expert=expert,
        model=model,
        layers=num_layers,
        layers_are="layers (blocks, embeddings, norm and head)",
        row=dsx.data.sequence_length,
        sequence_length=dsx.data.sequence_length if dsx.parallel.sequence_parallel else None,
    )
    raise_all("config", _refusals(asked))
    mesh = _mesh(dsx, asked)
    found = replace(asked, tensor=mesh.tp, pipeline=mesh.pp)
    raise_all("config", _refusals(found))  # what no "auto" was chosen by
    chunks = _chunks(dsx, found)
    name = _schedule(dsx, mesh.pp, chunks)
    decides = dsx.parallel.context_method == "auto" and mesh.cp > 1
    method = sends_less(model, mesh) if decides else dsx.parallel.method
    notes = tuple(_notes(dsx, mesh, chunks, name, method))
    return Degrees(mesh=mesh, chunks=chunks, schedule_name=name, context_method=method, notes=notes)


def sends_less(model: Model, mesh: Mesh) -> ContextMethod:
    """The method of attention that sends less on a context axis; ``all_gather`` if none does.

    Of N query and K key/value heads of a rank, for each token, element of a head and block: 2 K gathered, or
    (2 N + 2 K') / cp exchanged, where K' are as many as give each rank equally many
    (docs/guides/long_sequences.md). transformers' modules gather: their masks of windows and documents would
    otherwise be whole squares.
    """
    asked = LayoutRequest(model=model, tensor=mesh.tp, context=mesh.cp)
    if not isinstance(model, ModelSpec) or not possible(asked, "context_method", ["ulysses"]):
        return "all_gather"
    heads, pairs = model.num_heads // mesh.tp, max(1, model.num_kv_heads // mesh.tp)
    return "ulysses" if 2 * (heads + lcm(pairs, mesh.cp)) < 2 * pairs * mesh.cp else "all_gather"


_Deal: TypeAlias = tuple[tuple[int, ...], dict[str, int], tuple[str, ...], tuple[int, ...]]
"""(axes passed over for each factor, degrees, axes by their turn, factors that are left)."""


def _mesh(dsx: DsxConfig, asked: LayoutRequest) -> Mesh:
    """Of all ways to deal out the world size's factors, the one that skips an axis as late as possible."""
    fits: dict[str, Callable[[int], object]] = {
        "layers": lambda degree: _pipeline_fits(dsx, asked, degree),
        "features": lambda degree: _tensor_fits(asked, degree),
    }
    ranked = (axis for axis in AXES if not axis.overlaid)
    axes = {axis.name: axis for axis in sorted(ranked, key=lambda axis: not axis.replicates)}

    def dealt(deal: _Deal) -> list[_Deal] | None:
        passed, degrees, turns, factors = deal
        if not factors:
            return None
        return [
            (
                (*passed, place),
                degrees | {axis: degrees[axis] * factors[0]},
                turns[place + 1 :] + turns[: place + 1],
                factors[1:],
            )
            for place, axis in enumerate(turns)
            if axes[axis].divides not in fits or fits[axes[axis].divides](degrees[axis] * factors[0])
        ]

    fixed = {name: getattr(asked, axis.title) for name, axis in axes.items()}
    shared = asked.expert // gcd(asked.expert, asked.context)  # of which data has at least as many ranks
    degrees = {
        name: degree or (shared if axes[name].divides == "samples" else 1) for name, degree in fixed.items()
    }
    turns = tuple(name for name, degree in fixed.items() if degree is None)
    factors = tuple(reversed(_prime_factors((asked.ranks or 1) // prod(degrees.values()))))
    start: _Deal = ((), degrees, turns, factors)
    _, degrees, _, _ = next(best_first([start], cost=lambda deal: deal[0], grow=dealt))
    return Mesh.of(**degrees, ep=asked.expert)


def _tensor_fits(asked: LayoutRequest, tp: int) -> bool:
    """Whether ranks of one node can each take whole heads of their own."""
    assert asked.model is not None
    fits = tp <= _MAX_AUTO_TENSOR and possible(asked, "tensor", [tp]) != []
    return fits and not asked.model.keeps_whole(tp)


def _pipeline_fits(dsx: DsxConfig, asked: LayoutRequest, pp: int) -> bool:
    """Whether every stage gets a block at the fewest chunks that the config allows."""
    chunks, method = dsx.parallel.chunks, dsx.partition.method
    if isinstance(method, list):
        return len(method) % (pp if chunks == "auto" else pp * chunks) == 0
    if chunks == "auto":
        name = dsx.schedule.name
        chunks = 1 if name == "auto" else default_chunks(name)
    assert asked.model is not None
    return pp * chunks <= asked.model.num_layers


def _chunks(dsx: DsxConfig, asked: LayoutRequest) -> int:
    pp, model, num_layers = asked.pipeline, asked.model, asked.layers
    assert pp is not None
    assert model is not None
    assert num_layers is not None
    if pp == 1:
        return 1
    chunks, name, method = dsx.parallel.chunks, dsx.schedule.name, dsx.partition.method
    if chunks == "auto":
        if name != "auto" and default_chunks(name) == 1:
            return 1
        if isinstance(method, list) and len(method) % pp == 0:
            return len(method) // pp
        if name == "auto":
            return 2 if 2 * pp <= model.num_layers else 1
        if 2 * pp > num_layers:
            raise ConfigError(
                at("dsx.schedule.name", name),
                f"it needs 2 chunks per rank: pipeline {pp} x 2 stages, and there are {num_layers} layers",
                f'use "1f1b" or dsx.parallel.pipeline of at most {num_layers // 2}',
            )
        return 2
    raise_all("config", _refusals(replace(asked, chunks=chunks, schedule=None if name == "auto" else name)))
    return chunks


def _schedule(dsx: DsxConfig, pp: int, chunks: int) -> str:
    """The schedule's resolved name. One rank has nothing to wait for: there, all but gpipe are 1f1b."""
    name = dsx.schedule.name
    if name == "auto" or (name != "gpipe" and pp == 1):
        return "interleaved" if chunks > 1 else "1f1b"
    return name


def _profile_notes(dsx: DsxConfig, num_ranks: int) -> Iterator[str]:
    """What the user should know before anything is measured."""
    if dsx.is_measured(num_ranks):
        yield PENDING
    elif dsx.profile_source is not None:
        yield f"{at('dsx.profile', dsx.profile_source)}: one pipeline rank leaves nothing to choose"


def _notes(dsx: DsxConfig, mesh: Mesh, chunks: int, name: str, method: str) -> Iterator[str]:
    asked = dsx.parallel.context_method
    for axis, wanted, got in (
        *([("parallel.context_method", asked, method)] if mesh.cp > 1 else ()),
        ("parallel.tensor", dsx.parallel.tensor, mesh.tp),
        ("parallel.pipeline", dsx.parallel.pipeline, mesh.pp),
        ("parallel.chunks", dsx.parallel.chunks, chunks),
        ("schedule.name", dsx.schedule.name, name),
    ):
        if wanted == "auto" and axis in _MEASURABLE and dsx.is_measured(mesh.pp):
            continue
        if axis == "schedule.name" and dsx.schedule.file is not None:
            yield f"dsx.schedule.file: {dsx.schedule.file}, with its pipeline {mesh.pp} and chunks {chunks}"
        elif wanted == "auto":
            yield f"dsx.{axis}: auto -> {got}"
        elif wanted != got:
            yield f"dsx.{axis}: {wanted} -> {got}, as there is no pipeline"


def _prime_factors(n: int) -> list[int]:
    """Prime factors, smallest first.

    >>> _prime_factors(12)
    [2, 2, 3]
    """
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return factors


_DEFAULT_CLIPPING = 1.0  # deepspeed/runtime/constants.py, GRADIENT_CLIPPING_DEFAULT.


def resolve(
    source: str | Path | Mapping[str, Any],
    *,
    world_size: int,
    rank: int = 0,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Everything that a run of ``source`` on ``world_size`` ranks needs.

    Args:
        source: A DeepSpeed JSON (HJSON comments allowed) with a ``dsx`` block: its path, or its content.
        world_size: Number of ranks that the launcher has started.
        rank: This process among them (``dsx.rank()``): it says which island it is of, where one launcher has
            started several (``dsx.outer``). Without islands it is of no matter.
        overrides: ``key=value`` items that replace or add keys, as ``--set`` takes them.

    Raises:
        ConfigError: Keys that are unknown, wrong, or do not go together; each with its fix.
        ModelError: A Hugging Face config that dsx cannot build.
    """
    if world_size < 1:
        raise ConfigError(f"world size {world_size}", "a run has at least 1 rank", "use 1 or more")
    with told_of_set(overrides):
        deepspeed, dsx = load(source, overrides)
        name = "config" if isinstance(source, Mapping) else str(source)
        raise_all(name, deepspeed_problems(deepspeed))
        if dsx.outer is not None:
            raise_all(name, [*outer_problems(deepspeed, dsx)])
            islands = which_island(dsx.outer, world_size, rank)
            run = _resolve(name, deepspeed, dsx, islands.ranks)
            return replace(run, islands=islands, notes=(*run.notes, *_outer_notes(run)))
        if dsx.elastic is None:
            return _resolve(name, deepspeed, dsx, world_size)
        scorer = None
        if dsx.elastic.cluster is not None:
            from dsx.planner.cluster import read_cluster  # here: other runs need none of the planner
            from dsx.planner.predicted import LayoutScorer

            scorer = LayoutScorer.of(read_cluster(dsx.elastic.cluster))
        return elastic.lay_out(deepspeed, dsx, world_size, partial(_resolve, name), scorer)


def which_island(outer: OuterConfig, world_size: int, rank: int) -> Islands:
    """The islands as a rank of a launch sees them."""
    if outer.meet:
        assert outer.island is not None, "its schema says so"
        index, ranks = outer.island, world_size
    else:
        if world_size % outer.islands:
            raise ConfigError(
                at("dsx.outer.islands", outer.islands),
                f"{world_size} rank{'' if world_size == 1 else 's'} cannot be divided into as many islands",
                "use a multiple of them, or start each island by itself (dsx.outer.meet)",
            )
        ranks = world_size // outer.islands
        index = rank // ranks
    return Islands(
        count=outer.islands,
        index=index,
        ranks=ranks,
        meet=outer.meet,
        keys=outer.keys,
        insecure=outer.insecure,
        patience_seconds=outer.patience_seconds,
    )


def _outer_notes(run: RunConfig) -> Iterator[str]:
    """What islands may not have been meant to do."""
    outer, train = run.dsx.outer, run.dsx.train
    assert outer is not None, "asked about islands"
    if -(-outer.every // outer.shares) >= train.steps:
        key = at("dsx.outer.every", outer.every)
        yield f"{key}: with dsx.train.steps = {train.steps} islands average after the last step alone"
    momentum = outer.optimizer.momentum
    if momentum and run.weights is None and train.resume in ("auto", "never"):
        yield (
            f"{at('dsx.outer.optimizer.momentum', momentum)} carries the first movements of fresh weights "
            "too far: go on from one job's checkpoint (dsx.train.resume), or begin with lr 1 and momentum 0"
        )


def outer_problems(deepspeed: Mapping[str, Any], dsx: DsxConfig) -> Iterator[ConfigError]:
    """What islands cannot be combined with."""
    assert dsx.outer is not None, "asked about islands"
    key = at("dsx.outer.islands", dsx.outer.islands)
    if dsx.elastic is not None:
        yield ConfigError(
            key, "dsx.elastic changes the layout of one island, and all must have the same", "leave one out"
        )
    if dsx.data.streaming:
        yield ConfigError(
            key,
            "dsx.data.streaming reads samples in their order, and islands take turns at them",
            "set dsx.data.streaming to false",
        )
    hang, patience = dsx.faults.hang_seconds, dsx.outer.patience_seconds
    if 0 < hang <= patience:
        yield ConfigError(
            at("dsx.outer.patience_seconds", patience),
            "a run that waits so long for another island is ended as one that hangs, "
            f"dsx.faults.hang_seconds = {hang:g}",
            f"use less, or set dsx.faults.hang_seconds to more than {patience:g}",
        )
    if dsx.profile_source == MEASURE:
        yield ConfigError(
            key,
            "each island would measure itself (dsx.profile) and might lay the model out in another way",
            "measure in a run without dsx.outer, and name its profile.json as dsx.profile",
        )
    optimizer = (deepspeed.get("zero_optimization") or {}).get("offload_optimizer") or {}
    if optimizer.get("device") == "nvme":
        yield ConfigError(
            at("zero_optimization.offload_optimizer.device", "nvme"),
            "outer steps (dsx.outer) need the weights in memory",
            'use "cpu"',
        )


def _resolve(name: str, deepspeed: dict[str, Any], dsx: DsxConfig, world_size: int) -> RunConfig:
    model = read_model(dsx)
    dsx = dsx.model_copy(update={"data": dsx.data.model_copy(update={"tokenizer": model.tokenizer})})
    if dsx.adapter is not None and model.spec.adapter is not None:
        made = {key: value for key, value in asdict(model.spec.adapter).items() if key != "start"}
        found = dsx.adapter.model_copy(update=made)  # the start is the folder's alone
        dsx = dsx.model_copy(update={"adapter": found})
    dsx, written = read_file(dsx)
    layers = layer_kinds(model.spec)
    degrees = resolve_degrees(dsx, model.spec, num_layers=len(layers), world_size=world_size)
    if degrees.mesh.cp > 1:
        parallel = dsx.parallel.model_copy(update={"context_method": degrees.context_method})
        dsx = dsx.model_copy(update={"parallel": parallel})
    spec = replace(model.spec.for_tensor(degrees.mesh.tp), freeze=dsx.train.freeze)
    dsx, cut_notes = _as_cut(dsx, spec, degrees.mesh.tp)
    apart = degrees.mesh.ep > 1 or any(each.trained for each in in_float32(spec, precision(deepspeed)))
    if apart and dsx.zero.reduce is None:  # DeepSpeed, where it reduces, knows neither experts nor dtypes
        dsx = dsx.model_copy(update={"zero": dsx.zero.model_copy(update={"reduce": "step"})})
    batch = resolve_batch(deepspeed, degrees.mesh.num_shares, degrees.mesh.cp)
    facts = Facts(
        deepspeed=deepspeed, dsx=dsx, model=spec, mesh=degrees.mesh, chunks=degrees.chunks, batch=batch
    )
    raise_all(name, [problem for check in CHECKS for problem in check(facts)])
    if dsx.moe.z_loss and isinstance(spec, HubModel):
        from dsx.hub.balance import with_z_loss  # here: other models need nothing of it

        spec = with_z_loss(spec, dsx.moe.z_loss)
    size = {"pp": degrees.mesh.pp, "chunks": degrees.chunks, "accumulation": batch.accumulation}
    if written is not None:
        check_file(dsx, written, **size)
    program = written or choose(dsx, degrees.schedule_name, **size)
    specs = param_specs(spec, pad_multiple=dsx.model.vocab_multiple)
    stage_map = cut_layers(dsx, spec, specs, num_ranks=degrees.mesh.pp, num_chunks=degrees.chunks)
    clipping = float(deepspeed.get("gradient_clipping", _DEFAULT_CLIPPING))
    run = RunConfig(
        deepspeed=deepspeed | batch.keys() | {"gradient_clipping": clipping},
        dsx=dsx,
        mesh=degrees.mesh,
        model=spec,
        hf_config=model.hf_config,
        weights=model.weights,
        chunks=degrees.chunks,
        program=program,
        stage_map=replace(stage_map, placement=program.placement),
        param_specs=specs,
        micro_batch_size=batch.micro,
        accumulation=batch.accumulation,
        global_batch_size=batch.train,
        zero_stage=zero_stage(deepspeed),
        precision=precision(deepspeed),
        gradient_clipping=clipping,
        notes=(
            *model.notes,
            *degrees.notes,
            *cut_notes,
            *_profile_notes(dsx, degrees.mesh.pp),
            *run_notes(facts),
            *optimizer_notes(deepspeed),
        ),
    )
    if run.loss_chunk and dsx.loss.chunk_tokens == "auto":
        told = f"dsx.loss.chunk_tokens: auto -> {run.loss_chunk}: {_logits_told(run)}"
        run = replace(run, notes=(*run.notes, told))
    if dsx.is_measured(run.mesh.pp):
        from dsx.planner.measured import check_saved  # here: other runs need none of the planner

        check_saved(run)
    return run


def _logits_told(run: RunConfig) -> str:
    """What the head's logits would take beside the hidden states."""
    tokens, width = run.tokens_of_rank, WIDTHS[run.precision]
    columns = vocabulary_rows(run.model, run.mesh.tp, pad_multiple=run.dsx.model.vocab_multiple)
    logits, hidden = (amount(tokens * each * width) for each in (columns, run.model.hidden_size))
    return f"the logits of a micro-batch would take {logits}, its hidden states take {hidden}"


_TOLD_SHARE = 0.01


def _as_cut(dsx: DsxConfig, model: Model, tensor: int) -> tuple[DsxConfig, list[str]]:
    """The config without sequence parallelism where a family cannot have it, and what is told of the cut."""
    notes: list[str] = []
    if not isinstance(model, HubModel) or tensor == 1:
        return dsx, notes
    if dsx.parallel.sequence_parallel and model.no_sequence is not None:
        notes.append(f"dsx.parallel.sequence_parallel: true -> false, as {model.no_sequence}")
        parallel = dsx.parallel.model_copy(update={"sequence_parallel": False})
        dsx = dsx.model_copy(update={"parallel": parallel})
    told = [f"{path} {share:.0%}" for path, share in model.whole if share >= _TOLD_SHARE]
    if told:
        notes.append(f"whole on every tensor-parallel rank, of the blocks' parameters: {', '.join(told)}")
    return dsx, notes
