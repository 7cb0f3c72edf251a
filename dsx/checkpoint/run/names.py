"""A run as checkpoints see it, and the logical (global) tensors of which its parameters are parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from dsx.config.run import RunConfig
from dsx.errors import ModelError
from dsx.models.param import ParamSpec
from dsx.models.params import stored_specs
from dsx.parallel.groups import Groups


class CheckpointedRun(Protocol):
    """What saving and loading ask of a run; :class:`dsx.PipelineEngine` is one.

    Attributes:
        deepspeed_engine: The DeepSpeedEngine, with optimizer, scheduler and counters.
        run_config: The resolved dsx config, if there is one.
        outer: The steps that islands take together, if there are islands.
    """

    groups: Groups
    pipeline: Any
    deepspeed_engine: Any
    run_config: RunConfig | None
    outer: Any


class Names:
    """Logical tensors of a rank's parameters and buffers.

    Of a layer that is not dsx's, tensor-parallel ranks hold the same, unless it marks a parameter as cut
    (``tensor_model_parallel``). A marked one is cut in an unknown way: each rank's is a tensor of its own,
    which only the same tensor-parallel degree can load.
    """

    def __init__(self, run: CheckpointedRun) -> None:
        self._groups = run.groups
        self._names: dict[int, str] = {}
        self._chunks = run.pipeline.chunks
        for name, parameter in self._chunks.named_parameters():
            self._names.setdefault(id(parameter), name)
        config = run.run_config
        stored = () if config is None else stored_specs(config.model)
        self._buffers = {spec.name: spec for spec in stored if spec.buffer}

    def of(self, parameter: nn.Parameter) -> ParamSpec:
        spec = getattr(parameter, "dsx_spec", None)
        if isinstance(spec, ParamSpec):
            return spec
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        return self.local(self._names[id(parameter)], shape, parameter)

    def buffers(self) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Every buffer that its module's state dict has, with its logical tensor."""
        kept = self._chunks.state_dict(keep_vars=True)
        for name, buffer in self._chunks.named_buffers():
            if name in kept:
                yield self._buffers.get(name) or self.local(name, tuple(buffer.shape), buffer), buffer

    def local(self, name: str, shape: tuple[int, ...], tensor: torch.Tensor) -> ParamSpec:
        """A tensor that is whole as it is."""
        cut = self._groups.mesh.tp > 1 and getattr(tensor, "tensor_model_parallel", False)
        return ParamSpec.uncut(f"{name}@tp{self._groups.tp_rank}" if cut else name, shape)


def specs_here(run: CheckpointedRun) -> list[ParamSpec]:
    """The logical tensors of this rank's parameters, in the order of the model."""
    names = Names(run)
    return [names.of(parameter) for parameter in run.pipeline.chunks.parameters()]


def is_cut(spec: ParamSpec) -> bool:
    """Whether tensor-parallel ranks hold different parts of a tensor that :class:`Names` has named."""
    return spec.split is not None or "@tp" in spec.name


def spec_of(parameter: nn.Parameter) -> ParamSpec:
    """The logical tensor that ``parameter`` is a part of. Raises ModelError for layers that are not dsx's."""
    spec = getattr(parameter, "dsx_spec", None)
    if not isinstance(spec, ParamSpec):
        raise ModelError(
            f"parameter of shape {tuple(parameter.shape)}",
            "it has no logical description, so that it cannot be read or written by name",
            "use dsx's own model families for Hugging Face weights",
        )
    return spec
