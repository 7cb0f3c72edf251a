"""Every file in configs/ resolves, and DeepSpeed itself takes its part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsx.config.resolve import resolve
from dsx.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(path.name for path in FOLDER.glob("*.json"))
SMALL = [name for name in CONFIGS if name.startswith("zero")]


def test_what_is_shipped():
    assert set(CONFIGS) == {
        "zero0.json",
        "zero1.json",
        "zero2.json",
        "zero3.json",
        "zero3_bf16.json",
        "zero3_offload.json",
        "3d_interleaved.json",
        "finetune.json",
        "chat_lora.json",
        "methods.json",
        "islands.json",
        "gpt2_124m.json",
        "llama3_8b_8gpu.json",
        "llama3_8b_elastic.json",
        "llama3_70b_64gpu.json",
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_plain_json(name):
    """HJSON is allowed, but other tools read only JSON."""
    json.loads((FOLDER / name).read_text())


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SMALL)
def test_small_ones_on_any_number_of_ranks(name, world_size):
    run = resolve(FOLDER / name, world_size=world_size)
    wanted = {1: (1, 1, 1), 2: (1, 1, 2), 4: (1, 2, 2), 8: (2, 2, 2)}[world_size]
    assert (run.mesh.tp, run.mesh.pp, run.mesh.dp) == wanted
    assert run.dsx.tracking.wandb.mode == "offline"
    layout = f"pp{run.mesh.pp}-dp{run.mesh.dp}-tp{run.mesh.tp}"
    assert run.output == Path("runs") / f"{Path(name).stem}-{layout}"
    # Nothing is compiled on a machine without a GPU.
    assert not any("compiles" in note for note in run.notes)


@pytest.mark.parametrize("name", SMALL)
def test_the_same_batch_on_any_number_of_ranks(name):
    """So that its losses do not depend on the number of ranks."""
    assert len({resolve(FOLDER / name, world_size=n).global_batch_size for n in (1, 2, 4, 8)}) == 1


@pytest.fixture
def model_folder(tmp_path):
    """A Hugging Face folder as far as configs are concerned: nothing reads the weights here."""
    config = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    return tmp_path


def overrides(name, model_folder):
    """What a shipped config lacks: those that fine-tune have no model folder, nor chats, of their own."""
    if name not in FINE_TUNING:
        return []
    (model_folder / "chats.jsonl").touch()
    return [f"dsx.model.path={model_folder}", *FINE_TUNING[name](model_folder)]


FINE_TUNING = {
    "finetune.json": lambda folder: [],
    "chat_lora.json": lambda folder: [
        f"dsx.data.source={folder / 'chats.jsonl'}",
        "dsx.data.sequence_length=512",
    ],
}


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize(("name", "batch"), [("finetune.json", 16), ("chat_lora.json", 32)])
def test_finetune(model_folder, world_size, name, batch):
    run = resolve(FOLDER / name, world_size=world_size, overrides=overrides(name, model_folder))
    assert run.weights == model_folder
    assert run.dsx.data.tokenizer == str(model_folder)
    assert run.dsx.train.export_hf
    assert run.global_batch_size == batch
    assert (run.model.adapter is not None) == run.dsx.data.keeps_apart == (name == "chat_lora.json")


@pytest.mark.parametrize("name", FINE_TUNING)
def test_finetune_needs_a_folder(name):
    with pytest.raises(ConfigError, match=r'dsx.model.path = "MODEL_FOLDER": there is no file'):
        resolve(FOLDER / name, world_size=1)


def ranks_of(name):
    """A shipped config's own number of ranks."""
    return {"llama3_70b_64gpu.json": 64, "methods.json": 4, "islands.json": 4}.get(name, 8)


@pytest.mark.parametrize("name", CONFIGS)
def test_dsx_check_has_nothing_against_it(dsx, model_folder, name):
    """But for tokenizers of the hub, which no test can look up."""
    gpus, put = ranks_of(name), (("--set", item) for item in overrides(name, model_folder))
    code, out, _ = dsx("check", FOLDER / name, "--no-machine", "--json", "--gpus", gpus, *sum(put, ()))
    (one,) = json.loads(out)["files"]
    found = [finding["key"] for finding in one["findings"] if finding["severity"] != "note"]
    assert found in ([], ["dsx.data.tokenizer"])
    assert code == 0
    assert one["resolved"]


@pytest.mark.parametrize("world_size", [4, 8, 16])
def test_3d_interleaved(world_size):
    run = resolve(FOLDER / "3d_interleaved.json", world_size=world_size)
    assert (run.mesh.tp, run.mesh.pp, run.chunks, run.mesh.dp) == (2, 2, 2, world_size // 4)
    assert run.schedule_name == "interleaved"


@pytest.mark.parametrize(
    ("name", "world_size", "wanted", "parameters"),
    [
        ("gpt2_124m.json", 1, (1, 1, 1, 1), 124_439_808),
        ("gpt2_124m.json", 8, (1, 1, 1, 8), 124_439_808),
        ("llama3_8b_8gpu.json", 8, (2, 2, 2, 2), 8_030_261_248),
        ("llama3_70b_64gpu.json", 64, (8, 4, 5, 2), 70_553_706_496),
    ],
)
def test_gpu_ones(name, world_size, wanted, parameters):
    run = resolve(FOLDER / name, world_size=world_size)
    assert (run.mesh.tp, run.mesh.pp, run.chunks, run.mesh.dp) == wanted
    assert run.num_parameters == parameters
    assert run.precision == "bf16"


@pytest.mark.parametrize("name", SMALL)
def test_stage_in_the_name(name):
    assert resolve(FOLDER / name, world_size=1).zero_stage == int(name[4])


class Grid:
    """What DeepSpeed asks of an mpu to learn the data-parallel degree."""

    def __init__(self, dp):
        self.dp = dp

    def get_data_parallel_world_size(self):
        return self.dp


@pytest.mark.parametrize("name", CONFIGS)
def test_deepspeed_takes_its_part(name, model_folder, monkeypatch):
    from deepspeed.runtime import config

    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    run = resolve(FOLDER / name, world_size=ranks_of(name), overrides=overrides(name, model_folder))
    # Its constructor asserts the batch triple for the grid's data-parallel degree.
    theirs = config.DeepSpeedConfig(run.deepspeed, mpu=Grid(run.mesh.dp))
    assert theirs.world_size == run.mesh.dp
    assert theirs.train_batch_size == run.global_batch_size
    assert theirs.zero_optimization_stage == run.zero_stage
    assert theirs.gradient_clipping == run.gradient_clipping
    assert theirs.bfloat16_config.enabled == (run.precision == "bf16")
