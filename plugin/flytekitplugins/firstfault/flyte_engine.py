"""Flyte 1 as the engine of an attempt: its variables, its names for errors, and the files that it reads."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from firstfault.model.roster import pods_live
from firstfault_torch.context import Identity, host_name
from firstfault_torch.engine import ErrorName
from firstfault_torch.guard import bounded, caught
from firstfault_torch.node.document_writer import put_file
from flytekitplugins.firstfault.config import STRATEGY_VARIABLE
from flytekitplugins.firstfault.outputs import await_outputs, newest_seal, sealed_name

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    from firstfault.model import ExceptionInfo, JobErrors
    from firstfault_torch.verdict.seal import SealedVerdict

__all__ = ["RECOVERABLE_TYPE", "FlyteEngine", "Published", "attempt_number", "namespace", "node_name"]

RECOVERABLE_TYPE = "flytekit.exceptions.user.FlyteRecoverableException"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PLAIN_CODE = "USER:RuntimeError"
"""flytekit's code for an exception that names none."""
_NOW_S = 1.0
"""Longest time for writing the verdict where the process ends at once, seconds."""


class Published(NamedTuple):
    """What a pod leaves for the stock entrypoint."""

    document: bytes
    """The ``error.pb``."""
    writes_deck: bool
    """Whether this pod's entrypoint may write the deck; False: another pod writes it."""


class FlyteEngine:
    """Flyte 1.x: a pod that the stock entrypoint runs, or a local call of the task.

    Args:
        output_prefix: below which the attempt's documents lie.
        in_pod: False for a local call, whose caller gets an exception and no file.
        strategy: what the variable says in workers.
        raw_prefix: this attempt's raw output prefix, which Flyte tells the next attempt; empty: not known.
        previous_raw_prefix: the one of the attempt before; empty: there was none, or it is not known.
        leave_deck: writes the deck of a failed attempt or waits for the pod that does, and returns
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
        leave_deck: Callable[[SealedVerdict, threading.Event | None], bool] = lambda _verdict, _give_up: True,
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
        """A spawned worker only names errors, for which it needs none of the fields."""
        return (FlyteEngine, ())

    def identity(self) -> Identity:
        """Return what the backend says about this pod."""
        return Identity(
            output_prefix=self._output_prefix,
            engine="flyte",
            attempt=attempt_number(),
            node=node_name(),
            namespace=namespace(),
            handover_uri=self._raw_prefix,
            previous_handover_uri=self._previous_raw_prefix,
            worker_environment={STRATEGY_VARIABLE: self._strategy},
            owns_process=self.in_pod,
            failed_exit_code=0,  # flytekit's entrypoint ends like this too once it has uploaded an error
        )

    def name_error(self, error: BaseException, exception: ExceptionInfo) -> ErrorName:
        """Return flytekit's code; recoverable are FlyteRecoverableException and its subclasses, by type."""
        return ErrorName(_code_of(error), RECOVERABLE_TYPE in {exception.type, *exception.bases})

    def publish(
        self, verdict: SealedVerdict, *, give_up: threading.Event | None = None, leaving_now: bool = False
    ) -> None:
        """Keep the verdict in `published` for the stock entrypoint; upload it here if the process ends now."""
        if not self.in_pod:
            return
        if leaving_now:
            put = partial(put_file, self._output_prefix, sealed_name(), verdict.document)
            bounded(put, _NOW_S, "leaving the verdict")
            return
        document = newest_seal(verdict.seal, verdict.document, self._output_prefix)
        self.published = Published(document, self._leave_deck(verdict, give_up))

    def await_exit(self, *, has_rank_0: bool, give_up: threading.Event) -> None:
        """Wait until rank 0's pod has left outputs: with the first pod that exits 0 the job counts as succeeded."""
        if self.in_pod and not has_rank_0:
            await_outputs(self._output_prefix, give_up)

    def enforces(self, job: JobErrors) -> bool:
        """Whether Flyte reads the error files: it does not after a pod died as a whole."""
        return pods_live(job)


def attempt_number(environment: Mapping[str, str] = os.environ) -> int:
    """Return the attempt's number as the backend counts, from 0."""
    text = environment.get("FLYTE_ATTEMPT_NUMBER", "")
    return int(text) if text.isdecimal() else 0


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the pod's name as the backend gives it, else the host's."""
    names = (environment[name] for name in ("FLYTE_INTERNAL_WORKER_NAME", "_F_WN") if name in environment)
    return next(names, "") or environment.get("HOSTNAME") or host_name()


def namespace(environment: Mapping[str, str] = os.environ) -> str:
    """Return the pod's Kubernetes namespace: what Kubernetes mounts, else Flyte's template; empty if neither tells.

    Flyte's ``namespace_mapping`` is ``{{ project }}-{{ domain }}`` unless the installation has another.
    """
    with contextlib.suppress(OSError, ValueError):
        return _NAMESPACE_FILE.read_text(encoding="ascii").strip()
    parts = [environment.get(f"FLYTE_INTERNAL_EXECUTION_{name}", "") for name in ("PROJECT", "DOMAIN")]
    return "-".join(parts) if all(parts) else ""


def _code_of(error: BaseException) -> str:
    """The code that flytekit would report: the exception's own ``error_code``, else USER:RuntimeError."""

    def read() -> str:
        code = getattr(error, "error_code", None)
        if code is None:
            code = getattr(type(error), "error_code", None)
        return str(code) if isinstance(code, str | int) else _PLAIN_CODE

    return caught(read)[0] or _PLAIN_CODE
