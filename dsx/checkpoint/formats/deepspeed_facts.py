"""What a stock checkpoint says beside its tensors, in the words of :mod:`dsx.checkpoint.catalog`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsx.checkpoint import plain
from dsx.checkpoint.formats.deepspeed_files import StockFiles
from dsx.checkpoint.formats.deepspeed_flat import Group, OptimizerState
from dsx.checkpoint.formats.deepspeed_types import config_of
from dsx.checkpoint.formats.torch_file import TorchFile
from dsx.checkpoint.formats.unpickle import Record, TensorRef
from dsx.checkpoint.group_numbers import with_numbers
from dsx.errors import CheckpointError

_COUNTERS = ("global_samples", "skipped_steps")
_MOMENTS: Mapping[frozenset[str], str] = {
    frozenset({"exp_avg", "exp_avg_sq"}): "AdamW",
    frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}): "AdamW",
    frozenset({"momentum_buffer"}): "SGD",
    frozenset({"exp_avg"}): "Lion",
    frozenset({"sum"}): "Adagrad",
}
_STOCK_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *(
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
    ),
    *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
    *("ds_version", "universal_checkpoint_info", "micro_steps"),
}
_LARGEST = 100_000  # values; more is data, not facts


def facts_of(
    files: StockFiles,
    states: Mapping[int, OptimizerState],
    canonical: Mapping[str, str],
    common: TorchFile | None = None,
) -> dict[str, Any]:
    """The facts of a checkpoint; what is no plain data is named under ``left_behind``.

    Args:
        files: The checkpoint.
        states: Optimizer state by model-parallel rank.
        canonical: Canonical name of every tensor's other names.
        common: The universal format's file of what all parameters have in common.
    """
    file, first = files.models[0, 0], files.first
    left = _unused(first)
    config = config_of(first)
    client = {
        str(key): value
        for key, one in first.items()
        if key not in _STOCK_KEYS and (value := _encoded(one, file, str(key), left)) is not None
    }
    facts: dict[str, Any] = {
        "versions": {"deepspeed": str(first.get("ds_version", "unknown"))},
        "step": int(first.get("global_steps") or 0),
        "optimizer": _optimizer(config, states),
        "param_groups": _groups(states, canonical, left),
        "lr_scheduler": _encoded(first.get("lr_scheduler"), file, "lr_scheduler", left),
        "loss_scale": _loss_scale(files, common),
        "counters": {key: int(first[key]) for key in _COUNTERS if first.get(key) is not None},
        "mesh": {"pp": files.pp, "dp": files.dp, "tp": files.tp},
        "zero_stage": files.zero_stage,
        "precision": _precision(config),
        "client_state": client,
        "deepspeed_config": _encoded(config, file, "ds_config", left),
        "left_behind": left,
    }
    return {key: value for key, value in facts.items() if value not in (None, [])}


def _unused(first: Mapping[str, Any]) -> list[str]:
    """What is neither a tensor nor a fact."""
    module = first.get("module")
    extra = module.items() if isinstance(module, dict) else ()
    left = [f"module {name}: it is no tensor" for name, value in extra if not isinstance(value, TensorRef)]
    samplers = [key for key in ("data_sampler", "random_ltd") if first.get(key) is not None]
    return [*left, *(f"{key}: of no use to dsx" for key in samplers)]


def readable(value: Any, file: TorchFile) -> Any:
    """A value of a torch file with numbers in place of tensors of one element, dicts in place of namespaces.

    Raises:
        CheckpointError: Another tensor, or an object that is no plain data.
    """
    return _Reading(file).of(value)


class _Reading:
    """Counts what it makes: a few bytes of a pickle can stand for as many values as one likes."""

    def __init__(self, file: TorchFile) -> None:
        self._file = file
        self._count = 0

    def of(self, value: Any) -> Any:
        self._count += 1
        if self._count > _LARGEST:
            raise CheckpointError(str(self._file.path), f"it has more than {_LARGEST} values", "save less")
        if isinstance(value, TensorRef):
            return self._file.value(value)
        if isinstance(value, Record):
            if value.kind not in ("argparse.Namespace", "types.SimpleNamespace"):
                raise CheckpointError(
                    str(self._file.path), f"a {value.kind} is no plain data", "leave it out"
                )
            return self.of(value.state)
        if isinstance(value, dict):
            return {key: self.of(part) for key, part in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return type(value)(map(self.of, value))
        return value


def _encoded(value: Any, file: TorchFile, where: str, left: list[str]) -> Any:
    """The value as :mod:`dsx.checkpoint.plain` writes it; None, and a note in ``left``, if it cannot."""
    try:
        return plain.encode(readable(value, file), where)
    except CheckpointError as error:
        left.append(f"{where}: {error.what}")
        return None


def _groups(
    states: Mapping[int, OptimizerState], canonical: Mapping[str, str], left: list[str]
) -> list[dict[str, Any]]:
    """The optimizer's groups, those of one place on all ranks as one."""
    merged: list[dict[str, Any]] = []
    for groups in (state.groups for state in states.values()):
        for place, group in enumerate(groups):
            if place == len(merged):
                settings = {
                    str(key): _encoded(value, group.file, f"{key} of optimizer group {place}", left)
                    for key, value in group.settings.items()
                    if key != "step"
                }
                merged.append({"names": [], "numbers": {}, **settings})
            _add(merged[place], group, canonical)
    return [with_numbers(one, one.pop("numbers")) for one in merged]


def _add(merged: dict[str, Any], group: Group, canonical: Mapping[str, str]) -> None:
    for name in group.names:
        home = canonical.get(name, name)
        if home not in merged["names"]:
            merged["names"].append(home)
        for state, values in group.numbers.items():
            if name in values:
                merged["numbers"].setdefault(state, {}).setdefault(home, values[name])


def _optimizer(config: Mapping[str, Any], states: Mapping[int, OptimizerState]) -> str | None:
    """The optimizer's name, from the config or, if the user made it, from the states that it keeps."""
    told = (config.get("optimizer") or {}).get("type")
    if told:
        return str(told)
    kept = {fragment.state for state in states.values() for fragment in state.fragments} - {"master"}
    numbers = {number for state in states.values() for group in state.groups for number in group.numbers}
    # NAdam's mu_product is none of Adam's.
    return None if numbers - {"step"} else _MOMENTS.get(frozenset(kept))


def _loss_scale(files: StockFiles, common: TorchFile | None) -> dict[str, Any] | None:
    held = [file.content["optimizer_state_dict"] for file in files.optimizers.values()]
    held += [common.content] if common is not None and isinstance(common.content, dict) else []
    for one in held:
        scaler = one.get("loss_scaler")
        if isinstance(scaler, Record):
            return {"scale": scaler.state.get("cur_scale"), **_plain_numbers(scaler.state)}
    saved = files.first.get("optimizer")
    if isinstance(saved, dict) and "cur_scale" in saved:
        return {"scale": saved["cur_scale"], **_plain_numbers(saved)}
    return None


def _plain_numbers(state: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in state.items() if isinstance(value, int | float | bool | None)}


def _precision(config: Mapping[str, Any]) -> str:
    for name in ("bf16", "fp16"):
        section = config.get(name) or (config.get("bfloat16") if name == "bf16" else None)
        if isinstance(section, dict) and section.get("enabled"):
            return name
    return "fp32"
