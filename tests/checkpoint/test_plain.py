"""Plain data comes back from JSON as it went in; what is none is refused."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsx.checkpoint import plain
from dsx.errors import CheckpointError

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


def there_and_back(value):
    return plain.decode(json.loads(plain.to_json(value, "state")), "state")


@given(VALUES)
def test_data_comes_back_with_its_types(value):
    back = there_and_back(value)
    assert back == value
    assert repr(back) == repr(value)


def test_schedulers_tensors_and_arrays_come_back():
    weight = torch.nn.Parameter(torch.zeros(1))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([weight], lr=0.1), milestones=[2, 2, 5])
    state = scheduler.state_dict()
    assert isinstance(state["milestones"], Counter)
    assert there_and_back(state) == state
    tensor = torch.randn(2, 3).to(torch.bfloat16)
    assert torch.equal(there_and_back(tensor), tensor)
    assert there_and_back(tensor).dtype == torch.bfloat16
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert np.array_equal(there_and_back({"a": array})["a"], array)
    assert there_and_back(np.float32(0.5)) == 0.5
    assert math.isnan(there_and_back(math.nan))
    assert there_and_back({3, 4}) == {3, 4}
    assert there_and_back({"__dsx__": "a key of the user's"}) == {"__dsx__": "a key of the user's"}


@pytest.mark.parametrize("value", [object(), lambda: 0, torch.nn.Linear(1, 1), np.array([object()])])
def test_what_is_no_data_is_refused_by_its_place(value):
    with pytest.raises(CheckpointError, match=r"client_state\['best'\]\[1\]: an? .* is no plain data"):
        plain.encode({"best": [0, value]}, "client_state")


@pytest.mark.parametrize(
    "text",
    [
        '{"__dsx__": "code", "value": "import os"}',
        '{"__dsx__": "tuple"}',
        '{"__dsx__": "bytes", "base64": "?"}',
        '{"__dsx__": "tensor", "dtype": "load", "shape": [1], "base64": "AA=="}',
        '{"__dsx__": "array", "dtype": "O", "shape": [1], "base64": "AAAAAAAAAAA="}',
        '{"__dsx__": ["dict"], "pairs": []}',
    ],
)
def test_what_dsx_did_not_write_is_refused(text):
    with pytest.raises(CheckpointError, match="not something that dsx wrote"):
        plain.decode(json.loads(text), "dsx.json")
