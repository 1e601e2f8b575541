"""The files that Flyte reads: the name of a sealed verdict's file, and waits for files of other pods."""

from __future__ import annotations

import os
import threading
import time
import uuid
from typing import TYPE_CHECKING

from firstfault.errors import (
    AccessDeniedError,
    BadDocumentError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StoreError,
)
from firstfault.layout import DECK, ERROR_FILE, OUTPUTS, is_stock_error_file
from firstfault.model import DocumentRef, Seal
from firstfault.store import open_store
from firstfault.sync import run_sync
from firstfault.wire.documents import decode
from firstfault_torch.budgets import (
    LONGEST_OUTPUTS_POLL_S,
    OUTPUTS_HURRIED_LOOK_S,
    OUTPUTS_LOOK_S,
    OUTPUTS_POLL_S,
    OUTPUTS_REFUSED_S,
    OUTPUTS_S,
)
from firstfault_torch.guard import bounded, logger
from firstfault_torch.node.document_writer import get_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from firstfault.store import Store


def multi_error_files(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the backend asked each pod for its own error file, by flytekit's rule."""
    names = ("FLYTE_INTERNAL_DIST_ERROR_STRATEGY", "_F_DES")
    return bool(next((environment[name] for name in names if name in environment), ""))


def sealed_name(output_prefix: str) -> str:
    """Return the name of the verdict's file, the same in all pods of an attempt: one pod writes it for all."""
    unique = uuid.uuid5(uuid.NAMESPACE_URL, output_prefix).hex
    return f"error-{unique}.pb" if multi_error_files() else ERROR_FILE


def newest_seal(seal: Seal, document: bytes, output_prefix: str, give_up: threading.Event | None = None) -> bytes:
    """Return the ``error.pb`` to keep: another pod's, unless this pod's was concluded from more documents.

    Pods that read the same documents reach the same verdict; a pod that concluded early read fewer.

    Args:
        seal: this pod's verdict.
        document: its ``error.pb``.
        output_prefix: the folder of the verdict's file.
        give_up: once set, shortens the look for another pod's.
    """
    name = sealed_name(output_prefix)
    doing = "looking for the verdict of another pod"
    other = bounded(
        lambda: get_file(output_prefix, name), OUTPUTS_LOOK_S, doing, give_up, hurried_seconds=OUTPUTS_HURRIED_LOOK_S
    )
    try:
        found = decode(other, DocumentRef(ERROR_FILE)) if other is not None else None
    except BadDocumentError:
        return document
    return other if other is not None and isinstance(found, Seal) and found.count >= seal.count else document


def await_outputs(output_prefix: str, give_up: threading.Event, seconds: float = OUTPUTS_S) -> bool:
    """Wait for outputs or an error of rank 0's pod; return False after `seconds`, or if the wait was given up.

    Kubeflow counts the job as succeeded when the first pod exits with 0, and Flyte reads the outputs at that moment.

    Args:
        output_prefix: the folder of the outputs.
        give_up: ends the wait.
        seconds: longest wait; a minute if the storage does not let this pod look.
    """
    missed = "rank 0's pod has written no outputs"
    refusals: set[str] = set()

    def look() -> bool:
        try:
            return _are_there(output_prefix)
        except StoreError as error:
            refusals.clear()
            if isinstance(error, AccessDeniedError):
                refusals.add(str(error))
            logger.warning("cannot look for rank 0's outputs: %s", error)
            return False

    return _await(look, missed, give_up, lambda: min(OUTPUTS_REFUSED_S, seconds) if refusals else seconds)


def await_deck(output_prefix: str, mark: bytes, give_up: threading.Event | None, seconds: float) -> bool:
    """Wait for another pod's deck; return False after `seconds`, or if the wait was given up.

    Args:
        output_prefix: the folder of the deck.
        mark: a text that only the deck with the report contains; the task may have published another deck.
        give_up: ends the wait.
        seconds: longest wait.
    """
    missed = "the elected pod has not written the deck"
    return _await(lambda: _is_marked(output_prefix, mark), missed, give_up or threading.Event(), lambda: seconds)


def _await(are_there: Callable[[], bool], missed: str, give_up: threading.Event, limit: Callable[[], float]) -> bool:
    began = time.monotonic()
    pause: float = OUTPUTS_POLL_S
    while not are_there():
        left = began + limit() - time.monotonic()
        if left <= 0:
            logger.warning("%s within %g s; this pod waits no longer", missed, limit())
            return False
        if give_up.wait(min(pause, left)):
            return False
        pause = min(pause * 1.5, LONGEST_OUTPUTS_POLL_S)
    return True


def _are_there(output_prefix: str) -> bool:
    async def look() -> bool:
        async with open_store(output_prefix) as store:
            try:
                return any(item.name == OUTPUTS or is_stock_error_file(item.name) for item in await store.list())
            except AccessDeniedError:
                # reading may be allowed without listing
                if await _can_be_read(store, OUTPUTS) or await _can_be_read(store, sealed_name(output_prefix)):
                    return True
                raise

    return run_sync(look())


async def _can_be_read(store: Store, name: str) -> bool:
    try:
        await store.get(name, limit=1)
    except ObjectTooLargeError:
        return True
    except (AccessDeniedError, ObjectNotFoundError):
        return False
    return True


def _is_marked(output_prefix: str, mark: bytes) -> bool:
    async def look() -> bool:
        async with open_store(output_prefix) as store:
            return mark in await store.get(DECK)

    try:
        return run_sync(look())
    except StoreError:
        return False  # there is no deck yet, or it cannot be read
