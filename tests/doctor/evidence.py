"""The table of configs and who says what of them (evidence.toml), as values, for its three runners.

Those are test_evidence_config.py (DeepSpeed's reader), test_evidence_engines.py (its engines) and
test_evidence_valid.py (what is right, and projects); each asks the doctor, too.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_ADAM = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}  # torch's: nothing to compile


class Engine(NamedTuple):
    """An experiment with real engines, and what is due: an empty check is no judgement."""

    made: str
    number: int
    error: str
    words: str
    may_be: str
    check: str
    key: str
    config: dict[str, Any]


def _batched(config: dict[str, Any]) -> dict[str, Any]:
    return config if {*_BATCH} & {*config} else {"train_micro_batch_size_per_gpu": 1, **config}


def _optimized(config: dict[str, Any]) -> dict[str, Any]:
    config = {"optimizer": _ADAM, **_batched(config)}
    return {key: value for key, value in config.items() if value is not None}


def _changed(base: Any, changes: Any) -> Any:
    """``base`` with ``changes``, as a merge patch of RFC 7396 has them."""
    if not isinstance(changes, dict):
        return changes
    return {**base, **{key: _changed(base.get(key, {}), value) for key, value in changes.items()}}


def _project(row: list[Any]) -> tuple[Any, ...]:
    arguments, error, due, config = row
    config = json.loads(config)
    if base := config.pop("like", None):
        config = _changed(json.loads(_TABLE["project"][base][-1]), config)
    return json.loads(arguments), error, {tuple(finding) for finding in due}, config


_TABLE = tomllib.loads(Path(__file__).with_name("evidence.toml").read_text())
REFUSED = {name: (*row[:-1], _batched(json.loads(row[-1]))) for name, row in _TABLE["refused"].items()}
SILENT = {name: (*row[:-1], _batched(json.loads(row[-1]))) for name, row in _TABLE["silent"].items()}
ENGINES = {name: Engine(*row[:-1], _optimized(json.loads(row[-1]))) for name, row in _TABLE["engine"].items()}
TIMED = {name: _optimized(json.loads(row[0])) for name, row in _TABLE["timed"].items()}
VALID = {name: json.loads(row[0]) for name, row in _TABLE["valid"].items()}
PROJECTS = {name: _project(row) for name, row in _TABLE["project"].items()}
