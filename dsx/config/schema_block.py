"""What every block of the ``dsx`` block is made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
# A seed of torch's, with room for one per rank.
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
Degree = Positive | Literal["auto"]


class SchemaBlock(BaseModel):
    """Base of every block: frozen, unknown keys refused, no conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class MistakeError(ValueError):
    """A validator's finding about several keys of a block, with what to do."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix
