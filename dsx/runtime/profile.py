"""Measure layers, so that schedule, chunks, recompute and cut can be chosen by simulation."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import dsx
from dsx.config.measured import conditions_of, recompute_modes
from dsx.config.run import RunConfig
from dsx.nn import families
from dsx.nn.split import WeightGradients
from dsx.plan.params import layer_kinds
from dsx.plan.profile import RECOMPUTE, Conditions, LayerCost, Profile
from dsx.runtime.chunks import Loss
from dsx.runtime.groups import Groups
from dsx.runtime.layer_bench import Bench, Key, walk
from dsx.runtime.links import Link, measure_link
from dsx.runtime.monitor import device_name
from dsx.spec.model import Recompute

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure_model(config: RunConfig, groups: Groups) -> Profile:
    """Profile of the config's own model. A collective call over all ranks, before the model is built.

    One layer of each kind is built, on its real tensor-parallel ranks, run for a few micro-batches of the
    run's size, and freed: forward, whole backward, and both parts of a divided one. All ranks take part, as
    busy as they will be, and agree on medians. Random states are as before afterwards.

    Not measured: DeepSpeed's and the engine's own work per action, gradient traffic over data-parallel ranks,
    ZeRO-3's gathers of parameters, the all-gather after a sharded transfer, transfers between others than
    neighbours, the optimizer.
    """
    settings, kinds, split = config.dsx, layer_kinds(config.model), WeightGradients()
    tp, device = groups.tensor_parallel, torch.device(get_accelerator().current_device_name())
    loss = families.loss(config.model, tp, overwrite_logits=True)
    keys: dict[Recompute, list[Key]] = {}
    with _apart(device):
        shape = (config.micro_batch_size, config.sequence_length)
        ids = torch.randint(config.model.vocab_size, shape, device=device)
        bench = Bench(
            device=device,
            split=split,
            micro_batches=settings.profile_micro_batches,
            loss=lambda logits: loss(logits, ids),
            wire_share=1 if tp.sequence else tp.size,
        )
        for mode in recompute_modes(settings):
            specs = families.layers(
                config.model,
                tp,
                dtype=_DTYPES[config.precision],
                device=device,
                seed=settings.train.seed,
                recompute=mode,
                pad_multiple=settings.model.vocab_multiple,
                split=split,
            )
            named = _named(config, kinds, mode)
            keys[mode] = walk(bench, specs, named, ids)
        costs = _agreed(bench.costs)
        link = _link(costs, groups, device, rounds=settings.profile_micro_batches)
    conditions = conditions_of(config, device=device_name(), version=dsx.__version__)
    return _profile(conditions, {mode: [costs[key] for key in keys[mode]] for mode in keys}, link)


def _named(config: RunConfig, kinds: Sequence[str], mode: Recompute) -> list[str]:
    """Kinds of layers that cost the same: only blocks compute anything again or have windows."""
    named, first = list(kinds), kinds.index("Block")
    for block in range(config.model.num_layers):
        window = config.model.window(block, config.sequence_length)
        named[first + block] = f"Block, recompute {mode}" + (f", window {window}" if window else "")
    return named


def profile_layers(
    layers: Sequence[Any],
    batch: tuple[Any, Any],
    *,
    loss_fn: Loss | None = None,
    groups: Groups | None = None,
    split: WeightGradients | None = None,
    micro_batches: int = 5,
) -> Profile:
    """Profile of a layer list as :class:`dsx.PipelineModule` takes it: what DeepSpeed's "profile" was to be.

    With :func:`dsx.plan.choose.choose` it gives a cut and a schedule to build the pipeline with::

        profile = profile_layers(layers, (inputs, labels), loss_fn=loss_fn)
        best = choose(profile, num_ranks=4, num_micro_batches=8, space=Space()).chosen.cut
        cut = {"stage_map": best.stage_map, "schedule": best.program}
        model = dsx.PipelineModule(layers, num_stages=4, loss_fn=loss_fn, **cut)

    Each layer is built, or copied, measured on the output of the one before, and freed; equal LayerSpecs
    whose inputs have equal shapes are measured once. With process groups this is a collective call over all
    ranks, which agree on medians, and transfers are measured too. For what is not, see
    :func:`measure_model`.

    Args:
        layers: LayerSpecs, modules and functions.
        batch: One micro-batch, ``(inputs, labels)``.
        loss_fn: ``loss_fn(outputs, labels)``; None if the last layer gives the loss.
        groups: Process groups, in a run that has them.
        split: What the layers were built with, if they divide their backward.
        micro_batches: How many to measure per layer, after two that do not count.

    Raises:
        ModelError: A layer gives something that cannot cross between stages, or the last one no scalar.
    """
    device = torch.device(get_accelerator().current_device_name())
    inputs, labels = (_to(part, device) for part in batch)
    bench = Bench(
        device=device,
        split=split,
        micro_batches=micro_batches,
        loss=lambda y: y if loss_fn is None else loss_fn(y, labels),
    )
    with _apart(device):
        keys = walk(bench, layers, None, inputs)
        costs = bench.costs if groups is None else _agreed(bench.costs)
        link = None if groups is None else _link(costs, groups, device, rounds=micro_batches)
    first = inputs[0] if isinstance(inputs, tuple) else inputs
    conditions = Conditions(
        model=hashlib.sha256(repr([key.kind for key in keys]).encode()).hexdigest()[:16],
        micro_batch_size=len(first),
        sequence_length=0,
        tensor=1 if groups is None else groups.mesh.tp,
        sequence_parallel=False,
        precision=str(first.dtype).removeprefix("torch."),
        device=device_name(),
        dsx=dsx.__version__,
    )
    return _profile(conditions, {"none": [costs[key] for key in keys]}, link)


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Leave no trace of what happens inside: random states, memory, the count of its peak."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        yield
    gc.collect()
    get_accelerator().empty_cache()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)


def _agreed(mine: Mapping[Key, LayerCost]) -> dict[Key, LayerCost]:
    """The same on every rank: medians of times, largest of bytes."""
    everyone: list[dict[Key, LayerCost]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, dict(mine))
    return {key: _middle([costs[key] for costs in everyone]) for key in everyone[0]}


def _middle(costs: Sequence[LayerCost]) -> LayerCost:
    values = {}
    for field in fields(LayerCost):
        found = [getattr(cost, field.name) for cost in costs]
        values[field.name] = median(found) if field.name.endswith("_seconds") else max(found)
    return LayerCost(**values)


def _link(
    costs: Mapping[Key, LayerCost], groups: Groups, device: torch.device, *, rounds: int
) -> Link | None:
    largest = max(cost.boundary_bytes for cost in costs.values())
    return measure_link(groups, device, num_bytes=largest, rounds=rounds)


def _profile(
    conditions: Conditions, modes: Mapping[Recompute, Sequence[LayerCost]], link: Link | None
) -> Profile:
    """Modes as measured, with what follows from comparing them.

    What a mode computes again at once is what it keeps less than the mode that keeps everything. Computing
    more never takes less time: a measurement that says so is noise.
    """
    layers: dict[Recompute, tuple[LayerCost, ...]] = {}
    least: Sequence[LayerCost] = modes["none"]
    for mode in sorted(modes, key=RECOMPUTE.index):
        least = layers[mode] = tuple(
            replace(_no_faster(cost, other), working_bytes=max(0, whole.kept_bytes - cost.kept_bytes))
            for cost, other, whole in zip(modes[mode], least, modes["none"], strict=True)
        )
    return Profile(
        conditions=conditions,
        layers=layers,
        latency_seconds=0.0 if link is None else link.latency_seconds,
        bytes_per_second=None if link is None else link.bytes_per_second,
    )


def _no_faster(cost: LayerCost, other: LayerCost) -> LayerCost:
    names = (field.name for field in fields(LayerCost) if field.name.endswith("_seconds"))
    return replace(cost, **{name: max(getattr(cost, name), getattr(other, name)) for name in names})


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_to(item, device) for item in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value
