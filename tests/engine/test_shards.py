"""Transfers cut over the tensor-parallel ranks: fewer bytes on the wire, the same bits in training."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
from dsx.engine.p2p import Shards
from dsx.errors import LayoutError, ModelError
from dsx.nn.parallel import TensorParallel
from parity.oracle import LLAMA

TP, PP, ROWS, SEQUENCE, MICRO_BATCHES, STEPS = 2, 2, 2, 5, 3, 2


def test_shares_cover_every_byte_once() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
        for shape in ((), (0,), (1,), (3, 5), (17,), (64, 2)):
            tensor = torch.randn(shape, generator=generator).mul(9).to(dtype)
            for size in (1, 2, 3, 8):
                shards = [Shards(TensorParallel(size, rank)) for rank in range(size)]
                total = tensor.numel() * tensor.element_size()
                buffer = shards[0].buffer(total, torch.device("cpu"))
                assert buffer.numel() < total + 16 * size
                buffer.fill_(0xA5)
                for shard in shards:
                    assert shard.own(tensor).numel() <= -(-total // size) + 15
                    shard.slot(buffer, total).copy_(shard.own(tensor))
                assert torch.equal(buffer[:total].view(dtype).view(shape), tensor)
                assert sum(shard.own(tensor).numel() for shard in shards) == total


def test_sequence_parallelism_is_refused() -> None:
    with pytest.raises(LayoutError, match="sequence parallelism"):
        Shards.over(TensorParallel(2, 0, sequence_parallel=True))
    assert Shards.over(TensorParallel(1, 0, sequence_parallel=True)) is None


class Wire:
    """Counts what leaves this process point to point while it is entered."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    def __enter__(self) -> Self:
        self._isend = dist.isend
        dist.isend = self._count
        return self

    def __exit__(self, *_: object) -> None:
        dist.isend = self._isend

    def _count(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.sent_bytes += tensor.numel() * tensor.element_size()
        return self._isend(tensor, *args, **kwargs)


def _batches(step: int) -> Any:
    for j in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(10 * step + j)
        ids = torch.randint(0, LLAMA["vocab_size"], (ROWS, SEQUENCE + 1), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def _train(groups: Any, *, shard: bool, schedule: str, chunks: int, dynamic: bool) -> tuple[Any, int]:
    """Losses, norms, evaluation and weights; bytes sent in the last training step."""
    from dsx.engine.initialize import initialize
    from dsx.engine.pipeline_module import PipelineModule
    from dsx.models.families import layers, loss
    from dsx.models.hf_config import model_spec
    from dsx.nn.split import WeightGradients

    model, split = model_spec(LLAMA), WeightGradients()
    tp = groups.tensor_parallel
    pipeline = PipelineModule(
        layers(model, tp, dtype=torch.float32, split=split),
        loss_fn=loss(model, tp),
        groups=groups,
        num_chunks=chunks,
        schedule=schedule,
        partition_method="uniform",
        dynamic_shape=dynamic,
        release_outputs=True,
        shard_transfers=shard,
        split=split,
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    engine, found = initialize(model=pipeline, config=config)[0], []
    for step in range(STEPS):
        with Wire() as wire:
            found.append(float(engine.train_batch(_batches(step))))
        found.append(engine.get_global_grad_norm())
    found.append(float(engine.eval_batch(_batches(STEPS))))
    return (found, [p.detach().clone() for p in pipeline.parameters()]), wire.sent_bytes


def _compare(rank: int, world_size: int) -> list[tuple[bool, int, int]]:
    """Per case: whether results are equal, and the bytes sent whole and cut."""
    from dsx.parallel.groups import make_groups
    from dsx.parallel.mesh import Mesh

    groups, results = make_groups(Mesh.of(pp=PP, tp=TP)), []
    for case in (
        {"schedule": "1f1b", "chunks": 1, "dynamic": False},
        {"schedule": "zbv", "chunks": 2, "dynamic": False},
        {"schedule": "interleaved", "chunks": 2, "dynamic": True},
    ):
        (one, weights), whole = _train(groups, shard=False, **case)
        (other, same), cut = _train(groups, shard=True, **case)
        equal = one == other and all(map(torch.equal, weights, same))
        results.append((equal, whole, cut))
    return results


def test_half_the_bytes_and_the_same_bits() -> None:
    message = ROWS * SEQUENCE * LLAMA["hidden_size"] * 4
    assert message % TP == 0
    for cases in ranks.run(_compare, PP * TP):
        assert all(equal for equal, *_ in cases)
        (_, whole, cut), (_, whole_v, cut_v), (_, varying, varying_cut) = cases
        # 1F1B: each stage sends either the activation up or the gradient down, once per micro-batch.
        assert (whole, cut) == (MICRO_BATCHES * message, MICRO_BATCHES * message // TP)
        # ZBV: rank 0 holds stages 0 and 3, so both ranks send one activation and one gradient.
        assert (whole_v, cut_v) == (2 * MICRO_BATCHES * message, 2 * MICRO_BATCHES * message // TP)
        # Interleaved: three of the six hand-overs are each rank's. Headers, one per activation, go whole.
        assert varying - varying_cut == 3 * MICRO_BATCHES * message // TP


class Different(nn.Module):
    """Of equal weights, which dsx sees to, no two tensor-parallel ranks make the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.weight + dist.get_rank() % TP)


def _differ(rank: int, world_size: int) -> str:
    import dsx
    from dsx.parallel.groups import make_groups
    from dsx.parallel.mesh import Mesh

    pipeline = dsx.PipelineModule(
        [Different(), nn.Linear(4, 4)],
        loss_fn=nn.functional.mse_loss,
        groups=make_groups(Mesh.of(pp=PP, tp=TP)),
        shard_transfers=True,
    )
    optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer}
    engine = dsx.initialize(model=pipeline, config=config)[0]
    if rank >= TP:  # would wait for what the others refuse to send
        return ""
    try:
        engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1, 4))]))
    except ModelError as error:
        return str(error)
    return "trained"


def test_ranks_that_differ_are_refused() -> None:
    messages = ranks.run(_differ, PP * TP)
    assert messages[0] == messages[1]
    assert "activation into virtual stage 1: tensor-parallel ranks hold different values" in messages[0]


def _alike(rank: int, world_size: int) -> list[bool]:
    """Whether each of some tensors passes, of which ranks hold different versions."""
    shards = Shards.over(TensorParallel(world_size, rank))
    assert shards is not None
    x = torch.linspace(-3, 3, 7)
    nan = torch.tensor([float("nan"), float("inf"), 1.0])
    cases = [x, x.bfloat16(), x > 0, x.to(torch.complex64), torch.arange(5), nan, torch.zeros(0)]
    cases += [x + rank * 1e-7, x.bfloat16() * (1 + rank * 2**-8), x + rank * 1e-3, x.bfloat16() + rank * 0.5]
    cases += [x > rank, torch.arange(5) + rank, x.to(torch.complex64) * (1 + 1j * rank)]
    found = []
    for tensor in cases:
        try:
            shards.require_equal([x, tensor], "here")
            found.append(True)
        except ModelError:
            found.append(False)
    return found


def test_rounding_is_no_difference() -> None:
    """Of a reduction in another order, say; anything above is."""
    assert ranks.run(_alike, 2) == [[True] * 9 + [False] * 5] * 2
