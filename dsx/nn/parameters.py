"""Filling and tagging a layer's parameters from their specs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from dsx.errors import ModelError
from dsx.nn import random
from dsx.nn.parallel import TensorParallel
from dsx.nn.split import WeightGradients
from dsx.spec.param import ParamSpec


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

    def initialise(self, module: nn.Module) -> None:
        """Fill and tag every parameter of ``module``; see :func:`initialise`."""
        initialise(module, self.specs, self.tp, seed=self.seed)


def initialise(module: nn.Module, specs: dict[str, ParamSpec], tp: TensorParallel, *, seed: int = 0) -> None:
    """Give every parameter its layout-independent initial value and its tags.

    The tags are ``dsx_spec``, the :class:`~dsx.spec.param.ParamSpec`, and ``tensor_model_parallel``, which
    DeepSpeed reads (runtime/utils.py, is_model_parallel_parameter): true iff the parameter is cut over tp.

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
