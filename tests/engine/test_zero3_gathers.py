"""ZeRO-3 under a schedule: what is gathered when, how much, and that it changes no result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from deepspeed.comm.torch import TorchBackend

import ranks
from dsx.config.schema import ZeroConfig
from dsx.errors import ConfigError
from engine import toy_pipeline as toy
from engine.toy_pipeline import Case
from often import often

PP, DP, MICRO_BATCHES, STEPS = 2, 2, 4, 4
ELEMENTS = toy.WIDTH * (toy.WIDTH + 1)  # of a layer; divides by dp, so that nothing is padded
CHUNK_BYTES = 4 * ELEMENTS
NO_CHOICE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


class Watch:
    """What data parallelism gathers in elements, and what is there when actions begin and end."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._gathers = engine, engine._adapter.hooks
        self.gathered = 0
        self.ready: list[bool] = []
        self.most_bytes_between = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        make_run = self._engine._step_run
        with pytest.MonkeyPatch.context() as mp:
            mp.setattr(
                self._engine,
                "_step_run",
                lambda source, n, mode, _=None: make_run(source, n, mode, self._around),
            )
            real = TorchBackend.all_gather_into_tensor

            def count(backend: Any, *, output_tensor: Any, group: Any, **kwargs: Any) -> Any:
                self.gathered += output_tensor.numel() if group is self._engine.groups.data else 0
                return real(backend, output_tensor=output_tensor, group=group, **kwargs)

            mp.setattr(TorchBackend, "all_gather_into_tensor", count)
            yield

    @contextmanager
    def _around(self, action: Any) -> Iterator[None]:
        mine = self._gathers.holds.parameters[action.stage]
        if action.op in ("F", "B", "I"):
            self.ready.append(all(p.ds_status.name != "NOT_AVAILABLE" for p in mine))
        yield
        there = {
            id(p): p.ds_numel * 4
            for parameters in self._gathers.holds.parameters.values()
            for p in parameters
            if p.ds_status.name == "AVAILABLE"
        }
        self.most_bytes_between = max(self.most_bytes_between, sum(there.values()))


def _case(schedule: str, keys: dict[str, Any], layers: str = "plain") -> Case:
    module = {"schedule": schedule}
    return Case(
        layers=layers, zero=3, pp=PP, chunks=2, micro_batches=MICRO_BATCHES, zero_keys=keys, module=module
    )


def _kept(rank: int, world_size: int, schedule: str, budgets: list[int]) -> list[tuple[Any, ...]]:
    """Per budget: losses, elements gathered and planned in a step, memory between actions and planned."""
    found = []
    for budget in budgets:
        made = toy.engine(_case(schedule, NO_CHOICE), zero=ZeroConfig(keep_gathered_bytes=budget))
        losses = []
        for step in range(STEPS):
            watch = Watch(made)
            with watch():
                data = toy.batches(step, MICRO_BATCHES, DP, made.groups.dp_rank)
                losses.append((made.train_batch(data).item(), made.get_global_grad_norm()))
        made.eval_batch(toy.batches(0, MICRO_BATCHES))
        plan = made._adapter.hooks.plan(made.programs.step(MICRO_BATCHES, training=True)[0])
        planned = sum(plan.gathers.values()) * ELEMENTS
        found.append((losses, watch.gathered, planned, watch.most_bytes_between, plan.peak_bytes))
    return found


@pytest.mark.parametrize("schedule", often(["zbv", "interleaved"], 2))
def test_what_is_kept_is_not_gathered_again(schedule: str) -> None:
    """Elements counted on the wire are the plan's; memory stays below the budget; losses keep their bits."""
    budgets = [0, CHUNK_BYTES, 2 * CHUNK_BYTES]
    for results in ranks.run(_kept, PP * DP, schedule, budgets):
        for budget, (losses, gathered, planned, memory, peak) in zip(budgets, results, strict=True):
            assert losses == results[0][0]
            assert gathered == planned
            assert memory <= peak <= budget
        nothing, some, everything = (gathered for _, gathered, *_ in results)
        # One layer per chunk: gathered forward and backward for each micro-batch, or once.
        assert nothing == 2 * 2 * MICRO_BATCHES * ELEMENTS
        assert everything == 2 * ELEMENTS
        assert everything < some < nothing


def _ahead(rank: int, world_size: int, schedule: str, budget: int) -> list[list[bool]]:
    """Per step: whether parameters were there or on their way when the actions that need them began."""
    keys = {**NO_CHOICE, "stage3_prefetch_bucket_size": 2 * ELEMENTS}
    made = toy.engine(_case(schedule, keys), zero=ZeroConfig(keep_gathered_bytes=budget))
    found = []
    for step in range(6):
        watch = Watch(made)
        with watch():
            if step == 3:
                made.eval_batch(toy.batches(step, 2 * MICRO_BATCHES), num_micro_batches=2 * MICRO_BATCHES)
                watch.ready.clear()
            made.train_batch(toy.batches(step, MICRO_BATCHES, DP, made.groups.dp_rank))
        found.append(watch.ready)
    return found


@pytest.mark.parametrize(("schedule", "budget"), often([("zbv", CHUNK_BYTES), ("interleaved", 0)], 2))
def test_parameters_are_under_way_before_their_action(schedule: str, budget: int) -> None:
    """From the second step of a schedule on, and from the second one after an evaluation."""
    for steps in ranks.run(_ahead, PP * DP, schedule, budget):
        for step, ready in enumerate(steps):
            assert len(ready) == 2 * 2 * MICRO_BATCHES
            if step in (0, 3):  # recorded
                assert not all(ready[1:])
            else:
                assert all(ready[1:])


def _reused(rank: int, world_size: int) -> list[tuple[int, toy.Losses]]:
    """Elements gathered in the last step, and losses, as DeepSpeed's own settings allow."""
    found = []
    for distance, layers in ((0, "tied"), (ELEMENTS + 1, "tied"), (10**9, "tied")):
        keys = {**NO_CHOICE, "stage3_max_reuse_distance": distance}
        made = toy.engine(_case("interleaved", keys, layers))
        losses = toy.train(_case("interleaved", keys, layers), made)
        watch = Watch(made)
        with watch():
            made.train_batch(toy.batches(9, MICRO_BATCHES, DP, made.groups.dp_rank))
        found.append((watch.gathered, losses))
    return found


def test_deepspeeds_reuse_distance_works_over_the_whole_step() -> None:
    """Farther means fewer gathers, down to one per parameter."""
    for results in ranks.run(_reused, PP * DP):
        (none, losses), (near, same), (far, again) = results
        assert losses == same == again
        assert far < near < none


def _backward_peak(rank: int, world_size: int) -> int:
    """Most layers gathered at once when a backward begins its next one, three micro-batches under way."""
    made = toy.engine(Case(zero=3, micro_batches=3, zero_keys=NO_CHOICE, module={"schedule": "gpipe"}))
    offload = made.deepspeed_engine.optimizer.parameter_offload
    gather, there = offload.pre_sub_module_backward_function, []

    def look(module: Any) -> None:
        gather(module)
        weights = [p for name, p in made.module.named_parameters() if name.endswith("weight")]
        there.append(sum(p.ds_status.name == "AVAILABLE" for p in weights))

    offload.pre_sub_module_backward_function = look
    for step in range(3):
        made.train_batch(toy.batches(step, 3, DP, made.groups.dp_rank))
    return max(there)


def test_every_backward_lets_go_of_a_layer_before_the_next() -> None:
    """Also of the second and third micro-batch under way."""
    assert ranks.run(_backward_peak, DP) == [1] * DP


def _on_nvme(rank: int, world_size: int) -> str:
    from types import SimpleNamespace

    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    from dsx.engine.zero.stage3 import StepGathers

    optimizer = SimpleNamespace(parameter_offload=SimpleNamespace(offload_device=OffloadDeviceEnum.nvme))
    with pytest.raises(ConfigError) as caught:
        StepGathers(optimizer, {}, None, 5, varies=False)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_budget_with_parameters_on_nvme_is_refused() -> None:
    assert "dsx.zero.keep_gathered_bytes = 5" in _on_nvme(0, 1)
