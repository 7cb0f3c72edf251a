"""All that dsx knows of a family of models, in one record, and the parameters of its layers. Pure data.

A family is one module beside this one that makes a :class:`ModelFamily`, and its place in
:data:`dsx.models.hf_config.FAMILIES`. Its blocks are those of :mod:`dsx.nn.block`, configured by the
:class:`~dsx.models.spec.ModelSpec`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from dsx.models.param import Init, ParamSpec
from dsx.models.spec import Family, ModelSpec, PresetFamily

BYTES_VOCABULARY = 257
"""Token ids of the byte tokenizer: 256 bytes and the end of a document."""

TIE = "word"
"""Key of the tie group, and of the TiedLayerSpec, of tied word embeddings."""

COMMON_KEYS = frozenset({
    "model_type", "architectures", "vocab_size", "initializer_range", "tie_word_embeddings", "hidden_size",
    "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "quantization_config",
})  # fmt: skip
"""Keys that every family's config may have."""

ROPE_KEYS = frozenset({"rope_parameters", "rope_scaling", "original_max_position_embeddings"})
"""Keys of a config with rotary embeddings."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named model.

    Attributes:
        name: What ``dsx.model.preset`` says.
        about: Where its numbers come from.
        config: Hugging Face config. Copy it before changing it.
        parameters: Their number, for a family whose layers only transformers can make.
    """

    family: PresetFamily
    name: str
    about: str
    config: dict[str, Any] = field(repr=False)
    parameters: int | None = field(default=None, repr=False)


def shipped_presets(family: PresetFamily) -> tuple[Preset, ...]:
    """The presets of a family that ``presets.toml`` beside this module lists."""
    tables = dict(_presets()[family])
    every = dict(tables.pop("every"))
    every |= dict.fromkeys(every.pop("null", ()))
    return tuple(
        Preset(
            family,
            name,
            table["about"],
            every | {key: table[key] for key in table if key not in ("about", "parameters")},
            table.get("parameters"),
        )
        for name, table in tables.items()
    )


@cache
def _presets() -> dict[str, Any]:
    return tomllib.loads((files("dsx.models") / "presets.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class LayerParams:
    """Makes the ParamSpecs of one layer of the layer list, in the order of its module.

    Attributes:
        layer: Index in the layer list.
        block: Number of the block; 0 for other layers.
    """

    model: ModelSpec
    family: ModelFamily
    layer: int
    block: int = 0

    def table(self, role: str, pad_multiple: int) -> Iterator[ParamSpec]:
        """A vocabulary table: the word embedding, or the untied head (the same module class)."""
        yield self._spec(
            "word",
            "weight",
            (self.model.vocab_size, self.model.hidden_size),
            self._normal(),
            role=role,
            split=0,
            pad_multiple=pad_multiple,
            tie=TIE if self.model.tied_embeddings else None,
        )

    def norm(self, module: str, *, size: int | None = None) -> Iterator[ParamSpec]:
        """The weight of a norm, and the bias of a LayerNorm, replicated over tp.

        Args:
            module: Path in the layer's module.
            size: Elements; None for the hidden size.
        """
        leaves = {"weight": Init(kind="ones"), "bias": Init(kind="zeros")}
        for leaf in ("weight", "bias") if self.model.norm == "layernorm" else ("weight",):
            yield self._spec(module, leaf, (size or self.model.hidden_size,), leaves[leaf])

    def column(self, module: str, parts: Sequence[int], *, bias: bool) -> Iterator[ParamSpec]:
        """A linear cut along its outputs, with its fused parts."""
        fused = tuple(parts) if len(parts) > 1 else ()
        shapes = {"weight": (sum(parts), self.model.hidden_size), "bias": (sum(parts),)}
        for leaf in ("weight", "bias") if bias else ("weight",):
            matrix = leaf == "weight"
            init = self._normal() if matrix else Init(kind="zeros")
            yield self._spec(module, leaf, shapes[leaf], init, split=0, parts=fused, linear=matrix)

    def row(self, module: str, inputs: int, *, bias: bool) -> Iterator[ParamSpec]:
        """A linear cut along its inputs; its bias is replicated and added once, after the reduction."""
        hidden = self.model.hidden_size
        yield self._spec(module, "weight", (hidden, inputs), self._normal(), split=1, linear=True)
        if bias:
            yield self._spec(module, "bias", (hidden,), Init(kind="zeros"))

    def attention(self) -> Iterator[ParamSpec]:
        """The parameters of :class:`dsx.nn.attention.Attention`."""
        model = self.model
        qkv = (model.query_size, model.kv_size, model.kv_size)
        for fused in self.column("attention.qkv", qkv, bias=model.attention_bias):
            yield from _parted(fused) if model.shared_kv else (fused,)
        yield from self.row("attention.out", model.query_size, bias=model.attention_out_bias)
        if model.qk_norm:
            yield from self.norm("attention.q_norm", size=model.head_dim)
            yield from self.norm("attention.k_norm", size=model.head_dim)

    def mlp(self) -> Iterator[ParamSpec]:
        """The parameters of :class:`dsx.nn.block.Mlp`."""
        model = self.model
        width = model.ffn_size
        yield from self.column("mlp.gate_up", (width,) * 2, bias=model.mlp_bias)
        yield from self.row("mlp.down", width, bias=model.mlp_bias)

    def block_of(self) -> Iterator[ParamSpec]:
        """The parameters of :class:`dsx.nn.block.Block`."""
        yield from self.norm("norm_1")
        yield from self.attention()
        yield from self.norm("norm_2")
        yield from self.mlp()

    def _normal(self) -> Init:
        return Init(kind="normal", std=self.model.init_std)

    def _spec(
        self, module: str, leaf: str, shape: tuple[int, ...], init: Init, *, role: str = "", **cut: Any
    ) -> ParamSpec:
        """A parameter; ``role`` is the module's name in the family's ``hf_names`` where that is another."""
        hf = tuple(f"{name.format(self.block)}.{leaf}" for name in self.family.hf_names[role or module])
        name = f"{self.layer}.{module}.{leaf}"
        return ParamSpec(name=name, layer=self.layer, shape=shape, init=init, hf=hf, **cut)


def _parted(fused: ParamSpec) -> Iterator[ParamSpec]:
    """Queries of a fused parameter, which are cut, and its keys and values, whole on every rank."""
    module, _, leaf = fused.name.rpartition(".")
    queries, *both = fused.parts
    whole = {"hf": fused.hf[1:], "split": None, "hf_split": 0, "hf_parts": tuple(both)}
    for part, rows, first, changes in (
        ("q", queries, 0, {"hf": fused.hf[:1]}),
        ("kv", sum(both), queries, whole),
    ):
        init = replace(fused.init, part_of=fused.name, first_row=first)
        shape, name = (rows, *fused.shape[1:]), f"{module}.{part}_{leaf}"
        yield replace(fused, name=name, shape=shape, init=init, parts=(), **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A family of models.

    Attributes:
        name: The ``model_type`` of its configs.
        classes: transformers' classes, as config.json names them: the language model, and that without a
            head.
        keys: Every key that its config may have; others are refused if they look like one of any family's.
        read: Reads the architecture from a config whose keys have been checked.
        presets: Built-in models, smallest first.
        hf_names: Hugging Face module names by dsx's; ``{}`` is the block's number.
        fixed: The only accepted value of each key by which the model would compute what dsx does not.
    """

    name: Family
    classes: tuple[str, str]
    keys: frozenset[str]
    read: Callable[[Mapping[str, object]], ModelSpec]
    presets: tuple[Preset, ...]
    hf_names: Mapping[str, tuple[str, ...]]
    fixed: Mapping[str, object] = field(default_factory=dict)
