"""dsx check as a shell sees it: what it prints, mends and returns."""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from loaded import DSX, HEAVY, loaded_by

WRONG = """{
  // of a friend
  "train_batch_size": 32,
  "zero_optimization": {
    "stage": 3,
    "stage3_prefetch_bucket_sise": 5e7,   # elements
    "cpu_offload": true
  },
  "optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "max_grad_norm": 1.0}},
  "wandb": {"enabled": true, "tags": "me"}
}
"""
MENDED = """{
  // of a friend
  "train_batch_size": 32,
  "zero_optimization": {
    "stage": 3,
    "stage3_prefetch_bucket_size": 5e7,   # elements
    "offload_optimizer": {"device": "cpu"}
  },
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
  "wandb": {"enabled": true, "tags": "me"},
  "gradient_clipping": 1
}
"""
RIGHT = '{"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {}}}'
QUIET = "--no-machine"
CONFIGS = Path(__file__).parents[2] / "configs"
INTERLEAVED = CONFIGS / "3d_interleaved.json"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(WRONG)
    return path


def test_islands_are_shown_beside_one_of_them(dsx):
    config = CONFIGS / "islands.json"
    code, out, _ = dsx("check", config, "--gpus", 4, QUIET)
    assert code == 0
    assert "mesh       tensor 1 x pipeline 1 x data 2 = 2 ranks" in out
    assert "islands    2 of 2 ranks each, 4,096 tokens per step of all; the above is one" in out
    code, out, _ = dsx("check", config, "--gpus", 3, QUIET)
    assert (code, "3 ranks cannot be divided into as many islands" in out.replace("\n", " ")) == (1, True)


def test_prints_a_paragraph_per_finding_and_counts(dsx, file):
    code, out, err = dsx("check", file, QUIET)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == (
        "error    zero_optimization.stage3_prefetch_bucket_sise = 50000000 (line 6): unknown key in "
        'zero_optimization; DeepSpeed refuses it. Fix: write "stage3_prefetch_bucket_size", if that is '
        "meant. [unknown-key]"
    )
    assert [line.split()[0] for line in lines[:-1]] == ["error"] * 4 + ["warning", "note", "note"]
    assert lines[-1].startswith("4 errors, 1 warning, 2 notes; --fix mends 4 (for DeepSpeed 0.19.8, guessed")


def test_diff_shows_and_fix_writes(dsx, file):
    code, out, _ = dsx("check", file, QUIET, "--diff")
    assert code == 1
    assert '-    "cpu_offload": true\n' in out
    assert '+    "offload_optimizer": {"device": "cpu"}\n' in out
    assert file.read_text() == WRONG
    code, out, _ = dsx("check", file, QUIET, "--fix")
    assert file.read_text() == MENDED
    assert Path(f"{file}.orig").read_text() == WRONG
    assert code == 1  # wandb.tags: only a person knows
    assert "1 error, 1 note; 4 mended" in out
    # Nothing is left to mend, and the first version stays.
    _, out, _ = dsx("check", file, QUIET, "--fix")
    assert "mended" not in out
    assert Path(f"{file}.orig").read_text() == WRONG


WISHES = """{
  "train_batch_size": "8",
  "gradient_cliping": 0.5,
  "compression_training": {"layer_reduction": {"enabled": true}},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.999, 0.9]}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 2000, "warmup_max_lr": 3e-4}}
}
"""


def test_what_a_run_does_is_changed_on_request_alone(dsx, tmp_path):
    """A key that DeepSpeed ignores, one that it refuses for what it asks, legal values: --fix leaves all."""
    path = tmp_path / "ds.json"
    path.write_text(WISHES)
    assert "; --fix mends 1, --fix=unsafe 4 more (for" in dsx("check", path, QUIET)[1]
    findings = json.loads(dsx("check", path, QUIET, "--json")[1])["files"][0]["findings"]
    assert [f["key"] for f in findings if f["safe"]] == ["train_batch_size"]
    dsx("check", "--fix", path, QUIET)
    assert path.read_text() == WISHES.replace('"8"', "8")
    shown = dsx("check", path, QUIET, "--diff=unsafe")[1]
    assert '+  "gradient_clipping": 0.5,\n' in shown
    dsx("check", path, QUIET, "--fix=unsafe")
    assert json.loads(path.read_text()) == {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 2000}},
    }


def test_the_word_behind_fix_is_a_config(dsx, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = dsx("check", "--fix", "unsafe", QUIET)
    assert code == 2
    assert "write --fix=unsafe" in err
    code, _, err = dsx("check", "--fix=all", "unsafe", QUIET)
    assert code == 2
    Path("unsafe").write_text(RIGHT.replace("8", '"8"'))
    code, out, _ = dsx("check", "--fix", "unsafe", QUIET)
    assert code == 0
    assert "1 mended" in out


def test_json(dsx, file):
    code, out, _ = dsx("check", file, QUIET, "--format", "json", "--diff")
    content = json.loads(out)
    one = content["files"][0]
    assert code == 1
    assert content["counts"] == one["counts"] == {"errors": 4, "warnings": 1, "notes": 2}
    assert (one["file"], one["for"], one["inferred"]) == (str(file), "deepspeed", True)
    assert one["resolved"] is None
    assert "+++ " in one["diff"]
    assert one["findings"][0] == {
        "check": "unknown-key",
        "severity": "error",
        "key": "zero_optimization.stage3_prefetch_bucket_sise",
        "path": ["zero_optimization", "stage3_prefetch_bucket_sise"],
        "value": 50000000,
        "written": True,
        "line": 6,
        "column": 5,
        "why": "unknown key in zero_optimization; DeepSpeed refuses it",
        "fix": 'write "stage3_prefetch_bucket_size", if that is meant',
        "edits": [
            {
                "kind": "rename",
                "path": ["zero_optimization", "stage3_prefetch_bucket_sise"],
                "value": "stage3_prefetch_bucket_size",
            }
        ],
        "safe": True,
    }


def test_several_files_strict_and_a_broken_one(dsx, tmp_path):
    right, warned, broken = (tmp_path / name for name in ("right.json", "warned.json", "broken.json"))
    right.write_text(RIGHT)
    warned.write_text(RIGHT.replace("{", '{"my_note": 1, ', 1))
    broken.write_text('{"train_batch_size": 8\n "x" 3}')
    code, out, err = dsx("check", right, QUIET)
    assert (code, err) == (0, "")
    assert out.startswith("nothing to mend (for DeepSpeed")
    code, out, _ = dsx("check", right, warned, QUIET)
    assert code == 0
    assert f"{right}:\nnothing to mend" in out
    assert "warning  my_note = 1 (line 1)" in out
    assert dsx("check", right, warned, QUIET, "--strict")[0] == 1
    code, out, _ = dsx("check", broken, right, QUIET)
    assert code == 1
    assert "error    line 2, column 2: not JSON (" in out
    assert "nothing to mend" in out


def test_what_cannot_be_opened_hides_no_report(dsx, tmp_path):
    right, empty, absent = (tmp_path / name for name in ("right.json", "empty.json", "absent.json"))
    right.write_text(RIGHT)
    empty.touch()
    code, out, err = dsx("check", absent, right, tmp_path, empty, QUIET)
    assert code == 2
    assert f"{right}:\nnothing to mend" in out
    assert f"error    {empty}: the file is empty. Fix: write a config" in out
    said = err.splitlines()
    assert said[0].startswith(f"dsx: {absent}: there is no such file. Fix: ")
    assert said[1].startswith(f"dsx: {tmp_path}: it is a folder. Fix: ")
    code, out, _ = dsx("check", absent, right, QUIET, "--json")
    assert (code, [one["file"] for one in json.loads(out)["files"]]) == (2, [str(right)])
    code, out, _ = dsx("check", empty, QUIET)
    assert (code, out.startswith(f"error    {empty}: the file is empty")) == (1, True)


def test_standard_input(dsx, monkeypatch):
    for text, expected in ((WRONG, 1), (RIGHT, 0), ("", 1)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        code, out, err = dsx("check", "-", QUIET, "--diff")
        assert (code, err) == (expected, "")
        assert text or "error    standard input: the file is empty" in out
        assert text != WRONG or "--- standard input" in out
    code, _, err = dsx("check", "-", QUIET, "--fix")
    assert code == 2
    assert "standard input cannot be written to" in err


def test_a_value_of_set_is_named_and_no_line_of_the_file(dsx):
    config = CONFIGS / "zero1.json"
    wrong = {
        "zero_optimization.stage=9": "zero_optimization.stage = 9 (--set): not one of",
        "dsx.train.stepz=3": "dsx.train.stepz = 3 (--set): unknown key",
        'scheduler={"type": "WarmupDecayLR", "params": {}}': "scheduler.params.total_num_steps (--set): ",
        "gradient_clipping=NaN": "gradient_clipping = NaN (--set): not a number",
        "my.own=1": "my = {'own': 1} (--set): ".replace("'", '"'),
        'wandb="\\ud800"': "wandb: it holds \\ud800, half of a character",
        "dsx.train.output=/dev/null/runs": 'dsx.train.output = "/dev/null/runs" (--set): /dev/null cannot be',
    }
    for item, words in wrong.items():
        code, out, err = dsx("check", config, QUIET, "--set", item)
        assert code == (2 if "ud800" in item else 1), item
        assert words in out + err, item
        assert "(line" not in out, item
    (finding,) = json.loads(dsx("check", config, QUIET, "--json", "--set", "dsx.train.stepz=3")[1])["files"][
        0
    ]["findings"]
    assert (finding["key"], finding["line"], finding["column"]) == ("dsx.train.stepz", None, None)
    # What the file itself says has its line beside it.
    code, out, _ = dsx("check", config, QUIET, "--set", "dsx.train.stepz=3", "--set", "train_batch_size=0")
    assert "train_batch_size = 0 (--set)" in out


def test_an_output_on_another_machine_is_no_mistake(dsx, tmp_path, monkeypatch):
    """Where the folder or the one around it is here, it must take files; what is further off is elsewhere."""
    config = CONFIGS / "zero1.json"
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "TemporaryFile", no_room := Mock(side_effect=PermissionError(13, "Denied")))
    for place, bad in {".": True, "runs": True, "me/runs": False, "me/runs/a": False}.items():
        code, out, _ = dsx("check", config, QUIET, "--set", f"dsx.train.output={tmp_path / place}")
        assert (code, "cannot be written to (Denied)" in out) == ((1, True) if bad else (0, False)), place
    assert no_room.call_count == 2
    monkeypatch.undo()
    code, out, _ = dsx("check", config, QUIET, "--set", f"dsx.train.output={tmp_path / 'file/me/runs'}")
    assert (code, f"{tmp_path / 'file'} cannot be written to" in out) == (1, True)


def test_nan_and_infinity(dsx, tmp_path):
    """As Python's json has them, which the Trainer and Accelerate read and write."""
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8,\n "steps_per_print": Infinity,\n "gradient_clipping": 1.0}')
    code, out, _ = dsx("check", path, QUIET, "--for", "trainer")
    assert (code, out.startswith("nothing to mend")) == (0, True)
    code, out, _ = dsx("check", path, QUIET)
    assert (code, "warning  steps_per_print = Infinity (line 2): " in out) == (0, True)
    code, out, _ = dsx("check", path, QUIET, "--for", "deepspeed", "--json")
    (finding,) = json.loads(out, parse_constant=pytest.fail)["files"][0]["findings"]
    assert (code, finding["severity"], finding["value"], finding["line"]) == (1, "error", "Infinity", 2)
    for text in (
        '{"train_batch_size": 8,\n "optimizer": {"type": "SGD", "params": {\n  "lr": NaN}}}',
        '{"train_batch_size": 8,\n "optimizer": {"type": "SGD", "params": {\n  "lr": NaN // rate\n}}}',
    ):
        path.write_text(text)
        code, out, _ = dsx("check", path, QUIET)
        assert code == 1
        assert "(line 3): not a number" in out
        assert out.count("error    ") == 1
    zero1 = (CONFIGS / "zero1.json").read_text()
    assert '"steps": 200' in zero1
    path.write_text(zero1.replace('"steps": 200', '"steps": NaN'))
    line = zero1[: zero1.index('"steps": 200')].count("\n") + 1
    assert f"dsx.train.steps = NaN (line {line}): NaN is no number" in dsx("check", path, QUIET)[1]
    path.write_text('{ // mine\n"train_batch_size": 8, "gradient_clipping": NaN}')
    assert "NaN on line 2 is no number of JSON's" in dsx("check", path, QUIET)[1]
    dsx("check", path, QUIET, "--fix")


def test_fix_leaves_infinity_where_it_stands(dsx, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": "8", "steps_per_print": Infinity, "x": [NaN, -Infinity]}')
    dsx("check", path, QUIET, "--fix")
    assert path.read_text() == '{"train_batch_size": 8, "steps_per_print": Infinity, "x": [NaN, -Infinity]}'


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_colour_is_for_terminals(monkeypatch, file, dsx, variables, coloured):
    plain = dsx("check", file, QUIET, "--diff")[1]
    assert "\x1b" not in plain
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    dsx("check", file, QUIET, "--diff")
    shown = terminal.getvalue()
    assert ("\x1b[1;31merror" in shown) == coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == plain


def test_one_word_for_fixes(dsx, file):
    out = dsx("check", file, QUIET)[1]
    findings = [line for line in out.splitlines() if line.startswith(("error ", "warning ", "note "))]
    assert len(findings) == 7
    assert all(line.count(" Fix: ") == 1 for line in findings)


@pytest.mark.parametrize(
    ("arguments", "gpus"), [((), 1), (("--model", "gpt2/tiny"), 2), (("--model", "llama-3-8b"), 8)]
)
def test_what_init_writes_is_clean(dsx, tmp_path, arguments, gpus):
    assert dsx("init", tmp_path / "new", "--gpus", gpus, *arguments)[0] == 0
    code, out, _ = dsx("check", tmp_path / "new/train.json", QUIET, "--gpus", gpus, "--strict")
    assert code == 0
    assert out.splitlines()[-1] == "nothing to mend (for dsx, DeepSpeed 0.19.8)"


def test_explain(dsx):
    code, out, _ = dsx("check", "--explain", "zero_optimization.stage")
    assert code == 0
    assert "zero_optimization.stage" in out
    keys = json.loads(dsx("check", "--explain", "gradient_clipping", "--format", "json")[1])["keys"]
    assert [key["default"] for key in keys] == [1.0]


def test_an_old_config_hears_what_has_changed_since(dsx, tmp_path):
    path = tmp_path / "old.json"
    path.write_text('{"train_batch_size": 8, "bf16": {"enabled": true}}')
    code, out, _ = dsx("check", path, QUIET, "--from-version", "0.12.0")
    assert code == 0
    said = [line.split()[1].rstrip(":") for line in out.splitlines() if line.endswith("[behaviour]")]
    assert said == ["steps_per_print", "gradient_clipping", "bf16.check_grad_overflow"]
    dsx("check", path, QUIET, "--from-version", "0.12.0", "--fix")
    assert json.loads(path.read_text()) == {
        "train_batch_size": 8,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "steps_per_print": 10,
        "gradient_clipping": 0,
    }
    _, out, _ = dsx("check", path, QUIET, "--from-version", "0.19.3")
    assert "[behaviour]" not in out


def test_dsx_configs(dsx):
    config = CONFIGS / "zero3.json"
    code, out, _ = dsx("check", config, QUIET)
    assert code == 0
    assert "say --gpus N" in out
    code, out, _ = dsx("check", config, QUIET, "--set", "dsx.train.stepz=3", "--set", "fp16.enabled=true")
    assert code == 1
    assert "fp16.enabled = true" in out
    code, out, _ = dsx(
        "check", config, QUIET, "--set", "dsx.train.stepz=3", "--set", "dsx.data.sequence_length=-1"
    )
    assert out.count("[dsx]") == 2
    code, out, _ = dsx("check", config, QUIET, "--gpus", "8", "--gpu-memory", "2.084")
    assert code == 1
    assert "[memory]" in out
    assert "2.084 GiB less 2.08 for the device's context" in out
    code, _, err = dsx("check", config, QUIET, "--gpus", "8", "--gpu-memory", "2")
    assert (code, "nothing is left" in err) == (2, True)
    bucket = "zero_optimization.reduce_bucket_size=1000000"
    code, out, _ = dsx("check", config, QUIET, "--gpus", "8", "--set", bucket)
    assert code == 0
    assert "the model has 804,224 parameters" in out


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('dsx.data.source="/no/such"', 'dsx.data.source = "/no/such" (--set): '),
        ('dsx.data.source="no/such/*.txt"', "there is no such file or folder (looked for"),
        ('dsx.data.source="none.jsonl"', "there is no such file or folder (looked for"),
        ('dsx.data.sources=[{"source": "~/none/"}]', 'dsx.data.sources[0].source = "~/none/"'),
        ('dsx.data.tokenizer="/no/such"', "there is no such folder"),
        ('dsx.data.tokenizer="not a name"', "there is no such folder"),
        ('dsx.data.tokenizer="no-such-tokenizer"', "the Hugging Face hub cannot be reached"),
        (f"dsx.data.seed={2**200}", "a whole number from 0 up to, not including, 9.22337e+18"),
        (f"dsx.train.seed={2**63}", "a whole number from 0 up to, not including, 9.22337e+18"),
        ("dsx.parallel.tensor_paralel=2", 'Fix: write "tensor", if that is meant'),
        ("dsx.parallel.sequence_paralel=true", 'Fix: write "sequence_parallel", if that is meant'),
        ('dsx.schedule={"name": "looped_bfs", "warmup": 3}', "looped_bfs, warmup = 3: it has no such option"),
    ],
)
def test_what_no_run_could_use(dsx, monkeypatch, override, words):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, out, _ = dsx("check", INTERLEAVED, QUIET, "--gpus", "8", "--set", override)
    assert code == 1
    assert words in out


def test_a_degree_that_is_left_to_plans_is_found_without_a_number_of_ranks(dsx):
    code, out, _ = dsx("check", INTERLEAVED, QUIET, "--set", 'dsx.parallel.context="auto"')
    assert (code, "a plan chooses it, and a run needs a number" in out) == (1, True)


def test_a_tokenizer_of_the_hub_that_nobody_here_can_look_up_is_a_warning(dsx, monkeypatch):
    """A machine that checks configs may have no network where those that train do, or their caches."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, out, _ = dsx("check", CONFIGS / "llama3_8b_8gpu.json", QUIET, "--gpus", "8")
    assert code == 0
    assert "warning  dsx.data.tokenizer" in out
    assert "cannot be reached" in out


def test_samples_of_ones_own_need_no_text(dsx):
    own = ("--set", "dsx.data.source=own", "--set", "dsx.data.tokenizer=auto")
    code, out, _ = dsx("check", INTERLEAVED, QUIET, "--gpus", "8", *own)
    assert code == 0, out


OURS = """
    ds.json ds_config.json a/ds_z3_offload.json deepspeed.json deepspeed_zero2.hjson deepspeed/zero3.json
    configs/ds_configs/stage3.json my_ds_config.json zero2-deepspeed-config.json examples/deepspeed/a.json
    dsconfig.json ds3.json ds-zero2.json ds_configs/z.hjson llama.deepspeed.json ds_finetune.json
"""
OTHERS = """
    dsp_filters.json dsl.json deepspeedometer.json ads.json cards.json beds_config.json package.json
    deepspeed/sub/vocab.json ds_config.yaml ids.json dsp/zero3.json feeds/config.json ds/readme.md
"""


def test_the_hook_looks_at_deepspeed_configs():
    hook = (Path(__file__).parents[2] / ".pre-commit-hooks.yaml").read_text()
    pattern = re.search(r"files: (.*)", hook)
    assert pattern
    assert [path for path in OURS.split() if not re.search(pattern[1], path)] == []
    assert [path for path in OTHERS.split() if re.search(pattern[1], path)] == []


def test_locks_of_dead_builds(dsx, tmp_path, monkeypatch):
    config, lock = tmp_path / "right.json", tmp_path / "cache" / "py311_cpu" / "fused_adam" / "lock"
    config.write_text(RIGHT)
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (1, 1))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    code, out, _ = dsx("check", config)
    assert code == 0
    assert f"warning  {lock} is " in out
    with lock.open():  # as its builder has it
        assert f"process {os.getpid()} builds there" in dsx("check", config)[1]
    assert "extensions-lock" not in dsx("check", config, QUIET)[1]


def test_loads_little(file):
    """What takes long to import is left out, so that the command answers in a fraction of a second."""
    _, loaded = loaded_by(
        f"try:\n    {DSX}\nexcept SystemExit: pass", "check", file, QUIET, "--diff", "--gpus", 4
    )
    assert not loaded & {"rich", "dsx.config.schema", *HEAVY}
    # typer itself loads pydantic; the doctor does not.
    _, loaded = loaded_by("from dsx.doctor import examine; examine(open(sys.argv[1]).read())", file)
    assert "dsx.doctor.examine" in loaded
    assert not loaded & {"torch", "pydantic", "typer"}
