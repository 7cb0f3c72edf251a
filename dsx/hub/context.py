"""Attention of transformers' modules where a context axis cuts the sequence, with no code per family.

Families ask two registries of transformers for what depends on the whole sequence: one for masks, by a
predicate of (batch, head, query, key), and one for the function that attends. dsx registers one entry in
each. The mask's is asked for the whole sequence, and evaluates the family's own predicate for the queries
that this rank has. The other one gives the family's own function what it needs: all keys and values beside
the rank's queries (``all_gather``), or some heads of the whole sequence (``ulysses``). Or it attends itself
(``ring``), as far as what a family's function is given says how: scales, soft caps, sinks and masks.

A module that mixes tokens in another way (a convolution, the delta rule, a state space, attention past the
registries) is given the whole sequence, and of what it gives the rank takes its part (:func:`gather_around`).

Shapes: B micro-batch, h heads, g key/value heads, S the whole sequence, s this rank's part, D head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from dsx.errors import ModelError
from dsx.hub.late_mask import LateMask
from dsx.hub.tensor_plan import sequence_cut
from dsx.models.config_values import at
from dsx.nn import collectives
from dsx.nn.attention import check_dropout, check_heads, repeated, scaled_dot_product
from dsx.nn.context import ContextParallel, slices
from dsx.nn.parallel import uncompiled
from dsx.nn.ring import KernelCall, Ring, Sight, ring_attention, unseen

_NAME = "dsx_context"
"""Of both entries, and of the attribute of a config that says which part a rank has."""

_KERNELS = ("sdpa", "eager")
_PLAIN = frozenset(("position_bias", "softcap", "cache"))
"""What transformers' sdpa function may be given that is more than queries, keys and values."""

_NOT_IN_TURN = ("position_bias", "cache")
"""What attention functions may be given that a ring does not know."""

_LARGEST_GROUPED = 256
"""Head size up to which kernels share key/value heads (use_gqa_in_sdpa of transformers)."""


class ContextAttention:
    """What the two entries need to know.

    Args:
        cp: The ranks that share a sequence.
        kernel: Name of the family's own attention function.
    """

    def __init__(self, cp: ContextParallel, kernel: str) -> None:
        self.cp, self.kernel = cp, kernel

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextAttention:
        """Itself: a process group cannot be copied."""
        return self

    def mask(self, *, q_length: int, mask_function: Callable[..., Tensor], **asked: Any) -> Tensor | None:
        """The rows of a mask that this rank's attention wants; None if that is the plain causal one."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        make, whole = ALL_MASK_ATTENTION_FUNCTIONS[self.kernel], self.cp.method == "ulysses"
        reach, keys = asked.get("local_size"), asked["kv_length"]
        everything = asked.get("attention_mask") is None and (reach is None or keys < reach)
        skips = asked.get("allow_is_causal_skip", True) and (
            self.kernel == "sdpa" or self.cp.method == "ring"
        )
        both_ways = asked.pop("allow_is_bidirectional_skip", None)
        if everything and (skips if both_ways is None else both_ways):
            return None
        stretches = (range(q_length),) if whole else self.cp.chunks(q_length)
        dtype = torch.bool if self.kernel == "sdpa" else asked["dtype"]
        return LateMask(make, mask_function, stretches, asked, dtype, both_ways=both_ways is not None)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, named: Any
    ) -> tuple[Tensor, None]:
        """The family's own attention of this rank's queries [B, h, s, D] to all keys: [B, s, h, D]."""
        if isinstance(mask, LateMask) and any(getattr(each, "ndim", 0) > 2 for each in named.values()):
            mask = mask.whole()  # what else has a part for each query is not cut into blocks of them
        if self.cp.method == "ulysses":
            return self._by_heads(module, query, key, value, mask, named), None
        causal = named.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if self.cp.method == "ring":
            return self._in_turn(query, key, value, mask, named, causal=causal), None
        starts = range(0, query.shape[2] * self.cp.size, query.shape[2] // 2)
        firsts = [mask.first(at) for at in starts] if isinstance(mask, LateMask) else [0] * len(starts)
        (key, held), (value, _) = (self.reached(each, firsts) for each in (key, value))
        if mask is not None or not causal or self.kernel == "eager":
            kernel = partial(kernel_of(module, self.kernel), module)
            return self._by_blocks(kernel, (query, key, value), mask, held, named), None
        return self._causal(module, query, key, value, named), None

    def _causal(self, module: Any, query: Tensor, key: Tensor, value: Tensor, named: Any) -> Tensor:
        """Each of the two chunks of queries by itself to the keys before its end, without a stored mask."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        kernel, parts = kernel_of(module, self.kernel), list[Tensor]()
        plain = kernel is sdpa_attention_forward and _PLAIN.isdisjoint(
            k for k, v in named.items() if v is not None
        )
        if not key.shape[-1] == value.shape[-1] <= _LARGEST_GROUPED:
            times = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(times, 1) if plain else each for each in (key, value))
        for queries, stands in zip(query.chunk(2, 2), self.cp.chunks(key.shape[2]), strict=True):
            own = queries, key[:, :, : stands.stop], value[:, :, : stands.stop]
            if plain:
                drop, scale = named.get("dropout", 0.0), named.get("scaling")
                parts.append(scaled_dot_product(*own, drop, None, scale).transpose(1, 2))
            else:
                size = len(stands), stands.stop
                before = torch.ones(size, dtype=torch.bool, device=query.device).tril(stands.start)
                parts.append(kernel(module, *own, before[None, None], **named)[0])
        return torch.cat(parts, dim=1)

    def _by_blocks(
        self, kernel: Any, heads: Any, mask: Tensor | None, held: Any, named: Any, own: Any = lambda x: x
    ) -> Tensor:
        """Attention of queries, ``held`` keys, values and a mask, by one block of queries after the other.

        Each block's mask is made as it attends, for the keys that it reaches, and once more in backward.
        """

        def attended(made: Any, *heads: Tensor) -> Tensor:
            y: Tensor = kernel(*heads, own(made()), **named)[0]
            return y

        if not isinstance(mask, LateMask):
            return attended(lambda: mask, *heads)
        (query, key, value), draws = heads, (named.get("dropout") or 0.0) > 0.0
        again = partial(checkpoint, attended, use_reentrant=False, preserve_rng_state=draws)
        run, parts = again if torch.is_grad_enabled() else attended, list[Tensor]()
        for part, queries in zip(query.split([*map(len, mask.blocks)], 2), mask.blocks, strict=True):
            (at,) = slices(held, (keys := mask.keys(queries),))
            made = partial(self.rows, mask, queries, keys)
            parts.append(run(made, part, key[:, :, at], value[:, :, at]))
        return torch.cat(parts, dim=1)

    def _by_heads(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, named: Any
    ) -> Tensor:
        size, count = self.cp.size, query.shape[1]
        check_heads(count, self.cp)
        key, value = (repeated(each, self.cp, dim=1) for each in (key, value))
        query, key, value = (self.to_heads(each) for each in (query, key, value))

        def own(each: Any) -> Any:
            """This rank's heads of what has a part for each: sinks [h], biases of scores [B, h, ...]."""
            dim = 0 if isinstance(each, Tensor) and each.dim() == 1 else 1
            if isinstance(each, Tensor) and each.dim() > dim and count > 1 and each.shape[dim] == count:
                return each.chunk(size, dim)[self.cp.rank]
            return each

        held = {name: own(each) for name, each in module.named_parameters(recurse=False) if each.dim() == 1}
        if hasattr(module, "num_key_value_groups"):
            held["num_key_value_groups"] = query.shape[1] // key.shape[1]
        named = {name: own(each) for name, each in named.items()}
        kernel, heads = partial(kernel_of(module, self.kernel), _Part(module, held)), (query, key, value)
        return self.to_sequence(self._by_blocks(kernel, heads, mask, (range(key.shape[2]),), named, own))

    def _in_turn(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, named: Any, *, causal: bool
    ) -> Tensor:
        check_dropout(named.get("dropout") or 0.0, self.cp)
        biased = [name for name in _NOT_IN_TURN if named.get(name) is not None]
        biased += ["attention_mask"] if mask is not None and mask.requires_grad else []
        if biased or not (causal or mask is not None):
            raise ModelError(
                'dsx.parallel.context_method = "ring"',
                f"{biased[0]} of attention is not known to it" if biased else "its attention is not causal",
                'use "all_gather"',
            )
        length, dtype = query.shape[2] * self.cp.size, query.dtype
        late = mask if isinstance(mask, LateMask) else None
        starts, common = range(0, length, query.shape[2] // 2), 0 if mask is None else length

        def seen(call: KernelCall, keys: range) -> Tensor:
            assert mask is not None
            if late is not None:
                return self.rows(late, call.queries, keys)
            return mask[:, :, call.rows, keys.start : keys.stop]

        def part(call: KernelCall) -> Tensor:
            own = torch.cat([seen(call, keys) for keys in call.stretches], -1)
            if own.dtype == torch.bool:
                own = torch.zeros_like(own, dtype=dtype).masked_fill_(own.logical_not(), unseen(dtype))
            return own.to(dtype).clamp(min=unseen(dtype))

        eager = self.kernel == "eager"  # the other function knows neither
        cap, sinks = (named.get(each) if eager else None for each in ("softcap", "s_aux"))
        sights = tuple(Sight(0 if late is None else late.first(at), common) for at in starts)
        how = Ring(self.cp, length, sights, part, named.get("scaling"), cap)
        return self.in_turn(query, key, value, how, sinks).transpose(1, 2)

    def in_turn(self, q: Tensor, k: Tensor, v: Tensor, how: Ring, sinks: Tensor | None) -> Tensor:
        """As :func:`dsx.nn.ring.ring_attention`."""
        return ring_attention(q, k, v, how, sinks)

    def reached(self, x: Tensor, firsts: Sequence[int]) -> tuple[Tensor, Sequence[range]]:
        """Of keys or values [B, g, s, D] of all ranks those that this one's queries reach, in order."""
        return collectives.gather_reached(x, self.cp, firsts, 2)

    def rows(self, mask: LateMask, queries: range, keys: range) -> Tensor:
        """As :meth:`LateMask.rows`."""
        return mask.rows(queries, keys)

    def to_heads(self, x: Tensor) -> Tensor:
        """[B, h, s, D] to [B, h/cp, S, D]."""
        return collectives.heads_for_rows(x, self.cp, heads=1, dim=2)

    def to_sequence(self, y: Tensor) -> Tensor:
        """[B, S, h/cp, D] to [B, s, h, D]."""
        return collectives.rows_for_heads(y, self.cp, heads=2, dim=1)


class RecomputedAttention(ContextAttention):
    """Of which backward keeps what it is given, and computes the rest again ("selective").

    So scores and probabilities go (Korthikanti et al. 2022, arXiv:2205.05198, section 5), and on a context
    axis keys and values of other ranks, which come once more. Queries and keys are kept as they are given,
    rotated and with their norms. Without a context axis the family's own function gets the family's own mask.
    """

    def mask(self, *, q_length: int, mask_function: Callable[..., Tensor], **asked: Any) -> Tensor | None:
        if self.cp.size > 1:
            return super().mask(q_length=q_length, mask_function=mask_function, **asked)
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        make: Any = ALL_MASK_ATTENTION_FUNCTIONS[self.kernel]
        found: Tensor | None = make(q_length=q_length, mask_function=mask_function, **asked)
        return found

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, named: Any
    ) -> tuple[Tensor, None]:
        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if self.cp.size > 1:
                return super(RecomputedAttention, self).attend(module, query, key, value, mask, named)[0]
            y: Tensor = kernel_of(module, self.kernel)(module, query, key, value, mask, **named)[0]
            return y

        if not torch.is_grad_enabled():
            return run(query, key, value), None
        draws = (named.get("dropout") or 0.0) > 0.0
        y = checkpoint(run, query, key, value, use_reentrant=False, preserve_rng_state=draws)
        return y, None


class ShapesAlone(ContextAttention):
    """Of a forward whose masks nobody looks at: they have the shapes of whole ones and take no memory."""

    def mask(self, *, q_length: int, mask_function: Callable[..., Tensor], **asked: Any) -> Tensor | None:
        """As of the whole sequence."""
        del mask_function
        dtype = torch.bool if self.kernel == "sdpa" else asked.get("dtype")
        nothing = torch.zeros((), dtype=dtype, device=asked.get("device"))
        return nothing.expand(asked["batch_size"], 1, q_length, asked["kv_length"])


class _Part:
    """A module as its attention function sees it on a rank that has some of the heads."""

    def __init__(self, module: nn.Module, held: dict[str, Any]) -> None:
        self._module = module
        vars(self).update(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def put_context(
    root: nn.Module, cp: ContextParallel, made: Callable[[ContextParallel, str], ContextAttention]
) -> None:
    """Have the modules below ``root``, whose configs are no others', attend over ``cp``.

    Raises:
        ModelError: As :func:`check_kernels`.
    """
    if cp.size > 1:
        put_attention(root, partial(made, cp))


def put_attention(root: nn.Module, made: Callable[[str], ContextAttention]) -> None:
    """Have the modules below ``root`` attend by what ``made`` gives, told the name of their own function.

    Raises:
        ModelError: As :func:`check_kernels`.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, _mask)
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
    check_kernels(root)
    for config in _configs(root):
        kernel = config._attn_implementation  # noqa: SLF001 - transformers' own modules read it
        config._attn_implementation = _NAME  # noqa: SLF001 - as above
        vars(config)[_NAME] = made(kernel)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The modules of a block that need tokens of other ranks, and compute whole sequences on every rank.

    Attributes:
        paths: Where they are in the block.
        passing: Those of them that hand their states on instead (:mod:`dsx.hub.state_passing`).
        alone: Whether all that attends in the block is in them. Then they do so as if there were one rank,
            and the block is called with the masks and positions of whole sequences.
    """

    paths: frozenset[str] = frozenset()
    passing: frozenset[str] = frozenset()
    alone: bool = False


def gather_around(
    root: nn.Module,
    paths: Iterable[str],
    cp: ContextParallel,
    gather: Callable[[Tensor, ContextParallel], Tensor] = collectives.gather_rows,
) -> None:
    """Have the modules at ``paths`` below ``root`` compute whole sequences, between a gather and a cut.

    Every rank computes all of them. It gets gradients from its own part of the outputs alone, and from there
    they reach all of the inputs and the module's parameters. So the ranks' gradients add up to one process's.

    Args:
        root: A block, whose tensor-parallel parts are in place: their ends are outside of these.
        paths: As :func:`dsx.hub.context_probe.mixers` finds them.
        cp: The ranks that share a sequence.
        gather: Makes a whole sequence [B, S, ...] of parts.
    """
    for path in paths:
        module = root.get_submodule(path)
        module.register_forward_pre_hook(partial(_made_whole, cp=cp, gather=gather), with_kwargs=True)
        module.register_forward_hook(partial(_own_part, cp=cp), prepend=True)


def _made_whole(_module: nn.Module, given: Any, named: Any, *, cp: ContextParallel, gather: Any) -> Any:
    # A graph cannot go on inside a walk over arguments.
    return uncompiled(_whole_rows, given, named, cp, gather)


def _whole_rows(given: Any, named: Any, cp: ContextParallel, gather: Any) -> tuple[Any, Any]:
    """A module's arguments, in which whatever is as long as the first tensor has whole rows."""
    length = next(each for each in tree_leaves((given, named)) if isinstance(each, Tensor)).shape[1]

    def whole(each: Any) -> Any:
        along = isinstance(each, Tensor) and each.dim() in (2, 3) and each.shape[1] == length
        return gather(each, cp) if along else each

    found: tuple[Any, Any] = tree_map(whole, (given, named))
    return found


def _own_part(_module: nn.Module, _given: Any, gave: Any, *, cp: ContextParallel) -> Any:
    return sequence_cut(gave, cp.cut)


def check_kernels(root: nn.Module) -> None:
    """Raise ModelError if modules below ``root`` compute their attention in another way than in torch."""
    for config in _configs(root):
        if (kernel := config._attn_implementation) not in _KERNELS:  # noqa: SLF001 - as above
            raise ModelError(
                at("attn_implementation", kernel),
                f"a context axis and selective recompute are known to be right with {' and '.join(_KERNELS)}",
                'use one of these, or dsx.parallel.context = 1 and dsx.recompute = "full"',
            )


def _configs(root: nn.Module) -> Iterable[Any]:
    held = (vars(module).get("config") for module in root.modules())
    return {id(each): each for each in held if hasattr(each, "_attn_implementation")}.values()


def _mask(*, config: Any, **asked: Any) -> Tensor | None:
    """The entry in the registry of masks."""
    context: ContextAttention = vars(config)[_NAME]
    return context.mask(config=config, **asked)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **named: Any
) -> tuple[Tensor, None]:
    """The entry in the registry of attention functions."""
    context: ContextAttention = vars(module.config)[_NAME]
    y: tuple[Tensor, None] = uncompiled(context.attend, module, query, key, value, attention_mask, named)
    return y


def kernel_of(module: Any, name: str) -> Callable[..., Any]:
    """The attention function that a module's own code would have taken from the registry."""
    forward = inspect.unwrap(type(module).forward)
    own: dict[str, Callable[..., Any]] = forward.__globals__
    if name != "eager":
        registry: Any = own["ALL_ATTENTION_FUNCTIONS"]  # which a family may have changed for itself
        found: Callable[..., Any] = registry[name]
        return found
    eager = [each for each in forward.__code__.co_names if each.endswith("eager_attention_forward")]
    return own[eager[0] if eager else "eager_attention_forward"]
