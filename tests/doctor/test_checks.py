"""Each check finds what it is for, and is silent about the same config put right."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from dsx.config.document import from_mapping
from dsx.config.keys import Operator, reference
from dsx.config.refusals import By, Context, errors, refused
from dsx.config.wording import HIDDEN, dotted
from dsx.doctor import examine, unknown, values
from dsx.doctor.examine import CHECKS, advice

BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
GONE = object()
STAGE = "zero_optimization.stage"
OFFLOAD = "zero_optimization.offload_optimizer"
CPU = {"device": "cpu"}
HPZ = "zero_optimization.zero_hpz_partition_size"
FP16 = {"bf16": GONE, "fp16.enabled": True}
WARMUP = {"scheduler.type": "WarmupDecayLR"}
CURRICULUM = {"enabled": True, "schedule_type": "fixed_linear"}
METRICS = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"
METRIC = {"schedule_type": "fixed_linear"}


def changed(edits):
    """BASE with dotted keys set or removed."""
    config = copy.deepcopy(BASE)
    for key, value in edits.items():
        *path, last = key.split(".")
        node = config
        for part in path:
            node = node.setdefault(part, {})
        if value is GONE:
            node.pop(last, None)
        else:
            node[last] = value
    return config


# check id, severity, key of the finding, wrong edits, right edits, arguments of examine
CASES = [
    ("hidden-secret", "error", "comet.api_key", {"comet.api_key": HIDDEN}, {"comet.api_key": "mine"}, {}),
    # Unknown keys.
    ("unknown-key", "error", "gradient_cliping", {"gradient_cliping": 1.0}, {"gradient_clipping": 1.0}, {}),
    ("unknown-key", "error", "zero_optimization.overlap_com", {"zero_optimization.overlap_com": True},
     {"zero_optimization.overlap_comm": True}, {}),
    ("unknown-key", "error", "bf16.enable", {"bf16": {"enable": True}}, {}, {}),
    ("unknown-key", "error", "optimizer.params.learning_rate", {"optimizer.params.learning_rate": 1}, {}, {}),
    ("unknown-key", "error", "optimizer.params.momentum", {"optimizer.params.momentum": 0.9},
     {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}, STAGE: 0}, {}),
    ("unknown-key", "warning", "my_own_note", {"my_own_note": "x"}, {}, {}),
    ("unknown-key", "error", "grad_clip", {"grad_clip": 1.0}, {}, {}),
    ("unknown-key", "error", "wandb.entity", {"wandb": {"enabled": True, "entity": "me"}},
     {"wandb": {"enabled": True, "team": "me"}}, {}),
    ("unknown-key", "error", "wandb.api_key", {"wandb": {"enabled": True, "api_key": "k"}}, {}, {}),
    ("unknown-key", "warning", "hidden_size", {"hidden_size": 64}, {}, {}),
    ("unknown-key", "error", "checkpoint.load_universal_checkpoint",
     {"checkpoint": {"load_universal_checkpoint": True}}, {"checkpoint": {"load_universal": True}}, {}),
    ("unknown-key", "error", "load_universal_checkpoint", {"load_universal_checkpoint": True}, {}, {}),
    ("unknown-key", "error", "activation_checkpointing.partitioned_activation",
     {"activation_checkpointing": {"partitioned_activation": True}},
     {"activation_checkpointing": {"partition_activations": True}}, {}),
    ("unknown-key", "error",
     "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.x.min_dificulty",
     {"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.x.min_dificulty": 1}, {}, {}),
    ("misplaced-key", "error", "stage3_max_live_parameters", {"stage3_max_live_parameters": 1e9}, {}, {}),
    ("misplaced-key", "error", "stage", {"stage": 2}, {}, {}),
    ("misplaced-key", "error", "lr", {"lr": 1e-3}, {}, {}),
    ("misplaced-key", "error", "zero_optimization.gradient_clipping",
     {"zero_optimization.gradient_clipping": 1.0}, {}, {}),
    ("wrong-case", "error", "FP16", {"FP16": {"enabled": True}}, {}, {}),
    ("wrong-case", "error", "zero_optimization.Stage", {"zero_optimization": {"Stage": 2}}, {}, {}),
    ("wrong-case", "error", "zero-optimization", {"zero-optimization": {"stage": 2}}, {}, {}),
    ("misplaced-key", "error", "scheduler.warmup_num_steps",
     {"scheduler": {"type": "WarmupLR", "params": {}, "warmup_num_steps": 5}}, {}, {}),
    ("misplaced-key", "error", "zero_optimization.aio", {"zero_optimization.aio": {"queue_depth": 8}}, {},
     {}),
    ("misplaced-key", "error", "bf16.loss_scale", {"bf16.loss_scale": 0}, {}, {}),
    ("misplaced-key", "error", "ds_config", {"ds_config": {"train_batch_size": 8}}, {}, {}),
    # Removed, renamed, new.
    ("removed", "error", "elasticity", {"elasticity": {"enabled": True}}, {}, {}),
    ("removed", "error", "amp", {"amp": {"enabled": True}}, {}, {}),
    ("removed", "error", "zero_optimization.mics_shard_size", {"zero_optimization.mics_shard_size": 2},
     {}, {}),
    ("removed", "error", "optimizer.type", {"optimizer.type": "OneBitAdam"}, {"optimizer.type": "Adam"}, {}),
    ("removed", "error", "elasticity", {"elasticity": {"enabled": True}}, {}, {"version": "0.19.8"}),
    ("no-effect", "error", "pipeline.stages", {"pipeline": {"stages": 4}},
     {"pipeline": {"stages": "auto"}}, {}),
    ("deprecated", "warning", "zero_optimization.cpu_offload", {"zero_optimization.cpu_offload": True},
     {OFFLOAD: CPU}, {}),
    ("deprecated", "error", "zero_optimization.cpu_offload",
     {"zero_optimization.cpu_offload": True, OFFLOAD: CPU}, {}, {}),
    ("deprecated", "warning", "zero_optimization", {"zero_optimization": True}, {}, {}),
    ("deprecated", "note", "bfloat16", {"bf16": GONE, "bfloat16": {"enabled": True}}, {}, {}),
    ("deprecated", "warning", "bfloat16", {"bf16": GONE, "bfloat16": {"enabled": True}}, {},
     {"runner": "trainer"}),
    ("deprecated", "error", "bfloat16", {"bfloat16": {"enabled": False}}, {"bf16": GONE, "bfloat16": {}}, {}),
    ("version", "error", "zero_optimization.zenflow", {"zero_optimization.zenflow": {"topk_ratio": 0.1}},
     {}, {"version": "0.16.4"}),
    # Values.
    ("quoted", "error", "train_micro_batch_size_per_gpu", {"train_micro_batch_size_per_gpu": "2"}, {}, {}),
    ("quoted", "error", "prescale_gradients", {"prescale_gradients": "false"}, {}, {}),
    ("quoted", "warning", STAGE, {STAGE: "2"}, {STAGE: 2}, {}),
    ("quoted", "warning", "bf16.enabled", {"bf16.enabled": "true"}, {}, {}),
    ("quoted", "warning", "bf16.enabled", {"bf16.enabled": "yes"}, {}, {}),
    ("quoted", "error", "zero_optimization.reduce_bucket_size",
     {"zero_optimization.reduce_bucket_size": "5e8"},
     {"zero_optimization.reduce_bucket_size": 5e8}, {}),
    ("wrong-type", "error", "bf16", {"bf16": True}, {}, {}),
    ("wrong-type", "error", "zero_optimization", {"zero_optimization": 3}, {}, {}),
    ("wrong-type", "error", "optimizer", {"optimizer": "AdamW"}, {}, {}),
    ("wrong-type", "error", "zero_optimization.reduce_bucket_size",
     {"zero_optimization.reduce_bucket_size": 0.5}, {}, {}),
    ("wrong-type", "note", "bf16.enabled", {"bf16.enabled": 1}, {}, {}),
    ("null", "error", "gradient_clipping", {"gradient_clipping": None}, {}, {}),
    ("null", "error", "fp16", {"fp16": None}, {}, {}),
    ("out-of-range", "error", "steps_per_print", {"steps_per_print": 0}, {"steps_per_print": 1}, {}),
    ("out-of-range", "error", "gradient_clipping", {"gradient_clipping": -1.0}, {"gradient_clipping": 0}, {}),
    ("not-a-choice", "error", STAGE, {STAGE: 4}, {STAGE: 3}, {}),
    ("not-a-choice", "error", f"{OFFLOAD}.device", {OFFLOAD: {"device": "gpu"}}, {OFFLOAD: CPU}, {}),
    ("not-a-choice", "error", "communication_data_type", {"communication_data_type": "float16"},
     {"communication_data_type": "FP16"}, {}),
    ("auto", "error", "gradient_clipping", {"gradient_clipping": "auto"}, {}, {}),
    ("auto", "error", STAGE, {STAGE: "auto"}, {}, {}),
    ("auto", "error", "fp16.enabled", {"bf16": GONE, "fp16.enabled": "auto"}, FP16, {}),
    ("auto", "note", "zero_optimization.allgather_bucket_size",
     {"zero_optimization.allgather_bucket_size": "auto"}, {}, {}),
    ("auto", "error", "optimizer.params.torch_adam", {"optimizer.params.torch_adam": "auto"},
     {"optimizer.params.lr": "auto"}, {"runner": "trainer"}),
    ("missing", "error", "scheduler.params.total_num_steps", WARMUP | {"scheduler.params": {}},
     WARMUP | {"scheduler.params": {"total_num_steps": 2000}}, {}),
    ("no-effect", "warning", "zero_optimization.stage3_max_live_parameters",
     {"zero_optimization.stage3_max_live_parameters": 5}, {STAGE: 3,
     "zero_optimization.stage3_max_live_parameters": 5},
     {}),
    ("no-effect", "warning", "fp16", {"fp16": {"loss_scale": 128}}, {"fp16": {"enabled": False}}, {}),
    # Batch.
    ("batch-missing", "error", "train_micro_batch_size_per_gpu", {"train_micro_batch_size_per_gpu": GONE},
     {}, {}),
    ("batch-triple", "error", "train_batch_size", {"train_batch_size": 20}, {}, {}),
    ("batch-triple", "note", "train_batch_size", {"train_batch_size": 32}, {}, {}),
    ("batch-triple", "error", "train_batch_size", {"train_batch_size": 32}, {"train_batch_size": 16},
     {"world_size": 2}),
    ("batch-triple", "error", "train_batch_size", {"train_batch_size": 32}, {"train_batch_size": 8},
     {"world_size": 4, "pipeline": 4}),
    ("batch-triple", "error", "train_batch_size",
     {"train_batch_size": 32, "sequence_parallel_size": 2}, {"train_batch_size": 16,
     "sequence_parallel_size": 2},
     {"world_size": 4}),
    ("degree", "error", "tensor_parallel.autotp_size", {"tensor_parallel": {"autotp_size": 3}},
     {"tensor_parallel": {"autotp_size": 2}}, {"world_size": 4}),
    # Precision.
    ("precision-both", "error", "fp16.enabled", {"fp16.enabled": True}, FP16, {}),
    ("loss-scale", "note", "fp16.enabled", FP16, {}, {}),
    ("loss-scale", "error", "fp16.min_loss_scale", FP16 | {"fp16.min_loss_scale": 100_000}, FP16, {}),
    ("out-of-range", "error", "fp16.loss_scale_window", FP16 | {"fp16.loss_scale_window": 0},
     FP16 | {"fp16.loss_scale_window": 0, "fp16.loss_scale": 128}, {}),
    ("master-weights", "error", "bf16.bf16_master_weights_and_grads",
     {"bf16.bf16_master_weights_and_grads": True},
     {"bf16.bf16_master_weights_and_grads": True, OFFLOAD: CPU}, {}),
    ("master-weights", "error", "bf16.bf16_optimizer_states", {"bf16.bf16_optimizer_states": True}, {}, {}),
    ("data-types", "error", "data_types.param_dtype", {"data_types": {"param_dtype": "fp16"}},
     {"data_types": {"param_dtype": "bfloat16"}}, {}),
    ("data-types", "error", "data_types.grad_accum_dtype", {STAGE: 0,
     "data_types": {"grad_accum_dtype": "fp32"}},
     {"data_types": {"grad_accum_dtype": "fp32"}}, {}),
    ("data-types", "note", "torch_autocast.enabled", {"torch_autocast": {"enabled": True}},
     {"bf16": GONE, "torch_autocast": {"enabled": True}}, {}),
    # ZeRO.
    ("offload-stage", "error", f"{OFFLOAD}.device", {STAGE: 0, OFFLOAD: CPU}, {OFFLOAD: CPU}, {}),
    ("offload-stage", "error", "zero_optimization.offload_param.device",
     {STAGE: 2, "zero_optimization.offload_param": CPU}, {STAGE: 3,
     "zero_optimization.offload_param": CPU}, {}),
    ("offload-stage", "error", "zero_optimization.cpu_offload", {STAGE: 0,
     "zero_optimization.cpu_offload": True},
     {}, {}),
    ("offload-stage", "error", f"{OFFLOAD}.device", {STAGE: 2, OFFLOAD: {"device": "nvme",
     "nvme_path": "/n"}},
     {STAGE: 3, OFFLOAD: {"device": "nvme", "nvme_path": "/n"}}, {}),
    ("offload-stage", "error", f"{OFFLOAD}.ratio", {STAGE: 2, OFFLOAD: {"device": "cpu", "ratio": 0.5}},
     {STAGE: 3, OFFLOAD: {"device": "cpu", "ratio": 0.5}}, {}),
    ("nvme-path", "error", f"{OFFLOAD}.device", {STAGE: 3, OFFLOAD: {"device": "nvme"}},
     {STAGE: 3, OFFLOAD: {"device": "nvme", "nvme_path": "/n"}}, {}),
    ("grad-norm", "error", "zero_optimization.compute_grad_norm",
     {"zero_optimization.compute_grad_norm": False},
     {"zero_optimization.compute_grad_norm": False, "gradient_clipping": 0}, {}),
    ("reduce-scatter", "error", "prescale_gradients", {STAGE: 2, "prescale_gradients": True},
     {"prescale_gradients": True}, {}),
    ("reduce-scatter", "error", "gradient_allreduce_op", {STAGE: 3, "gradient_allreduce_op": "sum"},
     {"gradient_allreduce_op": "sum"}, {}),
    ("bucket-size", "warning", "zero_optimization.reduce_bucket_size",
     {"zero_optimization.reduce_bucket_size": 5e11}, {"zero_optimization.reduce_bucket_size": 5e8}, {}),
    ("bucket-size", "error", "zero_optimization.allgather_bucket_size",
     {"zero_optimization.allgather_bucket_size": 1_000_001}, {}, {}),
    ("zero-stage", "error", "zero_optimization.legacy_stage1", {"zero_optimization.legacy_stage1": True},
     {}, {}),
    ("zero-stage", "error", "zero_optimization", {"zero_optimization": {"overlap_comm": True}}, {}, {}),
    ("zero-stage", "warning", "zero_optimization", {"zero_optimization": {}}, {}, {}),
    ("duplicate-key", "error", "zero_optimization.prefetch_bucket_size",
     {"zero_optimization.stage3_prefetch_bucket_size": 5, "zero_optimization.prefetch_bucket_size": 5},
     {"zero_optimization.prefetch_bucket_size": 5}, {}),
    ("zenflow", "error", "zero_optimization.zenflow.select_interval",
     {"zero_optimization.zenflow": {"select_interval": 4}},
     {"zero_optimization.zenflow": {"select_interval": 4, "select_strategy": "step"}}, {}),
    ("zenflow", "error", "zero_optimization.zenflow.select_interval",
     {"zero_optimization.zenflow": {"select_strategy": "step"}}, {}, {}),
    ("zenflow", "error", "zero_optimization.zenflow.select_interval",
     {"zero_optimization.zenflow": {"select_strategy": "step", "select_interval": 2, "update_interval": 4}},
     {}, {}),
    ("zenflow", "warning", "gradient_accumulation_steps",
     {"zero_optimization.zenflow": {"update_interval": 8}},
     {"zero_optimization.zenflow": {"update_interval": 4}}, {}),
    ("compile", "error", "compile.autoep_non_moe", {"compile": {"autoep_non_moe": True, "deepcompile": True}},
     {"compile": {"deepcompile": True}}, {}),
    # Pipelines.
    ("pipeline-zero", "error", STAGE, {STAGE: 2}, {STAGE: 2}, {"pipeline": 2}),
    ("pipeline-zero", "error", STAGE, {STAGE: 3, "pipeline": {"activation_checkpoint_interval": 1}},
     {STAGE: 3}, {}),
    ("pipeline-block", "error", "pipeline", {"pipeline": {"pipe_partitioned": True}}, {}, {"pipeline": 1}),
    ("pipeline-block", "note", "pipeline", {"pipeline": {"pipe_partitioned": True}}, {}, {}),
    ("autotp", "error", "tensor_parallel.autotp_size", {"tensor_parallel": {"autotp_size": 2}}, {},
     {"pipeline": 2}),
    ("clipping-fp32-pipeline", "error", "gradient_clipping", {STAGE: 0, "bf16": GONE}, {STAGE: 0},
     {"pipeline": 2}),
    ("pipeline-block", "error", "managed_gradient_accumulation", {"managed_gradient_accumulation": False},
     {}, {"pipeline": 2}),
    # Optimizer.
    ("optimizer-name", "error", "optimizer.type", {"optimizer.type": "AdamV"},
     {"optimizer.type": "adamw"}, {}),
    ("optimizer-name", "error", "optimizer.type", {STAGE: 0, "optimizer.type": "sgd"},
     {STAGE: 0, "optimizer.type": "SGD"}, {}),
    ("optimizer-name", "error", "optimizer.type", {"optimizer": {"params": {"lr": 1}}}, {}, {}),
    ("optimizer-untested", "error", "optimizer.type", {"optimizer.type": "SGD"},
     {"optimizer.type": "SGD", "zero_allow_untested_optimizer": True}, {}),
    ("max-grad-norm", "error", "optimizer.params.max_grad_norm", {"optimizer.params.max_grad_norm": 1.0},
     {}, {}),
    ("betas", "error", "optimizer.params.betas", {"optimizer.params.betas": [0.9, 1.5]},
     {"optimizer.params.betas": [0.9, 0.95]}, {}),
    ("betas", "error", "optimizer.params.betas", {"optimizer.params.betas": ["0.9", "0.95"]}, {}, {}),
    ("adam-is-adamw", "note", "optimizer.type", {"optimizer": {"type": "Adam",
     "params": {"weight_decay": 0.1}}},
     {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}}}, {}),
    ("amsgrad", "error", "optimizer.params.amsgrad", {"optimizer.params.amsgrad": True},
     {"optimizer.params.amsgrad": True, "optimizer.params.torch_adam": True}, {}),
    ("offload-torch-adam", "note", "optimizer.params.torch_adam", {OFFLOAD: CPU,
     "optimizer.params.torch_adam": True},
     {"optimizer.params.torch_adam": True}, {}),
    ("client-optimizer", "error", "optimizer", {}, {"optimizer": GONE}, {"client_optimizer": True}),
    ("optimizer-parameter", "error", "optimizer.params.fused", {"optimizer.params.fused": True},
     {"optimizer.params": {"fused": True, "torch_adam": True}}, {}),
    ("optimizer-parameter", "error", "optimizer.params.bias_correction",
     {"optimizer.params": {"bias_correction": True, "torch_adam": True}},
     {"optimizer.params.bias_correction": True}, {}),
    ("optimizer-parameter", "error", "optimizer.params.set_grad_none",
     {OFFLOAD: CPU, "optimizer.params.set_grad_none": True}, {"optimizer.params.set_grad_none": True}, {}),
    ("loss-scale", "error", "fp16.loss_scale",
     {STAGE: 0, "optimizer": {"type": "Lamb", "params": {}}, "fp16.loss_scale": 128},
     {STAGE: 0, "optimizer": {"type": "Lamb", "params": {}}}, {}),
    # Schedule.
    ("scheduler", "error", "scheduler.type", {"scheduler": {"params": {}}}, {}, {}),
    ("scheduler", "note", "scheduler", {"optimizer": GONE, "scheduler": {"type": "WarmupLR"}},
     {"scheduler": {"type": "WarmupLR"}}, {}),
    ("scheduler", "error", "scheduler.params.warmup_max_lr",
     WARMUP | {"scheduler.params": {"total_num_steps": 5000}, "optimizer.params.lr": 1e-5},
     WARMUP | {"scheduler.params": {"total_num_steps": 5000, "warmup_max_lr": 1e-5},
     "optimizer.params.lr": 1e-5},
     {}),
    ("scheduler", "warning", "scheduler.params.total_num_steps",
     WARMUP | {"scheduler.params": {"total_num_steps": 10}},
     WARMUP | {"scheduler.params": {"total_num_steps": 10, "warmup_num_steps": 2}}, {}),
    ("scheduler", "error", "scheduler.type", {"scheduler": {"type": "StepLR", "params": {"step_size": 9}}},
     {"scheduler": {"type": "StepLR", "params": {"step_size": 9}}, STAGE: 0, "bf16": GONE}, {}),
    ("not-a-choice", "error", "scheduler.type", {"scheduler": {"type": "warmuplr", "params": {}}},
     {"scheduler": {"type": "WarmupLR", "params": {}}}, {}),
    ("unknown-key", "error", "scheduler.params.warmup_steps",
     {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}}, {}, {}),
    ("scheduler", "warning", "scheduler.params.cycle_min_lr",
     {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1, "cycle_max_lr": 0.1}}},
     {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1}}}, {}),
    ("not-a-choice", "error", "scheduler.type", {"scheduler": {"type": "cosine", "params": {}}}, {}, {}),
    ("outer-rounds", "warning", "dsx.outer.every",
     {"dsx.outer": {"islands": 2, "every": 500}, "dsx.train.steps": 100},
     {"dsx.outer": {"islands": 2, "every": 50}, "dsx.train.steps": 100}, {"runner": "dsx"}),
    ("schedule-length", "warning", "scheduler.params.total_num_steps",
     WARMUP | {"scheduler.params": {"total_num_steps": 2000}, "dsx": {"train": {"steps": 3000}}},
     WARMUP | {"scheduler.params": {"total_num_steps": 2000}, "dsx": {"train": {"steps": 2000}}}, {}),
    # Units, and places that were swapped.
    ("unit", "warning", "optimizer.params.lr", {"optimizer.params.lr": 1e4},
     {STAGE: 0, "optimizer": {"type": "SGD", "params": {"lr": 10}}}, {}),
    ("unit", "warning", "optimizer.params.lr", {"optimizer.params.lr": 0},
     WARMUP | {"optimizer.params.lr": 0}, {}),
    ("unit", "warning", "optimizer.params.weight_decay", {"optimizer.params.weight_decay": 10},
     {"optimizer.params.weight_decay": 0.3}, {}),
    ("unit", "warning", "optimizer.params.weight_decay",
     {"optimizer.params": {"lr": 0.1, "weight_decay": 1e-4}},
     {"optimizer.params": {"lr": 1e-3, "weight_decay": 3e-7}}, {}),  # DeepSpeed's own example
    ("unit", "warning", "optimizer.params.eps", {"optimizer.params.eps": 1},
     {"optimizer.params.eps": 1e-4}, {}),
    ("unit", "warning", "optimizer.params.betas", {"optimizer.params.betas": [0.999, 0.9]},
     {"optimizer.params.betas": [0.9, 0.999]}, {}),
    ("unit", "warning", "curriculum_learning.min_difficulty",
     {"curriculum_learning": CURRICULUM | {"min_difficulty": 64, "max_difficulty": 8}},
     {"curriculum_learning": CURRICULUM | {"min_difficulty": 8, "max_difficulty": 64}}, {}),
    ("unit", "warning", METRICS + ".x.min_difficulty",
     {METRICS: {"x": METRIC | {"min_difficulty": 64, "max_difficulty": 8}}},
     {METRICS: {"x": METRIC | {"min_difficulty": 8, "max_difficulty": 64}}}, {}),
    ("unit", "warning", "zero_optimization.reduce_bucket_size",
     {"zero_optimization.reduce_bucket_size": 500}, {"zero_optimization.reduce_bucket_size": 500_000}, {}),
    ("scheduler", "warning", "scheduler.params.warmup_max_lr",
     {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}},
     {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}}, {}),
    ("loss-scale", "error", "fp16.initial_scale_power", FP16 | {"fp16.initial_scale_power": 65536},
     FP16 | {"fp16.initial_scale_power": 32}, {}),
    ("out-of-range", "warning", "fp16.min_loss_scale",
     {"bf16.enabled": "auto", "fp16": {"enabled": "auto", "min_loss_scale": 0}},
     {"bf16.enabled": "auto", "fp16": {"enabled": "auto", "min_loss_scale": 1}}, {}),
    ("degree", "error", "pipeline", {}, {}, {"world_size": 8, "pipeline": 3}),
    ("degree", "error", "data_parallel_size", {"sequence_parallel_size": 2, "data_parallel_size": 2},
     {"sequence_parallel_size": 2, "data_parallel_size": 4}, {"world_size": 8}),
    ("degree", "error", "hybrid_engine.inference_tp_size",
     {"hybrid_engine": {"enabled": True, "inference_tp_size": 3}},
     {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}}, {"world_size": 8}),
    ("data-types", "warning", "communication_data_type", {"communication_data_type": "fp16"},
     {"communication_data_type": "fp32"}, {}),
    # Items of lists, and values in another case.
    ("not-a-choice", "error", "compile.passes", {"compile": {"deepcompile": True, "passes": ["zero3"]}},
     {"compile": {"deepcompile": True, "passes": ["z1"]}}, {}),
    ("wrong-type", "error", "zero_optimization.leaf_module.names",
     {STAGE: 3, "zero_optimization.leaf_module": {"names": [1]}},
     {STAGE: 3, "zero_optimization.leaf_module": {"names": ["mlp"]}}, {}),
    ("betas", "error", "optimizer.params.betas", {"optimizer.params.betas": ["auto", "auto"]},
     {"optimizer.params.betas": "auto"}, {"runner": "trainer"}),
    ("wrong-type", "error", "expert_parallel.async_split_plan", {"expert_parallel": {"async_split_plan": 1}},
     {"expert_parallel": {"async_split_plan": True}}, {}),
    # What does not go together; test_evidence_engines.py and test_evidence_together.py show more.
    ("conflict", "error", "expert_parallel.preset_model",
     {"expert_parallel": {"preset_model": "mixtral"}, "tensor_parallel": {"preset_model": "llama"}},
     {"expert_parallel": {"preset_model": "mixtral"}, "tensor_parallel": {"preset_model": "mixtral"}}, {}),
    ("conflict", "error", f"{OFFLOAD}.buffer_count",
     {STAGE: 3, OFFLOAD: {"device": "nvme", "nvme_path": "/n", "buffer_count": 3}},
     {STAGE: 3, OFFLOAD: {"device": "nvme", "nvme_path": "/n", "buffer_count": 4}}, {}),
    ("conflict", "error", f"{OFFLOAD}.ratio",
     {STAGE: 3, OFFLOAD: {"device": "cpu", "ratio": 0.5}, "optimizer.params.torch_adam": True},
     {STAGE: 3, OFFLOAD: {"device": "cpu", "ratio": 0.5}}, {}),
    ("offload-stage", "warning", f"{OFFLOAD}.ratio",
     {STAGE: 3, OFFLOAD: {"device": "nvme", "nvme_path": "/n", "ratio": 0.5}},
     {STAGE: 3, OFFLOAD: {"device": "cpu", "ratio": 0.5}}, {}),
    ("no-effect", "warning", "compile.deepcompile", {STAGE: 0, "compile": {"deepcompile": True}},
     {"compile": {"deepcompile": True}}, {}),
    ("no-effect", "warning", "zero_optimization.stage3_gather_16bit_weights_on_model_save",
     {"zero_optimization.stage3_gather_16bit_weights_on_model_save": True},
     {"zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
     "tensor_parallel": {"autotp_size": 2}}, {}),
    ("unknown-key", "error", "optimizer.name", {"optimizer": {"name": "AdamW"}}, {}, {}),
    ("unknown-key", "error", "optimizer.params.eps", {"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}},
     {"optimizer": {"type": "Adam", "params": {"eps": 1e-8}}}, {}),
    ("unknown-key", "error", "scheduler.params.total_num_steps",
     {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 100}}}, {}, {}),
    ("unknown-key", "error", "compile.mode", {"compile": {"mode": "max-autotune"}}, {}, {}),
    ("unknown-key", "error", "data_types.grad_accum", {"data_types": {"grad_accum": "fp32"}}, {}, {}),
    ("misplaced-key", "error", "parallel", {"parallel": {"tensor": 2}}, {}, {"runner": "dsx"}),
    ("wrong-type", "error", "tensor_parallel.dtype", {"tensor_parallel": {"dtype": "bf16"}}, {}, {}),
    ("batch-missing", "warning", "train_micro_batch_size_per_gpu",
     {"train_micro_batch_size_per_gpu": GONE}, {"train_micro_batch_size_per_gpu": "auto"},
     {"runner": "trainer"}),
    ("degree", "error", "expert_parallel.autoep_size",
     {"expert_parallel": {"enabled": True, "autoep_size": 3}},
     {"expert_parallel": {"enabled": True, "autoep_size": 2}}, {"world_size": 4}),
    # Who runs it is not said, and one "auto" is all there is to tell it by.
    ("auto", "warning", "train_micro_batch_size_per_gpu",
     {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": GONE},
     {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": GONE,
     "autotuning": {"enabled": True}}, {}),
    ("auto", "error", "train_batch_size", {"train_batch_size": "auto"}, {}, {}),
    ("wrong-type", "error", STAGE, {STAGE: [1, 2]}, {STAGE: [1, 2], "autotuning": {"enabled": True}}, {}),
    ("batch-missing", "error", "train_micro_batch_size_per_gpu", {"train_micro_batch_size_per_gpu": GONE},
     {"train_micro_batch_size_per_gpu": GONE, "autotuning": {"enabled": True}}, {}),
    # Other tools.
    ("unknown-key", "error", "fsdp_config", {"fsdp_config": {}}, {}, {}),
    ("unknown-key", "warning", "seed", {"seed": 1}, {}, {}),
    ("unknown-key", "error", "tensor_model_parallel_size", {"tensor_model_parallel_size": 2}, {}, {}),
    # Timers, scales, clamped and idle sizes.
    ("pipeline-timers", "error", "wall_clock_breakdown", {"wall_clock_breakdown": True}, {}, {"pipeline": 2}),
    ("pipeline-timers", "error", "flops_profiler.enabled", {"flops_profiler.enabled": True},
     {"flops_profiler.enabled": False}, {"pipeline": 4}),
    ("profiler-timers", "warning", "wall_clock_breakdown",
     {"flops_profiler.enabled": True, "wall_clock_breakdown": False},
     {"flops_profiler.enabled": True, "wall_clock_breakdown": True}, {}),
    ("profiler-timers", "note", "flops_profiler.enabled", {"flops_profiler.enabled": True},
     {"flops_profiler.enabled": False}, {}),
    ("autotp", "error", "tensor_parallel.tensor_parallel.tp_size",
     {"tensor_parallel": {"tensor_parallel": {"tp_size": 4}}},
     {"tensor_parallel": {"autotp_size": 4, "tensor_parallel": {"tp_size": 4}}}, {}),
    ("no-effect", "note", "tensor_parallel", {"tensor_parallel": {"autotp_size": 1}},
     {"tensor_parallel": {"autotp_size": 2}}, {}),
    ("no-effect", "warning", "tensor_parallel", {"tensor_parallel": {"preset_model": "llama"}},
     {"tensor_parallel": {"preset_model": "llama", "autotp_size": 2}}, {}),
    ("degree", "warning", HPZ, {"zero_optimization.stage": 3, HPZ: 8}, {"zero_optimization.stage": 3, HPZ: 4},
     {"world_size": 4}),
    ("loss-scale", "error", "fp16.loss_scale", {"bf16": GONE, "fp16": {"enabled": True, "loss_scale": 2**30}},
     {"bf16": GONE, "fp16": {"enabled": True, "loss_scale": 2**10}}, {}),
    ("loss-scale", "warning", "fp16.loss_scale",
     {"bf16": GONE, "fp16": {"enabled": True, "loss_scale": 2**20}},
     {"bf16": GONE, "fp16": {"enabled": False, "loss_scale": 2**20}}, {}),
    ("loss-scale", "error", "fp16.enabled",
     {"bf16": GONE, "fp16": {"enabled": True}, "zero_optimization.stage": 0},
     {"bf16": GONE, "fp16": {"enabled": True, "loss_scale": 1}, "zero_optimization.stage": 0}, {}),
    ("offload-torch-adam", "note", "zero_optimization.offload_optimizer", {OFFLOAD: CPU, "optimizer": GONE},
     {OFFLOAD: CPU, "optimizer": GONE, "zero_force_ds_cpu_optimizer": False}, {"client_optimizer": True}),
    # Adapters.
    ("adapter", "note", STAGE, {STAGE: 3, "dsx": {"adapter": {}}}, {STAGE: 2, "dsx": {"adapter": {}}},
     {"runner": "dsx"}),
    ("adapter", "note", "optimizer.params.lr", {"optimizer.params.lr": 1e-5, "dsx": {"adapter": {}}},
     {"optimizer.params.lr": 1e-5, "dsx": {"adapter": None}}, {"runner": "dsx"}),
    # Others.
    ("clipping-default", "note", "gradient_clipping", {"gradient_clipping": GONE}, {}, {}),
    ("clipping-default", "note", "gradient_clipping", {"gradient_clipping": GONE}, {}, {"version": "0.19.3"}),
    ("activation-checkpointing", "note", "activation_checkpointing",
     {"activation_checkpointing": {"cpu_checkpointing": True}},
     {"activation_checkpointing": {"cpu_checkpointing": False}}, {}),
]  # fmt: skip


def found(edits, arguments):
    """(check, severity, key) of every finding."""
    report = examine(changed(edits), version=arguments.pop("version", "0.19.8"), **arguments)
    return {(finding.check, finding.severity, dotted(finding.path)) for finding in report.findings}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}")
def test_found_and_not_found(case):
    check, severity, key, wrong, right, arguments = case
    assert (check, severity, key) in found(wrong, dict(arguments))
    if wrong != right:
        assert (check, severity, key) not in found(right, dict(arguments))
    else:
        assert (check, severity, key) not in found(right, {})


def test_a_path_as_a_key():
    (finding,) = examine(BASE | {"zero_optimization.overlap_comm": True}, version="0.19.8").errors
    assert (finding.check, finding.path) == ("misplaced-key", ("zero_optimization.overlap_comm",))
    assert finding.edits[-1].path == ("zero_optimization", "overlap_comm")


def test_other_names_lead_to_keys():
    """What the doctor proposes exists; what it calls dsx's own is dsx's."""
    from dsx.config.schema import DsxConfig

    with (Path(unknown.__file__).parent / "names.toml").open("rb") as file:
        names = tomllib.load(file)
    table = reference()
    paths = {key.path for key in table.rows if key.status == "live"}
    assert set(names["keys"]) <= paths
    assert not set(unknown.other_names("keys")) & {path for path in paths if "." not in path}
    assert set(names["schedules"]) <= set(table.key("scheduler.type").choices)
    for row in names["inside"]:
        assert ("key" in row) != ("fix" in row)
        assert all(f"{block}.{row['key']}" in paths for block in row["blocks"] if "key" in row)
    assert set(DsxConfig.model_fields) >= set(names["dsx"])
    words = [word for group in ("keys", "schedules") for each in names[group].values() for word in each]
    words += [word for row in names["outside"] for word in row["words"]]
    words += [(block, word) for row in names["inside"] for block in row["blocks"] for word in row["words"]]
    assert len(set(words)) == len(words) - len({"gradient_clipping"} & set(words))


def test_the_base_is_right():
    for arguments in ({}, {"world_size": 4}, {"pipeline": 2}, {"runner": "trainer"}):
        assert found({}, dict(arguments)) == set()


def test_every_kind_of_finding_has_a_case():
    """Each check function is the source of at least one finding above; some need a file, or a dsx block."""
    speaking, rules = set(), set()
    for *_, wrong, _right, arguments in CASES:
        extra = {key: value for key, value in arguments.items() if key not in ("version", "runner")}
        number = tuple(map(int, arguments.get("version", "0.19.8").split(".")))
        looked_at = Context(
            source=from_mapping(changed(wrong)),
            runner=arguments.get("runner", "deepspeed"),
            version=number,
            **extra,
        )
        speaking |= {check for check in CHECKS if any(True for _ in check(looked_at))}
        rules |= {rule.check for rule in (*refused(), *advice()) if rule.finding(looked_at) is not None}
    assert set(CHECKS) - speaking == {
        values.check_duplicates,
        values.check_syntax,
        values.check_constants,
        values.check_trainer,
        values.check_whole_numbers,
    }
    assert {rule.check for rule in (*refused(), *advice())} == rules


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}")
def test_a_run_and_the_doctor_refuse_the_same(case):
    """The run reads the table, and leaves to the doctor only keys and values that nothing takes."""
    later = ("batch-missing", "batch-triple")  # said by the batch of the resolved mesh
    for edits in case[3:5]:
        config = from_mapping(changed(edits))
        found = errors(Context(source=config, runner="dsx", version=(0, 19, 8)))
        report = examine(config, runner="dsx", version="0.19.8")
        told = [each for each in report.errors if each.check not in later]
        if found is not None:
            assert bool(found) == bool(told)
            assert {each.why for each in told} == {each.why for each in found}


def test_every_row_is_about_keys_that_there_are():
    """A key or a condition that is misspelt would hold for no config, and nobody would see it."""
    table = reference()
    known = {key.path for key in table.rows}
    facts = {
        "run.adapter",
        "run.dtype",
        "run.pipeline",
        "run.client_optimizer",
        "mesh.tp",
        "mesh.dp",
        "mesh.ep",
        "mesh.replicas",
        "mesh.size",
    }
    for rule in (*refused(), *advice()):
        assert set(rule.key.split("|")) <= known, rule
        assert rule.by in get_args(By)
        assert {each.operator for each in rule.when} <= set(get_args(Operator)), rule
        assert not re.search(r"<\w+>", rule.why + rule.fix), rule
        others = {str(each.value)[1:] for each in rule.when if str(each.value).startswith("@")}
        assert {each.key for each in rule.when} | others <= known | facts, rule
        assert set(re.findall(r"\{([a-z][\w.]*)\}", rule.why + rule.fix)) <= known | facts, rule
