"""Error propagation for torch elastic: which worker killed a job, why, and whether to run it again; without flytekit.

`launch` runs one node's workers under an agent that documents failures, tells the other nodes, and concludes with them
on one verdict. It imports torch and the library `firstfault`, never flytekit. Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firstfault_torch.engine import Engine, ErrorName, PlainEngine, RecoverableError
    from firstfault_torch.options import Options
    from firstfault_torch.run import NodeFailedError, launch

__all__ = [
    "Engine",
    "ErrorName",
    "NodeFailedError",
    "Options",
    "PlainEngine",
    "RecoverableError",
    "launch",
]

_HOMES = {
    "firstfault_torch.engine": ("Engine", "ErrorName", "PlainEngine", "RecoverableError"),
    "firstfault_torch.options": ("Options",),
    "firstfault_torch.run": ("NodeFailedError", "launch"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - paid by the first use of a name

    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
