"""The names of stock DeepSpeed's PipelineEngine that dsx.PipelineEngine needs nowhere else."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import engine as stock

from dsx.engine import stock_module
from dsx.engine.micro_batches import BatchSource
from dsx.engine.pipeline_module import PipelineModule
from dsx.engine.zero.master_shards import adopt_weights
from dsx.errors import ModelError, UnavailableError
from dsx.parallel.groups import Grid, Groups
from dsx.parallel.mesh import AXES


class AdditionalLosses:
    """Sums over a step's micro-batches of what a class's own ``get_additional_losses`` gives."""

    def __init__(self, model: PipelineModule) -> None:
        self._model, default = model, PipelineModule.get_additional_losses
        self._given = getattr(model.get_additional_losses, "__func__", None) is not default
        self._sums: dict[str, torch.Tensor] = {}
        self._names: list[str] | None = None
        if self._given:
            model.chunks.loss_noted = self._note

    def begin(self) -> None:
        self._sums.clear()

    def means(self, micro_batches: int) -> dict[str, torch.Tensor] | None:
        """Mean of each loss over micro-batches and replicas, float32 scalars on every rank; None without any.

        A collective call over all ranks.

        Raises:
            ModelError: The losses have other names than before, or than on other replicas.
        """
        if not self._given:
            return None
        if self._names is None:
            found: list[list[str] | None] = [None] * self._model.groups.mesh.size
            dist.all_gather_object(found, sorted(self._sums) if self._is_last else None)
            self._names = next(names for names in found if names is not None)
        groups = self._model.groups
        # The last number says whether anybody has other names.
        total = torch.zeros(len(self._names) + 1, dtype=torch.float32, device=self._model.device)
        if self._is_last and sorted(self._sums) != self._names:
            total[-1] = 1
        elif self._is_last and groups.speaks and self._names:
            values = torch.stack([self._sums[name] for name in self._names])
            total[:-1] = values / (micro_batches * groups.mesh.num_replicas)
        dist.all_reduce(total)
        if total[-1]:
            raise ModelError(
                "PipelineModule.get_additional_losses()",
                f"it gave {', '.join(self._names) or 'nothing'} at first, and other names later or elsewhere",
                "give losses of the same names for every micro-batch",
            )
        return dict(zip(self._names, total[:-1].unbind(), strict=True)) or None

    @property
    def _is_last(self) -> bool:
        stages = self._model.stage_map
        return self._model.groups.pp_rank == stages.rank_of(stages.num_stages - 1)

    def _note(self) -> None:
        for name, value in (self._model.get_additional_losses() or {}).items():
            loss = value.detach().float().reshape(())
            self._sums[name] = self._sums[name] + loss if name in self._sums else loss


_ELSEWHERE = {
    "transfers are dsx.engine.p2p's; engine.trace() records what a step does": (
        "pipe_buffers", "num_pipe_buffers", "pipe_recv_buf", "grad_layer", "meta_buffer", "first_output_send",
        "first_gradient_send", "pipe_partition_input_meta_cache", "pipe_partition_output_meta_cache",
        "pipe_partition_grad_meta_cache", "grad_partition_grad_layer_meta_cache",
    ),
    "train_batch() returns the step's mean loss, which agg_train_loss keeps": (
        "loss", "total_loss", "agg_loss", "dp_group_loss",
    ),
    "get_additional_losses() has their means": ("total_additional_losses",),
    "eval_batch(return_logits=True) returns the last stage's outputs": (
        "outputs", "fwd_outputs", "eval_return_logits",
    ),
    "DeepSpeed's monitors get them: see dsx.recipe.Monitor for more": ("summary_events",),
    "dsx.recipe.Monitor measures steps; DeepSpeed's timers wait for the device": ("batch_timer",),
    "type(engine.optimizer).__name__ says which wrapper DeepSpeed chose": ("using_bf16_optimizer",),
    "when gradients are reduced is the config's dsx.zero": ("pipeline_enable_backward_allreduce",),
    "train_batch() reduces gradients once per step": ("no_sync", "coalesce_grad_reduction"),
}  # fmt: skip

NOT_HERE = {name: instead for instead, names in _ELSEWHERE.items() for name in names}
"""Name of stock DeepSpeed's -> what to use."""


class Engine(Protocol):
    """What the further names need of a PipelineEngine; the rest comes from the DeepSpeedEngine."""

    pipeline: PipelineModule
    deepspeed_engine: Any
    groups: Groups
    grid: Grid
    run_config: Any
    batch_source: BatchSource
    stage_id: int

    @property
    def at_boundary(self) -> bool:
        """Whether the last backward of a step, or the optimizer's step, is under way."""

    def __getattr__(self, name: str) -> Any:
        """Of the DeepSpeedEngine."""


class EngineNames:
    """Names that a PipelineEngine looks up here before it asks the DeepSpeedEngine underneath.

    Args:
        sums: A tensor whose first element is the mean loss of the last step.

    Attributes:
        agg_additional_losses: Means of the last step by name; None if the model reports none.
        has_attention_mask: Kept for programs that read it.
        has_bool_tensors: Kept for programs that read it; boolean tensors cross stage boundaries as they are.
        log_batch_step_id: As in stock DeepSpeed, where nothing sets it either.
    """

    ID_TO_DTYPE = stock.PipelineEngine.ID_TO_DTYPE
    DTYPE_TO_ID = stock.PipelineEngine.DTYPE_TO_ID

    def __init__(self, engine: Engine, sums: torch.Tensor) -> None:
        self._engine, self._sums = engine, sums
        self._losses = AdditionalLosses(engine.pipeline)
        self._began, self._steps = time.perf_counter(), 0
        self._trained = False
        self.agg_additional_losses: dict[str, torch.Tensor] | None = None
        self.has_attention_mask = type(engine.pipeline).__name__ == "GPT2ModelPipe"
        self.has_bool_tensors = False
        self.log_batch_step_id = -1
        engine.pipeline.weights_changed = self._adopt_weights

    def has(self, name: str) -> bool:
        """Whether ``name`` is looked up here."""
        if name.startswith("_") or name in ("has", "assign", "begin_step", "end_step"):
            return name == "_reentrant_activation_checkpointing"
        return name in NOT_HERE or name in vars(self) or hasattr(type(self), name)

    def __getattr__(self, name: str) -> Any:
        if name in NOT_HERE:
            raise stock_module.unavailable("PipelineEngine", name, NOT_HERE[name])
        raise AttributeError(name)

    def assign(self, name: str, value: Any) -> None:
        """Set one of these names. Raises UnavailableError for what can only be read."""
        if name in NOT_HERE:
            raise stock_module.unavailable("PipelineEngine", name, NOT_HERE[name])
        try:
            setattr(self, name, value)
        except AttributeError:
            what = "it is settled when the engine is made"
            raise UnavailableError(f"engine.{name} = ...", what, "give it to dsx.initialize") from None

    def begin_step(self) -> None:
        """Before the first micro-batch of a training step."""
        self._losses.begin()

    def end_step(self, loss: torch.Tensor, micro_batches: int) -> None:
        """After a training step. Collective where the model reports additional losses.

        Prints stock DeepSpeed's line every ``steps_per_print`` steps of a run without a dsx block, whose own
        report says more.
        """
        self._trained, self._steps = True, self._steps + 1
        self.agg_additional_losses = self._losses.means(micro_batches)
        every = self._engine.steps_per_print()
        if self._engine.run_config is not None or not every or self._engine.global_steps % every:
            return
        now = time.perf_counter()
        seconds = (now - self._began) / self._steps
        self._began, self._steps = now, 0
        if self.global_rank == 0:
            others = (self.agg_additional_losses or {}).items()
            more = "".join(f"{name}: {value.item():0.4f} " for name, value in others)
            rate = self._engine.train_batch_size() / seconds
            _say(
                f"steps: {self._engine.global_steps} loss: {loss.item():0.4f} {more}"
                f"iter time (s): {seconds:0.3f} samples/sec: {rate:0.3f}"
            )

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """The model's additional losses: means over the last step's micro-batches and replicas."""
        return self.agg_additional_losses

    def get_pipeline_parallel_rank(self) -> int:
        return self._engine.stage_id

    def deepspeed_io(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's loader of a dataset, whose samplers give this rank's share: whole rows."""
        engine = self._engine.deepspeed_engine
        replicas, engine.mpu = engine.mpu, self.mpu
        try:
            return engine.deepspeed_io(*args, **kwargs)
        finally:
            engine.mpu = replicas

    def set_has_attention_mask(self, value: bool) -> None:
        """Whether the last tensor at a stage boundary is an attention mask. Raises ModelError for no bool.

        It has no effect: stock DeepSpeed casts that tensor to fp16 for the transfer and to bool on arrival,
        while here every dtype crosses as it is.
        """
        if not isinstance(value, bool):
            raise ModelError(f"set_has_attention_mask({value!r})", "not a bool", "use True or False")
        self.has_attention_mask = value

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the engine is in the last backward of a step, where it reduces gradients, or steps."""
        return self._engine.at_boundary

    def log_for_device(self, *msg: object) -> None:
        """Print on the ranks that deepspeed.runtime.pipe.engine's LOG_STAGE and DATA_PARALLEL_ID name."""
        stage, replica = self._engine.stage_id, self._engine.groups.share
        if stock.LOG_STAGE in (stage, -1) and stock.DATA_PARALLEL_ID in (replica, -1):
            _say(f"RANK={self.global_rank} PIPE-ID={stage} DATA-ID={replica} ::", *msg)

    def tput_log(self, *msg: object) -> None:
        """Print on rank 0, every ``steps_per_print`` steps."""
        every = self._engine.steps_per_print()
        if self.global_rank == 0 and every and self._engine.global_steps % every == 0:
            _say(*msg)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """This rank's layers, under the names that stock DeepSpeed's PipelineModule has.

        Raises:
            ModelError: ZeRO-3 holds the weights in parts.
        """
        model = self._engine.pipeline
        self._require_whole("module_state_dict")
        state = model.state_dict()
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        return {name: v for name, v in state.items() if not (exclude_frozen_parameters and name in frozen)}

    def load_module_state_dict(
        self, checkpoint: dict[str, Any], strict: bool = True, custom_load_fn: Any = None, **_zero3: Any
    ) -> None:
        """Fill this rank's layers, and the optimizer's fp32 copies of them.

        Args:
            checkpoint: ``{"module": state}`` with what :meth:`module_state_dict` gave on this rank.
            strict: Whether every tensor of this rank must be there, and no other.
            custom_load_fn: Not supported, as in stock pipelines.

        Raises:
            ModelError: No such state, other tensors than this rank's, or ZeRO-3.
        """
        self._require_whole("load_module_state_dict")
        state = checkpoint.get("module") if isinstance(checkpoint, dict) else None
        if custom_load_fn is not None or not isinstance(state, dict):
            what = "there is no state under checkpoint['module']"
            raise ModelError(
                "engine.load_module_state_dict()",
                what if custom_load_fn is None else "custom_load_fn is not supported",
                "pass {'module': engine.module_state_dict()}, or use engine.load_checkpoint(folder)",
            )
        try:
            self._engine.pipeline.load_state_dict(state, strict=strict)
        except RuntimeError as error:
            raise ModelError(
                "engine.load_module_state_dict()", str(error), "give the state of this rank's layers"
            ) from error
        self._adopt_weights()

    @property
    def agg_train_loss(self) -> torch.Tensor | None:
        """Mean loss of the last step, float32 scalar; None before the first."""
        return self._sums[0].clone() if self._trained else None

    # Names that only say where something of dsx's is.
    batch_fn = property(
        lambda self: self._engine.batch_source.convert,
        lambda self, made: self._engine.set_batch_fn(made),
    )
    data_iterator = property(
        lambda self: self._engine.batch_source.iterator,
        lambda self, it: self._engine.set_dataiterator(it),
    )
    # DeepSpeed's own count all that hold the same parameters, and programs read data by these.
    mpu = property(lambda self: self._engine.grid)
    dp_world_size = property(lambda self: self._engine.grid.get_data_parallel_world_size())
    dynamic_shape = property(lambda self: self._engine.pipeline.dynamic_shape)
    global_rank = property(lambda self: self._engine.groups.rank)
    micro_batch_size = property(lambda self: int(self._engine.train_micro_batch_size_per_gpu()))
    prev_stage = property(lambda self: self._engine.stage_id - 1)
    next_stage = property(lambda self: self._engine.stage_id + 1)
    is_pipe_parallel = property(lambda self: self._is_over("pipe"))
    is_data_parallel = property(lambda self: self._is_over("data"))
    is_model_parallel = property(lambda self: self._is_over("model"))
    # Whether tensor-parallel ranks each send a share of an activation or gradient (``shard_transfers``).
    is_pipe_partitioned = property(lambda self: self._engine.pipeline.shards is not None)
    is_grad_partitioned = is_pipe_partitioned

    def _reentrant_activation_checkpointing(self) -> bool:
        """Whether layers are recomputed by a function that needs inputs with a gradient."""
        recompute = self._engine.pipeline.chunks.recompute
        return recompute.interval > 0 and recompute.may_be_reentrant

    def _is_over(self, axis: str) -> bool:
        """Whether there are several ranks along the axis that DeepSpeed calls ``name``."""
        mesh = self._engine.groups.mesh
        return any(mesh.degree(each.name) > 1 for each in AXES if each.deepspeed == axis)

    def _adopt_weights(self) -> None:
        adopt_weights(self._engine.deepspeed_engine)

    def _require_whole(self, call: str) -> None:
        if self._engine.zero_optimization_stage() == 3:
            raise ModelError(
                f"engine.{call}()",
                "under ZeRO-3 no rank has a layer's weights whole",
                "use engine.save_checkpoint(folder) and load_checkpoint(folder)",
            )


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()
