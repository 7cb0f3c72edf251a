"""Documents packed into sequences: what a window holds, which labels it has, and how full the packs are.

Text is one stream, cut anywhere (:class:`Sequences`). Chats and completions are kept whole instead: each goes
into one pack of S tokens (:class:`Packs`), by best-fit decreasing. A window of S + 1 ids has labels for all
of its inputs but the last token of each document; what is not trained has the label -100.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dsx.errors import DataError
from dsx.nn.loss import IGNORED

Sample = tuple[Any, ...]
"""Inputs and labels, int64 [S] each, and positions where documents are kept apart: each begins at 0.

Of a chat with pictures, what its processor made of it (:class:`Seen`) is the third.
"""


class Seen(NamedTuple):
    """What a processor makes of a chat beside its ids.

    Attributes:
        tokens: Numbers for every token [S], by the names of the family's forward.
        pictures: Pixels, sizes and grids, one behind the other along the first dim.
        length: Tokens of the chat, behind which is padding.
    """

    tokens: dict[str, torch.Tensor]
    pictures: dict[str, torch.Tensor]
    length: int = 0


class Windows(Protocol):
    """Samples by their number in a corpus."""

    @property
    def sequence_length(self) -> int:
        """S."""

    def __len__(self) -> int: ...

    def window(self, index: int) -> Sample:
        """Sample ``index``."""


class Tokens(Protocol):
    """Ids, or whether each is trained, that can be sliced."""

    def __len__(self) -> int:
        """How many."""

    def __getitem__(self, part: slice, /) -> npt.NDArray[Any]:
        """Those of a stretch."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tokens cut into sequences of S inputs and, shifted by one, S labels; no token is a label twice.

    Documents follow each other; a sequence may begin and end inside one.

    Args:
        tokens: All token ids, end-of-document tokens included.
        sequence_length: S.
        trained: Whether each token is trained on; None if all are.
        end_id: The token after which another document begins, if documents are kept apart.
    """

    tokens: Tokens
    sequence_length: int
    trained: Tokens | None = None
    end_id: int | None = None

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.sequence_length

    def window(self, index: int) -> Sample:
        """Sequence ``index``.

        Raises:
            IndexError: ``index`` is outside ``range(len(self))``.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = index * self.sequence_length
        part = slice(start, start + self.sequence_length + 1)
        ids = torch.from_numpy(self.tokens[part].astype(np.int64))
        if self.end_id is not None:
            return kept_apart(ids, self.end_id)
        if self.trained is None:
            return ids[:-1], ids[1:]
        trained = torch.from_numpy(self.trained[part].astype(np.bool_))
        return ids[:-1], ids.where(trained, IGNORED)[1:]


def kept_apart(ids: torch.Tensor, end_id: int) -> Sample:
    """Inputs, labels and positions, int64 [S] each, of S + 1 ids in which ``end_id`` ends a document.

    >>> [part.tolist() for part in kept_apart(torch.tensor([5, 6, 0, 7, 8]), 0)]
    [[5, 6, 0, 7], [6, 0, -100, 8], [0, 1, 2, 0]]
    """
    inputs, places = ids[:-1], torch.arange(len(ids) - 1)
    ends = inputs == end_id
    begins = torch.cat([torch.ones(1, dtype=torch.bool), ends[:-1]])
    positions = places - places.where(begins, 0).cummax(0).values
    return inputs, ids[1:].where(~ends, IGNORED), positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """How full the packs of a corpus are.

    Args:
        documents: Packed documents.
        packs: Packs, or sequences where documents are joined.
        tokens: Tokens of the documents, as packed.
        trained: Those of them that are labels.
        places: Packs x sequence length.
        truncated: Documents of which only the first tokens are packed.
        dropped: Documents that are left out, because they are too long, or because truncation left nothing to
            train on.
    """

    documents: int
    packs: int
    tokens: int
    trained: int
    places: int
    truncated: int = 0
    dropped: int = 0

    @property
    def text(self) -> str:
        full, trained = 100 * self.tokens / self.places, 100 * self.trained / self.tokens
        said = f"{self.documents:,} documents in {self.packs:,} packs, {full:.1f}% full; "
        said += f"{trained:.1f}% of the tokens trained"
        said += f"; {self.truncated:,} truncated" if self.truncated else ""
        return said + (f"; {self.dropped:,} dropped" if self.dropped else "")


class Packs:
    """Whole documents in packs of S tokens, apart from each other; what is left of a pack is padding.

    They are packed by best-fit decreasing: the documents in the order of falling lengths, each into the pack
    with the least room left that still takes it. So the packs follow from the lengths alone.

    Args:
        tokens: All ids, document after document.
        trained: Whether each is trained on.
        sizes: Tokens and labels of each document, integers [documents, 2].
        sequence_length: S.
        pad_id: Fills what is left: a document of its own, without labels.
        drop: Leave documents of more than S tokens out instead of keeping their first S tokens.
    """

    def __init__(
        self,
        tokens: Tokens,
        trained: Tokens,
        sizes: npt.NDArray[np.integer[Any]],
        sequence_length: int,
        *,
        pad_id: int,
        drop: bool = False,
    ) -> None:
        self._tokens, self._trained, self._pad_id = tokens, trained, pad_id
        self.sequence_length = sequence_length
        lengths, self._labels = sizes.astype(np.int64).T.copy()
        self._starts = np.cumsum(lengths) - lengths
        self._lengths = np.minimum(lengths, sequence_length)
        long = np.flatnonzero(lengths > sequence_length)
        # The first token of a document is no label: nothing in it predicts that.
        self._labels[long] = [0 if drop else self._trained_of(one)[1:].sum() for one in map(int, long)]
        self._lengths[self._labels == 0] = 0
        self._packs = pack(self._lengths, sequence_length)
        self._truncated = int((self._labels[long] > 0).sum())
        self._dropped = len(long) - self._truncated

    def __len__(self) -> int:
        return len(self._packs)

    def fill(self) -> Fill:
        return Fill(
            documents=int((self._lengths > 0).sum()),
            packs=len(self),
            tokens=int(self._lengths.sum()),
            trained=int(self._labels.sum()),
            places=len(self) * self.sequence_length,
            truncated=self._truncated,
            dropped=self._dropped,
        )

    def kept(self, most: int | None = None) -> list[int]:
        """The numbers of the first so many documents that are packed, or of all."""
        return [int(number) for number in np.flatnonzero(self._lengths)[:most]]

    def length(self, number: int) -> int:
        """Tokens of a document, as packed."""
        return int(self._lengths[number])

    def document(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The ids of a document, as packed, and whether each is trained on."""
        return self._of(self._tokens, number), self._trained_of(number)

    def window(self, index: int) -> Sample:
        """Inputs, labels and positions of a pack, int64 [S] each.

        Raises:
            IndexError: ``index`` is outside ``range(len(self))``.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        return self._filled(self._packs[index])

    def row(self, document: int) -> Sample:
        """Inputs and labels, int64 [S] each, of a document by itself."""
        return self._filled([document])[:2]

    def empty(self) -> Sample:
        """A pack of padding alone."""
        return self._filled([])

    def _filled(self, documents: list[int]) -> Sample:
        ids = np.full(self.sequence_length, self._pad_id, np.int64)
        labels = np.full(self.sequence_length, IGNORED, np.int64)
        positions = np.zeros(self.sequence_length, np.int64)
        at = 0
        for document in documents:
            own, trained = self.document(document)
            end = at + len(own)
            ids[at:end] = own
            labels[at : end - 1] = np.where(trained[1:], own[1:], IGNORED)
            positions[at:end] = np.arange(len(own))
            at = end
        positions[at:] = np.arange(self.sequence_length - at)
        return torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(positions)

    def _trained_of(self, document: int) -> npt.NDArray[np.bool_]:
        return self._of(self._trained, document).astype(np.bool_)

    def _of(self, tokens: Tokens, document: int) -> npt.NDArray[np.int64]:
        start = int(self._starts[document])
        return tokens[start : start + int(self._lengths[document])].astype(np.int64)


def pack(lengths: npt.NDArray[np.integer[Any]], room: int) -> list[list[int]]:
    """Documents of these lengths, by number, in packs of ``room`` tokens; those of length 0 in none.

    Best-fit decreasing: at most 11/9 of the fewest packs that there can be, and 4 more (Johnson et al.,
    "Worst-Case Performance Bounds for Simple One-Dimensional Packing Algorithms", SIAM J. Comput. 3, 1974).

    >>> pack(np.array([3, 5, 2, 7, 1]), 8)
    [[3, 4], [1, 0], [2]]
    """
    packs: list[list[int]] = []
    with_room: list[deque[int]] = [deque() for _ in range(room + 1)]
    rooms = 0  # bit r is set if a pack has r tokens left
    for document in np.argsort(-lengths.astype(np.int64), kind="stable"):
        length = int(lengths[document])
        if not length:
            break
        fitting = rooms >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            number = with_room[left].popleft()
            rooms &= ~(0 if with_room[left] else 1 << left)
        else:
            left, number = room, len(packs)
            packs.append([])
        packs[number].append(int(document))
        left -= length
        if left:
            with_room[left].append(number)
            rooms |= 1 << left
    return packs


def fill_of(windows: Any, documents: int) -> Fill:
    """How full the sequences of a masked corpus are, whether its documents are packed or joined."""
    if not isinstance(windows, Sequences):
        found: Fill = windows.fill()
        return found
    assert windows.trained is not None
    places = len(windows) * windows.sequence_length
    trained = int(windows.trained[1 : places + 1].sum())
    return Fill(documents=documents, packs=len(windows), tokens=places, trained=trained, places=places)


def require_some(windows: Windows, tokens: int, split: str) -> None:
    """Raise DataError if there is not one sequence of a split that has so many tokens."""
    if len(windows):
        return
    length, ending = windows.sequence_length, ", or change dsx.data.held_out" if split == "held-out" else ""
    what = f"the {split} split has {tokens} tokens, a sequence needs {length + 1}"
    fix = "use more text or shorter sequences"
    if not isinstance(windows, Sequences):
        what = f"every document of the {split} split is longer, or has nothing to train on in so many tokens"
        fix = "use longer sequences"
    raise DataError(f"dsx.data.sequence_length = {length}", what, fix + ending)
