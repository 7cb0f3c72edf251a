"""The same loss before and after a conversion: proof that what was copied is still the same model.

A model of ``transformers`` gets the weights of one checkpoint after another, whatever their formats, and
computes one loss of fixed tokens, in fp32 and in one thread, so that equal weights give equal bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dsx.checkpoint.base import completed, under_known_names
from dsx.checkpoint.catalog import PRECISIONS, Catalog
from dsx.checkpoint.claims import forms_of, model_of
from dsx.checkpoint.file_io import convert, numpy_dtype
from dsx.checkpoint.formats.deepspeed.module import as_model
from dsx.checkpoint.formats.huggingface.catalog import as_hf
from dsx.checkpoint.pieces import whole_part
from dsx.checkpoint.read import Reader
from dsx.errors import CheckpointError, ModelError
from dsx.models.custom_code import without_code
from dsx.models.params import stored_specs

_SEQUENCES, _LENGTH, _SEED = 4, 64, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What came out.

    Attributes:
        source: Loss of the source's weights, nats per token.
        target: Of the target's.
        tokens: How many tokens it is the mean over.
        equal: Whether all bits are.
        same_dtype: Whether the weights have the same dtype in both, so that the bits have to be equal.
    """

    source: float
    target: float
    tokens: int
    equal: bool
    same_dtype: bool


class LossCheck:
    """A model and tokens to compare checkpoints with.

    Args:
        config: Content of the model's ``config.json``; None if nobody knows it.
        tokens: A file of token ids, one sequence a line; None for a fixed draw of random ones.

    Raises:
        CheckpointError: The model is not known or none of dsx's families, or the file has no such ids.
    """

    def __init__(self, config: Mapping[str, Any] | None, tokens: Path | None) -> None:
        if config is None:
            raise CheckpointError(
                "--check-loss", "nothing says what model the checkpoint is of", "give --hf-config FILE"
            )
        try:
            self._model = model_of(dict(config))
        except ModelError as error:
            raise CheckpointError("--check-loss", str(error), "leave it out") from None
        self._config = without_code(config)
        if tokens is None:
            self._rows = _random_rows(self._model.vocab_size, self._model.max_positions)
        else:
            self._rows = _read_rows(tokens, self._model.vocab_size, self._model.max_positions)

    def compare(self, source: Catalog, target: Catalog) -> Losses:
        """Losses of both, each with what it leaves out. Raises CheckpointError if one is not of the model."""
        source, target = completed(source), completed(target)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            before, after = self._loss(source), self._loss(target)
        finally:
            torch.set_num_threads(threads)
        equal = struct.pack("<d", before) == struct.pack("<d", after)
        tokens = sum(len(row) - 1 for row in self._rows)
        same_dtype = _weight_dtypes(source) == _weight_dtypes(target)
        return Losses(source=before, target=after, tokens=tokens, equal=equal, same_dtype=same_dtype)

    @torch.no_grad()
    def _loss(self, catalog: Catalog) -> float:
        model = self._loaded(catalog)
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row in self._rows:
            ids = torch.tensor([row])
            logits = model(input_ids=ids).logits[:, :-1].float()
            total += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").double()
            count += ids.shape[1] - 1
        return float(total / count)

    def _loaded(self, catalog: Catalog) -> Any:
        """The model with a checkpoint's weights, rounded to their dtype there."""
        from transformers import AutoModelForCausalLM

        from dsx.hub.anatomy import hf_config_of

        specs = stored_specs(self._model)
        known = as_model(under_known_names(catalog, self._model), specs, forms=forms_of(self._config))
        named = as_hf(known, specs, in_files=False)
        told = _precision(catalog)
        config = hf_config_of(self._config)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
        with Reader(named) as reader:
            buffers = {spec.hf_whole: model.get_buffer(spec.hf_whole) for spec in specs if spec.buffer}
            for name, tensor in (*model.named_parameters(), *buffers.items()):
                entry = reader.find(name, "weight")
                if entry is None or entry.shape != tuple(tensor.shape):
                    raise CheckpointError(
                        f"{catalog.root}: tensor {name}",
                        "it is missing or has another shape",
                        "give the model's own --hf-config",
                    )
                # A master stands in for a weight that is stored nowhere; the model computes with it rounded.
                dtype = told if entry.state == "master" else entry.dtype
                flat = np.empty(entry.numel, numpy_dtype(dtype))
                reader.fill(entry, [whole_part(entry.shape)], flat, dtype)
                tensor.copy_(torch.from_numpy(convert(flat, dtype, "float32")).view(tensor.shape))
        return model


def _precision(catalog: Catalog) -> str:
    return PRECISIONS.get(str(catalog.facts.get("precision")), "float32")


def _weight_dtypes(catalog: Catalog) -> set[str]:
    weights = (entry for entry in catalog.entries if entry.state == "weight" and entry.role != "buffer")
    return {entry.dtype for entry in weights} or {_precision(catalog)}


def _random_rows(vocabulary: int, positions: int) -> list[list[int]]:
    generator = np.random.default_rng(_SEED)
    shape = (_SEQUENCES, max(2, min(_LENGTH, positions)))
    rows: list[list[int]] = generator.integers(0, vocabulary, size=shape).tolist()
    return rows


def _read_rows(path: Path, vocabulary: int, positions: int) -> list[list[int]]:
    try:
        rows = [
            [int(word) for word in line.split()] for line in path.read_text().splitlines() if line.strip()
        ]
    except (OSError, ValueError) as error:
        raise CheckpointError(
            str(path), f"it cannot be read as token ids ({error})", "write ids, one sequence a line"
        ) from None

    def fits(row: list[int]) -> bool:
        return 2 <= len(row) <= positions and all(0 <= token < vocabulary for token in row)

    bad = next((row for row in rows if not fits(row)), None)
    if bad is not None or not rows:
        raise CheckpointError(
            f"{path}: {'no line' if bad is None else f'a line of {len(bad)} ids'}",
            f"a sequence has 2 to {positions} ids from 0 to {vocabulary - 1}",
            "write such sequences, one a line",
        )
    return rows
