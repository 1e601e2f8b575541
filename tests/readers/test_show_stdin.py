"""``firstfault show -``: one document from stdin."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument

from firstfault.cli import EXIT
from firstfault.conclude import conclude
from firstfault.model import Kind
from firstfault.testing import make_error, make_job
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, encode
from tests.seals import sealed

_SHOW = [sys.executable, "-m", "firstfault", "show", "-"]
_STOCK = ErrorDocument(error=ContainerError(code="USER:Unknown", message="Trace: the loss is NaN"))


def _show(data: bytes, *options: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*_SHOW, *options], input=data, capture_output=True, timeout=60, check=False)


def _sealed() -> bytes:
    conclusion = conclude(make_job(make_error(3, message="sealed boom")))
    assert conclusion is not None
    return sealed(conclusion.verdict, conclusion.decision, fault_timestamp_ns=None)


@pytest.mark.parametrize(
    ("document", "code", "said"),
    [
        (encode(make_error(3, message="boom")), EXIT.ROOT_CAUSE, "rank 3"),
        (encode(make_error(3, kind=Kind.RECOVERABLE)), EXIT.ROOT_CAUSE_RETRYABLE, "rank 3"),
        (_STOCK.SerializeToString(), EXIT.ROOT_CAUSE, "the loss is NaN"),
        (_sealed(), EXIT.ROOT_CAUSE, "sealed boom"),
    ],
    ids=["ours", "recoverable", "Flyte's own", "sealed"],
)
def test_a_document_from_a_pipe(document: bytes, code: EXIT, said: str) -> None:
    """A document on stdin is reported as one in a storage, and the report names no place to look for it."""
    ran = _show(document)
    assert ran.returncode == code
    assert said in ran.stdout.decode()
    assert "documents:" not in ran.stdout.decode()
    assert ran.stderr == b""


def test_json_of_a_document_from_a_pipe() -> None:
    """--json works for a document on stdin; there is no URI."""
    found = json.loads(_show(encode(make_error(3)), "--json").stdout)
    assert (found["verdict"]["ranks"], found["uri"]) == ([3], None)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "stdin is empty; did the command before the pipe fail?"),
        (b"<html>not found</html>", "stdin is not an error document"),
        (b"\x00" * (MAX_DOCUMENT_BYTES + 1), f"stdin has more than {MAX_DOCUMENT_BYTES} bytes"),
    ],
    ids=["empty", "another format", "too large"],
)
def test_bytes_that_are_no_document(data: bytes, said: str) -> None:
    """Bytes that are no document have exit code 1 and one line that says why."""
    ran = _show(data)
    (line,) = ran.stderr.decode().splitlines()
    assert (ran.returncode, ran.stdout) == (EXIT.TOOL_FAILED, b"")
    assert said in line


def test_a_terminal_is_no_document() -> None:
    """If stdin is a terminal, the command does not wait for input; it says what to do, and exits with 2."""
    leader, terminal = os.openpty()
    try:
        ran = subprocess.run(_SHOW, stdin=terminal, capture_output=True, timeout=60, check=False)
    finally:
        os.close(leader)
        os.close(terminal)
    (line,) = ran.stderr.decode().splitlines()
    assert ran.returncode == EXIT.USAGE
    assert "pipe one into it: firstfault show - < error.pb" in line
