"""Metrics of a run: ``metrics.jsonl`` always, Weights & Biases if asked for, and never an end of training.

One rank opens a :class:`Tracker`: the one that owns the loss.
"""

from __future__ import annotations

import json
import logging
import math
import numbers
import os
import secrets
import subprocess
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from dsx.config.schema import WandbConfig
from dsx.errors import DataError

T = TypeVar("T")

Metrics = Mapping[str, float | int]
Mode = Literal["offline", "online", "disabled"]

STEP = "train/step"
_PACKAGES = ("dsx", "torch", "deepspeed", "transformers", "datasets", "wandb", "numpy")
_NON_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # as in protobuf's JSON
_INIT_SECONDS = 30.0  # other ranks wait meanwhile
_FINISH_SECONDS = 120.0


class Tracker:
    """Writes one record per call of :meth:`log` to ``metrics.jsonl`` and, the same one, to W&B.

    W&B is quiet and never asks for input; an online run that cannot start continues offline, and whatever
    else W&B raises is reported once, after which it is left alone.

    Args:
        output: The run's folder; ``metrics.jsonl`` and W&B's ``wandb`` folder go there.
        wandb: Mode, project and names.
        run_config: What the run's page shows as its config: any JSON (resolved config, layout, versions).
        first_step: First step that this process will log. Records of this step and later ones, which a run
            that is being resumed wrote after its checkpoint, are dropped from ``metrics.jsonl``.
        run_id: W&B id that a checkpoint stored, to continue its curves; None starts a new run.
        warn: Told once about each of W&B's problems; None logs them.

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
        self._output = Path(output)
        self.metrics_path = self._output / "metrics.jsonl"
        self._warn = warn or logging.getLogger(__name__).warning
        self._run: Any = None
        self._run_id = run_id
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            _drop_records(self.metrics_path, first_step)
            self._file = self.metrics_path.open("a", encoding="utf-8")
        except OSError as error:
            raise DataError(
                str(self.metrics_path), f"cannot be written ({error.strerror})", "change dsx.train.output"
            ) from error
        if wandb.mode != "disabled":
            self._run_id = run_id or secrets.token_hex(4)
            self._run = self._start(wandb, _jsonable(run_config))

    @property
    def run_id(self) -> str | None:
        """W&B id for the checkpoint; None if W&B was never enabled in this run's history."""
        return self._run_id

    @property
    def wandb_path(self) -> Path | None:
        """Folder of the W&B run, which ``wandb sync`` takes; None without W&B."""
        return Path(self._run.settings.sync_dir) if self._run is not None else None

    def log(self, step: int, metrics: Metrics) -> None:
        """Record ``metrics`` of ``step`` (optimizer steps, from 1), which gets the key ``train/step``.

        Several records of one step, such as training's and evaluation's, are fine. In the JSON, values that
        are not finite are the strings "NaN", "Infinity" and "-Infinity". A disk that is full is a warning.
        """
        record = {STEP: step, **metrics}
        try:
            self._file.write(json.dumps(_jsonable(record), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            self._warn(f"{self.metrics_path} could not take step {step}: {_said(error)}")
        if self._run is not None:
            self._attempt("take metrics", lambda: self._run.log(record))

    def finish(self, *, failed: bool = False) -> None:
        """Close the file and the W&B run; safe to call twice."""
        self._file.close()
        if self._run is not None:
            self._attempt("finish", lambda: self._run.finish(exit_code=int(failed)))
            self._run = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(failed=error is not None)

    def _start(self, config: WandbConfig, run_config: Any) -> Any:
        def begin(mode: Mode, run_id: str | None) -> Any:
            return _begin(config, mode, self._output, run_id, run_config)

        try:
            return begin(config.mode, self._run_id)
        except Exception as error:  # noqa: BLE001 (whatever W&B raises, training goes on)
            if config.mode != "online":
                return self._warn(f"W&B could not start, so it is left out: {_said(error)}")
            reason = _said(error)
        # W&B's service still counts the failed run as open, so the offline one needs an id of its own.
        run = self._attempt("start", lambda: begin("offline", secrets.token_hex(4)))
        if run is not None:
            self._warn(
                f"W&B could not be reached, so the run is kept offline ({reason}); "
                f"send it later with: wandb sync --id {self._run_id} {run.settings.sync_dir}"
            )
        return run

    def _attempt(self, doing: str, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except Exception as error:  # noqa: BLE001 (whatever W&B raises, training goes on)
            self._warn(f"W&B could not {doing}, so it is left out from here on: {_said(error)}")
            self._run = None
            return None


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

    # For the process, not only the run: otherwise a terminal is asked for a key, and training waits.
    wandb.setup(settings=wandb.Settings(silent=True))
    limits: dict[str, Any] = {"finish_timeout": _FINISH_SECONDS}
    run = wandb.init(
        project=config.project,
        entity=config.entity,
        name=config.name,
        group=config.group,
        tags=config.tags,
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
    # W&B's own step counts calls of log; ours also survives a resume from an older checkpoint.
    run.define_metric(STEP)
    run.define_metric("train/tokens", step_metric=STEP)
    run.define_metric("eval/loss", step_metric=STEP, summary="min")
    run.define_metric("*", step_metric=STEP)
    return run


def _drop_records(path: Path, first_step: int) -> None:
    """Rewrite ``path``, atomically, without records of ``first_step`` and later and without torn lines."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_before(line, first_step)]
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _is_before(line: str, first_step: int) -> bool:
    try:
        return int(json.loads(line)[STEP]) < first_step
    except (ValueError, KeyError, TypeError):  # torn by a kill in mid-write
        return False


def _jsonable(value: Any) -> Any:
    """``value`` with mappings, sequences and plain values only, and non-finite floats as strings."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else _NON_FINITE[str(number)]
    return str(value)


def _git_commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
