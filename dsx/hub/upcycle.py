"""A dense model as a mixture of experts that computes the same: which tensor is made of which.

Sparse upcycling (Komatsuzaki et al., arXiv:2212.05055, section 3): every expert begins as a copy of the dense
feed-forward, the router is drawn at random, all else is copied. With a granularity G (arXiv:2410.07524,
section 3) an expert has 1 / G of the features, and the G experts that make up one copy have one row of the
router in common, so that a token is sent to all of them or to none.

No family is known by name. Names and shapes of both say what their blocks have in common. Which matrix is a
gate, and by how much experts are scaled for the output to be the dense one's, is asked of a small model of
the same structure, which then has to give the dense one's logits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsx.errors import ConfigError, ModelError
from dsx.hub.model_structure import hf_config_of, with_weights
from dsx.hub.read import hub_model
from dsx.hub.shrunk import random_model, shrunk
from dsx.models.config_values import at
from dsx.models.param import Box, ParamSpec
from dsx.models.params import stored_specs
from dsx.models.transformers_settings import first_line, quiet_transformers

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_WIDTH = ("moe_intermediate_size", "intermediate_size")
_SHARED_WIDTH = ("shared_expert_intermediate_size",)
_OWN = (
    "model_type",
    "architectures",
    "transformers_version",
    "auto_map",
    "dtype",
    "torch_dtype",
    "_name_or_path",
)
_TOLERANCE = 1e-5  # of the largest output
_WRITE_ANOTHER = "name another --family, whose attention and norms are those of the dense model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcycling:
    """What is asked for.

    Attributes:
        family: ``model_type`` of the mixture of experts.
        experts: Experts of a layer.
        top_k: Experts that a token is sent to.
        granularity: Into how many experts one copy of the feed-forward is divided.
        seed: Of the routers.
    """

    family: str
    experts: int
    top_k: int
    granularity: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("--experts", self.experts), ("--top-k", self.top_k)):
            if value < 1 or value % self.granularity:
                raise ConfigError(
                    f"{name} {value}",
                    f"a copy of the feed-forward is {self.granularity} experts; a token needs all of them",
                    f"give a multiple of {self.granularity}",
                )
        if self.top_k > self.experts:
            raise ConfigError(
                f"--top-k {self.top_k}", f"a layer has {self.experts} experts", "give at most as many"
            )

    def rows(self, spec: ParamSpec) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A router's weight, [experts, hidden size] in fp32: normal, with 0.02 as standard deviation."""
        groups, hidden = self.experts // self.granularity, spec.shape[1]
        drawn = np.random.default_rng([self.seed, spec.layer]).standard_normal((groups, hidden), np.float32)
        return 0.02 * np.repeat(drawn, self.granularity, axis=0)


@dataclass(frozen=True, slots=True)
class Share:
    """A box of a new tensor, and the box of a dense one that it is a copy of."""

    home: Box
    name: str
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """How one tensor of the mixture is made.

    Attributes:
        spec: The tensor.
        shares: What it is a copy of; none for a router and for what begins as zeros.
        scaled: ``experts`` or ``shared``, if it is a matrix whose output the block adds up.
        is_router: Whether it is drawn.
    """

    spec: ParamSpec
    shares: tuple[Share, ...] = ()
    scaled: str | None = None
    is_router: bool = False


def mixture_config(dense: Mapping[str, Any], wanted: Upcycling) -> dict[str, Any]:
    """Content of the mixture's config.json: what both families have in common is the dense one's.

    Raises:
        ModelError: The family is unknown, has no experts, or the feed-forward has no such parts.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    given, empty = hf_config_of(dense).to_dict(), hf_config_of({"model_type": wanted.family}).to_dict()
    # Some families read keys that their configs do not list, such as head_dim.
    found = {key: value for key, value in given.items() if key not in _OWN and value is not None}
    width = given.get("intermediate_size")
    if type(width) is not int or width % wanted.granularity:
        raise ModelError(
            at("intermediate_size", width),
            f"the feed-forward of the dense model cannot be divided into {wanted.granularity}",
            "give a --granularity that divides it",
        )
    for keys, value in (
        (_EXPERTS, wanted.experts), (_TOP_K, wanted.top_k), (_WIDTH, width // wanted.granularity),
        (_SHARED_WIDTH, width), (("norm_topk_prob",), True),
    ):  # fmt: skip
        key = next((key for key in keys if key in empty), None)
        if key is not None:
            found[key] = value
        elif keys in (_EXPERTS, _TOP_K):
            what = "its config does not say how many experts there are"
            raise ModelError(at("--family", wanted.family), what, _WRITE_ANOTHER)
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(wanted.family)
    return {"model_type": wanted.family, **({"architectures": [named]} if named else {}), **found}


def specs_of(config: Mapping[str, Any]) -> tuple[ParamSpec, ...]:
    """Every tensor of transformers' own model of a config."""
    return stored_specs(hub_model(config))


def made_of(
    dense: Sequence[ParamSpec], mixture: Sequence[ParamSpec], wanted: Upcycling, order: Sequence[int]
) -> tuple[Made, ...]:
    """How every tensor of the mixture is made of the dense ones.

    Args:
        dense: Tensors of the dense model.
        mixture: Those of the other.
        wanted: What is asked for.
        order: Which of the first two matrices of the dense feed-forward comes first in the experts.

    Raises:
        ModelError: A tensor of one has no place in the other.
    """
    held = {spec.name: spec for spec in dense}
    same = {spec.name for spec in mixture if spec.name in held and held[spec.name].shape == spec.shape}
    rest = [spec for spec in dense if spec.name not in same]
    layers = {spec.layer for spec in mixture if spec.experts is not None}
    stray = next((spec for spec in rest if spec.layer not in layers), None)
    new = next((spec for spec in mixture if spec.name not in same and spec.layer not in layers), None)
    for spec, whose in ((stray, "the dense model"), (new, wanted.family)):
        if spec is not None:
            raise _misfit(spec, f"{whose} alone has it in this shape, {spec.shape}, and no experts beside it")
    found: list[Made] = []
    for spec in mixture:
        if spec.name in same:
            found.append(Made(spec=spec, shares=(_whole(spec, spec.name),)))
            continue
        own = [each for each in rest if each.layer == spec.layer]
        if len(own) != 3 or any(len(each.shape) != 2 for each in own) or own[0].shape != own[1].shape:
            names = ", ".join(each.name for each in own)
            raise _misfit(spec, f"it is to be made of {names}, which are no gate, up and down")
        found.append(_made(spec, own[order[0]], own[order[1]], own[2], wanted))
    return tuple(found)


def _made(spec: ParamSpec, first: ParamSpec, second: ParamSpec, down: ParamSpec, wanted: Upcycling) -> Made:
    """A tensor of a mixture's block that the dense one does not have."""
    features, hidden = first.shape
    width = features // wanted.granularity
    rows = ((0, hidden),)
    spans = [(low := which % wanted.granularity * width, low + width) for which in range(wanted.experts)]
    stacked = [((which, which + 1), span) for which, span in enumerate(spans)]
    if spec.experts is not None and spec.shape == (wanted.experts, 2 * width, hidden):
        halves = ((first, (0, width)), (second, (width, 2 * width)))
        shares = (
            Share((e, half, *rows), part.name, (span, *rows)) for e, span in stacked for part, half in halves
        )
        return Made(spec=spec, shares=tuple(shares))
    if spec.experts is not None and spec.shape == (wanted.experts, hidden, width):
        shares = (Share((e, *rows, (0, width)), down.name, (*rows, span)) for e, span in stacked)
        return Made(spec=spec, shares=tuple(shares), scaled="experts")
    if spec.shape == (wanted.experts, hidden):
        return Made(spec=spec, is_router=True)
    if spec.shape in ((1, hidden), (wanted.experts,), (1, wanted.experts)):  # a shared expert's gate, a bias
        return Made(spec=spec)
    for part, scaled in ((first, None), (second, None), (down, "shared")):
        if (spec.shape, _last(spec)) == (part.shape, _last(part)):
            return Made(spec=spec, shares=(_whole(spec, part.name),), scaled=scaled)
    raise _misfit(spec, f"of shape {spec.shape} it is like nothing in a dense model of shape {first.shape}")


def _last(spec: ParamSpec) -> str:
    """Name of the module that has a weight."""
    return spec.name.split(".")[-2]


def _whole(spec: ParamSpec, name: str) -> Share:
    box = tuple((0, extent) for extent in spec.shape)
    return Share(box, name, box)


def _misfit(spec: ParamSpec, what: str) -> ModelError:
    return ModelError(f"tensor {spec.hf_whole or spec.name}", what, _WRITE_ANOTHER)


def proved(dense: Mapping[str, Any], wanted: Upcycling) -> tuple[Sequence[int], dict[str, float]]:
    """The order of gate and up, and by what experts and shared experts are multiplied.

    A small model of the same structure is upcycled and must give the dense one's logits.

    Raises:
        ModelError: It does not, whatever the order.
    """
    small = shrunk(dense, layers=2, tensor=1, vocab_size=64, small_too=True)
    small |= {"intermediate_size": 8 * wanted.granularity}
    mixture = mixture_config(small, wanted)
    specs, into = specs_of(small), specs_of(mixture)
    try:
        one, other = random_model(small).eval(), with_weights(mixture).eval()
    except Exception as error:  # noqa: BLE001 - each family refuses sizes in its own way
        told = f"no small model of it can be made with what the dense config says ({first_line(error)})"
        raise ModelError(at("--family", wanted.family), told, _WRITE_ANOTHER) from None
    with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet_transformers():
        torch.manual_seed(0)
        words = torch.randint(int(small.get("vocab_size", 2)), (2, 12))
        for order in permutations((0, 1)):
            trial = _Trial(one, other, specs, made_of(specs, into, wanted, order), wanted)
            scales = trial.scales()
            if scales is not None and _is_close(trial.filled(scales)(words).logits, one(words).logits):
                return order, scales
    raise ModelError(
        at("--family", wanted.family),
        f"a small model of it, upcycled, does not give the logits of {dense.get('model_type')}: its blocks "
        "compute something else, or the weights of a token's experts add up to another sum for each token",
        _WRITE_ANOTHER,
    )


def _is_close(got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).abs().max() <= _TOLERANCE * expected.abs().max())


@dataclass(frozen=True, slots=True)
class _Trial:
    """A small dense model, and a small mixture to be made of it."""

    one: Any
    other: Any
    specs: Sequence[ParamSpec]
    made: Sequence[Made]
    wanted: Upcycling

    def scales(self) -> dict[str, float] | None:
        """What experts and shared experts are multiplied by, each for an equal part of the dense output."""
        routed = [each for each in self.made if each.spec.experts is not None]
        layer = routed[0].spec.layer
        names = {share.name for each in routed if each.spec.layer == layer for share in each.shares}
        routers = [each.spec for each in self.made if each.is_router and each.spec.layer == layer]
        if not routers:
            return None
        feed = self.one.get_submodule(_common(each for each in self.specs if each.name in names))
        block = self.other.get_submodule(_common((routed[0].spec, *routers)))
        hidden = torch.randn(1, 16, routers[0].shape[1])
        expected = feed(hidden)
        kinds = sorted({each.scaled for each in self.made if each.scaled})
        found: dict[str, float] = {}
        for kind in kinds:
            self.filled({each: float(each == kind) for each in kinds})
            got = block(hidden)
            got = (got[0] if isinstance(got, tuple) else got).reshape(expected.shape)
            share = float((got * expected).sum() / expected.square().sum())
            if not share or not _is_close(got, share * expected):
                return None
            found[kind] = 1 / (len(kinds) * round(share, 6))
        return found

    def filled(self, scales: Mapping[str, float]) -> Any:
        """The mixture with its weights."""
        held, into = self.one.state_dict(), self.other.state_dict()
        homes = {spec.name: spec.hf_whole for spec in self.specs}
        for each in self.made:
            tensor = into[each.spec.hf_whole].zero_()
            if each.is_router:
                tensor.copy_(torch.from_numpy(self.wanted.rows(each.spec)))
            for share in each.shares:
                part = held[homes[share.name]][tuple(slice(*span) for span in share.box)]
                tensor[tuple(slice(*span) for span in share.home)] = part * scales.get(each.scaled or "", 1.0)
        return self.other


def _common(specs: Iterable[ParamSpec]) -> str:
    """The module that has all of these parameters."""
    return os.path.commonpath([spec.hf_whole.replace(".", "/") for spec in specs]).replace("/", ".")
