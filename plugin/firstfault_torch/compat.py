"""Logging a failure without importing a compiler.

torch's log formatter imports ``torch._dynamo`` to format an exception: one second and more, in an agent that has just
lost a worker and has pods waiting for it.
"""

from __future__ import annotations

import logging

__all__ = ["format_exceptions_early"]

_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.multiprocessing.api",
)
_formatter = logging.Formatter()


def format_exceptions_early() -> None:
    """Let torch elastic's own loggers format tracebacks as the standard library does; the text is the same."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_formatted)


def _formatted(record: logging.LogRecord) -> bool:
    if record.exc_info and not record.exc_text:
        record.exc_text = _formatter.formatException(record.exc_info)
        record.exc_info = None
    return True
