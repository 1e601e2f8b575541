"""Fingerprints: equal for the same fault, different for another."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.model import ExceptionInfo, FrameInfo, Subject
from firstfault.testing import make_error

_FRAMES = tuple(FrameInfo(f"/job/lib/module_{name}.py", 10, name) for name in "abcdefg")


_LONG = "rank {} failed: " + "one two three four five six seven eight nine ten; " * 20
_DEAD: dict[str, Any] = {"exception": None}


def _raised(message: str = "boom", frames: tuple[FrameInfo, ...] = _FRAMES) -> str:
    return fingerprint_of(make_error(exception=ExceptionInfo("ValueError", message, frames=frames)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("bad sample 17 of 4096", "bad sample 5 of 4096"),
        ("worker-3 at 10.0.0.3:29500 is gone", "worker-12 at 10.0.0.12:29501 is gone"),
        ("object at 0x7f3a90b1c2d0", "object at 0x7f0000b1ffff"),
        ("cannot read /data/shard-00017/part.bin", "cannot read /mnt/other/place/shard/part.bin"),
        ("run 8f14e45fceea167a failed", "run c9f0f895fb98ab91 failed"),
        ("too   many\n  spaces", "too many spaces"),
        (_LONG.format(9), _LONG.format(10)),
        (
            "cannot read " + "/very/long/path" * 30 + ": no such file, giving up",
            "cannot read /a/b: no such file, giving up",
        ),
    ],
)
def test_what_varies_between_ranks_does_not_count(one: str, other: str) -> None:
    """The same fault with other numbers, addresses, paths or white space has the same fingerprint."""
    assert _raised(one) == _raised(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"message": "a"}, {"message": "b"}),
        ({"exception": "ValueError"}, {"exception": "TypeError"}),
        (
            {"exception": ExceptionInfo("E", "", frames=_FRAMES)},
            {"exception": ExceptionInfo("E", "", frames=_FRAMES[:-1])},
        ),
        ({**_DEAD, "signal": "SIGKILL", "exit_code": -9}, {**_DEAD, "signal": "SIGSEGV", "exit_code": -11}),
        ({**_DEAD, "exit_code": 1}, {**_DEAD, "exit_code": 2}),
        ({**_DEAD, "exit_code": 1}, {**_DEAD, "exit_code": 1, "subject": Subject.AGENT}),
        ({**_DEAD, "message": "a"}, {**_DEAD, "message": "b"}),
        ({**_DEAD, "code": "a"}, {**_DEAD, "code": "b"}),
    ],
    ids=["message", "type", "frames", "signal", "exit code", "subject", "stock message", "stock code"],
)
def test_another_fault_has_another_fingerprint(one: dict[str, Any], other: dict[str, Any]) -> None:
    """A different fault has a different fingerprint."""
    assert fingerprint_of(make_error(**one)) != fingerprint_of(make_error(**other))


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 7},
        {"node": "worker-7"},
        {"attempt": 3},
        {"at_ms": 17},
        {"code": "other"},
        {"pid": 99},
        {"exit_code": 1},
        {"log_tail": "lines"},
    ],
)
def test_who_and_when_do_not_count(changes: dict[str, Any]) -> None:
    """The same exception on another rank, node, attempt or moment has the same fingerprint."""
    assert fingerprint_of(make_error(**changes)) == fingerprint_of(make_error())


def test_what_frames_count() -> None:
    """Folders, lines and the outermost frames, which depend on how the training was started, do not count."""
    moved = [replace(frame, file=frame.file.replace("/job/lib", "/opt/x"), line=frame.line + 5) for frame in _FRAMES]
    assert _raised(frames=(FrameInfo("launcher.py", 1, "main"), *moved)) == _raised(frames=_FRAMES)


@pytest.mark.parametrize("message", ["", "\udc80", "x" * 1_000_000, "\x1f"])
def test_the_form(message: str) -> None:
    """The fingerprint of any exception is the version and twelve hex digits."""
    assert re.fullmatch("2:[0-9a-f]{12}", _raised(message))


def test_it_is_stable() -> None:
    """Fingerprints of version 2 never change, because attempts of different releases are compared."""
    assert _raised("bad sample 17", frames=_FRAMES[:1]) == "2:ab4cfd85858c"
