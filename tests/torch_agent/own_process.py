"""A worker that writes down what its process is like:
``python own_process.py FOLDER WHOSE START_METHOD``.

WHOSE is "ours" (firstfault's agent), "torch" (torch's own), or a package with a task configuration
`Elastic`.
"""

import faulthandler
import hashlib
import importlib
import json
import os
import resource
import signal
import sys
import threading
import types
from pathlib import Path
from typing import Any

_OF_GLIBC = 1 << 32 - 1 | 1 << 33 - 1
"""Two signals for which glibc sets handlers when it needs them."""


def state() -> dict[str, Any]:
    """Return what other code in this process could notice of firstfault."""
    status = dict(
        line.split(":\t", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":\t" in line
    )
    return {
        "handlers": {
            number.name: _named(signal.getsignal(number))
            for number in signal.valid_signals()
            if _known(number)
        },
        "masks": {
            name: f"{int(status[name], 16) & ~_OF_GLIBC:x}"
            for name in ("SigBlk", "SigIgn", "SigCgt")
        },
        "settings": {
            name: status.get(name, "") for name in ("NoNewPrivs", "Seccomp", "TracerPid", "Umask")
        },
        "hooks": {
            "sys.excepthook": _named(sys.excepthook),
            "sys.unraisablehook": _named(sys.unraisablehook),
            "sys.displayhook": _named(sys.displayhook),
            "threading.excepthook": _named(threading.excepthook),
            "sys.settrace": _named(sys.gettrace()),
            "sys.setprofile": _named(sys.getprofile()),
        },
        "tools": _tool(4),
        "faulthandler": faulthandler.is_enabled(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted(_files()),
        "limits": {
            name: resource.getrlimit(getattr(resource, name))
            for name in dir(resource)
            if "RLIMIT_" in name
        },
        "environ": dict(os.environ),
        "streams": [type(stream).__name__ for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "session": [
            os.getsid(0) == os.getsid(os.getppid()),
            os.getpgid(0) == os.getpgid(os.getppid()),
        ],
        "functions": {
            name: _functions(module)
            for name, module in list(sys.modules.items())
            if not _ours(name)
        },
        "loaded": sorted(name for name in sys.modules if _ours(name)),
    }


def _tool(number: int) -> Any:
    """Return who uses one of the ids of `sys.monitoring`, which Python has since 3.12."""
    monitoring: Any = getattr(sys, "monitoring", None)
    return None if monitoring is None else monitoring.get_tool(number)


def _known(number: Any) -> bool:
    return isinstance(number, signal.Signals)


def _named(item: Any) -> str:
    code = getattr(item, "__code__", None)
    if code is not None:
        return (
            f"{item.__module__}.{item.__qualname__}"
            f" {Path(code.co_filename).name}:{code.co_firstlineno}"
        )
    return str(
        getattr(item, "name", None) or getattr(item, "__qualname__", None) or type(item).__name__
    )


def _files() -> list[str]:
    """Return what each descriptor is, without the numbers of pipes and sockets."""
    found = []
    for file in Path("/proc/self/fd").iterdir():
        try:
            target = str(file.readlink())
        except OSError:
            continue  # the one that lists the folder
        if not target.endswith(f"/{os.getpid()}/fd"):
            found.append(
                target.partition(":[")[0] if target.startswith(("pipe:", "socket:")) else target
            )
    return found


def _ours(name: str) -> bool:
    return name.startswith(("firstfault", "flytekitplugins.firstfault"))


def _functions(module: Any) -> str:
    """Return a digest of the code of each function and method of a module;
    ask no lazy module for its class.
    """
    digest = hashlib.sha256()
    loads_lazily = "__getattr__" in vars(module)
    for name, item in sorted(vars(module).items(), key=lambda pair: str(pair[0])):
        if loads_lazily and str(getattr(item, "__module__", "")).startswith(f"{module.__name__}."):
            continue  # of a module below it, there once it was asked for
        members = sorted(vars(item).items()) if issubclass(type(item), type) else []
        for key, value in [
            (name, item),
            *((f"{name}.{member}", value) for member, value in members),
        ]:
            function = value.__func__ if type(value) in {staticmethod, classmethod} else value
            code = function.__code__ if type(function) is types.FunctionType else None
            # generated code has random names
            if code is not None and code.co_filename != "<string>":
                said = (
                    f"{key} {function.__module__} {code.co_filename} {code.co_firstlineno}"
                    f" {code.co_code.hex()}"
                )
                digest.update(said.encode())
            elif type(function) is types.BuiltinFunctionType:
                digest.update(f"{key} {function.__module__} {function.__qualname__}".encode())
    return digest.hexdigest()


def look(folder: str) -> None:
    """Write this worker's state to a file."""
    import torch.distributed  # noqa: PLC0415, F401 - in each of the processes that are compared

    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(state()))


def _by_agent(folder: str, whose: str, method: str) -> None:
    from torch.distributed.launcher.api import (  # noqa: PLC0415 - not in a spawned worker
        LaunchConfig,
        elastic_launch,
    )

    config = LaunchConfig(
        1,
        1,
        1,
        start_method=method,
        max_restarts=0,
        monitor_interval=0.1,
        rdzv_backend="c10d",
    )
    config.rdzv_endpoint, config.run_id = "127.0.0.1:0", "job"
    if whose == "torch":
        elastic_launch(config, look)(folder)
        return
    from firstfault_torch import (  # noqa: PLC0415 - torch's workers must not load it
        PlainEngine,
        launch,
    )

    launch(config, look, folder, engine=PlainEngine(f"{folder}/store", node="worker-0"))


if __name__ == "__main__":
    if sys.argv[2].startswith("flytekitplugins"):
        import flytekit

        CONFIG = importlib.import_module(sys.argv[2]).Elastic(
            nnodes=1, nproc_per_node=1, start_method=sys.argv[3]
        )

        @flytekit.task(task_config=CONFIG)
        def train(folder: str) -> None:
            look(folder)

        train(folder=sys.argv[1])
    else:
        _by_agent(*sys.argv[1:])
