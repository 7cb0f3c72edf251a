"""A config made small, its structure unchanged, for a trial that takes seconds.

What decides how ranks cooperate stays: degrees, chunks, schedule, ZeRO stage, recompute, tied weights,
biases, heads per key/value head, whether layers divide over stages, whether the vocabulary is padded or
odd, how micro-batches relate to the pipeline. Widths, depth, sequence, vocabulary and batch become small.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dsx.config.deepspeed import precision
from dsx.config.resolve import resolve
from dsx.config.run import RunConfig
from dsx.config.schema import NO_TOKENIZER, OWN
from dsx.models.adapters import ALL_LINEAR, names, names_of
from dsx.models.custom_code import without_code
from dsx.models.family import BYTES_VOCABULARY
from dsx.models.params import frozen_names, layer_adapters, layer_kinds
from dsx.models.spec import HubModel, ModelSpec

_TOKENS_PER_RANK = 8
_FEW_MICRO_BATCHES = 3
_CHUNK_TOKENS = 5  # several, and the last one short
_TILES = 3
_RANK = 4
_CAP = 1.0
_CAPS = re.compile(r"soft_?cap(ping)?$|logit_cap$|^swiglu_limit$|^clip_qkv$")
_NUMBERED = re.compile(r"(^|\.)\d+(\.|$)")  # a name of one block's module
_ROUTERS = "output_router_logits"
_BUCKET_ELEMENTS = 20_000
_PERSISTENT_ELEMENTS = 100
_UNTRAINED = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger", "autotuning")
_BUCKETS = (
    "reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "prefetch_bucket_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A config to train a few steps with.

    Attributes:
        content: DeepSpeed's JSON with its ``dsx`` block.
        changes: What differs from the user's config, for people.
        dropout: The same with dropout on; None if the model has none.
    """

    content: dict[str, Any]
    changes: tuple[str, ...]
    dropout: dict[str, Any] | None


def trial(
    config: RunConfig,
    *,
    full: bool = False,
    keep_precision: bool = False,
    on_cpu: bool = True,
) -> Trial:
    """A config for a few steps of training beside one process.

    ``full`` keeps all sizes, and the weights that the model starts from; ``keep_precision`` bf16 or fp16 in
    place of fp32. ``on_cpu``: there is no GPU, so that nothing is compiled for one.
    """
    changes: list[str] = []
    content = _deepspeed(config, changes, keep_precision=keep_precision, on_cpu=on_cpu, full=full)
    block = config.resolved()["dsx"]
    block |= {"profile": None, "outer": None, "proof": "off", "memory_check": "off"}
    block["train"] |= {"resume": "never", "trace_steps": [], "eval_every": 0}
    if config.model.adapter is not None:
        block["adapter"] = _adapter(config, changes, full=full)
    block["tracking"] = {}
    if isinstance(config.model, HubModel):  # what of it is whole at this degree is so in a small model too
        block["parallel"]["tensor_plan"] = dict(config.model.tensor_plan)
    if block["recompute"] == "auto":
        block["recompute"] = "none"
        changes.append("dsx.recompute: auto -> none (there is no profile)")
    changes += _without_pictures(config, block)
    hf_config = dict(config.hf_config)
    if not full:
        hf_config, layers = _sizes(config)
        changes += [
            f"{key}: {config.hf_config.get(key)} -> {value}"
            for key, value in hf_config.items()
            if config.hf_config.get(key) != value
        ]
        block["data"] = _data(config, block["data"])
        changes.append(f"sequence_length: {config.sequence_length} -> {block['data']['sequence_length']}")
        block["partition"] = {"method": layers}
        block["loss"] = {"chunk_tokens": min(config.loss_chunk, _CHUNK_TOKENS)}
        changes += [f"dsx.loss.chunk_tokens: {config.loss_chunk} -> {_CHUNK_TOKENS}"] * bool(
            config.loss_chunk
        )
        block["mlp_tiles"] = min(config.mlp_tiles, _TILES)
        changes += [f"dsx.mlp_tiles: {config.mlp_tiles} -> {_TILES}"] * (config.mlp_tiles > _TILES)
    elif block["partition"]["method"] == "time":
        stages = config.stage_map
        block["partition"] = {"method": [len(stages.layers(s)) for s in range(stages.num_stages)]}
    without, dropout, model = _no_dropout(config), None, config.model
    if without:
        dropping = {**block, "model": _model(config, hf_config, {}, full=full)}
        dropout = copy.deepcopy({**content, "dsx": dropping})
        changes.append("dropout: off for the comparison; its masks are compared apart")
    if isinstance(model, HubModel) and model.balance is not None and config.dsx.data.keeps_apart:
        without = {**without, _ROUTERS: False}
        changes.append(f"{_ROUTERS}: off, because documents by themselves have another loss of routers")
    block["model"] = _model(config, hf_config, without, full=full)
    if config.dsx.train.freeze and not full:
        block["train"]["freeze"] = _freeze({**content, "dsx": block}, config, changes)
    return Trial(content={**content, "dsx": block}, changes=tuple(changes), dropout=dropout)


def _without_pictures(config: RunConfig, block: dict[str, Any]) -> list[str]:
    """Have the ``dsx`` block read none, and train nothing of the tower, and say so."""
    if not config.dsx.data.pictures:
        return []
    block["data"] |= {"pictures": False, "documents": "joined"}
    block["train"]["tower"] = []
    if (adapter := block["adapter"]) is not None:
        text = [spec for spec in config.param_specs if not spec.tower]
        known = {name for spec in text for name in names_of(spec)}
        for key in ("targets", "train_also"):
            if isinstance(held := adapter.get(key), list):
                adapter[key] = [each for each in held if any(names((each,), name) for name in known)]
        if not any(spec.adapts for spec in text):
            block["adapter"] = None
    return ["dsx.data.pictures: off: the language model alone is compared"]


def _data(config: RunConfig, block: Mapping[str, Any]) -> dict[str, Any]:
    """The ``dsx.data`` block, whose text is never read, with a tokenizer that fits the vocabulary."""
    length = {"sequence_length": _sequence_length(config)}
    if config.model.vocab_size >= BYTES_VOCABULARY:
        return {**block, **length, "tokenizer": "bytes"}
    documents = "apart" if config.dsx.data.keeps_apart else "joined"
    return {"source": OWN, "tokenizer": NO_TOKENIZER, "documents": documents, **length}


def _adapter(config: RunConfig, changes: list[str], *, full: bool) -> dict[str, Any]:
    """The ``dsx.adapter`` block: without dropout and, for a small model, of its size and on its layers."""
    adapter, given = config.model.adapter, config.dsx.adapter
    assert adapter is not None
    assert given is not None
    block = given.model_dump(mode="json", exclude_unset=True)
    if adapter.dropout:
        block["dropout"] = 0.0
        changes.append(f"dsx.adapter.dropout: {adapter.dropout:g} -> 0")
    if adapter.quantization != "none":
        block["quantization"] = "none"
        changes.append(
            f"dsx.adapter.quantization: {adapter.quantization} -> none, whose base both sides have"
        )
    if full:
        return block
    if block.pop("path", None) is not None:
        changes.append(f"dsx.adapter.path: off, with the settings of {given.path}")
        block = asdict(adapter) | block
        del block["start"]
    block["rank"] = min(adapter.rank, _RANK)
    changes += [f"dsx.adapter.rank: {adapter.rank} -> {_RANK}"] * (adapter.rank > _RANK)
    if isinstance(adapter.targets, tuple) and not any(map(_NUMBERED.search, adapter.targets)):
        return block
    if adapter.targets != ALL_LINEAR:  # some layers' alone, which a model with fewer may not have
        ends = {end for own in layer_adapters(config.model)[1:] if own is not None for end in own.targets}
        block["targets"] = sorted(ends)
        changes.append("dsx.adapter.targets: " + ", ".join(block["targets"]) + " of every block")
    return block


def _freeze(content: dict[str, Any], config: RunConfig, changes: list[str]) -> list[str]:
    """The patterns of ``dsx.train.freeze`` that the small model has something for, if that leaves a rest."""
    patterns = config.dsx.train.freeze
    whole = copy.deepcopy(content)
    whole["dsx"]["train"]["freeze"] = []
    specs = resolve(whole, world_size=config.mesh.size).param_specs
    kept = [each for each in patterns if any(any(frozen_names(spec, (each,)).values()) for spec in specs)]
    if all(all(frozen_names(spec, kept).values()) for spec in specs if spec.trained):
        kept = []
    gone = [each for each in patterns if each not in kept]
    changes += [f"dsx.train.freeze: without {', '.join(gone)}, which leaves nothing here"] * bool(gone)
    return kept


def _no_dropout(config: RunConfig) -> dict[str, float]:
    """Every key of the config by which something is left out at random, with none."""
    if isinstance(config.model, HubModel):
        from dsx.hub.shrunk import random_keys  # here: as below

        return dict.fromkeys(random_keys(config.hf_config), 0.0)
    return {"attention_dropout": 0.0} if config.model.attention_dropout else {}


def _model(
    config: RunConfig, hf_config: Mapping[str, Any], changed: Mapping[str, Any], *, full: bool
) -> dict[str, Any]:
    """The ``dsx.model`` block: the whole Hugging Face config, or the user's folder with its weights."""
    user = config.dsx.model
    if full and config.weights is not None:
        overrides = {**user.overrides, **changed}
        return {
            "path": user.path,
            "weights": "load",
            "vocab_multiple": user.vocab_multiple,
            "overrides": overrides,
            "implementation": user.implementation,
        }
    made_of = {"config": {**hf_config, **changed}, "vocab_multiple": user.vocab_multiple}
    return made_of | {"implementation": user.implementation}


def _deepspeed(
    config: RunConfig, changes: list[str], *, keep_precision: bool, on_cpu: bool, full: bool
) -> dict[str, Any]:
    """DeepSpeed's part: small buckets and batches, no monitors, no compiled optimizer without a GPU."""
    content = {key: value for key, value in copy.deepcopy(config.deepspeed).items() if key not in _UNTRAINED}
    changes += make_exact(content, on_cpu=on_cpu, keep_precision=keep_precision)
    adam = content["optimizer"]["type"].lower() in ("adam", "adamw")
    zero = content.get("zero_optimization", {})
    if on_cpu and adam and isinstance(zero.get("offload_optimizer"), dict):
        content["zero_force_ds_cpu_optimizer"] = False
    if not full:
        _shrink_zero(zero, config.zero_stage)
        changes += _warm(content)
        m = _micro_batches(config)
        size = min(config.micro_batch_size, 2)
        before = f"{config.micro_batch_size} x {config.accumulation}"
        changes.append(f"micro-batch x accumulation: {before} -> {size} x {m}")
        content.pop("train_batch_size", None)
        content |= {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": m}
    return content


_LOSS_SCALE = 1024
"""Far from fp16's bounds on both sides, for the gradients of a trial's first steps."""


def make_exact(content: dict[str, Any], *, on_cpu: bool, keep_precision: bool) -> list[str]:
    """Change DeepSpeed's keys, in place, so that no rounding hides a mistake and nothing is compiled."""
    changes = []
    low = precision(content)
    if low != "fp32" and not keep_precision:
        for key in ("bf16", "bfloat16", "fp16", "data_types"):
            content.pop(key, None)
        changes.append(f"{low} -> fp32, whose rounding hides no mistake (--precision config keeps {low})")
    elif low == "fp16" and content["fp16"].get("loss_scale") != _LOSS_SCALE:
        content["fp16"]["loss_scale"] = _LOSS_SCALE
        changes.append(f"fp16.loss_scale -> {_LOSS_SCALE}, because a step that overflows shows nothing")
    kind = str(content["optimizer"].get("type", "")).lower()
    if kind == "muon":
        content["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        changes.append("optimizer: AdamW instead of Muon, whose update DeepSpeed writes over the gradients")
    params, adam = content["optimizer"].setdefault("params", {}), kind in ("adam", "adamw")
    if on_cpu and adam and not params.get("torch_adam"):
        params["torch_adam"] = True
        changes.append("optimizer: torch's Adam instead of DeepSpeed's compiled one")
    return changes


def _warm(content: dict[str, Any]) -> list[str]:
    """Begin DeepSpeed's warmups half way, in place: at a rate of 0 no mistake of an update would show."""
    scheduler, most = content.get("scheduler") or {}, content["optimizer"]["params"].get("lr") or 1e-3
    kind, params = str(scheduler.get("type")), scheduler.setdefault("params", {})
    key = "warmup_min_ratio" if kind == "WarmupCosineLR" else "warmup_min_lr"
    most = 1.0 if kind == "WarmupCosineLR" else params.get("warmup_max_lr") or most
    if not kind.startswith("Warmup") or params.get(key) or not isinstance(most, int | float):
        return []
    params[key] = most / 2
    return [f"scheduler.params.{key} -> {most / 2:g}, because a rate of 0 shows nothing"]


_BY_GRADIENT = ("sgd", "adadelta")
"""Ends of the names of optimizers whose step is the smaller, the smaller the clipped gradient is."""


def make_visible(content: dict[str, Any], clipping: float = 0.0) -> list[str]:
    """Give every step a rate that moves weights, in place: at none no mistake of an update would show."""
    params = content["optimizer"]["params"]
    least, most, given = 1e-4, 1e-2, params.get("lr", 1e-3)
    if str(content["optimizer"].get("type", "")).lower().endswith(_BY_GRADIENT):
        least, most = 0.01 / (clipping or 1.0), 1.0
    changes = ["scheduler: off, because a rate near 0 shows nothing"] * bool(content.pop("scheduler", None))
    if isinstance(given, int | float) and not least <= given <= most:
        params["lr"] = max(least, min(given, most))
        changes.append(f"optimizer.params.lr: {given:g} -> {params['lr']:g}, which moves weights visibly")
    return changes


def _shrink_zero(zero: dict[str, Any], stage: int) -> None:
    """Buckets and thresholds in proportion: several buckets, and matrices that are really cut."""
    for key in _BUCKETS:
        if isinstance(zero.get(key), int):
            zero[key] = min(zero[key], _BUCKET_ELEMENTS)
    if stage > 0:
        zero.setdefault("reduce_bucket_size", _BUCKET_ELEMENTS)
    if stage == 3:
        short, key = "param_persistence_threshold", "stage3_param_persistence_threshold"
        key = short if short in zero else key
        zero[key] = min(int(zero.get(key, _PERSISTENT_ELEMENTS)), _PERSISTENT_ELEMENTS)


def _micro_batches(config: RunConfig) -> int:
    """Few micro-batches with the same remainder over the pipeline: m as it is if it is small."""
    pp, m = config.mesh.pp, config.accumulation
    if config.program.rows is not None:
        return m
    if pp == 1:
        return min(m, _FEW_MICRO_BATCHES)
    group = config.dsx.schedule.group_size or 1
    return min(m, max(2 * pp, 2 * group) + m % pp)


def _sequence_length(config: RunConfig) -> int:
    return min(config.sequence_length, _TOKENS_PER_RANK * config.mesh.tp * config.mesh.cp)


def _sizes(config: RunConfig) -> tuple[dict[str, Any], list[int]]:
    """A small config of the model's family, and the layers of every stage."""
    from dsx.hub.model_structure import (  # here: what reads this alone needs no torch
        hf_config_of,
        structure_of,
    )
    from dsx.hub.shrunk import shrunk

    stages, around = _layers_of_stages(config), len(layer_kinds(config.model)) - config.model.num_layers
    small = shrunk(
        without_code(config.hf_config),
        layers=sum(stages) - around,
        tensor=config.mesh.tp * (config.mesh.cp if config.dsx.parallel.method == "ulysses" else 1),
        vocab_size=_vocabulary(config),
        window=max(2, _sequence_length(config) // 2),
        small_too=isinstance(config.model, ModelSpec),
    )
    small |= _caps(hf_config_of(small).to_dict())
    blocks = len(structure_of(json.dumps(small, sort_keys=True)).list_of_blocks)
    if isinstance(config.model, ModelSpec):  # of whose family transformers' modules serve for nothing else
        structure_of.cache_clear()
    stages[stages.index(max(stages))] += around + blocks - sum(stages)
    return small, stages


def _caps(given: Mapping[str, Any]) -> dict[str, Any]:
    """Bounds of logits and activations, so low that they are at work on a small model's small numbers."""
    caps = {key: value for key, value in given.items() if _CAPS.search(key) and type(value) in (int, float)}
    return {key: _CAP for key, value in caps.items() if value > _CAP}


def _layers_of_stages(config: RunConfig) -> list[int]:
    """Layers of every virtual stage: its blocks cut to one, but two where the user's stages are uneven.

    A stage without blocks keeps none, so that what is special about a cut remains.
    """
    kinds, stages = layer_kinds(config.model), config.stage_map
    names = [[kinds[layer] for layer in stages.layers(stage)] for stage in range(stages.num_stages)]
    blocks = [own.count("Block") for own in names]
    most = blocks.index(max(blocks))
    uneven = len(blocks) == 1 or min(blocks) < max(blocks)
    kept = [min(n, 2 if stage == most and uneven else 1) for stage, n in enumerate(blocks)]
    return [len(own) - n + k for own, n, k in zip(names, blocks, kept, strict=True)]


def _vocabulary(config: RunConfig) -> int:
    """A small vocabulary, as odd as the user's, and padded if that is."""
    size = config.model.vocab_size
    rows = config.mesh.tp * config.dsx.model.vocab_multiple
    if size % rows == 0:
        return min(size, -(-BYTES_VOCABULARY // rows) * rows)
    small = BYTES_VOCABULARY + (size - BYTES_VOCABULARY) % 2
    return min(size, small + 2 if small % rows == 0 else small)
