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
from importlib.resources import files
from typing import Any, Literal

from dsx.models.param import ITEM_BYTES, PRECISIONS, ParamSpec
from dsx.models.params import layer_kinds, param_specs, vocabulary_rows
from dsx.models.spec import HubModel, MlpTiles, Model


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
    looked_up = model.looked_up if isinstance(model, HubModel) else ()
    flops = [0.0] * len(kinds)
    for spec in specs:
        if len(spec.shape) > 1 and spec.layer not in (0, head) and spec.name not in looked_up:
            flops[spec.layer] += (6.0 if spec.trained else 4.0) * multiplied(model, spec)
    for block in range(model.num_layers):
        window = model.window(block, sequence_length)
        # Scores and their product with V: 2 * 2 * keys * query_size forward, thrice that in all.
        flops[first + block] += 12.0 * model.query_size * (window or sequence_length)
    table = 0 if model.tied_embeddings else head
    trained = any(spec.trained for spec in specs if spec.layer == table and len(spec.shape) > 1)
    flops[head] = (6.0 if trained else 4.0) * model.vocab_size * model.head_size
    return tuple(flops)


_EXPERT_DIMS = 3  # experts, outputs, inputs


def multiplied(model: Model, spec: ParamSpec) -> float:
    """Elements of a parameter that a token is multiplied by: of experts, those that it is sent to."""
    routed = model.routed if isinstance(model, HubModel) and len(spec.shape) == _EXPERT_DIMS else 1.0
    return spec.numel * routed


Precision = Literal["fp32", "bf16", "fp16"]
"""What a model trains in: the dtype of its parameters, activations and matrix multiplications."""

WIDTHS: Mapping[str, int] = {name: ITEM_BYTES[dtype] for name, dtype in PRECISIONS.items()}
"""Bytes of a parameter or an activation."""


_FEWEST_TOKENS = 1024
"""Tokens of a chunk at least: with fewer, adding to the weight's gradient takes longer than its product."""


def head_chunk(tokens: int, hidden_size: int, columns: int) -> int:
    """Tokens whose logits a head makes at a time: as many as take the memory of all hidden states.

    A power of two, as in torch's ``linear_cross_entropy``, but at least 1024; ``tokens`` for all at once.

    >>> head_chunk(8192, 4096, 128256), head_chunk(8192, 16384, 128256), head_chunk(8192, 4096, 4096)
    (1024, 2048, 8192)
    """
    share = -(-tokens * hidden_size // max(columns, 1))
    return min(tokens, max(_FEWEST_TOKENS, 1 << max(share - 1, 0).bit_length()))


_SMALL_LOGITS = 32 << 20
"""Bytes that the loss takes besides the logits in any case."""


def auto_chunk(
    model: Model, tokens: int, *, tensor: int, width: int, pad_multiple: int, piles_up: bool = False
) -> int:
    """:func:`head_chunk` of a model where it saves memory, else 0: the logits of all tokens at once.

    It saves none where the logits of all tokens take less than two chunks', or 32 MiB; and where several
    micro-batches are between their forward and backward, as in GPipe, and the gradient of the head's weight,
    which each of them then holds, takes as much as its logits.

    Args:
        model: The architecture.
        tokens: Of a micro-batch.
        tensor: Tensor-parallel degree.
        width: Bytes of a logit.
        pad_multiple: Each rank's vocabulary rows are rounded up to a multiple of this.
        piles_up: Whether there are several micro-batches between the last stage's forwards and backwards.
    """
    columns = vocabulary_rows(model, tensor, pad_multiple=pad_multiple)
    chunk = head_chunk(tokens, model.head_size, columns)
    small = tokens < 2 * chunk or tokens * columns * width <= _SMALL_LOGITS
    return 0 if small or (piles_up and tokens <= model.head_size) else chunk


def tiles_of(wanted: MlpTiles, model: Model, tokens: int) -> int:
    """Parts of ``tokens`` that a feed-forward computes one after the other, as ``dsx.mlp_tiles`` has it.

    "auto" is ALST's rule, the tokens over the hidden size (arXiv:2506.13996, section 3.1.1).
    """
    return max(1, -(-tokens // model.hidden_size)) if wanted == "auto" else wanted


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
    tables = tomllib.loads((files("dsx.models") / "peaks.toml").read_text(encoding="utf-8"))
    return tables["device"]  # type: ignore[no-any-return]  # the file's own form
