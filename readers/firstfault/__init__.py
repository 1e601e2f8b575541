"""firstfault tells which worker killed a distributed training job, why, and whether to run it again.

This is the library: it reads what workers left in object storage and concludes from it. It needs neither flytekit nor
torch, and imports `firstfault_proto` alone. Names are loaded when first used, so that importing it costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firstfault.errors import FirstFaultError, StoreError, StrategyError
    from firstfault.model import Coverage, Decision, JobErrors, Verdict, WorkerError
    from firstfault.output_reader import ExecutionError, MultiErrorFileOutputReader
    from firstfault.retry import decide, default_policy
    from firstfault.strategies import AggregationStrategy, register_strategy, verdict_for

__all__ = [
    "AggregationStrategy",
    "Coverage",
    "Decision",
    "ExecutionError",
    "FirstFaultError",
    "JobErrors",
    "MultiErrorFileOutputReader",
    "StoreError",
    "StrategyError",
    "Verdict",
    "WorkerError",
    "decide",
    "default_policy",
    "register_strategy",
    "verdict_for",
]

_HOMES = {
    "firstfault.errors": ("FirstFaultError", "StoreError", "StrategyError"),
    "firstfault.model": ("Coverage", "Decision", "JobErrors", "Verdict", "WorkerError"),
    "firstfault.output_reader": ("ExecutionError", "MultiErrorFileOutputReader"),
    "firstfault.retry": ("decide", "default_policy"),
    "firstfault.strategies": ("AggregationStrategy", "register_strategy", "verdict_for"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - only a name that is looked up needs it

    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
