"""What the machine is, what it reaches at best, and what the planner takes it to be."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from gpu_sections.engines import settings
from gpu_sections.worker import Json, NotHereError, Place

PACKAGES = ("torch", "deepspeed", "transformers", "triton", "dsx", "numpy", "pydantic")
ROUNDS = 7


def facts(place: Place) -> Json:
    """Device, driver and versions."""
    import torch

    found: Json = {"device": place.device_name, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found |= {"cores": os.cpu_count(), "torch_cuda": torch.version.cuda, "cudnn": None, "nccl": None}
    if not place.dry:
        about = torch.cuda.get_device_properties(place.device)
        found |= {
            "gpus": torch.cuda.device_count(),
            "memory_gib": round(about.total_memory / 2**30, 2),
            "multiprocessors": about.multi_processor_count,
            "capability": f"{about.major}.{about.minor}",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "cudnn": torch.backends.cudnn.version(),
        }
    return {"facts": found}


def median_seconds(place: Place, work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Median time of ``work`` after two rounds that do not count."""
    laps = []
    for _ in range(rounds + 2):
        place.wait()
        began = time.perf_counter()
        work()
        place.wait()
        laps.append(time.perf_counter() - began)
    return statistics.median(laps[2:])


def products(place: Place, *, size: int, dtype: str) -> Json:
    """A square product of random matrices, beside the data sheet's rate."""
    import torch

    from dsx.models.flops import peak_flops

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        a, b = (torch.randn(size, size, device=place.device, dtype=kind) for _ in range(2))
        seconds = median_seconds(place, lambda: torch.mm(a, b))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    nominal = None if dtype == "tf32" else peak_flops(place.device_name, dtype)  # type: ignore[arg-type]
    return {"rate": 2.0 * size**3 / seconds, "nominal": nominal, "unit": "FLOP/s"}


def copies(place: Place, *, num_bytes: int, way: str) -> Json:
    """A copy on the device, or over the bus between pinned memory and the device."""
    import torch

    from dsx.planner.cluster import preset

    if place.dry and way != "device":
        raise NotHereError("no bus to a device")
    host = {"dtype": torch.uint8, "pin_memory": not place.dry}
    near = torch.ones(num_bytes, device=place.device, dtype=torch.uint8)
    other = torch.ones(num_bytes, **host) if way != "device" else torch.empty_like(near)
    source, target = (near, other) if way in ("device", "to host") else (other, near)
    seconds = median_seconds(place, lambda: target.copy_(source, non_blocking=True))
    moved = num_bytes * (2 if way == "device" else 1)
    nominal = preset(cluster_name(place)).memory_bytes_per_second if way == "device" else None
    return {"rate": moved / seconds, "nominal": nominal, "unit": "B/s"}


def cluster_name(place: Place) -> str:
    """The planner's preset for this device. Raises NotHereError if it has none."""
    from dsx.planner.cluster import PRESETS

    device = place.device_name.upper()
    for name in PRESETS:
        if name.removeprefix("RTX-").partition("-")[0].upper() in device.replace("-", " ").split():
            return name
    raise NotHereError(f"no cluster preset for {place.device_name}")


def fused_adam(place: Place) -> Json:
    """Build DeepSpeed's FusedAdam, which a run would otherwise build at its start."""
    if place.dry:
        raise NotHereError("built for GPUs alone")
    from deepspeed.ops.op_builder import FusedAdamBuilder

    began = time.perf_counter()
    FusedAdamBuilder().load(verbose=False)
    return {"build_seconds": round(time.perf_counter() - began, 1)}


def constants(place: Place, *, model: Json, length: int, precision: str) -> Json:
    """The planner's shares of nominal rates, as built in and as fitted to a block measured here."""
    from gpu_sections.engines import resolved

    from dsx.planner.cluster import preset
    from dsx.planner.costs import Efficiency
    from dsx.planner.profiler import measure_compute

    cluster = preset(cluster_name(place))
    run = resolved(settings(model, length=length, micro_batch=1, precision=precision))
    found = measure_compute(run, cluster)
    built_in = Efficiency.of(cluster)
    names = [name for name in ("matmul", "memory") if hasattr(built_in, name)]
    return {
        "cluster": cluster.name,
        "text": found.text,
        "constants": {name: (getattr(built_in, name), getattr(found.efficiency, name)) for name in names},
    }


def launches(place: Place, *, count: int) -> Json:
    """Seconds between two small kernels that Python starts one by one, beside the planner's constant."""
    import torch

    from dsx.planner.costs import Efficiency

    x = torch.ones(1024, device=place.device)

    def work() -> None:
        for _ in range(count):
            x.mul_(1.0)

    seconds = median_seconds(place, work) / count
    return {"constants": {"kernel_seconds": (Efficiency().kernel_seconds, seconds)}}
