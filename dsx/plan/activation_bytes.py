"""Most bytes of activations alive at once, from measured bytes per stage and a schedule's rows."""

from __future__ import annotations

from dsx.plan.profile import StageCosts
from dsx.spec.schedule import Op, Schedule


def peak_bytes(schedule: Schedule, stages: StageCosts) -> tuple[int, ...]:
    """Per rank, the most that its activations take, of all of its virtual stages together.

    A forward keeps its stage's ``kept_bytes``, a whole backward frees them. The first part of a divided one
    leaves ``pending_bytes`` until the second. While a backward recomputes, its ``working_bytes`` come on top.
    (Transfer buffers, a few boundary tensors, are not counted.)
    """
    kept, pending, working = stages.kept_bytes, stages.pending_bytes, stages.working_bytes
    peaks = []
    for row in schedule.rows:
        live = peak = 0
        for action in row:
            stage = action.stage
            match action.op:
                case Op.FORWARD:
                    live += kept[stage]
                case Op.BACKWARD:
                    peak = max(peak, live + working[stage])
                    live -= kept[stage]
                case Op.BACKWARD_INPUT:
                    peak = max(peak, live + working[stage])
                    live += pending[stage] - kept[stage]
                case Op.BACKWARD_WEIGHT:
                    live -= pending[stage]
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)
