"""Running an Elastic task in a pod or in a local call: launch, hand over results, or conclude on the failure."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import cloudpickle
import flytekit
from flytekit.core.context_manager import FlyteContextManager
from flytekit.deck.deck import TimeLineDeck
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from firstfault_torch.agent.launch import LaunchFailedError, launch
from firstfault_torch.agent.signals import SignalWatch
from firstfault_torch.context import attempt_number, multi_error_files, node_name
from firstfault_torch.error_file import ERROR_FILE_VARIABLE, was_recoverable, write_error_file
from firstfault_torch.guard import bounded, guarded, logger
from firstfault_torch.node.document_writer import end_node_recorder, node_recorder, put_file
from firstfault_torch.verdict.node_verdict import newest_seal, sealed, settle, torch_error_data
from firstfault_torch.verdict.previous import leave_verdict
from firstfault_torch.worker.recording import SpawnPayload, WorkerResult, run_forked, run_spawned
from flytekitplugins.firstfault.config import parse_nnodes
from flytekitplugins.firstfault.deck.write import leave_deck
from flytekitplugins.firstfault.outputs import await_outputs, sealed_name
from flytekitplugins.firstfault.task import RecoverableVerdictSealedError, VerdictSealedError, in_pod

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from torch.distributed.launcher.api import LaunchConfig

    from firstfault.conclude import Conclusion
    from firstfault.model import WorkerError
    from firstfault_torch.context import Recording
    from flytekitplugins.firstfault.task import ElasticFunctionTask

__all__ = ["ElasticTaskError", "execute_elastic"]


_LAST_SECONDS = 1.5
"""Longest wait for the other nodes of a pod that was told to go."""
_NOW_S = 1.0
"""The same where the main thread is blocked, and longest time for writing the verdict then."""


class ElasticTaskError(FlyteUserRuntimeException, RuntimeError):
    """A local call failed for a reason that is not recoverable.

    kfpytorch documents a RuntimeError and raises a FlyteUserRuntimeException; this is both.

    Args:
        error: torch's ChildFailedError, or the agent's own error.
        timestamp: seconds since the Unix epoch of the root cause, None if not known.
    """

    def __init__(self, error: Exception, timestamp: float | None = None) -> None:
        FlyteUserRuntimeException.__init__(self, error, timestamp=timestamp)


def execute_elastic(task: ElasticFunctionTask, kwargs: dict[str, Any]) -> Any:
    """See `ElasticFunctionTask.execute`."""
    _warn_without_operator(task)
    _set_omp_num_threads(task)
    config = _launch_config(task)
    entrypoint, args = _entrypoint(task, kwargs)
    recording = task.recording()
    if recording is None:
        return _hand_over(_launch_without_us(config, entrypoint, args))
    with SignalWatch() as signals, node_recorder(recording) as recording:
        try:
            results = launch(
                config,
                entrypoint,
                args,
                recording,
                stop_seconds=task.task_config.stop_seconds,
                signals=signals,
                last_resort=lambda failure: _end_pod(task, failure),
            )
            if 0 not in results and in_pod():
                await_outputs(recording.output_prefix, signals.gave_up)
        except LaunchFailedError as failure:
            raise _failure(task, failure, signals) from failure.error
        finally:
            if in_pod():
                signals.leave()
    return _hand_over(results)


def _launch_without_us(config: LaunchConfig, entrypoint: Callable[..., Any], args: tuple[Any, ...]) -> dict[int, Any]:
    """Recording is switched off: plain torch elastic, and kfpytorch's errors."""
    from torch.distributed.launcher.api import elastic_launch  # noqa: PLC0415

    try:
        results: dict[int, Any] = elastic_launch(config=config, entrypoint=entrypoint)(*args)
    except ChildFailedError as error:
        raise _plain_failure(error) from error
    except SignalException as error:
        logger.warning("the agent was told to go (%s); this pod leaves no outputs", error)
        raise IgnoreOutputs from error
    return results


# --- before ---------------------------------------------------------------------------------------------------------


def _warn_without_operator(task: ElasticFunctionTask) -> None:
    if task.min_nodes > 1 and "PET_NNODES" not in os.environ:
        logger.warning(
            "nnodes is %s, but nothing here says that this pod belongs to a PyTorchJob (PET_NNODES is not set); "
            "the rendezvous may time out",
            task.task_config.nnodes,
        )


def _set_omp_num_threads(task: ElasticFunctionTask) -> None:
    """As torchrun does: several processes a node would otherwise each use every core."""
    if "OMP_NUM_THREADS" not in os.environ and task.task_config.nproc_per_node > 1:
        logger.info("OMP_NUM_THREADS is not set; setting it to 1 for each of this node's workers, as torchrun does")
        os.environ["OMP_NUM_THREADS"] = "1"


def _launch_config(task: ElasticFunctionTask) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig  # noqa: PLC0415 - looked up when used, as kfpytorch does

    config = task.task_config
    # the operator's own word on the number of nodes, which torchrun reads too
    min_nodes, max_nodes = parse_nnodes(os.environ.get("PET_NNODES") or config.nnodes)
    return LaunchConfig(
        run_id=flytekit.current_context().execution_id.name,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=config.nproc_per_node,
        rdzv_backend=task.rdzv_backend,
        rdzv_configs=config.rdzv_configs,
        rdzv_endpoint=os.environ.get("PET_RDZV_ENDPOINT", "localhost:0"),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        start_method=config.start_method,
    )


def _entrypoint(
    task: ElasticFunctionTask, kwargs: dict[str, Any]
) -> tuple[Callable[..., WorkerResult], tuple[Any, ...]]:
    """What each worker process runs: for spawn something picklable, for fork a closure (torch passes no keywords)."""
    function = task.task_function
    if task.task_config.start_method == "fork":

        def forked_worker() -> WorkerResult:
            return run_forked(function, kwargs)

        return forked_worker, ()
    context = flytekit.current_context()
    try:
        checkpoint = context.checkpoint
        destination, source = checkpoint._checkpoint_dest, checkpoint._checkpoint_src  # noqa: SLF001 - no public name
    except NotImplementedError:
        destination = source = None  # no checkpoints in this execution
    payload = SpawnPayload(
        function=cloudpickle.dumps(function),
        arguments=kwargs,
        raw_output_prefix=context.raw_output_prefix,
        checkpoint_dest=destination,
        checkpoint_src=source,
    )
    return run_spawned, (payload,)


# --- after ----------------------------------------------------------------------------------------------------------


def _hand_over(results: dict[int, WorkerResult]) -> Any:
    """Return what global rank 0 returned, with its decks and output metadata."""
    if 0 not in results:
        raise IgnoreOutputs
    first = results[0]
    if first is None:
        return None  # it left by sys.exit(0): to torch a success without a result
    context = flytekit.current_context()
    for deck in first.decks:
        if not isinstance(deck, TimeLineDeck):
            context.decks.append(deck)
    if first.output_metadata:
        tracker = FlyteContextManager.current_context().output_metadata_tracker
        if tracker is not None:
            tracker.add(first.return_value, first.output_metadata)
    return first.return_value


def _failure(task: ElasticFunctionTask, failure: LaunchFailedError, signals: SignalWatch) -> Exception:
    """Return what to raise for a failed launch: the sealed verdict in a pod, kfpytorch's types in a local call."""
    conclusion = _concluded(task, failure, signals.gave_up) or _concluded(task, failure, None)
    message, document = _sealed(conclusion, failure.recording)
    if conclusion is None or not document:
        return _plain_failure(failure.error)
    if conclusion.decision.retry:
        leave_verdict(failure.recording, document, signals.gave_up)
    logger.error("%s", message)
    with guarded("telling the outer launcher"):
        _tell_outer_launcher(conclusion)
    if in_pod():
        may_write = leave_deck(conclusion, failure.recording, task.name, give_up=signals.gave_up)
        kind = RecoverableVerdictSealedError if conclusion.decision.retry else VerdictSealedError
        return kind(conclusion.verdict.headline, document, leaves_deck=not may_write)
    timestamp = conclusion.verdict.timestamp_ns / 1e9 if conclusion.verdict.timestamp_ns else None
    if conclusion.decision.retry:
        recoverable: Exception = FlyteRecoverableException(message, timestamp=timestamp)
        return recoverable
    return ElasticTaskError(_with_root_first(failure, conclusion.verdict.root), timestamp=timestamp)


def _sealed(conclusion: Conclusion | None, recording: Recording) -> tuple[str, bytes]:
    """Return the message and the error.pb of a conclusion; both empty if there is none."""
    with guarded("sealing the verdict"):
        if conclusion is not None:
            seal, document = sealed(conclusion, recording, node_name())
            return seal.message, document if multi_error_files() else newest_seal(
                seal, document, recording.output_prefix
            )
    return "", b""


def _end_pod(task: ElasticFunctionTask, failure: LaunchFailedError) -> None:
    """Seal and leave, from another thread than the main one, which waits inside C++ and does not hear a signal."""
    message, document = _sealed(_concluded(task, failure, None, _NOW_S), failure.recording)
    with guarded("leaving the sealed verdict"):
        logger.error("%s", message)
        if document and in_pod():
            recording = failure.recording
            bounded(lambda: put_file(recording.output_prefix, sealed_name(), document), _NOW_S, "leaving the verdict")
    end_node_recorder(failure.recording)
    # flytekit's entrypoint ends like this too once it has uploaded an error
    os._exit(0)


def _plain_failure(error: Exception) -> Exception:
    """Return what kfpytorch raises: by the failure that torch kept, recoverable if its worker marked it so."""
    if not isinstance(error, ChildFailedError):
        return IgnoreOutputs() if isinstance(error, SignalException) else ElasticTaskError(error)
    _, first = error.get_first_failure()
    if was_recoverable(first.error_file):
        recoverable: Exception = FlyteRecoverableException(str(error), timestamp=first.timestamp)
        return recoverable
    return ElasticTaskError(error, timestamp=first.timestamp)


def _concluded(
    task: ElasticFunctionTask, failure: LaunchFailedError, give_up: threading.Event | None, seconds: float | None = None
) -> Conclusion | None:
    """Return the verdict on a failed launch, after the wait for the other nodes.

    Args:
        task: with the longest wait.
        failure: with what this node knows.
        give_up: ends the wait; None: there is none.
        seconds: longest wait; None: the task's, but little for a pod that was told to go.
    """
    if seconds is None:
        seconds = task.task_config.settle_seconds if give_up is not None else 0.0
        if give_up is not None and give_up.is_set():
            seconds, give_up = min(seconds, _LAST_SECONDS), None
    with guarded("concluding on the failure"):
        return settle(
            failure.recording,
            failure.report.failures,
            seconds=seconds,
            policy=task.task_config.retry_policy,
            attempt=attempt_number(),
            retries=task.metadata.retries,
            heard_by=failure.heard_by,
            give_up=give_up,
        )
    return None


def _with_root_first(failure: LaunchFailedError, root: WorkerError | None) -> Exception:
    """Return torch's error with the root cause in it: torch itself keeps one failure a node, not always that one."""
    error, files = failure.error, failure.report.error_files
    if not isinstance(error, ChildFailedError) or root is None:
        return error
    place = root.place
    if place.rank is None or place.local_rank not in files or place.rank in error.failures:
        return error
    first = ProcessFailure(place.local_rank, place.pid, root.exit_code or 1, files[place.local_rank])
    return ChildFailedError(error.name, {place.rank: first})


def _tell_outer_launcher(conclusion: Conclusion) -> None:
    """Under another torch agent or launcher, copy the root cause into its error file, as torch's `record` does."""
    outer = os.environ.get(ERROR_FILE_VARIABLE)
    if outer:
        write_error_file(outer, torch_error_data(conclusion))
