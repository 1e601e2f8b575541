"""A map of a large job: one cell for each node, coloured by the worst state of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.report.words import State

if TYPE_CHECKING:
    from firstfault.report.cascade import Cascade

_FROM = 17
"""Fewer nodes have no map: their ranks are seen at once."""
_WIDTH = 760
_SIZES = (14, 9, 6)
"""Widths of a cell; a smaller one where the map would have too many rows."""
_ROWS = 24
_ORDER = (
    State.ROOT,
    State.SUSPECT,
    State.UNCLEAR,
    State.UNREPORTED,
    State.VICTIM,
    State.STOPPED,
    State.FINISHED,
)
"""What a person should see first."""
_MARKS = 200
"""Cells with a sign in them."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of a map that have one state."""

    state: State
    path: str
    """As SVG draws it."""
    marks: tuple[tuple[float, float], ...]
    """Where the cells with a sign are."""


@dataclass(frozen=True, slots=True)
class NodeMap:
    """One cell for each node, in the order of group ranks."""

    width: int
    height: int
    cell: int
    columns: int
    cells: tuple[Cells, ...]
    summary: str
    """"1 root cause, 998 victim, 1 sent no report"."""


def node_map(cascade: Cascade) -> NodeMap | None:
    """Return one cell for each node; None for few nodes, whose ranks are seen at once."""
    nodes = cascade.nodes
    if len(nodes) < _FROM:
        return None
    size = next((size for size in _SIZES if len(nodes) * size / _WIDTH <= _ROWS), _SIZES[-1])
    columns = _WIDTH // size
    worst = _worst_states(cascade)
    places: dict[State, list[tuple[int, int]]] = {}
    for index, node in enumerate(nodes):
        state = worst.get(node.name) or node.state or State.UNCLEAR
        places.setdefault(state, []).append((index % columns * size, index // columns * size))
    cells = tuple(_cells(state, places[state], size) for state in State if state in places)
    return NodeMap(
        width=columns * size,
        height=-(-len(nodes) // columns) * size,
        cell=size,
        columns=columns,
        cells=cells,
        summary=", ".join(f"{len(places[item.state])} {item.state.value}" for item in cells),
    )


def _worst_states(cascade: Cascade) -> dict[str, State]:
    """Return for each node what a person should see first: its own state, else the first in order of its ranks'."""
    found: dict[str, State] = {}
    for item in cascade.ranks:
        before = found.get(item.node)
        if before is None or _ORDER.index(item.state) < _ORDER.index(before):
            found[item.node] = item.state
    for event in cascade.events:  # of agents, and of files that name no rank
        if event.failure.rank is None and event.failure.node not in found:
            found[event.failure.node] = event.state
    own = {State.ROOT, State.SUSPECT, State.UNREPORTED}
    return found | {node.name: node.state for node in cascade.nodes if node.state in own}


def _cells(state: State, places: list[tuple[int, int]], size: int) -> Cells:
    side = size - 1
    path = "".join(f"M{x} {y}h{side}v{side}h-{side}z" for x, y in places)
    stands_out = state not in {State.VICTIM, State.STOPPED, State.FINISHED}
    is_readable = size == _SIZES[0] and stands_out
    return Cells(state, path, tuple((x + side / 2, y + side - 3) for x, y in places[:_MARKS] if is_readable))
