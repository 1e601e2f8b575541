"""The notifiers of firstfault: `post` for a webhook,
`send_record` for OpenTelemetry. Entry points name them.

Each does nothing unless its environment variables name a receiver. As `on_stall` it is given a
stall's data instead.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from typing import Any

from firstfault.exceptions.exceptions_in_text import format_exception
from firstfault.render.json_report import json_report
from firstfault.report import Report
from firstfault.utils.text import elide
from firstfault_torch.time_limits import OTEL_TIMEOUT_SECONDS, WEBHOOK_TIMEOUT_SECONDS

Stall = Mapping[str, Any]
"""What `docs/guides/teams.md` promises about a stall."""
_TEXT = 100_000
"""Characters of a message or a traceback that are sent."""

# --- a webhook, which gets a CloudEvents 1.0 event ------------------------------------------------

WEBHOOK_VARIABLE = "FIRSTFAULT_WEBHOOK"
"""The environment variable with the URL to which each verdict is sent."""


def build_event(about: Report | Stall) -> dict[str, Any]:
    """Return the CloudEvents 1.0 event of a report, with the data of ``firstfault show --json``,
    or of a stall.
    """
    if isinstance(about, Report):
        data = json.loads(json_report(about, _TEXT))
        kind = "verdict"
        mark = about.verdict.digest
        subject = data["execution"] or about.verdict.node
    else:
        data, kind, subject = about, "stall", about["node"]
        mark = f"stall {about['number']} {'began' if about['lost_seconds'] is None else 'ended'}"
    return {
        "specversion": "1.0",
        # the same verdict on the same attempt is the same event, also if two nodes concluded
        "id": uuid.uuid5(uuid.NAMESPACE_URL, f"{data['uri'] or ''}#{mark}").hex,
        "source": data["uri"] or "firstfault",
        "type": f"firstfault.{kind}.v1",
        "subject": subject or "unknown",
        "datacontenttype": "application/json",
        "data": data,
    }


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for a refusal: urllib would follow it without the event."""

    def redirect_request(self, *_: Any) -> None:
        """Follow nothing."""


def post(about: Report | Stall) -> None:
    """Send the event of a report or a stall to the URL that the environment names;
    do nothing if it names none.

    Raises:
        ValueError: the URL isn't http:// or https://.
        OSError: there was no answer, or it was an error. The text has no part of the URL, which may
            hold a credential.
    """
    url = os.environ.get(WEBHOOK_VARIABLE)
    if not url:
        return
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{WEBHOOK_VARIABLE} must begin with http:// or https://")
    body = json.dumps(build_event(about)).encode()
    headers = {"Content-Type": "application/cloudevents+json", "User-Agent": "firstfault"}
    try:
        # the scheme was checked
        request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310
        with urllib.request.build_opener(_NoRedirect).open(
            request, timeout=WEBHOOK_TIMEOUT_SECONDS
        ) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        error.close()
        raise
    except (ValueError, http.client.InvalidURL):
        raise OSError(f"the URL in {WEBHOOK_VARIABLE} is not valid") from None
    except http.client.HTTPException as error:
        raise OSError(f"no valid HTTP response ({type(error).__name__})") from None


post.on_stall = post  # type: ignore[attr-defined]

# --- OpenTelemetry: one log record, sent with the exporter that the extra `otel` brings -----------

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_NAME = "firstfault"


def send_record(about: Report | Stall) -> None:
    """Send the record of a report or a stall; do nothing without an endpoint or
    without the extra ``otel``.

    It uses a separate exporter: the providers of the process stay as they are.

    Raises:
        ValueError: the variables ask for gRPC.
        OSError: the endpoint didn't take the record.
    """
    off = (
        os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or os.environ.get("OTEL_LOGS_EXPORTER") == "none"
    )
    if off or not any(map(os.environ.get, _ENDPOINTS)):
        return
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "")
    try:
        from opentelemetry._logs import (  # noqa: PLC0415
            LogRecord,
            SeverityNumber,
        )
        from opentelemetry.exporter.otlp.proto.http._log_exporter import (  # noqa: PLC0415 - only a failure needs it
            OTLPLogExporter,
        )
        from opentelemetry.sdk._logs import ReadableLogRecord  # noqa: PLC0415
        from opentelemetry.sdk._logs.export import LogRecordExportResult  # noqa: PLC0415
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415
    except ModuleNotFoundError:
        return
    if protocol == "grpc":
        raise ValueError(
            f"firstfault sends http/protobuf, not grpc; set {_PROTOCOLS[0]}=http/protobuf, and"
            f" {_ENDPOINTS[0]} to the collector's URL for HTTP, such as"
            " http://collector:4318/v1/logs"
        )
    if isinstance(about, Report):
        data = json.loads(json_report(about, _TEXT))
        kind = "verdict"
        severity = "ERROR"
        attributes = build_attributes(about, data)
        at_ns = about.verdict.timestamp_ns
    else:
        data, kind, severity, at_ns = about, "stall", "WARN", None
        names = {"rank": "rank", "pod": "node", "uri": "uri", "lost_seconds": "lost_seconds"}
        attributes = {
            f"firstfault.{name}": data[of]
            for name, of in names.items()
            if data[of] not in {None, ""}
        }
    record = LogRecord(
        timestamp=at_ns,
        observed_timestamp=time.time_ns(),
        severity_number=SeverityNumber[severity],
        severity_text=severity,
        body=data["first_line"],
        attributes=attributes,
        event_name=f"{_NAME}.{kind}",
    )
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    resource = Resource({"service.name": _NAME}).merge(OTELResourceDetector().detect())
    exporter = OTLPLogExporter(timeout=OTEL_TIMEOUT_SECONDS)
    sent = exporter.export([ReadableLogRecord(record, resource, InstrumentationScope(_NAME))])
    if sent is not LogRecordExportResult.SUCCESS:
        raise OSError("the OTLP endpoint rejected the record")


send_record.on_stall = send_record  # type: ignore[attr-defined]


def build_attributes(report: Report, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record's attributes, without those that aren't known.

    Args:
        report: on the verdict.
        data: its JSON.
    """
    verdict = report.verdict
    root = data["root"] or {}
    exception = ""
    if report.verdict.root is not None and report.verdict.root.exception is not None:
        exception = elide(format_exception(report.verdict.root.exception), _TEXT)
    found = {
        "exception.type": root.get("type"),
        "exception.message": root.get("message"),
        "exception.stacktrace": exception,
        # of the process that failed; the resource is the process that sends
        "k8s.pod.name": root.get("pod"),
        "k8s.namespace.name": verdict.root.place.namespace if verdict.root is not None else None,
        "k8s.node.name": root.get("machine") if root.get("pod") else None,
        "host.name": root.get("machine") or root.get("host"),
        "firstfault.outcome": data["outcome"],
        "firstfault.category": verdict.category,
        "firstfault.code": verdict.code,
        "firstfault.scope": verdict.scope.value,
        "firstfault.confidence": verdict.confidence,
        "firstfault.rank": root.get("rank"),
        "firstfault.pod": root.get("pod") or verdict.node,
        "firstfault.machine": root.get("machine"),
        "firstfault.gpu": root.get("gpu"),
        "firstfault.action": report.decision.action.value,
        "firstfault.retry": report.decision.retry,
        "firstfault.fingerprint": verdict.fingerprint,
        "firstfault.digest": verdict.digest,
        "firstfault.attempt": data["attempt"],
        "firstfault.execution": data["execution"],
        "firstfault.uri": data["uri"],
    }
    return {name: value for name, value in found.items() if value not in {None, ""}}
