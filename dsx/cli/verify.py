"""``dsx verify``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsx.cli.options import CONFIG, FORMAT, GPUS, SET
from dsx.cli.output import BAD, say, say_json
from dsx.errors import ConfigError
from dsx.launch import entry
from dsx.terminal import columns, seconds

if TYPE_CHECKING:
    from dsx.verify.run import Verdict


def verify(
    config: Annotated[Path, CONFIG],
    *,
    gpus: Annotated[int, GPUS],
    steps: Annotated[int, typer.Option(help="Training steps to compare.", min=1)] = 3,
    full: Annotated[
        bool, typer.Option("--full", help="The model at its own size: takes its memory in one process, too.")
    ] = False,
    precision: Annotated[
        Literal["fp32", "config"],
        typer.Option(help="fp32, or the config's, with a tolerance for bf16's rounding."),
    ] = "fp32",
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest difference of a gradient, relative to its largest element.", min=0.0),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL|MODULE:FUNCTION",
            help="As of dsx estimate, for a CONFIG without dsx.model. Or a pipeline model of your own, under "
            "dsx: the function returns a dict of PipelineModule's arguments and batch(step, index, size).",
        ),
    ] = None,
    stock: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="The same, under stock DeepSpeed's pipeline engine."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds until every rank must have ended.", min=1.0)
    ] = 600.0,
    overrides: Annotated[list[str] | None, SET] = None,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Train a layout a few steps beside one process, and compare.

    It compares losses, the gradient norm before clipping, every gradient and every update, and names the
    first tensor that differs and the likely mistake. Without --full the model is first made small, keeping
    its structure. It starts its own ranks; under deepspeed or torchrun it uses theirs.

    Exit codes: 0 all is as in one process, 1 something differs, 2 it could not be compared.
    """
    if model is not None and stock is not None:
        what = f"it stands beside --model {model}"
        raise ConfigError(f"--stock {stock}", what, "give one of --model and --stock")
    source, own = _source(config, model, overrides or [])
    entry.quiet()
    from dsx.verify.run import Request
    from dsx.verify.run import verify as run

    request = Request(
        source=source,
        world_size=gpus,
        overrides=[] if isinstance(source, Mapping) else overrides or [],
        steps=steps,
        full=full,
        keep_precision=precision == "config",
        tolerance=tolerance,
        entry=own or stock,
        stock=stock is not None,
        timeout_seconds=timeout,
    )
    found: list[Verdict | None] = []
    if entry.world_size() > 1:
        entry.run(lambda: found.append(run(request)))  # one message of many ranks, and no rank left waiting
    else:
        found.append(run(request))
    verdict = found[0]
    if verdict is None:
        return
    if style == "json":
        say_json(asdict(verdict) | {"equal": verdict.equal})
    else:
        say("\n".join(_lines(verdict)))
    if not verdict.equal:
        raise typer.Exit(BAD)


def _source(
    config: Path, model: str | None, overrides: list[str]
) -> tuple[Path | Mapping[str, Any], str | None]:
    """The config with the model that ``--model`` names, and the function if it names the user's own."""
    if model is None or (":" in model and not Path(model).exists()):
        return config, model
    from dsx.config.load import read
    from dsx.config.ordinary import complete
    from dsx.models.presets import presets

    own = model.isidentifier() and model not in {preset.name for preset in presets()}
    if (own and not Path(model).exists()) or model.endswith(".py"):
        raise ConfigError(
            f"--model {model}",
            "there is no such preset, file or folder, and as a model of your own it names no function",
            "write my_module:make_model or path/to/file.py:make_model",
        )
    return complete(read(config), model, overrides=overrides, where=str(config)).content, None


def _lines(verdict: Verdict) -> list[str]:
    from dsx.verify.diagnosis import findings_text, labelled, parity_table

    lines = labelled("layout", verdict.layout)
    lines += labelled("reference", f"{verdict.reference}; updates: {verdict.optimizer}")
    for number, change in enumerate(verdict.changes):
        lines += labelled("" if number else "changed", change)
    lines += ["", *parity_table(verdict.rows, width=columns()), ""]
    if verdict.equal:
        masks = f"; {verdict.masks} dropout masks are where they should be" if verdict.masks else ""
        lines += labelled("equal", f"losses, norms, gradients and updates are those of one process{masks}")
    lines += findings_text(verdict.findings)
    took = f"ranks {seconds(verdict.ranks_seconds)}, reference {seconds(verdict.reference_seconds)}"
    return [*lines, *labelled("took", took)]
