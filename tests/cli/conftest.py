"""The ``dsx`` command, run in this process."""

from __future__ import annotations

import sys

import pytest

from dsx.cli.app import main


@pytest.fixture
def dsx(request, monkeypatch, capsys):
    """Run ``dsx``, the module's ``COMMAND`` if it has one, and arguments: (exit code, stdout, stderr)."""
    command = getattr(request.module, "COMMAND", ())

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["dsx", *command, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run
