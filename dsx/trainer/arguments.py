"""Which arguments of a Trainer script dsx.Trainer honours, which mean nothing to it, and which it refuses.

One table, as data. Every field of ``TrainingArguments`` stands in exactly one of its three parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from dsx.config.load import raise_all
from dsx.config.wording import at
from dsx.errors import ConfigError, ModelError


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why values of an argument are refused.

    Attributes:
        why: A clause that follows "argument = value: ".
        fix: What to do: an imperative clause.
        fine: The values that are not refused.
    """

    why: str
    fix: str
    fine: tuple[Any, ...] = (None, False)


HONOURED = frozenset({
    "activation_checkpointing", "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "data_seed",
    "dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context",
    "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory",
    "dataloader_prefetch_factor", "deepspeed", "disable_tqdm", "eval_delay", "eval_do_concat_batches",
    "eval_on_start", "eval_steps", "eval_strategy", "fp16", "full_determinism", "gradient_accumulation_steps",
    "gradient_checkpointing", "greater_is_better", "ignore_data_skip", "include_for_metrics",
    "include_num_input_tokens_seen", "label_names", "learning_rate", "length_column_name",
    "load_best_model_at_end", "log_level", "log_level_replica", "logging_first_step",
    "logging_nan_inf_filter", "logging_steps", "logging_strategy", "lr_scheduler_kwargs",
    "max_grad_norm", "max_steps", "metric_for_best_model", "num_train_epochs",
    "output_dir", "per_device_eval_batch_size", "per_device_train_batch_size", "prediction_loss_only",
    "project", "remove_unused_columns", "report_to", "restore_callback_states_from_checkpoint", "run_name",
    "save_only_model", "save_steps", "save_strategy", "save_total_limit", "seed", "torch_empty_cache_steps",
    "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id",
    "warmup_steps", "weight_decay",
})  # fmt: skip
"""Arguments that do here what they do under transformers' Trainer."""

NO_MATTER: Mapping[str, str] = {
    "average_tokens_across_devices": "the loss is a mean over all ranks; False is refused for several",
    "bf16_full_eval": "evaluation computes in the precision of training",
    "fp16_full_eval": "evaluation computes in the precision of training",
    "ddp_backend": "TrainingArguments themselves choose the backend with it",
    "ddp_broadcast_buffers": "gradients are reduced by ZeRO, not by DistributedDataParallel",
    "ddp_bucket_cap_mb": "gradients are reduced by ZeRO, not by DistributedDataParallel",
    "ddp_find_unused_parameters": "gradients are reduced by ZeRO, not by DistributedDataParallel",
    "ddp_static_graph": "gradients are reduced by ZeRO, not by DistributedDataParallel",
    "ddp_timeout": "TrainingArguments themselves make the process group with it",
    "do_eval": "scripts ask for it themselves",
    "do_predict": "scripts ask for it themselves",
    "do_train": "scripts ask for it themselves",
    "eval_accumulation_steps": "predictions go to the host's memory after every few micro-batches anyhow",
    "eval_use_gather_object": "predictions are gathered as objects anyhow",
    "fsdp_config": "it tunes fsdp, which is refused",
    "hub_always_push": "it is about push_to_hub, which is refused",
    "hub_model_id": "it is about push_to_hub, which is refused",
    "hub_private_repo": "it is about push_to_hub, which is refused",
    "hub_revision": "it is about push_to_hub, which is refused",
    "hub_strategy": "it is about push_to_hub, which is refused",
    "hub_token": "it is about push_to_hub, which is refused",
    "liger_kernel_config": "it tunes use_liger_kernel, which is refused",
    "local_rank": "the launcher's environment says it",
    "log_on_each_node": "the first rank of all logs",
    "resume_from_checkpoint": "scripts pass it to train()",
    "tf32": "TrainingArguments themselves set it",
    "torch_compile_backend": "it turns torch_compile on, in whose place dsx.compile is",
    "torch_compile_mode": "it turns torch_compile on, in whose place dsx.compile is",
    "use_cache": "layers have no cache of keys and values while they train",
    "use_cpu": "TrainingArguments themselves choose the device",
}
"""Arguments without a meaning here, with the reason."""

_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
_SAMPLING = ("random", "sequential", "group_by_length")
_RECOMPUTED = Refusal(
    "blocks are computed again by dsx, all of them and in one way",
    "leave it out; dsx.recompute has the kinds there are",
    (None, {}, {"use_reentrant": False}, {"use_reentrant": True}),
)

REFUSED: Mapping[str, Refusal] = {
    "accelerator_config": Refusal(
        "batches are dealt to data-parallel ranks by dsx, in one order for every layout", "leave it out"
    ),
    "activation_checkpointing_kwargs": _RECOMPUTED,
    "auto_find_batch_size": Refusal(
        "a layout's memory is estimated before the run",
        "ask `dsx estimate`, and set per_device_train_batch_size",
    ),
    "batch_eval_metrics": Refusal(
        "metrics are computed once, of all predictions", "reduce them with preprocess_logits_for_metrics"
    ),
    "debug": Refusal("nothing is hooked into the layers", "leave it out; dsx.faults watches figures", ([],)),
    "enable_jit_checkpoint": Refusal(
        "a signal to any rank already saves and ends the run (dsx.faults.stop_signals)", "leave it out"
    ),
    "fsdp": Refusal(
        "ZeRO is what partitions here", "use ZeRO-3 in the DeepSpeed JSON", (None, "", [], False)
    ),
    "gradient_checkpointing_kwargs": _RECOMPUTED,
    "label_smoothing_factor": Refusal("the loss is the plain cross entropy", "set it to 0", (0,)),
    "lr_scheduler_type": Refusal(
        "it waits for a metric, and the engine moves the learning rate at every step",
        "use a schedule of steps, such as cosine",
    ),
    "neftune_noise_alpha": Refusal("nothing is hooked into the embedding", "leave it out"),
    "optim": Refusal(
        "ZeRO partitions states of single elements, and dsx knows those of AdamW and SGD",
        f"use {', '.join(_OPTIMIZERS)}, or name an optimizer of DeepSpeed in the JSON",
        _OPTIMIZERS,
    ),
    "optim_args": Refusal(
        "AdamW and SGD have their own arguments", "leave it out, or name the optimizer in the JSON"
    ),
    "optim_target_modules": Refusal("it is of optimizers that are refused", "leave it out"),
    "parallelism_config": Refusal("the JSON says what is parallel", 'write "dsx": {"parallel": {...}} there'),
    "push_to_hub": Refusal("nothing is sent anywhere", "upload what save_model has written"),
    "save_on_each_node": Refusal("a checkpoint is one folder that all ranks share", "use a shared folder"),
    "skip_memory_metrics": Refusal(
        "allocations are not traced", "leave it at True; `dsx estimate` tells a run's memory", (True,)
    ),
    "torch_compile": Refusal(
        "layers are compiled block by block", 'leave it out; write "compile": "blocks" into the dsx block'
    ),
    "train_sampling_strategy": Refusal(
        "its micro-batches have changing numbers of rows", f"use {', '.join(_SAMPLING)}", _SAMPLING
    ),
    "use_liger_kernel": Refusal("it replaces modules, which dsx cuts", "leave it out"),
}
"""Arguments that are refused unless their value is one of ``fine``."""

_NOT_SCHEDULES = ("reduce_lr_on_plateau", "greedy")

OF_TRAINER: Mapping[str, Refusal] = {
    "model_init": Refusal("hyperparameter search is not there", "pass model=", (None,)),
    "compute_loss_func": Refusal("the loss is the plain cross entropy", "leave it out", (None,)),
    "optimizers": Refusal(
        "layers are built and cut later, and an optimizer made before has other parameters",
        "use optim and lr_scheduler_type of TrainingArguments, or the JSON's optimizer and scheduler",
        (None, (None, None)),
    ),
    "optimizer_cls_and_kwargs": Refusal(
        "ZeRO partitions states of single elements, and dsx knows those of AdamW and SGD",
        "use optim of TrainingArguments, or the JSON's optimizer",
        (None,),
    ),
}
"""Arguments of Trainer itself that are refused."""

_OF_OTHERS: Mapping[str, str] = {
    "tokenizer": "call it processing_class=",
    "peft_config": 'give get_peft_model(model, peft_config) as model, or write "adapter" into the dsx block',
}
"""Arguments that older and other trainers have, and what is here in their place."""

NOT_THERE: Mapping[str, str] = {
    "_get_eval_sampler": "samples come in order; get_eval_dataloader may give others",
    "_get_train_sampler": "train_sampling_strategy orders samples; get_train_dataloader may give others",
    "_inner_training_loop": "train() runs the pipeline's schedule",
    "_prepare_inputs": "each rank takes its own part of a batch, which the collator makes",
    "_save": "no rank has the whole model: save_model() writes it",
    "autocast_smart_context_manager": "the JSON's bf16 decides the precision",
    "call_model_init": "hyperparameter search is not there: pass model=",
    "compute_loss": "the loss is the plain cross entropy over the trained tokens of the global batch",
    "compute_loss_context_manager": "the JSON's bf16 decides the precision",
    "create_accelerator_and_postprocess": "dsx's engine takes Accelerate's place",
    "create_optimizer": "the optimizer is made over layers that are cut: name it in the JSON",
    "create_optimizer_and_scheduler": "the optimizer is made over layers that are cut: name it in the JSON",
    "create_scheduler": "name the schedule by lr_scheduler_type, or in the JSON",
    "current_flos": "state.total_flos has them at every log and save",
    "evaluation_loop": "evaluate() and predict() run the pipeline",
    "floating_point_ops": "they are counted from the model's parameters",
    "get_batch_samples": "a step reads its micro-batches at once",
    "get_decay_parameter_names": "biases and norms do not decay, as in transformers",
    "get_cp_size": "trainer.config.mesh has all degrees",
    "get_optimizer_cls_and_kwargs": "trainer.optimizer is there once the engine is",
    "get_optimizer_group": "ZeRO partitions groups: trainer.optimizer.param_groups",
    "get_sp_size": "trainer.config.mesh has all degrees",
    "get_total_train_batch_size": "trainer.config.global_batch_size has it",
    "get_tp_size": "trainer.config.mesh has all degrees",
    "hyperparameter_search": "start the script once for each trial",
    "init_hf_repo": "upload what save_model has written",
    "loss_is_scaled_for_ga": "the engine divides by the trained tokens of the global batch",
    "place_model_on_device": "each rank makes its own layers on its device",
    "prediction_step": "evaluate() and predict() run the pipeline",
    "push_to_hub": "upload what save_model has written",
    "set_initial_training_values": "the length is computed once: state.max_steps, state.num_train_epochs",
    "store_flos": "state.total_flos has them at every log and save",
    "training_step": "a step is one call of the engine: all its micro-batches, in the schedule's order",
}
"""Names of transformers' Trainer that dsx.Trainer lacks, and what is there instead.

It neither has nor calls them, so that a subclass that defines one is refused.
"""


_TRIALS = "hyperparameter search is not there"
ATTRIBUTES_NOT_THERE: Mapping[str, str] = {
    "tokenizer": "it is trainer.processing_class, as in transformers since 5.0",
    "current_gradient_accumulation_steps": "trainer.args.gradient_accumulation_steps; all steps are whole",
    "gather_function": "evaluate() and predict() gather what ranks have",
    "is_distributed_loading_by_transformers": "trainer.config.mesh has all degrees",
    "hub_model_id": "upload what save_model has written",
    "push_in_progress": "upload what save_model has written",
    "neftune_noise_alpha": "nothing is hooked into the embedding",
    **dict.fromkeys(("compute_objective", "hp_name", "hp_search_backend", "hp_space", "objective"), _TRIALS),
}
"""The same of what transformers' Trainer has, or had, as an attribute: a subclass may have it as its own."""


FIXED: Mapping[str, str] = {
    "compute_loss_func": NOT_THERE["compute_loss"],
    "label_smoother": NOT_THERE["compute_loss"],
    "model_accepts_loss_kwargs": "the loss is the mean over the trained tokens of the global batch, always",
    "model_init": NOT_THERE["call_model_init"],
    "optimizer_cls_and_kwargs": NOT_THERE["create_optimizer"],
}
"""Attributes by which transformers' Trainer trains otherwise, and dsx's does not: they keep their values."""


class MissingNameError(ModelError, AttributeError):
    """A name of transformers' Trainer that is not there."""


class Processes:
    """What scripts ask Accelerate's Accelerator after training: of the processes, not of the model."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(self._state, name):
            return getattr(self._state, name)
        fix = "dsx's engine takes Accelerate's place: trainer.engine"
        raise MissingNameError(f"dsx.Trainer.accelerator.{name}", "it is not there", fix)


def refusals(args: Any, given: Mapping[str, Any]) -> Sequence[ConfigError]:
    """Every argument that cannot be honoured, one error each.

    ``given`` are further arguments that Trainer was called with, by name.
    """
    found = []
    if any(each.__module__.startswith("trl.") for each in type(args).__mro__):
        what = "they are TRL's, and what they ask of data and loss only its own trainers do"
        fix = "pass TrainingArguments, and a data set that is tokenised and has labels"
        return [ConfigError(f"dsx.Trainer(args={type(args).__name__}(...))", what, fix)]
    for each in fields(args):
        value, rule = getattr(args, each.name), REFUSED.get(each.name)
        known = rule is not None or each.name in HONOURED or each.name in NO_MATTER
        plain = value.value if isinstance(value, Enum) else value
        if not known and not _is_default(each, value):
            why = f"an argument of {type(args).__name__} that dsx.Trainer does not know"
            found.append(ConfigError(at(each.name, plain), why, "leave it out"))
        elif rule is not None and not _is_fine(each.name, plain, rule):
            found.append(ConfigError(at(each.name, plain), rule.why, rule.fix))
    for name, value in given.items():
        rule = OF_TRAINER.get(name)
        if rule is None:
            found.append(
                ConfigError(f"dsx.Trainer({name}=)", "no such argument", _OF_OTHERS.get(name, "leave it out"))
            )
        elif value not in rule.fine:
            found.append(ConfigError(f"dsx.Trainer({name}=)", rule.why, rule.fix))
    return found


def refuse(args: Any, given: Mapping[str, Any], *, metrics: bool = True, evaluated: Any = None) -> None:
    """Raise a ConfigError about all of :func:`refusals`, and about arguments that cannot hold together.

    ``metrics`` says whether there are any besides the loss; ``evaluated`` is a data set, or several by name.
    """
    together = (*_disagreements(args, evaluated), *_of_the_best(args, metrics, evaluated))
    raise_all("TrainingArguments", [*refusals(args, given), *together])


def refuse_means_by_rank(args: Any, shares: int) -> None:
    """Raise a ConfigError if each of several data-parallel ranks shall divide its loss by its own tokens."""
    if shares > 1 and not args.average_tokens_across_devices:
        raise ConfigError(
            at("average_tokens_across_devices", False),
            f"the loss is the mean over all {shares} data-parallel ranks' tokens",
            "leave it out",
        )


def require_called(kind: type, ours: type) -> None:
    """Refuse a subclass of ``ours`` whose overrides are never called, or called with other arguments."""
    added = {name for each in kind.__mro__ if each not in ours.__mro__ for name in vars(each)}
    for name in sorted(added):
        why = NOT_THERE.get(name)
        if why is None and not name.startswith("__"):
            if not hasattr(ours, name) and hasattr(Trainer, name):
                why = "it is not there"
            elif name.startswith("_") and name in vars(ours):
                why = "its own method of this name does something else"
            elif name in FIXED and getattr(kind, name) is not getattr(ours, name):
                why = FIXED[name]
        if why is not None:
            raise ModelError(
                f"{kind.__name__}.{name}",
                f"dsx.Trainer never calls it: {why}",
                "remove it, or use dsx.PipelineModule and dsx.initialize with a loss of your own",
            )


def _disagreements(args: Any, evaluated: Any) -> Iterator[ConfigError]:
    """Arguments that only fail together, and would after hours."""
    for name, asked in (("eval_strategy", args.eval_strategy != "no"), ("eval_on_start", args.eval_on_start)):
        if asked and evaluated is None:
            value = getattr(args, name)
            where = at(name, value.value if isinstance(value, Enum) else value)
            yield ConfigError(where, "there is no eval_dataset", "pass eval_dataset=")
    for name in ("bf16", "fp16"):
        if getattr(args, f"{name}_full_eval") and not getattr(args, name):
            what = "an evaluation computes in the precision of the training"
            yield ConfigError(at(f"{name}_full_eval", True), what, f"leave it out, or set {name}=True")
    launched = getattr(args, "mixed_precision", "no")  # what `accelerate launch` has put in the environment
    if launched not in ("no", "bf16" if args.bf16 else "fp16" if args.fp16 else "no"):
        what = "the launcher asks for it, and the TrainingArguments do not"
        yield ConfigError(f"ACCELERATE_MIXED_PRECISION = {launched}", what, "say it in both, or in none")
    if args.max_steps == 0:
        what = "it asks neither for steps nor for epochs"
        yield ConfigError(at("max_steps", 0), what, "leave it out, or count steps from 1")
    if args.max_grad_norm is None or args.max_grad_norm < 0:
        what = "it is no norm, which is at least 0"
        yield ConfigError(at("max_grad_norm", args.max_grad_norm), what, "write 0, which clips nothing")
    for name in ("dataloader_persistent_workers", "dataloader_multiprocessing_context"):
        value = getattr(args, name)
        if value and not args.dataloader_num_workers:
            yield ConfigError(at(name, value), "there are no workers", "set dataloader_num_workers")


def _of_the_best(args: Any, metrics: bool, evaluated: Any) -> Iterator[ConfigError]:
    """What contradicts the choice of a best checkpoint."""
    best, loss = args.metric_for_best_model, "loss"
    by_best = SaveStrategy(args.save_strategy) == SaveStrategy.BEST
    if args.save_only_model and args.load_best_model_at_end:
        what = "a checkpoint of the weights alone cannot be loaded again at the end (load_best_model_at_end)"
        yield ConfigError(at("save_only_model", True), what, "set one of them to False")
    if by_best and best is None:
        fix = 'name one, such as metric_for_best_model="loss"'
        yield ConfigError(at("save_strategy", "best"), "no metric says which checkpoint is best", fix)
    if by_best and args.eval_strategy == "no":
        what = "nothing is evaluated, so that no checkpoint is the best and none is saved"
        yield ConfigError(at("save_strategy", "best"), what, "set eval_strategy")
    if best is None:
        return
    name = best.removeprefix("eval_")
    if isinstance(evaluated, Mapping):
        prefix = next((f"{each}_" for each in evaluated if name.startswith(f"{each}_")), None)
        loss = f"{next(iter(evaluated), '')}_loss" if prefix is None else f"{prefix}loss"
        if prefix is None:
            what = "metrics begin with the name of one of the data sets of eval_dataset"
            yield ConfigError(at("metric_for_best_model", best), what, f'write "{loss}", or the like')
            return
    if name != loss and (args.prediction_loss_only or not metrics):
        why = "with prediction_loss_only" if metrics else "without compute_metrics="
        fix = f'{"set that to False" if metrics else "pass compute_metrics="}, or use "{loss}"'
        yield ConfigError(at("metric_for_best_model", best), f"{why} the loss is the only metric", fix)


def _is_default(field: Any, value: Any) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(value == default)


def _is_fine(name: str, value: Any, rule: Refusal) -> bool:
    if name == "lr_scheduler_type":
        return value not in _NOT_SCHEDULES
    if name == "accelerator_config":  # TrainingArguments put an object of defaults there
        return value is None or value == type(value)()
    return value in rule.fine
