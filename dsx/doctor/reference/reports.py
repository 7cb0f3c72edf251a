"""Reference: what DeepSpeed measures and logs: monitors, ``comms_logger``, ``flops_profiler``."""

from __future__ import annotations

from dsx.doctor.key import Rows, unless

_top = Rows(path="", source="runtime/config.py: DeepSpeedConfig", unknown="ignored", types="raw")


def _monitor(name: str, model: str, since: str = "") -> Rows:
    return Rows(
        path=name,
        source=f"monitor/config.py: {model}",
        unknown="refused",
        types="coerced",
        since=since,
        no_effect=unless(f"{name}.enabled", "it is not enabled"),
    )


_tensorboard = _monitor("tensorboard", "TensorBoardConfig")
_wandb = _monitor("wandb", "WandbConfig")
_csv = _monitor("csv_monitor", "CSVConfig")
_comet = _monitor("comet", "CometConfig", "0.14.3")
_comms = Rows(
    path="comms_logger",
    source="comm/config.py: CommsLoggerConfig",
    unknown="refused",
    types="coerced",
    no_effect=unless("comms_logger.enabled", "it is not enabled"),
)
_flops = Rows(
    path="flops_profiler",
    source="profiling/config.py: DeepSpeedFlopsProfilerConfig",
    unknown="ignored",
    types="raw",
    no_effect=unless("flops_profiler.enabled", "it is not enabled"),
)
_folder = "folder of the logs; the working folder's own one if empty"
_job = "name of the folder inside output_path"

BLOCKS = (_tensorboard.block, _wandb.block, _csv.block, _comet.block, _comms.block, _flops.block)
KEYS = (
    _top("tensorboard", "object", {}, "log loss, learning rate and timers to TensorBoard"),
    _tensorboard("enabled", "bool", False, "log to TensorBoard; needs the tensorboard package"),
    _tensorboard("output_path", "string", "", _folder),
    _tensorboard("job_name", "string", "DeepSpeedJobName", _job),
    _top("wandb", "object", {}, "log loss, learning rate and timers to Weights & Biases"),
    _wandb("enabled", "bool", False, "log to Weights & Biases; needs the wandb package"),
    _wandb("group", "string|null", None, "group of the run"),
    _wandb("team", "string|null", None, "the entity that owns the project"),
    _wandb("project", "string", "deepspeed", "project of the run"),
    _top("csv_monitor", "object", {}, "log loss, learning rate and timers to CSV files"),
    _csv("enabled", "bool", False, "write CSV files"),
    _csv("output_path", "string", "", _folder),
    _csv("job_name", "string", "DeepSpeedJobName", _job),
    _top("comet", "object", {}, "log loss, learning rate and timers to Comet", since="0.14.3"),
    _comet("enabled", "bool", False, "log to Comet; needs the comet_ml package"),
    _comet("samples_log_interval", "int", 100, "log once per so many samples", low=1, unit="samples"),
    _comet("project", "string|null", None, "project of the experiment"),
    _comet("workspace", "string|null", None, "workspace of the experiment"),
    _comet("api_key", "string|null", None, "Comet's key; better in its environment variable than here"),
    _comet("experiment_name", "string|null", None, "name of the experiment"),
    _comet("experiment_key", "string|null", None, "key of an experiment to go on with, 32 to 50 characters"),
    _comet("online", "bool|null", None, "send to the server (the default), or keep offline"),
    _comet(
        "mode",
        "string|null",
        None,
        "get: go on with one; create: a new one; get_or_create: either",
        choices=("get", "create", "get_or_create"),
    ),
    _top("comms_logger", "object", None, "record collective operations: sizes, times, bandwidth"),
    _comms("enabled", "bool", False, "record collective operations"),
    _comms("prof_all", "bool", True, "record all of them"),
    _comms("prof_ops", "list", [], "record only these, with prof_all false", items="string"),
    _comms("verbose", "bool", False, "print each one as it happens"),
    _comms("debug", "bool", False, "print the function that called it"),
    _top("flops_profiler", "object", {}, "count FLOPs, parameters and time of every module at one step"),
    _flops("enabled", "bool", False, "profile; also switches wall_clock_breakdown on"),
    _flops(
        "recompute_fwd_factor",
        "float",
        0.0,
        "forward passes that recomputation adds per backward",
        low=0,
        since="0.9.3",
    ),
    _flops("profile_step", "int", 1, "the step to profile", low=0, unit="steps"),
    _flops("module_depth", "int", -1, "depth of modules to print; -1 for the innermost", low=-1),
    _flops("top_modules", "int", 1, "modules per depth in the summary", low=1),
    _flops("detailed", "bool", True, "print every module"),
    _flops("output_file", "string|null", None, "file of the profile; printed if absent"),
)
