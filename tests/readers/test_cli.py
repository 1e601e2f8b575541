"""The command ``firstfault show``: exit codes, the JSON contract, and one line for an error."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import pytest

from firstfault.cli import EXIT, main
from firstfault.errors import AccessDeniedError
from firstfault.model import Kind
from firstfault.store import FsspecStore
from firstfault.testing import make_error, make_presence

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Attempt

_VERDICT_KEYS = {
    "scope",
    "ranks",
    "node",
    "code",
    "category",
    "fingerprint",
    "headline",
    "message",
    "timestamp",
    "strategy",
    "confidence",
    "why",
    "suspects",
    "victims",
    "coverage",
    "settled",
    "documents",
}
_DECISION_KEYS = {"retry", "kind", "origin", "enforced", "reason"}


@dataclass(frozen=True)
class Ran:
    """What a run of the command line did."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command line in this process."""

    def call(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        out, err = capsys.readouterr()
        return Ran(caught.value.code, out, err)

    return call


# --- exit codes -----------------------------------------------------------------------------------------------------


def test_the_exit_codes_are_a_contract() -> None:
    """Other tools rely on these numbers."""
    assert {code.name: code.value for code in EXIT} == {
        "OK": 0,
        "TOOL_FAILED": 1,
        "USAGE": 2,
        "NOTHING_FOUND": 3,
        "TIMEOUT": 4,
        "ROOT_CAUSE": 10,
        "ROOT_CAUSE_RETRYABLE": 11,
        "INTERRUPTED": 130,
    }


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize(
    ("errors", "outputs", "code"),
    [
        ([], True, EXIT.OK),
        ([], False, EXIT.NOTHING_FOUND),
        ([make_error()], False, EXIT.ROOT_CAUSE),
        ([make_error()], True, EXIT.ROOT_CAUSE),
        ([make_error(kind=Kind.RECOVERABLE)], False, EXIT.ROOT_CAUSE_RETRYABLE),
        ([make_error(round=0), make_error(round=1, kind=Kind.RECOVERABLE)], False, EXIT.ROOT_CAUSE_RETRYABLE),
    ],
    ids=["outputs", "nothing", "root cause", "errors beat outputs", "retryable", "last round"],
)
def test_what_was_found_is_the_exit_code(  # noqa: PLR0917 - two fixtures and a table
    attempt: Attempt, run: Callable[..., Ran], options: tuple[str, ...], errors: list, outputs: bool, code: int
) -> None:
    """The exit code says whether there is a root cause and whether to retry, with and without --json."""
    attempt.write(*errors)
    if outputs:
        attempt.put("outputs.pb", b"")
    assert run("show", attempt.uri, *options).code == code


def test_an_unreadable_document_is_a_root_cause_nobody_can_name(attempt: Attempt, run: Callable[..., Ran]) -> None:
    """An attempt of which nothing can be read did not succeed."""
    attempt.put("outputs.pb", b"")
    attempt.put("error.pb", b"")
    ran = run("show", attempt.uri)
    assert ran.code == EXIT.ROOT_CAUSE
    assert ran.out.startswith("undetermined no retry: ")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("show",), "Missing argument 'URI'"),
        (("show", "out", "--expected-nodes", "0"), "0 is not in the range"),
        (("show", "out", "--expected-nodes", "many"), "not a valid integer"),
        (("show", "out", "--colour"), "No such option"),
        (("shew", "out"), "No such command"),
        (("show", "out", "--strategy", "earlyest"), "there is no strategy 'earlyest'; known are evidence, earliest"),
        (("show", "nosuchthing://bucket/out"), "there is no storage of the kind 'nosuchthing'"),
    ],
)
def test_a_usage_error(run: Callable[..., Ran], arguments: tuple[str, ...], reason: str) -> None:
    """What cannot be asked is exit code 2, with the reason on stderr and nothing on stdout."""
    ran = run(*arguments)
    assert ran.code == EXIT.USAGE
    assert reason in ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("path", ["", "/firstfault", "/firstfault/errors", "/error.pb", "/elsewhere"])
def test_nothing_found(attempt: Attempt, run: Callable[..., Ran], path: str) -> None:
    """Where there is nothing, the exit code is 3, and one line says where it was looked."""
    ran = run("show", attempt.uri + path)
    assert ran.code == EXIT.NOTHING_FOUND
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    assert line.startswith("firstfault: ")
    assert attempt.uri in line


def test_outputs_do_not_excuse_an_errors_folder(attempt: Attempt, run: Callable[..., Ran]) -> None:
    """Who names an empty errors folder is not told that the attempt succeeded."""
    attempt.put("firstfault/errors/outputs.pb", b"")
    (attempt.folder / "firstfault/errors/outputs.pb").unlink()
    attempt.put("outputs.pb", b"")
    assert run("show", attempt.uri).code == EXIT.OK
    assert run("show", f"{attempt.uri}/firstfault/errors").code == EXIT.NOTHING_FOUND


def test_success_is_said(attempt: Attempt, run: Callable[..., Ran]) -> None:
    """An attempt that left outputs and no error did not fail, and that is said."""
    attempt.put("outputs.pb", b"")
    ran = run("show", attempt.uri)
    assert ran == Ran(EXIT.OK, "no error: the attempt left outputs\n", "")


# --- errors of the tool ---------------------------------------------------------------------------------------------


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing is refused, in words of two lines and colours."""

    async def listing(self: FsspecStore, folder: str = "") -> list:
        raise AccessDeniedError("cannot list:\n\x1b[31mrefused\x1b[0m")

    monkeypatch.setattr(FsspecStore, "list", listing)


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_storage_error_is_one_line(attempt: Attempt, run: Callable[..., Ran], options: tuple[str, ...]) -> None:
    """A storage that refuses is exit code 1 and one plain line, even if there are outputs."""
    attempt.put("outputs.pb", b"")
    ran = run("show", attempt.uri, *options)
    assert ran == Ran(EXIT.TOOL_FAILED, "", "firstfault: cannot list: refused\n")


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("arguments", [("--debug", "show"), ("show", "--debug")])
def test_debug_gives_a_traceback(attempt: Attempt, arguments: tuple[str, ...]) -> None:
    """With --debug, before or after the command, the error is raised as it is."""
    with pytest.raises(AccessDeniedError):
        main([*arguments, attempt.uri])


def _bug(*arguments: object, **options: object) -> None:
    raise ZeroDivisionError("a bug")


def test_a_bug_is_one_line(attempt: Attempt, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an error that nobody foresaw is one line, which names it and says how to see more."""
    monkeypatch.setattr(FsspecStore, "list", _bug)
    ran = run("show", attempt.uri)
    assert ran.code == EXIT.TOOL_FAILED
    assert ran.err == "firstfault: unexpected ZeroDivisionError: a bug (run with --debug for a traceback)\n"


def test_a_bug_with_debug(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --debug a bug is raised as it is."""
    monkeypatch.setattr(FsspecStore, "list", _bug)
    with pytest.raises(ZeroDivisionError):
        main(["show", attempt.uri, "--debug"])


def test_an_interrupt(attempt: Attempt, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is exit code 130 and one line."""

    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("firstfault.reader.MultiErrorFileOutputReader.job", interrupt)
    ran = run("show", attempt.uri)
    assert ran.code == EXIT.INTERRUPTED
    assert ran.err.strip() == "firstfault: interrupted"


# --- output ---------------------------------------------------------------------------------------------------------


def test_json(attempt: Attempt, run: Callable[..., Ran]) -> None:
    """With --json stdout is one object with exactly the keys of the contract, and stderr is empty."""
    attempt.write(make_error(3, node="w-1", message="bad"), make_error(0, node="w-0", at_ms=30, message="peer"))
    attempt.join(make_presence(node="w-1", nodes=2), make_presence(node="w-0", group_rank=1, nodes=2))
    ran = run("show", attempt.uri, "--json")
    assert ran.err == ""
    (line,) = ran.out.splitlines()
    document = json.loads(line)
    assert set(document) == {"schema", "verdict", "decision"}
    assert document["schema"] == "firstfault.verdict/v1"
    verdict, decision = document["verdict"], document["decision"]
    assert set(verdict) == _VERDICT_KEYS
    assert set(decision) == _DECISION_KEYS
    assert {"expected", "reported", "unreadable", "complete"} <= set(verdict["coverage"])
    assert set(verdict["documents"]) == {"digest", "count"}
    assert (verdict["scope"], verdict["ranks"], verdict["node"]) == ("rank", [3], "w-1")
    assert verdict["victims"] == {"count": 1, "ranks": {"0": "ValueError: peer"}}
    assert (decision["retry"], decision["kind"], decision["origin"]) == (False, "NON_RECOVERABLE", "USER")
    assert decision["enforced"] is True


@pytest.mark.parametrize("outputs", [True, False])
def test_json_without_an_error(attempt: Attempt, run: Callable[..., Ran], outputs: bool) -> None:
    """Without an error, the object is the same with null for verdict and decision."""
    if outputs:
        attempt.put("outputs.pb", b"")
    ran = run("show", attempt.uri, "--json")
    assert json.loads(ran.out) == {"schema": "firstfault.verdict/v1", "verdict": None, "decision": None}


def test_text(attempt: Attempt, run: Callable[..., Ran]) -> None:
    """Without --json stdout begins with the answer and ends with where the documents are."""
    attempt.write(make_error(3, node="w-1", message="bad"))
    lines = run("show", attempt.uri).out.splitlines()
    assert lines[0] == "ValueError rank 3 w-1 no retry: bad"
    assert lines[-1] == f"documents: {attempt.uri}/firstfault/errors"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_hostile_documents_do_not_reach_the_terminal(
    attempt: Attempt, run: Callable[..., Ran], options: tuple[str, ...]
) -> None:
    """No escape sequence of a document, or of a file's name, is printed."""
    hostile = "\x1b[31mred\x1b[0m\r"
    attempt.write(make_error(3, node=hostile, message=hostile, exception=hostile, code=hostile))
    attempt.put("error-\x1b[2J.pb", b"")
    ran = run("show", attempt.uri, *options)
    assert ran.code == EXIT.ROOT_CAUSE
    assert "red" in ran.out
    assert not {"\x1b", "\r"} & set(ran.out + ran.err)


def test_the_options_reach_the_reader(attempt: Attempt, run: Callable[..., Ran]) -> None:
    """Strategy and number of nodes are those of the command line."""
    attempt.write(make_error(0, kind=Kind.RECOVERABLE), make_error(1, at_ms=5))
    ran = run("show", attempt.uri, "--strategy", "strictest", "--expected-nodes", "7", "--json")
    verdict = json.loads(ran.out)["verdict"]
    assert (verdict["strategy"], verdict["ranks"], verdict["coverage"]["expected"]) == ("strictest", [1], 7)


# --- the group ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("show", "--help")])
def test_help(run: Callable[..., Ran], arguments: tuple[str, ...]) -> None:
    """Help is printed and is no error."""
    ran = run(*arguments)
    assert ran.code == EXIT.OK
    assert ran.out.startswith("Usage: firstfault")


def test_the_help_documents_the_exit_codes(run: Callable[..., Ran]) -> None:
    """The command's help lists the codes that it exits with."""
    text = run("show", "--help").out
    for code in (EXIT.OK, EXIT.ROOT_CAUSE, EXIT.ROOT_CAUSE_RETRYABLE, EXIT.NOTHING_FOUND, EXIT.USAGE):
        assert f"{code.value} " in text


class _Point:
    """An entry point of another distribution."""

    name = "run"

    def __init__(self, load: Any) -> None:
        self.load = load


@click.command()
@click.option("--count", type=int)
def _theirs(count: int) -> int:
    """Theirs."""
    click.echo(f"ran with {count}")
    return 7


def _offered(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_group: [_Point(load)])


def test_another_distribution_adds_a_command(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of an entry point is listed and run, and its return value is the exit code."""
    _offered(monkeypatch, lambda: _theirs)
    assert run("run", "--count", "3") == Ran(7, "ran with 3\n", "")
    assert "  run       Theirs.\n" in run("--help").out


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'torch'", name="torch"), ImportError("torch")])
def test_a_command_whose_package_is_missing(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, error: ImportError
) -> None:
    """A command that cannot be loaded says what to install, whatever its arguments, and does not harm the help."""

    def load() -> None:
        raise error

    _offered(monkeypatch, load)
    ran = run("run", "task.py", "--any", "thing")
    assert ran.code == EXIT.TOOL_FAILED
    assert ran.err == (
        "firstfault: `firstfault run` needs torch, which is not installed; pip install 'firstfault[elastic]'\n"
    )
    assert "not available" in run("--help").out


def test_another_distribution_cannot_replace_a_command(
    attempt: Attempt, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`show` is ours, whoever offers a command of that name."""
    _offered(monkeypatch, lambda: _theirs)
    monkeypatch.setattr(_Point, "name", "show")
    assert run("show", attempt.uri).code == EXIT.NOTHING_FOUND


# --- as a process ---------------------------------------------------------------------------------------------------


def test_as_a_process(attempt: Attempt) -> None:
    """Started as a program, it prints the answer, exits with its code, and complains about nothing."""
    attempt.write(make_error(3, node="w-1", message="caf\u00e9", kind=Kind.RECOVERABLE))
    program = [sys.executable, "-W", "error", "-c", "from firstfault.cli import main; main()", "show", attempt.uri]
    ran = subprocess.run(program, capture_output=True, timeout=60, check=False)
    assert ran.returncode == EXIT.ROOT_CAUSE_RETRYABLE
    assert ran.stdout.startswith(b"ValueError rank 3 w-1 retry: caf")
    assert ran.stderr == b""
    assert b"\x1b" not in ran.stdout
