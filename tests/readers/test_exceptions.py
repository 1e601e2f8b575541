"""Exceptions as data: their fingerprints, their format,
and frames of the user's code and of libraries.
"""

import re
import sys
import traceback
from dataclasses import replace
from typing import Any

import pytest

from firstfault.exceptions.exceptions_in_text import (
    format_exception,
    format_place,
    group_frames_by_library,
)
from firstfault.exceptions.fingerprint import compute_fingerprint
from firstfault.exceptions.first_cause import find_first_cause, find_own_frames
from firstfault.model import (
    ExceptionInfo,
    ExpiredDeadline,
    FrameInfo,
    SentSignal,
    StackDump,
    Subject,
)
from firstfault.strategies.rules import evidence
from firstfault.testing import make_error, make_job
from tests.readers.scenes import IN_SLEEP

_FRAMES = tuple(FrameInfo(f"/job/lib/module_{name}.py", 10, name) for name in "abcdefg")


_LONG = "rank {} failed: " + "one two three four five six seven eight nine ten; " * 20
_DEAD: dict[str, Any] = {"exception": None}
_KILLED: dict[str, Any] = {"exception": None, "signal": "SIGKILL", "exit_code": -9}
_STOPPED = {**_KILLED, "sent_signals": (SentSignal("SIGKILL", "rank 3 failed"),)}
_STEP = ExpiredDeadline("train step", 30.0)
_WHOLE = ExceptionInfo("E", "", frames=_FRAMES)


def _raised(message: str = "boom", frames: tuple[FrameInfo, ...] = _FRAMES) -> str:
    return compute_fingerprint(
        make_error(exception=ExceptionInfo("ValueError", message, frames=frames))
    )


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
def test_fingerprints_ignore_numbers_addresses_paths_and_blanks(one: str, other: str) -> None:
    """The same fault with other numbers, addresses,
    paths or white space has the same fingerprint.
    """
    assert _raised(one) == _raised(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"message": "a"}, {"message": "b"}),
        ({"exception": "ValueError"}, {"exception": "TypeError"}),
        ({"exception": _WHOLE}, {"exception": replace(_WHOLE, frames=_FRAMES[:-1])}),
        (
            {**_DEAD, "signal": "SIGKILL", "exit_code": -9},
            {**_DEAD, "signal": "SIGSEGV", "exit_code": -11},
        ),
        ({**_DEAD, "exit_code": 1}, {**_DEAD, "exit_code": 2}),
        ({**_DEAD, "exit_code": 1}, {**_DEAD, "exit_code": 1, "subject": Subject.AGENT}),
        ({**_DEAD, "message": "a"}, {**_DEAD, "message": "b"}),
        ({**_DEAD, "code": "a"}, {**_DEAD, "code": "b"}),
        # a reader opens some documents of each fingerprint: the rank that hung must have its own
        ({**_STOPPED, "log_tail": "Watchdog caught collective operation timeout: Work"}, _STOPPED),
        ({**_STOPPED, "stack_dumps": (StackDump(1, 0, IN_SLEEP),)}, _STOPPED),
        ({**_KILLED, "expired": _STEP}, _KILLED),
        ({**_KILLED, "expired": _STEP}, {**_KILLED, "expired": replace(_STEP, scope="")}),
    ],
    ids=[
        *(
            "message",
            "type",
            "frames",
            "signal",
            "exit code",
            "subject",
            "stock message",
            "stock code",
        ),
        *("waited", "position", "deadline", "another deadline"),
    ],
)
def test_another_fault_has_another_fingerprint(one: dict[str, Any], other: dict[str, Any]) -> None:
    """A different fault has a different fingerprint."""
    assert compute_fingerprint(make_error(**one)) != compute_fingerprint(make_error(**other))


_ELSEWHERE = {
    "node": "worker-7",
    "attempt": 3,
    "at_ms": 17,
    "code": "other",
    "pid": 99,
    "exit_code": 1,
}


def test_fingerprints_ignore_rank_node_attempt_and_time() -> None:
    """The same exception on another rank, node, attempt or moment has the same fingerprint."""
    for name, value in (*_ELSEWHERE.items(), ("rank", 7), ("log_tail", "lines")):
        assert compute_fingerprint(make_error(**{name: value})) == compute_fingerprint(
            make_error()
        ), name
    moved = [
        replace(frame, file=frame.file.replace("/job/lib", "/opt/x"), line=frame.line + 5)
        for frame in _FRAMES
    ]
    assert _raised(frames=(FrameInfo("launcher.py", 1, "main"), *moved)) == _raised(frames=_FRAMES)


def test_a_fingerprint_is_its_version_and_twelve_hex_digits() -> None:
    """A fingerprint is the version and twelve hex digits; it never changes,
    as attempts of releases are compared.
    """
    for message in ("", "\udc80", "x" * 1_000_000, "\x1f"):
        assert re.fullmatch("2:[0-9a-f]{12}", _raised(message))
    assert _raised("bad sample 17", frames=_FRAMES[:1]) == "2:ab4cfd85858c"


def _raise_with_notes() -> None:
    error = ValueError("bad sample\nof two lines")
    error.__notes__ = ["in shard 7", "of 9"]
    raise error


def _raise_a_chain_of_three() -> None:
    try:
        try:
            {}["label"]
        except KeyError:
            raise ValueError  # noqa: B904 - the context is what is tested
    except ValueError as error:
        raise RuntimeError("giving up") from error


@pytest.mark.parametrize(
    "function",
    [
        _raise_a_chain_of_three,
        pytest.param(
            _raise_with_notes,
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="Python prints no notes"),
        ),
    ],
)
def test_an_exception_looks_as_python_prints_it(function: Any) -> None:
    """Causes, frames, message and notes have the order of Python's own traceback."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - any of them
        printed = "".join(traceback.format_exception(error))
        recorded = _recorded(error)
    without_carets = [
        line for line in printed.splitlines() if not line.strip() or set(line.strip()) - set("^~")
    ]
    assert format_exception(recorded).splitlines() == without_carets


def _recorded(error: BaseException, relation: str = "") -> ExceptionInfo:
    causes, current = [], error
    while current.__cause__ or (current.__context__ and not current.__suppress_context__):
        how = "cause" if current.__cause__ else "context"
        current = current.__cause__ or current.__context__
        causes.append(replace(_recorded_alone(current), relation=how))
    return replace(_recorded_alone(error), causes=tuple(causes), relation=relation)


def _recorded_alone(error: BaseException) -> ExceptionInfo:
    frames = tuple(
        FrameInfo(frame.filename, frame.lineno or 0, frame.name, frame.line or "")
        for frame in traceback.extract_tb(error.__traceback__)
    )
    notes = tuple(getattr(error, "__notes__", ()))
    return ExceptionInfo(type(error).__name__, str(error), frames=frames, notes=notes)


def test_cut_stacks_and_group_members_show_their_numbers() -> None:
    """A cut stack says in the middle how many frames are missing;
    members of a group are shown with their numbers.
    """
    members = (ExceptionInfo("KeyError", "'a'"), ExceptionInfo("OSError", "disk"))
    text = format_exception(ExceptionInfo("ExceptionGroup", "two", members=members))
    shown = (
        "ExceptionGroup: two\n  ---- member 1 ----\n  KeyError: 'a'\n  ---- member 2 ----\n "
        " OSError: disk"
    )
    assert text.rstrip("\n") == shown
    frames = tuple(FrameInfo("train.py", number, "recurse") for number in range(4))
    lines = format_exception(
        ExceptionInfo("RecursionError", "deep", frames=frames, frames_omitted=96)
    ).splitlines()
    assert lines[3] == "  ... 96 frames left out ..."
    assert lines[2].endswith("line 1, in recurse")
    assert lines[4].endswith("line 2, in recurse")


_PACKAGES = "/usr/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (
            "\n        Failed to run stage backward:\n        Stage output: Tensor(2, 4)",
            "grad of a vector",
        ),
        ("RetryError[<Future at 0x7f01 state=finished raised OSError>]", "grad of a vector"),
        ("An error occurred while generating the dataset", "grad of a vector"),
        ("We could not load the files", "We could not load the files"),
    ],
)
def test_a_library_wrapper_that_fits_any_error_is_replaced_by_its_cause(
    text: str, first: str
) -> None:
    """The cause of a library's wrapper that fits any error is the first cause;
    else the wrapper tells more.
    """
    inside = (FrameInfo(f"{_PACKAGES}/torch/autograd/graph.py", 9, "run"),)
    cause = ExceptionInfo("RuntimeError", "grad of a vector", frames=inside, relation="cause")
    frames = (
        FrameInfo("/app/train.py", 7, "main", "step()"),
        FrameInfo(f"{_PACKAGES}/torch/pipe.py", 5, "step"),
    )
    assert (
        find_first_cause(
            ExceptionInfo("RuntimeError", text, frames=frames, causes=(cause,))
        ).message
        == first
    )


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/root/train.py", ""),
        ("train.py", ""),
        ("<dynamic-code>", ""),
        ("/root/torch/my_model.py", ""),
        (f"{_PACKAGES}/torch/nn/modules/module.py", "torch"),
        (f"{_PACKAGES}/six.py", "six"),
        ("/opt/conda/lib/python3.11/threading.py", "Python"),
        ("/usr/lib/python3/dist-packages/yaml/reader.py", "yaml"),
        ("/src/plugin/flytekitplugins/firstfault/worker.py", "firstfault"),
        ("<frozen importlib._bootstrap>", "Python"),
    ],
)
def test_a_frame_is_the_programs_own_outside_of_libraries(file: str, library: str) -> None:
    """A frame is the program's own unless its file is an installed package's, Python's or ours.

    Packages that are no frameworks count where nothing else is its own: a program may be installed.
    """
    frame = FrameInfo(file, 1, "step")
    raised = ExceptionInfo("E", "", frames=(frame,))
    assert group_frames_by_library(raised) == [(library, [frame])]
    assert bool(find_own_frames(raised)) is (library in {"", "six", "yaml"})


def test_frames_of_one_library_stand_together() -> None:
    """Runs keep the order, join neighbours only, and tell where frames were left out."""
    files = (
        "/a.py",
        f"{_PACKAGES}/torch/x.py",
        f"{_PACKAGES}/torch/y.py",
        "/b.py",
        f"{_PACKAGES}/torch/z.py",
    )
    raised = ExceptionInfo(
        "E", "", frames=tuple(FrameInfo(file, number, "f") for number, file in enumerate(files))
    )
    found = [(library, len(run)) for library, run in group_frames_by_library(raised)]
    assert found == [("", 1), ("torch", 2), ("", 1), ("torch", 1)]
    found = [
        (library, len(run))
        for library, run in group_frames_by_library(replace(raised, frames_omitted=9))
    ]
    assert found == [
        ("", 1),
        ("torch", 1),
        ("9 frames left out", 0),
        ("torch", 1),
        ("", 1),
        ("torch", 1),
    ]


def test_own_frames_are_those_of_the_nearest_cause_with_any() -> None:
    """Without frames of the user's code, `find_own_frames` returns those of the
    nearest cause with any.
    """
    cause = ExceptionInfo(
        "KeyError",
        "",
        frames=(FrameInfo("/data.py", 3, "read"),),
        relation="cause",
    )
    raised = ExceptionInfo(
        "E",
        "",
        frames=(FrameInfo(f"{_PACKAGES}/torch/x.py", 1, "f"),),
        causes=(cause,),
    )
    assert [format_place(frame) for frame in find_own_frames(raised)] == ["data.py:3 in read"]
    # a traceback of another process that has only frames of libraries: where it was raised anew
    library = f"{_PACKAGES}/torch/distributed/checkpoint/utils.py"
    trace = (
        f'Traceback (most recent call last): (RANK 0)\n  File "{library}", line 9, in'
        " load\nValueError: no metadata\n"
    )
    frames = (
        FrameInfo("/app/train.py", 21, "main", "dcp.load(state)"),
        FrameInfo(library, 221, "reduce_scatter"),
    )
    raised = ExceptionInfo(
        "torch.distributed.checkpoint.api.CheckpointException", f"ranks:[0]\n{trace}", frames=frames
    )
    assert [format_place(frame) for frame in find_own_frames(raised)] == ["train.py:21 in main"]


@pytest.mark.parametrize(
    ("kind", "text", "category"),
    [
        (
            "wandb.errors.errors.UsageError",
            "No API key configured. Use `wandb login` to log in.",
            "auth",
        ),
        ("ValueError", "The tracker requires an API key. Please provide it.", "auth"),
        ("NeptuneMissingApiTokenException", "the client couldn't find your API token.", "auth"),
        ("LocalTokenNotFoundError", "Token is required, but no token found.", "auth"),
        ("DefaultCredentialsError", "Your default credentials were not found.", "auth"),
        ("wandb.errors.CommError", "the run could not be uploaded", "external_service"),
        (
            "safetensors_rust.SafetensorError",
            "Error while deserializing header: header too large",
            "checkpoint",
        ),
        ("ValueError", "API version 3 is missing a key", "user_code"),
    ],
)
def test_a_missing_key_or_bad_header_has_its_own_category(
    kind: str, text: str, category: str
) -> None:
    """A missing key is a lack of credentials, not a service that fails;
    a header that cannot be read a checkpoint's.
    """
    failure = make_error(3, exception=ExceptionInfo(kind, text, ("Exception",)))
    assert evidence(make_job(failure)).category == category
