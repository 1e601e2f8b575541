"""How a program's end is told: it reached its end, or it called `sys.exit`,
perhaps for an exception.
"""

import pickle
import subprocess
import sys
from pathlib import Path

from firstfault.strategies import get_strategy, run_strategy
from firstfault.testing import make_error, make_job

PROGRAM = """
import atexit, os, pickle, sys, traceback
from types import SimpleNamespace as Space

sys.modules["torch.distributed.distributed_c10d"] = Space(_world=Space(pg_map={1: 1}))
from firstfault_torch.failures.capture import capture
from firstfault_torch.torchrun import script

def tell(error, **_):
    os.write(1, pickle.dumps(capture(error)))
context = Space(upload_deadline_seconds=20)
script._monitor = lambda: Space(node_context=context, exits=tell, in_flight=Space(escaped_error=None))
shown = repr(exit)
script.begin()
assert (pickle.loads(pickle.dumps(sys.exit)), repr(exit)) == (sys.exit, shown)
atexit.register(script.record_exit)

def step():
    try:
        return {}["labels"]
    except KeyError:
        sys.exit(0)

def leaves():
    try:
        int("seventeen")
    except Exception:
        exit()

def swallows():
    try:
        step()
    except SystemExit:
        assert "torchrun" not in traceback.format_exc()

def raises():
    raise SystemExit

def exits():
    sys.exit()

def fails():
    sys.exit(3)

def fails_by_keyword():
    exit(code=-1)

def explains():
    sys.exit("no checkpoint in /ckpt")

def prints_a_number():
    sys.exit("3")

"""
HOWS = {
    "step": ("KeyError, rank 1 on worker-0: 'labels'; then SystemExit: 0", "user_code"),
    "leaves": (
        (
            "ValueError, rank 1 on worker-0: invalid literal for int() with base 10: 'seventeen';"
            " then SystemExit: 0"
        ),
        "user_code",
    ),
    "swallows": ("ended early, rank 1 on worker-0: its program reached its end", "exit"),
    "raises": (
        "SystemExit, rank 1 on worker-0: it exited at program.py:55 in <module>: raises()",
        "exit",
    ),
    "exits": (
        "SystemExit, rank 1 on worker-0: it exited at program.py:40 in exits: sys.exit()",
        "exit",
    ),
    "fails": (
        "SystemExit, rank 1 on worker-0: exit code 3 at program.py:43 in fails: sys.exit(3)",
        "exit",
    ),
    "fails_by_keyword": (
        (
            "SystemExit, rank 1 on worker-0: exit code 255 at program.py:46 in fails_by_keyword:"
            " exit(code=-1)"
        ),
        "exit",
    ),
    "explains": (
        "SystemExit, rank 1 on worker-0: no checkpoint in /ckpt; exit code 1",
        "exit",
    ),
    "prints_a_number": ("SystemExit, rank 1 on worker-0: '3'; exit code 1", "exit"),
}
CODES = {"fails": 3, "fails_by_keyword": 255, "explains": 1, "prints_a_number": 1}


def test_an_exit_is_recorded_with_place_code_and_exception(tmp_path: Path) -> None:
    """An exit is told with its place and code, and as the exception for which the program called
    it.
    """
    program = tmp_path / "program.py"
    for how, told in HOWS.items():
        program.write_text(f"{PROGRAM}\n{how}()\n")
        ended = subprocess.run([sys.executable, program], capture_output=True, check=False)
        assert ended.returncode == CODES.get(how, 0), ended.stderr
        exception = pickle.loads(ended.stdout)  # noqa: S301 - its own
        verdict = run_strategy(
            get_strategy("evidence"),
            make_job(make_error(1, exception=exception, message="", category="exit")),
        )
        assert (verdict.headline, verdict.category) == told, (ended.stderr, how)
