"""Starts and ends the node's recorder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from firstfault.errors import RecorderUnavailableError
from firstfault.recorder import time_limits
from firstfault.recorder.client import RecorderClient
from firstfault.recorder.folder import NodeFolder
from firstfault.recorder.folder_keeper import PREFIX, FolderLock, lock_folder

IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE)
"""Signals that terminate a pod: the recorder ends with its agent instead."""
_MKDTEMP_CHARACTERS = 8
"""Length of what `tempfile.mkdtemp` appends to a prefix."""
_MAX_SOCKET_PATH_BYTES = 107
"""Size of sun_path in unix(7), without the final NUL."""
_LONGEST_NAME = "worker-9999-999.line"
"""The longest name of a socket in the folder."""
# only as the parent of a folder by mkdtemp, where TMPDIR can't be used
_SHORT_FOLDER = "/tmp"  # noqa: S108
_MAX_WAITING_CONNECTIONS = 1024
"""Connections that may wait while the recorder starts: more than a node has processes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a recorder."""

    output_prefix: str
    """URI below which the recorder uploads."""
    deadline_seconds: float
    """Longest upload of each document after the agent's death, seconds."""
    agent_pid: int
    """The process that started the recorder; the recorder ends with it."""
    listener: int
    """Descriptor of the listening socket, inherited from the agent."""
    left_seconds: float
    """How long processes of the workers may run on after the agent's death, seconds."""


def start_recorder(
    output_prefix: str,
    *,
    deadline_seconds: float,
    left_seconds: float = time_limits.ORPHANS_GRACE_SECONDS,
    own_session: bool = False,
) -> RecorderProcess:
    """Start the recorder of this node and return at once;
    clients that connect wait until it is ready.

    It ignores the signals that terminate a pod, and ends with this process.

    Args:
        output_prefix: URI below which it uploads.
        deadline_seconds: longest upload of each document after this process has died.
        left_seconds: how long processes of workers may run on after this process has died; then
            they get SIGKILL.
        own_session: outlive a SIGKILL to this process's group; else the recorder is in its group
            and session.

    Raises:
        OSError: the folder could not be made, or the process could not be started.
    """
    folder = NodeFolder(_make_folder())
    lock = lock_folder(folder.path)
    kept_descriptors = (lock.descriptor,) if lock is not None else ()
    try:
        (folder.path / "spool").mkdir()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, _signals_blocked():
            # before the recorder's process exists, so that early clients can connect
            listener.bind(str(folder.socket))
            listener.listen(_MAX_WAITING_CONNECTIONS)
            settings = Settings(
                output_prefix,
                deadline_seconds,
                os.getpid(),
                listener.fileno(),
                left_seconds,
            )
            # Afterwards `with` closes the agent's copy of the listener. Once the recorder is dead,
            # connect() then fails at once; with a copy left open, clients would wait in a backlog
            # that nobody accepts from.
            process = subprocess.Popen(  # noqa: S603 - our own module
                [
                    sys.executable,
                    "-m",
                    "firstfault.recorder",
                    str(folder.path),
                    json.dumps(asdict(settings)),
                ],
                stdin=subprocess.DEVNULL,
                close_fds=True,
                pass_fds=(listener.fileno(), *kept_descriptors),
                start_new_session=own_session,
            )
    except BaseException:
        folder.remove()
        if lock is not None:
            lock.release()
        raise
    return RecorderProcess(folder, process, lock)


@dataclass(frozen=True, slots=True)
class RecorderProcess:
    """The recorder that this process has started."""

    folder: NodeFolder
    """The node's folder; removed when the recorder has ended."""
    _process: subprocess.Popen[bytes]
    _lock: FolderLock | None
    """Held here, too: if the recorder is killed, the folder is still in use."""

    @property
    def pid(self) -> int:
        """The recorder's process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether the recorder is running."""
        return self._process.poll() is None

    def leave(self) -> None:
        """Leave the recorder running until this process ends; nothing waits for it."""
        if self._lock is not None:
            # this process is the user's program, which needs no further descriptor
            self._lock.release()
        self._process.returncode = 0  # otherwise Popen.__del__ warns about a running child at exit

    def end(self, timeout_seconds: float = time_limits.RECORDER_EXIT_GRACE_SECONDS) -> None:
        """Let the recorder finish its uploads, kill it after `timeout_seconds`,
        and remove the folder.

        A second call does nothing.
        """
        deadline = time.monotonic() + timeout_seconds
        if self.alive():
            with contextlib.suppress(RecorderUnavailableError):
                RecorderClient(self.folder).end(timeout_seconds)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(deadline - time.monotonic(), 0))
        # Frozen, or still waiting for the storage: uploads that aren't finished are lost, but the
        # job can exit.
        if self.alive():
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(time_limits.KILLED_PROCESS_TIMEOUT_SECONDS)
        self.folder.remove()
        if self._lock is not None:
            self._lock.release()


def _make_folder() -> Path:
    """Return a new folder that only this user may enter, with a path short enough for a socket."""
    where = tempfile.gettempdir()
    longest = f"{Path(where).absolute()}/{PREFIX}{'x' * _MKDTEMP_CHARACTERS}/{_LONGEST_NAME}"
    is_short = len(os.fsencode(longest)) <= _MAX_SOCKET_PATH_BYTES
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=where if is_short else _SHORT_FOLDER))


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals in this thread, and in the processes it starts until
    they ignore the signals.

    Otherwise a Ctrl-C could kill a new recorder before it ignores SIGINT.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
