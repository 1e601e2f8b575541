"""Talking to the node's recorder: one connection, one line of JSON each way. Imports nothing that costs."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any

from firstfault.errors import RecorderUnavailableError, StoreError
from firstfault.model import Receipt
from firstfault.recorder.folder import NodeFolder

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NodeFolder", "Recorder"]

_CHUNK_BYTES = 64 * 1024
_FULL_S = 0.01
"""Between two tries to connect while the recorder's queue of connections is full, seconds."""
_LEAST_S = 0.001
"""The least time a system call may take, seconds: a socket takes zero for "do not wait at all"."""


class Recorder:
    """A client of the recorder that listens in `folder`. Holds nothing open, so it may be forked and pickled."""

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder

    def put(
        self,
        path: str,
        file: Path,
        *,
        deadline_seconds: float,
        fault_monotonic_ns: int | None = None,
        rank: int | None = None,
    ) -> Receipt:
        """Have a file uploaded, waiting at most `deadline_seconds`, and return what became of it.

        The recorder goes on trying when the deadline has passed. If the file lies in a spool, it notes the outcome
        there.

        Args:
            path: where to, relative to the output prefix.
            file: what to upload.
            deadline_seconds: counted from now.
            fault_monotonic_ns: CLOCK_MONOTONIC at the fault, from which the receipt counts.
            rank: the worker's global rank, for the receipt.

        Raises:
            RecorderUnavailableError: there is no recorder, or it ended without an answer.
        """
        name = path.rsplit("/", 1)[-1]
        request = {
            "op": "put",
            "path": path,
            "file": str(file.absolute()),
            "fault_monotonic_ns": fault_monotonic_ns,
            "rank": rank,
        }
        try:
            answer = self._ask(request, deadline_seconds)
        except TimeoutError:
            late = f"the storage did not answer within {deadline_seconds:.1f} s"
            return Receipt(name, durable=False, error=late, rank=rank)
        return Receipt(name, answer["durable"], answer["fault_to_durable_ns"], answer["error"], rank)

    def resources(self, timeout_seconds: float = 1.0) -> dict[str, int | None]:
        """Return what the recorder saw of the container's memory; see `firstfault.recorder.memory.MemoryWatch.report`.

        Raises:
            RecorderUnavailableError: there is no recorder, or it did not answer within `timeout_seconds`.
        """
        try:
            return self._ask({"op": "resources"}, timeout_seconds)
        except TimeoutError as error:
            raise self._silent(timeout_seconds) from error

    def roster(self, timeout_seconds: float = 10.0) -> list[str]:
        """Return the names of all roster entries in the storage.

        Raises:
            RecorderUnavailableError: there is no recorder, or it did not answer within `timeout_seconds`.
            StoreError: the storage could not be listed.
        """
        try:
            answer = self._ask({"op": "roster"}, timeout_seconds)
        except TimeoutError as error:
            raise self._silent(timeout_seconds) from error
        if answer["error"]:
            raise StoreError(answer["error"])
        names: list[str] = answer["names"]
        return names

    def end(self, timeout_seconds: float = 2.0) -> None:
        """Have the recorder finish what it has in hand and go; return when it does, or after `timeout_seconds`.

        Raises:
            RecorderUnavailableError: there is no recorder.
        """
        try:
            self._ask({"op": "end", "seconds": timeout_seconds}, timeout_seconds)
        except TimeoutError:
            return

    def _silent(self, seconds: float) -> RecorderUnavailableError:
        return RecorderUnavailableError(f"the recorder in {self._folder.path} did not answer within {seconds:.1f} s")

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the recorder's answer.

        Raises:
            RecorderUnavailableError: nobody listens, or the connection ended without an answer.
            TimeoutError: the answer did not come in time.
        """
        deadline = time.monotonic() + seconds
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                _connect(connection, str(self._folder.socket), deadline)
                connection.settimeout(_left(deadline))
                # the process that asks may be anybody's, with SIGPIPE set to end it
                connection.sendall(json.dumps(request).encode() + b"\n", socket.MSG_NOSIGNAL)
                line = _receive(connection, deadline)
        except TimeoutError:
            raise
        except OSError as error:
            raise RecorderUnavailableError(
                f"nobody records in {self._folder.path} ({error}); the recorder has ended, or was never started"
            ) from error
        if not line.endswith(b"\n"):
            raise RecorderUnavailableError(f"the recorder in {self._folder.path} ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _connect(connection: socket.socket, address: str, deadline: float) -> None:
    while True:
        connection.settimeout(_left(deadline))
        try:
            connection.connect(address)
        except BlockingIOError:
            # what Linux answers at once, instead of waiting, while the queue is full
            if time.monotonic() >= deadline:
                raise TimeoutError from None
            time.sleep(_FULL_S)
        else:
            return


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """Return one line, or as much of it as came before the connection ended."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(_left(deadline))
        chunk = connection.recv(_CHUNK_BYTES)
        if not chunk:
            break
        line += chunk
    return line


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), _LEAST_S)
