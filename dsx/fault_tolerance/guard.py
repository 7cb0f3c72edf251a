"""What protects a run: from peers that fail, hangs, signals, and figures or weights gone wrong."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import nn

from dsx.checkpoint import store
from dsx.checkpoint.run.names import Names
from dsx.config.run import RunConfig
from dsx.config.schema import Policy
from dsx.engine.engine import PipelineEngine
from dsx.engine.ready_layers import checksum
from dsx.errors import DsxError, RunError
from dsx.fault_tolerance.health import Health, StepFinding
from dsx.fault_tolerance.keepalive import Keepalive, Peer, hosts_of
from dsx.fault_tolerance.waits import located, named
from dsx.fault_tolerance.watch import INTERRUPTED, Board, Watch
from dsx.launch.entry import AGREED, lost_a_peer
from dsx.launch.preflight import check_machines
from dsx.launch.processes import agree
from dsx.parallel.groups import Groups
from dsx.train.run_folder import RunLock, standing

_WITHIN_STEP = ("skip", "roll_back")
"""Policies for which a step must be judged before it is applied."""

_STATE = "guard"

_NEWS_SECONDS = 2.0
"""The longest that news of a lost rank takes, once its machine is known to be silent."""


class Reports(Protocol):
    """Who tells people what a guard has done; :class:`dsx.train.monitor.Monitor` does."""

    def warn(self, text: str) -> None:
        """Say something that the user should know."""

    def went_back(self) -> None:
        """The engine has loaded an older checkpoint."""


class Guard:
    """Follows ``dsx.faults``. Every rank makes one, enters it, and calls it alike.

    While it is entered, a peer that fails or dies ends this process within seconds, a run that hangs ends
    with a report, a signal to any rank becomes a wish to stop that all ranks agree on, and no other run can
    work in the same output folder.
    """

    def __init__(self, config: RunConfig, groups: Groups) -> None:
        self._config, self._groups, self._faults = config, groups, config.dsx.faults
        keepalive = Keepalive(groups.rank, self._faults.silent_seconds)
        told: list[tuple[Peer, str]] = [(keepalive.peer, "")] * groups.mesh.size
        dist.all_gather_object(told, (keepalive.peer, f"{int(time.time())}-{os.getpid()}"))
        self._board = Board(config.output / "faults" / told[0][1])
        peers = [peer for peer, _ in told]
        unmet = keepalive.meet(peers)
        self._watch = Watch(self._faults, self._board, peers, groups.rank, threading.get_ident(), keepalive)
        if unmet:
            hosts = hosts_of(peers)
            keepalive.warn(
                f"{located([groups.rank], hosts)} cannot be connected with {located(unmet, hosts)}, though "
                "training can: is a firewall between them? Their loss would be noticed late"
            )
        self._peers = peers
        self._engine: PipelineEngine | None = None
        self._health = Health(window=self._faults.spike_window, sigmas=self._faults.spike_sigmas)
        kinds = ("nonfinite", "loss_spike", "grad_norm_spike")
        self._policies: dict[str, Policy] = {kind: getattr(self._faults, kind) for kind in kinds}
        wanted = (kind for kind in kinds[1:] if self._policies[kind] != "off")
        self._spikes = frozenset(kind.removesuffix("_spike") for kind in wanted)
        self._judged: tuple[StepFinding | None] | None = None
        self._ahead_samples = self._skips = self._roll_backs = 0
        self._agreed = False
        self._lock: RunLock | None = None

    def __enter__(self) -> Self:
        """Collective. Raises RunError if machines differ, or another run is at work in the output folder."""
        check_machines(self._config, self._peers, self._groups.rank)
        agree(self._lock_output)
        self._watch.start()
        return self

    def _lock_output(self) -> None:
        self._lock = RunLock(self._config.output)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            dist.barrier()
            self._watch.close()
            self._unlock()
            if self._groups.rank == 0:
                for folder in (self._board.folder, self._board.folder.parent):
                    with suppress(OSError):  # absent, as ever, or with something in it
                        folder.rmdir()
            return
        at = time.time()
        if lost_a_peer(error):
            # The watch soon learns which rank it was, and ends this process.
            self._watch.give_way("", at=at, seconds=self._faults.silent_seconds + _NEWS_SECONDS)
            self._watch.end_disconnected(error, at=at)
        if isinstance(error, KeyboardInterrupt):
            self._watch.interrupted()
            self._watch.failed("was interrupted (Ctrl-C)", code=INTERRUPTED, shared=False, at=at)
        if isinstance(error, Exception):
            expected, shared = isinstance(error, DsxError), AGREED in getattr(error, "__notes__", ())
            text = f"failed: {error if expected else f'{type(error).__name__}: {error}'}"
            if not shared:
                self._watch.give_way(text, at=at)
            self._watch.failed(text, code=2 if expected else 1, shared=shared, at=at)
        self._watch.close()
        self._unlock()

    def follow(self, engine: PipelineEngine, state: Mapping[str, Any]) -> None:
        """Guard the steps of ``engine``.

        ``state`` is the ``client_state`` of the checkpoint from which ``engine`` has been resumed, or empty.
        """
        self._engine = engine
        groups = self._groups
        speaks = groups.rank == 0
        self._watch.follow(
            engine.rank_progress, groups.pp_rank, groups.pipe_peer, self._stands if speaks else None
        )
        engine.step_control.stop_wanted = lambda: self._watch.signal is not None
        if any(policy in _WITHIN_STEP for policy in self._policies.values()):
            engine.step_control.refuses = self._refuses
        samples = int(engine.global_samples)
        self._ahead_samples = int(state.get("data_cursor", samples)) - samples
        mine = state.get(_STATE, {})
        self._skips, self._roll_backs = int(mine.get("skips", 0)), int(mine.get("roll_backs", 0))
        self._health.restore(mine.get("health", {}))

    def _stands(self) -> str:
        assert self._engine is not None, "called with an engine"
        return standing(self._config, int(self._engine.global_steps))

    @property
    def data_cursor(self) -> int:
        """Global sample that the next step begins with; after a roll-back, more than were trained on."""
        assert self._engine is not None, "call follow first"
        return int(self._engine.global_samples) + self._ahead_samples

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed run needs to continue exactly as this one, for the checkpoint's ``client_state``."""
        mine = {"skips": self._skips, "roll_backs": self._roll_backs, "health": self._health.state}
        return {"data_cursor": self.data_cursor, _STATE: mine}

    @property
    def must_stop(self) -> bool:
        """Whether a signal to any rank by the last step's end asked the run to stop. Alike on every rank."""
        assert self._engine is not None, "call follow first"
        self._agreed = self._agreed or self._engine.step_control.stop_agreed
        return self._agreed

    @property
    def exit_code(self) -> int:
        """What the process should end with: 0, or 128 + the signal that stopped the run (143 for SIGTERM)."""
        return 128 + (self._watch.signal or 15) if self._agreed else 0

    def rolled_back(self, monitor: Reports) -> bool:
        """Look at the step that has just ended and do what ``dsx.faults`` says. A collective call.

        Returns:
            Whether an older checkpoint has been loaded: the data then continues at :attr:`data_cursor`.

        Raises:
            RunError: The step is one that ends the run, or skipping and rolling back have not helped.
        """
        assert self._engine is not None, "call follow first"
        engine, step = self._engine, int(self._engine.global_steps)
        if not self._agreed and self.must_stop:
            monitor.warn(f"a signal asked the run to stop: it saves step {step} and ends")
        finding, judged = self._finding(engine)
        self._judged = None
        if finding is not None and self._policies[finding.kind] != "off":
            return self._act(self._policies[finding.kind], f"step {step}", finding.text, monitor)
        self._skips = 0
        if judged is not None and finding is None:
            self._health.accept(*judged)
        every = self._faults.check_replicas_every
        if every and step % every == 0:
            found = differences(engine)
            if found:
                where = f"replicated weights after step {step}"
                return self._act(self._faults.replicas_differ, where, summary(found), monitor)
        return False

    def _finding(
        self, engine: PipelineEngine
    ) -> tuple[StepFinding | None, tuple[float, float | None] | None]:
        """What is wrong with the last step, and the figures it was judged by; both None if nobody looks."""
        if all(policy == "off" for policy in self._policies.values()):
            return None, None
        inner = engine.deepspeed_engine.optimizer
        knows = getattr(inner, "compute_grad_norm", True)
        # An overflow of fp16 is the loss scale's to cure; of the step's figures the loss alone says anything.
        knows = knows and not engine.overflowed
        figures = float(engine.step_control.sums[0]), engine.get_global_grad_norm() if knows else None
        if self._judged is not None:
            return self._judged[0], figures
        return self._health.judge(*figures, spikes=self._spikes), figures

    def _refuses(self, loss: float, grad_norm: float) -> bool:
        """Whether a step must not be applied; asked within the step, before the weights are updated."""
        finding = self._health.judge(loss, grad_norm, spikes=self._spikes)
        self._judged = (finding,)
        return finding is not None and self._policies[finding.kind] in _WITHIN_STEP

    def _act(self, policy: Policy, where: str, text: str, monitor: Reports) -> bool:
        if policy == "skip":
            self._skip(where, text, monitor)
            return False
        if policy == "roll_back":
            self._roll_back(where, text, monitor)
            return True
        raise _ended(
            where, text, "look at the data and the learning rate; dsx.faults can also skip or roll back"
        )

    def _skip(self, where: str, text: str, monitor: Reports) -> None:
        assert self._engine is not None, "called with an engine"
        self._skips += 1
        if self._engine.step_applied:
            raise _ended(where, f"{text}, and it was applied before that was known", "compute gradient norms")
        if self._skips > self._faults.most_skips:
            what = f"{text}; that is the {self._skips}th step in a row to be skipped"
            raise _ended(where, what, "lower the learning rate, or raise dsx.faults.most_skips")
        monitor.warn(f"{where} is skipped: {text}")

    def _roll_back(self, where: str, text: str, monitor: Reports) -> None:
        """Load the newest checkpoint of this run; its data goes on as it would have without the fault."""
        assert self._engine is not None, "called with an engine"
        engine, root, cursor = self._engine, self._config.output / store.CHECKPOINTS, self.data_cursor
        self._roll_backs += 1
        if self._roll_backs > self._faults.most_roll_backs:
            what = f"{text}; the run has been rolled back {self._roll_backs - 1} times already"
            raise _ended(where, what, "lower the learning rate, or raise dsx.faults.most_roll_backs")
        engine.wait_for_checkpoint()
        if not (root / store.LATEST).exists():
            what = f"{text}, and there is no checkpoint in {root} to roll back to"
            raise _ended(where, what, "save more often (dsx.train.save_every)")
        _, state = engine.load_checkpoint(root)
        self._ahead_samples = cursor - int(engine.global_samples)
        self._skips = 0
        self._health.restore(state.get(_STATE, {}).get("health", {}))
        monitor.went_back()
        monitor.warn(
            f"{where}: {text}; rolled back to step {engine.global_steps} ({self._roll_backs} of at most "
            f"{self._faults.most_roll_backs} times), and on with the data behind that step"
        )


def _ended(where: str, what: str, fix: str) -> RunError:
    error = RunError(where, what, fix)
    error.add_note(AGREED)
    return error


_SHOWN = 4

Tensors = list[tuple[str, torch.Tensor]]


def differences(engine: PipelineEngine) -> list[str]:
    """Replicated weights that differ between ranks, with these ranks. Collective.

    Weights are compared as the model computes with them: below ZeRO-3 all weights over data parallelism
    (ZeRO-3 holds none of them twice), those that tensor parallelism does not cut over its ranks, and both
    ends of a tie.

    Returns:
        A sentence for each, the same on every rank; empty if all is well.
    """
    found = [text for group, tensors in _replicas(engine) for text in _compare(engine, group, tensors)]
    # Only one rank of each group speaks of it.
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    any_found = torch.tensor([len(found)], device=engine.pipeline.device)
    dist.all_reduce(any_found, op=dist.ReduceOp.MAX)
    if not int(any_found):
        return []
    dist.all_gather_object(everywhere, found)
    return [*dict.fromkeys(text for texts in everywhere for text in texts)]


def summary(texts: Sequence[str]) -> str:
    """The first few of :func:`differences`."""
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return f"{'; '.join(texts[:_SHOWN])}{more}"


def _replicas(engine: PipelineEngine) -> Iterator[tuple[dist.ProcessGroup, Tensors]]:
    """Groups, each with the tensors that its ranks hold alike, in the same order on each rank."""
    names, groups = Names(engine), engine.groups
    parameters = list(engine.pipeline.chunks.parameters())
    if engine.zero_optimization_stage() < 3:
        yield groups.data, [(names.of(p).name, p) for p in parameters]
    whole = [p for p in parameters if not getattr(p, "tensor_model_parallel", False)]
    yield groups.tensor, [(names.of(p).name, _here(p)) for p in whole]
    for tie in engine.pipeline.ties:
        yield tie.group, [(f"tied weight {tie.key}", _here(p)) for p in tie.parameters]


def _here(parameter: nn.Parameter) -> torch.Tensor:
    """What this rank has of a parameter; under ZeRO-3, its part."""
    part = getattr(parameter, "ds_tensor", None)
    return parameter if part is None else part


def _compare(engine: PipelineEngine, group: dist.ProcessGroup, tensors: Tensors) -> list[str]:
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1 or not tensors:
        return []
    device = engine.pipeline.device
    sums = torch.stack([checksum(tensor).to(device) for _, tensor in tensors])
    least, most = sums.clone(), sums.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    wrong = (least != most).nonzero().view(-1).tolist()
    if not wrong:
        return []
    all_sums = [torch.empty_like(sums) for _ in ranks]
    dist.all_gather(all_sums, sums, group=group)
    return [_told(tensors[i][0], ranks, [int(theirs[i]) for theirs in all_sums]) for i in wrong]


def _told(name: str, ranks: Sequence[int], sums: Sequence[int]) -> str:
    """A sentence on who differs from the majority, or, without one, that they differ."""
    (common, count), *_ = Counter(sums).most_common(1)
    odd = [rank for rank, value in zip(ranks, sums, strict=True) if value != common]
    if 2 * count <= len(ranks):
        return f"{name} differs between {named(tuple(ranks))}"
    others = [rank for rank in ranks if rank not in odd]
    return f"{name} of {named(odd)} is not what {named(others)} {'have' if len(others) > 1 else 'has'}"
