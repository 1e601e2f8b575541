"""Draws jobs that firstfault must leave alone: healthy ones,
and jobs that fail once and then work.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass

SAVE_SECONDS = 3.0
"""How long a rank saves its checkpoint after SIGTERM:
longer than the grace period of a failure's siblings.
"""
HABITS = (
    "atexit",
    "children",
    "clear_environment",
    "close_descriptors",
    "custom_excepthook",
    "daemon",
    "exec",
    "few_descriptors",
    "handle_errors",
    "many_threads",
    "much_output",
    "own_handlers",
    "replace_stderr",
    "thread_at_exit",
    "wrapper",
)
"""What a program may do with its own process: `lab.harmless.program`."""
FAULTS = (
    "RuntimeError",
    "ValueError",
    "OSError",
    "TimeoutError",
    "custom",
    "chained",
    "assert",
    "exit 3",
    "_exit 7",
    "SIGKILL",
    "SIGABRT",
    "subprocess",
)
"""How a rank fails in its first start. None proves that the next start would fail, too."""
PROVEN_FAULT = "TypeError"
"""A fault that ends the restarts in the mode "act", and must not in "observe" and "off"."""
MACHINES = ("read-only /tmp", "full /tmp", "cleaner", "another user", "few processes")
"""What is unusual about the machine: `lab.harmless.machines`. Most need root."""


@dataclass(frozen=True, slots=True)
class SentSignal:
    """A signal to a node, once all ranks are training."""

    node: int
    seconds: float
    """After the moment at which all ranks train."""
    name: str = "SIGTERM"
    to_all_processes: bool = False
    """Whether workers get it as well, as Slurm sends it; otherwise only the agent."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One job, run once under plain torchrun and once under firstfault."""

    seed: int
    kind: str
    """"habit", "fault", "signal", "elastic", "machine", "mode" or "ranks"."""
    door: str = "firstfault"
    """"firstfault" torchrun, "variable" (``FIRSTFAULT=1 torchrun``), or "ranks" (the variable,
    another launcher).
    """
    nodes: int = 1
    workers: int = 2
    max_restarts: int = 0
    communicates: bool = False
    """Whether the ranks call collectives, for which they load torch."""
    habits: tuple[str, ...] = ()
    fault: str = ""
    faulty_rank: int = 0
    decisions: str = ""
    """FIRSTFAULT_DECISIONS; empty: not set."""
    signals: tuple[SentSignal, ...] = ()
    handler: str = "exit"
    """How a rank ends after it has saved: "exit", "_exit" or "die" (by the signal)."""
    joins: bool = False
    """Whether the second node starts when the first one trains."""
    native_wait: bool = False
    """Whether rank 0 waits in a native call that holds Python's lock,
    for longer than a stall warning takes.
    """
    machine: str = ""

    def to_json(self) -> str:
        """Return the plan for the program."""
        return json.dumps({**asdict(self), "save_seconds": SAVE_SECONDS})

    @property
    def title(self) -> str:
        """What is special about the job, in a few words."""
        parts = [*self.habits]
        parts += [f"{self.fault} once, rank {self.faulty_rank}"] if self.fault else []
        parts += [f"decisions {self.decisions}"] if self.decisions else []
        for sent in self.signals:
            receiver = "all of node" if sent.to_all_processes else "agent"
            parts.append(
                f"{sent.name} to {receiver} {sent.node} at {sent.seconds:g} s, then {self.handler}"
            )
        parts += ["a node joins"] if self.joins else []
        parts += ["native wait"] if self.native_wait else []
        parts += [self.machine] if self.machine else []
        parts += ["collectives"] if self.communicates else []
        return f"{self.nodes} x {self.workers} {self.door}: {', '.join(parts)}"


_KINDS = (
    "habit",
    "fault",
    "habit",
    "signal",
    "fault",
    "ranks",
    "elastic",
    "mode",
    "machine",
    "stall",
)


def draw_plan(seed: int) -> Plan:
    """Return the plan of a seed: the same on each machine,
    and each kind once in ten seeds or more.
    """
    draw = random.Random(f"harmless {seed}")
    kind = _KINDS[seed % len(_KINDS)]
    return _DRAWERS[kind](seed, draw)


def _draw_habit(seed: int, draw: random.Random) -> Plan:
    """A healthy job, in two of three cases with a restart:
    then the agents also stop the ranks' siblings.
    """
    is_restarted = draw.random() < 2 / 3
    return Plan(
        seed,
        "habit",
        door=draw.choice(("firstfault", "variable")),
        nodes=draw.choice((1, 1, 2)),
        max_restarts=2 if is_restarted else 0,
        # After a restart, torch's ranks don't always find each other: gloo connects to addresses of
        # ended ranks.
        communicates=not is_restarted,
        habits=tuple(draw.sample(HABITS, draw.choice((1, 1, 2)))),
        fault=draw.choice(FAULTS) if is_restarted else "",
        faulty_rank=draw.randrange(2),
    )


def _draw_fault(seed: int, draw: random.Random) -> Plan:
    nodes = draw.choice((1, 2))
    return Plan(
        seed,
        "fault",
        door=draw.choice(("firstfault", "variable")),
        nodes=nodes,
        max_restarts=draw.choice((1, 2)),
        fault=draw.choice(FAULTS),
        faulty_rank=draw.randrange(nodes * 2),
    )


def _draw_signal(seed: int, draw: random.Random) -> Plan:
    """SIGTERM to all nodes, not at the same moment; each rank saves a checkpoint."""
    nodes = draw.choice((1, 2, 2))
    to_all = draw.random() < 1 / 3
    moments = sorted(round(draw.uniform(0.0, 2.5), 1) for _ in range(nodes))
    return Plan(
        seed,
        "signal",
        nodes=nodes,
        workers=draw.choice((1, 2)),
        signals=tuple(
            SentSignal(node, seconds, to_all_processes=to_all)
            for node, seconds in enumerate(moments)
        ),
        handler=draw.choice(("exit", "_exit", "die")),
    )


def _draw_elastic(seed: int, draw: random.Random) -> Plan:
    """A node joins a job of one node, and the ranks save their checkpoints
    before they start again.
    """
    return Plan(
        seed,
        "elastic",
        nodes=2,
        workers=1,
        max_restarts=1,
        joins=True,
        handler=draw.choice(("exit", "_exit", "die")),
    )


def _draw_mode(seed: int, draw: random.Random) -> Plan:
    return Plan(
        seed,
        "mode",
        nodes=draw.choice((1, 2)),
        max_restarts=2,
        fault=PROVEN_FAULT,
        faulty_rank=draw.randrange(2),
        decisions=draw.choice(("observe", "off")),
    )


def _draw_ranks(seed: int, draw: random.Random) -> Plan:
    """Ranks that another launcher starts, with FIRSTFAULT=1 in their environment."""
    return Plan(
        seed,
        "ranks",
        door="ranks",
        communicates=draw.random() < 2 / 3,
        habits=tuple(draw.sample(HABITS, draw.choice((1, 2)))),
    )


def _draw_stall(seed: int, draw: random.Random) -> Plan:
    habits = draw.sample(("own_handlers", "close_descriptors", "children", "many_threads"), 1)
    return Plan(seed, "stall", communicates=True, habits=tuple(habits), native_wait=True)


def _draw_machine(seed: int, draw: random.Random) -> Plan:
    machine = MACHINES[seed // len(_KINDS) % len(MACHINES)]
    is_restarted = machine != "few processes" and draw.random() < 1 / 2
    return Plan(
        seed,
        "machine",
        max_restarts=1 if is_restarted else 0,
        habits=("many_threads",) if machine == "few processes" else (),
        fault=draw.choice(FAULTS) if is_restarted else "",
        machine=machine,
    )


_DRAWERS = {
    "elastic": _draw_elastic,
    "fault": _draw_fault,
    "habit": _draw_habit,
    "machine": _draw_machine,
    "mode": _draw_mode,
    "ranks": _draw_ranks,
    "signal": _draw_signal,
    "stall": _draw_stall,
}
