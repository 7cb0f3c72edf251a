"""What is trained on of chats and completions, token by token beside trl's SFTTrainer on the same records."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from chat_tokenizers import published, save_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import get_training_chat_template

from dsx.config.schema import DataConfig
from dsx.data.masks import Encoded, Masks
from dsx.data.records import BadRecordError, examples
from dsx.data.text import Text, prepare_text
from dsx.data.tokenizers import load_tokenizer
from dsx.errors import DataError

Labelled = list[tuple[list[int], list[int]]]


def turns(*contents: str, first: str = "user") -> list[dict[str, Any]]:
    roles = [first, "user", "assistant"] if first == "system" else ["user", "assistant"]
    while len(roles) < len(contents):
        roles += ["user", "assistant"]
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


CHATS = [
    turns("What is 2 + 2?", "It is 4."),
    turns("  Spaces before, and after  ", "\n Lines and\n\tspaces \n", "and then?", "1, 2, 3"),
    turns("Ünïcödé 你好 🎉", "Straße — 再见 👋🏽", "<b>text</b>", "def f(x):\n    return x\n"),
    turns(*[f"turn {n}" * n for n in range(1, 9)]),
    turns("No answer comes after this one", "yes", "?"),
]
SYSTEM = [turns("You are terse.", "Why?", "Because.", "Really?", "Yes.", first="system")]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(source: Path, tokenizer: Path, **keys: object) -> DataConfig:
    usual = {"format": "chat", "sequence_length": 64, "held_out": 0}
    return DataConfig(source=str(source), tokenizer=str(tokenizer), **{**usual, **keys})


def refused(source: Path, tokenizer: Path) -> str:
    """Why dsx takes no token of the one chat in a file."""
    data = config(source, tokenizer)
    ((found,),) = Masks(data, load_tokenizer(data.tokenizer)).encode(examples(data))
    assert isinstance(found, BadRecordError)
    return str(found)


def of_dsx(source: Path, tokenizer: Path, form: str = "chat", **keys: object) -> Labelled:
    """Ids and labels, unshifted."""
    data = config(source, tokenizer, format=form, **keys)
    found = []
    for batch in Masks(data, load_tokenizer(data.tokenizer)).encode(examples(data)):
        for one in batch:
            assert isinstance(one, Encoded), one
            ids = one.ids.tolist()
            found.append((ids, [n if on else -100 for n, on in zip(ids, one.trained, strict=True)]))
    return found


def of_trl(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, tmp_path: Path, **keys: Any
) -> Labelled:
    """What SFTTrainer makes of the rows before it packs them."""
    template = get_training_chat_template(tokenizer) if keys.get("assistant_only_loss") else None
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **{"max_length": None, **keys})
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=template, completion_only_loss=True)
    data = datasets.Dataset.from_list(rows)
    made = SFTTrainer._prepare_dataset(trainer, data, tokenizer, args, False, None, "train")
    return [(row["input_ids"], row["labels"]) for row in made]


PUBLISHED = (
    *("llama3", "gemma", "gemma3", "phi3", "phi3_5", "qwen3_instruct_2507", "cohere", "cohere2", "lfm2"),
)
WITHOUT_SYSTEM = ("gemma",)


@pytest.mark.parametrize("name", PUBLISHED)
def test_masks_by_prefixes_are_those_of_trl(tmp_path: Path, name: str) -> None:
    """dsx reads the published template, which has no marks; trl takes its own copy, which has."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=published(name))
    rows = [{"messages": chat} for chat in CHATS + ([] if name in WITHOUT_SYSTEM else SYSTEM)]
    ours = of_dsx(write(tmp_path / "chats.jsonl", rows), tmp_path / "tokenizer")
    assert ours == of_trl(rows, tokenizer, tmp_path, assistant_only_loss=True)


def test_qwen2_5_is_trl_s_but_for_the_newline_of_the_header(tmp_path: Path) -> None:
    """trl's copy trains the newline behind "assistant", too, which the generation prompt gives."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=published("qwen2_5"))
    rows = [{"messages": chat} for chat in CHATS + SYSTEM]
    header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    ours = of_dsx(write(tmp_path / "chats.jsonl", rows), tmp_path / "tokenizer")
    for (ids, mine), (same, theirs) in zip(
        ours, of_trl(rows, tokenizer, tmp_path, assistant_only_loss=True), strict=True
    ):
        more = {at for at in range(len(ids)) if mine[at] != theirs[at]}
        ends = {at for at in range(len(ids)) if ids[: at + 1][-len(header) :] == header}
        assert (ids, more) == (same, ends)


MARKED = (
    *("qwen2_5", "qwen3", "deepseekv3", "deepseek_r1_distill", "gptoss", "glm4moe", "nemotron_3_nano"),
    *("llama3", "phi3"),
)


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_marks_of_a_template_are_taken(tmp_path: Path, name: str, train_on: str) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    template = tmp_path / "marked.jinja"
    template.write_text(published(f"{name}_training"))
    tokenizer.chat_template = template.read_text()
    chats = CHATS[:3] if train_on == "last" else CHATS[:4]
    rows = [{"messages": chat} for chat in chats]
    source = write(tmp_path / "chats.jsonl", rows)
    ours = of_dsx(source, tmp_path / "tokenizer", chat_template=str(template), train_on=train_on)
    theirs = of_trl(rows, tokenizer, tmp_path, assistant_only_loss=True)
    assert [ids for ids, _ in ours] == [ids for ids, _ in theirs]
    for chat, (_, mine), (_, labels) in zip(chats, ours, theirs, strict=True):
        if train_on == "assistant":
            assert mine == labels
            continue
        answer = chat[-1]["content"].strip()
        text = tokenizer.decode([label for label in mine if label != -100])
        assert answer in text
        assert len(chat) == 2 or chat[1]["content"].strip() not in text
        assert all(one in (-100, other) for one, other in zip(mine, labels, strict=True))


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("name", [*PUBLISHED, "qwen2_5", "llama3_1", "llama3_2", "qwen3", "glm4moe"])
def test_the_last_turn_is_a_completion_of_trl(tmp_path: Path, name: str, metaspace: bool) -> None:
    """Nothing of trl's copies: the published template, the prompt's length, and the rest."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=published(name), metaspace=metaspace)
    chats = [{"messages": chat} for chat in CHATS[:4]]
    rows = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in chats]
    theirs = of_trl(rows, tokenizer, tmp_path)
    source = write(tmp_path / "chats.jsonl", chats)
    assert of_dsx(source, tmp_path / "tokenizer", train_on="last") == theirs
    assert of_dsx(write(tmp_path / "rows.jsonl", rows), tmp_path / "tokenizer", "completion") == theirs


AXOLOTL = json.loads((Path(__file__).parent / "axolotl_masks.json").read_text())


@pytest.mark.parametrize("name", AXOLOTL["templates"])
def test_masks_are_those_of_axolotl_but_for_blanks(tmp_path: Path, name: str) -> None:
    """axolotl leaves out the blanks before a turn's text and behind the token that ends it."""
    known = AXOLOTL["templates"][name]
    template = known.get("template") or published(name)
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=template)
    source = write(tmp_path / "chats.jsonl", [{"messages": chat} for chat in AXOLOTL["chats"]])
    thought = (
        "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    )  # of the last turn, written by the template
    for (ids, labels), theirs in zip(of_dsx(source, tmp_path / "tokenizer"), known["trained"], strict=True):
        spans: list[list[int]] = []
        for at, label in enumerate(labels):
            if label != -100 and at and labels[at - 1] != -100:
                spans[-1].append(ids[at])
            elif label != -100:
                spans.append([ids[at]])
        *earlier, last = [one.strip() for one in theirs]
        assert [tokenizer.decode(span).strip() for span in spans] == [*earlier, thought + last]


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
    },
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
WITH_TOOLS = [
    {"role": "user", "content": "Add two."},
    {"role": "assistant", "content": "I will.", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]


def test_tool_calls_are_trained_and_results_are_not(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=published("qwen3_instruct_2507"))
    rows = [{"messages": WITH_TOOLS, "tools": [TOOL]}]
    theirs = of_trl(rows, tokenizer, tmp_path, assistant_only_loss=True)
    assert of_dsx(write(tmp_path / "a.jsonl", rows), tmp_path / "tokenizer") == theirs
    # As OpenAI writes them: arguments are text, and what does not apply is null.
    function = {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])}
    openai = [{**turn, "name": turn.get("name"), "refusal": None} for turn in WITH_TOOLS]
    openai[1] |= {"tool_calls": [{**CALL, "function": function}]}
    same = write(tmp_path / "b.jsonl", [{"messages": openai, "tools": json.dumps([TOOL])}])
    assert of_dsx(same, tmp_path / "tokenizer") == theirs
    # As ShareGPT writes them.
    sharegpt = [
        {"from": "human", "value": "Add two."},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "It is 4."},
    ]
    silent = [{**turn, "content": ""} if turn.get("tool_calls") else turn for turn in WITH_TOOLS]
    pair = [{"messages": silent, "tools": [TOOL]}]
    assert of_dsx(
        write(tmp_path / "c.jsonl", [{"conversations": sharegpt, "tools": [TOOL]}]), tmp_path / "tokenizer"
    ) == of_dsx(write(tmp_path / "d.jsonl", pair), tmp_path / "tokenizer")


def test_tool_calls_that_a_template_leaves_out_are_refused(tmp_path: Path) -> None:
    """TRL trains such a turn as an empty one."""
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] or '' }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=template)
    found = refused(write(tmp_path / "a.jsonl", [{"messages": WITH_TOOLS}]), tmp_path / "tokenizer")
    assert "a.jsonl, line 1: the chat template does not write the call of add in turn 2. Fix" in found
    both = [CALL, {**CALL, "function": {**CALL["function"], "name": "sub"}}]
    two = {"role": "assistant", "tool_calls": both}
    silent = write(tmp_path / "b.jsonl", [{"messages": [WITH_TOOLS[0], two]}])
    empty = "of add in turn 2, which would be trained as an empty one"
    assert empty in refused(silent, tmp_path / "tokenizer")
    first = template.replace("}}\n{%", "}}{{ (m.tool_calls or [{}])[0] }}\n{%")
    save_tokenizer(tmp_path / "first", template=first)
    assert "the call of sub in turn 2" in refused(silent, tmp_path / "first")
    # But not those that stand in the content, or in turns that are not trained on.
    said = {**WITH_TOOLS[1], "content": f"<tool_call>{json.dumps(CALL['function'])}</tool_call>"}
    fine = ((said, "assistant"), ({**two, "weight": 0}, "assistant"), (WITH_TOOLS[1], "last"))
    for turn, train_on in fine:
        source = write(tmp_path / "c.jsonl", [{"messages": [WITH_TOOLS[0], turn, *WITH_TOOLS[2:]]}])
        ((_, labels),) = of_dsx(source, tmp_path / "tokenizer", train_on=train_on)
        text = tokenizer.decode([label for label in labels if label != -100])
        assert text == (said["content"] + "\n" if turn is said else "") + "It is 4.\n"


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill", "gptoss", "qwen3_vl"])
def test_calls_without_content_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """As OpenAI writes them, in the form that each template takes: null for DeepSeek's, others no content."""
    template = published(f"{name}_training")
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=template)
    given = {"role": "assistant", "tool_calls": [CALL]}
    source = write(tmp_path / "a.jsonl", [{"messages": [WITH_TOOLS[0], {**given, "content": None}]}])
    if name == "deepseek_r1_distill":
        given["tool_calls"] = [{**CALL, "function": {"name": "add", "arguments": '{"a": 2}'}}]
    given |= {"content": None} if "deepseek" in name else {}
    keys = {"chat_template": template, "return_assistant_tokens_mask": True}
    (text,), (spans,) = render_jinja_template(
        [[WITH_TOOLS[0], given]], **keys, **tokenizer.special_tokens_map
    )
    said = "".join(text[start:end] for start, end in spans)
    ((ids, labels),) = of_dsx(source, tmp_path / "tokenizer")
    assert "add" in said
    assert [tokenizer.decode(ids), tokenizer.decode([n for n in labels if n != -100])] == [text, said]


def test_weights_of_turns(tmp_path: Path) -> None:
    """OpenAI's format for fine-tuning: a turn of weight 0 is context alone."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=published("llama3"))
    chat = [{**turn, "weight": int(n == 3)} if n % 2 else turn for n, turn in enumerate(CHATS[3][:6])]
    ((_, labels),) = of_dsx(write(tmp_path / "a.jsonl", [{"messages": chat}]), tmp_path / "tokenizer")
    text = tokenizer.decode([label for label in labels if label != -100])
    assert text == CHATS[3][3]["content"] + "<|eot_id|>"


def test_sharegpt_is_openai_s_under_other_names(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer", template=published("llama3"))
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    first = write(tmp_path / "a.jsonl", [{"messages": chat} for chat in SYSTEM])
    rows = [[{"from": names[turn["role"]], "value": turn["content"]} for turn in chat] for chat in SYSTEM]
    second = write(tmp_path / "b.jsonl", [{"conversations": chat} for chat in rows])
    third = write(tmp_path / "c.jsonl", [{"system": "You are terse.", "dialogue": chat[1:]} for chat in rows])
    wanted = of_dsx(first, tmp_path / "tokenizer")
    assert of_dsx(second, tmp_path / "tokenizer") == wanted
    assert of_dsx(third, tmp_path / "tokenizer", columns={"messages": "dialogue"}) == wanted


COMPLETIONS = [
    {"prompt": "Two and two is", "completion": " four."},
    {"prompt": "Ünïcödé:\n", "completion": "再见 👋🏽"},
    {"prompt": "Ends itself:", "completion": " yes</s>"},
]


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("adds_begin", [False, True])
def test_completions_are_those_of_trl(tmp_path: Path, metaspace: bool, adds_begin: bool) -> None:
    """With the begin token that the tokenizer adds, and one end token, however the text ends."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", metaspace=metaspace, adds_begin=adds_begin)
    source = write(tmp_path / "a.jsonl", COMPLETIONS)
    ours = of_dsx(source, tmp_path / "tokenizer", "completion")
    assert ours == of_trl(COMPLETIONS, tokenizer, tmp_path)
    whole = of_dsx(source, tmp_path / "tokenizer", "completion", train_on="all")
    begin = [-100] if adds_begin else []
    assert [(ids, begin + ids[len(begin) :]) for ids, _ in ours] == whole


def test_no_special_token_comes_twice(tmp_path: Path) -> None:
    """From a prompt that is written with its begin token, and from a template that writes it."""
    template = published("llama3")
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=template, adds_begin=True)
    source = write(tmp_path / "a.jsonl", [{"prompt": "<s>Two", "completion": " and</s>"}])
    ((ids, _),) = of_dsx(source, tmp_path / "tokenizer", "completion")
    assert tokenizer.decode(ids) == "<s>Two and</s>"
    source = write(tmp_path / "b.jsonl", [{"messages": CHATS[0]}])
    ((ids, _),) = of_dsx(source, tmp_path / "tokenizer")
    assert tokenizer.decode(ids).count("<s>") == 1


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "gptoss", "deepseekv3", "nemotron_3_nano"])
def test_a_template_whose_turns_cannot_be_told_is_refused(tmp_path: Path, name: str) -> None:
    save_tokenizer(tmp_path / "tokenizer", template=published(name))
    source = write(tmp_path / "a.jsonl", [{"messages": CHATS[1]}])
    found = refused(source, tmp_path / "tokenizer")
    assert "a.jsonl, line 1: turn 2 cannot be told apart" in found
    assert "use a template with {% generation %} marks (dsx.data.chat_template)" in found
    assert len(of_dsx(source, tmp_path / "tokenizer", train_on="all")) == 1


def test_what_is_too_long_is_trl_s(tmp_path: Path) -> None:
    """Cut to the first tokens; what then has nothing to train on is dropped."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=published("llama3"))
    rows = [{"messages": turns("why? " * n, "so. " * (1 + 5 * n % 9))} for n in range(24)]
    theirs = of_trl(rows, tokenizer, tmp_path, assistant_only_loss=True, max_length=48)
    data = config(write(tmp_path / "chats.jsonl", rows), tmp_path / "tokenizer", sequence_length=48)
    text = Text.open(prepare_text(data, tmp_path / "cache", held_out_tokens=1), data)
    found, windows = [], text.parts[0].corpus.train
    for index in range(len(windows)):
        ids, labels, positions = windows.window(index)
        for begin in (positions == 0).nonzero().flatten().tolist():
            end = begin + 1
            while end < 48 and positions[end]:
                end += 1
            if (labels[begin:end] != -100).any():
                found.append((ids[begin:end].tolist(), [-100, *labels[begin : end - 1].tolist()]))
    assert sorted(found) == sorted(theirs)
    assert len(theirs) < 24
    dropping = data.model_copy(update={"too_long": "drop"})
    whole = Text.open(prepare_text(dropping, tmp_path / "cache", held_out_tokens=1), dropping)
    fill, cut = whole.parts[0].corpus.fill(), text.parts[0].corpus.fill()
    assert 0 < fill.documents == cut.documents - cut.truncated == 24 - fill.dropped
    assert text.digest != whole.digest
    refusing = data.model_copy(update={"too_long": "refuse"})
    with pytest.raises(DataError, match=r"line \d+: it has \d+ tokens, and dsx.data.too_long refuses more"):
        prepare_text(refusing, tmp_path / "cache", held_out_tokens=1)


def test_a_prepared_corpus_that_was_spoilt_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer", template=published("llama3"))
    source = write(tmp_path / "chats.jsonl", [{"messages": chat} for chat in CHATS])
    data = config(source, tmp_path / "tokenizer")
    (folder,) = prepare_text(data, tmp_path / "cache", held_out_tokens=1)
    found = {"sizes": "documents of these sizes are not those of train.bin", "trained": "bytes"}
    for name, what in found.items():
        path = folder / f"train.{name}.bin"
        whole = path.read_bytes()
        path.write_bytes(b"\xff" + whole[1:] if name == "sizes" else whole[1:])
        with pytest.raises(DataError, match=what):
            Text.open((folder,), data)
        path.write_bytes(whole)
    assert Text.open((folder,), data).digest
