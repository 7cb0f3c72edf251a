"""What docs/guides say is so: commands run, in order, configs load, links lead somewhere."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import draw_context
import pytest

import dsx
from fresh_shell import AFTER_THE_README, FIRST, Shell, blocks, change_configs, clone, install
from recipes.launching import free_port

ROOT = Path(__file__).parents[1]
GUIDES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs/guides").glob("*.md")}
BIN = Path(sys.executable).parent

# What is less in the copy that the tests paste into, so that the commands stay as they are.
SMALL = {"dsx.data.max_bytes": 600_000, "dsx.data.sequence_length": 32, "dsx.train.eval_tokens": 2048}
SMALL |= {"dsx.tracking.wandb.mode": "disabled"}
# Of commands that are there twice, or train long, these are pasted by the slow tests.
LONG = {
    "own_model.md": ("deepspeed", "torchrun --nproc_per_node 4"),
    "scaling.md": (
        "dsx verify",
        "dsx estimate --model",  # that of the config is pasted
        "dsx plan configs/llama3_70b_64gpu.json",
    ),
    "tour.md": (
        "dsx verify",
        # The second half, a model of transformers, is that of tests/hub.
        "python -c",
        "dsx models",
        "deepspeed --num_accelerators 4 recipes/gpt_3d.py configs/zero1.json",
    ),
    "checking.md": ("dsx verify",),
    "data.md": ("deepspeed",),
    "islands.md": ("torchrun --standalone", "dsx inspect", "dsx estimate"),
    "methods.md": ("",),  # all of it: tests/test_methods.py runs its commands
}
# A program that the commands after it run.
SAVED = r"Saved as `([\w.]+)`:\n\n```python\n(.*?)^```$"
# Commands for machines that are not here have tests of their own, with stand-ins.
ELSEWHERE = re.compile(r"node1|--hostfile")


def lines(guide: str) -> list[str]:
    """Every command line of a guide's bash blocks, scripts left out."""
    kept = [block for block in blocks(GUIDES[guide]) if not block.startswith("#!")]
    return [line for block in kept for line in block.splitlines()]


def commands(guide: str) -> list[list[str]]:
    """Their words."""
    return [shlex.split(line) for line in lines(guide)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with the environment of the README's first command, and smaller configs."""
    folder = clone(tmp_path_factory.mktemp("clone") / "dsx")
    install(folder)
    change_configs(folder, SMALL)
    return folder


def paste(guide: str, project: Path, folder: Path, *, whole: bool = False) -> tuple[dict[str, str], Path]:
    """A guide's bash blocks, one after another, in a shell and a copy of the project of its own.

    Every command must end well, but for the estimate of what does not fit, as the guide says there.

    Args:
        guide: Its file's name.
        project: What is copied.
        folder: Where to.
        whole: Nothing is left out as ``LONG``.

    Returns:
        What each command line printed, and the folder they ran in.
    """
    here = clone(folder / "dsx", of=project)
    (here / ".venv").symlink_to(project / ".venv")
    if guide == "data.md":
        change_configs(here, {"dsx.data.max_bytes": None})  # of no meaning for data of one's own
    for name, text in re.findall(SAVED, GUIDES[guide], flags=re.MULTILINE | re.DOTALL):
        (here / name).write_text(text)
    programs = [text for text in blocks(GUIDES[guide], "python") if "assert " in text]
    for at, text in enumerate(programs):
        (here / f"program{at}.py").write_text(text)
    said = {}
    with Shell(here, folder / "home") as shell:
        assert [one.code for one in shell.paste(FIRST)] == [0]
        for block in [*blocks(GUIDES[guide]), *(f"python program{at}.py" for at in range(len(programs)))]:
            if block.startswith("#!"):
                continue
            pasted = [
                line for line in block.splitlines() if whole or not line.startswith(LONG.get(guide, ()))
            ]
            pasted = [line for line in pasted if not ELSEWHERE.search(line)]
            for line, one in zip(pasted, shell.paste("\n".join(pasted)) if pasted else (), strict=True):
                assert one.code == ("--gpus 1 " in line), f"{line}\n{one.text}"
                said[line] = one.text
    return said, here


def the(said: dict[str, str], start: str) -> str:
    """What the one command that begins so printed."""
    (text,) = [text for line, text in said.items() if line.startswith(start)]
    return text


def is_the_tour(said: dict[str, str], here: Path) -> None:
    assert "pipeline 2 x data 2" in the(said, "dsx check")
    assert re.search(
        r"^step +30/30 ",
        the(said, "dsx train configs/zero3.json --gpus 4"),
        re.MULTILINE,
    )
    goes_on = the(said, "deepspeed --num_accelerators 2")
    assert re.search(r"resumed\s+after step 30", goes_on)
    assert re.findall(r"^step +(\d+)/35", goes_on, re.MULTILINE)[0] == "31"
    assert the(said, "python recipes/generate.py").startswith("def main(")
    assert (here / "runs/tour/trace/step5.html").is_file()
    assert "equal, bit for bit" in the(said, "dsx diff")
    if "dsx models runs/olmo2" not in said:
        return
    assert "equal" in the(said, "dsx verify")
    assert "every gradient are those of transformers" in the(said, "dsx models runs/olmo2")
    assert "Olmo2ForCausalLM(" in the(said, 'python -c "from transformers import AutoModelForCausalLM')


def is_one_model_in_every_layout(said: dict[str, str], here: Path) -> None:
    """The last command goes on from the checkpoint of the one before."""
    losses = {
        line: re.findall(r"step (\d): loss ([\d.]+)", text) for line, text in said.items() if ".py --" in line
    }
    last = [line for line in losses if "--output" in line]
    losses["its checkpoint"] = [pair for line in last for pair in losses.pop(line)]
    first = losses["python recipes/own_model.py --steps 4"]
    for line, found in losses.items():
        assert [step for step, _ in found] == ["1", "2", "3", "4"], line
        values = [float(loss) for _, loss in found]
        assert values == pytest.approx([float(loss) for _, loss in first], abs=2e-4), line


def is_what_a_reader_sees(said: dict[str, str], here: Path) -> None:
    """The findings that are shown, of the config that is shown, and the documentation of a key."""
    (config,) = blocks(GUIDES["checking.md"], "json")
    (shown,) = [text for text in blocks(GUIDES["checking.md"], "text") if text.startswith("$ ")]
    command, _, expected = shown.removeprefix("$ ").partition("\n")
    (here / "ds_config.json").write_text(config)
    with Shell(here, here.parent / "home") as shell:
        _, found = shell.paste(f"{FIRST}\n{command}")
    assert (found.code, found.text) == (1, expected)
    assert "stage3_prefetch_bucket_size" in the(said, "dsx check --explain prefetch")
    assert "total_num_steps" in the(said, "dsx check --explain WarmupCosineLR")


def is_two_islands(said: dict[str, str], here: Path) -> None:
    assert "islands    2 of 2 ranks each" in the(said, "dsx check")
    trained = the(said, "torchrun --nproc_per_node 2 recipes/gpt_3d.py")
    assert re.search(r"this is island 0 of 2, .*, a round every 10 steps, sent as fp32", trained)
    assert re.findall(r"\| round (\d): 2 islands, drift", trained) == ["1", "2"]
    assert (here / "runs/islands-hf/config.json").is_file()
    told = the(said, "torchrun --nproc_per_node 2 islands.py")  # by two processes, at times on one line
    rounds = re.findall(r"island (\d), step (\d+): .*?, round (\d), drift", told)
    assert sorted(rounds) == [("0", "10", "2"), ("0", "5", "1"), ("1", "10", "2"), ("1", "5", "1")]
    apart = [text for line, text in said.items() if line.startswith("torchrun --standalone")]
    if apart:  # with the rest of what takes long
        assert "outer_momentum" in the(said, "dsx inspect")
        assert "outer error" in the(said, "dsx estimate")
        assert all(re.search(r"\| round 4: 2 islands", text) for text in (*apart[1:], log(here)))


def log(here: Path) -> str:
    """What the island in the background has printed."""
    return (here / "island1.log").read_text()


SHOWN = {
    "islands.md": is_two_islands,
    "tour.md": is_the_tour,
    "own_model.md": is_one_model_in_every_layout,
    "checking.md": is_what_a_reader_sees,
}


PASTED = sorted({name for name in GUIDES if lines(name)} - {*AFTER_THE_README, "methods.md"})
SLOWEST = {"islands.md", "long_sequences.md", "own_model.md", "scaling.md", "tour.md"}


@pytest.mark.parametrize(
    "guide", [pytest.param(each, marks=pytest.mark.slow) if each in SLOWEST else each for each in PASTED]
)
def test_a_guide_pasted_into_a_fresh_shell(guide, project, tmp_path):
    """Every block ends well, and gives what the guide says of it."""
    said, here = paste(guide, project, tmp_path)
    assert said
    if guide in SHOWN:
        SHOWN[guide](said, here)


@pytest.mark.slow
@pytest.mark.parametrize("guide", sorted(LONG))
def test_the_whole_guide_pasted_into_a_fresh_shell(guide, project, tmp_path):
    said, here = paste(guide, project, tmp_path, whole=True)
    if guide in SHOWN:
        SHOWN[guide](said, here)


@pytest.mark.parametrize("name", ["parts", "methods"])
def test_pictures_of_the_axis_are_drawn_of_what_trains(name):
    drawn = getattr(draw_context, name)().svg()
    assert drawn == (ROOT / f"docs/guides/pictures/context_{name}.svg").read_text(encoding="utf-8")


def run(words: list[str], folder: Path, *, seconds: float = 200, **environment: str) -> tuple[int, str]:
    """Exit code and output of a command as a reader would type it, in a folder with the project's.

    But on a port of its own: another worker's tests may be using the launcher's.
    """
    for name in ("recipes", "configs"):
        with suppress(FileExistsError):
            (folder / name).symlink_to(ROOT / name)
    command = words
    if words[0] in ("deepspeed", "torchrun") and "--master_port" not in words:
        command = [words[0], "--master_port", str(free_port()), *words[1:]]
    environ = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_parts_of_a_model_of_ones_own_are_those_of_the_recipe():
    from dsx import nn as parallel

    list_of_layers, mixer, *_ = blocks(GUIDES["own_model.md"], "python")
    assert mixer.split("x):\n")[1] in (ROOT / "recipes/own_model.py").read_text().replace(
        "y: Tensor =", "y ="
    )
    names = {"Block": parallel.LayerNorm}
    exec(compile(list_of_layers, "own_model.md", "exec"), names)
    assert len(names["layers"](parallel.TensorParallel())) == 16


def test_verify_commands_are_those_that_run():
    """That of checking.md is the tour's."""
    (words,) = [words for words in commands("checking.md") if words[1] == "verify"]
    assert words in commands("tour.md")


def launches() -> list[list[str]]:
    """Commands of launching.md that start recipes, without a leading variable."""
    every = [[word for word in words if not word.startswith("TORCH_")] for words in commands("launching.md")]
    return [words for words in every if words[0] != "dsx"]


def test_recipes_on_several_machines_name_files_and_keys_that_exist():
    for words in launches():
        given = [value for flag, value in itertools.pairwise(words) if flag == "--set"]
        path = ROOT / next(word for word in words if word.endswith(".json"))
        assert (ROOT / "recipes/gpt_3d.py").is_file()
        assert dsx.load_config(path, world_size=16, overrides=given).mesh.size == 16


def tiny(words: list[str], output: Path) -> list[str]:
    """On this machine, one rank for each, with a small model."""
    changes = {"configs/llama3_8b_8gpu.json": "configs/zero1.json", "node1": "127.0.0.1"}
    words = [changes.get(word, word) for word in words]
    items = (
        *(f"{key}={value}" for key, value in SMALL.items()),
        "dsx.train.steps=1",
        "dsx.train.eval_every=0",
        f"dsx.train.output={output}",
    )
    return words + [word for item in items for word in ("--set", item)]


# What these programs do, for machines that are all this one.
STAND_INS = {
    "ssh": """while [[ $1 == -* ]]; do shift 2; done
shift
exec "$@"
""",
    "pdsh": """while [[ $1 == -* ]]; do
  case $1 in -S) shift ;; -w) hosts=$2; shift 2 ;; *) shift 2 ;; esac
done
n=0 code=0
for host in ${hosts//,/ }; do bash -c "${*//%n/$n}" & n=$((n + 1)); done
for job in $(jobs -p); do wait "$job" || code=$?; done
exit $code
""",
    "scontrol": "echo localhost\n",
    "srun": 'shift 2  # --cpus-per-task N\nexec "$@"\n',
}


def path_with_stand_ins(folder: Path) -> str:
    """A PATH on which the stand-ins come first."""
    folder.mkdir()
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}")
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), str(BIN), os.environ["PATH"]])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--no_ssh", "ssh"])
def test_two_machines_of_a_hostfile(tmp_path, how):
    """127.0.0.1 and localhost take their places; without ssh both commands are given, at once."""
    commands = [
        words for words in launches() if "--hostfile" in words and ("--no_ssh" in words) == (how != "ssh")
    ]
    ranks = [command[command.index("--node_rank") + 1] for command in commands if "--node_rank" in command]
    assert ranks == ([] if how == "ssh" else ["0", "1"])
    (hostfile,) = blocks(GUIDES["launching.md"], "text")
    for name, here in {"node1": "127.0.0.1", "node2": "localhost", "slots=8": "slots=1"}.items():
        hostfile = hostfile.replace(name, here)
    port = ["--master_port", str(free_port())]
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "hostfile").write_text(hostfile)
    path = path_with_stand_ins(tmp_path / "bin")
    with ThreadPoolExecutor() as pool:
        ends = [
            pool.submit(run, [command[0], *port, *tiny(command[1:], tmp_path / "out")], folder, PATH=path)
            for command in commands
        ]
        codes, said = zip(*(end.result() for end in ends), strict=True)
    assert set(codes) == {0}, "\n".join(said)
    assert "layout    2 x CPU: pipeline 1 x data 2 x tensor 1" in said[0]


@pytest.mark.slow
def test_the_slurm_script_starts_torchrun(tmp_path):
    """With stand-ins for Slurm's commands on one machine."""
    (script,) = [block for block in blocks(GUIDES["launching.md"], "bash") if block.startswith("#!")]
    script = script.replace("--nproc_per_node 8", "--nproc_per_node 1").replace(":29500", f":{free_port()}")
    *rest, last = script.strip().splitlines()
    added = shlex.join(tiny([], tmp_path / "out"))
    (tmp_path / "job.sh").write_text("\n".join([*rest, f"{last.replace('llama3_8b_8gpu', 'zero1')} {added}"]))
    code, text = run(
        ["bash", str(tmp_path / "job.sh")],
        tmp_path,
        PATH=path_with_stand_ins(tmp_path / "bin"),
        SLURM_JOB_NODELIST="node1",
        SLURM_NNODES="1",
        SLURM_CPUS_PER_TASK="1",
        SLURM_JOB_ID="7",
    )
    assert code == 0, text
    assert "step 1/1" in text


@pytest.mark.parametrize(
    ("guide", "block"),
    [
        (guide, block)
        for guide in sorted(GUIDES.keys() - {*AFTER_THE_README})
        for block in blocks(GUIDES[guide], "json")
        if '"dsx"' in block
    ],
    ids=lambda value: value if value.endswith(".md") else "",
)
def test_blocks_of_config_are_right(guide, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web").mkdir()
    (tmp_path / "web/a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "code").mkdir()
    config = json.loads((ROOT / "configs/llama3_8b_elastic.json").read_text())
    for key, value in json.loads(block)["dsx"].items():
        own = config["dsx"].get(key)
        config["dsx"][key] = {**own, **value} if isinstance(own, dict) and key != "data" else value
    if "outer" in config["dsx"]:
        del config["dsx"]["elastic"]  # which islands cannot have
    config["dsx"]["train"] |= {"output": "runs/guide", "save_every": 10}
    config["dsx"]["data"].setdefault("tokenizer", "bytes")
    assert dsx.load_config(config, world_size=16).mesh.size == 16


def test_links_lead_somewhere():
    for text in GUIDES.values():
        links = re.findall(r"\]\((?!https?://)([^)#]+)\)", text)
        assert [link for link in links if not (ROOT / "docs/guides" / link).exists()] == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {name for name in GUIDES if f"(docs/guides/{name})" not in readme} == set()


@pytest.mark.parametrize(
    ("picture", "schedule"),
    {
        "naive.svg": "1f1b --stages 4 --micro-batches 1",
        "gpipe.svg": "gpipe --stages 4 --micro-batches 8",
        "1f1b.svg": "1f1b --stages 4 --micro-batches 8",
        "interleaved.svg": "interleaved --stages 4 --micro-batches 8",
        "zb_h1.svg": "zb_h1 --stages 4 --micro-batches 8",
        "zbv.svg": "zbv --stages 4 --micro-batches 8",
        "v_half.svg": "v_half --stages 4 --micro-batches 8",
        "v_min.svg": "v_min --stages 4 --micro-batches 8",
        "interleaved_zb.svg": "interleaved_zb --stages 4 --micro-batches 8",
    }.items(),
)
def test_pictures_are_those_that_the_commands_draw(picture, schedule, tmp_path, dsx):
    drawn = tmp_path / "drawn.svg"
    code, _, said = dsx("schedule", *shlex.split(schedule), "--format", "svg", "--output", drawn)
    assert code == 0, said
    assert drawn.read_text() == (ROOT / "docs/guides/pictures" / picture).read_text()
