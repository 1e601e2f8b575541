"""The way into torchrun's jobs: runs when Python starts in a worker, and when torch looks for rendezvous handlers.

Other processes of the environment run it too, so it does nothing unless its variable is set, and imports the packages
of firstfault only when a job needs them.

- `begin_worker`: Python's `site` reads ``firstfault.pth`` at each start, which calls it if the agent has set
  ``FIRSTFAULT_WORKER``.
- `handler`: the entry point of torch's group ``torchrun.handlers``. If ``FIRSTFAULT`` is 1, it replaces torch's agent
  by firstfault's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "FIRSTFAULT"
"""Set to 1: every launcher that ends in torch's elastic agent runs under firstfault."""
WORKER_VARIABLE = "FIRSTFAULT_WORKER"
"""The agent's process id, set by the agent for a worker that is a program: the process that it starts."""
_PR_SET_PDEATHSIG = 1
_GROUPS = "torch.distributed.distributed_c10d"
"""A worker that imports it has peers."""


def begin_worker() -> None:
    """Record what ends this process, if it is a worker: before its first line runs, and without a frame in it."""
    if os.environ.pop(WORKER_VARIABLE, "") != str(os.getppid()):
        return  # a process that a worker has started, as a shell does
    worker, main = os.getpid(), threading.get_ident()
    _end_with_parent()

    def audit(event: str, args: tuple[Any, ...]) -> None:
        # raised for each exception that nothing handles, also if the program has replaced `sys.excepthook`. If there is
        # a caller, or if this is another thread, an extension prints an exception and the program goes on.
        if event != "sys.excepthook" or os.getpid() != worker or threading.get_ident() != main:
            return
        if sys._getframe().f_back is None:  # noqa: SLF001 - the public way is slower
            with contextlib.suppress(Exception):
                from firstfault_torch.torchrun.script import fails  # noqa: PLC0415 - see the module

                fails(args[2])
            if type(args[2]) is KeyboardInterrupt:
                # Python ends by SIGINT after it, unless other code, such as an import, was executed since
                with contextlib.suppress(KeyboardInterrupt):
                    exec("raise KeyboardInterrupt", {})  # noqa: S102 - the only way to set the mark again

    def ends() -> None:
        if os.getpid() == worker and _GROUPS in sys.modules and not hasattr(sys, "last_value"):
            with contextlib.suppress(Exception):
                from firstfault_torch.torchrun.script import exits  # noqa: PLC0415 - as above

                exits()

    sys.addaudithook(audit)
    atexit.register(ends)
    finders: list[Any] = sys.meta_path
    finders.insert(0, _WhenImported(_GROUPS))


def _end_with_parent() -> None:
    """Let the kernel terminate this process when its agent dies: torch does so for functions, not for programs."""
    try:
        import ctypes  # noqa: PLC0415 - as above

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        return


class _WhenImported:
    """Begins to watch a worker as soon as a module has been imported. A finder of modules that finds none itself."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of the module with a loader that begins to watch."""
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
                with contextlib.suppress(Exception):  # an error of ours must not be one of torch's import
                    from firstfault_torch.torchrun.script import watch  # noqa: PLC0415 - as above

                    watch()

            with contextlib.suppress(AttributeError):  # a loader of another kind
                loader.exec_module = then_watch
        return spec


def handler() -> Callable[..., Any]:
    """Return a creator of rendezvous handlers, as torch asks for; and let firstfault run the workers, if it shall."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry  # noqa: PLC0415 - as above

    registry: Any = rendezvous_handler_registry
    create = registry.create_handler
    # a launcher in a worker trains under torch's agent: its job is part of the worker's
    if os.environ.get(VARIABLE) == "1" and "FIRSTFAULT_OUTPUT_PREFIX" not in os.environ:

        def first(parameters: Any) -> Any:
            registry.create_handler = create
            from firstfault_torch.torchrun.agent import stand_in  # noqa: PLC0415 - as above

            stand_in()
            return registry.create_handler(parameters)

        registry.create_handler = first

    def as_c10d(parameters: Any) -> Any:
        parameters.backend = "c10d"
        return create(parameters)

    return as_c10d
