"""A tensor's memory as numpy sees it, for what reads and writes files without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dsx.checkpoint.dtypes import numpy_dtype


def as_numpy(tensor: torch.Tensor) -> Any:
    """A host tensor's memory as an array of the dtype that :mod:`dsx.checkpoint.dtypes` holds it in."""
    name = str(tensor.dtype).removeprefix("torch.")
    flat: np.ndarray[Any, Any] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat.view(numpy_dtype(name))
