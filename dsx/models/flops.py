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
from collections.abc import Mapping
from functools import cache
from pathlib import Path as File
from typing import Any, Literal

from dsx.models.param import ParamSpec
from dsx.models.params import layer_kinds, param_specs
from dsx.models.spec import HubModel, Model


def flops_per_token(model: Model, sequence_length: int) -> float:
    """FLOPs of one forward and backward, per token of a sequence of ``sequence_length`` tokens."""
    return sum(layer_flops(model, sequence_length))


def layer_flops(model: Model, sequence_length: int) -> tuple[float, ...]:
    """:func:`flops_per_token`, layer by layer of the layer list.

    Of experts, those count that a token is sent to. A matrix that is frozen has no gradient of its own: it
    counts 4 (2 forward, 2 backward).
    """
    kinds, specs = layer_kinds(model), param_specs(model)
    first, head = kinds.index("Block"), len(kinds) - 1
    tables = (0, head) if isinstance(model, HubModel) else (*range(first), head)
    flops = [0.0] * len(kinds)
    for spec in specs:
        if len(spec.shape) > 1 and spec.layer not in tables:
            flops[spec.layer] += (6.0 if spec.trained else 4.0) * multiplied(model, spec)
    for block in range(model.num_layers):
        window = 0 if isinstance(model, HubModel) else model.window(block, sequence_length)
        # Scores and their product with V: 2 * 2 * keys * query_size forward, thrice that in all.
        flops[first + block] += 12.0 * model.query_size * (window or sequence_length)
    table = 0 if model.tied_embeddings else head
    trained = any(spec.trained for spec in specs if spec.layer == table and len(spec.shape) > 1)
    flops[head] = (6.0 if trained else 4.0) * model.vocab_size * model.hidden_size
    return tuple(flops)


_EXPERT_DIMS = 3  # experts, outputs, inputs


def multiplied(model: Model, spec: ParamSpec) -> float:
    """Elements of a parameter that a token is multiplied by: of experts, those that it is sent to."""
    routed = model.routed if isinstance(model, HubModel) and len(spec.shape) == _EXPERT_DIMS else 1.0
    return spec.numel * routed


Precision = Literal["fp32", "bf16", "fp16"]
"""What a model trains in: the dtype of its parameters, activations and matrix multiplications."""

WIDTHS: Mapping[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a parameter or an activation."""


# Slices and slower namesakes of a listed device.
_UNLIKE = frozenset({"MIG", "LAPTOP", "D", "TI"})


def peak_flops(device_name: str, dtype: Precision) -> float | None:
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
