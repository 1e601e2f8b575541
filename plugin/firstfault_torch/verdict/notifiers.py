"""Tells others about a verdict when it has been published: a webhook, OpenTelemetry, and notifiers of other packages.

A notifier is a callable with one argument, the `firstfault.report.Report`, in the entry-point group
``firstfault.notifiers``. The node that concludes calls each once, after the verdict is in the storage.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
import uuid
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from firstfault.render.json_report import json_report
from firstfault_torch.guard import bounded, caught, guarded, logger
from firstfault_torch.verdict.otel import is_wanted, send_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from firstfault.report import Report

__all__ = ["GROUP", "WEBHOOK_VARIABLE", "event_of", "notify"]

GROUP = "firstfault.notifiers"
"""The entry-point group of notifiers."""
WEBHOOK_VARIABLE = "FIRSTFAULT_WEBHOOK"
"""The environment variable with the URL to which each verdict is sent, as a CloudEvents 1.0 event."""
_LONGEST_S = 3.0
"""All notifiers together; one that takes longer goes on in its thread until the process ends."""
_TEXT = 100_000
"""Characters of a message that are sent."""


def notify(report: Report) -> None:
    """Call all notifiers at the same time; wait for them at most 3 s. A notifier that fails is a warning."""
    deadline = time.monotonic() + _LONGEST_S
    begun = [_begun(name, partial(call, report)) for name, call in _built_in()]
    # the lookup reads the metadata of every installed package, from a disk that may be slow
    found = bounded(lambda: list(entry_points(group=GROUP)), _LONGEST_S, "looking for installed notifiers")
    if found is None:
        logger.warning("installed notifiers are not called: they were not found within %g s", _LONGEST_S)
    begun += [_begun(point.name, partial(_loaded, point, report)) for point in found or ()]
    for name, ended in begun:
        if not ended.wait(max(deadline - time.monotonic(), 0)):
            logger.warning("the notifier %s has not ended within %g s; it is not waited for", name, _LONGEST_S)


def _built_in() -> Iterator[tuple[str, Callable[[Report], object]]]:
    if os.environ.get(WEBHOOK_VARIABLE):
        yield "webhook", partial(_post, os.environ[WEBHOOK_VARIABLE])
    if is_wanted():
        yield "otel", partial(send_record, seconds=_LONGEST_S)


def _begun(name: str, call: Callable[[], object]) -> tuple[str, threading.Event]:
    """Begin a call in a thread of its own; return its name, and what is set when it has ended or could not begin."""
    ended = threading.Event()
    with guarded(f"starting the notifier {name}"):
        threading.Thread(target=_run, args=(name, call, ended), name="firstfault-notify", daemon=True).start()
        return name, ended
    ended.set()
    return name, ended


def _run(name: str, call: Callable[[], object], ended: threading.Event) -> None:
    _, error = caught(call)
    if error is not None:
        logger.warning("the notifier %s failed (%s: %s)", name, type(error).__name__, error)
    ended.set()


def _loaded(found: Any, report: Report) -> None:
    found.load()(report)


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


def _post(url: str, report: Report) -> None:
    """Send a report's event.

    Raises:
        ValueError: the URL is not http:// or https://.
        OSError: there was no answer, or it was an error. The text has no part of the URL, which may hold a credential.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{WEBHOOK_VARIABLE} must begin with http:// or https://")
    body = json.dumps(event_of(report)).encode()
    headers = {"Content-Type": "application/cloudevents+json", "User-Agent": "firstfault"}
    try:
        request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310 - the scheme was checked
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=_LONGEST_S) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        error.close()
        raise
    except (ValueError, http.client.InvalidURL):
        raise OSError(f"the URL in {WEBHOOK_VARIABLE} is not valid") from None
    except http.client.HTTPException as error:
        raise OSError(f"there was no valid answer of HTTP ({type(error).__name__})") from None
