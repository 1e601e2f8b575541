"""Processes that end without raising through firstfault: what they printed tells why."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firstfault.exceptions.exceptions_in_text import get_short_name
from firstfault.exceptions.fingerprint import compute_fingerprint
from firstfault.exceptions.printed_tracebacks import find_printed_exception, remove_traceback
from firstfault.model import ExceptionInfo, FrameInfo, StackDump, Verdict, WorkerError, Writer
from firstfault.report import build_report
from firstfault.report.first_line import first_line
from firstfault.retry import decide
from firstfault.strategies.rules import evidence
from firstfault.testing import make_error, make_job
from tests.readers.scenes import PEER_CLOSED, died, own_fault, reported_job, stopped, victim

_STEP = """
import asyncio, logging, os, sys, threading, traceback

class TrainingError(Exception):
    pass

def step():
    raise KeyError("labels")

def wrapped():
    try:
        step()
    except Exception as error:
        raise TrainingError("training failed") from error

async def task():
    await asyncio.sleep(0)
    wrapped()

async def tasks():
    async with asyncio.TaskGroup() as group:
        group.create_task(task())
        group.create_task(asyncio.sleep(60))

def grouped():
    try:
        asyncio.run(tasks())
    except Exception as error:
        raise RuntimeError("run 7 failed") from error

"""


def _caught(handler: str, before: str = "") -> str:
    """Return a program that handles the exception so, and exits."""
    lines = handler.strip().replace("\n", "\n    ")
    return f"{before}\ntry:\n    wrapped()\nexcept Exception:\n    {lines}\n    os._exit(1)\n"


_RICH_LOG = """
from rich.console import Console
from rich.logging import RichHandler
logging.basicConfig(handlers=[RichHandler(console=Console(stderr=True, width=100), rich_tracebacks=True)])
"""
_CACHE = """
try:
    {}["cache"]
except Exception:
    logging.warning("cache miss, retrying", exc_info=True)
"""
_CLEAN_UP = """
traceback.print_exc()
try:
    raise OSError(28, "No space left on device")
except Exception:
    logging.warning("ignoring a failed clean-up", exc_info=True)
"""
_LOADER = """
class Loader:
    def __del__(self):
        raise OSError("loader")
loader = Loader()
"""
_THREAD = "threading.Thread(target=watch).start()\n"
_PRINTING = {
    "raised": "wrapped()",
    "print_exc": _caught('traceback.print_exc()\nprint("leaving", file=sys.stderr)'),
    "below a warning": _caught(
        "traceback.print_exc()",
        'import warnings\nwarnings.warn("this API will go away", FutureWarning)',
    ),
    "logging": _caught('logging.exception("the training failed")'),
    "thread": (
        "def watch():\n    "
        + _caught('logging.exception("in the loader\'s thread")').strip().replace("\n", "\n    ")
        + f"\n{_THREAD}"
    ),
    "ended thread": (
        "thread = threading.Thread(target=wrapped); thread.start(); thread.join(); os._exit(1)"
    ),
    "rich": "from rich.traceback import install; install(); wrapped()",
    "rich with colours and locals": _caught(
        "Console(stderr=True, force_terminal=True, width=90).print_exception(show_locals=True)",
        "from rich.console import Console",
    ),
    "rich's log": _caught('logging.exception("the training failed")', _RICH_LOG),
    "after a warning about another": _caught(_CLEAN_UP, _CACHE),
    "before an ignored one": _caught("traceback.print_exc()\ndel loader", _LOADER),
}
if sys.version_info >= (3, 11):
    _PRINTING |= {"group": "asyncio.run(tasks())", "a group that is a cause": "grouped()"}


def _run(program: str, folder: Path) -> WorkerError:
    """Return the failure of a process, as its agent reports it."""
    file = folder / "train.py"
    file.write_text(_STEP + program)
    ended = subprocess.run([sys.executable, file], stderr=subprocess.PIPE, text=True, check=False)
    code = ended.returncode
    signal = "SIGABRT" if code == -6 else ""
    return make_error(
        3,
        node="worker-1",
        exception=None,
        exit_code=code,
        signal=signal,
        writer=Writer.AGENT,
        log_tail=ended.stderr,
    )


def summarize_failure(failure: WorkerError) -> tuple[Verdict, str]:
    verdict = evidence(make_job(failure))
    return verdict, first_line(verdict, decide(verdict))


@pytest.mark.parametrize("way", _PRINTING)
def test_a_printed_exception_is_reported_like_a_raised_one(way: str, tmp_path: Path) -> None:
    """Headline, place, category and fingerprint are those of the first cause
    of the last exception.
    """
    failure = _run(_PRINTING[way], tmp_path)
    verdict, line = summarize_failure(failure)
    report = build_report(make_job(failure), verdict, decide(verdict))
    assert verdict.headline.startswith("KeyError, rank 3 on worker-1: 'labels'; raised as ")
    assert verdict.headline.endswith("; printed before exit code 1")
    assert line.startswith("KeyError rank 3 worker-1 no retry: 'labels'")
    assert (verdict.category, report.answers.code) == ("user_code", "train.py:8 in step")
    assert report.answers.steps[0].text.endswith("train.py:8 in step")
    assert not any("why it exited" in text for text in report.answers.unknown)
    if way in {"print_exc", "logging", "rich"}:
        assert compute_fingerprint(failure) == compute_fingerprint(
            _run(_PRINTING["raised"], tmp_path)
        )


def test_launcher_prefixes_do_not_hide_a_traceback(tmp_path: Path) -> None:
    """What torch and srun put before each line does not hide a traceback."""
    text = _run(_PRINTING["raised"], tmp_path).log_tail
    for prefix in ("[rank3]: ", "[default3]:", "3: "):
        found = find_printed_exception("\n".join(prefix + line for line in text.splitlines()))
        assert get_short_name(found.exception) == "TrainingError"
        assert found.exception.causes[0].type == "KeyError"


_LIGHTNINGS = (
    "'/env/site-packages/pl/tree.py:21: `f` is deprecated', 'Joining: GLOBAL_RANK: 1, MEMBER: 2/4'"
)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("print('fatal: license server', file=sys.stderr); os._exit(7)", "fatal: license server"),
        (
            "print('none', file=sys.stderr)\nimport warnings; warnings.warn('old'); os._exit(7)",
            "none",
        ),
        (f"print('none', {_LIGHTNINGS}, sep='\\n', file=sys.stderr); os._exit(7)", "none"),
        ("os._exit(7)", "exited without an exception"),
    ],
)
def test_the_last_line_that_is_no_warning_is_why_a_process_exited(
    program: str, why: str, tmp_path: Path
) -> None:
    """Without an exception the last line that is not a library's warning
    tells why a process exited.
    """
    assert (
        summarize_failure(_run(program, tmp_path))[0].headline
        == f"exit code 7, rank 3 on worker-1: {why}"
    )


def test_a_line_before_sys_exit_is_the_reason() -> None:
    """A program that prints its reason and calls `sys.exit` is told by that reason;
    its exit is the second fact.
    """
    for message in ("", "0"):
        verdict = evidence(
            make_job(make_error(1, exception=ExceptionInfo("SystemExit", message), category="exit"))
        )
        assert verdict.headline == "SystemExit, rank 1 on worker-0: it exited without an error"
    handled = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nOSError: cache\n'
    )
    for printed in ("fatal: license server\n", f"{handled}fatal: license server\n"):
        left = make_error(1, exception="SystemExit", message="7", category="exit", log_tail=printed)
        verdict = evidence(make_job(left))
        assert (
            verdict.headline == "SystemExit, rank 1 on worker-0: fatal: license server; exit code 7"
        )
        assert verdict.category == "exit"


@pytest.mark.parametrize(
    ("argument", "exit_code", "headline"),
    [
        ("", None, "fatal: license server"),
        ("", 1, "fatal: license server; exit code 1"),
        ("no checkpoint", None, "no checkpoint; exit code 1"),
        ("3", None, "fatal: license server; exit code 3"),
    ],
)
def test_a_program_killed_while_exiting_has_only_the_code_of_its_call(
    argument: str, exit_code: int | None, headline: str
) -> None:
    """A program that the agent killed while it exited has no exit code but that of its call."""
    left = make_error(
        1,
        exception=ExceptionInfo("SystemExit", argument),
        category="exit",
        exit_code=exit_code,
        log_tail="fatal: license server\n",
    )
    verdict = evidence(make_job(left))
    assert verdict.headline == f"SystemExit, rank 1 on worker-0: {headline}"


_TRACEBACK = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nValueError: bad\n'
)
_STEPS = "".join(f"step {step} loss 0.3\n" for step in range(60))
_HYDRA = "Error executing job with overrides: ['model.ignore_index=255']\n"
_ABORTED = {"signal": "SIGABRT", "exit_code": -6}
_SIGABRT_HEADLINE = "ValueError, rank 1 on worker-0: bad; printed before SIGABRT"

_ENDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a shell's SIGKILL": (_TRACEBACK, {"exit_code": 137}, "exit code 137"),
    "a shell's SIGSEGV": (_TRACEBACK, {"exit_code": 139}, "exit code 139"),
    "many steps later": (_TRACEBACK + _STEPS, {"exit_code": 3}, "exit code 3"),
    "many times later": (
        _TRACEBACK + _STEPS.replace("step", "2026-01-01 10:00:01 s"),
        {"exit_code": 3},
        "exit code 3",
    ),
    "a word in Hydra's options": (_HYDRA + _TRACEBACK, {"exit_code": 1}, "ValueError"),
    "an abort": (_TRACEBACK, _ABORTED, _SIGABRT_HEADLINE),
    "an abort of C++": (
        f"{_TRACEBACK}terminate called without an active exception\n",
        _ABORTED,
        _SIGABRT_HEADLINE,
    ),
    "an abort of Python": (
        f"{_TRACEBACK}Fatal Python error: Aborted\n",
        _ABORTED,
        _SIGABRT_HEADLINE,
    ),
}


@pytest.mark.parametrize(("printed", "end", "told"), _ENDS.values(), ids=_ENDS)
def test_a_printed_exception_long_before_the_end_is_not_the_cause(
    printed: str, end: dict[str, Any], told: str
) -> None:
    """It is not if the process continued for long, or if a signal ended it that prints nothing."""
    left = make_error(1, exception=None, log_tail=printed, writer=Writer.AGENT, **end)
    assert evidence(make_job(left)).headline.startswith(told)


@pytest.mark.parametrize(
    "lines",
    [
        "/a/train.py:8 in step",
        "/a/train.py:8 in|step",
        "/a/train.py:8|in step",
        "/a/tr|ain.py:8 in step",
    ],
)
def test_a_frame_is_found_wherever_rich_broke_its_line(lines: str) -> None:
    """A frame is found wherever rich broke its line: before or after "in", or within the path."""
    rows = "\n".join(f"│ {line:<40} │" for line in lines.split("|"))
    box = (
        f"╭{'─' * 8} Traceback (most recent call last) {'─' * 8}╮\n{rows}\n│ ❱ 8     raise"
        " KeyError(name) │\n"
    )
    printed = find_printed_exception(f"{box}╰{'─' * 50}╯\nKeyError: 'labels'\n")

    assert printed is not None
    assert [(frame.file, frame.line, frame.function) for frame in printed.exception.frames] == [
        ("/a/train.py", 8, "step")
    ]


def test_indentation_marks_in_a_box_are_no_code() -> None:
    """A box has a line for each level of indentation, which is no part of the code."""
    row = "\n│ /a/train.py:8 in step │\n│ ❱   8 │   │   raise KeyError(name)   │\n"
    box = f"╭{'─' * 8} Traceback (most recent call last) {'─' * 8}╮{row}╰{'─' * 50}╯"
    printed = find_printed_exception(f"{box}\nKeyError: 'labels'\n")

    assert printed is not None
    assert [frame.code for frame in printed.exception.frames] == ["raise KeyError(name)"]


_TWO_TRIES = """
def again():
    raise ValueError("trying to initialize the default process group twice!")

try:
    wrapped()
except Exception:
    logging.warning("trying again", exc_info=True)
again()
"""


@pytest.mark.parametrize("cut", [0, 2])
def test_a_failed_retry_is_told_by_the_first_tries_output(cut: int, tmp_path: Path) -> None:
    """A second try that found the first one's process group is told by what the first one printed,
    cut off or not.
    """
    printed = _run(_TWO_TRIES, tmp_path)
    first = printed.log_tail.rpartition("Traceback (most recent call last):")[0]
    twice = "trying to initialize the default process group twice!"
    log = first.splitlines(keepends=True)
    again = make_error(3, node="worker-1", message=twice, log_tail="".join(log[cut:]))
    for failure in (again, printed):
        verdict, _ = summarize_failure(failure)
        report = build_report(make_job(failure), verdict, decide(verdict))
        assert verdict.headline.startswith(
            "KeyError, rank 3 on worker-1: 'labels'; raised as TrainingError: training failed, then"
            " ValueError"
        )
        assert report.answers.code == "train.py:8 in step"
        assert ("printed before" in verdict.headline) is (failure is printed)
    alone = evidence(make_job(replace(again, log_tail="")))
    assert alone.headline.startswith("ValueError, rank 3 on worker-1: trying to initialize")


_STEPS = """
def fail_like_a_collective():
    raise RuntimeError("Connection closed by peer [127.0.0.1]:41189")

namespace = {"fail": fail_like_a_collective}
exec(compile("def wait():\\n    fail()", "/x/torch/distributed/distributed_c10d.py", "exec"), namespace)
WAIT, OWN = namespace["wait"], wrapped

def train(number):
    FAILS[number]()

def steps():
    for number in range(2):
        try:
            train(number)
        except Exception:
            logging.exception("the step failed")
"""


@pytest.mark.parametrize(
    ("fails", "headline"),
    [
        ("OWN, WAIT", "KeyError, rank 3 on worker-1: 'labels'"),
        ("WAIT, OWN", "undetermined: no rank shows its own fault"),
        ("WAIT, WAIT", "undetermined: no rank shows its own fault"),
    ],
)
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_retry_that_fails_in_a_collective_is_told_by_the_first_try(
    fails: str,
    headline: str,
    tmp_path: Path,
    *,
    is_stopped: bool,
) -> None:
    """The second try fails in a collective: its peers are elsewhere. The first one tells why,
    unless it did so, too.
    """
    printed = _run(f"{_STEPS}\nFAILS = [{fails}]\nsteps()", tmp_path).log_tail
    failure = stopped(3, "", log_tail=printed)
    if not is_stopped:
        last = find_printed_exception(
            _run(f"{_STEPS}\nFAILS = [WAIT, WAIT]\nsteps()", tmp_path).log_tail
        )
        failure = replace(
            own_fault(3),
            exception=last.exception,
            message=last.exception.message,
            log_tail=printed,
        )
    verdict = evidence(make_job(failure, *(victim(rank) for rank in range(3))))
    assert verdict.headline.startswith(headline)
    assert (verdict.category, verdict.confidence) in {("user_code", "medium"), ("unknown", "low")}


def test_a_failed_cleanup_after_an_early_exit_is_told_by_the_exit(tmp_path: Path) -> None:
    """The rank fails because of its clean-up; it wanted to end before that."""
    cleaning = (
        "import os\ndef leave():\n    sys.exit(0)\ntry:\n    leave()\nfinally:\n   "
        " os.remove('no-such-lock')"
    )
    printed = find_printed_exception(_run(cleaning, tmp_path).log_tail)
    failure = replace(own_fault(3), exception=printed.exception, message=printed.exception.message)
    assert evidence(make_job(failure)).headline.startswith(
        "SystemExit, rank 3 on worker-1: the program called sys.exit(0); then FileNotFoundError: "
    )


_ABORTS = """
def survive():
    try:
        step()
    except Exception:
        traceback.print_exc()

def end():
    os.abort()

import faulthandler
faulthandler.enable(open(f"{__file__}.stack", "w"))
"""


@pytest.mark.parametrize(
    ("calls", "headline"),
    [
        ("survive()\nend()", "SIGABRT, rank 3 on worker-1: "),
        (
            "try:\n    step()\nexcept Exception:\n    traceback.print_exc()\n    end()",
            "KeyError, rank 3 on worker-1: ",
        ),
    ],
    ids=["survived", "the reason"],
)
def test_an_exception_explains_an_abort_only_in_a_running_function(
    calls: str, headline: str, tmp_path: Path
) -> None:
    """The exception tells why only if the function that printed it had not returned
    when the process aborted.
    """
    printed = _run(_ABORTS + calls, tmp_path).log_tail
    stack = (tmp_path / "train.py.stack").read_text(encoding="utf-8")
    dumps = (StackDump(1, 3, stack),)
    failure = died(3, "SIGABRT", -6, log_tail=printed, stack_dumps=dumps)
    found = evidence(make_job(failure)).headline
    assert found.startswith(headline)
    assert ("'labels'" in found) is headline.startswith("KeyError")


@pytest.mark.parametrize(("later", "is_told"), [("", True), ("logging.error('leaving')\n", False)])
def test_a_traceback_below_a_warning_counts_only_at_the_end(
    later: str, tmp_path: Path, *, is_told: bool
) -> None:
    """The warning may be about something else, if nothing was printed after the traceback."""
    print_it = "try:\n    step()\nexcept Exception:\n    traceback.print_exc()\n"
    printed = _run(
        f"logging.warning('out of memory; trying a smaller batch')\n{print_it}{later}", tmp_path
    ).log_tail
    assert (find_printed_exception(printed) is not None) is is_told


_DIVIDED = (ExceptionInfo("ZeroDivisionError", "division by zero"),)
_NOTED = (
    "error = KeyError('x')\nif hasattr(error, 'add_note'): error.add_note('look here')\nraise error"
)
_PROGRAMS = {
    "plain": ("raise ValueError('bad\\nsample')", ExceptionInfo("ValueError", "bad\nsample")),
    "with a note": (_NOTED, ExceptionInfo("KeyError", "'x'", notes=("look here",))),
    "caused by another": (
        (
            "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('bad') from"
            " error"
        ),
        ExceptionInfo("ValueError", "bad", causes=_DIVIDED),
    ),
    "while handling another": (
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('bad')",
        ExceptionInfo("ValueError", "bad", causes=_DIVIDED),
    ),
    "of a module": (
        "import subprocess\nraise subprocess.SubprocessError('gone')",
        ExceptionInfo("subprocess.SubprocessError", "gone"),
    ),
}
if sys.version_info >= (3, 11):
    _MEMBERS = (ExceptionInfo("ValueError", "one"), ExceptionInfo("KeyError", "'other'"))
    _PROGRAMS["group"] = (
        "raise ExceptionGroup('two', [ValueError('one'), KeyError('other')])",
        ExceptionInfo("ExceptionGroup", "two (2 sub-exceptions)", members=_MEMBERS),
    )


def _printed(program: str) -> str:
    around = (
        "import sys, atexit\nprint('epoch 3', file=sys.stderr)\natexit.register(sys.stderr.write,"
        " 'bye\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", around + program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback (most recent call last):" in done.stderr
    return done.stderr


@pytest.mark.parametrize("name", _PROGRAMS)
def test_the_recorded_traceback_is_cut_from_the_output(name: str) -> None:
    """Of what a process prints, the lines before and after its traceback stay,
    also where torch names the rank.
    """
    program, exception = _PROGRAMS[name]
    printed = _printed(program)
    for prefix in ("", "[rank3]: "):
        lines = "\n".join(prefix + line for line in printed.splitlines())
        assert remove_traceback(lines, exception).splitlines() == [
            f"{prefix}epoch 3",
            f"{prefix}bye",
        ]


def test_a_cut_traceback_is_cut_from_the_output() -> None:
    """A text that begins in the middle of the traceback keeps only what follows it."""
    printed = _printed("def step():\n    raise ValueError('bad')\nstep()")
    cut = printed[printed.index('  File "<string>"') :]
    assert remove_traceback(cut, ExceptionInfo("ValueError", "bad")) == "bye"


@pytest.mark.parametrize("logged", ["FileNotFoundError: shard 3", "ValueError: shard 3 is corrupt"])
def test_another_exceptions_traceback_stays_in_the_output(logged: str) -> None:
    """A traceback that the program logged before stays, also if its exception has the same type."""
    other = f'Traceback (most recent call last):\n  File "a.py", line 3, in read\n{logged}'
    raised = (
        'Traceback (most recent call last):\n  File "a.py", line 9, in train\nValueError: no shard'
        " left"
    )
    log = f"step 10\n{other}\nstep 11\n{raised}\nbye"
    assert (
        remove_traceback(log, ExceptionInfo("ValueError", "no shard left"))
        == f"step 10\n{other}\nstep 11\nbye"
    )


def test_indented_lines_are_no_traceback() -> None:
    """A text that begins with indented lines of the program itself is kept."""
    log = "   step 10 loss 3\n   step 11 loss 2\nValueError: batch skipped\nstep 12"
    assert remove_traceback(log, ExceptionInfo("ValueError", "batch skipped")) == log.lstrip("\n")


TRIES = (
    "Traceback (most recent call last):\n"
    '  File "/app/train.py", line 30, in train\n    turn(step)\n'
    '  File "/app/train.py", line 12, in turn\n    {}\n{}\n'
)
IN_GROUP = (
    '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 9, in all_reduce\n   '
    " work.wait()\n"
)
BAD, PEERS = "ValueError: batch 4 has no labels", f"RuntimeError: {PEER_CLOSED.format(1)}"


def _gave_up(rank: int, text: str, printed: str, **more: Any) -> WorkerError:
    """A worker that raised, outside of any handler,
    in the function that had handled what it printed.
    """
    raised_at = FrameInfo("/app/train.py", 34, "train", 'raise TrainingError("...")')
    return own_fault(
        rank,
        exception=ExceptionInfo("TrainingError", text, frames=(raised_at,)),
        log_tail=printed,
        **more,
    )


@pytest.mark.parametrize(
    ("text", "tries"),
    [
        ("step 4 failed 3 times", 1),
        ("gave up after 3 attempts", 1),
        ("the training is unstable", 2),
    ],
)
def test_ranks_that_gave_up_alike_differ_by_the_errors_of_each_try(text: str, tries: int) -> None:
    """Ranks that raise the same after their tries are told apart by what they
    had printed of each try.
    """
    bad = TRIES.format("check(batch)", BAD) * tries
    lost = TRIES.format("reduce(loss)", IN_GROUP + PEERS) * tries
    verdict = evidence(
        reported_job(_gave_up(0, text, lost), _gave_up(1, text, lost), _gave_up(3, text, bad))
    )
    assert (verdict.ranks, verdict.headline) == (
        (3,),
        f"ValueError, rank 3 on worker-1: batch 4 has no labels; raised as TrainingError: {text}",
    )


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("the training is unstable", TRIES.format("check(batch)", BAD)),
        ("step 4 failed 3 times", TRIES.format("check(batch)", BAD).replace("in train", "in load")),
        ("step 4 failed 3 times", TRIES.format("check(batch)", BAD) + "step done\n" * 40),
    ],
    ids=["one error that it handled", "of another function", "long before"],
)
def test_a_handled_error_does_not_explain_a_later_one(text: str, printed: str) -> None:
    """One handled error does not explain what the same function raises later,
    nor does that of another function.
    """
    assert (
        evidence(reported_job(_gave_up(3, text, printed))).headline
        == f"TrainingError, rank 3 on worker-1: {text}"
    )


def test_ranks_that_gave_up_after_a_peers_error_are_victims() -> None:
    """Ranks that tell only that their tries failed may be victims:
    those that printed a peer's error are.
    """
    text = "step 4 failed 3 times"
    lines = {0: PEERS, 1: PEERS, 3: BAD}
    told = evidence(
        reported_job(*(_gave_up(rank, text, f"try 0: {line}\n") for rank, line in lines.items()))
    )
    untold = evidence(reported_job(*(_gave_up(rank, text, "") for rank in lines)))
    assert (told.ranks, told.confidence) == ((3,), "medium")
    assert (untold.ranks, untold.confidence) == ((0, 1, 3), "low")
