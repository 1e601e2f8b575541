"""Flyte 1's implementation of the engine protocol: its variables, its error codes,
and the files that it reads.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path

from firstfault.decision_mode import ACT, OBSERVE, read_decision_mode
from firstfault.errors import (
    AccessDeniedError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StoreError,
)
from firstfault.evidence.completion import classify_outcome
from firstfault.layout import DECK, ERROR_FILE, OUTPUTS, is_stock_error_file
from firstfault.model import ExceptionInfo, JobErrors, Kind, Origin
from firstfault.model.job import Action, pods_live
from firstfault.store import open_store
from firstfault.utils.run_sync import run_sync
from firstfault.wire.documents import encode_seal
from firstfault_torch import time_limits
from firstfault_torch.engine import (
    Engine,
    ErrorName,
    Publication,
    SealedVerdict,
    find_hurry,
    upload_verdict,
)
from firstfault_torch.guard import logger, try_call
from firstfault_torch.node.document_writer import get_file
from firstfault_torch.node_context import Identity
from firstfault_torch.protocol.shutdown import ExitStep, Hurry, get_limit
from flytekitplugins.firstfault.config import STRATEGY_VARIABLE

RECOVERABLE_TYPE = "flytekit.exceptions.user.FlyteRecoverableException"
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"
"""The variable that Kubernetes sets in each container."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PLAIN_CODE = "USER:RuntimeError"
"""flytekit's code for an exception without an ``error_code``."""


@dataclass(frozen=True)
class FlyteEngine(Engine):
    """Flyte 1.x: a pod that the stock entrypoint runs, or a local call of the task."""

    output_prefix: str = ""
    """The folder (URI) of the attempt's documents."""
    _: KW_ONLY
    in_pod: bool = False
    """False for a local call: its caller gets an exception, and no file is written."""
    strategy: str = ""
    """Value of `STRATEGY_VARIABLE` in the workers."""
    raw_prefix: str = ""
    """This attempt's raw output prefix, which Flyte gives to the next attempt; empty if unknown."""
    previous_raw_prefix: str = ""
    """The previous attempt's raw output prefix; empty for a first attempt, or if unknown."""
    publish_deck: Callable[[Publication, threading.Event | None], bool] = (
        lambda _publication, _shutdown_requested: False
    )
    """Writes the deck of a failed attempt, or waits for the pod that does. Returns whether the
    entrypoint still has to write the deck: not if there is none, it is written, or another pod
    writes it.
    """

    def __reduce__(self) -> tuple[type[FlyteEngine], tuple[()]]:
        """Pickle without the fields: a spawned worker only names errors, and needs none of them."""
        return (FlyteEngine, ())

    def identity(self) -> Identity:
        """Return the identity that the backend gave this pod; it counts attempts from 0."""
        attempt = os.environ.get("FLYTE_ATTEMPT_NUMBER", "")
        return Identity(
            output_prefix=self.output_prefix,
            engine="flyte",
            attempt=int(attempt) if attempt.isdecimal() else 0,
            node=get_node_name(),
            namespace=get_namespace(),
            task=os.environ.get("FLYTE_INTERNAL_TASK_NAME", ""),
            image=os.environ.get("FLYTE_INTERNAL_IMAGE", ""),
            handover_uri=self.raw_prefix,
            previous_handover_uri=self.previous_raw_prefix,
            worker_environment={STRATEGY_VARIABLE: self.strategy},
            owns_process=self.in_pod,
        )

    def name_error(self, error: BaseException, exception: ExceptionInfo) -> ErrorName:
        """Return flytekit's code, and whether the type is FlyteRecoverableException or a subclass.

        The code is the exception's ``error_code``, else USER:RuntimeError; reading it is the user's
        code.
        """

        def read() -> str:
            code = getattr(error, "error_code", None)
            if code is None:
                code = getattr(type(error), "error_code", None)
            return str(code) if isinstance(code, str | int) else ""

        return ErrorName(
            try_call(read)[0] or _PLAIN_CODE, RECOVERABLE_TYPE in {exception.type, *exception.bases}
        )

    def publish(
        self,
        publication: Publication,
        *,
        shutdown_requested: threading.Event | None = None,
        leaving_now: bool = False,
    ) -> Publication:
        """Upload the verdict, and leave it to the stock entrypoint if that fails;
        write the deck.
        """
        if not self.in_pod or self.takes_results(publication.sealed):
            return publication
        # peers take over the document
        if publication.own is not None and (mode := read_decision_mode()) != ACT:
            sealed = _decide_as_flytekit(publication.sealed, logs_change=mode == OBSERVE)
            publication = replace(publication, sealed=sealed)
        # A thread exits the process while the main thread is inside C++. Between SIGTERM and the
        # pod's SIGKILL there is no time for other pods' verdicts or for a deck: upload, and leave
        # `is_deck_pending` unset.
        if leaving_now:
            return (
                publication
                if publication.durable
                else self._upload(publication, get_limit(ExitStep.FLYTE_ERROR, Hurry.LEAVING_NOW))
            )
        # Deck and verdict must both be in the storage before this pod exits: the first exit with 0
        # ends the job, and Flyte then reads both. Each has its own time limit, so a slow deck can't
        # use up the verdict's.
        is_deck_pending = self.publish_deck(publication, shutdown_requested)
        if not publication.durable:
            hurry = find_hurry(shutdown_requested, leaving_now=False)
            publication = self._upload(publication, get_limit(ExitStep.FLYTE_ERROR, hurry))
        return replace(publication, is_deck_pending=is_deck_pending)

    def _upload(self, publication: Publication, seconds: float) -> Publication:
        return upload_verdict(publication, get_verdict_name(self.output_prefix), seconds)

    def published_verdict(self) -> bytes | None:
        """Return the ``error.pb`` that a pod has uploaded, or None for a local call."""
        return (
            get_file(self.output_prefix, get_verdict_name(self.output_prefix))
            if self.in_pod
            else None
        )

    def await_exit(self, *, has_rank_0: bool, shutdown_requested: threading.Event) -> None:
        """Wait for rank 0's outputs: Kubeflow counts the job as succeeded when the
        first pod exits with 0.
        """
        if self.in_pod and not has_rank_0:
            await_outputs(self.output_prefix, shutdown_requested)

    def ends_with_first_node(self) -> bool:
        """Whether this is a pod: Flyte reads the error when the first pod has ended."""
        return self.in_pod

    def choose_exit_code(self, publication: Publication | None) -> int:
        """Return 0, with which flytekit's entrypoint also exits after it has uploaded an error."""
        del publication
        return 0

    def takes_results(self, sealed: SealedVerdict) -> bool:
        """Whether Flyte gets the outputs: the job had finished,
        and the task's policy doesn't ask for a retry.
        """
        return _is_finished(sealed) and read_decision_mode() == ACT

    def enforces(self, job: JobErrors) -> bool:
        """Whether Flyte carries out the decision:
        it reads no error files after a whole pod died.
        """
        return read_decision_mode() == ACT and pods_live(job)


def _is_finished(sealed: SealedVerdict) -> bool:
    outcome = classify_outcome(sealed.verdict)
    return outcome.has_finished and sealed.decision.action is Action.STOP


def _decide_as_flytekit(sealed: SealedVerdict, *, logs_change: bool) -> SealedVerdict:
    """Return the verdict as an error of the kind that flytekit itself writes.

    `logs_change`: whether to log what would have been reported to Flyte instead.
    """
    root = sealed.verdict.root
    is_recoverable = root is not None and root.recoverable and root.origin is not Origin.SYSTEM
    kind = Kind.RECOVERABLE if is_recoverable else Kind.NON_RECOVERABLE
    if logs_change and (
        sealed.seal.kind is not kind or (is_recoverable and sealed.seal.origin is not Origin.USER)
    ):
        decision = sealed.decision
        logger.warning(
            "observed: would have told Flyte %s: %s", decision.action.value, decision.reason
        )
    if logs_change and _is_finished(sealed):
        logger.warning("observed: would have written the outputs: %s", sealed.decision.reason)
    seal = replace(sealed.seal, kind=kind, origin=Origin.USER)
    return replace(sealed, seal=seal, document=encode_seal(seal))


# --- what the backend set -------------------------------------------------------------------------


def get_node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the pod's name from the backend, else the host's name."""
    # Backends set the long or the short name of a variable; flytekit reads either (`get_one_of`).
    names = (
        environment[name] for name in ("FLYTE_INTERNAL_WORKER_NAME", "_F_WN") if name in environment
    )
    return next(names, "") or environment.get("HOSTNAME") or socket.gethostname()


def get_namespace() -> str:
    """Return the pod's Kubernetes namespace, or an empty text.

    It comes from the file that Kubernetes mounts, else from Flyte's default, ``{{ project }}-{{
    domain }}``. On a machine without Kubernetes there is none, whatever the project is called.
    """
    with contextlib.suppress(OSError, ValueError):
        return _NAMESPACE_FILE.read_text(encoding="ascii").strip()
    if _IN_KUBERNETES not in os.environ:
        return ""
    parts = [
        os.environ.get(f"FLYTE_INTERNAL_EXECUTION_{name}", "") for name in ("PROJECT", "DOMAIN")
    ]
    return "-".join(parts) if all(parts) else ""


# --- the files that Flyte reads -------------------------------------------------------------------


def writes_error_file_per_pod(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the backend asked each pod for its own error file, by flytekit's rule."""
    names = ("FLYTE_INTERNAL_DIST_ERROR_STRATEGY", "_F_DES")
    return bool(next((environment[name] for name in names if name in environment), ""))


def get_verdict_name(output_prefix: str) -> str:
    """Return the name of the verdict's file, the same in all pods of an attempt:
    one pod writes it for all.
    """
    unique = uuid.uuid5(uuid.NAMESPACE_URL, output_prefix).hex
    return f"error-{unique}.pb" if writes_error_file_per_pod() else ERROR_FILE


def await_outputs(
    output_prefix: str,
    shutdown_requested: threading.Event,
    seconds: float = time_limits.OUTPUTS_TIMEOUT_SECONDS,
) -> bool:
    """Wait for outputs or an error of rank 0's pod; return False after `seconds`,
    or if the wait was given up.

    Kubeflow counts the job as succeeded when the first pod exits with 0, and Flyte reads the
    outputs at that moment. The wait is a minute at most if the storage doesn't let this pod look.
    """
    return _wait_until(
        partial(outputs_are_there, output_prefix),
        "rank 0's pod has written no outputs",
        shutdown_requested,
        seconds,
    )


def outputs_are_there(output_prefix: str) -> bool:
    """Whether there are outputs or an error file.

    Raises:
        firstfault.errors.StoreError: the storage can't be read.
    """

    async def look() -> bool:
        async with open_store(output_prefix) as store:
            try:
                # Rank 0's pod may write an error file instead, for example if flytekit can't
                # convert its outputs. Without that check this pod would wait for the whole limit.
                return any(
                    item.name == OUTPUTS or is_stock_error_file(item.name)
                    for item in await store.list()
                )
            except AccessDeniedError:
                # reading may be allowed without listing
                for name in (OUTPUTS, get_verdict_name(output_prefix)):
                    with contextlib.suppress(AccessDeniedError, ObjectNotFoundError):
                        # Too large also means that it exists; its content isn't needed.
                        with contextlib.suppress(ObjectTooLargeError):
                            await store.get(name, limit=1)
                        return True
                raise

    return run_sync(look())


def await_deck(
    output_prefix: str,
    mark: bytes,
    shutdown_requested: threading.Event | None,
    seconds: float,
) -> bool:
    """Wait for another pod's deck; return False after `seconds`, or if the wait was given up.

    Only the deck with the report contains `mark`; the task may have published another deck.
    """

    async def look() -> bool:
        with contextlib.suppress(StoreError):  # no deck exists yet, or it can't be read
            async with open_store(output_prefix) as store:
                return mark in await store.get(DECK)
        return False

    return _wait_until(
        lambda: run_sync(look()),
        "the elected pod has not written the deck",
        shutdown_requested or threading.Event(),
        seconds,
    )


def _wait_until(
    is_there: Callable[[], bool],
    complaint: str,
    shutdown_requested: threading.Event,
    seconds: float,
) -> bool:
    began = time.monotonic()
    pause: float = time_limits.OUTPUTS_POLL_SECONDS
    while True:
        limit = seconds
        try:
            if is_there():
                return True
        except StoreError as error:
            # Storage errors may pass, so keep looking until the limit. A refusal usually lasts, so
            # it has a shorter limit, which holds only as long as the storage refuses.
            logger.warning("can't check for rank 0's outputs: %s", error)
            if isinstance(error, AccessDeniedError):
                limit = min(time_limits.UNREADABLE_OUTPUTS_TIMEOUT_SECONDS, seconds)
        left = began + limit - time.monotonic()
        if left <= 0:
            logger.warning("%s within %g s; not waiting any longer", complaint, limit)
            return False
        # SIGTERM ends the pause at once: the pod has only its grace period left.
        if shutdown_requested.wait(min(pause, left)):
            return False
        pause = min(pause * 1.5, time_limits.MAX_OUTPUTS_POLL_SECONDS)
