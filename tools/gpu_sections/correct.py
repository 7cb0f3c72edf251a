"""Whether dsx trains right on this device: beside one process of transformers on the CPU, in fp32."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_sections.worker import ROOT, Json, Place

sys.path.insert(0, str(ROOT / "tools"))

from all_families import parity


def parities(place: Place, *, family: str, layout: Json, implementation: str) -> Json:
    """Losses, norms and the exported folder of a few steps, as tools/all_families proves families."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    shape = parity.Layout(**layout)
    folder = _shared_folder(place, family)
    # The row of a padding id is trained by dsx's own modules, and not by transformers'.
    changes: Json = {"pad_token_id": None, "attention": "eager"} if implementation == "dsx" else {}
    expected = parity.reference(0, 1, family, folder, **changes) if place.rank == 0 else None
    _barrier()
    export = folder / "export"
    try:
        found = parity.train(place.rank, place.ranks, shape, folder / "model", export, implementation)
        said = (
            []
            if expected is None
            else parity.exported_differences(0, 1, folder, export, expected.allowed["logits"])
        )
    finally:
        if place.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if found is None or expected is None:
        return {}
    away = {key: parity.furthest(getattr(found, key), getattr(expected, key)) for key in ("losses", "norms")}
    said += [f"{key} differ by {by:.1e}" for key, by in away.items() if not by <= expected.allowed[key]]
    return {**away, "backend": place.backend, **({"failed": "; ".join(said)} if said else {})}


def _shared_folder(place: Place, family: str) -> Path:
    """A folder that all ranks know."""
    import torch.distributed as dist

    holder = [tempfile.mkdtemp(prefix=f"{family}-", dir=place.folder) if place.rank == 0 else None]
    dist.broadcast_object_list(holder, src=0)
    return Path(str(holder[0]))


def _barrier() -> None:
    """Wait for the other ranks."""
    import torch.distributed as dist

    dist.barrier()


def exchanges(place: Place) -> Json:
    """Whether ranks can exchange tensors of this device: what pipelines, ZeRO and tensor parallelism send."""
    import torch
    import torch.distributed as dist

    device, n = place.device, place.ranks
    mine = torch.full((1024,), float(place.rank + 1), device=device)
    dist.all_reduce(total := mine.clone())
    dist.all_gather_into_tensor(all_of_them := torch.empty(n * 1024, device=device), mine)
    dist.reduce_scatter_tensor(part := torch.empty(1024, device=device), torch.ones(n * 1024, device=device))
    wanted: list[tuple[Any, float]] = [(total, n * (n + 1) / 2), (all_of_them[-1024:], n), (part, n)]
    if place.backend == "nccl" or place.dry:  # gloo sends from the host's memory alone
        got = torch.empty_like(mine)
        after, before = (place.rank + 1) % n, (place.rank - 1) % n
        if place.rank % 2 == 0:  # an NCCL send may wait for its receive
            dist.send(mine, after)
            dist.recv(got, before)
        else:
            dist.recv(got, before)
            dist.send(mine, after)
        wanted.append((got, (place.rank - 1) % n + 1))
    wrong = [(tensor[0].item(), value) for tensor, value in wanted if not bool((tensor == value).all())]
    return {"failed": f"got, wanted: {wrong}"} if wrong else {"backend": place.backend}


def ring(place: Place, *, shape: Json, dtype: str) -> Json:
    """Ring attention over the ranks, forward and backward, beside torch's attention to the whole in fp32.

    How far torch's own attention in the same dtype is from that says what roundings do.
    """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from dsx.nn.attention import CausalMask
    from dsx.nn.context import ContextParallel
    from dsx.nn.ring import Ring, ring_attention

    generator = torch.Generator().manual_seed(7)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    counts = {"q": shape["heads"], "k": shape["groups"], "v": shape["groups"], "dy": shape["heads"]}
    size = shape["length"], shape["dim"]
    whole = {
        name: torch.randn(shape["batch"], n, *size, generator=generator).to(place.device, low)
        for name, n in counts.items()
    }

    def torchs(wanted: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (whole[name].to(wanted).requires_grad_() for name in "qkv")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return [y.detach(), *torch.autograd.grad(y, (q, k, v), whole["dy"].to(wanted))]

    cp = ContextParallel(place.ranks, place.rank, dist.group.WORLD, "ring")
    length = shape["length"]
    q, k, v = (cp.cut(whole[name], 2).contiguous().requires_grad_() for name in "qkv")
    y = ring_attention(q, k, v, Ring(cp, length, CausalMask(0).sights(cp, length, None)))
    mine = [y.detach(), *torch.autograd.grad(y, (q, k, v), cp.cut(whole["dy"], 2).contiguous())]
    found: Json = {"backend": place.backend}
    for name, one, right, low_one in zip(
        ("y", "dq", "dk", "dv"), mine, torchs(torch.float32), torchs(low), strict=True
    ):
        scale = float(right.abs().max())
        found[name] = float((one.float() - cp.cut(right, 2)).abs().max()) / scale
        found[f"{name}, torch"] = float((low_one.float() - right).abs().max()) / scale
        if not found[name] <= 2 * found[f"{name}, torch"] + 1e-6:
            found["failed"] = f"{name} is {found[name]:.1e} from fp32, torch's {found[f'{name}, torch']:.1e}"
    return found


def recipe(place: Place, *, steps: int) -> Json:
    """recipes/gpt_3d.py from its first step to its checkpoint, then resumed, as a user runs it."""
    losses = []
    for last in (steps, 2 * steps):
        words = {
            "dsx.train.steps": last,
            "dsx.train.output": str(place.folder / "recipe"),
            "dsx.train.eval_every": 0,
            "dsx.train.save_every": steps,
            "dsx.tracking.wandb.mode": "disabled",
            "dsx.data.max_bytes": 1_000_000,
        }
        command = [sys.executable, str(ROOT / "recipes" / "gpt_3d.py"), str(ROOT / "configs" / "zero3.json")]
        command += [word for key, value in words.items() for word in ("--set", f"{key}={value}")]
        launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        environ = {key: value for key, value in os.environ.items() if key not in launched}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110, check=False)  # noqa: S603
        if done.returncode != 0:
            return {"failed": f"exit code {done.returncode}", "trace": (done.stdout + done.stderr)[-4000:]}
        losses += [float(line.split("loss")[1].split("|")[0]) for line in _steps(done.stdout)]
    shutil.rmtree(place.folder / "recipe", ignore_errors=True)
    falls = len(losses) == 2 * steps and losses[-1] < losses[0]
    return {"losses": losses, **({} if falls else {"failed": f"losses {losses}"})}


def _steps(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("step ") and "loss" in line]


def low_precision(
    place: Place,
    *,
    precision: str,
    zero: int,
    model: Json,
    implementation: str,
    length: int,
    steps: int,
    half: Json,
) -> Json:
    """bf16 or fp16 beside Hugging Face + DeepSpeed from one folder: losses, norms, scales, skipped steps."""
    from gpu_sections.engines import batches, ours, settings, stock

    folder = place.folder / f"model-{precision}-{zero}"
    _save_model(model, folder)
    common: Json = {
        "length": length,
        "micro_batch": 2,
        "accumulation": 2,
        "zero": zero,
        "implementation": implementation,
    }
    runs: Json = {}
    try:
        for name, kind in (("fp32", "fp32"), ("dsx", precision), ("stock", precision)):
            content = settings(folder, precision=kind, **common, **({"half": half} if kind == "fp16" else {}))
            engine = stock(content, place) if name == "stock" else ours(content)
            runs[name] = _followed(engine, batches(content, model["vocab_size"], place), steps)
            del engine
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    far = {name: _away(runs[name]["losses"], runs["fp32"]["losses"]) for name in ("dsx", "stock")}
    found = {
        "loss_difference": _away(runs["dsx"]["losses"], runs["stock"]["losses"]),
        "norm_difference": _away(runs["dsx"]["norms"][-1:], runs["stock"]["norms"][-1:]),
        "from_fp32": far["dsx"],
        "stock_from_fp32": far["stock"],
        "scales": (runs["dsx"]["scales"], runs["stock"]["scales"]),
        "skipped": (runs["dsx"]["skipped"], runs["stock"]["skipped"]),
    }
    if not far["dsx"] <= 2 * far["stock"] + 1e-3:
        found["failed"] = f"{far['dsx']:.1e} from fp32, DeepSpeed {far['stock']:.1e}"
    elif found["skipped"][0] != found["skipped"][1]:
        found["failed"] = f"{found['skipped'][0]} steps skipped, DeepSpeed skips {found['skipped'][1]}"
    return found


def _save_model(model: Json, folder: Path) -> None:
    from transformers import AutoConfig

    fields = {key: value for key, value in model.items() if key != "model_type"}
    parity.random_model(AutoConfig.for_model(model["model_type"], **fields)).save_pretrained(folder)


def _followed(engine: Any, items: Any, steps: int) -> Json:
    """Losses, norms and loss scales of some steps, and how many of them overflowed."""
    found: Json = {"losses": [], "norms": [], "scales": []}
    for _ in range(steps):
        found["losses"].append(float(engine.step(items)))
        found["norms"].append(engine.norm())
        found["scales"].append(engine.scale())
    return {**found, "skipped": engine.skipped()}


def _away(mine: list[float], theirs: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(mine, theirs, strict=True))
