"""The way into jobs of programs: runs when Python starts in a worker, and when torch looks for rendezvous handlers.

Other processes of the environment run it too, so it does nothing unless its variable is set, and imports the packages
of firstfault only when a job needs them.

- `begin_worker`: Python's `site` reads ``firstfault.pth`` at each start, which calls it if the agent has set
  ``FIRSTFAULT_WORKER``, or `firstfault_torch.record` for a rank that no agent starts.
- `handler`: the entry point of torch's group ``torchrun.handlers``. If ``FIRSTFAULT`` is 1, it replaces torch's agent
  by firstfault's.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

VARIABLE = "FIRSTFAULT"
"""Set to 1: every launcher that ends in torch's elastic agent runs under firstfault."""
ON = ("1", "true", "yes", "on")
"""Its values that count as 1, in any case of the letters."""
WORKER_VARIABLE = "FIRSTFAULT_WORKER"
"""The agent's process id, set by the agent for a worker that is a program: the process that it starts. Or `RANK`, and
`OWN_RANK`'s numbers: in a process that one of another rank has started, as Lightning does, a rank begins, too."""
RANK = "rank"
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # MPICH, Intel MPI
    ("LOCAL_RANK", "LOCAL_RANK", "WORLD_SIZE"),  # Lightning
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),  # last: what runs within a task has them, too
)
"""The variables of a process's rank, local rank and world size, by launcher."""
OWN_RANK: list[tuple[int | None, int, int]] = []
"""What `rank_of` returned when this process began as a rank; the program may set other variables."""
IN_PROGRAM: list[int] = []
"""The id of the worker, if this process is one that is a program. A forked child inherits it, so compare it."""
_PR_SET_PDEATHSIG = 1
_GROUPS = "torch.distributed.distributed_c10d"
"""A worker that imports it has peers."""


def begin_worker() -> None:
    """Record what ends this process, if it is a worker: before its first line runs, and without a frame in it."""
    if os.environ.get(WORKER_VARIABLE, "").startswith(RANK):
        begin_rank()
    elif os.environ.pop(WORKER_VARIABLE, "") == str(os.getppid()):  # else a worker has started it, as a shell does
        _end_with_parent()
        IN_PROGRAM.append(os.getpid())
        _watch("script")


def begin_rank() -> None:
    """Record what ends this process, if it is a rank that no agent has started; its children are part of it."""
    mine, inherited = rank_of(os.environ), os.environ.get(WORKER_VARIABLE, "").split()[1:]
    at = int(mine[0] is None)  # without a rank, the local rank
    if inherited[at : at + 1] != [str(mine[at])] and "FIRSTFAULT_RECORDING" not in os.environ:
        os.environ[WORKER_VARIABLE] = " ".join((RANK, *map(str, mine)))
        OWN_RANK.append(mine)
        _watch("rank")


def rank_of(environment: Mapping[str, str]) -> tuple[int | None, int, int]:
    """Return rank, local rank and world size from a launcher's variables; None, 0: unknown."""

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
    worker, main = os.getpid(), threading.get_ident()

    def call(name: str, *args: Any) -> None:
        with contextlib.suppress(Exception):  # an error of ours must not be one of the program's
            from importlib import import_module  # noqa: PLC0415 - see the module

            getattr(import_module(f"firstfault_torch.torchrun.{module}"), name)(*args)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        # raised for each exception that nothing handles, also if the program has replaced `sys.excepthook`. If there is
        # a caller, or if this is another thread, an extension prints an exception and the program continues.
        if event != "sys.excepthook" or os.getpid() != worker or threading.get_ident() != main:
            return
        if sys._getframe().f_back is None:  # noqa: SLF001 - the public way is slower
            call("fails", args[2])
            if type(args[2]) is KeyboardInterrupt:
                # Python ends by SIGINT after it, unless other code, such as an import, was executed since
                with contextlib.suppress(KeyboardInterrupt):
                    exec("raise KeyboardInterrupt", {})  # noqa: S102 - the only way to set the mark again

    def ends() -> None:
        if os.getpid() == worker and _GROUPS in sys.modules and not hasattr(sys, "last_value"):
            call("exits")

    sys.addaudithook(audit)
    atexit.register(ends)
    if _GROUPS in sys.modules:
        call("watch")
        return
    finders: list[Any] = sys.meta_path
    finders.insert(0, _WhenImported(_GROUPS, lambda: call("watch")))


def _end_with_parent() -> None:
    """Let the kernel terminate this process when its agent dies: torch does so for functions, not for programs."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes  # noqa: PLC0415 - as above

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class _WhenImported:
    """Calls a function as soon as a module has been imported. A finder of modules that finds none itself."""

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
    """Let no garbage collection visit all of torch's objects while modules are imported: it takes 0.1 s."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def handler() -> Callable[..., Any]:
    """Return a creator of rendezvous handlers, as torch asks for; and let firstfault run the workers, if it shall."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry  # noqa: PLC0415 - as above

    registry: Any = rendezvous_handler_registry
    create = registry.create_handler
    # a launcher in a worker trains under torch's agent: its job is part of the worker's
    if os.environ.get(VARIABLE, "").lower() in ON and "FIRSTFAULT_RECORDING" not in os.environ:

        def first(parameters: Any) -> Any:
            registry.create_handler = create
            try:
                with without_collections():
                    from firstfault_torch.torchrun.agent import stand_in  # noqa: PLC0415 - as above

                stand_in()
            except Exception as error:  # noqa: BLE001 - an image that breaks firstfault must not end its jobs
                import logging  # noqa: PLC0415 - as above

                logging.getLogger(__name__).warning(
                    "firstfault: import failed (%s: %s), so torch's own agent runs the workers and nothing is recorded",
                    type(error).__name__,
                    error,
                )
            return registry.create_handler(parameters)

        registry.create_handler = first

    def as_c10d(parameters: Any) -> Any:
        parameters.backend = "c10d"
        return create(parameters)

    return as_c10d
