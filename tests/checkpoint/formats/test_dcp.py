"""torch.distributed.checkpoint folders, written by torch on sharded ranks, read as catalogs and converted."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import made
import ranks
from checkpoint.stock_checkpoints import read_entry
from dsx.checkpoint import plain
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.read import compare
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
    folder, held, _ = saved
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
    groups = {tuple(sorted(group["names"])): group for group in catalog.facts["param_groups"]}
    assert len(groups) == 2
    assert groups["0.weight", "2.weight"]["lr"] == 0.1
    assert {group["lr"] for group in groups.values()} == {0.1, 0.2}
    assert [group["step"] for group in groups.values()] == [2, 2]


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
    with pytest.raises(
        CheckpointError, match=r"__1_0.distcp: .*: (it is no file of torch.save|its zip directory)"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("files", [1, 3])
def test_torch_loads_what_is_written(dsx, files, tmp_path):
    """dsx -> DCP -> torch.distributed.checkpoint.load, and -> dsx again, the same bits and facts."""
    import torch.distributed.checkpoint as dcp

    layout = made.layout("llama", tp=2, dp=2, zero=1)
    bits = made.random_bits(layout.params, made.BF16, seed=3)
    names = [spec.name for spec in layout.params]
    facts = {
        "step": 7,
        "precision": "bf16",
        "param_groups": [
            {"names": names[:4], "step": 7, "lr": 0.25, "betas": plain.encode((0.9, 0.95), "betas")},
            {"names": names[4:], "step": {name: 5 + at % 2 for at, name in enumerate(names[4:])}, "lr": 0.5},
        ],
        "lr_scheduler": {"last_batch_iteration": 6},
        "client_state": {"epoch": 2},
    }
    source = made.plain(tmp_path / "p", layout.params, made.BF16, bits=bits, facts=facts)
    made.reshard(source, tmp_path / "run", layout)
    code, out, err = dsx(tmp_path / "run", tmp_path / "dcp", "--to", "dcp", "--data", files)
    assert (code, err) == (0, "")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == files
    shapes = {spec.name: spec.shape for spec in layout.params}
    wanted = {
        "model": {name: torch.zeros(shapes[name], dtype=torch.bfloat16) for name in names},
        "optim": {
            "state": {
                name: {
                    "step": torch.zeros(()),
                    **{state: torch.zeros(shapes[name]) for state in ("master", "exp_avg", "exp_avg_sq")},
                }
                for name in names
            },
            "param_groups": [{"params": [], "lr": 0.0, "betas": ()}, {"params": [], "lr": 0.0}],
        },
    }
    dcp.load(wanted, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for (name, state), expected in bits.items():
        found = wanted["model"][name] if state == "weight" else wanted["optim"]["state"][name][state]
        assert (made.bits_of(found) == expected).all(), (name, state)
    steps = [int(wanted["optim"]["state"][name]["step"]) for name in names]
    assert steps == [7] * 4 + [5 + at % 2 for at in range(len(names) - 4)]
    groups = wanted["optim"]["param_groups"]
    assert [(group["params"], group["lr"]) for group in groups] == [(names[:4], 0.25), (names[4:], 0.5)]
    assert groups[0]["betas"] == (0.9, 0.95)
    code, out, err = dsx(tmp_path / "dcp", tmp_path / "back", "--to", "tp=2,dp=2,zero=3")
    assert (code, err) == (0, "")
    assert "other checksums of the source's files were right" in out
    one, other = open_checkpoint(tmp_path / "run"), open_checkpoint(tmp_path / "back")
    assert all(same.equal for same in compare(one, other))
    for key in ("step", "lr_scheduler", "client_state", "param_groups"):
        assert other.facts[key] == one.facts[key], key
    assert dsx(tmp_path / "dcp", tmp_path / "wide", "--to", "dcp", "--precision", "fp32")[0] == 0
    weights = {name: torch.zeros(shapes[name]) for name in names}
    dcp.load({"model": weights}, checkpoint_id=tmp_path / "wide", no_dist=True)
    assert (made.bits_of(weights[names[5]]) == bits[names[5], "master"]).all()


def test_dcp_has_no_layout(dsx, saved, tmp_path):
    code, _, err = dsx(saved[0], tmp_path / "out", "--to", "dcp", "--zero", 1)
    assert code == 2
    assert "say --data alone" in err
