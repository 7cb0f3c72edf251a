"""Floating-point operations of training, and peak rates of accelerators, for model FLOPs utilisation.

PaLM, arXiv:2204.02311, appendix B: 6 per token and parameter used in a matrix multiplication (2 forward, 4
backward) plus 12 * layers * query size * sequence length for attention, which counts the full square of
query-key pairs although a causal mask needs half. In a block whose sliding window is shorter than the
sequence, the window takes the sequence's place: no token has more keys. Embedding look-ups, norms, biases,
softmax and activations count nothing; the head counts, tied or not; recomputation counts nothing (it is the
hardware's work, not the model's).
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path as File
from typing import Any, Literal

from dsx.models.params import layer_kinds, param_specs
from dsx.models.spec import HubModel, Model


def flops_per_token(model: Model, sequence_length: int) -> float:
    """FLOPs of one forward and backward, per token of a sequence of ``sequence_length`` tokens."""
    return sum(layer_flops(model, sequence_length))


def layer_flops(model: Model, sequence_length: int) -> tuple[float, ...]:
    """:func:`flops_per_token`, layer by layer of the layer list.

    Of experts, those count that a token is sent to.
    """
    if isinstance(model, HubModel):
        return _hub_flops(model, sequence_length)
    kinds, one = layer_kinds(model), replace(model, num_layers=1)
    first = kinds.index("Block")
    matrices = [spec for spec in param_specs(one) if spec.layer == first and len(spec.shape) > 1]
    products = 6.0 * sum(spec.numel for spec in matrices)
    flops = [0.0] * len(kinds)
    for block in range(model.num_layers):
        keys = model.window(block, sequence_length) or sequence_length
        # Scores and their product with V: 2 * 2 * keys * query_size forward, thrice that in all.
        flops[first + block] = products + 12.0 * model.query_size * keys
    flops[-1] = 6.0 * model.vocab_size * model.hidden_size
    return tuple(flops)


_EXPERT_DIMS = 3  # experts, outputs, inputs


def _hub_flops(model: HubModel, sequence_length: int) -> tuple[float, ...]:
    flops = [0.0] * len(model.kinds)
    for spec in model.params:
        if len(spec.shape) > 1 and spec.layer not in (0, len(flops) - 1):
            flops[spec.layer] += 6.0 * spec.numel * (model.routed if len(spec.shape) == _EXPERT_DIMS else 1.0)
    first = model.kinds.index("Block")
    for block in range(model.num_layers):
        flops[first + block] += 12.0 * model.query_size * sequence_length
    flops[-1] = 6.0 * model.vocab_size * model.hidden_size
    return tuple(flops)


Dtype = Literal["bf16", "fp16", "fp32"]


# Slices and slower namesakes of a listed device.
_UNLIKE = frozenset({"MIG", "LAPTOP", "D", "TI"})


def peak_flops(device_name: str, dtype: Dtype) -> float | None:
    """Dense peak FLOP/s of a device, None if unknown.

    Args:
        device_name: As ``torch.cuda.get_device_name()`` gives it, e.g. ``NVIDIA H100 80GB HBM3``.
        dtype: Of the matrix multiplications. For ``fp32`` this is the rate without TF32: where a program
            allows TF32, utilisation against it can exceed 1.

    >>> peak_flops("NVIDIA A100-SXM4-80GB", "bf16") / 1e12
    312.0
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if words & _UNLIKE:
        return None
    for device in _peaks():
        if words.issuperset(device["words"]):
            known = dtype != "bf16" or device.get("bf16", True)
            return float(device["fp32" if dtype == "fp32" else "half"]) if known else None
    return None


@cache
def _peaks() -> list[dict[str, Any]]:
    tables = tomllib.loads((File(__file__).parent / "peaks.toml").read_text(encoding="utf-8"))
    return tables["device"]  # type: ignore[no-any-return]  # the file's own form
