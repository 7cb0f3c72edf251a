"""Chunks of dsx's layers on the paper device or a CPU, and as recorded, for test_memory_layers.py."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dsx.engine.executor import _writable
from dsx.memory.layer_record import Shape
from dsx.memory.ledger import Label, Leaf, Ledger, Storage, dropped
from dsx.memory.meter import StorageMeter
from dsx.memory.record_cache import ModelRecords
from dsx.memory.walk import RecordedChunk, RecordedLayer
from dsx.models import families
from dsx.models.params import layer_kinds, param_specs
from dsx.models.spec import ModelSpec, Rope
from dsx.nn.parallel import TensorParallel
from dsx.nn.split import WeightGradients
from dsx.parallel.mesh import Mesh
from meta_engine import accelerator as paper

BATCH, LENGTH = 2, 128


# What the families have of their own beside Llama.
_OWN = {
    "llama": {},
    "mistral": {"windows": (48, 0)},
    "qwen2": {"attention_bias": True, "tied_embeddings": True},
    "qwen3": {"qk_norm": True},
}


def model(family, dropout):
    """Two blocks; a vocabulary that needs padding and several chunks of logits."""
    spec = ModelSpec(
        family=family,
        num_layers=2,
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        ffn_size=384,
        vocab_size=50001,
        max_positions=256,
        norm_epsilon=1e-5,
        norm="rmsnorm",
        activation="silu",
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        tied_embeddings=False,
        rope=Rope(),
        attention_dropout=dropout,
    )
    return replace(spec, **_OWN.get(family, {}))


def modules(spec, device, tp, width, recompute, split, layers):
    """The layers as functions, tied ones with the first one's table."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[width]
    built, tied = [], None
    everything = families.layers(spec, tp, dtype=dtype, device=device, recompute=recompute, split=split)
    for index in layers:
        layer = everything[index]
        shared = hasattr(layer, "key")
        if shared and tied is None:
            tied = layer.build()
        module = tied if shared else layer.build()
        use = getattr(layer, "forward_fn", None)
        built.append(module if use is None else lambda x, module=module, use=use: use(module, x))
    return built


def by_torch(spec, device, tp, sequence, width, recompute, divided, layers):
    """Live bytes, and the highest, at every stage of two forwards and backwards."""
    ranks = TensorParallel(
        size=tp, rank=0, group=dist.group.WORLD if tp > 1 else None, sequence_parallel=sequence
    )
    meter, split, found = StorageMeter(device), WeightGradients() if divided else None, {}
    with paper.engine_without_storage(), mock.patch("dsx.nn.parameters.fill"), meter:
        chain = modules(spec, device, ranks, width, recompute, split, layers)
        loss = families.loss(spec, ranks, overwrite_logits=True)
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device=device)
        inputs = ids
        if layers[0]:
            length = LENGTH // tp if sequence else LENGTH
            dtype = {2: torch.bfloat16, 4: torch.float32}[width]
            inputs = torch.zeros(BATCH, length, spec.hidden_size, dtype=dtype, device=device)
            inputs.requires_grad_()
        for module in chain:
            # What blocks share is made before, as the estimate counts it once.
            attention, dtype = (
                getattr(module, "attention", None),
                {2: torch.bfloat16, 4: torch.float32}[width],
            )
            if attention is not None:
                attention.rotary.tables(LENGTH, dtype, ids.device)
                attention.mask(LENGTH, dtype, ids.device)
        before = meter.current_bytes

        def forward():
            x = _writable(inputs)  # as the engine hands them on
            for module in chain:
                x = module(x)
            return loss(x, ids) if layers[-1] == len(layer_kinds(spec)) - 1 else x

        for turn in range(2):
            inputs.grad = None
            with meter.phase(f"forward {turn}"):
                y = forward()
            seed = torch.zeros_like(y)
            with meter.phase(f"backward {turn}"), contextlib.ExitStack() as stack:
                if divided:
                    stack.enter_context(split.deferring((0, 0)))
                y.backward(seed)
                del y, seed
            if divided:
                with meter.phase(f"weights {turn}"), split.delivering((0, 0)) as token:
                    token.backward()
                    del token
            found[f"left {turn}"] = meter.current_bytes - before
    return found | {name: peak - before for name, peak in meter.peak_bytes.items() if name}


def by_record(spec, device, tp, sequence, width, recompute, divided, layers):
    """The same by the layers' records."""
    ledger, found = Ledger(), {}
    records = ModelRecords(
        Shape(
            model=spec,
            tensor=tp,
            sequence_parallel=sequence,
            micro_batch=BATCH,
            sequence_length=LENGTH,
            width=width,
            recompute=recompute,
            device="cpu" if device == "cpu" else "cuda",
        )
    )
    weights = {p.name: Leaf(p.name, p.local_shape(Mesh.of(tp=tp).at()), width) for p in param_specs(spec)}
    last = layers[-1] == len(layer_kinds(spec)) - 1

    def new(size):
        return Storage(ledger, Label("activations", "given", "", ""), size).hold()

    def chunk():
        made = []
        for index in layers:
            record = records.layer(index, divided=divided, hooked=False)
            leaves = {p.name: weights[records.parameter(index, p.name)] for p in record.parameters}
            made.append(RecordedLayer(ledger, record, leaves, None))
        if last:
            made.append(RecordedLayer(ledger, records.loss(), {}, None))
        return RecordedChunk(ledger, made, None, saves=False)

    gradients = []
    for turn in range(2):
        dropped(gradients)
        ledger.start()
        given, labels = [new(0)], [new(0)]
        run = chunk()
        y = run.forward(given, labels)
        found[f"forward {turn}"] = ledger.peak_bytes
        seed = [new(storage.size_bytes) for storage in y]
        ledger.start()
        gradients = run.backward(seed, first=not layers[0], divided=divided)
        for message in (y, seed, given, labels):
            dropped(message)
        found[f"backward {turn}"] = ledger.peak_bytes
        if divided:
            ledger.start()
            run.weights()
            found[f"weights {turn}"] = ledger.peak_bytes
        found[f"left {turn}"] = ledger.current_bytes
    return found


def both(cases):
    """Of each case torch's and the records' bytes at every stage."""
    paper.install()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    found = []
    for device, family, dropout, *rest in cases:
        spec = model(family, dropout)
        found.append((by_torch(spec, device, *rest), by_record(spec, device, *rest)))
    return found
