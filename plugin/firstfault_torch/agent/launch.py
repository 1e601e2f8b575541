"""Starts the agent through torch's public classes, and returns the workers' results or the failure."""

from __future__ import annotations

import dataclasses
import inspect
import os
import traceback
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from firstfault.model import NodePresence, Phase
from firstfault.wire.documents import encode
from firstfault_torch.agent.agent import PeerFailedError, ReportingAgent, environment_set
from firstfault_torch.agent.death_documents import about_agent
from firstfault_torch.agent.reporter import NodeReport
from firstfault_torch.compat import warn_once
from firstfault_torch.compat.torch_agent import missing_names
from firstfault_torch.context import Moment, node_place
from firstfault_torch.error_classes import ErrorClass, error_class_of
from firstfault_torch.guard import bounded, guarded
from firstfault_torch.launch_options import DEFAULT_SIGNALS
from firstfault_torch.node.document_writer import (
    as_entry,
    document_path,
    put_on_node,
    record_error,
    spool_for_agent,
)

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable

    from torch.distributed.launcher.api import LaunchConfig

    from firstfault_torch.agent.restarts import DecideRestart, RefusedRestart
    from firstfault_torch.agent.signals import SignalWatch
    from firstfault_torch.context import Recording
    from firstfault_torch.options import RestartsInProcess, Watchdog
    from firstfault_torch.rounds.settlement import Reports, SettledDocument

    Settle = Callable[[Callable[[Reports], bytes | None], Callable[[], bool], float], SettledDocument | None]

__all__ = ["LaunchFailedError", "launch_agent"]

_OPTIONAL_SPEC = (
    "local_addr",
    "event_log_handler",
    "numa_options",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "virtual_local_rank",
)
"""Fields of LaunchConfig that some versions of torch pass to the WorkerSpec."""
_CLOSING_S = 2.0
"""Longest wait for the rendezvous to be closed."""
_OPTIONAL_AGENT = ("log_line_prefix_template", "shutdown_timeout")


def _settle_nothing(conclude: object, publish: object, seconds: float) -> None:
    """Settle on no verdict: there are no other agents."""


class LaunchFailedError(Exception):
    """The training failed on this node.

    Args:
        error: what torch raised: ChildFailedError, SignalException, or an error of the agent itself; PeerFailedError
            if another node failed.
        report: what this node has written about it.
        recording: with the round it failed in.
        settle: settles on one verdict with the other agents, as `ReportingAgent.settle` does.
        group_rank: this node's.
        refused: the decision against a restart that ended the attempt; None: there was none.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what is known of a failure
        self,
        error: Exception,
        report: NodeReport,
        recording: Recording,
        settle: Settle = _settle_nothing,
        group_rank: int = 0,
        refused: RefusedRestart | None = None,
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.report = report
        self.recording = recording
        self.settle = settle
        self.group_rank = group_rank
        self.refused = refused

    def forget_agent(self) -> None:
        """Let the agent end: this error and its traceback hold it, and a later fork may not inherit its store."""
        self.settle = _settle_nothing
        for error in (self, self.error):
            traceback.clear_frames(error.__traceback__)


def launch_agent(  # noqa: PLR0913 - keywords
    config: LaunchConfig,
    entrypoint: Callable[..., Any],
    args: tuple[Any, ...],
    recording: Recording,
    *,
    stop_seconds: float,
    signals: SignalWatch,
    last_resort: Callable[[LaunchFailedError], None],
    decide_restart: DecideRestart | None = None,
    settle_seconds: float = 0.0,
    restarts_in_process: RestartsInProcess | None = None,
    watchdog: Watchdog | None = None,
) -> dict[int, Any]:
    """Run the workers of this node to their end; return their results by global rank.

    It does what ``torch.distributed.launcher.api.launch_agent`` does, with a `ReportingAgent`. A node without which the
    job finished returns no results.

    Args:
        config: torch's.
        entrypoint: what each worker runs.
        args: its arguments.
        recording: where and how to report.
        stop_seconds: how long workers that are stopped may take before they are killed.
        signals: receives the signals to this process.
        last_resort: ends the pod from another thread if the main thread does not handle a signal.
        decide_restart: judges a failed round before torch restarts the workers; None: torch's way.
        settle_seconds: longest wait for the other agents before a restart.
        restarts_in_process: lets the workers of a node continue after one of them has ended.
        watchdog: deadlines for the workers; None: they have none.

    Raises:
        LaunchFailedError: a worker failed, here or on another node, or the agent failed or was terminated.
    """
    agent: ReportingAgent | None = None
    shutdown: Callable[[], Any] | None = None
    signals.as_last_resort(lambda number: last_resort(_concluded(agent, _signal_error(number), recording)))
    try:
        handler = rendezvous_registry.get_rendezvous_handler(
            RendezvousParameters(
                backend=config.rdzv_backend,
                endpoint=config.rdzv_endpoint,
                run_id=config.run_id or uuid.uuid4().hex,
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                local_addr=config.local_addr,
                **config.rdzv_configs,
            )
        )
        shutdown = handler.shutdown
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = getattr(config, "signals_to_handle", DEFAULT_SIGNALS)
        arguments = {
            "spec": _spec(config, entrypoint, args, handler),
            "logs_specs": config.logs_specs or DefaultLogsSpecs(),
            "start_method": config.start_method,
            **_accepted(LocalElasticAgent, config, _OPTIONAL_AGENT),
        }
        agent = _reporting_agent(
            recording,
            stop_seconds=stop_seconds,
            min_nodes=config.min_nodes,
            settle_seconds=settle_seconds,
            signals=signals,
            decide_restart=decide_restart,
            restarts_in_process=restarts_in_process,
            watchdog=watchdog,
            **arguments,
        )
        if agent is not None:
            return _run(agent, entrypoint, config)
        with environment_set(recording.environment()):
            return _run(LocalElasticAgent(**arguments), entrypoint, config)
    except Exception as error:  # noqa: BLE001 - every error of torch is reported and raised again
        signals.notice()
        failure = _concluded(agent, error, recording)
        if isinstance(error, SignalException):
            shutdown = None  # the rendezvous stays open: another pod may take this one's place
        raise failure from failure.error
    finally:
        signals.begin_shutdown()
        if agent is not None:
            with guarded("ending the report"):
                agent.close()
        if shutdown is not None:
            # the node that hosts the store may be gone or frozen
            bounded(shutdown, _CLOSING_S, "closing the rendezvous", signals.gave_up)


def _signal_error(number: signal.Signals) -> SignalException:
    return SignalException(f"Process {os.getpid()} got signal: {number.name}", sigval=number)


def _concluded(agent: ReportingAgent | None, error: Exception, recording: Recording) -> LaunchFailedError:
    """Document the agent's own failure, if there is one, and return the launch's failure with all reports."""
    report = agent.report if agent is not None else NodeReport()
    if agent is not None and isinstance(error, RendezvousClosedError):
        # another node failed for good while this one was entering the next round
        error = agent.peer_failure() or error
    # the failure of a worker or of another node is documented already
    if not isinstance(error, ChildFailedError | PeerFailedError):
        with guarded("reporting the agent's own failure"):
            error_class = ErrorClass.PREEMPTION if isinstance(error, SignalException) else error_class_of(error)
            _report_own_failure(agent, error, error_class, recording, report)
    if agent is None:
        return LaunchFailedError(error, report, recording)
    group_rank = agent.place().group_rank or 0
    return LaunchFailedError(error, agent.report, agent.recording, agent.settle, group_rank, agent.refused)


def _reporting_agent(recording: Recording, **arguments: Any) -> ReportingAgent | None:
    """Return the agent; None if this torch lacks a name that it needs: then torch's own agent runs the workers."""
    missing = missing_names()
    if not missing:
        agent = ReportingAgent(recording=recording, **arguments)
        missing = missing_names(agent)
        if not missing:
            return agent
        agent.close()
    warn_once(f"{', '.join(missing)} of its agent", "torch's own agent runs the workers; only they write documents")
    return None


def _run(agent: LocalElasticAgent, entrypoint: Callable[..., Any], config: LaunchConfig) -> dict[int, Any]:
    if config.metrics_cfg:
        with guarded("setting up torch's metrics"):
            metrics.initialize_metrics(MetricsConfig(config.metrics_cfg))
    try:
        result = agent.run()
    except Exception:
        _record(agent.get_event_failed, config)
        raise
    _record(agent.get_event_succeeded, config)  # of the agent, whatever became of its workers
    if result is None:
        return {}  # torch logs "Rendezvous gracefully exited" and has no result
    if result.is_failed():
        raise ChildFailedError(name=getattr(entrypoint, "__name__", "worker"), failures=result.failures)
    return dict(result.return_values)


def _record(event: Callable[[], Any], config: LaunchConfig) -> None:
    handler = getattr(config, "event_log_handler", "null")
    if handler != "null":  # an event asks the name service
        with guarded("recording torch's event"):
            events.record(event(), handler)


def _static_address(config: LaunchConfig) -> dict[str, Any]:
    """Return the address of the workers' store with torch's static rendezvous; else none: the round's store tells."""
    if config.rdzv_backend != "static":
        return {}
    host, _, port = config.rdzv_endpoint.strip().rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"rdzv_endpoint must be <host>:<port> for a static rendezvous, not {config.rdzv_endpoint!r}")
    return {"master_addr": host.strip("[]"), "master_port": int(port)}


def _spec(config: LaunchConfig, entrypoint: Callable[..., Any], args: tuple[Any, ...], handler: Any) -> WorkerSpec:
    known = {item.name for item in dataclasses.fields(WorkerSpec)}
    optional = {name: getattr(config, name) for name in _OPTIONAL_SPEC if name in known and hasattr(config, name)}
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=args,
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        **optional,
        **_static_address(config),
    )


def _accepted(function: Callable[..., Any], config: LaunchConfig, names: tuple[str, ...]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: getattr(config, name) for name in names if name in parameters and hasattr(config, name)}


def _report_own_failure(
    agent: ReportingAgent | None, error: Exception, error_class: ErrorClass, recording: Recording, report: NodeReport
) -> None:
    if agent is not None:
        agent.record_own_failure(error, error_class)
        return
    # there is no agent yet: no round, no ranks
    place = replace(node_place(recording), incarnation=recording.incarnation)
    failure = about_agent(error, error_class, place, Moment.now())
    receipt = record_error(failure, recording, spool_for_agent(recording), recording.upload_deadline_seconds)
    entry = as_entry(NodePresence(Phase.FAILED, place, receipts=(receipt,), timestamp_ns=failure.timestamp_ns))
    report.receipts.append(receipt)
    report.copies.update({document_path(receipt.name): encode(failure), entry[0]: entry[1]})
    put_on_node(*entry, recording, recording.upload_deadline_seconds)
