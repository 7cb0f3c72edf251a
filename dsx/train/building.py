"""From a resolved config to this rank's layers, for runs, and for those who prove, verify and trace them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from deepspeed.accelerator import get_accelerator
from torch import nn

from dsx.config.run import RunConfig
from dsx.engine.pipeline_module import PipelineModule
from dsx.errors import ConfigError
from dsx.models import families
from dsx.nn.parameters import DTYPES
from dsx.nn.split import WeightGradients
from dsx.parallel.groups import Groups


def build_layers(
    config: RunConfig,
    groups: Groups,
    *,
    load_layer: Callable[[int, nn.Module], None] | None = None,
    dynamic_shape: bool = False,
) -> PipelineModule:
    """This rank's layers of the config's model, freshly initialised or read from its Hugging Face folder.

    Fresh weights depend on the seed alone, not on the layout. At ZeRO-3 each layer is partitioned as soon as
    it has its weights.

    ``load_layer`` gives layers their weights, as for :class:`~dsx.PipelineModule`; by default those of the
    config's folder are read, if it has any. ``dynamic_shape``: lengths may differ from micro-batch to
    micro-batch.

    Raises:
        CheckpointError: The folder's weights do not fit the model.
    """
    settings = config.dsx
    split = WeightGradients() if config.program.divides else None
    if settings.recompute == "auto":
        raise ConfigError(
            'dsx.recompute = "auto"',
            "nothing has been measured yet",
            "call dsx.recipe.measure before the model is built",
        )
    layers = families.layers(
        config.model,
        groups.tensor_parallel,
        dtype=DTYPES[config.precision],
        device=get_accelerator().current_device_name(),
        seed=settings.train.seed,
        recompute=settings.recompute,
        pad_multiple=settings.model.vocab_multiple,
        split=split,
        cp=replace(groups.context_parallel, method=settings.parallel.method),
        ep=groups.expert_parallel,
        mlp_tiles=config.mlp_tiles,
    )
    with ExitStack() as files:
        adapter = None if settings.adapter is None else settings.adapter.path
        if config.model.adapter is not None or (load_layer is None and config.weights is not None):
            from dsx.checkpoint.run.export import layer_weights

            made = layer_weights(config.weights, config.model, groups, adapter, given=load_layer)
            load_layer = files.enter_context(made)
        pipeline = PipelineModule(
            layers,
            # The engine drops the logits, so that their memory can take the gradient.
            loss_fn=families.loss(
                config.model,
                groups.tensor_parallel,
                overwrite_logits=True,
                chunk_tokens=config.loss_chunk,
            ),
            groups=groups,
            stage_map=config.stage_map,
            schedule=config.program,
            release_outputs=True,
            shard_transfers=not groups.tensor_parallel.sequence,
            split=split,
            config=config,
            load_layer=load_layer,
            # What blocks are told of pictures, chats without any lack.
            dynamic_shape=dynamic_shape or bool(getattr(config.model, "pictures", "")),
        )
        pipeline.proof = "not: by whoever built it"
        return pipeline
