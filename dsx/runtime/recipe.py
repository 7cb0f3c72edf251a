"""From a resolved config to an engine: the steps that every recipe on dsx's own models shares."""

from __future__ import annotations

import torch

from dsx.config.run import RunConfig
from dsx.nn import families
from dsx.runtime.engine import PipelineEngine, initialize
from dsx.runtime.groups import Groups
from dsx.runtime.pipeline_module import PipelineModule
from dsx.runtime.weights import load_weights

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model(config: RunConfig, groups: Groups) -> PipelineModule:
    """This rank's layers of the config's model, freshly initialised or read from its Hugging Face folder.

    Fresh weights depend on the seed alone, not on the layout.

    Raises:
        CheckpointError: The folder's weights do not fit the model.
    """
    settings = config.dsx
    layers = families.layers(
        config.model,
        groups.tensor_parallel,
        dtype=_DTYPES[config.precision],
        seed=settings.train.seed,
        recompute=settings.recompute,
        pad_multiple=settings.model.vocab_multiple,
    )
    pipeline = PipelineModule(
        layers,
        loss_fn=families.loss(config.model, groups.tensor_parallel),
        groups=groups,
        stage_map=config.stage_map,
        schedule=config.schedule_name,
        release_outputs=True,
    )
    if config.weights is not None:
        load_weights(pipeline, config.weights)
    return pipeline


def build_engine(config: RunConfig, groups: Groups) -> PipelineEngine:
    """:func:`build_model` under the optimizer, precision, ZeRO stage and schedule of the config."""
    return initialize(model=build_model(config, groups), config=config)[0]
