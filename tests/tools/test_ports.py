"""Free ports for the processes of tests."""

import os
import subprocess
import sys
from pathlib import Path

_TAKE = """
import itertools, sys
from tests import ports
ports._next = itertools.cycle(range(int(sys.argv[1]), ports._PORTS.stop))
print(ports.get_free_port(), flush=True)
sys.stdin.read()
"""


def test_two_sessions_get_different_ports(tmp_path: Path) -> None:
    """Two sessions that search from the same port on get different ones,
    whatever their folders for temporary files.
    """
    root = Path(__file__).parents[2]
    begin = str(20_000 + os.getpid() % 10_000)
    sessions = []
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            variables = {**os.environ, "TMPDIR": str(tmp_path / name)}
            sessions.append(
                subprocess.Popen(
                    [sys.executable, "-c", _TAKE, begin],
                    cwd=root,
                    env=variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        taken = [session.stdout.readline().strip() for session in sessions if session.stdout]
    finally:
        for session in sessions:
            session.communicate()
    assert all(port.isdecimal() for port in taken)
    assert len(set(taken)) == 2
