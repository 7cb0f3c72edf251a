"""Where ``dsx.data`` points: files of this machine, or names of the Hugging Face hub."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsx.config.data import DataConfig
from dsx.config.wording import at
from dsx.errors import ConfigError

# Kinds of files: plain text, and what `datasets` reads by the builder of that name.
TEXTS: Final = frozenset({".txt", ".text", ".md", ".rst", ".py"})
TABLES: Final = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
STANDARD_LIBRARY: Final = "python-stdlib"
PATTERN: Final = re.compile(r"[*?\[]")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_hub_name(word: str, suffixes: frozenset[str] = TEXTS | TABLES.keys()) -> bool:
    """Whether a word that is no file here may be a name of the hub: no path, no pattern, no file's ending."""
    looks_local = word[0] in "./~" or Path(word).suffix in suffixes
    return not looks_local and _HUB_NAME.fullmatch(word) is not None


def missing(data: DataConfig) -> Iterator[ConfigError]:
    """Sources and a tokenizer that can be nowhere: not on this machine, and no names of the hub."""
    for index, part in enumerate(data.parts()):
        key = f"dsx.data.sources[{index}].source" if data.sources else "dsx.data.source"
        if part.source != STANDARD_LIBRARY and not _is_there(part.source) and not is_hub_name(part.source):
            what = f"there is no such file or folder (looked for {Path(part.source).expanduser().absolute()})"
            yield ConfigError(at(key, part.source), what, f'check the path, or use "{STANDARD_LIBRARY}"')
    name = data.tokenizer
    if name not in ("auto", "bytes") and not _is_there(name) and not is_hub_name(name, frozenset()):
        what = f"there is no such folder (looked for {Path(name).expanduser().absolute()})"
        fix = 'give a folder with tokenizer files, a name of the hub, or "bytes"'
        yield ConfigError(at("dsx.data.tokenizer", name), what, fix)


def _is_there(word: str) -> bool:
    try:
        path = Path(word).expanduser()
        # glob.glob rather than Path.glob: the pattern may be absolute.
        return path.exists() or bool(PATTERN.search(word) and glob.glob(str(path), recursive=True))  # noqa: PTH207
    except (OSError, RuntimeError, ValueError):  # a name too long, an unknown home, a zero byte
        return False
