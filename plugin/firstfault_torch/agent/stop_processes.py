"""Carries out the stop of worker processes: asks, signals and kills them, and what they started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from firstfault.exceptions.stack_position import parse_position
from firstfault.model import ExpiredDeadline
from firstfault.recorder.folder import get_stack_size, get_stack_tail
from firstfault.recorder.orphans import kill_orphan_processes
from firstfault_torch import time_limits
from firstfault_torch.agent.deaths import ExpiredWorker, WorkerSnapshot, WorkerStop
from firstfault_torch.agent.reporter import Reporter
from firstfault_torch.descriptors import KeptDescriptor
from firstfault_torch.guard import logger, suppress_internal_errors
from firstfault_torch.node.channel import AgentChannel, from_message, handled_from_message
from firstfault_torch.node.stacks import ask_for_stacks
from firstfault_torch.node_context import NodeContext
from firstfault_torch.protocol.stopping import (
    AwaitEnds,
    CollectSnapshots,
    DeadlinesExpired,
    EndsAwaited,
    Kill,
    KillAtDeadline,
    NodeStop,
    Ranks,
    SendSignal,
    StopBegan,
    StopEvent,
    StopInstruction,
    StopWorkers,
    WorkersAnswered,
)
from firstfault_torch.watchdog.timers import Timer

STAT_FLAGS_INDEX = 5
"""Index of the kernel's flags of a process among the fields after its state: proc(5), field 9."""
PROCESS_EXITING = 0x4
"""The kernel's PF_EXITING."""

worker_sessions: set[int] = set()
"""Process ids of workers that are programs and lead a session. Workers that are functions stay in
this process's session.
"""


def collect_snapshots(
    channel: AgentChannel | None, node_context: NodeContext, pids: dict[int, int]
) -> dict[int, WorkerSnapshot]:
    """Return stacks and state of living workers by local rank, within a fraction of a second.

    An exception that is still inside the task function isn't included: the worker documents it
    itself. Stacks and state are requested one after another: faulthandler reads the frames of all
    threads without the GIL, and may crash a worker that runs another thread at that moment.
    """
    files = node_context.files
    if channel is None or files is None or not pids:
        return {}
    earlier_sizes = {
        rank: get_stack_size(files.worker(node_context.round, rank).stacks) for rank in pids
    }
    stacks: dict[int, str] = {}
    with suppress_internal_errors("asking workers for their stacks"):
        stacks = ask_for_stacks(
            files,
            node_context.round,
            pids,
            time_limits.WORKER_QUERY_TIMEOUT_SECONDS,
        )
    answers = channel.ask(pids, time_limits.WORKER_QUERY_TIMEOUT_SECONDS)
    # If the program replaced the handler, the worker gets no signal, and writes its stacks before
    # it answers. So its file is complete once the answer has arrived.
    for rank in answers.keys() - stacks.keys():
        stacks[rank] = get_stack_tail(
            files.worker(node_context.round, rank).stacks, earlier_sizes[rank]
        )
    found = {rank: answers.get(rank, {}) for rank in pids}
    return {
        rank: WorkerSnapshot(
            stacks.get(rank, ""), *from_message(answer), handled_from_message(answer)
        )
        for rank, answer in found.items()
    }


class WorkerStopper:
    """Carries out what `NodeStop` decides about the worker processes of one node.

    Two threads may end a worker: the main thread stops all, and a thread that watches deadlines or
    progress kills one. Whichever takes the lock first decides what the worker's document gives as
    the reason.
    """

    def __init__(
        self,
        reporter: Reporter,
        channel: AgentChannel | None,
        stop_seconds: float,
        healthy_seconds: float,
    ) -> None:
        self._reporter = reporter
        self._channel = channel
        self._limits = stop_seconds, healthy_seconds
        self._lock = threading.Lock()
        """Held while the machine takes an event together with what that depends on."""
        self._processes: Sequence[Any] = ()
        self._pidfds: dict[int, KeptDescriptor] = {}
        """Descriptors of the workers by local rank, used and closed under the lock."""
        self.begin_round()

    def begin_round(self) -> None:
        """Forget the round before."""
        self._machine = NodeStop(*self._limits)
        self._observations: dict[int, WorkerSnapshot] = {}
        self._signalled: set[int] = set()
        self.expired: dict[int, ExpiredWorker] = {}
        """The deadlines for which workers of the round were killed, by local rank."""

    def watch(self, processes: Sequence[Any]) -> None:
        """Stop these processes, in order of local rank; none of them has been reaped."""
        self._processes = processes
        for rank, process in enumerate(processes):
            # AttributeError: Python was built with old headers
            with contextlib.suppress(OSError, AttributeError):
                self._pidfds[rank] = KeptDescriptor(os.pidfd_open(process.pid))

    def close(self) -> None:
        """Close the descriptors of the processes: the next round may fork."""
        with self._lock:
            for descriptor in self._pidfds.values():
                descriptor.close()
            self._pidfds = {}

    # --- what is known ------------------------------------------------------------------------

    @property
    def stopped(self) -> WorkerStop | None:
        """Why this agent stopped the workers of the round, or None if it didn't."""
        state = self._machine.state
        request = state.request
        if request is None:
            return None
        return WorkerStop(
            request.reason,
            state.began_ns,
            request.sent,
            state.failed_first,
            request.cause,
            self._observations,
            state.killed_ns,
        )

    @property
    def stop_seconds(self) -> float:
        """How long the workers may take to end: as long as in torch,
        unless one of them has failed.
        """
        return self._machine.stop_seconds

    def find_exiting(self, before_ns: int) -> dict[int, int]:
        """Return when programs of workers had begun to exit in the middle, by local rank."""
        if self._channel is None:
            return {}
        # the process that the agent has started: a wrapper may run several programs
        pids = {rank: process.pid for rank, process in enumerate(self._processes)}
        return {
            rank: report["monotonic_ns"]
            for rank, report in self._channel.exiting().items()
            if pids.get(rank) == report["pid"] and report["monotonic_ns"] < before_ns
        }

    # --- events and instructions --------------------------------------------------------------

    def handle(self, event: StopEvent) -> list[StopInstruction]:
        """Return what an event leads to; any thread may call this."""
        with self._lock:
            return self._machine.handle(event, time.monotonic())

    def carry_out(self, instruction: StopInstruction) -> list[StopInstruction]:
        """Carry out an instruction on the workers; return what follows from it."""
        match instruction:
            case StopWorkers():
                return self._begin(instruction)
            case CollectSnapshots():
                return self.handle(self._ask(instruction))
            case SendSignal(ranks):
                self._signal(ranks)
            case AwaitEnds():
                return self.handle(self._await_ends())
            case Kill(ranks):
                for rank in ranks:
                    self._send(rank, signal.SIGKILL)
            case _:
                pass
        return []

    def expire(self, timers: dict[int, Timer]) -> None:
        """Ask workers for stacks and state, then kill them; called by the thread that watches their
        deadlines, or progress, with the timers by process id.
        """
        ranks = {process.pid: rank for rank, process in enumerate(self._processes)}
        with self._lock:
            asked = {ranks[pid]: pid for pid in timers if self._is_own(ranks[pid])}
        observations: dict[int, WorkerSnapshot] = {}
        with suppress_internal_errors("asking workers for their state at a deadline"):
            # Without the lock: it takes up to 0.6 s, and a failure that is found now must stop the
            # workers at once.
            observations = collect_snapshots(self._channel, self._reporter.node_context, asked)
        killed: dict[int, Timer] = {}
        # What was true before the questions may not be now: a worker may have ended on its own.
        with self._lock:
            running = {
                rank for rank, pid in asked.items() if self._is_own(rank) and is_running(pid)
            }
            event = DeadlinesExpired(frozenset(running))
            for instruction in self._machine.handle(event, time.monotonic()):
                if isinstance(instruction, KillAtDeadline):
                    killed = {rank: timers[asked[rank]] for rank in instruction.local_ranks}
                    self._kill_at_deadline(killed, observations)
        for rank, timer in killed.items():
            text = self.expired[rank].deadline.text
            logger.warning("local rank %d (pid %d) was killed: %s", rank, timer.pid, text)

    # --- parts --------------------------------------------------------------------------------

    def _begin(self, request: StopWorkers) -> list[StopInstruction]:
        # The lock keeps a deadline that expires now from killing a worker that this stop is about
        # to signal.
        with self._lock:
            began_ns = time.monotonic_ns()
            alive = self._find_running()
            ending = {rank for rank in alive if not is_running(self._processes[rank].pid)}
            exiting = self.find_exiting(began_ns).keys()
            event = StopBegan(request, began_ns, alive, frozenset(ending), frozenset(exiting))
            return self._machine.handle(event, time.monotonic())

    def _ask(self, instruction: CollectSnapshots) -> WorkersAnswered:
        """Ask workers, and wait a moment for those with an exception on its way out. One that hangs
        in its clean-up reports nothing, and is stopped.
        """
        pids = {rank: self._processes[rank].pid for rank in sorted(instruction.local_ranks)}
        self._observations = collect_snapshots(self._channel, self._reporter.node_context, pids)
        raising = find_raising(self._observations)
        until = time.monotonic() + instruction.report_seconds

        def find_reported() -> Ranks:
            failed = self._channel.failed() if self._channel is not None else {}
            return raising & failed.keys()

        while raising - find_reported() and time.monotonic() < until:
            time.sleep(time_limits.STOP_POLL_SECONDS)
        sent = -self._get_signal()
        ended = {rank for rank, process in enumerate(self._processes) if process.exitcode == sent}
        return WorkersAnswered(find_reported(), frozenset(ended))

    def _await_ends(self) -> EndsAwaited:
        while not self._machine.state.is_over(self._find_running(), time.monotonic()):
            time.sleep(time_limits.STOP_POLL_SECONDS)
        return EndsAwaited(self._find_running())

    def _find_running(self) -> Ranks:
        return frozenset(
            rank for rank, process in enumerate(self._processes) if process.exitcode is None
        )

    def _get_signal(self) -> signal.Signals:
        request = self._machine.state.request
        return signal.Signals[request.sent] if request is not None else signal.SIGTERM

    def _signal(self, ranks: Ranks) -> None:
        # A process gets the signal once: its handler may be saving a checkpoint, and a second
        # signal would interrupt that and begin another one.
        for rank in sorted(ranks - self._signalled):
            self._send(rank, self._get_signal())
            self._signalled.add(rank)

    def _send(self, rank: int, number: signal.Signals) -> None:
        process = self._processes[rank]
        # Checked right before each signal: `exitcode` polls with waitpid. While it is None the
        # process isn't reaped, so the kernel can't have given its number to another process.
        if process.exitcode is not None:
            return
        with contextlib.suppress(ProcessLookupError):  # it may just have ended
            if hasattr(process, "send_signal"):
                process.send_signal(number)
            else:
                os.kill(process.pid, number)

    def _kill_at_deadline(
        self, timers: dict[int, Timer], observations: dict[int, WorkerSnapshot]
    ) -> None:
        for rank, timer in timers.items():
            deadline = ExpiredDeadline(
                timer.scope,
                round(timer.seconds, 3),
                timer.heartbeat,
                timer.since,
            )
            self.expired[rank] = ExpiredWorker(deadline, observations.get(rank, WorkerSnapshot()))
        # All are killed before a line is logged, because a log may block. During that time the
        # first death would break the connections of the next worker, and make torch send it
        # SIGTERM: it would exit with an exception.
        for rank, timer in timers.items():
            # Through a pidfd: the main thread may have reaped the worker since the check, and
            # another process may have its number.
            descriptor = self._pidfds.get(rank)
            with contextlib.suppress(ProcessLookupError):
                if descriptor is not None and descriptor.is_ours:
                    signal.pidfd_send_signal(descriptor.number, signal.SIGKILL)
                else:  # no pidfds in this kernel or sandbox, or the program has closed it
                    os.kill(timer.pid, signal.SIGKILL)

    def _is_own(self, rank: int) -> bool:
        """Whether the worker with this local rank still exists, and its number is its own;
        called under the lock.
        """
        descriptor = self._pidfds.get(rank)
        if descriptor is not None and descriptor.is_ours:
            # It becomes readable when the worker has ended, also for one that isn't a child of this
            # process: with torch's start method "forkserver" another process forks the workers, and
            # reaps them.
            poll = select.poll()
            poll.register(descriptor.number, select.POLLIN)
            return not poll.poll(0)
        try:
            os.waitid(os.P_PID, self._processes[rank].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False  # reaped, or never a child
        return True


def find_raising(observations: Mapping[int, WorkerSnapshot]) -> Ranks:
    """Return the workers with an exception on its way out, or an interpreter that is finalizing:
    such a worker reports its own failure in a moment.
    """
    # A busy one may not have answered in time, so its stack counts, too.
    return frozenset(
        rank
        for rank, worker in observations.items()
        if worker.raised_at or parse_position(worker.stack).is_finalizing
    )


def is_running(pid: int) -> bool:
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
    return state not in {b"Z", b"X"} and not int(fields[STAT_FLAGS_INDEX]) & PROCESS_EXITING


def kill_orphans(node_context: NodeContext, seconds: float) -> None:
    """End the processes that this node's workers started, after the workers have ended;
    not those in other sessions.

    They get SIGTERM, and SIGKILL after `seconds`.
    """
    if node_context.files is not None:
        with suppress_internal_errors("ending the processes that workers have left"):
            kill_orphan_processes(node_context.files.path, seconds, frozenset(worker_sessions))
