"""One logical (global) tensor of a model, and how the axes of a mesh cut it. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import Literal, Self, TypeAlias

from dsx.errors import LayoutError
from dsx.parallel.mesh import Coordinates

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of a dtype, by torch's name."""

PRECISIONS: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What a run is said to train in -> the dtype of its weights."""

Box = tuple[tuple[int, int], ...]
"""A rectangular part of a tensor: (start, stop) per dim."""


TOWER = "0.tower."
"""What names of the parameters of a tower of pictures begin with, which are the first layer's."""

_SPLIT, _SHARED = "tp", "ep"  # the axes that divide a tensor along its ``split``, and along its ``experts``
_MOST_DIGITS = 6  # of a layer's number


def layer_of(name: str) -> int:
    """Index in the layer list with which a tensor's name begins; 0 if it begins with none."""
    first = name.partition(".")[0]
    return int(first) if first.isdecimal() and len(first) <= _MOST_DIGITS else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """How a fresh parameter is filled: normal(0, std), zeros or ones.

    ``uniform`` has a mean of 0 and the deviation ``std``. ``row_norms`` is for the magnitudes of
    weight-decomposed adapters, which are the norms of another parameter's rows.

    Attributes:
        part_of: Name of the fused tensor of which it takes its random values, so that a model starts alike
            in whatever form; empty for values of its own.
        first_row: Row of that tensor with which it begins.
    """

    kind: Literal["normal", "uniform", "zeros", "ones", "row_norms"]
    std: float = 0.0
    part_of: str = ""
    first_row: int = 0


Quantization: TypeAlias = Literal["none", "int8", "nf4", "nf4_double"]
"""Forms of frozen matrices (:mod:`dsx.nn.quantized`)."""

NF4_BLOCK = 64
"""Numbers that share a scale in nf4."""

DOUBLE_BLOCK, DOUBLE_TABLE = 256, 256
"""Scales that share a scale in nf4_double, and the numbers that they may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """A global tensor, how axes cut it, and its Hugging Face names.

    Attributes:
        name: ``<index in the layer list>.<path in the layer's module>``, e.g. ``1.attention.qkv.weight``.
        layer: Index in the layer list of the (first) layer that uses it.
        shape: Logical shape; vocabulary padding is no part of it.
        split: Dim cut along tp; None means that every tp rank holds all of it.
        parts: Fused blocks along ``split``, each cut on its own (Q, K and V of a fused QKV, gate and up of
            a gated MLP); empty means one block.
        pad_multiple: Each rank's extent along ``split`` is rounded up to a multiple of this
            (vocabulary rows; only with a single block). Padding rows are zero and never trained. None: there
            is no padding, so every block must divide by tp.
        experts: Dim that counts experts, and is cut along ep; None if every ep rank holds all of it.
        expert_blocks: How often all experts follow each other along that dim, each time cut on its own.
        hf: Hugging Face tensor names: one per part in order, or one that holds all parts. Of a stacked tensor
            these names for index 0 of dim 0, then those for index 1, and so on.
        hf_transposed: Hugging Face's tensors have the last two dims the other way round (GPT-2's Conv1D).
        hf_stacked: Dim 0 counts tensors that Hugging Face's files keep apart, the experts of a layer; theirs
            lack that dim.
        hf_split: Dim along which the parts lie that have names of their own, where it is not ``split``.
        hf_parts: Their extents along ``hf_split``; empty means ``parts`` along ``split``.
        hf_whole: Name that transformers' own module has for the whole tensor, where files have it in parts or
            under another name; empty if they have it as the module does.
        hf_copies: Names of the same tensor in transformers' module, which files leave out.
        buffer: It is a buffer of the module: stored as parameters are, and never trained.
        tower: It is of the tower of pictures, and its names are those of the composite model.
        float32: The dtypes of a run's weights beside which it stays float32 (``bfloat16``, ``float16``).
        trained: Whether it gets gradients; a frozen parameter keeps its first value.
        linear: It is the matrix of a linear, outputs by inputs, or those of experts, one behind the other.
        read: Its module's code, or a kernel that it calls, multiplies by it past calls of the linear.
        quantized: The form in which ranks hold it; "none" for its own.
        adapts: Name of the parameter that it adapts; empty for a parameter of the model itself.
        tie: Key of the tie group when several layers use this tensor, else None.
    """

    name: str
    layer: int
    shape: tuple[int, ...]
    init: Init
    hf: tuple[str, ...]
    split: int | None = None
    parts: tuple[int, ...] = ()
    pad_multiple: int | None = None
    experts: int | None = None
    expert_blocks: int = 1
    hf_transposed: bool = False
    hf_stacked: bool = False
    hf_split: int | None = None
    hf_parts: tuple[int, ...] = ()
    hf_whole: str = ""
    hf_copies: tuple[str, ...] = ()
    buffer: bool = False
    tower: bool = False
    float32: tuple[str, ...] = ()
    trained: bool = True
    linear: bool = False
    read: bool = False
    quantized: Quantization = "none"
    adapts: str = ""
    tie: str | None = None

    def __post_init__(self) -> None:
        if self.split is not None and not 0 <= self.split < len(self.shape):
            raise LayoutError(
                f"{self.name} split {self.split}", f"its shape {self.shape} has no such dim", "fix the spec"
            )
        if self.parts and (
            self.split is None or sum(self.parts) != self.shape[self.split] or min(self.parts) < 0
        ):
            raise LayoutError(
                f"{self.name} parts {self.parts}", "they do not fill the split dim", "fix the spec"
            )
        if self.pad_multiple is not None and (self.split is None or self.parts or self.pad_multiple < 1):
            raise LayoutError(
                f"{self.name} pad_multiple {self.pad_multiple}",
                "only a tensor cut as one block is padded, to a multiple of at least 1",
                "fix the spec",
            )
        counted = None if self.experts is None else self.shape[self.experts : self.experts + 1]
        if counted is not None and (
            self.experts == self.split or not counted or counted[0] % self.expert_blocks
        ):
            raise LayoutError(
                f"{self.name} experts {self.experts}",
                f"its shape {self.shape} has no such dim for {self.expert_blocks} blocks, or tp cuts it",
                "fix the spec",
            )
        self._check_names()

    def _check_names(self) -> None:
        dim, parts = self._hf_blocks
        dims = range(int(self.hf_stacked), len(self.shape))
        if len(self.hf) > 1 and parts and (dim is None or dim not in dims or sum(parts) != self.shape[dim]):
            raise LayoutError(
                f"{self.name} hf {self.hf}", f"parts {parts} do not fill its dim {dim}", "fix the spec"
            )
        if len(self.shape) < self.hf_stacked + 2 * self.hf_transposed:
            raise LayoutError(
                f"{self.name} hf_stacked, hf_transposed",
                f"its shape {self.shape} has too few dims",
                "fix the spec",
            )
        stacked = self.shape[0] if self.hf_stacked else 1
        if len(self.hf) not in (stacked, stacked * max(1, len(parts))):
            raise LayoutError(
                f"{self.name} hf {self.hf}",
                "one name per part, or one for all" + (", for each index of dim 0" * self.hf_stacked),
                "fix the spec",
            )

    @property
    def _hf_blocks(self) -> tuple[int | None, tuple[int, ...]]:
        """The dim and the extents of the parts that may have names of their own."""
        return (self.hf_split, self.hf_parts) if self.hf_parts else (self.split, self.parts)

    @property
    def hf_boxes(self) -> tuple[tuple[str, Box], ...]:
        """What each tensor of ``hf`` is of ours; of a stacked one dim 0 has one index, which theirs lacks.

        >>> spec = ParamSpec(name="w", layer=0, shape=(2, 6, 3), init=Init(kind="zeros"), split=1,
        ...                  parts=(4, 2), hf_stacked=True, hf=("0.a", "0.b", "1.a", "1.b"))
        >>> spec.hf_boxes[2:]
        (('1.a', ((1, 2), (0, 4), (0, 3))), ('1.b', ((1, 2), (4, 6), (0, 3))))
        """
        whole = tuple((0, n) for n in self.shape)
        boxes: tuple[Box, ...] = (whole,)
        if self.hf_stacked:
            boxes = tuple(((index, index + 1), *whole[1:]) for index in range(self.shape[0]))
        dim, parts = self._hf_blocks
        if len(self.hf) > len(boxes) and dim is not None:
            ends = tuple(accumulate(parts))
            spans = tuple(zip((0, *ends), ends, strict=False))
            boxes = tuple((*box[:dim], span, *box[dim + 1 :]) for box in boxes for span in spans)
        return tuple(zip(self.hf, boxes, strict=True))

    @classmethod
    def uncut(cls, name: str, shape: tuple[int, ...], layer: int = 0) -> Self:
        """A tensor of which nothing but name and shape is known: every rank has all of it."""
        return cls(name=name, layer=layer, shape=shape, init=Init(kind="zeros"), hf=(name,))

    @property
    def in_module(self) -> str:
        """Name in transformers' own module, or that of its first part there."""
        return self.hf_whole or self.hf[0]

    @property
    def is_guess(self) -> bool:
        """Whether it only says that nothing is known, as :meth:`uncut` makes it."""
        return self.split is None and self.hf == (self.name,)

    def dtype_in(self, dtype: str) -> str:
        """Its own dtype in a run whose weights are of ``dtype``, both by torch's names."""
        return "float32" if dtype in self.float32 else dtype

    @property
    def numel(self) -> int:
        """Elements of the logical tensor."""
        return prod(self.shape)

    def local_extent(self, at: Coordinates) -> int:
        """Elements along ``split`` that a rank holds, padding included: the same number at every index."""
        if self.split is None:
            raise LayoutError(self.name, "a replicated tensor has no split dim", "ask for its shape")
        if self.pad_multiple is not None:
            degree, _ = at.along(_SPLIT)
            per_rank = -(-self.shape[self.split] // degree)
            return -(-per_rank // self.pad_multiple) * self.pad_multiple
        return sum(hi - lo for lo, hi in self._spans(at))

    def local_shape(self, at: Coordinates) -> tuple[int, ...]:
        """Shape of a rank's tensor, padding included: the same at every index."""
        shape = list(self.shape)
        for dim, spans in self.cuts(at).items():
            shape[dim] = self.local_extent(at) if dim == self.split else sum(hi - lo for lo, hi in spans)
        return tuple(shape)

    def quantized_bytes(self, at: Coordinates) -> tuple[int, ...]:
        """Bytes of the tensors that a rank holds of it: numbers and scales, if quantised."""
        if self.quantized == "none":
            return ()
        rows, columns = self.local_shape(at)
        if self.quantized == "int8":
            return rows * columns, 4 * rows
        numbers, scales = -(-rows * columns // 2), -(-rows * columns // NF4_BLOCK)
        if self.quantized == "nf4":
            return numbers, 4 * scales
        fused = self.fused_rows(at)
        outer = sum(-(-own * columns // (NF4_BLOCK * DOUBLE_BLOCK)) for own in fused)
        return numbers, scales, 4 * outer, 4 * len(fused), 4 * DOUBLE_TABLE

    def fused_rows(self, at: Coordinates) -> tuple[int, ...]:
        """Rows that a rank holds of each of the modules' matrices that are fused along dim 0, in order."""
        every = (0, self.shape[0])
        held = self.cuts(at).get(0, (every,))
        modules = [every] if self.hf_whole else [box[0] for _, box in self.hf_boxes]
        found = [
            sum(max(0, min(high, stop) - max(low, start)) for start, stop in held) for low, high in modules
        ]
        return tuple(rows for rows in found if rows)

    def cuts(self, at: Coordinates) -> dict[int, tuple[tuple[int, int], ...]]:
        """For each dim that axes cut, in order, the stretches of it that a rank holds, in their local order.

        Padding is no part of a stretch: the local tensor's rows past the stretches' are padding. A rank whose
        rows are all padding gets an empty stretch.
        """
        found = {}
        if self.split is not None:
            found[self.split] = self._spans(at)
        if self.experts is not None and at.along(_SHARED)[0] > 1:
            block = self.shape[self.experts] // self.expert_blocks
            starts = range(0, self.shape[self.experts], block)
            found[self.experts] = tuple(
                _own(at, _SHARED, start, block, f"{self.name} ({block} experts)") for start in starts
            )
        return dict(sorted(found.items()))

    def boxes(self, at: Coordinates) -> tuple[Box, ...]:
        """Global boxes that a rank holds: all combinations of its :meth:`cuts`, the last dim's fastest.

        >>> from dsx.parallel.mesh import Mesh
        >>> spec = ParamSpec(name="w", layer=0, shape=(8, 2), init=Init(kind="zeros"), hf=("w",), split=0,
        ...                  parts=(4, 2, 2))
        >>> spec.boxes(Mesh.of(tp=2).at(1))
        (((2, 4), (0, 2)), ((5, 6), (0, 2)), ((7, 8), (0, 2)))
        """
        cuts = self.cuts(at)
        return tuple(product(*(cuts.get(dim, ((0, extent),)) for dim, extent in enumerate(self.shape))))

    def _spans(self, at: Coordinates) -> tuple[tuple[int, int], ...]:
        assert self.split is not None
        extent = self.shape[self.split]
        if self.pad_multiple is not None:
            _, index = at.along(_SPLIT)
            step = self.local_extent(at)
            return ((min(index * step, extent), min((index + 1) * step, extent)),)
        starts = (0, *accumulate(self.parts)) if self.parts else (0,)
        return tuple(
            _own(at, _SPLIT, start, part, f"{self.name} (a block of {part} on dim {self.split})")
            for start, part in zip(starts, self.parts or (extent,), strict=False)
        )


def _own(at: Coordinates, axis: str, start: int, block: int, where: str) -> tuple[int, int]:
    """A rank's stretch of a block from ``start`` on. Raises LayoutError if the axis does not divide it."""
    degree, index = at.along(axis)
    if block % degree:
        kind = "an expert" if axis == _SHARED else "a tensor"
        raise LayoutError(
            where,
            f"it does not divide by {axis} = {degree}",
            f"use {kind}-parallel degree that divides {block}",
        )
    step = block // degree
    return start + index * step, start + (index + 1) * step
