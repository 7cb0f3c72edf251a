"""Stock DeepSpeed checkpoints through ``dsx reshard``: every state is the live engine's, bit for bit."""

from __future__ import annotations

import pytest
import torch

from checkpoint import stock_checkpoints
from checkpoint.stock_checkpoints import Stock, read_entry
from dsx.checkpoint.compare import compare
from dsx.checkpoint.open import open_checkpoint

COMMAND = ("reshard",)
CASES = [
    (Stock(zero=0, bf16=True), "dp=3,zero=3"),
    (Stock(zero=1, dp=3), "dp=1,zero=0"),
    (Stock(zero=2, bf16=True), "dp=2,pp=1,chunks=1,zero=1"),
    (Stock(zero=3, dp=3, bf16=True, zero_keys=(("sub_group_size", 40),)), "dp=2,zero=2"),
    (Stock(zero=1, pp=2, bf16=True), "pp=4,dp=1,zero=3"),
]


@pytest.mark.parametrize(("stock", "to"), CASES, ids=str)
def test_every_state_arrives(dsx, stock, to, tmp_path):
    path, lives, _ = stock_checkpoints.save(stock, tmp_path / "stock")
    code, out, err = dsx(path.parent, tmp_path / "out", "--to", to)  # by its file latest
    assert (code, err) == (0, "")
    assert "other checksums of the source's files were right" in out
    catalog, held = open_checkpoint(tmp_path / "out"), {}
    for entry in catalog.entries:
        held |= {(name, entry.state): entry for name in (entry.name, *entry.aliases)}
    count = 0
    for rank, live in enumerate(lives):
        for state, tensors in live.states.items():
            for name, expected in tensors.items():
                if name.endswith(".seen") and rank % stock.dp:
                    continue  # a buffer of each rank's own: the first rank's is the checkpoint's
                entry = held.get((name, state)) or held[name, "weight"]
                if state == "master" and entry.state == "weight":
                    assert not stock.bf16  # an fp32 weight is its own master
                found = read_entry(catalog, entry)
                assert found.dtype == expected.dtype, (name, state)
                assert torch.equal(found, expected), (name, state)
                count += 1
    assert count >= 12 * 3
    assert catalog.facts["step"] == 3
    assert catalog.facts["client_state"]["note"] == {"epoch": 3}
    steps = [group["step"] for group in catalog.facts["param_groups"]]
    assert len(steps) == 2
    assert {*steps} <= {3, 4}  # BF16_Optimizer counts a step when it is made
    code, _, err = dsx(tmp_path / "out", tmp_path / "back", "--to", "dp=1,pp=1,zero=0,chunks=1")
    assert (code, err) == (0, "")
    assert all(one.equal for one in compare(catalog, open_checkpoint(tmp_path / "back")))
