"""What README.md says is so, and the guides that go on from its first run: commands run, tables are true.

Their blocks are pasted one after another into one fresh shell. .ci/run pastes the installation of the tests.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import re
import shlex
import socket
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

import dsx
import ranks
from fresh_shell import (
    AFTER_THE_README,
    FIRST,
    Said,
    Shell,
    blocks,
    change_configs,
    clone,
    install,
)
from model_folder import write_model_folder

ROOT = Path(__file__).parents[1]
PATHS = (ROOT / "README.md", *(ROOT / "docs/guides" / name for name in AFTER_THE_README))
PAGES = {path: path.read_text(encoding="utf-8") for path in PATHS}
ZERO3 = ROOT / "configs" / "zero3.json"
# How an environment begins, under "Run it".
INSTALL = "python3 -m venv .venv && source .venv/bin/activate && pip install -c constraints.txt -e"


def section(title: str) -> str:
    """Text under a ``# title`` or ``## title`` of one page, up to the page's next ``##``."""
    heading = rf"^##? {re.escape(title)}\n"
    (page,) = [text for text in PAGES.values() if re.search(heading, text, re.MULTILINE)]
    below = re.split(heading, page, maxsplit=1, flags=re.MULTILINE)[1]
    return re.split(r"^## ", below, maxsplit=1, flags=re.MULTILINE)[0]


def every_block(language: str = "bash") -> list[str]:
    return [block for text in PAGES.values() for block in blocks(text, language)]


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


def only_block(title: str) -> str:
    (block,) = blocks(section(title))
    return block


def test_the_two_commands_are_one_line_each():
    """.ci/run pastes the second."""
    install = "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e"
    assert only_block("Run the tests") == f"{install} '.[dev]' && .venv/bin/pytest\n"
    assert only_block("Run it").startswith(f"{INSTALL} '.[plot]' && deepspeed ")
    assert only_block("Run it").count("\n") == 1


@dataclass(frozen=True)
class Pasted:
    """The pages in one shell: the folder, and what each command of their bash blocks said."""

    folder: Path
    said: dict[str, Said]

    def of(self, start: str) -> list[str]:
        """What the commands said that begin so."""
        return [one.text for line, one in self.said.items() if line.startswith(start)]


# What is less in the copy that the tests paste into: steps, and what is evaluated.
FEWER = {"dsx.train.steps": 3, "dsx.train.eval_tokens": 2048}
# Launches that the slow test alone pastes: of six alike, and one that builds an extension first.
LATER = (
    "deepspeed --num_accelerators 4",
    "torchrun --nproc_per_node 4",
    "deepspeed --num_accelerators 2 recipes/finetune.py",
    "deepspeed --num_accelerators 2 pipeline.py",
)
FEWER_SAID = {"dsx.train.steps=250": "dsx.train.steps=4", "dsx.train.steps=20": "dsx.train.steps=2"}


def saved_as() -> str:
    """The file name that a page gives the program it shows."""
    (name,) = re.findall(r"Saved as `([\w.]+)`:\n\n```python\n", section("Moving your PipelineModule to dsx"))
    return name


def paste_readme(folder: Path, *, whole: bool) -> Pasted:
    """Every block but the one that runs these tests, in order; the program is saved as the text says."""
    project = clone(folder / "dsx")
    write_model_folder(project / "MODEL_FOLDER")
    (project / "my.jsonl").write_text(
        "".join(json.dumps({"text": "def main(): " * 20}) + "\n" for _ in range(400))
    )
    change_configs(project, {"dsx.data.sequence_length": 32}, only="finetune.json")
    if not whole:
        install(project)
        change_configs(project, FEWER)
    (program,) = every_block("python")
    (project / saved_as()).write_text(program)
    said = {}
    with Shell(project, folder / "home", seconds=3000 if whole else 500) as shell:
        for block in every_block():
            if block == only_block("Run the tests"):
                continue
            all_lines = block.splitlines()
            lines = [line for line in all_lines if whole or not (line in said or line.startswith(LATER))]
            text = "\n".join(lines)
            if not whole:
                text = text.replace(f"{INSTALL} '.[plot]'", FIRST)
                for long, short in FEWER_SAID.items():
                    text = text.replace(long, short)
            said.update(zip(lines, shell.paste(text) if text else (), strict=True))
    return Pasted(project, said)


@pytest.fixture(scope="module")
def pasted(tmp_path_factory) -> Pasted:
    """With fewer steps, and an environment that equals the one of the first command."""
    return paste_readme(tmp_path_factory.mktemp("readme"), whole=False)


def test_every_command_ends_well(pasted):
    assert len(pasted.said) > 8
    assert {line: one.text for line, one in pasted.said.items() if one.code} == {}


def test_the_first_command_prints_what_the_readme_shows(pasted):
    """The same lines, with the same figures where steps and held-out text are not fewer."""
    (printed,) = pasted.of(INSTALL)
    shown, *_ = blocks(section("Run it"), "text")
    labels = [line.split("  ")[1] for line in shown.splitlines() if line.startswith("  ")]
    assert len(labels) > 8
    assert [label for label in labels if f"\n  {label}  " not in printed] == []
    for start in ("step ", "eval "):
        expected, seen = (
            {shape(line) for line in text.splitlines() if line.startswith(start)} for text in (shown, printed)
        )
        assert expected
        assert seen == expected
    compare_figures(shown, printed)


def compare_figures(shown: str, printed: str) -> None:
    """What is computed on paper or counted is the same; losses and norms are, to rounding, on the same text.

    The text is the standard library's, which differs a little from one release of Python to another.
    """
    head = re.findall(r"^  (?!data|proved|trained|held-out|W&B).*$", shown, re.MULTILINE)
    assert len(head) > 10
    assert [line for line in head if line not in printed.splitlines()] == []
    (text,) = re.findall(r"^  data .*$", shown, re.MULTILINE)
    near = 5e-4 if text in printed.splitlines() else 0.1
    there, here = steps_of(shown), steps_of(printed)
    assert len(there.keys() & here.keys()) >= 3
    for step in there.keys() & here.keys():
        loss, norm, rate, memory = there[step]
        far = step > 50  # as the README says of rounding
        expected = (
            pytest.approx(loss, abs=0.02 if far else near),
            pytest.approx(norm, rel=0.3 if far else 0.1),
        )
        assert here[step] == (*expected, rate, memory)


def steps_of(text: str) -> dict[int, tuple[float, float, str, str | None]]:
    """Loss, gradient norm, learning rate and memory of each step line."""
    form = r"^step +(\d+)/\d+ \| loss +([\d.]+) \| grad norm +([\d.]+) \| lr (\S+) (?:.*\| ([\d.]+ MiB) \|)?"
    found = re.findall(form, text, re.MULTILINE)
    return {int(step): (float(loss), float(norm), lr, mib) for step, loss, norm, lr, mib in found}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_readme_as_it_stands(tmp_path):
    """Everything from the installation on, with every step."""
    whole = paste_readme(tmp_path, whole=True)
    assert {line: one.text for line, one in whole.said.items() if one.code} == {}
    (printed,) = whole.of(INSTALL)
    shown, *_ = blocks(section("Run it"), "text")
    compare_figures(shown, printed)
    assert {1, 2, 3, 100, 200} <= steps_of(printed).keys()
    assert re.search(
        r"^step 4: loss [\d.]+$", *whole.of("deepspeed --num_accelerators 2 pipeline.py"), re.MULTILINE
    )
    for loss, bits in re.findall(r"^eval .* loss +([\d.]+) .* ([\d.]+) bits", shown, re.MULTILINE):
        got = re.findall(r"^eval .* loss +([\d.]+) .* ([\d.]+) bits", printed, re.MULTILINE)
        assert (float(loss), float(bits)) in [
            pytest.approx(tuple(map(float, each)), abs=0.02) for each in got
        ]


def test_layouts_have_the_losses_of_the_first_command(pasted):
    """To the digits shown; plain python's has another learning rate, of which step 2 knows nothing."""
    first = steps_of(*pasted.of(INSTALL))
    other = steps_of(*pasted.of("python recipes/gpt_3d.py"))
    assert len(other) >= 2
    for step, (loss, *_) in other.items():
        assert loss == pytest.approx(first[step][0], abs=2e-4)


def test_a_run_goes_on_from_the_first_ones_checkpoint(pasted):
    (said,) = pasted.of("deepspeed --num_accelerators 2 recipes/gpt_3d.py configs/zero1.json")
    assert re.search(r"resumed\s+after step 3", said)
    assert list(steps_of(said)) == [4]


def test_estimates_and_plans_are_those_shown(pasted):
    table, *_ = blocks(section("Memory before the run"), "text")
    assert table in pasted.of("dsx estimate")[0]
    (cost,) = re.findall(r'\("(recompute full: \+[\d.]+% step)', section("Choosing a layout"))
    assert cost in pasted.of("dsx plan")[0]


def shape(line: str) -> str:
    """A console line without its numbers."""
    line = re.sub(r"\d[\d.]*(e[+-]\d+)?[kM]?", "#", re.sub(r" +", " ", line))
    return re.sub(r"# (h # min|min # s|ms|s)\b", "# s", line)


def test_the_plot_command_draws_the_first_run(pasted):
    (said,) = pasted.of("dsx plot")
    assert (pasted.folder / said.strip().removeprefix("wrote ")).is_file()


def test_every_dsx_command_is_listed():
    from dsx.cli.app import build

    listed = [re.match(r"`dsx (\w+)", cells[0]).group(1) for cells in rows("The dsx command", "| command")]
    assert sorted(listed) == sorted(command.callback.__name__ for command in build().registered_commands)


def test_the_first_run_goes_on_with_the_prompt(pasted):
    (said,) = pasted.of("python recipes/generate.py")
    assert said.startswith("def main(")


def test_commands_left_to_the_slow_test_name_files_and_keys_that_exist(tmp_path):
    lines = [line for block in every_block() for line in block.splitlines() if line.startswith(LATER)]
    assert len(lines) == len(LATER)
    (tmp_path / "config.json").write_text(json.dumps(preset("llama", "tiny")))
    given = ["dsx.model.weights=random", "dsx.data.tokenizer=bytes"]
    for words in map(shlex.split, lines):
        configs = [word for word in words if word.endswith(".json")]
        assert configs or words[-1] == saved_as()
        if configs:
            size, own = int(words[2]), [value for flag, value in itertools.pairwise(words) if flag == "--set"]
            own = [item.replace("MODEL_FOLDER", str(tmp_path)) for item in own]
            own += given if str(tmp_path) in str(own) else []
            assert (ROOT / words[3]).is_file()
            assert dsx.load_config(ROOT / configs[0], world_size=size, overrides=own).mesh.size == size


def preset(family: str, name: str) -> dict[str, object]:
    from dsx.models.presets import find_preset

    return dict(find_preset(family, name).config)


def test_the_annotated_json_is_a_config(tmp_path):
    (block,) = blocks(section("The one JSON"), "json")
    (tmp_path / "ds.json").write_text(block)
    config = dsx.load_config(tmp_path / "ds.json", world_size=8)
    shipped = dsx.load_config(ZERO3, world_size=8)
    assert config.mesh == shipped.mesh
    assert config.global_batch_size == shipped.global_batch_size
    more = {"partition", "recompute", "zero", "profile", "profile_micro_batches", "mlp_tiles"}
    more |= {
        "compile",
        "loss",
        "memory_check",
        "optimizer_bytes",
        "proof",
        "faults",
        "outer",
        "elastic",
        "adapter",
        "moe",
    }
    blocks_shown = set(json.loads(ZERO3.read_text())["dsx"]) | more
    assert config.dsx.model_fields_set == blocks_shown == set(type(config.dsx).model_fields)


def test_the_cluster_is_one(tmp_path):
    from dsx.planner.cluster import read_cluster

    (block,) = blocks(section("Choosing a layout"), "json")
    path = tmp_path / "cluster.json"
    path.write_text(block)
    assert read_cluster(str(path)).nodes == 16

    (block,) = blocks(section("Several sites"), "json")
    path.write_text(block)
    assert read_cluster(str(path)).sites == 2


def test_what_auto_becomes():
    for cells in rows("The one JSON", "| ranks"):
        world_size, tp, pp, dp, chunks = map(int, cells)
        config = dsx.load_config(ZERO3, world_size=world_size, overrides=["train_batch_size=32"])
        assert (config.mesh.tp, config.mesh.pp, config.mesh.dp, config.chunks) == (tp, pp, dp, chunks)


@pytest.mark.parametrize("cells", rows("What is refused", "| config"), ids=lambda cells: cells[0])
def test_what_is_refused_is_refused_for_that(cells):
    fragment = json.loads("{" + cells[0].strip("`") + "}")
    (key,) = fragment
    with pytest.raises(dsx.DsxError) as refused:
        dsx.load_config(json.loads(ZERO3.read_text()) | fragment, world_size=8)
    assert key in str(refused.value)
    for instead in re.findall(r"`(dsx\.\w+)", cells[1]):
        assert instead in str(refused.value)


def counted(rank: int, world_size: int, zero: int, micro_batches: int, offloads: bool) -> dict[str, float]:
    """What a rank sends over data parallelism in a step, in (N - 1) / N of the pipeline rank's parameters."""
    import torch.distributed as dist

    from parity import dsx_run

    sent: dict[str, float] = {}
    group: list[object] = []

    def count(name, how, elements):
        original = getattr(dist, name)

        def call(*args, **kwargs):
            if group and kwargs.get("group") is group[0]:
                tensors = [t for t in (*args, *kwargs.values()) if hasattr(t, "numel")]
                sent[how] = sent.get(how, 0) + elements(dist.get_world_size(group[0]), *tensors)
            return original(*args, **kwargs)

        setattr(dist, name, call)

    count("all_reduce", "all-reduced", lambda _, tensor: 2 * tensor.numel())
    count("all_gather_into_tensor", "gathered", lambda _, whole, part: whole.numel())
    count("reduce_scatter_tensor", "reduced to owners", lambda _, part, whole: whole.numel())
    count("isend", "reduced to owners", lambda n, message: message.numel() * n / (n - 1))
    for name in ("partitioned", "replicated"):
        module = importlib.import_module(f"dsx.engine.zero.{name}")

        def weights(*given, share=module.share_weights):  # messages as well
            before = sent.pop("reduced to owners", 0)
            share(*given)
            sent["gathered"] = sent.get("gathered", 0) + sent.pop("reduced to owners", 0)
            sent["reduced to owners"] = before

        module.share_weights = weights
    # DeepSpeed would otherwise have kept the functions as they were.
    backend = importlib.import_module("deepspeed.comm.torch").TorchBackend
    backend.get_all_gather_function = classmethod(lambda _: dist.all_gather_into_tensor)
    backend.get_reduce_scatter_function = classmethod(lambda _: dist.reduce_scatter_tensor)
    caches = ("param_persistence_threshold", "max_reuse_distance", "prefetch_bucket_size")
    keys = tuple((f"stage3_{name}", 0) for name in caches) if zero == 3 else ()
    keys += (("offload_optimizer", {"device": "cpu"}),) if offloads else ()
    own = (("zero_force_ds_cpu_optimizer", False),)
    case = dsx_run.Case(pp=2, dp=2, zero=zero, accumulation=micro_batches, zero_keys=keys, extra=own)
    engine, _ = dsx_run.build(case, None)
    dsx_run.losses_of(engine, case, range(2))
    group.append(engine.groups.data)
    engine.train_batch(dsx_run.batches(case, 2, engine.groups.dp_rank))
    held = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    return {how: elements / held for how, elements in sent.items()}


@pytest.mark.parametrize(
    "cells", rows("What ZeRO-2 and ZeRO-3 cost under a pipeline", "| ZeRO"), ids=lambda c: c[0]
)
def test_what_each_stage_communicates(cells):
    micro_batches = 8
    zero, said = int(cells[0][0]), f"{cells[1]}; {cells[2]}"
    expected = {"all-reduced": 0, "gathered": 0, "reduced to owners": 0}
    for times, how in re.findall(r"(1|2 m|m) ([a-z -]+)", said):
        elements = {"1": 1, "m": micro_batches, "2 m": 2 * micro_batches}[times]
        expected[how] = elements * (2 if how == "all-reduced" else 1)
    assert sum(expected.values()) == int(cells[3])
    every = ranks.run(counted, 4, zero, micro_batches, "offloaded" in cells[0])
    for how, elements in expected.items():
        # Half of the pipeline's ranks have other parameters; replicas own what may differ in a chunk.
        found = sum(sent.get(how, 0) for sent in every) / len(every)
        assert found == pytest.approx(elements, abs=0.05), how


@pytest.mark.parametrize("cells", rows("Pipeline schedules", "| schedule"), ids=lambda c: c[0])
def test_what_each_schedule_costs(cells):
    from dsx.schedules.builders import build, default_chunks, divides_backward
    from dsx.schedules.simulate import peak_activations, simulate

    name, chunks, bubble, peak, backward = cells
    schedule = build(name, 4, int(chunks), 8)
    assert default_chunks(name) == int(chunks)
    assert f"{simulate(schedule).bubble:.1%}" == bubble
    assert max(peak_activations(schedule)) == float(peak) * int(chunks)
    assert backward == ("split" if divides_backward(name) else "whole")


def test_every_schedule_is_in_the_table():
    from dsx.schedules.builders import NAMES

    assert {cells[0] for cells in rows("Pipeline schedules", "| schedule")} == set(NAMES)


def losses(rank: int, world_size: int, program: str) -> list[float]:
    """What the README's program prints, as numbers."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    return [float(value) for value in re.findall(r"loss ([\d.]+)", printed.getvalue())]


def test_a_stock_program_moves_by_its_imports():
    (program,) = every_block("python")
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


ALIKE = {"moe/imbalance/layer3", "moe/entropy/layer3"}
"""Metrics of a layer, of which the page writes one out."""


def test_metrics_are_those_that_are_reported():
    from dsx.engine.expert_load import metrics_of
    from dsx.islands.standing import OuterReport
    from dsx.train.progress import EvaluationReport, RunRates, StepReport

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
        trained_share=0.5,
        loss_scale=1024.0,
        skipped_steps=0,
        bubble=0.1,
        simulated_bubble=0.1,
        save_seconds=1.0,
        experts={name: each for name, each in metrics_of({3: [2, 1]}).items() if name not in ALIKE},
    )
    evaluation = EvaluationReport(step=1, steps=1, loss=1.0, bits_per_byte=1.0)
    outer = OuterReport(step=1, share=0, moved=(0,), version=1, seconds=1.0, waited_seconds=1.0, drift=0.0)
    named = [name for cells in rows("Metrics", "| name") for name in re.findall(r"`([\w/]+)`", cells[0])]
    assert sorted(named) == sorted([*step.metrics(), *evaluation.metrics(), *outer.metrics()])


def of_a_batch(_: Path) -> None:
    dsx.load_config(ZERO3, world_size=3, overrides=["train_batch_size=16"])


def of_a_degree(_: Path) -> None:
    dsx.load_config(ZERO3, world_size=16, overrides=["dsx.parallel.tensor=16"])


def of_a_model(folder: Path) -> None:
    from dsx.checkpoint.formats.native import read_manifest
    from dsx.checkpoint.run.state import require_same_model

    (path,) = folder.glob("runs/zero3-pp1-dp2-tp1/checkpoints/*3/dsx.json")
    require_same_model(read_manifest(path), {"0.word.weight": (1000, 128)})


def of_little_text(_: Path) -> None:
    import numpy as np

    from dsx.data.batches import Batches, Shuffled
    from dsx.data.corpus import Sequences

    text = Sequences(np.zeros(2 * 256 + 1, dtype=np.uint8), 256)
    Batches(Shuffled(text, seed=0), micro_batch_size=3, accumulation=1, dp=1, dp_rank=0)


def of_a_version(_: Path) -> None:
    import deepspeed

    from dsx.engine.zero import require_supported

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
    from dsx.fault_tolerance.health import Health

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
        for case in zip(rows("Messages, and what to do", "| message"), PROVOKED, strict=True)
    ],
)
def test_messages_are_real(cells, provoke, pasted):
    with pytest.raises(dsx.DsxError) as error:
        provoke(pasted.folder)
    assert cells[0].strip("`") in str(error.value)


def test_paths_and_links_exist():
    for page, text in PAGES.items():
        links = re.findall(r"\]\((?!https?://)([^)#]+)\)", text)
        assert [link for link in links if not (page.parent / link).exists()] == [], page
        named = re.findall(r"`((?:recipes|configs|docs|dsx|tests|tools)/[\w/.-]+)`", text)
        assert [name for name in named if not (ROOT / name).exists()] == [], page


def test_the_readme_says_what_was_measured():
    """Its milliseconds are those of the tables that it points to."""
    told = re.findall(r"([\d.]+) ms", section("What you get that DeepSpeed alone does not have"))
    results = (ROOT / "tools/RESULTS.md").read_text(encoding="utf-8")
    assert len(told) == 3
    assert [figure for figure in told if f"| {figure} (" not in results] == []


def test_the_map_shows_every_part():
    (shown,) = blocks(section("Map of the project"), "text")
    listed = {line.split()[0].rstrip("/") for line in shown.splitlines() if line and not line.startswith(" ")}
    assert listed == {"recipes", "configs", "docs", "dsx", "tests", "tools"}
    inside = {line.split()[0].rstrip("/") for line in shown.splitlines() if re.match(r"  \w+/", line)}
    folders = {path.name for path in (ROOT / "dsx").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert inside == folders
