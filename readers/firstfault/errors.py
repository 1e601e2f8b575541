"""The errors that firstfault raises, each with a stable slug and an exit code."""

from __future__ import annotations

from typing import ClassVar


class FirstFaultError(Exception):
    """Base class of all errors of firstfault. The message is one line that ends with what to do."""

    slug: ClassVar[str] = "error"
    """Stable identifier, documented in docs/reference/categories.md."""
    exit_code: ClassVar[int] = 1
    """Exit code of the command line."""


class UsageError(FirstFaultError, ValueError):
    """An argument is invalid: a number out of range, a wrong type, a task that doesn't exist."""

    slug = "usage"
    exit_code = 2


class StrategyError(FirstFaultError, ValueError):
    """A strategy could not be registered or loaded;
    the text names it and the distribution it came from.
    """

    slug = "bad-strategy"


class UnknownStrategyError(UsageError, KeyError):
    """No strategy has this name."""

    slug = "unknown-strategy"

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class SignatureError(UsageError):
    """A file of signatures isn't valid; the text names file, line and reason."""

    slug = "bad-signature"


class BadDocumentError(FirstFaultError, ValueError):
    """These bytes aren't an error document: empty, truncated, oversized or of another format."""

    slug = "bad-document"


class StoreError(FirstFaultError, OSError):
    """A storage request failed."""

    slug = "store"


class StoreUnavailableError(StoreError):
    """The storage didn't answer, or answered with a server error, after retries."""

    slug = "store-unavailable"


class AccessDeniedError(StoreError, PermissionError):
    """The storage refused: missing or wrong credentials, or a missing permission."""

    slug = "access-denied"


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """The object doesn't exist."""

    slug = "not-found"


class ObjectTooLargeError(StoreError):
    """The object is larger than the reader's limit."""

    slug = "too-large"


class RecorderUnavailableError(FirstFaultError, ConnectionError):
    """No recorder is running on this node, or it ended without an answer."""

    slug = "recorder-unavailable"
