"""A list of plain layers with a TokenMean of torch's own loss, beside one process; a step without labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ranks

VOCABULARY, LENGTH, ROWS, ACCUMULATION = 11, 12, 2, 3


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCABULARY)]


def mean_of(logits: Tensor, labels: Tensor, *, num_tokens: Tensor | None = None) -> Tensor:
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / ((labels != -100).sum().clamp(min=1) if num_tokens is None else num_tokens)


def micro_batch(step: int, number: int) -> tuple[Tensor, Tensor]:
    """The second step has no label at all; in the others a micro-batch has a few, or all."""
    generator = torch.Generator().manual_seed(100 * step + number)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    share = 0.0 if step == 1 else (0.1, 1.0)[number % 2]
    trained = torch.rand(ROWS, LENGTH, generator=generator) < share
    return ids[:, :-1], ids[:, 1:].where(trained, torch.tensor(-100))


def train(rank: int, world_size: int, pp: int, plain: bool) -> list[tuple[float, int | None]]:
    import dsx
    from dsx.nn import TokenMean

    dp = world_size // pp
    model = dsx.PipelineModule(
        layers(), num_stages=pp, loss_fn=mean_of if plain else TokenMean(mean_of), partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = dsx.initialize(model=model, config=config)

    def data(step: int) -> Iterator[Any]:
        return iter([micro_batch(step, j * dp + engine.groups.dp_rank) for j in range(ACCUMULATION)])

    seen = [(float(engine.train_batch(data(step))), engine.trained_tokens) for step in range(3)]
    return [*seen, (float(engine.eval_batch(data(2))), None)]


def expected(dp: int, *, plain: bool) -> list[tuple[float, int | None]]:
    """One process; of means of micro-batches if ``plain``."""
    model, seen = nn.Sequential(*layers()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in (0, 1, 2, 2):
        batches = [micro_batch(step, number) for number in range(ACCUMULATION * dp)]
        count = sum(int((labels != -100).sum()) for _, labels in batches)
        tokens = None if plain else torch.tensor(max(count, 1)) / len(batches)
        losses = [mean_of(model(ids), labels, num_tokens=tokens) for ids, labels in batches]
        loss = torch.stack(losses).mean()
        if len(seen) < 3:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seen.append((loss.item(), None if plain or len(seen) == 3 else count))
    return seen


@pytest.mark.parametrize(("pp", "dp", "plain"), [(1, 2, False), (2, 1, False), (2, 2, False), (1, 2, True)])
def test_the_loss_is_the_mean_over_the_tokens_of_the_step(pp: int, dp: int, plain: bool) -> None:
    wanted = expected(dp, plain=plain)
    for seen in ranks.run(train, pp * dp, pp, plain):
        assert [loss for loss, _ in seen] == pytest.approx([loss for loss, _ in wanted], rel=1e-5, abs=1e-7)
        assert [count for _, count in seen] == [count for _, count in wanted]
    if not plain:
        assert wanted[1] == (0.0, 0)


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss()])
def test_a_loss_that_cannot_be_divided_is_refused_when_it_is_wrapped(loss: Any) -> None:
    from dsx.errors import ModelError
    from dsx.nn import TokenMean

    with pytest.raises(ModelError, match="does not take num_tokens"):
        TokenMean(loss)
