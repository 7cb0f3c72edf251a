"""ZeRO-3 builds a layer at a time: the same weights and losses as built whole, in the memory of one layer."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

import ranks
from dsx.errors import ConfigError
from dsx.runtime.paper.meter import StorageMeter
from runtime import toy_pipeline as toy
from runtime.toy_pipeline import Case

SMALL = {"reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 1000}
OFFLOADED = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
FREE = {"zero_force_ds_cpu_optimizer": False}

CASES = {
    "dp": Case(layers="tied", zero=3, bf16=True, zero_keys=SMALL),
    "ties_over_stages": Case(
        layers="tied", zero=3, pp=2, zero_keys={"stage3_param_persistence_threshold": 0}
    ),
    "ties_over_chunks": Case(layers="tied", zero=3, pp=2, chunks=2, bf16=True),
    "frozen_tie": Case(layers="tied", zero=3, pp=2, prepare="frozen tie"),
    "offload": Case(layers="tied", zero=3, pp=2, zero_keys=OFFLOADED, keys=FREE),
    "decay_groups": Case(layers="eight", zero=3, pp=2, prepare="decay groups", bf16=True),
}


def _built_three_ways(rank: int, world_size: int, names: list[str]) -> list[list[toy.Losses]]:
    found = []
    for name in names:
        case, config = CASES[name], toy.config(CASES[name])
        whole = toy.train(case)
        told = toy.train(case, toy.engine(Case(**{**vars_of(case), "module": {"config": config}})))
        with deepspeed.zero.Init(config_dict_or_path=config):
            around = toy.engine(case)
        found.append([whole, told, toy.train(case, around)])
    return found


def vars_of(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


def test_losses_keep_their_bits() -> None:
    """A list of one's own, built whole, with the config, and inside zero.Init: every loss and norm."""
    for found in ranks.run(_built_three_ways, 4, list(CASES)):
        for name, (whole, told, around) in zip(CASES, found, strict=True):
            assert told == whole, name
            assert around == whole, name
