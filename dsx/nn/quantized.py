"""Matrices of frozen linears in 8 or 4 bits, from which each use makes the whole matrix anew.

Bitsandbytes makes them, in the forms that its users know:

- ``int8``: whole numbers, and for each row its largest magnitude. These are the weights of LLM.int8
  (Dettmers et al. 2022, arXiv:2208.07339, section 2.1). Inputs are not quantised.
- ``nf4``: NormalFloat numbers of 4 bits, two in a byte, and for 64 of them their largest magnitude
  (QLoRA: Dettmers et al. 2023, arXiv:2305.14314, section 3).
- ``nf4_double``: the same, and these scales quantised in turn (there: double quantisation): less their mean,
  by a table of 256 numbers, in blocks of 256, of each module's matrix by itself where several are fused.

A quantised matrix is neither a parameter nor a buffer: optimizers, ZeRO, checkpoints and casts do not see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dsx.errors import ModelError
from dsx.models.param import DOUBLE_BLOCK, NF4_BLOCK, ParamSpec, Quantization
from dsx.nn import collectives
from dsx.nn.parallel import TensorParallel
from dsx.nn.split import WeightGradients, late


@dataclass(frozen=True, slots=True)
class DoubleScales:
    """What is added and multiplied to make the scales of fused matrices of their quantised ones.

    Attributes:
        table: float32 [256], what a byte stands for.
        outer: float32, for each 256 scales of a module, modules one after another.
        means: float32 [modules].
        counts: Scales of each module.
    """

    table: Tensor
    outer: Tensor
    means: Tensor
    counts: tuple[int, ...]

    def scales(self, numbers: Tensor) -> Tensor:
        """float32, as bitsandbytes' ``dequantize_4bit`` makes them, of uint8."""
        from bitsandbytes.functional import QuantState, dequantize_blockwise

        outer = self.outer.split([-(-count // DOUBLE_BLOCK) for count in self.counts])
        made = []
        for own, scale, mean in zip(numbers.split(self.counts), outer, self.means.unbind(), strict=True):
            state = QuantState(scale, code=self.table, blocksize=DOUBLE_BLOCK, dtype=torch.float32)
            made.append(dequantize_blockwise(own, state).add_(mean))
        return torch.cat(made) if len(made) > 1 else made[0]


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [out, in].

    Attributes:
        numbers: int8 [out, in], or pairs of 4 bits, uint8 [out * in / 2, 1].
        scales: float32, [out] or one for each 64 numbers; or uint8, places in a table.
        form: Which of these it is.
        shape: Of the matrix.
        dtype: Of the matrix, in which linears compute.
        double: What scales in uint8 stand for.
        used: What is used of it, as :func:`picked` takes it; None for all.
    """

    numbers: Tensor
    scales: Tensor
    form: Quantization
    shape: torch.Size
    dtype: torch.dtype
    double: DoubleScales | None = None
    used: tuple[int, slice] | None = None

    def __len__(self) -> int:
        """Rows that are used."""
        if self.used is None:
            return self.shape[0]
        modules, rows = self.used
        return modules * (int(rows.stop) - int(rows.start))

    def tensor(self) -> Tensor:
        """The matrix, or what is used of it, new each time."""
        made = self._rows(0, self.shape[0], self._scales())
        return made if self.used is None else picked(made, *self.used)

    def tiles(self) -> Iterator[Tensor]:
        """The same by rows, so that never the whole of a large matrix is there."""
        # Of 64 rows the numbers are whole blocks.
        step = NF4_BLOCK * max(1, _TILE // (NF4_BLOCK * self.shape[1]))
        if self.used is not None or step >= self.shape[0]:
            yield self.tensor()
            return
        scales = self._scales()
        for first in range(0, self.shape[0], step):
            yield self._rows(first, min(first + step, self.shape[0]), scales)

    def _scales(self) -> Tensor:
        return self.scales if self.double is None else self.double.scales(self.scales)

    def _rows(self, first: int, stop: int, scales: Tensor) -> Tensor:
        if self.form == "int8":
            # As in MatMul8bitLt.backward of bitsandbytes/autograd/_functions.py.
            rows = self.numbers[first:stop].to(self.dtype, copy=True)
            return rows.mul_(scales[first:stop].unsqueeze(1).mul(1.0 / 127.0))
        from bitsandbytes.functional import QuantState, dequantize_4bit

        columns = self.shape[1]
        begin, end = first * columns, stop * columns
        state = QuantState(
            scales[begin // NF4_BLOCK : -(-end // NF4_BLOCK)],
            # In one row: with several, bitsandbytes' kernel for CPUs looks for a row's blocks in the wrong
            # place if its length is no multiple of theirs, which parts of rows may be.
            torch.Size((1, end - begin)),
            blocksize=NF4_BLOCK,
            quant_type="nf4",
            dtype=self.dtype,
        )
        found: Tensor = dequantize_4bit(self.numbers[begin // 2 : -(-end // 2)], state)
        return found.view(stop - first, columns)


_TILE = 1 << 25
"""Elements of a matrix that are made at a time."""

Matrix: TypeAlias = Tensor | Quantized


def whole(matrix: Matrix) -> Tensor:
    """A matrix as a tensor: itself, unless it is quantised."""
    return matrix.tensor() if isinstance(matrix, Quantized) else matrix


def tiles(matrix: Matrix) -> Iterator[Tensor]:
    """A matrix by rows: in one, unless it is quantised and large."""
    return matrix.tiles() if isinstance(matrix, Quantized) else iter((matrix,))


def picked(matrix: Tensor, modules: int, rows: slice) -> Tensor:
    """The same rows of each of the modules that are fused along dim 0."""
    by_module: Tensor = matrix.unflatten(0, (modules, -1))
    return by_module[:, rows].flatten(0, 1)


def used(
    tp: TensorParallel, split: WeightGradients | None, modules: int, rows: slice, *held: Matrix | None
) -> list[Any]:
    """What this rank uses of matrices and biases that every rank holds whole.

    Gradients of the whole are summed over the ranks.

    Args:
        tp: The ranks.
        split: Takes gradients while it defers.
        modules: That are fused along dim 0.
        rows: Of each module, those that are used.
        held: The matrices and biases; None stays None.
    """
    tensors = [late(each, split) for each in held if isinstance(each, Tensor)]
    copied = iter(collectives.copy_parameters(tp, *tensors, cut=True) if tensors else ())

    def part(each: Matrix | None) -> Matrix | None:
        if each is None:
            return None
        if isinstance(each, Quantized):
            return replace(each, used=(modules, rows))
        return picked(next(copied), modules, rows)

    return [part(each) for each in held]


def is_quantized(model: nn.Module) -> bool:
    """Whether any linear of a model is."""
    return any(isinstance(held, Quantized) for module in model.modules() for held in vars(module).values())


@torch.no_grad()
def quantize(layer: nn.Module) -> None:
    """Put quantised matrices in the place of those of a layer's parameters whose spec says so.

    One matrix after the other. Collective over the tensor-parallel ranks.

    Args:
        layer: A layer with its weights.

    Raises:
        ModelError: The matrix of a module that is no linear of dsx.
    """
    for linear in layer.modules():
        for name, parameter in list(linear.named_parameters(recurse=False)):
            spec: ParamSpec | None = getattr(parameter, "dsx_spec", None)
            if spec is None or spec.quantized == "none":
                continue
            if not hasattr(linear, "adapter"):
                raise ModelError(
                    spec.name,
                    f"dsx cannot quantise a {type(linear).__name__}",
                    'set dsx.adapter.quantization to "none"',
                )
            tp = getattr(linear, "tp", TensorParallel())
            delattr(linear, name)
            made = _quantized(parameter.detach(), spec.quantized, tp if spec.split == 1 else TensorParallel())
            if spec.quantized == "nf4_double":
                made = _doubly(made, spec.fused_rows(tp.at))
            setattr(linear, name, made)


def _doubly(made: Quantized, fused: tuple[int, ...]) -> Quantized:
    """The same with its scales quantised, of each of the fused matrices, of which the rows are given.

    As in bitsandbytes' ``quantize_4bit`` with ``compress_statistics``.
    """
    from bitsandbytes.functional import create_dynamic_map, quantize_blockwise

    with torch.device("cpu"):
        table = create_dynamic_map().to(made.scales.device, copy=True)
    counts = tuple(rows * made.shape[1] // NF4_BLOCK for rows in fused)
    numbers, outer, means = [], [], []
    for scales in made.scales.split(counts):
        means.append(scales.mean())
        own, state = quantize_blockwise(scales - means[-1], code=table, blocksize=DOUBLE_BLOCK)
        numbers.append(own)
        outer.append(state.absmax)
    double = DoubleScales(table, torch.cat(outer), torch.stack(means), counts)
    return replace(made, scales=torch.cat(numbers), double=double)


def _quantized(matrix: Tensor, form: Quantization, tp: TensorParallel) -> Quantized:
    """Args: a matrix and the ranks that have other inputs of the same rows, which share the rows' scales."""
    from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

    if form != "int8":
        numbers, state = quantize_4bit(matrix, blocksize=NF4_BLOCK, quant_type="nf4")
        return Quantized(numbers, state.absmax, form, matrix.shape, matrix.dtype)
    half = matrix.to(torch.float16)  # the one dtype that bitsandbytes takes, as Int8Params does
    if tp.size > 1:
        largest = collectives.all_reduce(half.abs().amax(dim=1, keepdim=True), tp, "max")
        half = torch.cat((half, largest), dim=1)
    numbers, scales, _ = int8_vectorwise_quant(half)
    return Quantized(numbers[:, : matrix.shape[1]].contiguous(), scales, form, matrix.shape, matrix.dtype)
