"""The parameters of a model: name, shape, tensor-parallel cut, initial values and Hugging Face names of each.

The layer list, which is what a pipeline is cut into, for L blocks:

- Of dsx's own modules: 0 word embedding, 1 .. L blocks, L+1 final norm, L+2 head.
- Of transformers' modules: the same, or with what the family does before its blocks as layer 1
  (:attr:`dsx.models.spec.HubModel.kinds`).

With tied embeddings the head is the word embedding once more, and adds no parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile

from dsx.models.family import LayerParams
from dsx.models.hf_config import FAMILIES
from dsx.models.param import PRECISIONS, ParamSpec
from dsx.models.spec import Adapter, HubModel, Model, ModelSpec
from dsx.parallel.mesh import Mesh


def layer_kinds(model: Model) -> tuple[str, ...]:
    """Kind of every layer of the layer list, as a ``type:<regex>`` partition matches it."""
    if isinstance(model, HubModel):
        return model.kinds
    return ("WordEmbedding", *["Block"] * model.num_layers, "FinalNorm", "Head")


def param_specs(model: Model, *, pad_multiple: int = 64) -> tuple[ParamSpec, ...]:
    """Every parameter of ``model``, in layer order and, within a layer, in its module's order.

    Those of an adapter follow the parameters of the module that it adapts. One of the model's own is not
    trained if one of its ``freeze`` is found in all of the parameter's Hugging Face names.

    Args:
        model: The architecture.
        pad_multiple: Each tensor-parallel rank's vocabulary rows are rounded up to a multiple of this.
    """
    if isinstance(model, HubModel):
        return _settled(_padded(model.params, pad_multiple), model)
    try:
        return _own_specs(model, pad_multiple)
    except TypeError:  # read from a checkpoint, it has dictionaries, which nothing is kept by
        return _own_specs.__wrapped__(model, pad_multiple)


@lru_cache(maxsize=16)
def _own_specs(model: ModelSpec, pad_multiple: int) -> tuple[ParamSpec, ...]:
    """Kept, because a plan asks hundreds of times for thousands of parameters."""
    kinds = layer_kinds(model)
    specs = (
        spec
        for layer, kind in enumerate(kinds)
        for spec in _layer(model, layer, kind, layer - kinds.index("Block"), pad_multiple)
    )
    return _settled(specs, model)


def vocabulary_rows(model: Model, tensor: int, *, pad_multiple: int) -> int:
    """Rows of the vocabulary's tables on one of ``tensor`` ranks, padding included: columns of its logits."""
    if isinstance(model, HubModel):
        (word,) = _padded(model.params[:1], pad_multiple)
    else:
        (word,) = _layer(model, 0, "WordEmbedding", 0, pad_multiple)
    return word.local_extent(Mesh.of(tp=tensor).at())


def stored_specs(model: Model, *, pad_multiple: int = 64) -> tuple[ParamSpec, ...]:
    """Every tensor that checkpoints hold: the parameters, and the buffers that are stored with them.

    Those of transformers' modules are in transformers' order, in which a stock engine numbers them.
    """
    if isinstance(model, HubModel):
        specs = {spec.name: spec for spec in (*model.params, *model.buffers)}
        return _settled(_padded((specs[name] for name in model.order), pad_multiple), model)
    return param_specs(model, pad_multiple=pad_multiple)


def _padded(specs: Iterable[ParamSpec], multiple: int) -> tuple[ParamSpec, ...]:
    return tuple(
        spec if spec.pad_multiple is None else replace(spec, pad_multiple=multiple) for spec in specs
    )


def _settled(specs: Iterable[ParamSpec], model: Model) -> tuple[ParamSpec, ...]:
    """A model's parameters and its adapter's; of what is frozen it is said that it is not trained."""
    if model.freeze:
        specs = (
            replace(spec, trained=spec.buffer or not all(frozen_names(spec, model.freeze).values()))
            for spec in specs
        )
    if model.adapter is None:
        return _with_tower(specs, model)
    from dsx.models.adapters import adapted  # here: other models need nothing of it

    return _with_tower(adapted(specs, model.adapter), model)


def tower_specs(model: Model) -> tuple[ParamSpec, ...]:
    """What is trained of the tower of pictures; the rest of it is no parameter of a run."""
    held = model.tower_params
    if held and model.adapter is not None:
        from dsx.models.adapters import adapted  # as above

        held = adapted((replace(spec, trained=True) for spec in held), model.adapter)
    return tuple(spec for spec in held if spec.trained and not spec.buffer)


def _with_tower(specs: Iterable[ParamSpec], model: Model) -> tuple[ParamSpec, ...]:
    """What is trained of the tower stands behind the other parameters of the first layer."""
    found = tuple(specs)
    first = sum(1 for _ in takewhile(lambda spec: spec.layer == 0, found))
    return (*found[:first], *tower_specs(model), *found[first:])


@lru_cache(maxsize=8)
def layer_adapters(model: Model) -> tuple[Adapter | None, ...]:
    """For every layer what the model's adapter says of it, alike where it treats layers alike."""
    adapter, kinds = model.adapter, layer_kinds(model)
    if adapter is None:
        return (None,) * len(kinds)
    from dsx.models.adapters import of_layer  # as above

    held: list[list[ParamSpec]] = [[] for _ in kinds]
    for spec in param_specs(model):
        held[spec.layer].append(spec)
    if model.tied_embeddings:
        held[-1] = held[0]
    found = tuple(of_layer(adapter, specs) for specs in held)
    return (adapter, *found[1:]) if tower_specs(model) else found


def in_float32(model: Model, precision: str) -> tuple[ParamSpec, ...]:
    """Parameters that stay in float32 in a run of ``bf16`` or ``fp16``, as their family has them."""
    return tuple(spec for spec in param_specs(model) if PRECISIONS[precision] in spec.float32)


def frozen_names(spec: ParamSpec, freeze: Iterable[str]) -> dict[str, bool]:
    """The Hugging Face names of a parameter, each with whether a regular expression is found in it.

    If one is found in the name that transformers' module has for a tensor whose parts have names of their
    own in files, it is found in all. In those of the tower none is, which are parameters if they are trained.
    """
    if spec.tower:
        return dict.fromkeys(spec.hf, False)
    patterns = [re.compile(pattern) for pattern in freeze]
    whole = any(pattern.search(spec.hf_whole) for pattern in patterns if spec.hf_whole)
    return {name: whole or any(pattern.search(name) for pattern in patterns) for name in spec.hf}


def _layer(model: ModelSpec, layer: int, kind: str, block: int, pad_multiple: int) -> Iterator[ParamSpec]:
    family = FAMILIES[model.family]
    params = LayerParams(model, family, layer, block if kind == "Block" else 0)
    if kind == "WordEmbedding":
        yield from params.table("word", pad_multiple)
    elif kind == "Block":
        yield from params.block_of()
    elif kind == "FinalNorm":
        yield from params.norm("norm")
    elif not model.tied_embeddings:
        yield from params.table("head", pad_multiple)


def num_parameters(model: Model) -> int:
    """Elements of all parameters; tied ones count once, vocabulary padding not at all."""
    return sum(spec.numel for spec in param_specs(model))
