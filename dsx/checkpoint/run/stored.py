"""The part of each logical tensor that a rank of a run holds, stores in checkpoints and wants back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsx.checkpoint.base import is_left_out
from dsx.checkpoint.catalog import Catalog, Entry, Role, numbers_in
from dsx.checkpoint.formats.native import StoredBlock
from dsx.checkpoint.plain import as_numpy
from dsx.checkpoint.read import Reader
from dsx.checkpoint.run.names import CheckpointedRun, Names, is_cut
from dsx.engine.zero.master_shards import master_shards, trained_parameters
from dsx.errors import CheckpointError
from dsx.models.param import ParamSpec
from dsx.parallel.islands import OUTER_STATES

MASTER, WEIGHT = "master", "weight"
_ALL = (0, 1)  # of the ranks with the same elements, the only one


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked of a checkpoint, as the arguments of stock DeepSpeed's load_checkpoint say it.

    Attributes:
        optimizer: The optimizer's states and hyperparameters, and fp16's loss scale. What is not asked for
            stays as it is.
        progress: Counters, the schedule and random states: what is there beside weights and optimizer.
        frozen: Every frozen parameter; else those that are there.
    """

    optimizer: bool = True
    schedule: bool = True
    progress: bool = True
    frozen: bool = True


ALL = Wanted()


def stored_here(run: CheckpointedRun, *, everything: bool = False) -> Iterator[StoredBlock]:
    """This rank's share of the checkpoint: every element of every state is some rank's, once.

    A weight that the model computes with in its master's dtype is stored as the weight.

    With ``everything`` it is also what another rank stores and this one must get back.

    Yields:
        Blocks whose values are the run's own memory, flattened.
    """
    share, number = _Share(run, everything), 0
    zero = run.deepspeed_engine.zero_optimization_stage() > 0
    for kept in master_shards(run.deepspeed_engine):
        same = all(span.parameter.dtype == kept.master.dtype for span in kept.spans)
        states = {
            WEIGHT if same else MASTER: kept.master.detach().view(-1),
            **kept.moments(),
            **({} if run.outer is None else run.outer.states_of(kept)),
        }
        for state, values in states.items():
            for place, span in enumerate(kept.spans, number + 1):
                here = values[span.offset : span.offset + span.stop - span.start]
                spec = share.names.of(span.parameter)
                yield from share.block(
                    span.parameter, spec, (state, "trained"), span.start, here, place, divided=zero
                )
        number += len(kept.spans)
    yield from _untrained(run, share)


class _Share:
    """This rank's part of what ranks hold alike, or all of it."""

    def __init__(self, run: CheckpointedRun, everything: bool) -> None:
        self.names, self._groups, self._everything = Names(run), run.groups, everything

    def block(
        self,
        tensor: torch.Tensor,
        spec: ParamSpec,
        kind: tuple[str, Role],
        start: int,
        values: torch.Tensor,
        number: int = 0,
        *,
        divided: bool = False,
    ) -> Iterator[StoredBlock]:
        """What is stored of elements from ``start`` on of a flattened local tensor, if anything is."""
        (state, role), rank = kind, self._groups.rank
        cut, experts = is_cut(spec), spec.experts is not None
        copies = self._groups.mesh.copies(rank, cut=cut, divided=divided, experts=experts)
        # Ranks may have changed buffers: the first one's are stored. A tied weight is another stage's.
        elsewhere = copies[0] > 0 if role == "buffer" else getattr(tensor, "ds_pipe_replicated", False)
        if elsewhere and not self._everything:
            return
        dtype = str(values.dtype).removeprefix("torch.")
        entry = Entry(name=spec.name, state=state, shape=spec.shape, dtype=dtype, pieces=(), role=role)
        alone = self._everything or role == "buffer"
        held = start, start + values.numel()
        block = StoredBlock.of(entry, spec, self._groups.at, held, number, _ALL if alone else copies)
        if block is not None:
            low = block.first - start
            yield replace(block, values=values[low : low + block.numel])


def _untrained(run: CheckpointedRun, share: _Share) -> Iterator[StoredBlock]:
    """Frozen parameters, as ZeRO-3 has cut them, and buffers that a module's state dict has."""
    trained = {id(parameter) for parameter in trained_parameters(run.deepspeed_engine)}
    frozen: Any
    for number, frozen in enumerate(run.pipeline.chunks.parameters()):
        spec = share.names.of(frozen)
        if id(frozen) in trained or is_left_out(spec, run.run_config):
            continue
        low, high, values = 0, frozen.numel(), frozen.detach().view(-1)
        divided = hasattr(frozen, "ds_id")
        if divided:
            size, numel = frozen.partition_numel(), int(frozen.ds_numel)
            mesh, rank = run.groups.mesh, run.groups.rank
            low = min(mesh.replica_of(rank, experts=spec.experts is not None) * size, numel)
            high, values = min(low + size, numel), frozen.ds_tensor.detach().view(-1)
        part = values[: high - low]
        yield from share.block(frozen, spec, (WEIGHT, "frozen"), low, part, number, divided=divided)
    for spec, buffer in share.names.buffers():
        yield from share.block(buffer, spec, (WEIGHT, "buffer"), 0, buffer.detach().view(-1))


def load_stored(run: CheckpointedRun, catalog: Catalog, wanted: Wanted = ALL) -> int:
    """Fill masters, moments, frozen weights and buffers from a checkpoint of any layout.

    Each rank reads what it holds, and nothing else. The weights have yet to be made from the masters.

    Returns:
        Bytes of tensors that this rank read.
    """
    groups = catalog.facts.get("param_groups") or ()
    numbers = {name: numbers_in(group, name) for group in groups for name in group.get("names", ())}
    moments = sorted({entry.state for entry in catalog.entries} - {MASTER, WEIGHT, *OUTER_STATES})
    if run.outer is not None:
        run.outer.expect({entry.state for entry in catalog.entries})
    names = Names(run)
    for kept in master_shards(run.deepspeed_engine) if wanted.optimizer else ():
        if not kept.spans:
            continue
        found: dict[str, set[float]] = defaultdict(set)
        for span in kept.spans:
            for state, number in numbers.get(names.of(span.parameter).name, {}).items():
                found[state].add(number)
        kept.make(moments, {state: _one_of(catalog, state, values) for state, values in found.items()})
    frozen = {names.of(p).name for p in run.pipeline.chunks.parameters() if not p.requires_grad}
    there = {entry.name for entry in catalog.entries}
    with Reader(catalog) as reader, torch.no_grad():
        for block in stored_here(run, everything=True):
            if not wanted.optimizer and block.entry.state not in {MASTER, WEIGHT}:
                continue
            if wanted.frozen or block.entry.role != "frozen" or block.entry.name in there:
                _fill(reader, block, frozen=block.entry.name in frozen)
        return reader.read_bytes


def _fill(reader: Reader, block: StoredBlock, *, frozen: bool) -> None:
    """Read one block. For a frozen parameter, a layout keeps master and moments, or the weight alone."""
    wanted, values = block.entry, block.values
    name = wanted.name
    # A weight that is its own master comes from a master that is wider than the weight beside it.
    state = MASTER if (wanted.state, wanted.role) == (WEIGHT, "trained") else wanted.state
    where = f"{reader.catalog.root}: tensor {name}, {state}"
    entry, weight = reader.find(name, state), reader.find(name, WEIGHT)
    if wanted.role == "frozen":  # it may have been trained there
        entry = entry or reader.find(name, MASTER)
    if entry is None and weight is not None:
        if frozen:
            values.zero_()
            return
        if weight.role == "frozen":
            raise CheckpointError(
                where,
                "this parameter was frozen when the checkpoint was written, and is trained here",
                "freeze it, as it was (requires_grad_(False))",
            )
    if entry is None:
        raise CheckpointError(
            where, "the checkpoint has no such tensor", "give the model that it was trained with (dsx.model)"
        )
    if entry.shape != wanted.shape:
        raise CheckpointError(
            where,
            f"its shape is {entry.shape} there, {wanted.shape} here",
            "give the model that it was trained with (dsx.model, dsx.adapter), another checkpoint, or for a "
            "new run another dsx.train.output",
        )
    host = values.cpu()
    reader.fill(entry, block.parts, as_numpy(host), wanted.dtype)
    if host is not values:
        values.copy_(host)


def _one_of(catalog: Catalog, state: str, values: set[float]) -> float:
    """The one number of a buffer of several tensors, whose steps differ if some had no gradients at first."""
    if state != "step" and len(values) > 1:
        raise CheckpointError(
            f"{catalog.root}: {state} of the optimizer",
            f"tensors that ZeRO keeps in one buffer here have different ones: {sorted(values)}",
            "load it with ZeRO 0 or 3, or train those tensors in optimizer groups of their own",
        )
    return max(values)
