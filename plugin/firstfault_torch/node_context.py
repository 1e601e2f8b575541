"""The identity of a node, and its `NodeContext`, which the agent passes to its workers."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from firstfault.recorder.folder import NodeFolder
from firstfault.utils.text import parse_json
from firstfault_start import AGENT_VARIABLE, identify
from firstfault_torch.guard import logger
from firstfault_torch.time_limits import UPLOAD_DEADLINE_SECONDS

NODE_CONTEXT_VARIABLE = "FIRSTFAULT_RECORDING"
"""How a worker gets the `NodeContext` of its node: as JSON."""
LOCAL_RANK_VARIABLE = "FIRSTFAULT_LOCAL_RANK"
"""A worker's local rank, because LOCAL_RANK is 0 everywhere with torch's ``virtual_local_rank``."""
WORKER_VARIABLE = "FIRSTFAULT_WORKER"
"""Set for a worker that is a program; `firstfault_start` takes it away."""


class Moment(NamedTuple):
    """A point in time by two clocks, nanoseconds."""

    wall_ns: int
    monotonic_ns: int

    @classmethod
    def now(cls) -> Moment:
        """Return this moment."""
        return cls(time.time_ns(), time.monotonic_ns())


OTHERS_CONTINUE_FIELD = "others_continue"
"""In a worker's message about its failure: the remaining ranks continue without it,
unless they give up, too.
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """The node's name, attempt and storage locations, as its engine gives them."""

    output_prefix: str
    """URI below which the attempt's documents lie."""
    engine: str = ""
    """The engine's name, as `Place.engine` has it."""
    attempt: int = 0
    """Counted from 0."""
    node: str = ""
    """The pod's or the machine's name."""
    namespace: str = ""
    """The Kubernetes namespace; empty without one."""
    task: str = ""
    """The task's full name; empty if unknown."""
    image: str = ""
    """The container image; empty if unknown."""
    handover_uri: str = ""
    """Where this attempt writes its verdict for the next attempt; empty if it doesn't."""
    previous_handover_uri: str = ""
    """Where the previous attempt wrote its verdict; empty for a first attempt, or if unknown."""
    worker_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the engine wants in its workers."""
    is_folder_shared: bool = True
    """Whether all nodes read and write there. If not, the nodes send each other what they wrote."""
    owns_process: bool = False
    """Whether the agent's process ends with the run: then signals after the run are ignored."""


@dataclass(frozen=True, slots=True)
class NodeContext:
    """Where and how the processes of a node record."""

    strategy: str
    identity: Identity
    upload_deadline_seconds: float = UPLOAD_DEADLINE_SECONDS
    round: int = 0
    incarnation: int = 0
    group_world_size: int = 0
    ip: str = ""
    """The node's address, looked up once: the name service may take seconds,
    too long for a failing worker.
    """
    node_folder: str = ""
    """The folder of the node's recorder and spool; empty if no recorder runs."""

    @property
    def output_prefix(self) -> str:
        """URI below which the attempt's documents lie."""
        return self.identity.output_prefix

    @property
    def files(self) -> NodeFolder | None:
        """The files in the node's folder, or None without a folder."""
        return NodeFolder(Path(self.node_folder)) if self.node_folder else None

    def to_environment(self) -> dict[str, str]:
        """Return the variables that pass this recording to a worker process."""
        variables = self.identity.worker_environment
        told = replace(self, identity=replace(self.identity, worker_environment={}))
        # a user's number may be one of numpy
        agent = {AGENT_VARIABLE: identify(os.getpid())}
        return {
            **variables,
            **agent,
            NODE_CONTEXT_VARIABLE: json.dumps(asdict(told), ensure_ascii=False, default=float),
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> NodeContext | None:
        """Return the recording that the agent passed to this worker, or None if recording is off.

        A worker of an environment with another firstfault can't read its agent's: it logs that, and
        records nothing.
        """
        text = environment.get(NODE_CONTEXT_VARIABLE)
        if not text:
            return None
        try:
            told = parse_json(text)
            return cls(**{**told, "identity": Identity(**told["identity"])})
        except (ValueError, TypeError, KeyError) as error:
            logger.warning(
                "this process records nothing: can't read %s (%s: %s). Install the agent's version"
                " of firstfault",
                NODE_CONTEXT_VARIABLE,
                type(error).__name__,
                error,
            )
            return None


@contextlib.contextmanager
def environment_set(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
