"""The page's drawings, as coordinates: the time line of the cascade,
and the map of a large job's nodes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from firstfault.report.cascade import Cascade, Event
from firstfault.report.formatting import shorten_names
from firstfault.report.states import State
from firstfault.utils.text import duration

_NS_PER_MS = 1_000_000
_MAX_LANES = 32
"""More failures than this are drawn as a histogram."""
_HISTOGRAM_BARS = 48
"""Bars of a histogram."""
_HISTOGRAM_HEIGHT = 150.0
_MIN_BAR_HEIGHT = 2.0
"""Minimum height of a bar, so that a few failures among many stay visible."""
_MAX_LABEL_CHARACTERS = 26
"""Characters of a lane's label."""
_TICKS_MS = (1, 10, 100, 1_000, 10_000, 60_000, 600_000, 3_600_000)
_AXIS_LEFT, _AXIS_RIGHT = 222.0, 622.0
"""The ends of the time axis in the drawing's units, between the names and the times."""
_TOP_MARGIN, _LANE_HEIGHT, _BOTTOM_MARGIN = 24.0, 26.0, 8.0


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of the scale."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One failure."""

    y: float
    """The middle."""
    label: str
    name: str
    """The label in full."""
    state: State
    point: float | None
    """x of its time, or None if it has no time or may be before or after the origin."""
    is_sure: bool
    """False if its clock could not be compared with the clocks of its peers."""
    band: tuple[float, float] | None
    """x and width of the bounds of its time, or None if they are too close to be seen."""
    delay: str
    is_origin: bool
    """Times are counted from it."""
    is_open: bool
    """It began at an unknown time before the origin: its band fades in from the left edge."""


@dataclass(frozen=True, slots=True)
class Bar:
    """The failures of one state in one part of the scale."""

    x: float
    y: float
    """The upper edge."""
    width: float
    height: float
    state: State
    name: str
    """"12 victims, 32 ms to 40 ms"."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A drawing of `width` by `height` units: lanes, or of many failures bars."""

    height: int
    ticks: tuple[Tick, ...]
    origin_x: float
    """x of the origin."""
    untimed: int
    """Number of failures without a recorded time."""
    lanes: tuple[Lane, ...] = ()
    bars: tuple[Bar, ...] = ()
    """A histogram: each failure at its most likely time."""
    max_bar_failures: int = 0
    """Failures in the highest bar."""
    bars_y: float = 0.0
    """y of the bars' feet."""
    width: int = 880
    times_x: float = _AXIS_RIGHT + 10
    """x of the lanes' times."""

    @property
    def states(self) -> tuple[State, ...]:
        """The states that have a bar."""
        return tuple(state for state in State if any(bar.state is state for bar in self.bars))

    @property
    def is_unsure(self) -> bool:
        """Whether a clock could not be compared with the rest."""
        return any(lane.point is not None and not lane.is_sure for lane in self.lanes)


def build_timeline(cascade: Cascade) -> Timeline | None:
    """Return the drawing; None if fewer than two failures have a useful time.

    The scale is logarithmic to both sides of the root cause, linear below a millisecond.
    """
    timed = [event for event in cascade.events if event.at_ns is not None]
    untimed = len(cascade.events) - len(timed)
    if len(timed) < 2:  # noqa: PLR2004 - a line needs two
        return None
    if len(timed) > _MAX_LANES:
        # of a rank that hung only the stop has a time, which isn't the time of the fault
        timed = [event for event in timed if cascade.from_root or event.state is not State.ROOT]
        return _draw_histogram(timed, untimed) if timed else None
    bounds = [_get_bounds(event) for event in timed]
    # the axis has the origin and at least a millisecond: an empty range would divide by zero
    scale = _Scale(
        min(0, *(low for low, _ in bounds)), max(_NS_PER_MS, *(high for _, high in bounds))
    )
    short = shorten_names(node.name for node in cascade.nodes)
    lanes = tuple(_draw_lane(index, event, scale, short) for index, event in enumerate(timed))
    height = int(_TOP_MARGIN + len(lanes) * _LANE_HEIGHT + _BOTTOM_MARGIN)
    return Timeline(height, scale.ticks(), scale.x(0), untimed, lanes)


def _draw_histogram(timed: Sequence[Event], untimed: int) -> Timeline:
    """Return the drawing of many failures: how many of each state at each time,
    on the same scale.
    """
    times = [event.at_ns or 0 for event in timed]
    scale = _Scale(min(*times, 0), max(*times, _NS_PER_MS))
    width = (_AXIS_RIGHT - _AXIS_LEFT) / _HISTOGRAM_BARS
    by_bar: dict[int, dict[State, list[int]]] = defaultdict(lambda: defaultdict(list))
    for event in timed:
        # the latest failure is at the right end of the axis, where one bar too many would begin
        index = min(int((scale.x(event.at_ns or 0) - _AXIS_LEFT) / width), _HISTOGRAM_BARS - 1)
        by_bar[index][event.state].append(event.at_ns or 0)
    max_failures = max(sum(map(len, states.values())) for states in by_bar.values())
    # each state in a bar is at least `_MIN_BAR_HEIGHT` high, so the highest bar may exceed
    # `_HISTOGRAM_HEIGHT` by this much
    base = _TOP_MARGIN + _HISTOGRAM_HEIGHT + len(State) * _MIN_BAR_HEIGHT
    bars = []
    for index, states in sorted(by_bar.items()):
        foot = base
        for state in sorted(states, key=list(State).index):
            at = states[state]
            # next to thousands of victims one root cause would be too low to see
            height = round(max(len(at) / max_failures * _HISTOGRAM_HEIGHT, _MIN_BAR_HEIGHT), 1)
            foot = round(foot - height, 1)
            when = " to ".join(dict.fromkeys([_format_tick(min(at)), _format_tick(max(at))]))
            x = round(_AXIS_LEFT + index * width, 1)
            bars.append(
                Bar(x, foot, round(width - 1, 1), height, state, f"{len(at)} {state.value}, {when}")
            )
    height = int(base + _BOTTOM_MARGIN)
    return Timeline(
        height,
        scale.ticks(),
        scale.x(0),
        untimed,
        bars=tuple(bars),
        max_bar_failures=max_failures,
        bars_y=base,
    )


class _Scale:
    def __init__(self, low_ns: int, high_ns: int) -> None:
        self._low = _to_log_scale(low_ns)
        self._high = _to_log_scale(high_ns)

    def x(self, at_ns: int) -> float:
        share = (_to_log_scale(at_ns) - self._low) / (self._high - self._low)
        return round(_AXIS_LEFT + min(max(share, 0.0), 1.0) * (_AXIS_RIGHT - _AXIS_LEFT), 1)

    def ticks(self) -> tuple[Tick, ...]:
        moments = [0, *(sign * tick * _NS_PER_MS for tick in _TICKS_MS for sign in (1, -1))]
        candidates = [
            Tick(self.x(at), _format_tick(at))
            for at in moments
            if self._low <= _to_log_scale(at) <= self._high
        ]
        kept: list[Tick] = []
        for tick in candidates:  # zero first, then those with labels that don't overlap
            # the width of "-100 ms"
            if all(abs(tick.x - other.x) > 56 for other in kept):  # noqa: PLR2004
                kept.append(tick)
        return tuple(sorted(kept, key=lambda tick: tick.x))


def _to_log_scale(at_ns: int) -> float:
    # 1 + x: linear near the origin and 0 there; the sign mirrors the scale for times before it
    return math.copysign(math.log10(1 + abs(at_ns) / _NS_PER_MS), at_ns)


def _format_tick(at_ns: int) -> str:
    return "0" if at_ns == 0 else f"{'-' if at_ns < 0 else ''}{duration(at_ns).replace('.0 ', ' ')}"


def _get_bounds(event: Event) -> tuple[int, int]:
    at = event.at_ns or 0
    return (
        (min(event.bounds.low, at), max(event.bounds.high, at))
        if event.bounds is not None
        else (at, at)
    )


def _draw_lane(index: int, event: Event, scale: _Scale, short: Mapping[str, str]) -> Lane:
    failure = event.failure
    who = f"rank {failure.rank}" if failure.rank is not None else "agent"
    node = _shorten(short.get(failure.node, failure.node), _MAX_LABEL_CHARACTERS - 1 - len(who))
    # a rank that hung failed before the origin; the time of its end isn't the time of the fault
    is_open = event.state is State.ROOT and not event.from_root
    low, high = _get_bounds(event)
    left = _AXIS_LEFT if is_open else scale.x(low)
    width = round(scale.x(high) - left, 1)
    return Lane(
        y=_TOP_MARGIN + (index + 0.5) * _LANE_HEIGHT,
        label=f"{node} {who}".strip(),
        name=f"{failure.node} {who}".strip(),
        state=event.state,
        # a point inside of bounds on both sides of the origin would claim an order that isn't known
        point=(
            scale.x(event.at_ns or 0) if not is_open and (event.is_ordered or width < 1) else None
        ),
        is_sure=event.bounds is not None,
        band=(left, width) if width >= 1 else None,
        delay="since before this" if is_open else event.short_delay,
        is_open=is_open,
        is_origin=event.is_origin,
    )


def _shorten(name: str, room: int) -> str:
    """Return a name without its middle if it is too long: names differ at their ends."""
    if len(name) <= room:
        return name
    head = max(room - 2, 0) // 2
    return f"{name[:head]}..{name[len(name) - max(room - 2, 0) + head :]}"


# --- the map of nodes -----------------------------------------------------------------------------

_MIN_MAP_NODES = 17
"""Fewer nodes have no map: the table of their ranks fits on the page."""
_MAP_WIDTH = 760
_CELL_WIDTHS = (14, 9, 6)
"""Widths of a cell; a smaller one where the map would have too many rows."""
_MAX_MAP_ROWS = 24
_STATES_WORST_FIRST = (
    *(State.ROOT, State.SUSPECT, State.UNCLEAR, State.UNREPORTED),
    *(State.VICTIM, State.STOPPED, State.FINISHED),
)
"""What a person should see first."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of a map that have one state."""

    state: State
    path: str
    """The path in SVG's syntax."""


@dataclass(frozen=True, slots=True)
class NodeMap:
    """One cell for each node, in the order of group ranks."""

    width: int
    height: int
    cell: int
    columns: int
    cells: tuple[Cells, ...]
    summary: str
    """"1 root cause, 998 victim, 1 no report"."""


def node_map(cascade: Cascade) -> NodeMap | None:
    """Return one cell for each node, with the worst state of its ranks; None for few nodes."""
    nodes = cascade.nodes
    if len(nodes) < _MIN_MAP_NODES:
        return None
    size = next(
        (size for size in _CELL_WIDTHS if len(nodes) * size / _MAP_WIDTH <= _MAX_MAP_ROWS),
        _CELL_WIDTHS[-1],
    )
    # one unit less than the cell: the gap between neighbors
    columns, side = _MAP_WIDTH // size, size - 1
    worst = _worst_states(cascade)
    places: dict[State, list[tuple[int, int]]] = {}
    for index, node in enumerate(nodes):
        state = worst.get(node.name) or node.state or State.UNCLEAR
        places.setdefault(state, []).append((index % columns * size, index // columns * size))
    cells = []
    for state in filter(places.get, State):
        # one SVG path for all nodes of a state instead of an element for each of thousands
        path = "".join(f"M{x} {y}h{side}v{side}h-{side}z" for x, y in places[state])
        cells.append(Cells(state, path))
    summary = ", ".join(f"{len(places[item.state])} {item.state.value}" for item in cells)
    return NodeMap(
        columns * size,
        -(-len(nodes) // columns) * size,
        size,
        columns,
        tuple(cells),
        summary,
    )


def _worst_states(cascade: Cascade) -> dict[str, State]:
    """Return the state to show for each node: its own, else the worst state of its ranks,
    in the order of `_STATES_WORST_FIRST`.
    """
    worst: dict[str, State] = {}
    for item in cascade.ranks:
        before = worst.get(item.node)
        if before is None or _STATES_WORST_FIRST.index(item.state) < _STATES_WORST_FIRST.index(
            before
        ):
            worst[item.node] = item.state
    for event in cascade.events:  # of agents, and of files that name no rank
        if event.failure.rank is None and event.failure.node not in worst:
            worst[event.failure.node] = event.state
    # a node's success must not hide the state of a rank
    own = {State.ROOT, State.SUSPECT, State.UNREPORTED}
    return worst | {node.name: node.state for node in cascade.nodes if node.state in own}
