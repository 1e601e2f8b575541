"""Keeps the last 8 KiB of each worker's stderr, often the only evidence of a crash in native code.

An uncaught C++ exception, a device-side assertion and an abort of the allocator print the reason to
stderr. A worker's stderr goes through a FIFO to its agent, which passes every byte on at once and
keeps the end. Without an agent, or on a terminal, stderr is left as it is. If torch writes stderr
to a file (its options ``redirects`` and ``tee``), it is left as it is, too, and the end is read
from that file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import selectors
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from firstfault.recorder.folder import NodeFolder, WorkerFiles
from firstfault.recorder.orphans import relay_late_stderr, write_stderr
from firstfault_torch.guard import suppress_internal_errors
from firstfault_torch.time_limits import RELAY_CLOSE_TIMEOUT_SECONDS, SHUTDOWN_POLL_SECONDS

_STDERR = 2
_KEPT_BYTES = 8 * 1024
_CHUNK_BYTES = 64 * 1024
_NCCL_ABORT_ANNOUNCED = b"flight recorder dump before aborting"
"""torch 2.15 prints it 15 s before it aborts a process after a collective's timeout,
when its own dump has ended.
"""
_MAX_CHUNKS_PER_TURN = 64
"""Chunks to read from one worker before the next one's turn: more than a FIFO holds."""


def redirect_stderr(files: WorkerFiles) -> None:
    """Send the stderr of this process and its children through its agent; without one,
    leave it as it is.

    A stderr that is closed stays closed.
    """
    if os.isatty(_STDERR):
        return
    try:
        os.fstat(_STDERR)
        # fails if no process has the FIFO open for reading: without O_NONBLOCK the open would block
        # until one has
        descriptor = os.open(files.stderr, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    # Else a write to a full FIFO would fail with EAGAIN, which programs don't expect on stderr.
    os.set_blocking(descriptor, True)
    # the program may have set it to anything
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    os.dup2(descriptor, _STDERR)
    os.close(descriptor)


class StderrRelay:
    """The agent's end: the FIFOs of one round's workers.

        made      the FIFOs exist and have a reader; the workers are forked, and may write
        start     a thread passes on each worker's output until its FIFO has no writer
        tail      any thread reads ahead what a worker has left; the relaying thread passes it on
        close     the thread passes on the rest, hands FIFOs with a writer to another process, and
                  ends
        flush_relays  before the process exits: wait for closed relays that were slow

    `destinations` has, by local rank, where torch sends each worker's stderr: a file, `os.devnull`,
    or "" for the agent's own. `alarm` is called with a local rank, once, when that worker's stderr
    announces that torch will soon abort it; it must not block.

    Raises:
        OSError: the FIFOs could not be made.
    """

    def __init__(
        self,
        files: NodeFolder,
        round_: int,
        destinations: Mapping[int, str],
        alarm: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._alarm = alarm
        self._alarmed: set[int] = set()
        self._written = {
            rank: file for rank, file in destinations.items() if file not in {"", os.devnull}
        }
        self._silent = {rank for rank, file in destinations.items() if file == os.devnull}
        self._tails: dict[int, bytearray] = {}
        self._taken: dict[int, bytes] = {}
        """What `tail` has read, to be passed on before anything else."""
        self._open: dict[int, int] = {}
        self._paths: dict[int, Path] = {}
        self._lock = threading.Lock()
        """Held while a FIFO is read, never while something is written:
        the reader of the agent's stderr may be slow.
        """
        self._thread: threading.Thread | None = None
        self._wake_reader, self._wake_writer = os.pipe()
        """A byte wakes the thread; the end stops it."""
        _open_relays.add(self)
        try:
            for local_rank in destinations.keys() - self._written.keys():
                path = files.worker(round_, local_rank).stderr
                os.mkfifo(path, 0o600)
                self._paths[local_rank] = path
                # Before the worker exists: it opens the FIFO only if there is a reader. Without
                # O_NONBLOCK this would wait for a writer.
                self._open[local_rank] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                self._tails[local_rank] = bytearray()
        except BaseException:
            self.close()
            raise

    def fifos(self) -> dict[int, str]:
        """Return where programs write their stderr, by local rank; on a terminal,
        nowhere else than to that.
        """
        return {} if os.isatty(_STDERR) else {rank: str(self._paths[rank]) for rank in self._open}

    def start(self) -> None:
        """Begin to pass on. Call it after the workers were forked:
        they must not inherit the thread's locks.

        Raises:
            RuntimeError: the system allows no further thread; another process passes on what the
                workers write.
        """
        thread = threading.Thread(target=self._relay, name="firstfault-stderr", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # A FIFO with a reader that doesn't read would block a worker once it is full.
            self._hand_over_fifos()
            raise
        self._thread = thread

    def tail(self, local_rank: int) -> str:
        """Return the end of a worker's stderr, complete if the worker has ended.

        It begins with a whole line if there is one, and is empty if the worker wrote nothing.
        """
        if local_rank in self._written:
            return _whole_lines(_read_tail(self._written[local_rank]))
        with self._lock:
            for _ in range(_MAX_CHUNKS_PER_TURN):
                if not (data := self._read(local_rank, _CHUNK_BYTES)):
                    break
                # The caller wants it now, but the order on the agent's stderr is the relaying
                # thread's: it writes this before what it reads next.
                self._taken[local_rank] = self._taken.get(local_rank, b"") + data
            # `_open_relays` is checked under the lock with which `close` leaves it: afterwards the
            # number of the pipe's writing end may belong to another file.
            if self._taken and self in _open_relays:
                os.write(self._wake_writer, b"\0")
            return _whole_lines(bytes(self._tails.get(local_rank, b"")))

    def write(self, local_rank: int, text: str) -> None:
        """Write a text where the worker's stderr goes; it isn't kept."""
        if local_rank in self._written:
            with (
                contextlib.suppress(OSError),
                Path(self._written[local_rank]).open("a", encoding="utf-8") as file,
            ):
                file.write(text)
        elif local_rank not in self._silent:
            sys.stderr.write(text)
            sys.stderr.flush()

    def close(self) -> None:
        """Pass on what is there, then stop; another process passes on what is written later."""
        # Closing the pipe's writing end stops the thread: it finds the end after the bytes that are
        # still in the pipe.
        with self._lock:
            if self not in _open_relays:
                return  # closed already, or a copy in a forked child
            _open_relays.discard(self)
            os.close(self._wake_writer)
        if self._thread is not None:
            # The reader of the agent's own stderr may be slow or stopped: the agent continues, and
            # waits again at its end.
            self._thread.join(RELAY_CLOSE_TIMEOUT_SECONDS)
            _closing_threads.add(self._thread)
        else:
            self._end()

    def forget(self) -> None:
        """Close a forked child's copies: a FIFO must not have a reader when the agent is gone."""
        # Without the lock: another thread of the agent may have held it at the fork, and doesn't
        # exist in the child.
        for descriptor in (*self._open.values(), self._wake_reader, self._wake_writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._open.clear()

    def _relay(self) -> None:
        try:
            with suppress_internal_errors("passing on what the workers write to stderr"):
                self._relay_until_closed()
        finally:
            # in any case: a worker must neither block on a FIFO that isn't read, nor get SIGPIPE
            self._end()

    def _relay_until_closed(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            for local_rank, descriptor in self._open.items():
                selector.register(descriptor, selectors.EVENT_READ, local_rank)
            # A FIFO that no process has opened for writing yet isn't ready. It is once a writer has
            # come and gone.
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        if not os.read(self._wake_reader, _CHUNK_BYTES):
                            return
                        for local_rank in list(self._taken):
                            self._drain(local_rank)
                    elif not self._drain(key.data):
                        # `_end` closes its descriptor
                        selector.unregister(key.fileobj)

    def _end(self) -> None:
        self._hand_over_fifos()
        os.close(self._wake_reader)

    def _hand_over_fifos(self) -> None:
        """Close the FIFOs; another process reads those that still have a writer."""
        for path in self._paths.values():
            # First: after this no process can open one. A process that opened one that is read no
            # more would get SIGPIPE.
            with contextlib.suppress(OSError):
                path.unlink()
        written = [local_rank for local_rank in self._open if self._drain(local_rank)]
        with self._lock:  # `tail` reads no more
            opened, self._open = self._open, {}
        # Drained twice: between the first time and the lock `tail` may have read more into
        # `_taken`. With `_open` empty this only passes that on.
        for local_rank in opened:
            self._drain(local_rank)
        if written:
            with suppress_internal_errors(
                "passing on the stderr of processes that outlive their worker"
            ):
                relay_late_stderr({opened[rank]: rank not in self._silent for rank in written})
        for descriptor in opened.values():
            os.close(descriptor)

    def _drain(self, local_rank: int) -> bool:
        """Pass on what a worker has written; return False if it will write no more."""
        ends_line = False
        for number in itertools.count():
            if number >= _MAX_CHUNKS_PER_TURN and ends_line:
                break
            with self._lock:
                # then byte by byte, to the end of a line: the next worker's lines come after it
                size = _CHUNK_BYTES if number < _MAX_CHUNKS_PER_TURN else 1
                data = self._taken.pop(local_rank, b"") or self._read(local_rank, size)
            if not data:
                return data is None
            ends_line = data.endswith(b"\n") or number >= _MAX_CHUNKS_PER_TURN + select.PIPE_BUF
            if local_rank not in self._silent:
                write_stderr(data)
        return True

    def _read(self, local_rank: int, size: int) -> bytes | None:
        """Read what a worker has written, and keep its end; None if there is nothing,
        empty if it will write no more.

        The caller holds the lock.
        """
        if local_rank not in self._open:
            return b""
        try:
            data = os.read(self._open[local_rank], size)
        except BlockingIOError:
            return None
        kept = self._tails[local_rank]
        kept += data
        # The announcement may be split across two reads: the search begins a little before this
        # one's data.
        begins = max(len(kept) - len(data) - len(_NCCL_ABORT_ANNOUNCED), 0)
        if local_rank not in self._alarmed and kept.find(_NCCL_ABORT_ANNOUNCED, begins) >= 0:
            self._alarmed.add(local_rank)
            self._alarm(local_rank)
        del kept[:-_KEPT_BYTES]
        return data


def _read_tail(file: str) -> bytes:
    """Return the tail of a file, or nothing if the file can't be read."""
    try:
        with Path(file).open("rb") as stream:
            stream.seek(max(os.fstat(stream.fileno()).st_size - _KEPT_BYTES, 0))
            return stream.read(_KEPT_BYTES)
    except OSError:
        return b""


def _whole_lines(kept: bytes) -> str:
    if len(kept) == _KEPT_BYTES:
        first, found, rest = kept.partition(b"\n")
        kept = rest if found else first
    # an indented first line means that the beginning of a traceback is cut
    return kept.decode(errors="replace").lstrip("\r\n").rstrip()


_open_relays: weakref.WeakSet[StderrRelay] = weakref.WeakSet()
_closing_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def flush_relays(shutdown_requested: threading.Event) -> None:
    """Wait until closed relays have passed everything on, as the workers would without them,
    or until a shutdown.
    """
    # In short steps, because a join that has begun can't be ended by a shutdown request.
    for thread in list(_closing_threads):
        while thread.is_alive() and not shutdown_requested.is_set():
            thread.join(SHUTDOWN_POLL_SECONDS)


def _forget_all() -> None:
    for tails in list(_open_relays):
        tails.forget()
    _open_relays.clear()
    _closing_threads.clear()


os.register_at_fork(after_in_child=_forget_all)
