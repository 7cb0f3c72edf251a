"""Every kind of tensor crosses, in order, over every channel of a pipeline."""

from __future__ import annotations

import pytest
import torch

import ranks
from dsx.engine import p2p
from dsx.engine.p2p import Inbox, Outbox, Signature
from dsx.errors import ModelError

DTYPES = p2p._DTYPES


def tensors() -> list[torch.Tensor]:
    """All dtypes, ranks 0 to 8, empty, strided, expanded, a view of another's memory."""
    generator = torch.Generator().manual_seed(0)
    result = [torch.randn(3, 4, generator=generator).mul(9).to(dtype) for dtype in DTYPES]
    result += [torch.randn([2] * dims, generator=generator) for dims in range(9)]
    result += [torch.tensor(3, dtype=torch.int16), torch.zeros(0, 5), torch.zeros(2, 0, dtype=torch.int16)]
    base = torch.randn(6, 4, generator=generator)
    return [*result, base.t(), base[::2, 1:], base[0].expand(3, 4), torch.tensor(True)]


def test_header_says_everything() -> None:
    everything = tensors()
    for start in range(0, len(everything), p2p._MAX_TENSORS):
        value = tuple(everything[start : start + p2p._MAX_TENSORS])
        value[0].requires_grad_(value[0].is_floating_point())
        signature = Signature.of(value, "here")
        header = signature.encode()
        assert header.shape == (p2p.HEADER_NUMEL,)
        assert Signature.decode(header) == signature
    assert not Signature.of(everything[0], "here").is_tuple


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([torch.zeros(1)], "a list"),
        ((torch.zeros(1), 3), "a tuple holding a int"),
        ((), "a tuple of 0 tensors"),
        (torch.zeros([1] * 9), "9-dim"),
        (torch.zeros(1, dtype=torch.uint16), "uint16"),
    ],
)
def test_what_cannot_be_sent_is_named(value: object, words: str) -> None:
    with pytest.raises(ModelError, match="virtual stage 3: ") as caught:
        Signature.of(value, "virtual stage 3")
    assert words in str(caught.value)


def _exchange(rank: int, world_size: int) -> list[int]:
    """Each tensor as a message of its own around the ring, forward and back; indices that came out wrong."""
    from dsx.parallel.groups import make_groups
    from dsx.parallel.mesh import Mesh
    from dsx.parallel.stages import StageMap

    groups = make_groups(Mesh.of(pp=world_size))
    device = torch.device("cpu")
    stages = StageMap(tuple(range(2 * world_size + 1)), world_size)
    p2p.open_channels(groups, stages, device)
    everything, wrong = tensors(), []
    outbox = Outbox(groups)
    for kind, step in (("F", 1), ("B", -1)):
        source, destination = (rank - step) % world_size, (rank + step) % world_size
        inbox = Inbox(
            messages=[(rank, j) for j in range(len(everything))],
            source=source,
            group=groups.channels[p2p.channel(kind, source, rank)],
            device=device,
        )
        for j, tensor in enumerate(everything):
            signature = Signature.of(tensor, "here")
            with_header = j % 2 == 0
            outbox.send([signature.encode(), tensor] if with_header else [tensor], kind, destination)
            inbox.post(None if with_header else signature)
            if j % 2:  # taken two at a time, the later one first
                for key in ((rank, j), (rank, j - 1)):
                    got, (value,) = inbox.take(key)
                    expected = everything[key[1]]
                    same = torch.equal(value, expected) and value.dtype == expected.dtype
                    wrong += [] if same and got == Signature.of(expected, "here") else [key[1]]
    outbox.flush()
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_tensor_crosses_every_channel(world_size: int) -> None:
    assert len(tensors()) % 2 == 0
    assert ranks.run(_exchange, world_size) == [[]] * world_size


def _backlog(rank: int, world_size: int) -> int:
    """How many messages the sender holds after each send to a receiver that comes late."""
    import torch.distributed as dist

    from dsx.parallel.groups import make_groups
    from dsx.parallel.mesh import Mesh

    groups = make_groups(Mesh.of(pp=2))
    big = torch.arange(1 << 20)
    if rank == 0:
        outbox = Outbox(groups)
        most = 0
        for j in range(6):
            outbox.send([big + j], "F", 1)
            most = max(most, sum(map(len, outbox._flying.values())))
        outbox.flush()
        return most
    group = groups.channels["F_up"]
    for j in range(6):
        got = torch.empty_like(big)
        dist.recv(got, 0, group=group)
        assert torch.equal(got, big + j)
    return 0


def test_a_sender_holds_few_messages_and_needs_no_poll() -> None:
    """gloo never says that a send has completed until it is waited for: what is kept must not grow with m."""
    assert ranks.run(_backlog, 2)[0] == p2p.IN_FLIGHT
