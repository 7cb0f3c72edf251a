"""Pictures beside text: the tower of a composite model, and what its own forward hands to its language model.

No family is known by name. The composite class's forward runs without its language model: what that would be
called with is what travels to the blocks. The word vectors with pictures in them are hidden states; positions
(Qwen-VL's three for each token) and masks (Gemma 3's, both ways within a picture) go with them, and every
stage gives these to the family's text forward, as it gives it positions of packs. Whatever else the language
model is called with may only be added between blocks, as Qwen3-VL's deeper features are: the text forward,
run around blocks that give zeros, shows what.

The tower is whole on every rank of the first stage. What of it is trained, adapters too, is a parameter of
the first layer like others, whose gradients are equal on all tensor-parallel ranks. What is frozen is no part
of what ZeRO, checkpoints and exports see: an exported folder has it byte for byte from where it was read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from dsx.errors import ModelError
from dsx.hub.composite import CompositeNames
from dsx.hub.model_structure import BlockCall, structure_of
from dsx.hub.on_meta import forget
from dsx.hub.tensor_plan import set_dropouts
from dsx.models.config_values import at
from dsx.models.param import TOWER, ParamSpec
from dsx.models.spec import HubModel
from dsx.models.transformers_settings import first_line, quiet_transformers
from dsx.nn.adapter import attach, begin
from dsx.nn.documents import Told
from dsx.nn.linear import LocalLinear
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import Weights, initialise, own_dtype

_FLAGS = (bool, int, str, type(None))
_SAID_ELSEWHERE = ("inputs_embeds", "input_ids", "use_cache", "return_dict", "past_key_values")


class _HandedOverError(Exception):
    """Ends the composite forward where its language model would begin."""

    def __init__(self, named: dict[str, Any]) -> None:
        super().__init__()
        self.named = named


class _Joined(torch.autograd.Function):
    """Hands vectors on, and gives parameters gradients of zero beside those that they get."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.forms = [(each.shape, each.dtype) for each in parameters]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (given,) = gradients
        return given, *(given.new_zeros((), dtype=dtype).expand(shape) for shape, dtype in ctx.forms)


class Tower(nn.Module):
    """What of a composite model is not its language model. Parameters of it are what is trained alone.

    Args:
        model: The language model; its ``pictures`` is the config of the composite one.
        weights: Where and in which dtype it computes. The values of what is frozen come by :meth:`fill`.

    Attributes:
        specs: What is frozen.
        trains: Whether anything of it is trained.
    """

    def __init__(self, model: HubModel, weights: Weights) -> None:
        super().__init__()
        with _disable_current_modes():  # of an estimate, under which numbers have no values
            self._names = CompositeNames(json.loads(model.pictures))
        self._whole: Any
        vars(self)["_whole"] = self._names.whole  # its modules are none of the layer's
        self._whole.requires_grad_(requires_grad=False).eval()
        for parameter in self._whole.parameters():
            forget(parameter)  # the folder has its values
        self._device, self._dtype = torch.device(weights.device or "cpu"), weights.dtype
        self._structure = structure_of(model.config)
        stack = self._whole.get_submodule(self._names.modules[self._structure.base])
        stack.register_forward_pre_hook(_hand_over, with_kwargs=True)
        self._words = list[Tensor]()
        self._whole.get_input_embeddings().forward = lambda *_: self._words.pop()
        self._is_tried = False
        own = {_path(spec): spec for spec in weights.specs.values() if spec.tower}
        self.specs = tuple(spec for spec in model.tower_params if _path(spec) not in own)
        self.trains = bool(own)
        self._z3_leaf = bool(own)  # gathered as one, because a rank's rows may be without pictures
        if own:
            self._begin_training(model, own, weights)

    def _begin_training(self, model: HubModel, own: Mapping[str, ParamSpec], weights: Weights) -> None:
        """Give what is trained storage, values and tags, and make it parameters of the layer."""
        form: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
        for path in {spec.adapts.removeprefix(TOWER) for spec in own.values() if spec.adapts}:
            place = path.rpartition(".")[0]
            linear: Any = self._whole.get_submodule(place)
            made = LocalLinear(
                linear.in_features, linear.out_features, bias=linear.bias is not None, init=None, **form
            )
            self._whole.set_submodule(place, made.requires_grad_(requires_grad=False))
        if model.adapter is not None:
            held = {_path(spec): spec for spec in model.tower_params if not spec.buffer} | {**own}
            attach(self._whole, held, model.adapter, TensorParallel(), None)
        set_dropouts(self._whole, weights.tp, sharded=False)
        for path, spec in own.items():
            owner, _, name = path.rpartition(".")
            if not spec.adapts:
                dtype = own_dtype(spec, self._dtype)
                empty = nn.Parameter(torch.empty(spec.shape, dtype=dtype, device=self._device))
                setattr(self._whole.get_submodule(owner), name, empty)
            holder: nn.Module = self
            for part in filter(None, owner.split(".")):
                if part not in dict(holder.named_children()):
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.register_parameter(name, self._whole.get_parameter(path))
        initialise(self, dict(own), weights.tp, seed=weights.seed)

    def fill_empty(self) -> None:
        """Have all that is frozen without values, for an estimate."""
        for spec in self.specs:
            like = self._whole.get_parameter_or_buffer(_path(spec))
            self.fill(spec, torch.empty(spec.shape, dtype=like.dtype, device=self._device))
        self.finish()

    def finish(self) -> None:
        """Once all is filled: buffers that no folder has move to the device, and adapters begin."""
        for module in self._whole.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(self._device))
        begin(self._whole)

    def names_of(self, held: Collection[str], folder: str | Path) -> dict[str, str | None]:
        """As :meth:`CompositeNames.of`, for the tower's tensors."""
        return self._names.of_tower(held, folder)

    @property
    def num_bytes(self) -> int:
        """What its tensors take, in the dtype of the run."""
        return sum(spec.numel for spec in self.specs) * self._dtype.itemsize

    def fill(self, spec: ParamSpec, value: Tensor) -> None:
        """Give a tensor of ``specs`` its value, of any dtype."""
        path, _, name = _path(spec).rpartition(".")
        owner = self._whole.get_submodule(path)
        if value.is_floating_point():
            value = value.to(self._device, self._dtype)
        if spec.buffer:
            setattr(owner, name, value.to(self._device))
        else:
            setattr(owner, name, nn.Parameter(value.to(self._device), requires_grad=False))

    def forward(
        self, y_BSH: Tensor, ids_BS: Tensor, given: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, Told]:
        """Word vectors with pictures in the places of their tokens, and what blocks are told.

        What is added between blocks stands behind the vectors in one tensor, [N, B, S, H]: ZeRO-3 counts a
        module's results as it gathers for backward, and they have to be as many where a rank has no pictures.

        Args:
            y_BSH: The vectors.
            ids_BS: Token ids, int64 [B, S].
            given: What the family's processor made of pictures and text, by the names of its forward; None
                where there is nothing.

        Raises:
            ModelError: Its forward refuses that, or hands over what dsx does not understand.
        """
        y, told = (y_BSH, Told()) if given is None else self._seen(y_BSH, ids_BS, given)
        y_NBSH = torch.stack((y, *told.added))
        # On every rank, at every micro-batch, each of them gets a gradient, which ZeRO sums over ranks.
        own = tuple(self.parameters())
        return (_Joined.apply(y_NBSH, *own) if own else y_NBSH), told.of_stages

    def _seen(self, y_BSH: Tensor, ids_BS: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, Told]:
        if self.training != self._whole.training and self.trains:
            self._whole.train(self.training)
        self._words.append(y_BSH)
        floats = {key: each.to(self._dtype) for key, each in given.items() if each.is_floating_point()}
        try:
            with quiet_transformers():
                self._whole(input_ids=ids_BS, use_cache=False, **{**given, **floats})
        except _HandedOverError as handed:
            named = handed.named
        except Exception as error:
            raise self._refusal(f"its forward refuses pictures and text ({first_line(error)})") from error
        else:
            raise self._refusal("its forward runs without its language model")
        y = named["inputs_embeds"]
        if y.shape != y_BSH.shape:
            raise self._refusal("its language model gets other vectors than one for each token")
        return y, self._told(y.detach(), {k: v for k, v in named.items() if k not in _SAID_ELSEWHERE})

    def _told(self, y: Tensor, named: dict[str, Any]) -> Told:
        masks = named.get("attention_mask")
        if isinstance(masks, Mapping):
            if sorted(masks) != self._structure.kinds_of_masks:
                raise self._refusal(f"its masks are called {', '.join(sorted(masks))}")
            masks = [masks[kind] for kind in self._structure.kinds_of_masks]
            if any(each is None for each in masks) and any(each is not None for each in masks):
                raise self._refusal("some of its masks are left out")
        else:
            masks = [masks]
        told = [each for each in (named.get("position_ids"), *masks) if each is not None]
        if not all(isinstance(each, Tensor) for each in told):
            raise self._refusal("its language model gets positions or masks that are no tensors")
        others = {
            key: value
            for key, value in named.items()
            if key not in ("position_ids", "attention_mask") and not isinstance(value, _FLAGS)
        }
        return Told((*told, *(self._added(y, named, Told(told)) if others else ())))

    def _added(self, y: Tensor, named: Mapping[str, Any], told: Told) -> Iterator[Tensor]:
        """What the text forward adds to hidden states in front of block 1, 2, ..., [B, S, H] each."""
        calls, given, last = self._run(y, named, 0.0)
        added = [call.hidden for call in calls[1:]]
        if not self._is_tried:
            plain, _, _ = self._run(y, told.named(self._structure.kinds_of_masks), 0.0)
            apart = [_differs(one, other) for one, other in zip(calls, plain, strict=True)]
            if any(apart):
                raise self._refusal(f"block {apart.index(True)} gets something else where pictures are")
            if last is not None and last.any():
                raise self._refusal("something of pictures is added behind the last block")
            ones, _, _ = self._run(y, named, 1.0)
            for call, each in zip(ones[1:], added, strict=True):
                if not torch.allclose(call.hidden, 1.0 + each):
                    raise self._refusal("features of pictures change hidden states otherwise than by a sum")
            self._is_tried = True
        changed = (each is not before for each, before in zip(added, given, strict=False))
        # The largest number is one that tensors without values have, too.
        most = max((n for n, yes in enumerate(changed, 1) if yes and _largest(added[n - 1])), default=0)
        yield from added[:most]

    def _run(
        self, y: Tensor, named: Mapping[str, Any], value: float
    ) -> tuple[list[BlockCall], list[Tensor], Tensor | None]:
        """Calls of blocks that give ``value``, what they give, one tensor as long as nobody changes it."""
        calls, given, ends = list[BlockCall](), list[Tensor](), list[Tensor]()

        def called(_number: int, call: BlockCall) -> Tensor:
            calls.append(call)
            x = call.hidden
            is_same = bool(given) and x is given[-1] and not x.is_inference()
            is_same = is_same and not x._version  # noqa: SLF001 (nobody has written to it)
            given.append(x if is_same else torch.full_like(x, value))
            return given[-1]

        base = self._structure.stripped((), called, self._device, self._dtype)
        if self._structure.plain_end and self._structure.after:
            end = base.get_submodule(self._structure.after[0])
            end.register_forward_pre_hook(lambda _, given: ends.append(given[0]))
        with torch.set_grad_enabled(self.trains and torch.is_grad_enabled()):
            base(inputs_embeds=y, use_cache=False, **named)
        return calls, given, ends[0] if ends else None

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            at("model_type", self._whole.config.model_type),
            f"dsx cannot train it with pictures: {why}",
            "train it on text alone (dsx.data.pictures: false)",
        )


def _path(spec: ParamSpec) -> str:
    """Where the composite model has a parameter."""
    return spec.name.removeprefix(TOWER)


def _hand_over(_stack: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    assert not arguments, "composite classes of transformers name what they give"
    raise _HandedOverError(named)


def _largest(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.detach(), torch.inf))


def _differs(one: BlockCall, other: BlockCall) -> bool:
    """Whether two calls differ in what a block gets beside the hidden states."""
    pairs = zip(
        tree_leaves((one.arguments, one.named)), tree_leaves((other.arguments, other.named)), strict=True
    )
    return any(isinstance(a, Tensor) and not torch.equal(a, b) for a, b in pairs)
