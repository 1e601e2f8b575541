"""An agent that gets a signal at a certain moment of its start."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstfault_torch.agent.local_workers import LocalWorkers
from firstfault_torch.agent.node_round import NodeRound
from firstfault_torch.rounds.failure_broadcast import FailureBroadcast
from tests.nodes import await_file

MOMENTS: dict[str, tuple[type, str]] = {
    "the round begins": (NodeRound, "begin"),
    "the workers run": (LocalWorkers, "started"),
    "it connects": (FailureBroadcast, "__init__"),
}


@dataclass(frozen=True)
class InterruptedStart:
    """Where this is unpickled, the second node's agent gets SIGTERM at a moment,
    after rank 0 has told that it runs.
    """

    moment: str

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return _arm, (self.moment,)


def _arm(moment: str) -> InterruptedStart:
    rounds: list[NodeRound] = []
    begin = NodeRound.begin

    def noted(self: NodeRound, *arguments: Any) -> None:
        rounds.append(self)
        begin(self, *arguments)

    NodeRound.begin = noted  # type: ignore[method-assign]
    place, name = MOMENTS[moment]
    called = getattr(place, name)

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        if name == "begin":
            rounds.append(arguments[0])
        if rounds[-1]._group.group_rank == 1:
            await_file(str(Path.cwd()), "rank-0.json")
            os.kill(os.getpid(), signal.SIGTERM)
        return called(*arguments, **keywords)

    setattr(place, name, interrupted)
    return InterruptedStart(moment)
