"""The options that several ``dsx`` commands share, each defined here once, and mistakes in a command line.

Former names are here, too: they are hidden, and every command that has the new option understands them.
Mistakes are told as every other refusal, where, what, fix, and numbers are held within bounds: click and
pydantic have words of their own, which name Python's types and leave the value out.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from dsx.config.document import own_copy
from dsx.config.wording import suggest
from dsx.errors import ConfigError
from dsx.terminal import shortened

if TYPE_CHECKING:
    from dsx.memory.layer_list import LayerList


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


CHECKPOINT_FORMATS = ("dsx", "deepspeed", "universal", "hf", "dcp", "peft")
"""What ``--format`` named before ``--to`` did."""


MOST_RANKS = 1 << 20
"""The most ranks that a command lays out: no cluster has so many."""


def _memory(gib: float | None) -> float | None:
    if gib is not None and not 0 < gib < 1e6:
        raise ConfigError(f"--gpu-memory {gib:g}", "it is the GiB of one GPU", "use 79 for an A100-80GB")
    return gib


def count(flag: str, help_text: str, most: int | None = None) -> Any:
    """An option that takes a number of things, 1 or more."""
    return typer.Option(flag, metavar="N", help=help_text, min=1, max=most)


CONFIG = typer.Argument(
    metavar="CONFIG",
    help="DeepSpeed JSON, with or without a dsx block.",
    exists=True,
    dir_okay=False,
    show_default=False,
)
STDIN = Path("-")
CONFIGS = typer.Argument(
    metavar="CONFIG",
    help="DeepSpeed JSON, with or without a dsx block; - for standard input.",
    show_default=False,
)
GPUS = count("--gpus", "Number of ranks, one GPU (or CPU process) each.", most=MOST_RANKS)
MODEL = typer.Option(
    "--model",
    metavar="MODEL",
    help="A preset (llama-3-8b, gpt2/tiny), a Hugging Face config.json or model folder, "
    "for a CONFIG without dsx.model.",
)
TENSOR = count("--tensor", "Tensor-parallel degree.", most=MOST_RANKS)
PIPELINE = count("--pipeline", "Pipeline degree.", most=MOST_RANKS)
CONTEXT = count("--context", "Ranks that share each sequence.", most=MOST_RANKS)
EXPERT = count("--expert", "Ranks that hold the experts of a layer together.", most=MOST_RANKS)
IMBALANCE = typer.Option(
    "--imbalance",
    help="Rows that come to the rank with the busiest experts, over the mean of those that share them: 1 if "
    "all are equally busy, at most the expert degree.",
    min=1.0,
)


def how_busy(imbalance: float) -> str:
    """What an estimate or a plan with shared experts supposes of their load."""
    if imbalance == 1:
        return "experts are taken to be equally busy; --imbalance says otherwise"
    return f"{imbalance:g} times the mean of rows are taken to come to the rank with the busiest experts"


CHUNKS = count("--chunks", "Virtual stages per pipeline rank.")
ZERO = typer.Option("--zero", metavar="STAGE", help="ZeRO stage, 0 to 3.", min=0, max=3)
MICRO_BATCH = count("--micro-batch", "Sequences per micro-batch and data-parallel rank.")
GPU_MEMORY = typer.Option(
    "--gpu-memory",
    metavar="GIB",
    help="All the memory of a GPU, of which 2 GiB and 4 % are left to the device's context and libraries. "
    "Default: the cluster's, where one is named.",
    callback=_memory,
)
CLUSTER = typer.Option(
    "--cluster",
    metavar="NAME",
    help="A100-80, H100, H200, B200, GB200, L40S, RTX-4090, RTX-3090, MI300X, CPU, or a JSON file of one.",
)
RULES = typer.Option(
    "--rules",
    metavar="FILE",
    help="How tensor parallelism cut the tensors of a stock DeepSpeed checkpoint, where it does not say so "
    "itself.",
    exists=True,
    dir_okay=False,
)
SET = typer.Option(
    "--set",
    metavar="KEY=VALUE",
    help="Put a value over a key of the config, as dsx.train.steps=5; repeatable.",
)
OUTPUT = typer.Option(
    "--output",
    metavar="FILE",
    help="File to write, in the format that its name ends in: .txt, .json, ... Default: standard output.",
)
FORMAT = typer.Option("--format", help="Text for people, or everything as JSON.")


def drawn(help_text: str) -> Any:
    """The ``--format`` of a command that can also draw: without it, ``--output`` says it by its ending."""
    return typer.Option("--format", help=help_text, show_default="table, or what --output ends in")


# Former flag -> what it stands for: an option, an option with its value, or "" for a positional argument.
_FORMER = {
    "--world-size": "--gpus",
    "--ranks": "--gpus",
    "--json": "--format=json",
    "--out": "--output",
    "--config": "",
}


# Options that need no value -> the value that they have then, and the others that they take.
_BARE = dict.fromkeys(("--fix", "--diff"), ("safe", "unsafe"))


class Command(TyperCommand):
    """A command that also understands its options' former names, and options without a value.

    Its refusals are in dsx's words, and its numbers have bounds.
    """

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        for parameter in self.params:
            hold_to_words(parameter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {flag for parameter in self.params for flag in parameter.opts}
        with in_our_words(self, ctx.command_path):
            return super().parse_args(ctx, spelt_out(modern(args, known), known))

    def invoke(self, ctx: Any) -> Any:
        overrides = ctx.params.get("overrides")
        told: AbstractContextManager[None] = nullcontext()
        if overrides:
            from dsx.config.load import told_of_set  # here: other commands read no config

            told = told_of_set(overrides)
        with in_our_words(self, ctx.command_path), told:
            return super().invoke(ctx)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - click's signature
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in (self.epilog or "").splitlines()))


class CommandGroup(TyperGroup):
    """All commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with in_our_words(self, ctx.command_path):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names. Raises ConfigError if there is none."""
        name = args[0]
        if not (name in self.commands or name.startswith("-") or ctx.resilient_parsing):
            fix = suggest(name, self.commands, otherwise="see dsx --help")
            raise ConfigError(name, "there is no such command", fix)
        return super().resolve_command(ctx, args)


def spelt_out(words: list[str], known: set[str]) -> list[str]:
    """The command line in which every option that can stand alone has its value, behind an ``=``.

    The word behind such an option is never its value: ``--fix config.json`` names a config.

    ``words`` stand after the command's name; ``known`` are the flags of its options.

    Raises:
        ConfigError: A value stands behind the option without ``=``, and is no file.

    >>> spelt_out(["--fix", "a.json", "--fix=unsafe", "--", "--fix"], {"--fix"})
    ['--fix=safe', 'a.json', '--fix=unsafe', '--', '--fix']
    """
    end = words.index("--") if "--" in words else len(words)
    bare = {flag: values for flag, values in _BARE.items() if flag in known}
    for flag, word in itertools.pairwise(words[:end]):
        if word in bare.get(flag, ()) and not Path(word).exists():
            raise ConfigError(f"{flag} {word}", "the value stands behind an =", f"write {flag}={word}")
    return [f"{word}={bare[word][0]}" if word in bare else word for word in words[:end]] + words[end:]


def modern(words: list[str], known: set[str]) -> list[str]:
    """The command line with today's names.

    ``words`` stand after the command's name; ``known`` are its options' flags and its arguments' names.

    >>> modern(["a.json", "--world-size=8", "--json"], {"--gpus", "--format", "config"})
    ['a.json', '--gpus=8', '--format=json']
    >>> modern(["--config", "a.json"], {"config"})
    ['a.json']
    >>> modern(["--format", "hf", "--format", "json"], {"--format", "--to"})
    ['--to', 'hf', '--format', 'json']
    """
    out: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*out, word, *rest]
        flag, separator, value = word.partition("=")
        if "--to" in known and flag == "--format":
            value = value if separator else next(rest, "")
            name = "--to" if value in CHECKPOINT_FORMATS else flag
            out += [f"{name}={value}"] if separator else [name, *filter(None, [value])]
            continue
        now = None if flag in known else _FORMER.get(flag)
        if now is None or not _has(known, now):
            out.append(word)
        elif now:
            out.append(f"{now}{separator}{value}")
        elif separator:
            out.append(value)
    return out


def _has(known: set[str], now: str) -> bool:
    return now.partition("=")[0] in known if now else not known.isdisjoint({"config", "configs"})


LAYERS = typer.Option(
    "--layers",
    metavar="FILE.py:FUNCTION",
    help="Of a model of your own: a function that returns dsx.LayerList(layers=, inputs=, labels=, "
    "loss_fn=). CONFIG is then an ordinary DeepSpeed JSON.",
)


def own_layers(
    source: str, config: Path | None, refused: Mapping[str, object], items: Sequence[str] = ()
) -> tuple[str, Callable[[], LayerList], dict[str, Any]]:
    """What ``--layers`` names, and its config: the option, the function, DeepSpeed's keys.

    ``refused`` has options that are for dsx's own models alone, with what was given, None for nothing;
    ``items`` are changes of the config, as ``--set`` takes them.
    """
    from dsx.config.load import content_of
    from dsx.config.user_function import user_function

    for flag, value in refused.items():
        if value is not None:
            raise ConfigError(flag, "it does not go with --layers", "leave one of them out")
    if config is None:
        raise ConfigError("CONFIG", "--layers needs one", "give the DeepSpeed JSON of the run before it")
    with redirect_stdout(sys.stderr):  # what the user's file prints is no part of the command's JSON
        return source, user_function(source), content_of(config, list(items))
