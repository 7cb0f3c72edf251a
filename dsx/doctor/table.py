"""The reference as lookups, and a walk over a config beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsx.doctor.finding import Path
from dsx.doctor.key import Key, KeyBlock

# Blocks whose keys depend on the name beside them: block -> key that holds the name.
_VARIANTS = {"optimizer.params": "optimizer.type", "scheduler.params": "scheduler.type"}
# Names in old configs for a block that is still read under them.
_SAME_BLOCK = {"bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Slot:
    """One key of a config.

    Attributes:
        path: Where it is written.
        name: Dotted path in the reference (short and old names replaced, list indices as ``[]``).
        value: What is written.
        key: Its row; None for an unknown key.
        block: The block that it is in.
    """

    path: Path
    name: str
    value: Any
    key: Key | None
    block: KeyBlock


@dataclass(frozen=True, slots=True)
class Table:
    """Lookups over the reference's rows; ``table()`` makes it."""

    keys: Mapping[tuple[str, str], Key] = field(repr=False)
    blocks: Mapping[tuple[str, str], KeyBlock] = field(repr=False)
    members: Mapping[tuple[str, str], Mapping[str, Key]] = field(repr=False)

    def key(self, name: str, variant: str = "") -> Key | None:
        """The row of a dotted name."""
        return self.keys.get((name, variant))

    def siblings(self, block: KeyBlock) -> Mapping[str, Key]:
        """Rows of a block by every spelling of their last part."""
        return self.members.get((block.path, block.variant), {})

    def named(self, last: str) -> list[Key]:
        """Rows whose last part is ``last``, outside blocks whose keys depend on a name, and of AdamW's."""
        return [
            key
            for (_, variant), key in self.keys.items()
            if key.path.rpartition(".")[2] == last and variant in ("", "adamw") and key.status == "live"
            if key.path.partition(".")[0] not in _SAME_BLOCK
        ]

    def walk(self, config: Mapping[str, Any]) -> Iterator[Slot]:
        """Every key of ``config`` down to where the reference ends."""
        top = self.blocks.get(("", ""))
        if top is not None:
            yield from self._walk(config, config, (), top)

    def _walk(
        self, config: Mapping[str, Any], node: Mapping[str, Any], path: Path, block: KeyBlock
    ) -> Iterator[Slot]:
        siblings = self.siblings(block)
        for word, value in node.items():
            here = (*path, word)
            # In a free block the names are the user's own, and a row "*" says what each holds.
            key = siblings.get(word, siblings.get("*"))
            if key is None and block.unknown == "free":
                continue
            if key is None:
                yield Slot(here, f"{block.path}.{word}".removeprefix("."), value, None, block)
                continue
            yield Slot(here, key.path, value, key, block)
            name = _SAME_BLOCK.get(key.path, key.path)
            for at, inner, suffix in _inside(here, value):
                below = self.block(config, name + suffix)
                if below is not None:
                    yield from self._walk(config, inner, at, below)

    def block(self, config: Mapping[str, Any], name: str) -> KeyBlock | None:
        """The block of a dotted name; of several, that of the type which ``config`` names."""
        if name in _VARIANTS:
            return self.blocks.get((name, variant(config, name)))
        return self.blocks.get((name, ""))


def table(keys: Sequence[Key], blocks: Sequence[KeyBlock]) -> Table:
    """Lookups over the rows."""
    members: dict[tuple[str, str], dict[str, Key]] = {}
    for key in keys:
        owner, _, last = key.path.rpartition(".")
        group = members.setdefault((owner, key.variant), {})
        for word in (last, *key.aliases):
            group.setdefault(word, key)
    return Table(
        keys={(key.path, key.variant): key for key in keys},
        blocks={(block.path, block.variant): block for block in blocks},
        members=members,
    )


def variant(config: Mapping[str, Any], block: str) -> str:
    """Lower-case name of the optimizer or scheduler that ``config`` names for a block of parameters."""
    owner, _, last = _VARIANTS.get(block, "").rpartition(".")
    node = config.get(owner)
    kind = node.get(last) if isinstance(node, dict) else None
    return kind.lower() if isinstance(kind, str) else ""


def _inside(path: Path, value: object) -> Iterator[tuple[Path, Mapping[str, Any], str]]:
    """Objects in ``value``: their path, content, and what their block's name has behind."""
    if isinstance(value, dict):
        yield path, value, ""
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if isinstance(item, dict):
                yield (*path, i), item, "[]"
