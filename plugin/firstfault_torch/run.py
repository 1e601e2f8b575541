"""Runs one node of a job, from launch to exit: the middle of the road in docs/project/design.md,
from top to bottom.

    launch, run_node   run the workers under a reporting agent, until its last round ends with a
                       `RoundEnd`
    end_failed_node    takes a failed node from there to its end, in these steps:
    reach_verdict      agrees on a verdict with the peer nodes, or concludes alone
    _publish           publishes it, and leaves it for the next attempt and for readers
    _report            logs it, and passes it to an outer launcher and to notifiers

After a failure `run_node` raises NodeFailedError, and its caller exits. If the main thread doesn't
handle a signal, the signal thread calls `end_failed_node`, too, and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.distributed.launcher.api import LaunchConfig

from firstfault.conclude import RestartContext, build_restart_record, explain_unused_restarts
from firstfault.decision_mode import OFF, read_decision_mode
from firstfault.layout import ROSTER, bundle_name, get_path_in_bundle
from firstfault.model import NodePresence, Phase, Place, RestartRecord
from firstfault.recorder.termination_message import write_termination_message
from firstfault.wire.documents import unpack
from firstfault_torch import time_limits
from firstfault_torch.agent.launch import (
    Job,
    RoundEnd,
    build_job,
    launch_agent,
    name_root_cause,
)
from firstfault_torch.agent.reporter import NodeReport
from firstfault_torch.agent.settings import AgentSettings
from firstfault_torch.agent.signals import SignalWatch
from firstfault_torch.agent.stop_processes import kill_orphans
from firstfault_torch.compat.torch_agent import log_root_or_first_failure
from firstfault_torch.conclusion import sealed_verdict
from firstfault_torch.conclusion.conclude_on_node import (
    Wait,
    conclude_on_node,
    import_conclusion_modules,
)
from firstfault_torch.conclusion.notifications import notify
from firstfault_torch.conclusion.previous_attempt import hand_over_verdict, with_previous_verdict
from firstfault_torch.conclusion.publishing import find_published_verdict, publish_or_adopt
from firstfault_torch.engine import Engine, Publication, find_hurry
from firstfault_torch.failures.torch_error_file import (
    ERROR_FILE_VARIABLE,
    remove_error_files,
    write_error_file,
)
from firstfault_torch.guard import (
    await_late_calls,
    call_with_timeout,
    logger,
    start_in_thread,
    suppress_internal_errors,
)
from firstfault_torch.node.document_writer import (
    as_entry,
    end_node_recorder,
    node_recorder,
    put_on_node,
)
from firstfault_torch.node.stderr_relay import flush_relays
from firstfault_torch.node_context import NodeContext
from firstfault_torch.options import Options, parse_signals
from firstfault_torch.places import look_up_address
from firstfault_torch.protocol.shutdown import ExitStep, Hurry, get_limit
from firstfault_torch.rounds.election import CollectedReports
from firstfault_torch.rounds.peers import Peers
from firstfault_torch.rounds.report_packing import ElectedVerdict, pack_copies
from firstfault_torch.worker.worker_monitor import run_recorded


class NodeFailedError(Exception):
    """The job failed.

    `error` is what torch raised: ChildFailedError, SignalException, an error of the agent itself,
    or PeerFailedError if another node failed. `verdict` is on the whole job; None if firstfault
    itself failed, or if this process had to end and the verdict `is_left_to_others`.
    """

    def __init__(
        self,
        error: Exception,
        report: NodeReport,
        publication: Publication | None,
        *,
        is_left_to_others: bool = False,
    ) -> None:
        verdict = publication.sealed if publication is not None else None
        super().__init__(verdict.verdict.headline if verdict is not None else str(error))
        self.error = error
        self.report = report
        self.verdict = verdict
        self.publication = publication
        self.is_left_to_others = is_left_to_others


@dataclass(frozen=True, slots=True)
class ExitSettings:
    """What decides how the pod of a failed node ends."""

    engine: Engine
    options: Options
    shutdown_requested: threading.Event
    """Set by a signal to this process; ends waits."""
    max_restarts: int = 0
    """Torch's."""
    leaving_now: bool = False
    """Whether the signal thread ends the process, because the main thread is blocked in C++. It
    takes part in no election, has seconds for each step, and calls no notifiers.
    """

    @property
    def hurry(self) -> Hurry:
        """How much time is left."""
        return find_hurry(self.shutdown_requested, leaving_now=self.leaving_now)


@dataclass(slots=True)
class FailedNode:
    """A node after its last round, and how far it is on its way to its end."""

    # The main thread writes these fields. The signal thread reads them if the main thread is
    # blocked: what is done isn't done again, above all no second verdict is concluded.
    end: RoundEnd
    is_settled: bool = False
    """Whether `publication` is known."""
    publication: Publication | None = None
    """None if the verdict is left to other nodes, or if firstfault itself failed."""
    is_reported: bool = False


def launch(
    config: LaunchConfig,
    function: Callable[..., Any],
    *args: Any,
    engine: Engine,
    options: Options | None = None,
) -> dict[int, Any]:
    """Run ``function(*args)`` in each of this node's worker processes;
    return their results by global rank.

    It is ``torch.distributed.launcher.api.elastic_launch`` with error documents, one verdict for
    all nodes, and the failure's traceback.

    For the start method "spawn", `function` can be pickled. `engine` runs the attempt, such as
    `PlainEngine`.

    Raises:
        NodeFailedError: a worker failed, here or on another node, or the agent failed or was
            terminated.
    """
    options = options or Options()
    with error_files_removed(config):
        run = run_recorded if options.in_process_restart is None else options.in_process_restart.run
        return run_node(
            build_job(config, run, (engine, function, *args)), engine=engine, options=options
        )


@contextlib.contextmanager
def error_files_removed(config: LaunchConfig) -> Iterator[None]:
    """Remove torch's error files after the block, where torch chose their folder;
    `run_node` itself leaves them.
    """
    try:
        yield
    finally:
        if config.logs_specs is not None:
            with suppress_internal_errors("removing torch's error files"):
                remove_error_files(config.logs_specs.root_log_dir)


def build_node_context(engine: Engine, options: Options) -> NodeContext:
    """Return where and how this node records."""
    seconds = time_limits.NAME_SERVICE_TIMEOUT_SECONDS
    return NodeContext(
        strategy=options.strategy,
        identity=engine.identity(),
        upload_deadline_seconds=options.upload_deadline_seconds,
        incarnation=time.time_ns() // 1_000_000,
        ip=call_with_timeout(look_up_address, seconds, "looking up the node's address") or "",
    )


def run_node(job: Job, *, engine: Engine, options: Options) -> dict[int, Any]:
    """Run like `launch`, with workers that record themselves (`worker.worker_monitor.recorded`)."""
    node_context = with_previous_verdict(build_node_context(engine, options))
    with (
        # The recorder ends before the signal handlers do: its last uploads must not be cut off by a
        # signal.
        SignalWatch(parse_signals(job.signals)) as signals,
        node_recorder(
            node_context, options.terminated_stop_seconds or options.stop_seconds
        ) as node_context,
    ):
        exit_settings = ExitSettings(engine, options, signals.shutdown_requested, job.max_restarts)
        asks = (
            options.restarts_follow_policy and job.max_restarts > 0 and read_decision_mode() != OFF
        )
        judge = partial(_judge_restart, exit_settings) if asks else None
        settings = AgentSettings(options, signals, job.min_nodes, judge, import_conclusion_modules)
        peers: Peers | None = None
        try:
            end = launch_agent(
                job,
                node_context,
                settings,
                lambda end: _end_process(FailedNode(end), exit_settings),
            )
            peers = end.peers
            if end.error is None:
                return _leave_with_results(end.results or {}, exit_settings)
            node = FailedNode(end)
            signals.replace_last_resort(_build_last_resort(node, exit_settings))
            end_failed_node(node, exit_settings)
            publication = node.publication
            root_ranks = publication.sealed.verdict.ranks if publication is not None else ()
            is_finished = publication is not None and engine.takes_results(publication.sealed)
            with suppress_internal_errors("letting the other nodes have the verdict"):
                if peers is not None and publication is not None:
                    peers.await_confirmations()
            # From here on the caller ends the process.
            signals.replace_last_resort(None)
            if is_finished:  # only the teardown failed
                return _leave_with_results(end.finished_results, exit_settings)
            error = end.error
            with suppress_internal_errors("naming the root cause in torch's error"):
                error = name_root_cause(error, end.report, root_ranks)
            failed = NodeFailedError(
                error,
                end.report,
                publication,
                is_left_to_others=peers is not None and peers.settlement.is_left_to_others,
            )
            # they hold the agent, and `end` its peers: a later fork must not inherit the round's
            # store
            traceback.clear_frames(failed.error.__traceback__)
            del end, node
            raise failed from failed.error
        finally:
            with suppress_internal_errors("leaving the store"):
                if peers is not None:
                    peers.close()
                    peers = None
                await_late_calls(time_limits.LATE_CALLS_TIMEOUT_SECONDS)
            with suppress_internal_errors("passing on the rest of the workers' stderr"):
                flush_relays(signals.shutdown_requested)
            # A second signal must not end the process before its caller has written the result.
            if node_context.identity.owns_process:
                signals.ignore_signals_until_exit()


def _leave_with_results(results: dict[int, Any], settings: ExitSettings) -> dict[int, Any]:
    """Return what this node's functions returned, by rank, when the node may exit."""
    if settings.options.in_process_restart is not None:
        results = settings.options.in_process_restart.by_last_rank(results)
    settings.engine.await_exit(
        has_rank_0=0 in results, shutdown_requested=settings.shutdown_requested
    )
    return results


# --- from the end of a round to the end of the node -----------------------------------------------


def end_failed_node(node: FailedNode, settings: ExitSettings) -> None:
    """Take a failed node to its end, from wherever it is: verdict, report, orphans.

    The main thread calls this. If it is blocked, the signal thread calls it at the same time.
    """
    if not node.is_settled:
        node.publication = reach_verdict(node.end, settings)
        node.is_settled = True
    if not node.is_reported:
        _report(node.publication, node.end.report.failure_lines, settings)
        node.is_reported = True
    # After verdict and report, because it may take `stop_seconds`.
    seconds = get_limit(ExitStep.ORPHANS, settings.hurry, settings.options.stop_seconds)
    kill_orphans(node.end.node_context, seconds)


def _build_last_resort(
    node: FailedNode, settings: ExitSettings
) -> Callable[[signal.Signals], None]:
    def end_unless_finished(_: signal.Signals) -> None:
        # If only the teardown failed, this node has results, which only the main thread can return.
        known = node.publication
        if known is None or not settings.engine.takes_results(known.sealed):
            _end_process(node, settings)

    return end_unless_finished


def _end_process(node: FailedNode, settings: ExitSettings) -> None:
    """End the process from the signal thread, because the main thread handles no signal."""
    # The main thread may be anywhere, also inside of an election, and may wake at any moment. So
    # this thread shares with it only what any thread may use: the fields of `node`, the report,
    # the engine and the recorder; and the names of keys in the store, through a connection of its
    # own. If both publish, the storage keeps the first verdict, and the later thread adopts it.
    # After its step the main thread waits in `SignalWatch.replace_last_resort` for the exit below.
    code = 1
    try:
        code = settings.engine.choose_exit_code(None)
        end_failed_node(node, replace(settings, leaving_now=True))
        code = settings.engine.choose_exit_code(node.publication)
        end_node_recorder(node.end.node_context)
    finally:
        # The main thread is inside C++ and can't unwind: sys.exit here would end this thread only.
        os._exit(code)


# --- from the end of a round to a verdict ---------------------------------------------------------


def reach_verdict(end: RoundEnd, settings: ExitSettings) -> Publication | None:
    """Agree on a verdict with other nodes, or conclude alone, and publish. Return None if this
    process has to end before the others decide, or if firstfault itself failed.
    """
    publication: Publication | None = None
    is_left_to_others = False
    with suppress_internal_errors("agreeing on a verdict with all nodes"):
        agree = _leave_election if settings.leaving_now else _settle_with_peers
        publication, is_left_to_others = agree(end, settings)
    # Its verdict would be the first, and so the one that counts, though it knows less than theirs.
    if publication is None and is_left_to_others:
        logger.warning("this process has to end; the other nodes conclude on the failure")
    elif publication is None:
        with suppress_internal_errors("concluding alone"):
            publication = _conclude_alone(end, settings)
            if publication is not None:
                publication = _hand_over(publication, end, settings)
    if publication is not None and end.peers is not None and not settings.leaving_now:
        with suppress_internal_errors("confirming the verdict"):
            end.peers.confirm_verdict()
    return publication


def _leave_election(end: RoundEnd, settings: ExitSettings) -> tuple[Publication | None, bool]:
    """Return the verdict that the nodes have agreed on, if there is one, and whether other nodes
    decide: those that don't have to end know more than this node learns in so short a time.
    """
    peers = end.peers
    if peers is None or settings.engine.ends_with_first_node():
        return None, False
    left = peers.leave_election(end.report.copies)
    if left is None:
        return None, False
    if left.verdict is not None and left.verdict.document:
        return _adopt_verdict(left.verdict, end, settings), False
    return None, left.others_decide


def _hand_over(publication: Publication, end: RoundEnd, settings: ExitSettings) -> Publication:
    """Send a verdict that was published without an election to nodes that still wait for one;
    take theirs if they have one.
    """
    is_shared = end.node_context.identity.is_folder_shared
    if end.peers is None or not is_shared:
        return publication
    document = publication.sealed.document
    own = ElectedVerdict(document, durable=publication.durable)
    elected = end.peers.hand_over(own, leaving_now=settings.leaving_now)
    if elected is None or not elected.document or elected.document == document:
        return publication
    return _adopt_verdict(elected, end, settings)


def _settle_with_peers(end: RoundEnd, settings: ExitSettings) -> tuple[Publication | None, bool]:
    """Return the verdict that one node reached for all, or None if the nodes could not agree; and
    whether this node left the decision to its peers.
    """
    if end.peers is None:
        return None, False
    publication = _elect(end.peers, end, settings)
    return publication, end.peers.settlement.is_left_to_others


def _elect(peers: Peers, end: RoundEnd, settings: ExitSettings) -> Publication | None:
    own: Publication | None = None
    """What this node concluded as the leader, before the store was lost or another agent took over.
    """
    options = settings.options
    grace_seconds = options.terminated_stop_seconds or options.stop_seconds
    may_leave = not settings.engine.ends_with_first_node()
    for step in peers.settle(
        end.report.copies,
        options.settle_seconds,
        grace_seconds,
        may_leave=may_leave,
    ):
        # A follower gets one verdict. The leader gets the reports; if it takes too long and another
        # agent takes over, a verdict follows them.
        if isinstance(step, ElectedVerdict):
            return _adopt_verdict(step, end, settings)
        wait = Wait(0.0, complete=step.complete, shutdown_requested=settings.shutdown_requested)
        concluded = _conclude_and_seal(end, step.copies, settings, wait)
        if concluded is None:
            continue
        own = _share_with_all_nodes(concluded, step.copies)
        # False: concluding took so long that another agent may lead now. Publishing would make a
        # second verdict; the next step has the one of that agent.
        if peers.settlement.announce_publishing():
            # Into the storage before it goes to the peers: they may exit as soon as they have it.
            published = _publish(own, settings)
            is_shared = end.node_context.identity.is_folder_shared
            elected = peers.settlement.publish(
                published.sealed.document,
                durable=is_shared and published.durable,
                bundle=b"" if is_shared else published.bundle,
            )
            # Another leader was faster after all: its verdict counts on all nodes.
            return (
                published
                if elected.document == published.sealed.document
                else _adopt_verdict(elected, end, settings)
            )
    return _publish(own, settings) if own is not None else None


def _share_with_all_nodes(own: Publication, copies: Mapping[str, bytes]) -> Publication:
    """Return a verdict for all nodes; with copies of what they wrote,
    if each has a separate folder.
    """
    node_context = own.node_context
    if node_context.identity.is_folder_shared:
        return replace(own, for_all=True)
    files = {get_path_in_bundle(path): data for path, data in copies.items()}
    bundle = pack_copies(node_context.group_world_size, files, first=unpack(own.bundle))
    return replace(own, for_all=True, bundle=bundle)


def _adopt_verdict(elected: ElectedVerdict, end: RoundEnd, settings: ExitSettings) -> Publication:
    """Return the verdict of another node, published here too if that node could not."""
    # `durable` is False if the leader could not write to the storage: then each node tries.
    taken = sealed_verdict.adopt_sealed_verdict(
        elected.document, end.node_context, durable=elected.durable
    )
    return _publish(replace(taken, bundle=elected.bundle), settings)


def _conclude_alone(end: RoundEnd, settings: ExitSettings) -> Publication | None:
    """Conclude from what this node can read, and publish;
    take the verdict of a node that had its turn earlier.
    """
    is_shared = end.node_context.identity.is_folder_shared
    # Without the round's store the nodes can't elect a leader. They take turns by time: each looks
    # whether a node before it has published.
    if end.group_rank and is_shared:
        find = partial(find_published_verdict, end.node_context, settings.engine)
        delay = sealed_verdict.get_conclusion_delay(end.group_rank)
        found = sealed_verdict.wait_for_peer_verdict(find, delay, settings.shutdown_requested)
        if found is not None:
            return _publish(found, settings)
    copies, hurry = end.report.copies, settings.hurry
    wait = Wait(
        get_limit(ExitStep.SETTLE, hurry, settings.options.settle_seconds),
        hurry=hurry,
        # once it is set, the limits above are short enough: it would end the wait at once
        shutdown_requested=settings.shutdown_requested if hurry is Hurry.NONE else None,
    )
    if not is_shared:
        copies = {**copies, **_synthesize_first_node_entry(end)}
        # No other node can write into this node's folder, so there is nothing to wait for.
        wait = replace(wait, seconds=0.0, complete=False)
    own = _conclude_and_seal(end, copies, settings, wait)
    if own is None:
        own = _conclude_and_seal(end, copies, settings, Wait(0.0, hurry=hurry))
    return _publish(own, settings) if own is not None else None


def _synthesize_first_node_entry(end: RoundEnd) -> Mapping[str, bytes]:
    """Return a roster entry of the first node if its agent is gone,
    and with it the store that held the entry.
    """
    node = end.peers.liveness.lost_first if end.peers is not None else ""
    if not node:
        return {}
    node_context = end.node_context
    place = Place(
        attempt=node_context.identity.attempt,
        round=node_context.round,
        node=node,
        group_rank=0,
        group_world_size=node_context.group_world_size,
        engine=node_context.identity.engine,
    )
    return dict([as_entry(NodePresence(Phase.JOINED, place))])


def _conclude_and_seal(
    end: RoundEnd,
    copies: Mapping[str, bytes],
    settings: ExitSettings,
    wait: Wait,
) -> Publication | None:
    """Conclude and seal. Return None if that fails."""
    with suppress_internal_errors("concluding on the failure"):
        concluded = conclude_on_node(
            end.node_context,
            copies,
            settings.engine,
            settings.options,
            wait,
        )
        if end.restart_refusal is not None:
            found, refusal = concluded.conclusion, end.restart_refusal
            decision = explain_unused_restarts(
                found.decision,
                found.verdict,
                refusal,
                settings.max_restarts,
            )
            concluded = concluded._replace(conclusion=replace(found, decision=decision))
        return sealed_verdict.seal_verdict(concluded, end.node_context)
    return None


def _publish(publication: Publication, settings: ExitSettings) -> Publication:
    """Publish a verdict, and leave it for the next attempt and for readers;
    return it with the result of publishing.

    All is uploaded at the same time: other pods wait, and when the first one has exited, this one
    may be killed.
    """
    others: list[Callable[[], object]] = []
    node_context, bundle, own = publication.node_context, publication.bundle, publication.own
    if bundle:
        name = bundle_name(bundle, of_separate_nodes=not node_context.identity.is_folder_shared)
        seconds = time_limits.HANDOVER_TIMEOUT_SECONDS
        others.append(partial(put_on_node, f"{ROSTER}/{name}", bundle, node_context, seconds))
    if publication.own is not None:  # a scheduler may run the job again, whatever was decided
        sealed, shutdown_requested = publication.sealed, settings.shutdown_requested
        others.append(partial(hand_over_verdict, node_context, sealed, shutdown_requested))
    ended = [
        start_in_thread(call, "leaving files for the next attempt and for readers")
        for call in others
    ]
    with suppress_internal_errors("publishing the verdict"):
        publish = partial(
            settings.engine.publish,
            shutdown_requested=settings.shutdown_requested,
            leaving_now=settings.leaving_now,
        )
        publication = publish_or_adopt(
            publication, settings.engine, publish, settings.shutdown_requested
        )
    # Each has its own limit and runs in parallel with the verdict's upload, so this adds little.
    for event in ended:
        event.wait(get_limit(ExitStep.HANDOVER, settings.hurry))
    if own is not None and publication.own is None:
        # This node has left its own verdict for the next attempt; another one's was the first.
        hand_over_verdict(node_context, publication.sealed, settings.shutdown_requested)
    return publication


def _report(
    publication: Publication | None, failure_lines: dict[int, str], settings: ExitSettings
) -> None:
    """Log a published verdict, and pass it on to an outer launcher and to notifiers.

    `failure_lines` are torch's, by rank.
    """
    root_ranks = publication.sealed.verdict.ranks if publication is not None else ()
    with suppress_internal_errors("logging a failure"):
        log_root_or_first_failure(failure_lines, root_ranks)
    if publication is None:
        return
    with suppress_internal_errors("printing what failed"):
        settings.engine.announce(publication)
    # The user may have named a file on a hanging file system.
    sealed = publication.sealed
    seconds = get_limit(ExitStep.REPORT, settings.hurry)
    write = partial(write_termination_message, sealed.seal.message)
    call_with_timeout(write, seconds, "writing the termination message", local=True)
    # another torch agent: copy the root cause into its error file, as torch's `record` does
    outer = os.environ.get(ERROR_FILE_VARIABLE)
    if outer:
        data = sealed_verdict.build_torch_error_data(sealed.verdict)
        write = partial(write_error_file, outer, data)
        call_with_timeout(write, seconds, "reporting to the outer launcher", local=True)
    # this node concluded, and by now all nodes have the verdict
    if publication.own is not None and not settings.leaving_now:
        with suppress_internal_errors("notifying others"):
            notify(publication.own.report)


# --- what the agent calls -------------------------------------------------------------------------


def _judge_restart(
    settings: ExitSettings,
    node_context: NodeContext,
    reports: CollectedReports,
    context: RestartContext,
) -> RestartRecord:
    """Judge a failed round, and return whether torch restarts the workers."""
    wait = Wait(0.0, complete=reports.complete)
    concluded = conclude_on_node(
        node_context,
        reports.copies,
        settings.engine,
        settings.options,
        wait,
        restart=context,
    )
    return build_restart_record(concluded.conclusion, context)
