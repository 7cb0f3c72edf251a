"""A user's own pipeline model, by the name of a function that gives its parts."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        """Pipeline degree."""
        return int(self.arguments["num_stages"])


def user_model(name: str) -> UserModel:
    """Call the function that ``name`` names, ``module:function`` or ``path/to/file.py:function``.

    Raises:
        ModelError: There is none, or it gives something else.
    """
    given = _find(name)()
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


def _find(name: str) -> Callable[[], Any]:
    place, colon, function = name.partition(":")
    if not colon or not place or not function:
        raise ModelError(
            name, "it names no function", "write my_module:make_model or path/to/file.py:make_model"
        )
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _from_path(place)
    except ImportError as error:
        fix = "run the command where the module can be imported from, or give the path of its file"
        raise ModelError(name, f"cannot import it ({error})", fix) from None
    found = getattr(module, function, None)
    if not callable(found):
        raise ModelError(name, f"{place} has no function {function}", "name one that it has")
    return found  # type: ignore[no-any-return]  # checked to be callable; what it returns is checked later


def _from_path(name: str) -> Any:
    """Import a module as ``python -m`` would find it, the working directory included."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _from_file(file: Path) -> Any:
    if not file.is_file():
        raise ImportError(f"there is no file {file}")
    name = f"dsx_user_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling and dataclasses look a module up by its name
    sys.path.insert(0, str(file.parent.resolve()))
    spec.loader.exec_module(module)
    return module
