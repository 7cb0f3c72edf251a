"""Families of transformers whose sequences several ranks share give what one process of transformers gives.

Compared are the loss and every gradient, with packs of documents too, and the reference is transformers'
own forward and backward of the whole sequence, or of each document by itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from all_families import table, tiny
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import dsx
import ranks
from dsx.errors import ConfigError, DsxError, ModelError
from dsx.hub.context import check_kernels
from dsx.hub.context_probe import mixers, no_context, no_selective, passes_states
from dsx.hub.late_mask import LateMask
from dsx.hub.read import hub_model
from dsx.hub.state_passing import pass_states
from dsx.hub.tensor_plan import BlockPlan, apply_plan
from dsx.models import families
from dsx.models.spec import ContextMethod
from dsx.models.transformers_settings import quiet_transformers, torch_forms
from dsx.nn import attention, ring
from dsx.nn.compiled import compile_blocks
from dsx.nn.context import ContextParallel
from dsx.nn.linear import ColumnParallelLinear, LocalLinear
from dsx.nn.parallel import TensorParallel
from dsx.verify.alone import probe
from often import often

PAGE = Path(__file__).parents[2] / "docs/guides/models.md"
ROWS, LENGTH, TOLERANCE = 2, 24, 1e-5
CUTS = [(0, 24), (0, 7, 15, 24)]
"""Where documents of a row begin and end."""
Case = tuple[str, dict[str, Any], ContextMethod, tuple[int, ...]]

SAMPLE = (
    "gemma2",  # windows, soft caps, a scaled embedding
    "gpt2",  # a table of positions
    "gpt_oss",  # sinks by heads
    "mixtral+output_router_logits",  # a loss of all tokens together
    "llama4_text",  # chunks, and layers without rotation
    "deepseek_v3",  # latent attention
    "qwen3_next",  # the delta rule
    "rwkv",  # mixers in mixers, and no attention
    "bloom",  # attention past the registry, biases by distance
    "bart",  # positions by offset
    "deepseek_v32",  # an indexer that picks keys
    "recurrent_gemma",  # a recurrence that documents' positions start anew
)
SPARSE = {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 3], "index_n_heads": 2}
"""Of `minimax_m3_vl_text`, whose attention asks for the name of its function in sparse blocks."""
NOT_PACKED = ("mixtral+output_router_logits", "granitemoehybrid")
"""A loss that is no sum over documents, and masks without positions."""


def content(family: str, **sizes: Any) -> dict[str, Any]:
    """Of a config.json; some classes make a decoder of an encoder's."""
    return described(random_model(tiny.tiny_config(family, **sizes)))


def described(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return found


def random_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.nan_to_num_().add_(0.1 * torch.randn(parameter.shape))
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 200, (ROWS, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, :11] = -100  # the parts of a row hold different numbers of trained tokens
    return ids[:, :-1].contiguous(), labels


def packed(cuts: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(end - start) for start, end in pairwise(cuts)]).expand(ROWS, -1)


def by_transformers(
    model: Any, cuts: tuple[int, ...], *, mixing: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the gradients by name; a pack goes in as such where a mixer may see other documents."""
    ids, labels = batch()
    total = 0.0
    if len(cuts) > 2 and mixing:
        y = model(input_ids=ids, position_ids=packed(cuts), use_cache=False).logits
        loss = F.cross_entropy(y.flatten(0, 1), labels.flatten())
        loss.backward()
        return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for start, end in pairwise(cuts):
        out = model(input_ids=ids[:, start:end], use_cache=False)
        loss = F.cross_entropy(out.logits.flatten(0, 1), labels[:, start:end].flatten(), reduction="sum")
        loss = loss / (labels != -100).sum()
        if getattr(out, "aux_loss", None) is not None:
            loss = loss + model.router_aux_loss_coef * out.aux_loss
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def has_mixers(config: dict[str, Any], size: int) -> bool:
    around = mixers(hub_model(config).config, size)
    return any(each.paths and not each.alone for each in around)


def turned(model: Any, name: str, value: Tensor) -> Tensor:
    """A matrix as dsx has it from what transformers has, and back: some of its linears are the other way."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return value.T if isinstance(owner, Conv1D) and value.dim() > 1 else value


def by_dsx(
    model: Any, cp: ContextParallel, cuts: tuple[int, ...], recompute: Any = "full", compiles: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """The same, summed over the ranks."""
    spec = hub_model(described(model))
    layers: list[Any] = []

    def entry(kind: Any, *arguments: Any, tied: bool = False, use: Any = None) -> Any:
        del tied
        return kind(*arguments) if use is None else lambda given: use(layers[0], given)

    forms = {"dtype": torch.float32, "pad_multiple": 1, "cp": cp}
    made = families.layers(
        spec, TensorParallel(), **forms, recompute=recompute, entry=partial(partial, entry)
    )
    layers += [each() for each in made]
    if compiles:
        compile_blocks(layers[1:-2], [type(each) for each in layers[1:-2]], "aot_eager")
    parameters = [p for layer in layers if isinstance(layer, nn.Module) for p in layer.parameters()]
    with torch.no_grad():
        for parameter in parameters:
            name = parameter.dsx_spec.in_module
            parameter.copy_(turned(model, name, model.get_parameter(name)))
    ids, labels = batch()
    given: Any = cp.cut(ids)
    if len(cuts) > 2:  # places are always those of whole rows
        given = given, packed(cuts)
    for layer in layers:
        given = layer(given)
    trained = (labels != -100).sum() / cp.size
    loss = families.loss(spec, TensorParallel())(given, cp.cut(labels), num_tokens=trained) / cp.size
    loss.backward()
    found = {}
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradient)
        name = parameter.dsx_spec.in_module
        found[name] = turned(model, name, gradient)
    total = loss.detach()
    dist.all_reduce(total)
    return float(total), found


def roundings(family: str, sizes: dict[str, Any], cuts: tuple[int, ...]) -> dict[str, Tensor]:
    """Gradients of transformers with weights that are a rounding away."""
    model = random_model(tiny.tiny_config(family, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.finfo(torch.float32).eps / 2 * torch.randn(parameter.shape))
    return by_transformers(model, cuts, mixing=True)[1]


def differences(
    rank: int, world_size: int, cases: Sequence[Case], *how: Any
) -> list[tuple[float, float, str]]:
    """For each case how far the loss and a gradient are off, relative, and which gradient is furthest."""
    found = []
    for family, sizes, method, cuts in cases:
        model = random_model(tiny.tiny_config(family, **sizes))
        cp = ContextParallel(world_size, rank, method=method)
        mixing = has_mixers(described(model), world_size)
        loss, gradients = by_transformers(model, cuts, mixing=mixing)
        own, ours = by_dsx(model, cp, cuts, *how)
        least = 1e-2 * max(
            float(each.abs().max()) for each in gradients.values()
        )  # some are 0 but for roundings

        def off_by(
            found: dict[str, Tensor], wanted: dict[str, Tensor] = gradients, least: float = least
        ) -> dict[str, float]:
            return {
                name: float((found[name] - each).abs().max()) / max(float(each.abs().max()), least)
                for name, each in wanted.items()
            }

        off = off_by(ours)
        if mixing and max(off.values()) > TOLERANCE:  # the delta rule makes roundings larger
            away = max(off_by(roundings(family, sizes, cuts)).values())
            off = {name: each - min(4 * away, 1e-3) for name, each in off.items()}
        worst = max(off, key=lambda name: off[name])
        found.append((abs(own - loss) / abs(loss), off[worst], worst))
    return found


def require_equal(world_size: int, cases: Sequence[Case], *how: Any) -> None:
    for each in ranks.run(differences, world_size, cases, *how):
        wrong = [
            (case, told) for case, told in zip(cases, each, strict=True) if not max(told[:2]) < TOLERANCE
        ]
        assert not wrong


def takes_packs(family: str, **sizes: Any) -> bool:
    """Whether documents are kept apart, or mixers see others of their pack here as in transformers."""
    config = content(family, **sizes)
    mixing = has_mixers(config, 2)
    return family not in NOT_PACKED and (mixing or probe(config).no_documents is None)


def cases_of(names: Sequence[str], **sizes: Any) -> list[Case]:
    """All methods that the family takes, and its packs of documents where the loss is a sum over tokens."""
    return [
        (family, sizes, method, cuts)
        for family in names
        for method, cuts in product(("all_gather", "ulysses", "ring"), CUTS)
        if (method, cuts) != ("ulysses", CUTS[0])
        and (cuts == CUTS[0] or takes_packs(family, **sizes))
        and (method != "ring" or no_context(hub_model(content(family, **sizes)), 2, method) is None)
    ]


@pytest.mark.parametrize("names", often([list(SAMPLE[at::4]) for at in range(4)], 4))
def test_ranks_that_share_sequences_train_as_one(names: Sequence[str]) -> None:
    require_equal(2, cases_of(names))


@pytest.mark.slow
def test_what_asks_for_the_name_of_its_attention_function_trains_as_one() -> None:
    sparse = hub_model(content("minimax_m3_vl_text", **SPARSE))
    assert "chooses by the name" in str(no_selective(sparse.config))
    require_equal(2, cases_of(("minimax_m3_vl_text",), **SPARSE))


def test_the_guide_counts_its_column() -> None:
    page = PAGE.read_text(encoding="utf-8")
    trained = [row["cp-pp"] for row in table.read(page).values()].count("ok")
    assert f"`dsx.parallel.context` {trained} families train" in page
    assert trained >= 125


PASSING = (
    "nemotron_h", "lfm2", "qwen3_next", "bamba", "olmo_hybrid", "granitemoehybrid", "qwen3_5_text",
    "bailing_hybrid", "qwen3_5_moe_text", "lfm2_moe", "lfm3", "mamba2",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "size"), often([*product(PASSING, [2]), ("qwen3_next", 4), ("bamba", 4)], 12)
)
def test_states_are_handed_from_rank_to_rank(family: str, size: int) -> None:
    assert all(block.passing == block.paths for block in blocks_mixing(family))
    packs = CUTS[: 1 if family in NOT_PACKED else 2]
    require_equal(size, [(family, {}, "all_gather", cuts) for cuts in packs])


def blocks_mixing(family: str) -> list[Any]:
    found = [each for each in mixers(hub_model(content(family)).config, 2) if each.paths]
    assert found
    return found


def test_what_takes_no_state_in_the_middle_of_a_row_sees_whole_rows() -> None:
    assert {(*each.paths, *each.passing) for each in blocks_mixing("jamba")} == {("mamba",)}


def test_mixers_that_lose_or_take_no_states_are_found_out() -> None:
    block = random_model(tiny.tiny_config("bamba")).model.layers[0].eval()
    x, forward = torch.randn(2, 32, block.mamba.in_proj.in_features), block.mamba.forward
    with torch_forms():
        assert passes_states(block.mamba, (x,), {})
        block.mamba.forward = lambda x, cache_params=None: forward(x)
        assert not passes_states(block.mamba, (x,), {})
        assert not passes_states(block.feed_forward, (x,), {})


def mixed(rank: int, world_size: int, trained: bool) -> list[bool]:
    """A mixer of which nothing is trained, or its last linear alone, whose inputs take no gradient."""
    torch.manual_seed(1)
    mixer = random_model(tiny.tiny_config("bamba")).model.layers[0].mamba.requires_grad_(False)
    mixer.out_proj.requires_grad_(trained)
    cp, x = ContextParallel(world_size, rank), torch.randn(2, 32, mixer.in_proj.in_features)
    wanted = mixer(x)
    if trained:
        wanted.sin().sum().backward()
        gradient, mixer.out_proj.weight.grad = mixer.out_proj.weight.grad, None
    pass_states(nn.ModuleDict({"mixer": mixer}), ["mixer"], cp)
    for _ in range(2):  # shapes of states are known the second time
        y = mixer(cp.cut(x))
        assert y.requires_grad == trained
    assert torch.allclose(y, cp.cut(wanted), atol=1e-5)
    if trained:
        y.sin().sum().backward()
        dist.all_reduce(mixer.out_proj.weight.grad)
        assert torch.allclose(mixer.out_proj.weight.grad, gradient, atol=1e-4)
    return [True]


@pytest.mark.parametrize("trained", [False, True])
def test_frozen_mixers_hand_states_on(trained: bool) -> None:
    assert ranks.run(mixed, 2, trained) == [[True]] * 2


def in_blocks(rank: int, world_size: int, family: str, method: Any, how: dict[str, Any]) -> Any:
    """Masks of three queries at a time, as long rows have many; no mask is made for more."""
    attention._BLOCK = ring._MASKED = 3
    made = list[tuple[int, int]]()
    model = random_model(tiny.tiny_config(family, **how["sizes"]))
    mixers(hub_model(described(model)).config, world_size)  # tried before, and not counted
    rows = LateMask.rows
    LateMask.rows = lambda mask, q, k: made.append((len(q), len(k))) or rows(mask, q, k)  # type: ignore[method-assign]
    wanted = by_transformers(model, how["cuts"])
    own = by_dsx(model, ContextParallel(world_size, rank, method=method), how["cuts"], *how["run"])
    assert float(abs(own[0] - wanted[0])) < TOLERANCE * abs(wanted[0])
    for name, gradient in wanted[1].items():
        least = 1e-2 * max(float(each.abs().max()) for each in wanted[1].values())
        assert (own[1][name] - gradient).abs().max() < TOLERANCE * max(float(gradient.abs().max()), least)
    return made


WINDOW = {"sliding_window": 5}


@pytest.mark.parametrize(
    ("family", "method", "size", "how"),
    often(
        [
            ("mistral", "all_gather", 3, {"run": ("none",)}),
            ("mistral", "ring", 2, {"cuts": CUTS[1]}),
            ("mistral", "ulysses", 2, {"cuts": CUTS[1], "run": ("full", True)}),
            (
                "gemma2",
                "all_gather",
                2,
                {"cuts": CUTS[1], "run": ("none", True)},
            ),  # caps, by the eager function
            ("gpt_oss", "all_gather", 2, {}),  # sinks
            ("gpt_oss", "ulysses", 2, {"cuts": CUTS[1]}),
            ("llama", "all_gather", 3, {"cuts": CUTS[1]}),
            # The first rank receives nothing, and sends.
            ("llama4_text", "all_gather", 3, {"sizes": {"attention_chunk_size": 5}}),
        ],
        7,
    ),
)
def test_masks_are_made_for_few_queries_at_a_time(family: str, method: str, size: int, how: Any) -> None:
    sizes = {"llama": {}, "llama4_text": {}}.get(family, WINDOW)
    how = {"cuts": CUTS[0], "run": (), "sizes": sizes} | how
    for made in ranks.run(in_blocks, size, family, method, how):
        most = 3 if method == "ring" else 5  # a block has a window's queries
        assert made
        assert max(queries for queries, _ in made) <= most


@pytest.mark.slow
def test_every_family_is_refused_or_trains_as_one() -> None:
    let_through, rows = list[str](), table.read(PAGE.read_text(encoding="utf-8"))
    for family in tiny.all_families():
        try:
            if tiny.text_family(family) != family:  # its language model is a family of its own
                continue
            model = hub_model(content(family))
        except (DsxError, LookupError):  # stages cannot have it
            continue
        if no_context(model, 2, "all_gather") is None:
            assert no_context(model, 2, "ulysses") is None
            let_through.append(family)
    assert {*let_through} & rows.keys() == {name for name, row in rows.items() if row["cp-pp"] == "ok"}
    for start in range(0, len(let_through), 12):
        require_equal(2, cases_of(let_through[start : start + 12]))


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [1, 4, 2])
def test_more_ranks_than_key_value_heads(pairs: int) -> None:
    sizes = {"num_key_value_heads": pairs, "num_attention_heads": 4}
    require_equal(4, cases_of(("llama", "gpt_oss"), **sizes))


def loaded(family: str, **parallel: Any) -> Any:
    return dsx.load_config(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "dsx": {
                "model": {"config": content(family), "implementation": "transformers"},
                "parallel": parallel,
                "data": {"source": "own", "sequence_length": 32},
                "train": {"steps": 1, "output": "unused"},
            },
        },
        world_size=4,
    )


def test_what_cannot_be_shared_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.helium.modeling_helium import HeliumDecoderLayer

    own = HeliumDecoderLayer.forward  # a family of which nothing else here asks

    def averaged(self: Any, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        return own(self, hidden_states + hidden_states.mean(1, keepdim=True), *arguments, **named)

    monkeypatch.setattr(HeliumDecoderLayer, "forward", averaged)
    assert loaded("helium", context=1).mesh.cp == 1
    told = r"dsx.parallel.context = 2: helium: block 0\.self_attn does not run on a part of a sequence"
    with pytest.raises(ConfigError, match=told):
        loaded("helium", context=2)


@pytest.mark.parametrize(
    ("family", "gathered"),
    [
        ("falcon", {("self_attention",)}),
        ("deepseek_v32", {("self_attn",)}),
        ("llama4_text", {(), ("self_attn",)}),  # of which some blocks scale queries by positions
        ("inkling_text", {("attn_sconv", "mlp_sconv", "self_attn")}),
        ("bart", {()}),
    ],
)
def test_what_sees_whole_sequences_is_the_least_that_gives_the_same(family: str, gathered: Any) -> None:
    around = mixers(hub_model(content(family)).config, 2)
    assert {tuple(sorted(each.paths)) for each in around} == gathered
    assert all(each.alone for each in around if each.paths)


def test_windows_chunks_and_tables_of_positions_take_keys_alone() -> None:
    for family in ("gemma2", "opt", "gpt2"):
        assert loaded(family, context=2, context_method="ulysses").mesh.cp == 2
    for config in (content("gemma2"), content("llama4_text", attn_temperature_tuning=False)):
        assert not any(each.paths for each in mixers(hub_model(config).config, 2))
        assert no_context(hub_model(config), 2, "ulysses") is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_depends_on_the_name_of_the_attention_function_sees_whole_sequences(attention: str) -> None:
    config = content("minimax_m3_vl_text", **SPARSE)  # whose mask has every token of so few
    around = mixers(hub_model({**config, "attn_implementation": attention}).config, 2)
    assert [sorted(each.paths) for each in around] == [[], *[["self_attn"]] * 3]
    same = {**content("gpt2"), "attn_implementation": attention}  # asks, and does the same
    assert not any(each.paths for each in mixers(hub_model(same).config, 2))


def test_what_sees_whole_rows_leaves_the_cut_along_the_sequence_to_its_ends() -> None:
    plan, tp = (
        BlockPlan({"mixer.up": "colwise", "mixer.down": "rowwise"}),
        TensorParallel(2, 0, sequence_parallel=True),
    )
    cut_inside = (
        ((), LocalLinear),
        (("mixer",), ColumnParallelLinear),
        (("mixer.up",), ColumnParallelLinear),
    )
    for whole, kind in cut_inside:
        mixer = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
        block = nn.ModuleDict({"mixer": mixer})
        apply_plan(block, plan, tp, None, whole)
        assert type(mixer["up"]) is kind


def test_other_kernels_are_refused_by_name() -> None:
    model = random_model(tiny.tiny_config("llama"))
    check_kernels(model)
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ModelError, match=r"flex_attention.*right with sdpa and eager"):
        check_kernels(model)


RECOMPUTED = (
    "gpt_oss",  # sinks, which are parameters
    "gemma2",
    "nemotron_h",  # mixers, of which nothing is recomputed
    "deepseek_v3",
    "llama4_text",
    "deepseek_v4",
)


@pytest.mark.parametrize("names", often([list(RECOMPUTED[at::3]) for at in range(3)], 3))
def test_attention_alone_is_recomputed(names: Sequence[str]) -> None:
    require_equal(1, [(family, {}, "all_gather", CUTS[0]) for family in names], "selective")


@pytest.mark.parametrize("names", often([["gpt_oss"], list(RECOMPUTED[1:3])], 2))
def test_so_it_is_where_ranks_share_sequences(names: Sequence[str]) -> None:
    require_equal(2, cases_of(names), "selective")


def test_so_it_is_in_compiled_blocks() -> None:
    require_equal(1, [("gpt_oss", {}, "all_gather", CUTS[0])], "selective", True)


def kept(_rank: int, _world_size: int, recompute: Any, dropout: float) -> tuple[int, float, dict[str, Any]]:
    """Bytes that backward keeps of a model with sinks, its loss, and its gradients."""
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    model = random_model(tiny.tiny_config("gpt_oss", attention_dropout=dropout))
    torch.manual_seed(7)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss, gradients = by_dsx(model, ContextParallel(), CUTS[0], recompute)
    return sum(found.values()), loss, gradients


def test_scores_go_and_come_again_with_what_was_dropped() -> None:
    (bytes_of_all, wanted, gradients), (left, loss, ours) = (
        ranks.run(kept, 1, each, 0.2)[0] for each in ("none", "selective")
    )
    config = tiny.tiny_config("gpt_oss")
    probabilities = 4 * ROWS * config.num_attention_heads * LENGTH**2 * config.num_hidden_layers
    assert bytes_of_all - left > probabilities
    assert loss == wanted
    assert loss != ranks.run(kept, 1, "selective", 0.0)[0][1]
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=0)


UNABLE = [
    ("rwkv", {}, "no block of it attends"),
    ("olmo2", {"attn_implementation": "flex_attention"}, "flex"),
]


@pytest.mark.parametrize(("family", "changes", "word"), often(UNABLE, 2))
def test_who_cannot_recompute_attention_alone_is_told(family: str, changes: Any, word: str) -> None:
    assert word in str(no_selective(hub_model(content(family) | changes).config))
