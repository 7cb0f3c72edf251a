"""The DeepSpeed config that the engine is built with: the user's, less what cannot work under a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.config.batch import TRAIN, resolve_batch
from dsx.config.deepspeed import offloads_optimizer, pipeline_problems, precision, zero_stage
from dsx.config.load import raise_all, read, refuse_hidden
from dsx.config.refusals import is_number
from dsx.config.run import RunConfig
from dsx.config.wording import at
from dsx.errors import ConfigError
from dsx.parallel.mesh import Mesh

Config = RunConfig | Mapping[str, Any] | str | Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that :func:`dsx.initialize` makes of a config."""

    deepspeed: dict[str, Any]
    zero_stage: int
    clipping: float


def settings_of(config: Config | None, args: Any, mesh: Mesh) -> Settings:
    """Read a config, refuse what a pipeline cannot do, and turn off what dsx does itself.

    Without a ``config``, the ``deepspeed_config`` of ``args`` is it, as in DeepSpeed.

    Raises:
        ConfigError: None given, or a setting that cannot work.
    """
    source = getattr(args, "deepspeed_config", None) if config is None else config
    if source is None:
        raise ConfigError(
            "dsx.initialize(config=None)",
            "there is no config",
            "pass config=, or args with a deepspeed_config",
        )
    if isinstance(source, RunConfig):
        deepspeed = copy.deepcopy(dict(source.deepspeed))
    else:
        deepspeed = copy.deepcopy(dict(source)) if isinstance(source, Mapping) else read(Path(source))
    refuse_hidden(deepspeed, "config")
    _refuse(deepspeed, mesh)
    if mesh.num_replicas != mesh.num_shares:
        # DeepSpeed takes each of data x context for a reader of samples of its own.
        batch = resolve_batch(deepspeed, mesh.num_shares, mesh.cp)
        if deepspeed.get(TRAIN) is not None:
            deepspeed[TRAIN] = batch.train * mesh.num_replicas // mesh.num_shares
    stage, clipping = zero_stage(deepspeed), deepspeed.get("gradient_clipping", 1.0)
    if stage == 0 and precision(deepspeed) == "fp32":
        deepspeed["gradient_clipping"] = 0.0  # clipped by ReplicatedAdapter, by the whole model's norm
    zero = deepspeed.get("zero_optimization", {})
    # With the boundary managed by backward calls, only the chunk of the last one would reach the CPU where
    # DeepSpeed reduces. Else the executor manages it, whatever the config says (engine/zero/__init__.py,
    # _reduction): a step is one train_batch either way.
    deepspeed["managed_gradient_accumulation"] = not offloads_optimizer(deepspeed)
    if stage in (1, 2):
        # dsx's own reductions run beside the computation as they are (engine/zero/reduction.py). Where
        # DeepSpeed reduces (Muon, ZeRO-2 after each micro-batch), ZeRO-1 would reduce only the chunk of
        # the last backward, and both would wait for the whole device at each reduction, transfers included
        # (stage_1_and_2.py:1028). Stock pipelines turn it off as well.
        zero["overlap_comm"] = False
    # It waits for the whole device at each forward (utils/timer.py, ThroughputTimer), and takes a step to
    # last from the last forward on.
    timers = deepspeed.get("timers", {})
    deepspeed["timers"] = {**timers, "throughput": {**timers.get("throughput", {}), "enabled": False}}
    return Settings(deepspeed=deepspeed, zero_stage=stage, clipping=float(clipping))


def _refuse(config: Mapping[str, Any], mesh: Mesh) -> None:
    """Raise ConfigError for what DeepSpeed would take, or ignore, and a pipeline at this mesh cannot do."""
    if "dsx" in config:
        raise ConfigError(
            'config["dsx"]',
            "dsx.initialize takes a resolved config when there is a dsx block",
            "pass dsx.load_config(path) instead of the dict or path",
        )
    for key in ("zero_optimization", "bf16", "bfloat16", "fp16", "pipeline", "torch_autocast", "timers"):
        if not isinstance(config.get(key, {}), Mapping):
            raise ConfigError(at(key, config[key]), "it must be an object", f'write "{key}": {{...}}')
    clipping = config.get("gradient_clipping", 1.0)
    if not is_number(clipping) or clipping < 0:
        fix = "use a positive number, or 0 for none"
        raise ConfigError(at("gradient_clipping", clipping), "not a norm", fix)
    raise_all("config", pipeline_problems(config, mesh))
