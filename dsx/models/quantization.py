"""How the matrices of a Hugging Face folder are quantised, by its config.json. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsx.errors import ModelError
from dsx.models.config_values import at
from dsx.models.param import PRECISIONS

_KEY = "quantization_config"
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
    """How a config.json's folder is quantised; None if it is not. Raises ModelError if dsx cannot read it."""
    told = config.get(_KEY)
    if not told:
        return None
    method = told.get("quant_method") if isinstance(told, Mapping) else None
    if method not in ("fp8", "mxfp4", "bitsandbytes"):
        what = "dsx reads folders in fp8 (by blocks or whole), mxfp4 and bitsandbytes' int8, nf4 and fp4"
        raise ModelError(at(f"{_KEY}.quant_method", method), what, _PLAIN)
    block = told.get("weight_block_size")
    sizes = tuple(block) if isinstance(block, list | tuple) else ()
    if block is not None and (len(sizes) != 2 or any(type(n) is not int or n < 1 for n in sizes)):
        raise ModelError(at(f"{_KEY}.weight_block_size", block), "no numbers of rows and columns", _PLAIN)
    dtype = str(config.get("dtype") or config.get("torch_dtype"))
    return FolderQuantization(method, sizes or None, dtype if dtype in PRECISIONS.values() else "bfloat16")


def unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the same model with plain weights, as dsx reads it. Raises ModelError as above."""
    quantization_of(config)
    return {key: value for key, value in config.items() if key != _KEY}
