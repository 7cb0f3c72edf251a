"""A run that measures itself: it trains, keeps its layout on resume, and its losses are not touched by it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SMALL, ZERO3, launch, rows, series

import ranks
from dsx.config.run import RunConfig
from dsx.errors import ConfigError
from dsx.planner.profile import Profile
from dsx.schedules.program import Program

TOKENS = torch.randint(257, (64, 33), generator=torch.Generator().manual_seed(1))


def content(output: Path, **settings: Any) -> dict[str, Any]:
    """A user's JSON: two pipeline ranks, everything about the pipeline left open."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "dsx": {
            "model": {"family": "gpt2", "preset": "tiny", "overrides": {"resid_pdrop": 0.1}},
            "parallel": {"tensor": 1, "pipeline": 2},
            "partition": {"method": "time"},
            "recompute": "auto",
            "profile_micro_batches": 2,
            "data": {"tokenizer": "bytes", "sequence_length": 32},
            "train": {"steps": 4, "output": str(output)},
        }
        | settings,
    }


def _train(config: RunConfig, groups: Any, *, first: int, last: int, root: Path | None = None) -> list[float]:
    """Steps ``first`` to ``last``, from the checkpoint in ``root`` if there are steps before; saves there."""
    from dsx.train.recipe import build_engine

    engine = build_engine(config, groups)
    torch.manual_seed(11 + groups.pp_rank)  # what dropout draws from
    if first:
        engine.load_checkpoint(root)
    losses = []
    for step in range(first, last):
        batch = TOKENS[8 * step : 8 * step + 8].split(2)
        losses.append(engine.train_batch(iter([(b[:, :-1], b[:, 1:]) for b in batch])).item())
    if root is not None and not first:
        engine.save_checkpoint(root)
    return losses


def _measured(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """A measured run of four steps; again up to two, then resumed; then unmeasured in the same layout."""
    import dsx
    from dsx.parallel.groups import make_groups
    from dsx.train.recipe import measure

    config = dsx.load_config(content(folder), world_size=world_size)
    groups = make_groups(config.mesh)
    random = torch.get_rng_state()
    settled = measure(config, groups)
    assert torch.equal(torch.get_rng_state(), random)
    profile = (folder / "profile.json").read_text()
    straight = _train(settled, groups, first=0, last=4)

    root = folder / "checkpoints"
    begun = _train(settled, groups, first=0, last=2, root=root)
    again = measure(config, groups)
    assert (folder / "profile.json").read_text() == profile
    resumed = _train(again, groups, first=2, last=4, root=root)

    larger = content(folder) | {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match=r"micro_batch_size = 2: .*this run's 4, and the checkpoint"):
        measure(dsx.load_config(larger, world_size=world_size), groups)
    moved = dsx.load_config(settled.resolved(), world_size=world_size)  # the config.json beside a checkpoint
    assert measure(moved, groups).program == settled.program

    # The same layout, written out, with weight gradients placed for equal costs.
    plain = replace(settled, program=Program(name=settled.program.name, options=_without_costs(settled)))
    return {
        "settled": (settled.stage_map, settled.program, settled.dsx),
        "again": (again.stage_map, again.program, again.dsx),
        "notes": settled.notes,
        "again_notes": again.notes,
        "straight": straight,
        "resumed": begun + resumed,
        "unmeasured": _train(plain, groups, first=0, last=4),
        "untouched": measure(plain_config(folder, world_size), groups) == plain_config(folder, world_size),
    }


def plain_config(folder: Path, world_size: int) -> RunConfig:
    """Nothing to measure."""
    import dsx

    settings = {"partition": {"method": "flops"}, "recompute": "none"}
    return dsx.load_config(content(folder, **settings), world_size=world_size)


def _without_costs(settled: RunConfig) -> Any:
    return replace(settled.program.options, costs=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's output."""
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(scope="module")
def outcome(folder: Path) -> list[dict[str, Any]]:
    """What :func:`_measured` saw on both ranks."""
    return ranks.run(_measured, 2, folder)


def test_ranks_agree(outcome: list[dict[str, Any]]) -> None:
    one, two = outcome
    assert one["settled"] == two["settled"]
    assert one["straight"] == two["straight"]


def test_profile_is_kept_in_the_output(outcome: list[dict[str, Any]], folder: Path) -> None:
    profile = Profile.from_json((folder / "profile.json").read_text())
    assert tuple(profile.layers) == ("none", "selective", "full")
    assert profile.num_layers == 4 + 4
    assert profile.conditions.micro_batch_size == 2
    block = profile.layers["full"][3]
    assert block.kept_bytes == 2 * 32 * 128 * 4  # recomputed whole: its input alone
    assert block.kept_bytes + block.working_bytes == profile.layers["none"][3].kept_bytes
    assert all(
        more.backward_seconds >= less.backward_seconds
        for less, more in zip(profile.layers["none"], profile.layers["full"], strict=True)
    )


def test_the_layout_is_kept_on_resume(outcome: list[dict[str, Any]]) -> None:
    assert outcome[0]["again"] == outcome[0]["settled"]
    assert any(note.startswith("dsx.profile: used again: ") for note in outcome[0]["again_notes"])


def test_losses_do_not_depend_on_measuring(outcome: list[dict[str, Any]]) -> None:
    assert outcome[0]["resumed"] == outcome[0]["straight"]
    assert outcome[0]["unmeasured"] == pytest.approx(outcome[0]["straight"], rel=1e-5)


def test_why_is_said(outcome: list[dict[str, Any]]) -> None:
    notes = outcome[0]["notes"]
    assert sum(note.startswith("chosen by simulation: ") for note in notes) == 1
    assert sum(note.startswith("not ") and note.endswith((" step", "less simple")) for note in notes) >= 3
    assert any(note.startswith("dsx.profile: measured in ") for note in notes)


def test_without_anything_to_measure_the_config_stays(outcome: list[dict[str, Any]]) -> None:
    assert all(seen["untouched"] for seen in outcome)


def _saved_elsewhere(rank: int, world_size: int, folder: Path) -> None:
    import dsx
    from dsx.parallel.groups import make_groups
    from dsx.train.recipe import measure

    config = dsx.load_config(
        content(folder / "new", profile=str(folder / "foreign.json")), world_size=world_size
    )
    measure(config, make_groups(config.mesh))


def test_a_profile_of_another_device_is_refused(outcome: list[dict[str, Any]], folder: Path) -> None:
    profile = Profile.from_json((folder / "profile.json").read_text())
    foreign = replace(profile, conditions=replace(profile.conditions, device="NVIDIA H200"))
    (folder / "foreign.json").write_text(foreign.to_json())
    with pytest.raises(ranks.RankError) as raised:
        ranks.run(_saved_elsewhere, 2, folder)
    assert isinstance(raised.value.error, ConfigError)
    assert "device = NVIDIA H200: it was not measured for this run's CPU" in str(raised.value.error)


@pytest.mark.slow
def test_the_recipe_as_a_user_runs_it(tmp_path: Path) -> None:
    """Two launched ranks, schedule and cut left open; the summary and config.json say what came of it."""
    settings = {
        "dsx.parallel.pipeline": 2,
        "dsx.profile": "measure",
        "dsx.partition.method": "time",
        "dsx.profile_micro_batches": 2,
        "dsx.train.steps": 2,
        "dsx.train.output": tmp_path / "out",
        "zero_optimization.stage": 1,
    }
    ended = launch("torchrun", "gpt_3d.py", ZERO3, SMALL | settings)
    assert ended.code == 0, ended.text
    told = [line.split(maxsplit=1)[1] for line in ended.lines if line.startswith("  note ")]
    assert sum(note.startswith("chosen by simulation: ") for note in told) == 1
    assert rows(ended.lines, "dsx")["stages"].startswith("pipeline rank 0: layers 0")
    resolved = json.loads((tmp_path / "out" / "config.json").read_text())["dsx"]
    assert resolved["schedule"]["name"] != "auto"
    assert sum(resolved["partition"]["method"]) == 4 + 3
    assert resolved["profile"] == str(tmp_path / "out" / "profile.json")
    assert len(series(tmp_path / "out", "train/loss")) == 2
