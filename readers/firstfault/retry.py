"""Retry policies: whether to run a task again, and which retry budget pays.

A policy is a callable of (verdict, context) that returns a `Vote` or a bool. Policies compose:
``explicit() | on_category("preemption", "node_lost") & ~exhausted()``. `decide` applies one and
returns the `Decision`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field

from firstfault.errors import UsageError
from firstfault.evidence.certain_bugs import (
    CATEGORIES_WITHOUT_CAUSE,
    FINISHED_REASON,
    TIME_LIMIT_REASON,
    explain_missing_program,
    explain_replaced_request,
    explain_unknown,
    find_certain_bug,
)
from firstfault.evidence.signatures import Pattern
from firstfault.exceptions.fatal_text import find_telling_line
from firstfault.exceptions.first_cause import iter_exceptions
from firstfault.exceptions.source_files import is_library_file
from firstfault.exceptions.stack_position import locate_main_thread
from firstfault.model import (
    CATEGORIES,
    Action,
    Decision,
    ExceptionInfo,
    Kind,
    Origin,
    Resources,
    Scope,
    Subject,
    Verdict,
    WorkerError,
    Writer,
)
from firstfault.model.failure import (
    ABOUT_CATEGORIES,
    CANCELLED,
    CTRL_C,
    HANGUP,
    OF_LOGS,
    REQUEUED,
    TEARDOWN,
)
from firstfault.model.job import Progress
from firstfault.utils.text import describe_used_up

_DRIVER_ERROR_TYPES = {"RuntimeError", "AcceleratorError", "DistBackendError"}
"""Exceptions that torch raises for a GPU driver error."""
_TORCH_FILE = re.compile(r"/(?:site|dist)-packages/torch/")
_RAISE_LINE = re.compile(r"\b(?:raise|assert|throw)\b")
_CRASH_SIGNALS = {"SIGABRT", "SIGSEGV", "SIGBUS"}
"""Signals by which a process dies after a GPU driver error."""
_MIN_TRAINED_SECONDS = 60
_REPEAT_MINUTES = 10
"""An attempt that trained longer had overcome the fault of the previous attempt."""
_WAITING_CATEGORIES = {"hang", "rendezvous"}
"""Categories in which time without collectives before the failure was waiting, not training."""
_PROGRAM_CATEGORIES = {"user_code", "input", "config", "data", "numerics"}
"""Categories of faults that may depend on the program and its inputs alone, not on a service,
a storage or a GPU.
"""
_NATIVE_TYPES = {"RuntimeError", "SystemError", "MemoryError"}
"""Builtin exceptions that torch's native code raises for drivers, devices and memory."""
_ENGINES_OF_PODS = {"flyte", "flyte2"}
_NO_RETRY_BY_CODE = {
    CANCELLED: "a person or a script canceled the job",
    REQUEUED: "the scheduler has requeued the job",
}
HOST_CATEGORIES = {"host_oom", "gpu_hardware"}
"""Categories of root causes with documents that may prove that the machine is at fault."""
_GUESSED_PLATFORM_CATEGORIES = {"preemption", "node_lost", "interrupted"}
"""Categories that only a signal or silence shows, as a time limit,
a liveness probe or the program itself does.
"""


@dataclass(frozen=True, slots=True)
class RetryContext:
    """The input of a policy in addition to the verdict."""

    attempt: int = 0
    retries: int | None = None
    """The task's `retries`; None if unknown."""
    retries_left: int | None = None
    """Retries that no earlier attempt has used. None if unknown, because attempts that the platform
    lost use none.
    """
    pods_alive: bool = True
    """Whether every pod is alive to write the verdict for stock Flyte. False after a pod was lost.
    """
    previous_fingerprint: str = ""
    """Fingerprint of the previous attempt's verdict, or for a restart of the previous round's;
    empty if unknown.
    """
    previous_machine: str = ""
    """Machine of that verdict's root cause, as returned by `find_machine`; empty if unknown."""
    restarts_left: int | None = None
    """None if the question is whether to run another attempt. Otherwise the question is whether to
    restart the workers within this attempt, with this number of `max_restarts` left.
    """
    engine: str = ""
    """The same as `Place.engine`."""
    progress: Progress = field(default_factory=Progress)
    """Progress of the training in its last round."""
    lifetime_seconds: float = 0.0
    """Seconds from the start of the attempt to its failure; 0 if unknown."""
    failed_starts: int = 0
    """Attempts in a row, before this one, that failed before they had trained for a minute."""
    stops_repeats: bool = False
    """Whether an attempt that failed with the previous attempt's fault and without progress is
    never repeated, whatever the policy votes. Schedulers that retry without a budget need it.
    """

    @property
    def has_enforcer(self) -> bool:
        """Whether Flyte runs the job, or the engine is unknown:
        no other engine reads a decision from the files.
        """
        return not self.engine or self.engine in _ENGINES_OF_PODS

    @property
    def trained_seconds(self) -> float:
        """Time between the first and the last collective; without known collectives,
        how long the attempt took.
        """
        return (
            self.progress.seconds
            if self.progress.collectives
            else self.lifetime_seconds or self.progress.seconds
        )


@dataclass(frozen=True, slots=True)
class Vote:
    """A policy's answer. Its truth value is `retry`."""

    retry: bool
    reason: str
    origin: Origin | None = None
    """The budget that pays for the retry, the user's or the system's. None means the user's."""

    def __bool__(self) -> bool:
        return self.retry


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
            # both votes are to retry: the vote with a budget wins, as in `~exhausted() &
            # on_category("node_lost")`
            return (
                vote
                if not vote or (own_vote.origin is None and vote.origin is not None)
                else own_vote
            )

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
        raise UsageError(
            f"a retry policy must be callable with (verdict, context); {reprlib.repr(policy)}"
            " is not"
        )
    return ComposablePolicy(policy)


def _to_factory(vote: Callable[[Verdict, RetryContext], Vote]) -> Callable[[], ComposablePolicy]:
    """Decorate the function of a policy: returns a function without arguments
    that creates the policy.
    """

    def make() -> ComposablePolicy:
        return ComposablePolicy(vote)

    make.__name__, make.__qualname__, make.__doc__ = vote.__name__, vote.__qualname__, vote.__doc__
    return make


# --- policies -------------------------------------------------------------------------------------


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

    Flyte's entrypoint writes that for errors outside of the task function, our agent for its own
    failures.
    """
    root = verdict.root
    if root is not None and root.recoverable and root.origin is Origin.SYSTEM:
        who = "Flyte's entrypoint" if root.writer is Writer.STOCK else "the agent"
        return Vote(
            retry=True, reason=f"{who} reported a recoverable system error", origin=Origin.SYSTEM
        )
    return Vote(retry=False, reason="no system error was reported")


def on_category(*categories: str, origin: Origin = Origin.SYSTEM) -> ComposablePolicy:
    """Retry if the root cause has one of `categories`, by default on the system's budget.

    Raises:
        UsageError: a category is unknown.
    """
    unknown = sorted(set(categories) - set(CATEGORIES))
    if unknown:
        raise UsageError(
            f"unknown category {', '.join(unknown)}; known are {', '.join(CATEGORIES)}"
        )

    def vote(verdict: Verdict, _context: RetryContext) -> Vote:
        if verdict.category in categories:
            return Vote(retry=True, reason=CATEGORIES[verdict.category], origin=origin)
        return Vote(retry=False, reason=f"the policy doesn't retry {verdict.category}")

    return ComposablePolicy(vote)


@_to_factory
def host_evidence(verdict: Verdict, _context: RetryContext) -> Vote:
    """Retry on the system's budget if evidence shows that the machine is at fault. A
    program's text doesn't count.

    The evidence is one of two: the kernel's OOM killer killed a process although the container was
    below its limit; or a GPU's driver reported a hardware fault: in the kernel's log, in an
    exception from native code or torch, or in the log of a crash.
    """
    root = verdict.root
    # A console log doesn't show the memory limit of the job, at which schedulers have the kernel
    # kill its processes.
    has_limit = root is not None and root.place.engine != OF_LOGS
    memory = (
        root.resources
        if root is not None and has_limit and verdict.category == "host_oom"
        else None
    )
    if memory is not None and memory.oom_kill and _is_container_below_limit(memory):
        return Vote(
            retry=True, reason="the host ran out of memory, not the container", origin=Origin.SYSTEM
        )
    # a process in a console log has this category only if the kernel's log has its GPU's fault
    is_in_kernel_log = root is not None and not has_limit and root.category == "gpu_hardware"
    if (
        root is not None
        and verdict.category == "gpu_hardware"
        and (is_in_kernel_log or _is_from_native_code(root))
    ):
        return Vote(retry=True, reason=CATEGORIES["gpu_hardware"], origin=Origin.SYSTEM)
    return Vote(retry=False, reason="no evidence that the machine is at fault")


def _is_container_below_limit(resources: Resources) -> bool:
    limit, peak = resources.memory_limit_bytes, resources.memory_peak_bytes
    # the peak may be sampled, and so be too low; only below half of the limit did it certainly not
    # reach the limit
    return limit is None or (peak is not None and peak < limit / 2)


def _is_from_native_code(root: WorkerError) -> bool:
    """Whether native code or torch wrote the text:
    a `raise` in the user's code proves nothing about the machine.
    """
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
    """True if the previous attempt, or for a restart the previous round,
    failed with the same fault.

    The fault is the same if the fingerprint is, and if it came on the same machine: an outage of a
    storage hits one machine after another. Only an exception that the program itself raised is the
    same on any machine. For use with `~`.
    """
    is_same_fault = (
        bool(verdict.fingerprint) and verdict.fingerprint == context.previous_fingerprint
    )
    is_same_fault = is_same_fault and (
        _is_raised_by_program(verdict) or _is_same_machine(verdict, context)
    )
    earlier_run = "attempt" if context.restarts_left is None else "round"
    return Vote(
        retry=is_same_fault,
        reason=f"the previous {earlier_run} failed with"
        f" {'the same' if is_same_fault else 'a different'} fault",
    )


def _is_raised_by_program(verdict: Verdict) -> bool:
    """Whether the program's own code raised the root cause,
    and nothing in its chain is from outside of it.

    The same failure on another machine then shows all the more that it is the program's.
    """
    exception = verdict.root.exception if verdict.root is not None else None
    if exception is None or verdict.category not in _PROGRAM_CATEGORIES:
        return False
    return all(map(_is_of_own_code, iter_exceptions(exception)))


def _is_of_own_code(exception: ExceptionInfo) -> bool:
    if not exception.frames or is_library_file(exception.frames[-1].file):
        return False
    if "OSError" in {exception.type, *exception.bases}:
        return False  # files, connections, time limits
    # Native code has no frames: its exceptions seem to come from the program's line that called it.
    is_builtin = "." not in exception.type and exception.type not in _NATIVE_TYPES
    return is_builtin or _RAISE_LINE.search(exception.frames[-1].code) is not None


def _is_same_machine(verdict: Verdict, context: RetryContext) -> bool:
    machine = _find_machine_here(verdict, context)
    return bool(machine) and machine == context.previous_machine


def _find_machine_here(verdict: Verdict, context: RetryContext) -> str:
    # the nodes of an attempt stay where they are, so a restart's record has only their names
    return find_machine(verdict) if context.restarts_left is None else verdict.node or ""


def find_machine(verdict: Verdict) -> str:
    """Return what identifies the machine of a verdict's root cause in another attempt, or an empty
    string if it is unknown.
    """
    root = verdict.root
    if root is None:
        return verdict.machine or verdict.node or ""
    # a pod has the same name on whichever machine it runs; the kernel's boot id is the machine's
    is_pod = bool(root.place.namespace) or root.place.engine in _ENGINES_OF_PODS
    return root.place.machine or (root.boot_id if is_pod else root.node)


@_to_factory
def exhausted(_verdict: Verdict, context: RetryContext) -> Vote:
    """True if the task's `retries` are used up; a restart within the attempt uses none."""
    # without a count of the attempts that used a retry, each earlier attempt counts as one
    retries_left = context.retries_left
    if retries_left is None and context.retries is not None:
        retries_left = max(context.retries - context.attempt, 0)
    are_used_up = context.restarts_left is None and retries_left == 0
    return Vote(
        retry=are_used_up, reason="all retries are used up" if are_used_up else "retries are left"
    )


@_to_factory
def same_fault_everywhere(verdict: Verdict, _context: RetryContext) -> Vote:
    """True if all ranks failed with the same fault, which a retry would probably meet again."""
    world = verdict.root.place.world_size if verdict.root is not None else 0
    # a bug or a bad configuration fails on every rank; broken hardware, on one
    covers_all_ranks = verdict.scope is Scope.RANKS and world > 1 and len(verdict.ranks) >= world
    return Vote(
        retry=covers_all_ranks,
        reason="the same fault on all ranks"
        if covers_all_ranks
        else "not the same fault on all ranks",
    )


def made_progress(*, minutes: float) -> ComposablePolicy:
    """True if the ranks had trained for `minutes` since the last start or restart of the workers;
    false if unknown.

    For use with another policy: ``on_category("storage") & made_progress(minutes=30)``.

    Raises:
        UsageError: `minutes` isn't a number above 0.
    """
    if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not minutes > 0:
        raise UsageError(f"made_progress needs a number of minutes above 0, not {minutes!r}")

    def vote(verdict: Verdict, context: RetryContext) -> Vote:
        trained = _count_trained_seconds(verdict, context) / 60
        # rounded down: "30 of 30 min" must not be a reason against a retry
        return Vote(
            retry=trained >= minutes, reason=f"trained for {int(trained)} of {minutes:g} min"
        )

    return ComposablePolicy(vote)


def stuck_at_start(*, attempts: int) -> ComposablePolicy:
    """True if this attempt and those before, at least `attempts` in a row,
    failed before they had trained for a minute.

    For use with `~`: ``default_policy() & ~stuck_at_start(attempts=3)`` stops a job with a new
    error at each start.

    Raises:
        UsageError: `attempts` isn't a number above 0.
    """
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
        raise UsageError(f"stuck_at_start needs a number of attempts above 0, not {attempts!r}")

    def vote(verdict: Verdict, context: RetryContext) -> Vote:
        count = _count_failed_starts(verdict, context)
        return Vote(
            retry=count >= attempts, reason=f"{count} attempts in a row failed at their start"
        )

    return ComposablePolicy(vote)


def _count_trained_seconds(verdict: Verdict, context: RetryContext) -> float:
    """Return how long the ranks had trained until the failure.

    After their last collective they did work without collectives, such as an evaluation, unless
    they waited.
    """
    went_on = context.progress.collectives > 0 and verdict.category not in _WAITING_CATEGORIES
    return context.trained_seconds + (context.progress.idle_seconds if went_on else 0.0)


def _count_failed_starts(verdict: Verdict, context: RetryContext) -> int:
    if verdict.category == "preemption":  # it shows nothing about the job
        return context.failed_starts
    is_restarted = verdict.root is not None and verdict.root.place.round > 0
    # a failed rendezvous takes minutes without any training
    is_short = (
        _count_trained_seconds(verdict, context) < _MIN_TRAINED_SECONDS
        or verdict.category == "rendezvous"
    )
    is_failed_start = context.lifetime_seconds > 0 and is_short and not is_restarted
    return context.failed_starts + 1 if is_failed_start else 0


@_to_factory
def never(_verdict: Verdict, _context: RetryContext) -> Vote:
    """Never retry."""
    return Vote(retry=False, reason="the policy never retries")


def default_policy() -> ComposablePolicy:
    """Return firstfault's default policy.

    It retries recoverable exceptions on the user's budget. It retries preemptions, lost nodes,
    proven faults of the machine and recoverable system errors on the system's budget. It asks for
    no other retry, for none after an exception of `RETRY_REFUSALS`, and for none after a time
    limit. An error message alone never uses the system's budget. Where it asks for no retry,
    `find_proof_of_repeat` distinguishes a stop from an unknown outcome.
    """
    is_worth_it = explicit() | ComposablePolicy(_preempted_or_lost) | host_evidence() | declared()
    return is_worth_it & ComposablePolicy(_vote_unless_refused)


def _vote_unless_refused(verdict: Verdict, _context: RetryContext) -> Vote:
    if verdict.category == TEARDOWN:
        return Vote(retry=False, reason=FINISHED_REASON)
    refusal = _find_refusal(verdict.root)
    return Vote(retry=not refusal, reason=f"{refusal} asks for no retry" if refusal else "")


def _find_refusal(root: WorkerError | None) -> str:
    """Return the name of the type by which the program refuses a retry, or "" without one."""
    raised = root.exception if root is not None else None
    names = (
        (name.rsplit(".", 1)[-1] for name in (raised.type, *raised.bases))
        if raised is not None
        else ()
    )
    return next((name for name in names if name in RETRY_REFUSALS), "")


def _preempted_or_lost(verdict: Verdict, context: RetryContext) -> Vote:
    if verdict.is_at_time_limit:
        return Vote(retry=False, reason=TIME_LIMIT_REASON)
    if verdict.code in _NO_RETRY_BY_CODE:
        return Vote(retry=False, reason=_NO_RETRY_BY_CODE[verdict.code])
    # SIGINT to one node of an elastic job: the remaining nodes restart without it, as torch does
    if (
        verdict.category == "interrupted"
        and verdict.scope is Scope.EXTERNAL
        and context.restarts_left is not None
    ):
        return Vote(
            retry=True,
            reason="a node was interrupted, the remaining nodes continue",
            origin=Origin.SYSTEM,
        )
    return on_category("preemption", "node_lost")(verdict, context)


def decide(
    verdict: Verdict, policy: RetryPolicy | None = None, context: RetryContext | None = None
) -> Decision:
    """Return the decision of a policy on a verdict, with the default policy if `policy` is None.

    Raises:
        UsageError: `policy` isn't callable, or its vote has an unknown origin.
    """
    context = context or RetryContext()
    root = verdict.root
    vote = to_policy(policy if policy is not None else default_policy())(verdict, context)
    try:  # a user's policy may return a Vote with fields of other types
        vote = Vote(
            bool(vote.retry), str(vote.reason), None if vote.origin is None else Origin(vote.origin)
        )
    except ValueError as error:
        raise UsageError(
            f"a retry policy's vote has the origin {reprlib.repr(vote.origin)}"
        ) from error
    repeats = _find_repeat(verdict, context)
    if vote.retry and repeats and (context.stops_repeats or context.restarts_left is not None):
        vote = Vote(retry=False, reason=repeats)
    proof = "" if vote.retry else find_proof_of_repeat(verdict, context)
    if vote.retry:
        # Flyte counts retries of USER errors against the task's `retries`, and those of SYSTEM
        # errors separately.
        origin = vote.origin or Origin.USER
        if context.restarts_left is not None:
            paid = "uses one of max_restarts"
        elif context.engine not in {"", "flyte"} and context.retries is None:
            paid = ""  # no engine counts retries
        elif origin is Origin.SYSTEM:
            paid = "uses none of the task's retries"
        elif context.retries_left == 0:
            paid = describe_used_up(context.retries or 0, "retry")
        else:
            paid = "uses one of the task's retries"
        reason = f"{vote.reason} ({paid})" if paid else vote.reason
    else:
        is_known = verdict.scope is not Scope.UNDETERMINED
        origin = root.origin if root is not None else Origin.USER if is_known else Origin.UNKNOWN
        is_own = policy is not None and vote.reason != repeats
        is_of_flyte = context.engine in {"", "flyte"} and context.restarts_left is None
        reason = (
            vote.reason if is_own else proof or explain_unknown(verdict, is_of_flyte=is_of_flyte)
        )
    # a task's own policy may refuse a retry without a proof, but has nothing to go by if the cause
    # isn't known
    has_known_cause = (
        verdict.scope is not Scope.UNDETERMINED and verdict.category not in CATEGORIES_WITHOUT_CAUSE
    )
    if (same_fault := same_fault_again()(verdict, context)) and same_fault.reason not in reason:
        reason = f"{reason}, and {same_fault.reason}"
    return Decision(
        retry=vote.retry,
        kind=Kind.RECOVERABLE if vote.retry else Kind.NON_RECOVERABLE,
        origin=origin,
        enforced=context.pods_alive and context.has_enforcer,
        reason=reason,
        retries_left=context.retries_left,
        action=_choose_action(
            verdict,
            context,
            vote,
            is_stop=bool(proof) or (policy is not None and has_known_cause),
        ),
        failed_starts=_count_failed_starts(verdict, context),
    )


def find_proof_of_repeat(verdict: Verdict, context: RetryContext) -> str:
    """Return what proves that a retry would fail again or isn't wanted, or an empty string without
    such a proof.

    Without a proof a scheduler does what it does without firstfault. That the same fault hit all
    ranks is none: an outage of a storage hits them all.
    """
    if verdict.category == TEARDOWN:
        return FINISHED_REASON
    if refusal := _find_refusal(verdict.root):
        return f"{refusal} asks for no retry"
    if verdict.code in _NO_RETRY_BY_CODE:
        return _NO_RETRY_BY_CODE[verdict.code]
    if verdict.code in {CTRL_C, HANGUP}:
        return "a person interrupted it"
    if repeat := _find_repeat(verdict, context):
        return repeat
    # the program handled the exception of a rank out of step; what it would do next time isn't
    # proven
    is_inferred = verdict.rule == "out-of-step"
    is_certain = verdict.confidence != "low" and not verdict.suspects and not is_inferred
    is_of_program = ABOUT_CATEGORIES.get(verdict.category, {}).get("owner") == "code"
    if (
        verdict.root is None
        or not is_certain
        or not is_of_program
        or explain_replaced_request(verdict.root)
    ):
        return ""
    bug = find_certain_bug(verdict.root) or explain_missing_program(
        verdict.root, len(verdict.ranks)
    )
    return f"{bug}, so it would fail again" if bug else ""


def _find_repeat(verdict: Verdict, context: RetryContext) -> str:
    """Return why another attempt or restart would only repeat this failure, or an empty string if
    nothing shows that it would.
    """
    root = verdict.root
    is_restart = context.restarts_left is not None
    # A restart was requested, and each of these is one of max_restarts.
    is_requested = (
        is_restart and root is not None and root.recoverable and root.origin is not Origin.SYSTEM
    )
    # A node may be lost, preempted or interrupted twice by chance.
    is_chance = verdict.category in _GUESSED_PLATFORM_CATEGORIES
    # The next attempt may get another machine than the broken one.
    is_of_machine = not is_restart and bool(host_evidence()(verdict, context))
    if is_requested or is_chance or is_of_machine:
        return ""
    same_fault = same_fault_again()(verdict, context)
    if same_fault and _has_known_place(verdict) and _is_short(verdict, context):
        return f"{same_fault.reason}, and this one trained less than {_REPEAT_MINUTES} minutes"
    return ""


def _has_known_place(verdict: Verdict) -> bool:
    """Whether the fingerprint of the root cause includes where it failed:
    two SIGKILLs need not be the same fault.
    """
    root = verdict.root
    if root is None or root.exception is not None:
        return root is not None
    if root.expired is not None or root.sent_signals:
        return bool(locate_main_thread(root).frame)
    return not root.signal and bool(find_telling_line(root.printed) or root.message)


def _is_short(verdict: Verdict, context: RetryContext) -> bool:
    """Whether the attempt, or the round, is known to have trained too briefly to have
    overcome the last fault.
    """
    is_known = context.lifetime_seconds > 0 or context.progress.collectives > 0
    return is_known and _count_trained_seconds(verdict, context) < 60 * _REPEAT_MINUTES


def _choose_action(verdict: Verdict, context: RetryContext, vote: Vote, *, is_stop: bool) -> Action:
    if not vote.retry:
        return Action.STOP if is_stop else Action.UNKNOWN
    return (
        Action.SYSTEM
        if vote.origin is Origin.SYSTEM and _is_free(verdict, context)
        else Action.RETRY
    )


def _is_free(verdict: Verdict, context: RetryContext) -> bool:
    """Whether a retry on the system's budget needs no limit: the platform's fault is proven,
    and new to this machine.

    Flyte limits these retries itself. Other schedulers don't count them, and would repeat a guess
    without end. A broken GPU's errors surface at another line each time, so any failure before on
    the same machine, or on an unknown one, makes the retry count.
    """
    root = verdict.root
    is_of_agent = (
        root is not None and root.subject is Subject.AGENT and root.writer is not Writer.STOCK
    )
    is_guessed = verdict.category in _GUESSED_PLATFORM_CATEGORIES or is_of_agent
    has_failed_before = bool(context.previous_fingerprint or context.previous_machine)
    machine = _find_machine_here(verdict, context)
    previous_machine = context.previous_machine
    is_elsewhere = bool(machine) and bool(previous_machine) and machine != previous_machine
    return not is_guessed and (is_elsewhere or not has_failed_before)


# The driver has lost a GPU, which only a reset or a reboot of the machine brings back
_GPU_GONE = Pattern(
    r"fallen off the bus|\bXid\b[^\n]{0,40}: ?79\b|\bXid[ =]{1,2}79\b"
    r"|GPU is lost|GPU has (?:been )?(?:lost|disappeared)"
)


def is_gpu_gone(verdict: Verdict) -> bool:
    """Whether the driver reported that the machine has lost its GPU:
    no process on it can use the GPU again.
    """
    root = verdict.root
    if (
        root is None
        or verdict.category != "gpu_hardware"
        or not host_evidence()(verdict, RetryContext())
    ):
        return False
    text = root.exception.message if root.exception is not None else root.printed
    return _GPU_GONE.search(text) is not None
