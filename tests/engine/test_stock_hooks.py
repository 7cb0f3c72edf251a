"""What programs change of stock DeepSpeed's pipeline is taken, or ends them by name before they train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe import engine as stock_engine
from deepspeed.runtime.pipe import module as stock_module
from deepspeed.runtime.pipe import schedule as stock_schedule
from torch import nn

import dsx
import ranks
from dsx.engine import stock_module as hooks
from dsx.errors import DsxError, LayoutError, ModelError, UnavailableError
from engine import toy_pipeline as toy
from engine.toy_pipeline import Case

GUIDE = (Path(__file__).parents[2] / "docs/guides/dropin.md").read_text()
MODULE = [name for name in vars(stock_module.PipelineModule) if not name.startswith("__")]


def _changed(*args: Any, **keys: Any) -> None:
    raise AssertionError("nobody calls it")


def test_every_method_that_a_subclass_may_override_is_taken_or_refused() -> None:
    """By introspection, so that a new DeepSpeed's method is decided upon; the guide names what is taken."""
    refused = []
    for name in MODULE:
        kind, text = type("Sub", (dsx.PipelineModule,), {name: _changed}), ""
        try:
            hooks.require_layers_unpatched(kind, dsx.PipelineModule)
        except ModelError as error:
            text = str(error)
        if text:
            refused.append(name)
        assert f"Sub.{name}: it overrides" in text or f"`{name}`" in GUIDE, name
    assert {"forward", "_build", "mpu", "save_state_dict", "_index_tied_modules"} <= set(refused)
    assert not {"_partition_layers", "_count_layer_params", "get_additional_losses"} & set(refused)


@pytest.mark.parametrize("name", [*(n for n in MODULE if n not in hooks.TAKEN), "to"])
def test_what_is_assigned_to_stocks_module_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_module.PipelineModule, name, _changed, raising=False)
    with pytest.raises(ModelError, match=f"deepspeed.pipe.PipelineModule: this program has changed {name}"):
        hooks.require_layers_unpatched(dsx.PipelineModule, dsx.PipelineModule)


@pytest.mark.parametrize("name", sorted(hooks.ENGINE_HOOKS - {"_INSTRUCTION_MAP"}))
def test_what_is_assigned_to_stocks_engine_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_engine.PipelineEngine, name, _changed)
    with pytest.raises(ModelError, match=f"PipelineEngine: this program has changed {name}"):
        hooks.require_engine_unpatched(2, 0, 4)


def _loads_first(self: Any) -> Iterator[list[Any]]:
    """Stock's steps with the loads of micro-batches before all transfers, as diffusion-pipe wants them."""
    for instructions in _STEPS(self):
        yield sorted(instructions, key=lambda each: not isinstance(each, stock_schedule.LoadMicroBatch))


def _forwards_first(self: Any) -> Iterator[list[Any]]:
    """Stock's instructions, all forwards before all backwards."""
    every = [each for instructions in _STEPS(self) for each in instructions]
    yield sorted(every, key=lambda each: isinstance(each, stock_schedule.BackwardPass))


_STEPS = stock_schedule.TrainSchedule.steps


def test_schedules_pass_if_they_compute_in_stocks_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in range(4):
        monkeypatch.setattr(stock_schedule.TrainSchedule, "steps", _loads_first)
        hooks.require_engine_unpatched(4, stage, 9)
    monkeypatch.setattr(stock_schedule.TrainSchedule, "steps", _forwards_first)
    with pytest.raises(ModelError, match="TrainSchedule: this program has changed steps"):
        hooks.require_engine_unpatched(2, 0, 3)


class NoGroups(torch.optim.Optimizer):
    """Has not even called torch's constructor."""

    def __init__(self) -> None:
        self.state = {}


def _put(owner: Any, name: str, value: Any = _changed) -> Callable[[], None]:
    """Assign, and return what undoes it."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def _refusals(rank: int, world_size: int) -> list[str]:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.pipe import p2p

    texts = []

    def refused(call: Callable[[], Any], undo: Callable[[], Any] = lambda: None) -> None:
        with pytest.raises(DsxError) as caught:
            call()
        undo()
        texts.append(str(caught.value))

    refused(lambda: toy.engine(Case()), _put(DeepSpeedEngine, "allreduce_gradients"))
    refused(lambda: toy.engine(Case()), _put(p2p, "send"))
    made = toy.engine(Case())
    table = stock_engine.PipelineEngine._INSTRUCTION_MAP
    kept = table[stock_schedule.ReduceGrads]
    table[stock_schedule.ReduceGrads] = _changed
    refused(lambda: toy.train(Case(), made), lambda: table.update({stock_schedule.ReduceGrads: kept}))
    refused(lambda: setattr(made, "_exec_reduce_grads", _changed))
    refused(lambda: made._exec_schedule)
    refused(lambda: dsx.PipelineEngine._INSTRUCTION_MAP)
    refused(lambda: type("Own", (dsx.PipelineEngine,), {"_exec_forward_pass": _changed}))
    refused(lambda: setattr(made, "optimizer", None))
    refused(lambda: setattr(made, "total_loss", None))
    refused(lambda: setattr(made, "agg_train_loss", None))
    made.micro_batches = 1
    refused(lambda: toy.train(Case(), made))
    assert made.eval_batch(toy.batches(0, 1)).item() > 0  # as many as were assigned
    made.micro_batches = 2
    made.global_steps = 7  # read by the DeepSpeedEngine, which counts on
    toy.train(Case(steps=1), made)
    assert made.deepspeed_engine.global_steps == made.global_steps == 8
    for given in (object(), lambda parameters: None, NoGroups(), lambda parameters: NoGroups()):
        refused(lambda given=given: toy.engine(Case(), optimizer=given))  # type: ignore[misc]
    none = {"optimizer": {}}
    refused(lambda: toy.engine(Case(zero=1, keys=none)))
    without = toy.engine(Case(keys=none))
    assert without.eval_batch(toy.batches(0, 2)).item() > 0
    refused(lambda: toy.train(Case(), without))
    return texts


def test_what_would_be_lost_is_refused_by_name() -> None:
    words = [
        "DeepSpeedEngine: this program has changed allreduce_gradients", "p2p: this program has changed send",
        "_INSTRUCTION_MAP: this program has changed ReduceGrads", "engine._exec_reduce_grads",
        "PipelineEngine._exec_schedule", "PipelineEngine._INSTRUCTION_MAP", "Own._exec_forward_pass",
        "engine.optimizer = ...", "PipelineEngine.total_loss", "engine.agg_train_loss = ...",
        "engine.micro_batches = 1 was assigned", "optimizer of type object", "optimizer of type NoneType",
        "optimizer of type NoGroups", "optimizer of type NoGroups", "zero_optimization.stage = 1",
        "the engine has no optimizer",
    ]  # fmt: skip
    for text, word in zip(ranks.run(_refusals, 1)[0], words, strict=True):
        assert word in text


class Skipped(nn.Module):
    """Passes a micro-batch on, more often than not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(toy.WIDTH, toy.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training and torch.rand(()) < 0.6 else torch.tanh(self.linear(x))


class Named(nn.Module):
    """From a tensor to a dict with a None in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(toy.WIDTH, toy.WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return {"hidden": torch.tanh(self.linear(x)), "mask": None}


class Unnamed(Named):
    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return self.linear(inputs["hidden"])


SKIPPED: list[Any] = [*(Skipped for _ in range(7)), (nn.Linear, toy.WIDTH, toy.WIDTH)]
DICTS: list[Any] = [Named, Unnamed, Named, Unnamed]
MICRO_BATCHES, STEPS = 3, 3


def _specs(kinds: list[Any]) -> list[LayerSpec]:
    return [LayerSpec(*(kind if isinstance(kind, tuple) else (kind,))) for kind in kinds]


def _alone(kinds: list[Any]) -> list[float]:
    """Losses of one process, with torch alone, seeded as stock's PipelineModule does."""
    layers, losses, forwards = [], [], 0
    for index, spec in enumerate(_specs(kinds)):
        torch.manual_seed(toy.SEED + index)
        layers.append(spec.build())
    optimizer = torch.optim.AdamW(nn.ModuleList(layers).parameters(), **toy.ADAMW)
    for step in range(STEPS):
        total = 0.0
        for inputs, labels in toy.batches(step, MICRO_BATCHES):
            x, forwards = inputs, forwards + 1
            for index, layer in enumerate(layers):
                torch.manual_seed(toy.SEED * (forwards + 1) + index)
                x = layer(x)
            loss = toy.loss_fn(x, labels) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        losses.append(total)
        for parameter in nn.ModuleList(layers).parameters():
            if parameter.grad is None:  # as DeepSpeed treats what a step has left out
                parameter.grad = torch.zeros_like(parameter)
        torch.nn.utils.clip_grad_norm_(nn.ModuleList(layers).parameters(), toy.CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _over_ranks(rank: int, world_size: int, cases: list[tuple[list[Any], int, int, int]]) -> list[Any]:
    import deepspeed

    deepspeed.init_distributed()
    found: list[Any] = []
    for kinds, zero, chunks, interval in cases:
        case = Case(zero=zero, micro_batches=MICRO_BATCHES)
        module = dsx.PipelineModule(
            _specs(kinds),
            num_stages=2,
            num_chunks=chunks,
            loss_fn=toy.loss_fn,
            seed_layers=True,
            seed_fn=torch.manual_seed,
            base_seed=toy.SEED,
            partition_method="uniform",
            activation_checkpoint_interval=interval,
        )
        made = dsx.initialize(model=module, config=toy.config(case))[0]
        found.append([made.train_batch(toy.batches(step, MICRO_BATCHES)).item() for step in range(STEPS)])
    return found


def test_layers_skipped_at_random_and_dicts_inside_of_a_stage() -> None:
    """With two chunks the first virtual stage is skipped whole now and then."""
    cases = [
        (SKIPPED, 3, 2, 0),
        (SKIPPED, 1, 2, 1),
        (DICTS, 0, 1, 1),
        (DICTS, 3, 1, 0),
    ]
    for losses, (kinds, *_) in zip(ranks.run(_over_ranks, 2, cases)[0], cases, strict=True):
        assert losses == pytest.approx(_alone(kinds), rel=1e-5)


class SkippedOn(Named):
    """Skipped by one rank alone."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x if torch.distributed.get_rank() == self.rank else torch.tanh(self.linear(x))


def _skipped_apart(rank: int, _world_size: int, skipping: list[int]) -> str:
    """What is said by two replicas each of which skips layers of its own; empty where they train."""
    import deepspeed

    deepspeed.init_distributed()
    layers = [*(LayerSpec(SkippedOn, of) for of in skipping), LayerSpec(nn.Linear, toy.WIDTH, toy.WIDTH)]
    module = dsx.PipelineModule(layers, num_stages=1, loss_fn=toy.loss_fn, partition_method="uniform")
    config = toy.config(Case(zero=3, micro_batches=2))
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    made = dsx.initialize(model=module, config=config)[0]
    try:
        for step in range(2):
            made.train_batch(toy.batches(step, 2, 2, rank))
    except LayoutError as error:
        return str(error)
    return ""


def test_replicas_that_skip_different_layers_at_zero3_are_told_so() -> None:
    """As many each, they mix each other's parameters, in stock without a word; else they wait for ever."""
    for said in ranks.run(_skipped_apart, 2, [0, 1]):
        assert "as module 1 of it 1.linear and 0.linear" in said
        assert "seed their generators alike" in said
    with pytest.raises(ranks.RankError, match=r"error: ZeRO-3 over 2 replicas: .* as module 1 of it"):
        ranks.run(_skipped_apart, 2, [0, 2, 0])


def test_what_is_assigned_to_dsx_s_own_classes_is_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program that has changed every import."""
    kind, made = dsx.PipelineModule, object.__new__(dsx.PipelineModule)
    assert [hooks.asked(made, kind, name) for name in hooks.TAKEN] == [None] * len(hooks.TAKEN)
    for name in hooks.TAKEN:
        monkeypatch.setattr(kind, name, _changed)
        assert hooks.asked(made, kind, name) == getattr(made, name)
    hooks.require_layers_unpatched(kind, kind)
    for name in ("_build", "forward"):
        monkeypatch.setattr(kind, name, _changed, raising=False)
        with pytest.raises(ModelError, match=f"PipelineModule.{name}: it overrides"):
            hooks.require_layers_unpatched(kind, kind)
        monkeypatch.undo()


def test_unavailable_hooks_are_attribute_errors() -> None:
    """So that ``hasattr`` and ``getattr`` with a default go on working."""
    assert not hasattr(dsx.PipelineEngine, "_INSTRUCTION_MAP")
    assert isinstance(hooks.no_hook("engine", "_exec_schedule"), UnavailableError)
