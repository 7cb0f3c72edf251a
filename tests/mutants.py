"""Hostile files made from good ones, the same for the same seed: JSON, safetensors, torch's files, bytes.

What a test does with a mutant, and what it takes for a good end, is its own; :mod:`mutant_runs` tries many.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

ESCAPES = "\x1b[31m\x07\u202e\x9b2J"
"""What a name may do to a terminal: colour, bell, writing backwards, a C1 control."""

JSON_VALUES = (
    *("null", "true", "-1", "0", "1", "2", "0.5", "1e15", "1e999", "-1e999", "NaN", "-Infinity", '""', "[]"),
    *("{}", "[[]]", "[null]", '{"": 1}', "1000000000", "1000000000000000", "9" * 5000, str(2**63), '"3"'),
    *('"\\ud800"', json.dumps(ESCAPES), '"a\\u0000b"', '"../../etc/passwd"', json.dumps("x" * 5000)),
    *("[" * 900 + "]" * 900, "[" * 20000 + "]" * 20000, '{"a":' * 900 + "1" + "}" * 900),
    *("[1000000000000000]", "[0, 1000000000]", '[["a"], {"b": []}]', '{"__dsx__": "tensor"}'),
    '{"__dsx__": "array", "dtype": "O", "shape": [1], "base64": "AAAAAAAAAAA="}',
)
"""JSON texts to put where another value was."""

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 0.5, 1e15, float("nan"), float("inf"), 10**9, 10**15, 10**400, "", "3", b"x"),
    *([], {}, (), [None], {None: 1}, {"": 1}, {1: {}}, ("a", [1]), [10**15], (0, 10**9), {"a": {"b": "c"}}),
    *("\ud800", ESCAPES, "a\0b", "../../etc/passwd", "x" * 5000, {ESCAPES: ESCAPES}),
)
"""Values to put where another was in a pickle."""


@dataclass(frozen=True, slots=True)
class _Raw:
    """A JSON text that stands for itself."""

    text: str


def mutate(folder: Path, seed: int, files: Sequence[str] = ()) -> str:
    """Change one file in ``folder`` for the worse, and say how.

    Args:
        folder: Of good files; a copy that may be spoilt.
        seed: What is done depends on it and the files alone.
        files: Names, relative to the folder, of those to choose from; by default all.
    """
    rng = random.Random(seed)
    names = sorted(files) or sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    name = rng.choice(names)
    path = folder / name
    data = path.read_bytes()
    kinds: list[Callable[[bytes, random.Random], tuple[bytes, str]]] = []
    if name.endswith(".json"):
        kinds = [mutated_json]
    elif name.endswith(".safetensors"):
        kinds = [mutated_safetensors]
    elif data[:2] == b"PK" and not name.endswith(".distcp"):
        kinds = [mutated_torch_file]
    elif data[:2] == b"\x80\x02" or name.endswith(".metadata"):
        kinds = [mutated_pickle]
    if not kinds or rng.random() < 0.12:
        how = _mutated_place(path, data, rng)
    else:
        data, how = kinds[0](data, rng)
        if name.endswith("dsx.json") and rng.random() < 0.95:
            data = _with_digest(data)
        path.write_bytes(data)
    return f"seed {seed}: {name}: {how}"


def _mutated_place(path: Path, data: bytes, rng: random.Random) -> str:
    """The file itself: its bytes, its length, whether it is there and is a file."""
    how = rng.choice(("flip", "flip", "cut", "cut", "empty", "gone", "folder", "link", "tail", "zeros"))
    if how in ("gone", "folder", "link"):
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "link":
            path.symlink_to("/dev/zero")
        return how
    path.write_bytes(
        {
            "flip": lambda: mutated_bytes(data, rng),
            "cut": lambda: data[: rng.randrange(len(data) or 1)],
            "empty": lambda: b"",
            "tail": lambda: data + rng.randbytes(64),
            "zeros": lambda: bytes(len(data)),
        }[how]()
    )
    return how


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """With one to four bits turned."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4) if out else 0):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def mutated_json(
    data: bytes, rng: random.Random, times: int = 1, values: Sequence[str] = JSON_VALUES
) -> tuple[bytes, str]:
    """JSON with one value, key or element, or so many, that are not what they were."""
    root, texts = [json.loads(data)], [_Raw(text) for text in values]
    how = ", ".join(_spoil(*_descend(root, rng), rng, texts) for _ in range(times))
    return json_text(root[0]).encode("utf-8", "surrogatepass"), how


def json_text(value: Any) -> str:
    """As :func:`json.dumps`, with raw texts and with lists of pairs for objects that repeat a key."""
    if isinstance(value, _Raw):
        return value.text
    if isinstance(value, _Pairs):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {json_text(v)}" for k, v in value.pairs) + "}"
    if isinstance(value, dict):
        return json_text(_Pairs(tuple(value.items())))
    if isinstance(value, list):
        return "[" + ", ".join(map(json_text, value)) + "]"
    return json.dumps(value)


@dataclass(frozen=True)
class _Pairs:
    """An object whose keys may repeat."""

    pairs: tuple[tuple[str, Any], ...]


def mutated_safetensors(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A file whose header or tensors are not what they were."""
    length = int.from_bytes(data[:8], "little")
    header, tensors = data[8 : 8 + length], data[8 + length :]
    how = rng.choice(("json", "json", "json", "offsets", "offsets", "length", "text", "duplicate", "tail"))
    if how == "json":
        header, what = mutated_json(header, rng)
        how = f"header {what}"
    elif how == "length":
        length = rng.choice((0, 1, length - 1, length + 1, length + 8, 10**8 + 1, 2**63, 2**64 - 1))
        return struct.pack("<Q", length) + header + tensors, f"length {length}"
    elif how == "text":
        header = rng.choice((b" " + header, header + b" ", header + b"x", b"[]", b"{}", b"\xff" + header))
    elif how == "tail":
        tensors = rng.choice((tensors + b"\0", tensors[:-1], tensors * 2, b""))
    else:
        content = json.loads(header)
        names = [name for name in content if name != "__metadata__"]
        if names and how == "offsets":
            told = content[rng.choice(names)]
            at = rng.randrange(2)
            told["data_offsets"][at] += rng.choice((-8, -1, 1, 4, 8, 10**15))
            if rng.random() < 0.5:  # the other end moves along: a gap, or bytes of two tensors
                told["data_offsets"][1 - at] = told["data_offsets"][at] + (1 - 2 * at) * 4
        elif names:
            name = rng.choice(names)
            content = _Pairs((*content.items(), (name, content[name])))
        header = json_text(content).encode()
    return struct.pack("<Q", len(header)) + header + tensors, how


def mutated_torch_file(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A file of ``torch.save`` with one value that is not what it was, or another structure."""
    import torch

    if rng.random() < 0.15:
        raw, how = _hostile_pickle(rng)
        return _with_member(data, "data.pkl", raw), how
    root = [torch.load(io.BytesIO(data), weights_only=False, map_location="cpu")]
    tensors = (
        torch.zeros(1).expand(10**9),
        torch.zeros(0),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(2, 2).t(),
        torch.tensor(float("nan")),
    )
    how = _spoil(*_descend(root, rng), rng, [*VALUES, *tensors])
    out = io.BytesIO()
    try:
        torch.save(root[0], out)
    except Exception as error:  # noqa: BLE001 (torch cannot write it: then nobody can read it)
        return mutated_bytes(data, rng), f"bytes, for {error!r}"[:60]
    return out.getvalue(), how


def mutated_pickle(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A bare pickle, such as DCP's index."""
    if rng.random() < 0.15:
        return _hostile_pickle(rng)
    root = [pickle.loads(data)]
    how = _spoil(*_descend(root, rng), rng, VALUES)
    try:
        return pickle.dumps(root[0], protocol=2), how
    except Exception as error:  # noqa: BLE001 (as above)
        return mutated_bytes(data, rng), f"bytes, for {error!r}"[:60]


def _hostile_pickle(rng: random.Random) -> tuple[bytes, str]:
    deep = rng.choice((50, 2000, 100_000))
    programs = {
        f"{deep} lists in one another": b"\x80\x02" + b"]" * deep + b"a" * (deep - 1) + b".",
        f"{deep} tuples in one another": b"\x80\x02)" + b"\x85" * deep + b".",
        f"{deep} dicts in one another": b"\x80\x02" + b"}K\x00" * deep + b"}" + b"s" * deep + b".",
        # Ten times ten times ten ...: a few bytes that stand for 10^20 values.
        "lists that double": b"\x80\x02]q\x00"
        + b"".join(
            b"](" + b"h" + bytes([at]) + (b"h" + bytes([at])) * 9 + b"eq" + bytes([at + 1])
            for at in range(20)
        )
        + b".",
        "a list in itself": b"\x80\x02]q\x00h\x00a.",
        "an unknown global": b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00truetR.",
        "a number of 3,000 digits": b"\x80\x02L" + b"9" * 3000 + b"L\n.",
        "a memo far away": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "a text that is longer than the file": b"\x80\x02X\xff\xff\xff\x7fabc.",
        "no stack": b"\x80\x020.",
    }
    how = rng.choice(sorted(programs))
    return programs[how], how


def _with_member(data: bytes, name: str, content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for member in old.infolist():
            ends = member.filename.endswith(f"/{name}")
            new.writestr(member.filename, content if ends else old.read(member))
    return out.getvalue()


def _with_digest(data: bytes) -> bytes:
    """A manifest of dsx that has the digest of what it says now, so that more than that is looked at."""
    from dsx.checkpoint.formats import native

    try:
        content = json.loads(data)
        content.pop("digest", None)
        text = json.dumps({**content, "digest": native._digest(content)})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return data
    return text.encode()


def _descend(root: Any, rng: random.Random) -> tuple[Any, Any]:
    """A container somewhere below ``root``, a list of one, and a key in it; rather high up than deep down."""
    holder, key = root, 0
    while True:
        value = _get(holder, key)
        keys = _keys(value)
        if not keys or rng.random() < 0.2:
            return holder, key
        holder, key = value, rng.choice(keys)


def _keys(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value)
    if isinstance(value, list | tuple):
        return list(range(len(value)))
    return sorted(vars(value)) if _is_object(value) else []


def _is_object(value: Any) -> bool:
    fixed = isinstance(value, type | Enum) or hasattr(value, "storage")  # classes, constants, tensors
    return hasattr(value, "__dict__") and not fixed


def _get(holder: Any, key: Any) -> Any:
    return getattr(holder, key) if _is_object(holder) and not isinstance(holder, dict) else holder[key]


def _spoil(holder: Any, key: Any, rng: random.Random, values: Sequence[Any]) -> str:
    how = rng.choice(("value", "value", "value", "larger", "drop", "key", "swap"))
    new = rng.choice(values)
    old = _get(holder, key)
    if isinstance(holder, tuple):
        return _spoil_inside(old, rng, values)
    if _is_object(holder) and not isinstance(holder, dict):
        object.__setattr__(holder, key, new)
        return f"{key} = {new!r}"[:120]
    if how == "larger" and type(old) in (int, float):
        factor = rng.choice((10, 10**9, 10**15, -1))
        holder[key] = old * factor
        return f"{key!r} times {factor}"
    if how == "drop" and not (isinstance(holder, list) and len(holder) == 1):
        del holder[key]
        return f"without {key!r}"
    if how == "key" and isinstance(holder, dict):
        name = rng.choice((ESCAPES, "", "\ud800", "../..", "x" * 300, "0", "__dsx__", "a/b", "1000000000"))
        holder[name] = holder.pop(key) if rng.random() < 0.5 else holder[key]
        return f"{key!r} called {name[:20]!r}"
    if how == "swap" and len(holder) > 1:
        other = rng.choice(_keys(holder))
        holder[key], holder[other] = holder[other], holder[key]
        return f"{key!r} and {other!r} exchanged"
    holder[key] = new
    return f"{key!r} = {new!r}"[:120]


def _spoil_inside(old: Any, rng: random.Random, values: Sequence[Any]) -> str:
    """Of a tuple nothing can be changed but what is in it."""
    keys = _keys(old)
    return _spoil(old, rng.choice(keys), rng, values) if keys else "nothing"
