"""Composes a training from a seed: shapes that people use, one fault whose truth is known,
and decoys.

The same seed composes the same program. `Plan` is what was drawn, `source_of` the program that
follows from it.
"""

import random
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from lab.generated import shapes
from lab.generated.faults import FAULTS, Fault

NODES, WORKERS = 2, 2
WORLD = NODES * WORKERS
STEPS = 8
TIMEOUT_S = 4
"""Of the collectives: a hang takes so long."""
AGAIN = 10_000
"""Programs of seeds from here on try a step, or the training, again."""
HANDLED = 20_000
"""Programs of seeds from here on handle an exception and continue,
so that a rank is out of step with its peers.
"""
_CLOCKS = (0.0, 0.0, 0.0, 0.4, -3.0, 30.0)
"""Seconds by which a node's clock is off."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What was drawn for one program."""

    seed: int
    loop: str
    wrapper: str
    communication: str
    place: str
    handler: str
    clean_up: str
    fault: str
    """Empty: nothing fails."""
    guilty: tuple[int, ...]
    skew: tuple[float, ...]
    """Seconds that each guilty rank waits before it fails."""
    step: int
    loaders: int
    decoys: tuple[tuple[int, str], ...]
    """(rank, decoy)."""
    clocks: tuple[float, ...]
    """Seconds by which each node's clock is ahead."""
    once: bool = False
    """Whether the fault doesn't come again, when the program tries again."""

    @property
    def what(self) -> Fault | None:
        """The fault; None: nothing fails."""
        return FAULTS.get(self.fault)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the guilty ranks."""
        return tuple(sorted({f"worker-{rank // WORKERS}" for rank in self.guilty}))

    @property
    def fails_at_once(self) -> bool:
        """Whether several ranks fail in the same moment: none is stopped before it fails."""
        return len(self.guilty) > 1 and not any(self.skew)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_of(seed: int) -> Plan:
    return _plan_of_handled(seed) if seed >= HANDLED else _plan_of_failing(seed)


def _plan_of_handled(seed: int) -> Plan:
    """Return a program in which a rank handles an exception once, after a collective."""
    chance = random.Random(seed)
    raising = [
        name
        for name, what in FAULTS.items()
        if what.raises and what.has_code and what.in_loader and what.said
    ]
    return Plan(
        seed=seed,
        loop=sorted(shapes.HANDLED_STEPS)[seed % len(shapes.HANDLED_STEPS)],
        wrapper=chance.choice(["plain", "finally-destroy", "logged", "exits"]),
        communication=chance.choice(sorted(shapes.COMMUNICATIONS)),
        place="after",
        handler="none",
        clean_up=chance.choice(sorted(shapes.CLEAN_UPS)),
        fault=chance.choice(sorted(raising)),
        guilty=(chance.randrange(WORLD),),
        skew=(0.0,),
        step=chance.randrange(1, STEPS - 1),
        loaders=0,
        decoys=tuple((chance.randrange(WORLD), "handled") for _ in range(chance.choice([0, 0, 1]))),
        clocks=tuple(chance.choice(_CLOCKS) for _ in range(NODES)),
        once=True,
    )


def _plan_of_failing(seed: int) -> Plan:
    chance = random.Random(seed)
    fault = "" if chance.random() < 0.08 else chance.choice(sorted(FAULTS))
    what = FAULTS.get(fault)
    is_again = seed >= AGAIN and chance.random()
    loop = chance.choice(
        sorted(shapes.TRIED_STEPS if is_again and is_again < 0.5 else shapes.LOOPS)
    )
    places = ["step"]
    if what is not None and what.raises and what.in_loader:
        places += [*shapes.PLACES_OF.get(loop, []), "hook", "checkpoint"]
    place = chance.choice(places)
    culprits = chance.sample(range(WORLD), WORLD)
    number = 1
    if what is not None and what.together and place != "checkpoint":
        number = chance.choices([1, 2, WORLD], [70, 12, 18])[0]
    if place == "checkpoint":
        culprits = [0]  # rank 0 alone writes
    if loop == "prefetch" and place != "step":
        number = 1  # the thread dies and the rank waits: if all do, no rank waits in a collective
    wrappers = shapes.TRIED_TRAININGS if is_again and is_again >= 0.5 else shapes.WRAPPERS
    wrappers = set(wrappers) - ({"clean-up-fails"} if what is None else set())
    guilty = tuple(sorted(culprits[:number])) if what is not None else ()
    spread = chance.choice([0.0, 0.0, 0.05, 0.3, 2.0])
    return Plan(
        seed=seed,
        loop=loop,
        wrapper=chance.choice(sorted(wrappers)),
        communication=chance.choice(sorted(shapes.COMMUNICATIONS)),
        place=place,
        handler=chance.choice(sorted(shapes.HANDLERS)),
        clean_up=chance.choice(sorted(shapes.CLEAN_UPS)),
        fault=fault,
        guilty=guilty,
        skew=tuple(round(chance.random() * spread, 3) if number > 1 else 0.0 for _ in guilty),
        step=chance.randrange(1, STEPS - 1),
        loaders=chance.choice([0, 1, 2, 4]),
        decoys=tuple(
            (chance.randrange(WORLD), chance.choice(sorted(shapes.DECOYS)))
            for _ in range(chance.choice([0, 0, 1, 2]))
        ),
        clocks=tuple(chance.choice(_CLOCKS) for _ in range(NODES)),
    )


def source_of(plan: Plan, timeout_s: int = TIMEOUT_S) -> str:
    """Return the program's source; its collectives time out after `timeout_s` seconds."""
    names = {
        "GUILTY": dict(zip(plan.guilty, plan.skew, strict=True)),
        "FAULT_STEP": plan.step,
        "STEPS": STEPS,
        "TIMEOUT_S": timeout_s,
        "LOADERS": plan.loaders,
        "PLACE": plan.place,
        "ONCE": plan.once,
    }
    what = f"{plan.fault or 'no fault'} in {plan.place} of ranks {list(plan.guilty)}"
    title = f'"""Seed {plan.seed}: {what}; {plan.loop} loop, {plan.wrapper} around it."""'
    decoys = "".join(
        f"    if RANK == {rank} and step =="
        f" {plan.step - 1}:\n{textwrap.indent(shapes.DECOYS[name], ' ' * 8)}"
        for rank, name in plan.decoys
    )
    body = plan.what.body if plan.what is not None else "pass"
    parts = [
        title,
        shapes.HEAD,
        "\n".join(f"{name} = {value!r}" for name, value in names.items()),
        f"def fault():\n{textwrap.indent(body, '    ')}\n",
        shapes.COMMON,
        f"def distract(step):\n{decoys or '    pass'}\n",
        shapes.HANDLERS[plan.handler],
        shapes.CLEAN_UPS[plan.clean_up],
        shapes.COMMUNICATIONS[plan.communication],
        shapes.TURN,
        {**shapes.LOOPS, **shapes.TRIED_STEPS, **shapes.HANDLED_STEPS}[plan.loop],
        {**shapes.WRAPPERS, **shapes.TRIED_TRAININGS}[plan.wrapper],
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"
