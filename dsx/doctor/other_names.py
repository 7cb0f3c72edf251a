"""What other tools, older code and habit call things that DeepSpeed has under another name, or has not.

Data only; words are in lower case with underscores. Options of transformers' Trainer and Accelerate, PyTorch
Lightning, FSDP, Megatron-LM, GPT-NeoX, DeepSpeed's own init_inference and launcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dsx.doctor.finding import Severity

_ACCUMULATION, _BATCH = "gradient_accumulation_steps", "train_batch_size"
_MICRO, _CLIPPING = "train_micro_batch_size_per_gpu", "gradient_clipping"
_OPTIMIZER, _SCHEDULE, _ZERO = "optimizer.params", "scheduler.params", "zero_optimization"


def _names(key: str, words: str) -> dict[str, str]:
    return dict.fromkeys(words.split(), key)


# Their word -> DeepSpeed's dotted key.
KEYS: Final[Mapping[str, str]] = {
    **_names(
        _ACCUMULATION,
        "accumulate_grad_batches gradient_accumulation grad_accum grad_accum_steps accumulation_steps "
        "gradient_accumulate_every",
    ),
    **_names(_BATCH, "batch_size global_batch_size effective_batch_size"),
    **_names(
        _MICRO,
        "micro_batch_size micro_batch per_device_train_batch_size per_gpu_train_batch_size "
        "train_micro_batch_size",
    ),
    **_names(
        _CLIPPING,
        "clip_grad clip_grad_norm grad_clip gradient_clip_val gradient_clip grad_norm_clip max_grad_norm "
        "max_norm",
    ),
    **_names(f"{_OPTIMIZER}.lr", "learning_rate base_lr"),
    **_names(f"{_OPTIMIZER}.betas", "adam_beta1 adam_beta2 beta1 beta2 adam_betas"),
    **_names(f"{_OPTIMIZER}.eps", "adam_epsilon adam_eps epsilon"),
    **_names(f"{_OPTIMIZER}.weight_decay", "wd weight_decay_rate"),
    **_names("optimizer.type", "optim optimizer_type optimizer_name"),
    **_names("scheduler", "lr_scheduler lr_schedule"),
    **_names("scheduler.type", "lr_scheduler_type scheduler_type lr_decay_style"),
    **_names(
        f"{_SCHEDULE}.warmup_num_steps",
        "warmup_steps num_warmup_steps warmup_iters lr_warmup_iters lr_warmup_steps",
    ),
    **_names(
        f"{_SCHEDULE}.total_num_steps",
        "total_steps num_training_steps total_training_steps max_steps train_iters lr_decay_iters "
        "lr_decay_steps",
    ),
    **_names(_ZERO, "zero zero_config zero_optim"),
    **_names(f"{_ZERO}.stage", "zero_stage zero_optimization_stage"),
    **_names(f"{_ZERO}.offload_optimizer", "offload optimizer_offload"),
    **_names(f"{_ZERO}.offload_param", "param_offload offload_parameters"),
    **_names(f"{_ZERO}.offload_optimizer.device", "offload_optimizer_device"),
    **_names(f"{_ZERO}.offload_param.device", "offload_param_device"),
    **_names(f"{_ZERO}.offload_optimizer.nvme_path", "offload_optimizer_nvme_path"),
    **_names(f"{_ZERO}.offload_param.nvme_path", "offload_param_nvme_path"),
    **_names(f"{_ZERO}.stage3_gather_16bit_weights_on_model_save", "zero3_save_16bit_model"),
    **_names("bf16", "bfloat dtype mixed_precision precision torch_dtype"),
    **_names("bf16.enabled", "bf16_enabled use_bf16"),
    **_names("fp16", "float16 half"),
    **_names("fp16.enabled", "fp16_enabled use_fp16"),
    **_names(
        "data_types.grad_accum_dtype",
        "gradient_accumulation_dtype grad_accumulation_dtype gradient_accumulation_data_type",
    ),
    **_names("checkpoint.load_universal", "load_universal_checkpoint universal_checkpoint"),
    **_names("checkpoint.use_node_local_storage", "use_node_local_storage save_on_each_node"),
    **_names("activation_checkpointing", "gradient_checkpointing recompute"),
    **_names(
        "tensor_parallel.autotp_size",
        "tensor_parallel_size tensor_model_parallel_size model_parallel_size mp_size tp_size tp "
        "tensor_parallel_degree",
    ),
    **_names(
        "sequence_parallel_size",
        "context_parallel_size cp_size sp_size sequence_parallel sequence_parallel_degree",
    ),
    **_names("expert_parallel", "moe"),
    **_names("expert_parallel.autoep_size", "expert_model_parallel_size expert_parallel_size ep_size"),
    **_names("steps_per_print", "print_every logging_steps log_interval print_steps"),
    **_names("tensorboard.output_path", "log_dir logging_dir"),
}

_STAGES = "give PipelineModule num_stages; DeepSpeed's JSON has no key for it"
_SHARDING = f"use {_ZERO}.stage: FSDP's FULL_SHARD is 3, SHARD_GRAD_OP is 2"
_SCRIPT = "remove it; the script, or the Trainer's arguments, say it"
_LAUNCHER = "remove it; the launcher is told it (deepspeed --num_gpus, --num_nodes, --hostfile)"
_ACCELERATE = "remove it; it belongs to Accelerate's own config file"
_INFERENCE = "remove it; it is an argument of deepspeed.init_inference"


def _outside(severity: Severity, fix: str, words: str) -> dict[str, tuple[Severity, str]]:
    return dict.fromkeys(words.split(), (severity, fix))


# Their word, at the top level -> how bad it is that DeepSpeed ignores it, and what to do instead.
OUTSIDE: Final[Mapping[str, tuple[Severity, str]]] = {
    **_outside(
        "error",
        _STAGES,
        "pipeline_model_parallel_size pipe_parallel_size pipeline_parallel_size pipeline_parallel pp_size "
        "num_stages pipeline_stages",
    ),
    **_outside(
        "error",
        _SHARDING,
        "fsdp fsdp_config sharding_strategy fsdp_sharding_strategy reshard_after_forward",
    ),
    **_outside(
        "warning", _SCRIPT, "seed random_seed output_dir save_dir checkpoint_dir save_steps eval_steps"
    ),
    **_outside("warning", _SCRIPT, "num_train_epochs epochs num_epochs save_interval tf32 allow_tf32"),
    **_outside("warning", _SCRIPT, "dataloader_num_workers max_seq_length max_length eval_batch_size"),
    **_outside("warning", _LAUNCHER, "num_gpus num_nodes world_size master_addr master_port hostfile"),
    **_outside(
        "warning",
        _ACCELERATE,
        "zero3_init_flag compute_environment distributed_type num_processes num_machines machine_rank "
        "deepspeed_multinode_launcher deepspeed_config_file downcast_bf16",
    ),
    **_outside("warning", _INFERENCE, "replace_with_kernel_inject kernel_inject injection_policy"),
}

# (block, their word) -> DeepSpeed's word in that block; empty: there is none.
INSIDE: Final[Mapping[tuple[str, str], str]] = {
    **{(block, word): "type" for block in ("optimizer", "scheduler") for word in ("name", "class", "kind")},
    **{
        (block, word): "params"
        for block in ("optimizer", "scheduler")
        for word in ("param", "kwargs", "args", "arguments", "config", "options")
    },
    # monitor/config.py
    ("wandb", "entity"): "team",
    ("wandb", "name"): "",
    ("wandb", "run_name"): "",
    **{
        (block, word): "output_path"
        for block in ("tensorboard", "csv_monitor")
        for word in ("log_dir", "logging_dir", "output_dir", "output", "path")
    },
    ("comet", "project_name"): "project",
    ("aio", "num_threads"): "intra_op_parallelism",
    ("aio", "threads"): "intra_op_parallelism",
    ("fp16", "opt_level"): "",
    ("tensor_parallel", "enabled"): "",
    ("activation_checkpointing", "enabled"): "",
}
# What a word of INSIDE that has no counterpart should be replaced by.
NOTHING: Final[Mapping[tuple[str, str], str]] = {
    ("wandb", "name"): 'remove it (DeepSpeed takes no run name; "group" groups runs)',
    ("wandb", "run_name"): 'remove it (DeepSpeed takes no run name; "group" groups runs)',
    ("fp16", "opt_level"): "remove it; it was Apex's",
    ("tensor_parallel", "enabled"): "remove it; autotp_size above 1 switches AutoTP on",
    (
        "activation_checkpointing",
        "enabled",
    ): "remove it; the model's calls of deepspeed.checkpointing are the switch",
}
# Words of many blocks: that another block has one says nothing.
COMMON: Final = frozenset(
    _names(
        "",
        "mode seed profile type debug verbose project team group device dtype enabled params online fast "
        "metric names classes pin_memory",
    )
)
# Blocks of dsx's own, which stand inside "dsx".
DSX: Final = frozenset(
    {"model", "data", "train", "parallel", "schedule", "partition", "recompute", "elastic", "tracking"}
)

# Schedules of transformers and of papers -> DeepSpeed's.
SCHEDULES: Final[Mapping[str, str]] = {
    "cosine": "WarmupCosineLR",
    "cosinelr": "WarmupCosineLR",
    "cosinewithwarmup": "WarmupCosineLR",
    "warmupcosine": "WarmupCosineLR",
    "warmupcosineannealinglr": "WarmupCosineLR",
    "cosineannealing": "WarmupCosineLR",
    "linear": "WarmupDecayLR",
    "linearwithwarmup": "WarmupDecayLR",
    "warmuplineardecaylr": "WarmupDecayLR",
    "warmuplinear": "WarmupDecayLR",
    "constant": "ConstantLR",
    "constantwithwarmup": "WarmupLR",
    "warmup": "WarmupLR",
}
# Parts of optimizers' names that say where they run and not what they compute.
OPTIMIZER_PARTS: Final = ("deepspeed", "fused", "cpu", "torch", "apex", "hf", "bnb", "paged", "8bit", "32bit")
