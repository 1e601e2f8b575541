"""What a training may do with its own process,
and machines that refuse what firstfault asks for.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

MEGABYTES = 100 if os.environ.get("FIRSTFAULT_PROCESS") == "all" else 50


class NotAllowedError(Exception):
    """This process may not make such a machine, for example because it is not root."""


def _reset_handlers() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)


def _own_handlers() -> None:
    for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGRTMIN + 12):
        signal.signal(number, lambda *_: None)


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _no_stderr_object() -> None:
    sys.stderr = None


def _replace_stderr() -> None:
    leader, follower = os.openpty()
    os.dup2(follower, 2)
    os.close(follower)
    os.close(leader)


def _much_stderr() -> None:
    lines = (b"x" * 99 + b"\n") * 40  # of one write, which a pipe does not mix with others
    for _ in range(MEGABYTES * 250):
        os.write(2, lines)


def _children() -> None:
    """Fork, leave the session, run a program, and start processes of torch's multiprocessing."""
    child = os.fork()
    if not child:
        code = 3
        with contextlib.suppress(Exception):
            os.setsid()
            subprocess.run(
                [sys.executable, "-c", "import os; os.write(2, b'a grandchild\\n')"], check=True
            )
            code = 0
        os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise OSError("the child failed")
    import torch.multiprocessing as mp  # noqa: PLC0415 - in the worker only

    mp.start_processes(_nested, nprocs=2, start_method="fork")


def _nested(number: int) -> None:
    os.write(2, b"nested %d\n" % number)


def _reset_hooks() -> None:
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__


def _own_session() -> None:
    """Be a daemon: a session of its own, another folder, and standard streams that lead nowhere."""
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)


def _fill_up() -> None:
    """Write temporary files until the disk is full."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(buffering=0) as file:
        while file.tell() < 2 * 1024**2:
            file.write(b"x" * 4096)
        raise AssertionError("the disk is not full")


HABITS: dict[str, Callable[[], None]] = {
    "reset handlers": _reset_handlers,
    "own handlers": _own_handlers,
    "block signals": _block_signals,
    "no stderr object": _no_stderr_object,
    "close stderr": lambda: os.close(2),
    "replace stderr": _replace_stderr,
    "much stderr": _much_stderr,
    "children": _children,
    "reset hooks": _reset_hooks,
    "full disk": _fill_up,
    "own session": _own_session,
}

_LIBC = ctypes.CDLL(None, use_errno=True)
_MACHINE = 0 if os.uname().machine == "x86_64" else 1
_CALLS = {"pidfd_open": (434, 434), "mknodat": (259, 33), "execve": (59, 221), "socket": (41, 198)}
"""Numbers on x86-64 and on aarch64."""
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _FIRST_ARGUMENT = 0, 16
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_NEW_MOUNTS, _NEW_NAMES, _NEW_NETWORK = 0x00020000, 0x04000000, 0x40000000
_BIND, _PRIVATE, _READ_ONLY = 0x5000, 0x44000, 0x1021


def _refuse(name: str, first_argument: int | None = None) -> None:
    """Let a system call fail with EPERM in this process and those it starts,
    or only with this first argument.
    """
    statements = [
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 1, _CALLS[name][_MACHINE]),
        (_RETURN, 0, 0, _EPERM),
    ]
    if first_argument is not None:
        statements[1:] = [
            (_EQUAL, 0, 3, _CALLS[name][_MACHINE]),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_EQUAL, 0, 1, first_argument),
            (_RETURN, 0, 0, _EPERM),
        ]
    statements.append((_RETURN, 0, 0, _ALLOW))
    program = ctypes.create_string_buffer(
        b"".join(struct.pack("=HBBI", *statement) for statement in statements)
    )
    filters = ctypes.create_string_buffer(
        struct.pack("=HxxxxxxQ", len(statements), ctypes.addressof(program))
    )
    _checked(_LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _checked(_LIBC.prctl(_SECCOMP, _FILTER, filters))


def _checked(result: int) -> None:
    if result:
        raise NotAllowedError(f"not possible here: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    _checked(
        _LIBC.mount(
            source.encode(),
            target.encode(),
            kind.encode(),
            ctypes.c_ulong(flags),
            options.encode(),
        )
    )


def own_mounts() -> None:
    """Let this process mount without a change for others."""
    _checked(_LIBC.unshare(_NEW_MOUNTS))
    mount("none", "/", flags=_PRIVATE)


def _tiny_folders() -> None:
    """Have 1 MB for temporary files, and 1 MB of shared memory."""
    own_mounts()
    for folder in (tempfile.gettempdir(), "/dev/shm"):  # noqa: S108 - in this process's own view
        mount("tmpfs", folder, "tmpfs", options="size=1m")


def _read_only() -> None:
    """Let only temporary files and the store be written, as a pod with a read-only root has it."""
    _tiny_folders()
    mount(str(Path.cwd()), str(Path.cwd()), flags=_BIND)
    mount("/", "/", flags=_BIND)
    mount("none", "/", flags=_READ_ONLY)
    os.environ["HOME"] = "/"


def _no_home() -> None:
    for name in ("HOME", "USER", "LOGNAME", "PATH", "LANG"):
        os.environ.pop(name, None)


def _name_hosts(lines: str) -> None:
    """Let the name service know these hosts only."""
    own_mounts()
    hosts = Path(tempfile.gettempdir(), "hosts")
    hosts.write_text(lines)
    mount(str(hosts), "/etc/hosts", flags=_BIND)


def _long_name() -> None:
    """Be a host with the longest name that a name service allows."""
    _checked(_LIBC.unshare(_NEW_NAMES))
    name = "x" * 63
    _checked(_LIBC.sethostname(name.encode(), len(name)))
    _name_hosts(f"127.0.0.1 localhost {name}\n")


def _only_ipv6() -> None:
    """Have a network of which only ::1 is up."""
    if shutil.which("ip") is None:
        raise NotAllowedError("not possible here: there is no ip command")
    _checked(_LIBC.unshare(_NEW_NETWORK))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "-4", "address", "flush", "dev", "lo"], check=True)
    _name_hosts(f"::1 localhost {socket.gethostname()}\n")


def _close_files() -> None:
    for number in range(3):
        with contextlib.suppress(OSError):
            os.close(number)


def _no_threads() -> None:
    """Let the system refuse each thread that firstfault asks for."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("firstfault"):
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse  # type: ignore[method-assign]


MACHINES: dict[str, Callable[[], None]] = {
    "tiny folders": _tiny_folders,
    "read-only": _read_only,
    "no home": _no_home,
    "long name": _long_name,
    "only IPv6": _only_ipv6,
    "closed files": _close_files,
    "no pidfd_open": lambda: _refuse("pidfd_open"),
    "no FIFO": lambda: _refuse("mknodat"),
    "no program": lambda: _refuse("execve"),
    "no unix socket": lambda: _refuse("socket", socket.AF_UNIX),
    "no threads": _no_threads,
}
