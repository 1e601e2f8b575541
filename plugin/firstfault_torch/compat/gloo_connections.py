"""The connections of gloo in this process, which stay open as long as anything in the program holds a process group.

gloo has no call that closes them (torch 2.13: a group's ``abort`` and ``shutdown`` leave them open). Each of its
devices has a thread that waits for all of the device's sockets through one epoll object, and Linux tells which sockets
an epoll object watches (``proc(5)``).
"""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from pathlib import Path

from firstfault_torch.budgets import GLOO_POLL_S

_THREAD = "gloo_tcp_loop"
_LOOKS = 20
_WATCHED = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)", re.MULTILINE)
_PROC = Path("/proc/self")


def shut_down_gloo_connections() -> int:
    """Shut down gloo's connections to other ranks, so that collectives in which a peer waits for this process fail.

    Listening sockets stay, and so do the connections of everything else in the process.

    Returns:
        How many connections there were; 0 without gloo, or where ``/proc`` does not tell.
    """
    count = 0
    for epoll in {epoll for task in _loop_threads() if (epoll := _waited_for(task)) is not None}:
        for number, inode in _WATCHED.findall((_PROC / f"fdinfo/{epoll}").read_text()):
            count += _shut_down(int(number), int(inode, 16))
    return count


def _loop_threads() -> list[Path]:
    """Return the ``/proc`` folders of the threads in which gloo waits for its sockets."""
    found = []
    for task in (_PROC / "task").iterdir():
        try:
            if (task / "comm").read_text().strip() == _THREAD:
                found.append(task)
        except OSError:
            continue  # it has ended
    return found


def _waited_for(task: Path) -> int | None:
    """Return the epoll object that a thread waits for: the first argument of its system call."""
    for _ in range(_LOOKS):
        try:
            call = (task / "syscall").read_text().split()
            if len(call) > 1:
                number = int(call[1], 16)
                if str((_PROC / f"fd/{number}").readlink()) == "anon_inode:[eventpoll]":
                    return number
        except OSError:
            pass  # the thread was between two system calls, or has ended
        time.sleep(GLOO_POLL_S)
    return None


def _shut_down(number: int, inode: int) -> bool:
    """Shut down a connected socket, if the file descriptor still stands for it."""
    try:
        mine = os.dup(number)
    except OSError:
        return False  # closed since
    found = os.fstat(mine)
    if found.st_ino != inode or not stat.S_ISSOCK(found.st_mode):
        os.close(mine)  # another file by now, or the pipe that wakes gloo's thread
        return False
    try:
        with socket.socket(fileno=mine) as connection:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # a connection that has ended
    return True
