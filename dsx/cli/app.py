"""Entry point of the ``dsx`` command. Its exit codes are those of :mod:`dsx.cli.output`."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Final

import typer

from dsx import __version__
from dsx.cli.begin import init, islands, train
from dsx.cli.check import check
from dsx.cli.data import data
from dsx.cli.estimate import estimate
from dsx.cli.inspect import diff, inspect
from dsx.cli.options import Command, CommandGroup
from dsx.cli.output import BAD_INPUT, say, tell, writing
from dsx.cli.plan import plan
from dsx.cli.plot import plot, trace
from dsx.cli.reshard import reshard, upcycle
from dsx.cli.schedule import schedule
from dsx.cli.show import env, guide, models, presets, schema
from dsx.cli.verify import verify
from dsx.errors import DsxError
from dsx.launch.entry import say_loading
from dsx.terminal import no_room, open_streams

# Command, in the order of the help -> lines that show its use, after `dsx init run` and in that folder.
COMMANDS: Final[Mapping[Callable[..., None], tuple[str, ...]]] = {
    init: ("dsx init run --model gpt2 --gpus 4", "dsx init run --from ds_config.json --model my_model/"),
    check: ("dsx check train.json --gpus 8", "dsx check ds_config.json --for trainer --diff"),
    data: ("dsx data show train.json --samples 2",),
    estimate: (
        "dsx estimate train.json --gpus 8 --gpu-memory 79",
        "dsx estimate --model llama-3-8b --gpus 8 --zero 3",
    ),
    plan: ("dsx plan --model llama-3-8b --global-batch 256 --gpus 64 --cluster H100",),
    train: ("dsx train train.json --gpus 2", "dsx train train.json --set dsx.train.steps=20"),
    schedule: (
        "dsx schedule 1f1b --stages 4 --micro-batches 8",
        "dsx schedule auto --profile profile.json --stages 4 --micro-batches 16",
    ),
    trace: ("dsx trace runs/my_run/traces/step10.json",),
    plot: ("dsx plot runs/my_run --output curves.svg",),
    reshard: (
        "dsx reshard runs/my_run/checkpoints/step100 model/ --to hf",
        "dsx reshard runs/my_run wider/ --to tp=4,pp=2",
    ),
    upcycle: ("dsx upcycle Qwen3-0.6B/ mixture/ --experts 8 --top-k 2",),
    inspect: ("dsx inspect runs/my_run --verify",),
    diff: ("dsx diff runs/one runs/other --common",),
    verify: ("dsx verify train.json --gpus 4 --set dsx.parallel.tensor=2",),
    islands: ("dsx islands keys keys --islands 3",),
    models: ("dsx models", "dsx models my_model/config.json"),
    presets: ("dsx presets",),
    schema: ("dsx schema --format table",),
    guide: ("dsx guide", "dsx guide tour"),
    env: ("dsx env --hostfile hostfile --output report.txt",),
}


def _version(show: bool) -> None:
    if show:
        say(f"dsx {__version__}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train in 3D (tensor x pipeline x ZeRO) with DeepSpeed, from one JSON file.

    Exit codes of every command: 0 all is fine, 1 what it looked at is bad, 2 bad input, 130 Ctrl-C.
    """


def build() -> typer.Typer:
    """The command-line application."""
    app = typer.Typer(
        name="dsx",
        cls=CommandGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_root)
    for command, examples in COMMANDS.items():
        app.command(cls=Command, epilog="\n".join(examples))(command)
    return app


def main() -> None:
    """Run the ``dsx`` command of this process's arguments."""
    open_streams()
    say_loading()
    # Python then ends without looking once more through all that torch and others have made: half a second.
    # Not where programs of others run: what they leave in cycles is finished in that last look.
    atexit.register(gc.freeze)
    try:
        with writing():  # --help, too
            build()(prog_name="dsx")
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    except Exception as error:
        told = error if isinstance(error, DsxError) else no_room(error).removeprefix("error: ")
        if not told:
            raise
        tell(told)
        sys.exit(BAD_INPUT)
