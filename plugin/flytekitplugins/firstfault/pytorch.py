"""Running a `PyTorch` task: one process a pod, no agent; the process reports for itself."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flytekit.extend import IgnoreOutputs

from firstfault.model import DocumentRef, NodePresence, Phase
from firstfault_torch.context import node_name, worker_place
from firstfault_torch.guard import bounded, guarded, logger
from firstfault_torch.node.document_writer import put_entry
from firstfault_torch.verdict.node_verdict import sealed, settle
from firstfault_torch.verdict.previous import leave_verdict
from firstfault_torch.worker.in_flight import is_clean_exit
from firstfault_torch.worker.recording import describe_and_record
from flytekitplugins.firstfault.deck.write import leave_deck
from flytekitplugins.firstfault.task import RecoverableVerdictSealedError, VerdictSealedError, in_pod

if TYPE_CHECKING:
    from firstfault.model import Place, Receipt
    from firstfault_torch.context import Recording
    from flytekitplugins.firstfault.task import PyTorchFunctionTask

__all__ = ["execute_single"]


def execute_single(task: PyTorchFunctionTask, kwargs: dict[str, Any]) -> Any:
    """See `PyTorchFunctionTask.execute`."""
    recording = task.recording() if in_pod() else None
    if recording is None:
        return task.task_function(**kwargs)
    pods = _pods(os.environ)
    recording = replace(recording, group_world_size=pods)
    place = replace(worker_place(recording), group_rank=_rank(os.environ), group_world_size=pods)
    joined = _announce(recording, place, Phase.JOINED, wait=False)
    try:
        result = task.task_function(**kwargs)
    except IgnoreOutputs:
        # flytekit's word for "this pod has nothing to hand over": no failure
        joined.wait(recording.upload_deadline_seconds)
        _announce(recording, place, Phase.SUCCEEDED)
        raise
    except BaseException as error:
        if is_clean_exit(error):
            raise
        document = b""
        headline = ""
        retry = leaves_deck = False
        with guarded("concluding on the failure"):
            failure, receipt = describe_and_record(error, recording, place)
            known = replace(failure, documents=(DocumentRef(receipt.name),))
            _announce(recording, place, Phase.FAILED, (receipt,))
            conclusion = settle(
                recording,
                [known],
                seconds=task.task_config.settle_seconds,
                policy=task.task_config.retry_policy,
                attempt=place.attempt,
                retries=task.metadata.retries,
                expected_nodes=pods or None,
            )
            seal, document = sealed(conclusion, recording, node_name())
            headline = conclusion.verdict.headline
            retry = conclusion.decision.retry
            if retry:
                leave_verdict(recording, document)
            logger.error("%s", seal.message)
            # a pod that has succeeded is gone
            leaves_deck = not leave_deck(conclusion, recording, task.name, staying=(Phase.FAILED,))
        if document and isinstance(error, Exception):
            kind = RecoverableVerdictSealedError if retry else VerdictSealedError
            raise kind(headline, document, leaves_deck=leaves_deck) from error
        raise
    # a pod that ends would take the first entry with it if that is still on its way
    joined.wait(recording.upload_deadline_seconds)
    _announce(recording, place, Phase.SUCCEEDED)
    return result


def _announce(
    recording: Recording, place: Place, phase: Phase, receipts: tuple[Receipt, ...] = (), *, wait: bool = True
) -> threading.Event:
    """Write a roster entry; without `wait` in the background, since the training need not wait for it.

    Return what is set when it has been written, or given up.
    """
    presence = NodePresence(
        phase=phase,
        place=place,
        ranks=(place.rank,) if place.rank is not None else (),
        receipts=receipts,
        timestamp_ns=time.time_ns(),
    )
    deadline = recording.upload_deadline_seconds if wait else 0
    ended = threading.Event()

    def put() -> None:
        try:
            put_entry(presence, recording)
        finally:
            ended.set()

    bounded(put, deadline, "writing the roster")
    return ended


def _pods(environment: os._Environ[str]) -> int:
    """Number of pods: the operator sets WORLD_SIZE, one process a pod; 0 if it did not."""
    text = environment.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 0


def _rank(environment: os._Environ[str]) -> int | None:
    text = environment.get("RANK", "")
    return int(text) if text.isdecimal() else None
