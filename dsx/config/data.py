"""Schema of ``dsx.data``: one text or a mixture of several, prepared beforehand or read as the run goes."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Self

from pydantic import Field, model_validator

from dsx.config.block import Block, Positive, Seed

OWN = "own"
"""``dsx.data.source`` of a program that brings its own samples (dsx.OwnCorpus)."""

NO_TOKENIZER = "none"
"""``dsx.data.tokenizer`` of samples that are token ids already."""


class TextSource(Block):
    """Where text comes from."""

    source: str = Field(
        default="python-stdlib",
        min_length=1,
        description='"python-stdlib" (the source of Python\'s standard library, no network), a local file, '
        "folder or glob (text, jsonl, json, parquet, csv), or the name of a Hugging Face hub data set. "
        '"own": the program that reads the config has samples of its own (dsx.OwnCorpus).',
    )
    name: str | None = Field(default=None, description="Configuration of the hub data set.")
    split: str = Field(default="train", min_length=1, description="Split of the hub data set.")
    text_column: str = Field(default="text", min_length=1, description="Column that holds the text.")
    max_bytes: Positive | None = Field(
        default=None, description="Read at most about this much text, in bytes."
    )


class MixedSource(TextSource):
    """One source of a mixture."""

    weight: Annotated[float, Field(gt=0)] = Field(
        default=1.0,
        description="Share of the training sequences, relative to the other sources' weights; above 0.",
    )
    label: str | None = Field(
        default=None,
        pattern=r"^[\w.-]+$",
        description="What metrics and messages call it; null: the last part of source.",
    )

    @property
    def called(self) -> str:
        """The label, or one made of the source."""
        if self.label is not None:
            return self.label
        parts = (part.partition(".")[0] or part for part in reversed(self.source.split("/")))
        named = (re.sub(r"[^\w.-]+", "_", part).strip("_") for part in parts)
        return next(filter(None, named), "text")


class DataConfig(TextSource):
    """Training text."""

    sources: list[MixedSource] = Field(
        default_factory=list,
        description="A mixture instead of source: objects with source, weight, label, name, split, "
        "text_column and max_bytes. Shares are exact, and a source that ends begins again.",
    )
    tokenizer: str = Field(
        default="auto",
        min_length=1,
        description='"bytes" (256 bytes, end of document), or a transformers tokenizer: name or path. '
        '"auto" is the one in the folder dsx.model.path, or bytes if the weights are fresh ("none" with '
        'source "own", whose samples are token ids).',
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with the tokenizer (auto_map in its tokenizer_config.json). "
        "Without it such a tokenizer is refused; nobody is asked. A model's own code is never run.",
    )
    sequence_length: Positive = Field(description="Tokens per sequence.")
    held_out: float = Field(
        default=0.05, ge=0, lt=1, description="Fraction of the documents kept for evaluation."
    )
    seed: Seed = Field(default=0, description="Seed of the sample order and of the held-out choice.")
    streaming: bool = Field(
        default=False,
        description="Read and tokenise the text as the run goes instead of preparing it on disk first: for "
        "text larger than the disk. The order is then shuffled within shuffle_buffer.",
    )
    shuffle_buffer: Positive = Field(
        default=8192,
        description="Streaming: sequences held in memory for shuffling, over all data-parallel ranks "
        "together (two per lane at least); 1 keeps the order of each lane.",
    )
    lanes: Positive = Field(
        default=64,
        description="Streaming: parts that the text is read in side by side. Part of the order, so it stays "
        "for a run's life. If micro-batch x data-parallel degree divides it, every rank reads its own share.",
    )
    prefetch: int = Field(
        default=8, ge=0, description="Micro-batches that a thread reads ahead; 0 reads when they are needed."
    )

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        fields = TextSource.model_fields
        given = [key for key in fields if getattr(self, key) != fields[key].default]
        if self.tokenizer == NO_TOKENIZER and self.source != OWN:
            raise ValueError('tokenizer "none" is for samples that are ids (source "own"), not for text')
        if self.source == OWN and (self.streaming or len(given) > 1):
            other = next((key for key in given if key != "source"), "streaming")
            raise ValueError(f'source "own" is not text, so that {other} has no meaning. Fix: leave it out')
        if any(part.source == OWN for part in self.sources):
            raise ValueError('"own" cannot be mixed with text. Fix: mix in the program that has the samples')
        if self.sources and given:
            raise ValueError(f"sources and {given[0]} are both given; each of sources has its own {given[0]}")
        if self.streaming and (self.max_bytes or any(part.max_bytes for part in self.sources)):
            raise ValueError(
                "streaming and max_bytes are both given; a stream is read to its end. Fix: leave "
                "one of them out"
            )
        counts = Counter(part.called for part in self.sources)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ValueError(f'two of sources are called "{twice[0]}". Fix: give each a label of its own')
        return self

    def parts(self) -> tuple[MixedSource, ...]:
        """What is mixed: one part for a single text."""
        if self.sources:
            return tuple(self.sources)
        return (MixedSource(**{key: getattr(self, key) for key in TextSource.model_fields}),)

    def of_part(self, part: MixedSource) -> DataConfig:
        """These settings for ``part`` alone."""
        own = {key: getattr(part, key) for key in TextSource.model_fields}
        return self.model_copy(update={**own, "sources": []})
