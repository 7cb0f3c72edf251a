"""From TrainingArguments, their DeepSpeed JSON and a model to the resolved config of a run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    get_scheduler,
)
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, set_hf_deepspeed_config
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils import GENERATION_CONFIG_NAME

from dsx.checkpoint.formats import slices
from dsx.checkpoint.formats.huggingface import names
from dsx.checkpoint.formats.huggingface import weights as hf
from dsx.checkpoint.run.export import fill_base
from dsx.checkpoint.run.names import spec_of
from dsx.config.adapter import SETTINGS
from dsx.config.batch import ACCUMULATION, MICRO, TRAIN
from dsx.config.load import content_of, raise_all
from dsx.config.ordinary import completed, decided
from dsx.config.resolve import resolve
from dsx.config.run import RunConfig
from dsx.config.sources import is_hub_name
from dsx.config.wording import at
from dsx.errors import ConfigError, ModelError
from dsx.hub.on_meta import parameters_on_meta
from dsx.models.param import ParamSpec
from dsx.models.params import frozen_names, stored_specs
from dsx.models.spec import HubModel, Model
from dsx.models.transformers_settings import first_line, quiet_transformers
from dsx.parallel.groups import Groups
from dsx.parallel.limits import row_multiple
from dsx.parallel.mesh import ALONE, Coordinates
from dsx.trainer.as_given import require_as_made, require_classes_own_code, require_no_code_of_its_own

_MOST_TOKENS, _BLOCK = 2048, 64
_OF_ADAPTER = re.compile(r"\.lora_|\.modules_to_save\.")  # in the names of PEFT's modules
# What transformers raises of configs that it cannot use.
_OF_CONFIGS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError),
    StrictDataclassError,
)
_AROUND = re.compile(r"\.(modules_to_save|original_module|base_layer)\.")


@dataclass(frozen=True, slots=True)
class GivenModel:
    """What Trainer was given as a model.

    Attributes:
        skeleton: The same model, its parameters without storage: its names, and what its forward takes.
        block: ``dsx.model`` for it.
        whole: The model itself, if it was given with its weights.
        adapter: PEFT's folder of its adapter, if it has one.
        says: What its config says where layers are made of something else.
    """

    hf_config: PreTrainedConfig
    skeleton: PreTrainedModel
    block: dict[str, Any]
    whole: PreTrainedModel | None
    adapter: str | None = None
    says: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, output: Path) -> GivenModel:
        """Read what was given; the adapter of a model of PEFT's is written below ``output``.

        Raises:
            ConfigError: A folder or a name that is not there.
            ModelError: No causal language model of transformers, or one whose weights cannot be taken.
        """
        if isinstance(model, str | Path):
            folder = _folder(str(model))
            config = _config_of(folder)
            skeleton = _skeleton(config)
            if (Path(folder) / GENERATION_CONFIG_NAME).is_file():
                skeleton.generation_config = GenerationConfig.from_pretrained(folder)
            return cls(config, skeleton, {"path": folder}, None)
        if isinstance(model, PreTrainedConfig):
            return cls(model, _skeleton(model), {"config": _content(model)}, None)
        return cls._of_model(model, output)

    @property
    def generation(self) -> GenerationConfig | None:
        """Its generation settings, or those that its config makes; None if it does not generate."""
        found: GenerationConfig | None = getattr(self.skeleton, "generation_config", None)
        return found

    @classmethod
    def _of_model(cls, given: Any, output: Path) -> GivenModel:
        """Read a model with its weights, which must be what its class makes of its config."""
        adapted = hasattr(given, "peft_config")
        if adapted:
            _require_adapter_alone(given)
        model = _usable(given.get_base_model() if adapted else given)
        where, config = f"Trainer(model={type(model).__name__})", deepcopy(model.config)
        require_no_code_of_its_own(model, where)
        made = _made(model, config)
        padding = _padding_row(model)
        if padding != _padding_row(made):
            # A pad_token_id that was set later, or a table that was made anew: the table's own counts.
            config.pad_token_id = padding
            made = _made(model, config)
        made.generation_config = getattr(model, "generation_config", None)
        alike = _with_adapter(_made(model, config), given) if adapted else made
        if alike is not None:
            require_as_made(model, alike, where)
        return cls(
            hf_config=model.config,
            skeleton=made,
            block={"config": _content(config)},
            whole=model,
            adapter=_adapter(given, output) if adapted else None,
            says={"pad_token_id": model.config.pad_token_id}
            if model.config.pad_token_id != config.pad_token_id
            else {},
        )


def _padding_row(model: PreTrainedModel) -> int | None:
    """The row of the word embedding that gets no gradient."""
    table = model.get_input_embeddings()
    for inside in ("original_module", "base_layer"):  # of what PEFT puts around it
        table = getattr(table, inside, table)
    row: int | None = getattr(table, "padding_idx", None)
    return row


def _content(config: PreTrainedConfig) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return content


def _with_adapter(made: PreTrainedModel, given: Any) -> nn.Module | None:
    """A model as PEFT makes it, with the given one's adapter; None for a kind that dsx.adapter refuses."""
    from peft import LoraConfig, get_peft_model

    config = deepcopy(given.peft_config["default"])
    if not isinstance(config, LoraConfig):
        return None
    config.inference_mode, config.init_lora_weights = False, True
    base: nn.Module = get_peft_model(made, config).get_base_model()
    return base


def _folder(name: str) -> str:
    """A local model folder, or that of the hub's cache."""
    if Path(name).is_dir():
        return name
    if not is_hub_name(name, frozenset()):
        raise ConfigError(at("model", name), "there is no such folder", "give a model folder or a hub name")
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return snapshot_download(name, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        what = f"there is no such folder, and the hub does not give it ({str(error).splitlines()[0]})"
        raise ConfigError(at("model", name), what, "download it first, and give the folder") from None


def _config_of(folder: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder)
    except (*_OF_CONFIGS, OSError) as error:
        what = f"transformers reads no config there ({first_line(error)})"
        fix = "give the folder of a model of transformers"
        if (Path(folder) / SETTINGS).is_file():
            what = "it is the folder of an adapter, not of a model"
            fix = 'give its model\'s, and write "adapter": {"path": ...} with this one into the dsx block'
        raise ConfigError(at("model", folder), what, fix) from None


def _adapter(model: Any, output: Path) -> str:
    """The folder of a PEFT model's adapter, written by the first rank.

    Raises:
        ModelError: The vocabulary is not that of the model's folder, so that PEFT would write the model's own
            tables into the adapter's.
    """
    from peft import get_peft_model_state_dict

    own = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    for name in sorted(get_peft_model_state_dict(model).keys() - own):
        if not _AROUND.search(name):
            raise ModelError(
                f"Trainer(model={type(model).__name__}): {name}",
                "its vocabulary was resized and the adapter does not train it: neither the adapter's folder "
                "nor the model's would have the new rows",
                "name it in the adapter's modules_to_save, or save the resized model and make the adapter of "
                "what is loaded from there",
            )
    folder = output / "given_adapter"
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder, save_embedding_layers=False)
    if dist.is_initialized():
        dist.barrier()
    return str(folder)


def _require_adapter_alone(model: Any) -> None:
    """Refuse a PEFT model that trains something else than its whole adapter, the only one it has."""
    where = f"Trainer(model={type(model).__name__})"
    wrapped, there = hasattr(model, "get_base_model"), list(model.peft_config)
    if not wrapped or there != ["default"]:
        raise ModelError(
            where,
            f"its adapters are {', '.join(there)}"
            if wrapped
            else "its adapter was added to the model itself",
            'give what PEFT\'s get_peft_model makes, with one adapter, called "default" as it calls it',
        )
    for name, parameter in model.named_parameters():
        added = _OF_ADAPTER.search(name) is not None
        if added and not parameter.requires_grad:
            fix = "make the adapter with is_trainable=True, or leave its parameters trained"
            raise ModelError(f"{where}: {name}", "a part of the adapter is frozen", fix)
        if parameter.requires_grad and not added:
            raise ModelError(
                f"{where}: {name}",
                "it is trained beside the adapter, which dsx.Trainer does not do",
                "freeze it, or name its module in the adapter's modules_to_save",
            )


def _usable(model: Any) -> PreTrainedModel:
    """The model, if its class and weights are ones that dsx can take."""
    where = f"Trainer(model={type(model).__name__})"
    if not isinstance(model, PreTrainedModel):
        fix = "give a model folder, a hub name, a config or a causal language model of transformers"
        raise ModelError(where, "it is no model of transformers", fix)
    if type(model).__name__ not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ModelError(where, "dsx trains causal language models", "give a ...ForCausalLM")
    if not type(model).__module__.startswith("transformers."):
        what = f"its class is one of {type(model).__module__}, and dsx makes layers of those of transformers"
        raise ModelError(where, what, "give an object of transformers' own class")
    _require_one_model(model.config)
    source = model.config.name_or_path or "the model's folder"
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ModelError(
            where,
            "transformers has cut it over all ranks (deepspeed.zero.Init), because the TrainingArguments "
            "were made before, and their JSON asks for ZeRO-3; here ranks hold different layers",
            f'give its folder or name, Trainer(model="{source}"), of which each rank reads its own part; or '
            "make the model before the TrainingArguments",
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            where, "it has no weights, being on the meta device", "give its config or its folder"
        )
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        what = "transformers has cut its tensors over ranks (tp_plan, distributed_config)"
        raise ModelError(where, what, f'load it whole, or give its folder, Trainer(model="{source}")')
    if getattr(model, "is_quantized", False):
        raise ModelError(where, "its weights are quantised", "give the folder of the weights themselves")
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    if tied != bool(getattr(model.config.get_text_config(), "tie_word_embeddings", tied)):
        raise ModelError(
            where,
            f"its head and word embedding are {'one tensor' if tied else 'two tensors'}, and its config says "
            f"tie_word_embeddings = {not tied}",
            "set model.config.tie_word_embeddings to what they are",
        )
    return model


def _made(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """Another model of the class and config, its parameters on the meta device, its buffers with values."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)  # as from_pretrained does
    try:
        with quiet_transformers(), parameters_on_meta():
            return _of_config(type(model), config)
    finally:
        torch.set_default_dtype(usual)


def _skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            at("model_type", config.model_type), "dsx trains causal language models", "give another model"
        )
    _require_one_model(config)
    with torch.device("meta"):
        return _of_config(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def _require_one_model(config: PreTrainedConfig) -> None:
    """Refuse a config that has its language model's as a part."""
    if config.get_text_config(decoder=True) is not config:
        raise ModelError(
            at("model_type", config.model_type),
            "it is composed of several models, and dsx.Trainer takes a language model by itself",
            "train its text by a dsx config that names the folder as dsx.model.path",
        )


def _of_config(
    kind: Callable[[PreTrainedConfig], PreTrainedModel], config: PreTrainedConfig
) -> PreTrainedModel:
    try:
        return kind(deepcopy(config))
    except _OF_CONFIGS as error:
        raise ModelError(
            "Trainer(model=)",
            f"transformers makes no model of its config ({first_line(error)})",
            "set in the config what the model is made of; a pad_token_id is a row of the word embedding, to "
            "which resize_token_embeddings adds some",
        ) from None


def _row_unit(parallel: Any) -> int:
    """What rows have to divide by, as far as the block says it rightly."""
    said = [(parallel if isinstance(parallel, dict) else {}).get(key) for key in ("context", "tensor")]
    return row_multiple(*(each if type(each) is int and each > 0 else 1 for each in said))


def configure(
    args: Any, given: GivenModel, *, world_size: int, steps: int, longest: int | None, shares: int | None
) -> RunConfig:
    """The resolved config.

    What is "auto" in the DeepSpeed JSON becomes what transformers' HfTrainerDeepSpeedConfig makes of it, with
    the data-parallel degree in the place of the number of processes.

    ``args.deepspeed`` is a JSON with a ``dsx`` block, or its content. Layers are balanced and memory is
    estimated by the tokens of a sequence, ``longest``; None if that is unknown. ``shares`` is the
    data-parallel degree; None before it is known.

    Raises:
        ConfigError: Keys that are wrong, or that arguments decide.
    """
    content = _with_block(args)
    block = content.pop("dsx")
    _fill(content, args, given, steps, shares)
    if given.adapter is not None:
        if "adapter" in block:
            where, what = (
                at("dsx.adapter", block["adapter"]),
                "the model that was given has an adapter already",
            )
            raise ConfigError(where, what, "remove it, or give the model without an adapter")
        block["adapter"] = {"path": given.adapter}
    # transformers below 5.18 has the older name alone; newer ones keep both alike.
    asked = getattr(args, "activation_checkpointing", args.gradient_checkpointing)
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")  # the latter below 5.18
    own = next((name for name in names if hasattr(type(given.whole), name)), "")
    asked = asked or (own and getattr(given.whole, own))
    if asked and block.setdefault("recompute", "full") == "none":
        what = "activation_checkpointing asks for blocks to be computed again"
        raise ConfigError(at("dsx.recompute", "none"), what, "leave one of them out")
    most = getattr(given.hf_config, "max_position_embeddings", None) or _MOST_TOKENS
    # Of whole blocks, which tensor-parallel and context-parallel ranks can share, as batches are made to be.
    unit = _row_unit(block.get("parallel"))
    whole = math.lcm(_BLOCK, unit)
    fits = next((most - most % size for size in (whole, unit) if size <= most), most)
    length = min(-(-(longest or _MOST_TOKENS) // whole) * whole, fits)
    train = {"steps": max(steps, 1), "output": args.output_dir, "seed": args.seed, "resume": "never"}
    freeze = (block.get("train") or {}).get("freeze", ())
    train["freeze"] = [*freeze, *_frozen(given)]
    block = completed(block, model=given.block, length=length, train=train)
    run = resolve({**content, "dsx": block}, world_size=world_size)
    if given.whole is not None:
        _require_precision(given.whole, run)
        _require_trained_as_given(run, given, freeze)
    if not isinstance(run.model, HubModel):
        require_classes_own_code(given.skeleton, "Trainer(model=)")
    return run


def _require_precision(whole: PreTrainedModel, run: RunConfig) -> None:
    """Refuse to compute in fp32 with weights that are less exact, as DeepSpeed does."""
    for name, parameter in whole.named_parameters():
        if run.precision == "fp32" and parameter.dtype != torch.float32:
            raise ModelError(
                f"Trainer(model=): {name}",
                f"it is {str(parameter.dtype).removeprefix('torch.')}, and the run computes in fp32, which "
                "DeepSpeed refuses",
                "set bf16=True in the TrainingArguments, or load the model with dtype=torch.float32",
            )


def _frozen(given: GivenModel) -> list[str]:
    """What ``dsx.train.freeze`` says of the parameters that the given model does not train."""
    if given.whole is None or given.adapter is not None:
        return []
    held = dict(given.whole.named_parameters())
    head = names.head_of(next(iter(held)))  # as files call it
    frozen = [head if name in names.OTHER_HEADS else name for name in held if not held[name].requires_grad]
    return [f"^({'|'.join(map(re.escape, frozen))})$"] if frozen else []


def _require_trained_as_given(run: RunConfig, given: GivenModel, freeze: Sequence[str]) -> None:
    """Refuse a run that would train other parameters than the given model, less what ``freeze`` names.

    Names in a model and in its files differ, or one tensor here is several there.

    Raises:
        ModelError: Names one.
    """
    if given.whole is None or given.adapter is not None:
        return
    held = dict(given.whole.named_parameters(remove_duplicate=False))
    for spec in run.param_specs:
        own = names.in_memory(spec)
        theirs = [held[name] for each in own.hf for name in names.stored_names(own, each) if name in held]
        said = all(frozen_names(spec, freeze).values())
        if {each.requires_grad and not said for each in theirs} - {spec.trained}:
            raise ModelError(
                f"Trainer(model=): {spec.hf[0]}",
                f"the model {'does not train' if spec.trained else 'trains'} it, and it would be "
                f"{'trained' if spec.trained else 'frozen'} here",
                'say it by dsx.train.freeze, or set dsx.model.implementation to "transformers"',
            )


def read_json(args: Any) -> dict[str, Any]:
    """The content of the arguments' DeepSpeed JSON. Raises ConfigError if there is none."""
    if not args.deepspeed:
        raise ConfigError(
            "TrainingArguments(deepspeed=None)",
            "dsx.Trainer reads its layout from a DeepSpeed JSON",
            'give deepspeed="config.json", with "dsx": {"parallel": {...}} in it',
        )
    return content_of(args.deepspeed if isinstance(args.deepspeed, Mapping) else Path(args.deepspeed))


def _with_block(args: Any) -> dict[str, Any]:
    """The JSON, with a dsx block that says nothing of what the arguments decide."""
    content = read_json(args)
    name = args.deepspeed if isinstance(args.deepspeed, str) else "config"
    block = content.get("dsx")
    if not isinstance(block, dict):
        raise ConfigError(
            f"{name}: dsx",
            "the config has no dsx block",
            'add "dsx": {"parallel": {"tensor": 1, "pipeline": 2}}, or use transformers.Trainer',
        )
    raise_all(name, list(decided(block)))
    return content


def _fill(content: dict[str, Any], args: Any, given: GivenModel, steps: int, shares: int | None) -> None:
    """Replace every "auto", and add what the Trainer says outside of the JSON."""
    for key in (MICRO, ACCUMULATION, "gradient_clipping"):
        content.setdefault(key, "auto")
    if "bf16" not in content and "bfloat16" in content:  # its former name, which transformers does not know
        content["bf16"] = content.pop("bfloat16")
    for name in ("bf16", "fp16"):
        block = content.get(name, {})
        if getattr(args, name) and isinstance(block, dict) and block.get("enabled") is None:
            content[name] = {**block, "enabled": "auto"}
    if "optimizer" not in content:
        content |= _optimizer(args)
    if shares is None:  # the product of the others, once their number is known
        content.pop(TRAIN, None)
    values = {each.name: getattr(args, each.name) for each in fields(args)}
    # TrainingArguments as HfTrainerDeepSpeedConfig reads them, with another number of processes.
    view = SimpleNamespace(**values, get_warmup_steps=args.get_warmup_steps, world_size=shares or 1)
    try:
        filled = HfTrainerDeepSpeedConfig(content)
        filled.trainer_config_process(view)
        filled.trainer_config_finalize(view, SimpleNamespace(config=given.hf_config), max(steps, 1))
    except ValueError as error:
        differing = "; ".join(line.strip("- ") for line in str(error).splitlines()[1:-1])
        raise ConfigError(
            "TrainingArguments(deepspeed=)",
            f"the JSON says something else than the arguments: {differing} (data parallel {shares or 1})",
            'write "auto" for these keys',
        ) from None
    finally:
        set_hf_deepspeed_config(args.hf_deepspeed_config)
    content.clear()
    content.update(filled.config)


def _optimizer(args: Any) -> dict[str, Any]:
    """DeepSpeed's keys for the optimizer of the arguments."""
    plain = {"lr": "auto", "weight_decay": "auto"}
    if args.optim == "sgd":
        return {"optimizer": {"type": "SGD", "params": plain}, "zero_allow_untested_optimizer": True}
    adam = {**plain, "betas": "auto", "eps": "auto", "torch_adam": True}
    return {"optimizer": {"type": "AdamW", "params": adam}}


def schedule(args: TrainingArguments, steps: int, optimizer: Any) -> Any:
    """The arguments' schedule of the learning rate."""
    return get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )


def require_schedule(args: TrainingArguments, steps: int) -> None:
    """Refuse lr_scheduler_kwargs that the schedule does not take, before weights are read."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    try:
        schedule(args, steps, optimizer)
    except (TypeError, ValueError) as error:
        name = args.lr_scheduler_type.value
        raise ConfigError(
            at("lr_scheduler_kwargs", args.lr_scheduler_kwargs),
            f'the schedule "{name}" does not take it ({error})',
            "give what transformers.get_scheduler takes",
        ) from None


def parameter_groups(pipeline: nn.Module, given: GivenModel, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters as transformers' Trainer groups them: no decay on biases and norms."""
    decayed = set(Trainer.get_decay_parameter_names(None, given.skeleton))
    there = dict(given.skeleton.named_parameters(remove_duplicate=False))
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in pipeline.parameters():
        if parameter.requires_grad:
            spec = spec_of(parameter)
            name = _found(there, spec, names.in_memory(spec).hf[0])
            groups[name in decayed or name not in there].append(parameter)  # the others are an adapter's
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]


def weights_of(whole: PreTrainedModel, model: Model, groups: Groups) -> Callable[[int, nn.Module], None]:
    """The function that gives layers their parts of a transformers model's weights, for ``load_layer``.

    Raises:
        ModelError: The model has a tensor that its config does not tell of, or lacks one.
    """
    held = {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in whole.state_dict(keep_vars=True).items()
        if not _OF_ADAPTER.search(name)
    }
    specs = stored_specs(model)
    _require_all(held, [names.in_memory(spec) for spec in specs if not spec.adapts])

    def read(spec: ParamSpec, at: Coordinates = ALONE) -> Tensor:
        own = names.in_memory(spec)
        joined = hf.join(own, lambda name: held[_found(held, own, name)])
        assert joined is not None
        return slices.part_of(own, joined, at)

    buffers = [spec for spec in specs if spec.buffer]
    return torch.no_grad()(partial(fill_base, read, buffers, groups.at))


def _found(held: Mapping[str, Any], spec: ParamSpec, name: str) -> str:
    """The name under which transformers' module has a tensor; ``name`` itself if it has none."""
    return next((other for other in names.stored_names(spec, name) if other in held), name)


def _require_all(held: Mapping[str, Any], specs: Iterable[ParamSpec]) -> None:
    used: set[str] = set()
    for spec in specs:
        for name in spec.hf:
            if _found(held, spec, name) not in held:
                raise ModelError(
                    "Trainer(model=)", f"it has no tensor {name}", "give a model as its class makes it"
                )
            used.update(names.stored_names(spec, name))
    lost = sorted(name for name in held.keys() - used if not names.is_buffer(name))
    if lost:
        raise ModelError(
            "Trainer(model=)",
            f"it has tensors that its config does not tell of: {', '.join(lost[:4])}",
            "give a model as its class makes it",
        )
