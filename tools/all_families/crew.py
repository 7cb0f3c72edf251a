"""Ranks that stay and take one small model after another in a layout, each beside transformers.

The engine takes the step of the proof at start (dsx.verify.small_step).

A case is "ok", "refused" (a DsxError), "different", "traceback", "none": transformers itself makes or runs no
such model, or "same": it has the program of one that is ok, and did not run. A rank that fails where others
may wait for it ends with all of them; the next go on behind.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from all_families import parity, tiny
from all_families.parity import Layout
from torch.utils._python_dispatch import TorchDispatchMode

from dsx.errors import DsxError, LayoutError
from dsx.launch.entry import AGREED
from dsx.launch.local_ranks import RankError, run_ranks
from dsx.parallel.groups import Groups, make_groups
from dsx.parallel.mesh import Mesh

LAYOUTS = {
    "tp2": Layout(tp=2, zero=0),
    "tp4": Layout(tp=4, zero=0),
    "pp2": Layout(pp=2, chunks=2, zero=0, schedule="interleaved"),
    "zero3": Layout(dp=2, zero=3),
}
_NOTHING: Mapping[str, float] = MappingProxyType({})
_IN_A_ROW = 2  # cases of a family
_CASES = 150  # of one crew, which then makes room
_SECONDS = 90.0  # of one case

Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A family with an option in a layout, of these modules (``dsx.model.implementation``)."""

    family: str
    option: str
    changes: Json
    layout: str
    implementation: str = "transformers"

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is known by."""
        of = "" if self.implementation == "transformers" else f" ({self.implementation})"
        return self.family + of, self.option, self.layout


BAD = ("different", "traceback")


def cases(family: str, implementation: str = "transformers") -> list[Case]:
    """A family's tiny config with every option, and as it is; none of a family that is made of several.

    They are of the first layout.
    """
    from all_families import options

    try:
        if tiny.text_family(family) != family:
            return []
        found = options.options_of(family)
    except LookupError:
        return []
    except Exception as error:  # noqa: BLE001 - transformers cannot make its config
        print(f"{family} has no tiny config: {_line(error)}", flush=True)
        return []
    every = [*((str(each), each.changes) for each in found), ("", {})]
    return [Case(family, option, changes, next(iter(LAYOUTS)), implementation) for option, changes in every]


def rotated(every: Sequence[Sequence[Case]], turn: int) -> list[Case]:
    """One layout of each case, another in each of as many turns as there are layouts.

    Families' cases take turns by a few, so that wherever a run ends, all of them were looked at.
    """
    layouts = list(LAYOUTS)
    numbered = [
        (number // _IN_A_ROW, of, replace(case, layout=layouts[(number + of + turn) % len(layouts)]))
        for of, cases in enumerate(every)
        for number, case in enumerate(cases)
    ]
    numbered.sort(key=lambda each: (each[0], layouts.index(each[2].layout), each[1]))
    return [case for *_, case in numbered]


def settled(known: Mapping[tuple[str, ...], Json]) -> dict[tuple[str, str, str], Json]:
    """Outcomes of cases that need not run, by those of others.

    What transformers itself does not run, it runs in no layout. Two options of a family have one program if
    transformers' step gives the same bits by the same operators from the same parameters in the same modules,
    and dsx cuts both alike (:func:`_print`): what came out right of one is right of the other.
    """
    right: dict[tuple[str, str, str], str] = {}
    first: dict[tuple[str, str], Json] = {}
    for (family, option, layout), one in known.items():
        if "print" in one or one["result"] == "none":
            first.setdefault((family, option), one)
        if "print" in one and one["result"] == "ok":
            right.setdefault((family, one["print"], layout), option)
    found: dict[tuple[str, str, str], Json] = {}
    for (family, option), one in first.items():
        for layout in LAYOUTS:
            key, twin = (family, option, layout), right.get((family, one.get("print", ""), layout))
            if key in known:
                continue
            if one["result"] == "none":
                found[key] = one
            elif twin is not None:
                found[key] = {"result": "same", "as": twin}
    return found


def outcomes(cases: Sequence[Case], plan: Mapping[str, str | None] = _NOTHING) -> Iterator[tuple[Case, Json]]:
    """Each case with its outcome, as they come; ``plan`` changes all tensor plans."""
    waiting = list(cases)
    while waiting:
        layout = waiting[0].layout
        own = [case for case in waiting if case.layout == layout][:_CASES]
        with tempfile.TemporaryDirectory(prefix="crew-") as folder:
            notes = Path(folder) / "outcomes.jsonl"
            done = yield from _followed(own, cases, notes, dict(plan))
        told = {case.key for case in own[:done]}
        waiting = [case for case in waiting if case.key not in told]


def _followed(own: list[Case], every: Sequence[Case], notes: Path, plan: Json) -> Any:
    """The outcomes of some cases in the ranks' order; returns how many there are."""
    failed: list[RankError] = []

    def work() -> None:
        try:
            run_ranks(
                _work,
                LAYOUTS[own[0].layout].world_size,
                own,
                notes,
                plan,
                timeout_seconds=_SECONDS * len(own),
                preload=[*parity.PRELOAD, *tiny.modules(case.family for case in every)],
            )
        except RankError as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    done = 0
    while thread.is_alive() or done < _lines(notes):
        thread.join(0.5)
        for line in (notes.read_text().splitlines() if notes.exists() else [])[done:]:
            yield own[done], json.loads(line)
            done += 1
    if failed and done < len(own) and not notes.with_suffix(".left").exists():
        yield (
            own[done],
            {"result": "traceback", "reason": parity.reason(failed[0]), "trace": failed[0].said[-3000:]},
        )
        done += 1
    return done


def _lines(notes: Path) -> int:
    return notes.read_text().count("\n") if notes.exists() else 0


def _work(rank: int, _world_size: int, cases: list[Case], notes: Path, plan: Json) -> None:
    """What a rank does: every case in order; rank 0 notes the outcomes."""
    import torch.distributed as dist
    from transformers import logging

    logging.set_verbosity_error()
    gc.freeze()  # the proof collects garbage after each case, which looks at whatever is not frozen
    home = tempfile.mkdtemp(prefix="crew-home-")  # what is kept of probes and proofs goes with the crew
    os.environ["HOME"] = home
    try:
        for case in cases:
            began = time.monotonic()
            try:
                with _limited(case):
                    outcome = _outcome(case, plan)
            except _AloneError as alone:
                _leave(alone.outcome, notes)
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, outcome)
            if rank == 0:
                worst = max(everybody, key=lambda each: _ORDER.index(each["result"]))
                worst["seconds"] = round(time.monotonic() - began, 2)
                with notes.open("a") as file:
                    file.write(json.dumps(worst) + "\n")
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _leave(outcome: Json, notes: Path) -> NoReturn:
    """Note an outcome and end, with the ranks that wait, unless another rank of them was first."""
    with suppress(FileExistsError):
        notes.with_suffix(".left").touch(exist_ok=False)
        with notes.open("a") as file:
            file.write(json.dumps(outcome) + "\n")
    os._exit(1)


class _Operators(TorchDispatchMode):
    """Digests every operator that runs inside: its name, shapes and other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.digest = hashlib.sha256()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note one and run it."""
        kwargs = kwargs or {}
        told = [func.__name__, *map(self._told, args), *((k, self._told(v)) for k, v in kwargs.items())]
        self.digest.update(repr(told).encode())
        return func(*args, **kwargs)

    def _told(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), str(value.dtype)
        if isinstance(value, list | tuple):
            return [*map(self._told, value)]
        return value


_ORDER = ("ok", "none", "refused", "different", "traceback")


@contextmanager
def _limited(case: Case) -> Iterator[None]:
    """End this rank if a case takes too long: the ranks may wait for each other."""

    def end() -> None:
        print(f"{case.key}: no result after {_SECONDS:g} s", flush=True)
        os._exit(1)

    timer = threading.Timer(_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _outcome(case: Case, plan: Json) -> Json:
    import torch.distributed as dist

    import dsx
    from dsx.models.spec import HubModel

    layout = LAYOUTS[case.layout]
    whole, ops = None, _Operators() if dist.get_rank() == 0 else None
    try:
        config = json.loads(tiny.tiny_config(case.family, case.changes).to_json_string())
        if ops is not None:  # the proof has a reference of its own
            whole = _transformers(config, ops)
            config = json.loads(whole.config.to_json_string())  # some classes make a decoder of an encoder's
        given = {"config": config}
    except Exception as error:  # noqa: BLE001 - whatever the family's code says to an option
        given = {"none": _line(error)}
    given = _from_first(given)
    if "none" in given:
        return {"result": "none", "reason": given["none"]}
    try:
        written = parity.dsx_config(layout, given["config"], case.implementation)
        written["dsx"]["parallel"]["tensor_plan"] = plan
        resolved = dsx.load_config(written, world_size=layout.world_size)
        hub = isinstance(resolved.model, HubModel)
        mark = {"print": _print(resolved.model, whole, ops)} if hub and ops is not None else {}
        found = _engine(resolved)
    except DsxError as error:
        return {"result": "refused", "reason": parity.reason_of(error)}
    return {**found, **mark}


def _from_first(given: Json) -> Json:
    """What rank 0 has, on every rank."""
    import torch.distributed as dist

    box: list[Any] = [given]
    dist.broadcast_object_list(box)
    found: Json = box[0]
    return found


def _print(model: Any, whole: Any, ops: _Operators) -> str:
    """A digest of a program: of transformers' modules, parameters, operators and bits, and of dsx's cut."""
    digest = ops.digest.copy()
    for name, module in whole.named_modules():
        digest.update(f"{name} {type(module)}".encode())
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        digest.update(f"{name} {parameter.requires_grad}".encode())
        digest.update(b"" if parameter.grad is None else parameter.grad.numpy().tobytes())
    for each in (*whole.state_dict().values(), whole.logits, whole.expected):
        digest.update(each.detach().contiguous().numpy().tobytes())
    own = {each.name: getattr(model, each.name) for each in fields(model) if each.name != "config"}
    digest.update(re.sub(" at 0x[0-9a-f]+", "", repr(own)).encode())
    return digest.hexdigest()[:24]


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _transformers(config: Json, ops: _Operators) -> Any:
    """Transformers' model of a config with the gradients of a step, as it trains it."""
    from dsx.hub.shrunk import random_model

    model = random_model(config)
    inputs, labels = next(parity.micro_batches(0))
    with ops:
        logits, loss = parity.logits_and_loss(model, inputs, labels)
        if not loss.isfinite() or not logits.isfinite().all():
            raise ValueError("its loss is not finite")
        loss.backward()
    model.logits, model.expected = logits.detach(), loss.detach()
    return model


@cache
def _groups(mesh: Mesh, *, sequence_parallel: bool) -> Groups:
    """Groups that a layout's cases share: each group has threads of its own for as long as its rank lives."""
    return make_groups(mesh, sequence_parallel=sequence_parallel)


def _engine(resolved: Any) -> Json:
    from dsx.verify import small_step

    groups = _groups(resolved.mesh, sequence_parallel=resolved.dsx.parallel.sequence_parallel)
    try:
        proof = small_step.prove(resolved, groups, quiet=True)
    except DsxError as error:
        found = _refused_or_bad(resolved, error)
        if AGREED not in getattr(error, "__notes__", ()):
            raise _AloneError(found) from error
        return found
    return {"result": "refused", "reason": proof.why_not} if proof.why_not else {"result": "ok"}


class _AloneError(Exception):
    """A rank's outcome that the others do not know: they wait for it in a step that it has left."""

    def __init__(self, outcome: Json) -> None:
        super().__init__(str(outcome))
        self.outcome = outcome


def _refused_or_bad(resolved: Any, error: DsxError) -> Json:
    import dsx

    try:
        dsx.recipe.require_right_layers(resolved)  # a run asks before it proves its layout
        if not isinstance(error, LayoutError):  # transformers itself does not run the model
            raise error
    except DsxError as refusal:
        return {"result": "refused", "reason": parity.reason_of(refusal)}
    cause = error.__cause__
    if cause is not None:
        said = "".join(traceback.format_exception(cause))
        return {"result": "traceback", "reason": _line(cause), "trace": said[-3000:]}
    return {"result": "different", "reason": parity.reason_of(error)}
