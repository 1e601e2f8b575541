"""How an agent and its workers tell each other something: messages over datagram sockets, the end of forking, stacks.

A worker reports that its exception has left the task function, seconds before its process ends. Before the agent stops
a worker it asks for the worker's state: an exception that is still inside the task function, the progress of its
collectives, its dead threads. A worker that does not answer in time is stopped all the same.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from firstfault.model import Collective, CollectiveProgress, ExceptionInfo, FrameInfo, ThreadFailure
from firstfault.recorder.folder import NodeFolder, WorkerFiles, tail_of
from firstfault.utils.text import parse_json
from firstfault_torch import time_limits
from firstfault_torch.guard import suppress_internal_errors

_LARGEST = 128 * 1024
"""Bytes of one message; Linux takes more than 200 kB in one datagram of a unix socket."""
STATE, PULSE, SNAPSHOT = "state", "pulse", "snapshot"
"""An agent's questions: the state of a worker that it is about to stop; whether one makes progress; where it is."""
_MAX_GROUPS = 24
"""Process groups in one message, which holds at most 128 KiB."""
_MAX_TEXT = 2000
_MAX_FRAMES = 20


class _Listener:
    """A bound socket, and a thread that calls `take` with each message that arrives there, and logs what it raises."""

    def __init__(self, path: Path, take: Callable[[dict[str, Any]], None]) -> None:
        self._take = take
        self._closed = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        threading.Thread(target=self._listen, name="firstfault-channel", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                data = self._socket.recv(_LARGEST)
            except OSError:
                return
            with contextlib.suppress(ValueError):
                message = parse_json(data)
                if isinstance(message, dict):
                    with suppress_internal_errors("reading a message between agent and worker"):
                        self._take(message)


class AgentChannel:
    """The agent's end; its listening thread calls `wake` when a worker reports that it failed."""

    def __init__(self, files: NodeFolder, wake: Callable[[], None]) -> None:
        self._files = files
        self._wake = wake
        self._round = 0
        self._failed: dict[int, dict[str, Any]] = {}
        self._answers: dict[tuple[str, int], tuple[float, dict[str, Any]]] = {}
        """By question and local rank: when it arrived, and the last answer."""
        self._arrived = threading.Condition()
        self._listener = _Listener(files.agent_socket, self._take)

    def begin(self, round_: int) -> None:
        """Drop the messages of earlier rounds, also those that are still to come."""
        with self._arrived:
            self._round = round_
            self._failed, self._answers = {}, {}

    def failed(self) -> dict[int, dict[str, Any]]:
        """Return the reports of the round's failed workers, by local rank."""
        with self._arrived:
            return dict(self._failed)

    def ask(self, local_ranks: Iterable[int], seconds: float, question: str = STATE) -> dict[int, dict[str, Any]]:
        """Ask workers a question; return the answers that come in time, by local rank.

        A worker that does not tell its state in time keeps its earlier answer of the round.
        """
        began = time.monotonic()
        message = {"kind": question}
        asked = [local for local in local_ranks if _send(self._files.worker(self._round, local).socket, message)]
        with self._arrived:
            while any(self._answers.get((question, local), (-1.0,))[0] < began for local in asked):
                if (left := began + seconds - time.monotonic()) <= 0:
                    break
                self._arrived.wait(left)
            return {
                local: answer
                for (kind, local), (when, answer) in self._answers.items()
                if kind == question and (question == STATE or when >= began)
            }

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _take(self, message: dict[str, Any]) -> None:
        local_rank, has_failed = int(message["local_rank"]), message["kind"] == "failed"
        with self._arrived:
            if message["round"] != self._round:
                return
            if has_failed:
                self._failed[local_rank] = message
            else:
                self._answers[str(message["kind"]), local_rank] = (time.monotonic(), message)
            self._arrived.notify_all()
        if has_failed:
            self._wake()


class WorkerChannel:
    """A worker's end; a thread of its own calls `answer` with the agent's question, and sends what that returns."""

    def __init__(
        self, files: NodeFolder, round_: int, local_rank: int, answer: Callable[[str], dict[str, Any]]
    ) -> None:
        self._agent = files.agent_socket
        self._who = {"round": round_, "local_rank": local_rank}
        self._answer = answer
        self._listener = _Listener(files.worker(round_, local_rank).socket, self._reply)

    def report_failure(self, content: dict[str, Any]) -> None:
        """Tell the agent that this worker's exception has left the task function."""
        _send(self._agent, {**self._who, **content, "kind": "failed"})

    def _reply(self, message: dict[str, Any]) -> None:
        answer: dict[str, Any] = {}
        question = str(message.get("kind", STATE))
        with suppress_internal_errors("answering the agent"):
            answer = self._answer(question)
        _send(self._agent, {**self._who, **answer, "kind": question})


def _send(path: Path, message: dict[str, Any]) -> bool:
    """Send a message; return False if no process receives there."""
    data = json.dumps(message).encode()
    while len(data) > _LARGEST:
        # a cut text is not JSON: leave out the largest part
        message = dict(sorted(message.items(), key=lambda item: len(json.dumps(item[1])))[:-1])
        data = json.dumps(message).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        # the queue of a unix socket holds few datagrams, and many workers may fail at once
        sender.settimeout(time_limits.SEND_TIMEOUT_SECONDS)
        sender.sendto(data, str(path))
        return True
    return False


# --- a worker's state ------------------------------------------------------------------------------------------------


def to_message(
    collectives: Iterable[CollectiveProgress], threads: Iterable[ThreadFailure], raised_at: FrameInfo | None = None
) -> dict[str, Any]:
    """Return a worker's state as JSON data."""
    return {
        "raised_at": None if raised_at is None else (raised_at.file, raised_at.line, raised_at.function),
        "collectives": [asdict(item) for item in itertools.islice(collectives, _MAX_GROUPS)],
        "thread_failures": [
            (
                item.thread,
                item.timestamp_ns,
                item.exception.type,
                item.exception.message[:_MAX_TEXT],
                [
                    (frame.file, frame.line, frame.function, frame.code)
                    for frame in item.exception.frames[-_MAX_FRAMES:]
                ],
            )
            for item in threads
        ],
    }


def from_message(
    message: Mapping[str, Any],
) -> tuple[tuple[CollectiveProgress, ...], tuple[ThreadFailure, ...], FrameInfo | None]:
    """Return the state that `to_message` wrote; empty where the worker did not answer."""
    collectives = tuple(
        CollectiveProgress(
            **{**item, "last": tuple(Collective(**entry) for entry in item["last"]), "members": tuple(item["members"])}
        )
        for item in message.get("collectives") or ()
    )
    threads = tuple(
        ThreadFailure(thread, when, ExceptionInfo(kind, text, frames=tuple(FrameInfo(*frame) for frame in frames)))
        for thread, when, kind, text, frames in message.get("thread_failures") or ()
    )
    raised_at = message.get("raised_at")
    return collectives, threads, FrameInfo(*raised_at) if raised_at else None


# --- the start ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def starting(files: NodeFolder | None) -> Iterator[None]:
    """Start the workers in this block: those that are forked wait until it ends."""
    with contextlib.suppress(OSError):  # such as a full disk: they do not wait
        if files is not None:
            files.starting.touch()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # as the folder may be gone
            if files is not None:
                files.starting.unlink()


def await_siblings(files: NodeFolder) -> None:
    """Wait, in a forked worker, until all of the node's workers have been forked.

    The agent may host a store, whose thread resolves the address of each client that connects. If the agent forks
    another worker at that moment, glibc's lock of the resolver stays locked in that worker, and the first name that it
    resolves blocks it without end. So no worker of this node connects before the last one has been forked.
    """
    deadline = time.monotonic() + time_limits.SIBLING_FORK_TIMEOUT_SECONDS
    # the recorder of a dead agent removes the folder
    while files.starting.exists() and time.monotonic() < deadline:
        time.sleep(time_limits.SIBLING_FORK_POLL_SECONDS)


# --- the stacks of all threads ----------------------------------------------------------------------------------------

# ``faulthandler`` writes them on a signal, even while the main thread is inside a collective or any other C call. They
# name files, lines and functions, not values. The signal is a real-time one that no known library uses. The agent sends
# it only to workers that have a handler for it, because it would kill any other: a framework may reset all handlers, as
# Lightning does at the end of ``fit``. Such a worker writes its stacks from Python, when the agent asks for its state.


_SIGNAL = int(signal.SIGRTMIN) + 12


def register_stacks(files: WorkerFiles) -> None:
    """Let the agent ask this process for its stacks, and write those of a fatal signal (SIGSEGV, SIGABRT) to a file.

    torch writes the latter to stderr; the agent prints them there after the process has ended. If the program has a
    handler for the signal of its own, that stays, and the process writes its stacks unasked.
    """
    fatal = _opened(files.fatal_stacks)
    faulthandler.enable(file=fatal, all_threads=True)
    faulthandler.unregister(_SIGNAL)  # a parent's, inherited by a fork
    if _handles_signal(os.getpid()):
        return
    asked = _opened(files.stacks)
    faulthandler.register(_SIGNAL, file=asked, all_threads=True, chain=False)
    # only now may the signal be sent
    files.stacks_ready.touch()


def write_at_sigterm(files: WorkerFiles) -> None:
    """Let SIGTERM write the stacks before it ends this process; a handler of the program's stays."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    asked = _opened(files.stacks)
    faulthandler.register(signal.SIGTERM, file=asked, all_threads=True, chain=True)
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))  # a pool ends its processes so


def ask_for_stacks(files: NodeFolder, round_: int, pids: dict[int, int], seconds: float) -> dict[int, str]:
    """Return the stacks of the living workers, by local rank as in `pids`, that together answer within `seconds`."""
    workers = {local: files.worker(round_, local) for local in pids}
    asked = {local: workers[local].stacks for local, pid in pids.items() if _signalled(workers[local], pid)}
    _await_content(list(asked.values()), seconds)
    return {local: text for local, stacks in asked.items() if (text := tail_of(stacks))}


def write_unasked(files: WorkerFiles) -> None:
    """Write this process's stacks if the agent could not ask for them, because the signal's handler is gone."""
    if files.stacks_ready.exists() and _handles_signal(os.getpid()):
        return
    descriptor = _opened(files.stacks)
    try:
        faulthandler.dump_traceback(file=descriptor, all_threads=True)
    finally:
        os.close(descriptor)


def _signalled(files: WorkerFiles, pid: int) -> bool:
    if not files.stacks_ready.exists() or not _handles_signal(pid):
        return False
    try:
        os.kill(pid, _SIGNAL)
    except ProcessLookupError:
        return False
    return True


def _handles_signal(pid: int) -> bool:
    """Whether a process has a handler for the signal now; False if /proc cannot tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    caught = status.partition("SigCgt:")[2].split(maxsplit=1)
    return bool(caught) and bool(int(caught[0], 16) >> (_SIGNAL - 1) & 1)


def _await_content(files: list[Path], seconds: float) -> None:
    """Wait until all files have content and none grows any more."""
    deadline = time.monotonic() + seconds
    sizes: list[int] = []
    since = time.monotonic()
    while time.monotonic() < deadline:
        now = [file.stat().st_size for file in files]
        if now != sizes:
            sizes, since = now, time.monotonic()
        elif all(sizes) and time.monotonic() - since >= time_limits.STACK_SETTLE_SECONDS:
            return
        time.sleep(time_limits.STACK_POLL_SECONDS)


def _opened(path: Path) -> int:
    """Return a descriptor that stays open as long as the process lives: faulthandler keeps only its number.

    It is none of the standard streams, one of which the program may have closed.
    """
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(opened)
