"""Layer lists on several ranks against transformers in one process, and what they communicate."""

import pytest
import tiny_models
import torch
import torch.distributed as dist

import ranks
from dsx.checkpoint.formats.huggingface.weights import split
from dsx.checkpoint.formats.slices import merge
from dsx.nn import collectives
from dsx.nn.parallel import TensorParallel


class Recorder:
    """Stands in for torch.distributed in dsx.nn.collectives: (name, elements of its largest tensor)."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        real = getattr(dist, name)
        if not name.startswith(("all_", "reduce_")):
            return real

        def recorded(*tensors, **options):
            self.calls.append((name, max(t.numel() for t in tensors)))
            return real(*tensors, **options)

        return recorded

    def kinds(self):
        return sorted(name for name, _ in self.calls)


def train(rank, world_size, name, sequence_parallel, recompute, state, ids, labels):
    """One forward and backward: this rank's logits, loss, and gradients by dsx name."""
    tp = TensorParallel(world_size, rank, dist.group.WORLD, sequence_parallel)
    model = tiny_models.Model(name, tp, recompute=recompute).load(state)
    logits = model(ids)
    loss = model.loss_fn(logits, labels)
    loss.backward()
    tags = {p.dsx_spec.name: p.tensor_model_parallel for p in model.parameters()}
    grads = {p.dsx_spec.name: (p.dsx_spec, p.grad) for p in model.parameters()}
    return logits.detach(), loss.detach(), grads, tags


CASES = [
    ("llama", 2, False, "none"),
    ("llama", 2, True, "selective"),
    ("llama-tied", 2, True, "full"),
    ("gpt2", 2, False, "full"),
    ("gpt2", 2, True, "none"),
    ("gpt2-untied", 3, True, "none"),
    ("llama-tp4", 4, True, "none"),
]


@pytest.mark.parametrize(("name", "size", "sequence_parallel", "recompute"), CASES)
def test_equal_to_transformers(name, size, sequence_parallel, recompute):
    hf = tiny_models.reference(name)
    ids, labels = tiny_models.batch(name)
    hf_logits = hf(ids).logits
    hf_loss = torch.nn.functional.cross_entropy(hf_logits.flatten(0, 1), labels.flatten())
    hf_loss.backward()
    results = ranks.run(train, size, name, sequence_parallel, recompute, hf.state_dict(), ids, labels)

    vocab = hf.config.vocab_size
    logits = torch.cat([r[0] for r in results], -1)
    torch.testing.assert_close(logits[..., :vocab], hf_logits, atol=2e-5, rtol=1e-5)
    assert logits[..., vocab:].eq(-torch.inf).all()
    for _, loss, _, tags in results:
        torch.testing.assert_close(loss, hf_loss, atol=1e-6, rtol=1e-6)
        for dsx_name, tag in tags.items():
            assert tag is (results[0][2][dsx_name][0].split is not None)

    grads = {}
    for dsx_name, (spec, first) in results[0][2].items():
        shards = [r[2][dsx_name][1] for r in results]
        if spec.split is None:
            for shard in shards[1:]:  # replicated parameters stay equal only if gradients are, to the bit
                assert torch.equal(shard, first), dsx_name
        grads |= split(spec, merge(spec, shards))
    for key, p in hf.named_parameters():
        torch.testing.assert_close(
            grads[key], p.grad, atol=2e-6, rtol=1e-4, msg=lambda m, key=key: f"{key}: {m}"
        )


def logits_in_bfloat16(rank, world_size, name, state, ids):
    tp = TensorParallel(world_size, rank, dist.group.WORLD, sequence_parallel=True)
    return tiny_models.Model(name, tp, torch.bfloat16).load(state)(ids).float().detach()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_loses_no_more_on_two_ranks(name):
    """Root mean square error against float32, beside transformers in bfloat16 on one."""
    hf = tiny_models.reference(name)
    ids, _ = tiny_models.batch(name)
    state = hf.state_dict()
    exact, theirs = hf(ids).logits, hf.to(torch.bfloat16)(ids).logits.float()
    results = ranks.run(logits_in_bfloat16, 2, name, {k: v.float() for k, v in state.items()}, ids)
    ours = torch.cat(results, -1)[..., : hf.config.vocab_size]
    assert (ours - exact).pow(2).mean() < 1.2 * (theirs - exact).pow(2).mean()


def count(rank, world_size, name, sequence_parallel, recompute):
    """Calls of a block's forward and of its backward, on 2 sequences of 8."""
    tp = TensorParallel(world_size, rank, dist.group.WORLD, sequence_parallel)
    model = tiny_models.Model(name, tp, recompute=recompute)
    x = torch.randn(2, 8 // (world_size if tp.sequence else 1), model.spec.hidden_size, requires_grad=True)
    forward = collectives.dist = Recorder()
    y = model.calls[2](x)
    backward = collectives.dist = Recorder()
    y.sum().backward()
    return forward, backward


def plain(kinds):
    """torch 2.11's names of the collectives that 2.13 renamed."""
    new = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
    return [new.get(kind, kind) for kind in kinds]


def counted(rank, world_size, *case):
    return [(plain(r.kinds()), r.calls) for r in count(rank, world_size, *case)]


def test_four_all_reduces_a_layer():
    """Shoeybi et al. 2019, section 3: two in forward, two in backward, each of B x S x H."""
    for (forward, calls), (backward, more) in ranks.run(counted, 2, "llama", False, "none"):
        assert forward == backward == ["all_reduce"] * 2
        assert {numel for _, numel in calls + more} == {2 * 8 * 60}


def test_sequence_parallelism_moves_the_same_volume():
    """Korthikanti et al. 2022, section 4.2.2: each all-reduce becomes a gather and a scatter of its size.

    One more gather per linear in backward, of the input that only a slice of was kept, and one all-reduce of
    H per norm.
    """
    for (forward, calls), (backward, more) in ranks.run(counted, 2, "llama", True, "none"):
        gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
        assert forward == [gather] * 2 + [scatter] * 2
        assert backward == [gather] * 4 + ["all_reduce"] * 2 + [scatter] * 2
        assert {numel for _, numel in calls} == {2 * 8 * 60}
        assert sorted(numel for _, numel in more) == [60] * 2 + [2 * 8 * 60] * 6


def test_full_recompute_repeats_one_of_two_forward_collectives():
    """The last reduction of a block has nothing after it to recompute: checkpointing stops before it."""
    for (forward, _), (backward, _) in ranks.run(counted, 2, "llama", False, "full"):
        assert forward == ["all_reduce"] * 2
        assert backward == ["all_reduce"] * 3
    for (_, _), (backward, _) in ranks.run(counted, 2, "llama", True, "full"):
        assert backward.count("reduce_scatter_tensor") == 3


def whole_model(rank, world_size, name):
    tp = TensorParallel(world_size, rank, dist.group.WORLD)
    model = tiny_models.Model(name, tp)
    ids, labels = tiny_models.batch(name)
    recorder = collectives.dist = Recorder()
    model.loss_fn(model(ids), labels).backward()
    return recorder.calls


def test_logits_are_never_gathered():
    """Beside four a block: the embedding's forward, the head's backward and two in the loss."""
    for calls in ranks.run(whole_model, 2, "llama"):
        assert {name for name, _ in calls} == {"all_reduce"}
        sizes = [numel for _, numel in calls]
        tokens, hidden = 2 * 24, 60
        assert sorted(sizes) == [tokens, 2 * tokens] + [tokens * hidden] * (4 * 2 + 2)


def test_one_rank_does_not_communicate(monkeypatch):
    monkeypatch.setattr(collectives, "dist", None)
    model = tiny_models.Model("gpt2", TensorParallel(sequence_parallel=True))
    ids, labels = tiny_models.batch("gpt2")
    model.loss_fn(model(ids), labels).backward()


def random_masks(rank, world_size, sequence_parallel):
    """A dropout model's logits on each rank, and the state of the generator after it."""
    tp = TensorParallel(world_size, rank, dist.group.WORLD, sequence_parallel)
    ids, labels = tiny_models.batch("llama-dropout")
    grads = []
    for recompute in ("none", "full"):
        torch.manual_seed(3)
        model = tiny_models.Model("llama-dropout", tp, recompute=recompute)
        model.loss_fn(model(ids), labels).backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-5)
    replicated = [p.grad for p in model.parameters() if p.dsx_spec.split is None]
    return replicated, torch.get_rng_state()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_keeps_ranks_together(sequence_parallel):
    """Replicated parameters' gradients differ as soon as one mask of a replicated activation does."""
    (grads, state), (others, other_state) = ranks.run(random_masks, 2, sequence_parallel)
    assert torch.equal(state, other_state)
    for a, b in zip(grads, others, strict=True):
        assert torch.equal(a, b)


def odd_sequence(rank, world_size):
    tp = TensorParallel(world_size, rank, dist.group.WORLD, sequence_parallel=True)
    tiny_models.Model("llama", tp)(tiny_models.batch("llama", 1, 23)[0])


def test_a_sequence_that_does_not_divide_is_refused():
    with pytest.raises(ranks.RankError, match="23 does not divide by the tensor-parallel size 2"):
        ranks.run(odd_sequence, 2)


def forgotten_group(rank, world_size):
    TensorParallel(2, rank % 2)


def test_a_group_of_another_size_is_refused():
    with pytest.raises(ranks.RankError, match="its process group has 4 ranks"):
        ranks.run(forgotten_group, 4)
