"""Every error that dsx raises on purpose: where it is, what is wrong, how to mend it."""

from typing import Any, Self

from dsx.terminal import printable, shortened

_MOST_CHARACTERS = 20_000


class KeyPlace(str):
    """Where an error is, in words, with the key of the config for programs."""

    __slots__ = ("path", "value")
    path: tuple[str | int, ...]
    value: Any

    def __new__(cls, words: str, path: tuple[str | int, ...], value: Any = None) -> Self:
        place = super().__new__(cls, words)
        place.path, place.value = path, value
        return place

    def __reduce__(self) -> tuple[type["KeyPlace"], tuple[str, tuple[str | int, ...], Any]]:
        return KeyPlace, (str(self), self.path, self.value)


class DsxError(Exception):
    """An error with a place, a reason and a fix.

    Each part may quote a file of unknown origin: control characters are escaped, and overlong text is cut.

    Args:
        where: The config key, file or argument at fault, with its value when there is one.
        what: Why it is wrong.
        fix: What to do instead.

    Attributes:
        path: The key from the top of the config, if ``where`` is a :class:`KeyPlace`; else empty.
        value: What is written there.

    >>> print(DsxError("dsx.parallel.tensor = 3", "8 heads do not divide by 3", "use 1, 2, 4 or 8"))
    dsx.parallel.tensor = 3: 8 heads do not divide by 3. Fix: use 1, 2, 4 or 8.
    """

    def __init__(self, where: str, what: str, fix: str) -> None:
        place = where if isinstance(where, KeyPlace) else KeyPlace(where, ())
        where, what, fix = (printable(shortened(part, _MOST_CHARACTERS)) for part in (where, what, fix))
        super().__init__(f"{where}: {_sentence(what)} Fix: {_sentence(fix)}")
        self.path, self.value = place.path, place.value
        self.where = where
        self.what = what
        self.fix = fix

    def __reduce__(self) -> tuple[type["DsxError"], tuple[str, str, str]]:
        return type(self), (KeyPlace(self.where, self.path, self.value), self.what, self.fix)


def _sentence(text: str) -> str:
    """With one full stop, or the three that say that more could follow."""
    return text if text.endswith("...") else f"{text.rstrip('.')}."


class ConfigError(DsxError):
    """A key of the config, or a command-line argument, cannot be used."""


class LayoutError(DsxError):
    """A mesh, stage map or sharding that cannot exist."""


class ScheduleError(DsxError):
    """A pipeline schedule that is incomplete, disordered or that would deadlock."""


class DataError(DsxError):
    """Training data that is missing, empty or unreadable."""


class CheckpointError(DsxError):
    """A checkpoint that is missing, incomplete, corrupt or of another model or layout."""


class ModelError(DsxError):
    """A model (Hugging Face config, weights or layer list) that dsx cannot build or run."""


class RunError(DsxError):
    """A run that must not go on: its figures or its weights have gone wrong."""


class VersionError(DsxError):
    """An installed package whose internals dsx has not been checked against."""


class UnavailableError(ModelError, AttributeError):
    """A name of stock DeepSpeed in whose place dsx has another; ``hasattr`` says that it is not there."""


def no_matplotlib(where: str) -> ConfigError:
    """What to raise where a picture needs matplotlib and there is none."""
    return ConfigError(
        where,
        "it draws with matplotlib, which is not installed",
        "pip install 'matplotlib>=3.9' (dsx's extra \"plot\" brings it)",
    )
