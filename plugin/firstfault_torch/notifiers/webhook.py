"""Posts a verdict to a webhook, as a CloudEvents 1.0 event."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
import uuid
from typing import TYPE_CHECKING, Any

from firstfault.render.plain import json_report
from firstfault_torch.budgets import WEBHOOK_S

if TYPE_CHECKING:
    from firstfault.report import Report

WEBHOOK_VARIABLE = "FIRSTFAULT_WEBHOOK"
"""The environment variable with the URL to which each verdict is sent."""
_TEXT = 100_000
"""Characters of a message that are sent."""


def event_of(report: Report) -> dict[str, Any]:
    """Return the CloudEvents 1.0 event of a report; its data is that of ``firstfault show --json``."""
    data = json.loads(json_report(report, _TEXT))
    return {
        "specversion": "1.0",
        # the same verdict on the same attempt is the same event, also if two nodes concluded
        "id": uuid.uuid5(uuid.NAMESPACE_URL, f"{report.uri}#{report.verdict.digest}").hex,
        "source": report.uri or "firstfault",
        "type": "firstfault.verdict.v1",
        "subject": data["execution"] or report.verdict.node or "unknown",
        "datacontenttype": "application/json",
        "data": data,
    }


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for a refusal: urllib would follow it without the event."""

    def redirect_request(self, *_: Any) -> None:
        """Follow nothing."""


def post(report: Report) -> None:
    """Send a report's event to the URL that the environment names; do nothing if it names none.

    Raises:
        ValueError: the URL is not http:// or https://.
        OSError: there was no answer, or it was an error. The text has no part of the URL, which may hold a credential.
    """
    url = os.environ.get(WEBHOOK_VARIABLE)
    if not url:
        return
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{WEBHOOK_VARIABLE} must begin with http:// or https://")
    body = json.dumps(event_of(report)).encode()
    headers = {"Content-Type": "application/cloudevents+json", "User-Agent": "firstfault"}
    try:
        request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310 - the scheme was checked
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=WEBHOOK_S) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        error.close()
        raise
    except (ValueError, http.client.InvalidURL):
        raise OSError(f"the URL in {WEBHOOK_VARIABLE} is not valid") from None
    except http.client.HTTPException as error:
        raise OSError(f"there was no valid answer of HTTP ({type(error).__name__})") from None
