"""``dsx check --fix``: make the edits of findings, keeping the file's comments, order and formatting."""

from __future__ import annotations

import copy
import difflib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path as File
from typing import Any

from dsx.config.document import Member, Node, find, from_text, parse, same
from dsx.config.refusals import ABSENT, Edit, Finding, step
from dsx.config.wording import HIDDEN, Path, dotted, within, without_secrets
from dsx.errors import ConfigError


def apply_to_text(text: str, edits: Iterable[Edit]) -> str:
    """``text`` with ``edits`` made one after the other."""
    for edit in edits:
        before = from_text(text).config
        expected = apply_to_config(before, edit)
        text = _apply(text, edit)
        if not same(from_text(text).config, expected):
            raise ConfigError(dotted(edit.path), "it could not be changed in the text alone", "do it by hand")
    return text


def apply_to_config(config: dict[str, Any], edit: Edit) -> dict[str, Any]:
    """A copy of ``config`` with ``edit`` made."""
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
    owner, found = find(root, edit.path)
    if edit.kind == "rename" and found is not None:
        return text[: found.key_start] + json.dumps(edit.value) + text[found.key_end :]
    if edit.kind == "remove" and found is not None:
        return _remove(text, owner, found)
    if found is not None:
        return text[: found.node.start] + _written(edit.value, found.node.value) + text[found.node.end :]
    return _add(text, root, edit)


def _remove(text: str, owner: Node, member: Member) -> str:
    index = owner.members.index(member)
    start, end = member.key_start, member.node.end
    comma = re.compile(r"[ \t]*,").match(text, end)
    if comma:
        end = comma.end()
    elif index:
        # The last key takes its predecessor's comma with it, and leaves the comments between them.
        before = owner.members[index - 1].node.end
        kept = re.sub(r"^[ \t]*,", "", text[before:start], count=1)
        kept = kept if "\n" in kept else kept.strip()
        text, start, end = (
            text[:before] + kept + text[start:],
            before + len(kept),
            end + len(kept) - (start - before),
        )
    # A key that has a line of its own takes the line with it.
    line_start = text.rfind("\n", 0, start) + 1
    rest = re.compile(r"[ \t]*(\r?\n)").match(text, end)
    if not text[line_start:start].strip() and rest:
        return text[:line_start] + text[rest.end() :]
    return text[:start].rstrip(" \t") + text[end:] if rest else text[:start] + text[end:].lstrip(" \t")


def _add(text: str, root: Node, edit: Edit) -> str:
    """Add a key behind the last one of its object, making the objects that are missing on the way."""
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


def has(config: Mapping[str, Any], path: Path) -> bool:
    """Whether ``path`` is written in ``config``."""
    found: Any = reduce(step, path, config)
    return found is not ABSENT


@dataclass(frozen=True, slots=True)
class Mended:
    """A text with the edits of findings made."""

    before: str
    after: str
    findings: tuple[Finding, ...]

    def diff(self, name: str) -> str:
        """A unified diff, without secrets; empty if nothing changed."""
        before, after = (
            _without_secrets(text).splitlines(keepends=True) for text in (self.before, self.after)
        )
        marked = difflib.unified_diff(before, after, fromfile=name, tofile=f"{name} (mended)")
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in marked)


def _without_secrets(text: str) -> str:
    """The text of a config, with secrets hidden where they stand."""
    spots = sorted(_secrets(parse(text).root, ""), key=lambda node: -node.start)
    for node in spots:
        text = text[: node.start] + json.dumps(HIDDEN) + text[node.end :]
    return text


def _secrets(node: Node, name: str) -> Iterator[Node]:
    if not node.members:
        if without_secrets(node.value, name) is not node.value:
            yield node
        return
    for member in node.members:
        yield from _secrets(member.node, name if member.key is None else within(name, member.key))


# Rounds of mending: what shows behind a mended key, and behind that.
_MOST_ROUNDS = 5


def settle(text: str, look: Callable[[str], Iterable[Finding]], *, unsafe: bool = False) -> Mended:
    """Mend ``text`` until ``look`` finds nothing more to mend in it; see :func:`mend`."""
    after = text
    done: list[Finding] = []
    for _ in range(_MOST_ROUNDS):
        mended = mend(after, look(after), unsafe=unsafe)
        if not mended.findings:
            break
        after, done = mended.after, [*done, *mended.findings]
    return Mended(text, after, tuple(done))


def mend(text: str, findings: Iterable[Finding], *, unsafe: bool = False) -> Mended:
    """``text`` with the edits of ``findings`` made, one finding after the other.

    A finding whose key an earlier one has moved or removed is left for the next time. ``unsafe``: make
    edits that change what a run does, too.
    """
    after, done = text, []
    first = from_text(text).config
    for finding in findings:
        now = from_text(after).config
        # A key that is to be added and has come since was added for another finding.
        came = any(
            edit.kind == "set" and has(now, edit.path) and not has(first, edit.path) for edit in finding.edits
        )
        if came or not finding.edits or not (finding.safe or unsafe):
            continue
        try:
            changed = apply_to_text(after, finding.edits)
        except (ConfigError, KeyError, IndexError, TypeError):
            continue
        if changed != after:
            after = changed
            done.append(finding)
    return Mended(text, after, tuple(done))


def write(path: File, text: str) -> File:
    """Put ``text`` into the file at once; what it held is kept as ``NAME.orig``, unless that exists.

    Returns:
        The path of the kept file.
    """
    kept = path.with_name(path.name + ".orig")
    try:
        if not kept.exists():
            shutil.copy2(path, kept)
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=path.name, delete=False) as new:
            new.write(text.encode())
        shutil.copymode(path, new.name)
        File(new.name).replace(path)
    except OSError as error:
        raise ConfigError(str(path), f"it cannot be written ({error})", "make the folder writable") from None
    return kept
