"""What layers may do at stage boundaries, and what a step leaves behind."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from dsx.errors import ModelError
from engine import toy_pipeline as toy
from engine.toy_pipeline import Case
from often import often

BOUNDARIES = [
    Case(layers=name, pp=pp, chunks=chunks, zero=zero, micro_batches=3, module={"partition_method": parts})
    for name in ("in place", "tuples", "identity")
    for pp, chunks, zero, parts in [
        (1, 4, 0, [1, 1, 1, 2]),  # chunks on one rank hand over without a copy
        (2, 2, 1, [1, 1, 1, 2]),
        (2, 1, 3, [1, 4]),
    ]
]


@pytest.mark.parametrize("pp", [1, 2])
def test_layers_at_boundaries_train_as_in_one_process(pp: int) -> None:
    """In-place first layers, tuples of mixed dtypes, views, unused outputs, and layers that do nothing."""
    cases = [case for case in BOUNDARIES if case.pp == pp]
    for case, losses in zip(cases, ranks.run(toy.train_all, pp, cases)[0], strict=True):
        expected = toy.oracle(case.layers, micro_batches=3)
        assert toy.flat(losses) == pytest.approx(toy.flat(expected), rel=1e-5), case


def _user_data(rank: int, world_size: int) -> bool:
    """Whether an iterator's tensors are as they were after a step whose first layer writes over its input."""
    made = toy.engine(Case(pp=2))
    if rank == 0:
        made.module.get_submodule("0").register_forward_pre_hook(_overwrite)
    data = list(toy.batches(0, 2))
    kept = [(inputs.clone(), labels.clone()) for inputs, labels in data]
    made.train_batch(iter(data))
    return all(torch.equal(x, y) for pair in zip(data, kept, strict=True) for x, y in zip(*pair, strict=True))


def _overwrite(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    inputs[0].mul_(2)


def test_the_users_batches_are_left_alone() -> None:
    assert ranks.run(_user_data, 2) == [True, True]


def _left_behind(rank: int, world_size: int, case: Case) -> tuple[list[Any], int]:
    """Tensors that a step leaves, and outputs alive after an evaluation's result is dropped."""
    made = toy.engine(case)
    for step in range(2):
        made.train_batch(toy.batches(step, case.micro_batches))
    gc.collect()
    gc.disable()
    before = {id(o) for o in gc.get_objects() if isinstance(o, torch.Tensor)}
    made.train_batch(toy.batches(2, case.micro_batches))
    new = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and id(o) not in before and o.dim()]
    left = list(map(weakref.ref, new))  # no scalars: the norm and the like
    del new
    ends = (
        time.monotonic() + 20
    )  # gloo's threads let go of what they have sent a moment after it is waited for
    while any(each() is not None for each in left) and time.monotonic() < ends:
        pass
    kept = [tuple(o.shape) for each in left if (o := each()) is not None]
    made.eval_batch(toy.batches(3, case.micro_batches), compute_loss=False)
    shape = (toy.ROWS, toy.WIDTH)
    outputs = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and tuple(o.shape) == shape]
    return kept, len(outputs)


@pytest.mark.parametrize(
    ("pp", "chunks", "schedule"), [(1, 2, "auto"), (2, 1, "auto"), (2, 2, "auto"), (2, 2, "zbv")]
)
def test_nothing_of_a_step_is_kept(pp: int, chunks: int, schedule: str) -> None:
    """Neither activations, graphs, receive buffers nor batches, and no cycle that only a collector ends."""
    case = Case(pp=pp, chunks=chunks, micro_batches=4, module={"schedule": schedule})
    for left, outputs in ranks.run(_left_behind, pp, case):
        assert left == []
        assert outputs == 0


def _alive_in_evaluation(rank: int, world_size: int, case: Case) -> list[int]:
    """Most outputs of layers alive at once while evaluating few and many micro-batches."""
    made, peaks = toy.engine(case), []
    for count in (4, 16):
        outputs: list[weakref.ref[torch.Tensor]] = []
        alive: list[int] = []

        def look(
            layer: nn.Module, inputs: Any, output: torch.Tensor, outputs: Any = outputs, alive: Any = alive
        ) -> None:
            outputs.append(weakref.ref(output))
            alive.append(sum(reference() is not None for reference in outputs))

        hooks = [layer.register_forward_hook(look) for layer in made.module.children()]
        made.eval_batch(toy.batches(0, count), num_micro_batches=count)
        for hook in hooks:
            hook.remove()
        peaks.append(max(alive))
    return peaks


@pytest.mark.parametrize(("pp", "schedule"), [(1, "auto"), (2, "auto"), (2, "zbv")])
def test_evaluation_takes_no_more_memory_for_more_micro_batches(pp: int, schedule: str) -> None:
    """Stages on one rank hand over without keeping, and what is sent goes."""
    case = Case(pp=pp, chunks=2, micro_batches=4, module={"schedule": schedule})
    for few, many in ranks.run(_alive_in_evaluation, pp, case):
        assert few == many <= 2


def _released(rank: int, world_size: int, kinds: list[tuple[str, str, tuple[int, ...]]]) -> list[list[float]]:
    """Losses of dsx's own families, sent outputs kept and released."""
    import deepspeed

    import dsx
    from dsx.checkpoint.claims import model_of
    from dsx.models import families
    from dsx.nn.parallel import TensorParallel
    from parity.oracle import CONFIGS, tokens

    deepspeed.init_distributed()
    results = []
    for family, recompute, parts in kinds:
        spec, losses = model_of(CONFIGS[family]), []
        for release in (False, True):
            module = dsx.PipelineModule(
                families.layers(
                    spec, TensorParallel(), dtype=torch.float32, recompute=recompute, pad_multiple=8
                ),
                num_stages=2,
                partition_method=parts,
                loss_fn=families.loss(spec, TensorParallel(), overwrite_logits=True),
                release_outputs=release,
            )
            made, *_ = dsx.initialize(model=module, config=toy.config(Case(zero=1, micro_batches=3)))
            rows = [tokens(step, 6) for step in range(2)]
            data = [[(b[:, :-1], b[:, 1:]) for b in batch.split(2)] for batch in rows]
            losses.append([made.train_batch(iter(batch)).item() for batch in data])
        results.append(losses)
    return results


def test_released_outputs_change_nothing_in_dsxs_families() -> None:
    """Whatever layer ends a stage: embedding, positions, block or final norm; with every recompute mode."""
    # GPT-2: 0 words, 1 positions, 2-5 blocks, 6 norm, 7 head. Llama: 0 words, 1-4 blocks, 5 norm, 6 head.
    kinds = [("gpt2", "none", [1, 7]), ("gpt2", "none", [2, 6]), ("gpt2", "full", [7, 1])]
    kinds += [("gpt2", "none", [7, 1]), ("llama", "none", [6, 1]), ("llama", "full", [1, 6])]
    kinds += [("llama", "selective", [3, 4]), ("llama", "full", [3, 4])]
    for kind, (kept, released) in zip(kinds, ranks.run(_released, 2, kinds)[0], strict=True):
        assert kept == released, kind


def _syncs(rank: int, world_size: int, cases: list[Case]) -> list[int]:
    """Device-wide waits within steps, which could wait for a transfer that waits for this rank."""
    from deepspeed.accelerator import get_accelerator

    counts = []
    for case in cases:
        made, calls = toy.engine(case), []
        for step in range(3):  # DeepSpeed's throughput timer starts with the third
            made.train_batch(toy.batches(step, 2))
        kind = type(get_accelerator())
        real, resolves = kind.synchronize, kind.resolves_data_dependency
        kind.synchronize = lambda self, *args, calls=calls: calls.append(args)
        kind.resolves_data_dependency = lambda self: False  # as CUDA says
        try:
            made.train_batch(toy.batches(3, 2))
        finally:
            kind.synchronize, kind.resolves_data_dependency = real, resolves
        counts.append(len(calls))
    return counts


def test_no_step_waits_for_the_whole_device() -> None:
    overlap = {"overlap_comm": True}
    timers = {"timers": {"throughput": {"enabled": True, "synchronized": True}}}
    cases = [Case(pp=2, zero=0), Case(pp=2, zero=1, keys=timers), Case(pp=2, zero=2, zero_keys=overlap)]
    assert ranks.run(_syncs, 2, cases) == [[0, 0, 0]] * 2


class Stuck(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(toy.WIDTH, toy.WIDTH), kind

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        outputs = {"list": [y], "dict": {"y": y}, "none": (y, None), "many": (y,) * 33, "fp8": None}
        return y.to(torch.float8_e4m3fn) if self.kind == "fp8" else outputs[self.kind]


def _over_a_boundary(rank: int, world_size: int, kind: str) -> None:
    import deepspeed

    import dsx

    deepspeed.init_distributed()
    module = dsx.PipelineModule(
        [Stuck(kind), toy.Layer()], num_stages=world_size, num_chunks=2 // world_size, loss_fn=toy.loss_fn
    )
    made, *_ = dsx.initialize(model=module, config=toy.config(Case()))
    made.train_batch(toy.batches(0, 2))


def _boundary_errors(rank: int, world_size: int, kinds: list[str]) -> list[str]:
    texts = []
    for kind in kinds:
        with pytest.raises(ModelError) as caught:
            _over_a_boundary(rank, world_size, kind)
        texts.append(str(caught.value))
    return texts


def test_what_cannot_cross_a_boundary_is_named() -> None:
    texts = ranks.run(_boundary_errors, 1, ["list", "dict", "none", "many", "fp8"])[0]
    for text, word in zip(texts, ["list", "dict", "NoneType", "33 tensors", "float8_e4m3fn"], strict=True):
        assert "virtual stage 0" in text
        assert word in text


@pytest.mark.parametrize("kind", often(["list", "none", "dict", "many"], every=4))
def test_what_cannot_cross_to_another_rank_is_named(kind: str) -> None:
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(_over_a_boundary, 2, kind)
    assert isinstance(caught.value.error, ModelError)
    assert "virtual stage 0" in str(caught.value.error)


def _reset(rank: int, world_size: int) -> list[float]:
    made, losses = toy.engine(Case(pp=2, chunks=2)), []
    for rows in (2, 2, 5, 3):
        if rows != 2:
            made.reset_activation_shape()
        generator = torch.Generator().manual_seed(rows)
        data = [tuple(torch.randn(rows, toy.WIDTH, generator=generator) for _ in range(2)) for _ in range(2)]
        losses.append(made.train_batch(iter(data)).item())
        made.eval_batch(iter(data))
    for name, parameter in made.module.named_parameters():
        parameter.requires_grad_(not name.startswith("0."))
    made.reset_activation_shape()
    losses.append(made.train_batch(toy.batches(0, 2)).item())
    return losses


def test_shapes_and_gradients_may_change_after_a_reset() -> None:
    """A longer batch, or layers frozen on the way."""
    losses = ranks.run(_reset, 2)
    assert losses[0] == losses[1]
    assert all(0 < loss < 10 for loss in losses[0])


def test_a_changed_shape_is_an_error_that_shows_both() -> None:
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(_changed_shape, 2)
    assert isinstance(caught.value.error, ModelError)
    text = str(caught.value.error)
    assert "[2, 8] torch.float32 with gradient" in text
    assert "[5, 8]" in text
    assert "dynamic_shape=True" in text


def _changed_shape(rank: int, world_size: int) -> None:
    made = toy.engine(Case(pp=2))
    made.train_batch(toy.batches(0, 2))
    made.train_batch(iter([(torch.randn(5, toy.WIDTH), torch.randn(5, toy.WIDTH)) for _ in range(2)]))


def _no_scalar(rank: int, world_size: int) -> None:
    import deepspeed

    import dsx

    deepspeed.init_distributed()
    module = dsx.PipelineModule([toy.Layer()], num_stages=1, loss_fn=lambda outputs, labels: outputs - labels)
    made, *_ = dsx.initialize(model=module, config=toy.config(Case()))
    made.train_batch(toy.batches(0, 2))


def test_a_loss_that_is_no_scalar_is_named() -> None:
    with pytest.raises(ranks.RankError, match=r"loss of micro-batch 0: it is Tensor of shape \(2, 8\)"):
        ranks.run(_no_scalar, 1)
