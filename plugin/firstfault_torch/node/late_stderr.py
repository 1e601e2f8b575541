"""Passes on what processes still write to stderr when their agent no longer does: ``python late_stderr.py [-]FD ...``.

A process that outlives its worker, such as one that uploads a checkpoint, has the worker's stderr. If the FIFO lost its
reader, SIGPIPE would end that process. This script reads it instead, in a session of its own, until the last of these
processes has ended. It uses the standard library only.
"""

from __future__ import annotations

import os
import select
import sys

__all__: list[str] = []

_STDERR = 2
_CHUNK_BYTES = 64 * 1024


def _pass_on(shown: dict[int, bool]) -> None:
    """Read the descriptors until none has a writer; write what comes from those that are shown to stderr."""
    poll = select.poll()
    for descriptor in shown:
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLIN)
    while shown:
        for descriptor, _ in poll.poll():
            try:
                data = os.read(descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                continue
            if not data:
                poll.unregister(descriptor)
                del shown[descriptor]
            elif shown[descriptor]:
                _write(data)


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
