"""Stock DeepSpeed checkpoints, as ``engine.save_checkpoint`` writes them, as a catalog.

ZeRO 0 to 3, BF16_Optimizer, FP16_Optimizer, PipelineModule, tensor parallelism, and AutoEP's mixtures
of experts (:mod:`dsx.checkpoint.formats.deepspeed.mixture`); written and read by deepspeed 0.19.8,
older forms where they differ. What is in which file: :mod:`dsx.checkpoint.formats.deepspeed.files`; where a
parameter lies: :mod:`dsx.checkpoint.formats.deepspeed.flat`; how tensor parallelism cut it:
:mod:`dsx.checkpoint.formats.deepspeed.cut`.

Names are those of the model's state dict; in a pipeline those of its parameters, ``<layer>.<path>`` and
``tied_modules.<key>.<path>``. Under ZeRO-3 weights are stored nowhere: they are the masters, converted.

Without ZeRO optimizer states are whole tensors, by number and without names. In fp32 that is the state dict
of the optimizer. In half precision FP16_Optimizer keeps the masters beside it, as a list of tensors per group
(``fp32_groups``); or, with fused optimizers, as one flat buffer per group, whose parameters have neither
names nor shapes and which is refused (deepspeed/runtime/fp16/fused_optimizer.py, unfused_optimizer.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from dsx.checkpoint import plain
from dsx.checkpoint.catalog import Catalog, Entry, Piece, Role, merged_groups, unusable
from dsx.checkpoint.file_io import crc32_of_zeros
from dsx.checkpoint.formats.deepspeed import mixture
from dsx.checkpoint.formats.deepspeed.cut import Rules, ShardLayout, rules_of
from dsx.checkpoint.formats.deepspeed.files import (
    AUTOEP_LAYERS,
    OUTER,
    StockFiles,
    check_patterns,
    config_of,
    open_stock,
)
from dsx.checkpoint.formats.deepspeed.flat import (
    Fragment,
    OptimizerGroup,
    OptimizerState,
    numbers_of,
    sharded_state,
    whole,
)
from dsx.checkpoint.formats.deepspeed.module import Module, layer_prints, modules_of
from dsx.checkpoint.formats.deepspeed.order import TIED, ZEROS, assign, stage_names
from dsx.checkpoint.formats.huggingface.catalog import with_names
from dsx.checkpoint.formats.torch_file import FileStorage, PickledObject, TensorRef, TorchFile
from dsx.checkpoint.pieces import corner_of
from dsx.errors import CheckpointError
from dsx.models.param import ITEM_BYTES
from dsx.parallel.islands import OUTER_STATES

_COUNTERS = ("global_samples", "skipped_steps")
_MOMENTS: Mapping[frozenset[str], str] = {
    frozenset({"exp_avg", "exp_avg_sq"}): "AdamW",
    frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}): "AdamW",
    frozenset({"momentum_buffer"}): "SGD",
    frozenset({"exp_avg"}): "Lion",
    frozenset({"sum"}): "Adagrad",
}
_STOCK_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *(
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
    ),
    *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
    *("ds_version", "universal_checkpoint_info", "micro_steps", "num_experts", AUTOEP_LAYERS),
}
FORMAT = "deepspeed"
_LARGEST = 100_000  # values; more is data, not facts


def facts_of(
    files: StockFiles,
    states: Mapping[int, OptimizerState],
    canonical: Mapping[str, str],
    common: TorchFile | None = None,
) -> dict[str, Any]:
    """The facts of a checkpoint; what is no plain data is named under ``left_behind``."""
    file, first = files.models[0, 0], files.first
    left = _unused(first)
    config = config_of(first)
    client = {
        str(key): value
        for key, one in first.items()
        if key not in _STOCK_KEYS | {OUTER} and (value := _encoded(one, file, str(key), left)) is not None
    }
    facts: dict[str, Any] = {
        "versions": {"deepspeed": str(first.get("ds_version", "unknown"))},
        "step": int(first.get("global_steps") or 0),
        "optimizer": _optimizer(config, states),
        "param_groups": _groups(states, canonical, left),
        "lr_scheduler": _encoded(first.get("lr_scheduler"), file, "lr_scheduler", left),
        "loss_scale": _loss_scale(files, common),
        "counters": {key: int(first[key]) for key in _COUNTERS if first.get(key) is not None},
        "mesh": dict(files.mesh.axes),
        "zero_stage": files.zero_stage,
        "precision": _precision(config),
        "client_state": client,
        "deepspeed_config": _encoded(config, file, "ds_config", left),
        "outer": _encoded(first.get(OUTER), file, OUTER, left),
        "left_behind": left,
    }
    return {key: value for key, value in facts.items() if value not in (None, [])}


def _unused(first: Mapping[str, Any]) -> list[str]:
    """What is neither a tensor nor a fact."""
    module = first.get("module")
    extra = module.items() if isinstance(module, dict) else ()
    left = [f"module {name}: it is no tensor" for name, value in extra if not isinstance(value, TensorRef)]
    samplers = [key for key in ("data_sampler", "random_ltd") if first.get(key) is not None]
    return [*left, *(f"{key}: of no use to dsx" for key in samplers)]


def readable(value: Any, file: TorchFile) -> Any:
    """A value of a torch file: tensors of one element as numbers, namespaces as dicts."""
    return _Reading(file).of(value)


class _Reading:
    """Counts what it makes: a few bytes of a pickle can stand for as many values as one likes."""

    def __init__(self, file: TorchFile) -> None:
        self._file = file
        self._count = 0

    def of(self, value: Any) -> Any:
        self._count += 1
        if self._count > _LARGEST:
            raise CheckpointError(str(self._file.path), f"it has more than {_LARGEST} values", "save less")
        if isinstance(value, TensorRef):
            return self._file.value(value)
        if isinstance(value, PickledObject):
            if value.kind not in ("argparse.Namespace", "types.SimpleNamespace"):
                raise CheckpointError(
                    str(self._file.path), f"a {value.kind} is no plain data", "leave it out"
                )
            return self.of(value.state)
        if isinstance(value, dict):
            return {key: self.of(part) for key, part in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return type(value)(map(self.of, value))
        return value


def _encoded(value: Any, file: TorchFile, where: str, left: list[str]) -> Any:
    """The value as :mod:`dsx.checkpoint.plain` writes it; None, and a note in ``left``, if it cannot."""
    try:
        return plain.encode(readable(value, file), where)
    except CheckpointError as error:
        left.append(f"{where}: {error.what}")
        return None


def _groups(
    states: Mapping[int, OptimizerState], canonical: Mapping[str, str], left: list[str]
) -> list[dict[str, Any]]:
    """The optimizer's groups, those of one place on all ranks as one."""
    ranks: list[list[dict[str, Any]]] = []
    for state in states.values():
        known = max(map(len, ranks), default=0)  # the first rank's hyperparameters are taken
        ranks.append(
            [
                {
                    **({} if place < known else _settings(group, place, left)),
                    "names": [canonical.get(name, name) for name in group.names],
                    "numbers": {
                        state: {canonical.get(name, name): one for name, one in values.items()}
                        for state, values in group.numbers.items()
                    },
                }
                for place, group in enumerate(state.groups)
            ]
        )
    return merged_groups(ranks)


def _settings(group: OptimizerGroup, place: int, left: list[str]) -> dict[str, Any]:
    return {
        str(key): _encoded(value, group.file, f"{key} of optimizer group {place}", left)
        for key, value in group.settings.items()
        if key != "step"
    }


def _optimizer(config: Mapping[str, Any], states: Mapping[int, OptimizerState]) -> str | None:
    """The optimizer's name, from the config or, if the user made it, from the states that it keeps."""
    told = (config.get("optimizer") or {}).get("type")
    if told:
        return str(told)
    kept = {fragment.state for state in states.values() for fragment in state.fragments}
    kept -= {"master", *OUTER_STATES}
    numbers = {number for state in states.values() for group in state.groups for number in group.numbers}
    # NAdam's mu_product is none of Adam's.
    return None if numbers - {"step"} else _MOMENTS.get(frozenset(kept))


def _loss_scale(files: StockFiles, common: TorchFile | None) -> dict[str, Any] | None:
    held = [file.content["optimizer_state_dict"] for file in files.optimizers.values()]
    held += [common.content] if common is not None and isinstance(common.content, dict) else []
    for one in held:
        scaler = one.get("loss_scaler")
        if isinstance(scaler, PickledObject):
            return {"scale": scaler.state.get("cur_scale"), **_plain_numbers(scaler.state)}
    saved = files.first.get("optimizer")
    if isinstance(saved, dict) and "cur_scale" in saved:
        return {"scale": saved["cur_scale"], **_plain_numbers(saved)}
    return None


def _plain_numbers(state: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in state.items() if isinstance(value, int | float | bool | None)}


def _precision(config: Mapping[str, Any]) -> str:
    for name in ("bf16", "fp16"):
        section = config.get(name) or (config.get("bfloat16") if name == "bf16" else None)
        if isinstance(section, dict) and section.get("enabled"):
            return name
    return "fp32"


def catalog_of(root: Path, rules: Rules | None = None) -> Catalog:
    """What a stock DeepSpeed checkpoint, the folder of one tag, holds.

    The user's ``rules`` come before what the checkpoint says itself.
    """
    files = open_stock(root)
    if files.experts:
        return _mixture(files, rules)
    rules = _merged(rules, files)
    modules = modules_of(files, rules.ties)
    if files.optimizers:
        states = {}
        for rank in files.ranks:
            # A pipeline's layers are all listed at its first stage.
            weights = modules[files.place(rank)[1] if files.layers else rank].weights
            states[rank] = sharded_state(files, rank, {one.name: one.shape for one in weights})
    else:
        states = plain_states(files, modules, rules)
    names = _Names.of(files, modules, states)
    entries = tuple(_entries(files, names, rules))
    facts = {**facts_of(files, states, names.canonical), **_tie_facts(files, states, rules)}
    # Hyperparameters of the user's count where a group has none of that name.
    groups = facts.get("param_groups") or []
    if rules.settings and len(rules.settings) != len(groups):
        raise CheckpointError(
            f"{rules.source}: settings",
            f"they are of {len(rules.settings)} optimizer groups, the checkpoint has {len(groups)}",
            "give one object of hyperparameters per group",
        )
    pairs = zip(rules.settings, groups, strict=True) if rules.settings else ()
    told = [{**plain.encode(dict(mine), f"{rules.source}: settings"), **group} for mine, group in pairs]
    catalog = Catalog(
        root=root,
        format=FORMAT,
        entries=entries,
        facts={**facts, "param_groups": told} if told else facts,
        checksums=tuple(checksum for file in files.all for checksum in file.checksums),
    )
    return with_names(catalog, rules.names, rules.source) if rules.names else catalog


def _mixture(files: StockFiles, rules: Rules | None) -> Catalog:
    """A mixture of experts. Of rules, names alone matter."""
    entries = [*mixture.entries_of(files)]
    unread, states, names = mixture.unread_states(files), dict[int, OptimizerState](), dict[str, str]()
    if unread is None:
        states[0], names, more = mixture.states_of(files, entries)
        entries += more
    facts = facts_of(files, states, names)
    if unread is not None:
        facts["left_behind"] = [*facts.get("left_behind", ()), unread]
    catalog = Catalog(
        root=files.root,
        format=FORMAT,
        entries=tuple(entries),
        facts=facts,
        checksums=tuple(checksum for file in files.all for checksum in file.checksums),
    )
    return with_names(catalog, rules.names, rules.source) if rules and rules.names else catalog


def _tie_facts(files: StockFiles, states: Mapping[int, OptimizerState], rules: Rules) -> dict[str, Any]:
    """A pipeline's tied modules: what the user said, and layers that turned out to be on several stages."""
    if not files.layers:
        return {}
    stages = [states[rank].groups for rank in files.stages_of()]
    counts = Counter(name for groups in stages for name in {one for group in groups for one in group.names})
    unnamed = {name.partition(".")[0] for name, count in counts.items() if count > 1} - {TIED}
    return {
        **({"tied": {key: list(layers) for key, layers in rules.ties}} if rules.ties else {}),
        **({"unnamed_ties": sorted(map(int, unnamed))} if unnamed else {}),
    }


def _merged(rules: Rules | None, files: StockFiles) -> Rules:
    first = files.models[0, 0]
    info = first.content.get("universal_checkpoint_info")
    if info is None and files.optimizers:
        state = files.optimizers[0, 0].content.get("optimizer_state_dict", {})
        info = state.get("universal_checkpoint_info") if isinstance(state, dict) else None
    check_patterns(info, str(first.path))
    told = rules_of(info, str(first.path))
    if rules is None:
        return told
    return replace(rules, tensors=(*rules.tensors, *told.tensors), maps=rules.maps or told.maps)


_Copies = dict[int, list[list[Fragment]]]
"""By tensor-parallel rank the copies that its pipeline stages have of one state, each as its fragments."""


@dataclass(frozen=True, slots=True)
class _Names:
    """Everything that is stored, by canonical name, in the model's order.

    Attributes:
        held: (name, state) -> who has what of it.
    """

    held: Mapping[tuple[str, str], _Copies]
    roles: Mapping[str, Role]
    aliases: Mapping[str, Sequence[str]]
    canonical: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, files: StockFiles, modules: Mapping[int, Module], states: Mapping[int, OptimizerState]
    ) -> _Names:
        held: dict[tuple[str, str], _Copies] = defaultdict(lambda: defaultdict(list))
        aliases: dict[str, dict[str, None]] = defaultdict(dict)
        trained = {name for state in states.values() for group in state.groups for name in group.names}
        buffers = {name for module in modules.values() for name in module.buffers}
        canonical: dict[str, str] = {}
        for module in modules.values():
            for names in module.ties:
                first = next((name for name in names if name in trained), names[0])
                canonical.update(dict.fromkeys(names, first))
                aliases[first].update(dict.fromkeys(name for name in names if name != first))
        for rank in files.ranks:
            _, tensor = files.place(rank)
            found: dict[tuple[str, str], list[Fragment]] = defaultdict(list)
            for fragment in (*modules[rank].weights, *states[rank].fragments):
                name = canonical.get(fragment.name, fragment.name)
                found[name, fragment.state].append(fragment)
            for key, fragments in found.items():
                held[key][tensor] += _copies(fragments)
        _add_empty(held)
        places: dict[str, int] = {}
        for module in modules.values():
            for name in module.names:
                places.setdefault(canonical.get(name, name), len(places))
        in_order = sorted(held, key=lambda key: (places.get(key[0], len(places)), key[1] != "weight"))
        roles: dict[str, Role] = {
            name: "buffer" if name in buffers else "trained" if name in trained else "frozen"
            for name, _ in held
        }
        ordered = {key: held[key] for key in in_order}
        return cls(ordered, roles, {name: tuple(others) for name, others in aliases.items()}, canonical)


def _add_empty(held: Mapping[tuple[str, str], _Copies]) -> None:
    """States of parts without elements (AutoTP on more ranks than heads), which optimizers leave out."""
    for (name, state), by_rank in held.items():
        for tensor, copies in held.get((name, "weight"), {}).items():
            part = copies[0][0]
            if tensor not in by_rank and not part.stop:
                dtype = next(iter(by_rank.values()))[0][0].dtype
                by_rank[tensor] = [[replace(part, state=state, dtype=dtype)]]


def _copies(fragments: Sequence[Fragment]) -> list[list[Fragment]]:
    """One list per copy of a tensor: the fragments of a copy follow one another without overlap."""
    copies: list[list[Fragment]] = []
    for fragment in fragments:
        home = next((copy for copy in copies if copy[-1].stop <= fragment.start), None)
        if home is None:
            copies.append([fragment])
        else:
            home.append(fragment)
    return copies


def _entries(files: StockFiles, names: _Names, rules: Rules) -> Iterator[Entry]:
    for (name, state), by_rank in names.held.items():
        where = str(files.root)
        lacking = [rank for rank in files.shards if rank not in by_rank]
        if lacking:
            raise CheckpointError(
                f"{where}: tensor {name}, {state}",
                f"tensor-parallel rank {lacking[0]} does not have it",
                "use the files of one save",
            )
        first = [by_rank[rank][0][0] for rank in files.shards]
        cut = rules.cut(name, [fragment.shape for fragment in first], where)
        if cut.dim is not None and any(one.over_all for one in first):
            raise CheckpointError(
                f"{where}: tensor {name}, {state}",
                "its parts are divided over all ranks, as only a tensor that each of them has whole is",
                "correct the rule that cuts it, or use the files of one save",
            )
        dtypes = {one.dtype for held in by_rank.values() for copy in held for one in copy}
        if len(dtypes) > 1:
            raise unusable(f"{where}: tensor {name}, {state}", f"its parts are of {sorted(dtypes)}")
        if cut.compare:
            _compare(files, name, [by_rank[rank][0] for rank in files.shards])
        yield Entry(
            name=name,
            state=state,
            shape=cut.shape,
            dtype=first[0].dtype,
            pieces=tuple(_pieces(cut, by_rank)),
            role=names.roles[name],
            aliases=tuple(names.aliases.get(name, ())),
        )


def _pieces(cut: ShardLayout, by_rank: _Copies) -> Iterator[Piece]:
    """Replica 0 of a cut tensor is the first copy of every rank; of an uncut one that of the first rank."""
    replica = 0
    for rank, copies in sorted(by_rank.items()):
        if rank and copies[0][0].over_all:
            continue  # every rank names the same parts
        for number, copy in enumerate(copies):
            if cut.dim is None:
                at, replica = replica, replica + 1
            else:
                at = number
            for fragment in copy:
                yield from located(cut, rank, fragment, at)


def located(cut: ShardLayout, rank: int, fragment: Fragment, replica: int = 0) -> Iterator[Piece]:
    """Where a fragment, which is of a tensor-parallel rank, has which boxes of the logical tensor."""
    item = ITEM_BYTES[fragment.dtype]
    origin = fragment.offset - fragment.start * item
    for part in cut.parts(rank, fragment.shape, fragment.start, fragment.stop):
        if fragment.strides is None:
            yield part.at(fragment.file, origin, item, replica)
            continue
        index = corner_of(part.flat, fragment.shape)
        offset = sum(at * step for at, step in zip(index, fragment.strides, strict=True))
        yield Piece(fragment.file, origin + offset * item, part.start, part.shape, fragment.strides, replica)


def _compare(files: StockFiles, name: str, copies: Sequence[Sequence[Fragment]]) -> None:
    """Prove that copies which were meant to be averaged are equal, so that any of them is the average."""
    contents = []
    for copy in copies:
        data = b""
        for one in copy:
            with (files.root / one.file).open("rb") as file:
                file.seek(one.offset)
                data += file.read((one.stop - one.start) * ITEM_BYTES[one.dtype])
        contents.append(data)
    if len(set(contents)) > 1:
        raise CheckpointError(
            f"{files.root}: tensor {name}",
            "its copies on tensor-parallel ranks differ and are meant to be averaged, which is not done here",
            'decide for one: {"tensors": {"...": "replicate"}} takes the first rank\'s',
        )


def plain_states(files: StockFiles, modules: Mapping[int, Module], rules: Rules) -> dict[int, OptimizerState]:
    """Optimizer state by model-parallel rank, with names found by order and shape."""
    if all(not files.models[rank, 0].content.get("optimizer") for rank in files.ranks):
        return dict.fromkeys(files.ranks, OptimizerState((), ()))
    saved = {rank: _parts(files.models[rank, 0]) for rank in files.ranks}
    found: dict[int, OptimizerState] = {}
    for tensor in files.shards:
        mine = files.stages_of(tensor)
        groups = [saved[rank].groups for rank in mine]
        told = [
            _told(files.models[rank, 0], saved[rank], modules[tensor if files.layers else rank])
            for rank in mine
        ]
        named: Sequence[Sequence[Sequence[str]] | None] = told
        if None in told and files.layers:
            prints = [_prints(files.models[rank, 0], saved[rank]) for rank in mine]
            same = Counter(layer_prints(files).values())
            named = stage_names(
                modules[tensor].order,
                groups,
                str(files.root),
                rules.groups,
                prints,
                rules.ties,
                twins=frozenset(at for at, told in layer_prints(files).items() if same[told] > 1),
            )
        elif None in told:
            named = [
                assign(modules[rank].order, saved[rank].groups, str(files.models[rank, 0].path), rules.groups)
                for rank in mine
            ]
        for rank, names in zip(mine, named, strict=True):
            if names is None:
                raise CheckpointError(
                    f"{files.models[rank, 0].path}: optimizer",
                    "its states have no names, and shapes that no order of the model's parameters has",
                    "use the files of one save; if an optimizer group lists its parameters in another order, "
                    'train it on for one step with "zero_optimization": {"stage": 1}, which writes names',
                )
            found[rank] = _state(files.models[rank, 0], saved[rank], names)
    return found


@dataclass(frozen=True, slots=True)
class _Saved:
    """The torch optimizer's state dict, DeepSpeed's masters by group, and the shapes of every group."""

    state: Mapping[int, Mapping[str, Any]]
    param_groups: Sequence[Mapping[str, Any]]
    masters: Sequence[Sequence[TensorRef]]
    groups: Sequence[Sequence[tuple[int, ...] | None]]


def _prints(file: TorchFile, saved: _Saved) -> list[list[Any]]:
    """For every parameter the CRC32s of its states, where the file has them; ZEROS where nothing else is."""
    found = []
    for settings in saved.param_groups:
        states = [saved.state.get(number, {}) for number in settings["params"]]
        refs = [
            [ref for key, ref in state.items() if isinstance(ref, TensorRef) and ref.shape]
            for state in states
        ]
        found.append([_print([file.storages[ref.storage] for ref in one]) for one in refs])
    return found


def _print(storages: Sequence[FileStorage]) -> Any:
    if not storages or any(one.crc32 is None for one in storages):
        return None
    if all(one.crc32 == crc32_of_zeros(one.stop - one.start) for one in storages):
        return ZEROS
    return tuple(one.crc32 for one in storages)


def _state(file: TorchFile, saved: _Saved, names: Sequence[Sequence[str]]) -> OptimizerState:
    fragments: list[Fragment] = []
    found = []
    for place, (settings, mine) in enumerate(zip(saved.param_groups, names, strict=True)):
        numbers: dict[str, dict[str, float]] = defaultdict(dict)
        for at, name in enumerate(mine):
            held = saved.state.get(settings["params"][at], {})
            shape = saved.groups[place][at]  # other states are one number, such as ``step``
            refs = {key: ref for key, ref in held.items() if isinstance(ref, TensorRef) and key != "step"}
            tensors = {key: ref for key, ref in refs.items() if ref.shape or not shape}
            rest = {key: value for key, value in held.items() if key not in tensors}
            for state, number in numbers_of(rest, settings, file).items():
                numbers[state][name] = number
            if saved.masters:
                fragments.append(whole(saved.masters[place][at], file, name, "master"))
            fragments += [whole(ref, file, name, str(key)) for key, ref in tensors.items()]
        kept = {key: value for key, value in settings.items() if key != "params"}
        found.append(OptimizerGroup(names=tuple(mine), settings=kept, file=file, numbers=numbers))
    return OptimizerState(tuple(fragments), tuple(found))


def _told(file: TorchFile, saved: _Saved, module: Module) -> list[list[str]] | None:
    """Names that the file itself gives: dsx's in ``param_shapes``, torch's of optimizers made with names."""
    shapes = file.content.get("param_shapes")
    groups = shapes if isinstance(shapes, list) else [one.get("param_names") for one in saved.param_groups]
    found = [[str(name) for name in group] for group in groups if isinstance(group, dict | list)]
    if [len(group) for group in found] != [len(group) for group in saved.groups]:
        return None
    fit = (
        name in module.order and shape in (None, module.order[name])
        for group, held in zip(found, saved.groups, strict=True)
        for name, shape in zip(group, held, strict=True)
    )
    return found if all(fit) else None


def _parts(file: TorchFile) -> _Saved:
    saved = file.content.get("optimizer")
    inner = saved.get("optimizer_state_dict", saved) if isinstance(saved, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("state"), dict):
        raise unusable(str(file.path), "an optimizer of unknown form")
    masters = saved.get("fp32_groups") or saved.get("fp32_groups_flat") or []
    groups: list[list[tuple[int, ...] | None]] = []
    for place, settings in enumerate(inner["param_groups"]):
        if masters and isinstance(masters[place], TensorRef):
            raise CheckpointError(
                str(file.path),
                "one flat buffer of fp32 weights per group, whose parameters have neither names nor shapes",
                'train it on for one step with "zero_optimization": {"stage": 1}, which writes names',
            )
        if masters:
            groups.append([ref.shape for ref in masters[place]])
        else:
            groups.append([_shape(inner["state"].get(number, {})) for number in settings["params"]])
    return _Saved(inner["state"], inner["param_groups"], masters, groups)


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Shape of a parameter, by its state; None where it has none."""
    shapes = [ref.shape for key, ref in state.items() if isinstance(ref, TensorRef) and key != "step"]
    return max(shapes, key=lambda shape: (prod(shape), len(shape))) if shapes else None
