"""Memory beside the estimate, speed beside Hugging Face + DeepSpeed and the planner, kernels in turn."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Self

from gpu_sections.engines import STOCK, Engine, batches, ours, resolved, settings, step_seconds, stock
from gpu_sections.machine import cluster_name, median_seconds
from gpu_sections.worker import Json, NotHereError, Place


class Gauge:
    """Peaks of allocated and reserved memory by phase, without what was there before.

    The workspaces of cuBLAS, which no estimate counts, are there before: the worker has had them taken.
    """

    def __init__(self, place: Place) -> None:
        import torch

        self._place = place
        self.peaks: dict[str, int] = {}
        self.reserved_bytes = 0
        if place.dry:
            from dsx.memory.meter import StorageMeter

            torch.autograd.set_multithreading_enabled(False)  # else backwards escape the meter
            self._meter: Any = StorageMeter("cpu")
            return
        self._meter = nullcontext()
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_allocated()
        self._reserved_before = torch.cuda.memory_reserved()

    def __enter__(self) -> Self:
        self._meter.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._meter.__exit__(*failure)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note the peak of what is done inside."""
        if self._place.dry:
            with self._meter.phase(name):
                yield
            self.peaks[name] = self._meter.peak_bytes[name]
            return
        import torch

        torch.cuda.reset_peak_memory_stats()
        yield
        self._place.wait()
        self.peaks[name] = torch.cuda.max_memory_allocated() - self._before
        reserved = torch.cuda.max_memory_reserved() - self._reserved_before
        self.reserved_bytes = max(self.reserved_bytes, reserved)


def memory(place: Place, *, config: Json, peer: bool) -> Json:
    """Peaks of dsx by phase beside the estimate's, and of Hugging Face + DeepSpeed."""
    from dsx.memory.estimate import estimate_run
    from dsx.memory.job import job_of

    content = settings(**config)
    content["dsx"]["proof"] = "off"  # of another, small model, which is gone before the run's own is built
    run = resolved(content)
    estimate = estimate_run(job_of(run, device="cpu" if place.dry else "cuda", capacity_bytes=_room(place)))
    phases = {phase.name: phase.peak_bytes for phase in estimate.highest.estimate.phases}
    mine = _peaks(place, content, run.model.vocab_size, lambda: ours(content))
    found: Json = {
        "estimated": phases,
        "peaks": mine.peaks,
        "peak": max(mine.peaks.values()),
        "estimate": estimate.peak_bytes,
        "reserved": mine.reserved_bytes,
    }
    if peer:
        theirs = _peaks(place, content, run.model.vocab_size, lambda: stock(content, place))
        found["stock"] = max(theirs.peaks.values())
    return found


def _room(place: Place) -> int | None:
    import torch

    return None if place.dry else torch.cuda.get_device_properties(place.device).total_memory


def _peaks(place: Place, content: Json, vocabulary: int, make: Callable[[], Engine]) -> Gauge:
    gc.collect()
    items = batches(content, vocabulary, place)
    with Gauge(place) as gauge:
        with gauge.phase("start"):  # the model, its engine and its optimizer
            engine = make()
        for step in (1, 2, 3):
            with gauge.phase(f"step {step}"):
                engine.step(items)
    del engine
    gc.collect()
    if not place.dry:
        import torch

        torch.cuda.empty_cache()
    return gauge


def speed(
    place: Place, *, config: Json, engine: str, warm_up: int, steps: int, publishes: Json | None = None
) -> Json:
    """Tokens per second and MFU of one engine; of dsx, the planner's and the estimate's figures besides."""
    import torch

    from dsx.memory.estimate import estimate_run
    from dsx.memory.job import job_of
    from dsx.models.flops import flops_per_token, peak_flops
    from dsx.planner.cluster import preset
    from dsx.planner.predicted import predicted_step

    content = settings(**config, optimizer=_adam(place))
    run = resolved(content)
    found: Json = {"engine": engine, "published": publishes}
    peer = engine.startswith(STOCK)
    if not peer:
        kind = "cpu" if place.dry else "cuda"
        found["estimated_peak"] = estimate_run(
            job_of(run, device=kind, capacity_bytes=_room(place))
        ).peak_bytes
        found["predicted_seconds"] = predicted_step(run, preset(cluster_name(place))).seconds
    if not place.dry:
        torch.cuda.reset_peak_memory_stats()
    made = stock(content, place) if peer else ours(content)
    items = batches(content, run.model.vocab_size, place)
    seconds, losses = step_seconds(made, items, place, warm_up=warm_up, steps=steps)
    tokens = run.accumulation * run.micro_batch_size * run.sequence_length
    middle = statistics.median(seconds)
    flops = flops_per_token(run.model, run.sequence_length)
    peak = peak_flops(place.device_name, run.precision)
    if not all(loss == loss and loss < float("inf") for loss in losses):  # noqa: PLR0124 (NaN)
        found["failed"] = f"losses {losses}"
    return {
        **found,
        "optimizer": "FusedAdam" if place.fused_adam else "torch's AdamW",
        "parameters": made.parameters,
        "seconds_of_steps": seconds,
        "tokens_per_second": tokens / middle,
        "mfu": None if peak is None else tokens / middle * flops / peak,
        "losses": [losses[0], losses[-1]],
        "peak": None if place.dry else torch.cuda.max_memory_allocated(),
        "reserved": None if place.dry else torch.cuda.max_memory_reserved(),
    }


def _adam(place: Place) -> Json:
    """What users get on a GPU without asking: FusedAdam; torch's where it has not been built."""
    params = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    return params if place.fused_adam else {**params, "torch_adam": True, "fused": not place.dry}


def attention(place: Place, *, shape: Mapping[str, int], backend: str) -> Json:
    """Causal grouped-query attention, forward and backward, by a kernel of torch's or by its own choice."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from dsx.models.flops import peak_flops
    from dsx.nn.attention import scaled_dot_product

    if backend == "CUDNN_ATTENTION" and place.dry:
        raise NotHereError("a CUDA library")
    batch, heads, groups, length, dim = (shape[key] for key in ("batch", "heads", "groups", "length", "dim"))
    dtype = torch.bfloat16
    q, k, v = (
        torch.randn(batch, n, length, dim, device=place.device, dtype=dtype, requires_grad=True)
        for n in (heads, groups, groups)
    )
    grad = torch.randn_like(q)

    def work() -> None:
        torch.autograd.grad(scaled_dot_product(q, k, v, 0.0, None), (q, k, v), grad)

    try:
        with nullcontext() if backend == "default" else sdpa_kernel(getattr(SDPBackend, backend)):
            seconds = median_seconds(place, work)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise NotHereError("torch has no such kernel for these tensors") from None
    # Two products forward and five backward over half of the square.
    flops = 7.0 * 2 * batch * heads * length * length * dim / 2
    return {"rate": flops / seconds, "nominal": peak_flops(place.device_name, "bf16"), "ms": 1000 * seconds}


def optimizer(place: Place, *, kind: str, parameters: int, tensors: int) -> Json:
    """A step of AdamW over fp32 masters: torch's three loops and DeepSpeed's FusedAdam."""
    import torch

    sizes = [parameters // tensors] * tensors
    weights = [torch.nn.Parameter(torch.randn(size, device=place.device)) for size in sizes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    if kind == "FusedAdam":
        if not place.fused_adam:
            raise NotHereError("DeepSpeed's FusedAdam is not built")
        from deepspeed.ops.adam import FusedAdam

        made: Any = FusedAdam(weights, lr=1e-4)
    else:
        loops = {
            "for-loop": {"foreach": False, "fused": False},
            "foreach": {"foreach": True},
            "fused": {"fused": True},
        }
        made = torch.optim.AdamW(weights, lr=1e-4, **loops[kind])
    seconds = median_seconds(place, made.step)
    # Read: weight, gradient and two moments; written: weight and two moments.
    return {"rate": 28.0 * sum(sizes) / seconds, "ms": 1000 * seconds, "tensors": tensors}


def loss(place: Place, *, kind: str, tokens: int, vocabulary: int) -> Json:
    """The loss of bf16 logits, forward and backward: dsx's and torch's, with the memory above the logits."""
    import torch
    import torch.nn.functional as F

    from dsx.nn.loss import cross_entropy
    from dsx.nn.parallel import TensorParallel

    logits = torch.randn(1, tokens, vocabulary, device=place.device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (1, tokens), device=place.device)

    def work() -> None:
        if kind == "dsx":
            value = cross_entropy(logits, labels, tp=TensorParallel(), vocab_size=vocabulary)
        else:
            value = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        torch.autograd.grad(value, logits)

    with Gauge(place) as gauge, gauge.phase("loss"):
        work()
    return {"ms": 1000 * median_seconds(place, work), "peak": gauge.peaks["loss"]}
