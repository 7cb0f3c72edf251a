"""Checkpoints of a run with frozen parameters: what they hold, where the rest is, and who reads them."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ranks
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case

FREEZE = ("embed_tokens", r"layers\.[01]\.", r"layers\.3\.mlp")
WRITER = Case(freeze=FREEZE, tp=2, pp=2, zero=2, accumulation=2)
READERS = [
    WRITER,
    Case(freeze=FREEZE, pp=2, chunks=2, dp=2, zero=3, accumulation=1),
    Case(freeze=FREEZE, zero=0, accumulation=2),
    Case(freeze=FREEZE, dp=2, zero=1, accumulation=1, extra=(("gradient_clipping", 0.5),)),
]


def _write(rank: int, world_size: int, case: Case, base: Path | None, to: Path, export: Path | None) -> Any:
    engine, resolved = dsx_run.build(case, base)
    dsx_run.losses_of(engine, case, range(2))
    engine.save_checkpoint(to)
    if export is not None:
        from dsx.checkpoint.run.export import export_weights

        export_weights(engine.pipeline, export, resolved.hf_config, resolved.model)
    return dsx_run.losses_of(engine, case, range(2, 4))


def _read(rank: int, world_size: int, case: Case, base: Path | None, at: Path) -> Any:
    from dsx.errors import DsxError

    engine, _ = dsx_run.build(case, base)
    try:
        engine.load_checkpoint(at)
    except DsxError as error:
        return str(error)
    return dsx_run.losses_of(engine, case, range(2, 4))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, list[float]]:
    """(model folder, checkpoints, exported model, losses of the steps after)."""
    folder = tmp_path_factory.mktemp("left-out")
    base = oracle.save_model("llama", folder / "base")
    rest = ranks.run(_write, WRITER.world_size, WRITER, base, folder / "c", folder / "hf")[0]
    return base, folder / "c", folder / "hf", rest


def test_only_what_is_trained_is_stored(written: Any, dsx: Any) -> None:
    from dsx.checkpoint.open import open_checkpoint

    base, checkpoints, _, _ = written
    catalog = open_checkpoint(checkpoints)
    model = oracle.hf_model("llama")
    trained = [p for n, p in model.named_parameters() if not any(re.search(each, n) for each in FREEZE)]
    # fp32: a weight, which is its own master, and Adam's two moments.
    assert catalog.num_bytes == 12 * sum(p.numel() for p in trained)
    assert catalog.facts["base"]["path"] == str(base)
    said = "".join(dsx("inspect", checkpoints)[1].split())  # a long line is broken
    assert f"leftout:thosein{base}" in said


@pytest.mark.parametrize("reader", often(READERS, 2), ids=str)
def test_a_run_goes_on_in_any_layout(written: Any, reader: Case) -> None:
    base, checkpoints, _, rest = written
    found = ranks.run(_read, reader.world_size, reader, base, checkpoints)[0]
    if reader == WRITER:
        assert found == rest
    assert found == pytest.approx(rest, rel=1e-5)


def test_after_a_conversion_to_another_layout(written: Any, tmp_path: Path, dsx: Any) -> None:
    base, checkpoints, _, rest = written
    there = tmp_path / "c" / "there"
    assert dsx("reshard", checkpoints, there, "--to", "tp=1,pp=1,dp=1,zero=1")[0] == 0
    reader = Case(freeze=FREEZE, zero=1, accumulation=2)
    assert ranks.run(_read, 1, reader, base, tmp_path / "c")[0] == pytest.approx(rest, rel=1e-5)


@pytest.mark.parametrize("to", ["hf", "universal", "deepspeed", "dcp"])
def test_other_formats_get_what_is_left_out(written: Any, tmp_path: Path, to: str, dsx: Any) -> None:
    _, checkpoints, exported, _ = written
    target = tmp_path / "hf"
    first = target if to == "hf" else tmp_path / "there"
    assert dsx("reshard", checkpoints, first, "--to", to, "--data", 1, "--names", "hf")[0] == 0
    if to != "hf":
        config = exported / "config.json"
        assert dsx("reshard", first, target, "--to", "hf", "--hf-config", config)[0] == 0
    got, want = _tensors(target), _tensors(exported)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def test_text_is_generated_with_the_base(written: Any) -> None:
    import dsx

    _, checkpoints, exported, _ = written
    found, _ = dsx.load_transformers(checkpoints, tokenizer="bytes")
    want, _ = dsx.load_transformers(exported, tokenizer="bytes")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(found(input_ids=ids).logits, want(input_ids=ids).logits)


def test_another_base_is_refused_by_name(written: Any, tmp_path: Path) -> None:
    base, checkpoints, exported, _ = written
    one = Case(freeze=FREEZE)
    said = ranks.run(_read, 1, one, exported, checkpoints)[0]  # the same config, trained further
    assert f"those in {base}" in said
    assert str(exported) in said
    moved = shutil.copytree(base, tmp_path / "moved")
    assert isinstance(ranks.run(_read, 1, one, moved, checkpoints)[0], list)
    other = replace(one, freeze=FREEZE[:2])
    said = ranks.run(_read, 1, other, base, checkpoints)[0]
    assert "was frozen when the checkpoint was written, and is trained here" in said
    said = ranks.run(_read, 1, replace(one, freeze=(*FREEZE, "lm_head")), base, checkpoints)[0]
    assert "was trained when the checkpoint was written, and is frozen here" in said


def test_reshard_says_what_is_wrong_with_the_base(written: Any, tmp_path: Path) -> None:
    from dsx.checkpoint.base import completed
    from dsx.checkpoint.open import open_checkpoint
    from dsx.errors import CheckpointError

    _, checkpoints, exported, _ = written
    source = open_checkpoint(checkpoints)
    with pytest.raises(CheckpointError, match="the weights there are others"):
        completed(source, exported)
    gone = replace(source, facts={**source.facts, "base": {**source.facts["base"], "path": "/no/such"}})
    with pytest.raises(CheckpointError, match="there is no such folder"):
        completed(gone)


def test_frozen_fresh_weights_come_from_the_seed(tmp_path: Path) -> None:
    from dsx.checkpoint.base import completed
    from dsx.checkpoint.open import open_checkpoint
    from dsx.errors import CheckpointError

    rest = ranks.run(_write, 2, Case(freeze=FREEZE, pp=2, zero=1), None, tmp_path, None)[0]
    assert ranks.run(_read, 1, Case(freeze=FREEZE), None, tmp_path)[0] == pytest.approx(rest, rel=1e-5)
    other = Case(freeze=FREEZE, implementation="transformers")
    assert "fresh ones of seed 0 in dsx's modules" in ranks.run(_read, 1, other, None, tmp_path)[0]
    source = open_checkpoint(tmp_path)
    assert source.facts["base"]["seed"] == 0
    with pytest.raises(CheckpointError, match="fresh ones of seed 0"):
        completed(source)


WORDS, WIDTH, ROWS = 19, 8, 2
KINDS = [(stage, bf16) for stage, bf16 in product((0, 1, 3), (False, True))]
PAIRS = [(first, then) for first, then in product(KINDS, KINDS) if first[1] == then[1]]


class Frozen(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH)
        self.weight.requires_grad_(False)


def _engine(stage: int, bf16: bool, seed: int, embedding: type[nn.Module] = Frozen) -> Any:
    from deepspeed.pipe import LayerSpec

    import dsx

    torch.manual_seed(seed)
    names = (WORDS, WIDTH) if embedding is nn.Embedding else ()
    layers = [LayerSpec(embedding, *names), LayerSpec(nn.Linear, WIDTH, WORDS)]
    module = dsx.PipelineModule(
        layers, num_stages=1, loss_fn=lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    return dsx.initialize(model=module, config=config)[0]


def _losses(engine: Any, first: int, count: int) -> list[float]:
    out = []
    for step in range(first, first + count):
        torch.manual_seed(100 + step)
        words = torch.randint(0, WORDS, (ROWS, 7))
        out.append(engine.train_batch(iter([(words[:, :-1], words[:, 1:])])).item())
    return out


def _there_and_back(rank: int, world_size: int, pairs: list[Any], folder: str) -> list[Any]:
    out = []
    for index, (first, then) in enumerate(pairs):
        writer = _engine(*first, seed=0)
        _losses(writer, 0, 2)
        writer.save_checkpoint(f"{folder}/{index}")
        reader = _engine(*then, seed=1)
        reader.load_checkpoint(f"{folder}/{index}")
        out.append((_losses(writer, 2, 2), _losses(reader, 2, 2)))
    return out


@pytest.mark.parametrize("pairs", often([PAIRS[i::3] for i in range(3)], 1), ids=str)
def test_what_one_writes_another_goes_on_from(pairs: list[Any], tmp_path: Path) -> None:
    (found,) = ranks.run(partial(_there_and_back, pairs=pairs, folder=str(tmp_path)), 1)
    for (first, then), (went_on, loaded) in zip(pairs, found, strict=True):
        assert loaded == pytest.approx(went_on, rel=1e-2 if first[1] else 1e-5), (first, then)


def _thawed(rank: int, world_size: int, folder: str) -> str:
    from dsx.errors import CheckpointError

    writer = _engine(1, False, seed=0)
    _losses(writer, 0, 1)
    writer.save_checkpoint(folder)
    try:
        _engine(1, False, seed=0, embedding=nn.Embedding).load_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_what_was_frozen_and_is_trained_is_refused_by_name(tmp_path: Path) -> None:
    (said,) = ranks.run(partial(_thawed, folder=str(tmp_path)), 1)
    assert "0.weight" in said
    assert "was frozen when the checkpoint was written" in said
