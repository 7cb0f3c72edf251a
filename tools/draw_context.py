"""Who holds which part of a sequence on a context axis: the pictures of docs/guides/long_sequences.md.

    python tools/draw_context.py parts|methods FILE.svg|FILE.png

What they show is asked of the code that trains: a rank's chunks of :class:`dsx.nn.ContextParallel`, and who
attends to whom of :class:`dsx.nn.attention.CausalMask`, and what a ring sends of :class:`dsx.nn.ring.Ring`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from dsx.cli.plot import picture_of
from dsx.nn.attention import CausalMask
from dsx.nn.context import DetachedContextParallel
from dsx.nn.documents import Places
from dsx.nn.ring import Ring
from dsx.schedules.timeline import FAINT, FONT, GRID, INK

RANKS, TOKENS, CELL, HEADS = 4, 32, 9, 4
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
DOCUMENTS = (5, 17, 10)
WINDOW = 6


def owners() -> list[int]:
    """The rank of each token of a row."""
    found = {at: r for r in range(RANKS) for part in _rank(r).chunks(TOKENS) for at in part}
    return [found[at] for at in range(TOKENS)]


def _rank(rank: int) -> DetachedContextParallel:
    return DetachedContextParallel(RANKS, rank)


def allowed(window: int = 0, documents: Sequence[int] = ()) -> Tensor:
    """Whether a token attends to another: bool [T, T]."""
    cpu, places = torch.device("cpu"), None
    if documents:
        positions = torch.cat([torch.arange(length) for length in documents])
        places = Places.of_packs(positions[None])
    mask = CausalMask(window)(TOKENS, torch.float32, cpu, places)
    if mask is None:
        return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return mask.view(TOKENS, TOKENS) == 0


def sent(to: int, of: int) -> list[int]:
    """The tokens whose keys one rank sends to another in a ring, under a causal mask."""
    cp, mask = _rank(to), CausalMask()
    ring = Ring(cp, TOKENS, mask.sights(cp, TOKENS, None), lambda call: mask.between(None, (), call))
    return [at for stretch in ring.sent(to, of) for at in stretch]


class Drawing:
    """Rectangles by colour and texts, as :func:`dsx.cli.plot.picture_of` reads them."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._cells: dict[str, list[str]] = {}
        self._texts: list[str] = []

    def cells(self, x: float, y: float, colours: Sequence[str | None], *, cell: tuple[int, int]) -> None:
        """A line of cells, of which None are not drawn."""
        at = 0
        for colour, run in groupby(colours):
            count = len(list(run))
            if colour is not None:
                size = f'x="{x + at * cell[0]:g}" y="{y:g}" width="{count * cell[0]}" height="{cell[1] - 1}"'
                self._cells.setdefault(colour, []).append(f"<rect {size}/>")
            at += count

    def text(self, x: float, y: float, words: str, *, size: int = 13, faint: bool = False) -> None:
        """A line of text that begins at (x, y)."""
        weight = "" if faint or size < 15 else ' font-weight="700"'
        ink = FAINT if faint else INK
        self._texts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight} fill="{ink}">{words}</text>'
        )

    def svg(self) -> str:
        """The document."""
        styles = "".join(f".c{at} rect{{fill:{colour}}}" for at, colour in enumerate(self._cells))
        groups = (f'<g class="c{at}">{"".join(cells)}</g>' for at, cells in enumerate(self._cells.values()))
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">',
                f"<style>{styles}</style>",
                f'<rect width="{self.width}" height="{self.height}" fill="white"/>',
                *groups,
                *self._texts,
                "</svg>\n",
            ]
        )

    def legend(self, x: float, y: float) -> None:
        """Which rank has which colour."""
        for rank, colour in enumerate(COLOURS):
            self.cells(x + 90 * rank, y - 11, [colour], cell=(13, 14))
            self.text(x + 90 * rank + 19, y, f"rank {rank}")


def parts() -> Drawing:
    """A row's chunks, and the pairs of queries and keys that each rank computes under three masks."""
    side, own = TOKENS * CELL, owners()
    drawing = Drawing(3 * (side + 46) + 14, side + 210)
    drawing.text(30, 34, "A row of 32 tokens on 4 ranks: chunks r and 7 - r", size=20)
    drawing.legend(30, 60)
    drawing.cells(30, 76, [COLOURS[rank] for rank in own], cell=(2 * CELL, 20))
    panels = (
        ("causal", allowed()),
        (f"a window of {WINDOW} tokens", allowed(WINDOW)),
        (f"documents of {', '.join(map(str, DOCUMENTS))} tokens", allowed(documents=DOCUMENTS)),
    )
    for panel, (title, mask) in enumerate(panels):
        x, y = 30 + panel * (side + 46), 138
        drawing.text(x, y - 10, title, size=15)
        for query, row in enumerate(mask.tolist()):
            colours = [COLOURS[own[query]] if seen else GRID for seen in row]
            drawing.cells(x, y + query * CELL, colours, cell=(CELL, CELL))
        pairs = [int(mask[[rank == r for rank in own]].sum()) for r in range(RANKS)]
        drawing.text(x, y + side + 22, f"pairs of each rank: {', '.join(map(str, pairs))}")
        drawing.text(x, y + side + 42, "down: queries, across: keys", size=12, faint=True)
    return drawing


def methods() -> Drawing:
    """What rank 1 of 4 has of queries and of keys: tokens across, heads down."""
    own = owners()
    drawing = Drawing(1295, 330)
    drawing.text(30, 34, "What rank 1 of 4 has: tokens across, 4 heads down", size=20)
    drawing.legend(30, 60)
    one = [COLOURS[rank] if rank == 1 else GRID for rank in own]
    whole = [COLOURS[rank] for rank in own]
    came = sent(1, 0)
    step = [COLOURS[rank] if rank == 1 or at in came else GRID for at, rank in enumerate(own)]
    kinds: tuple[tuple[str, Callable[[int], Sequence[str]], Callable[[int], Sequence[str]]], ...] = (
        ("elsewhere in a layer", lambda _: one, lambda _: one),
        ("attention, all_gather", lambda _: one, lambda _: whole),
        ("attention, ulysses", *[lambda head: whole if head == 1 else [GRID] * TOKENS] * 2),
        ("attention, ring, step 2 of 4", lambda _: one, lambda _: step),
    )
    for column, (title, queries, keys) in enumerate(kinds):
        x = 30 + column * 315
        drawing.text(x, 100, title, size=15)
        for y, words, rows in ((116, "queries", queries), (206, "keys and values", keys)):
            drawing.text(x, y + 12, words, size=12, faint=True)
            for head in range(HEADS):
                drawing.cells(x, y + 20 + 14 * head, rows(head), cell=(CELL, 14))
    return drawing


def _main(arguments: Sequence[str]) -> Iterator[str]:
    name, file = arguments
    drawn = picture_of({"parts": parts, "methods": methods}[name]().svg(), Path(file).suffix[1:])
    Path(file).write_bytes(drawn.encode() if isinstance(drawn, str) else drawn)
    yield f"{file}: {name}"


if __name__ == "__main__":
    print(*_main(sys.argv[1:]), sep="\n")
