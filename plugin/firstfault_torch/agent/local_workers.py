"""This node's worker processes: what they report, and how they end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest

from firstfault_torch import time_limits
from firstfault_torch.agent.deaths import WorkerExit, WorkerSnapshot
from firstfault_torch.agent.exit_watch import ExitWatch
from firstfault_torch.agent.reporter import Reporter
from firstfault_torch.agent.signals import suppress_internal_errors_in_main
from firstfault_torch.agent.stop_processes import WorkerStopper, worker_sessions
from firstfault_torch.agent.timers import TimerServer, open_timers
from firstfault_torch.compat.torch_agent import (
    close_program_files,
    collect_results,
    find_ranks_without_result,
    traceback_files,
    worker_processes,
)
from firstfault_torch.guard import (
    call_with_timeout,
    start_in_thread,
    suppress_internal_errors,
)
from firstfault_torch.node.channel import AgentChannel, from_message, handled_from_message
from firstfault_torch.node.stderr_relay import StderrRelay
from firstfault_torch.node_context import LOCAL_RANK_VARIABLE, WORKER_VARIABLE, NodeContext
from firstfault_torch.watchdog import Watchdog
from firstfault_torch.watchdog.timers import Timer


class LocalWorkers:
    """Watches the workers of one node, round after round.

    A thread calls `wake` when a worker has ended or reported a failure. Siblings of a failure have
    `stop_seconds` to end after the signal before they are killed, healthy workers
    `healthy_seconds`, by default as long.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        node_context: NodeContext,
        reporter: Reporter,
        stop_seconds: float,
        wake: Callable[[], None],
        *,
        watchdog: Watchdog | None = None,
        healthy_seconds: float | None = None,
    ) -> None:
        self._reporter = reporter
        self._wake = wake
        self._context: Any = None
        self._watch: ExitWatch | None = None
        self._stderr: StderrRelay | None = None
        self._channel: AgentChannel | None = None
        self._watchdog = watchdog
        self._timers: TimerServer | None = None
        self.are_programs = False
        """Whether the workers are programs, which torch starts by themselves, and not functions."""
        self._forgotten: frozenset[int] = frozenset()
        self.finished: frozenset[int] = frozenset()
        """What `find_finished` returned last in this round."""
        if node_context.files is not None:
            with suppress_internal_errors("opening the channel to the workers"):
                self._channel = AgentChannel(node_context.files, wake)
        self.stopper = WorkerStopper(
            reporter, self._channel, stop_seconds, healthy_seconds or stop_seconds
        )

    # --- rounds -----------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Forget the round before."""
        self.stopper.begin_round()
        self._forgotten = frozenset()
        self.finished = frozenset()
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
        self.stopper.watch(worker_processes(context))
        # After the fork, as its thread's locks must not be inherited. A worker that has died since
        # then isn't missed: its pidfd is readable at once.
        self._watch = ExitWatch(worker_processes(context), self._wake)
        if self._timers is not None:
            with suppress_internal_errors("watching the workers' deadlines"):
                self._timers.start(
                    [process.pid for process in worker_processes(context)], self.stopper.expire
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
        self.stopper.close()

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
        exiting = self.stopper.find_exiting(time.monotonic_ns())
        failed = {
            rank: int(report["monotonic_ns"])
            for rank, report in self.reported().items()
            if "monotonic_ns" in report
        }
        return {**exiting, **failed}

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
        stop = self.stopper.stopped
        pids = [process.pid for process in worker_processes(self._context)]
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
        stop = self.stopper.stopped
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
                self._reporter.document(worker_exit, self.stopper.stopped, only_held=True)

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
            worker_exit,
            self.stopper.stopped,
            expiry=self.stopper.expired.get(rank),
            seen=last_state,
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
        if self._watch is None or self.stopper.stopped is not None:
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
        self.stopper.expire({timer.pid: timer for timer in timers})
