"""A pod: one ``pyflyte-execute`` in a process group of its own, with its log in a file."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from firstfault.errors import FirstFaultError
from firstfault_torch.guard import undisturbed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Pod", "end_all", "start_pod"]

_GRACE_S = 5.0
_POLL_S = 0.02
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a person, a closed terminal or a supervisor sends."""


@dataclass(slots=True)
class Pod:
    """A running or finished pod."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    master: bool = False

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the pod's whole process group; one that has gone is no error."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def has_processes(self) -> bool:
        """Whether anything of the pod's process group is left that runs.

        A zombie does not: an orphan that nobody reaps stays one for as long as this tool lives, if it is the
        container's first process.
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
    """Start a pod; stdout and stderr go to `log`.

    Raises:
        FirstFaultError: the command is not installed.
    """
    program = _program(arguments[0])
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(  # noqa: S603 - the task's own command
            [program, *arguments[1:]],
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Pod(name, process, log, master)


def end_all(pods: Iterable[Pod], grace_seconds: float = _GRACE_S) -> None:
    """End every process of every pod: SIGTERM, then SIGKILL after the grace period; return when all are gone.

    A second Ctrl-C, or SIGTERM, does not interrupt it.
    """
    with undisturbed(STOP_SIGNALS):
        _end_all(pods, grace_seconds)


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
    """The states (proc(5), third field of stat) of all processes of a process group."""
    states = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # the command's name, in parentheses, may hold anything
            state, _, member_of, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
        except (OSError, ValueError):
            continue  # gone meanwhile
        if int(member_of) == group:
            states.append(state)
    return states


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FirstFaultError(f"{name} is not installed in this environment; pip install 'firstfault[elastic]'")
    return found
