"""The options that several ``dsx`` commands share, each defined here once.

Former names are here, too: they are hidden, and every command that has the new option understands them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dsx.cli.refusals import hold_to_words, in_our_words
from dsx.config.wording import suggest
from dsx.errors import ConfigError

if TYPE_CHECKING:
    from dsx.memory.layer_list import LayerList

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

    Its refusals are in dsx's words, and its numbers have bounds (:mod:`dsx.cli.refusals`).
    """

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        for parameter in self.params:
            hold_to_words(parameter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line into ``ctx.params``, as click does."""
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
        """Parse what stands before a command's name, as click does."""
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
