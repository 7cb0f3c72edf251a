"""When gradients cross data parallelism, how many bytes, and that it changes no result."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.comm.torch import TorchBackend
from torch import nn
from torch.utils.checkpoint import checkpoint

import ranks
from dsx.config.schema import ZeroConfig
from dsx.engine.zero.reduction import GradientTransport
from dsx.errors import ModelError
from dsx.schedules.schedule import BACKWARDS, Op
from engine import toy_pipeline as toy
from engine.toy_pipeline import Case
from often import often

PP, DP, MICRO_BATCHES = 2, 2, 4
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}  # with bf16 and ZeRO-1: BF16_Optimizer
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter")


@contextmanager
def recorded(engine: Any, log: list[Any]) -> Iterator[None]:
    """Log every action as it ends, and how many elements are summed over data parallelism when."""

    @contextmanager
    def around(action: Any) -> Iterator[None]:
        yield
        log.append(str(action))

    make_run = engine._step_run
    data = engine.groups.data
    with pytest.MonkeyPatch.context() as mp:
        mp.setattr(engine, "_step_run", lambda source, count, mode, _: make_run(source, count, mode, around))
        for name in REDUCTIONS:
            if (real := getattr(dist, name, None)) is None:
                continue

            def call(tensor: Any, *args: Any, real: Any = real, **kwargs: Any) -> Any:
                if kwargs.get("group") is data:
                    log.append(tensor.numel())
                return real(tensor, *args, **kwargs)

            mp.setattr(dist, name, call)
        to_owners = GradientTransport._send_to_owners

        def send(self: Any, pieces: Any, flat: torch.Tensor, *others: Any) -> Any:
            log.append(flat.numel())
            return to_owners(self, pieces, flat, *others)

        mp.setattr(GradientTransport, "_send_to_owners", send)
        yield


def _logs(
    rank: int, world_size: int, cases: list[tuple[Case, str]]
) -> list[tuple[list[Any], list[Any], int]]:
    """(what happened in the second step, what should have, elements of all trainable parameters)."""
    found = []
    for case, reduce in cases:
        made = toy.engine(case, zero=ZeroConfig(reduce=reduce))
        log: list[Any] = []
        toy.train(case, made)
        with recorded(made, log):
            made.train_batch(toy.batches(0, MICRO_BATCHES, DP, made.groups.dp_rank))
        row = made.programs.step(MICRO_BATCHES, training=True)[0].rows[made.groups.pp_rank]
        ends = {action.stage: position for position, action in enumerate(row)}
        last = {a.stage: position for position, a in enumerate(row) if a.op in BACKWARDS}
        users: dict[nn.Parameter, list[int]] = {}
        for stage in sorted(ends, key=ends.get):
            for parameter in filter(lambda p: p.requires_grad, made.pipeline.chunks.used_parameters()[stage]):
                users.setdefault(parameter, []).append(stage)
        ready: dict[tuple[int, str], int] = {}
        for parameter, stages in users.items():
            whole = row[last[stages[0]]].op is Op.BACKWARD
            kind = "shared" if len(stages) > 1 else "whole" if whole else "split"
            place = last[stages[0]] if kind == "whole" else ends[stages[-1]], kind
            ready[place] = ready.get(place, 0) + parameter.numel()
        expected: list[Any] = []
        for position, action in enumerate(row):
            whole, *after = (ready.get((position, kind)) for kind in ("whole", "split", "shared"))
            expected += [each for each in (whole, str(action), *after) if each]
        total = sum(p.numel() for p in made.pipeline.parameters() if p.requires_grad)
        found.append((log, expected, total))
    return found


ONCE = [
    (Case(layers=layers, zero=zero, pp=PP, chunks=2, micro_batches=MICRO_BATCHES, steps=1, **more), "step")
    for zero in (0, 1, 2)
    for layers, more in (
        ("plain", {}),
        ("tied", {"module": {"schedule": "zbv"}}),
        ("plain", {"prepare": "frozen start"}),
    )
]
ALWAYS = Case(zero=2, pp=PP, chunks=2, micro_batches=MICRO_BATCHES, steps=1)


def test_each_chunk_is_reduced_once_in_its_last_backward() -> None:
    """A weight that two chunks share after the second of them; after the last action, if it is split."""
    for results in ranks.run(_logs, PP * DP, ONCE):
        for (case, _), (log, expected, total) in zip(ONCE, results, strict=True):
            assert log == expected, case
            assert sum(x for x in log if isinstance(x, int)) == total
            reductions = [i for i, x in enumerate(log) if isinstance(x, int)]
            computations = [i for i, x in enumerate(log) if re.fullmatch(r"\d+[BIW]\d+", str(x))]
            if (case.layers, case.prepare) == (
                "plain",
                "nothing",
            ):  # the first chunk to be done leaves while others compute
                assert reductions[0] < computations[-1]


def test_zero2_reduces_every_micro_batch_when_asked() -> None:
    for [(log, _, total)] in ranks.run(_logs, PP * DP, [(ALWAYS, "micro_batch")]):
        sent = [x for x in log if isinstance(x, int)]
        assert sum(sent) == MICRO_BATCHES * total


def _against_deepspeed(rank: int, world_size: int, cases: list[Case]) -> list[tuple[Any, Any, bool]]:
    """Losses and norms of both ways, and whether DeepSpeed's own reduction took part in the second alone."""
    from dsx.engine import zero as zero_adapters

    found = []
    for case in cases:
        mine = toy.engine(case)
        ours = toy.train(case, mine)
        with pytest.MonkeyPatch.context() as mp:
            mp.setattr(zero_adapters, "reducible", lambda engine: False)
            made = toy.engine(case)
            alone = made.enable_backward_allreduce and not mine.enable_backward_allreduce
            found.append((ours, toy.train(case, made), alone))
    return found


HOST = {"offload_optimizer": {"device": "cpu"}}
OWN = {"zero_force_ds_cpu_optimizer": False}
BF16_SUMS = {"data_types": {"grad_accum_dtype": "bf16"}}
SAME = [
    Case(
        layers="tied",
        zero=zero,
        pp=PP,
        chunks=2,
        bf16=bf16,
        zero_keys=zero_keys,
        keys=keys,
        micro_batches=count,
    )
    for zero, bf16, zero_keys, keys, count in (
        (0, False, {}, {}, 3),
        (0, False, {"reduce_bucket_size": 60}, {"prescale_gradients": True}, 3),
        (0, True, {}, {"gradient_predivide_factor": 4.0}, 3),
        (1, False, {"reduce_scatter": False}, {"gradient_predivide_factor": 4.0}, 3),
        (1, False, {"round_robin_gradients": True}, {}, 3),
        (1, True, {}, BF16_SUMS, 3),
        (1, True, {}, {**FP32_SUMS, "communication_data_type": "fp32"}, 3),
        (1, True, {}, FP32_SUMS, 3),
        (1, True, {"reduce_bucket_size": 50}, FP32_SUMS, 3),  # a weight of 64 elements in two of them
        (1, False, {**HOST, "reduce_bucket_size": 60}, OWN, 3),
        (1, True, HOST, OWN | BF16_SUMS, 3),
        (1, True, HOST, OWN | FP32_SUMS, 3),
        (2, False, HOST, OWN, 1),
        (2, True, HOST, OWN | BF16_SUMS, 1),
    )
]


@pytest.mark.parametrize("cases", often([SAME[at::3] for at in range(3)], 3), ids=len)
def test_the_same_bits_as_deepspeeds_own_reduction(cases: list[Case]) -> None:
    """Two ranks: a sum of two has one order. Every way to scale, precision and cut."""
    found = ranks.run(_against_deepspeed, PP * DP, cases)[0]
    for case, (ours, theirs, used) in zip(cases, found, strict=True):
        assert used, case
        assert ours == theirs, case


def test_zero2_sums_micro_batches_in_the_precision_that_is_asked_for() -> None:
    """Reduced at the end or after every micro-batch: the same but for rounding, far below bf16's."""
    cases = [
        Case(zero=2, pp=PP, chunks=2, micro_batches=8, bf16=bf16, keys=keys)
        for bf16, keys in (
            (False, {}),
            (True, {**FP32_SUMS, "communication_data_type": "fp32"}),
        )
    ]
    for case, (ours, theirs, _) in zip(cases, ranks.run(_against_deepspeed, PP * DP, cases)[0], strict=True):
        # Weights are rounded to bf16 after every step, which turns the last bit now and then.
        assert toy.flat(ours)[:2] == pytest.approx(toy.flat(theirs)[:2], rel=1e-6), case
        assert toy.flat(ours) == pytest.approx(toy.flat(theirs), rel=1e-3 if case.bf16 else 1e-6), case


OFFLOADED = (2, True, None)


def _sent(rank: int, world_size: int, micro_batches: int) -> dict[Any, float]:
    """Elements that a rank sends in a step, in (N - 1) / N of all parameters, by what is used."""
    from torch.distributed.fsdp import fully_shard

    counts = [0.0]
    units = {
        "all_reduce": lambda tensor: 2 * tensor.numel(),
        "all_gather_into_tensor": lambda whole, _: whole.numel(),
        "reduce_scatter_tensor": lambda _, whole: whole.numel(),
        "isend": lambda message: message.numel() * world_size / (world_size - 1),
    }
    for name in ("all_gather", "reduce_scatter"):  # torch 2.13 has another name for them
        if hasattr(dist, f"{name}_single"):
            old = "all_gather_into_tensor" if name == "all_gather" else "reduce_scatter_tensor"
            units[f"{name}_single"] = units[old]

    def count(name: str) -> None:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            counts[0] += units[name](*tensors) if max(t.numel() for t in tensors) > 4 else 0  # norms, losses
            return original(*args, **kwargs)

        mp.setattr(dist, name, call)

    found = {}
    with pytest.MonkeyPatch.context() as mp:
        for name in units:
            count(name)
        mp.setattr(
            TorchBackend, "get_all_gather_function", classmethod(lambda _: dist.all_gather_into_tensor)
        )
        for zero, host, reduce in (
            (1, False, None),
            (2, False, None),
            (1, True, None),
            (2, True, "step"),
            OFFLOADED,
        ):
            case = Case(zero=zero, micro_batches=micro_batches, zero_keys=HOST if host else {}, keys=OWN)
            made = toy.engine(case, zero=ZeroConfig(reduce=reduce))
            made.train_batch(toy.batches(0, micro_batches, world_size, rank))  # asks once who lacks gradients
            counts[0] = 0.0
            made.train_batch(toy.batches(0, micro_batches, world_size, rank))
            found[zero, host, reduce] = counts[0] / sum(p.numel() for p in made.module.parameters())
        model = nn.Sequential(*(nn.Linear(toy.WIDTH, toy.WIDTH) for _ in range(8)))
        numel = sum(p.numel() for p in model.parameters())
        fully_shard(model, reshard_after_forward=False)
        counts[0] = 0.0
        for number in range(micro_batches):
            model.set_requires_gradient_sync(number == micro_batches - 1)
            model.set_reshard_after_backward(number == micro_batches - 1)
            model(torch.ones(1, toy.WIDTH)).sum().backward()
        found["FSDP2"] = counts[0] / numel
    return found


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_as_many_bytes_as_fsdp2_whatever_the_micro_batches(micro_batches: int) -> None:
    """Each gradient once, to be summed where it is used, and each parameter once.

    At ZeRO-2 with offload DeepSpeed all-reduces after each of several micro-batches, unless told otherwise.
    """
    every = ranks.run(_sent, 2, micro_batches)
    for name in every[0]:
        units = 2 * micro_batches + 1 if name == OFFLOADED and micro_batches > 1 else 2
        assert sum(sent[name] for sent in every) / 2 == pytest.approx(units, rel=0.01), name


BUCKET = 50


def _buckets(rank: int, world_size: int, case: Case) -> tuple[list[Any], int, int, int]:
    """(what happened in a step, buckets alive at once, bf16 gradients seen, elements of all parameters)."""
    made = toy.engine(case)
    made.train_batch(toy.batches(0, MICRO_BATCHES, DP, made.groups.dp_rank, dtype=case.dtype))
    alive: list[weakref.ref[torch.Tensor]] = []
    most = [0]
    gradients = [0]
    log: list[Any] = []
    with recorded(made, log), pytest.MonkeyPatch.context() as mp:
        real, before_action = GradientTransport._send_to_owners, made._adapter.hooks.before_action

        def send(*args: Any) -> Any:
            bucket = real(*args)
            alive.append(weakref.ref(bucket.mine))
            most[0] = max(most[0], sum(ref() is not None for ref in alive))
            return bucket

        def look(position: int) -> None:
            gradients[0] += sum(p.grad is not None for p in made.module.parameters())
            before_action(position)

        mp.setattr(GradientTransport, "_send_to_owners", send)
        mp.setattr(made._adapter.hooks, "before_action", look)
        made.train_batch(toy.batches(0, MICRO_BATCHES, DP, made.groups.dp_rank, dtype=case.dtype))
    return log, most[0], gradients[0], sum(p.numel() for p in made.pipeline.parameters())


def test_sums_in_fp32_take_two_buckets_and_no_bf16_gradients() -> None:
    """BF16_Optimizer keeps its fp32 gradients where they are: what is under way comes on top."""
    case = Case(
        zero=1,
        pp=PP,
        chunks=2,
        micro_batches=MICRO_BATCHES,
        bf16=True,
        keys=FP32_SUMS,
        zero_keys={"reduce_bucket_size": BUCKET},
    )
    for log, most, gradients, total in ranks.run(_buckets, PP * DP, case):
        sent = [x for x in log if isinstance(x, int)]
        assert sum(sent) == total
        assert max(sent) == BUCKET
        assert len(sent) == 4  # of each chunk's 72 elements, 50 and 22
        assert (most, gradients) == (2, 0)
        computations = [i for i, x in enumerate(log) if re.fullmatch(r"\d+[BIW]\d+", str(x))]
        assert log.index(BUCKET) < computations[-1]


class Borrower(nn.Module):
    """Uses another layer's weight without saying so."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.linear = nn.Linear(toy.WIDTH, toy.WIDTH)
        self._other = (other,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self._other[0].weight


def _borrow(rank: int, world_size: int) -> list[str]:
    import dsx

    messages = []
    sums = {"bf16": True, "keys": FP32_SUMS, "zero_keys": {"reduce_bucket_size": 10}}
    for case in (*(Case(zero=zero) for zero in range(3)), Case(zero=1, **sums)):
        owner = nn.Linear(toy.WIDTH, toy.WIDTH)
        module = dsx.PipelineModule(
            [Borrower(owner), owner],
            num_stages=1,
            num_chunks=2,
            loss_fn=toy.loss_fn,
            partition_method="uniform",
        )
        engine = dsx.initialize(model=module, config=toy.config(case))[0]
        try:
            engine.train_batch(toy.batches(0, 2, dtype=case.dtype))
        except ModelError as error:
            messages.append(str(error))
    return messages


def test_a_weight_shared_in_secret_is_an_error() -> None:
    for messages in ranks.run(_borrow, 2):
        assert len(messages) == 4
        assert all("parameter '1.weight'" in message and "TiedLayerSpec" in message for message in messages)


class Again(nn.Module):
    """Recomputes within a backward by backwards of their own, and uses a weight in two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(toy.WIDTH, toy.WIDTH), nn.Linear(toy.WIDTH, toy.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b, self.a):
            x = checkpoint(layer, x, use_reentrant=True).tanh()
        return x


def _again(rank: int, world_size: int) -> list[list[float]]:
    import dsx

    found = []
    for zero, keys in ((0, {}), (0, {"reduce_bucket_size": 30}), (1, {"reduce_bucket_size": 30})):
        torch.manual_seed(0)
        module = dsx.PipelineModule([nn.Linear(toy.WIDTH, toy.WIDTH), Again()], 1, loss_fn=toy.loss_fn)
        engine = dsx.initialize(model=module, config=toy.config(Case(zero=zero, zero_keys=keys)))[0]
        losses = [float(engine.train_batch(toy.batches(step, 2, world_size, rank))) for step in range(2)]
        found.append([*losses, float(engine.get_global_grad_norm())])
    return found


def test_a_gradient_that_comes_in_parts_leaves_when_it_is_whole() -> None:
    whole, *cut = ranks.run(_again, 2)[0]
    for other in cut:
        assert other == pytest.approx(whole, rel=1e-6)


class Unused(nn.Module):
    """Uses one of two weights, which one depends on the data: another one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(toy.WIDTH, toy.WIDTH), nn.Linear(toy.WIDTH, toy.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if dist.get_rank() == 0 else self.b(x)


def _unused(rank: int, world_size: int) -> list[list[float]]:
    import dsx

    found = []
    for case in (*(Case(zero=zero) for zero in range(3)), Case(zero=1, bf16=True, keys=FP32_SUMS)):
        torch.manual_seed(0)
        module = dsx.PipelineModule([Unused(), nn.Linear(toy.WIDTH, toy.WIDTH)], 1, loss_fn=toy.loss_fn)
        engine = dsx.initialize(model=module, config=toy.config(case))[0]
        for step in range(2):
            engine.train_batch(toy.batches(step, 2, dtype=case.dtype))
        found.append([engine.get_global_grad_norm(), *(float(p.double().sum()) for p in module.parameters())])
    return found


def test_ranks_may_use_different_weights() -> None:
    """A rank without a gradient counts as zero; all ranks and all ZeRO stages end with the same weights."""
    first, second = ranks.run(_unused, 2)
    assert first == second
    *whole, half = first
    for other in whole[1:]:
        assert other == pytest.approx(whole[0], rel=1e-6)
    assert half == pytest.approx(whole[0], rel=2e-2)
