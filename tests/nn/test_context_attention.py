"""Models whose rows are cut over context-parallel ranks, against transformers in one process."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers.masking_utils import sliding_window_causal_mask_function

import dsx.nn
import ranks
from dsx.checkpoint.formats.huggingface.weights import split
from dsx.checkpoint.formats.slices import merge
from dsx.errors import ModelError
from dsx.memory.layer_record import LayerRequest, Shape
from dsx.memory.record_request import record_request
from dsx.models.families import layers
from dsx.nn import LearnedPositions, attention, collectives
from dsx.nn.attention import CausalMask, scaled_dot_product
from dsx.nn.compiled import compile_blocks
from dsx.nn.context import ContextParallel
from dsx.nn.documents import Places, Stream, hidden_of
from dsx.nn.parallel import TensorParallel
from fresh_shell import blocks
from often import often

LENGTH = 24
DOCUMENTS = ((3, 14, 1, 6), (24,))
"""Of each row of a micro-batch: one begins inside a rank's chunk, one crosses several, one is a whole row."""


def places(rank: int, tensor: int, sequence: bool, method: Any) -> tuple[ContextParallel, TensorParallel]:
    """Of a rank of all, the tensor axis inside of the context axis."""
    size = dist.get_world_size() // tensor
    rows = [dist.new_group([at * tensor + t for at in range(size)]) for t in range(tensor)]
    blocks = [dist.new_group([at * tensor + t for t in range(tensor)]) for at in range(size)]
    cp = ContextParallel(size, rank // tensor, rows[rank % tensor], method)
    return cp, TensorParallel(tensor, rank % tensor, blocks[rank // tensor], sequence)


_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION: dict[Any, Any] = {
    _KERNEL: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda dy, q, k, v, *_, **__: sdpa_backward_flop_count(dy, q, k, v)
    ),
}
"""Formulas of torch's for the kernels of a CPU, of which its table has none."""


def train(
    rank: int, world_size: int, name: str, how: dict[str, Any], state: Any, *batch: Tensor
) -> tuple[Any, ...]:
    """One forward and backward: logits, the summed loss, gradients by dsx name, and this rank's FLOPs."""
    del world_size
    ids, labels, *positions = batch
    cp, tp = places(rank, how.get("tensor", 1), how.get("sequence", False), how["method"])
    attention._BLOCK = how.get("block", attention._BLOCK)  # as long rows have many
    model = tiny_models.Model(name, tp, cp=cp, recompute=how.get("recompute", "none")).load(state)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as work:
        logits = model((cp.cut(ids), *positions) if positions else cp.cut(ids))
        loss = model.loss_fn(logits, cp.cut(labels), num_tokens=(labels != -100).sum())
        loss.backward()
    loss = collectives.all_reduce(loss.detach(), cp)
    grads = {}
    for parameter in model.parameters():
        grads[parameter.dsx_spec.name] = parameter.dsx_spec, collectives.all_reduce(parameter.grad, cp)
    assert work.get_flop_counts()["Global"].keys() >= ATTENTION.keys()
    return cp.indices(LENGTH), logits.detach(), loss, grads, work.get_total_flops()


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 2, {"method": "all_gather"}),
    ("llama", 2, {"method": "ulysses", "recompute": "full"}),
    ("llama", 2, {"method": "all_gather", "recompute": "selective", "documents": True}),
    ("llama-tp4", 4, {"method": "all_gather", "documents": True}),
    ("llama-tp4", 4, {"method": "ulysses", "recompute": "selective"}),
    ("llama-tied", 4, {"method": "all_gather", "tensor": 2, "sequence": True}),
    ("llama-tp4", 4, {"method": "ulysses", "tensor": 2, "sequence": True, "documents": True}),
    ("mistral", 2, {"method": "all_gather"}),
    ("mistral", 2, {"method": "ulysses", "documents": True}),
    ("qwen3-window", 2, {"method": "all_gather", "documents": True, "recompute": "full"}),
    ("qwen3-one-head", 2, {"method": "all_gather"}),
    ("qwen3-one-head", 2, {"method": "ulysses"}),
    ("qwen2-window", 2, {"method": "ulysses"}),  # 3 key/value heads, which 2 ranks share unevenly
    ("qwen2-window", 4, {"method": "all_gather"}),
    *[
        (name, 2, {"method": method, "documents": packed, "block": 3})
        for name, method, packed in (
            ("llama", "all_gather", True),
            ("llama", "ulysses", True),
            ("mistral", "all_gather", False),
            ("mistral", "ulysses", True),
            ("qwen3-window", "all_gather", True),
        )
    ],
    ("llama", 2, {"method": "ring"}),
    ("llama-tp4", 4, {"method": "ring", "documents": True, "recompute": "selective"}),
    ("llama-tp4", 3, {"method": "ring", "recompute": "full"}),
    ("llama-tied", 4, {"method": "ring", "tensor": 2, "sequence": True}),
    ("mistral", 3, {"method": "ring", "documents": True}),
    (
        "qwen2-window",
        4,
        {"method": "ring"},
    ),  # a window of 7 in chunks of 3: some ranks send each other nothing
    ("qwen3-window", 2, {"method": "ring", "documents": True, "recompute": "full"}),
    ("qwen3-one-head", 2, {"method": "ring"}),
]


@pytest.mark.parametrize(("name", "size", "how"), CASES)
def test_equal_to_transformers(name: str, size: int, how: dict[str, Any]) -> None:
    hf = tiny_models.reference(name)
    ids, labels = tiny_models.batch(name, len(DOCUMENTS), LENGTH)
    labels[:, 18:] = -100  # with two ranks, one has twelve trained tokens of a row and one seven or two
    positions = []
    if how.get("documents"):
        positions = [torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])]
    named = {"position_ids": positions[0]} if positions else {}
    hf_logits = hf(ids, use_cache=False, **named).logits
    hf_loss = F.cross_entropy(hf_logits.flatten(0, 1), labels.flatten())
    hf_loss.backward()
    results = ranks.run(train, size, name, how, hf.state_dict(), ids, labels, *positions)

    vocab, tensor = hf.config.vocab_size, how.get("tensor", 1)
    work = [each[-1] for each in results]
    if not positions and "window" not in name and name != "mistral":
        assert 0 < max(work) <= 1.02 * min(work), "ranks of the axis wait for each other"
    for first in range(0, size, tensor):
        parts = results[first : first + tensor]
        logits = torch.cat([part[1] for part in parts], -1)[..., :vocab]
        torch.testing.assert_close(logits, hf_logits[:, parts[0][0]], atol=2e-5, rtol=1e-5)
    grads: dict[str, Tensor] = {}
    for dsx_name, (spec, _) in results[0][3].items():
        grads |= split(spec, merge(spec, [part[3][dsx_name][1] for part in results[:tensor]]))
    for _, _, loss, *_ in results:
        torch.testing.assert_close(loss, hf_loss, atol=1e-6, rtol=1e-6)
    for key, p in hf.named_parameters():
        torch.testing.assert_close(
            grads[key], p.grad, atol=3e-6, rtol=1e-4, msg=lambda m, key=key: f"{key}: {m}"
        )


def spread(rank: int, world_size: int, method: Any) -> list[Any]:
    """Learned positions of a row's part, sums over ranks, and a compiled block beside itself."""
    cp, tp = places(rank, 1, False, method)
    torch.manual_seed(2)
    table = LearnedPositions(32, 4, tp, cp=cp)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    x = torch.zeros(2, LENGTH // world_size, 4)
    plain, packed = table(x), table(x, positions)
    ((plain + packed) * cp.cut(torch.arange(2.0 * LENGTH * 4).view(2, LENGTH, 4))).sum().backward()
    found = [cp.indices(LENGTH), plain, packed, collectives.all_reduce(table.weight.grad, cp)]
    own = torch.tensor([1.0, 2.0, rank], requires_grad=True)
    total = collectives.sum_over_context(own, cp)
    total.square().sum().backward()
    return [each.detach() for each in (*found, total, own.grad)]


def test_learned_positions_and_sums() -> None:
    parts = ranks.run(spread, 2, "all_gather")
    torch.manual_seed(2)
    table = LearnedPositions(32, 4, TensorParallel())
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    x = torch.zeros(2, LENGTH, 4)
    plain, packed = table(x), table(x, positions)
    ((plain + packed) * torch.arange(2.0 * LENGTH * 4).view(2, LENGTH, 4)).sum().backward()
    for indices, part, packed_part, gradient, total, own in parts:
        assert torch.equal(part, plain[:, indices])
        assert torch.equal(packed_part, packed[:, indices])
        torch.testing.assert_close(gradient, table.weight.grad)
        assert total.tolist() == [2, 4, 1]
        # The loss that every rank has of the sums is one loss, and each adds its share of the gradient.
        assert own.tolist() == [2 * 2 * 2, 2 * 2 * 4, 2 * 2 * 1]


class Wire:
    """Stands in for torch.distributed in dsx.nn.collectives: (name, elements of its largest tensor)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(dist, name)
        if name == "P2POp":
            return self._message
        if not name.startswith(("all_", "reduce_")):
            return real

        def recorded(*tensors: Tensor, **options: Any) -> Any:
            kind = re.sub("_(single|into_tensor|tensor)$", "", name)  # torch 2.13 renamed two
            self.calls.append((kind, max(tensor.numel() for tensor in tensors)))
            return real(*tensors, **options)

        return recorded

    def _message(self, way: Any, tensor: Tensor, **options: Any) -> Any:
        if way is dist.isend:
            self.calls.append(("message", tensor.numel()))
        return dist.P2POp(way, tensor, **options)


def communicated(
    rank: int, world_size: int, method: Any, name: str = "llama", at: Any = None
) -> list[tuple[str, int]]:
    """What a block sends in its forward and its backward, of 3 rows."""
    cp, tp = places(rank, 1, False, method)
    model = tiny_models.Model(name, tp, cp=cp)
    x = torch.randn(3, LENGTH // world_size, 60, requires_grad=True)
    wire: Any = Wire()
    collectives.dist = wire
    hidden_of(model.calls[1](Stream(x, places=at).flat())).sum().backward()
    return wire.calls


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("cuts", [None, ((9, 15), (6, 3, 15), (10, 14))])
def test_keys_go_where_a_window_or_a_document_reaches(size: int, cuts: Any) -> None:
    """And nowhere else, whoever counts: by transformers' mask, which pairs there are of queries and keys."""
    name, window = ("llama", LENGTH) if cuts else ("mistral", 10)
    place, at = torch.arange(LENGTH), None
    allowed = sliding_window_causal_mask_function(window)(0, 0, place[:, None], place[None])
    if cuts:
        at = Places.of_packs(torch.stack([torch.cat([torch.arange(n) for n in row]) for row in cuts]))
        allowed = (allowed & (at.documents[:, :, None] == at.documents[:, None])).any(0)
    own = [ContextParallel(size, rank).indices(LENGTH) for rank in range(size)]
    heads, pairs = 3 * 2 * 16, 2  # rows of keys and values

    def sent(to: int, of: int) -> int:
        return heads * pairs * int(allowed[own[to]][:, own[of]].any(0).sum())

    others = [[rank for rank in range(size) if rank != own] for own in range(size)]
    for rank, calls in enumerate(ranks.run(communicated, size, "all_gather", name, at)):
        ways = [sent(to, rank) for to in others[rank]], [sent(rank, of) for of in others[rank]]
        assert calls == [("message", each) for way in ways for each in way if each]


def test_what_goes_over_the_wire() -> None:
    """Keys and values of whole rows; or a rank's part of queries, keys and values, and of their context."""
    heads, pairs, size = 6, 2, 16
    keys = 3 * LENGTH * 2 * pairs * size
    for calls in ranks.run(communicated, 2, "all_gather"):
        assert calls == [("all_gather", keys), ("reduce_scatter", keys)]
    part = 3 * LENGTH // 2 * size
    for calls in ranks.run(communicated, 2, "ulysses"):
        both = [("all_to_all", part * (heads + 2 * pairs)), ("all_to_all", part * heads)]
        assert calls == both + both[::-1]
    chunk = keys // 4
    early, late = ranks.run(communicated, 2, "ring")
    # The first of two ranks looks at both chunks of the other's, and sends their gradients home.
    assert early == [("message", each * chunk) for each in (1, 1, 2)]
    assert late == [("message", each * chunk) for each in (2, 2, 1)]


@pytest.mark.parametrize("window", [0, 1, 5, 9, 40])
@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_a_stretch_are_rows_of_the_whole_mask(window: int, packed: bool) -> None:
    of, cpu = CausalMask(window), torch.device("cpu")
    document = torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in DOCUMENTS])
    at = Places(document, document) if packed else None
    place = torch.arange(LENGTH)
    allowed = sliding_window_causal_mask_function(window or LENGTH)(0, 0, place[:, None], place[None])
    if packed:
        allowed = (allowed & (document[:, :, None] == document[:, None])).unsqueeze(1)
    whole = torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)
    for rank in range(3):
        for queries in ContextParallel(3, rank).chunks(LENGTH):
            keys = of.keys(queries)
            rows = whole[..., queries.start : queries.stop, :]
            mask = of(LENGTH, torch.float32, cpu, at, queries)
            if mask is None:  # kernels know what is plain causal, whose keys are all before the queries
                assert not packed
                assert not window or queries.stop <= window
                mask = whole[queries.start : queries.stop, : queries.stop]
            assert torch.equal(mask, rows[..., keys.start : keys.stop])
            assert rows[..., : keys.start].eq(-torch.inf).all()
            assert rows[..., keys.stop :].eq(-torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fewer_queries_than_keys_need_no_mask(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = (
        torch.randn(2, n, s, 8, generator=generator).to(dtype) for n, s in ((4, 5), (2, 12), (2, 12), (4, 5))
    )
    assert CausalMask()(12, dtype, torch.device("cpu"), None, range(7, 12)) is None
    seen, found = torch.ones(5, 12, dtype=torch.bool).tril(7), []
    for attend in (
        lambda *heads: F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=0.3, enable_gqa=True),
        lambda *heads: scaled_dot_product(*heads, 0.0, None, 0.3),
    ):
        heads = [each.clone().requires_grad_() for each in (q, k, v)]
        y = attend(*heads)
        y.backward(dy)
        found.append([y, *(each.grad for each in heads)])
    rounding = {} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.02}
    for wanted, each in zip(*found, strict=True):
        torch.testing.assert_close(each, wanted, **rounding)
    kept = [scaled_dot_product(q, k, torch.eye(12, 8).to(dtype).expand_as(v), p, None) for p in (0.0, 0.5)]
    assert (kept[0] != 0).sum() > (kept[1] != 0).sum() > 0, "scores are dropped there too"


def test_heads_that_ulysses_cannot_share_out_are_refused() -> None:
    spec, cp = tiny_models.Model("llama").spec, ContextParallel(4, 0, method="ulysses")
    with pytest.raises(
        ModelError, match="shares out the 6 query heads of a rank, which 4 context ranks do not"
    ):
        layers(spec, TensorParallel(), dtype=torch.float32, cp=cp)[1].build()


def alike(rank: int, world_size: int, method: Any) -> None:
    """Dropout's masks are the same when recomputed, and compiled blocks compute what others do."""
    del world_size
    warnings.filterwarnings("error", "Block runs as it is, not compiled")
    cp, tp = places(rank, 1, False, method)
    ids, labels = (cp.cut(each) for each in tiny_models.batch("llama-dropout"))
    grads = []
    dropping = "llama" if method == "ring" else "llama-dropout"  # a ring drops no scores
    for recompute in ("none", "full", "selective"):
        torch.manual_seed(3 + rank)
        model = tiny_models.Model(dropping, tp, cp=cp, recompute=recompute)
        model.loss_fn(model(ids), labels).backward()
        grads.append([p.grad for p in model.parameters()])
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-5)
    for recompute in ("none", "selective"):
        grads = []
        for compiled in (False, True):
            model = tiny_models.Model("mistral", tp, cp=cp, recompute=recompute)
            if compiled:
                kinds = [type(each) for each in model.children()]
                assert compile_blocks(model.children(), kinds, "aot_eager")
            model.loss_fn(model(ids), labels).backward()
            grads.append([p.grad for p in model.parameters()])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("method", often(["ring", "ulysses", "all_gather"], 3))
def test_recomputed_and_compiled_blocks_give_the_same(method: str) -> None:
    ranks.run(alike, 2, method)


def kept_bytes(length: int, recompute: Any, context: int, method: Any = "all_gather") -> int:
    """What a forward of one block leaves for its backward, as a GPU's kernels do."""
    shape = Shape(
        model=tiny_models.Model("llama").spec,
        tensor=1,
        sequence_parallel=False,
        micro_batch=1,
        sequence_length=length,
        width=2,
        recompute=recompute,
        context=context,
        context_method=method,
    )
    events = record_request(LayerRequest(shape=shape, kind="Block")).memory("forward")
    live: dict[Any, int] = {}
    for event in events:
        if event[0] == "+":
            live[event[1]] = event[2]
        elif event[0] == "-":
            live.pop(event[1], None)
    return sum(live.values())


@pytest.mark.parametrize("length", [1 << 13, 1 << 20])
def test_a_rank_keeps_its_share(length: int) -> None:
    """No mask, and of the other ranks' tokens nothing but keys and values, unless attention is recomputed."""
    heads, pairs, size, small = 6, 2, 16, 2048
    whole = {how: kept_bytes(length, how, 1) for how in ("none", "selective")}
    for context in (2, 8):
        part = length // context
        # Gathered keys and values in the place of the own values, and the context of two chunks as one.
        elements = 2 * length * pairs * size - part * pairs * size + part * heads * size
        for how, more in (("none", 2 * elements), ("selective", 0)):
            share = whole[how] // context
            assert kept_bytes(length, how, context) == pytest.approx(share + more, rel=0.005, abs=small)
    for how, more in (("none", 2 * length // 2 * heads * size), ("selective", 0)):  # the context, twice too
        share = whole[how] // 2
        assert kept_bytes(length, how, 2, "ulysses") == pytest.approx(share + more, rel=0.005, abs=small)


def mixed(rank: int, world_size: int, code: str, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """What a layer of the guide gives each rank of all, and the gradient; of one, those of whole rows."""
    cp, tp = places(rank, 2, True, "all_gather") if world_size > 1 else (ContextParallel(), TensorParallel())
    names: dict[str, Any] = {"torch": torch, "parallel": dsx.nn}
    exec(code, names)

    def own(whole: Tensor) -> Tensor:
        return cp.cut(whole).chunk(tp.size, 1)[tp.rank]

    x = x.requires_grad_()
    y = names["forward"](SimpleNamespace(cp=cp, tp=tp), own(x))
    y.backward(own(dy))
    wanted = (x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None] + x).detach()
    return own(wanted), y.detach(), x.grad


def test_the_guides_layer_is_right_where_the_tensor_axis_cuts_sequences_too():
    guide = (Path(__file__).parents[2] / "docs/guides/own_model.md").read_text(encoding="utf-8")
    (code,) = [each for each in blocks(guide, "python") if "gather_rows" in each]
    code = re.sub("^    ", "", code, flags=re.MULTILINE)
    torch.manual_seed(1)
    batch = torch.randn(2, 12, 3), torch.randn(2, 12, 3)  # rows that do not divide by 2 x context x tensor
    seen = ranks.run(mixed, 4, code, *batch)
    for wanted, y, _ in seen:
        torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(sum(dx for *_, dx in seen), mixed(0, 1, code, *batch)[2])
