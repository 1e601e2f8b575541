"""How an agent and its workers tell each other something: messages over datagram sockets, and the end of forking.

A worker reports that its exception has left the task function, seconds before its process ends. Before the agent stops
a worker it asks for the worker's state: an exception that is still inside the task function, the progress of its
collectives, its dead threads. A worker that does not answer in time is stopped all the same.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from firstfault.model import Collective, CollectiveProgress, ExceptionInfo, FrameInfo, ThreadFailure
from firstfault.text import parse_json
from firstfault_torch.budgets import SENDING_S, SIBLINGS_S
from firstfault_torch.guard import guarded

if TYPE_CHECKING:
    from pathlib import Path

    from firstfault.recorder import NodeFolder

_LARGEST = 128 * 1024
"""Bytes of one message; Linux takes more than 200 kB in one datagram of a unix socket."""
_MAX_GROUPS = 24
"""Process groups in one message, which holds at most 128 KiB."""
_MAX_TEXT = 2000
_MAX_FRAMES = 20
_START_VARIABLE = "FIRSTFAULT_START"


class _Listener:
    """A bound socket, and a thread that takes each message that arrives there.

    Args:
        path: of the socket.
        take: called in the thread; what it raises is logged.
        doing: what it does, for the log.
    """

    def __init__(self, path: Path, take: Callable[[dict[str, Any]], None], doing: str) -> None:
        self._take, self._doing = take, doing
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
                    with guarded(self._doing):
                        self._take(message)


class AgentChannel:
    """The agent's end.

    Args:
        files: the node's.
        wake: called from the listening thread when a worker reports that it failed.
    """

    def __init__(self, files: NodeFolder, wake: Callable[[], None]) -> None:
        self._files = files
        self._wake = wake
        self._failed: dict[tuple[int, int], dict[str, Any]] = {}
        self._answers: dict[tuple[int, int], dict[str, Any]] = {}
        self._questions = 0
        self._arrived = threading.Condition()
        self._listener = _Listener(files.agent_socket, self._take, "reading a worker's message")

    def failed(self, round_: int) -> dict[int, dict[str, Any]]:
        """Return the reports of a round's failed workers, by local rank."""
        with self._arrived:
            return {local: report for (number, local), report in self._failed.items() if number == round_}

    def forget_before(self, round_: int) -> None:
        """Drop the messages of workers of earlier rounds."""
        with self._arrived:
            for messages in (self._failed, self._answers):
                for worker in [worker for worker in messages if worker[0] < round_]:
                    del messages[worker]

    def ask(self, round_: int, local_ranks: Iterable[int], seconds: float) -> dict[int, dict[str, Any]]:
        """Ask workers for their state; return the answers that come in time, by local rank.

        A worker that does not answer in time keeps its answer to an earlier question of the round.
        """
        with self._arrived:
            self._questions += 1
            number = self._questions
        asked = [
            (round_, local)
            for local in local_ranks
            if _send(self._files.worker_socket(round_, local), {"ask": "state", "question": number})
        ]
        deadline = time.monotonic() + seconds
        with self._arrived:
            while any(worker not in self._answers or self._answers[worker]["question"] < number for worker in asked):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._arrived.wait(left)
            return {local: answer for (number, local), answer in self._answers.items() if number == round_}

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _take(self, message: dict[str, Any]) -> None:
        worker = (int(message["round"]), int(message["local_rank"]))
        message["question"] = int(message.get("question", 0))
        with self._arrived:
            (self._failed if message["kind"] == "failed" else self._answers)[worker] = message
            self._arrived.notify_all()
        if message["kind"] == "failed":
            self._wake()


class WorkerChannel:
    """A worker's end.

    Args:
        files: the node's.
        round_: the worker's.
        local_rank: the worker's.
        answer: called in its own thread when the agent asks; returns the answer.
    """

    def __init__(self, files: NodeFolder, round_: int, local_rank: int, answer: Callable[[], dict[str, Any]]) -> None:
        self._agent = files.agent_socket
        self._who = {"round": round_, "local_rank": local_rank}
        self._answer = answer
        self._listener = _Listener(files.worker_socket(round_, local_rank), self._reply, "answering the agent")

    def report_failure(self, content: dict[str, Any]) -> None:
        """Tell the agent that this worker's exception has left the task function."""
        _send(self._agent, {**self._who, **content, "kind": "failed"})

    def _reply(self, message: dict[str, Any]) -> None:
        answer: dict[str, Any] = {}
        with guarded("answering the agent"):
            if message.get("ask") == "state":
                answer = self._answer()
        _send(self._agent, {**self._who, **answer, "kind": "state", "question": message.get("question", 0)})


def _send(path: Path, message: dict[str, Any]) -> bool:
    """Send a message; return False if no process receives there."""
    data = json.dumps(message).encode()
    while len(data) > _LARGEST:
        # a cut text is not JSON: leave out the largest part
        message = dict(sorted(message.items(), key=lambda item: len(json.dumps(item[1])))[:-1])
        data = json.dumps(message).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        # the queue of a unix socket holds few datagrams, and many workers may fail at once
        sender.settimeout(SENDING_S)
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
def starting(start_method: str) -> Iterator[dict[str, str]]:
    """Fork the workers in this block; yield a variable for their environment."""
    if start_method != "fork":
        yield {}  # a new process has locks of its own
        return
    reading, writing = os.pipe()
    try:
        yield {_START_VARIABLE: f"{os.getpid()} {reading} {writing}"}
    finally:
        os.close(writing)
        os.close(reading)


def await_siblings() -> None:
    """Wait, in a forked worker, until all of the node's workers have been forked.

    The agent may host a store, whose thread resolves the address of each client that connects. If the agent forks
    another worker at that moment, glibc's lock of the resolver stays locked in that worker, and the first name that it
    resolves blocks it without end. So no worker of this node connects before the last one has been forked.
    """
    agent, _, numbers = os.environ.pop(_START_VARIABLE, "").partition(" ")
    if agent != str(os.getppid()):
        return
    reading, writing = map(int, numbers.split())
    with contextlib.suppress(OSError):
        if not all(stat.S_ISFIFO(os.fstat(number).st_mode) for number in (reading, writing)):
            return
        os.close(writing)
        # it is readable when all others, too, have closed their copy of the other end
        select.select([reading], [], [], SIBLINGS_S)
        os.close(reading)
