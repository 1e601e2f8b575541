"""Reads what only the worker itself can: its collectives' progress, dead threads, GPU, limits."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import resource
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from firstfault.exceptions.first_cause import iter_exceptions
from firstfault.model import (
    CollectiveProgress,
    ExceptionInfo,
    FileSystem,
    SystemState,
    ThreadFailure,
)
from firstfault.wire.flight_recorder import parse_flight_recorder
from firstfault_torch import time_limits
from firstfault_torch.compat import warn_once
from firstfault_torch.compat.torch_worker import flight_recorders, unread_backends
from firstfault_torch.failures.capture import capture
from firstfault_torch.guard import call_with_timeout, iter_chain, suppress_internal_errors, try_call

_MAX_THREADS = 10
_MAX_MEMBERS = 256
"""Members of a group that are listed; a larger group is named only."""
_MEMORY_LIMITS = ("RLIMIT_AS", "RLIMIT_DATA")
"""Above the machine's memory they limit nothing."""
_LIMITS = (*_MEMORY_LIMITS, "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC")
_MAX_PATHS = 4
_MAX_PATHS_PER_FRAME = 2
_TEST_WRITE_BYTES = 1 << 16
"""Bytes of a small write: more than a full disk or quota has left."""
_WRITE_ERROR_TEXT = r"writ(?:e|ing|ten)|unexpected pos|iostream|disk|no space|quota"
_RESOURCE_ERROR_TEXT = re.compile(
    rf"\b(?:(?P<write>{_WRITE_ERROR_TEXT})|mmap|ftruncate|/dev/shm|shared memory|bus"
    r" error|allocat|memory|open files"
    r"|can't start new thread|pthread)",
    re.IGNORECASE,
)
"""Texts of failures that a limit of the machine or of the process may explain."""
_RESOURCE_ERROR_TYPES = {"OSError", "MemoryError"}
_recorded_thread_failures: list[ThreadFailure] = []


def watch_threads() -> Callable[[], None]:
    """Record exceptions that end a thread of this process, and report them as before;
    return a function that undoes it.

    They don't end the process, but may be why it waits without end.
    """
    before = threading.excepthook

    def record(args: threading.ExceptHookArgs) -> None:
        with suppress_internal_errors("recording a thread's exception"):
            # SystemExit ends a thread on purpose; Python doesn't report it either
            if (
                args.exc_type is not SystemExit
                and args.exc_value is not None
                and len(_recorded_thread_failures) < _MAX_THREADS
            ):
                name = args.thread.name if args.thread is not None else "unknown"
                _recorded_thread_failures.append(
                    ThreadFailure(name, time.time_ns(), capture(args.exc_value))
                )
        before(args)

    # Any thread may append to the list while another reads it: `thread_failures` copies it in one
    # call.
    threading.excepthook = record

    def stop_recording() -> None:
        # the program may have set its own hook since, which may call this one
        if threading.excepthook is record:
            threading.excepthook = before

    return stop_recording


def get_thread_failures() -> tuple[ThreadFailure, ...]:
    """Return the exceptions that have ended threads of this process, at most 10."""
    return tuple(_recorded_thread_failures)


def read_collective_progress(
    seconds: float = time_limits.FLIGHT_RECORDER_TIMEOUT_SECONDS,
) -> tuple[CollectiveProgress, ...]:
    """Return each process group's last collectives from torch's flight recorders;
    empty if it has none.

    A dump may block while a CUDA call is stuck, so it is read in another thread, for at most
    `seconds`.
    """
    return read_collectives_and_call_times(seconds)[0]


def read_collectives_and_call_times(
    seconds: float = time_limits.FLIGHT_RECORDER_TIMEOUT_SECONDS,
) -> tuple[tuple[CollectiveProgress, ...], tuple[int, ...]]:
    """Return the collective progress of each process group, and the call times of recorded
    collectives in nanoseconds.
    """
    recorders = flight_recorders()
    # The thread stays behind if the dump blocks. It touches nothing but its own list.
    read = partial(_read_traces, recorders)
    traces = (
        call_with_timeout(read, seconds, "reading torch's flight recorders") if recorders else []
    )
    with suppress_internal_errors("looking for collectives that no recorder has"):
        for name in (
            unread_backends(traces) if traces is not None and "torch" in sys.modules else ()
        ):
            what = f"the flight recorder of {name}"
            warn_once(what, "documents will lack collectives, so a hang may stay unexplained")
    found = parse_flight_recorder(traces or [])
    calls: list[int] = []
    with suppress_internal_errors("reading when collectives were called"):
        entries = (entry for trace in traces or () for entry in trace.get("entries") or ())
        calls = [int(entry["time_created_ns"]) for entry in entries if "time_created_ns" in entry]
    progress = tuple(
        item if len(item.members) <= _MAX_MEMBERS else replace(item, members=()) for item in found
    )
    return progress, tuple(calls)


def read_gpu_uuid() -> str:
    """Return the UUID of this process's GPU, "GPU-8f3a..."; empty if it hasn't used one,
    or torch doesn't know it.

    CUDA isn't initialised for the question. The driver of a lost GPU may not answer: it has 0.5 s.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""

    device = torch.cuda.current_device()  # of this thread: in a new one it is the first GPU

    def ask() -> str:
        return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))

    found = (
        call_with_timeout(ask, time_limits.GPU_UUID_TIMEOUT_SECONDS, "asking for the GPU's UUID")
        or ""
    )
    return found if found.startswith("GPU-") or not found else f"GPU-{found}"


def _read_traces(recorders: list[Callable[[], Any]]) -> list[dict[str, Any]]:
    traces = []
    for dump in recorders:
        with contextlib.suppress(RuntimeError, ValueError):
            trace = json.loads(dump())
            if isinstance(trace, dict):
                traces.append(trace)
    return traces


# --- files ----------------------------------------------------------------------------------------

_HELD_FILES = 16
_held_descriptors: list[int] = []
_held_pipe: list[os.stat_result] = []
"""All held descriptors are the reading end of this pipe."""


def hold_files_back() -> None:
    """Hold a few open files back, with which a document is written when the program has
    opened all that it may.
    """
    with contextlib.suppress(OSError):
        # A new pipe, not a common file such as /dev/null: the program may have opened that at a
        # number that it closed before.
        reader, writer = os.pipe()
        os.close(writer)
        _held_pipe[:] = [os.fstat(reader)]
        _held_descriptors.append(reader)
        while len(_held_descriptors) < _HELD_FILES:
            _held_descriptors.append(fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, 3))


def release_files() -> None:
    """Close the files that were held back, unless the program has closed them
    and uses their numbers.
    """
    while True:
        try:
            descriptor = _held_descriptors.pop()
        except IndexError:  # none is left, or another thread has taken the last one
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), _held_pipe[0]):
                os.close(descriptor)


# --- limits and space -----------------------------------------------------------------------------


def measure_system_state(error: BaseException, exception: ExceptionInfo) -> SystemState:
    """Return the state, within 0.25 s, if it may explain an exception, also given as data,
    or one of its causes.
    """
    chain = list(iter_exceptions(exception))
    links = [
        ({link.type, *link.bases}, _RESOURCE_ERROR_TEXT.search(link.message[:1000]))
        for link in chain
    ]
    if not any(types & _RESOURCE_ERROR_TYPES or match for types, match in links):
        return SystemState()
    found: list[FileSystem] = []
    is_write = any(match and match["write"] for _, match in links)
    measure = partial(_measure_file_systems, iter_chain(error), found, is_write=is_write)
    # A network file system may block its `statvfs` without end. The list is shared with that thread
    # on purpose: after the timeout it has what was measured so far, and the tuple below is a copy.
    call_with_timeout(
        measure, time_limits.FILE_SYSTEMS_TIMEOUT_SECONDS, "asking for the space of file systems"
    )
    # names alone
    open_files, _ = try_call(lambda: len(os.listdir("/proc/self/fd")), OSError)  # noqa: PTH208
    return SystemState(tuple(found), tuple(_list_limits()), open_files)


def _measure_file_systems(
    chain: list[BaseException], found: list[FileSystem], *, is_write: bool
) -> None:
    """Add the file systems one by one: those that were measured count,
    also if a later one doesn't answer.
    """
    names = [
        name
        for link in chain
        if isinstance(link, OSError)
        for name in (link.filename, link.filename2)
    ]
    named = [os.fsdecode(name) for name in names if isinstance(name, str | bytes) and name]
    usual = (
        os.curdir,
        tempfile.tempdir or os.environ.get("TMPDIR") or "/tmp",  # noqa: S108 - not written
        "/dev/shm",  # noqa: S108
    )
    written = _list_written_paths(chain) if is_write and not named else []
    for path in list(dict.fromkeys(map(os.path.abspath, written or [*named, *usual])))[:_MAX_PATHS]:
        space, _ = try_call(lambda path=path: os.statvfs(_find_existing_folder(path)), Exception)  # type: ignore[misc]
        # a read-only image has no free space
        if space is not None and not space.f_flag & os.ST_RDONLY:
            size = space.f_frsize
            disk = FileSystem(
                path,
                space.f_bavail * size,
                space.f_blocks * size,
                space.f_favail,
                space.f_files,
            )
            found.append(disk)
            if written and not disk.is_full:
                found[-1] = _try_write(disk)


def _list_written_paths(chain: list[BaseException]) -> list[str]:
    """Return where a write may have failed: paths of the innermost frame that has any,
    and files open for writing.
    """
    frames = (
        frame
        for link in reversed(chain)
        for frame, _ in reversed([*traceback.walk_tb(link.__traceback__)])
    )
    values = (frame.f_locals.values() for frame in frames if frame.f_code.co_name != "<module>")
    within = (list(filter(None, map(_find_path, found))) for found in values)
    return [*next(filter(None, within), [])[:_MAX_PATHS_PER_FRAME], *_iter_files_open_for_writing()]


def _find_path(value: Any) -> str:
    """Return the path in a variable, or "" if its value can't be a path."""
    value = getattr(value, "name", None) if issubclass(type(value), io.IOBase) else value
    text = str(value) if issubclass(type(value), str | PurePath) else ""
    # a relative text may be any word, so the file exists; of an absolute one its folder
    # texts
    return text if os.path.exists(text.rpartition("/")[0] if text[:1] == "/" else text) else ""  # noqa: PTH110


def _iter_files_open_for_writing() -> Iterator[str]:
    """Yield the files that this process writes, the last opened first,
    without its output and firstfault's.
    """
    numbers = sorted(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208 - names alone
    output = [try_call(partial(os.fstat, number), OSError)[0] for number in numbers[:3]]
    for number in numbers[:2:-1]:
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115 - a text
            if os.fstat(number)[:3] in [known[:3] for known in output if known is not None]:
                continue  # a copy, as programs make that redirect their output
            is_read = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if not is_read and Path(path).is_file() and "/firstfault-" not in path:
                yield path


def _try_write(disk: FileSystem) -> FileSystem:
    """Return a file system without space if a small write fails there for a lack of it,
    as by a quota.
    """
    folder = Path(_find_existing_folder(disk.path))
    folder = folder if folder.is_dir() else folder.parent
    try:
        with tempfile.TemporaryFile(prefix=".firstfault-", dir=folder, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, _TEST_WRITE_BYTES)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return replace(
                disk, path=disk.path + " (quota)" * (error.errno == errno.EDQUOT), free_bytes=0
            )
    return disk


def _find_existing_folder(path: str) -> str:
    """Return the nearest folder above a path that exists, or the path."""
    path = os.path.abspath(path)  # noqa: PTH100 - as above
    # texts
    while not os.path.exists(path) and path != os.path.dirname(path):  # noqa: PTH110, PTH120
        path = os.path.dirname(path)  # noqa: PTH120 - as above
    return path


def _list_limits() -> Iterable[tuple[str, int]]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in _LIMITS:
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY and not (name in _MEMORY_LIMITS and soft > memory):
            yield name, soft
