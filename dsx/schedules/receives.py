"""When each receive of a lowered schedule is posted, so that no rank can wait in a circle.

A receive that is posted late leaves the transfer no computation to hide behind. One that is posted too early
is dangerous on a GPU: a posted NCCL transfer is a running kernel, and much that a program does there waits
for every running kernel (``torch.cuda.synchronize()``, freeing memory, loading a kernel at its first use,
making a communicator). If the message depends on what this rank has yet to do, such a wait never ends.

The rule: post a receive before the first computation that, with ideal timing, starts no earlier than the
message is sent. Give each computation the time of its start, each send the end of its producer. Then every
wait is for something earlier: a computation for the messages posted before it (sent no later than it starts);
whoever sends, at its next computation, for the receive to be posted (the receiver's computations before that
moment started before the message was sent). So there is no circle, whatever the real timing, even if each
computation waits for everything under way on its device, and each post for the message's header.

Where shapes vary, a receive needs the header first (:mod:`dsx.engine.p2p`). On an accelerator the post waits
for it, as above. On a CPU nothing waits for everything under way: the receive is posted when the header
comes, at the latest where the message is used, and no sender waits for that, because activations of varying
shape are sent without a limit of messages under way. Two waits remain: of a use for its message, which was
sent earlier, and of a gradient's sender for the receive, which is posted in time.

None of this binds a CPU, where a posted gloo receive holds nothing up: there the executor posts two messages
of each channel ahead once it knows their shapes, and falls back on this plan until then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from dsx.schedules.schedule import TRANSFERS, Action, Kind, Message, Op, Schedule, receive_order
from dsx.schedules.simulate import Timeline, simulate

Channel = tuple[Kind, int]
"""What is received ("F" activations, "B" gradients) and the pipeline rank that it comes from."""


@dataclass(frozen=True, slots=True)
class ReceivePlan:
    """When one rank posts its receives.

    Attributes:
        messages: Channel -> its messages, in the order in which they are sent and must be posted.
        posts: For each position of the rank's row, the channels whose next receive is posted before the
            action there, in the order in which the messages are sent.
    """

    messages: Mapping[Channel, tuple[Message, ...]]
    posts: tuple[tuple[Channel, ...], ...]


def receive_plan(schedule: Schedule, rank: int) -> ReceivePlan:
    """When ``rank`` posts the receives of a lowered schedule."""
    return next(islice(receive_plans(schedule), rank, None))


def receive_plans(schedule: Schedule) -> Iterator[ReceivePlan]:
    """:func:`receive_plan` of every rank, in order."""
    timeline = simulate(schedule)
    ends = {action: end for row in timeline.spans for action, _, end in row}
    for rank in range(schedule.num_ranks):
        yield _plan(schedule, rank, timeline, ends)


def _plan(schedule: Schedule, rank: int, timeline: Timeline, ends: Mapping[Action, float]) -> ReceivePlan:
    starts = {action: start for action, start, _ in timeline.spans[rank]}
    messages = {channel: receive_order(schedule, rank, *channel) for channel in _channels(schedule, rank)}
    sent = sorted(
        (min(ends[a] for a in _producers(channel, message) if a in ends), channel)
        for channel, found in messages.items()
        for message in found
    )
    posts: list[tuple[Channel, ...]] = [()] * len(schedule.rows[rank])
    done = 0
    for begin, action in _turns(schedule.rows[rank]):
        while done < len(sent) and sent[done][0] <= starts[action]:
            posts[begin] += (sent[done][1],)
            done += 1
    return ReceivePlan({channel: found for channel, found in messages.items() if found}, tuple(posts))


def _channels(schedule: Schedule, rank: int) -> Iterator[Channel]:
    """The channels that may end at ``rank``, in order of their sources."""
    own = [stage for stage in range(schedule.num_stages) if schedule.rank_of(stage) == rank]
    last = schedule.num_stages - 1
    before = {schedule.rank_of(stage - 1) for stage in own if stage}
    after = {schedule.rank_of(stage + 1) for stage in own if stage < last}
    for source in sorted(before | after):
        yield "F", source
        yield "B", source


def _producers(channel: Channel, message: Message) -> tuple[Action, ...]:
    """The computations that may produce a message; which one does depends on whether backwards are split."""
    stage, micro_batch = message
    if channel[0] == "F":
        return (Action(stage - 1, Op.FORWARD, micro_batch),)
    return tuple(Action(stage + 1, op, micro_batch) for op in (Op.BACKWARD, Op.BACKWARD_INPUT))


def _turns(row: tuple[Action, ...]) -> Iterator[tuple[int, Action]]:
    """Each computation of a row, with the position where its turn begins: its receives' first."""
    begin = 0
    for position, action in enumerate(row):
        if action.op in (Op.RECV_F, Op.RECV_B):
            continue
        if action.op not in TRANSFERS:
            yield begin, action
        begin = position + 1
