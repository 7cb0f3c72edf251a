"""Islands with a launcher each, as real processes of the real recipe, which a test kills, stops, cuts off.

with archipelago.started(tmp_path, islands=3) as sea:
    sea.let(10)                       # nobody begins step 11 before it is allowed
    sea.start_all()
    sea.wait_for_step(10, [0, 1, 2])
    sea.kill(1)
    sea.let(None)
    sea.end()

A process forks from the server of tests/ranks.py, so that it starts without its seconds of imports, and is
then what ``python recipes/gpt_3d.py`` is. Around every step it writes down what its outer state is.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machines
import ranks as harness
from dsx.islands.links import write_keys
from dsx.launch.local_ranks import environment

RECIPE = Path(__file__).parents[2] / "recipes" / "gpt_3d.py"
PATIENCE_SECONDS = 4.0
_DEADLINE_SECONDS = 400.0
_LOOK_SECONDS = 0.02
_TIRED_SECONDS = PATIENCE_SECONDS / 6
_CLONE_NEWNET = 0x40000000

MODEL = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


def config_of(
    folder: Path, islands: int, meet: str, *, steps: int, every: int, **outer: Any
) -> dict[str, Any]:
    """A model for which a step takes milliseconds, on text that comes with Python."""
    warmup = {"warmup_num_steps": 5, "warmup_max_lr": 0.01, "warmup_min_lr": 0.0}
    return {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_optimization": {"stage": 1},
        "dsx": {
            "model": {"config": MODEL},
            "parallel": {"tensor": 1, "pipeline": 1},
            "data": {
                "source": "python-stdlib", "tokenizer": "bytes", "sequence_length": 32, "max_bytes": 200_000,
                "held_out": 0.1,
            },
            "train": {
                "steps": steps, "output": str(folder / "out"), "save_every": 10, "eval_every": 20,
                "eval_tokens": 4096,
            },
            "tracking": {"wandb": {"mode": "disabled"}},
            "memory_check": "off",
            "proof": "off",  # islands that start late have no time for it
            "outer": {
                "islands": islands, "every": every, "meet": meet,
                "optimizer": {"lr": 0.7, "momentum": 0.5},  # 0.9 is for runs of more than twelve rounds
                "patience_seconds": PATIENCE_SECONDS, **outer,
            },
        },
    }  # fmt: skip


def reserved_port(stack: ExitStack) -> int:
    """A port that nobody has, nor gets until the end of the stack, but for who asks for it by its number.

    A socket that is bound and does not listen keeps the kernel from giving the port to connections, and
    others that have SO_REUSEADDR set, as listening ones have, from nothing.
    """
    holder = stack.enter_context(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return int(holder.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Entry:
    """What a rank wrote down after a step, or once it had followed the others to theirs.

    Attributes:
        step: Number of the last step.
        name: Of the common state.
        version: Rounds in it.
        state: Digest of this rank's common weights and outer momentum.
        members: Islands of the round that ended in this step; empty if none did, or not with this island.
    """

    step: int
    name: str
    version: int
    state: str
    members: list[int]


@dataclass
class _Island:
    processes: list[Any]
    life: int


@dataclass
class Sea:
    """Islands of one run.

    Attributes:
        folder: Where everything lies.
        content: The config of all of them.
        ranks: Ranks of each.
        hub: Network namespace of the bridge to which islands are cabled; empty if all are on this machine.
        spaces: Network namespaces by island; empty as well.
        figures: Seconds that things took, by what.
    """

    folder: Path
    content: dict[str, Any]
    ranks: int = 1
    hub: str = ""
    spaces: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    _islands: dict[int, _Island] = field(default_factory=dict)
    _lives: dict[int, int] = field(default_factory=dict)
    _all: list[Any] = field(default_factory=list)
    _ports: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + _DEADLINE_SECONDS

    @property
    def count(self) -> int:
        """How many islands there are."""
        return int(self.content["dsx"]["outer"]["islands"])

    def let(self, step: int | None, islands: Sequence[int] | None = None) -> None:
        """Let islands (all by default) take steps up to number ``step``; None lets them go to the end."""
        for island in range(self.count) if islands is None else islands:
            part = self.folder / f".go{island}"
            part.write_text(str(10**9 if step is None else step))
            part.rename(self.folder / f"go{island}")

    def tire(self, island: int) -> None:
        """Let an island's steps take so long that, of five, the others have to ask for those it has."""
        (self.folder / f"tired{island}").touch()

    def rest(self, island: int) -> None:
        """Let it be as fast as before."""
        (self.folder / f"tired{island}").unlink()

    def start(self, island: int) -> None:
        """Start an island, or start it again."""
        life = self._lives[island] = self._lives.get(island, -1) + 1
        context = multiprocessing.get_context("forkserver")
        harness.serve()
        port = reserved_port(self._ports)
        processes = []
        for rank in range(self.ranks):
            space = self.spaces[island] if self.spaces else None
            job = _Job(self.folder, island, life, rank, self.ranks, port, space)
            processes.append(context.Process(target=_main, args=(job, self.content)))
            processes[-1].start()
        self._islands[island] = _Island(processes, life)
        self._all += processes

    def start_all(self) -> None:
        """Start every island."""
        for island in range(self.count):
            self.start(island)

    def signal(self, number: int, island: int, rank: int | None = None) -> None:
        """Send one rank of an island a signal, or all."""
        its = self._islands[island].processes
        for process in its if rank is None else [its[rank]]:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill(self, island: int) -> None:
        """kill -9, all ranks."""
        self.signal(signal.SIGKILL, island)
        for process in self._islands[island].processes:
            process.join()

    def wait_for_step(self, step: int, islands: Sequence[int]) -> None:
        """Until every rank of these islands has taken step number ``step`` or a later one, in this life."""
        self.wait_until(lambda: all(self.reached(island) >= step for island in islands))

    def wait_for_start(self, island: int) -> None:
        """Until an island is about to take its first step of this life."""
        life = self._lives[island]
        paths = [self.folder / f"up{island}-{life}-{rank}" for rank in range(self.ranks)]
        self.wait_until(lambda: all(path.exists() for path in paths))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until something is so."""
        while not condition():
            assert time.monotonic() < self._deadline, self.said()
            for island, its in self._islands.items():
                codes = [process.exitcode for process in its.processes]
                assert not any(code and code > 0 for code in codes), (
                    f"island {island}: {codes}\n{self.said()}"
                )
            time.sleep(_LOOK_SECONDS)

    def reached(self, island: int) -> int:
        """The last step that every rank of an island has taken in this life; 0 for none."""
        life = self._lives[island]
        taken = [self.entries(island, rank, life) for rank in range(self.ranks)]
        return min((its[-1].step if its else 0) for its in taken)

    def entries(self, island: int, rank: int, life: int) -> list[Entry]:
        """What a rank has written down in one of its lives."""
        path = self.folder / f"steps{island}-{life}-{rank}"
        if not path.exists():
            return []
        return [Entry(**json.loads(line)) for line in path.read_text().splitlines(True) if line[-1] == "\n"]

    def end(self, islands: Sequence[int] | None = None) -> dict[int, list[int]]:
        """Wait for the end of islands (all by default): exit codes of their ranks."""
        found = {}
        for island in sorted(self._islands) if islands is None else islands:
            for process in self._islands[island].processes:
                process.join(max(0.0, self._deadline - time.monotonic()))
                assert process.exitcode is not None, f"island {island} does not end\n{self.said()}"
            found[island] = [process.exitcode for process in self._islands[island].processes]
        return found

    def lives(self, island: int) -> int:
        """How often an island has been started."""
        return self._lives.get(island, -1) + 1

    def held_out_losses(self, island: int) -> dict[int, float]:
        """Of all of its lives, nats per token, by step."""
        path = self.folder / "out" / f"island{island}" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {m["train/step"]: m["eval/loss"] for m in map(json.loads, lines) if "eval/loss" in m}

    def forget(self, island: int) -> None:
        """Take away all that an island has saved."""
        shutil.rmtree(self.folder / "out" / f"island{island}")

    def left(self) -> list[int]:
        """Processes of any island that are still there, their children included."""
        found = []
        for process in self._all:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 0)
                found.append(process.pid)
        return found

    def states(self) -> dict[tuple[int, str], set[str]]:
        """Digests of states by rank and name: of one name there must be one."""
        found: dict[tuple[int, str], set[str]] = {}
        for island, lives in self._lives.items():
            for life in range(lives + 1):
                for rank in range(self.ranks):
                    for entry in self.entries(island, rank, life):
                        found.setdefault((rank, entry.name), set()).add(entry.state)
        return found

    def said(self) -> str:
        """What all of them have printed, the last of it, and where they stand."""
        consoles = sorted(self.folder.glob("console*"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in consoles)

    def close(self) -> None:
        """Kill what is left."""
        self._ports.close()
        for process in self._all:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join()

    def cut(self, island: int) -> None:
        """Pull an island's cable: nothing comes and nothing is refused. Islands have namespaces."""
        machines.cut(self.hub, _name(island))

    def mend(self, island: int) -> None:
        """Put it back."""
        machines.mend(self.hub, _name(island))

    def slow(self, island: int, kbit: int) -> None:
        """Let no more than so many thousand bits leave an island in a second."""
        machines.limit(self.spaces[island], kbit)


def _name(island: int) -> str:
    return f"sea{island}"


@contextmanager
def started(
    folder: Path,
    *,
    islands: int,
    ranks: int = 1,
    steps: int = 40,
    every: int = 5,
    seed: int = 5,
    network: bool = False,
    change: Callable[[dict[str, Any]], None] = lambda content: None,
    **outer: Any,
) -> Iterator[Sea]:
    """Islands that are yet to be started; what is left of them in the end is killed.

    Args:
        folder: For all that they write.
        islands: How many.
        ranks: Of each.
        steps: Number of the last step.
        every: Steps between rounds.
        seed: Draws the weights and the order of the data.
        network: Whether each is to have a network namespace of its own, with a cable; needs root.
        change: Changes the config.
        outer: Further keys of ``dsx.outer``.
    """
    with ExitStack() as stack:
        hub, spaces = "", []
        if network:
            hub = stack.enter_context(machines.bridge())
            addresses = [f"10.78.0.{island + 1}" for island in range(islands)]
            for island, address in enumerate(addresses):
                spaces.append(stack.enter_context(machines.cabled(hub, _name(island), address)))
            meet = f"{addresses[0]}:29700"
            write_keys(folder / "keys", islands)
            outer["keys"] = str(folder / "keys")
        else:
            meet = f"127.0.0.1:{reserved_port(stack)}"
        content = config_of(folder, islands, meet, steps=steps, every=every, **outer)
        content["dsx"]["train"]["seed"] = seed
        content["train_micro_batch_size_per_gpu"] = 8 // ranks
        change(content)
        sea = Sea(folder, content, ranks, hub, spaces)
        stack.callback(sea.close)
        sea.let(None)
        yield sea


@dataclass(frozen=True)
class _Job:
    folder: Path
    island: int
    life: int
    rank: int
    ranks: int
    port: int
    space: str | None

    def file(self, kind: str) -> Path:
        return self.folder / f"{kind}{self.island}-{self.life}-{self.rank}"


def _main(job: _Job, content: dict[str, Any]) -> None:
    """What ``python recipes/gpt_3d.py config.json --set dsx.outer.island=...`` does."""
    os.setsid()
    console = job.file("console").open("w")
    os.dup2(console.fileno(), 1)
    os.dup2(console.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if job.space is not None:
        _enter(job.space)
    os.environ.clear()
    os.environ.update(environment())
    if job.ranks > 1:  # as torchrun sets them
        os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(job.rank)))
        os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job.ranks)))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port), GLOO_SOCKET_IFNAME="lo")
    import torch

    import dsx
    from dsx.engine.engine import PipelineEngine
    from recipes.launching import recipe

    torch.set_num_threads(1)
    config = job.file("config").with_suffix(".json")
    config.write_text(json.dumps(content))
    sys.argv = [str(RECIPE), str(config), "--set", f"dsx.outer.island={job.island}"]
    PipelineEngine.train_batch = _watched(PipelineEngine.train_batch, job)  # type: ignore[method-assign]
    dsx.run(recipe("gpt_3d").main)


def _watched(step: Callable[..., Any], job: _Job) -> Callable[..., Any]:
    log = job.file("steps").open("w")

    written = -1

    def write(engine: Any) -> None:
        nonlocal written
        outer, written = engine.outer, int(engine.global_steps)
        digest = hashlib.sha256()
        for share in range(len(outer.state.ranges)):
            for piece in (*outer.state.weights(share), *outer.state.momentum(share)):
                digest.update(piece.numpy().tobytes())
        entry = {
            "step": written, "name": outer.standing.name, "version": outer.standing.version,
            "state": digest.hexdigest(), "members": outer.reports[-1].islands if outer.reports else (),
        }  # fmt: skip
        log.write(json.dumps(entry) + "\n")
        log.flush()
        while outer.news:
            sys.stdout.write(f"news after step {written}: {outer.news.pop(0)}\n")

    def train_batch(engine: Any, *args: Any) -> Any:
        if int(engine.global_steps) != written:  # it has followed the others, who are ahead
            write(engine)
        job.file("up").touch()
        while int((job.folder / f"go{job.island}").read_text()) <= engine.global_steps:
            time.sleep(_LOOK_SECONDS)
        if (job.folder / f"tired{job.island}").exists():
            time.sleep(_TIRED_SECONDS)
        result = step(engine, *args)
        write(engine)
        return result

    return train_batch


def _enter(space: str) -> None:
    """Make a network namespace that of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{space}", os.O_RDONLY)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {space}")
    os.close(descriptor)
