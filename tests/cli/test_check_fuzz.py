"""dsx check on what is no config, nearly one, or absurd: always a sentence and an exit code."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

import mutants
from dsx.doctor import examine
from dsx.errors import ConfigError
from often import often

QUIET = "--no-machine"
BASE = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "min_loss_scale": 1},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5e8,
        "zero_hpz_partition_size": 2,
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
        "zenflow": {"topk_ratio": 0.1, "update_interval": 4, "select_interval": "auto"},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100, "total_num_steps": 1000}},
    "tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}, "partition_config": {"layer_specs": [{}]}},
    "expert_parallel": {"enabled": True, "autoep_size": 2, "num_limited_groups": 2},
    "data_efficiency": {"data_sampling": {"curriculum_learning": {"curriculum_metrics": {"seqlen": {}}}}},
    "wandb": {"enabled": True, "project": "p"},
    "pipeline": {"activation_checkpoint_interval": 1},
    "data_types": {"grad_accum_dtype": "fp32"},
    "compile": {"deepcompile": True},
}
DSX = {
    "model": {"family": "gpt2", "preset": "tiny"},
    "parallel": {"tensor": 2, "pipeline": 2},
    "schedule": {"name": "interleaved", "group_size": 2},
    "data": {"sequence_length": 32, "tokenizer": "bytes", "held_out": 0.1},
    "train": {"steps": 10, "output": "runs/a", "seed": 1},
    "recompute": "full",
}
VALUES = (  # of configs, beside those of any file
    *mutants.JSON_VALUES,
    *("false", "-0.0", "1e-320", "1e308", "-1e308", "0.1", "2147483648", "18446744073709551616", "[1,{}]"),
    *('"auto"', '"AUTO"', '"none"', '"1e9"', '"true"', '"inf"', '"nan"', '" "', r'"\u0000"', r'"\u202e"'),
    *('{"enabled": "maybe"}', '{"type": []}', '{"stage": {}}', '[1, "2"]', "[0.9, 0.999, 0.9]", '["auto"]'),
    *('{"a": {"b": {"c": []}}}', '{"*": 1}', '{".": 1}', '{"a.b": 1}', '{"[0]": 1}', json.dumps("é" * 50)),
    *("1" + "0" * 30, "1" + "0" * 300, "-1" + "0" * 300),
)
TEXTS = (  # that are no JSON, or hardly
    *("1e999", "-1e999", "NaN", "Infinity", "-Infinity", r'"\ud800"', r'"\udfff\ud800"', "'''", '"', "\x00"),
    *("{", "}", "]", "[", ",", ":", "//", "/*", "#", "True", "None", "0x10", "1_000", "01", ".5", "5.", "+1"),
    *("1e", "'a'", "\\", "1e-400", "9" * 5000, "9" * 400, "\ufeff", "\u2028", "[" * 400, '{"a":' * 400),
    *('"' + "x" * 20000 + '"', "a " * 500),
)


def absurd(rng):
    """The text of a config of which one to four values, keys or elements are not what they were."""
    config = json.dumps(BASE | ({"dsx": DSX} if rng.random() < 0.4 else {}))
    text, _ = mutants.mutated_json(config.encode(), rng, rng.randint(1, 4), VALUES)
    return text.decode().replace(", ", rng.choice([", ", ",\n  "]))


def torn(rng):
    """Such a text with pieces lost, doubled, swapped or put in."""
    text = absurd(rng)
    for _ in range(rng.randint(1, 5)):
        at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        end = min(end, at + 20)
        piece = rng.choice(["", text[at:end] * 2, rng.choice(TEXTS), text[at:end][::-1]])
        text = text[:at] + piece + text[rng.choice([at, end]) :]
    return text


@pytest.fixture
def checked(dsx, tmp_path):
    """Check a file of ``content``: neither a traceback nor a wait, and something is said."""

    def run(content, *arguments):
        path = tmp_path / "ds.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        started = time.perf_counter()
        code, out, err = dsx("check", path, QUIET, *arguments)
        assert code in (0, 1, 2)
        assert out + err
        assert "Traceback" not in out + err
        assert "report this" not in out + err
        assert time.perf_counter() - started < 20
        return code, out + err

    return run


OPTIONS = [
    (),
    ("--gpus", "8"),
    ("--format", "json"),
    ("--diff=unsafe",),
    ("--fix=unsafe",),
    ("--fix",),
    ("--for", "trainer"),
    ("--for", "dsx"),
    ("--pipeline", "2", "--gpus", "4"),
    ("--from-version", "0.9.0", "--diff"),
    ("--client-optimizer",),
    ("--deepspeed-version", "0.12.0"),
    ("--gpus", "4", "--gpu-memory", "10"),
]


@pytest.mark.parametrize("seed", often(range(10), 10))
def test_absurd_values_and_torn_texts(checked, seed):
    rng = random.Random(seed)
    for _ in range(40):
        checked(absurd(rng), *rng.choice(OPTIONS))
        checked(torn(rng), *rng.choice(OPTIONS))


@pytest.mark.parametrize("value", TEXTS)
def test_single_words(checked, value):
    checked(f'{{"train_batch_size": 8, "gradient_clipping": {value}}}')
    checked(value)
    checked(f'{{"train_batch_size": 8, "dsx": {{"data": {value}}}}}')


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b" \n\t", "the file is empty"),
        (b"\xef\xbb\xbf", "the file is empty"),
        (b"\xff\xfe" + '{"a": 1}'.encode("utf-16-le"), "give a readable UTF-8 file"),
        (b'{"a": "\xe9"}', "give a readable UTF-8 file"),
        (b"{" + b" " * (5 << 20) + b"}", "more than 4 MiB"),
        (b'{"train_batch_size": 1e999}', "line 1, column 22: not JSON (a number beyond 1e308"),
        (b'{"train_batch_size": ' + b"9" * 5000 + b"}", "line 1, column 22: not JSON (a number beyond 1e308"),
        (b'{"a": 8,\n "wandb": {"project": "\\ud800"}}', "line 2, column 12: wandb.project: it holds"),
        (b'{"train_batch_size": 8, "a": ' + b"[" * 150 + b"]" * 150 + b"}", "more than 100 objects or lists"),
        (b'{"train_batch_size": 8, "a": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
        (b"[1]", "not an object"),
        (b'{"dsx": {"train": {"output": "\\udc80"}}}', "dsx.train.output: it holds \\udc80"),
    ],
)  # fmt: skip
def test_what_is_no_config(checked, content, words):
    code, said = checked(content)
    assert code == 1
    assert words in said


def test_what_is_no_file(dsx, tmp_path):
    for path in (tmp_path, tmp_path / "none.json", Path("/dev/null"), "x\u0000y", "x" * 5000):
        code, out, err = dsx("check", path, QUIET)
        assert code in (1, 2)
        assert out + err
    locked = tmp_path / "locked.json"
    locked.write_text("{}")
    locked.chmod(0)
    assert dsx("check", locked, QUIET)[0] in (1, 2)


def test_dictionaries_of_python():
    """What no file can hold and ``examine`` can be given."""
    for value in (float("inf"), float("nan"), (0.9, 0.999), object(), {1, 2}, b"x", 1j):
        examine({"train_batch_size": 8, "gradient_clipping": value, "optimizer": {"params": {"lr": value}}})
    for config in ({1: 2}, {"a": {None: 1}}, {"a": 10**400}, {"a": "\ud800"}, {"\udfff": 1}):
        with pytest.raises(ConfigError):
            examine(config)
