"""dsx.Trainer: the interface of transformers' Trainer over dsx's engine."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.modelcard import TrainingSummary
from transformers.trainer import PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)
from transformers.trainer_pt_utils import log_metrics, metrics_format, save_metrics
from transformers.trainer_utils import (
    EvalPrediction,
    PredictionOutput,
    SaveStrategy,
    TrainOutput,
    enable_full_determinism,
    get_last_checkpoint,
    has_length,
    rotate_checkpoints,
    set_seed,
    speed_metrics,
)
from transformers.utils import find_labels
from transformers.utils import logging as transformers_logging

from dsx.checkpoint import store
from dsx.config.run import RunConfig
from dsx.config.wording import at
from dsx.engine.engine import PipelineEngine
from dsx.engine.initialize import initialize
from dsx.errors import CheckpointError, ConfigError, DataError, RunError
from dsx.launch.entry import local_rank, rank, world_size
from dsx.launch.processes import agree, distributed
from dsx.parallel.limits import row_multiple
from dsx.train import recipe
from dsx.trainer.arguments import (
    ATTRIBUTES_NOT_THERE,
    FIXED,
    NOT_THERE,
    OF_TRAINER,
    MissingNameError,
    Processes,
    refuse,
    refuse_means_by_rank,
    require_called,
)
from dsx.trainer.batches import Length, Loading, default_collator, epoch, filler, micro_batch, tokens_in
from dsx.trainer.configure import (
    GivenModel,
    configure,
    parameter_groups,
    read_json,
    require_schedule,
    schedule,
    weights_of,
)
from dsx.trainer.evaluation import Collected, Pass
from dsx.trainer.saving import keep_best, keep_newest, load, save, write_model

_LOG = logging.getLogger(__name__)


class Trainer:
    """Trains as transformers' Trainer does, in tensor x pipeline x ZeRO data parallelism.

    ``args.deepspeed`` is a DeepSpeed JSON with a ``dsx`` block, which says what is parallel; data, length,
    optimizer, logging and saving are those of the TrainingArguments. ``per_device_train_batch_size`` counts
    for each data-parallel rank. Every rank makes a Trainer and calls its methods alike.

    Args:
        model: A model folder, of which each rank reads its own part, a hub name, a config of transformers
            (fresh weights), or a causal language model of transformers or PEFT, whose weights are taken.
        args: TrainingArguments.
        data_collator: Makes a batch of samples: ``input_ids``, ``labels`` and perhaps ``attention_mask``
            (padding at the end alone) or ``position_ids`` that restart.
        train_dataset: Any map-style or iterable data set of transformers' Trainer.
        eval_dataset: Another, or several by name.
        processing_class: The tokenizer, which is saved with the model.
        compute_metrics: ``compute_metrics(EvalPrediction)`` gives metrics by name.
        callbacks: Callbacks of transformers, classes or objects.
        preprocess_logits_for_metrics: Called with logits and labels; its result is kept in their place.
        others: Further arguments of transformers' Trainer, which are refused by name.

    Attributes:
        engine: The :class:`~dsx.PipelineEngine`; None before it is needed.
        config: The resolved config of the run; None before.
        model: The pipeline, this rank's part of the model; the model as it was given before there is one.
        state: transformers' TrainerState.
        control: transformers' TrainerControl.

    Raises:
        ConfigError: Arguments or keys that cannot be honoured, all by name.
        ModelError: The model is none that dsx can train, or a subclass overrides what is never called.
    """

    log_metrics, save_metrics = log_metrics, save_metrics
    metrics_format = staticmethod(metrics_format)
    is_deepspeed_enabled = model_accepts_loss_kwargs = True
    can_return_loss = is_model_parallel = is_fsdp_enabled = is_fsdp_xla_enabled = False
    is_fsdp_xla_v1_enabled = is_fsdp_xla_v2_enabled = False
    model_init = compute_loss_func = optimizer_cls_and_kwargs = label_smoother = None  # refused as arguments

    def __init__(  # noqa: PLR0917 - as transformers' Trainer takes them
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: Any = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        **others: Any,
    ) -> None:
        others |= {"model_init": model_init, "compute_loss_func": compute_loss_func, "optimizers": optimizers}
        others |= {"optimizer_cls_and_kwargs": optimizer_cls_and_kwargs}
        if not isinstance(args, TrainingArguments):
            fix = 'pass args=TrainingArguments(deepspeed="config.json", ...)'
            raise ConfigError(f"dsx.Trainer(args={args!r})", "no TrainingArguments", fix)
        # DeepSpeed's ZeRO-3 calls what torch has renamed, a warning each time.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed(\.|$)")
        refuse(args, others, metrics=compute_metrics is not None, evaluated=eval_dataset)
        require_called(type(self), Trainer)
        self.args, self.model, self.processing_class = args, model, processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.data_collator = data_collator or default_collator(processing_class)
        (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
        transformers_logging.set_verbosity(args.get_process_log_level())
        self._given = GivenModel.of(model, Path(args.output_dir))
        kind = type(self._given.skeleton)
        self.label_names = find_labels(kind) if args.label_names is None else args.label_names
        if self.label_names != ["labels"]:
            what = "dsx reads the labels of a causal language model"
            raise ConfigError(at("label_names", self.label_names), what, 'use ["labels"]')
        skeleton: Any = self._given.skeleton
        self._numel = int(skeleton.num_parameters(exclude_embeddings=True))
        self.config = self._configured(steps=1, shares=None)
        self.engine: PipelineEngine | None = None
        self._stack = ExitStack()
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self._train_loader: DataLoader[Any] | None = None
        self._length: Length | None = None
        if train_dataset is not None:
            self._train_loader = self.get_train_dataloader()
            self._length = Length.of(self._train_loader, args, self._shares)
            self.config = self._configured(steps=self._length.steps, shares=self._shares)
            require_schedule(args, self._length.steps)
        refuse_means_by_rank(args, self._shares)
        self._follow(callbacks)
        self.is_in_train = self._has_trained = False
        self._counted_flos = 0.0
        self._made_of = self._read_when_made()

    def _read_when_made(self) -> dict[str, Any]:
        """What is read when a Trainer is made, and never again."""
        values = {each.name: getattr(self.args, each.name) for each in dataclasses.fields(self.args)}
        held = {
            f"args.{name}": deepcopy(value) if isinstance(value, dict | list) else value
            for name, value in values.items()
        }
        return held | {"train_dataset": id(self.train_dataset), "data_collator": id(self.data_collator)}

    def _configured(self, *, steps: int, shares: int | None) -> RunConfig:
        return configure(
            self.args,
            self._given,
            world_size=dist.get_world_size() if dist.is_initialized() else world_size(),
            steps=steps,
            longest=_first_length(self.train_dataset, self.eval_dataset),
            shares=shares,
        )

    def _follow(self, callbacks: list[Any] | None) -> None:
        """Make state, control and the callbacks that arguments ask for."""
        own = [DefaultFlowCallback, *get_reporting_integration_callbacks(self.args.report_to)]
        self.callback_handler = CallbackHandler(
            own + (callbacks or []), self.model, self.processing_class, None, None
        )
        self.add_callback(PrinterCallback if self.args.disable_tqdm else ProgressCallback)
        self.control = TrainerControl()
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=self._exportable,
        )
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    def __getattr__(self, name: str) -> Any:
        """Name what transformers' Trainer has and this one has not."""
        if instead := NOT_THERE.get(name) or ATTRIBUTES_NOT_THERE.get(name):
            raise MissingNameError(f"dsx.Trainer.{name}", "it is not there", instead)
        if "_made_of" not in vars(self) and type(self) is not Trainer and not name.startswith("__"):
            what = "it is not set yet, and dsx.Trainer.__init__ calls methods such as get_train_dataloader()"
            raise MissingNameError(f"{type(self).__name__}.{name}", what, "set it before super().__init__()")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # Data

    @property
    def _shares(self) -> int:
        return int(self.config.mesh.num_shares)

    @functools.cached_property
    def _loading(self) -> Loading:
        rank = dist.get_rank() if dist.is_initialized() else 0
        taken = inspect.signature(self._given.skeleton.forward).parameters
        return Loading(
            args=self.args,
            collate=self.data_collator,
            processing_class=self.processing_class,
            columns=(*taken, "label", "label_ids", *self.label_names),
            shares=self._shares,
            index=self.config.mesh.share(rank),
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This data-parallel rank's batches of ``train_dataset``."""
        if self.train_dataset is None:
            raise DataError("train_dataset = None", "there is nothing to train on", "pass train_dataset=")
        return self._loading.training(self.train_dataset, self.config.global_batch_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Batches to evaluate on: of a data set, or of that of ``eval_dataset`` which has this name."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise DataError("eval_dataset = None", "there is nothing to evaluate on", "pass eval_dataset=")
        return self._loading.evaluation(dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        return self._loading.evaluation(test_dataset)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Samples of the data set behind a loader, over all ranks."""
        if has_length(dataloader.dataset):
            return len(dataloader.dataset)  # type: ignore[arg-type]
        return len(dataloader) * int(self.args.per_device_train_batch_size)

    @property
    def _multiple(self) -> int:
        """Lengths that can be cut along the sequence."""
        parallel, mesh = self.config.dsx.parallel, self.config.mesh
        return row_multiple(mesh.cp, mesh.tp if parallel.sequence_parallel else 1)

    # The engine

    @property
    def deepspeed(self) -> PipelineEngine | None:
        """The engine, under the name that transformers has for DeepSpeed's; None before it is needed."""
        return self.engine

    @property
    def model_wrapped(self) -> Any:
        """The engine; the model before there is one."""
        return self.engine or self.model

    @property
    def accelerator(self) -> Processes:
        """What Accelerate knows of the processes: is_main_process, wait_for_everyone() and so on."""
        return Processes(self.args.distributed_state)

    def _build(self) -> PipelineEngine:
        """Make the engine, once. A collective call over all ranks."""
        if self.engine is not None:
            return self.engine
        config, args = self.config, self.args
        recipe.check_memory(config)
        for note in config.notes:
            _LOG.info(note)
        parallel = config.dsx.parallel
        groups = self._stack.enter_context(
            distributed(config.mesh, sequence_parallel=parallel.sequence_parallel, seed=args.seed)
        )
        agree(lambda: store.require_writable(config.output))
        self.config = config = recipe.measure(config, groups)
        load_layer = None
        if self._given.whole is not None:
            load_layer = weights_of(self._given.whole, config.model, groups)
        pipeline = recipe.build_model(config, groups, load_layer=load_layer, dynamic_shape=config.mesh.pp > 1)
        _LOG.info(f"proved: {pipeline.proof}")
        written = read_json(args)
        own = "optimizer" not in written
        steps = 1 if self._length is None else self._length.steps
        scheduler = None
        if "scheduler" not in written:
            scheduler = functools.partial(schedule, args, steps)
        self.engine, self.optimizer, _, self.lr_scheduler = initialize(
            model=pipeline,
            config=config,
            model_parameters=parameter_groups(pipeline, self._given, args.weight_decay) if own else None,
            lr_scheduler=scheduler,
        )
        pipeline.config = self._given.hf_config  # callbacks look for it
        self.model = pipeline
        self._given = dataclasses.replace(self._given, whole=None)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = pipeline, self.optimizer, self.lr_scheduler
        handler.train_dataloader = self._train_loader
        self.engine.basic_optimizer.register_step_pre_hook(self._before_update)
        self._updates_seen = -1
        return self.engine

    def _before_update(self, *_: Any) -> None:
        """Tell callbacks, the first time that the optimizer steps within a step of the engine."""
        if not self.is_in_train or self._updates_seen == self.state.global_step:
            return
        self._updates_seen = self.state.global_step
        for _number in range(self._substeps - 1):
            self._event("on_substep_end")
        self._event("on_pre_optimizer_step")

    def _event(self, name: str, *values: Any) -> None:
        self.control = getattr(self.callback_handler, name)(self.args, self.state, self.control, *values)

    # Training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end. A collective call over all ranks.

        Args:
            resume_from_checkpoint: A checkpoint-N of any layout; True for the newest in ``output_dir``.
            trial: Refused: there is no hyperparameter search.
            ignore_keys_for_eval: Accepted and unused: the model has logits alone.

        Returns:
            The step count, the mean loss since this call began, and metrics.

        Raises:
            CheckpointError: There is no such checkpoint, or it is of another model or batch.
            DataError: A batch that cannot be trained on.
            RunError: It has been called before, or a step's figures end the run (``dsx.faults``).
        """
        del ignore_keys_for_eval
        if trial is not None:
            raise RunError("dsx.Trainer.train(trial=)", "hyperparameter search is not there", "leave it out")
        if self._length is None or self._train_loader is None:
            self.get_train_dataloader()  # says that there is no data set
        if self._has_trained:
            raise RunError("dsx.Trainer.train()", "it has been called before", "make another Trainer")
        now = self._read_when_made()
        late = [name for name, value in self._made_of.items() if now[name] != value]
        late += sorted(vars(self).keys() & {*NOT_THERE, *OF_TRAINER})
        late += [name for name in FIXED if getattr(self, name) is not getattr(type(self), name)]
        if late:
            what = "it was set after dsx.Trainer was made, which does not read it any more"
            raise ConfigError(f"trainer.{late[0]}", what, "set it before, or pass it to dsx.Trainer")
        engine = self._build()
        self.is_in_train = self._has_trained = True
        self._begin(resume_from_checkpoint or None)
        with recipe.Guard(self.config, engine.groups) as guard:
            guard.follow(engine, {})
            output = self._trained(guard)
        self.is_in_train = False
        return output

    @property
    def _exportable(self) -> list[Any]:
        held = getattr(self, "control", None) or TrainerControl()
        return [
            each for each in (*self.callback_handler.callbacks, held) if isinstance(each, ExportableState)
        ]

    def _begin(self, resume: str | bool | None) -> None:
        """Make the state of a training, a fresh one or a checkpoint's."""
        length, args = self._length, self.args
        assert length is not None
        self.state = TrainerState(stateful_callbacks=self._exportable)
        self.state.train_batch_size = args.per_device_train_batch_size
        self.state.compute_steps(args, length.steps)
        if resume is not None:
            assert self.engine is not None
            batch = None if self.args.ignore_data_skip else self.config.global_batch_size
            self.state = load(self.engine, self._checkpoint(resume), global_batch=batch)
            best = self.state.best_model_checkpoint
            if best is not None and not Path(best).is_dir():
                self.state.best_model_checkpoint = None
            if self.args.restore_callback_states_from_checkpoint:
                self._restore_callbacks()
        self.state.max_steps, self.state.num_train_epochs = length.steps, length.epochs
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        self._first_step = self._last_logged = self.state.global_step
        self._tokens_before = self.state.num_input_tokens_seen
        self._loss_sum, self._loss_logged = 0.0, 0.0

    def _checkpoint(self, resume: str | bool) -> Path:
        folder = get_last_checkpoint(self.args.output_dir) if resume is True else str(resume)
        if folder is None:
            raise CheckpointError(
                f"output_dir = {self.args.output_dir}", "it has no checkpoint-N", "name one, or leave it out"
            )
        root, tag = store.place(Path(folder))
        if tag is None and (root / "config.json").is_file() and not (root / store.LATEST).is_file():
            what = "it holds a model alone, as save_only_model and transformers' Trainer leave it"
            fix = "give it as model=, and begin anew"
            raise CheckpointError(at("resume_from_checkpoint", folder), what, fix)
        return Path(folder)

    def _restore_callbacks(self) -> None:
        """Put callbacks and control in the place of those of the same class, as the checkpoint had them."""
        for name, saved in self.state.stateful_callbacks.items():
            states = saved if isinstance(saved, list) else [saved]
            found = [each for each in self._exportable if type(each).__name__ == name]
            for old, state in zip(found, states, strict=False):
                new = type(old).from_state(state)
                if isinstance(old, TrainerControl):
                    self.control = new
                else:
                    place = self.callback_handler.callbacks.index(old)
                    self.callback_handler.callbacks[place] = new

    def _trained(self, guard: recipe.Guard) -> TrainOutput:
        """The loop over epochs, from the state on."""
        length, args, began = self._length, self.args, time.time()
        assert length is not None
        self._began = began
        self._event("on_train_begin")
        if args.eval_on_start:
            self.evaluate()
        first, step = divmod(self.state.global_step, length.steps_per_epoch)
        for number in range(first, length.epochs if self.state.global_step < length.steps else first):
            self._event("on_epoch_begin")
            self._epoch(number, 0 if number > first or args.ignore_data_skip else step, guard)
            if self.control.should_training_stop:
                break
        done = self.state.global_step - self._first_step
        self._loss_logged += self._loss_sum
        metrics = speed_metrics(
            "train", began, num_samples=length.samples * done / max(self.state.max_steps, 1), num_steps=done
        )
        self._store_flos()
        loss = self._loss_logged / max(done, 0.001)
        metrics |= {"total_flos": self.state.total_flos, "train_loss": loss}
        self.log(metrics)
        best = self.state.best_model_checkpoint
        if args.load_best_model_at_end and best is not None:
            assert self.engine is not None
            self.engine.load_checkpoint(best)
        if best is not None and args.save_total_limit == 1:
            keep_best(Path(args.output_dir), best)
        self._event("on_train_end")
        return TrainOutput(self.state.global_step, loss, metrics)

    def _epoch(self, number: int, begin: int, guard: recipe.Guard) -> None:
        """Steps of one epoch, from its ``begin``-th on."""
        length, loader, args = self._length, self._train_loader, self.args
        assert length is not None
        assert loader is not None
        source = epoch(loader, self._loading, number, skip=length.done(begin))
        norm = rate = None
        for step in range(begin, length.steps_per_epoch):
            batches = list(islice(source, args.gradient_accumulation_steps))
            there = self._there(len(batches), step)
            if not there:
                break
            self._event("on_step_begin")
            self._substeps = math.ceil(there / self._shares)
            rate = self._rate
            norm = self._step(batches, guard)
            self._event("on_optimizer_step")
            self.state.global_step += 1
            self.state.epoch = length.epoch(number, step + 1)
            self._event("on_step_end")
            if guard.must_stop:
                self.control.should_save = self.control.should_training_stop = True
            self._report(norm, rate)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        if norm is None:
            _LOG.warning("the training data set gave not a single batch")
            self.control.should_training_stop = True
        self._event("on_epoch_end")
        self._report(norm, rate)

    @property
    def _rate(self) -> float:
        """The learning rate of the step to come; DeepSpeed's schedules do not say it before the first."""
        return float(self.optimizer.param_groups[0]["lr"])

    def _there(self, mine: int, step: int) -> int:
        """Batches that there are for a step of an epoch, over all ranks; the same on each."""
        assert self._length is not None
        if self._length.batches is not None:
            return self._length.done(step + 1) - self._length.done(step)
        return self._total(mine)

    def _total(self, mine: float) -> int:
        """The sum over the shares of a batch of what each counts in its samples. Collective."""
        assert self.engine is not None
        groups = self.engine.groups
        total = torch.tensor([mine], dtype=torch.float64, device=self.engine.pipeline.device)
        dist.all_reduce(total, group=groups.data)
        return int(total) * groups.mesh.num_shares // groups.mesh.num_replicas

    def _step(self, batches: list[Mapping[str, Any]], guard: recipe.Guard) -> float:
        """One optimizer step; the gradient norm before clipping."""
        engine, args = self.engine, self.args
        assert engine is not None
        made = [micro_batch(batch, multiple=self._multiple, needs_labels=True) for batch in batches]
        made += [filler(self._multiple)] * (engine.micro_batches - len(made))
        mean = float(engine.train_batch(iter(made)))
        guard.rolled_back(self)
        if args.logging_nan_inf_filter and not math.isfinite(mean):
            mean = self._loss_sum / (1 + self.state.global_step - self._last_logged)
        self._loss_sum += mean
        self._counted_flos += 6.0 * tokens_in(batches) * self._numel
        how, padding = (
            args.include_num_input_tokens_seen,
            getattr(self.processing_class, "pad_token_id", None),
        )
        if how != "no":
            seen = self._total(tokens_in(batches, padding, all_of=how == "all"))
            self.state.num_input_tokens_seen += seen
        every = args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            get_accelerator().empty_cache()
        return engine.get_global_grad_norm()

    def warn(self, text: str) -> None:
        """Say what a user should know, on the first rank; what :class:`dsx.recipe.Guard` says."""
        if self.is_world_process_zero():
            _LOG.warning(text)

    def went_back(self) -> None:
        """Never: dsx.faults that roll back are refused."""
        raise AssertionError

    def _store_flos(self) -> None:
        self.state.total_flos += self._total(self._counted_flos)
        self._counted_flos = 0.0

    def _report(self, norm: float | None, rate: float | None) -> None:
        step = self.state.global_step
        if self.control.should_log and step > self._last_logged:
            logs = {"loss": self._loss_sum / (step - self._last_logged)}
            if norm is not None:
                logs["grad_norm"] = norm
            logs["learning_rate"] = self._rate if rate is None else rate
            self._loss_logged += self._loss_sum
            self._loss_sum, self._last_logged = 0.0, step
            self._store_flos()
            self.log(logs, self._began)
        if self.control.should_evaluate:
            better = self._is_better(self.evaluate())
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = better
        if self.control.should_save:
            self._save_checkpoint()
            self._event("on_save")

    def _is_better(self, metrics: Mapping[str, float]) -> bool:
        """Whether a metric is the best so far, which the state then keeps."""
        args, state = self.args, self.state
        if args.metric_for_best_model is None:
            return False
        name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        if name not in metrics:
            raise ConfigError(
                at("metric_for_best_model", args.metric_for_best_model),
                f"evaluations give {', '.join(metrics)}",
                "name one of them",
            )
        best, value = state.best_metric, metrics[name]
        if best is not None and not (value > best if args.greater_is_better else value < best):
            return False
        state.best_metric = value
        if args.save_strategy != SaveStrategy.NO:
            state.best_global_step = state.global_step
        return True

    # Checkpoints and models

    def _save_checkpoint(self) -> None:
        assert self.engine is not None
        self._store_flos()
        args, state, output = self.args, self.state, Path(self.args.output_dir)
        folder = output / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.best_global_step:
            best = output / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            if best == folder or best.is_dir():
                state.best_model_checkpoint = str(best)
        state.stateful_callbacks = TrainerState(stateful_callbacks=self._exportable).stateful_callbacks
        if args.save_only_model:
            self.save_model(str(folder))
            limit, kept = args.save_total_limit, state.best_model_checkpoint
            agree(lambda: rotate_checkpoints(str(output), limit, kept, use_mtime=True))
            return
        save(self.engine, folder, state, global_batch=self.config.global_batch_size)
        keep_newest(output, args.save_total_limit, state.best_model_checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as a Hugging Face folder, with the tokenizer. A collective call over all ranks.

        In a folder that has other files already, as ``output_dir`` of a training has, a model's files are
        put beside them, and replaced where they are.
        """
        del _internal_call
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        write_model(self._build(), folder, tokenizer, self._given.generation, self._given.says)

    def save_state(self) -> None:
        """Write trainer_state.json into ``output_dir``, on the first rank."""
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

    def create_model_card(self, **facts: Any) -> None:
        """Write README.md into ``output_dir``, on the first rank; ``facts`` are those of transformers."""
        if self.is_world_process_zero():
            self.model.config = self._given.hf_config
            card = TrainingSummary.from_trainer(self, **facts).to_model_card()
            store.write_atomically(Path(self.args.output_dir) / "README.md", card.encode())

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and metrics of a data set, or of several by name. A collective call over all ranks.

        Args:
            eval_dataset: In the place of the Trainer's own.
            ignore_keys: Accepted and unused: the model has logits alone.
            metric_key_prefix: Begins every metric's name.

        Returns:
            ``eval_loss`` and so on, the same on every rank. The loss is the mean over samples of their
            batch's mean over tokens, as in one process of transformers' Trainer.
        """
        del ignore_keys
        several = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(several, dict):
            of_all: dict[str, float] = {}
            for name, each in several.items():
                of_all |= self.evaluate(each, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return of_all
        loader = self.get_eval_dataloader(eval_dataset)
        only_loss = self.compute_metrics is None or self.args.prediction_loss_only
        output = self._predicted(loader, only_loss=only_loss, prefix=metric_key_prefix)
        metrics = dict(output.metrics or {})
        self.log(metrics)
        self._event("on_evaluate", metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Logits, labels and metrics of a data set, on every rank. A collective call over all ranks.

        Logits where the batch is padding are not those of transformers: nothing masks padding at the end.
        """
        del ignore_keys
        loader = self.get_test_dataloader(test_dataset)
        output = self._predicted(loader, only_loss=self.args.prediction_loss_only, prefix=metric_key_prefix)
        self._event("on_predict", output.metrics)
        return output

    def _predicted(self, loader: DataLoader[Any], *, only_loss: bool, prefix: str) -> PredictionOutput:
        engine, args, began = self._build(), self.args, time.time()
        self.callback_handler.eval_dataloader = loader
        scoring = Pass(
            engine=engine,
            loading=self._loading,
            multiple=self._multiple,
            vocabulary=self.config.model.vocab_size,
            with_outputs=not only_loss,
            with_inputs="inputs" in args.include_for_metrics and not only_loss,
            reduce=self.preprocess_logits_for_metrics,
        )
        found = Collected(args.eval_do_concat_batches)
        for count, scored in scoring.run(loader):
            found.take(scored)
            for _number in range(count):
                self._event("on_prediction_step")
        metrics = found.metrics(args, self.compute_metrics, prefix)
        steps = math.ceil(found.samples / (args.per_device_eval_batch_size * self._shares))
        metrics |= speed_metrics(prefix, began, num_samples=found.samples, num_steps=steps)
        return PredictionOutput(
            predictions=found.array("logits"), label_ids=found.array("labels"), metrics=metrics
        )

    # Callbacks, logs and places

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Keep figures in the state's history, and give them to the callbacks.

        The epoch is added to them. ``start_time`` is when training began, for tokens a second.
        """
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                tokens = self.state.num_input_tokens_seen - self._tokens_before
                logs.update(speed_metrics("train", start_time, num_tokens=tokens))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._event("on_log", logs)

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> TrainerCallback | None:
        """Remove a callback, or the first of its class, and return it; None if there is none."""
        found: TrainerCallback | None = self.callback_handler.pop_callback(callback)
        return found

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        self.callback_handler.remove_callback(callback)

    def is_local_process_zero(self) -> bool:
        return local_rank() == 0

    def is_world_process_zero(self) -> bool:
        return (dist.get_rank() if dist.is_initialized() else rank()) == 0

    def get_num_trainable_parameters(self) -> int:
        """Elements of the whole model that are trained."""
        return sum(spec.numel for spec in self.config.param_specs if spec.trained)

    def get_learning_rates(self) -> list[float]:
        return [] if self.optimizer is None else [float(each["lr"]) for each in self.optimizer.param_groups]

    def end(self) -> None:
        """Leave the process groups that this Trainer has made. Collective; nothing can follow."""
        self._stack.close()


def _first_length(*datasets: Any) -> int | None:
    """Tokens of the first sample of the first map-style data set."""
    for dataset in datasets:
        try:
            return len(dataset[0]["input_ids"])
        except (TypeError, KeyError, IndexError, NotImplementedError):
            continue
    return None
