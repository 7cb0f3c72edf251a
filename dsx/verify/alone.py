"""A family of transformers in one process: before there are ranks, no weights, seconds.

It is the proof at start (:mod:`dsx.verify.small_step`) without its ranks and engine: the same small config,
reference and tolerances. The layers of the layer list, one after another, must give the loss and every
gradient of transformers' own forward and backward. And a block must give the same for each slice of a
sequence as for the whole, if what mixes tokens in it gets the whole one: only then may sequence parallelism
cut it.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsx.config.resolve import resolve
from dsx.config.run import RunConfig
from dsx.errors import ConfigError, DsxError, ModelError
from dsx.hub.model_structure import BlockCall, structure_of
from dsx.hub.read import block_plan
from dsx.hub.tensor_plan import mixing_children, sequence_cut
from dsx.kept import cache_folder, code_version, keep
from dsx.models.config_values import at
from dsx.models.spec import HubModel
from dsx.models.transformers_settings import first_line, quiet_transformers, torch_forms
from dsx.nn.documents import hidden_of
from dsx.verify.compare import relative, unlike
from dsx.verify.reference import Transformers
from dsx.verify.run import EXACT, family_plan
from dsx.verify.shrunk import trial
from dsx.verify.subject import NOISE, VerifyJob

_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What trying a small model of a config showed.

    Attributes:
        differs: What the layer list computes otherwise than transformers; None if nothing.
        no_sequence: Why sequence parallelism would be wrong; None if it is right.
        no_documents: Why documents of a pack cannot be kept apart; None if they can.
    """

    differs: str | None
    no_sequence: str | None
    no_documents: str | None
    blocks: int
    parameters: int


def probe(config: Mapping[str, Any], tensor_plan: Mapping[str, str | None] | None = None) -> Probe:
    """Try a small model of a config's family and structure.

    Args:
        config: Content of the config.json of a causal language model.
        tensor_plan: As of :func:`dsx.hub.read.hub_model`.

    Raises:
        ModelError: dsx cannot cut the model, or transformers makes no small one, or does not run it.
    """
    try:
        with torch_forms(), quiet_transformers(), torch.random.fork_rng(devices=[]):
            small = Small(config, tensor_plan or {}, documents="joined")
            return Probe(
                differs=small.difference(),
                no_sequence=small.model.no_sequence or _sequence_problem(small),
                no_documents=_documents_problem(small, config, tensor_plan or {}),
                blocks=small.model.num_layers,
                parameters=sum(spec.numel for spec in small.model.params),
            )
    except DsxError:
        raise
    except Exception as error:  # whatever the family's code does on this machine
        where = at("model_type", config.get("model_type"))
        what = f"a small model of it does not run ({first_line(error)})"
        raise ModelError(where, what, "use its own size") from error


def require_probed(model: HubModel, *, sequence: bool, documents: bool) -> None:
    """Refuse a model whose layer list is not what transformers computes.

    If tensor-parallel ranks cut the ``sequence``, or packs hold ``documents`` that are kept apart, that must
    be right too.

    What a probe showed is kept in the user's cache, by the config and the versions.

    A model whose small one cannot be tried here is let through, as its structure has been looked at, but
    not with a cut sequence or with documents apart.

    Raises:
        ConfigError: The sequence cannot be cut, or documents not be kept apart.
        ModelError: It differs; names what and by how much.
    """
    name = hashlib.sha256(repr((model.config, model.tensor_plan)).encode()).hexdigest()[:32]
    kept = cache_folder("probes") / code_version("**/*.py", "**/*.toml")
    place = kept / f"{name}.json"
    try:
        found = Probe(**json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        try:
            found = probe(json.loads(model.config), dict(model.tensor_plan))
        except DsxError as error:
            told = (
                f"whether that is right is not known, as no small model of it could be tried ({error.what})"
            )
            found = Probe(differs=None, no_sequence=told, no_documents=told, blocks=0, parameters=0)
        else:
            keep(place, json.dumps(asdict(found)))
    if found.differs is not None:
        raise ModelError(
            at("model_type", model.family),
            f"its layers one after another are not what transformers computes: {found.differs}",
            "use another family",
        )
    if sequence and found.no_sequence is not None:
        raise ConfigError(
            at("dsx.parallel.sequence_parallel", True),
            f"{model.family}: {found.no_sequence}",
            "set it to false",
        )
    if documents and found.no_documents is not None:
        raise ConfigError(
            at("dsx.data.documents", "apart"), f"{model.family}: {found.no_documents}", 'use "joined"'
        )


class Small:
    """The small model of a config: transformers' and the layers that dsx makes of it, of the same weights."""

    def __init__(
        self, config: Mapping[str, Any], tensor_plan: Mapping[str, str | None], *, documents: str
    ) -> None:
        torch.manual_seed(1)
        job = VerifyJob(content=_content(config, tensor_plan, documents), world_size=1, steps=1, clipping=0.0)
        self.config: RunConfig = job.config()
        assert isinstance(self.config.model, HubModel), "the content says so"
        self.model = self.config.model
        self.bench = family_plan(job, self.config, layers=True).bench
        self.batches = self.bench.batches(0)
        self.weights = {
            name: values.nan_to_num() + NOISE / 2 * torch.randn(values.shape)  # nothing is left at 0 or 1
            for name, values in self.bench.reference.weights().items()
        }

    @property
    def whole(self) -> Any:
        assert isinstance(self.bench.reference, Transformers)
        return self.bench.reference.whole

    def difference(self) -> str | None:
        """What the layer list computes otherwise than transformers' model of the same weights."""
        expected = self.bench.reference.evaluate(self.weights, self.batches)
        assert self.bench.layers is not None
        try:
            own = self.bench.layers.evaluate(self.weights, self.batches)
        except Exception as error:  # noqa: BLE001 - whatever the family's code does where it is cut
            return f"they do not run ({first_line(error)})"
        told = unlike(own, expected, self.bench, self.weights, self.batches)
        if told is None:
            return None
        names = {spec.name: f"the gradient of {spec.in_module}" for spec in self.model.params}
        return f"{names.get(told[0], told[0])} differs {told[1]}"


def _content(
    config: Mapping[str, Any], tensor_plan: Mapping[str, str | None], documents: str
) -> dict[str, Any]:
    """The JSON of a small model's step in one process."""
    block = {
        "model": {"config": dict(config), "implementation": "transformers"},
        "parallel": {"tensor_plan": dict(tensor_plan)},
        "data": {"source": "own", "sequence_length": _TOKENS, "documents": documents},
        "train": {"steps": 1, "output": "unused"},
    }
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    whole = resolve({**sizes, "optimizer": optimizer, "dsx": block}, world_size=1)
    return trial(whole).content


def _documents_problem(
    small: Small, config: Mapping[str, Any], tensor_plan: Mapping[str, str | None]
) -> str | None:
    """Why documents of a pack would not be kept apart: packs beside their documents one by one."""
    if not structure_of(small.model.config).takes_positions:
        return "the family's forward is not told positions, so that it cannot know where documents begin"
    if small.model.padding is not None:
        return "its positions leave out padding tokens, and those of packs count every token of a document"
    told = Small(config, tensor_plan, documents="apart").difference()
    if told is None or not told.startswith("they do not run"):
        return told and f"a document sees others of its pack: {told}"
    return told.replace("they do not run", "it does not run on packs of documents")


def _far(own: Tensor, other: Tensor) -> str | None:
    """How far two tensors are from each other, relative to the largest element; None if they are equal."""
    off = relative(own.detach(), other.detach())
    tiny = bool((own - other).abs().max() < EXACT.gradient * 1e-3) if own.shape == other.shape else False
    return None if off <= EXACT.gradient or tiny else f"by {off:.1e} of its largest element"


def _sequence_problem(small: Small) -> str | None:
    """Why a block may not be given a slice of the sequence; None if every kind of block may."""
    model, whole = small.model, small.whole
    structure = structure_of(model.config)
    blocks = whole.get_submodule(structure.blocks)
    calls: dict[int, BlockCall] = {}
    handles = [
        block.register_forward_pre_hook(
            lambda _, given, named, number=number: calls.update({number: BlockCall.of(given, named)}),
            with_kwargs=True,
        )
        for number, block in enumerate(blocks)
    ]
    with torch.no_grad():
        whole(input_ids=small.batches[0][0], use_cache=False)
        for handle in handles:
            handle.remove()
        for number in sorted(set(model.alike)):
            plan = block_plan(model, structure, number)
            alone = copy.deepcopy(blocks[number])
            mixing = dict(mixing_children(alone, plan))
            try:
                told = _sliced(alone, mixing, calls[number])
            except Exception as error:  # noqa: BLE001 - whatever the family's code does with a slice
                told = f"does not run on a slice of the sequence ({first_line(error)})"
            if told is not None:
                return f"block {number} {told}"
    return None


def _sliced(block: nn.Module, mixing: Mapping[str, nn.Module], call: BlockCall) -> str | None:
    """How a block's outputs for slices differ from those for the whole sequence."""
    seen: dict[str, list[tuple[Tensor, Any]]] = {name: [] for name in mixing}
    hooks = [
        child.register_forward_hook(
            lambda _, given, named, gave, name=name: seen[name].append(
                (_first(given, named), sequence_cut(gave, torch.clone))
            ),
            with_kwargs=True,
        )
        for name, child in mixing.items()
    ]
    whole = hidden_of(call.make(block, call.hidden))
    for hook in hooks:
        hook.remove()
    half = call.hidden.shape[1] // 2
    for part in (slice(0, half), slice(half, None)):
        uses = {name: iter(list(calls)) for name, calls in seen.items()}
        wrong: list[str] = []
        kept = {name: child.forward for name, child in mixing.items()}
        for name, child in mixing.items():
            child.forward = partial(_fed, name, uses[name], part, wrong)
        y = hidden_of(call.make(block, call.hidden[:, part]))
        for name, child in mixing.items():
            child.forward = kept[name]
        if wrong:
            return f"gives {wrong[0]} something else for a slice of the sequence than for the whole"
        if (told := _far(y, whole[:, part])) is not None:
            return f"mixes tokens outside of {', '.join(mixing) or 'its modules'}: its output differs {told}"
    return None


def _first(given: Any, named: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments: those that :func:`dsx.hub.tensor_plan.apply_plan` gathers."""
    x: Tensor = given[0] if given else next(v for v in named.values() if isinstance(v, Tensor))
    return x


def _fed(
    name: str, uses: Iterator[tuple[Tensor, Any]], part: slice, wrong: list[str], *given: Any, **named: Any
) -> Any:
    """Replay a module's recorded output for this slice, and note an input that differs from its own."""
    x, gave = next(uses)
    mine = _first(given, named)
    if mine.shape != x[:, part].shape or _far(mine, x[:, part]) is not None:
        wrong.append(name)
    return sequence_cut(gave, lambda whole: whole[:, part].clone())  # a block may add to it in place
