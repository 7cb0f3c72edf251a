"""The search that a plan's inputs ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsx.config.memory_job import job_of
from dsx.config.plan_inputs import PlanInputs
from dsx.config.plan_output import LayoutMemory
from dsx.config.problems import either
from dsx.errors import ConfigError
from dsx.plan.cluster import Cluster
from dsx.plan.planner.collectives import Network
from dsx.plan.planner.efficiency import Efficiency, Software
from dsx.plan.planner.layer_times import Machine
from dsx.plan.planner.layout import Task
from dsx.plan.planner.search import Search
from dsx.plan.planner.space import Space, meshes, variants

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What a user has already decided; None is open.

    Attributes:
        tensor: Tensor-parallel degree.
        pipeline: Pipeline degree.
        zero: ZeRO stage.
        micro_batch: Sequences.
        gpu_memory: GiB of a GPU that tensors may take.
    """

    tensor: int | None = None
    pipeline: int | None = None
    zero: int | None = None
    micro_batch: int | None = None
    gpu_memory: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What to plan with.

    Attributes:
        cluster: The cluster, with its rates.
        efficiency: Shares of them that are reached.
        text: What was measured, in words; empty if nothing was.
    """

    cluster: Cluster
    efficiency: Efficiency
    text: str = ""


def plan_search(inputs: PlanInputs, fixed: Fixed, measured: Calibration | None = None) -> Search:
    """A search, ready to run.

    Args:
        inputs: What is trained, and on what.
        fixed: What is not to be chosen.
        measured: What takes the place of the cluster's usual rates.

    Raises:
        ConfigError: A fixed value that cannot be.
        LayoutError: A fixed degree that the model or the number of GPUs does not allow.
    """
    _check(inputs, fixed)
    used = measured or Calibration(cluster=inputs.cluster, efficiency=Efficiency.of(inputs.cluster))
    cluster = used.cluster
    task = Task(
        model=inputs.run.model,
        machine=Machine(
            network=Network(cluster, used.efficiency),
            software=Software(),
            precision=inputs.run.precision,
        ),
        global_batch=inputs.global_batch,
        sequence_length=inputs.sequence_length,
        vocab_multiple=inputs.run.dsx.model.vocab_multiple,
    )
    cluster.peak(inputs.run.precision)
    space = _space(inputs, fixed)
    _check_space(task, space, fixed)
    job_of(inputs.run, device="cpu" if cluster.is_host else "cuda")  # Refuses what no layout could mend.
    search = Search(
        task=task,
        space=space,
        memory=lambda _: 0,
        cap_bytes=None if fixed.gpu_memory is None else int(fixed.gpu_memory * _GIB),
        update_bytes=_update_bytes(inputs),
    )
    memory = LayoutMemory(inputs, search.predictor, cluster.is_host, search.cap)
    return replace(search, memory=memory)


def _check(inputs: PlanInputs, fixed: Fixed) -> None:
    for name, value in (("--tensor", fixed.tensor), ("--pipeline", fixed.pipeline)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}", "not a degree", "use 1 or more")
    if fixed.zero is not None and not 0 <= fixed.zero <= 3:
        raise ConfigError(f"--zero {fixed.zero}", "ZeRO has stages 0 to 3", "use 0, 1, 2 or 3")
    if fixed.zero is not None and fixed.zero < inputs.lowest_zero_stage:
        raise ConfigError(
            f"--zero {fixed.zero}",
            f"what the config offloads needs stage {inputs.lowest_zero_stage} or more",
            "use that, or remove zero_optimization.offload_optimizer and offload_param",
        )
    micro, batch = fixed.micro_batch, inputs.global_batch
    if micro is not None and (micro < 1 or batch % micro):
        raise ConfigError(
            f"--micro-batch {micro}", f"it does not divide the global batch {batch}", "use a divisor of it"
        )
    if fixed.gpu_memory is not None and not 0 < fixed.gpu_memory < 1e6:
        raise ConfigError(f"--gpu-memory {fixed.gpu_memory:g}", "it is the GiB of one GPU", "use 80, say")


def _check_space(task: Task, space: Space, fixed: Fixed) -> None:
    """Raise unless there is something to search."""
    found = tuple(meshes(task, space))
    if any(True for mesh in found for _ in variants(task, space, mesh)):
        return
    shares = sorted({task.global_batch // mesh.data for mesh in found})
    raise ConfigError(
        f"--micro-batch {fixed.micro_batch}",
        f"it divides no rank's share of the global batch ({either(shares[:6])} sequences)",
        "use a divisor of one of these",
    )


def _space(inputs: PlanInputs, fixed: Fixed) -> Space:
    space = Space(gpus=inputs.gpus, zero_stages=tuple(range(inputs.lowest_zero_stage, 4)))
    if fixed.zero is not None:
        space = replace(space, zero_stages=(fixed.zero,))
    return replace(
        space,
        tensor=None if fixed.tensor is None else (fixed.tensor,),
        pipeline=None if fixed.pipeline is None else (fixed.pipeline,),
        micro_batches=None if fixed.micro_batch is None else (fixed.micro_batch,),
    )


def _update_bytes(inputs: PlanInputs) -> int:
    """What an optimizer keeps at least on the device for a parameter that it updates."""
    if inputs.offloads:
        return 0
    kind = inputs.run.deepspeed["optimizer"]["type"].lower()
    moments = {"adam": 8, "adamw": 8, "lion": 4}.get(kind, 0)
    return moments + (4 if inputs.run.precision == "bf16" else 0)
