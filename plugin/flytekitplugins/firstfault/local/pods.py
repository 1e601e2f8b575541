"""Pods on this machine: each is a ``pyflyte-execute`` in its own process group, with its log in a file."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from firstfault.errors import FirstFaultError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

_GRACE_S = 5.0
_POLL_S = 0.02
_BEGIN = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Begins a pod that the kernel terminates (PR_SET_PDEATHSIG) when the process that started it is gone."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals of Ctrl-C, a supervisor and a closed terminal."""


@dataclass(slots=True)
class Pod:
    """A running or finished pod."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    master: bool = False

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the pod runs."""
        return self.process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the pod's process group, if it still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def has_processes(self) -> bool:
        """Whether a process of the pod's group is running.

        Zombies do not count: if this tool is the container's first process, orphans stay zombies until it ends.
        """
        self.process.poll()
        return any(state != "Z" for state in _states_of_group(self.process.pid))


def start_pod(  # noqa: PLR0913 - keywords
    name: str,
    *,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    master: bool = False,
) -> Pod:
    """Start a pod; stdout and stderr go to `log`. It gets SIGTERM when this process is killed, or this thread ends.

    Raises:
        FirstFaultError: the command is not installed.
    """
    program = _program(arguments[0])
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(  # noqa: S603 - the task's own command
            [sys.executable, "-IS", "-c", _BEGIN, str(os.getpid()), program, *arguments[1:]],
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Pod(name, process, log, master)


def end_all(pods: Iterable[Pod], grace_seconds: float = _GRACE_S) -> None:
    """End every process of every pod by SIGTERM, and by SIGKILL after the grace period; return when all have ended.

    Ctrl-C or SIGTERM does not interrupt this: it counts when all have ended.
    """
    with _deferred(STOP_SIGNALS):
        _end_all(pods, grace_seconds)


@contextlib.contextmanager
def _deferred(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """Let the signals that have a handler arrive only after the block; other threads than the main one defer none."""
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in numbers}
    handled = {number: handler for number, handler in before.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        handled = {}
    for number in handled:
        signal.signal(number, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])


def _end_all(pods: Iterable[Pod], grace_seconds: float) -> None:
    left = [pod for pod in pods if pod.has_processes()]
    for pod in left:
        pod.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = [pod for pod in left if pod.has_processes()]
    for pod in left:
        pod.signal(signal.SIGKILL)
    while left:
        time.sleep(_POLL_S)
        left = [pod for pod in left if pod.has_processes()]


def _states_of_group(group: int) -> list[str]:
    """Return the states (proc(5), third field of stat) of all processes of a process group."""
    states = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # the command's name is in parentheses and may contain any character
            state, _, member_of, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
        except (OSError, ValueError):
            continue  # the process has ended
        if int(member_of) == group:
            states.append(state)
    return states


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        how = "install the extra elastic: pip install '<wheel>[elastic]', or 'firstfault[elastic]' from your index"
        raise FirstFaultError(f"{name} is not installed in this environment; {how}")
    return found
