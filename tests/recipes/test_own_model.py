"""A model of one's own trains as plain torch does with its weights, in every layout, and goes on in any."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from launching import recipe
from torch import nn

import ranks
from often import often

STEPS = 4


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0
    chunks: int = 1
    sequence: bool = False
    schedule: str = "auto"

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp


class Plain(nn.Module):
    """The recipe's model of torch's own layers."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        width = recipe.WIDTH
        self.words = nn.Embedding(recipe.VOCABULARY, width)
        self.positions = nn.Embedding(recipe.SEQUENCE, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, recipe.HEADS, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(recipe.BLOCKS)
        )
        self.mixer = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        x = self.words(ids) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        mean = x.cumsum(1) / torch.arange(1, length + 1)[:, None]
        x = self.norm(x + torch.tanh(self.mixer(mean)))
        return x @ self.words.weight.t()

    def take(self, weights: dict[str, torch.Tensor]) -> None:
        """The recipe's weights under torch's names."""
        names = {
            "words.weight": "tied_modules.words.weight",
            "positions.weight": "1.weight",
        }
        after = 2 + len(self.blocks)
        for name, _ in self.mixer.named_parameters():
            names[f"mixer.{name}"] = f"{after}.mix.{name}"
        for name, _ in self.norm.named_parameters():
            names[f"norm.{name}"] = f"{after + 1}.{name}"
        parts = {"self_attn.in_proj_": "attention.qkv.", "self_attn.out_proj.": "attention.out."}
        parts |= {"norm1.": "norm_1.", "norm2.": "norm_2.", "linear1.": "up.", "linear2.": "down."}
        for block, (theirs, ours), leaf in itertools.product(
            range(len(self.blocks)), parts.items(), ("weight", "bias")
        ):
            names[f"blocks.{block}.{theirs}{leaf}"] = f"{2 + block}.{ours}{leaf}"
        assert sorted(names.values()) == sorted(weights)
        self.load_state_dict({theirs: weights[ours] for theirs, ours in names.items()})


def _plain(weights: dict[str, torch.Tensor]) -> list[tuple[float, float]]:
    """(loss, norm before clipping) of every step on the global batch."""
    own = recipe("own_model")
    model = Plain(own)
    model.take(weights)
    config = own.settings(0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    assert config["optimizer"]["params"]["lr"] == 3e-3
    data, count, figures = own.batches(1, 0), config["gradient_accumulation_steps"], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(count):
            inputs, labels = next(data)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()) / count
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
        optimizer.step()
        figures.append((total, float(norm)))
    return figures


def _dsx(rank: int, world_size: int, layouts: list[Layout], folder: str) -> Any:
    """(weights at the start, figures of every step); with two layouts the second goes on half way."""
    from deepspeed import init_distributed

    import dsx
    from dsx.parallel.groups import make_groups

    init_distributed()
    torch.manual_seed(rank)  # nothing that matters may depend on it
    own, figures, weights = recipe("own_model"), [], {}
    for turn, layout in enumerate(layouts):
        mesh = dsx.Mesh.of(pp=layout.pp, dp=layout.dp, tp=layout.tp)
        groups = make_groups(mesh, sequence_parallel=layout.sequence)
        model = own.build(groups, chunks=layout.chunks, schedule=layout.schedule)
        if world_size == 1:
            weights = {name: p.detach().clone() for name, p in model.chunks.named_parameters()}
        config = own.settings(layout.zero, layout.dp)
        config["optimizer"]["params"]["weight_decay"] = 0.0
        engine, *_ = dsx.initialize(model=model, config=config)
        if turn:
            engine.load_checkpoint(folder)
        data = own.batches(layout.dp, groups.dp_rank)
        for _ in range(engine.global_steps * engine.micro_batches):
            next(data)
        while engine.global_steps < STEPS * (turn + 1) // len(layouts):
            figures.append((engine.train_batch(data).item(), engine.get_global_grad_norm()))
        if len(layouts) > 1:
            engine.save_checkpoint(folder)
    return weights, figures


@pytest.fixture(scope="module")
def figures() -> list[tuple[float, float]]:
    """Plain torch's, which those of one rank of dsx equal."""
    ((weights, ours),) = ranks.run(_dsx, 1, [Layout()], "")
    theirs = _plain(weights)
    _require_equal(ours, theirs)
    return theirs


def _require_equal(ours: Any, theirs: Any) -> None:
    flat = [value for pair in theirs for value in pair]
    assert [value for pair in ours for value in pair] == pytest.approx(flat, rel=1e-4)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)


LAYOUTS = [
    Layout(tp=2, sequence=True, pp=2, zero=1),
    Layout(tp=2, dp=2, zero=3),
    Layout(pp=2, chunks=2, zero=2),
    Layout(tp=2),
    Layout(tp=4, sequence=True, zero=0),
    Layout(tp=2, pp=2, chunks=2, zero=3, sequence=True),
    Layout(pp=2, dp=2, zero=3),
    Layout(tp=2, pp=2, schedule="zb_h1", zero=2),
    Layout(pp=4, chunks=2, zero=1),
    Layout(tp=2, dp=2, zero=1, sequence=True),
    Layout(pp=2, schedule="zbv", chunks=2, tp=2),
    Layout(tp=2, pp=2, dp=2, zero=3, sequence=True),
]


@pytest.mark.parametrize("layout", often(LAYOUTS, every=6), ids=str)
def test_every_layout_trains_as_plain_torch(layout: Layout, figures: Any) -> None:
    for _, ours in ranks.run(_dsx, layout.size, [layout], ""):
        _require_equal(ours, figures)


CHANGES = [
    [Layout(tp=2, sequence=True, zero=1), Layout(pp=2, zero=3)],
    [Layout(pp=2, dp=2, zero=2), Layout(tp=2, pp=2, chunks=2)],
    [Layout(tp=4, zero=3), Layout(dp=4, zero=1)],
]


@pytest.mark.parametrize("layouts", often(CHANGES, every=3), ids=str)
def test_a_checkpoint_goes_on_in_another_layout(layouts: Any, figures: Any, tmp_path: Path) -> None:
    """The plain layer's weights are one tensor in it, though each tensor-parallel rank holds them."""
    for _, ours in ranks.run(_dsx, layouts[0].size, layouts, str(tmp_path)):
        _require_equal(ours, figures)
