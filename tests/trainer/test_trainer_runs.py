"""Whole scripts under dsx.Trainer: a custom callback, the best model, folders that others read, signals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import is_deepspeed_zero3_enabled

import ranks
from config.sample_config import AUTO_DECAY
from trainer import scripts_of_both as scripts

PIPELINE = {"zero_optimization": {"stage": 1}, "dsx": {"parallel": {"tensor": 1, "pipeline": 2}}}


class Samples(torch.utils.data.Dataset):
    """Rows with one pattern, which is learnt within steps."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(index, index + 16) % 40 + 3
        return {"input_ids": ids, "labels": ids.clone(), "comment": "a column that no model takes"}


class Telling(TrainerCallback):
    """Notes what was logged, and asks for an evaluation of its own."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        assert kwargs["model"].config.model_type == "llama"
        assert kwargs["optimizer"] is not None
        self.logs.append(dict(logs))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_evaluate = control.should_evaluate or state.global_step == 4


def arguments(folder: str, **values: Any) -> TrainingArguments:
    given = {
        "output_dir": folder,
        "deepspeed": PIPELINE,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 9,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
        "logging_steps": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-2,
        "lr_scheduler_type": "constant",
    }
    return TrainingArguments(**{**given, **values})


def custom_callback(rank: int, world_size: int, folder: str, model: str) -> dict[str, Any]:
    import dsx

    telling, words = Telling(), scripts.tokenizer()
    # Larger is better, so that the first evaluation stays the best, and patience ends at the second.
    args = arguments(
        folder,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
        save_total_limit=1,
    )
    trainer = dsx.Trainer(
        model,
        args,
        train_dataset=Samples(),
        eval_dataset=Samples(),
        processing_class=words,
        callbacks=[telling, EarlyStoppingCallback(early_stopping_patience=1)],
        data_collator=lambda rows: {
            key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels")
        },
    )
    step = trainer.train().global_step
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics)
    trainer.save_state()
    trainer.save_model()
    trainer.save_model()  # over itself
    trainer.save_model(f"{folder}/again")
    trainer.create_model_card()
    trainer.end()
    return {
        "step": step,
        "logs": telling.logs,
        "metrics": metrics,
        "best": trainer.state.best_model_checkpoint,
        "parameters": trainer.get_num_trainable_parameters(),
    }


def test_a_custom_callback_script(tmp_path):
    model = scripts.write_model("llama", tmp_path / "model")
    out = tmp_path / "out"
    first, other = ranks.run(custom_callback, 2, str(out), str(model))
    assert first["metrics"]["eval_loss"] == other["metrics"]["eval_loss"]
    evaluated = [line["eval_loss"] for line in first["logs"] if "eval_loss" in line]
    assert (
        len(evaluated) == 3
    )  # after step 3, after step 4, which the callback asks for, and of the best model
    assert first["step"] == 4
    assert Path(first["best"]).name == "checkpoint-3"
    assert first["metrics"]["eval_loss"] == pytest.approx(evaluated[0], abs=1e-6)
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-3"]
    state = json.loads((out / "checkpoint-3" / "trainer_state.json").read_text())
    assert (state["global_step"], state["best_global_step"]) == (3, 3)
    names = {path.name for path in out.iterdir()}
    assert names >= {"README.md", "all_results.json", "config.json", "trainer_state.json", "tokenizer.json"}
    for folder in (out, out / "again"):
        whole = AutoModelForCausalLM.from_pretrained(folder)
        assert whole.config.pad_token_id == AutoTokenizer.from_pretrained(folder).pad_token_id == 0
        settings = (
            whole.generation_config
        )  # of the folder, with the tokenizer's tokens as transformers adds them
        assert (settings.eos_token_id, settings.pad_token_id) == ([1, 2], 0)
        assert first["parameters"] == whole.num_parameters()
        rows = [Samples()[index]["input_ids"] for index in range(32)]
        with torch.no_grad():
            loss = float(whole(input_ids=torch.stack(rows), labels=torch.stack(rows)).loss)
        assert loss == pytest.approx(first["metrics"]["eval_loss"], abs=1e-5)


def built_under_zero3(rank: int, world_size: int, folder: str, model: str) -> str:
    import dsx

    zero3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
    args = arguments(folder, deepspeed=PIPELINE | zero3, use_cpu=False)
    cut = AutoModelForCausalLM.from_pretrained(model)
    try:
        dsx.Trainer(cut, args, train_dataset=Samples(), eval_dataset=Samples())
    except dsx.DsxError as error:
        return str(error)
    return ""


def test_a_model_that_transformers_has_cut_by_zero3(tmp_path):
    model = scripts.write_model("llama", tmp_path / "model")
    for said in ranks.run(built_under_zero3, 2, str(tmp_path / "out"), str(model)):
        assert "deepspeed.zero.Init" in said
        assert f'Trainer(model="{model}")' in said


class Kill(TrainerCallback):
    """What a scheduler does to one rank of a job whose time is over."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)


def killed(rank: int, world_size: int, folder: str, model: str) -> int:
    import dsx

    args = arguments(folder, eval_strategy="no", save_strategy="no")
    trainer = dsx.Trainer(model, args, train_dataset=Samples(), callbacks=[Kill])
    return trainer.train().global_step


def test_a_signal_saves_and_ends_the_training(tmp_path):
    model = scripts.write_model("llama", tmp_path / "model")
    steps = ranks.run(killed, 2, str(tmp_path / "out"), str(model))
    assert steps[0] == steps[1] < 9
    assert (tmp_path / "out" / f"checkpoint-{steps[0]}" / "trainer_state.json").is_file()


def tuned(rank: int, world_size: int, folder: str, model: str) -> float:
    import dsx

    whole = scripts.with_adapter(AutoModelForCausalLM.from_pretrained(model))
    args = arguments(folder, eval_strategy="no", max_steps=4, save_steps=2)
    trainer = dsx.Trainer(whole, args, train_dataset=Samples(), eval_dataset=Samples())
    trainer.train()
    trainer.save_model()
    return trainer.evaluate()["eval_loss"]


@pytest.mark.slow
def test_peft_reads_the_adapter_that_was_trained(tmp_path):
    model = scripts.write_model("llama", tmp_path / "model")
    loss, _ = ranks.run(tuned, 2, str(tmp_path / "out"), str(model))
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "out")
    rows = torch.stack([Samples()[index]["input_ids"] for index in range(32)])
    with torch.no_grad():
        assert float(whole(input_ids=rows, labels=rows).loss) == pytest.approx(loss, abs=1e-5)


SCHEDULED = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": AUTO_DECAY | {"params": {**AUTO_DECAY["params"], "warmup_type": "linear"}},
}


def scheduled(rank: int, world_size: int, folder: str, model: str) -> list[float]:
    import dsx

    more = {"eval_strategy": "no", "save_strategy": "no", "logging_steps": 1, "warmup_steps": 3}
    args = arguments(folder, deepspeed=PIPELINE | SCHEDULED, **more)
    trainer = dsx.Trainer(model, args, train_dataset=Samples())
    trainer.train()
    return [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]


def test_optimizer_and_schedule_of_the_json(tmp_path):
    model = scripts.write_model("llama", tmp_path / "model")
    found, _ = ranks.run(scheduled, 2, str(tmp_path / "out"), str(model))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-2)
    schedule = WarmupDecayLR(
        optimizer, 9, warmup_min_lr=0.0, warmup_max_lr=3e-2, warmup_num_steps=3, warmup_type="linear"
    )
    wanted = []
    for _ in range(9):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == pytest.approx(wanted, abs=1e-12)


def proofs_at_zero3(rank: int, world_size: int, folder: str) -> list[str | None]:
    import dsx

    Path.home = lambda: Path(folder)  # type: ignore[method-assign]
    models = [str(scripts.write_model(family, Path(folder) / family)) for family in ("gpt2", "llama")]
    plain: dict[str, Any] = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
    plain["dsx"] = {"parallel": {"tensor": 1, "pipeline": 1}}
    args, found = arguments(f"{folder}/out", deepspeed=plain, max_steps=1, eval_strategy="no"), []
    for model in models:
        trainer = dsx.Trainer(model, args, train_dataset=Samples())
        trainer.train()
        found.append(trainer.engine.pipeline.proof)
        assert is_deepspeed_zero3_enabled()  # as TrainingArguments have it
    return found


def test_zero3_of_the_arguments_leaves_the_proof_its_weights(tmp_path: Path) -> None:
    (found,) = ranks.run(proofs_at_zero3, 1, str(tmp_path), proved=True)
    assert all("one rank as one process: loss" in words for words in found), found
