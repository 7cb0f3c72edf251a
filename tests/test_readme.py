"""What README.md says is so: its commands run, its tables are true, its paths exist.

The two install commands are run by .ci/run, on a clean copy.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import dsx
import ranks
from recipes.launching import free_port

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
ZERO3 = ROOT / "configs" / "zero3.json"
SMALL = ("dsx.data.max_bytes=2000000", "dsx.data.sequence_length=32", "dsx.train.eval_tokens=2048")


def section(title: str) -> str:
    """Text under a ``## title``, up to the next one."""
    return re.split(r"^## ", TEXT.split(f"\n## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def blocks(language: str, text: str = TEXT) -> list[str]:
    """Contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def rows(title: str, header: str) -> list[list[str]]:
    """Cells of the table under ``## title`` whose header line starts with ``header``."""
    lines = iter(section(title).splitlines())
    for line in lines:
        if line.startswith(header):
            break
    next(lines)
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    assert table, (title, header)
    return table


def commands(word: str) -> list[list[str]]:
    """The words of every command line of the bash blocks that starts with ``word``."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(f"{word} ")]


def overrides(command: list[str]) -> list[str]:
    return [value for flag, value in itertools.pairwise(command) if flag == "--set"]


def only_block(title: str) -> str:
    (block,) = blocks("bash", section(title))
    return block


def test_the_two_commands_are_one_line_each():
    """.ci/run pastes the second; the first is run, in its own folder, by whoever reads it."""
    install = "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e"
    assert only_block("Run the tests") == f"{install} '.[dev]' && .venv/bin/pytest\n"
    activated = "python3 -m venv .venv && source .venv/bin/activate && pip install -c constraints.txt -e"
    assert only_block("Run it").startswith(f"{activated} '.[plot]' && deepspeed ")
    assert only_block("Run it").count("\n") == 1


@pytest.fixture(scope="module")
def first_run(tmp_path_factory) -> tuple[Path, str]:
    """The command under "Run it", after its installation and with few, small steps: (folder, output).

    On a port of its own: another worker's tests may be using the launcher's.
    """
    folder = tmp_path_factory.mktemp("run")
    command = shlex.split(only_block("Run it").rsplit("&&", 1)[1])
    for item in (*SMALL, "dsx.train.steps=3"):
        command += ["--set", item]
    assert command[0] == "deepspeed"
    command[1:1] = ["--master_port", str(free_port())]
    for name in ("recipes", "configs"):
        (folder / name).symlink_to(ROOT / name)
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PATH": search, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_the_first_command_prints_what_the_readme_shows(first_run):
    """The same lines, with other numbers."""
    printed = first_run[1]
    shown, *_ = blocks("text", section("Run it"))
    labels = [line.split("  ")[1] for line in shown.splitlines() if line.startswith("  ")]
    assert len(labels) > 8
    assert [label for label in labels if f"\n  {label}  " not in printed] == []
    for start in ("step ", "eval "):
        expected, seen = (
            {shape(line) for line in text.splitlines() if line.startswith(start)} for text in (shown, printed)
        )
        assert expected
        assert seen == expected


def shape(line: str) -> str:
    """A console line without its numbers."""
    line = re.sub(r"\d[\d.]*(e[+-]\d+)?[kM]?", "#", re.sub(r" +", " ", line))
    return re.sub(r"# (h # min|min # s|ms|s)\b", "# s", line)


def test_the_plot_command_draws_the_first_run(first_run, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    from dsx.cli.app import main

    (command,) = [words for words in commands("dsx") if words[1] == "plot"]
    monkeypatch.chdir(first_run[0])
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert Path(capsys.readouterr().out.strip()).is_file()


@pytest.mark.parametrize("command", [words for words in commands("dsx") if words[1] != "plot"], ids=" ".join)
def test_dsx_commands_run(command, monkeypatch, capsys):
    from dsx.cli.app import main

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out


def test_every_dsx_command_is_listed():
    from dsx.cli.app import build

    listed = [re.match(r"`dsx (\w+)", cells[0]).group(1) for cells in rows("The dsx command", "| command")]
    assert sorted(listed) == sorted(command.callback.__name__ for command in build().registered_commands)


def is_generation(command: list[str]) -> bool:
    return "recipes/generate.py" in command


@pytest.mark.parametrize("command", list(filter(is_generation, commands("python"))), ids=" ".join)
def test_generation_commands_run(first_run, command):
    """On the checkpoint of the first command."""
    done = subprocess.run(
        [sys.executable, *command[1:], "--tokens", "3"],
        cwd=first_run[0],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(command[command.index("--prompt") + 1])


@pytest.mark.parametrize(
    "command",
    [
        words
        for launcher in ("deepspeed", "torchrun", "python")
        for words in commands(launcher)
        if not is_generation(words)
    ],
    ids=" ".join,
)
def test_recipe_commands_name_files_and_keys_that_exist(command, tmp_path):
    """Resolved for the ranks that they start; the recipes themselves run in tests/recipes."""
    ranks_flag = {"deepspeed": "--num_accelerators", "torchrun": "--nproc_per_node"}.get(command[0])
    world_size = int(command[command.index(ranks_flag) + 1]) if ranks_flag else 1
    assert (ROOT / next(word for word in command if word.endswith(".py"))).is_file()
    given = overrides(command)
    if any("MODEL_FOLDER" in item for item in given):
        (tmp_path / "config.json").write_text(json.dumps(preset("llama", "tiny")))
        given = [item.replace("MODEL_FOLDER", str(tmp_path)) for item in given]
        given += ["dsx.model.weights=random", "dsx.data.tokenizer=bytes"]
    given = [re.sub(r"(resume=)runs/.*", rf"\1{tmp_path}", item) for item in given]
    path = ROOT / next(word for word in command if word.endswith(".json"))
    config = dsx.load_config(path, world_size=world_size, overrides=given)
    assert config.mesh.size == world_size


def preset(family: str, name: str) -> dict[str, object]:
    from dsx.config.presets import find_preset

    return dict(find_preset(family, name).config)


def test_the_annotated_json_is_a_config(tmp_path):
    (block,) = blocks("json", section("The one JSON"))
    (tmp_path / "ds.json").write_text(block)
    config = dsx.load_config(tmp_path / "ds.json", world_size=8)
    shipped = dsx.load_config(ZERO3, world_size=8)
    assert config.mesh == shipped.mesh
    assert config.global_batch_size == shipped.global_batch_size
    more = {"partition", "recompute", "zero", "profile", "profile_micro_batches"}
    more |= {"memory_check", "optimizer_bytes", "faults", "elastic"}
    blocks_shown = set(json.loads(ZERO3.read_text())["dsx"]) | more
    assert config.dsx.model_fields_set == blocks_shown == set(type(config.dsx).model_fields)


def test_the_cluster_is_one(tmp_path):
    from dsx.config.plan_cluster import read_cluster

    (block,) = blocks("json", section("Choosing a layout"))
    path = tmp_path / "cluster.json"
    path.write_text(block)
    assert read_cluster(str(path)).nodes == 16


def test_what_auto_becomes():
    for cells in rows("The one JSON", "| ranks"):
        world_size, tp, pp, dp, chunks = map(int, cells)
        config = dsx.load_config(ZERO3, world_size=world_size, overrides=["train_batch_size=32"])
        assert (config.mesh.tp, config.mesh.pp, config.mesh.dp, config.chunks) == (tp, pp, dp, chunks)


@pytest.mark.parametrize("cells", rows("What runs", "| config"), ids=lambda cells: cells[0])
def test_what_is_refused_is_refused_for_that(cells):
    fragment = json.loads("{" + cells[0].strip("`") + "}")
    (key,) = fragment
    with pytest.raises(dsx.DsxError) as refused:
        dsx.load_config(json.loads(ZERO3.read_text()) | fragment, world_size=8)
    assert key in str(refused.value)
    for instead in re.findall(r"`(dsx\.\w+)", cells[1]):
        assert instead in str(refused.value)


def counted(rank: int, world_size: int, zero: int, micro_batches: int) -> dict[str, float]:
    """What one step moves over data parallelism, in units of the pipeline rank's parameters."""
    import torch.distributed as dist

    from parity import dsx_run

    sizes: dict[str, int] = {}
    group: list[object] = []

    def count(name: str) -> None:
        original = getattr(dist, name)

        def call(*args, **kwargs):
            if group and kwargs.get("group") is group[0]:
                tensors = [t for t in (*args, *kwargs.values()) if hasattr(t, "numel")]
                sizes[name] = sizes.get(name, 0) + max(t.numel() for t in tensors)
            return original(*args, **kwargs)

        setattr(dist, name, call)

    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        count(name)
    # DeepSpeed would otherwise have kept the functions as they were.
    backend = importlib.import_module("deepspeed.comm.torch").TorchBackend
    backend.get_all_gather_function = classmethod(lambda _: dist.all_gather_into_tensor)
    backend.get_reduce_scatter_function = classmethod(lambda _: dist.reduce_scatter_tensor)
    caches = ("param_persistence_threshold", "max_reuse_distance", "prefetch_bucket_size")
    keys = tuple((f"stage3_{name}", 0) for name in caches) if zero == 3 else ()
    case = dsx_run.Case(pp=2, dp=2, zero=zero, accumulation=micro_batches, zero_keys=keys)
    engine, _ = dsx_run.build(case, None)
    for step in range(2):
        engine.train_batch(dsx_run.batches(case, step, engine.groups.dp_rank))
    group.append(engine.groups.data)
    engine.train_batch(dsx_run.batches(case, 2, engine.groups.dp_rank))
    held = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    return {name: size / held for name, size in sizes.items()}


@pytest.mark.parametrize(
    "cells", rows("What ZeRO-2 and ZeRO-3 cost under a pipeline", "| ZeRO"), ids=lambda c: c[0]
)
def test_what_each_stage_communicates(cells):
    micro_batches = 8
    zero, said = int(cells[0]), f"{cells[1]}; {cells[2]}"
    names = {"all-reduced": "all_reduce", "reduce-scattered": "reduce_scatter_tensor"}
    names["gathered"] = "all_gather_into_tensor"
    expected = {}
    for times, how in re.findall(r"(1|2 m|m) ([\w-]+)", said):
        expected[names[how]] = {"1": 1, "m": micro_batches, "2 m": 2 * micro_batches}[times]
    assert sum(expected.values()) == int(cells[3])
    for sizes in ranks.run(counted, 4, zero, micro_batches):
        for name in names.values():
            assert sizes.get(name, 0) == pytest.approx(expected.get(name, 0), abs=0.05), name


@pytest.mark.parametrize("cells", rows("Pipeline schedules", "| schedule"), ids=lambda c: c[0])
def test_what_each_schedule_costs(cells):
    from dsx.plan.builders import build, default_chunks, divides_backward
    from dsx.plan.simulate import simulate
    from dsx.plan.validate import peak_activations

    name, chunks, bubble, peak, backward = cells
    schedule = build(name, 4, int(chunks), 8)
    assert default_chunks(name) == int(chunks)
    assert f"{simulate(schedule).bubble:.1%}" == bubble
    assert max(peak_activations(schedule)) == float(peak) * int(chunks)
    assert backward == ("split" if divides_backward(name) else "whole")


def test_every_schedule_is_in_the_table():
    from dsx.plan.builders import NAMES

    assert {cells[0] for cells in rows("Pipeline schedules", "| schedule")} == set(NAMES)


def losses(rank: int, world_size: int, program: str) -> list[float]:
    """What the README's program prints, as numbers."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    return [float(value) for value in re.findall(r"loss ([\d.]+)", printed.getvalue())]


def test_a_stock_program_moves_by_its_imports():
    (program,) = blocks("python")
    stock, changed = re.subn(r"^from dsx import \w+  # was: (.*)$", r"\1", program, flags=re.MULTILINE)
    assert changed == 2
    assert "dsx" not in stock
    expected = ranks.run(losses, 2, stock)[0]
    assert len(expected) == 5
    assert expected[-1] < expected[0]
    for variant in (
        program,
        program.replace('"stage": 1', '"stage": 3'),
        program.replace("num_stages=2", "num_stages=2, num_chunks=2"),
    ):
        for got in ranks.run(losses, 2, variant):
            assert got == pytest.approx(expected, abs=2e-4)


def test_metrics_are_those_that_are_reported():
    from dsx.report.progress import EvaluationReport, RunRates, StepReport

    rates = RunRates(steps=1, world_size=1, tokens_per_step=1, flops_per_token=1.0, peak_flops=1.0)
    step = StepReport(
        rates=rates,
        step=1,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        tokens=1,
        step_seconds=1.0,
        peak_allocated_bytes=1,
        peak_reserved_bytes=1,
        estimated_bytes=1,
        data_share=0.0,
        bubble=0.1,
        simulated_bubble=0.1,
    )
    evaluation = EvaluationReport(step=1, steps=1, loss=1.0, bits_per_byte=1.0)
    named = [name for cells in rows("Metrics", "| name") for name in re.findall(r"`([\w/]+)`", cells[0])]
    assert sorted(named) == sorted([*step.metrics(), *evaluation.metrics()])


def of_a_batch(_: Path) -> None:
    dsx.load_config(ZERO3, world_size=3, overrides=["train_batch_size=16"])


def of_a_degree(_: Path) -> None:
    dsx.load_config(ZERO3, world_size=8, overrides=["dsx.parallel.tensor=8"])


def of_a_model(folder: Path) -> None:
    from dsx.checkpoint.formats.dsx_manifest import read_manifest
    from dsx.runtime.checkpointing import require_same_model

    (path,) = folder.glob("runs/*/checkpoints/*3/dsx.json")
    require_same_model(read_manifest(path), {"0.word.weight": (1000, 128)})


def of_little_text(_: Path) -> None:
    import numpy as np

    from dsx.runtime.data.batches import Batches, Shuffled
    from dsx.runtime.data.corpus import Sequences

    text = Sequences(np.zeros(2 * 256 + 1, dtype=np.uint8), 256)
    Batches(Shuffled(text, seed=0), micro_batch_size=3, accumulation=1, dp=1, dp_rank=0)


def of_a_version(_: Path) -> None:
    import deepspeed

    from dsx.runtime.zero_adapters import require_supported

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed, "__version__", "0.18.0")
        require_supported()


def of_a_port(_: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        port = str(server.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", port)
        with dsx.distributed(dsx.Mesh.of(dp=2)):
            pass


def of_elastic_limits(_: Path) -> None:
    given = ["dsx.elastic.tensor=[4]", "dsx.train.output=runs/elastic"]
    dsx.load_config(ZERO3, world_size=3, overrides=given)


def of_a_loss(_: Path) -> None:
    from dsx.plan.health import Health

    found = Health(window=8, sigmas=8.0).judge(float("nan"), 1.0, spikes=frozenset())
    raise dsx.RunError("step 3", found.text, "")


def of_no_latest(folder: Path) -> None:
    from dsx.checkpoint import store

    store.find(folder)


def of_a_folder(folder: Path) -> None:
    from dsx.checkpoint.open import open_checkpoint

    open_checkpoint(folder)


PROVOKED = (
    of_a_batch,
    of_a_degree,
    of_a_model,
    of_little_text,
    of_a_version,
    of_a_port,
    of_elastic_limits,
    of_a_loss,
    of_no_latest,
    of_a_folder,
)


@pytest.mark.parametrize(
    ("cells", "provoke"),
    [
        pytest.param(*case, id=case[1].__name__)
        for case in zip(rows("Troubleshooting", "| message"), PROVOKED, strict=True)
    ],
)
def test_messages_under_troubleshooting_are_real(cells, provoke, first_run):
    with pytest.raises(dsx.DsxError) as error:
        provoke(first_run[0])
    assert cells[0].strip("`") in str(error.value)


def test_paths_and_links_exist():
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", TEXT)
    named = re.findall(r"`((?:recipes|configs|dsx|tests|tools)/[\w/.-]+)`", TEXT)
    assert len(links) + len(named) >= 8
    assert [path for path in (*links, *named) if not (ROOT / path).exists()] == []


def test_the_map_shows_every_part():
    (shown,) = blocks("text", section("Map of the project"))
    listed = {line.split()[0].rstrip("/") for line in shown.splitlines() if line and not line.startswith(" ")}
    assert listed == {"recipes", "configs", "dsx", "tests", "tools"}
    inside = {line.split()[0].rstrip("/") for line in shown.splitlines() if re.match(r"  \w+/", line)}
    folders = {path.name for path in (ROOT / "dsx").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert inside == folders
