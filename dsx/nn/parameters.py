"""Parameters that are filled and tagged: by themselves, or a layer's from their specs.

The tags are read by the engine, DeepSpeed and checkpoints:

- ``dsx_spec``: the :class:`~dsx.spec.param.ParamSpec`, without a name until a pipeline has given the
  parameter its place; None while a parameter waits for :func:`initialise`.
- ``tensor_model_parallel``: whether the parameter is cut over tp (DeepSpeed's runtime/utils.py,
  is_model_parallel_parameter; Megatron's name).
- ``dsx_seed``: what its random values were drawn from; ranks that hold parts of one tensor must agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dsx.errors import ModelError
from dsx.nn import random
from dsx.nn.dropout import draw_seed, seeded
from dsx.nn.parallel import TensorParallel
from dsx.nn.split import WeightGradients
from dsx.spec.param import Init, ParamSpec

Initialiser: TypeAlias = Init | Callable[[Tensor], object]
"""How a fresh parameter is filled: by :class:`~dsx.spec.param.Init`, or by a function that fills the whole
(global) tensor in place, as those of ``torch.nn.init`` do, or returns it."""

NORMAL = Init(kind="normal", std=0.02)
"""Of matrices and tables, as GPT-2's and Llama's (transformers' ``initializer_range``)."""
ZEROS, ONES = Init(kind="zeros"), Init(kind="ones")
"""Of biases; of the weights of norms."""


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
        init: Its values. A function is given the whole tensor, on every rank, for a moment. None leaves the
            part without values, for :func:`initialise`.
        split: Dim that is cut over the ranks; None gives the whole to each.
        parts: As :class:`~dsx.spec.param.ParamSpec` has them.
        pad_multiple: As there. Padding is zero.
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
    parameter: Any = nn.Parameter(torch.empty(spec.local_shape(tp.size), dtype=dtype, device=device))
    parameter.tensor_model_parallel = split is not None and tp.size > 1
    parameter.dsx_spec = None if init is None else spec
    if init is not None and parameter.device.type != "meta":
        if not isinstance(init, Init) or init.kind == "normal":
            parameter.dsx_seed = draw_seed(tp, sharded=False)
        _fill(parameter, spec, init, tp)
    filled: nn.Parameter = parameter
    return filled


@torch.no_grad()
def _fill(parameter: Any, spec: ParamSpec, init: Initialiser, tp: TensorParallel) -> None:
    seed = getattr(parameter, "dsx_seed", 0)
    if isinstance(init, Init):
        random.fill(parameter, spec, tp=tp.size, tp_rank=tp.rank, seed=seed)
        return
    whole = torch.zeros(spec.shape, dtype=parameter.dtype, device=parameter.device)
    with seeded(parameter.device, seed):
        given = init(whole)
    if isinstance(given, Tensor) and given.shape == whole.shape:
        whole = given
    parameter.zero_()
    for region, box in random.regions(parameter, spec, tp=tp.size, tp_rank=tp.rank):
        region.copy_(whole[tuple(slice(*span) for span in box)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Where a layer's weights come from, and in which form: what a layer needs beside the architecture.

    Attributes:
        specs: The layer's parameters by path inside the layer's module (``attention.qkv.weight``).
        tp: The tensor-parallel ranks.
        dtype: Of the parameters.
        device: Of the parameters; ``meta`` leaves them without values.
        seed: Of the initial values.
        split: Takes weight gradients while it defers; None never splits the backward.
    """

    specs: dict[str, ParamSpec]
    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device | str | None = None
    seed: int = 0
    split: WeightGradients | None = None

    @classmethod
    def of_layer(
        cls,
        specs: Iterable[ParamSpec],
        tp: TensorParallel,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        seed: int = 0,
        split: WeightGradients | None = None,
    ) -> Weights:
        """Weights of one layer from its specs, whose names start with the layer's index."""
        paths = {spec.name.split(".", 1)[1]: spec for spec in specs}
        return cls(specs=paths, tp=tp, dtype=dtype, device=device, seed=seed, split=split)

    @property
    def form(self) -> dict[str, Any]:
        """Keywords of the modules, whose parameters :meth:`initialise` fills."""
        return {"dtype": self.dtype, "device": self.device, "split": self.split}

    def initialise(self, module: nn.Module) -> None:
        """Fill and tag every parameter of ``module``; see :func:`initialise`."""
        initialise(module, self.specs, self.tp, seed=self.seed)


def initialise(module: nn.Module, specs: dict[str, ParamSpec], tp: TensorParallel, *, seed: int = 0) -> None:
    """Give every parameter its layout-independent initial value, by its name, and its tags.

    Args:
        module: A layer.
        specs: Its parameters by path inside it.
        tp: The tensor-parallel ranks.
        seed: Chooses the values, together with each spec's name.

    Raises:
        ModelError: A parameter without a spec, a spec without a parameter, or a shape that differs.
    """
    parameters = dict(module.named_parameters())
    if parameters.keys() != specs.keys():
        raise ModelError(
            f"parameters of {type(module).__name__}",
            f"the module has {sorted(parameters.keys() - specs.keys())} too many and lacks "
            f"{sorted(specs.keys() - parameters.keys())}",
            "make the module and its ParamSpecs agree",
        )
    for path, parameter in parameters.items():
        spec = specs[path]
        if tuple(parameter.shape) != spec.local_shape(tp.size):
            raise ModelError(
                spec.name,
                f"the module holds {tuple(parameter.shape)}, the spec says {spec.local_shape(tp.size)}",
                "make the module and its ParamSpec agree",
            )
        if parameter.device.type != "meta":
            random.fill(parameter, spec, tp=tp.size, tp_rank=tp.rank, seed=seed)
        parameter.dsx_spec = spec  # type: ignore[attr-defined]  # a tag, read by engine and checkpoints
        parameter.tensor_model_parallel = spec.split is not None and tp.size > 1  # type: ignore[attr-defined]  # as above
