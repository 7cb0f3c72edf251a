"""Stock DeepSpeed checkpoints, as ``engine.save_checkpoint`` writes them, as a catalog.

ZeRO 0 to 3, BF16_Optimizer, FP16_Optimizer, PipelineModule, tensor parallelism; written and read by deepspeed
0.19.8, older forms where they differ. What is in which file: :mod:`.deepspeed_files`; where a parameter lies:
:mod:`.deepspeed_flat`; how tensor parallelism cut it: :mod:`.deepspeed_cut`.

Names are those of the model's state dict; in a pipeline those of its parameters, ``<layer>.<path>`` and
``tied_modules.<key>.<path>``. Under ZeRO-3 weights are stored nowhere: they are the masters, converted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dsx.checkpoint import plain
from dsx.checkpoint.catalog import ITEM_BYTES, Catalog, Entry, Piece
from dsx.checkpoint.formats.deepspeed_cut import Cut, Rules, rules_of
from dsx.checkpoint.formats.deepspeed_facts import facts_of
from dsx.checkpoint.formats.deepspeed_files import StockFiles, open_stock
from dsx.checkpoint.formats.deepspeed_flat import Fragment, OptimizerState, sharded_state
from dsx.checkpoint.formats.deepspeed_module import Module, modules_of
from dsx.checkpoint.formats.deepspeed_order import TIED
from dsx.checkpoint.formats.deepspeed_plain import plain_states
from dsx.checkpoint.formats.deepspeed_types import check_patterns
from dsx.checkpoint.formats.hf_catalog import with_names
from dsx.checkpoint.pieces import contiguous
from dsx.errors import CheckpointError

FORMAT = "deepspeed"


def catalog_of(root: Path, rules: Rules | None = None, *, tp: int | None = None) -> Catalog:
    """What a stock DeepSpeed checkpoint holds.

    Args:
        root: The folder of one tag.
        rules: The user's; they come before what the checkpoint says itself.
        tp: Tensor-parallel degree, if it is not the one that the files tell.

    Raises:
        CheckpointError: Files are missing or contradict each other, or it is not known how a tensor is cut.
    """
    files = open_stock(root, tp)
    rules = _merged(rules, files)
    modules = modules_of(files, rules.ties)
    if files.optimizers:
        states = {}
        for rank in range(files.pp * files.tp):
            # A pipeline's layers are all listed at its first stage.
            weights = modules[rank % files.tp if files.layers else rank].weights
            states[rank] = sharded_state(files, rank, {one.name: one.shape for one in weights})
    else:
        states = plain_states(files, modules, rules)
    names = _Names.of(files, modules, states)
    entries = tuple(_entries(files, names, rules))
    facts = {**facts_of(files, states, names.canonical), **_tie_facts(files, states, rules)}
    catalog = Catalog(
        root=root,
        format=FORMAT,
        entries=entries,
        facts=_with_settings(facts, rules),
        specs=tuple(spec for spec in rules.specs.values() if spec.name in {entry.name for entry in entries}),
        checksums=tuple(checksum for file in files.all for checksum in file.checksums),
    )
    return with_names(catalog, rules.names, rules.source) if rules.names else catalog


def _tie_facts(files: StockFiles, states: Mapping[int, OptimizerState], rules: Rules) -> dict[str, Any]:
    """A pipeline's tied modules: what the user said, and layers that turned out to be on several stages."""
    if not files.layers:
        return {}
    stages = [states[rank].groups for rank in range(0, files.pp * files.tp, files.tp)]
    counts = Counter(name for groups in stages for name in {one for group in groups for one in group.names})
    unnamed = {name.partition(".")[0] for name, count in counts.items() if count > 1} - {TIED}
    return {
        **({"tied": {key: list(layers) for key, layers in rules.ties}} if rules.ties else {}),
        **({"unnamed_ties": sorted(map(int, unnamed))} if unnamed else {}),
    }


def _with_settings(facts: dict[str, Any], rules: Rules) -> dict[str, Any]:
    """The facts with hyperparameters of the user's where a group has none of that name."""
    groups = facts.get("param_groups") or []
    if rules.settings and len(rules.settings) != len(groups):
        raise CheckpointError(
            f"{rules.source}: settings",
            f"they are of {len(rules.settings)} optimizer groups, the checkpoint has {len(groups)}",
            "give one object of hyperparameters per group",
        )
    pairs = zip(rules.settings, groups, strict=True) if rules.settings else ()
    told = [{**plain.encode(dict(mine), f"{rules.source}: settings"), **group} for mine, group in pairs]
    return {**facts, "param_groups": told} if told else facts


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


@dataclass(frozen=True, slots=True)
class _Held:
    """One model-parallel rank's fragments of one state, the ranks of one pipeline stage together."""

    stage: int
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True, slots=True)
class _Names:
    """Everything that is stored, by canonical name, in the model's order.

    Attributes:
        held: (name, state) -> tensor-parallel rank -> who holds it.
        roles: Of every name.
        aliases: Other names of it.
        canonical: Canonical name of every name.
    """

    held: Mapping[tuple[str, str], Mapping[int, Sequence[_Held]]]
    roles: Mapping[str, Literal["trained", "frozen", "buffer"]]
    aliases: Mapping[str, Sequence[str]]
    canonical: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, files: StockFiles, modules: Mapping[int, Module], states: Mapping[int, OptimizerState]
    ) -> _Names:
        held: dict[tuple[str, str], dict[int, list[_Held]]] = defaultdict(lambda: defaultdict(list))
        aliases: dict[str, dict[str, None]] = defaultdict(dict)
        trained = {name for state in states.values() for group in state.groups for name in group.names}
        buffers = {name for module in modules.values() for name in module.buffers}
        canonical: dict[str, str] = {}
        for module in modules.values():
            for names in module.ties:
                first = next((name for name in names if name in trained), names[0])
                canonical.update(dict.fromkeys(names, first))
                aliases[first].update(dict.fromkeys(name for name in names if name != first))
        for rank in range(files.pp * files.tp):
            stage, tensor = divmod(rank, files.tp)
            found: dict[tuple[str, str], list[Fragment]] = defaultdict(list)
            for fragment in (*modules[rank].weights, *states[rank].fragments):
                name = canonical.get(fragment.name, fragment.name)
                found[name, fragment.state].append(fragment)
            for key, fragments in found.items():
                held[key][tensor] += [_Held(stage, tuple(one)) for one in _copies(fragments)]
        _add_empty(held)
        places: dict[str, int] = {}
        for module in modules.values():
            for name in module.names:
                places.setdefault(canonical.get(name, name), len(places))
        in_order = sorted(held, key=lambda key: (places.get(key[0], len(places)), key[1] != "weight"))
        roles: dict[str, Literal["trained", "frozen", "buffer"]] = {
            name: "buffer" if name in buffers else "trained" if name in trained else "frozen"
            for name, _ in held
        }
        ordered = {key: held[key] for key in in_order}
        return cls(ordered, roles, {name: tuple(others) for name, others in aliases.items()}, canonical)


def _add_empty(held: Mapping[tuple[str, str], dict[int, list[_Held]]]) -> None:
    """States of parts without elements (AutoTP on more ranks than heads), which optimizers leave out."""
    for (name, state), by_rank in held.items():
        for tensor, copies in held.get((name, "weight"), {}).items():
            part = copies[0].fragments[0]
            if tensor not in by_rank and not part.stop:
                dtype = next(iter(by_rank.values()))[0].fragments[0].dtype
                by_rank[tensor] = [_Held(copies[0].stage, (replace(part, state=state, dtype=dtype),))]


def _copies(fragments: Sequence[Fragment]) -> Iterator[list[Fragment]]:
    """One list per copy of a tensor: the fragments of a copy follow one another without overlap."""
    copies: list[list[Fragment]] = []
    for fragment in fragments:
        home = next((copy for copy in copies if copy[-1].stop <= fragment.start), None)
        if home is None:
            copies.append([fragment])
        else:
            home.append(fragment)
    yield from copies


def _entries(files: StockFiles, names: _Names, rules: Rules) -> Iterator[Entry]:
    for (name, state), by_rank in names.held.items():
        where = str(files.root)
        lacking = [rank for rank in range(files.tp) if rank not in by_rank]
        if lacking:
            raise CheckpointError(
                f"{where}: tensor {name}, {state}",
                f"tensor-parallel rank {lacking[0]} does not have it",
                "use the files of one save",
            )
        first = [by_rank[rank][0].fragments[0] for rank in range(files.tp)]
        cut = rules.cut(name, [fragment.shape for fragment in first], where)
        if cut.dim is not None and any(one.over_all for one in first):
            raise CheckpointError(
                f"{where}: tensor {name}, {state}",
                "its parts are divided over all ranks, as only a tensor that each of them has whole is",
                "correct the rule that cuts it, or use the files of one save",
            )
        dtypes = {one.dtype for held in by_rank.values() for copy in held for one in copy.fragments}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{where}: tensor {name}, {state}",
                f"its parts are of {sorted(dtypes)}",
                "use another checkpoint",
            )
        if cut.compare:
            _compare(files, name, [by_rank[rank][0].fragments for rank in range(files.tp)])
        yield Entry(
            name=name,
            state=state,
            shape=cut.shape,
            dtype=first[0].dtype,
            pieces=tuple(_pieces(cut, by_rank)),
            role=names.roles[name],
            aliases=tuple(names.aliases.get(name, ())),
        )


def _pieces(cut: Cut, by_rank: Mapping[int, Sequence[_Held]]) -> Iterator[Piece]:
    """Replica 0 of a cut tensor is the first copy of every rank; of an uncut one that of the first rank."""
    replica = 0
    for rank, copies in sorted(by_rank.items()):
        if rank and copies[0].fragments[0].over_all:
            continue  # every rank names the same parts
        for number, copy in enumerate(copies):
            if cut.dim is None:
                at, replica = replica, replica + 1
            else:
                at = number
            for fragment in copy.fragments:
                yield from _located(cut, rank, fragment, at)


def _located(cut: Cut, rank: int, fragment: Fragment, replica: int) -> Iterator[Piece]:
    item = ITEM_BYTES[fragment.dtype]
    origin = fragment.offset - fragment.start * item
    for part in cut.parts(rank, fragment.shape, fragment.start, fragment.stop):
        if fragment.strides is None:
            yield part.at(fragment.file, origin, item, replica)
            continue
        index = _index(part.flat, fragment.shape)
        offset = sum(at * step for at, step in zip(index, fragment.strides, strict=True))
        yield Piece(fragment.file, origin + offset * item, part.start, part.shape, fragment.strides, replica)


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for step in contiguous(shape):
        at, flat = divmod(flat, step)
        found.append(at)
    return tuple(found)


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
