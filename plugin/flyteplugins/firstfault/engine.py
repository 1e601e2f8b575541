"""Flyte 2's implementation of the engine protocol: the files that its runtime reads, and the
exceptions that it raises.

Flyte 2 runs a task on several pods in two ways, and retries after every error but a non-recoverable
one:

    ClusteredTaskEnvironment   each pod of a JobSet runs torchrun, and ``a0`` in each worker. JobSet
                               restarts all pods after an exit code other than 0, and Flyte reads
                               error.pb only after 0. So after a fault that a restart would repeat,
                               one pod writes error.pb and all exit with 0.
    Elastic                    ``a0`` of each pod starts the workers, and writes what is raised to
                               error.pb
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from firstfault.decision_mode import ACT, OBSERVE, read_decision_mode
from firstfault.layout import ERROR_FILE, VERDICT
from firstfault.model import JobErrors, Kind, Origin
from firstfault.model.job import Action, pods_live
from firstfault.store import join
from firstfault.wire.documents import encode_seal
from firstfault_torch import time_limits
from firstfault_torch.guard import call_with_timeout
from firstfault_torch.node.document_writer import get_file, put_file
from firstfault_torch.protocol.shutdown import ExitStep, Hurry, get_limit
from firstfault_torch.torchrun.agent import TorchrunEngine
from firstfault_torch.torchrun.exit_codes import FAILED
from firstfault_torch.torchrun.settings import FOLDER_VARIABLE, JOB_VARIABLE

if TYPE_CHECKING:
    from firstfault.report import Report
    from firstfault_torch.engine import Publication, SealedVerdict
    from firstfault_torch.node_context import Identity

_RUNS_FOLDER = "firstfault-runs"
"""Below the action's output path: the folder of all documents, for each JobSet and restart."""
_REPORT_FILE = "report.html"
"""Below the action's output path, as ``flyte.report`` writes it."""
_REPORT_TAB = "firstfault"
_REPORT_MARK = "<!-- firstfault: why this attempt failed -->"
"""Distinguishes the report of an earlier restart from one that the task has published."""
_EXCEPTION_NAMES = {Action.STOP: "NonRecoverableError", Action.SYSTEM: "RuntimeSystemError"}
"""Exceptions of `flyte.errors` that override Flyte's default of using up the retries."""
_STOP_EXIT_CODE = 0
"""The exit code after which Flyte reads error.pb, and JobSet restarts no pod."""


@dataclass(frozen=True)
class Flyte2Engine(TorchrunEngine):
    """An attempt of an action of Flyte 2, on one pod."""

    exit_codes: ClassVar[Mapping[Action, int]] = {Action.STOP: _STOP_EXIT_CODE}
    outputs: str = ""
    """The action's output path (URI), the same for all restarts of a JobSet."""
    checkpoint: str = ""
    """The task's checkpoint (URI), which Flyte gives to the next attempt, too."""
    previous_checkpoint: str = ""
    """The previous attempt's; empty for a first attempt."""
    is_clustered: bool = False
    """Whether torchrun started this agent. If not, ``a0`` did, and gets an exception instead of an
    exit code.
    """

    def identity(self) -> Identity:
        """Return the attempt's folder and this pod's name; the attempt is the JobSet's restart."""
        identity = super().identity()
        # A restart of the JobSet has the same output path, and finds the verdict there. The next
        # attempt has another.
        is_restart = self.is_clustered and identity.attempt > 0
        previous = (
            identity.previous_handover_uri
            if is_restart
            else _get_handover_folder(self.previous_checkpoint)
        )
        return replace(identity, engine="flyte2", previous_handover_uri=previous)

    def publish(
        self,
        publication: Publication,
        *,
        leaving_now: bool = False,
        **how: Any,
    ) -> Publication:
        """Write the verdict to the attempt's folder and, if the pods won't start again,
        to where Flyte reads it.
        """
        published = super().publish(publication, leaving_now=leaving_now, **how)
        if published.is_refused:
            return published
        # The pod that concluded has a report; all others have the verdict alone, or leave at once.
        own = publication.own
        report = own.report if own is not None and not leaving_now else None
        shutdown_requested = how.get("shutdown_requested")
        if self.checkpoint and report is not None:
            put = partial(
                _put, _get_handover_folder(self.checkpoint), VERDICT, publication.sealed.document
            )
            call_with_timeout(
                put,
                time_limits.HANDOVER_TIMEOUT_SECONDS,
                "leaving the verdict",
                shutdown_requested,
            )
        is_final = (
            not self.is_clustered
            or _is_last_restart()
            or super().choose_exit_code(publication) == _STOP_EXIT_CODE
        )
        if not is_final or not _acts_on_decisions():
            return published
        # Before any pod exits with 0. If the verdict is durable, the pod that concluded has written
        # the error.
        if self.is_clustered and not publication.durable:
            put = partial(_put, self.outputs, ERROR_FILE, _encode_error(publication.sealed))
            hurry = Hurry.LEAVING_NOW if leaving_now else Hurry.NONE
            seconds = get_limit(ExitStep.FLYTE_ERROR, hurry)
            is_written = call_with_timeout(put, seconds, "writing the error that Flyte reads")
            # A failed upload makes the verdict not durable: then this pod exits with 1, and JobSet
            # restarts all.
            published = replace(published, durable=published.durable and bool(is_written))
        if report is not None:
            write = partial(_write_report, self.outputs, report)
            call_with_timeout(
                write,
                time_limits.DECK_TIMEOUT_SECONDS,
                "writing the report",
                shutdown_requested,
            )
        return published

    def ends_with_first_node(self) -> bool:
        """Return True: the exit of a pod ends or restarts all of the JobSet."""
        return True

    def choose_exit_code(self, publication: Publication | None) -> int:
        """Return 0 if Flyte must not run the task again and can read why;
        else the code that the user chose, or 1.
        """
        if not self.is_clustered:
            # It leaves without an exception only if its main thread doesn't answer a signal, so a0
            # writes no error: after 0, Flyte would look for the task's outputs.
            return FAILED
        code = super().choose_exit_code(publication)
        is_durable = publication is not None and publication.durable
        return code if code != _STOP_EXIT_CODE or is_durable else FAILED

    def describe_observed(self, publication: Publication) -> str:
        """Return as `TorchrunEngine` does; for a pod that raises exceptions,
        if Flyte's own error would be another.
        """
        if self.is_clustered:
            return super().describe_observed(publication)
        decision = publication.sealed.decision
        if read_decision_mode() != OBSERVE or decision.action not in _EXCEPTION_NAMES:
            return ""
        attempt = publication.node_context.identity.attempt
        what = (
            f"{_EXCEPTION_NAMES[decision.action]} ({decision.action.value}) after attempt {attempt}"
        )
        return f"would have raised {what}: {decision.reason}"

    def to_exception(self, sealed: SealedVerdict) -> Exception | None:
        """Return the exception by which ``a0`` reports the verdict,
        recoverable or not as decided.
        """
        from flyte import errors  # noqa: PLC0415 - only a failure needs it

        if self.is_clustered or not _acts_on_decisions():
            return None
        action = sealed.decision.action
        exception_type = getattr(errors, _EXCEPTION_NAMES.get(action, "RuntimeUserError"))
        # Flyte chooses the exception in the parent task by this code. Without proof it is the one
        # of Elastic's own.
        code = "RuntimeError" if action is Action.UNKNOWN else sealed.verdict.code
        error: Exception = exception_type(code=code, message=sealed.seal.message)
        return error

    def enforces(self, job: JobErrors) -> bool:
        """Whether Flyte carries out the decision: it reads no error after a whole pod died."""
        return _acts_on_decisions() and pods_live(job)


def find_clustered(spec: Any) -> Callable[..., TorchrunEngine]:
    """Return the factory of the engine for a torchrun that starts ``a0``,
    from torch's `WorkerSpec`.
    """
    values = dict(pairwise(spec.args))
    options = {
        "outputs": "outputs-path",
        "checkpoint": "checkpoint-path",
        "previous_checkpoint": "prev-checkpoint",
    }
    paths = {name: str(values.get(f"--{option}", "")) for name, option in options.items()}
    if _USER_JOB_NAME:
        _name_job(os.environ.get("JOBSET_NAME", ""))
    # "{{": a placeholder that Flyte has not filled
    return _make_factory(
        is_clustered=True, **{name: "" if "{{" in path else path for name, path in paths.items()}
    )


def find_elastic(spec: Any) -> Callable[..., TorchrunEngine]:
    """Return the factory of the engine for an ``Elastic`` task,
    which calls torch's launcher in this process.
    """
    import flyte  # noqa: PLC0415 - runs in a task of Flyte 2

    del spec
    context: Any = flyte.ctx()
    # torch's run id is that of the run, which may have several such actions
    _name_job(f"{context.action.run_name}-{context.action.name}")
    paths = context.checkpoint_paths
    checkpoint, previous = (
        (paths.checkpoint_path, paths.prev_checkpoint_path) if paths is not None else ("", "")
    )
    return _make_factory(
        outputs=context.output_path, checkpoint=checkpoint or "", previous_checkpoint=previous or ""
    )


_USER_JOB_NAME = os.environ.get(JOB_VARIABLE, "")
"""The name that the user has set."""


def _name_job(unique: str) -> None:
    """Give this action's documents a unique name, after the user's if there is one.

    All actions of an image share a name that the image sets. They would read each other's verdicts
    as their previous one.
    """
    os.environ[JOB_VARIABLE] = "-".join(filter(None, (_USER_JOB_NAME, unique)))


_defaults: dict[str, str] = {}
"""Variables that `_set_default` has set: a process may run several tasks."""


def _set_default(name: str, value: str) -> None:
    """Set a variable that the user hasn't set."""
    if os.environ.get(name, "") in {"", _defaults.get(name)}:
        os.environ[name] = _defaults[name] = value


def _make_factory(*, outputs: str, **fields: Any) -> Callable[..., TorchrunEngine]:
    """Set the default folder of the documents, and return the factory of the engine; that of a
    plain torchrun without `outputs`.
    """
    if not outputs:
        return TorchrunEngine  # another program of this name
    _set_default(FOLDER_VARIABLE, join(outputs, _RUNS_FOLDER))
    return partial(Flyte2Engine, outputs=outputs, **fields)


def _acts_on_decisions() -> bool:
    return read_decision_mode() == ACT


def _is_last_restart() -> bool:
    """Whether JobSet probably won't start the pods again.

    Free restarts count as well, so this may be too early: then rank 0 of the next restart removes
    error.pb.
    """
    attempt, limit = (
        os.environ.get(f"JOBSET_{name}", "") for name in ("RESTART_ATTEMPT", "MAX_RESTARTS")
    )
    return not (attempt.isdecimal() and limit.isdecimal()) or int(attempt) >= int(limit)


def _get_handover_folder(checkpoint: str) -> str:
    """Return the folder of the verdict next to a checkpoint:
    the checkpoint itself is one object.
    """
    return f"{checkpoint.rstrip('/')}.firstfault" if checkpoint else ""


def _encode_error(sealed: SealedVerdict) -> bytes:
    """Return the error that Flyte reads: as a0's own it is recoverable, and the user's,
    unless proven otherwise.

    The sealed decision has the kind for Flyte 1, which retries no error without a known cause.
    """
    if sealed.decision.action in _EXCEPTION_NAMES:
        return sealed.document
    return encode_seal(replace(sealed.seal, kind=Kind.RECOVERABLE, origin=Origin.USER))


def _put(folder: str, name: str, document: bytes) -> bool:
    put_file(folder, name, document)
    return True


def _write_report(outputs: str, report: Report) -> None:
    """Write the task's report, unless the task has published one."""
    from flyte import storage  # noqa: PLC0415 - only a failure needs it
    from flyte.report import Report as Flyte2Report  # noqa: PLC0415 - as above

    from firstfault.render.html import deck_html  # noqa: PLC0415 - as above

    existing = get_file(outputs, _REPORT_FILE)
    if existing is None or _REPORT_MARK.encode() in existing:
        page = Flyte2Report(_REPORT_TAB)
        page.get_tab(_REPORT_TAB).log(f"{_REPORT_MARK}\n{deck_html(report)}")
        # for S3 and for Google's storage, as `flyte.report.flush` does: Flyte's page opens it in a
        # frame
        attributes = {"Content-Type": "text/html", "content_type": "text/html"}
        data = str(page.get_final_report()).encode()
        asyncio.run(
            storage.put_stream(data, to_path=join(outputs, _REPORT_FILE), attributes=attributes)
        )
