"""From the config of any causal language model of transformers to a :class:`~dsx.models.spec.HubModel`."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from itertools import chain
from typing import Any

import torch
from torch import nn

from dsx.config.wording import suggest
from dsx.errors import ModelError
from dsx.hub.balance import balance_of
from dsx.hub.cut_regions import completed, splits_of
from dsx.hub.derived_plan import DerivedPlan, by_heads, derived_plan
from dsx.hub.disk_names import DiskForm, FolderNames, disk_forms, is_turned
from dsx.hub.experts import experts_in
from dsx.hub.model_structure import ModelStructure, settings_of, structure_of
from dsx.hub.shrunk import random_model, shrunk
from dsx.hub.tensor_plan import (
    COLUMN,
    GATHERS,
    LOCAL_COLUMN,
    ROW,
    SEGMENTS,
    STYLES,
    SUMMED,
    BlockPlan,
    check_plan,
    children,
    generic,
    heads_of,
    is_mixer,
)
from dsx.hub.values import float32_beside, laws_of
from dsx.models.config_values import at
from dsx.models.family import TIE
from dsx.models.param import Init, ParamSpec
from dsx.models.spec import HubModel

_MOST_POSITIONS = 2**31 - 1


def known_of(family: str) -> dict[str, Any]:
    """The family's entry in ``families.toml``."""
    known: dict[str, Any] = _overrides()["family"].get(family, {})
    return known


@cache
def _overrides() -> dict[str, Any]:
    """``families.toml``: what dsx knows of families beyond what transformers says."""
    return tomllib.loads((files("dsx.hub") / "families.toml").read_text(encoding="utf-8"))


def hub_model(config: Mapping[str, Any], tensor_plan: Mapping[str, str | None] | None = None) -> HubModel:
    """The model that transformers makes of a config.json, as dsx cuts it.

    Args:
        config: Content of the config.json of a causal language model.
        tensor_plan: Changes of the family's tensor plan: style by pattern, None for no cut.

    Raises:
        ModelError: transformers cannot make the model, or dsx cannot cut it; names the reason.
    """
    text = json.dumps(dict(config), sort_keys=True)
    return _hub_model(text, tuple(sorted((tensor_plan or {}).items(), key=lambda item: item[0])))


@lru_cache(maxsize=8)
def _hub_model(text: str, changes: tuple[tuple[str, str | None], ...]) -> HubModel:
    check_plan(dict(changes), "dsx.parallel.tensor_plan")
    kind = json.loads(text).get("model_type")
    known = known_of(kind)
    structure = structure_of(text)
    for name, parameter in structure.model.named_parameters():
        if not parameter.numel():
            raise ModelError(
                at("model_type", kind),
                f"{name} has the shape {list(parameter.shape)}, no numbers at all",
                "give the size of the config that makes it at least 1, or leave the part out (null)",
            )
    _check_places(structure, changes)
    _check_causal(structure, text)
    plan, derived = plan_of(structure, changes, text)
    reader = _Reader(structure, plan, derived, float32_beside(text))
    settings = structure.model.config
    kinds = ("WordEmbedding", *(("Positions",) if structure.shifts else ()))
    first, blocks = len(kinds), len(structure.list_of_blocks)
    kinds = (*kinds, *("Block",) * blocks, "FinalNorm", "Head")
    params, buffers = tuple(reader.params(first)), tuple(reader.buffers(first))
    reader.require_all({spec.in_module for spec in (*params, *buffers)})
    return HubModel(
        family=str(kind),
        config=text,
        tensor_plan=changes,
        num_layers=blocks,
        hidden_size=structure.model.get_submodule(structure.embedding).weight.shape[1],
        stream=structure.stream,
        padding=structure.padding,
        vocab_size=structure.model.get_submodule(structure.head).weight.shape[0],
        head_size=structure.model.get_submodule(structure.head).weight.shape[1],
        max_positions=_positions(settings, structure.padding),
        tied_embeddings=reader.tied,
        kinds=kinds,
        alike=tuple(_alike(reader)),
        params=params,
        buffers=buffers,
        order=reader.in_order((*params, *buffers)),
        heads=reader.heads,
        query_heads=reader.query_heads,
        mixer_heads=reader.mixer_heads,
        mixers=reader.mixers(first),
        attention_with_mixers=bool(reader.shared),
        pair_projections=frozenset(reader.pairs(params)),
        own_values=tuple(item for item in reader.memory.items() if reader.laws[item[1]] is None),
        query_size=_query_size(settings),
        windows=_windows(settings, blocks),
        looked_up=frozenset(reader.tables(params)),
        routed=_routed(settings),
        balance=balance_of(structure.model),
        no_sequence=known.get("no_sequence") or derived.no_sequence,
        no_gathering=known.get("no_gathering"),
    )


def _check_places(structure: ModelStructure, changes: tuple[tuple[str, str | None], ...]) -> None:
    """Refuse an entry of the user's plan that would cut nothing."""
    inside = _inside(structure) if changes else {}
    for pattern, style in changes:
        where = at(f"dsx.parallel.tensor_plan.{pattern}", style)
        if pattern not in inside:
            near = suggest(pattern, inside, otherwise="use the model's names, with * for numbers")
            raise ModelError(where, f"no block of {structure.blocks} has such a module or parameter", near)
        if (style or "").partition(":")[0] in COLUMN | ROW and not isinstance(
            inside[pattern], nn.Linear | nn.Parameter
        ):
            what = f"it is no linear but a {type(inside[pattern]).__name__}, which dsx does not cut"
            raise ModelError(where, what, "name its linears, or its parameters")


def _check_causal(structure: ModelStructure, config: str) -> None:
    """Refuse a model that is told to be no decoder, if a small one of it then sees tokens that come later."""
    if getattr(structure.model.config, "is_decoder", True):
        return
    small = random_model(shrunk(json.loads(config), tensor=1)).eval()
    tokens = torch.full((2, 8), 3)
    tokens[1, -1] = 4
    with torch.no_grad():
        seen, other = small(input_ids=tokens, use_cache=False).logits[:, :-1]
    if not torch.equal(seen, other):
        what = "its attention looks at the tokens that are to be predicted"
        raise ModelError(at("is_decoder", value=False), what, "write true")


def folder_names(model: HubModel) -> FolderNames:
    """What tells which of a model's tensors each tensor of a folder is."""
    empty = structure_of(model.config).model
    return FolderNames(empty, disk_forms(empty))


def plan_of(
    structure: ModelStructure, changes: tuple[tuple[str, str | None], ...], config: str
) -> tuple[dict[str, str | None], DerivedPlan]:
    """The tensor plan: the family's, mended by dsx's table, and the user's changes; and what was derived.

    Where the first two cut nothing in any block, or leave a mixer whole, the plan of that is derived from
    what a small model computes.
    """
    if ("plan", changes) not in structure.plans:
        structure.plans["plan", changes] = _plan_of(structure, changes, config)
    found: tuple[dict[str, str | None], DerivedPlan] = structure.plans["plan", changes]
    return found


def _plan_of(
    structure: ModelStructure, changes: tuple[tuple[str, str | None], ...], config: str
) -> tuple[dict[str, str | None], DerivedPlan]:
    model = structure.model
    plan: dict[str, str | None] = dict(getattr(model, "tp_plan", None) or {})
    # Some classes name their modules without the prefix of the causal model.
    plan |= {f"{structure.base}.{key}": style for key, style in plan.items() if key.startswith("layers.")}
    known = known_of(model.config.model_type)
    own: dict[str, str] = known.get("plan", {})
    for name in known.get("cuts", ()):
        own = _overrides()["plan"][name] | own
    plan |= {f"{structure.blocks}.*.{path}": style for path, style in own.items()}
    derived = DerivedPlan()
    inside = _inside(structure)
    if not any(style and pattern in inside for pattern, style in plan.items()):
        derived = derived_plan(config)
    elif whole := _whole(structure, plan):
        derived = derived_plan(config).within(structure.blocks, whole)
    plan |= derived.patterns(structure.blocks)
    plan = {key: style or None for key, style in plan.items()}
    back = {pattern for pattern, style in changes if style is None}
    for region in derived.regions:  # a convolution and what counts heads need all of a mixer's, or none
        together = {f"{structure.blocks}.*.{path}" for path in region}
        if together & back and any((plan[pattern] or "").startswith(SEGMENTS) for pattern in together):
            plan |= dict.fromkeys(together)
    return plan | dict(changes), derived


def _whole(structure: ModelStructure, plan: Mapping[str, str | None]) -> set[str]:
    """What a plan leaves alone: modules and parameters of blocks' children, if one of them is a mixer."""
    whole, shared, mixes = set[str](), set[str](), False
    for path, child in (each for block in structure.list_of_blocks for each in children(block)):
        held = (child.named_modules(), child.named_parameters(), child.named_buffers())
        names = {generic(f"{structure.blocks}.0.{path}.{name}".rstrip(".")) for name, _ in chain(*held)}
        cut = any(plan.get(name) in STYLES - GATHERS - {SUMMED, "replicate"} for name in names)
        (shared if cut else whole).update(names)
        mixes |= not cut and is_mixer(child)
    return whole - shared if mixes else set()


def _inside(structure: ModelStructure) -> dict[str, object]:
    """Modules, parameters and buffers in blocks, by name with ``*`` for numbers."""
    named: dict[str, object] = dict(structure.model.named_modules())
    named |= dict(structure.model.named_buffers(remove_duplicate=False))
    named |= dict(structure.model.named_parameters(remove_duplicate=False))
    return {generic(name): each for name, each in named.items() if name.startswith(f"{structure.blocks}.")}


def block_plan(model: HubModel, structure: ModelStructure, number: int) -> BlockPlan:
    """The plan of a block."""
    return _plan_of_block(structure, *plan_of(structure, model.tensor_plan, model.config), number)


def cut_alike(one: HubModel, other: HubModel) -> bool:
    """Whether ranks cut the blocks of two models of a family by the same tensor plan."""
    a, b = (plan_of(structure_of(each.config), each.tensor_plan, each.config) for each in (one, other))
    return a == b


def derived_patterns(model: HubModel) -> dict[str, str | None]:
    """The derived part of a model's tensor plan, in the form of ``dsx.parallel.tensor_plan``."""
    structure = structure_of(model.config)
    return plan_of(structure, model.tensor_plan, model.config)[1].patterns(structure.blocks)


def _plan_of_block(
    structure: ModelStructure, plan: Mapping[str, str | None], derived: DerivedPlan, number: int
) -> BlockPlan:
    settings, prefix = structure.model.config, f"{structure.blocks}.{number}"
    block = structure.list_of_blocks[number]
    pairs = heads_of(block) or _number(settings, "num_key_value_heads")
    pairs = pairs or _number(settings, "num_attention_heads") or 0
    keys = [path for path, _ in block.named_modules() if path.endswith(".k_proj")]
    if keys and all(is_mixer(_child(block, path)) for path in keys):
        pairs = 0  # those of attention, in other blocks
    rotary = _number(settings, "qk_rope_head_dim") or 0
    counts = (*known_of(settings.model_type).get("heads", ()), *derived.counts)
    kind = (
        pairs,
        tuple(plan.get(generic(f"{prefix}.{path}")) for path, _ in block.named_modules()),
        tuple((type(module), settings_of(module)) for module in block.modules()),
        tuple((path, tuple(parameter.shape)) for path, parameter in block.named_parameters()),
    )
    if kind not in structure.plans:
        facts = {"pairs": pairs, "rotary": rotary, "counts": counts, "by_head": derived.by_head}
        said, call = BlockPlan.of(block, prefix, plan, **facts), structure.calls[number]
        if said.marks:
            said = replace(said, splits=splits_of(block, call))
        proved = plan.items() >= derived.patterns(structure.blocks).items()
        kept = {p: style for p, style in said.styles.items() if proved and generic(p) in derived.styles}
        rest = {p: style for p, style in said.styles.items() if p not in kept}
        found = completed(block, replace(said, styles=rest), call)  # which may leave whole what the plan cuts
        structure.plans[kind] = replace(found, styles={**kept, **found.styles})
    plan_of_kind: BlockPlan = structure.plans[kind]
    return plan_of_kind


def _number(settings: Any, name: str) -> int | None:
    """A whole number of a config; None where it has none, or one for each layer."""
    try:
        value = getattr(settings, name, None)
    except Exception:  # noqa: BLE001 - transformers refuses to say what differs from layer to layer
        return None
    return value if type(value) is int else None


def _positions(settings: Any, padding: int | None) -> int:
    """How long a sequence may be: where positions leave out ``padding``, they begin behind its number."""
    most: int = getattr(settings, "max_position_embeddings", None) or _MOST_POSITIONS
    return most if padding is None else most - padding - 1


def _query_size(settings: Any) -> int:
    heads = _number(settings, "num_attention_heads") or 0
    size = _number(settings, "head_dim") or (_number(settings, "hidden_size") or 0) // max(heads, 1)
    return heads * size


def _windows(settings: Any, blocks: int) -> tuple[int, ...]:
    """How far each block's attention reaches, if the config names its layers' attention; 0 for all."""
    kinds, window = getattr(settings, "layer_types", None), _number(settings, "sliding_window")
    if not window or not isinstance(kinds, list) or len(kinds) != blocks:
        return ()
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def _routed(settings: Any) -> float:
    """Share of the experts that a token is sent to."""
    every = next((n for n in (_number(settings, name) for name in _EXPERTS) if n), 0)
    chosen = next((n for n in (_number(settings, name) for name in _CHOSEN) if n), 0)
    return chosen / every if every and chosen else 1.0


_WITH_KERNELS = ("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "mamba", "mamba2", "nemotron_h")
"""Families whose fused kernels get out_proj's matrix (cuda_kernels_forward); PEFT refuses it in most."""


class _Reader:
    """Reads parameters of a model in the order of the layer list."""

    def __init__(
        self,
        structure: ModelStructure,
        plan: Mapping[str, str | None],
        derived: DerivedPlan,
        float32: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.structure, self.plan, self.derived, self.float32 = structure, plan, derived, float32
        self.model = structure.model
        self.forms: dict[str, DiskForm] = disk_forms(self.model)
        self.laws = laws_of(self.model)
        table = self.model.get_submodule(structure.embedding).weight
        self.tied = self.model.get_submodule(structure.head).weight is table
        blocks = range(len(structure.list_of_blocks))
        self.plans = [_plan_of_block(structure, plan, derived, number) for number in blocks]
        self.planned = [
            (block, path, style, is_mixer(_child(block, path)))
            for block, plan_of_one in zip(structure.list_of_blocks, self.plans, strict=True)
            for path, style in plan_of_one.styles.items()
        ]
        """(block, path, style, whether a recurrent mixer has it) of what the blocks' plans name."""
        self.memory: dict[str, str] = {}
        """Name in transformers' model by dsx's name."""

    def params(self, first: int) -> Iterator[ParamSpec]:
        """Every parameter; ``first`` is the layer of the first block."""
        structure = self.structure
        yield from self._table(0, structure.embedding, tie=TIE if self.tied else None)
        if structure.shifts:
            yield from self._around(1, structure.before)
        for number, block in enumerate(structure.list_of_blocks):
            stacked = {
                f"{path}.{name}"
                for path, held in experts_in(block)
                for name, _ in held.named_parameters(recurse=False)
            }
            for path, parameter in block.named_parameters():
                cut = self.plans[number].cut(block, path, parameter)
                name, owner = f"{structure.blocks}.{number}.{path}", path.rpartition(".")[0]
                linear = _is_linear(block.get_submodule(owner), path, parameter)
                fused = owner.endswith("out_proj") and self.model.config.model_type in _WITH_KERNELS
                read = linear and (fused or owner in structure.read[number])
                cuts = {"split": cut.split, "parts": cut.parts, "linear": linear, "read": read}
                if path in stacked and cut.split != 0:
                    cuts["experts"] = 0
                yield self._spec(f"{first + number}.block.{path}", name, **cuts)
        last = first + len(structure.list_of_blocks)
        yield from self._around(last, structure.after)
        for path in structure.above:
            for name, _ in self.model.get_submodule(path).named_parameters(recurse=False):
                yield self._spec(f"{last}.above.{path}.{name}", f"{path}.{name}")
        if not self.tied:
            yield from self._table(last + 1, structure.head)

    def _table(self, layer: int, path: str, tie: str | None = None) -> Iterator[ParamSpec]:
        for name, _ in self.model.get_submodule(path).named_parameters():
            table = name in ("weight", "bias")
            yield self._spec(
                f"{layer}.word.{name}",
                f"{path}.{name}",
                split=0 if table else None,
                pad_multiple=1 if table else None,
                tie=tie if name == "weight" else None,
            )
        bias = self.model.get_submodule(self.structure.head).bias
        if tie and bias is not None:  # where the table is used as head
            yield self._spec(
                f"{layer}.word.bias", f"{self.structure.head}.bias", split=0, pad_multiple=1, tie=tie
            )

    def _around(self, layer: int, paths: tuple[str, ...]) -> Iterator[ParamSpec]:
        """Parameters of modules before or after the blocks."""
        base = self.structure.base
        for path in paths:
            for name, _ in self.model.get_submodule(f"{base}.{path}").named_parameters(recurse=False):
                yield self._spec(f"{layer}.base.{path}.{name}", f"{base}.{path}.{name}")

    def _spec(self, name: str, memory: str, **cut: Any) -> ParamSpec:
        law = self.laws[memory]
        self.memory[name] = memory
        return self._stored(name, memory, init=law or Init(kind="zeros"), **cut)

    def _stored(self, name: str, memory: str, **others: Any) -> ParamSpec:
        kept = memory
        if memory not in self.forms:  # a tied tensor, which is stored under another of its names
            kept = next(key for key, form in self.forms.items() if memory in form.copies)
        owner = self.model.get_submodule(memory.rpartition(".")[0])
        return ParamSpec(
            name=name,
            layer=int(name.partition(".")[0]),
            shape=tuple(self.model.get_parameter_or_buffer(memory).shape),
            hf_whole="" if is_turned(owner) else memory,
            hf_copies=tuple(other for other in (kept, *self.forms[kept].copies) if other != memory),
            float32=self.float32.get(memory, ()),
            **self.forms[kept].in_spec,
            **others,
        )

    def buffers(self, first: int) -> Iterator[ParamSpec]:
        """Buffers of blocks that are stored with the weights."""
        for number, block in enumerate(self.structure.list_of_blocks):
            for path, _ in block.named_buffers():
                memory = f"{self.structure.blocks}.{number}.{path}"
                if memory in self.forms:  # transformers stores it
                    name, nothing = f"{first + number}.block.{path}", Init(kind="zeros")
                    yield self._stored(name, memory, init=nothing, buffer=True)

    def require_all(self, held: set[str]) -> None:
        """Refuse a model that stores a tensor which is in no layer, given the names of those that are."""
        for name, form in self.forms.items():
            if held.isdisjoint((name, *form.copies)):
                raise ModelError(
                    at("model_type", self.model.config.model_type),
                    f"{name} is in none of the layers that dsx makes: word embedding, blocks, what its "
                    "forward runs around them, and the head",
                    "dsx cannot cut this family into stages: use another",
                )

    def pairs(self, params: tuple[ParamSpec, ...]) -> Iterator[tuple[str, int]]:
        """Parameters of blocks' key and value projections that are cut head by head, with their heads."""
        held = [spec for spec in params if ".block." in spec.name]
        for spec in held:
            owner = spec.name.partition(".block.")[2].rpartition(".")[0]
            plan = self.plans[spec.layer - held[0].layer]
            is_pair = owner.endswith((".k_proj", ".v_proj")) and spec.split == 0 and plan.pairs
            if is_pair and plan.styles.get(owner) == "colwise":
                yield spec.name, plan.pairs

    def tables(self, params: tuple[ParamSpec, ...]) -> Iterator[str]:
        """Parameters that are looked up, not multiplied by: positions, for example."""
        for spec in params:
            owner = self.model.get_submodule(self.memory[spec.name].rpartition(".")[0])
            if isinstance(owner, nn.Embedding):
                yield spec.name

    def in_order(self, specs: tuple[ParamSpec, ...]) -> tuple[str, ...]:
        """Names of tensors in the order of transformers' module."""
        places = {name: place for place, name in enumerate(self.model.state_dict())}
        return tuple(spec.name for spec in sorted(specs, key=lambda spec: places[spec.in_module]))

    @property
    def query_heads(self) -> int:
        """Attention heads that all blocks share out alike; 0 if nothing says how many there are."""
        # Each block's own, where a config says one number for all, or none.
        own = (heads_of(block, "q_proj") for block in self.structure.list_of_blocks)
        return math.gcd(_number(self.model.config, "num_attention_heads") or 0, *own)

    @property
    def _queries(self) -> set[str]:
        """Patterns of what projects the queries of attention, where it is cut."""
        names = ("q_proj", "qkv_proj", "query_key_value", "q_b_proj", "c_attn")
        return {
            generic(path)
            for _, path, style, mixes in self.planned
            if not mixes and style in ("colwise", "qkv_colwise") and path.rpartition(".")[2] in names
        }

    @property
    def heads(self) -> tuple[int, int] | None:
        """:attr:`query_heads` and key/value heads, where queries are cut."""
        cut = self._queries
        if counted := self.counted(mixers=False):
            return (counted, counted)
        queries, pairs = self.query_heads, min((plan.pairs for plan in self.plans if plan.pairs), default=0)
        return (queries, pairs) if cut and queries and pairs else None

    def counted(self, *, mixers: bool) -> int:
        """What all numbers of heads and groups that a derived plan divides have in common; 0 if none.

        Those of mixers, children of blocks with convolutions, or of the others.
        """
        counts = [each.rpartition(".") for each in self.derived.counts if by_heads(each)]
        found = [
            vars(block.get_submodule(path.rpartition(".")[0])).get(name, 0)
            for block, path, style, mixes in self.planned
            if style in LOCAL_COLUMN and mixes == mixers
            for owner, _, name in counts
            if generic(path).rpartition(".")[0] == owner
        ]
        return math.gcd(*found)

    @property
    def mixer_heads(self) -> int:
        """As :attr:`HubModel.mixer_heads`."""
        own = self.counted(mixers=True)
        return math.gcd(own, *(self.heads or ())) if own and self.shared else own

    @cached_property
    def _cut(self) -> tuple[set[str], set[str]]:
        """Patterns that cut what is in no mixers, and those that cut mixers."""
        cut = set[str](), set[str]()
        for _, path, _, mixes in self.planned:
            cut[mixes].add(generic(path))
        return cut

    @cached_property
    def shared(self) -> frozenset[str]:
        """Patterns of regions that cut mixers, and attention of other blocks by the same names."""
        others, own = self._cut
        every = (region for region in self.derived.regions if not region.isdisjoint(others & own))
        shared = frozenset[str]().union(*every)
        return shared if self._queries <= shared else frozenset()

    def mixers(self, first: int) -> tuple[frozenset[str], frozenset[str]]:
        """As :attr:`HubModel.mixers`; ``first`` is the layer of the first block."""
        others, own = self._cut
        if not others & own <= self.shared:
            return frozenset(), frozenset()
        names = set[str]()
        for number, block in enumerate(self.structure.list_of_blocks):
            for path, _ in block.named_parameters():
                cut = not self.shared.isdisjoint((generic(path), generic(path.rpartition(".")[0])))
                if cut or is_mixer(_child(block, path)):
                    names.add(f"{first + number}.block.{path}")
        patterns = (f"{self.structure.blocks}.*.{path}" for path in own | self.shared)
        return frozenset(patterns), frozenset(names)


def _child(block: nn.Module, path: str) -> nn.Module:
    """The child of a block that has what is at a path."""
    return next((child for name, child in children(block) if f"{path}.".startswith(f"{name}.")), block)


_STACKED = 3  # experts, outputs, inputs


def _is_linear(owner: nn.Module, path: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is the matrix of a linear, or those of experts with outputs before inputs."""
    if isinstance(owner, nn.Linear):
        return path.endswith(".weight")
    return parameter.ndim == _STACKED and getattr(owner, "is_transposed", None) is False


def _alike(reader: _Reader) -> Iterator[int]:
    """For each block the first that has the same modules, settings and plan."""
    structure, first = reader.structure, dict[Any, int]()
    kinds = getattr(structure.model.config, "layer_types", None) or [None] * len(structure.list_of_blocks)
    for number, block in enumerate(structure.list_of_blocks):
        key = (
            kinds[number],
            tuple(sorted(reader.plans[number].styles.items())),
            tuple((path, type(module), settings_of(module)) for path, module in block.named_modules()),
            tuple((path, tuple(parameter.shape)) for path, parameter in block.named_parameters()),
        )
        yield first.setdefault(key, number)
