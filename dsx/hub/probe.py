"""A family tried before it is trained: one process, a small model, no weights, seconds.

The layers of the layer list, one after another, must give what transformers' own forward and backward give:
logits, loss and every gradient. And a block must give the same for each slice of a sequence as for the whole,
if what mixes tokens in it gets the whole one: only then may sequence parallelism cut it.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsx.errors import ConfigError, DsxError, ModelError
from dsx.hub.anatomy import BlockCall, anatomy_of
from dsx.hub.layers import hidden_of
from dsx.hub.read import block_plan, hub_model
from dsx.hub.shrunk import random_keys, random_model, shrunk
from dsx.hub.tensor_plan import mixing_children
from dsx.memory.record_cache import code_version, keep
from dsx.models import families
from dsx.models.config_values import at
from dsx.models.param import ParamSpec
from dsx.models.params import param_specs
from dsx.models.quiet_transformers import first_line, torch_forms
from dsx.models.spec import HubModel
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import take_part

_SAMPLES, _TOKENS = 2, 16
_TOLERANCE = 1e-4
_ALONE = TensorParallel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What trying a small model of a config showed.

    Attributes:
        differs: What the layer list computes otherwise than transformers; None if nothing.
        no_sequence: Why sequence parallelism would be wrong; None if it is right.
        no_documents: Why documents of a pack cannot be kept apart; None if they can.
        blocks: Blocks of the small model.
        parameters: Its parameters.
    """

    differs: str | None
    no_sequence: str | None
    no_documents: str | None
    blocks: int
    parameters: int


@torch_forms()
def probe(config: Mapping[str, Any], tensor_plan: Mapping[str, str | None] | None = None) -> Probe:
    """Try a small model of a config's family and structure.

    Args:
        config: Content of the config.json of a causal language model.
        tensor_plan: As of :func:`dsx.hub.read.hub_model`.

    Raises:
        ModelError: dsx cannot cut the model, or transformers makes no small one, or does not run it.
    """
    try:
        small = shrunk(config, window=_TOKENS // 2)
        small |= dict.fromkeys(random_keys(small), 0.0)
        model, whole = hub_model(small, tensor_plan), random_model(small)
        return Probe(
            differs=_difference(model, whole),
            no_sequence=model.no_sequence or _sequence_problem(model, whole),
            no_documents=_documents_problem(model, whole),
            blocks=model.num_layers,
            parameters=sum(spec.numel for spec in model.params),
        )
    except DsxError:
        raise
    except Exception as error:  # whatever the family's code does on this machine
        where = at("model_type", config.get("model_type"))
        what = f"a small model of it does not run ({first_line(error)})"
        raise ModelError(where, what, "use its own size") from error


def require_probed(model: HubModel, *, sequence: bool, documents: bool) -> None:
    """Refuse a model whose layer list is not what transformers computes.

    Args:
        model: The model.
        sequence: Whether tensor-parallel ranks cut the sequence, which must then be right too.
        documents: Whether packs hold documents that are kept apart, likewise.

    What a probe showed is kept in the user's cache, by the config and the versions.

    One of which no small model can be tried here is let through, as its structure has been looked at, but
    not with a cut sequence or with documents apart.

    Raises:
        ConfigError: The sequence cannot be cut, or documents not be kept apart.
        ModelError: It differs; names what and by how much.
    """
    place = _place(model)
    try:
        found = Probe(**json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        try:
            found = probe(json.loads(model.config), dict(model.tensor_plan))
        except DsxError as error:
            told = (
                f"whether that is right is not known, as no small model of it could be tried ({error.what})"
            )
            found = Probe(differs=None, no_sequence=told, no_documents=told, blocks=0, parameters=0)
        else:
            keep(place, json.dumps({name: getattr(found, name) for name in Probe.__slots__}))
    if found.differs is not None:
        raise ModelError(
            at("model_type", model.family),
            f"its layers one after another are not what transformers computes: {found.differs}",
            "use another family",
        )
    if sequence and found.no_sequence is not None:
        raise ConfigError(
            at("dsx.parallel.sequence_parallel", True),
            f"{model.family}: {found.no_sequence}",
            "set it to false",
        )
    if documents and found.no_documents is not None:
        raise ConfigError(
            at("dsx.data.documents", "apart"), f"{model.family}: {found.no_documents}", 'use "joined"'
        )


def _place(model: HubModel) -> Path:
    name = hashlib.sha256(repr((model.config, model.tensor_plan)).encode()).hexdigest()[:32]
    return Path.home() / ".cache" / "dsx" / "probes" / code_version() / f"{name}.json"


def _ids(model: HubModel) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, model.vocab_size, (_SAMPLES, _TOKENS + 1), generator=generator)


def _difference(model: HubModel, whole: Any) -> str | None:
    """What the layer list computes otherwise than transformers' model of the same weights."""
    ids = _ids(model)
    inputs, labels = ids[:, :-1], ids[:, 1:]
    try:
        logits, loss = loss_of(whole, inputs, labels)
        loss.backward()
    except Exception as error:  # noqa: BLE001 - whatever the family's code does
        raise ModelError(
            at("model_type", model.family),
            f"transformers itself does not run a small model of it ({first_line(error)})",
            "use its own size",
        ) from None
    value: Any = inputs
    try:
        calls, parameters = layers_of(model, whole)
        for call in calls:
            value = call(value)
        own = families.loss(model, TensorParallel())(value, labels)
        own.backward()
    except Exception as error:  # noqa: BLE001 - whatever the family's code does where it is cut
        return f"they do not run ({first_line(error)})"
    found = dict(whole.named_parameters(remove_duplicate=False))
    pairs: list[tuple[str, Any, Any]] = [("the logits differ", hidden_of(value), logits)]
    pairs.append(("the loss differs", own, loss))
    pairs += [
        (f"the gradient of {spec.hf_whole} differs", one.grad, found[spec.hf_whole].grad)
        for spec, one in parameters
    ]
    return next((f"{what} {told}" for what, a, b in pairs if (told := _far(a, b))), None)


def loss_of(whole: Any, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of transformers' model, and its loss with the auxiliary loss of its routers if it has one."""
    gave = whole(input_ids=inputs, use_cache=False)
    logits = gave.logits.float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    extra = getattr(gave, "aux_loss", None)
    return logits, loss if extra is None else loss + whole.router_aux_loss_coef * extra


def _far(own: Tensor | None, other: Tensor | None) -> str | None:
    """How far two tensors are from each other, relative to the largest element; None if they are equal."""
    if own is None or other is None:
        there = next((each for each in (own, other) if each is not None), None)
        return None if there is None or not there.any() else "as one of them has none"
    own, other = own.detach(), other.detach()
    off = float((own - other).abs().max() / other.abs().max().clamp_min(1e-12))
    tiny = bool((own - other).abs().max() < _TOLERANCE * 1e-3)
    return None if off <= _TOLERANCE or tiny else f"by {off:.1e} of its largest element"


def layers_of(
    model: HubModel, whole: Any, tp: TensorParallel = _ALONE
) -> tuple[list[Callable[[Tensor], Tensor]], list[tuple[ParamSpec, nn.Parameter]]]:
    """A rank's layer list with the weights of transformers' model, and its parameters with what they are."""
    builder = families.LayerListBuilder(
        model=model,
        tp=tp,
        dtype=torch.float32,
        device="cpu",
        seed=0,
        recompute="none",
        pad_multiple=1,
    )
    calls: list[Callable[[Tensor], Tensor]] = []
    parameters: list[tuple[ParamSpec, nn.Parameter]] = []
    buffers = dict(whole.named_buffers())
    anatomy, tied = anatomy_of(model.config), None
    for layer, entry in enumerate(builder.entries()):
        module = tied if entry.tied and tied is not None else entry.build()
        assert module is not None
        tied = module if entry.tied else tied
        use = entry.forward_fn
        calls.append(module if use is None else partial(use, module))
        if entry.tied and use is not None:
            continue
        with torch.no_grad():
            for spec in (spec for spec in param_specs(model, pad_multiple=1) if spec.layer == layer):
                parameter = module.get_parameter(spec.name.partition(".")[2])
                values = whole.get_parameter(spec.hf_whole)
                take_part(parameter, values, spec, tp=tp.size, tp_rank=tp.rank)
                parameters.append((spec, parameter))
            if model.kinds[layer] == "Block":
                prefix = f"{anatomy.blocks}.{layer - model.kinds.index('Block')}"
                for path, buffer in module.named_buffers():
                    buffer.copy_(buffers[f"{prefix}.{path.partition('.')[2]}"])
    return calls, parameters


def _documents_problem(model: HubModel, whole: Any) -> str | None:
    """Why documents of a pack would not be kept apart: a pack of two beside each by itself."""
    if not anatomy_of(model.config).takes_positions:
        return "the family's forward is not told positions, so that it cannot know where documents begin"
    ids, half = _ids(model)[:, :-1], _TOKENS // 2 - 1
    parts = (ids[:, :half], ids[:, half:])
    positions = torch.cat([torch.arange(part.shape[1]).expand(part.shape) for part in parts], dim=1)
    value: Any = (ids, positions)
    try:
        with torch.no_grad():
            for call in layers_of(model, whole)[0]:
                value = call(value)
            alone = torch.cat([whole(input_ids=part, use_cache=False).logits for part in parts], dim=1)
    except Exception as error:  # noqa: BLE001 - whatever the family's code does with positions that restart
        return f"it does not run on packs of documents ({first_line(error)})"
    told = _far(hidden_of(value), alone.float())
    return None if told is None else f"a document sees others of its pack: its logits differ {told}"


def _sequence_problem(model: HubModel, whole: Any) -> str | None:
    """Why a block may not be given a slice of the sequence; None if every kind of block may."""
    anatomy = anatomy_of(model.config)
    blocks = whole.get_submodule(anatomy.blocks)
    calls: dict[int, BlockCall] = {}
    handles = [
        block.register_forward_pre_hook(partial(_noted, calls, number), with_kwargs=True)
        for number, block in enumerate(blocks)
    ]
    with torch.no_grad():
        whole(input_ids=_ids(model)[:, :-1], use_cache=False)
        for handle in handles:
            handle.remove()
        for number in sorted(set(model.alike)):
            plan = block_plan(model, anatomy, number)
            alone = copy.deepcopy(blocks[number])
            mixing = dict(mixing_children(alone, plan))
            try:
                told = _sliced(alone, mixing, calls[number])
            except Exception as error:  # noqa: BLE001 - whatever the family's code does with a slice
                told = f"does not run on a slice of the sequence ({first_line(error)})"
            if told is not None:
                return f"block {number} {told}"
    return None


def _noted(calls: dict[int, BlockCall], number: int, _module: nn.Module, given: Any, named: Any) -> None:
    calls[number] = BlockCall.of(given, named)


def _sliced(block: nn.Module, mixing: Mapping[str, nn.Module], call: BlockCall) -> str | None:
    """How a block's outputs for slices differ from those for the whole sequence."""
    seen: dict[str, list[tuple[Tensor, Any]]] = {name: [] for name in mixing}
    hooks = [
        child.register_forward_hook(partial(_seen, seen[name]), with_kwargs=True)
        for name, child in mixing.items()
    ]
    whole = hidden_of(call.make(block, call.hidden))
    for hook in hooks:
        hook.remove()
    half = call.hidden.shape[1] // 2
    for part in (slice(0, half), slice(half, None)):
        uses = {name: iter(list(calls)) for name, calls in seen.items()}
        wrong: list[str] = []
        kept = {name: child.forward for name, child in mixing.items()}
        for name, child in mixing.items():
            child.forward = partial(_fed, name, uses[name], part, wrong)
        y = hidden_of(call.make(block, call.hidden[:, part]))
        for name, child in mixing.items():
            child.forward = kept[name]
        if wrong:
            return f"gives {wrong[0]} something else for a slice of the sequence than for the whole"
        if (told := _far(y, whole[:, part])) is not None:
            return f"mixes tokens outside of {', '.join(mixing) or 'its modules'}: its output differs {told}"
    return None


def _first(given: Any, named: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments: those that :func:`dsx.hub.tensor_plan.apply_plan` gathers."""
    x: Tensor = given[0] if given else next(v for v in named.values() if isinstance(v, Tensor))
    return x


def _seen(into: list[tuple[Tensor, Any]], _module: nn.Module, given: Any, named: Any, gave: Any) -> None:
    into.append((_first(given, named), gave))


def _fed(
    name: str, uses: Iterator[tuple[Tensor, Any]], part: slice, wrong: list[str], *given: Any, **named: Any
) -> Any:
    """What a module gave in the whole run, cut to the slice, after a look at what it is given now."""
    x, gave = next(uses)
    mine = _first(given, named)
    if mine.shape != x[:, part].shape or _far(mine, x[:, part]) is not None:
        wrong.append(name)
    if isinstance(gave, tuple):
        return (gave[0][:, part], *gave[1:])
    return gave[:, part]
