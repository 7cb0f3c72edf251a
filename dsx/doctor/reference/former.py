"""Reference: keys of DeepSpeed 0.9 to 0.19.7 that 0.19.8 refuses or has lost."""

from __future__ import annotations

from dsx.doctor.key import Key, Rows

_top = Rows(
    path="", source="runtime/config.py: _REMOVED_TOP_LEVEL_CONFIG_KEYS", unknown="ignored", types="raw"
)
_zero = Rows(
    path="zero_optimization",
    source="runtime/config.py: _REMOVED_ZERO_CONFIG_KEYS",
    unknown="refused",
    types="coerced",
)
_compile = Rows(
    path="compile",
    source="compile/config.py: CompileConfig",
    unknown="refused",
    types="coerced",
    since="0.13.2",
)


def _removed(rows: Rows, name: str, until: str, effect: str, replacement: str = "", since: str = "") -> Key:
    more = {"since": since} if since else {}
    return rows(name, "any", None, effect, status="removed", until=until, replacement=replacement, **more)


KEYS = (
    _removed(_top, "nebula", "0.19.7", "checkpoints to Azure's Nebula service"),
    _removed(_top, "compression_training", "0.19.7", "quantization and pruning while training"),
    _removed(_top, "quantize_training", "0.19.7", "mixture of quantization"),
    _removed(_top, "sparse_attention", "0.19.7", "block-sparse attention kernels"),
    _removed(_top, "amp", "0.19.8", "mixed precision by NVIDIA Apex", "bf16"),
    _removed(_top, "sparse_gradients", "0.19.8", "reduce embedding gradients as sparse ones"),
    _removed(_top, "eigenvalue", "0.19.8", "eigenvalues of layers, for mixture of quantization"),
    _removed(_top, "elasticity", "0.19.8", "batch sizes that fit many numbers of ranks", "train_batch_size"),
    _removed(_top, "graph_harvesting", "0.19.8", "record the step as a CUDA graph", since="0.12.6"),
    _removed(
        _top,
        "curriculum_learning",
        "0.19.8",
        "shorter sequences first",
        "data_efficiency.data_sampling.curriculum_learning",
    ),
    _removed(_top, "progressive_layer_drop", "0.19.8", "skip layers at random"),
    _removed(
        _zero,
        "mics_shard_size",
        "0.19.7",
        "MiCS: divide over so many ranks only",
        since="0.9.2",
    ),
    _removed(_zero, "mics_hierarchical_params_gather", "0.19.7", "MiCS: gather in two steps", since="0.9.2"),
    _removed(
        _zero,
        "zeropp_loco_param",
        "0.19.8",
        "LoCo: error feedback for quantized gradients",
        "zero_optimization.zero_quantized_gradients",
        "0.16.2",
    ),
    _removed(_compile, "enabled", "0.14.4", "compile the model; call engine.compile() instead"),
    _removed(_compile, "backend", "0.14.4", "backend of torch.compile; pass it to engine.compile()"),
    _removed(_compile, "kwargs", "0.14.4", "arguments of torch.compile; pass them to engine.compile()"),
)
