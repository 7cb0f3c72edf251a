"""Partitions layers for ZeRO-3 while they are built, each before the next one is made.

DeepSpeed partitions a model that is there already, or, under ``deepspeed.zero.Init``, each submodule as its
``__init__`` returns. The first needs the memory of the whole model. The second partitions over all ranks,
which in a pipeline hold different layers, and draws initial values in the low precision. Here a layer is
built as it always is, and what DeepSpeed's engine would do to its parameters before it partitions them is
done at once: they are cast, moved to the device and taken from the first data-parallel rank. The engine then
finds a partitioned model, and leaves all of that out (deepspeed/runtime/engine.py,
_configure_distributed_model and _broadcast_model).
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import CASTABLE_DTYPES
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from dsx.config.deepspeed import precision
from dsx.engine.settings import Settings
from dsx.engine.zero import require_supported
from dsx.engine.zero.experts import place
from dsx.errors import ConfigError, ModelError
from dsx.nn.parameters import DTYPES, own_dtype
from dsx.parallel.groups import Grid, Groups


class LayerPartitioner:
    """Partitions layers over the data-parallel ranks, one by one. Collective over those ranks.

    Args:
        init: DeepSpeed's ``zero.Init``, set up for those ranks and never entered.
    """

    def __init__(self, init: Any, groups: Groups) -> None:
        self._init, self._groups = init, groups

    @classmethod
    def of_settings(cls, settings: Settings, groups: Groups) -> LayerPartitioner | None:
        """The partitioner for a config; None below ZeRO-3. Raises VersionError."""
        if settings.zero_stage != 3:
            return None
        require_supported()
        # As deepspeed.initialize does: DeepSpeed takes over torch's process group.
        backend = get_accelerator().communication_backend_name()
        dist.init_distributed(backend, dist_init_required=False, verbose=False)
        return cls(
            Init(
                module=nn.Module(),  # nothing to partition yet, but DeepSpeed's linear takes torch's place
                data_parallel_group=groups.data,
                config_dict_or_path=copy.deepcopy(settings.deepspeed),
                mpu=Grid(groups, replicas=True),
                zero_param_parallel_group=deepspeed_groups._get_zero_param_intra_parallel_group(),  # noqa: SLF001
            ),
            groups,
        )

    @classmethod
    def of_context(cls, groups: Groups) -> LayerPartitioner | None:
        """The partitioner for the surrounding ``deepspeed.zero.Init``, but over data parallelism; or None."""
        context = partition_parameters.top_level_context
        if context is None:
            return None
        require_supported()
        init = copy.copy(context)
        init.ds_process_group = groups.data
        init.rank = init.rank_in_group = dist.get_rank(group=groups.data)
        init.dp_world_size = init.num_ranks_in_param_group = dist.get_world_size(group=groups.data)
        return cls(init, groups)

    def partition(self, layer: nn.Module) -> None:
        """Keep this rank's part of each parameter, and put a stand-in in the parameter's place."""
        # ``low`` is the dtype that the engine would cast to; None in fp32, which leaves layers as built.
        init, low = self._init, None if self._init.dtype == torch.float32 else self._init.dtype
        place(layer.parameters(), self._groups)
        for parameter in layer.parameters():
            if hasattr(parameter, "ds_id"):
                continue
            if low is not None and parameter.dtype in CASTABLE_DTYPES:
                own = own_dtype(getattr(parameter, "dsx_spec", None), low)
                parameter.data = parameter.data.to(init.local_device).to(own)
            init._convert_to_zero_parameters([parameter])  # noqa: SLF001 (moves, broadcasts and cuts)
            self.stand_in([parameter])

    @staticmethod
    def stand_in(parameters: Iterable[Any]) -> None:
        """Replace a partitioned parameter's values by one number that has the whole's shape.

        So code that groups parameters by their shape before :func:`dsx.initialize` finds the shape, code that
        reads values finds NaN, and writing to them is noticed. DeepSpeed leaves an empty tensor, with which
        all of that goes wrong in silence.
        """
        for parameter in parameters:
            parameter.data = parameter.data.new_full((), torch.nan).expand(parameter.ds_shape)

    @staticmethod
    def hand_over(module: nn.Module) -> None:
        """Leave an empty tensor, as DeepSpeed does: an optimizer may make states in the shape that it finds.

        Raises:
            ModelError: A parameter was written to after it had been partitioned.
        """
        for name, parameter in module.named_parameters():
            stands_in = parameter.numel() > 0  # not so after the user's own GatheredParameters
            if stands_in and not bool(parameter.detach().as_strided((1,), (1,)).isnan().all()):
                raise ModelError(
                    f"parameter {name}",
                    "it was written to after it had been partitioned, which would be lost",
                    "load weights with dsx.PipelineModule(load_layer=), or under "
                    "deepspeed.zero.GatheredParameters(..., modifier_rank=0)",
                )
            parameter.data = parameter.data.new_empty(0)

    def require(self, settings: Settings) -> None:
        """Refuse a config that would have partitioned the layers in another way. Raises ConfigError."""
        mine = {
            "ZeRO stage": 3,
            "precision": next(name for name, dtype in DTYPES.items() if dtype == self._init.dtype),
            "offload_param.device": _name(self._init.remote_device),
        }
        zero = settings.deepspeed.get("zero_optimization") or {}
        theirs = {
            "ZeRO stage": settings.zero_stage,
            "precision": precision(settings.deepspeed),
            "offload_param.device": _name((zero.get("offload_param") or {}).get("device")),
        }
        for what, built in mine.items():
            if built != theirs[what]:
                raise ConfigError(
                    f"dsx.initialize: {what} = {theirs[what]}",
                    f"the layers were partitioned as they were built, for {what} = {built}",
                    "give dsx.PipelineModule (or the deepspeed.zero.Init around it) the same config",
                )


@contextmanager
def outside_of_init() -> Iterator[None]:
    """Inside the block, modules are built as if there were no ``deepspeed.zero.Init`` around."""
    partition_parameters.shutdown_init_context()
    try:
        yield
    finally:
        partition_parameters.restore_init_context()


@contextmanager
def without_a_trace() -> Iterator[None]:
    """Inside the block, what ZeRO-3 cuts neither counts for models that are made after it, nor stays alive.

    DeepSpeed numbers parameters, and adds up those that it keeps whole, by class (partition_parameters.py,
    Init.param_id and Init.num_persisted_elements), and keeps the module whose forward came last
    (parameter_offload.py, FWD_MODULE_STACK).
    """
    counts = {name: getattr(Init, name) for name in _COUNTS}
    modules = [*parameter_offload.FWD_MODULE_STACK]
    thaws = gc.get_freeze_count() == 0
    if thaws:
        gc.freeze()  # what is there now, a million objects of libraries, need not be looked at below
    try:
        yield
    finally:
        parameter_offload.FWD_MODULE_STACK[:] = modules
        gc.collect()  # an engine is full of cycles
        if thaws:
            gc.unfreeze()
        for name, count in counts.items():
            setattr(Init, name, count)


_COUNTS = ("param_id", "num_persisted_parameters", "num_persisted_elements")


def _name(device: Any) -> str:
    """``cpu`` or ``nvme``; "none" for the device that computes."""
    if isinstance(device, OffloadDeviceEnum):
        return str(device.value)
    return device if isinstance(device, str) and device in ("cpu", "nvme") else "none"
