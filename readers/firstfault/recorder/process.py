"""Starting a node's recorder, and ending it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from firstfault.errors import RecorderUnavailableError, UsageError
from firstfault.recorder.client import Recorder
from firstfault.recorder.folder import SOCKET, NodeFolder, Settings
from firstfault.recorder.signal_mask import held_back

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["RecorderProcess", "start_recorder"]

_PREFIX = "firstfault-"
_MKDTEMP_CHARACTERS = 8
"""What `tempfile.mkdtemp` appends to a prefix."""
_MAX_SOCKET_PATH_BYTES = 107
"""sun_path of unix(7), without its end."""
_SHORT_FOLDER = "/tmp"  # noqa: S108 - only as the parent of a folder by mkdtemp, where TMPDIR cannot be used
_BACKLOG = 1024
"""Connections that may wait for the recorder to come up: more than a node has processes."""
_KILLED_S = 1.0
"""How long a killed process may take to be gone, seconds; one that hangs in the kernel takes longer."""


def start_recorder(
    output_prefix: str,
    *,
    deadline_seconds: float,
    parent: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> RecorderProcess:
    """Start the recorder of this node and return at once: whoever connects waits until it is up.

    It is in this process's group and session, ignores the signals that end a pod, and ends with this process.

    Args:
        output_prefix: URI below which it uploads.
        deadline_seconds: for each document that it uploads when this process has died.
        parent: folder in which to make its folder; None: where temporary files go.
        environment: all of its environment variables; None: this process's.

    Raises:
        UsageError: `parent` is too long for a socket in it.
        OSError: the folder could not be made, or the process not be started.
    """
    folder = NodeFolder(_make_folder(parent))
    try:
        with _listening(folder.socket) as listener:
            folder.set_up(Settings(output_prefix, deadline_seconds, os.getpid(), listener.fileno()))
            process = _start(folder, listener.fileno(), environment)
    except BaseException:
        folder.remove()
        raise
    return RecorderProcess(folder, process)


class RecorderProcess:
    """A recorder that this process has started."""

    def __init__(self, folder: NodeFolder, process: subprocess.Popen[bytes]) -> None:
        self._folder = folder
        self._process = process

    @property
    def folder(self) -> NodeFolder:
        """The folder in which it listens; gone when it has ended."""
        return self._folder

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def end(self, timeout_seconds: float = 2.0) -> None:
        """Let it finish what it has in hand, and leave neither process nor folder, whatever happens.

        Args:
            timeout_seconds: after which it is killed. A second call does nothing.
        """
        deadline = time.monotonic() + timeout_seconds
        if self.alive():
            with contextlib.suppress(RecorderUnavailableError):
                Recorder(self._folder).end(timeout_seconds)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(deadline - time.monotonic(), 0))
        if self.alive():
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILLED_S)
        self._folder.remove()


def _make_folder(parent: str | None) -> Path:
    """Return a new folder that only this user may enter, with a path that is short enough for a socket in it."""
    if parent is not None and not _short_enough(parent):
        raise UsageError(
            f"{parent!r} is too long: a socket in it may have a path of {_MAX_SOCKET_PATH_BYTES} bytes; "
            "give the recorder a folder with a shorter path"
        )
    where = parent or tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where if _short_enough(where) else _SHORT_FOLDER))


def _short_enough(parent: str) -> bool:
    longest = f"{Path(parent).absolute()}/{_PREFIX}{'x' * _MKDTEMP_CHARACTERS}/{SOCKET}"
    return len(os.fsencode(longest)) <= _MAX_SOCKET_PATH_BYTES


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """Listen before the process that will accept exists, so that nobody comes too early."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        yield listener


def _start(folder: NodeFolder, listener: int, environment: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "firstfault.recorder", str(folder.path)]
    with held_back():
        return subprocess.Popen(  # noqa: S603 - our own module
            command, stdin=subprocess.DEVNULL, close_fds=True, pass_fds=(listener,), env=environment
        )
