"""What a plan starts from: a model, a batch and whatever else a config says, apart from the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.config.batch import ACCUMULATION, MICRO, TRAIN
from dsx.config.load import load, read
from dsx.config.named_model import find_model
from dsx.config.ordinary import complete
from dsx.config.resolve import resolve
from dsx.config.run import RunConfig
from dsx.errors import ConfigError, DsxError
from dsx.plan.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What is to be trained.

    Attributes:
        content: A whole config, but for its layout: DeepSpeed's keys and the ``dsx`` block.
        run: The same, resolved for one rank.
        cluster: What to train on.
        gpus: How many of its GPUs.
        global_batch: Sequences per step.
        sequence_length: Tokens.
    """

    content: dict[str, Any]
    run: RunConfig
    cluster: Cluster
    gpus: int
    global_batch: int
    sequence_length: int

    @property
    def offloads(self) -> bool:
        """Whether the optimizer or parameters live on the host."""
        return self.lowest_zero_stage > 0

    @property
    def lowest_zero_stage(self) -> int:
        """That what is offloaded allows."""
        return _lowest_stage(self.content)


def plan_inputs(
    *,
    model: str | None,
    config: Path | None,
    cluster: Cluster,
    gpus: int,
    global_batch: int | None,
    sequence_length: int | None,
) -> PlanInputs:
    """Read and check everything that a plan needs.

    Args:
        model: Preset (``llama-3-8b``, ``gpt2/tiny``), Hugging Face ``config.json`` or model folder; None for
            that of ``config``.
        config: DeepSpeed JSON whose layout is to be found, without a ``dsx`` block if there is a ``model``;
            None for usual settings.
        cluster: What to train on.
        gpus: How many of its GPUs.
        global_batch: Sequences per step; None for that of ``config``.
        sequence_length: Tokens; None for that of ``config``.

    Raises:
        ConfigError: Something is missing, unknown or cannot be.
        ModelError: A Hugging Face config that dsx cannot build.
    """
    _check_gpus(cluster, gpus)
    for name, size in (("--global-batch", global_batch), ("--sequence-length", sequence_length)):
        if size is not None and size < 1:
            raise ConfigError(f"{name} {size}", "not a size", "use 1 or more")
    written = None if config is None else _written(config, model)
    content = _usual(cluster) if written is None else _without_layout(written)
    block = content["dsx"]
    if model is not None:
        block["model"] = find_model(model)[0]
    elif config is None:
        raise ConfigError("--model", "no model is named", "give --model, or a CONFIG with a dsx.model")
    batch = global_batch or content.get(TRAIN) or _batch_of(written, gpus)
    length = sequence_length or block["data"].get("sequence_length")
    for name, value in (("--global-batch", batch), ("--sequence-length", length)):
        if value is None:
            raise ConfigError(name, "it is needed", f"give {name} N")
    content[TRAIN], block["data"]["sequence_length"] = batch, length
    assert batch is not None
    zero = content.get("zero_optimization", {}) | {"stage": _lowest_stage(content)}
    run = resolve(content | {MICRO: 1, "zero_optimization": zero}, world_size=1)
    return PlanInputs(
        content=content,
        run=run,
        cluster=cluster,
        gpus=gpus,
        global_batch=batch,
        sequence_length=length,
    )


def _lowest_stage(content: Mapping[str, Any]) -> int:
    """ZeRO partitions what is offloaded: the optimizer from stage 1, parameters from stage 3."""
    zero = content.get("zero_optimization", {})
    for key, stage in (("offload_param", 3), ("offload_optimizer", 1)):
        if (zero.get(key) or {}).get("device", "none") != "none":
            return stage
    return 0


def _written(config: Path, model: str | None) -> dict[str, Any]:
    """What the file says; of an ordinary DeepSpeed JSON with ``model`` no batch and no length are assumed."""
    content = read(config)
    if "dsx" in content:
        load(config)  # Strict: unknown keys are named with their file.
        return content
    whole = complete(content, model, where=str(config))
    for key in {each.key for each in whole.assumed} & {MICRO, ACCUMULATION}:
        del whole.content[key]
    block = whole.content["dsx"]
    del block["data"]["sequence_length"]
    block["data"] |= {"source": "python-stdlib"}
    block["train"] |= {"steps": 100, "output": "runs/planned-{layout}"}
    return whole.content


def _batch_of(written: Mapping[str, Any] | None, gpus: int) -> int | None:
    """The global batch of a config that says micro-batch and accumulation, in its own layout."""
    if written is None:
        return None
    try:
        return resolve(written, world_size=gpus).global_batch_size
    except DsxError:
        return None


def _check_gpus(cluster: Cluster, gpus: int) -> None:
    key, node = f"--gpus {gpus}", cluster.gpus_per_node
    if gpus < 1:
        raise ConfigError(key, "not a number of GPUs", "use 1 or more")
    if gpus > node and gpus % node:
        near = gpus // node * node
        raise ConfigError(
            key, f"nodes of {cluster.name} have {node} GPUs each", f"use whole nodes: {near} or {near + node}"
        )
    if cluster.nodes is not None and gpus > cluster.nodes * node:
        most = cluster.nodes * node
        raise ConfigError(key, f"{cluster.name} has {cluster.nodes} nodes of {node}", f"use at most {most}")


def _usual(cluster: Cluster) -> dict[str, Any]:
    """A config for a first run: AdamW, bf16 on GPUs, text that needs no network."""
    parameters: dict[str, Any] = {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
    return {
        "gradient_clipping": 1.0,
        **({} if cluster.is_host else {"bf16": {"enabled": True}}),
        "optimizer": {
            "type": "AdamW",
            "params": parameters | ({"torch_adam": True} if cluster.is_host else {}),
        },
        "dsx": {
            "data": {"source": "python-stdlib", "tokenizer": "bytes"},
            "train": {"steps": 100, "output": "runs/planned-{layout}"},
        },
    }


def _without_layout(content: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what a plan decides."""
    out = {key: value for key, value in content.items() if key not in (MICRO, ACCUMULATION)}
    block = dict(out.get("dsx") or {})
    for key in ("parallel", "schedule", "partition", "profile", "recompute"):
        block.pop(key, None)
    block["data"] = dict(block.get("data") or {})
    out["dsx"] = block
    zero = dict(out.get("zero_optimization") or {})
    zero.pop("stage", None)
    if zero:
        out["zero_optimization"] = zero
    else:
        out.pop("zero_optimization", None)
    return out
