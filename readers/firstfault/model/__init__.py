"""The data that flows from documents to a decision.

Frozen dataclasses and enumerations. They import nothing else of firstfault, and neither storage nor protobuf.
"""

from firstfault.model.categories import (
    CATEGORIES,
)
from firstfault.model.failure import (
    DIED_UNHEARD,
    TOLD_TO_GO,
    TOLD_TO_GO_BY,
    CausedBy,
    CollectiveProgress,
    DocumentRef,
    ExceptionInfo,
    FrameInfo,
    Kind,
    Origin,
    Place,
    Resources,
    SentSignal,
    StackDump,
    Subject,
    ThreadFailure,
    WorkerError,
    Writer,
)
from firstfault.model.job import (
    Coverage,
    JobErrors,
    NodePresence,
    Phase,
    Reads,
    Receipt,
    Seal,
    Unopened,
)
from firstfault.model.verdict import (
    Decision,
    Reason,
    Scope,
    Suspect,
    Verdict,
    Victims,
)

__all__ = [
    "CATEGORIES",
    "DIED_UNHEARD",
    "TOLD_TO_GO",
    "TOLD_TO_GO_BY",
    "CausedBy",
    "CollectiveProgress",
    "Coverage",
    "Decision",
    "DocumentRef",
    "ExceptionInfo",
    "FrameInfo",
    "JobErrors",
    "Kind",
    "NodePresence",
    "Origin",
    "Phase",
    "Place",
    "Reads",
    "Reason",
    "Receipt",
    "Resources",
    "Scope",
    "Seal",
    "SentSignal",
    "StackDump",
    "Subject",
    "Suspect",
    "ThreadFailure",
    "Unopened",
    "Verdict",
    "Victims",
    "WorkerError",
    "Writer",
]
