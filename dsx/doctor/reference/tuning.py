"""Reference: ``autotuning``, read by ``deepspeed --autotuning``."""

from __future__ import annotations

from dsx.doctor.key import Rows, unless

_tuning = Rows(
    path="autotuning",
    source="autotuning/config.py: DeepSpeedAutotuningConfig",
    unknown="ignored",
    types="raw",
    no_effect=unless("autotuning.enabled", "autotuning is off"),
)
_info = Rows(
    path="autotuning.model_info",
    source="autotuning/config.py: get_model_info_config",
    unknown="ignored",
    types="raw",
)

BLOCKS = (
    _tuning.block,
    _info.block,
    Rows(path="autotuning.arg_mappings", source=_tuning.source, unknown="free", types="raw").block,
)
KEYS = (
    Rows(path="", source=_tuning.source, unknown="ignored", types="raw")(
        "autotuning", "object", {}, "search for fast settings by short runs"
    ),
    _tuning("enabled", "bool", False, "switch on autotuning"),
    _tuning("fast", "bool", True, "tune micro-batch sizes per ZeRO stage only"),
    _tuning("results_dir", "string", "autotuning_results", "folder of the results"),
    _tuning("exps_dir", "string", "autotuning_exps", "folder of the experiments"),
    _tuning("overwrite", "bool", True, "run experiments again that are there"),
    _tuning("start_profile_step", "int", 3, "first step that is timed", low=1, unit="steps"),
    _tuning("end_profile_step", "int", 5, "last step that is timed", low=1, unit="steps"),
    _tuning(
        "metric", "string", "throughput", "what is made best", choices=("latency", "throughput", "flops")
    ),
    _tuning("metric_path", "string|null", None, "file for the measured metric"),
    _tuning(
        "tuner_type",
        "string",
        "gridsearch",
        "order of the experiments",
        choices=("gridsearch", "random", "model_based"),
    ),
    _tuning("tuner_early_stopping", "int", 5, "stop after so many experiments without gain"),
    _tuning("tuner_num_trials", "int", 50, "most experiments per tuning space", low=1),
    _tuning("arg_mappings", "object|null", None, "DeepSpeed key -> the script's own option"),
    _tuning("model_info", "object|null", None, "what is known of the model"),
    _info("profile", "bool", False, "find it out by a run"),
    _info("num_params", "int|null", None, "parameters of the model", low=1, unit="elements"),
    _info("hidden_size", "int|null", None, "hidden size", low=1),
    _info("num_layers", "int|null", None, "number of layers", low=1, unit="layers"),
    _tuning("model_info_path", "string|null", None, "file for what was found out"),
    _tuning("mp_size", "int", 1, "model-parallel ranks", low=1, unit="ranks"),
    _tuning("max_train_batch_size", "int|null", None, "greatest batch", low=1, unit="samples"),
    _tuning("min_train_batch_size", "int", 1, "least batch", low=1, unit="samples"),
    _tuning("max_train_micro_batch_size_per_gpu", "int", 1024, "greatest micro-batch", low=1, unit="samples"),
    _tuning("min_train_micro_batch_size_per_gpu", "int", 1, "least micro-batch", low=1, unit="samples"),
    _tuning("num_tuning_micro_batch_sizes", "int", 3, "micro-batch sizes to try", low=1),
)
