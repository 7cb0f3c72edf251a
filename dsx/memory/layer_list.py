"""Memory of a layer list that dsx did not write: what dsx.PipelineModule takes, recorded layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from dsx.config.batch import MICRO, resolve_batch
from dsx.config.deepspeed import (
    deepspeed_problems,
    offloads_optimizer,
    pipeline_problems,
    precision,
    zero_stage,
)
from dsx.config.load import raise_all
from dsx.config.schema import ZeroConfig
from dsx.config.wording import at
from dsx.errors import ConfigError, LayoutError, ModelError
from dsx.memory.device import fake_build
from dsx.memory.estimate import Job, RunMemory, enough_micro_batches, estimate_run
from dsx.memory.job import faults_of, require_learned, state_settings
from dsx.memory.layer_record import DeviceKind, LayerRecord, TensorForm
from dsx.memory.layer_recorder import record_layer
from dsx.models.flops import Precision
from dsx.models.param import Init, ParamSpec
from dsx.nn.embedding import TiedUse
from dsx.nn.loss import of_head
from dsx.nn.parameters import DTYPES
from dsx.parallel.layout import Layout
from dsx.parallel.mesh import Mesh
from dsx.parallel.partition import partition
from dsx.parallel.reduction import reduces_micro_batches
from dsx.schedules.program import Program
from dsx.schedules.schedule import lower


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerList:
    """A model as :class:`dsx.PipelineModule` takes it, and what one micro-batch of it looks like.

    Attributes:
        layers: LayerSpecs, TiedLayerSpecs, modules and functions, in order.
        inputs: The first layer's input: a tensor or a tuple of tensors, whose values do not matter.
        labels: The loss's second argument; None without a loss.
        loss_fn: The loss; None if the last layer gives it.
    """

    layers: Sequence[Any]
    inputs: Tensor | tuple[Tensor, ...]
    labels: Tensor | tuple[Tensor, ...] | None = None
    loss_fn: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListRecords:
    """Records of a layer list, made for one ZeRO stage or another.

    Attributes:
        layers: The record of every layer.
        names: The layers' class names.
        samples: Those of its micro-batch.
        of_loss: The record of the loss; None if the last layer gives it.
        ties: Index of a later use of a tied layer -> that of the first.
        remakes: False: a list's layers share nothing that is made of positions.
    """

    layers: Sequence[LayerRecord]
    names: Sequence[str]
    samples: int
    of_loss: LayerRecord | None
    ties: Mapping[int, int] = field(default_factory=dict)
    remakes: bool = False

    def offloads(self, index: int) -> bool:
        """None do: what is computed again of such a list is the list's own."""
        del index
        return False

    def layer(self, index: int, *, divided: bool, hooked: bool) -> LayerRecord:
        """The record of a layer; it was made for the run's schedule and ZeRO stage."""
        del divided, hooked
        return self.layers[index]

    def loss(self) -> LayerRecord | None:
        """That of the loss."""
        return self.of_loss

    def parameter(self, index: int, name: str) -> str:
        """Name of the parameter that a layer's record calls ``name``."""
        return f"{self.ties.get(index, index)}.{name}"

    def elements(self, *, trained: bool = False) -> tuple[int, ...]:
        """Parameters of every layer, or those that are trained; tied ones count at each use."""
        return tuple(
            sum(prod(each.shape) for each in record.parameters if each.trains or not trained)
            for record in self.layers
        )


def layers_job(
    make: Callable[[], LayerList],
    config: Mapping[str, Any],
    *,
    world_size: int = 1,
    pipeline: int = 1,
    chunks: int = 1,
    schedule: str = "auto",
    partition_method: str | Sequence[int] = "parameters",
    zero: ZeroConfig | None = None,
    device: DeviceKind = "cuda",
    capacity_bytes: int | None = None,
    recorded: ListRecords | None = None,
) -> Job:
    """The run of a layer list as the memory estimate takes it.

    Args:
        make: Makes the list, and its micro-batch, on whatever device torch is told to.
        config: DeepSpeed's keys.
        world_size: Ranks.
        pipeline: Pipeline degree; the ranks that it leaves are data-parallel.
        chunks: Virtual stages per pipeline rank.
        schedule: As :class:`dsx.PipelineModule` takes it.
        partition_method: As there.
        zero: When ZeRO communicates; the default by default.
        device: Whose kernels run.
        capacity_bytes: What a device has for tensors; None for enough.
        recorded: What :func:`record_list` gave for these; None to record it here.

    Raises:
        ConfigError: A key that cannot work with a pipeline, or whose memory dsx does not know.
        LayoutError: Degrees that do not fit.
        ModelError: A layer whose memory dsx does not know.
    """
    if pipeline < 1 or world_size % pipeline:
        raise LayoutError(
            f"{world_size} ranks in pipelines of {pipeline}", "they do not divide", "use a divisor"
        )
    mesh = Mesh.of(pp=pipeline, dp=world_size // pipeline, tp=1)
    raise_all("the config", deepspeed_problems(dict(config)) or pipeline_problems(dict(config), mesh))
    declared = declared_bytes(config)
    require_optimizer(config)
    settings = zero or ZeroConfig()
    name = ("interleaved" if chunks > 1 else "1f1b") if schedule == "auto" else schedule
    program, batch = Program(name=name), resolve_batch(config, mesh.num_shares)
    offloads, stage = offloads_optimizer(config), zero_stage(config)
    each = reduces_micro_batches(settings.reduce, stage, offloads=offloads, micro_batches=batch.accumulation)
    require_learned(config, reduces_micro_batches=each)
    states = state_settings(config, settings, declared, device, reduces_micro_batches=each)
    if recorded is None:
        recorded = record_list(make, precision(config), device, hooked=zero_stage(config) == 3)
    if batch.micro != recorded.samples:
        raise ConfigError(
            at(MICRO, batch.micro),
            f"the list's micro-batch has {recorded.samples} samples",
            "give both the same size",
        )
    specs = tuple(_specs(recorded, states.width))
    stages = replace(
        partition(
            partition_method,
            pipeline * chunks,
            pipeline,
            parameters=recorded.elements(),
            costs=None,
            names=recorded.names,
        ),
        placement=program.placement,
    )
    count = enough_micro_batches(program, pipeline, batch.accumulation, device)
    return Job(
        records=recorded,
        layout=Layout(mesh=mesh, stages=stages, params=specs, zero_stage=zero_stage(config)),
        schedule=lower(program.build(pipeline, chunks, count)),
        left_out=batch.accumulation - count,
        releases=False,
        built_width=torch.get_default_dtype().itemsize,
        states=states,
        device=device,
        capacity_bytes=capacity_bytes,
    )


def declared_bytes(config: Mapping[str, Any]) -> int | None:
    """``dsx.optimizer_bytes`` of a list's config. Raises ConfigError for what its ``dsx`` cannot have."""
    faults_of(config)  # which take no memory
    block = config.get("dsx") or {}
    more = sorted(map(str, {*block} - {"optimizer_bytes", "faults"}))
    if more:
        raise ConfigError(
            f"dsx.{more[0]}", "the list and the options say it", "leave all but dsx.optimizer_bytes out"
        )
    value = block.get("optimizer_bytes")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigError(at("dsx.optimizer_bytes", value), "not a number of bytes", "use 0 or more, whole")
    return value


def require_optimizer(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a config names none: a model of one's own has no usual one."""
    if "optimizer" not in config:
        raise ConfigError("optimizer", "it is missing", "name the optimizer whose states are to be counted")


def estimate_layers(make: Callable[[], LayerList], config: Mapping[str, Any], **options: Any) -> RunMemory:
    """What every rank's memory will hold in a run of a layer list; arguments as of :func:`layers_job`."""
    return estimate_run(layers_job(make, config, **options))


def record_list(
    make: Callable[[], LayerList], precision: Precision, device: DeviceKind, *, hooked: bool
) -> ListRecords:
    """Record the layers of a list, equal ones once.

    Args:
        make: Makes it.
        precision: What its parameters become; in fp32 they keep their dtype.
        device: Whose kernels run.
        hooked: Whether ZeRO-3 gathers parameters.

    Raises:
        ModelError: A layer whose memory dsx does not know.
    """
    # torch composes some operators, dropout among them, of others on meta tensors, but not on a GPU.
    place = "cpu" if device == "cpu" else "paper"
    with fake_build(place), torch.device(place):
        made = make()
        if not isinstance(made, LayerList):
            raise ModelError(
                f"{getattr(make, '__name__', 'the function')}()",
                f"it returns {type(made).__name__}",
                "return dsx.LayerList(layers=..., inputs=..., labels=..., loss_fn=...)",
            )
        if not made.layers:
            raise ModelError("LayerList", "it has no layers", "give at least one")
        owners: dict[Tensor, tuple[int, nn.Module]] = {}
        tied: dict[str, tuple[int, nn.Module]] = {}
        ties: dict[int, int] = {}
        known: dict[Any, LayerRecord] = {}
        records, names, forms = [], [], _forms(made.inputs)
        labels = () if made.labels is None else _forms(made.labels)
        samples = forms[0].shape[0] if forms[0].shape else 1
        for index, entry in enumerate(made.layers):
            layer, name = _built(entry, index, tied, ties)
            module = getattr(layer, "tied_module", layer)
            _require_recordable(module, index, name, owners)
            if precision != "fp32" and isinstance(module, nn.Module):
                _cast(module, DTYPES[precision])
            ends = index == len(made.layers) - 1 and of_head(made.loss_fn) is not None
            key = (_fingerprint(layer), tuple(forms), ends)
            if key not in known:
                with_loss = {"loss_fn": made.loss_fn, "more": labels, "category": "logits"} if ends else {}
                known[key] = _record(layer, index, name, forms, place, hooked=hooked, **with_loss)
            record = known[key]
            _require_known(record, index, name)
            records.append(record)
            names.append(name)
            forms = [form._replace(differentiable=form.differentiable) for form in record.outputs]
        loss = None
        if made.loss_fn is not None and not ends:
            loss = record_layer(made.loss_fn, forms, device=place, category="logits", more=labels)
            forms = list(loss.outputs)
        if len(forms) != 1 or forms[0].numel != 1:
            raise ModelError(
                "LayerList",
                f"its {'last layer' if loss is None else 'loss'} gives {', '.join(map(str, forms))}",
                "give a loss_fn that returns one number",
            )
    last = len(records) - 1
    wrong = [index for index in ties if index != last]
    if wrong:
        raise ModelError(
            f"layer {wrong[0]}",
            "the estimate knows ties of a layer with the last one alone",
            "tie with the last layer, or give the layers weights of their own for the estimate",
        )
    return ListRecords(layers=tuple(records), names=names, samples=samples, of_loss=loss, ties=ties)


def _record(
    layer: Callable[..., Any], index: int, name: str, forms: list[TensorForm], place: str, **how: Any
) -> LayerRecord:
    """One layer's record, whatever the layer does told as a ModelError."""
    try:
        return record_layer(layer, forms, device=place, **how)
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"layer {index} ({name})",
            f"it cannot run without values: {type(error).__name__}: {str(error).split('. ')[0]}",
            "make the layers and the micro-batch fit; a layer that looks at values, leaves torch or is "
            "compiled cannot be recorded",
        ) from error


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """What DeepSpeed does to the layers: parameters get the dtype of the config, buffers keep theirs."""
    for inner in module.modules():
        for parameter in inner.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


def _build(entry: Any, index: int) -> nn.Module:
    """What a LayerSpec builds, its errors told as a ModelError."""
    try:
        module: nn.Module = entry.build()
    except (Exception, SystemExit) as error:
        what = f"it cannot be built: {type(error).__name__}: {error}"
        raise ModelError(f"layer {index}", what, "mend its class, or its arguments") from error
    return module


def _built(
    entry: Any, index: int, tied: dict[str, tuple[int, nn.Module]], ties: dict[int, int]
) -> tuple[Callable[..., Any], str]:
    """A layer as something to call, and its class's name."""
    key = getattr(entry, "key", None)
    if key is not None:
        if key in tied:
            ties[index] = tied[key][0]
        else:
            tied[key] = index, _build(entry, index)
        module = tied[key][1]
        layer = module if entry.forward_fn is None else TiedUse(module, entry.forward_fn)
        return layer, type(module).__name__
    if hasattr(entry, "typename"):
        module = _build(entry, index)
        return module, type(module).__name__
    if not callable(entry):
        raise ModelError(
            f"layer {index} ({type(entry).__name__})",
            "it is neither a LayerSpec, a module nor a function",
            "give each layer as a LayerSpec, a torch.nn.Module or a callable",
        )
    name = type(entry).__name__ if isinstance(entry, nn.Module) else getattr(entry, "__name__", "")
    return entry, name


def _forms(given: Tensor | tuple[Tensor, ...]) -> list[TensorForm]:
    tensors = given if isinstance(given, tuple) else (given,)
    for x in tensors:
        if not isinstance(x, Tensor):
            raise ModelError("LayerList", f"its micro-batch holds {type(x).__name__}", "give tensors")
    return [
        TensorForm(tuple(x.shape), str(x.dtype).removeprefix("torch."), x.element_size(), False)
        for x in tensors
    ]


def _require_recordable(
    module: Any, index: int, name: str, owners: dict[Tensor, tuple[int, nn.Module]]
) -> None:
    """Refuse what is known to be recorded wrong, before anything runs; ``owners`` gains the parameters."""
    if not isinstance(module, nn.Module):
        return
    for inner in module.modules():
        if isinstance(inner, nn.RNNBase | nn.modules.conv._ConvNd):  # noqa: SLF001 (the base of all convolutions)
            raise ModelError(
                f"layer {index} ({name})",
                f"dsx does not know what the kernels of {type(inner).__name__} take",
                "estimate the list without it",
            )
    for parameter in module.parameters():
        first, owner = owners.setdefault(parameter, (index, module))
        if owner is not module:
            raise ModelError(
                f"layer {index} ({name})",
                f"a parameter of it is layer {first}'s, too",
                "tie them with a TiedLayerSpec",
            )


def _require_known(record: LayerRecord, index: int, name: str) -> None:
    if any(not each.trains for each in record.parameters):
        raise ModelError(
            f"layer {index} ({name})",
            "some of its parameters are frozen, and dsx has not learned what memory that takes",
            "estimate the list with all of them trained: it takes more",
        )


def _specs(records: ListRecords, width: int) -> Iterator[ParamSpec]:
    """The parameters of a list, tied ones once."""
    again = set(records.ties.values())
    for index, record in enumerate(records.layers):
        if index in records.ties:
            continue
        for each in record.parameters:
            if each.width != width:
                raise ModelError(
                    f"parameter {index}.{each.name}",
                    f"it has {each.width} bytes an element, and the config trains in {width}",
                    "give all layers one dtype, that of the config",
                )
            yield ParamSpec(
                name=f"{index}.{each.name}",
                layer=index,
                shape=each.shape,
                init=Init(kind="zeros"),
                hf=("",),
                tie=str(index) if index in again else None,
            )


def _fingerprint(layer: Any) -> Any:
    """What two layers that do the same have alike: classes, sizes and settings; other objects themselves."""
    if not isinstance(layer, nn.Module) or hasattr(layer, "tied_module"):
        return id(layer)
    return tuple(
        (path, type(module), tuple((key, _facts(value)) for key, value in sorted(vars(module).items())))
        for path, module in layer.named_modules()
    )


def _facts(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, Mapping):
        return tuple((str(key), _facts(each)) for key, each in value.items())
    if isinstance(value, list | tuple | set):
        return type(value).__name__, tuple(map(_facts, value))
    return type(value) if isinstance(value, nn.Module) else id(value)
