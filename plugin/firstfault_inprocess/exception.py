"""Exceptions of in-process restart."""

from __future__ import annotations

from firstfault_torch.guard import try_call

_MAX_LINE_CHARACTERS = 300
"""Characters of a line about an exception."""


class RestartError(Exception):
    """Base class of the errors that in-process restart raises."""


class RestartAbort(BaseException):
    """Ends the wrapped call on this rank. A hook raises it to give up;
    a limit does so on all ranks alike.
    """


class HealthCheckError(RestartError):
    """A health check of this rank failed. The rank leaves the job;
    its cause is the check's exception.
    """


class RankLost(RestartError):  # noqa: N818 - like RankDiscarded
    """The remaining ranks gave this one up after it missed its heartbeats,
    and continued without it.
    """


class InternalError(RestartError):
    """In-process restart met a state that its own rules exclude."""


class TimeoutError(RestartError):  # noqa: A001 - the name is part of the shared vocabulary
    """A bounded step, such as a health check or a barrier, didn't end in time."""


class RankShouldRestart(BaseException):
    """Interrupts the wrapped function in the main thread,
    because a rank failed and all ranks restart.

    It isn't an `Exception`, so that ``except Exception`` in the function doesn't catch it.
    """


def one_line(error: BaseException) -> str:
    """Return the type and the first line of `error`, shortened; its text is the user's code,
    and may raise.
    """
    text = try_call(lambda: str(error).partition("\n")[0])[0]
    text = "<no text>" if text is None else text
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__)[
        :_MAX_LINE_CHARACTERS
    ]


def check_limit(name: str, value: int | None, least: int) -> None:
    """Raise a ValueError if a limit is below `least`; None means no limit."""
    if value is not None and value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
