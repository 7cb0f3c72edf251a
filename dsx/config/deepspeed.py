"""What dsx refuses in DeepSpeed's own keys before a run, and what it reads from them.

The refusals are the doctor's errors (dsx/doctor): DeepSpeed ignores some of these mistakes in silence,
and finds others only after every rank has started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsx.config.wording import at
from dsx.doctor import examine
from dsx.doctor.finding import ABSENT, Finding, dotted
from dsx.doctor.key import REFERENCE
from dsx.doctor.reference import optimizer_names as keys
from dsx.errors import ConfigError

Json = Mapping[str, Any]

# Said better by the batch of the resolved mesh (dsx/config/batch.py), which comes next.
_LATER = ("batch-missing", "batch-triple")


def deepspeed_problems(config: Json) -> list[ConfigError]:
    """Everything wrong with DeepSpeed's part of a config that dsx is to run."""
    errors = examine(config, runner="dsx", version=REFERENCE).errors
    return [as_error(finding) for finding in errors if finding.check not in _LATER]


def as_error(finding: Finding) -> ConfigError:
    """The error that refuses what ``finding`` is about."""
    key = dotted(finding.path)
    where = key if finding.value is ABSENT else at(key, finding.value)
    return ConfigError(where, finding.why, finding.fix)


def zero_stage(config: Json) -> int:
    """ZeRO stage of a checked config; 0 when absent."""
    stage = _block(config, "zero_optimization").get("stage", 0)
    return stage if _is_int(stage) else 0


def is_bf16(config: Json) -> bool:
    """Whether a checked config trains in bf16."""
    return any(_block(config, key).get("enabled") is True for key in ("bf16", "bfloat16"))


def optimizer_notes(config: Json) -> Iterator[str]:
    """Builds that DeepSpeed would start on a machine without a GPU."""
    optimizer = _block(config, "optimizer")
    kind = str(optimizer.get("type", "")).lower()
    if kind in keys.COMPILED_OPTIMIZERS and not _block(optimizer, "params").get("torch_adam"):
        fix = " (optimizer.params.torch_adam = true compiles nothing)" if kind.startswith("adam") else ""
        yield f"optimizer {optimizer['type']}: DeepSpeed compiles its own at first use, a minute or two{fix}"


def _block(config: Json, key: str) -> dict[str, Any]:
    """The object at ``key``, empty if there is none."""
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
