"""The state of a run that is not in tensors: counters, hyperparameters, scheduler."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import deepspeed
import torch

import dsx
from dsx.checkpoint import plain
from dsx.checkpoint.catalog import NO_SETTINGS
from dsx.checkpoint.claims import reading
from dsx.checkpoint.formats.dsx_native import random_file
from dsx.checkpoint.group_numbers import with_numbers
from dsx.errors import CheckpointError
from dsx.runtime.stored import Names
from dsx.runtime.zero_adapters.held import held

if TYPE_CHECKING:
    from dsx.runtime.engine import PipelineEngine

_COUNTERS = ("global_samples", "skipped_steps", "micro_steps")


def run_facts(engine: PipelineEngine, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """What is the same on every rank, as :mod:`dsx.checkpoint.catalog` lists it.

    Raises:
        CheckpointError: The scheduler's or the client's state is no plain data.
    """
    stages, config = engine.pipeline.stage_map, engine.run_config
    scheduler = engine.lr_scheduler
    world = range(engine.groups.mesh.size)
    return {
        "versions": {"dsx": dsx.__version__, "deepspeed": deepspeed.__version__, "torch": torch.__version__},
        "step": int(engine.global_steps),
        "optimizer": type(_optimizer(engine)).__name__,
        "lr_scheduler": None
        if scheduler is None
        else plain.encode(scheduler.state_dict(), "the learning-rate scheduler's state"),
        "counters": {name: int(getattr(engine, name)) for name in _COUNTERS},
        "mesh": dict(engine.groups.mesh.axes),
        "chunks": stages.num_chunks,
        "placement": stages.placement,
        "stage_bounds": list(stages.bounds),
        "zero_stage": int(engine.zero_optimization_stage()),
        "precision": "bf16" if engine.bfloat16_enabled() else "fp32",
        "schedule": engine.pipeline.program.name,
        "global_batch_size": int(engine.train_batch_size()),
        "tokens": int(client_state.get("tokens", 0)),
        "data_cursor": int(client_state.get("data_cursor", 0)),
        "seed": None if config is None else config.dsx.train.seed,
        "model": None if config is None else json.loads(json.dumps(asdict(config.model))),
        "hf_config": None if config is None else config.hf_config,
        # DeepSpeed's ZeRO-1 and 2 take it from a checkpoint, over their own config's.
        "deepspeed_config": {"gradient_clipping": float(engine.gradient_clipping())},
        "wandb_run_id": client_state.get("wandb_run_id"),
        "random_files": {str(rank): random_file(rank) for rank in world},
        "client_state": plain.encode(dict(client_state), "client_state"),
    }


def group_facts(engine: PipelineEngine) -> list[dict[str, Any]]:
    """This rank's optimizer groups: names, states that are one number, hyperparameters."""
    optimizer, names = _optimizer(engine), Names(engine)
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
    for kept in held(engine.deepspeed_engine):
        mine = [names.of(span.parameter).name for span in kept.spans]
        groups[kept.group]["names"] += mine
        for state, number in kept.numbers().items():
            groups[kept.group]["numbers"].setdefault(state, {}).update(dict.fromkeys(mine, number))
    return groups


def merged_groups(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The optimizer groups of all ranks as one list: those of one place with the same hyperparameters."""
    merged: list[dict[str, Any]] = []
    for groups in ranks:
        for place, group in enumerate(groups):
            if place == len(merged):
                merged.append({**group, "names": [], "numbers": {}})
            known = dict.fromkeys((*merged[place]["names"], *group["names"]))
            merged[place]["names"] = list(known)
            for state, values in group["numbers"].items():
                merged[place]["numbers"].setdefault(state, {}).update(values)
    return [with_numbers(group, group.pop("numbers")) for group in merged]


def restore_facts(engine: PipelineEngine, facts: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Put counters, hyperparameters and scheduler back.

    Returns:
        The client's state.

    Raises:
        CheckpointError: It is of another optimizer, or has a scheduler where the run has none.
    """
    with reading(where):
        return _restored(engine, facts, where)


def _restored(engine: PipelineEngine, facts: Mapping[str, Any], where: str) -> dict[str, Any]:
    inner = engine.deepspeed_engine
    inner.global_steps = int(facts.get("step", 0))
    for name, value in facts.get("counters", {}).items():
        if name in _COUNTERS:
            setattr(inner, name, int(value))
    _restore_groups(engine, facts.get("param_groups", ()))
    scheduler = facts.get("lr_scheduler")
    if scheduler is not None and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(plain.decode(scheduler, f"{where}: lr_scheduler"))
    state = plain.decode(facts.get("client_state", {}), f"{where}: client_state")
    return dict(state) if isinstance(state, dict) else {}


def kept_settings(engine: PipelineEngine, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint has set in the optimizer otherwise than ``wanted``, but for what schedules move."""
    moved = () if engine.lr_scheduler is None else ("lr", "betas", "momentum")
    here = _optimizer(engine).param_groups[0]
    shared = [key for key in wanted if key in here and key not in moved]
    return {key: here[key] for key in shared if _listed(here[key]) != _listed(wanted[key])}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def require_same_optimizer(engine: PipelineEngine, facts: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError if the checkpoint has the states of another kind of optimizer."""
    saved, here = facts.get("optimizer"), type(_optimizer(engine)).__name__
    kinds = [_kind(name) for name in (saved, here) if isinstance(name, str)]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise CheckpointError(
            f"{where}: optimizer = {saved}",
            f"this run has {here}, whose states are others",
            f"use {saved}, or start from the weights alone: export the checkpoint to Hugging Face",
        )


def _optimizer(engine: PipelineEngine) -> Any:
    """The optimizer inside of DeepSpeed's wrapper, if there is one."""
    wrapper = engine.deepspeed_engine.optimizer
    return getattr(wrapper, "optimizer", wrapper)


def _kind(name: str) -> str:
    """Optimizers of one kind have the same states: torch's, DeepSpeed's fused and its CPU ones."""
    word = name.lower().replace("deepspeed", "").replace("fused", "").replace("cpu", "")
    return "adam" if word in ("adam", "adamw") else word


def _restore_groups(engine: PipelineEngine, saved: Sequence[Mapping[str, Any]]) -> None:
    """Each group here gets the hyperparameters of the saved one that has its first tensor."""
    home = {name: group for group in saved for name in group.get("names", ())}
    here = group_facts(engine)
    for place, settings in enumerate(_optimizer(engine).param_groups):
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
        raise CheckpointError(
            f"{key} of an optimizer group", f"{saved!r} is no number", "use another checkpoint"
        )
    return saved
