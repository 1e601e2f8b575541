"""The deck of a failed attempt: rank 0 keeps its decks in a file, and one pod writes the deck,
the report first.

The pod that concluded for all writes it. If the pods could not agree on a verdict, each elects the
same pod, and the rest wait for it. Kubeflow counts the job as succeeded when the first pod exits
with 0, and Flyte shows a deck only if it exists at that moment. Without this, the entrypoint of
every pod would overwrite the deck of every other pod.
"""

from __future__ import annotations

import contextvars
import json
import threading
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from flytekit import Deck
from flytekit.core.context_manager import FlyteContextManager
from flytekit.deck.deck import TimeLineDeck, _output_deck

from firstfault.model import JobErrors, Phase, Place, Subject, Writer
from firstfault.model.job import node_key
from firstfault.recorder.folder import NodeFolder
from firstfault_torch.engine import OwnConclusion, Publication
from firstfault_torch.guard import call_with_timeout, logger, suppress_internal_errors
from firstfault_torch.node_context import NodeContext
from firstfault_torch.time_limits import (
    DECK_TIMEOUT_SECONDS,
    DECKS_POLL_SECONDS,
    EARLIER_ATTEMPTS_TIMEOUT_SECONDS,
    FINAL_DECKS_TIMEOUT_SECONDS,
)
from flytekitplugins.firstfault.flyte_engine import await_deck

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion
    from firstfault.report.data import AttemptSummary

_LOOK_SHARE = 20
"""The pause after a slow check is this many times its duration,
so that large decks don't slow the training.
"""
_MAX_BYTES = 20 * 1024 * 1024
"""Limit for all decks together."""
TAB = "firstfault"
"""Name of the report's tab."""
_MARK = "<!-- firstfault: why this attempt failed -->"
"""Marks the deck with the report for all other pods:
a task may have published one before it failed.
"""
_ENDED = (Phase.FAILED, Phase.SUCCEEDED)


# --- rank 0's decks -------------------------------------------------------------------------------


class DeckKeeper:
    """Writes rank 0's decks to a file in the node's folder,
    which is still there if the process crashes.

    A thread of the worker checks the decks about once a second, also while the main thread waits
    inside C++. The agent reads the file after its node has failed. It leaves out flytekit's
    timeline, which has no text until flytekit renders it; the agent has its own timeline. The task
    function adds to `decks`, which is flytekit's list.
    """

    def __init__(self, files: NodeFolder, round_: int, decks: list[Deck]) -> None:
        self._file = files.decks(round_)
        self._decks = decks
        self._kept: list[tuple[str, str]] = []
        self._left_out: list[str] = []
        self._lock = threading.Lock()
        self._ended = False
        self._wake = threading.Event()
        self._looked = threading.Event()
        # A daemon thread: a check that hangs on a full or slow disk must not keep the worker from
        # exiting.
        threading.Thread(target=self._run, name="firstfault-decks", daemon=True).start()

    def look_now(self, seconds: float) -> None:
        """Check now, because this process is about to be stopped; wait at most `seconds` for it."""
        # If a check is running right now, it may end the wait early, with decks that are a moment
        # old.
        self._looked.clear()
        self._wake.set()
        self._looked.wait(seconds)

    def end(self) -> None:
        """Check for the last time, and end the thread."""
        self._ended = True
        self._wake.set()
        # Don't wait for the keeper's thread: it may have ended after an error. This check runs in a
        # separate thread with a limit, because the worker's exit waits for it.
        call_with_timeout(self._look, FINAL_DECKS_TIMEOUT_SECONDS, "keeping the decks")

    def _run(self) -> None:
        # a failure ends the thread, with one warning
        with suppress_internal_errors("keeping the decks"):
            pause: float = DECKS_POLL_SECONDS
            while not self._ended:
                self._wake.wait(pause)
                # Clear before the check, not after it: a request that comes during the check then
                # ends the next pause at once.
                self._wake.clear()
                began = time.monotonic()
                self._look()
                self._looked.set()
                pause = max(DECKS_POLL_SECONDS, _LOOK_SHARE * (time.monotonic() - began))

    def _look(self) -> None:
        # `end` starts a check in another thread while the keeper's thread may be in the middle of
        # one.
        with self._lock:
            # unchanged texts are the same objects, so comparing them costs nothing
            found = [
                (deck.name, deck.html)
                for deck in list(self._decks)
                if not isinstance(deck, TimeLineDeck)
            ]
            # The recorder removes the node's folder when it ends, for example after the agent's
            # death; then nobody reads decks.
            if found != self._kept and self._file.parent.is_dir():
                self._write(found)
                self._kept = found

    def _write(self, decks: Sequence[tuple[str, str]]) -> None:
        entries: list[bytes] = []
        left_out: list[str] = []
        room = _MAX_BYTES
        for deck in decks:
            # UTF-8 can't encode a lone surrogate
            data = json.dumps(deck, ensure_ascii=False).encode("utf-8", "replace")
            if len(data) <= room:
                entries.append(data)
                room -= len(data)
            else:
                left_out.append(deck[0])
        if left_out and left_out != self._left_out:
            self._left_out = left_out
            text = (
                "if this attempt fails, its deck will lack %s, because all decks together exceed"
                " %d MB"
            )
            logger.warning(text, ", ".join(map(repr, left_out)), _MAX_BYTES // 1024**2)
        # an atomic rename: this process may be killed at any moment
        part = self._file.with_suffix(".part")
        part.write_bytes(b"[" + b",\n".join(entries) + b"]")
        part.replace(self._file)


def kept_decks(files: NodeFolder, round_: int) -> list[Deck]:
    """Return rank 0's decks of a round; none if rank 0 made none, or was on another node."""
    try:
        # Rank 0 may still be replacing the file: the rename is atomic, so this reads either the old
        # or the new decks.
        data = files.decks(round_).read_bytes()
    except FileNotFoundError:
        return []
    return [_build_deck(str(name), str(html)) for name, html in json.loads(data)]


# --- one pod writes -------------------------------------------------------------------------------


def publish_deck(
    publication: Publication,
    task_name: str,
    *,
    staying: Collection[Phase] = _ENDED,
    shutdown_requested: threading.Event | None = None,
) -> bool:
    """Write the deck, or wait a few seconds for the elected pod to write it; raise nothing.

    Return whether this pod's entrypoint has to write the deck after the task, because it isn't
    written yet. `shutdown_requested` ends the wait; `staying` as in `elected`.
    """
    node_context, own = publication.node_context, publication.own
    if own is None:
        return False  # the pod that concluded for all has written it
    with suppress_internal_errors("publishing the deck"):
        # If the pods settled on one verdict (`for_all`), this pod concluded and writes. Otherwise
        # each pod gets here with its own verdict at about the same time, and exactly one may write.
        if not publication.for_all and not is_elected(node_context, own.report.job, staying):
            prefix, limit = node_context.output_prefix, DECK_TIMEOUT_SECONDS
            wait = partial(await_deck, prefix, _MARK.encode(), shutdown_requested, limit)
            # Also after a timeout this pod doesn't write: the elected pod may be writing just now,
            # and the last writer wins.
            call_with_timeout(wait, limit, "waiting for the deck", shutdown_requested)
            return False
        # flytekit's context is a context variable of this thread, but `call_with_timeout` writes in
        # another thread.
        write = partial(contextvars.copy_context().run, _write, node_context, own, task_name)
        return (
            call_with_timeout(write, DECK_TIMEOUT_SECONDS, "writing the deck", shutdown_requested)
            is None
        )
    return True


def is_elected(
    node_context: NodeContext, job: JobErrors, staying: Collection[Phase] = _ENDED
) -> bool:
    """Whether this node is the elected one, or there is none."""
    place = elected(job, staying)
    return place is None or (place.node, place.incarnation) == (
        node_context.identity.node,
        node_context.incarnation,
    )


def elected(job: JobErrors, staying: Collection[Phase] = _ENDED) -> Place | None:
    """Return the node that writes the deck: rank 0's, which has its decks,
    else the first one that failed.

    Nodes that have read the same roster elect the same node. Only a node with a last phase in
    `staying` has a pod that still runs and can write. None: no such node exists.
    """
    # a worker or the recorder wrote the document of an agent that died, and perhaps its roster
    # entry
    of_agents = [failure for failure in job.failures if failure.subject is Subject.AGENT]
    lost = {
        node_key(failure.place)
        for failure in of_agents
        if failure.writer in {Writer.WORKER, Writer.RECORDER}
    }
    living = [
        entry
        for entry in job.roster
        if entry.phase in staying and node_key(entry.place) not in lost
    ]
    of_rank_0 = [entry for entry in living if 0 in entry.ranks]
    failed = [entry for entry in living if entry.phase is Phase.FAILED]

    def order(place: Place) -> tuple[float, str, int]:
        return (
            float("inf") if place.group_rank is None else place.group_rank,
            place.node,
            place.incarnation,
        )

    return min((entry.place for entry in of_rank_0 or failed), key=order, default=None)


def _write(node_context: NodeContext, own: OwnConclusion, task_name: str) -> bool:
    """Add the report's tab and rank 0's to flytekit's list of decks, and write it as flytekit does;
    return True.
    """
    from firstfault.render.html import deck_html  # noqa: PLC0415 - only a failure needs it
    from firstfault.report.data import with_attempts  # noqa: PLC0415 - as above

    attempts = _read_earlier_attempts(node_context, own.conclusion)
    report = _build_deck(TAB, f"{_MARK}\n{deck_html(with_attempts(own.report, attempts))}")
    children: list[Deck] = []
    if node_context.files is not None:
        with suppress_internal_errors("reading rank 0's decks"):
            children = kept_decks(node_context.files, node_context.round)
    parameters = FlyteContextManager.current_context().user_space_params
    # Change the list in place: the entrypoint's execution parameters hold the same list. If this
    # upload takes too long, the entrypoint writes the deck with the report from it.
    parameters.decks[:] = _build_tabs(report, children, parameters.decks)
    # flytekit logs an upload error and doesn't raise it: a failed upload looks like a success here.
    _output_deck(task_name.rpartition(".")[2], parameters)
    return True


def _read_earlier_attempts(
    node_context: NodeContext, conclusion: Conclusion
) -> tuple[AttemptSummary, ...]:
    """Return the earlier attempts, if they can be read in time."""
    from firstfault.attempt import sibling_attempts  # noqa: PLC0415 - only a failure needs it

    identity = node_context.identity
    if identity.attempt == 0:
        return ()
    limit = EARLIER_ATTEMPTS_TIMEOUT_SECONDS
    read = partial(sibling_attempts, identity.output_prefix, conclusion, seconds=limit)
    return call_with_timeout(read, limit, "reading the attempts before") or ()


def _build_tabs(report: Deck, children: Sequence[Deck], others: Sequence[Deck]) -> list[Deck]:
    """Return all decks in the order of their tabs, one for each name:
    flytekit shows only one of two with one name.
    """
    names = {deck.name for deck in children}
    tabs = [*children, *(deck for deck in others if deck.name not in names)]
    return [
        report,
        *(_build_deck(f"{TAB} (task)", deck.html) if deck.name == TAB else deck for deck in tabs),
    ]


def _build_deck(name: str, html: str) -> Deck:
    return Deck(name, html, auto_add_to_deck=False)
