"""A function of the user's own, by the name that an option gives: ``my_model.py:make_layers``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsx.errors import ModelError


def user_function(name: str) -> Callable[[], Any]:
    """What ``module:function`` or ``path/to/file.py:function`` names, its errors told as :class:`ModelError`.

    Raises:
        ModelError: There is no such function, or its module cannot be imported.
    """
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise ModelError(
            name, "it names no function", "write my_module:make_model or path/to/file.py:make_model"
        )
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _from_path(place)
    except ImportError as error:
        fix = "run the command where the module can be imported from, or give the path of its file"
        raise ModelError(name, f"cannot import it ({error})", fix) from None
    except (Exception, SystemExit) as error:
        raise ModelError(name, f"{place} ends as it is imported: {_told(error)}", "mend the file") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise ModelError(name, f"{place} has no function {function}", "name one that it has")

    def call() -> Any:
        try:
            return found()
        except ModelError:
            raise
        except (Exception, SystemExit) as error:
            raise ModelError(
                f"{name}()", _told(error), "mend the function; it is called without arguments"
            ) from error

    return call


def _told(error: BaseException) -> str:
    """An error of the user's code, with the line that it comes from."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f" (line {last.lineno} of {Path(last.filename).name})"
    if isinstance(error, SystemExit):
        return f"it ends the program{where}"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}{where}"


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
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(file):
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling and dataclasses look a module up by its name
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
