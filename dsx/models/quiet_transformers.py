"""Transformers without its progress bars and warnings, which quote untrusted files unescaped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Let transformers report errors alone inside the block, and restore its settings after it."""
    from transformers.utils import logging

    shown, told = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(told)
        if shown:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The type of an error that is not dsx's, and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
