"""ZeRO-3 builds a layer at a time: the same weights and losses as built whole, in the memory of one layer."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import ranks
from dsx.config.ordinary import complete
from dsx.config.resolve import resolve
from dsx.errors import ConfigError, ModelError
from dsx.memory.estimate import estimate
from dsx.memory.job import job_of
from engine import toy_pipeline as toy
from engine.toy_pipeline import Case
from often import often
from parity.oracle import save_model

OFFLOADED = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}

CASES = {
    "ties_over_stages": Case(
        layers="tied", zero=3, pp=2, bf16=True, zero_keys={"stage3_param_persistence_threshold": 0}
    ),
    "offload": Case(
        layers="tied", zero=3, pp=2, zero_keys=OFFLOADED, keys={"zero_force_ds_cpu_optimizer": False}
    ),
    "chunks": Case(layers="tied", zero=3, pp=2, chunks=2, prepare="frozen tie"),
    # Groups by the number of dimensions, which a partitioned parameter has to show.
    "decay_groups": Case(layers="eight", zero=3, pp=1, prepare="decay groups", bf16=True),
}


def _three_ways(rank: int, world_size: int, case: Case) -> list[toy.Losses]:
    config = toy.config(case)
    whole = toy.train(case)
    told = toy.train(case, toy.engine(replace(case, module={"config": config})))
    with deepspeed.zero.Init(config_dict_or_path=config):
        around = toy.engine(case)
    return [whole, told, toy.train(case, around)]


@pytest.mark.parametrize("name", often(CASES, 3))
def test_a_list_of_ones_own_trains_the_same(name: str) -> None:
    """Built whole, with the config, inside zero.Init: every loss and norm, bit by bit."""
    for whole, told, around in ranks.run(_three_ways, 4, CASES[name]):
        assert told == whole
        assert around == whole


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 20000, "stage3_prefetch_bucket_size": 20000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "dsx": {
        "data": {"sequence_length": 32, "tokenizer": "bytes"},
        "train": {"steps": 2, "output": "runs/zero3"},
    },
}

LAYOUTS = {
    "pp_dp_tied": ("gpt2", ["dsx.parallel.pipeline=2", "dsx.parallel.tensor=1", "bf16.enabled=true"]),
    "dp": ("llama", ["dsx.parallel.pipeline=1", "dsx.parallel.tensor=1"]),
    "tp_dp": ("llama", ["dsx.parallel.pipeline=1", "dsx.parallel.tensor=2"]),
}

FILLING_BYTES = 24
"""Temporaries for each element of a parameter that is given its initial value (dsx.nn.parameters)."""


def _trained(rank: int, world_size: int, folder: Path, sets: list[str]) -> dict[str, list[Any]]:
    """Per source of weights: losses, bytes held once it is built, peaks, bytes held between steps.

    Each when built whole and when built a layer at a time.
    """
    from dsx.engine.initialize import initialize
    from dsx.engine.zero.building import LayerPartitioner
    from dsx.memory.meter import StorageMeter
    from dsx.parallel.groups import make_groups
    from dsx.train import recipe
    from dsx.verify.subject import random_tokens

    torch.autograd.set_multithreading_enabled(False)  # else backwards escape the meter
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    found: dict[str, list[Any]] = {"random": [], "load": []}
    for weights, results in found.items():
        model = [f"dsx.model.path={folder}", f"dsx.model.weights={weights}"]
        config = resolve(CONFIG, world_size=world_size, overrides=[*model, *sets])
        for whole in (True, False):
            groups, meter, losses = make_groups(config.mesh), StorageMeter("cpu"), []
            with pytest.MonkeyPatch.context() as patch, meter:
                if whole:
                    patch.setattr(LayerPartitioner, "of_settings", lambda *_: None)
                with meter.phase("build"):
                    pipeline = recipe.build_model(config, groups)
                gc.collect()  # what only the collector frees is not held
                held = meter.current_bytes
                with meter.phase("engine"):
                    engine = initialize(model=pipeline, config=config)[0]
                for step in range(2):
                    at = [2 * groups.mesh.dp * step + 2 * groups.dp_rank + k for k in range(2)]
                    losses.append(float(engine.train_batch(random_tokens(config, 0, n) for n in at)))
                    losses.append(engine.get_global_grad_norm())
            results.append((losses, held, meter.peak_bytes, meter.current_bytes))
    return found


@pytest.mark.parametrize("name", often(LAYOUTS, 3))
def test_a_rank_never_holds_more_than_one_whole_layer(name: str, tmp_path: Path) -> None:
    """Counted on real ranks, fresh weights and a Hugging Face folder's: as the estimate says."""
    family, sets = LAYOUTS[name]
    folder = save_model(family, tmp_path / "model")
    run = resolve(CONFIG, world_size=4, overrides=[f"dsx.model.path={folder}", *sets])
    job = job_of(run, device="cpu")
    for rank, found in enumerate(ranks.run(_trained, 4, folder, sets)):
        pp_rank = job.layout.mesh.coords(rank)["pp"]
        specs = job.layout.params_of(pp_rank)
        sizes = [prod(spec.local_shape(job.layout.mesh.at())) for spec in specs]
        layers = Counter()
        for spec, size in zip(specs, sizes, strict=True):
            layers[spec.layer] += size * job.states.width
        build, whole_bytes = estimate(job, rank).phases[0].peak_bytes, sum(layers.values())
        for (losses, all_held, _, _), (again, held, peaks, steady) in found.values():
            assert again == losses
            assert whole_bytes <= all_held
            assert held < 1.1 * whole_bytes / job.layout.mesh.dp
            assert build <= peaks["build"] <= build + FILLING_BYTES * max(sizes)
            assert max(peaks["build"], peaks["engine"]) <= steady + max(layers.values())


def test_70b_on_64_gpus_without_a_pipeline() -> None:
    """Whole it takes 131 GiB. Build and engine stay below what is held between steps and one layer."""
    sets = ["zero_optimization.stage=3", "dsx.recompute=full"]
    config = complete({}, "llama-3-70b", overrides=sets).content
    found = estimate(job_of(resolve(config, world_size=64)), 0)
    build, engine, *_ = (phase.peak_bytes for phase in found.phases)
    embedding_bytes = 2 * 128256 * 8192  # the largest layer
    parts_bytes = 2 * 70_553_706_496 / 64
    assert parts_bytes + embedding_bytes < 1.001 * build < 1.01 * (parts_bytes + embedding_bytes)
    assert max(build, engine) <= found.steady_bytes + embedding_bytes


def _mistaken(rank: int, world_size: int) -> list[str]:
    """What is done to partitioned layers, and configs that are not those of the build."""
    import dsx

    case = Case(zero=3)
    config, texts = toy.config(case), []

    def module() -> Any:
        return dsx.PipelineModule(toy.layers("plain"), num_stages=1, loss_fn=toy.loss_fn, config=config)

    for other in (Case(zero=1), Case(zero=3, bf16=True), Case(zero=3, zero_keys=OFFLOADED)):
        with pytest.raises(ConfigError) as caught:
            dsx.initialize(model=module(), config=toy.config(other))
        texts.append(str(caught.value))
    net = module()
    weight = net.chunks.get_parameter("0.linear.weight")
    assert weight.shape == (toy.WIDTH, toy.WIDTH)
    assert weight.isnan().all()
    with pytest.raises(RuntimeError, match="written-to"), torch.no_grad():
        weight.copy_(torch.zeros(toy.WIDTH, toy.WIDTH))
    torch.nn.init.zeros_(weight)
    with pytest.raises(ModelError) as refused:
        dsx.initialize(model=net, config=config)
    texts.append(str(refused.value))
    return texts


def test_what_would_be_lost_in_silence_is_refused() -> None:
    words = [
        "ZeRO stage = 1",
        "precision = bf16",
        "offload_param.device = cpu",
        "parameter 0.linear.weight",
    ]
    for texts in ranks.run(_mistaken, 2):
        for text, word in zip(texts, words, strict=True):
            assert word in text


def test_without_the_config_a_warning_says_what_to_do() -> None:
    for rank, texts in enumerate(ranks.run(_warned, 2)):
        assert len(texts) == (rank == 0)
        assert all("config=" in text for text in texts)


def _warned(rank: int, world_size: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        toy.engine(Case(zero=3))
    return [str(warning.message) for warning in caught if "ZeRO-3" in str(warning.message)]


def _tie_that_loads(rank: int, world_size: int) -> tuple[list[int], list[float]]:
    """Weights given to each built layer by its index; a tied one comes once."""
    import dsx

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    seen = []

    def load(index: int, layer: nn.Module) -> None:
        seen.append(index)
        for parameter in layer.parameters():
            nn.init.constant_(parameter, index + rank)

    net = dsx.PipelineModule(
        toy.layers("tied"),
        num_stages=2,
        loss_fn=toy.loss_fn,
        partition_method="uniform",
        config=toy.config(Case(zero=3)),
        load_layer=load,
    )
    engine = dsx.initialize(model=net, config=toy.config(Case(zero=3)))[0]
    values = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            (value,) = set(parameter.flatten().tolist())
            values.append(value)
    return seen, values


def test_layers_are_loaded_as_they_are_built() -> None:
    """Rank 0's values of a data-parallel group count, and the first stage's of a tie."""
    results = ranks.run(_tie_that_loads, 4)
    assert [seen for seen, _ in results] == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    for rank, (_, values) in enumerate(results):
        layers = (0, 1, 2) if rank < 2 else (0, 5, 6)
        assert values == [float(value) for value in layers for _ in range(2)]
