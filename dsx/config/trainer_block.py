"""The ``dsx`` block of a JSON that dsx.Trainer reads: what TrainingArguments decide stands nowhere in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsx.config.load import SeveralProblemsError, load
from dsx.config.schema import NO_TOKENIZER, OWN
from dsx.config.wording import at
from dsx.errors import ConfigError, KeyPlace

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
