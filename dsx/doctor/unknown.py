"""Keys that DeepSpeed does not know: misspelled, in the wrong place, from another tool, or the user's own.

``names.toml`` has the names that other tools and habits give to DeepSpeed's keys.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from dsx.config.document import same
from dsx.config.keys import Key, Slot, judge
from dsx.config.refusals import (
    ABSENT,
    Context,
    Edit,
    Finding,
    Severity,
    asks_for_default,
    is_comment,
    is_dead_wrong,
    is_past,
)
from dsx.config.wording import Path, dotted, plain, suggest

# A word more similar than this is the word that was meant.
_CERTAIN = 0.84
# Words less similar than this have nothing to do with each other.
_NEAR = 0.7
# Two candidates whose similarity differs by less than this are equally likely.
_MARGIN = 0.02
_MAX_PLACES = 3


@cache
def _names() -> dict[str, Any]:
    return tomllib.loads((files("dsx.doctor") / "names.toml").read_text(encoding="utf-8"))


def optimizer_parts() -> list[str]:
    """Parts of optimizers' names that say where they run and not what they compute."""
    return list(_names()["optimizer_parts"])


@cache
def other_names(group: str) -> dict[str, str]:
    """The names of others -> ours, of "keys" or "schedules"."""
    return {word: name for name, words in _names()[group].items() for word in words}


def check_unknown(context: Context) -> Iterator[Finding]:
    """Find keys that no row describes."""
    for slot in context.slots:
        # Reported by the optimizer's check.
        is_clipping = slot.name == "optimizer.params.max_grad_norm"
        if slot.key is None and not is_clipping and not is_comment(slot):
            yield _unknown(context, slot)


def _unknown(context: Context, slot: Slot) -> Finding:
    word = str(slot.path[-1])
    siblings = context.table.siblings(slot.block)
    right = next((name for name in siblings if plain(name) == plain(word)), None)
    if right is not None:
        why = "keys count as they are spelt"
        gone = _gone(context, siblings[right])
        edits = () if gone else _rename(context, slot, right)
        fix = gone or f'write "{right}"'
        return _finding(context, slot, "wrong-case", why, fix, edits)
    for look in (_dotted, _inside, _outside, _wrapped, _in_params, _of_another_type, _elsewhere):
        if (found := look(context, slot)) is not None:
            return found
    near = _nearest(word, siblings)
    if near is not None:
        name, ratio = near
        fits = judge(slot.value, siblings[name]).fault in ("", "auto", "quoted")
        gone = _gone(context, siblings[name])
        edits = _rename(context, slot, name) if ratio >= _CERTAIN and fits and not gone else ()
        fix = gone or f'write "{name}", if that is meant'
        return _finding(context, slot, "unknown-key", "unknown key", fix, edits)
    why, fix = "unknown key", suggest(word, [*siblings, *(["dsx"] if not slot.block.path else [])])
    return _finding(context, slot, "unknown-key", why, fix, (), is_guess=True)


def _dotted(context: Context, slot: Slot) -> Finding | None:
    """Find a path where DeepSpeed wants objects in objects: ``"zero_optimization.stage": 2``."""
    word = str(slot.path[-1])
    name = f"{slot.block.path}.{word}".removeprefix(".")
    key = context.table.common(name) if "." in word else None
    if key is None:
        return None
    target = (*slot.path[:-1], *word.split("."))
    edits: tuple[Edit, ...] = ()
    if judge(slot.value, key).fault in ("", "auto") and context.at(target) is ABSENT:
        edits = (Edit("remove", slot.path), Edit("set", target, slot.value))
    owner, _, last = word.rpartition(".")
    why = f'a path, where objects stand inside objects: "{last}" inside {owner}'
    return _finding(context, slot, "misplaced-key", why, f'move it into "{owner}"', edits)


def _inside(context: Context, slot: Slot) -> Finding | None:
    """Find another tool's name for a key of this very block."""
    rows = (
        row for row in _names()["inside"] if slot.block.path in row["blocks"] and _word(slot) in row["words"]
    )
    row = next(rows, None)
    if row is None:
        return None
    name = row.get("key")
    if name is None:
        gone = Edit("remove", slot.path)
        return _finding(context, slot, "unknown-key", "unknown key", row["fix"], (gone,), loses=True)
    key = context.table.siblings(slot.block)[name]
    fits = judge(slot.value, key).fault in ("", "auto")
    edits = _rename(context, slot, name) if fits else ()
    return _finding(context, slot, "unknown-key", f"DeepSpeed calls it {name}", f'write "{name}"', edits)


def _of_another_type(context: Context, slot: Slot) -> Finding | None:
    """Find a parameter that other optimizers or schedules have."""
    kind = slot.block.variant
    others = [variant for path, variant in context.table.keys if path == slot.name] if kind else []
    if not others:
        return None
    name = context.at((*slot.path[:-2], "type"))
    why = f"{name} has no such parameter (others have, such as {', '.join(others[:3])})"
    gone = Edit("remove", slot.path)
    fix = "remove it, or choose another type"
    return _finding(context, slot, "unknown-key", why, fix, (gone,), loses=True)


def _outside(context: Context, slot: Slot) -> Finding | None:
    """Find an option of another tool for which DeepSpeed has no key."""
    if context.runner == "dsx" and not slot.block.path and str(slot.path[-1]) in _names()["dsx"]:
        why, fix = "a block of dsx's own", 'move it into "dsx"'
        return _finding(context, slot, "misplaced-key", why, fix)
    known = next((row for row in _names()["outside"] if _word(slot) in row["words"]), None)
    if known is None or slot.block.path:
        return None
    why = "no key of DeepSpeed's, which would ignore it in silence"
    return context.find("unknown-key", known["severity"], slot.path, why, known["fix"])


def _word(slot: Slot) -> str:
    return str(slot.path[-1]).lower().replace("-", "_")


def _elsewhere(context: Context, slot: Slot) -> Finding | None:
    """Find the key under its right name, or in its right place."""
    word = str(slot.path[-1])
    names = [key.path for key in context.table.named(word) if not key.path.startswith(slot.name + ".")]
    # The block's own inner blocks precede all others.
    inner = [name for name in names if slot.block.path and name.startswith(f"{slot.block.path}.")]
    names = inner or ([] if slot.block.path and word in _names()["common"] else names)
    other = other_names("keys").get(_word(slot))
    other = other if other and (not slot.block.path or _is_near(context, slot, other)) else None
    if other is not None and slot.block.path and not other.startswith(f"{slot.block.path}."):
        # A word much like one of the block's own keys is that key, misspelt.
        other = None if _nearest(word, context.table.siblings(slot.block)) else other
    beside = other is not None and other.rpartition(".")[0] == slot.block.path
    if other is not None and (not names or beside):
        return _renamed(context, slot, other)
    if slot.block.path == "bf16" and names and names[0].startswith("fp16."):
        why, gone = "it is fp16's: bf16 needs no loss scale", (Edit("remove", slot.path),)
        return _finding(context, slot, "misplaced-key", why, "remove it", gone, loses=True)
    names = [name for name in names if _is_near(context, slot, name)]
    if not names or len(names) > _MAX_PLACES:
        return None
    target = names[0]
    edits: tuple[Edit, ...] = ()
    if len(names) == 1:
        edits = _move(context, slot, context.table.common(target))
    places = " or ".join(names)
    return _finding(context, slot, "misplaced-key", f"it belongs to {places}", f"move it to {places}", edits)


# Blocks that are parts of one thing.
_RELATED = frozenset({"optimizer", "scheduler"})


def _is_near(context: Context, slot: Slot, name: str) -> bool:
    """Whether a key may have been meant for the place of ``name``: around it, inside it or in the same block.

    What another block calls alike is another thing: Comet's ``api_key`` is not W&B's. So is what stands deep
    in a block of which the config has nothing, such as a model's ``hidden_size``.
    """
    owner = name.rpartition(".")[0]
    mine, its = slot.block.path.partition(".")[0], owner.partition(".")[0]
    if not mine:
        return "." not in owner or its in _RELATED or context.at((its,)) is not ABSENT
    return not owner or mine == its or {mine, its} == _RELATED


def _wrapped(context: Context, slot: Slot) -> Finding | None:
    """Find a whole config, or several of its blocks, under a key of another tool's."""
    if slot.block.path or not isinstance(slot.value, dict) or context.table.named(str(slot.path[-1])):
        return None
    inside = [word for word in slot.value if word in context.table.siblings(slot.block)]
    if not inside:
        return None
    why = f"{', '.join(inside[:3])} belong{'s' * (len(inside) == 1)} to the top level"
    return _finding(context, slot, "misplaced-key", why, f'take them out of "{slot.path[-1]}"')


def _in_params(context: Context, slot: Slot) -> Finding | None:
    """Find a parameter of the optimizer or schedule that stands beside ``params`` instead of in it."""
    params = context.table.block(context.config, f"{slot.block.path}.params")
    key = None if params is None else context.table.siblings(params).get(str(slot.path[-1]))
    if params is None or key is None:
        return None
    edits = _move(context, slot, key)
    return _finding(
        context, slot, "misplaced-key", f"it belongs to {params.path}", f"move it to {params.path}", edits
    )


def _renamed(context: Context, slot: Slot, other: str) -> Finding:
    key = context.table.common(other)
    owner = other.rpartition(".")[0]
    edits: tuple[Edit, ...] = ()
    if owner == slot.block.path:
        fits = key is not None and judge(slot.value, key).fault in ("", "auto")
        edits = _rename(context, slot, other.rpartition(".")[2]) if fits else ()
    elif key is not None and not owner.endswith("params"):
        edits = _move(context, slot, key)
    name = other.rpartition(".")[2] if owner == slot.block.path else other
    return _finding(context, slot, "unknown-key", f"DeepSpeed calls it {name}", f'write "{name}"', edits)


def _move(context: Context, slot: Slot, key: Key | None) -> tuple[Edit, ...]:
    """Edits that move the key into a block that is there, if the value fits and nothing is in its way."""
    if key is None or judge(slot.value, key).fault not in ("", "auto"):
        return ()
    target: Path = tuple(key.path.split("."))
    owner = target[:-1]
    if same(context.at(target), slot.value):
        return (Edit("remove", slot.path),)
    if owner and not isinstance(context.at(owner), dict) and owner[-1] != "params":
        return ()
    if context.at(target) is not ABSENT or not isinstance(context.at(owner[:1]), dict | type(ABSENT)):
        return ()
    return (Edit("remove", slot.path), Edit("set", target, slot.value))


def _rename(context: Context, slot: Slot, name: str) -> tuple[Edit, ...]:
    """The edit that renames the key; if the right one is there too, removes it if both say the same."""
    there = context.at((*slot.path[:-1], name))
    if there is ABSENT:
        return (Edit("rename", slot.path, name),)
    return (Edit("remove", slot.path),) if same(there, slot.value) else ()


def _finding(
    context: Context,
    slot: Slot,
    check: str,
    why: str,
    fix: str,
    edits: tuple[Edit, ...] = (),
    is_guess: bool = False,
    loses: bool = False,
) -> Finding:
    """The finding of an unknown key.

    Its edits are safe where DeepSpeed refuses the key and they keep its value, or where the same value
    stands under the right name already: a key that DeepSpeed ignores would come to life. ``loses``: they
    take away what nothing else says.
    """
    block = f" in {slot.block.path}" if slot.block.path else ""
    does = (
        "DeepSpeed refuses it" if slot.block.unknown == "refused" else "DeepSpeed would ignore it in silence"
    )
    # A word that resembles nothing may be the user's own, which DeepSpeed leaves alone.
    own = is_guess and slot.block.unknown == "ignored" and context.runner != "dsx"
    severity: Severity = "warning" if own else "error"
    if check == "unknown-key" and why == "unknown key":
        why = f"unknown key{block}; {does}"
    else:
        why = f"{why}; here {does}"
    twice = [edit.kind for edit in edits] == ["remove"]
    safe = not loses and (slot.block.unknown == "refused" or twice)
    return context.find(check, severity, slot.path, why, fix, *edits, safe=safe)


def _gone(context: Context, key: Key) -> str:
    """What to do about a word for a key that this DeepSpeed no longer has; empty for one that it has."""
    if not is_past(context, key):
        return ""
    last = key.path.rpartition(".")[2]
    since = f" DeepSpeed {key.until} has removed" if key.until else " DeepSpeed does not read"
    instead = f"use {key.replacement}" if key.replacement else "remove it"
    return f'{instead}, if "{last}" is meant, which{since}'


def _nearest(word: str, siblings: Mapping[str, Key]) -> tuple[str, float] | None:
    """The word most like ``word``, and how similar it is; not enough to be sure if another is as near."""
    ratios = {name: difflib.SequenceMatcher(None, word.lower(), name.lower()).ratio() for name in siblings}
    best = max(ratios, key=ratios.__getitem__, default="")
    if not best or ratios[best] < _NEAR:
        return None
    others = [ratios[name] for name in siblings if siblings[name] is not siblings[best]]
    is_clear = ratios[best] - max(others, default=0.0) >= _MARGIN
    return best, ratios[best] if is_clear else min(ratios[best], _NEAR)


def check_removed(context: Context) -> Iterator[Finding]:
    """Find keys that this version no longer knows."""
    for slot in context.slots:
        key = slot.key
        if key is None or not is_past(context, key):
            continue
        if key.status == "removed":
            since = f"DeepSpeed {key.until} has removed it and refuses the config" if key.until else "removed"
            fix = _names()["without"].get(key.path) or (
                f"use {key.replacement}" if key.replacement else "remove it"
            )
            gone = Edit("remove", slot.path)
            yield context.find("removed", "error", slot.path, since, fix, gone, safe=_asks_for_nothing(slot))
        elif key.status == "dead":
            found = _dead(context, slot, key)
            yield from [found] if found else []


def _asks_for_nothing(slot: Slot) -> bool:
    """Whether a removed key was off; DeepSpeed refuses others, so that nobody goes without them unawares."""
    return not slot.value or (isinstance(slot.value, dict) and slot.value.get("enabled") is False)


def _dead(context: Context, slot: Slot, key: Key) -> Finding | None:
    """Find a key that is accepted and read by nothing; one that asks for the default does no harm."""
    if asks_for_default(slot, key):
        return None
    since = f" since {key.until}" if key.until else ""
    if not key.replacement:
        severity: Severity = "error" if is_dead_wrong(slot, key) else "warning"
        why = f"DeepSpeed does not read it{since} ({key.effect})"
        gone, safe = Edit("remove", slot.path), severity == "warning"
        return context.find("no-effect", severity, slot.path, why, "remove it", gone, safe=safe)
    owner, _, last = key.replacement.rpartition(".")
    edits = _rename(context, slot, last) if owner == dotted(slot.path[:-1]) else ()
    why = f"DeepSpeed does not read it{since}; it is {key.replacement} now"
    return context.find("removed", "error", slot.path, why, f'write "{key.replacement}"', *edits)
