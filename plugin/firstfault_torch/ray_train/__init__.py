"""Ray Train, version 2: ``RAY_TRAIN_CALLBACKS=firstfault_torch.ray_train.StopRepeatedFaults``;
docs/start/ray.md.

Ray's controller retries a failed training up to ``max_failures`` times, whatever the failure was.
The callback records each worker, and stops retries that would only repeat the fault:

    controller   after_controller_start           name the run's folder
    controller   before_worker_group_start        count the attempts, because Ray doesn't name them
    worker       after_init_train_context         begin to record this rank
    worker       _Errors.put                      record the exception before Ray turns it into text
    controller   after_worker_group_poll_status   conclude; raise, which ends the retries
"""

from __future__ import annotations

import os
import queue
import time
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ray.train.v2._internal.execution.callback import (
    ControllerCallback,
    WorkerCallback,
    WorkerGroupCallback,
)
from ray.train.v2._internal.execution.context import TrainRunContext, get_train_context

from firstfault.conclude import find_judgment
from firstfault.decision_mode import ACT, OBSERVE, read_decision_mode
from firstfault.layout import VERDICT_JSON
from firstfault.model.job import Action
from firstfault.attempt_reader import AttemptReader
from firstfault.render.flyte_message import flyte_message
from firstfault.retry import RetryContext, find_machine
from firstfault.store import join, split_name
from firstfault.wire.json_schemas import to_json
from firstfault_start import OWN_RANK, is_off
from firstfault_torch.guard import call_with_timeout, logger, suppress_internal_errors
from firstfault_torch.node.document_writer import put_file
from firstfault_torch.time_limits import (
    HANDOVER_TIMEOUT_SECONDS,
    RAY_CONCLUDE_TIMEOUT_SECONDS,
    RAY_SETTLE_SECONDS,
)
from firstfault_torch.torchrun import rank
from firstfault_torch.torchrun.job_folder import given_folder
from firstfault_torch.torchrun.job_names import read_job_names
from firstfault_torch.torchrun.settings import ATTEMPT_VARIABLE, FOLDER_VARIABLE, JOB_VARIABLE


class _Previous(NamedTuple):
    """How the previous attempt failed; empty if it was preempted or left no document."""

    fingerprint: str = ""
    machine: str = ""
    failed_starts: int = 0


class TrainingStoppedError(RuntimeError):
    """Ends the retries of a training: another attempt would fail with the same fault.
    The text is the report.
    """


class StopRepeatedFaults(ControllerCallback, WorkerGroupCallback, WorkerCallback):
    """Records the workers of a training, and stops it after a fault that a retry would repeat.

    Not a `UserCallback`: Ray calls those only from ``RunConfig(callbacks=...)``, which takes this
    one, too.

    The documents go to `FIRSTFAULT_FOLDER`, else to ``firstfault-runs`` in the run's folder.
    """

    def __init__(self) -> None:
        self._folder = given_folder()
        self._mode = read_decision_mode()
        self._run = ""
        """Empty if nothing is recorded."""
        self._attempt = -1
        self._is_judged = False
        self._ranks = 0
        self._began_ns = 0
        self._previous = _Previous()

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        """Name the folder of all attempts, new for each run:
        a run may be repeated under its name.
        """
        if is_off():
            return
        with suppress_internal_errors("preparing to record"):
            config = train_run_context.get_run_config()
            folder = self._folder or join(
                str(config.storage_path), str(config.name), "firstfault-runs"
            )
            job = read_job_names(
                "", {JOB_VARIABLE: f"{config.name}-{train_run_context.run_id[:8]}"}
            ).job.value
            self._run = join(folder, job)

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Count the attempt that begins; runs on the controller."""
        with suppress_internal_errors("counting an attempt"):
            self._attempt, self._is_judged = self._attempt + 1, False
            self._began_ns = time.monotonic_ns()
            self._ranks = worker_group_context.num_workers

    def after_init_train_context(self) -> None:
        """Begin to record this worker."""
        if not self._run:
            return
        with suppress_internal_errors("preparing to record"):
            context = get_train_context()
            folder, job = split_name(self._run)
            os.environ.update(
                {FOLDER_VARIABLE: folder, JOB_VARIABLE: job, ATTEMPT_VARIABLE: str(self._attempt)}
            )
            OWN_RANK.append(
                (context.get_world_rank(), context.get_local_rank(), context.get_world_size())
            )
            rank.begin()
            # no public hook
            context.execution_context.training_thread_runner._exc_queue = _Errors()  # noqa: SLF001

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Conclude on a failed attempt; runs on the controller.

        Raises:
            TrainingStoppedError: a retry would only repeat the fault.
        """
        text = ""
        with suppress_internal_errors("looking for failed workers"):
            # Ray keeps polling a preempted group until all of its ranks have ended: judge the
            # attempt only once.
            if self._run and worker_group_status.errors and not self._is_judged:
                self._is_judged = True
                previous = self._previous
                self._previous = _Previous()
                if not _is_preempted(worker_group_status):
                    # It returns its results: after the timeout its thread stays behind, while the
                    # next attempt begins.
                    conclude = partial(self._conclude, previous)
                    doing = "concluding on a failed attempt"
                    conclusion = call_with_timeout(conclude, RAY_CONCLUDE_TIMEOUT_SECONDS, doing)
                    text, self._previous = conclusion or ("", _Previous())
        if text:
            raise TrainingStoppedError(text)

    def _conclude(self, previous: _Previous) -> tuple[str, _Previous]:
        """Log the report; return it if the training must stop, else an empty text,
        and how this attempt failed.
        """
        prefix = join(self._run, str(self._attempt))
        reader = AttemptReader(
            prefix, expected_nodes=self._ranks, settle_seconds=RAY_SETTLE_SECONDS
        )
        context = RetryContext(
            attempt=self._attempt,
            previous_fingerprint=previous.fingerprint,
            previous_machine=previous.machine,
            lifetime_seconds=(time.monotonic_ns() - self._began_ns) / 1e9,
            failed_starts=previous.failed_starts,
            stops_repeats=True,
        )
        conclusion = reader.conclude(context)
        if conclusion is None:
            logger.warning(
                "a worker failed, but left no document in %s; Ray decides on a retry", prefix
            )
            return "", _Previous()
        judgment = find_judgment(conclusion)
        acts = self._mode == ACT
        verdict = judgment.verdict
        decision = replace(judgment.decision, enforced=acts)
        report = reader.report(replace(conclusion, verdict=verdict, decision=decision))
        text = flyte_message(report)
        logger.error("%s", text)
        # Readers don't know the attempt before, and would decide otherwise.
        leave = partial(
            put_file,
            prefix,
            VERDICT_JSON,
            to_json(report.verdict, report.decision).encode(),
        )
        call_with_timeout(leave, HANDOVER_TIMEOUT_SECONDS, "leaving the verdict for readers")
        stops = decision.action is Action.STOP
        if stops and self._mode == OBSERVE:
            logger.warning(
                "observed: would have stopped after attempt %d: %s", self._attempt, decision.reason
            )
        before = _Previous(verdict.fingerprint, find_machine(verdict), decision.failed_starts)
        return text if stops and acts else "", before


def _is_preempted(worker_group_status: Any) -> bool:
    """Whether Ray charges this failure to its budget for preemptions, by either of its two signs.

    A watcher announces the drain of a node; else only the errors of the workers that died with the
    node show it.
    """
    return (
        worker_group_status.get_preemption_info() is not None
        or worker_group_status.has_preempted_worker()
    )


class _Errors(queue.SimpleQueue[BaseException | None]):
    """The queue in which a worker's training thread puts its exception, or None when it has ended.

    Threads that it has started, such as one that uploads a checkpoint, put theirs, too.
    """

    _has_failed = False

    def put(self, item: Any, *arguments: Any, **options: Any) -> None:
        """Record the exception before Ray sees it."""
        if item is not None:
            self._has_failed = True
            rank.record_exception(getattr(item, "_base_exc", item))
        elif not self._has_failed:
            rank.record_exit()
        super().put(item, *arguments, **options)
