"""Plain Python data as JSON that gives the very same data back: tuples, numeric keys, tensors and all.

In place of pickle, which would run what is in a file.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dsx.checkpoint.catalog import unusable
from dsx.checkpoint.file_io import numpy_dtype
from dsx.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def as_numpy(tensor: torch.Tensor) -> Any:
    """A host tensor's memory as an array of the dtype that :mod:`dsx.checkpoint.file_io` holds it in."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    flat: np.ndarray[Any, Any] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat.view(numpy_dtype(name))


_TAG = "__dsx__"
_DICTS: Mapping[str, type] = {"dict": dict, "counter": Counter, "ordered": OrderedDict}


def encode(value: Any, where: str) -> Any:
    """``value`` as JSON values.

    It is None, numbers, strings, bytes, lists, tuples, sets, dicts with keys of those, numpy arrays and
    numbers, torch tensors. Messages call it ``where``.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}
    if isinstance(value, list) and type(value) is list:
        return [encode(item, f"{where}[{at}]") for at, item in enumerate(value)]
    if type(value) in (tuple, set, frozenset):
        items = [encode(item, f"{where}[{at}]") for at, item in enumerate(value)]
        return {_TAG: type(value).__name__, "items": items}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "base64": base64.b64encode(value).decode()}
    for name, kind in _DICTS.items():
        if type(value) is kind:
            return _encode_dict(name, dict(value), where)  # type: ignore[call-overload]
    return _encode_array(value, where)


def decode(value: Any, where: str) -> Any:
    """What :func:`encode` was given. Raises CheckpointError for what it did not make."""
    if isinstance(value, list):
        return [decode(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(item, where) for key, item in value.items()}
    try:
        return _decode_tagged(kind, value, where)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise unusable(where, f"not something that dsx wrote ({error})") from None


def to_json(value: Any, where: str) -> str:
    """JSON text. Raises CheckpointError as :func:`encode` does."""
    return json.dumps(encode(value, where), allow_nan=False)


def _encode_dict(name: str, value: Mapping[Any, Any], where: str) -> Any:
    plain = name == "dict" and all(isinstance(key, str) for key in value) and _TAG not in value
    if plain:
        return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    pairs = [
        [encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")] for key, item in value.items()
    ]
    return {_TAG: name, "pairs": pairs}


def _encode_array(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "base64": data}
    if type(value).__module__ == "torch" and type(value).__name__ == "Tensor":
        import torch

        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return {
            _TAG: "tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "base64": base64.b64encode(flat.numpy().tobytes()).decode(),
        }
    raise CheckpointError(
        where,
        f"a {type(value).__name__} is no plain data, and dsx writes no pickles",
        "save numbers, strings, lists, tuples, dicts, arrays and tensors",
    )


def _decode_tagged(kind: str, value: Mapping[str, Any], where: str) -> Any:
    if kind == "float":
        return float(value["value"])
    if kind == "bytes":
        return base64.b64decode(value["base64"], validate=True)
    if kind in ("tuple", "set", "frozenset"):
        makers = {"tuple": tuple, "set": set, "frozenset": frozenset}
        return makers[kind](decode(item, where) for item in value["items"])
    if kind in _DICTS:
        return _DICTS[kind]({decode(key, where): decode(item, where) for key, item in value["pairs"]})
    data = base64.b64decode(value["base64"], validate=True)
    if kind == "array":
        return np.frombuffer(data, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if kind == "tensor":
        import torch

        dtype = getattr(torch, value["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype {value['dtype']!r}")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(value["shape"])
    raise ValueError(f"kind {kind!r}")
