"""``dsx inspect`` and ``dsx diff``, which look at checkpoints."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsx.cli.options import FORMAT, RULES
from dsx.cli.output import BAD, judging, one_a_line, say, say_json
from dsx.errors import CheckpointError
from dsx.terminal import aligned, amount, columns, wrapped

if TYPE_CHECKING:
    from dsx.checkpoint.catalog import Catalog, Entry
    from dsx.checkpoint.read import TensorDifference


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A checkpoint's folder, the folder of checkpoints that has a file latest, or a run's.",
            show_default=False,
            exists=True,
        ),
    ],
    *,
    rules: Annotated[Path | None, RULES] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything and compare it with its checksums.")
    ] = False,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Say what a checkpoint holds: format, layout, tensors, bytes.

    Exit code 1 if something in it is damaged (only --verify reads all of its bytes), or if it is no
    checkpoint.
    """
    from dsx.checkpoint.catalog import check_files
    from dsx.checkpoint.open import open_checkpoint
    from dsx.checkpoint.read import verify as verified
    from dsx.waiting import Waiting

    with judging(CheckpointError):
        with Waiting(f"reading what {path} holds"):
            catalog = open_checkpoint(path, rules=rules)
            check_files(catalog)
        facts, damage = _facts(catalog), []
        if verify:
            total = sum(checksum.stop - checksum.start for checksum in catalog.checksums)
            with Waiting(f"verifying {path}", total=total, unit="bytes") as waiting:
                damage = [str(error) for error in verified(catalog, waiting.advance)]
    if style == "json":
        say_json(facts | ({"damage": damage} if verify else {}))
    else:
        say(_text(facts))
        if verify:
            count = len(catalog.checksums)
            say(f"verified   {count:,} checksums, {len(damage)} wrong" if count else "no checksums")
    for line in damage:
        say(f"dsx: {line}", err=True)
    if damage:
        raise typer.Exit(BAD)


def _facts(catalog: Catalog) -> dict[str, Any]:
    by_name: dict[str, list[Entry]] = defaultdict(list)
    for entry in catalog.entries:
        by_name[entry.name].append(entry)
    states: dict[str, dict[str, Any]] = {}
    for entry in catalog.entries:
        state = states.setdefault(entry.state, {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": []})
        state["tensors"] += 1
        state["elements"] += entry.numel
        state["bytes"] += entry.num_bytes
        state["dtypes"] = sorted({*state["dtypes"], entry.dtype})
    return {
        "path": str(catalog.root),
        "format": catalog.format,
        "bytes": catalog.num_bytes,
        "files": len(catalog.files),
        "checksums": len(catalog.checksums),
        "facts": dict(catalog.facts),
        "states": states,
        "tensors": [_tensor(name, entries) for name, entries in by_name.items()],
    }


def _tensor(name: str, entries: list[Entry]) -> dict[str, Any]:
    first = entries[0]
    return {
        "name": name,
        "shape": list(first.shape),
        "role": first.role,
        "aliases": list(first.aliases),
        "states": {
            entry.state: {
                "dtype": entry.dtype,
                "pieces": len(entry.pieces),
                "files": len({piece.file for piece in entry.pieces}),
            }
            for entry in entries
        },
    }


def _text(facts: dict[str, Any]) -> str:
    from dsx.checkpoint.base import told as base_told

    told = facts["facts"]
    size = f"{amount(facts['bytes'])} in {facts['files']} files, {facts['checksums']:,} checksums"
    lines = [f"checkpoint {facts['path']}: {facts['format']}, {size}"]
    mesh = told.get("mesh")
    if mesh is not None:
        degrees = " x ".join(f"{axis} {degree}" for axis, degree in mesh.items())
        rest = f"chunks {told.get('chunks', 1)}, ZeRO-{told.get('zero_stage', 0)}"
        lines.append(f"layout     {degrees}, {rest}, {told.get('precision', 'unknown precision')}")
    if "step" in told:
        lines.append(f"step       {told['step']}")
    if told.get("versions"):
        lines.append(f"written by {', '.join(f'{k} {v}' for k, v in told['versions'].items())}")
    if told.get("base"):
        lines.append(f"frozen     left out: {base_told(told['base'])}")
    others = sorted(told.keys() - {"mesh", "chunks", "zero_stage", "precision", "step", "versions", "base"})
    if others:
        lines.append(f"also has   {', '.join(others)}")
    width = columns()
    rows = [
        (
            f"{state:<10}",
            f"{held['tensors']} tensors",
            f"{held['elements']:,} elements",
            amount(held["bytes"]),
            ", ".join(held["dtypes"]),
        )
        for state, held in facts["states"].items()
    ]
    tensors = []
    for tensor in facts["tensors"]:
        alike: dict[str, list[str]] = defaultdict(list)
        for state, held in tensor["states"].items():
            spread = f" in {held['files']} files" if held["files"] > 1 else ""
            alike[f"{held['dtype']}{spread}"].append(state)
        states = ", ".join(
            how if len(held) == len(facts["states"]) else f"{how} {', '.join(held)}"
            for how, held in alike.items()
        )
        role = "" if tensor["role"] == "trained" else f"  ({tensor['role']})"
        tensors.append((tensor["name"], f"{tensor['shape']!s:<14}", states + role))
    lines = [wrapped(line, width, indent=" " * 11) for line in map(one_a_line, ([line] for line in lines))]
    tables = aligned(rows, (0, 4), width=width) if rows else []
    tables += ["", *(aligned(tensors, range(3), width=width) if tensors else [])]
    return "\n".join([*lines, one_a_line(tables)])


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
    from dsx.checkpoint.formats.huggingface.catalog import under_common_names
    from dsx.checkpoint.open import open_checkpoint
    from dsx.checkpoint.read import compare, fact_differences, only_in
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
    from dsx.checkpoint.read import BROKEN_ULPS

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
