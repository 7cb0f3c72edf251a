"""``dsx init``, ``dsx train`` and ``dsx islands keys``: what begins a run."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from importlib.resources import as_file
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dsx import __version__
from dsx.checkpoint.store import write_atomically
from dsx.cli.options import CONFIG, FORMAT, GPUS, MODEL, MOST_RANKS, SET, count
from dsx.cli.output import one_a_line, say, say_json
from dsx.config.document import shipped
from dsx.config.wording import dotted, parted_from_secrets
from dsx.errors import CheckpointError, ConfigError
from dsx.terminal import with_room

if TYPE_CHECKING:
    from dsx.config.ordinary import Starter


_CONFIG, _RECIPE, _GENERATE = "train.json", "train.py", "generate.py"


def init(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Where to write; made if it is not there.", show_default=False),
    ],
    *,
    model: Annotated[str | None, MODEL] = None,
    gpus: Annotated[int, GPUS] = 1,
    ds_config: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="CONFIG",
            help="A DeepSpeed JSON, of transformers' Trainer too, whose keys to keep.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    overrides: Annotated[list[str] | None, SET] = None,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Write a config, a recipe and how to run them into a folder.

    A model folder with weights is fine-tuned; a preset, or a folder without weights, is trained from the
    beginning; without --model it is a tiny preset. The layout is one that --gpus ranks can have. Existing
    files are never overwritten.
    """
    from dsx.config.ordinary import starter

    begun = starter(model=model, gpus=gpus, ds_config=ds_config, overrides=overrides or [])
    content, left_out = parted_from_secrets(begun.content)
    files = {
        _CONFIG: json.dumps(content, indent=2) + "\n",
        _RECIPE: shipped(f"recipes/{begun.recipe}").read_text(encoding="utf-8"),
        _GENERATE: shipped("recipes/generate.py").read_text(encoding="utf-8"),
        "constraints.txt": shipped("constraints.txt").read_text(encoding="utf-8"),
    }
    files["README.md"] = _readme(begun, folder, gpus)
    write_new(folder, files)
    if style == "json":
        facts = {
            "folder": str(folder),
            "files": list(files),
            "run": _run_line(gpus),
            "assumed": {each.key: each.value for each in begun.assumed},
            "resolved": begun.run.summary(),
            "secrets_left_out": [dotted(path) for path in left_out],
        }
        say_json(facts)
        return
    lines = [f"wrote {', '.join(files)} to {folder}"]
    lines += [f"assumed    {each}" for each in begun.assumed]
    lines += [f"note       {note}" for note in begun.run.notes]
    told = "a secret, and not copied: give it in the environment, or with --set"
    lines += [f"note       {dotted(path)}: {told}" for path in left_out]
    say("\n".join([*lines, f"next       cd {folder} && {_run_line(gpus)}"]))


def write_new(folder: Path, files: Mapping[str, str]) -> None:
    """Write files that are not there yet: all of them, or none.

    A new folder appears whole; into an existing one the files come one by one, each whole.

    Raises:
        ConfigError: One of them is there, or they cannot be written.
    """
    there = [name for name in files if os.path.lexists(folder / name)]
    if there:
        what = f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} there already"
        raise ConfigError(f"FOLDER {folder}", what, "name another folder; nothing is written over")
    try:
        if os.path.lexists(folder):
            _add(folder, files)
        else:
            _make(folder.absolute(), files)
    except (CheckpointError, OSError) as error:
        what = error.what if isinstance(error, CheckpointError) else error.strerror or str(error)
        fix = with_room(error, "name a folder that can be written to")
        raise ConfigError(f"FOLDER {folder}", what, fix) from error


def _make(folder: Path, files: Mapping[str, str]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.partial"
    aside.mkdir()
    try:
        _add(aside, files)
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _add(folder: Path, files: Mapping[str, str]) -> None:
    written: list[Path] = []
    try:
        for name, text in files.items():
            write_atomically(folder / name, text.encode("utf-8"))
            written.append(folder / name)
    except BaseException:
        for path in written:
            with suppress(OSError):
                path.unlink()
        raise


def _run_line(gpus: int) -> str:
    return f"deepspeed --num_accelerators {gpus} {_RECIPE} {_CONFIG}"


def _exported(begun: Starter) -> str:
    if not begun.run.dsx.train.export_hf:
        return ""
    last = f"{begun.run.output}/hf/step{begun.run.dsx.train.steps}"
    return f"At its end the model lies in `{last}`, for `AutoModelForCausalLM.from_pretrained`.\n\n"


def _readme(begun: Starter, folder: Path, gpus: int) -> str:
    run = begun.run
    kind = "fresh weights" if run.weights is None else f"the weights of {run.weights}"
    degrees = run.mesh.words
    step = f"{run.global_batch_size} sequences of {run.sequence_length} tokens"
    source = begun.content["dsx"]["data"].get("source", "dsx.data.sources")
    assumed = "".join(f"- `{each.key}` = `{json.dumps(each.value)}`: {each.why}\n" for each in begun.assumed)
    return f"""# {folder.absolute().name}

Written by dsx {__version__}: {run.model.family} from {kind}, {degrees}, {step} a step, text from `{source}`.

```bash
{_run_line(gpus)}
```

trains by `{_CONFIG}`; again, it goes on where it stopped. Your own text, and any other key:

```bash
{_run_line(gpus)} --set dsx.data.source=my.jsonl --set dsx.train.output=runs/mine
dsx check {_CONFIG} --gpus {gpus}
dsx estimate {_CONFIG} --gpus {gpus}
python {_GENERATE} --checkpoint {run.output} --prompt "Once" --tokens {min(100, run.sequence_length // 2)}
```

{
        _exported(begun)
    }`constraints.txt` has the versions that this dsx is tested with; `dsx guide` lists the guides.
{
        f'''
Nobody wrote these, and they were chosen:

{assumed}'''
        if assumed
        else ""
    }"""


def train(
    config: Annotated[Path, CONFIG],
    *,
    gpus: Annotated[
        int | None,
        count(
            "--gpus", "Number of ranks. Default: one for each GPU, or one where there is none.", MOST_RANKS
        ),
    ] = None,
    overrides: Annotated[list[str] | None, SET] = None,
) -> None:
    """Train by a config on this machine, under DeepSpeed's launcher.

    It starts the recipe that comes with dsx: finetune.py where the model has weights to begin with, gpt_3d.py
    otherwise. The exit code is the run's. For several machines, recipes of your own and options of the
    launcher: deepspeed or torchrun (dsx guide launching).
    """
    from dsx.config.load import content_of
    from dsx.config.ordinary import recipe_of
    from dsx.launch.start import start

    items = overrides or []
    recipe = shipped(f"recipes/{recipe_of(content_of(config, items))}")
    words = [str(config), *(word for item in items for word in ("--set", item))]
    with as_file(recipe) as program:  # a file of a package may lie in an archive
        code = start(program, words, gpus=gpus)
    raise typer.Exit(code)


def islands(
    action: Annotated[  # noqa: ARG001 - the parser has judged it
        Literal["keys"], typer.Argument(metavar="keys", help="What to do: keys.", show_default=False)
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the keys are to lie.")],
    number: Annotated[int, count("--islands", "How many islands there are (dsx.outer.islands).")] = 2,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Make the keys by which islands know each other.

    FOLDER gets ca.pem and a secret file for each island. The site of island 1 needs ca.pem and island1.pem,
    in the folder that its config names as dsx.outer.keys. The key that has signed them is kept nowhere:
    further islands need keys that are all made anew.
    """
    from dsx.islands.links import write_keys

    authority, *own = write_keys(folder, number)
    if style == "json":
        say_json([[str(authority), str(file)] for file in own])
    else:
        lines = (f"island {island} needs {authority} and {file}" for island, file in enumerate(own))
        say(one_a_line(lines))
