"""``dsx.initialize`` and its engine: the interface of DeepSpeed's PipelineEngine, any schedule, any ZeRO."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import RepeatingLoader
from torch import nn

from dsx.config.load import read
from dsx.config.run import RunConfig
from dsx.errors import ConfigError, ModelError
from dsx.plan.builders import build, forward_only
from dsx.plan.transfers import lower
from dsx.plan.validate import validate
from dsx.runtime.executor import Compute, MicroBatches, Signatures, StepRun
from dsx.runtime.groups import Grid
from dsx.runtime.pipeline_module import PipelineModule, Tie
from dsx.runtime.zero_adapters import adapt, announce_backward, require_supported, scope_consistency_checks
from dsx.spec.schedule import Schedule

Batch = tuple[Any, Any]


class PipelineEngine:
    """Trains a :class:`~dsx.PipelineModule`. Made by :func:`initialize`.

    The public methods are those of ``deepspeed.runtime.pipe.engine.PipelineEngine``; whatever is not defined
    here is looked up on the DeepSpeedEngine underneath (``deepspeed_engine``), e.g. ``lr_scheduler``,
    ``global_steps`` or ``train_batch_size()``.
    """

    def __init__(
        self,
        model: PipelineModule,
        engine: Any,
        *,
        training_data: Any,
        clipping: float,
        config: RunConfig | None,
    ) -> None:
        self.pipeline = model
        self.config = config
        self.deepspeed_engine = engine
        self.groups = model.groups
        self.grid = Grid(model.groups)
        self._adapter = adapt(engine, model.groups, model.ties, clipping)
        self._managed = bool(engine.managed_gradient_accumulation())
        self._signatures = Signatures(dynamic=model.dynamic_shape)
        self._schedules: dict[tuple[str, int], Schedule] = {}
        self._batch_fn: Callable[[Any], Batch] | None = None
        self._iterator: Iterator[Any] | None = None
        if training_data is not None:
            self.set_dataloader(training_data)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the DeepSpeedEngine's."""
        if name == "deepspeed_engine":
            raise AttributeError(name)
        return getattr(self.deepspeed_engine, name)

    @property
    def module(self) -> nn.Module:
        """This rank's layers."""
        return self.pipeline.chunks

    def is_first_stage(self) -> bool:
        """Whether this rank holds the first layers (and so needs inputs)."""
        return self.groups.pp_rank == self.pipeline.stage_map.rank_of(0)

    def is_last_stage(self) -> bool:
        """Whether this rank holds the last layers (and so needs labels and computes the loss)."""
        return self.groups.pp_rank == self.pipeline.stage_map.rank_of(self.pipeline.stage_map.num_stages - 1)

    def needs_data(self) -> bool:
        """Whether this rank reads micro-batches."""
        return self.is_first_stage() or self.is_last_stage()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One optimizer step over ``train_batch_size()`` samples.

        Args:
            data_iter: Yields ``gradient_accumulation_steps()`` pairs ``(inputs, labels)`` of this rank's
                data-parallel replica; read on ranks of the first and last stage alone. None takes the
                training data given to :func:`initialize`, or the last iterator that was set.

        Returns:
            Mean loss over all micro-batches and replicas, float32 scalar, the same on every rank.

        Raises:
            DataError: The iterator ends within the step, or yields something else.
            ModelError: The loss is no scalar, or a boundary's shape changes.
        """
        if not torch.is_grad_enabled():
            raise ModelError("train_batch", "gradients are disabled", "use eval_batch under torch.no_grad")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        engine = self.deepspeed_engine
        engine.module.train()
        count = int(engine.gradient_accumulation_steps())
        run = self._step_run(self._schedule(count), self._iterator, training=True, count=count)
        run.run()
        self._adapter.before_step()
        samples = engine.global_samples
        engine.step()
        engine.global_samples = samples + engine.train_batch_size()
        return self._mean_loss(run.losses, count)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Forward only.

        Args:
            data_iter: As for :meth:`train_batch`.
            return_logits: Also return the last stage's outputs (a list, one per micro-batch; None on other
                ranks). Needs ``compute_loss=False``: the last stage computes either its outputs or its loss.
            compute_loss: Compute the loss; without it the last stage's outputs are returned.
            reduce_output: "avg" for the mean loss, None for the list of losses (on the last stage).
            bcast_loss: Give the mean loss to every rank, not to those of the last stage alone.
            num_micro_batches: Micro-batches to read; the number of accumulation steps by default.

        Returns:
            The mean loss, or the outputs, or ``(loss, outputs)`` with ``return_logits``.
        """
        if return_logits and compute_loss:
            raise ModelError(
                "eval_batch(return_logits=True, compute_loss=True)",
                "the last stage computes either its outputs or its loss",
                "pass compute_loss=False to get the outputs",
            )
        if reduce_output not in ("avg", None):
            raise ModelError(f"reduce_output = {reduce_output!r}", "not a reduction", 'use "avg" or None')
        engine = self.deepspeed_engine
        count = num_micro_batches or int(engine.gradient_accumulation_steps())
        was_training = engine.module.training
        engine.module.eval()
        try:
            with torch.no_grad():
                run = self._step_run(
                    self._schedule(count, training=False),
                    data_iter,
                    training=False,
                    count=count,
                    compute_loss=compute_loss,
                    keep_outputs=not compute_loss,
                )
                run.run()
        finally:
            engine.module.train(was_training)
        outputs = run.kept_outputs if self.is_last_stage() else None
        if not compute_loss:
            return (None, outputs) if return_logits else outputs
        if reduce_output is None:
            return run.losses if self.is_last_stage() else None
        mean = self._mean_loss(run.losses, count)
        return mean if bcast_loss or self.is_last_stage() else None

    def get_global_grad_norm(self) -> float:
        """2-norm of the last step's gradient over the whole model, before clipping."""
        return self._adapter.grad_norm()

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Micro-batches for the next :meth:`train_batch` calls."""
        self._iterator = None if iterator is None else self._convert(iter(iterator))

    def set_dataloader(self, loader: Iterable[Any] | None) -> None:
        """A loader to draw micro-batches from, again and again."""
        self.set_dataiterator(None if loader is None else iter(RepeatingLoader(loader)))

    def set_batch_fn(self, function: Callable[[Any], Batch]) -> None:
        """``function(batch) -> (inputs, labels)`` is applied to every micro-batch."""
        self._batch_fn = function

    def reset_activation_shape(self) -> None:
        """Call on every rank before shapes at stage boundaries change, e.g. a longer sequence."""
        self._signatures.reset()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the number of micro-batches.

        Raises:
            ConfigError: It is not a multiple of micro-batch size x data-parallel degree.
        """
        engine = self.deepspeed_engine
        unit = engine.train_micro_batch_size_per_gpu() * self.groups.mesh.dp
        if train_batch_size < 1 or train_batch_size % unit:
            raise ConfigError(
                f"train_batch_size = {train_batch_size}",
                f"it is not a multiple of {unit} (micro-batch size x data-parallel degree)",
                f"use a multiple of {unit}",
            )
        engine.set_train_batch_size(train_batch_size)

    def forward(self, *_args: Any, **_kwargs: Any) -> None:
        """Not part of a pipeline engine. Raises ModelError."""
        self._refuse("forward")

    def backward(self, *_args: Any, **_kwargs: Any) -> None:
        """Not part of a pipeline engine. Raises ModelError."""
        self._refuse("backward")

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        """Not part of a pipeline engine. Raises ModelError."""
        self._refuse("step")

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None
    ) -> Path:
        """Write a checkpoint that appears whole or not at all; see :func:`dsx.runtime.checkpointing.save`."""
        from dsx.runtime.checkpointing import save

        return save(self, Path(save_dir), tag=tag, client_state=client_state or {})

    def load_checkpoint(self, load_dir: str | Path, tag: str | None = None) -> tuple[Path, dict[str, Any]]:
        """Continue from a checkpoint of the same layout; see :func:`dsx.runtime.checkpointing.load`."""
        from dsx.runtime.checkpointing import load

        return load(self, Path(load_dir), tag=tag)

    def _refuse(self, name: str) -> None:
        raise ModelError(
            f"engine.{name}()", "a pipeline has no such call", "use train_batch() or eval_batch()"
        )

    def _convert(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            yield batch if self._batch_fn is None else self._batch_fn(batch)

    def _schedule(self, micro_batches: int, *, training: bool = True) -> Schedule:
        """The lowered and proved schedule for so many micro-batches, built once."""
        stages, name = self.pipeline.stage_map, self.pipeline.schedule if training else "forward"
        if (name, micro_batches) not in self._schedules:
            if training:
                schedule = build(name, stages.num_ranks, stages.num_chunks, micro_batches)
            else:
                schedule = forward_only(stages.num_ranks, stages.num_chunks, micro_batches)
            schedule = lower(schedule)
            validate(schedule)
            self._schedules[name, micro_batches] = schedule
        return self._schedules[name, micro_batches]

    def _step_run(
        self,
        schedule: Schedule,
        source: Iterator[Any] | None,
        *,
        training: bool,
        count: int,
        compute_loss: bool = True,
        keep_outputs: bool = False,
    ) -> StepRun:
        uses = int(self.is_first_stage()) + int(self.is_last_stage() and compute_loss)
        return StepRun(
            schedule=schedule,
            groups=self.groups,
            compute=Compute(
                forward=self.deepspeed_engine,
                backward=self._backward,
                backward_weights=self._backward_weights,
            ),
            batches=MicroBatches(source=source, count=count, device=self.pipeline.device, uses=uses),
            signatures=self._signatures,
            training=training,
            compute_loss=compute_loss,
            keep_outputs=keep_outputs,
            release_outputs=self.pipeline.release_outputs,
            split=self.pipeline.split,
        )

    def _backward(self, loss: torch.Tensor, stage: int, boundary: bool, is_loss: bool) -> None:
        """One backward through DeepSpeed, which reduces (ZeRO-2, 3) or waits for the boundary (ZeRO-0, 1)."""
        self._adapter.before_backward(stage)
        if self._managed:
            self.deepspeed_engine.set_gradient_accumulation_boundary(boundary)
        self.deepspeed_engine.backward(loss, scale_wrt_gas=is_loss)

    def _backward_weights(self, loss: torch.Tensor | None, stage: int, boundary: bool) -> None:
        """The second part of a split backward: a backward like any other for DeepSpeed."""
        if loss is None:
            # Nothing to compute, but the boundary's reductions must run.
            loss = torch.zeros((), device=self.pipeline.device, requires_grad=True).clone()
        announce_backward(self.deepspeed_engine, loss)
        self._backward(loss, stage, boundary, is_loss=False)

    def _mean_loss(self, losses: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        """Mean over micro-batches and replicas, on every rank: one all-reduce of a scalar."""
        total = torch.zeros((), dtype=torch.float32, device=self.pipeline.device)
        if losses and self.groups.tp_rank == 0:
            total += torch.stack([loss.float() for loss in losses]).sum() / (count * self.groups.mesh.dp)
        dist.all_reduce(total)
        return total


def initialize(
    *,
    model: PipelineModule,
    config: RunConfig | Mapping[str, Any] | str | Path,
    model_parameters: Iterable[Any] | None = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    training_data: Any = None,
    collate_fn: Callable[..., Any] | None = None,
) -> tuple[PipelineEngine, Any, Any, Any]:
    """``deepspeed.initialize`` for a :class:`~dsx.PipelineModule`.

    Args:
        model: The pipeline.
        config: A resolved dsx config (:func:`dsx.load_config`), or an ordinary DeepSpeed config as a dict or
            path.
        model_parameters: Parameters or parameter groups to optimize; all by default.
        optimizer: A torch optimizer or a callable that makes one from parameter groups; the config's by
            default.
        lr_scheduler: A scheduler or a callable that makes one from an optimizer; the config's by default.
        training_data: A torch Dataset, split over data-parallel ranks.
        collate_fn: For ``training_data``.

    Returns:
        ``(engine, optimizer, training_dataloader, lr_scheduler)`` as DeepSpeed returns them.

    Raises:
        VersionError: A DeepSpeed that dsx has not been checked against.
        ConfigError: A setting that cannot work with a pipeline.
    """
    require_supported()
    settings = _settings(config)
    _require_supported_settings(settings)
    stage = int(settings.get("zero_optimization", {}).get("stage", 0))
    clipping = float(settings.get("gradient_clipping", 1.0))
    if stage == 0 and not settings.get("bf16", {}).get("enabled", False):
        settings["gradient_clipping"] = 0.0  # clipped by ReplicatedAdapter, by the whole model's norm
    if "offload_optimizer" in settings.get("zero_optimization", {}):
        # With the boundary managed by backward calls, only the chunk of the last one would reach the CPU.
        settings["managed_gradient_accumulation"] = False
    if stage == 3:
        scope_consistency_checks(model.groups)
    parameters = list(model.chunks.parameters() if model_parameters is None else model_parameters)
    engine, wrapped, loader, scheduler = deepspeed.initialize(
        model=model.chunks,
        config=settings,
        model_parameters=split_tied(parameters, model.ties),
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
        mpu=Grid(model.groups),
        dist_init_required=False,
    )
    pipeline = PipelineEngine(
        model,
        engine,
        training_data=loader,
        clipping=clipping,
        config=config if isinstance(config, RunConfig) else None,
    )
    return pipeline, wrapped, loader, scheduler


def split_tied(parameters: Sequence[Any], ties: Sequence[Tie]) -> list[Any]:
    """Parameter groups in which each tied weight that spans pipeline ranks stands alone.

    ZeRO partitions a group as one flat tensor; alone, a tied weight is cut alike on every rank that holds it.
    """
    owner = {id(p): tie.key for tie in ties for p in tie.parameters}
    groups = [g if isinstance(g, Mapping) else None for g in parameters]
    whole = [dict(g) for g in groups if g is not None] or [{"params": list(parameters)}]
    result = []
    for group in whole:
        members = list(group["params"])
        result.append({**group, "params": [p for p in members if id(p) not in owner]})
        keys = dict.fromkeys(owner[id(p)] for p in members if id(p) in owner)
        result.extend({**group, "params": [p for p in members if owner.get(id(p)) == key]} for key in keys)
    return [group for group in result if group["params"]]


def _settings(config: RunConfig | Mapping[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(config, RunConfig):
        return copy.deepcopy(dict(config.deepspeed))
    return copy.deepcopy(dict(config)) if isinstance(config, Mapping) else read(Path(config))


def _require_supported_settings(settings: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed would take and a pipeline cannot do."""
    if settings.get("fp16", {}).get("enabled", False):
        raise ConfigError(
            "fp16.enabled = true",
            "dynamic loss scaling is not supported across pipeline stages",
            'use "bf16": {"enabled": true}',
        )
    if "dsx" in settings:
        raise ConfigError(
            'config["dsx"]',
            "dsx.initialize takes a resolved config when there is a dsx block",
            "pass dsx.load_config(path) instead of the dict or path",
        )
