"""A command line's mistakes in the words of every other refusal: where, what, fix; and numbers within bounds.

click and pydantic have words of their own, which name Python's types and leave the value out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import typer

from dsx.config.document import own_copy
from dsx.config.wording import suggest
from dsx.errors import ConfigError
from dsx.terminal import shortened

UsageError: Final[type[Exception]] = typer.BadParameter.__mro__[1]
"""Of the click that typer brings or uses."""

MOST: Final = {int: 1 << 30, float: 1e9}
"""The largest number of an option that states no other: what is larger is a slip, and would take for ever."""

_SHOWN = 400


def label(parameter: Any) -> str:
    """An option's flag, an argument's name."""
    if parameter.param_type_name == "option":
        return str(parameter.opts[0])
    return str(parameter.name.upper() if _choices(parameter) else parameter.metavar)


def hold_to_words(parameter: Any) -> None:
    """Make a parameter of a command refuse values in our words, and its help show no type of Python's."""
    kind = _kind(parameter)
    least, most = parameter.min, parameter.max
    parameter.min = parameter.max = None  # checked here, and no concern of --help
    if parameter.metavar is None and not getattr(parameter, "is_flag", False) and not _choices(parameter):
        last = label(parameter).rpartition("-")[2].upper()
        parameter.metavar = {int: "N", Path: "FILE"}.get(kind, last)
    if parameter.param_type_name == "argument":
        name = f"{parameter.metavar}{'...' if parameter.nargs != 1 else ''}"
        parameter.display_type_rich = lambda ctx: None  # noqa: ARG005
        parameter.get_usage_pieces = lambda ctx: [name if parameter.required else f"[{name}]"]  # noqa: ARG005
    own = parameter.callback is not None  # it has bounds of its own
    process = partial(_value, parameter, parameter.process_value, kind, None if own else (least, most))
    parameter.process_value = process


def _value(
    parameter: Any,
    process: Callable[[Any, Any], Any],
    kind: type,
    bounds: tuple[float | None, float | None] | None,
    context: Any,
    value: Any,
) -> Any:
    """What the parameter makes of a value. Raises ConfigError."""
    if kind in (int, float) and value is not None and not isinstance(value, bool):
        _check_number(shortened(f"{label(parameter)} {value}", _SHOWN), kind, str(value), bounds)
    try:
        return process(context, value)
    except UsageError as error:
        if type(error).__name__ == "MissingParameter":
            raise _missing(parameter) from None
        values = value if isinstance(value, list | tuple) else [value]
        for each in values:
            raise_wrong(parameter, str(each))
        where = shortened(f"{label(parameter)} {value}", _SHOWN)
        raise ConfigError(where, _plain(error), f"give {label(parameter)} {parameter.metavar}") from None


def _check_number(
    where: str, kind: type, text: str, bounds: tuple[float | None, float | None] | None
) -> None:
    """Raise ConfigError unless the text is a number between the bounds."""
    try:
        number: float = int(text) if kind is int else float(text)
    except ValueError:
        noun = "whole number" if kind is int else "number"
        raise ConfigError(where, f"not a {noun}", f"give a {noun}") from None
    if bounds is None:
        return
    least, most = bounds[0], MOST[kind] if bounds[1] is None else bounds[1]
    if not math.isfinite(number):
        raise ConfigError(where, "not a finite number", "give one that is")
    if least is not None and number < least:
        what = f"it must be greater than or equal to {least:g}"
        raise ConfigError(where, what, f"use {least:g} or more")
    if number > most:
        shown = f"{most:,}" if kind is int else f"{most:g}"
        raise ConfigError(where, f"more than {shown}, the most that it can be", f"use {shown} or less")


def raise_wrong(parameter: Any, value: str) -> None:
    """Raise ConfigError for what is wrong with one value of a parameter, if it is of a known kind."""
    where = shortened(f"{label(parameter)} {value}", _SHOWN)
    choices = _choices(parameter)
    if choices and value not in choices:
        raise ConfigError(where, "it is none of its values", suggest(value, choices))
    if _kind(parameter) is not Path:
        return
    info = parameter.type_descriptor.parameter_info
    noun = "file" if not info.dir_okay else "folder" if not info.file_okay else "file or folder"
    try:
        exists, is_folder = Path(value).exists(), Path(value).is_dir()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise ConfigError(where, str(error), f"name a {noun}") from None
    if not exists:
        raise ConfigError(where, f"the {noun} does not exist", f"check the path{own_copy(value)}")
    if noun == ("file" if is_folder else "folder"):
        raise ConfigError(where, f"it is a {'folder' if is_folder else 'file'}", f"name a {noun}")


@contextmanager
def in_our_words(command: Any, path: str) -> Iterator[None]:
    """Inside the block, what click says of a command line is said as a ConfigError."""
    try:
        yield
    except UsageError as error:
        kind, flag = type(error).__name__, getattr(error, "option_name", "")
        known = [name for each in command.params for name in (*each.opts, *each.secondary_opts)]
        flags = [name for name in known if name.startswith("-")]
        if kind == "NoArgsIsHelpError":
            raise
        if kind == "NoSuchOption":
            fix = suggest(flag, flags, otherwise=f"see {path} --help")
            raise ConfigError(flag, f"{path} has no such option", fix) from None
        if kind == "BadOptionUsage":
            parameter = next((each for each in command.params if flag in each.opts), None)
            if "does not take" in str(error):
                raise ConfigError(flag, "it takes no value", f"write {flag} alone") from None
            value = getattr(parameter, "metavar", None) or "|".join(_choices(parameter)) or "VALUE"
            raise ConfigError(flag, "it needs a value", f"write {flag} {value}") from None
        extra = re.search(r"unexpected extra arguments?\(?s?\)? \((.*)\)", _plain(error))
        if extra is not None:
            assigned = "--set" in flags and re.match(r"[\w.]+=", extra[1])
            fix = "write --set in front of each" if assigned else f"leave it out, or see {path} --help"
            raise ConfigError(shortened(extra[1], _SHOWN), f"{path} takes no such word", fix) from None
        where = getattr(error, "param_hint", None) or path
        raise ConfigError(str(where), _plain(error), f"see {path} --help") from None


def _missing(parameter: Any) -> ConfigError:
    value = parameter.metavar or "|".join(_choices(parameter))
    give = label(parameter) if parameter.param_type_name == "argument" else f"{label(parameter)} {value}"
    about = f" ({parameter.help.rstrip('.')})" if parameter.param_type_name == "argument" else ""
    return ConfigError(label(parameter), "it is needed", f"give {give}{about}")


def _plain(error: Exception) -> str:
    return str(getattr(error, "message", error)).removeprefix("Value error, ").rstrip(".")


def _kind(parameter: Any) -> type:
    """What Python makes of a value: int, float, Path, str or bool."""
    found = parameter.type_descriptor.annotation
    found = next(iter(getattr(found, "__args__", ())), found)
    return found if isinstance(found, type) else str


def _choices(parameter: Any) -> Sequence[str]:
    return [str(each) for each in getattr(parameter.type_descriptor, "choices", None) or ()]
