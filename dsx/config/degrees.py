"""Degrees of parallelism for a world size: what "auto" becomes, and which explicit numbers are legal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsx.config.measured import is_wanted
from dsx.config.problems import at, either, raise_all
from dsx.config.schema import DsxConfig
from dsx.errors import ConfigError
from dsx.plan.builders import ScheduleName, default_chunks, placement_of
from dsx.spec.mesh import Mesh
from dsx.spec.model import ModelSpec

_MEASURABLE = ("parallel.chunks", "schedule.name")
_MAX_AUTO_TENSOR = 8  # One node's fast links; arXiv:2104.04473, takeaway 1.


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """A mesh, its virtual stages per rank, and how the config's "auto" led there."""

    mesh: Mesh
    chunks: int
    schedule_name: str
    notes: tuple[str, ...]


def resolve_degrees(dsx: DsxConfig, model: ModelSpec, *, num_layers: int, world_size: int) -> Degrees:
    """Degrees for ``world_size`` ranks.

    "auto": the prime factors of world size / fixed degrees go round-robin, largest first, to dp, then pp,
    then tp (dp always takes part, the others if they are "auto"), past an axis that cannot legally take the
    factor: tp must divide heads, key/value heads, MLP width and, with sequence parallelism, the sequence, and
    stays within 8; pp x chunks leaves every stage a block. So 1, 2, 4, 8 ranks become tp x pp x dp =
    1x1x1, 1x1x2, 1x2x2, 2x2x2.

    Args:
        dsx: The config.
        model: Its model.
        num_layers: Length of the model's layer list (embedding, blocks, norm, head).
        world_size: Number of ranks.

    Raises:
        ConfigError: A number that does not divide or does not fit; names the legal ones.
    """
    problems = [*_tensor_problems(dsx, model, world_size), *_pipeline_problems(dsx, num_layers, world_size)]
    raise_all("config", problems)
    mesh = _mesh(dsx, model, world_size)
    chunks = _chunks(dsx, model, mesh.pp, num_layers)
    name = _schedule(dsx, mesh.pp, chunks)
    return Degrees(mesh=mesh, chunks=chunks, schedule_name=name, notes=tuple(_notes(dsx, mesh, chunks, name)))


def tensor_objection(dsx: DsxConfig, model: ModelSpec, tp: int) -> str | None:
    """Why this model cannot be cut over ``tp`` ranks; None if it can."""
    sizes = {
        "attention heads": model.num_heads,
        "key/value heads": model.num_kv_heads,
        "MLP width": model.ffn_size,
    }
    if dsx.parallel.sequence_parallel:
        sizes["sequence length"] = dsx.data.sequence_length
    bad = [f"{name} = {size}" for name, size in sizes.items() if size % tp]
    return f"{', '.join(bad)}: not divisible by it" if bad else None


def _tensor_problems(dsx: DsxConfig, model: ModelSpec, world_size: int) -> Iterator[ConfigError]:
    tp = dsx.parallel.tensor
    if tp == "auto":
        return
    why = f"the world size {world_size} does not divide by it" if world_size % tp else None
    why = why or tensor_objection(dsx, model, tp)
    if why:
        pp = dsx.parallel.pipeline
        room = world_size if pp == "auto" or world_size % pp else world_size // pp
        legal = [n for n in _divisors(room) if not tensor_objection(dsx, model, n)]
        long = " (or dsx.parallel.sequence_parallel = false)" if why.startswith("sequence length") else ""
        yield ConfigError(at("dsx.parallel.tensor", tp), why, f"use {either(legal)}{long}")


def _pipeline_problems(dsx: DsxConfig, num_layers: int, world_size: int) -> Iterator[ConfigError]:
    tp, pp = dsx.parallel.tensor, dsx.parallel.pipeline
    if pp == "auto":
        return
    key = at("dsx.parallel.pipeline", pp)
    fits = [n for n in _divisors(world_size) if n <= num_layers]
    if world_size % pp:
        yield ConfigError(key, f"the world size {world_size} does not divide by it", f"use {either(fits)}")
    elif pp > num_layers:
        why = f"more stages than layers: the model has {num_layers} (blocks, embeddings, norm and head)"
        yield ConfigError(key, why, f"use {either(fits)}")
    elif tp != "auto" and world_size % tp == 0 and world_size % (tp * pp):
        legal = [n for n in fits if world_size % (n * tp) == 0]
        why = f"the world size {world_size} does not divide by tensor {tp} x pipeline {pp}"
        yield ConfigError(key, why, f"use {either(legal)} with dsx.parallel.tensor = {tp}")


def _mesh(dsx: DsxConfig, model: ModelSpec, world_size: int) -> Mesh:
    tp, pp = dsx.parallel.tensor, dsx.parallel.pipeline
    degrees = {"dp": 1, "pp": 1 if pp == "auto" else pp, "tp": 1 if tp == "auto" else tp}
    accepts: dict[str, Callable[[int], bool]] = {"dp": lambda _: True}
    if pp == "auto":
        accepts["pp"] = lambda n: _pipeline_fits(dsx, model, n)
    if tp == "auto":
        accepts["tp"] = lambda n: n <= _MAX_AUTO_TENSOR and not tensor_objection(dsx, model, n)
    turns = list(accepts)
    for factor in reversed(_prime_factors(world_size // (degrees["pp"] * degrees["tp"]))):
        axis = next(axis for axis in turns if accepts[axis](degrees[axis] * factor))
        degrees[axis] *= factor
        after = turns.index(axis) + 1
        turns = turns[after:] + turns[:after]
    return Mesh.of(**degrees)


def _pipeline_fits(dsx: DsxConfig, model: ModelSpec, pp: int) -> bool:
    """Whether every stage gets a block at the fewest chunks that the config allows."""
    chunks, method = dsx.parallel.chunks, dsx.partition.method
    if isinstance(method, list):
        return len(method) % (pp if chunks == "auto" else pp * chunks) == 0
    if chunks == "auto":
        name = dsx.schedule.name
        chunks = 1 if name == "auto" else default_chunks(name)
    return pp * chunks <= model.num_layers


def _chunks(dsx: DsxConfig, model: ModelSpec, pp: int, num_layers: int) -> int:
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
    key = at("dsx.parallel.chunks", chunks)
    if name != "auto":
        _check_chunks(name, chunks, key)
    if pp * chunks > num_layers:
        why = f"more stages than layers: pipeline {pp} x chunks {chunks} on {num_layers} layers"
        raise ConfigError(key, why, f"use at most {num_layers // pp}, or a smaller dsx.parallel.pipeline")
    return chunks


def _check_chunks(name: ScheduleName, chunks: int, key: str) -> None:
    """Raise ConfigError unless schedule ``name`` can have so many chunks on several ranks."""
    if default_chunks(name) == 1:
        if chunks > 1:
            why = f"schedule {name} has one chunk per rank"
            raise ConfigError(key, why, 'use 1, or schedule "interleaved"')
    elif placement_of(name) == "v" and chunks != 2:
        raise ConfigError(key, f"schedule {name} has two chunks per rank", 'use 2, or "interleaved_zb"')
    elif chunks == 1:
        why = f"schedule {name} needs at least 2 chunks per rank"
        raise ConfigError(key, why, 'use 2 or more, or "1f1b"')


def _schedule(dsx: DsxConfig, pp: int, chunks: int) -> str:
    """The schedule's resolved name. One rank has nothing to wait for: all but gpipe are 1f1b there."""
    name = dsx.schedule.name
    if name == "auto" or (name != "gpipe" and pp == 1):
        return "interleaved" if chunks > 1 else "1f1b"
    return name


def _notes(dsx: DsxConfig, mesh: Mesh, chunks: int, name: str) -> Iterator[str]:
    for axis, wanted, got in (
        ("parallel.tensor", dsx.parallel.tensor, mesh.tp),
        ("parallel.pipeline", dsx.parallel.pipeline, mesh.pp),
        ("parallel.chunks", dsx.parallel.chunks, chunks),
        ("schedule.name", dsx.schedule.name, name),
    ):
        if wanted == "auto" and axis in _MEASURABLE and is_wanted(dsx, mesh.pp):
            continue
        if axis == "schedule.name" and dsx.schedule.file is not None:
            yield f"dsx.schedule.file: {dsx.schedule.file}, with its pipeline {mesh.pp} and chunks {chunks}"
        elif wanted == "auto":
            yield f"dsx.{axis}: auto -> {got}"
        elif wanted != got:
            yield f"dsx.{axis}: {wanted} -> {got}, as there is no pipeline"


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


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
