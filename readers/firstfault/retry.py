"""Retry policies: whether to run a task again, and which retry budget pays.

A policy is a callable of (verdict, context) that returns a `Vote` or a bool. Policies compose:
``explicit() | on_category("preemption", "node_lost") & ~exhausted()``. `decide` applies one and returns the `Decision`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field

from firstfault.errors import UsageError
from firstfault.evidence.texts import is_unexplained_write
from firstfault.model import CATEGORIES, Action, Decision, Kind, Origin, Resources, Scope, Verdict, WorkerError, Writer
from firstfault.model.failure import ABOUT_CATEGORIES, CANCELLED, OF_LOGS
from firstfault.model.job import Progress

_TIME_LIMIT_REASON = "the attempt reached its time limit, and a retry probably would too"
_DRIVER_ERROR_TYPES = {"RuntimeError", "AcceleratorError", "DistBackendError"}
"""Exceptions that torch raises for a GPU driver error."""
_TORCH_FILE = re.compile(r"/(?:site|dist)-packages/torch/")
_RAISE_LINE = re.compile(r"\b(?:raise|assert|throw)\b")
_CRASH_SIGNALS = {"SIGABRT", "SIGSEGV", "SIGBUS"}
"""Signals by which a process dies after a GPU driver error."""
_UNKNOWN_CAUSE_REASON = "it's unclear whether a retry would help"
_NO_PROOF_REASON = "maybe temporary, but not proven (to allow retries, raise a recoverable error)"
_UNEXPLAINED_WRITE_REASON = "a write failed without a reason: the disk may have been full, or over its quota"
_UNCERTAIN_REASONS = {_UNKNOWN_CAUSE_REASON, _NO_PROOF_REASON, _UNEXPLAINED_WRITE_REASON}
_MIN_TRAINED_SECONDS = 60
_REPEAT_MINUTES = 10
"""An attempt that trained longer had overcome the fault of the one before."""
_MAX_FAILED_STARTS = 3
_CATEGORIES_WITHOUT_CAUSE = {"signal", "hang", "collective", "stopped", "unknown"}
"""Categories that describe how a process ended, not why."""


@dataclass(frozen=True, slots=True)
class RetryContext:
    """The input of a policy in addition to the verdict."""

    attempt: int = 0
    retries: int | None = None
    """The task's `retries`; None: unknown."""
    retries_left: int | None = None
    """Retries that no earlier attempt has used; None: unknown, because attempts that the platform lost use none."""
    pods_alive: bool = True
    """Whether every pod is alive to write the verdict for stock Flyte. False after a pod was lost."""
    previous_fingerprint: str = ""
    """Fingerprint of the previous attempt's verdict, or for a restart of the previous round's; empty: unknown."""
    restarts_left: int | None = None
    """None: the question is whether to run another attempt. A number: the question is whether to restart the workers
    within this attempt, with that number of `max_restarts` left."""
    engine: str = ""
    """As `Place.engine`."""
    progress: Progress = field(default_factory=Progress)
    """Progress of the training in its last round."""
    lifetime_seconds: float = 0.0
    """From the start of the attempt to its failure; 0: unknown."""
    failed_starts: int = 0
    """Attempts in a row, before this one, that failed before they had trained for a minute."""
    stops_repeats: bool = False
    """Whether an attempt isn't repeated, whatever the policy votes, if it failed with the fault of the one before and
    without progress, or at the start for the third time. Schedulers that retry without a budget need it."""

    @property
    def trained_seconds(self) -> float:
        """How long the ranks had trained; without known collectives, how long the attempt took."""
        return self.progress.seconds if self.progress.collectives else self.lifetime_seconds or self.progress.seconds


@dataclass(frozen=True, slots=True)
class Vote:
    """A policy's answer. Its truth value is `retry`."""

    retry: bool
    reason: str
    origin: Origin | None = None
    """The budget that pays for the retry: the user's or the system's; None: the user's."""

    def __bool__(self) -> bool:
        return self.retry


RETRY_REQUESTS = {"FlyteRecoverableException", "RecoverableError"}
"""Exceptions with which a program requests a retry."""
RETRY_REFUSALS = {"NonRecoverableError", "FlyteNonRecoverableSystemException"}
"""Flyte's exceptions with which a program refuses one, whatever their cause is."""
RetryPolicy = Callable[[Verdict, RetryContext], Vote | bool]


class ComposablePolicy:
    """A policy with operators: ``|`` either, ``&`` both, ``~`` not."""

    def __init__(self, function: RetryPolicy) -> None:
        self._function = function

    def __call__(self, verdict: Verdict, context: RetryContext) -> Vote:
        """Return the policy's vote."""
        answer = self._function(verdict, context)
        if isinstance(answer, Vote):
            return answer
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return Vote(retry=bool(answer), reason=f"policy {name}")

    def __or__(self, other: RetryPolicy) -> ComposablePolicy:
        second = to_policy(other)

        def either(verdict: Verdict, context: RetryContext) -> Vote:
            if own_vote := self(verdict, context):
                return own_vote
            vote = second(verdict, context)
            return vote or Vote(retry=False, reason=f"{own_vote.reason}, and {vote.reason}")

        return ComposablePolicy(either)

    # Python calls these for ``function | policy``, since functions have no operators
    def __ror__(self, other: RetryPolicy) -> ComposablePolicy:
        return to_policy(other) | self

    def __and__(self, other: RetryPolicy) -> ComposablePolicy:
        second = to_policy(other)

        def both(verdict: Verdict, context: RetryContext) -> Vote:
            if not (own_vote := self(verdict, context)):
                return own_vote
            vote = second(verdict, context)
            # both votes are to retry: the vote with a budget wins, as in `~exhausted() & on_category("node_lost")`
            return vote if not vote or (own_vote.origin is None and vote.origin is not None) else own_vote

        return ComposablePolicy(both)

    def __rand__(self, other: RetryPolicy) -> ComposablePolicy:
        return to_policy(other) & self

    def __invert__(self) -> ComposablePolicy:
        def opposite(verdict: Verdict, context: RetryContext) -> Vote:
            vote = self(verdict, context)
            return Vote(retry=not vote.retry, reason=vote.reason)

        return ComposablePolicy(opposite)


def to_policy(policy: RetryPolicy) -> ComposablePolicy:
    """Return `policy` with operators.

    Raises:
        UsageError: `policy` isn't callable.
    """
    if isinstance(policy, ComposablePolicy):
        return policy
    if not callable(policy):
        raise UsageError(f"a retry policy must be callable with (verdict, context); {reprlib.repr(policy)} is not")
    return ComposablePolicy(policy)


def _to_factory(vote: Callable[[Verdict, RetryContext], Vote]) -> Callable[[], ComposablePolicy]:
    """Decorate the function of a policy: returns a function without arguments that creates the policy."""

    def make() -> ComposablePolicy:
        return ComposablePolicy(vote)

    make.__name__, make.__qualname__, make.__doc__ = vote.__name__, vote.__qualname__, vote.__doc__
    return make


# --- policies -------------------------------------------------------------------------------------------------------


@_to_factory
def explicit(verdict: Verdict, _context: RetryContext) -> Vote:
    """Retry on the user's budget if the worker raised the root cause as a recoverable type."""
    root = verdict.root
    if root is not None and root.recoverable and root.origin is not Origin.SYSTEM:
        return Vote(retry=True, reason=f"{root.what} was raised as recoverable", origin=Origin.USER)
    return Vote(retry=False, reason="nothing was raised as recoverable")


@_to_factory
def declared(verdict: Verdict, _context: RetryContext) -> Vote:
    """Retry on the system's budget if the root cause's document is marked RECOVERABLE and SYSTEM.

    Flyte's entrypoint writes that for errors outside of the task function, our agent for its own failures.
    """
    root = verdict.root
    if root is not None and root.recoverable and root.origin is Origin.SYSTEM:
        who = "Flyte's entrypoint" if root.writer is Writer.STOCK else "the agent"
        return Vote(retry=True, reason=f"{who} reported a recoverable system error", origin=Origin.SYSTEM)
    return Vote(retry=False, reason="no system error was reported")


def on_category(*categories: str, origin: Origin = Origin.SYSTEM) -> ComposablePolicy:
    """Retry if the root cause has one of `categories`, by default on the system's budget.

    Raises:
        UsageError: a category is unknown.
    """
    unknown = sorted(set(categories) - set(CATEGORIES))
    if unknown:
        raise UsageError(f"unknown category {', '.join(unknown)}; known are {', '.join(CATEGORIES)}")

    def vote(verdict: Verdict, _context: RetryContext) -> Vote:
        if verdict.category in categories:
            return Vote(retry=True, reason=CATEGORIES[verdict.category], origin=origin)
        return Vote(retry=False, reason=f"the policy doesn't retry {verdict.category}")

    return ComposablePolicy(vote)


@_to_factory
def host_evidence(verdict: Verdict, _context: RetryContext) -> Vote:
    """Retry on the system's budget if evidence shows that the machine is at fault. A program's text doesn't count.

    The evidence is one of two: the kernel's OOM killer killed a process although the container was below its limit; or
    a GPU's driver reported a hardware fault: in the kernel's log, in an exception from native code or torch, or in the
    log of a crash.
    """
    root = verdict.root
    # A console log doesn't show the memory limit of the job, at which schedulers have the kernel kill its processes.
    has_limit = root is not None and root.place.engine != OF_LOGS
    memory = root.resources if root is not None and has_limit and verdict.category == "host_oom" else None
    if memory is not None and memory.oom_kill and _is_container_below_limit(memory):
        return Vote(retry=True, reason="the host ran out of memory, not the container", origin=Origin.SYSTEM)
    # a process in a console log has this category only if the kernel's log has its GPU's fault
    is_in_kernel_log = root is not None and not has_limit and root.category == "gpu_hardware"
    if root is not None and verdict.category == "gpu_hardware" and (is_in_kernel_log or _is_from_native_code(root)):
        return Vote(retry=True, reason=CATEGORIES["gpu_hardware"], origin=Origin.SYSTEM)
    return Vote(retry=False, reason="no evidence that the machine is at fault")


def _is_container_below_limit(resources: Resources) -> bool:
    limit, peak = resources.memory_limit_bytes, resources.memory_peak_bytes
    # the peak may be sampled, and so be too low; only below half of the limit did it certainly not reach the limit
    return limit is None or (peak is not None and peak < limit / 2)


def _is_from_native_code(root: WorkerError) -> bool:
    """Whether native code or torch wrote the text: a `raise` in the user's code proves nothing about the machine."""
    if root.exception is None:
        return root.writer is Writer.AGENT and root.signal in _CRASH_SIGNALS and bool(root.log_tail)
    if not root.exception.frames:
        return False  # unknown
    innermost = root.exception.frames[-1]
    if root.exception.type.rsplit(".", 1)[-1] not in _DRIVER_ERROR_TYPES:
        return False
    is_raised_here = not innermost.code or _RAISE_LINE.search(innermost.code) is not None
    return _TORCH_FILE.search(innermost.file) is not None or not is_raised_here


@_to_factory
def same_fault_again(verdict: Verdict, context: RetryContext) -> Vote:
    """True if the previous attempt, or for a restart the previous round, failed with the same fingerprint.

    For use with `~`.
    """
    same = bool(verdict.fingerprint) and verdict.fingerprint == context.previous_fingerprint
    before = "attempt" if context.restarts_left is None else "round"
    return Vote(retry=same, reason=f"the previous {before} failed with {'the same' if same else 'a different'} fault")


@_to_factory
def exhausted(_verdict: Verdict, context: RetryContext) -> Vote:
    """True if the task's `retries` are used up; a restart within the attempt uses none."""
    # without a count of the attempts that used a retry, each earlier attempt counts as one
    left = context.retries_left
    if left is None and context.retries is not None:
        left = max(context.retries - context.attempt, 0)
    over = context.restarts_left is None and left == 0
    return Vote(retry=over, reason="all retries are used up" if over else "retries are left")


@_to_factory
def same_fault_everywhere(verdict: Verdict, _context: RetryContext) -> Vote:
    """True if all ranks failed with the same fault, which a retry would probably meet again."""
    world = verdict.root.place.world_size if verdict.root is not None else 0
    # a bug or a bad configuration fails on every rank; broken hardware, on one
    same = verdict.scope is Scope.RANKS and world > 1 and len(verdict.ranks) >= world
    return Vote(retry=same, reason="the same fault on all ranks" if same else "not the same fault on all ranks")


def made_progress(*, minutes: float) -> ComposablePolicy:
    """True if the ranks had trained for `minutes` since the last start or restart of the workers; false if unknown.

    For use with another policy: ``on_category("storage") & made_progress(minutes=30)``.

    Raises:
        UsageError: `minutes` isn't a number above 0.
    """
    if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not minutes > 0:
        raise UsageError(f"made_progress needs a number of minutes above 0, not {minutes!r}")

    def vote(_verdict: Verdict, context: RetryContext) -> Vote:
        trained = context.trained_seconds / 60
        # rounded down: "30 of 30 min" must not be a reason against a retry
        return Vote(retry=trained >= minutes, reason=f"trained for {int(trained)} of {minutes:g} min")

    return ComposablePolicy(vote)


def stuck_at_start(*, attempts: int) -> ComposablePolicy:
    """True if this attempt and those before, at least `attempts` in a row, failed before they had trained for a minute.

    For use with `~`: ``default_policy() & ~stuck_at_start(attempts=3)`` stops a job with a new error at each start.

    Raises:
        UsageError: `attempts` isn't a number above 0.
    """
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
        raise UsageError(f"stuck_at_start needs a number of attempts above 0, not {attempts!r}")

    def vote(verdict: Verdict, context: RetryContext) -> Vote:
        count = _count_failed_starts(verdict, context)
        return Vote(retry=count >= attempts, reason=f"{count} attempts in a row failed at their start")

    return ComposablePolicy(vote)


def _count_failed_starts(verdict: Verdict, context: RetryContext) -> int:
    if verdict.category == "preemption":  # it shows nothing about the job
        return context.failed_starts
    is_restarted = verdict.root is not None and verdict.root.place.round > 0
    # a failed rendezvous takes minutes without any training
    is_short = context.trained_seconds < _MIN_TRAINED_SECONDS or verdict.category == "rendezvous"
    is_failed_start = context.lifetime_seconds > 0 and is_short and not is_restarted
    return context.failed_starts + 1 if is_failed_start else 0


@_to_factory
def never(_verdict: Verdict, _context: RetryContext) -> Vote:
    """Never retry."""
    return Vote(retry=False, reason="the policy never retries")


def default_policy() -> ComposablePolicy:
    """Return firstfault's default policy.

    It retries recoverable exceptions on the user's budget. It retries preemptions, lost nodes, proven faults of the
    machine and recoverable system errors on the system's budget. It retries nothing else, no exception of
    `RETRY_REFUSALS`, and no attempt that reached its time limit. An error message alone never uses the system's budget.
    """
    is_worth_it = explicit() | ComposablePolicy(_preempted_or_lost) | host_evidence() | declared()
    return is_worth_it & ComposablePolicy(_not_refused)


def _not_refused(verdict: Verdict, _context: RetryContext) -> Vote:
    refusal = _find_refusal(verdict.root)
    return Vote(retry=not refusal, reason=f"{refusal} asks for no retry" if refusal else "")


def _find_refusal(root: WorkerError | None) -> str:
    """Return the name of the type by which the program refuses a retry; empty: it doesn't."""
    raised = root.exception if root is not None else None
    names = (name.rsplit(".", 1)[-1] for name in (raised.type, *raised.bases)) if raised is not None else ()
    return next((name for name in names if name in RETRY_REFUSALS), "")


def _preempted_or_lost(verdict: Verdict, context: RetryContext) -> Vote:
    if verdict.is_at_time_limit:
        return Vote(retry=False, reason=_TIME_LIMIT_REASON)
    if verdict.code == CANCELLED:
        return Vote(retry=False, reason="somebody cancelled the job")
    # SIGINT to one node of an elastic job: the remaining nodes restart without it, as torch does
    if verdict.category == "interrupted" and verdict.scope is Scope.EXTERNAL and context.restarts_left is not None:
        return Vote(retry=True, reason="a node was interrupted, the remaining nodes continue", origin=Origin.SYSTEM)
    return on_category("preemption", "node_lost")(verdict, context)


def decide(verdict: Verdict, policy: RetryPolicy | None = None, context: RetryContext | None = None) -> Decision:
    """Return the decision of a policy (None: the default policy) on a verdict.

    Raises:
        UsageError: `policy` isn't callable, or its vote has an unknown origin.
    """
    context = context or RetryContext()
    root = verdict.root
    vote = to_policy(policy if policy is not None else default_policy())(verdict, context)
    try:  # a user's policy may return a Vote with fields of other types
        vote = Vote(bool(vote.retry), str(vote.reason), None if vote.origin is None else Origin(vote.origin))
    except ValueError as error:
        raise UsageError(f"a retry policy's vote has the origin {reprlib.repr(vote.origin)}") from error
    repeats = _find_repeat(verdict, context)
    if vote.retry and repeats and context.stops_repeats:
        vote = Vote(retry=False, reason=repeats)
    if vote.retry:
        # Flyte counts retries of USER errors against the task's `retries`, and those of SYSTEM errors separately.
        origin = vote.origin or Origin.USER
        if context.restarts_left is not None:
            paid = "uses one of max_restarts"
        elif context.engine not in {"", "flyte"} and context.retries is None:
            paid = ""  # no engine counts retries
        elif origin is Origin.SYSTEM:
            paid = "uses none of the task's retries"
        elif context.retries_left == 0:
            paid = f"all {context.retries or 0} retries are used up"
        else:
            paid = "uses one of the task's retries"
        reason = f"{vote.reason} ({paid})" if paid else vote.reason
    else:
        is_known = verdict.scope is not Scope.UNDETERMINED
        origin = root.origin if root is not None else Origin.USER if is_known else Origin.UNKNOWN
        reason = vote.reason if policy is not None or vote.reason == repeats else _explain_no_retry(verdict, context)
    if (same_fault := same_fault_again()(verdict, context)) and same_fault.reason not in reason:
        reason = f"{reason}, and {same_fault.reason}"
    return Decision(
        retry=vote.retry,
        kind=Kind.RECOVERABLE if vote.retry else Kind.NON_RECOVERABLE,
        origin=origin,
        enforced=context.pods_alive,
        reason=reason,
        retries_left=context.retries_left,
        action=_choose_action(verdict, context, vote, repeats),
        failed_starts=_count_failed_starts(verdict, context),
    )


def _find_repeat(verdict: Verdict, context: RetryContext) -> str:
    """Return why another attempt would only repeat this one; empty: nothing shows that."""
    if verdict.category == "preemption" or context.restarts_left is not None:
        return ""
    # a node may be lost twice by chance
    same_fault = same_fault_again()(verdict, context)
    if same_fault and verdict.category != "node_lost" and not made_progress(minutes=_REPEAT_MINUTES)(verdict, context):
        return f"{same_fault.reason}, and this one made no progress"
    stuck = stuck_at_start(attempts=_MAX_FAILED_STARTS)(verdict, context)
    return stuck.reason if stuck else ""


def _choose_action(verdict: Verdict, context: RetryContext, vote: Vote, repeats: str) -> Action:
    if vote.retry:
        return Action.SYSTEM if vote.origin is Origin.SYSTEM else Action.RETRY
    is_unknown = _explain_no_retry(verdict, context) in _UNCERTAIN_REASONS
    return Action.UNKNOWN if is_unknown and not repeats else Action.STOP


def _explain_no_retry(verdict: Verdict, context: RetryContext) -> str:
    if verdict.scope is Scope.UNDETERMINED:
        return _UNKNOWN_CAUSE_REASON
    if verdict.is_at_time_limit:
        return _TIME_LIMIT_REASON
    if refusal := _find_refusal(verdict.root):
        return f"{refusal} asks for no retry"
    if verdict.code == CANCELLED:
        return "somebody cancelled the job"
    if verdict.category != "interrupted" and (everywhere := same_fault_everywhere()(verdict, context)):
        return f"{everywhere.reason}, so a retry would probably fail again"
    if reason := _explain_replaced_request(verdict.root):
        return reason
    if verdict.category == "storage" and verdict.root is not None and is_unexplained_write(verdict.root):
        return _UNEXPLAINED_WRITE_REASON
    if verdict.category in _CATEGORIES_WITHOUT_CAUSE:
        return _UNKNOWN_CAUSE_REASON
    return ABOUT_CATEGORIES.get(verdict.category, {}).get("against", _NO_PROOF_REASON)


def _explain_replaced_request(root: WorkerError | None) -> str:
    """Return a sentence if the program replaced an exception that requests a retry by another; otherwise empty."""
    if root is None or root.exception is None or root.recoverable:
        return ""
    # `except FlyteRecoverableException: raise TrainingError(...)`: the type of the raised exception counts
    raised = root.exception
    outer, *inner = (link.type.rsplit(".", 1)[-1] for link in (raised, *raised.causes, *raised.members))
    request = next((name for name in inner if name in RETRY_REQUESTS), None)
    return f"{outer} replaced {request}, and isn't recoverable itself" if request else ""
