"""Records of a model's layers, and the cache in which they are kept.

Equal layers are recorded once. Records lie in a folder of the user's cache, by a hash of what they depend on:
the layer, its shapes and options, and the versions of torch and of dsx's own code. Without a record, torch is
loaded and the layer is recorded (:mod:`dsx.memory.recorder`).
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from dsx.memory.record import LOSS, LayerRecord, LayerRequest, Shape
from dsx.models.params import layer_kinds


class LayerRecords(Protocol):
    """What the ledger asks of a model's layers, wherever they come from."""

    def layer(self, index: int, *, divided: bool, hooked: bool) -> LayerRecord:
        """The record of a layer of the layer list."""

    def loss(self) -> LayerRecord | None:
        """That of the loss; None if the last layer gives it."""

    def parameter(self, index: int, name: str) -> str:
        """Name of the parameter that a layer's record calls ``name``."""


@dataclass(frozen=True, slots=True)
class ModelRecords:
    """Records of a model of dsx's own.

    Attributes:
        shape: The shape of a micro-batch.
    """

    shape: Shape

    def layer(self, index: int, *, divided: bool, hooked: bool) -> LayerRecord:
        """The record of a layer of the layer list."""
        kind = layer_kinds(self.shape.model)[index]
        return recorded(
            LayerRequest(shape=alone(self.shape, index), kind=kind, divided=divided, hooked=hooked)
        )

    @property
    def num_layers(self) -> int:
        """Of the layer list."""
        return len(layer_kinds(self.shape.model))

    def loss(self) -> LayerRecord:
        """That of the loss."""
        return recorded(LayerRequest(shape=alone(self.shape, 0), kind=LOSS))

    def parameter(self, index: int, name: str) -> str:
        """Name of the parameter that a layer's record calls ``name``: a tied head's is the embedding's."""
        model = self.shape.model
        tied = model.tied_embeddings and index == len(layer_kinds(model)) - 1
        return f"{0 if tied else index}.{name}"


def alone(shape: Shape, index: int) -> Shape:
    """The same of a model with one block, that of layer ``index`` if it is one.

    What a ModelSpec says block by block, it says as a tuple of that length.
    """
    model, kinds = shape.model, layer_kinds(shape.model)
    block = index - kinds.index("Block") if kinds[index] == "Block" else 0
    own: dict[str, Any] = {}
    for field in fields(model):
        value = getattr(model, field.name)
        if isinstance(value, tuple) and len(value) == model.num_layers:
            own[field.name] = value[block : block + 1]
    short = replace(model, **own, num_layers=1)
    if short.windows and not short.window(0, shape.sequence_length):
        short = replace(short, windows=())
    return replace(shape, model=short)


@lru_cache(maxsize=4096)
def recorded(request: LayerRequest) -> LayerRecord:
    """The layer's record, from the cache or from a run on tensors without storage."""
    place = _place(request)
    with suppress(OSError, KeyError, TypeError, ValueError):
        return LayerRecord.from_json(place.read_text())
    collects = gc.isenabled()
    gc.disable()  # while torch is loaded, a quarter of the time would go there
    try:
        from dsx.memory.recorder import record_request

        record = record_request(request)
    finally:
        if collects:
            gc.enable()
    _keep(place, record.to_json())
    return record


def _place(request: LayerRequest) -> Path:
    content = json.dumps([asdict(request), _versions()], sort_keys=True)
    name = hashlib.sha256(content.encode()).hexdigest()[:32]
    return Path.home() / ".cache" / "dsx" / "records" / f"{name}.json"


def _keep(place: Path, text: str) -> None:
    """Keep a record, written aside and renamed; a cache that cannot be written is left alone."""
    aside = place.with_name(f".{place.name}.{os.getpid()}")
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text)
        aside.replace(place)


_SOURCES = ("nn/*.py", "models/*.py", "memory/record*.py", "memory/paper/device.py", "memory/paper/meter.py")


@cache
def _versions() -> tuple[str, ...]:
    """What a record depends on besides the layer: torch, Python, and the code that runs and records it."""
    package = Path(__file__).parents[1]
    content = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(package.glob(pattern)):
            content.update(path.read_bytes())
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return torch, ".".join(map(str, sys.version_info[:3])), content.hexdigest()
