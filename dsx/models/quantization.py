"""How the matrices of a Hugging Face folder are quantised, by its config.json. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsx.errors import ModelError
from dsx.models.config_values import at
from dsx.models.param import PRECISIONS

KEY = "quantization_config"
_PLAIN = "give the model before it was quantised; if its weights are plain, remove the key"


@dataclass(frozen=True, slots=True)
class FolderQuantization:
    """What a config.json says of it.

    Attributes:
        method: ``fp8``, ``mxfp4`` or ``bitsandbytes``: transformers' ``quant_method``.
        block: Rows and columns of ``fp8`` that share a scale; None where a matrix has one.
        dtype: Of the matrices once they are plain, by torch's name: the config's, else bfloat16.
    """

    method: str
    block: tuple[int, int] | None
    dtype: str


def quantization_of(config: Mapping[str, Any]) -> FolderQuantization | None:
    """How a config.json's folder is quantised; None if it is not.

    Raises:
        ModelError: In a way that dsx does not read.
    """
    told = config.get(KEY)
    if not told:
        return None
    method = told.get("quant_method") if isinstance(told, Mapping) else None
    if method not in ("fp8", "mxfp4", "bitsandbytes"):
        what = "dsx reads folders in fp8 (by blocks or whole), mxfp4 and bitsandbytes' int8, nf4 and fp4"
        raise ModelError(at(f"{KEY}.quant_method", method), what, _PLAIN)
    block, form = told.get("weight_block_size"), told.get("fmt") or "e4m3"
    if method == "fp8" and form not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(at(f"{KEY}.fmt", form), "dsx reads fp8 of the form e4m3 alone", _PLAIN)
    if block is not None and not (
        isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise ModelError(at(f"{KEY}.weight_block_size", block), "no numbers of rows and columns", _PLAIN)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return FolderQuantization(
        method=method,
        block=None if block is None else (block[0], block[1]),
        dtype=dtype if dtype in PRECISIONS.values() else "bfloat16",
    )


def unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the same model with plain weights, as which dsx reads it.

    Raises:
        ModelError: As :func:`quantization_of`.
    """
    quantization_of(config)
    return {key: value for key, value in config.items() if key != KEY}
