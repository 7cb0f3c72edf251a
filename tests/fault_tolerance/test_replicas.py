"""Weights that ranks hold alike and that are not alike any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from dsx.engine.ready_layers import checksum
from dsx.errors import RunError
from dsx.fault_tolerance.guard import differences
from fault_tolerance.guarded import Run
from parity.dsx_run import Case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_bit_and_every_place_counts(dtype: torch.dtype) -> None:
    """Each single flipped bit of a tensor gives another sum, and so do two elements that change places."""
    raw = torch.randint(0, 256, (9 * dtype.itemsize,), dtype=torch.uint8, generator=torch.manual_seed(0))
    whole = int(checksum(raw.view(dtype)))
    for byte in range(raw.numel()):
        for bit in range(8):
            changed = raw.clone()
            changed[byte] ^= 1 << bit
            assert int(checksum(changed.view(dtype))) != whole
    values = torch.arange(12).to(dtype)
    swapped = values[torch.tensor([1, 0, *range(2, 12)])]
    assert int(checksum(values)) != int(checksum(swapped))
    assert int(checksum(values)) == int(checksum(values.clone()))


def test_tiles_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(100, generator=torch.manual_seed(0))
    whole = int(checksum(values))
    monkeypatch.setattr("dsx.engine.ready_layers._TILE", 7)
    assert int(checksum(values)) == whole


CASES = {
    "data": Case(family="llama", dp=2, zero=1, accumulation=1),
    "tensor": Case(family="llama", tp=2, zero=0, accumulation=1),
    "tied": Case(family="gpt2", pp=2, accumulation=2),
    "tensor, ZeRO-3": Case(family="llama", tp=2, zero=3, accumulation=1),
}


def flip(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Flip the lowest bit of one weight on rank 1, under every kind of replication."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        run = Run(case, Path(folder) / name, check_replicas_every=2, replicas_differ="roll_back")
        run.resume()
        for _ in range(2):
            run.step()
            assert not run.rolled_back(), name
        run.save()
        healthy = differences(run.engine)
        if rank == 1:
            parameter = replicated(run)
            with torch.no_grad():
                parameter.data.view(-1).view(torch.int32)[0] ^= 1
        said = differences(run.engine)
        found[name] = (healthy, said, recovered(run))
    return found


def replicated(run: Run) -> torch.Tensor:
    """A parameter that other ranks hold too."""
    parameters = dict(run.engine.pipeline.chunks.named_parameters())
    if run.engine.pipeline.ties:
        return run.engine.pipeline.ties[0].parameters[0]
    whole = [p for p in parameters.values() if not getattr(p, "tensor_model_parallel", False)]
    return getattr(whole[0], "ds_tensor", whole[0])


def recovered(run: Run) -> tuple[bool, list[str], int]:
    """Whether the guard takes the run back, and what is different then."""
    run.engine.deepspeed_engine.global_steps = 4  # a step that is looked at
    went_back = run.rolled_back()
    return went_back, differences(run.engine), int(run.engine.global_steps)


def test_a_flipped_bit_is_found_named_and_mended(tmp_path: Path) -> None:
    first, second = ranks.run(flip, 2, str(tmp_path))
    assert first == second
    for name, (healthy, said, after) in first.items():
        assert healthy == [], name
        (sentence,) = said
        assert sentence.endswith(" differs between ranks 0, 1"), name
        assert after == (True, [], 2), name


def test_the_minority_is_named() -> None:
    from dsx.fault_tolerance.guard import _told

    assert _told("w", (2, 6, 10), [7, 8, 7]) == "w of rank 6 is not what ranks 2, 10 have"


def stop_at_difference(rank: int, world_size: int, folder: str) -> str:
    run = Run(CASES["data"], Path(folder), check_replicas_every=1)
    run.resume()
    run.step()
    if rank == 0:
        with torch.no_grad():
            replicated(run).view(-1)[0] += 1.0
    with pytest.raises(RunError) as caught:
        run.rolled_back()
    return str(caught.value)


def test_it_ends_the_run_by_default(tmp_path: Path) -> None:
    first, second = ranks.run(stop_at_difference, 2, str(tmp_path))
    assert first == second
    assert first.startswith("replicated weights after step 1: ")
