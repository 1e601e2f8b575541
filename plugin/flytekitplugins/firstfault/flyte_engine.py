"""Flyte 1's implementation of the engine protocol: its variables, its error codes, and the files that it reads."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from firstfault.model.job import pods_live
from firstfault_torch.budgets import NOW_S, PUBLISH_S, TERMINATED_PUBLISH_S
from firstfault_torch.context import Identity, host_name
from firstfault_torch.engine import ErrorName
from firstfault_torch.guard import caught
from firstfault_torch.node.document_writer import get_file, put_on_node
from flytekitplugins.firstfault.config import STRATEGY_VARIABLE
from flytekitplugins.firstfault.outputs import await_outputs, newest_seal, sealed_name

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    from firstfault.model import ExceptionInfo, JobErrors
    from firstfault_torch.verdict.seal import SealedVerdict

RECOVERABLE_TYPE = "flytekit.exceptions.user.FlyteRecoverableException"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PLAIN_CODE = "USER:RuntimeError"
"""flytekit's code for an exception without an ``error_code``."""


class Published(NamedTuple):
    """What the stock entrypoint of this pod uploads."""

    document: bytes
    """The ``error.pb``."""
    durable: bool
    """Whether it is in the storage already."""
    writes_deck: bool
    """Whether the entrypoint is to write the deck; False: there is none, it is written, or another pod writes it."""


class FlyteEngine:
    """Flyte 1.x: a pod that the stock entrypoint runs, or a local call of the task.

    Args:
        output_prefix: the folder (URI) of the attempt's documents.
        in_pod: False for a local call: its caller gets an exception, and no file is written.
        strategy: value of `STRATEGY_VARIABLE` in the workers.
        raw_prefix: this attempt's raw output prefix, which Flyte gives to the next attempt; empty: not known.
        previous_raw_prefix: the previous attempt's; empty: there was none, or it is not known.
        leave_deck: writes the deck of a failed attempt, or waits for the pod that does; returns
            `Published.writes_deck`.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        output_prefix: str = "",
        *,
        in_pod: bool = False,
        strategy: str = "",
        raw_prefix: str = "",
        previous_raw_prefix: str = "",
        leave_deck: Callable[[SealedVerdict, threading.Event | None], bool] = lambda _verdict, _give_up: False,
    ) -> None:
        self.in_pod = in_pod
        self.published: Published | None = None
        """Set by `publish`."""
        self._output_prefix = output_prefix
        self._strategy = strategy
        self._raw_prefix = raw_prefix
        self._previous_raw_prefix = previous_raw_prefix
        self._leave_deck = leave_deck

    def __reduce__(self) -> tuple[type[FlyteEngine], tuple[()]]:
        """Pickle without the fields: a spawned worker only names errors, and needs none of them."""
        return (FlyteEngine, ())

    def identity(self) -> Identity:
        """Return the identity that the backend gave this pod."""
        return Identity(
            output_prefix=self._output_prefix,
            engine="flyte",
            attempt=attempt_number(),
            node=node_name(),
            namespace=namespace(),
            task=os.environ.get("FLYTE_INTERNAL_TASK_NAME", ""),
            image=os.environ.get("FLYTE_INTERNAL_IMAGE", ""),
            handover_uri=self._raw_prefix,
            previous_handover_uri=self._previous_raw_prefix,
            worker_environment={STRATEGY_VARIABLE: self._strategy},
            owns_process=self.in_pod,
            failed_exit_code=0,  # flytekit's entrypoint also exits with 0 after it has uploaded an error
        )

    def name_error(self, error: BaseException, exception: ExceptionInfo) -> ErrorName:
        """Return flytekit's code, and whether the type is FlyteRecoverableException or a subclass."""
        return ErrorName(_code_of(error), RECOVERABLE_TYPE in {exception.type, *exception.bases})

    def publish(
        self, verdict: SealedVerdict, *, give_up: threading.Event | None = None, leaving_now: bool = False
    ) -> SealedVerdict:
        """Upload the verdict, and leave it to the stock entrypoint if that fails; write the deck."""
        if not self.in_pod:
            return verdict
        if leaving_now:
            return verdict if verdict.durable else self._uploaded(verdict, NOW_S)
        if not verdict.for_all:
            # the nodes could not settle on one verdict
            document = newest_seal(verdict.seal, verdict.document, self._output_prefix, give_up)
            verdict = replace(verdict, document=document)
        writes_deck = self._leave_deck(verdict, give_up)
        if not verdict.durable:
            hurried = give_up is not None and give_up.is_set()
            verdict = self._uploaded(verdict, TERMINATED_PUBLISH_S if hurried else PUBLISH_S)
        self.published = Published(verdict.document, verdict.durable, writes_deck)
        return verdict

    def _uploaded(self, verdict: SealedVerdict, seconds: float) -> SealedVerdict:
        name = sealed_name(self._output_prefix)
        return replace(verdict, durable=put_on_node(name, verdict.document, verdict.recording, seconds))

    def published_verdict(self) -> bytes | None:
        """Return the ``error.pb`` that a pod has uploaded; None for a local call."""
        return get_file(self._output_prefix, sealed_name(self._output_prefix)) if self.in_pod else None

    def await_exit(self, *, has_rank_0: bool, give_up: threading.Event) -> None:
        """Wait for rank 0's outputs: Kubeflow counts the job as succeeded when the first pod exits with 0."""
        if self.in_pod and not has_rank_0:
            await_outputs(self._output_prefix, give_up)

    def enforces(self, job: JobErrors) -> bool:
        """Whether Flyte reads the error files: it does not after a whole pod died."""
        return pods_live(job)


def attempt_number(environment: Mapping[str, str] = os.environ) -> int:
    """Return the attempt's number; the backend counts from 0."""
    text = environment.get("FLYTE_ATTEMPT_NUMBER", "")
    return int(text) if text.isdecimal() else 0


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the pod's name from the backend, else the host's name."""
    names = (environment[name] for name in ("FLYTE_INTERNAL_WORKER_NAME", "_F_WN") if name in environment)
    return next(names, "") or environment.get("HOSTNAME") or host_name()


def namespace(environment: Mapping[str, str] = os.environ) -> str:
    """Return the pod's Kubernetes namespace, or an empty text.

    It comes from the file that Kubernetes mounts, else from Flyte's default, ``{{ project }}-{{ domain }}``.
    """
    with contextlib.suppress(OSError, ValueError):
        return _NAMESPACE_FILE.read_text(encoding="ascii").strip()
    parts = [environment.get(f"FLYTE_INTERNAL_EXECUTION_{name}", "") for name in ("PROJECT", "DOMAIN")]
    return "-".join(parts) if all(parts) else ""


def _code_of(error: BaseException) -> str:
    """Return the code that flytekit reports: the exception's ``error_code``, else USER:RuntimeError."""

    def read() -> str:
        code = getattr(error, "error_code", None)
        if code is None:
            code = getattr(type(error), "error_code", None)
        return str(code) if isinstance(code, str | int) else _PLAIN_CODE

    return caught(read)[0] or _PLAIN_CODE
