"""Islands beside what they must equal: one job with all of the data, and copies of a model in one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

import dsx
import ranks
from dsx.errors import RunError
from dsx.parallel.islands import Rounds, cut
from often import often

VOCABULARY, LENGTH, ROWS, STEPS = 64, 16, 4, 6

LAYOUTS = {
    "tp 2": ({"tensor": 2}, 0, 2),
    "pp 2, 2 chunks": ({"pipeline": 2, "chunks": 2}, 1, 2),
    "dp 2, ZeRO-3": ({"tensor": 1, "pipeline": 1}, 3, 2),
    "dp 2, ZeRO-0": ({"tensor": 1, "pipeline": 1}, 0, 2),
    "pp 2 x dp 2, ZeRO-2": ({"tensor": 1, "pipeline": 2}, 2, 4),
    "one rank": ({"tensor": 1, "pipeline": 1}, 1, 1),
}

# With a small eps, rounding of a gradient that is all but zero becomes a part of a step.
ADAMW = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}

NESTEROV = {"lr": 0.7, "momentum": 0.9}

HF = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip


class Samples:
    """Sample i: token ids that follow from i."""

    digest = "ids"

    def __init__(self, count: int = 10_000) -> None:
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))


def config_of(parallel, stage, *, outer=None, batch=ROWS, optimizer=None, **train):
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": optimizer or {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "dsx": {
            "model": {"config": HF},
            "data": {"source": "own", "sequence_length": LENGTH, "held_out": 0},
            "parallel": {"sequence_parallel": False, **parallel},
            "train": {"steps": STEPS, "output": train.pop("output", "unused"), "seed": 3, **train},
            "memory_check": "off",
            "faults": {"nonfinite": "off"},
            **({} if outer is None else {"outer": {"optimizer": NESTEROV, **outer}}),
        },
    }


def train(rank, world_size, content, steps=STEPS, before=None):
    """Losses of this rank's island, its weights at the end by name, and what its rounds were."""
    config = dsx.load_config(content, world_size=world_size, rank=rank)
    seed = content["dsx"]["train"]["seed"]
    with dsx.distributed(config.mesh, seed=seed, islands=config.islands) as groups:
        engine = dsx.recipe.build_engine(config, groups)
        batches = dsx.recipe.training_batches(config, Samples(), dp_rank=groups.dp_rank)
        losses = [float(engine.train_batch(batches)) for _ in range(steps)]
        return losses, weights(engine), [] if engine.outer is None else engine.outer.reports


def weights(engine):
    """Every element that this rank's masters hold, by parameter name and place in the parameter."""
    from dsx.checkpoint.run.stored import stored_here

    kept = {}
    for block in stored_here(engine):
        if block.entry.state in ("weight", "master"):
            kept[block.entry.name, block.first] = block.values.detach().clone()
    return kept


def whole(parts):
    """The weights of all ranks of an island together: {name: flat tensor of all its stored elements}."""
    merged = {}
    for part in parts:
        merged |= part
    return {key: merged[key] for key in sorted(merged)}


def islands_of(results, count):
    """[(losses, weights of all ranks together)] by island."""
    per = len(results) // count
    return [
        (results[i * per][0], whole([kept for _, kept, _ in results[i * per : (i + 1) * per]]))
        for i in range(count)
    ]


def close(a, b, tolerance):
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=tolerance, atol=tolerance, msg=f"{key}: {{}}".format)


@pytest.mark.parametrize("layout", often(LAYOUTS, 3))
def test_every_step_with_sgd_is_data_parallelism(layout):
    """Outer rate 1 without momentum after each step of plain SGD: the mean of the gradients."""
    parallel, stage, world = LAYOUTS[layout]
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    outer = {"islands": 2, "every": 1, "optimizer": {"lr": 1.0, "momentum": 0.0}}
    split = config_of(parallel, stage, outer=outer, optimizer=sgd)
    one = config_of(parallel, stage, optimizer=sgd, batch=2 * ROWS)
    found = islands_of(ranks.run(train, 2 * world, split), 2)
    ((losses, expected),) = islands_of(ranks.run(train, world, one), 1)
    (first, mine), (second, theirs) = found
    assert [(a + b) / 2 for a, b in zip(first, second, strict=True)] == pytest.approx(losses, abs=1e-6)
    close(mine, expected, 1e-6)
    for key in mine:
        assert torch.equal(mine[key], theirs[key]), key


def inner_step(model, optimizer, micro_batches):
    parts = [F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten()) for x, y in micro_batches]
    loss = torch.stack(parts).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def diloco(  # noqa: C901 - one loop, to be read at once
    model, batches, *, every, shares=1, delay=0, lr=0.7, momentum=0.9, steps=STEPS
):
    """Copies of ``model`` in this process, each with its own AdamW, and torch's SGD over what they share.

    ``batches[i][t]`` are the micro-batches of copy i in step t. Gives each copy's losses, and the copies.
    """
    copies = [copy.deepcopy(model) for _ in batches]
    common = [p.detach().clone().view(-1) for p in model.parameters()]
    bounds = [[cut(0, c.numel(), s, shares) for c in common] for s in range(shares)]
    views = [[c[low:high] for c, (low, high) in zip(common, its, strict=True)] for its in bounds]
    outer = torch.optim.SGD(
        [{"params": its} for its in views], lr=lr, momentum=momentum, nesterov=momentum > 0
    )
    inner = [torch.optim.AdamW(m.parameters(), **ADAMW) for m in copies]
    losses = [[] for _ in copies]
    rounds, turn, flying = Rounds(every=every, shares=shares, last=steps), 0, []

    def read(m, share):
        return [
            p.detach().view(-1)[low:high].clone()
            for p, (low, high) in zip(m.parameters(), bounds[share], strict=True)
        ]

    def land(share, sent):
        for place, view in enumerate(views[share]):
            view.grad = sum(view - its[place] for its in sent) / len(sent)
        outer.step()
        outer.zero_grad()
        for m, its in zip(copies, sent, strict=True):
            for p, (low, high), view, was in zip(
                m.parameters(), bounds[share], views[share], its, strict=True
            ):
                p.data.view(-1)[low:high] += view - was

    for step in range(1, steps + 1):
        for m, optimizer, its, told in zip(copies, inner, batches, losses, strict=True):
            told.append(inner_step(m, optimizer, its[step - 1]))
        due = rounds.after(step)
        if flying and (due or step - flying[0] >= delay):
            land(*flying[1:])
            flying = []
        for _ in range(due):
            share, turn = turn % shares, turn + 1
            sent = [read(m, share) for m in copies]
            if delay == 0 or step >= steps:
                land(share, sent)
            else:
                flying = [step, share, sent]
    return losses, copies


def train_and_tell(rank, world_size, content, folder, steps=STEPS):
    """Losses, what this rank has read, and its rounds; the island's model goes to ``folder``."""
    config = dsx.load_config(content, world_size=world_size, rank=rank)
    with dsx.distributed(config.mesh, seed=3, islands=config.islands) as groups:
        engine = dsx.recipe.build_engine(config, groups)
        read, source = [], dsx.recipe.training_batches(config, Samples(), dp_rank=groups.dp_rank)

        def kept():
            while True:
                read.append(next(source))
                yield read[-1]

        batches = kept()
        losses = [float(engine.train_batch(batches)) for _ in range(steps)]
        dsx.export_hf(engine, f"{folder}/{config.islands.index}")
        return losses, read if engine.needs_data() and groups.tp_rank == 0 else [], engine.outer.reports


def saved_model(folder, **changes):
    torch.manual_seed(11)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**HF | changes))
    model.save_pretrained(folder)
    return model


def check_beside_copies(layout, tmp_path, *, islands=2, tied=True, steps=STEPS, **outer):
    parallel, stage, world = LAYOUTS[layout]
    model = saved_model(tmp_path / "start", tie_word_embeddings=tied)
    content = config_of(parallel, stage, outer={"islands": islands, **outer}, steps=steps)
    # Shares cut every parameter: the copies' are transformers'.
    kind = "transformers" if outer.get("shares", 1) > 1 else "auto"
    content["dsx"]["model"] = {"path": str(tmp_path / "start"), "weights": "load", "implementation": kind}
    results = ranks.run(train_and_tell, islands * world, content, str(tmp_path), steps)
    batches = []
    for island in range(islands):
        its = results[island * world : (island + 1) * world]
        read = [kept for _, kept, _ in its if kept]
        read = read[: len(read) // (2 if parallel.get("pipeline", 1) > 1 else 1)]  # last stages read as well
        per_step = len(read[0]) // steps
        batches.append(
            [[b for kept in read for b in kept[t * per_step : (t + 1) * per_step]] for t in range(steps)]
        )
    seen = [tuple(x.flatten().tolist()) for its in batches for step in its for x, _ in step]
    assert len(set(seen)) == len(seen) == islands * steps * ROWS
    every, shares, delay = outer["every"], outer.get("shares", 1), outer.get("delay", 0)
    losses, copies = diloco(model, batches, every=every, shares=shares, delay=delay, steps=steps)
    for island in range(islands):
        assert results[island * world][0] == pytest.approx(losses[island], abs=2e-6)
        got = transformers.LlamaForCausalLM.from_pretrained(tmp_path / str(island)).state_dict()
        for name, expected in copies[island].state_dict().items():
            torch.testing.assert_close(got[name], expected, rtol=1e-6, atol=1e-6, msg=f"{name}: {{}}".format)
    return results


@pytest.mark.parametrize("layout", often(reversed(LAYOUTS), len(LAYOUTS)))
def test_adamw_is_a_loop_over_copies(layout, tmp_path):
    results = check_beside_copies(layout, tmp_path, every=3)
    for _, _, reports in results:
        assert [(r.step, r.islands, r.moved) for r in reports] == [(3, (0, 1), (0, 1)), (6, (0, 1), (0, 1))]
        assert [r.hidden for r in reports] == [0.0, 0.0]  # no step goes on meanwhile


@pytest.mark.parametrize(("shares", "delay"), often([(2, 1), (2, 0), (1, 1), (3, 0)], 4))
def test_shares_and_delay_are_a_loop_over_copies(shares, delay, tmp_path):
    check_beside_copies("one rank", tmp_path, every=4, shares=shares, delay=delay, steps=9, tied=False)


def test_three_islands_and_a_last_step_that_is_no_multiple(tmp_path):
    check_beside_copies("one rank", tmp_path, islands=3, every=4, steps=6)


def train_from_other_weights(rank, world_size, content):
    island = rank // (world_size // 2)
    own = {**content["dsx"], "train": {**content["dsx"]["train"], "seed": island}}
    return train(rank, world_size, {**content, "dsx": own})


@pytest.mark.parametrize("layout", ["one rank", "dp 2, ZeRO-0"])
def test_islands_that_begin_with_other_weights_end_with_the_same(layout):
    parallel, stage, world = LAYOUTS[layout]
    content = config_of(parallel, stage, outer={"islands": 2, "every": 3})
    (_, mine), (_, theirs) = islands_of(ranks.run(train_from_other_weights, 2 * world, content), 2)
    for key in mine:
        assert torch.equal(mine[key], theirs[key]), key


def train_or_say(rank, world_size, content):
    try:
        train_from_other_weights(rank, world_size, content)
    except RunError as error:
        return str(error)
    return ""


def test_islands_whose_frozen_weights_differ_are_not_averaged():
    outer = {"islands": 2, "every": 3, "patience_seconds": 8.0}
    content = config_of(*LAYOUTS["one rank"][:2], outer=outer, freeze=["embed_tokens"])
    assert any("frozen weights" in said for said in ranks.run(train_or_say, 2, content))
