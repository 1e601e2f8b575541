"""The loggers of firstfault. A job's log mixes lines of many programs,
so each of these lines has the name.
"""

from __future__ import annotations

import logging


def get_logger(name: str) -> logging.Logger:
    """Return the logger with this name; each of its lines begins with "firstfault: "."""
    logger = logging.getLogger(name)
    logger.addFilter(_named)
    return logger


def _named(record: logging.LogRecord) -> bool:
    record.msg = f"firstfault: {record.msg}"
    return True
