"""The engine: the interface of DeepSpeed's PipelineEngine, with any schedule and any ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import engine as stock
from deepspeed.utils import RepeatingLoader

from dsx.config.run import RunConfig
from dsx.config.schema import ZeroConfig
from dsx.engine.executor import Mode, StepRun
from dsx.engine.expert_load import ExpertLoad
from dsx.engine.micro_batches import BatchSource, TrainedTokens, each, leaves
from dsx.engine.optimizers import hide_spare, prepare
from dsx.engine.p2p import Signatures, header_group, open_channels
from dsx.engine.pipeline_module import PipelineModule
from dsx.engine.rank_progress import RankProgress
from dsx.engine.step_tracer import Tracer
from dsx.engine.stock_engine import EngineNames
from dsx.engine.stock_module import ENGINE_HOOKS, NoHook, no_hook, require_engine_unpatched, require_kept
from dsx.engine.zero import adapt, count_samples
from dsx.engine.zero.calls import Backwards, calls
from dsx.engine.zero.norm import Refuses
from dsx.errors import CheckpointError, ConfigError, DataError, ModelError, UnavailableError
from dsx.nn.collectives import gather_rows
from dsx.nn.loss import TokenMean
from dsx.parallel.groups import Grid
from dsx.parallel.stages import StageMap
from dsx.schedules.builders import forward_only
from dsx.schedules.program import Program
from dsx.schedules.receives import ReceivePlan, receive_plan
from dsx.schedules.schedule import Schedule, lower
from dsx.schedules.simulate import validate
from dsx.waiting import Waiting

if TYPE_CHECKING:  # loaded by the runs that save, or record a step
    from dsx.checkpoint.run.saver import Saver
    from dsx.islands.outer import Outer
    from dsx.schedules.trace import Trace

Step = tuple[Schedule, ReceivePlan]
"""A lowered schedule, and when this rank posts its receives."""


@dataclass(slots=True)
class Programs:
    """The schedules of one pipeline rank's steps."""

    program: Program
    stages: StageMap
    pp_rank: int
    _steps: dict[tuple[bool, int], Step] = field(default_factory=dict)

    def step(self, num_micro_batches: int, *, training: bool) -> Step:
        """A training step, or the forwards of an evaluation. Raises ScheduleError if there is none."""
        key = (training, num_micro_batches)
        if key not in self._steps:
            ranks, chunks = self.stages.num_ranks, self.stages.num_chunks
            self._steps[key] = self._made(
                self.program.build(ranks, chunks, num_micro_batches)
                if training
                else forward_only(ranks, chunks, num_micro_batches, self.stages.placement)
            )
        return self._steps[key]

    def put(self, schedule: Schedule) -> None:
        """Train with ``schedule``, of compute actions, whenever a step has as many micro-batches."""
        self._steps[True, schedule.num_micro_batches] = self._made(schedule)

    def _made(self, schedule: Schedule) -> Step:
        lowered = lower(schedule)
        validate(lowered)
        return lowered, receive_plan(lowered, self.pp_rank)


@dataclass(slots=True)
class StepControl:
    """What an engine asks in every training step, on all ranks.

    Attributes:
        sums: [mean loss, number of ranks that wanted to stop, trained tokens, number of ranks that other
            islands wait for] of the last step, over all ranks. Tokens are counted for a loss that is the mean
            over them.
        stop_wanted: Whether this rank wants no further step; None never does.
        called: Whether other islands wait for this rank's; asked on the ranks that know.
        refuses: ``refuses(loss, grad_norm)``, asked alike on every rank before the weights are updated, says
            whether this step must not be applied. It then counts as one that DeepSpeed skipped.
    """

    sums: torch.Tensor
    stop_wanted: Callable[[], bool] | None = None
    called: Callable[[], bool] | None = None
    refuses: Callable[[float, float], bool] | None = None

    @property
    def stop_agreed(self) -> bool:
        """Whether any rank wanted to stop by the end of the last step; the same on every rank."""
        return bool(self.sums[1] > 0)

    def stop_and_call_flags(self) -> tuple[float, float]:
        """This rank's part in the second and in the fourth of the sums."""
        return (
            float(self.stop_wanted is not None and self.stop_wanted()),
            float(self.called is not None and self.called()),
        )

    def refuser(self, sums: torch.Tensor, reduced: dist.Work) -> Refuses | None:
        """:attr:`refuses` as a question about the gradient norm alone.

        ``reduced`` is the all-reduce of ``sums``, those of the current step, not yet waited for.
        """
        if self.refuses is None:
            return None
        asked = self.refuses

        def refuses(norm: torch.Tensor) -> bool:
            reduced.wait()
            return asked(float(sums[0]), float(norm))

        return refuses


Batch = tuple[Any, Any]


def _refused(name: str) -> Callable[..., None]:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        """Not part of a pipeline engine. Raises ModelError."""
        raise ModelError(
            f"engine.{name}()", "a pipeline has no such call", "use train_batch() or eval_batch()"
        )

    return refuse


def _require(fine: bool, where: str, fix: str) -> None:
    if not fine:
        raise CheckpointError(f"engine.{where}", "dsx saves and loads a run as a whole", fix)


class PipelineEngine:
    """Trains a :class:`~dsx.PipelineModule`. Made by :func:`dsx.initialize`.

    The public methods are those of ``deepspeed.runtime.pipe.engine.PipelineEngine``; whatever is not defined
    here is looked up on the DeepSpeedEngine underneath (``deepspeed_engine``), e.g. ``lr_scheduler``,
    ``global_steps`` or ``train_batch_size()``.

    Attributes:
        module, pipeline: The PipelineModule: this rank's layers.
        rank_progress: Where this rank is, for the watch.
        step_control: What others decide about training steps.
        batch_source: Where ``train_batch`` reads its micro-batches, and how long it has waited for them.
        names: The further names of stock PipelineEngine, which are looked up there.
        run_config: The resolved dsx config, if it was built from one; ``config`` is DeepSpeed's.
        outer: The steps that islands take together (``dsx.outer``); None without islands.
        expert_load: How many tokens each expert got in a step.
    """

    def __init__(
        self,
        model: PipelineModule,
        engine: Any,
        *,
        clipping: float,
        config: RunConfig | None,
        zero: ZeroConfig,
        first_step: str = "the first step",
    ) -> None:
        self.module = self.pipeline = model
        self.run_config = config
        self.deepspeed_engine = engine
        self.groups = model.groups
        engine._config.train_batch_size //= self.groups.mesh.cp  # noqa: SLF001 (see settings_of)
        self.num_stages, self.stage_id = model.groups.mesh.pp, model.groups.pp_rank
        self.grid = Grid(model.groups)
        self._clipping, self._zero = clipping, zero
        self._evaluated: int | None = None
        self._looked_at = False
        self._adapt()
        self._signatures = Signatures(
            dynamic=model.dynamic_shape,
            shards=model.shards,
            headers=header_group(model.groups) if model.dynamic_shape else None,
        )
        self.programs = Programs(model.program, model.stage_map, model.groups.pp_rank)
        self._tracer = Tracer(model.groups, model.device)
        self.first_step = first_step
        """What is said of the next step, if it takes long; empty once there was one."""
        self._in_step = False  # True, too, after an error that a program has caught
        self.training_dataloader: Iterable[Any] | None = None
        self._saver: Saver | None = None
        self.rank_progress = RankProgress(model.device)
        looked_at = model.chunks.loss_fn if model.groups.rank == 0 else None
        self.batch_source = BatchSource(
            model.device, looked_at, self.rank_progress.move, cp=model.groups.context_parallel
        )
        self.step_control = StepControl(torch.zeros(4, device=model.device))
        self.expert_load = ExpertLoad(model, config)
        self.names = EngineNames(self, self.step_control.sums)
        open_channels(model.groups, model.stage_map, model.device)
        self.outer = None if config is None or config.islands is None else self._outer_steps(config)

    def __init_subclass__(cls) -> None:
        """Refuse a subclass that overrides hooks of stock's. Raises ModelError."""
        _require_hooks_kept(cls)

    def __getattr__(self, name: str) -> Any:
        """Any other name is one of stock PipelineEngine's, or of the DeepSpeedEngine's."""
        if name in ("deepspeed_engine", "names"):
            raise AttributeError(name)
        if name in ENGINE_HOOKS:
            raise no_hook("PipelineEngine", name)
        return getattr(self.names if self.names.has(name) else self.deepspeed_engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign where the name is read: here, or at stock's names or the DeepSpeedEngine below.

        Raises:
            ModelError: It is a hook of stock's, or something that is settled when the engine is made.
        """
        names, below = vars(self).get("names"), vars(self).get("deepspeed_engine")
        if names is None or name in vars(self) or name in vars(PipelineEngine).keys() - ENGINE_HOOKS:
            super().__setattr__(name, value)
        elif name in ENGINE_HOOKS:
            raise no_hook("engine", name)
        elif name in ("optimizer", "basic_optimizer"):
            what = "the engine has looked at its optimizer already"
            raise UnavailableError(f"engine.{name} = ...", what, "give it to dsx.initialize")
        elif names.has(name):
            names.assign(name, value)
        elif name in vars(below) or hasattr(type(below), name):
            setattr(below, name, value)
        else:
            super().__setattr__(name, value)

    def _adapt(self) -> None:
        """Look at the optimizer that DeepSpeed has, and at what it leaves to dsx."""
        model, engine = self.pipeline, self.deepspeed_engine
        self._adapter = adapt(
            engine,
            model.groups,
            model.ties,
            self._clipping,
            uses=model.chunks.used_parameters(),
            replicas=model.replicas,
            zero=self._zero,
        )
        self._backwards = Backwards(engine, self._adapter.before_backward)
        self._calls = calls(
            engine, self._backwards, self._adapter.loss_scale, reduced_here=self._adapter.reduced_here
        )

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Iterable[Any] | None) -> None:
        """Stock's, for programs that make their optimizer once there is an engine. Collective.

        ``client_optimizer`` is an optimizer, or a function that makes one of ``model_parameters``.

        Raises:
            ModelError: The engine has an optimizer already, or one of ZeRO's or bf16's, which begins with it.
        """
        engine = self.deepspeed_engine
        if engine.optimizer is not None or client_optimizer is None:
            raise ModelError(
                "engine._configure_optimizer()",
                f"the engine has its optimizer ({type(engine.optimizer).__name__}) from dsx.initialize; only "
                "in fp32 or fp16 without ZeRO can a client optimizer come later",
                "give the optimizer to dsx.initialize",
            )
        self.deepspeed_engine.lr_scheduler = None
        parameters, optimizer = prepare(
            self.pipeline,
            zero_stage=0,
            dtype=engine.get_data_types()[0],
            optimizer=client_optimizer,
            lr_scheduler=None,
            model_parameters=model_parameters,
        )
        engine._configure_optimizer(optimizer, parameters)  # noqa: SLF001
        hide_spare(self.pipeline)
        self._adapt()

    @property
    def lr_scheduler(self) -> Any:
        """The schedule that moves the learning rate after each step; None for none. May be assigned."""
        return self.deepspeed_engine.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        self.deepspeed_engine.lr_scheduler = schedule

    forward, backward, step = map(_refused, ("forward", "backward", "step"))
    _INSTRUCTION_MAP = NoHook()

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step. Assigned, as programs do around evaluations, it counts for those alone."""
        steps = int(self.deepspeed_engine.gradient_accumulation_steps())
        return steps if self._evaluated is None else self._evaluated

    @micro_batches.setter
    def micro_batches(self, count: int) -> None:
        steps = int(self.deepspeed_engine.gradient_accumulation_steps())
        self._evaluated = None if count == steps else count

    @property
    def at_boundary(self) -> bool:
        """Whether the last backward of a step, or the optimizer's step, is under way."""
        return self._backwards.at_boundary

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
                training data given to :func:`dsx.initialize`, or the last iterator that was set. Nothing
                shifts labels: a language model's inputs are ``tokens[:, :-1]``, its labels ``tokens[:, 1:]``.

        Returns:
            Mean loss over all micro-batches and replicas, float32 scalar, the same on every rank; of a
            :class:`~dsx.nn.loss.TokenMean`, the mean over their trained tokens.

        Raises:
            DataError: It is no iterator, ends within the step, or yields something else.
            ModelError: The loss is no scalar, or a boundary's shape changes.
        """
        if not torch.is_grad_enabled():
            raise ModelError("train_batch", "gradients are disabled", "use eval_batch under torch.no_grad")
        self._require_trainable()
        if data_iter is not None:
            _require_iterator(data_iter)
            self.set_dataiterator(data_iter)
        engine, count = self.deepspeed_engine, int(self.deepspeed_engine.gradient_accumulation_steps())
        if self.outer is not None:
            self.outer.join()
        self.pipeline.train()
        self.names.begin_step()
        self.expert_load.begin()
        mode = Mode(training=True, release_outputs=self.pipeline.release_outputs)
        here, number = self.rank_progress, int(self.global_steps) + 1
        schedule, _ = self.programs.step(count, training=True)
        what, self.first_step = self.first_step, ""
        if self._in_step:
            self._adapter.forget()
        self._in_step = True
        with (
            Waiting(what, quiet=self.groups.mute) if what else nullcontext(),
            here.timed_step(number),
            self._tracer.step(number, schedule) as around,
        ):
            run = self._step_run(self.batch_source, count, mode, around)
            run.run()
            here.enter("optimizer step")
            # Under way during the optimizer's step, whose collectives the ranks wait for anyway.
            sums, reduced = self._sum_losses(run, count)
            self._adapter.before_step(self.step_control.refuser(sums, reduced))
            count_samples(engine, count)
            self._backwards.at_boundary = True
            engine.step()
            self._backwards.at_boundary = self._in_step = False
            if self.step_applied:
                self.expert_load.move_biases()
            reduced.wait()
        here.enter("after the step")
        self.step_control.sums.copy_(sums)
        self.names.end_step(sums[0], count)
        self._write("train_loss", sums[0])
        if self.outer is not None:
            self.outer.after_step(called=bool(sums[3] > 0))
        return sums[0]

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Forward only.

        Args:
            data_iter: As for :meth:`train_batch`.
            return_logits: Also return the last stage's outputs: a list, one per micro-batch (stock
                DeepSpeed returns those of the last micro-batch alone); None on other ranks.
            compute_loss: Compute the loss; without it the list of outputs takes its place.
            reduce_output: "avg" for the mean loss, None for the list of losses (on the last stage). Outputs
                are never reduced.
            bcast_loss: Whether to give the mean loss to every rank, not only to those of the last stage.
            num_micro_batches: Micro-batches to read; the number of accumulation steps by default.

        Returns:
            The loss, or without ``compute_loss`` the outputs; a pair of both with ``return_logits`` (the loss
            is None without ``compute_loss``). On a context axis losses and outputs are those of whole rows:
            tensors as long along their second dimension as an output's first one is are gathered.
        """
        if reduce_output not in ("avg", None):
            raise ModelError(f"reduce_output = {reduce_output!r}", "not a reduction", 'use "avg" or None')
        module, count = self.pipeline, num_micro_batches or self.micro_batches
        mode = Mode(training=False, compute_loss=compute_loss, keep_outputs=return_logits or not compute_loss)
        was_training = module.training
        module.eval()
        try:
            with torch.no_grad():
                source = replace(self.batch_source, iterator=_iterator(data_iter))
                run = self._step_run(source, count, mode)
                run.run()
                self.batch_source.loss_fn = source.loss_fn  # whether labels have been looked at
        finally:
            module.train(was_training)
        outputs = [self._whole_rows(each) for each in run.kept_outputs] if self.is_last_stage() else None
        if not compute_loss:
            return (None, outputs) if return_logits else outputs
        loss: Any = None
        if reduce_output is None and self.is_last_stage():
            loss = self._losses_of_rows(run)
        if reduce_output == "avg":
            sums, reduced = self._sum_losses(run, count)
            reduced.wait()
            if isinstance(module.chunks.loss_fn, TokenMean):
                sums[0] /= sums[2].clamp(min=1)
            self._write("eval_loss", sums[0])
            loss = sums[0] if bcast_loss or self.is_last_stage() else None
        return (loss, outputs) if return_logits else loss

    def trace(self, steps: int | Iterable[int] = 1) -> list[Trace]:
        """Record the actions of training steps to come: see :meth:`dsx.engine.step_tracer.Tracer.expect`."""
        return self._tracer.expect(steps, done=int(self.global_steps))

    @property
    def trained_tokens(self) -> int | None:
        """Tokens of the last step that had a label; None if the loss is no mean over tokens."""
        if not isinstance(self.pipeline.chunks.loss_fn, TokenMean):
            return None
        return round(float(self.step_control.sums[2]))

    @property
    def step_applied(self) -> bool:
        """Whether the last training step changed the weights: it did not if it was skipped."""
        return bool(self.deepspeed_engine._step_applied)  # noqa: SLF001

    @property
    def overflowed(self) -> bool:
        """Whether the last training step was skipped because its gradients overflowed in fp16."""
        return self._adapter.loss_scale.overflowed

    @property
    def current_loss_scale(self) -> float | None:
        """What fp16 multiplies the next step's loss by; None in fp32 and bf16."""
        return self._adapter.loss_scale.value if self.deepspeed_engine.fp16_enabled() else None

    def get_global_grad_norm(self) -> float:
        """2-norm of the last step's gradient over the whole model, before clipping, without a loss scale.

        It is infinite after an overflow of fp16.
        """
        return float(self._adapter.norm)

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Micro-batches for the next :meth:`train_batch` calls."""
        self.training_dataloader = None
        self.batch_source.iterator = _iterator(iterator)

    def set_dataloader(self, loader: Iterable[Any] | None) -> None:
        """A loader to draw micro-batches from, again and again."""
        self.set_dataiterator(None if loader is None else iter(RepeatingLoader(loader)))
        self.training_dataloader = loader

    def set_batch_fn(self, function: Callable[[Any], Batch]) -> None:
        """``function(batch) -> (inputs, labels)`` is applied to every micro-batch."""
        self.batch_source.convert = function

    def reset_activation_shape(self) -> None:
        """Call on every rank before shapes at stage boundaries change, e.g. a longer sequence."""
        self._signatures.reset()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the number of micro-batches.

        Raises:
            ConfigError: It is not a multiple of micro-batch size x data-parallel degree.
        """
        engine = self.deepspeed_engine
        unit = engine.train_micro_batch_size_per_gpu() * self.groups.mesh.num_shares
        if train_batch_size < 1 or train_batch_size % unit:
            raise ConfigError(
                f"train_batch_size = {train_batch_size}",
                f"it is not a multiple of {unit} (micro-batch size x data-parallel degree)",
                f"use a multiple of {unit}",
            )
        engine.set_train_batch_size(train_batch_size * self.groups.mesh.cp)
        engine._config.train_batch_size = train_batch_size  # noqa: SLF001 (see settings_of)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size, and the global batch with it."""
        self.deepspeed_engine.set_train_micro_batch_size(micro_batch_size)
        self.deepspeed_engine._config.train_batch_size //= self.groups.mesh.cp  # noqa: SLF001 (see settings_of)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        background: bool = False,
        keep: int = 0,
    ) -> Path:
        """Write a checkpoint that appears whole or not at all, and that any layout can load. Collective.

        Args:
            save_dir: Folder of checkpoints, on a file system that all ranks share.
            tag: Name; ``global_step<N>`` by default.
            client_state: Plain data that :meth:`load_checkpoint` shall give back.
            save_latest: Stock DeepSpeed's; True alone, as the newest whole checkpoint is always the latest.
            exclude_frozen_parameters: Stock DeepSpeed's; frozen parameters are left out where a config says
                where they come from, and else kept, whatever it says.
            background: Whether to go on training once the states are copied to the host's memory.
            keep: Number of the newest checkpoints to keep there; 0 keeps all.

        Raises:
            CheckpointError: It cannot be written, or one before that was written in the background has
                failed; or ``save_latest`` is False.
        """
        del exclude_frozen_parameters  # a checkpoint that holds more is read alike
        _require(save_latest is True, "save_checkpoint(save_latest=False)", "leave it out")
        tag = tag or f"global_step{self.global_steps}"
        if self.outer is not None:
            self.outer.settle()
        with self.rank_progress.doing(f"saving {tag}"):
            if self._saver is None:
                from dsx.checkpoint.run.saver import Saver

                self._saver = Saver(self)
            return self._saver.save(Path(save_dir), tag, client_state or {}, background=background, keep=keep)

    def wait_for_checkpoint(self) -> None:
        """Wait for a save in the background. Collective. Raises CheckpointError if it has failed."""
        with self.rank_progress.doing("waiting for a save"):
            if self._saver is not None:
                self._saver.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[Path, dict[str, Any]]:
        """Continue from a checkpoint of any layout; see :func:`dsx.checkpoint.run.state.load`.

        The arguments are stock DeepSpeed's.

        Args:
            load_dir: Folder of checkpoints, or one of them.
            tag: Its name; the newest by default.
            load_module_strict: Whether it must have every frozen parameter; it must have the trained ones in
                any case, and no others.
            load_optimizer_states: Whether the optimizer goes on with the checkpoint's states, which may else
                be another optimizer's; if not, with those that it has.
            load_lr_scheduler_states: Whether the schedule goes on where the checkpoint's was.
            load_module_only: Whether the weights are all that is taken.
            custom_load_fn: None alone.

        Raises:
            CheckpointError: There is none, it does not fit, or an argument has another value than these.
        """
        from dsx.checkpoint.run.state import load
        from dsx.checkpoint.run.stored import ALL, Wanted

        weights = "give the weights to the layers before dsx.initialize, as PipelineModule(load_layer=)"
        _require(custom_load_fn is None, "load_checkpoint(custom_load_fn=)", weights)
        wanted = Wanted(
            optimizer=load_optimizer_states and not load_module_only,
            schedule=load_lr_scheduler_states,
            progress=not load_module_only,
            frozen=load_module_strict,
        )
        whole = self.outer is None or wanted == ALL
        _require(whole, "load_checkpoint() of a part, among islands", "load all of it, or train one island")
        self.wait_for_checkpoint()
        if self.outer is not None:
            self.outer.settle()
        with self.rank_progress.doing("loading a checkpoint"):
            return load(self, Path(load_dir), tag=tag, wanted=wanted)

    def _require_trainable(self) -> None:
        """Refuse what would train something else than the program means, before its first step."""
        if self._evaluated is not None:
            what = f"engine.micro_batches = {self._evaluated} was assigned, and a step has another number"
            raise ModelError("train_batch", what, "assign the old number again, or use set_train_batch_size")
        if self._looked_at:
            return
        if self.deepspeed_engine.optimizer is None:
            fix = 'add "optimizer" to the config, or give dsx.initialize one'
            raise ModelError("train_batch", "the engine has no optimizer", fix)
        _require_hooks_kept(type(self))
        require_engine_unpatched(self.num_stages, self.stage_id, self.micro_batches)
        self._looked_at = True

    def _outer_steps(self, config: RunConfig) -> Outer:
        """What averages this island's movements with those of the others."""
        from dsx.checkpoint.base import base_fact
        from dsx.islands.outer import Outer  # here: other runs have none

        node, outer = self.groups.island, config.dsx.outer
        if node is None or outer is None:
            raise ConfigError(
                "dsx.outer",
                "the process groups were made without islands",
                "call dsx.distributed(config.mesh, islands=config.islands)",
            )
        # What is frozen is not sent, and has to be the same from the beginning.
        base = base_fact(config) or {}
        fingerprint = repr((config.fingerprint, base.get("seed"), base.get("digest")))
        made = Outer(self, node, outer, last_step=config.dsx.train.steps, fingerprint=fingerprint)
        self.step_control.called = lambda: made.called
        return made

    def _step_run(self, batches: BatchSource, count: int, mode: Mode, around: Any = None) -> StepRun:
        schedule, receives = self.programs.step(count, training=mode.training)
        uses = int(self.is_first_stage()) + int(self.is_last_stage())
        loss, tokens = self.pipeline.chunks.loss_fn, None
        if isinstance(loss, TokenMean) and mode.compute_loss and self.is_last_stage():
            tokens = TrainedTokens(loss, self.groups, batches.device, before_backward=mode.training)
        batches.begin(count, uses=uses, tokens=tokens)
        return StepRun(
            schedule=schedule,
            receives=receives,
            groups=self.groups,
            stages=self.pipeline.chunks,
            calls=self._calls,
            hooks=self._adapter.hooks,
            batches=batches,
            signatures=self._signatures,
            mode=mode,
            split=self.pipeline.split,
            around=around,
            rank_progress=self.rank_progress,
        )

    def _whole_rows(self, outputs: Any) -> Any:
        """Outputs of parts of rows as those of whole ones. Collective over the ranks that have them."""
        cp, found = self.groups.context_parallel, [x for x in leaves(outputs) if isinstance(x, torch.Tensor)]
        if cp.size == 1 or not found:
            return outputs
        length = found[0].shape[1:2]
        return each(lambda x: gather_rows(x, cp) if length and x.shape[1:2] == length else x, outputs)

    def _losses_of_rows(self, run: StepRun) -> list[torch.Tensor]:
        """An evaluation's loss of each micro-batch. Collective over ranks that have parts of its rows."""
        if self.groups.mesh.cp == 1 or run.tokens is None:
            return run.losses
        counts = run.tokens.counts()
        sums = torch.stack((torch.stack([loss.float() for loss in run.losses]) * counts, counts))
        dist.all_reduce(sums, group=self.groups.context)
        return list(sums[0] / sums[1].clamp(min=1))

    def _sum_losses(self, run: StepRun, count: int) -> tuple[torch.Tensor, dist.Work]:
        """:attr:`StepControl.sums`, once the all-reduce, which is under way, has been waited for.

        In an evaluation by a mean over tokens the loss still has to be divided by their number.
        """
        total = torch.zeros(4, dtype=torch.float32, device=self.pipeline.device)
        if run.losses and self.groups.speaks:
            losses = torch.stack([loss.float() for loss in run.losses])
            total[0] = losses.sum() / (count * self.groups.mesh.num_replicas)
            if run.tokens is not None:
                counts = run.tokens.counts()
                total[2] = counts.sum()
                if not run.tokens.before_backward:
                    total[0] = (losses * counts).sum()
        total[1], total[3] = self.step_control.stop_and_call_flags()
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        return total, work

    def _write(self, name: str, loss: torch.Tensor) -> None:
        """Write to DeepSpeed's monitors (tensorboard, csv_monitor, ...), as stock PipelineEngine does."""
        engine = self.deepspeed_engine
        if engine.monitor.enabled and self.groups.rank == 0:
            engine.monitor.write_events([(f"Train/Samples/{name}", loss.item(), engine.global_samples)])


def _require_hooks_kept(kind: type) -> None:
    """Refuse hooks of stock's engine in dsx's, or a subclass of it. Raises ModelError."""
    require_kept(kind, PipelineEngine, stock.PipelineEngine, set(vars(PipelineEngine)) - ENGINE_HOOKS)


def _iterator(data: Any) -> Any:
    """An iterator as it is: asked for another, DeepSpeed's own loader begins with its first batch again."""
    return data if data is None or hasattr(data, "__next__") else iter(data)


def _require_iterator(data: Any) -> None:
    """Refuse a loader or list, which would begin with its first micro-batches again in every step."""
    if not hasattr(data, "__next__"):
        raise DataError(
            f"train_batch({type(data).__name__})",
            "it is no iterator, so that every step would train on its first micro-batches",
            "make one before the loop, batches = iter(loader), and give that to each call; or give the "
            "loader to engine.set_dataloader once and call train_batch()",
        )
