"""What is trained, and one way to train it."""

from __future__ import annotations

from dataclasses import dataclass

from dsx.plan.flops import flops_per_token
from dsx.plan.planner.layer_times import Machine
from dsx.plan.program import Program
from dsx.spec.mesh import Mesh
from dsx.spec.model import ModelSpec, Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, on what.

    Attributes:
        model: The architecture.
        machine: Hardware and software.
        global_batch: Sequences per step, over all GPUs.
        sequence_length: Tokens.
        vocab_multiple: To which each rank's vocabulary rows are padded.
    """

    model: ModelSpec
    machine: Machine
    global_batch: int
    sequence_length: int
    vocab_multiple: int = 64

    @property
    def width(self) -> int:
        """Bytes of a parameter."""
        return 2 if self.machine.precision == "bf16" else 4

    @property
    def flops(self) -> float:
        """Of a step, by the convention of MFU."""
        tokens = self.global_batch * self.sequence_length
        return tokens * flops_per_token(self.model, self.sequence_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to train it.

    Attributes:
        tensor: Tensor-parallel degree.
        pipeline: Pipeline degree.
        data: Data-parallel degree.
        schedule: Of the pipeline.
        chunks: Virtual stages per pipeline rank.
        micro_batch: Sequences per micro-batch.
        recompute: What backward computes again.
        sequence_parallel: Whether activations are cut along the sequence.
        zero_stage: 0 to 3.
        reduces_micro_batches: ZeRO-2: gradients are reduced after every backward (``dsx.zero.reduce``).
        bounds: Layers of the virtual stages; None: the cut whose longest stage is the shortest.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    zero_stage: int = 1
    reduces_micro_batches: bool = False
    bounds: tuple[int, ...] | None = None

    @property
    def gpus(self) -> int:
        """How many it takes."""
        return self.tensor * self.pipeline * self.data

    @property
    def mesh(self) -> Mesh:
        """Its mesh."""
        return Mesh.of(pp=self.pipeline, dp=self.data, tp=self.tensor)

    @property
    def program(self) -> Program:
        """Its schedule."""
        return Program(name=self.schedule)

    def micro_batches(self, global_batch: int) -> int:
        """Per step and data-parallel rank."""
        return global_batch // (self.data * self.micro_batch)

    @property
    def label(self) -> str:
        """In words."""
        parts = [f"tensor {self.tensor}", f"pipeline {self.pipeline}", f"data {self.data}"]
        if self.pipeline > 1:
            parts.append(self.schedule + (f" x {self.chunks}" if self.chunks > 1 else ""))
        parts.append(f"micro-batch {self.micro_batch}")
        each = " reducing each micro-batch" if self.reduces_micro_batches else ""
        parts.append(f"ZeRO-{self.zero_stage}{each}")
        if self.recompute != "none":
            parts.append(f"recompute {self.recompute}")
        if self.tensor > 1 and not self.sequence_parallel:
            parts.append("no sequence parallelism")
        return ", ".join(parts)
