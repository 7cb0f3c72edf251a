"""The parameters of a model: name, shape, tensor-parallel cut, initial values and Hugging Face names of each.

The layer list, which is what a pipeline is cut into, for L blocks:

- GPT-2: 0 word embedding, 1 positions, 2 .. L+1 blocks, L+2 final norm, L+3 head.
- All others of dsx's own: 0 word embedding, 1 .. L blocks, L+1 final norm, L+2 head.
- Of transformers' modules: like one or the other, :attr:`dsx.models.spec.HubModel.kinds` says which.

With tied embeddings the head is the word embedding once more, and adds no parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from dsx.models.adapters import adapted
from dsx.models.family import LayerParams
from dsx.models.hf_config import FAMILIES
from dsx.models.param import ParamSpec
from dsx.models.spec import HubModel, Model, ModelSpec


def layer_kinds(model: Model) -> tuple[str, ...]:
    """Kind of every layer of the layer list, as a ``type:<regex>`` partition matches it."""
    if isinstance(model, HubModel):
        return model.kinds
    positions = () if model.rope else ("Positions",)
    return ("WordEmbedding", *positions, *["Block"] * model.num_layers, "FinalNorm", "Head")


def param_specs(model: Model, *, pad_multiple: int = 64) -> tuple[ParamSpec, ...]:
    """Every parameter of ``model``, in layer order and, within a layer, in its module's order.

    Those of an adapter follow the parameters of the module that it adapts.

    Args:
        model: The architecture.
        pad_multiple: Each tensor-parallel rank's vocabulary rows are rounded up to a multiple of this.
    """
    kinds = layer_kinds(model)
    if isinstance(model, HubModel):
        return adapted(_padded(model.params, pad_multiple), model.adapter)
    specs = (
        spec
        for layer, kind in enumerate(kinds)
        for spec in _layer(model, layer, kind, layer - kinds.index("Block"), pad_multiple)
    )
    return adapted(specs, model.adapter)


def stored_specs(model: Model, *, pad_multiple: int = 64) -> tuple[ParamSpec, ...]:
    """Every tensor that checkpoints hold: the parameters, and the buffers that are stored with them.

    Those of transformers' modules are in transformers' order, in which a stock engine numbers them.
    """
    if isinstance(model, HubModel):
        specs = {spec.name: spec for spec in (*model.params, *model.buffers)}
        return adapted(_padded((specs[name] for name in model.order), pad_multiple), model.adapter)
    return param_specs(model, pad_multiple=pad_multiple)


def _padded(specs: Iterable[ParamSpec], multiple: int) -> tuple[ParamSpec, ...]:
    return tuple(
        spec if spec.pad_multiple is None else replace(spec, pad_multiple=multiple) for spec in specs
    )


def _layer(model: ModelSpec, layer: int, kind: str, block: int, pad_multiple: int) -> Iterator[ParamSpec]:
    family = FAMILIES[model.family]
    params = LayerParams(model, family, layer, block if kind == "Block" else 0)
    if kind == "WordEmbedding":
        yield from params.table("word", pad_multiple)
    elif kind == "Positions":
        yield from params.positions()
    elif kind == "Block":
        yield from family.block(params)
    elif kind == "FinalNorm":
        yield from family.final_norm(params)
    elif not model.tied_embeddings:
        yield from params.table("head", pad_multiple)


def num_parameters(model: Model) -> int:
    """Elements of all parameters; tied ones count once, vocabulary padding not at all."""
    return sum(spec.numel for spec in param_specs(model))
