"""The cases of Flyte's own reader of distributed errors,
with files written by flyteidl's own message.
"""

import pytest

from firstfault.failure_listing import FoundAttempt, attempts_below
from firstfault.store import open_store
from firstfault.utils.run_sync import run_sync
from tests.readers.conftest import Attempt

_OUTPUTS = (
    *(
        "error_rate",
        "error_rate_offloaded_metadata.pb",
        "errors_total.pb",
        "errors_by_class/part-0.pb",
    ),
    *("error.json", "error-x.pb"),
)
"""Files of outputs that are called "error_rate", "errors_total" and so on."""


async def _attempts_below(uri: str) -> list[FoundAttempt]:
    async with open_store(uri) as store:
        return await attempts_below(store)


@pytest.mark.parametrize("has_error", [False, True])
def test_outputs_named_error_are_no_errors(attempt: Attempt, has_error: bool) -> None:
    """Outputs beside an error are neither read as errors nor hide it, whatever is in them."""
    for name in _OUTPUTS:
        attempt.put(name, b"0.25")
    attempt.put("outputs.pb", b"")
    wanted = ("error.pb", f"error-{'0123456789abcdef' * 2}.pb") if has_error else ()
    names = [attempt.write_flyte_error(name, worker="w-1") for name in wanted]
    job = attempt.reader().job()
    assert [ref.name for failure in job.failures for ref in failure.documents] == sorted(names)
    assert (job.coverage.unreadable, attempt.reader().is_error()) == (0, has_error)
    (found,) = run_sync(_attempts_below(attempt.uri))
    assert [item.name for item in found.error_files] == sorted(names)


@pytest.mark.parametrize(
    "name", ["outputs.pb", "my-error.pb", "error.pb.tmp", "error.txt", "Error.pb", "error/0.pb"]
)
def test_names_that_flytes_reader_does_not_match_are_no_errors(attempt: Attempt, name: str) -> None:
    """Any other name is no error."""
    attempt.write_flyte_error(name)
    assert not attempt.reader().is_error()
