"""Train in 3D (tensor x pipeline x ZeRO) with DeepSpeed, from one JSON file.

This is the whole public API. Names are imported on first use: ``import dsx`` loads neither torch nor
DeepSpeed.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsx.checkpoint.run.export import export_hf
    from dsx.config.resolve import resolve as load_config
    from dsx.config.run import RunConfig
    from dsx.data.own import OwnCorpus
    from dsx.engine.engine import PipelineEngine
    from dsx.engine.initialize import initialize
    from dsx.engine.pipeline_module import PipelineModule
    from dsx.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DsxError,
        LayoutError,
        ModelError,
        RunError,
        ScheduleError,
        VersionError,
    )
    from dsx.launch.entry import Arguments, parse_arguments, rank, run, world_size
    from dsx.launch.processes import distributed
    from dsx.memory.layer_list import LayerList, estimate_layers
    from dsx.models.param import ParamSpec
    from dsx.models.spec import ModelSpec
    from dsx.nn.parallel import TensorParallel
    from dsx.parallel.groups import Groups
    from dsx.parallel.mesh import Mesh
    from dsx.parallel.stages import StageMap
    from dsx.planner.choose import choose
    from dsx.planner.layout import Space
    from dsx.planner.own_layers import plan_layers
    from dsx.planner.profile import Profile
    from dsx.planner.profiler import profile_layers
    from dsx.schedules.program import Program
    from dsx.schedules.schedule import Schedule
    from dsx.terminal import printable
    from dsx.train import recipe
    from dsx.train.generation import generate, load_transformers
    from dsx.trainer.trainer import Trainer
    from dsx.verify.small_step import prove_layers as prove

__version__ = "0.1.0"

__all__ = [
    "Arguments",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DsxError",
    "Groups",
    "LayerList",
    "LayoutError",
    "Mesh",
    "ModelError",
    "ModelSpec",
    "OwnCorpus",
    "ParamSpec",
    "PipelineEngine",
    "PipelineModule",
    "Profile",
    "Program",
    "RunConfig",
    "RunError",
    "Schedule",
    "ScheduleError",
    "Space",
    "StageMap",
    "TensorParallel",
    "Trainer",
    "VersionError",
    "__version__",
    "choose",
    "distributed",
    "estimate_layers",
    "export_hf",
    "generate",
    "initialize",
    "load_config",
    "load_transformers",
    "parse_arguments",
    "plan_layers",
    "printable",
    "profile_layers",
    "prove",
    "rank",
    "recipe",
    "run",
    "world_size",
]

# Public name -> (module, name there; the module itself if empty). Nothing is imported before it is asked for.
_HOMES = {
    "Arguments": ("dsx.launch.entry", "Arguments"),
    "CheckpointError": ("dsx.errors", "CheckpointError"),
    "ConfigError": ("dsx.errors", "ConfigError"),
    "DataError": ("dsx.errors", "DataError"),
    "DsxError": ("dsx.errors", "DsxError"),
    "LayerList": ("dsx.memory.layer_list", "LayerList"),
    "LayoutError": ("dsx.errors", "LayoutError"),
    "Mesh": ("dsx.parallel.mesh", "Mesh"),
    "ModelError": ("dsx.errors", "ModelError"),
    "ModelSpec": ("dsx.models.spec", "ModelSpec"),
    "OwnCorpus": ("dsx.data.own", "OwnCorpus"),
    "ParamSpec": ("dsx.models.param", "ParamSpec"),
    "PipelineEngine": ("dsx.engine.engine", "PipelineEngine"),
    "PipelineModule": ("dsx.engine.pipeline_module", "PipelineModule"),
    "Profile": ("dsx.planner.profile", "Profile"),
    "Program": ("dsx.schedules.program", "Program"),
    "RunConfig": ("dsx.config.run", "RunConfig"),
    "Schedule": ("dsx.schedules.schedule", "Schedule"),
    "RunError": ("dsx.errors", "RunError"),
    "ScheduleError": ("dsx.errors", "ScheduleError"),
    "Space": ("dsx.planner.layout", "Space"),
    "StageMap": ("dsx.parallel.stages", "StageMap"),
    "TensorParallel": ("dsx.nn.parallel", "TensorParallel"),
    "Trainer": ("dsx.trainer.trainer", "Trainer"),
    "VersionError": ("dsx.errors", "VersionError"),
    "Groups": ("dsx.parallel.groups", "Groups"),
    "choose": ("dsx.planner.choose", "choose"),
    "distributed": ("dsx.launch.processes", "distributed"),
    "estimate_layers": ("dsx.memory.layer_list", "estimate_layers"),
    "export_hf": ("dsx.checkpoint.run.export", "export_hf"),
    "generate": ("dsx.train.generation", "generate"),
    "initialize": ("dsx.engine.initialize", "initialize"),
    "load_config": ("dsx.config.resolve", "resolve"),
    "load_transformers": ("dsx.train.generation", "load_transformers"),
    "parse_arguments": ("dsx.launch.entry", "parse_arguments"),
    "plan_layers": ("dsx.planner.own_layers", "plan_layers"),
    "printable": ("dsx.terminal", "printable"),
    "profile_layers": ("dsx.planner.profiler", "profile_layers"),
    "prove": ("dsx.verify.small_step", "prove_layers"),
    "rank": ("dsx.launch.entry", "rank"),
    "recipe": ("dsx.train.recipe", ""),
    "run": ("dsx.launch.entry", "run"),
    "world_size": ("dsx.launch.entry", "world_size"),
}


if "LOCAL_RANK" in os.environ:  # a launcher's process, whose next imports take seconds
    import_module("dsx.launch.entry").say_loading()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dsx' has no attribute {name!r}")
    home, there = _HOMES[name]
    module = import_module(home)
    return getattr(module, there) if there else module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
