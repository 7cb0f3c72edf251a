"""Train a model of your own in 3D: layers of dsx.nn and plain ones, at any tensor x pipeline x data x ZeRO.

    python recipes/own_model.py
    deepspeed --num_accelerators 4 recipes/own_model.py --tensor 2 --pipeline 2 --zero 1
    torchrun --nproc_per_node 4 recipes/own_model.py --pipeline 2 --chunks 2 --zero 3

Losses are the same in every layout. docs/guides/own_model.md explains each part.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dsx  # first: under a launcher it says which packages take long to be loaded, before they are

# isort: split
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from dsx import nn as parallel

VOCABULARY, WIDTH, HEADS, BLOCKS, SEQUENCE, ROWS = 256, 64, 4, 4, 64, 8


class Attention(nn.Module):
    """Causal self-attention, its heads cut over the tensor-parallel ranks: [B, s, H] to the same."""

    def __init__(self, tp: dsx.TensorParallel, split: parallel.WeightGradients) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        # Queries, keys and values are three blocks of outputs; each rank gets its heads of every one.
        self.qkv = parallel.ColumnParallelLinear(WIDTH, 3 * WIDTH, tp, parts=(WIDTH,) * 3, split=split)
        self.out = parallel.RowParallelLinear(WIDTH, WIDTH, tp, split=split)

    def forward(self, x: Tensor) -> Tensor:
        """The linears gather and scatter the sequence where sequence parallelism has cut it."""
        heads = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y: Tensor = self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return y


class Block(nn.Module):
    """A transformer block: [B, s, H] to the same."""

    def __init__(self, tp: dsx.TensorParallel, split: parallel.WeightGradients) -> None:
        super().__init__()
        self.norm_1 = parallel.LayerNorm(WIDTH, tp, split=split)
        self.attention = Attention(tp, split)
        self.norm_2 = parallel.LayerNorm(WIDTH, tp, split=split)
        self.up = parallel.ColumnParallelLinear(WIDTH, 4 * WIDTH, tp, split=split)
        self.down = parallel.RowParallelLinear(4 * WIDTH, WIDTH, tp, split=split)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the MLP, each beside the residual."""
        x = x + self.attention(self.norm_1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return y


class Mixer(nn.Module):
    """A layer of plain torch, which every tensor-parallel rank holds whole: [B, s, H] to the same.

    It mixes each token with the mean of those up to it.
    """

    def __init__(self, tp: dsx.TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Work on the whole sequence: with a slice of it, a replica would get only a part of its gradient."""
        whole = parallel.gather_from(x, self.tp, dim=1) if self.tp.sequence else x
        places = torch.arange(1, whole.shape[1] + 1, device=whole.device, dtype=whole.dtype)
        y: Tensor = whole + torch.tanh(self.mix(whole.cumsum(1) / places[:, None]))
        return parallel.scatter_to(y, self.tp, dim=1) if self.tp.sequence else y


def layers(tp: dsx.TensorParallel, split: parallel.WeightGradients) -> list[Any]:
    """The model: ids [B, S] to this rank's columns of the logits, [B, S, V]."""
    words = (parallel.VocabParallelEmbedding, VOCABULARY, WIDTH, tp)
    return [
        TiedLayerSpec("words", *words, split=split),
        LayerSpec(parallel.LearnedPositions, SEQUENCE, WIDTH, tp, split=split),
        *(LayerSpec(Block, tp, split) for _ in range(BLOCKS)),
        LayerSpec(Mixer, tp),
        LayerSpec(parallel.LayerNorm, WIDTH, tp, split=split),
        TiedLayerSpec("words", *words, split=split, forward_fn=parallel.as_head),
    ]


def make_layers() -> dsx.LayerList:
    """The model as ``dsx estimate --layers recipes/own_model.py:make_layers`` counts it."""
    tp, ids = dsx.TensorParallel(), torch.zeros(2, SEQUENCE, dtype=torch.int64)
    loss = partial(parallel.cross_entropy, tp=tp, vocab_size=VOCABULARY)
    return dsx.LayerList(layers=layers(tp, parallel.WeightGradients()), inputs=ids, labels=ids, loss_fn=loss)


def build(groups: dsx.Groups, *, chunks: int = 1, schedule: str = "auto") -> dsx.PipelineModule:
    """The layers that this rank holds, initialised: the same whole model in every layout."""
    tp, split = groups.tensor_parallel, parallel.WeightGradients()
    return dsx.PipelineModule(
        layers(tp, split),
        loss_fn=partial(parallel.cross_entropy, tp=tp, vocab_size=VOCABULARY),
        groups=groups,
        num_chunks=chunks,
        schedule=schedule,
        partition_method="uniform",
        seed_layers=True,  # each layer's weights by its place in the list, whatever rank builds it
        split=split,
    )


def batches(dp: int, dp_rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches of two sequences, this data-parallel rank's of the global batch.

    Labels are the inputs shifted by one: the token that comes next at each place.
    """
    text = torch.tensor(list(Path(torch.__file__).read_bytes()))
    rows = text.unfold(0, SEQUENCE + 1, SEQUENCE)
    for first in range(2 * dp_rank, len(rows) - 1, 2 * dp):
        pair = rows[first : first + 2]
        yield pair[:, :-1], pair[:, 1:]


def settings(zero: int, dp: int) -> dict[str, Any]:
    """An ordinary DeepSpeed config."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ROWS // (2 * dp),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True, "fused": True}},
    }


def main() -> int:
    """Read the layout from the command line, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, what in (
        ("tensor", "tensor-parallel degree"),
        ("pipeline", "pipeline degree"),
        ("chunks", "virtual stages per pipeline rank"),
    ):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{what} (1)")
    parser.add_argument("--zero", type=int, default=0, choices=range(4), help="ZeRO stage (0)")
    parser.add_argument("--schedule", default="auto", help="1f1b, interleaved, zb_h1, ... (by the chunks)")
    parser.add_argument("--sequence-parallel", action="store_true", help="cut activations along the sequence")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps in all (10)")
    parser.add_argument("--output", type=Path, help="save the last step here, and go on from what is there")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher gives it
    given = parser.parse_args()

    mesh = dsx.Mesh.of(
        pp=given.pipeline, tp=given.tensor, dp=max(1, dsx.world_size() // (given.pipeline * given.tensor))
    )
    with dsx.distributed(mesh, sequence_parallel=given.sequence_parallel) as groups:
        model = build(groups, chunks=given.chunks, schedule=given.schedule)
        engine, *_ = dsx.initialize(model=model, config=settings(given.zero, mesh.num_shares))
        if given.output and (given.output / "latest").exists():
            engine.load_checkpoint(given.output)
        data = batches(mesh.num_shares, groups.share)
        for _ in range(engine.global_steps * engine.micro_batches):
            next(data)  # trained on before
        while engine.global_steps < given.steps:
            loss = engine.train_batch(data)
            if groups.rank == 0:
                norm = engine.get_global_grad_norm()
                print(f"step {engine.global_steps}: loss {loss.item():.4f}, grad norm {norm:.4f}", flush=True)
        if given.output:
            engine.save_checkpoint(given.output)
    return 0


if __name__ == "__main__":
    dsx.run(main)
