"""``firstfault show -``: one document from stdin."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument

from firstfault.cli import EXIT, main
from firstfault.conclude import conclude
from firstfault.model import Kind
from firstfault.testing import make_error, make_job
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, encode
from tests.seals import sealed

if TYPE_CHECKING:
    from collections.abc import Callable

_STOCK = ErrorDocument(error=ContainerError(code="USER:Unknown", message="Trace: the loss is NaN"))


def _sealed() -> bytes:
    conclusion = conclude(make_job(make_error(3, message="sealed boom")))
    assert conclusion is not None
    return sealed(conclusion.verdict, conclusion.decision, fault_timestamp_ns=None)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that shows bytes on stdin: the exit code, stdout and stderr."""

    def show(data: bytes, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(SystemExit) as caught:
            main(["show", "-", *options])
        return (caught.value.code, *capsys.readouterr())

    return show


@pytest.mark.parametrize(
    ("document", "options", "code", "said"),
    [
        (encode(make_error(3, message="boom")), (), EXIT.ROOT_CAUSE, "rank 3"),
        (encode(make_error(3)), ("--json",), EXIT.ROOT_CAUSE, '"uri":null'),
        (encode(make_error(3, kind=Kind.RECOVERABLE)), (), EXIT.ROOT_CAUSE_RETRYABLE, "rank 3"),
        (_STOCK.SerializeToString(), (), EXIT.ROOT_CAUSE, "the loss is NaN"),
        (_sealed(), (), EXIT.ROOT_CAUSE, "sealed boom"),
    ],
    ids=["ours", "as JSON", "recoverable", "Flyte's own", "sealed"],
)
def test_a_document_from_a_pipe(
    shown: Callable[..., tuple[int, str, str]], document: bytes, options: tuple[str, ...], code: EXIT, said: str
) -> None:
    """A document on stdin is reported as one in a storage, and the report names no place to look for it."""
    found, out, err = shown(document, *options)
    assert (found, err) == (code, "")
    assert said in out
    assert "documents: " not in out


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "stdin is empty; did the command before the pipe fail?"),
        (b"<html>not found</html>", "stdin is not an error document"),
        (b"\x00" * (MAX_DOCUMENT_BYTES + 1), f"stdin has more than {MAX_DOCUMENT_BYTES} bytes"),
    ],
    ids=["empty", "another format", "too large"],
)
def test_bytes_that_are_no_document(shown: Callable[..., tuple[int, str, str]], data: bytes, said: str) -> None:
    """Bytes that are no document have exit code 1 and one line that says why."""
    code, out, err = shown(data)
    (line,) = err.splitlines()
    assert (code, out) == (EXIT.TOOL_FAILED, "")
    assert said in line


def test_a_terminal_is_no_document() -> None:
    """If stdin is a terminal, the command does not wait for input; it says what to do, and exits with 2."""
    leader, terminal = os.openpty()
    command = [sys.executable, "-m", "firstfault", "show", "-"]
    try:
        ran = subprocess.run(command, stdin=terminal, capture_output=True, timeout=60, check=False)
    finally:
        os.close(leader)
        os.close(terminal)
    (line,) = ran.stderr.decode().splitlines()
    assert ran.returncode == EXIT.USAGE
    assert "pipe one into it: firstfault show - < error.pb" in line
