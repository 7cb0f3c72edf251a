"""Builds and records the layers of a model, each by what a record of it depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from dsx.errors import ModelError
from dsx.hub.context_probe import mixers
from dsx.memory import device as paper
from dsx.memory.device import DetachedExpertParallel, DetachedTensorParallel, fake_build
from dsx.memory.layer_record import LOSS, LayerRecord, LayerRequest, Shape, TensorForm
from dsx.memory.layer_recorder import record_layer
from dsx.models import families
from dsx.models.config_values import at
from dsx.models.params import layer_kinds, vocabulary_rows
from dsx.models.spec import HubModel
from dsx.models.transformers_settings import first_line
from dsx.nn import collectives
from dsx.nn.context import DetachedContextParallel
from dsx.nn.embedding import TiedUse
from dsx.nn.parallel import TensorParallel
from dsx.nn.quantized import quantize
from dsx.nn.split import WeightGradients

DEVICES = {"cuda": "meta", "cpu": "cpu"}
"""Where layers are recorded for each kind of device: a GPU's on what torch itself has without storage."""

_SUMS = 3
"""Rows of what an auxiliary loss is computed of (:mod:`dsx.hub.balance`)."""


def _built(
    frozen: Sequence[str],
    layer: type[nn.Module],
    *arguments: Any,
    use: Callable[..., Any] | None = None,
    **_: bool,
) -> nn.Module:
    """A layer of which ``frozen`` is not trained, and matrices quantised where their specs say so."""
    module = layer(*arguments)
    for path in frozen:
        module.get_parameter(path).requires_grad_(False)
    # Rows' scales are numbers, which ranks that are not there need not agree on.
    with paper.swapped(collectives, "start_all_reduce", lambda x, *_: collectives.done(x)):
        quantize(module)
    return module if use is None else TiedUse(module, use)


def _with_loss(shape: Shape, tp: TensorParallel, labels: TensorForm) -> dict[str, Any]:
    """How a head is recorded that computes the loss."""
    if not shape.loss_chunk:
        return {}
    loss = families.loss(shape.model, tp, overwrite_logits=True, chunk_tokens=shape.loss_chunk)
    return {"loss_fn": loss, "more": [labels], "category": "logits"}


def _loss(
    dtype: str, beside: Sequence[TensorForm], shape: Shape, tp: TensorParallel, labels: TensorForm
) -> LayerRecord:
    columns = vocabulary_rows(shape.model, shape.tensor, pad_multiple=shape.vocab_multiple)
    logits = TensorForm((*labels.shape, columns), dtype, shape.width, True)
    loss, device = families.loss(shape.model, tp, overwrite_logits=True), DEVICES[shape.device]
    with fake_build(device):
        return record_layer(loss, [logits, *beside], device=device, category="logits", more=[labels])


def record_request(request: LayerRequest) -> LayerRecord:
    """Build and record a layer of a model."""
    shape, device = request.shape, DEVICES[request.shape.device]
    model = shape.model
    tp = DetachedTensorParallel(size=shape.tensor, rank=0, sequence_parallel=shape.sequence_parallel)
    whole = TensorForm((shape.micro_batch, shape.sequence_length), "int64", 8, False)
    tokens = whole._replace(shape=(shape.micro_batch, shape.length))
    name = "bfloat16" if shape.width == 2 else "float32"
    positions, places = ([whole], [whole, whole]) if shape.documents else ([], [])
    hub = model if isinstance(model, HubModel) else None
    in_turn = hub is not None and any(each.passing for each in mixers(hub.config, shape.context))  # tries it
    balance = None if hub is None else hub.balance
    beside = [TensorForm((_SUMS, balance.experts), "float32", 4, request.entered)] if balance else []
    if request.kind == LOSS:
        return _loss(name, beside, shape, tp, tokens)
    split = WeightGradients() if request.divided else None
    length = shape.length // (shape.tensor if shape.cuts_sequence else 1)
    kinds = layer_kinds(model)
    index = kinds.index(request.kind) + (0 if hub is None else hub.block or 0)
    ends = {"Block": model.stream, "FinalNorm": model.stream, "Head": (model.head_size,)}
    sizes = ends.get(request.kind, (model.hidden_size,))
    if request.kind == "Positions" and hub is not None and hub.padding is not None:
        places = places or [whole]
    hidden = TensorForm((shape.micro_batch, length, *sizes), name, shape.width, request.entered)
    stream = [hidden, *beside, *places, *request.told]
    with fake_build(device, knows=bool(shape.pictures)):
        layers = families.layers(
            model,
            tp,
            dtype=getattr(torch, name),
            device=device,
            recompute=shape.recompute,
            pad_multiple=shape.vocab_multiple,
            split=split,
            entry=partial(partial, _built, request.frozen),
            cp=DetachedContextParallel.largest(shape.context, shape.context_method, in_turn=in_turn),
            ep=DetachedExpertParallel(shape.expert, imbalance=shape.imbalance),
            mlp_tiles=shape.mlp_tiles,
        )
        layer = layers[index]()
        inputs = [tokens, *positions] if kinds[0] == request.kind else stream
        if shape.pictures:
            layer.tower.fill_empty()
            inputs = [each.form for each in shape.pictures]
        try:
            how = {"divided": split, "hooked": request.hooked, "pictures": shape.pictures}
            return record_layer(layer, inputs, device=device, **how | _with_loss(shape, tp, tokens))
        except Exception as error:
            if hub is None:
                raise
            what = f"layer {index} ({request.kind}) cannot run without values"
            what += " and with its parameters gathered module by module (ZeRO-3)" if request.hooked else ""
            fix = "train it without an estimate: dsx knows no memory of this family in this layout"
            raise ModelError(at("model_type", hub.family), f"{what}: {first_line(error)}", fix) from error
