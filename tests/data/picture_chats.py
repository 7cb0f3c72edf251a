"""Chats with pictures, and a processor for them, made offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Gemma3ImageProcessorPil, Gemma3Processor, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<turn>", "<end>", "<image>", "<begin>", "<done>"]
IMAGE, BEGIN, DONE = (SPECIAL.index(word) for word in SPECIAL[5:])
_PARTS = (
    "{% for c in m.content %}{% if c.type == 'image' %}<begin>{% else %}{{ c.text }}{% endif %}{% endfor %}"
)
_SAID = "{% if m.content is string %}{{ m.content }}{% else %}" + _PARTS + "{% endif %}<end>"
TEMPLATE = (
    "{% for m in messages %}<turn>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}" + _SAID + "{% endgeneration %}{% else %}" + _SAID + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def save_processor(folder: Path, *, marked: bool = True) -> Any:
    """Gemma 3's for pictures of 64 x 64 pixels, four tokens each; ``marked``: its template has marks."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(["what is in the picture"], trainer)
    named = {"boi_token": "<begin>", "eoi_token": "<done>", "image_token": "<image>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=named,
    )
    marks = ("{% generation %}", "{% endgeneration %}")
    template = TEMPLATE if marked else TEMPLATE.replace(marks[0], "").replace(marks[1], "")
    images = Gemma3ImageProcessorPil(size={"height": 64, "width": 64})
    made = Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template)
    made.save_pretrained(folder)
    return made


def chats(folder: Path, count: int = 12) -> list[list[dict[str, Any]]]:
    """Write ``chats.jsonl`` and pictures into a folder: with none, one or two a chat, by paths in it."""
    numbers = np.random.default_rng(0)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    found = []
    for n in range(count):
        pixels = numbers.integers(0, 255, (40 + n, 64 - 2 * n, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"pictures/{n}.png")
        shown = [{"type": "image", "path": f"pictures/{n}.png"}, {"type": "text", "text": f"what is {n}?"}]
        chat = [
            {"role": "user", "content": shown if n % 4 != 3 else f"say {n}"},
            {"role": "assistant", "content": f"it is {n}"},
        ]
        if n % 3 == 0:
            again = [{"type": "text", "text": "and "}, {"type": "image", "image": f"pictures/{n // 2}.png"}]
            chat += [{"role": "user", "content": again}, {"role": "assistant", "content": "what is"}]
        found.append(chat)
    lines = (json.dumps({"messages": chat}) + "\n" for chat in found)
    (folder / "chats.jsonl").write_text("".join(lines))
    return found


def absolute(chat: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """A chat for transformers: where its pictures are, and all content in parts."""
    out = []
    for turn in chat:
        content = turn["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        done = [
            part
            if part["type"] == "text"
            else {"type": "image", "path": str(folder / (part.get("path") or part["image"]))}
            for part in parts
        ]
        out.append({"role": turn["role"], "content": done})
    return out
