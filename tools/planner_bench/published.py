"""Figures of arXiv:2104.04473 (SC 2021), and its runs as the planner takes them.

Sizes and throughputs are tables 1 and 2 of the paper. Micro-batches and chunks are those of the scripts that
its authors published for it: NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh and run_figure_11.sh to 18.sh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsx.checkpoint.claims import model_of
from dsx.models.spec import Model, Recompute
from dsx.parallel.mesh import Mesh
from dsx.planner.cluster import preset
from dsx.planner.costs import MEGATRON_2021, Efficiency, Network, Software
from dsx.planner.layer_times import Machine
from dsx.planner.layers import model_task
from dsx.planner.layout import Candidate, Task
from dsx.planner.step_time import Predictor, StepTime

SEQUENCE_LENGTH = 2048
VOCABULARY = 51200


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run of the paper.

    Attributes:
        name: Billions of parameters.
        layers: Blocks.
        hidden: Hidden size.
        heads: Attention heads.
        tensor: Tensor-parallel degree.
        pipeline: Pipeline degree.
        gpus: How many A100 80GB.
        batch: Sequences per step.
        micro_batch: Sequences.
        chunks: Virtual stages per rank.
        recompute: What backward computes again.
        zero_stage: 0, or 3 for DeepSpeed's in table 2.
        published: TFLOP/s per GPU; 0 where the paper has a curve only.
        gated: Whether a Llama with as many FLOPs stands in for the GPT, of whose modules dsx computes the
            attention core again.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    micro_batch: int = 1
    chunks: int = 1
    recompute: Recompute = "full"
    zero_stage: int = 0
    published: float = 0.0
    gated: bool = False

    @property
    def layout(self) -> Candidate:
        """As the planner takes it: equal stages, embedding on the first, head on the last."""
        stages = self.pipeline * self.chunks
        each = self.layers // stages
        before = 1 if self.gated else 2  # GPT-2 has learned positions
        inner = [before + each * stage for stage in range(1, stages)]
        return Candidate(
            mesh=Mesh.over(self.gpus, pp=self.pipeline, tp=self.tensor),
            schedule="interleaved" if self.chunks > 1 else "1f1b",
            chunks=self.chunks,
            micro_batch=self.micro_batch,
            recompute=self.recompute,
            sequence_parallel=False,
            zero_stage=self.zero_stage,
            bounds=(0, *inner, before + self.layers + 2),
        )

    @property
    def model(self) -> Model:
        """GPT of its sizes."""
        return model_of(self.hf_config)

    @property
    def hf_config(self) -> dict[str, object]:
        """The same as a Hugging Face config."""
        if self.gated:  # three matrices of 8/3 of the hidden size instead of two of four times
            return {
                "model_type": "llama",
                "num_hidden_layers": self.layers,
                "hidden_size": self.hidden,
                "num_attention_heads": self.heads,
                "intermediate_size": 8 * self.hidden // 3 // self.tensor * self.tensor,
                "max_position_embeddings": SEQUENCE_LENGTH,
                "vocab_size": VOCABULARY,
                "tie_word_embeddings": True,
            }
        return {
            "model_type": "gpt2",
            "n_layer": self.layers,
            "n_embd": self.hidden,
            "n_head": self.heads,
            "n_positions": SEQUENCE_LENGTH,
            "vocab_size": VOCABULARY,
        }

    @property
    def flops(self) -> float:
        """Of a step, as the paper counts them, recomputation included (its section 5.1, equation 3)."""
        s, h, layers = SEQUENCE_LENGTH, self.hidden, self.layers
        ends = VOCABULARY / (16 * layers * h)
        return 96 * self.batch * s * layers * h * h * (1 + s / (6 * h) + ends)

    def software(self) -> Software:
        """What it ran on: without a pipeline, torch's DistributedDataParallel (its scripts' DDP=torch)."""
        return replace(MEGATRON_2021, gradients="backward") if self.pipeline == 1 else MEGATRON_2021

    def task(self, efficiency: Efficiency, software: Software | None = None) -> Task:
        """What the planner predicts."""
        machine = Machine(
            network=Network(preset("A100-80"), efficiency),
            software=software or self.software(),
            precision="bf16",
        )
        return model_task(
            self.model, machine=machine, global_batch=self.batch, sequence_length=SEQUENCE_LENGTH
        )

    def predict(self, efficiency: Efficiency, software: Software | None = None) -> StepTime:
        """The step."""
        return Predictor(self.task(efficiency, software)).predict(self.layout)

    def teraflops(self, step: StepTime) -> float:
        """Per GPU, as the paper counts them."""
        return self.flops / step.seconds / self.gpus / 1e12


def _row(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    tensor: int,
    pipeline: int,
    gpus: int,
    batch: int,
    micro_batch: int,
    chunks: int,
    published: float,
) -> Run:
    return Run(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        tensor=tensor,
        pipeline=pipeline,
        gpus=gpus,
        batch=batch,
        micro_batch=micro_batch,
        chunks=chunks,
        published=published,
    )


ROWS = (
    _row("1.7", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    _row("3.6", 30, 3072, 32, 2, 1, 64, 512, 16, 1, 138),
    _row("7.5", 36, 4096, 32, 4, 1, 128, 512, 16, 1, 142),
    _row("18.4", 40, 6144, 48, 8, 1, 256, 1024, 8, 1, 135),
    _row("39.1", 48, 8192, 64, 8, 2, 512, 1536, 4, 1, 138),
    _row("76.1", 60, 10240, 80, 8, 4, 1024, 1792, 2, 3, 140),
    _row("145.6", 80, 12288, 96, 8, 8, 1536, 2304, 2, 2, 148),
    _row("310.1", 96, 16384, 128, 8, 16, 1920, 2160, 1, 2, 155),
    _row("529.6", 105, 20480, 128, 8, 35, 2520, 2520, 1, 3, 163),
    _row("1008", 128, 25600, 160, 8, 64, 3072, 3072, 1, 1, 163),
)
"""Table 1."""

CALIBRATED_ON = ("1.7", "18.4", "145.6")
"""One row without model parallelism, one with tensor parallelism, one with pipelines."""

_GPT3 = Run(
    name="174.6", layers=96, hidden=12288, heads=96, tensor=8, pipeline=12, gpus=384, batch=1536, chunks=4
)
_530B = Run(
    name="529.6", layers=105, hidden=20480, heads=128, tensor=8, pipeline=35, gpus=560, batch=2240, chunks=3
)


def _zero3(run: Run, gpus: int, batch: int, micro_batch: int, published: float) -> Run:
    return replace(
        run,
        tensor=1,
        pipeline=1,
        chunks=1,
        gpus=gpus,
        batch=batch,
        micro_batch=micro_batch,
        zero_stage=3,
        published=published,
    )


TABLE_2 = (
    _zero3(_GPT3, 384, 1536, 4, 144),
    _zero3(_GPT3, 768, 1536, 2, 88),
    _zero3(_GPT3, 1536, 1536, 1, 44),
    _zero3(_530B, 640, 2560, 4, 138),
    _zero3(_530B, 1120, 2240, 2, 98),
    _zero3(_530B, 2240, 2240, 1, 48),
    replace(_GPT3, gpus=384, published=153.0),
    replace(_GPT3, gpus=768, published=149.0),
    replace(_GPT3, gpus=1536, published=141.0),
    replace(_530B, gpus=560, published=171.0),
    replace(_530B, gpus=1120, published=167.0),
    replace(_530B, gpus=2240, published=159.0),
)
"""Table 2: ZeRO-3 without model parallelism, then tensor and pipeline parallelism (PTD-P).

The chunks of the 174.6B runs are figure 12's (its script), those of the 529.6B runs table 1's.
"""

ZERO3_FITTED_TO = (TABLE_2[0], TABLE_2[2])
"""The rows of table 2 to which ZeRO-3's two constants are fitted: one bound by compute, one by gathers."""

_GATED = replace(_530B, gpus=2240, gated=True)
LATER = (
    (replace(_GATED, recompute="full"), False, 0.421),
    (replace(_GATED, recompute="selective"), True, 0.542),
)
"""530B on 2240 GPUs, arXiv:2205.05198, abstract: (run, sequence parallelism, model FLOPs utilization)."""
