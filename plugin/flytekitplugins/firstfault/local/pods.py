"""Pods on this machine, and the rules of Kubeflow's training operator and of stock Flyte for them.

Each pod is a ``pyflyte-execute`` in its own process group, with its log in a file.
"""

from __future__ import annotations

import contextlib
import enum
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from firstfault.errors import FirstFaultError
from firstfault.layout import ERROR_FILE, is_stock_error_file
from firstfault.model import DocumentRef, Seal, WorkerError
from firstfault.store import open_store
from firstfault.utils.run_sync import run_sync
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, decode

_STOP_GRACE_SECONDS = 5.0
_EXIT_POLL_SECONDS = 0.02
# If this process is killed before the new one calls prctl(), the signal never comes: then the
# parent has changed, and the program isn't started.
_BEGIN = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Begins a pod that the kernel terminates (PR_SET_PDEATHSIG) when the process
that started it is gone.
"""
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
        """The exit code, or None while the pod runs."""
        return self.process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the pod's process group, if it still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def has_processes(self) -> bool:
        """Whether a process of the pod's group is running.

        Zombies don't count: if this tool is the container's first process, orphans stay zombies
        until it ends.
        """
        self.process.poll()
        return any(state != "Z" for state in _get_group_states(self.process.pid))


def start_pod(  # noqa: PLR0913 - keywords
    name: str,
    *,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    master: bool = False,
) -> Pod:
    """Start a pod; stdout and stderr go to `log`. It gets SIGTERM when this process is killed,
    or this thread ends.

    Raises:
        FirstFaultError: the command isn't installed.
    """
    beside = Path(sys.executable).parent / arguments[0]
    program = str(beside) if beside.exists() else shutil.which(arguments[0])
    if program is None:
        how = (
            "install the extra elastic: in a clone pip install '.[elastic]', else"
            " 'firstfault[elastic]' from your index"
        )
        raise FirstFaultError(f"{arguments[0]} is not installed in this environment; {how}")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        # A separate session: Ctrl-C in a terminal signals the foreground process group, and must
        # not reach the pods before this process ends them. It also makes the pid the process
        # group's id, which `Pod.signal` needs.
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


def end_all(pods: Iterable[Pod]) -> None:
    """End every process of every pod by SIGTERM, and by SIGKILL after the grace period;
    return when all have ended.

    Ctrl-C or SIGTERM doesn't interrupt this: it counts when all have ended.
    """
    with _defer_signals(STOP_SIGNALS):
        # By processes, not by exit codes: a pod's main process may have died and left its workers
        # running.
        left = [pod for pod in pods if pod.has_processes()]
        for pod in left:
            pod.signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_GRACE_SECONDS
        is_killed = False
        # SIGKILL is sent once. A process in an uninterruptible system call dies only when the call
        # returns, so keep waiting: the next attempt must not overlap with it.
        while left:
            time.sleep(_EXIT_POLL_SECONDS)
            left = [pod for pod in left if pod.has_processes()]
            if not is_killed and time.monotonic() > deadline:
                is_killed = True
                for pod in left:
                    pod.signal(signal.SIGKILL)


@contextlib.contextmanager
def _defer_signals(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """Let the signals that have a handler arrive only after the block;
    other threads than the main one defer none.
    """
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in numbers}
    handled = {number: handler for number, handler in before.items() if callable(handler)}
    # Python lets only the main thread set signal handlers.
    if threading.current_thread() is not threading.main_thread():
        handled = {}
    for number in handled:
        signal.signal(number, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
    # After the old handlers are back: raising the signal calls them, and they may raise
    # KeyboardInterrupt.
    if arrived:
        signal.raise_signal(arrived[0])


def _get_group_states(group: int) -> list[str]:
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


# --- the operator and Flyte -----------------------------------------------------------------------


class JobState(str, enum.Enum):
    """The operator's names for a job's final states."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


def job_state(pods: Sequence[Pod]) -> JobState | None:
    """Return the job's final state, None while it runs.

    The job succeeds when the master exits with 0; without a master, when any pod does
    (training-operator v1.9, UpdateJobStatus). It fails when a pod exits with another code.
    """
    deciding = [pod for pod in pods if pod.master] or list(pods)
    codes = [pod.exit_code for pod in deciding]
    if any(code == 0 for code in codes):
        return JobState.SUCCEEDED
    if any(pod.exit_code not in {None, 0} for pod in pods):
        return JobState.FAILED
    return None


def error_seen(
    output_prefix: str, state: JobState, *, multi_file: bool
) -> WorkerError | Seal | None:
    """Return the error that stock Flyte reads now, or None without an error.

    Flyte reads no file for a failed job. In multi-file mode it takes the earliest ``error*.pb`` (a
    missing time counts as 1970), otherwise ``error.pb``.
    """
    if state is JobState.FAILED:
        return None

    async def read() -> list[WorkerError | Seal]:
        async with open_store(output_prefix) as store:
            names = [item.name for item in await store.list() if is_stock_error_file(item.name)]
            if not multi_file:
                names = [name for name in names if name == ERROR_FILE]
            return [
                decode(await store.get(name, limit=MAX_DOCUMENT_BYTES), DocumentRef(name))
                for name in names
            ]

    return min(run_sync(read()), key=lambda seen: fault_ns(seen) or 0, default=None)


def fault_ns(seen: WorkerError | Seal) -> int | None:
    """Return when an error file's fault happened, ns since the Unix epoch, or None if unknown."""
    return seen.fault_timestamp_ns if isinstance(seen, Seal) else seen.timestamp_ns


def elastic_environment(
    nodes: str,
    processes: int,
    max_restarts: int,
    job: str,
    port: int,
) -> dict[str, str]:
    """Return the variables that the operator sets in each pod of an elastic job;
    the store is on this machine.
    """
    return {
        "PET_NNODES": nodes,
        "PET_NPROC_PER_NODE": str(processes),
        "PET_MAX_RESTARTS": str(max_restarts),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"localhost:{port}",
        "PET_RDZV_ID": job,
    }


def free_port() -> int:
    """Return a free port below the ephemeral range,
    so that the kernel doesn't give it to another process.
    """
    for candidate in random.sample(range(20_000, 32_000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            return candidate
    raise OSError("no free port between 20000 and 32000 on 127.0.0.1")
