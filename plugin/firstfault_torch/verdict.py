"""From a failed launch to a sealed verdict: waits for the other nodes, concludes, seals, and keeps it for a retry.

It may import the library and `node`, never `agent` or `worker`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

from firstfault.errors import BadDocumentError, StoreError
from firstfault.layout import ERROR_FILE, bundle_path
from firstfault.model import Decision, DocumentRef, JobErrors, NodePresence, Origin, Phase, Seal, Verdict
from firstfault.retry import RetryContext, RetryPolicy
from firstfault.strategies import DEFAULT_STRATEGY, strategy_names
from firstfault.wire.documents import decode, encode_seal, pack
from firstfault.wire.json_schemas import from_json, to_json
from firstfault_torch import time_limits
from firstfault_torch.capture import error_file_data
from firstfault_torch.context import Recording
from firstfault_torch.engine import Engine, SealedVerdict
from firstfault_torch.guard import begun, bounded, caught, logger
from firstfault_torch.node.document_writer import get_file, put_file

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion, RestartContext
    from firstfault.report import Report
    from firstfault_torch.options import Options

_FALLBACK = "earliest"
"""The strategy that replaces one that raises: the simplest one."""


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a node waits for the others, and what ends the wait earlier."""

    seconds: float
    expected_nodes: int | None = None
    """Overrides the number in the roster."""
    is_hurried: bool = False
    """The process is about to end: nothing but the wait for the nodes may take long."""
    complete: bool = True
    """False: it is known that a node that lives has not reported."""
    give_up: threading.Event | None = None
    """Once set, ends the wait."""


def conclude_on_node(  # noqa: PLR0913 - the parts of a verdict
    recording: Recording,
    copies: Mapping[str, bytes],
    engine: Engine,
    options: Options,
    wait: Wait,
    *,
    restart: RestartContext | None = None,
) -> NodeConclusion:
    """Return the verdict on the attempt and the decision.

    The copies count in any case, also if the storage cannot be listed. A policy that raises is replaced by
    the default policy, a strategy that raises by `earliest`; if they take too long, both are. Each with a warning.

    `copies` are documents and roster entries that this node has, by path below the output prefix; `wait` is for the
    nodes that live. With `restart` the question is whether torch restarts the workers within the attempt; None: whether
    the attempt is followed by another one.

    Raises:
        LookupError: no failure is on record, neither here nor in the storage.
    """
    job, files = _job(recording, copies, wait)
    if restart is None:
        context = _context(job, recording, engine, options, wait)
    else:
        # a pod that left may have sealed a verdict on the attempt, and with it another decision
        job = replace(job, seals=())
        context = restart.for_policy(RetryContext(attempt=recording.identity.attempt, retries=options.retries))
    conclusion = _first_conclusion(job, recording.strategy, options.retry_policy, context, wait)
    if conclusion is None:
        raise LookupError("no failure is on record, neither here nor in the storage")
    return NodeConclusion(conclusion, files)


def load_what_concluding_needs() -> None:
    """Import it once the workers have started: they need not wait for it, and after a failure the disk may be gone."""
    for name in ("conclude", "output_reader", "render.flyte_message", "report"):
        import_module(f"firstfault.{name}")


class _TooLateError(Exception):
    """A strategy or a policy did not end in time."""


def _first_conclusion(
    job: JobErrors, strategy: str, policy: RetryPolicy | None, context: RetryContext, wait: Wait
) -> Conclusion | None:
    """Return what the first strategy and policy conclude that neither raise nor take too long.

    Tried in turn: the task's own; without its strategy; without its policy; without both.
    """
    strategies = [strategy] if strategy == _FALLBACK else [strategy, _FALLBACK]
    policies = [None] if policy is None else [policy, None]
    *tried, last = [(name, chosen) for chosen in policies for name in strategies]
    seconds = (
        time_limits.TERMINATED_CONCLUDE_TIMEOUT_SECONDS if wait.is_hurried else time_limits.CONCLUDE_TIMEOUT_SECONDS
    )
    logged = ""
    for name, chosen in tried:
        call = partial(caught, partial(_concluded, job, name, chosen, context), Exception)
        hurried = time_limits.TERMINATED_CONCLUDE_TIMEOUT_SECONDS
        found = bounded(call, seconds, "concluding", wait.give_up, hurried_seconds=hurried, local=True)
        conclusion, error = found or (None, _TooLateError("it takes too long"))
        if error is None:
            return conclusion
        # both may be third-party code: the attempt still needs a verdict, and each error one log line
        if str(error) != logged:
            logger.warning(
                "the strategy %s or the task's retry policy failed (%s: %s); firstfault's defaults decide",
                name,
                type(error).__name__,
                error,
            )
        logged = str(error)
        if isinstance(error, _TooLateError):
            break  # it is not known which of the two takes so long
    return _concluded(job, *last, context)


def _concluded(job: JobErrors, strategy: str, policy: RetryPolicy | None, context: RetryContext) -> Conclusion | None:
    """Conclude, with an answer that can be sealed: both may be third-party code, which fills fields with anything."""
    from firstfault.conclude import conclude  # noqa: PLC0415 - loaded by `load_what_concluding_needs`

    conclusion = conclude(job, strategy=strategy, policy=policy, context=context)
    if conclusion is not None:
        to_json(conclusion.verdict, conclusion.decision)
    return conclusion


def _context(job: JobErrors, recording: Recording, engine: Engine, options: Options, wait: Wait) -> RetryContext:
    hurried = wait.is_hurried or (wait.give_up is not None and wait.give_up.is_set())
    seconds = (
        time_limits.TERMINATED_PREVIOUS_VERDICT_TIMEOUT_SECONDS
        if hurried
        else time_limits.PREVIOUS_VERDICT_TIMEOUT_SECONDS
    )
    previous = previous_attempt(recording, seconds, wait.give_up)
    attempt = recording.identity.attempt
    return RetryContext(
        attempt=attempt,
        retries=options.retries,
        retries_left=retries_left(attempt, options.retries, previous.decision if previous is not None else None),
        pods_alive=engine.enforces(job),
        previous_fingerprint=previous.verdict.fingerprint if previous is not None else "",
    )


def _job(recording: Recording, copies: Mapping[str, bytes], wait: Wait) -> tuple[JobErrors, Mapping[str, bytes]]:
    # an unknown strategy is reported when it is asked for its verdict
    strategy = recording.strategy if recording.strategy in strategy_names() else DEFAULT_STRATEGY
    from firstfault.output_reader import MultiErrorFileOutputReader  # noqa: PLC0415 - as above

    reader = MultiErrorFileOutputReader(
        recording.output_prefix,
        strategy=strategy,
        settle_seconds=wait.seconds,
        copies=copies,
        expected_nodes=wait.expected_nodes,
        enough=partial(_all_but_one, time.monotonic()),
        give_up=wait.give_up,
    )

    def read() -> JobErrors | None:
        try:
            return reader.job()
        except StoreError as error:
            logger.warning("the attempt's documents cannot be read: %s", error)
            return None

    seconds = wait.seconds + (
        time_limits.TERMINATED_READ_TIMEOUT_SECONDS if wait.is_hurried else time_limits.READ_TIMEOUT_SECONDS
    )
    doing = "reading the nodes' documents"
    job = bounded(read, seconds, doing, wait.give_up, hurried_seconds=time_limits.TERMINATED_READ_TIMEOUT_SECONDS)
    if job is None:
        alone = reader.job_of_copies("only the documents at hand were read; the storage did not answer in time")
        return alone, reader.read_files
    return job if wait.complete else replace(job, settled=False), reader.read_files


def _all_but_one(began: float, roster: Sequence[NodePresence]) -> bool:
    """Whether every node but one has reported, a while after this one began to read.

    Nodes that cannot settle on a verdict through their store have lost its host.
    """
    if time.monotonic() - began < time_limits.ACKNOWLEDGMENT_TIMEOUT_SECONDS:
        return False
    last = max((entry.place.round for entry in roster), default=0)
    current = [entry for entry in roster if entry.place.round == last]
    nodes = max((entry.place.group_world_size for entry in current), default=0)
    done = {entry.place.group_rank for entry in current if entry.phase is not Phase.JOINED}
    return nodes > 1 and len(done) >= nodes - 1


# --- the sealed verdict -----------------------------------------------------------------------------------------------

VERDICT = "firstfault/verdict.pb"
"""Below an attempt's handover URI."""
NOTIFIERS = "firstfault.notifiers"
"""The entry-point group of notifiers."""
_SINGLE = 4
"""So many nodes have turns of their own."""


class NodeConclusion(NamedTuple):
    """What a node concluded, and from what."""

    conclusion: Conclusion
    files: Mapping[str, bytes]
    """The documents and roster entries that were read, by path below the output prefix."""


def seal_verdict(concluded: NodeConclusion, recording: Recording) -> SealedVerdict:
    """Return a conclusion of this node with its report, its ``error.pb``, and copies of what it rests on."""
    conclusion = concluded.conclusion
    from firstfault.render.flyte_message import flyte_message  # noqa: PLC0415 - loaded by `load_what_concluding_needs`
    from firstfault.report.data import report_conclusion  # noqa: PLC0415 - as above

    report = report_conclusion(conclusion, uri=recording.output_prefix)
    verdict, decision = report.verdict, report.decision
    seal = Seal(
        name="",
        digest=verdict.digest,
        count=verdict.document_count,
        strategy=verdict.strategy,
        json=to_json(verdict, decision),
        timestamp_ns=time.time_ns(),
        node=recording.identity.node,
        code=verdict.root.code if verdict.root is not None else verdict.code,
        message=flyte_message(report),
        kind=decision.kind,
        origin=decision.origin,
        fault_timestamp_ns=verdict.timestamp_ns,
        worker=verdict.node or "",
    )
    bundle = pack({bundle_path(path): data for path, data in concluded.files.items()})
    return SealedVerdict(verdict, decision, seal, encode_seal(seal), recording, conclusion, report, bundle=bundle)


def sealed_elsewhere(document: bytes, recording: Recording, *, durable: bool) -> SealedVerdict:
    """Return the verdict that another node, or another attempt, sealed in this ``error.pb``.

    Raises:
        BadDocumentError: the document is not a sealed verdict of a version that can be read.
    """
    seal = decode(document, DocumentRef(ERROR_FILE))
    if not isinstance(seal, Seal):
        raise BadDocumentError(f"the {ERROR_FILE} holds no sealed verdict")
    if (sealed := from_json(seal.json)) is None:
        raise BadDocumentError(f"the {ERROR_FILE} was sealed by another version")
    return SealedVerdict(*sealed, seal, document, recording, for_all=True, durable=durable)


def torch_error_data(verdict: Verdict) -> dict[str, Any]:
    """Return the root cause as torch's ``error.json`` has it."""
    root = verdict.root
    exception = root.exception if root is not None else None
    return error_file_data(
        exception.type if exception is not None else verdict.code,
        exception.message if exception is not None else verdict.headline,
        verdict.message,
        verdict.timestamp_ns or time.time_ns(),
    )


# --- nodes without a store ------------------------------------------------------------------------------------------


def turn_of(group_rank: int) -> float:
    """Return how many seconds after its report a node may conclude.

    Node 0 most likely hosted the store. If it lives, it concludes at once, as node 1 does. The first nodes by group
    rank each have a turn of their own; then come ever larger groups, each node at a random moment.
    """
    position = max(group_rank - 1, 0)
    if position == 0:
        return 0.0
    if position < _SINGLE:
        return time_limits.SECOND_NODE_DELAY_SECONDS + time_limits.NEXT_NODE_DELAY_SECONDS * (position - 1)
    group = (position // _SINGLE).bit_length()
    later = time_limits.LATER_NODES_DELAY_SECONDS * (group - 1 + random.random())  # noqa: S311 - no secret
    return time_limits.SECOND_NODE_DELAY_SECONDS + time_limits.NEXT_NODE_DELAY_SECONDS * (_SINGLE - 1) + later


def await_turn(
    find: Callable[[], SealedVerdict | None], seconds: float, give_up: threading.Event
) -> SealedVerdict | None:
    """Look for another node's verdict until this node's turn has come; None if there is none."""
    deadline = time.monotonic() + seconds
    pause = time_limits.VERDICT_POLL_SECONDS * (1 + random.random())  # noqa: S311 - as above
    while True:
        look = partial(caught, find, Exception)
        answer = bounded(look, time_limits.VERDICT_READ_TIMEOUT_SECONDS, "looking for another node's verdict", give_up)
        found, error = answer or (None, None)
        if found is not None:
            return found
        if error is not None:
            logger.debug("no verdict of another node can be read: %s", error)
        left = deadline - time.monotonic()
        if left <= 0 or give_up.wait(min(pause, left)):
            return None
        pause = min(1.5 * pause, time_limits.MAX_VERDICT_POLL_SECONDS)


# --- the next attempt -----------------------------------------------------------------------------------------------


def leave_verdict(recording: Recording, document: bytes, give_up: threading.Event | None = None) -> None:
    """Write a sealed ``error.pb`` for the next attempt; a failure is only logged."""
    where = recording.identity.handover_uri
    if where and document:
        doing = "leaving the verdict for the next attempt"
        bounded(lambda: put_file(where, VERDICT, document), time_limits.HANDOVER_TIMEOUT_SECONDS, doing, give_up)


def previous_attempt(
    recording: Recording, seconds: float, give_up: threading.Event | None = None
) -> SealedVerdict | None:
    """Return how the attempt before ended; None if it left no verdict, or none that can be read in time."""
    where = recording.identity.previous_handover_uri
    if not where:
        return None

    def read() -> SealedVerdict | None:
        document = get_file(where, VERDICT)
        # None: its pods were lost, or it ran without firstfault
        return sealed_elsewhere(document, recording, durable=True) if document is not None else None

    return bounded(read, seconds, "reading the verdict on the attempt before", give_up)


def retries_left(attempt: int, retries: int | None, previous: Decision | None) -> int | None:
    """Return how many of the task's retries are left after the previous attempt's decision; None if it is not known.

    The attempt's number, from 0, is not enough: attempts that the platform lost do not use up the task's retries.
    """
    if not retries or attempt == 0:
        return retries
    if previous is None or previous.retries_left is None or not previous.enforced:
        return None
    return max(previous.retries_left - (previous.origin is not Origin.SYSTEM), 0)


# --- notifiers ------------------------------------------------------------------------------------------------------


def notify(about: Report | Mapping[str, Any]) -> None:
    """Call all installed notifiers at the same time; wait for them at most 3 s. A notifier that fails is a warning.

    A notifier is a callable with one argument, the report, in the entry-point group ``firstfault.notifiers``. The node
    that concludes calls each once, after the verdict is in the storage. Its `on_stall`, if it has one, is given a
    stall's data.
    """

    def give(point: EntryPoint) -> None:
        notifier = point.load()
        call = getattr(notifier, "on_stall", None) if isinstance(about, Mapping) else notifier
        if call is not None:
            call(about)

    def tell(point: EntryPoint) -> None:
        _, error = caught(partial(give, point))
        if error is not None:
            logger.warning("the notifier %s failed (%s: %s)", point.name, type(error).__name__, error)

    deadline = time.monotonic() + time_limits.NOTIFIERS_TIMEOUT_SECONDS
    # the lookup reads the metadata of every installed package, from a disk that may be slow
    found = bounded(
        lambda: list(entry_points(group=NOTIFIERS)),
        time_limits.NOTIFIERS_TIMEOUT_SECONDS,
        "looking for installed notifiers",
    )
    if found is None:
        logger.warning(
            "installed notifiers are not called: they were not found within %g s", time_limits.NOTIFIERS_TIMEOUT_SECONDS
        )
    told = [(point.name, begun(partial(tell, point), "calling a notifier")) for point in found or ()]
    for name, ended in told:
        if not ended.wait(max(deadline - time.monotonic(), 0)):
            logger.warning(
                "the notifier %s has not ended within %g s; it is not waited for",
                name,
                time_limits.NOTIFIERS_TIMEOUT_SECONDS,
            )
