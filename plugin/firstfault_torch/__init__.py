"""Error propagation for torch elastic: which worker killed a job, why, and whether to run it again;
without flytekit.

`launch` runs one node's workers under an agent that documents failures, informs other nodes, and
concludes with them on one verdict. It imports torch and the library `firstfault`, never flytekit.
Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from firstfault_torch.engine import Engine, ErrorName, PlainEngine, RecoverableError
    from firstfault_torch.options import Hang, Options
    from firstfault_torch.run import NodeFailedError, launch
    from firstfault_torch.watchdog import Watchdog

__all__ = [
    "Engine",
    "ErrorName",
    "Hang",
    "NodeFailedError",
    "Options",
    "PlainEngine",
    "RecoverableError",
    "Watchdog",
    "launch",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "firstfault_torch.engine": ("Engine", "ErrorName", "PlainEngine", "RecoverableError"),
        "firstfault_torch.options": ("Hang", "Options"),
        "firstfault_torch.watchdog": ("Watchdog",),
        "firstfault_torch.run": ("NodeFailedError", "launch"),
    },
)
