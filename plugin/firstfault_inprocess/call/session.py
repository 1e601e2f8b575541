"""What a rank holds during a call: its monitor process, and its connections to the store."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import os
import threading
from typing import Any

from firstfault_inprocess.exception import InternalError
from firstfault_inprocess.monitor.process import MonitorProcess
from firstfault_inprocess.options import InProcessOptions
from firstfault_inprocess.progress import ProgressStamper, SharedProgress
from firstfault_inprocess.rank_assignment import State
from firstfault_inprocess.store import Iteration, round_prefix
from firstfault_inprocess.store_host import StoreConnections, StoreHost
from firstfault_torch.compat.torch_worker import serve_env_rendezvous

_calls = itertools.count()


class CallSession:
    """What a rank holds from the beginning of a call to its end.

    Beginning a session forks the monitor process, finds the store, and meets all ranks.

    Attributes:
        progress: what this process shares with its monitor process.
        atomic_lock: held by a block of the function that must not be interrupted.
        connections: those on which the function may wait; a restart ends the wait.
        prefix: of the call's keys in the store.
        store: this rank's connection to the store.
        watching: a second one, for the monitor thread: its wait blocks the connection for the whole
            iteration.
        iteration: the current iteration; -1 before the first.

    Raises:
        firstfault_inprocess.exception.RestartError: the call can't begin here.
    """

    def __init__(self, options: InProcessOptions, state: State) -> None:
        self.options = options
        self.barrier_timeout = dt.timedelta(seconds=options.seconds("barrier_timeout"))
        self.progress = SharedProgress()
        self.atomic_lock = threading.RLock()
        self.connections = StoreConnections()
        self.prefix = f"{round_prefix()}/{next(_calls)}"
        self.iteration: Iteration | None = None
        self._state = state
        self._process = os.getpid()
        self._environment = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
        self._stack = contextlib.ExitStack()
        # If a step below fails, the steps before it are undone in reverse order; `pop_all` hands
        # them to `close`.
        with contextlib.ExitStack() as opening:
            # The forks come first, in StoreHost and MonitorProcess: their children must not inherit
            # a connection to the store, nor be forked while the stamping thread runs.
            store_host = StoreHost(options, state.rank, self.prefix)
            self.monitor = MonitorProcess(
                self.progress,
                state.initial_rank,
                self.prefix,
                store_host.connect,
                options,
            )
            self.monitor.start()
            opening.callback(self.monitor.close)
            stamping = ProgressStamper(self.progress, options.seconds("progress_watchdog_interval"))
            opening.callback(stamping.end)
            self.store = store_host.begin()
            self.watching = store_host.connect()
            opening.callback(serve_env_rendezvous(self._meet))
            opening.callback(self._restore_environment)
            # Iteration -1 is only a barrier. The monitor process doesn't report a rank that dies in
            # phase IDLE: its peers raise BarrierTimeout here, or miss its heartbeats in iteration
            # 0.
            self.iteration = beginning = self.open_iteration(-1, state.world_size)
            beginning.arrive()
            beginning.await_all(self.barrier_timeout)
            self._stack = opening.pop_all()

    @property
    def is_in_forked_child(self) -> bool:
        """Whether this process is a child that the function forked;
        monitor process and store are its parent's.
        """
        return os.getpid() != self._process

    def open_iteration(self, number: int, world_size: int) -> Iteration:
        """Return an iteration's part of the store, over this rank's connection."""
        return Iteration(
            self.store,
            self.prefix,
            number,
            world_size,
        )

    def begin_iteration(self, state: State) -> Iteration:
        """Begin the iteration of a state: its process groups meet there from now on."""
        self._state = state
        self.iteration = iteration = self.open_iteration(state.iteration, state.world_size)
        self.progress.begin(state.iteration, state.rank, state.world_size)
        os.environ.update(state.distributed_variables())
        return iteration

    def close(self) -> None:
        """End the monitor process and the thread, and hold no connection any longer."""
        self._stack.close()
        self.iteration = self.store = self.watching = None

    def _meet(self, timeout: dt.timedelta | None) -> tuple[Any, int, int]:
        """Return where process groups of this iteration meet,
        on a connection that ends with the iteration.
        """
        iteration, state = self.iteration, self._state
        if iteration is None:
            raise InternalError("a process group was made before the first iteration")
        # A separate connection: `shut_down` ends a wait on it without breaking this rank's own.
        connection = self.connections.open(self.store.clone, getattr(self.store, "port", None))
        if timeout is not None:
            connection.set_timeout(timeout)
        return (
            iteration.with_connection(connection).open_substore("env"),
            state.active_rank or 0,
            state.active_world_size or 1,
        )

    def _restore_environment(self) -> None:
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
