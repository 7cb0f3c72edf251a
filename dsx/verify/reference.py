"""What a layout is compared with: one process, torch's autograd and optimizer over the whole model.

For dsx's families it is the transformers model of the same Hugging Face config: none of dsx's layers, engine
or schedules. For a list of layers it is those layers, called in order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime import lr_schedules
from torch import Tensor, nn

from dsx.checkpoint.formats import slices
from dsx.checkpoint.formats.huggingface import names
from dsx.checkpoint.formats.huggingface import weights as hf
from dsx.config.run import RunConfig
from dsx.models import families
from dsx.models.custom_code import without_code
from dsx.models.param import ParamSpec
from dsx.models.spec import HubModel, ModelSpec
from dsx.nn import parameters
from dsx.nn.parallel import TensorParallel

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
        """What it is, for people."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The mean loss of some micro-batches, and its gradient.

    Attributes:
        gradients: The gradients by logical tensor; tensors without one are left out.
        outputs: Layer -> its output for the first micro-batch, where the reference has such layers.
    """

    loss: float
    gradients: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)


class Transformers:
    """The transformers model of a config of dsx's families, in float32."""

    def __init__(self, config: RunConfig) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        # A padding token would get no gradient; the others are for generation, and may be cut off.
        # Modules of transformers themselves leave the padding's row out as here.
        own = isinstance(config.model, ModelSpec)
        tokens = ("pad_token_id", "bos_token_id", "eos_token_id") if own else ()
        settings = {**without_code(config.hf_config), **dict.fromkeys(tokens)}
        settings.pop("torch_dtype", None)
        kind = str(settings.pop("model_type"))
        hf_config = AutoConfig.for_model(kind, **settings)
        self._model = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, trust_remote_code=False
        )
        self._model.train()
        held = dict(self._model.named_parameters())
        self._specs = tuple(names.in_memory(spec) for spec in config.param_specs)
        # Specs have the names of files, where GPT-NeoX's head has another one than in the model.
        self._parameters = {
            name: next(held[other] for other in names.stored_names(spec, name) if other in held)
            for spec in self._specs
            for name in spec.hf
        }
        self.title = f"transformers {type(self._model).__name__}, one process, fp32"
        self.order = tuple(spec.name for spec in config.param_specs)

    def weights(self) -> dict[str, Tensor]:
        """The weights as transformers initialises them."""
        found = {spec.name: hf.join(spec, lambda name: self._parameters[name]) for spec in self._specs}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def evaluate(self, weights: Mapping[str, Tensor], batches: Sequence[Batch]) -> Evaluation:
        """Loss and gradient at these weights."""
        self._load(weights)
        self._model.zero_grad(set_to_none=True)
        total = 0.0
        for inputs, labels in batches:
            outputs = self._model(input_ids=inputs, use_cache=False)
            loss = F.cross_entropy(
                outputs.logits.float().flatten(0, 1), labels.flatten(), ignore_index=_IGNORED
            )
            extra = getattr(outputs, "aux_loss", None)
            if extra is not None:  # of routers, where the config asks for it
                loss = loss + self._model.router_aux_loss_coef * extra
            loss = loss / len(batches)
            loss.backward()
            total += loss.item()
        gradients = {
            spec.name: hf.join(spec, lambda name: self._parameters[name].grad) for spec in self._specs
        }
        return Evaluation(loss=total, gradients={k: g for k, g in gradients.items() if g is not None})

    @torch.no_grad()
    def supposed_loss(
        self,
        weights: Mapping[str, Tensor],
        batches: Sequence[Batch],
        *,
        bias_factor: float = 1.0,
        padded_columns: int = 0,
    ) -> float:
        """Mean loss under a mistake: row-parallel biases times ``bias_factor``, or padding in the softmax."""
        changed = dict(weights)
        for spec in self._specs:
            if is_row_bias(spec, self._specs):
                changed[spec.name] = weights[spec.name] * bias_factor
        self._load(changed)
        total = 0.0
        for inputs, labels in batches:
            logits = F.pad(self._logits(inputs), (0, padded_columns))
            total += F.cross_entropy(logits, labels.flatten(), ignore_index=_IGNORED).item() / len(batches)
        return total

    def _logits(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self._model(input_ids=inputs, use_cache=False).logits.float().flatten(0, 1)
        return logits

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Tensor]) -> None:
        for spec in self._specs:
            for name, values in hf.split(spec, weights[spec.name]).items():
                self._parameters[name].copy_(values)


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
        """The weights as built."""
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def evaluate(self, weights: Mapping[str, Tensor], batches: Sequence[Batch]) -> Evaluation:
        """Loss and gradient at these weights, and the layers' outputs for the first micro-batch."""
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
            loss = (value if self._loss_fn is None else self._loss_fn(value, labels)) / len(batches)
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
            put(parameter, weights[name], tp=1, tp_rank=0)


Reference = Transformers | ReferenceLayers
"""One process."""


def family_layers(config: RunConfig) -> ReferenceLayers:
    """Dsx's own layers of a config, whole, in one process, which give the right output of every layer."""
    alone = TensorParallel()
    layers = families.layers(
        config.model, alone, dtype=torch.float32, pad_multiple=config.dsx.model.vocab_multiple
    )
    return ReferenceLayers(layers, families.loss(config.model, alone), "dsx's layers, one process, fp32")


def fresh_weights(config: RunConfig, layers: ReferenceLayers) -> dict[str, Tensor]:
    """The weights that a fresh model of a config starts from, by the formula alone: (seed, name, index).

    Those that only the family's own code can make are taken from ``layers``, dsx's in one process.
    """
    weights = {}
    own = dict(config.model.own_values) if isinstance(config.model, HubModel) else {}
    made = layers.weights() if own else {}
    for spec in config.param_specs:
        whole = torch.empty(spec.local_shape(1))
        parameters.fill(whole, spec, tp=1, tp_rank=0, seed=config.dsx.train.seed)
        weights[spec.name] = made[spec.name] if spec.name in own else slices.merge(spec, [whole])
    return weights


def put(parameter: Tensor, values: Tensor, *, tp: int, tp_rank: int) -> None:
    """Write one rank's part of a logical tensor into a parameter; padding becomes zero."""
    spec = getattr(parameter, "dsx_spec", None)
    if isinstance(spec, ParamSpec):
        values = slices.cut(spec, lambda box: values[tuple(slice(*span) for span in box)], tp, tp_rank)
    parameter.copy_(values)


def is_row_bias(spec: ParamSpec, specs: Sequence[ParamSpec]) -> bool:
    """Whether a tensor is the bias of a row-parallel linear: whole on every rank, beside a cut weight."""
    if spec.split is not None or not spec.name.endswith(".bias"):
        return False
    weight = spec.name.removesuffix("bias") + "weight"
    return any(other.name == weight and other.split == 1 for other in specs)
