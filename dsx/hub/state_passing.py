"""States of recurrent mixers handed from rank to rank where a context axis cuts the sequence.

A recurrence (the delta rule, a state space) and a convolution need no more of the tokens before their own
than a state and an edge. transformers' mixers ask a cache for both when they generate, and leave theirs there
(``cache_utils.LinearAttentionLayer``). Here they are given an object with that protocol, which receives what
the stretch of the row before left, and sends on what this one leaves: state passing, as of Mamba-2
(arXiv:2405.21060, section 8.2) and LASP (arXiv:2404.02882, section 3). Every rank then computes its own
tokens alone. Backward goes the other way, with the gradients of the states.

Ranks have two chunks of a row each (:mod:`dsx.nn.context`). So the chain goes 0, 1, ..., cp - 1, whose two
chunks are neighbours and are computed in one, and back to 0: 2 cp - 1 places. At every place the linears and
the convolution's edge wait for nobody. What waits is what comes after the state in the mixer's own code.

Shapes: B micro-batch, s tokens of a place, C channels of a convolution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from dsx.nn import collectives
from dsx.nn.context import ContextParallel
from dsx.nn.documents import hidden_of
from dsx.nn.parallel import uncompiled

_CACHE = ("cache_params", "past_key_values")
"""What mixers call the cache that they take."""

_FEW = 2
"""Tokens that show which states a mixer leaves."""

Form: TypeAlias = "tuple[tuple[int, ...], torch.dtype]"
What: TypeAlias = Literal["edge", "state"]


def pass_states(root: nn.Module, paths: Iterable[str], cp: ContextParallel) -> None:
    """Have the mixers at ``paths`` below ``root`` compute this rank's tokens and hand their states on.

    ZeRO-3 gathers all parameters of one before it runs, and reduces its gradients together once that of its
    hidden states is there: a rank that waits for a state could take part in no collective inside. Hidden
    states go in by position, since DeepSpeed sees the end of a backward by nothing else.

    Args:
        root: A block, whose tensor-parallel parts are in place: their ends are outside of these.
        paths: As :func:`dsx.hub.context_probe.mixers` finds them.
        cp: The ranks that share a sequence.
    """
    for path in paths:
        module: Any = root.get_submodule(path)
        module.forward = StateRelay(module, Neighbours(cp))
        module._z3_leaf = True  # noqa: SLF001 (deepspeed/utils/z3_leaf_module.py)
        module.register_forward_pre_hook(_by_position, with_kwargs=True)


def _by_position(_module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
    """Arguments of which the first one, hidden states, has no name."""
    if given:
        return given, named
    first, *others = named
    return (named[first],), {name: named[name] for name in others}


def parts_of(arguments: Any, shares: Sequence[int]) -> list[Any]:
    """What a module is called with, hidden states [B, s, ...] first, cut along the sequence."""
    length = next(each for each in tree_leaves(arguments) if isinstance(each, Tensor)).shape[1]
    sizes = [share * length // sum(shares) for share in shares]

    def cut(each: Any) -> Any:
        along = isinstance(each, Tensor) and each.dim() in (2, 3) and each.shape[1] == length
        return _Parts(each.split(sizes, 1)) if along else _Parts([each] * len(sizes))

    found = tree_map(cut, arguments)
    return [
        tree_map(lambda each, at=at: each.of[at], found, is_leaf=lambda each: isinstance(each, _Parts))
        for at in range(len(sizes))
    ]


class _Parts:
    """One value for each place."""

    def __init__(self, of: Any) -> None:
        self.of = of


class Neighbours:
    """Sends to the ranks before and after this one on the chain, and receives from them.

    Messages between two ranks come in the order in which they were sent. No send waits for its receive. It is
    waited for before the next one of the same mixer, when it has long been received, since a receiver waits
    for nothing that its sender does between the two.

    Args:
        cp: The ranks that share a sequence.
    """

    def __init__(self, cp: ContextParallel) -> None:
        self.cp, self._under_way = cp, list[tuple[Any, Tensor]]()

    def __deepcopy__(self, memo: dict[int, Any]) -> Neighbours:
        """Another one: sends under way are those of the original."""
        return Neighbours(self.cp)

    @property
    def last(self) -> int:
        """The last place of the chain."""
        return 2 * self.cp.size - 2

    def send(self, x: Tensor, to: int, what: What) -> None:
        """Begin to send ``x`` to a place."""
        while self._under_way:
            self._under_way.pop()[0].wait()
        x = x.detach().contiguous()
        self._under_way.append((collectives.send(x, self.cp, min(to, self.last - to), what), x))

    def receive(self, room: Tensor, source: int, what: What) -> Any:
        """Begin to receive from a place into ``room``; what to wait for."""
        return collectives.receive(room, self.cp, min(source, self.last - source), what)


class StateRelay:
    """The forward of a mixer that takes its states from the place before and leaves its own to the next one.

    Args:
        module: The mixer.
        neighbours: Of this rank.

    Raises:
        TypeError: It takes no cache.
    """

    def __init__(self, module: nn.Module, neighbours: Neighbours) -> None:
        self.neighbours, self._module = neighbours, module
        self._forward: Callable[..., Any] = module.forward
        self._signature = inspect.signature(self._forward)
        takes = [name for name in _CACHE if name in self._signature.parameters]
        if len(takes) != 1:
            raise TypeError(f"{type(module).__name__} takes no cache of states")
        (self._takes,) = takes
        self._forms: dict[tuple[int, torch.dtype], dict[int, Form]] = {}

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The outputs for this rank's tokens, as the mixer gives them."""
        return uncompiled(self._both, given, named)

    def _both(self, given: Any, named: Any) -> Any:
        cp, found = self.neighbours.cp, list[Any]()
        places = sorted({cp.rank, self.neighbours.last - cp.rank})
        for place, part in zip(places, parts_of((given, named), [1] * len(places)), strict=True):
            given, named = part
            found.append(self.run(place, given, named, hidden_of(found[-1]) if found else None))
        length = hidden_of(found[0]).shape[1]

        def joined(*each: Any) -> Any:
            along = isinstance(each[0], Tensor) and each[0].dim() > 1 and each[0].shape[1] == length
            return torch.cat(each, 1) if along else each[-1]

        return tree_map(joined, *found) if len(found) > 1 else found[0]

    def run(self, place: int, given: Any, named: Any, after: Tensor | None = None) -> Any:
        """The mixer's outputs at one place of the chain.

        Args:
            place: Which.
            given: Arguments for its tokens, hidden states first.
            named: The same by name.
            after: What it gave at the place that this rank had before. Its backward begins when that of this
                place has ended.
        """
        x = next(each for each in tree_leaves((given, named)) if isinstance(each, Tensor))
        forms = self._forms_of(x, given, named)
        trained = [each for each in self._module.parameters() if each.requires_grad]
        if not ((x.requires_grad or trained) and torch.is_grad_enabled()):
            return self._called(_States(self.neighbours, place, forms, x, trains=False), given, named)
        # All that is received hangs on these tokens, whether they are trained or not. So a backward that goes
        # on to this rank's place before, where it waits for another rank, has sent what that one waits for.
        # And so has one whose parameters get their gradients, which ranks then reduce together.
        tokens = _After.apply(x, x.new_empty(0).requires_grad_() if after is None else after, *trained)
        given, named = tree_map(lambda each: tokens if each is x else each, (given, named))
        states = _States(self.neighbours, place, forms, tokens, trains=True)
        gave = self._called(states, given, named)
        hidden = hidden_of(gave)
        sent = _Sent.apply(hidden, states.outgoing, *states.left)
        return tree_map(lambda each: sent if each is hidden else each, gave)

    def _called(self, states: _Noted, given: Any, named: Any) -> Any:
        bound = self._signature.bind(*given, **named)
        bound.arguments[self._takes] = states
        return self._forward(*bound.args, **bound.kwargs)

    def _forms_of(self, x: Tensor, given: Any, named: Any) -> dict[int, Form]:
        """Of the states, for which the mixer runs once for a few tokens, on all ranks alike."""
        key = x.shape[0], x.dtype
        if key not in self._forms:
            noted, few = _Noted(), parts_of((given, named), [1, max(0, x.shape[1] // _FEW - 1)])[0]
            with torch.no_grad(), torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
                self._called(noted, *few)
            self._forms[key] = noted.forms
        return self._forms[key]


class _Noted:
    """A cache with nothing in it, which notes the states that a mixer leaves."""

    def __init__(self) -> None:
        self.forms: dict[int, Form] = {}

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """None, so that what a mixer does for a single token it does here as for several."""

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor | None:
        return None

    def update_conv_state(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x

    def update_recurrent_state(self, state: Tensor, *_: Any, state_idx: int = 0, **__: Any) -> Tensor:
        self.forms[state_idx] = tuple(state.shape), state.dtype
        return state


class _States(_Noted):
    """What a mixer takes for its cache at one place of the chain.

    Args:
        neighbours: Where states come from and go to.
        place: On the chain.
        forms: Of the states.
        tokens: The hidden states.
        trains: Whether gradients go back.
    """

    def __init__(
        self, neighbours: Neighbours, place: int, forms: dict[int, Form], tokens: Tensor, *, trains: bool
    ) -> None:
        super().__init__()
        self.neighbours, self._place, self._tokens, self._trains = neighbours, place, tokens, trains
        self._known, self._due = forms, dict[int, Tensor]()
        self.outgoing, self.left = list[_Outgoing](), list[Tensor]()

    def get_recurrent_state(self, *_: Any, state_idx: int = 0, **__: Any) -> Tensor | None:
        """Room for a state, which is there when the mixer has the edge of its convolution."""
        if self._place and state_idx in self._known:
            shape, dtype = self._known[state_idx]
            self._due[state_idx] = torch.empty(shape, dtype=dtype, device=self._tokens.device)
        return self._due.get(state_idx)

    def update_conv_state(self, x: Tensor, *_: Any, conv_kernel_size: int = 0, **__: Any) -> Tensor:
        """[B, C, s] with the ``conv_kernel_size - 1`` tokens before it, if there are any, in front."""
        reach = conv_kernel_size - 1
        if x.shape[-1] >= reach:
            x = self._edge_sent(x, reach)
            return self._all_received(x, reach)
        x = self._all_received(x, reach)  # whose edge begins before this place
        return self._edge_sent(nn.functional.pad(x, (max(0, reach - x.shape[-1]), 0)), reach)

    def update_recurrent_state(self, state: Tensor, *_: Any, **__: Any) -> Tensor:
        """Send a state on."""
        if self._place < self.neighbours.last:
            self.neighbours.send(state, self._place + 1, "state")
            if self._trains:
                self.outgoing.append(_Outgoing(self.neighbours, self._place + 1, state))
                self.left.append(_Left.apply(state, self.outgoing[-1]))
        return state

    def _edge_sent(self, x: Tensor, reach: int) -> Tensor:
        if self._place == self.neighbours.last:
            return x
        self.neighbours.send(x[..., -reach:], self._place + 1, "edge")
        return _EdgeSent.apply(x, self.neighbours, self._place + 1, reach) if self._trains else x

    def _all_received(self, x: Tensor, reach: int) -> Tensor:
        if not self._place:
            return x
        edge = self._received(x.new_empty(*x.shape[:-1], reach), "edge")
        while self._due:
            self._received(self._due.pop(min(self._due)), "state")
        return torch.cat((edge, x), dim=-1)

    def _received(self, room: Tensor, what: What) -> Tensor:
        self.neighbours.receive(room, self._place - 1, what).wait()
        if self._trains:
            _Received.apply(room, self._tokens, self.neighbours, self._place - 1, what)
        return room


class _Outgoing:
    """A state that was sent to place ``to``, and its gradient, which comes back from there."""

    def __init__(self, neighbours: Neighbours, to: int, state: Tensor) -> None:
        self.neighbours, self._to = neighbours, to
        self._room = partial(torch.empty, state.shape, dtype=state.dtype, device=state.device)
        self._coming: tuple[Any, Tensor] | None = None

    def expect(self) -> None:
        """Begin to receive the gradient."""
        room = self._room()
        self._coming = self.neighbours.receive(room, self._to, "state"), room

    def gradient(self) -> Tensor:
        """Wait for the gradient, which has been expected."""
        assert self._coming is not None
        (work, room), self._coming = self._coming, None
        work.wait()
        return room


class _After(torch.autograd.Function):
    """``x``, whose backward ends before those of ``before`` begin."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *before: Tensor) -> Tensor:
        ctx.count = len(before)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        return dx, *[None] * ctx.count


class _Sent(torch.autograd.Function):
    """A mixer's outputs, in whose backward the gradients of the states that it left are expected."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, outgoing: list[_Outgoing], *left: Tensor) -> Tensor:
        del left
        ctx.outgoing = outgoing
        ctx.save_for_backward(y.new_empty(0))
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # a forward that is done again has its messages before those of backward
        for each in ctx.outgoing:
            each.expect()
        return dy, None, *(dy.new_zeros(()) for _ in ctx.outgoing)


class _Left(torch.autograd.Function):
    """Where a state that was sent gets its gradient; gives a number that stands for it."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, outgoing: _Outgoing) -> Tensor:
        ctx.outgoing = outgoing
        return state.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.outgoing.gradient(), None


class _EdgeSent(torch.autograd.Function):
    """``x``, whose last ``reach`` tokens were sent to place ``to``, and get their gradient from there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, neighbours: Neighbours, to: int, reach: int) -> Tensor:
        ctx.sent = neighbours, to, reach
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        neighbours, to, reach = ctx.sent
        edge = dy.new_empty(*dy.shape[:-1], reach)
        neighbours.receive(edge, to, "edge").wait()
        dx = dy.clone()
        dx[..., -reach:] += edge
        return dx, None, None, None


class _Received(torch.autograd.Function):
    """What came from place ``source``, in place: backward sends its gradient there."""

    @staticmethod
    def forward(
        ctx: Any, room: Tensor, tokens: Tensor, neighbours: Neighbours, source: int, what: What
    ) -> Tensor:
        del tokens
        ctx.mark_dirty(room)
        ctx.source = neighbours, source, what
        return room

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        neighbours, source, what = ctx.source
        neighbours.send(gradient, source, what)
        return None, None, None, None, None
