"""firstfault finds which worker killed a distributed training job, why,
and whether to run it again.

This is the library: it reads what workers left in object storage and concludes from it. It needs
neither flytekit nor torch, and imports `firstfault_proto` alone. Names are loaded when first used,
so that importing it costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from firstfault.errors import FirstFaultError, StoreError, StrategyError
    from firstfault.model import Coverage, Decision, JobErrors, Verdict, WorkerError
    from firstfault.output_reader import ExecutionError, MultiErrorFileOutputReader
    from firstfault.retry import decide, default_policy
    from firstfault.strategies import AggregationStrategy, register_strategy, build_verdict

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
    "build_verdict",
    "decide",
    "default_policy",
    "register_strategy",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "firstfault.errors": ("FirstFaultError", "StoreError", "StrategyError"),
        "firstfault.model": ("Coverage", "Decision", "JobErrors", "Verdict", "WorkerError"),
        "firstfault.output_reader": ("ExecutionError", "MultiErrorFileOutputReader"),
        "firstfault.retry": ("decide", "default_policy"),
        "firstfault.strategies": ("AggregationStrategy", "register_strategy", "build_verdict"),
    },
)
