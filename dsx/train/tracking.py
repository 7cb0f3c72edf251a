"""Metrics of a run: ``metrics.jsonl`` always, Weights & Biases if asked for. Neither ever ends training.

One rank opens a :class:`Tracker`: the one that has the loss.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import numbers
import os
import queue
import secrets
import shlex
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal, Self

import psutil

from dsx.config.schema import WandbConfig
from dsx.errors import DataError
from dsx.models.transformers_settings import first_line

STEP = "train/step"
_NON_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # as in protobuf's JSON


class MetricsFile:
    """Appends records, after dropping those of steps that a resumed run will do again.

    Args:
        path: The file; its folder is made.
        first_step: Records of this step and later ones are dropped, and lines that a kill left torn. A run
            that begins at step 1 is another one than that which wrote the file: it is renamed to
            ``metrics.1.jsonl``.

    Raises:
        DataError: It cannot be written.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if first_step <= 1:
                _lay_aside(path)
            self.dropped = _drop_records(path, first_step)
            """Step and metric of everything that was dropped at the start."""
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise DataError(
                str(path), f"cannot be written ({error.strerror})", "mend that, or change dsx.train.output"
            ) from error

    def forget(self, first_step: int) -> frozenset[tuple[int, str]]:
        """Drop the records of this step and later ones, which will come again; gives step and metric of each.

        If that raises an OSError, the file stays as it was, and takes records as before.
        """
        self._file.flush()
        dropped = _drop_records(self.path, first_step)
        written, self._file = self._file, self.path.open("a", encoding="utf-8")
        written.close()
        return dropped

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record at once. If that raises an OSError, the next call tries to write it as well."""
        self._file.write(json.dumps(jsonable(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; safe to call twice. Raises OSError if a record is still not on the disk."""
        self._file.close()


def jsonable(value: Any) -> Any:
    """``value`` with mappings, sequences and plain values only, and non-finite floats as strings."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else _NON_FINITE[str(number)]
    return str(value)


def _lay_aside(path: Path) -> None:
    """Rename the file of another run, whose checkpoints are gone."""
    if path.exists() and path.stat().st_size:
        names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))


def _drop_records(path: Path, first_step: int) -> frozenset[tuple[int, str]]:
    """Rewrite ``path``, atomically, without records of ``first_step`` and later; step and metric of those."""
    if not path.exists():
        return frozenset()
    kept, dropped = list[str](), set[tuple[int, str]]()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        row = _record(line)
        if row is not None and row[STEP] < first_step:
            kept.append(line)
        elif row is not None:
            dropped.update((row[STEP], name) for name in row)
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    return frozenset(dropped)


def _record(line: str) -> dict[str, Any] | None:
    """A line's record; None if a kill in mid-write, or a power cut, has torn it."""
    try:
        row = json.loads(line)
        return {**row, STEP: int(row[STEP])}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


Metrics = Mapping[str, float | int]
Mode = Literal["offline", "online", "disabled"]
Action = Callable[[Any], object]

_PACKAGES = ("dsx", "torch", "deepspeed", "transformers", "datasets", "wandb", "numpy")
_INIT_SECONDS = 30.0
_MODES = {"dryrun": "offline", "run": "online", **dict.fromkeys(("true", "1", "yes", "on"), "disabled")}
_MODES |= dict.fromkeys(("false", "0", "no", "off"), "")  # W&B's other words, in WANDB_DISABLED, too
_FINISH_SECONDS = 60.0
_MARGIN_SECONDS = 10.0
_MOST_WAITING = 10_000  # records that W&B may be behind


class Tracker:
    """Writes one record per call of :meth:`log` to ``metrics.jsonl`` and the same to W&B, in one row a step.

    W&B works in a thread of its own, so that no call but :meth:`finish` waits for it, whatever its service or
    the network do; :meth:`finish` waits two minutes or so at most. W&B is quiet and never asks for input. An
    online run that cannot start continues offline; whatever else W&B raises is reported once, after which W&B
    is left alone.

    Args:
        output: The run's folder; ``metrics.jsonl`` and W&B's ``wandb`` folder go there.
        wandb: Mode, project and names.
        run_config: What the run's page shows as its config: any JSON (resolved config, layout, versions).
        first_step: First step that this process will log. Records of this step and later ones, which a run
            that is being resumed wrote after its checkpoint, are dropped from ``metrics.jsonl``. W&B keeps
            those, because it forgets nothing, and takes none a second time: online it refuses them by their
            step, offline it is not given them.
        run_id: W&B id that a checkpoint stored, to continue its curves; None starts a new run.
        warn: Called once with each of W&B's problems, within calls of the tracker; None logs them.

    Attributes:
        run_id: W&B id for the checkpoint; None if W&B was never enabled in this run's history.

    Raises:
        DataError: ``metrics.jsonl`` cannot be written.
    """

    def __init__(
        self,
        output: str | Path,
        wandb: WandbConfig,
        *,
        run_config: Mapping[str, Any],
        first_step: int = 1,
        run_id: str | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._config = wandb
        self._warn = warn or logging.getLogger(__name__).warning
        self._file = MetricsFile(Path(output) / "metrics.jsonl", first_step)
        self.metrics_path = self._file.path
        self._file_failed = self._told = False
        self.run_id = run_id
        self._problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._wandb: _WandbThread | None = None
        self._in_wandb: frozenset[tuple[int, str]] = frozenset()
        if wandb.mode != "disabled":
            for name, key in {"MODE": "mode", "DISABLED": "mode", "PROJECT": "project"}.items():
                said, holds = os.environ.get(f"WANDB_{name}", "").strip(), getattr(wandb, key)
                wanted = said if key == "project" else _MODES.get(said.lower(), said.lower())
                if wanted and wanted != holds:
                    what = f'WANDB_{name}={said} is not taken: dsx.tracking.wandb.{key} = "{holds}" holds'
                    self._warn(f"{what}. Fix: {shlex.join(('--set', f'dsx.tracking.wandb.{key}={wanted}'))}")
            if run_id is not None:
                # W&B writes a row when the next one begins, so that a kill loses the last one.
                last = max((step for step, _ in self._file.dropped), default=0)
                self._in_wandb = frozenset(one for one in self._file.dropped if one[0] < last)
            self.run_id = run_id or secrets.token_hex(4)
            self._wandb = _WandbThread(wandb, Path(output), self.run_id, jsonable(run_config), self._problems)

    @property
    def wandb_path(self) -> Path | None:
        """Folder of the W&B run, which ``wandb sync`` takes; None without W&B. Waits for W&B to start."""
        return None if self._wandb is None else self._wandb.folder()

    def log(self, step: int, metrics: Metrics) -> None:
        """Record ``metrics`` of ``step`` (optimizer steps, from 1), which gets the key ``train/step``.

        Several records of one step, such as training's and evaluation's, are fine. In the JSON, values that
        are not finite are the strings "NaN", "Infinity" and "-Infinity". A disk that is full is a warning.
        """
        try:
            self._file.write({STEP: step, **metrics})
            self._file_failed = False
        except OSError as error:
            if not self._file_failed:
                self._warn(f"{self.metrics_path} cannot be written from step {step} on: {first_line(error)}")
            self._file_failed = True
        if self._wandb is not None:
            row, known = dict(metrics), self._in_wandb  # as it is now: the run may go back before W&B's turn
            self._wandb.put("take metrics", lambda run: self._log_to_wandb(run, step, row, known))
        self._pass_on()

    def went_back(self, step: int) -> None:
        """The run continues from ``step``: records of later steps are dropped, because they come again."""
        try:
            self._in_wandb |= self._file.forget(step + 1)
        except OSError as error:
            self._warn(f"{self.metrics_path} keeps the steps that come again: {first_line(error)}")

    def refer_to(
        self, kind: Literal["checkpoint", "model"], folder: Path, *, step: int, about: Mapping[str, Any]
    ) -> None:
        """Tell W&B of a complete folder of ``step``, as an artifact of references, without any of its bytes.

        The artifact is named after kind and run; each folder is a version of it, with the aliases ``latest``
        and ``step<N>``. Files are known by path and size; JSON files by content, a checkpoint's manifest with
        the checksums of all tensors among them, so that another checkpoint in the same place is another
        version.
        """
        if self._wandb is not None and self._config.artifacts == "reference":
            name = f"{kind}-{self.run_id}"
            facts = {"step": step, "path": str(folder.absolute()), **jsonable(about)}
            self._wandb.put(
                f"refer to {folder}", lambda run: _log_references(run, name, kind, folder.absolute(), facts)
            )
        self._pass_on()

    def finish(self, *, failed: bool = False) -> None:
        """Close the file and the W&B run; safe to call twice."""
        try:
            self._file.close()
        except OSError as error:
            self._warn(f"{self.metrics_path} lacks its last records: {first_line(error)}")
        if self._wandb is not None:
            self._wandb.finish(failed=failed)
        self._pass_on()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.finish(failed=error is not None)

    def _log_to_wandb(self, run: Any, step: int, metrics: Metrics, known: frozenset[tuple[int, str]]) -> None:
        """Log in W&B's thread, by the step's number; by default W&B counts rows, from 0 in each process."""
        new = {name: value for name, value in metrics.items() if (step, name) not in known}
        if len(new) < len(metrics) and not self._told:
            self._told = True
            first, last = min(at for at, _ in known), max(at for at, _ in known)
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            self._problems.put(
                f"W&B keeps {steps} as before the run went back to its checkpoint; {self.metrics_path} has "
                "what is true now"
            )
        kept = new if run.offline else metrics
        if kept:
            run.log({STEP: step, **kept}, step=step)

    def _pass_on(self) -> None:
        """Pass the thread's warnings on, from the caller's own thread."""
        for _ in range(self._problems.qsize()):
            self._warn(self._problems.get())


class _WandbThread:
    """One W&B run, and the thread that alone talks to it.

    W&B's client hands everything to a service process through a socket, and waits where that does not read
    it: in ``log`` when the socket is full, in ``finish`` without any limit (wandb 0.31, wandb_run.py,
    ``_on_finish``). Here the queue is what waits.
    """

    def __init__(
        self,
        config: WandbConfig,
        output: Path,
        run_id: str,
        run_config: Any,
        problems: queue.SimpleQueue[str],
    ) -> None:
        self._config, self._output, self._run_id, self._run_config = config, output, run_id, run_config
        self._queue: queue.Queue[tuple[str, Action] | None] = queue.Queue(_MOST_WAITING)
        self._problems = problems
        self._started = threading.Event()
        self._folder: Path | None = None
        self._run: Any = None
        self._broken = self._over = self._overrun = False
        self._thread = threading.Thread(target=self._work, name="dsx-wandb", daemon=True)
        # Imported here, because two threads that import modules importing each other may see half of one.
        self._attempt("start", lambda: import_module("wandb"))
        self._thread.start()

    def put(self, doing: str, action: Action) -> None:
        """Have ``action(run)`` done in its turn; ``doing`` completes the sentence "W&B could not"."""
        if self._over or self._broken:
            return
        try:
            self._queue.put_nowait((doing, action))
        except queue.Full:
            self._overrun = True
            self._give_up(f"take metrics for {_MOST_WAITING:,} records", "its service does not answer")

    def folder(self) -> Path | None:
        """The run's folder, once it has started; None if it could not."""
        self._started.wait(2 * _INIT_SECONDS + _MARGIN_SECONDS)
        return self._folder

    def finish(self, *, failed: bool) -> None:
        """Wait until all is done, within reason."""
        if self._over:
            return
        self.put("finish", lambda run: run.finish(exit_code=int(failed)))
        self._over = True
        seconds = _MARGIN_SECONDS if self._broken else _INIT_SECONDS + _FINISH_SECONDS + _MARGIN_SECONDS
        with suppress(queue.Full):
            self._queue.put(None, timeout=_MARGIN_SECONDS)
        self._thread.join(seconds)
        if self._thread.is_alive() or self._overrun:
            self._give_up("finish", f"it has not ended after {seconds:.0f} s")
            # Its service process hangs. At the end of this one, W&B would wait for it for ever.
            _end_services()
            self._thread.join(_MARGIN_SECONDS)
        if self._broken and not _services():
            # Its service is dead: W&B must not look for it at the end of the process, nor use it again. It
            # leaves by sys.exit with the service's exit code (wandb 0.31, wandb_setup.py, ``_teardown``)
            # unless it has seen before that the connection is gone.
            with suppress(Exception, SystemExit):
                import wandb

                wandb.teardown()

    def _work(self) -> None:
        if not self._broken:
            self._start()
        self._started.set()
        while (call := self._queue.get()) is not None:
            if not self._broken:
                self._attempt(call[0], partial(call[1], self._run))

    def _start(self) -> None:
        config = self._config
        try:
            self._begin(config.mode, self._run_id)
        except Exception as error:  # noqa: BLE001 (whatever W&B raises, training goes on)
            if config.mode != "online":
                self._give_up("start", first_line(error))
                return
            reason = first_line(error)
            # W&B's service still counts the failed run as open, so the offline one needs another id.
            self._attempt("start", lambda: self._begin("offline", secrets.token_hex(4)))
            if not self._broken:
                self._problems.put(
                    f"W&B could not be reached, so the run is kept offline ({reason}); "
                    f"send it later with: wandb sync --id {self._run_id} {self._folder}"
                )

    def _begin(self, mode: Mode, run_id: str) -> None:
        self._run = _begin(self._config, mode, self._output, run_id, self._run_config)
        self._folder = Path(self._run.settings.sync_dir)

    def _attempt(self, doing: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 (whatever W&B raises, training goes on)
            self._give_up(doing, first_line(error))

    def _give_up(self, doing: str, reason: str) -> None:
        if self._broken:
            return
        self._broken = True
        later = "" if self._folder is None else f"; send what it has with: wandb sync {self._folder}"
        self._problems.put(f"W&B could not {doing}, so it is left out from here on ({reason}){later}")


def environment() -> dict[str, str | None]:
    """Versions of the packages that decide a run's numbers, and the git commit of the working directory."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {**versions, "git_commit": _git_commit()}


def _begin(config: WandbConfig, mode: Mode, output: Path, run_id: str | None, run_config: Any) -> Any:
    import wandb

    _keep_beside(output)
    # Set for the process, not only the run: otherwise W&B asks for a key on the terminal, and training waits.
    wandb.setup(settings=wandb.Settings(silent=True))
    limits: dict[str, Any] = {
        "finish_timeout": _FINISH_SECONDS,
        "finish_timeout_raises": True,
        "x_transaction_log_flush_interval": 1.0,  # what a kill of the process takes with it
    }
    run = wandb.init(
        project=config.project,
        entity=config.entity,
        name=config.name,
        group=config.group,
        tags=config.tags or None,  # else W&B's own WANDB_TAGS
        mode=mode,
        dir=str(output),
        id=run_id,
        resume="allow",
        config=run_config,
        settings=wandb.Settings(
            console="off",
            silent=True,
            init_timeout=_INIT_SECONDS,
            reinit="create_new",  # DeepSpeed's own wandb block may have a run open
            **{name: value for name, value in limits.items() if name in wandb.Settings.model_fields},
        ),
    )
    run.define_metric(STEP)
    run.define_metric("train/tokens", step_metric=STEP)
    run.define_metric("eval/loss", step_metric=STEP, summary="min")
    run.define_metric("*", step_metric=STEP)
    return run


def _keep_beside(output: Path) -> None:
    """Have W&B's cache and log in the output folder where the user has no home that can be written.

    Else its own process writes its log on the console, and takes no checkpoint.
    """
    from wandb import env

    for name, place in ((env.CACHE_DIR, Path(env.get_cache_dir())), (env.DATA_DIR, Path(env.get_data_dir()))):
        with suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.W_OK):
            os.environ[name] = str(output / "wandb" / "kept")


def _log_references(run: Any, name: str, kind: str, folder: Path, facts: Mapping[str, Any]) -> None:
    """Describe ``folder`` as it is now; nothing if it has been deleted meanwhile, as old checkpoints are."""
    import wandb

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        return
    size_bytes = sum(path.stat().st_size for path in files)
    artifact = wandb.Artifact(name, type=kind, metadata={**facts, "bytes": size_bytes})
    for path in files:
        place = path.relative_to(folder).as_posix()
        # W&B's checksum would read every byte; those of the tensors are in the manifest.
        artifact.add_reference(path.as_uri(), name=place, checksum=path.suffix == ".json")
    run.log_artifact(artifact, aliases=["latest", f"step{facts['step']}"])


def _end_services() -> None:
    services = _services()
    for service in services:
        with suppress(psutil.NoSuchProcess):
            service.kill()
    psutil.wait_procs(services, timeout=_MARGIN_SECONDS)


def _services() -> list[psutil.Process]:
    """Service processes of W&B that this process has started and that have not ended."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if child.name() == "wandb-core" and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def _git_commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
