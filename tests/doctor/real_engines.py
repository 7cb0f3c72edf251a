"""Real DeepSpeed engines on two gloo ranks, made from wrong configs: what they say, or silently do.

One launch of ranks for all of test_evidence_engines.py: ``everything`` runs each experiment in turn and
returns its ``Outcome``: the error that it raised, or what it saw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ADAM = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}  # torch's: nothing to compile
SGD = {"type": "SGD", "params": {"lr": 1.0}}
BATCH = {"train_micro_batch_size_per_gpu": 1}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an experiment came to."""

    error: str = ""
    message: str = ""
    saw: dict[str, Any] = field(default_factory=dict)


# Name -> config, and whatever else the experiment needs. The doctor is asked about the same configs.
CONFIGS: dict[str, dict[str, Any]] = {
    # First: later, process groups of other degrees exist already, and hide it.
    "AutoTP over 3 of 2 ranks": {**BATCH, "tensor_parallel": {"autotp_size": 3}, "optimizer": ADAM},
    "Muon at ZeRO-3": {
        **BATCH,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Muon", "params": {"lr": 0.1, "torch_adam": True}},
    },
    "two sizes of AutoTP": {
        **BATCH,
        "tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}},
        "optimizer": ADAM,
    },
    "ZenFlow without offload": {
        **BATCH,
        "zero_optimization": {"stage": 2, "zenflow": {"select_strategy": "auto"}},
        "optimizer": ADAM,
    },
    "ZenFlow offload without overlap": {
        **BATCH,
        "zero_optimization": {
            "stage": 2,
            "zenflow": {"select_strategy": "auto", "offload": True},
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
        "optimizer": ADAM,
    },
    "torch's Adam for 16-bit master weights": {
        **BATCH,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        "optimizer": ADAM,
    },
    "no norm for ZenFlow": {
        **BATCH,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 2, "compute_grad_norm": False, "zenflow": {}},
        "optimizer": ADAM,
    },
    "no norm in bf16 with fp32 sums": {
        **BATCH,
        "gradient_clipping": 0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1, "compute_grad_norm": False},
        "optimizer": ADAM,
    },
    "own accumulation under DeepCompile": {
        **BATCH,
        "managed_gradient_accumulation": False,
        "compile": {"deepcompile": True},
        "optimizer": ADAM,
    },
    "clipping auto": {**BATCH, "gradient_clipping": "auto", "optimizer": ADAM},
    "quoted learning rate": {
        **BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": "0.1", "torch_adam": True}},
    },
    "pipeline block without stages": {
        **BATCH,
        "pipeline": {"stages": 2, "partition": "uniform"},
        "optimizer": ADAM,
    },
    "clipping left out": {**BATCH, "optimizer": SGD},
    "max_grad_norm": {**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "max_grad_norm": 1.0}}},
    "offload_param below stage 3": {
        **BATCH,
        "zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}},
        "optimizer": ADAM,
    },
    "offload_optimizer at stage 0": {
        **BATCH,
        "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        "optimizer": ADAM,
    },
    "client AdamW with offload": {
        **BATCH,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    },
    "two optimizers": {**BATCH, "optimizer": ADAM},
    "Adam": {
        **BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "weight_decay": 0.1, "torch_adam": True}},
    },
    "SGD under ZeRO": {**BATCH, "zero_optimization": {"stage": 1}, "optimizer": SGD},
    "OneBitAdam": {**BATCH, "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}},
    "unknown optimizer parameter": {
        **BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True, "weight_decy": 0.1}},
    },
    "unknown scheduler parameter": {
        **BATCH,
        "optimizer": ADAM,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}},
    },
    "unknown scheduler": {**BATCH, "optimizer": ADAM, "scheduler": {"type": "WarmupCosine", "params": {}}},
    "torch's scheduler": {
        **BATCH,
        "zero_optimization": {"stage": 1},
        "optimizer": ADAM,
        "scheduler": {"type": "StepLR", "params": {"step_size": 2}},
    },
    "scheduler without params": {**BATCH, "optimizer": ADAM, "scheduler": {"type": "WarmupLR"}},
    "steps_per_print 0": {**BATCH, "steps_per_print": 0, "optimizer": ADAM},
    "quoted steps_per_print": {**BATCH, "steps_per_print": "1", "optimizer": ADAM},
    "quoted clipping": {**BATCH, "gradient_clipping": "1.0", "optimizer": ADAM},
    "quoted warm-up": {
        **BATCH,
        "optimizer": ADAM,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "5"}},
    },
    "optimizer in another spelling": {**BATCH, "optimizer": {"type": "Adam_W", "params": {"lr": 0.1}}},
    "dtype in another spelling": {
        **BATCH,
        "data_types": {"grad_accum_dtype": "FP32"},
        "optimizer": ADAM,
    },
    "clamped hpz": {
        **BATCH,
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8},
        "optimizer": ADAM,
    },
    "tp_size without autotp_size": {
        **BATCH,
        "tensor_parallel": {"tensor_parallel": {"tp_size": 2}},
        "optimizer": ADAM,
    },
    "profiler with timers off": {
        **BATCH,
        "wall_clock_breakdown": False,
        "flops_profiler": {"enabled": True, "profile_step": 1000},
        "optimizer": ADAM,
    },
    "former name of bf16": {**BATCH, "bfloat16": {"enabled": True}, "optimizer": ADAM},
    "fixed scale": {
        **BATCH,
        "fp16": {"enabled": True, "loss_scale": 2**32},
        "zero_optimization": {"stage": 1},
        "optimizer": ADAM,
    },
    "fixed scale that fits": {
        **BATCH,
        "fp16": {"enabled": True, "loss_scale": 8},
        "zero_optimization": {"stage": 1},
        "optimizer": ADAM,
    },
    # A norm that no dictionary of JSON's has, and Accelerate's way to print nothing.
    "Infinity of Python's": {
        **BATCH,
        "steps_per_print": float("inf"),
        "gradient_clipping": float("inf"),
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    },
    "schedule without an optimizer": {**BATCH, "scheduler": {"type": "WarmupLR", "params": {}}},
    "fp16 Adam without ZeRO": {
        **BATCH,
        "gradient_clipping": 0,
        "fp16": {"enabled": True, "loss_scale": 8},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.1, "eps": 1.0, "weight_decay": 0, "torch_adam": True},
        },
    },
    "fp16 without ZeRO": {
        **BATCH,
        "gradient_clipping": 20,
        "fp16": {"enabled": True, "loss_scale": 8},
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    },
    "torch's Adam with offload": {
        **BATCH,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        "optimizer": ADAM,
    },
    "pipeline under ZeRO-2": {**BATCH, "zero_optimization": {"stage": 2}, "optimizer": ADAM},
    "pipeline in fp32 without ZeRO": {**BATCH, "gradient_clipping": 0.5, "optimizer": SGD},
    "AutoTP with a pipeline": {**BATCH, "tensor_parallel": {"autotp_size": 2}, "optimizer": ADAM},
}


TIMED: dict[str, dict[str, Any]] = {
    "wall_clock_breakdown": {**BATCH, "wall_clock_breakdown": True, "optimizer": ADAM},
    "flops_profiler.enabled": {**BATCH, "flops_profiler": {"enabled": True}, "optimizer": ADAM},
    "autotuning.enabled": {**BATCH, "autotuning": {"enabled": True}, "optimizer": ADAM},
}


def everything(rank: int, world_size: int) -> dict[str, Outcome]:
    """Every experiment's outcome on this rank."""
    import torch

    out = {}
    for name in CONFIGS:
        torch.manual_seed(0)
        try:
            out[name] = Outcome(saw=_experiment(name)(name))
        except Exception as error:  # noqa: BLE001 (what it raises is the result)
            out[name] = Outcome(type(error).__name__, str(error))
    return out


def _experiment(name: str) -> Callable[[str], dict[str, Any]]:
    special = {
        "fixed scale": _in_fp16,
        "fp16 without ZeRO": _in_fp16,
        "fp16 Adam without ZeRO": _in_fp16,
        "schedule without an optimizer": _made,
        "fixed scale that fits": _in_fp16,
        "client AdamW with offload": _client,
        "two optimizers": _client,
        "pipeline under ZeRO-2": _pipeline,
        "pipeline in fp32 without ZeRO": _pipeline,
        "AutoTP with a pipeline": _pipeline,
        "AutoTP over 3 of 2 ranks": _llama,
        "two sizes of AutoTP": _llama,
    }
    return special.get(name, _plain)


def _plain(name: str, optimizer: Any = None) -> dict[str, Any]:
    """One step of a linear layer whose gradient has a norm of 100 in either rank."""
    import deepspeed
    import torch
    from deepspeed.utils import groups

    model = torch.nn.Linear(4, 1, bias=False)
    before = model.weight.detach().clone()
    made = optimizer(model.parameters()) if optimizer else None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=made, model_parameters=model.parameters(), config=CONFIGS[name] | {}
    )
    inputs = torch.full((1, 4), 50.0, dtype=engine.module.weight.dtype)
    engine.backward(engine(inputs).sum())
    engine.step()
    basic = engine.basic_optimizer
    group = groups._get_zero_param_intra_parallel_group()
    return {
        "dtype": str(engine.module.weight.dtype),
        "skipped steps": engine.skipped_steps,
        "ranks of hpz": group.size() if group else None,
        "AutoTP ranks": engine.autotp_size(),
        "timers": engine.wall_clock_breakdown(),
        "engine": type(engine).__name__,
        "optimizer": type(basic).__name__,
        "is client's": basic is made,
        "update norm": (engine.module.weight.detach() - before).norm().item(),
        "devices": {str(parameter.device) for parameter in engine.module.parameters()},
        "offloads parameters": hasattr(engine.optimizer, "parameter_offload"),
        "offloads states": bool(getattr(engine.optimizer, "cpu_offload", False)),
        "stage": engine.zero_optimization_stage(),
    }


def _made(name: str) -> dict[str, Any]:
    """What an engine is made of, without a step."""
    import deepspeed
    import torch

    model = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIGS[name] | {}
    )
    return {"schedule": engine.lr_scheduler, "optimizer": engine.optimizer}


def timed_pipeline(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """A step of the pipeline with a config of TIMED, in a launch of its own: one rank fails alone."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    return _pipeline(name)


def _in_fp16(name: str) -> dict[str, Any]:
    """The same in fp16, which torch's CPU kernels know and DeepSpeed's CPU accelerator denies."""
    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    asked = kind.is_fp16_supported
    kind.is_fp16_supported = lambda self: True
    try:
        return _plain(name)
    finally:
        kind.is_fp16_supported = asked


def _client(name: str) -> dict[str, Any]:
    import torch

    kind = torch.optim.AdamW if name == "client AdamW with offload" else torch.optim.SGD
    return _plain(name, lambda parameters: kind(parameters, lr=1.0))


def _pipeline(name: str) -> dict[str, Any]:
    """One step of two linear layers on two stages."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    layers = [torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)]
    model = PipelineModule(
        layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform"
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=(CONFIGS | TIMED)[name] | {}
    )
    batch = (torch.full((1, 4), 3.0), torch.full((1, 4), 9.0))
    engine.train_batch(iter([batch] * engine.micro_batches))
    moved = [after.detach() - start for after, start in zip(model.parameters(), before, strict=True)]
    return {
        "engine": type(engine).__name__,
        "update squared": sum(move.square().sum().item() for move in moved),
    }


def _llama(name: str) -> dict[str, Any]:
    """An engine around a tiny Llama of Hugging Face, which AutoTP knows."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=12, intermediate_size=12, num_hidden_layers=1, num_attention_heads=6
        )
    )
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIGS[name] | {})
    return {}
