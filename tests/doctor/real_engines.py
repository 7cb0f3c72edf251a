"""Real DeepSpeed engines on two gloo ranks, made from wrong configs: what they say, or silently do.

One launch of ranks for all of test_evidence_engines.py: ``everything`` runs each experiment in turn and
returns its ``Outcome``: the error that it raised, or what it saw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from evidence import ENGINES, TIMED

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an experiment came to."""

    error: str = ""
    message: str = ""
    saw: dict[str, Any] = field(default_factory=dict)


def everything(rank: int, world_size: int) -> dict[str, Outcome]:
    """Every experiment's outcome on this rank."""
    import torch

    out = {}
    for name, case in ENGINES.items():
        torch.manual_seed(0)
        try:
            out[name] = Outcome(saw=_MADE[case.made](case.config))
        except Exception as error:  # noqa: BLE001 (what it raises is the result)
            out[name] = Outcome(type(error).__name__, str(error))
    return out


def _plain(config: Config, optimizer: Any = None) -> dict[str, Any]:
    """One step of a linear layer whose gradient has a norm of 100 in either rank."""
    import deepspeed
    import torch
    from deepspeed.utils import groups

    model = torch.nn.Linear(4, 1, bias=False)
    before = model.weight.detach().clone()
    made = optimizer(model.parameters()) if optimizer else None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=made, model_parameters=model.parameters(), config=config | {}
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


def _made(config: Config) -> dict[str, Any]:
    """What an engine is made of, without a step."""
    import deepspeed
    import torch

    model = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config | {})
    return {"schedule": engine.lr_scheduler, "optimizer": engine.optimizer}


def timed_pipeline(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """A step of the pipeline with a config of TIMED, in a launch of its own: one rank fails alone."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    return _pipeline(TIMED[name])


def _in_fp16(config: Config) -> dict[str, Any]:
    """The same in fp16, which torch's CPU kernels know and DeepSpeed's CPU accelerator denies."""
    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    asked = kind.is_fp16_supported
    kind.is_fp16_supported = lambda self: True
    try:
        return _plain(config)
    finally:
        kind.is_fp16_supported = asked


def _client(config: Config, kind: str) -> dict[str, Any]:
    import torch

    return _plain(config, lambda parameters: getattr(torch.optim, kind)(parameters, lr=1.0))


def _pipeline(config: Config) -> dict[str, Any]:
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
        model=model, model_parameters=list(model.parameters()), config=config | {}
    )
    batch = (torch.full((1, 4), 3.0), torch.full((1, 4), 9.0))
    engine.train_batch(iter([batch] * engine.micro_batches))
    moved = [after.detach() - start for after, start in zip(model.parameters(), before, strict=True)]
    return {
        "engine": type(engine).__name__,
        "update squared": sum(move.square().sum().item() for move in moved),
    }


def _llama(config: Config) -> dict[str, Any]:
    """An engine around a tiny Llama of Hugging Face, which AutoTP knows."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=12, intermediate_size=12, num_hidden_layers=1, num_attention_heads=6
        )
    )
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config | {})
    return {}


_MADE: dict[str, Callable[[Config], dict[str, Any]]] = {
    "plain": _plain,
    "made": _made,
    "in_fp16": _in_fp16,
    "client_adamw": partial(_client, kind="AdamW"),
    "client_sgd": partial(_client, kind="SGD"),
    "pipeline": _pipeline,
    "llama": _llama,
}
