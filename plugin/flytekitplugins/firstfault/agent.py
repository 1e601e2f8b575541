"""A torch elastic agent that reports: who took part, who died of what, and that it has nothing more to say.

Everything torch decides stays torch's: when a worker counts as failed, restarts, rendezvous, teardown. Our own code is
guarded; if it breaks, this is a plain LocalElasticAgent and a warning.
"""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from firstfault.keys import roster_key_for
from firstfault.model import (
    DocumentRef,
    NodePresence,
    Phase,
    Place,
    Receipt,
    WorkerError,
)
from firstfault.places import ROSTER
from firstfault.wire import decode, encode_presence
from flytekitplugins.firstfault.agent_documents import LastWords, about_agent, about_death, last_words
from flytekitplugins.firstfault.deaths import Death, DeathWatch
from flytekitplugins.firstfault.environment import node_place
from flytekitplugins.firstfault.guard import bounded, guarded, logger
from flytekitplugins.firstfault.in_flight import Moment
from flytekitplugins.firstfault.recorder import Spool, put_document, put_file, record_error
from flytekitplugins.firstfault.taxonomy import Sort

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flytekitplugins.firstfault.environment import Recording

__all__ = ["NodeReport", "ReportingAgent"]

_guarded = partial(guarded, through=(SignalException,))
_FAILED = {WorkerState.FAILED, WorkerState.UNHEALTHY}
_TEARDOWN_SIGNALS = {"SIGTERM", "SIGKILL", "SIGINT", "SIGHUP", "SIGQUIT"}
"""What torch sends when it stops workers: the signal it was sent itself, else SIGTERM, then SIGKILL."""
_UPLOADS = 4
"""Uploads of one node at a time."""


@dataclass
class NodeReport:
    """What a node has written about one round."""

    failures: list[WorkerError] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    error_files: dict[int, str] = field(default_factory=dict)
    """Local rank to torch's error.json, which need not exist."""


class ReportingAgent(LocalElasticAgent):
    """torch's LocalElasticAgent, with a voice.

    Args:
        recording: where and how to report; its round is filled in here.
        kwargs: as LocalElasticAgent takes them.
    """

    def __init__(self, *, recording: Recording, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.recording = recording
        self.report = NodeReport()
        self._traceback_files: dict[int, str] = {}
        self._watch: DeathWatch | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._documented: dict[int, Future[Receipt]] = {}
        self._stopping: Moment | None = None
        self._told: Future[Receipt] | None = None
        self._rounds = 0

    # --- torch's hooks ------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        # if the nodes cannot agree on it, a number that is at least not the last round's
        number = self.recording.round + 1 if self._rounds else 0
        self._rounds += 1
        with _guarded("numbering the round"):
            # first of all: the other nodes wait for it
            number = _global_round(worker_group)
        with _guarded("beginning a round"):
            self._begin_round(number, worker_group.group_world_size or 0)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # spawned and forked workers alike inherit this process's environment
        with _environment(self.recording.environment()):
            ids: dict[int, Any] = super()._start_workers(worker_group)
        with _guarded("watching the workers"):
            context: Any = self._pcontext
            self.report.error_files = dict(context.error_files)
            self._traceback_files = _traceback_files(context)
            self._watch = DeathWatch(_processes(context))
            # only now: a client that has been used before a fork may hang in the child
            self._announce(Phase.JOINED)
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with _guarded("looking at the workers"):
            self._document_deaths()
        stopping = Moment.now()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in _FAILED:
            with _guarded("reporting a failure"):
                # torch stops the others because of these: however close they died to its look, it did not stop them
                first = frozenset(failure.local_rank for failure in result.failures.values())
                self._document_deaths(stopping, "another worker of this node had failed", first)
                self._finish_report()
        return result

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        if self._stopping is None:
            self._stopping = Moment.now()
        # torch names a signal only when the agent was sent one; stopping the workers may take its grace period
        if args and self._told is None and not self.succeeded:
            with _guarded("reporting a signal"):
                told = SignalException("told to go", sigval=args[0])
                self._told = self._submit(
                    partial(self._write, about_agent(told, Sort.PREEMPTION, self.place(), self._stopping))
                )
        super()._shutdown(*args, **kwargs)

    def _exit_barrier(self) -> None:
        with _guarded("reporting success"):
            self._announce(Phase.SUCCEEDED)
        super()._exit_barrier()  # type: ignore[no-untyped-call]

    # --- rounds -------------------------------------------------------------------------------------------------

    def _begin_round(self, number: int, nodes: int) -> None:
        self._end_round()
        self.report = NodeReport()
        self._documented = {}
        self._stopping = None
        self.recording = replace(self.recording, round=number, group_world_size=nodes)

    def _end_round(self) -> None:
        """Leave no thread behind: the next round may fork."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self.drain()

    def drain(self) -> None:
        """Wait for the uploads that run in the background, each bounded by the deadline."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
        for upload in self._pending:
            with _guarded("writing the roster"):
                upload.result()
        self._pending = []

    def _submit(self, call: Callable[[], Any]) -> Future[Any]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_UPLOADS, thread_name_prefix="firstfault-upload")
        return self._pool.submit(call)

    # --- what the node says -------------------------------------------------------------------------------------

    def place(self, local_rank: int | None = None, pid: int = 0) -> Place:
        """Return the place of the agent, or of one of its workers."""
        group = self._worker_group
        workers = {worker.local_rank: worker for worker in group.workers}
        worker = workers.get(local_rank) if local_rank is not None else None
        base = node_place(self.recording)
        return replace(
            base,
            round=self.recording.round,
            incarnation=self.recording.incarnation,
            restart_count=group.spec.max_restarts - self._remaining_restarts,
            rank=worker.global_rank if worker else None,
            local_rank=local_rank,
            group_rank=group.group_rank,
            world_size=worker.world_size if worker else next((item.world_size for item in group.workers), 0),
            group_world_size=group.group_world_size or 0,
            role=group.spec.role,
            pid=pid or base.pid,
        )

    def _announce(self, phase: Phase, receipts: list[Receipt] | None = None) -> None:
        presence = NodePresence(
            phase=phase,
            place=self.place(),
            # torch's -1: the rendezvous has not given a rank
            ranks=tuple(worker.global_rank for worker in self._worker_group.workers if worker.global_rank >= 0),
            receipts=tuple(receipts or ()),
            timestamp_ns=time.time_ns(),
        )
        prefix = self.recording.output_prefix
        name, data = roster_key_for(presence), encode_presence(presence)
        deadline = self.recording.upload_deadline_seconds
        self._pending.append(
            self._submit(
                lambda: bounded(lambda: put_file(prefix, f"{ROSTER}/{name}", data), deadline, "writing the roster")
            )
        )

    def _document_deaths(
        self, stopping: Moment | None = None, reason: str = "", first: frozenset[int] = frozenset()
    ) -> None:
        """Write a document for each worker that died without one, and pick up what workers could not upload.

        Args:
            stopping: when the agent began to stop its workers, None if it has not.
            reason: why.
            first: local ranks of those for which it did.
        """
        if self._watch is None:
            return
        for death in self._watch.deaths():
            if death.local_rank in self._documented:
                continue
            ended_by_agent = stopping is not None and death.local_rank not in first and _stopped_by_us(death, stopping)
            stopped = reason if ended_by_agent else ""
            self._documented[death.local_rank] = self._submit(partial(self._document, death, stopped))

    def _document(self, death: Death, stopped: str) -> Receipt:
        """Return the receipt of the document about one death; runs in an upload thread."""
        spool = Spool.beside(self.report.error_files[death.local_rank])
        deadline = self.recording.upload_deadline_seconds
        spooled = spool.documents()
        if not spooled:
            return self._write(
                about_death(death, self.place(death.local_rank, death.pid), stopped, self._last_words(death))
            )
        failures = [_read(document.path.read_bytes(), document.name) for document in spooled]
        self.report.failures.extend(failures)
        own = failures[0]
        receipts = [
            document.receipt
            if document.receipt is not None and document.receipt.durable
            else put_document(
                document.name,
                document.path.read_bytes(),
                self.recording.output_prefix,
                own.monotonic_ns,
                own.rank,
                deadline,
            )
            for document in spooled
        ]
        for receipt in receipts[1:]:
            self._keep(receipt)
        return self._keep(receipts[0])

    def _last_words(self, death: Death) -> LastWords | None:
        files = self.report.error_files
        return last_words(files[death.local_rank], self._traceback_files.get(death.local_rank, ""))

    def _write(self, failure: WorkerError) -> Receipt:
        """Upload a document of the agent's own and remember it."""
        deadline = self.recording.upload_deadline_seconds
        receipt = record_error(failure, self.recording.output_prefix, None, deadline)
        self.report.failures.append(replace(failure, documents=(DocumentRef(receipt.name),)))
        return self._keep(receipt)

    def _keep(self, receipt: Receipt) -> Receipt:
        self.report.receipts.append(receipt)
        return receipt

    def _finish_report(self) -> None:
        """Say that this node has written all it will write, once it has."""
        for upload in self._documented.values():
            with _guarded("uploading a worker's document"):
                upload.result()
        self._announce(Phase.FAILED, self.report.receipts)

    # --- the agent's own failures -------------------------------------------------------------------------------

    def record_own_failure(self, error: BaseException, sort: Sort) -> None:
        """Write a document about a failure of the agent itself, and that the node is done."""
        moment = self._stopping or Moment.now()
        self._document_deaths(moment, "its agent was told to go" if sort is Sort.PREEMPTION else "its agent had failed")
        if self._told is None:
            self._write(about_agent(error, sort, self.place(), moment))
        else:
            self._told.result()
        self._finish_report()

    def close(self) -> None:
        """Leave nothing running: wait for the uploads, each bounded by the deadline."""
        self._end_round()

    @property
    def succeeded(self) -> bool:
        """Whether this node's workers have finished."""
        return bool(self._worker_group.state == WorkerState.SUCCEEDED)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _processes(context: Any) -> list[Any]:
    """The worker processes in order of local rank; torch keeps them in its own process context."""
    return list(context._pc.processes)  # noqa: SLF001 - no public name for the processes of a function's workers


def _traceback_files(context: Any) -> dict[int, str]:
    """Local rank to the file in which torch.multiprocessing keeps a traceback; older versions keep queues instead."""
    files = getattr(context._pc, "error_files", None)  # noqa: SLF001 - see _processes
    return {rank: str(file) for rank, file in enumerate(files or ())}


def _global_round(worker_group: WorkerGroup) -> int:
    """Return the number of this rendezvous, the same on all nodes.

    Each rendezvous has a store of its own below one that all rounds share: its first node counts there.
    """
    store: Any = worker_group.store
    shared = getattr(store, "underlying_store", store)
    if worker_group.group_rank == 0:
        number = int(shared.add("firstfault/rounds", 1)) - 1
        store.set("firstfault/round", str(number))
        return number
    return int(store.get("firstfault/round"))


def _stopped_by_us(death: Death, stopping: Moment) -> bool:
    return death.signal in _TEARDOWN_SIGNALS and death.monotonic_ns >= stopping.monotonic_ns


def _read(data: bytes, name: str) -> WorkerError:
    document = decode(data, DocumentRef(name))
    if not isinstance(document, WorkerError):
        raise TypeError(f"{name} in the spool is not an error document")
    logger.debug("picked up %s from the spool", name)
    return document
