"""An exception that was raised for one of another process is reported as that one, at its place."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstfault.exceptions.exceptions_in_text import (
    REMOTE_RELATION,
    add_remote_cause,
    format_exception,
    list_causes_first,
    unwrap_remote,
)
from firstfault.exceptions.first_cause import find_own_frames
from firstfault.model import DocumentRef, ExceptionInfo, WorkerError
from firstfault.render.flyte_message import flyte_message
from firstfault.report import build_report
from firstfault.retry import decide
from firstfault.strategies import get_strategy, run_strategy
from firstfault.testing import make_error, make_job
from firstfault.wire.documents import decode, encode
from firstfault_torch.failures.capture import capture
from tests.torch_agent.remote_failures import WAYS

pytestmark = [pytest.mark.slow, pytest.mark.forks]
RAY = """\x1b[36mray::train()\x1b[39m (pid=812, ip=10.0.0.7)
  File "/root/train.py", line 41, in train
    loss = step(batch)
           ^^^^^^^^^^^
  File "/root/model.py", line 12, in step
    raise ValueError("3 columns")
ValueError: 3 columns"""
CHECKPOINT = """CheckpointException ranks:dict_keys([0, 1])
Traceback (most recent call last): (RANK 0)
  File "/root/save.py", line 9, in write
    write(blob)
OSError: [Errno 28] No space left on device
Traceback (most recent call last): (RANK 1)
  File "/root/save.py", line 30, in close
    close()
ValueError: closed"""


@pytest.mark.parametrize("name", WAYS)
def test_a_reraised_remote_exception_keeps_its_place(name: str) -> None:
    """Headline and place are those of the original exception; the whole chain is in the traceback,
    with its places.
    """
    way, kind, text, function = WAYS[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each way has its own
        way()
    exception = capture(caught.value)
    job = make_job(make_error(3, node="worker-1", exception=exception, message=exception.message))
    verdict = run_strategy(get_strategy("evidence"), job)
    report = build_report(job, verdict, decide(verdict))
    message = flyte_message(report)
    assert verdict.headline == f"{kind}, rank 3 on worker-1: {text}"
    assert message.startswith(f"{kind} rank 3 worker-1 no retry: {text}")
    assert report.answers.what.startswith(f"{kind}: {text}")
    assert report.answers.code.startswith("remote_failures.py:")
    assert report.answers.code.endswith(function)
    links = list_causes_first(exception)
    shown = format_exception(exception)
    assert shown.count("Traceback (most recent call last):") == sum(
        bool(link.frames) for _, link in links
    )
    assert f"{kind}: {text}" in shown
    assert "The traceback above is in the text of the following exception:" in shown
    assert links[-1][1].type == exception.type
    innermost = find_own_frames(exception)[-1]
    line = innermost.context[innermost.line - innermost.context_line]
    assert line.strip() == innermost.code
    read = decode(
        encode(make_error(3, exception=exception, message=exception.message)), DocumentRef("e1.pb")
    )
    assert isinstance(read, WorkerError)
    assert read.exception is not None
    assert find_own_frames(read.exception)[-1] == innermost


@pytest.mark.parametrize(
    ("text", "kind", "message", "place"),
    [
        (RAY, "ValueError", "3 columns", 12),
        (CHECKPOINT, "OSError", "[Errno 28] No space left on device", 9),
    ],
)
def test_the_first_of_several_remote_tracebacks_counts(
    text: str, kind: str, message: str, place: int
) -> None:
    """Ray's text begins in its own way; of the tracebacks of several ranks the first is taken."""
    original = unwrap_remote(ExceptionInfo("Wrapped", text))
    assert (original.type, original.message) == (kind, message)
    assert original.frames[-1].line == place
    assert original.frames[-1].code
    marked = [frame.code[slice(*frame.marked)] for frame in original.frames if frame.marked[1]]
    assert marked == (["step(batch)"] if text is RAY else [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no batch",
        "Traceback (most recent call last):",
        "Traceback (most recent call last):\nValueError: without a frame",
        'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    f()',
        'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    f()\n... and so on',
        # a program's output: what failed stands below a traceback that it survived
        (
            'failed:\nTraceback (most recent call last):\n  File "a.py", line 3\nImportError:'
            " wandb\nINFO on\nFatal: nan"
        ),
        "3 tries failed:"
        + 3 * '\nTraceback (most recent call last):\n  File "a.py", line 3\nKeyError: c',
    ],
)
def test_a_text_without_a_final_traceback_changes_nothing(text: str) -> None:
    """The exception stays as it is."""
    exception = ExceptionInfo("ValueError", text)
    assert unwrap_remote(exception) is exception
    assert add_remote_cause(exception) is exception


def test_a_causes_traceback_in_the_text_is_not_remote() -> None:
    """An exception with the traceback of its cause in its text is not an
    exception of another process.
    """
    text = (
        'load failed:\nTraceback (most recent call last):\n  File "a.py", line 3, in f\n   '
        " f()\nKeyError: 'k'"
    )
    cause = ExceptionInfo("KeyError", "'k'", relation="context")
    exception = ExceptionInfo("RuntimeError", text, causes=(cause,))
    assert unwrap_remote(exception) is exception
    assert [link.type for _, link in list_causes_first(exception)] == ["KeyError", "RuntimeError"]


def test_a_cut_text_keeps_its_remaining_frames() -> None:
    """A stored text lacks its middle: what is left of the frames counts."""
    frames = "".join(
        f'  File "/root/a.py", line {line}, in f\n    f({line})\n' for line in range(1, 40)
    )
    text = f"Traceback (most recent call last):\n{frames}ValueError: deep"
    cut = text[:300] + "\n... 1000 characters left out ...\n" + text[-200:]
    original = unwrap_remote(ExceptionInfo("RuntimeError", cut))
    assert (original.type, original.message, original.frames[-1].line) == ("ValueError", "deep", 39)


def test_what_came_before_the_original_is_its_cause() -> None:
    """Python's sentences between tracebacks make a chain."""
    text = """Original Traceback (most recent call last):
  File "/root/a.py", line 1, in f
    f()
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/root/a.py", line 2, in g
    g()
ValueError: y"""
    found = add_remote_cause(ExceptionInfo("RuntimeError", f"Caught ValueError.\n{text}"))
    assert found.message == "Caught ValueError."
    assert [(cause.type, cause.message, cause.relation) for cause in found.causes] == [
        ("ValueError", "y", REMOTE_RELATION),
        ("KeyError", "'x'", "context"),
    ]


LINES = st.lists(
    st.sampled_from(
        [
            "Traceback (most recent call last):",
            "Original Traceback (most recent call last): (RANK 3)",
            "ray::f() (pid=3)",
            '  File "a.py", line 7, in f',
            "    code()",
            "    ^^^^",
            "  [Previous line repeated 9 more times]",
            "ValueError: x",
            "torch.OutOfMemoryError",
            "",
            '"""',
            "The above exception was the direct cause of the following exception:",
            "... 12 characters left out ...",
            "text of the program",
        ]
    ),
    max_size=30,
)


@settings(max_examples=40)
@given(
    LINES,
    st.lists(
        st.builds(
            ExceptionInfo, st.sampled_from(["KeyError", "a._RemoteTraceback"]), LINES.map("\n".join)
        ),
        max_size=3,
    ),
)
def test_any_lines_give_an_exception_and_a_traceback(
    lines: list[str], causes: list[ExceptionInfo]
) -> None:
    """Whatever the lines are, there is an exception and a traceback,
    and what was raised here comes last.
    """
    exception = ExceptionInfo("RuntimeError", "\n".join(lines), causes=tuple(causes))
    assert unwrap_remote(exception).type
    assert list_causes_first(exception)[-1][1].type == "RuntimeError"
    assert format_exception(exception)


def _measure_cpu_seconds(line: str, characters: int) -> float:
    exception = ExceptionInfo("RuntimeError", f"{line}\n" * (characters // len(line)))
    seconds = []
    for _ in range(3):
        began = time.thread_time()
        unwrap_remote(exception)
        seconds.append(time.thread_time() - began)
    return min(seconds)


@pytest.mark.parametrize(
    "line",
    [
        "Traceback (most recent call last):",
        " " * 200,
        'ray::f() (pid=1)\n  File "a.py", line 1, in f',
    ],
    ids=["tracebacks", "blanks", "frames of Ray"],
)
def test_cpu_time_is_linear_in_beginnings_without_an_end(line: str) -> None:
    """Ten times the text takes about ten times the CPU time; in quadratic time, a hundred times."""
    # what takes less than 5 ms measures the machine
    short_text = max(_measure_cpu_seconds(line, 200_000), 0.005)
    assert _measure_cpu_seconds(line, 2_000_000) < 40 * short_text
