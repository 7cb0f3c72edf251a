"""DeepSpeed's universal checkpoints to be written, for stock engines that set ``load_universal``.

One made here loads at ZeRO 1, 2 and (written for it) 3, at any data-parallel degree; what DeepSpeed's loading
forgets (buffers, frozen parameters: engine.py:4660) lies in the model file, where :mod:`.universal` finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsx.checkpoint.catalog import Catalog
from dsx.checkpoint.formats.deepspeed_plan import StockLayout, StockPlan
from dsx.checkpoint.formats.deepspeed_scale import scaler
from dsx.checkpoint.formats.deepspeed_shares import Files, whole_share
from dsx.checkpoint.formats.deepspeed_target import (
    VERSION,
    clipping,
    group_settings,
    tag_of,
    write_model,
)
from dsx.checkpoint.formats.torch_target import Call, number
from dsx.checkpoint.formats.universal import COMMON, FOLDER, FORMAT, NUMBERS
from dsx.checkpoint.formats.unpickle import Global
from dsx.checkpoint.target import Target
from dsx.errors import CheckpointError

_INFO = {"universal_checkpoint_version": 0.4}  # deepspeed/checkpoint/constants.py


def target_of(source: Catalog, root: Path, layout: StockLayout) -> Target:
    """A universal checkpoint with everything that ``source`` has.

    Args:
        source: Under the names of the model that will load it.
        root: Folder to make.
        layout: The engine that will load it; of a pipeline only its names matter, and its data-parallel
            degree not at all.

    Raises:
        CheckpointError: As :func:`dsx.checkpoint.formats.deepspeed_target.target_of`; no ZeRO; a name that
            cannot be a folder's.
    """
    if layout.zero_stage == 0:
        raise CheckpointError(
            "zero = 0", "DeepSpeed loads universal checkpoints with ZeRO alone", "use ZeRO 1, 2 or 3"
        )
    plan = StockPlan.of(source, replace(layout, dp=1, bounds=(), tied=(), specs=()))
    padded = {spec.name for spec in layout.specs if spec.pad_multiple is not None}
    files = Files(root)
    files.begin(plan)
    for at, group in enumerate(plan.groups):
        for name in group:
            if "/" in name or name in ("", ".", ".."):
                raise CheckpointError(
                    f"{source.root}: tensor {name}", "its name cannot be a folder's", "rename it"
                )
            _write_parameter(plan, files, name, plan.moments[at], padded=name in padded)
    files.add(f"{FOLDER}/{COMMON}", _common(plan), [])
    write_model(plan, files, 0, {"universal_checkpoint_info": _INFO})
    target = tag_of(source, files, root, FORMAT)
    others = sorted({state for held in _other_numbers(plan).values() for state in held})
    note = f"DeepSpeed's universal loader does not take {', '.join(others)} of the optimizer; dsx does."
    return replace(target, dropped=(*target.dropped, *((note,) if others else ())))


def _write_parameter(
    plan: StockPlan, files: Files, name: str, moments: Sequence[str], *, padded: bool
) -> None:
    # DeepSpeed pads a vocabulary to what the loading model has (universal_checkpoint.py, VOCAB_TENSOR).
    more = {"vocab_tensor": True} if padded else {}
    for state in ("master", *moments):
        share = whole_share(plan, plan.blanks[name, state])
        stem = "fp32" if state == "master" else state
        files.add(f"{FOLDER}/{name}/{stem}.pt", {"cat_dim": 0, "param": share.hole, **more}, [share])
    if "step" in plan.numbers[name]:
        files.add(f"{FOLDER}/{name}/step.pt", number(plan.numbers[name]["step"]), [])


def _common(plan: StockPlan) -> dict[str, Any]:
    """What both forms of DeepSpeed's loading look for (base_optimizer.py:332, stage3.py:3653)."""
    step = next((held["step"] for held in plan.numbers.values() if "step" in held), None)
    settings = group_settings(plan, [[at] for at in range(len(plan.groups))])
    stage = Call(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (plan.layout.zero_stage,))
    state = {} if step is None else {0: {"step": number(step)}}
    more: dict[str, Any] = {}
    if plan.layout.zero_stage == 3:
        numbers = [
            [at for at, buffer in enumerate(plan.zero().buffers(0)) if buffer.group == group]
            for group in range(len(plan.groups))
        ]
        more = {"optimizer_state_dict": {"state": state, "param_groups": group_settings(plan, numbers)}}
    return {
        **scaler(plan),
        **clipping(plan),
        "zero_stage": stage,
        "ds_version": VERSION,
        "param_groups": settings,
        **more,
        **({NUMBERS: others} if (others := _other_numbers(plan)) else {}),
    }


def _other_numbers(plan: StockPlan) -> dict[str, dict[str, float]]:
    """What the universal format has no place for: DeepSpeed's loader ignores this key, dsx reads it."""
    every = {name: {s: one for s, one in held.items() if s != "step"} for name, held in plan.numbers.items()}
    return {name: held for name, held in every.items() if held}
