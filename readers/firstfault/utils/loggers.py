"""The loggers of firstfault: its lines stand in a job's log among those of many others, so each has its name."""

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
