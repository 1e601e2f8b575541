"""The monitor process beside each worker: it reports the worker's death, and ends it if nothing else can interrupt it.

It is forked before the worker has connections, keeps none of its files, and lives until the worker's call is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from firstfault_torch.budgets import MONITOR_LINGER_S, MONITOR_PATIENCE_S, MONITOR_STORE_S
from firstfault_torch.inprocess.monitor.detached import Process, start_detached
from firstfault_torch.inprocess.monitor.progress import Phase, Progress
from firstfault_torch.inprocess.store import Fault, FaultKind, Iteration, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault_torch.inprocess.options import InProcessOptions


@dataclass
class Watcher:
    """The monitor process of a worker: what runs in it, and how the worker starts and ends it."""

    progress: Progress
    """Where the worker says what it does."""
    initial_rank: int
    """The worker's."""
    prefix: str
    """Of the call in the store."""
    connect: Callable[[], Any]
    """Makes a connection to the store, in the monitor process."""
    options: InProcessOptions

    def __post_init__(self) -> None:
        self.worker = os.getpid()
        self.pid: int | None = None
        self._connection: Any = None
        self._reported = -1
        self._killed = False
        self._beats: dict[tuple[int, int], tuple[int, float]] = {}
        self._next_beat = 0.0
        self._asking: threading.Thread | None = None

    def start(self) -> None:
        """Start the monitor process of this worker.

        Raises:
            firstfault_torch.inprocess.exception.InternalError: it does not start.
        """
        logfile = (self.options.monitor_process_logfile or "").format(rank=self.initial_rank) or None
        name = f"the monitor process of rank {self.initial_rank}"
        self.pid = start_detached(self.begin, self.watch, name, logfile)

    def close(self) -> None:
        """End the monitor process."""
        self.progress.phase = Phase.CLOSED
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    # --- in the monitor process -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open the worker's process."""
        self._process = Process(self.worker)

    def watch(self) -> None:
        """Watch until the worker's call is over."""
        while not self._process.has_died(self.options.seconds("monitor_process_interval")):
            if self.progress.phase == Phase.CLOSED:
                return
            self._look()
        if self.progress.phase not in {Phase.IDLE, Phase.CLOSED, Phase.LEFT}:
            self._with_store(self._report_death, patient=True)

    # --- the worker ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        progress = self.progress
        stalled, ending = progress.stalled_seconds, progress.ending_seconds
        if stalled > self.options.seconds("soft_timeout") and self._reported != progress.iteration:
            what = f"no progress for {stalled:.1f} s"
            if self._with_store(partial(self._report, FaultKind.SOFT_TIMEOUT, what)):
                self._reported = progress.iteration
        if max(stalled, ending) > self.options.seconds("hard_timeout"):
            what = f"no progress for {stalled:.1f} s" if stalled > ending else f"not interrupted for {ending:.1f} s"
            self._killed = self._with_store(partial(self._report, FaultKind.HARD_TIMEOUT, what))
            self._kill()
        if progress.phase not in {Phase.IDLE, Phase.LEFT, Phase.CLOSED}:
            self._with_store(self._beat)

    def _with_store(self, call: Callable[[], None], *, patient: bool = False) -> bool:
        """Call what needs the store; return whether it succeeded, or may still succeed.

        A store that is lost or frozen must not keep the worker from being killed. Its thread is also slow, because it
        resolves the address of each client: torch's libuv store waits for the name service then.

        Args:
            call: what to do.
            patient: wait for the call before, which may take long.
        """
        if self._asking is not None and self._asking.is_alive():
            if not patient:
                return False
            self._asking.join(MONITOR_PATIENCE_S)
            if self._asking.is_alive():
                self._connection = None  # it may wait for ever on that one

        failed = threading.Event()

        def run() -> None:
            try:
                call()
            except Exception:  # noqa: BLE001 - the worker learns of a lost store by itself
                failed.set()
                self._connection = None
                os.write(2, traceback.format_exc().encode())

        self._asking = threading.Thread(target=run, daemon=True)
        self._asking.start()
        self._asking.join(MONITOR_PATIENCE_S if patient else MONITOR_STORE_S)
        return not failed.is_set()

    def _kill(self) -> None:
        """Let the worker end itself on SIGTERM, then kill it."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._send(number)
        if not self._process.has_died(self.options.seconds("termination_grace_time")):
            self._send(signal.SIGKILL)
            self._process.has_died(MONITOR_LINGER_S)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker, number)

    def _report_death(self) -> None:
        """Report the worker's death in the iteration in which the others can still act on it."""
        iteration, rank = self._iteration(), self.progress.rank
        agreed = iteration.agreed()
        if agreed is not None and rank not in agreed:
            # all had arrived: it counts as a fault of the next iteration, in which it has its new rank
            fault = self._fault(FaultKind.TERMINATED, "between two iterations", rank)
            following = Iteration(self._connection, self.prefix, iteration.number + 1, iteration.world_size)
            following.interrupt(fault)
            return
        if iteration.outcome() is Outcome.COMPLETED:
            return
        if not self._killed:
            iteration.interrupt(self._fault(FaultKind.TERMINATED, "its process ended"))
        iteration.leave(rank)
        if self.progress.phase != Phase.ARRIVED:
            iteration.arrive()

    def _report(self, kind: FaultKind, what: str) -> None:
        self._iteration().interrupt(self._fault(kind, what))

    def _fault(self, kind: FaultKind, what: str, rank: int | None = None) -> Fault:
        rank = self.progress.rank if rank is None else rank
        return Fault(rank, kind, what, time.time_ns(), self.initial_rank)

    def _iteration(self) -> Iteration:
        if self._connection is None:
            self._connection = self.connect()
        return Iteration(self._connection, self.prefix, self.progress.iteration, self.progress.world_size)

    # --- the others ---------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send a heartbeat, and look for the next rank's; report a rank of which nothing was heard for long."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + self.options.seconds("heartbeat_interval")
        iteration, rank, world = self._iteration(), self.progress.rank, self.progress.world_size
        iteration.beat(rank, self.initial_rank)
        for step in range(1, world):
            other = (rank + step) % world
            if not self._is_silent(iteration, other, now):
                return
            if iteration.outcome() is Outcome.COMPLETED:
                return
            if other in iteration.gone():
                continue  # its monitor process is gone too, so this one checks the next rank
            began_as = iteration.initial_rank(other)
            what = "no heartbeat of its monitor process"
            iteration.interrupt(Fault(other, FaultKind.UNRESPONSIVE, what, time.time_ns(), began_as))
            iteration.leave(other)
            iteration.arrive()

    def _is_silent(self, iteration: Iteration, other: int, now: float) -> bool:
        """Whether a rank has sent nothing for so long."""
        key = (iteration.number, other)
        beats, since = self._beats.get(key, (-1, now))
        current = iteration.beats(other)
        if current != beats:
            self._beats[key] = (current, now)
            return False
        return now - since >= self.options.seconds("heartbeat_timeout")
