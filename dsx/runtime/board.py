"""A folder below the run's output in which the ranks of a run that hangs leave what they know."""

from __future__ import annotations

import faulthandler
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


class Board:
    """The folder that ranks tell each other through. What cannot be written or read is passed over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> frozenset[str]:
        """What has been put up. Lists the folder, which network file systems then ask for anew."""
        with suppress(OSError):
            return frozenset(entry.name for entry in os.scandir(self.folder) if entry.name[0] != ".")
        return frozenset()

    def put(self, name: str, data: Any) -> None:
        """Put up a JSON value, at once whole."""
        self.put_text(name, json.dumps(data))

    def put_text(self, name: str, text: str) -> None:
        """Put up a text, at once whole."""
        aside = self.folder / f".{name}.{os.getpid()}"
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            aside.write_text(text)
            aside.replace(self.folder / name)

    def get(self, name: str) -> Any:
        """A JSON value; None if it cannot be read."""
        with suppress(OSError, ValueError):
            return json.loads((self.folder / name).read_text())
        return None

    def text(self, name: str) -> str:
        """A text; empty if it cannot be read."""
        with suppress(OSError):
            return (self.folder / name).read_text(errors="replace")
        return ""

    def put_stacks(self, name: str) -> None:
        """Put up the stacks of all threads of this process."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / name).open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
