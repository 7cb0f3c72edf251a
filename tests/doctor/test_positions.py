"""The parser with offsets reads what the hjson package reads; edits of the text do what they say."""

from __future__ import annotations

import json

import hjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.config.document import PositionError, from_text, parse, same
from dsx.config.refusals import Edit
from dsx.doctor.mend import apply_to_config, apply_to_text
from dsx.errors import ConfigError

TEXTS = {
    "json": '{"a": 1, "b": {"c": [1, 2.5, -3e-4, true, null, "x\\n\\u00e9"]}}',
    "comments": '{ // one\n # two\n /* three\n */ "a": 1 # four\n}',
    "keys": "{a: 1\n 'b': 2\n b-c.d: 3}",
    "strings": "{a: some text, with commas\n b: 'it\\'s \"so\"'\n c: '''\n    two\n    lines\n    '''\n}",
    "numbers": "{a: 5e8, b: 1e12, c: 1.0, d: -0.5, e: 01, f: 1_000\n g: .5\n h: True\n i: 0x10\n}",
    "no braces": "a: 1\nb: {c: 2}\n",
    "trailing": '{"a": [1, 2,], "b": 3,}',
    "missing commas": '{"a": 1\n "b": [1\n 2]\n}',
    "word": "{a: true // yes\n b: truely\n c: null, d: nullable\n}",
    "url": "{a: http://x.y/z\n}",
    "bom": '\ufeff{"a": 1}',
    "empty": "{}",
    "blank": "  \n",
    "carriage returns": '{\r\n"a": 1,\r\n"b": text\r\n}\r\n',
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_same_values_as_hjson(name):
    assert same(parse(TEXTS[name]).root.plain(), hjson.loads(TEXTS[name], object_pairs_hook=dict))


pieces = st.sampled_from(
    [
        *"{}[],:\n #'\"/*\\",
        "//",
        "/*",
        "*/",
        "'''",
        '"a"',
        "b",
        "1",
        "5e8",
        "-0.25",
        "true",
        "null",
        "True",
        '"k": ',
    ]
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(pieces, max_size=14).map("".join))
def test_never_differs_from_hjson_in_silence(text):
    try:
        expected = hjson.loads("{" + text, object_pairs_hook=dict)
    except (ValueError, IndexError):  # hjson's own errors are ValueErrors; some texts end in IndexError
        return
    try:
        found = parse("{" + text).root.plain()
    except PositionError:
        return  # no positions then: messages go without line numbers
    assert from_text("{" + text).document is None or same(found, expected)


def test_places():
    source = from_text('{\n  "a": {"b": 1,\n    "c": [10, {"d": 2}]}\n}')
    assert source.place(("a",)) == (2, 3)
    assert source.place(("a", "c", 1, "d")) == (3, 16)
    assert source.place(("a", "absent")) == (2, 3)
    assert source.place(()) is None


def test_keys_written_twice():
    source = from_text('{"a": 1,\n "z": {"b": 1,\n "b": 2},\n "a": 3}')
    assert dict(source.twice()) == {("a",): [1, 4], ("z", "b"): [2, 3]}
    assert source.config == {"a": 3, "z": {"b": 2}}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a": 1,\n "b": {"c": 2\n', "line 2"),
        ('{"a": 1,\n "b" 2}', "line 2"),
        ('{"a": "x\n}', "line 1"),
        ('{"a": 1} }', "line 1"),
        ("[1, 2]", "not an object"),
    ],
)
def test_wrong_syntax_says_where(text, place):
    with pytest.raises(ConfigError, match=place):
        from_text(text)


EDITS = [
    Edit("set", ("a",), 2),
    Edit("set", ("n", "deep", "er"), {"x": [1]}),
    Edit("set", ("b", "new"), "text"),
    Edit("remove", ("a",)),
    Edit("remove", ("z",)),
    Edit("remove", ("b", "c")),
    Edit("rename", ("b", "c"), "see"),
    Edit("set", ("l", 1), 9),
]
LAYOUTS = [
    '{"a": 1, "b": {"c": 2}, "l": [1, 2], "z": 3}',
    (
        '{\n  "a": 1,  # one\n  "b": {\n    "c": 2 // two\n  },\n'
        '  "l": [\n    1,\n    2\n  ],\n  // last\n  "z": 3\n}\n'
    ),
    "{a: 1\n b: {c: 2}\n l: [1\n 2]\n z: 3\n}",
    '{"a": 1, "b": {"c": 2,}, "l": [1, 2], "z": 3,}',
    '{\r\n\t"z": 3,\r\n\t"a": 1,\r\n\t"b": {"c": 2},\r\n\t"l": [1, 2]\r\n}',
]


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_edits_change_what_they_say(text, edit):
    changed = apply_to_text(text, [edit])
    assert from_text(changed).config == apply_to_config(from_text(text).config, edit)
    for comment in ("# one", "// two", "// last"):
        gone = edit.kind == "remove" and {"# one": ("a",), "// two": ("b", "c")}.get(comment) == edit.path
        assert (comment in changed) or gone or comment not in text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab,{}#/'\" ", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from("abcd"), json_values, max_size=4), st.data())
def test_edits_of_any_json(config, data):
    text = json.dumps(config, indent=data.draw(st.sampled_from([None, 2])))
    value = data.draw(json_values)
    edits = [
        Edit("set", ("b",), value),
        Edit("rename", ("b",), "e"),
        Edit("set", ("f", "g"), 1),
        Edit("remove", ("e",)),
    ]
    expected = config
    for edit in edits:
        expected = apply_to_config(expected, edit)
    assert same(from_text(apply_to_text(text, edits)).config, expected)
