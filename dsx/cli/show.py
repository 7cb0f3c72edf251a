"""``dsx env``, ``dsx guide``, ``dsx presets`` and ``dsx schema``, which print what dsx knows."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dsx.cli.options import FORMAT, OUTPUT
from dsx.cli.output import deliver, say, say_json, style_of
from dsx.config.document import shipped
from dsx.config.wording import suggest
from dsx.errors import ConfigError
from dsx.launch.entry import quiet
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
    quiet()
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
