"""docs/guides/extending.md is true: its blocks, applied to a copy of dsx, give what the page promises."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from fresh_shell import blocks, clone
from model_folder import write_model_folder
from recipes.launching import free_port

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/guides/extending.md").read_text(encoding="utf-8")
METHODS = (ROOT / "docs/guides/methods.md").read_text(encoding="utf-8")
# But for an axis, which has no blocks here.
MOST_FILES = 3


def section(title: str) -> str:
    return re.split(r"^## ", TEXT.split(f"\n## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@dataclass(frozen=True)
class Extended:
    """A copy of dsx with the blocks of one section applied."""

    folder: Path
    section: str

    def run(self, *words: str | Path, code: int = 0, seconds: float = 200) -> str:
        """What a command prints in the copy, which is the dsx that it imports."""
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env={
                "PYTHONPATH": str(self.folder),
                "PATH": str(Path(sys.executable).parent),
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def dsx(self, *words: str | Path, code: int = 0) -> str:
        return self.run("-c", "from dsx.cli.app import main; main()", *words, code=code)

    def train(self, ranks: int, *words: str | Path) -> str:
        """As torchrun starts a recipe."""
        launch = (
            "-m",
            "torch.distributed.run",
            "--master_port",
            str(free_port()),
            "--nproc_per_node",
            str(ranks),
        )
        return self.run(*launch, *words)


def extended(title: str, folder: Path) -> Extended:
    """The project's copy with a section's new files and changes, which are few."""
    text = section(title)
    project = clone(folder / "dsx")
    changed = set()
    for block in blocks(text, "python"):
        (name,) = re.findall(r"\A# (dsx/\S+\.py)\n", block)
        assert not (project / name).exists(), name
        (project / name).write_text(block.split("\n", 1)[1], encoding="utf-8")
        changed.add(name)
    for block in blocks(text, "diff"):
        changed |= change(project, block)
    assert 0 < len(changed) <= MOST_FILES, changed
    lint = ["ruff", "check", "--no-cache", *sorted(name for name in changed if name.endswith(".py"))]
    done = subprocess.run(
        [sys.executable, "-m", *lint], cwd=project, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return Extended(project, text)


def change(project: Path, diff: str) -> set[str]:
    """Apply a diff whose hunks say no line numbers: what a hunk replaces stands once in its file.

    A hunk's last line may be the beginning of a longer one.
    """
    changed = set()
    for part in re.split(r"^--- a/", diff, flags=re.MULTILINE)[1:]:
        header, *hunks = re.split(r"^@@\n", part, flags=re.MULTILINE)
        name, other = re.findall(r"\A(\S+)\n\+\+\+ b/(\S+)\n\Z", header)[0]
        assert name == other
        text = (project / name).read_text(encoding="utf-8")
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            assert {line[0] for line in lines} <= {" ", "-", "+"}
            before, after = (
                "".join(line[1:] for line in lines if line[0] != left_out).removesuffix("\n")
                for left_out in "+-"
            )
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        (project / name).write_text(text, encoding="utf-8")
        changed.add(name)
    return changed


def losses(printed: str) -> list[tuple[str, str]]:
    return re.findall(r"^step (\d)/4 \| loss +([\d.]+)", printed, re.MULTILINE)


def test_a_family(tmp_path):
    """It trains as its model of transformers does, tensor by tensor, and its memory is estimated."""
    copy = extended("A family of models", tmp_path)
    verify, estimate = blocks(copy.section, "text")[0].splitlines()
    said = copy.dsx(*verify.split()[1:])
    assert "reference  transformers StableLmForCausalLM, one process" in said
    assert "\nequal      losses, norms, gradients and updates are those of one process\n" in said
    assert copy.dsx(*estimate.split()[1:]).startswith("stablelm, 872k parameters on 4 ranks")


@pytest.mark.slow
def test_a_schedule(tmp_path):
    """It is drawn, proved and trains to the losses of every other one."""
    copy = extended("A schedule", tmp_path)
    commands, peaks = blocks(copy.section, "text")
    draw, trained = commands.splitlines()
    assert peaks in copy.dsx(*draw.split()[1:])
    expected = blocks(METHODS, "text")[0]
    words = trained.split()[3:]
    printed = copy.train(2, *words, "--set", f"dsx.train.output={tmp_path / 'run'}")
    assert "pipeline 2" in printed
    assert losses(printed) == losses(expected)
    assert len(losses(printed)) == 4


def test_a_format(tmp_path):
    """Weights go there and back bit by bit, and numpy reads what lies between."""
    copy = extended("A checkpoint format", tmp_path)
    write_model_folder(copy.folder / "MODEL_FOLDER")
    for command in blocks(copy.section, "text")[0].splitlines():
        said = copy.dsx(*command.split()[1:])
        assert "diff" not in command or "equal, bit for bit" in said
    with safe_open(copy.folder / "MODEL_FOLDER/model.safetensors", framework="np") as model:
        names = set(model.keys())
        assert {path.stem for path in (copy.folder / "arrays").glob("*.npy")} == names
        for name in names:
            array = np.load(copy.folder / "arrays" / f"{name}.npy")
            assert np.array_equal(array, model.get_tensor(name)), name


def test_a_check(tmp_path):
    """It says what the page shows, of a config that nothing was said of before."""
    copy = extended("A check of configs", tmp_path)
    command, said = blocks(copy.section, "text")[0].split("\n", 1)
    (copy.folder / "ds_config.json").write_text('{"train_batch_size": 8, "gradient_clipping": 1000}')
    assert said in copy.dsx(*command.removeprefix("$ ").split()[1:])
