"""Recording in a training process: documents the exception that leaves the task function.

The document is durable before the exception leaves this module, and so before the process closes
its sockets: the root cause is recorded before any peer fails. The way of an exception:

    recorded()                  the block around the task function
      WorkerMonitor.fails()     is it a failure, or an answer to the agent's signal?
        ExceptionDocuments      exception -> ExceptionInfo -> WorkerError; torch's error.json
          record_error()        `node.document_writer`: bytes; spool, recorder, storage; returns the
                                receipt, too
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from firstfault.model import Place
from firstfault_torch import time_limits, watchdog
from firstfault_torch.compat.torch_worker import shut_down_gloo_connections
from firstfault_torch.engine import Engine
from firstfault_torch.failures import torch_error_file
from firstfault_torch.failures.capture import describe_type, find_exception_behind_exit
from firstfault_torch.failures.failure_records import lost_agent
from firstfault_torch.guard import ignore_worker_signals, suppress_internal_errors
from firstfault_torch.node.channel import PULSE, STATE, WorkerChannel, to_message
from firstfault_torch.node.document_writer import record_error, spool_for_agent
from firstfault_torch.node.fork_gate import wait_until_all_forked
from firstfault_torch.node.stacks import register_stacks, restore_stacks, write_unasked
from firstfault_torch.node.stderr_relay import redirect_stderr
from firstfault_torch.node_context import OTHERS_CONTINUE_FIELD, Moment, NodeContext
from firstfault_torch.places import get_worker_place
from firstfault_torch.worker import process_state
from firstfault_torch.worker.exception_documents import ExceptionDocuments
from firstfault_torch.worker.handled_exceptions import HandledExceptions, list_within
from firstfault_torch.worker.in_flight import (
    InFlight,
    get_moment,
    handled_exception,
    is_clean_exit,
    watch_process_groups,
)
from firstfault_torch.worker.pulse import pulse, snapshot

_monitors: list[WorkerMonitor] = []


def current_monitor() -> WorkerMonitor | None:
    """Return the monitor of this process, or None if nothing is recorded here."""
    return _monitors[-1] if _monitors else None


def run_recorded(engine: Engine, function: Callable[..., Any], *args: Any) -> Any:
    """Return what ``function(*args)`` returns, in a worker process;
    an exception is recorded and passes unchanged.
    """
    with recorded(engine):
        return function(*args)


@contextlib.contextmanager
def recorded(engine: Engine) -> Iterator[WorkerMonitor]:
    """Make the exception that leaves this block durable, then let it pass unchanged;
    yield the process's monitor.

    It waits for at most the upload deadline. A clean ``sys.exit()`` isn't a failure. What leaves
    the block in a process that it has forked isn't this worker's, and isn't recorded.
    """
    worker = os.getpid()
    agent = os.getppid()
    monitor = open_monitor(engine)
    try:
        yield monitor
    except BaseException as error:
        # A child that this worker forked may leave the block, too; it has a copy of the monitor.
        if os.getpid() == worker:
            record_end(monitor, error, agent)
        raise
    else:
        if os.getpid() == worker:
            with suppress_internal_errors("withdrawing handled exceptions"):
                monitor.in_flight.withdraw_handled_except(None)
            with suppress_internal_errors("reporting the end of the function"):
                monitor.finishes()
            monitor.close()
    finally:
        _monitors.remove(monitor)


def open_monitor(
    engine: Engine, *, is_program: bool = False, alone: tuple[NodeContext, Place] | None = None
) -> WorkerMonitor:
    """Return the monitor of this process, which watches it from now on.

    `is_program`: a program was started as one of several, and with its stderr where that goes.
    `alone`: where and how a process without an agent records.
    """
    monitor = WorkerMonitor(engine, alone)
    with suppress_internal_errors("preparing to record"):
        monitor.open(is_program=is_program)
    _monitors.append(monitor)
    return monitor


def record_end(monitor: WorkerMonitor, error: BaseException, agent: int) -> None:
    """Record the exception that ends this worker, and stop watching;
    `agent` is the process that started it.
    """
    if not is_clean_exit(error):
        monitor.in_flight.escaped_error = (
            error  # at once: the agent that is about to stop this process waits for it
        )
    # a handler, like torch's in a forked worker, would raise in the middle of recording, and the
    # kernel repeats the parent-death signal for each thread of a killed agent
    with ignore_worker_signals(handled_only=not _is_answer_to_signal(error)):
        with suppress_internal_errors("recording an exception"):
            if is_clean_exit(error):
                monitor.exits(error)
            elif _is_answer_to_signal(error) and _await_parent_death(agent):
                # terminated because the agent died: the worker reports it
                if monitor.node_context is not None:
                    _record_agent_death(monitor.node_context, monitor.place, agent)
            else:
                monitor.fails(error)
        monitor.close()


class WorkerMonitor:
    """Reports a worker's failure and answers its agent while the function runs; see `open_monitor`.

        open       siblings are forked -> watch process groups and threads, redirect stderr ->
                   listen to the agent
        answer     the agent asks, in the channel's thread: _asked -> record what is in flight ->
                   _answered
        fails      an exception left the task function: before _answered its own failure, afterwards
                   an answer
        exits      a clean exit: a document on the node, uploaded only if the node fails
        finishes   the function has returned, or the program has run to its end: the agent learns it
        close      undo the hooks; the channel stays open

    The main thread calls all but `answer`, which may run at the same time as any of them.
    """

    def __init__(self, engine: Engine, alone: tuple[NodeContext, Place] | None = None) -> None:
        self._engine = engine
        self._has_agent = alone is None
        self.node_context = NodeContext.from_environment() if alone is None else alone[0]
        """None if recording is off."""
        self.place = Place() if alone is None else alone[1]
        """This process's; empty if recording is off."""
        if alone is None and self.node_context is not None:
            self.place = get_worker_place(self.node_context)
        node = self.node_context.files if self.node_context is not None else None
        local_rank = self.place.local_rank
        self._files = (
            node.worker(self.place.round, local_rank)
            if node is not None and local_rank is not None
            else None
        )
        self._channel: WorkerChannel | None = None
        self._undo: list[Callable[[], None]] = []
        self._before_stop: list[Callable[[], None]] = []
        # Set in the channel's thread at the beginning and at the end of `answer`, read in the main
        # thread. The agent sends its signal after the answer, or without it when its time is up:
        # see `fails`.
        self._asked = threading.Event()
        self._answered = threading.Event()
        self.others_continue = False
        """Whether the remaining ranks continue without this one when its exception
        leaves the task function.
        """
        self.in_flight = InFlight(partial(self._write, in_flight=True), self._withdraw)
        self._handled = HandledExceptions()
        self._documents = (
            ExceptionDocuments(engine, self.node_context, self._handled)
            if self.node_context is not None
            else None
        )

    def open(self, *, is_program: bool = False) -> None:
        """Begin to watch; without a recording nothing is watched."""
        if self.node_context is None:
            return
        node = self.node_context.files
        if not is_program and node is not None:
            with suppress_internal_errors("waiting for this node's other workers to start"):
                wait_until_all_forked(node)
        # While nothing of the task has run: later the program may have no descriptor left to hold
        # back.
        process_state.hold_files_back()
        # a function's result is still to come: its return is its end
        on_last_call = self.finishes if is_program else _do_nothing
        self._undo.append(watch_process_groups(self.in_flight, on_last_call))
        self._undo.append(process_state.watch_threads())
        self._handled.watch()
        self._undo.append(self._handled.close)
        self._undo.append(watchdog.release_all)
        if node is None or self._files is None:
            return
        if not is_program:
            with suppress_internal_errors("sending stderr through the agent"):
                redirect_stderr(self._files)
        with suppress_internal_errors("offering stacks"):
            register_stacks(self._files)
        # Last: the agent may ask as soon as the socket exists, and all that answers it is ready.
        if self._has_agent:
            local_rank = self.place.local_rank or 0
            self._channel = WorkerChannel(
                node,
                self.place.round,
                local_rank,
                self.answer,
                self._handled.refill,
            )

    def at_close(self, call: Callable[[], None]) -> None:
        """Call `call` when the task function has ended."""
        self._undo.append(call)

    def before_stop(self, call: Callable[[], None]) -> None:
        """Call `call` in a thread when the agent is about to stop this process; it has 0.1 s."""
        self._before_stop.append(call)

    def close(self) -> None:
        """Stop watching. The channel to the agent stays open:
        the agent may ask a process that ends slowly.
        """
        for undo in reversed(self._undo):
            with suppress_internal_errors("ending the recording"):
                undo()

    def fails(self, error: BaseException) -> None:
        """Make a document about an exception that has left the task function durable,
        and notify the agent.
        """
        # First: documents about exceptions that were handled are withdrawn in any case, also if
        # `error` isn't a failure.
        self.in_flight.withdraw_handled_except(error)
        # After the answer any exception may be what the signal caused. Before it, only one that a
        # signal's handler raises: the agent may have stopped waiting for a slow answer and sent the
        # signal, but an error of the training is real.
        may_be_answer = self._answered.is_set() or (
            self._asked.is_set() and _is_answer_to_signal(error)
        )
        if may_be_answer and not self.in_flight.began_before_asked(error):
            # it began after the agent's question, so it is what the training makes of the agent's
            # signal: a framework's handler may raise anything
            return
        moment = get_moment(error)
        error_file = os.environ.get(torch_error_file.ERROR_FILE_VARIABLE)
        if (
            not self.others_continue
            and error_file
            and self._engine.name_error(error, describe_type(error)).recoverable
        ):
            # also if recording is off
            with suppress_internal_errors("marking an exception as recoverable"):
                torch_error_file.mark_recoverable(error_file)
        # if the remaining ranks continue, the document counts only if they fail: a node's success
        # withdraws it
        name = self._write(error, in_flight=self.others_continue)
        # After the document is durable: the agent stops this worker's siblings at once, and refers
        # to the document by name.
        if self._channel is not None and name:
            what = type(find_exception_behind_exit(error)).__name__
            content: dict[str, Any] = {
                "what": what,
                "document": name,
                "monotonic_ns": moment.monotonic_ns,
            }
            self._channel.report_failure(
                content | ({OTHERS_CONTINUE_FIELD: True} if self.others_continue else {})
            )

    def exits(
        self, error: BaseException, *, is_kept: bool = True, is_announced: bool = False
    ) -> None:
        """Record a clean exit before the task function's end: not a failure,
        but perhaps why a peer waits.

        torch keeps the process of a function until its siblings have ended, but not that of a
        program. A process with an exit that `is_announced` ends without a stop by the agent.
        """
        self.in_flight.withdraw_handled_except(None)
        if self._asked.is_set():
            return  # a handler's answer to the signal with which the agent stops this process
        if self._channel is not None and is_announced:
            self._channel.report_exit()
        if self._write(error, held=True) and is_kept:
            threading.Thread(target=_leave_later, name="firstfault-leave", daemon=True).start()

    def finishes(self) -> None:
        """Inform the agent that the function has returned, or the program has run to its end.

        What fails from here on is its teardown, unless other threads or processes of it still work,
        such as those that write a checkpoint.
        """
        if self._channel is None or _has_children():
            return
        if any(
            not thread.daemon and thread is not threading.main_thread()
            for thread in threading.enumerate()
        ):
            # Python waits for them, and then calls what was registered last, before anything of the
            # program's.
            atexit.register(_finish_after_threads, self._channel, os.getpid())
        else:
            self._channel.report_finished()

    def answer(self, question: str = STATE) -> dict[str, Any]:
        """Return what the agent asks for; before it stops this process,
        also record the exception in flight.
        """
        began = time.monotonic()
        if self._files is not None:
            with suppress_internal_errors("keeping the files of stacks open"):
                restore_stacks(self._files)
        self._handled.refill()
        if question != STATE:
            return pulse() if question == PULSE else snapshot()
        # Before anything that takes time: the main thread may end with an exception at any moment
        # from here on.
        self._asked.set()
        if self._files is not None:
            with suppress_internal_errors("writing the stacks"):
                write_unasked(self._files)
        with suppress_internal_errors("recording an exception in flight"):
            self.in_flight.ask()
        for call in self._before_stop:
            with suppress_internal_errors("preparing to be stopped"):
                call()
        unwinding = self.in_flight.unwinding
        raised_at = unwinding.raised_at if unwinding is not None else None
        progress, calls = process_state.read_collectives_and_call_times()
        # The rest of the time: an answer that came too late would lose the collectives as well.
        limit = time_limits.WORKER_QUERY_TIMEOUT_SECONDS - time_limits.ANSWER_DELIVERY_SECONDS
        left = began + limit - time.monotonic()
        handled = list_within(
            left,
            self._handled,
            handled_exception(threading.main_thread().ident or 0),
            calls,
        )
        answer = to_message(progress, process_state.get_thread_failures(), raised_at, handled)
        # Before the answer is sent: the signal may follow it immediately.
        self._answered.set()
        return answer

    def _write(self, error: BaseException, *, in_flight: bool = False, held: bool = False) -> str:
        """Write a document about `error` and return its name, or "" if recording is off."""
        if self._documents is None:
            return ""
        _, receipt = self._documents.write(
            error,
            self.place,
            in_flight=in_flight,
            held=held,
        )
        return receipt.name

    def _withdraw(self, name: str) -> None:
        if self._documents is not None:
            self._documents.withdraw(name, self.place)


def _has_children() -> bool:
    """Whether this process may have children that Python waits for at its exit:
    their work isn't done before that.
    """
    # Read as it is: `active_children` would reap processes of the program.
    started = getattr(sys.modules.get("multiprocessing.process"), "_children", ())
    return any(not process.daemon for process in set(started))


def _do_nothing() -> None:
    """Do nothing at a call that ends the process group."""


def _finish_after_threads(channel: WorkerChannel, worker: int) -> None:
    if os.getpid() == worker:  # a forked child inherits the registered functions
        channel.report_finished()


# --- the ends of processes ------------------------------------------------------------------------


def _leave_later() -> None:
    """Shut down gloo's connections if this process still lives after a while,
    so that a peer's collective fails.

    torch takes ``sys.exit(0)`` for success and keeps the process until its siblings have ended. A
    peer that waits for it in a collective would wait until that times out. This process must not
    end here: torch's agent informs all workers through one event that they may end, and waits
    without end for a worker that died while it waited for that.
    """
    time.sleep(time_limits.CLEAN_EXIT_GRACE_SECONDS)
    with suppress_internal_errors("leaving the process groups"):
        shut_down_gloo_connections()


def _await_parent_death(agent: int) -> bool:
    """Wait a moment for the death of the parent; return whether it has died.

    The kernel sends the parent-death signal when the thread that started this process ends, a
    moment before the rest of a killed agent.
    """
    deadline = time.monotonic() + time_limits.PARENT_DEATH_TIMEOUT_SECONDS
    while os.getppid() == agent:
        if time.monotonic() > deadline:
            return False
        time.sleep(time_limits.PARENT_DEATH_POLL_SECONDS)
    return True


def _record_agent_death(node_context: NodeContext, place: Place, agent_pid: int) -> None:
    """Write a document about the agent's death."""
    moment = Moment.now()
    failure = replace(
        lost_agent(replace(place, rank=None, local_rank=None, pid=agent_pid)),
        timestamp_ns=moment.wall_ns,
        monotonic_ns=moment.monotonic_ns,
    )
    record_error(
        failure,
        node_context,
        spool_for_agent(node_context),
        node_context.upload_deadline_seconds,
    )


def _is_answer_to_signal(error: BaseException) -> bool:
    """Whether `error` is what a signal's handler raises: Python's, torch's (in a forked worker),
    or a user's exit.
    """
    return (
        isinstance(error, SystemExit | KeyboardInterrupt)
        or type(error).__name__ == "SignalException"
    )
