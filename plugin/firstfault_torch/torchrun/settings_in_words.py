"""What the variables of a job under torchrun mean, in words: for ``firstfault doctor``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from firstfault.decision_mode import DECISIONS_VARIABLE, read_decision_mode
from firstfault_torch.options import DEFAULT_HANG, PORT_VARIABLE, parse_hang
from firstfault_torch.torchrun.exit_codes import CODES_VARIABLE, parse_exit_codes
from firstfault_torch.torchrun.settings import HANG_VARIABLE
from firstfault_torch.torchrun.variables import VARIABLES, find_problems


def describe_settings() -> Iterator[tuple[bool, str, str]]:
    """Yield whether a variable is valid, its name for a row ("exit codes"),
    and what it means or what is wrong.
    """
    problems = find_problems()
    for variable, describe in _DESCRIPTIONS.items():
        if variable not in problems:
            yield True, _name_row(variable), describe(os.environ.get(variable, ""))
    for variable, problem in problems.items():
        yield False, _name_row(variable), problem


def list_rows() -> set[str]:
    """Return the names of the rows about variables."""
    return set(map(_name_row, VARIABLES))


def _name_row(variable: str) -> str:
    return variable.removeprefix("FIRSTFAULT_").lower().replace("_", " ")


def _describe_exit_codes(text: str) -> str:
    if not text:
        return f"1 after any failure ({CODES_VARIABLE} is not set)"
    codes = ", ".join(f"{code} ({action.value})" for action, code in parse_exit_codes(text).items())
    return f"{codes}, else 1 ({CODES_VARIABLE}={text})"


def _describe_hang(text: str) -> str:
    hang = parse_hang(text or DEFAULT_HANG)
    source = f"{HANG_VARIABLE}={text}" if text else f"{HANG_VARIABLE} is not set"
    effects = []
    if hang is not None and hang.warn_seconds is not None:
        effects.append(f"reported after {hang.warn_seconds:g} s")
    if hang is not None and hang.end_seconds is not None:
        effects.append(f"ended after {hang.end_seconds:g} s")
    effect = (
        f"a job without progress is {' and '.join(effects)}"
        if effects
        else "stalls aren't reported"
    )
    return f"{effect} ({source})"


def _describe_port(text: str) -> str:
    return (
        f"{text}: the first node's agent listens on it"
        if text
        else f"a free one ({PORT_VARIABLE} is not set)"
    )


_DESCRIPTIONS: dict[str, Callable[[str], str]] = {
    DECISIONS_VARIABLE: lambda _: f"mode {read_decision_mode()}",
    CODES_VARIABLE: _describe_exit_codes,
    HANG_VARIABLE: _describe_hang,
    PORT_VARIABLE: _describe_port,
}
"""How to put a valid value into words; the text is empty if the variable isn't set."""
