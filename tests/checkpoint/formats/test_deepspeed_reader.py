"""Stock DeepSpeed checkpoints, read and through ``dsx reshard``: all is the live engine's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import stock_checkpoints
from checkpoint.stock_checkpoints import Live, Stock, read_entry
from dsx.checkpoint.catalog import Catalog, check_files
from dsx.checkpoint.formats.deepspeed.reader import catalog_of
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.read import compare

COMMAND = ("reshard",)

ALIGNED = (("parameter_alignment", True),)
CPU = {"device": "cpu"}
CONVERTED = [
    (Stock(zero=0, bf16=True), "dp=3,zero=3"),
    (Stock(zero=1, dp=3), "dp=1,zero=0"),
    (Stock(zero=2, dp=3, bf16=True), "dp=2,pp=1,chunks=1,zero=1"),
    (Stock(zero=3, dp=3, bf16=True, zero_keys=(("sub_group_size", 40),)), "dp=2,zero=2"),
    (Stock(zero=1, pp=2, bf16=True), "pp=4,dp=1,zero=3"),
]
CASES = [
    *(stock for stock, _ in CONVERTED),
    Stock(zero=0),
    Stock(zero=0, bf16=True, dp=1),
    Stock(zero=0, dp=1, optimizer="SGD", groups=False, frozen=False),
    Stock(zero=1, bf16=True, zero_keys=(("round_robin_gradients", True), *ALIGNED)),
    Stock(zero=1, bf16=True, keys=(("data_types", {"grad_accum_dtype": "fp32"}),)),
    Stock(zero=1, zero_keys=(("elastic_checkpoint", True),)),
    Stock(zero=1, bf16=True, keys=(("checkpoint", {"checkpoint_serialization": False}),)),
    Stock(zero=2, optimizer="SGD", zero_keys=(("offload_optimizer", CPU),)),
    Stock(zero=3, dp=3, zero_keys=(("sub_group_size", 40),)),
    Stock(zero=3, bf16=True, zero_keys=(("stage3_param_persistence_threshold", 20),)),
    Stock(zero=3, groups=False, zero_keys=(("offload_optimizer", CPU), ("offload_param", CPU))),
    Stock(zero=0, fp16=True, dp=1),
    Stock(zero=2, fp16=True),
    Stock(zero=0, pp=2, dp=1),
    Stock(zero=0, pp=2, bf16=True),
    Stock(zero=1, pp=2),
    Stock(zero=1, pp=2, bf16=True, dp=1, groups=False),
]


def same(catalog: Catalog, ranks: list[Live], stock: Stock, *, converted: bool = False) -> int:
    """Number of tensors compared with those of the engines."""
    held = catalog.by_key
    names = {alias: entry.name for entry in catalog.entries for alias in (entry.name, *entry.aliases)}
    if stock.pp and not stock.bf16 and stock.zero == 0:
        names["tied_modules.embed.weight"] = "0.weight"  # nobody wrote the key of the tied module
    count = 0
    for rank, live in enumerate(ranks):
        for state, tensors in live.states.items():
            for name, expected in tensors.items():
                if name.endswith(".seen") and rank % stock.dp:
                    continue  # a buffer of each rank's own: the first rank's is the checkpoint's
                entry = held.get((names[name], state))
                if entry is None and converted:
                    assert (state, stock.precision) == ("master", "fp32")  # whose weights are their masters
                    found = read_entry(catalog, held[names[name], "weight"])
                elif entry is None:
                    assert (stock.zero, state) == (3, "weight")  # stored nowhere
                    found = read_entry(catalog, held[names[name], "master"]).to(expected.dtype)
                else:
                    found = read_entry(catalog, entry)
                assert found.dtype == expected.dtype, (name, state)
                assert torch.equal(found, expected), (name, state)
                count += 1
    return count


@pytest.mark.parametrize("stock", CASES, ids=str)
def test_every_state_is_the_engines(stock: Stock, tmp_path: Path, dsx: Callable[..., Any]) -> None:
    path, ranks, _ = stock_checkpoints.save(stock, tmp_path / "stock")
    catalog = catalog_of(path)
    check_files(catalog)
    moments = {"momentum_buffer"} if stock.optimizer == "SGD" else {"exp_avg", "exp_avg_sq"}
    states = {entry.state for entry in catalog.entries}
    has_master = stock.zero > 0 or stock.precision != "fp32"
    assert states == {"weight", *moments} | ({"master"} if has_master else set())
    assert same(catalog, ranks, stock) >= 12 * (len(moments) + has_master)

    check_facts(catalog, ranks, stock)
    live = {name for one in ranks for name in one.states["weight"]}
    assert len({entry.name for entry in catalog.entries}) == len(live)
    roles = {entry.name.rsplit(".", 1)[1]: entry.role for entry in catalog.entries}
    assert roles["mask"] == roles["seen"] == "buffer"
    frozen = {entry.name for entry in catalog.entries if entry.role == "frozen"}
    assert len(frozen) == int(stock.frozen)
    for to in (to for one, to in CONVERTED if one == stock):
        convert(dsx, path.parent, to, ranks, stock)  # by its file latest


def convert(dsx: Callable[..., Any], root: Path, to: str, ranks: list[Live], stock: Stock) -> None:
    """Every state arrives in dsx's own format, and is the same after another conversion."""
    code, out, err = dsx(root, root / "out", "--to", to)
    assert (code, err) == (0, "")
    assert "other checksums of the source's files were right" in out
    catalog = open_checkpoint(root / "out")
    assert same(catalog, ranks, stock, converted=True) >= 12 * 3
    assert catalog.facts["step"] == 3
    assert catalog.facts["client_state"]["note"] == {"epoch": 3}
    steps = [group["step"] for group in catalog.facts["param_groups"]]
    assert len(steps) == 2
    assert {*steps} <= {3, 4}  # BF16_Optimizer counts a step when it is made
    code, _, err = dsx(root / "out", root / "back", "--to", "dp=1,pp=1,zero=0,chunks=1")
    assert (code, err) == (0, "")
    assert all(one.equal for one in compare(catalog, open_checkpoint(root / "back")))


def check_facts(catalog: Catalog, ranks: list[Live], stock: Stock) -> None:
    facts, live = catalog.facts, ranks[0]
    assert facts["step"] == live.steps == 3
    assert facts["lr_scheduler"] == live.scheduler
    assert facts["client_state"] == {"note": {"epoch": 3}, "seen": [1, 2.5, "x"]}
    assert facts["optimizer"] == stock.optimizer
    assert facts["versions"] == {"deepspeed": "0.19.8"}
    assert facts["counters"] == {"global_samples": 3 * 4 * stock.dp, "skipped_steps": 0}
    assert facts["mesh"] == {"pp": max(1, stock.pp), "dp": stock.dp, "tp": 1}
    assert (facts["zero_stage"], facts["precision"]) == (stock.zero, stock.precision)
    assert "left_behind" not in facts
    if stock.fp16:
        assert facts["loss_scale"]["scale"] == 256
        assert facts["loss_scale"]["cur_iter"] == 3
    assert len(facts["param_groups"]) == len(live.groups) == 1 + stock.groups
    for group, settings in zip(facts["param_groups"], live.groups, strict=True):
        # FP16_UnfusedOptimizer makes its states by a step of its own (unfused_optimizer.py).
        extra = stock.zero == 0 and stock.precision != "fp32" and not stock.pp
        assert group["step"] == (None if stock.optimizer == "SGD" else 3 + extra)
        if ("elastic_checkpoint", True) not in stock.zero_keys:  # those have no hyperparameters
            assert {key: group[key] for key in ("lr", "weight_decay")} == {
                key: settings[key] for key in ("lr", "weight_decay")
            }
    if stock.groups:
        matrices, vectors = (group["names"] for group in facts["param_groups"])
        assert len(matrices) == 5 + (not stock.frozen) + 1
        assert len(vectors) == 6
        assert all(name.endswith(("bias", "gain", "norm.weight", "3.weight")) for name in vectors)
