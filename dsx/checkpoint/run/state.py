"""Save and load a run: what all ranks hold, its counters and hyperparameters, its random states."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

import dsx
from dsx.checkpoint import plain, store
from dsx.checkpoint.base import is_left_out, require_same_base
from dsx.checkpoint.catalog import NO_SETTINGS, Catalog, Checksum, model_fact, unusable
from dsx.checkpoint.claims import reading
from dsx.checkpoint.file_io import digest
from dsx.checkpoint.formats import native
from dsx.checkpoint.formats.huggingface.catalog import as_dsx, transposes
from dsx.checkpoint.formats.native import random_file
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.plain import as_numpy
from dsx.checkpoint.run.names import CheckpointedRun, Names, specs_here
from dsx.checkpoint.run.stored import ALL, Wanted, load_stored
from dsx.engine.zero.master_shards import master_shards, refresh_weights
from dsx.engine.zero.norm import scaler_of
from dsx.errors import CheckpointError, DsxError, ModelError
from dsx.launch.entry import AGREED
from dsx.launch.processes import agree
from dsx.models.adapters import MAGNITUDE, A, B
from dsx.models.hf_config import FAMILIES, SAY_NOTHING, model_spec
from dsx.models.param import ParamSpec
from dsx.models.params import stored_specs
from dsx.parallel.islands import carried_over

_DIGEST = "xxh3_128"


def save_random_states(folder: Path, rank: int) -> tuple[Checksum, ...]:
    """The states of the generators that layers draw from, in a file of this rank; and its checksum.

    Raises OSError.
    """
    states = {"cpu": torch.get_rng_state()}
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        states["accelerator"] = accelerator.get_rng_state()
    name, data = native.random_file(rank), save(states, {_DIGEST: _digest_of(states)})
    with (folder / name).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return (Checksum(name, 0, len(data), "xxh3_128", digest(data)),)


def restore_random_states(run: CheckpointedRun, catalog: Catalog) -> None:
    """This rank's generators, or in another layout those of the saved rank in the corresponding place.

    Tensor-parallel ranks draw alike: all take those of their first. A rank in a place that there was not is
    seeded by what the first would have drawn, and by its own stream.
    """
    groups, files = run.groups, catalog.facts.get("random_files", {})
    rank = native.corresponding(catalog.facts.get("mesh"), groups.mesh, groups.rank)
    known = native.random_state(catalog, rank) is not None
    if not known and native.random_state(catalog, 0) is None:
        return
    number = rank if known else 0
    states = _read(catalog.root / files[str(number)], f"random states of rank {number}")
    torch.set_rng_state(states["cpu"])
    if not known:
        drawn = int(torch.randint(1 << 62, ()))
        torch.manual_seed(drawn + groups.mesh.random_stream(groups.rank))
    elif "accelerator" in states and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(states["accelerator"])


def _read(path: Path, what: str) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            states = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            known = (file.metadata() or {}).get(_DIGEST)
    except (OSError, SafetensorError) as error:
        said = "the file is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise unusable(f"{path}: {what}", said) from error
    # Older checkpoints say nothing of their bytes.
    if "cpu" not in states or known not in (None, _digest_of(states)):
        raise unusable(f"{path}: {what}", "they are not what was written: their checksum is another")
    return states


def _digest_of(states: Mapping[str, torch.Tensor]) -> str:
    parts = [
        f"{name} {state.dtype} ".encode() + as_numpy(state).tobytes()
        for name, state in sorted(states.items())
    ]
    return digest(b"".join(parts))


_COUNTERS = ("global_samples", "skipped_steps", "micro_steps")


def run_facts(
    run: CheckpointedRun, client_state: Mapping[str, Any], left_out: Mapping[str, Any]
) -> dict[str, Any]:
    """What is the same on every rank, as :mod:`dsx.checkpoint.catalog` lists it."""
    engine, config, mesh = run.deepspeed_engine, run.run_config, run.groups.mesh
    scheduler = engine.lr_scheduler
    return {
        "versions": {"dsx": dsx.__version__, "deepspeed": deepspeed.__version__, "torch": torch.__version__},
        "step": int(engine.global_steps),
        "optimizer": type(_optimizer(run)).__name__,
        "lr_scheduler": None
        if scheduler is None
        else plain.encode(scheduler.state_dict(), "the learning-rate scheduler's state"),
        "counters": {name: int(getattr(engine, name)) for name in _COUNTERS},
        **native.layout_facts(mesh, run.pipeline.stage_map, int(engine.zero_optimization_stage())),
        "precision": "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32",
        **_loss_scale(engine),
        "schedule": run.pipeline.program.name,
        "global_batch_size": int(engine.train_batch_size()),
        "tokens": int(client_state.get("tokens", 0)),
        "data_cursor": int(client_state.get("data_cursor", 0)),
        "seed": None if config is None else config.dsx.train.seed,
        **left_out,
        "model": None if config is None else model_fact(config.model),
        "hf_config": None if config is None else config.hf_config,
        # DeepSpeed's ZeRO-1 and 2 take it from a checkpoint, over their own config's.
        "deepspeed_config": {"gradient_clipping": float(engine.gradient_clipping())},
        **({} if run.outer is None else {"outer": run.outer.facts()}),
        "wandb_run_id": client_state.get("wandb_run_id"),
        "random_files": {str(rank): random_file(rank) for rank in range(mesh.size)},
        "client_state": plain.encode(dict(client_state), "client_state"),
    }


def group_facts(run: CheckpointedRun) -> list[dict[str, Any]]:
    """This rank's optimizer groups: names, states that are one number, hyperparameters."""
    optimizer, names = _optimizer(run), Names(run)
    groups: list[dict[str, Any]] = [
        {
            "names": [],
            "numbers": {},
            **{
                key: plain.encode(value, f"{key} of an optimizer group")
                for key, value in settings.items()
                if key != "params"
            },
        }
        for settings in optimizer.param_groups
    ]
    for kept in master_shards(run.deepspeed_engine):
        mine = [names.of(span.parameter).name for span in kept.spans]
        groups[kept.group]["names"] += mine
        for state, number in kept.numbers().items():
            groups[kept.group]["numbers"].setdefault(state, {}).update(dict.fromkeys(mine, number))
    return groups


_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What training changes of fp16's scaler; the rest of it is the config's."""


def _loss_scale(engine: Any) -> dict[str, Any]:
    """The state of fp16's scaler, as one fact, under DeepSpeed's names (runtime/fp16/loss_scaler.py)."""
    scaler = scaler_of(engine)
    if scaler is None:
        return {}
    state = {key: value for key, value in vars(scaler).items() if isinstance(value, bool | int | float)}
    for alias in ("use_grad_scaling", "dynamic_loss_scale"):  # of a run without ZeRO
        state.pop(alias, None)
    return {"loss_scale": {"scale": scaler.cur_scale, **state}}


def _restore_loss_scale(run: CheckpointedRun, saved: Mapping[str, Any], where: str) -> None:
    """Go on with a saved scale, if it and this run's are dynamic, within the bounds of this run's config."""
    scaler = scaler_of(run.deepspeed_engine)
    if scaler is None or not scaler.dynamic or not (saved.get("dynamic") or saved.get("dynamic_loss_scale")):
        return
    for key in _SCALER:
        value = saved.get(key, getattr(scaler, key))
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (value <= 0 and key in ("cur_scale", "cur_hysteresis")):
            raise unusable(f"{where}: loss_scale.{key}", f"{value!r} is not what a scaler has there")
        setattr(scaler, key, value)
    scaler.cur_scale = max(scaler.cur_scale, scaler.min_scale)
    scaler.cur_hysteresis = min(scaler.cur_hysteresis, scaler.delayed_shift)


def restore_facts(
    run: CheckpointedRun, facts: Mapping[str, Any], where: str, wanted: Wanted = ALL
) -> dict[str, Any]:
    """Put counters, hyperparameters and scheduler back, as far as they are wanted.

    Returns:
        The client's state.
    """
    with reading(where):
        state = plain.decode(facts.get("client_state", {}), f"{where}: client_state")
        state = dict(state) if isinstance(state, dict) else {}
        if not wanted.progress:
            return state
        inner = run.deepspeed_engine
        inner.global_steps = int(facts.get("step", 0))
        for name, value in facts.get("counters", {}).items():
            if name in _COUNTERS:
                setattr(inner, name, int(value))
        was, now, batch = _islands(run, facts.get("outer"))
        before = int(inner.global_samples)
        inner.global_samples = carried_over(before, was, now, batch)
        if wanted.optimizer:
            _restore_groups(run, facts.get("param_groups", ()))
            _restore_loss_scale(run, facts.get("loss_scale") or {}, where)
        if run.outer is not None:
            run.outer.restore(facts.get("outer"))
        scheduler = facts.get("lr_scheduler") if wanted.schedule else None
        if scheduler is not None and inner.lr_scheduler is not None:
            saved = plain.decode(scheduler, f"{where}: lr_scheduler")
            inner.lr_scheduler.load_state_dict(_of_groups(saved, len(_optimizer(run).param_groups)))
        if was != now and "data_cursor" in state:
            state["data_cursor"] = carried_over(int(state["data_cursor"]), was, now, batch)
            state["tokens"] = int(state.get("tokens", 0)) // (before or 1) * inner.global_samples
        return state


def _islands(run: CheckpointedRun, saved: Mapping[str, Any] | None) -> tuple[int, int, int]:
    """Islands of a saved job and of this one, and samples of an optimizer step of one of these."""
    island = run.groups.island
    now = 1 if island is None else island.islands.count
    return int((saved or {}).get("islands", 1)), now, int(run.deepspeed_engine.train_batch_size())


_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")  # in the state of torch's schedules


def _of_groups(schedule: Mapping[str, Any], count: int) -> dict[str, Any]:
    """A schedule's state for ``count`` optimizer groups, if it is alike for all that it was saved with.

    Ranks and layouts divide parameters into other numbers of groups.
    """
    found = dict(schedule)
    for key in _BY_GROUP:
        each = found.get(key)
        if isinstance(each, list) and each and len(each) != count and all(item == each[0] for item in each):
            found[key] = each[:1] * count
    return found


def optimizer_settings(run: CheckpointedRun) -> dict[str, Any]:
    """Hyperparameters of the first optimizer group that change the training, but for what schedules move."""
    scheduler = run.deepspeed_engine.lr_scheduler
    moved = {"lr", "initial_lr"} if scheduler is not None else set()
    if getattr(scheduler, "cycle_momentum", False):
        moved |= {"betas", "momentum"}
    here = _optimizer(run).param_groups[0]
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in here.items()
        if key not in (*NO_SETTINGS, "params", "foreach", "fused", "capturable", *moved)
        and isinstance(value, bool | int | float | str | list | tuple)
    }


def require_same_optimizer(run: CheckpointedRun, facts: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError if the checkpoint has the states of another kind of optimizer."""
    saved, here = facts.get("optimizer"), type(_optimizer(run)).__name__
    kinds = [_kind(name) for name in (saved, here) if isinstance(name, str)]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise CheckpointError(
            f"{where}: optimizer = {saved}",
            f"this run has {here}, whose states are others",
            f"use {saved}, or start from the weights alone: export the checkpoint to Hugging Face",
        )


def _optimizer(run: CheckpointedRun) -> Any:
    """The optimizer inside of DeepSpeed's wrapper, if there is one."""
    wrapper = run.deepspeed_engine.optimizer
    return getattr(wrapper, "optimizer", wrapper)


def _kind(name: str) -> str:
    """Optimizers of one kind have the same states: torch's, DeepSpeed's fused and its CPU ones."""
    word = name.lower().replace("deepspeed", "").replace("fused", "").replace("cpu", "")
    return "adam" if word in ("adam", "adamw") else word


def _restore_groups(run: CheckpointedRun, saved: Sequence[Mapping[str, Any]]) -> None:
    """Each group here gets the hyperparameters of the saved one that has its first tensor."""
    home = {name: group for group in saved for name in group.get("names", ())}
    here = group_facts(run)
    for place, settings in enumerate(_optimizer(run).param_groups):
        found = next((home[name] for name in here[place]["names"] if name in home), None)
        if found is None and place < len(saved) and not here[place]["names"]:
            found = saved[place]
        for key, value in (found or {}).items():
            if key not in (*NO_SETTINGS, "params") and key in settings:
                settings[key] = _like(settings[key], plain.decode(value, f"{key} of an optimizer group"), key)


def _like(here: Any, saved: Any, key: str) -> Any:
    """``saved``, unless it would fail, or mislead, the optimizer in its next step."""
    numbers = (int, float, torch.Tensor)
    if isinstance(here, numbers) and not (isinstance(saved, numbers) and math.isfinite(float(saved))):
        raise unusable(f"{key} of an optimizer group", f"{saved!r} is no number")
    return saved


_SHOWN = 3

T = TypeVar("T")


def load(
    run: CheckpointedRun, folder: Path, *, tag: str | None, wanted: Wanted = ALL
) -> tuple[Path, dict[str, Any]]:
    """Continue from a checkpoint, whatever layout it was saved in. Collective.

    ``folder`` is one of checkpoints, of which ``tag`` names one (the one that its file ``latest`` names by
    default), that of a run, or a checkpoint itself. A checkpoint of stock DeepSpeed is read as well, if its
    tensors have the names of this run's.

    Weights and what else is wanted, of optimizer state, learning-rate scheduler, counters and random states,
    are restored; in the layout it was saved in, bit for bit. Each rank reads what it holds and no more.

    Returns:
        The checkpoint's folder and the ``client_state`` it was saved with.
    """
    gathered: list[dict[str, tuple[int, ...]]] = [{} for _ in range(run.groups.mesh.size)]
    held = (spec for spec in specs_here(run) if not is_left_out(spec, run.run_config))
    dist.all_gather_object(gathered, {spec.name: spec.shape for spec in held})
    names = {name: shape for part in gathered for name, shape in part.items()}
    may_lack = frozenset() if wanted.frozen else _frozen(run)
    root, tag = agree(lambda: store.place(folder, tag))

    def check() -> Path:
        found = store.find(root, tag)
        catalog = _or_earlier(root, tag, lambda: _opened(run, found))
        saved = {entry.name for entry in catalog.entries}
        asked = {name: shape for name, shape in names.items() if name in saved or name not in may_lack}
        require_same_model(catalog, asked, _stored(run, left_out=True))
        require_same_base(catalog, run.run_config)
        if run.run_config is not None:
            config = run.run_config
            _require_same_numbers(catalog, _numbers(model_fact(config.model), config.hf_config))
        if wanted.optimizer:
            require_same_optimizer(run, catalog.facts, str(found))
        return found

    path = agree(check)

    def each(action: Callable[[], T]) -> T:
        return _together(lambda: _or_earlier(root, tag, action))

    catalog = each(lambda: _opened(run, path))
    each(lambda: load_stored(run, catalog, wanted))
    refresh_weights(run.deepspeed_engine)
    client = restore_facts(run, catalog.facts, str(path), wanted)
    if wanted.progress:
        each(lambda: restore_random_states(run, catalog))
    return path, client


def _opened(run: CheckpointedRun, path: Path) -> Catalog:
    """A checkpoint under this run's names, if it is of the same model in another form or implementation."""
    catalog = open_checkpoint(path)
    specs = _stored(run)
    here, there = ({name for spec in held for name in spec.hf} for held in (specs, catalog.specs))
    is_renamed = {spec.name for spec in specs} != {spec.name for spec in catalog.specs}
    other = here and here == there and (is_renamed or transposes(catalog, specs))
    return as_dsx(catalog, specs) if other else catalog


def _stored(run: CheckpointedRun, *, left_out: bool = False) -> tuple[ParamSpec, ...]:
    """The tensors of the run's model that its checkpoints hold, or those that they leave out."""
    config = run.run_config
    specs = () if config is None else stored_specs(config.model)
    return tuple(spec for spec in specs if is_left_out(spec, config) is left_out)


def _frozen(run: CheckpointedRun) -> frozenset[str]:
    """Every parameter that no rank trains. A collective call over all ranks."""
    pairs = zip(specs_here(run), run.pipeline.chunks.parameters(), strict=True)
    mine = [(spec.name, parameter.requires_grad) for spec, parameter in pairs]
    parts: list[list[tuple[str, bool]]] = [[] for _ in range(run.groups.mesh.size)]
    dist.all_gather_object(parts, mine)
    trained = {name for part in parts for name, trains in part if trains}
    return frozenset(name for part in parts for name, _ in part) - trained


def require_same_model(
    catalog: Catalog, here: Mapping[str, tuple[int, ...]], left_out: Sequence[ParamSpec] = ()
) -> None:
    """Raise CheckpointError unless a run's parameters, by name and shape, are those of the checkpoint."""
    saved = {entry.name: entry.shape for entry in catalog.entries if entry.role != "buffer"}
    thawed = next((spec.name for spec in left_out if spec.name in saved), None)
    missing = next((name for name in sorted(here) if name not in saved), None)
    if thawed is not None or (missing is not None and catalog.facts.get("base") is not None):
        raise CheckpointError(
            f"{catalog.root}: tensor {thawed or missing}",
            "it was trained when the checkpoint was written, and is frozen here"
            if thawed
            else "it was frozen when the checkpoint was written, and is trained here",
            "train the same parameters (dsx.train.freeze, dsx.adapter), or start from the weights alone: "
            "export them to Hugging Face, and give the folder as dsx.model.path",
        )
    differences = [
        *(f"{name} {saved[name]} is in the checkpoint alone" for name in sorted(saved.keys() - here.keys())),
        *(f"{name} {here[name]} is in this run's model alone" for name in sorted(here.keys() - saved.keys())),
        *(
            f"{name} has shape {saved[name]} in the checkpoint, {here[name]} here"
            for name in sorted(saved.keys() & here.keys())
            if saved[name] != here[name]
        ),
    ]
    if differences:
        kinds = {name.rpartition(".")[2] for name in saved.keys() ^ here.keys()}
        left = (
            "; dsx no longer puts adapters on matrices that a family's code reads, as Mamba's out_proj and "
            "dt_proj: if these are such, merge them with dsx reshard --to hf, and train a new adapter of that"
        ) * (kinds <= {A, B, MAGNITUDE} and here.keys() < saved.keys())
        more = f"; and {len(differences) - _SHOWN} more differences" if len(differences) > _SHOWN else ""
        raise CheckpointError(
            str(catalog.root),
            f"the checkpoint is of another model: {'; '.join(differences[:_SHOWN])}{more}",
            "give the model that it was trained with (dsx.model, dsx.adapter), another checkpoint, or for a "
            f"new run another dsx.train.output{left}",
        )


# What a run may change and go on: it trains the same weights otherwise, or reads longer sequences with them.
_FREE = (
    "max_positions", "attention_dropout", "init_std",
    # The same in configs of transformers, and what says nothing of the model.
    "max_position_embeddings", "n_positions", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "initializer_range", "use_cache", "dtype", "torch_dtype", "architectures", "transformers_version",
    "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id",
    "n_inner",  # a size, which the parameters' shapes have as well
)  # fmt: skip


def _numbers(model: Mapping[str, Any], hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a model computes with, alike for both implementations of a family that dsx has."""
    adapter = model.get("adapter") or {}
    told = {key: adapter[key] for key in ("type", "rank", "alpha", "rslora")} if adapter else {}
    scale = {"adapter": told | {"start": adapter.get("start", "none")}} if adapter else {}
    if "config" not in model and model.get("family") in FAMILIES:
        return {**model, **scale}
    try:
        return model_fact(model_spec(hf_config)) | scale
    except ModelError:  # of transformers' modules, or of a dsx that had its own modules of the family
        return _with_defaults(model.get("config") or hf_config) | scale


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers makes of a config, said or left to defaults, less what says nothing of the model."""
    from dsx.hub.model_structure import hf_config_of

    try:
        told = hf_config_of(config).to_dict()
    except ModelError:  # of a family or a form that this transformers does not know
        told = dict(config)
    return {key: value for key, value in told.items() if key not in SAY_NOTHING}


def _require_same_numbers(catalog: Catalog, here: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint's model computes otherwise with parameters of these shapes."""
    told = catalog.facts.get("model")
    if not isinstance(told, Mapping):
        return
    with reading(str(catalog.root)):
        saved = _numbers(told, catalog.facts.get("hf_config") or {})
    for key, value in here.items():
        if key in saved and key not in _FREE and saved[key] != value:
            raise CheckpointError(
                str(catalog.root),
                f"the checkpoint is of another model: its {key} is {saved[key]}, and here {value}",
                "give the model that it was trained with (dsx.model), or start from its weights alone: "
                "export it to Hugging Face, change that config, and give the folder as dsx.model.path",
            )


def _or_earlier(root: Path, tag: str | None, action: Callable[[], T]) -> T:
    """Run ``action``. What is wrong with the checkpoint that ``latest`` names is said with an earlier one."""
    try:
        return action()
    except CheckpointError as error:
        newest = "" if tag is not None else store.find(root).name
        others = [other for other in store.tags(root) if other != newest]
        if tag is not None or not others:
            raise
        fix = f"{error.fix}; to go on from {others[-1]}, write that name into {root / store.LATEST}"
        raise CheckpointError(error.where, error.what, fix) from error


def _together(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; if it fails on any, every rank raises the first error."""
    result, error = None, None
    try:
        result = action()
    except DsxError as found:
        error = found
    errors: list[DsxError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    first = next((found for found in errors if found is not None), None)
    if first is not None:
        first.add_note(AGREED)
        raise first
    return result  # type: ignore[return-value]
