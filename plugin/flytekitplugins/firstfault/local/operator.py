"""The rules of Kubeflow's training operator and of stock Flyte, for pods on this machine."""

from __future__ import annotations

import enum
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.layout import is_stock_error_file
from firstfault.model import DocumentRef, Kind, Origin, Seal, WorkerError
from firstfault.store import open_store
from firstfault.sync import run_sync
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flytekitplugins.firstfault.local.pods import Pod

_EPOCH = 0


class JobState(str, enum.Enum):
    """The operator's names for a job's final states."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class ErrorSeen:
    """The error that stock Flyte read when the job ended."""

    code: str
    message: str
    kind: Kind
    origin: Origin
    worker: str
    timestamp_ns: int | None
    sealed_ns: int | None = None
    """When a pod sealed it; None: it is not a sealed verdict."""


def job_state(pods: Sequence[Pod]) -> JobState | None:
    """Return the job's final state, None while it runs.

    The job succeeds when the master exits with 0; without a master, when any pod does (training-operator v1.9,
    UpdateJobStatus). It fails when a pod exits with another code.
    """
    deciding = [pod for pod in pods if pod.master] or list(pods)
    codes = [pod.exit_code for pod in deciding]
    if any(code == 0 for code in codes):
        return JobState.SUCCEEDED
    if any(pod.exit_code not in {None, 0} for pod in pods):
        return JobState.FAILED
    return None


def error_seen(output_prefix: str, state: JobState, *, multi_file: bool) -> ErrorSeen | None:
    """Return the error that stock Flyte reads now; None: no error.

    Flyte reads no file for a failed job. In multi-file mode it takes the earliest ``error*.pb`` (a missing time counts
    as 1970), otherwise ``error.pb``.
    """
    if state is JobState.FAILED:
        return None
    documents = run_sync(_stock_documents(output_prefix, multi_file=multi_file))
    return min(documents, key=lambda seen: seen.timestamp_ns or _EPOCH, default=None)


async def _stock_documents(output_prefix: str, *, multi_file: bool) -> list[ErrorSeen]:
    async with open_store(output_prefix) as store:
        names = [item.name for item in await store.list() if is_stock_error_file(item.name)]
        if not multi_file:
            names = [name for name in names if name == "error.pb"]
        return [_seen(decode(await store.get(name, limit=MAX_DOCUMENT_BYTES), DocumentRef(name))) for name in names]


def _seen(document: WorkerError | Seal) -> ErrorSeen:
    if isinstance(document, Seal):
        return ErrorSeen(
            document.code,
            document.message,
            document.kind,
            document.origin,
            document.worker,
            document.fault_timestamp_ns,
            document.timestamp_ns,
        )
    return ErrorSeen(
        document.code, document.message, document.kind, document.origin, document.worker, document.timestamp_ns
    )


def elastic_environment(*, nodes: str, processes: int, max_restarts: int, job: str, port: int) -> dict[str, str]:
    """Return the variables that the operator sets in each pod of an elastic job; the store is on this machine."""
    return {
        "PET_NNODES": nodes,
        "PET_NPROC_PER_NODE": str(processes),
        "PET_MAX_RESTARTS": str(max_restarts),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"localhost:{port}",
        "PET_RDZV_ID": job,
    }


def master_environment(*, rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that the operator sets in each pod of a job with a master."""
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    """Return a free port below the ephemeral range, so that the kernel does not give it to another process."""
    import random  # noqa: PLC0415 - one use

    for candidate in random.sample(range(20_000, 32_000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            return candidate
    raise OSError("no free port between 20000 and 32000 on 127.0.0.1")
