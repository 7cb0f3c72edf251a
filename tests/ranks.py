"""Run a function on several gloo ranks of this machine, in processes that start in milliseconds.

    import ranks

    def total(rank, world_size, base):          # a module-level function of the test module
        x = torch.tensor([base + rank])
        torch.distributed.all_reduce(x)
        return x.item()

    def test_total():
        assert ranks.run(total, 4, 10) == [46, 46, 46, 46]

The ranks are those of :mod:`dsx.launch.local_ranks`, with one thread each and transformers' models imported
once. They never see a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsx.launch.local_ranks import RankError, RankJob, run_ranks, start_server

__all__ = ["RankError", "RankJob", "run", "serve"]

_MODELS = (
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "preloaded",  # last: it freezes what is there
)


def run(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300, proved: bool = False
) -> list[Any]:
    """Results of ``fn(rank, world_size, *args)``, by rank, from ``world_size`` gloo processes.

    What ranks print is printed again here when they have ended. Models that ``fn`` builds are not proved at
    start unless ``proved``: tests compare them with one process themselves. Raises RankError: see
    :func:`dsx.launch.local_ranks.run_ranks`.
    """
    serve()
    function, given = (fn, args) if proved else (_unproved, (fn, *args))
    return run_ranks(function, world_size, *given, timeout_seconds=timeout, preload=_MODELS, ended=_show)


def _unproved(rank: int, world_size: int, fn: Callable[..., Any], *args: Any) -> Any:
    proof = SimpleNamespace(words="not: tests/ranks.py")
    stand_in = SimpleNamespace(known_proof=lambda _config: proof, is_proved=lambda _config: False)
    sys.modules["dsx.train.proof"] = stand_in  # type: ignore[assignment]
    if recipe := sys.modules.get("dsx.train.recipe"):
        recipe.known_proof = stand_in.known_proof  # type: ignore[attr-defined]
        recipe.is_proved = stand_in.is_proved  # type: ignore[attr-defined]
    return fn(rank, world_size, *args)


def serve() -> None:
    """Start the process that ranks fork from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # for tests/preloaded.py
        start_server(_MODELS)


def _show(job: RankJob) -> None:
    if text := job.read_log():
        print(f"--- output of rank {job.rank} of {job.world_size}\n{text}", end="")
