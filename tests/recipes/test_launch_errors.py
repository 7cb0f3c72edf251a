"""What is wrong ends in one message of one rank, exit code 2 and no process left, under real launchers."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import launching
import pytest
from launching import FINETUNE, SMALL, ZERO3, launch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import dsx
from dsx.checkpoint import store
from often import often

LAUNCHERS_CODES = {"deepspeed": 2, "torchrun": 1}  # torchrun ends with 1, whatever its ranks end with


def refused(launcher: str, settings: dict[str, Any], *, recipe: str = "gpt_3d.py") -> str:
    """The one message of a run that must not come about."""
    config = FINETUNE if recipe == "finetune.py" else ZERO3
    ended = launch(launcher, recipe, config, SMALL | settings)
    assert (ended.code, ended.rank_code) == (LAUNCHERS_CODES[launcher], 2), ended.text
    (message,) = ended.lines
    assert message.startswith("error: "), ended.text
    assert " Fix: " in message
    return message


@pytest.mark.parametrize(
    ("launcher", "settings", "said"),
    [
        ("deepspeed", {"dsx.train.stps": 3}, ("dsx.train.stps = 3", "unknown key", '"steps"')),
        ("torchrun", {"dsx.parallel.tensor": 3}, ("dsx.parallel.tensor = 3", "world size 2", "use 1 or 2")),
    ],
    ids=["unknown-key", "indivisible-degree"],
)
def test_config(tmp_path: Path, launcher: str, settings: dict[str, Any], said: tuple[str, ...]) -> None:
    output = tmp_path / "out"
    message = refused(launcher, settings | {"dsx.train.output": output})
    assert all(part in message for part in said), message
    assert not output.exists()


@pytest.mark.slow
def test_missing_data_file(tmp_path: Path) -> None:
    source = tmp_path / "absent.jsonl"
    message = refused("deepspeed", {"dsx.train.output": tmp_path, "dsx.data.source": source})
    assert f'dsx.data.source = "{source}": there is no such file' in message


@pytest.mark.slow
def test_too_little_data(tmp_path: Path) -> None:
    source = tmp_path / "short.txt"
    source.write_text("\n".join(f"line {number}\n" for number in range(200)))
    settings = {"dsx.train.output": tmp_path, "dsx.data.source": source, "dsx.data.held_out": 0}
    message = refused("torchrun", settings | {"train_batch_size": 64})
    assert "train_batch_size: one step takes 64 sequences" in message


@pytest.mark.slow
def test_no_place_for_checkpoints(tmp_path: Path) -> None:
    """Said at the start, not when the first one is due."""
    place = tmp_path / "checkpoints"
    place.symlink_to(tmp_path / "a disk that is not mounted")
    message = refused("torchrun", {"dsx.train.output": tmp_path})
    assert f"{place}: it is no folder, or a link to a place that is not there" in message
    assert "dsx.train.output" in message


def test_checkpoints_without_a_newest(tmp_path: Path) -> None:
    """Not a fresh start over them."""
    for tag in ("global_step5", "global_step10"):
        store.stage(tmp_path / "checkpoints", tag).joinpath(store.MANIFEST).touch()
        store.commit(tmp_path / "checkpoints", tag)
    config = dsx.load_config(ZERO3, world_size=1, overrides=[f"dsx.train.output={tmp_path}"])
    with pytest.raises(dsx.CheckpointError, match="latest: there is no such file") as caught:
        dsx.recipe.prepare_data(config)
    assert "write into it the name of one" in caught.value.fix
    assert "global_step5, global_step10" in caught.value.fix


@pytest.mark.slow
def test_folder_to_begin_from_without_a_checkpoint(tmp_path: Path) -> None:
    message = refused("torchrun", {"dsx.train.output": tmp_path / "out", "dsx.train.resume": tmp_path})
    assert f"dsx.train.resume = {tmp_path}" in message
    assert "there is no checkpoint of dsx" in message


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of one step on two data-parallel ranks."""
    output = tmp_path_factory.mktemp("trained")
    settings = {"dsx.train.output": output, "dsx.train.steps": 1, "dsx.data.held_out": 0}
    ended = launch("torchrun", "gpt_3d.py", ZERO3, SMALL | settings)
    assert ended.code == 0, ended.text
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "settings", "said"),
    often(
        [
            ("deepspeed", {"dsx.model.overrides.intermediate_size": 512}, ("another model", "512")),
            ("torchrun", {"dsx.data.max_bytes": 500_000}, ("trained on other text", "restore the text")),
        ],
        2,
    ),
    ids=["another-model", "another-text"],
)
def test_checkpoint_in_the_output(
    trained: Path, launcher: str, settings: dict[str, Any], said: tuple[str, ...]
) -> None:
    message = refused(launcher, {"dsx.train.output": trained, "dsx.data.held_out": 0} | settings)
    assert str(trained / "checkpoints" / "global_step1") in message
    assert all(part in message for part in said), message
    assert (trained / "checkpoints" / "latest").read_text() == "global_step1"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder as transformers writes it."""
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def finetuning(model: Path) -> dict[str, Any]:
    return {
        "dsx.model.path": model,
        "dsx.train.output": model.parent / "out",
        "dsx.data.source": "python-stdlib",
        "dsx.data.tokenizer": "bytes",
    }


def test_folder_without_a_tokenizer(model: Path) -> None:
    message = refused("torchrun", finetuning(model) | {"dsx.data.tokenizer": "auto"}, recipe="finetune.py")
    assert f'dsx.data.tokenizer = "auto" (--set): {model} has weights but no tokenizer' in message


@pytest.mark.slow
def test_folder_that_lacks_a_tensor(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    message = refused("deepspeed", finetuning(model), recipe="finetune.py")
    assert f"{file}: tensor model.layers.1.mlp.down_proj.weight: it is missing" in message


@pytest.mark.slow
def test_port_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(launching, "free_port", lambda: port)
        message = refused("deepspeed", {"dsx.train.output": tmp_path})
    assert message.startswith(f"error: port {port}")
    assert "--master_port" in message
