"""Recurrent mixers cut by heads give what transformers' whole block gives, gradients too, on two ranks."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from all_families.tiny import tiny_config
from torch import Tensor, nn

import ranks
from dsx.hub.context_probe import block_calls
from dsx.hub.model_structure import structure_of
from dsx.hub.read import block_plan, hub_model
from dsx.hub.shrunk import random_model
from dsx.hub.tensor_plan import BlockPlan, apply_plan, is_mixer, sum_gradients
from dsx.nn.parallel import TensorParallel

Json = dict[str, Any]
ONE_GROUP = {"mamba_n_groups": 1, "mamba_rms_norm": True}

CASES = [
    ("mamba2", {}, "mixer"),
    ("bamba", ONE_GROUP, "mamba"),  # every rank needs B and C, and the mean of all ranks' squares
    ("falcon_h1", ONE_GROUP, "mamba"),  # and a buffer that is multiplied with what in_proj gives
    ("nemotron_h", {}, "mixer"),  # experts have a plan of transformers'
    ("qwen3_next", {}, "linear_attn"),  # queries, keys, values and gates head by head
    ("qwen3_5_text", {}, "linear_attn"),
    ("olmo_hybrid", {}, "linear_attn"),
    ("lfm2", {}, "conv"),
    ("kimi_linear", {}, "self_attn"),  # a gate of low rank; attention of other blocks has the same names
    ("bailing_hybrid", {"kda_safe_gate": False}, "self_attn"),
]


def piece(block: nn.Module, plan: BlockPlan, path: str, whole: Tensor, tp: TensorParallel) -> Tensor:
    """A rank's part of a parameter or its gradient."""
    cut = plan.cut(block, path, whole)
    if cut.split is None:
        return whole
    pieces = whole.split(cut.parts or (whole.shape[cut.split],), cut.split)
    return torch.cat([each.chunk(tp.size, cut.split)[tp.rank] for each in pieces], cut.split)


def far(rank: int, world_size: int, config: Json, mixer: str) -> dict[str, float]:
    """How far the outputs and gradients of a rank are from one process's, beside the largest of each."""
    model, tp = hub_model(config), TensorParallel(world_size, rank)
    structure = structure_of(model.config)
    torch.manual_seed(0)
    every = list(block_calls(random_model(config).eval(), structure.blocks, 1))
    number = next(n for n, (block, _) in enumerate(every) if is_mixer(getattr(block, mixer, nn.Identity())))
    (block, call), plan = every[number], block_plan(model, structure, number)
    assert f"{mixer}.out_proj" in plan.styles or f"{mixer}.o_proj" in plan.styles
    part = copy.deepcopy(block)
    summed = apply_plan(part, plan, tp, None)
    for path, parameter in block.named_parameters():
        owner, _, name = path.rpartition(".")
        value = piece(block, plan, path, parameter.detach(), tp).clone()
        setattr(part.get_submodule(owner), name, nn.Parameter(value))
    sum_gradients(dict(part.named_parameters()), summed, tp)
    found = {}
    wanted, own = (call.hidden.detach().clone().requires_grad_() for _ in range(2))
    with torch.enable_grad():
        gave, mine = (call.make(each, x) for each, x in ((block, wanted), (part.train(), own)))
        gave, mine = (each[0] if isinstance(each, tuple) else each for each in (gave, mine))
        weights = torch.randn(gave.shape)
        (gave * weights).sum().backward()
        (mine * weights).sum().backward()
    pairs = {"outputs": (mine, gave), "inputs": (own.grad, wanted.grad)}
    for path, parameter in block.named_parameters():
        if parameter.grad is not None:  # experts to which no token goes have none
            of_rank = piece(block, plan, path, parameter.grad, tp)
            pairs[path] = part.get_parameter(path).grad, of_rank
    for path, (one, other) in pairs.items():
        found[path] = ((one - other).abs().max() / other.abs().max()).item()
    return found


@pytest.mark.parametrize(("family", "options", "mixer"), CASES, ids=lambda value: str(value)[:12])
def test_a_mixer_of_two_ranks_is_that_of_one(family: str, options: Json, mixer: str) -> None:
    config: Json = json.loads(json.dumps(tiny_config(family, **options).to_dict()))
    for found in ranks.run(far, 2, {**config, "model_type": family}, mixer):
        assert {path: each for path, each in found.items() if not each < 1e-4} == {}  # A_log's cancel
