"""Mistakes to make on purpose, in the ranks: what a toolkit gets wrong in practice, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

Fault = Callable[[], AbstractContextManager[Any]]


def replaced(target: str, make: Callable[[Any], Any]) -> Fault:
    """``target`` replaced by what ``make`` makes of the original."""

    def apply() -> AbstractContextManager[Any]:
        module, _, name = target.rpartition(".")
        if module.rpartition(".")[2].lstrip("_")[0].isupper():
            outer, _, owner = module.rpartition(".")
            home = getattr(__import__(outer, fromlist=["_"]), owner)
        else:
            home = __import__(module, fromlist=["_"])
        return mock.patch.object(home, name, make(getattr(home, name)))

    return apply


def after_step(change: Callable[[Any], None]) -> Fault:
    """``change(engine)`` after each training step."""

    def make(original: Any) -> Any:
        def train_batch(self: Any, data_iter: Any = None) -> Any:
            loss = original(self, data_iter)
            with torch.no_grad():
                change(self)
            return loss

        return train_batch

    return replaced("dsx.engine.engine.PipelineEngine.train_batch", make)


def adapter_with(**changes: Callable[[Any], Any]) -> Fault:
    """The engine's adapter built with other ties or clipping."""

    def make(original: Any) -> Any:
        def adapt(engine: Any, groups: Any, ties: Any, clipping: Any, **more: Any) -> Any:
            ties = changes.get("ties", lambda x: x)(ties)
            clipping = changes.get("clipping", lambda x: x)(clipping)
            return original(engine, groups, ties, clipping, **more)

        return adapt

    return replaced("dsx.engine.engine.adapt", make)


def counting(rule: Callable[[Any, Any], bool]) -> Fault:
    """The norm with another rule of what counts."""
    return replaced("dsx.engine.zero.norm.NormScope.counts", lambda _: rule)


def in_backward(change: Callable[[Any, dict[str, Any]], Any]) -> Fault:
    """``change(engine, call)`` around each backward; it may put other outputs into ``call``."""

    def make(original: Any) -> Any:
        def construct(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            inner = self._calls.backward

            def backward(outputs: Any, gradients: Any, *, boundary: bool, is_loss: bool) -> None:
                call = {"outputs": outputs, "boundary": boundary, "is_loss": is_loss}
                after = change(self, call)
                inner(call["outputs"], gradients, boundary=boundary, is_loss=is_loss)
                if after is not None:
                    after()

            self._calls.backward = backward

        return construct

    return replaced("dsx.engine.engine.PipelineEngine.__init__", make)


def _twice_reduced(original: Any) -> Any:
    return lambda tp, *parameters, **cut: original(tp, *original(tp, *parameters, **cut), **cut)


def _bias_on_each(original: Any) -> Any:
    del original
    from dsx.nn import collectives
    from dsx.nn.linear import _Linear

    def forward(self: Any, x: Any) -> Any:
        y = _Linear.apply(x, self.weight, None, None, None, self.split, self.tp, None)
        return collectives.reduce_from(y if self.bias is None else y + self.bias, self.tp, None)

    return forward


def _leak(original: Any) -> Any:
    def initialise(self: Any, module: Any) -> None:
        original(self, module)
        for parameter in module.parameters():
            if parameter.dsx_spec.pad_multiple is not None:
                parameter.register_hook(lambda g: torch.cat((g[:-1], g[-1:] + 0.01)))

    return initialise


def _overwrite(engine: Any, _call: dict[str, Any]) -> None:
    engine.module.zero_grad(set_to_none=True)


def _first_twice(engine: Any, _call: dict[str, Any]) -> Callable[[], None] | None:
    if any(p.grad is not None for p in engine.module.parameters()):
        return None

    def double() -> None:
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2.0)

    return double


def _last_heavier(_engine: Any, call: dict[str, Any]) -> None:
    if call["is_loss"] and call["boundary"]:
        call["outputs"] = tuple(output * 3.0 for output in call["outputs"])


def _not_divided(engine: Any, call: dict[str, Any]) -> None:
    if call["is_loss"]:
        call["outputs"] = tuple(output * engine.micro_batches for output in call["outputs"])


def _masters(engine: Any) -> Any:
    inner = engine.deepspeed_engine.optimizer
    return getattr(inner, "optimizer", inner).param_groups


def _settings(**values: Any) -> Fault:
    """The optimizer with other hyperparameters than the config's."""

    def make(original: Any) -> Any:
        def initialize(*args: Any, **kwargs: Any) -> Any:
            built = original(*args, **kwargs)
            for group in _masters(built[0]):
                group.update(values)
            return built

        return initialize

    return replaced("dsx.verify.subject.initialize", make)


def _swap_parts(engine: Any) -> None:
    flat = engine.deepspeed_engine.optimizer.bit16_groups_flat[0]
    first, second = flat.clone().chunk(2)
    flat.copy_(torch.cat((second, first)))


def _move_replica(engine: Any) -> None:
    if engine.groups.dp_rank == 1:
        next(engine.module.parameters()).add_(0.01)


def _not_gathered(original: Any) -> Any:
    def train_batch(self: Any, data_iter: Any = None) -> Any:
        held = [getattr(p, "ds_tensor", p) for p in self.module.parameters()]  # at ZeRO-3 a part
        before = [p.detach().clone() for p in held]
        loss = original(self, data_iter)
        with torch.no_grad():
            for parameter, old in zip(held, before, strict=True):
                parameter.copy_(old)
        return loss

    return train_batch


def _kept_gradients(original: Any) -> Any:
    def train_batch(self: Any, data_iter: Any = None) -> Any:
        kept: list[Any] = []
        inner = self.deepspeed_engine.optimizer

        def keep(*_: Any) -> None:
            kept.extend(None if p.grad is None else p.grad.clone() for p in self.module.parameters())

        handle = inner.register_step_pre_hook(keep)
        loss = original(self, data_iter)
        handle.remove()
        for parameter, gradient in zip(self.module.parameters(), kept, strict=True):
            # As large as this replica's own share of it: the average is then once the old gradient.
            parameter.grad = gradient
        return loss

    return train_batch


def _same_data(original: Any) -> Any:
    def tokens(config: Any, step: int, index: int) -> Any:
        return original(config, step, index - index % config.mesh.dp)

    return tokens


def _one_batch_repeated(original: Any) -> Any:
    def tokens(config: Any, step: int, index: int) -> Any:
        return original(config, step, 0 if index == 1 else index)

    return tokens


def _seeds(add: Callable[[Any], int]) -> Fault:
    def make(original: Any) -> Any:
        del original

        def seed_generators(groups: Any, seed: int) -> None:
            torch.manual_seed(seed + add(groups))

        return seed_generators

    return replaced("dsx.launch.processes.seed_generators", make)


@contextmanager
def _unseeded_init() -> Iterator[None]:
    from dsx.nn import parameters as random

    original = random.fill

    def fill(out: Any, spec: Any, at: Any, *, seed: int) -> None:
        original(out, spec, at, seed=seed + at.along("tp")[1])

    with mock.patch.object(random, "fill", fill):
        yield


def _scale(before: float, after: float) -> Fault:
    def make(original: Any) -> Any:
        del original
        from dsx.engine.zero.reduction import Scale

        return classmethod(lambda cls, *_, **__: Scale(before, after))

    return replaced("dsx.engine.zero.reduction.Scale.of", make)


def _not_reduced(original: Any) -> Any:
    del original

    def send(self: Any, pieces: Any) -> Any:
        import torch
        import torch.distributed as dist

        from dsx.engine.zero.reduction import _Bucket
        from dsx.parallel.reduction import by_owner

        group, mine = self._among(pieces[0].parameter), pieces
        if self._owners is not None:
            mine = by_owner(pieces, self._owners, dist.get_world_size(group))[dist.get_rank(group)]
        gradients = {piece.parameter: self._store.take(piece.parameter).reshape(-1) for piece in pieces}
        parts = [gradients[piece.parameter].narrow(0, piece.start, piece.length) for piece in mine]
        return _Bucket(mine, torch.cat([torch.empty(0), *parts]), ())

    return send


def _ties_then(change: Callable[[Any, Any], None]) -> Fault:
    """``change(adapter, gradient)`` of every tied gradient once the copies' are summed."""

    def make(original: Any) -> Any:
        def sum_ties(self: Any, gradients: Any) -> None:
            pairs = list(gradients)
            original(self, pairs)
            for _, gradient in pairs:
                change(self, gradient)

        return sum_ties

    return replaced("dsx.engine.zero.reduction.ZeroAdapter.sum_ties", make)


_STAGE3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_SCATTER = f"{_STAGE3}._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"


def _scattered(change: Callable[[Any], Any]) -> Fault:
    """``change(part)`` of every part of a gradient that ZeRO-3 keeps of its average."""
    return replaced(_SCATTER, lambda original: lambda *given: [change(part) for part in original(*given)])


def _of_first_rank(part: Any) -> Any:
    torch.distributed.broadcast(part, src=0)
    return part


def _overwritten(original: Any) -> Any:
    def before_backward(self: Any) -> None:
        original(self)
        self._optimizer.micro_step_id = 0

    return before_backward


def _gathered_before(original: Any) -> Any:
    """One matrix stays gathered over the step's end."""
    kept: dict[int, Any] = {}

    def fetch(self: Any, submodule: Any, forward: bool) -> None:
        original(self, submodule, forward)
        for parameter in submodule.parameters(recurse=False):
            if parameter.ndim > 1 and parameter.numel():
                parameter.data.copy_(kept.setdefault(parameter.ds_id, parameter.data.clone()))

    return fetch


def _one_mask(original: Any) -> Any:
    def of_documents(self: Any, documents: Any, dtype: Any) -> Any:
        return original(self, torch.zeros_like(documents), dtype)

    return of_documents


def _without_positions(original: Any) -> Any:
    def tokens(config: Any, step: int, index: int) -> Any:
        inputs, labels = original(config, step, index)
        return inputs[0], labels

    return tokens


def _own_count(original: Any) -> Any:
    del original

    def share(self: Any, count: int) -> Any:
        return self.counts().sum().clamp(min=1) / count

    return share


@contextmanager
def _all_counted() -> Iterator[None]:
    """Labels that are not trained are counted with those that are, whoever has taken the function."""
    from dsx.nn.loss import trained_tokens

    code = trained_tokens.__code__
    trained_tokens.__code__ = (lambda labels: labels.new_tensor(labels.numel())).__code__
    try:
        yield
    finally:
        trained_tokens.__code__ = code


def _move_frozen(engine: Any) -> None:
    for parameter in engine.module.parameters():
        if not parameter.requires_grad and not hasattr(parameter, "ds_id"):
            parameter.mul_(1 + 2**-20)


FAULTS: dict[str, Fault] = {
    "none": nullcontext,
    # Tensor parallelism and ties.
    "norm gradients not all-reduced": replaced(
        "dsx.nn.norm.copy_parameters", lambda _: lambda tp, *p, **cut: p
    ),
    "norm gradients all-reduced twice": replaced("dsx.nn.norm.copy_parameters", _twice_reduced),
    "bias on each rank": replaced("dsx.nn.linear.RowParallelLinear.forward", _bias_on_each),
    "padding in the softmax": replaced(
        "dsx.nn.embedding.column_linear",
        lambda original: lambda *args, num_valid, **kwargs: original(*args, num_valid=None, **kwargs),
    ),
    "padding token trained": replaced(
        "dsx.nn.embedding._look_up",
        lambda original: lambda row, weight, split, padding: original(row, weight, split, None),
    ),
    "padding rows have gradients": replaced("dsx.nn.parameters.Weights.initialise", _leak),
    "ties twice": adapter_with(ties=lambda ties: [*ties, *ties]),
    "ties never": adapter_with(ties=lambda ties: ties[:0]),
    "ties averaged": _ties_then(lambda _, gradient: gradient.div_(2)),
    "ties of one copy": _ties_then(
        lambda adapter, gradient: gradient.mul_(int(adapter._scope.groups.pp_rank == 0))
    ),
    "init by rank": _unseeded_init,
    "dropout by rank": _seeds(lambda groups: 10 + groups.rank),
    "dropout alike on slices": replaced(
        "dsx.nn.dropout.draw_seed", lambda original: lambda tp, *, sharded: original(tp, sharded=False)
    ),
    "dropout not scaled": replaced(
        "dsx.nn.dropout._scale",
        lambda original: (
            lambda like, probability, seed: original(like, probability, seed) * (1 - probability)
        ),
    ),
    # Norm and clipping.
    "norm counts replicas": counting(lambda scope, p: not getattr(p, "ds_pipe_replicated", False)),
    "norm counts ties": counting(
        lambda scope, p: bool(getattr(p, "tensor_model_parallel", False)) or scope.groups.tp_rank == 0
    ),
    "norm of stage 0": counting(
        lambda scope, p: (
            scope.groups.pp_rank == 0 and (scope.groups.tp_rank == 0 or bool(p.tensor_model_parallel))
        )
    ),
    "norm of tensor rank 0": counting(
        lambda scope, p: scope.groups.tp_rank == 0 and not getattr(p, "ds_pipe_replicated", False)
    ),
    "never clipped": adapter_with(clipping=lambda _: 0.0),
    # Micro-batches.
    "micro-batches overwrite": in_backward(_overwrite),
    "first micro-batch twice": in_backward(_first_twice),
    "last micro-batch heavier": in_backward(_last_heavier),
    "loss not divided": in_backward(_not_divided),
    "gradients not cleared": replaced("dsx.engine.engine.PipelineEngine.train_batch", _kept_gradients),
    # The optimizer.
    "learning rate": _settings(lr=0.02),
    "weight decay": _settings(weight_decay=0.0),
    # Data parallelism.
    "sum over data": _scale(1.0, 1.0),
    "divided twice": _scale(0.5, 0.5),
    "not reduced over data": replaced("dsx.engine.zero.reduction.GradientTransport.send", _not_reduced),
    "same data": replaced("dsx.verify.subject.random_tokens", _same_data),
    "a micro-batch read twice": replaced("dsx.verify.subject.random_tokens", _one_batch_repeated),
    "parts swapped": after_step(_swap_parts),
    "weights not gathered": replaced("dsx.engine.engine.PipelineEngine.train_batch", _not_gathered),
    "replica moved": after_step(_move_replica),
    "dropout alike": _seeds(lambda groups: 10),
    # ZeRO-3.
    "ZeRO-3 sums": _scattered(lambda part: part * torch.distributed.get_world_size()),
    "ZeRO-3's first share on all": _scattered(_of_first_rank),
    "ZeRO-3 overwrites": replaced("dsx.engine.zero.stage3.Stage3Adapter.before_backward", _overwritten),
    "ZeRO-3 keeps what it gathered": replaced(
        "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator"
        ".fetch_sub_module",
        _gathered_before,
    ),
    # fp16.
    "loss scale not undone": replaced(
        "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.unscale_and_clip_grads",
        lambda _: lambda *_: None,
    ),
    "loss scaled twice": replaced(
        "dsx.engine.zero.norm.LossScale.scaled",
        lambda original: lambda self, loss: original(self, loss) * self.value,
    ),
    "norm with the loss scale": replaced(
        "dsx.engine.zero.norm.LossScale.judge",
        lambda original: lambda self, scaled, refuses: (original(self, scaled, refuses), scaled)[1],
    ),
    # Fine-tuning.
    "one mask for a pack": replaced("dsx.nn.attention.CausalMask._of_documents", _one_mask),
    "no positions": replaced("dsx.verify.subject.random_tokens", _without_positions),
    "each micro-batch's own mean": replaced(
        "dsx.nn.loss.TokenMean.__call__",
        lambda original: lambda self, outputs, labels, num_tokens=None: original(self, outputs, labels),
    ),
    "ignored labels counted": _all_counted,
    "tokens counted per replica": replaced("dsx.engine.micro_batches.TrainedTokens.share", _own_count),
    "adapter gradients not summed": replaced(
        "dsx.nn.collectives.copy_parameters",
        lambda original: lambda tp, *parameters, **cut: parameters,
    ),
    "frozen weights moved": after_step(_move_frozen),
}
