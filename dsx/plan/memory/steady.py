"""How few micro-batches show a schedule's memory: in its steady state, more of them add nothing."""

from __future__ import annotations

from dsx.plan.program import Program


def enough_micro_batches(program: Program, num_ranks: int, num_micro_batches: int) -> int:
    """The least number of micro-batches known to need as much memory as ``num_micro_batches``.

    Found by trying (tests/plan/memory/test_steady.py repeats that): 1F1B and its kind hold most after p + 1,
    the others after 2 p or 3 p. Interleaved schedules go round in groups of p; a step that ends with a
    smaller group is another one for every number, and is left whole. GPipe holds all; a schedule from a file
    or with options is left as it is.

    Args:
        program: The schedule.
        num_ranks: Pipeline degree p.
        num_micro_batches: Of a step.
    """
    if program.rows is not None or program.options != type(program.options)():
        return num_micro_batches
    if program.name in ("1f1b", "zb_h1"):
        return min(num_micro_batches, num_ranks + 2)
    if program.name in ("zbv", "dualpipev"):
        return min(num_micro_batches, 3 * num_ranks)
    if program.name in ("interleaved", "interleaved_zb") and num_micro_batches % num_ranks == 0:
        return min(num_micro_batches, 3 * num_ranks)
    return num_micro_batches
