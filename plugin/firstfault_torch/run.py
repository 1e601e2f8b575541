"""Runs one node of a job: its workers under a reporting agent, and the verdict if the job fails."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from firstfault_torch.agent.launch import LaunchFailedError, launch_agent
from firstfault_torch.agent.signals import SignalWatch
from firstfault_torch.context import Recording, new_incarnation, node_address
from firstfault_torch.error_file import ERROR_FILE_VARIABLE, write_error_file
from firstfault_torch.guard import bounded, guarded, logger
from firstfault_torch.node.document_writer import end_node_recorder, node_recorder
from firstfault_torch.options import Options
from firstfault_torch.verdict.node_verdict import Wait, conclude_on_node
from firstfault_torch.verdict.previous import leave_verdict
from firstfault_torch.verdict.seal import SealedVerdict, seal_verdict, torch_error_data
from firstfault_torch.worker.recording import run_recorded

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from torch.distributed.launcher.api import LaunchConfig

    from firstfault_torch.agent.reporter import NodeReport
    from firstfault_torch.engine import Engine

__all__ = ["NodeFailedError", "launch", "recording_of", "run_node"]

_LAST_SECONDS = 1.5
"""Longest wait for the other nodes after a signal to this process."""
_NOW_S = 1.0
"""The same where the main thread is blocked."""
_NAME_SERVICE_S = 1.0


class NodeFailedError(Exception):
    """The job failed.

    Args:
        error: what torch raised: ChildFailedError, SignalException, an error of the agent itself, or PeerFailedError
            if another node failed.
        report: what this node has written about it.
        verdict: on the whole job; None if firstfault itself failed.
    """

    def __init__(self, error: Exception, report: NodeReport, verdict: SealedVerdict | None) -> None:
        super().__init__(verdict.conclusion.verdict.headline if verdict is not None else str(error))
        self.error = error
        self.report = report
        self.verdict = verdict


def launch(
    config: LaunchConfig, function: Callable[..., Any], *args: Any, engine: Engine, options: Options | None = None
) -> dict[int, Any]:
    """Run ``function(*args)`` in each of this node's worker processes; return their results by global rank.

    It is ``torch.distributed.launcher.api.elastic_launch`` with error documents, one verdict for all nodes, and the
    failure's traceback.

    Args:
        config: torch's.
        function: what each worker runs; for the start method "spawn" it can be pickled.
        args: its arguments.
        engine: that runs the attempt, such as `PlainEngine`.
        options: time limits, strategy and retry policy.

    Raises:
        NodeFailedError: a worker failed, here or on another node, or the agent failed or was terminated.
    """
    return run_node(config, run_recorded, (engine, function, *args), engine=engine, options=options or Options())


def run_node(
    config: LaunchConfig,
    entrypoint: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    engine: Engine,
    options: Options,
) -> dict[int, Any]:
    """Run as `launch` does; the entrypoint itself records (`firstfault_torch.worker.recording.recorded`)."""
    recording = recording_of(engine, options)
    with SignalWatch() as signals, node_recorder(recording) as recording:
        try:
            results = launch_agent(
                config,
                entrypoint,
                args,
                recording,
                stop_seconds=options.stop_seconds,
                signals=signals,
                last_resort=partial(_end_process, engine=engine, options=options),
            )
            engine.await_exit(has_rank_0=0 in results, give_up=signals.gave_up)
        except LaunchFailedError as failure:
            raise _failed(failure, engine, options, signals.gave_up) from failure.error
        finally:
            if recording.identity.owns_process:
                signals.leave()
    return results


def recording_of(engine: Engine, options: Options) -> Recording:
    """Return where and how this node records."""
    return Recording(
        strategy=options.strategy,
        identity=engine.identity(),
        upload_deadline_seconds=options.upload_deadline_seconds,
        incarnation=new_incarnation(),
        ip=bounded(node_address, _NAME_SERVICE_S, "looking up the node's address") or "",
    )


def _failed(failure: LaunchFailedError, engine: Engine, options: Options, give_up: threading.Event) -> NodeFailedError:
    """Conclude, seal and publish."""
    sealed = _sealed(failure, engine, options, _wait(failure, options, give_up))
    sealed = sealed or _sealed(failure, engine, options, Wait(0.0, heard_by=failure.heard_by))
    if sealed is not None:
        if sealed.report.decision.retry:
            leave_verdict(failure.recording, sealed.document, give_up)
        logger.error("%s", sealed.seal.message)
        with guarded("reporting to the outer launcher"):
            _report_to_outer_launcher(sealed)
        with guarded("publishing the verdict"):
            engine.publish(sealed, give_up=give_up)
    return NodeFailedError(failure.error, failure.report, sealed)


def _wait(failure: LaunchFailedError, options: Options, give_up: threading.Event) -> Wait:
    if give_up.is_set():
        return Wait(min(options.settle_seconds, _LAST_SECONDS), heard_by=failure.heard_by)
    return Wait(options.settle_seconds, heard_by=failure.heard_by, give_up=give_up)


def _sealed(failure: LaunchFailedError, engine: Engine, options: Options, wait: Wait) -> SealedVerdict | None:
    with guarded("concluding on the failure"):
        conclusion = conclude_on_node(failure.recording, failure.report.failures, engine, options, wait)
        return seal_verdict(conclusion, failure.recording)
    return None


def _end_process(failure: LaunchFailedError, *, engine: Engine, options: Options) -> None:
    """Publish and exit, from another thread than the main one, which waits inside C++ and handles no signal."""
    sealed = _sealed(failure, engine, options, Wait(_NOW_S, heard_by=failure.heard_by))
    with guarded("leaving the sealed verdict"):
        if sealed is not None:
            logger.error("%s", sealed.seal.message)
            engine.publish(sealed, leaving_now=True)
    end_node_recorder(failure.recording)
    os._exit(failure.recording.identity.failed_exit_code)


def _report_to_outer_launcher(sealed: SealedVerdict) -> None:
    """Under another torch agent or launcher, copy the root cause into its error file, as torch's `record` does."""
    outer = os.environ.get(ERROR_FILE_VARIABLE)
    if outer:
        write_error_file(outer, torch_error_data(sealed.conclusion))
