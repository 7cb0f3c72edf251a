"""An ordinary DeepSpeed JSON, the transformers Trainer's too, as a config of dsx.

What the file leaves open, or leaves to the Trainer as "auto", is filled in and reported. Without a file there
is a config to begin with, for a model and a number of ranks (:func:`starter`). What TrainingArguments decide
stands nowhere in the ``dsx`` block of a JSON that dsx.Trainer reads (:func:`decided`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dsx.config.batch import ACCUMULATION, MICRO, TRAIN
from dsx.config.document import shipped
from dsx.config.load import SeveralProblemsError, content_of, load, override, read
from dsx.config.resolve import resolve
from dsx.config.run import RunConfig
from dsx.config.schema import NO_TOKENIZER, OWN
from dsx.config.sources import find_model, spec_of, vocabulary_of
from dsx.config.wording import at
from dsx.errors import ConfigError, KeyPlace
from dsx.launch.spared import why_not_compiled
from dsx.models.params import num_parameters

_AUTO = "auto"
SEQUENCE_LENGTH_KEYS = ("max_position_embeddings", "n_positions")
_SEQUENCE_LENGTH = 2048  # of a model that does not say how long it can be
_SIZES = (MICRO, ACCUMULATION, "dsx.data.sequence_length")  # named first: they decide most
_UNSAID = "nothing says it"
_TRAINER = "the Trainer's default"
_FILLED = ", as the Trainer fills it in"
_BUCKET = f"hidden size squared{_FILLED}"

# What TrainingArguments have if nobody says otherwise (transformers/training_args.py), by the key that the
# Trainer fills with it (transformers/integrations/deepspeed.py, HfTrainerDeepSpeedConfig).
_LEARNING_RATE = 5e-5
_TRAINER_DEFAULTS: dict[str, Any] = {
    MICRO: 8,
    ACCUMULATION: 1,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": _LEARNING_RATE,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_num_steps": 1,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A key that the file does not decide, its value, and the reason for it."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key} = {json.dumps(self.value)} ({self.why})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A config with a ``dsx`` block, and what in it comes neither from the file nor from the command line."""

    content: dict[str, Any]
    assumed: tuple[Assumption, ...]


def replace_model(content: dict[str, Any], source: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Put ``source`` in the place of a config's ``dsx.model``, with what ``overrides`` change of it."""
    content["dsx"]["model"] = {**source}
    for item in overrides:
        if item.startswith("dsx.model."):
            override(content, item)


def complete(
    content: Mapping[str, Any],
    model: str | None,
    *,
    overrides: Sequence[str] = (),
    where: str = "config",
    steps: int = 1,
) -> Completed:
    """A config of dsx.

    A config with a ``dsx`` block stays as it is, but ``model`` replaces the file's ``dsx.model``; of a block
    for dsx.Trainer, which says nothing of the training, the rest is filled in. Without one the run is
    DeepSpeed's own: data parallel, with sequences of the model's greatest length.

    Args:
        content: The file's content; empty for no file, which means bf16, AdamW and ZeRO-1.
        model: A preset, as ``llama-3-8b`` or ``gpt2/tiny``; a Hugging Face config.json; or a model folder.
            None where the content names one.
        overrides: ``key=value`` items that replace the content's, as ``--set`` takes them.
        where: The file's name, for messages.
        steps: Steps of the run, for a schedule whose length the Trainer decides.
    """
    out = content_of(content, overrides)
    is_empty, has_block = not content, "dsx" in content
    if model is None:
        if has_block:
            return Completed(content=out, assumed=())
        raise ConfigError(
            f"{where}: dsx",
            "the config has no dsx block, which would name the model",
            'give --model (a preset, a model folder, a config.json), or add "dsx": {...}; see `dsx schema`',
        )
    source, hf_config = find_model(model)
    block = out.setdefault("dsx", {})
    if not isinstance(block, dict):
        return Completed(content=out, assumed=())  # refused when it is read
    replace_model(out, source, overrides)
    changed = value_at(block, "model.overrides")
    hf_config = {**hf_config, **(changed if isinstance(changed, dict) else {})}
    if has_block and "train" in block:
        return Completed(content=out, assumed=())
    assumed = [*_fill(out, hf_config, steps), *_batch(out), *(_usual(out) if is_empty else _needed(out))]
    lengths = {}
    if value_at(block, "data.sequence_length") is None:
        longest = [hf_config[key] for key in SEQUENCE_LENGTH_KEYS if key in hf_config]
        why = "the model's greatest" if longest else _UNSAID
        length = longest[0] if longest else _SEQUENCE_LENGTH
        assumed.append(Assumption(key="dsx.data.sequence_length", value=length, why=why))
        lengths = {"sequence_length": length}
    defaults: dict[str, dict[str, Any]] = {
        "parallel": {"tensor": 1, "pipeline": 1, "chunks": _AUTO},
        "data": {"tokenizer": "bytes", **lengths},
        "train": {"steps": steps, "output": "runs/unnamed"},
    }
    for key, value in defaults.items():
        given = block.setdefault(key, {})
        block[key] = {**value, **given} if isinstance(given, dict) else given
    return Completed(content=out, assumed=tuple(sorted(assumed, key=lambda each: each.key not in _SIZES)))


def _usual(out: dict[str, Any]) -> Iterator[Assumption]:
    """The usual settings of a run of which only the model is given."""
    if not {"bf16", "fp16"} & set(out):
        yield _put(out, "bf16.enabled", True, _UNSAID)
    if (
        isinstance(out.get("zero_optimization", {}), dict)
        and value_at(out, "zero_optimization.stage") is None
    ):
        yield _put(out, "zero_optimization.stage", 1, _UNSAID)
    yield from _needed(out)


def _needed(out: dict[str, Any]) -> Iterator[Assumption]:
    """The optimizer that is needed: the script's own, if the file names none."""
    optimizer = out.get("optimizer", {})
    if isinstance(optimizer, dict) and optimizer.get("type") is None:
        yield _put(out, "optimizer.type", "AdamW", _UNSAID)
        if "params" not in out["optimizer"]:
            yield _put(out, "optimizer.params.lr", _LEARNING_RATE, _UNSAID)


def _batch(out: dict[str, Any]) -> Iterator[Assumption]:
    """One sequence at a time, unless a batch size says more: two keys, or one batch size, give all three."""
    if out.get(TRAIN) is None and out.get(MICRO) is None:
        yield _put(out, MICRO, 1, _UNSAID)
        if out.get(ACCUMULATION) is None:
            yield _put(out, ACCUMULATION, 1, _UNSAID)


def _fill(out: dict[str, Any], hf_config: Mapping[str, Any], steps: int) -> Iterator[Assumption]:
    """Replace every "auto" that the Trainer knows by its value; others stay."""
    if out.get(TRAIN) == _AUTO:
        del out[TRAIN]  # the product of the others
    elif out.get(TRAIN) is not None:
        for key in (MICRO, ACCUMULATION):
            if out.get(key) == _AUTO:
                del out[key]
    yield from _precision(out)
    for key, default in _TRAINER_DEFAULTS.items():
        if value_at(out, key) == _AUTO:
            yield _put(out, key, copy.deepcopy(default), _TRAINER)
    stage3 = "zero_optimization.stage3"
    later: dict[str, tuple[Callable[[], Any], str]] = {
        "scheduler.params.warmup_max_lr": (
            partial(value_at, out, "optimizer.params.lr"),
            "the learning rate",
        ),
        "scheduler.params.total_num_steps": (lambda: max(steps, 2), "the steps of the run"),
        "zero_optimization.reduce_bucket_size": (lambda: _hidden(hf_config) ** 2, _BUCKET),
        f"{stage3}_prefetch_bucket_size": (lambda: int(0.9 * _hidden(hf_config) ** 2), f"0.9 x {_BUCKET}"),
        f"{stage3}_param_persistence_threshold": (
            lambda: 10 * _hidden(hf_config),
            f"10 x hidden size{_FILLED}",
        ),
    }
    for key, (value, why) in later.items():
        if value_at(out, key) == _AUTO:
            yield _put(out, key, value(), why)


def _precision(out: dict[str, Any]) -> Iterator[Assumption]:
    """The Trainer's --bf16 and --fp16 decide: the one that is on, else bf16 where the file leaves it open."""
    named = [key for key in ("bf16", "fp16") if value_at(out, f"{key}.enabled") == _AUTO]
    on = [key for key in ("bf16", "fp16") if value_at(out, f"{key}.enabled") is True]
    if on:
        for key in named:
            yield _put(out, f"{key}.enabled", False, f"{on[0]} is on")
    elif named:
        kept, *others = named
        why = f"{' and '.join(named)}: auto; the Trainer's --{kept} decides"
        yield _put(out, f"{kept}.enabled", True, why)
        for key in others:
            del out[key]


def _hidden(hf_config: Mapping[str, Any]) -> int:
    return spec_of(hf_config).hidden_size


def value_at(content: Mapping[str, Any], key: str) -> Any:
    """What stands at a dotted key; None for nothing."""
    node: Any = content
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _put(content: dict[str, Any], key: str, value: Any, why: str) -> Assumption:
    *blocks, last = key.split(".")
    node = content
    for block in blocks:
        node = node.setdefault(block, {})
    node[last] = value
    return Assumption(key=key, value=value, why=why)


_FIRST_MODEL = "llama/tiny"
_STEPS = 200
_BATCH = 16  # sequences per step, about
_SETTINGS = ((50e6, "configs/zero1.json"), (3e9, "configs/gpt2_124m.json"))  # most parameters: whose settings
_LARGE = "configs/llama3_8b_8gpu.json"
_FINE_TUNE = "configs/finetune.json"
_FROM_THE_BEGINNING, _FROM_WEIGHTS = "gpt_3d.py", "finetune.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """The files to write; ``assumed`` is what the DeepSpeed JSON left open."""

    content: dict[str, Any]
    run: RunConfig
    recipe: str
    assumed: tuple[Assumption, ...] = ()


def starter(
    *, model: str | None, gpus: int, ds_config: Path | None = None, overrides: Sequence[str] = ()
) -> Starter:
    """A config that runs.

    Weights are fine-tuned; a preset, a bare config.json or a folder without weights is trained from the
    beginning. Without ``ds_config`` the layout is that which "auto" gives for the number of ranks, written
    out. With one, its keys are kept, and the run stays data parallel unless it has a ``dsx`` block.

    Args:
        model: A preset, a Hugging Face folder or config.json; None for a tiny model, or for that of
            ``ds_config``.
        gpus: Ranks.
        ds_config: A DeepSpeed JSON, the transformers Trainer's too.
        overrides: ``key=value`` items that take precedence, as ``--set`` takes them.

    Raises:
        ConfigError: A key cannot stay as it is, or degrees do not divide; each with its fix.
        ModelError: A Hugging Face config that dsx cannot build.
    """
    if ds_config is None:
        content = _laid_out(*_begun(model or _FIRST_MODEL), gpus, overrides)
        return _checked(content, gpus, overrides)
    written = read(ds_config)
    if "dsx" in written:
        content = complete(written, None, where=str(ds_config)).content
        if model is not None and isinstance(content["dsx"], dict):
            content["dsx"]["model"] = _source(model)[0]
        return _checked(content, gpus, overrides)
    # The length of the JSON's own schedule becomes the run's.
    scheduler = content_of(written, overrides).get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, Mapping) else None
    steps = params.get("total_num_steps") if isinstance(params, Mapping) else None
    own = steps if isinstance(steps, int) and steps > 1 else None
    whole = complete(written, model, overrides=overrides, where=str(ds_config), steps=own or _STEPS)
    assert model is not None
    _, block = _begun(model)
    block["parallel"] |= {"tensor": 1, "pipeline": 1}
    if own is not None:
        block["train"] |= {"steps": own, "eval_every": -(-own // 2), "save_every": -(-own // 2)}
    told = tuple(each for each in whole.assumed if not each.key.startswith("dsx."))
    return _checked(whole.content | {"dsx": block}, gpus, overrides, told)


def _why_torchs_optimizer(content: Mapping[str, Any]) -> str:
    """Why this machine should use torch's Adam in place of DeepSpeed's; empty if it need not, or is told."""
    optimizer, zero = content.get("optimizer"), content.get("zero_optimization")
    if not isinstance(optimizer, Mapping) or str(optimizer.get("type")).lower() not in ("adam", "adamw"):
        return ""
    params = optimizer.get("params")
    # DeepSpeed offloads with an optimizer of its own.
    offloads = isinstance(zero, Mapping) and zero.get("offload_optimizer") is not None
    is_open = isinstance(params, dict) and "torch_adam" not in params and not offloads
    return why_not_compiled() if is_open else ""


def recipe_of(content: Mapping[str, Any]) -> str:
    """The recipe that trains by a config: it begins with the weights of the model's folder, if there are any.

    What is wrong with the config is the recipe's to say.
    """
    block = content.get("dsx")
    model = block.get("model") if isinstance(block, Mapping) else None
    if not isinstance(model, Mapping):
        return _FROM_THE_BEGINNING
    folder, weights = model.get("path"), model.get("weights")
    has_any = isinstance(folder, str) and any(Path(folder).glob("*.safetensors"))
    return _FROM_WEIGHTS if weights == "load" or (weights != "random" and has_any) else _FROM_THE_BEGINNING


def _checked(
    content: Mapping[str, Any],
    gpus: int,
    overrides: Sequence[str],
    assumed: tuple[Assumption, ...] = (),
) -> Starter:
    final = content_of(content, overrides)
    if why := _why_torchs_optimizer(final):
        final["optimizer"]["params"] |= {"torch_adam": True}
        assumed += (Assumption(key="optimizer.params.torch_adam", value=True, why=why),)
    run = resolve(final, world_size=gpus)
    tokenizer, vocabulary = run.dsx.data.tokenizer, run.model.vocab_size
    ids = vocabulary_of(tokenizer)
    if ids is not None and ids > vocabulary:
        what = f"it has {ids} ids, but the model's vocabulary is {vocabulary}"
        fix = f"use the model's own tokenizer, or a model with vocab_size >= {ids}"
        raise ConfigError(at("dsx.data.tokenizer", tokenizer), what, fix)
    recipe = _FROM_THE_BEGINNING if run.weights is None else _FROM_WEIGHTS
    return Starter(content=final, run=run, recipe=recipe, assumed=assumed)


def _begun(model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """DeepSpeed's keys and a ``dsx`` block for a model, from a shipped config of its size."""
    source, hf_config = _source(model)
    small = read(shipped(_SETTINGS[0][1]))
    if source.get("weights") == "load":
        base = read(shipped(_FINE_TUNE))
        block = base.pop("dsx")
    else:
        size = num_parameters(spec_of(hf_config))
        base = read(shipped(next((name for most, name in _SETTINGS if size <= most), _LARGE)))
        block = small["dsx"]
        block["data"]["sequence_length"] = base.pop("dsx")["data"]["sequence_length"]
        base["scheduler"] = small["scheduler"]
    longest = [hf_config[key] for key in SEQUENCE_LENGTH_KEYS if key in hf_config]
    block["data"]["sequence_length"] = min([block["data"]["sequence_length"], *longest])
    block["data"]["tokenizer"] = "auto"
    block["model"] = source
    block["train"] |= {"steps": _STEPS, "eval_every": _STEPS // 2, "save_every": _STEPS // 2}
    block["train"]["output"] = "runs/{layout}"
    base["scheduler"]["params"] |= {"total_num_steps": _STEPS, "warmup_num_steps": _STEPS // 10}
    block["tracking"]["wandb"].pop("name")
    return base, block


def _source(model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """``dsx.model`` for a run, which loads weights that are there, and the Hugging Face config."""
    source, hf_config = find_model(model)
    if "path" in source:
        has_weights = any(Path(model).glob("*.safetensors"))
        source = {"path": str(Path(model).absolute()), "weights": "load" if has_weights else "random"}
    source.pop("overrides", None)  # a preset's own vocabulary, which the tokenizer decides here
    return source, hf_config


def _laid_out(
    base: dict[str, Any], block: dict[str, Any], gpus: int, overrides: Sequence[str]
) -> dict[str, Any]:
    """What "auto" becomes on ``gpus`` ranks, and a batch that they divide."""
    given = content_of({}, overrides)
    base.pop(TRAIN, None)
    base |= {MICRO: min(base[MICRO], _BATCH), ACCUMULATION: 1}
    run = resolve(content_of(base | {"dsx": block}, [*overrides, f"{TRAIN}=null"]), world_size=gpus)
    found = run.resolved()["dsx"]
    block["parallel"] |= {axis: found["parallel"][axis] for axis in ("tensor", "pipeline", "chunks")}
    block["schedule"]["name"] = run.schedule_name
    if given.get(TRAIN) is None:
        base[ACCUMULATION] = max(1, _BATCH // run.samples_per_micro_step)
    else:
        del base[ACCUMULATION]
    return base | {"dsx": block}


# Keys of the block in whose place arguments stand, by what decides them; "" stands for all others of a part.
_DECIDED: Mapping[str, Mapping[str, str]] = {
    "model": dict.fromkeys(("preset", "config", "path", "weights", "family", "overrides"), "Trainer(model=)"),
    "data": {"": "train_dataset and data_collator"},
    "train": {
        "": "TrainingArguments",
        "steps": "max_steps and num_train_epochs",
        "output": "output_dir",
        "log_every": "logging_steps",
        "eval_every": "eval_steps",
        "save_every": "save_steps",
        "keep_checkpoints": "save_total_limit",
        "resume": "train(resume_from_checkpoint=)",
        "export_hf": "save_model()",
    },
}
_WHOLE = {"tracking": "report_to", "elastic": "the number of ranks, by which a Trainer counts its steps"}
_LEFT = ("dsx.data.sequence_length", "dsx.train.freeze")


def decided(block: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Keys in whose place arguments stand, and policies that dsx.Trainer has not."""
    for part, deciders in _DECIDED.items():
        written = block.get(part)
        for key, value in written.items() if isinstance(written, dict) else ():
            decider, name = deciders.get(key, deciders.get("")), f"dsx.{part}.{key}"
            if decider is not None and name not in _LEFT:
                where = KeyPlace(at(name, value), ("dsx", part, key), value)
                yield ConfigError(where, f"dsx.Trainer takes it from {decider}", "remove it")
    for part, decider in _WHOLE.items():
        if part in block:
            where = at(f"dsx.{part}", block[part])
            yield ConfigError(where, f"dsx.Trainer takes it from {decider}", "remove it")
    if block.get("outer") is not None:
        what, fix = "dsx.Trainer trains one job, no islands", "use a recipe, e.g. recipes/finetune.py"
        yield ConfigError(at("dsx.outer", block["outer"]), what, fix)
    faults = block.get("faults")
    for key, value in faults.items() if isinstance(faults, dict) else ():
        if value == "roll_back":
            where = KeyPlace(at(f"dsx.faults.{key}", value), ("dsx", "faults", key), value)
            yield ConfigError(where, "dsx.Trainer does not roll back", 'use "stop" or "skip"')


def completed(
    block: Mapping[str, Any], *, model: Mapping[str, Any], length: int, train: Mapping[str, Any]
) -> dict[str, Any]:
    """The block of a whole run.

    ``model`` and ``train`` are its ``dsx.model`` and ``dsx.train`` by what Trainer was given and by the
    arguments; ``length`` is the tokens of a sequence, if the block does not say it.
    """
    own = {"source": OWN, "tokenizer": NO_TOKENIZER, "held_out": 0.0}
    data = {"sequence_length": length, **(block.get("data") or {}), **own}
    return {**block, "model": {**(block.get("model") or {}), **model}, "data": data, "train": dict(train)}


def problems(config: Mapping[str, Any]) -> tuple[ConfigError, ...]:
    """Everything wrong with the block of a config for dsx.Trainer, before a model or arguments are known."""
    block = config["dsx"]
    if not isinstance(block, dict):
        return (ConfigError(at("dsx", block), "it must be an object {...}", "see `dsx schema`"),)
    found = tuple(decided(block))
    if found:
        return found
    whole = completed(block, model={"preset": "tiny"}, length=1, train={"steps": 1, "output": "out"})
    try:
        load({"dsx": whole})
    except ConfigError as error:
        return error.problems if isinstance(error, SeveralProblemsError) else (error,)
    return ()
