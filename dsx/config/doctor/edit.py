"""Change a config's text and keep its comments, order and formatting."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from typing import Any

from dsx.config.doctor.finding import Edit, Path, dotted
from dsx.config.doctor.positions import Member, Node, parse
from dsx.config.doctor.source import from_text, same
from dsx.errors import ConfigError


def apply_to_text(text: str, edits: Iterable[Edit]) -> str:
    """``text`` with ``edits`` made one after the other.

    Raises:
        ConfigError: An edit names a key that is not there, or would change more than it says.
    """
    for edit in edits:
        before = from_text(text).config
        expected = apply_to_config(before, edit)
        text = _apply(text, edit)
        if not same(from_text(text).config, expected):
            raise ConfigError(dotted(edit.path), "it could not be changed in the text alone", "do it by hand")
    return text


def apply_to_config(config: dict[str, Any], edit: Edit) -> dict[str, Any]:
    """A copy of ``config`` with ``edit`` made.

    Raises:
        ConfigError: The key is not there.
    """
    out = copy.deepcopy(config)
    node: Any = out
    for part in edit.path[:-1]:
        makes = edit.kind == "set" and isinstance(node, dict)
        node = node.setdefault(part, {}) if makes else node[part]
    last = edit.path[-1]
    if edit.kind == "set":
        node[last] = edit.value
    elif not (last in node if isinstance(node, dict) else isinstance(last, int) and last < len(node)):
        raise ConfigError(dotted(edit.path), "the key is not there", "check the file again")
    elif edit.kind == "remove":
        del node[last]
    elif edit.value in node:
        raise ConfigError(dotted((*edit.path[:-1], edit.value)), "it is there already", "keep one of the two")
    else:
        node[edit.value] = node.pop(last)
    return out


def _apply(text: str, edit: Edit) -> str:
    root = parse(text).root
    owner, found = _find(root, edit.path)
    if edit.kind == "rename" and found is not None:
        return text[: found.key_start] + json.dumps(edit.value) + text[found.key_end :]
    if edit.kind == "remove" and found is not None:
        return _remove(text, owner, found)
    if found is not None:
        return text[: found.node.start] + _written(edit.value, found.node.value) + text[found.node.end :]
    return _add(text, root, edit)


def _find(root: Node, path: Path) -> tuple[Node, Member | None]:
    """The object that holds ``path``, and the last member of that name."""
    owner, found = root, None
    for i, part in enumerate(path):
        owner = owner if found is None else found.node
        if owner.kind == "list":
            found = owner.members[part] if isinstance(part, int) and part < len(owner.members) else None
        else:
            found = next((m for m in reversed(owner.members) if m.key == part), None)
        if found is None and i + 1 < len(path):
            return owner, None
    return owner, found


def _remove(text: str, owner: Node, member: Member) -> str:
    index = owner.members.index(member)
    start, end = member.key_start, member.node.end
    comma = re.compile(r"[ \t]*,").match(text, end)
    if comma:
        end = comma.end()
    elif index:
        # The last one: its predecessor's comma goes too, and what is between them (comments) stays.
        before = owner.members[index - 1].node.end
        kept = re.sub(r"^[ \t]*,", "", text[before:start], count=1)
        kept = kept if "\n" in kept else kept.strip()
        text, start, end = (
            text[:before] + kept + text[start:],
            before + len(kept),
            end + len(kept) - (start - before),
        )
    # A line of its own goes as a whole.
    line_start = text.rfind("\n", 0, start) + 1
    rest = re.compile(r"[ \t]*(\r?\n)").match(text, end)
    if not text[line_start:start].strip() and rest:
        return text[:line_start] + text[rest.end() :]
    return text[:start].rstrip(" \t") + text[end:] if rest else text[:start] + text[end:].lstrip(" \t")


def _add(text: str, root: Node, edit: Edit) -> str:
    """Add a key behind the last one of its object; objects on the way are made."""
    node, depth = root, 0
    for part in edit.path[:-1]:
        inner = next((m for m in reversed(node.members) if m.key == part), None)
        if inner is None or inner.node.kind != "object":
            break
        node, depth = inner.node, depth + 1
    value = edit.value
    for part in reversed(edit.path[depth + 1 :]):
        value = {part: value}
    key = json.dumps(edit.path[depth])
    if not node.members:
        inside = text[node.start + 1 : node.end - 1]
        return text[: node.start + 1] + inside + f"{key}: {json.dumps(value)}" + text[node.end - 1 :]
    last = node.members[-1]
    end = last.node.end
    line = text.rfind("\n", 0, last.key_start) + 1
    indent = text[line : last.key_start]
    line_end = "\r\n" if "\r\n" in text else "\n"
    between = line_end + indent if not indent.strip() and "\n" in text[: last.key_start] else " "
    written = f"{key}: {json.dumps(value)}"
    comma = re.compile(r"[ \t]*,").match(text, end)
    # A comma behind an unquoted string would belong to the string.
    unquoted = isinstance(last.node.value, str) and text[last.node.start] not in "'\""
    head = text[: comma.end()] if comma else text[:end] + ("" if unquoted else ",")
    rest = text[comma.end() if comma else end :]
    # A comment stays on the line that it is about.
    remark = re.match(r"[ \t]*(#|//)[^\r\n]*", rest) if "\n" in between else None
    if remark:
        head, rest = head + remark[0], rest[remark.end() :]
    return head + between + written + ("," if comma else "") + rest


def _written(value: object, old: object) -> str:
    """``value`` as JSON; a number that was quoted keeps its notation."""
    try:
        if isinstance(old, str) and same(json.loads(old), value):
            return old
    except json.JSONDecodeError:
        pass
    return json.dumps(value)
