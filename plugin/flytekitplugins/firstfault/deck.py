"""The deck of a failed attempt: one pod writes it, the report first, then rank 0's decks.

The pod that concluded for all writes it. If the pods could not agree on a verdict, each elects the
same pod, and the rest wait for it. Kubeflow counts the job as succeeded when the first pod exits
with 0, and Flyte shows a deck only if it exists at that moment. Without this, the entrypoint of
every pod would overwrite the deck of every other pod.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from flytekit import Deck
from flytekit.core.context_manager import FlyteContextManager
from flytekit.deck.deck import _output_deck

from firstfault.model import JobErrors, Phase, Place, Subject, Writer
from firstfault.model.job import node_key
from firstfault_torch.engine import OwnConclusion, Publication
from firstfault_torch.guard import call_with_timeout, suppress_internal_errors
from firstfault_torch.node_context import NodeContext
from firstfault_torch.time_limits import (
    DECK_TIMEOUT_SECONDS,
    EARLIER_ATTEMPTS_TIMEOUT_SECONDS,
)
from flytekitplugins.firstfault.flyte_engine import await_deck
from flytekitplugins.firstfault.rank_decks import build_deck, read_kept_decks

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion
    from firstfault.report.data import AttemptSummary

REPORT_TAB = "firstfault"
"""Name of the report's tab."""
_REPORT_MARK = "<!-- firstfault: why this attempt failed -->"
"""Marks the deck with the report for all other pods:
a task may have published one before it failed.
"""
_FINAL_PHASES = (Phase.FAILED, Phase.SUCCEEDED)


def publish_deck(
    publication: Publication,
    task_name: str,
    *,
    live_phases: Collection[Phase] = _FINAL_PHASES,
    shutdown_requested: threading.Event | None = None,
) -> bool:
    """Write the deck, or wait a few seconds for the elected pod to write it; raise nothing.

    Return whether this pod's entrypoint has to write the deck after the task, because it isn't
    written yet. `shutdown_requested` ends the wait; `live_phases` as in `elect_node`.
    """
    node_context, own = publication.node_context, publication.own
    if own is None:
        return False  # the pod that concluded for all has written it
    with suppress_internal_errors("publishing the deck"):
        # If the pods settled on one verdict (`for_all`), this pod concluded and writes. Otherwise
        # each pod gets here with its own verdict at about the same time, and exactly one may write.
        if not publication.for_all and not is_elected(node_context, own.report.job, live_phases):
            prefix, limit = node_context.output_prefix, DECK_TIMEOUT_SECONDS
            wait = partial(await_deck, prefix, _REPORT_MARK.encode(), shutdown_requested, limit)
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
    node_context: NodeContext, job: JobErrors, live_phases: Collection[Phase] = _FINAL_PHASES
) -> bool:
    """Whether this node is the elected one, or there is none."""
    place = elect_node(job, live_phases)
    return place is None or (place.node, place.incarnation) == (
        node_context.identity.node,
        node_context.incarnation,
    )


def elect_node(job: JobErrors, live_phases: Collection[Phase] = _FINAL_PHASES) -> Place | None:
    """Return the node that writes the deck, or None if no node can. It is rank 0's node, which has
    rank 0's decks, otherwise the first node that failed.

    Nodes that have read the same roster elect the same node. Only a node with a last phase in
    `live_phases` has a pod that still runs and can write.
    """
    # a worker or the recorder wrote the document of an agent that died, and perhaps its roster
    # entry
    agent_failures = [failure for failure in job.failures if failure.subject is Subject.AGENT]
    lost = {
        node_key(failure.place)
        for failure in agent_failures
        if failure.writer in {Writer.WORKER, Writer.RECORDER}
    }
    living = [
        entry
        for entry in job.roster
        if entry.phase in live_phases and node_key(entry.place) not in lost
    ]
    of_rank_0 = [entry for entry in living if 0 in entry.ranks]
    failed = [entry for entry in living if entry.phase is Phase.FAILED]

    def get_sort_key(place: Place) -> tuple[float, str, int]:
        return (
            float("inf") if place.group_rank is None else place.group_rank,
            place.node,
            place.incarnation,
        )

    return min((entry.place for entry in of_rank_0 or failed), key=get_sort_key, default=None)


def _write(node_context: NodeContext, own: OwnConclusion, task_name: str) -> bool:
    """Add the tabs of the report and of rank 0 to flytekit's decks, and write them. Return True."""
    from firstfault.render.html import deck_html  # noqa: PLC0415 - only a failure needs it
    from firstfault.report.data import with_attempts  # noqa: PLC0415 - as above

    attempts = _read_earlier_attempts(node_context, own.conclusion)
    report = build_deck(
        REPORT_TAB, f"{_REPORT_MARK}\n{deck_html(with_attempts(own.report, attempts))}"
    )
    rank_0_decks: list[Deck] = []
    if node_context.files is not None:
        with suppress_internal_errors("reading rank 0's decks"):
            rank_0_decks = read_kept_decks(node_context.files, node_context.round)
    parameters = FlyteContextManager.current_context().user_space_params
    # Change the list in place: the entrypoint's execution parameters hold the same list. If this
    # upload takes too long, the entrypoint writes the deck with the report from it.
    parameters.decks[:] = _build_tabs(report, rank_0_decks, parameters.decks)
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


def _build_tabs(
    report: Deck, rank_0_decks: Sequence[Deck], task_decks: Sequence[Deck]
) -> list[Deck]:
    """Return all decks in the order of their tabs, one for each name:
    flytekit shows only one of two with one name.
    """
    names = {deck.name for deck in rank_0_decks}
    tabs = [*rank_0_decks, *(deck for deck in task_decks if deck.name not in names)]
    return [
        report,
        *(
            build_deck(f"{REPORT_TAB} (task)", deck.html) if deck.name == REPORT_TAB else deck
            for deck in tabs
        ),
    ]
