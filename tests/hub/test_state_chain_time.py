"""How long ranks that hand states on take, by clocks that messages carry and no load of a machine reaches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
from dsx.hub.state_passing import pass_states
from dsx.nn import collectives
from dsx.nn.context import ContextParallel

TOKENS, WIDTH, BLOCKS = 32, 4, 3
PASSES = 3  # a backward takes as long as two forwards


class Clock:
    """Seconds of a rank; what waits for a message goes on when its sender has sent it."""

    def __init__(self) -> None:
        self.now, self._sent = 0.0, list[Tensor]()
        self._send, self._receive = collectives.send, collectives.receive

    def send(self, x: Tensor, *to: Any) -> Any:
        self._sent.append(torch.tensor(self.now, dtype=torch.float64))
        works = self._send(self._sent[-1], *to), self._send(x, *to)
        return SimpleNamespace(wait=lambda: [work.wait() for work in works])

    def receive(self, room: Tensor, *source: Any) -> Any:
        then = torch.zeros((), dtype=torch.float64)
        works = self._receive(then, *source), self._receive(room, *source)

        def wait() -> None:
            for work in works:
                work.wait()
            self.now = max(self.now, float(then))

        return SimpleNamespace(wait=wait)


class Takes(torch.autograd.Function):
    """Identity that takes some seconds, and twice as many in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        clock.now += seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.now += 2 * ctx.seconds
        return dx.clone(), None, None


class Mixer(nn.Module):
    """A linear, then a recurrence, each with its seconds for a whole row."""

    def __init__(self, clock: Clock, before: float, state: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.clock, self.before, self.state = clock, before, state

    def forward(self, hidden_states: Tensor, cache_params: Any) -> Tensor:
        share = hidden_states.shape[1] / TOKENS
        x = Takes.apply(self.linear(hidden_states), self.clock, share * self.before)
        left = cache_params.get_recurrent_state(0)
        x = cache_params.update_conv_state(x.transpose(1, 2), 0, conv_kernel_size=2).transpose(1, 2)
        x = Takes.apply(x[:, -hidden_states.shape[1] :], self.clock, share * self.state)
        state = x.sum(1) if left is None else x.sum(1) + left
        return x + cache_params.update_recurrent_state(state, 0)[:, None]


def seconds(rank: int, world_size: int, before: float, state: float, micro_batches: int) -> float:
    """Of micro-batches whose forwards come first, as on a stage that runs ahead."""
    clock = Clock()
    collectives.send, collectives.receive = clock.send, clock.receive
    blocks = [nn.ModuleDict({"mixer": Mixer(clock, before, state)}) for _ in range(BLOCKS)]
    for block in blocks:
        pass_states(block, ["mixer"], ContextParallel(world_size, rank))

    def forward() -> Tensor:
        x = torch.zeros(1, TOKENS // world_size, WIDTH)
        for block in blocks:
            x = block["mixer"](x, cache_params=None)
        return x.sum()

    forward().backward()  # shapes of states are known from here on
    clock.now = 0.0
    for y in [forward() for _ in range(micro_batches)]:
        y.backward()
    return clock.now


@pytest.mark.parametrize("context", [2, 4])
def test_recurrences_take_as_long_as_on_one_rank_whatever_micro_batches_there_are(context: int) -> None:
    before, state, micro_batches = 3.0, 5.0, 4
    took = max(ranks.run(seconds, context, before, state, micro_batches))
    block = state + before / (2 * context)  # of linears the first chunk's alone is waited for
    assert took == pytest.approx(PASSES * BLOCKS * micro_batches * block)
