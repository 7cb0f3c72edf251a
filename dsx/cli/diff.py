"""``dsx diff``."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsx.cli.options import FORMAT
from dsx.cli.output import BAD, one_a_line, say, say_json
from dsx.terminal import columns, wrapped

if TYPE_CHECKING:
    from dsx.checkpoint.compare import TensorDifference


def diff(
    a: Annotated[
        Path,
        typer.Argument(metavar="A", help="A checkpoint, a folder of them, or a run's.", show_default=False),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another checkpoint.", show_default=False)],
    common: Annotated[
        bool, typer.Option("--common", help="Compare what both have, whatever else one has.")
    ] = False,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Compare two checkpoints tensor by tensor, in any layouts.

    Where their models fuse other parts, tensors are compared under Hugging Face's names. Exit code 1 if they
    differ. Facts that depend on the layout are not compared. JSON lists equal tensors,
    too.
    """
    from dsx.checkpoint.compare import compare, fact_differences, only_in
    from dsx.checkpoint.formats.huggingface.catalog import under_common_names
    from dsx.checkpoint.open import open_checkpoint
    from dsx.waiting import Waiting

    with Waiting(f"reading what {a} and {b} hold"):
        one, two = under_common_names(open_checkpoint(a), open_checkpoint(b))
    total = sum(entry.numel for entry in one.entries if entry.key in two.by_key)
    with Waiting("comparing", total=total, unit="elements") as waiting:
        found = list(compare(one, two, waiting.advance))
    absent = {} if common else {str(a): only_in(one, two), str(b): only_in(two, one)}
    facts = fact_differences(one, two)
    same = not facts and not any(absent.values()) and all(item.equal for item in found)
    if style == "json":
        content: dict[str, Any] = {
            "equal": same,
            "tensors": [asdict(item) | {"equal": item.equal} for item in found],
            "facts": {key: list(values) for key, values in facts.items()},
            "only_in": absent,
        }
        say_json(content)
    else:
        say(
            "\n".join(
                wrapped(one_a_line([line]), columns(), indent="  ") for line in _lines(found, absent, facts)
            )
        )
    if not same:
        raise typer.Exit(BAD)


def _lines(
    found: list[TensorDifference],
    absent: dict[str, tuple[tuple[str, str], ...]],
    facts: dict[str, tuple[Any, Any]],
) -> list[str]:
    from dsx.checkpoint.compare import BROKEN_ULPS

    lines = []
    for item in found:
        if item.what:
            lines.append(f"{item.name}, {item.state}: {item.what}")
        elif item.differing:
            far = "a NaN in one" if item.max_ulps == BROKEN_ULPS else f"at most {item.max_ulps:,} ulp"
            size = f"{item.differing:,} of {item.elements:,} elements differ"
            lines.append(f"{item.name}, {item.state}: {size}, {far}, {item.max_abs:.3g} absolute")
    for path, keys in absent.items():
        for state, count in Counter(state for _, state in keys).items():
            names = [name for name, held in keys if held == state]
            lines.append(f"only in {path}: {state} of {count} tensors ({', '.join(names[:3])}, ...)")
    for key, (one, two) in facts.items():
        lines.append(f"{key}: {_short(one)} and {_short(two)}")
    equal = sum(item.equal for item in found)
    lines.append(f"{equal:,} of {len(found):,} tensors' states are equal, bit for bit")
    return lines


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
