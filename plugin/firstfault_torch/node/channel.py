"""Messages between an agent and its workers, over datagram sockets."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from firstfault.model import (
    Collective,
    CollectiveProgress,
    ExceptionInfo,
    FrameInfo,
    HandledException,
    ThreadFailure,
)
from firstfault.recorder.folder import NodeFolder
from firstfault.utils.text import parse_json
from firstfault_torch import time_limits
from firstfault_torch.descriptors import KeptDescriptor
from firstfault_torch.guard import start_daemon, suppress_internal_errors

_MAX_MESSAGE_BYTES = 128 * 1024
"""Bytes of one message; Linux takes more than 200 kB in one datagram of a unix socket."""
STATE, PULSE, SNAPSHOT = "state", "pulse", "snapshot"
"""An agent's questions: the state of a worker that it is about to stop; whether one makes progress;
where it is.
"""
FAILED, EXITING, FINISHED = "failed", "exiting", "finished"
"""A worker's reports: its exception has left the function; its program exits in the middle;
its function or program has come to its end.
"""
_ECHO = "echo"
"""An agent's message to itself: what arrived before it has been read."""
_MAX_GROUPS = 24
"""Process groups in one message, which holds at most 128 KiB."""
_MAX_TEXT_CHARACTERS = 2000
_MAX_FRAMES = 20


class _Listener:
    """A bound socket, and a thread that calls `take` with each message that arrives there,
    and logs what it raises.

    The program of its process may close all descriptors, and open files or sockets under their
    numbers: then it binds a new socket, and leaves the number alone. It also does so when a
    cleaner of /tmp has removed the socket's file, for which it looks once a minute. `each_minute`
    is called then, unless a message came first.

    Raises:
        OSError: no socket can be bound.
        RuntimeError: the system allows no further thread.
    """

    def __init__(
        self,
        path: Path,
        take: Callable[[dict[str, Any]], None],
        each_minute: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._take = take
        self._each_minute = each_minute
        self._closed = threading.Event()
        self._socket, self._kept_descriptor, self._file = self._bind()
        try:
            start_daemon(
                self._listen, "firstfault-channel", time_limits.THREAD_START_TIMEOUT_SECONDS
            )
        except (RuntimeError, MemoryError):
            # A socket that nobody reads would let each of the agent's questions wait for an answer.
            self._path.unlink(missing_ok=True)
            self._release()
            raise

    def close(self) -> None:
        """Stop listening."""
        # A close doesn't wake a thread that is blocked in recv, and the socket would still take
        # messages. A shutdown makes recv return no bytes; the thread then finds the event, which is
        # set before.
        self._closed.set()
        if self._kept_descriptor.is_ours:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        else:
            # the same, for a thread that still waits at a socket with a lost number
            _send(self._path, {})
        self._release()

    def _bind(self) -> tuple[socket.socket, KeptDescriptor, os.stat_result]:
        # A worker that executes another program, or that starts the training as a child, leaves its
        # socket's file.
        self._path.unlink(missing_ok=True)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # The kernel's own time limit: with one of Python's, a receive would be two calls, and
            # the second one could take a message of the program's, if the program takes the number
            # in between.
            microseconds = int(time_limits.CHANNEL_CHECK_SECONDS * 1_000_000)
            limit = struct.pack("@ll", *divmod(microseconds, 1_000_000))  # a `timeval`
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            bound.bind(str(self._path))
            file = self._path.stat()
            kept = KeptDescriptor(bound.detach())
        except BaseException:
            bound.close()
            raise
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM, fileno=kept.number)
        listening.settimeout(None)  # the program may have set a default for all sockets
        return listening, kept, file

    def _ensure_bound(self) -> bool:
        """Bind a new socket if the number or the file is lost;
        return whether there is one to wait at.
        """
        is_number_ours = self._kept_descriptor.is_ours
        with contextlib.suppress(FileNotFoundError):
            if not os.path.samestat(self._path.stat(), self._file):
                # of another process with the same name: a wrapper's child, which is to be asked
                return is_number_ours
            if is_number_ours:
                return True
        lost_binding = self._socket, self._kept_descriptor
        try:
            self._socket, self._kept_descriptor, self._file = self._bind()
        except OSError:
            # the node's folder is gone, too; the recorder may restore it within the next minute
            if is_number_ours:
                return True
            raise
        lost_binding[0].detach()
        lost_binding[1].close()
        # `close` may have been called during the bind, and has only seen the old socket.
        return not self._closed.is_set()

    def _release(self) -> None:
        # Without the number: the socket object would close whatever it is.
        self._socket.detach()
        self._kept_descriptor.close()

    def _listen(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):
                # Checked before each wait. The wait itself is safe: the kernel holds the socket
                # until it is over, even if its number is closed and reused. It takes one more
                # message, and its sender gets an answer.
                if not self._ensure_bound():
                    self._release()
                    return
                self._receive()
                continue
            # Short of memory or of descriptors, or the node's folder is gone. It may be better
            # later.
            self._closed.wait(time_limits.CHANNEL_RETRY_SECONDS)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_MAX_MESSAGE_BYTES)
        except BlockingIOError:  # the time is up
            with suppress_internal_errors("doing what is due each minute"):
                self._each_minute()
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        # A datagram arrives whole or not at all, also if its sender dies while it sends. What isn't
        # JSON is the empty one of `close`, or comes from another program.
        with contextlib.suppress(ValueError):
            message = parse_json(data)
            if isinstance(message, dict) and not self._closed.is_set():
                with suppress_internal_errors("reading a message between agent and worker"):
                    self._take(message)


class AgentChannel:
    """The agent's end. Its listening thread calls `wake` when a worker reports its failure."""

    def __init__(self, files: NodeFolder, wake: Callable[[], None]) -> None:
        self._files = files
        self._wake = wake
        self._round = 0
        self._failed: dict[int, dict[str, Any]] = {}
        self._exiting: dict[int, dict[str, Any]] = {}
        self._finished: dict[int, dict[str, Any]] = {}
        self._echoes = itertools.count(1)
        self._heard = 0
        """The last echo that was read."""
        self._answers: dict[tuple[str, int], tuple[float, dict[str, Any]]] = {}
        """By question and local rank: when it arrived, and the last answer."""
        self._arrived = threading.Condition()
        self._listener = _Listener(files.agent_socket, self._take)

    def begin(self, round_: int) -> None:
        """Drop the messages of earlier rounds, also those that are still to come."""
        # A worker of the last round may have sent a message that isn't read yet: `_take` compares
        # the round under the same lock, so such a message can't land in the new round.
        with self._arrived:
            self._round = round_
            self._failed, self._exiting, self._finished, self._answers = {}, {}, {}, {}

    def failed(self) -> dict[int, dict[str, Any]]:
        """Return the reports of the round's failed workers, by local rank."""
        with self._arrived:
            return dict(self._failed)

    def exiting(self) -> dict[int, dict[str, Any]]:
        """Return the reports of the round's programs that exit in the middle, by local rank."""
        with self._arrived:
            return dict(self._exiting)

    def finished(self, seconds: float) -> dict[int, dict[str, Any]]:
        """Return the reports of the round's finished workers, by local rank.

        Waits up to `seconds` until all messages that have arrived so far are read.
        """
        self.read_arrived(seconds)
        with self._arrived:
            return dict(self._finished)

    def read_arrived(self, seconds: float) -> None:
        """Wait up to `seconds` until all messages that have arrived so far are read."""
        number = next(self._echoes)
        # A worker's message is in the socket's queue before the worker can die, but the thread may
        # not have read it. The socket keeps the order, so this message comes after it.
        content = {"kind": _ECHO, "round": self._round, "local_rank": -1, "number": number}
        is_sent = _send(self._files.agent_socket, content)
        with self._arrived:
            self._arrived.wait_for(lambda: self._heard >= number, seconds if is_sent else 0)

    def ask(
        self,
        local_ranks: Iterable[int],
        seconds: float,
        question: str = STATE,
    ) -> dict[int, dict[str, Any]]:
        """Ask workers a question; return the answers that come in time, by local rank.

        A worker that doesn't send its state in time keeps its earlier answer of the round.
        """
        began = time.monotonic()
        wanted = set(local_ranks)
        message = {"kind": question}
        # Sent without the lock, so an answer may arrive before the wait below begins: it is newer
        # than `began`, and counts. An answer to an earlier question that arrives late may count,
        # too; the worker's state is as new as that answer. Only workers with a socket are waited
        # for: one that has died refuses the message at once. One that is frozen, or has left its
        # socket open in a forked child, receives it and doesn't answer; that is what `seconds`
        # limits.
        asked = [
            local
            for local in wanted
            if _send(self._files.worker(self._round, local).socket, message)
        ]
        with self._arrived:
            while any(self._answers.get((question, local), (-1.0,))[0] < began for local in asked):
                if (left := began + seconds - time.monotonic()) <= 0:
                    break
                # any message wakes this: the answers are checked again, and the time that is left
                # shrinks
                self._arrived.wait(left)
            return {
                local: answer
                for (kind, local), (when, answer) in self._answers.items()
                # another thread may have asked other workers: their answers aren't this caller's
                if local in wanted and kind == question and (question == STATE or when >= began)
            }

    def get_states(self) -> dict[int, dict[str, Any]]:
        """Return the last state that each worker has sent in this round, by local rank."""
        with self._arrived:
            return {
                local: answer
                for (kind, local), (_, answer) in self._answers.items()
                if kind == STATE
            }

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _take(self, message: dict[str, Any]) -> None:
        local_rank = int(message["local_rank"])
        has_failed = message["kind"] == FAILED
        with self._arrived:
            if message["round"] != self._round:
                return
            if has_failed:
                self._failed[local_rank] = message
            elif message["kind"] == EXITING:
                self._exiting[local_rank] = message
            elif message["kind"] == FINISHED:
                self._finished[local_rank] = message
            elif message["kind"] == _ECHO:
                self._heard = max(self._heard, int(message["number"]))
            else:
                self._answers[str(message["kind"]), local_rank] = (time.monotonic(), message)
            self._arrived.notify_all()
        # After the report is stored: the main thread clears the event before it reads the reports.
        if has_failed:
            self._wake()


class WorkerChannel:
    """A worker's end; a separate thread calls `answer` with the agent's question,
    and sends what that returns.
    """

    def __init__(
        self,
        files: NodeFolder,
        round_: int,
        local_rank: int,
        answer: Callable[[str], dict[str, Any]],
        each_minute: Callable[[], None] = lambda: None,
    ) -> None:
        self._agent = files.agent_socket
        self._who = {"round": round_, "local_rank": local_rank}
        self._answer = answer
        # Last: the agent may ask from this line on, and the listening thread answers while the main
        # thread trains.
        self._listener = _Listener(
            files.worker(round_, local_rank).socket, self._reply, each_minute
        )

    def report_failure(self, content: dict[str, Any]) -> None:
        """Inform the agent that this worker's exception has left the task function."""
        _send(self._agent, {**self._who, **content, "kind": FAILED})

    def report_finished(self) -> None:
        """Inform the agent that this worker's function has returned,
        or that its program has run to its end.
        """
        self._report_end(FINISHED)

    def report_exit(self) -> None:
        """Inform the agent that this worker's program exits in the middle, by `sys.exit`."""
        self._report_end(EXITING)

    def _report_end(self, kind: str) -> None:
        content = {"pid": os.getpid(), "monotonic_ns": time.monotonic_ns()}
        _send(self._agent, {**self._who, **content, "kind": kind})

    def _reply(self, message: dict[str, Any]) -> None:
        answer: dict[str, Any] = {}
        question = str(message.get("kind", STATE))
        with suppress_internal_errors("answering the agent"):
            answer = self._answer(question)
        _send(self._agent, {**self._who, **answer, "kind": question})


def _send(path: Path, message: dict[str, Any]) -> bool:
    """Send a message; return False if no process receives there."""
    data = json.dumps(message).encode()
    while len(data) > _MAX_MESSAGE_BYTES:
        # a cut text isn't JSON: leave out the largest part
        message = dict(sorted(message.items(), key=lambda item: len(json.dumps(item[1])))[:-1])
        data = json.dumps(message).encode()
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        # A new socket for each message, so processes and threads share no state, and a fork
        # inherits none. Without a listener the kernel refuses the message. The queue of a unix
        # socket holds few datagrams (10 by default in `net.unix.max_dgram_qlen`), and many workers
        # may fail at once: a full queue blocks the sender for a moment.
        sender.settimeout(time_limits.SEND_TIMEOUT_SECONDS)
        sender.sendto(data, str(path))
        return True
    return False


def to_message(
    collectives: Iterable[CollectiveProgress],
    threads: Iterable[ThreadFailure],
    raised_at: FrameInfo | None = None,
    handled: Iterable[HandledException] = (),
) -> dict[str, Any]:
    """Return a worker's state as JSON data."""
    return {
        "raised_at": (
            None if raised_at is None else (raised_at.file, raised_at.line, raised_at.function)
        ),
        "collectives": [asdict(item) for item in itertools.islice(collectives, _MAX_GROUPS)],
        "thread_failures": [
            (
                item.thread,
                item.timestamp_ns,
                item.exception.type,
                item.exception.message[:_MAX_TEXT_CHARACTERS],
                [
                    (frame.file, frame.line, frame.function, frame.code)
                    for frame in item.exception.frames[-_MAX_FRAMES:]
                ],
            )
            for item in threads
        ],
        "handled": [
            (item.timestamp_ns, item.times, item.calls_since, _exception_to_message(item.exception))
            for item in handled
        ],
    }


def _exception_to_message(exception: ExceptionInfo) -> dict[str, Any]:
    # with the first one: it handled the exception
    frames = (*exception.frames[:1], *exception.frames[1:][-_MAX_FRAMES:])
    return {
        "type": exception.type,
        "message": exception.message[:_MAX_TEXT_CHARACTERS],
        "bases": exception.bases,
        "frames": [(frame.file, frame.line, frame.function, frame.code) for frame in frames],
        "frames_omitted": exception.frames_omitted + len(exception.frames) - len(frames),
        "causes": [_exception_to_message(cause) for cause in exception.causes],
        "relation": exception.relation,
    }


def _exception_from_message(message: Mapping[str, Any]) -> ExceptionInfo:
    return ExceptionInfo(
        **{
            **message,
            "bases": tuple(message["bases"]),
            "frames": tuple(FrameInfo(*frame) for frame in message["frames"]),
            "causes": tuple(map(_exception_from_message, message["causes"])),
        }
    )


def handled_from_message(message: Mapping[str, Any]) -> tuple[HandledException, ...]:
    """Return the handled exceptions that `to_message` wrote;
    empty where the worker didn't answer.
    """
    return tuple(
        HandledException(when, _exception_from_message(exception), times, since)
        for when, times, since, exception in message.get("handled") or ()
    )


def from_message(
    message: Mapping[str, Any],
) -> tuple[tuple[CollectiveProgress, ...], tuple[ThreadFailure, ...], FrameInfo | None]:
    """Return the state that `to_message` wrote; empty where the worker didn't answer."""
    collectives = tuple(
        CollectiveProgress(
            **{
                **item,
                "last": tuple(Collective(**entry) for entry in item["last"]),
                "members": tuple(item["members"]),
            }
        )
        for item in message.get("collectives") or ()
    )
    threads = tuple(
        ThreadFailure(
            thread,
            when,
            ExceptionInfo(kind, text, frames=tuple(FrameInfo(*frame) for frame in frames)),
        )
        for thread, when, kind, text, frames in message.get("thread_failures") or ()
    )
    raised_at = message.get("raised_at")
    return collectives, threads, FrameInfo(*raised_at) if raised_at else None
