"""Reading: HJSON, --set, and what the schema says of itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from sample_config import BASE

from dsx.config.load import load, override, read
from dsx.config.resolve import resolve
from dsx.config.schema import DsxConfig
from dsx.errors import ConfigError
from loaded import HEAVY, loaded_by


def test_hjson_comments(tmp_path):
    text = """{
      # a comment
      train_batch_size: 8  // another
      "zero_optimization": {"stage": 3,},
      /* and one more */
      optimizer: {
        type: AdamW
      }
    }"""
    (tmp_path / "c.hjson").write_text(text)
    wanted = {"train_batch_size": 8, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
    assert read(tmp_path / "c.hjson") == wanted


def test_source_dict_is_not_changed():
    before = json.dumps(BASE)
    deepspeed, dsx = load(BASE, ["zero_optimization.stage=3", "dsx.train.steps=7"])
    assert json.dumps(BASE) == before
    assert "dsx" not in deepspeed
    assert deepspeed["zero_optimization"] == {"stage": 3}
    assert dsx.train.steps == 7


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("3e-4", 3e-4),
        ("true", True),
        ("null", None),
        ("runs/a=b", "runs/a=b"),
        ('"3"', "3"),
        ("[1, 2]", [1, 2]),
        ('{"x": 1}', {"x": 1}),
        ("", ""),
    ],
)
def test_override_values(text, value):
    content = {"a": {"keep": 1}}
    override(content, f"a.b.c={text}")
    assert content == {"a": {"keep": 1, "b": {"c": value}}}


def test_later_override_wins():
    _, dsx = load(BASE, ["dsx.train.steps=5", "dsx.train.steps=6"])
    assert dsx.train.steps == 6


def test_integer_where_a_fraction_is_expected():
    _, dsx = load(BASE, ["dsx.data.held_out=0"])
    assert dsx.data.held_out == 0.0


def test_every_key_has_a_description():
    def blocks(model: type[BaseModel]):
        yield model
        for field in model.model_fields.values():
            for kind in (field.annotation, *get_args(field.annotation)):
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    yield from blocks(kind)

    seen = list(blocks(DsxConfig))
    assert len(seen) == 18
    for block in seen:
        for name, field in block.model_fields.items():
            assert field.description, f"{block.__name__}.{name}"


def test_frozen():
    _, dsx = load(BASE)
    with pytest.raises(ValueError, match="frozen"):
        dsx.train.steps = 3  # type: ignore[misc]


def test_resolving_imports_neither_torch_nor_deepspeed():
    program = "import dsx, json; dsx.load_config(json.loads(sys.argv[1]), world_size=8)"
    assert not loaded_by(program, json.dumps(BASE))[1] & HEAVY


def test_infinity_is_for_keys_that_take_it(tmp_path):
    """As Accelerate writes it; everything else that is no number is refused on its line."""
    path = tmp_path / "ds.json"
    path.write_text('{"steps_per_print": Infinity,\n "gradient_clipping": Infinity}')
    assert read(path) == {"steps_per_print": math.inf, "gradient_clipping": math.inf}
    wrong = {"steps_per_print": "NaN", "gradient_clipping": "-Infinity", "dump_state": "Infinity"}
    for key, word in wrong.items():
        path.write_text(f'{{"train_batch_size": 8,\n "{key}": {word}}}')
        with pytest.raises(ConfigError, match=rf"line 2, column 2: {key}: {word} is no number of JSON's"):
            read(path)


def test_a_run_never_prints_by_infinity(tmp_path):
    path = tmp_path / "ds.json"
    content = read(Path(__file__).parents[2] / "configs/zero1.json") | {"steps_per_print": math.inf}
    path.write_text(json.dumps(content))
    assert resolve(path, world_size=1).deepspeed["steps_per_print"] == math.inf
