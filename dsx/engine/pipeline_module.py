"""A list of layers, cut into pipeline stages: the constructor of deepspeed.pipe.PipelineModule."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.runtime.utils import set_random_seed
from torch import nn

from dsx.engine.chunks import Chunks, Loss, Recompute, Tie, checkpoint_non_reentrant
from dsx.engine.p2p import Shards
from dsx.engine.ready_layers import require_context, require_mean, settle
from dsx.engine.settings import Config, settings_of
from dsx.engine.stock_module import (
    NOT_HERE,
    OfRecompute,
    asked,
    check_recompute,
    index_of,
    load_layers,
    require_layers_unpatched,
    save_layers,
    unavailable,
)
from dsx.engine.zero.building import LayerPartitioner, outside_of_init
from dsx.errors import LayoutError, ModelError
from dsx.launch.spared import lean_on_cpu
from dsx.nn.embedding import TiedUse
from dsx.nn.loss import of_head
from dsx.nn.split import WeightGradients
from dsx.parallel.groups import Grid, Groups, make_groups, new_group
from dsx.parallel.mesh import AXES, Mesh
from dsx.parallel.partition import balanced, matches, partition
from dsx.parallel.stages import Placement, StageMap
from dsx.schedules.program import Program

lean_on_cpu()  # here: a stock program imports PipelineModule, and then makes the process group itself


def require_layers(layers: Sequence[Any]) -> None:
    """Raise the same ModelError on every rank, whichever rank builds the layer."""
    for index, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise ModelError(
                f"layer {index} ({type(layer).__name__})",
                "it is neither a LayerSpec, a module nor a function",
                "give each layer as a LayerSpec, a torch.nn.Module or a callable",
            )


def require_head(layers: Sequence[Any], loss_fn: Loss | None) -> None:
    """Raise the same ModelError on every rank if the last layer cannot compute the loss that it is to."""
    if of_head(loss_fn) is None or not layers:
        return
    last = layers[-1]
    if isinstance(last, LayerSpec):
        called = getattr(last, "forward_fn", None) or last.typename.forward
    else:
        called = last.forward if isinstance(last, nn.Module) else last
    try:
        taken = list(inspect.signature(called).parameters.values())
    except ValueError:  # of a function of torch's own, which takes no loss
        taken = []
    if any(each.name == "loss" or each.kind is each.VAR_KEYWORD for each in taken):
        return
    raise ModelError(
        f"layer {len(layers) - 1} ({layer_name(last)})",
        "it takes no loss=, which the last layer is given where loss_fn is a dsx.nn.HeadLoss",
        "have its forward return loss(x, self.weight) if loss is given, use dsx.nn.as_head, or set "
        "chunk_tokens=0 for a loss of logits",
    )


def tied_layers(layers: Sequence[Any]) -> dict[str, list[tuple[int, Any]]]:
    """Tie key -> (index, spec) of its uses. Raises ModelError when the uses name different weights."""
    tied: dict[str, list[tuple[int, Any]]] = {}
    for index, spec in enumerate(layers):
        if isinstance(spec, TiedLayerSpec):
            tied.setdefault(spec.key, []).append((index, spec))
    for key, uses in tied.items():
        names = {tuple(spec.tied_weight_attr) for _, spec in uses}
        if len(names) > 1:
            raise ModelError(
                f"tied layers {key!r}",
                f"their tied_weight_attr differ: {sorted(names)}",
                "name the same weights in every TiedLayerSpec of a key",
            )
    return tied


def cut_layers(
    layers: Sequence[Any],
    method: str | Sequence[int],
    num_ranks: int,
    num_chunks: int,
    placement: Placement,
    *,
    count: Callable[[], Sequence[int]],
) -> StageMap:
    """The layers as virtual stages.

    The case of ``method`` (:func:`dsx.parallel.partition.partition`) does not matter, as in DeepSpeed.
    ``count`` gives the parameters of each layer; it is called where they decide.
    """
    if isinstance(method, str) and not method.lower().startswith("type:"):
        method = method.lower()
    stages = partition(
        method,
        num_ranks * num_chunks,
        num_ranks,
        parameters=count() if method == "parameters" else [0] * len(layers),
        costs=None,
        names=[layer_name(layer) for layer in layers],
    )
    return replace(stages, placement=placement)


def layer_name(layer: Any) -> str:
    """Class name of a spec or module, name of a function."""
    if isinstance(layer, LayerSpec):
        return str(layer.typename.__name__)
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "")


def warn_of_copies(layers: Sequence[Any], stages: StageMap) -> None:
    """Warn of weights that layers of several pipeline ranks share as one Python object.

    Each rank is a process of its own and so has a copy, which gets only the gradients of its own layers.
    Stock DeepSpeed trains the copies apart as well, without a warning.
    """
    users: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        for weight in {id(p) for m in _modules_in(layer) for p in m.parameters() if p.requires_grad}:
            users.setdefault(weight, []).append(index)
    shared = {
        tuple(indices): sorted({stages.rank_of(stages.stage_of(index)) for index in indices})
        for indices in users.values()
    }
    apart = {indices: ranks for indices, ranks in shared.items() if len(ranks) > 1}
    if apart:
        named = "; ".join(_placed(layers, indices, ranks) for indices, ranks in sorted(apart.items()))
        warnings.warn(
            f"PipelineModule: {named} hold the same weights as one object in this script. {_APART}. To train "
            "them as one, list each use as a TiedLayerSpec of one key.",
            stacklevel=3,
        )


_APART = "Each rank trains a copy of its own (stock DeepSpeed does too), and the copies drift apart"


def _warn_of_untied(
    layers: Sequence[Any], key: str, indices: Sequence[int], owners: Sequence[int], untied: Sequence[str]
) -> None:
    """Warn of parameters of a tied module that its ``tied_weight_attr`` leaves out."""
    warnings.warn(
        f"PipelineModule: {_placed(layers, indices, owners)} are tied as {key!r}, but not in "
        f"{', '.join(untied)}. {_APART} where more than one of these layers uses them. To train them as one, "
        "name them too in the tied_weight_attr of every TiedLayerSpec of this key.",
        stacklevel=4,
    )


def _placed(layers: Sequence[Any], indices: Sequence[int], ranks: Sequence[int]) -> str:
    named = ", ".join(f"{index} ({layer_name(layers[index])})" for index in indices)
    return f"layers {named} on pipeline ranks {', '.join(map(str, ranks))}"


def _modules_in(layer: Any) -> Iterator[nn.Module]:
    """The modules in a layer: itself, or those that a function carries as bound, partial or closed over."""
    if isinstance(layer, LayerSpec):
        return
    held: list[Any] = [layer, getattr(layer, "__self__", None)]
    if isinstance(layer, partial):
        held += [layer.func, getattr(layer.func, "__self__", None), *layer.args, *layer.keywords.values()]
    held += [cell.cell_contents for cell in getattr(layer, "__closure__", None) or () if _is_filled(cell)]
    held += getattr(layer, "__defaults__", None) or ()
    yield from (item for item in held if isinstance(item, nn.Module))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that is assigned later
        return False


def _count_parameters(layer: Any, as_stock_draws: bool) -> int:
    """Trainable elements of a layer; of a spec's, by building it (see :func:`cut_layers`)."""
    if isinstance(layer, LayerSpec):
        layer = layer.build() if as_stock_draws else _build_empty(layer.build)
    if isinstance(layer, nn.Module):
        return sum(p.numel() for p in layer.parameters() if p.requires_grad)
    return 0


def _build_empty(build: Callable[[], nn.Module]) -> nn.Module:
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # noqa: BLE001 - a user's constructor may need values, which meta tensors lack
        return build()


class PipelineModule(nn.Module):
    """A model as a sequence of layers, each rank building only its own stages' layers.

    The arguments up to ``dynamic_shape`` are those of ``deepspeed.pipe.PipelineModule``, with the same
    meaning; ``layers`` takes DeepSpeed's LayerSpec and TiedLayerSpec, modules and functions.

    Args:
        layers: The model; each layer takes the previous one's output (a tensor or a tuple of tensors).
        num_stages: Pipeline degree; every other rank is data-parallel.
        topology: A DeepSpeed ProcessTopology with axes among pipe, data and model, in place of
            ``num_stages``.
        loss_fn: ``loss_fn(outputs, labels)``; of a :class:`dsx.nn.HeadLoss` the last layer computes it.
        seed_layers: Whether to seed the generators before each layer with ``base_seed`` plus its index.
        seed_fn: Seeds the generators; DeepSpeed's own by default.
        partition_method: "parameters", "uniform", "type:<regex>", or a list with the number of layers of each
            virtual stage. "parameters" builds every layer once, one at a time, to count: as in stock
            DeepSpeed, whose initial weights a seed of torch thus gives here too. The others do not.
        activation_checkpoint_interval: Number of layers that are recomputed together; 0 for none.
        activation_checkpoint_func: Called as ``func(run, *inputs)``; torch's non-reentrant checkpoint by
            default.
        checkpointable_layers: Class names that may be recomputed.
        dynamic_shape: Whether shapes at stage boundaries may differ from micro-batch to micro-batch.
        num_chunks: Virtual stages per pipeline rank (interleaved schedule when above 1).
        schedule: "auto" (interleaved with chunks, else 1f1b), a name of dsx.schedules.builders.NAMES, or a
            :class:`dsx.schedules.program.Program` with options or rows of its own.
        groups: Process groups made beforehand (:func:`dsx.distributed`), in place of num_stages and topology.
        stage_map: Layers of each virtual stage, in place of ``partition_method``.
        release_outputs: Whether to free a stage's output once it is sent. That is right if the last layer of
            every stage returns fresh tensors that no other operation has taken as an input, as in dsx's own
            models.
        shard_transfers: Whether tensor-parallel ranks each send their share of what crosses a stage boundary,
            and gather what they receive (:mod:`dsx.engine.p2p`). That is right if all of them hold the same
            there, which is compared at first use; dsx's own models do without sequence parallelism.
        split: What the layers were built with, for schedules that split the backward (dsx's own can).
        config: What :func:`dsx.initialize` will be given. At ZeRO-3 each layer is then partitioned over the
            data-parallel ranks as soon as it is built, so that no rank ever holds more than one whole layer.
            Its parameters then keep their shape but not their values, until the engine gathers them. A
            ``deepspeed.zero.Init`` around the call does the same. Without either, layers are built whole.
        load_layer: Called as ``load_layer(index, layer)`` with each LayerSpec's module once it is built, and
            before it is partitioned, to load its weights. A tied module comes once, under the first of its
            indices on this rank.

    Attributes:
        partitioner: The object that partitioned the layers as they were built; None if they are whole.
        replicas: Parameters of the caller's own layers here that every tensor-parallel rank holds whole, with
            their names; empty without tensor parallelism.

    Raises:
        ConfigError: A setting of ``config`` that cannot work with a pipeline.
        LayoutError: The degrees do not fit the number of ranks or layers.
        ModelError: A tied weight differs between its uses, the last layer cannot compute a
            :class:`dsx.nn.HeadLoss`, or nothing matches ``type:``; a parameter without
            values, or tensor-parallel ranks whose layers do not fit together.
    """

    chunks: Chunks

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Loss | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint_non_reentrant,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
        *,
        num_chunks: int = 1,
        schedule: str | Program = "auto",
        groups: Groups | None = None,
        stage_map: StageMap | None = None,
        release_outputs: bool = False,
        shard_transfers: bool = False,
        split: WeightGradients | None = None,
        config: Config | None = None,
        load_layer: Callable[[int, nn.Module], None] | None = None,
    ) -> None:
        super().__init__()
        self.layer_specs: tuple[Any, ...] = tuple(layers)
        require_layers(self.layer_specs)
        require_head(self.layer_specs, loss_fn)
        _require_whole(self.layer_specs, groups.mesh if groups else _mesh(num_stages, topology))
        self.groups = groups or make_groups(_mesh(num_stages, topology))
        if schedule == "auto":
            several = (num_chunks if stage_map is None else stage_map.num_chunks) > 1
            schedule = "interleaved" if several else "1f1b"
        self.program = Program(name=schedule) if isinstance(schedule, str) else schedule
        self._grid = Grid(self.groups, topology)
        self._topo = self._grid.topology()
        require_layers_unpatched(type(self), PipelineModule)
        self._note_arguments(loss_fn, seed_layers=seed_layers, seed_fn=seed_fn, base_seed=base_seed)
        method = self._method_of_program(partition_method, several=num_chunks > 1)
        with outside_of_init():  # counting parameters builds layers, too
            self.stage_map = stage_map or cut_layers(
                self.layer_specs,
                method,
                self.groups.mesh.pp,
                num_chunks,
                self.program.placement,
                count=asked(self, PipelineModule, "_count_layer_params") or self._count_layer_params,
            )
        self.partition_method = partition_method if stage_map is None else "stage_map"
        if self.stage_map.num_ranks != self.groups.mesh.pp or self.stage_map.num_layers != len(
            self.layer_specs
        ):
            raise LayoutError(
                f"stage map of {self.stage_map.num_layers} layers on {self.stage_map.num_ranks} ranks",
                f"the model has {len(self.layer_specs)} layers and the pipeline {self.groups.mesh.pp} ranks",
                "partition the same layer list over the same mesh",
            )
        if self.groups.rank == 0:
            warn_of_copies(self.layer_specs, self.stage_map)
        self.dynamic_shape = dynamic_shape
        self.release_outputs = release_outputs
        self.shards = Shards.over(self.groups.tensor_parallel) if shard_transfers else None
        self.split = split
        self.device = torch.device(get_accelerator().current_device_name())
        self.weights_changed: Callable[[], None] | None = None
        self.proof: str | None = None  # what the layout was proved by, for the header of a run
        self._load_layer = load_layer
        self.partitioner = (
            LayerPartitioner.of_context(self.groups)
            if config is None
            else LayerPartitioner.of_settings(settings_of(config, None, self.groups.mesh), self.groups)
        )
        self.replicas: dict[nn.Parameter, str] = {}
        tied_modules: dict[str, nn.Module] = {}
        with outside_of_init():
            stages = {
                stage: [(index, self._built(index, tied_modules)) for index in self.stage_map.layers(stage)]
                for stage in self.stage_map.stages_of(self.groups.pp_rank)
            }
        chunks = Chunks(
            stages=stages,
            tied_modules=tied_modules,
            loss_fn=loss_fn,
            last_stage=self.stage_map.num_stages - 1,
            recompute=Recompute(
                interval=check_recompute("interval", activation_checkpoint_interval),
                layer_names=check_recompute("layer_names", checkpointable_layers),
                function=check_recompute("function", activation_checkpoint_func),
                model_name=type(self).__name__,
                choose=asked(self, PipelineModule, "_is_checkpointable"),
            ),
            reseed=self._reseed,
        )
        self._adopt(chunks)
        self.to(self.device)
        self.ties = self._tie()
        self._note_places()

    # Names of stock DeepSpeed's class that nothing else of dsx needs.
    activation_checkpoint_interval = OfRecompute("interval")
    activation_checkpoint_func = OfRecompute("function")
    checkpointable_layers = OfRecompute("layer_names")
    is_checkpointable_results = property(lambda self: self.chunks.recomputed())
    micro_offset = property(lambda self: self.chunks.forwards)
    curr_layer = property(lambda self: self.chunks.running)

    def _method_of_program(self, method: str | Sequence[int], *, several: bool) -> str | Sequence[int]:
        """The cut of a program that changes stock's ``_partition_layers``, as layers of each stage.

        Stock calls it in its constructor; it leaves the first layer of every stage, and the number of layers,
        in ``parts`` (deepspeed/runtime/pipe/module.py).
        """
        cut = asked(self, PipelineModule, "_partition_layers")
        found = asked(self, PipelineModule, "_find_layer_type")
        where = f"{type(self).__name__}._partition_layers({method!r})"
        if cut is not None and several:
            fix = "use one chunk, or give partition_method a list of the layers of every virtual stage"
            raise LayoutError(where, "it cuts stages, and with chunks each rank has several", fix)
        self.parts: list[int] = []
        if cut is not None:
            with outside_of_init():  # it may build layers, to count
                cut(method=method)
        elif found is not None and isinstance(method, str) and method.lower().startswith("type:"):
            marked = set(found(method.split(":")[1]))
            weights = [int(index in marked) for index in range(self._num_layers)]
            self.parts = list(balanced(weights, self.num_stages))
        if not self.parts:
            return method
        sizes = [int(stop) - int(start) for start, stop in pairwise(self.parts)]
        if len(sizes) != self.num_stages or sum(sizes) != self._num_layers or self.parts[0]:
            raise LayoutError(
                where,
                f"it leaves parts = {list(self.parts)}, which are no {self.num_stages} stages of "
                f"{self._num_layers} layers",
                "set parts to the first layer of each stage, and the number of layers",
            )
        return sizes

    def _partition_layers(self, method: str | Sequence[int] = "uniform") -> None:
        """Cut as ``partition_method`` says, into ``parts``; a subclass may override it as stock's."""
        count = asked(self, PipelineModule, "_count_layer_params") or self._count_layer_params
        stages = cut_layers(self.layer_specs, method, self.num_stages, 1, self.program.placement, count=count)
        self.parts = list(stages.bounds)
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def _set_bounds(self, start: int | None = None, stop: int | None = None) -> None:
        """Stock's, which a subclass calls with this rank's part of ``parts``."""
        self._local_start, self._local_stop = start or 0, self._num_layers if stop is None else stop

    def _count_layer_params(self) -> list[int]:
        """Trainable elements of each layer, as stock counts them; a program may count otherwise.

        A layer is built for real, which advances the random generators as in stock DeepSpeed; with
        ``seed_layers`` nothing is allocated.
        """
        return [_count_parameters(layer, not self.seed_layers) for layer in self._layer_specs]

    def _find_layer_type(self, layername: str) -> list[int]:
        """Indices of the layers whose name matches, as for ``type:``; a program may find others."""
        found = matches(f"type:{layername}", [layer_name(layer) for layer in self._layer_specs])
        return [index for index, here in enumerate(found) if here]

    def _is_checkpointable(self, funcs: Sequence[Callable[..., Any]]) -> bool:
        """Whether this run of layers is recomputed; a program may choose otherwise."""
        return replace(self.chunks.recompute, choose=None).applies(funcs)

    def _note_arguments(
        self,
        loss_fn: Loss | None,
        *,
        seed_layers: bool,
        seed_fn: Callable[[int], None] | None,
        base_seed: int,
    ) -> None:
        """Set what stock DeepSpeed's constructor knows before it cuts."""
        mesh = self.groups.mesh
        self.loss_fn = loss_fn
        self.seed_layers, self.base_seed, self.seed_fn = seed_layers, base_seed, seed_fn
        self.global_rank, self.world_size = self.groups.rank, mesh.size
        self.local_rank = int(comm.get_local_rank()) if comm.is_initialized() else 0
        self.world_group = dist.group.WORLD
        self.num_stages, self.stage_id = mesh.pp, self.groups.pp_rank
        self._layer_specs, self._num_layers = list(self.layer_specs), len(self.layer_specs)

    def _note_places(self) -> None:
        """Set what stock DeepSpeed's constructor sets as plain attributes."""
        mesh, bounds, here = self.groups.mesh, self.stage_map.bounds, self.groups.pp_rank
        self.parts = list(bounds)
        if len(bounds) == mesh.pp + 1:
            self._local_start, self._local_stop = bounds[here], bounds[here + 1]

    def topology(self) -> ProcessTopology:
        """The DeepSpeed ProcessTopology of all ranks: the one that was given, if any."""
        return self.mpu().topology()

    def num_pipeline_stages(self) -> int:
        """Pipeline degree; virtual stages are ``stage_map.num_stages``."""
        return self.groups.mesh.pp

    def partitions(self) -> list[int]:
        """First layer of each virtual stage, and the number of layers. A stage is a rank with one chunk."""
        return list(self.stage_map.bounds)

    def stage_owner(self, layer_idx: int) -> int:
        """Pipeline rank that holds a layer. Raises LayoutError for an index beyond the list."""
        if not 0 <= layer_idx < self.stage_map.num_layers:
            raise LayoutError(
                f"stage_owner({layer_idx})",
                f"there are {self.stage_map.num_layers} layers",
                f"use 0 to {self.stage_map.num_layers - 1}",
            )
        return self.stage_map.rank_of(self.stage_map.stage_of(layer_idx))

    def set_checkpoint_interval(self, interval: int) -> None:
        """Layers that are recomputed together from the next forward on; 0 for none. Raises ConfigError."""
        self.activation_checkpoint_interval = interval

    @property
    def forward_funcs(self) -> list[Callable[..., Any]]:
        """This rank's layers, in order, as they are called."""
        return list(self.chunks.layers.values())

    @property
    def fwd_map(self) -> dict[str, int]:
        """Name of each layer that is a module of its own -> its place in ``forward_funcs``."""
        tied = [id(module) for module in self.chunks.tied_modules.values()]
        return {
            str(index): local
            for local, (index, layer) in enumerate(self.chunks.layers.items())
            if isinstance(layer, nn.Module) and not isinstance(layer, TiedUse) and id(layer) not in tied
        }

    @property
    def tied_weight_attrs(self) -> dict[str, list[str]]:
        """Key of each tied module of this rank -> the names of its tied weights."""
        specs = (spec for spec in self.layer_specs if isinstance(spec, TiedLayerSpec))
        attributes = {spec.key: list(spec.tied_weight_attr) for spec in specs}
        return {key: attributes[key] for key in self.chunks.tied_modules}

    @property
    def tied_comms(self) -> dict[str, dict[str, Any]]:
        """Key of each weight tied over several pipeline ranks -> where its copies are."""
        attributes = self.tied_weight_attrs
        return {
            tie.key: {
                "ranks": dist.get_process_group_ranks(tie.group),
                "group": tie.group,
                "weight_attr": attributes[tie.key],
                "module": self.chunks.tied_modules[tie.key],
            }
            for tie in self.ties
        }

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """This rank's copies of weights tied over several pipeline ranks, with the group that holds them."""
        return [(parameter, tie.group) for tie in self.ties for parameter in tie.parameters]

    def allreduce_tied_weight_gradients(self) -> None:
        """Sum ``.grad`` of tied weights over their copies, as the engine does by itself in every step."""
        for weight, group in self.get_tied_weights_and_groups():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad, group=group)

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Losses to report beside the one that is trained; a subclass may return some, by name.

        It is called on the last stage after each micro-batch's loss. ``engine.get_additional_losses()`` gives
        the means over the step's micro-batches and all replicas, on every rank.
        """
        return None

    def save_state_dict(
        self, save_dir: Any, checkpoint_engine: Any = None, exclude_frozen_params: bool = False
    ) -> None:
        """Write a file per layer: see :func:`dsx.engine.stock_module.save_layers`."""
        save_layers(self, save_dir, checkpoint_engine, exclude_frozen=exclude_frozen_params)

    def load_state_dir(self, load_dir: Any, checkpoint_engine: Any = None, strict: bool = True) -> None:
        """Read a file per layer: see :func:`dsx.engine.stock_module.load_layers`."""
        load_layers(self, load_dir, checkpoint_engine, strict=strict)

    def ckpt_prefix(self, checkpoints_path: str, tag: str) -> str:
        """``folder/tag/module-pipe_PP[-model_TT]``, which begins the names of this rank's files."""
        topology = self.topology()
        at = topology.get_coord(rank=self.global_rank)
        axes = [axis for axis in topology.get_axis_names() if axis != "data"]
        name = "".join(f"-{axis}_{getattr(at, axis):02d}" for axis in axes)
        return str(Path(checkpoints_path) / str(tag) / f"module{name}")

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """File of this rank's ``local_layer_idx``-th layer; a subclass may name it otherwise."""
        shares = self.topology().get_rank_repr(rank=self.global_rank)
        index = index_of(self, local_layer_idx)
        name = f"layer_{index:02d}{'-' + shares if shares else ''}-model_states.pt"
        return str(Path(ckpt_dir) / name)

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """Files of a layer there are, of all tensor-parallel ranks, in their order."""
        pattern = f"layer_{index_of(self, local_layer_idx):02d}-*model_states.pt"
        return sorted(map(str, Path(ckpt_dir).glob(pattern)))

    def forward(self, forward_input: Any) -> Any:
        """Call this rank's layers in order, outside of any engine, as stock DeepSpeed's forward does.

        Raises:
            ModelError: The rank's layers do not follow each other, or ZeRO-3 holds their weights in parts.
        """
        stages = self.stage_map.stages_of(self.groups.pp_rank)
        apart = any(after != before + 1 for before, after in pairwise(stages))
        if apart or any(hasattr(parameter, "ds_id") for parameter in self.parameters()):
            raise ModelError(
                "PipelineModule(...)",
                "a rank holds layers that do not follow each other"
                if apart
                else "under ZeRO-3 no rank has the weights",
                "use dsx.initialize, and train_batch or eval_batch",
            )
        for stage in stages:
            forward_input = self.chunks(forward_input, stage)
        return forward_input

    def __getattr__(self, name: str) -> Any:
        if name in NOT_HERE:
            raise unavailable("PipelineModule", name, NOT_HERE[name])
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_fn" and "chunks" in vars(self):
            require_head(self.layer_specs, value)
            require_mean(value, self.groups.context_parallel)
            self.chunks.loss_fn = value
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> PipelineModule:
        super().train(mode)
        if "chunks" in vars(self):
            self.chunks.training = mode
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """``torch.compile`` this rank's layers, each by itself."""
        self.chunks.compile_layers(*args, **kwargs)

    def _adopt(self, chunks: Chunks) -> None:
        """Make the layers children of this module, under the names that stock DeepSpeed gives them.

        ``chunks``, which DeepSpeed's engine wraps, has the same children and is none itself.
        """
        require_context(chunks.layers.items(), self.groups.context_parallel)
        vars(self)["chunks"] = chunks
        self.loss_fn = chunks.loss_fn
        for name, child in chunks.named_children():
            if name != "loss_fn":
                self.add_module(name, child)

    def _precompute_checkpointable_values(self) -> None:
        """For code that calls stock DeepSpeed's: dsx asks at each forward which layers are recomputed."""

    def mpu(self) -> Grid:
        """The process groups under the names that DeepSpeed and Megatron code asks for."""
        return self._grid

    def _reseed(self, index: int, forwards: int) -> None:
        """Seed before a layer's forward (deepspeed/runtime/pipe/module.py, exec_range_func)."""
        if self.seed_layers:
            (self.seed_fn or set_random_seed)(self.base_seed * (forwards + 1) + index)

    def _built(self, index: int, tied_modules: dict[str, nn.Module]) -> Callable[..., Any]:
        """Layer ``index`` as something to call; tied modules are built once per rank."""
        spec = self.layer_specs[index]
        if self.seed_layers:
            (self.seed_fn or set_random_seed)(self.base_seed + index)
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in tied_modules:
                tied_modules[spec.key] = self._finished(index, spec.build(), f"tied_modules.{spec.key}")
            module = tied_modules[spec.key]
            return module if spec.forward_fn is None else TiedUse(module, spec.forward_fn)
        layer: Callable[..., Any] = spec.build() if isinstance(spec, LayerSpec) else spec
        return self._finished(index, layer, str(index)) if isinstance(layer, nn.Module) else layer

    def _finished(self, index: int, layer: nn.Module, name: str) -> nn.Module:
        """A layer with its weights loaded, its parameters checked and named, and partitioned."""
        if self._load_layer is not None and isinstance(self.layer_specs[index], LayerSpec):
            self._load_layer(index, layer)
        self.replicas |= settle(layer, name, index, self.groups)
        if self.partitioner is not None:
            self.partitioner.partition(layer)
        return layer

    def _tie(self) -> tuple[Tie, ...]:
        """Make groups over the copies of each tied weight, and broadcast the first copies to the others.

        A copy on a later pipeline rank is marked ``ds_pipe_replicated``, DeepSpeed's name for "already
        counted in the gradient norm elsewhere".
        """
        for parameter in self.chunks.parameters():
            parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]
        ties = []
        for key, specs in tied_layers(self.layer_specs).items():
            owners = sorted({self.stage_map.rank_of(self.stage_map.stage_of(index)) for index, _ in specs})
            if len(owners) == 1:
                continue
            mine = self.groups.pp_rank in owners
            ranks = [self.groups.pipe_peer(pp) for pp in owners] if mine else [self.groups.rank]
            # Ranks without a copy make one of their own: torch names a group by how many the rank has made,
            # and members that have made different numbers would wait for each other for ever.
            group = new_group(ranks)
            if mine:
                tie = self._tie_copies(key, specs[0][1].tied_weight_attr, group, ranks)
                ties.append(tie)
                untied = tie.left_out(self.chunks.tied_modules[key])
                if untied and ranks[0] == self.groups.rank and self.groups.pipe_peer(0) == 0:
                    _warn_of_untied(self.layer_specs, key, [index for index, _ in specs], owners, untied)
        return tuple(ties)

    def _tie_copies(
        self, key: str, attributes: Sequence[str], group: dist.ProcessGroup, ranks: list[int]
    ) -> Tie:
        module = self.chunks.tied_modules[key]
        try:
            parameters = tuple(module.get_parameter(attribute) for attribute in attributes)
        except AttributeError as error:
            raise ModelError(
                f"tied layers {key!r}",
                f"tied_weight_attr = {list(attributes)} does not name its parameters ({error})",
                f"use some of {[name for name, _ in module.named_parameters()]}",
            ) from None
        # A partitioned parameter holds nothing to send: gathered here, and partitioned again.
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            for parameter in parameters:
                dist.broadcast(parameter.data, ranks[0], group=group)
                parameter.ds_pipe_replicated = self.groups.rank != ranks[0]  # type: ignore[attr-defined]
        if self.partitioner is not None:
            self.partitioner.stand_in(parameters)
        return Tie(key, parameters, group)


def _require_whole(layers: Sequence[Any], mesh: Mesh) -> None:
    """Refuse modules that deepspeed.zero.Init has cut over ranks of other stages: gathering would hang."""
    held = (p for layer in layers if isinstance(layer, nn.Module) for p in layer.parameters())
    if mesh.num_replicas != mesh.size and any(hasattr(parameter, "ds_id") for parameter in held):
        raise ModelError(
            "modules built under deepspeed.zero.Init",
            "their parameters are cut over all ranks, which here hold different layers or parts of them",
            "give LayerSpecs, which each rank builds for its own layers only, or build the modules outside",
        )


def _mesh(num_stages: int | None, topology: Any) -> Mesh:
    world_size = dist.get_world_size()
    if topology is not None:
        given, known = list(topology.get_axis_names()), {axis.deepspeed: axis.name for axis in AXES}
        if unknown := set(given) - known.keys():
            raise LayoutError(
                f"topology axes {sorted(unknown)}",
                "dsx does not know them",
                f"use {', '.join(name for name in known if name)}",
            )
        axes = [axis for axis in known if axis in given]
        if given != axes:
            raise LayoutError(
                f"topology axes {given}",
                "dsx numbers ranks with data inside pipe and model inside data",
                f"give the axes in the order {axes}",
            )
        return Mesh.of(**{known[axis]: topology.get_dim(axis) for axis in given})
    if num_stages is None:
        raise LayoutError("PipelineModule", "num_stages and topology are both missing", "give one of them")
    if num_stages < 1 or world_size % num_stages:
        raise LayoutError(
            f"num_stages = {num_stages}",
            f"it does not divide the {world_size} ranks",
            f"use a divisor of {world_size}",
        )
    return Mesh.of(pp=num_stages, dp=world_size // num_stages)
