"""The cases of Flyte's own reader of distributed errors, with files written by flyteidl's own message."""

from __future__ import annotations

import pytest
from flyteidl.core.errors_pb2 import ContainerError
from flyteidl.core.execution_pb2 import ExecutionError as FlyteExecutionError

from firstfault.failed_attempts import FoundAttempt, attempts_below
from firstfault.model import Origin
from firstfault.output_reader import ExecutionError
from firstfault.store import open_store
from firstfault.sync import run_sync
from tests.readers.conftest import Attempt


@pytest.mark.parametrize(
    ("origin", "kind", "recoverable"),
    [(Origin.USER, ContainerError.NON_RECOVERABLE, False), (Origin.SYSTEM, ContainerError.RECOVERABLE, True)],
)
def test_one_file(attempt: Attempt, origin: Origin, kind: int, recoverable: bool) -> None:
    """A user's error that is not recoverable, and the system's that is, are read as such."""
    attempt.stock("error.pb", origin=FlyteExecutionError.ErrorKind.Value(origin.value), kind=kind)
    reader = attempt.reader()
    assert reader.is_error()
    assert reader.read_error() == ExecutionError(
        "red", "hi", origin, recoverable=recoverable, error_uri=f"{attempt.uri}/firstfault/errors"
    )


@pytest.mark.parametrize("names", ["012", "201", "bca"])
def test_multi_user_error(attempt: Attempt, names: str) -> None:
    """The file with the earliest time of three workers is the root cause, whatever the files' random names."""
    for number, (name, seconds) in enumerate(zip(names, [100, 99, 100], strict=True)):
        told = {"code": f"red-{number}", "message": f"hi-{number}", "worker": f"worker-{number}"}
        attempt.stock(f"error-{name * 32}.pb", seconds=seconds, **told)
    reader = attempt.reader()
    assert reader.is_error()
    read = reader.read_error()
    assert (read.code, read.message, read.worker) == ("red-1", "hi-1", "worker-1")
    assert read.timestamp_ns == 99 * 1_000_000_000
    assert (read.kind, read.recoverable) == (Origin.USER, False)


def test_multi_user_error_backward_compat(attempt: Attempt) -> None:
    """An error.pb without a time, as flytekit before 1.14 writes it, is read, and its time stays unset."""
    attempt.stock("error.pb")
    reader = attempt.reader()
    read = reader.read_error()
    assert (read.code, read.message, read.kind, read.recoverable) == ("red", "hi", Origin.USER, False)
    assert read.timestamp_ns is None
    assert read.worker == ""
    assert reader.verdict().timestamp_ns is None


_OUTPUTS = (
    *("error_rate", "error_rate_offloaded_metadata.pb", "errors_total.pb", "errors_by_class/part-0.pb"),
    *("error.json", "error-x.pb"),
)
"""Files of outputs that are called "error_rate", "errors_total" and so on."""


async def _attempts_below(uri: str) -> list[FoundAttempt]:
    async with open_store(uri) as store:
        return await attempts_below(store)


@pytest.mark.parametrize("has_error", [False, True])
def test_outputs_whose_names_begin_with_error(attempt: Attempt, has_error: bool) -> None:
    """Outputs beside an error are neither read as errors nor hide it, whatever is in them."""
    for name in _OUTPUTS:
        attempt.put(name, b"0.25")
    attempt.put("outputs.pb", b"")
    wanted = ("error.pb", f"error-{'0123456789abcdef' * 2}.pb") if has_error else ()
    names = [attempt.stock(name, worker="w-1") for name in wanted]
    job = attempt.reader().job()
    assert [ref.name for failure in job.failures for ref in failure.documents] == sorted(names)
    assert (job.coverage.unreadable, attempt.reader().is_error()) == (0, has_error)
    (found,) = run_sync(_attempts_below(attempt.uri))
    assert [item.name for item in found.error_files] == sorted(names)


@pytest.mark.parametrize("name", ["outputs.pb", "my-error.pb", "error.pb.tmp", "error.txt", "Error.pb", "error/0.pb"])
def test_what_flytes_reader_does_not_match_we_do_not(attempt: Attempt, name: str) -> None:
    """Any other name is no error."""
    attempt.stock(name)
    assert not attempt.reader().is_error()
