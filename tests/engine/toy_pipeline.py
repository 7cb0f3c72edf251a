"""Small layer lists, an engine over them, and what plain torch makes of the same lists. Not a test.

Everything that runs on ranks takes a :class:`Case`; several cases share one set of ranks, because starting
ranks costs more than training these models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

WIDTH, ROWS, SEED, CLIPPING = 8, 2, 1234, 0.5
ADAMW = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1}

Losses = list[tuple[float, float]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Table(nn.Module):
    """Used twice: as the first layer and, transposed, as the last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(0.3 * torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def head(table: Table, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, table.weight.t(), table.bias)


class Fork(nn.Module):
    """One tensor to four: with a gradient, without, not a float, and with a gradient that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        return y, y.detach() * 0.5, y > 0, 2 * y


class Pass(nn.Module):
    """Gives the tuple on as it is, but for one view and one tensor more."""

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (*inputs, inputs[0][:, :4], inputs[2].to(torch.int16).t())


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        y, still, mask, _, half, counts = inputs
        y = y * mask + still + torch.cat((half, half), 1) * counts.t().to(y.dtype)
        return self.linear(y)


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def layers(name: str) -> list[Any]:
    """A fresh list of specs."""
    plain = [LayerSpec(Layer) for _ in range(4)]
    tied = ["weight", "bias"]
    lists = {
        "plain": plain,
        "eight": [LayerSpec(Layer) for _ in range(8)],
        "tied": [
            TiedLayerSpec("table", Table, tied_weight_attr=tied),
            *plain,
            TiedLayerSpec("table", Table, forward_fn=head, tied_weight_attr=tied),
        ],
        # A stage may begin with an operation that writes over its input, as in DeepSpeed's AlexNet tutorial.
        "in place": [
            LayerSpec(nn.Linear, WIDTH, WIDTH),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(nn.Linear, WIDTH, WIDTH),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(Layer),
        ],
        "tuples": [LayerSpec(Fork), LayerSpec(Pass), LayerSpec(Join), LayerSpec(Layer), LayerSpec(Layer)],
        "identity": [LayerSpec(Layer), _identity, LayerSpec(Layer), _identity, LayerSpec(Layer)],
    }
    return lists[name]


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, labels)


def batches(
    step: int, micro_batches: int, dp: int = 1, dp_rank: int = 0, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This replica's part of the global batch, which is the same for every dp."""
    for j in range(micro_batches):
        generator = torch.Generator().manual_seed(100 * step + j * dp + dp_rank)
        yield tuple(torch.randn(ROWS, WIDTH, generator=generator).to(dtype) for _ in range(2))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine. ``micro_batches`` are per replica; dp follows from the number of ranks."""

    layers: str = "plain"
    zero: int = 0
    pp: int = 1
    chunks: int = 1
    micro_batches: int = 2
    bf16: bool = False
    steps: int = 3
    prepare: str = "nothing"
    zero_keys: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    module: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32


def config(case: Case) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": CLIPPING,
        "steps_per_print": 10**9,
        "bf16": {"enabled": case.bf16},
        "zero_optimization": {"stage": case.zero, **case.zero_keys},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        **case.keys,
    }


# Ways to call initialize(): what a user does between building the module and the engine.
def _nothing(module: nn.Module) -> dict[str, Any]:
    return {}


def _optimizer_instance(module: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW(module.parameters(), **ADAMW)}


def _optimizer_callable(module: nn.Module) -> dict[str, Any]:
    return {"optimizer": lambda groups: torch.optim.AdamW(groups, **ADAMW)}


def _decay_groups(module: nn.Module) -> dict[str, Any]:
    matrices = [p for p in module.parameters() if p.dim() > 1]
    rest = [p for p in module.parameters() if p.dim() < 2]
    return {"model_parameters": [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]}


def _frozen_tie(module: nn.Module) -> dict[str, Any]:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("tied_modules" not in name)
    return {}


def _frozen_start(module: nn.Module) -> dict[str, Any]:
    for name, parameter in module.named_parameters():
        index = name.removeprefix("chunks.").split(".")[0]
        parameter.requires_grad_(index not in ("0", "1"))
    return {}


def _frozen_end(module: nn.Module) -> dict[str, Any]:
    for name, parameter in module.named_parameters():
        index = name.removeprefix("chunks.").split(".")[0]
        parameter.requires_grad_(index == "0")
    return {}


def _all_frozen(module: nn.Module) -> dict[str, Any]:
    module.requires_grad_(False)
    return {}


PREPARE = {
    "nothing": _nothing,
    "optimizer instance": _optimizer_instance,
    "optimizer callable": _optimizer_callable,
    "decay groups": _decay_groups,
    "frozen tie": _frozen_tie,
    "frozen start": _frozen_start,
    "frozen end": _frozen_end,
    "all frozen": _all_frozen,
}


def engine(case: Case, **keys: Any) -> Any:
    """The case's engine on this rank."""
    import deepspeed

    import dsx

    deepspeed.init_distributed()
    module = dsx.PipelineModule(
        layers=layers(case.layers),
        num_stages=case.pp,
        loss_fn=loss_fn,
        seed_layers=True,
        seed_fn=torch.manual_seed,
        base_seed=SEED,
        num_chunks=case.chunks,
        **{"partition_method": "uniform", **case.module},
    )
    return dsx.initialize(model=module, config=config(case), **PREPARE[case.prepare](module), **keys)[0]


def train(case: Case, made: Any = None) -> Losses:
    """(loss, pre-clip norm) per step."""
    made = made or engine(case)
    dp, dp_rank = made.groups.mesh.dp, made.groups.dp_rank
    result = []
    for step in range(case.steps):
        loss = made.train_batch(batches(step, case.micro_batches, dp, dp_rank, case.dtype))
        result.append((loss.item(), made.get_global_grad_norm()))
    return result


def train_all(rank: int, world_size: int, cases: list[Case]) -> list[Losses]:
    """:func:`train` for each case, one after the other, on the same ranks."""
    return [train(case) for case in cases]


class Whole(nn.Module):
    """The whole list in one process, with torch alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self.calls: list[Any] = []
        for index, spec in enumerate(layers(name)):
            torch.manual_seed(SEED + index)
            if isinstance(spec, TiedLayerSpec):
                if spec.key not in self.tied_modules:
                    self.tied_modules[spec.key] = spec.build()
                shared, use = self.tied_modules[spec.key], spec.forward_fn
                self.calls.append(shared if use is None else (lambda x, m=shared, f=use: f(m, x)))
            elif isinstance(spec, LayerSpec):
                self.add_module(str(index), spec.build())
                self.calls.append(self.get_submodule(str(index)))
            else:
                self.calls.append(spec)

    def forward(self, x: Any) -> Any:
        for call in self.calls:
            x = call(x)
        return x


def oracle(name: str, *, micro_batches: int, steps: int = 3, prepare: str = "nothing") -> Losses:
    """What torch's own autograd, clipping and AdamW give for the global batch."""
    whole = Whole(name)
    given = PREPARE[prepare](whole)
    groups = given.get("model_parameters", whole.parameters())
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    result = []
    for step in range(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for inputs, labels in batches(step, micro_batches):
            loss = loss_fn(whole(inputs.clone()), labels) / micro_batches
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIPPING)
        optimizer.step()
        result.append((total.item(), float(norm)))
    return result


def flat(losses: Losses) -> list[float]:
    """For pytest.approx, which does not nest."""
    return [value for pair in losses for value in pair]
