"""The sealed verdict: the next attempt reads it, and so do nodes without a store, in turn."""

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firstfault.errors import AccessDeniedError
from firstfault.layout import VERDICT
from firstfault.model import Action, ExceptionInfo, FrameInfo, Origin, WorkerError
from firstfault.retry import decide
from firstfault.strategies import get_strategy, run_strategy
from firstfault.testing import make_error, make_job
from firstfault_torch.conclusion.previous_attempt import count_retries_left, hand_over_verdict
from firstfault_torch.conclusion.sealed_verdict import get_conclusion_delay, wait_for_peer_verdict
from tests.recordings import conclude_node, make_node_context, seal_conclusion

SOON_S = 30.0
AGAIN = "the previous attempt failed with the same fault"


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xff not a message", None], ids=["empty", "rubbish", "a folder"]
)
def test_an_unreadable_verdict_is_ignored(
    content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unreadable verdict is ignored with one log line,
    and this attempt's verdict does not change.
    """
    path = tmp_path / "0" / VERDICT
    if content is None:
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    node_context = make_node_context(
        str(tmp_path / "out"), previous_handover_uri=str(tmp_path / "0"), attempt=1
    )

    with caplog.at_level(logging.WARNING):
        conclusion = conclude_node(node_context, [make_error(3)])

    assert conclusion.verdict.ranks == (3,)
    assert AGAIN not in conclusion.decision.reason
    assert "reading the verdict on the attempt before" in caplog.text


@pytest.mark.parametrize(
    ("attempt", "retries", "before", "left"),
    [
        (0, 3, None, 3),
        (0, 0, None, 0),
        (4, 0, None, 0),
        (1, 3, {"origin": Origin.USER, "retries_left": 3}, 2),
        (1, 3, {"origin": Origin.SYSTEM, "retries_left": 3}, 3),
        (2, 1, {"origin": Origin.USER, "retries_left": 0}, 0),
        (1, 3, {"origin": Origin.USER, "retries_left": None}, None),
        (1, 3, {"origin": Origin.USER, "retries_left": 3, "enforced": False}, None),
        (1, 3, None, None),
        (1, None, None, None),
    ],
)
def test_retries_are_counted_from_the_attempt_before(
    attempt: int,
    retries: int | None,
    before: dict[str, Any] | None,
    left: int | None,
) -> None:
    """Each attempt counts its retries from the one before;
    without a verdict from that they are unknown.
    """
    previous = None
    if before is not None:
        verdict = run_strategy(get_strategy("earliest"), make_job(make_error(3)))
        previous = replace(decide(verdict), retry=True, **before)
    assert count_retries_left(attempt, retries, previous) == left


def _break_gpu(node: str) -> WorkerError:
    frame = FrameInfo(
        "/venv/site-packages/torch/cuda/__init__.py",
        9,
        "synchronize",
        "torch._C._cuda_synchronize()",
    )
    ecc = ExceptionInfo(
        "RuntimeError", "CUDA error: uncorrectable ECC error encountered", frames=(frame,)
    )
    return make_error(3, node=node, engine="plain", category="gpu_hardware", exception=ecc)


@pytest.mark.parametrize(("node", "action"), [("gpu-b", Action.SYSTEM), ("gpu-a", Action.RETRY)])
def test_broken_hardware_repeats_only_on_its_machine(
    node: str, action: Action, tmp_path: Path
) -> None:
    """Broken hardware is the same fault only on the machine of the previous attempt;
    only there its retry counts.
    """
    before = make_node_context(str(tmp_path / "out"), handover_uri=str(tmp_path / "0"))
    own = seal_conclusion(conclude_node(before, [_break_gpu("gpu-a")]), before)
    hand_over_verdict(before, own.sealed)
    after = make_node_context(
        str(tmp_path / "out-1"), previous_handover_uri=str(tmp_path / "0"), attempt=1
    )
    decision = conclude_node(after, [_break_gpu(node)]).decision
    assert (decision.action, AGAIN in decision.reason) == (action, action is Action.RETRY)


def test_the_first_nodes_have_turns_of_their_own() -> None:
    """Node 0 may have hosted the store, so node 1 does not wait for it;
    the next ones follow at some distance.

    Then few nodes read at a time; the last of 1,024 has its turn within half a minute, the last of
    10,000 soon after.
    """
    assert [get_conclusion_delay(rank) for rank in range(5)] == [0.0, 0.0, 5.0, 7.0, 9.0]
    turns = sorted(get_conclusion_delay(rank) for rank in range(1024))
    assert [sum(turn < limit for turn in turns) for limit in (10, 11, 14, 17)] == [5, 5, 9, 17]
    assert 30 < turns[-1] < 36
    assert get_conclusion_delay(9_999) < 48
    assert len({get_conclusion_delay(700) for _ in range(5)}) == 5


def _find(*answers: Any) -> Any:
    left = list(answers)

    def find() -> Any:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return find


def test_the_verdict_of_another_node_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that does not answer once is asked again."""
    monkeypatch.setattr("firstfault_torch.time_limits.VERDICT_POLL_SECONDS", 0.05)
    verdict = object()
    began = time.monotonic()
    found = wait_for_peer_verdict(
        _find(None, AccessDeniedError("no"), verdict), 60.0, threading.Event()
    )
    assert found is verdict
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("terminated", [False, True])
def test_the_wait_for_a_verdict_ends_with_the_turn(terminated: bool) -> None:
    """If there is no verdict, the wait ends when the turn comes,
    or soon after the process got a signal.
    """
    shutdown_requested = threading.Event()
    began = time.monotonic()
    if terminated:
        threading.Timer(0.2, shutdown_requested.set).start()
    assert (
        wait_for_peer_verdict(_find(None), 60.0 if terminated else 0.2, shutdown_requested) is None
    )
    assert 0.2 <= time.monotonic() - began < SOON_S
    assert wait_for_peer_verdict(_find("published"), 0.0, threading.Event()) == "published"
