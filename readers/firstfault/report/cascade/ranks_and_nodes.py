"""The state of every rank and node of an attempt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from firstfault.model import JobErrors, NodePresence, Phase, Scope, Verdict
from firstfault.model.job import unreported_nodes
from firstfault.report.cascade.records import Event, Group, NodeState, RankState
from firstfault.report.engine_words import find_engine_words
from firstfault.report.headline import summarize_failure
from firstfault.report.states import State

_MAX_WORLD_SIZE = 100_000
"""A document with a larger world size is damaged."""


def list_ranks(
    job: JobErrors,
    verdict: Verdict,
    events: Sequence[Event],
    groups: Sequence[Group],
) -> tuple[RankState, ...]:
    """Return every rank that a document, the roster, the verdict or a group names,
    or that the world size implies.
    """
    # the roster has no local ranks; an agent numbers its workers locally in the order of their
    # ranks
    places = {  # node and local rank
        rank: (entry.place.node, index)
        for entry in job.roster
        for index, rank in enumerate(sorted(entry.ranks))
    }
    # later sources replace earlier ones: the documents themselves come after the verdict and the
    # groups
    state_by_rank: dict[int, RankState] = {}
    for rank, state, line, node in _named_ranks(verdict, groups):
        node_name, local = places.get(
            rank, (node or (state_by_rank[rank].node if rank in state_by_rank else ""), None)
        )
        state_by_rank[rank] = RankState(rank, state, node_name, local, line=line)
    for event in reversed(events):  # if two nodes claim one rank, the first event is kept
        failure, claimed = event.failure, event.failure.rank
        if claimed is not None:
            local = failure.place.local_rank
            local = local if local is not None else places.get(claimed, ("", None))[1]
            line = summarize_failure(failure)
            state_by_rank[claimed] = RankState(
                claimed,
                event.state,
                failure.node,
                local,
                delay=event.delay,
                line=line,
            )
    finished = {
        rank for entry in job.roster if entry.phase is Phase.SUCCEEDED for rank in entry.ranks
    }
    finished |= {rank for entry in job.roster for rank in entry.finished_ranks}
    words = find_engine_words(job, verdict)
    named = set(job.named_ranks)
    highest = max(
        (failure.rank for failure in job.failures if failure.rank is not None), default=-1
    )
    for rank in {
        *places,
        *range(max(world_size(job), highest + 1 if job.size is not None else 0)),
    } - set(state_by_rank):
        missing = (State.UNREPORTED, words.describe_missing(has_lines=rank in named))
        state, line = (State.FINISHED, "") if rank in finished else missing
        node_name, local = places.get(rank, ("", None))
        state_by_rank[rank] = RankState(rank, state, node_name, local, line=line)
    return tuple(state_by_rank[rank] for rank in sorted(state_by_rank))


def _named_ranks(
    verdict: Verdict, groups: Sequence[Group]
) -> Iterator[tuple[int, State, str, str]]:
    """Yield the ranks that the verdict or a group names: state, line,
    node. Without documents these are all.
    """
    is_sure = verdict.scope is not Scope.UNDETERMINED
    for rank, line in verdict.victims.by_rank:
        yield rank, State.VICTIM if is_sure else State.UNCLEAR, line, ""
    for rank in verdict.ranks if is_sure else ():
        yield rank, State.ROOT, verdict.headline, verdict.node or ""
    for item in verdict.suspects:
        if item.rank is not None:
            yield item.rank, State.SUSPECT, item.why, item.node or ""
    for group in groups:
        yield from ((rank, group.state, group.line, "") for rank in group.ranks)


def world_size(job: JobErrors) -> int:
    """Return the world size that the documents state; 0 if they don't, or if it isn't plausible."""
    # the size comes from a document, and `list_ranks` makes an entry for each rank: without a
    # limit a damaged size would exhaust the memory
    stated = max((failure.place.world_size for failure in job.failures), default=0)
    return stated if stated <= _MAX_WORLD_SIZE else 0


def list_nodes(job: JobErrors, verdict: Verdict) -> tuple[NodeState, ...]:
    """Return every node that the roster, a document or the verdict names."""
    unreported = set(unreported_nodes(job))
    entries: dict[tuple[str, int | None], list[NodePresence]] = defaultdict(list)
    ranks: dict[tuple[str, int | None], set[int]] = defaultdict(set)
    for entry in job.roster:
        key = (entry.place.node, entry.place.group_rank)
        entries[key].append(entry)
        ranks[key] |= set(entry.ranks)
    group_rank_by_node = {name: group_rank for name, group_rank in entries if name}
    for failure in job.failures:
        if failure.node:
            key = (failure.node, failure.place.group_rank)
            # a failure may lack the group rank that the roster has; its node would be listed twice
            key = (
                key
                if key in entries
                else (failure.node, group_rank_by_node.get(failure.node, failure.place.group_rank))
            )
            ranks[key] |= set() if failure.rank is None else {failure.rank}
    if verdict.node and not any(name == verdict.node for name, _ in ranks):
        ranks[verdict.node, None] = set()
    suspects = {suspect.node for suspect in verdict.suspects if suspect.rank is None}
    root = verdict.node if verdict.scope in {Scope.NODE, Scope.EXTERNAL} else None
    nodes = []
    for (name, group_rank), own_ranks in ranks.items():
        own_entries = entries.get((name, group_rank), [])
        # JOINED doesn't show how the node ended: a node finished if all its other entries succeeded
        phases = {entry.phase for entry in own_entries} - {Phase.JOINED}
        state = State.FINISHED if phases == {Phase.SUCCEEDED} else None
        note = next(
            (entry.first_failure_reason for entry in own_entries if entry.first_failure_reason), ""
        )
        # order matters: a state from the verdict replaces a state from the roster
        if (name or f"group rank {group_rank}") in unreported:
            is_documented = any(failure.node == name for failure in job.failures)
            state = State.UNREPORTED
            note = "no final report" if is_documented else "started, then sent nothing"
        if name and name in suspects:
            state = State.SUSPECT
        if name and name == root:
            state = State.ROOT
        nodes.append(NodeState(name, state, group_rank, tuple(sorted(own_ranks)), note))
    return tuple(
        sorted(nodes, key=lambda node: (node.group_rank is None, node.group_rank or 0, node.name))
    )
