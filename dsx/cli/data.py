"""``dsx data show``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsx.cli.options import CONFIG, FORMAT, SET, count
from dsx.cli.output import say, say_json, say_styled
from dsx.config.wording import at
from dsx.errors import ConfigError

if TYPE_CHECKING:
    from dsx.data.corpus import Corpus
    from dsx.data.tokenizers import Tokenizer

_BOUNDARY, _PLAIN_MARKS = "│", ("{+", "+}")
_TRAINED, _CONTEXT = "bold green", "dim"


def data(
    action: Annotated[  # noqa: ARG001 - the parser has judged it
        Literal["show"], typer.Argument(metavar="show", help="What to do: show.", show_default=False)
    ],
    config: Annotated[Path, CONFIG],
    samples: Annotated[int, count("--samples", "Samples to show of each source.")] = 3,
    tokens: Annotated[int, count("--tokens", "Tokens to show of each sample.")] = 300,
    overrides: Annotated[list[str] | None, SET] = None,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Show which tokens are trained on, and how full the packs are.

    The data of CONFIG are prepared as a run prepares them, into a folder that is removed again. Tokens are
    told apart by a bar; those that are trained on are green, or stand between {+ and +} where there are no
    colours. Chats and completions are shown in the order of their files, text in its sequences.
    """
    from dsx.config.load import load
    from dsx.config.schema import OWN
    from dsx.config.sources import read_model
    from dsx.data.text import Text, prepare_text, report
    from dsx.data.tokenizers import load_tokenizer

    _, block = load(config, overrides or [])
    settings = block.data
    if settings.source == OWN:
        what = "these samples are the program's own, which alone can show them"
        raise ConfigError(at("dsx.data.source", OWN), what, "name a config whose data dsx reads")
    if settings.streaming:
        what = "a stream is not prepared, so that there is nothing to show"
        fix = "add --set dsx.data.streaming=false, and --set dsx.data.max_bytes=1000000 if it is large"
        raise ConfigError(at("dsx.data.streaming", True), what, fix)
    if settings.tokenizer == "auto":
        settings = settings.model_copy(update={"tokenizer": read_model(block).tokenizer})
    with tempfile.TemporaryDirectory(prefix="dsx-data-") as folder:
        text = Text.open(prepare_text(settings, Path(folder), held_out_tokens=0), settings)
        tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
        shown = [
            (part.name, part.corpus, list(_samples(part.corpus, samples, tokenizer))) for part in text.parts
        ]
        if style == "json":
            say_json([_content(name, corpus, found) for name, corpus, found in shown])
            return
        for name, corpus, found in shown:
            info = corpus.info
            rows = [("train", f"{info.train.documents:,} documents, {info.train.tokens:,} tokens")]
            rows += [("held out", f"{info.held_out.documents:,} documents, {info.held_out.tokens:,} tokens")]
            say(f"{name}: {info.source}, tokenizer {info.tokenizer}")
            for label, said in (*rows, *report(corpus)):
                say(f"  {label:<9} {said}")
            for sample in found:
                say(f"\n{sample.title}")
                plain = "".join(word for word, _ in _line(sample, tokens, *_PLAIN_MARKS))
                say_styled(_line(sample, tokens, "", ""), plain=plain)
                if len(sample.ids) > tokens:
                    say(f"... and {len(sample.ids) - tokens:,} more tokens (--tokens)")


@dataclass(frozen=True, slots=True)
class _Shown:
    """A document, or a sequence of text, token by token."""

    title: str
    ids: Sequence[int]
    pieces: Sequence[str]
    trained: Sequence[bool]


def _samples(corpus: Corpus, count: int, tokenizer: Tokenizer) -> Iterator[_Shown]:
    """The first ones of the training split, as they are trained on."""
    from dsx.data.packs import Packs
    from dsx.data.pictures import PictureRows
    from dsx.nn.loss import IGNORED

    windows = corpus.train.packs if isinstance(corpus.train, PictureRows) else corpus.train
    if isinstance(windows, Packs):
        for number in windows.kept(count):
            ids, mask = windows.document(number)
            # The first token of a document is no label.
            yield _shown(f"document {number + 1}", ids.tolist(), [False, *mask[1:].tolist()], tokenizer)
        return
    for index in range(min(count, len(windows))):
        inputs, labels, *_ = windows.window(index)
        trained = [False, *(labels[:-1] != IGNORED).tolist()]
        yield _shown(f"sequence {index + 1}", inputs.tolist(), trained, tokenizer)


def _shown(title: str, ids: list[int], trained: list[bool], tokenizer: Tokenizer) -> _Shown:
    title = f"{title}: {len(ids):,} tokens, {sum(trained):,} trained"
    return _Shown(title, ids, tokenizer.pieces(ids), trained)


def _content(name: str, corpus: Corpus, found: Sequence[_Shown]) -> dict[str, Any]:
    fill, info = corpus.fill(), corpus.info
    return {
        "name": name,
        "source": info.source,
        "tokenizer": info.tokenizer,
        "train": asdict(info.train),
        "held_out": asdict(info.held_out),
        "packs": None if fill is None else asdict(fill),
        "bad_records": {"count": info.bad_records, "first": info.first_bad_record},
        "samples": [
            [
                {"id": one, "text": piece, "trained": on}
                for one, piece, on in zip(sample.ids, sample.pieces, sample.trained, strict=True)
            ]
            for sample in found
        ],
    }


def _line(sample: _Shown, most: int, begin: str, end: str) -> Iterator[tuple[str, str]]:
    """The tokens with their styles, and bars between them; line ends are shown as such, and end the line."""
    before = False
    for number, (piece, on) in enumerate(zip(sample.pieces[:most], sample.trained[:most], strict=True)):
        yield end if before and not on else "", ""
        yield _BOUNDARY if number else "", _CONTEXT
        yield begin if on and not before else "", ""
        yield piece.replace("\n", "\\n\n"), _TRAINED if on else _CONTEXT
        before = on
    yield end if before else "", ""
