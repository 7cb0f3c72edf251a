"""Makes the rows of one block of the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from dsx.config.doctor.key import Block, Key, Kind, NoEffect, When


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What the rows of one block have in common; call it for each row.

    Attributes:
        path: Dotted path of the block; empty for the top level.
        source: Where DeepSpeed reads the block, below deepspeed/.
        unknown: As in Block.
        types: As in Block.
        variant: As in Key.
        since: Version with which the block came; rows may name a later one.
        no_effect: When nothing of the block does anything: the cause for each row but ``enabled``.
    """

    path: str
    source: str
    unknown: Literal["refused", "ignored", "free"]
    types: Literal["coerced", "raw"]
    variant: str = ""
    since: str = ""
    no_effect: tuple[NoEffect, ...] = ()

    @property
    def block(self) -> Block:
        """The block itself."""
        return Block(
            path=self.path, unknown=self.unknown, types=self.types, source=self.source, variant=self.variant
        )

    def __call__(self, name: str, kinds: str, default: Any, effect: str, **more: Any) -> Key:
        """The row of one key.

        Args:
            name: Last part of the path.
            kinds: As in Key, parted by ``|``.
            default: As in Key.
            effect: As in Key.
            more: Other attributes of Key; ``no_effect`` is added to the block's.
        """
        common = () if name == "enabled" else self.no_effect
        given: dict[str, Any] = {
            "since": self.since,
            # DeepSpeedConfigModel.__init__ (runtime/config_utils.py) drops every value that is "auto".
            "auto": "default" if self.types == "coerced" else "kept",
        }
        return Key(
            path=f"{self.path}.{name}" if self.path else name,
            kinds=cast("tuple[Kind, ...]", tuple(filter(None, kinds.split("|")))),
            default=default,
            effect=effect,
            source=self.source,
            variant=self.variant,
            **(given | more | {"no_effect": (*more.get("no_effect", ()), *common)}),
        )


def unless(key: str, why: str) -> tuple[NoEffect, ...]:
    """The cause of a block that does nothing while the switch ``key`` is off."""
    return (NoEffect((When(key, "falsy"),), why),)


def below(stage: int, why: str) -> tuple[NoEffect, ...]:
    """The cause of a key that does nothing below a ZeRO stage."""
    return (NoEffect((When("zero_optimization.stage", "<", stage),), why),)


def above(stage: int, why: str) -> tuple[NoEffect, ...]:
    """The cause of a key that does nothing above a ZeRO stage."""
    return (NoEffect((When("zero_optimization.stage", ">", stage),), why),)
