"""Values of TrainingArguments: dsx.Trainer beside transformers' Trainer, in one process each.

Every field that dsx.Trainer honours and that can change a figure, an event or a file has a case.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

import ranks
from dsx.trainer.arguments import HONOURED
from trainer import scripts_of_both as scripts

JSON = {"zero_optimization": {"stage": 1}, "dsx": {"parallel": {"tensor": 1, "pipeline": 1}}}
FIGURES = ("loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen", "train_loss")

TIMES = ("runtime", "per_second")

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
BY_METRIC = {"metric_for_best_model": "accuracy", "METRICS": True}
EVERY_SECOND = {"save_strategy": "steps", "save_steps": 2}
BEST = {**EVALUATED, **EVERY_SECOND, "load_best_model_at_end": True}
# A key in capitals is the script's, the others are those of TrainingArguments.
EQUAL: dict[str, dict[str, Any]] = {
    "cosine after a share of warmup": {"lr_scheduler_type": "cosine", "warmup_steps": 0.4},
    "restarts": {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    "polynomial": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-4, "power": 2.0}},
    "constant": {"lr_scheduler_type": "constant", "warmup_steps": 2},
    "constant after warmup": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2},
    "inverse root": {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 3}},
    "least rate": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}},
    "least rate after warmup": {
        "lr_scheduler_type": "cosine_warmup_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-4, "warmup_lr_rate": 0.1},
        "warmup_steps": 2,
    },
    "stable": {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2}},
    "sgd": {"optim": "sgd", "learning_rate": 0.5, "weight_decay": 0.2},
    "adam": {"optim": "adamw_torch", "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3},
    "buffers that are stored": {"MODEL": "glm4_moe"},
    "decay but of biases and norms": {"MODEL": "qwen2", "weight_decay": 0.5},
    "no clipping": {"max_grad_norm": 0.0},
    "clipping": {"max_grad_norm": 0.05},
    "accumulation with a short last step": {"gradient_accumulation_steps": 3, "SAMPLES": 11},
    "whole batches": {
        **EVALUATED,
        "dataloader_drop_last": True,
        "per_device_eval_batch_size": 3,
        "SAMPLES": 11,
    },
    "seed": {"seed": 123},
    "seed of the data": {"data_seed": 5, "num_train_epochs": 2, "max_steps": -1},
    "by length": {"train_sampling_strategy": "group_by_length", "length_column_name": "long", "max_steps": 4},
    "in order": {"train_sampling_strategy": "sequential"},
    "part of an epoch": {"num_train_epochs": 1.5, "max_steps": -1},
    "steps over epochs": {"max_steps": 9, "logging_steps": 4, "logging_first_step": True},
    "shares of all steps": {
        "logging_steps": 0.3,
        "eval_strategy": "steps",
        "eval_steps": 0.4,
        "save_strategy": "steps",
        "save_steps": 0.5,
    },
    "epochs": {
        **dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "epoch"),
        "save_total_limit": 1,
        "max_steps": -1,
    },
    "no logs": {"logging_strategy": "no"},
    "evaluated later": {**EVALUATED, "eval_steps": 1, "eval_delay": 3},
    "evaluated before": {"eval_on_start": True},
    "best by loss": {**BEST, "save_total_limit": 1},
    "best by a metric": {**BEST, **BY_METRIC, "greater_is_better": True},
    "worst by a metric": {**BEST, **BY_METRIC, "greater_is_better": False},
    "best alone of weights alone": {
        **EVALUATED,
        **EVERY_SECOND,
        "save_only_model": True,
        "metric_for_best_model": "loss",
        "save_total_limit": 1,
    },
    "best alone": {**EVALUATED, "save_strategy": "best", "metric_for_best_model": "loss"},
    "best of several": {**BEST, "metric_for_best_model": "first_loss", "SEVERAL": True},
    "weights alone": {**EVERY_SECOND, "save_only_model": True, "save_total_limit": 1},
    "lists of batches": {**EVALUATED, "eval_do_concat_batches": False, "METRICS": True},
    "inputs and losses": {**EVALUATED, "include_for_metrics": ["inputs", "loss"], "METRICS": True},
    "losses alone": {**EVALUATED, "prediction_loss_only": True, "METRICS": True},
    "often on the host": {
        **EVALUATED,
        "eval_accumulation_steps": 1,
        "eval_use_gather_object": True,
        "METRICS": True,
    },
    "other columns": {"COLUMNS": True},
    "no other columns": {"remove_unused_columns": False},
    "every token": {"include_num_input_tokens_seen": "all"},
    "trained tokens": {"include_num_input_tokens_seen": "non_padding"},
    "computed again": {"activation_checkpointing": True, "torch_empty_cache_steps": 2},
    "nothing for one rank": {
        "average_tokens_across_devices": False,
        "ddp_find_unused_parameters": True,
        "ddp_bucket_cap_mb": 3,
        "do_train": True,
        "hub_model_id": "nobody/nothing",
        "label_names": ["labels"],
        "log_on_each_node": False,
        "use_cache": True,
    },
    "resumed": {"RESUMED": True, **EVERY_SECOND, "max_steps": 6},
    "resumed at the first sample": {
        "RESUMED": True,
        "ignore_data_skip": True,
        **EVERY_SECOND,
        "max_steps": 6,
        "train_sampling_strategy": "sequential",
    },
    "resumed with its callbacks": {
        "RESUMED": True,
        "restore_callback_states_from_checkpoint": True,
        **EVERY_SECOND,
    },
    "stopped early": {**BEST, "PATIENCE": 1, "learning_rate": 0.0},
    "workers": {
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 3,
    },
}  # fmt: skip
# What says where figures go, and how a loader works, has no figure of its own; of half precisions the JSON's
# is computed, not the Trainer's autocast.
NO_FIGURE = {
    "bf16", "dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_pin_memory", "deepspeed",
    "disable_tqdm", "fp16", "full_determinism", "gradient_checkpointing", "log_level", "log_level_replica",
    "logging_nan_inf_filter", "output_dir", "per_device_train_batch_size", "project", "report_to", "run_name",
    "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id",
}  # fmt: skip


GLM = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
}


def test_every_argument_that_is_honoured_has_a_case():
    named = {name for case in EQUAL.values() for name in case}
    assert set(HONOURED) - NO_FIGURE <= named
    assert len(EQUAL) >= 35


class Texts(Dataset):
    """Rows of different lengths, and columns that no model takes."""

    def __init__(self, texts: scripts.Texts, columns: bool) -> None:
        self.texts, self.columns = texts, columns

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.texts[index]
        return {**row, "comment": "words"} if self.columns else row


class Counting(TrainerCallback, ExportableState):
    """Counts steps, which a checkpoint remembers."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"steps": self.steps}, "attributes": {}}


def metrics(given: Any) -> dict[str, float]:
    """Figures of everything that is given."""
    several = isinstance(given.predictions, list)
    predicted = given.predictions if several else [given.predictions]
    labels = given.label_ids if several else [given.label_ids]
    right = sum(
        float(((p[:, :-1] == y[:, 1:]) & (y[:, 1:] != -100)).sum())
        for p, y in zip(predicted, labels, strict=True)
    )
    found = {
        "accuracy": right / sum(float((y[:, 1:] != -100).sum()) for y in labels),
        "parts": len(predicted),
    }
    for name in ("inputs", "losses"):
        if getattr(given, name, None) is not None:
            found[name] = float(np.asarray(getattr(given, name), dtype=float).sum())
    return found


def outcome(kind: Any, folder: Path, model: str, case: dict[str, Any], *, deepspeed: Any) -> dict[str, Any]:
    """What a script leaves behind: figures, events, files and predictions."""
    own = {name: value for name, value in case.items() if name.isupper()}
    values = {name: value for name, value in case.items() if not name.isupper()}
    given = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "max_steps": 5,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 7,
    }
    texts, words, seen = (
        scripts.Texts(own.get("SAMPLES", 8), seed=1, longest=12),
        scripts.tokenizer(),
        scripts.Events(),
    )
    held_out: Any = scripts.Texts(7, seed=2, longest=12)
    if "SEVERAL" in own:
        held_out = {"first": held_out, "second": scripts.Texts(3, seed=4, longest=12)}

    def trainer(**others: Any) -> Any:
        args = TrainingArguments(
            str(folder),
            deepspeed=deepspeed,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            **given | values | others,
        )
        seen.seen.clear()
        early = [EarlyStoppingCallback(own["PATIENCE"])] if "PATIENCE" in own else []
        return kind(
            model=AutoModelForCausalLM.from_pretrained(model),
            args=args,
            train_dataset=Texts(texts, "COLUMNS" in own),
            eval_dataset=held_out,
            data_collator=scripts.Collator(words, mlm=False),
            processing_class=words,
            compute_metrics=metrics if "METRICS" in own else None,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            callbacks=[seen, Counting(), *early],
        )

    made = trainer()
    if "RESUMED" in own:
        made.train()
        made = trainer(max_steps=8)
    result = made.train(resume_from_checkpoint=True if "RESUMED" in own else None)
    predicted = made.predict(scripts.Texts(5, seed=3, longest=12))
    made.save_model(str(folder / "model"))
    config = json.loads((folder / "model" / "config.json").read_text())
    counting = next(each for each in made.callback_handler.callbacks if isinstance(each, Counting))
    ids, labels = predicted.predictions, predicted.label_ids
    if isinstance(ids, list):
        ids, labels = (np.concatenate([part.ravel() for part in each]) for each in (ids, labels))
    return {
        "history": made.state.log_history,
        "events": list(seen.seen),
        "step": result.global_step,
        "best": Path(made.state.best_model_checkpoint or "").name,
        "folders": sorted(path.name for path in folder.glob("checkpoint-*")),
        "counted": counting.steps,
        "predictions": None if ids is None else ids[labels != -100].tolist(),
        "buffers": stored_buffers(folder / "model"),
        "generation": json.loads((folder / "model" / "generation_config.json").read_text()),
        "tokens": {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def with_buffers(folder: Path) -> str:
    """A model whose routers have biases, which are buffers that are stored."""
    torch.manual_seed(1)
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **GLM))
    for name, buffer in whole.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-1, 1)
    whole.save_pretrained(folder)
    return str(folder)


def stored_buffers(folder: Path) -> dict[str, list[float]]:
    """The biases of the routers in a folder."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    return {name: each.tolist() for name, each in tensors.items() if "e_score" in name}


def difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The first difference between two outcomes."""
    if len(mine["history"]) != len(theirs["history"]):
        return f"{len(mine['history'])} lines of logs, not {len(theirs['history'])}"
    for here, there in zip(mine["history"], theirs["history"], strict=True):
        if set(here) != set(there):
            return f"step {there['step']}: {sorted(set(here) ^ set(there))} in one of two logs"
        for key in there:
            figure = key in FIGURES or (key.startswith("eval_") and not key.endswith(TIMES))
            if figure and here[key] != pytest.approx(there[key], rel=2e-5, abs=1e-5):
                return f"step {there['step']}: {key} = {here[key]}, not {there[key]}"
    differing = [name for name in theirs if name != "history" and mine[name] != theirs[name]]
    return f"{differing[0]}: {mine[differing[0]]}, not {theirs[differing[0]]}" if differing else None


def differences(rank: int, world_size: int, names: list[str], folder: str) -> dict[str, str]:
    """Cases that differ."""
    import dsx

    scripts.alone()
    models = {each: str(scripts.write_model(each, Path(folder) / each)) for each in ("llama", "qwen2")}
    if any("MODEL" in EQUAL[name] for name in names):
        models["glm4_moe"] = with_buffers(Path(folder) / "glm4_moe")

    def tried(kind: Any, name: str, deepspeed: Any) -> Any:
        place, case = Path(folder) / kind.__module__ / name, EQUAL[name]
        try:
            return outcome(kind, place, models[case.get("MODEL", "llama")], case, deepspeed=deepspeed)
        except Exception as error:  # noqa: BLE001 - the test tells all of them together
            return f"{kind.__module__}: {type(error).__name__}: {error}"

    wanted = {name: tried(Trainer, name, None) for name in names}
    found = {}
    for name in names:
        both = tried(dsx.Trainer, name, JSON), wanted[name]
        wrong = [each for each in both if isinstance(each, str)]
        found[name] = wrong[0] if wrong else difference(*both)
    return {name: problem for name, problem in found.items() if problem is not None}


OFTEN = list(EQUAL)[::5]
SELDOM = [name for name in EQUAL if name not in OFTEN]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(OFTEN, id="often"),
        pytest.param(SELDOM[::2], id="seldom", marks=pytest.mark.slow),
        pytest.param(SELDOM[1::2], id="seldom too", marks=pytest.mark.slow),
    ],
)
def test_scenarios_are_those_of_transformers(tmp_path, names):
    assert ranks.run(differences, 1, names, str(tmp_path), timeout=600)[0] == {}
