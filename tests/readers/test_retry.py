"""Retry policies and the decision."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from firstfault.errors import UsageError
from firstfault.model import (
    CATEGORIES,
    Decision,
    ExceptionInfo,
    FrameInfo,
    Kind,
    Origin,
    Resources,
    Scope,
    Verdict,
    WorkerError,
    Writer,
)
from firstfault.retry import (
    RetryContext,
    RetryPolicy,
    Vote,
    decide,
    declared,
    default_policy,
    exhausted,
    explicit,
    host_evidence,
    never,
    on_category,
    same_fault_again,
    same_fault_everywhere,
)
from firstfault.strategies import get_strategy, run_strategy, undetermined
from firstfault.testing import make_error, make_job
from firstfault.wire.json_schemas import decision_from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Callable

_CONTEXT = RetryContext()


def _verdict(root: WorkerError | None = None, **changes: Any) -> Verdict:
    verdict = run_strategy(get_strategy("earliest"), make_job(root or make_error(3)))
    return replace(verdict, **changes)


def _yes(verdict: Verdict, context: RetryContext) -> Vote:
    return Vote(retry=True, reason="yes", origin=Origin.SYSTEM)


def _no(verdict: Verdict, context: RetryContext) -> Vote:
    return Vote(retry=False, reason="no")


_POLICIES: dict[str, Callable[[], RetryPolicy]] = {"yes": lambda: never() | _yes, "no": lambda: never() & _yes}


# --- composition ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "retry"),
    [
        (explicit() | _yes, True),
        (explicit() | _no, False),
        (_yes | explicit(), True),
        (_no | explicit(), False),
        (~never() & _yes, True),
        (~never() & _no, False),
        (never() & _yes, False),
        (_yes & ~never(), True),
        (_no & ~never(), False),
        (_yes & never(), False),
        (~never(), True),
        (~~never(), False),
        (~(never() | _yes), False),
        (~(never() & _yes), True),
        # & binds more tightly than |
        (never() | ~never() & _no, False),
        (~never() | ~never() & _no, True),
        (never() & _yes | _yes, True),
        (never() & (_yes | never()), False),
        (never() | _no | _yes, True),
        (~never() & _yes & _no, False),
    ],
)
def test_policies_compose(policy: RetryPolicy, retry: bool) -> None:
    """`|`, `&` and `~` work in any nesting, with plain functions on either side."""
    assert bool(policy(_verdict(), _CONTEXT)) is retry


def test_either_takes_the_reason_and_budget_of_the_first_yes() -> None:
    """Of two policies that say retry, the first one's budget pays; of two that do not, both reasons are given."""
    both = on_category("user_code", origin=Origin.USER) | on_category("user_code", origin=Origin.SYSTEM)
    assert both(_verdict(), _CONTEXT).origin is Origin.USER
    neither = never() | _no
    assert neither(_verdict(), _CONTEXT) == Vote(retry=False, reason="the policy says never; no")


def test_both_takes_the_budget_of_the_first_and_the_reason_of_the_first_no() -> None:
    """If all say retry, the first one's vote stands; else the first that does not."""
    assert (on_category("user_code") & _yes)(_verdict(), _CONTEXT).reason.startswith("user_code")
    assert (on_category("user_code") & _no & never())(_verdict(), _CONTEXT).reason == "no"


def test_the_documented_example() -> None:
    """The composition in the module's docstring works: category and budget only while retries are left."""
    policy = explicit() | on_category("preemption", "node_lost") & ~exhausted()
    gone = _verdict(category="node_lost")
    assert decide(gone, policy, RetryContext(attempt=0, retries=1)).retry
    assert decide(gone, policy, RetryContext(attempt=0, retries=1)).origin is Origin.SYSTEM
    assert not decide(gone, policy, RetryContext(attempt=1, retries=1)).retry
    recoverable = _verdict(make_error(3, kind=Kind.RECOVERABLE))
    assert decide(recoverable, policy, RetryContext(attempt=1, retries=1)).retry


# --- plain callables ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [True, False])
def test_a_plain_function_is_a_policy(answer: bool) -> None:
    """A function that returns a bool decides, is named in the reason, and takes from the user's budget."""

    def on_tuesdays(verdict: Verdict, context: RetryContext) -> bool:
        return answer

    decision = decide(_verdict(), on_tuesdays)
    assert decision.retry is answer
    assert "on_tuesdays" in decision.reason
    assert decision.origin is Origin.USER


def test_a_plain_function_may_choose_the_budget() -> None:
    """A function that returns a Vote chooses reason and budget."""
    decision = decide(_verdict(), _yes)
    assert (decision.retry, decision.origin) == (True, Origin.SYSTEM)
    assert decision.reason == "yes; it uses up none of the task's retries"


def test_a_plain_function_sees_verdict_and_context() -> None:
    """A policy is called with the verdict and the context it was given."""
    seen = []
    context = RetryContext(attempt=2, retries=3)

    def policy(verdict: Verdict, context: RetryContext) -> bool:
        seen.append((verdict, context))
        return False

    verdict = _verdict()
    decide(verdict, policy, context)
    assert seen == [(verdict, context)]


@pytest.mark.parametrize("policy", [17, "never", ()])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    """A policy that is not callable raises a UsageError."""
    with pytest.raises(UsageError, match="must be callable"):
        decide(_verdict(), policy)


def test_what_is_no_policy_is_refused_in_a_composition() -> None:
    """A composition checks its parts when it is made."""
    with pytest.raises(UsageError, match="must be callable"):
        explicit() | 17


def test_an_unknown_category_is_refused() -> None:
    """An unknown category raises a UsageError that lists the known ones."""
    with pytest.raises(UsageError, match=r"unknown category premption; known are .*preemption"):
        on_category("node_lost", "premption")


# --- single policies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "origin", "by_explicit", "by_declared"),
    [
        (Kind.RECOVERABLE, Origin.USER, True, False),
        (Kind.RECOVERABLE, Origin.UNKNOWN, True, False),
        (Kind.RECOVERABLE, Origin.SYSTEM, False, True),
        (Kind.NON_RECOVERABLE, Origin.USER, False, False),
        (Kind.NON_RECOVERABLE, Origin.SYSTEM, False, False),
    ],
)
def test_explicit_and_declared(kind: Kind, origin: Origin, by_explicit: bool, by_declared: bool) -> None:
    """`explicit` matches recoverable errors of the user's code, `declared` those of Flyte and the agent."""
    verdict = _verdict(make_error(3, kind=kind, origin=origin))
    assert bool(explicit()(verdict, _CONTEXT)) is by_explicit
    assert bool(declared()(verdict, _CONTEXT)) is by_declared


@pytest.mark.parametrize(
    ("attempt", "retries", "over"),
    [(0, None, False), (9, None, False), (0, 0, True), (0, 1, False), (1, 1, True), (3, 1, True)],
)
def test_exhausted(attempt: int, retries: int | None, over: bool) -> None:
    """Retries are used up after that many attempts; never if the number is not known."""
    assert bool(exhausted()(_verdict(), RetryContext(attempt=attempt, retries=retries))) is over


def test_a_vote_of_other_types() -> None:
    """A policy's vote is converted, so that its decision can be stored; an origin that does not exist is refused."""

    class Truth:
        def __bool__(self) -> bool:
            return True

    verdict, vote = _verdict(), Vote(Truth(), 7, "SYSTEM")  # type: ignore[arg-type]
    decision = decide(verdict, lambda *_: vote, _CONTEXT)
    assert (decision.retry, decision.origin, decision.reason.split(";")[0]) == (True, Origin.SYSTEM, "7")
    assert decision_from_json(to_json(verdict, decision)) == decision
    with pytest.raises(UsageError, match="a retry policy's vote has the origin 'SOMEBODY'"):
        decide(verdict, lambda *_: Vote(retry=True, reason="x", origin="SOMEBODY"), _CONTEXT)  # type: ignore[arg-type]


@pytest.mark.parametrize(("left", "over"), [(2, False), (1, False), (0, True)])
def test_attempts_that_the_platform_lost(left: int, over: bool) -> None:
    """What is left counts, if it is known: attempts that the platform lost used no retry."""
    context = RetryContext(attempt=2, retries=2, retries_left=left)
    assert bool(exhausted()(_verdict(), context)) is over


@pytest.mark.parametrize(
    ("scope", "ranks", "world", "same"),
    [
        (Scope.RANKS, (0, 1, 2, 3), 4, True),
        (Scope.RANKS, (0, 1, 2), 4, False),
        (Scope.RANK, (0,), 1, False),
        (Scope.RANKS, (0, 1), 0, False),
    ],
)
def test_same_fault_everywhere(scope: Scope, ranks: tuple[int, ...], world: int, same: bool) -> None:
    """A fault is everywhere if all ranks of a world of more than one have it."""
    verdict = _verdict(make_error(0, world_size=world), scope=scope, ranks=ranks)
    assert bool(same_fault_everywhere()(verdict, _CONTEXT)) is same


def test_the_same_fault_everywhere_in_a_verdict() -> None:
    """The most common fault of all ranks is the same fault everywhere."""
    job = make_job(*(make_error(rank, world_size=3, message=f"rank {rank}: bad config") for rank in range(3)))
    verdict = run_strategy(get_strategy("evidence"), job)
    assert same_fault_everywhere()(verdict, _CONTEXT)


# --- the default ----------------------------------------------------------------------------------------------------

_STOCK = {"writer": Writer.STOCK, "exception": None}
_DEFAULT = {
    "a plain exception": ({}, False, Origin.USER),
    "raised as recoverable": ({"kind": Kind.RECOVERABLE}, True, Origin.USER),
    "raised as recoverable, of a node that was preempted": (
        {"kind": Kind.RECOVERABLE, "category": "preemption"},
        True,
        Origin.USER,
    ),
    "recoverable of unknown origin": ({"kind": Kind.RECOVERABLE, "origin": Origin.UNKNOWN}, True, Origin.USER),
    "preemption": ({"category": "preemption", "exception": None}, True, Origin.SYSTEM),
    "a lost node": ({"category": "node_lost", "exception": None}, True, Origin.SYSTEM),
    "Flyte's entrypoint, outside of the task": (
        {**_STOCK, "kind": Kind.RECOVERABLE, "origin": Origin.SYSTEM},
        True,
        Origin.SYSTEM,
    ),
    "our agent broke": ({"kind": Kind.RECOVERABLE, "origin": Origin.SYSTEM}, True, Origin.SYSTEM),
    "a system error that is not recoverable": ({**_STOCK, "origin": Origin.SYSTEM}, False, Origin.SYSTEM),
    "killed": ({"exception": None, "signal": "SIGKILL", "exit_code": -9}, False, Origin.USER),
    "exited": ({"exception": None, "exit_code": 1}, False, Origin.USER),
    "a text that sounds like the network": (
        {"message": "Connection reset: network is unreachable"},
        False,
        Origin.USER,
    ),
    **{
        f"the category {name}": ({"category": name}, False, Origin.USER)
        for name in CATEGORIES
        if name not in {"preemption", "node_lost"}
    },
}


@pytest.mark.parametrize(("changes", "retry", "origin"), _DEFAULT.values(), ids=_DEFAULT)
def test_the_default(changes: dict[str, Any], retry: bool, origin: Origin) -> None:
    """By default a recoverable exception uses the user's budget, a cause from outside the system's."""
    decision = decide(_verdict(make_error(3, **changes)))
    assert (decision.retry, decision.origin) == (retry, origin)
    assert decision.kind is (Kind.RECOVERABLE if retry else Kind.NON_RECOVERABLE)
    assert decision.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"kind": Kind.RECOVERABLE, "exception": "flytekit.FlyteRecoverableException"},
            "FlyteRecoverableException was raised as recoverable; it uses up one of the task's retries",
        ),
        ({"category": "node_lost"}, "node_lost: it is gone and left no report; it uses up none of the task's retries"),
        (
            {**_STOCK, "kind": Kind.RECOVERABLE, "origin": Origin.SYSTEM},
            "Flyte's entrypoint reported a recoverable system error; it uses up none of the task's retries",
        ),
        (
            {"kind": Kind.RECOVERABLE, "origin": Origin.SYSTEM, "writer": Writer.AGENT},
            "the agent reported a recoverable system error; it uses up none of the task's retries",
        ),
        (
            {"category": "data"},
            "the same data would probably fail again",
        ),
        (
            {"category": "of_the_future"},
            "only a text says so, which is no proof; where a retry helps, the code can raise a recoverable error",
        ),
    ],
)
def test_the_reason(changes: dict[str, Any], reason: str) -> None:
    """The decision says why, and whose budget pays for a retry."""
    assert decide(_verdict(make_error(3, **changes))).reason == reason


def _memory(oom_kill: int | None, peak: int | None, limit: int | None) -> WorkerError:
    resources = Resources(oom_kill=oom_kill, memory_peak_bytes=peak, memory_limit_bytes=limit)
    return replace(make_error(3, signal="SIGKILL", category="host_oom"), resources=resources)


@pytest.mark.parametrize(
    ("root", "retry"),
    [
        (_memory(1, 40, 100), True),
        (_memory(1, 50, None), True),
        (_memory(1, 80, 100), False),
        (_memory(1, 99, 100), False),
        (_memory(1, None, 100), False),
        (_memory(0, 50, 100), False),
        (_memory(None, 50, 100), False),
    ],
    ids=["far below the limit", "no limit", "not far below", "at the limit", "peak unknown", "no kill", "unknown"],
)
def test_memory_that_the_host_lacks(root: WorkerError, retry: bool) -> None:
    """An OOM kill below the container's limit is the host's fault; one at the limit is not."""
    decision = decide(_verdict(root))
    assert decision.retry is retry
    assert not retry or decision.origin is Origin.SYSTEM


def _of_the_gpu(file: str, code: str, **changes: Any) -> WorkerError:
    frames = (FrameInfo("train.py", 3, "step", "model(batch)"), FrameInfo(file, 9, "forward", code))
    exception = ExceptionInfo("RuntimeError", "CUDA error: uncorrectable ECC error encountered", frames=frames)
    return replace(make_error(3), exception=exception, category="gpu_hardware", **changes)


_GONE = replace(_of_the_gpu("", ""), exception=None, writer=Writer.AGENT)


@pytest.mark.parametrize(
    ("root", "retry"),
    [
        (_of_the_gpu("train.py", "loss.backward()"), True),
        (_of_the_gpu("/venv/site-packages/torch/cuda/__init__.py", "raise AcceleratorError(text)"), True),
        (_of_the_gpu("train.py", 'raise RuntimeError("ECC error")'), False),
        (_of_the_gpu("train.py", ""), False),
        (_of_the_gpu("train.py", 'assert not ecc, "uncorrectable ECC error"'), False),
        (_of_the_gpu("train.py", "if ecc: raise RuntimeError(text)"), False),
        (_of_the_gpu("/home/me/torch/train.py", "raise RuntimeError(text)"), False),
        (replace(_GONE, signal="SIGABRT", log_tail="Xid 79"), True),
        (replace(_GONE, exit_code=3, log_tail="Xid 79"), False),
        (replace(_GONE, signal="SIGABRT"), False),
        (replace(_of_the_gpu("", ""), exception=ExceptionInfo("RuntimeError", "ECC error")), False),
    ],
    ids=[
        "native code",
        "torch",
        "the program's raise",
        "no source",
        "an assertion",
        "in one line",
        "a folder called torch",
        "log of a crash",
        "log of an exit",
        "nothing",
        "no frames",
    ],
)
def test_a_gpu_that_is_broken(root: WorkerError, retry: bool) -> None:
    """A driver's error is evidence; the same text in an exception of the user's code is not."""
    decision = decide(_verdict(root))
    assert decision.retry is retry
    assert not retry or (decision.origin is Origin.SYSTEM and "gpu_hardware" in decision.reason)


def test_the_same_fault_again() -> None:
    """The decision says that the previous attempt failed in the same way; a policy can stop for that."""
    recoverable = _verdict(make_error(3, kind=Kind.RECOVERABLE, exception="flytekit.FlyteRecoverableException"))
    again = RetryContext(attempt=1, retries=5, previous_fingerprint=recoverable.fingerprint)
    other = replace(again, previous_fingerprint="1:000000000000")
    policy = explicit() & ~same_fault_again()

    assert decide(recoverable, None, again).retry
    assert decide(recoverable, None, again).reason.endswith("; the previous attempt failed with the same fault")
    assert not decide(recoverable, policy, again).retry
    assert "the previous attempt failed with the same fault" in decide(recoverable, policy, again).reason
    for context in (other, _CONTEXT):
        assert decide(recoverable, policy, context).retry
        assert "attempt before" not in decide(recoverable, None, context).reason


def test_the_same_fault_on_all_ranks_is_the_reason() -> None:
    """If all ranks failed with one fault, the decision says so."""
    roots = [replace(make_error(rank), place=replace(make_error(rank).place, world_size=2)) for rank in (0, 1)]
    verdict = run_strategy(get_strategy("evidence"), make_job(*roots))
    assert decide(verdict).reason == "the same fault on all ranks; a retry would meet it again"


def test_undetermined_is_said_plainly() -> None:
    """An undetermined verdict means no retry and no fault owner, and the reason says so."""
    decision = decide(undetermined(make_job(), "earliest"))
    assert decision == Decision(
        retry=False,
        kind=Kind.NON_RECOVERABLE,
        origin=Origin.UNKNOWN,
        enforced=True,
        reason="the cause is not known; if nothing in the code explains it, run the task once more by hand",
    )


@pytest.mark.parametrize(
    "policy",
    [
        explicit(),
        declared(),
        same_fault_everywhere(),
        same_fault_again(),
        host_evidence(),
        on_category("data"),
        never(),
    ],
)
def test_every_policy_copes_with_an_unknown_root(policy: RetryPolicy) -> None:
    """Without a known root cause only a policy on "unknown" says retry, and no policy raises."""
    verdict = undetermined(make_job(), "earliest")
    assert not policy(verdict, _CONTEXT)
    assert on_category("unknown")(verdict, _CONTEXT)


def test_only_the_root_causes_mark_counts() -> None:
    """A recoverable victim does not make the job recoverable."""
    job = make_job(make_error(3, at_ms=0), make_error(0, at_ms=30, kind=Kind.RECOVERABLE))
    assert not decide(run_strategy(get_strategy("earliest"), job)).retry


@pytest.mark.parametrize("alive", [True, False])
def test_without_living_pods_it_is_advice(alive: bool) -> None:
    """If no pod lives to write the verdict for stock Flyte, the decision is advice."""
    assert decide(_verdict(), None, RetryContext(pods_alive=alive)).enforced is alive


@pytest.mark.parametrize(
    ("left", "origin", "spent", "paid"),
    [
        (0, Origin.USER, True, "all retries are used up (retries=2)"),
        (1, Origin.USER, False, "it uses up one of the task's retries"),
        (None, Origin.USER, False, "it uses up one of the task's retries"),
        (0, Origin.SYSTEM, False, "it uses up none of the task's retries"),
    ],
)
def test_a_budget_that_is_used_up(left: int | None, origin: Origin, spent: bool, paid: str) -> None:
    """With a used-up budget the decision still says retry to Flyte, and its reason says that the budget is used up."""
    policy = on_category("data", origin=origin)
    decision = decide(_verdict(category="data"), policy, RetryContext(2, 2, retries_left=left))
    assert (decision.kind, decision.is_spent) == (Kind.RECOVERABLE, spent)
    assert decision.reason.endswith(paid)


def test_the_default_is_the_default() -> None:
    """Without a policy the default one decides."""
    gone = _verdict(category="node_lost")
    assert decide(gone).retry
    assert decide(gone, default_policy()) == decide(gone)
    assert not decide(gone, never()).retry
    assert decide(gone, declared()).reason == "no system error was reported"


@pytest.mark.parametrize("swapped", [False, True])
def test_whose_budget_does_not_depend_on_the_order(swapped: bool) -> None:
    """If two policies agree, the vote that names a budget counts, in either order."""
    external, left = on_category("preemption"), ~exhausted()
    policy = left & external if swapped else external & left
    verdict = run_strategy(get_strategy("earliest"), make_job(make_error(category="preemption")))
    decision = decide(verdict, policy, RetryContext(attempt=0, retries=2))
    assert (decision.retry, decision.origin) == (True, Origin.SYSTEM)


def test_an_operand_that_cannot_matter_is_not_asked() -> None:
    """A policy that cannot change the answer is not called."""

    def broken(verdict: Verdict, context: RetryContext) -> bool:
        raise RuntimeError(f"{verdict} {context}")

    verdict = run_strategy(get_strategy("earliest"), make_job(make_error()))
    assert not decide(verdict, never() & broken).retry
    assert decide(verdict, ~never() | broken).retry
