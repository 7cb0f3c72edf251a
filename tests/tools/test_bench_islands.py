"""The benchmark of islands: its links are as slow as they say, and islands send less over them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from islands_bench.links import ADDRESSES, Pace, connected, inside, missing  # noqa: E402
from islands_bench.speed import System  # noqa: E402

needs_namespaces = pytest.mark.skipif(bool(missing()), reason=f"this machine {missing()}")

TAKES = """
import socket, sys, time
with socket.create_server((sys.argv[1], 7000)) as listener:
    print("listens", flush=True)
    taken, _ = listener.accept()
    left = int(sys.argv[2])
    while left:
        left -= len(taken.recv(min(left, 1 << 16)))
    taken.sendall(b"!")
"""

GIVES = """
import socket, sys, time
began = time.perf_counter()
with socket.create_connection((sys.argv[1], 7000)) as link:
    connected = time.perf_counter() - began
    link.sendall(bytes(int(sys.argv[2])))
    assert link.recv(1) == b"!"
print(connected, time.perf_counter() - began)
"""


@needs_namespaces
@pytest.mark.parametrize("pace", [Pace(mbit=40), Pace(mbit=40, delay_ms=50)], ids=str)
def test_links_are_slow(pace):
    size = 1_000_000
    with connected(pace) as (one, other):
        python = [sys.executable, "-S", "-c"]
        takes = [*python, TAKES, ADDRESSES[1], str(size)]
        with subprocess.Popen(inside(other, "b", takes), stdout=subprocess.PIPE, text=True) as taker:
            assert taker.stdout is not None
            assert taker.stdout.readline() == "listens\n"
            gives = inside(one, "a", [*python, GIVES, ADDRESSES[1], str(size)])
            said = subprocess.run(gives, capture_output=True, text=True, check=True, timeout=60).stdout
        assert taker.returncode == 0
    connecting, all_of_it = map(float, said.split())
    # A connection is there after a round trip. The bucket is full at first: 128 KiB go at once.
    assert connecting >= 2 * pace.delay_ms / 1000
    assert all_of_it >= (size - 131072) * 8 / 40e6 + 2 * pace.delay_ms / 1000


@pytest.mark.slow
@needs_namespaces
def test_islands_send_less(tmp_path):
    """By more than `every`: each of two ranks sends half of gradients and weights, and in int8 a quarter."""
    file = tmp_path / "figures.json"
    command = [sys.executable, str(TOOLS / "bench_islands.py"), "links", "--size=tiny", f"--json={file}"]
    command += ["--sequence-length=16", "--steps=6", "--synchronous-steps=2", "--mbit=1000"]
    done = subprocess.run(
        [*command, "--systems", "dsx-zero1", "islands:every=3,wire=int8"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    synchronous, islands = json.loads(file.read_text())
    assert synchronous["bytes"] > 3.5 * 3 * islands["bytes"]
    assert islands["tokens_per_second"] > 0
    assert len(islands["rounds"]) == 2 + 1  # and the one that it waits for before the first step that counts
    # What the engine counts is what the kernel counts, but for headers and what islands tell each other.
    assert sum(its["sent_bytes"] for its in islands["rounds"][1:]) < 6 * islands["bytes"]
    assert str(System.of("islands:every=3,wire=int8")) in done.stdout


@pytest.mark.parametrize(
    ("system", "steps"),
    [("ddp:rank=4", (4, 6)), ("diloco:every=10", (10, 30)), ("islands:every=20,delay=5", (25, 40))],
)
def test_whole_rounds_are_measured(system, steps):
    assert System.of(system).steps(30, 6) == steps
