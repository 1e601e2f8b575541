"""The node that concludes tells a webhook and installed notifiers,
in bounded time and without harm.
"""

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from opentelemetry import _logs
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs

from firstfault.report import Report
from firstfault.report.first_line import first_line
from firstfault.testing import make_error
from firstfault.wire.documents import encode
from firstfault_torch import run, time_limits
from firstfault_torch.agent.launch import RoundEnd
from firstfault_torch.agent.reporter import NodeReport
from firstfault_torch.conclusion import notifications
from firstfault_torch.conclusion.notifications import notify
from firstfault_torch.engine import PlainEngine, Publication
from firstfault_torch.node.document_writer import document_path, record_error
from firstfault_torch.notifiers import WEBHOOK_VARIABLE, send_record
from firstfault_torch.options import Options
from firstfault_torch.rounds.election import CollectedReports
from firstfault_torch.rounds.report_packing import ElectedVerdict
from tests.http_receiver import Receiver, serve_receiver
from tests.prefix import Prefix
from tests.recordings import conclude_node, seal_conclusion
from tests.reports.scenes import CATEGORY_SCENES, SCOPE_SCENES, URI

pytestmark = pytest.mark.slow

PATH = "T0/B0/not-for-the-log"
LONG_S = 60.0


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Run a server, and name it in the environment."""
    with serve_receiver() as found:
        found.location = f"/{PATH}/elsewhere"
        monkeypatch.setenv(WEBHOOK_VARIABLE, f"{found.url}/{PATH}")
        yield found


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(**calls: Callable[[Report], object]) -> None:
        points = [
            SimpleNamespace(name=name, load=lambda call=call: call) for name, call in calls.items()
        ]
        monkeypatch.setattr(
            notifications,
            "entry_points",
            lambda group: points if group == "firstfault.notifiers" else [],
        )

    return install


def test_a_webhook_gets_the_report_as_an_event(webhook: Receiver) -> None:
    """It is a CloudEvents 1.0 event with the JSON of the report;
    the same verdict has the same id.
    """
    report = SCOPE_SCENES["rank"]()
    notify(report)
    notify(report)
    event, again = (json.loads(request.body) for request in webhook.received)
    types = [request.headers["Content-Type"] for request in webhook.received]
    assert types == ["application/cloudevents+json"] * 2
    assert (event["specversion"], event["type"], event["source"]) == (
        "1.0",
        "firstfault.verdict.v1",
        URI,
    )
    assert event["subject"] == "project-development-a7xk2m9qp4vd8wz3hj6t"
    assert event["data"]["first_line"] == first_line(report.verdict, report.decision)
    assert event["id"] == again["id"]
    notify(SCOPE_SCENES["ranks"]())
    assert json.loads(webhook.received[2].body)["id"] != event["id"]


@pytest.mark.parametrize("error", [ValueError("no channel"), SystemExit(3)])
def test_a_failing_notifier_is_a_warning(
    installed: Callable[..., None], caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """It is a warning, and the others are called."""
    seen: list[Report] = []
    installed(broken=Mock(side_effect=error), whole=seen.append)
    notify(SCOPE_SCENES["rank"]())
    assert len(seen) == 1
    assert f"the notifier broken failed ({type(error).__name__}: {error})" in caplog.text


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("{url}", 500),
        ("{url}", 302),
        *[
            (url, 200)
            for url in (
                "ftp://127.0.0.1/{secret}",
                "http://127.0.0.1:x/{secret}",
                "http://[::{secret}",
            )
        ],
    ],
)
def test_a_refusing_webhook_is_one_warning_without_its_url(
    webhook: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    url: str,
    status: int,
) -> None:
    """An error, or a redirect that would lose the event, is one warning without the URL:
    it may hold a credential.
    """
    webhook.status = status
    monkeypatch.setenv(WEBHOOK_VARIABLE, url.format(url=f"{webhook.url}/{PATH}", secret=PATH))
    with caplog.at_level(logging.WARNING):
        notify(SCOPE_SCENES["rank"]())
    (record,) = caplog.records
    assert record.getMessage().startswith("firstfault: the notifier webhook failed (")
    assert PATH not in record.getMessage()


def test_a_server_that_hangs_up_does_not_make_the_url_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not said that the URL is wrong."""

    def hang_up() -> None:
        connection, _ = server.accept()
        connection.recv(65_536)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=hang_up)
        thread.start()
        monkeypatch.setenv(WEBHOOK_VARIABLE, f"http://127.0.0.1:{server.getsockname()[1]}/{PATH}")
        notify(SCOPE_SCENES["rank"]())
        thread.join()
    (record,) = caplog.records
    assert record.getMessage().startswith("firstfault: the notifier webhook failed (")
    assert "not valid" not in record.getMessage()
    assert PATH not in record.getMessage()


def test_a_slow_lookup_of_notifiers_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that does not answer delays the end of the pod by a limit,
    and a warning says what was not called.
    """
    goes_on = threading.Event()
    monkeypatch.setattr(time_limits, "NOTIFIERS_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(
        notifications, "entry_points", lambda group: [] if goes_on.wait(LONG_S) else [group]
    )
    began = time.monotonic()
    notify(SCOPE_SCENES["rank"]())
    assert time.monotonic() - began < LONG_S / 2
    goes_on.set()
    assert "not calling notifiers: loading them took more than 0.5 s" in caplog.text


def _reported(prefix: Prefix, end: RoundEnd) -> Publication | None:
    """Return the verdict on a failed round, after it was published and reported."""
    engine = PlainEngine(str(prefix.folder.parent), 0, f"worker-{end.group_rank}")
    settings = run.ExitSettings(engine, Options(settle_seconds=0.1), threading.Event())
    publication = run.reach_verdict(end, settings)
    run._report(publication, {}, settings)
    return publication


def test_the_node_that_concludes_notifies(prefix: Prefix, webhook: Receiver) -> None:
    """When the event arrives, the verdict is in the storage, and no other node waits for it."""
    own = make_error(0, node="worker-0", message="no labels")
    _, receipt = record_error(own, prefix.node_context(), None, 30)
    report = NodeReport({document_path(receipt.name): encode(own)})
    settled: list[bool] = []

    def hand_over(document: bytes, *, durable: bool, bundle: bytes) -> ElectedVerdict:
        assert not bundle, "all nodes see the storage"
        settled.append(durable)
        assert not webhook.received
        return ElectedVerdict(document, durable=durable)

    peers = Mock()
    peers.settle.return_value = [CollectedReports(report.copies)]
    peers.settlement.publish = hand_over
    assert _reported(prefix, RoundEnd(prefix.node_context(), report, peers=peers)) is not None
    assert settled == [True]
    (request,) = webhook.received
    assert json.loads(request.body)["data"]["root"]["message"] == "no labels"


def test_a_node_that_adopted_a_verdict_does_not_notify(prefix: Prefix, webhook: Receiver) -> None:
    """Each verdict is told by the node that reached it."""
    own = make_error(0, node="worker-0", message="no labels")
    conclusion = conclude_node(prefix.node_context(), [own])
    document = seal_conclusion(conclusion, prefix.node_context()).sealed.document
    peers = Mock()
    peers.settle.return_value = [ElectedVerdict(document, durable=True)]
    assert (
        _reported(prefix, RoundEnd(prefix.node_context(), NodeReport(), group_rank=1, peers=peers))
        is not None
    )
    assert not webhook.received


BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
LOGS = "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"
VARIABLES = (
    *(BASE, LOGS, "OTEL_SDK_DISABLED", "OTEL_LOGS_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL"),
    *(
        "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL",
        "OTEL_SERVICE_NAME",
        "OTEL_RESOURCE_ATTRIBUTES",
        WEBHOOK_VARIABLE,
    ),
)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Run a receiver, and name it in the environment as the endpoint of all signals."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with serve_receiver() as found:
        monkeypatch.setenv(BASE, found.url)
        yield found


def _value(value: AnyValue) -> Any:
    return getattr(value, str(value.WhichOneof("value")))


def _values(pairs: Any) -> dict[str, Any]:
    found: list[KeyValue] = list(pairs)
    return {pair.key: _value(pair.value) for pair in found}


def _only(collector: Receiver) -> tuple[ResourceLogs, LogRecord]:
    """Return the one record that a receiver was sent, and what it came in."""
    (request,) = collector.received
    (logs,) = ExportLogsServiceRequest.FromString(request.body).resource_logs
    (scope,) = logs.scope_logs
    (record,) = scope.log_records
    assert scope.scope.name == "firstfault"
    return logs, record


def test_a_stall_is_a_warning(collector: Receiver) -> None:
    """Its record has the line that was told, and who is waited for."""
    stall = {
        "uri": "/jobs/7",
        "first_line": "no progress",
        "rank": 5,
        "node": "node-2",
        "lost_seconds": None,
    }
    send_record.on_stall(stall)  # type: ignore[attr-defined]
    _, record = _only(collector)
    told = {"firstfault.rank": 5, "firstfault.pod": "node-2", "firstfault.uri": "/jobs/7"}
    assert (_value(record.body), record.severity_text, record.event_name) == (
        "no progress",
        "WARN",
        "firstfault.stall",
    )
    assert _values(record.attributes) == told


def test_a_verdict_is_one_record(collector: Receiver) -> None:
    """It has the first line, the exception by the semantic conventions,
    and the verdict as attributes.
    """
    report = SCOPE_SCENES["rank"]()
    root = report.verdict.root
    assert root.exception is not None
    notify(report)
    logs, record = _only(collector)
    assert collector.received[0].path == "/v1/logs"
    assert collector.received[0].headers["Content-Type"] == "application/x-protobuf"
    assert _value(record.body) == first_line(report.verdict, report.decision)
    assert (record.severity_number, record.severity_text) == (17, "ERROR")
    assert record.event_name == "firstfault.verdict"
    assert record.time_unix_nano == report.verdict.timestamp_ns
    assert abs(record.observed_time_unix_nano - time.time_ns()) < 60e9
    found = _values(record.attributes)
    stack = found.pop("exception.stacktrace")
    assert stack.startswith("Traceback (most recent call last):\n")
    assert stack.endswith(f"{root.exception.type}: {root.exception.message}")
    assert found == {
        "exception.type": root.exception.type,
        "exception.message": root.exception.message,
        "k8s.pod.name": root.node,
        "k8s.namespace.name": "project-development",
        "k8s.node.name": "gpu-node-8",
        "host.name": "gpu-node-8",
        "firstfault.outcome": "failed",
        "firstfault.category": "user_code",
        "firstfault.code": report.verdict.code,
        "firstfault.scope": "rank",
        "firstfault.confidence": "high",
        "firstfault.rank": 3,
        "firstfault.pod": root.node,
        "firstfault.machine": "gpu-node-8",
        "firstfault.action": "unknown",
        "firstfault.retry": False,
        "firstfault.fingerprint": report.verdict.fingerprint,
        "firstfault.digest": report.verdict.digest,
        "firstfault.attempt": 0,
        "firstfault.execution": "project-development-a7xk2m9qp4vd8wz3hj6t",
        "firstfault.uri": URI,
    }
    assert _values(logs.resource.attributes)["service.name"] == "firstfault"
    # the user's own OpenTelemetry can still be configured
    assert isinstance(_logs.get_logger_provider(), _logs._internal.ProxyLoggerProvider)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [*SCOPE_SCENES, *CATEGORY_SCENES])
def test_every_kind_of_verdict_can_be_sent(collector: Receiver, name: str) -> None:
    """A record has a category, a scope and a decision, and an exception only if there was one."""
    report = {**SCOPE_SCENES, **CATEGORY_SCENES}[name]()
    notify(report)
    found = _values(_only(collector)[1].attributes)
    assert found["firstfault.category"] == report.verdict.category
    assert found["firstfault.retry"] is report.decision.retry
    root = report.verdict.root
    assert ("exception.type" in found) is (root is not None and root.exception is not None)


def test_the_standard_variables_hold(collector: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint for logs is taken as it is; headers,
    the service's name and its attributes are the user's.
    """
    monkeypatch.setenv(BASE, "http://127.0.0.1:1")
    monkeypatch.setenv(LOGS, f"{collector.url}/own/path")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=abc")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision,k8s.pod.name=the-sender")
    notify(SCOPE_SCENES["rank"]())
    logs, record = _only(collector)
    (request,) = collector.received
    assert (request.path, request.headers["x-key"]) == ("/own/path", "abc")
    resource = _values(logs.resource.attributes)
    assert (resource["service.name"], resource["team"]) == ("training", "vision")
    assert resource["k8s.pod.name"] == "the-sender"
    assert _values(record.attributes)["k8s.pod.name"].endswith("worker-1")


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_LOGS_EXPORTER", "none"), (BASE, "")]
)
def test_without_an_endpoint_no_record_is_sent(
    collector: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: str,
) -> None:
    """Without an endpoint, or by OpenTelemetry's own variables; without the extra,
    there is no reason for a warning.
    """
    with monkeypatch.context() as patch:
        patch.setenv(name, value)
        notify(SCOPE_SCENES["rank"]())
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http._log_exporter", None)
    notify(SCOPE_SCENES["rank"]())
    assert not collector.received
    assert not caplog.records


@pytest.mark.parametrize(
    ("protocol", "status", "warning"),
    [
        ("grpc", 200, "set OTEL_EXPORTER_OTLP_LOGS_PROTOCOL=http/protobuf"),
        (
            "http/protobuf",
            400,
            "the notifier otel failed (OSError: the OTLP endpoint rejected the record)",
        ),
    ],
)
def test_an_unusable_endpoint_is_a_warning_with_advice(  # noqa: PLR0917
    protocol: str,
    status: int,
    warning: str,
    collector: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An endpoint for gRPC, or one that refuses, is a warning that says what to do."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    collector.status = status
    notify(SCOPE_SCENES["rank"]())
    assert len(collector.received) == (protocol != "grpc")
    assert warning in caplog.text


@pytest.mark.parametrize("receiver", ["otel", "webhook"])
def test_an_unresponsive_receiver_delays_the_pod_by_a_limit(
    receiver: str,
    collector: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It delays the end of the pod by a limit, and leaves no thread that keeps the process."""
    monkeypatch.setattr(time_limits, "NOTIFIERS_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr("firstfault_torch.notifiers.OTEL_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr("firstfault_torch.notifiers.WEBHOOK_TIMEOUT_SECONDS", 60.0)
    if receiver == "webhook":
        monkeypatch.delenv(BASE)
        monkeypatch.setenv(WEBHOOK_VARIABLE, f"{collector.url}/a-secret")
    collector.may_answer.clear()
    before = set(threading.enumerate())
    began = time.monotonic()
    notify(SCOPE_SCENES["rank"]())
    assert time.monotonic() - began < 30
    assert f"the notifier {receiver} didn't return" in caplog.text
    assert "a-secret" not in caplog.text
    ours = {
        thread
        for thread in set(threading.enumerate()) - before
        if "process_request" not in thread.name
    }
    assert all(thread.daemon for thread in ours)


def test_a_healthy_training_imports_no_opentelemetry(collector: Receiver) -> None:
    """The agent's modules load without OpenTelemetry, and start no thread,
    also if an endpoint is configured.
    """
    code = """if True:
        import sys, threading
        import firstfault_torch.run, firstfault_torch.notifiers
        assert threading.active_count() == 1
        print([name for name in sys.modules if name.startswith('opentelemetry')])
    """
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ran.stdout.strip() == "[]"
