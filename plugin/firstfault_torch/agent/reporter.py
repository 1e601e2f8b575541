"""What a node writes: its roster entries, and its documents about its workers and its agent."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from firstfault import model
from firstfault.exceptions.printed_tracebacks import remove_traceback
from firstfault.recorder.client import RecorderClient
from firstfault.recorder.folder import get_stack_tail
from firstfault.recorder.spool import SpooledDocument
from firstfault.utils.brief_threads import BriefThreads
from firstfault.wire.documents import decode, encode, encode_presence
from firstfault_torch import time_limits
from firstfault_torch.agent.deaths import (
    ExitEvidence,
    ExpiredWorker,
    WorkerExit,
    WorkerSnapshot,
    WorkerStop,
    describe_exit,
    read_torch_exception,
)
from firstfault_torch.failures.failure_records import lost_agent
from firstfault_torch.guard import suppress_internal_errors
from firstfault_torch.node import document_writer
from firstfault_torch.node.stderr_relay import StderrRelay
from firstfault_torch.node_context import NodeContext
from firstfault_torch.node_setup import read_node_setup
from firstfault_torch.protocol.notices import FailureNotice
from firstfault_torch.protocol.shutdown import ExitStep, Hurry, get_limit

_UPLOADS = 4
"""Uploads of one node at a time."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node has written about one round."""

    copies: dict[str, bytes] = field(default_factory=dict)
    """Its documents and roster entries, by path below the output prefix,
    whether or not they were uploaded.
    """
    receipts: list[model.Receipt] = field(default_factory=list)
    error_files: dict[int, str] = field(default_factory=dict)
    """Local rank to torch's error.json, which need not exist."""
    exits: dict[int, WorkerExit] = field(default_factory=dict)
    """By global rank."""
    failure_lines: dict[int, str] = field(default_factory=dict)
    """torch's line about each failed worker by global rank, the first failure first;
    empty if it's logged.
    """


class Reporter:
    """Writes a node's documents and roster entries in the background, and keeps their receipts.

        begin      drop the last round's report
        started    announce JOINED; spool the report on the agent's own death
        document   upload one worker's exit, once per worker; write: the same for the agent, in the
                   caller's thread
        finish     wait for all documents, then announce FAILED with their receipts
        drain      wait for the remaining uploads, and end their threads: the next round may fork

    The main thread calls these, or the signal thread if that has to end the pod. The signal thread
    also calls `write` while the main thread stops the workers, and the thread that watches progress
    calls `put`.

    `get_place` returns the place of the agent (None), or of the worker with a local rank.
    """

    def __init__(
        self, node_context: NodeContext, get_place: Callable[[int | None], model.Place]
    ) -> None:
        self.node_context = node_context
        self.report = NodeReport()
        self._get_place = get_place
        self._traceback_files: dict[int, str] = {}
        self._log_tails: StderrRelay | None = None
        self.progress: Callable[[], model.Progress] = model.Progress
        """Returns how far the workers came in this round."""
        self.find_finished: Callable[[], frozenset[int]] = frozenset
        """Returns the local ranks that had come to their end before the round's first failure."""
        self._pool: BriefThreads | None = None
        self._entries: list[Future[Any]] = []
        self._documented: dict[int, Future[Any]] = {}
        self._own_logs: dict[int, model.LogTail] = {}
        self._hurried_until: float | None = None

    @property
    def deadline_seconds(self) -> float:
        """The longest wait for an upload that begins now; shorter after `shorten_deadlines`."""
        seconds = self.node_context.upload_deadline_seconds
        if self._hurried_until is None:
            return seconds
        left = self._hurried_until - time.monotonic()
        late = get_limit(ExitStep.LATE_UPLOAD, Hurry.TERMINATED, seconds)
        return min(seconds, max(left, late))

    def shorten_deadlines(self) -> None:
        """Let all further uploads together take a few seconds: this process is terminated,
        and will be killed.
        """
        # Only the first signal: a second one must not extend the time.
        if self._hurried_until is None:
            self._hurried_until = time.monotonic() + get_limit(ExitStep.UPLOADS, Hurry.TERMINATED)

    # --- rounds -----------------------------------------------------------------------------------

    def begin(self, number: int, nodes: int) -> None:
        """Begin a round, after all writes of the last one have ended."""
        # First: an upload of the last round that still runs would add its receipt to the new
        # report.
        self.drain()
        self.report = NodeReport()
        self._documented = {}
        self._own_logs = {}
        self._log_tails = None
        self.progress = model.Progress
        self.node_context = replace(self.node_context, round=number, group_world_size=nodes)

    def started(
        self,
        error_files: dict[int, str],
        traceback_files: dict[int, str],
        ranks: tuple[int, ...],
        log_tails: StderrRelay | None = None,
    ) -> None:
        """Announce that this node's workers run, and spool the report on the agent's
        death in case it dies.
        """
        self.report.error_files.update(error_files)
        self._traceback_files = traceback_files
        self._log_tails = log_tails
        self.announce(model.Phase.JOINED, ranks)
        with suppress_internal_errors("spooling the report on the agent's death"):
            if self.node_context.files is not None:
                # Each round replaces the one before. The recorder uploads it if this process dies,
                # for example by SIGKILL, when nothing in it can run any more.
                place = self._get_place(None)
                spool = self.node_context.files.last_words
                spool.add("document.pb", encode(lost_agent(place)))
                spool.add(
                    "presence.pb",
                    encode_presence(model.NodePresence(model.Phase.FAILED, place, ranks)),
                )

    def remove_traceback_files(self) -> None:
        """Remove the files in which torch.multiprocessing kept tracebacks of this round;
        it leaves them.
        """
        for file in self._traceback_files.values():
            Path(file).unlink(missing_ok=True)
        self._traceback_files = {}

    def drain(self) -> None:
        """Wait for the background uploads, each bounded by its deadline, and end their threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
        # after the threads have ended, so `result` never blocks; it only raises what failed, which
        # is logged
        for entry in self._entries:
            with suppress_internal_errors("writing the roster"):
                entry.result()
        self._entries = []

    # --- roster -----------------------------------------------------------------------------------

    def announce(
        self,
        phase: model.Phase,
        ranks: tuple[int, ...],
        first: FailureNotice | None = None,
    ) -> None:
        """Write a roster entry in the background;
        a failed node's holds receipts and ends of logs.
        """
        place = self._get_place(None)
        progress = model.Progress() if phase is model.Phase.JOINED else self.progress()
        presence = model.NodePresence(
            phase,
            place,
            ranks,
            timestamp_ns=time.time_ns(),
            progress=progress,
        )
        if phase is model.Phase.FAILED:
            logs = tuple(tail for _, tail in sorted(self._own_logs.items()))
            setup = read_node_setup(self.node_context.identity)
            presence = replace(
                presence,
                receipts=tuple(self.report.receipts),
                log_tails=logs,
                setup=setup,
            )
            with suppress_internal_errors("finding the finished workers"):
                places = (self._get_place(local) for local in sorted(self.find_finished()))
                finished = tuple(place.rank for place in places if place.rank is not None)
                presence = replace(presence, finished_ranks=finished)
        if first is not None:
            presence = replace(
                presence, first_failure=first.cause, first_failure_reason=first.reason
            )
        path, data = document_writer.as_entry(presence)
        # Before the upload, which may fail: peers and the verdict get the copies through the store,
        # without the storage.
        self.report.copies[path] = data
        self.put(path, data)

    def put(self, path: str, data: bytes) -> Future[Any]:
        """Write another small file below the output prefix, in the background."""
        put = self._submit(
            lambda: document_writer.put_on_node(
                path,
                data,
                self.node_context,
                self.deadline_seconds,
            )
        )
        self._entries = [*(entry for entry in self._entries if not entry.done()), put]
        return put

    # --- documents --------------------------------------------------------------------------------

    def write(self, failure: model.WorkerError) -> model.Receipt:
        """Make a document that the agent wrote durable, within the deadline."""
        # No lock: the signal thread and up to four upload threads may be here at once, but each
        # writes its own document, and appending to a list is atomic.
        spool = document_writer.spool_for_agent(self.node_context)
        data, receipt = document_writer.record_error(
            failure,
            self.node_context,
            spool,
            self.deadline_seconds,
        )
        self.report.copies[document_writer.document_path(receipt.name)] = data
        self.report.receipts.append(receipt)
        return receipt

    def document(
        self,
        worker_exit: WorkerExit,
        stop: WorkerStop | None,
        *,
        expiry: ExpiredWorker | None = None,
        seen: WorkerSnapshot | None = None,
        only_held: bool = False,
    ) -> None:
        """Document one death in the background; a second call for the same worker does nothing.

        `stop` and `expiry` as in `describe_exit`, `seen` as in `ExitEvidence`. With `only_held`,
        only upload the worker's own documents.
        """

        def upload() -> None:
            own = self._own_documents(worker_exit)
            if not only_held:
                self._write_death_document(worker_exit, stop, expiry, own, seen or WorkerSnapshot())
            elif own:
                self._keep_log(worker_exit, own[-1])

        # Each look of the main thread sees all deaths again. `stop` is the one of the first call: a
        # death that was found before this agent stopped its workers stays a failure, not a
        # consequence.
        rank = self._get_place(worker_exit.local_rank).rank
        if rank is not None:
            self.report.exits[rank] = worker_exit
        if worker_exit.local_rank not in self._documented:
            self._documented[worker_exit.local_rank] = self._submit(upload)

    def finish(self, ranks: tuple[int, ...], first: FailureNotice | None) -> None:
        """Announce that this node has failed, and which failure caused it,
        after all its documents are written.
        """
        # The roster entry holds the receipts and log tails that these uploads add. None of them
        # waits longer than its deadline.
        for upload in self._documented.values():
            with suppress_internal_errors("uploading a worker's document"):
                upload.result()
        self.announce(model.Phase.FAILED, ranks, first)

    def _write_death_document(
        self,
        worker_exit: WorkerExit,
        stop: WorkerStop | None,
        expiry: ExpiredWorker | None,
        own: list[model.WorkerError],
        seen: WorkerSnapshot,
    ) -> None:
        """Write a document about one death unless the worker's own are complete;
        runs in an upload thread.
        """
        # The worker's own document suffices, unless it is about an exception in flight or an exit
        # that the stop caused.
        ended = [
            failure
            for failure in own
            if not failure.in_flight and not _is_exit_on_stop(failure, stop, worker_exit)
        ]
        by_itself = expiry is None and (stop is None or not stop.ended(worker_exit))
        # Its end explains nothing if it exited with another code, or if a signal ended it after it
        # had finished.
        is_explained = not (
            worker_exit.exit_code > 0 or (by_itself and self._is_in_teardown(worker_exit))
        )
        if ended and (is_explained or not all(map(_is_bare_exit, ended))):
            self._keep_log(worker_exit, ended[-1])
            return
        stop = None if ended else stop  # it had ended its training before it was stopped
        by_itself = expiry is None and (stop is None or not stop.ended(worker_exit))
        kept = None
        resources = model.Resources()
        rank = worker_exit.local_rank
        files = self.node_context.files
        if not own and not worker_exit.signal:
            # what torch kept of a process that a signal ended was handled: the process continued
            kept = read_torch_exception(
                self.report.error_files.get(rank, ""), self._traceback_files.get(rank, "")
            )
        if worker_exit.signal == "SIGKILL" and by_itself and files is not None:
            with suppress_internal_errors("asking for the container's memory"):
                resources = RecorderClient(files).resources(
                    time_limits.MEMORY_REPORT_TIMEOUT_SECONDS
                )
        stack = self._fatal_stack(rank)
        log = self._get_log_tail(worker_exit)
        traces = ExitEvidence(kept, resources, stack, log, seen)
        self.write(
            describe_exit(
                worker_exit,
                self._get_place(worker_exit.local_rank),
                stop=stop,
                traces=traces,
                expiry=expiry,
            )
        )

    def _is_in_teardown(self, worker_exit: WorkerExit) -> bool:
        with suppress_internal_errors("finding the finished workers"):
            return bool(worker_exit.signal) and worker_exit.local_rank in self.find_finished()
        return False

    def withdraw(self, local_rank: int) -> None:
        """Withdraw what a worker wrote: the remaining ranks have recovered from it."""
        error_file = self.report.error_files.get(local_rank)
        spool = document_writer.open_worker_spool(self.node_context, local_rank, error_file)
        if spool is None:
            return
        for document in spool.documents():
            # The mark in the spool stops an upload that hasn't begun; the receipt covers a document
            # that is durable.
            spool.withdraw(document.name)
            self.report.receipts.append(
                model.Receipt(document.name, durable=document.is_durable, withdrawn=True)
            )

    def _keep_log(self, worker_exit: WorkerExit, own: model.WorkerError) -> None:
        """Keep the end of a worker's stderr for this node's roster entry:
        its own document can't have it.
        """
        rank = self._get_place(worker_exit.local_rank).rank
        log = self._get_log_tail(worker_exit)
        if own.exception is not None:
            log = remove_traceback(log, own.exception)
        if rank is not None and log:
            self._own_logs[worker_exit.local_rank] = model.LogTail(rank, log)

    def _get_log_tail(self, worker_exit: WorkerExit) -> str:
        return self._log_tails.tail(worker_exit.local_rank) if self._log_tails is not None else ""

    def _own_documents(self, worker_exit: WorkerExit) -> list[model.WorkerError]:
        """Return the failures that the worker wrote itself; upload those that it could not upload.

        A document that can't be read gets a receipt with that error; it doesn't hide any other, nor
        the agent's own.
        """
        error_file = self.report.error_files.get(worker_exit.local_rank)
        spool = document_writer.open_worker_spool(
            self.node_context, worker_exit.local_rank, error_file
        )
        if spool is None:
            return []
        rank = self._get_place(worker_exit.local_rank).rank
        failures = []
        # The worker has exited, so the spool grows no more. Its uploads may not have finished: it
        # may have been killed, or the storage may be slow.
        for document in spool.documents():
            failure = None
            unread = "" if document.is_durable else "it cannot be read"
            receipt = model.Receipt(
                document.name,
                durable=document.is_durable,
                error=unread,
                rank=rank,
            )
            with suppress_internal_errors(f"reading {document.name} in the node's spool"):
                receipt, failure = self._take(document)
            self.report.receipts.append(receipt)
            if failure is not None:
                failures.append(failure)
        return failures

    def _take(self, document: SpooledDocument) -> tuple[model.Receipt, model.WorkerError | None]:
        settled = document.settled
        if settled is not None and settled.withdrawn:
            return settled, None
        data = document.path.read_bytes()
        failure = decode(data, model.DocumentRef(document.name))
        if not isinstance(failure, model.WorkerError):
            raise TypeError(f"{document.name} in the node's spool is not an error document")
        self.report.copies[document_writer.document_path(document.name)] = data
        # The recorder may still be uploading it for the worker. A second upload has the same name
        # and content.
        context, seconds = self.node_context, self.deadline_seconds
        receipt = settled or document_writer.put_document(document, data, failure, context, seconds)
        return receipt, failure

    def _fatal_stack(self, local_rank: int) -> str:
        if self.node_context.files is None:
            return ""
        stack = get_stack_tail(
            self.node_context.files.worker(self.node_context.round, local_rank).fatal_stacks
        )
        if stack:
            # torch elastic would print it there
            if self._log_tails is not None:
                self._log_tails.write(local_rank, f"{stack}\n")
            else:
                sys.stderr.write(f"{stack}\n")
                sys.stderr.flush()
        return stack

    def _submit(self, call: Callable[[], Any]) -> Future[Any]:
        # The main thread makes the pool for the JOINED entry, before another thread of the round
        # can submit; `drain` ends it, because a thread that is alive at a fork may leave a lock
        # locked in the worker.
        if self._pool is None:
            self._pool = BriefThreads(_UPLOADS, "firstfault-upload")
        return self._pool.submit(call)


def _is_exit_on_stop(
    failure: model.WorkerError, stop: WorkerStop | None, worker_exit: WorkerExit
) -> bool:
    """Whether a worker called ``sys.exit`` after its agent had begun to stop it,
    as signal handlers do.
    """
    if stop is None or not stop.ended(worker_exit) or not _is_bare_exit(failure):
        return False
    # Worker and agent compare one node's monotonic clock. An exit before the stop was the worker's
    # own decision.
    return failure.monotonic_ns is not None and failure.monotonic_ns >= stop.began_ns


def _is_bare_exit(failure: model.WorkerError) -> bool:
    """Whether a worker exited outside of an exception's handling:
    only its stderr can explain why.
    """
    exception = failure.exception
    return exception is not None and exception.type == "SystemExit" and not exception.causes
