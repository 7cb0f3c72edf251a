"""Names that DeepSpeed 0.19.8's JSON knows. tests/config/test_deepspeed_keys.py holds them against it."""

from __future__ import annotations

from typing import Final

# Keys that DeepSpeedConfig and deepspeed.initialize read from the top level (runtime/config.py, constants.py
# and the config modules they call).
TOP_LEVEL: Final = frozenset({
    "activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "checkpoint", "comet",
    "comms_logger", "communication_data_type", "compile", "csv_monitor", "data_efficiency",
    "data_parallel_size", "data_types", "dataloader_drop_last", "datastates_ckpt", "disable_allgather",
    "disable_python_gc", "dump_state", "expert_parallel", "flops_profiler", "fp16",
    "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping",
    "gradient_predivide_factor", "hybrid_engine", "log_level", "managed_gradient_accumulation",
    "memory_breakdown", "optimizer", "pipeline", "prescale_gradients", "scheduler",
    "seq_parallel_communication_data_type", "sequence_parallel_size", "steps_per_print",
    "tensor_parallel", "tensorboard", "timers", "torch_autocast", "train_batch_size",
    "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "vocabulary_size",
    "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization",
})  # fmt: skip

# Refused by runtime/config.py, _REMOVED_TOP_LEVEL_CONFIG_KEYS: what to do without them.
REMOVED: Final = {
    "amp": "use bf16",
    "compression_training": "remove it",
    "curriculum_learning": "remove it",
    "eigenvalue": "remove it",
    "elasticity": "set the batch keys directly",
    "graph_harvesting": "remove it",
    "nebula": "remove it; dsx writes its own checkpoints",
    "progressive_layer_drop": "remove it",
    "quantize_training": "remove it",
    "sparse_attention": "remove it",
    "sparse_gradients": "remove it",
}

# _REMOVED_ZERO_CONFIG_KEYS.
REMOVED_ZERO: Final = frozenset({"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"})

# Fields of DeepSpeedZeroConfig under the names its documentation uses (runtime/zero/config.py).
ZERO: Final = frozenset({
    "allgather_bucket_size", "allgather_partitions", "compute_grad_norm", "contiguous_gradients",
    "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "elastic_checkpoint",
    "enable_sanity_checks", "ignore_unused_parameters", "leaf_module", "legacy_stage1",
    "load_from_fp32_weights", "log_trace_cache_warnings", "memory_efficient_linear",
    "offload_optimizer", "offload_param", "overlap_comm", "override_module_apply",
    "parameter_alignment", "pipeline_loading_checkpoint", "reduce_bucket_size", "reduce_scatter",
    "round_robin_gradients", "save_muon_momentum_buffer_in_memory", "stage",
    "stage3_allgather_sequential", "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold", "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size", "stage3_use_all_reduce_for_fetch_params", "sub_group_size",
    "use_multi_rank_bucket_allreduce", "zenflow", "zero_hpz_partition_size", "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights", "zero_quantized_weights",
})  # fmt: skip

# Fields that DeepSpeedZeroConfig also takes without their stage3_ prefix (populate_by_name).
ZERO_SHORT: Final = frozenset({
    "allgather_sequential", "gather_16bit_weights_on_model_save", "max_live_parameters",
    "max_reuse_distance", "model_persistence_threshold", "module_granularity_threshold",
    "param_persistence_threshold", "prefetch_bucket_size", "use_all_reduce_for_fetch_params",
})  # fmt: skip

# DeepSpeedZeroOffloadParamConfig, DeepSpeedZeroOffloadOptimizerConfig (runtime/zero/offload_config.py).
OFFLOAD_PARAM: Final = frozenset(
    {"device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"}
)
OFFLOAD_OPTIMIZER: Final = frozenset({
    "device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init",
    "ratio", "super_offload", "cpuadam_cores_perc",
})  # fmt: skip

# DeepSpeedBF16Config (runtime/precision_config.py).
BF16: Final = frozenset({
    "enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads",
    "bf16_optimizer_states",
})  # fmt: skip

# DEEPSPEED_OPTIMIZERS (runtime/config.py), matched in any case, and the classes of torch.optim, in theirs.
OPTIMIZERS: Final = frozenset(
    {"Adagrad", "Adam", "AdamW", "Lamb", "MuAdam", "MuAdamW", "MuSGD", "Lion", "Muon"}
)
TORCH_OPTIMIZERS: Final = frozenset({
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam",
    "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
})  # fmt: skip
REMOVED_OPTIMIZERS: Final = frozenset({"onebitadam", "zerooneadam", "onebitlamb"})

# Compiled by DeepSpeed at first use, for the machine it runs on (op_builder/).
COMPILED_OPTIMIZERS: Final = frozenset({"adam", "adamw", "lamb", "lion"})

# Optimizers that ZeRO takes without zero_allow_untested_optimizer (runtime/zero/utils.py,
# ZERO_SUPPORTED_OPTIMIZERS).
ZERO_TESTED_OPTIMIZERS: Final = frozenset({"adam", "adamw", "adagrad", "lion", "muon"})

# Keyword arguments of DeepSpeed's LR schedulers (runtime/lr_schedules.py); those in REQUIRED have no default.
SCHEDULERS: Final = {
    "LRRangeTest": frozenset({
        "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate",
        "lr_range_test_staircase", "last_batch_iteration",
    }),
    "OneCycle": frozenset({
        "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
        "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum",
        "cycle_min_mom", "cycle_max_mom", "decay_mom_rate", "last_batch_iteration",
    }),
    "WarmupLR": frozenset({
        "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration",
    }),
    "WarmupDecayLR": frozenset({
        "total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type",
        "last_batch_iteration",
    }),
    "WarmupCosineLR": frozenset({
        "total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
        "last_batch_iteration",
    }),
}  # fmt: skip
SCHEDULERS_REQUIRED: Final = {
    "LRRangeTest": (),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupLR": (),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
}
# Schedulers of torch.optim.lr_scheduler that a JSON can describe (DeepSpeed passes params as keywords).
TORCH_SCHEDULERS: Final = frozenset({
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR",
})  # fmt: skip
