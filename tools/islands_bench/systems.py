"""One end of a link: a system that trains, its time and its bytes. Run by :mod:`islands_bench.speed`.

Every system is a function of a :class:`Job` which gives, as a context, the function that takes a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from islands_bench.links import ADDRESSES, bytes_sent

ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.0, "fused": True}
CLIPPING = 1.0
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
_TIMEOUT = timedelta(seconds=300)
_ISLANDS_PORT, _MEET_PORT, _STORE_PORT, _LIGHTHOUSE_PORT = 29700, 29500, 29501, 29510

Step = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one end is to do.

    Attributes:
        system: Key of :data:`SYSTEMS`.
        options: Of the system.
        rank: Which end, 0 or 1.
        model: transformers' LlamaConfig.
        rows: Samples of a step at this end.
        length: Tokens of a sample.
        warm: Steps before the time is taken.
        steps: Steps that are measured.
    """

    system: str
    options: dict[str, Any]
    rank: int
    model: dict[str, Any]
    rows: int
    length: int
    warm: int
    steps: int

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and labels [rows, length] of this end."""
        generator = torch.Generator().manual_seed(1 + self.rank)
        shape = (self.rows, self.length + 1)
        ids = torch.randint(self.model["vocab_size"], shape, generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@contextmanager
def islands(job: Job) -> Iterator[Step]:
    """An island of one rank of dsx."""
    outer = {
        "islands": 2,
        "meet": f"{ADDRESSES[0]}:{_ISLANDS_PORT}",
        "insecure": True,
        "optimizer": {"lr": OUTER_LR, "momentum": OUTER_MOMENTUM},
        "island": job.rank,
        "patience_seconds": 300,
        **job.options,
    }
    with _dsx(job, 1, {"outer": outer}) as engine:
        yield from _steps_of(engine, job)
        engine.outer.settle()


@contextmanager
def zero1(job: Job) -> Iterator[Step]:
    """ZeRO-1 of dsx over both ends."""
    with _dsx(job, 2, {}) as engine:
        yield from _steps_of(engine, job)


@contextmanager
def ddp(job: Job) -> Iterator[Step]:
    """A model of transformers under DistributedDataParallel, by itself or with the hook of PowerSGD."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    dist.init_process_group("gloo", timeout=_TIMEOUT)
    model = torch.nn.parallel.DistributedDataParallel(_llama(job))
    if "rank" in job.options:
        # From its third step on, once DDP has made its buckets anew.
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=job.options["rank"], start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    yield _torch_step(job, model)
    dist.destroy_process_group()


@contextmanager
def diloco(job: Job) -> Iterator[Step]:
    """A plain loop of DiLoCo: one flat all-reduce of fp32 for a round."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    model = _llama(job)
    common = [weight.detach().clone() for weight in model.parameters()]
    outer = torch.optim.SGD(common, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    inner, taken = _torch_step(job, model), 0

    def step() -> float:
        nonlocal taken
        loss, taken = inner(), taken + 1
        if taken % job.options["every"] == 0:
            with torch.no_grad():
                moved = torch.cat(
                    [(old - new).view(-1) for old, new in zip(common, model.parameters(), strict=True)]
                )
                dist.all_reduce(moved)
                moved /= 2
                parts = moved.split([old.numel() for old in common])
                for old, part in zip(common, parts, strict=True):
                    old.grad = part.view_as(old)
                outer.step()
                for old, new in zip(common, model.parameters(), strict=True):
                    new.copy_(old)
        return loss

    yield step
    dist.destroy_process_group()


@contextmanager
def torchft(job: Job) -> Iterator[Step]:
    """DiLoCo of torchft, each end a replica of its own."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    own = ADDRESSES[job.rank]
    lighthouse = None
    if job.rank == 0:
        lighthouse = LighthouseServer(bind=f"0.0.0.0:{_LIGHTHOUSE_PORT}", min_replicas=2)
    store = dist.TCPStore(own, _STORE_PORT, is_master=True, wait_for_workers=False)
    model = _llama(job)
    inner = torch.optim.AdamW(model.parameters(), **ADAMW)
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=2,
        use_async_quorum=False,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        connect_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=_STORE_PORT,
        lighthouse_addr=f"http://{ADDRESSES[0]}:{_LIGHTHOUSE_PORT}",
        replica_id=f"end{job.rank}",
        hostname=own,
    )
    # Its buckets are one all-reduce for many parameters; without, there is one for each.
    with DiLoCo(manager, [model], inner, outer, sync_every=job.options["every"], use_bucketization=True):
        yield _torch_step(job, model, inner)
    manager.shutdown(wait=False)
    del store, lighthouse


SYSTEMS = {"islands": islands, "dsx-zero1": zero1, "ddp": ddp, "diloco": diloco, "torchft": torchft}


def main() -> None:
    """Take the steps of the job that the command line gives as JSON; write the figures to its file."""
    job, file = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    if job.system != "islands":
        where = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(_MEET_PORT), "GLOO_SOCKET_IFNAME": "eth0"}
        os.environ.update(where | {"RANK": str(job.rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"})
    with SYSTEMS[job.system](job) as step:
        for _ in range(job.warm):
            step()
        begun, sent, busy = time.perf_counter(), bytes_sent(), time.process_time()
        seconds, losses = [], []
        for _ in range(job.steps):
            before = time.perf_counter()
            losses.append(step())
            seconds.append(time.perf_counter() - before)
        figures = {
            "wall": time.perf_counter() - begun,
            "sent_bytes": bytes_sent() - sent,
            "cpu": time.process_time() - busy,
            "seconds": seconds,
            "losses": losses,
        }
        reports = getattr(step, "reports", list)
        # The last ones that the window holds whole.
        figures["rounds"] = [
            {"sent_bytes": its.sent_bytes, "seconds": its.seconds, "hidden": its.hidden}
            for its in reports()
            if its.step >= job.warm
        ]
        if job.system == "islands":
            step()
    file.write_text(json.dumps(figures))


@contextmanager
def _dsx(job: Job, ranks: int, block: dict[str, Any]) -> Iterator[Any]:
    import dsx

    content = {
        "train_micro_batch_size_per_gpu": job.rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": ADAMW | {"torch_adam": True}},
        "dsx": {
            "model": {"config": job.model},
            "data": {"source": "own", "sequence_length": job.length, "held_out": 0},
            "parallel": {"tensor": 1, "pipeline": 1},
            "train": {"steps": job.warm + job.steps + 1, "output": "unused"},
            "memory_check": "off",
            **block,
        },
    }
    config = dsx.load_config(content, world_size=ranks, rank=job.rank if ranks > 1 else 0)
    with dsx.distributed(config.mesh, islands=config.islands) as groups:
        yield dsx.recipe.build_engine(config, groups)


def _steps_of(engine: Any, job: Job) -> Iterator[Step]:
    batch = job.batch()

    def step() -> float:
        return float(engine.train_batch(iter([batch])))

    if engine.outer is not None:
        step.reports = lambda: engine.outer.reports  # type: ignore[attr-defined]
    yield step


def _llama(job: Job) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{key: job.model[key] for key in job.model if key != "model_type"}))


def _torch_step(job: Job, model: Any, optimizer: torch.optim.Optimizer | None = None) -> Step:
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    ids, labels = job.batch()

    def step() -> float:
        optimizer.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        return loss.item()

    return step


if __name__ == "__main__":
    main()
