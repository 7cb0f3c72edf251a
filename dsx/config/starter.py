"""A config to begin with, for a model and a number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.config.batch import ACCUMULATION, MICRO, TRAIN
from dsx.config.document import shipped
from dsx.config.load import content_of, read
from dsx.config.ordinary import SEQUENCE_LENGTH_KEYS, Assumption, complete
from dsx.config.resolve import resolve
from dsx.config.run import RunConfig
from dsx.config.sources import find_model, spec_of, vocabulary_of
from dsx.config.wording import at
from dsx.errors import ConfigError
from dsx.launch.spared import why_not_compiled
from dsx.models.params import num_parameters

_FIRST_MODEL = "llama/tiny"
_STEPS = 200
_BATCH = 16  # sequences per step, about
_SIZES = ((50e6, "configs/zero1.json"), (3e9, "configs/gpt2_124m.json"))  # most parameters: whose settings
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
    small = read(shipped(_SIZES[0][1]))
    if source.get("weights") == "load":
        base = read(shipped(_FINE_TUNE))
        block = base.pop("dsx")
    else:
        size = num_parameters(spec_of(hf_config))
        base = read(shipped(next((name for most, name in _SIZES if size <= most), _LARGE)))
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
