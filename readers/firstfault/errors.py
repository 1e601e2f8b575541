"""What firstfault raises: one base, each error with a stable slug and an exit code."""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AccessDeniedError",
    "BadDocumentError",
    "FirstFaultError",
    "ObjectNotFoundError",
    "ObjectTooLargeError",
    "RecorderUnavailableError",
    "SignatureError",
    "StoreError",
    "StoreUnavailableError",
    "StrategyError",
    "UnknownStrategyError",
    "UsageError",
]


class FirstFaultError(Exception):
    """Base of every error that firstfault raises on purpose. Its text is one line that says what to do."""

    slug: ClassVar[str] = "error"
    """Stable identifier, documented in docs/errors.md."""
    exit_code: ClassVar[int] = 1
    """What the command line exits with."""


class UsageError(FirstFaultError, ValueError):
    """The caller asked for something that cannot be: a bad number, a wrong type, a task that is not there."""

    slug = "usage"
    exit_code = 2


class StrategyError(FirstFaultError, ValueError):
    """A strategy could not be registered or loaded; the text names it and the distribution it came from."""

    slug = "bad-strategy"


class UnknownStrategyError(UsageError, KeyError):
    """No strategy has this name."""

    slug = "unknown-strategy"

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class SignatureError(UsageError):
    """A file of signatures is not valid; the text names file, line and reason."""

    slug = "bad-signature"


class BadDocumentError(FirstFaultError, ValueError):
    """These bytes are not an error document: empty, truncated, oversized or of another format."""

    slug = "bad-document"


class StoreError(FirstFaultError, OSError):
    """A storage request failed."""

    slug = "store"


class StoreUnavailableError(StoreError):
    """The storage did not answer, or answered with a server error, after retries."""

    slug = "store-unavailable"


class AccessDeniedError(StoreError, PermissionError):
    """The storage refused: missing or wrong credentials, or a missing permission."""

    slug = "access-denied"


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """There is no such object."""

    slug = "not-found"


class ObjectTooLargeError(StoreError):
    """The object is larger than a reader will take into memory."""

    slug = "too-large"


class RecorderUnavailableError(FirstFaultError, ConnectionError):
    """There is no recorder on this node to talk to, or it ended without an answer."""

    slug = "recorder-unavailable"
