"""``dsx env``, ``guide``, ``presets``, ``schema`` and ``models``, which print what dsx knows."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dsx.cli.options import FORMAT, OUTPUT
from dsx.cli.output import BAD, deliver, judging, one_a_line, say, say_json, style_of
from dsx.config.document import shipped
from dsx.config.wording import suggest
from dsx.errors import ConfigError, ModelError
from dsx.launch import entry
from dsx.models.config_values import with_floats
from dsx.models.hf_config import model_spec
from dsx.models.params import num_parameters
from dsx.terminal import aligned, columns


def env(
    hostfile: Annotated[
        Path | None,
        typer.Option("--hostfile", metavar="FILE", help="A DeepSpeed hostfile whose machines to ask."),
    ] = None,
    style: Annotated[Literal["table", "json"] | None, FORMAT] = None,
    output: Annotated[Path | None, OUTPUT] = None,
) -> None:
    """Print what a bug report needs to say about this machine.

    That is versions, devices, links, locks of extension builds, limits, ports and variables. Exit code 1 if a
    machine of the hostfile does not answer.
    """
    from dsx.launch.environment import ANSWERS, sections

    kind = style_of(style, output, ("table", "json"))
    entry.quiet()
    found = sections(hostfile)
    lines = []
    for title, rows in found.items():
        width = max((len(label) for label, _ in rows), default=0)
        lines += [title, *(f"  {label:<{width}}  {value}" for label, value in rows)]
    text = json.dumps(found, indent=2) if kind == "json" else "\n".join(lines)
    deliver(f"{text}\n", output)
    raise typer.Exit(any(not value.endswith(ANSWERS) for _, value in found.get("hosts", ())))


def guide(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A guide; without it they are listed.")
    ] = None,
    *,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Print a guide, or list the guides."""
    pages = [page for page in shipped("docs/guides").iterdir() if page.name.endswith(".md")]
    texts = {
        page.name.removesuffix(".md"): page.read_text(encoding="utf-8")
        for page in sorted(pages, key=lambda page: page.name)
    }
    if name is None:
        titles = {each: text.splitlines()[0].lstrip("# ") for each, text in texts.items()}
        width = max(map(len, titles), default=0)
        lines = [f"{each:<{width}}  {title}" for each, title in titles.items()]
        say(json.dumps(titles, indent=2) if style == "json" else "\n".join(lines))
        return
    if name.removesuffix(".md") not in texts:
        what = f"there is no such guide; there are {', '.join(texts)}"
        raise ConfigError(f"NAME {name}", what, suggest(name, texts, otherwise="name one of them"))
    text = texts[name.removesuffix(".md")]
    if style == "json":
        say_json({"name": name, "text": text})
    else:
        say(text, end="")
        if ("recipes/" in text or "configs/" in text) and not Path("recipes").is_dir():
            places = [str(shipped(folder)) for folder in ("recipes", "configs")]
            say(f"To paste its commands in this folder: cp -r {shlex.join(places)} .", err=True)


def presets(style: Annotated[Literal["table", "json"], FORMAT] = "table") -> None:
    """List the models that dsx.model.preset can name.

    As JSON, each has its Hugging Face config.
    """
    from dsx.models.presets import presets as known

    rows: list[dict[str, Any]] = []
    for preset in known():
        config = preset.config
        # GPT-2 has names of its own; without key/value heads there are as many as heads.
        layers = config.get("num_hidden_layers", config.get("n_layer"))
        hidden = config.get("hidden_size", config.get("n_embd"))
        heads = config.get("num_attention_heads", config.get("n_head"))
        rows.append(
            {
                "family": preset.family,
                "preset": preset.name,
                "parameters": preset.parameters or num_parameters(model_spec(config)),
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "kv_heads": config.get("num_key_value_heads") or heads,
                "about": preset.about,
                "config": config,
            }
        )
    if style == "json":
        say_json(rows)
        return
    titles = ("family", "preset", "parameters", "layers", "hidden", "heads", "kv_heads", "about")
    cells = ([str(row[title]) for title in titles] for row in rows)
    shown = [(family, name, f"{int(size):,}", *more) for family, name, size, *more in cells]
    say("\n".join(aligned([titles, *shown], left=(0, 1, 7), width=columns(), names=2)))


def schema(style: Annotated[Literal["table", "json"], FORMAT] = "json") -> None:
    """Print the JSON Schema of the dsx block.

    Every key is described, for editors and for people. As a table, each key has a line.
    """
    from dsx.config.schema import DsxConfig

    found = DsxConfig.model_json_schema()
    if style == "json":
        say_json(found)
        return
    say("\n".join(aligned(list(_keys(found, found, "dsx")), left=(0, 1), width=columns())))


def _keys(root: Mapping[str, Any], part: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Each key under ``part`` with its description, blocks before their keys."""
    for name, value in part.get("properties", {}).items():
        choices = [choice["$ref"] for choice in (value, *value.get("anyOf", ())) if "$ref" in choice]
        blocks = [root["$defs"][reference.rsplit("/", 1)[1]] for reference in choices]
        texts = (block.get("description", "") for block in (value, *blocks))
        yield f"{prefix}.{name}", " ".join(next(filter(None, texts), "").split())
        for block in blocks:
            yield from _keys(root, block, f"{prefix}.{name}")


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
