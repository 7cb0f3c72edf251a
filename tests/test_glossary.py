"""docs/glossary.md has each term once, and what users meet by name: public classes, keys of the dsx block."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import dsx
from dsx.cli.app import build
from dsx.config.schema import DsxConfig

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith("| term |")
]


def named(pattern: str) -> set[str]:
    """The names in backticks in the last column that match as a whole."""
    found = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[2])]
    return {name for name in found if re.fullmatch(pattern, name)}


def test_each_term_has_one_row_that_says_what_it_is():
    terms = [row[0].lower() for row in ROWS]
    assert len(terms) > 80
    assert [term for term in terms if terms.count(term) > 1] == []
    assert [row for row in ROWS if len(row) != 3 or not row[1]] == []


def test_public_classes_are_there():
    modules = (dsx, dsx.recipe, importlib.import_module("dsx.nn"))
    public = {name for module in modules for name in module.__all__ if inspect.isclass(getattr(module, name))}
    assert len(public) > 30
    assert public - named(r"[A-Z]\w+") == set()


def test_blocks_of_the_config_are_there():
    known = named(r"dsx\.[\w.]+")
    assert {
        key
        for key in DsxConfig.model_fields
        if not any(f"{name}.".startswith(f"dsx.{key}.") for name in known)
    } == set()


def test_what_is_named_exists():
    """Classes, keys, functions, commands and options."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "dsx").rglob("*.py")]
    classes = {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    assert named(r"[A-Z]\w+") - classes == set()
    keys = keys_of(DsxConfig.model_json_schema())
    public = {f"dsx.{name}" for name in dsx.__all__}
    assert named(r"dsx\.[\w.]+") - keys - public == set()
    commands = {command.callback.__name__ for command in build().registered_commands}
    assert {name.split()[1] for name in named(r"dsx \w+.*")} <= commands


def keys_of(schema: dict) -> set[str]:
    """Dotted keys of the block, with their parents."""
    found = set()

    def walk(node: dict, at: str) -> None:
        for reference in re.findall(
            r'"#/\$defs/(\w+)"', json.dumps({k: v for k, v in node.items() if k != "properties"})
        ):
            walk(schema["$defs"][reference], at)
        for name, inner in node.get("properties", {}).items():
            found.add(f"{at}.{name}")
            walk(inner, f"{at}.{name}")

    walk({key: value for key, value in schema.items() if key != "$defs"}, "dsx")
    return found
