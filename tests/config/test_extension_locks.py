"""Locks of extension builds, and the processes that hold them."""

from __future__ import annotations

import os

import pytest

from dsx.launch.extension_locks import extension_locks


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "extensions/py311_cpu/cpu_adam/lock"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_the_process_that_has_it_open(lock):
    with lock.open():
        (found,) = extension_locks(lock.parents[2])
        assert (found.path, found.builder) == (lock, os.getpid())
    (found,) = extension_locks(lock.parents[2])
    assert found.builder is None


def test_a_process_that_ends_while_it_is_looked_at(lock, monkeypatch):
    """Others start and end all the time: between its folder's being seen and read it is gone."""
    gone = f"/proc/{os.getppid()}/fd"

    def without(real):
        def listed(path="."):
            if os.fspath(path) == gone:
                raise FileNotFoundError(path)
            return real(path)

        return listed

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, without(getattr(os, name)))
    with lock.open():
        (found,) = extension_locks(lock.parents[2])
        assert found.builder == os.getpid()
