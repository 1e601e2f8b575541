"""What must hold after each schedule."""

from __future__ import annotations

import json
from collections.abc import Iterator

from firstfault.model import TERMINATED
from firstfault_torch.protocol.stopping import SIBLING_FAILED
from firstfault_torch.time_limits import STOP_GRACE_SECONDS, STORE_TIMEOUT_SECONDS
from lab.simulated_jobs.agent import Agent
from lab.simulated_jobs.job import SimulatedJob
from lab.simulated_jobs.workers import TERMINATED_STOP_SECONDS

LONGEST_END_S = 120.0
"""Most seconds from the first failure to the end of each live agent, plus what it was frozen."""

_LATEST_GRACE_S = STOP_GRACE_SECONDS + STORE_TIMEOUT_SECONDS + 1.0
"""The time of a signal begins so late: an agent asks for it before it kills workers."""
_CAUSES = {"worker", "signal", "kill", "machine gone"}
"""Faults that end a job."""


def find_violations(job: SimulatedJob) -> Iterator[tuple[str, str]]:
    """Yield the invariants that a played job violates, each with what was seen."""
    if not job.has_failed:
        return
    yield from _check_verdicts(job)
    yield from _check_ends(job)
    yield from _check_lost(job)
    yield from _check_coverage(job)
    yield from _check_grace(job)
    yield from _check_stops(job)


def _check_verdicts(job: SimulatedJob) -> Iterator[tuple[str, str]]:
    documents = {document for _, _, document in job.world.storage.writes}
    if len(documents) > 1:
        yield "I1 at most one verdict is published", str(job.world.storage.writes)
    ended = [agent for agent in job.agents if agent.ended_at is not None]
    verdicts = {agent.verdict for agent in ended}
    if any(not agent.is_terminated for agent in ended) and verdicts == {b""}:
        yield "I3 a verdict exists if an agent lives", f"{len(ended)} have ended without one"
    elif verdicts == {b""}:
        yield "a verdict is missing: each agent that stayed has died", f"{len(ended)} have left"
    published = job.world.storage.verdict
    other = [agent.rank for agent in ended if published and agent.verdict not in {published, b""}]
    if other:
        yield "I6 every node reports the published verdict", f"nodes {other}"


def _check_ends(job: SimulatedJob) -> Iterator[tuple[str, str]]:
    running = [agent.rank for agent in job.agents if agent.is_live]
    if running:
        states = {job.agents[rank].state.value for rank in running}
        yield "I2 each live agent ends", f"nodes {running}: {states}"
    frozen = sum(agent.frozen_seconds for agent in job.agents)
    for agent in job.agents:
        if agent.ended_at is not None and agent.ended_at > LONGEST_END_S + 2 * frozen:
            yield "I2 each live agent ends", f"node {agent.rank} after {agent.ended_at:.0f} s"
            return


def _check_lost(job: SimulatedJob) -> Iterator[tuple[str, str]]:
    """A live agent that wasn't told to end never counts as lost."""
    for _, by, document in job.world.storage.writes:
        lost = [job.agents[rank] for rank in json.loads(document)["lost"]]
        accused = [agent.rank for agent in lost if not agent.is_dead and not agent.is_terminated]
        if accused:
            yield "I9 no live agent counts as lost", f"nodes {accused}, by node {by}"
            return


def _check_coverage(job: SimulatedJob) -> Iterator[tuple[str, str]]:
    """Each healthy agent that stays, and that reaches the store, is in the verdict."""
    if not job.world.storage.writes or is_store_disturbed(job):
        return
    document = json.loads(job.world.storage.writes[0][2])
    missing = [
        agent.rank
        for agent in job.agents
        if not (agent.is_dead or agent.is_terminated or agent.frozen_seconds)
        and agent.rank not in document["covers"]
    ]
    if missing:
        yield "I4 each healthy node is in the verdict", f"nodes {missing}: {document}"


def _check_grace(job: SimulatedJob) -> Iterator[tuple[str, str]]:
    """After a signal as the first cause, the workers of all nodes have the same time to end."""
    causes = [fault for fault in job.faults if fault.kind in _CAUSES]
    first = min(causes, key=lambda fault: fault.seconds)
    # A frozen agent gets its signal later.
    is_frozen = any(agent.frozen_seconds for agent in job.agents)
    if first.kind != "signal" or is_frozen or is_store_disturbed(job):
        return
    least, most = TERMINATED_STOP_SECONDS - 1, TERMINATED_STOP_SECONDS + _LATEST_GRACE_S
    for agent in job.agents:
        times = _list_times(agent)
        if any(
            seconds < least or (seconds > most and not agent.is_terminated) for seconds in times
        ):
            yield "I5 the same grace for all nodes after a signal", f"node {agent.rank}: {times}"
            return


def _list_times(agent: Agent) -> list[float]:
    """Return how long killed workers had to end, except those that had failed before."""
    failed_first = agent.workers.stop.state.failed_first
    return [
        worker.killed_after
        for rank, worker in enumerate(agent.workers.members)
        if worker.killed_after is not None and rank not in failed_first
    ]


def _check_stops(job: SimulatedJob) -> Iterator[tuple[str, str]]:
    """Workers are stopped for a reason, and none that failed before."""
    for agent in job.agents:
        workers, state = agent.workers, agent.workers.stop.state
        if workers.began_at is None or state.request is None:
            continue
        if not _has_cause(agent, job):
            seen = f"node {agent.rank}: {state.request.reason}"
            yield "I7 no worker is stopped without a failure or a signal", seen
        failed = {
            rank
            for rank, worker in enumerate(workers.members)
            if worker.failed_at is not None and worker.failed_at < workers.began_at
        }
        expired = {rank for rank, worker in enumerate(workers.members) if worker.has_expired}
        if expired - state.failed_first:
            yield "I14 who was killed at a deadline failed first", f"node {agent.rank}"
        if state.request.reason == SIBLING_FAILED and failed - state.failed_first:
            yield "I14 who failed before the stop failed first", f"node {agent.rank}: {failed}"
        twice = [worker for worker in workers.members if worker.signals > 1]
        signalled = {rank for rank, worker in enumerate(workers.members) if worker.signals}
        if twice or signalled & state.failed_first:
            yield "I14 a worker gets one signal, none if it failed first", f"node {agent.rank}"


def _has_cause(agent: Agent, job: SimulatedJob) -> bool:
    workers, request = agent.workers, agent.workers.stop.state.request
    assert workers.began_at is not None
    if request is not None and request.reason == SIBLING_FAILED:
        times = [worker.failed_at for worker in workers.members]
    elif request is not None and request.reason == TERMINATED:
        return agent.is_terminated
    else:
        times = [each.notified_at for each in job.agents]  # it may have lost a peer itself
    return any(time is not None and time <= workers.began_at for time in times)


def is_store_disturbed(job: SimulatedJob) -> bool:
    """Whether an agent may not have reached the store: a link, or the store's host, has a fault."""
    at_host = {"kill", "machine gone", "freeze", "signal"}
    at_link = {"slow link", "reset", "silent connection"}
    return any(
        fault.kind in at_link or (fault.kind in at_host and fault.node == job.host)
        for fault in job.faults
    )
