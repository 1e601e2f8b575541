"""Exits that end a program like its last statement, and those in the middle of it."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, os, sys, types
from types import SimpleNamespace as Space

sys.modules["torch.distributed.distributed_c10d"] = Space(_world=Space(pg_map={{1: 1}}))
from firstfault_torch.torchrun import script

def report(error, is_kept, is_announced):
    os.write(1, str(error).encode())

script._monitor = lambda: Space(
    node_context=Space(upload_deadline_seconds=20),
    exits=report,
    in_flight=Space(escaped_error=None),
    finishes=lambda: os.write(1, b"finished: "),
)
script.begin()
atexit.register(script.record_exit)
atexit.register(script.record_finish)

click = types.ModuleType("click")
exec('''
import sys

class Exit(Exception):
    pass

def run(function):
    try:
        try:
            function()
            raise Exit
        except OSError:
            raise
    except Exit as error:
        sys.exit(0)
''', click.__dict__)

def main():
    {}

{}
"""
LAST = {
    "a console script": ("return None", "sys.exit(main())", 0),
    "a console script with a guard": ("return 0", "if main:\n    sys.exit(main())", 0),
    "the builtin": ("return False", "exit(main())", 0),
    "a library for command lines": ("return None", "click.run(main)", 0),
    "its result": ("return None", "sys.exit(click.run(main))", 0),
}
NOT_LAST = {
    "another code": ("return 3", "sys.exit(main())", 3),
    "a text": ("return 'no data'", "sys.exit(main())", 1),
    "in a function": ("sys.exit(0)", "sys.exit(main())", 0),
    "more to do": ("return 0", "for step in range(2):\n    sys.exit(main())\nprint(step)", 0),
    "in a handler": (
        "raise ValueError",
        "try:\n    main()\nexcept ValueError:\n    sys.exit(0)",
        0,
    ),
    "the program leaves a library": ("raise click.Exit", "click.run(main)", 0),
    "more after a library": ("return None", "click.run(main)\nprint('saves the model')", 0),
}


@pytest.mark.parametrize(
    ("parts", "is_end"),
    [*((parts, True) for parts in LAST.values()), *((parts, False) for parts in NOT_LAST.values())],
    ids=[*LAST, *NOT_LAST],
)
def test_a_successful_exit_in_the_last_statement_is_the_programs_end(
    tmp_path: Path, parts: tuple[str, str, int], is_end: bool
) -> None:
    """A program whose last statement exits with success has reached its end, and no other one."""
    body, last, code = parts
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(body, last))
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == ("finished: its program reached its end" if is_end else "")


def test_a_program_that_catches_its_exit_sees_no_frame_of_firstfault(tmp_path: Path) -> None:
    """A program that catches its own exit sees it with its code, as without firstfault."""
    program = tmp_path / "program.py"
    last = (
        "import traceback\n"
        "try:\n    sys.exit(5)\n"
        "except SystemExit as error:\n"
        "    print(error.code, traceback.format_exc().count('File '))\n"
    )
    program.write_text(PROGRAM.format("return", last))
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert ended.stdout == "5 1\nfinished: its program reached its end"
