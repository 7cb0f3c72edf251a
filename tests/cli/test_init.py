"""``dsx init`` and ``dsx guide``, and what a wheel brings of recipes, configs, guides and versions."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dsx as package
from dsx.checkpoint import store
from dsx.config import sources as module
from dsx.config.load import read
from dsx.config.ordinary import starter
from dsx.config.resolve import resolve
from dsx.errors import ConfigError
from model_folder import write_model_folder
from often import often
from recipes.launching import free_port

ROOT = Path(__file__).parents[2]
TRAINER = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_bucket_size": 200000000,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """A Hugging Face folder with weights and a tokenizer."""
    return write_model_folder(tmp_path_factory.mktemp("hf") / "tiny-gpt2")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """One with GPUs and a compiler; called with a reason, one on which DeepSpeed's optimizers are not for."""

    def lacks(why: str) -> None:
        monkeypatch.setattr("dsx.config.ordinary.why_not_compiled", lambda: why)

    lacks("")
    return lacks


def written(folder: Path) -> dict:
    return json.loads((folder / "train.json").read_text())


def test_without_anything_it_is_a_small_model_that_runs(dsx, tmp_path):
    folder = tmp_path / "new" / "run"
    code, out, err = dsx("init", folder, "--gpus", 4)
    assert (code, err) == (0, "")
    names = {"train.json", "train.py", "generate.py", "constraints.txt", "README.md"}
    assert {path.name for path in folder.iterdir()} == names
    assert [path.name for path in folder.parent.iterdir()] == ["run"]
    assert folder.stat().st_mode & 0o777 == 0o777 & ~_umask()
    run = resolve(folder / "train.json", world_size=4)
    assert (run.mesh.pp, run.mesh.dp, run.mesh.tp, run.global_batch_size) == (2, 2, 1, 16)
    assert written(folder)["dsx"]["parallel"]["pipeline"] == 2  # written out
    assert (folder / "train.py").read_bytes() == (ROOT / "recipes/gpt_3d.py").read_bytes()
    assert (folder / "constraints.txt").read_bytes() == (ROOT / "constraints.txt").read_bytes()
    assert f"next       cd {folder} && deepspeed --num_accelerators 4 train.py train.json" in out


@pytest.mark.parametrize(
    ("optimizer", "zero", "is_torchs"),
    [
        ({"type": "AdamW", "params": {"lr": 1e-3}}, {"stage": 1}, True),
        (
            {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": False}},
            {"stage": 1},
            False,
        ),  # the user's word
        (
            {"type": "AdamW", "params": {"lr": 1e-3}},
            {"stage": 1, "offload_optimizer": {"device": "cpu"}},
            False,
        ),
        ({"type": "Lion", "params": {"lr": 1e-3}}, {"stage": 1}, False),  # torch has none
    ],
)
def test_where_nothing_can_be_compiled_torchs_optimizer_is_proposed(
    dsx, tmp_path, machine, optimizer, zero, is_torchs
):
    content = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": zero}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    for why in ("", "no GPU is here"):
        machine(why)
        folder = tmp_path / f"new{len(why)}"
        code, out, err = dsx("init", folder, "--from", tmp_path / "ds.json", "--model", "gpt2/tiny")
        assert (code, err) == (0, "")
        taken = why and is_torchs
        expected = {**optimizer["params"], **({"torch_adam": True} if taken else {})}
        assert written(folder)["optimizer"]["params"] == expected
        assert ("assumed    optimizer.params.torch_adam = true (no GPU is here)" in out) == bool(taken)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("gpus", [1, 2, 3, 6, 8, 64])
@pytest.mark.parametrize("model", ["gpt2/tiny", "llama-3-8b", "qwen2.5-0.5b", "pythia-160m"])
def test_degrees_are_legal_for_any_number_of_ranks(model, gpus):
    begun = starter(model=model, gpus=gpus)
    assert begun.run.mesh.size == gpus
    assert resolve(begun.content, world_size=gpus).output == begun.run.output
    assert "auto" not in begun.content["dsx"]["parallel"].values()


def test_the_readmes_commands_hold(dsx, tmp_path, model_folder, monkeypatch):
    """Every line of its shell blocks parses; those of dsx run."""
    folder = tmp_path / "tune"
    assert dsx("init", folder, "--model", model_folder, "--gpus", 2)[0] == 0
    monkeypatch.chdir(folder)
    text = Path("README.md").read_text()
    lines = [
        line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()
    ]
    assert len(lines) == 5
    (tmp_path / "my.jsonl").write_text('{"text": "a"}')
    for line in map(shlex.split, lines):
        if line[0] == "dsx":
            assert dsx(*line[1:])[0] == 0
        for word in line:
            assert not word.endswith((".py", ".json")) or Path(word).is_file()
    assert "runs/pp1-dp2-tp1/hf/step200" in text


def test_a_trainers_json_and_a_model_folder(dsx, tmp_path, model_folder):
    """Every key stays but "auto", which becomes what the README says; it is fine-tuning."""
    (tmp_path / "ds_config.json").write_text(json.dumps(TRAINER))
    folder = tmp_path / "tune"
    arguments = ("init", folder, "--from", tmp_path / "ds_config.json", "--model", model_folder, "--gpus", 2)
    code, out, err = dsx(*arguments, "--format", "json")
    assert (code, err) == (0, "")
    found = written(folder)
    for path, value in leaves(TRAINER):
        node = found
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        assert value in ("auto", node), path
        assert node != "auto", path
    assert found["zero_optimization"]["reduce_bucket_size"] == 16 * 16
    assert json.loads(out)["assumed"]["optimizer.params.lr"] == found["optimizer"]["params"]["lr"] == 5e-5
    run = resolve(folder / "train.json", world_size=2)
    assert (run.mesh.dp, run.zero_stage, run.sequence_length) == (2, 2, 64)
    assert (run.weights, run.dsx.data.tokenizer) == (model_folder, str(model_folder))
    assert run.dsx.train.export_hf
    assert (folder / "train.py").read_bytes() == (ROOT / "recipes/finetune.py").read_bytes()
    assert "`optimizer.params.lr` = `5e-05`: the Trainer's default" in (folder / "README.md").read_text()


def test_a_learning_rate_that_nobody_wrote_is_told(dsx, tmp_path):
    """Of a JSON whose script brings the optimizer."""
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}'
    )
    code, out, err = dsx("init", tmp_path / "new", "--from", tmp_path / "ds.json", "--model", "gpt2/tiny")
    assert (code, err) == (0, "")
    assert 'assumed    optimizer.type = "AdamW" (nothing says it)\n' in out
    assert "assumed    optimizer.params.lr = 5e-05 (nothing says it)\n" in out
    assert written(tmp_path / "new")["optimizer"] == {"type": "AdamW", "params": {"lr": 5e-5}}


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(dsx, tmp_path, model_folder):
    """Before anything is written, in the words of training."""
    copy = tmp_path / "model"
    shutil.copytree(model_folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 256}))
    code, _, err = dsx("init", tmp_path / "tune", "--model", copy)
    assert code == 2
    assert "it has 257 ids, but the model's vocabulary is 256. Fix: " in err
    assert not (tmp_path / "tune").exists()


@pytest.mark.parametrize(
    ("file", "content", "ids"),
    [
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 7}}}, 8),
        ("tokenizer.json", {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}, "added_tokens": [{"id": 2}]}, 3),
        ("vocab.json", {"a": 0, "b": 4}, 5),
        ("tokenizer.json", {"model": 3}, None),
        ("tokenizer.model", {}, None),
    ],
)
def test_how_many_ids_a_tokenizer_has(tmp_path, file, content, ids):
    (tmp_path / file).write_text(json.dumps(content))
    assert module.vocabulary_of(str(tmp_path)) == ids


def leaves(node, path=()):
    if not isinstance(node, dict):
        yield path, node
        return
    for key, value in node.items():
        yield from leaves(value, (*path, key))


def test_a_schedule_of_its_own_length_makes_the_run_as_long(tmp_path):
    file = tmp_path / "ds.json"
    content = TRAINER | {
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 77, "warmup_max_lr": 5e-5}}
    }
    file.write_text(json.dumps(content))
    assert starter(model="gpt2/tiny", gpus=1, ds_config=file).run.dsx.train.steps == 77
    content["scheduler"]["params"]["total_num_steps"] = "auto"
    file.write_text(json.dumps(content))
    begun = starter(model="gpt2/tiny", gpus=1, ds_config=file)
    assert begun.content["scheduler"]["params"]["total_num_steps"] == begun.run.dsx.train.steps


def test_a_config_of_dsx_stays_but_for_the_model(dsx, tmp_path):
    file = ROOT / "configs" / "zero3.json"
    assert dsx("init", tmp_path / "a", "--from", file, "--gpus", 2)[0] == 0
    assert written(tmp_path / "a") == read(file)
    assert dsx("init", tmp_path / "b", "--from", file, "--model", "gpt2/tiny", "--gpus", 2)[0] == 0
    assert written(tmp_path / "b")["dsx"]["model"] == {"preset": "tiny", "family": "gpt2"}


def test_keys_that_cannot_stay_are_named_together(dsx, tmp_path):
    bad = TRAINER | {
        "fp16": {"enabled": True, "fp16_master_weights_and_grads": True},
        "zero_optimization": {"stage": "auto"},
        "sequence_parallel_size": 2,
        "activation_checkpointing": {"partition_activations": True},
    }
    (tmp_path / "ds.json").write_text(json.dumps(bad))
    code, out, err = dsx("init", tmp_path / "new", "--from", tmp_path / "ds.json", "--model", "gpt2/tiny")
    assert (code, out) == (2, "")
    for key in (
        "fp16_master_weights_and_grads",
        'zero_optimization.stage = "auto"',
        "sequence_parallel_size",
        "partition_activations",
    ):
        assert re.search(rf"- .*{re.escape(key)}.*Fix: ", err), key
    assert "--for trainer" not in err
    assert not (tmp_path / "new").exists()
    code, _, err = dsx("init", tmp_path / "new", "--from", tmp_path / "ds.json")
    assert (code, "give --model" in err) == (2, True)


def test_ranks_that_do_not_divide_a_kept_batch(dsx, tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}')
    arguments = ("init", tmp_path / "new", "--from", tmp_path / "ds.json", "--model", "gpt2/tiny", "--gpus")
    code, _, err = dsx(*arguments, 3)
    assert (code, "3 data-parallel ranks" in err) == (2, True)
    assert dsx(*arguments, 2)[0] == 0


def test_nothing_is_written_over(dsx, tmp_path):
    (tmp_path / "train.py").write_text("mine")
    (tmp_path / "README.md").symlink_to("nowhere")
    code, _, err = dsx("init", tmp_path)
    assert code == 2
    assert "train.py, README.md are there already" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"
    (tmp_path / "file").write_text("")
    assert dsx("init", tmp_path / "file")[0] == 2


@pytest.mark.parametrize("there", [False, True])
def test_a_write_that_fails_leaves_nothing(dsx, tmp_path, monkeypatch, there):
    folder = tmp_path / "new"
    if there:
        folder.mkdir()
    real, calls = store.os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 4:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(store.os, "fsync", full)
    code, _, err = dsx("init", folder)
    assert (code, "No space left on device" in err) == (2, True)
    assert [path.name for path in tmp_path.rglob("*")] == (["new"] if there else [])


def test_guides(dsx, tmp_path, monkeypatch):
    code, out, _ = dsx("guide")
    names = [line.split()[0] for line in out.splitlines()]
    assert (code, names) == (0, sorted(path.stem for path in (ROOT / "docs/guides").glob("*.md")))
    assert dsx("guide", "data") == (0, (ROOT / "docs/guides/data.md").read_text(), "")
    monkeypatch.chdir(tmp_path)
    code, _, err = dsx("guide", "finetuning")
    assert code == 0
    subprocess.run(err.partition(": ")[2], shell=True, check=True)
    assert {"recipes/finetune.py", "configs/chat_lora.json"} <= {str(path) for path in Path().glob("*/*")}
    assert dsx("guide", "finetuning")[2] == ""
    code, _, err = dsx("guide", "dta")
    assert (code, 'write "data"' in err) == (2, True)


def run(command: list[str | Path], folder: Path, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=kept | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built in a place of its own, from a tree that need not be a git checkout."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "runs", "tests", "wandb")
    shutil.copytree(ROOT, tree, ignore=left_out, dirs_exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        out,
        tree,
    ]
    run(command, tree)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_has_recipes_configs_guides_and_versions(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name.removeprefix("dsx/shipped/") for name in names if name.startswith("dsx/shipped/")}
    expected = {
        str(path.relative_to(ROOT)) for kind in ("recipes/*.py", "configs/*.json") for path in ROOT.glob(kind)
    }
    guides = {str(path.relative_to(ROOT)) for path in (ROOT / "docs/guides").rglob("*") if path.is_file()}
    assert inside == expected | guides | {"constraints.txt"}
    assert {name.split("/")[0] for name in names if not name.startswith("dsx-")} == {"dsx"}


@pytest.mark.parametrize("how", often(["--prefix", "--target", "as it is"], 3))
def test_an_installed_package_inits_without_a_clone(wheel, tmp_path, how):
    """Its own files, not the checkout's: those of the checkout are of no use from there."""
    packages = wheel  # a wheel is a zip, from which Python imports
    if how != "as it is":
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed"]
        run([*command, how, tmp_path / "env", wheel], tmp_path)
        (packages,) = [folder.parent for folder in (tmp_path / "env").rglob("dsx") if folder.is_dir()]
    away = {"PYTHONPATH": str(packages)}
    assert run([sys.executable, "-c", "import dsx; print(dsx.__file__)"], tmp_path, **away).startswith(
        str(packages)
    )
    out = run([sys.executable, "-m", "dsx", "guide", "tour"], tmp_path, **away)
    assert out == (ROOT / "docs/guides/tour.md").read_text()
    run([sys.executable, "-m", "dsx", "init", "run", "--gpus", "2"], tmp_path, **away)
    assert (tmp_path / "run/train.py").read_bytes() == (ROOT / "recipes/gpt_3d.py").read_bytes()
    assert (tmp_path / "run/constraints.txt").read_bytes() == (ROOT / "constraints.txt").read_bytes()
    assert resolve(tmp_path / "run/train.json", world_size=2).mesh.size == 2
    for command in ("check", "estimate"):
        said = run([sys.executable, "-m", "dsx", command, "run/train.json", "--gpus", "2"], tmp_path, **away)
        assert "data 2" in said
    command = "from dsx.config.document import own_copy; print(own_copy('configs/zero3.json'))"
    own = run([sys.executable, "-c", command], tmp_path, **away).strip().removeprefix("; dsx's own is ")
    assert own == str(packages / "dsx/shipped/configs/zero3.json")


def test_a_missing_file_says_how_to_get_it():
    with pytest.raises(ConfigError, match="install dsx with pip"):
        module.shipped("recipes/absent.py")


def test_a_config_that_comes_with_dsx_is_found_from_another_folder(dsx, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in ("check", "train"):
        code, _, said = dsx(command, "configs/zero3.json")
        assert (code, said[-1]) == (2, "\n")
        assert said.rstrip().endswith(f"; dsx's own is {ROOT / 'configs/zero3.json'}.")
        assert "own is" not in dsx(command, "configs/zero4.json")[2]


def test_newer_versions_than_tested_are_told(monkeypatch):
    assert module.newer_than_tested() == ()
    real = module.metadata.version
    newer = {"torch": "99.1.0+cu150", "transformers": real("transformers") + ".post9", "datasets": "1.0"}
    monkeypatch.setattr(module.metadata, "version", lambda name: newer.get(name) or real(name))
    (said,) = module.newer_than_tested()
    assert re.fullmatch(
        r"torch 99\.1\.0\+cu150 is newer than 2\.\d+\.\d+, the newest that this dsx is tested with", said
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_empty_environment_trains_and_generates(wheel, tmp_path, model_folder):
    """pip install of the wheel with the tested versions; then the Trainer's config and a model folder."""
    run([sys.executable, "-m", "venv", "env"], tmp_path)
    here = tmp_path / "env" / "bin"
    run([here / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel], tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps(TRAINER))
    path = f"{here}{os.pathsep}{os.environ['PATH']}"
    sizes = ["--set", "dsx.train.steps=4", "--set", "dsx.data.max_bytes=2000000"]
    words = ["init", "run", "--from", "ds_config.json", "--model", model_folder, "--gpus", "2", *sizes]
    run([here / "dsx", *words], tmp_path, PATH=path)
    launch, *_, generate = re.findall(
        r"^(?:deepspeed|python) .*$", (tmp_path / "run/README.md").read_text(), re.MULTILINE
    )
    program, *rest = shlex.split(launch)
    said = run(
        [program, "--master_port", str(free_port()), *rest],
        tmp_path / "run",
        PATH=path,
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
    )
    assert "step 4/4" in said
    text = run([here / "python", *shlex.split(generate)[1:]], tmp_path / "run", PATH=path)
    assert text.startswith("Once")
    assert str(package.__file__) not in said
