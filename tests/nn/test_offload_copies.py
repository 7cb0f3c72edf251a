"""Inputs of blocks that go to the host: what stays on the device, what comes back, and when."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.nn.offload import HostCopies, _Kept

BLOCKS = 4


def run(
    copies: HostCopies, x: Tensor, weights: list[Tensor], seen: list[Any]
) -> tuple[Tensor, Callable[[], None]]:
    """``BLOCKS`` blocks that compute again; ``seen`` gets a reference to each one's input."""

    def block(y: Tensor, weight: Tensor) -> Tensor:
        return y + torch.tanh(y * weight)

    y = x
    for weight in weights:
        seen.append(weakref.ref(y.untyped_storage()))
        y = copies.recomputed(block, y, weight, random=False)
    return y, lambda: y.sum().backward()


@pytest.mark.parametrize("leave", range(BLOCKS + 1))
def test_what_leaves_is_free_and_comes_back_block_by_block(
    leave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    before = _Kept.come
    monkeypatch.setattr(_Kept, "come", lambda kept: (log.append("come"), before(kept))[1])
    copies, seen = HostCopies(), list[Any]()
    leaf = torch.randn(2, 3, 4, requires_grad=True)
    weights = [torch.randn(4, requires_grad=True) for _ in range(BLOCKS)]
    with copies.forward((0, 0), leave):
        y, back = run(copies, leaf * 1.0, weights, seen)
    assert [ref() is None for ref in seen] == [number < leave for number in range(BLOCKS)]
    copies.fetch((0, 0))
    assert len(log) == (leave == BLOCKS), "the last one comes when its backward is near"
    back()
    found = [leaf.grad, *(weight.grad for weight in weights)]
    again = leaf.detach().requires_grad_()
    others = [weight.detach().requires_grad_() for weight in weights]
    z = again * 1.0
    for weight in others:
        z = z + torch.tanh(z * weight)
    z.sum().backward()
    assert torch.equal(y, z)
    for one, other in zip(found, [again.grad, *(weight.grad for weight in others)], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_without_a_stage_around_them_all_leave_and_come_when_they_are_asked_for() -> None:
    copies, seen = HostCopies(), list[Any]()
    leaf = torch.randn(2, 3, 4, requires_grad=True)
    weights = [torch.randn(4, requires_grad=True) for _ in range(BLOCKS)]
    for _ in range(2):
        _, back = run(copies, leaf * 1.0, weights, seen)
        back()
    assert leaf.grad is not None
    assert float(leaf.grad.abs().max()) > 0
    with torch.no_grad():
        assert copies.recomputed(lambda y: y, leaf, random=False) is leaf


def test_what_nothing_goes_backward_of_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(_Kept, "come", lambda kept: log.append("come"))
    copies = HostCopies()
    weights = [torch.randn(4) for _ in range(BLOCKS)]
    with copies.forward((0, 0), BLOCKS):
        y, _ = run(copies, torch.randn(2, 3, 4), weights, [])
    copies.fetch((0, 0))
    assert not y.requires_grad
    assert not log


def test_a_step_that_ends_early_leaves_nothing_to_the_next() -> None:
    copies = HostCopies()
    weights = [torch.randn(4, requires_grad=True) for _ in range(BLOCKS)]
    with copies.forward((0, 0), BLOCKS):
        made = run(copies, torch.randn(2, 3, 4), weights, [])
    assert len(copies._last) == 1
    del made
    assert not copies._last


def test_a_copy_that_an_error_left_under_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    stream = SimpleNamespace(wait_event=waits.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    copies = HostCopies()
    kept = _Kept(torch.randn(2, 3, 4), None, (None, None), copies._coming)
    kept._done = "the copy's end"
    copies._coming.add(kept)
    copies.begin()
    copies.begin()
    assert waits == ["the copy's end"]
