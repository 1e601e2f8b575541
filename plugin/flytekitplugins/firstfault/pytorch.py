"""Runs a `PyTorch` task: one process per pod, without an agent;
the process writes its own documents.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flytekit.extend import IgnoreOutputs

from firstfault.model import NodePresence, NodeSetup, Phase, Place, Receipt
from firstfault_torch.conclusion.conclude_on_node import Wait, conclude_on_node
from firstfault_torch.conclusion.notifications import notify
from firstfault_torch.conclusion.previous_attempt import hand_over_verdict
from firstfault_torch.conclusion.publishing import publish_or_adopt
from firstfault_torch.conclusion.sealed_verdict import seal_verdict
from firstfault_torch.engine import Publication
from firstfault_torch.guard import start_in_thread, suppress_internal_errors
from firstfault_torch.node.document_writer import as_entry, document_path, put_on_node
from firstfault_torch.node_context import NodeContext
from firstfault_torch.node_setup import read_node_setup
from firstfault_torch.options import Options
from firstfault_torch.places import get_worker_place
from firstfault_torch.run import build_node_context
from firstfault_torch.worker.exception_documents import ExceptionDocuments
from firstfault_torch.worker.in_flight import is_clean_exit
from flytekitplugins.firstfault.flytekit_classes import (
    build_verdict_error,
    expect_missing_checkpoint,
)

if TYPE_CHECKING:
    from flytekitplugins.firstfault.flyte_engine import FlyteEngine


def run_in_pod(function: Callable[[], Any], engine: FlyteEngine, options: Options) -> Any:
    """Run the task function in this pod and record it; like `PyTorchFunctionTask.execute`."""
    node_context = build_node_context(engine, options)
    # by the operator's RANK and WORLD_SIZE: each pod runs one process
    own = get_worker_place(node_context)
    node_context = replace(node_context, group_world_size=own.world_size)
    place = replace(own, group_rank=own.rank, group_world_size=own.world_size)
    # In the background: the training must not wait for a slow storage. The event is awaited before
    # this pod may exit.
    joined = _announce(node_context, place, Phase.JOINED, wait=False)
    expect_missing_checkpoint()
    try:
        result = function()
    except IgnoreOutputs:
        # flytekit raises IgnoreOutputs for a pod without outputs: not a failure
        joined.wait(node_context.upload_deadline_seconds)
        _announce(node_context, place, Phase.SUCCEEDED)
        raise
    except BaseException as error:
        if is_clean_exit(error):
            raise
        publication: Publication | None = None
        with suppress_internal_errors("concluding on the failure"):
            # If this fails, or `publish` does, `is_deck_pending` stays None and the task's own
            # exception goes to the entrypoint, which writes a stock error file.
            concluded = publication = _conclude(error, engine, options, node_context, place)
            publication = publish_or_adopt(concluded, engine, engine.publish)
            if concluded.sealed.decision.retry and publication.own is None:
                # This pod has left its own verdict for the next attempt; another one's was first.
                hand_over_verdict(node_context, publication.sealed)
        if publication is not None:
            with suppress_internal_errors("notifying others"):
                # After publishing: a notifier is user code or a network request, and must not delay
                # the verdict.
                _notify(publication)
        # flytekit catches Exception only. SystemExit and KeyboardInterrupt must keep their type to
        # end the process.
        is_published = publication is not None and publication.is_deck_pending is not None
        if publication is not None and is_published and isinstance(error, Exception):
            raise build_verdict_error(publication) from error
        raise
    # if the pod ended now, a first entry that is still being uploaded would be lost
    joined.wait(node_context.upload_deadline_seconds)
    _announce(node_context, place, Phase.SUCCEEDED)
    return result


def _conclude(
    error: BaseException,
    engine: FlyteEngine,
    options: Options,
    node_context: NodeContext,
    place: Place,
) -> Publication:
    """Record an exception of the task function; return the sealed verdict on the job."""
    # The document first, then the roster entry with its receipt: peers that read the entry find the
    # document. If this pod is killed in between, readers see a document without an entry.
    document, receipt = ExceptionDocuments(engine, node_context).write(error, place)
    _announce(node_context, place, Phase.FAILED, (receipt,))
    wait = Wait(options.settle_seconds, expected_nodes=place.group_world_size or None)
    # This pod's own document, in case the storage took it too late or not at all.
    copies = {document_path(receipt.name): document}
    publication = seal_verdict(
        conclude_on_node(node_context, copies, engine, options, wait), node_context
    )
    # Before the verdict is published: Flyte may start the next attempt once it has read the
    # verdict, and that attempt looks for this copy.
    if publication.sealed.decision.retry:
        hand_over_verdict(node_context, publication.sealed)
    engine.announce(publication)
    return publication


def _notify(publication: Publication) -> None:
    """Call the notifiers if this failed pod is the one that has to."""
    from flytekitplugins.firstfault.deck import (  # noqa: PLC0415 - only a failure needs it
        is_elected,
    )

    if publication.own is None:
        return
    report = publication.own.report
    if is_elected(publication.node_context, report.job, (Phase.FAILED,)):
        notify(report)


def _announce(
    node_context: NodeContext,
    place: Place,
    phase: Phase,
    receipts: tuple[Receipt, ...] = (),
    *,
    wait: bool = True,
) -> threading.Event:
    """Write a roster entry; without `wait` in the background,
    so that the training doesn't wait for it.

    Return an event that is set when the entry has been written or given up.
    """
    presence = NodePresence(
        phase=phase,
        place=place,
        ranks=(place.rank,) if place.rank is not None else (),
        receipts=receipts,
        timestamp_ns=time.time_ns(),
        setup=read_node_setup(node_context.identity) if phase is Phase.FAILED else NodeSetup(),
    )
    deadline = node_context.upload_deadline_seconds
    ended = start_in_thread(
        partial(put_on_node, *as_entry(presence), node_context, deadline), "writing the roster"
    )
    if wait:
        ended.wait(deadline)
    return ended
