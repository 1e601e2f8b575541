"""A program cannot tell whether it is a worker of firstfault: it sees,
prints and returns what it does without.
"""

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.prefix import Prefix

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "program.py"
RAISES = {
    "hook": ("ValueError", "told by the user's hook"),
    "broken-hook": ("ValueError", "told by the user's hook"),
    "rich": ("ValueError", "drawn by rich"),
    "chdir": ("ValueError", "far from its file"),
    "atexit": ("ValueError", "before the last function"),
    "chained": ("RuntimeError", "training failed"),
}
if sys.version_info >= (3, 11):
    RAISES["group"] = ("ExceptionGroup", "two (2 sub-exceptions)")
EXITS = (
    *(
        "exit-text",
        "exit-7",
        "exit-0",
        "exit-none",
        "exit-list",
        "exit-true",
        "exit-minus",
        "exit-259",
        "exit-large",
    ),
    *("exit-float", "exit-empty", "exit-bytes"),
)
QUIET = ("none", "thread", "handled", "spawn", "forkserver", "leave")
TRACER = """
import atexit, sys

lines = 0
def trace(frame, event, _):
    global lines
    lines += event == "line" and frame.f_code.co_filename.endswith("program.py")
    return trace
sys.settrace(trace)
atexit.register(lambda: print(lines, "lines", flush=True))
"""
"""A `sitecustomize` that measures the lines which a program runs, as a tool for coverage does."""


def _run(
    command: list[str],
    how: str,
    folder: Path,
    prefix: Prefix | None = None,
    typed: bytes = b"",
    **variables: str,
) -> subprocess.CompletedProcess[bytes]:
    environment = {
        **os.environ,
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        **variables,
    }
    if prefix is not None:
        environment |= {
            **prefix.node_context().to_environment(),
            "FIRSTFAULT_WORKER": str(os.getpid()),
        }
    return subprocess.run(
        [*([] if command[0].startswith("/bin/") else [sys.executable]), *command, how],
        cwd=folder,
        env=environment,
        input=typed,
        capture_output=True,
        check=False,
    )


def run_with_and_without(
    command: list[str],
    how: str,
    folder: Path,
    prefix: Prefix,
    typed: bytes = b"",
    **variables: str,
) -> subprocess.CompletedProcess[bytes]:
    ours, plain = (_run(command, how, folder, one, typed, **variables) for one in (prefix, None))
    assert b"{" in plain.stdout, plain.stderr
    assert (ours.returncode, ours.stdout, ours.stderr) == (
        plain.returncode,
        plain.stdout,
        plain.stderr,
    )
    return ours


@pytest.mark.parametrize("how", RAISES)
def test_an_exception_is_recorded_without_frames_of_firstfault(
    how: str, tmp_path: Path, prefix: Prefix
) -> None:
    """All of it is recorded, also if the program has replaced `sys.excepthook`,
    and no frame is firstfault's.
    """
    run_with_and_without([str(PROGRAM)], how, tmp_path, prefix)
    (failure,) = prefix.failures()
    assert (failure.exception.type.rpartition(".")[2], failure.exception.message) == RAISES[how]
    assert [frame.function for frame in failure.exception.frames] == ["<module>", "end"]
    assert failure.place.rank == 1


@pytest.mark.parametrize("how", QUIET)
def test_exits_and_handled_exceptions_are_no_ending_exception(
    how: str, tmp_path: Path, prefix: Prefix
) -> None:
    """An exit, a thread's exception and a handled one are no exception that ends the process:
    its agent reports it.
    """
    run_with_and_without([str(PROGRAM)], how, tmp_path, prefix)
    assert prefix.failures() == []


def test_sys_exit_keeps_code_and_text(tmp_path: Path, prefix: Prefix) -> None:
    """`sys.exit` with any kind of argument ends the program with the same code and text."""
    codes = {
        run_with_and_without([str(PROGRAM)], how, tmp_path, prefix).returncode for how in EXITS
    }
    assert codes == {0, 1, 3, 7, 255}
    assert prefix.failures() == []


@pytest.mark.parametrize("command", [["program.py"], ["-m", "program"]])
def test_sigint_keeps_traceback_and_exit_code(
    command: list[str], tmp_path: Path, prefix: Prefix
) -> None:
    """A program that SIGINT ends prints its traceback, and its exit code is the signal's."""
    (tmp_path / "program.py").write_text(PROGRAM.read_text())
    assert run_with_and_without(command, "interrupt", tmp_path, prefix).returncode == -signal.SIGINT


@pytest.mark.parametrize("command", [[str(PROGRAM)], ["-m", "pdb", "-c", "continue", str(PROGRAM)]])
def test_a_breakpoint_reads_from_stdin(command: list[str], tmp_path: Path, prefix: Prefix) -> None:
    """A breakpoint reads its commands from stdin, also if the program runs under pdb."""
    ended = run_with_and_without(command, "breakpoint", tmp_path, prefix, b"p 6 * 7\ncontinue\n")
    assert b"(Pdb) 42" in ended.stdout
    assert prefix.failures() == []


def test_sitecustomize_and_tracers_see_only_the_program(tmp_path: Path, prefix: Prefix) -> None:
    """A `sitecustomize` on PYTHONPATH still runs, and a tracer counts the program's lines only."""
    (tmp_path / "sitecustomize.py").write_text(TRACER)
    ended = run_with_and_without(
        [str(PROGRAM)], "chained", tmp_path, prefix, PYTHONPATH=str(tmp_path)
    )
    assert b" lines\n" in ended.stdout
    assert len(prefix.failures()) == 1


def test_a_closed_stdin_stays_closed(tmp_path: Path, prefix: Prefix) -> None:
    """A program whose stdin is closed sees None, and its exception is recorded."""
    ended = run_with_and_without(
        ["/bin/sh", "-c", 'exec "$@" <&-', "sh", sys.executable, str(PROGRAM)],
        "chained",
        tmp_path,
        prefix,
    )
    assert b'"stdin": true' in ended.stdout
    assert len(prefix.failures()) == 1


@pytest.mark.parametrize(
    "command",
    [
        ["-u", "-O", "-X", "utf8", "program.py"],
        ["-m", "package.program"],
        ["-m", "package"],
        [
            "-c",
            (
                "import runpy, sys; sys.argv[0] = 'program.py'; runpy.run_path('program.py',"
                " run_name='__main__')"
            ),
        ],
        ["archive.zip"],
    ],
)
def test_every_way_to_start_sees_the_same_main(
    command: list[str], tmp_path: Path, prefix: Prefix
) -> None:
    """A relative path, a module, a package, code and an archive see the same `__main__`,
    and fail alike.
    """
    package = tmp_path / "package"
    package.mkdir()
    for file in (tmp_path / "program.py", package / "program.py", package / "__main__.py"):
        file.write_text(PROGRAM.read_text())
    (package / "__init__.py").touch()
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.write(PROGRAM, "__main__.py")
    run_with_and_without(command, "chained", tmp_path, prefix)
    (failure,) = prefix.failures()
    assert failure.exception.message == "training failed"


def test_without_site_the_program_runs_as_without_firstfault(
    tmp_path: Path, prefix: Prefix
) -> None:
    """Where Python reads no .pth file, the program runs as without firstfault."""
    run_with_and_without(["-S", str(PROGRAM)], "chained", tmp_path, prefix)
    assert prefix.failures() == []


def test_programs_of_a_shell_worker_are_no_workers(tmp_path: Path, prefix: Prefix) -> None:
    """A shell that is the worker starts programs that are not,
    though they inherit its variables.
    """
    code = (
        f"import subprocess, sys; subprocess.run(['sh', '-c', '{sys.executable} {PROGRAM} chained;"
        " true']); print('{')"
    )
    ended = _run(["-S", "-c", code], "none", tmp_path, prefix)
    assert ended.stdout.endswith(b"{\n")
    assert b"training failed" in ended.stderr
    assert prefix.failures() == []


def test_a_child_process_is_not_recorded(tmp_path: Path, prefix: Prefix) -> None:
    """A Python process that the program starts is not recorded, and knows of nothing."""
    code = (
        "import os, subprocess, sys; assert 'FIRSTFAULT_WORKER' not in os.environ; print('{',"
        " flush=True);"
    )
    code += "subprocess.run([sys.executable, '-c', '1 / 0']); os.fork() or 1 / 0"
    run_with_and_without(["-c", code], "none", tmp_path, prefix)
    assert prefix.failures() == []
