"""dsx.nn and plain layers in a list of one's own: values, tags and names, and what is noticed."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ranks
from dsx import nn as parallel
from dsx.errors import ModelError
from dsx.parallel.mesh import Mesh

WIDTH, VOCABULARY = 8, 10
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}


def _modules(tp: parallel.TensorParallel) -> nn.ModuleDict:
    """One of each, with sizes that padding and fused blocks matter for."""
    xavier: parallel.Initialiser = nn.init.xavier_uniform_
    modules = {
        "words": parallel.VocabParallelEmbedding(VOCABULARY, WIDTH, tp),
        "padded": parallel.VocabParallelEmbedding(VOCABULARY, WIDTH, tp, pad_multiple=8),
        "positions": parallel.LearnedPositions(6, WIDTH, tp),
        "column": parallel.ColumnParallelLinear(WIDTH, 12, tp, parts=(4, 8)),
        "row": parallel.RowParallelLinear(12, WIDTH, tp, init=xavier),
        "narrow": parallel.ColumnParallelLinear(WIDTH, 4, tp, init=parallel.Init(kind="normal", std=1e-3)),
        "given": parallel.RowParallelLinear(4, WIDTH, tp, init=torch.randn_like),
        "layer": parallel.LayerNorm(WIDTH, tp),
        "rms": parallel.RMSNorm(WIDTH, tp),
    }
    return nn.ModuleDict(modules)


def _parts(size: int) -> list[dict[str, Any]]:
    out = []
    for rank in range(size):
        torch.manual_seed(3)
        made = _modules(parallel.TensorParallel(size, rank))
        out.append(dict(made.named_parameters()))
    return out


@pytest.mark.parametrize("size", [2, 4])
def test_modules_hold_parts_of_the_same_tensors_at_every_degree(size: int) -> None:
    """Values are there, none by chance: twice the same, and padding is zero."""
    (whole,), parts = _parts(1), _parts(size)
    for name, one in whole.items():
        assert one.isfinite().all()
        assert one.tensor_model_parallel is False
        for rank, theirs in enumerate(parts):
            part, spec = theirs[name], theirs[name].dsx_spec
            assert part.tensor_model_parallel is (spec.split is not None)
            boxes = spec.boxes(Mesh.of(tp=size).at(rank))
            held = [one[tuple(slice(*span) for span in box)] for box in boxes]
            expected = held[0] if spec.split is None else torch.cat(held, spec.split)
            rows = expected.shape[0]
            assert torch.equal(part[:rows], expected), name
            assert not part[rows:].any()
    assert whole["column.weight"].detach().std() == pytest.approx(0.02, rel=0.3)
    assert whole["narrow.weight"].detach().std() == pytest.approx(1e-3, rel=0.5)
    assert whole["row.weight"].abs().max() <= (6 / (WIDTH + 12)) ** 0.5
    assert not torch.equal(whole["words.weight"], whole["padded.weight"][:VOCABULARY])


class Layer(nn.Module):
    """Something wrong, or not, at tensor 2; ``tp`` comes from the groups."""

    def __init__(self, kind: str, tp: parallel.TensorParallel) -> None:
        super().__init__()
        self.kind = kind
        self.plain = nn.Linear(WIDTH, WIDTH)
        if kind == "cut":
            self.plain.weight.tensor_model_parallel = True
        if kind == "shape":
            self.plain = nn.Linear(WIDTH, WIDTH, bias=tp.rank == 0)
        if kind == "alone":
            tp = parallel.TensorParallel(2, 1 - tp.rank, tp.group)
        init = None if kind == "empty" else parallel.Init(kind="normal", std=0.1)
        if kind == "drawn":
            torch.manual_seed(tp.rank)
        self.up = parallel.ColumnParallelLinear(WIDTH, 2 * WIDTH, tp, init=init)
        self.down = parallel.RowParallelLinear(2 * WIDTH, WIDTH, tp)
        self.rank = tp.rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.plain(x) + self.down(self.up(x))
        if self.kind == "data":
            y = y * (1 + self.rank)
        return y.detach() if self.kind == "detached" else y


def _run(rank: int, world_size: int, kinds: list[str]) -> dict[str, Any]:
    from deepspeed import init_distributed

    import dsx
    from dsx.parallel.groups import make_groups

    init_distributed()
    out: dict[str, Any] = {}
    for kind in kinds:
        groups = make_groups(dsx.Mesh.of(tp=world_size), sequence_parallel=kind == "slice")
        tp = groups.tensor_parallel
        torch.manual_seed(0 if kind != "seeds" else rank)
        if kind == "seeds":
            layer: nn.Module = nn.Linear(WIDTH, WIDTH)
        elif kind == "slice":
            layer = nn.Sequential(parallel.VocabParallelEmbedding(VOCABULARY, WIDTH, tp), nn.LayerNorm(WIDTH))
        elif kind == "meta":
            layer = nn.Linear(WIDTH, WIDTH, device="meta")
        else:
            layer = Layer(kind, tp)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                module = dsx.PipelineModule(
                    [layer, nn.Linear(WIDTH, WIDTH)], groups=groups, loss_fn=F.mse_loss
                )
            said = [str(w.message) for w in caught if "tensor-parallel" in str(w.message)]
            engine = dsx.initialize(model=module, config=CONFIG)[0]
            x = torch.arange(8).view(2, 4) if kind == "slice" else torch.ones(2, WIDTH)
            y = torch.zeros(2, 4 // world_size, WIDTH) if kind == "slice" else torch.zeros(2, WIDTH)
            engine.train_batch(iter([(x, y)]))
            out[kind] = (said, engine.get_global_grad_norm(), layer.state_dict())
        except ModelError as error:
            out[kind] = str(error)
    return out


WORDS = {
    "empty": "it has no values",
    "meta": "it is on the meta device",
    "shape": "do not have it in the same shape",
    "alone": "it was built for rank",
    "drawn": "drew other random numbers",
    "data": "differs between tensor-parallel ranks",
    "slice": "differs between tensor-parallel ranks",
}


def test_what_would_train_wrong_in_silence_is_refused() -> None:
    for found in ranks.run(_run, 2, list(WORDS)):
        assert {kind: WORDS[kind] in str(text) for kind, text in found.items()} == dict.fromkeys(found, True)


def _detached(rank: int, world_size: int) -> None:
    from deepspeed import init_distributed

    import dsx

    init_distributed()
    layers = [Layer("detached", parallel.TensorParallel()), nn.Linear(WIDTH, WIDTH)]
    module = dsx.PipelineModule(layers, num_stages=2, loss_fn=F.mse_loss, partition_method="uniform")
    config = {**CONFIG, "zero_optimization": {"stage": 1}}
    engine = dsx.initialize(model=module, config=config)[0]
    engine.train_batch(iter([(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))]))


def test_a_stage_that_would_get_no_gradient_is_refused() -> None:
    """Its rank would take no step, for which the others wait."""
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(_detached, 2)
    assert isinstance(caught.value.error, ModelError)
    assert "it has no gradient, though" in str(caught.value.error)


def test_plain_layers_are_the_same_on_all_ranks_and_count_once() -> None:
    alone = ranks.run(_run, 1, ["fine", "seeds", "cut"])[0]
    pairs = ranks.run(_run, 2, ["fine", "seeds", "cut"])
    for rank, found in enumerate(pairs):
        for kind in ("fine", "seeds"):
            assert found[kind][1] == pytest.approx(alone[kind][1], rel=1e-5)
        for name, value in alone["fine"][2].items():
            if name.startswith("plain"):
                torch.testing.assert_close(found["fine"][2][name], value, rtol=1e-5, atol=1e-7)
        assert all(
            torch.equal(value, pairs[0]["seeds"][2][name]) for name, value in found["seeds"][2].items()
        )
        assert found["fine"][0] == []
        assert bool(found["seeds"][0]) is (rank == 0)
        # A replica that is marked as cut counts on each rank.
        assert found["cut"][1] > found["fine"][1]
    assert "weight, bias differed" in pairs[0]["seeds"][0][0]


def _shifted(rank: int, world_size: int) -> list[list[str]]:
    import dsx
    from dsx.parallel.groups import make_groups
    from engine import toy_pipeline as toy

    groups = make_groups(dsx.Mesh.of())
    ours = partial(parallel.cross_entropy, tp=groups.tensor_parallel, vocab_size=VOCABULARY)

    def own(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    tokens = torch.arange(VOCABULARY).expand(toy.ROWS, -1)
    constant, out = torch.zeros_like(tokens), []
    for loss, pair in (
        (ours, (tokens, tokens)),
        (ours, (tokens[:, :-1], tokens[:, 1:])),
        (own, (tokens, tokens)),
        (ours, (constant, constant)),
    ):
        module = dsx.PipelineModule(
            [nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)], groups=groups, loss_fn=loss
        )
        engine = dsx.initialize(model=module, config=CONFIG)[0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.train_batch(iter([pair]))
            engine.train_batch(iter([pair]))
        out.append([str(w.message) for w in caught if "labels are" in str(w.message)])
    return out


def test_labels_that_are_the_inputs_are_told_of_once() -> None:
    """Where the loss is dsx's; another may shift by itself, or want its input back."""
    said, *others = ranks.run(_shifted, 1)[0]
    assert len(said) == 1
    assert "tokens[:, 1:] as labels" in said[0]
    assert others == [[], [], []]
