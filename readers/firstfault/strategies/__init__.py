"""Aggregation strategies: from everything that was read about an attempt to one root cause.

A strategy is a callable that takes a `JobErrors` and returns a `Verdict`; a plain function will do. Register it with
`register_strategy`, or in the entry-point group ``firstfault.strategies`` of your distribution. Imports `evidence`,
`exceptions` and `model`, never storage.
"""

from firstfault.model import Reads
from firstfault.strategies._registry import (
    DEFAULT_STRATEGY,
    AggregationStrategy,
    get_strategy,
    reads,
    reads_of,
    register_strategy,
    run_strategy,
    strategy_names,
    unregister_strategy,
)
from firstfault.strategies._verdict import sources_of, undetermined, verdict_for, who

__all__ = [
    "DEFAULT_STRATEGY",
    "AggregationStrategy",
    "Reads",
    "get_strategy",
    "reads",
    "reads_of",
    "register_strategy",
    "run_strategy",
    "sources_of",
    "strategy_names",
    "undetermined",
    "unregister_strategy",
    "verdict_for",
    "who",
]
