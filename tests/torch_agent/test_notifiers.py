"""The node that concludes tells a webhook and installed notifiers, in bounded time and without harm."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from firstfault.report.words import first_line
from firstfault.testing import make_error
from firstfault.wire.documents import encode
from firstfault_torch import run
from firstfault_torch import verdict as verdicts
from firstfault_torch.agent.agent import RoundEnd
from firstfault_torch.agent.reporter import NodeReport
from firstfault_torch.engine import PlainEngine
from firstfault_torch.node.document_writer import document_path, record_error
from firstfault_torch.notifiers.webhook import WEBHOOK_VARIABLE
from firstfault_torch.options import Options
from firstfault_torch.rounds.settlement import Reports, SettledDocument
from firstfault_torch.verdict import notify
from tests.http_receiver import Receiver, receiving
from tests.recordings import concluded, sealed
from tests.reports.scenes import SCOPE_SCENES, URI

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from firstfault.report import Report
    from firstfault_torch.engine import SealedVerdict
    from tests.prefix import Prefix

PATH = "T0/B0/not-for-the-log"
LONG_S = 60.0


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Run a server, and name it in the environment."""
    with receiving() as found:
        found.location = f"/{PATH}/elsewhere"
        monkeypatch.setenv(WEBHOOK_VARIABLE, f"{found.url}/{PATH}")
        yield found


def events_at(webhook: Receiver) -> list[dict[str, Any]]:
    """Return the events that a server was sent."""
    return [json.loads(request.body) for request in webhook.received]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs notifiers by name."""

    def install(**calls: Callable[[Report], object]) -> None:
        points = [SimpleNamespace(name=name, load=lambda call=call: call) for name, call in calls.items()]
        monkeypatch.setattr(verdicts, "entry_points", lambda group: points if group == "firstfault.notifiers" else [])

    return install


def test_a_webhook_gets_the_report_as_an_event(webhook: Receiver) -> None:
    """It is a CloudEvents 1.0 event with the JSON of the report; the same verdict has the same id."""
    report = SCOPE_SCENES["rank"]()
    notify(report)
    notify(report)
    event, again = events_at(webhook)
    types = [request.headers["Content-Type"] for request in webhook.received]
    assert types == ["application/cloudevents+json"] * 2
    assert (event["specversion"], event["type"], event["source"]) == ("1.0", "firstfault.verdict.v1", URI)
    assert event["subject"] == "project-development-a7xk2m9qp4vd8wz3hj6t"
    assert event["data"]["first_line"] == first_line(report.verdict, report.decision)
    assert event["id"] == again["id"]
    notify(SCOPE_SCENES["ranks"]())
    assert events_at(webhook)[2]["id"] != event["id"]


@pytest.mark.parametrize("error", [ValueError("no channel"), SystemExit(3)])
def test_a_notifier_that_fails(
    installed: Callable[..., None], caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """It is a warning, and the others are called."""

    def fails(_: Report) -> None:
        raise error

    seen: list[Report] = []
    installed(broken=fails, whole=seen.append)
    notify(SCOPE_SCENES["rank"]())
    assert len(seen) == 1
    assert f"the notifier broken failed ({type(error).__name__}: {error})" in caplog.text


@pytest.mark.parametrize("status", [500, 302])
@pytest.mark.parametrize(
    "url", ["{url}", "ftp://127.0.0.1/{secret}", "http://127.0.0.1:x/{secret}", "http://[::{secret}"]
)
def test_a_webhook_that_refuses(
    webhook: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, url: str, status: int
) -> None:
    """An error, or a redirect that would lose the event, is one warning without the URL: it may hold a credential."""
    webhook.status = status
    monkeypatch.setenv(WEBHOOK_VARIABLE, url.format(url=f"{webhook.url}/{PATH}", secret=PATH))
    with caplog.at_level(logging.WARNING):
        notify(SCOPE_SCENES["rank"]())
    (record,) = caplog.records
    assert record.getMessage().startswith("the notifier webhook failed (")
    assert PATH not in record.getMessage()


def test_a_server_that_hangs_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
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
    assert record.getMessage().startswith("the notifier webhook failed (")
    assert "not valid" not in record.getMessage()
    assert PATH not in record.getMessage()


def test_a_slow_lookup_of_installed_notifiers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that does not answer delays the end of the pod by a limit, and a warning says what was not called."""
    goes_on = threading.Event()
    monkeypatch.setattr(verdicts, "NOTIFIERS_S", 0.5)
    monkeypatch.setattr(verdicts, "entry_points", lambda group: [] if goes_on.wait(LONG_S) else [group])
    began = time.monotonic()
    notify(SCOPE_SCENES["rank"]())
    assert time.monotonic() - began < LONG_S / 2
    goes_on.set()
    assert "installed notifiers are not called: they were not found within 0.5 s" in caplog.text


def _reported(prefix: Prefix, end: RoundEnd) -> SealedVerdict | None:
    """Return the verdict on a failed round, after it was published and reported."""
    engine = PlainEngine(str(prefix.folder.parent), 0, f"worker-{end.group_rank}")
    sealed = run.verdict_on(end, run.Pod(engine, Options(settle_seconds=0.1), threading.Event()))
    run._report(sealed, engine)
    return sealed


def test_the_node_that_concludes_notifies(prefix: Prefix, webhook: Receiver) -> None:
    """When the event arrives, the verdict is in the storage, and no other node waits for it."""
    own = make_error(0, node="worker-0", message="no labels")
    receipt = record_error(own, prefix.recording(), None, 30)
    report = NodeReport({document_path(receipt.name): encode(own)})
    settled: list[bool] = []

    def hand_over(document: bytes, *, durable: bool, bundle: bytes) -> SettledDocument:
        assert not bundle, "all nodes see the storage"
        settled.append(durable)
        assert not webhook.received
        return SettledDocument(document, durable=durable)

    peers = Mock()
    peers.settle.return_value = [Reports(report.copies)]
    peers.settlement.hand_over = hand_over
    assert _reported(prefix, RoundEnd(prefix.recording(), report, peers=peers)) is not None
    assert settled == [True]
    (event,) = events_at(webhook)
    assert event["data"]["root"]["message"] == "no labels"


def test_a_node_that_took_a_verdict_does_not(prefix: Prefix, webhook: Receiver) -> None:
    """Each verdict is told by the node that reached it."""
    own = make_error(0, node="worker-0", message="no labels")
    conclusion = concluded(prefix.recording(), [own])
    document = sealed(conclusion, prefix.recording()).document
    peers = Mock()
    peers.settle.return_value = [SettledDocument(document, durable=True)]
    assert _reported(prefix, RoundEnd(prefix.recording(), NodeReport(), group_rank=1, peers=peers)) is not None
    assert not webhook.received
