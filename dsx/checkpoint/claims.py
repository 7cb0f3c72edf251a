"""What a checkpoint says of itself is checked against what its files hold, before anything is made of it.

A few bytes can say that a checkpoint has 10^15 ranks, layers or elements. So every number that could be the
length of a loop or an array is compared here with what is there: tensors, their elements, the bytes of their
files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from math import prod
from re import error as RegexError
from reprlib import repr as short_repr
from struct import error as StructError
from typing import Annotated, Any, TypeVar
from zlib import error as ZlibError

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, ValidationError

from dsx.checkpoint import plain
from dsx.checkpoint.catalog import NO_SETTINGS, SAVE_AGAIN, Catalog, Entry, locate
from dsx.checkpoint.json_text import check_plain, is_unicode
from dsx.errors import CheckpointError, ModelError
from dsx.models.config_values import at
from dsx.models.hf_config import FAMILIES, model_spec
from dsx.models.param import ParamSpec
from dsx.models.params import stored_specs
from dsx.models.spec import Adapter, Model, ModelSpec
from dsx.parallel.islands import OUTER_MOMENTUM, OUTER_WEIGHTS

_SPARE_RANKS, _MOST_RANKS = 1 << 12, 1 << 17
_SPARE_LAYERS = 1 << 10
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MOST_TILE_ELEMENTS = 1 << 24
_MOST_SHAPE_DIMS = 64
_EXCUSED_BYTES = 1 << 20

MISFITS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What Python raises where a value is of another type, or another number, than is looked for."""

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Degree = Annotated[int, Field(ge=1, lt=1 << 63)]
_Number = Annotated[float, AllowInfNan(False)]
_ByName = _Number | None | dict[str, _Number | None]
_Told = TypeVar("_Told", bound=BaseModel)


class _OuterStep(BaseModel):
    """The inner step of a round."""

    model_config = ConfigDict(strict=True, extra="forbid")

    step: _Count
    lr_scheduler: dict[str, Any] | None


class _Outer(BaseModel):
    """What islands know of their common weights."""

    model_config = ConfigDict(strict=True, extra="forbid")

    islands: _Degree
    name: str
    version: _Count
    progress: _Count
    facts: _OuterStep
    seen: dict[str, _Count]


class _Facts(BaseModel):
    """Types of the facts that dsx looks into; :mod:`dsx.checkpoint.catalog` says what they are."""

    model_config = ConfigDict(strict=True, extra="ignore")

    versions: dict[str, str] = {}
    step: _Count = 0
    optimizer: str | None = None
    param_groups: list[dict[str, Any]] = []
    lr_scheduler: dict[str, Any] | None = None
    loss_scale: dict[str, Any] | None = None
    counters: dict[str, _Count] = {}
    mesh: dict[str, _Degree] = {}
    chunks: _Degree = 1
    placement: str = ""
    stage_bounds: Annotated[list[_Count], Field(min_length=2)] = [0, 1]
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    precision: str = ""
    schedule: str | None = None
    global_batch_size: _Count = 0
    tokens: _Count = 0
    data_cursor: _Count = 0
    seed: int | None = None
    base: dict[str, str | int] | None = None
    composite: dict[str, Any] | None = None
    outer: _Outer | None = None
    tied: dict[str, Annotated[list[_Count], Field(min_length=1)]] = {}
    unnamed_ties: list[_Count] = []
    model: dict[str, Any] | None = None
    hf_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] = {}
    wandb_run_id: str | None = None
    random_files: dict[str, str] = {}
    client_state: dict[str, Any] = {}
    left_behind: list[str] = []


class _Group(BaseModel):
    """The keys of an optimizer group that are no hyperparameters."""

    model_config = ConfigDict(strict=True, extra="ignore")

    names: list[str]
    step: _ByName = None
    numbers: dict[str, _ByName] = {}


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever breaks inside, because files say what no writer writes, into one error about them.

    Readers check what they look at, and name the file and the key. This is for the rest, such as a text where
    all writers put a number, in one of the many places where any value can stand.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            str(error.filename or what),
            f"it cannot be read ({error.strerror or error}), or went away meanwhile",
            "complete the checkpoint",
        ) from error
    except (*MISFITS, RegexError, RuntimeError, StructError, ZlibError) as error:
        raise CheckpointError(
            what, f"it says what no writer of its format does ({type(error).__name__}: {error})", SAVE_AGAIN
        ) from error


def check_claims(catalog: Catalog) -> None:
    """Prove that nothing in a catalog is larger than its files hold, and that facts are of their types."""
    sizes: dict[str, int] = {}
    for entry in catalog.entries:
        _check_entry(catalog, entry, sizes)
    if not 0 <= catalog.tile_elements <= _MOST_TILE_ELEMENTS:
        raise _wrong(catalog, "tile_elements", f"tiles of {catalog.tile_elements} elements")
    told = _checked_facts(catalog)
    check_num_layers(catalog, told.hf_config or {}, f"{catalog.root}: config.json")
    check_num_layers(catalog, told.model or {}, f"{catalog.root}: model")
    blocks = (told.model or {}).get("num_layers", 1)
    if type(blocks) is not int or blocks < 1:
        raise _wrong(catalog, "model", f"it has {short_repr(blocks)} layers")
    ranks = prod(told.mesh.values())
    most = min(_MOST_RANKS, _SPARE_RANKS + sum(entry.numel for entry in catalog.entries))
    if ranks > most:
        raise _wrong(catalog, f"mesh {told.mesh}", f"{ranks} ranks, of which its tensors bear out {most}")
    if told.stage_bounds[0] != 0 or sorted(told.stage_bounds) != told.stage_bounds:
        raise _wrong(catalog, "stage_bounds", "they do not ascend from 0")
    if told.outer is not None:
        _check_outer(catalog, told.outer, told.step)
    claimed = {f"tensor {spec.name}": spec.layer for spec in catalog.specs}
    claimed |= {f"tied {key}": max(layers) for key, layers in told.tied.items()}
    claimed |= {"stage_bounds": told.stage_bounds[-1], "unnamed_ties": max(told.unnamed_ties, default=0)}
    check_layers(catalog, claimed)


def _check_outer(catalog: Catalog, outer: _Outer, step: int) -> None:
    if outer.facts.step > step:
        raise _wrong(catalog, f"outer.facts.step = {outer.facts.step}", f"the checkpoint is of step {step}")
    missing = {OUTER_WEIGHTS, OUTER_MOMENTUM} - {entry.state for entry in catalog.entries}
    if outer.version and missing:  # before the first step there are none
        raise _wrong(catalog, "outer", f"it is of an island, and has no {' and no '.join(sorted(missing))}")


def check_layers(catalog: Catalog, claimed: Mapping[str, int]) -> None:
    """Check numbers of layers against the tensors there are, allowing for layers without tensors.

    ``claimed`` has the largest layer number by the fact that claims it.
    """
    held = len(catalog.by_name)
    most = _SPARE_LAYERS + 4 * held
    for what, layer in claimed.items():
        if not 0 <= layer <= most:
            raise _wrong(catalog, what, f"layer {layer}, where {held} tensors bear out {most}")


def check_num_layers(catalog: Catalog, config: Mapping[str, Any], where: str, fix: str = SAVE_AGAIN) -> None:
    """Refuse a model with more layers than a checkpoint has tensors, before lists of so many are made.

    ``config`` is the content of ``config.json``, or other numbers of the model by their usual names; it may
    have parts, as a model for text and more has. It was read at ``where``, for the message.
    """
    # What is left out has layers too.
    held = len(catalog.by_name) + (_SPARE_LAYERS if catalog.facts.get("base") else 0)
    parts = [config]
    while parts:
        for key, value in parts.pop().items():
            if key in _LAYERS and isinstance(value, int) and value > max(1, held):
                what = f"{value} layers, and the files in {catalog.root} have {held:,} tensors"
                raise CheckpointError(f"{where}: {key} = {short_repr(value)}", what, fix)
            parts += [value] if isinstance(value, Mapping) else []


def model_of(config: Mapping[str, Any]) -> Model:
    """The model of a ``config.json``: of dsx's own modules if it has the family, else of transformers'.

    Raises:
        ModelError: Neither can be made of it.
    """
    if config.get("model_type") in FAMILIES:
        return model_spec(config)
    from dsx.hub.read import hub_model  # here: dsx's own families need neither torch nor transformers

    inner = language_config(config)
    return model_spec(inner) if inner.get("model_type") in FAMILIES else hub_model(inner)


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a ``config.json`` that is its language model's, or all of it. Raises ModelError."""
    if text_key(config) is None:
        return dict(config)
    from dsx.hub import composite  # here: as above

    return composite.language_config(config)


def modules_in(config: Mapping[str, Any]) -> dict[str, str]:
    """Where a composite model has its language model's modules, by their paths in that; else empty."""
    if text_key(config) is None:
        return {}
    from dsx.hub import composite  # here: as above

    return composite.modules_in(config)


def text_key(config: Mapping[str, Any]) -> str | None:
    """Which part that is; None if the config is of one model."""
    if config.get("model_type", "") in ("", *FAMILIES):
        return None
    from dsx.hub import composite  # here: as above

    return composite.text_key(config)


def model_of_fact(fact: Mapping[str, Any]) -> Model:
    """The model of a fact of :func:`~dsx.checkpoint.catalog.model_fact`. Raises what a wrong one causes.

    Raises:
        ModelError: It is of modules that an earlier dsx had of a family.
    """
    told = dict(fact)
    adapter = told.pop("adapter", None)
    if "config" in told:
        from dsx.hub.read import hub_model  # here: dsx's own families need neither torch nor transformers

        made = hub_model(told["config"])
        if pictures := told.get("pictures"):
            from dsx.hub.composite import with_tower  # here: as above

            made = with_tower(made, json.dumps(pictures["config"], sort_keys=True), pictures["tower"])
        model: Model = made
    elif told["family"] not in FAMILIES:
        raise ModelError(
            at("family", told["family"]),
            "the checkpoint is of modules that an earlier dsx had of it, and what is frozen or adapted of it "
            "is made again of the family",
            "resume it in a run of the same config, and export that (dsx.train.export_hf)",
        )
    else:  # an earlier dsx may have told more
        known = {each.name for each in fields(ModelSpec)}
        model = ModelSpec(**{key: value for key, value in told.items() if key in known})
    if adapter is None:
        return model
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in adapter.items()}
    return replace(model, adapter=Adapter(**given))


def forms_of(config: Mapping[str, Any]) -> Iterator[tuple[ParamSpec, ...]]:
    """Every tensor of the model of a ``config.json``, in each form in which dsx trains it.

    Made as they are asked for: of dsx's own modules, for one rank and for ranks that share key/value heads;
    then of transformers'.
    """
    with suppress(ModelError):
        if config.get("model_type") in FAMILIES:
            own = model_spec(config)
            yield from (stored_specs(own.for_tensor(tensor)) for tensor in (1, own.num_heads))
    from dsx.hub.read import hub_model  # here: dsx's own families need neither torch nor transformers

    with suppress(ModelError):
        yield stored_specs(hub_model(config))


def specs_of_model(catalog: Catalog, model: Model) -> tuple[ParamSpec, ...]:
    """Every tensor of a model that a checkpoint, or the config beside it, says it is of."""
    check_num_layers(catalog, {"num_layers": model.num_layers}, f"{catalog.root}: model")
    return stored_specs(model)


_MOST_UNPACKED = 8
"""Bytes that a byte of a quantised tensor makes at most: two float32."""


def _check_entry(catalog: Catalog, entry: Entry, sizes: dict[str, int]) -> None:
    """Check that a tensor is no larger than its files, and that its names can be shown and name files."""
    for text in (entry.name, entry.state, *entry.aliases):
        if not text or "\0" in text or not is_unicode(text):
            raise _wrong(catalog, str(entry), f"it cannot be called {text!r}")
    if "/" in entry.state or entry.state.startswith("."):
        raise _wrong(catalog, str(entry), "a state's name becomes that of a file, and this leads elsewhere")
    if min(entry.shape, default=0) < 0 or len(entry.shape) > _MOST_SHAPE_DIMS:
        raise _wrong(catalog, str(entry), f"its shape cannot be {entry.shape}")
    dims = {len(part) for piece in entry.pieces for part in (piece.start, piece.shape, piece.strides)}
    if dims - {len(entry.shape)}:
        raise _wrong(catalog, str(entry), f"its shape is {entry.shape}, and parts of it have other dims")
    files = {piece.file for _, piece in entry.stored}
    for file in files - sizes.keys():
        sizes[file] = locate(catalog, file, str(entry)).stat().st_size
    held = sum(sizes[file] for file in files)
    if any(piece.packed is not None for piece in entry.pieces):
        held *= _MOST_UNPACKED
    if entry.num_bytes > held + (_EXCUSED_BYTES if files else 0):
        raise _wrong(
            catalog, str(entry), f"it would be of {entry.num_bytes} bytes, and its files have {held}"
        )


def _checked_facts(catalog: Catalog) -> _Facts:
    facts = catalog.facts
    told = _typed(catalog, "", _Facts, facts)
    try:
        check_plain(dict(facts))
    except ValueError as error:
        raise _wrong(catalog, "facts", str(error)) from None
    where = str(catalog.root)
    for number, group in enumerate(told.param_groups):
        _typed(catalog, f"param_groups.{number}.", _Group, group)
        for key, value in group.items():
            if key not in NO_SETTINGS:
                plain.decode(value, f"{where}: {key} of an optimizer group")
    for key in ("lr_scheduler", "client_state", "deepspeed_config"):
        plain.decode(facts.get(key), f"{where}: {key}")
    return told


def _typed(catalog: Catalog, key: str, kind: type[_Told], value: Mapping[str, Any]) -> _Told:
    try:
        return kind.model_validate(dict(value))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = key + ".".join(map(str, problem["loc"]))
        raise _wrong(catalog, place, f"{problem['msg']}, not {short_repr(problem['input'])}") from None


def _wrong(catalog: Catalog, what: str, why: str) -> CheckpointError:
    return CheckpointError(f"{catalog.root}: {what}", why, SAVE_AGAIN)
