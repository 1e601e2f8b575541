"""Flyte's engine: its variables, its codes for exceptions, and the files that Flyte reads."""

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserException

from firstfault.layout import is_stock_error_file
from firstfault.model import DocumentRef, Kind, Origin, Seal
from firstfault.retry import Vote
from firstfault.testing import make_error
from firstfault.wire.documents import decode
from firstfault_torch import time_limits
from firstfault_torch.engine import ErrorName
from firstfault_torch.failures.capture import capture
from firstfault_torch.node.document_writer import put_file
from firstfault_torch.node_context import NodeContext
from firstfault_torch.worker.worker_monitor import WorkerMonitor
from flytekitplugins.firstfault import entrypoints, flyte_engine
from flytekitplugins.firstfault.config import STRATEGY_VARIABLE
from tests.prefix import Prefix
from tests.recordings import conclude_node, seal_conclusion
from tests.s3_server import S3
from tests.waiting import wait_until

LONG_S = 60.0
SOON_S = 30.0


def test_the_users_variable_switches_recording_off_in_workers() -> None:
    """The user's variable switches recording off, also in workers."""
    assert STRATEGY_VARIABLE == "FLYTE_INTERNAL_ERROR_PROPAGATION"
    identity = flyte_engine.FlyteEngine("s3://bucket/out", strategy="earliest").identity()
    assert NodeContext("earliest", identity).to_environment()[STRATEGY_VARIABLE] == "earliest"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"_F_DES": ""}, False),
        ({"_F_DES": "Earliest"}, True),
        ({"FLYTE_INTERNAL_DIST_ERROR_STRATEGY": "Earliest"}, True),
        ({"FLYTE_INTERNAL_DIST_ERROR_STRATEGY": "", "_F_DES": "Earliest"}, False),
    ],
)
def test_the_error_file_has_the_name_that_the_backend_expects(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt's error file is error.pb, or one of its own if the backend asks for that;
    the long name counts.
    """
    assert flyte_engine.writes_error_file_per_pod(environment) is expected
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    names = {
        flyte_engine.get_verdict_name(f"s3://bucket/run/data/{attempt}") for attempt in (0, 0, 1)
    }
    pattern = r"error-[0-9a-f]{32}\.pb" if expected else r"error\.pb"
    assert all(re.fullmatch(pattern, name) and is_stock_error_file(name) for name in names)
    assert len(names) == (2 if expected else 1)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"FLYTE_INTERNAL_WORKER_NAME": "long", "_F_WN": "short", "HOSTNAME": "host"}, "long"),
        ({"_F_WN": "short", "HOSTNAME": "host"}, "short"),
        ({"_F_WN": "", "HOSTNAME": "host"}, "host"),
        ({"HOSTNAME": "host"}, "host"),
        ({}, socket.gethostname()),
    ],
)
def test_a_node_is_named_as_its_pod_else_as_its_host(
    environment: dict[str, str], name: str
) -> None:
    """A node is named as the backend names its pod, else as its host."""
    assert flyte_engine.get_node_name(environment) == name


@pytest.mark.parametrize(("text", "number"), [("2", 2), ("", 0), ("two", 0)])
def test_the_attempt_is_the_backends_number_else_the_first(
    text: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt's number is the backend's; without one, or with nonsense, it is the first."""
    assert flyte_engine.FlyteEngine().identity().attempt == 0
    monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", text)
    assert flyte_engine.FlyteEngine().identity().attempt == number


class _LostShardError(FlyteRecoverableException):
    pass


class _FarError(_LostShardError, KeyError):
    pass


class _FlyteRecoverableException(Exception):  # noqa: N818 - the same name, another class
    pass


class _CodeError(Exception):
    error_code = "USER:Quota"


class _NumberError(Exception):
    error_code = 507


class _OddCodeError(Exception):
    error_code = None


class _HostileCodeError(Exception):
    @property
    def error_code(self) -> Any:
        raise SystemExit(3)


def _raised_from_a_recoverable_one() -> ValueError:
    error = ValueError("gave up")
    error.__cause__ = FlyteRecoverableException("x")
    return error


@pytest.mark.parametrize(
    ("error", "recoverable", "code"),
    [
        (FlyteRecoverableException("x"), True, "USER:Recoverable"),
        (_LostShardError("x"), True, "USER:Recoverable"),
        (_FarError("x"), True, "USER:Recoverable"),
        (FlyteUserException("x"), False, "USER:Unknown"),
        (_FlyteRecoverableException("x"), False, "USER:RuntimeError"),
        (ValueError(flyte_engine.RECOVERABLE_TYPE), False, "USER:RuntimeError"),
        (_raised_from_a_recoverable_one(), False, "USER:RuntimeError"),
        (_CodeError(), False, "USER:Quota"),
        (_NumberError(), False, "507"),
        (_OddCodeError(), False, "USER:RuntimeError"),
        (_HostileCodeError(), False, "USER:RuntimeError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_exceptions_code_and_recoverable_type_are_flytekits(
    error: Exception, recoverable: bool, code: str
) -> None:
    """Recoverable is flytekit's exception and its subclasses, by type;
    the code is the exception's own.
    """
    assert flyte_engine.FlyteEngine().name_error(error, capture(error)) == ErrorName(
        code, recoverable
    )


def _deep(levels: int) -> None:
    if levels == 0:
        raise ValueError("bottom")
    _deep(levels - 1)


def test_a_workers_traceback_begins_with_the_task_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's traceback begins with the task function,
    not with the frames of ours that called it.
    """
    found = []
    monkeypatch.setattr(WorkerMonitor, "fails", lambda _self, error: found.append(capture(error)))
    with pytest.raises(ValueError, match="bottom"):
        entrypoints.run_forked(partial(_deep, 1))
    assert [frame.function for frame in found[0].frames] == ["_deep", "_deep"]


@pytest.fixture
def output_checks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return what each look for outputs has found; the pauses between looks are short."""
    found: list[bool] = []
    look = flyte_engine.outputs_are_there

    def noted(output_prefix: str) -> bool:
        found.append(look(output_prefix))
        return found[-1]

    monkeypatch.setattr(flyte_engine, "outputs_are_there", noted)
    monkeypatch.setattr(time_limits, "MAX_OUTPUTS_POLL_SECONDS", 0.1)
    return found


@pytest.mark.parametrize(
    "name", ["outputs.pb", "error.pb", "error-0123456789abcdef0123456789abcdef.pb"]
)
def test_only_outputs_or_an_error_file_end_the_wait_for_rank_0(
    name: str, prefix: Prefix, output_checks: list[bool]
) -> None:
    """The wait ends with rank 0's outputs or any pod's error file, before it or during it;
    nothing else ends it.
    """
    shutdown_requested = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(flyte_engine.await_outputs, prefix.uri, shutdown_requested, LONG_S)
        wait_until(lambda: len(output_checks) > 1)
        for other in (
            "deck.html",
            "outputs.pb.part",
            "firstfault/errors/e1-x.pb",
            "checkpoint/error.pb",
        ):
            (prefix.folder / other).parent.mkdir(parents=True, exist_ok=True)
            (prefix.folder / other).touch()
        output_checks.clear()
        wait_until(lambda: len(output_checks) > 2)
        assert not result.done()
        (prefix.folder / name).touch()
        assert result.result(SOON_S) is True
    shutdown_requested.set()
    assert flyte_engine.await_outputs(prefix.uri, shutdown_requested, LONG_S) is True


def test_a_signal_ends_the_wait_at_once(
    prefix: Prefix, output_checks: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal before the wait, or during a long pause of it, ends it at once."""
    monkeypatch.setattr(time_limits, "OUTPUTS_POLL_SECONDS", LONG_S)
    monkeypatch.setattr(time_limits, "MAX_OUTPUTS_POLL_SECONDS", LONG_S)
    shutdown_requested = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(flyte_engine.await_outputs, prefix.uri, shutdown_requested, LONG_S)
        wait_until(lambda: output_checks)
        assert not result.done()
        shutdown_requested.set()
        assert result.result(SOON_S) is False
    assert flyte_engine.await_outputs(prefix.uri, shutdown_requested, LONG_S) is False


def test_a_pod_stops_waiting_for_outputs_after_the_limit(
    prefix: Prefix, caplog: pytest.LogCaptureFixture
) -> None:
    """A pod stops waiting after the time limit; a storage that cannot be listed counts as empty.
    Both are logged.
    """
    assert flyte_engine.await_outputs(prefix.uri, threading.Event(), 0.3) is False
    prefix.folder.parent.mkdir(exist_ok=True)
    prefix.folder.touch()
    assert flyte_engine.await_outputs(f"{prefix.uri}/below/a/file", threading.Event(), 0.1) is False
    assert "rank 0's pod has written no outputs within 0.3 s" in caplog.text
    assert "rank 0's pod has written no outputs within 0.1 s" in caplog.text


def test_an_account_that_may_not_list_waits_for_readable_outputs(
    s3_no_list: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outputs end the wait as soon as they can be read."""
    for name, value in s3_no_list.environment().items():
        monkeypatch.setenv(name, value)
    uri = s3_no_list.uri()
    put_file(uri, "outputs.pb", b"the outputs")
    assert flyte_engine.await_outputs(uri, threading.Event(), LONG_S) is True


def test_an_account_that_may_not_read_does_not_wait(
    s3: S3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pod that may not read does not wait for half an hour after its success."""
    for name, value in replace(s3, access_key="no-such-key").environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(time_limits, "UNREADABLE_OUTPUTS_TIMEOUT_SECONDS", 0.5)
    assert flyte_engine.await_outputs(s3.uri(), threading.Event(), 1800) is False
    assert "rank 0's pod has written no outputs within 0.5 s" in caplog.text


@pytest.mark.parametrize(
    ("kind", "vote"),
    [
        (Kind.NON_RECOVERABLE, Vote(retry=True, reason="broken", origin=Origin.SYSTEM)),
        (Kind.RECOVERABLE, Vote(retry=False, reason="again")),
        (Kind.RECOVERABLE, Vote(retry=True, reason="asked")),
        (Kind.NON_RECOVERABLE, Vote(retry=False, reason="a bug")),
    ],
)
def test_observe_and_off_leave_the_kind_of_error_to_flytekit(
    prefix: Prefix,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: Kind,
    vote: Vote,
) -> None:
    """Flyte reads the kind of error that flytekit writes;
    "observe" logs a line about a decision that differs.
    """
    recording = prefix.node_context()
    engine = flyte_engine.FlyteEngine(prefix.uri, in_pod=True)
    publication = seal_conclusion(
        conclude_node(recording, [make_error(0, kind=kind)], policy=lambda *_: vote), recording
    )
    written = {}
    for mode in ("act", "observe", "off"):
        monkeypatch.setenv("FIRSTFAULT_DECISIONS", mode)
        document = engine.publish(publication, leaving_now=True).sealed.document
        seal = decode(document, DocumentRef("error.pb"))
        assert isinstance(seal, Seal)
        written[mode] = (seal.kind, seal.origin)
    acting = (Kind.RECOVERABLE if vote else Kind.NON_RECOVERABLE, vote.origin or Origin.USER)
    assert written == {"act": acting, "observe": (kind, Origin.USER), "off": (kind, Origin.USER)}
    line = (
        f"firstfault: observed: would have told Flyte {publication.sealed.decision.action.value}:"
        f" {publication.sealed.decision.reason}"
    )
    assert [text for text in caplog.messages if "observed" in text] == [line] * (
        written["act"] != written["off"]
    )


def test_without_kubernetes_no_namespace_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flyte's default is a guess about a cluster: on a laptop, no command of kubectl follows."""
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_PROJECT", "local")
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_DOMAIN", "development")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert flyte_engine.get_namespace() == ""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert flyte_engine.get_namespace() == "local-development"
