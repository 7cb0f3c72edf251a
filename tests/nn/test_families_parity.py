"""The families against transformers: logits, loss and every gradient, in one process."""

import pytest
import tiny_models
import torch

from dsx.checkpoint.formats.huggingface.weights import split
from dsx.errors import ModelError
from dsx.models.families import layers
from dsx.models.params import layer_kinds, num_parameters
from dsx.nn.embedding import LearnedPositions
from dsx.nn.parallel import TensorParallel
from dsx.parallel.mesh import ALONE

OWN = [
    "llama",
    "llama-tied",
    "llama-linear",
    "mistral",
    "mistral-full",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-window",
]
NAMES = [
    *OWN,
    "gpt2",
    "gpt2-untied",
    "gpt_neox",
    "gpt_neox-serial",
    "gpt_neox-linear",
    "gemma2",
    "gemma2-plain",
]


def by_hf_name(model):
    """Gradients of all parameters under their Hugging Face names, padding rows checked to be zero."""
    out = {}
    for p in model.parameters():
        rows = p.dsx_spec.shape[0]
        assert not p.grad[rows:].any()
        out |= split(p.dsx_spec, p.grad[:rows])
    return out


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_loss_and_gradients_equal_transformers(name, recompute):
    hf = tiny_models.reference(name)
    model = tiny_models.Model(name, recompute=recompute).load(hf.state_dict())
    ids, labels = tiny_models.batch(name)

    logits, hf_logits = model(ids), hf(ids).logits
    vocab = hf.config.vocab_size
    torch.testing.assert_close(logits[..., :vocab], hf_logits, atol=2e-5, rtol=1e-5)
    assert logits[..., vocab:].eq(-torch.inf).all()
    assert logits.shape[-1] == -(-vocab // 64) * 64

    loss = model.loss_fn(logits, labels)
    hf_loss = torch.nn.functional.cross_entropy(hf_logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, hf_loss, atol=1e-6, rtol=1e-6)
    loss.backward()
    hf_loss.backward()
    grads = by_hf_name(model)
    theirs = tiny_models.in_files(name, dict(hf.named_parameters()))
    assert grads.keys() == theirs.keys()
    for key, p in theirs.items():
        torch.testing.assert_close(
            grads[key], p.grad, atol=1e-6, rtol=1e-4, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "qwen3", "gpt_neox", "gemma2"])
def test_bfloat16_is_as_close_to_float32_as_transformers(name):
    hf = tiny_models.reference(name)
    ids, _ = tiny_models.batch(name)
    model = tiny_models.Model(name, dtype=torch.bfloat16).load(hf.state_dict())
    exact = hf(ids).logits
    ours = (model(ids)[..., : hf.config.vocab_size].float() - exact).pow(2).mean().sqrt()
    theirs = (hf.to(torch.bfloat16)(ids).logits.float() - exact).pow(2).mean().sqrt()
    assert ours < 1.1 * theirs


@pytest.mark.parametrize("name", OWN)
def test_the_list_is_the_one_that_the_plan_describes(name):
    model = tiny_models.Model(name)
    entries = layers(model.spec, TensorParallel(), dtype=torch.float32)
    assert tuple(entry.typename.__name__ for entry in entries) == layer_kinds(model.spec)
    for path, p in model.named_parameters():
        assert p.dsx_spec.name == path
        assert p.tensor_model_parallel is False


def saved_bytes(model, ids):
    """Bytes of distinct storages kept for backward, parameters left out."""
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(ids)
    for p in model.parameters():
        kept.pop(p.untyped_storage().data_ptr(), None)
    return sum(kept.values()), out


def test_recompute_keeps_less():
    ids, _ = tiny_models.batch("llama", 1, 64)
    none, selective, full = (
        saved_bytes(tiny_models.Model("llama", recompute=recompute), ids)[0]
        for recompute in ("none", "selective", "full")
    )
    assert full < selective < none


def test_dropout_is_the_same_in_recompute():
    """Gradients with recompute equal those without only if every mask is drawn again alike."""
    ids, labels = tiny_models.batch("llama-dropout")
    grads = []
    for recompute in ("none", "selective", "full"):
        model = tiny_models.Model("llama-dropout", recompute=recompute)
        torch.manual_seed(7)
        model.loss_fn(model(ids), labels).backward()
        grads.append([p.grad for p in model.parameters()])
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-5)


def test_the_meta_device_holds_shapes_alone():
    model = tiny_models.Model("llama", device="meta")
    assert all(p.is_meta and tuple(p.shape) == p.dsx_spec.local_shape(ALONE) for p in model.parameters())
    padding = 2 * (1024 - 1009) * 60
    assert sum(p.numel() for p in model.parameters()) == num_parameters(model.spec) + padding


def test_evaluation_has_no_dropout():
    ids, _ = tiny_models.batch("llama-dropout")
    model = tiny_models.Model("llama-dropout").eval()
    before = torch.get_rng_state()
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), model(ids), atol=0, rtol=0)
    assert torch.equal(before, torch.get_rng_state())


def test_training_after_inference_mode():
    """The rotary tables that evaluation made must serve training."""
    ids, labels = tiny_models.batch("llama")
    model = tiny_models.Model("llama")
    with torch.inference_mode():
        model(ids)
    model.loss_fn(model(ids), labels).backward()


@pytest.mark.parametrize(
    ("name", "tp", "message"),
    [("llama", 4, "num_heads = 6"), ("llama", 3, "num_kv_heads = 2"), ("llama", 6, "num_kv_heads = 2")],
)
def test_heads_that_do_not_divide_are_refused(name, tp, message):
    spec = tiny_models.Model(name).spec
    with pytest.raises(ModelError, match=message):
        layers(spec, TensorParallel(tp, 0), dtype=torch.float32)[1].build()


def test_sequences_longer_than_the_positions_are_refused():
    table = LearnedPositions(64, 8, TensorParallel())
    with pytest.raises(ModelError, match="sequence length 65"):
        table(torch.zeros(1, 65, 8))


def test_ids_outside_the_vocabulary_are_refused():
    """The padded table has rows for some of them: they would train silently."""
    model = tiny_models.Model("llama")
    with pytest.raises(ModelError, match="token id = 1010"):
        model(torch.tensor([[3, 1010]]))
