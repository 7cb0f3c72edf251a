"""Checkpoints of a Trainer, checkpoint-N in its output folder, and the model folders that it writes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, TrainerState
from transformers.trainer import PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME
from transformers.utils import GENERATION_CONFIG_NAME

from dsx.checkpoint import store
from dsx.checkpoint.formats.huggingface.names import CONFIG, INDEX
from dsx.checkpoint.run.export import export_hf
from dsx.engine.engine import PipelineEngine
from dsx.errors import CheckpointError
from dsx.launch.processes import agree

_STATE = "trainer_state"
_BATCH = "global_batch_size"


def save(engine: PipelineEngine, folder: Path, state: TrainerState, *, global_batch: int) -> None:
    """Write ``folder``, a checkpoint with the Trainer's state in it. Collective.

    The state is committed together with the weights, and once more as a file for people and other programs.
    """
    content = dataclasses.asdict(state)
    client = {_STATE: content, _BATCH: global_batch, "tokens": int(state.num_input_tokens_seen)}
    engine.save_checkpoint(folder.parent, tag=folder.name, client_state=client)
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    agree(lambda: store.write_atomically(folder / TRAINER_STATE_NAME, text.encode()))


def load(engine: PipelineEngine, folder: Path, *, global_batch: int | None) -> TrainerState:
    """Continue from a checkpoint of :func:`save`, whatever layout it was saved in. Collective.

    ``global_batch`` is the samples of a step, by which the data position is counted; None takes any.

    Raises:
        CheckpointError: It is none, or was trained on batches of another size.
    """
    _, client = engine.load_checkpoint(folder)
    content = client.get(_STATE)
    if not isinstance(content, Mapping):
        raise CheckpointError(
            str(folder),
            "no Trainer has saved it, so that its place in the data is not known",
            "resume a checkpoint-N of dsx.Trainer; other checkpoints become models by `dsx reshard --to hf`",
        )
    was = client.get(_BATCH)
    if global_batch is not None and was != global_batch:
        raise CheckpointError(
            str(folder),
            f"a step had {was} samples, and has {global_batch} here: the place in the data would be another",
            "change gradient_accumulation_steps so that per_device_train_batch_size x "
            f"gradient_accumulation_steps x data-parallel degree is {was}, or set ignore_data_skip=True",
        )
    return TrainerState(**content)


def keep_newest(folder: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints of ``folder`` but for ``limit``, the newest and the best one."""
    if limit is None or limit <= 0:
        return
    spared = () if best is None else (Path(best).name,)
    agree(lambda: store.prune(folder, keep=limit, spared=spared))


def keep_best(folder: Path, best: str) -> None:
    """Delete the checkpoints of ``folder`` but the best, as a Trainer that keeps one does at its end."""

    def alone() -> None:
        if (folder / store.LATEST).is_file():
            store.point_latest(folder, Path(best).name)
            store.prune(folder, keep=1)
        for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):  # weights alone
            if path.name != Path(best).name:
                store.remove(path)

    agree(alone)


_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_model(
    engine: PipelineEngine,
    folder: Path,
    tokenizer: Any,
    generation: GenerationConfig | None = None,
    says: Mapping[str, Any] | None = None,
) -> None:
    """Write the weights as a Hugging Face model folder. Collective.

    Args:
        engine: The engine.
        folder: Where. A folder that is there keeps its other files; a model in it is replaced when the new
            one is complete.
        tokenizer: It is saved beside the model, whose config and generation settings get its special tokens;
            None for none.
        generation: Generation settings to save; None for none.
        says: Keys of the config that are not as the layers were made of it.
    """
    assert engine.run_config is not None
    config, generation = {**engine.run_config.hf_config, **(says or {})}, deepcopy(generation)
    _align_tokens(tokenizer, config, generation)
    if engine.run_config.model.adapter is not None:  # an adapter's folder has none
        generation = None
    new = not agree(lambda: folder.is_dir() and any(folder.iterdir()))
    aside = folder if new else folder / ".model.dsx"
    if not new:
        agree(lambda: shutil.rmtree(aside, ignore_errors=True))
    else:
        agree(lambda: folder.parent.mkdir(parents=True, exist_ok=True))
    export_hf(engine, aside, config=config)
    if not new:
        agree(lambda: _replace(aside, folder))
    agree(lambda: None if tokenizer is None else tokenizer.save_pretrained(folder))
    # save_pretrained refuses settings that published models have, once a token in them has changed.
    agree(lambda: None if generation is None else generation.to_json_file(folder / GENERATION_CONFIG_NAME))


def _align_tokens(tokenizer: Any, config: dict[str, Any], generation: GenerationConfig | None) -> None:
    """Give config and generation settings a tokenizer's special tokens, as transformers' Trainer does."""
    for name in _TOKENS:
        token, own = getattr(tokenizer, name, None), config.get(name)
        held = None if generation is None else getattr(generation, name)
        several, olds = (value if isinstance(value, list) else [value] for value in (own, held))
        if token is None or (token in several and (generation is None or token in olds)):
            continue
        ends = name == "eos_token_id"  # each of which ends a text
        config[name] = (
            [token, *(old for old in several if old != token)] if ends and own is several else token
        )
        if generation is not None:
            more = [old for old in olds if old not in (None, token)]
            setattr(generation, name, [token, *more] if ends else token)


def _replace(aside: Path, folder: Path) -> None:
    """Move a complete model's files into ``folder``, those that name the others last."""
    files = sorted(path for path in aside.iterdir() if path.is_file())
    weights = {path.name for path in files if path.suffix == ".safetensors"}
    for last in (False, True):
        for path in files:
            if (path.name in (INDEX, CONFIG)) == last:
                path.replace(folder / path.name)
    for old in folder.glob("*.safetensors"):
        if old.name not in weights:
            old.unlink()
    if not any(path.name == INDEX for path in files):
        (folder / INDEX).unlink(missing_ok=True)
    store.remove(aside)
    store.sync_folder(folder)
