"""From ``dsx.adapter``, and perhaps a folder of PEFT's, to a model's :class:`~dsx.models.spec.Adapter`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dsx.config.load import read
from dsx.config.schema import AdapterConfig
from dsx.config.wording import at, dotted, suggest
from dsx.errors import ConfigError
from dsx.models.adapters import (
    ALL_LINEAR,
    is_also,
    is_stack,
    is_targeted_stack,
    modules_of,
    names,
    names_of,
    placed,
    targeted,
    trains,
)
from dsx.models.param import NF4_BLOCK, ParamSpec
from dsx.models.params import param_specs
from dsx.models.spec import Adapter, Model

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter's folder."""
_ANOTHER = "give a folder that PEFT's save_pretrained or dsx.train.export_hf has written"
_OLD_WEIGHTS = "adapter_model.bin"  # PEFT before 0.7, and later with safe_serialization=False

_KEYS = {
    "rank": "r",
    "alpha": "lora_alpha",
    "rslora": "use_rslora",
    "dropout": "lora_dropout",
    "targets": "target_modules",
    "target_parameters": "target_parameters",
    "train_also": "modules_to_save",
}
# Keys of PEFT's that are read apart, that say nothing of what is computed with the weights that the folder
# has, or that speak of another key, without which they mean nothing.
_SAY_NOTHING = frozenset({
    "peft_type", "task_type", "use_dora", "auto_mapping", "base_model_name_or_path", "revision",
    "peft_version", "inference_mode", "init_lora_weights", "fan_in_fan_out", "ensure_weight_tying",
    "qalora_group_size", "megatron_core", "runtime_config", "lora_ga_config", "eva_config", "corda_config",
    "loftq_config", "layers_pattern", "merge_weights",
})  # fmt: skip
_NARROWING = ("exclude_modules", "layers_to_transform")
_PATTERNS = {"rank_pattern": "use an adapter of one rank", "alpha_pattern": "use an adapter of one alpha"}
"""Keys that give single targets other numbers than the rest, each with what to do if it does."""
_STARTS = {"pissa": "pissa", "olora": "olora"} | dict.fromkeys(("gaussian", "eva", "orthogonal"), "none")
"""Values of ``init_lora_weights``, and what of the base they take out."""
_TIED = ("embed_tokens", "lm_head")
"""Names by which PEFT knows tied modules: EMBEDDING_LAYER_NAMES in peft/utils/constants.py."""


def adapter_of(
    block: AdapterConfig, model: Model, *, trained: bool = True, modules: Mapping[str, str] | None = None
) -> Adapter:
    """The adapter that a config asks for.

    On matrices that the family's code reads there is none to be ``trained``, but one may be merged. A folder
    of PEFT's may name ``modules`` of a composite model, as :func:`peft_settings` does.
    """
    given = {
        key: getattr(block, key) for key in Adapter.__dataclass_fields__ if key in block.model_fields_set
    }
    told, saved = ({}, {}) if block.path is None else _read(block.path, modules or {})
    if block.quantization != "none" and find_spec("bitsandbytes") is None:
        raise ConfigError(
            at("dsx.adapter.quantization", block.quantization),
            "the package bitsandbytes is missing",
            "pip install 'bitsandbytes>=0.48' (dsx's extra \"quantized\" brings it)",
        )
    ties = saved.pop("ties", False)
    specs = _all_specs(model)
    if saved:
        saved |= _names_here(block.path, told, saved, specs)
    adapter = Adapter(**saved | given)
    read = {name for spec in specs if spec.read and trained for name, _ in modules_of(spec)}
    if read and adapter.targets == ALL_LINEAR and (not saved or "targets" in given):
        kept = {name for spec in specs for name, _ in targeted(adapter, spec)} - read
        others = {name for spec in specs for name in names_of(spec)} - kept
        given["targets"] = tuple(sorted(kept if _ends(kept) & _ends(others) else _ends(kept)))
        adapter = Adapter(**saved | given)
    for problem in _problems(adapter, specs, read):
        key = str(problem.path[2])
        if not saved or key in given:
            raise problem
        name = at(_KEYS.get(key, key) + dotted(problem.path[3:]), problem.value)
        fix = "use an adapter without it" if key == "targets" else problem.fix
        raise ConfigError(at("dsx.adapter.path", block.path), f"its {name}: {problem.what}", fix)
    _require_whole_blocks(adapter, model)
    if saved:
        _require_one_rank(block.path, told, Adapter(**saved), specs)
        saved["targets"] = _narrowed(block.path, told, Adapter(**saved), specs)
        adapter = Adapter(**saved | given)
    past = next((name for spec in specs for name, _ in targeted(adapter, spec) if name in read), None)
    if past is not None:
        where = at("dsx.adapter.targets", adapter.targets)
        fix = "leave it out, or put it into dsx.adapter.train_also, to train it itself"
        if saved and "targets" not in given:
            where = at("dsx.adapter.path", block.path)
            fix = "merge it, by dsx reshard --to hf of its run's checkpoint, or by PEFT's merge_and_unload"
        what = f"the family's code, or a kernel that it calls, multiplies by the matrix of {past} itself"
        raise ConfigError(where, f"{what}, past any adapter", fix)
    if saved:
        _require_ties(block.path, adapter, specs, ties=ties)
        _require_possible_start(block.path, adapter, specs)
        _require_same(block.path, given, adapter, Adapter(**saved), model)
    return adapter


def _all_specs(model: Model) -> tuple[ParamSpec, ...]:
    """What an adapter may be put on, or train itself: parameters, and those of the tower of pictures."""
    tower = tuple(each for each in model.tower_params if not each.buffer)
    return param_specs(replace(model, adapter=None)) + tower


def _require_whole_blocks(adapter: Adapter, model: Model) -> None:
    """Refuse rows that are no whole blocks of nf4.

    Blocks go over rows' ends there: dsx's fused linears would begin them elsewhere than the modules that they
    are made of, and bitsandbytes' kernel for CPUs reads them back wrong.
    """
    if adapter.quantization not in ("nf4", "nf4_double"):
        return
    for spec in param_specs(replace(model, adapter=adapter)):
        if spec.quantized == adapter.quantization and spec.shape[-1] % NF4_BLOCK:
            raise ConfigError(
                at("dsx.adapter.quantization", adapter.quantization),
                f"rows of {modules_of(spec)[0][0]} are {spec.shape[-1]} numbers long, no multiple of the "
                f"{NF4_BLOCK} that share a scale",
                'use "int8", whose rows have a scale each, or "none"',
            )


def _read(folder: str, modules: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings in a folder of PEFT's, and what they say in dsx's words of a model by itself."""
    file, where = Path(folder) / SETTINGS, at("dsx.adapter.path", folder)
    _require_files(folder)
    try:
        told = read(file)
    except ConfigError as error:
        raise ConfigError(where, f"{file} cannot be read ({error.what})", _ANOTHER) from None
    if told.get("peft_type") != "LORA" or told.get("task_type") not in (None, "CAUSAL_LM"):
        kinds = f"peft_type {told.get('peft_type')!r}, task_type {told.get('task_type')!r}"
        raise ConfigError(where, f"{file} says {kinds}", "dsx trains LORA adapters of CAUSAL_LM models")
    others = told.keys() - _SAY_NOTHING - _PATTERNS.keys() - {*_NARROWING, *_KEYS.values()}
    strange = next((key for key in sorted(others) if not _asks_for_nothing(key, told[key])), None)
    if strange is not None:
        what = f"{at(strange, told[strange])}, which dsx does not compute"
        raise ConfigError(where, f"{file} has {what}", "use an adapter without it")
    start = told.get("init_lora_weights", True)
    name = start.lower() if isinstance(start, str) else "gaussian"
    if name not in _STARTS or not isinstance(start, str | bool | None):
        what = "a start after which PEFT trains other matrices than the model's, or leaves some untrained"
        fix = "save it as a plain adapter, with PEFT's path_initial_model_for_weight_conversion"
        raise ConfigError(where, f"{file} has {at('init_lora_weights', start)}, {what}", fix)
    values = {key: told[name] for key, name in _KEYS.items() if told.get(name) is not None}
    inner = {there: here for here, there in modules.items()}
    values |= {
        key: tuple(placed(name, inner) if isinstance(name, str) else name for name in value)
        for key, value in values.items()
        if isinstance(value, list)
    }
    digits = {key for key in ("rank", "alpha") if re.fullmatch("[0-9]+", str(values.get(key)))}
    values |= {key: int(values[key]) for key in digits}
    values.setdefault("targets", ())
    try:
        made = AdapterConfig.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = _KEYS[str(problem["loc"][0])]
        what = f"{file} has {at(key, problem['input'])} ({problem['msg']})"
        raise ConfigError(where, what, _ANOTHER) from None
    named = any(name.rpartition(".")[2] in _TIED for name in made.train_also)
    kind = {
        "type": "dora" if told.get("use_dora") else "lora",
        "start": _STARTS[name],
        "ties": bool(told.get("ensure_weight_tying")) and named,
    }
    return told, {key: getattr(made, key) for key in values} | kind


def _require_files(folder: str) -> None:
    where, old, new = at("dsx.adapter.path", folder), Path(folder) / _OLD_WEIGHTS, Path(folder) / WEIGHTS
    lost = next((file for file in (Path(folder) / SETTINGS, new) if not file.is_file()), None)
    if lost == new and old.is_file():
        code = (
            "from torch import load; from safetensors.torch import save_file; "
            f'held = load({json.dumps(str(old))}, map_location="cpu", weights_only=True); '
            f"save_file({{name: tensor.clone() for name, tensor in held.items()}}, {json.dumps(str(new))})"
        )
        what = f"its weights are in {old.name}, as PEFT wrote them before 0.7, and dsx reads {new.name}"
        raise ConfigError(where, what, f"run python -c {shlex.quote(code)} to convert it")
    if lost is not None:
        raise ConfigError(where, f"there is no file {lost}", _ANOTHER)


def _names_here(
    path: str | None, told: Mapping[str, Any], saved: Mapping[str, Any], specs: Sequence[ParamSpec]
) -> dict[str, Any]:
    """The names in a folder that the model has, as PEFT passes over the others if it finds any.

    The folder's tensors, which are the model's or are refused, prove that nothing is lost.
    """
    modules = {name for spec in specs for name in names_of(spec)}
    stacks = {spec.hf_whole for spec in specs if is_stack(spec)}
    targets, parameters = saved["targets"], saved.get("target_parameters", ())
    if isinstance(targets, str):
        try:
            held = targets if any(names(targets, name) for name in modules) else ()
        except re.error:
            return {}  # which is named with the other problems
    else:
        held = tuple(each for each in targets if any(names((each,), name) for name in modules))
    found = tuple(each for each in parameters if any(names((each,), name) for name in stacks))
    if (targets or parameters) and not (held or found):
        name = "target_modules" if targets else "target_parameters"
        what = f"its {at(name, told[name])} names no linear of the model's blocks"
        raise ConfigError(
            at("dsx.adapter.path", path),
            f"it is an adapter of another model: {what}",
            f"give one of this model, or its own model as dsx.model.path ({_base_of(path)})",
        )
    also = saved.get("train_also", ())
    here = tuple(each for each in also if any(is_also(Adapter(train_also=(each,)), name) for name in modules))
    return {"targets": held, "target_parameters": found, "train_also": here}


def _require_one_rank(
    path: str | None, told: Mapping[str, Any], adapter: Adapter, specs: Sequence[ParamSpec]
) -> None:
    """Refuse a folder that gives some targets another rank or alpha than the rest."""
    linears = [name for spec in specs for name, _ in targeted(adapter, spec)]
    stacks = [spec.hf_whole for spec in specs if is_targeted_stack(adapter, spec)]
    for key, fix in _PATTERNS.items():
        other = next((name for name in linears + stacks if _excepts(key, told, adapter, name)), None)
        if other is not None:
            what = f"its {at(key, told[key])} excepts {other}, and dsx treats all targets alike"
            raise ConfigError(at("dsx.adapter.path", path), what, fix)


def _narrowed(
    path: str | None, told: Mapping[str, Any], adapter: Adapter, specs: Sequence[ParamSpec]
) -> str | tuple[str, ...]:
    """An adapter's targets without those that a folder leaves out: each by its whole name if any are."""
    kept = linears = [name for spec in specs for name, _ in targeted(adapter, spec)]
    for key in _NARROWING:
        kept = [name for name in kept if not _excepts(key, told, adapter, name)]
        if linears and not kept:
            what = f"its {at(key, told[key])} leaves no module an adapter"
            raise ConfigError(at("dsx.adapter.path", path), what, "use an adapter without it")
    return adapter.targets if kept == linears else tuple(kept)


def _excepts(key: str, told: Mapping[str, Any], adapter: Adapter, name: str) -> bool:
    """Whether one of these keys changes what PEFT makes of a target; true if PEFT cannot read it.

    See check_target_module_exists in peft/tuners/tuners_utils.py, get_pattern_key in peft/utils/other.py.
    """
    value: Any = told.get(key)
    of_all = adapter.rank if key == "rank_pattern" else adapter.alpha
    if _asks_for_nothing(key, value):
        return False
    try:
        if key.endswith("_pattern"):
            found = (each for end, each in value.items() if re.match(rf"(.*\.)?({end})$", name))
            return bool(next(found, of_all) != of_all)
        if key == "exclude_modules":
            return names(value if isinstance(value, str) else tuple(value), name)
        if isinstance(adapter.targets, str):
            return True
        if name in adapter.targets:
            return False
        words = told.get("layers_pattern") or r"[^.]*"
        patterns = [words] if isinstance(words, str) else words
        layers = (re.match(rf"(?:.*?\.)??{each}\.(?P<layer>\d+)\.", name) for each in patterns)
        layer = next((int(each["layer"]) for each in layers if each is not None), None)
        return layer not in ([value] if isinstance(value, int) else value)
    except (AttributeError, TypeError, re.error):
        return True


def _asks_for_nothing(key: str, value: object) -> bool:
    """Whether a value of a key that dsx does not compute leaves things as they are without it."""
    if value is None or value is False or value in ([], {}):
        return True
    return key == "bias" and value == "none"


def _require_ties(path: str | None, adapter: Adapter, specs: Sequence[ParamSpec], *, ties: bool) -> None:
    """Refuse an adapter that has unlike copies of what the model has once."""
    tied = next((spec for spec in specs if spec.tie is not None and trains(adapter, spec)), None)
    if tied is not None and not ties:
        raise ConfigError(
            at("dsx.adapter.path", path),
            f"its modules_to_save name one of {', '.join(names_of(tied))}, which the model has tied and PEFT "
            "trains apart, because ensure_weight_tying is false or no name ends in embed_tokens or lm_head",
            'make it with ensure_weight_tying=True and "lm_head" in modules_to_save, or of an untied model',
        )


def _require_possible_start(path: str | None, adapter: Adapter, specs: Sequence[ParamSpec]) -> None:
    """Refuse what does not go together with a start that changes the base."""
    if adapter.start == "none":
        return
    turned = any(spec.hf_transposed and any(targeted(adapter, spec)) for spec in specs)
    problem = (
        "experts' matrices (target_parameters)"
        if adapter.target_parameters
        else "a quantised base (dsx.adapter.quantization)"
        if adapter.quantization != "none"
        else "Conv1D, of whose transposed matrix PEFT takes columns"
        if turned and adapter.start == "olora"
        else None
    )
    if problem is not None:
        what = f"its init_lora_weights is {adapter.start}, which dsx does not compute with {problem}"
        raise ConfigError(at("dsx.adapter.path", path), what, "use an adapter without it")


def _base_of(folder: str | None) -> str:
    """What a folder of PEFT's says of the model that it belongs to."""
    return at("base_model_name_or_path", read(Path(str(folder)) / SETTINGS).get("base_model_name_or_path"))


def peft_settings(
    specs: Sequence[ParamSpec], model: Model, base: str | None, modules: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Content of the ``adapter_config.json`` of a model's adapter.

    ``base`` is the folder of the model without the adapter, if it has one, written so that it is found from
    everywhere. ``modules`` says where a composite model has those of this one, as :func:`placed` takes it:
    what is adapted is then named in full, so that nothing of the tower is.
    """
    adapter = model.adapter
    assert adapter is not None
    base = None if base is None else str(Path(base).expanduser().resolve())
    tied = any(spec.trained and spec.tie is not None for spec in specs)
    told = {name: getattr(adapter, key) for key, name in _KEYS.items()}
    if tied and not any(name.rpartition(".")[2] in _TIED for name in adapter.train_also):
        told["modules_to_save"] = (*adapter.train_also, "lm_head")  # or PEFT does not see that it is tied
    told |= {key: list(value) or None for key, value in told.items() if isinstance(value, tuple)}
    if adapter.targets == ALL_LINEAR:
        told["target_modules"] = sorted(_ends(name for spec in specs for name, _ in targeted(adapter, spec)))
    if modules:
        full: dict[str, set[str]] = {"modules_to_save": {"lm_head"} if tied else set()}
        for spec in _all_specs(model):
            inner = {} if spec.tower else modules
            named = {
                "target_modules": {name for name, _ in targeted(adapter, spec)},
                "target_parameters": {spec.hf_whole} if is_targeted_stack(adapter, spec) else (),
                "modules_to_save": {name for name in names_of(spec) if is_also(adapter, name)},
            }
            for key, held in named.items():
                full.setdefault(key, set()).update(placed(name, inner) for name in held)
        outer = tuple(f"{name}." for name in full["modules_to_save"])  # PEFT saves what is inside with it
        full["modules_to_save"] -= {name for name in full["modules_to_save"] if name.startswith(outer)}
        told |= {key: sorted(held) or None for key, held in full.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "bias": "none",
        "use_dora": adapter.type == "dora",
        "fan_in_fan_out": any(spec.linear and spec.hf_transposed for spec in specs),
        "init_lora_weights": True if adapter.start == "none" else adapter.start,
        # A head that is the word embedding stays it.
        "ensure_weight_tying": tied,
        **told,
    }


def _require_same(
    path: str | None, given: Mapping[str, Any], adapter: Adapter, saved: Adapter, model: Model
) -> None:
    """Refuse keys that say something else than the folder that the adapter goes on with."""
    mine, theirs = (
        {(spec.name, spec.shape) for spec in param_specs(replace(model, adapter=each)) if spec.trained}
        for each in (adapter, saved)
    )
    ours, held = asdict(adapter), asdict(saved)
    wrong = [key for key in given if key in ("type", "rank", "alpha", "rslora") and ours[key] != held[key]]
    wrong += [key for key in given if mine != theirs and ours[key] != held[key] and key not in wrong]
    if wrong:
        raise ConfigError(
            at(f"dsx.adapter.{wrong[0]}", given[wrong[0]]),
            f"the adapter in {path} has {held[wrong[0]]!r}",
            f"leave {wrong[0]} out, or train a new adapter",
        )


def _problems(adapter: Adapter, specs: tuple[ParamSpec, ...], read: set[str]) -> Iterator[ConfigError]:
    """What is wrong with an adapter of a model with these parameters, where none is suggested on ``read``."""
    linears = {
        module for spec in specs if spec.linear and not is_stack(spec) for module, _ in modules_of(spec)
    }
    tables = {name for spec in specs if spec.pad_multiple is not None for name in names_of(spec)}
    others = {name for spec in specs for name in names_of(spec)} - linears
    if isinstance(adapter.targets, str):
        yield from _problems_of_expression(adapter.targets, linears, tables, read)
    else:
        for place, target in enumerate(adapter.targets):
            key = at(f"dsx.adapter.targets[{place}]", target)
            yield from _problems_of_target(key, target, linears, tables, others, read)
    for place, target in enumerate(adapter.train_also):
        if not any(is_also(replace(adapter, train_also=(target,)), name) for name in linears | others):
            near = suggest(target, _ends(linears | others), otherwise="name modules as transformers does")
            key = at(f"dsx.adapter.train_also[{place}]", target)
            yield ConfigError(key, "no module's name ends so", near)
    for spec in specs:
        chosen = [is_also(adapter, name) for name, _ in modules_of(spec)]
        if any(chosen) and not all(chosen):
            parts = ", ".join(name for name, _ in modules_of(spec))
            yield ConfigError(
                at("dsx.adapter.train_also", list(adapter.train_also)),
                f"{parts} are one matrix in dsx's modules, and not all of them are named",
                'name all of them, or set dsx.model.implementation to "transformers"',
            )
    yield from _problems_of_stacks(adapter, specs)
    if not any(is_targeted_stack(adapter, spec) or any(targeted(adapter, spec)) for spec in specs):
        what = "the model's blocks have no such linear" + (
            " but those that train_also names" if adapter.train_also else ""
        )
        yield ConfigError(at("dsx.adapter.targets", adapter.targets), what, "name others")


def _problems_of_stacks(adapter: Adapter, specs: tuple[ParamSpec, ...]) -> Iterator[ConfigError]:
    stacks = {spec.hf_whole for spec in specs if is_stack(spec)}
    for place, target in enumerate(adapter.target_parameters):
        if not any(names((target,), name) for name in stacks):
            near = suggest(
                target, {".".join(name.split(".")[-2:]) for name in stacks}, otherwise="leave it out"
            )
            key = at(f"dsx.adapter.target_parameters[{place}]", target)
            yield ConfigError(key, "the model has no stack of experts' matrices of this name", near)
    if adapter.target_parameters and (adapter.dropout or adapter.type != "lora"):
        name, value = ("dropout", adapter.dropout) if adapter.dropout else ("type", adapter.type)
        what = "target_parameters names matrices that are changed before they are used"
        yield ConfigError(at(f"dsx.adapter.{name}", value), what, "leave one of the two out")


def _problems_of_expression(
    expression: str, linears: set[str], tables: Iterable[str], read: set[str]
) -> Iterator[ConfigError]:
    key = at("dsx.adapter.targets", expression)
    if expression == ALL_LINEAR:
        return
    try:
        re.compile(expression)
    except re.error as error:
        yield ConfigError(key, f"it is no regular expression: {error}", "give a list of names, or mend it")
        return
    table = next((name for name in sorted(tables) if names(expression, name)), None)
    if table is not None:
        yield _of_table(key, table)
    elif not any(names(expression, name) for name in linears):
        is_name = any(names((expression,), name) for name in linears)
        known = [ALL_LINEAR, *_ends(linears - read)]
        near = suggest(expression, known, otherwise='use "all-linear", or a list')
        near = f'write ["{expression}"]: names and ends of names stand in a list' if is_name else near
        yield ConfigError(key, "it is the whole name of no linear of the model's blocks", near)


def _problems_of_target(
    key: str, target: str, linears: set[str], tables: set[str], others: set[str], read: set[str]
) -> Iterator[ConfigError]:
    table = next((name for name in sorted(tables) if names((target,), name)), None)
    if table is not None:
        yield _of_table(key, table)
    elif any(names((target,), name) for name in others):
        yield ConfigError(key, "it is no linear", "put it into dsx.adapter.train_also, to train it itself")
    elif not any(names((target,), name) for name in linears):
        near = suggest(target, _ends(linears - read), otherwise="name linears as transformers does")
        yield ConfigError(key, "no linear of the model's blocks is called so", near)


def _of_table(key: str, table: str) -> ConfigError:
    what = f"dsx puts no adapter on {table}, a table of the vocabulary"
    return ConfigError(key, what, f'put "{table.rpartition(".")[2]}" into dsx.adapter.train_also')


def _ends(modules: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in modules}
