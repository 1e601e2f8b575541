"""What proves at its first occurrence that a retry would fail again, and what doesn't."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firstfault import model
from firstfault.conclude import conclude
from firstfault.evidence import certain_bugs
from firstfault.evidence.certain_bugs import (
    explain_missing_program,
    find_certain_bug,
    find_missing_program,
)
from firstfault.model import Action, ExceptionInfo
from firstfault.report import build_report
from firstfault.retry import decide
from firstfault.strategies import get_strategy, run_strategy
from firstfault.testing import make_error, make_job
from firstfault.utils.toml import parse_toml
from tests.readers.scenes import died, own_fault, stopped

_FRAMES = (model.FrameInfo("/job/train.py", 7, "train", "step(batch)"),)


def _raised(name: str, message: str, **more: Any) -> ExceptionInfo:
    bases = ("Exception", "BaseException") if name != "KeyboardInterrupt" else ("BaseException",)
    return ExceptionInfo(name, message, **{"bases": bases, "frames": _FRAMES, **more})


def _decide(exception: ExceptionInfo, **fields: Any) -> model.Decision:
    """Return the decision on a job in which rank 3 of 8 raised,
    and its agent stopped the other ranks.
    """
    root = own_fault(
        3, at_ms=0, exception=exception, message=exception.message, world_size=8, **fields
    )
    conclusion = conclude(make_job(root, *(stopped(rank, world_size=8) for rank in (0, 1, 2))))
    assert conclusion is not None
    return conclusion.decision


_TEMPORARY = {
    "pyarrow": (
        "OSError",
        "When reading: AWS Error NETWORK_CONNECTION during GetObject: curlCode: 28",
    ),
    "data loader": ("RuntimeError", "DataLoader timed out after 120 seconds"),
    "pool": (
        "concurrent.futures.process.BrokenProcessPool",
        "A process in the process pool was terminated abruptly",
    ),
    "sqlite": ("sqlite3.OperationalError", "database is locked"),
    "subprocess's time limit": (
        "subprocess.TimeoutExpired",
        "Command '['gsutil', 'cp']' timed out after 60 seconds",
    ),
    "subprocess": (
        "subprocess.CalledProcessError",
        "Command '['gsutil', 'cp']' returned non-zero exit status 1.",
    ),
    "busy devices": (
        "RuntimeError",
        "CUDA error: all CUDA-capable devices are busy or unavailable",
    ),
    "no GPU": ("RuntimeError", "No CUDA GPUs are available"),
    "cublas": (
        "RuntimeError",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    ),
    "launch": ("torch.AcceleratorError", "CUDA error: unspecified launch failure"),
    "illegal access": ("RuntimeError", "CUDA error: an illegal memory access was encountered"),
    "GPU memory": ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 3.00 GiB."),
    "canceled": ("asyncio.exceptions.CancelledError", ""),
    "interrupted": ("KeyboardInterrupt", ""),
    "requests": (
        "requests.exceptions.ReadTimeout",
        "HTTPSConnectionPool(host='h', port=443): Read timed out.",
    ),
    "urllib3": (
        "urllib3.exceptions.ProtocolError",
        "('Connection aborted.', ConnectionResetError(104, 'reset'))",
    ),
    "botocore": (
        "botocore.exceptions.EndpointConnectionError",
        "Could not connect to the endpoint URL",
    ),
    "hub": (
        "huggingface_hub.errors.HfHubHTTPError",
        "500 Server Error: Internal Server Error for url: https://h",
    ),
    "grpc": ("grpc._channel._InactiveRpcError", "status = StatusCode.UNAVAILABLE"),
    "aiohttp": ("aiohttp.client_exceptions.ServerDisconnectedError", "Server disconnected"),
    "file locked": (
        "filelock._error.Timeout",
        "The file lock '/cache/x.lock' could not be acquired.",
    ),
    "credentials": (
        "botocore.exceptions.ClientError",
        "An error occurred (ExpiredToken) when calling GetObject",
    ),
    "missing file": (
        "FileNotFoundError",
        "[Errno 2] No such file or directory: '/data/shard-7.tar'",
    ),
    "full disk": ("OSError", "[Errno 28] No space left on device"),
    "bad record": ("ValueError", "record 71 of part-3: CRC mismatch"),
    "key": ("KeyError", "'labels'"),
    "index": ("IndexError", "list index out of range"),
    "assertion": ("AssertionError", "loss is nan"),
    "of the program": ("train.WorkerPoolError", "lost 3 of 8 helpers"),
    "a subclass of a bug's type": ("train.TransientTypeError", "try again"),
    "a library of the machine": (
        "ImportError",
        "libcudart.so.12: cannot open shared object file: No such file",
    ),
    "unequal samples": (
        "RuntimeError",
        "stack expects each tensor to be equal size, but got [3] at entry 0",
    ),
}


@pytest.mark.parametrize(("name", "message"), _TEMPORARY.values(), ids=_TEMPORARY)
def test_what_may_be_temporary_is_left_to_the_scheduler(name: str, message: str) -> None:
    """At its first occurrence, an exception that may be gone in the next
    attempt never stops a job.
    """
    assert _decide(_raised(name, message)).action is Action.UNKNOWN


_BUGS = parse_toml((Path(certain_bugs.__file__).with_suffix(".toml")).read_text("utf-8"))
_EXAMPLES = [(row["types"][0], text) for row in _BUGS["bug"] for text in row["examples"]]


@pytest.mark.parametrize(("name", "message"), _EXAMPLES)
def test_a_certain_bug_stops(name: str, message: str) -> None:
    """A bug that depends on nothing outside of the program stops a job at once,
    and the reason names it.
    """
    decision = _decide(_raised(name, message))
    assert (decision.action, decision.retry) == (Action.STOP, False)
    assert decision.reason.endswith(", so it would fail again")


@pytest.mark.parametrize(
    "name", [name for row in _BUGS["bug"] if "pattern" not in row for name in row["types"]]
)
def test_every_listed_type_of_bug_is_found(name: str) -> None:
    """Each listed type is found, with an article that fits."""
    reason = find_certain_bug(make_error(3, exception=_raised(name, "x")))
    assert reason
    assert reason.startswith(
        "an " if name.startswith(("Attr", "Unb", "Ind")) else ("a ", "the ", "tensor ")
    )


_LOST = _raised("ConnectionResetError", "[Errno 104] Connection reset by peer", relation="context")
_BUG = _raised("TypeError", "'NoneType' object is not subscriptable")
_REMOTE = """Caught TypeError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/job/data.py", line 3, in __getitem__
    return self.items[index] + "a"
TypeError: unsupported operand type(s) for +: 'int' and 'str\'"""
_REMOTE_CHAIN = _REMOTE.replace(
    "Original Traceback (most recent call last):",
    'Original Traceback (most recent call last):\n  File "/job/data.py", line 2, in fetch\n   '
    " get(url)\nConnectionError: refused\n\nDuring handling of the above exception, another"
    " exception occurred:\n\nTraceback (most recent call last):",
)


@pytest.mark.parametrize(
    ("exception", "is_certain"),
    [
        (replace(_BUG, causes=(_LOST,)), False),
        (replace(_BUG, causes=(replace(_LOST, relation="suppressed"),)), False),
        (replace(_LOST, relation="", causes=(replace(_BUG, relation="context"),)), False),
        (
            _raised("train.TransientError", "again", causes=(replace(_BUG, relation="cause"),)),
            False,
        ),
        (replace(_BUG, causes=(_raised("AttributeError", "x", relation="context"),)), True),
        (_raised("SystemExit", "1", causes=(replace(_BUG, relation="context"),)), True),
        (
            _raised(
                "ExceptionGroup", "2 tasks", members=(_BUG, _raised("asyncio.CancelledError", ""))
            ),
            True,
        ),
        (_raised("ExceptionGroup", "2 tasks", members=(_BUG, replace(_LOST, relation=""))), False),
        (_raised("asyncio.CancelledError", "", causes=(replace(_BUG, relation="context"),)), False),
        (_raised("TypeError", _REMOTE), True),
        (_raised("TypeError", _REMOTE_CHAIN), False),
    ],
)
def test_a_bug_beside_a_temporary_error_proves_nothing(
    exception: ExceptionInfo, is_certain: bool
) -> None:
    """A bug that was raised because of a temporary error, or replaced by one, proves nothing."""
    assert bool(find_certain_bug(make_error(3, exception=exception))) is is_certain


@pytest.mark.parametrize("text", _BUGS["usage"]["examples"])
def test_a_refused_command_line_stops_the_job(text: str) -> None:
    """A command line that its parser refuses stops the job;
    the same text before another exit code doesn't.
    """
    left = _raised("SystemExit", "2")
    assert (
        find_certain_bug(make_error(3, exception=left, log_tail=text))
        == "the program refuses its command line"
    )
    assert find_certain_bug(make_error(3, exception=None, exit_code=2, log_tail=text))
    assert not find_certain_bug(make_error(3, exception=replace(left, message="1"), log_tail=text))
    assert not find_certain_bug(
        make_error(3, exception=left, log_tail="train.py: error: cannot reach the server")
    )


@pytest.mark.parametrize(
    ("text", "exit_code", "reason", "advice"),
    [
        (text, 2, "the script doesn't exist", f"the path of the script: {name} doesn't exist")
        for text, name in zip(
            _BUGS["missing_script"]["examples"], ("/job/nope.py", "nope.py"), strict=True
        )
    ]
    + [
        (text, 1, "the module doesn't exist", "the name of the module: nope doesn't exist")
        for text in _BUGS["missing_module"]["examples"]
    ],
)
def test_a_missing_program_stops_only_a_job_of_one_node_or_all_ranks(
    text: str, exit_code: int, reason: str, advice: str
) -> None:
    """It stops a job of one node, or of all ranks; another node may have the file,
    and other errors may pass.
    """
    ended = died(0, "", exit_code, log_tail=f"a warning\n{text}")
    one = replace(ended, place=replace(ended.place, world_size=4, group_world_size=1))
    job = make_job(one)
    conclusion = conclude(job)
    assert conclusion is not None
    assert (conclusion.decision.action, conclusion.decision.reason) == (
        Action.STOP,
        f"{reason}, so it would fail again",
    )
    report = build_report(job, conclusion.verdict, conclusion.decision)
    assert report.answers.steps[0].text == f"correct {advice}"
    other = replace(one, place=replace(one.place, rank=1, local_rank=1))
    both = conclude(make_job(one, other))
    assert both is not None
    assert both.decision.reason == conclusion.decision.reason
    several = replace(one, place=replace(one.place, group_world_size=2))
    assert not explain_missing_program(several, 2)
    assert explain_missing_program(several, 4)
    for tail in (
        text.replace("Errno 2", "Errno 13").replace("No module", "Nothing"),
        f"{text.strip()}\ntrying again",
        "lost",
    ):
        assert find_missing_program(replace(one, log_tail=tail)) is None
    assert find_missing_program(replace(one, exit_code=3 - exit_code)) is None


def test_an_uncertain_root_cause_proves_nothing() -> None:
    """A certain bug stops the job only if it is certain, too, that it is the root cause."""
    verdict = run_strategy(get_strategy("evidence"), make_job(own_fault(3, exception=_BUG)))
    assert decide(verdict).action is Action.STOP
    assert decide(replace(verdict, confidence="low")).action is Action.UNKNOWN
    assert (
        decide(replace(verdict, suspects=(model.Suspect("it was near", rank=4),))).action
        is Action.UNKNOWN
    )
    assert decide(replace(verdict, rule="out-of-step")).action is Action.UNKNOWN
