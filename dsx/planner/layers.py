"""What is trained, as the planner sees it: layers with their times, sizes and memory, of any origin."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import TYPE_CHECKING, Literal

from dsx.hub.allowed import unshared
from dsx.memory.layer_record import LayerRecord, LayerRequest, Shape
from dsx.memory.record_cache import LARGE_MICRO_BATCH, ModelRecords, alone, recorded_for_many
from dsx.models.flops import WIDTHS, auto_chunk, flops_per_token, tiles_of
from dsx.models.params import layer_kinds, param_specs
from dsx.models.spec import HubModel, Model
from dsx.parallel.limits import LayoutRequest
from dsx.parallel.mesh import Mesh
from dsx.planner.layer_times import Machine, layer_times, record_times, recorded_flops
from dsx.planner.layout import ADAPTERS, EXPERTS, Candidate, PlannedLayers, Task
from dsx.planner.profile import LayerCost

if TYPE_CHECKING:
    from dsx.memory.layer_list import ListRecords


@dataclass(frozen=True)
class ModelLayers(PlannedLayers):
    """A model.

    Attributes:
        sequence_length: Tokens.
        width: Bytes of a parameter.
        vocab_multiple: To which each rank's vocabulary rows are padded.
        documents: Whether documents of a sequence are kept apart.
        chunk_tokens: As ``dsx.loss.chunk_tokens`` has it.
        imbalance: Of experts that several ranks hold, as :class:`~dsx.memory.layer_record.Shape` has it.
    """

    model: Model
    sequence_length: int
    width: int
    vocab_multiple: int = 64
    documents: bool = False
    chunk_tokens: int | Literal["auto"] | None = None
    imbalance: float = 1.0

    @property
    def asked(self) -> LayoutRequest:
        layers = self.model.num_layers
        return LayoutRequest(model=self.model, layers=layers, layers_are="blocks", row=self.sequence_length)

    @property
    def soon(self) -> PlannedLayers:
        return _LargeMicroBatches(**{each.name: getattr(self, each.name) for each in fields(self)})

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def is_tied(self) -> bool:
        return self.model.tied_embeddings

    def shape(self, layout: Candidate) -> Shape:
        return Shape(
            model=self.model.for_tensor(layout.tensor),
            tensor=layout.tensor,
            sequence_parallel=layout.sequence_parallel,
            micro_batch=layout.micro_batch,
            sequence_length=self.sequence_length,
            width=self.width,
            vocab_multiple=self.vocab_multiple,
            recompute=layout.recompute,
            documents=self.documents,
            loss_chunk=self._chunk(layout),
            context=layout.mesh.cp,
            context_method=layout.context_method,
            mlp_tiles=tiles_of(
                layout.mlp_tiles, self.model, layout.micro_batch * self.sequence_length // layout.mesh.cp
            ),
            expert=layout.mesh.ep,
            imbalance=min(self.imbalance, float(layout.mesh.ep)),
        )

    def _chunk(self, layout: Candidate) -> int:
        if self.chunk_tokens != "auto":
            return self.chunk_tokens or 0
        return auto_chunk(
            self.model,
            layout.micro_batch * self.sequence_length // layout.mesh.cp,
            tensor=layout.tensor,
            width=self.width,
            pad_multiple=self.vocab_multiple,
            piles_up=layout.program.piles_up,
        )

    def times(self, machine: Machine, layout: Candidate) -> tuple[LayerCost, ...]:
        return layer_times(machine, self.shape(layout))

    def elements(self, tensor: int, *, trained: bool = False) -> tuple[int, ...]:
        """Parameters of every layer on a rank, or those that are trained; a tied table's in the head, too.

        Quantised ones are left out.
        """
        return self._elements(tensor, trained=trained, experts=False)

    def experts(self, tensor: int, *, trained: bool = False) -> tuple[int, ...]:
        """Those of them that ranks may share out."""
        return self._elements(tensor, trained=trained, experts=True)

    def _elements(self, tensor: int, *, trained: bool, experts: bool) -> tuple[int, ...]:
        held, at = [0] * len(layer_kinds(self.model)), Mesh.of(tp=tensor).at()
        for spec in param_specs(self.model.for_tensor(tensor), pad_multiple=self.vocab_multiple):
            if (trained and not spec.trained) or (experts and spec.experts is None):
                continue
            if spec.quantized != "none":
                continue  # Each rank holds a quantised matrix whole, and ZeRO neither cuts nor gathers it.
            for layer in {spec.layer, len(held) - 1} if spec.tie is not None else {spec.layer}:
                held[layer] += prod(spec.local_shape(at))
        return tuple(held)

    def kept_bytes(self, layout: Candidate) -> int:
        """What a block without a window keeps: with one it keeps more, if anything.

        Where parameters are frozen, what the block keeps that keeps least.
        """
        shape = self.shape(layout)
        if shape.recompute == "offload":  # The input is on the host, and the output is the next one's.
            return 0
        records = ModelRecords(shape, many=True)
        if self.model.adapter is not None or self.model.freeze:
            blocks = (at for at, kind in enumerate(layer_kinds(shape.model)) if kind == "Block")
            return min(records.layer(at, divided=True, hooked=False).kept_bytes for at in blocks)
        block = layer_kinds(shape.model).index("Block")
        if not isinstance(shape.model, HubModel):
            shape = replace(shape, model=replace(shape.model, windows=()))
        short = alone(shape, block)
        # The record that the times are taken from, so that none is made for this alone.
        request = LayerRequest(shape=short, kind="Block", divided=True)
        return recorded_for_many(request).kept_bytes

    def cuts_sequence(self, layout: Candidate) -> bool:
        return self.shape(layout).cuts_sequence

    def boundary_bytes(self, layout: Candidate) -> int:
        return self.shape(layout).boundary_bytes

    def kinds(self, layout: Candidate) -> tuple[str, ...]:
        model, adapter = self.model, self.model.adapter
        found = [EXPERTS] if isinstance(model, HubModel) and model.routed < 1 else []
        found += [ADAPTERS] if adapter is not None else []
        if adapter is not None and adapter.quantization != "none":
            found.append(f"a base in {adapter.quantization}")
        found += ["frozen parameters"] if model.freeze else []
        records, kinds = ModelRecords(self.shape(layout), many=True), layer_kinds(model)
        blocks = (at for at, kind in enumerate(kinds) if kind == "Block")
        ran = (records.layer(at, divided=True, hooked=False).forward for at in blocks)
        found += [] if all(any(event[0] == "sdpa" for event in events) for events in ran) else [_UNFUSED]
        return tuple(found)

    @property
    def unshared(self) -> str | None:
        return unshared(self.model)

    def flops(self, samples: int) -> float:
        return samples * self.sequence_length * flops_per_token(self.model, self.sequence_length)


_UNFUSED = "blocks without fused attention"


@dataclass(frozen=True)
class _LargeMicroBatches(ModelLayers):
    """Times and memory of layers in proportion to a micro-batch so large that what comes once has no share.

    Those of a micro-batch of m sequences are c + v m, of which this is v m: nothing once for each (such as
    reading weights), which among experts over several ranks is for less rows the more, nor what travels to
    these. So one record of a layer does for all micro-batches and degrees of experts.
    """

    _known: dict[object, tuple[LayerCost, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def soon(self) -> PlannedLayers:
        return self

    def _large(self, layout: Candidate) -> Candidate:
        mesh = Mesh.of(tp=layout.tensor, cp=layout.mesh.cp)
        return replace(layout, mesh=mesh, micro_batch=LARGE_MICRO_BATCH, mlp_tiles=1)

    def times(self, machine: Machine, layout: Candidate) -> tuple[LayerCost, ...]:
        large = self._large(layout)
        if (key := large.timing) not in self._known:  # all logits at a time take no longer than some
            self._known[key] = layer_times(machine, replace(self.shape(large), loss_chunk=0))
        share = layout.micro_batch / large.micro_batch
        return tuple(
            LayerCost(**{each.name: share * getattr(cost, each.name) for each in fields(cost)})
            for cost in self._known[key]
        )

    def kept_bytes(self, layout: Candidate) -> int:
        """Of feed-forwards in tiles, which keep less, none but the input is known."""
        if layout.mlp_tiles != 1 and layout.recompute != "full":
            return 0
        large = self._large(layout)
        return super().kept_bytes(large) * layout.micro_batch // large.micro_batch


def model_task(
    model: Model,
    *,
    machine: Machine,
    global_batch: int,
    sequence_length: int,
    vocab_multiple: int = 64,
    documents: bool = False,
    chunk_tokens: int | Literal["auto"] | None = None,
    imbalance: float = 1.0,
) -> Task:
    """The training of a model; ``chunk_tokens`` as ``dsx.loss.chunk_tokens`` has it."""
    width = WIDTHS[machine.precision]
    layers = ModelLayers(model, sequence_length, width, vocab_multiple, documents, chunk_tokens, imbalance)
    return Task(layers=layers, machine=machine, global_batch=global_batch)


@dataclass(frozen=True)
class OwnLayers(PlannedLayers):
    """A layer list of a user's own, whose micro-batch is that of its example.

    Attributes:
        width: Bytes of a parameter.
    """

    records: ListRecords
    width: int

    sequence_length = None

    @property
    def asked(self) -> LayoutRequest:
        return LayoutRequest(layers=self.num_layers)

    @property
    def is_tied(self) -> bool:
        return bool(self.records.ties)

    @property
    def num_layers(self) -> int:
        return len(self.records.layers)

    @property
    def _all(self) -> tuple[LayerRecord, ...]:
        loss = self.records.of_loss
        return (*self.records.layers, *(() if loss is None else (loss,)))

    def times(self, machine: Machine, layout: Candidate) -> tuple[LayerCost, ...]:
        del layout
        *layers, last = (record_times(machine, record, self.width) for record in self._all)
        if self.records.of_loss is None:
            return (*layers, last)
        return (*layers[:-1], LayerCost.total((layers[-1], last)))

    def elements(self, tensor: int, *, trained: bool = False) -> tuple[int, ...]:
        del tensor
        return self.records.elements(trained=trained)

    def boundary_bytes(self, layout: Candidate) -> int:
        del layout
        return max(sum(form.size_bytes for form in record.outputs) for record in self.records.layers[:-1])

    def kinds(self, layout: Candidate) -> tuple[str, ...]:
        del layout
        return ("layers of your own",)

    def flops(self, samples: int) -> float:
        """Of the products and attention that were recorded, forward and backward."""
        return samples / self.records.samples * sum(map(recorded_flops, self._all))
