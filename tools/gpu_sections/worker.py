"""The processes of a GPU day that measure: they run cases one after the other and say what came of each.

A worker is told its cases in a JSON file and adds a line to another for each that begins or ends, so that
whoever started it knows which case a crash belongs to, and starts another worker for the rest. Several ranks
are several workers with the same cases, of which rank 0 writes.
"""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 120.0
LEFT_BYTES = 64 << 20
"""What a case may leave behind on the device: constants and caches, but no model."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to measure.

    Attributes:
        section: The section of the report that it belongs to.
        name: Unique in its section.
        call: ``module:function``, called as ``function(place, **arguments)``.
        arguments: Of the call; JSON.
        ranks: How many take part.
        seconds: After so many it is stopped.
    """

    section: str
    name: str
    call: str
    arguments: Mapping[str, Any]
    ranks: int = 1
    seconds: float = 90.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a case runs.

    Attributes:
        dry: On a CPU, at sizes that say nothing.
        folder: For files of this worker.
        backend: Of the process group.
        fused_adam: Whether DeepSpeed's FusedAdam is built.
    """

    dry: bool
    rank: int
    ranks: int
    backend: str
    folder: Path
    fused_adam: bool = False

    @property
    def device(self) -> Any:
        """The device of this rank's tensors."""
        import torch

        return torch.device("cpu" if self.dry else f"cuda:{torch.cuda.current_device()}")

    @property
    def device_name(self) -> str:
        """As torch names it."""
        import torch

        return "CPU" if self.dry else torch.cuda.get_device_name()

    def wait(self) -> None:
        """Wait until the device has done what it was told."""
        import torch

        if not self.dry:
            torch.cuda.synchronize()


_SHARED_GPU = {
    "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip
"""NCCL refuses two ranks of a host on one GPU ("Duplicate GPU detected"): each is a host of its own."""


class NotHereError(Exception):
    """A case that this machine has no use for: it is told, and is no failure."""


def work(job_file: Path) -> None:
    """Be a worker: run the cases of a job file."""
    job: Json = json.loads(job_file.read_text())
    place = Place(
        dry=job["dry"],
        rank=int(os.environ["RANK"]),
        ranks=int(os.environ["WORLD_SIZE"]),
        backend=job["backend"],
        folder=job_file.parent,
        fused_adam=job["fused_adam"],
    )
    _join(place)
    before = 0 if place.dry else take_workspaces(place)
    for case in (Case(**fields) for fields in job["cases"]):
        if time.time() + _least(case) > job["ends_at"]:
            break
        _say(place, {"began": case.name, "section": case.section, "at": time.time()})
        result = _run(place, case)
        clean = _clean(place, before)
        _say(place, {"ended": case.name, "section": case.section, "result": result})
        if not clean or (place.ranks > 1 and "failed" in result):
            break  # another worker does the rest
    # Not the usual way out: destructors of communicators wait for peers, and for kernels that hang.
    os._exit(0)


def _least(case: Case) -> float:
    """Below this much time left a case is not begun."""
    return min(10.0, case.seconds / 4)


def _join(place: Place) -> None:
    import torch
    import torch.distributed as dist

    from dsx.launch.entry import quiet
    from dsx.launch.spared import without_builds

    quiet()
    if place.dry:
        from deepspeed.accelerator import get_accelerator

        without_builds()
        torch.set_num_threads(1)
        # DeepSpeed refuses fp16 on CPUs, whose half kernels are all there.
        get_accelerator().is_fp16_supported = lambda: True
    else:
        # An image for many GPUs sets it; DeepSpeed builds kernels at the start and cannot read its 10.0a.
        os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
        gpus = torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(place.rank % gpus)  # DeepSpeed takes its device from there
        torch.cuda.set_device(place.rank % gpus)
        if place.ranks > gpus:
            os.environ.update(_SHARED_GPU, NCCL_HOSTID=f"rank-{place.rank}")
    dist.init_process_group(
        place.backend,
        init_method=f"file://{place.folder}/rendezvous",
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )


def take_workspaces(place: Place) -> int:
    """Have cuBLAS take its workspaces, which no tensor's end gives back; the bytes that are allocated then.

    It has one for each thread that multiplies, and backwards run in a thread of their own.
    """
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.ones(256, 256, device=place.device, dtype=dtype, requires_grad=True)
        bias = torch.ones(256, device=place.device, dtype=dtype, requires_grad=True)
        (torch.nn.functional.linear(x, x, bias) @ x).sum().backward()
    del x, bias
    place.wait()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated())


def _run(place: Place, case: Case) -> Json:
    began = time.monotonic()
    module, _, name = case.call.partition(":")
    try:
        result = getattr(import_module(module), name)(place, **case.arguments)
    except NotHereError as why:
        result = {"not_here": str(why)}
    except Exception as error:  # noqa: BLE001 (whatever it is, the other cases go on)
        result = {"failed": _in_a_line(error), "trace": traceback.format_exc()[-6000:]}
        error.__traceback__ = None  # its frames hold tensors
    return {**result, "seconds": round(time.monotonic() - began, 2)}


def _in_a_line(error: BaseException) -> str:
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0]}"[:500]


def _clean(place: Place, before: int) -> bool:
    """Give the device's memory back; whether the next case starts as this one did."""
    import torch

    gc.collect()
    if place.dry:
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # an illegal access leaves no context to go on with
        return False
    torch.cuda.empty_cache()
    return bool(torch.cuda.memory_allocated() < before + LEFT_BYTES)


def _say(place: Place, words: Json) -> None:
    if place.rank == 0:
        with (place.folder / "events").open("a") as file:
            file.write(json.dumps(words) + "\n")
