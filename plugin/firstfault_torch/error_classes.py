"""torch elastic's classes of errors, the fields of a document about each of them, and torch's ``error.json``.

torch distinguishes input errors, worker failures, platform errors and infra errors
(``torch.distributed.elastic.multiprocessing.errors``). Category, kind, origin and code follow from the class; only an
exception that its author declared recoverable does not fit one of torch's classes.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
import pickle
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.model import Kind, Origin, Place, Subject, WorkerError, Writer
from firstfault.text import parse_json
from firstfault_torch.capture import qualified_name
from firstfault_torch.context import boot_id, versions

_WRONG_PATHS = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENOEXEC, errno.E2BIG, errno.ELOOP),
    errno.ENAMETOOLONG,
}
"""Errors of open(2) and execve(2) that the same arguments meet again."""


@dataclass(frozen=True, slots=True)
class FlyteClass:
    """The fields of a document about such an error, in the terms of flyteidl's ContainerError."""

    category: str
    """Empty: the reader derives it from exit code and signal."""
    kind: Kind
    origin: Origin
    code: str
    """The default; an exception may have its own code."""


class ErrorClass(enum.Enum):
    """torch's taxonomy, and what it lacks: recoverable exceptions, preemption, lost agents."""

    INPUT_ERROR = FlyteClass("input", Kind.NON_RECOVERABLE, Origin.USER, "USER:InputError")
    WORKER_FAILURE = FlyteClass("", Kind.NON_RECOVERABLE, Origin.USER, "USER:RuntimeError")
    RECOVERABLE_EXCEPTION = FlyteClass("recoverable", Kind.RECOVERABLE, Origin.USER, "USER:Recoverable")
    PLATFORM_ERROR = FlyteClass("platform", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:AgentError")
    INFRA_ERROR = FlyteClass("infrastructure", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:InfrastructureError")
    RENDEZVOUS_ERROR = FlyteClass("rendezvous", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:RendezvousError")
    PREEMPTION = FlyteClass("preemption", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:Preemption")
    LOST_AGENT = FlyteClass("node_lost", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:AgentLost")


def failure_record(error_class: ErrorClass, place: Place, **fields: Any) -> WorkerError:
    """Return the record of a failure with its fingerprint.

    Args:
        error_class: gives code, kind, origin and category unless `fields` do.
        place: of the process that failed.
        fields: further fields of `WorkerError`.
    """
    flyte = error_class.value
    defaults = {"code": flyte.code, "kind": flyte.kind, "origin": flyte.origin, "category": flyte.category}
    failure = WorkerError(worker=place.node, place=place, boot_id=boot_id(), versions=versions(), **(defaults | fields))
    return replace(failure, fingerprint=fingerprint_of(failure))


def lost_agent(place: Place) -> WorkerError:
    """Return the record of the death of the agent at `place`, without its time; a worker or the recorder writes it."""
    return failure_record(
        ErrorClass.LOST_AGENT,
        place,
        message="the agent died and left no report; its workers were terminated",
        writer=Writer.WORKER,
        subject=Subject.AGENT,
    )


def error_class_of(error: BaseException) -> ErrorClass:
    """Return the class of an error that the agent itself raised.

    A lost store and missing nodes are rendezvous errors; a wrong argument is an input error, and so is a path to a
    program or folder that is missing, or may not be used.
    """
    names = {qualified_name(kind) for kind in type(error).__mro__}
    if any(name.startswith("torch.distributed.elastic.rendezvous.") for name in names):
        return ErrorClass.RENDEZVOUS_ERROR
    if names & {"torch.distributed.DistNetworkError", "torch.distributed.DistStoreError"}:
        return ErrorClass.RENDEZVOUS_ERROR
    if isinstance(error, ValueError | TypeError | AttributeError | ImportError | pickle.PicklingError):
        return ErrorClass.INPUT_ERROR  # a setting, or a function or argument that cannot be pickled
    if isinstance(error, OSError) and error.errno in _WRONG_PATHS:
        return ErrorClass.INPUT_ERROR
    if isinstance(error, OSError | MemoryError):
        return ErrorClass.INFRA_ERROR
    return ErrorClass.PLATFORM_ERROR


# --- error.json, written so that torchrun and its tools show the same error -------------------------------------------

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_RECOVERABLE = "recoverable_error"
"""The file name that kfpytorch uses for the same mark."""
_MADE_BY_TORCH = re.compile(r"torchelastic_[a-z0-9_]{8}")
"""The name of the folder that torch makes for a run whose user named none."""


def error_file_data(type_name: str, message: str, traceback: str, timestamp_ns: int) -> dict[str, Any]:
    """Return the content in torch's format, with the time in whole seconds."""
    short = type_name.rsplit(".", 1)[-1]
    return {
        "message": {
            "message": f"{short}: {message}",
            "extraInfo": {"py_callstack": traceback, "timestamp": str(timestamp_ns // 1_000_000_000)},
        }
    }


def write_error_file(path: str | Path, data: dict[str, Any]) -> None:
    """Write `data` atomically."""
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    part.write_text(json.dumps(data), encoding="utf-8", errors="backslashreplace")
    part.replace(target)


class _TextUnpickler(pickle.Unpickler):
    """Loads a pickled text and nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Refuse every class."""
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not a text")


def read_traceback(path: str | Path) -> str:
    """Return the traceback that torch.multiprocessing keeps of an exception outside of torch elastic's wrapper.

    It keeps one if a result cannot be pickled or arguments cannot be unpickled. Empty if there is none.
    """
    try:
        with Path(path).open("rb") as stream:
            text = _TextUnpickler(stream).load()
    except (OSError, pickle.UnpicklingError, EOFError, ValueError):
        return ""
    return text if isinstance(text, str) else ""


def mark_recoverable(error_file: str) -> None:
    """Create a file beside a worker's error.json that marks its exception as recoverable."""
    (Path(error_file).parent / _RECOVERABLE).touch()


def was_recoverable(error_file: str) -> bool:
    """Whether the worker that this error.json belongs to marked its exception as recoverable."""
    return (Path(error_file).parent / _RECOVERABLE).exists()


def remove_error_files(log_folder: str) -> None:
    """Remove a run's error files, and their folders if those are empty then, from a folder that torch made itself.

    torch leaves one folder for each run in that for temporary files. A folder that the user named stays as it is, and
    so does every log file.
    """
    root = Path(log_folder)
    if root.parent != Path(tempfile.gettempdir()) or not _MADE_BY_TORCH.fullmatch(root.name):
        return
    for file in [*root.glob("*/attempt_*/*/error.json"), *root.glob(f"*/attempt_*/*/{_RECOVERABLE}")]:
        file.unlink(missing_ok=True)
    for folder, _, _ in os.walk(root, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def read_error_file(path: str | Path) -> dict[str, Any] | None:
    """Return the message part of an ``error.json``; None if the file is missing or unreadable."""
    try:
        message = parse_json(Path(path).read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return message if isinstance(message, dict) else {"message": str(message), "extraInfo": {}}


def is_readable(error_file: str) -> bool:
    """Whether torch can read an error.json, and make a ChildFailedError of it."""
    try:
        content = json.loads(Path(error_file).read_text(encoding="utf-8"))
        message = content["message"]
        if isinstance(message, str):
            int(content.get("timestamp", 0))
            return True
        extra = message["extraInfo"]
        int(extra["timestamp"])
        return isinstance(extra.get("py_callstack", message.get("message", "")), str)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
