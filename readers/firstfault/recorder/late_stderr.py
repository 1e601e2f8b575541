"""Passes on what processes write to stderr when their agent no longer does: ``python late_stderr.py [-]FD ...``.

A process that outlives its worker, such as one that uploads a checkpoint, has the worker's stderr. If the FIFO lost its
reader, SIGPIPE would end that process. This script reads it instead, in a session of its own, until the last of these
processes has ended. It uses the standard library only.
"""

from __future__ import annotations

import os
import select
import sys

_STDERR = 2
_CHUNK_BYTES = 64 * 1024


def pass_on_late(shown: dict[int, bool]) -> None:
    """Let a process of its own pass on what is still written; this process may close its copies then.

    Args:
        shown: the FIFOs' descriptors, and whether their content is passed on or dropped.

    Raises:
        OSError, subprocess.SubprocessError: that process could not be started.
    """
    import subprocess  # noqa: PLC0415 - the script itself needs none

    from firstfault.recorder.budgets import LATE_READER_S  # noqa: PLC0415 - as above

    numbers = [str(number) if is_shown else f"-{number}" for number, is_shown in shown.items()]
    subprocess.run(  # noqa: S603 - this module
        [sys.executable, "-I", "-S", __file__, *numbers],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=tuple(shown),
        timeout=LATE_READER_S,
    )


def _pass_on(shown: dict[int, bool]) -> None:
    """Read the descriptors until none has a writer; write what comes from those that are shown to stderr."""
    poll = select.poll()
    for descriptor in shown:
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLIN)
    ready = list(shown)  # a FIFO without a writer becomes ready only when one has come and gone
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
                _write(data)
        ready = [descriptor for descriptor, _ in poll.poll()] if shown else []


def _write(data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(_STDERR, view) :]
    except OSError:
        return  # nothing reads it any more; the writers must not notice


if __name__ == "__main__":
    # the caller waits for the first process only
    if os.fork():
        os._exit(0)
    os.setsid()
    _pass_on({abs(int(argument)): not argument.startswith("-") for argument in sys.argv[1:]})
