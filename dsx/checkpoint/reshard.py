"""Any checkpoint into any other: a source, a target's format and layout, a plan. ``dsx reshard`` is this."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsx.checkpoint.catalog import Catalog, check_files
from dsx.checkpoint.copy_plan import CopyPlan, plan
from dsx.checkpoint.execute import Options, Report, execute, worker_bytes
from dsx.checkpoint.formats import dsx_native
from dsx.checkpoint.staging import check_absent
from dsx.checkpoint.target import Target
from dsx.errors import CheckpointError
from dsx.spec.layout import Layout

TargetFormat = Literal["dsx", "deepspeed", "universal", "hf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion that was thought through and can be done.

    Attributes:
        source: What there is.
        target: What is to be made.
        layout: Of the target's ranks; None for a format that has none.
        plan: What goes where.
    """

    source: Catalog
    target: Target
    layout: Layout | None
    plan: CopyPlan

    def run(self, options: Options) -> Report:
        """Do it. Raises CheckpointError; the target exists whole or not at all."""
        return execute(self.source, self.target, self.plan, options)

    def outline(self, options: Options) -> dict[str, Any]:
        """What it will take, as JSON values."""
        folder = self.target.catalog.root.absolute().parent
        while not folder.exists():
            folder = folder.parent
        entries = self.target.catalog.entries
        return {
            "source": {"path": str(self.source.root), "format": self.source.format},
            "target": {
                "path": str(self.target.catalog.root),
                "format": self.target.catalog.format,
                "layout": None if self.layout is None else layout_facts(self.layout),
            },
            "tensors": len({entry.name for entry in entries}),
            "states": sorted({entry.state for entry in entries}),
            "read_bytes": self.plan.read_bytes,
            "write_bytes": sum(skeleton.num_bytes for skeleton in self.target.skeletons),
            "files": len(self.target.skeletons),
            "free_bytes": shutil.disk_usage(folder).free,
            "memory_bytes": min(options.memory_bytes, options.workers * worker_bytes(self.plan)),
            "notes": [*self.plan.notes, *self.target.dropped],
        }


def prepare(
    source: Catalog,
    target: Path,
    *,
    to: TargetFormat,
    layout: Layout | None,
    precision: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Conversion:
    """Everything that can be known before a byte is written.

    Args:
        source: The checkpoint to convert.
        target: The folder to make; must not exist.
        to: Its format.
        layout: Its ranks; not for ``hf``.
        precision: Of its weights, ``fp32``, ``bf16`` or ``fp16``; the source's by default.
        facts: Replace the source's.

    Raises:
        CheckpointError: The target exists, the source is incomplete, or one does not fit the other.
    """
    check_absent(target)
    check_files(source)
    wanted = _target(source, target, to, layout, precision, dict(facts or {}))
    return Conversion(source=source, target=wanted, layout=layout, plan=plan(source, wanted.catalog))


def layout_facts(layout: Layout) -> dict[str, Any]:
    """A layout in the words of a manifest."""
    return {
        **dict(layout.mesh.axes),
        "chunks": layout.stages.num_chunks,
        "placement": layout.stages.placement,
        "stage_bounds": list(layout.stages.bounds),
        "zero_stage": layout.zero_stage,
    }


def _target(
    source: Catalog,
    root: Path,
    to: TargetFormat,
    layout: Layout | None,
    precision: str | None,
    facts: Mapping[str, Any],
) -> Target:
    if to == "dsx":
        assert layout is not None
        return dsx_native.target_of(source, root, layout, precision=precision, facts=facts)
    raise CheckpointError(f"--to {to}", "this version does not write that format", "write dsx")
