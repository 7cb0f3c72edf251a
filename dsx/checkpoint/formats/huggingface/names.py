"""Files of a Hugging Face model folder, and under which names a model's tensors may be stored in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsx.checkpoint import store
from dsx.checkpoint.catalog import leads_out
from dsx.checkpoint.json_text import parsed
from dsx.errors import CheckpointError
from dsx.models.config_values import unquantized
from dsx.models.param import Box, ParamSpec

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
}
"""Files of a model folder that are about its text."""
PROCESSOR_FILES = {
    "processor_config.json",
    "preprocessor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
}
"""Files of a composite model's folder about what it reads beside text."""
_LARGEST_JSON_BYTES = 1 << 26

# Hub files of the bare model (openai-community/gpt2) lack the language model's prefix.
_PREFIXES = ("transformer.", "model.", "gpt_neox.")
# transformers 5 calls GPT-NeoX's head as everybody's, and files have the old name (conversion_mapping.py).
OTHER_HEADS = {"embed_out.weight": "lm_head.weight", "lm_head.weight": "embed_out.weight"}
# Buffers that older transformers wrote as tensors: causal masks of GPT-2 and GPT-NeoX, rotary frequencies.
_BUFFER = re.compile(
    r".*(\.attn\.bias|\.attn\.masked_bias|\.rotary_emb\.inv_freq|layers\.\d+\.attention\.(masked_)?bias)"
)


def read_config(path: str | Path) -> dict[str, Any]:
    """Content of a ``config.json``, or of a model folder's, as that of plain weights.

    Raises:
        CheckpointError: As :func:`read_json`.
        ModelError: The weights are quantised in a way that dsx does not read.
    """
    path = Path(path)
    file = path / CONFIG if path.is_dir() else path
    return unquantized(read_json(file, "name a Hugging Face model folder, which has one"))


def read_json(file: Path, fix: str) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError, with ``fix``, if it is missing or holds none."""
    try:
        content = parsed(store.content_of(file, _LARGEST_JSON_BYTES))
    except FileNotFoundError:
        raise CheckpointError(str(file), "there is no such file", fix) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(str(file), f"not readable as JSON ({error})", fix) from error
    if not isinstance(content, dict):
        raise CheckpointError(str(file), "not a JSON object", fix)
    return content


def weight_map(index: Path, fix: str) -> dict[str, str]:
    """The file of every tensor, by the index of a folder with several."""
    told = read_json(index, fix).get("weight_map")
    if not isinstance(told, dict):
        raise CheckpointError(str(index), "it has no weight_map", fix)
    for file in set(map(str, told.values())):
        if leads_out(file) or "/" in file or file == ".":
            raise CheckpointError(
                f"{index}: {file!r}", "it leads out of the model's folder", "do not trust this folder"
            )
    return {name: str(file) for name, file in told.items()}


def is_buffer(name: str) -> bool:
    """Whether a stored tensor is no parameter.

    >>> is_buffer("gpt_neox.layers.0.attention.bias"), is_buffer("gpt_neox.layers.0.attention.dense.bias")
    (True, False)
    """
    return _BUFFER.fullmatch(name) is not None


def head_of(name: str) -> str:
    """Name of the head that is tied to the word embedding called ``name``.

    >>> head_of("gpt_neox.embed_in.weight")
    'embed_out.weight'
    """
    return "embed_out.weight" if name.startswith("gpt_neox.") else "lm_head.weight"


def stored_names(spec: ParamSpec, name: str) -> Iterator[str]:
    """Names under which a tensor of ``spec`` may be stored: its own, then what other writers call it."""
    yield name
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            yield name.removeprefix(prefix)
    if name in OTHER_HEADS:
        yield OTHER_HEADS[name]
    yield from tied_names(spec)


def tied_names(spec: ParamSpec) -> tuple[str, ...]:
    """Names of the copies of a tied tensor that some writers store as well."""
    if spec.tie is None:
        return spec.hf_copies
    head = head_of(spec.hf[0])
    known = (*spec.hf_copies, *spec.hf)
    return (*spec.hf_copies, *(name for name in (head, OTHER_HEADS[head]) if name not in known))


def in_memory(spec: ParamSpec) -> ParamSpec:
    """The tensor under the name that transformers' own module has for it."""
    if not spec.hf_whole:
        return spec
    form: dict[str, Any] = {"hf_stacked": False, "hf_split": None, "hf_parts": (), "hf_transposed": False}
    return replace(spec, hf=(spec.hf_whole,), **form)


def turned(spec: ParamSpec, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers per dim of a tensor of ``spec`` in Hugging Face's order of dims, or back in ours.

    The dims are those of one Hugging Face tensor: without that which counts stacked ones.
    """
    return (*dims[:-2], *dims[-2:][::-1]) if spec.hf_transposed else dims


def stored_shape(spec: ParamSpec, box: Box) -> tuple[int, ...]:
    """Shape of the Hugging Face tensor that is ``box`` of the tensor of ``spec``."""
    shape = tuple(stop - start for start, stop in box)
    return turned(spec, shape[1:] if spec.hf_stacked else shape)


def untied(where: str, what: str) -> CheckpointError:
    """The error for a second copy of a tied tensor that is none: both were trained, and one would be lost."""
    return CheckpointError(
        where,
        f"the model's config ties it to the word embedding, and it is another tensor ({what})",
        'set "tie_word_embeddings": false in config.json, or leave the tensor out of the files',
    )
