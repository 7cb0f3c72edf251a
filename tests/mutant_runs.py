"""Many mutants (:mod:`mutants`), one after another, in child processes with a limit of memory and time."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mutants


@dataclass(frozen=True)
class Outcome:
    """How a mutant ended: ``good`` is a kind that a test may allow."""

    what: str
    kind: str
    good: bool


class TookTooLong(BaseException):
    """A mutant that held its reader up; no Exception, so that nothing takes it for one of its own."""


def outcomes(
    seeds: Sequence[int],
    original: Path,
    scratch: Path,
    attempt: Callable[[Path, int], str],
    *,
    allowed: tuple[type[BaseException], ...],
    files: Sequence[str] = (),
    seconds: int = 20,
    more_bytes: int = 1 << 30,
) -> Iterator[Outcome]:
    """Spoil a copy of ``original`` once for every seed, and let ``attempt`` read it, in child processes.

    A child has ``more_bytes`` of address space more than it starts with, and ``seconds`` for each mutant; one
    that dies takes one mutant with it.

    Args:
        seeds: Of :func:`mutants.mutate`.
        original: Good files.
        scratch: A folder to work in.
        attempt: Given the spoilt folder and the seed; gives the name of its end.
        allowed: Errors that are a good end.
        files: As for :func:`mutants.mutate`.
        seconds: For each.
        more_bytes: For each.
    """
    rest = list(seeds)
    while rest:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            _child(rest, original, scratch, attempt, allowed, files, (seconds, more_bytes), writer)
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8") as lines:
            told = [json.loads(line) for line in lines if line.endswith("\n")]
        _, status = os.waitpid(child, 0)
        for what, kind, good in told:
            yield Outcome(what, kind, good)
        rest = rest[len(told) :]
        if rest:  # the child died over the next
            yield Outcome(f"seed {rest[0]}", f"the process ended with {status}", good=False)
            rest = rest[1:]


def _child(
    seeds: Sequence[int],
    original: Path,
    scratch: Path,
    attempt: Callable[[Path, int], str],
    allowed: tuple[type[BaseException], ...],
    files: Sequence[str],
    limits: tuple[int, int],
    writer: int,
) -> None:
    """Try every seed and write a line for each; never returns."""
    code = 1
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + limits[1]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.signal(signal.SIGALRM, _late)
        for seed in seeds:
            told = _tried(seed, original, scratch, attempt, allowed, files, limits[0])
            os.write(writer, (json.dumps(told) + "\n").encode())
        code = 0
    finally:
        os._exit(code)


def _late(*_: object) -> None:
    raise TookTooLong


def _tried(
    seed: int,
    original: Path,
    scratch: Path,
    attempt: Callable[[Path, int], str],
    allowed: tuple[type[BaseException], ...],
    files: Sequence[str],
    seconds: int,
) -> tuple[str, str, bool]:
    home = scratch / "mutant"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(original, home / original.name, symlinks=True)
    what = mutants.mutate(home / original.name, seed, files)
    signal.alarm(seconds)
    try:
        return what, attempt(home / original.name, seed), True
    except allowed as error:
        # The file is wrong, and no reader may say that dsx is.
        return what, type(error).__name__, "report this" not in str(error)
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is the answer)
        return what, _told(error), False
    finally:
        signal.alarm(0)


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{Path(at.filename).name}:{at.lineno} {at.name}" for at in reversed(frames))
    return f"{type(error).__name__}: {error} @ {places}"[:400].encode("ascii", "backslashreplace").decode()


def counted(found: Sequence[Outcome]) -> Mapping[str, int]:
    """How many mutants ended in which kind of good end, and how many in none."""
    return Counter(one.kind if one.good else "BAD" for one in found)
