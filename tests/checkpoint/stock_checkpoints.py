"""Small checkpoints written by stock DeepSpeed on gloo ranks, with what the live engine held.

Parameters have awkward sizes, so that every ZeRO cut falls inside one; there are ties, a frozen parameter,
buffers, a parameter without a gradient and two parameter groups.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import ranks
from dsx.checkpoint.catalog import Catalog, Entry
from dsx.checkpoint.file_io import numpy_dtype

VOCABULARY, WIDTH = 11, 6


@dataclass(frozen=True, kw_only=True)
class Stock:
    """What to write.

    Attributes:
        dp: Data-parallel degree.
        pp: Stages of DeepSpeed's PipelineModule; 0 for a plain engine.
        zero: Stage.
        bf16: Train in bfloat16.
        fp16: Train in float16 with a dynamic loss scale.
        groups: Two parameter groups with different hyperparameters.
        frozen: With a frozen parameter.
        optimizer: AdamW or SGD (with momentum).
        zero_keys: More of ``zero_optimization``.
        keys: More of the config.
    """

    dp: int = 2
    pp: int = 0
    zero: int = 1
    bf16: bool = False
    fp16: bool = False
    groups: bool = True
    frozen: bool = True
    optimizer: str = "AdamW"
    zero_keys: tuple[tuple[str, Any], ...] = ()
    keys: tuple[tuple[str, Any], ...] = ()

    @property
    def world_size(self) -> int:
        return self.dp * max(1, self.pp)

    @property
    def precision(self) -> str:
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    def __str__(self) -> str:
        parts = [f"z{self.zero}", f"dp{self.dp}"] + ([f"pp{self.pp}"] if self.pp else [])
        parts += [self.precision] if self.precision != "fp32" else []
        parts += [] if self.groups else ["onegroup"]
        parts += [] if self.frozen else ["nofrozen"]
        parts += [] if self.optimizer == "AdamW" else [self.optimizer]
        return "-".join([*parts, *(f"{key}" for key, _ in (*self.zero_keys, *self.keys))])


@dataclass(frozen=True)
class Live:
    """What an engine held when it saved: {name: tensor} per state, logical and unsharded, and some facts."""

    states: dict[str, dict[str, torch.Tensor]]
    steps: int
    scheduler: dict[str, Any]
    groups: list[dict[str, Any]]
    losses: list[float]


class Block(nn.Module):
    """A layer with every kind of parameter and buffer."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.gain = nn.Parameter(torch.ones(1))
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.frozen = nn.Parameter(torch.randn(3, WIDTH), requires_grad=not frozen)
        self.register_buffer("mask", torch.arange(WIDTH))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + self.down(torch.tanh(self.up(x))) * self.gain + x @ self.frozen.t() @ self.frozen


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight)


class Net(nn.Module):
    """The same model for a plain engine, with a tied head."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList([Block(frozen), Block(False)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def head(layer: Embedding, x: torch.Tensor) -> torch.Tensor:
    """The tied head of the pipeline."""
    return x @ layer.weight.t()


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def config(stock: Stock) -> dict[str, Any]:
    """DeepSpeed's config."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": stock.bf16},
        **({"fp16": {"enabled": True, "initial_scale_power": 8}} if stock.fp16 else {}),
        "zero_optimization": {"stage": stock.zero, **dict(stock.zero_keys)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 7, "warmup_max_lr": 0.02, "warmup_min_lr": 0.0},
        },
        **dict(stock.keys),
    }


def parameter_groups(module: nn.Module, stock: Stock) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not; or one group."""
    trained = [p for p in module.parameters() if p.requires_grad]
    if not stock.groups:
        return [{"params": trained, "lr": 0.01}]
    dims = {p: len(getattr(p, "ds_shape", p.shape)) for p in trained}
    return [
        {"params": [p for p in trained if dims[p] > 1], "lr": 0.01, "weight_decay": 0.1},
        {"params": [p for p in trained if dims[p] < 2], "lr": 0.02, "weight_decay": 0.0},
    ]


def optimizer_of(groups: list[dict[str, Any]], stock: Stock) -> torch.optim.Optimizer:
    if stock.optimizer == "SGD":
        return torch.optim.SGD(groups, momentum=0.9)
    return torch.optim.AdamW(groups, eps=1e-5)


def build(stock: Stock) -> Any:
    """A stock engine on this rank."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    if stock.fp16:  # which torch's CPU kernels can do and DeepSpeed refuses
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(3)
    if stock.pp:
        module = PipelineModule(
            layers=[
                TiedLayerSpec("embed", Embedding),
                LayerSpec(Block, stock.frozen),
                LayerSpec(Block, False),
                LayerSpec(nn.LayerNorm, WIDTH),
                TiedLayerSpec("embed", Embedding, forward_fn=head),
            ],
            num_stages=stock.pp,
            loss_fn=loss_of,
            partition_method="uniform",
            activation_checkpoint_interval=0,
        )
    elif stock.zero == 3:
        with deepspeed.zero.Init(config_dict_or_path=config(stock)):
            module = Net(stock.frozen)
    else:
        module = Net(stock.frozen)
    optimizer = optimizer_of(parameter_groups(module, stock), stock)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, model_parameters=None, config=config(stock)
    )
    return engine


def batch(stock: Stock, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
    return tokens, tokens.roll(1, 1)


def train(engine: Any, stock: Stock, rank: int, first: int, steps: int) -> list[float]:
    """Losses of ``steps`` steps from step ``first`` on."""
    losses = []
    for step in range(first, first + steps):
        data = [batch(stock, 2 * step + at, rank % stock.dp) for at in range(2)]
        if stock.pp:
            losses.append(float(engine.train_batch(iter(data))))
            continue
        for tokens, wanted in data:
            loss = loss_of(engine(tokens), wanted)
            engine.backward(loss)
            engine.step()
        losses.append(float(loss.detach()))
    return losses


def engine_of_transformers(model: nn.Module, zero: int) -> Any:
    """A stock engine of a model of transformers, whose vocabulary is 67."""
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, config=settings)[0]


def train_transformers(engine: Any, rank: int, first: int) -> list[float]:
    """Losses of two steps from step ``first`` on."""
    losses = []
    for step in range(first, first + 2):
        tokens = torch.randint(67, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def live_states(engine: Any, stock: Stock) -> dict[str, dict[str, torch.Tensor]]:
    """Every state of every tensor, whole. Collective over the data-parallel ranks."""
    import deepspeed

    optimizer = engine.optimizer
    moments = ["momentum_buffer"] if stock.optimizer == "SGD" else ["exp_avg", "exp_avg_sq"]
    found: dict[str, dict[str, torch.Tensor]] = {key: {} for key in ("weight", "master", *moments)}
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed links the states after the first group's first step, when the others have none yet.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        gathered = (
            deepspeed.zero.GatheredParameters([parameter]) if hasattr(parameter, "ds_id") else nullcontext()
        )
        with gathered:
            found["weight"][name] = parameter.detach().clone()
        if parameter.requires_grad:
            for state in ("master", *moments):
                found[state][name] = state_of(optimizer, parameter, state)
    for name, buffer in engine.module.named_buffers():
        found["weight"][name] = buffer.detach().clone()
    return {
        state: {name: value.clone().cpu() for name, value in values.items() if value is not None}
        for state, values in found.items()
    }


def state_of(optimizer: Any, parameter: torch.Tensor, state: str) -> torch.Tensor | None:
    """One state of one parameter, whole, by DeepSpeed's own accessors where it has them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        pairs = [pair for low, high in groups for pair in zip(low, high, strict=True)]
        master = next(high for low, high in pairs if low is parameter)
        return master.detach() if state == "master" else optimizer.optimizer.state[master][state]
    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
        if state == "master":
            return safe_get_full_fp32_param(parameter)
        return safe_get_full_optimizer_state(parameter, state)
    return optimizer.state[parameter][state] if state != "master" else None


def live_of(engine: Any, stock: Stock, losses: list[float]) -> Live:
    groups = [
        {key: value for key, value in group.items() if key != "params" and not torch.is_tensor(value)}
        for group in engine.optimizer.param_groups
    ]
    return Live(
        live_states(engine, stock), engine.global_steps, engine.lr_scheduler.state_dict(), groups, losses
    )


def _save(rank: int, world_size: int, stock: Stock, folder: Path, steps: int) -> tuple[Live, list[float]]:
    engine = build(stock)
    losses = train(engine, stock, rank, 0, steps)
    live = live_of(engine, stock, losses)
    engine.save_checkpoint(str(folder), client_state={"note": {"epoch": 3}, "seen": [1, 2.5, "x"]})
    return live, train(engine, stock, rank, steps, 2)


def save(stock: Stock, folder: Path, steps: int = 3) -> tuple[Path, list[Live], list[list[float]]]:
    """Train and save; (the checkpoint, what each rank held, the losses of two steps more on each rank)."""
    found = ranks.run(_save, stock.world_size, stock, folder, steps)
    return folder / f"global_step{steps}", [live for live, _ in found], [after for _, after in found]


def _resume(rank: int, world_size: int, stock: Stock, folder: Path, tag: str) -> tuple[Live, list[float]]:
    engine = build(stock)
    path, client = engine.load_checkpoint(str(folder), tag=tag)
    assert path is not None
    assert client["note"] == {"epoch": 3}
    live = live_of(engine, stock, [])
    return live, train(engine, stock, rank, engine.global_steps, 2)


def resume(stock: Stock, path: Path) -> tuple[list[Live], list[list[float]]]:
    """Load a checkpoint with stock DeepSpeed; (what each rank holds, the losses of two steps more)."""
    found = ranks.run(_resume, stock.world_size, stock, path.parent, path.name)
    return [live for live, _ in found], [after for _, after in found]


def read_entry(catalog: Catalog, entry: Entry, replica: int = 0) -> torch.Tensor:
    """A logical tensor, put together from its pieces by hand."""
    dtype = numpy_dtype(entry.dtype)
    out = np.zeros(entry.shape, dtype)
    seen = np.zeros(entry.shape, bool)
    for piece in entry.pieces:
        if piece.replica != replica:
            continue
        data = (catalog.root / piece.file).read_bytes()
        strides = [step * dtype.itemsize for step in piece.strides]
        at = tuple(slice(low, high) for low, high in piece.box)
        out[at] = np.ndarray(piece.shape, dtype, data, piece.offset, strides)
        assert not seen[at].any()
        seen[at] = True
    assert seen.all() or replica > 0
    return torch.from_numpy(out).view(getattr(torch, entry.dtype))


def converted(path: Path) -> Path:
    """What DeepSpeed's own tool makes of a checkpoint. It wants a key that plain engines do not write."""
    from deepspeed.checkpoint.ds_to_universal import main

    for file in path.glob("*model_states.pt"):
        content = torch.load(file, weights_only=False)
        content.setdefault("universal_checkpoint_info", {"universal_checkpoint_version": 0.2})
        torch.save(content, file)
    out = path.with_name(f"{path.name}_universal")
    main(
        argparse.Namespace(
            input_folder=str(path),
            output_folder=str(out),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )
    return out
