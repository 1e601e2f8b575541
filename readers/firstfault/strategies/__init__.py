"""Strategies: they find the root cause of a failed attempt.

A strategy is a callable that takes a `JobErrors` and returns a `Verdict`; a plain function will do.
Register it with `register_strategy`, or in the entry-point group ``firstfault.strategies`` of your
distribution.

- `registry`: finds a strategy by its name, runs it, and finds the documents that it needs.
- `verdicts`, `headlines`: build a verdict from a root cause.
- `rules`: the default strategy, ``evidence``. To add a rule for a new cause, start there. Its
  verdicts are built by `fault_verdict`, `inferred_verdict` and `unknown_verdict`, with `reasons`.
- `earliest`: the strategy of Flyte's RFC 5598.

Imports `evidence`, `exceptions` and `model`, never storage.
"""

from firstfault.model import DocumentsNeeded as DocumentsNeeded
from firstfault.strategies.registry import (
    DEFAULT_STRATEGY as DEFAULT_STRATEGY,
    ENTRY_POINT_GROUP as ENTRY_POINT_GROUP,
    AggregationStrategy as AggregationStrategy,
    get_strategy as get_strategy,
    register_strategy as register_strategy,
    list_strategy_names as list_strategy_names,
    unregister_strategy as unregister_strategy,
    get_reading_needs as get_reading_needs,
    needs_documents as needs_documents,
    run_strategy as run_strategy,
    takes_diagnosis as takes_diagnosis,
)
from firstfault.strategies.verdicts import (
    find_root_candidates as find_root_candidates,
    build_undetermined_verdict as build_undetermined_verdict,
    build_verdict as build_verdict,
)
