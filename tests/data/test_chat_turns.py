"""Each turn of a chat as it is when it is written, by published templates: thoughts, channels, calls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import published, save_tokenizer
from test_chat_masks import CALL, CHATS, TOOL, Labelled, config, of_dsx, of_trl, refused, turns, write

from dsx.data.text import Text, prepare_text

THOUGHTS = turns("Two and two?", "It is 4.", "And three?", "It is 7.", "Sure?", "Yes.")
for number in (1, 3, 5):
    THOUGHTS[number]["reasoning_content"] = f"They ask me, {number}."
CALLED = [
    {"role": "user", "content": "Add two."},
    {"role": "assistant", "content": "", "thinking": "I have a tool.", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "4"},
    {"role": "assistant", "content": "It is 4.", "thinking": "That is it."},
]
THINKING = ("gptoss", "nemotron_3_nano", "qwen3", "qwen3_5_think", "gemma4_v5", "glm4moe")
OFF = {"enable_thinking": False}


def named(chat: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """The chat with its thoughts under these names, which different templates read."""
    found = []
    for turn in chat:
        thought = next((turn[name] for name in ("reasoning_content", "thinking") if name in turn), None)
        rest = {key: value for key, value in turn.items() if key not in ("reasoning_content", "thinking")}
        found.append({**rest, **({} if thought is None else dict.fromkeys(names, thought))})
    return found


def one_by_one(chat: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    """Each answer as trl's completion of what was said before it."""
    ends = [number for number, turn in enumerate(chat) if turn["role"] == "assistant"]
    return [{"prompt": chat[:end], "completion": [chat[end]], **more} for end in ends]


@pytest.mark.parametrize("name", THINKING)
def test_each_turn_is_a_completion_of_trl(tmp_path: Path, name: str) -> None:
    """The published template, without marks; the thought is under a name that this one does not know."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=published(name))
    rows = one_by_one(named(THOUGHTS, "reasoning_content", "thinking", "reasoning"))
    theirs = of_trl(rows, tokenizer, tmp_path)
    key = "reasoning_content" if name == "gptoss" else "thinking"
    source = write(tmp_path / "chats.jsonl", [{"messages": named(THOUGHTS, key)}])
    ours = of_dsx(source, tmp_path / "tokenizer", train_on="each")
    assert ours == theirs
    for turn, (_, labels) in zip(THOUGHTS[1::2], ours, strict=True):
        said = tokenizer.decode([label for label in labels if label != -100])
        assert turn["reasoning_content"] in said
        assert turn["content"] in said
        assert not any(other["content"] in said for other in THOUGHTS if other is not turn)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "nemotron_3_nano"])
def test_chats_without_thoughts_by_the_config_or_by_the_record(tmp_path: Path, name: str) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=published(name))
    chat = [{**turn} for turn in CHATS[3][:4]]
    theirs = of_trl(one_by_one(chat, chat_template_kwargs=OFF), tokenizer, tmp_path)
    plain = write(tmp_path / "a.jsonl", [{"messages": chat}])
    ours = of_dsx(plain, tmp_path / "tokenizer", train_on="each", chat_template_kwargs=OFF)
    assert whole_turns(ours) == whole_turns(theirs)
    said = [tokenizer.decode([n for n in labels if n != -100]) for _, labels in theirs]
    assert said == [f"{chat[1]['content']}<|im_end|>\n", f"{chat[3]['content']}<|im_end|>\n"]
    mixed = [{"messages": THOUGHTS}, {"messages": chat, "chat_template_kwargs": OFF}]
    of_both = of_dsx(write(tmp_path / "b.jsonl", mixed), tmp_path / "tokenizer", train_on="each")
    assert of_both[3:] == ours
    column = {"chat_template_kwargs": "told"}
    other = write(tmp_path / "c.jsonl", [{"messages": chat, "told": '{"enable_thinking": false}'}])
    assert of_dsx(other, tmp_path / "tokenizer", train_on="each", columns=column) == ours


def whole_turns(rows: Labelled) -> list[list[int]]:
    """The trained stretches of all documents, whichever document each is in."""
    found = []
    for _, labels in rows:
        found += [text.split() for text in re.split(r"(?:-100 ?)+", " ".join(map(str, labels))) if text]
    return [[int(label) for label in one] for one in found]


@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen2_5", "cohere"])
def test_a_template_that_rewrites_nothing_cuts_nothing(tmp_path: Path, name: str) -> None:
    save_tokenizer(tmp_path / "tokenizer", template=published(name))
    source = write(tmp_path / "chats.jsonl", [{"messages": chat} for chat in CHATS[:4]])
    whole = of_dsx(source, tmp_path / "tokenizer")
    assert of_dsx(source, tmp_path / "tokenizer", train_on="each") == whole


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "nemotron_3_nano"])
def test_calls_and_results_between_thoughts(tmp_path: Path, name: str) -> None:
    """The thought before a call stays until the answer is there, so that one document holds both.

    GPT-OSS's template leaves it out once the answer is there. The answer follows it all the same: that is
    what a model is asked to go on with, and what it then writes is what trl's completion ends with.
    """
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=published(name))
    chat = named(CALLED, "reasoning_content", "thinking")
    theirs = of_trl(one_by_one(chat, tools=[TOOL]), tokenizer, tmp_path)
    source = write(tmp_path / "chats.jsonl", [{"messages": CALLED, "tools": [TOOL]}])
    ((ids, labels),) = of_dsx(source, tmp_path / "tokenizer", train_on="each")
    ours, (call, answer) = whole_turns([(ids, labels)]), whole_turns(theirs)
    assert ours[0] == call
    assert answer[-len(ours[1]) :] == ours[1]
    asked = tokenizer.apply_chat_template(chat[:3], tools=[TOOL], add_generation_prompt=True)["input_ids"]
    assert ids == asked + ours[1]


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3", "V3.1"])
@pytest.mark.parametrize("inside", [False, True])
def test_deepseek_thinks_behind_its_own_prompt(tmp_path: Path, name: str, inside: bool) -> None:
    """Its template writes no thought at all; what it asks a model to go on with begins one."""
    template, ended = published("deepseekv3" if name == "V3.1" else name), "\n</think>\n\n"
    if name == "V3.1":  # which says where the thought that it leaves out has ended
        content = "{{'<｜Assistant｜>' + content"
        assert content in template
        template = template.replace(content, content.replace("｜>", "｜></think>"))
        ended = "</think>" + "\n\n" * inside
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=template)
    chat = THOUGHTS[:4]
    if inside:
        chat = [
            {"role": turn["role"], "content": f"<think>\n{thought}\n</think>\n\n{turn['content']}"}
            if (thought := turn.get("reasoning_content"))
            else turn
            for turn in chat
        ]
    ours = of_dsx(write(tmp_path / "a.jsonl", [{"messages": chat}]), tmp_path / "tokenizer", train_on="each")
    for end, (ids, labels) in zip((1, 3), ours, strict=True):
        prompt = tokenizer.apply_chat_template(chat[:end], add_generation_prompt=True, tokenize=False)
        thought, answer = THOUGHTS[end]["reasoning_content"], THOUGHTS[end]["content"]
        said = f"{thought}{ended}{answer}<｜end▁of▁sentence｜>"
        assert tokenizer.decode(ids) == prompt + said
        assert tokenizer.decode([label for label in labels if label != -100]) == said
    plain = write(tmp_path / "b.jsonl", [{"messages": CHATS[0]}])
    assert "where that prompt begins a thought, give the turn one" in refused(plain, tmp_path / "tokenizer")


def test_a_thought_that_a_template_does_not_write_is_refused(tmp_path: Path) -> None:
    """transformers and trl lose it without a word."""
    save_tokenizer(tmp_path / "tokenizer", template=published("gemma3"))
    source = write(tmp_path / "a.jsonl", [{"messages": THOUGHTS}])
    found = refused(source, tmp_path / "tokenizer")
    assert (
        "a.jsonl, line 1: the chat template does not write the thought of turn 6, which would be lost"
        in found
    )


def test_the_day_is_the_one_that_is_named(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=published("gptoss"))
    source = write(tmp_path / "a.jsonl", [{"messages": CHATS[0]}])
    told = {"chat_template_kwargs": {"reasoning_effort": "high"}}
    ((ids, _),) = of_dsx(source, tmp_path / "tokenizer", chat_date="2001-02-03", **told)
    today = tokenizer.apply_chat_template(CHATS[0], tokenize=False, reasoning_effort="high")
    assert tokenizer.decode(ids) == re.sub(r"(Current date: )[\d-]+", r"\g<1>2001-02-03", today)
    assert "2001-02-03" not in today


def test_the_documents_of_a_chat_stay_together(tmp_path: Path) -> None:
    """On one side of the held-out split: what is evaluated has not been read."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=published("qwen3"))
    rows = [{"messages": turns(f"ask {n}x", "a", "b", "c", "d", "e")} for n in range(30)]
    data = config(write(tmp_path / "a.jsonl", rows), tmp_path / "tokenizer", train_on="each", held_out=0.2)
    text = Text.open(prepare_text(data, tmp_path / "cache", held_out_tokens=1), data)
    corpus = text.parts[0].corpus
    train, held_out = (
        [re.findall(r"ask (\d+)x", tokenizer.decode(part.document(n)[0]))[0] for n in part.kept(999)]
        for part in (corpus.train, corpus.held_out)
    )
    assert not set(train) & set(held_out)
    assert (len(train), len(held_out), len(set(held_out))) == (72, 18, 6)
