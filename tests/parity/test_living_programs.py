"""Programs that use DeepSpeed's pipelines as diffusion-pipe and qlora-pipe do, beside stock DeepSpeed.

Of the two (github.com/tdrussell) only the calls are taken: what they override and patch of PipelineModule and
its engine, when they make their optimizer and schedule, how they feed, evaluate, save and go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe import module as pipe_module
from deepspeed.runtime.pipe import schedule as pipe_schedule
from torch import nn
from torch.utils.checkpoint import checkpoint

import ranks

WIDTH, MICRO_BATCHES, STEPS, VOCABULARY = 8, 3, 5, 20


class Wide(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Nothing(torch.optim.Optimizer):
    """For a stage that has nothing to train."""

    def __init__(self) -> None:
        self.state, self.param_groups = {}, []

    def step(self, closure: Any = None) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if not parameters:
        return Nothing()
    decayed = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim < 2]
    return torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, eps=1e-5)


def _patch() -> None:
    """What such a program assigns to DeepSpeed's classes when it starts."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    def counts_all(self: Any) -> list[int]:
        """Frozen parameters too."""
        built = [spec.build() if isinstance(spec, LayerSpec) else spec for spec in self._layer_specs]
        return [sum(p.numel() for p in layer.parameters()) for layer in built]

    def clip_here(self: Any) -> None:
        """By the norm of this stage; a stage may have no gradients."""
        trained = [p for p in self.module.parameters() if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(trained, self.gradient_clipping())

    stock_steps = pipe_schedule.TrainSchedule.steps

    def loads_first(self: Any) -> Iterator[list[Any]]:
        for each in stock_steps(self):
            yield sorted(each, key=lambda what: not isinstance(what, pipe_schedule.LoadMicroBatch))

    pipe_module.PipelineModule._count_layer_params = counts_all
    DeepSpeedEngine.clip_fp32_gradients = clip_here
    DeepSpeedEngine._broadcast_model = lambda self: None  # every rank has built the same
    pipe_schedule.TrainSchedule.steps = loads_first


def _only_where_read(engine: Any, batches: Iterator[Any], count: int) -> Iterator[Any] | None:
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    return iter([next(batches) for _ in range(count)])


def _images(step: int) -> Iterator[Any]:
    """Rows of a length that differs from step to step; the target is a tuple."""
    for index in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(100 * step + index)
        x, target = torch.randn(2, 2, 4 + step % 2, WIDTH, generator=generator)
        yield (x,), (target, torch.ones(2, 4 + step % 2, 1))


def _masked(outputs: torch.Tensor, label: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    target, mask = label
    return ((outputs - target) ** 2 * mask).mean()


def _first(inputs: Any) -> torch.Tensor:
    return inputs[0] if isinstance(inputs, tuple) else inputs


def _diffusion(kind: type, start: Any, folder: str, *, resumed: bool) -> dict[str, Any]:
    """Layers as modules, some frozen; the optimizer comes when there is an engine."""

    class Manual(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, bounds: list[int] | None = None, **keys: Any) -> None:
            self.own_bounds = bounds
            super().__init__(*args, **keys)

        def _partition_layers(self, method: str = "uniform") -> None:
            if method != "manual":
                super()._partition_layers(method)
                return
            stage = self._topo.get_coord(self.global_rank).pipe
            assert (self.loss_fn, self.num_stages) == (_masked, self._topo.get_dim("pipe"))
            self.parts = [0, *self.own_bounds, len(self._layer_specs)]
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    torch.manual_seed(3 + resumed)
    layers: list[Any] = [_first, *(Wide(inner) for inner in (8, 8, 40, 8, 8, 8))]
    for layer in layers[4:]:
        layer.requires_grad_(False)  # the second stage has nothing to train
    by_size = Manual(layers[1:], num_stages=2, partition_method="parameters", loss_fn=_masked)
    torch.manual_seed(4)
    module = Manual(
        layers,
        num_stages=2,
        partition_method="manual",
        bounds=[4],
        loss_fn=_masked,
        dynamic_shape=True,
        activation_checkpoint_interval=1,
        checkpointable_layers=["Wide"],
        activation_checkpoint_func=partial(checkpoint, use_reentrant=False),
    )
    parameters = [p for p in module.parameters() if p.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.05,
        "steps_per_print": 1000,
    }
    engine, *_ = start(model=module, config=config)
    engine._support_torch_style_backward = True
    engine._configure_optimizer(_optimizer, parameters)
    optimizer = engine.optimizer
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=3)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    engine.lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, constant], milestones=[3])
    engine.communication_data_type = torch.float32
    engine.total_steps = STEPS
    first, losses, evaluated = 0, [], []
    if resumed:
        path, state = engine.load_checkpoint(folder, load_module_strict=False, load_lr_scheduler_states=True)
        assert path is not None
        first = state["step"] + 1
    for step in range(first, STEPS):
        engine.reset_activation_shape()
        losses.append(
            engine.train_batch(_only_where_read(engine, _images(step), engine.micro_batches)).item()
        )
        engine.reset_activation_shape()
        data = _only_where_read(engine, _images(50 + step), 2)
        evaluated.append(engine.eval_batch(data, num_micro_batches=2).item())
        if step == 2 and kind is not pipe_module.PipelineModule:
            state = {"step": step, "custom_loader": {"epoch": 1}}
            engine.save_checkpoint(
                folder, client_state=state, save_latest=True, exclude_frozen_parameters=True
            )
    return {
        "losses": losses,
        "evaluated": evaluated,
        "parts": [*map(int, by_size.parts)],
        "lr": engine.get_lr()[:1] if parameters else [],
        "first_last": engine.grid.pp_group,
    }


class Sized(LayerSpec):
    """A LayerSpec with a size of the program's own."""

    def __init__(self, kind: type, *args: Any, size: int = 1) -> None:
        super().__init__(kind, *args)
        self.estimated_size = size


class Words(nn.Module):
    """Frozen embedding; labels go along, and floats are made to want a gradient, as stock needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        ids, labels = inputs
        return self.table(ids).requires_grad_(), labels


class DecoderLayerPipe(nn.Module):
    """A frozen linear with an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, WIDTH))
        self.lora_b = nn.Parameter(0.1 * torch.randn(WIDTH, 2))

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, labels = inputs
        return x + torch.tanh(self.base(x) + x @ self.lora_a.t() @ self.lora_b.t()), labels


class Output(nn.Module):
    """Computes the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, labels = inputs
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), labels.flatten())


def _texts(step: int) -> Iterator[Any]:
    for index in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(100 * step + index)
        ids = torch.randint(0, VOCABULARY, (2, 6), generator=generator)
        yield (ids[:, :-1], ids[:, 1:]), torch.tensor(0)  # no label besides


def _adapters(kind: type, start: Any) -> dict[str, Any]:
    """Stages cut by sizes of the program's own, and ZeRO-1 over the adapters alone."""
    from deepspeed.runtime import utils

    class Custom(kind):  # type: ignore[misc]
        def __init__(self, layers: list[Any], model: Any = None, **keys: Any) -> None:
            self._model = [model]
            super().__init__(layers, **keys)

        def _partition_layers(self, method: str = "uniform") -> None:
            assert method == "estimated_size"
            assert self._find_layer_type("decoderlayer") == [1, 2, 3, 4]
            weights = [spec.estimated_size for spec in self._layer_specs]
            self.parts = utils.partition_balanced(weights=weights, num_parts=self._topo.get_dim("pipe"))
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    torch.manual_seed(6)
    layers = [Sized(Words, size=2), *(Sized(DecoderLayerPipe) for _ in range(4)), Sized(Output)]
    module = Custom(layers, num_stages=2, partition_method="estimated_size", dynamic_shape=True)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "steps_per_print": 1000,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    parameters = [p for p in module.parameters() if p.requires_grad]
    engine, *_ = start(model=module, model_parameters=parameters, optimizer=_optimizer, config=config)
    engine._support_torch_style_backward = True
    losses, evaluated = [], []
    for step in range(3):
        losses.append(engine.train_batch(_texts(step)).item())
        kept = engine.micro_batches
        engine.micro_batches = 1
        evaluated.append(engine.eval_batch(_texts(50 + step)).item())
        engine.micro_batches = kept
    return {"losses": losses, "evaluated": evaluated, "parts": [*map(int, module.parts)]}


def _both(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import dsx

    deepspeed.init_distributed()
    stock: tuple[Any, Any] = PipelineModule, deepspeed.initialize
    ours: tuple[Any, Any] = dsx.PipelineModule, dsx.initialize
    found = [_adapters(*stock), _adapters(*ours)]
    _patch()
    found += [_diffusion(*kind, folder, resumed=False) for kind in (stock, ours)]
    return [*found, _diffusion(*ours, folder, resumed=True)]


def test_programs_as_they_are_written_train_as_with_stock_deepspeed(tmp_path: Any) -> None:
    for result in ranks.run(_both, 2, str(tmp_path)):
        adapters, own_adapters, stock, ours, resumed = result
        for theirs, mine in ((adapters, own_adapters), (stock, ours)):
            for what, values in theirs.items():
                assert mine[what] == pytest.approx(values, rel=1e-5), what
        assert stock["parts"] == [0, 3, 6]  # a third stage of frozen ones counts as others do
        assert resumed["losses"] == pytest.approx(stock["losses"][3:], rel=1e-5)
