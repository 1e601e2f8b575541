"""``firstfault watch`` on attempts that pods write step by step, on a real S3 server."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from firstfault.cli import EXIT, main
from firstfault.conclude import conclude
from firstfault.layout import ERRORS, ROSTER, roster_key_for
from firstfault.model import Kind, Phase
from firstfault.retry import never
from firstfault.store import open_store
from firstfault.testing import make_error, make_job, make_presence
from firstfault.wire.documents import encode, encode_presence
from tests.seals import sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import TypeAlias

    from tests.s3_server import S3

    Command: TypeAlias = Callable[..., tuple[int, str, str]]

PAUSE_S = 0.2
AFTER_FIRST_DOCUMENT = 2
FAST = ("--interval", "0.1")


def _entry(attempt: int, number: int, phase: Phase) -> tuple[str, bytes]:
    """Return one of two nodes' roster entry."""
    made = make_presence(phase, node=f"w-{number}", group_rank=number, nodes=2, ranks=(number,), attempt=attempt)
    return f"{ROSTER}/{roster_key_for(made)}", encode_presence(made)


def _steps(attempt: int, plan: str) -> list[list[tuple[str, bytes]]]:
    """Return what an attempt writes, one list a step."""
    if plan == "vanishes":
        return []
    joined = [_entry(attempt, number, Phase.JOINED) for number in range(2)]
    if plan == "succeeds":
        return [joined, [*(_entry(attempt, number, Phase.SUCCEEDED) for number in range(2)), ("outputs.pb", b"")]]
    kind = Kind.RECOVERABLE if plan == "retried" else Kind.NON_RECOVERABLE
    place = {"group_world_size": 2, "world_size": 2, "attempt": attempt}
    late = make_error(0, node="w-0", group_rank=0, at_ms=30_000, exception="KeyError", message="tokens", **place)
    root = make_error(1, node="w-1", group_rank=1, at_ms=5, message="bad batch", kind=kind, **place)
    documents = [[(f"{ERRORS}/{error.documents[0].name}", encode(error))] for error in (late, root)]
    steps = [joined, *documents, [_entry(attempt, number, Phase.FAILED) for number in range(2)]]
    if plan == "sealed":
        conclusion = conclude(make_job(late, root), policy=never())
        assert conclusion is not None
        seal = sealed(conclusion.verdict, conclusion.decision, timestamp_ns=time.time_ns())
        steps.append([("error.pb", seal)])
    return steps


@contextlib.contextmanager
def _writing(folder: str, *plans: str, waits: bool = False) -> Iterator[threading.Event]:
    """Write attempts in a thread; with `waits` the writer waits after the first document for the event."""
    may_continue = threading.Event()
    if not waits:
        may_continue.set()

    async def write() -> None:
        for number, plan in enumerate(plans):
            async with open_store(f"{folder}/{number}") as store:
                for index, step in enumerate(_steps(number, plan)):
                    await asyncio.sleep(PAUSE_S)
                    if index == AFTER_FIRST_DOCUMENT:
                        await asyncio.to_thread(may_continue.wait, 60)
                    for path, data in step:
                        await store.put(path, data)

    thread = threading.Thread(target=asyncio.run, args=(write(),))
    thread.start()
    try:
        yield may_continue
    finally:
        may_continue.set()
        thread.join()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command; it returns the exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        said = capsys.readouterr()
        return int(caught.value.code or 0), said.out, said.err

    return run


def test_watch_ends_with_what_show_says(s3_environ: S3, command: Command, tmp_path: Path) -> None:
    """Preliminary answers say so; the last one is show's, with its exit code and the decision that the pods sealed."""
    uri = s3_environ.uri()
    watch = [sys.executable, "-m", "firstfault", "watch", f"{uri}/0", *FAST, "--timeout", "60"]
    notes = tmp_path / "notes"
    with (
        _writing(uri, "sealed", waits=True) as may_continue,
        notes.open("w") as stderr,
        subprocess.Popen(watch, stdout=subprocess.PIPE, stderr=stderr, text=True) as watching,
    ):
        out = watching.stdout.readline()
        may_continue.set()
        out += watching.stdout.read()
    shown, report, _ = command("show", f"{uri}/0")
    err = notes.read_text()
    assert (watching.returncode, shown) == (EXIT.ROOT_CAUSE, EXIT.ROOT_CAUSE), err
    preliminary = out.removesuffix(report)
    assert preliminary != out
    assert all(line.startswith("not decided yet: ") for line in preliminary.splitlines())
    assert "KeyError rank 0" in preliminary, "the later fault was the only one that was known"
    assert "decided" in err


@pytest.mark.parametrize(
    ("plans", "code", "said"),
    [
        (("retried", "fails"), EXIT.ROOT_CAUSE, ["root cause: ValueError, rank 1 on w-1: bad batch"] * 2),
        (("vanishes", "succeeds"), EXIT.OK, []),
    ],
)
def test_follow_goes_on_with_the_next_attempt(
    s3_environ: S3, command: Command, plans: tuple[str, ...], code: int, said: list[str]
) -> None:
    """A retried attempt, or one whose pods all vanished without a report, is followed by the next one."""
    uri = s3_environ.uri()
    with _writing(uri, *plans):
        watched, out, err = command("watch", "--follow", f"{uri}/0", *FAST, "--timeout", "60")
    assert watched == code
    assert [line for line in out.splitlines() if line.startswith("root cause: ")] == said
    assert [f"watching {uri}/{number}/" in err for number in range(3)] == [True, True, False]
    assert ("every node has finished without a failure" in err) == (code == EXIT.OK)


def test_follow_needs_an_attempt(tmp_path: Path, command: Command) -> None:
    """A prefix that does not end in an attempt's number cannot be followed: one line says what to name."""
    code, _, err = command("watch", "--follow", str(tmp_path / "run"))
    assert code == EXIT.USAGE
    assert "ends in its number" in err
