"""What DeepSpeed compiles when it starts, said before it begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsx.launch.entry import local_rank
from dsx.launch.extension_locks import extension_locks, extensions_folder
from dsx.terminal import complain
from dsx.waiting import Waiting


@contextmanager
def builds_said(waiting: Waiting) -> Iterator[None]:
    """Within the block, what DeepSpeed compiles is said before it begins, a minute or two for each operator.

    The first rank of each machine names a lock for which it would wait without end.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    build = OpBuilder.jit_load

    def said(builder: Any, *given: Any, **named: Any) -> Any:
        folder, name = extensions_folder(), str(builder.name)
        for lock in extension_locks(folder) if local_rank() == 0 else ():
            if lock.path.parent.name == name and lock.builder is None:
                complain(f"warning: {lock.text()}")
        # It has been compiled: torch looks whether it is still up to date, in a second.
        if any(True for place in ("", "*/") for _ in folder.glob(f"{place}{name}/{name}.so")):
            return build(builder, *given, **named)
        with waiting.instead(f"compiling DeepSpeed's {name}, once on this machine, a minute or two"):
            return build(builder, *given, **named)

    OpBuilder.jit_load = said
    try:
        yield
    finally:
        OpBuilder.jit_load = build
