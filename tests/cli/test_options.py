"""One language of options and exit codes, held to by every command that there is."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer

from dsx.cli import options
from dsx.cli.app import build
from dsx.errors import DsxError

BIN = Path(sys.executable).parent
CONFIGS = Path(__file__).parents[2] / "configs"
ZERO1 = str(CONFIGS / "zero1.json")
COMMANDS = typer.main.get_command(build()).commands
FORMER = {"--world-size", "--ranks", "--num-gpus", "--num_gpus", "--nproc", "--json", "--out", "--config"}

# A word that two commands need for different things; each says in its help which.
OF_THEIR_OWN = {
    "--format": {"trace", "schedule", "estimate"},  # these can also draw
    "--output": {"plan", "plot"},  # a config, a picture
    "--chunks": {"schedule"},  # has a default of its own
    "--pipeline": {"check"},  # of a stock PipelineModule
    "--precision": {"verify", "reshard"},  # of the comparison, of the weights
    "--model": {"verify"},  # also one of one's own
    "--gpus": {"train"},  # has a default of its own
    "--experts": {"upcycle"},  # how many, not a picture
}

# What it prints is the run's.
SAYS_NOTHING = {"train"}


def flags(command) -> dict[str, object]:
    return {flag: each for each in command.params for flag in each.opts if flag.startswith("-")}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_speaks_it(name):
    command = COMMANDS[name]
    assert isinstance(command, options.Command)
    assert set(flags(command)) & FORMER == set()
    for each in command.params:
        assert each.help or each.name == "help", each.name
        if each.name in ("config", "configs"):
            assert each.param_type_name == "argument"
        if re.match(r"(File|Picture|Folder) to write", each.help or ""):
            assert each.opts == ["--output"]
        if re.search(r"[Nn]umber of ranks", each.help or ""):
            assert each.opts == ["--gpus"]
    said = command.get_help(typer.Context(command, info_name=name))
    if name not in SAYS_NOTHING:
        assert {"table", "json"} <= set(re.search(r"--format <(.*?)>", said)[1].split("|"))
    assert len(command.get_short_help_str(limit=200)) <= 64  # else cut in dsx --help
    for word in re.findall(r"--[a-z][a-z-]+", said.split("Options:")[0]):
        assert word in flags(command), f"the text of {name} names {word}, which it does not have"


def test_an_option_of_several_commands_is_one_option():
    said = defaultdict(lambda: defaultdict(set))
    for name, command in COMMANDS.items():
        for flag, each in flags(command).items():
            if name not in OF_THEIR_OWN.get(flag, ()):
                said[flag][each.help, each.metavar].add(name)
    assert {flag: dict(texts) for flag, texts in said.items() if len(texts) > 1} == {}
    assert sum(len(names) > 1 for texts in said.values() for names in texts.values()) >= 10


@pytest.mark.parametrize("name", COMMANDS)
def test_bad_input_is_2_and_help_is_0(dsx, name):
    code, out, err = dsx(name, "--no-such-option")
    assert (code, out) == (2, "")
    assert "--no-such-option" in err
    code, out, err = dsx(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: dsx {name}")
    code, out, err = dsx(name, "--format", "yaml")
    assert code == 2
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [["trian"], ["trian", "--help"], ["--no-such-option"], ["-x"]])
def test_an_unknown_command_is_2(dsx, words):
    code, out, err = dsx(*words)
    assert (code, out) == (2, "")
    assert words[0] in err


ACTIONS = {"data": ["show"], "islands": ["keys"]}  # commands whose first word says what to do


def has_argument(name: str) -> bool:
    return any(each.param_type_name == "argument" for each in COMMANDS[name].params)


@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if has_argument(name) and name not in ("init", "islands")]
)
def test_a_missing_file_is_2(dsx, tmp_path, name):
    more = {
        "verify": ["--gpus", 2],
        "diff": [tmp_path],
        "reshard": [tmp_path / "out"],
        "upcycle": [tmp_path / "out"],
        "plan": ["--gpus", 2, "--cluster", "CPU"],
    }
    code, out, err = dsx(name, *ACTIONS.get(name, ()), tmp_path / "absent.csv", *more.get(name, ()))
    assert (code, out) == (2, "")
    assert "absent.csv" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", COMMANDS)
def test_any_refusal_is_one_line_and_2(dsx, monkeypatch, name):
    """Whatever a command raises on purpose, unless it is its verdict."""

    def refuse(self, context):
        raise DsxError("here", "it is wrong", "mend it")

    monkeypatch.setattr(options.Command, "invoke", refuse)
    needed = [CONFIGS / "zero1.json" for each in COMMANDS[name].params if each.param_type_name == "argument"]
    needed[: len(ACTIONS.get(name, ()))] = ACTIONS.get(name, ())
    given = {"--gpus": 2, "--cluster": "CPU"}
    rest = [item for flag, value in given.items() if flag in flags(COMMANDS[name]) for item in (flag, value)]
    code, out, err = dsx(name, *needed, *rest)
    assert (code, out, err) == (2, "", "dsx: here: it is wrong. Fix: mend it.\n")


WRONG = {  # a value that an option cannot have, and what is said of it
    int: ("two", "1.5", "9" * 30, "9" * 5000, "nan"),
    float: ("two", "nan", "inf", "1e+300"),
    Path: ("no/such/place",),
}


def kind(parameter) -> type | None:
    found = parameter.type_descriptor.annotation
    return found if found in WRONG else None


def refused(name: str, flag: str, value: str) -> None:
    """As :func:`dsx.cli.app.main` prints it."""
    with pytest.raises(DsxError) as error:
        COMMANDS[name].make_context(f"dsx {name}", [f"{flag}={value}"])
    said = str(error.value)
    assert re.fullmatch(rf"{flag} {re.escape(value[:80])}.*: .+\. Fix: .+\.", said)
    assert not re.search(r"Input should|Value error|Invalid value|integer|click|pydantic", said)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_value_is_told_in_one_line_that_shows_it(name):
    """Of every option: words, numbers without an end and numbers beyond any use, files that are not there."""
    for flag, each in flags(COMMANDS[name]).items():
        if getattr(each, "is_flag", False) or (each.is_eager and each.name == "help"):
            continue
        if each.type_descriptor.is_choice:
            refused(name, flag, "no-such-value")
        elif kind(each) is Path:
            if each.type_descriptor.parameter_info.exists:
                refused(name, flag, *WRONG[Path])
        else:
            for value in WRONG.get(kind(each), ()):
                refused(name, flag, value)
            if kind(each) is not None:
                refused(name, flag, "-1")


def test_an_option_without_its_value_and_a_flag_with_one(dsx):
    said = [dsx("check", "--gpus")[2], dsx("check", "--strict=yes")[2], dsx("estimate", "--zero")[2]]
    assert said == [
        "dsx: --gpus: it needs a value. Fix: write --gpus N.\n",
        "dsx: --strict: it takes no value. Fix: write --strict alone.\n",
        "dsx: --zero: it needs a value. Fix: write --zero STAGE.\n",
    ]
    assert 'Fix: write "--format"' in dsx("check", "--formt", "json")[2]
    assert dsx("guide", "tour", "more")[2].startswith("dsx: more: dsx guide takes no such word.")
    assert (
        dsx("estmate")[2]
        == 'dsx: estmate: there is no such command. Fix: write "estimate", if that is meant.\n'
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_no_types_and_has_examples_that_parse(tmp_path, monkeypatch, name):
    command = COMMANDS[name]
    said = command.get_help(typer.Context(command, info_name=name))
    described, examples = said.split("Examples:\n")
    assert not re.search(
        r"<(?!\w+(\|\w+)+>)|\[[^\]]*[<>]=|range|\{[A-Z]|<(int|float|str|path|file)", described
    )
    for path in ("train.json", "ds_config.json", "hostfile", "profile.json", "my_model/config.json"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("{}")
    for folder in ("runs/my_run/checkpoints/step100", "runs/my_run/traces", "runs/one", "runs/other"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/my_run/traces/step10.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    lines = examples.strip().splitlines()
    assert lines
    for line in lines:
        program, this, *words = shlex.split(line)
        assert (program, this) == ("dsx", name)
        command.make_context(name, words)  # or it raises


@pytest.mark.parametrize(
    "words", [["schema"], ["--help"], ["schema", "--help"], ["check", ZERO1, "--no-machine"]]
)
def test_a_full_disk_is_a_line_and_nobody_who_reads_is_none(words):
    command = [BIN / "dsx", *words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "dsx: standard output: No space left on device. Fix: make room, or send it elsewhere.\n"
    assert (done.returncode, done.stderr) == (2, said)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) in [(141, ""), (1, "")]  # click's, for --help
    closed = ["bash", "-c", 'exec "$@" >&- <&-', "bash", *command]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "otherwise"),
    [
        (["schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--output"], "a file in a folder"),
        (["init"], "a folder that can be written to"),
        (["islands", "keys"], "a folder that can be written"),
    ],
)
def test_a_full_disk_asks_for_room_and_keeps_nothing(words, otherwise, dsx, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        patched.setattr(Path, "write_bytes", full)
        code, out, err = dsx(*words, tmp_path / "new.svg", *["--islands=2"] * (words[0] == "islands"))
    assert (code, out) == (2, "")
    assert "No space left on device" in err
    assert f"Fix: make room on that disk, or name {otherwise}" in err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_full_disk_that_nobody_expects_is_a_line(dsx, monkeypatch):
    full = Mock(side_effect=OSError(errno.EDQUOT, "Disk quota exceeded", "cache/table"))
    monkeypatch.setattr("dsx.models.presets.presets", full)
    said = "dsx: cache/table: Disk quota exceeded. Fix: make room on that disk.\n"
    assert dsx("presets")[::2] == (2, said)
    full.side_effect = OSError(errno.EDQUOT, "Disk quota exceeded")
    code, _, err = dsx("presets")
    assert (code, "Traceback" in err, "error: Disk quota exceeded. Fix: make room" in err) == (2, True, True)


TINY = ["--cluster", "CPU", "--gpus", "2", "--top", "1"]


@pytest.mark.parametrize(
    ("former", "now"),
    [
        (
            ["check", ZERO1, "--no-machine", "--world-size", "2", "--json"],
            ["check", ZERO1, "--no-machine", "--gpus", "2", "--format", "json"],
        ),
        (["check", "--config", ZERO1, "--no-machine"], ["check", ZERO1, "--no-machine"]),
        (["estimate", f"--config={ZERO1}", "--world-size=2"], ["estimate", ZERO1, "--gpus=2"]),
        (["plan", "--config", ZERO1, *TINY, "--json"], ["plan", ZERO1, *TINY, "--format", "json"]),
        (["presets", "--json"], ["presets", "--format", "json"]),
        (
            ["schedule", "zbv", "--stages", "2", "--micro-batches", "4", "--json"],
            ["schedule", "zbv", "--stages", "2", "--micro-batches", "4", "--format", "json"],
        ),
    ],
)
def test_former_names_are_understood(dsx, former, now):
    code, out, err = dsx(*now)
    assert (code, err) == (0, "")
    assert dsx(*former) == (code, out, err)


def test_what_a_former_name_stands_for_is_what_an_error_names(dsx):
    code, _, err = dsx("check", ZERO1, "--world-size", "0")
    assert code == 2
    assert err.startswith("dsx: --gpus 0: ")


@pytest.mark.parametrize("path", ["/dev/null", "FIFO"])
def test_output_that_is_no_file_stays_what_it_is(dsx, tmp_path, path):
    if path == "FIFO":
        path = tmp_path / "pipe"
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    assert dsx("schedule", "zbv", "--stages", 2, "--micro-batches", 4, "--output", path)[0] == 0
    assert not Path(path).is_file()
    if path != "/dev/null":
        assert b"bubble" in os.read(reader, 1 << 20)
        os.close(reader)


def test_output_through_a_link_is_the_linked_file(dsx, tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    name = ("schedule", "zbv", "--stages", 2, "--micro-batches", 4)
    assert dsx(*name, "--output", tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert "bubble" in (tmp_path / "real").read_text()


def test_ctrl_c_is_130(tmp_path):
    """While it waits for its input, which is a pipe that nobody has written to yet."""
    pipe = tmp_path / "step.json"
    os.mkfifo(pipe)
    # Tests that run in the background of a shell have the signal ignored, and so would the command.
    process = subprocess.Popen(
        ["env", "--default-signal=INT", BIN / "dsx", "trace", pipe],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with pipe.open("wb"):  # opens when the command opens it
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


def test_completion_is_installed_and_completes(tmp_path):
    environment = {"HOME": str(tmp_path), "PATH": f"{BIN}:{os.environ['PATH']}"}
    # Not the last command of the shell, which would become dsx: it looks for the shell that it runs in.
    done = subprocess.run(
        ["bash", "-c", "dsx --install-completion; exit $?"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    script = tmp_path / ".bash_completions" / "dsx.sh"
    assert str(script) in (tmp_path / ".bashrc").read_text()
    function = re.search(r"-F (\w+) dsx", script.read_text())[1]
    ask = f"source {script}; COMP_WORDS=(dsx est); COMP_CWORD=1; {function} dsx; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["estimate"]


def test_schema_as_a_table_has_every_key(dsx, monkeypatch):
    assert max(map(len, dsx("schema", "--format", "table")[1].splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "1000")
    table = dsx("schema", "--format", "table")[1]
    rows = dict(line.split(maxsplit=1) for line in table.splitlines())
    schema = json.loads(dsx("schema")[1])
    assert set(rows) >= {f"dsx.{name}" for name in schema["properties"]}
    assert rows["dsx.train.steps"] == "Optimizer steps in all, those before a resume included."
