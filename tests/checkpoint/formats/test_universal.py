"""DeepSpeed's universal checkpoints: read what ds_to_universal writes, write what engines load."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint import stock_checkpoints
from checkpoint.stock_checkpoints import Live, Stock, read_entry
from dsx.checkpoint.catalog import Catalog, check_files
from dsx.checkpoint.copy_plan import plan
from dsx.checkpoint.execute import ConversionOptions, execute
from dsx.checkpoint.formats import universal
from dsx.checkpoint.formats.deepspeed import reader
from dsx.checkpoint.formats.deepspeed.target import StockLayout
from dsx.checkpoint.formats.universal import target_of
from dsx.errors import CheckpointError

UNIVERSAL = (("checkpoint", {"load_universal": True}),)


def check(catalog: Catalog, live: Live) -> None:
    held = catalog.by_key
    names = {alias: entry.name for entry in catalog.entries for alias in (entry.name, *entry.aliases)}
    for state, tensors in live.states.items():
        for name, expected in tensors.items():
            entry = held.get((names[name], state)) or held[names[name], "master"]
            found = read_entry(catalog, entry)
            dtype = expected.dtype if entry.state == "master" else found.dtype
            assert torch.equal(found.to(dtype), expected.to(dtype)), (state, name)


@pytest.mark.parametrize(
    "stock", [Stock(zero=1, dp=3, bf16=True), Stock(zero=3, zero_keys=(("sub_group_size", 40),))], ids=str
)
def test_what_deepspeeds_tool_writes(stock: Stock, tmp_path: Path) -> None:
    path, live, _ = stock_checkpoints.save(stock, tmp_path)
    expected = reader.catalog_of(path).facts
    out = stock_checkpoints.converted(path)
    catalog = universal.catalog_of(out)
    check_files(catalog)
    check(catalog, live[0])
    assert {entry.name for entry in catalog.entries} == set(live[0].states["weight"])
    roles = {entry.name: entry.role for entry in catalog.entries}
    assert roles["blocks.0.frozen"] == "frozen"  # which DeepSpeed's loading forgets
    assert roles["blocks.1.mask"] == roles["blocks.1.seen"] == "buffer"
    for key in ("step", "param_groups", "lr_scheduler", "client_state", "counters", "precision", "optimizer"):
        assert catalog.facts[key] == expected[key], key
    shutil.rmtree(out / "zero" / "norm.bias")
    with pytest.raises(CheckpointError, match=r"norm.bias: it is missing"):
        universal.catalog_of(out)


def test_rests_of_an_interrupted_conversion(tmp_path: Path) -> None:
    """DeepSpeed's tool merges what it finds in tmp/ into the next checkpoint and says nothing."""
    path, *_ = stock_checkpoints.save(Stock(zero=1, dp=1), tmp_path)
    out = stock_checkpoints.converted(path)
    (out / "tmp").mkdir()
    with pytest.raises(CheckpointError, match=r"tmp: its conversion was interrupted"):
        universal.catalog_of(out)
    (out / "tmp").rmdir()
    torn = out / "zero" / "norm.bias" / "exp_avg.pt"
    torn.write_bytes(torn.read_bytes()[:-30])
    with pytest.raises(CheckpointError, match=r"norm.bias/exp_avg.pt: its zip directory cannot be read"):
        universal.catalog_of(out)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Stock(zero=0, dp=1), Stock(zero=2, dp=3, bf16=True)),
        (Stock(zero=1), Stock(zero=3)),
        (Stock(zero=3, groups=False), Stock(zero=1, groups=False)),
    ],
    ids=str,
)
def test_stock_engines_load_what_is_written(old: Stock, new: Stock, tmp_path: Path) -> None:
    """Of ZeRO stages and precisions that DeepSpeed's own tool refuses to bring together."""
    path, live, expected = stock_checkpoints.save(old, tmp_path / "a")
    source = reader.catalog_of(path)
    precision = "bf16" if new.bf16 else "fp32"
    target = target_of(
        source, tmp_path / "b" / path.name, StockLayout(dp=1, zero_stage=new.zero, precision=precision)
    )
    made = execute(source, target, plan(source, target.catalog), ConversionOptions(workers=1)).target

    back = universal.catalog_of(made)
    check(back, live[0])
    if old.bf16 == new.bf16:
        assert back.facts["param_groups"] == source.facts["param_groups"]

    after, losses = stock_checkpoints.resume(replace(new, keys=(*new.keys, *UNIVERSAL)), made)
    for state, tensors in live[0].states.items():
        for name, tensor in tensors.items():
            if state != "weight" and name in after[0].states[state]:
                assert torch.equal(after[0].states[state][name], tensor), (state, name)
    assert after[0].steps == 3
    if (old.dp, old.bf16) == (new.dp, new.bf16) and new.zero < 3:
        # DeepSpeed gives all groups the first one's hyperparameters at ZeRO-3 (stage3.py:3685).
        assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-6)


def test_refusals(tmp_path: Path) -> None:
    source = Catalog(root=tmp_path, format="deepspeed", entries=())
    with pytest.raises(CheckpointError, match="zero = 0"):
        target_of(source, tmp_path / "b", StockLayout(dp=1, zero_stage=0))
