"""What the agent and its workers ask the node's recorder."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from firstfault.errors import RecorderUnavailableError, StoreError
from firstfault.model import Receipt, Resources
from firstfault.recorder import time_limits
from firstfault.recorder.folder import NodeFolder

if TYPE_CHECKING:
    from firstfault.store import Store

RECEIVED = b"received\n"
"""The first line of each answer."""
ALREADY_EXISTS = "the object exists already"
"""The error in the receipt of an upload that left an existing object alone."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where an upload goes, and further content of its receipt."""

    path: str
    """The object's path, relative to the output prefix."""
    fault_monotonic_ns: int | None = None
    """CLOCK_MONOTONIC at the fault; `Receipt.fault_to_durable_ns` counts from it."""
    rank: int | None = None
    """The worker's global rank."""
    only_new: bool = False
    """Whether to leave an object alone that exists."""

    @property
    def name(self) -> str:
        """The object's name."""
        return self.path.rsplit("/", 1)[-1]

    async def write(self, store: Store, data: bytes) -> bool:
        """Write the object; return whether it was written.

        Raises:
            firstfault.errors.StoreError: the storage failed.
        """
        if self.only_new:
            return await store.create(self.path, data)
        await store.put(self.path, data)
        return True

    def failed(self, reason: str) -> Receipt:
        """Return the receipt of an upload that failed."""
        return Receipt(self.name, durable=False, error=reason, rank=self.rank)

    def refused(self) -> Receipt:
        """Return the receipt of an upload that left an existing object alone."""
        return self.failed(ALREADY_EXISTS)

    def done(self) -> Receipt:
        """Return the receipt of an upload that has just ended."""
        took = time.monotonic_ns() - self.fault_monotonic_ns if self.fault_monotonic_ns else None
        return Receipt(self.name, durable=True, fault_to_durable_ns=took, rank=self.rank)


class RecorderClient:
    """A client of the recorder that listens in `folder`. It keeps nothing open,
    so it may be forked and pickled.
    """

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder

    def put(self, target: Target, file: Path, seconds: float) -> Receipt:
        """Ask the recorder to upload a file; wait at most `seconds` and return the receipt.

        The recorder continues after that. If the file is in a spool, it writes the receipt there.

        Raises:
            RecorderUnavailableError: no recorder is running, it is frozen, or it ended without an
                answer.
        """
        answer = self._ask(
            {"op": "put", "file": str(file.absolute()), "target": asdict(target)}, seconds
        )
        return (
            Receipt(**answer)
            if answer
            else target.failed(f"the storage did not answer within {seconds:.1f} s")
        )

    def resources(self, timeout_seconds: float) -> Resources:
        """Return the container's memory figures.

        Raises:
            RecorderUnavailableError: no recorder is running, or it didn't answer within
                `timeout_seconds`.
        """
        return Resources(
            **(self._ask({"op": "resources"}, timeout_seconds) or self._is_silent(timeout_seconds))
        )

    def roster(
        self, timeout_seconds: float = time_limits.ROSTER_LISTING_TIMEOUT_SECONDS
    ) -> list[str]:
        """Return the names of all roster entries in the storage.

        Raises:
            RecorderUnavailableError: no recorder is running, or it didn't answer within
                `timeout_seconds`.
            StoreError: the storage could not be listed.
        """
        answer = self._ask({"op": "roster"}, timeout_seconds) or self._is_silent(timeout_seconds)
        if answer["error"]:
            raise StoreError(answer["error"])
        names: list[str] = answer["names"]
        return names

    def end(self, timeout_seconds: float = time_limits.RECORDER_EXIT_GRACE_SECONDS) -> None:
        """Ask the recorder to finish its uploads and exit; return when it does,
        or after `timeout_seconds`.

        Raises:
            RecorderUnavailableError: no recorder is running.
        """
        self._ask({"op": "end", "seconds": timeout_seconds}, timeout_seconds)

    def _is_silent(self, seconds: float) -> NoReturn:
        raise RecorderUnavailableError(
            f"the recorder in {self._folder.path} did not answer within {seconds:.1f} s"
        )

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the recorder's answer, or an empty dictionary if the recorder received the request
        but has no result within `seconds`.

        Raises:
            RecorderUnavailableError: no recorder is running, it is frozen, or it ended without an
                answer.
        """
        deadline = time.monotonic() + seconds
        # A frozen recorder may use at most half of the time: the caller needs the rest to upload
        # the file itself.
        first = min(time_limits.REQUEST_RECEIPT_TIMEOUT_SECONDS, seconds / 2)
        received = line = b""
        try:
            with (
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
                connection.makefile("rb") as lines,
            ):
                _send(connection, str(self._folder.socket), request, time.monotonic() + first)
                received = lines.readline()
                connection.settimeout(_get_remaining_seconds(deadline))
                line = lines.readline()
        # TimeoutError is an OSError, so it comes first. A timeout after `received` isn't an error:
        # the recorder is uploading.
        except TimeoutError:
            return {} if received else self._is_silent(first)
        except OSError as error:
            raise RecorderUnavailableError(
                f"no recorder is running in {self._folder.path} ({error}); it has ended, or was"
                " never started"
            ) from error
        if not line.endswith(b"\n"):
            raise RecorderUnavailableError(
                f"the recorder in {self._folder.path} ended without an answer"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def _send(
    connection: socket.socket,
    address: str,
    request: dict[str, Any],
    deadline: float,
) -> None:
    """Connect and send a request; reading the answer then has the time that is left."""
    while True:
        connection.settimeout(_get_remaining_seconds(deadline))
        try:
            connection.connect(address)
            break
        except BlockingIOError:
            # Linux returns EAGAIN at once while the backlog is full
            if time.monotonic() >= deadline:
                raise TimeoutError from None
            time.sleep(time_limits.FULL_BACKLOG_RETRY_SECONDS)
    connection.settimeout(_get_remaining_seconds(deadline))
    # SIGPIPE would end a worker that has set it to its default action
    connection.sendall(json.dumps(request).encode() + b"\n", socket.MSG_NOSIGNAL)
    connection.settimeout(_get_remaining_seconds(deadline))


def _get_remaining_seconds(deadline: float) -> float:
    return max(deadline - time.monotonic(), time_limits.MIN_SOCKET_TIMEOUT_SECONDS)
