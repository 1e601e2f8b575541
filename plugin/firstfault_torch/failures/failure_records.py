"""Records of failures: the class of an error decides its code, its category,
and whether it is recoverable.
"""

from __future__ import annotations

import enum
import errno
import pickle
from dataclasses import dataclass, replace
from typing import Any

from firstfault.exceptions.fingerprint import compute_fingerprint
from firstfault.model import Kind, Origin, Place, Subject, WorkerError, Writer
from firstfault_torch.failures.capture import qualified_name
from firstfault_torch.places import find_versions, read_boot_id

_WRONG_PATHS = {
    *(
        errno.ENOENT,
        errno.EACCES,
        errno.EPERM,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENOEXEC,
        errno.E2BIG,
        errno.ELOOP,
    ),
    errno.ENAMETOOLONG,
}
"""Errors of open(2) and execve(2) that the same arguments meet again."""


@dataclass(frozen=True, slots=True)
class FlyteClass:
    """The fields of a document about such an error, in the terms of flyteidl's ContainerError."""

    category: str
    """If empty, the reader derives it from exit code and signal."""
    kind: Kind
    origin: Origin
    code: str
    """The default; an exception may have its own code."""


class ErrorClass(enum.Enum):
    """torch's taxonomy, and what it lacks: recoverable exceptions, preemption, lost agents."""

    INPUT_ERROR = FlyteClass("input", Kind.NON_RECOVERABLE, Origin.USER, "USER:InputError")
    WORKER_FAILURE = FlyteClass("", Kind.NON_RECOVERABLE, Origin.USER, "USER:RuntimeError")
    RECOVERABLE_EXCEPTION = FlyteClass(
        "recoverable",
        Kind.RECOVERABLE,
        Origin.USER,
        "USER:Recoverable",
    )
    PLATFORM_ERROR = FlyteClass("platform", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:AgentError")
    INFRA_ERROR = FlyteClass(
        "infrastructure",
        Kind.RECOVERABLE,
        Origin.SYSTEM,
        "SYSTEM:InfrastructureError",
    )
    RENDEZVOUS_ERROR = FlyteClass(
        "rendezvous",
        Kind.RECOVERABLE,
        Origin.SYSTEM,
        "SYSTEM:RendezvousError",
    )
    PREEMPTION = FlyteClass("preemption", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:Preemption")
    INTERRUPTION = FlyteClass("interrupted", Kind.NON_RECOVERABLE, Origin.USER, "USER:Interrupted")
    LOST_AGENT = FlyteClass("node_lost", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:AgentLost")


def failure_record(error_class: ErrorClass, place: Place, **fields: Any) -> WorkerError:
    """Return the record of a failure with its fingerprint;
    `fields` of `WorkerError` go before those of the class.
    """
    flyte = error_class.value
    defaults = {
        "code": flyte.code,
        "kind": flyte.kind,
        "origin": flyte.origin,
        "category": flyte.category,
    }
    failure = WorkerError(
        worker=place.node,
        place=place,
        boot_id=read_boot_id(),
        versions=find_versions(),
        **(defaults | fields),
    )
    return replace(failure, fingerprint=compute_fingerprint(failure))


def lost_agent(place: Place) -> WorkerError:
    """Return the record of the death of the agent at `place`, without its time;
    a worker or the recorder writes it.
    """
    return failure_record(
        ErrorClass.LOST_AGENT,
        place,
        message="the agent died and left no report; its workers were terminated",
        writer=Writer.WORKER,
        subject=Subject.AGENT,
    )


def classify_error(error: BaseException) -> ErrorClass:
    """Return the class of an error that the agent itself raised.

    A lost store and missing nodes are rendezvous errors; a wrong argument is an input error, and so
    is a path to a program or folder that is missing, or may not be used.
    """
    names = {qualified_name(kind) for kind in type(error).__mro__}
    if any(name.startswith("torch.distributed.elastic.rendezvous.") for name in names):
        return ErrorClass.RENDEZVOUS_ERROR
    if names & {"torch.distributed.DistNetworkError", "torch.distributed.DistStoreError"}:
        return ErrorClass.RENDEZVOUS_ERROR
    if isinstance(
        error, ValueError | TypeError | AttributeError | ImportError | pickle.PicklingError
    ):
        return ErrorClass.INPUT_ERROR  # a setting, or a function or argument that can't be pickled
    if isinstance(error, OSError) and error.errno in _WRONG_PATHS:
        return ErrorClass.INPUT_ERROR
    if isinstance(error, OSError | MemoryError):
        return ErrorClass.INFRA_ERROR
    return ErrorClass.PLATFORM_ERROR
