"""A script in the manner of transformers' run_clm.py, for either Trainer, and what it leaves behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    GenerationConfig,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 131,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
    "qwen2": {
        "vocab_size": 131,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "vocab_size": 131,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
}

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"zero_optimization": {"stage": 0}, "dsx": {"parallel": {"tensor": 2, "pipeline": 1}}},
    "pp2": {
        "zero_optimization": {"stage": 1},
        "dsx": {"parallel": {"tensor": 1, "pipeline": 2, "chunks": 2}},
    },
    "dp2": {"zero_optimization": {"stage": 3}, "dsx": {"parallel": {"tensor": 1, "pipeline": 1}}},
    "cp2": {
        "zero_optimization": {"stage": 1},
        "dsx": {"parallel": {"tensor": 1, "pipeline": 1, "context": 2}},
    },
    "tp2-pp2": {
        "zero_optimization": {"stage": 2},
        "dsx": {"parallel": {"tensor": 2, "pipeline": 2, "chunks": 1}},
    },
}
RANKS = {"tp2": 2, "pp2": 2, "dp2": 2, "cp2": 2, "tp2-pp2": 4}
SHARES = {"tp2": 1, "pp2": 1, "dp2": 2, "cp2": 1, "tp2-pp2": 1}


def config_of(family: str) -> Any:
    return AutoConfig.for_model(family, **FAMILIES[family])


def write_model(family: str, folder: Path) -> Path:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config_of(family)).save_pretrained(folder)
    return folder


class Texts(Dataset):
    """Samples as a tokenizer gives them: ids of random words, of different lengths."""

    def __init__(self, count: int, *, seed: int, longest: int = 24, shortest: int = 6) -> None:
        drawn = torch.Generator().manual_seed(seed)
        lengths = torch.randint(shortest, longest + 1, (count,), generator=drawn)
        self.samples = [torch.randint(3, 131, (int(n),), generator=drawn).tolist() for n in lengths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.samples[index]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}


class Streamed(IterableDataset):
    """The same samples, one after the other, of a number that nobody knows."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts

    def __iter__(self) -> Any:
        return (self.texts[index] for index in range(len(self.texts)))


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w2"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w2")


class Events(TrainerCallback):
    """Notes every event, and where training is."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):

            def note(args: Any, state: Any, control: Any, **_: Any) -> None:
                self.seen.append((name, state.global_step))

            return note
        return super().__getattribute__(name)


class Collator(DataCollatorForLanguageModeling):
    """Gives no label to a row's first token, which no model predicts.

    transformers 5.23 counts it among the trained tokens where a model's class is not called ForCausalLM
    (GPT-2's is not), and so divides the loss by more tokens than it is the sum of.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        batch = super().__call__(*args, **options)
        batch["labels"][:, 0] = -100
        return batch


def alone() -> None:
    """Leave the process group and forget the launcher: what follows is one process."""
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        os.environ.pop(name, None)


def accuracy(given: Any) -> dict[str, float]:
    predicted = (
        given.predictions[:, :-1].argmax(-1) if given.predictions.ndim == 3 else given.predictions[:, :-1]
    )
    labels = given.label_ids[:, 1:]
    return {"accuracy": float(((predicted == labels) & (labels != -100)).sum() / (labels != -100).sum())}


def run(
    kind: Any,
    folder: Path,
    model: Any,
    *,
    deepspeed: dict[str, Any] | None,
    shares: int = 1,
    accumulation: int = 4,
    samples: int = 37,
    resume: Any = None,
    stop_after: int | None = None,
    streamed: bool = False,
    packed: bool = False,
    shortest: int = 6,
    longest: int = 24,
    save: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """Train, evaluate and predict with transformers' Trainer or dsx's."""
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": accumulation // shares,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "warmup_steps": 3,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "epoch",
        "include_num_input_tokens_seen": "non_padding",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "optim": "adamw_torch",
        "seed": 7,
        "label_names": ["labels"],  # which nobody sees in the signature of a model of PEFT's
    }
    args = TrainingArguments(**{**given, **arguments}, deepspeed=deepspeed)
    words, events, texts = tokenizer(), Events(), Texts(samples, seed=1, shortest=shortest, longest=longest)
    trainer = kind(
        model=model,
        args=args,
        train_dataset=Streamed(texts) if streamed else texts,
        eval_dataset=Texts(11, seed=2, longest=12),
        data_collator=DataCollatorWithFlattening() if packed else Collator(words, mlm=False),
        processing_class=words,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        callbacks=[events] + ([StopAfter(stop_after)] if stop_after else []),
    )
    result = trainer.train(resume_from_checkpoint=resume)
    predicted = trainer.predict(Texts(5, seed=3, longest=12))
    saved = {}
    if save:
        trainer.save_model(str(folder / "model"))
        saved["max_length"] = GenerationConfig.from_pretrained(folder / "model").max_length
    return saved | {
        "history": trainer.state.log_history,
        "events": events.seen,
        "step": result.global_step,
        "metrics": result.metrics,
        # Padding sees other tokens: nothing masks it where it is at the end.
        "predictions": predicted.predictions[predicted.label_ids != -100],
        "test": predicted.metrics,
        "flos": trainer.state.total_flos,
    }


class StopAfter(TrainerCallback):
    """Saves and stops after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def config(layout: str) -> dict[str, Any]:
    """A DeepSpeed JSON as Trainer users write it."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        **LAYOUTS[layout],
    }


def with_adapter(whole: Any, start: bool | str = True) -> Any:
    """The model under PEFT's LoRA, which begins with ``start``, with one module that is trained itself."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    lora = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "down_proj"],
        modules_to_save=["lm_head"],
        init_lora_weights=start,
    )
    return get_peft_model(whole, lora)


def frozen(whole: Any) -> Any:
    """The model with its embedding and first block frozen, and generation settings of its own."""
    for part in (whole.get_input_embeddings(), whole.get_decoder().layers[0]):
        part.requires_grad_(False)
    whole.generation_config.max_length = 77
    return whole


def theirs(rank: int, world_size: int, folder: str, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """transformers' Trainer in one process, without DeepSpeed, in fp32."""
    from transformers import Trainer

    alone()
    # "eager" attention keeps documents apart that are laid end to end, as positions say.
    whole = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    if start := options.pop("lora", False):
        whole = with_adapter(whole, start)
    if options.pop("frozen", False):
        whole = frozen(whole)
    return run(Trainer, Path(folder), whole, deepspeed=None, **options)


def ours(
    rank: int, world_size: int, layout: str, folder: str, model: str, options: dict[str, Any]
) -> dict[str, Any]:
    import dsx

    given: Any = model
    if options.pop("instance", False):
        given = AutoModelForCausalLM.from_pretrained(model)
    if options.pop("frozen", False):
        given = frozen(AutoModelForCausalLM.from_pretrained(model))
    if start := options.pop("lora", False):
        given = with_adapter(AutoModelForCausalLM.from_pretrained(model), start)
    return run(dsx.Trainer, Path(folder), given, deepspeed=config(layout), shares=SHARES[layout], **options)
