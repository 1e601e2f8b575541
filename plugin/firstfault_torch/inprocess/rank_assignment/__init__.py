"""Which rank each surviving process has after a fault, and which of them are active.

Every process computes its own rank from the same inputs: its state, and the set of terminated ranks. So all parts must
be deterministic. `Compose` chains them: ``Compose(MaxActiveWorldSize(8), ShiftRanks())`` closes the gaps, then
activates at most eight ranks.
"""

from firstfault_torch.inprocess.rank_assignment.base import (
    Exchange,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
)
from firstfault_torch.inprocess.rank_assignment.filters import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    MaxActiveWorldSize,
)
from firstfault_torch.inprocess.rank_assignment.gaps import FillGaps, ShiftRanks
from firstfault_torch.inprocess.rank_assignment.grouped import FilterCountGroupedByKey
from firstfault_torch.inprocess.rank_assignment.topology import Layer, LayerFlag
from firstfault_torch.inprocess.rank_assignment.tree import Tree

__all__ = [
    "ActivateAllRanks",
    "ActiveWorldSizeDivisibleBy",
    "Exchange",
    "FillGaps",
    "FilterCountGroupedByKey",
    "Layer",
    "LayerFlag",
    "MaxActiveWorldSize",
    "RankAssignment",
    "RankAssignmentCtx",
    "RankDiscarded",
    "RankFilter",
    "ShiftRanks",
    "Tree",
]
