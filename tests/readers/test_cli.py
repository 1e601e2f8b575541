"""The command line and ``firstfault show``: exit codes, JSON, files, help and errors."""

import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import click
import pytest

from firstfault.cli import EXIT, main
from firstfault.cli._main import COMMANDS_GROUP, group
from firstfault.errors import AccessDeniedError
from firstfault.layout import RUN_MARK
from firstfault.model import Kind, Phase
from firstfault.run_folder import begin_run
from firstfault.store.fsspec_store import FsspecStore
from firstfault.testing import make_error, make_presence
from tests.readers.commands import Ran
from tests.readers.conftest import Attempt

Run: TypeAlias = Callable[..., Ran]


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize(
    ("errors", "outputs", "code"),
    [
        ([], True, EXIT.OK),
        ([], False, EXIT.NOTHING_FOUND),
        ([make_error()], False, EXIT.ROOT_CAUSE),
        ([make_error()], True, EXIT.ROOT_CAUSE),
        ([make_error(kind=Kind.RECOVERABLE)], False, EXIT.ROOT_CAUSE_RETRYABLE),
        (
            [make_error(round=0), make_error(round=1, kind=Kind.RECOVERABLE)],
            False,
            EXIT.ROOT_CAUSE_RETRYABLE,
        ),
    ],
    ids=["outputs", "nothing", "root cause", "errors beat outputs", "retryable", "last round"],
)
def test_the_exit_code_says_what_was_found(  # noqa: PLR0917 - two fixtures and a table
    attempt: Attempt,
    run: Run,
    options: tuple[str, ...],
    errors: list,
    outputs: bool,
    code: int,
) -> None:
    """The exit code says whether there is a root cause and whether to retry,
    with and without --json.
    """
    attempt.write(*errors)
    if outputs:
        attempt.put("outputs.pb", b"")
    assert run("show", attempt.uri, *options).code == code


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"<html>404</html>", "not readable: error.pb is not an error document"),
        (b"", "not readable: error.pb is empty"),
        (None, "a node reported a failure, but its error documents are missing"),
    ],
    ids=["another program's", "empty", "missing"],
)
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_no_readable_document_has_its_own_exit_code(
    attempt: Attempt,
    run: Run,
    options: tuple[str, ...],
    data: bytes | None,
    said: str,
) -> None:
    """It has an exit code of its own, and one line says what is there and what to do."""
    if data is None:
        attempt.join(make_presence())
    else:
        attempt.put("error.pb", data)
    ran = run("show", attempt.uri, *options)
    assert ran.code == EXIT.UNREADABLE
    (line,) = (line for line in ran.err.splitlines() if "no root cause in" in line)
    assert said in line
    assert line.endswith("read the nodes' logs")
    assert "ErrorFileBadFormat" in ran.out or not options or data is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ("show",),
            "Missing argument 'URI': pass a log file or the attempt's output prefix, or use --last",
        ),
        (
            ("show", "--last"),
            "no runs below .firstfault/torchrun or .firstfault/runs; pass a log file",
        ),
        (("show", "--last", "uri"), "pass a URI or --last, not both"),
        (("show", ""), "URI is empty; pass a log file or the attempt's output prefix"),
        (("watch", " "), "URI is empty; pass a log file or the attempt's output prefix"),
        (("show", "out", "--expected-nodes", "0"), "0 is not in the range"),
        (("show", "out", "--expected-nodes", "many"), "not a valid integer"),
        (("show", "out", "--colour"), "No such option"),
        (("show", "out", "--jsn"), "Did you mean"),
        (("shwo", "out"), "unknown command 'shwo'; did you mean 'show'?"),
        (("Watch", "out"), "unknown command 'Watch'; did you mean 'watch'?"),
        (("help", "shwo"), "unknown command 'shwo'; did you mean 'show'?"),
        (
            ("frobnicate",),
            (
                "unknown command 'frobnicate'; commands are classify, doctor, help, k8s, ls, prune,"
                " requeue"
            ),
        ),
        (
            (),
            (
                "missing command; commands are classify, doctor, help, k8s, ls, prune, requeue,"
                " run, show"
            ),
        ),
        (("--debug",), "missing command"),
        (
            ("show", "out", "--json", "--markdown"),
            "--json and --markdown write to stdout; choose one",
        ),
        (
            ("show", "out", "--markdown", "--html", "-"),
            "--markdown and --html - write to stdout; choose one",
        ),
        (
            ("show", "out", "--strategy", "earlyest"),
            "unknown strategy 'earlyest'; available: evidence, earliest",
        ),
        (("show", "nosuchthing://bucket/out"), "unknown storage scheme 'nosuchthing'"),
    ],
)
def test_a_usage_error_exits_with_2_and_one_line_on_stderr(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    reason: str,
) -> None:
    """Invalid arguments have exit code 2, the reason in one line on stderr,
    and nothing on stdout.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ran = run(*arguments)
    assert ran.code == EXIT.USAGE
    (line,) = ran.err.splitlines()
    assert line.startswith("firstfault: ")
    assert reason in line
    assert ran.out == ""


@pytest.mark.parametrize(
    "path", ["", "/firstfault", "/firstfault/errors", "/error.pb", "/elsewhere"]
)
def test_nothing_found_exits_with_3_and_names_the_folder(
    attempt: Attempt, run: Run, path: str
) -> None:
    """Without documents and outputs the exit code is 3, and one line names the folder."""
    if path == "/firstfault/errors":
        (attempt.folder / "firstfault" / "errors").mkdir(parents=True)
        attempt.put("outputs.pb")
        assert run("show", attempt.uri).code == EXIT.OK
    ran = run("show", attempt.uri + path)
    assert ran.code == EXIT.NOTHING_FOUND
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    assert line.startswith("firstfault: ")
    assert attempt.uri in line


@pytest.mark.parametrize("last", ["failed", "succeeded", "behind a gap"])
def test_the_last_failed_attempt_of_a_folder_is_shown(
    attempt: Attempt, run: Run, last: str
) -> None:
    """The last attempt that failed is shown, also if a later one succeeded,
    and behind one whose pods never started.
    """
    attempt.at(0).put("outputs.pb")
    assert run("show", attempt.uri).code == EXIT.OK
    _attempts(attempt)
    where = attempt.at(3 if last == "behind a gap" else 1)
    attempt.at(1).folder.rename(where.folder)
    if last == "succeeded":
        attempt.at(2).put("outputs.pb")
    ran = run("show", attempt.uri, "--json")
    assert ran.code == EXIT.ROOT_CAUSE
    found = json.loads(ran.out)
    assert (found["root"]["rank"], found["uri"]) == (1, where.uri)


def test_last_finds_the_newest_run_of_this_folder(
    attempt: Attempt,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--last finds the newest run of this folder, of torchrun or of `firstfault run`;
    so does the folder of runs.
    """
    monkeypatch.chdir(tmp_path)
    for seconds, name in (
        (1_000, "runs/older"),
        (2_000, "torchrun/newer"),
        (1_500, "torchrun/other"),
    ):
        made = attempt.at(tmp_path / ".firstfault" / name)
        os.close(begin_run(made.folder))
        _attempts(made)
        os.utime(made.folder / RUN_MARK, (seconds, seconds))
    assert json.loads(run("show", "--last", "--json").out)["uri"] == ".firstfault/torchrun/newer/1"
    assert (
        json.loads(run("show", "--json", ".firstfault/torchrun").out)["uri"]
        == ".firstfault/torchrun/newer/1"
    )
    assert (
        json.loads(run("show", "--json", ".firstfault").out)["uri"]
        == ".firstfault/torchrun/newer/1"
    )
    assert (tmp_path / ".firstfault" / ".gitignore").read_text() == "*\n"
    page = run("show", "--last", "--html", "report.html")
    assert page.out == "report of .firstfault/torchrun/newer/1: report.html\n"


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (
            AccessDeniedError("cannot list:\n\x1b[31mrefused\x1b[0m"),
            (EXIT.TOOL_FAILED, "cannot list: refused"),
        ),
        (
            ZeroDivisionError("a bug"),
            (
                EXIT.TOOL_FAILED,
                "unexpected ZeroDivisionError: a bug (run with --debug for a traceback)",
            ),
        ),
        (KeyboardInterrupt(), (EXIT.INTERRUPTED, "interrupted")),
    ],
    ids=["a refused request", "a bug", "Ctrl-C"],
)
def test_each_error_has_its_exit_code_and_one_line(
    attempt: Attempt,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    ended: tuple[int, str],
) -> None:
    """Each has its exit code and one plain line, even if there are outputs;
    --debug raises what is unexpected.
    """

    async def fail(self: FsspecStore, folder: str = "") -> list:
        raise error

    monkeypatch.setattr(FsspecStore, "list", fail)
    attempt.put("outputs.pb")
    for options in ((), ("--json",)):
        ran = run("show", attempt.uri, *options)
        assert (ran.code, ran.out, ran.err.strip()) == (ended[0], "", f"firstfault: {ended[1]}")
    if isinstance(error, ZeroDivisionError):
        for arguments in (["show", attempt.uri, "--debug"], ["--debug", "show", attempt.uri]):
            with pytest.raises(ZeroDivisionError):
                main(arguments)


def test_json_is_one_object_of_the_schema(attempt: Attempt, run: Run) -> None:
    """With --json stdout is one object of the schema, and stderr is empty;
    the reader gets the other options.
    """
    attempt.write(make_error(0, kind=Kind.RECOVERABLE, message="bad"), make_error(1, at_ms=5))
    ran = run("show", attempt.uri, "--strategy", "earliest", "--expected-nodes", "7", "--json")
    assert ran.err == ""
    (line,) = ran.out.splitlines()
    document = json.loads(line)
    assert list(document)[:4] == ["schema", "verdict", "decision", "outcome"]
    assert document["outcome"] == "failed"
    assert (document["root"]["rank"], document["root"]["message"], document["uri"]) == (
        0,
        "bad",
        attempt.uri,
    )
    assert document["schema"] == "firstfault.verdict/v1"
    verdict = document["verdict"]
    assert (verdict["strategy"], verdict["ranks"], verdict["coverage"]["expected"]) == (
        "earliest",
        [0],
        7,
    )


def test_without_an_error_json_has_null_verdict_and_decision(
    attempt: Attempt, run: Run, tmp_path: Path
) -> None:
    """Without an error JSON has null for verdict and decision,
    and the page says what is known instead.
    """
    nothing = {"schema": "firstfault.verdict/v1", "verdict": None, "decision": None}
    found = json.loads(run("show", attempt.uri, "--json").out)
    assert found == {**nothing, "outcome": "not found", "reason": found["reason"]}
    page = tmp_path / "report.html"
    assert run("show", attempt.uri, "--html", str(page)).code == EXIT.NOTHING_FOUND
    assert '<h1 id="ff-what">No failure found</h1>' in page.read_text(encoding="utf-8")
    attempt.put("outputs.pb", b"")
    succeeded = {**nothing, "outcome": "succeeded", "reason": "the attempt has outputs"}
    assert json.loads(run("show", attempt.uri, "--json").out) == succeeded
    said = "no error: the attempt has outputs\n"
    assert run("show", attempt.uri, "--html", str(page)) == Ran(
        EXIT.OK, f"report: {page}\n{said}", ""
    )
    text = page.read_text(encoding="utf-8")
    assert text.lower().startswith("<!doctype html>")
    assert '<h1 id="ff-what">No error</h1>\n<p>The attempt has outputs</p>' in text
    ran = run("show", attempt.uri, "--html", "-")
    assert (ran.code, ran.err) == (EXIT.OK, said)
    assert ran.out.rstrip("\n") == text


def test_a_path_that_does_not_exist_is_named_as_such(run: Run, tmp_path: Path) -> None:
    """A misspelt path is named as one that doesn't exist,
    without words about documents or outputs.
    """
    ran = run("show", str(tmp_path / "nope.log"))
    assert ran == Ran(
        EXIT.NOTHING_FOUND, "", f"firstfault: {tmp_path / 'nope.log'}: no such file or folder\n"
    )


def test_a_script_succeeds_once_all_nodes_say_so(attempt: Attempt, run: Run) -> None:
    """A script under torchrun writes none: it has succeeded once all of its nodes say so."""
    attempt.join(
        *(
            make_presence(Phase.JOINED, node=f"w-{node}", group_rank=node, nodes=2)
            for node in range(2)
        )
    )
    for node in range(2):
        assert run("show", attempt.uri).code == EXIT.NOTHING_FOUND
        attempt.join(make_presence(Phase.SUCCEEDED, node=f"w-{node}", group_rank=node, nodes=2))
    assert run("show", attempt.uri) == Ran(EXIT.OK, "no error: all nodes report success\n", "")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            (),
            (
                "ValueError rank 3 w-1 no retry: bad\n",
                "\nCause    ValueError: bad\n         your code, category ",
            ),
        ),
        (
            ("-v",),
            (
                "ValueError rank 3 w-1 no retry: bad\n",
                "\n  {uri}/firstfault/errors\n",
                "\n  [1] {name}\n",
            ),
        ),
        (("--markdown",), ("## ValueError: bad\n", "- **Where:** rank 3 on w-1")),
        (("--html", "-"), ("<!doctype html>", "</html>")),
    ],
)
def test_each_form_is_stdout(
    attempt: Attempt,
    run: Run,
    options: tuple[str, ...],
    parts: tuple[str, ...],
) -> None:
    """Each form is stdout and nothing else; with -v it has the names of the documents,
    each in one row.
    """
    (name,) = attempt.write(make_error(3, node="w-1", message="bad"))
    ran = run("show", attempt.uri, *options)
    assert (ran.code, ran.err) == (EXIT.ROOT_CAUSE, "")
    assert ran.out.startswith(parts[0])
    assert [part for part in parts if part.format(uri=attempt.uri, name=name) not in ran.out] == []
    assert ("\nDocuments\n" in ran.out) is (options == ("-v",))


def test_html_is_written_as_a_file(attempt: Attempt, run: Run, tmp_path: Path) -> None:
    """With --html FILE the page is in the file, its path is printed, and no other file is left."""
    attempt.write(make_error(3, node="w-1", message="caf\u00e9 <b>"))
    file = tmp_path / "pages" / "report.html"
    file.parent.mkdir()
    file.write_text("of yesterday")
    ran = run("show", attempt.uri, "--html", str(file))
    assert ran == Ran(EXIT.ROOT_CAUSE, f"report: {file}\n", "")
    page = file.read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert "caf\u00e9 &lt;b&gt;" in page
    for option in ("--json", "--markdown"):
        file.unlink()
        alone = run("show", attempt.uri, option)
        ran = run("show", attempt.uri, option, "--html", str(file))
        assert ran == Ran(EXIT.ROOT_CAUSE, alone.out, f"report: {file}\n")
        assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("nowhere/report.html", "No such file or directory"),
        ("file/report.html", "Not a directory"),
        (".", "Is a directory"),
        ("", "Is a directory"),
        ("x" * 300, "File name too long"),
        ("/proc/report.html", "No such file or directory"),
    ],
)
def test_an_unwritable_file_is_a_usage_error_and_leaves_no_file(  # noqa: PLR0917 - fixtures and a table
    attempt: Attempt,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    file: str,
    reason: str,
) -> None:
    """A file that cannot be written is a usage error of one line with the system's reason,
    and leaves no file.
    """
    attempt.write(make_error(3, node="w-1"))
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    ran = run("show", attempt.uri, "--html", file)
    assert (ran.code, ran.out) == (EXIT.USAGE, "")
    (line,) = ran.err.splitlines()
    assert line == f"firstfault: cannot write {file!r}: {reason}; pass another file"
    assert sorted(tmp_path.iterdir()) == before


def test_links_and_pipes_receive_the_page_and_stay(
    attempt: Attempt, run: Run, tmp_path: Path
) -> None:
    """A link and a pipe stay what they are and receive the page."""
    attempt.write(make_error(3, node="w-1"))
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    assert run("show", attempt.uri, "--html", str(tmp_path / "link.html")).code == EXIT.ROOT_CAUSE
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").exists()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()), daemon=True)
    reader.start()
    assert run("show", attempt.uri, "--html", str(pipe)).code == EXIT.ROOT_CAUSE
    reader.join(30)
    assert "<html" in received[0]
    assert pipe.is_fifo()


def _attempts(attempt: Attempt) -> None:
    for number, rank in enumerate((3, 1)):
        attempt.at(number).write(make_error(rank, node=f"w-{rank}", attempt=number, message="bad"))


def test_json_and_plain_pipes_do_not_read_other_attempts(
    attempt: Attempt, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-v, --html and --markdown show the other attempts;
    --json and a plain pipe do not read them.
    """
    _attempts(attempt)
    listed: list[str] = []
    listing = FsspecStore.list

    def spy(self: FsspecStore, folder: str = "") -> Any:
        listed.append(self.uri)
        return listing(self, folder)

    monkeypatch.setattr(FsspecStore, "list", spy)
    for options in ((), ("--json",)):
        run("show", attempt.at(1).uri, *options)
    assert set(listed) == {attempt.at(1).uri}
    for options in (("-v",), ("--markdown",), ("--html", "-")):
        assert "on rank 1 after 3" in run("show", attempt.at(1).uri, *options).out


# --- the group ------------------------------------------------------------------------------------


def _examples(text: str) -> list[list[str]]:
    """Return the arguments of each command line below "Examples:",
    without pipes and redirections.
    """
    below = text.partition("\n  Examples:\n")[2].partition("\n\n")[0]
    lines = [line[line.index("firstfault ") :] for line in below.splitlines()]
    return [
        list(itertools.takewhile(lambda word: word not in {"|", ">", "<"}, shlex.split(line)[1:]))
        for line in lines
    ]


@pytest.mark.parametrize(
    "command", ["", "ls", "show", "watch", "classify", pytest.param("run", marks=pytest.mark.flyte)]
)
def test_help_has_examples(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """The help of the group and of each command has examples that the parser accepts;
    show's has its exit codes.
    """
    monkeypatch.chdir(Path(__file__).parents[2])
    text = run(*([command, "--help"] if command else ["-h"])).out
    assert text.startswith("Usage: firstfault")
    assert "\\b" not in text, "click's mark of lines to keep"
    for code in EXIT if command == "show" else ():
        assert f"{code.value} " in text or code in {EXIT.TIMEOUT, EXIT.INTERRUPTED}
    examples = _examples(text)
    assert len(examples) >= 2
    for name, *arguments in examples:
        assert name == command or not command
        found = group.get_command(click.Context(group), name)
        files = [
            Path(word) for word in arguments if word.endswith(".py") and not Path(word).exists()
        ]
        # "train.py" stands for the reader's own
        words = ["examples/ddp.py" if Path(word) in files else word for word in arguments]
        # the same for the log after --against
        words = [
            "README.md" if before == "--against" else word
            for before, word in zip(["", *words], words, strict=False)
        ]
        found.make_context(name, words)


class _Point:
    """An entry point of another distribution."""

    name, value = "run", "flytekitplugins.firstfault.local.command:run"

    def __init__(self, load: Any) -> None:
        self.load = load


@click.command()
@click.option("--count", type=int)
def foreign_command(count: int) -> int:
    """Do nothing."""
    click.echo(f"ran with {count}")
    return 7


def install_command(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    def found(group: str) -> list[_Point]:
        return [_Point(load)] if group == COMMANDS_GROUP else []

    monkeypatch.setattr("importlib.metadata.entry_points", found)


def test_another_distribution_adds_a_command(
    attempt: Attempt, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command of an entry point is listed and run, and its value is the exit code;
    it cannot replace `show`.
    """
    install_command(monkeypatch, lambda: foreign_command)
    assert run("run", "--count", "3") == Ran(7, "ran with 3\n", "")
    assert "  run       Do nothing.\n" in run("--help").out
    monkeypatch.setattr(_Point, "name", "show")
    assert run("show", attempt.uri).code == EXIT.NOTHING_FOUND


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'torch'", name="torch"), ImportError("torch")]
)
def test_a_command_without_its_package_says_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: ImportError
) -> None:
    """A command that cannot be loaded says what to install, and the help still works."""
    install_command(monkeypatch, Mock(side_effect=error))
    ran = run("run", "task.py", "--any", "thing")
    assert ran.code == EXIT.TOOL_FAILED
    assert (
        ran.err
        == "firstfault: `firstfault run` needs torch, which is not installed; install the extra"
        " elastic: in a clone pip install '.[elastic]', else 'firstfault[elastic]' from your"
        " index; for torch's CPU build, first run pip install torch --index-url"
        " https://download.pytorch.org/whl/cpu\n"
    )
    listed = [line for line in run("--help").out.splitlines() if "needs" in line]
    assert listed == ["  run       (needs the extra elastic)"]


# --- as a process ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--html", "-")])
def test_a_closed_stdout_keeps_the_exit_code(attempt: Attempt, options: tuple[str, ...]) -> None:
    """With a closed stdout the exit code is the same, and stderr is empty."""
    attempt.write(make_error(3, node="w-1"))
    program = [
        sys.executable,
        "-c",
        "from firstfault.cli import main; main()",
        "show",
        attempt.uri,
        *options,
    ]
    closing = ["sh", "-c", f"{shlex.join(program)} >&-"]
    ran = subprocess.run(closing, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (EXIT.ROOT_CAUSE, b"")


@pytest.mark.slow
def test_each_form_works_without_home_path_and_locale(attempt: Attempt) -> None:
    """Each form works without HOME, PATH and a locale,
    and escapes what stdout's encoding does not have.
    """
    attempt.write(make_error(3, node="w-1", message="\U0001f525"))
    escaped = b"\\U0001f525"
    forms = {(): escaped, ("-v",): escaped, ("--json",): b"\\ud83d", ("--markdown",): escaped}
    forms["--html", "-"] = "\U0001f525".encode()
    code = (
        "import sys\nfrom firstfault.cli import main\n"
        f"for form in {[*forms]}:\n"
        "    try: main(['show', sys.argv[1], *form])\n"
        "    except SystemExit as end: print(end.code, end='\\0', flush=True)\n"
    )
    program = [sys.executable, "-W", "error", "-c", code, attempt.uri]
    environment = {"PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(program, capture_output=True, timeout=60, check=True, env=environment)
    assert ran.stderr == b""
    *shown, _ = ran.stdout.split(b"\0")
    for text, expected in zip(shown, forms.values(), strict=True):
        assert expected in text
        assert text.endswith(b"%d" % EXIT.ROOT_CAUSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "has_color"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1", "TERM": "xterm-256color"}, True),
        ({"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "0"}, True),
    ],
    ids=["pipe", "FORCE_COLOR", "NO_COLOR", "without a width"],
)
def test_only_terminals_and_force_color_get_color(
    attempt: Attempt, environment: dict[str, str], has_color: bool
) -> None:
    """A pipe gets the rows without color; a terminal, or FORCE_COLOR, gets them with color."""
    attempt.write(make_error(3, node="w-1", message="bad"))
    program = [sys.executable, "-c", "from firstfault.cli import main; main()", "show", attempt.uri]
    out = subprocess.run(
        program,
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
        env=environment,
    ).stdout
    assert b"\nCause    ValueError: bad\n         your code, " in out.replace(
        b"\x1b[1m", b""
    ).replace(b"\x1b[0m", b"")
    assert (b"\x1b[1;31mroot cause" in out) is has_color
    assert (b"\x1b" in out) is bool(environment)


@pytest.mark.slow
def test_other_forms_load_no_drawing(attempt: Attempt) -> None:
    """--json and --markdown import neither rich nor jinja2."""
    attempt.write(make_error(3, node="w-1"))
    code = (
        "import sys\nfrom firstfault.cli import main\nfor form in (['--markdown'], ['--json']):\n  "
        "  try: main([*sys.argv[1:], *form])\n    except SystemExit: pass\nprint([name for name in"
        " ('rich', 'jinja2', 'flytekit', 'torch') if name in sys.modules], file=sys.stderr)"
    )
    program = [sys.executable, "-c", code, "show", attempt.uri]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr == "[]\n"
