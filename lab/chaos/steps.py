"""The steps of a failure, the cases that strike a process at them,
and what is promised in each case.
"""

import itertools
import signal
from dataclasses import dataclass

PROCESSES = ("worker", "agent", "recorder", "engine")
"""The processes that are struck. The engine is `firstfault run`, which plays Flyte."""
NO_HALF, NOTHING_LEFT, SAME_VERDICT = "no half document", "nothing left over", "same verdict again"
EXIT_CODE, TEXT_KEPT = "exit code", "user's text"
PROMISES = (NO_HALF, NOTHING_LEFT, SAME_VERDICT, EXIT_CODE, TEXT_KEPT)


@dataclass(frozen=True)
class Step:
    """A moment at which a process is struck.

    Without a function: when a file is written, and does not have its final name yet. If the process
    that writes it is killed, half of it stays.
    """

    process: str
    """The process that is at this step: the struck one, or one of the same node."""
    begins: str = ""
    """The function that begins it, ``module:name``."""
    path: str = ""
    """Part of the file's path."""
    struck: tuple[str, ...] = PROCESSES[1:]
    """The processes that run at this step."""


STEPS = {
    "record": Step(
        "worker",
        begins="firstfault_torch.worker.worker_monitor:WorkerMonitor.fails",
        struck=PROCESSES,
    ),
    "spool": Step("worker", path="/spool/", struck=PROCESSES),
    "upload": Step("recorder", path="/firstfault/errors/", struck=PROCESSES),
    "await": Step("agent", begins="firstfault_torch.rounds.election:VerdictElection.settle"),
    "conclude": Step(
        "agent", begins="firstfault_torch.conclusion.conclude_on_node:conclude_on_node"
    ),
    "seal": Step("agent", begins="firstfault_torch.conclusion.sealed_verdict:seal_verdict"),
    "publish": Step("recorder", path="/error.pb"),
    "leave": Step("agent", begins="firstfault.recorder.process:RecorderProcess.end"),
}
"""In their order. When the agents wait for each other, they have stopped all workers."""


@dataclass(frozen=True)
class Case:
    """A signal to a process at a step."""

    signal: str
    process: str
    step: str

    @property
    def name(self) -> str:
        return f"{self.signal}-{self.process}-{self.step}"

    @property
    def fault(self) -> str:
        """What is done to whom, at whichever step."""
        return f"{self.signal} to the {self.process}"

    @property
    def number(self) -> int:
        return signal.Signals[self.signal].value

    @property
    def task(self) -> str:
        """The task: what follows a death of the agent, and the wait for other agents,
        need two nodes.
        """
        return (
            "two_nodes"
            if self.process == "agent" or "worker" not in STEPS[self.step].struck
            else "one_node"
        )

    @property
    def is_recorded(self) -> bool:
        """Whether the worker lives until its exception is in the spool."""
        return (self.signal, self.process) != ("SIGKILL", "worker") or self.step == "upload"


CASES = [
    Case(name, process, step)
    for process, name, step in itertools.product(PROCESSES, ("SIGKILL", "SIGTERM"), STEPS)
    if process in STEPS[step].struck
]
TELLING = [
    Case("SIGKILL", "worker", "spool"),
    Case("SIGKILL", "recorder", "upload"),
    Case("SIGTERM", "engine", "record"),
]
"""The cases that CI runs; `test_faults_of_nodes` kills an agent that concludes."""
