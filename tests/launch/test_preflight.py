"""Which machine differs from the others, in what, and what that means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsx.launch.differences import Difference, MachineFacts, differences

GIB = 1 << 30
NODES = [
    MachineFacts(
        name=f"rank {rank} on node{rank + 1}",
        versions={"dsx": "0.1.0", "torch": "2.13.0", "Python": "3.11"},
        config="c0ffee",
        clock=1_000_000.0 + rank / 10,
        unseen={},
        free_bytes={"/runs/a": 100 * GIB},
    )
    for rank in range(4)
]


def found(nodes: list[MachineFacts]) -> list[Difference]:
    return list(differences(nodes, checkpoint_bytes=10 * GIB))


def changed(which: int, **more: Any) -> list[Difference]:
    return found([replace(node, **more) if at == which else node for at, node in enumerate(NODES)])


def test_machines_that_are_alike_have_no_differences() -> None:
    assert found(NODES) == []


@pytest.mark.parametrize("which", range(4))
def test_the_machine_that_differs_is_named_wherever_it_is(which: int) -> None:
    other = {**NODES[0].versions, "torch": "2.12.1"}
    (difference,) = changed(which, versions=other)
    assert difference.where == f"rank {which} on node{which + 1}"
    assert difference.what.startswith("it has torch 2.12.1, rank ")
    assert difference.what.endswith("2.13.0")
    assert difference.stops
    (difference,) = changed(which, config="decaf")
    assert (difference.where, difference.stops) == (f"rank {which} on node{which + 1}", True)
    assert "a config with the digest decaf" in difference.what


@pytest.mark.parametrize(
    ("seconds", "said"), [(3600, "1 h 00 min ahead"), (-120, "2 min 00 s behind"), (50, None)]
)
def test_a_clock_is_warned_of(seconds: float, said: str | None) -> None:
    differ = changed(2, clock=NODES[2].clock + seconds)
    assert [(one.where, said in one.what, one.stops) for one in differ if said] == (
        [("rank 2 on node3", True, False)] if said else []
    )
    assert bool(differ) == bool(said)


def test_a_folder_that_is_not_shared_and_a_full_disk() -> None:
    (difference,) = changed(1, unseen={"dsx.train.output": "/runs/a"})
    assert difference.where == "rank 1 on node2"
    assert difference.what == (
        "dsx.train.output there (/runs/a) is not the folder that rank 0 on node1 writes to"
    )
    (difference,) = changed(3, free_bytes={"/runs/a": 2 * GIB})
    assert (difference.where, difference.stops) == ("rank 3 on node4", False)
    assert difference.what == "/runs/a has 2.00 GiB left; a checkpoint takes about 10.00 GiB"


def test_many_are_named_by_three_and_of_two_the_first_is_right() -> None:
    apart = [NODES[0], *(replace(node, unseen={"dsx.train.output": "/x"}) for node in NODES[1:] * 2)]
    assert found(apart)[0].where.endswith("rank 3 on node4 and 3 more")
    (difference,) = found([NODES[0], replace(NODES[1], config="decaf")])
    assert difference.where == "rank 1 on node2"
