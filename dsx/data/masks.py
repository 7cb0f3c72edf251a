"""Examples -> tokens, and which of them are trained on: chat templates, prompts and completions.

A chat is written as text by its template, and what the assistant wrote in it is marked: by the template
itself, where it has ``{% generation %}`` marks; otherwise by prefixes. A turn of the assistant begins where
the chat before it ends, generation prompt included, and ends where the chat up to it does. So the generation
prompt is not trained, and the token that ends the turn is. A template that writes earlier turns otherwise
once others follow is refused, but for thinking that it leaves out of them, as Qwen3's does: such a turn is
trained as it stands in the whole chat, which is what the model will see.

``train_on`` "each" asks instead for every turn as it is when it is written: the chat up to it, as the
template has it then. Such beginnings of a chat lie in one document as long as each begins with the one before
it. Of a turn whose thought the template leaves out even then, as DeepSeek's do, the text is the generation
prompt, which begins the thought, then thought and answer, and the end of the turn.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateSyntaxError

from dsx.config.schema import DataConfig
from dsx.data.pictures import Chat, Expanded, Processor, digest_of, moved
from dsx.data.records import BadRecordError, Example, Message, pictures_in
from dsx.data.tokenizers import TokenIds, Tokenizer
from dsx.errors import DataError
from dsx.models.transformers_settings import first_line, quiet_transformers

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_DAY = re.compile(r"""strftime_now\((["'])(.*?)\1\)""")
_BEGUN, _THOUGHT = "<think>", "</think>"
_ASKED, _THOUGHTS = "dsx_asked_", ("reasoning_content", "thinking", "reasoning")
_BATCH_CHARACTERS = 1 << 20
_FIX = "use a template with {% generation %} marks (dsx.data.chat_template)"

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A document and which of its tokens are trained on.

    Args:
        where: Place of its record.
        ids: Its token ids.
        trained: Whether each is trained on.
        text_bytes: UTF-8 bytes of its text.
        chat: The chat as text and its pictures, where these are read.
    """

    where: str
    ids: TokenIds
    trained: npt.NDArray[np.bool_]
    text_bytes: int
    chat: Chat | None = None


@dataclass(frozen=True, slots=True)
class _Marked:
    """A document as text, and the characters that are trained on."""

    where: str
    text: str
    spans: Sequence[Span]
    is_chat: bool
    chat: Chat | None = None
    given: TokenIds | None = None


def _template_of(data: DataConfig) -> str | None:
    """The template that ``dsx.data.chat_template`` names; None leaves it to the tokenizer."""
    named = data.chat_template
    if named is None:
        return None
    where = f'dsx.data.chat_template = "{named.splitlines()[0]}"'
    if "{" in named:
        return named
    try:
        return Path(named).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot be read ({error.strerror if isinstance(error, OSError) else 'it is no text'})"
        raise DataError(
            where, what, "name a file with a Jinja template, or write the template itself"
        ) from None


class Masks:
    """Makes tokens and masks of examples, as ``dsx.data`` says."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer) -> None:
        self._data, self._tokenizer = data, tokenizer
        self._processor = Processor(data.tokenizer) if data.pictures else None
        self._own_template = _template_of(data)
        self._special = tokenizer.special_tokens
        self.eos = str(self._special.get("eos_token", ""))

    def identity(self) -> list[object]:
        """What decides the text and the masks, besides the records and the tokenizer's words, as JSON."""
        plain, with_tools = self._tokenizer.chat_template(None), self._tokenizer.chat_template([{}])
        special = {name: str(token) for name, token in self._special.items()}
        data = self._data
        told = [data.train_on, data.chat_template_kwargs, str(data.chat_date)]
        said: list[object] = [self._own_template, plain, with_tools, special, *told]
        if self._processor is not None:
            said += [self._processor.chat_template, self._processor.identity()]
        return said

    def _dated(self, template: str) -> str:
        """The template with ``chat_date`` in place of the day. Raises DataError if a stream has none."""
        day = self._data.chat_date
        if day is not None:
            template = _DAY.sub(lambda asked: repr(day.strftime(asked[2])), template)
        if self._data.streaming and "strftime_now(" in template:
            what = "the chat template writes the day, which is another one when the run is resumed"
            raise DataError("dsx.data.chat_date", what, f'set it: "{time.strftime("%Y-%m-%d")}"')
        return template

    def encode(
        self, examples: Iterable[Example | BadRecordError]
    ) -> Iterator[tuple[Encoded | BadRecordError, ...]]:
        """Documents in the order of their examples, some at a time; errors stay where they are."""
        batch: list[_Marked | BadRecordError] = []
        length = 0
        for example in examples:
            made = [example] if isinstance(example, BadRecordError) else self._marked(example)
            batch += made
            length += sum(len(one.text) for one in made if isinstance(one, _Marked))
            if length >= _BATCH_CHARACTERS:
                yield self._encoded(batch)
                batch, length = [], 0
        yield self._encoded(batch)

    def _marked(self, example: Example) -> list[_Marked | BadRecordError]:
        try:
            if example.texts is not None:
                prompt, completion = example.texts
                text = prompt + completion
                text += "" if text.endswith(self.eos) else self.eos
                start = 0 if self._data.train_on == "all" else len(prompt)
                return [_Marked(example.where, text, [(start, len(text))], is_chat=False)]
            return [self._shown(example, *chat) for chat in self._chats(example)]
        except BadRecordError as error:
            return [error]

    def _shown(self, example: Example, text: str, spans: list[Span]) -> _Marked:
        """A chat, with the tokens of its pictures where these are read."""
        if self._processor is None:
            return _Marked(example.where, text, spans, is_chat=True)
        chat, made = self._expanded(self._processor, example, text)
        spans = moved(spans, made.spans)
        return _Marked(example.where, made.text, spans, is_chat=True, chat=chat, given=made.ids)

    def seen(self, example: Example) -> Expanded:
        """A chat as the processor gives it, with its pictures. Raises BadRecordError."""
        assert self._processor is not None, "dsx.data.pictures is false"
        text, _ = self.render(example, len(example.messages))
        return self._expanded(self._processor, example, text)[1]

    def _expanded(self, processor: Processor, example: Example, text: str) -> tuple[Chat, Expanded]:
        try:
            chat = Chat(text, tuple((path, digest_of(path)) for path in pictures_in(example.messages)))
            return chat, processor.expanded(chat)
        except (OSError, ValueError) as error:
            fix = "mend the record, or skip such records (dsx.data.bad_records)"
            raise BadRecordError(example.where, str(error), fix) from error

    def _chats(self, example: Example) -> list[tuple[str, list[Span]]]:
        """The documents of a chat: one, but for "each" of a template that writes earlier turns otherwise."""
        ends = [number + 1 for number, trained in enumerate(example.trained) if trained]
        if self._data.train_on != "each" or len(ends) < 2:
            return [self._chat(example)]
        found: list[tuple[str, list[Span]]] = []
        for end in ends:
            upto = replace(example, messages=example.messages[:end], trained=example.trained[:end])
            text, spans = self._chat(upto)
            before = found.pop()[1] if found and text.startswith(found[-1][0]) else []
            found.append((text, before + spans))
        return found

    def _chat(self, example: Example) -> tuple[str, list[Span]]:
        turns = [number for number, trained in enumerate(example.trained) if trained]
        turns = turns[-1:] if self._data.train_on in ("last", "each") else turns
        first = 0 if self._data.train_on == "all" else example.prompt
        whole = self._rendered(example, turns if first is None else range(first, len(example.messages)))
        text, marked = whole.text, whole.marks
        if first is not None:
            return text, [(first and whole.begin(first), len(text))]
        if not turns:
            raise whole.bad("it has no turn of the assistant that could be trained on")
        if marked is None:
            return text, [(whole.begin(turn), whole.end(turn)) for turn in turns]
        spans = whole.marked_in(marked, turns)
        if not spans:
            raise whole.bad("the chat template marks nothing of it with {% generation %}")
        return text, spans

    def _rendered(self, example: Example, turns: Iterable[int]) -> _Rendering:
        """With the calls of these turns, which some templates write in one form alone."""
        try:
            return _Rendering(self, example, turns)
        except BadRecordError:
            null = re.compile("None|null")
            given = null.search(str((example.messages, example.tools or "")))
            for as_text in (False, True):
                with suppress(BadRecordError):
                    whole = _Rendering(self, _with_null(example, as_text=as_text), turns)
                    if given or not null.search(whole.text):  # it was not written as a word
                        return whole
            raise

    def render(self, example: Example, count: int, *, prompt: bool = False) -> tuple[str, list[Span] | None]:
        """The first ``count`` messages as text, with what the template itself marks, if it has marks.

        Raises:
            BadRecordError: The template refuses the chat.
            DataError: There is no template, or it is none.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._own_template
        if template is None and self._processor is not None:
            template = self._processor.chat_template
        template = template or self._tokenizer.chat_template(example.tools)
        if template is None:
            raise DataError(
                f'dsx.data.tokenizer = "{self._tokenizer.name}"',
                "it has no chat template",
                "name one in dsx.data.chat_template, or use an instruct model's tokenizer",
            )
        has_marks = _MARKS.search(template) is not None
        template = self._dated(template)
        told = {**self._special, **self._data.chat_template_kwargs, **example.kwargs}
        try:
            with quiet_transformers():
                texts, marks = render_jinja_template(
                    [list(example.messages[:count])],
                    tools=example.tools,
                    chat_template=template,
                    return_assistant_tokens_mask=has_marks,
                    add_generation_prompt=prompt,
                    **told,
                )
        except TemplateSyntaxError as error:
            where = f"dsx.data.chat_template, or the template of {self._tokenizer.name}"
            what = f"is no template (line {error.lineno}: {first_line(error)})"
            raise DataError(where, what, "mend it") from error
        except Exception as error:
            raise BadRecordError(
                example.where,
                f"the chat template refuses it ({first_line(error)})",
                "mend the record, skip such records (dsx.data.bad_records), or use another template "
                "(dsx.data.chat_template)",
            ) from error
        return str(texts[0]), [(int(start), int(end)) for start, end in marks[0]] if has_marks else None

    def _encoded(self, batch: list[_Marked | BadRecordError]) -> tuple[Encoded | BadRecordError, ...]:
        done: dict[int, Encoded | BadRecordError] = {
            number: one for number, one in enumerate(batch) if isinstance(one, BadRecordError)
        }
        for is_chat in (True, False):
            found = [
                (n, one) for n, one in enumerate(batch) if isinstance(one, _Marked) and one.is_chat == is_chat
            ]
            texts = [one.text for _, one in found]
            encoded = self._tokenizer.encode_with_ends(texts, special=not is_chat) if texts else []
            for (number, one), (ids, ends) in zip(found, encoded, strict=True):
                done[number] = self._document(one, ids, ends)
        return tuple(done[number] for number in range(len(batch)))

    def _document(self, one: _Marked, ids: TokenIds, ends: TokenIds) -> Encoded | BadRecordError:
        trained = np.zeros(len(ids), np.bool_)
        begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        for start, end in one.spans:
            trained |= (ends > start) & ((ends <= end) | (begins < end))
        if one.given is not None and not np.array_equal(ids, one.given):
            what = "its processor gives other tokens than its tokenizer does for the same text"
            return BadRecordError(
                one.where, what, "use another family, or text alone (dsx.data.pictures: false)"
            )
        if not one.is_chat:
            ids, trained = self._completed(ids, trained)
        if not trained[1:].any():
            what = "none of its tokens is trained on: there is nothing to learn from it"
            return BadRecordError(one.where, what, "mend or remove it, or set dsx.data.bad_records")
        size = len(one.text.encode())
        return Encoded(where=one.where, ids=ids, trained=trained, text_bytes=size, chat=one.chat)

    def _completed(
        self, ids: TokenIds, trained: npt.NDArray[np.bool_]
    ) -> tuple[TokenIds, npt.NDArray[np.bool_]]:
        """With one end token, trained, and no token twice that both the text and the tokenizer give."""
        end = self._tokenizer.end_id
        begin = self._tokenizer.bos_id
        if len(ids) > 1 and begin is not None and ids[0] == ids[1] == begin:
            ids, trained = ids[1:], trained[1:]
        while len(ids) > 1 and ids[-1] == ids[-2] == end:
            ids, trained = ids[:-1], trained[:-1]
        if not len(ids) or ids[-1] != end:
            ids, trained = np.append(ids, end), np.append(trained, True)
        return ids, np.append(trained[:-1], True)


def _with_null(example: Example, *, as_text: bool) -> Example:
    """With null for content that calls stand for, as DeepSeek's templates want it; arguments as text."""
    messages = [_with_own_calls(turn) for turn in example.messages]
    for turn in messages:
        for call in turn.get("tool_calls", ()):
            turn["content"] = turn.get("content") or None
            if as_text:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return replace(example, messages=tuple(messages))


def _with_own_calls(turn: Message) -> Message:
    """A copy whose calls can be changed."""
    calls = [{**call, "function": {**call["function"]}} for call in turn.get("tool_calls", ())]
    return {**turn, "tool_calls": calls} if calls else {**turn}


class _Rendering:
    """A whole chat as text, with the calls of some turns, and where its turns begin and end."""

    def __init__(self, masks: Masks, example: Example, turns: Iterable[int]) -> None:
        self._masks, self._example = masks, example
        self._asked: dict[int, str] = {}
        self._count = len(example.messages)
        self.text, self.marks = masks.render(example, self._count)
        self._require_calls(turns)
        if self._count - 1 in turns and self._count > 1 and example.messages[-1]["role"] == "assistant":
            self._go_on(*example.messages[-2:])

    def _go_on(self, asked: Message, turn: Message) -> None:
        """Let the last turn follow what a model is asked to go on with, and raise if its thought is lost.

        Once the turn is there, a template may write what is before it otherwise (harmony leaves the thought
        of a call out), or not the thought that its prompt begins (DeepSeek's).
        """
        inside, _, said = (turn.get("content") or "").rpartition(_THOUGHT)
        given = (turn[name] for name in _THOUGHTS if turn.get(name))
        thought, said = str(next(given, inside.strip().removeprefix(_BEGUN))).strip(), said.strip()
        before = self._before(self._count - 1)
        rest = self.text[self._common(before) :]
        if not self.text.startswith(before) and self.marks is None:
            prompt = before.removeprefix(self._masks.render(self._example, self._count - 1)[0])
            messages = (*self._example.messages[:-2], {**asked, "content": _ASKED}, turn)
            text, _ = self._masks.render(replace(self._example, messages=messages), self._count)
            rest, header = text.rpartition(_ASKED)[2], prompt.rstrip().removesuffix(_BEGUN)
            answer = rest.partition(header)[2].lstrip() if header else ""
            if prompt and prompt in rest:
                self.text = before + rest.partition(prompt)[2]
            elif header != prompt.rstrip() and thought and said:
                if answer.startswith(said):
                    self.text = rest = f"{before}{thought}\n{_THOUGHT}\n\n{answer}"
                elif answer.removeprefix(_THOUGHT).lstrip().startswith(said):  # V3.1's writes the end of it
                    self.text = rest = f"{before}{thought}{answer}"
        if thought not in rest:
            what = f"the chat template does not write the thought of turn {self._count}, which would be lost"
            fix = "use a template that writes it (dsx.data.chat_template), remove it, or skip such records"
            raise BadRecordError(self._example.where, what, f"{fix} (dsx.data.bad_records)")

    def _require_calls(self, turns: Iterable[int]) -> None:
        """Raise BadRecordError unless each call is written: under another name, it is found anywhere."""
        messages = tuple(map(_with_own_calls, self._example.messages))
        own = [(turn, call["function"]) for turn in turns for call in messages[turn].get("tool_calls", ())]
        named = [(turn, function["name"]) for turn, function in own]
        for number, (_, function) in enumerate(own):
            function["name"] = f"dsx_call_{number}_"
        text, renamed = "", replace(self._example, messages=messages)
        with suppress(BadRecordError):  # of a template that takes the names of its tools alone
            text = self._masks.render(renamed, self._count)[0] if own else ""
        for number, (turn, name) in enumerate(named):
            content = messages[turn].get("content") or ""
            said = content.rpartition(_THOUGHT)[2].strip()  # in which the call may stand, too
            if text and f"dsx_call_{number}_" not in text and not (name in said and said in self.text):
                what = f"the chat template does not write the call of {name} in turn {turn + 1}"
                what += "" if content else ", which would be trained as an empty one"
                fix = "use a template that writes it (dsx.data.chat_template), or skip such records"
                raise BadRecordError(self._example.where, what, f"{fix} (dsx.data.bad_records)")

    def bad(self, what: str) -> BadRecordError:
        fix = "mend or remove it, or skip such records (dsx.data.bad_records)"
        return BadRecordError(self._example.where, what, fix)

    def _before(self, turn: int) -> str:
        """The turns before one, with the generation prompt."""
        if turn not in self._asked:
            self._asked[turn], _ = self._masks.render(self._example, turn, prompt=True)
        return self._asked[turn]

    def begin(self, turn: int) -> int:
        """Where what the assistant writes in a turn begins: behind the generation prompt."""
        if not turn:
            what = "the assistant's turn is the first, and its chat template does not mark where it begins"
            raise BadRecordError(self._example.where, what, f"begin with another turn, or {_FIX}")
        before = self._before(turn)
        if not self.text.startswith(before):
            what = "the turns before it, with the generation prompt,"
            if turn < self._count - 1:
                raise self._otherwise(before, turn, what, 'dsx.data.train_on "each" or "all"')
            fix = (
                "where that prompt begins a thought, give the turn one, or set what else the template is told"
            )
            raise self._otherwise(before, turn, what, f"{fix} (dsx.data.chat_template_kwargs)")
        return len(before)

    def end(self, turn: int) -> int:
        """Where the turn ends, its end-of-turn token included."""
        if turn == self._count - 1:
            return len(self.text)
        upto, _ = self._masks.render(self._example, turn + 1)
        if self.text.startswith(upto):
            return len(upto)
        ended = upto.rstrip()
        closed = ended.removesuffix(self._masks.eos)  # what is written once, behind the last turn (Phi-3)
        if closed != ended and self.text.startswith(closed):
            return len(closed)
        begin = self.begin(turn)
        thought, _, said = upto[begin:].rpartition(_THOUGHT)
        said = said.lstrip("\n")
        if thought and said and self.text.startswith(said, begin):
            return begin + len(said)
        raise self._otherwise(upto, turn, "the turns up to it", 'dsx.data.train_on "each", "last" or "all"')

    def marked_in(self, marked: list[Span], turns: list[int]) -> list[Span]:
        """What the template marks in these turns of the assistant."""
        own = [n for n, message in enumerate(self._example.messages) if message["role"] == "assistant"]
        if own == turns:
            return marked
        if len(own) == len(marked):
            return [span for turn, span in zip(own, marked, strict=True) if turn in turns]
        begins = [self._common(self._masks.render(self._example, n)[0]) for n in range(1, self._count)]
        return [(start, end) for start, end in marked if sum(one <= start for one in begins) in turns]

    def _common(self, other: str) -> int:
        pairs = zip(self.text, other, strict=False)
        return next((n for n, (one, two) in enumerate(pairs) if one != two), min(len(self.text), len(other)))

    def _otherwise(self, other: str, turn: int, what: str, fix: str) -> BadRecordError:
        at = self._common(other)
        return BadRecordError(
            self._example.where,
            f"turn {turn + 1} cannot be told apart: the chat template writes {what} otherwise than in the "
            f"whole chat, {other[at : at + 40]!r} for {self.text[at : at + 40]!r}",
            f"{_FIX}, or {fix}",
        )
