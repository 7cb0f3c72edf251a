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
from dataclasses import replace
from typing import Literal, NamedTuple

from dsx.models.params import layer_kinds, param_specs
from dsx.models.spec import ModelSpec


def flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """FLOPs of one forward and backward, per token of a sequence of ``sequence_length`` tokens."""
    return sum(layer_flops(model, sequence_length))


def layer_flops(model: ModelSpec, sequence_length: int) -> tuple[float, ...]:
    """:func:`flops_per_token`, layer by layer of the layer list."""
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


Dtype = Literal["bf16", "fp16", "fp32"]


class _Peak(NamedTuple):
    """Dense FLOP/s: ``half`` of the matrix units with fp32 accumulation, ``fp32`` without TF32."""

    half: float
    fp32: float
    has_bf16: bool = True


# Words of the device's name -> its rates; the first row whose words all occur counts.
_PEAKS: tuple[tuple[frozenset[str], _Peak], ...] = (
    # NVIDIA GB200 NVL72 datasheet: 360 PFLOP/s sparse and 5760 TFLOP/s fp32 per 72 GPUs.
    (frozenset({"GB200"}), _Peak(2500e12, 80e12)),
    # NVIDIA HGX B200 datasheet: 36 PFLOP/s sparse and 600 TFLOP/s fp32 per 8 GPUs.
    (frozenset({"B200"}), _Peak(2250e12, 75e12)),
    # NVIDIA H200 datasheet, NVL form: 1671 TFLOP/s sparse.
    (frozenset({"H200", "NVL"}), _Peak(835.5e12, 60e12)),
    # NVIDIA H200 and GH200 datasheets: the H100 SXM compute die.
    (frozenset({"H200"}), _Peak(989.4e12, 66.9e12)),
    (frozenset({"GH200"}), _Peak(989.4e12, 66.9e12)),
    # NVIDIA H100 datasheet, NVL form: 1671 TFLOP/s sparse.
    (frozenset({"H100", "NVL"}), _Peak(835.5e12, 60e12)),
    # NVIDIA H100 Tensor Core GPU architecture whitepaper, table 2, PCIe and SXM5 columns.
    (frozenset({"H100", "PCIE"}), _Peak(756e12, 51.2e12)),
    (frozenset({"H100"}), _Peak(989.4e12, 66.9e12)),
    # NVIDIA A100 datasheet (all forms).
    (frozenset({"A100"}), _Peak(312e12, 19.5e12)),
    # NVIDIA A40 and A10 datasheets.
    (frozenset({"A40"}), _Peak(149.7e12, 37.4e12)),
    (frozenset({"A10"}), _Peak(125e12, 31.2e12)),
    # NVIDIA L40S and L4 datasheets (L4: 242 TFLOP/s sparse).
    (frozenset({"L40S"}), _Peak(362.05e12, 91.6e12)),
    (frozenset({"L4"}), _Peak(121e12, 30.3e12)),
    # NVIDIA Ada GPU architecture whitepaper, appendix A (fp16/bf16 with fp32 accumulation).
    (frozenset({"RTX", "4090"}), _Peak(165.2e12, 82.6e12)),
    # NVIDIA Ampere GA102 whitepaper, appendix A (fp16/bf16 with fp32 accumulation).
    (frozenset({"RTX", "3090"}), _Peak(71e12, 35.6e12)),
    # NVIDIA V100 datasheet, PCIe and SXM2 columns; no bf16 units.
    (frozenset({"V100", "PCIE"}), _Peak(112e12, 14e12, has_bf16=False)),
    (frozenset({"V100"}), _Peak(125e12, 15.7e12, has_bf16=False)),
    # NVIDIA T4 datasheet; no bf16 units.
    (frozenset({"T4"}), _Peak(65e12, 8.1e12, has_bf16=False)),
    # AMD Instinct MI300X and MI325X data sheets (fp32: vector and matrix alike).
    (frozenset({"MI300X"}), _Peak(1307.4e12, 163.4e12)),
    (frozenset({"MI325X"}), _Peak(1307.4e12, 163.4e12)),
)
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
    for needed, peak in _PEAKS:
        if needed <= words:
            if dtype == "fp32":
                return peak.fp32
            return peak.half if dtype == "fp16" or peak.has_bf16 else None
    return None
