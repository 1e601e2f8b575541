"""Starting the agent over torch's public classes, and what comes of it."""

from __future__ import annotations

import dataclasses
import inspect
import os
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from firstfault.keys import roster_key_for
from firstfault.model import DocumentRef, NodePresence, Phase
from firstfault.places import ROSTER
from firstfault.wire import encode_presence
from flytekitplugins.firstfault.agent import NodeReport, ReportingAgent
from flytekitplugins.firstfault.agent_documents import about_agent
from flytekitplugins.firstfault.environment import node_place
from flytekitplugins.firstfault.guard import bounded, guarded
from flytekitplugins.firstfault.in_flight import Moment
from flytekitplugins.firstfault.recorder import put_file, record_error
from flytekitplugins.firstfault.taxonomy import Sort, sort_of_agent_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.launcher.api import LaunchConfig

    from flytekitplugins.firstfault.environment import Recording

__all__ = ["LaunchFailedError", "launch"]

_OPTIONAL_SPEC = (
    "local_addr",
    "event_log_handler",
    "numa_options",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "virtual_local_rank",
)
"""Fields of LaunchConfig that some versions of torch hand on to the WorkerSpec."""
_OPTIONAL_AGENT = ("log_line_prefix_template", "shutdown_timeout")


class LaunchFailedError(Exception):
    """The training failed on this node.

    Args:
        error: what torch raised: ChildFailedError, SignalException, or an error of the agent itself.
        report: what this node has written about it.
        recording: with the round it failed in.
    """

    def __init__(self, error: Exception, report: NodeReport, recording: Recording) -> None:
        super().__init__(str(error))
        self.error = error
        self.report = report
        self.recording = recording


def launch(
    config: LaunchConfig, entrypoint: Callable[..., Any], args: tuple[Any, ...], recording: Recording
) -> dict[int, Any]:
    """Run the workers of this node to their end; return their results by global rank.

    It does what ``torch.distributed.launcher.api.launch_agent`` does, with an agent of ours. A node that is not needed
    (the job finished without it) returns nothing.

    Raises:
        LaunchFailedError: a worker failed, or the agent did.
        SignalException: the agent was told to go before there was anything to report, or after its workers' success.
    """
    agent: ReportingAgent | None = None
    shutdown: Callable[[], Any] | None = None
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
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = getattr(
            config, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
        )
        agent = ReportingAgent(
            recording=recording,
            spec=_spec(config, entrypoint, args, handler),
            logs_specs=config.logs_specs or DefaultLogsSpecs(),
            start_method=config.start_method,
            **_accepted(LocalElasticAgent, config, _OPTIONAL_AGENT),
        )
        return _run(agent, entrypoint)
    except ChildFailedError as error:
        raise LaunchFailedError(error, agent.report if agent else NodeReport(), _final(agent, recording)) from error
    except SignalException as error:
        # the rendezvous stays open: another pod may take this one's place
        shutdown = None
        if agent is None or agent.succeeded:
            raise
        with guarded("reporting a signal"):
            agent.record_own_failure(error, Sort.PREEMPTION)
        raise LaunchFailedError(error, agent.report, agent.recording) from error
    except Exception as error:
        report = agent.report if agent else NodeReport()
        with guarded("reporting the agent's own failure"):
            _report_own_failure(agent, error, recording, report)
        raise LaunchFailedError(error, report, _final(agent, recording)) from error
    finally:
        if agent is not None:
            with guarded("ending the report"):
                agent.close()
        if shutdown is not None:
            with guarded("closing the rendezvous"):
                shutdown()


def _run(agent: ReportingAgent, entrypoint: Callable[..., Any]) -> dict[int, Any]:
    result = agent.run()
    if result is None:
        return {}  # torch logs "Rendezvous gracefully exited" and has no result
    if result.is_failed():
        raise ChildFailedError(name=getattr(entrypoint, "__name__", "worker"), failures=result.failures)
    return dict(result.return_values)


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
    )


def _accepted(function: Callable[..., Any], config: LaunchConfig, names: tuple[str, ...]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: getattr(config, name) for name in names if name in parameters and hasattr(config, name)}


def _final(agent: ReportingAgent | None, recording: Recording) -> Recording:
    return agent.recording if agent is not None else recording


def _report_own_failure(
    agent: ReportingAgent | None, error: Exception, recording: Recording, report: NodeReport
) -> None:
    sort = sort_of_agent_error(error)
    if agent is not None:
        agent.record_own_failure(error, sort)
        return
    # before there was an agent: no round, no ranks
    place = replace(node_place(recording), incarnation=recording.incarnation)
    failure = about_agent(error, sort, place, Moment.now())
    receipt = record_error(failure, recording.output_prefix, None, recording.upload_deadline_seconds)
    report.failures.append(replace(failure, documents=(DocumentRef(receipt.name),)))
    report.receipts.append(receipt)
    presence = NodePresence(Phase.FAILED, place, receipts=(receipt,), timestamp_ns=failure.timestamp_ns)
    path, data = f"{ROSTER}/{roster_key_for(presence)}", encode_presence(presence)
    bounded(
        lambda: put_file(recording.output_prefix, path, data), recording.upload_deadline_seconds, "writing the roster"
    )
