"""Weight gradients behind exchanges of experts: what real ranks do between a start and its wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ranks
from engine.test_expert_load import FAMILIES
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case

for layers in (4, 8):
    oracle.CONFIGS[f"qwen2_moe-{layers}"] = oracle.CONFIGS["qwen2_moe"] | {"num_hidden_layers": layers}
OVER: dict[str, Any] = {"family": "qwen2_moe-4", "dp": 2, "ep": 2, "pp": 2}
CASES = {
    "zb_h1, ZeRO-1": Case(**OVER, zero=1, schedule="zb_h1"),
    "zb_h1, ZeRO-3": Case(**OVER, zero=3, schedule="zb_h1"),
    "zb_h1, recomputed": Case(**OVER, zero=2, schedule="zb_h1", recompute="full"),
    "DualPipeV": Case(
        **OVER | {"family": "qwen2_moe-8"}, zero=2, schedule="dualpipev", chunks=2, accumulation=5
    ),
    "1F1B": Case(**OVER, zero=1, schedule="1f1b"),
}


class _Travelling:
    """An exchange under way."""

    def __init__(self, work: Any, noted: Callable[[], None]) -> None:
        self._work, self._noted = work, noted

    def wait(self) -> None:
        self._work.wait()
        self._noted()


def noted(rank: int, world_size: int, case: Case, folder: Path) -> list[str]:
    """Everything of one step in the order in which it happened: actions, exchanges, and weight gradients."""
    from dsx.engine.executor import StepRun
    from dsx.nn.split import WeightUse

    found: list[str] = []
    send, finish = dist.all_to_all_single, WeightUse.finish

    def sent(out: Any, x: Any, received: Any, *how: Any, **named: Any) -> Any:
        work = send(out, x, received, *how, **named)
        if received is None:  # counts, which are waited for at once
            return work
        found.append("start")
        return _Travelling(work, lambda: found.append("wait"))

    def finished(use: Any, *total: Any) -> Any:
        found.append("weights")
        return finish(use, *total)

    def around(name: str) -> Any:
        run = getattr(StepRun, name)

        def told(self: Any, action: Any) -> None:
            found.append(str(action))
            run(self, action)

        return told

    engine, _ = dsx_run.build(case, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", sent)
        patch.setattr(WeightUse, "finish", finished)
        for name in ("_forward", "_whole_backward", "_backward_input", "_backward_weight"):
            patch.setattr(StepRun, name, around(name))
        dsx_run.losses_of(engine, case, [0])
    return found


def behind(events: list[str]) -> dict[str, list[int]]:
    """How many weight gradients ran behind each exchange of each action."""
    found: dict[str, list[int]] = {}
    action, travels = "", False
    for event in events:
        if event == "start":
            assert not travels
            found.setdefault(action, []).append(0)
        elif event == "weights":
            found.setdefault(action, [])
            if travels:
                found[action][-1] += 1
        if event in ("start", "wait"):
            travels = event == "start"
        elif event != "weights":
            action = event
    return found


@pytest.mark.parametrize("name", often(CASES, 5))
def test_what_runs_between_start_and_wait(name: str, tmp_path: Path) -> None:
    """A block's exchanges share evenly what the block above has left; the first has the head's or none."""
    case = CASES[name]
    folder = oracle.save_model(case.family, tmp_path / "model")
    each = ranks.run(noted, case.world_size, case, folder)
    blocks, size = 2, 4 if case.recompute == "full" else 2
    last_stage, last = case.pp * case.chunks - 1, case.accumulation - 1
    for first in range(0, case.world_size, case.dp):  # of a stage, whose collectives must not cross
        assert all(each[first] == each[first + more] for more in range(case.dp))
        counts = behind(each[first])
        for action, found in counts.items():
            stage, op, micro_batch = int(action[0]), action[1], int(action[2:])
            whole = op == "B" and (case.schedule == "1f1b" or micro_batch == last)
            if op == "F" or whole:
                assert not any(found), action
            elif op == "I":
                assert len(found) == blocks * size, action
                top, below = found[:size], found[size:]
                assert top == [int(stage == last_stage), *[0] * (size - 1)], action  # the head's
                share = -(-sum(below) // size)
                assert share > 1, action
                assert below == [min(share, sum(below) - at * share) for at in range(size)], action
        assert case.schedule == "1f1b" or any(map(any, counts.values()))


def beside(
    rank: int, world_size: int, case: Case, folder: Path, *, hidden: bool
) -> tuple[list[str], list[float]]:
    """Starts and waits of a first forward with calls of shared experts, and figures of two steps."""
    from dsx.hub import layers

    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if not hidden:
            patch.setattr(layers, "called_beside", lambda *_: {})
        engine, _ = dsx_run.build(case, folder)
        send = dist.all_to_all_single

        def sent(out: Any, x: Any, received: Any, *how: Any, **named: Any) -> Any:
            work = send(out, x, received, *how, **named)
            found.append("counts" if received is None else "start")
            return _Travelling(work, lambda: found.append("wait"))

        patch.setattr(dist, "all_to_all_single", sent)
        for name, module in engine.pipeline.chunks.named_modules():
            if name.endswith("shared_experts"):
                module.register_forward_pre_hook(lambda *_: found.append("shared"))
        figures = []
        for step in (0, 1):
            figures += [*dsx_run.losses_of(engine, case, [step]), float(engine.get_global_grad_norm())]
    return found[: found.index("start") + 6], figures


def test_shared_experts_run_while_rows_travel_and_nothing_else_changes(tmp_path: Path) -> None:
    oracle.CONFIGS["deepseek_v3-tiny"] = FAMILIES["deepseek_v3"]
    case = Case(
        family="deepseek_v3-tiny", dp=2, ep=2, zero=3, recompute="full", implementation="transformers"
    )
    folder = oracle.save_model(case.family, tmp_path / "model")
    (now, figures), *_ = ranks.run(partial(beside, hidden=True), 2, case, folder)
    (before, expected), *_ = ranks.run(partial(beside, hidden=False), 2, case, folder)
    assert now == ["counts", "wait", "start", "shared", "wait", "start", "wait", "counts"]
    assert before == ["counts", "wait", "start", "wait", "start", "wait", "shared", "counts"]
    assert figures == expected, "to the last bit"
