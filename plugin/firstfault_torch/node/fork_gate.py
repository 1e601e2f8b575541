"""Holds forked workers until all of them are forked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from firstfault.recorder.folder import NodeFolder
from firstfault_torch import time_limits


@contextlib.contextmanager
def hold_forked_workers(files: NodeFolder | None) -> Iterator[None]:
    """Start the workers in this block: those that are forked wait until it ends."""
    # Before the first fork: a worker that is forked looks for the file at once.
    with contextlib.suppress(OSError):  # such as a full disk: they don't wait
        if files is not None:
            files.forking_mark.touch()
    try:
        yield
    finally:
        # Also if a fork failed: those that were forked before it are waiting.
        with contextlib.suppress(OSError):  # as the folder may be gone
            if files is not None:
                files.forking_mark.unlink()


def wait_until_all_forked(files: NodeFolder) -> None:
    """Wait, in a forked worker, until all of the node's workers have been forked.

    The agent may host a store with a thread that resolves the address of each client that connects.
    If the agent forks another worker at that moment, glibc's lock of the resolver stays locked in
    that worker, and the first name that it resolves blocks it without end. So no worker of this
    node connects before the last one has been forked.
    """
    deadline = time.monotonic() + time_limits.SIBLING_FORK_TIMEOUT_SECONDS
    # The agent may die between two forks: then its recorder removes the folder, and the file with
    # it. Or it may be frozen: then the wait ends at the deadline, at the risk that the docstring
    # describes.
    while files.forking_mark.exists() and time.monotonic() < deadline:
        time.sleep(time_limits.SIBLING_FORK_POLL_SECONDS)
