"""dsx reshard, inspect and diff, as a shell sees them; without torch."""

from __future__ import annotations

import errno
import fcntl
import json
from dataclasses import replace
from pathlib import Path

import pytest

import made
from dsx.checkpoint.formats import native
from dsx.waiting import Waiting
from loaded import DSX, loaded_by


@pytest.fixture
def saved(tmp_path):
    """A folder of checkpoints with one of dsx's: tied, pp 2 x dp 2, ZeRO-1."""
    first = made.layout("qwen2", pp=2, dp=2, zero=1)
    source = made.plain(tmp_path / "plain", first.params, made.BF16, facts={"step": 12})
    made.reshard(source, tmp_path / "runs" / "step12", first)
    (tmp_path / "runs" / "latest").write_text("step12")
    return tmp_path / "runs"


def test_there_and_back_and_no_difference(dsx, saved, tmp_path):
    other, back = tmp_path / "other", tmp_path / "x" / "back"
    code, out, err = dsx("reshard", saved, other, "--to", "tp=2,pp=1,chunks=3,dp=3,zero=3")
    assert (code, err) == (0, "")
    assert "tensor 2 x pipeline 1 x data 3, chunks 3, ZeRO-3" in out
    assert "tiles had the checksum of the source's manifest" in out
    assert f"to load    folder {tmp_path}, tag other, which latest there names" in out
    assert native.catalog_of(other).facts["mesh"] == {"pp": 1, "dp": 3, "tp": 2}
    arguments = ("--tensor", 1, "--pipeline", 2, "--chunks", 1, "--data", 2, "--zero", 1, "--format", "json")
    code, out, err = dsx("reshard", other, back, *arguments)
    assert (code, err) == (0, "")
    report = json.loads(out)["report"]
    assert report["read_bytes"] == report["written_bytes"] == made.num_bytes(saved / "step12")
    for one, two in [(saved, other), (other, back), (saved / "step12", back)]:
        code, out, err = dsx("diff", one, two)
        assert (code, err) == (0, "")
        assert "120 of 120 tensors' states are equal, bit for bit" in out
    # the stages are cut by parameters on the way back; all else is the same
    assert (tmp_path / "x" / "latest").read_text() == "back"
    code, out, _ = dsx("reshard", other, tmp_path / "x" / "more", "--no-latest", "--context", 2)
    assert code == 0
    assert native.catalog_of(tmp_path / "x" / "more").facts["mesh"] == {"pp": 1, "dp": 3, "cp": 2, "tp": 2}
    assert "tag more, say it: latest there does not name it" in out
    assert dsx("reshard", other, tmp_path / "x" / "most")[0] == 0
    assert (tmp_path / "x" / "latest").read_text() == "back"
    assert dsx("reshard", other, tmp_path / "x" / "last", "--latest")[0] == 0
    assert (tmp_path / "x" / "latest").read_text() == "last"


def test_a_config_gives_the_layout(dsx, tmp_path):
    model = dict(made.CONFIGS["qwen2"], vocab_size=300)  # the tokenizer of bytes needs that many
    first, saved = made.layout(model), tmp_path / "saved"
    made.reshard(made.plain(tmp_path / "plain", first.params, made.BF16), saved, first, tile=1000)
    config = tmp_path / "config.json"
    content = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "dsx": {
            "model": {"config": model, "vocab_multiple": 8},
            "parallel": {"tensor": 2, "pipeline": 2, "chunks": 1},
            "data": {"sequence_length": 8},
            "train": {"steps": 1, "output": "x"},
        },
    }
    config.write_text(json.dumps(content))
    code, _, err = dsx("reshard", saved, tmp_path / "out", config, "--gpus", 8)
    assert (code, err) == (0, "")
    facts = native.catalog_of(tmp_path / "out").facts
    assert (facts["mesh"], facts["zero_stage"]) == ({"pp": 2, "dp": 2, "tp": 2}, 2)
    assert facts["model"]["hidden_size"] == 12
    content["dsx"]["model"]["config"] = model | {"hidden_size": 24}
    config.write_text(json.dumps(content))
    code, _, err = dsx("reshard", saved, tmp_path / "more", config, "--gpus", 8)
    assert code == 2
    assert "tensor 0.word.weight, weight: its shape is (300, 12), the target's is (300, 24)" in err
    assert not (tmp_path / "more").exists()


def test_what_is_written_beside_the_target_is_said_before(dsx, saved, tmp_path):
    """Every place that is touched outside of the target is a line of the dry run."""
    home = tmp_path / "new" / "home"
    _, out, _ = dsx("reshard", saved, home / "out", "--dry-run")
    said = [line.split()[1].rstrip(",") for line in out.splitlines() if line.startswith("beside")]
    assert said == [str(home), f"{home / 'out'}.partial", str(home / "latest")]
    assert not home.parent.exists()
    seen = []
    rename = Path.rename
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "rename", lambda a, b: (seen.append(a.parent), rename(a, b))[1])
        assert dsx("reshard", saved, home / "out")[0] == 0
    assert Path(said[1]) in seen  # made there, then given its name
    assert sorted(home.iterdir()) == [home / "latest", home / "out"]
    _, out, _ = dsx("reshard", saved, home / "more", "--dry-run")
    assert out.count("\nbeside") == 1  # the folder is there, and latest names another


def test_a_disk_without_locks_is_a_note(dsx, saved, tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    code, out, err = dsx("reshard", saved, tmp_path / "out")
    assert (code, err) == (0, "")
    assert " ".join(out.split()).count("has no file locks") == 1


def test_a_dry_run_tells_and_writes_nothing(dsx, saved, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    code, out, err = dsx(
        "reshard", saved, tmp_path / "out", "--to", "zero=3", "--dry-run", "--format", "json"
    )
    assert (code, err) == (0, "")
    outline = json.loads(out)
    assert outline["read_bytes"] == made.num_bytes(saved / "step12")
    assert outline["files"] == 4
    assert outline["target"]["layout"]["zero_stage"] == 3
    code, out, _ = dsx("reshard", saved, tmp_path / "out", "--to", "zero=3", "--dry-run")
    assert "to write in 4 files" in out
    assert sorted(tmp_path.rglob("*")) == before


def test_inspect_names_layout_states_and_tensors(dsx, saved, monkeypatch):
    code, out, err = dsx("inspect", saved)
    assert (code, err, max(map(len, out.splitlines())) <= 80) == (0, "", True)
    monkeypatch.setenv("COLUMNS", "300")
    code, out, err = dsx("inspect", saved)
    assert (code, err) == (0, "")
    assert "elements" in out.partition("master")[2].splitlines()[0]
    assert "layout     pp 2 x dp 2 x tp 1, chunks 1, ZeRO-1, bf16" in out
    assert "0.word.weight" in out
    (saved.parent / "a run").mkdir()
    saved = saved.rename(saved.parent / "a run" / "checkpoints")
    assert dsx("inspect", saved.parent) == (0, out.replace("/runs/", "/a run/checkpoints/"), "")
    code, out, _ = dsx("inspect", saved / "step12", "--format", "json")
    content = json.loads(out)
    assert (content["format"], content["facts"]["step"]) == ("dsx-2", 12)
    assert content["states"]["master"] == {
        "tensors": 30,
        "elements": sum(spec.numel for spec in made.layout("qwen2").params),
        "bytes": 4 * sum(spec.numel for spec in made.layout("qwen2").params),
        "dtypes": ["float32"],
    }


def test_inspect_verifies_and_names_what_is_damaged(dsx, saved):
    assert dsx("inspect", saved, "--verify")[0] == 0
    file = saved / "step12" / "rank_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 8
    file.write_bytes(data)
    code, out, err = dsx("inspect", saved, "--verify")
    assert code == 1
    assert "1 wrong" in out
    last = native.catalog_of(saved / "step12")
    names = [str(e) for e in last.entries for p in e.pieces if p.file == file.name and p.stop(2) >= len(data)]
    assert f"{file}: {names[0]}" in err


def test_diff_says_what_differs_and_how_far(dsx, saved, tmp_path):
    layout = made.layout("qwen2", dp=2)
    specs = [spec for spec in layout.params if spec.name != "5.norm.weight"]
    bits = made.random_bits(layout.params, made.BF16)
    one = bits["2.mlp.down.weight", "master"].reshape(-1)
    one[:] = 0x3F800000
    made.reshard(made.plain(tmp_path / "p", specs, made.BF16, bits=bits), tmp_path / "a", layout_of(specs))
    one[3:5] += 7
    made.reshard(made.plain(tmp_path / "q", specs, made.BF16, bits=bits), tmp_path / "b", layout_of(specs))
    code, out, err = dsx("diff", tmp_path / "a", tmp_path / "b")
    assert (code, err) == (1, "")
    told = "2.mlp.down.weight, master: 2 of 240 elements differ, at most 7 ulp, 8.34e-07 absolute"
    assert (told in " ".join(out.split()), max(map(len, out.splitlines())) <= 80) == (True, True)
    assert "115 of 116 tensors' states are equal" in out
    code, out, _ = dsx("diff", saved, tmp_path / "b", "--format", "json")
    content = json.loads(out)
    assert code == 1
    assert ["5.norm.weight", "exp_avg"] in content["only_in"][str(saved)]
    assert dsx("diff", saved, saved, "--common")[0] == 0


def layout_of(specs):
    return replace(made.layout("qwen2", dp=2), params=tuple(specs))


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["--to", "tp=two"], 2, "'tp=two' says nothing about a layout"),
        (["--to", "tp=2,tensor=2"], 2, "tensor comes twice"),
        (["--tensor", "5"], 2, "it does not divide by tp = 5"),
        (["--to", "pp=8"], 2, "cannot be cut into pipeline 8 x chunks 1 stages"),
        (["--gpus", "4"], 2, "it needs a CONFIG"),
        (["--memory", "lots"], 2, "'lots' is no size"),
        (["--memory", "20MiB"], 2, "one worker needs"),
    ],
)
def test_what_cannot_be_is_one_message(dsx, saved, tmp_path, arguments, code, what):
    found, _, err = dsx("reshard", saved, tmp_path / "out", *arguments)
    assert (found, what in err.replace("\n", " ").replace("│", "")) == (code, True), err
    assert not list(tmp_path.glob("out*"))


def test_folders_that_are_no_checkpoints(dsx, tmp_path, saved):
    for folder, ended, what in [
        (tmp_path / "none", 2, "does not exist"),
        (tmp_path, 1, "no file in it is one"),
    ]:
        code, _, err = dsx("inspect", folder)
        assert (code, what in err) == (ended, True)
    (tmp_path / "island0").mkdir()
    (tmp_path / "island0/checkpoints").symlink_to(saved)
    code, _, err = dsx("inspect", tmp_path)
    assert (code, f"name one of the runs in it: {tmp_path / 'island0'}" in err.replace("\n", " ")) == (
        1,
        True,
    )
    code, _, err = dsx("reshard", saved, saved / "step12")
    assert (code, "it exists already" in err) == (2, True)


def test_no_torch_is_needed(saved, tmp_path):
    for words in (["reshard", saved, tmp_path / "o", "--to", "dp=1"], ["diff", saved, tmp_path / "o"]):
        assert "torch" not in loaded_by(DSX, *words)[1]


def test_whatever_takes_long_says_how_far_it_is(dsx, saved, tmp_path, monkeypatch):
    """In a log file, too: each word counts to its end."""
    waits = []

    class Heard(Waiting):
        def __exit__(self, *error):
            super().__exit__(*error)
            waits.append((self.text, self._count, self._total))

    monkeypatch.setattr("dsx.waiting.Waiting", Heard)
    assert dsx("reshard", saved, tmp_path / "other", "--to", "tp=2,pp=1,dp=1,zero=1")[0] == 0
    assert dsx("inspect", tmp_path / "other", "--verify")[0] == 0
    assert dsx("diff", saved, tmp_path / "other")[0] == 0
    said = [text.partition(":")[0].removeprefix("... ").split()[0] for text, _, _ in waits]
    assert said == ["reading", "copying", "reading", "verifying", "reading", "comparing"]
    counted = [(count, total) for _, count, total in waits if total is not None]
    assert len(counted) == 3
    assert all(count == total > 0 for count, total in counted)
