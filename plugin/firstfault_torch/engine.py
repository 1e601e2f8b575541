"""The protocol between an agent and the engine that runs an attempt, and `PlainEngine`,
for jobs without an engine.
"""

from __future__ import annotations

import os
import socket
import threading
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from firstfault.layout import ERROR_FILE
from firstfault.model import Decision, ExceptionInfo, JobErrors, Seal, Verdict
from firstfault.recorder.client import ALREADY_EXISTS
from firstfault.store import join
from firstfault_torch.guard import logger
from firstfault_torch.node.document_writer import create_on_node, get_file, put_on_node
from firstfault_torch.node_context import Identity, NodeContext
from firstfault_torch.protocol.shutdown import ExitStep, Hurry, get_limit

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion
    from firstfault.report import Report


@dataclass(frozen=True, slots=True)
class ErrorName:
    """An engine's code for an exception."""

    code: str
    recoverable: bool
    """Whether the exception asks for another attempt."""


@dataclass(frozen=True, slots=True)
class SealedVerdict:
    """The verdict and the decision on a failed attempt, the same on all nodes."""

    verdict: Verdict
    """Without credentials."""
    decision: Decision
    seal: Seal
    document: bytes
    """The ``error.pb``."""


@dataclass(frozen=True, slots=True)
class OwnConclusion:
    """What only the node that concluded has."""

    conclusion: Conclusion
    report: Report
    """Without credentials; message and deck are rendered from it."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A sealed verdict on its way into the storage, as one node publishes it."""

    sealed: SealedVerdict
    node_context: NodeContext
    """This node's."""
    own: OwnConclusion | None = None
    """This node's conclusion, or None if another node concluded."""
    for_all: bool = False
    """Whether all nodes agreed on the verdict, so only the node that concluded publishes it."""
    durable: bool = False
    """Whether the ``error.pb`` is in the storage."""
    is_refused: bool = False
    """Whether `publish` found another ``error.pb`` in the storage, and left it alone."""
    replaces: bool = False
    """Whether `publish` overwrites an ``error.pb``; otherwise the first one stays."""
    bundle: bytes = b""
    """Copies of what the verdict rests on, for later readers; of what all nodes wrote, also if
    another node concluded, if each has a separate folder.
    """
    is_deck_pending: bool | None = None
    """Whether the program that called this node still has to write the page with the report. Set by
    an engine's `publish`; None if the verdict wasn't published or the caller gets an exception
    instead.
    """


class Engine(Protocol):
    """The system that runs an attempt, such as Flyte.

    An engine implements the first four methods, and overrides the remaining methods where its
    system differs. It's passed to spawned workers, so it must be picklable; a worker only calls
    `name_error`.
    """

    __slots__ = ()

    @abstractmethod
    def identity(self) -> Identity:
        """Return the node's name, attempt and storage locations; the agent calls it once."""

    @abstractmethod
    def name_error(self, error: BaseException, exception: ExceptionInfo) -> ErrorName:
        """Return the code of an exception of the task function, and whether it is recoverable.

        `exception` is `error` as data. The class is the user's: its attributes may raise anything.
        """

    @abstractmethod
    def publish(
        self,
        publication: Publication,
        *,
        shutdown_requested: threading.Event | None = None,
        leaving_now: bool = False,
    ) -> Publication:
        """Write a sealed verdict to where the engine looks for the attempt's error;
        return it as published.

        An ``error.pb`` that exists stays, and the result `is_refused`, unless the verdict
        `replaces` it. The leader publishes for all nodes; then this is called on other nodes with a
        durable verdict. If the leader could not store it, each node publishes it. Waits end when
        `shutdown_requested` is set; with `leaving_now`, the process exits right after this call.
        """

    @abstractmethod
    def published_verdict(self) -> bytes | None:
        """Return the ``error.pb`` that a node published on this attempt, or None without one.

        Raises:
            firstfault.errors.StoreError: it can't be read.
        """

    def await_exit(self, *, has_rank_0: bool, shutdown_requested: threading.Event) -> None:
        """Wait until this node may exit after its workers have succeeded, or until
        `shutdown_requested` is set.

        `has_rank_0`: it has the result of rank 0. The default returns at once: nothing ends other
        nodes when this one exits.
        """
        del has_rank_0, shutdown_requested

    def ends_with_first_node(self) -> bool:
        """Whether the exit of one node ends the attempt on all nodes. If so, a node that has to end
        doesn't leave the verdict to others. The default is False.
        """
        return False

    def announce(self, publication: Publication) -> None:
        """Print what failed, for a person who reads this node's output. The default logs the
        report.
        """
        logger.error("%s", publication.sealed.seal.message)

    def choose_exit_code(self, publication: Publication | None) -> int:
        """Return the exit code of a node's process; `publication` is None without a verdict.
        The default is 1.
        """
        del publication
        return 1

    def takes_results(self, sealed: SealedVerdict) -> bool:
        """Whether the attempt succeeds in spite of this verdict,
        with what the functions returned before the failure.

        Only for a failure of the teardown. Then `publish` writes no error. The default is False:
        the caller gets the failure, as from torch.
        """
        del sealed
        return False

    def enforces(self, job: JobErrors) -> bool:
        """Whether the engine enforces a decision on this attempt instead of only printing it.
        The default is False: nothing retries the job.
        """
        del job
        return False


def find_hurry(shutdown_requested: threading.Event | None, *, leaving_now: bool) -> Hurry:
    """Return how much time `Engine.publish` has, by its arguments."""
    if leaving_now:
        return Hurry.LEAVING_NOW
    is_ending = shutdown_requested is not None and shutdown_requested.is_set()
    return Hurry.TERMINATED if is_ending else Hurry.NONE


def upload_verdict(publication: Publication, name: str, seconds: float) -> Publication:
    """Write a verdict's ``error.pb`` below the output prefix, under the engine's name for it.
    Return the verdict with the result.
    """
    document, node_context = publication.sealed.document, publication.node_context
    if publication.replaces:
        is_written = put_on_node(name, document, node_context, seconds)
        return replace(publication, durable=is_written, is_refused=False)
    receipt = create_on_node(name, document, node_context, seconds)
    is_refused = receipt.error == ALREADY_EXISTS
    return replace(publication, durable=receipt.durable, is_refused=is_refused)


class RecoverableError(RuntimeError):
    """An exception after which another attempt makes sense; for jobs without an engine."""


@dataclass(frozen=True, slots=True)
class PlainEngine(Engine):
    """No engine: documents and the verdict go to a folder, and nothing retries the job.

    Missing fields come from the environment: ``FIRSTFAULT_FOLDER``, ``FIRSTFAULT_ATTEMPT``, and
    ``FIRSTFAULT_NODE``, else Slurm's ``SLURMD_NODENAME``, else the host's name.
    """

    folder: str = ""
    """URI or path; attempt 2 lies in ``<folder>/2``."""
    attempt: int | None = None
    """Counted from 0."""
    node: str = ""
    """The node's name."""
    is_folder_shared: bool = True
    """Whether all nodes share the folder. If not, the nodes send each other what they wrote."""
    namespace: str = ""
    """The Kubernetes namespace, for reports."""
    task: str = ""
    """What runs, for reports."""

    def identity(self) -> Identity:
        """Return the attempt's folder and this node's name.

        Raises:
            ValueError: no folder is given, or the attempt isn't a number.
        """
        folder = self.folder or os.environ.get("FIRSTFAULT_FOLDER", "")
        if not folder:
            raise ValueError(
                "PlainEngine needs a folder that all nodes share: PlainEngine(folder=...)"
            )
        given = (
            os.environ.get("FIRSTFAULT_ATTEMPT", "0") if self.attempt is None else str(self.attempt)
        )
        if not given.isdecimal():
            raise ValueError(f"the number of the attempt must be 0 or more, not {given!r}")
        attempt = int(given)
        named = os.environ.get("FIRSTFAULT_NODE", "") or os.environ.get("SLURMD_NODENAME", "")
        return Identity(
            output_prefix=join(folder, str(attempt)),
            engine="plain",
            attempt=attempt,
            node=self.node or named or socket.gethostname(),
            namespace=self.namespace,
            task=self.task,
            handover_uri=join(folder, str(attempt)),
            previous_handover_uri=join(folder, str(attempt - 1)) if attempt else "",
            is_folder_shared=self.is_folder_shared,
        )

    def name_error(self, error: BaseException, exception: ExceptionInfo) -> ErrorName:
        """Return the exception's type as its code;
        recoverable if it derives from `RecoverableError`.
        """
        del error
        recoverable = f"{RecoverableError.__module__}.{RecoverableError.__qualname__}"
        code = f"USER:{exception.type.rsplit('.', 1)[-1]}"
        return ErrorName(code, recoverable=recoverable in {exception.type, *exception.bases})

    def publish(
        self,
        publication: Publication,
        *,
        shutdown_requested: threading.Event | None = None,
        leaving_now: bool = False,
    ) -> Publication:
        """Write the verdict to ``<folder>/<attempt>/error.pb``."""
        if not publication.durable:
            seconds = get_limit(
                ExitStep.PUBLISH, find_hurry(shutdown_requested, leaving_now=leaving_now)
            )
            return upload_verdict(publication, ERROR_FILE, seconds)
        return publication

    def published_verdict(self) -> bytes | None:
        """Return the ``error.pb`` in the attempt's folder."""
        return get_file(self.identity().output_prefix, ERROR_FILE)

    def to_exception(self, sealed: SealedVerdict) -> Exception | None:
        """Return the exception that torchrun's launcher raises, or None for torch's own."""
        del sealed
        return None
