"""An ordinary DeepSpeed JSON, the transformers Trainer's too, as a config of dsx.

What the file leaves open, or leaves to the Trainer as "auto", is filled in and reported.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dsx.config.batch import ACCUMULATION, MICRO, TRAIN
from dsx.config.load import content_of, override
from dsx.config.sources import find_model, spec_of
from dsx.errors import ConfigError

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
