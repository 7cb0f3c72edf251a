"""How a process ends, whatever ends it: message, rank and exit code."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

import ranks
from dsx.launch import entry
from dsx.terminal import no_room


def ended(body: str, *, rank: int = 0) -> tuple[int, str, str]:
    """Exit code, output and errors of a process that runs ``body`` as its main function."""
    source = "import dsx\nfrom dsx.launch import entry\ndef main():\n" + textwrap.indent(body, "    ")
    done = subprocess.run(
        [sys.executable, "-c", f"{source}\ndsx.run(main)"],
        env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank % 8)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


ERROR = "error = dsx.DataError('my.jsonl', 'it is empty', 'name another')\n"


def test_a_good_end_and_what_main_returns():
    assert ended("print('done')") == (0, "done\n", "")
    assert ended("return 143") == (143, "", "")


def test_an_error_of_all_ranks_is_told_by_one():
    assert ended(ERROR + "raise error") == (2, "", "error: my.jsonl: it is empty. Fix: name another.\n")
    assert ended(ERROR + "raise error", rank=1) == (2, "", "")


def test_an_error_of_all_ranks_may_be_another_machines_alone():
    said = f"[rank 8 on {socket.gethostname()}] error: my.jsonl: it is empty. Fix: name another.\n"
    for note, heard in {"": said, "entry.ALONE": said, "entry.AGREED": ""}.items():
        body = f"{ERROR}{note and f'error.add_note({note})'}\nraise error"
        assert ended(body, rank=8) == (2, "", heard)


def test_anything_else_is_a_traceback_with_the_rank():
    code, out, err = ended("raise ValueError('seven')", rank=3)
    assert (code, out) == (1, "")
    assert err.startswith(f"[rank 3 on {socket.gethostname()}] Traceback")
    assert "ValueError: seven" in err


def test_ctrl_c_is_silent_and_ends_the_run_in_a_finalizer_as_well():
    assert ended("raise KeyboardInterrupt") == (130, "", "")
    body = (
        "import signal, threading, weakref\n"
        # Shells have background jobs ignore it, and all that these start.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Resource: pass\n"
        "held = Resource()\n"
        "weakref.finalize(held, signal.raise_signal, signal.SIGINT)\n"
        "del held\n"
        "threading.Event().wait()\n"
    )
    assert ended(body) == (130, "", "")


RUN = """
import dsx, sys
from dsx.train.progress import Progress
def main():
    progress = Progress()
    for step in range(3):
        progress.note(f"step {step}")
    sys.stderr.write("trained\\n")
dsx.run(main)
"""


def into_nothing(source: str, *, full: bool) -> tuple[int, str]:
    """Exit code and errors of a program whose output goes to a full disk, or to a pipe that nobody reads."""
    reader, out = (None, os.open("/dev/full", os.O_WRONLY)) if full else os.pipe()
    if reader is not None:
        os.close(reader)
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    os.close(out)
    return done.returncode, done.stderr


@pytest.mark.parametrize("full", [True, False])
def test_a_run_goes_on_without_its_lines(full):
    code, err = into_nothing(RUN, full=full)
    why = "No space left on device" if full else "Broken pipe"
    said = f"warning: standard output takes no more ({why}); the run goes on, with its figures in "
    assert (code, err) == (0, f"{said}metrics.jsonl alone\ntrained\n")
    leave = "dsx.terminal.complain('is lost', raw=True)\n    os._exit(3)"
    both = "import os\nos.dup2(1, 2)" + RUN.replace(r'sys.stderr.write("trained\n")', leave)
    assert into_nothing(both, full=full) == (3, "")  # errors go there as well, as where ssh breaks off


def test_a_full_disk_is_a_line_whoever_writes():
    writes = "open('/dev/full', 'w', buffering=1).write('a line\\n')"
    said = "error: No space left on device. Fix: make room on that disk.\n"
    place = f"[rank 3 on {socket.gethostname()}]"
    handled = f"try: {writes}\nexcept OSError as error: "
    for body in (writes, f"{handled}raise KeyError from error"):
        code, _, err = ended(body, rank=3)
        assert (code, err.startswith(f"{place} Traceback"), err.endswith(said)) == (2, True, True)
    for bug in ("{}['bug']", "raise KeyError('bug') from None"):
        code, _, err = ended(handled + bug)
        assert (code, "KeyError: 'bug'" in err, "make room" in err) == (1, True, False)
    line = f"{place} error: a/file: Disk quota exceeded. Fix: make room on that disk.\n"
    assert ended("raise OSError(122, 'Disk quota exceeded', 'a/file')", rank=3) == (2, "\n", line)
    with pytest.raises(RuntimeError) as lost:
        torch.save(torch.zeros(1 << 20), "/dev/full")
    streams = RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    for error in (lost.value, streams, RuntimeError("I/O error: (os error 122)")):
        assert "Fix: make room" in no_room(error)
    rust = "from tokenizers import Tokenizer, models\nTokenizer(models.BPE()).save('/dev/full')"
    assert ended(rust)[2].endswith(said)


@pytest.mark.parametrize("times", [1, 100_000])
def test_a_program_whose_output_is_lost_ends_with_a_line_or_in_silence(times):
    """Found when it is written, or at the end."""
    source = f"import dsx\ndsx.run(lambda: print('Once' * {times}))"
    line = "error: standard output: No space left on device. Fix: make room, or send it elsewhere.\n"
    assert into_nothing(source, full=True) == (2, line)
    assert into_nothing(source, full=False) == (141, "")


def test_an_error_with_a_line_that_nobody_reads_is_told_and_ends_at_once():
    source = (
        "import dsx, sys\n"
        "sys.stdout.reconfigure(write_through=False, line_buffering=False)\n"
        "def main():\n"
        "    print('a line')\n"
        "    raise dsx.DsxError('a', 'b', 'c')\n"
        "dsx.run(main)"
    )
    assert into_nothing(source, full=False) == (2, "error: a: b. Fix: c.\n")


def lose_a_peer(rank: int, world_size: int) -> str:
    """What rank 0 hears when rank 1 leaves a collective."""
    said = ""
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            said = str(error)
    dist.destroy_process_group()
    return said


def test_a_lost_peer_is_recognised():
    """By gloo's own words: the message of the rank that ended is the one to show."""
    said, _ = ranks.run(lose_a_peer, 2)
    assert entry._PEER_GONE.search(said), said


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.3]:1769: "
LOST = (
    GLOO + "Connection reset by peer. This is typically caused by a remote worker hanging",
    GLOO + "Connection timed out",
    GLOO + "No route to host",
    "recvValue failed on SocketImpl(fd=5): Connection was likely closed. Did the remote server crash?",
    "NCCL error: remote process exited or there was a network error\nncclRemoteError: A call failed possibly",
)


@pytest.mark.parametrize("message", LOST)
def test_a_broken_connection_is_one_line(message):
    """Outside of a Guard, where nobody knows more."""
    code, out, err = ended(f"entry._SPEAKER_SECONDS = 0\nraise RuntimeError({message!r})", rank=3)
    assert (code, out) == (1, "")
    place = f"[rank 3 on {socket.gethostname()}] ended because its connection to another rank broke at "
    line = rf"{re.escape(place)}[\d:]{{8}}: {re.escape(message.splitlines()[0])}\n"
    assert re.fullmatch(line, err), err


OTHERS = (
    "",
    "gloo/transport/tcp/pair.cc: Timed out waiting 1800000ms",
    "[enforce fail at gloo/transport/tcp/pair.cc:454] op.preamble.length <= op.nbytes. 8 vs 4",
    "https://host/api: Connection reset by peer",
)


def test_other_errors_are_not_a_lost_peer():
    assert not [message for message in OTHERS if entry._PEER_GONE.search(message)]
