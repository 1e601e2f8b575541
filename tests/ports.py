"""Ports for processes that a test starts."""

import fcntl
import itertools
import os
import socket
import tempfile
from functools import cache
from pathlib import Path
from typing import IO

_PORTS = range(15_000, 32_000)
"""Below those that Linux gives to connections and to servers without a fixed port: another process
may get any of these between the moment at which a test looks and the moment at which its own
process listens.
"""
_COMMON = "/tmp"  # noqa: S108 - locks, in a file that nobody reads
_next = itertools.cycle(_PORTS)
for _ in range(os.getpid() * 101 % len(_PORTS)):  # so that sessions rarely try the same ports
    next(_next)


@cache
def _locks() -> IO[bytes]:
    """Return a file whose byte N a session of tests locks if it has taken port N;
    it stays open until the end.
    """
    # Not in TMPDIR: sessions with several of these share the machine's ports. A store may take
    # seconds to listen, in which another session would find its port free.
    folder = _COMMON if os.access(_COMMON, os.W_OK) else tempfile.gettempdir()
    return (Path(folder) / f"firstfault-tests-ports-{os.getuid()}").open("wb")


def get_free_port() -> int:
    """Return a port on which no process listens,
    and that no other running session of tests gets.
    """
    for port in _next:
        try:
            fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise AssertionError("unreachable: the ports never end")
