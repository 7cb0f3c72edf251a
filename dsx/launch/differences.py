"""What several machines must have in common before they train together, and which one differs. Pure data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from dsx.terminal import amount, seconds

MOST_CLOCK_SECONDS = 60.0
"""Clocks of synchronised machines are within a second; people cannot read logs that are minutes apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What one machine of a run has.

    Attributes:
        name: How messages name it, its ranks included.
        versions: Package -> version, Python's as major.minor.
        files: dsx's own files -> digest.
        config: Digest of the resolved config.
        clock: Seconds since the epoch, at the same moment on all machines to within a second or so.
        unseen: Folders in which this machine does not find what the first one wrote -> where they are here.
        free_bytes: Folder -> free space in it, where that could be asked.
    """

    name: str
    versions: Mapping[str, str]
    files: Mapping[str, str]
    config: str
    clock: float
    unseen: Mapping[str, str]
    free_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which a machine is not as it should be; a warning, unless it ``stops`` the run."""

    where: str
    what: str
    fix: str
    stops: bool = True


def differences(machines: Sequence[MachineFacts], *, checkpoint_bytes: int) -> Iterator[Difference]:
    """Every difference, those that end a run first.

    A machine is compared with the majority, or with the first machine, which is the one that writes, if
    no value has one.
    """
    first = machines[0]
    for folder in dict.fromkeys(name for machine in machines for name in machine.unseen):
        apart = [machine for machine in machines if folder in machine.unseen]
        yield Difference(
            _names(apart),
            f"{folder} there ({apart[0].unseen[folder]}) is not the folder that {first.name} writes to",
            "mount one file system on all machines, and name the same folder on it",
        )
    for package in dict.fromkeys(name for machine in machines for name in machine.versions):
        yield from _odd(
            machines,
            [machine.versions.get(package, "none") for machine in machines],
            package,
            f"install the same {package} on all machines",
        )
    common = set(first.files).intersection(*(machine.files for machine in machines))
    others = (name for name in sorted(common) if len({machine.files[name] for machine in machines}) > 1)
    for name in islice(others, 1):  # where a file is missing that is used, those that use it differ
        digests = [machine.files[name] for machine in machines]
        fix = "install the same dsx on all machines (a stale clone?)"
        yield from _odd(machines, digests, f"dsx/{name} with the digest", fix)
    yield from _odd(
        machines,
        [machine.config for machine in machines],
        "a config with the digest",
        "start every machine with the same config file and --set options (a stale copy?)",
    )
    usual = sorted(machine.clock for machine in machines)[(len(machines) - 1) // 2]
    for machine in machines:
        ahead = machine.clock - usual
        if abs(ahead) > MOST_CLOCK_SECONDS:
            said = f"its clock is {seconds(abs(ahead))} {'ahead' if ahead > 0 else 'behind'}"
            fix = "set it (chrony, ntpd): times in logs and reports would not fit together"
            yield Difference(machine.name, said, fix, stops=False)
    for machine in machines:
        yield from short_of_space(machine.name, machine.free_bytes, checkpoint_bytes)


def short_of_space(
    machine: str, free_bytes: Mapping[str, int], checkpoint_bytes: int
) -> Iterator[Difference]:
    """A warning for each folder in which a checkpoint has no room."""
    for folder, free in free_bytes.items():
        if free < checkpoint_bytes:
            said = f"{folder} has {amount(free)} left; a checkpoint takes about {amount(checkpoint_bytes)}"
            yield Difference(machine, said, "free space before it is due", stops=False)


def _odd(
    machines: Sequence[MachineFacts], values: Sequence[str], what: str, fix: str
) -> Iterator[Difference]:
    ((most, count), *_) = Counter(values).most_common(1)
    usual = most if 2 * count > len(values) else values[0]
    for value in dict.fromkeys(values):
        if value != usual:
            odd = [machine for machine, own in zip(machines, values, strict=True) if own == value]
            others = [machine for machine, own in zip(machines, values, strict=True) if own == usual]
            said = f"{'they have' if len(odd) > 1 else 'it has'} {what} {value}, {_names(others)} {usual}"
            yield Difference(_names(odd), said, fix)


def _names(machines: Sequence[MachineFacts]) -> str:
    """At most three by name."""
    names = [machine.name for machine in machines[:3]]
    more = f" and {len(machines) - 3} more" if len(machines) > 3 else ""
    return f"{', '.join(names)}{more}"
