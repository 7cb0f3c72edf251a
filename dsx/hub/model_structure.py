"""A family's model without weights, where its parts are, and what its own forward does around its blocks.

The model is built with its parameters on the meta device and its buffers (rotary tables) where they are
computed. Running the family's own forward with placeholders in the place of blocks shows what it gives each
block besides the hidden states: masks and positions are then the family's own, with no code per family.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dsx.errors import ModelError
from dsx.hub.on_meta import copied, parameters_on_meta, put_plain_modules
from dsx.hub.top import Top
from dsx.models.config_values import MOST_LAYERS, at
from dsx.models.hf_config import SAY_NOTHING
from dsx.models.transformers_settings import quiet_transformers, torch_forms, with_cap
from dsx.terminal import shortened

HIDDEN = "hidden_states"
"""The argument of a block that goes from block to block."""

_PROBED = (2, 8)
"""Samples and tokens with which a forward is looked at."""


def hf_config_of(config: Mapping[str, Any]) -> Any:
    """The config object of the content of a config.json.

    Raises:
        ModelError: transformers has no such family, or refuses the config.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = with_family_floats(config)
    settings = {key: value for key, value in config.items() if key not in ("torch_dtype", "dtype")}
    kind = settings.pop("model_type", None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ModelError(
            at("model_type", kind),
            "neither dsx nor this transformers has such a family",
            "write the model_type of a causal language model of transformers",
        )
    for key, value in settings.items():  # some families list each layer as they are made
        counts = key.startswith(("n_", "num_")) and key.endswith(("layer", "layers"))
        if counts and isinstance(value, int) and value > MOST_LAYERS:
            raise ModelError(at(key, value), f"more than {MOST_LAYERS:,}", "give the model's own config")
    try:
        with quiet_transformers():
            family = CONFIG_MAPPING[kind]
            decoded = family._decode_special_floats(settings)  # noqa: SLF001 - files have no infinity
            made = family.from_dict(decoded)
            # A folder may ask for outputs that training does not look at, and for tuples.
            made.return_dict, made.output_hidden_states = True, False
            return with_cap(made)
    except Exception as error:  # noqa: BLE001 - each family checks in its own way
        raise ModelError(
            at("model_type", kind),
            f"transformers cannot make its config ({_told(error)})",
            "give a config.json that transformers takes: its sizes as numbers, its lists an entry per layer",
        ) from None


_NEAR, _Z_LOSS = 0.88, "z_loss_coefficient"


def check_keys(config: Mapping[str, Any]) -> None:
    """Refuse what would be left out in silence: quantisation, near misses of keys, one of two names.

    Raises:
        ModelError: Naming the key; or transformers cannot make the config.
    """
    made = hf_config_of(config)
    if config.get("quantization_config"):
        raise ModelError(
            at("quantization_config", config["quantization_config"]),
            "dsx trains plain weights, which it makes of a folder's itself (dsx.model.path)",
            "give the folder; if its weights are plain, remove the key",
        )
    if config.get(_Z_LOSS):
        raise ModelError(
            at(_Z_LOSS, config[_Z_LOSS]),
            "the family's own loss then has a z-loss of the head's logits, which dsx's has not",
            "set it to 0 (dsx.model.overrides), and train without it",
        )
    for general, own in made.attribute_map.items():
        if general in config and config.get(own, config[general]) != config[general]:
            raise ModelError(
                at(own, config[own]), f"{general} = {config[general]!r} says otherwise", "keep one of the two"
            )
    known = {"torch_dtype", "rope_theta", "rope_scaling", *made.attribute_map}
    known |= hf_config_of({"model_type": config["model_type"]}).to_dict().keys()
    for parent in type(made).__mro__:
        known |= {*getattr(parent, "__annotations__", {}), *vars(parent)}
    for key, value in config.items():
        if key in known or key in SAY_NOTHING:
            continue
        near = get_close_matches(key, sorted(known), n=1, cutoff=_NEAR)
        if near and near[0] not in config:  # else it is a key of another family, which means nothing here
            raise ModelError(
                at(key, value), f"a {config['model_type']} config has no such key", f"write {near[0]}"
            )


def with_family_floats(config: Mapping[str, Any], part: type | None = None) -> dict[str, Any]:
    """The config with floats where its family wants them: DeepSpeed reads the 1.0 of a JSON as 1.

    ``part`` is the class of one that is a part of another's. Its config may name no family, or the whole's:
    transformers makes it of its class all the same, unless that is one for any family.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, wanted = config.get("model_type"), dict[str, str]()
    named = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else part
    family = part if getattr(part, "model_type", None) else named
    for parent in reversed(family.__mro__ if family else ()):
        wanted |= {name: str(hint) for name, hint in getattr(parent, "__annotations__", {}).items()}
    floats = {name for name, hint in wanted.items() if "float" in hint and "int" not in hint}

    def each(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(each, value))
        return float(value) if type(value) is int else value

    parts = getattr(family, "sub_configs", {})
    inside = {
        key: with_family_floats({"model_type": getattr(of, "model_type", None), **config[key]}, of)
        for key, of in parts.items()
        if isinstance(config.get(key), dict)
    }
    own = {key: each(value) if key in floats else value for key, value in config.items()}
    return own | inside


def _told(error: Exception) -> str:
    return shortened(f"{type(error).__name__}: {' '.join(str(error).split())}", _MOST_TOLD)


_MOST_TOLD = 300


def without_weights(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> nn.Module:
    """The causal language model of a config.json, its parameters on the meta device, in training.

    Raises:
        ModelError: transformers has no such family or no causal language model of it, or refuses the config.
    """
    from dsx.hub.headed import language_model  # here: it imports transformers

    described = hf_config_of(config)
    check_one_stack(described)
    try:
        with quiet_transformers(), parameters_on_meta():
            model: nn.Module = language_model(described, dtype=dtype)
    except Exception as error:  # noqa: BLE001 - as above
        raise ModelError(
            at("model_type", described.model_type),
            f"transformers cannot make its causal language model ({_told(error)})",
            "give the config of one that AutoModelForCausalLM makes",
        ) from None
    put_plain_modules(model)
    return model.train()


def with_weights(config: Mapping[str, Any]) -> Any:
    """The same model in fp32, with fresh weights as transformers draws them."""
    from dsx.hub.headed import language_model  # here: as above

    described = hf_config_of(config)
    with quiet_transformers():
        made = language_model(described, dtype=torch.float32)
    return made.float().train()  # a few modules make theirs in bf16, which from_pretrained changes


def check_one_stack(described: Any) -> None:
    """Raise ModelError if a config object is of several models, or of an encoder and a decoder."""
    parts = {name: getattr(described, name, None) for name in getattr(described, "sub_configs", None) or ()}
    text = next((part for name, part in parts.items() if "text" in name and part is not None), None)
    if text is not None:
        raise ModelError(
            at("model_type", described.model_type),
            "it is composed of several models, of which dsx trains the language model",
            f'name its folder as dsx.model.path; fresh, its "{text.model_type}" as dsx.model.config',
        )
    if getattr(described, "is_encoder_decoder", False):
        raise ModelError(
            at("model_type", described.model_type),
            "it has an encoder and a decoder, and dsx trains language models that are one stack of blocks",
            "use a decoder-only model",
        )


class Placeholder(nn.Module):
    """In the place of a block: notes what it is called with, and hands hidden states on.

    Args:
        like: The block, whose other attributes the family's forward may read.
        called: Given what it is called with, gives the hidden states that go on.
        extras: Asked after that: how many outputs the block has beside them; None if it has none.
    """

    def __init__(
        self, like: nn.Module, called: Callable[[BlockCall], Tensor], extras: Callable[[], int | None]
    ) -> None:
        super().__init__()
        self._like, self._called, self._extras = (like,), called, extras
        self.beside: Any = None
        """What the outputs beside the hidden states are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._like[0], name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """As the block's forward."""
        hidden, extras = self._called(BlockCall.of(arguments, named)), self._extras()
        return hidden if extras is None else (hidden, *(self.beside,) * extras)


@dataclass(frozen=True, slots=True)
class BlockCall:
    """What a family's forward gives a block.

    Attributes:
        hidden: The hidden states.
        arguments: Positional arguments after them; empty if they are given by name.
        named: Named arguments, the hidden states aside.
        by_name: Whether the hidden states are given by name.
    """

    hidden: Tensor
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    by_name: bool

    @classmethod
    def of(cls, arguments: tuple[Any, ...], named: dict[str, Any]) -> BlockCall:
        if arguments:
            return cls(arguments[0], arguments[1:], named, by_name=False)
        others = {name: value for name, value in named.items() if name != HIDDEN}
        return cls(named[HIDDEN], (), others, by_name=True)

    def make(self, block: nn.Module, hidden: Tensor) -> Any:
        """Call ``block`` so with other hidden states."""
        if self.by_name:
            return block(**{HIDDEN: hidden}, **self.named)
        return block(hidden, *self.arguments, **self.named)


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """What arguments consist of: tensors and other values, each with its path."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from ((f".{key}{path}", leaf) for path, leaf in leaves(each))
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from ((f"[{place}]{path}", leaf) for path, leaf in leaves(each))
    else:
        yield "", value


@dataclass
class ModelStructure:
    """A family's model without weights, and where its parts are.

    Attributes:
        model: The causal language model, its parameters on the meta device.
        base: Path of the stack of blocks with what surrounds them.
        blocks: Path of the list of blocks.
        embedding: Path of the word embedding.
        head: Path of the output linear.
        before: Paths below ``base`` of modules with parameters that run before the first block.
        after: Of those that run after the last one.
        above: Paths of those that run between the base and the matrix of the head.
        scale: What its forward multiplies vectors by that it has looked up, and not those that it is given.
        padding: The token that positions do not count, which begin behind its number; None if they count all.
        writes: Whether its forward writes into the vectors that it is given.
        shifts: Whether the first block gets something else than the word embedding's output.
        stream: Sizes of what goes from block to block, samples and tokens aside.
        plain_end: Whether nothing follows the last block, or one module of ``after`` and nothing else.
        extras: For each block, its outputs beside the hidden states; None if it returns these alone.
        calls: What each block is called with, for a few tokens.
        read: For each block, its linears whose matrices its own code multiplies by, past calls of them.
        plans: What is kept of tensor plans, by kinds of blocks (:func:`dsx.hub.read.block_plan`).
    """

    model: Any
    base: str
    blocks: str
    embedding: str
    head: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    above: tuple[str, ...] = ()
    scale: float = 1.0
    padding: int | None = None
    writes: bool = False
    shifts: bool = False
    stream: tuple[int, ...] = ()
    plain_end: bool = False
    extras: dict[int, int | None] = field(default_factory=dict)
    calls: dict[int, BlockCall] = field(default_factory=dict, repr=False)
    read: dict[int, frozenset[str]] = field(default_factory=dict)
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def list_of_blocks(self) -> nn.ModuleList:
        found: nn.ModuleList = self.model.get_submodule(self.blocks)
        return found

    @property
    def width(self) -> int:
        """Size of a token's vector from the word embedding."""
        return int(self.model.get_submodule(self.embedding).weight.shape[1])

    @property
    def blocks_below_base(self) -> str:
        """Path of the list of blocks inside the base."""
        return self.blocks.removeprefix(f"{self.base}.")

    @property
    def takes_positions(self) -> bool:
        base = self.model.get_submodule(self.base)
        return "position_ids" in inspect.signature(type(base).forward).parameters

    @property
    def kinds_of_masks(self) -> list[str]:
        """What its config calls the kinds of attention of its layers, in alphabetical order."""
        return sorted({*(getattr(self.model.config, "layer_types", None) or ())})

    def stripped(
        self,
        keep: tuple[str, ...],
        called: Callable[[int, BlockCall], Tensor],
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> nn.Module:
        """A copy of the base with placeholders for blocks, and no parameters but those of ``keep``.

        In the place of others are zeros that take no memory: what the forward makes of them nobody reads.

        Args:
            keep: Paths below the base of modules whose own parameters stay.
            called: Given a block's number and call, returns the hidden states that go on.
            device: Of the zeros.
            dtype: Of the zeros.
        """
        base: nn.Module = self.model.get_submodule(self.base)
        blocks = self.list_of_blocks
        bare: nn.Module = copied(base, {id(blocks): nn.ModuleList()})  # without the blocks
        places = nn.ModuleList(
            Placeholder(block, partial(called, number), partial(self.extras.get, number))
            for number, block in enumerate(blocks)
        )
        owner, _, name = self.blocks_below_base.rpartition(".")
        setattr(bare.get_submodule(owner), name, places)
        zero = torch.zeros(1, dtype=dtype, device=device)
        for path, module in bare.named_modules():
            for own, parameter in list(module.named_parameters(recurse=False)):
                if path not in keep:
                    delattr(module, own)
                    # No parameter, so that nobody looks for its values.
                    vars(module)[own] = zero.expand(parameter.shape)
        return bare


@lru_cache(maxsize=8)
def structure_of(config: str) -> ModelStructure:
    """The structure of the model of a config.json's text.

    Raises:
        ModelError: transformers cannot make it, or it cannot be cut into layers; names the reason.
    """
    # The family's forward may drop out; ranks draw alike after it.
    with torch_forms(), torch.random.fork_rng(devices=[]):
        model: Any = without_weights(json.loads(config))
        _require_all_blocks(model)
        found = _found(model)
        _require_apart(model, found)
        _looked_at(found)
        if any(found.extras.values()):
            _require_own(found)
        _look_up(found)
        _look_for_padding(found)
    return found


_OTHER = "dsx cannot cut this family into stages: use another"


def _refusal(model: Any, why: str, fix: str = _OTHER) -> ModelError:
    return ModelError(at("model_type", model.config.model_type), why, fix)


def _unrun(model: Any, error: Exception) -> ModelError:
    """The refusal of a model whose forward raised around placeholders; its own, if a block was refused."""
    why = f"its forward does not run without its blocks ({_told(error)})"
    return error if isinstance(error, ModelError) else _refusal(model, why)


def _require_all_blocks(model: Any) -> None:
    """Refuse a model that leaves out blocks at random while it trains."""
    for key, value in model.config.to_dict().items():
        if key.replace("_", "").endswith("layerdrop") and value:
            raise ModelError(
                at(f"model_type = {model.config.model_type!r}, {key}", value),
                "its forward leaves out blocks at random, which ranks and stages would do each by itself",
                "set it to 0 (dsx.model.overrides)",
            )


def _found(model: Any) -> ModelStructure:
    paths = {id(module): path for path, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or id(head) not in paths:
        raise _refusal(model, "its forward ends without an output linear")
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise _refusal(model, "its word embedding or its head is no table of the vocabulary")
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and module]
    if not lists:
        raise _refusal(model, "it has no list of blocks, or one of no blocks")
    blocks = max(lists, key=lambda path: sum(p.numel() for p in model.get_submodule(path).parameters()))
    base, inside = blocks.rpartition(".")[0], paths[id(embedding)]
    while base and not inside.startswith(f"{base}."):
        base = base.rpartition(".")[0]
    if not base:
        raise _refusal(model, "no module holds both its word embedding and its blocks")
    return ModelStructure(model=model, base=base, blocks=blocks, embedding=inside, head=paths[id(head)])


def _require_apart(model: Any, found: ModelStructure) -> None:
    """Refuse blocks that share parameters."""
    owners: dict[int, int] = {}
    for number, block in enumerate(found.list_of_blocks):
        for name, parameter in block.named_parameters():
            first = owners.setdefault(id(parameter), number)
            if first != number:
                raise _refusal(model, f"blocks {first} and {number} share the parameter {name}")


def _looked_at(found: ModelStructure) -> None:
    """Run the family's forward around placeholders and note what happens."""
    model, order = found.model, list[Any]()
    tried: dict[Any, tuple[int | None, list[str], frozenset[str]]] = {}
    handed, written = list[Tensor](), list[str]()
    base = model.get_submodule(found.base)
    others = tuple(
        path
        for path, module in base.named_modules()
        if path
        and not (f"{found.base}.{path}.").startswith(f"{found.blocks}.")
        and not f"{found.base}.{path}.".startswith(f"{found.embedding}.")
        and any(True for _ in module.parameters(recurse=False))
    )

    def called(number: int, call: BlockCall) -> Tensor:
        order.append(number)
        block = found.list_of_blocks[number]
        kind = tuple((type(module), settings_of(module)) for module in block.modules())
        if kind not in tried:
            tried[kind] = _extras(model, block, call)
        (found.extras[number], wrote, found.read[number]), found.calls[number] = tried[kind], call
        written.extend(f"block {number} writes into its argument {name}" for name in wrote)
        if number == 0:
            handed.append(call.hidden)
        handed[1:] = [torch.full_like(call.hidden, float(number + 2))]
        return handed[-1]

    copied, uses = found.stripped((), called), list[Any]()
    for path in others:
        copied.get_submodule(path).register_forward_hook(partial(_noted, path, order, uses))
    x, words = torch.ones(*_PROBED, found.width), _words(copied)
    try:
        with torch.no_grad():
            end = copied(inputs_embeds=x, use_cache=False)
    except Exception as error:  # noqa: BLE001 - whatever the family's code does
        raise _unrun(model, error) from None
    _require_settled(words - _words(copied))
    if written:
        raise _refusal(
            model, f"{written[0]}, which later blocks get too: state that is carried across blocks"
        )
    _require_order(model, order, len(found.list_of_blocks))
    first, last = order.index(0), len(order) - 1 - order[::-1].index(len(found.list_of_blocks) - 1)
    found.before = tuple(dict.fromkeys(path for path in order[:first] if isinstance(path, str)))
    found.after = tuple(dict.fromkeys(path for path in order[last:] if isinstance(path, str)))
    both = set(found.before) & set(found.after)
    unused = [path for path in others if path not in (*found.before, *found.after)]
    if both or unused:
        raise _refusal(
            model,
            f"{min(both)} runs before and after its blocks" if both else f"{unused[0]} is never used",
        )
    found.writes, found.shifts = not bool((x == 1).all()), handed[0] is not x
    found.stream = tuple(handed[0].shape[2:])
    _look_behind(
        found, uses, handed[1], end.last_hidden_state if hasattr(end, "last_hidden_state") else end[0]
    )
    _require_stateless(found)


def _words(base: nn.Module) -> set[tuple[str, str, str]]:
    """Settings of the modules below a base that are words: which attention, for example."""
    every = ((path, *item) for path, module in base.named_modules() for item in vars(module).items())
    return {(path, name, value) for path, name, value in every if type(value) is str}


def _require_settled(changed: set[tuple[str, str, str]]) -> None:
    """Refuse a forward that has changed such settings for a short sequence."""
    for _, name, value in changed:
        what = "its forward has another for short sequences, so that blocks compute otherwise in long ones"
        raise ModelError(at(name, value), what, "write what it has for short sequences")


def _look_behind(found: ModelStructure, uses: list[Any], last: Tensor, result: Tensor) -> None:
    """Note how the base comes to its result, and what runs on that before the matrix of the head."""
    ends = [use for use in uses if use[0] in found.after]
    given, gave = ends[0][1:] if ends else ((last,), last)
    found.plain_end = len(ends) < 2 and gave.is_set_to(result) and torch.equal(given[0], last)
    base, head = (found.model.get_submodule(path) for path in (found.base, found.head))
    known = {id(parameter) for module in (base, head) for parameter in module.parameters()}
    top, order = Top(found.model, found.base, found.head), list[Any]()
    for path, module in found.model.named_modules():
        own = any(id(parameter) not in known for parameter in module.parameters(recurse=False))
        if own and path and not f"{found.head}.".startswith(f"{path}."):
            top.model.get_submodule(path).register_forward_hook(partial(_noted, path, order, []))
    with suppress(Exception):  # what has not run is in no layer then, and refused for that
        top.reached(result.to("meta"))
    found.above = tuple(dict.fromkeys(order))


def _noted(path: str, order: list[Any], uses: list[Any], _module: nn.Module, given: Any, gave: Any) -> None:
    order.append(path)
    uses.append((path, given, gave))


def _require_order(model: Any, order: list[Any], blocks: int) -> None:
    numbers = [entry for entry in order if isinstance(entry, int)]
    if Counter(numbers) != Counter(range(blocks)) or numbers != sorted(numbers):
        raise _refusal(model, "its forward does not run its blocks once each, in their order")
    first, last = order.index(0), order.index(blocks - 1)
    between = [entry for entry in order[first:last] if isinstance(entry, str)]
    if between:
        raise _refusal(model, f"its forward runs {between[0]} between its blocks")


def _extras(model: Any, block: nn.Module, call: BlockCall) -> tuple[int | None, list[str], frozenset[str]]:
    """How many outputs a block has beside the hidden states, None if it returns these alone; what it writes.

    And the linears that it reads, whose matrices it multiplies by itself. It is run without storage. One that
    looks at values cannot be; then its annotation counts. It writes into those of its arguments that hold
    something else afterwards, as a dict does that blocks share.
    """
    there = _form_of(call)
    places = {**{str(place): value for place, value in enumerate(there.arguments, 1)}, **there.named}
    before = {name: list(leaves(value)) for name, value in places.items()}
    form, read = copy.deepcopy(block).to("meta", torch.bfloat16), frozenset[str]()
    own = {path: each for path, each in form.named_modules() if type(each).forward is nn.Linear.forward}
    for linear in own.values():  # called, it computes with another matrix: a gradient comes to what is read
        linear.forward = partial(F.linear, weight=linear.weight.detach(), bias=linear.bias)
    try:
        with torch.enable_grad(), torch_forms():
            gave = there.make(form, there.hidden)
    except Exception as error:  # noqa: BLE001 - as above
        if isinstance(error, TypeError) and "NoneType" in str(error):  # a number is lacking
            raise _lacking(model, error) from None
        function = getattr(type(block).forward, "__wrapped__", type(block).forward)
        told = str(function.__annotations__.get("return", ""))
        beside = max(told.count(","), 0) if "uple" in told else None
    else:
        beside = len(gave) - 1 if isinstance(gave, tuple | list) else None
        ends = [each for each in tree_leaves(gave) if isinstance(each, Tensor) and each.requires_grad]
        with suppress(Exception):  # nothing to look for, or a backward that has no form without storage
            of = [linear.weight for linear in own.values()], [*map(torch.ones_like, ends)]
            found = torch.autograd.grad(ends, *of, allow_unused=True)
            read = frozenset(path for path, each in zip(own, found, strict=True) if each is not None)
    return beside, [name for name in places if _ids(leaves(places[name])) != _ids(before[name])], read


def _lacking(model: Any, error: Exception) -> ModelError:
    """The refusal of a config that leaves out a number which the family's blocks need."""
    hints = {
        name: str(hint)
        for parent in type(model.config).__mro__
        for name, hint in vars(parent).get("__annotations__", {}).items()
    }
    empty = [
        key
        for key, value in model.config.to_dict().items()
        if value is None and re.search(r"\b(int|float)\b", hints.get(key, "")) and not key.endswith("_id")
    ]
    named = ", ".join(empty) or "compare with a published config"
    fix = f"give the number that is null{', one of these' * bool(empty[1:])}: {named}"
    what = f"transformers does not run its blocks with this config ({_told(error)})"
    return ModelError(at("model_type", model.config.model_type), what, fix)


def _form_of(call: BlockCall) -> BlockCall:
    def moved(value: Any) -> Any:
        return tree_map(lambda each: without_storage(each) if isinstance(each, Tensor) else each, value)

    return BlockCall(moved(call.hidden), moved(call.arguments), moved(call.named), call.by_name)


class _CarriedError(Exception):
    """A block uses what another gave beside the hidden states."""


class _Carried:
    """In the place of such an output: any use of it is an error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python and torch of every object
            raise AttributeError(name)
        raise _CarriedError


def _calls(found: ModelStructure, beside: Any, **given: Any) -> list[BlockCall]:
    """What blocks are called with in a forward, as far as it runs, and what they give beside that."""
    calls: list[BlockCall] = []

    def called(_number: int, call: BlockCall) -> Tensor:
        calls.append(call)
        return call.hidden

    base = found.stripped((), called)
    table = base.get_submodule(found.embedding.removeprefix(f"{found.base}."))
    table.register_forward_hook(lambda *_: torch.ones(*_PROBED, found.width))
    for module in base.modules():
        if isinstance(module, Placeholder):
            module.beside = beside
    with suppress(Exception), torch.no_grad():  # it may look at such an output, or take other arguments
        base(**given, use_cache=False)
    return calls


def _require_own(found: ModelStructure) -> None:
    """Refuse a family whose blocks use what blocks before them gave beside the hidden states.

    Their forward may be given it and not use it, as configs of `glm_moe_dsa` without shared layers have it.
    """
    x = torch.ones(*_PROBED, found.width)
    for number, call in enumerate(_calls(found, _Carried(), inputs_embeds=x)):
        given = [path for path, each in leaves(call.named) if isinstance(each, _Carried)]
        if given and _uses_carried(found.list_of_blocks[number], call):
            raise _refusal(
                found.model,
                f"block {number} uses {given[0].lstrip('.')}, which the block before it gives beside the "
                "hidden states: state that is carried across blocks",
            )


def _uses_carried(block: nn.Module, call: BlockCall) -> bool:
    """Whether a block looks at a :class:`_Carried` of its arguments."""
    try:
        there = _form_of(call)
        with torch.no_grad(), torch_forms():
            there.make(copy.deepcopy(block).to("meta", torch.bfloat16), there.hidden)
    except Exception as error:  # noqa: BLE001 - what looks at values cannot be looked at
        return isinstance(error, _CarriedError)
    return False


def _look_up(found: ModelStructure) -> None:
    """Note what a forward does to vectors that it has looked up, and refuse blocks that use the tokens.

    Stages and layers do not hand these on. A forward may give them to blocks that do not look at them, as
    `deepseek_v4` does without hash routers.
    """
    tokens = torch.zeros(_PROBED, dtype=torch.int64)
    tried, calls = set[Any](), _calls(found, None, input_ids=tokens)
    for call in calls[:1]:
        factors = (call.hidden / found.calls[0].hidden).flatten()
        if len(factors) and bool((factors == factors[0]).all()):
            found.scale = float(factors[0])
    for number, call in enumerate(calls):
        given = [path for path, each in leaves((call.arguments, call.named)) if each is tokens]
        block = found.list_of_blocks[number]
        kind = tuple((type(module), settings_of(module)) for module in block.modules())
        if given and kind not in tried and _uses_carried(block, _with_carried(call, tokens)):
            name = given[0].rpartition(".")[2]
            what = f"block {number} uses {name}, the tokens themselves, which layers do not hand on"
            raise _refusal(found.model, what, "use a config without that, or another family")
        tried.add(kind)


def _with_carried(call: BlockCall, value: Tensor) -> BlockCall:
    """A call with a :class:`_Carried` in the place of ``value``."""
    stands = partial(tree_map, lambda each: _Carried() if each is value else each)
    return replace(call, arguments=stands(call.arguments), named=stands(call.named))


def _look_for_padding(found: ModelStructure) -> None:
    """Note whether the positions that a forward makes of tokens are :func:`counted`."""
    padding, base = getattr(found.model.config, "pad_token_id", None), found.stripped((), _same)
    tables = [path for path in found.before if isinstance(base.get_submodule(path), nn.Embedding)]
    if padding is None or not tables:
        return
    used = list[Any]()
    for path in tables:
        base.get_submodule(path).register_forward_pre_hook(lambda _, given: used.append(given[0]))
    tokens = torch.full(_PROBED, padding)
    tokens[:, ::3] = int(padding == 0)
    with suppress(Exception), torch.no_grad():
        base(input_ids=tokens, use_cache=False)
    wanted = counted(tokens, padding)
    if any(isinstance(each, Tensor) and torch.equal(each, wanted) for each in used):
        found.padding = padding


def _same(_number: int, call: BlockCall) -> Tensor:
    return call.hidden


def counted(ids_BS: Tensor, padding: int) -> Tensor:
    """Positions [B, S] in whole rows: behind the number of ``padding``, which is at that number itself.

    As ``create_position_ids_from_input_ids`` of transformers/models/roberta/modeling_roberta.py has them.
    """
    counts = ids_BS != padding
    return counts.cumsum(1) * counts + padding


def _ids(held: Iterable[tuple[str, Any]]) -> list[tuple[str, int]]:
    """What a value consists of, by place and identity."""
    return [(path, id(each)) for path, each in held]


def settings_of(module: nn.Module) -> tuple[Any, ...]:
    """What a module was made with, its own number aside."""
    plain = bool | int | float | str | None
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, plain) and name not in ("layer_idx", "layer_id", "layer_number", "idx")
    )


def without_storage(tensor: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor's form; in bf16, because products of many experts at a time exist for no other dtype there."""
    return tensor.to("meta", dtype if tensor.is_floating_point() else tensor.dtype)


def _require_stateless(found: ModelStructure) -> None:
    """Refuse a family whose blocks get more from blocks before them than the hidden states."""
    seen: list[list[BlockCall]] = []
    for value in (0.5, -1.5):
        calls: list[BlockCall] = []

        def called(
            number: int, call: BlockCall, calls: list[BlockCall] = calls, value: float = value
        ) -> Tensor:
            calls.append(call)
            return call.hidden * value + number

        base = found.stripped((), called)
        x = torch.linspace(-value, value, found.width).repeat(*_PROBED, 1)
        try:
            with torch.no_grad():
                base(inputs_embeds=x, use_cache=False)
        except Exception as error:  # noqa: BLE001 - whatever the family's code does
            raise _refusal(found.model, f"its forward does not run ({_told(error)})") from None
        seen.append(calls)
    for number, (one, other) in enumerate(zip(*seen, strict=True)):
        told = [list(leaves((call.arguments, call.named))) for call in (one, other)]
        for (path, a), (_, b) in zip(*told, strict=True):
            if isinstance(a, Tensor) and (a.shape != b.shape or not torch.equal(a, b)):
                raise _refusal(
                    found.model,
                    f"block {number} gets{path.replace('[1]', '', 1)} which depends on the hidden states: "
                    "state that is carried across blocks",
                )
