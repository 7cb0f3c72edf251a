"""Promises that the repository makes about itself and that no linter checks."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

import dsx
from loaded import HEAVY, loaded_by

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "configs",
    "constraints.txt",
    "docs",
    "dsx",
    "pyproject.toml",
    "recipes",
    "tests",
    "tools",
}
MADE_BY_TOOLS = {"build", "dist", "dsx.egg-info", "runs", "wandb"}

with (ROOT / "pyproject.toml").open("rb") as file:
    SETTINGS = tomllib.load(file)
PROJECT = SETTINGS["project"]


def modules(*parts):
    """Dotted names of the modules under these parts of dsx."""
    paths = [path for part in parts for path in (ROOT / "dsx" / part).rglob("*.py")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return sorted(name.removesuffix(".__init__") for name in names)


def test_top_level_names():
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - MADE_BY_TOOLS
    assert names - TOP_LEVEL == set()
    assert TOP_LEVEL - names <= {"tools"}


def test_modules_are_short_and_say_what_they_are():
    texts = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "dsx").rglob("*.py")}
    assert texts
    assert [path for path, text in texts.items() if len(text.splitlines()) >= 800] == []
    assert [path for path, text in texts.items() if not ast.get_docstring(ast.parse(text))] == []


def test_the_house_keeps_within_its_budget_of_lines():
    """What exceeds it deletes something else, or raises it and says in the CHANGELOG what that buys."""
    for folder, most in SETTINGS["tool"]["dsx"]["lines"].items():
        lines = sum(path.read_text().count("\n") for path in (ROOT / folder).rglob("*.py"))
        assert lines <= most, f"{folder} has {lines} lines; tool.dsx.lines in pyproject.toml allows {most}"


def test_importing_dsx_loads_nothing_heavy():
    assert not loaded_by("import dsx")[1] & HEAVY


def test_what_needs_no_tensors_loads_nothing_heavy():
    """Contracts see direct imports; this sees what is really loaded."""
    light = set(modules("models", "schedules", "parallel", "planner", "memory", "config", "doctor"))
    light -= {"dsx.models.families", "dsx.parallel.groups", "dsx.planner.profiler", "dsx.memory.watch"}
    light -= {"dsx.planner.own_layers"}
    light -= {
        f"dsx.memory.{name}"
        for name in ("layer_recorder", "layer_list", "module_gathers", "pictures", "record_request")
    } | {"dsx.memory.device", "dsx.memory.meter"}
    light |= {
        "dsx.verify.diagnosis",
        "dsx.verify.shrunk",
        "dsx.launch.differences",
        "dsx.launch.extension_locks",
        "dsx.train.progress",
    }
    light |= {f"dsx.fault_tolerance.{name}" for name in ("health", "waits")}
    assert not loaded_by("\n".join(f"import {name}" for name in sorted(light)))[1] & HEAVY


# Of dsx, by a recipe up to its first step, without what records layers that no cache knows yet.
MOST_MODULES = 161
RECORDING = {
    "hub",
    "hub.block_arguments",
    "hub.context",
    "hub.context_probe",
    "hub.late_mask",
    "hub.model_structure",
    "hub.on_meta",
    "hub.shrunk",
    "hub.state_passing",
    "hub.tensor_plan",
    "hub.top",
    "hub.values",
    "memory.module_gathers",
    "memory.device",
    "memory.layer_recorder",
    "memory.record_request",
}

FIRST_STEP = """
import os, runpy, sys
import dsx

def count(monitor, loss):
    print(*(name for name in sys.modules if name.partition(".")[0] == "dsx"), flush=True)
    os._exit(0)

dsx.recipe.Monitor.step = count
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_training_run_loads_what_it_needs(tmp_path):
    """No tool that looks at runs, no reader of other programs' checkpoints, no search, no doctor."""
    settings = (f"dsx.train.output={tmp_path}", "dsx.tracking.wandb.mode=disabled", "dsx.train.steps=1")
    settings += ("dsx.proof=off",)  # as where it has been proved before
    words = [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-c", FIRST_STEP, "recipes/gpt_3d.py", "configs/zero3.json", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = next(line for line in done.stdout.splitlines() if line.startswith("dsx ")).split()
    assert "dsx.engine.executor" in loaded
    assert len({*loaded} - {f"dsx.{name}" for name in RECORDING}) <= MOST_MODULES, loaded
    for idle in (
        "doctor",
        "planner.choose",
        "planner.profiler",
        "verify",
        "checkpoint.formats",
        "train.curves",
    ):
        assert [name for name in loaded if f"{name}.".startswith(f"dsx.{idle}.")] == []


def test_no_module_imports_in_a_circle():
    """Nor for its types, nor inside a function; but the root names what it loads on first use."""
    paths = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (ROOT / "dsx").rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    imports = {name: set() for name in paths}
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text())):
            named = set()
            if isinstance(node, ast.ImportFrom) and node.module:
                named = {f"{node.module}.{alias.name}" for alias in node.names}
                named = {each if each in paths else node.module for each in named}
            elif isinstance(node, ast.Import):
                named = {alias.name for alias in node.names}
            imports[name] |= named & set(paths) - {name, "dsx"}
    assert imports["dsx.engine.engine"] >= {"dsx.engine.executor", "dsx.checkpoint.run.saver"}
    while free := {name for name, others in imports.items() if not others}:
        imports = {name: others - free for name, others in imports.items() if name not in free}
    assert imports == {}


def test_the_product_needs_no_tricks_of_tests_and_frees_by_name():
    texts = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "dsx").rglob("*.py")}
    tricks = re.compile(r"unittest|\bdef __del__|\b_getframe\b")
    assert [path for path, text in texts.items() if tricks.search(text)] == []


def test_every_command_speaks_through_one_place():
    """Where what a terminal would obey is taken out (dsx/terminal.py)."""
    texts = {path.name: path.read_text() for path in (ROOT / "dsx" / "cli").glob("*.py")}
    assert [name for name, text in texts.items() if re.search(r"\becho\(|\bprint\(", text)] == ["output.py"]


def test_every_public_name_exists():
    missing = [name for name in dsx.__all__ if not hasattr(dsx, name)]
    assert missing == []
    assert set(dsx.__all__) <= set(dir(dsx))


def test_recipes_use_the_public_api_alone():
    """They are given to users, who copy them (dsx init)."""
    for path in (ROOT / "recipes").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = [node.module] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in named if name.startswith("dsx.")], path
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "dsx"
            ):
                assert node.attr in dsx.__all__, (path, node.attr)


def test_one_version_everywhere():
    assert PROJECT["dynamic"] == ["version"]  # read from dsx.__version__
    assert f"## [{dsx.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_pin_every_declared_package_within_its_range():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {re.sub(r"[-_.]+", "-", name).lower(): Version(version) for name, version in pins.items()}
    extras = [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
    for requirement in map(Requirement, PROJECT["dependencies"] + extras):
        if requirement.name != "dsx":
            assert pins[requirement.name] in requirement.specifier, requirement
    assert not [name for name, version in pins.items() if version.local]
