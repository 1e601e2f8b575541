"""Files of jobs without firstfault, written by Flyte's own entrypoint, in its own process,
to a folder and to S3.
"""

import os
import re
import subprocess
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flyteidl.core.errors_pb2 import ErrorDocument

from firstfault.model import Kind, Origin, WorkerError, Writer
from firstfault.output_reader import MultiErrorFileOutputReader

pytestmark = pytest.mark.slow

SECOND = 1_000_000_000
WORKER = "run-n0-0-worker-1"
ONE_FILE: dict[str, str] = {}
A_FILE_EACH = {
    "FLYTE_INTERNAL_DIST_ERROR_STRATEGY": "Earliest",
    "FLYTE_INTERNAL_WORKER_NAME": WORKER,
}
SHORT_NAMES = {"_F_DES": "Earliest", "_F_WN": WORKER}
"""The variables that the backend sets."""


@dataclass(frozen=True)
class Case:
    """A kind of failure, and Flyte 1.16's result."""

    task: str
    code: str
    kind: Kind
    origin: Origin
    text: str
    """Part of the message."""
    inputs: str = "inputs.pb"


CASES = [
    Case(
        "plain",
        "USER:RuntimeError",
        Kind.NON_RECOVERABLE,
        Origin.USER,
        "RuntimeError: a plain fault",
    ),
    Case("recoverable", "USER:Recoverable", Kind.RECOVERABLE, Origin.USER, "error=try again"),
    Case(
        "platform",
        "SYSTEM",
        Kind.NON_RECOVERABLE,
        Origin.SYSTEM,
        "ValueError: the platform is gone",
    ),
    Case("fine", "SYSTEM", Kind.RECOVERABLE, Origin.SYSTEM, "missing.pb", inputs="missing.pb"),
]


def named(store: str, case: Case, way: str, mode: dict[str, str]) -> Any:
    """Return a parameter set with an id that can be read."""
    marks = [pytest.mark.s3] * (store == "s3")
    return pytest.param(store, case, mode, marks=marks, id=f"{store}-{case.task}-{way}")


# processes that import flytekit are slow to start: each case once, and each way at least once, in a
# folder and on S3
STARTED = [
    named("folder", CASES[0], "one-file", ONE_FILE),
    named("folder", CASES[1], "a-file-each", A_FILE_EACH),
    named("s3", CASES[2], "one-file", ONE_FILE),
    named("s3", CASES[3], "short-names", SHORT_NAMES),
]


@pytest.fixture
def execute(tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs a task with the stock ``pyflyte-execute``,
    as the pod's container does.
    """

    def run(case: Case, output_prefix: str, mode: dict[str, str]) -> None:
        (tmp_path / "inputs.pb").write_bytes(b"")
        environment = (
            os.environ
            | mode
            | {
                "PYTHONPATH": str(Path(__file__).parent),
                "PYTHONDONTWRITEBYTECODE": "1",
            }
        )
        command = [
            str(Path(sysconfig.get_path("scripts")) / "pyflyte-execute"),
            f"--inputs={tmp_path / case.inputs}",
            f"--output-prefix={output_prefix}",
            f"--raw-output-data-prefix={output_prefix}-raw",
            "--resolver=flytekit.core.python_auto_container.default_task_resolver",
            *("--", "task-module", "stock_tasks", "task-name", case.task),
        ]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment | {"TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]

    return run


@pytest.mark.parametrize(("store_uri", "case", "mode"), STARTED, indirect=["store_uri"])
def test_a_stock_error_is_read_unchanged_and_decides_as_in_flyte(
    store_uri: str,
    execute: Callable[..., None],
    files_in: Callable[[str], dict[str, bytes]],
    case: Case,
    mode: dict[str, str],
) -> None:
    """Code, message, kind, origin, time and worker of a stock error file arrive unchanged,
    and decide as in Flyte.
    """
    before = time.time_ns() // SECOND * SECOND
    execute(case, store_uri, mode)
    after = time.time_ns()

    files = files_in(store_uri)
    (name,) = [name for name in files if name.startswith("error")]
    assert re.fullmatch(r"error-[0-9a-f]{32}\.pb" if mode else r"error\.pb", name)
    written = ErrorDocument.FromString(files[name]).error

    reader = MultiErrorFileOutputReader(store_uri)
    (failure,) = reader.job().failures
    worker = WORKER if mode else ""
    assert (failure.writer, failure.node, failure.worker) == (Writer.STOCK, worker, worker)
    assert (failure.code, failure.kind, failure.origin) == (case.code, case.kind, case.origin)
    assert failure.message == written.message
    assert case.text in failure.message
    assert failure.timestamp_ns == written.timestamp.ToNanoseconds()
    assert before <= failure.timestamp_ns <= after
    assert_flyte_would_say_the_same(reader, failure)


def assert_flyte_would_say_the_same(
    reader: MultiErrorFileOutputReader, failure: WorkerError
) -> None:
    """Compare with Flyte's own reader: message and code as they are, RECOVERABLE is recoverable,
    origin is the kind.
    """
    assert reader.is_error()
    assert not reader.exists()
    error = reader.read_error()
    assert (error.code, error.message, error.kind) == (
        failure.code,
        failure.message,
        failure.origin,
    )
    assert error.recoverable is (failure.kind is Kind.RECOVERABLE)
    assert (error.timestamp_ns, error.worker) == (failure.timestamp_ns, failure.worker)
