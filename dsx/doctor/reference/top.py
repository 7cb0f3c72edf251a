"""Reference: batch sizes, gradients and what else stands at the top level by itself."""

from __future__ import annotations

from dsx.doctor.key import NoEffect, Rows, When

_top = Rows(path="", source="runtime/config.py: DeepSpeedConfig", unknown="ignored", types="raw")
_throughput = Rows(
    path="timers.throughput",
    source="utils/config.py: DeepSpeedThroughputTimerConfig",
    unknown="refused",
    types="coerced",
    since="0.14.3",
)
_timers = Rows(
    path="timers",
    source="utils/config.py: get_timers_config",
    unknown="ignored",
    types="raw",
    since="0.14.3",
)
_not_divided_twice = NoEffect(
    (When("prescale_gradients", "truthy"),), "prescale_gradients divides by the number of ranks instead"
)
_dtypes = ("fp32", "fp16", "bf16")

BLOCKS = (_top.block, _timers.block, _throughput.block)
KEYS = (
    # A batch key that is null counts as not given.
    _top(
        "train_batch_size",
        "int|null",
        None,
        "samples per optimizer step over all ranks: micro-batch x accumulation x data-parallel ranks; one of "
        "the three may be left out",
        low=1,
        unit="samples",
        trainer_auto=True,
    ),
    _top(
        "train_micro_batch_size_per_gpu",
        "int|null",
        None,
        "samples per forward and backward pass on one data-parallel rank",
        low=1,
        unit="samples",
        trainer_auto=True,
    ),
    _top(
        "gradient_accumulation_steps",
        "int|null",
        None,
        "micro-batches per optimizer step; under pipelines also how many fill the pipeline",
        low=1,
        unit="micro-batches",
        trainer_auto=True,
    ),
    _top(
        "managed_gradient_accumulation",
        "bool",
        True,
        "whether DeepSpeed counts micro-batches itself; false: every engine.step() updates the weights",
        since="0.19.4",
    ),
    _top(
        "gradient_clipping",
        "float",
        1.0,
        "greatest L2 norm of all gradients together; larger ones are scaled down to it; 0 for no clipping",
        low=0,
        trainer_auto=True,
    ),
    _top(
        "prescale_gradients",
        "bool",
        False,
        "divide gradients by the number of ranks before they are reduced instead of after",
    ),
    _top(
        "gradient_predivide_factor",
        "float",
        1.0,
        "what gradients are divided by before they are reduced, and multiplied with after (against overflow)",
        low=0,
        low_open=True,
        no_effect=(_not_divided_twice,),
    ),
    _top(
        "gradient_allreduce_op",
        "string",
        "mean",
        "average gradients over data-parallel ranks, or add them up",
        choices=("mean", "sum"),
        any_case=True,
        since="0.19.6",
    ),
    _top(
        "communication_data_type",
        "string|null",
        None,
        "dtype in which gradients are reduced; without it that of the gradients",
        choices=_dtypes,
        any_case=True,
    ),
    _top(
        "seq_parallel_communication_data_type",
        "string|null",
        "fp32",
        "dtype in which gradients are reduced under Ulysses sequence parallelism",
        choices=_dtypes,
        any_case=True,
        since="0.16.5",
    ),
    _top(
        "seq_parallel_comm_data_type",
        "string",
        None,
        "the former name of seq_parallel_communication_data_type; not read any more",
        status="dead",
        since="0.11.2",
        until="0.16.5",
        replacement="seq_parallel_communication_data_type",
    ),
    _top(
        "sequence_parallel_size",
        "int",
        1,
        "ranks that share one sequence (Ulysses); a mesh is made when data_parallel_size is given too",
        low=1,
        unit="ranks",
        since="0.17.0",
    ),
    _top(
        "data_parallel_size",
        "int",
        None,
        "data-parallel ranks of the mesh that sequence_parallel_size asks for",
        low=1,
        unit="ranks",
        since="0.17.0",
    ),
    _top(
        "use_data_before_expert_parallelism",
        "bool",
        False,
        "order of the ranks: data-parallel groups inside expert-parallel ones",
        since="0.12.4",
    ),
    _top(
        "disable_allgather",
        "bool",
        False,
        "stored, and read by nothing in 0.19.8",
        status="dead",
    ),
    _top(
        "zero_allow_untested_optimizer",
        "bool",
        False,
        "let ZeRO partition an optimizer that DeepSpeed has not tested with it",
    ),
    _top(
        "zero_force_ds_cpu_optimizer",
        "bool",
        True,
        "with offload_optimizer: refuse any optimizer but DeepSpeed's CPU ones",
    ),
    _top(
        "steps_per_print",
        "int|null",
        None,
        "print loss scale, learning rate and speed every so many optimizer steps; null for never",
        low=1,
        unit="steps",
    ),
    _top(
        "wall_clock_breakdown",
        "bool",
        False,
        "time forward, backward and step, with a device synchronization at each (slows training)",
    ),
    _top("memory_breakdown", "bool", False, "print memory in use at many points of every step"),
    _top("dump_state", "bool", False, "print the engine's state once it is initialized"),
    _top(
        "disable_python_gc",
        "bool",
        False,
        "switch off Python's cyclic garbage collector while training",
        since="0.19.8",
    ),
    _top(
        "log_level",
        "string|null",
        None,
        "level of DeepSpeed's logger",
        choices=("debug", "info", "warning", "error", "critical"),
        any_case=True,
        since="0.19.3",
    ),
    _top(
        "vocabulary_size",
        "int|null",
        None,
        "only used to warn when it is no multiple of 8",
        low=1,
        unit="tokens",
    ),
    _top(
        "dataloader_drop_last",
        "bool",
        False,
        "drop the last, incomplete batch of the loader that DeepSpeed makes from training_data",
    ),
    _top(
        "datastates_ckpt",
        "bool|object",
        False,
        "write checkpoints with the DataStates engine; an object holds that engine's options",
        since="0.18.1",
    ),
    _top("timers", "object", {}, "switches of the throughput timer", since="0.14.3"),
    _timers("throughput", "object", {}, "the timer behind samples per second"),
    _throughput("enabled", "bool", True, "measure throughput"),
    _throughput(
        "synchronized",
        "bool",
        True,
        "synchronize the device for every measurement: exact, and slower",
        no_effect=(NoEffect((When("timers.throughput.enabled", "falsy"),), "the throughput timer is off"),),
    ),
)
