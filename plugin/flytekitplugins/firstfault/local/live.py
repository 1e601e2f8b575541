"""The live view of ``firstfault run``: a line for each node, with the states of its ranks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from firstfault.evidence.diagnosis import diagnose
from firstfault.report.cascade import Cascade, RankState, cascade_of
from firstfault.report.words import State, ranks_text
from firstfault.strategies import DEFAULT_STRATEGY, undetermined
from firstfault.text import printable
from firstfault_torch.guard import guarded

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from typing_extensions import Self

    from firstfault.output_reader import MultiErrorFileOutputReader
    from flytekitplugins.firstfault.local.pods import Pod
    from flytekitplugins.firstfault.local.runner import Running

_PAUSE_S = 0.5
_JOIN_S = 1.0
"""Longest wait for a thread to end, seconds: the storage or the terminal may block it."""
_NODES = 16
_RUNNING = (".", "running")
_STYLES = {State.ROOT.mark: "bold red", State.SUSPECT.mark: "yellow", State.UNCLEAR.mark: "yellow"}


@dataclass(frozen=True, slots=True)
class NodeLine:
    """One node in the view."""

    name: str
    process: str
    """"pid 4242", or "exited with 1"."""
    ranks: tuple[tuple[str, str], ...]
    """A mark and a text: (".", "0-3 running"); empty while the node's ranks are not known."""
    is_fine: bool
    """Whether it runs or has finished."""


def _line(pod: Pod, ranks: Sequence[RankState]) -> NodeLine:
    """Return a pod's line, from its process and its ranks' states."""
    code = pod.exit_code
    states: dict[tuple[str, str], list[int]] = {}
    for item in ranks:
        is_running = item.state is State.UNREPORTED and code is None
        states.setdefault(_RUNNING if is_running else (item.state.mark, item.state.value), []).append(item.rank)
    fine = {_RUNNING, (State.FINISHED.mark, State.FINISHED.value)}
    return NodeLine(
        name=pod.name,
        process=f"pid {pod.process.pid}" if code is None else f"exited with {code}",
        ranks=tuple((mark, f"{ranks_text(numbers)} {name}") for (mark, name), numbers in states.items()),
        is_fine=code in {None, 0} and states.keys() <= fine,
    )


def shown_lines(lines: Sequence[NodeLine], limit: int = _NODES) -> tuple[list[NodeLine], str]:
    """Return at most `limit` lines, those with a problem first, and a text that counts the others."""
    if len(lines) <= limit:
        return list(lines), ""
    by_need = sorted(lines, key=lambda line: line.is_fine)
    left = by_need[limit:]
    bad = sum(not line.is_fine for line in left)
    return by_need[:limit], f"and {len(left)} more nodes, {f'{bad} with a problem' if bad else 'none with a problem'}"


class LiveView:
    """Prints a line for each step, and below them shows the nodes of the running attempt.

    An error in the view ends the view with one log line; the run continues.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        # our own thread refreshes it: rich's prints a traceback if the terminal is closed
        self._live = Live(self, console=console, auto_refresh=False, transient=True)
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="firstfault-live", daemon=True)
        self._spinner = Spinner("line", text="starting")
        self._running: Running | None = None
        self._cascade: Cascade | None = None
        self._is_broken = False
        self._handlers: list[logging.StreamHandler[Any]] = []

    def __enter__(self) -> Self:
        stderr = sys.stderr
        with _looking():
            self._live.start(refresh=True)
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is stderr:
                    handler.setStream(sys.stderr)  # rich's stderr prints above the view
                    self._handlers.append(handler)
            self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with _looking():
            self._live.stop()
            if self._ticker.is_alive():
                self._ticker.join(_JOIN_S)
        for handler in self._handlers:
            handler.setStream(sys.stderr)

    def tell(self, line: str) -> None:
        """Print a line about a step, and show it below the nodes."""
        with _looking():
            text = Text(printable(line))
            self._spinner.update(text=text)
            self._console.print(text, soft_wrap=True)

    @contextlib.contextmanager
    def watching(self, running: Running) -> Iterator[None]:
        """Show the nodes of an attempt."""
        self._running, self._cascade = running, None
        loop = asyncio.new_event_loop()
        following = loop.create_task(self._follow(running.reader))

        def follow() -> None:
            with _looking(), contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(following)
            loop.close()

        thread = threading.Thread(target=follow, name="firstfault-follow", daemon=True)
        with _looking():
            thread.start()
        try:
            yield
        finally:
            self._running = None
            with _looking():
                with contextlib.suppress(RuntimeError):  # the loop has already ended
                    loop.call_soon_threadsafe(following.cancel)
                thread.join(_JOIN_S)

    def __rich__(self) -> RenderableType:
        if not self._is_broken:
            self._is_broken = True
            with _looking():
                drawn = self._drawn()
                self._is_broken = False
                return drawn
        return self._spinner

    async def _follow(self, reader: MultiErrorFileOutputReader) -> None:
        async for job in reader.follow(_PAUSE_S):
            conclusion = reader.conclude_from(job)
            if conclusion is not None:
                self._cascade = cascade_of(job, conclusion.verdict, conclusion.diagnosis)
            else:
                self._cascade = cascade_of(job, undetermined(job, DEFAULT_STRATEGY), diagnose(job))

    def _tick(self) -> None:
        with _looking():
            while not self._ended.wait(_PAUSE_S):
                self._live.refresh()

    def _drawn(self) -> RenderableType:
        running = self._running
        if running is None:
            return self._spinner
        ranks = self._cascade.ranks if self._cascade is not None else ()
        lines = [_line(pod, [item for item in ranks if item.node == pod.name]) for pod in running.pods]
        alive = sum(pod.exit_code is None for pod in running.pods)
        seconds = time.monotonic() - running.started
        head = f"attempt {running.number}, {seconds:.0f} s, {alive} of {len(lines)} pods running"
        shown, more = shown_lines(lines)
        rows = [
            Text(head, style="bold"),
            *(_row(line, self._console.width) for line in shown),
            *([Text(f"  {more}")] if more else []),
        ]
        return Group(*rows, self._spinner)


def _row(line: NodeLine, width: int) -> Text:
    """Return a node's row, with its ranks on a second one if the terminal is too narrow."""
    row = Text(f"  {printable(line.name)}  {line.process}", overflow="fold")
    ranks = Text("; ").join(Text(f"{mark} {text}", _STYLES.get(mark, "")) for mark, text in line.ranks)
    ranks = ranks or Text("no ranks yet")
    between = "  " if row.cell_len + 2 + ranks.cell_len <= width else "\n    "
    return row.append(between).append_text(ranks)


def _looking() -> contextlib.AbstractContextManager[None]:
    return guarded("showing the run", through=(KeyboardInterrupt, SystemExit))
