"""What a checkpoint holds, or shall hold, and where its bytes lie, whatever wrote it. Pure data.

Every format is read into a :class:`Catalog` and written from one. Between two catalogs a conversion is
nothing but copies of byte ranges (:mod:`dsx.checkpoint.copy_plan`), so no format knows another.

Names: a tensor of a model that dsx knows has its dsx name (``1.attention.qkv.weight``), in every format.
Any other keeps the name that its checkpoint gives it.

States, as optimizers call them: ``weight`` is what the model computes with, ``master`` the optimizer's fp32
copy, ``exp_avg`` and ``exp_avg_sq`` Adam's moments, ``momentum_buffer`` SGD's. Islands have
``outer_weights``, ``outer_momentum`` and, where rounding carries on, ``outer_error``.

Facts, the state that is not in tensors, are JSON values under these keys; a reader leaves out what its
checkpoint does not say:

=================  ====================================================================================
versions           {package: version} that wrote it
step               optimizer steps done (DeepSpeed's global_steps)
optimizer          class name of the optimizer
param_groups       [{"names": [tensors in the optimizer's order], "step": the optimizer's step count (one
                   number, or {name: number} where they differ), "numbers": {state: the same of another
                   state that is one number per tensor: NAdam's mu_product}, and every hyperparameter:
                   "lr", ...}]
lr_scheduler       state dict of the learning-rate scheduler
loss_scale         state of the loss scaler: {"scale": ..., ...}
counters           {"global_samples", "skipped_steps", "micro_steps", ...}
mesh               {axis: degree}, outermost first
chunks, placement  virtual stages per pipeline rank, and how they are dealt: ``loop`` or ``v``
stage_bounds       layer at which each virtual stage begins, then the number of layers
zero_stage, precision, schedule, global_batch_size (sequences per step)
tokens             trained on
data_cursor        global index of the next training sequence
seed               of initialisation and data order
base               where the frozen parameters are, which are left out: {"path": the model folder, "digest":
                   of its weights} or {"seed": of fresh ones}, and "vocab_multiple"
composite          where the other parts of a composite model are: {"path": its folder, "digest": of its
                   weights, "modules": where it has those of the language model}
outer              what islands know of their common weights (:class:`dsx.islands.standing.Standing`)
tied               {key of a pipeline's tied module: layers that use it}, as the user said it
unnamed_ties       layers that are tied modules of a pipeline, whose keys are not known
model              fields of :class:`dsx.models.spec.ModelSpec`, or the family and config of a
                   :class:`dsx.models.spec.HubModel`; None for a layer list of the user's own
hf_config          the Hugging Face config of that model
deepspeed_config   of DeepSpeed's JSON, what its loaders look at
wandb_run_id       the W&B run that a resumed run continues
random_files       {rank, as a string: file of its generators' states}
client_state       what the user saved with it, where it is plain data
=================  ====================================================================================

Optimizer states that are one number per tensor, in ``param_groups``: ``step`` and ``numbers``.

:mod:`dsx.checkpoint.catalog` lists these facts. What all tensors of a group have alike is written once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from dsx.errors import CheckpointError
from dsx.models.param import ITEM_BYTES, Box, ParamSpec
from dsx.models.params import tower_specs
from dsx.models.spec import HubModel, Model


def model_fact(model: Model) -> dict[str, Any]:
    """The fact ``model``, as it comes back from JSON; the form of its parameters is a layout's.

    What is frozen is a run's.
    """
    if isinstance(model, HubModel):
        config = json.loads(model.config)
        told: dict[str, Any] = {"family": model.family, "num_layers": model.num_layers, "config": config}
    else:
        left_out = ("shared_kv", "adapter", "freeze")
        told = {key: value for key, value in asdict(model).items() if key not in left_out}
    if isinstance(model, HubModel) and tower_specs(model):
        told["pictures"] = {"config": json.loads(model.pictures), "tower": model.tower}
    if model.adapter is not None:
        told["adapter"] = asdict(model.adapter)
    fact: dict[str, Any] = json.loads(json.dumps(told))
    return fact


def with_numbers(group: Mapping[str, Any], values: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """A group of names and hyperparameters with these states, by state and name."""
    kept = {state: one for state, by_name in values.items() if (one := _one(by_name)) is not None}
    step = kept.pop("step", None)
    return {**group, "step": step, **({"numbers": kept} if kept else {})}


def merged_groups(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The optimizer groups of all ranks as one list: those of one place with the same hyperparameters.

    A rank that has nothing but a tied tensor has it in its first group, where others have their own; it stays
    in the group of the first rank that has it.
    """
    merged: list[dict[str, Any]] = []
    homes: dict[str, int] = {}
    for groups in ranks:
        for place, group in enumerate(groups):
            if place == len(merged):
                merged.append({**group, "names": [], "numbers": {}})
            names = [name for name in group["names"] if homes.setdefault(name, place) == place]
            merged[place]["names"] = list(dict.fromkeys((*merged[place]["names"], *names)))
            for state, values in group["numbers"].items():
                here = {name: value for name, value in values.items() if homes.get(name) == place}
                merged[place]["numbers"].setdefault(state, {}).update(here)
    return [with_numbers(group, group.pop("numbers")) for group in merged]


def numbers_in(group: Mapping[str, Any], name: str) -> dict[str, float]:
    """The states of tensor ``name`` that are one number, those that it has.

    >>> numbers_in({"step": 3, "numbers": {"mu_product": {"a": 0.5}}}, "a")
    {'step': 3.0, 'mu_product': 0.5}
    >>> numbers_in({"step": None}, "a")
    {}
    """
    told = {"step": group.get("step"), **group.get("numbers", {})}
    found = {state: one.get(name) if isinstance(one, Mapping) else one for state, one in told.items()}
    return {state: float(one) for state, one in found.items() if one is not None}


def _one(by_name: Mapping[str, float]) -> Mapping[str, float] | float | None:
    """The value that all tensors have; by name where they differ; None if there is none."""
    return dict(by_name) if len({*by_name.values()}) > 1 else next(iter(by_name.values()), None)


NO_SETTINGS = ("names", "step", "numbers")
"""Keys of ``param_groups`` that are no hyperparameters."""

Role = Literal["trained", "frozen", "buffer"]
"""A trained parameter, a frozen one (no optimizer state), or a buffer."""


USE_ANOTHER = "use another checkpoint"
SAVE_AGAIN = f"{USE_ANOTHER}, or save this one again"


def unusable(where: str, what: str) -> CheckpointError:
    """The error for files that cannot be mended."""
    return CheckpointError(where, what, USE_ANOTHER)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a logical tensor and the bytes of a file that hold it.

    Element ``(i, j, ...)`` of the box lies ``offset + itemsize * (i * strides[0] + j * strides[1] + ...)``
    bytes into the file. Padding is no part of any piece.

    Attributes:
        file: Path relative to the checkpoint's folder, with ``/``.
        offset: Byte of the box's first element in the file.
        start: Corner of the box in the logical tensor.
        shape: Extents of the box, none of them 0.
        strides: Steps of the file's copy, in elements; none is negative.
        replica: Copies of the same tensor are numbered from 0. The pieces of replica 0 cover the tensor
            exactly once; those of another may cover a part. Replica 0 is read.
        packed: The stored tensors that make it, where it is quantised. ``offset`` and ``strides`` are then
            not of a file, but of the row-major tensor that they make, and ``file`` is where its numbers are.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    replica: int = 0
    packed: Packed | None = None

    @property
    def box(self) -> Box:
        return tuple((low, low + extent) for low, extent in zip(self.start, self.shape, strict=True))

    def stop(self, item_bytes: int) -> int:
        """Byte after the piece's last one in the file."""
        last = sum((extent - 1) * step for extent, step in zip(self.shape, self.strides, strict=True))
        return self.offset + (last + 1) * item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A tensor that stored tensors make: numbers of a few bits, and the scales of blocks of them.

    Attributes:
        method: ``fp8``, ``mxfp4``, ``4bit`` or ``int8``: a function of :mod:`dsx.checkpoint.unpack`.
        shape: Of the tensor that they make, row-major.
        block: Numbers along each dim that share a scale; after these, of ``4bit``, how many scales share one
            (0: they are plain).
        parts: The stored tensors. Their states are what they are: ``numbers``, ``scales``, ...
        mean: Of ``4bit``, what is added to scales that are quantised themselves.
    """

    method: str
    shape: tuple[int, ...]
    block: tuple[int, ...]
    parts: tuple[Entry, ...]
    mean: float = 0.0

    def part(self, state: str) -> Entry:
        """The part of this state, which there is."""
        return next(part for part in self.parts if part.state == state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One state of one logical tensor.

    Attributes:
        name: Canonical name of the tensor.
        state: ``weight``, ``master``, ``exp_avg``, ...
        shape: Logical shape, without padding.
        dtype: As torch names it: ``bfloat16``.
        pieces: Where it lies.
        role: What the tensor is to training.
        aliases: Other names under which the checkpoint knows the same tensor (ties).
    """

    name: str
    state: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    role: Role = "trained"
    aliases: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """Name and state: unique in a catalog."""
        return self.name, self.state

    @property
    def read_pieces(self) -> tuple[Piece, ...]:
        """The pieces that are read: the first copy."""
        return tuple(piece for piece in self.pieces if piece.replica == 0)

    @property
    def stored(self) -> Iterator[tuple[Entry, Piece]]:
        """The stretches of files that it is read from, each with the stored tensor that it is of."""
        for piece in self.pieces:
            if piece.packed is None:
                yield self, piece
            else:
                yield from (found for part in piece.packed.parts for found in part.stored)

    @property
    def numel(self) -> int:
        """Elements of the logical tensor."""
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of the logical tensor, once."""
        return self.numel * self.item_bytes

    def __str__(self) -> str:
        return f"tensor {self.name}, {self.state}"


@dataclass(frozen=True, slots=True)
class Checksum:
    """What bytes ``start`` to ``stop`` of a file must hash to.

    Attributes:
        stop: Byte after the last.
        algorithm: ``xxh3_128`` (dsx) or ``crc32`` (members of torch's zip files).
        digest: Hexadecimal, lower case, of full width: 32 or 8 digits.
    """

    file: str
    start: int
    stop: int
    algorithm: Literal["xxh3_128", "crc32"]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Everything that one checkpoint holds.

    Attributes:
        format: ``dsx-2``, ``deepspeed``, ``universal``, ``hf``, ...
        entries: Every state of every tensor; a key occurs once.
        facts: State that is not in tensors; keys in the module's docstring.
        specs: How tensor parallelism and pipelines cut each tensor, where that is known. Without them a
            checkpoint can be converted only to layouts with tp = 1 and pp = 1.
        checksums: What is known about the files' bytes. Those of one file and algorithm do not overlap.
        tile_elements: Size of the tiles by which the checksums were taken; 0 where they were not taken by
            tiles of the logical tensors (:func:`dsx.checkpoint.copy_plan.tiles`).
        tile_digests: For entry key -> xxh3_128 of every tile's bytes, row-major. Independent of the layout.
        links_allowed: Whether a file may be a link out of the folder, as in Hugging Face's cache.
        others: Catalogs of other folders whose files some pieces lie in, by the first part of the files'
            names here.
        float32: For a parameter's name the dtypes of a model that keeps it in float32, as its family does.
    """

    root: Path
    format: str
    entries: tuple[Entry, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    specs: tuple[ParamSpec, ...] = ()
    checksums: tuple[Checksum, ...] = ()
    tile_elements: int = 0
    tile_digests: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    links_allowed: bool = False
    others: Mapping[str, Catalog] = field(default_factory=dict)
    float32: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: set[tuple[str, str]] = set()
        for entry in self.entries:
            if entry.key in seen:
                what = f"{entry} is listed twice"
                raise CheckpointError(str(self.root), what, "use an undamaged copy of the checkpoint")
            seen.add(entry.key)

    def dtype_in(self, name: str, dtype: str) -> str:
        """A parameter's own dtype in a model of ``dtype``."""
        return "float32" if dtype in self.float32.get(name, ()) else dtype

    @property
    def by_key(self) -> dict[tuple[str, str], Entry]:
        return {entry.key: entry for entry in self.entries}

    @property
    def by_name(self) -> dict[str, dict[str, Entry]]:
        found: dict[str, dict[str, Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.name, {})[entry.state] = entry
        return found

    @property
    def files(self) -> dict[str, Entry]:
        """Every file that a piece lies in, with the first entry that has one there."""
        found: dict[str, Entry] = {}
        for entry in self.entries:
            for _, piece in entry.stored:
                found.setdefault(piece.file, entry)
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of all logical tensors, once."""
        return sum(entry.num_bytes for entry in self.entries)


def is_quantized(catalog: Catalog) -> bool:
    """Whether a tensor is made of numbers of fewer bits when it is read."""
    return any(piece.packed is not None for entry in catalog.entries for piece in entry.pieces)


def check_files(catalog: Catalog) -> None:
    """Prove, from names and sizes alone, that every piece lies within a file of the checkpoint's folder."""
    sizes = {name: locate(catalog, name, str(entry)).stat().st_size for name, entry in catalog.files.items()}
    for checksum in catalog.checksums:
        if checksum.file not in sizes:  # random states, say: a file without tensors
            sizes[checksum.file] = locate(catalog, checksum.file, "all of it").stat().st_size
    for entry in catalog.entries:
        for part, piece in entry.stored:
            if piece.offset < 0 or piece.stop(part.item_bytes) > sizes[piece.file]:
                raise CheckpointError(
                    f"{catalog.root / piece.file}: {part}",
                    f"its bytes {piece.offset} to {piece.stop(part.item_bytes)} lie past the end of the "
                    f"file, which has {sizes[piece.file]}: it was cut short",
                    USE_ANOTHER,
                )


def heads(catalog: Catalog) -> dict[str, Checksum]:
    """By file the checksum of what lies before its first tensor: its header, which reading tensors skips."""
    first: dict[str, int] = {}
    for entry in catalog.entries:
        for _, piece in entry.stored:
            first[piece.file] = min(piece.offset, first.get(piece.file, piece.offset))
    xxh3 = (one for one in catalog.checksums if one.algorithm == "xxh3_128")
    return {one.file: one for one in xxh3 if one.start == 0 < one.stop <= first.get(one.file, 0)}


def leads_out(file: str) -> bool:
    """Whether a file's name is none, or that of something outside of the folder that it should be in."""
    pure = PurePosixPath(file)
    return pure.is_absolute() or ".." in pure.parts or not file or "\\" in file or "\0" in file


def locate(catalog: Catalog, file: str, tensor: str) -> Path:
    """Path of a checkpoint's file, after checking that it is one and inside the folder.

    The file is named as in :class:`Piece`; messages say that ``tensor`` is wanted from it.
    """
    first, _, rest = file.partition("/")
    if first in catalog.others:
        return locate(catalog.others[first], rest, tensor)
    path, outside = catalog.root / file, leads_out(file)
    try:
        if not outside and not catalog.links_allowed:
            outside = not path.resolve().is_relative_to(catalog.root.resolve())
        found = not outside and path.is_file()
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, a link to itself
        found = False
    if outside:
        raise CheckpointError(
            f"{catalog.root}: {tensor}",
            f"its file {file!r} leads out of the checkpoint's folder",
            "do not use this checkpoint: it may have been made to read other files",
        )
    if not found:
        raise CheckpointError(f"{path}: {tensor}", "the file is missing", "complete the checkpoint")
    return path


@dataclass(frozen=True, slots=True)
class Crc32Field:
    """Where a file keeps the CRC32 of its own bytes ``start`` to ``stop``, as torch's zip files do.

    Attributes:
        stop: Byte after the last.
        places: Offsets of the fields, four bytes each, little-endian (local header or data descriptor, and
            central directory).
        as_text: The fields are eight hexadecimal digits instead: safetensors' header is JSON.
    """

    start: int
    stop: int
    places: tuple[int, ...]
    as_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A file before its tensors are in it. What neither a part nor a piece covers is zero.

    Attributes:
        file: Path relative to the checkpoint's folder.
        parts: (offset, bytes) to write as they are: headers, pickled structure, JSON.
        crc32_fields: Filled in when the bytes that they are about are all written.
    """

    file: str
    num_bytes: int
    parts: tuple[tuple[int, bytes], ...] = ()
    crc32_fields: tuple[Crc32Field, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was learned while the tensors were written.

    Attributes:
        checksums: xxh3_128 of every region written, in the order of files and offsets.
        tile_digests: As in :class:`~dsx.checkpoint.catalog.Catalog`, of the new checkpoint.
    """

    checksums: tuple[Checksum, ...]
    tile_elements: int
    tile_digests: Mapping[tuple[str, str], tuple[str, ...]]


def left_behind(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes of what the source's reader could not make data of."""
    return tuple(f"stays behind: {what}" for what in facts.get("left_behind", ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a writer wants made.

    Attributes:
        catalog: The new checkpoint; its pieces say where every byte goes. ``root`` is the final folder.
        skeletons: Every file to make first.
        finish: Writes what can be known only at the end (a manifest), into the folder that it is given;
            called once, last; most formats know everything before.
        dropped: What the source has and this format or layout cannot hold, one sentence each.
        is_tag: Whether the folder is one of several beside a file ``latest``.
    """

    catalog: Catalog
    skeletons: tuple[Skeleton, ...]
    finish: Callable[[Path, Written], None] = lambda *_: None
    dropped: tuple[str, ...] = ()
    is_tag: bool = False
