"""Keys that DeepSpeed's documentation page still describes, inside blocks that 0.19.8 refuses as a whole.

For ``--explain`` alone: the doctor reports the block. Read out of docs/_pages/config-json.md of August 2026.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from dsx.doctor.key import Key

# Block -> (first version that refuses it, what took its place, last part of each key -> what it did).
_BLOCKS: Final[Mapping[str, tuple[str, str, Mapping[str, str]]]] = {
    "amp": (
        "0.19.8",
        "bf16",
        {
            "enabled": "switched mixed precision by NVIDIA Apex on",
            "opt_level": "Apex's level of mixed precision, O0 to O3",
        },
    ),
    "elasticity": (
        "0.19.8",
        "train_batch_size",
        {
            "enabled": "switched the computation of batch sizes on",
            "max_train_batch_size": "largest batch that was allowed",
            "micro_batch_sizes": "micro-batches that were allowed",
            "min_gpus": "smallest number of GPUs to plan for",
            "max_gpus": "largest number of GPUs to plan for",
            "min_time": "minutes between two changes of scale",
            "prefer_large_batch": "of several batches, take the one nearest to the largest",
            "version": "version of the computation",
            "ignore_non_elastic_batch_info": "overrule batch keys outside this block",
            "num_gpus_per_node": "GPUs of a machine, for model parallelism",
            "model_parallel_size": "tensor-parallel degree",
        },
    ),
    "curriculum_learning": (
        "0.19.8",
        "data_efficiency.data_sampling.curriculum_learning",
        {
            "enabled": "switched the former curriculum on",
            "curriculum_type": "what difficulty was: the sequence length",
            "min_difficulty": "difficulty at the start",
            "max_difficulty": "difficulty at the end",
            "schedule_type": "how difficulty rose",
            "schedule_config": "numbers of that schedule",
            "schedule_config.total_curriculum_step": "steps until the end of the curriculum",
            "schedule_config.difficulty_step": "difficulties were multiples of it",
            "schedule_config.root_degree": "degree of the root by which difficulty rose",
            "schedule_config.difficulty": "list of difficulties",
            "schedule_config.max_step": "list of the steps that end them",
        },
    ),
    "sparse_attention": (
        "0.19.7",
        "",
        {
            "mode": "pattern: dense, fixed, bigbird, bslongformer or variable",
            "block": "width of a block",
            "different_layout_per_head": "a pattern of its own for each head",
            "num_local_blocks": "blocks of a local window (fixed)",
            "num_global_blocks": "blocks that all attend to (fixed, bigbird)",
            "attention": "unidirectional or bidirectional",
            "horizontal_global_attention": "global blocks attend to all others, too",
            "num_different_global_patterns": "patterns of global blocks over heads (fixed)",
            "num_random_blocks": "random blocks of a row (variable, bigbird)",
            "local_window_blocks": "blocks of each local window (variable)",
            "global_block_indices": "first global blocks (variable, bslongformer)",
            "global_block_end_indices": "ends of ranges of global blocks",
            "num_sliding_window_blocks": "blocks of the sliding window (bigbird, bslongformer)",
        },
    ),
    "compression_training": (
        "0.19.7",
        "",
        {
            "layer_reduction": "trained a student of fewer layers",
            "layer_reduction.enabled": "switched layer reduction on",
            "layer_reduction.keep_number_layer": "layers of the student",
            "layer_reduction.module_name_prefix": "prefix of the layers' names",
            "layer_reduction.teacher_layer": "layers of the teacher that the student starts from",
            "layer_reduction.other_module_name": "other modules that it starts from",
        },
    ),
    "zero_optimization": (
        "",
        "",
        {"grad_hooks": "ZeRO-1: reduce gradients during the backward or after it"},
    ),
}

_SHARED = {
    "enabled": "switched it on",
    "schedule_offset": "step at which it began",
}
_PRUNING = _SHARED | {"method": "l1, topk or, for sparse pruning, snip_momentum"}
# Method of compression -> what all layers shared, and what a group of layers had of its own.
_COMPRESSION: Final = {
    "weight_quantization": (
        _SHARED
        | {
            "quantizer_kernel": "quantize by DeepSpeed's kernel",
            "quantize_groups": "parts of a weight with a scale of their own",
            "quantize_verbose": "print what is done",
            "quantization_type": "symmetric or asymmetric",
            "rounding": "nearest or stochastic",
            "quantize_weight_in_forward": "quantize in the forward and not in the optimizer",
            "fp16_mixed_quantize": "mix the fp16 and the quantized value",
            "fp16_mixed_quantize.enabled": "switched the mixture on",
            "fp16_mixed_quantize.quantize_change_ratio": "share at the start",
        },
        {
            "start_bits": "bits at the start",
            "target_bits": "bits at the end",
            "quantization_period": "steps for each bit less",
        },
    ),
    "activation_quantization": (
        _SHARED | {"quantization_type": "symmetric or asymmetric", "range_calibration": "dynamic or static"},
        {"bits": "bits of an activation"},
    ),
    "sparse_pruning": (
        _PRUNING
        | {
            "schedule_offset_end": "last step of the pruning",
            "schedule_offset_stride": "steps between two prunings",
            "block_pattern": "4x1 or 2:4: what is pruned together",
            "dense_ratio": "share of the weights that stays",
            "excluded_modules": "modules that are not pruned",
        },
        {"dense_ratio": "share of the weights that stays"},
    ),
    "row_pruning": (_PRUNING, {"dense_ratio": "share of the rows that stays"}),
    "head_pruning": (
        _PRUNING | {"num_heads": "heads of a layer"},
        {"dense_ratio": "share of the heads that stays"},
    ),
    "channel_pruning": (_PRUNING, {"dense_ratio": "share of the channels that stays"}),
}

_COMPRESSED = {
    "freeze_step": "steps before communication was compressed",
    "cuda_aware": "the MPI library knew device memory",
    "comm_backend_name": "nccl or mpi",
}
_OPTIMIZERS: Final = {
    "onebitadam": _COMPRESSED,
    "zerooneadam": {
        **{word: _COMPRESSED[word] for word in ("cuda_aware", "comm_backend_name")},
        "var_freeze_step": "last step at which the variance was updated",
        "var_update_scaler": "steps between its updates",
        "local_step_scaler": "steps after which local steps doubled",
        "local_step_clipper": "most local steps",
    },
    "onebitlamb": _COMPRESSED
    | {
        "coeff_beta": "decay of the average of LAMB's coefficient",
        "factor_max": "largest factor on that coefficient",
        "factor_min": "smallest factor on it",
        "factor_threshold": "how much the factor could change in a step",
    },
}


def _compression() -> Iterator[tuple[str, str]]:
    """Path below ``compression_training`` and effect of the keys of each method."""
    for method, (shared, own) in _COMPRESSION.items():
        yield method, "a method of compression, for groups of layers"
        yield f"{method}.shared_parameters", "what all groups shared"
        for word, effect in shared.items():
            yield f"{method}.shared_parameters.{word}", effect
        yield f"{method}.different_groups", "groups of layers, each with a name of the user's"
        yield f"{method}.different_groups.*.params", "what the group had of its own"
        for word, effect in own.items():
            yield f"{method}.different_groups.*.params.{word}", effect
        yield f"{method}.different_groups.*.modules", "names of its layers"
        if "pruning" in method:
            yield f"{method}.different_groups.*.related_modules", "layers that shrink along"


def _rows() -> Iterator[Key]:
    for block, (until, replacement, effects) in _BLOCKS.items():
        inner = [*effects.items(), *(_compression() if block == "compression_training" else ())]
        for word, effect in inner:
            yield _key(f"{block}.{word}", effect, until, replacement=replacement)
    for variant, effects in _OPTIMIZERS.items():
        for word, effect in effects.items():
            yield _key(f"optimizer.params.{word}", effect, "0.19.7", variant=variant)


def _key(path: str, effect: str, until: str, *, variant: str = "", replacement: str = "") -> Key:
    return Key(
        path=path,
        kinds=("any",),
        default=None,
        effect=effect,
        source="docs/_pages/config-json.md",
        variant=variant,
        status="removed",
        until=until,
        replacement=replacement,
    )


DOCUMENTED: Final = tuple(_rows())
