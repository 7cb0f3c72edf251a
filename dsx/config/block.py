"""What every block of the ``dsx`` schema is made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
# What torch takes for a seed, with room for one of its own per rank.
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
Degree = Positive | Literal["auto"]


class Block(BaseModel):
    """Base of every block: frozen, unknown keys refused, no conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
