"""The cases of Flyte's own reader of distributed errors, with files written by flyteidl's own message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from flyteidl.core.errors_pb2 import ContainerError
from flyteidl.core.execution_pb2 import ExecutionError as FlyteExecutionError

from firstfault.model import Origin, Scope
from firstfault.output_reader import ExecutionError
from firstfault.wire.documents import MAX_DOCUMENT_BYTES

if TYPE_CHECKING:
    from conftest import Attempt


def test_user(attempt: Attempt) -> None:
    """A non-recoverable user error is read as such."""
    attempt.stock("error.pb", origin=FlyteExecutionError.USER, kind=ContainerError.NON_RECOVERABLE)
    reader = attempt.reader()
    assert reader.is_error()
    assert reader.read_error() == ExecutionError(
        "red", "hi", Origin.USER, recoverable=False, error_uri=f"{attempt.uri}/firstfault/errors"
    )


def test_system(attempt: Attempt) -> None:
    """A recoverable system error is read as such, on the system's budget."""
    attempt.stock("error.pb", origin=FlyteExecutionError.SYSTEM, kind=ContainerError.RECOVERABLE)
    read = attempt.reader().read_error()
    assert (read.code, read.message, read.kind, read.recoverable) == ("red", "hi", Origin.SYSTEM, True)


def test_multi_user_error(attempt: Attempt) -> None:
    """The file with the earliest time of three workers is the root cause."""
    for number, seconds in enumerate([100, 99, 100]):
        attempt.stock(
            f"error-{number}.pb",
            seconds=seconds,
            code=f"red-{number}",
            message=f"hi-{number}",
            worker=f"worker-{number}",
        )
    reader = attempt.reader()
    assert reader.is_error()
    read = reader.read_error()
    assert (read.code, read.message, read.worker) == ("red-1", "hi-1", "worker-1")
    assert read.timestamp_ns == 99 * 1_000_000_000
    assert (read.kind, read.recoverable) == (Origin.USER, False)


@pytest.mark.parametrize(
    "names", [("error-2.pb", "error-0.pb", "error-1.pb"), ("error-b.pb", "error-c.pb", "error-a.pb")]
)
def test_multi_user_error_under_any_names(attempt: Attempt, names: tuple[str, ...]) -> None:
    """The files' random names do not matter."""
    for number, (name, seconds) in enumerate(zip(names, [100, 99, 100], strict=True)):
        attempt.stock(name, seconds=seconds, worker=f"worker-{number}")
    assert attempt.reader().read_error().worker == "worker-1"


def test_multi_user_error_backward_compat(attempt: Attempt) -> None:
    """An error.pb without a time, as flytekit before 1.14 writes it, is read, and its time stays unset."""
    attempt.stock("error.pb")
    reader = attempt.reader()
    read = reader.read_error()
    assert (read.code, read.message, read.kind, read.recoverable) == ("red", "hi", Origin.USER, False)
    assert read.timestamp_ns is None
    assert read.worker == ""
    assert reader.verdict().timestamp_ns is None


def test_too_large(attempt: Attempt) -> None:
    """A file larger than the limit is an undetermined error: not recoverable, and never "no error"."""
    attempt.stock("error.pb", message="x" * MAX_DOCUMENT_BYTES)
    reader = attempt.reader()
    assert reader.is_error()
    verdict = reader.verdict()
    assert (verdict.scope, verdict.coverage.unreadable) == (Scope.UNDETERMINED, 1)
    assert f"more than the limit of {MAX_DOCUMENT_BYTES}" in verdict.coverage.notes[0]
    read = reader.read_error()
    assert (read.code, read.recoverable) == ("ErrorFileBadFormat", False)


def test_too_large_beside_others(attempt: Attempt) -> None:
    """A file that is too large does not hide the others."""
    attempt.stock("error-0.pb", message="x" * MAX_DOCUMENT_BYTES, seconds=1, worker="worker-0")
    attempt.stock("error-1.pb", seconds=100, worker="worker-1")
    assert attempt.reader().read_error().worker == "worker-1"


@pytest.mark.parametrize("name", ["errors.pb", "error-.pb", "error_0.pb"])
def test_what_flytes_reader_matches_we_match(attempt: Attempt, name: str) -> None:
    """Flyte's reader takes every name that starts with "error" and ends with ".pb"; so does this one."""
    attempt.stock(name)
    assert attempt.reader().is_error()


@pytest.mark.parametrize("name", ["outputs.pb", "my-error.pb", "error.pb.tmp", "error.txt", "Error.pb", "error/0.pb"])
def test_what_flytes_reader_does_not_match_we_do_not(attempt: Attempt, name: str) -> None:
    """Any other name is no error."""
    attempt.stock(name)
    assert not attempt.reader().is_error()
