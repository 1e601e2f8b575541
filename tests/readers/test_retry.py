"""Retry policies and the decision."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from firstfault import model, retry
from firstfault.conclude import conclude
from firstfault.errors import UsageError
from firstfault.exceptions.stack_position import add_raise_point
from firstfault.model.failure import CTRL_C
from firstfault.strategies import build_undetermined_verdict, get_strategy, run_strategy
from firstfault.testing import make_error, make_job, make_presence
from firstfault.wire.json_schemas import from_json, to_json
from tests.readers.scenes import STACK, own_fault, stopped

_CONTEXT = retry.RetryContext()


def _verdict(root: model.WorkerError | None = None, **changes: Any) -> model.Verdict:
    verdict = run_strategy(get_strategy("earliest"), make_job(root or make_error(3)))
    return replace(verdict, **changes)


def _yes(verdict: model.Verdict, context: retry.RetryContext) -> retry.Vote:
    return retry.Vote(retry=True, reason="yes", origin=model.Origin.SYSTEM)


def _no(verdict: model.Verdict, context: retry.RetryContext) -> retry.Vote:
    return retry.Vote(retry=False, reason="no")


def _broken(verdict: model.Verdict, context: retry.RetryContext) -> bool:
    raise RuntimeError(f"{verdict} {context}")


# --- composition ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "votes"),
    [
        (retry.explicit() | _yes, True),
        (retry.explicit() | _no, False),
        (_yes | retry.explicit(), True),
        (~retry.never() & _yes, True),
        (retry.never() & _yes, False),
        (_yes & ~retry.never(), True),
        (_yes & retry.never(), False),
        (~retry.never(), True),
        (~~retry.never(), False),
        (~(retry.never() | _yes), False),
        # & binds more tightly than |
        (retry.never() | ~retry.never() & _no, False),
        (retry.never() & _yes | _yes, True),
        (retry.never() & (_yes | retry.never()), False),
        (retry.never() & _broken, False),
        (~retry.never() | _broken, True),
    ],
)
def test_policies_compose(policy: retry.RetryPolicy, votes: bool) -> None:
    """`|`, `&` and `~` nest, take plain functions on both sides,
    and call an operand only if it matters.
    """
    assert bool(policy(_verdict(), _CONTEXT)) is votes


_FREE = retry.on_category("user_code", origin=model.Origin.SYSTEM)
_PAID = retry.on_category("user_code", origin=model.Origin.USER)
_TEXT = model.CATEGORIES["user_code"]


@pytest.mark.parametrize(
    ("policy", "vote"),
    [
        (_PAID | _FREE, retry.Vote(retry=True, reason=_TEXT, origin=model.Origin.USER)),
        (retry.never() | _no, retry.Vote(retry=False, reason="the policy never retries, and no")),
        (_FREE & _yes, retry.Vote(retry=True, reason=_TEXT, origin=model.Origin.SYSTEM)),
        (
            _FREE & ~retry.exhausted(),
            retry.Vote(retry=True, reason=_TEXT, origin=model.Origin.SYSTEM),
        ),
        (
            ~retry.exhausted() & _FREE,
            retry.Vote(retry=True, reason=_TEXT, origin=model.Origin.SYSTEM),
        ),
        (_FREE & _no & retry.never(), retry.Vote(retry=False, reason="no")),
    ],
)
def test_the_deciding_policy_gives_reason_and_budget(
    policy: retry.RetryPolicy, vote: retry.Vote
) -> None:
    """The first that says retry, or the first that does not, gives the reason;
    one that names a budget counts first.
    """
    assert policy(_verdict(), _CONTEXT) == vote


# --- plain callables ------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [True, False])
def test_a_plain_function_is_a_policy(answer: bool) -> None:
    """A function of verdict and context that returns a bool decides, is named,
    and takes from the user's budget.
    """
    seen = []

    def on_tuesdays(verdict: model.Verdict, context: retry.RetryContext) -> bool:
        seen.append((verdict, context))
        return answer

    verdict = _verdict()
    context = retry.RetryContext(attempt=2, retries=3)
    decision = retry.decide(verdict, on_tuesdays, context)
    assert seen == [(verdict, context)]
    assert decision.retry is answer
    assert "on_tuesdays" in decision.reason
    assert decision.origin is model.Origin.USER


@pytest.mark.parametrize("policy", [17, "never", ()])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    """What is not callable raises a UsageError, also as a part of a composition;
    so does an unknown category.
    """
    with pytest.raises(UsageError, match="must be callable"):
        retry.decide(_verdict(), policy)
    with pytest.raises(UsageError, match="must be callable"):
        retry.explicit() | policy
    with pytest.raises(UsageError, match=r"unknown category premption; known are .*preemption"):
        retry.on_category("node_lost", "premption")


# --- single policies ------------------------------------------------------------------------------


def test_explicit_and_declared_match_recoverable_errors_by_origin() -> None:
    """`explicit` matches recoverable errors of the user's code,
    `declared` those of Flyte and the agent.
    """
    for kind, origin in itertools.product(model.Kind, model.Origin):
        verdict = _verdict(make_error(3, kind=kind, origin=origin))
        is_recoverable = kind is model.Kind.RECOVERABLE
        is_of_system = origin is model.Origin.SYSTEM
        assert bool(retry.explicit()(verdict, _CONTEXT)) is (is_recoverable and not is_of_system)
        assert bool(retry.declared()(verdict, _CONTEXT)) is (is_recoverable and is_of_system)


@pytest.mark.parametrize(
    ("context", "over"),
    [
        (retry.RetryContext(9), False),
        (retry.RetryContext(0, 0), True),
        (retry.RetryContext(0, 1), False),
        (retry.RetryContext(1, 1), True),
        (retry.RetryContext(3, 1), True),
        (retry.RetryContext(2, 2, retries_left=1), False),
        (retry.RetryContext(2, 2, retries_left=0), True),
    ],
)
def test_only_attempts_not_lost_by_the_platform_use_up_retries(
    context: retry.RetryContext, over: bool
) -> None:
    """Retries are used up after that many attempts that the platform did not lose;
    never if that is not known.
    """
    assert bool(retry.exhausted()(_verdict(), context)) is over


@pytest.mark.parametrize(("seconds", "is_enough"), [(0.0, False), (1799.0, False), (1800.0, True)])
def test_reported_training_time_is_progress(seconds: float, is_enough: bool) -> None:
    """The time of training that a node reports counts, and the reason has it."""
    job = make_job(make_error(3), roster=[make_presence(progress=model.Progress(40_312, seconds))])
    conclusion = conclude(job, policy=retry.made_progress(minutes=30))
    assert conclusion.decision.retry is is_enough
    assert conclusion.decision.reason.startswith(f"trained for {seconds // 60:.0f} of 30 min")
    with pytest.raises(UsageError, match="minutes above 0"):
        retry.made_progress(minutes=0)


_AGAIN: dict[str, Any] = {"previous_fingerprint": _verdict().fingerprint, "lifetime_seconds": 30.0}


@pytest.mark.parametrize(
    ("context", "action", "failed_starts"),
    [
        ({"lifetime_seconds": 30.0}, "system", 1),
        (_AGAIN, "stop", 1),
        (_AGAIN | {"lifetime_seconds": 3600.0}, "retry", 0),
        (_AGAIN | {"lifetime_seconds": 3600.0, "progress": model.Progress(9, 20.0)}, "stop", 1),
        ({"lifetime_seconds": 30.0, "failed_starts": 2}, "system", 3),
        ({"lifetime_seconds": 90.0, "failed_starts": 2}, "system", 0),
        ({"failed_starts": 2}, "system", 0),
        (_AGAIN | {"restarts_left": 1}, "stop", 1),
        (_AGAIN | {"lifetime_seconds": 0.0}, "retry", 0),
        (
            {
                "lifetime_seconds": 75.0,
                "failed_starts": 2,
                "progress": model.Progress(1, 0.0, 70.0),
            },
            "system",
            0,
        ),
        (
            {
                "lifetime_seconds": 75.0,
                "failed_starts": 2,
                "progress": model.Progress(9, 20.0, 5.0),
            },
            "system",
            3,
        ),
    ],
)
def test_an_attempt_that_only_repeats_ends_the_retries(
    context: dict[str, Any], action: str, failed_starts: int
) -> None:
    """An attempt that only repeats the one before ends the retries;
    neither progress nor other short attempts do.
    """
    verdict = _verdict()
    found = retry.decide(verdict, _yes, retry.RetryContext(stops_repeats=True, **context))
    assert (found.action.value, found.failed_starts) == (action, failed_starts)
    assert found.retry is (action != "stop")
    unasked = retry.decide(verdict, _yes, retry.RetryContext(**context))
    assert unasked.retry or "restarts_left" in context


def test_lost_nodes_are_no_repeat() -> None:
    """Lost nodes may be chance, also at three starts in a row;
    a failed rendezvous counts as a failed start.
    """
    again: dict[str, Any] = {
        "previous_fingerprint": _verdict().fingerprint,
        "lifetime_seconds": 30.0,
    }
    context = retry.RetryContext(stops_repeats=True, **again)
    preempted = retry.decide(
        _verdict(category="preemption"), _yes, replace(context, failed_starts=7)
    )
    assert (preempted.retry, preempted.failed_starts) == (True, 7)
    assert retry.decide(_verdict(category="node_lost"), _yes, context).retry
    lost = retry.decide(_verdict(category="node_lost"), _yes, replace(context, failed_starts=2))
    assert (lost.action, lost.failed_starts) == (model.Action.RETRY, 3)
    late = replace(context, lifetime_seconds=900.0, previous_fingerprint="")
    assert retry.decide(_verdict(category="rendezvous"), _yes, late).failed_starts == 1
    restarted = replace(make_error(3), place=replace(make_error(3).place, round=1))
    assert retry.decide(_verdict(restarted), _yes, context).failed_starts == 0


def test_only_a_proof_stops() -> None:
    """Only a proof stops: a ValueError may be temporary, until it comes again;
    what nothing shows is left open.
    """
    again = retry.RetryContext(previous_fingerprint=_verdict().fingerprint, lifetime_seconds=30.0)
    assert retry.decide(_verdict()).action is model.Action.UNKNOWN
    assert retry.decide(_verdict(), None, again).action is model.Action.STOP
    assert retry.decide(_verdict(), retry.never()).action is model.Action.STOP, (
        "the task's own policy says so"
    )
    assert retry.decide(_verdict(category="signal")).action is model.Action.UNKNOWN
    on_this_machine = replace(again, previous_machine=retry.find_machine(_verdict()))
    assert retry.decide(_verdict(category="signal"), None, again).action is model.Action.UNKNOWN
    assert (
        retry.decide(_verdict(category="signal"), None, on_this_machine).action is model.Action.STOP
    )
    killed = _verdict(make_error(3, exception=None, signal="SIGKILL", exit_code=-9))
    twice = replace(
        again, previous_fingerprint=killed.fingerprint, previous_machine=retry.find_machine(killed)
    )
    assert retry.same_fault_again()(killed, twice)
    assert retry.decide(killed, None, twice).action is model.Action.UNKNOWN, (
        "two kills need not have one reason"
    )
    assert (
        retry.decide(_verdict(), lambda *_: retry.Vote(retry=True, reason="x")).action
        is model.Action.RETRY
    )
    assert retry.stuck_at_start(attempts=2)(
        _verdict(), retry.RetryContext(failed_starts=1, lifetime_seconds=5.0)
    )
    with pytest.raises(UsageError, match="attempts above 0"):
        retry.stuck_at_start(attempts=0)


def test_a_policys_vote_is_converted_or_refused() -> None:
    """A policy's vote is converted, so that its decision can be stored;
    an origin that does not exist is refused.
    """

    class Truth:
        def __bool__(self) -> bool:
            return True

    verdict, vote = _verdict(), retry.Vote(Truth(), 7, "SYSTEM")  # type: ignore[arg-type]
    decision = retry.decide(verdict, lambda *_: vote, _CONTEXT)
    assert (decision.retry, decision.origin, decision.reason.split(" (")[0]) == (
        True,
        model.Origin.SYSTEM,
        "7",
    )
    assert from_json(to_json(verdict, decision)) == (replace(verdict, root=None), decision)
    with pytest.raises(UsageError, match="a retry policy's vote has the origin 'SOMEBODY'"):
        retry.decide(
            verdict, lambda *_: retry.Vote(retry=True, reason="x", origin="SOMEBODY"), _CONTEXT
        )  # type: ignore[arg-type]


_WORLD = {"world_size": 4}
_ABOUT_TO_LEAVE = add_raise_point(
    STACK.format("/job/data.py", "__del__"), model.FrameInfo("/job/train.py", 7, "train")
)


@pytest.mark.parametrize(
    "failures",
    [
        [own_fault(rank, message=f"rank {rank}: bad config", **_WORLD) for rank in range(4)],
        [own_fault(0, **_WORLD), *(stopped(rank, _ABOUT_TO_LEAVE, **_WORLD) for rank in (1, 2, 3))],
    ],
    ids=["all raised it", "three were about to raise it"],
)
def test_the_same_fault_of_all_ranks_is_no_proof(failures: list[model.WorkerError]) -> None:
    """The policy finds the same fault of all ranks; it's no proof,
    because an outage of a storage hits all ranks.
    """
    verdict = run_strategy(get_strategy("evidence"), make_job(*failures))
    assert retry.same_fault_everywhere()(verdict, _CONTEXT)
    assert retry.decide(verdict).action is model.Action.UNKNOWN
    assert not retry.same_fault_everywhere()(replace(verdict, ranks=(0, 1, 2)), _CONTEXT)
    for scope, ranks, world in ((model.Scope.RANK, (0,), 1), (model.Scope.RANKS, (0, 1), 0)):
        assert not retry.same_fault_everywhere()(
            _verdict(make_error(0, world_size=world), scope=scope, ranks=ranks), _CONTEXT
        )


# --- the default ----------------------------------------------------------------------------------

_STOCK = {"writer": model.Writer.STOCK, "exception": None}
_AGAIN, _SYSTEM_ORIGIN = {"kind": model.Kind.RECOVERABLE}, {"origin": model.Origin.SYSTEM}
_RETRIED, _PAID_FOR, _NOT = (
    (True, model.Origin.SYSTEM),
    (True, model.Origin.USER),
    (False, model.Origin.USER),
)
_UNPROVEN = ", but that isn't proven"
_FREE_OF_CHARGE = " (uses none of the task's retries)"
_DEFAULT: dict[str, tuple[dict[str, Any], tuple[bool, model.Origin], str]] = {
    "a plain exception": ({}, _NOT, f"the same code may fail again{_UNPROVEN}"),
    "raised as recoverable": (
        {**_AGAIN, "exception": "flytekit.FlyteRecoverableException"},
        _PAID_FOR,
        "FlyteRecoverableException was raised as recoverable (uses one of the task's retries)",
    ),
    "raised as recoverable, of a node that was preempted": (
        {**_AGAIN, "category": "preemption"},
        _PAID_FOR,
        "",
    ),
    "recoverable of unknown origin": ({**_AGAIN, "origin": model.Origin.UNKNOWN}, _PAID_FOR, ""),
    "preemption": ({"category": "preemption", "exception": None}, _RETRIED, _FREE_OF_CHARGE),
    "Ctrl-C": (
        {"category": "interrupted", "exception": None, "code": CTRL_C},
        _NOT,
        "a person interrupted it",
    ),
    "a lost node": (
        {"category": "node_lost", "exception": None},
        _RETRIED,
        f"a node or its agent disappeared without a report{_FREE_OF_CHARGE}",
    ),
    "Flyte's entrypoint, outside of the task": (
        {**_STOCK, **_AGAIN, **_SYSTEM_ORIGIN},
        _RETRIED,
        f"Flyte's entrypoint reported a recoverable system error{_FREE_OF_CHARGE}",
    ),
    "our agent broke": (
        {**_AGAIN, **_SYSTEM_ORIGIN, "writer": model.Writer.AGENT},
        _RETRIED,
        f"the agent reported a recoverable system error{_FREE_OF_CHARGE}",
    ),
    "a system error that is not recoverable": (
        {**_STOCK, **_SYSTEM_ORIGIN},
        (False, model.Origin.SYSTEM),
        "",
    ),
    "killed": ({"exception": None, "signal": "SIGKILL", "exit_code": -9}, _NOT, ""),
    "exited": ({"exception": None, "exit_code": 1}, _NOT, ""),
    "data": ({"category": "data"}, _NOT, f"the same data may fail again{_UNPROVEN}"),
    "a text alone": (
        {"category": "of_the_future", "message": "Connection reset: network is unreachable"},
        _NOT,
        f"maybe temporary{_UNPROVEN} (to allow retries, raise a recoverable error)",
    ),
}


@pytest.mark.parametrize(("changes", "decided", "reason"), _DEFAULT.values(), ids=_DEFAULT)
def test_recoverable_exceptions_use_the_users_budget_by_default(
    changes: dict[str, Any], decided: tuple[bool, model.Origin], reason: str
) -> None:
    """By default a recoverable exception uses the user's budget, a cause from outside the system's;
    victims' do not.
    """
    root = make_error(3, **changes)
    victim = make_error(0, at_ms=30, kind=model.Kind.RECOVERABLE)
    decision = retry.decide(run_strategy(get_strategy("earliest"), make_job(root, victim)))
    assert (decision.retry, decision.origin) == decided
    assert decision.kind is (
        model.Kind.RECOVERABLE if decision.retry else model.Kind.NON_RECOVERABLE
    )
    assert decision.reason
    assert decision.reason.endswith(reason)


@pytest.mark.parametrize("where", ["causes", "members"])
def test_the_exception_that_left_the_task_counts(where: str) -> None:
    """The reason names the exception that left the task, which counts,
    and the one that it replaced.
    """
    asked = model.ExceptionInfo(
        "flytekit.exceptions.user.FlyteRecoverableException", "the loader is gone"
    )
    root = replace(
        make_error(3), exception=model.ExceptionInfo("ValueError", "bad", **{where: (asked,)})
    )
    reason = "ValueError replaced FlyteRecoverableException, and isn't recoverable itself"
    assert retry.decide(_verdict(root)).reason == reason
    assert retry.decide(_verdict(replace(root, kind=model.Kind.RECOVERABLE))).retry


def _memory(oom_kill: int | None, peak: int | None, limit: int | None) -> model.WorkerError:
    resources = model.Resources(oom_kill=oom_kill, memory_peak_bytes=peak, memory_limit_bytes=limit)
    return replace(make_error(3, signal="SIGKILL", category="host_oom"), resources=resources)


def _make_gpu_error(file: str, code: str, **changes: Any) -> model.WorkerError:
    frames = (
        model.FrameInfo("train.py", 3, "step", "model(batch)"),
        model.FrameInfo(file, 9, "forward", code),
    )
    exception = model.ExceptionInfo(
        "RuntimeError", "CUDA error: uncorrectable ECC error encountered", frames=frames
    )
    return replace(make_error(3), exception=exception, category="gpu_hardware", **changes)


_GONE = replace(_make_gpu_error("", ""), exception=None, writer=model.Writer.AGENT)

_TORCH = "/venv/site-packages/torch/cuda/__init__.py"
_OF_THE_MACHINE = {
    "memory far below the limit": (_memory(1, 40, 100), True),
    "memory without a limit": (_memory(1, 50, None), True),
    "memory not far below the limit": (_memory(1, 80, 100), False),
    "memory whose peak is unknown": (_memory(1, None, 100), False),
    "memory without an OOM kill": (_memory(0, 40, 100), False),
    "memory whose OOM kills are unknown": (_memory(None, 40, 100), False),
    "native code": (_make_gpu_error("train.py", "loss.backward()"), True),
    "torch": (_make_gpu_error(_TORCH, "raise AcceleratorError(text)"), True),
    "the program's raise": (_make_gpu_error("train.py", 'raise RuntimeError("ECC error")'), False),
    "no source": (_make_gpu_error("train.py", ""), False),
    "an assertion": (
        _make_gpu_error("train.py", 'assert not ecc, "uncorrectable ECC error"'),
        False,
    ),
    "in one line": (_make_gpu_error("train.py", "if ecc: raise RuntimeError(text)"), False),
    "a folder called torch": (
        _make_gpu_error("/home/me/torch/train.py", "raise RuntimeError(text)"),
        False,
    ),
    "log of a crash": (replace(_GONE, signal="SIGABRT", log_tail="Xid 79"), True),
    "log of an exit": (replace(_GONE, exit_code=3, log_tail="Xid 79"), False),
    "nothing": (replace(_GONE, signal="SIGABRT"), False),
    "no frames": (
        replace(
            _make_gpu_error("", ""), exception=model.ExceptionInfo("RuntimeError", "ECC error")
        ),
        False,
    ),
}


@pytest.mark.parametrize(("root", "again"), _OF_THE_MACHINE.values(), ids=_OF_THE_MACHINE)
def test_oom_far_below_the_limit_and_driver_errors_blame_the_machine(
    root: model.WorkerError, again: bool
) -> None:
    """An OOM kill far below the limit is evidence, and so is a driver's error;
    a text of the program is not.
    """
    decision = retry.decide(_verdict(root))
    assert decision.retry is again
    words = (
        model.CATEGORIES["gpu_hardware"]
        if root.category == "gpu_hardware"
        else "the host ran out of memory"
    )
    assert not again or (decision.origin is model.Origin.SYSTEM and words in decision.reason)


def test_a_decision_says_that_the_previous_attempt_failed_alike() -> None:
    """The decision says that the previous attempt failed in the same way;
    a policy can stop for that.
    """
    recoverable = _verdict(
        make_error(3, kind=model.Kind.RECOVERABLE, exception="flytekit.FlyteRecoverableException")
    )
    machine = retry.find_machine(recoverable)
    again = retry.RetryContext(
        attempt=1,
        retries=5,
        previous_fingerprint=recoverable.fingerprint,
        previous_machine=machine,
    )
    other = replace(again, previous_fingerprint="1:000000000000")
    policy = retry.explicit() & ~retry.same_fault_again()

    assert retry.decide(recoverable, None, again).retry
    assert retry.decide(recoverable, None, again).reason.endswith(
        "and the previous attempt failed with the same fault"
    )
    assert not retry.decide(recoverable, policy, again).retry
    assert (
        "the previous attempt failed with the same fault"
        in retry.decide(recoverable, policy, again).reason
    )
    for context in (other, _CONTEXT):
        assert retry.decide(recoverable, policy, context).retry
        assert "the previous attempt" not in retry.decide(recoverable, None, context).reason
    # a wrapper's cause tells one fault from another, though the wrapper's type and text are equal
    causes = (
        model.ExceptionInfo("AssertionError", "loss is nan"),
        model.ExceptionInfo("ValueError", "bad batch"),
    )
    first, second = (
        _verdict(
            make_error(
                3,
                exception=model.ExceptionInfo(
                    "train.TrainingError", "step failed", causes=(cause,)
                ),
            )
        )
        for cause in causes
    )
    context = retry.RetryContext(
        attempt=1, previous_fingerprint=first.fingerprint, previous_machine=machine
    )
    assert [
        retry.decide(found, ~retry.same_fault_again(), context).retry for found in (first, second)
    ] == [False, True]


def _give_place(root: model.WorkerError, **place: Any) -> model.Verdict:
    return _verdict(
        replace(
            root, place=replace(root.place, **place), boot_id=place.get("boot_id", root.boot_id)
        )
    )


def _after(verdict: model.Verdict, **changes: Any) -> retry.RetryContext:
    """Return the context of an attempt that failed soon after one that ended with this verdict."""
    machine = retry.find_machine(verdict)
    context = retry.RetryContext(
        previous_fingerprint=verdict.fingerprint,
        previous_machine=machine,
        lifetime_seconds=30.0,
        stops_repeats=True,
    )
    return replace(context, **changes)


_PROGRAM, _BOTOCORE = "/job/train.py", "/venv/lib/python3.11/site-packages/botocore/httpsession.py"
_TRANSPORT = "botocore.exceptions.EndpointConnectionError"
_RAISED = "raise Error(text)"


@pytest.mark.parametrize(
    ("kind", "category", "file", "code", "is_same_anywhere"),
    [
        ("ValueError", "user_code", _PROGRAM, _RAISED, True),
        ("KeyError", "user_code", _PROGRAM, "batch['labels']", True),
        ("train.DataError", "data", _PROGRAM, _RAISED, True),
        ("AssertionError", "numerics", _PROGRAM, "assert loss == loss", True),
        ("RuntimeError", "config", _PROGRAM, _RAISED, True),
        (_TRANSPORT, "external_service", _BOTOCORE, _RAISED, False),
        (_TRANSPORT, "user_code", _BOTOCORE, _RAISED, False),
        # native code
        (
            "sqlite3.OperationalError",
            "user_code",
            _PROGRAM,
            "db.execute(query)",
            False,
        ),
        ("RuntimeError", "config", _PROGRAM, "model.cuda()", False),  # all devices are busy
        ("FileNotFoundError", "config", _PROGRAM, "open(path)", False),  # a mount
        ("ConnectionError", "network", _PROGRAM, _RAISED, False),
        ("RuntimeError", "storage", _PROGRAM, _RAISED, False),
        ("DistBackendError", "collective", _PROGRAM, _RAISED, False),
        ("RuntimeError", "gpu_kernel", _PROGRAM, _RAISED, False),
    ],
)
def test_an_outage_is_the_same_fault_only_on_the_same_machine(
    kind: str,
    category: str,
    file: str,
    code: str,
    is_same_anywhere: bool,
) -> None:
    """An outage that hits one machine after the other proves nothing;
    the program's own exception is the same there.
    """
    bases = ("OSError",) if kind in {"FileNotFoundError", "ConnectionError"} else ()
    raised = model.ExceptionInfo(
        kind,
        "boom",
        bases=bases,
        frames=(model.FrameInfo(file, 9, "step", code),),
    )
    root = make_error(3, exception=raised)
    on_a, on_b, unknown = (
        replace(_give_place(root, **place), category=category)
        for place in ({"node": "gpu-a"}, {"node": "gpu-b"}, {"namespace": "ml"})
    )
    stop = model.Action.STOP
    elsewhere = model.Action.STOP if is_same_anywhere else model.Action.UNKNOWN
    assert retry.decide(on_a, None, _after(on_a)).action is stop
    assert retry.decide(on_b, None, _after(on_a)).action is elsewhere
    assert retry.decide(unknown, None, _after(unknown)).action is elsewhere
    assert retry.decide(on_a, None, _after(unknown)).action is elsewhere


def test_a_lost_connection_repeats_only_on_the_same_machine() -> None:
    """The program's exception in place of a lost connection isn't the program's own."""
    frames = (model.FrameInfo(_PROGRAM, 9, "step", _RAISED),)
    lost = model.ExceptionInfo(
        "ConnectionResetError",
        "reset",
        bases=("ConnectionError", "OSError"),
        frames=frames,
    )
    raised = model.ExceptionInfo("ValueError", "no batch", frames=frames, causes=(lost,))
    on_a, on_b = (
        _give_place(make_error(3, exception=raised, category="data"), node=node)
        for node in ("a", "b")
    )
    found = [retry.decide(verdict, None, _after(on_a)).action for verdict in (on_a, on_b)]
    assert found == [model.Action.STOP, model.Action.UNKNOWN]


def test_two_interrupts_prove_nothing() -> None:
    """Whoever interrupts two attempts at the same line shows nothing about the third."""
    raised = model.ExceptionInfo(
        "KeyboardInterrupt",
        "",
        bases=("BaseException",),
        frames=(model.FrameInfo(_PROGRAM, 9, "step", "wait()"),),
    )
    interrupted = _verdict(make_error(3, exception=raised, message=""))
    assert interrupted.category == "interrupted"
    assert retry.same_fault_again()(interrupted, _after(interrupted))
    assert retry.decide(interrupted, None, _after(interrupted)).action is model.Action.UNKNOWN


def test_broken_hardware_on_another_machine_is_another_fault() -> None:
    """Broken hardware on another machine is another fault."""
    ecc = _make_gpu_error(_TORCH, "raise AcceleratorError(text)")
    on_a, on_b = (_give_place(ecc, node=node) for node in ("gpu-a", "gpu-b"))
    found = [retry.decide(verdict, None, _after(on_a)) for verdict in (on_b, on_a)]
    assert [decision.action for decision in found] == [model.Action.SYSTEM, model.Action.RETRY]
    assert [decision.origin for decision in found] == [model.Origin.SYSTEM] * 2, (
        "Flyte limits these itself"
    )
    assert "the same fault" not in found[0].reason


@pytest.mark.parametrize(
    ("before", "here", "action"),
    [
        (None, "gpu-a", "system"),
        ("gpu-b", "gpu-a", "system"),
        ("gpu-a", "gpu-a", "retry"),
        ("", "gpu-a", "retry"),
    ],
)
def test_a_broken_machines_retry_counts_if_it_failed_before(
    before: str | None, here: str, action: str
) -> None:
    """CUDA's errors surface anywhere, so a retry is free only if the attempt before
    didn't fail on this machine.
    """
    first, second = (
        _give_place(_make_gpu_error(file, "loss.item()"), node=here)
        for file in ("/job/train.py", "/job/log.py")
    )
    assert first.fingerprint != second.fingerprint
    context = _CONTEXT if before is None else _after(first, previous_machine=before)
    assert retry.decide(second, None, context).action.value == action
    pod = _give_place(_make_gpu_error("/job/log.py", "loss.item()"), namespace="ml")
    assert retry.find_machine(pod) == ""
    assert (retry.decide(pod, None, context).action.value == "system") is (before is None)


def test_a_pods_machine_is_known_by_name_or_boot_id() -> None:
    """A pod keeps its name on another machine, so its machine is known by its own name,
    or by the kernel's boot id.
    """
    root = replace(make_error(3), boot_id="b0")
    assert (
        retry.find_machine(_give_place(root, node="gpu-a", namespace="", engine="plain")) == "gpu-a"
    )
    assert (
        retry.find_machine(
            _verdict(replace(root, place=replace(root.place, namespace="ml", engine="plain")))
        )
        == "b0"
    )
    assert (
        retry.find_machine(_give_place(root, namespace="ml", machine="ip-10-0-0-7"))
        == "ip-10-0-0-7"
    )


@pytest.mark.parametrize("category", ["preemption", "node_lost"])
def test_guesses_are_counted(category: str) -> None:
    """A signal or silence proves no preemption: the retry counts, except for Flyte,
    which limits it itself.
    """
    decision = retry.decide(_verdict(make_error(3, category=category, exception=None)))
    assert (decision.retry, decision.action, decision.origin) == (
        True,
        model.Action.RETRY,
        model.Origin.SYSTEM,
    )


def test_an_unknown_root_cause_is_not_retried_by_default() -> None:
    """Without a known root cause there is no retry and no fault owner;
    only a policy on "unknown" would retry.
    """
    verdict = build_undetermined_verdict(make_job(), "earliest")
    assert retry.decide(verdict) == model.Decision(
        retry=False,
        kind=model.Kind.NON_RECOVERABLE,
        origin=model.Origin.UNKNOWN,
        enforced=True,
        reason="nothing shows whether the same would happen again",
        action=model.Action.UNKNOWN,
    )
    some = (
        retry.explicit(),
        retry.declared(),
        retry.same_fault_everywhere(),
        retry.same_fault_again(),
    )
    policies = (*some, retry.host_evidence(), retry.never(), retry.on_category("data"))
    assert not any(policy(verdict, _CONTEXT) for policy in policies)
    assert retry.on_category("unknown")(verdict, _CONTEXT)


@pytest.mark.parametrize(
    "kind", ["flyte.errors.NonRecoverableError", "my.OwnError", "RuntimeError"]
)
def test_an_exception_that_refuses_a_retry_always_stops(kind: str) -> None:
    """Whatever its cause, also a broken machine: the program has decided."""
    bases = (
        ("flyte.errors.NonRecoverableError", "RuntimeError")
        if kind == "my.OwnError"
        else ("RuntimeError",)
    )
    raised = model.ExceptionInfo(
        type=kind, message="CUDA error: uncorrectable ECC error", bases=bases
    )
    root = replace(make_error(3, kind=model.Kind.RECOVERABLE), exception=raised)
    decision = retry.decide(_verdict(root))
    expected = (False, model.Action.STOP) if kind != "RuntimeError" else (True, model.Action.RETRY)
    assert (decision.retry, decision.action) == expected
    assert decision.retry or decision.reason == "NonRecoverableError asks for no retry"


@pytest.mark.parametrize(
    ("left", "origin", "spent", "paid"),
    [
        (0, model.Origin.USER, True, "(all 2 retries are used up)"),
        (1, model.Origin.USER, False, "(uses one of the task's retries)"),
        (None, model.Origin.USER, False, "(uses one of the task's retries)"),
        (0, model.Origin.SYSTEM, False, "(uses none of the task's retries)"),
    ],
)
def test_a_used_up_budget_is_named_in_the_reason(
    left: int | None,
    origin: model.Origin,
    spent: bool,
    paid: str,
) -> None:
    """With a used-up budget the decision still says retry to Flyte,
    and its reason says that the budget is used up.
    """
    policy = retry.on_category("data", origin=origin)
    decision = retry.decide(
        _verdict(category="data"), policy, retry.RetryContext(2, 2, retries_left=left)
    )
    assert (decision.kind, decision.is_spent, decision.enforced) == (
        model.Kind.RECOVERABLE,
        spent,
        True,
    )
    assert decision.reason.endswith(paid)


@pytest.mark.parametrize(
    ("retries", "paid"), [(0, "(no retries are allowed)"), (1, "(its only retry is used up)")]
)
def test_budgets_of_none_and_one_are_no_plural(retries: int, paid: str) -> None:
    """None and one are no plural."""
    context = retry.RetryContext(retries, retries, retries_left=0)
    decision = retry.decide(
        _verdict(category="data"), retry.on_category("data", origin=model.Origin.USER), context
    )
    assert decision.reason.endswith(paid)


def test_without_a_policy_the_default_decides() -> None:
    """Without a policy the default one decides; if no pod lives to write the verdict,
    the decision is advice.
    """
    gone = _verdict(category="node_lost")
    assert retry.decide(gone, retry.default_policy()) == retry.decide(gone)
    assert not retry.decide(gone, None, retry.RetryContext(pods_alive=False)).enforced


@pytest.mark.parametrize(
    ("engine", "is_enforced"), [("", True), ("flyte", True), ("flyte2", True), ("plain", False)]
)
def test_only_flyte_enforces(engine: str, is_enforced: bool) -> None:
    """Nobody carries out the decision on a job under torchrun, such as Slurm's:
    schedulers follow its action.
    """
    decision = retry.decide(_verdict(category="signal"), None, retry.RetryContext(engine=engine))
    assert (decision.enforced, decision.action) == (is_enforced, model.Action.UNKNOWN)
