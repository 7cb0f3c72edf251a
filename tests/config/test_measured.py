"""The config's side of measuring: what is wanted, what is refused, what the choice is written as."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sample_config import changed

from dsx.config.resolve import resolve
from dsx.config.run import PENDING, RunConfig
from dsx.errors import ConfigError
from dsx.models.params import layer_kinds
from dsx.planner import measured
from dsx.planner.choose import choose
from dsx.planner.layout import CHUNKS, Space
from dsx.planner.profile import LayerCost, Profile
from dsx.schedules.builders import build

PIPELINE = {"dsx.parallel.pipeline": 2, "dsx.parallel.tensor": 1}
MEASURE = PIPELINE | {"dsx.profile": "measure"}


def run_of(edits: dict, world_size: int = 2) -> RunConfig:
    return resolve(changed(edits), world_size=world_size)


def profile_of(run: RunConfig) -> Profile:
    """Costs of the run's own layer list: heavy blocks, a head of half a block; recompute saves 9 of 10."""
    seconds = {"Block": 0.01, "Head": 0.005}
    layers = {}
    for mode, kept, extra in (("none", 100, 0.0), ("selective", 60, 0.1), ("full", 10, 0.3)):
        layers[mode] = tuple(
            LayerCost(
                forward_seconds=seconds.get(kind, 1e-4),
                backward_seconds=(2 + extra) * seconds.get(kind, 1e-4),
                backward_input_seconds=(1 + extra) * seconds.get(kind, 1e-4),
                backward_weight_seconds=seconds.get(kind, 1e-4),
                kept_bytes=kept << 20 if kind == "Block" else 1 << 20,
                pending_bytes=80 << 20 if kind == "Block" else 0,
                boundary_bytes=1000,
            )
            for kind in layer_kinds(run.model)
        )
    return Profile(
        conditions=measured.conditions_of(run, device="CPU", version="0"),
        layers=layers,
        latency_seconds=1e-6,
        bytes_per_second=1e9,
    )


@pytest.mark.parametrize(
    ("edits", "world_size", "wanted"),
    [
        ({}, 2, False),
        (PIPELINE, 2, False),
        (MEASURE, 2, True),
        (PIPELINE | {"dsx.partition.method": "time"}, 2, True),
        ({"dsx.profile": "measure"}, 1, False),  # one pipeline rank
        ({"dsx.profile": "measure", "dsx.recompute": "auto"}, 1, True),
        ({"dsx.profile": "measure", "dsx.schedule.activation_gib": 1}, 1, True),
    ],
)
def test_when_measuring_is_wanted(edits, world_size, wanted):
    run = run_of(edits, world_size)
    assert run.dsx.is_measured(run.mesh.pp) == wanted
    assert (PENDING in run.notes) == wanted


def test_one_pipeline_rank_is_told_that_nothing_is_left():
    notes = run_of({"dsx.profile": "measure"}, 1).notes
    assert 'dsx.profile = "measure": one pipeline rank leaves nothing to choose' in notes


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ({"dsx.recompute": "auto"}, 'dsx.recompute = "auto"'),
        ({"dsx.schedule.activation_gib": 2}, "dsx.schedule.activation_gib = 2"),
    ],
)
def test_what_means_nothing_without_a_profile(edits, said):
    with pytest.raises(ConfigError, match="nothing is measured") as refused:
        run_of(PIPELINE | edits)
    assert refused.value.where.startswith(said)
    assert 'dsx.profile to "measure"' in refused.value.fix


def test_copies_to_the_host_are_nothing_to_measure():
    with pytest.raises(ConfigError, match="nothing hides a copy") as refused:
        run_of(MEASURE | {"dsx.recompute": "offload"})
    assert refused.value.where.startswith('dsx.profile = "measure"')


def test_until_then_a_rule_of_thumb_holds():
    run, thumb = run_of(MEASURE | {"dsx.partition.method": "time"}), run_of(PIPELINE)
    assert (run.stage_map, run.program) == (thumb.stage_map, thumb.program)
    assert not any("auto ->" in note for note in run.notes if "schedule" in note or "chunks" in note)


def test_options_of_a_schedule_still_to_be_found():
    run = run_of(MEASURE | {"dsx.schedule.group_size": 4})
    settled = measured.settle(run, profile_of(run), Path("p.json"))
    assert settled.program.options.group_size == 4


def test_everything_open_is_chosen_as_choose_does():
    run = run_of(MEASURE | {"dsx.partition.method": "time", "dsx.recompute": "auto"})
    profile = profile_of(run)
    modes = ("none", "selective", "full")
    wanted = choose(profile, num_ranks=2, num_micro_batches=run.accumulation, space=Space(recompute=modes))
    settled = measured.settle(run, profile, Path("p.json"))
    cut = wanted.chosen.cut
    assert (settled.stage_map, settled.program, settled.chunks) == (
        cut.stage_map,
        cut.program,
        cut.stage_map.num_chunks,
    )
    assert settled.dsx.recompute == wanted.chosen.recompute == "none"
    assert settled.summary()["schedule"] == cut.program.name
    why = [note for note in settled.notes if note.startswith(("chosen by simulation: ", "not "))]
    assert why[0] == f"chosen by simulation: {wanted.chosen.label}: {wanted.chosen.figures}"
    assert why[1:] == [f"not {c.label}: {wanted.reason(c)}" for c in wanted.next_best(6)]
    assert PENDING not in settled.notes


def test_the_choice_written_out_is_the_choice(tmp_path):
    """Loading the resolved config, profile included, gives the same run."""
    run = run_of(MEASURE | {"dsx.partition.method": "time", "dsx.recompute": "auto"})
    profile, path = profile_of(run), tmp_path / "profile.json"
    path.write_text(profile.to_json())
    settled = measured.settle(run, profile, path)
    again = resolve(settled.resolved(), world_size=2)
    assert (again.stage_map, again.chunks, again.schedule_name) == (
        settled.stage_map,
        settled.chunks,
        settled.schedule_name,
    )
    assert again.dsx.is_measured(again.mesh.pp)
    twice = measured.settle(again, measured.read_saved(path), path)
    assert twice.program == settled.program
    assert twice.dsx == settled.dsx


def test_under_a_cap():
    free = measured.settle(
        run := run_of(MEASURE | {"dsx.recompute": "auto"}), profile_of(run), Path("p.json")
    )
    capped_run = run_of(MEASURE | {"dsx.recompute": "auto", "dsx.schedule.activation_gib": 0.3})
    capped = measured.settle(capped_run, profile_of(capped_run), Path("p.json"))
    assert free.dsx.recompute == "none"
    assert capped.dsx.recompute != "none"
    too_large = [note for note in capped.notes if note.endswith("> 307.20 MiB cap")]
    no_better = [note for note in capped.notes if note.endswith(("% step", ": as fast, less simple"))]
    assert (len(too_large), len(no_better)) == (2, 4)


def test_nothing_stays_within():
    run = run_of(MEASURE | {"dsx.schedule.activation_gib": 0.001})
    with pytest.raises(ConfigError, match=r"activation memory of 1\.02 MiB .*the nearest are"):
        measured.settle(run, profile_of(run), Path("p.json"))


@pytest.mark.parametrize(
    ("edits", "check"),
    [
        ({"dsx.schedule.name": "zbv"}, lambda run: run.schedule_name == "zbv"),
        ({"dsx.parallel.chunks": 3}, lambda run: run.chunks == 3),
        ({"dsx.parallel.chunks": 1}, lambda run: run.chunks == 1),
        ({"dsx.partition.method": [3, 4]}, lambda run: run.stage_map.bounds == (0, 3, 7)),
        ({"dsx.partition.method": [1, 2, 1, 3]}, lambda run: run.stage_map.bounds == (0, 1, 3, 4, 7)),
        ({"dsx.recompute": "full"}, lambda run: run.dsx.recompute == "full"),
        (
            {"dsx.schedule.name": "interleaved", "dsx.schedule.warmup": 1},
            lambda run: run.program.options.warmup_per_rank == 1,
        ),
    ],
)
def test_what_the_user_fixed_stays(edits, check):
    run = run_of(MEASURE | edits)
    settled = measured.settle(run, profile_of(run), Path("p.json"))
    assert check(settled)
    assert settled.program.options.costs is not None or settled.program.rows is not None


@pytest.mark.parametrize("method", ["uniform", "parameters", "flops", "type:block"])
def test_other_partitions_are_cut_as_ever(method):
    run = run_of(MEASURE | {"dsx.partition.method": method, "dsx.schedule.name": "1f1b"})
    assert measured.settle(run, profile_of(run), Path("p.json")).stage_map == run.stage_map


def test_a_schedule_file(tmp_path):
    path = tmp_path / "my.csv"
    path.write_text(build("interleaved", 2, 2, 4).to_csv())
    edits = MEASURE | {"dsx.schedule.file": str(path), "dsx.partition.method": "time"}
    run = run_of(edits)
    settled = measured.settle(run, profile_of(run), Path("p.json"))
    assert settled.program == run.program
    assert settled.chunks == 2
    assert settled.dsx.schedule == run.dsx.schedule


class TestSavedProfile:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        run = run_of(PIPELINE)
        path = tmp_path / "profile.json"
        path.write_text(profile_of(run).to_json())
        return path

    def test_taken(self, path):
        run = run_of(PIPELINE | {"dsx.profile": str(path)})
        assert run.dsx.profile_source == str(path)

    @pytest.mark.parametrize(
        ("edits", "said"),
        [
            ({"dsx.model.overrides": {"num_hidden_layers": 5}}, "model ="),
            ({"train_micro_batch_size_per_gpu": 4}, "micro_batch_size = 2"),
            ({"dsx.data.sequence_length": 128}, "sequence_length = 256"),
            ({"dsx.parallel.tensor": 2}, "tensor = 1"),
            ({"bf16": {"enabled": True}}, "precision = fp32"),
            ({"dsx.model.vocab_multiple": 1}, "model ="),
        ],
        ids=str,
    )
    def test_of_another_run(self, path, edits, said):
        world_size = 4 if "dsx.parallel.tensor" in edits else 2
        with pytest.raises(ConfigError, match="it was not measured for this run's") as refused:
            run_of(PIPELINE | {"dsx.profile": str(path)} | edits, world_size)
        assert said in refused.value.where
        assert refused.value.where.startswith("dsx.profile = ")

    def test_without_the_mode(self, path):
        profile = Profile.from_json(path.read_text())
        path.write_text(replace(profile, layers={"none": profile.layers["none"]}).to_json())
        run_of(PIPELINE | {"dsx.profile": str(path)})
        with pytest.raises(ConfigError, match="only none was measured"):
            run_of(PIPELINE | {"dsx.profile": str(path), "dsx.recompute": "auto"})

    def test_missing_or_no_profile(self, tmp_path):
        with pytest.raises(ConfigError, match="No such file"):
            run_of(PIPELINE | {"dsx.profile": str(tmp_path / "none.json")})
        (tmp_path / "empty.json").write_text("")
        with pytest.raises(ConfigError, match="it is no profile that dsx wrote"):
            run_of(PIPELINE | {"dsx.profile": str(tmp_path / "empty.json")})


def test_modes_to_measure():
    def modes(edits: dict) -> tuple[str, ...]:
        return measured.recompute_modes(run_of(MEASURE | edits))

    assert modes({}) == ("none",)
    assert modes({"dsx.recompute": "full"}) == ("none", "full")
    assert modes({"dsx.recompute": "auto"}) == ("none", "selective", "full")


def test_auto_tries_chunks_that_the_layers_allow():
    """7 layers on 2 ranks: 3 chunks at most, of which the notes or the choice show one."""
    run = run_of(MEASURE | {"dsx.schedule.name": "interleaved"})
    profile = profile_of(run)
    ranking = choose(
        profile, num_ranks=2, num_micro_batches=run.accumulation, space=Space(names=("interleaved",))
    )
    tried = {c.cut.stage_map.num_chunks for c in (ranking.chosen, *ranking.others)}
    assert tried == {v for v in CHUNKS if 2 * v <= len(layer_kinds(run.model))}
