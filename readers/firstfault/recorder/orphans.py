"""Kills the orphans of a training's workers, and relays what surviving processes write to stderr.

A worker that ends by SIGKILL or ``os._exit`` can't stop its data loaders, pools and programs. These
orphans hold memory, GPUs and ports that the next round needs, and outlive the job unless its
container ends. A process that started a new session, such as a daemon, is meant to outlive its
worker and isn't killed. Its stderr is the worker's FIFO, so it would get SIGPIPE once nobody reads
the FIFO. Therefore this module is also a script that reads FIFOs in a separate session, ``python
orphans.py [-]FD ...``. The script uses the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

_RANK = b"FIRSTFAULT_LOCAL_RANK="
"""Each worker has this variable, and so have the programs that it starts; its agent doesn't."""
_RECORDING = b"FIRSTFAULT_RECORDING="
"""The variable of a worker that names its node's folder, in JSON."""
_STDERR_DESCRIPTOR = 2
_CHUNK_BYTES = 64 * 1024


def find_orphans(folder: Path, sessions: frozenset[int] = frozenset()) -> set[int]:
    """Return the processes of this session, and of `sessions`, that are workers of a node,
    or that workers started.
    """
    sessions = sessions | {os.getsid(0)}
    real = folder.resolve()
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return {int(entry.name) for entry in entries if _is_orphan(entry, folder, real, sessions)}


def _is_orphan(entry: Path, folder: Path, real: Path, sessions: frozenset[int]) -> bool:
    # another user's processes, and those that have just ended, can't be read
    with contextlib.suppress(OSError):
        pid = int(entry.name)
        if pid != os.getpid() and os.getsid(pid) in sessions:
            return _is_started_by_worker(entry, folder) or _is_forked_from_worker(entry, real)
    return False


def _send_signal(pid: int, number: signal.Signals, is_still_meant: Callable[[], bool]) -> None:
    """Send a signal to a process that was found before: it may have ended since,
    and another one have its number.
    """
    with contextlib.suppress(OSError):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except (OSError, AttributeError):  # an old kernel, a sandbox, or no free descriptor
            if is_still_meant():
                os.kill(pid, number)
            return
        try:
            # The descriptor stays with one process. So it is checked after it was opened.
            if is_still_meant():
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _is_started_by_worker(process: Path, folder: Path) -> bool:
    """Return whether a program was started with a worker's variables.

    ``/proc/<pid>/environ`` is the environment at the last exec, so a forked worker shows its
    agent's.
    """
    variables = (process / "environ").read_bytes().split(b"\0")
    recordings = [item for item in variables if item.startswith(_RECORDING)]
    of_this_node = b'"%s"' % os.fsencode(folder)
    return any(item.startswith(_RANK) for item in variables) and any(
        of_this_node in item for item in recordings
    )


def _is_forked_from_worker(process: Path, folder: Path) -> bool:
    from firstfault.recorder.folder import INHERITED_FILE_PREFIXES  # noqa: PLC0415 - not in script

    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed in the meantime
            path = Path(descriptor.readlink())
            mode = descriptor.lstat().st_mode
            # an agent, and what forks from it, reads the same FIFOs
            is_written = bool(mode & stat.S_IWUSR) and not mode & stat.S_IRUSR
            if (
                is_written
                and path.parent == folder
                and path.name.startswith(INHERITED_FILE_PREFIXES)
            ):
                return True
    return False


def kill_orphan_processes(
    folder: Path, seconds: float, sessions: frozenset[int] = frozenset()
) -> None:
    """Send SIGTERM to the orphans of ended workers,
    and SIGKILL to those still running after `seconds`.
    """
    from firstfault.recorder import time_limits  # noqa: PLC0415 - as above

    own = {os.getsid(0)}
    deadline = time.monotonic() + seconds
    last_deadline = deadline + time_limits.KILLED_PROCESS_TIMEOUT_SECONDS
    for number, until in ((signal.SIGTERM, deadline), (signal.SIGKILL, last_deadline)):
        sent: set[int] = set()
        pause: float = time_limits.ORPHANS_POLL_SECONDS
        # Search /proc again each time: an orphan may fork before it ends. Each process gets each
        # signal once.
        while left := find_orphans(folder, sessions):
            for pid in left - sent:
                entry = Path(f"/proc/{pid}")
                _send_signal(
                    pid,
                    number,
                    partial(_is_orphan, entry, folder, folder.resolve(), sessions | own),
                )
            sent |= left
            if time.monotonic() >= until:
                break
            time.sleep(min(pause, max(until - time.monotonic(), 0)))
            pause = min(1.5 * pause, time_limits.MAX_ORPHANS_POLL_SECONDS)
        for pid in sent:
            # As PID 1 of a container this process adopts orphans and must reap them; elsewhere it
            # isn't their parent.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


# --- what they write to stderr --------------------------------------------------------------------


def relay_late_stderr(shown: dict[int, bool]) -> None:
    """Start a process that reads the workers' stderr from now on;
    the caller may then close the FIFOs.

    `shown` maps the descriptor of each FIFO to whether its content is relayed to stderr (True) or
    dropped.

    Raises:
        OSError, subprocess.SubprocessError: that process could not be started.
    """
    import subprocess  # noqa: PLC0415 - as above

    from firstfault.recorder.time_limits import (  # noqa: PLC0415 - as above
        STDERR_READER_START_TIMEOUT_SECONDS,
    )

    numbers = [str(number) if is_shown else f"-{number}" for number, is_shown in shown.items()]
    # run() returns when that process has forked its reader, which has inherited the FIFOs. So at
    # every moment they have a reader, and no writer gets SIGPIPE.
    subprocess.run(  # noqa: S603 - this module
        [sys.executable, "-I", "-S", __file__, *numbers],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=tuple(shown),
        timeout=STDERR_READER_START_TIMEOUT_SECONDS,
    )


def _pass_on(shown: dict[int, bool]) -> None:
    """Read the descriptors until none has a writer; write the content of shown ones to stderr."""
    poll = select.poll()
    for descriptor in shown:
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLIN)
    # Read each FIFO once before polling: if its last writer closed it before it was opened for
    # reading, poll() never reports it.
    ready = list(shown)
    while shown:
        for descriptor in ready:
            try:
                data = os.read(descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                continue
            if not data:
                poll.unregister(descriptor)
                del shown[descriptor]
            elif shown[descriptor]:
                write_stderr(data)
        ready = [descriptor for descriptor, _ in poll.poll()] if shown else []


def write_stderr(data: bytes) -> None:
    """Write all of it to this process's stderr; drop it if that is closed:
    the writers must not notice.
    """
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(_STDERR_DESCRIPTOR, view) :]


if __name__ == "__main__":
    # `relay_late_stderr` waits for this process only. The child reads until the last orphan ends,
    # in a new session, so that a signal to the job's process group doesn't end it.
    if os.fork():
        os._exit(0)
    os.setsid()
    _pass_on({abs(int(argument)): not argument.startswith("-") for argument in sys.argv[1:]})
