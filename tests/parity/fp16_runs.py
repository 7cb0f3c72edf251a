"""A small tied model that trains in fp16 on two ranks, under dsx and under stock DeepSpeed. Not a test."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parity import stock_model

STEPS, MICRO_BATCHES, SEED = 30, 2, 1234
FP16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3}


@dataclass(frozen=True, kw_only=True)
class Case:
    """An engine of a layer list on two ranks; what two pipeline ranks leave is data-parallel."""

    zero: int
    pp: int = 1
    schedule: str = "auto"
    chunks: int = 1
    reduce: str = "step"
    fp16: dict[str, Any] = field(default_factory=dict)
    zero_keys: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        made = stock_model.config(self.zero, MICRO_BATCHES)
        made["zero_optimization"] |= self.zero_keys
        warmup = {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 20, "warmup_type": "linear"}
        return {
            **made,
            "fp16": {**FP16, **self.fp16},
            "scheduler": {"type": "WarmupLR", "params": warmup},
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
            **self.keys,
        }


@dataclass(frozen=True)
class Step:
    """What a step had and left."""

    scale: float
    skipped: int
    steps: int
    samples: int
    lr: float
    loss: float
    norm: float


@dataclass(frozen=True)
class Trained:
    """A run of one rank: its steps, and a digest of each parameter that it computes with."""

    steps: list[Step]
    weights: list[tuple[int, float, float]]

    def seen(self) -> list[Any]:
        """All that must be equal, but norms, which DeepSpeed has without a meaning on some steps."""
        return [(s.scale, s.skipped, s.steps, s.samples, s.lr, s.loss) for s in self.steps]


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


class Whole(nn.Module):
    """The layer list without a pipeline."""

    def __init__(self) -> None:
        from deepspeed.pipe import TiedLayerSpec

        super().__init__()
        tied: dict[str, nn.Module] = {}
        self.layers, self.calls = nn.ModuleList(), []
        for index, spec in enumerate(stock_model.layers(2)):
            torch.manual_seed(SEED + index)
            key = spec.key if isinstance(spec, TiedLayerSpec) else str(index)
            if key not in tied:
                tied[key] = spec.build()
                self.layers.append(tied[key])
            use = getattr(spec, "forward_fn", None)
            self.calls.append(tied[key] if use is None else (lambda x, m=tied[key], f=use: f(m, x)))

    def forward(self, x: Any) -> Any:
        for call in self.calls:
            x = call(x)
        return x


def weights(module: nn.Module) -> list[tuple[int, float, float]]:
    import deepspeed

    found = []
    for parameter in module.parameters():
        cut = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter]) if cut else nullcontext():
            values = parameter.detach().double()
            found.append((values.numel(), float(values.sum()), float(values.square().sum())))
    return sorted(found)


def follow(engine: Any, module: nn.Module, train: Any, steps: int = STEPS) -> Trained:
    """Train; ``engine`` is DeepSpeed's or dsx's, ``train(step)`` gives the mean loss of its micro-batches."""
    inner, seen = getattr(engine, "deepspeed_engine", engine), []
    for step in range(steps):
        scale = float(getattr(inner.optimizer, "loss_scale", 1.0))
        loss, norm = float(train(step)), float(engine.get_global_grad_norm())
        counts = inner.skipped_steps, inner.global_steps, inner.global_samples
        seen.append(Step(scale, *counts, round(inner.get_lr()[0], 9), loss, norm))
    return Trained(seen, weights(module))


def stock(case: Case, world_size: int) -> Trained:
    """DeepSpeed's own engine, which refuses fp16 on CPUs though torch has its kernels."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.pipe import PipelineModule

    get_accelerator().is_fp16_supported = lambda: True
    dp = world_size // case.pp
    if case.pp > 1:
        module: Any = PipelineModule(
            layers=stock_model.layers(2),
            num_stages=case.pp,
            loss_fn=loss_fn,
            seed_layers=True,
            seed_fn=torch.manual_seed,
            partition_method="uniform",
        )
    else:
        module = Whole()
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=case.config()
    )

    def train(step: int) -> Any:
        rank = engine.grid.get_data_parallel_rank() if case.pp > 1 else torch.distributed.get_rank()
        data = stock_model.batches(step, dp, rank, MICRO_BATCHES, dynamic=False)
        if case.pp > 1:
            return engine.train_batch(data_iter=data)
        losses = []
        for inputs, labels in data:
            loss = loss_fn(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean() / dp
        torch.distributed.all_reduce(mean)
        return mean

    return follow(engine, module, train)


def made(case: Case, **keys: Any) -> Any:
    """dsx's engine."""
    import dsx
    from dsx.config.schema import ZeroConfig

    module = dsx.PipelineModule(
        layers=stock_model.layers(2),
        num_stages=case.pp,
        loss_fn=loss_fn,
        seed_layers=True,
        seed_fn=torch.manual_seed,
        base_seed=SEED,
        partition_method="uniform",
        num_chunks=case.chunks,
        schedule=case.schedule,
    )
    return dsx.initialize(model=module, config=case.config() | keys, zero=ZeroConfig(reduce=case.reduce))[0]


def batches(engine: Any, step: int) -> Any:
    mesh = engine.groups.mesh
    return stock_model.batches(step, mesh.dp, engine.groups.dp_rank, MICRO_BATCHES, dynamic=False)


def ours(case: Case, steps: int = STEPS) -> Trained:
    engine = made(case)
    return follow(
        engine, engine.pipeline.chunks, lambda step: engine.train_batch(batches(engine, step)), steps
    )
