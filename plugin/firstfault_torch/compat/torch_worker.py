"""The private names of torch that firstfault uses inside a training process,
and the connections of gloo.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from firstfault_torch.compat import warn_once
from firstfault_torch.time_limits import GLOO_POLL_SECONDS

_GROUP_MAPS = (
    "pg_flight_recorder_hooks",
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)
_GLOO = "gloo"
_BACKENDS_WITH_RECORDERS = ("nccl2", "nccl-lazy", _GLOO)
"""Backends with recorders that are also read after their groups were destroyed."""
_BUFFER_SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def flight_recorders() -> list[Callable[..., Any]]:
    """Return the functions that dump torch's flight recorders as JSON,
    NCCL's first and gloo's last.

    ProcessGroupNCCL has a separate recorder, in builds with NCCL since torch 2.5. All other
    backends share one since 2.8; since 2.15 each has its own. Return nothing, without a warning, if
    the program hasn't imported torch, or if torch was built without distributed support or is too
    old to have a recorder.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    of_nccl, of_others = (
        getattr(c10d, f"_dump_{name}_trace_json", None) for name in ("nccl", "fr")
    )
    found = [of_nccl, of_others]
    if of_others is not None and "backend: " in (of_others.__doc__ or ""):
        names = sorted(
            {*_BACKENDS_WITH_RECORDERS, *_list_backends()}, key=lambda name: (name == _GLOO, name)
        )
        found[1:] = [partial(of_others, backend=name) for name in names]
    return [dump for dump in found if dump is not None]


def collective_counts() -> tuple[int, int]:
    """Return how many collectives of all groups have begun and ended here, -1 if unknown.

    The recorders are asked for their counters alone, which takes some microseconds. Without a
    recorder (gloo before torch 2.8) only the beginnings are known.
    """
    states: list[Mapping[str, Any]] = []
    for dump in flight_recorders():
        # TypeError: it can't leave out the entries
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            states += (json.loads(dump(includeCollectives=False)).get("pg_status") or {}).values()
    if states:
        ends = ("last_enqueued_collective", "last_completed_collective")
        begun, ended = (sum(max(int(state.get(end, 0)), 0) for state in states) for end in ends)
        return begun, ended
    numbers = [
        number
        for backends in _list_backends().values()
        for number in map(_count_collectives, backends)
        if number is not None
    ]
    return sum(numbers) if numbers else -1, -1


def unread_backends(traces: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the backends that have called collectives which no trace contains:
    this torch records them elsewhere.

    torch records NCCL's and gloo's since 2.9, unless the user has turned that off.
    """
    entries = (entry for trace in traces for entry in trace.get("entries") or ())
    names = (entry.get("profiling_name") for entry in entries if isinstance(entry, dict))
    known = {str(name).partition(":")[0] for name in names}
    is_off = any(os.environ.get(name) == "0" for name in _BUFFER_SIZE_VARIABLES)
    if is_off or sys.modules["torch"].__version__ < "2.9":
        return []
    recorded = {
        name: backends
        for name, backends in _list_backends().items()
        if "nccl" in name or name == _GLOO
    }
    return [
        name
        for name, backends in recorded.items()
        if name not in known and any(map(_count_collectives, backends))
    ]


def _count_collectives(backend: Any) -> int | None:
    """Return how many collectives of a backend have begun, or None if it doesn't count them."""
    with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
        return int(backend._get_sequence_number_for_group())  # noqa: SLF001 - see __init__
    return None


def _list_backends() -> dict[str, list[Any]]:
    """Return the backends of this process's groups by their names: "gloo", "nccl", "nccl2"."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    found: dict[str, list[Any]] = {}
    for group in list(getattr(world, "pg_map", None) or ()):
        for device in getattr(group, "_device_types", ()):
            # a group has no backend for a device that it hasn't used, or is one itself
            with contextlib.suppress(RuntimeError, AttributeError):
                backend = group._get_backend(device)  # noqa: SLF001 - see __init__
                # before it had a name: "ProcessGroupNCCL"
                kind = type(backend).__name__.removeprefix("ProcessGroup").lower()
                known = found.setdefault(backend.name() if hasattr(backend, "name") else kind, [])
                known += [backend] if backend not in known else []
    return found


def group_teardown() -> types.FunctionType | None:
    """Return ``torch.distributed.destroy_process_group``, or None if its code can't be replaced."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return None  # a program that has no group
    function = getattr(c10d, "destroy_process_group", None)
    if not isinstance(function, types.FunctionType):
        warn_once(
            "destroy_process_group", "an exception is recorded when it leaves the task function"
        )
        return None
    return function


def has_process_group() -> bool:
    """Whether this process has a process group."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    return bool(getattr(world, "pg_map", None))


def rank_in_group() -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks, or None without a process group."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not has_process_group() or not c10d.is_initialized():
        return None
    return c10d.get_rank(), c10d.get_world_size()


def backends_that_abort() -> list[Callable[[], None]]:
    """Return the functions that abort the communicators of this process's groups, except gloo's,
    which don't work.
    """
    found = []
    for name, backends in _list_backends().items():
        for backend in backends if name != _GLOO else ():
            abort = getattr(backend, "abort", None) or getattr(backend, "_shutdown", None)
            if callable(abort):
                found.append(abort)
    return found


def forget_process_groups() -> None:
    """Forget half-created groups, which exist on some ranks only and would shift the names
    of later groups there.
    """
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415 - as above

    world = getattr(c10d, "_world", None)
    if world is None or not hasattr(world, "group_count"):
        warn_once(
            "the count of process groups", "a restart during init_process_group may not succeed"
        )
        return
    world.group_count = 0
    for name in _GROUP_MAPS:
        known = getattr(world, name, None)
        if isinstance(known, dict):
            known.clear()
    unregister = getattr(c10d, "_unregister_all_process_groups", None)
    if callable(unregister):
        unregister()


def serve_env_rendezvous(meet: Callable[[Any], tuple[Any, int, int]]) -> Callable[[], None]:
    """Serve the ``env://`` rendezvous of ``init_process_group`` by `meet`;
    return a function that restores torch's.

    `meet` takes the process group's timeout, and returns a store, the rank and the world size.
    """
    import torch.distributed  # noqa: PLC0415, F401 - as above

    handlers = getattr(
        sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", None
    )
    if not isinstance(handlers, dict) or "env" not in handlers:
        warn_once(
            "the rendezvous handlers",
            "a function that is called again must give its process group a new store",
        )
        return lambda: None
    before = handlers["env"]

    def handler(_url: str, timeout: Any = None, **_more: Any) -> Iterator[tuple[Any, int, int]]:
        yield meet(timeout)
        raise RuntimeError("a process group cannot meet a second time")

    handlers["env"] = handler

    def undo() -> None:
        handlers["env"] = before

    return undo


# --- gloo -----------------------------------------------------------------------------------------

# gloo's connections stay open as long as anything in the program holds a process group, and it has
# no call that closes them (torch 2.13: a group's ``abort`` and ``shutdown`` leave them open). Each
# of its devices has a thread that waits for all of the device's sockets through one epoll object,
# and Linux lists the sockets that it watches (proc(5)).
_GLOO_THREAD = "gloo_tcp_loop"
_MAX_SAMPLES = 20
_EPOLL_TARGET = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)", re.MULTILINE)
_PROC = Path("/proc/self")


def shut_down_gloo_connections() -> int:
    """Shut down gloo's connections to other ranks,
    so that collectives in which a peer waits for this process fail.

    Listening sockets stay, and so do the connections of everything else in the process. Return how
    many connections there were: 0 without gloo, or where ``/proc`` can't be read.
    """
    count = 0
    for epoll in {
        epoll for task in _loop_threads() if (epoll := _find_awaited_epoll(task)) is not None
    }:
        for number, inode in _EPOLL_TARGET.findall((_PROC / f"fdinfo/{epoll}").read_text()):
            count += _shut_down(int(number), int(inode, 16))
    return count


def _loop_threads() -> list[Path]:
    """Return the ``/proc`` folders of the threads in which gloo waits for its sockets."""
    found = []
    for task in (_PROC / "task").iterdir():
        try:
            if (task / "comm").read_text().strip() == _GLOO_THREAD:
                found.append(task)
        except OSError:
            continue  # it has ended
    return found


def _find_awaited_epoll(task: Path) -> int | None:
    """Return the epoll object that a thread waits for: the first argument of its system call."""
    for _ in range(_MAX_SAMPLES):
        try:
            call = (task / "syscall").read_text().split()
            if len(call) > 1:
                number = int(call[1], 16)
                if str((_PROC / f"fd/{number}").readlink()) == "anon_inode:[eventpoll]":
                    return number
        except OSError:
            pass  # the thread was between two system calls, or has ended
        time.sleep(GLOO_POLL_SECONDS)
    return None


def _shut_down(number: int, inode: int) -> bool:
    """Shut down a connected socket, if the file descriptor still refers to it."""
    # The program's threads may close the socket and reuse its number at any moment: keep a
    # duplicate, then check that it is still the socket that gloo watched.
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
