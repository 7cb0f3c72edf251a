"""The doctor's reference against the installed DeepSpeed: pydantic models, what it reads, signatures."""

from __future__ import annotations

import inspect
import json
import math
import re
from enum import Enum
from functools import cache
from pathlib import Path
from typing import get_args, get_origin

import pytest
import torch

from dsx.config.keys import REQUIRED, reference
from loaded import HEAVY, loaded_by

KEYS, BLOCKS = reference().rows, reference().objects
ROWS = {(key.path, key.variant): key for key in KEYS}
MODELS = {
    "zero_optimization": "runtime.zero.config.DeepSpeedZeroConfig",
    "zero_optimization.offload_param": "runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig",
    "zero_optimization.offload_optimizer": "runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig",
    "zero_optimization.zenflow": "runtime.zenflow.zenflow_config.ZenFlowConfig",
    "zero_optimization.leaf_module": "runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig",
    "bf16": "runtime.precision_config.DeepSpeedBF16Config",
    "fp16": "runtime.precision_config.DeepSpeedFP16Config",
    "tensor_parallel": "runtime.tensor_parallel.config.TPTrainingConfig",
    "tensor_parallel.tp": "runtime.tensor_parallel.config.TPConfig",
    "tensorboard": "monitor.config.TensorBoardConfig",
    "wandb": "monitor.config.WandbConfig",
    "csv_monitor": "monitor.config.CSVConfig",
    "comet": "monitor.config.CometConfig",
    "comms_logger": "comm.config.CommsLoggerConfig",
    "compile": "compile.config.CompileConfig",
    "hybrid_engine": "runtime.config.HybridEngineConfig",
    "weight_quantization": "inference.config.WeightQuantConfig",
    "timers.throughput": "utils.config.DeepSpeedThroughputTimerConfig",
}
KINDS = {bool: "bool", int: "int", float: "float", str: "string", list: "list", dict: "object", tuple: "list"}
# Bounds and values that a validator of the model enforces, or that DeepSpeed trips over later.
BY_VALIDATOR = {
    "fp16.loss_scale",
    "fp16.hysteresis",
    "fp16.loss_scale_window",
    "fp16.min_loss_scale",
    "zero_optimization.zenflow.select_interval",
    "zero_optimization.zenflow.update_interval",
    "comet.samples_log_interval",
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp.tp_grain_size",
    "hybrid_engine.inference_tp_size",
}
# Values that no type says: a validator or later code does.
CHOSEN_LATER = {
    "zero_optimization.legacy_stage1",
    "zero_optimization.zenflow.select_strategy",
    "tensor_parallel.preset_model",
    "comet.mode",  # comet_ml.start
}


def resolve(name):
    module, _, attribute = f"deepspeed.{name}".rpartition(".")
    return getattr(__import__(module, fromlist=[attribute]), attribute)


def parse(config):
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig({"train_batch_size": 1, **config})


def nested(path, value):
    """``{"a": {"b": value}}`` for the path ``a.b``."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def children(path, variant="", *, former=False):
    """Rows right inside a block, by the last part of their path."""
    found = {}
    for key in KEYS:
        owner, _, last = key.path.rpartition(".")
        if owner == path and key.variant == variant and (former or key.status != "removed"):
            found[last] = key
    return found


def plain(value):
    """A default as JSON would hold it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value.model_dump() if hasattr(value, "model_dump") else value


def kinds(annotation):
    """What of JSON a field's annotation takes."""
    if annotation is type(None):
        return {"null"}
    if annotation is object:
        return {"null"}
    if get_origin(annotation) in (list, dict, tuple):
        annotation = get_origin(annotation)
    if get_args(annotation):
        return {
            kind for part in get_args(annotation) for kind in ([] if isinstance(part, str) else kinds(part))
        } or {"string"}
    if annotation is Path or (isinstance(annotation, type) and issubclass(annotation, str)):
        return {"string"}
    if isinstance(annotation, type) and issubclass(annotation, int) and annotation is not bool:
        return {"int"}
    if annotation is torch.dtype:
        return set()
    return {"object"} if hasattr(annotation, "model_fields") else {KINDS[annotation]}


def choices(annotation):
    parts = [annotation, *get_args(annotation)]
    parts += [inner for part in parts for outer in get_args(part) for inner in get_args(outer)]
    if any(isinstance(part, str) for part in parts):
        return {part for part in parts if isinstance(part, str)}
    enums = [part for part in parts if isinstance(part, type) and issubclass(part, Enum)]
    return {member.value for enum in enums for member in enum}


@pytest.mark.parametrize("path", MODELS)
def test_pydantic_models(path):
    """Names, aliases, types, defaults, bounds, allowed values and deprecations of every field."""
    model = resolve(MODELS[path])
    block = next(block for block in BLOCKS if block.path == path)
    assert (block.unknown, block.types) == ("refused", "coerced")
    assert model.model_config["extra"] == "forbid"
    rows = children(path)
    fields = {field.alias or name: (name, field) for name, field in model.model_fields.items()}
    assert set(rows) == set(fields)
    for word, (name, field) in fields.items():
        row = rows[word]
        assert set(row.aliases) == ({name} - {word}), row.path
        expected = kinds(field.annotation)
        if path == "zero_optimization.leaf_module":
            expected |= {"string"}  # _coerce_container_types
        if row.auto == "meaning" and not row.choices:
            expected -= {"string"}  # the one string is "auto"
        assert set(row.kinds) == expected, row.path
        default = plain(field.get_default(call_default_factory=True))
        if row.kinds:  # a torch.dtype cannot be written
            assert row.default == ({} if row.kinds == ("object",) else default), row.path
            assert type(row.default) is type(plain(default)) or isinstance(default, dict), row.path
        assert_bounds(row, field)
        if row.path not in CHOSEN_LATER:
            assert set(row.choices) == choices(field.annotation), row.path
        extra = field.json_schema_extra or {}
        assert (row.status == "deprecated") == bool(extra.get("deprecated")), row.path
        if extra.get("set_new_param", True) and extra.get("new_param"):
            assert row.replacement.rpartition(".")[2].removeprefix("stage3_") == extra["new_param"], row.path


def assert_bounds(row, field):
    limits = {type(item).__name__: item for item in field.metadata}
    low = limits.get("Ge") and limits["Ge"].ge
    if "Gt" in limits:
        low = limits["Gt"].gt
    high = limits.get("Le") and limits["Le"].le
    if "Lt" in limits:
        high = math.nextafter(limits["Lt"].lt, 0)
    if row.path not in BY_VALIDATOR:
        assert (row.low, row.high, row.low_open) == (low, high, "Gt" in limits), row.path


class Recorder(dict):
    """A config that notes which of its keys are asked for, with those of the objects inside."""

    def __init__(self, content, path, seen):
        super().__init__(
            {
                key: Recorder(value, f"{path}.{key}".removeprefix("."), seen)
                if isinstance(value, dict)
                else value
                for key, value in content.items()
            }
        )
        self.path, self.seen = path, seen

    def note(self, key):
        self.seen.add(f"{self.path}.{key}".removeprefix("."))

    def __copy__(self):
        copied = Recorder({}, self.path, self.seen)
        dict.update(copied, self)
        return copied

    def __contains__(self, key):
        self.note(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.note(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.note(key)
        return super().get(key, default)

    def pop(self, key, *default):
        return super().pop(key, *default)

    def keys(self):
        recorder = self

        class Keys(list):
            def __contains__(self, key):
                return key in recorder

        return Keys(super().keys())


RAW = {
    "activation_checkpointing": {},
    "aio": {},
    "autotuning": {"model_info": {}},
    "checkpoint": {"parallel_write": {}, "writer": {}},
    "data_efficiency": {
        "data_sampling": {"curriculum_learning": {}, "dynamic_batching": {"enabled": True, "max_tokens": 1}},
        "data_routing": {"random_ltd": {}},
    },
    "data_types": {},
    "expert_parallel": {"enabled": False},
    "flops_profiler": {},
    "optimizer": {"type": "Adam", "params": {}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "timers": {"throughput": {}},
    "torch_autocast": {"enabled": False, "dtype": "bf16", "lower_precision_safe_modules": []},
}
# Read later, by the engine, its data sampler, its pipeline or its curriculum, and not by DeepSpeedConfig.
READ_LATER = re.compile(
    r"pipeline\.|data_parallel_size|sequence_parallel_size|bfloat16"
    r"|data_efficiency.*\.(curriculum_learning|random_ltd)\.(?!enabled$)"
    r"|data_efficiency\.data_sampling\.dynamic_batching\.metrics_path"
)


@cache
def asked_for():
    seen = set()
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(Recorder({"train_batch_size": 1, **RAW}, "", seen))
    return frozenset(seen)


def test_every_key_that_deepspeed_asks_for_has_a_row():
    paths = {key.path for key in KEYS}
    # allgather_size belongs to zero_optimization: true, which test_forms_of_old shows.
    assert asked_for() - paths - {"allgather_size"} - {"optimizer.params.max_grad_norm"} == set()
    assert len(asked_for()) > 150


def test_every_row_is_asked_for():
    """Of the blocks that DeepSpeedConfig reads key by key; the models' are compared above."""
    read = {
        key.path
        for key in KEYS
        if not key.variant and not any(key.path.startswith(f"{model}.") for model in MODELS)
    }
    former = {"aio.thread_count", "seq_parallel_comm_data_type", "pipeline.stages"}
    parsed_elsewhere = {path for path in read if path.startswith("tensor_parallel.partition_config.")}
    missing = {path for path in read - asked_for() - former - parsed_elsewhere if not READ_LATER.match(path)}
    assert missing == set()


def test_keys_that_are_read_later_are_in_the_source():
    import deepspeed

    root = Path(deepspeed.__file__).parent
    folders = ("runtime", "compile", "module_inject")
    text = "\n".join(path.read_text() for folder in folders for path in (root / folder).rglob("*.py"))
    text += (root / "__init__.py").read_text()
    words = {
        key.path.rpartition(".")[2]
        for key in KEYS
        if key.status != "removed" and not key.variant and READ_LATER.match(key.path)
    }
    assert len(words) > 30
    assert [word for word in words if not re.search(rf"""["']{word}["']""", text)] == []


def test_defaults_of_what_deepspeed_reads_key_by_key():
    config = parse({})
    assert config.pipeline.pop("stages") == ROWS["pipeline.stages", ""].default
    parts = {
        "": vars(config),
        "pipeline": config.pipeline,
        "activation_checkpointing": vars(config.activation_checkpointing_config),
        "flops_profiler": vars(config.flops_profiler_config),
        "autotuning": vars(config.autotuning_config),
        "aio": config.aio_config,
        "expert_parallel": vars(config.expert_parallel_config),
        "data_efficiency": config.data_efficiency_config,
        "data_efficiency.data_sampling": config.data_efficiency_config["data_sampling"],
        "data_efficiency.data_sampling.dynamic_batching": config.data_efficiency_config["data_sampling"][
            "dynamic_batching"
        ],
        "checkpoint.writer": parse({"checkpoint": {"writer": {}}}).checkpoint_config["writer"],
        "checkpoint": config.checkpoint_config
        | {"load_universal": config.load_universal_checkpoint}
        | {"use_node_local_storage": config.use_node_local_storage},
    }
    compared = 0
    for path, values in parts.items():
        for name, row in children(path).items():
            if name in values and row.kinds != ("object",) and row.default is not REQUIRED:
                value = values[name]
                # Batch keys and aliases of the config's own, which it fills in.
                if row.path in (
                    "train_batch_size",
                    "train_micro_batch_size_per_gpu",
                    "gradient_accumulation_steps",
                ):
                    continue
                if isinstance(value, torch.dtype):
                    value = str(value).replace("torch.float32", "fp32")
                if type(value).__name__ == "object":  # AutoEP's marker for "not given"
                    value = None
                assert value == row.default, row.path
                compared += 1
    assert compared > 110


def test_removed_keys_are_those_that_deepspeed_refuses():
    from deepspeed.runtime import config

    top = {key.path for key in KEYS if key.status == "removed" and "." not in key.path}
    assert top == set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    zero = children("zero_optimization", former=True).values()
    assert {key.path.rpartition(".")[2] for key in zero if key.status == "removed"} == set(
        config._REMOVED_ZERO_CONFIG_KEYS
    )
    for key in KEYS:
        if key.status == "removed":
            with pytest.raises(Exception, match=r"removed|Extra inputs"):
                parse(nested(key.path, 1))


def test_blocks_refuse_or_ignore_what_they_do_not_know():
    """Each block, given a key that nobody knows; those of optimizers and schedules by signature, below."""
    checked = 0
    for block in BLOCKS:
        if block.variant or "*" in block.path or "[]" in block.path or "partition_config" in block.path:
            continue
        inside = nested(f"{block.path}.no_such_key".removeprefix("."), 1)
        if block.path.startswith("optimizer"):
            inside["optimizer"]["type"] = "Adam"
        if block.path == "tensor_parallel.tp":
            inside["tensor_parallel"]["autotp_size"] = 1
        if block.unknown == "refused":
            with pytest.raises(ValueError, match="no_such_key"):
                parse(inside)
        else:
            parse(inside)
        checked += 1
    assert checked > 35


def test_what_auto_does():
    """Dropped by models, kept as a string by what is read key by key."""
    for path, name in MODELS.items():
        for word, row in children(path).items():
            if row.kinds and row.kinds != ("object",) and row.status != "deprecated":
                given = resolve(name)(**{word: "auto"})
                usual = resolve(name)()
                field = row.aliases[0] if row.aliases else word
                assert row.auto in ("default", "meaning"), row.path
                assert getattr(given, field) == getattr(usual, field), row.path
    config = parse({"gradient_clipping": "auto", "steps_per_print": "auto", "prescale_gradients": "auto"})
    assert config.gradient_clipping == config.steps_per_print == config.prescale_gradients == "auto"
    assert all(row.auto != "default" for row in children("").values())


def test_allowed_values_of_what_is_read_key_by_key():
    """Those that DeepSpeedConfig itself enforces: each allowed one passes, another one fails."""
    enforced = [
        "gradient_allreduce_op",
        "communication_data_type",
        "seq_parallel_communication_data_type",
        "checkpoint.tag_validation",
        "checkpoint.writer.type",
        "checkpoint.writer.data_parallel",
        "torch_autocast.dtype",
    ]
    for path in enforced:
        row = ROWS[path, ""]
        for choice in row.choices:
            parse(nested(path, choice))
            if row.any_case:
                parse(nested(path, choice.upper()))
                parse(nested(path, choice.lower()))
        with pytest.raises((ValueError, AssertionError, Exception), match=r"(?i)invalid|valid"):
            parse(nested(path, "nonsense"))


def test_dtypes_of_data_types():
    from deepspeed.runtime.config import DtypeEnum

    for path in ("data_types.grad_accum_dtype", "torch_autocast.dtype"):
        names = {name for member in DtypeEnum for name in member._all_values if isinstance(name, str)}
        assert set(ROWS[path, ""].choices) == names


def test_numbers_out_of_bounds_are_refused_and_bounds_are_not():
    checked = 0
    for path, name in MODELS.items():
        for word, row in children(path).items():
            if row.low is None or row.path in BY_VALIDATOR or row.status == "deprecated":
                continue
            model, step = resolve(name), (1 if "int" in row.kinds else 0.01)
            with pytest.raises(ValueError, match="greater than"):
                model(**{word: row.low if row.low_open else row.low - step})
            assert model(**{word: row.low + step}) is not None
            if row.high is not None:
                with pytest.raises(ValueError, match="less than"):
                    model(**{word: row.high + step})
            checked += 1
    assert checked >= 19


def signature(kind):
    parameters = inspect.signature(kind.__init__).parameters
    ours = {name: p.default for name, p in parameters.items() if name not in ("self", "params", "optimizer")}
    return {
        name: REQUIRED if value is inspect.Parameter.empty else plain(value) for name, value in ours.items()
    }


def is_newest_torch():
    return tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 13)


@pytest.mark.parametrize("package", [torch.optim, torch.optim.lr_scheduler], ids=["optim", "lr_scheduler"])
def test_parameters_of_torchs_optimizers_and_schedules(package):
    owner = "optimizer" if package is torch.optim else "scheduler"
    own = {"adam", "adamw", "adagrad", "muon"}
    names = [name for name in ROWS[f"{owner}.type", ""].choices if hasattr(package, name)]
    assert len(names) >= 10
    for name in names:
        if owner == "optimizer" and name.lower() in own:
            continue  # DeepSpeed's, under the same name
        rows = children(f"{owner}.params", name.lower())
        theirs = signature(getattr(package, name))
        theirs.pop("scale_fn", None)  # a Python function
        assert set(theirs) <= set(rows), name
        if is_newest_torch():
            assert set(rows) == set(theirs), name
        for word, default in theirs.items():
            assert rows[word].default == default, (name, word)


def test_parameters_of_deepspeeds_optimizers():
    """What each of DeepSpeed's optimizers takes, with the keys that the engine takes out before."""
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.engine import DeepSpeedEngine

    taken_out = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
    made = {
        "adam": (FusedAdam, DeepSpeedCPUAdam, torch.optim.Adam),
        "adamw": (FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW),
        "adagrad": (torch.optim.Adagrad, DeepSpeedCPUAdagrad),
        "lamb": (FusedLamb,),
        "lion": (FusedLion, DeepSpeedCPULion),
    }
    for variant, classes in made.items():
        rows = children("optimizer.params", variant)
        theirs = set().union(*(signature(kind) for kind in classes)) - {
            "model_params",
            "adamw_mode",  # given by the engine
            "decoupled_weight_decay",  # given by torch's AdamW
            "max_grad_norm",  # refused by the engine
        }
        if variant.startswith("adam"):
            theirs |= taken_out
        assert set(rows) == theirs, variant
        for word, default in signature(classes[0]).items():
            if word in rows:
                assert rows[word].default == default, (variant, word)
    halves = {
        *DeepSpeedEngine._MUON_HALF_KEYS,
        *DeepSpeedEngine._ADAM_HALF_KEYS,
        "muon_lr",
        "adam_lr",
        "foreach",
    }
    assert set(children("optimizer.params", "muon")) == halves | taken_out
    names = {name.lower() for name in ROWS["optimizer.type", ""].choices}
    assert set(DEEPSPEED_OPTIMIZERS) <= names
    optimizers = {
        name.lower()
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and name != "Optimizer"
    }
    assert names == optimizers | set(DEEPSPEED_OPTIMIZERS)


def test_parameters_of_deepspeeds_schedules():
    from deepspeed.runtime import lr_schedules

    for name in lr_schedules.VALID_LR_SCHEDULES:
        rows = children("scheduler.params", name.lower())
        assert {word: row.default for word, row in rows.items()} == signature(getattr(lr_schedules, name)), (
            name
        )
    assert set(lr_schedules.VALID_LR_SCHEDULES) <= set(ROWS["scheduler.type", ""].choices)


def test_what_the_trainer_fills_in():
    """Every key that transformers writes over "auto"; Accelerate's are written out: it is not installed."""
    from transformers.integrations import deepspeed

    source = inspect.getsource(deepspeed.HfTrainerDeepSpeedConfig)
    filled = set(re.findall(r'fill_(?:match|only)\(\s*"([a-z0-9_.]+)"', source))
    assert len(filled) > 15
    accelerate = {
        "zero_optimization.stage",
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_param.nvme_path",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    }
    assert {key.path for key in KEYS if key.trainer_auto} == filled | accelerate


def test_dead_keys_are_read_by_nothing():
    """No Python of DeepSpeed asks for the attribute that the value is stored in, but where it is stored."""
    import deepspeed

    root = Path(deepspeed.__file__).parent
    text = "\n".join(path.read_text() for path in root.rglob("*.py"))
    assert set(re.findall(r"\w+\.disable_allgather\b", text)) == {"self.disable_allgather"}
    assert len(re.findall(r"\.disable_allgather\b", text)) == 1
    assert len(re.findall(r"\bzero_allgather_partitions\b", text)) == 1  # its definition
    for word in ("stages", "partition", "seed_layers"):
        assert not re.search(rf"_config\.pipeline\[.{word}.\]", text)


def test_what_a_zero_stage_does_not_read():
    """By what the engine hands to the optimizers of ZeRO 1 and 2, and of ZeRO 3."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    source = inspect.getsource(DeepSpeedEngine)
    accessors = dict(
        re.findall(r"def (\w+)\(self\)[^:]*:\n\s+return self\._config\.zero_config\.(\w+)", source)
    )
    made = inspect.getsource(DeepSpeedEngine._configure_zero_optimizer)
    low, high = made.split("elif zero_stage == ZeroStageEnum.weights:")
    read = {
        part: {field for name, field in accessors.items() if f"self.{name}()" in text}
        for part, text in {"low": low, "high": high}.items()
    }
    assert "reduce_bucket_size" in read["low"] & read["high"]
    checked = set()
    for word, row in children("zero_optimization").items():
        field = row.aliases[0] if row.aliases else word
        for cause in row.no_effect:
            (condition, *others) = cause.conditions
            if condition.key != "zero_optimization.stage" or others:
                continue
            if (condition.operator, condition.value) == ("<", 3):
                assert field not in read["low"], row.path
                checked.add((field, "low"))
            if condition.operator == ">":
                assert field not in read["high"], row.path
                checked.add((field, "high"))
    assert len(checked) > 20


def test_rows_are_whole():
    assert len({(key.path, key.variant) for key in KEYS}) == len(KEYS)
    assert len({(block.path, block.variant) for block in BLOCKS}) == len(BLOCKS)
    known = {key.path for key in KEYS} | {block.path for block in BLOCKS}
    for key in KEYS:
        assert key.effect
        assert not key.effect.endswith(".")
        assert key.path.rpartition(".")[0].removesuffix("[]").removesuffix(".*") in known, key.path
        assert not key.replacement or key.replacement in known, key.path
        assert not key.main or f"{key.path.replace('bfloat16', 'bf16')}.{key.main}" in known, key.path
        assert all(condition.key in known for cause in key.no_effect for condition in cause.conditions), (
            key.path
        )
        assert all(re.fullmatch(r"0\.\d+\.\d+", version) for version in (key.since, key.until) if version)
        if key.default is not REQUIRED:
            json.dumps(key.default)
    objects = {key.path for key in KEYS if "object" in key.kinds} - {"bfloat16", "datastates_ckpt"}
    assert objects <= {block.path for block in BLOCKS}


def test_loads_without_torch_and_pydantic():
    _, loaded = loaded_by("from dsx.config.keys import reference; reference()")
    assert not loaded & {"pydantic", *HEAVY}
