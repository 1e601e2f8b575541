"""``firstfault watch`` while another process writes, on a local folder and on S3: it ends with what show says."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from firstfault.cli import EXIT, main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    Command: TypeAlias = Callable[..., tuple[int, str, str]]

WRITER = Path(__file__).parent / "writing.py"
FAST = ("--interval", "0.1")


@contextlib.contextmanager
def _writing(folder: str, *plans: str, waits: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(WRITER), folder, ",".join(plans), *(["waits"] if waits else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield process
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command; it returns the exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        said = capsys.readouterr()
        return int(caught.value.code or 0), said.out, said.err

    return run


@pytest.mark.parametrize(
    ("plan", "code"), [("fails", EXIT.ROOT_CAUSE), ("retried", EXIT.ROOT_CAUSE_RETRYABLE), ("sealed", EXIT.ROOT_CAUSE)]
)
def test_watch_ends_with_what_show_says(store_uri: str, command: Command, tmp_path: Path, plan: str, code: int) -> None:
    """Preliminary answers say so; the last one is show's, with its exit code and the decision that the pods sealed."""
    watch = [sys.executable, "-m", "firstfault", "watch", f"{store_uri}/0", *FAST, "--timeout", "60"]
    notes = tmp_path / "notes"
    with (
        _writing(store_uri, plan, waits=True) as writer,
        notes.open("w") as stderr,
        subprocess.Popen(watch, stdout=subprocess.PIPE, stderr=stderr, text=True) as watching,
    ):
        out = watching.stdout.readline()
        writer.stdin.close()  # the writer goes on
        out += watching.stdout.read()
    shown, report, _ = command("show", f"{store_uri}/0")
    err = notes.read_text()
    assert (watching.returncode, shown) == (code, code), err
    preliminary = out.removesuffix(report)
    assert preliminary != out
    assert all(line.startswith("not decided yet: ") for line in preliminary.splitlines())
    assert "KeyError rank 0" in preliminary, "the later fault was the only one that was known"
    assert "decided" in err


def test_watch_at_the_timeout_says_what_show_says(store_uri: str, command: Command) -> None:
    """If a node never reports, the last answer is show's at that moment."""
    with _writing(store_uri, "is stuck"):
        pass
    watched, out, _ = command("watch", f"{store_uri}/0", *FAST, "--timeout", "2", "--json")
    shown, report, _ = command("show", f"{store_uri}/0", "--json")
    assert (watched, out.splitlines()[-1]) == (shown, report.strip())


@pytest.mark.parametrize(
    ("plans", "code", "reports"),
    [
        (("retried", "succeeds"), EXIT.OK, 1),
        (("retried", "fails"), EXIT.ROOT_CAUSE, 2),
    ],
)
def test_follow_goes_on_with_the_next_attempt(
    store_uri: str, command: Command, plans: tuple[str, ...], code: int, reports: int
) -> None:
    """A retried attempt is followed by the next one, until one succeeds or is not retried."""
    with _writing(store_uri, *plans):
        watched, out, err = command("watch", "--follow", f"{store_uri}/0", *FAST, "--timeout", "60")
    assert watched == code
    assert out.count("root cause: ValueError, rank 1 on w-1") == reports
    assert [f"watching {store_uri}/{number}/" in err for number in range(3)] == [True, True, False]


def test_follow_skips_an_attempt_that_left_nothing(store_uri: str, command: Command) -> None:
    """An attempt whose pods all vanished without a report ends when the next one begins."""
    with _writing(store_uri, "vanishes", "succeeds"):
        code, _, err = command("watch", "--follow", f"{store_uri}/0", *FAST, "--timeout", "30")
    assert code == EXIT.OK
    assert "every node has finished without a failure" in err


def test_follow_needs_an_attempt(store_uri: str, command: Command) -> None:
    """A prefix that does not end in an attempt's number cannot be followed: one line says what to name."""
    code, _, err = command("watch", "--follow", store_uri)
    assert code == EXIT.USAGE
    assert "ends in its number" in err
