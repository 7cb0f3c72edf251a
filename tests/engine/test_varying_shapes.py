"""Micro-batches of different shapes: every schedule trains as torch does, no receive waits for a header."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
from dsx.engine.p2p import HEADER_NUMEL, Headers, Inbox, Outbox, Signature, header_group
from dsx.schedules.builders import NAMES
from engine import toy_pipeline as toy
from engine.toy_pipeline import Case

MICRO_BATCHES, STEPS = 6, 2
ONE_CHUNK = ("gpipe", "1f1b", "zb_h1")


def _batches(step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for j in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(100 * step + j)
        rows = 1 + (3 * j + step) % 5
        yield tuple(torch.randn(rows, toy.WIDTH, generator=generator) for _ in range(2))


def _oracle() -> toy.Losses:
    whole, result = toy.Whole("tuples"), []
    optimizer = torch.optim.AdamW(whole.parameters(), **toy.ADAMW)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for inputs, labels in _batches(step):
            loss = toy.loss_fn(whole(inputs), labels) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), toy.CLIPPING)
        optimizer.step()
        result.append((total, float(norm)))
    with torch.no_grad():
        losses = [toy.loss_fn(whole(inputs), labels).item() for inputs, labels in _batches(STEPS)]
    return [*result, (sum(losses) / MICRO_BATCHES, 0.0)]


def _train(rank: int, world_size: int, names: list[str]) -> list[toy.Losses]:
    found = []
    for index, name in enumerate(names):
        chunks = 1 if name in ONE_CHUNK else 2
        parts = [2, 3] if chunks == 1 else [1, 1, 1, 2]
        module = {"dynamic_shape": True, "schedule": name, "partition_method": parts}
        case = Case(
            layers="tuples", pp=2, chunks=chunks, micro_batches=MICRO_BATCHES, zero=index % 4, module=module
        )
        made = toy.engine(case)
        losses = [
            (made.train_batch(_batches(step)).item(), made.get_global_grad_norm()) for step in range(STEPS)
        ]
        losses.append((made.eval_batch(_batches(STEPS)).item(), 0.0))
        found.append(losses)
    return found


def test_every_schedule_trains_and_evaluates_as_torch_does() -> None:
    expected, names = toy.flat(_oracle()), list(NAMES)
    for name, losses in zip(names, ranks.run(_train, 2, names)[0], strict=True):
        assert toy.flat(losses) == pytest.approx(expected, rel=1e-5), name


def _late_sender(rank: int, world_size: int) -> list[Any]:
    """The receiver goes on, tells the sender to begin, and takes messages out of order."""
    from dsx.parallel.groups import make_groups
    from dsx.parallel.mesh import Mesh

    groups = make_groups(Mesh.of(pp=2))
    headers = header_group(groups)
    messages = [torch.full((j + 1, 3), float(j)) for j in range(5)]
    token = torch.zeros(1)
    if rank == 0:
        outbox = Outbox(groups, headers=headers)
        dist.recv(token, 1)
        for message in messages:  # more than a sender of known shapes lets be under way
            outbox.send([message], "F", 1, Signature.of(message, "here").encode())
        dist.send(token, 1)
        outbox.flush()
        return []
    inbox = Inbox(
        messages=[(1, j) for j in range(5)],
        source=0,
        group=groups.channels["F_up"],
        device=torch.device("cpu"),
        headers=Headers(count=5, numel=HEADER_NUMEL, source=0, group=headers),
    )
    inbox.expect()
    inbox.expect()
    posted = [len(inbox._posted)]
    dist.send(token, 0)
    dist.recv(token, 0)
    while len(inbox._posted) < 2:  # headers have left, and come; what is not expected stays where it is
        inbox.post_announced()
    posted.append(len(inbox._posted))
    taken = [inbox.take((1, j))[1][0] for j in (1, 0)]
    for j in (2, 3, 4):
        inbox.expect()
        taken.append(inbox.take((1, j))[1][0])
    equal = [torch.equal(taken[i], messages[j]) for i, j in enumerate((1, 0, 2, 3, 4))]
    return [posted, equal, inbox._expected]


def test_a_receiver_does_not_wait_for_headers_nor_a_sender_for_receives() -> None:
    """Each end would wait for the other otherwise, for ever."""
    assert ranks.run(_late_sender, 2)[1] == [[0, 2], [True] * 5, 0]


def _broken(rank: int, world_size: int) -> bool:
    from dsx.parallel.groups import make_groups
    from dsx.parallel.mesh import Mesh

    group = header_group(make_groups(Mesh.of(pp=2)))
    headers = Headers(count=1, numel=3, source=5, group=group)  # no such rank
    with pytest.raises(ValueError, match="5"):
        headers.next(wait=True)
    return headers.next(wait=False) is None


def test_what_the_thread_meets_is_raised_where_the_header_is_wanted() -> None:
    assert ranks.run(_broken, 2) == [True, True]
