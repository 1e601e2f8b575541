"""Launches one node with a `ReportingAgent`, as torch's launcher does,
and returns how its last round ended.
"""

from __future__ import annotations

import inspect
import os
import signal
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.launcher.api import LaunchConfig

from firstfault.model import RestartRecord
from firstfault_torch.agent.agent import PeerFailedError, ReportingAgent, UnsupportedTorchError
from firstfault_torch.agent.deaths import describe_agent_failure
from firstfault_torch.agent.reporter import NodeReport, Reporter
from firstfault_torch.agent.settings import AgentSettings
from firstfault_torch.compat import warn_once
from firstfault_torch.compat.torch_agent import build_process_failure
from firstfault_torch.failures.failure_records import ErrorClass, classify_error
from firstfault_torch.guard import call_with_timeout, suppress_internal_errors
from firstfault_torch.node_context import Moment, NodeContext, environment_set
from firstfault_torch.options import DEFAULT_SIGNALS
from firstfault_torch.places import get_node_place
from firstfault_torch.rounds.peers import Peers
from firstfault_torch.time_limits import RENDEZVOUS_CLOSE_TIMEOUT_SECONDS

_OPTIONAL_SPEC = (
    "local_addr",
    "event_log_handler",
    "numa_options",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "virtual_local_rank",
)
"""Fields of LaunchConfig that some versions of torch pass to the WorkerSpec."""
_OPTIONAL_AGENT = ("log_line_prefix_template", "shutdown_timeout")


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """How a node's last round ended, with results or with an error."""

    node_context: NodeContext
    """With the number of the round."""
    report: NodeReport
    """What this node has written about the round."""
    results: dict[int, Any] | None = None
    """What the workers returned, by global rank. Empty if the job finished without this node, None
    if the job failed.
    """
    error: Exception | None = None
    """What torch raised: ChildFailedError, SignalException, or an error of the agent itself;
    PeerFailedError if another node failed; None if the workers succeeded.
    """
    group_rank: int = 0
    """This node's."""
    restart_refusal: RestartRecord | None = None
    """The decision against a restart that ended the attempt, or None if there was none."""
    finished_results: dict[int, Any] = field(default_factory=dict)
    """On a failed node: what functions had returned before the failure was known, by rank."""
    peers: Peers | None = None
    """The agents of all other nodes, or None for a single node or before the round began."""


@dataclass(frozen=True, slots=True)
class Job:
    """What torch's launcher knows of a job, on one node."""

    min_nodes: int
    max_restarts: int
    signals: str
    """Names of the signals that end the agent, as torch's ``signals_to_handle`` has them."""
    prepare: Callable[[], Prepared]
    """Meets the store of the rendezvous."""


class Prepared(NamedTuple):
    """An agent that can be made and run."""

    arguments: dict[str, Any]
    """Of `LocalElasticAgent`."""
    run: Callable[[LocalElasticAgent], dict[int, Any]]
    """Runs it as torch's launcher does; returns what the workers returned, by global rank."""
    shutdown: Callable[[], Any]
    """Closes the rendezvous."""


def build_job(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: tuple[Any, ...]
) -> Job:
    """Return a job as ``torch.distributed.launcher.api.elastic_launch(config,
    entrypoint)(*args)`` runs it.
    """
    signals = getattr(config, "signals_to_handle", DEFAULT_SIGNALS)

    def prepare() -> Prepared:
        parameters = RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id or uuid.uuid4().hex,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
        handler = rendezvous_registry.get_rendezvous_handler(parameters)
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals
        arguments = {
            "spec": _build_spec(config, entrypoint, args, handler),
            "logs_specs": config.logs_specs or DefaultLogsSpecs(),
            "start_method": config.start_method,
            **_select_accepted(LocalElasticAgent, config, _OPTIONAL_AGENT),
        }
        return Prepared(arguments, lambda agent: _run(agent, config), handler.shutdown)

    return Job(config.min_nodes, config.max_restarts, signals, prepare)


def launch_agent(
    job: Job,
    node_context: NodeContext,
    settings: AgentSettings,
    last_resort: Callable[[RoundEnd], None],
) -> RoundEnd:
    """Run the workers of this node to their end with a `ReportingAgent`; return how they ended.

    `last_resort` ends the pod from another thread if the main thread doesn't handle a signal.
    """
    agent: ReportingAgent | None = None
    shutdown: Callable[[], Any] | None = None
    signals = settings.signals

    def end_pod(number: signal.Signals) -> None:
        error = SignalException(f"Process {os.getpid()} got signal: {number.name}", sigval=number)
        last_resort(_end_failed_round(agent, error, node_context))

    signals.replace_last_resort(end_pod)
    try:
        arguments, run, shutdown = job.prepare()
        try:
            agent = ReportingAgent(node_context, settings, **arguments)
        except UnsupportedTorchError as error:
            warn_once(
                f"{error} of its agent",
                "torch's own agent runs the workers, and only workers write documents",
            )
        if agent is not None:
            results = run(agent)
            node = agent.node
            return RoundEnd(
                node.reporter.node_context,
                node.reporter.report,
                results,
                peers=node.peers,
            )
        with environment_set(node_context.to_environment()):
            return RoundEnd(node_context, NodeReport(), run(LocalElasticAgent(**arguments)))
    except Exception as error:  # noqa: BLE001 - every error of torch is reported and returned
        # The exception of a signal has arrived here: the signal thread must not raise again during
        # the report, nor report this end itself.
        signals.acknowledge()
        signals.replace_last_resort(None)
        if isinstance(error, SignalException):
            shutdown = None  # the rendezvous stays open: another pod may take this one's place
        return _end_failed_round(agent, error, node_context)
    finally:
        # From here on a signal ends waits, and interrupts nothing: the uploads below are already
        # bounded.
        signals.begin_shutdown()
        if agent is not None:
            with suppress_internal_errors("ending the report"):
                agent.close()
        if shutdown is not None:
            # the node that hosts the store may be gone or frozen
            limit, doing = RENDEZVOUS_CLOSE_TIMEOUT_SECONDS, "closing the rendezvous"
            call_with_timeout(shutdown, limit, doing, signals.shutdown_requested)


def _end_failed_round(
    agent: ReportingAgent | None, error: Exception, node_context: NodeContext
) -> RoundEnd:
    """Document the agent's own failure, if there is one,
    and return the end of the round with all reports.
    """
    peers = agent.node.peers if agent is not None else None
    if peers is not None and isinstance(error, RendezvousClosedError):
        # another node failed permanently while this one was entering the next round
        failure = peers.broadcast.find_fatal_failure()
        error = PeerFailedError(failure) if failure is not None else error
    report = NodeReport()
    # the failure of a worker or of another node is documented already
    if not isinstance(error, ChildFailedError | PeerFailedError):
        with suppress_internal_errors("reporting the agent's own failure"):
            error_class = (
                ErrorClass.PREEMPTION
                if isinstance(error, SignalException)
                else classify_error(error)
            )
            if agent is not None:
                agent.node.report_agent(error, error_class)
            else:  # before there is a round, and ranks
                place = replace(get_node_place(node_context), incarnation=node_context.incarnation)
                reporter = Reporter(node_context, lambda _: place)
                reporter.write(describe_agent_failure(error, error_class, place, Moment.now()))
                reporter.finish((), None)
                reporter.drain()
                report = reporter.report
    if agent is None:
        return RoundEnd(node_context, report, error=error)
    node = agent.node
    return RoundEnd(
        node.reporter.node_context,
        node.reporter.report,
        error=error,
        group_rank=node.places.of().group_rank or 0,
        restart_refusal=node.restarts.restart_refusal,
        finished_results=node.finished_results,
        peers=node.peers,
    )


def _run(agent: LocalElasticAgent, config: LaunchConfig) -> dict[int, Any]:
    if config.metrics_cfg:
        with suppress_internal_errors("setting up torch's metrics"):
            metrics.initialize_metrics(MetricsConfig(config.metrics_cfg))
    try:
        results = run_agent(agent)
    except ChildFailedError:
        _record(agent.get_event_succeeded, config)
        raise
    except Exception:
        _record(agent.get_event_failed, config)
        raise
    _record(agent.get_event_succeeded, config)  # of the agent, however its workers ended
    return results


def run_agent(agent: LocalElasticAgent) -> dict[int, Any]:
    """Run an agent; return what the workers returned, by global rank.

    Raises:
        ChildFailedError: a worker failed.
    """
    result = agent.run()
    if result is None:
        return {}  # torch logs "Rendezvous gracefully exited" and has no result
    if result.is_failed():
        entrypoint = agent.get_worker_group().spec.entrypoint
        raise ChildFailedError(
            name=getattr(entrypoint, "__name__", str(entrypoint)), failures=result.failures
        )
    return dict(result.return_values)


def name_root_cause(error: Exception, report: NodeReport, root_ranks: Sequence[int]) -> Exception:
    """Return torch's error about the root cause if that was a worker of this node,
    else the error itself.
    """
    rank = next((rank for rank in root_ranks if rank in report.exits), None)
    if not isinstance(error, ChildFailedError) or rank is None or rank in error.failures:
        return error
    ended = report.exits[rank]
    if not ended.exit_code:
        return error  # torch treats it as a success
    file = report.error_files.get(ended.local_rank, "")
    failure = build_process_failure(ended.local_rank, ended.pid, ended.exit_code, file)
    return ChildFailedError(error.name, {rank: failure})


def _record(event: Callable[[], Any], config: LaunchConfig) -> None:
    handler = getattr(config, "event_log_handler", "null")
    if handler != "null":  # an event asks the name service
        with suppress_internal_errors("recording torch's event"):
            events.record(event(), handler)


def _build_spec(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    args: tuple[Any, ...],
    handler: Any,
) -> WorkerSpec:
    optional = _select_accepted(WorkerSpec, config, _OPTIONAL_SPEC)
    # else the workers find their store's address in the round's store
    if config.rdzv_backend == "static":
        host, _, port = config.rdzv_endpoint.strip().rpartition(":")
        if not host or not port.isdecimal():
            where = config.rdzv_endpoint
            raise ValueError(
                f"rdzv_endpoint must be <host>:<port> for a static rendezvous, not {where!r}"
            )
        optional |= {"master_addr": host.strip("[]"), "master_port": int(port)}
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=args,
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        **optional,
    )


def _select_accepted(
    function: Callable[..., Any], config: LaunchConfig, names: tuple[str, ...]
) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {
        name: getattr(config, name)
        for name in names
        if name in parameters and hasattr(config, name)
    }
