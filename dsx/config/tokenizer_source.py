"""Which tokenizer ``dsx.data.tokenizer`` = "auto" stands for."""

from __future__ import annotations

from pathlib import Path

from dsx.config.data import NO_TOKENIZER, OWN
from dsx.config.problems import at
from dsx.config.schema import DsxConfig
from dsx.errors import ConfigError

BYTES = "bytes"

# Each alone makes a tokenizer for transformers' AutoTokenizer; vocab.json has its merges.txt beside it.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def resolve_tokenizer(dsx: DsxConfig, weights: Path | None) -> str:
    """The tokenizer's name: the config's own, the model folder, "bytes", or "none" for samples that are ids.

    Args:
        dsx: The config.
        weights: The folder whose weights the model starts from; None for fresh weights.

    Raises:
        ConfigError: "auto", and the folder has weights, which know their own tokens only, but no tokenizer.
    """
    if dsx.data.tokenizer != "auto":
        return dsx.data.tokenizer
    folder = dsx.model.path
    if folder is not None and any((Path(folder) / name).is_file() for name in _VOCABULARIES):
        return folder
    if dsx.data.source == OWN:
        return NO_TOKENIZER
    if weights is None:
        return BYTES
    raise ConfigError(
        at("dsx.data.tokenizer", "auto"),
        f"{folder} has weights but no tokenizer ({', '.join(_VOCABULARIES)})",
        'copy its tokenizer files there, or name a tokenizer: a folder, a hub name, or "bytes"',
    )
