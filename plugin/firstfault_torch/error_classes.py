"""What a failure means to Flyte: category, kind and origin, in one table.

torch elastic knows four sorts of errors (``torch.distributed.elastic.multiprocessing.errors``): input error, worker
failure, platform error, infra error. Everything but an explicitly recoverable exception follows from the sort.
"""

from __future__ import annotations

import enum
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.model import Kind, Origin
from firstfault_torch.capture import qualified_name

if TYPE_CHECKING:
    from firstfault.model import ExceptionInfo

__all__ = [
    "CONSEQUENCES",
    "RECOVERABLE_TYPE",
    "Consequence",
    "Sort",
    "code_of",
    "is_recoverable",
    "sort_of_agent_error",
]

RECOVERABLE_TYPE = "flytekit.exceptions.user.FlyteRecoverableException"
_PLAIN_CODE = "USER:RuntimeError"
"""flytekit's code for an exception that names none."""


class Sort(enum.Enum):
    """torch's taxonomy, and the one exception from it."""

    INPUT_ERROR = "input error"
    WORKER_FAILURE = "worker failure"
    RECOVERABLE = "recoverable exception"
    PLATFORM_ERROR = "platform error"
    INFRA_ERROR = "infra error"
    RENDEZVOUS_ERROR = "rendezvous error"
    PREEMPTION = "preemption"
    LOST_AGENT = "lost agent"


@dataclass(frozen=True, slots=True)
class Consequence:
    """What a document about such a failure claims."""

    category: str
    """Empty: left to the reader, which knows exit code and signal."""
    kind: Kind
    origin: Origin
    code: str


CONSEQUENCES: dict[Sort, Consequence] = {
    Sort.INPUT_ERROR: Consequence("input", Kind.NON_RECOVERABLE, Origin.USER, "USER:InputError"),
    Sort.WORKER_FAILURE: Consequence("", Kind.NON_RECOVERABLE, Origin.USER, _PLAIN_CODE),
    Sort.RECOVERABLE: Consequence("recoverable", Kind.RECOVERABLE, Origin.USER, "USER:Recoverable"),
    Sort.PLATFORM_ERROR: Consequence("platform", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:AgentError"),
    Sort.INFRA_ERROR: Consequence("infrastructure", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:InfrastructureError"),
    Sort.RENDEZVOUS_ERROR: Consequence("rendezvous", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:RendezvousError"),
    Sort.LOST_AGENT: Consequence("node_lost", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:AgentLost"),
    Sort.PREEMPTION: Consequence("preemption", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:Preemption"),
}


def is_recoverable(exception: ExceptionInfo) -> bool:
    """Whether an exception is flytekit's FlyteRecoverableException or a subclass, by type."""
    return RECOVERABLE_TYPE in {exception.type, *exception.bases}


def code_of(error: BaseException) -> str:
    """Return the code that flytekit would report: the exception's own ``error_code``, else USER:RuntimeError."""
    try:
        code = getattr(error, "error_code", None)
        if code is None:
            code = getattr(type(error), "error_code", None)
        return str(code) if isinstance(code, str | int) else _PLAIN_CODE
    except BaseException:  # noqa: BLE001 - a property of user code
        return _PLAIN_CODE


def sort_of_agent_error(error: BaseException) -> Sort:
    """Return the sort of an error that the agent itself raised.

    A lost store or nodes that did not come are the rendezvous' own sort; a wrong argument is the user's.
    """
    names = {qualified_name(kind) for kind in type(error).__mro__}
    if any(name.startswith("torch.distributed.elastic.rendezvous.") for name in names):
        return Sort.RENDEZVOUS_ERROR
    if names & {"torch.distributed.DistNetworkError", "torch.distributed.DistStoreError"}:
        return Sort.RENDEZVOUS_ERROR
    if isinstance(error, ValueError | TypeError | AttributeError | ImportError | pickle.PicklingError):
        return Sort.INPUT_ERROR  # a setting, or a function or argument that cannot be handed to a process
    if isinstance(error, OSError | MemoryError):
        return Sort.INFRA_ERROR
    return Sort.PLATFORM_ERROR
