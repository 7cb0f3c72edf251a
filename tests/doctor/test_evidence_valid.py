"""Valid configs in the shapes that DeepSpeed's users copy: the doctor must have nothing against them.

Written here after the shapes at the addresses named, not copied. DeepSpeed itself must take each.
"""

from __future__ import annotations

import copy
import json

import pytest

from dsx.config.wording import dotted
from dsx.doctor import examine

_TRAINER = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
_AUTO_OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
_AUTO_WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
_DYNAMIC_FP16 = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}

VALID = {
    # deepspeed.ai/getting-started
    "getting started": {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    },
    # deepspeed.ai/tutorials/cifar-10
    "cifar": {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": True},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 0,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    },
    # deepspeed.ai/tutorials/zero: ZeRO-2 with offload
    "zero 2": {
        "train_batch_size": 8,
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "allgather_bucket_size": 5e8,
            "offload_optimizer": {"device": "cpu"},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    },
    # deepspeed.ai/docs/config-json: ZeRO-3 and its offload
    "zero 3 to nvme": {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.95]}},
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_prefetch_bucket_size": 1e7,
            "stage3_param_persistence_threshold": 1e5,
            "reduce_bucket_size": 1e7,
            "sub_group_size": 1e9,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "pin_memory": True,
                "buffer_count": 4,
                "fast_init": False,
            },
            "offload_param": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "pin_memory": True,
                "buffer_count": 5,
                "buffer_size": 1e8,
                "max_in_cpu": 1e9,
            },
        },
        "aio": {
            "block_size": 262144,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    },
    # deepspeed.ai/tutorials/zeropp
    "zero++": {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, **_DYNAMIC_FP16, "min_loss_scale": 1},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 10000000,
            "reduce_scatter": True,
            "zero_quantized_weights": True,
            "zero_hpz_partition_size": 16,
            "zero_quantized_gradients": True,
            "contiguous_gradients": True,
            "overlap_comm": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    },
    # github.com/deepspeedai/DeepSpeedExamples: training/pipeline_parallelism/ds_config.json
    "pipeline": {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8}},
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
    },
    # github.com/deepspeedai/DeepSpeed: docs/_tutorials/pipeline.md
    "pipeline under ZeRO-1": {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "pipeline": {"activation_checkpoint_interval": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 6e-4, "weight_decay": 0.1}},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    # deepspeed.ai/docs/config-json: activation checkpointing, monitors, profilers
    "reports": {
        "train_batch_size": 32,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Lamb", "params": {"lr": 0.004, "max_coeff": 0.3, "min_coeff": 0.01}},
        # fp16 there; without ZeRO DeepSpeed has not scaled the loss since 0.18.3.
        "bf16": {"enabled": True},
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "number_checkpoints": None,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        },
        "flops_profiler": {
            "enabled": True,
            "profile_step": 1,
            "module_depth": -1,
            "top_modules": 3,
            "detailed": True,
            "output_file": None,
        },
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
        "tensorboard": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train"},
        "wandb": {"enabled": True, "group": "my_group", "team": "my_team", "project": "my_project"},
        "csv_monitor": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train"},
        "timers": {"throughput": {"enabled": True, "synchronized": False}},
    },
    # deepspeed.ai/docs/config-json: AutoTP
    "tensor parallel": {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {
            "autotp_size": 4,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [
                    {"patterns": [".*\\.o_proj\\.weight$"], "partition_type": "row"},
                    {"patterns": [".*\\.[qkv]_proj\\.weight$"], "partition_type": "column"},
                ],
            },
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    },
    # deepspeed.ai/docs/config-json: data efficiency
    "data efficiency": {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "data_efficiency": {
            "enabled": True,
            "seed": 1234,
            "data_routing": {"enabled": False, "random_ltd": {"enabled": False}},
            "data_sampling": {
                "enabled": True,
                "num_epochs": 1,
                "num_workers": 0,
                "curriculum_learning": {
                    "enabled": True,
                    "data_cluster_path": "/path/to/data_clusters",
                    "curriculum_metrics": {
                        "seqlen": {
                            "index_to_sample_path": "/path/to/index_to_sample",
                            "index_to_metric_path": "/path/to/index_to_metric",
                            "difficulty_type": "value",
                            "clustering_type": "single_cluster",
                            "min_difficulty": 80,
                            "max_difficulty": 2048,
                            "schedule_type": "fixed_linear",
                            "schedule_config": {"total_curriculum_step": 110000, "difficulty_step": 8},
                        }
                    },
                },
            },
        },
    },
    # github.com/deepspeedai/DeepSpeed: blogs/deepspeed-zenflow
    "zenflow": {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "zenflow": {
                "topk_ratio": 0.05,
                "select_strategy": "auto",
                "select_interval": "auto",
                "update_interval": 4,
                "full_warm_up_rounds": 0,
                "overlap_step": True,
            },
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8}},
    },
    # huggingface.co/docs/transformers/deepspeed: ZeRO-2 and ZeRO-3 under the Trainer
    "trainer, zero 2": {
        **_TRAINER,
        "fp16": {"enabled": "auto", **_DYNAMIC_FP16, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": _AUTO_OPTIMIZER,
        "scheduler": _AUTO_WARMUP,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": "auto",
            "contiguous_gradients": True,
            "round_robin_gradients": True,
        },
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "trainer, zero 3": {
        **_TRAINER,
        "bf16": {"enabled": "auto"},
        "optimizer": _AUTO_OPTIMIZER,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {**_AUTO_WARMUP["params"], "total_num_steps": "auto"},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    },
    # github.com/huggingface/accelerate: examples/deepspeed_config_templates
    "accelerate": {
        **_TRAINER,
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {**_AUTO_WARMUP["params"], "total_num_steps": "auto"},
        },
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1e5,
    },
    # github.com/deepspeedai/DeepSpeedExamples: training/autotuning
    "examples, autotuning": {
        "train_micro_batch_size_per_gpu": "auto",
        "autotuning": {
            "enabled": True,
            "max_train_batch_size": 4096,
            "arg_mappings": {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"},
        },
    },
    # github.com/deepspeedai/DeepSpeedExamples: training/tensor_parallel/hf_integration
    "examples, AutoTP under the Trainer": {
        **_TRAINER,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "gather_16bit_weights_on_model_save": True},
        "tensor_parallel": {"autotp_size": 4},
    },
    # github.com/huggingface/accelerate: tests/deepspeed, a model without an optimizer
    "accelerate, evaluation": {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": "auto", **_DYNAMIC_FP16},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    },
}


def filled(config):
    """``config`` as a Trainer hands it to DeepSpeed, as far as DeepSpeed reads numbers at once."""
    config = copy.deepcopy(config)
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if config.get(key) == "auto":
            config[key] = 1
    config["gradient_accumulation_steps"] = config.get("gradient_accumulation_steps", 1)
    if "train_batch_size" in config and "train_micro_batch_size_per_gpu" in config:
        # One rank here: what is left for accumulation.
        micro = config["train_micro_batch_size_per_gpu"]
        config["gradient_accumulation_steps"] = config["train_batch_size"] // micro
    return config


@pytest.mark.parametrize("name", VALID)
def test_valid(name):
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(json.loads(json.dumps(filled(VALID[name]))))
    report = examine(VALID[name])
    found = [(f.check, f.severity, f.path, f.why) for f in (*report.errors, *report.warnings)]
    assert found == []


_BOTH = {"fp16": {"enabled": "auto", **_DYNAMIC_FP16, "min_loss_scale": 1}, "bf16": {"enabled": "auto"}}


def openrlhf(stage, *, hpz=1, offload="none", optimizer="cpu", tensor=1, precision="bf16"):
    """github.com/OpenRLHF/OpenRLHF: openrlhf/utils/deepspeed/deepspeed_utils.py, with its batch."""
    left = ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
    left += ("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "reduce_bucket_size")
    return {
        "steps_per_print": 100,
        "zero_optimization": {
            "stage": stage,
            "offload_param": {"device": offload},
            "offload_optimizer": {"device": optimizer, "pin_memory": True},
            **dict.fromkeys(left, "auto"),
            "zero_hpz_partition_size": hpz,
            "zero_quantized_weights": False,
            "zero_quantized_gradients": False,
            **({"reduce_scatter": True} if stage == 3 else {}),
        },
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "data_types": {"grad_accum_dtype": None},
        "checkpoint": {"load_universal": False},
        "compile": {"deepcompile": False},
        "tensor_parallel": {"autotp_size": tensor},
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 128,
    }


def accelerate(**more):
    """github.com/huggingface/accelerate: utils/dataclasses.py, what DeepSpeedPlugin makes without a file."""
    return {
        **_TRAINER,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "steps_per_print": float("inf"),
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        **more,
    }


_FIXED = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
_LEFT = tuple(
    ("note", "auto", f"zero_optimization.{key}")
    for key in ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
)
_FILLED = tuple(
    ("note", "auto", f"zero_optimization.{key}")
    for key in ("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "reduce_bucket_size")
)
_ONE = ("note", "no-effect", "tensor_parallel")
_AUTO = ("note", "auto", "")
_ALONE = {"runner": "deepspeed", "client_optimizer": True}

# Configs of projects as they are: arguments of examine, everything that is due (severity, check, key), and
# whether DeepSpeed's own reader refuses them.
PROJECTS = {
    "OpenRLHF, ZeRO-2": (openrlhf(2), {}, {*_LEFT, _ONE, _AUTO}, False),
    "OpenRLHF, ZeRO-2 said to be DeepSpeed's": (
        openrlhf(2),
        _ALONE,
        {*_LEFT, *_FILLED, _ONE, ("note", "offload-torch-adam", "zero_optimization.offload_optimizer")},
        False,
    ),
    "OpenRLHF, ZeRO-3": (openrlhf(3, optimizer="none"), _ALONE, {*_LEFT, *_FILLED, _ONE}, False),
    "OpenRLHF, parts on CPUs": (openrlhf(3, offload="cpu"), {}, {*_LEFT, _ONE, _AUTO}, False),
    "OpenRLHF, AutoTP": (openrlhf(2, optimizer="none", tensor=2), {}, {*_LEFT, _AUTO}, False),
    "OpenRLHF, --zpg 8 without ZeRO-3": (
        openrlhf(2, hpz=8),
        {},
        {*_LEFT, _ONE, _AUTO, ("warning", "no-effect", "zero_optimization.zero_hpz_partition_size")},
        False,
    ),
    "Accelerate": (accelerate(), {}, {_AUTO}, False),
    "Accelerate, batch filled in": (
        accelerate(**_FIXED, gradient_clipping=1.0),
        {"runner": "trainer"},
        {("note", "batch-triple", "train_batch_size")},
        False,
    ),
    # axolotl-ai-cloud/axolotl: deepspeed_configs/zero1_torch_compile.json
    "axolotl, torch.compile": (
        {
            **_TRAINER,
            **_BOTH,
            "fp16": {**_BOTH["fp16"], "auto_cast": False, "initial_scale_power": 32},
            "zero_optimization": {"stage": 1, "overlap_comm": True},
            "compile": {"disable": False, "backend": "inductor"},
            "wall_clock_breakdown": False,
        },
        {},
        {_AUTO, ("error", "unknown-key", "compile.disable"), ("error", "removed", "compile.backend")},
        True,
    ),
    # axolotl-ai-cloud/axolotl: deepspeed_configs/zero3_bf16_cpuoffload_all.json
    "axolotl, everything on CPUs": (
        {
            **_TRAINER,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 0,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "max_live_parameters": 0,
                "max_reuse_distance": 0,
                "gather_16bit_weights_on_model_save": True,
            },
            "bf16": {"enabled": True},
            "wall_clock_breakdown": False,
        },
        {},
        {_AUTO},
        False,
    ),
    # hiyouga/LLaMA-Factory: examples/deepspeed/ds_z2_autotp_config.json
    "LLaMA-Factory, AutoTP": (
        {
            "_comment": "models that AutoTP knows: see DeepSpeed's tutorial",
            **_TRAINER,
            **_BOTH,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 2,
                "allgather_partitions": True,
                "allgather_bucket_size": 5e8,
                "overlap_comm": False,
                "reduce_scatter": True,
                "reduce_bucket_size": 5e8,
                "contiguous_gradients": True,
                "round_robin_gradients": True,
            },
            "tensor_parallel": {"autotp_size": 2},
        },
        {"world_size": 8},
        {_AUTO},
        False,
    ),
    # hiyouga/LLaMA-Factory: examples/deepspeed/ds_z3_fp8_config.json
    "LLaMA-Factory, blocks that there are not": (
        {
            **_TRAINER,
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 3},
            "comms_config": {"verbose": False},
            "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}},
        },
        {},
        {
            _AUTO,
            ("warning", "unknown-key", "comms_config"),
            ("error", "misplaced-key", "monitor_config"),
        },
        False,
    ),
    # tdrussell/diffusion-pipe: train.py
    "diffusion-pipe": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "steps_per_print": 1,
        },
        {"pipeline": 2, "client_optimizer": True, "world_size": 4},
        {("error", "clipping-fp32-pipeline", "gradient_clipping")},
        False,
    ),
    # deepspeedai/DeepSpeedExamples: inference/sglang/ds_offload_cpu.json
    "examples, inference from CPU memory": (
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": "auto",
                "offload_param": {"device": "cpu", "pin_memory": True, "buffer_size": "auto"},
            },
            "train_batch_size": 1,
        },
        {"runner": "deepspeed"},
        {
            *_FILLED[:2],
            _LEFT[1],
            ("note", "auto", "zero_optimization.offload_param.buffer_size"),
            ("note", "clipping-default", "gradient_clipping"),
        },
        False,
    ),
    # deepspeedai/DeepSpeedExamples: training/imagenet/config/ds_fp16_config.json
    "examples, fp16 without ZeRO": (
        {
            "train_batch_size": 256,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999]}},
            "zero_optimization": {"stage": 0},
            "zero_allow_untested_optimizer": True,
            "fp16": {"enabled": True, "auto_cast": True},
            "gradient_clipping": 0,
            "cuda_visible_devices": 0,
        },
        {},
        {
            ("error", "loss-scale", "fp16.enabled"),
            ("note", "loss-scale", "fp16.enabled"),
            ("warning", "unknown-key", "cuda_visible_devices"),
        },
        False,
    ),
    # deepspeedai/DeepSpeedExamples: training/bing_bert/deepspeed_bsz64k_lamb_config_seq128.json
    "examples, sparse attention": (
        {
            "train_batch_size": 65536,
            "train_micro_batch_size_per_gpu": 64,
            "optimizer": {"type": "Lamb", "params": {"lr": 0.011, "weight_decay": 0.01, "max_coeff": 0.3}},
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "sparse_attention": {"mode": "fixed", "block": 16},
        },
        {"world_size": 1024},
        {("error", "removed", "sparse_attention")},
        True,
    ),
    # deepspeedai/DeepSpeedExamples: training/DeepSpeed-ZenFlow/finetuning/zf_config.json
    "examples, ZenFlow": (
        {
            "train_batch_size": 8,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "zenflow": {
                    "topk_ratio": 0.1,
                    "update_interval": 4,
                    "full_warm_up_rounds": 0,
                    "overlap_step": True,
                },
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.01}},
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
        },
        {},
        {("warning", "zenflow", "gradient_accumulation_steps")},
        False,
    ),
    # deepspeedai/Megatron-DeepSpeed: examples_deepspeed/universal_checkpointing/ds_config.json
    "Megatron-DeepSpeed": (
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 16,
            "steps_per_print": 1,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "wall_clock_breakdown": False,
        },
        {"pipeline": 2, "client_optimizer": True, "world_size": 2},
        {("note", "clipping-default", "gradient_clipping")},
        False,
    ),
    # deepspeedai/Megatron-DeepSpeed: curriculum_learning/ds_zero_stage_1_config_baseline.json
    "Megatron-DeepSpeed, as of 2021": (
        {
            "train_batch_size": 512,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 1},
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 0.00015, "max_grad_norm": 1.0, "betas": [0.9, 0.95]},
            },
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
        },
        {},
        {("error", "max-grad-norm", "optimizer.params.max_grad_norm")},
        False,
    ),
    # Lightning's and others' way: the script has the optimizer, the JSON the schedule.
    "a schedule for the script's optimizer": (
        {
            "train_batch_size": 8,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 100}},
        },
        {},
        {
            ("note", "scheduler", "scheduler"),
            ("note", "offload-torch-adam", "zero_optimization.offload_optimizer"),
        },
        False,
    ),
    # docs.wandb.ai and comet.com: keys of the services themselves
    "a key for W&B": (
        {
            "train_batch_size": 8,
            "gradient_clipping": 1.0,
            "wandb": {"enabled": True, "project": "p", "api_key": "k"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        },
        {},
        {("error", "unknown-key", "wandb.api_key")},
        True,
    ),
}


@pytest.mark.parametrize("name", PROJECTS)
def test_project(name):
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    config, arguments, expected, is_refused = PROJECTS[name]
    theirs = filled(config)
    if is_refused:
        with pytest.raises((ValueError, DeepSpeedConfigError)):
            DeepSpeedConfig(theirs)
    else:
        DeepSpeedConfig(theirs)
    report = examine(json.dumps(config), version="0.19.8", **arguments)
    assert {(f.severity, f.check, dotted(f.path)) for f in report.findings} == expected
    for finding in report.findings:
        assert "comet" not in finding.fix
        # What is dropped for its default is the default.
        if finding.check == "auto" and finding.edits:
            assert finding.edits[0].kind == "remove"
