"""The elastic agent of one node, and its launch.

The life of a round. torch calls these hooks of `ReportingAgent` in this order:

    join     _rendezvous        meets the other nodes, and numbers the round alike on all of them
    start    _start_workers     starts the workers, watches them, and connects to the other agents
    watch    _monitor_workers   waits for an event or torch's interval, then looks, again and again:
               the workers live      it returns HEALTHY, and is called again
               a worker failed       it tells the other agents, stops the other workers, reports, and returns FAILED
               another node failed   it stops the workers, reports, and raises PeerFailedError
    restart                     if restarts are left, the agents decide on one together: _stop_workers, then "join"
    finish   _exit_barrier      waits until the workers of all nodes have succeeded
    end      _shutdown, close   ends the workers that are left, and after the uploads all threads

`launch_agent` returns how the last round ended; `run_node` then settles on a verdict with the other nodes.

torch decides when a worker counts as failed, how often workers restart, and how nodes meet. A hook does firstfault's
part, and lets torch do its own. firstfault's part is guarded: if it breaks, this is a plain LocalElasticAgent and one
warning.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.launcher.api import LaunchConfig

from firstfault.model import TERMINATED, Phase, RestartRecord
from firstfault_torch.agent.local_workers import ObservedLogs
from firstfault_torch.agent.node_round import AgentSettings, NodeRound
from firstfault_torch.agent.reporter import Death, NodeReport, Reporter, about_agent
from firstfault_torch.agent.signals import suppress_internal_errors_in_main
from firstfault_torch.compat import torch_agent, warn_once
from firstfault_torch.failures.failure_records import ErrorClass, error_class_of
from firstfault_torch.guard import call_with_timeout, suppress_internal_errors, try_call
from firstfault_torch.node.channel import starting
from firstfault_torch.node_context import Moment, NodeContext
from firstfault_torch.options import DEFAULT_SIGNALS, with_node
from firstfault_torch.places import get_node_place
from firstfault_torch.rounds.failure_broadcast import FirstFailure, Rendezvous, begin_round, has_shared_store
from firstfault_torch.rounds.peers import Peers
from firstfault_torch.time_limits import RENDEZVOUS_CLOSE_TIMEOUT_SECONDS
from firstfault_torch.watchdog import TORCH_ENABLED_VARIABLE

_FAILED = {WorkerState.FAILED, WorkerState.UNHEALTHY}
_NO_PAUSE = 1e-6
"""torch's sleep between two looks at the workers: here `monitor_workers` itself waits, and is woken by events."""


class PeerFailedError(Exception):
    """Another node failed; this node's workers were stopped because of it."""

    def __init__(self, failure: FirstFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class MissingNamesError(Exception):
    """This torch's agent lacks private names that `ReportingAgent` needs."""


class ReportingAgent(LocalElasticAgent):
    """torch's LocalElasticAgent, which also tells the other agents of failures and reports why its workers ended.

    Raises:
        MissingNamesError: torch's agent does not have all hooks and attributes.
    """

    def __init__(self, node_context: NodeContext, settings: AgentSettings, *, spec: WorkerSpec, **kwargs: Any) -> None:
        handler: Any = Rendezvous(spec.rdzv_handler)
        logs = kwargs["logs_specs"] = ObservedLogs(kwargs["logs_specs"])
        super().__init__(spec=replace(spec, monitor_interval=_NO_PAUSE, rdzv_handler=handler), **kwargs)
        if missing := torch_agent.missing_names(self):
            raise MissingNamesError(", ".join(missing))
        self._interval = spec.monitor_interval
        self._stop_seconds = settings.options.stop_seconds
        self._terminated_seconds = settings.options.terminated_stop_seconds or self._stop_seconds
        self._signals = settings.signals
        self._load = settings.load
        self._log_template: str | None = getattr(self, "_log_line_prefix_template", None)
        self.node = NodeRound(self._worker_group, node_context, settings)
        self._rounds = 0
        self._refused = 0
        """Restarts that torch had left and that the agents decided against."""
        logs.prepare = self.node.workers.prepare
        self._signals.on_received = self.node.report_signal
        torch_agent.format_exceptions_early()

    # --- torch's hooks ------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join the rendezvous, and number the round alike on all nodes."""
        with suppress_internal_errors_in_main("ending a round"):
            if self._rounds:
                self.node.end(is_last=False)
        super()._rendezvous(worker_group)
        # if the nodes cannot agree on a number, it at least differs from the last round's
        number = self.node.reporter.node_context.round + 1 if self._rounds else 0
        self._rounds += 1
        with suppress_internal_errors_in_main("numbering the round"):
            # first: the other nodes wait for it
            counted = self._rounds if has_shared_store(worker_group) else 0
            number = begin_round(worker_group.store, worker_group.group_rank, number, counted)
        with suppress_internal_errors_in_main("beginning a round"):
            used = worker_group.spec.max_restarts - self._remaining_restarts - self._refused
            self.node.begin(number, self._remaining_restarts, used)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers, then watch them and listen to the other nodes."""
        node = self.node
        with suppress_internal_errors_in_main("preparing the workers' deadlines"):
            self._worker_watchdog = node.workers.open_timers()  # torch stops it with the workers
        with suppress_internal_errors_in_main("filling in the prefix of log lines"):
            if self._log_template:
                place = node.places.of()
                values = {"group_rank": place.group_rank, "node": place.node}
                self._log_line_prefix_template = with_node(self._log_template, values)
        # spawned and forked workers both inherit this process's environment; torch's own watchdog would kill the agent
        variables = torch_agent.flight_recorder_variables(os.environ)
        with suppress_internal_errors_in_main("telling the workers where to record"):
            variables = {**variables, **node.reporter.node_context.environment()}
        if TORCH_ENABLED_VARIABLE in os.environ:
            variables[TORCH_ENABLED_VARIABLE] = "0"
        try:
            with starting(node.reporter.node_context.files), environment_set(variables):
                ids: dict[int, Any] = super()._start_workers(worker_group)
        except Exception:
            with suppress_internal_errors_in_main("connecting the agents"):  # the workers of the others wait for these
                node.listen_to_peers(self._interval)
            raise
        with suppress_internal_errors_in_main("watching the workers"):
            self._signals.install()
            node.workers.started(self._pcontext, node.places.ranks)
        with suppress_internal_errors_in_main("connecting the agents"):
            node.listen_to_peers(self._interval)
        with suppress_internal_errors_in_main("keeping a record of the restart"):
            node.restarts.began_again(node.places.of(0).world_size)
        with suppress_internal_errors_in_main("looking for the workers' progress"):
            node.watch_progress()
        with suppress_internal_errors_in_main("loading what a failure needs"):
            self._load()
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait for an event or the interval, and report a failure.

        Raises:
            PeerFailedError: another node has failed.
        """
        node = self.node
        node.wake.wait(self._interval)
        node.wake.clear()
        if node.peers is not None and (failure := node.peers.broadcast.failure) is not None:
            node.stop_because_of(failure)
            raise PeerFailedError(failure)
        survivors = node.survivors.look(worker_group, self._pcontext) if node.survivors is not None else None
        if survivors is not None:
            if survivors.state is WorkerState.HEALTHY:
                self._restart_with_a_failed_peer(worker_group)
            return survivors
        failed: list[Death] = []
        with suppress_internal_errors_in_main("looking at the workers"):
            failed = node.look()
        looked_ns = time.monotonic_ns()
        result = self._failed_result(failed) if failed else self._result_of_torch(worker_group)
        if result.state in _FAILED:
            with suppress_internal_errors_in_main("reporting a failure"):
                node.report_failure(result, looked_ns)
            if node.asks and not node.may_restart():
                # torch takes this failure for the last one
                self._refused += self._remaining_restarts
                self._remaining_restarts = 0
        elif result.state is WorkerState.HEALTHY:
            self._restart_with_a_failed_peer(worker_group)
        return result

    def _exit_barrier(self) -> None:
        """Wait for the other nodes, without torch's limit of 300 s.

        Raises:
            PeerFailedError: another node has failed.
        """
        node = self.node
        with suppress_internal_errors_in_main("reporting success"):
            node.reporter.announce(Phase.SUCCEEDED, node.places.ranks)
        if node.peers is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]
        else:
            node.waits_at_exit = True
            try:
                failure = node.peers.await_all(node.wake)
            finally:
                node.waits_at_exit = False
            if failure is not None:
                raise PeerFailedError(failure)
        node.finished = True
        # the job has succeeded: a signal must not keep its outputs from being written
        self._signals.begin_shutdown()

    def _stop_workers(self, worker_group: WorkerGroup, **more: Any) -> None:
        """Ask and stop the workers before torch does so, after a failure or when nodes join."""
        with suppress_internal_errors_in_main("stopping the workers"):
            self.node.stop_workers("a new rendezvous begins")
        super()._stop_workers(worker_group, **more)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30, **more: Any) -> None:
        """Ask and stop the workers before torch does so."""
        terminated = self._signals.shutdown_requested.is_set()
        seconds = self._stop_seconds
        if terminated:
            self._signals.notice()
            seconds = self._terminated_seconds
        with suppress_internal_errors_in_main("stopping the workers"):
            if terminated:
                self.node.stop_workers(TERMINATED, death_sig, seconds)
            else:
                self.node.stop_workers("its agent had failed")
        super()._shutdown(death_sig, **torch_agent.shutdown_timeout(max(1, min(timeout, round(seconds)))), **more)

    def close(self) -> None:
        """End all threads, after the uploads, each bounded by the deadline."""
        self._signals.on_received = None
        self.node.end(is_last=True)

    # --- parts of `_monitor_workers` ----------------------------------------------------------------------------

    def _result_of_torch(self, group: WorkerGroup) -> RunResult:
        """Let torch look at the workers.

        A worker that ends while torch writes its exception leaves half a file; torch raises when it reads or prints it.
        """
        found, error = try_call(partial(super()._monitor_workers, group), Exception)
        if error is not None:
            deaths = self.node.workers.deaths()
            if isinstance(error, SignalException) or not deaths:
                raise error
            return self._failed_result(deaths)
        result = cast("RunResult", found)
        failures = {
            rank: torch_agent.process_failure(failure.local_rank, failure.pid, failure.exitcode, failure.error_file)
            for rank, failure in result.failures.items()
        }
        return replace(result, failures=failures)

    def _failed_result(self, deaths: list[Death]) -> RunResult:
        """Return a result as torch's, about the worker that failed first, and log that failure as torch does.

        Torch's own result and log name the failure that it finds first, which may be a stopped sibling; or none, while
        a child of the dead process keeps its sentinel open.
        """
        files, stopped = self.node.reporter.report.error_files, self.node.workers.stopped
        reported = stopped.first if stopped is not None else frozenset()
        first = next((death for death in deaths if death.local_rank in reported), deaths[0])
        if stopped is None or first.local_rank in reported:
            with suppress_internal_errors_in_main("logging a failure"):
                torch_agent.log_failure(self._pcontext, first.local_rank, first.pid, first.exit_code)
        file = files.get(first.local_rank, "")
        failure = torch_agent.process_failure(first.local_rank, first.pid, first.exit_code, file)
        return RunResult(WorkerState.FAILED, failures={self.node.places.rank_of(first.local_rank) or 0: failure})

    def _restart_with_a_failed_peer(self, group: WorkerGroup) -> None:
        """If another node's failure asks, stop the workers, decide with the other agents, and restart or leave.

        Raises:
            PeerFailedError: the workers are not restarted.
        """
        peers = self.node.peers
        failure = peers.broadcast.asking if peers is not None else None
        if peers is None or failure is None:
            return
        self.node.stop_because_of(failure)
        if not self.node.may_restart():
            raise PeerFailedError(peers.broadcast.failure or failure)
        # as in torch, a node whose own workers had not failed uses up no restart
        self._restart_workers(group)


@contextlib.contextmanager
def environment_set(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- launch -----------------------------------------------------------------------------------------------------------

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
    """What the workers returned, by global rank; empty if the job finished without this node. None: it failed."""
    error: Exception | None = None
    """What torch raised: ChildFailedError, SignalException, or an error of the agent itself; PeerFailedError if another
    node failed. None: the workers succeeded."""
    group_rank: int = 0
    """This node's."""
    refused: RestartRecord | None = None
    """The decision against a restart that ended the attempt; None: there was none."""
    peers: Peers | None = None
    """The other agents; None: there are none, or the round had not begun."""


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


def job_of(config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: tuple[Any, ...]) -> Job:
    """Return a job as ``torch.distributed.launcher.api.elastic_launch(config, entrypoint)(*args)`` runs it."""
    signals = getattr(config, "signals_to_handle", DEFAULT_SIGNALS)

    def prepare() -> Prepared:
        handler = _rendezvous(config)
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals
        arguments = {
            "spec": _spec(config, entrypoint, args, handler),
            "logs_specs": config.logs_specs or DefaultLogsSpecs(),
            "start_method": config.start_method,
            **_accepted(LocalElasticAgent, config, _OPTIONAL_AGENT),
        }
        return Prepared(arguments, lambda agent: _run(agent, config), handler.shutdown)

    return Job(config.min_nodes, config.max_restarts, signals, prepare)


def launch_agent(
    job: Job, node_context: NodeContext, settings: AgentSettings, last_resort: Callable[[RoundEnd], None]
) -> RoundEnd:
    """Run the workers of this node to their end with a `ReportingAgent`; return how they ended.

    `last_resort` ends the pod from another thread if the main thread does not handle a signal.
    """
    agent: ReportingAgent | None = None
    shutdown: Callable[[], Any] | None = None
    signals = settings.signals

    def end_pod(number: signal.Signals) -> None:
        error = SignalException(f"Process {os.getpid()} got signal: {number.name}", sigval=number)
        last_resort(_failed(agent, error, node_context))

    signals.last_resort = end_pod
    try:
        arguments, run, shutdown = job.prepare()
        try:
            agent = ReportingAgent(node_context, settings, **arguments)
        except MissingNamesError as error:
            warn_once(f"{error} of its agent", "torch's own agent runs the workers; only they write documents")
        if agent is not None:
            results = run(agent)
            return RoundEnd(agent.node.reporter.node_context, agent.node.reporter.report, results)
        with environment_set(node_context.environment()):
            return RoundEnd(node_context, NodeReport(), run(LocalElasticAgent(**arguments)))
    except Exception as error:  # noqa: BLE001 - every error of torch is reported and returned
        signals.notice()
        if isinstance(error, SignalException):
            shutdown = None  # the rendezvous stays open: another pod may take this one's place
        return _failed(agent, error, node_context)
    finally:
        signals.begin_shutdown()
        if agent is not None:
            with suppress_internal_errors("ending the report"):
                agent.close()
        if shutdown is not None:
            # the node that hosts the store may be gone or frozen
            call_with_timeout(
                shutdown, RENDEZVOUS_CLOSE_TIMEOUT_SECONDS, "closing the rendezvous", signals.shutdown_requested
            )


def _rendezvous(config: LaunchConfig) -> RendezvousHandler:
    return rendezvous_registry.get_rendezvous_handler(
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


def _failed(agent: ReportingAgent | None, error: Exception, node_context: NodeContext) -> RoundEnd:
    """Document the agent's own failure, if there is one, and return the end of the round with all reports."""
    peers = agent.node.peers if agent is not None else None
    if peers is not None and isinstance(error, RendezvousClosedError):
        # another node failed for good while this one was entering the next round
        failure = peers.broadcast.fatal_failure()
        error = PeerFailedError(failure) if failure is not None else error
    report = NodeReport()
    # the failure of a worker or of another node is documented already
    if not isinstance(error, ChildFailedError | PeerFailedError):
        with suppress_internal_errors("reporting the agent's own failure"):
            error_class = ErrorClass.PREEMPTION if isinstance(error, SignalException) else error_class_of(error)
            if agent is not None:
                agent.node.report_agent(error, error_class)
            else:  # before there is a round, and ranks
                place = replace(get_node_place(node_context), incarnation=node_context.incarnation)
                reporter = Reporter(node_context, lambda _: place)
                reporter.write(about_agent(error, error_class, place, Moment.now()))
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
        refused=node.restarts.refused,
        peers=node.peers,
    )


def _run(agent: LocalElasticAgent, config: LaunchConfig) -> dict[int, Any]:
    if config.metrics_cfg:
        with suppress_internal_errors("setting up torch's metrics"):
            metrics.initialize_metrics(MetricsConfig(config.metrics_cfg))
    try:
        results = results_of(agent)
    except ChildFailedError:
        _record(agent.get_event_succeeded, config)
        raise
    except Exception:
        _record(agent.get_event_failed, config)
        raise
    _record(agent.get_event_succeeded, config)  # of the agent, whatever became of its workers
    return results


def results_of(agent: LocalElasticAgent) -> dict[int, Any]:
    """Run an agent; return what the workers returned, by global rank.

    Raises:
        ChildFailedError: a worker failed.
    """
    result = agent.run()
    if result is None:
        return {}  # torch logs "Rendezvous gracefully exited" and has no result
    if result.is_failed():
        entrypoint = agent.get_worker_group().spec.entrypoint
        raise ChildFailedError(name=getattr(entrypoint, "__name__", str(entrypoint)), failures=result.failures)
    return dict(result.return_values)


def _record(event: Callable[[], Any], config: LaunchConfig) -> None:
    handler = getattr(config, "event_log_handler", "null")
    if handler != "null":  # an event asks the name service
        with suppress_internal_errors("recording torch's event"):
            events.record(event(), handler)


def _spec(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: tuple[Any, ...], handler: Any
) -> WorkerSpec:
    optional = _accepted(WorkerSpec, config, _OPTIONAL_SPEC)
    if config.rdzv_backend == "static":  # else the round's store tells the address of the workers' store
        host, _, port = config.rdzv_endpoint.strip().rpartition(":")
        if not host or not port.isdecimal():
            where = config.rdzv_endpoint
            raise ValueError(f"rdzv_endpoint must be <host>:<port> for a static rendezvous, not {where!r}")
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


def _accepted(function: Callable[..., Any], config: LaunchConfig, names: tuple[str, ...]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: getattr(config, name) for name in names if name in parameters and hasattr(config, name)}
