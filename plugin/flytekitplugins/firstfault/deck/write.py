"""Writes the deck of a failed attempt, with the report as its first tab: one pod writes it, the others wait for it.

It is the pod that concluded for all. If the pods could not settle on a verdict, each elects the same one.

Kubeflow counts the job as succeeded when the first pod exits with 0, and Flyte shows a deck only if it exists at that
moment. Without this, the entrypoint of every pod would write its own deck over the others'.
"""

from __future__ import annotations

import contextvars
from functools import partial
from typing import TYPE_CHECKING

from flytekit import Deck
from flytekit.core.context_manager import FlyteContextManager
from flytekit.deck.deck import _output_deck

from firstfault.attempts import sibling_attempts
from firstfault.model import Phase, Subject, Writer
from firstfault.report.data import with_attempts
from firstfault_torch.budgets import DECK_BEFORE_S, DECK_S
from firstfault_torch.guard import bounded, guarded
from flytekitplugins.firstfault.deck.keep import kept_decks
from flytekitplugins.firstfault.flyte_engine import await_deck

if TYPE_CHECKING:
    import threading
    from collections.abc import Collection, Sequence

    from firstfault.model import JobErrors, NodePresence, Place
    from firstfault.report import Report
    from firstfault.report.data import AttemptSummary
    from firstfault_torch.context import Recording
    from firstfault_torch.verdict.seal import SealedVerdict

TAB = "firstfault"
"""Name of the report's tab."""
_MARK = "<!-- firstfault: why this attempt failed -->"
"""Tells the other pods that this is the deck with the report: a task may have published one before it failed."""
_ENDED = (Phase.FAILED, Phase.SUCCEEDED)


def leave_deck(
    verdict: SealedVerdict,
    task_name: str,
    *,
    staying: Collection[Phase] = _ENDED,
    give_up: threading.Event | None = None,
) -> bool:
    """Write the deck, or wait a few seconds for the elected pod to write it; raise nothing.

    Return whether this pod's entrypoint is to write the deck after the task: it has not been written.

    Args:
        verdict: the verdict on the failure.
        task_name: for flytekit's log.
        staying: last phases of nodes whose pods can still write.
        give_up: ends the wait.
    """
    recording = verdict.recording
    if verdict.report is None:
        return False  # the pod that concluded for all has written it
    with guarded("publishing the deck"):
        if not verdict.for_all and not is_elected(recording, verdict.report.job, staying):
            wait = partial(await_deck, recording.output_prefix, _MARK.encode(), give_up, DECK_S)
            bounded(wait, DECK_S, "waiting for the deck", give_up)
            return False
        # flytekit's context is a context variable of this thread
        write = partial(contextvars.copy_context().run, _write, verdict, verdict.report, task_name)
        return bounded(write, DECK_S, "writing the deck", give_up) is None
    return True


def is_elected(recording: Recording, job: JobErrors, staying: Collection[Phase] = _ENDED) -> bool:
    """Whether this node is the elected one, or there is none."""
    place = elected(job, staying)
    return place is None or (place.node, place.incarnation) == (recording.identity.node, recording.incarnation)


def elected(job: JobErrors, staying: Collection[Phase] = _ENDED) -> Place | None:
    """Return the node that writes the deck: rank 0's, which has its decks, else the first one that failed.

    All nodes that have read the same roster elect the same node. None: no node can still write.

    Args:
        job: the documents that were read.
        staying: last phases of nodes whose pods can still write.
    """
    lost = {(place.node, place.group_rank) for place in _lost_agents(job)}
    living = [
        entry
        for entry in job.roster
        if entry.phase in staying and (entry.place.node, entry.place.group_rank) not in lost
    ]
    of_rank_0 = [entry for entry in living if 0 in entry.ranks]
    failed = [entry for entry in living if entry.phase is Phase.FAILED]
    chosen = min(of_rank_0 or failed, key=_order_of, default=None)
    return chosen.place if chosen is not None else None


def _lost_agents(job: JobErrors) -> list[Place]:
    """Return the agents that died: a worker or the recorder wrote their document, and perhaps their roster entry."""
    return [
        failure.place
        for failure in job.failures
        if failure.subject is Subject.AGENT and failure.writer in {Writer.WORKER, Writer.RECORDER}
    ]


def _order_of(entry: NodePresence) -> tuple[float, str, int]:
    rank = entry.place.group_rank
    return (float("inf") if rank is None else rank, entry.place.node, entry.place.incarnation)


def _write(verdict: SealedVerdict, said: Report, task_name: str) -> bool:
    """Add the report's tab and rank 0's to flytekit's list of decks, and write it as flytekit does; return True."""
    from firstfault.render.html import deck_html  # noqa: PLC0415 - only a failure needs it

    recording = verdict.recording
    report = _deck(TAB, f"{_MARK}\n{deck_html(with_attempts(said, _attempts(verdict)))}")
    children: list[Deck] = []
    if recording.files is not None:
        with guarded("reading rank 0's decks"):
            kept = kept_decks(recording.files, recording.round)
            children = [_deck(deck.name, deck.html) for deck in kept]
    parameters = FlyteContextManager.current_context().user_space_params
    parameters.decks[:] = _tabs(report, children, parameters.decks)
    _output_deck(task_name.rpartition(".")[2], parameters)
    return True


def _attempts(verdict: SealedVerdict) -> tuple[AttemptSummary, ...]:
    """Return the earlier attempts, if they can be read in time."""
    identity = verdict.recording.identity
    if identity.attempt == 0 or verdict.conclusion is None:
        return ()
    read = partial(sibling_attempts, identity.output_prefix, verdict.conclusion, seconds=DECK_BEFORE_S)
    return bounded(read, DECK_BEFORE_S, "reading the attempts before") or ()


def _tabs(report: Deck, children: Sequence[Deck], others: Sequence[Deck]) -> list[Deck]:
    """Return all decks in the order of their tabs, one for each name: flytekit shows only one of two with one name."""
    names = {deck.name for deck in children}
    tabs = [*children, *(deck for deck in others if deck.name not in names)]
    return [report, *(_deck(f"{TAB} (task)", deck.html) if deck.name == TAB else deck for deck in tabs)]


def _deck(name: str, html: str) -> Deck:
    return Deck(name, html, auto_add_to_deck=False)
