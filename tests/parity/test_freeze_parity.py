"""Frozen parameters: losses of torch's own optimizer over the others, in every kind of layout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case

STEPS = 20

LOW = (r"embed_tokens", r"layers\.[01]\.", r"layers\.2\.mlp\.down_proj")
"""What comes first, and a matrix above trained ones."""
HIGH = (r"lm_head", r"model\.norm", r"layers\.[23]\.")
"""What comes last: gradients pass through it."""
TABLE = ("embed_tokens",)
"""Of a family that has it twice."""
ALL_BUT_TWO = (r"^(?!.*layers\.3\.(self_attn\.o_proj|input_layernorm))",)
"""Two small parameters train, of one pipeline rank."""

CASES = [
    Case(freeze=LOW, tp=2),
    Case(freeze=LOW, pp=2, chunks=2, zero=1),
    Case(freeze=LOW, dp=2, zero=3),
    Case(freeze=LOW, tp=2, pp=2, zero=2),
    Case(freeze=LOW, pp=2, schedule="zb_h1", zero=1),
    Case(freeze=LOW, pp=2, schedule="zb_h1", zero=3),
    Case(freeze=HIGH, pp=2, dp=2, zero=0),
    Case(freeze=HIGH, tp=2, pp=2, chunks=2, schedule="interleaved_zb", zero=2),
    Case(freeze=HIGH, pp=2, zero=2, recompute="full"),
    Case(freeze=ALL_BUT_TWO, pp=2, dp=2, zero=2),
    Case(freeze=ALL_BUT_TWO, pp=2, dp=2, zero=3, accumulation=2),
    Case(freeze=ALL_BUT_TWO, tp=2, pp=2, zero=1, recompute="selective", sequence_parallel=False),
    Case(freeze=("q_proj", *LOW), tp=2, pp=2, zero=3, implementation="transformers", recompute="full"),
    Case(freeze=HIGH, pp=2, chunks=2, zero=1, implementation="transformers", schedule="zbv"),
    Case(family="qwen2", freeze=TABLE, pp=2, zero=2),
    Case(family="qwen2", freeze=TABLE, tp=2, pp=2, chunks=2, zero=3),
]


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a run."""

    pp_rank: int
    losses: list[float]
    norms: list[float]
    backwards: int
    sent: dict[str, int]
    states: int
    trained: int
    gradients: list[str]
    last: dict[str, torch.Tensor]


def _train(rank: int, world_size: int, case: Case, folder: Path) -> Seen:
    from torch.autograd import backward

    from dsx.engine.p2p import Outbox

    engine, resolved = dsx_run.build(case, folder)
    sent = {"F": 0, "B": 0}
    backwards = 0
    send, plain = Outbox.send, torch.autograd.backward

    def counted_send(self: Any, tensors: Any, kind: str, *more: Any) -> None:
        sent[kind] += len(tensors)
        send(self, tensors, kind, *more)

    def counted_backward(tensors: Any, *more: Any, **keys: Any) -> None:
        nonlocal backwards
        roots = tensors if isinstance(tensors, tuple) else (tensors,)
        backwards += any(root.grad_fn.name() != "CloneBackward0" for root in roots)
        backward(tensors, *more, **keys)

    Outbox.send, torch.autograd.backward = counted_send, counted_backward  # type: ignore[method-assign]
    try:
        losses, norms = dsx_run.losses_and_norms(engine, case, range(STEPS))
    finally:
        Outbox.send, torch.autograd.backward = send, plain  # type: ignore[method-assign]
    chunks = engine.pipeline.chunks
    states = sum(
        value.numel()
        for state in engine.basic_optimizer.state.values()
        for name, value in state.items()
        if name == "exp_avg"
    )
    size = lambda p: getattr(p, "ds_numel", p.numel())  # noqa: E731
    return Seen(
        pp_rank=engine.groups.pp_rank,
        losses=losses,
        norms=norms,
        backwards=backwards,
        sent=sent,
        states=states,
        trained=sum(size(p) for p in chunks.parameters() if p.requires_grad),
        gradients=[n for n, p in chunks.named_parameters() if p.grad is not None and not p.requires_grad],
        last=dsx_run.gather(engine, resolved, rank),
    )


@cache
def reference(family: str, rows: int, freeze: tuple[str, ...]) -> oracle.Run:
    return oracle.train(family, rows=rows, steps=STEPS, freeze=freeze)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {f: oracle.save_model(f, tmp_path_factory.mktemp(f)) for f in ("llama", "qwen2")}


@pytest.mark.parametrize("case", often(CASES, 13), ids=str)
def test_what_is_frozen_stays_and_the_rest_trains_as_in_torch(case: Case, folders: dict[str, Path]) -> None:
    seen = ranks.run(_train, case.world_size, case, folders[case.family])
    expected = reference(case.family, case.rows, case.freeze)
    assert seen[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert seen[0].norms == pytest.approx(expected.norms, rel=1e-5)
    start = oracle.hf_model(case.family).state_dict()
    for name, tensor in seen[0].last.items():
        frozen = any(re.search(pattern, name) for pattern in case.freeze)
        assert torch.equal(tensor, start[name]) == frozen, name
    for rank in seen:
        assert rank.gradients == []
        # What ZeRO pads is less than a number of the smallest partition for each rank and group.
        assert rank.states * (case.dp if case.zero else 1) <= rank.trained + 64


def test_nothing_goes_back_below_the_lowest_trained_layer(folders: dict[str, Path]) -> None:
    """Two of four stages train nothing: no backward runs there, and no gradient is sent to them."""
    case = Case(freeze=LOW[:2], pp=2, chunks=2, zero=2, accumulation=4, partition=[2, 1, 2, 2])
    first, second = ranks.run(_train, 2, case, folders["llama"])
    assert second.losses == pytest.approx(reference("llama", case.rows, case.freeze).losses, rel=1e-5)
    # Virtual stages 0 (embedding, block 0) and 1 (block 1) are frozen, 2 and 3 train.
    times = STEPS * case.accumulation
    assert (first.backwards, second.backwards) == (times, times)
    assert first.sent == {"F": 2 * times, "B": 0}
    assert second.sent == {"F": times, "B": times}
