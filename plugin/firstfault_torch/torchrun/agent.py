"""Replaces the agent of torch's launcher by one that runs the node under firstfault; its engine and its folder."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from firstfault_torch.agent.launch import Job, Prepared, results_of
from firstfault_torch.engine import PlainEngine
from firstfault_torch.options import DEFAULT_SIGNALS, Options
from firstfault_torch.run import NodeFailedError, run_node
from firstfault_torch.worker.recording import run_recorded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    from firstfault_torch.verdict.seal import SealedVerdict

_LAUNCHER = "torch.distributed.launcher.api"
_FAILED = 1
"""The exit code of a launcher whose job failed, as torchrun's."""
_ROWS = ("where", "code", "retry")
"""The rows of the report that a failed job ends with."""


def take_over(
    create: Callable[[RendezvousParameters], RendezvousHandler], parameters: RendezvousParameters
) -> RendezvousHandler:
    """Create a handler as torch does, for an agent that torch's launcher is about to make, and let that be ours."""
    launcher = sys.modules.get(_LAUNCHER)
    if hasattr(launcher, "LocalElasticAgent"):
        TorchrunAgent.min_nodes = parameters.min_nodes
        launcher.LocalElasticAgent = TorchrunAgent  # type: ignore[union-attr]
    return create(parameters)


class TorchrunAgent(LocalElasticAgent):
    """torch's agent for its launcher, which makes it, calls `run`, and records its events.

    A job of functions fails as under torch's agent. A job of programs ends this process: torch's own box would follow
    firstfault's lines.
    """

    min_nodes = 1

    def __init__(self, spec: WorkerSpec, **arguments: Any) -> None:
        super().__init__(spec=spec, **arguments)
        self._arguments = {"spec": spec, **arguments}

    def run(self, role: str = "default") -> RunResult:
        """Run the workers of this node to their end."""
        del role
        spec: WorkerSpec = self._arguments["spec"]
        is_program = isinstance(spec.entrypoint, str)
        engine = (TorchrunEngine if is_program else PlainEngine)(_folder())
        if not is_program:
            spec.args = (engine, spec.entrypoint, *spec.args)
            spec.entrypoint = run_recorded
        signals = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", DEFAULT_SIGNALS)
        prepared = Prepared(self._arguments, results_of, lambda: None)  # torch's launcher closes the rendezvous
        job = Job(self.min_nodes, spec.max_restarts, signals, lambda: prepared)
        try:
            results = run_node(job, engine=engine, options=Options())
        except NodeFailedError as failed:
            if not is_program:
                raise failed.error from failed
            raise SystemExit(_FAILED) from failed
        return RunResult(WorkerState.SUCCEEDED, return_values=results)


def _folder() -> str:
    """Return the folder of this node's documents."""
    given = os.environ.get("FIRSTFAULT_FOLDER", "")
    return given or str(
        Path.cwd() / ".firstfault" / "torchrun" / f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}"
    )


class TorchrunEngine(PlainEngine):
    """`PlainEngine` for a job of programs: a few lines at the end of the output tell what failed."""

    def announce(self, verdict: SealedVerdict) -> None:
        """Print what failed, where, whether to run the job again, and the command that shows the rest."""
        rows = dict(line.split(": ", 1) for line in verdict.seal.message.splitlines() if ": " in line)
        lines = [f"firstfault: {verdict.verdict.headline}"]
        lines += [f"  {name}: {rows[name]}" for name in _ROWS if name in rows]
        lines.append(f"  more: firstfault show {self.identity().output_prefix}")
        sys.stderr.write("\n".join([*lines, ""]))
        sys.stderr.flush()
