"""An axis that divides the sequence, under layers of one's own: losses, gradients, norms, ZeRO, checkpoints.

Each rank has a part of every row, and all layers but one look at one token at a time; that one gathers rows.
Ranks have different numbers of labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ranks
from dsx.engine.initialize import say_once
from dsx.engine.ready_layers import VOUCHED, require_context
from dsx.engine.settings import settings_of
from dsx.errors import ConfigError, ModelError
from dsx.nn import ContextParallel, as_head, gather_rows
from dsx.nn.embedding import TiedUse
from dsx.parallel.mesh import Mesh
from engine import test_token_mean as plain
from engine.test_token_mean import ACCUMULATION, ROWS, mean_of, micro_batch

CLIP, RATE, STEPS = 0.05, 0.5, (0, 2, 3)


class Mean(nn.Module):
    """To each token the mean of all tokens up to it: attention without weights."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        self.cp = cp

    def forward(self, x: Tensor) -> Tensor:
        whole = gather_rows(x, self.cp)
        seen = torch.arange(whole.shape[1]) <= self.cp.indices(whole.shape[1])[:, None]
        return x + (seen / seen.sum(1, keepdim=True)) @ whole


def layers(cp: ContextParallel) -> list[nn.Module]:
    first, *rest = plain.layers()
    return [first, Mean(cp), *rest]


class Run:
    """An engine over such a mesh, whose ranks read whole rows and train on slices."""

    def __init__(self, stage: int, degrees: dict[str, int], loss: object = None) -> None:
        from deepspeed import init_distributed

        import dsx
        from dsx.parallel.groups import make_groups

        init_distributed()
        self.mesh = dsx.Mesh.of(**degrees)
        groups = make_groups(self.mesh)
        self.share = groups.share
        loss = loss or dsx.nn.TokenMean(mean_of)
        listed = layers(groups.context_parallel)
        model = dsx.PipelineModule(listed, groups=groups, loss_fn=loss, partition_method="uniform")
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
            "zero_allow_untested_optimizer": True,
        }
        self.engine, *_ = dsx.initialize(model=model, config=config)

    def data(self, step: int) -> Iterator[tuple[Tensor, ...]]:
        """The micro-batches of this rank's share."""
        numbers = [index * self.mesh.num_shares + self.share for index in range(ACCUMULATION)]
        return iter([micro_batch(step, number) for number in numbers])

    def steps(self, steps: tuple[int, ...]) -> list[list[float]]:
        """Loss, gradient norm and trained tokens of each step; the loss of an evaluation."""
        seen = []
        for step in steps:
            loss = float(self.engine.train_batch(self.data(step)))
            seen.append([loss, self.engine.get_global_grad_norm(), self.engine.trained_tokens])
        return [*seen, [float(self.engine.eval_batch(self.data(2)))]]


def train(rank: int, world_size: int, stage: int, degrees: dict[str, int], folder: str) -> list[list[float]]:
    run = Run(stage, degrees)
    batch = ROWS * ACCUMULATION * degrees.get("dp", 1)
    assert run.engine.train_batch_size() == batch
    run.engine.set_train_batch_size(2 * batch)
    assert (run.engine.train_batch_size(), run.engine.micro_batches) == (2 * batch, 2 * ACCUMULATION)
    run.engine.set_train_batch_size(batch)
    run.engine.set_train_micro_batch_size(2 * ROWS)
    assert run.engine.train_batch_size() == 2 * batch
    run.engine.set_train_micro_batch_size(ROWS)
    seen = run.steps(STEPS[:2])
    run.engine.save_checkpoint(folder)
    return seen + run.steps(STEPS[2:])


def go_on(rank: int, world_size: int, stage: int, degrees: dict[str, int], folder: str) -> list[list[float]]:
    run = Run(stage, degrees)
    run.engine.load_checkpoint(folder)
    return run.steps(STEPS[2:])


def one_process(shares: int) -> list[list[float]]:
    """torch's own loop over whole sequences."""
    model, seen = nn.Sequential(*layers(ContextParallel())), []

    def loss_of(step: int) -> tuple[Tensor, int]:
        batches = [micro_batch(step, number) for number in range(ACCUMULATION * shares)]
        count = sum(int((labels != -100).sum()) for _, labels in batches)
        return sum(mean_of(model(i), y, num_tokens=torch.tensor(count)) for i, y in batches), count

    for step in STEPS:
        model.zero_grad()
        loss, count = loss_of(step)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        torch.optim.SGD(model.parameters(), lr=RATE).step()
        seen.append([loss.item(), norm, count])
        if step != STEPS[0]:  # where the engine evaluates
            seen.append([loss_of(2)[0].item()])
    return seen


def evaluate(rank: int, world_size: int) -> list[tuple[float, list[object]]]:
    import dsx

    def loss_of(logits: Tensor, labels: tuple[Tensor, Tensor], num_tokens: Tensor | None = None) -> Tensor:
        return mean_of(logits, labels[0].where(labels[1], -100), num_tokens=num_tokens)

    run = Run(0, {"cp": world_size}, dsx.nn.TokenMean(loss_of, count=lambda labels: labels[1].sum()))
    data = [(ids, (labels, labels != -100)) for ids, labels in map(micro_batch, [0, 2], [0, 1])]
    given = run.engine.eval_batch(iter(data), reduce_output=None, num_micro_batches=2, return_logits=True)
    outputs = run.engine.eval_batch(iter(data), compute_loss=False, num_micro_batches=2)
    assert all(map(torch.equal, given[1], outputs))
    return [(float(loss), output.tolist()) for loss, output in zip(given[0], outputs, strict=True)]


def test_an_evaluation_gives_whole_rows_and_labels_may_be_nested() -> None:
    model, data = nn.Sequential(*layers(ContextParallel())), [micro_batch(0, 0), micro_batch(2, 1)]
    for given in ranks.run(evaluate, 2):
        for (ids, labels), (loss, output) in zip(data, given, strict=True):
            logits = model(ids).detach()
            assert loss == pytest.approx(float(mean_of(logits, labels)), rel=1e-5)
            torch.testing.assert_close(torch.tensor(output), logits)


def readers(rank: int, world_size: int) -> list[object]:
    import dsx

    run = Run(0, {"dp": 2, "cp": 2})
    rows = TensorDataset(torch.arange(4), torch.arange(4))
    for last in range(2):  # the micro-batch in which ranks differ
        numbers = [run.share] * last + [rank] * (ACCUMULATION - last)
        with pytest.raises(dsx.DataError, match="the ranks of a context axis read the same rows"):
            run.engine.train_batch(iter([micro_batch(0, number) for number in numbers]))
    grid, group = run.engine.grid, run.engine.mpu.get_data_parallel_group()
    seen = [grid.get_data_parallel_rank(), grid.data_parallel_size, grid.dp_group, run.engine.dp_world_size]
    mine = [ids.tolist() for ids, _ in run.engine.deepspeed_io(rows, route="eval")]
    return [*seen, torch.distributed.get_process_group_ranks(group), mine]


def test_ranks_of_the_axis_read_the_same_rows() -> None:
    for rank, seen in enumerate(ranks.run(readers, 4)):
        share, others = rank // 2, [rank % 2, 2 + rank % 2]
        assert seen == [share, 2, others, 2, others, [[share, 2 + share]]]


@pytest.mark.parametrize(
    ("stage", "degrees"),
    [
        (0, {"cp": 2}),
        (1, {"pp": 2, "cp": 2}),
        (2, {"dp": 2, "cp": 2}),
        (3, {"cp": 3}),
    ],
)
def test_a_slice_of_each_sequence_trains_as_the_whole(
    stage: int, degrees: dict[str, int], tmp_path: Path
) -> None:
    size, folder = torch.Size(degrees.values()).numel(), str(tmp_path)
    shares = degrees.get("dp", 1)
    wanted = one_process(shares)
    for seen in ranks.run(train, size, stage, degrees, folder):
        for row, expected in zip(seen, wanted, strict=True):
            assert row == pytest.approx(expected, rel=2e-5)
    # The checkpoint of slices is one of whole sequences.
    for seen in ranks.run(go_on, shares, 1, {"dp": shares}, folder):
        for row, expected in zip(seen, wanted[3:], strict=True):
            assert row == pytest.approx(expected, rel=2e-5)


def test_a_batch_that_does_not_fit_is_told_in_the_numbers_that_were_written() -> None:
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match=r"train_batch_size = 16.* x 2 data-parallel ranks \(3 context-par"):
        settings_of(config, None, Mesh.of(dp=2, cp=3))
    fine = settings_of(config | {"train_batch_size": 8}, None, Mesh.of(dp=2, cp=3))
    assert fine.deepspeed["train_batch_size"] == 24


def test_layers_on_the_axis_are_not_told_to_be_proved_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_of({"train_micro_batch_size_per_gpu": 1}, None, Mesh.of())
    groups = SimpleNamespace(mesh=Mesh.of(cp=2, tp=2))
    say_once(SimpleNamespace(groups=groups, layer_specs=(Mixer(),)), settings, None)
    assert "without tensor and context parallelism a small model of them can be" in capsys.readouterr().out


class Mixer(nn.Module):
    """A layer of which nothing says that it looks at one token at a time, as it does not."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


def refusals(rank: int, world_size: int) -> list[str]:
    from deepspeed import init_distributed

    import dsx
    from dsx.nn import HeadLoss, TokenMean
    from dsx.parallel.groups import make_groups

    init_distributed()
    groups = make_groups(dsx.Mesh.of(cp=world_size))
    vouched = Mixer()
    setattr(vouched, VOUCHED, True)

    def told(mixer: object, loss: object, batch: tuple[Tensor, Tensor], later: object = None) -> str:
        listed = [*plain.layers()[:2], mixer, *plain.layers()[3:]]
        try:
            model = dsx.PipelineModule(listed, groups=groups, loss_fn=loss, partition_method="uniform")
            model.loss_fn = later or loss
            config = {"train_batch_size": ROWS, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
            engine, *_ = dsx.initialize(model=model, config=config)
            engine.eval_batch(iter([batch]))
        except dsx.DsxError as error:
            return str(error)
        return "none"

    mean, (ids, labels) = TokenMean(mean_of), micro_batch(0, 0)
    head = TokenMean(HeadLoss(tp=groups.tensor_parallel, vocab_size=plain.VOCABULARY))
    return [
        told(vouched, mean, (ids, labels), TokenMean(mean_of)),
        told(vouched, mean, (ids, labels), mean_of),
        told(vouched, mean, (ids, labels), head),
        told(Mixer(), mean, (ids, labels)),
        told(lambda x: x, mean, (ids, labels)),
        told(nn.Tanh(), mean_of, (ids, labels)),
        told(Mean(ContextParallel()), mean, (ids, labels)),
        told(vouched, mean, (ids[:, :-1], labels[:, :-1])),
        told(vouched, mean, (ids, labels[:, 0])),
        told(vouched, mean, (ids, labels)),
    ]


def test_each_part_of_a_layer_is_looked_at() -> None:
    cp, one, use = ContextParallel(2, 0), nn.Linear(4, 4), partial(torch.add, alpha=2)
    mean, vouched = Mean(cp), partial(torch.add)
    setattr(vouched, VOUCHED, True)
    inner = nn.Sequential(nn.GELU(), mean)
    fine = [nn.Sequential(one, inner), TiedUse(one, vouched), TiedUse(one, as_head), TiedUse(mean, use)]
    require_context(enumerate([*fine, TiedUse(one, partial(as_head, loss=None))]), cp)
    for layer, words in (
        (nn.Sequential(mean, Mixer()), "set its context_parallel"),
        (TiedUse(one, use), r"\(Linear by partial\).*set its forward_fn's context_parallel = True"),
        (TiedUse(Mixer(), as_head), "is not known"),
        (TiedUse(Mean(ContextParallel()), vouched), "built for 1 context-parallel ranks"),
    ):
        with pytest.raises(ModelError, match=words):
            require_context([(2, layer)], cp)


def test_what_would_train_something_else_on_slices_is_refused() -> None:
    for set_mean, set_loss, head, *told in ranks.run(refusals, 2):
        mixer, function, loss, other, length, labels, nothing = told
        assert set_mean == "none"
        assert "it takes no loss=" in head
        for what in (mixer, function):
            assert "layer 2 " in what
            assert "context_parallel = True" in what
        assert "(Mixer)" in mixer
        for what in (loss, set_loss):
            assert "loss_fn on 2 context-parallel ranks" in what
        assert "built for 1 context-parallel ranks, and the mesh has 2" in other
        assert "rows of 11 tokens on 2 context-parallel ranks" in length
        assert "shape (2,)" in labels
        assert nothing == "none"
