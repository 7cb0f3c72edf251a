"""A user's own pipeline model, by the name of a function that gives its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsx.config.user_function import user_function
from dsx.errors import ModelError

_FIX = (
    'return {"layers": [...], "loss_fn": ..., "num_stages": 2, "batch": lambda step, index, size: (x, y)}; '
    "every other key is an argument of PipelineModule"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModel:
    """What a user's function gives.

    Attributes:
        arguments: The arguments of PipelineModule, ``layers`` among them.
        batch: ``batch(step, index, size) -> (inputs, labels)``: micro-batch ``index`` of a step over all
            data-parallel replicas, the same whenever it is asked for.
    """

    arguments: dict[str, Any]
    batch: Callable[[int, int, int], tuple[Any, Any]]

    @property
    def num_stages(self) -> int:
        return int(self.arguments["num_stages"])


def user_model(entry: str | Callable[[], Any]) -> UserModel:
    """Call a function, or the one that ``module:function`` or ``path/to/file.py:function`` names.

    Raises:
        ModelError: There is none, or it gives something else.
    """
    name = entry if isinstance(entry, str) else getattr(entry, "__qualname__", repr(entry))
    given = (user_function(entry) if isinstance(entry, str) else entry)()
    if not isinstance(given, Mapping):
        raise ModelError(name, f"it returns {type(given).__name__}, not a dict", _FIX)
    arguments = dict(given)
    missing = [key for key in ("layers", "num_stages", "batch") if key not in arguments]
    if missing:
        raise ModelError(name, f"what it returns lacks {', '.join(missing)}", _FIX)
    batch = arguments.pop("batch")
    if not callable(batch):
        raise ModelError(name, f"batch is {type(batch).__name__}, not a function", _FIX)
    stages = arguments["num_stages"]
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise ModelError(name, f"num_stages is {stages!r}", "give the number of pipeline stages, 1 or more")
    return UserModel(arguments=arguments, batch=batch)
