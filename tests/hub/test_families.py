"""Families of transformers train in 3D like one process of transformers, and the guide says which.

The cases are those of tools/families.py. Some layouts of a few families are tried in every run; all layouts
of every family take an hour (``pytest -m slow``).
"""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from all_families import parity, table, tiny
from transformers import AutoConfig

from dsx.hub.read import hub_model
from often import often

PAGE = Path(__file__).parents[2] / "docs/guides/models.md"

SAMPLE = {
    "deepseek_v3": ("dp", "zb"),  # latent attention, sigmoid routing with a bias that is no parameter
    "gemma3_text": ("pp", "zb"),  # scaled and tied embeddings, windows in some layers
    "bloom": ("tp-pp",),  # no plan of transformers': ALiBi by head, queries, keys and values head by head
    "gpt2": ("tp", "zb"),  # linears called Conv1D, queries, keys and values in one, a table of positions
    "gpt_oss": ("tp-pp", "zb"),  # the same: sinks, and experts with a bias behind their sum
    "granite": ("tp-pp",),  # multipliers of embeddings, residuals, scores and logits
    "roberta": ("zb",),  # a transform, a bias beside a tied matrix, positions that count no padding
    "mixtral": ("tp", "dp"),  # experts fused in memory, apart in files
    "olmo2": ("tp-pp",),  # norms over all heads together
    "phi": ("pp", "zb"),  # biases everywhere, a part of each head rotated
    "qwen3_next": ("dp", "zb"),  # linear attention
    "kimi_linear": ("tp", "zb"),  # the same and latent attention, by the same names
    "vaultgemma": ("tp",),  # soft caps
}


def outcomes(family: str, layouts: Any, folder: Path) -> dict[str, Any]:
    """Of each layout; losses and norms within 1e-5 relative, the exported folder within 1e-5."""
    found = dict(parity.prove(family, list(layouts), folder=folder))
    assert "failed" not in found.pop("")
    return found


@pytest.mark.parametrize(("family", "layouts"), often(SAMPLE.items(), 13))
def test_a_family_trains_like_transformers(family: str, layouts: Any, tmp_path: Path) -> None:
    for outcome in outcomes(family, layouts, tmp_path).values():
        assert outcome["result"] == "ok", json.dumps(outcome, indent=1)


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.all_families())
def test_a_family_trains_right_or_is_refused_as_the_guide_says(family: str, tmp_path: Path) -> None:
    """No layout comes out wrong, breaks, or is refused only once its ranks run."""
    try:
        if tiny.text_family(family) != family:
            pytest.skip("its text model is a family of its own")
    except LookupError as error:
        pytest.skip(str(error))
    row = table.read(PAGE.read_text(encoding="utf-8")).get(family, {})
    for name, outcome in outcomes(family, parity.LAYOUTS, tmp_path).items():
        assert outcome["result"] in ("ok", "refused", "none"), json.dumps(outcome, indent=1)
        assert outcome["result"] == (row.get(name, outcome["result"]).split() or ["none"])[0]


def test_the_guide_names_every_family() -> None:
    """Trained, or with the reason why not."""
    section = table.section(PAGE.read_text(encoding="utf-8"))
    every = (*tiny.all_families(), *tiny.composite_families())
    assert [family for family in every if f"`{family}`" not in section] == []
    assert "Not run in every layout yet" not in section


def test_stacks_of_experts_take_no_memory_before_there_are_weights() -> None:
    """Llama 4 makes them of zeros: 5 GiB for each block of Scout's config."""
    config = AutoConfig.for_model("llama4_text", num_hidden_layers=2, vocab_size=512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = hub_model(config.to_dict())
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    stacks = [spec.numel for spec in model.params if spec.name.endswith("experts.gate_up_proj")]
    assert stacks == [16 * 5120 * 2 * 8192] * 2
    assert taken < stacks[0] / 1024  # a quarter of one in fp32
