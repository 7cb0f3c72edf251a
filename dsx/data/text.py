"""The text of a run, whatever ``dsx.data`` says: one source or a mixture, prepared or streamed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from dsx.config.schema import DataConfig
from dsx.data.batches import Mixed, Samples, Shuffled
from dsx.data.corpus import Corpus, prepare
from dsx.data.order import Shares
from dsx.data.packs import Windows
from dsx.errors import DataError

if TYPE_CHECKING:  # loaded where text is streamed
    from dsx.data.lanes import SampleStream, StreamedSource, StreamState


def prepare_text(
    data: DataConfig, cache_dir: Path, *, held_out_tokens: int, before: Callable[[], None] = lambda: None
) -> tuple[Path, ...]:
    """Prepare every source of ``data``, a folder each; of streamed ones, the held-out text alone.

    Of that, ``held_out_tokens`` is what an evaluation reads; ``before`` is called before a whole source is
    tokenised, if it has not been.

    Raises:
        DataError: See :func:`dsx.data.corpus.prepare`.
    """
    from dsx.data.files import open_source

    for part in data.parts():
        open_source(data.of_part(part))  # what is missing is said before hours of tokenising
    folders = []
    for part in data.parts():
        own = data.of_part(part)
        if data.streaming:
            from dsx.data.lanes import prepare_stream

            folder = prepare_stream(own, part.called, cache_dir, held_out_tokens=held_out_tokens)
        else:
            folder = prepare(own, cache_dir, before)
        folders.append(folder)
    return tuple(folders)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """One source of a text; of a streamed one, ``corpus`` is the held-out text alone."""

    name: str
    share: float
    corpus: Corpus

    @property
    def sequences(self) -> Windows:
        """Its held-out sequences."""
        return self.corpus.held_out


class Text:
    """An opened text."""

    def __init__(self, data: DataConfig, corpora: Sequence[Corpus]) -> None:
        self._data = data
        parts = data.parts()
        self._shares = Shares([part.weight for part in parts], seed=data.seed)
        self.parts = tuple(
            TextPart(name=part.called, share=float(share), corpus=corpus)
            for part, share, corpus in zip(parts, self._shares.shares, corpora, strict=True)
        )
        self._stream: SampleStream | None = None
        self._stream_state: StreamState = {}

    @classmethod
    def open(cls, folders: Sequence[Path], data: DataConfig, *, vocab_size: int | None = None) -> Self:
        """Open what :func:`prepare_text` returned. Raises DataError: see :meth:`Corpus.open`."""
        corpora = [
            Corpus.open(
                path,
                sequence_length=data.sequence_length,
                vocab_size=vocab_size,
                apart=data.keeps_apart,
                drop=data.too_long == "drop",
            )
            for path in folders
        ]
        return cls(data, corpora)

    @property
    def name(self) -> str:
        """Its sources, as the config names them."""
        return ", ".join(part.corpus.info.source for part in self.parts)

    @property
    def digest(self) -> str:
        """Hash of the text and its order: a run resumed on another digest would not continue on the same."""
        packed: list[object] = [["apart", self._data.too_long]] if self._data.keeps_apart else []
        if self._data.sources or self._data.streaming:
            parts = [[part.name, repr(part.share), _digest(part.corpus)] for part in self.parts]
            rows = [*packed, *parts]
        elif packed:
            rows = [*packed, self.parts[0].corpus.digest]
        else:
            return self.parts[0].corpus.digest
        return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()

    @property
    def is_streamed(self) -> bool:
        return self._data.streaming

    @property
    def held_out(self) -> tuple[TextPart, ...]:
        """The parts that have held-out text."""
        return tuple(part for part in self.parts if part.corpus.info.held_out.documents)

    def samples(self, *, cursor: int = 0, in_flight: int = 0) -> Samples:
        """Training sequences from global sample ``cursor`` on.

        A streamed text continues from where :meth:`resume` said, or where the samples given before have come
        to.

        Args:
            cursor: First global sample.
            in_flight: Global samples that may be taken ahead of training.
        """
        if self._data.streaming:
            from dsx.data.lanes import SampleStream

            self._stream_state = self.together([self.state(cursor)])
            self._stream = SampleStream(
                [part.name for part in self.parts],
                self._open_stream,
                self._shares,
                self._data,
                in_flight=in_flight,
                state=self._stream_state,
                end_id=self.parts[0].corpus.info.end_id if self._data.keeps_apart else None,
            )
            return self._stream
        if not self._data.sources:
            return Shuffled(self.parts[0].corpus.train, seed=self._data.seed)
        parts: dict[str, Windows] = {part.name: part.corpus.train for part in self.parts}
        return Mixed(parts, self._shares, seed=self._data.seed)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Let :meth:`samples` continue where a checkpoint's client state says."""
        self._stream_state = state.get("data_stream", {})

    def state(self, cursor: int) -> dict[str, Sequence[Any]]:
        """This rank's part of what :meth:`resume` needs under "data_stream"; see :meth:`together`."""
        return {} if self._stream is None else dict(self._stream.state(cursor))

    def together(self, states: Sequence[StreamState]) -> dict[str, Sequence[Any]]:
        """The states of all ranks as one. Lanes that nobody has read since the resume stay as they were."""
        if not self._data.streaming:
            return {}
        from dsx.data.lanes import merged

        return merged([self._stream_state, *states])

    def news(self) -> list[str]:
        """What has happened to the text since the last call, for people."""
        return [] if self._stream is None else self._stream.news()

    def mean_loss(self, losses: Mapping[str, float]) -> float:
        """Mean held-out loss of all parts, each by its share of the samples."""
        shares = {part.name: part.share for part in self.held_out}
        return sum(shares[name] * loss for name, loss in losses.items()) / sum(shares.values())

    @property
    def is_masked(self) -> bool:
        """Whether some of it is not trained on: what is trained stands for an unknown number of bytes."""
        return any(part.corpus.info.masked for part in self.parts)

    def bits_per_byte(self, loss: float) -> float | None:
        """Bits per held-out byte of a mean cross-entropy per token of ``loss`` nats; None if it is masked."""
        if self.is_masked:
            return None
        if not self.held_out:
            return self.parts[0].corpus.bits_per_byte(loss)  # says what is wrong
        return loss / math.log(2) / self._bytes_per_token()

    @property
    def unigram_bits_per_byte(self) -> float | None:
        """Entropy of the held-out bytes' own frequencies, the parts' bytes by their share; None if masked."""
        if self.is_masked:
            return None
        if len(self.held_out) < 2:
            return (self.held_out or self.parts)[0].corpus.unigram_bits_per_byte
        total = np.zeros(256)
        for part in self.held_out:
            counts = np.array(part.corpus.info.held_out_byte_counts, np.float64)
            total += part.share * part.corpus.bytes_per_token * counts / counts.sum()
        share = total[total > 0] / total.sum()
        return float(-(share * np.log2(share)).sum())

    def rows(self, samples: int, shared: int) -> list[tuple[str, str]]:
        """What a person wants to know before a run.

        Args:
            samples: Training sequences of the whole run.
            shared: Sequences that all data-parallel ranks' micro-batches take together.
        """
        info = self.parts[0].corpus.info
        held = f"{sum(part.corpus.info.held_out.tokens for part in self.parts):,} held-out tokens"
        count = len(self.parts)
        rows = [("data", f"{count} source{'s' * (count > 1)}, tokenizer {info.tokenizer}: {held}")]
        if not self._data.sources:
            train = "streamed" if self._data.streaming else f"{info.train.tokens:,} training"
            rows = [("data", f"{info.source}, tokenizer {info.tokenizer}: {train} and {held}")]
        for part in self.parts if self._data.sources else ():
            text = f"{100 * part.share:.4g}% of the samples"
            if not self._data.streaming:
                turns = samples * part.share / len(part.corpus.train)
                text += f", {part.corpus.info.train.tokens:,} training tokens, read {turns:.3g} times in all"
            rows.append((f"data {part.name}", text))
        for part in self.parts:
            name = f" {part.name}" if self._data.sources else ""
            rows += [(f"{label}{name}", text) for label, text in report(part.corpus)]
        if self._data.streaming:
            rows.append(("streaming", self._lanes_of_a_rank(shared)))
        return rows

    def _lanes_of_a_rank(self, shared: int) -> str:
        lanes, text = self._data.lanes, f"{self._data.lanes} lane{'s' * (self._data.lanes > 1)}"
        if lanes % shared == 0:
            return f"{text}, each read by one data-parallel rank"
        return (
            f"{text}, some read by several ranks: dsx.data.lanes = {math.lcm(lanes, shared)} would avoid it"
        )

    def _bytes_per_token(self) -> float:
        shares = [part.share for part in self.held_out]
        each = [part.corpus.bytes_per_token for part in self.held_out]
        return sum(share * size for share, size in zip(shares, each, strict=True)) / sum(shares)

    def _open_stream(self, number: int) -> StreamedSource:
        """Open a streamed source, on a rank that reads, when its first sequence is taken."""
        from dsx.data.lanes import open_stream, order_digest

        part, wanted = self.parts[number], self._data.parts()[number]
        data = self._data.of_part(wanted)
        source = open_stream(data, part.name)
        if order_digest(data, source) != _digest(part.corpus):
            raise DataError(
                f'dsx.data.source = "{wanted.source}"',
                "its files are others than when the run was prepared, or other than on the first machine",
                "start again when the files stay as they are, the same on all machines",
            )
        return source


def report(corpus: Corpus) -> list[tuple[str, str]]:
    """How full the packs of chats and completions are, and which records were skipped; nothing for text."""
    fill, info = corpus.fill(), corpus.info
    rows = [] if fill is None else [("packs", fill.text)]
    if info.bad_records and not info.masked:
        rows.append(("left out", f"{info.bad_records:,} row{'s' * (info.bad_records > 1)} without text"))
    elif info.bad_records:
        records = "bad record" if info.bad_records == 1 else "bad records, the first"
        rows.append(("skipped", f"{info.bad_records:,} {records}: {info.first_bad_record}"))
    return rows


def _digest(corpus: Corpus) -> str:
    """Hash of a source's tokens; of a streamed source, of its order."""
    return str(corpus.info.settings.get("stream", corpus.digest))
