"""Fresh values of a family's parameters, as the family's own code gives them.

Where that code draws from a normal distribution or fills with zeros or ones, dsx does the same with its own
generator, by name and place, so that a rank makes nothing but its part. Other values (the decay rates of a
Mamba mixer) are made by the family's code for the one module that has them, whole, from a seed of their own.
Buffers have the values and the data types of the family's code.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dsx.errors import ModelError
from dsx.hub.model_structure import structure_of, without_weights
from dsx.hub.on_meta import forget, made_with
from dsx.models.config_values import at
from dsx.models.param import Init, ParamSpec
from dsx.models.spec import HubModel
from dsx.models.transformers_settings import first_line
from dsx.nn.dropout import seeded
from dsx.nn.parameters import Weights, take_part

_aten = torch.ops.aten


class _Laws(TorchDispatchMode):
    """Notes what every parameter, on the meta device, is filled with.

    Attributes:
        found: The law by the parameter's storage; None for another than dsx's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Init | None] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note what it fills."""
        del types
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and args[0].is_meta:  # noqa: SLF001
            self._note(func.overloadpacket, args[0], args[1:], kwargs or {})
        return result

    def _note(self, packet: Any, target: Tensor, args: Any, kwargs: Any) -> None:
        key = target.untyped_storage()._cdata  # noqa: SLF001 (the storage's identity)
        if target.numel() < self._sizes.setdefault(key, target.numel()) and key in self.found:
            return  # a padding row, which is trained like any other
        law: Init | None = None
        if packet is _aten.normal_:
            named = dict(zip(("mean", "std"), args, strict=False)) | dict(kwargs)
            mean, std = named.get("mean", 0.0), named.get("std", 1.0)
            law = Init(kind="normal", std=std) if mean == 0.0 else None
        elif packet is _aten.zero_ or (packet is _aten.fill_ and args[0] == 0):
            law = Init(kind="zeros")
        elif packet is _aten.fill_ and args[0] == 1:
            law = Init(kind="ones")
        self.found[key] = law


def laws_of(model: Any) -> dict[str, Init | None]:
    """How the family's own code fills every parameter of a model on the meta device, by name.

    None stands for values that only that code can make.

    Raises:
        ModelError: That code fails.
    """
    copied = copy.deepcopy(model)
    try:
        with torch.no_grad(), _Laws() as laws:
            for module in _children_first(copied):
                copied._init_weights(module)  # noqa: SLF001 (transformers has no public name for it)
    except Exception as error:  # noqa: BLE001 - whatever the family's code does
        raise ModelError(
            at("model_type", model.config.model_type),
            f"its own code does not give its modules values ({first_line(error)})",
            "use another family",
        ) from None
    found = {
        name: laws.found.get(parameter.untyped_storage()._cdata)  # noqa: SLF001 (as above)
        for name, parameter in copied.named_parameters(remove_duplicate=False)
    }
    for name, parameter in model.named_parameters():
        if found[name] is not None:
            forget(parameter)
    return found


def _children_first(module: nn.Module) -> list[nn.Module]:
    inside = [inner for child in module.children() for inner in _children_first(child)]
    return [*inside, module]


@lru_cache(maxsize=8)
def buffer_dtypes(config: str, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The data types that from_pretrained(dtype=dtype) gives buffers, by path in a block or what is before.

    They are those with which the family's code makes them where ``dtype`` is torch's default, and float32 for
    what the family says to keep so.
    """
    structure = structure_of(config)
    looked_at = structure.model.get_submodule(structure.base if structure.shifts else structure.blocks)
    if dtype is torch.float32 or not any(True for _ in looked_at.buffers()):
        return {}
    with torch.random.fork_rng(devices=[]):
        model: Any = without_weights(json.loads(config), dtype)
    kept = "|".join(model._get_dtype_plan(dtype))  # noqa: SLF001 (as from_pretrained reads it)
    found = {}
    for name, buffer in model.get_submodule(structure.base).named_buffers():
        path, wide = f"base.{name}", kept and re.search(rf"(^|\.)({kept})($|\.)", name)
        if name.startswith(f"{structure.blocks_below_base}."):
            path = f"block.{name.removeprefix(f'{structure.blocks_below_base}.').partition('.')[2]}"
        found[path] = torch.float32 if wide and buffer.is_floating_point() else buffer.dtype
    return found


@lru_cache(maxsize=8)
def float32_beside(config: str) -> dict[str, tuple[str, ...]]:
    """Parameters that from_pretrained keeps in float32, by their names in transformers' model.

    Each with the dtypes of which the others are then: those that a class names in
    ``_keep_in_fp32_modules_strict``, or for float16 alone in ``_keep_in_fp32_modules``
    (``PreTrainedModel._get_dtype_plan``), and those that its code makes so whatever torch's default is
    (transformers/core_model_loading.py, convert_and_load_state_dict_in_model).
    """
    with torch.random.fork_rng(devices=[]):
        made = without_weights(json.loads(config), torch.bfloat16)
    found: dict[str, tuple[str, ...]] = {}
    for dtype in (torch.bfloat16, torch.float16):
        for name in float32_names(made, dtype):
            found[name] = (*found.get(name, ()), str(dtype).removeprefix("torch."))
    return found


def float32_names(model: Any, dtype: torch.dtype) -> list[str]:
    """Parameters that from_pretrained(dtype=dtype) keeps in float32; ``model`` was made in low precision."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)  # noqa: SLF001 (as from_pretrained reads it)
    named = build_glob_alternation([*plan])[0] if plan else None
    held = model.named_parameters()
    return [name for name, p in held if p.dtype == torch.float32 or (named and named.search(name))]


@torch.no_grad()
def own_values(local: Tensor, memory: str, spec: ParamSpec, model: HubModel, weights: Weights) -> None:
    """Fill a parameter as the family's code does, from a seed of its own.

    Args:
        local: This rank's part of it.
        memory: Its name in transformers' model.
        spec: The parameter.
        model: The model.
        weights: Seed and tensor-parallel ranks.
    """
    whole = structure_of(model.config).model
    owner, _, name = memory.rpartition(".")
    alone = copy.deepcopy(whole.get_submodule(owner)).to_empty(device="cpu")
    for parameter in alone.parameters():
        parameter.fill_(torch.nan)
    seed = int.from_bytes(hashlib.blake2b(f"{weights.seed}:{spec.name}".encode(), digest_size=7).digest())
    with seeded(torch.device("cpu"), seed):
        for module in _children_first(alone):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()  # torch's own modules are filled so, after their parameters are there
            whole._init_weights(module)  # noqa: SLF001 (as above)
    value = alone.get_parameter(name)
    if value.isnan().any():
        value = made_with(whole.get_parameter(memory))
    if value is None:
        raise ModelError(
            memory, "the family's code gives it no fresh values", "start from a folder with weights"
        )
    take_part(local, value, spec, weights.at)
