"""How transformers stores a model's tensors: the names in files of the tensors in memory.

transformers keeps the experts of a layer in one tensor and writes them one by one, gate and up apart, under
the names that the family's authors gave them (core_model_loading.py, conversion_mapping.py). No table of that
is kept here: ``save_pretrained``'s own conversion is run on the model's tensors without copying. What it
chunks, splits and transposes then are views, and a view's offset and strides say which part of the tensor it
is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dsx.checkpoint.pieces import corner_of
from dsx.errors import CheckpointError, LayoutError
from dsx.models.param import Box, Init, ParamSpec

_NO_INIT = Init(kind="zeros")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskForm:
    """How transformers stores one parameter or persistent buffer.

    Attributes:
        names: Of the tensors in files: for every index of dim 0 if it is ``stacked``, one per part.
        stacked: Dim 0 counts tensors that are stored apart, and without that dim.
        split: Dim along which the parts lie; None if there is one part.
        parts: Their extents.
        transposed: The stored tensors have the last two dims the other way round.
        buffer: It is no parameter: nothing trains it, and the model needs it all the same.
        copies: Names in memory of the same tensor, which are not stored (a head tied to the embedding).
        exact: Whether the stored tensors are such parts. If not (they are joined with others', or in another
            order), ``names`` is its name in memory, which ``from_pretrained`` loads as well.
    """

    names: tuple[str, ...]
    stacked: bool = False
    split: int | None = None
    parts: tuple[int, ...] = ()
    transposed: bool = False
    buffer: bool = False
    copies: tuple[str, ...] = ()
    exact: bool = True

    @property
    def in_spec(self) -> dict[str, Any]:
        """The same as fields of :class:`~dsx.models.param.ParamSpec`."""
        return {
            "hf": self.names,
            "hf_stacked": self.stacked,
            "hf_split": self.split,
            "hf_parts": self.parts,
            "hf_transposed": self.transposed,
        }


class _Views(TorchFunctionMode):
    """Leaves views as they are where a copy of the same values is asked for."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def disk_forms(model: Any) -> dict[str, DiskForm]:
    """How ``save_pretrained`` stores a model, by the names that its ``state_dict`` has.

    Args:
        model: A ``PreTrainedModel``, made on the meta device for example.

    Returns:
        Parameters and persistent buffers in the model's order. Those that are not stored are left out: tied
        tensors but the first, which has their names as ``copies``.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():  # noqa: SLF001 - as save_pretrained does
        state.pop(name, None)
    kept = remove_tied_weights_from_state_dict(dict(state), model)
    copies = defaultdict(list)
    for name in state.keys() - kept.keys():
        copies[id(model.get_parameter_or_buffer(name))].append(name)
    homes = {_storage_of(tensor): name for name, tensor in kept.items()}
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    with torch.no_grad(), _Views():
        for name, tensor in revert_weight_conversion(model, dict(kept)).items():
            home = homes.get(_storage_of(tensor))
            if home is not None:
                found[home][name] = tensor
    buffers = {name for name, _ in model.named_buffers()}
    turned = {f"{path}.weight" for path, module in model.named_modules() if is_turned(module)}
    forms = {}
    for name, tensor in kept.items():
        others = tuple(sorted(copies[id(model.get_parameter_or_buffer(name))]))
        form = _form_of(tensor, found[name]) or DiskForm(names=(name,), exact=False)
        form = replace(form, transposed=True) if name in turned else form
        forms[name] = replace(form, buffer=name in buffers, copies=others)
    return forms


def is_turned(module: Any) -> bool:
    """Whether it is a linear in the place of a Conv1D, whose matrix is inputs by outputs."""
    return bool(getattr(module, "turned", False))


def _storage_of(tensor: Tensor) -> int:
    """What tells storages apart on the meta device too, where all have one address."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - there is no public way


def _form_of(whole: Tensor, stored: Mapping[str, Tensor]) -> DiskForm | None:
    """What stored views are of a tensor; None if they are not its parts, or not all of them."""
    full = tuple((0, extent) for extent in whole.shape)
    for transposed in (False, True):
        boxes = {name: _box(view, whole, transposed=transposed) for name, view in stored.items()}
        ordered = sorted((box, name) for name, box in boxes.items() if box is not None)
        if not ordered or len(ordered) != len(stored):
            continue
        stacked = next(iter(stored.values())).ndim < whole.ndim
        first = [box for box, _ in ordered if not stacked or box[0][0] == 0]
        split = next((dim for dim in range(int(stacked), whole.ndim) if first[0][dim] != full[dim]), None)
        form = DiskForm(
            names=tuple(name for _, name in ordered),
            stacked=stacked,
            split=split,
            parts=() if split is None else tuple(box[split][1] - box[split][0] for box in first),
            transposed=transposed,
        )
        try:
            spec = ParamSpec(name="", layer=0, shape=tuple(whole.shape), init=_NO_INIT, **form.in_spec)
        except LayoutError:
            continue
        if [box for _, box in spec.hf_boxes] == [box for box, _ in ordered]:
            return form
    return None


def _box(view: Tensor, whole: Tensor, *, transposed: bool) -> Box | None:
    """The box of a tensor that a view shows; None if it shows none. A dim that it lacks is the first."""
    dims = list(range(whole.ndim - view.ndim, whole.ndim))
    if transposed:
        dims[-2:] = dims[-2:][::-1]
    if len(dims) < whole.ndim - 1 or not whole.is_contiguous():
        return None
    starts = corner_of(int(view.storage_offset() - whole.storage_offset()), whole.shape)
    box = [(start, start + 1) for start in starts]
    for dim, extent, step in zip(dims, view.shape, view.stride(), strict=True):
        box[dim] = (starts[dim], starts[dim] + extent)
        if box[dim][1] > whole.shape[dim] or (extent > 1 and step != whole.stride(dim)):
            return None
    return tuple(box)


class FolderNames:
    """Which of a model's tensors each tensor of a folder is, whatever wrote the folder.

    transformers reads more names than it writes: those of older versions, of the bare model without its head,
    and of a larger model that has this one inside. Its own renaming decides here too.

    Args:
        model: A ``PreTrainedModel``, made on the meta device for example.
        forms: What :func:`disk_forms` says of it.
    """

    def __init__(self, model: Any, forms: Mapping[str, DiskForm]) -> None:
        self._model, self._forms = model, forms
        own = [name for form in forms.values() for name in form.names]
        self._own = dict.fromkeys((*own, *forms, *(copy for form in forms.values() for copy in form.copies)))
        self._homes = {identity: name for name, identity in self._identities(self._own).items()}

    def of(self, held: Collection[str], folder: str | Path) -> dict[str, str | None]:
        """The model's names of tensors in files, by the files' own.

        Args:
            held: Names of all tensors of a folder.
            folder: The folder, for messages.

        Returns:
            For each a name of a :class:`DiskForm`, or in memory, if the folder has that; itself if the model
            has no such tensor; None if the family says that its files may have it and no model reads it.

        Raises:
            CheckpointError: The folder has a tensor in a form that is not ``exact``.
        """
        found: dict[str, str | None] = {name: name for name in held if name in self._own}
        identities = self._identities(name for name in held if name not in self._own)
        for name, identity in identities.items():
            home = self._homes.get(identity, name)
            found[name] = home if home not in found else name
        for name, form in self._forms.items():
            if not form.exact and name not in found.values():
                raise CheckpointError(
                    f"{folder}: tensor {name}",
                    "it is missing; transformers writes it joined with others, or in another order, and dsx "
                    "does not read that",
                    "load the folder with AutoModelForCausalLM.from_pretrained and write it again with "
                    "save_pretrained(folder, save_original_format=False)",
                )
        unknown = {identities[name][0]: name for name, home in found.items() if home not in self._own}
        told = SimpleNamespace(missing_keys=set(), unexpected_keys=set(unknown))
        self._model._adjust_missing_and_unexpected_keys(told)  # noqa: SLF001 - as from_pretrained does
        return found | {name: None for key, name in unknown.items() if key not in told.unexpected_keys}

    def known(self, names: Iterable[str]) -> set[str]:
        """Those names of tensors in files that are of a tensor, or of a part of one, of the model."""
        state = self._model.state_dict()
        return {name for name, (home, _) in self._identities(names).items() if home in state}

    def _identities(self, names: Iterable[str]) -> dict[str, tuple[str, str]]:
        """The tensor in memory that each is of, and its name after renaming, which tells the parts apart."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        # Some renamings wait until a name has shown which version wrote the folder, so they are made anew.
        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        prefix, state = self._model.base_model_prefix, self._model.state_dict()
        found = {}
        for name in sorted(names, key=dot_natural_key):
            home, _ = rename_source_key(name, renamings, converters, prefix, state)
            renamed, _ = rename_source_key(name, renamings, [])
            found[name] = (home, renamed.removeprefix(f"{prefix}."))
        return found
