"""A chunk of recorded layers holds what their real code holds on paper and on a CPU: kept bytes and peaks."""

from __future__ import annotations

from itertools import product

from memory import paper_layers
from meta_engine import programs

_SCALARS = 16
"""Bytes that torch holds for a moment and the records do not: a scalar for a padded row's value."""


def cases():
    """(device, family, dropout, tp, sequence, width, recompute, divided, layers), a fifth of all."""
    found = []
    for family, (tp, sequence), width, recompute, divided in product(
        ("qwen2", "llama"),
        ((1, False), (2, False), (2, True)),
        (2, 4),
        ("none", "selective", "full"),
        (False, True),
    ):
        for layers in ([0], [1], [3, 4], [0, 1, 2, 3, 4]):
            dropout = 0.1 if family == "qwen2" and width == 2 else 0.0
            found.append(["paper", family, dropout, tp, sequence, width, recompute, divided, layers])
    return found[::5] + others() + on_a_cpu()


def others():
    """The same for what the other families' blocks have of their own, some of all that there are."""
    found = [
        ["paper", family, 0.0, tp, sequence, width, recompute, divided, layers]
        for family, (tp, sequence), width, recompute, divided, layers in product(
            ("mistral", "qwen3"),
            ((1, False), (2, False), (2, True)),
            (2, 4),
            ("none", "selective", "full"),
            (False, True),
            ([1], [0, 1, 2, 3, 4]),
        )
    ]
    return found[::37]


def on_a_cpu():
    """With dropout everywhere, for which a CPU has no fused attention, and without; some of all."""
    found = [
        ["cpu", family, dropout, tp, sequence, width, recompute, divided, layers]
        for family, dropout, (tp, sequence), width, recompute, divided, layers in product(
            ("llama", "mistral", "qwen2", "qwen3"),
            (0.1, 0.0),
            ((1, False), (2, False), (2, True)),
            (2, 4),
            ("none", "selective", "full"),
            (False, True),
            ([1], [0, 1, 2]),
        )
    ]
    return found[::85]


def test_layers_hold_what_their_code_holds():
    rows = programs.alone(paper_layers.both, cases())
    off = [
        (case, name, record[name] - real[name])
        for case, (real, record) in zip(cases(), rows, strict=True)
        for name in record
        if abs(record[name] - real[name]) > _SCALARS
    ]
    assert not off
