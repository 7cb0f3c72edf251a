"""What dsx/guides say is so: their commands run, in order, their configs load, their links lead somewhere."""

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

import pytest

import dsx
from often import often
from recipes.launching import free_port

ROOT = Path(__file__).parents[1]
GUIDES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "dsx/guides").glob("*.md")}
BIN = Path(sys.executable).parent

# What a test puts over a command's own settings: fewer and smaller steps.
SMALL = (
    "dsx.data.max_bytes=600000",
    "dsx.data.sequence_length=32",
    "dsx.train.eval_tokens=2048",
    "dsx.tracking.wandb.mode=disabled",
)
STEPS = {"dsx.train.steps=30": 3, "dsx.train.trace_steps=[5]": [2], "dsx.train.steps=35": 4}


def blocks(guide: str, language: str) -> list[str]:
    """Contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDES[guide], flags=re.MULTILINE | re.DOTALL)


def commands(guide: str) -> list[list[str]]:
    """The words of every command line of a guide's bash blocks, scripts left out."""
    lines = [
        line for block in blocks(guide, "bash") if not block.startswith("#!") for line in block.splitlines()
    ]
    return [shlex.split(line) for line in lines]


def run(words: list[str], folder: Path, *, seconds: float = 200, **environment: str) -> tuple[int, str]:
    """Exit code and output of a command as a reader would type it, in a folder with the project's.

    But on a port of its own: another worker's tests may be using the launcher's.
    """
    for name in ("recipes", "configs"):
        with suppress(FileExistsError):
            (folder / name).symlink_to(ROOT / name)
    command = words
    if words[0] == "dsx":
        command = [sys.executable, "-c", "from dsx.cli.app import main; main()", *words[1:]]
    elif words[0] in ("deepspeed", "torchrun") and "--master_port" not in words:
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


def shortened(words: list[str]) -> list[str]:
    """A recipe's command with fewer, smaller steps."""
    out = []
    for word in words:
        key = word.split("=", 1)[0]
        out.append(f"{key}={json.dumps(STEPS[word])}" if word in STEPS else word)
    for item in SMALL if any(word.endswith(("gpt_3d.py", "finetune.py")) for word in words) else ():
        out += ["--set", item]
    return out


def test_the_tour_from_its_first_command_to_its_last(tmp_path):
    said = {}
    for words in commands("tour.md"):
        kind = words[1] if words[0] in ("dsx", "python") else words[0]
        if kind == "plot":
            pytest.importorskip("matplotlib")
        command = [word.replace("trace/step5.", "trace/step2.") for word in shortened(words)]
        code, text = run(command, tmp_path)
        assert code == 0, f"{shlex.join(command)}\n{text}"
        said[kind] = text
    assert "pipeline 2 x data 2" in said["check"]
    assert re.search(r"resumed\s+after step 3", said["deepspeed"])
    assert "step 4/4" in said["deepspeed"]
    assert "def main(" in said["recipes/generate.py"]
    assert (tmp_path / "runs/tour/trace/step2.html").is_file()
    assert "equal" in said["verify"]


@pytest.mark.parametrize(
    "words",
    [
        words
        for guide in ("scaling.md", "checking.md", "launching.md")
        for words in commands(guide)
        if words[0] == "dsx" and words[1] != "verify"
    ],
    ids=shlex.join,
)
def test_commands_that_only_compute_run(words, tmp_path):
    code, text = run(words, tmp_path)
    # A model that does not fit one GPU is what the guide shows there.
    assert code == ("--gpus 1" in shlex.join(words)), text


def test_programs_of_the_data_guide_run():
    """Each block by itself; its assertions hold."""
    programs = [program for program in blocks("data.md", "python") if "MODEL_FOLDER" not in program]
    assert programs
    for program in programs:
        exec(compile(program, "data.md", "exec"), {})


@pytest.mark.parametrize("block", often((1, 0), every=2))
def test_a_model_of_ones_own_trains_alike_in_every_layout(block, tmp_path):
    """The second block of commands, which goes on from a checkpoint, in every run."""
    alone, losses = shlex.split("python recipes/own_model.py --steps 4"), []
    for words in [alone, *map(shlex.split, blocks("own_model.md", "bash")[block].splitlines())]:
        code, text = run(words, tmp_path)
        assert code == 0, text
        losses.append(re.findall(r"step (\d): loss ([\d.]+)", text))
    first, *others = losses
    others = [[*others[0], *others[1]]] if block == 1 else others
    assert [step for step, _ in first] == ["1", "2", "3", "4"]
    for found in others:
        assert [step for step, _ in found] == ["1", "2", "3", "4"]
        values = [float(loss) for _, loss in found]
        assert values == pytest.approx([float(loss) for _, loss in first], abs=2e-4)


def test_parts_of_a_model_of_ones_own_are_those_of_the_recipe():
    from dsx import nn as parallel

    list_of_layers, mixer = blocks("own_model.md", "python")
    assert mixer.split("x):\n")[1] in (ROOT / "recipes/own_model.py").read_text().replace(
        "y: Tensor =", "y ="
    )
    names = {"Block": parallel.LayerNorm}
    exec(compile(list_of_layers, "own_model.md", "exec"), names)
    assert len(names["layers"](parallel.TensorParallel())) == 16


@pytest.mark.slow
def test_the_8b_layout_trains_right(tmp_path):
    (words,) = [words for words in commands("scaling.md") if words[:2] == ["dsx", "verify"]]
    code, text = run(words, tmp_path)
    assert code == 0, text


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
    items = (*SMALL, "dsx.train.steps=1", "dsx.train.eval_every=0", f"dsx.train.output={output}")
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
    "srun": 'exec "$@"\n',
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
    (hostfile,) = blocks("launching.md", "text")
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
    (script,) = [block for block in blocks("launching.md", "bash") if block.startswith("#!")]
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
        SLURM_JOB_ID="7",
    )
    assert code == 0, text
    assert "step 1/1" in text


@pytest.mark.parametrize(
    ("guide", "block"),
    [(guide, block) for guide in sorted(GUIDES) for block in blocks(guide, "json") if '"dsx"' in block],
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
    config["dsx"]["train"] |= {"output": "runs/guide", "save_every": 10}
    config["dsx"]["data"].setdefault("tokenizer", "bytes")
    assert dsx.load_config(config, world_size=16).mesh.size == 16


def test_links_lead_somewhere():
    for text in GUIDES.values():
        links = re.findall(r"\]\((?!https?://)([^)#]+)\)", text)
        assert [link for link in links if not (ROOT / "dsx/guides" / link).exists()] == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {name for name in GUIDES if f"(dsx/guides/{name})" not in readme} == set()


@pytest.mark.parametrize(
    ("picture", "command"),
    [
        (
            "interleaved_zb.svg",
            "dsx schedule interleaved_zb --stages 4 --micro-batches 8 --format svg --output",
        ),
    ],
)
def test_pictures_are_those_that_the_commands_draw(picture, command, tmp_path):
    code, text = run([*shlex.split(command), "drawn.svg"], tmp_path)
    assert code == 0, text
    assert (tmp_path / "drawn.svg").read_text() == (ROOT / "dsx/guides/pictures" / picture).read_text()
