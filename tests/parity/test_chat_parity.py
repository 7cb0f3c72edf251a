"""Chats fine-tuned from records to losses: any layout has those of one process of transformers and PEFT.

dsx reads the records, renders them by the model's own template, packs them and trains. The reference gets the
same packs with transformers' own masks for packed positions, and divides by the trained tokens of a step.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import ranks
from often import often
from parity.dsx_run import Case
from parity.oracle import ADAMW, CLIPPING

STEPS, MICRO_BATCH, SEQUENCE = 4, 2, 192
CASES = [
    Case(family="lora", tp=2, zero=1, accumulation=4),
    Case(family="full", pp=2, chunks=2, zero=1, accumulation=4),
    Case(family="lora", pp=2, chunks=2, zero=2, accumulation=4),
    Case(family="full", tp=2, zero=1, accumulation=4),
    Case(family="lora", dp=2, zero=3, accumulation=2),
    Case(family="full", dp=2, zero=3, accumulation=2),
    Case(family="full", tp=2, pp=2, zero=2, accumulation=4, recompute="full"),
    Case(family="lora", tp=2, pp=2, zero=2, accumulation=4, recompute="full"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with its own template, an adapter of PEFT's whose products are not zero, and chats."""
    from peft import LoraConfig, get_peft_model

    sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
    from chat_tokenizers import published, save_tokenizer

    made = tmp_path_factory.mktemp("chats")
    save_tokenizer(made / "model", template=published("qwen2_5"))
    torch.manual_seed(3)
    sizes = Qwen2Config(
        vocab_size=1216,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM(sizes)
    model.save_pretrained(made / "model")
    settings = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    )
    adapted = get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(made / "adapter")
    draw = random.Random(5)
    words = inspect.cleandoc(__doc__).split()
    with (made / "chats.jsonl").open("w") as file:
        for number in range(250):
            turns = [{"role": "system", "content": "Be brief."}] if number % 7 == 0 else []
            for _ in range(draw.choice((1, 1, 2, 3))):
                for role in ("user", "assistant"):
                    content = " ".join(draw.choices(words, k=draw.choice((1, 2, 3, 12))))
                    turns.append({"role": role, "content": content})
            file.write(json.dumps({"messages": turns}) + "\n")
    return made


def config(case: Case, folder: Path) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": case.zero},
        "optimizer": {
            "type": "AdamW",
            "params": {**ADAMW, "betas": list(ADAMW["betas"]), "torch_adam": True},
        },
        "dsx": {
            "model": {"path": str(folder / "model"), "vocab_multiple": 8},
            **({"adapter": {"path": str(folder / "adapter")}} if case.family == "lora" else {}),
            "parallel": {"tensor": case.tp, "pipeline": case.pp, "chunks": case.chunks},
            "recompute": case.recompute,
            "data": {
                "source": str(folder / "chats.jsonl"),
                "format": "chat",
                "sequence_length": SEQUENCE,
                "held_out": 0.1,
                "prefetch": 0,
            },
            "train": {"steps": STEPS, "output": str(folder / str(case))},
        },
    }


Packs = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Ids, positions and labels of every micro-batch of a step, each int64 [B, S]."""


def train(rank: int, world_size: int, case: Case, folder: Path) -> tuple[list[float], float, list[Packs]]:
    """Losses, the held-out loss after them, and the packs that this rank has read."""
    import dsx
    from dsx.parallel.groups import make_groups

    run = dsx.load_config(config(case, folder), world_size=world_size)
    groups = make_groups(run.mesh, sequence_parallel=run.dsx.parallel.sequence_parallel)
    corpus = dsx.recipe.open_data(run, dsx.recipe.prepare_data(run) if rank == 0 else None)
    engine = dsx.recipe.build_engine(run, groups)
    read: list[Packs] = []
    losses = []
    for step in range(STEPS):
        cursor = step * run.global_batch_size
        batches = dsx.recipe.training_batches(run, corpus, dp_rank=groups.dp_rank, cursor=cursor)
        mine = [next(batches) for _ in range(case.accumulation)]
        read.append([(ids, positions, labels) for (ids, positions), labels in mine])
        losses.append(float(engine.train_batch(iter(mine))))
    held_out = dsx.recipe.evaluate(run, engine, corpus)
    assert isinstance(held_out, float)
    return losses, held_out, read


def reference(folder: Path, adapted: bool, steps: list[Packs]) -> list[float]:
    """Losses of one process."""
    from peft import PeftModel

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if adapted:
        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    losses = []
    for packs in steps:
        count = sum(int((labels != -100).sum()) for *_, labels in packs)
        optimizer.zero_grad()
        total = 0.0
        for ids, positions, labels in packs:
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, CLIPPING)
        optimizer.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize("case", often(CASES, 9), ids=str)
def test_chats_train_as_in_one_process(case: Case, folder: Path) -> None:
    runs = ranks.run(train, case.world_size, case, folder)
    # The replicas' packs together are the global batch, in whatever order; the first tensor-parallel rank of
    # the first stage of each stands for it.
    replicas = [runs[dp * case.tp] for dp in range(case.dp)]
    steps = [[pack for _, _, read in replicas for pack in read[step]] for step in range(STEPS)]
    rows = [sorted(row for ids, *_ in packs for row in ids.tolist()) for packs in steps]
    first = folder / "packs.json"
    if not first.exists():
        first.write_text(json.dumps(rows))
    assert rows == json.loads(first.read_text()), "every layout trains on the same packs"
    trained = [int((labels != -100).sum()) for packs in steps for *_, labels in packs]
    assert len(set(trained)) > len(trained) // 2, "micro-batches must differ for the comparison to mean it"
    assert any(int((positions == 0).sum()) > 2 * MICRO_BATCH for packs in steps for _, positions, _ in packs)
    expected = reference(folder, case.family == "lora", steps)
    assert {tuple(losses) for losses, *_ in runs} == {tuple(runs[0][0])}
    assert runs[0][0] == pytest.approx(expected, rel=1e-5)
    assert len({held_out for _, held_out, _ in runs}) == 1
