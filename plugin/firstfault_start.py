"""The way into jobs of programs: runs when Python starts in a worker,
and when torch looks for rendezvous handlers.

Other processes of the environment run it too, so it does nothing unless its variable is set, and
imports the packages of firstfault only when a job needs them.

- `begin_worker`: Python's `site` reads ``firstfault.pth`` at each start, which calls it if the
  agent has set ``FIRSTFAULT_WORKER``, or `firstfault_torch.record` for a rank that no agent starts.
- `handler`: the entry point of torch's group ``torchrun.handlers``. If ``FIRSTFAULT`` is 1, it
  replaces torch's agent by firstfault's.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

VARIABLE = "FIRSTFAULT"
"""If this variable is 1, every launcher that uses torch's elastic agent runs under firstfault."""
ON = ("1", "true", "yes", "on")
"""Values of `VARIABLE` that turn it on, in upper or lower case."""
OFF = ("0", "false", "no", "off")
"""Values of `VARIABLE` that turn off every entry point, including `firstfault torchrun` and the
recording of a rank. If the variable is unset or empty, each entry point has its own default.
"""
WORKER_VARIABLE = "FIRSTFAULT_WORKER"
"""The agent's process id, set by the agent for a worker that is a program: the process that it
starts. Or `RANK`, the rank's process as `identify` names it, `OWN_RANK`'s numbers, `BEGAN`'s time,
and perhaps `_BELOW_RANK_MARK`, and `LOADED_MARK` or `_TRAINING_MARK`.
"""
RANK = "rank"
"""The module of `firstfault_torch.torchrun` for a rank without an agent; and the first word of
`WORKER_VARIABLE` in the processes that such a rank starts.
"""
_SCRIPT = "script"
"""The module for a worker that is a program."""
LOADED_MARK, _TRAINING_MARK = "loaded", "trains"
"""What the rank's process had done when it started another one: imported torch;
made a process group.
"""
_BELOW_RANK_MARK = "below"
"""The rank's process was itself started by another one of this rank; see `STARTED_BY_RANK`."""
AGENT_VARIABLE = "FIRSTFAULT_AGENT"
"""The agent's process as `identify` names it, set by the agent for its workers."""
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # MPICH, Intel MPI
    ("LOCAL_RANK", "LOCAL_RANK", "WORLD_SIZE"),  # Lightning
    # last: what runs within a task has them, too
    (
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NTASKS",
    ),
)
"""The variables of a process's rank, local rank and world size, by launcher."""
OWN_RANK: list[tuple[int | None, int, int]] = []
"""What `read_rank_numbers` returned when this process began as a rank; later the program may set
other variables.
"""
BEGAN: list[int] = []
"""When that was, nanoseconds since the Unix epoch."""
STARTED_BY_RANK: list[int] = []
"""The id of this process, if another one of its rank started it before that one had imported torch;
else empty.
"""
IN_PROGRAM: list[int] = []
"""The id of the worker, if this process is one that is a program. A forked child inherits it,
so compare it.
"""
_PR_SET_PDEATHSIG = 1
_NS_PER_MS = 1_000_000
_HELPER_ARGUMENTS = ("from multiprocessing.", "firstfault.recorder")
"""Beginnings of arguments of Python in processes that a library starts:
they're part of the rank in any case.
"""
_EXEC_EVENT, _KILL_EVENT = "os.exec", "os.kill"
_START_EVENTS = frozenset(
    ("subprocess.Popen", "os.posix_spawn", "os.system", "os.fork", "os.forkpty")
)
"""Audit events before another process is started."""
_C10D_MODULE = "torch.distributed.distributed_c10d"
"""A worker that imports it has peers."""


def read_switch(environment: Mapping[str, str] = os.environ) -> str:
    """Return the value of `VARIABLE` as `ON` and `OFF` list them."""
    return environment.get(VARIABLE, "").strip().lower()


def is_on() -> bool:
    """Whether `VARIABLE` lets torch's own launchers run under firstfault."""
    return read_switch() in ON


def is_off() -> bool:
    """Whether `VARIABLE` turns off every entry point."""
    return read_switch() in OFF


def begin_worker() -> None:
    """Record what ends this process, if it is a worker or a rank's process. Python's `site` calls
    this before the program's first line, so no traceback of the program has a frame of it.
    """
    if os.environ.get(WORKER_VARIABLE, "").startswith(RANK):
        _begin_rank(is_asked=False)
    elif os.environ.pop(WORKER_VARIABLE, "") == str(os.getppid()):
        # else a worker has started it, as a shell does
        _end_with_parent()
        IN_PROGRAM.append(os.getpid())
        _watch(_SCRIPT)


def begin_rank() -> None:
    """Record what ends this process, if it is a rank that no agent has started."""
    _begin_rank(is_asked=True)


def _begin_rank(*, is_asked: bool) -> None:
    """Record what ends this process, if it is a rank.

    `is_asked`: the program imported `record`. Otherwise only the environment shows that it may be
    one.

    A rank may be several processes, and the one that trains is recorded. A program may exec another
    one: that's the same process, and remains the rank. Or it is a wrapper, and starts the one that
    trains: a later start of this rank. But the processes that a training starts, such as a
    compiler's, are part of it.

    A process can't know whether the one above it will train. So one that was started before the one
    above has imported torch counts as begun when the kernel made it: that's before the import, so
    the one above counts if it follows.
    """
    if OWN_RANK or is_off() or is_in_worker():
        return
    own_numbers = read_rank_numbers(os.environ)
    fields = os.environ.get(WORKER_VARIABLE, "").split()[1:]
    marked_process = " ".join(fields[:2])
    marked_numbers = fields[2:5]
    marked_begin = fields[5:6]
    marks = fields[6:]
    index = int(own_numbers[0] is None)  # without a rank, the local rank
    is_same_rank = marked_numbers[index : index + 1] == [str(own_numbers[index])]
    # of this process, before it became another program by exec
    has_torch_above = False
    is_started_by_rank = _BELOW_RANK_MARK in marks
    if marked_process != identify(os.getpid()):
        is_started_by_rank = False
        if is_ancestor(marked_process):
            # Another rank: Lightning starts the other ranks of a node from the first one.
            is_helper = any(word.startswith(_HELPER_ARGUMENTS) for word in sys.orig_argv)
            if is_same_rank and (_TRAINING_MARK in marks or is_helper):
                return
            # If the process above has imported torch, it may train, or only have counted the GPUs.
            # So this one counts only with a process group, and if it fails.
            has_torch_above = is_same_rank and LOADED_MARK in marks
            is_started_by_rank = is_same_rank and not has_torch_above
        elif not is_asked:
            # a job that a rank has submitted, or a daemon: the variable isn't about it
            return
    OWN_RANK.append(own_numbers)
    BEGAN.append(time.time_ns())
    if is_started_by_rank:
        STARTED_BY_RANK.append(os.getpid())
        # The kernel's time is a multiple of 10 ms, rounded down, and may lie before the beginning
        # of the one above.
        before_ns = int(marked_begin[0]) if marked_begin and marked_begin[0].isdecimal() else 0
        BEGAN[-1] = min(max(_find_start_ns(), before_ns + _NS_PER_MS), BEGAN[-1])
    if has_torch_above:
        _watch_exception(RANK, _has_group)
        return
    mark_rank(*((LOADED_MARK,) if _C10D_MODULE in sys.modules else ()))
    _watch_starts()
    _watch(RANK)


def mark_rank(*marks: str) -> None:
    """Mark this process as a rank, with what it has done, for processes that it starts or becomes
    by exec.
    """
    numbers = (*OWN_RANK[-1], BEGAN[-1]) if OWN_RANK and BEGAN else ()
    below = (_BELOW_RANK_MARK,) if os.getpid() in STARTED_BY_RANK else ()
    os.environ[WORKER_VARIABLE] = " ".join(
        (RANK, identify(os.getpid()), *map(str, (*numbers, *below, *marks)))
    )


def has_trained() -> bool:
    """Whether this rank's process has a process group,
    or had one when it started or signalled another process.
    """
    return _has_group() or os.environ.get(WORKER_VARIABLE, "").endswith(_TRAINING_MARK)


def is_in_worker() -> bool:
    """Whether this process is a worker of an agent that is still running, or was started by one."""
    return "FIRSTFAULT_RECORDING" in os.environ and is_ancestor(os.environ.get(AGENT_VARIABLE, ""))


def identify(process: int) -> str:
    """Return a process's id and start time, unique in this boot, or "" if there is none."""
    fields = _read_stat(process)
    return f"{process} {fields[19]}" if fields else ""


def is_ancestor(identity: str) -> bool:
    """Whether the process that `identify` described is still running and an ancestor of this one,
    or this one.

    Variables are inherited without end: a worker may submit another job with its own environment.
    """
    process = os.getpid()
    while process > 0:
        fields = _read_stat(process)
        if not fields:
            return False
        if identity == f"{process} {fields[19]}":
            return True
        process = int(fields[1])
    return False


def _find_start_ns() -> int:
    """Return when the kernel made this process, in nanoseconds since the Unix epoch."""
    since_boot_ns = int(_read_stat(os.getpid())[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot_ns


def _read_stat(process: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` from the state on;
    the parent's id is the second.
    """
    try:
        # pathlib is slow to import
        with open(f"/proc/{process}/stat", "rb") as file:  # noqa: PTH123
            # a program's name may contain ")"
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def read_rank_numbers(environment: Mapping[str, str]) -> tuple[int | None, int, int]:
    """Return rank, local rank and world size from a launcher's variables. An unknown rank is None;
    an unknown local rank or world size is 0.
    """

    def number(name: str) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdecimal() else 0

    for rank, local, size in _LAUNCHERS:
        if rank in environment:
            is_known = rank != local or not number("NODE_RANK")
            return number(rank) if is_known else None, number(local), number(size)
    return None if number("NODE_RANK") else 0, 0, 0  # the process that starts Lightning's others


def _watch(module: str) -> None:
    """Let a module of `firstfault_torch.torchrun` record what ends this process."""
    worker = os.getpid()

    def at_exit() -> None:
        if os.getpid() == worker and _C10D_MODULE in sys.modules and not hasattr(sys, "last_value"):
            _call(module, "record_exit")

    def at_finish() -> None:
        if os.getpid() == worker and _C10D_MODULE in sys.modules and not hasattr(sys, "last_value"):
            _call(module, "record_finish")

    _watch_exception(module)
    atexit.register(at_exit)
    if module == _SCRIPT:
        # Python calls this when the program has ended, and then waits for its threads, such as one
        # that writes a checkpoint. The function that was registered last is called after that,
        # before any of the program's own.
        with contextlib.suppress(AttributeError):
            threading._register_atexit(atexit.register, at_finish)  # type: ignore[attr-defined]  # noqa: SLF001
    if _C10D_MODULE in sys.modules:
        _call(module, "begin")
        return
    finders: list[Any] = sys.meta_path
    finders.insert(0, _WhenImported(_C10D_MODULE, lambda: _call(module, "begin")))


def _call(module: str, name: str, *args: Any) -> None:
    """Call a function of a module of `firstfault_torch.torchrun`."""
    with contextlib.suppress(Exception):  # an error of ours must not be one of the program's
        from importlib import import_module  # noqa: PLC0415 - see the module

        getattr(import_module(f"firstfault_torch.torchrun.{module}"), name)(*args)


def _watch_exception(module: str, is_relevant: Callable[[], bool] = lambda: True) -> None:
    """Let a module record the exception that ends this process, if it `is_relevant` then."""
    worker = os.getpid()
    main = threading.get_ident()

    def audit(event: str, args: tuple[Any, ...]) -> None:
        # raised for each exception that nothing handles, also if the program has replaced
        # `sys.excepthook`. If there is a caller, or if this is another thread, an extension prints
        # an exception and the program continues.
        if event != "sys.excepthook" or os.getpid() != worker or threading.get_ident() != main:
            return
        if sys._getframe().f_back is None and is_relevant():  # noqa: SLF001 - the public way is slower
            _call(module, "record_exception", args[2])
            if type(args[2]) is KeyboardInterrupt:
                # Python ends by SIGINT after it, unless other code, such as an import, was executed
                # since
                with contextlib.suppress(KeyboardInterrupt):
                    # the only way to set the mark again
                    exec("raise KeyboardInterrupt", {})  # noqa: S102

    sys.addaudithook(audit)


def _watch_starts() -> None:
    """Keep the mark in the environment up to date, by which the processes that this rank starts
    see whether it trains; and record when it becomes another program by exec.
    """
    worker = os.getpid()
    exec_threads: list[int] = []  # the thread that has called exec, while it may still fail

    def audit(event: str, _args: tuple[Any, ...]) -> None:
        is_about_process = event in _START_EVENTS or event == _KILL_EVENT
        if not (is_about_process or event == _EXEC_EVENT or exec_threads) or os.getpid() != worker:
            return
        if event == _EXEC_EVENT:
            # What follows raises events, too. They don't mean that exec has failed.
            exec_threads.clear()
            mark_rank()
            if _C10D_MODULE in sys.modules:
                _call(RANK, "record_exec")
            exec_threads.append(threading.get_ident())
        elif exec_threads == [threading.get_ident()]:  # the thread is still here: exec has failed
            exec_threads.clear()
            if _C10D_MODULE in sys.modules:
                mark_rank(LOADED_MARK)
                _call(RANK, "record_failed_exec")
        elif (
            is_about_process
            and not os.environ.get(WORKER_VARIABLE, "").endswith(_TRAINING_MARK)
            and _has_group()
        ):
            # also before it ends a helper: at the rank's own end, the group may be gone
            mark_rank(_TRAINING_MARK)

    sys.addaudithook(audit)


def _has_group() -> bool:
    groups = sys.modules.get(_C10D_MODULE)
    return groups is not None and getattr(groups, "is_initialized", bool)()


def _end_with_parent() -> None:
    """Let the kernel terminate this process when its agent dies: torch does so for functions,
    not for programs.
    """
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes  # noqa: PLC0415 - as above

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class _WhenImported:
    """Calls a function as soon as a module has been imported. A finder of modules
    that finds none itself.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of the module with a loader that calls the function."""
        del path, target
        if name != self._name:
            return None
        finders: list[Any] = sys.meta_path
        with contextlib.suppress(ValueError):
            finders.remove(self)
        from importlib.util import find_spec  # noqa: PLC0415 - as above

        spec = find_spec(name)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def then_watch(module: Any) -> None:
                del loader.exec_module
                execute(module)
                with without_collections():
                    self._then()

            with contextlib.suppress(AttributeError):  # a loader of another kind
                loader.exec_module = then_watch
        return spec


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Let no garbage collection visit all of torch's objects while modules are imported:
    it takes 0.1 s.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def handler() -> Callable[..., Any]:
    """Return a function that creates rendezvous handlers, as torch asks for. If the switch is on,
    the first handler that torch's launcher creates makes firstfault's agent replace torch's.
    """
    from torch.distributed.elastic.rendezvous import (  # noqa: PLC0415 - as above
        rendezvous_handler_registry,
    )

    registry: Any = rendezvous_handler_registry
    create = registry.create_handler
    # a launcher in a worker trains under torch's agent: its job is part of the worker's
    if is_on() and not is_in_worker():

        def first(parameters: Any) -> Any:
            registry.create_handler = create
            try:
                with without_collections():
                    from firstfault_torch.torchrun.agent import (  # noqa: PLC0415 - as above
                        replace_launcher_agent,
                    )

                replace_launcher_agent()
            except Exception as error:  # noqa: BLE001
                # an image that breaks firstfault must not end its jobs
                import logging  # noqa: PLC0415 - as above

                logging.getLogger(__name__).warning(
                    "firstfault: import failed (%s: %s), so torch's own agent runs the workers and"
                    " nothing is recorded",
                    type(error).__name__,
                    error,
                )
            return registry.create_handler(parameters)

        registry.create_handler = first

    def as_c10d(parameters: Any) -> Any:
        parameters.backend = "c10d"
        return create(parameters)

    return as_c10d
