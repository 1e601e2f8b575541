"""Recording in a training process: documents the exception that leaves the task function.

The document is durable before the exception leaves this module, and so before the process closes
its sockets: the root cause is recorded before any peer fails. The way of an exception:

    recorded()                  the block around the task function
      WorkerMonitor.fails()     is it a failure, or an answer to the agent's signal?
        describe_and_record()   exception -> ExceptionInfo -> WorkerError; torch's error.json
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from firstfault.exceptions.first_cause import find_own_frames, join_frames
from firstfault.exceptions.traceback_format import format_exception
from firstfault.model import (
    CollectiveProgress,
    ExceptionInfo,
    HandledException,
    Place,
    Receipt,
    Resources,
    Subject,
    SystemState,
    WorkerError,
    Writer,
)
from firstfault.model.failure import CTRL_C
from firstfault.recorder.client import RecorderClient
from firstfault_torch import time_limits, watchdog
from firstfault_torch.compat.torch_worker import shut_down_gloo_connections
from firstfault_torch.engine import Engine
from firstfault_torch.failures import torch_error_file
from firstfault_torch.failures.capture import bare, before_exit, capture, safe_text
from firstfault_torch.failures.failure_records import ErrorClass, failure_record, lost_agent
from firstfault_torch.guard import (
    call_with_timeout,
    ignore_worker_signals,
    suppress_internal_errors,
)
from firstfault_torch.node.channel import PULSE, STATE, WorkerChannel, to_message
from firstfault_torch.node.document_writer import open_worker_spool, record_error, spool_for_agent
from firstfault_torch.node.fork_gate import wait_until_all_forked
from firstfault_torch.node.stacks import register_stacks, restore_stacks, write_unasked
from firstfault_torch.node.stderr_relay import redirect_stderr
from firstfault_torch.node_context import OTHERS_CONTINUE, Moment, NodeContext
from firstfault_torch.places import get_worker_place, is_in_foreground
from firstfault_torch.worker import process_state
from firstfault_torch.worker.handled_exceptions import HandledExceptions
from firstfault_torch.worker.in_flight import (
    InFlight,
    get_moment,
    handled_exception,
    is_clean_exit,
    watch_process_groups,
)
from firstfault_torch.worker.pulse import pulse, snapshot

T = TypeVar("T")

_monitors: list[WorkerMonitor] = []


def current_monitor() -> WorkerMonitor | None:
    """Return the monitor of this process; None: nothing is recorded here."""
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
                monitor.in_flight.withdraw_handled(None)
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
        monitor.in_flight.left = (
            error  # at once: the agent that is about to stop this process waits for it
        )
    # a handler, like torch's in a forked worker, would raise in the middle of recording, and the
    # kernel repeats the parent-death signal for each thread of a killed agent
    with ignore_worker_signals(handled_only=not _is_answer_to_signal(error)):
        with suppress_internal_errors("recording an exception"):
            if is_clean_exit(error):
                monitor.exits(error)
            elif _is_answer_to_signal(error) and _has_died(agent):
                # terminated because the agent died: the worker reports it
                monitor.loses_agent(agent)
            else:
                monitor.fails(error)
        monitor.close()


class WorkerMonitor:
    """Reports a worker process's failure, and answers its agent, while the task function runs;
    see `open_monitor`.

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
        """None: recording is off."""
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
        finishes = self.finishes if is_program else _do_nothing
        self._undo.append(watch_process_groups(self.in_flight, finishes))
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
        self.in_flight.withdraw_handled(error)
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
            and self._engine.name_error(error, bare(error)).recoverable
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
            what = type(before_exit(error)).__name__
            content: dict[str, Any] = {
                "what": what,
                "document": name,
                "monotonic_ns": moment.monotonic_ns,
            }
            self._channel.report_failure(
                content | ({OTHERS_CONTINUE: True} if self.others_continue else {})
            )

    def exits(
        self, error: BaseException, *, is_kept: bool = True, is_announced: bool = False
    ) -> None:
        """Record a clean exit before the task function's end: not a failure,
        but perhaps why a peer waits.

        torch keeps the process of a function until its siblings have ended, but not that of a
        program. An exit that `is_announced` ends this process by itself: the agent needn't stop it.
        """
        self.in_flight.withdraw_handled(None)
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

    def loses_agent(self, agent_pid: int) -> None:
        """Write a document about the agent's death instead."""
        node_context = self.node_context
        moment = Moment.now()
        if node_context is None:
            return
        place = replace(self.place, rank=None, local_rank=None, pid=agent_pid)
        failure = replace(
            lost_agent(place), timestamp_ns=moment.wall_ns, monotonic_ns=moment.monotonic_ns
        )
        record_error(
            failure,
            node_context,
            spool_for_agent(node_context),
            node_context.upload_deadline_seconds,
        )

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
        progress, calls = process_state.collective_state()
        # The rest of the time: an answer that came too late would lose the collectives as well.
        limit = time_limits.WORKER_QUERY_TIMEOUT_SECONDS - time_limits.ANSWER_DELIVERY_SECONDS
        left = began + limit - time.monotonic()
        handled = self._list_handled(
            handled_exception(threading.main_thread().ident or 0), calls, left
        )
        answer = to_message(progress, process_state.thread_failures(), raised_at, handled)
        # Before the answer is sent: the signal may follow it immediately.
        self._answered.set()
        return answer

    def _write(self, error: BaseException, *, in_flight: bool = False, held: bool = False) -> str:
        """Write a document about `error` and return its name; empty: recording is off."""
        if self.node_context is None:
            return ""
        context, place = self.node_context, self.place
        _, receipt = describe_and_record(
            error,
            context,
            place,
            self._engine,
            in_flight=in_flight,
            held=held,
            list_handled=partial(self._list_handled, error, is_ending=not in_flight),
        )
        return receipt.name

    def _list_handled(
        self,
        current: BaseException | None,
        calls: Sequence[int],
        seconds: float = time_limits.UPLOAD_DEADLINE_SECONDS,
        *,
        is_ending: bool = True,
    ) -> tuple[HandledException, ...]:
        """Return the exceptions that the program handled;
        `calls` are the times of the recorded collectives.

        It takes at most `seconds`, and no longer than `HANDLED_EXCEPTIONS_TIMEOUT_SECONDS`.
        """
        limit = min(seconds, time_limits.HANDLED_EXCEPTIONS_TIMEOUT_SECONDS)
        if limit <= 0:
            return ()

        def count_since(when_ns: int) -> int | None:
            return sum(called > when_ns for called in calls) if calls else None

        # reads source files, on a file system that may not answer
        read = partial(self._handled.list, current, count_since, is_ending=is_ending)
        return call_with_timeout(read, limit, "listing handled exceptions", local=True) or ()

    def _withdraw(self, name: str) -> None:
        if self.node_context is None:
            return
        error_file = os.environ.get(torch_error_file.ERROR_FILE_VARIABLE)
        spool = open_worker_spool(self.node_context, self.place.local_rank, error_file)
        if spool is not None:
            spool.withdraw(name)


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


# --- from an exception to its document ------------------------------------------------------------


def describe_and_record(  # noqa: PLR0913 - keywords
    error: BaseException,
    node_context: NodeContext,
    place: Place,
    engine: Engine,
    *,
    in_flight: bool = False,
    held: bool = False,
    list_handled: Callable[[Sequence[int]], tuple[HandledException, ...]] = lambda _: (),
) -> tuple[bytes, Receipt]:
    """Write a document about `error`, and torch's error.json; return the document and its receipt.

    Bounded by the upload deadline. Half of it may go into reading the exception: its ``__str__`` is
    the user's code and may block. An exception that is `in_flight` hasn't left the task function
    yet; torch's error.json is left alone. A document that is `held` stays on the node; the agent
    uploads it if the node fails. `list_handled` returns the exceptions that the program handled
    before, given the times of this process's collectives.
    """
    began = time.monotonic_ns()
    process_state.release_files()
    wall_ns, monotonic_ns = get_moment(error)
    deadline_ns = began + int(node_context.upload_deadline_seconds * 1e9)
    source = error if is_clean_exit(error) else before_exit(error)
    half = node_context.upload_deadline_seconds / 2
    read = partial(_read, source, error, in_flight=in_flight)
    exception = call_with_timeout(read, half, "reading an exception", local=True)
    if exception is None:
        exception = replace(bare(source), message="<no text: reading the exception took too long>")
    place = replace(place, gpu=_asked(process_state.gpu_uuid, "", "the GPU"))
    system = _asked(partial(process_state.system_state, source, exception), SystemState(), "limits")
    resources = Resources()
    if system != SystemState() and node_context.files is not None:
        ask = partial(
            RecorderClient(node_context.files).resources,
            time_limits.CONTAINER_MEMORY_TIMEOUT_SECONDS,
        )
        resources = _asked(ask, resources, "the container's memory")
    no_state: tuple[tuple[CollectiveProgress, ...], tuple[int, ...]] = ((), ())
    progress, calls = _asked(process_state.collective_state, no_state, "the collectives")
    failure = replace(
        _describe(source, exception, place, engine),
        timestamp_ns=wall_ns,
        monotonic_ns=monotonic_ns,
        in_flight=in_flight,
        collectives=progress,
        thread_failures=process_state.thread_failures(),
        handled_exceptions=list_handled(calls),
        resources=resources,
        system=system,
    )
    error_file = os.environ.get(torch_error_file.ERROR_FILE_VARIABLE)
    if error_file and not in_flight and not held:
        with suppress_internal_errors("writing torch's error.json"):
            data = torch_error_file.error_file_data(
                exception.type,
                exception.message,
                failure.message,
                wall_ns,
            )
            torch_error_file.write_error_file(error_file, data)
    failure = replace(failure, upload_delay_ns=time.monotonic_ns() - monotonic_ns)
    left = (deadline_ns - time.monotonic_ns()) / 1e9
    spool = open_worker_spool(node_context, place.local_rank, error_file)
    return record_error(failure, node_context, spool, left, held=held)


def _asked(call: Callable[[], T], default: T, about: str) -> T:
    """Return what `call` returns; the default if it raises."""
    with suppress_internal_errors(f"asking for {about}"):
        return call()
    return default


def _read(source: BaseException, error: BaseException, *, in_flight: bool) -> ExceptionInfo:
    exception = capture(source, in_flight=in_flight)
    if source is error:
        return exception
    # a library caught it, as argparse does: the program's line is in the exit
    if not find_own_frames(exception):
        exception = replace(
            exception, frames=join_frames((capture(error, in_flight=in_flight), exception))
        )
    note = f"The program then called sys.exit({safe_text(error)})."
    return replace(exception, notes=(*exception.notes, note))


def _describe(
    error: BaseException,
    exception: ExceptionInfo,
    place: Place,
    engine: Engine,
) -> WorkerError:
    """Return the failure record of an exception in this process, without its time."""
    name = engine.name_error(error, exception)
    left = {"category": "exit"} if isinstance(error, SystemExit) else {}
    return failure_record(
        ErrorClass.RECOVERABLE_EXCEPTION if name.recoverable else ErrorClass.WORKER_FAILURE,
        place,
        code=CTRL_C if isinstance(error, KeyboardInterrupt) and is_in_foreground() else name.code,
        message=format_exception(exception),
        writer=Writer.WORKER,
        subject=Subject.WORKER,
        exception=exception,
        **left,
    )


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


def _has_died(agent: int) -> bool:
    """Whether this process has lost its parent.

    The kernel sends the parent-death signal when the thread that started this process ends, a
    moment before the rest of a killed agent; so this waits a moment.
    """
    deadline = time.monotonic() + time_limits.PARENT_DEATH_TIMEOUT_SECONDS
    while os.getppid() == agent:
        if time.monotonic() > deadline:
            return False
        time.sleep(time_limits.PARENT_DEATH_POLL_SECONDS)
    return True


def _is_answer_to_signal(error: BaseException) -> bool:
    """Whether `error` is what a signal's handler raises: Python's, torch's (in a forked worker),
    or a user's exit.
    """
    return (
        isinstance(error, SystemExit | KeyboardInterrupt)
        or type(error).__name__ == "SignalException"
    )
