"""A data set of the user's own in place of ``dsx.data``'s text: it has a length, samples and a digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.config.schema import OWN, DataConfig
from dsx.data.batches import Samples, Shuffled
from dsx.data.packs import Sample
from dsx.data.text import Text
from dsx.errors import DataError
from dsx.launch.entry import AGREED
from dsx.nn.loss import IGNORED

_SHAPES = (
    "give S + 1 token ids, a tuple (inputs, labels) of S each, or a dict with input_ids and labels of S + 1, "
    "S being dsx.data.sequence_length"
)


@runtime_checkable
class OwnCorpus(Protocol):
    """What a data set needs so that a run can monitor, evaluate, save and resume on it.

    A torch ``Dataset`` or a Hugging Face ``datasets.Dataset`` has all but the digest. Two attributes are
    optional: ``held_out``, another such corpus, which evaluations read (its digest is not asked for), and
    ``name``, which messages and records call it by (its class's name otherwise).

    A sample is one of these, S being ``dsx.data.sequence_length``:

    - integers [S + 1]: inputs are the first S, labels the last S;
    - a tuple ``(inputs, labels)`` of integers [S] each: labels already shifted, ``labels[i]`` what follows
      ``inputs[i]``; -100 is not trained on;
    - a dict with ``input_ids`` and, if other than these, ``labels``, integers [S + 1] each, as transformers'
      collators make them: ``labels[i]`` belongs to ``input_ids[i]`` and is shifted here. Other keys are not
      read, but that an ``attention_mask`` may be 0 only at the end of a sample, where labels are -100.

    With ``dsx.data.documents`` "apart", samples have positions that begin at 0 in each document: a tuple has
    them as its third item, integers [S], a dict as ``position_ids``, integers [S + 1].

    Attributes:
        digest: Changes whenever the samples do: a run resumes on the same digest alone.
    """

    digest: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any:
        """Sample ``index``, always the same, on any rank."""


@dataclass(frozen=True, slots=True)
class OwnSequences:
    """Samples of an :class:`OwnCorpus`, checked as they are read."""

    corpus: OwnCorpus
    sequence_length: int
    name: str
    apart: bool = False

    def __len__(self) -> int:
        return len(self.corpus)

    def window(self, index: int) -> Sample:
        """Sample ``index``. Raises DataError unless it is one of the shapes of :class:`OwnCorpus`."""
        sample, length = self.corpus[index], self.sequence_length
        if isinstance(sample, tuple) and len(sample) == 2 + self.apart:
            inputs, labels, *more = sample
            pair = self._ids(inputs, index, "inputs", length), self._ids(labels, index, "labels", length)
            return (*pair, self._ids(more[0], index, "positions", length)) if more else pair
        if self.apart and not (isinstance(sample, Mapping) and "position_ids" in sample):
            what = 'it has no positions, and dsx.data.documents is "apart"'
            raise DataError(f"sample {index} of {self.name}", what, f"{_SHAPES}, with positions")
        if not isinstance(sample, Mapping):
            ids = self._ids(sample, index, "token ids", length + 1)
            return ids[:-1], ids[1:]
        if "input_ids" not in sample:
            raise DataError(f"sample {index} of {self.name}", f"no input_ids among {sorted(sample)}", _SHAPES)
        ids = self._ids(sample["input_ids"], index, "input_ids", length + 1)
        labels = self._ids(sample.get("labels", ids), index, "labels", length + 1)
        if "attention_mask" in sample:
            seen = self._ids(sample["attention_mask"], index, "attention_mask", len(labels)) != 0
            ends = int(seen.sum())
            if not bool(seen[:ends].all()) or not bool((labels[ends:] == IGNORED).all()):
                raise DataError(
                    f"sample {index} of {self.name}",
                    "its attention_mask leaves out positions that are trained on, or that others look at",
                    "pad at the end, with -100 as label",
                )
        shifted = ids[:-1].contiguous(), labels[1:].contiguous()
        if not self.apart:
            return shifted
        positions = self._ids(sample["position_ids"], index, "position_ids", length + 1)
        return (*shifted, positions[:-1].contiguous())

    def _ids(self, values: Any, index: int, what: str, length: int) -> Tensor:
        try:
            ids = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"sample {index} of {self.name}", f"its {what}: {error}", _SHAPES) from None
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.shape != (length,):
            kind = str(ids.dtype).removeprefix("torch.")
            what = f"its {what} are {kind} {list(ids.shape)}, not integers [{length}]"
            raise DataError(f"sample {index} of {self.name}", what, _SHAPES)
        return ids.long()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPart:
    """The held-out samples, as the counterpart of :class:`~dsx.data.text.TextPart`."""

    name: str
    share: float
    sequences: OwnSequences


class OwnText:
    """An :class:`OwnCorpus` as a run reads it, as the counterpart of :class:`~dsx.data.text.Text`.

    Raises:
        DataError: It has no digest or no samples.
    """

    def __init__(self, corpus: OwnCorpus, data: DataConfig) -> None:
        self.name = str(getattr(corpus, "name", None) or type(corpus).__name__)
        if not isinstance(corpus, OwnCorpus) or not isinstance(corpus.digest, str):
            raise DataError(
                f"data set {self.name}",
                "a run needs its length, a sample at each index, and its digest, a string",
                "add __len__, __getitem__ and digest: any text that changes when the samples do",
            )
        self.digest = corpus.digest
        self._data = data
        self._train = self._sequences(corpus, self.name)
        kept = getattr(corpus, "held_out", None)
        self.held_out: tuple[OwnPart, ...] = ()
        if kept is not None:
            name = f"{self.name}, held out"
            self.held_out = (OwnPart(name=self.name, share=1.0, sequences=self._sequences(kept, name)),)
        self.parts = self.held_out

    def _sequences(self, corpus: OwnCorpus, name: str) -> OwnSequences:
        sequences = OwnSequences(corpus, self._data.sequence_length, name, self._data.keeps_apart)
        if not len(sequences):
            raise DataError(f"data set {name}", "it has no samples", "give it some")
        return sequences

    def check(self) -> tuple[str, ...]:
        """Read the first samples; what must be the same on all ranks, for people."""
        lengths = []
        for sequences in (self._train, *(part.sequences for part in self.held_out)):
            sequences.window(0)
            lengths.append(f"{len(sequences):,} samples")
        return (f'digest "{self.digest}"', *lengths)

    def samples(self, *, cursor: int = 0, in_flight: int = 0) -> Samples:
        """Training samples, shuffled anew in every epoch; see :meth:`Text.samples`."""
        del cursor, in_flight  # of streams
        return Shuffled(self._train, seed=self._data.seed)

    def mean_loss(self, losses: Mapping[str, float]) -> float:
        """The loss of its one part."""
        (loss,) = losses.values()
        return loss

    def bits_per_byte(self, loss: float) -> None:
        """None: the user's tokens stand for an unknown number of bytes."""
        del loss

    @property
    def unigram_bits_per_byte(self) -> None:
        """None, as :meth:`bits_per_byte`."""
        return

    def rows(self, samples: int, shared: int) -> list[tuple[str, str]]:
        """What a person wants to know before a run; arguments as for :meth:`Text.rows`."""
        del shared
        held = sum(len(part.sequences) for part in self.held_out)
        turns = samples / len(self._train)
        rows = [
            (
                "data",
                f"{self.name}: {len(self._train):,} samples, read {turns:.3g} times, and {held:,} held out",
            )
        ]
        if self._data.source != OWN:
            said = f'dsx.data.source = "{self._data.source}" is not read: the data are the program\'s own'
            rows.append(("note", f'{said}, which "{OWN}" says'))
        return rows


def as_text(corpus: Text | OwnText | OwnCorpus, data: DataConfig) -> Text | OwnText:
    """What a recipe gives as its corpus, as a run reads it. Raises DataError: see :class:`OwnText`."""
    return corpus if isinstance(corpus, Text | OwnText) else OwnText(corpus, data)


def require_same_everywhere(text: OwnText) -> None:
    """Raise on every rank what one finds, or if ranks have different data. Collective."""
    mine: tuple[str, ...] | DataError
    try:
        mine = text.check()
    except DataError as error:
        mine = error
    found: list[tuple[str, ...] | DataError] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    errors = [one for one in found if isinstance(one, DataError)]
    other = next((rank for rank, one in enumerate(found) if one != found[0]), 0)
    if other and not errors:
        what = f"rank 0 has {found[0]}, rank {other} has {found[other]}"
        errors = [
            DataError(f"data set {text.name}", what, "make the same samples from the same seed or files")
        ]
    if errors:
        errors[0].add_note(AGREED)
        raise errors[0]
