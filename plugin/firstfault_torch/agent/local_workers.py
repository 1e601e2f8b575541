"""This node's worker processes: what they report, and how they end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest

from firstfault.exceptions.stack_position import parse_position
from firstfault.model import TERMINATED, CausedBy, ExpiredDeadline
from firstfault_torch import time_limits
from firstfault_torch.agent.deaths import ExpiredWorker, WorkerExit, WorkerSnapshot, WorkerStop
from firstfault_torch.agent.exit_watch import ExitWatch
from firstfault_torch.agent.reporter import Reporter
from firstfault_torch.agent.signals import suppress_internal_errors_in_main
from firstfault_torch.agent.stop_processes import (
    GracePeriod,
    ProcessStop,
    collect_snapshots,
    worker_sessions,
)
from firstfault_torch.agent.timers import TimerServer, open_timers
from firstfault_torch.compat.torch_agent import (
    close_program_files,
    collect_results,
    find_ranks_without_result,
    traceback_files,
    worker_processes,
)
from firstfault_torch.descriptors import KeptDescriptor
from firstfault_torch.guard import (
    call_with_timeout,
    logger,
    start_in_thread,
    suppress_internal_errors,
)
from firstfault_torch.node.channel import AgentChannel, from_message, handled_from_message
from firstfault_torch.node.stderr_relay import StderrRelay
from firstfault_torch.node_context import LOCAL_RANK_VARIABLE, WORKER_VARIABLE, NodeContext
from firstfault_torch.watchdog import Watchdog
from firstfault_torch.watchdog.timers import Timer

_STAT_FLAGS_INDEX = 5
"""Index of the kernel's flags of a process among the fields after its state: proc(5), field 9."""
_EXITING = 0x4
"""The kernel's PF_EXITING."""


class LocalWorkers:
    """Watches the workers of one node, round after round.

    A thread calls `wake` when a worker has ended or reported a failure. Workers have `stop_seconds`
    to end after the signal before they are killed.
    """

    def __init__(
        self,
        node_context: NodeContext,
        reporter: Reporter,
        stop_seconds: float,
        wake: Callable[[], None],
        watchdog: Watchdog | None = None,
    ) -> None:
        self._reporter = reporter
        self._stop_seconds = stop_seconds
        self._wake = wake
        self._context: Any = None
        self._watch: ExitWatch | None = None
        self._stderr: StderrRelay | None = None
        self._channel: AgentChannel | None = None
        self._watchdog = watchdog
        self._timers: TimerServer | None = None
        # Two threads may end a worker: the main thread stops all, and a thread that watches
        # deadlines or progress kills one. Whichever takes the lock first decides what the worker's
        # document gives as the reason.
        self._ending = threading.Lock()
        """Held to note that workers are stopped, or that one is killed for a deadline."""
        self._pidfds: dict[int, KeptDescriptor] = {}
        """Descriptors of the workers by local rank, used and closed under the lock."""
        self.expired: dict[int, ExpiredWorker] = {}
        """The deadlines for which workers of the round were killed, by local rank."""
        self.stopped: WorkerStop | None = None
        """Why this agent stopped the workers of the round, or None if it didn't."""
        self.grace = GracePeriod()
        """Gives the round's healthy workers torch's full timeout after a signal to a node."""
        self._process_stop: ProcessStop | None = None
        """The stop that is under way, from the moment at which the workers get their signal."""
        self._is_stopping = False
        """Whether a stop has begun and hasn't ended: a signal's exception may have interrupted it.
        """
        self.are_programs = False
        """Whether the workers are programs, which torch starts by themselves, and not functions."""
        self._forgotten: frozenset[int] = frozenset()
        self.finished: frozenset[int] = frozenset()
        """What `find_finished` returned last in this round."""
        if node_context.files is not None:
            with suppress_internal_errors("opening the channel to the workers"):
                self._channel = AgentChannel(node_context.files, wake)

    # --- rounds -----------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Forget the round before."""
        self.stopped = None
        self.grace = GracePeriod()
        self._process_stop = None
        self._is_stopping = False
        self._forgotten = frozenset()
        self.finished = frozenset()
        self.expired = {}
        if self._channel is not None:
            self._channel.begin(self._reporter.node_context.round)

    def open_timers(self) -> TimerServer | None:
        """Make the FIFO for the workers' deadlines before the workers start. Return None if no
        watchdog is configured.
        """
        if self._watchdog is not None:
            node_context = self._reporter.node_context
            self._timers = open_timers(node_context.files, node_context.round)
        return self._timers

    def prepare(self, environments: dict[int, dict[str, str]], logs: LogsDest) -> None:
        """Add to the workers' environments, by local rank, and read their stderr;
        torch has just chosen both.
        """
        node_context = self._reporter.node_context
        with suppress_internal_errors_in_main("listening to the workers' stderr"):
            if node_context.files is not None:
                self._stderr = StderrRelay(
                    node_context.files,
                    node_context.round,
                    logs.stderrs,
                    self._ask_before_abort,
                )
        timers = self._timers.environment(self._watchdog) if self._timers and self._watchdog else {}
        for local_rank, environment in environments.items():
            environment.update(timers)
            environment[LOCAL_RANK_VARIABLE] = str(local_rank)
            if self.are_programs:
                environment[WORKER_VARIABLE] = str(os.getpid())
        if self.are_programs and self._stderr is not None:
            # torch starts a program without redirecting its stderr to the agent
            logs.stderrs.update(self._stderr.fifos())

    def started(self, context: Any, ranks: tuple[int, ...]) -> None:
        """Watch the workers that torch has just started in its process context;
        `ranks` are their global ranks.
        """
        self._context = context
        if self._stderr is not None:
            # First: the workers run already. A FIFO holds 64 KiB, and a worker that writes more
            # blocks until it is read.
            with suppress_internal_errors("passing on the workers' stderr"):
                self._stderr.start()
        if self.are_programs:
            close_program_files(context)
            worker_sessions.update(process.pid for process in worker_processes(context))
            with suppress_internal_errors("noting the sessions of the workers"):
                if self._reporter.node_context.files is not None:
                    self._reporter.node_context.files.note_sessions(worker_sessions)
        # Now, while none has been reaped: each number is that of a worker.
        for rank, process in enumerate(worker_processes(context)):
            # AttributeError: Python was built with old headers
            with contextlib.suppress(OSError, AttributeError):
                self._pidfds[rank] = KeptDescriptor(os.pidfd_open(process.pid))
        # After the fork, as its thread's locks must not be inherited. A worker that has died since
        # then isn't missed: its pidfd is readable at once.
        self._watch = ExitWatch(worker_processes(context), self._wake)
        if self._timers is not None:
            with suppress_internal_errors("watching the workers' deadlines"):
                self._timers.start(
                    [process.pid for process in worker_processes(context)], self._expire
                )
        self._reporter.started(
            dict(context.error_files),
            traceback_files(context),
            ranks,
            self._stderr,
        )

    def stop_watching(self) -> None:
        """End the watching threads: the next round may fork."""
        if self._timers is not None:
            self._timers.stop()
            self._timers = None
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        with self._ending:
            for descriptor in self._pidfds.values():
                descriptor.close()
            self._pidfds = {}

    def close_stderr(self) -> None:
        """Pass on what the workers have written to stderr, then stop."""
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def close(self) -> None:
        """Stop listening to the workers."""
        if self._channel is not None:
            self._channel.close()

    # --- their failures ---------------------------------------------------------------------------

    @property
    def is_watched(self) -> bool:
        """Whether workers were started in this round, and are watched."""
        return self._watch is not None

    @property
    def count(self) -> int:
        """How many workers this round has on this node."""
        return len(worker_processes(self._context))

    def reported(self) -> dict[int, dict[str, Any]]:
        """Return the reports of failed workers of this round, by local rank."""
        failed = self._channel.failed() if self._channel is not None else {}
        return {rank: report for rank, report in failed.items() if rank not in self._forgotten}

    def find_failure_times(self) -> dict[int, int]:
        """Return when workers of this round had failed, or begun to exit, by their own reports:
        the monotonic time by local rank.
        """
        exiting = self._find_exiting(time.monotonic_ns())
        failed = {
            rank: int(report["monotonic_ns"])
            for rank, report in self.reported().items()
            if "monotonic_ns" in report
        }
        return {**exiting, **failed}

    def _find_exiting(self, before_ns: int) -> dict[int, int]:
        """Return when programs of workers had begun to exit in the middle, by local rank."""
        if self._channel is None or self._watch is None:
            return {}
        # the process that the agent has started: a wrapper may run several programs
        pids = {rank: process.pid for rank, process in enumerate(worker_processes(self._context))}
        return {
            rank: report["monotonic_ns"]
            for rank, report in self._channel.exiting().items()
            if pids.get(rank) == report["pid"] and report["monotonic_ns"] < before_ns
        }

    def has_failure_after_clean_exit(self) -> bool:
        """Whether a program that has exited with 0 had reported a failure, perhaps unread so far.

        Flyte 2's ``a0`` does so after an error outside of its task function.
        """
        if self._channel is None or not self.are_programs:
            return False
        self._channel.read_arrived(time_limits.FINISHED_REPORTS_TIMEOUT_SECONDS)
        return bool(self.reported())

    def find_finished(self) -> frozenset[int]:
        """Return the local ranks that had come to their end before this agent knew of a failure.

        Each has reported it, and still was the process that the agent had started: a wrapper may
        run several programs. The result of a function must also have arrived.
        """
        if self._channel is None or self._watch is None:
            return frozenset()
        stop, pids = self.stopped, [process.pid for process in worker_processes(self._context)]
        reports = self._channel.finished(time_limits.FINISHED_REPORTS_TIMEOUT_SECONDS)
        finished = {
            rank
            for rank, report in reports.items()
            # What the workers make of the stop may look like an end: a signal handler may let the
            # program return.
            if pids[rank] == report["pid"]
            and (stop is None or report["monotonic_ns"] < stop.began_ns)
        }
        if not self.are_programs:
            finished &= self.take_results(finished).keys()
        self.finished = frozenset(finished - self.reported().keys())
        return self.finished

    def take_results(self, local_ranks: Collection[int]) -> dict[int, Any]:
        """Return what the functions of these workers returned, as far as it has arrived,
        by local rank.
        """
        if self.are_programs:
            return {}
        # A worker that died while it wrote leaves half a result, and reading it would block.
        read = partial(collect_results, self._context, local_ranks)
        doing = "reading the workers' results"
        return call_with_timeout(read, time_limits.RESULTS_TIMEOUT_SECONDS, doing, local=True) or {}

    def discard_exits(self, local_ranks: frozenset[int]) -> None:
        """Ignore these exits, because the remaining ranks continued without the workers."""
        # A failure leads here more than once with the same ranks: a document is withdrawn once.
        for rank in local_ranks - self._forgotten:
            self._reporter.withdraw(rank)
        self._forgotten |= local_ranks

    def get_exits(self) -> list[WorkerExit]:
        """Return the workers that ended without success, in the order of their ends.

        A worker that exited with 0 before it handed over its result counts: torch would wait for
        that result for ever. So does one that had reported a failure, and one that ended when the
        agent, or torch for it, stopped the workers: a signal handler may exit with 0.
        """
        if self._watch is None:
            return []
        reported = self.reported()
        # Before `ended`: a worker that hands over its result between the two reads can't have ended
        # by the second, because torch's `_wrap` lets it end only after all results.
        counted = find_ranks_without_result(self._context)
        stop = self.stopped
        return [
            worker_exit
            for worker_exit in self._watch.ended()
            if worker_exit.local_rank not in self._forgotten
            and (
                worker_exit.exit_code != 0
                or worker_exit.local_rank in counted
                or worker_exit.local_rank in reported
                or (stop is not None and stop.ended(worker_exit))
            )
        ]

    def document_exits(self) -> None:
        """Document each death of this round once, in the background.

        A worker that torch takes for a success may hold a document: it called ``sys.exit(0)`` in
        the middle.
        """
        worker_exits = self.get_exits()
        for worker_exit in worker_exits:
            self.document(worker_exit)
        ended = self._watch.ended() if self._watch is not None else []
        for worker_exit in ended:
            if (
                worker_exit.local_rank
                not in {item.local_rank for item in worker_exits} | self._forgotten
            ):
                self._reporter.document(worker_exit, self.stopped, only_held=True)

    def document(self, worker_exit: WorkerExit) -> None:
        """Document one death in the background, unless that has begun."""
        rank = worker_exit.local_rank
        # Asks no worker: it reads the last answer of the round, such as the one to
        # `_ask_before_abort`.
        states = self._channel.get_states() if self._channel is not None else {}
        last_state = (
            WorkerSnapshot("", *from_message(states[rank]), handled_from_message(states[rank]))
            if rank in states
            else None
        )
        self._reporter.document(
            worker_exit, self.stopped, expiry=self.expired.get(rank), seen=last_state
        )

    def _ask_before_abort(self, local_rank: int) -> None:
        """Ask a worker for its state while torch waits before it aborts the process;
        the channel keeps the answer.

        torch would also call a hook in the worker then. A hook in Python needs the GIL, which
        another thread may hold for ever, so it could prevent the abort. A question that isn't
        answered prevents nothing.
        """
        if self._channel is not None:
            start_in_thread(
                partial(self._channel.ask, [local_rank], 0),
                "asking a worker that is about to be aborted",
            )

    # --- progress ---------------------------------------------------------------------------------

    @property
    def alive(self) -> dict[int, int]:
        """The process ids of the workers that run, by local rank;
        none once the agent stops them.
        """
        # Read by the thread that watches progress. A worker that is being stopped makes no
        # progress, and isn't hung.
        if self._watch is None or self.stopped is not None:
            return {}
        ended = self._watch.noticed
        return {
            rank: process.pid
            for rank, process in enumerate(worker_processes(self._context))
            if rank not in ended
        }

    def ask(
        self,
        question: str,
        local_ranks: Iterable[int],
        seconds: float,
    ) -> dict[int, dict[str, Any]]:
        """Return what workers answer to `PULSE` or `SNAPSHOT` in time, by local rank."""
        return (
            self._channel.ask(local_ranks, seconds, question) if self._channel is not None else {}
        )

    def kill_hung_workers(self, local_ranks: Iterable[int], seconds: float) -> None:
        """Kill workers because the job made no progress for `seconds`, as at a missed deadline."""
        timers = (
            Timer(pid, "hang", "", 0.0, seconds)
            for rank, pid in self.alive.items()
            if rank in {*local_ranks}
        )
        self._expire({timer.pid: timer for timer in timers})

    # --- deadlines --------------------------------------------------------------------------------

    def _expire(self, timers: dict[int, Timer]) -> None:
        """Ask workers for stacks and state, then kill them;
        called by the thread that watches their deadlines.
        """
        ranks = {process.pid: rank for rank, process in enumerate(worker_processes(self._context))}
        with self._ending:
            asked = {ranks[pid]: pid for pid in timers if self._is_own(ranks[pid])}
        observations: dict[int, WorkerSnapshot] = {}
        with suppress_internal_errors("asking workers for their state at a deadline"):
            # Without the lock: it takes up to 0.6 s, and a failure that is found now must stop the
            # workers at once.
            observations = collect_snapshots(self._channel, self._reporter.node_context, asked)
        # What was true before the questions may not be now: checked again, under the lock. The main
        # thread may have begun to stop all, and a worker may have ended on its own.
        with self._ending:
            if self.stopped is not None:
                return  # they are victims of another failure
            asked = {
                rank: pid for rank, pid in asked.items() if self._is_own(rank) and _is_running(pid)
            }
            for rank, pid in asked.items():
                timer = timers[pid]
                deadline = ExpiredDeadline(
                    timer.scope,
                    round(timer.seconds, 3),
                    timer.heartbeat,
                    timer.since,
                )
                self.expired[rank] = ExpiredWorker(
                    deadline, observations.get(rank, WorkerSnapshot())
                )
            # From the entry in `expired` on, a stop counts the worker as failed, whether or not the
            # signal has arrived. All are killed before a line is logged, because a log may block.
            # During that time the first death would break the connections of the next worker, and
            # make torch send it SIGTERM: it would exit with an exception.
            for rank, pid in asked.items():
                self._kill(rank, pid)
        for rank, pid in asked.items():
            logger.warning(
                "local rank %d (pid %d) was killed: %s",
                rank,
                pid,
                self.expired[rank].deadline.text,
            )

    def _kill(self, local_rank: int, pid: int) -> None:
        # Through a pidfd: the main thread may have reaped the worker since the check above, and
        # another process may have its number.
        descriptor = self._pidfds.get(local_rank)
        with contextlib.suppress(ProcessLookupError):
            if descriptor is not None and descriptor.is_ours:
                signal.pidfd_send_signal(descriptor.number, signal.SIGKILL)
            else:  # a kernel or sandbox without pidfds, or a program in this process has closed it
                os.kill(pid, signal.SIGKILL)

    def _is_own(self, local_rank: int) -> bool:
        """Whether the worker with this local rank still exists, and its number is its own;
        called under the lock.
        """
        descriptor = self._pidfds.get(local_rank)
        if descriptor is not None and descriptor.is_ours:
            # It becomes readable when the worker has ended, also for one that isn't a child of this
            # process: with torch's start method "forkserver" another process forks the workers, and
            # reaps them.
            poll = select.poll()
            poll.register(descriptor.number, select.POLLIN)
            return not poll.poll(0)
        try:
            os.waitid(
                os.P_PID,
                worker_processes(self._context)[local_rank].pid,
                os.WEXITED | os.WNOHANG | os.WNOWAIT,
            )
        except ChildProcessError:
            return False  # reaped, or never a child
        return True

    # --- stopping ---------------------------------------------------------------------------------

    def stop(  # noqa: PLR0913 - keywords
        self,
        reason: str,
        failed_first: frozenset[int] = frozenset(),
        *,
        caused_by: CausedBy | None = None,
        sent: signal.Signals = signal.SIGTERM,
        seconds: float | None = None,
        find_extra_seconds: Callable[[], float] = float,
    ) -> None:
        """Ask the workers for stacks and state, then stop them; those in `failed_first` failed,
        and may end by themselves.

        They have `seconds` to end, else the usual time; more if `grace` is lengthened, or if
        `find_extra_seconds`, called before the first of them is killed, returns so.
        """
        seconds = self._stop_seconds if seconds is None else seconds
        processes = worker_processes(self._context)
        self._is_stopping = True
        began = time.monotonic_ns()
        killed_ns = began + int(seconds * 1e9)
        with self._ending:
            alive = {
                rank: process.pid
                for rank, process in enumerate(processes)
                if process.exitcode is None
            }
            # `failed_first` grows here by workers that are exiting or were killed at a deadline:
            # they get no signal. Example: rank 3 crashes. The kernel closes its sockets while it
            # still tears down its memory, so rank 0 fails in a collective and is found first. Rank
            # 3 has no exit code yet; if it were missing in `failed_first`, its death would count as
            # this stop's work, and rank 0 as the cause. The lock keeps a deadline that expires now
            # from adding a worker that this stop is about to signal.
            failed_first |= self.expired.keys() | {
                rank for rank, pid in alive.items() if not _is_running(pid)
            }
            # So does a program that called `sys.exit` before: its exit handlers, and the end of
            # torch's threads, take seconds. After a signal to the node the exit may be the
            # program's answer.
            if reason != TERMINATED:
                failed_first |= self._find_exiting(began).keys()
            # Set twice: now, so that other threads leave the workers alone; and below, with what
            # the workers answered. `killed_ns` is an estimate until then, so that a SIGKILL from
            # elsewhere during the questions isn't taken for this agent's.
            self.stopped = WorkerStop(
                reason,
                began,
                sent.name,
                failed_first,
                caused_by,
                killed_ns=killed_ns,
            )
        asked = {rank: pid for rank, pid in alive.items() if rank not in failed_first}
        observations = collect_snapshots(self._channel, self._reporter.node_context, asked)
        # An exception on its way out, or an interpreter that is finalizing: such a worker reports
        # its own failure in a moment. A busy one may not have answered in time, so its stack
        # counts, too.
        answered = observations.items()
        raising_ranks = {
            rank
            for rank, worker in answered
            if worker.raised_at or parse_position(worker.stack).is_finalizing
        }
        leaving_ranks = (
            self._await_reports_of_raising(raising_ranks) if reason != TERMINATED else frozenset()
        )
        # `failed_first` grows again by workers that ended by this same signal while they were
        # asked: this agent had not sent it yet. Not if the agent is terminated: that signal may
        # have gone to all processes of the node.
        if reason != TERMINATED:
            failed_first |= {
                rank for rank, process in enumerate(processes) if process.exitcode == -sent
            }
        self.stopped = replace(
            self.stopped, observations=observations, failed_first=failed_first | leaving_ranks
        )
        self._process_stop = ProcessStop(
            processes,
            sent,
            spare=failed_first,
            leaving=leaving_ranks,
            seconds=seconds,
            grace=self.grace,
            find_extra_seconds=find_extra_seconds,
        )
        self._run_stop()

    def resume_stop(self, sent: signal.Signals, seconds: float) -> None:
        """Finish a stop that a signal's exception has interrupted; otherwise a no-op."""
        if not self._is_stopping or self.stopped is None:
            return
        if self._process_stop is None:  # it was interrupted before the workers got their signal
            processes = worker_processes(self._context)
            failed_first = self.stopped.failed_first
            self._process_stop = ProcessStop(
                processes,
                sent,
                spare=failed_first,
                seconds=seconds,
                grace=self.grace,
            )
        self._run_stop()

    def _run_stop(self) -> None:
        if self._process_stop is None or self.stopped is None:
            return
        try:
            self._process_stop.run()
            self._is_stopping = False
        finally:
            # A SIGKILL before this moment came from elsewhere. It is known only now: the time may
            # have been lengthened.
            killed_ns = int(self._process_stop.kill_time * 1e9)
            self.stopped = replace(self.stopped, killed_ns=killed_ns)

    def _await_reports_of_raising(self, local_ranks: set[int]) -> frozenset[int]:
        """Wait a moment for workers with an exception in flight, and return those that report."""
        deadline = time.monotonic() + min(
            time_limits.IN_FLIGHT_GRACE_SECONDS, self._stop_seconds / 2
        )
        reported: set[int] = set()
        while local_ranks - reported and time.monotonic() < deadline:
            time.sleep(time_limits.STOP_POLL_SECONDS)
            # a rank that hangs in its clean-up reports nothing, and is stopped at the deadline
            reported = local_ranks & self.reported().keys()
        return frozenset(reported)


def _is_running(pid: int) -> bool:
    """Whether a worker hasn't begun to end, according to /proc.

    The kernel closes the sockets of an exiting process before the process has ended, so its peers
    may fail first.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return state not in {b"Z", b"X"} and not int(fields[_STAT_FLAGS_INDEX]) & _EXITING
