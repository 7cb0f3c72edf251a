"""A device that computes nothing: ``paper`` stands for a GPU, ``cpu`` for itself."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)
from torch.utils.weak import WeakTensorKeyDictionary

from dsx.hub import values
from dsx.launch.spared import compilers_late
from dsx.nn import attention, dropout, parameters
from dsx.nn.experts import ExpertParallel
from dsx.nn.parallel import TensorParallel

Device = Literal["paper", "cpu"]

_LIKE_CUDA = ("paper", "meta")

_ONE_KERNEL = ("silu_backward",)
"""Operators of a gradient and an input that torch composes of others where a device has no kernel."""


class UncompiledMode(TorchDispatchMode):
    """A mode that does not look whether something is compiled, which would load a second's worth of torch."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Answers(UncompiledMode):
    """Values where there are none, so that programs that branch on data go their usual way.

    A number is 1, a whole number 0. "All of them" and "at most" are true and any other question false: ids
    are in range, tensors equal, rounding errors small, and nothing overflows.

    Args:
        knows: Whether numbers that programs write down, and what they make of these alone, are followed: ids
            and sizes of pictures, which decide about shapes. A question about them is answered as it is.
        on_meta: Whether tensors without storage are torch's meta tensors, those on the CPU real ones.
    """

    def __init__(self, *, knows: bool, on_meta: bool) -> None:
        super().__init__()
        self._true: Any = WeakTensorKeyDictionary()
        self._knows, self._on_meta, self._values = knows, on_meta, WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what needs values; pass on all else."""
        if not self._knows:
            return self._answered(func, args, kwargs or {})
        return self._followed(func, args, kwargs or {})

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The same of tensors whose values may be known, which are then computed beside them."""
        leaves, form = tree_flatten((args, kwargs))
        given = [self._value(each) for each in leaves]
        packet, tags = func.overloadpacket.__name__, func.tags
        is_known = not any(
            each is None and leaf is not None for each, leaf in zip(given, leaves, strict=True)
        )
        is_known &= torch.Tag.nondeterministic_seeded not in tags and "empty" not in packet
        if is_known and (torch.Tag.data_dependent_output in tags or packet == "equal"):
            return self._computed(func, form, given)
        if is_known and (torch.Tag.dynamic_output_shape in tags or packet == "_to_copy"):
            value = self._computed(func, form, given)
            own = next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
            place = torch.device(kwargs.get("device") or own)
            if place.type == "cpu" and self._on_meta:
                return value
            result = tree_map(lambda each: torch.empty_like(each, device=place), value)
        else:
            if packet in ("index", "index_put", "index_put_", "_index_put_impl_"):
                args = args[0], self._places(args[1]), *args[2:]
            result, value = self._answered(func, args, kwargs), None
            if is_known and all(map(self._is_followed, tree_leaves(result))):
                value = self._computed(func, form, given)
        if value is not None:
            for each, of in zip(tree_leaves(result), tree_leaves(value), strict=True):
                self._values[each] = of
        else:
            self._forget(func, args, kwargs)
        return result

    def _is_followed(self, made: Any) -> bool:
        """Whether something is a tensor that has no values itself, and few enough to have them beside it."""
        real = self._on_meta and isinstance(made, torch.Tensor) and not made.is_meta
        return isinstance(made, torch.Tensor) and not real and made.numel() <= _MOST

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Know nothing more of what an operator writes to."""
        if func._schema.is_mutable:  # noqa: SLF001 (no public one)
            for each in tree_leaves((args[:1], kwargs.get("out"))):
                if isinstance(each, torch.Tensor):
                    self._values.pop(each, None)

    def _computed(self, func: Any, form: Any, given: Any) -> Any:
        args, kwargs = tree_unflatten(given, form)
        with _disable_current_modes():
            return func(*args, **kwargs)

    def _value(self, leaf: Any) -> Any:
        """What an argument is where everything has values; None for a tensor of which nothing is known."""
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if not isinstance(leaf, torch.Tensor):
            return leaf
        is_plain = type(leaf) is torch.Tensor and leaf.device.type == "cpu"
        return self._values.get(leaf, leaf if is_plain else None)

    def _places(self, indices: Any) -> list[Any]:
        """Indices, those written as numbers that say which elements, as ``nonzero`` does, of masks."""
        found: list[Any] = []
        for each in indices:
            value = None if each is None else self._values.get(each)
            if value is None or value.dtype != torch.bool:
                found.append(each)
            else:
                with _disable_current_modes():
                    places = value.nonzero().unbind(1)
                found += [torch.empty_like(place, device=each.device) for place in places]
        return found

    def _answered(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 (an operator)
            if args[0].dtype == torch.bool:
                return args[0] in self._true
            return 1.0 if args[0].dtype.is_floating_point else 0
        if func in (torch.ops.aten.equal.default, torch.ops.aten.allclose.default):
            return True
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:  # noqa: SLF001
            # Its form is derived for bf16 alone, and the kernel of other dtypes gives the same.
            given = [side.to(torch.bfloat16) for side in args[:2]]
            return func(*given, *args[2:], **kwargs).to(args[0].dtype)
        result = func(*args, **kwargs)
        if func in (torch.ops.aten.all.default, torch.ops.aten.le.Tensor):
            self._true[result] = True
        return result


_MOST = 1 << 22
"""Elements of a tensor up to which its values are followed."""


class _KnownForms(UncompiledMode):
    """Derives what an operator gives once for each form of its arguments, where tensors are on ``meta``.

    Torch derives it anew at each call, most of it in Python, ten times as slowly as it is looked up here.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give new tensors of the known forms, or run the operator and remember them."""
        del types
        kwargs = kwargs or {}
        if func.is_view or "out" in kwargs:
            return func(*args, **kwargs)
        try:
            key = func, _key(args), _key(tuple(kwargs.items()))
            known = self._known.get(key)
        except TypeError:  # an argument that cannot be hashed
            return func(*args, **kwargs)
        if known is None:
            result = func(*args, **kwargs)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = _forms(func, args, result)
            return result
        if known == _RUN:
            return func(*args, **kwargs)
        if known == _FIRST:
            return args[0]
        made = tuple(torch.empty_strided(*form[:2], dtype=form[2], device="meta") for form in known)
        return made if len(made) > 1 else made[0]


_MOST_KNOWN = 50_000
_RUN = "run"  # What the operator gives depends on more than forms, or shares memory with its arguments.
_FIRST = "first"  # It writes to its first argument.


def _key(value: Any) -> Any:
    """What an operator's result may depend on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, tuple | list):
        return tuple(map(_key, value))
    return type(value), value


def _forms(func: Any, args: Any, result: Any) -> Any:
    if args and result is args[0]:
        return _FIRST if func not in _RESIZES else _RUN
    tensors = result if isinstance(result, tuple) else (result,)
    if func._schema.is_mutable or not all(map(_is_new, tensors)):  # noqa: SLF001 (no public one)
        return _RUN
    given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}  # noqa: SLF001
    if any(tensor.untyped_storage()._cdata in given for tensor in tensors):  # noqa: SLF001
        return _RUN
    return tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors)


_RESIZES = (torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default, torch.ops.aten.set_.default)


def _is_new(value: Any) -> bool:
    """Whether it is a tensor that fills its storage."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "meta"
        and value.untyped_storage().nbytes()
        == torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        .untyped_storage()
        .nbytes()
    )


@cache
def _known_forms() -> _KnownForms:
    """One for the process: layers of a kind have most of their forms in common."""
    return _KnownForms()


class _Module(_DummyBackendModule):
    """``torch.paper``, as torch.utils.checkpoint and torch.amp ask it."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Without them torch.amp refuses the device, even where it is off."""
        return [torch.bfloat16, torch.float16]


def install() -> None:
    """Make ``paper`` a device of torch for the rest of this process; once is enough."""
    if hasattr(torch, "paper"):
        return
    module: Any = _Module()
    _setup_privateuseone_for_python_backend(rename="paper", backend_module=module)
    # Registered as long as the library lives.
    module.kernels = torch.library.Library("aten", "IMPL")
    for operator in _ONE_KERNEL:
        module.kernels.impl(operator, lambda _, x: torch.empty_like(x), "PrivateUse1")


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, ``owner.name`` is ``value``: for functions of libraries that ask for values or for a device."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def without_storage(device: str = "paper", *, knows: bool = False) -> Iterator[None]:
    """Inside, no new tensor on ``device`` has storage: a FakeTensor, or on ``meta`` what that device has.

    ``knows``: Whether numbers that are written down are followed, as ids and sizes of pictures.
    """
    with torch.device("cpu"):
        torch.empty(0)  # at the first such call torch notes for good which functions make tensors: its own
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(swapped(dropout, "_scale", _scale))
        stack.enter_context(
            swapped(F, "scaled_dot_product_attention", _attention(F.scaled_dot_product_attention))
        )
        stack.enter_context(swapped(attention, "ending_together", _ending_together))
        stack.enter_context(swapped(F, "rms_norm", _rms_norm(F.rms_norm)))
        stack.enter_context(swapped(torch, "tensor", _tensor(torch.tensor, knows=knows)))
        if families := sys.modules.get("transformers.utils.import_utils"):
            # Else transformers' masks and experts go the way of a graph that is traced.
            stack.enter_context(swapped(families, "is_fake_tensor", lambda _: False))
        if device != "meta":
            # Loads a second's worth of torch.
            from torch._subclasses.fake_tensor import FakeTensorMode

            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        else:
            stack.enter_context(_known_forms())
            stack.enter_context(swapped(torch.Tensor, "tolist", _tolist(torch.Tensor.tolist)))
        stack.enter_context(_Answers(knows=knows, on_meta=device == "meta"))
        yield


@contextmanager
def without_values() -> Iterator[None]:
    """Inside, nobody fills a parameter."""

    def fill(*_arguments: Any, **_options: Any) -> None:
        """Leave it as it is."""

    with swapped(parameters, "fill", fill), swapped(values, "own_values", fill):
        yield


def _tensor(usual: Callable[..., torch.Tensor], *, knows: bool) -> Callable[..., torch.Tensor]:
    """torch.tensor, which puts numbers on the device itself, past every mode."""

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        if knows:
            data = tree_map(lambda each: each.tolist() if isinstance(each, torch.Tensor) else each, data)
            made = usual(data, **options)
            return made if device is None else made.to(device)
        if device is None or torch.device(device).type not in _LIKE_CUDA:
            return usual(data, device=device, **options)
        gradient = options.pop("requires_grad", False)
        made = usual(data, **options)
        return torch.empty(made.shape, dtype=made.dtype, device=device, requires_grad=gradient)

    return tensor


def _tolist(usual: Callable[..., Any]) -> Callable[..., Any]:
    """torch.Tensor.tolist, number by number on ``meta``, as FakeTensors have it."""

    def tolist(tensor: torch.Tensor) -> Any:
        if not tensor.is_meta:
            return usual(tensor)
        return [tolist(each) for each in tensor] if tensor.dim() else tensor.item()

    return tolist


def _scale(like: torch.Tensor, probability: float, seed: int) -> torch.Tensor:
    """dsx.nn.dropout's, without the generator that a device without numbers has not got."""
    del seed
    keep = torch.empty_like(like, memory_format=torch.contiguous_format)
    return keep.bernoulli_(1 - probability).div_(1 - probability)


class _FusedRmsNorm(torch.autograd.Function):
    """What aten::_fused_rms_norm allocates and saves on CUDA (layer_norm_kernel.cu)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        y = x.contiguous().clone()  # a kernel that reads and writes as much
        statistics = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, statistics)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        copy = x.contiguous()
        return torch.mul(copy, dy), None if weight is None else torch.empty_like(weight)


def _rms_norm(usual: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        if x.device.type not in _LIKE_CUDA:
            return usual(x, shape, weight, epsilon)
        y: torch.Tensor = _FusedRmsNorm.apply(x, weight)
        return y

    return norm


def _attention(usual: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The fused kernels that torch takes on CUDA (sdp_utils.cpp): flash for half precision without a mask."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if query.device.type not in _LIKE_CUDA or query.dim() != 4:
            return usual(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if query.dtype != torch.float32 and attn_mask is None and _fits_flash(query, value):
            flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001 (what torch dispatches to)
            return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                masked = query.new_full((), -torch.inf)
                attn_mask = torch.where(attn_mask, 0.0, masked)  # attention.cpp, convert_boolean_attn_mask_
            attn_mask = attn_mask.expand(*query.shape[:2], -1, -1)
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001
        grads = torch.is_grad_enabled()
        return efficient(query, key, value, attn_mask, grads, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]

    return attend


def _ending_together(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scale: float | None
) -> torch.Tensor:
    """dsx.nn.attention's, for which the kernels of a GPU are those of a square."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, None, dropout, True, scale=scale, enable_gqa=grouped
    )


def _fits_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the flash kernel takes heads of these sizes (sdp_utils.cpp, check_head_dim_size_flash)."""
    return query.shape[-1] == value.shape[-1] <= _LARGEST_FLASH_HEAD


_LARGEST_FLASH_HEAD = 256


@contextmanager
def fake_build(device: str, *, knows: bool = False) -> Iterator[None]:
    """Inside the block, layers can be built without storage, and recorded; ``knows`` as above."""
    if device == "paper":
        install()
    # What torch raises it prints too, with its traceback (fake_tensor.py); callers say it in a line.
    quiet = swapped(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    with compilers_late(), quiet, without_storage(device, knows=knows), without_values(), _forms_unchecked():
        yield


@contextmanager
def _forms_unchecked() -> Iterator[None]:
    """Inside, torch does not compare the forms of what is recomputed with those of the first forward.

    Of a frozen parameter it keeps the parameter itself, which is empty again by the time it compares, and is
    gathered for the backward (torch/utils/checkpoint.py, pack_hook).
    """
    checks = torch_checkpoint._allowed_determinism_checks_to_fns  # noqa: SLF001 (set by each call otherwise)
    plain, checks["default"] = checks["default"], checks["none"]
    try:
        yield
    finally:
        checks["default"] = plain


class DetachedTensorParallel(TensorParallel):
    """One tensor-parallel rank without its peers."""

    def __post_init__(self) -> None:
        """Do nothing, because there is no group to check."""


@dataclass(frozen=True, slots=True)
class DetachedExpertParallel(ExpertParallel):
    """One of the ranks that hold experts together, without the others.

    Attributes:
        imbalance: How many rows come to it for each that it sends: 1 if experts are equally busy.
    """

    imbalance: float = 1.0

    def __post_init__(self) -> None:
        """Do nothing, because there is no group to check."""

    def splits(self, own: torch.Tensor, theirs: torch.Tensor, rows: int) -> tuple[list[int], list[int]]:
        """To each rank as many rows as to any other, and from each."""
        del own, theirs
        sent, received = (
            [total // self.size + (rank < total % self.size) for rank in range(self.size)]
            for total in (rows, round(self.imbalance * rows))
        )
        return sent, received
