"""``dsx upcycle``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from dsx.cli.options import FORMAT
from dsx.cli.output import one_a_line, say, say_json
from dsx.cli.reshard import report_text
from dsx.errors import ConfigError

_FAMILIES = {"llama": "mixtral", "mistral": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}


def upcycle(
    dense: Annotated[
        Path, typer.Argument(metavar="DENSE", help="A dense Hugging Face folder.", show_default=False)
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="Folder to make; must not exist.", show_default=False)
    ],
    experts: Annotated[int, typer.Option("--experts", min=1, help="Experts of a layer.")] = 8,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Experts that a token is sent to.")] = 2,
    granularity: Annotated[
        int, typer.Option(min=1, help="Into how many experts a copy of the feed-forward is divided.")
    ] = 1,
    family: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL_TYPE",
            help="Family of the mixture. Default: "
            + ", ".join(f"{moe} of {name}" for name, moe in _FAMILIES.items())
            + ".",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the routers' weights.")] = 0,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Make a mixture of experts, at first equal, of a dense model.

    Every expert is a copy of the feed-forward, or a part of one; routers are drawn at random. Before anything
    is written, a small model of the same structure has to give the dense one's logits.
    """
    from dsx.checkpoint.execute import ConversionOptions
    from dsx.checkpoint.formats.huggingface.names import read_config
    from dsx.checkpoint.upcycle import prepare
    from dsx.hub.upcycle import Upcycling
    from dsx.waiting import Waiting

    kind = str(read_config(dense).get("model_type"))
    moe = family or _FAMILIES.get(kind)
    if moe is None:
        raise ConfigError(f"DENSE {dense}", f"of {kind} no mixture is known", "name one with --family")
    wanted = Upcycling(family=moe, experts=experts, top_k=top_k, granularity=granularity, seed=seed)
    with Waiting(f"trying {kind} as {moe}, small, and planning"):
        conversion = prepare(dense, target, wanted)
    with Waiting("copying", total=conversion.plan.write_bytes, unit="bytes") as waiting:
        report = conversion.run(ConversionOptions(progress=waiting.advance))
    if style == "json":
        say_json({**asdict(report), "target": str(report.target), "family": moe})
        return
    proof = f"proved     a small {moe} of the same structure has the logits of {kind}"
    say(one_a_line([proof, *report_text(report).splitlines()]))
