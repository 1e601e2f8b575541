"""The folder that the agent, the workers and the recorder of one node share, and the recorder's client.

A spool is one process's folder of documents and their receipts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from firstfault.errors import RecorderUnavailableError, StoreError
from firstfault.model import Receipt, Resources
from firstfault.recorder import time_limits
from firstfault.utils.text import parse_json

DOCUMENT = "document.pb"
"""In `NodeFolder.last_words`: the error document about the agent's death, without a time; empty: it ends normally."""
PRESENCE = "presence.pb"
"""In `NodeFolder.last_words`: the agent's last roster entry (phase failed), without receipts and time."""
WRITTEN_BY_WORKERS = ("stderr-", "stacks-", "fatal-")
"""Beginnings of the names of files that a worker holds open for writing; a fork inherits them."""
SESSIONS = "sessions.json"
"""In the node's folder: what `NodeFolder.note_sessions` keeps."""
_REMOVALS = 5
"""Most attempts to remove the folder."""
_MAX_STACKS = 64 * 1024
_RECEIPT = ".receipt.json"
_WITHDRAWN = ".withdrawn"


@dataclass(frozen=True, slots=True)
class SpooledDocument:
    """A document in the spool, with its receipt."""

    path: Path
    receipt: Receipt | None
    """None: no upload has finished."""
    withdrawn: bool = False
    """The writer withdrew the document: it must not be uploaded."""

    @property
    def name(self) -> str:
        """The object's name in the storage."""
        return self.path.name

    @property
    def is_durable(self) -> bool:
        """Whether it is in the storage."""
        return self.receipt is not None and self.receipt.durable

    @property
    def settled(self) -> Receipt | None:
        """The receipt of a document that is durable or withdrawn; None: it must be uploaded."""
        if self.withdrawn:
            return Receipt(self.name, durable=self.is_durable, withdrawn=True)
        return self.receipt if self.is_durable else None


@dataclass(frozen=True, slots=True)
class Spool:
    """The folder of one process's documents."""

    folder: Path
    """Created by the first write. Its parent must exist: late writers must not recreate the node's folder."""

    def add(self, name: str, data: bytes) -> Path:
        """Write a file atomically and return its path; the name of a document is the object's, with ``.pb``.

        Raises:
            OSError: the file could not be written.
        """
        self.folder.mkdir(exist_ok=True)
        # A rename is atomic: if this process is killed while it writes, the recorder finds no partial document.
        part = self.folder / f"{name}.part"
        part.write_bytes(data)
        return part.replace(self.folder / name)

    def add_receipt(self, receipt: Receipt) -> None:
        """Write the receipt of a document.

        Raises:
            OSError: the file could not be written.
        """
        before = self._read_receipt(receipt.name)
        if before is not None and before.durable and not receipt.durable:
            return  # of two concurrent uploads, the slower one failed after the faster one had succeeded
        self.add(f"{receipt.name}{_RECEIPT}", json.dumps(asdict(receipt)).encode())

    def withdraw(self, name: str) -> None:
        """Mark a document, which may not exist yet, as withdrawn: the recorder will not upload it.

        Raises:
            OSError: the file could not be written.
        """
        self.folder.mkdir(exist_ok=True)
        # A mark, not a removal: the document may be written only after this, or an upload may be reading it right now.
        (self.folder / f"{name}{_WITHDRAWN}").touch()

    def remove(self, name: str) -> None:
        """Remove a document and its receipt, if they are there."""
        for file in (name, f"{name}{_RECEIPT}"):
            with contextlib.suppress(OSError):
                (self.folder / file).unlink()

    def documents(self) -> list[SpooledDocument]:
        """Return the documents in the spool, by name."""
        return [
            SpooledDocument(path, self._read_receipt(path.name), path.with_name(f"{path.name}{_WITHDRAWN}").exists())
            for path in sorted(self.folder.glob("*.pb"))
        ]

    def _read_receipt(self, name: str) -> Receipt | None:
        try:
            return Receipt(**parse_json((self.folder / f"{name}{_RECEIPT}").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


def get_stack_size(stacks: Path) -> int:
    """Return the size of a file of stacks; 0 if it doesn't exist."""
    try:
        return stacks.stat().st_size
    except OSError:
        return 0


def get_stack_tail(stacks: Path, start: int = 0) -> str:
    """Return the end of a file of stacks, without its first `start` bytes; empty if it can't be read."""
    try:
        return stacks.read_bytes()[start:][-_MAX_STACKS:].decode(errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """The node's folder; no other class makes names in it."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether the folder is there. The recorder removes it when it ends, and late writers must not recreate it.

        Something of another user in its place, such as after a cleaner of /tmp has removed it, isn't the folder.
        """
        with contextlib.suppress(OSError):
            status = self.path.lstat()
            return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        return False

    # --- the recorder's files -------------------------------------------------------------------------------------

    @property
    def socket(self) -> Path:
        """The socket on which the recorder listens."""
        return self.path / "recorder.sock"

    def note_sessions(self, sessions: Iterable[int]) -> None:
        """Keep the sessions of the workers that lead one: the recorder ends what a dead agent leaves in them.

        Raises:
            OSError: the file could not be written.
        """
        # Written whole or not at all: a full disk must not cost the list of before.
        part = self.path / f"{SESSIONS}.part"
        part.write_text(json.dumps(sorted(sessions)), encoding="ascii")
        part.replace(self.path / SESSIONS)

    @property
    def sessions(self) -> frozenset[int]:
        """The sessions of workers that lead one."""
        try:
            return frozenset(json.loads((self.path / SESSIONS).read_text(encoding="ascii")))
        except (OSError, ValueError):
            return frozenset()

    def open_stderr(self) -> list[int]:
        """Return descriptors of the FIFOs that take stderr from the workers, to read from."""
        found = []
        for path in self.path.glob("stderr-*.fifo"):
            with contextlib.suppress(OSError):
                # Without O_NONBLOCK, open() waits for a writer; the worker may be dead.
                found.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        return found

    def remove(self) -> None:
        """Remove the folder and its contents. Late writers find no folder, and don't recreate it."""
        # Rename first: late writers use the old path, so they can't add files to the folder that is being removed.
        gone = self.path.with_name(f"{self.path.name}.gone")
        with contextlib.suppress(OSError):
            self.path.rename(gone)
        for path in (gone, self.path):
            # A writer that looked up the folder just before the rename may add a file during the removal.
            for _ in range(_REMOVALS):
                shutil.rmtree(path, ignore_errors=True)
                if not path.exists():
                    break

    # --- spools -----------------------------------------------------------------------------------------------------

    @property
    def last_words(self) -> Spool:
        """`DOCUMENT` and `PRESENCE`: written at the start of each round, uploaded if the agent dies."""
        return Spool(self.path / "last-words")

    @property
    def agent_spool(self) -> Spool:
        """Documents of the agent itself."""
        return self.spool("agent")

    @property
    def outgoing_spool(self) -> Spool:
        """Roster entries and the verdict. It isn't one of the `spools`: those hold only error documents."""
        return Spool(self.path / "outgoing")

    def spool(self, name: str) -> Spool:
        """Return a process's spool: ``0-1`` for round 0 and local rank 1, or ``agent``."""
        return Spool(self.path / "spool" / name)

    def spools(self) -> list[Spool]:
        """Return the spools of all processes, by name."""
        return [Spool(path) for path in sorted((self.path / "spool").glob("*"))]

    # --- files of the agent and its workers ---------------------------------------------------------------------------

    @property
    def agent_socket(self) -> Path:
        """The agent's socket."""
        return self.path / "agent.line"

    @property
    def hold_forked_workers(self) -> Path:
        """The file that exists while the agent forks workers."""
        return self.path / "starting"

    def worker(self, round_: int, local_rank: int) -> WorkerFiles:
        """Return the files of a worker."""
        name = f"{round_}-{local_rank}"
        return WorkerFiles(
            spool=self.spool(name),
            socket=self.path / f"worker-{name}.line",
            stderr=self.path / f"stderr-{name}.fifo",
            stacks=self.path / f"stacks-{name}.txt",
            stacks_ready=self.path / f"stacks-{name}.ready",
            fatal_stacks=self.path / f"fatal-{name}.txt",
        )

    def timers(self, round_: int) -> Path:
        """Return the FIFO of the watchdog's deadlines."""
        return self.path / f"timers-{round_}.fifo"

    def decks(self, round_: int) -> Path:
        """Return the file that keeps rank 0's decks."""
        return self.path / f"decks-{round_}.json"


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """The files of one worker of a round."""

    spool: Spool
    """Its documents."""
    socket: Path
    """The socket on which its agent asks it."""
    stderr: Path
    """The FIFO that takes its stderr to its agent."""
    stacks: Path
    """The stacks that it writes when it is asked."""
    stacks_ready: Path
    """The file that exists once it may be asked for its stacks."""
    fatal_stacks: Path
    """The stacks that a fatal signal leaves."""


# --- the client of the recorder ---------------------------------------------------------------------------------------

# Protocol: one connection for each request. The client sends a line of JSON, the recorder answers with two lines. The
# first one, `RECEIVED`, comes at once; without it the recorder is frozen, and the caller uploads the file itself. If
# only the second line is missing, the storage is slow, and the recorder continues the upload.


RECEIVED = b"received\n"
"""The first line of each answer."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where an upload goes, and further content of its receipt."""

    path: str
    """The object's path, relative to the output prefix."""
    fault_monotonic_ns: int | None = None
    """CLOCK_MONOTONIC at the fault; `Receipt.fault_to_durable_ns` counts from it."""
    rank: int | None = None
    """The worker's global rank."""

    @property
    def name(self) -> str:
        """The object's name."""
        return self.path.rsplit("/", 1)[-1]

    def failed(self, reason: str) -> Receipt:
        """Return the receipt of an upload that failed."""
        return Receipt(self.name, durable=False, error=reason, rank=self.rank)

    def done(self) -> Receipt:
        """Return the receipt of an upload that has just ended."""
        took = time.monotonic_ns() - self.fault_monotonic_ns if self.fault_monotonic_ns else None
        return Receipt(self.name, durable=True, fault_to_durable_ns=took, rank=self.rank)


class Recorder:
    """A client of the recorder that listens in `folder`. It keeps nothing open, so it may be forked and pickled."""

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder

    def put(self, target: Target, file: Path, seconds: float) -> Receipt:
        """Ask the recorder to upload a file; wait at most `seconds` and return the receipt.

        The recorder continues after that. If the file is in a spool, it writes the receipt there.

        Raises:
            RecorderUnavailableError: no recorder is running, it is frozen, or it ended without an answer.
        """
        answer = self._ask({"op": "put", "file": str(file.absolute()), "target": asdict(target)}, seconds)
        return Receipt(**answer) if answer else target.failed(f"the storage did not answer within {seconds:.1f} s")

    def resources(self, timeout_seconds: float) -> Resources:
        """Return the container's memory figures.

        Raises:
            RecorderUnavailableError: no recorder is running, or it didn't answer within `timeout_seconds`.
        """
        return Resources(**(self._ask({"op": "resources"}, timeout_seconds) or self._is_silent(timeout_seconds)))

    def roster(self, timeout_seconds: float = time_limits.ROSTER_LISTING_TIMEOUT_SECONDS) -> list[str]:
        """Return the names of all roster entries in the storage.

        Raises:
            RecorderUnavailableError: no recorder is running, or it didn't answer within `timeout_seconds`.
            StoreError: the storage could not be listed.
        """
        answer = self._ask({"op": "roster"}, timeout_seconds) or self._is_silent(timeout_seconds)
        if answer["error"]:
            raise StoreError(answer["error"])
        names: list[str] = answer["names"]
        return names

    def end(self, timeout_seconds: float = time_limits.RECORDER_EXIT_GRACE_SECONDS) -> None:
        """Ask the recorder to finish its uploads and exit; return when it does, or after `timeout_seconds`.

        Raises:
            RecorderUnavailableError: no recorder is running.
        """
        self._ask({"op": "end", "seconds": timeout_seconds}, timeout_seconds)

    def _is_silent(self, seconds: float) -> NoReturn:
        raise RecorderUnavailableError(f"the recorder in {self._folder.path} did not answer within {seconds:.1f} s")

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the recorder's answer; empty: it has received the request, and has no result within `seconds`.

        Raises:
            RecorderUnavailableError: no recorder is running, it is frozen, or it ended without an answer.
        """
        deadline = time.monotonic() + seconds
        # A frozen recorder may use at most half of the time: the caller needs the rest to upload the file itself.
        first = min(time_limits.REQUEST_RECEIPT_TIMEOUT_SECONDS, seconds / 2)
        received = line = b""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, connection.makefile("rb") as lines:
                _send(connection, str(self._folder.socket), request, time.monotonic() + first)
                received = lines.readline()
                connection.settimeout(_get_remaining_seconds(deadline))
                line = lines.readline()
        # TimeoutError is an OSError, so it comes first. A timeout after `received` isn't an error: the recorder is
        # uploading.
        except TimeoutError:
            return {} if received else self._is_silent(first)
        except OSError as error:
            raise RecorderUnavailableError(
                f"no recorder is running in {self._folder.path} ({error}); it has ended, or was never started"
            ) from error
        if not line.endswith(b"\n"):
            raise RecorderUnavailableError(f"the recorder in {self._folder.path} ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _send(connection: socket.socket, address: str, request: dict[str, Any], deadline: float) -> None:
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
