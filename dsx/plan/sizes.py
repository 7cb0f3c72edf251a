"""Checks of the numbers that every schedule builder takes."""

from __future__ import annotations

from dsx.errors import ScheduleError


def check_numbers(name: str, num_ranks: int, num_chunks: int, num_micro_batches: int) -> None:
    """Raise ScheduleError unless all are at least 1."""
    numbers = {"pipeline ranks": num_ranks, "chunks": num_chunks, "micro-batches": num_micro_batches}
    for what, number in numbers.items():
        if number < 1:
            raise ScheduleError(
                f"schedule {name}, {what} = {number}", "it must be at least 1", "use 1 or more"
            )


def check_one_chunk(name: str, num_ranks: int, num_chunks: int) -> None:
    """Raise ScheduleError for several chunks on several ranks."""
    if num_chunks > 1 and num_ranks > 1:
        raise ScheduleError(
            f"schedule {name}, chunks = {num_chunks}",
            f"{name} runs one chunk per rank on {num_ranks} pipeline ranks",
            "use 1 chunk, or schedule interleaved or interleaved_zb",
        )


def check_two_chunks(name: str, num_chunks: int) -> None:
    """Raise ScheduleError for a number of chunks other than 2."""
    if num_chunks != 2:
        raise ScheduleError(
            f"schedule {name}, chunks = {num_chunks}",
            f"{name} folds the stages once, into two chunks per rank",
            "use 2 chunks, or schedule interleaved_zb",
        )
