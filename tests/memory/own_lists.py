"""Layer lists that dsx did not write, estimated and traced, for test_layer_list.py."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch
from deepspeed.pipe import LayerSpec
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dsx.memory.layer_list import LayerList

WORDS, WIDTH, LENGTH = 997, 128, 64


class Mixer(nn.Module):
    """Mixes over the sequence, then over the features, with a gate."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.norm, self.over = nn.LayerNorm(width), nn.Linear(length, length)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.register_buffer("bias", torch.zeros(32 * length, width))

    def forward(self, x):
        x = x + self.over(self.norm(x).transpose(1, 2)).transpose(1, 2) + self.bias[: x.shape[1]].to(x)
        return x + self.outer(nn.functional.glu(self.inner(x)))


class Perceptron(nn.Module):
    """Hands a mask on beside the activations: a boundary of two tensors."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, given):
        x, mask = given
        return x + self.dropout(self.second(torch.relu(self.first(x)))) * mask, mask


class Head(nn.Module):
    """From both to the logits."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x):
        return self.words(self.norm(x[0] if isinstance(x, tuple) else x))


class Words(nn.Module):
    """Ids to vectors, with a mask if asked."""

    def __init__(self, words: int, width: int, masks: bool = False) -> None:
        super().__init__()
        self.table, self.masks = nn.Embedding(words, width), masks

    def forward(self, ids):
        x = self.table(ids)
        return (x, x.detach().new_ones(*ids.shape, 1)) if self.masks else x


class Decoder(nn.Module):
    """A Llama layer of transformers, which makes its rotation itself."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.layer, self.rotary = LlamaDecoderLayer(config, index), LlamaRotaryEmbedding(config)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)[None]
        y = self.layer(x, position_ids=places, position_embeddings=self.rotary(x, places))
        return y[0] if isinstance(y, tuple) else y


def loss(logits, labels):
    """Mean cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _list(layers, batch=2):
    ids = torch.zeros(batch, LENGTH, dtype=torch.int64)
    return LayerList(layers=layers, inputs=ids, labels=ids, loss_fn=loss)


def mixers():
    """Plain torch modules."""
    blocks = [LayerSpec(Mixer, WIDTH, LENGTH) for _ in range(6)]
    return _list([LayerSpec(Words, WORDS, WIDTH), *blocks, LayerSpec(Head, WIDTH, WORDS)])


def perceptrons():
    """Tuples between layers, dropout, and a function."""
    blocks = [LayerSpec(Perceptron, WIDTH, 0.1) for _ in range(6)]
    return _list([LayerSpec(Words, WORDS, WIDTH, masks=True), *blocks, LayerSpec(Head, WIDTH, WORDS)])


def encoders():
    """torch's transformer layers."""
    layer = partial(LayerSpec, nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, batch_first=True)
    blocks = [layer(dropout=0.1, norm_first=bool(index % 2)) for index in range(6)]
    return _list([LayerSpec(Words, WORDS, WIDTH), *blocks, LayerSpec(Head, WIDTH, WORDS)])


class Returns(nn.Linear):
    """Leaves its bias to its caller."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight), self.bias


class Reads(nn.Module):
    """Reads the weight of a module that it does not call, gets a parameter of another, and keeps a state."""

    def __init__(self):
        super().__init__()
        self.kept, self.dense = nn.Linear(WIDTH, WIDTH, bias=False), Returns(WIDTH, WIDTH)
        self.state = None

    def forward(self, x):
        y, bias = self.dense(x)
        self.state = y[:, -1, :8].detach() + 1
        return x + torch.tanh(y @ self.kept.weight + bias)


def readers():
    """Layers whose modules use parameters of each other's, as mixers do, or GPT-NeoX Japanese's."""
    blocks = [LayerSpec(Reads) for _ in range(6)]
    return _list([LayerSpec(Words, WORDS, WIDTH), *blocks, LayerSpec(Head, WIDTH, WORDS)])


def llama():
    """transformers' layers."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    blocks = [LayerSpec(Decoder, config, index) for index in range(6)]
    norm = LayerSpec(LlamaRMSNorm, WIDTH)
    return _list([LayerSpec(Words, WORDS, WIDTH), *blocks, norm, LayerSpec(nn.Linear, WIDTH, WORDS)])


def recipe():
    """That of recipes/own_model.py: a tied table, layers of dsx.nn and plain ones."""
    from recipes import own_model

    return own_model.make_layers()


LISTS = {each.__name__: each for each in (mixers, perceptrons, encoders, readers, llama, recipe)}


def traced(make, config, job, rank):
    """What the engine takes for a list; once per process."""
    from dsx.engine.p2p import Signature, TensorMeta
    from dsx.engine.pipeline_module import PipelineModule
    from dsx.schedules.program import Program
    from meta_engine.run import trace_pipeline

    stages = job.layout.stages

    def build(groups):
        program = Program(name=job.schedule.name)
        # Fake parameters cannot be moved there from the host.
        with torch.device("paper"):
            made = make()
            return PipelineModule(
                made.layers, loss_fn=made.loss_fn, groups=groups, stage_map=stages, schedule=program
            )

    def zeros():
        made = make()
        return _zeros(made.inputs), () if made.labels is None else _zeros(made.labels)

    inputs = {}
    for stage in range(1, stages.num_stages):
        forms = job.records.layer(stages.layers(stage)[0], divided=False, hooked=False).inputs
        metas = tuple(
            TensorMeta(form.shape, getattr(torch, form.dtype), requires_grad=form.differentiable)
            for form in forms
        )
        inputs[stage] = Signature(metas, is_tuple=len(forms) > 1)
    return trace_pipeline(build, dict(config), rank, mesh=job.layout.mesh, inputs=inputs, batch=zeros)


def _zeros(given):
    return tuple(map(_zeros, given)) if isinstance(given, tuple) else torch.zeros_like(given, device="cpu")


def both(name, rank, ranks, pipeline, chunks, zero, bf16, schedule, accumulation=4):
    """Estimate and trace of one rank; once per process."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    from dsx.memory.estimate import estimate
    from dsx.memory.layer_list import layers_job

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 100_000},
        "zero_allow_untested_optimizer": True,
        **({"bf16": {"enabled": True}} if bf16 else {}),
    }
    options = {"world_size": ranks, "pipeline": pipeline, "chunks": chunks, "schedule": schedule}
    job = layers_job(LISTS[name], config, **options)
    found = estimate(job, rank)
    peaks = traced(LISTS[name], config, job, rank)
    ours = {phase.name: phase.peak_bytes for phase in found.phases}
    return {
        "estimate": {**ours, "steady": found.steady_bytes},
        "trace": {**peaks.phases, "steady": peaks.steady_bytes},
    }
