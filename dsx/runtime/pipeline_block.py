"""DeepSpeed's ``pipeline`` block of a config, applied to layers that are built already.

Its keys are those of deepspeed/runtime/config.py (get_pipeline_config), and ``use_reentrant``, which
deepspeed/runtime/pipe/engine.py reads besides. Stock DeepSpeed reads neither ``stages`` nor ``partition`` nor
``seed_layers``, nor any key that it does not know, and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from deepspeed import checkpointing
from deepspeed.pipe import LayerSpec

from dsx.config.wording import suggest
from dsx.errors import ConfigError
from dsx.runtime.recompute import checkpoint_non_reentrant
from dsx.runtime.shards import Shards

if TYPE_CHECKING:
    from dsx.runtime.pipeline_module import PipelineModule


def apply_block(block: Mapping[str, Any], model: PipelineModule, zero_stage: int) -> None:
    """Do to ``model`` what the block asks for.

    Raises:
        ConfigError: A key that is unknown, or a value that is wrong or that contradicts the layers as built.
    """
    keys: dict[str, Callable[[Any], None]] = {
        "stages": lambda value: _stages(model, value),
        "partition": lambda value: _partition(model, value),
        "seed_layers": lambda value: _seed_layers(model, value),
        "activation_checkpoint_interval": lambda value: _interval(model, value),
        "use_reentrant": lambda value: _reentrant(model, value, zero_stage),
        "pipe_partitioned": _boolean("pipe_partitioned"),
        "grad_partitioned": _boolean("grad_partitioned"),
    }
    for key in block:
        if key not in keys:
            raise ConfigError(f"pipeline.{key}", "no such key", suggest(key, keys))
    for key, value in block.items():
        keys[key](value)
    if "pipe_partitioned" in block or "grad_partitioned" in block:
        _shards(model, block)


def _refuse(key: str, value: Any, what: str, fix: str) -> None:
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    raise ConfigError(f"pipeline.{key} = {shown}", what, fix)


def _boolean(key: str) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not isinstance(value, bool):
            _refuse(key, value, "not a boolean", "use true or false")

    return check


def _stages(model: PipelineModule, value: Any) -> None:
    if value not in ("auto", model.num_stages):
        what = f"the layers are cut over {model.num_stages} pipeline ranks"
        _refuse("stages", value, what, 'leave it out, or write "auto": PipelineModule(num_stages=) says it')


def _partition(model: PipelineModule, value: Any) -> None:
    given = model.partition_method
    same = isinstance(value, str) and isinstance(given, str) and value.lower() == given.lower()
    if value == "best" or same:
        return
    what = f"the layers are cut already, by partition_method = {given!r}"
    _refuse("partition", value, what, "leave it out; PipelineModule(partition_method=) says it")


def _seed_layers(model: PipelineModule, value: Any) -> None:
    _boolean("seed_layers")(value)
    if value == model.seed_layers:
        return
    if not value:
        what = "PipelineModule has seed_layers=True"
        _refuse("seed_layers", value, what, "leave it out, or say the same in both places")
    if any(isinstance(layer, LayerSpec) for layer in model.layer_specs):
        what = "the layers of the LayerSpecs were built, unseeded, before this config is read"
        _refuse("seed_layers", value, what, "pass seed_layers=True to PipelineModule")
    model.seed_layers = True


def _interval(model: PipelineModule, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        fix = "use a positive integer, or 0 to leave it to PipelineModule"
        _refuse("activation_checkpoint_interval", value, "not a number of layers", fix)
    if value > 0:
        model.set_checkpoint_interval(value)


def _reentrant(model: PipelineModule, value: Any, zero_stage: int) -> None:
    """DeepSpeed's functions, which follow ``deepspeed.checkpointing.configure``; torch's at ZeRO-3."""
    if value is None:
        return
    _boolean("use_reentrant")(value)
    if not value:
        non_reentrant = checkpointing.non_reentrant_checkpoint
        model.activation_checkpoint_func = checkpoint_non_reentrant if zero_stage == 3 else non_reentrant
    elif model.activation_checkpoint_func is checkpoint_non_reentrant:  # a user's own stays, as in stock
        model.activation_checkpoint_func = checkpointing.checkpoint


def _shards(model: PipelineModule, block: Mapping[str, Any]) -> None:
    """What is divided over tensor-parallel ranks on its way: all that crosses a boundary, or nothing."""
    tensor_parallel = model.groups.tensor_parallel
    if tensor_parallel.size == 1:
        return
    wanted = {key: block.get(key, True) for key in ("pipe_partitioned", "grad_partitioned")}
    if len(set(wanted.values())) > 1:
        key, value = next(item for item in block.items() if item[0] in wanted)
        what = "dsx divides activations and gradients between stages alike, and the two keys differ"
        _refuse(key, value, f"{what} (DeepSpeed's default is true)", "set both to the same")
    model.shards = Shards.over(tensor_parallel) if wanted["pipe_partitioned"] else None
