"""Tokenizers for tests of chats, made offline: byte-level BPE as GPT-2's, and metaspace BPE as Llama 2's."""

from __future__ import annotations

import inspect
from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TRL = Path(trl.__file__).parent / "chat_templates"
"""Published templates under their models' names, and copies of them with generation marks."""

# What published templates write as one token each.
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|im_sep|>"),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    *("<|SYSTEM_TOKEN|>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "[INST]", "[/INST]"),
)


def save_tokenizer(
    folder: Path, *, template: str | None = None, metaspace: bool = False, adds_begin: bool = False
) -> PreTrainedTokenizerFast:
    """Write a tokenizer of about 900 words into ``folder``.

    Args:
        folder: Where.
        template: Its chat template.
        metaspace: A word begins with the space before it, and the first with one that is not there.
        adds_begin: It puts ``<s>`` before every text by itself.
    """
    words = Tokenizer(models.BPE(byte_fallback=metaspace, unk_token="<unk>" if metaspace else None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", *SPECIAL]
    if metaspace:
        words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        words.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet, special = [], [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        words.decoder = decoders.ByteLevel()
    text = [line for module in (inspect, decoders) for line in (module.__doc__ or "").splitlines()]
    text += inspect.getsource(inspect).splitlines()[:800]
    words.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=1200, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    if adds_begin:
        words.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", words.token_to_id("<s>"))]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )
    made.save_pretrained(folder)
    return made


def published(name: str) -> str:
    """The text of a template."""
    return (TRL / f"{name}.jinja").read_text(encoding="utf-8")
