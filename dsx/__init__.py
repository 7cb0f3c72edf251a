"""Train in 3D (tensor x pipeline x ZeRO) with DeepSpeed, from one JSON file.

This is the whole public API. Names are imported on first use: ``import dsx`` loads neither torch nor
DeepSpeed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsx.config.arguments import Arguments, parse_arguments
    from dsx.config.resolve import resolve as load_config
    from dsx.config.run import RunConfig
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
    from dsx.nn.parallel import TensorParallel
    from dsx.plan.choose import Space, choose
    from dsx.plan.profile import Profile
    from dsx.plan.program import Program
    from dsx.runtime import recipe
    from dsx.runtime.data.own import OwnCorpus
    from dsx.runtime.engine import PipelineEngine
    from dsx.runtime.entry import run, world_size
    from dsx.runtime.generation import generate, load_transformers
    from dsx.runtime.groups import Groups
    from dsx.runtime.initialize import initialize
    from dsx.runtime.launch import distributed
    from dsx.runtime.pipeline_module import PipelineModule
    from dsx.runtime.profile import profile_layers
    from dsx.runtime.weights import export_hf
    from dsx.spec.mesh import Mesh
    from dsx.spec.model import ModelSpec
    from dsx.spec.param import ParamSpec
    from dsx.spec.schedule import Schedule
    from dsx.spec.stages import StageMap
    from dsx.terminal import printable

__version__ = "0.1.0"

__all__ = [
    "Arguments",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DsxError",
    "Groups",
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
    "VersionError",
    "__version__",
    "choose",
    "distributed",
    "export_hf",
    "generate",
    "initialize",
    "load_config",
    "load_transformers",
    "parse_arguments",
    "printable",
    "profile_layers",
    "recipe",
    "run",
    "world_size",
]

# Public name -> (module, name there; the module itself if empty). Nothing is imported before it is asked for.
_HOMES = {
    "Arguments": ("dsx.config.arguments", "Arguments"),
    "CheckpointError": ("dsx.errors", "CheckpointError"),
    "ConfigError": ("dsx.errors", "ConfigError"),
    "DataError": ("dsx.errors", "DataError"),
    "DsxError": ("dsx.errors", "DsxError"),
    "LayoutError": ("dsx.errors", "LayoutError"),
    "Mesh": ("dsx.spec.mesh", "Mesh"),
    "ModelError": ("dsx.errors", "ModelError"),
    "ModelSpec": ("dsx.spec.model", "ModelSpec"),
    "OwnCorpus": ("dsx.runtime.data.own", "OwnCorpus"),
    "ParamSpec": ("dsx.spec.param", "ParamSpec"),
    "PipelineEngine": ("dsx.runtime.engine", "PipelineEngine"),
    "PipelineModule": ("dsx.runtime.pipeline_module", "PipelineModule"),
    "Profile": ("dsx.plan.profile", "Profile"),
    "Program": ("dsx.plan.program", "Program"),
    "RunConfig": ("dsx.config.run", "RunConfig"),
    "Schedule": ("dsx.spec.schedule", "Schedule"),
    "RunError": ("dsx.errors", "RunError"),
    "ScheduleError": ("dsx.errors", "ScheduleError"),
    "Space": ("dsx.plan.choose", "Space"),
    "StageMap": ("dsx.spec.stages", "StageMap"),
    "TensorParallel": ("dsx.nn.parallel", "TensorParallel"),
    "VersionError": ("dsx.errors", "VersionError"),
    "Groups": ("dsx.runtime.groups", "Groups"),
    "choose": ("dsx.plan.choose", "choose"),
    "distributed": ("dsx.runtime.launch", "distributed"),
    "export_hf": ("dsx.runtime.weights", "export_hf"),
    "generate": ("dsx.runtime.generation", "generate"),
    "initialize": ("dsx.runtime.initialize", "initialize"),
    "load_config": ("dsx.config.resolve", "resolve"),
    "load_transformers": ("dsx.runtime.generation", "load_transformers"),
    "parse_arguments": ("dsx.config.arguments", "parse_arguments"),
    "printable": ("dsx.terminal", "printable"),
    "profile_layers": ("dsx.runtime.profile", "profile_layers"),
    "recipe": ("dsx.runtime.recipe", ""),
    "run": ("dsx.runtime.entry", "run"),
    "world_size": ("dsx.runtime.entry", "world_size"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dsx' has no attribute {name!r}")
    home, there = _HOMES[name]
    module = import_module(home)
    return getattr(module, there) if there else module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
