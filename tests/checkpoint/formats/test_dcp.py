"""torch.distributed.checkpoint folders, written by torch on sharded ranks, read as catalogs and converted."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from checkpoint.stock_checkpoints import read_entry
from dsx.checkpoint.open import open_checkpoint
from dsx.errors import CheckpointError

COMMAND = ("reshard",)


def _save(rank: int, world_size: int, folder: str, flat: bool) -> dict[str, Any]:
    """A model that FSDP shards, after two steps of AdamW, saved; what it held, whole."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    model[2].bias.requires_grad_(False)
    fully_shard(model, mesh=mesh)
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim > 1], "lr": 0.1},
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim == 1], "lr": 0.2},
    ]
    optimizer = torch.optim.AdamW(groups)
    for step in range(2):
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optim": states, "epoch": 3, "note": {"who": ("a", 1)}}, checkpoint_id=folder)
    whole = {name: _full(tensor) for name, tensor in model.state_dict().items()}
    moments = {}
    for name, parameter in model.named_parameters():
        for state, value in optimizer.state.get(parameter, {}).items():
            moments[name, state] = _full(value)
    return {"weights": whole, "moments": moments}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


@pytest.fixture(scope="module", params=[False, True], ids=["nested", "flattened"])
def saved(request, tmp_path_factory) -> tuple[Path, dict[str, Any], bool]:
    folder = tmp_path_factory.mktemp("dcp") / "step2"
    held = ranks.run(_save, 3, str(folder), request.param)[0]
    return folder, held, request.param


def test_every_state_is_what_the_ranks_held(saved):
    folder, held, flat = saved
    catalog = open_checkpoint(folder)
    entries = catalog.by_key
    for name, tensor in held["weights"].items():
        assert torch.equal(read_entry(catalog, entries[name, "weight"]), tensor), name
    moments = {key: value for key, value in held["moments"].items() if key[1] != "step"}
    assert len(moments) == 10
    for key, tensor in moments.items():
        assert torch.equal(read_entry(catalog, entries[key]), tensor), key
    assert len(entries) == len(held["weights"]) + len(moments)
    assert {entry.name for entry in catalog.entries if entry.role == "frozen"} >= {"2.bias"}
    assert entries["1.num_batches_tracked", "weight"].role == "buffer"
    assert catalog.facts["step"] == 2
    assert catalog.facts["client_state"]["epoch"] == 3
    assert any(key.startswith("note") for key in catalog.facts["client_state"])
    if not flat:
        assert [group["lr"] for group in catalog.facts["param_groups"]] == [0.1, 0.2]
        assert catalog.facts["param_groups"][0]["names"] == ["0.weight", "2.weight"]
        assert [group["step"] for group in catalog.facts["param_groups"]] == [2, 2]


def test_it_becomes_a_dsx_checkpoint(dsx, saved, tmp_path):
    folder, held, _ = saved
    code, out, err = dsx(folder, tmp_path / "out", "--to", "dp=2,zero=1")
    assert (code, err) == (0, "")
    assert "other checksums of the source's files were right" in out
    catalog = open_checkpoint(tmp_path / "out")
    for name, tensor in held["weights"].items():
        assert torch.equal(read_entry(catalog, catalog.by_key[name, "weight"]), tensor)
    assert torch.equal(
        read_entry(catalog, catalog.by_key["0.weight", "exp_avg_sq"]),
        held["moments"]["0.weight", "exp_avg_sq"],
    )


def test_damage_is_named(saved, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    index = folder / ".metadata"
    whole = index.read_bytes()

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'owned'}",)

    for data, what in [
        (pickle.dumps(Evil()), "wants (posix|nt|os).system imported"),
        (whole[: len(whole) // 2], "broken or cut short"),
        (pickle.dumps({"a": 1}), "it is no index"),
        (whole.replace(b"__0_0.distcp", b"../../tmp/ab"), "leads out of the checkpoint's folder"),
        (whole.replace(b"__0_0.distcp", b"__7_0.distcp"), "the file is missing"),
    ]:
        index.write_bytes(data)
        with pytest.raises(CheckpointError, match=what):
            open_checkpoint(folder)
    index.write_bytes(whole)
    assert not (tmp_path / "owned").exists()
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"__1_0.distcp: .* no whole file of torch.save"):
        open_checkpoint(folder)
