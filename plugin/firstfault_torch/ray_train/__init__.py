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

import queue
from typing import Any

from ray.train.v2._internal.execution.callback import (
    ControllerCallback,
    WorkerCallback,
    WorkerGroupCallback,
)
from ray.train.v2._internal.execution.context import TrainRunContext, get_train_context

from firstfault.store import join
from firstfault_start import is_off
from firstfault_torch.guard import suppress_internal_errors
from firstfault_torch.torchrun.integration import Integration


class TrainingStoppedError(RuntimeError):
    """Ends the retries of a training: another attempt would fail with the same fault.
    The text is the report.
    """


class StopRepeatedFaults(Integration, ControllerCallback, WorkerGroupCallback, WorkerCallback):
    """Records the workers of a training, and stops it after a fault that a retry would repeat.

    Not a `UserCallback`: Ray calls those only from ``RunConfig(callbacks=...)``, which takes this
    one, too.

    The documents go to `FIRSTFAULT_FOLDER`, else to ``firstfault-runs`` in the run's folder.
    """

    launcher = "Ray"

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        """Name the folder of all attempts."""
        if is_off():
            return
        with suppress_internal_errors("preparing to record"):
            config = train_run_context.get_run_config()
            storage = join(str(config.storage_path), str(config.name))
            self.begin_run(storage, f"{config.name}-{train_run_context.run_id[:8]}")

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Count the attempt that begins; runs on the controller."""
        with suppress_internal_errors("counting an attempt"):
            self.begin_attempt(worker_group_context.num_workers)

    def after_init_train_context(self) -> None:
        """Begin to record this worker."""
        if not self.run:
            return
        with suppress_internal_errors("preparing to record"):
            context = get_train_context()
            self.begin(context.get_world_rank(), context.get_local_rank(), context.get_world_size())
            # no public hook
            context.execution_context.training_thread_runner._exc_queue = _Errors()  # noqa: SLF001

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Conclude on a failed attempt; runs on the controller.

        Raises:
            TrainingStoppedError: a retry would only repeat the fault.
        """
        report = ""
        with suppress_internal_errors("looking for failed workers"):
            # Ray keeps polling a preempted group until all of its ranks have ended.
            if self.run and worker_group_status.errors:
                report = self.judge(lambda: not _is_preempted(worker_group_status))
        if report:
            raise TrainingStoppedError(report)


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
            Integration.record_exception(getattr(item, "_base_exc", item))
        elif not self._has_failed:
            Integration.record_exit()
        super().put(item, *arguments, **options)
