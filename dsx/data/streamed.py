"""Before a streamed run: everything about its source that can be wrong, and its held-out text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from dsx.config.schema import DataConfig
from dsx.data.corpus import write_corpus, write_once
from dsx.data.files import HubData
from dsx.data.lanes import StreamedSource
from dsx.data.sources import open_source
from dsx.data.store import VERSION, CorpusInfo
from dsx.data.tokenizers import load_tokenizer
from dsx.errors import DataError

_PLACES = 64  # parts of a source that the held-out text is gathered from


def open_stream(data: DataConfig, name: str) -> StreamedSource:
    """The one source of ``data``, to be streamed.

    Raises:
        DataError: The source or the tokenizer cannot be read, or there is no text.
    """
    units = open_source(data).units(data.lanes)
    if not units:
        raise DataError(
            f'dsx.data.source = "{data.source}"', "it holds no text", "name files with text in them"
        )
    return StreamedSource(
        name=name,
        units=units,
        tokenizer=load_tokenizer(data.tokenizer, trust_remote_code=data.trust_remote_code),
        held_out=data.held_out,
        seed=data.seed,
    )


def order_digest(data: DataConfig, source: StreamedSource) -> str:
    """Hash of all that decides which tokens come when: names and sizes of the parts, not what is in them."""
    settings = {
        "units": [unit.name for unit in source.units],
        "tokenizer": source.tokenizer.identity(),
        "held_out": data.held_out,
        "seed": data.seed,
        "lanes": data.lanes,
        "shuffle_buffer": data.shuffle_buffer,
        "sequence_length": data.sequence_length,
    }
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()


def prepare_stream(data: DataConfig, name: str, cache_dir: str | Path, *, held_out_tokens: int) -> Path:
    """Write the held-out text of one source that is to be streamed, and return its folder.

    The folder is a corpus without training text. Its held-out documents come from all over the source; they
    are about as many as an evaluation reads, not all that training leaves out.

    Args:
        data: The ``dsx.data`` block, for this source alone.
        name: What the source is called.
        cache_dir: Folder for prepared corpora, made if missing.
        held_out_tokens: Tokens that an evaluation reads.

    Raises:
        DataError: The source or the tokenizer cannot be read, or a lane finds no text.
    """
    source = open_stream(data, name)
    if not isinstance(open_source(data), HubData):  # a network's answer to each lane would take minutes
        for lane in range(data.lanes):
            _require_text(source, lane, data.lanes)
    settings: dict[str, Any] = {
        "version": VERSION,
        "stream": order_digest(data, source),
        "held_out_tokens": held_out_tokens,
        "tokenizer": source.tokenizer.identity(),
        "held_out": data.held_out,
        "seed": data.seed,
    }
    folder = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]

    def write(aside: Path) -> CorpusInfo:
        texts = ((text, True) for text in _held_out(source, held_out_tokens))
        info = write_corpus(aside, texts, data.source, source.tokenizer, settings)
        if data.held_out and not info.held_out.documents:
            raise DataError(
                f"dsx.data.held_out = {data.held_out}",
                f'no document of source "{name}" is held out',
                "use a larger fraction, 0 to hold out none, or more documents",
            )
        return info

    return write_once(Path(cache_dir).expanduser() / folder, write)


def _require_text(source: StreamedSource, lane: int, lanes: int) -> None:
    units = source.lane(lane, lanes)
    if next(chain.from_iterable(unit.documents(None) for unit in units), None) is None:
        raise DataError(
            f"dsx.data.lanes = {lanes}",
            f'source "{source.name}" has no document to train on for lane {lane}',
            "use fewer lanes, or leave streaming out: the text is small",
        )


def _held_out(source: StreamedSource, tokens: int) -> Iterator[str]:
    """Held-out documents of about ``tokens`` tokens, evenly from all over the source if that will do."""
    if not source.held_out:
        return
    step = -(-len(source.units) // _PLACES)
    spread, rest = range(0, len(source.units), step), [i for i in range(len(source.units)) if i % step]
    quota = -(-tokens // len(spread))
    for index in [*spread, *rest]:
        unit, left = source.units[index], min(quota, tokens)
        for offset, text in unit.documents(None) if left > 0 else ():
            if source.is_held_out(unit, offset):
                yield text
                taken = len(source.tokenizer.encode([text])[0]) + 1
                left, tokens = left - taken, tokens - taken
                if left <= 0:
                    break
