"""The live view of ``firstfault run``: a line for each node, with the states of its ranks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from firstfault.evidence.diagnosis import diagnose
from firstfault.report.cascade import Cascade, RankState, build_cascade
from firstfault.report.formatting import format_ranks
from firstfault.report.states import State
from firstfault.strategies import DEFAULT_STRATEGY, build_undetermined_verdict
from firstfault.utils.text import printable
from firstfault_torch.guard import suppress_internal_errors

if TYPE_CHECKING:
    from typing_extensions import Self

    from firstfault.attempt_reader import AttemptReader
    from flytekitplugins.firstfault.local.pods import Pod
    from flytekitplugins.firstfault.local.runner import Running

_REFRESH_INTERVAL_SECONDS = 0.5
_THREAD_JOIN_TIMEOUT_SECONDS = 1.0
"""Longest wait for a thread to end, seconds: the storage or the terminal may block it."""
_MAX_SHOWN_NODES = 16
_RUNNING = "running"
_STYLES = {
    State.ROOT.value: "bold red",
    State.SUSPECT.value: "yellow",
    State.UNCLEAR.value: "yellow",
}


def _build_row(pod: Pod, ranks: Sequence[RankState], width: int) -> tuple[bool, Text]:
    """Return whether a node runs or has finished, and its row: name,
    process and ranks with their states.

    If the terminal is too narrow, the ranks are on a second line.
    """
    code = pod.exit_code
    states: dict[str, list[int]] = {}
    for item in ranks:
        is_running = item.state is State.UNREPORTED and code is None
        states.setdefault(_RUNNING if is_running else item.state.value, []).append(item.rank)
    is_fine = code in {None, 0} and states.keys() <= {_RUNNING, State.FINISHED.value}
    process = f"pid {pod.process.pid}" if code is None else f"exited with {code}"
    row = Text(f"  {printable(pod.name)}  {process}", overflow="fold")
    texts = [
        Text(f"{name} {format_ranks(numbers)}", _STYLES.get(name, ""))
        for name, numbers in states.items()
    ]
    line = Text(", ").join(texts or [Text("no ranks yet")])
    between = "  " if row.cell_len + 2 + line.cell_len <= width else "\n    "
    return is_fine, row.append(between).append_text(line)


def shown_rows(rows: Sequence[tuple[bool, Text]], limit: int = _MAX_SHOWN_NODES) -> list[Text]:
    """Return at most `limit` rows, those of nodes with a problem first,
    and one that counts the rest.
    """
    if len(rows) <= limit:
        return [row for _, row in rows]
    by_need = sorted(rows, key=lambda row: row[0])
    bad = sum(not is_fine for is_fine, _ in by_need[limit:]) or "none"
    return [
        *(row for _, row in by_need[:limit]),
        Text(f"  and {len(rows) - limit} more nodes, {bad} with a problem"),
    ]


class AttemptView:
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
        with _catch_errors():
            # start() replaces sys.stderr by rich's proxy. Log handlers keep the stream that they
            # were made with, so move those on the old stderr to the proxy; otherwise their lines
            # would cut through the view.
            self._live.start(refresh=True)
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is stderr:
                    handler.setStream(sys.stderr)  # rich's stderr prints above the view
                    self._handlers.append(handler)
            # Last: the ticker refreshes a view that has started.
            self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Ends the ticker's pause at once. A refresh in progress and stop() exclude each other by
        # rich's lock.
        self._ended.set()
        with _catch_errors():
            self._live.stop()
            if self._ticker.is_alive():
                self._ticker.join(_THREAD_JOIN_TIMEOUT_SECONDS)
        # stop() has put the old sys.stderr back, so the handlers don't write to a proxy without a
        # view.
        for handler in self._handlers:
            handler.setStream(sys.stderr)

    def tell(self, line: str) -> None:
        """Print a line about a step, and show it below the nodes."""
        with _catch_errors():
            text = Text(printable(line))
            self._spinner.update(text=text)
            self._console.print(text, soft_wrap=True)

    @contextlib.contextmanager
    def watching(self, running: Running) -> Iterator[None]:
        """Show the nodes of an attempt."""
        self._running, self._cascade = running, None
        # A separate thread reads the storage: the main thread polls the pods and must not wait for
        # a slow listing.
        loop = asyncio.new_event_loop()
        following = loop.create_task(self._follow(running.reader))

        def follow() -> None:
            with _catch_errors(), contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(following)
            # Closed by the thread that ran it: the main thread waits at most a second and may be
            # gone by now.
            loop.close()

        thread = threading.Thread(target=follow, name="firstfault-follow", daemon=True)
        with _catch_errors():
            thread.start()
        try:
            yield
        finally:
            self._running = None
            with _catch_errors():
                with contextlib.suppress(RuntimeError):  # the loop has already ended
                    loop.call_soon_threadsafe(following.cancel)
                thread.join(_THREAD_JOIN_TIMEOUT_SECONDS)

    def __rich__(self) -> RenderableType:
        if not self._is_broken:
            # Reset only after success: after an error in `_draw`, later refreshes show the spinner
            # alone.
            self._is_broken = True
            with _catch_errors():
                drawn = self._draw()
                self._is_broken = False
                return drawn
        return self._spinner

    async def _follow(self, reader: AttemptReader) -> None:
        async for job in reader.follow(_REFRESH_INTERVAL_SECONDS):
            conclusion = reader.conclude_from(job)
            if conclusion is not None:
                # Written in this thread, read by the ticker: replacing the reference is atomic, and
                # a cascade isn't changed after it is built.
                self._cascade = build_cascade(job, conclusion.verdict, conclusion.diagnosis)
            else:
                self._cascade = build_cascade(
                    job, build_undetermined_verdict(job, DEFAULT_STRATEGY), diagnose(job)
                )

    def _tick(self) -> None:
        with _catch_errors():
            while not self._ended.wait(_REFRESH_INTERVAL_SECONDS):
                self._live.refresh()

    def _draw(self) -> RenderableType:
        running = self._running
        if running is None:
            return self._spinner
        ranks = self._cascade.ranks if self._cascade is not None else ()
        width = self._console.width
        rows = [
            _build_row(pod, [item for item in ranks if item.node == pod.name], width)
            for pod in running.pods
        ]
        alive = sum(pod.exit_code is None for pod in running.pods)
        seconds = time.monotonic() - running.started
        head = f"attempt {running.number}, {seconds:.0f} s, {alive} of {len(rows)} pods running"
        return Group(Text(head, style="bold"), *shown_rows(rows), self._spinner)


def _catch_errors() -> contextlib.AbstractContextManager[None]:
    return suppress_internal_errors("showing the run", through=(KeyboardInterrupt, SystemExit))
