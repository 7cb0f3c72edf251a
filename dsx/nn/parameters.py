"""Parameters with tags, and with initial values that do not depend on the layout.

The tags are read by the engine, DeepSpeed and checkpoints:

- ``dsx_spec``: the :class:`~dsx.models.param.ParamSpec`, without a name until a pipeline has given the
  parameter its place; None while a parameter waits for :func:`initialise`.
- ``tensor_model_parallel``: whether the parameter is cut over tp (DeepSpeed's runtime/utils.py,
  is_model_parallel_parameter; Megatron's name).
- ``expert_parallel``: whether the parameter has some of a layer's experts, and other ranks the others.
- ``dsx_seed``: what its random values were drawn from; ranks that hold parts of one tensor must agree on it.

A counter-based generator, Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
section 3.2), gives element (row, column) of a parameter its value from (seed, parameter name, row, column)
alone; of more than two dims, all but the last count the rows. So every rank generates just the part that it
holds, and the weights are the same for every tensor- and pipeline-parallel degree.

Shapes: R rows, Q column quads (4 columns share one Philox block), C columns.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dsx.errors import ModelError
from dsx.models.param import PRECISIONS, Box, Init, ParamSpec
from dsx.models.spec import Adapter
from dsx.nn.context import WHOLE, ContextParallel
from dsx.nn.dropout import draw_seed, seeded
from dsx.nn.experts import ALL_EXPERTS, ExpertParallel
from dsx.nn.offload import HostCopies
from dsx.nn.parallel import TensorParallel
from dsx.nn.split import WeightGradients
from dsx.parallel.mesh import Coordinates

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in PRECISIONS.items()}
"""What a run is said to train in -> the dtype of its parameters."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]
"""Four 32-bit words per element, in int64 tensors of one (broadcastable) shape."""

_MASK = 0xFFFFFFFF
_BLOCKS_AT_ONCE = {"cpu": 1 << 14, "cuda": 1 << 20}
"""Philox blocks generated at a time: temporaries of 1.6 MB in a CPU's cache, 100 MB on a GPU."""


def philox_4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10: four random 32-bit words for each counter.

    Args:
        counter: Four 32-bit words per element.
        key: Two 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product of two 32-bit words may overflow int64's sign; its bits are right all the same.
        product_0, product_1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & _MASK) ^ c1 ^ k0,
            product_1 & _MASK,
            ((product_0 >> 32) & _MASK) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def fill(out: Tensor, spec: ParamSpec, at: Coordinates, *, seed: int) -> None:
    """Fill one rank's tensor with its part of the initial value of ``spec``; padding becomes zero.

    Args:
        out: Of shape ``spec.local_shape(at)``, any dtype and device. Overwritten.
        spec: The parameter; its name and ``seed`` choose the values.
        at: Where the rank stands.
        seed: Of the run.
    """
    out = out.detach()
    out.zero_()
    for region, box in regions(out, spec, at):
        if spec.init.kind == "ones":
            region.fill_(1.0)
        elif spec.init.kind in _DRAWN:
            _fill_random(region, box, spec, _key(seed, spec.init.part_of or spec.name))


def regions(out: Tensor, spec: ParamSpec, at: Coordinates) -> Iterator[tuple[Tensor, Box]]:
    """Views of one rank's tensor, each with the global box that it holds; padding is in none of them."""
    views, boxes = [out], spec.boxes(at)
    for dim, spans in spec.cuts(at).items():
        lengths = [hi - lo for lo, hi in spans]
        views = [part for view in views for part in view.narrow(dim, 0, sum(lengths)).split(lengths, dim)]
    yield from zip(views, boxes, strict=True)


@torch.no_grad()
def take_part(out: Tensor, whole: Tensor, spec: ParamSpec, at: Coordinates) -> None:
    """Write one rank's part of a whole tensor into ``out``; padding becomes zero."""
    out.zero_()
    for region, box in regions(out, spec, at):
        region.copy_(whole[tuple(slice(*span) for span in box)])


def _key(seed: int, name: str) -> tuple[int, int]:
    digest = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")
    return digest & _MASK, digest >> 32


def _fill_random(region: Tensor, box: Box, spec: ParamSpec, key: tuple[int, int]) -> None:
    """Random values for the global ``box`` into ``region``, in bounded memory.

    The last dim has the columns, the others count the rows. A cut of a dim in between leaves one stretch of
    rows for each index of the dims before it.
    """
    *lead, columns = box or ((0, 1),)
    lead = lead or [(0, 1)]
    # Up to the last cut dim rows are no one stretch.
    in_part = (span != (0, extent) for span, extent in zip(lead, spec.shape, strict=False))
    cut = max((dim for dim, partly in enumerate(in_part) if partly), default=0)
    below, step = math.prod(spec.shape[cut + 1 : -1]), math.prod(spec.shape[cut:-1])
    low, high = (at * below + spec.init.first_row for at in lead[cut])
    if low >= high or columns[0] >= columns[1]:
        return
    before = product(*(range(*span) for span in lead[:cut]))
    for index, stretch_RC in zip(before, region.flatten(0, cut - 1) if cut else (region,), strict=True):
        number = 0
        for at, extent in zip(index, spec.shape, strict=False):
            number = number * extent + at
        rows = (number * step + low, number * step + high)
        _fill_rows(stretch_RC.view(high - low, columns[1] - columns[0]), rows, columns, spec.init, key)


def _fill_rows(
    region_RC: Tensor, rows: tuple[int, int], columns: tuple[int, int], init: Init, key: tuple[int, int]
) -> None:
    quads = (columns[0] // 4, -(-columns[1] // 4))
    blocks = _BLOCKS_AT_ONCE["cuda" if region_RC.is_cuda else "cpu"]
    wide = min(quads[1] - quads[0], blocks)
    tall = max(1, blocks // wide)
    for row in range(rows[0], rows[1], tall):
        row_end = min(row + tall, rows[1])
        for quad in range(quads[0], quads[1], wide):
            lo, hi = max(4 * quad, columns[0]), min(4 * (quad + wide), columns[1])
            row_R1 = torch.arange(row, row_end, device=region_RC.device)[:, None]
            quad_1Q = torch.arange(quad, min(quad + wide, quads[1]), device=region_RC.device)[None, :]
            words = philox_4x32((quad_1Q & _MASK, quad_1Q >> 32, row_R1 & _MASK, row_R1 >> 32), key)
            target = region_RC[row - rows[0] : row_end - rows[0], lo - columns[0] : hi - columns[0]]
            target.copy_(_DRAWN[init.kind](words)[:, lo - 4 * quad : hi - 4 * quad] * init.std)


def _normal(words: Words) -> Tensor:
    """Standard normal values [R, 4 Q] by Box-Muller.

    In float64: vectorised and scalar code paths differ in the last bits of log and cos, and those must not
    reach the (at most float32) result, or the value of an element would depend on its place in the chunk.
    """
    out = torch.empty(*words[0].shape, 4, dtype=torch.float64, device=words[0].device)
    for pair in (0, 2):
        radius = ((words[pair].double() + 1) * 2.0**-32).log_().mul_(-2).sqrt_()
        angle = words[pair + 1].double() * (2 * math.pi * 2.0**-32)
        out[..., pair] = radius * angle.cos()
        out[..., pair + 1] = radius * angle.sin()
    return out.flatten(1)


def _uniform(words: Words) -> Tensor:
    """Uniform values [R, 4 Q] of mean 0 and deviation 1, in float64."""
    return (torch.stack(words, dim=-1).double() + 0.5).mul_(2.0**-31).sub_(1).mul_(math.sqrt(3)).flatten(1)


_DRAWN: dict[str, Callable[[Words], Tensor]] = {"normal": _normal, "uniform": _uniform}


Initialiser: TypeAlias = Init | Callable[[Tensor], object]
"""How a fresh parameter is filled: by :class:`~dsx.models.param.Init`, or by a function that fills the whole
(global) tensor in place, as those of ``torch.nn.init`` do, or returns it."""

NORMAL = Init(kind="normal", std=0.02)
"""For matrices and tables, as in GPT-2 and Llama (transformers' ``initializer_range``)."""
ZEROS, ONES = Init(kind="zeros"), Init(kind="ones")
"""For biases, and for the weights of norms."""


def own_dtype(spec: ParamSpec | None, dtype: torch.dtype) -> torch.dtype:
    """A parameter's dtype in a run whose weights are of ``dtype``; that itself without a spec."""
    return torch.float32 if spec is not None and str(dtype).removeprefix("torch.") in spec.float32 else dtype


def stays_float32(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Whether it is float32 beside weights of ``dtype``, as its family has it."""
    own = own_dtype(getattr(parameter, "dsx_spec", None), dtype)
    return parameter.dtype == torch.float32 == own and dtype != own


def is_of_tower(parameter: nn.Parameter) -> bool:
    """Whether it is of the tower of pictures, which the head does not use where it is the word embedding."""
    spec = getattr(parameter, "dsx_spec", None)
    return spec is not None and spec.tower


def fresh_parameter(
    shape: tuple[int, ...],
    tp: TensorParallel,
    init: Initialiser | None,
    *,
    split: int | None = None,
    parts: tuple[int, ...] = (),
    pad_multiple: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """This rank's part of a new parameter, with values and tags.

    Random values take one number from torch's default CPU generator, whatever the layout, and come from a
    generator of their own, which gives an element its value by its place in the whole tensor. So the whole
    tensor is the same for every tensor-parallel degree, if the ranks' CPU generators stand alike.

    Args:
        shape: Of the whole tensor.
        tp: The tensor-parallel ranks.
        init: The initial values. A function is given the whole tensor for a moment, on every rank. None
            leaves the values to :func:`initialise`.
        split: Dim that is cut over the ranks; None gives the whole to each.
        parts: As in :class:`~dsx.models.param.ParamSpec`.
        pad_multiple: Likewise. Padding is zero.
        dtype: Of the parameter.
        device: Of the parameter; ``meta`` leaves it without values.
    """
    spec = ParamSpec(
        name="",
        layer=0,
        shape=shape,
        init=init if isinstance(init, Init) else ZEROS,
        hf=("",),
        split=split,
        parts=parts,
        pad_multiple=pad_multiple,
    )
    parameter: Any = nn.Parameter(torch.empty(spec.local_shape(tp.at), dtype=dtype, device=device))
    parameter.tensor_model_parallel = split is not None and tp.size > 1
    parameter.dsx_spec = None if init is None else spec
    if init is not None and parameter.device.type != "meta":
        if not isinstance(init, Init) or init.kind in _DRAWN:
            parameter.dsx_seed = draw_seed(tp, sharded=False)
        seed = getattr(parameter, "dsx_seed", 0)
        if isinstance(init, Init):
            fill(parameter, spec, tp.at, seed=seed)
        else:
            whole = torch.zeros(spec.shape, dtype=parameter.dtype, device=parameter.device)
            with torch.no_grad(), seeded(parameter.device, seed):
                given = init(whole)
            if isinstance(given, Tensor) and given.shape == whole.shape:
                whole = given
            take_part(parameter, whole, spec, tp.at)
    filled: nn.Parameter = parameter
    return filled


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a layer needs beside the architecture: where its weights come from, and in which form.

    Attributes:
        specs: The layer's parameters by path inside the layer's module (``attention.qkv.weight``).
        device: Of the parameters; ``meta`` leaves them without values.
        split: Takes weight gradients while it defers; None never splits the backward.
        adapter: The model's adapter, if it has one.
        cp: The ranks that share a sequence.
        ep: The ranks that hold the experts of a layer together.
        mlp_tiles: Parts of a sequence that a block's feed-forward computes one after the other.
        host: Takes the inputs of recomputed blocks to the host; None leaves them on the device.
    """

    specs: dict[str, ParamSpec]
    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device | str | None = None
    seed: int = 0
    split: WeightGradients | None = None
    adapter: Adapter | None = None
    cp: ContextParallel = WHOLE
    ep: ExpertParallel = ALL_EXPERTS
    mlp_tiles: int = 1
    host: HostCopies | None = None

    @property
    def at(self) -> Coordinates:
        """Where this rank stands on the axes that cut a layer's parameters."""
        return self.tp.at.beside(self.ep.at)

    @property
    def form(self) -> dict[str, Any]:
        """Keyword arguments of the modules whose parameters :meth:`initialise` fills."""
        return {"dtype": self.dtype, "device": self.device, "split": self.split}

    def initialise(self, module: nn.Module) -> None:
        """Fill and tag every parameter of ``module``, its adapters' too; see :func:`initialise`."""
        if self.adapter is None:
            initialise(module, self.specs, self.tp, seed=self.seed, at=self.at)
            return
        from dsx.nn.adapter import attach, begin  # here: other models need nothing of it

        attach(module, self.specs, self.adapter, self.tp, self.split, self.at)
        initialise(module, self.specs, self.tp, seed=self.seed, at=self.at)
        begin(module)


def initialise(
    module: nn.Module,
    specs: dict[str, ParamSpec],
    tp: TensorParallel,
    *,
    seed: int = 0,
    at: Coordinates | None = None,
) -> None:
    """Give every parameter its layout-independent initial value, by its name, and its tags.

    Args:
        module: A layer.
        specs: Its parameters by path inside it.
        tp: The tensor-parallel ranks.
        seed: Chooses the values, together with each spec's name.
        at: Where this rank stands, if other axes cut parameters too.

    Raises:
        ModelError: A parameter without a spec, a spec without a parameter, or a shape that differs.
    """
    at, parameters = at or tp.at, dict(module.named_parameters())
    if parameters.keys() != specs.keys():
        raise ModelError(
            f"parameters of {type(module).__name__}",
            f"the module has {sorted(parameters.keys() - specs.keys())} too many and lacks "
            f"{sorted(specs.keys() - parameters.keys())}",
            "make the module and its ParamSpecs agree",
        )
    for path, parameter in parameters.items():
        spec = specs[path]
        if tuple(parameter.shape) != spec.local_shape(at):
            raise ModelError(
                spec.name,
                f"the module holds {tuple(parameter.shape)}, the spec says {spec.local_shape(at)}",
                "make the module and its ParamSpec agree",
            )
        if parameter.device.type != "meta":
            fill(parameter, spec, at, seed=seed)
        parameter.dsx_spec = spec  # type: ignore[attr-defined]  # a tag, read by engine and checkpoints
        parameter.tensor_model_parallel = spec.split is not None and at.along("tp")[0] > 1  # type: ignore[attr-defined]  # as above
        parameter.expert_parallel = spec.experts is not None and at.along("ep")[0] > 1  # type: ignore[attr-defined]  # as above
        if not spec.trained:
            parameter.requires_grad_(False)
