"""dsx.schedule: options of builders, and schedules from files."""

from __future__ import annotations

import pytest
from sample_config import changed

from dsx.config.resolve import resolve
from dsx.errors import ConfigError, ScheduleError
from dsx.schedules.builders import Options, build
from dsx.schedules.interleaved import MOST_FORWARDS

PP2 = {"dsx.parallel.pipeline": 2, "dsx.parallel.tensor": 1}


@pytest.fixture
def written(tmp_path):
    """Write a schedule's CSV, edited, and give its path."""

    def write(name="interleaved", chunks=2, micro_batches=4, old="", new=""):
        text = build(name, 2, chunks, micro_batches).to_csv()
        assert old in text
        path = tmp_path / "mine.csv"
        path.write_text(text.replace(old, new, 1) if old else text)
        return str(path)

    return write


def _batch(micro_batches):
    return {
        "train_batch_size": micro_batches,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
    }


def _refused(edits):
    with pytest.raises(ConfigError) as caught:
        resolve(changed(PP2 | _batch(4) | edits), world_size=2)
    return str(caught.value)


def test_options_reach_the_builder():
    edits = {
        "dsx.schedule.name": "interleaved_zb",
        "dsx.schedule.group_size": 4,
        "dsx.schedule.warmup": 2,
        "dsx.schedule.most_live": 7,
    }
    run = resolve(changed(PP2 | _batch(8) | edits), world_size=2)
    options = Options(group_size=4, warmup_per_rank=2, most_live=7)
    assert run.program.build(2, 2, 8) == build("interleaved_zb", 2, 2, 8, options)
    again = resolve(run.resolved(), world_size=2)
    assert again.program == run.program


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"dsx.schedule.name": "1f1b", "dsx.schedule.group_size": 4}, ["group_size", "no such option"]),
        ({"dsx.schedule.name": "zbv", "dsx.schedule.warmup": 1}, ["warmup", "no such option"]),
        ({"dsx.schedule.name": "interleaved_zb", "dsx.schedule.most_live": 1}, ["most_live", "use 4 to 8"]),
        ({"dsx.schedule.group_size": 0}, ["dsx.schedule.group_size = 0", "at least 1"]),
        ({"dsx.schedule.warmup": -1}, ["dsx.schedule.warmup = -1", "at least 0"]),
    ],
)
def test_options_that_do_not_fit_are_explained(edits, words):
    message = _refused(edits)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("option", [{}, {"dsx.schedule.group_size": 4}])
def test_a_step_that_no_builder_lays_out_is_refused_in_its_words(option):
    micro_batches = MOST_FORWARDS // 16
    size = PP2 | {"dsx.schedule.name": "interleaved", "dsx.parallel.chunks": 8}
    size["dsx.model.overrides"] = {"num_hidden_layers": 16}
    with pytest.raises(ConfigError) as caught:
        resolve(changed(size | option | _batch(micro_batches + 1)), world_size=2)
    with pytest.raises(ScheduleError) as told:
        build("interleaved", 2, 8, micro_batches + 1)
    assert str(told.value) in str(caught.value)
    if not option:
        assert resolve(changed(size | _batch(micro_batches)), world_size=2).accumulation == micro_batches


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "interleaved_zb"])
def test_a_file_fixes_degrees_and_placement(written, name):
    chunks = 1 if name == "1f1b" else 2
    path = written(name, chunks)
    run = resolve(changed(_batch(4) | {"dsx.schedule.file": path}), world_size=2)
    assert (run.mesh.pp, run.chunks) == (2, chunks)
    assert run.stage_map.placement == ("v" if name == "zbv" else "loop")
    assert run.program.divides == (name in ("zbv", "interleaved_zb"))
    assert run.program.build(2, chunks, 4).rows == build(name, 2, chunks, 4).rows
    assert any("mine.csv" in note for note in run.notes)
    again = resolve(run.resolved(), world_size=2)
    assert (again.program, again.stage_map) == (run.program, run.stage_map)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("2F1,", "", ["lacks", "2F1"]),
        ("2F1,", "2F1,2F1,", ["repeats", "2F1"]),
        ("0F0,0F1,2F0", "2F0,0F0,0F1", ["deadlocks", "rank 0 at 2F0"]),
        ("0F0", "0G0", ["'0G0'", "is no action"]),
        ("1F0", "0F0", ["rank 1", "lacks 1F0"]),
    ],
)
def test_a_file_that_cannot_run_is_refused_with_the_action(written, old, new, words):
    message = _refused({"dsx.schedule.file": written(old=old, new=new)})
    assert "dsx.schedule.file" in message
    assert all(word in message for word in words), message


def test_a_file_that_does_not_fit_the_run(written, tmp_path):
    path = written()
    assert "4 micro-batches, not for 2 x 2 and 8" in _refused(_batch(8) | {"dsx.schedule.file": path})
    message = _refused({"dsx.schedule.file": path, "dsx.parallel.chunks": 1})
    assert "dsx.parallel.chunks = 1" in message
    assert "written for 2" in message
    message = _refused({"dsx.schedule.file": path, "dsx.schedule.name": "zbv"})
    assert "file and name are both given" in message
    assert "No such file" in _refused({"dsx.schedule.file": str(tmp_path / "absent.csv")})
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in _refused({"dsx.schedule.file": str(binary)})
