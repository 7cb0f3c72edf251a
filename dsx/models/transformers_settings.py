"""How transformers is set while dsx uses it: quiet, in torch, with caps, by positions, without zero.Init."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Let transformers report errors alone inside the block, and restore its settings after it.

    Models are made there without ``deepspeed.zero.Init``, which TrainingArguments of ZeRO-3 ask for.
    """
    from transformers.utils import logging

    known: Any = sys.modules.get("transformers.integrations.deepspeed", SimpleNamespace())
    zero = getattr(known, "_hf_deepspeed_config_weak_ref", None)
    known._hf_deepspeed_config_weak_ref = None  # noqa: SLF001 - transformers has no name for it
    shown, told = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        known._hf_deepspeed_config_weak_ref = zero  # noqa: SLF001 - as above
        logging.set_verbosity(told)
        if shown:
            logging.enable_progress_bar()


_FORMS = threading.RLock()
"""Held while settings of the whole process are changed: threads would put back each other's."""


@contextmanager
def torch_forms() -> Iterator[None]:
    """Have transformers compute in torch inside the block, whatever kernels for GPUs are installed.

    It chooses kernels by package, not by device, and passes them over only where a model is exported.
    FlexAttention is not compiled: a few tokens of a small model are no work for a compiler. Threads are
    inside one after another.
    """
    import torch
    from transformers.integrations import hub_kernels

    with _FORMS:
        asks = getattr(hub_kernels, "is_torchdynamo_exporting", None)
        hub_kernels.is_torchdynamo_exporting = lambda: True
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            hub_kernels.is_torchdynamo_exporting = asks


@contextmanager
def masks_of(positions: Any, base: Any) -> Iterator[None]:
    """Inside, a family's forward makes masks by these positions, which it may hand to rotary tables alone.

    So does modeling_gpt_oss.py. The masks are made by functions of transformers' masking_utils that the
    family's file has imported by name. Where they are made in another way, the family's probe shows it.
    """
    own = vars(sys.modules[type(base).__module__])
    makers = {
        name: function
        for name, function in own.items()
        if getattr(function, "__module__", "") == "transformers.masking_utils"
        and "position_ids" in inspect.signature(function).parameters
    }
    own |= {name: partial(_with_positions, function, positions) for name, function in makers.items()}
    try:
        yield
    finally:
        own |= makers


def _with_positions(make: Callable[..., Any], positions: Any, *arguments: Any, **named: Any) -> Any:
    """A mask of transformers, made with positions if the caller gives none."""
    given = inspect.signature(make).bind(*arguments, **named)
    if given.arguments.get("position_ids") is None:
        given.arguments["position_ids"] = positions
    return make(*given.args, **given.kwargs)


def first_line(error: BaseException) -> str:
    r"""The type of an error that is not dsx's, and the first line of its message, with what that leads to.

    >>> first_line(ValueError("a field is wrong:\n  it is no number\nAnd so on."))
    'ValueError: a field is wrong: it is no number'
    """
    lines = str(error).strip().splitlines()
    lines = lines[: 2 if lines and lines[0].endswith(":") else 1]
    return ": ".join([type(error).__name__, " ".join(line.strip() for line in lines)][: len(lines) + 1])


def with_cap(described: Any) -> Any:
    """A config object whose attention caps scores: transformers before 5.18 takes sdpa, which does not."""
    if getattr(described, "attn_logit_softcapping", None) and described._attn_implementation is None:  # noqa: SLF001
        described._attn_implementation = "eager"  # noqa: SLF001
    return described
