"""What a layout is compared with: one process, torch's autograd and optimizer over the whole model.

For dsx's families it is the transformers model of the same Hugging Face config: none of dsx's layers, engine,
masks or schedules. Documents that are kept apart are run one by one, and an adapter is added to the weights.
For a list of layers it is those layers, called in order.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime import lr_schedules
from torch import Tensor, nn
from torch.func import functional_call

from dsx.checkpoint.formats import slices
from dsx.checkpoint.formats.huggingface import names
from dsx.checkpoint.formats.huggingface import weights as hf
from dsx.config.run import RunConfig
from dsx.errors import DsxError, ModelError
from dsx.hub.experts import tallies_of
from dsx.hub.model_structure import structure_of
from dsx.models import adapters, families
from dsx.models.config_values import at
from dsx.models.custom_code import without_code
from dsx.models.param import ParamSpec
from dsx.models.spec import HubModel, ModelSpec
from dsx.models.transformers_settings import first_line
from dsx.nn import parameters
from dsx.nn.adapter import merged
from dsx.nn.loss import TokenMean
from dsx.nn.parallel import TensorParallel
from dsx.parallel.mesh import ALONE

_TORCH = {"adam": "AdamW", "adamw": "AdamW", "adagrad": "Adagrad"}
_NOT_TORCHS = {"torch_adam", "adam_w_mode", "fused", "fp32_optimizer_states"}


class Updates:
    """torch's optimizer of the config's kind, with DeepSpeed's learning-rate schedule, in one process."""

    def __init__(self, deepspeed: Mapping[str, Any]) -> None:
        block = deepspeed["optimizer"]
        self._kind = str(block["type"])
        self._options = {k: v for k, v in block.get("params", {}).items() if k not in _NOT_TORCHS}
        if isinstance(self._options.get("betas"), list):
            self._options["betas"] = tuple(self._options["betas"])
        self._scheduler_block = deepspeed.get("scheduler") or {}
        self._decoupled = block.get("params", {}).get("adam_w_mode", True) or self._kind.lower() == "adamw"
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        self._parameters: dict[str, torch.nn.Parameter] = {}

    @property
    def is_known(self) -> bool:
        """Whether torch has this optimizer; without it, updates are not compared."""
        return self._class() is not None

    @property
    def title(self) -> str:
        found = self._class()
        return "none: torch has no " + self._kind if found is None else f"torch.optim.{found.__name__}"

    def step(self, before: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values after a step from ``before`` by ``gradients``; moments are kept from call to call."""
        if self._optimizer is None:
            self._parameters = {
                name: torch.nn.Parameter(torch.zeros_like(values)) for name, values in before.items()
            }
            made = self._class()
            assert made is not None
            self._optimizer = made(self._parameters.values(), **self._options)
            self._scheduler = self._schedule(self._optimizer)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(before[name])
                parameter.grad = gradients[name].clone() if name in gradients else None
        self._optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def advance(self) -> None:
        """Take the schedule's next learning rate, after a step."""
        if self._scheduler is not None:
            self._scheduler.step()

    def of_step(self, key: str) -> float:
        """``lr`` or ``weight_decay`` of the step to come; 0 before the first and of an optimizer without."""
        return 0.0 if self._optimizer is None else float(self._optimizer.param_groups[0].get(key, 0.0))

    def _class(self) -> Any:
        kind = self._kind.lower()
        if kind == "adam" and not self._decoupled:
            return torch.optim.Adam
        return getattr(torch.optim, _TORCH.get(kind, self._kind), None)

    def _schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        kind, params = self._scheduler_block.get("type"), self._scheduler_block.get("params", {})
        if kind is None:
            return None
        maker = getattr(lr_schedules, kind, None) or getattr(torch.optim.lr_scheduler, kind)
        return maker(optimizer, **params)


Batch = tuple[Any, Any]
"""(inputs, labels)."""

_IGNORED = -100
_NOTHING: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The mean loss of some micro-batches, and its gradient.

    Attributes:
        gradients: The gradients by logical tensor; tensors without one are left out.
        outputs: Layer -> its output for the first micro-batch, where the reference has such layers.
        biases: Of routers, by block and path, after the step.
    """

    loss: float
    gradients: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)


class ReferenceFailedError(ModelError):
    """transformers itself does not run the model that a layout was to be compared with."""


@contextmanager
def _of_transformers(family: str) -> Iterator[None]:
    """Whatever fails inside is said to be transformers' own failure, in which no layout has a part."""
    try:
        yield
    except DsxError:
        raise
    except Exception as error:
        raise ReferenceFailedError(
            at("model_type", family),
            f"transformers itself does not run what it is compared with ({first_line(error)})",
            "look at the config beside what transformers documents of this family",
        ) from error


class Transformers:
    """The transformers model of a config of dsx's families, in float32."""

    def __init__(self, config: RunConfig) -> None:
        from dsx.hub.model_structure import with_weights

        # They are for generation, and may be cut off.
        tokens = ("bos_token_id", "eos_token_id") if isinstance(config.model, ModelSpec) else ()
        settings = {**without_code(config.hf_config), **dict.fromkeys(tokens)}
        self._family = config.model.family
        with _of_transformers(self._family):
            self._model = with_weights(settings)
        self._routers = ReferenceRouters(self._model, config)
        self._balanced = bool(getattr(self._model.config, "output_router_logits", False))
        held = dict(self._model.named_parameters())
        specs, freeze = config.param_specs, config.model.freeze
        if freeze and config.model.adapter is None:
            specs = tuple(replace(spec, trained=not _is_frozen(spec, freeze)) for spec in specs)
        self._specs = tuple(spec if spec.adapts else names.in_memory(spec) for spec in specs)
        self._adapter: Any = config.model.adapter
        if self._adapter is not None:  # PEFT's LoraLayer.update_layer, and not dsx's property of an adapter
            root = self._adapter.rank ** (0.5 if self._adapter.rslora else 1.0)
            self._adapter = SimpleNamespace(type=self._adapter.type, scale=self._adapter.alpha / root)
        self._parameters: dict[str, nn.Parameter] = {}
        for spec in self._specs:
            if spec.adapts:
                parts = hf.split(spec, torch.zeros(spec.shape))
                self._parameters |= {name: nn.Parameter(values.clone()) for name, values in parts.items()}
                continue
            for name in spec.hf:
                # Specs have the names of files, where GPT-NeoX's head has another one than in the model.
                own = next(held[other] for other in names.stored_names(spec, name) if other in held)
                self._parameters[name] = own.requires_grad_(spec.trained)
        self.title = f"transformers {type(self._model).__name__}, one process, fp32"
        if self._adapter is not None:
            self.title += ", weights with " + {"lora": "LoRA", "dora": "DoRA"}[self._adapter.type]
        self.order = tuple(spec.name for spec in specs)
        self.frozen = frozenset(spec.name for spec in specs if not spec.trained)

    @property
    def whole(self) -> Any:
        return self._model

    def weights(self) -> dict[str, Tensor]:
        found = {spec.name: hf.join(spec, lambda name: self._parameters[name]) for spec in self._specs}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def evaluate(
        self, weights: Mapping[str, Tensor], batches: Sequence[Batch], among: Sequence[Batch] | None = None
    ) -> Evaluation:
        """Loss and gradient at these weights, and routers' biases, over the micro-batches' trained tokens.

        ``among``: the micro-batches whose average number of trained tokens counts, in place of ``batches``.

        Raises:
            ModelError: The family's own code fails.
        """
        self._load(weights)
        self._model.zero_grad(set_to_none=True)
        for parameter in self._parameters.values():
            parameter.grad = None
        tokens = _average_tokens(among or batches, _trained)
        made = dict(self._changed_weights())
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in made.items()}
        total = 0.0
        self._routers.begin(weights)
        for batch, times in _counted(batches):
            for ids, labels in _documents(batch):
                with _of_transformers(self._family):
                    outputs = self._outputs(ids, leaves)
                    loss = _summed(outputs.logits, labels) / tokens
                    extra = getattr(outputs, "aux_loss", None)
                    if extra is not None and self._balanced:  # of routers
                        loss = loss + self._model.router_aux_loss_coef * extra
                    loss = loss + self._routers.z_loss() * ids.numel() / batch[1].numel()
                    loss = loss * times / len(batches)
                    loss.backward()
                total += loss.item()
            self._routers.count(times)
        used = [name for name, leaf in leaves.items() if leaf.grad is not None]
        if used:
            torch.autograd.backward([made[name] for name in used], [leaves[name].grad for name in used])
        gradients = {
            spec.name: hf.join(spec, lambda name: self._parameters[name].grad)
            for spec in self._specs
            if spec.trained
        }
        found = {name: each for name, each in gradients.items() if each is not None}
        return Evaluation(loss=total, gradients=found, biases=self._routers.moved())

    @torch.no_grad()
    def supposed_losses(
        self,
        weights: Mapping[str, Tensor],
        batches: Sequence[Batch],
        *,
        bias_factor: float = 1.0,
        padded_columns: int = 0,
        joined: Literal["", "attention", "wholly"] = "",
    ) -> Tensor:
        """Losses under a mistake: of every micro-batch the sum and the number of its tokens, [batches, 2].

        Mistakes: row-parallel biases times ``bias_factor``, padding in the softmax, or documents ``joined``
        in attention alone or with their positions.
        """
        changed = dict(weights)
        for spec in self._specs:
            if is_row_bias(spec, self._specs):
                changed[spec.name] = weights[spec.name] * bias_factor
        self._load(changed)
        made, found = dict(self._changed_weights()), []
        for inputs, labels in batches:
            ids, more = inputs, {}
            if joined:
                ids, positions = inputs
                # With a mask that masks nothing, transformers does not look for documents in positions.
                if joined == "attention":
                    more = {"position_ids": positions, "attention_mask": torch.ones_like(ids)}
            loss = 0.0
            for own, wanted in _documents((ids, labels)):
                logits = self._outputs(own, made, more).logits
                loss += float(_summed(F.pad(logits, (0, padded_columns)), wanted))
            found.append((loss, int(_trained(labels))))
        return torch.tensor(found, dtype=torch.float64)

    @property
    def takes_positions(self) -> bool:
        """Whether the family's model can be told positions."""
        return "position_ids" in signature(self._model.forward).parameters

    def _outputs(
        self, ids: Tensor, changed: Mapping[str, Tensor], more: Mapping[str, Tensor] = _NOTHING
    ) -> Any:
        given = {"input_ids": ids, "use_cache": False, **self._routers.asked, **more}
        return functional_call(self._model, dict(changed), (), given)

    def _changed_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The matrices that have an adapter, with it, by name."""
        for name, start, crossed in adapters.homes(self._specs) if self._adapter is not None else ():
            weight = self._model.get_parameter(name)
            whole = merged(self._adapter, weight.t() if crossed else weight, self._parameters, start)
            yield name, whole.t() if crossed else whole

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Tensor]) -> None:
        for spec in self._specs:
            for name, values in hf.split(spec, weights[spec.name]).items():
                self._parameters[name].copy_(values)


def _is_frozen(spec: ParamSpec, freeze: Sequence[str]) -> bool:
    """Whether patterns are found in a parameter's name, searched here and not by what the layout goes by."""
    whole, *parts = (any(re.search(each, name) for each in freeze) for name in (spec.hf_whole, *spec.hf))
    return (bool(spec.hf_whole) and whole) or all(parts)


def _documents(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and labels [1, length] of every document by itself; where none are kept apart, the micro-batch."""
    inputs, labels = batch
    if isinstance(inputs, Tensor):
        yield inputs, labels
        return
    ids, positions = inputs
    for row, own in enumerate(positions):
        for begin, end in pairwise([*(own == 0).nonzero().flatten().tolist(), len(own)]):
            yield ids[row : row + 1, begin:end], labels[row : row + 1, begin:end]


def _counted(batches: Sequence[Batch]) -> Iterator[tuple[Batch, int]]:
    """The different micro-batches, and how often each is there."""
    times = Counter(map(id, batches))
    return ((batch, times[one]) for one, batch in {id(batch): batch for batch in batches}.items())


def _summed(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of trained tokens."""
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, labels.flatten(), ignore_index=_IGNORED, reduction="sum")


def _trained(labels: Tensor) -> Tensor:
    """How many labels are trained, counted here and not by dsx's loss, which is what is compared."""
    return (labels != _IGNORED).sum()


def _average_tokens(batches: Sequence[Batch], count: Callable[[Any], Tensor]) -> Tensor:
    """The trained tokens of an average micro-batch; at least one is counted."""
    counts = torch.stack([count(labels) for _, labels in batches])
    return counts.sum().clamp(min=1).double().div(len(batches)).float()


class ReferenceLayers:
    """A list of layers as a PipelineModule takes it, called one after the other.

    Args:
        loss_fn: ``loss_fn(outputs, labels)``; None means that the outputs are the loss.
        before: Called with each layer's index before it is built.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        loss_fn: Callable[..., Tensor] | None,
        title: str,
        before: Callable[[int], None] | None = None,
    ) -> None:
        self.title = title
        self._loss_fn = loss_fn
        self._tied: dict[str, nn.Module] = {}
        self._calls: list[Callable[..., Any]] = []
        self._parameters: dict[str, nn.Parameter] = {}
        for index, layer in enumerate(layers):
            if before is not None:
                before(index)
            self._add(index, layer)
        self.order = tuple(self._parameters)
        self.frozen = frozenset(name for name, each in self._parameters.items() if not each.requires_grad)

    def _add(self, index: int, layer: Any) -> None:
        prefix = str(index)
        if isinstance(layer, TiedLayerSpec):
            prefix = f"tied_modules.{layer.key}"
            if layer.key not in self._tied:
                self._tied[layer.key] = layer.build()
            module: Any = self._tied[layer.key]
            function = layer.forward_fn
            self._calls.append(module if function is None else lambda x: function(module, x))
        else:
            module = layer.build() if isinstance(layer, LayerSpec) else layer
            self._calls.append(module)
        if isinstance(module, nn.Module):
            for path, parameter in module.named_parameters():
                spec = getattr(parameter, "dsx_spec", None)
                self._parameters[spec.name if spec is not None else f"{prefix}.{path}"] = parameter

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def evaluate(
        self, weights: Mapping[str, Tensor], batches: Sequence[Batch], among: Sequence[Batch] | None = None
    ) -> Evaluation:
        """Loss and gradient at these weights, and the layers' outputs for the first micro-batch.

        ``among``: as of :meth:`Transformers.evaluate`, for a loss that is a mean over tokens.
        """
        counted: dict[str, Tensor] = {}
        if isinstance(self._loss_fn, TokenMean):
            counted["num_tokens"] = _average_tokens(among or batches, self._loss_fn.count)
        self._load(weights)
        for parameter in self._parameters.values():
            parameter.grad = None
        total = 0.0
        outputs: dict[str, Tensor] = {}
        for inputs, labels in batches:
            value = copy.deepcopy(inputs)
            for index, call in enumerate(self._calls):
                value = call(value)
                first = value[0] if isinstance(value, tuple) else value
                if isinstance(first, Tensor) and first.is_floating_point():
                    outputs.setdefault(str(index), first.detach().float().clone())
            loss = value if self._loss_fn is None else self._loss_fn(value, labels, **counted)
            loss = loss / len(batches)
            loss.backward()
            total += loss.item()
        gradients = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                spec = getattr(parameter, "dsx_spec", None)
                grad = parameter.grad.detach().float()
                gradients[name] = grad.clone() if spec is None else slices.merge(spec, [grad])
        return Evaluation(loss=total, gradients=gradients, outputs=outputs)

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            spec = getattr(parameter, "dsx_spec", None)
            parameter.copy_(weights[name] if spec is None else slices.part_of(spec, weights[name], ALONE))


Reference = Transformers | ReferenceLayers
"""One process."""


def family_layers(config: RunConfig) -> ReferenceLayers:
    """Dsx's own layers of a config, whole, in one process, which give the right output of every layer."""
    alone = TensorParallel()
    layers = families.layers(
        config.model,
        alone,
        dtype=torch.float32,
        seed=config.dsx.train.seed,
        pad_multiple=config.dsx.model.vocab_multiple,
    )
    return ReferenceLayers(layers, families.loss(config.model, alone), "dsx's layers, one process, fp32")


def fresh_weights(config: RunConfig, layers: ReferenceLayers | None) -> dict[str, Tensor]:
    """The weights that a fresh model of a config starts from, by the formula alone: (seed, name, index).

    Those that only the family's own code can make are taken from ``layers``, dsx's in one process, or left
    out.
    """
    weights = {}
    own = dict(config.model.own_values) if isinstance(config.model, HubModel) else {}
    made = layers.weights() if own and layers is not None else {}
    for spec in config.param_specs:
        whole = torch.empty(spec.local_shape(ALONE))
        parameters.fill(whole, spec, ALONE, seed=config.dsx.train.seed)
        if spec.name not in own or made:
            weights[spec.name] = made[spec.name] if spec.name in own else slices.merge(spec, [whole])
    by_name = {spec.name: spec for spec in config.param_specs}
    for spec in config.param_specs:
        if spec.init.kind == "row_norms" and spec.adapts not in weights:
            del weights[spec.name]
        elif spec.init.kind == "row_norms":
            assert config.model.adapter is not None
            rows = [span for _, span in adapters.targeted(config.model.adapter, by_name[spec.adapts])]
            norms = weights[spec.adapts].norm(dim=1)
            weights[spec.name] = torch.cat([norms[first:stop] for first, stop in rows])
    return weights


def is_row_bias(spec: ParamSpec, specs: Sequence[ParamSpec]) -> bool:
    """Whether a tensor is the bias of a row-parallel linear: whole on every rank, beside a cut weight."""
    if spec.split is not None or not spec.name.endswith(".bias"):
        return False
    weight = spec.name.removesuffix("bias") + "weight"
    return any(other.name == weight and other.split == 1 for other in specs)


class ReferenceRouters:
    """Those of a transformers model that trains.

    Attributes:
        asked: What its forward is to be called with besides.
    """

    def __init__(self, model: Any, config: RunConfig) -> None:
        self._moe = config.dsx.moe
        self.asked = {"output_router_logits": True} if self._moe.z_loss else {}
        self._logits: tuple[Tensor, ...] = ()
        if self.asked:  # its own output of them, whichever class returns it
            model.get_decoder().register_forward_hook(self._note)
        self._held = {}
        if isinstance(config.model, HubModel):
            blocks = model.get_submodule(structure_of(config.model.config).blocks)
            self._held = {
                tally.name: (block.get_buffer(tally.bias), tally.counts)
                for at, block in enumerate(blocks)
                for tally in tallies_of(block, at, None)
                if tally.bias is not None
            }
        self._counts: dict[str, Tensor] = {}

    def _note(self, _module: Any, _given: Any, outputs: Any) -> None:
        self._logits = outputs.router_logits

    def begin(self, values: Mapping[str, Tensor]) -> None:
        """Begin a step with biases by block and path, where ``values`` has them."""
        self._counts = {name: torch.zeros_like(counts) for name, (_, counts) in self._held.items()}
        for name, (bias, counts) in self._held.items():
            bias.copy_(values.get(name, bias))
            counts.zero_()

    def count(self, times: int) -> None:
        """Count what has run since the last call so many times."""
        for name, (_, counts) in self._held.items():
            self._counts[name] += times * counts
            counts.zero_()

    def z_loss(self) -> Tensor | float:
        """Of the last call: Zoph et al. 2022, arXiv:2202.08906, equation 5, summed over layers."""
        return sum(self._moe.z_loss * torch.logsumexp(each, -1).square().mean() for each in self._logits)

    def moved(self) -> dict[str, Tensor]:
        """The biases after the step (Wang et al. 2024, arXiv:2408.15664, algorithm 1)."""
        means = {name: counts[:-1].double().mean() for name, counts in self._counts.items()}
        return {
            name: bias.float()
            + self._moe.bias_update_speed * (means[name] - self._counts[name][:-1]).sign().float()
            for name, (bias, _) in self._held.items()
        }
