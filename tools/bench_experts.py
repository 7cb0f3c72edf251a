"""Step time of mixtures of experts that ranks hold together, under dsx beside transformers and DeepSpeed.

    python tools/bench_experts.py [--families mixtral,qwen3_moe] [--pipeline 1,2] [--rounds 6] [--only dsx]

Every engine starts from the same weights and trains on the same micro-batches, two a step on each of two
replicas, with torch's fused AdamW and clipping. With the experts over both replicas: dsx at ZeRO-0 and 3,
transformers' own all-to-all (``DistributedConfig(fsdp_size=2, ep_size=2)``), whose other parameters
torch's FSDP2 shards, so that dsx's ZeRO-3 is its like, and DeepSpeed's AutoEP by its preset, whose kernel
of activations is for GPUs, so that ``use_grouped_mm`` is false. Without: dsx with experts whole on every
rank, by grouped products and by a dense execution, in which every expert computes every token. With
``--pipeline 2``, which neither peer takes, four ranks run dsx alone.

They take turns step by step, each round beginning with another one. Printed are the median step, the
processor time of all ranks for a step, dsx's with the axis over it by both, median of the rounds, and the
losses' largest distance from those of dsx with whole experts. An engine that stops says why.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_tokens import ADAMW, CLIPPING, Step, numbers, ratio, report, started, timed
from torch import Tensor

REPLICAS, MICRO_BATCHES, VOCABULARY = 2, 2, 1024
WHOLE, SHARED = "dsx, experts whole", "dsx, expert 2"
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
}
"""Sizes at which the experts' products are most of a step."""


def main() -> None:
    """Start the ranks of each run and print their figures; or be one of those ranks."""
    arguments = _arguments()
    if arguments.worker is not None:
        work(arguments)
        return
    runs = product(arguments.families, arguments.pipeline)
    told = ((REPLICAS * pp, [f"--families={family}", f"--pipeline={pp}"]) for family, pp in runs)
    report(__file__, told, as_text, arguments.json)


def _families(text: str) -> list[str]:
    found = text.split(",")
    if unknown := set(found) - OWN.keys():
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(OWN)}")
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--families", type=_families, default=["mixtral", "qwen3_moe"], metavar="NAME,...")
    add("--pipeline", type=numbers, default=[1], metavar="P,...", help="pipeline stages (default 1)")
    add("--length", type=int, default=1024, metavar="T", help="tokens of a row (default 1024)")
    add("--rounds", type=int, default=6, metavar="N", help="turns of every engine (default 6)")
    add("--only", default="", metavar="WORD,...", help="engines whose names hold one of these")
    add("--json", type=Path, metavar="FILE", help="write every figure there")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def work(arguments: argparse.Namespace) -> None:
    """Be one rank; rank 0 writes the figures."""
    import dsx
    from dsx.parallel.groups import make_groups

    (family,), (pipeline,) = arguments.families, arguments.pipeline
    folder = arguments.worker.parent / "model"
    with dsx.distributed(dsx.Mesh.of(dp=REPLICAS, pp=pipeline)) as whole:
        shared = make_groups(dsx.Mesh.of(dp=REPLICAS, pp=pipeline, ep=REPLICAS))
        if whole.rank == 0:
            _model(family, arguments.length).save_pretrained(folder)
        dist.barrier()
        rows = _rows(arguments.length, whole.mesh.coords(whole.rank)["dp"])
        engines: dict[str, Callable[[], Step]] = {
            WHOLE: partial(_dsx, folder, whole, rows, 0),
            SHARED: partial(_dsx, folder, shared, rows, 0),
            f"{WHOLE}, dense": partial(_dsx, folder, whole, rows, 0, dense=True),
        }
        if pipeline == 1:
            engines |= {
                f"{SHARED}, ZeRO-3": partial(_dsx, folder, shared, rows, 3),
                "transformers, all-to-all, FSDP2": partial(_transformers, folder, rows),
                "DeepSpeed, AutoEP, ZeRO-0": partial(_deepspeed, family, folder, rows, 0),
            }
        steps, stopped = started(engines, arguments.only, {WHOLE, SHARED})
        figures = timed(steps, arguments.rounds) | {
            "stopped": stopped,
            "family": family,
            "pipeline": pipeline,
            "length": arguments.length,
        }
        if whole.rank == 0:
            arguments.worker.write_text(json.dumps(figures))
        dist.barrier()


def _model(family: str, length: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = SIZES | OWN[family] | {"max_position_embeddings": length}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))


def _rows(length: int, replica: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1 + replica)
    drawn = (torch.randint(VOCABULARY, (1, length + 1), generator=generator) for _ in range(MICRO_BATCHES))
    return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in drawn]


def _config(zero: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIPPING,
        "steps_per_print": 1 << 30,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": ADAMW | {"torch_adam": True}},
    }


def _dsx(folder: Path, groups: Any, rows: Any, zero: int, *, dense: bool = False) -> Step:
    import dsx
    from dsx.hub.experts import holds_experts
    from dsx.train.recipe import build_engine

    mesh = groups.mesh
    block = {
        "model": {"path": str(folder)},
        "parallel": {"tensor": 1, "pipeline": mesh.pp, "expert": mesh.ep},
        "data": {"tokenizer": "bytes", "sequence_length": rows[0][0].shape[1]},
        "train": {"steps": 1, "output": "unused"},
        "proof": "off",
    }
    config = dsx.load_config(_config(zero) | {"dsx": block}, world_size=mesh.size)
    engine = build_engine(config, groups)
    for module in engine.module.modules() if dense else ():
        if holds_experts(module):
            module.forward = partial(_dense, module)
    return lambda: float(engine.train_batch(iter(rows)))


def _dense(module: Any, hidden_TH: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """Every expert computes every token; most count for nothing."""
    counts_TE = hidden_TH.new_zeros(len(hidden_TH), module.num_experts).scatter(1, index_Tk, weights_Tk)
    gate_up = torch.einsum("th,eih->eti", hidden_TH, module.gate_up_proj)
    made = torch.einsum("eti,ehi->eth", module._apply_gate(gate_up), module.down_proj)  # noqa: SLF001 - its own
    return torch.einsum("eth,te->th", made, counts_TE)


def _loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=labels, shift_labels=labels, use_cache=False).loss
    return loss


def _transformers(folder: Path, rows: Any) -> Step:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    over = DistributedConfig(fsdp_size=REPLICAS, ep_size=REPLICAS, ep_implementation="all_to_all")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=over)
    model.train()
    over_meshes: dict[Any, list[Any]] = {}
    for each in model.parameters():
        over_meshes.setdefault(each.device_mesh, []).append(each)
    groups = [{"params": own} for own in over_meshes.values()]  # torch's fused AdamW takes one mesh at a time
    optimizer = torch.optim.AdamW(groups, **ADAMW)

    def step() -> float:
        total = 0.0
        for number, row in enumerate(rows):
            model.set_requires_gradient_sync(number == len(rows) - 1)
            loss = _loss(model, *row)
            (loss / len(rows)).backward()
            total += loss.item() / len(rows)
        _clip([[each.grad for each in own] for own in over_meshes.values()])
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _clip(gradients: list[list[Any]]) -> None:
    """As torch's clip_grad_norm_, which refuses gradients over several meshes: experts' and others'."""
    norms = [torch.nn.utils.get_total_norm(each).full_tensor() for each in gradients]
    norm = torch.stack(norms).square().sum().sqrt()
    factor = (CLIPPING / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([each.to_local() for own in gradients for each in own], factor)


def _deepspeed(family: str, folder: Path, rows: Any, zero: int) -> Step:
    import deepspeed
    from deepspeed.module_inject.auto_ep_presets import base
    from transformers import AutoModelForCausalLM

    # 0.19.8 stops where it would have transformers 5.23 record router logits, of which no loss is made here.
    base._retarget_transformers_output_recorders_for_modules = lambda **_: 0  # noqa: SLF001 - no other door
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    experts = {"enabled": True, "autoep_size": REPLICAS, "preset_model": family, "use_grouped_mm": False}
    config = _config(zero) | {"expert_parallel": experts}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def step() -> float:
        total = 0.0
        for row in rows:
            loss = _loss(engine, *row)
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(rows)
        return total

    return step


def as_text(report: dict[str, Any]) -> str:
    """A run's table."""
    layout = f"pipeline {report['pipeline']} x data {REPLICAS}"
    rows = f"{MICRO_BATCHES} rows of {report['length']} tokens a step and replica"
    lines = [f"{report['family']}, {layout}, {rows}"]
    row = "{:<34} {:>9} {:>9} {:>9} {:>9} {:>9}"
    lines.append(row.format("", "ms/step", "CPU", "dsx's", "dsx's", "loss"))
    lines.append(row.format("engine", "median", "ms/step", "time", "CPU", "diff."))
    wall, cpu, losses = report["wall"], report["cpu"], report["losses"]
    for name in wall:
        ours = f"{SHARED}, ZeRO-3" if "FSDP2" in name and f"{SHARED}, ZeRO-3" in wall else SHARED
        lines.append(
            row.format(
                name,
                *(f"{1000 * statistics.median(each[name]):.0f}" for each in (wall, cpu)),
                *(f"{ratio(each[ours], each[name]):.3f}" for each in (wall, cpu)),
                f"{max(abs(a - b) for a, b in zip(losses[name], losses[WHOLE], strict=True)):.0e}",
            )
        )
    return "\n".join([*lines, *(f"{name}: {error}" for name, error in report["stopped"].items())])


if __name__ == "__main__":
    main()
