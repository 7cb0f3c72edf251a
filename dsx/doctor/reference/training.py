"""Reference: recomputation, pipelines, checkpoints, torch.compile, generation while training."""

from __future__ import annotations

from dsx.doctor.key import NoEffect, Rows, When, unless

_top = Rows(path="", source="runtime/config.py: DeepSpeedConfig", unknown="ignored", types="raw")
_recompute = Rows(
    path="activation_checkpointing",
    source="runtime/activation_checkpointing/config.py: DeepSpeedActivationCheckpointingConfig",
    unknown="ignored",
    types="raw",
)
_pipeline = Rows(
    path="pipeline", source="runtime/pipe/engine.py: PipelineEngine", unknown="ignored", types="raw"
)
_checkpoint = Rows(
    path="checkpoint",
    source="runtime/model_checkpointing/config.py: get_checkpoint_config",
    unknown="ignored",
    types="raw",
)
_parallel_write = Rows(
    path="checkpoint.parallel_write",
    source="runtime/config.py: get_checkpoint_parallel_write_pipeline",
    unknown="ignored",
    types="raw",
)
_writer = Rows(
    path="checkpoint.writer",
    source="runtime/model_checkpointing/config.py: get_checkpoint_writer_config",
    unknown="ignored",
    types="raw",
    since="0.17.1",
)
_compile = Rows(
    path="compile",
    source="compile/config.py: CompileConfig",
    unknown="refused",
    types="coerced",
    since="0.16.6",
    no_effect=unless("compile.deepcompile", "deepcompile is off"),
)
_hybrid = Rows(
    path="hybrid_engine",
    source="runtime/config.py: HybridEngineConfig",
    unknown="refused",
    types="coerced",
    since="0.9.0",
    no_effect=unless("hybrid_engine.enabled", "the hybrid engine is off"),
)
_weights = Rows(
    path="weight_quantization",
    source="inference/config.py: WeightQuantConfig",
    unknown="refused",
    types="coerced",
    since="0.10.3",
)
_contiguous = (
    NoEffect(
        (When("activation_checkpointing.contiguous_memory_optimization", "falsy"),),
        "only contiguous_memory_optimization reads it",
    ),
)
_free = (NoEffect((When("compile.free_activation", "falsy"),), "free_activation is off"),)
_offload = (NoEffect((When("compile.offload_activation", "falsy"),), "offload_activation is off"),)

BLOCKS = (
    _recompute.block,
    _pipeline.block,
    _checkpoint.block,
    _parallel_write.block,
    _writer.block,
    _compile.block,
    _hybrid.block,
    _weights.block,
    Rows(
        path="weight_quantization.quantized_initialization",
        source=_weights.source,
        unknown="free",
        types="raw",
    ).block,
    Rows(
        path="weight_quantization.post_init_quant", source=_weights.source, unknown="free", types="raw"
    ).block,
)
KEYS = (
    _top(
        "activation_checkpointing",
        "object",
        {},
        "how deepspeed.checkpointing recomputes; it does nothing in a model that does not call it",
    ),
    _recompute("partition_activations", "bool", False, "divide saved activations over model-parallel ranks"),
    _recompute("cpu_checkpointing", "bool", False, "keep saved activations in CPU memory"),
    _recompute("contiguous_memory_optimization", "bool", False, "copy saved activations into one buffer"),
    _recompute(
        "number_checkpoints",
        "int|null",
        None,
        "checkpoints per pass: the size of that buffer",
        low=1,
        no_effect=_contiguous,
    ),
    _recompute(
        "synchronize_checkpoint_boundary", "bool", False, "synchronize the device at every checkpoint"
    ),
    _recompute("profile", "bool", False, "time every checkpoint"),
    _top("pipeline", "object", {}, "options of the pipeline engine, for a PipelineModule only"),
    _pipeline(
        "stages", "int|string", "auto", "read by nothing: stages are set in PipelineModule", status="dead"
    ),
    _pipeline(
        "partition", "string", "best", "read by nothing: partitioning is set in PipelineModule", status="dead"
    ),
    _pipeline("seed_layers", "bool", False, "read by nothing: it is set in PipelineModule", status="dead"),
    _pipeline(
        "activation_checkpoint_interval",
        "int",
        0,
        "recompute so many layers at a time; 0 leaves it to PipelineModule",
        low=0,
        unit="layers",
    ),
    _pipeline(
        "pipe_partitioned",
        "bool",
        True,
        "divide activations sent between stages over model-parallel ranks",
        since="0.12.3",
    ),
    _pipeline(
        "grad_partitioned", "bool", True, "divide gradients sent between stages likewise", since="0.12.3"
    ),
    _pipeline(
        "use_reentrant", "bool|null", True, "recompute by a reentrant autograd function", since="0.10.3"
    ),
    _top("checkpoint", "object", {}, "how checkpoints are written and read"),
    _checkpoint(
        "tag_validation",
        "string",
        "WARN",
        "when ranks save under different tags",
        choices=("WARN", "IGNORE", "FAIL"),
        any_case=True,
    ),
    _checkpoint("load_universal", "bool", False, "load a checkpoint in the universal format"),
    _checkpoint(
        "use_node_local_storage", "bool", False, "every node has its own disk: each writes all it needs"
    ),
    _checkpoint("parallel_write", "object", {}, "who writes what of a checkpoint"),
    _parallel_write(
        "pipeline_stage", "bool", False, "data-parallel ranks share the writing of a stage's layers"
    ),
    _checkpoint(
        "checkpoint_serialization", "bool", True, "of the fast writer: torch's zip format", since="0.17.1"
    ),
    _checkpoint("writer", "object|null", None, "FastPersist: write checkpoints by aio", since="0.17.1"),
    _writer(
        "type", "string|null", "FAST", "kind of writer", choices=("MOCK", "PYTHON", "FAST"), any_case=True
    ),
    _writer("io_buffer_size", "int", 67_108_864, "buffer of one write", unit="bytes", low=1),
    _writer("io_buffer_double", "bool", True, "fill one buffer while the other is written"),
    _writer("io_multiplier", "int", 1, "files written in parallel per rank", low=1),
    _writer("show_statistics", "bool", False, "print speeds"),
    _writer(
        "data_parallel",
        "string|null",
        None,
        "divide the writing over replicas, sockets or machines",
        choices=("REPLICA", "SOCKET", "MACHINE"),
        any_case=True,
    ),
    _writer("decoupled", "bool", False, "write while training goes on"),
    _top(
        "compile",
        "object",
        {},
        "DeepCompile: torch.compile with ZeRO's communication in the graph",
        since="0.13.2",
    ),
    _compile(
        "deepcompile",
        "bool",
        False,
        "let engine.compile() schedule ZeRO's communication",
        no_effect=(
            NoEffect(
                (When("compile.passes", "falsy"), When("zero_optimization.stage", "<", 1)),
                "without ZeRO and without passes DeepSpeed falls back to torch.compile",
            ),
        ),
    ),
    _compile(
        "autoep_non_moe",
        "bool",
        False,
        "compile the parents of AutoEP layers, not these",
        since="0.19.8",
        no_effect=(),
    ),
    _compile("free_activation", "bool", False, "free large activations early; not with inductor"),
    _compile(
        "free_activation_threshold",
        "int",
        10_485_760,
        "smallest activation to free",
        unit="bytes",
        since="0.18.0",
        no_effect=_free,
    ),
    _compile("offload_activation", "bool", False, "keep saved activations in CPU memory"),
    _compile(
        "offload_activation_pin_memory",
        "bool",
        True,
        "in page-locked memory",
        since="0.19.6",
        no_effect=_offload,
    ),
    _compile("offload_opt_states", "bool", False, "keep optimizer states in CPU memory outside the step"),
    _compile("double_buffer", "bool", True, "two communication buffers"),
    _compile("symmetric_memory", "bool", False, "gather through symmetric memory"),
    _compile("debug_log", "bool", False, "write out the graphs"),
    _compile("offload_parameters", "bool", False, "keep parameters in CPU memory"),
    _compile("sync_before_reduce", "bool", False, "synchronize before reducing"),
    _compile("sync_after_reduce", "bool", False, "synchronize after reducing"),
    _compile("sync_before_allgather", "bool", False, "synchronize before gathering"),
    _compile("sync_after_allgather", "bool", False, "synchronize after gathering"),
    _compile(
        "keep_int_input_tensors",
        "bool",
        True,
        "keep the values of integer inputs while profiling",
        since="0.17.2",
    ),
    _compile(
        "keep_all_input_tensors",
        "bool",
        False,
        "keep the values of all inputs while profiling",
        since="0.17.2",
    ),
    _compile(
        "passes",
        "list|null",
        None,
        "graph passes to compose",
        choices=("z1", "z3", "autosp", "autotp"),
        since="0.18.9",
    ),
    _top("hybrid_engine", "object", {}, "generate fast with the weights being trained (RLHF)", since="0.9.0"),
    _hybrid("enabled", "bool", False, "switch on the hybrid engine"),
    _hybrid(
        "max_out_tokens",
        "int",
        512,
        "greatest length of prompt and answer",
        low=0,
        low_open=True,
        unit="tokens",
    ),
    _hybrid("inference_tp_size", "int", 1, "tensor-parallel ranks while generating", low=1, unit="ranks"),
    _hybrid("release_inference_cache", "bool", False, "free the key-value cache after generating"),
    _hybrid("pin_parameters", "bool", True, "keep gathered parameters while generating"),
    _hybrid("tp_gather_partition_size", "int", 8, "layers gathered at a time", unit="layers"),
    _hybrid("enable_cuda_graph", "bool", False, "generate through CUDA graphs", since="0.19.6"),
    _top(
        "weight_quantization",
        "object",
        None,
        "quantize weights in zero.Init or after loading (inference)",
        since="0.10.3",
    ),
    _weights("enabled", "bool", True, "stored, and read by nothing in 0.19.8", since="0.15.0"),
    _weights("num_bits", "int", 8, "stored, and read by nothing in 0.19.8", status="dead", since="0.15.0"),
    _weights(
        "q_type",
        "string",
        "symmetric",
        "stored, and read by nothing in 0.19.8",
        choices=("asymmetric", "symmetric"),
        status="dead",
    ),
    _weights("q_groups", "int", 1, "stored, and read by nothing in 0.19.8", status="dead"),
    _weights(
        "quantized_initialization", "object", {}, "num_bits, group_size, group_dim, symmetric for zero.Init"
    ),
    _weights("post_init_quant", "object", {}, "the same per module name"),
)
