"""The exception that a process raised, left out of what it printed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from firstfault.exceptions.stderr import without_traceback
from firstfault.model import ExceptionInfo

_PROGRAMS = {
    "plain": ("raise ValueError('bad\\nsample')", ExceptionInfo("ValueError", "bad\nsample")),
    "with a note": (
        "error = KeyError('x')\nif hasattr(error, 'add_note'): error.add_note('look here')\nraise error",
        ExceptionInfo("KeyError", "'x'", notes=("look here",)),
    ),
    "caused by another": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('bad') from error",
        ExceptionInfo("ValueError", "bad", causes=(ExceptionInfo("ZeroDivisionError", "division by zero"),)),
    ),
    "while handling another": (
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('bad')",
        ExceptionInfo("ValueError", "bad", causes=(ExceptionInfo("ZeroDivisionError", "division by zero"),)),
    ),
    "of a module": (
        "import subprocess\nraise subprocess.SubprocessError('gone')",
        ExceptionInfo("subprocess.SubprocessError", "gone"),
    ),
}
if sys.version_info >= (3, 11):
    _PROGRAMS["group"] = (
        "raise ExceptionGroup('two', [ValueError('one'), KeyError('other')])",
        ExceptionInfo(
            "ExceptionGroup",
            "two (2 sub-exceptions)",
            members=(ExceptionInfo("ValueError", "one"), ExceptionInfo("KeyError", "'other'")),
        ),
    )


def _printed(program: str) -> str:
    around = "import sys, atexit\nprint('epoch 3', file=sys.stderr)\natexit.register(sys.stderr.write, 'bye\\n')\n"
    done = subprocess.run([sys.executable, "-c", around + program], capture_output=True, text=True, check=False)
    assert "Traceback (most recent call last):" in done.stderr
    return done.stderr


@pytest.mark.parametrize("name", _PROGRAMS)
def test_the_traceback_of_the_exception_is_left_out(name: str) -> None:
    """Of what a process prints, the lines before and after its traceback stay, also where torch names the rank."""
    program, exception = _PROGRAMS[name]
    printed = _printed(program)
    for prefix in ("", "[rank3]: "):
        lines = "\n".join(prefix + line for line in printed.splitlines())
        assert without_traceback(lines, exception).splitlines() == [f"{prefix}epoch 3", f"{prefix}bye"]


def test_a_traceback_whose_beginning_is_lost() -> None:
    """A text that begins in the middle of the traceback keeps only what follows it."""
    printed = _printed("def step():\n    raise ValueError('bad')\nstep()")
    cut = printed[printed.index('  File "<string>"') :]
    assert without_traceback(cut, ExceptionInfo("ValueError", "bad")) == "bye"


@pytest.mark.parametrize("logged", ["FileNotFoundError: shard 3", "ValueError: shard 3 is corrupt"])
def test_the_traceback_of_another_exception_stays(logged: str) -> None:
    """A traceback that the program logged before stays, also if its exception has the same type."""
    other = f'Traceback (most recent call last):\n  File "a.py", line 3, in read\n{logged}'
    raised = 'Traceback (most recent call last):\n  File "a.py", line 9, in train\nValueError: no shard left'
    log = f"step 10\n{other}\nstep 11\n{raised}\nbye"
    assert without_traceback(log, ExceptionInfo("ValueError", "no shard left")) == f"step 10\n{other}\nstep 11\nbye"


def test_indented_lines_are_no_traceback() -> None:
    """A text that begins with indented lines of the program itself is kept."""
    log = "   step 10 loss 3\n   step 11 loss 2\nValueError: batch skipped\nstep 12"
    assert without_traceback(log, ExceptionInfo("ValueError", "batch skipped")) == log.lstrip("\n")
