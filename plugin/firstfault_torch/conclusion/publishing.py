"""Publishes a verdict: the first one on a failure counts for all nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from firstfault.errors import BadDocumentError
from firstfault_torch import time_limits
from firstfault_torch.conclusion.sealed_verdict import OtherVersionError, adopt_sealed_verdict
from firstfault_torch.engine import Engine, Publication
from firstfault_torch.guard import call_with_timeout, logger, try_call
from firstfault_torch.node_context import NodeContext

_NS_PER_MS = 1_000_000
_MAX_VERDICT_AGE_NS = 120 * 1_000_000_000
"""A verdict sealed this long before a node failed is about another failure. Clocks may differ."""


def publish_or_adopt(
    publication: Publication,
    engine: Engine,
    publish: Callable[[Publication], Publication],
    shutdown_requested: threading.Event | None = None,
) -> Publication:
    """Publish a verdict unless another node has published one on this failure; then adopt that one:
    the result has no `own` conclusion.

    `publish` is the engine's, with its options.
    """
    published = publish(publication)
    if published.durable:
        return published
    # Refused, or without an answer: then it may have landed, or another node's may be there.
    node_context = publication.node_context
    look = partial(find_published_verdict, node_context, engine)
    found_or_error = call_with_timeout(
        partial(try_call, look, Exception),
        time_limits.VERDICT_READ_TIMEOUT_SECONDS,
        "looking for another node's verdict",
        shutdown_requested,
    )
    found, error = found_or_error or (None, TimeoutError())
    if error is not None:
        # Whatever is there stays: it may be on this failure.
        logger.debug("no verdict of another node can be read: %r", error)
        return published
    if found is None:
        # Nothing is there, or something on another failure that had the same folder.
        return publish(replace(published, replaces=True)) if published.is_refused else published
    if found.sealed.document == published.sealed.document:
        return replace(published, durable=True, is_refused=False)
    logger.info("another node has published a verdict first")
    return publish(found)


def find_published_verdict(node_context: NodeContext, engine: Engine) -> Publication | None:
    """Return the verdict that another node published on this failure. Return None if there is none,
    or only an older verdict or another error.

    Raises:
        OtherVersionError: there is one that this version can't read.
        firstfault.errors.StoreError: the storage can't be read.
    """
    document = engine.published_verdict()
    if document is None:
        return None
    try:
        found = adopt_sealed_verdict(document, node_context, durable=True)
    except OtherVersionError:
        raise
    except BadDocumentError:  # such as an error of Flyte's own
        return None
    # Sealed before this agent started, or long before its failure: then it is about another
    # failure.
    earliest_ns = max(node_context.incarnation * _NS_PER_MS, time.time_ns() - _MAX_VERDICT_AGE_NS)
    return found if found.sealed.seal.timestamp_ns >= earliest_ns else None
