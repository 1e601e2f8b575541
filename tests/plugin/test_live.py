"""The live view of ``firstfault run`` on a terminal, and what remains of it afterwards."""

import fcntl
import io
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from typing_extensions import Self

from firstfault.cli import EXIT
from firstfault.layout import error_key_for, roster_key_for
from firstfault.model import NodePresence, Phase, SentSignal, WorkerError
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.testing import make_error, make_presence
from firstfault.wire.documents import encode, encode_presence
from flytekitplugins.firstfault.local import stall_lines
from flytekitplugins.firstfault.local.live import AttemptView, shown_rows
from flytekitplugins.firstfault.local.pods import Pod
from flytekitplugins.firstfault.local.runner import Running
from flytekitplugins.firstfault.local.stall_lines import StallLines
from tests.plugin.running import Running as Started
from tests.plugin.running import short_folder
from tests.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
_DEADLINE_S = 150
_STOPPED = {
    "exception": None,
    "signal": "SIGTERM",
    "sent_signals": (SentSignal("SIGTERM", "rank 3 failed"),),
}


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Callable[..., list[Pod]]]:
    """Return a function that starts processes as pods w-0, w-1, ...: each waits,
    or has exited with the given code.
    """
    started: list[Pod] = []

    def start(*codes: int | None) -> list[Pod]:
        for number, code in enumerate(codes):
            program = "input()" if code is None else f"raise SystemExit({code})"
            process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
            started.append(Pod(f"w-{number}", process, tmp_path / f"w-{number}.log"))
        for pod, code in zip(started, codes, strict=True):
            if code is not None:
                pod.process.wait()
        return started

    yield start
    for pod in started:
        pod.process.kill()
        pod.process.communicate()


def _joined() -> tuple[NodePresence, ...]:
    return tuple(
        make_presence(
            Phase.JOINED,
            node=f"w-{number}",
            group_rank=number,
            nodes=2,
            ranks=(2 * number, 2 * number + 1),
        )
        for number in range(2)
    )


def _reader(folder: Path) -> MultiErrorFileOutputReader:
    return MultiErrorFileOutputReader(str(folder))


def _write(folder: Path, *items: WorkerError | NodePresence) -> None:
    for item in items:
        if hasattr(item, "phase"):
            path = folder / "firstfault" / "roster" / roster_key_for(item)
            data = encode_presence(item)
        else:
            path = folder / "firstfault" / "errors" / error_key_for(item)
            data = encode(item)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name("new").write_bytes(data)
        path.with_name("new").rename(path)


# --- rows -----------------------------------------------------------------------------------------


def test_nodes_with_a_problem_come_first_and_others_are_counted() -> None:
    """If there are too many nodes, those with a problem are shown first and the others counted."""
    rows = [(number not in {40, 50}, Text(f"w-{number}")) for number in range(64)]
    shown = ["w-40", "w-50", *(f"w-{number}" for number in range(14))]
    assert [str(row) for row in shown_rows(rows)] == [
        *shown,
        "  and 48 more nodes, none with a problem",
    ]
    assert [str(row) for row in shown_rows(rows[:16])] == [f"w-{number}" for number in range(16)]
    assert [str(row) for row in shown_rows(rows, 1)] == [
        "w-40",
        "  and 63 more nodes, 1 with a problem",
    ]


# --- the view -------------------------------------------------------------------------------------


@dataclass
class _Screen:
    out: io.StringIO
    console: Console

    def await_text(self, text: str) -> None:
        wait_until(lambda: text in self.out.getvalue(), text)


@pytest.fixture
def screen() -> _Screen:
    out = io.StringIO()
    return _Screen(
        out, Console(file=out, force_terminal=True, width=100, height=40, color_system=None)
    )


def _threads() -> set[str]:
    names = {"firstfault-live", "firstfault-follow"}
    return names & {thread.name for thread in threading.enumerate()}


def test_the_view_shows_nodes_and_ranks_and_leaves_nothing_behind(
    pods: Callable[..., list[Pod]], tmp_path: Path, screen: _Screen
) -> None:
    """The view shows nodes, ranks and their states as documents are written;
    afterwards no thread or line remains.
    """
    running = Running(1, tuple(pods(None, None)), _reader(tmp_path), time.monotonic())
    with AttemptView(screen.console) as view:
        view.tell("attempt 1: starting 2 [red]pods[/red]")
        with view.watching(running):
            screen.await_text(" s, 2 of 2 pods run")
            screen.await_text(f"w-1  pid {running.pods[1].process.pid}  no ranks yet")
            _write(tmp_path, *_joined())
            screen.await_text("running 2-3")
            _write(
                tmp_path,
                make_error(3, node="w-1", group_rank=1),
                make_error(2, node="w-1", group_rank=1, **_STOPPED),
            )
            screen.await_text("stopped 2, root cause 3")
            running.pods[0].process.kill()
            screen.await_text("w-0  exited with -9  no report 0-1")
        view.tell("done")
        assert "firstfault-follow" not in _threads()
    assert not _threads()
    shown = screen.out.getvalue()
    assert "attempt 1: starting 2 [red]pods[/red]" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_view_that_breaks_ends_with_a_line(
    tmp_path: Path, screen: _Screen, caplog: pytest.LogCaptureFixture
) -> None:
    """A view that cannot be drawn ends with one log line;
    the run continues and still prints its steps.
    """
    running = Running(0, ("no pod",), _reader(tmp_path), time.monotonic())  # type: ignore[arg-type]
    with AttemptView(screen.console) as view:
        with view.watching(running):
            view.tell("one")
            view.tell("two")
        view.tell("three")
    assert len(caplog.records) == 1
    assert "failed while showing the run (AttributeError: " in caplog.text
    assert all(step in screen.out.getvalue() for step in ("one", "two", "three"))


def test_pods_are_shown_if_the_documents_cannot_be_read(
    pods: Callable[..., list[Pod]],
    tmp_path: Path,
    screen: _Screen,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the documents cannot be read, the pods are still shown."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    running = Running(0, tuple(pods(None)), _reader(tmp_path / "loop"), time.monotonic())
    with AttemptView(screen.console) as view, view.watching(running):
        screen.await_text("no ranks yet")
        wait_until(lambda: caplog.records)
    assert "cannot list" in caplog.text


def test_a_run_continues_after_its_terminal_closes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the terminal is closed, the run continues without its view."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:  # noqa: ARG002 - of files
            raise OSError(5, "Input/output error")

    caplog.set_level(logging.WARNING)
    with AttemptView(Console(file=Gone(), force_terminal=True)) as view:
        view.tell("one")
        with view.watching(Running(0, (), _reader(tmp_path), time.monotonic())):
            view.tell("two")
    assert "Input/output error" in caplog.text


def test_log_lines_are_printed_above_the_view(
    screen: _Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log line is printed above the view, not over its rows;
    afterwards handlers write as before.
    """
    monkeypatch.setattr(sys, "stderr", screen.out)
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        with AttemptView(screen.console):
            assert handler.stream is not screen.out
            logging.getLogger().warning("look here")
        assert handler.stream is screen.out
    finally:
        logging.getLogger().removeHandler(handler)
    assert "look here" in screen.out.getvalue()


# --- real runs on a terminal ----------------------------------------------------------------------

_OWN_TERMINAL = (
    "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"
)
"""The first terminal that a session leader opens is its controlling terminal,
where Ctrl-C reaches it.
"""
_SLEEPING = """
import time
from flytekit import task
from flytekitplugins.firstfault import Elastic

@task(task_config=Elastic(nnodes=1, nproc_per_node=2, start_method="fork", increase_shared_mem=False))
def train() -> None:
    time.sleep(600)
"""


class _Terminal:
    """A ``firstfault run`` on its own terminal;
    it is terminated if the test does not wait for its end.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        columns: int = 100,
        **environment: str,
    ) -> None:
        self._main, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._before = termios.tcgetattr(terminal)
        self._terminal = terminal
        command = [
            sys.executable,
            "-c",
            _OWN_TERMINAL,
            sys.executable,
            "-m",
            "firstfault",
            "run",
            *arguments,
        ]
        self.process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=folder,
            env={**os.environ, "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        self._shown = bytearray()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._main, 65536)
            except OSError:
                return
            self._shown += data

    @property
    def shown(self) -> str:
        """The text that the terminal got so far."""
        return self._shown.decode()

    def await_text(self, pattern: str) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not re.search(pattern, self.shown):
            assert self.process.poll() is None, self.shown[-3000:]
            assert time.monotonic() < deadline, self.shown[-3000:]
            time.sleep(0.05)

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def end(self) -> int:
        """Wait for the end; return the exit code. The terminal must be as it was before."""
        code = self.process.wait(_DEADLINE_S)
        after = termios.tcgetattr(self._terminal)
        os.close(self._terminal)
        self._reading.join(_DEADLINE_S)
        os.close(self._main)
        assert after == self._before
        assert self.shown.rindex("\x1b[?25h") > self.shown.rindex("\x1b[?25l"), (
            "the cursor is shown again"
        )
        return code


@pytest.mark.jobs
def test_a_failing_run_on_a_terminal_shows_ranks_then_the_report(tmp_path: Path) -> None:
    """A failing run shows nodes and ranks while they run,
    then the report and the path of the HTML file.
    """
    arguments = (str(EXAMPLES / "user_error.py"), "train", "--nodes", "1", "--store", "runs")
    with _Terminal(tmp_path, *arguments) as terminal:
        terminal.await_text(r"-n0-0  pid \d+  running 0-1")
        assert terminal.end() == EXIT.ROOT_CAUSE
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.shown).replace("\r\n", "\n")
    below = shown[shown.rindex("attempt 0: failed after ") :]
    run = re.search(r"^report: (runs/\w+)/report.html$", below, re.MULTILINE)
    assert "attempt 1" not in shown, "it is not retried"
    assert re.search(
        r"^Cause    RuntimeError: mat1 and mat2 shapes cannot be multiplied", below, re.MULTILINE
    )
    assert re.search(rf"^         less {run[1]}/logs/attempt-0/\S+-n0-0\.log$", below, re.MULTILINE)
    assert below.rstrip().endswith(run[0])
    page = (tmp_path / run[1] / "report.html").read_text(encoding="utf-8")
    assert "mat1 and mat2 shapes cannot be multiplied" in page
    assert f"less {run[1]}/logs/attempt-0/" in page


@pytest.mark.jobs
def test_ctrl_c_ends_all_processes_and_restores_the_terminal(tmp_path: Path) -> None:
    """Ctrl-C ends the view and every process of the pod, and restores the terminal."""
    (tmp_path / "sleeping.py").write_text(_SLEEPING)
    arguments = ("sleeping.py", "train", "--store", "runs", "--env", f"MARKS={tmp_path}")
    temporary = short_folder()
    with _Terminal(tmp_path, *arguments, columns=40, TMPDIR=str(temporary)) as terminal:
        terminal.await_text(r"running\s+0-1")
        terminal.type("\x03")
        assert terminal.end() == EXIT.INTERRUPTED
    assert Started(terminal.process, tmp_path, temporary).find_leftovers() == []
    assert "firstfault: interrupted" in terminal.shown
    shown = " ".join(terminal.shown.split())
    assert re.search(r"interrupted; to see what it did: firstfault show runs/\w+/0", shown)
    assert "Traceback" not in terminal.shown


# --- afterwards -----------------------------------------------------------------------------------

_TOO_FEW = """
from flytekit import task
from flytekitplugins.firstfault import Elastic

@task(
    task_config=Elastic(nnodes=1, nproc_per_node=1, start_method="fork", increase_shared_mem=False)
)
def train() -> tuple[int, int]:
    return (1,)
"""


@pytest.mark.jobs
def test_a_missing_output_causes_a_warning(tmp_path: Path) -> None:
    """Flyte accepts outputs without one that the task declares, and the command warns of it."""
    (tmp_path / "too_few.py").write_text(_TOO_FEW)
    done = subprocess.run(
        [sys.executable, "-m", "firstfault", "run", "too_few.py", "train"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=_DEADLINE_S,
    )
    assert done.returncode == EXIT.OK, done.stderr
    assert done.stdout.endswith('succeeded: {"o0": 1}\n')
    assert "the task returned no value for o1, which it declares" in done.stderr


def test_an_agents_lines_about_a_stall_are_printed_once_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an agent's lines about a stall are printed, each once, and whole."""
    monkeypatch.setattr(stall_lines, "_POLL_SECONDS", 0.0)
    log = tmp_path / "pod.log"
    lines = StallLines(log)
    assert lines.read() == []
    log.write_text("step 1\nfirstfault: rank 3: no stall yet\nfirstfault: no progress for 61 s: ")
    assert lines.read() == []
    with log.open("a") as file:
        file.write("rank 3 has called 3\nfirstfault: rank 3: train.py:5 in load\nstep 2\n")
    assert lines.read() == [
        "no progress for 61 s: rank 3 has called 3",
        "rank 3: train.py:5 in load",
    ]
    with log.open("a") as file:
        file.write("firstfault: progress resumed after 74 s\n")
    assert lines.read() == ["progress resumed after 74 s"]
    assert lines.read() == []


_TWICE = """
import os
from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException
from flytekitplugins.firstfault import Elastic

@task(
    task_config=Elastic(nnodes=1, nproc_per_node=1, start_method="fork", increase_shared_mem=False), retries=1
)
def train(fails: int) -> int:
    if int(os.environ["FLYTE_ATTEMPT_NUMBER"]) < fails:
        raise FlyteRecoverableException(f"of attempt {os.environ['FLYTE_ATTEMPT_NUMBER']}")
    return 7
"""


@pytest.mark.jobs
def test_a_run_in_a_pipe_prints_steps_on_stderr_and_results_on_stdout(tmp_path: Path) -> None:
    """In a pipe the steps are lines on stderr; stdout has a line for each attempt,
    and the result last.
    """
    (tmp_path / "twice.py").write_text(_TWICE)
    command = [
        sys.executable,
        "-m",
        "firstfault",
        "run",
        "twice.py",
        "train",
        "--inputs",
        '{"fails": 1}',
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=_DEADLINE_S,
    )
    assert done.returncode == EXIT.OK, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "attempt 1: starting 1 pod" in done.stderr.splitlines()
    assert "retry 1 of 1 on the user's budget" in done.stderr
    lines = done.stdout.splitlines()
    assert "Cause    FlyteRecoverableException: " in done.stdout
    assert "attempt 0 to 1: attempt 1 succeeded" in done.stdout
    assert re.fullmatch(r"report: \.firstfault/runs/\w+/report\.html", lines[-1])
    assert lines[-2] == 'succeeded: {"o0": 7}'
    page = (tmp_path / lines[-1].removeprefix("report: ")).read_text(encoding="utf-8")
    assert all(f"attempt {number}" in page for number in range(2))
