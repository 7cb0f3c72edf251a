"""Step time of a Llama whose rows two ranks share, under dsx beside torch's and DeepSpeed's context axes.

    python tools/bench_context.py [--lengths 2048,8192] [--kv-heads 8,2] [--rounds 8] [--only dsx,torch]

Every engine starts from the same weights and trains on the same rows, two a step, with torch's fused AdamW
and clipping. Those with the axis share each row, one after the other: dsx's own modules and transformers'
under dsx by each ``context_method``, transformers' in a loop under DDP around
torch.distributed.tensor.experimental.context_parallel, its ring by both of its rotations, and under
DeepSpeed's UlyssesSPAttentionHF at ZeRO-0. Without the axis: dsx with data parallelism 2, a row each, and
transformers' in a loop in one process, both rows. torch's table of kernels for its ring has those of CUDA
alone, so that it stops on CPUs: its error is printed, and its own template (_templated_ring_attention) is
measured around torch's kernel for CPUs.

They take turns step by step, each round beginning with another one. Printed are the median step, the
processor time of all ranks for a step, the fastest dsx with the axis over it, by both, median of the rounds,
and the losses' largest distance from one process's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from bench_tokens import ADAMW, CLIPPING, Step, numbers, ratio, report, started, timed
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as templates

from dsx.models.spec import ContextMethod

RANKS, ROWS, HEADS, VOCABULARY = 2, 2, 8, 4096
SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
ALONE = "transformers, one process"


def main() -> None:
    """Start the ranks of each run and print their figures; or be one of those ranks."""
    arguments = _arguments()
    if arguments.worker is not None:
        work(arguments)
        return
    runs = product(arguments.lengths, arguments.kv_heads)
    told = ((RANKS, [f"--lengths={length}", f"--kv-heads={heads}"]) for length, heads in runs)
    report(__file__, told, as_text, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--lengths", type=numbers, default=[2048], metavar="T,...", help="tokens of a row (default 2048)")
    add("--kv-heads", type=numbers, default=[HEADS], metavar="K,...", help="of 8 heads (default 8)")
    add("--rounds", type=int, default=8, metavar="N", help="turns of every engine (default 8)")
    add("--only", default="", metavar="WORD,...", help="engines whose names hold one of these")
    add("--json", type=Path, metavar="FILE", help="write every figure there")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def work(arguments: argparse.Namespace) -> None:
    """Be one rank; rank 0 writes the figures."""
    import dsx
    from dsx.parallel.groups import make_groups

    (length,), (kv_heads,) = arguments.lengths, arguments.kv_heads
    folder = arguments.worker.parent / "model"
    with dsx.distributed(dsx.Mesh.of(dp=RANKS)) as whole:
        shared = make_groups(dsx.Mesh.of(cp=RANKS))
        if whole.rank == 0:
            _model(length, kv_heads).save_pretrained(folder)
        dist.barrier()
        rows = _rows(length)
        engines: dict[str, Callable[[], Step]] = {ALONE: partial(_alone, folder, rows)}
        for modules, end in (("dsx", ""), ("transformers", ", transformers' modules")):
            for method in get_args(ContextMethod):
                engines[f"dsx, {method}{end}"] = partial(_dsx, folder, shared, rows, method, modules)
        for rotation in ("allgather", "alltoall"):
            engines[f"torch, {rotation}"] = partial(_torch, folder, rows, rotation, "sdpa")
            engines[f"torch, {rotation}, CPU kernel"] = partial(_torch, folder, rows, rotation, RING)
        engines["DeepSpeed, Ulysses"] = partial(_deepspeed, folder, rows)
        engines["dsx, data 2"] = partial(_dsx, folder, whole, rows[whole.rank :][:1], "auto", "dsx")
        steps, stopped = started(engines, arguments.only, {ALONE})
        figures = timed(steps, arguments.rounds) | {
            "stopped": stopped,
            "length": length,
            "kv_heads": kv_heads,
        }
        if whole.rank == 0:
            arguments.worker.write_text(json.dumps(figures))
        dist.barrier()


def _model(length: int, kv_heads: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **heads, max_position_embeddings=length))


def _rows(length: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randint(VOCABULARY, (1, length + 1), generator=generator) for _ in range(ROWS))
    return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in drawn]


def _config(micro_batches: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": CLIPPING,
        "steps_per_print": 1 << 30,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": ADAMW | {"torch_adam": True}},
    }


def _dsx(folder: Path, groups: Any, rows: Any, method: str, modules: str) -> Step:
    import dsx
    from dsx.train.recipe import build_engine

    block = {
        "model": {"path": str(folder), "implementation": modules},
        "parallel": {"tensor": 1, "pipeline": 1, "context": groups.mesh.cp, "context_method": method},
        "data": {"tokenizer": "bytes", "sequence_length": rows[0][0].shape[1]},
        "train": {"steps": 1, "output": "unused"},
        "proof": "off",
    }
    config = dsx.load_config(_config(len(rows)) | {"dsx": block}, world_size=groups.mesh.size)
    engine = build_engine(config, groups)
    return lambda: float(engine.train_batch(iter(rows)))


def _hub_model(folder: Path, attention: str = "sdpa") -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)


def _loss(model: Any, ids: Tensor, labels: Tensor, places: Tensor) -> Tensor:
    loss: Tensor = model(
        input_ids=ids, position_ids=places, labels=labels, shift_labels=labels, use_cache=False
    ).loss
    return loss


def _places(rows: Any) -> Tensor:
    return torch.arange(rows[0][0].shape[1])[None]


def _stepped(model: Any, rows: Any, around: Callable[..., Any] | None = None) -> Step:
    """A loop with DDP's exchange of gradients in the last micro-batch, as its documentation has it."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, **ADAMW)
    quiet = getattr(model, "no_sync", nullcontext)

    def step() -> float:
        total = 0.0
        for number, row in enumerate(rows):
            parts = [each.clone() for each in (*row, _places(rows))]
            last = number == len(rows) - 1
            with around(parts) if around else nullcontext(), nullcontext() if last else quiet():
                loss = _loss(model, *parts)
                (loss / len(rows)).backward()
            total += loss.item() / len(rows)
        torch.nn.utils.clip_grad_norm_(parameters, CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _alone(folder: Path, rows: Any) -> Step:
    """Of rank 0; the others wait. What is averaged over ranks is its loss."""
    step = _stepped(_hub_model(folder), rows)
    return lambda: step() * RANKS if dist.get_rank() == 0 else 0.0


def _torch(folder: Path, rows: Any, rotation: str, attention: str) -> Step:
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.tensor import experimental
    from torch.distributed.tensor.experimental import _attention
    from torch.nn.parallel import DistributedDataParallel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    ALL_ATTENTION_FUNCTIONS.register(RING, partial(_ring, mesh.get_group()))
    model = _hub_model(folder, attention)
    _attach_context_parallel_hooks(model)

    def around(parts: list[Tensor]) -> Any:
        _attention.set_rotate_method(rotation)
        return experimental.context_parallel(
            mesh, buffers=parts, buffer_seq_dims=[1] * 3, no_restore_buffers={*parts}
        )

    return _stepped(DistributedDataParallel(model), rows, around)


RING = "torch_ring"
"""The name in transformers' registry of torch's ring around its kernel for CPUs."""


_FORWARD = templates._templated_ring_attention  # noqa: SLF001 - there is no other door
_BACKWARD = templates._templated_ring_attention_backward  # noqa: SLF001 - as above
_ATEN: Any = torch.ops.aten
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


class _Ring(torch.autograd.Function):
    """torch's template, which its dispatcher calls for the kernels of CUDA."""

    @staticmethod
    def forward(ctx: Any, group: Any, scale: float, *qkv: Tensor) -> Tensor:
        out, lse = _FORWARD(group, 2, _kernel, *qkv, is_causal=True, scale=scale)[:2]
        ctx.group, ctx.scale = group, scale
        ctx.save_for_backward(*qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (
            None,
            None,
            *_BACKWARD(
                ctx.group,
                2,
                _kernel_backward,
                dy,
                "grad_out",
                *ctx.saved_tensors,
                is_causal=True,
                scale=ctx.scale,
            ),
        )


def _kernel(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Any:
    times = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(times, 1) for each in (k, v)) if times > 1 else (k, v)
    return getattr(_ATEN, _KERNEL)(q, k, v, **how)


def _kernel_backward(*, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Any:
    heads, times = key.shape[1], query.shape[1] // key.shape[1]
    if times > 1:
        key, value = (each.repeat_interleave(times, 1) for each in (key, value))
    call = getattr(_ATEN, f"{_KERNEL}_backward")
    dq, *dkv = call(query=query, key=key, value=value, dropout_p=0.0, **how)
    return dq, *(each.unflatten(1, (heads, times)).sum(2) if times > 1 else each for each in dkv)


def _ring(group: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **named: Any) -> Any:
    del module, mask
    return _Ring.apply(group, named["scaling"], q, k, v).transpose(1, 2).contiguous(), None


def _deepspeed(folder: Path, rows: Any) -> Step:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, plain = _hub_model(folder), ALL_ATTENTION_FUNCTIONS["sdpa"]
    length = rows[0][0].shape[1]
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, "sdpa", RANKS, 1, seq_length=length, seq_length_is_variable=False
    )
    theirs, ALL_ATTENTION_FUNCTIONS["sdpa"] = ALL_ATTENTION_FUNCTIONS["sdpa"], plain
    config = _config(ROWS) | {"sequence_parallel_size": RANKS}
    parameters = list(model.parameters())
    engine = deepspeed.initialize(model=model, model_parameters=parameters, config=config, mpu=mpu)[0]

    def step() -> float:
        total = 0.0
        ALL_ATTENTION_FUNCTIONS["sdpa"] = theirs
        for row in rows:
            parts = (each.chunk(RANKS, 1)[dist.get_rank()] for each in (*row, _places(rows)))
            loss = _loss(engine, *parts)
            engine.backward(loss / RANKS)  # it sums over the ranks that share a row
            engine.step()
            total += loss.item() / ROWS
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
        return total

    return step


def as_text(report: dict[str, Any]) -> str:
    """A run's table."""
    heads = f"{report['kv_heads']} key/value heads of {HEADS}"
    lines = [f"rows of {report['length']} tokens, {ROWS} a step, {heads}"]
    row = "{:<42} {:>9} {:>9} {:>9} {:>9} {:>9}"
    lines.append(row.format("", "ms/step", "CPU", "dsx's", "dsx's", "loss"))
    lines.append(row.format("engine", "median", "ms/step", "time", "CPU", "diff."))
    wall, cpu, losses = report["wall"], report["cpu"], report["losses"]
    lines += [
        row.format(
            name,
            *(f"{1000 * statistics.median(each[name]):.0f}" for each in (wall, cpu)),
            *(f"{_best(each, name):.3f}" for each in (wall, cpu)),
            f"{max(abs(a - b) for a, b in zip(losses[name], losses[ALONE], strict=True)):.0e}",
        )
        for name in wall
    ]
    return "\n".join([*lines, *(f"{name}: {error}" for name, error in report["stopped"].items())])


def _best(spent: dict[str, list[float]], name: str) -> float:
    """The time of dsx's own modules over an engine's, by the method that is faster beside it."""
    ours = [f"dsx, {method}" for method in get_args(ContextMethod)]
    return min((ratio(spent[each], spent[name]) for each in ours if each in spent), default=float("nan"))


if __name__ == "__main__":
    main()
