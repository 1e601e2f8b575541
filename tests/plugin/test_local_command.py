"""``firstfault run`` on bad input prints one line that says what to do,
and exits with the documented code.
"""

import contextlib
import datetime as dt
import enum
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flytekit import task
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import LiteralMap

from firstfault.cli import EXIT, main
from flytekitplugins.firstfault import Elastic
from flytekitplugins.firstfault.local import command, pods
from flytekitplugins.firstfault.local.loading import read_inputs

TASKS = """
from flytekit import task
from flytekitplugins.firstfault import Elastic

@task(task_config=Elastic(nnodes=2, increase_shared_mem=False))
def train(epochs: int, rate: float = 0.1, tags: list[str] = ["a"], deep: bool = False) -> float:
    return rate * epochs

@task
def plain(epochs: int) -> int:
    return epochs

number = 3
"""


GOOD = ("train", "--inputs", '{"epochs": 3}')


class Color(enum.Enum):
    """An input of one of two texts."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class CommandResult:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    def line(self) -> str:
        """Return the only line of stderr, without its beginning."""
        assert self.out == ""
        (line,) = self.err.splitlines()
        assert line.startswith("firstfault: ")
        return line.removeprefix("firstfault: ")


@pytest.fixture(autouse=True)
def _imports_restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Undo the effects of importing a user's file on this process,
    and let the test write to its own folder.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., CommandResult]:
    """Return a function that runs ``firstfault run`` in this process,
    on a file with a given text.
    """

    def command(
        *arguments: str, text: str = TASKS, name: str = "tasks_of_this_test.py"
    ) -> CommandResult:
        (tmp_path / name).write_text(text)
        with pytest.raises(SystemExit) as caught:
            main(["run", str(tmp_path / name), *arguments])
        code = caught.value.code
        captured = capsys.readouterr()
        assert isinstance(code, int)
        assert not (tmp_path / ".firstfault").exists(), "nothing was started"
        return CommandResult(int(code), captured.out, captured.err)

    return command


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["train", "--nodes", "0"], "--nodes"),
        (["train", "--timeout", "0"], "--timeout"),
        (["train", "--env", "NAME"], "'NAME' is not NAME=VALUE"),
        (["train", "--env", "=VALUE"], "'=VALUE' is not NAME=VALUE"),
        (["train", "--nonsense"], "No such option '--nonsense'"),
        ([], "Missing argument 'TASK'"),
    ],
)
def test_a_wrong_command_line_is_one_line_with_the_help_command(
    arguments: list[str], reason: str, run_command: Callable[..., CommandResult]
) -> None:
    """A wrong command line gives one line with the reason and the help command."""
    said = run_command(*arguments)
    assert said.code == EXIT.USAGE
    assert reason in said.line()
    assert said.line().endswith(("(see 'firstfault run --help')", "Did you mean '--nodes'?"))


def test_a_missing_file_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A missing file is a wrong command line."""
    for path in (tmp_path / "missing.py", tmp_path):
        with pytest.raises(SystemExit) as caught:
            main(["run", str(path), "train"])
        assert caught.value.code == EXIT.USAGE
        assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def broken(:\n", "SyntaxError"),
        (
            "import a_module_that_is_not_there",
            "ModuleNotFoundError: No module named 'a_module_that_is_not_there'",
        ),
        ("raise ValueError('several\\nlines')", "ValueError: several lines"),
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        (
            TASKS.replace("nnodes=2", "nnodes='3:1'"),
            "UsageError: Elastic.nnodes must be a number like 2",
        ),
        (TASKS.replace("nnodes=2", "strategy='earlyest'"), "unknown strategy 'earlyest'"),
        (
            TASKS.replace("nnodes=2", "nproc_per_nodes=2"),
            "'nproc_per_nodes'; did you mean nproc_per_node? (at tasks_of_this_test.py:5)",
        ),
        (
            "def read():\n    return {}['lr']\nread()",
            "KeyError: 'lr' (at tasks_of_this_test.py:2 in read)",
        ),
    ],
    ids=["syntax", "import", "raise", "exit", "nnodes", "strategy", "misspelled", "function"],
)
def test_an_error_while_importing_the_file_is_one_line(
    text: str, reason: str, run_command: Callable[..., CommandResult]
) -> None:
    """An error during the file's import is shown in one line, also a call of sys.exit()."""
    said = run_command("train", text=text)
    assert said.code == EXIT.USAGE
    assert "tasks_of_this_test.py cannot be imported: " in said.line()
    assert reason in said.line()


@pytest.mark.parametrize(
    ("name", "other"), [("colorsys.py", "colorsys.py"), ("time.py", "a built-in one")]
)
def test_a_file_that_another_module_shadows_is_named(
    name: str, other: str, run_command: Callable[..., CommandResult]
) -> None:
    """If another module has the file's name, so that Python imports that one,
    the message says so.
    """
    importlib.import_module(name.removesuffix(".py"))
    said = run_command("train", name=name)
    assert said.code == EXIT.USAGE
    assert said.line().startswith(f"{name} cannot be imported: another module has its name, ")
    assert said.line().endswith(other)


NOT_OURS = (
    "in tasks_of_this_test.py is not a task with task_config=Elastic(...) or PyTorch(...) of"
    " flytekitplugins."
)
NO_OBJECT = "--inputs must be a JSON object like '{\"epochs\": 3}'"


@pytest.mark.parametrize(
    ("task", "inputs", "line"),
    [
        (
            "trian",
            None,
            "tasks_of_this_test.py has no task 'trian'; its Elastic and PyTorch tasks are: train",
        ),
        ("plain", None, f"plain {NOT_OURS}firstfault; those are: train"),
        ("Elastic", None, f"Elastic {NOT_OURS}firstfault; those are: train"),
        ("train", None, "the task needs inputs that --inputs does not give: epochs"),
        ("train", "{epochs: 3}", f"{NO_OBJECT}; "),
        ("train", "[" * 5000, f"{NO_OBJECT}; "),
        ("train", "[3]", f"{NO_OBJECT}, not list"),
        (
            "train",
            '{"epoch": 3, "lr": 1}',
            "--inputs names epoch, lr; the task takes epochs, rate, tags, deep",
        ),
        ("train", '{"epochs": "3"}', "input epochs must be int, not str ('3')"),
        ("train", '{"epochs": true}', "input epochs must be int, not bool (True)"),
        ("train", '{"epochs": null}', "input epochs must be int, not NoneType (None)"),
        ("train", '{"epochs": 3, "rate": "high"}', "input rate must be float, not str ('high')"),
        ("train", '{"epochs": 3, "deep": 1}', "input deep must be bool, not int (1)"),
        ("train", '{"epochs": 3, "tags": 7}', "input tags cannot be converted to "),
        ("train", f'{{"epochs": 3, "rate": 1{"0" * 400}}}', "input rate is too large for float"),
    ],
)
def test_an_unknown_task_or_unfit_inputs_are_refused_before_a_pod_starts(
    task: str,
    inputs: str | None,
    line: str,
    run_command: Callable[..., CommandResult],
) -> None:
    """Another task, and inputs that do not fit it, are refused before a pod starts;
    the message lists what there is.
    """
    said = run_command(task, *([] if inputs is None else ["--inputs", inputs]))
    assert said.code == EXIT.USAGE
    assert said.line().startswith(line)


@pytest.mark.parametrize(
    ("python_type", "value", "expected"),
    [
        (float, 1, 1.0),
        (list[float], [1, 0.5], [1.0, 0.5]),
        (dict[str, list[int]], {"a": [1]}, {"a": [1]}),
        (float | None, 1, 1.0),
        (float | None, None, None),
        (int | str, "x", "x"),
        (Color, "red", Color.RED),
        (dt.datetime, "2026-01-31T12:00:00Z", dt.datetime(2026, 1, 31, 12, tzinfo=dt.timezone.utc)),
        (dt.date, "2026-01-31", dt.date(2026, 1, 31)),
        (dt.timedelta, "1 minute", dt.timedelta(minutes=1)),
    ],
)
def test_inputs_become_the_tasks_types(python_type: Any, value: Any, expected: Any) -> None:
    """A JSON value becomes the task's type; a text is read as ``pyflyte run`` reads it,
    a time also with its zone.
    """

    def train(value: Any) -> None: ...

    train.__annotations__["value"] = python_type
    own = task(task_config=Elastic(increase_shared_mem=False))(train)
    literals = LiteralMap.from_flyte_idl(read_inputs(own, json.dumps({"value": value})))
    context = FlyteContextManager.current_context()
    assert TypeEngine.literal_map_to_kwargs(context, literals, {"value": python_type}) == {
        "value": expected
    }


def test_an_unknown_strategy_is_refused_before_a_pod_starts(
    run_command: Callable[..., CommandResult],
) -> None:
    """An unknown strategy is refused before a pod starts; the message lists the known ones."""
    said = run_command(*GOOD, "--strategy", "earlyest")
    assert said.code == EXIT.USAGE
    assert said.line().startswith("unknown strategy 'earlyest'; available: evidence, earliest")


@pytest.mark.parametrize(
    ("store", "code", "line"),
    [
        ("gopher://bucket/runs", EXIT.USAGE, "gopher"),
        ("{folder}/file", EXIT.TOOL_FAILED, "cannot write {folder}/file/"),
        (
            "s3://bucket/runs",
            EXIT.TOOL_FAILED,
            "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ),
    ],
)
def test_an_unknown_scheme_is_a_usage_error_and_a_bad_store_a_failed_tool(
    store: str,
    code: int,
    line: str,
    run_command: Callable[..., CommandResult],
    tmp_path: Path,
) -> None:
    """An unknown scheme is a wrong command line; a store that cannot be used has the exit
    code of a failed tool.
    """
    (tmp_path / "file").touch()
    said = run_command(*GOOD, "--store", store.format(folder=tmp_path))
    assert said.code == code
    assert line.format(folder=tmp_path) in said.line()


@pytest.mark.slow
def test_stderr_has_only_the_message_although_libraries_warn(tmp_path: Path) -> None:
    """In a process of its own stderr has nothing but the message,
    also if libraries warn while they are imported.
    """
    (tmp_path / "tasks_of_this_test.py").write_text(TASKS)
    command = [sys.executable, "-m", "firstfault", "run", "tasks_of_this_test.py", "trian"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
        cwd=tmp_path,
    )
    assert done.returncode == EXIT.USAGE
    assert (
        CommandResult(done.returncode, done.stdout, done.stderr)
        .line()
        .startswith("tasks_of_this_test.py has no task")
    )


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL], ids=["nohup", "terminal"])
def test_signals_that_are_ignored_stay_ignored(
    before: signal.Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was started with nohup, or in the background of a script,
    does not end with its terminal.
    """
    outer = signal.signal(signal.SIGHUP, before)
    try:
        with (
            (
                contextlib.nullcontext()
                if before == signal.SIG_IGN
                else pytest.raises(KeyboardInterrupt)
            ),
            command._handle_signals(),
        ):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, outer)


def test_a_signal_while_pods_are_ended_counts_later() -> None:
    """SIGTERM while `firstfault run` ends the pods of an attempt interrupts it afterwards,
    so no retry begins.
    """
    steps = []

    def run() -> None:
        with pods._defer_signals(pods.STOP_SIGNALS):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            steps.append("pods have ended")
        steps.append("the next attempt")

    with command._handle_signals(), pytest.raises(KeyboardInterrupt):
        run()
    assert steps == ["pods have ended"]
