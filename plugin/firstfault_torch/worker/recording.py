"""What runs in each training process: the task function, and a document about the exception that leaves it.

The document is durable before the exception leaves this module: peers learn of a failure when the process closes its
sockets, which it does later. So the root cause is on record before it has a victim.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.exceptions.tracebacks import format_exception
from firstfault.model import Subject, WorkerError, Writer
from firstfault_torch.agent.agent_failures import lost_agent
from firstfault_torch.capture import bare, capture
from firstfault_torch.context import Recording, boot_id, versions, worker_place
from firstfault_torch.error_classes import CONSEQUENCES, Sort, code_of, is_recoverable
from firstfault_torch.error_file import (
    ERROR_FILE_VARIABLE,
    error_file_data,
    mark_recoverable,
    write_error_file,
)
from firstfault_torch.guard import WORKER_SIGNALS, bounded, guarded, undisturbed
from firstfault_torch.node.channel import WorkerLine
from firstfault_torch.node.document_writer import record_error, spool_for_agent, spool_of
from firstfault_torch.node.stack_dumps import offer_stacks
from firstfault_torch.node.stderr_relay import offer_stderr
from firstfault_torch.worker.in_flight import InFlight, Moment, is_clean_exit, moment_of, watch_process_groups
from firstfault_torch.worker.introspection import as_message, collective_progress, thread_failures, watch_threads
from flytekitplugins.firstfault.deck.keep import DeckKeeper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import flytekit
    from flytekit.core.context_manager import FlyteContext, OutputMetadata

    from firstfault.model import CollectiveProgress, ExceptionInfo, Place, Receipt

_DEATH_S = 0.3
"""How long an exit waits to see whether its agent is dying, seconds."""
_DECKS_S = 0.1
"""Longest wait for rank 0's decks to be kept before it answers its agent, which waits a little longer, seconds."""

__all__ = ["SpawnPayload", "WorkerResult", "recorded", "run_forked", "run_spawned"]


class WorkerResult(NamedTuple):
    """What a worker process hands back to its agent."""

    return_value: Any
    decks: list[flytekit.Deck]
    output_metadata: OutputMetadata | None = None


@dataclass(frozen=True)
class SpawnPayload:
    """What a spawned process needs to run the task function; it must be picklable."""

    function: bytes
    """By cloudpickle."""
    arguments: dict[str, Any]
    raw_output_prefix: str
    checkpoint_dest: str | None
    checkpoint_src: str | None


def run_spawned(payload: SpawnPayload) -> WorkerResult:
    """Run the task function in a fresh interpreter, in an execution context of its own."""
    with recorded() as witness:
        import cloudpickle  # noqa: PLC0415 - a failing import is recorded too
        from flytekit.bin.entrypoint import setup_execution  # noqa: PLC0415

        with setup_execution(
            raw_output_data_prefix=payload.raw_output_prefix,
            checkpoint_path=payload.checkpoint_dest,
            prev_checkpoint=payload.checkpoint_src,
        ) as context:
            function = cloudpickle.loads(payload.function)
            return _run(function, payload.arguments, context, witness)


def run_forked(function: Callable[..., Any], arguments: dict[str, Any]) -> WorkerResult:
    """Run the task function in a forked process, which has its parent's execution context."""
    with recorded() as witness:
        from flytekit.core.context_manager import FlyteContextManager  # noqa: PLC0415 - the parent has it loaded

        return _run(function, arguments, FlyteContextManager.current_context(), witness)


def _run(
    function: Callable[..., Any], arguments: dict[str, Any], context: FlyteContext, witness: Witness
) -> WorkerResult:
    import flytekit  # noqa: PLC0415 - loaded by now

    with guarded("keeping the decks"):
        witness.keep(flytekit.current_context().decks)
    return_value = function(**arguments)
    tracker = context.output_metadata_tracker
    metadata = tracker.get(return_value) if tracker else None
    return WorkerResult(return_value, flytekit.current_context().decks, metadata)


@contextlib.contextmanager
def recorded() -> Iterator[Witness]:
    """Make the exception that leaves this block durable, then let it go on unchanged; yield who does.

    It waits for at most the upload deadline. A clean ``sys.exit()`` is no failure.
    """
    agent = os.getppid()
    witness = Witness()
    with guarded("preparing to record"):
        witness.open()
    try:
        yield witness
    except BaseException as error:
        # a handler, like torch's in a forked worker, would raise in the middle of it; and the kernel sends the
        # parent-death signal again for each thread of a killed agent
        with undisturbed(WORKER_SIGNALS, handled_only=not _is_an_answer(error)):
            with guarded("recording an exception"):
                if is_clean_exit(error):
                    witness.exits(error)
                elif _is_an_answer(error) and _has_died(agent):
                    # told to go by the death of the agent, which can say nothing any more
                    record_lost_agent(agent)
                else:
                    witness.fails(error)
            witness.close()
        raise
    else:
        with guarded("withdrawing what was handled"):
            witness.in_flight.settle(None)
        witness.close()


class Witness:
    """What a worker process says about itself, and to its agent, while the task function runs."""

    def __init__(self) -> None:
        self._recording = Recording.from_environment()
        self._line: WorkerLine | None = None
        self._undo: list[Callable[[], None]] = []
        self._asked = threading.Event()
        self._keeper: DeckKeeper | None = None
        self.in_flight = InFlight(self._record_in_flight, self._withdraw)

    def open(self) -> None:
        """Begin to watch; without a recording nothing is watched."""
        if self._recording is None:
            return
        self._undo.append(watch_process_groups(self.in_flight))
        self._undo.append(watch_threads())
        place = worker_place(self._recording)
        if self._recording.node_folder and place.local_rank is not None:
            folder = Path(self._recording.node_folder)
            with guarded("sending stderr through the agent"):
                offer_stderr(folder, place.round, place.local_rank)
            with guarded("offering stacks"):
                offer_stacks(folder, place.round, place.local_rank)
            self._line = WorkerLine(folder, place.round, place.local_rank, self._state)

    def keep(self, decks: list[flytekit.Deck]) -> None:
        """Keep what decks hold outside of this process; only rank 0's are the task's."""
        recording = self._recording
        if recording is None or not recording.decks or not recording.node_folder:
            return
        place = worker_place(recording)
        if place.rank == 0:
            self._keeper = DeckKeeper(Path(recording.node_folder), place.round, decks)
            self._undo.append(self._keeper.end)

    def close(self) -> None:
        """Cease to watch. The line to the agent stays open: it may ask a process that ends slowly."""
        for undo in reversed(self._undo):
            with guarded("ceasing to record"):
                undo()

    def fails(self, error: BaseException) -> None:
        """Make a document about an exception that has left the task function durable, and tell the agent."""
        self.in_flight.settle(error)
        if self._asked.is_set() and _is_an_answer(error):
            return  # to the signal by which the agent stops this process: the agent will say so
        moment = moment_of(error)
        receipt = record_exception(error)
        if self._line is not None and receipt is not None:
            content = {"what": type(error).__name__, "document": receipt.name, "monotonic_ns": moment.monotonic_ns}
            self._line.say_failed(content)

    def exits(self, error: BaseException) -> None:
        """Note a clean exit before the task function's end: no failure, but why a peer may wait in vain."""
        self.in_flight.settle(None)
        if self._recording is not None:
            describe_and_record(error, self._recording, worker_place(self._recording), held=True)

    def _state(self) -> dict[str, Any]:
        """Answer the agent, which is about to stop this process."""
        self._asked.set()
        with guarded("recording an exception in flight"):
            self.in_flight.ask()
        if self._keeper is not None:
            self._keeper.look_now(_DECKS_S)
        return as_message()

    def _record_in_flight(self, error: BaseException) -> str:
        if self._recording is None:
            return ""
        place = worker_place(self._recording)
        return describe_and_record(error, self._recording, place, in_flight=True)[1].name

    def _withdraw(self, name: str) -> None:
        if self._recording is None:
            return
        place = worker_place(self._recording)
        spool = spool_of(self._recording, place.local_rank, os.environ.get(ERROR_FILE_VARIABLE))
        if spool is not None:
            spool.withdraw(name)


def _has_died(agent: int) -> bool:
    """Whether this process has lost its parent.

    The kernel sends the parent-death signal when the thread that started us ends, a moment before the rest of a killed
    agent does; so this looks for a moment.
    """
    deadline = time.monotonic() + _DEATH_S
    while os.getppid() == agent:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _is_an_answer(error: BaseException) -> bool:
    """Whether `error` is what a signal's handler raises: Python's, torch's (in a forked worker), or a user's exit."""
    return isinstance(error, SystemExit | KeyboardInterrupt) or type(error).__name__ == "SignalException"


def record_exception(error: BaseException) -> Receipt | None:
    """Write a document about `error` as this worker's failure. None: recording is off."""
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if error_file and is_recoverable(bare(error)):
        with guarded("marking an exception as recoverable"):
            mark_recoverable(error_file)
    recording = Recording.from_environment()
    if recording is None:
        return None
    return describe_and_record(error, recording, worker_place(recording))[1]


def record_lost_agent(agent_pid: int) -> Receipt | None:
    """Write, in the agent's stead, a document about its death. None: recording is off."""
    recording = Recording.from_environment()
    if recording is None:
        return None
    moment = Moment.now()
    witness = worker_place(recording)
    failure = replace(
        lost_agent(replace(witness, rank=None, local_rank=None, pid=agent_pid)),
        timestamp_ns=moment.wall_ns,
        monotonic_ns=moment.monotonic_ns,
    )
    return record_error(failure, recording, spool_for_agent(recording), recording.upload_deadline_seconds)


def describe_and_record(
    error: BaseException, recording: Recording, place: Place, *, in_flight: bool = False, held: bool = False
) -> tuple[WorkerError, Receipt]:
    """Write a document about `error`, and torch's error.json; return the failure and what became of the document.

    Bounded by the upload deadline, of which half may go into understanding the exception: its ``__str__`` is the
    user's code and may block.

    Args:
        error: the exception.
        recording: where and how.
        place: this process's.
        in_flight: it has not left the task function yet; torch's error.json is left alone.
        held: keep the document on the node, for the agent to upload should the node fail.
    """
    began = time.monotonic_ns()
    wall_ns, monotonic_ns = moment_of(error)
    deadline_ns = began + int(recording.upload_deadline_seconds * 1e9)
    exception = bounded(lambda: capture(error), recording.upload_deadline_seconds / 2, "reading an exception")
    if exception is None:
        exception = replace(bare(error), message="<no text: reading the exception took too long>")
    progress: tuple[CollectiveProgress, ...] = ()
    with guarded("asking for the collectives"):
        progress = collective_progress()
    failure = replace(
        describe(error, exception, place),
        timestamp_ns=wall_ns,
        monotonic_ns=monotonic_ns,
        in_flight=in_flight,
        collectives=progress,
        thread_failures=thread_failures(),
    )
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if error_file and not in_flight and not held:
        with guarded("writing torch's error.json"):
            write_error_file(error_file, error_file_data(exception.type, exception.message, failure.message, wall_ns))
    failure = replace(failure, upload_delay_ns=time.monotonic_ns() - monotonic_ns)
    left = (deadline_ns - time.monotonic_ns()) / 1e9
    spool = spool_of(recording, place.local_rank, error_file)
    return failure, record_error(failure, recording, spool, left, held=held)


def describe(error: BaseException, exception: ExceptionInfo, place: Place) -> WorkerError:
    """Return the failure that an exception in this process is, without its time."""
    sort = Sort.RECOVERABLE if is_recoverable(exception) else Sort.WORKER_FAILURE
    consequence = CONSEQUENCES[sort]
    category = "exit" if isinstance(error, SystemExit) else consequence.category
    failure = WorkerError(
        code=code_of(error),
        message=format_exception(exception),
        kind=consequence.kind,
        origin=consequence.origin,
        worker=place.node,
        place=place,
        writer=Writer.WORKER,
        subject=Subject.WORKER,
        exception=exception,
        category=category,
        boot_id=boot_id(),
        versions=versions(),
    )
    return replace(failure, fingerprint=fingerprint_of(failure))
