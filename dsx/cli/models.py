"""``dsx models``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dsx.cli.options import FORMAT
from dsx.cli.output import BAD, judging, one_a_line, say, say_json
from dsx.errors import ModelError
from dsx.launch import entry
from dsx.models.config_values import with_floats
from dsx.terminal import aligned, columns

_TOLD_SHARE = 0.01


def models(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="A Hugging Face model folder or config.json; without it all families are listed.",
            show_default=False,
            exists=True,
        ),
    ] = None,
    *,
    probe: Annotated[
        bool, typer.Option("--probe", help="Of the list: try a small model of every family. Takes minutes.")
    ] = False,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """List transformers' families, or try one model without weights.

    A small model of the same structure is made, and what dsx cuts is compared with transformers. Exit code 1
    if the model of PATH is refused.
    """
    entry.quiet()  # a model is tried with torch and DeepSpeed
    if path is None:
        _list(probed=probe, style=style)
        return
    from dsx.checkpoint.formats.huggingface.names import read_config
    from dsx.hub.report import report
    from dsx.waiting import Waiting

    config = read_config(path)
    with judging(ModelError), Waiting(f"trying a small model of {path}"):
        found = report(with_floats(config))
    if style == "json":
        say_json(found)
    else:
        say(one_a_line(f"{label:<12}{text}" for label, text in _lines(found)))
    if found["probe"].get("differs"):
        raise typer.Exit(BAD)


def _list(*, probed: bool, style: str) -> None:
    from dsx.hub.report import family_rows
    from dsx.waiting import Waiting

    with Waiting("looking at the families of transformers"):
        rows = list(family_rows(probed=probed))
    if style == "json":
        say_json([asdict(row) for row in rows])
        return
    lines = [("family", "modules of", "tensor plan", "why not")]
    for row in rows:
        plan = "yes" if row.tensor_plan else "no" if row.refused else "derived"
        notes = row.refused or (f"no sequence parallelism: {row.no_sequence}" if row.no_sequence else "")
        lines.append((row.family, row.implementation or "refused", plan, notes))
    counts = Counter(row.implementation or "refused" for row in rows)
    told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    seen = "as small models of them show" if probed else "by their configs alone; --probe tries each"
    say(one_a_line([*aligned(lines, left=range(4), width=columns()), "", f"{told}: {seen}"]))


def _plan(derived: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if derived:
        yield "plan", "derived from what a small model computes; this keeps it, as dsx.parallel.tensor_plan:"
        yield from (("", line) for line in json.dumps(derived, indent=2).splitlines())


def _lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    own = "dsx's own, and transformers' if dsx.model.implementation says so; the rest is about the latter"
    yield "family", found["family"]
    yield "modules", own if found["implementation"] == "dsx" else "transformers'"
    yield "parameters", f"{found['parameters']:,}"
    tied = ", head tied to the word embedding" if found["tied_embeddings"] else ""
    yield "layers", f"{', '.join(found['layers'])}{tied}"
    yield "blocks", f"{found['blocks']}, of {found['kinds_of_blocks']} kinds"
    if found["heads"]:
        yield "heads", f"{found['heads']}, key/value heads {found['key_value_heads']}"
    yield "tensor", ", ".join(map(str, found["tensor"]))
    if found["not_cut"]:
        yield "", f"not 2: {found['not_cut']}"
    yield from _plan(found["derived_plan"])
    if experts := found["experts"]:
        of_a_layer, legal = (", ".join(map(str, experts[key])) for key in ("of_a_layer", "ranks"))
        yield "experts", f"{of_a_layer} of a layer; ranks that may hold them together: {legal}"
    refused = found["no_context"]
    if methods := [method for method, why in refused.items() if why is None]:
        several = ", ".join(methods[:-1])
        yield "context", f"ranks may share sequences by {' and '.join(filter(None, (several, methods[-1])))}"
        yield from (("", f"not {method}: {why}") for method, why in refused.items() if why)
        for path, each in found["mixing"].items():
            how = "hands its states on" if each["passes_states"] else "whole sequences on every rank"
            yield "", f"{path}: {how}, {each['parameters']:.1%} of the blocks' parameters"
    else:
        yield "context", f"refused: {refused['all_gather']}"
    why = found["no_selective"]
    yield "selective", f"refused: {why}" if why else "attention alone may be computed again"
    for each in found["whole"]:
        if max(each["parameters"], each["work"]) >= _TOLD_SHARE:
            share = (
                f"{each['parameters']:.1%} of the blocks' parameters, {each['work']:.1%} of their products"
            )
            yield "whole", f"{each['module']}: {share}"
    tried = found["probe"]
    if "not_tried" in tried:
        yield "probe", f"not tried: {tried['not_tried']}"
        return
    small = f"a model of {tried['blocks']} blocks, {tried['parameters']:,} parameters"
    if tried["differs"]:
        yield "probe", f"refused: of {small}, {tried['differs']}"
    else:
        yield "probe", f"{small}: loss and every gradient are those of transformers"
    yield "sequence", tried["no_sequence"] or "sequence parallelism is right"
    yield "documents", tried["no_documents"] or "documents of a pack are kept apart"
