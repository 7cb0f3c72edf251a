"""All layers of one rank, grouped into chunks (virtual stages), as the one module that DeepSpeed sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import checkpointing
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dsx.errors import ModelError
from dsx.nn.embedding import TiedUse
from dsx.nn.loss import of_head
from dsx.nn.offload import HostCopies
from dsx.nn.parameters import is_of_tower


def checkpoint_non_reentrant(function: Callable[..., Any], *inputs: Any) -> Any:
    """Recompute ``function`` in backward (torch.utils.checkpoint, non-reentrant, RNG preserved).

    The states of ``deepspeed.checkpointing.get_cuda_rng_tracker()``, which Megatron's layers draw their
    dropout from, are preserved too, as DeepSpeed's own checkpoint functions do.
    """
    tracker = checkpointing.get_cuda_rng_tracker()
    if not tracker.get_states():
        return checkpoint(function, *inputs, use_reentrant=False)
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=partial(_replaying, tracker))


class _Replayed:
    """Set Megatron's RNG tracker back, inside, to its state at construction. Reentrant."""

    def __init__(self, tracker: Any) -> None:
        self._tracker, self._then = tracker, tracker.get_states()
        self._now: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._now = self._tracker.get_states()
        self._tracker.set_states(dict(self._then))

    def __exit__(self, *_error: object) -> None:
        self._tracker.set_states(self._now)


def _replaying(tracker: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _Replayed(tracker)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Which runs of layers are recomputed in backward.

    Attributes:
        interval: Layers per recomputed run; 0 turns recomputation off.
        layer_names: Class names that may be recomputed; None means every run that has parameters.
        function: Called as ``function(run, *inputs)``.
        model_name: Class of the PipelineModule, by which DeepSpeed knows Megatron's.
        choose: A program's own rule in place of DeepSpeed's, or None.
    """

    interval: int = 0
    layer_names: tuple[str, ...] | None = None
    function: Callable[..., Any] = checkpoint_non_reentrant
    model_name: str = ""
    choose: Callable[[Sequence[Callable[..., Any]]], bool] | None = None

    @property
    def may_be_reentrant(self) -> bool:
        """Whether inputs need a gradient for weights to get one, as is assumed of unknown functions."""
        known = (checkpoint_non_reentrant, checkpointing.non_reentrant_checkpoint)
        return not any(self.function is function for function in known)

    def applies(self, layers: Sequence[Callable[..., Any]]) -> bool:
        """Whether this run of layers is recomputed (deepspeed/runtime/pipe/module.py, _is_checkpointable)."""
        if self.choose is not None:
            return bool(self.choose(list(layers)))
        names = [type(layer).__name__ for layer in layers]
        allowed = self.layer_names or ()
        if self.may_be_reentrant and self.model_name in ("GPTModelPipe", "GPT2ModelPipe"):
            return all("ParallelTransformerLayerPipe" in name or name in allowed for name in names)
        if self.layer_names is not None:
            return all(name in allowed for name in names)
        return any(isinstance(layer, nn.Module) and any(True for _ in layer.parameters()) for layer in layers)


Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Tie:
    """One tied weight whose copies live on several pipeline ranks.

    Attributes:
        key: The TiedLayerSpec's key.
        parameters: This rank's copies, in the order of ``tied_weight_attr``.
    """

    key: str
    parameters: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup

    def left_out(self, module: nn.Module) -> list[str]:
        """Names of the trainable parameters of a rank's copy of the module that are not tied.

        The tower of pictures is in the first alone.
        """
        tied = {id(parameter) for parameter in self.parameters}
        own = ((name, p) for name, p in module.named_parameters() if p.requires_grad and id(p) not in tied)
        return [name for name, p in own if not is_of_tower(p)]


class Chunks(nn.Module):
    """This rank's layers. Children are named by global layer index, tied modules live in ``tied_modules``.

    Args:
        stages: Virtual stage -> its layers, in order, each under its global index.
        tied_modules: Tie key -> shared module.
        loss_fn: ``loss_fn(outputs, labels) -> scalar``; None means that the outputs are the loss.
        last_stage: The virtual stage that ends with the loss.
        recompute: Which runs of layers are recomputed; may be replaced between steps.
        reseed: Called with (global layer index, forwards of its stage so far) before each layer, or None.

    Attributes:
        loss_noted: Called after each training loss, with no arguments; None calls nothing.
        running: Global index of the layer that runs, or ran last; None before the first.
    """

    def __init__(
        self,
        *,
        stages: Mapping[int, Sequence[tuple[int, Callable[..., Any]]]],
        tied_modules: Mapping[str, nn.Module],
        loss_fn: Loss | None,
        last_stage: int,
        recompute: Recompute,
        reseed: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict(dict(tied_modules))
        self.loss_fn = loss_fn
        self._stages = {stage: tuple(layers) for stage, layers in stages.items()}
        self._last_stage = last_stage
        self.recompute = recompute
        self.loss_noted: Callable[[], None] | None = None
        self.running: int | None = None
        self._reseed = reseed
        self._forwards = dict.fromkeys(self._stages, 0)
        self._offloaded = {stage: _hosts(layers) for stage, layers in self._stages.items()}
        tied = set(map(id, tied_modules.values()))
        for layers in self._stages.values():
            for index, layer in layers:
                if isinstance(layer, nn.Module) and id(layer) not in tied:
                    self.add_module(str(index), layer)

    def used_parameters(self) -> dict[int, tuple[nn.Parameter, ...]]:
        """Virtual stage -> the parameters that its layers use, tied ones included."""
        return {
            stage: tuple(
                parameter
                for _, layer in layers
                if isinstance(layer, nn.Module)
                for parameter in (layer.tied_module if isinstance(layer, TiedUse) else layer).parameters()
            )
            for stage, layers in self._stages.items()
        }

    @property
    def layers(self) -> dict[int, Callable[..., Any]]:
        """This rank's layers by global index, in order."""
        return {index: layer for stage in sorted(self._stages) for index, layer in self._stages[stage]}

    @property
    def forwards(self) -> int:
        """Micro-batches that this rank has computed so far, of its busiest virtual stage."""
        return max(self._forwards.values(), default=0)

    def recomputed(self) -> list[bool]:
        """For each run of layers, in order, whether it is recomputed; nothing without recomputation."""
        step = self.recompute.interval
        return [
            self.recompute.applies([layer for _, layer in layers[start : start + step]])
            for _, layers in sorted(self._stages.items())
            for start in range(0, len(layers) if step else 0, step or 1)
        ]

    def compile_layers(self, *args: Any, **keys: Any) -> None:
        """``torch.compile`` every layer: modules in place, functions by replacing them."""
        for stage, layers in self._stages.items():
            compiled = []
            for index, layer in layers:
                if isinstance(layer, nn.Module):
                    layer.compile(*args, **keys)
                compiled.append(
                    (index, layer if isinstance(layer, nn.Module) else torch.compile(layer, *args, **keys))
                )
            self._stages[stage] = tuple(compiled)

    def offloaded(self, stage: int) -> tuple[HostCopies | None, int, bool]:
        """What takes inputs of a stage's layers to the host, of how many, and whether of the first."""
        return self._offloaded[stage]

    def hides(self, stage: int) -> bool:
        """Whether a stage's divided backward hides exchanges of rows behind weight gradients."""
        return any(getattr(layer, "hides", False) for _, layer in self._stages[stage])

    def trains(self, stage: int) -> bool:
        return any(parameter.requires_grad for parameter in self.used_parameters()[stage])

    def forward(
        self, inputs: Any, stage: int, labels: tuple[Any, ...] = (), *, with_outputs: bool = False
    ) -> Any:
        """Output of virtual stage ``stage``; with labels, the loss of the last stage.

        Args:
            inputs: Tensor or tuple of tensors.
            stage: One of this rank's virtual stages.
            labels: The arguments of ``loss_fn`` behind the outputs: ``(labels,)``, or what a
                :class:`~dsx.nn.loss.TokenMean` takes; ``()`` leaves the loss out.
            with_outputs: Return ``(loss, outputs)`` where the loss is computed. Without, the last layer may
                compute the loss itself (:class:`dsx.nn.loss.HeadLoss`).
        """
        self._forwards[stage] += 1
        layers, step = self._stages[stage], self.recompute.interval
        ends = bool(labels) and stage == self._last_stage
        # A head that computes the loss has its gradients by the end of its forward: nothing to recompute.
        loss_there = of_head(self.loss_fn) if ends and layers and not with_outputs else None
        layers, head = (layers, ()) if loss_there is None else (layers[:-1], layers[-1:])
        value = inputs
        for start in range(0, len(layers), step or len(layers) or 1):
            run = layers[start : start + (step or len(layers))]
            function = self._runner(run, self._forwards[stage])
            if step and self.recompute.applies([layer for _, layer in run]):
                args = value if isinstance(value, tuple) else (value,)
                if self.recompute.may_be_reentrant:
                    args = _with_gradient(args)
                value = self.recompute.function(function, *args)
                if self.recompute.may_be_reentrant:
                    _require_gradient(run, value)
            else:
                value = function(value)
        if loss_there is not None:
            value = self._runner(head, self._forwards[stage], loss=loss_there.of(*labels))(value)
        if not ends:
            return value
        loss = value if self.loss_fn is None else self.loss_fn(value, *labels)
        if self.loss_noted is not None and torch.is_grad_enabled():
            self.loss_noted()
        return (loss, value) if with_outputs else loss

    def _runner(
        self, run: Sequence[tuple[int, Callable[..., Any]]], forwards: int, **told: Any
    ) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            value: Any = inputs[0] if len(inputs) == 1 else inputs
            for index, layer in run:
                self.running = index
                if self._reseed is not None:
                    self._reseed(index, forwards)
                value = layer(value, **told)
            return value

        return call


def _hosts(layers: Sequence[tuple[int, Callable[..., Any]]]) -> tuple[HostCopies | None, int, bool]:
    hosts = [getattr(layer, "host", None) for _, layer in layers]
    found = [host for host in hosts if isinstance(host, HostCopies)]
    return (found[0], len(found), found[0] is hosts[0]) if found else (None, 0, False)


def _with_gradient(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs for a checkpoint function that may be reentrant: one must want a gradient, or none comes back.

    Stock DeepSpeed does the same for the first stage (deepspeed/runtime/pipe/engine.py,
    _exec_load_micro_batch).
    """
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if not torch.is_grad_enabled() or any(x.requires_grad for x in tensors):
        return inputs
    return tuple(
        x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in inputs
    )


def _require_gradient(run: Sequence[tuple[int, Callable[..., Any]]], outputs: Any) -> None:
    """Refuse a reentrant checkpoint function that would leave parameters untrained in silence."""
    if not torch.is_grad_enabled():
        return
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(outputs)):
        return
    modules = [layer for _, layer in run if isinstance(layer, nn.Module)]
    if any(p.requires_grad for module in modules for p in module.parameters()):
        raise ModelError(
            f"recomputed layers {run[0][0]} to {run[-1][0]}",
            "their outputs have no gradient though their parameters do: a reentrant checkpoint function "
            "needs a floating-point input",
            "leave activation_checkpoint_func and pipeline.use_reentrant out: dsx's default is not reentrant",
        )
