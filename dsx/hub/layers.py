"""Layers of the layer list that are made of a transformers family's own modules."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from dsx.hub import values
from dsx.hub.balance import Routers, fresh_sums, sums_of
from dsx.hub.block_arguments import BlockArguments
from dsx.hub.context import (
    ContextAttention,
    Gathered,
    RecomputedAttention,
    ShapesAlone,
    gather_around,
    put_attention,
    put_context,
)
from dsx.hub.context_probe import mixers
from dsx.hub.experts import called_beside, share_experts, tallies_of
from dsx.hub.feed_forward import feed_forwards
from dsx.hub.model_structure import BlockCall, counted, structure_of
from dsx.hub.on_meta import copied
from dsx.hub.read import block_plan
from dsx.hub.state_passing import pass_states
from dsx.hub.tensor_plan import apply_plan, set_dropouts, sum_gradients
from dsx.hub.top import Top
from dsx.hub.tower import Tower
from dsx.models.spec import HubModel, Recompute
from dsx.nn import collectives
from dsx.nn.block import again
from dsx.nn.context import WHOLE, ContextParallel
from dsx.nn.documents import Given, Places, Stream, Told, carried, hidden_of
from dsx.nn.embedding import looked_up, own_rows
from dsx.nn.linear import column_linear
from dsx.nn.parameters import Weights, own_dtype
from dsx.nn.split import block_ends
from dsx.nn.tiling import tile


def settled(module: nn.Module, model: HubModel, weights: Weights, summed: set[str]) -> None:
    """Give the parameters of a layer storage, values and tags, and move its buffers to the device.

    Args:
        module: The layer, its parameters on the meta device.
        model: The model.
        weights: Where values come from.
        summed: Paths of parameters whose gradients the tensor-parallel ranks sum.
    """
    for path, parameter in list(module.named_parameters()):
        owner, _, name = path.rpartition(".")
        spec = weights.specs[path]
        dtype, shape = own_dtype(spec, weights.dtype), spec.local_shape(weights.at)
        empty = torch.empty(shape, dtype=dtype, device=weights.device)
        setattr(module.get_submodule(owner), name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    dtypes = values.buffer_dtypes(model.config, weights.dtype)
    for path, buffer in list(module.named_buffers(remove_duplicate=False)):
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, buffer.to(weights.device, dtypes.get(path)))
    weights.initialise(module)
    memory = dict(model.own_values)
    for path, spec in weights.specs.items():
        if spec.name in memory and not module.get_parameter(path).is_meta:
            values.own_values(module.get_parameter(path), memory[spec.name], spec, model, weights)
    bases = {weights.specs[path].name for path in summed}
    summed = summed | {path for path, spec in weights.specs.items() if spec.adapts in bases}
    sum_gradients(dict(module.named_parameters()), summed, weights.tp)


class HubEmbedding(nn.Module):
    """The family's word embedding, its rows cut over the tensor-parallel ranks, used as head too if tied."""

    def __init__(self, model: HubModel, weights: Weights) -> None:
        super().__init__()
        structure = structure_of(model.config)
        self.word: Any = copied(structure.model.get_submodule(structure.embedding))
        if "word.bias" in weights.specs:  # of the head, with whose matrix it is
            self.word.bias = structure.model.get_submodule(structure.head).bias
        others = {
            f"word.{name}" for name, _ in self.word.named_parameters() if name not in ("weight", "bias")
        }
        own = {path: spec for path, spec in weights.specs.items() if not spec.tower}
        settled(self, model, replace(weights, specs=own), others if weights.tp.size > 1 else set())
        self.num_valid, self._balance = _vocabulary(self.word, weights), model.balance
        self._scale, self._tp, self._cp = structure.scale, weights.tp, weights.cp
        self._padding = model.padding
        self.tower = Tower(model, weights) if model.pictures else None

    def forward(self, given: Any) -> Given:
        """int64 [B, S], and pictures (:class:`MicroBatch`), to [B, s, H] and what goes with it."""
        pictures = given[1] if isinstance(given, tuple) and isinstance(given[-1], Mapping) else None
        ids_BS, _, places = Stream.first(given if pictures is None else given[0])
        y: Tensor = self.word(ids_BS)
        y = y if self._scale == 1.0 else y * self._scale
        if self.tower is not None:
            y, told = self._seen(self.tower, ids_BS, y, pictures)
            places = told or places
        if self._padding is not None and places is None:
            places = Places(counted(collectives.gather_rows(ids_BS, self._cp), self._padding))
        return Stream(y, None if self._balance is None else fresh_sums(self._balance, y), places).flat()

    @property
    def tower_bytes(self) -> int:
        """What the tower of pictures takes, beside parameters and buffers."""
        return 0 if self.tower is None else self.tower.num_bytes

    def _seen(
        self, tower: Tower, ids_BS: Tensor, y_BsH: Tensor, pictures: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, Told]:
        """The vectors with pictures among them, and what blocks are told."""
        tp, cut = self._tp, self._tp.sequence and pictures is not None
        y = collectives.gather_from(y_BsH, tp, collectives.SEQUENCE) if cut else y_BsH
        seen, told = tower(y, ids_BS, pictures)
        y, *added = (seen[number] for number in range(len(seen)))  # a family may write into views of one
        added = added if tower.trains else [each.detach() for each in added]
        if cut:
            y, *added = (collectives.scatter_to(each, tp, collectives.SEQUENCE) for each in (y, *added))
        return y, Told((*told, *added))


def _vocabulary(table: Any, weights: Weights) -> int | None:
    """Make an embedding of the family look up this rank's rows, or be the head with ``as_head=True``.

    What the family's own forward does to a vector that it has looked up, it does here too. An output
    linear is made the head alike. Returns how many rows are no padding, None for all.
    """
    tp, split, look_up = weights.tp, weights.split, table.forward
    size, rows = weights.specs["word.weight"].shape[0], table.weight.shape[0]
    first, num_valid = own_rows(size, rows, tp)
    padding = getattr(table, "padding_idx", None)
    if padding is not None:
        table.padding_idx = padding - first if first <= padding < first + rows else None

    def forward(x: Tensor, *, as_head: bool = False, loss: Callable[..., Tensor] | None = None) -> Tensor:
        bias = getattr(table, "bias", None)
        if loss is not None:
            return loss(x, table.weight, bias=bias, num_valid=num_valid)
        if as_head:
            return column_linear(x, table.weight, bias, tp, num_valid=num_valid, split=split)
        return looked_up(x, look_up, size, rows, tp)

    table.forward = forward
    return num_valid


class HubStart(nn.Module):
    """What the family does between its word embedding and its first block."""

    def __init__(self, model: HubModel, weights: Weights) -> None:
        super().__init__()
        structure = structure_of(model.config)
        self._tp, self._sums, self._cp = weights.tp, model.balance is not None, weights.cp
        self._handed: Tensor | None = None
        self._writes = structure.writes
        self._takes_positions, self._padding = structure.takes_positions, model.padding
        self.base = structure.stripped(structure.before, self._called, weights.device, weights.dtype)
        put_context(self.base, weights.cp, ShapesAlone)
        set_dropouts(self.base, weights.tp, sharded=False)
        settled(self, model, weights, set())

    def _called(self, number: int, call: BlockCall) -> Tensor:
        if number == 0:
            self._handed = call.hidden
        return call.hidden.detach()

    def forward(self, given: Given) -> Given:
        """[B, s, H] to what blocks take."""
        stream = Stream.of(given, sums=self._sums)
        assert not isinstance(stream.places, Told), "pictures are refused where this layer is needed"
        places = stream.places
        if self._padding is not None and places is not None:
            if places.documents is None:  # made for this layer alone
                stream = stream._replace(places=None)
            else:
                places = Places(places.positions + self._padding + 1)
        return stream.then(self._started(stream.hidden, places))

    def _started(self, x_BsH: Tensor, places: Places | None) -> Tensor:
        tp, cut = self._tp, self._tp.sequence
        if cut:
            x_BsH = collectives.gather_from(x_BsH, tp, collectives.SEQUENCE)
        told, cp = {} if places is None else {"position_ids": places.positions}, self._cp
        by_offset = cp.size > 1 and not self._takes_positions
        if by_offset:  # where a token stands shows in the whole sequence alone
            x_BsH = collectives.gather_rows(x_BsH, cp)
        elif cp.size > 1:
            own = cp.indices(x_BsH.shape[1] * cp.size, x_BsH.device).expand(len(x_BsH), -1)
            told = {"position_ids": own if places is None else cp.cut(places.positions)}
        self.base(inputs_embeds=x_BsH.clone() if self._writes else x_BsH, use_cache=False, **told)
        y, self._handed = self._handed, None
        assert y is not None
        y = cp.cut(y) if by_offset else y
        return collectives.scatter_to(y, tp, collectives.SEQUENCE) if cut else y


class HubBlock(nn.Module):
    """A block of the family."""

    compiled: Callable[..., Tensor] | None = None

    def __init__(
        self,
        model: HubModel,
        weights: Weights,
        number: int,
        arguments: BlockArguments,
        recompute: Recompute,
        around: Gathered,
    ) -> None:
        super().__init__()
        structure = structure_of(model.config)
        self.block = copied(structure.list_of_blocks[number])
        self._number, self._arguments, self._recompute = number, arguments, recompute
        self.host = weights.host
        self._times = (weights.tp.size if weights.tp.sequence else 1) * weights.cp.size
        self._alone = around.alone
        if recompute == "selective":
            own = WHOLE if self._alone else weights.cp
            put_attention(self.block, partial(RecomputedAttention, own))
        elif not self._alone:
            put_context(self.block, weights.cp, ContextAttention)
        plan = block_plan(model, structure, number)
        summed = apply_plan(self.block, plan, weights.tp, weights.split, around.paths)
        self.tallies = tallies_of(self.block, number, weights.device)
        beside = (
            called_beside(structure.list_of_blocks[number], model.hidden_size) if weights.ep.size > 1 else {}
        )
        shares = share_experts(self.block, weights.ep, weights.split, beside)
        self._split = weights.split if shares else None
        pass_states(self.block, around.passing, weights.cp)
        gather_around(self.block, around.paths - around.passing, weights.cp)
        settled(self, model, weights, {f"block.{path}" for path in summed})
        balanced = model.balance is not None
        tiled = feed_forwards(model.config, balanced=balanced)[number] if weights.mlp_tiles > 1 else ()
        for path in tiled:
            tile(self.block.get_submodule(path), weights.mlp_tiles, weights.split)
        for inner in filter(loops_over_children, self.block.modules()):
            inner._z3_leaf = True  # noqa: SLF001 (deepspeed/utils/z3_leaf_module.py)
        self._parts = weights.cp.size
        self._balance, path = model.balance, f"{structure.blocks}.{number}"
        self._routers = None if self._balance is None else Routers(structure.model, self.block, path)
        self._told = bool(model.pictures)

    def forward(self, given: Given) -> Given:
        """[B, s, ...] to the same, and the sums of an auxiliary loss beside it."""
        x, sums, places = Stream.of(given, sums=self._balance is not None, told=self._told)
        length, training = x.shape[1] * self._times, self.training
        told = {"training": training, "whole": self._alone}
        kept = places.of_stages if isinstance(places, Told) else places
        call = self._arguments.call(self._number, x, length, kept, **told)
        # Where the hidden states leave, whoever computes the block again must not hold them.
        once = partial(self._run, call if self.host is None else replace(call, hidden=x.new_empty(0)))
        run = again(self._recompute, self.host, once, random=training)
        y, sums = run(x, sums)
        if isinstance(places, Told) and places.added:  # so that the first block is like all others
            y, places = y + places.added[0], Told((*places.of_stages, *places.added[1:]))
        return Stream(block_ends(y, self._split) if self.hides and self._split else y, sums, places).flat()

    @property
    def hides(self) -> bool:
        """Whether rows travel to experts, and weight gradients can be computed meanwhile."""
        return self._split is not None and self._split.divides

    @property
    def why_not_compiled(self) -> str:
        """What keeps the block from being compiled; empty if nothing does."""
        return "" if self._routers is None else "its auxiliary loss is gathered by hooks on its routers"

    def computed(self, call: BlockCall, x: Tensor) -> Tensor:
        """The part of the forward that is compiled; see :mod:`dsx.nn.compiled`."""
        return hidden_of(call.make(self.block, x))

    def _run(self, call: BlockCall, x: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor | None]:
        compute = self.computed if self.compiled is None else partial(self.compiled, self)
        if self._routers is None or self._balance is None or sums is None:
            return compute(call, x), sums
        with self._routers.collected() as logits:
            y = compute(call, x)
        return y, sum((sums_of(each, self._balance, self._parts) for each in logits), sums)


def loops_over_children(module: nn.Module) -> bool:
    """Whether a module's code uses children with parameters in a loop, as over experts that tokens go to.

    How often such a child is called may depend on the data, and so differ from replica to replica. ZeRO-3
    must then gather the parameters of the whole module before it runs, and nothing inside of it.
    """
    held = {name for name, inner in module.named_children() if any(True for _ in inner.parameters())}
    return bool(held) and any(held & _used_in_loops(kind) for kind in type(module).__mro__)


@cache
def _used_in_loops(kind: type) -> frozenset[str]:
    """Attributes that loops in a class's own methods call, take items of or go over; none without source."""
    if kind is nn.Module or not issubclass(kind, nn.Module):  # which loops over all children; a mixin
        return frozenset()
    methods = [inspect.unwrap(each) for each in vars(kind).values() if inspect.isfunction(each)]
    try:
        trees = [ast.parse(textwrap.dedent(inspect.getsource(each))) for each in methods]
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    kinds = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    loops = (node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds))
    inside = [node for loop in loops for node in ast.walk(loop)]
    called = (node.func for node in inside if isinstance(node, ast.Call))
    items = (node.value for node in inside if isinstance(node, ast.Subscript))
    over = (each.iter for each in inside if isinstance(each, ast.For | ast.comprehension))
    gone_over = (node for each in over for node in ast.walk(each))
    return frozenset(
        node.attr
        for node in (*called, *items, *gone_over)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    )


class HubEnd(nn.Module):
    """What the family does between its last block and the matrix of its head: mostly a norm."""

    def __init__(self, model: HubModel, weights: Weights) -> None:
        super().__init__()
        structure = structure_of(model.config)
        self._last, self._given, self._width = model.num_layers - 1, list[Tensor](), model.hidden_size
        self._times = weights.tp.size if weights.tp.sequence else 1
        self._plain = structure.after[:1] if structure.plain_end else None
        self.base = structure.stripped(structure.after, self._called, weights.device, weights.dtype)
        put_context(self.base, weights.cp, ShapesAlone)
        if self._plain is not None:
            self.base = _only(self._plain, self.base)
        self._top = (
            Top(structure.model, structure.base, structure.head, keep=structure.above)
            if structure.above
            else None
        )
        if self._top is not None:
            self.above = self._top.model
        held = {path for path, _ in self.named_parameters()}
        settled(self, model, weights, held if weights.tp.sequence else set())

    def _called(self, number: int, call: BlockCall) -> Tensor:
        return self._given.pop() if number == self._last else call.hidden

    @carried
    def forward(self, x: Tensor) -> Tensor:
        """What the last block gives to [B, s, H]."""
        y = self._ended(x)
        return y if self._top is None else self._top.reached(y)

    def _ended(self, x: Tensor) -> Tensor:
        if self._plain is not None:
            for path in self._plain:
                x = self.base.get_submodule(path)(x)
            return x
        self._given.append(x)
        like = x.new_zeros(1).expand(x.shape[0], x.shape[1] * self._times, self._width)
        end = self.base(inputs_embeds=like, use_cache=False)
        last: Tensor = end.last_hidden_state if hasattr(end, "last_hidden_state") else end[0]
        return last


def _only(paths: tuple[str, ...], base: nn.Module) -> nn.Module:
    """A module that holds nothing but what ``base`` has at one path, or nothing."""
    module = base.get_submodule(paths[0]) if paths else nn.Module()
    for name in reversed(paths[0].split(".") if paths else ()):
        holder = nn.Module()
        holder.add_module(name, module)
        module = holder
    return module


class Ending:
    """The family's forward after :class:`HubEnd`: scaling, output linear, soft cap."""

    def __init__(self, model: HubModel, cp: ContextParallel) -> None:
        structure = structure_of(model.config)
        self._top = Top(structure.model, structure.base, structure.head, past=structure.above)
        self._cp, self._sums, self._told = cp, model.balance is not None, bool(model.pictures)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ending:
        """Itself, which has no weights."""
        return self

    def logits(self, x: Tensor, linear: Callable[[Tensor], Tensor], num_valid: int | None) -> Tensor:
        """[B, s, H] to this rank's logits [B, S, V], padding at -inf."""
        y = self._top.run(x, linear)
        if num_valid is None:
            return y
        columns = torch.arange(y.shape[-1], device=y.device)
        return y.masked_fill(columns >= num_valid, -torch.inf)

    def of(
        self, module: HubEmbedding | HubHead, given: Given, loss: Callable[..., Tensor] | None = None
    ) -> Given:
        """[B, s, H] to :meth:`logits` by the table of a layer, or, given ``loss``, to the loss."""
        x, sums, _ = Stream.of(given, sums=self._sums, told=self._told)
        sums = None if sums is None else collectives.sum_over_context(sums, self._cp)
        if loss is None:
            y = self.logits(x, partial(module.word, as_head=True), module.num_valid)
        else:
            y = module.word(x, loss=partial(loss, logits=partial(self.logits, num_valid=module.num_valid)))
        return Stream(y, sums).flat()


class HubHead(nn.Module):
    """The family's head with weights of its own, its rows cut over the tensor-parallel ranks."""

    def __init__(self, model: HubModel, weights: Weights, ending: Ending) -> None:
        super().__init__()
        structure = structure_of(model.config)
        self.word: Any = copied(structure.model.get_submodule(structure.head))
        settled(self, model, weights, set())
        self.num_valid, self._ending = _vocabulary(self.word, weights), ending

    def forward(self, given: Given, **loss: Any) -> Given:
        """[B, s, H] to [B, S, V], or to the loss."""
        return self._ending.of(self, given, **loss)


def entries(
    model: HubModel,
    weights: Callable[[int], Weights],
    device: torch.device | str | None,
    recompute: Recompute,
    entry: Callable[..., Any],
) -> Iterator[Any]:
    """The layer list of a model.

    Args:
        model: The model.
        weights: Given a layer's index, what it needs beside the model.
        device: Of the parameters.
        recompute: What each block computes again in backward.
        entry: Makes the entries; see :data:`dsx.models.families.Entry`.
    """
    structure, dtype = structure_of(model.config), weights(0).dtype
    dtypes = values.buffer_dtypes(model.config, dtype)
    cp = weights(0).cp
    around = mixers(model.config, cp.size)
    arguments = BlockArguments(structure, torch.device(device or "cpu"), dtype, dtypes, cp)
    ending, tied, first = Ending(model, cp), model.tied_embeddings, model.kinds.index("Block")
    for layer, kind in enumerate(model.kinds):
        own = model, weights(0 if tied and kind == "Head" else layer)
        if kind == "WordEmbedding":
            yield entry(HubEmbedding, *own, tied=tied)
        elif kind == "Positions":
            yield entry(HubStart, *own)
        elif kind == "Block":
            yield entry(HubBlock, *own, layer - first, arguments, recompute, around[layer - first])
        elif kind == "FinalNorm":
            yield entry(HubEnd, *own)
        elif tied:
            yield entry(HubEmbedding, replace(model, pictures=""), own[1], tied=True, use=ending.of)
        else:
            yield entry(HubHead, *own, ending)
