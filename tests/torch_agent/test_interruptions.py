"""What an agent tells of SIGINT: Ctrl-C in a terminal, or a signal of another process."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from firstfault.conclude import conclude
from firstfault.model import Place, Scope
from firstfault.model.failure import CTRL_C
from firstfault.testing import make_job
from firstfault_torch.agent.deaths import describe_agent_failure
from firstfault_torch.failures.failure_records import ErrorClass
from firstfault_torch.node_context import Moment


@pytest.mark.parametrize(
    ("engine", "has_terminal", "said", "code", "retry"),
    [
        ("plain", True, "interrupted (Ctrl-C, SIGINT), n1", CTRL_C, False),
        ("plain", False, "interrupted (SIGINT), n1", "USER:Interrupted", False),
        ("flyte", False, "interrupted (SIGINT), n1", "USER:Interrupted", True),
        ("flyte", True, "interrupted (Ctrl-C, SIGINT), n1", CTRL_C, False),
    ],
)
def test_an_interrupted_agent(  # noqa: PLR0917 - parameters
    engine: str,
    has_terminal: bool,
    said: str,
    code: str,
    retry: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGINT is not a preemption. Only in a terminal it was Ctrl-C,
    and only in a pod it may be the platform's.
    """
    monkeypatch.setattr("firstfault_torch.agent.deaths.is_in_foreground", lambda: has_terminal)
    error = SignalException("told", sigval=signal.SIGINT)
    place = Place(node="n1", group_rank=0, engine=engine)
    agent = describe_agent_failure(error, ErrorClass.PREEMPTION, place, Moment.now())
    found = conclude(make_job(agent))
    verdict, decision = found.verdict, found.decision
    assert (verdict.headline, verdict.code, verdict.category) == (said, code, "interrupted")
    assert (verdict.scope, decision.retry) == (Scope.EXTERNAL, retry)
    assert ("task" in decision.reason) is retry


LOOK = """
import os, sys
from firstfault_torch.places import is_in_foreground
if len(sys.argv) > 1:
    os.open(sys.argv[1], os.O_RDWR)  # the leader of a session gets the terminal with it
ahead, child = is_in_foreground(), os.fork()
if not child:
    os.setpgid(0, 0)
    os._exit(is_in_foreground())
print(ahead, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_foreground_of_a_terminal() -> None:
    """Ctrl-C reaches the processes in the foreground of a terminal: not those behind,
    nor those without one.
    """
    _, terminal = ends = os.openpty()
    look = partial(
        subprocess.run,
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    )
    told = [
        look([sys.executable, "-c", LOOK, *words]).stdout for words in ([os.ttyname(terminal)], [])
    ]
    assert told == ["True 0\n", "False 0\n"]
    for end in ends:
        os.close(end)
