"""What a GPU day measures, in the order of what matters most, and the same at sizes of no meaning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gpu_sections.engines import STOCK, llama
from gpu_sections.worker import Case, Json

FUSED_ADAM = "DeepSpeed's FusedAdam, built"
"""What every run has to do again, because the build stays on the machine."""

EXCHANGES = "ranks exchange tensors of the device"
"""Whether the other cases of several ranks can use the backend."""

TINY = llama(64, 2, 4, vocab_size=256, intermediate_size=96)

# Shapes of Llama-3.2-1B, Llama-3.2-3B and Meta-Llama-3-8B; of the last a slice, which leaves room for AdamW.
ONE_B = llama(2048, 16, 32, num_key_value_heads=8, intermediate_size=8192, tie_word_embeddings=True)
THREE_B = llama(3072, 28, 24, num_key_value_heads=8, intermediate_size=8192, tie_word_embeddings=True)
EIGHT_B_SLICE = llama(4096, 10, 32, num_key_value_heads=8, intermediate_size=14336)

EXPERTS: Json = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "head_dim": 128,
    "intermediate_size": 6144, "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 4,
    "vocab_size": 151_936, "max_position_embeddings": 40_960, "rope_theta": 1e6, "num_experts": 64,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
"""Blocks of Qwen3-30B-A3B with half of their experts, six of 48, which leaves room for AdamW."""

# Routers and their correction biases are kept in fp32 by this family.
ROUTERS_IN_FP32: Json = {
    "model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 4096, "max_position_embeddings": 1024, "moe_intermediate_size": 256, "moe_num_experts": 8,
    "moe_k": 2, "moe_layer_start_index": 1,
}  # fmt: skip

# github.com/KempnerInstitute/KempnerForge, its table of one H200.
PUBLISHED = {
    "tokens_per_second": 10_471,
    "mfu": 0.578,
    "of": "KempnerForge, 7B, bf16, full recompute, sequence 4096, one H200",
}


def all_cases(*, dry: bool) -> list[Case]:
    """Every case, in order."""
    parts = (_machine, _correctness, _ranks, _precision, _memory, _speed, _kernels)
    return [case for part in parts for case in part(dry)]


def _case(section: str, name: str, call: str, arguments: Json | None = None, **others: Any) -> Case:
    return Case(section=section, name=name, call=f"gpu_sections.{call}", arguments=arguments or {}, **others)


def _machine(dry: bool) -> Iterator[Case]:
    yield _case("machine", "facts", "machine:facts")
    size, num_bytes = (64, 1 << 16) if dry else (8192, 1 << 31)
    for dtype in ("fp32",) if dry else ("bf16", "fp16", "tf32", "fp32"):
        yield _case("machine", f"product, {dtype}", "machine:products", {"size": size, "dtype": dtype})
    for way in ("device", "to host", "to device"):
        yield _case("machine", f"copy, {way}", "machine:copies", {"num_bytes": num_bytes, "way": way})
    yield _case("machine", "small kernels", "machine:launches", {"count": 20 if dry else 2000})
    model, length = (TINY, 16) if dry else (EIGHT_B_SLICE, 4096)
    block = {"model": model, "length": length, "precision": "fp32" if dry else "bf16"}
    yield _case("machine", "a block against the planner", "machine:constants", block)


def _parity(section: str, family: str, layout: Json, implementation: str, ranks: int) -> Case:
    words = ", ".join(f"{key} {value}" for key, value in layout.items())
    arguments = {"family": family, "layout": layout, "implementation": implementation}
    name = f"{family} ({implementation}), {words}"
    return _case(section, name, "correct:parities", arguments, ranks=ranks)


def _correctness(dry: bool) -> Iterator[Case]:
    for zero in (1, 3) if dry else (0, 1, 2, 3):
        yield _parity("correctness", "llama", {"zero": zero}, "dsx", 1)
    if dry:
        return
    yield _parity("correctness", "qwen3", {"zero": 1, "recompute": "offload"}, "transformers", 1)
    yield _parity("correctness", "llama", {"zero": 3, "recompute": "offload"}, "dsx", 1)
    for family, implementation, zero in (
        ("gpt2", "transformers", 1), ("gemma2", "transformers", 3), ("gpt_neox", "transformers", 2),
        ("qwen3", "dsx", 3), ("qwen3", "transformers", 3), ("mixtral", "transformers", 1),
        ("olmo2", "transformers", 2),
    ):  # fmt: skip
        yield _parity("correctness", family, {"zero": zero}, implementation, 1)
    yield _case(
        "correctness", "recipes/gpt_3d.py, saved and resumed", "correct:recipe", {"steps": 6}, seconds=180
    )


def _ranks(dry: bool) -> Iterator[Case]:
    yield _case("ranks", EXCHANGES, "correct:exchanges", ranks=2, seconds=60)
    layouts: list[tuple[str, Json, str]] = [("llama", {"dp": 2, "zero": 3}, "dsx")]
    if not dry:
        layouts += [
            ("llama", {"cp": 2, "zero": 1, "context_method": "ring"}, "dsx"),
            ("qwen3", {"cp": 2, "zero": 3, "context_method": "ring", "recompute": "offload"}, "transformers"),
            ("llama", {"cp": 2, "zero": 1, "context_method": "ulysses"}, "dsx"),
            ("llama", {"cp": 2, "zero": 3, "context_method": "all_gather"}, "transformers"),
            ("qwen3_next", {"cp": 2, "zero": 3}, "transformers"),
            ("qwen3_moe", {"dp": 2, "ep": 2, "zero": 1}, "transformers"),
            ("mixtral", {"dp": 2, "ep": 2, "zero": 3}, "transformers"),
            ("llama", {"dp": 2, "zero": 1}, "dsx"),
            ("llama", {"dp": 2, "zero": 2}, "dsx"),
            ("llama", {"tp": 2, "zero": 1}, "dsx"),
            ("llama", {"tp": 2, "zero": 1, "sequence_parallel": True}, "transformers"),
            ("llama", {"pp": 2, "chunks": 2, "zero": 2, "schedule": "interleaved"}, "dsx"),
            ("llama", {"pp": 2, "zero": 1, "schedule": "zb_h1"}, "dsx"),
            ("llama", {"pp": 2, "chunks": 2, "zero": 3, "schedule": "zbv"}, "dsx"),
            ("mixtral", {"pp": 2, "dp": 2, "ep": 2, "zero": 2}, "transformers"),
            # Rows of experts travel behind weight gradients.
            ("qwen3_moe", {"pp": 2, "dp": 2, "ep": 2, "zero": 2, "schedule": "zb_h1"}, "transformers"),
            ("llama", {"tp": 2, "pp": 2, "zero": 3}, "dsx"),
        ]
    for family, layout, implementation in layouts:
        size = math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
        yield _parity("ranks", family, layout, implementation, size)
    shape = {"batch": 1, "heads": 4, "groups": 2, "length": 64, "dim": 16}
    if not dry:
        shape = {"batch": 1, "heads": 16, "groups": 4, "length": 4096, "dim": 128}
    dtype = "fp32" if dry else "bf16"
    yield _case("ranks", f"ring of {dtype}", "correct:ring", {"shape": shape, "dtype": dtype}, ranks=2)


def _precision(dry: bool) -> Iterator[Case]:
    model = TINY if dry else llama(512, 8, 8, vocab_size=4096)
    models: list[tuple[str, Json, str, tuple[int, ...]]] = [("", model, "dsx", (1,) if dry else (1, 2, 3))]
    if not dry:
        models.append((", routers in fp32", ROUTERS_IN_FP32, "transformers", (1, 3)))
    for name, config, implementation, stages in models:
        for precision in ("bf16", "fp16"):
            for zero in stages:
                arguments = {
                    "precision": precision, "zero": zero, "model": config, "implementation": implementation,
                    "length": 16 if dry else 256, "steps": 8 if dry else 16,
                    "half": {"initial_scale_power": 22, "loss_scale_window": 4, "hysteresis": 1},
                }  # fmt: skip
                yield _case(
                    "precision", f"{precision}, ZeRO-{zero}{name}", "correct:low_precision", arguments
                )


def _memory(dry: bool) -> Iterator[Case]:
    if dry:
        tiny = {"model": TINY, "length": 32, "micro_batch": 2, "precision": "fp32"}
        yield _case("memory", "ZeRO-1", "measured:memory", {"config": {**tiny, "zero": 1}, "peer": True})
        return
    model = llama(1024, 12, 16, vocab_size=32_000)
    base: Json = {"model": model, "length": 2048, "micro_batch": 4, "accumulation": 2}
    grid: list[tuple[str, Json, bool]] = [
        *((f"ZeRO-{zero}", {"zero": zero}, zero > 0) for zero in range(4)),
        ("ZeRO-1, fp32", {"zero": 1, "precision": "fp32"}, False),
        ("ZeRO-1, full recompute", {"zero": 1, "recompute": "full"}, True),
        ("ZeRO-3, full recompute", {"zero": 3, "recompute": "full"}, True),
        ("ZeRO-1, selective recompute", {"zero": 1, "recompute": "selective"}, False),
        ("ZeRO-2, optimizer offloaded", {"zero": 2, "offload": True}, False),
        ("ZeRO-3, transformers' modules", {"zero": 3, "implementation": "transformers"}, False),
        *(
            (f"ZeRO-1, LoRA over {kind}", {"zero": 1, "adapter": {"rank": 8, "quantization": kind}}, False)
            for kind in ("int8", "nf4", "nf4_double")
        ),
        ("ZeRO-1, vocabulary 128k", {"zero": 1, "model": llama(1024, 4, 16)}, True),
        ("ZeRO-2, one long sequence", {"zero": 2, "length": 16_384, "micro_batch": 1}, False),
        *(
            (
                f"ZeRO-1, 32k tokens, recompute {recompute}",
                {"zero": 1, "length": 32_768, "micro_batch": 1, "recompute": recompute},
                False,
            )
            for recompute in ("full", "offload")
        ),
    ]
    for name, changes, peer in grid:
        yield _case("memory", name, "measured:memory", {"config": {**base, **changes}, "peer": peer})


def _speed(dry: bool) -> Iterator[Case]:
    yield _case("speed", FUSED_ADAM, "machine:fused_adam", seconds=240)
    slice_of_8b = {"model": EIGHT_B_SLICE, "micro_batch": 1, "accumulation": 4}
    whole = ("dsx", STOCK, "dsx, compiled", f"{STOCK}, compiled", "dsx, transformers' modules")
    moe = {**slice_of_8b, "model": EXPERTS, "length": 4096, "implementation": "transformers"}
    models: list[tuple[str, Json, tuple[str, ...], Json | None]] = [
        # As much as has room in transformers' model, which holds the logits in fp32.
        ("1B", {"model": ONE_B, "length": 4096, "micro_batch": 2, "accumulation": 4}, whole, None),
        ("experts, 6 blocks", moe, (whole[4], STOCK), None),
        (
            "8B, 10 blocks, full recompute",
            {**slice_of_8b, "length": 4096, "recompute": "full"},
            whole[:2],
            PUBLISHED,
        ),
        *(
            (
                f"8B, 10 blocks, 32k tokens, recompute {recompute}",
                {**slice_of_8b, "length": 32_768, "accumulation": 2, "recompute": recompute},
                whole[:1],
                None,
            )
            for recompute in ("full", "offload")
        ),
        ("3B", {"model": THREE_B, "length": 4096, "micro_batch": 2, "accumulation": 4}, whole[:2], None),
        ("8B, 10 blocks", {**slice_of_8b, "length": 8192}, whole[:2], None),
    ]
    if dry:
        tiny = {"model": TINY, "length": 16, "micro_batch": 1, "accumulation": 2, "precision": "fp32"}
        models = [("tiny", tiny, whole, None)]
    steps = {"warm_up": 1, "steps": 2} if dry else {"warm_up": 2, "steps": 5}
    for name, config, engines, published in models:
        for engine in engines:
            changes: Json = {"compiles": True} if engine.endswith("compiled") else {}
            if engine.endswith("modules"):
                changes["implementation"] = "transformers"
            arguments = {"config": {**config, **changes}, "engine": engine, "publishes": published, **steps}
            yield _case("speed", f"{name}: {engine}", "measured:speed", arguments, seconds=150)


def _kernels(dry: bool) -> Iterator[Case]:
    shapes = [{"batch": 1, "heads": 4, "groups": 2, "length": 32, "dim": 16}]
    if not dry:
        shapes = [
            {"batch": batch, "heads": 32, "groups": 8, "length": length, "dim": 128}
            for batch, length in ((4, 2048), (2, 4096), (1, 8192))
        ]
    backends = ("default", "FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    for shape in shapes:
        for backend in backends[:2] if dry else backends:
            arguments = {"shape": shape, "backend": backend}
            name = f"attention of {shape['length']} tokens, {backend}"
            yield _case("kernels", name, "measured:attention", arguments, seconds=40)
    parameters = 20_000 if dry else 400_000_000
    for tensors in (1,) if dry else (1, 400):
        for kind in ("for-loop", "foreach", "fused", "FusedAdam"):
            arguments = {"kind": kind, "parameters": parameters, "tensors": tensors}
            yield _case("kernels", f"AdamW, {kind}, {tensors} tensors", "measured:optimizer", arguments)
    sizes = {"tokens": 64, "vocabulary": 512} if dry else {"tokens": 8192, "vocabulary": 128_256}
    for kind in ("dsx", "torch"):
        yield _case("kernels", f"loss, {kind}", "measured:loss", {"kind": kind, **sizes})
