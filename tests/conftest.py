"""Makes ``tests/`` and ``tools/`` importable and keeps test runs offline and out of $HOME.

The only conftest.py: a second one and doctest's collection would be two modules of one name.
"""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from said import own_words

# The programs of tools/ import their parts from there, as when they run.
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

_home = pytest.StashKey[tempfile.TemporaryDirectory]()

# Before torch, huggingface_hub or wandb are imported: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", WANDB_SILENT="true"
)

# The same examples in every run; others with --hypothesis-profile=default.
hypothesis.settings.register_profile("dsx", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("dsx")


def pytest_configure(config: pytest.Config) -> None:
    home = tempfile.TemporaryDirectory(prefix="dsx-tests-", ignore_cleanup_errors=True)
    config.stash[_home] = home
    for name, folder in {
        "HF_HOME": "huggingface",
        "WANDB_CONFIG_DIR": "wandb",
        "WANDB_CACHE_DIR": "wandb",
    }.items():
        os.environ[name] = str(Path(home.name) / folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_home].cleanup()


# Tests that start whole runs; done first, so that no worker is left with them at the end.
LONG = ("recipes", "test_guides.py", "test_readme.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files of all folders take turns: tests that wait, as those of faults do, would stand together.
    turns: dict[Path, dict[Path, int]] = {}
    for item in items:
        turns.setdefault(item.path.parent, {}).setdefault(item.path, len(turns[item.path.parent]))
    items.sort(key=lambda each: (not {*each.path.parts} & {*LONG}, turns[each.path.parent][each.path]))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    if ranks := sys.modules.get("ranks"):  # before anybody starts it who would have it import less
        ranks.serve()
    stays()


def stays() -> None:
    """What is there by now stays: the many collections that engines and tests ask for need not walk it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _imported_and_cached() -> Iterator[None]:
    yield
    stays()


@pytest.fixture
def dsx(request, monkeypatch, capsys):
    """Run ``dsx``, the module's ``COMMAND`` if it has one, and arguments: (exit code, stdout, stderr)."""
    from dsx.cli.app import main

    command = getattr(request.module, "COMMAND", ())

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["dsx", *command, *map(str, arguments)])
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])  # which says what is loaded, from then on
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, own_words(err)

    return run
