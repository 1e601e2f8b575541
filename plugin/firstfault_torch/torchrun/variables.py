"""All documented variables of a job, each with the check of its value:
for ``firstfault doctor``, and for the start of a job. docs/reference/options.md lists the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from firstfault.credentials.custom_rules import (
    REDACT_VARIABLE,
    compile_rules,
    warn_of_invalid_rules,
)
from firstfault.decision_mode import DECISIONS_VARIABLE, find_mode_problem, read_decision_mode
from firstfault.store import CLIENT_VARIABLE, find_client_problem
from firstfault.strategies import list_strategy_names
from firstfault_start import OFF, ON
from firstfault_start import VARIABLE as SWITCH
from firstfault_torch.guard import logger, try_call
from firstfault_torch.torchrun.settings import list_variables

_ADDRESS = re.compile(r".+:\d{1,5}")


def _accept(_text: str) -> str:
    return ""


def _check_switch(text: str) -> str:
    is_valid = text.strip().lower() in ON + OFF
    return "" if is_valid else f"must be one of {', '.join(ON + OFF)}, not {text!r}"


def _check_flag(text: str) -> str:
    return "" if text in {"0", "1"} else f"must be 1 or 0, not {text!r}"


def _check_rules(text: str) -> str:
    return "; ".join(compile_rules(text)[1])


def _check_url(text: str) -> str:
    """Check an address; the problem doesn't quote it, because it may hold a credential."""
    parts, _ = try_call(partial(urlsplit, text), ValueError)
    is_valid = parts is not None and parts.scheme in {"http", "https"} and parts.hostname
    return "" if is_valid else "must be an address with a host, as in https://host/path"


def _check_file(text: str) -> str:
    path = Path(text)
    place = path if path.exists() else path.parent
    is_valid = not path.is_dir() and os.access(place, os.W_OK)
    return "" if is_valid else f"must be a file that can be written, not {text!r}"


def _check_address(text: str) -> str:
    return "" if _ADDRESS.fullmatch(text) else f"must be a host and a port, not {text!r}"


def _check_strategy(text: str) -> str:
    names = list_strategy_names()
    return "" if text in names else f"must be one of {', '.join(names)}, not {text!r}"


VARIABLES: Mapping[str, Callable[[str], str]] = {
    SWITCH: _check_switch,
    **list_variables(),
    DECISIONS_VARIABLE: find_mode_problem,
    "FIRSTFAULT_NAMESPACE": _accept,
    "FIRSTFAULT_TERMINATION_LOG": _check_file,
    "FIRSTFAULT_PREVIOUS": _accept,  # firstfault sets it
    "FLYTE_INTERNAL_ERROR_PROPAGATION": _check_strategy,
    "FIRSTFAULT_WEBHOOK": _check_url,
    "FIRSTFAULT_NOTIFY_STALLS": _check_flag,
    REDACT_VARIABLE: _check_rules,
    "FIRSTFAULT_SOURCE": _check_url,
    CLIENT_VARIABLE: find_client_problem,
    "FIRSTFAULT_TIME_LIMIT_FILE": _accept,  # a launcher may make it only before SIGTERM
    "FIRSTFAULT_DEBUG": _accept,
    "NODE_NAME": _accept,
    "NCCL_RAS_ADDR": _check_address,
    "OTEL_EXPORTER_OTLP_ENDPOINT": _accept,  # it may be for another exporter than ours
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": _accept,
    "TORCHELASTIC_ERROR_FILE": _accept,
    "NO_COLOR": _accept,
    "FORCE_COLOR": _accept,
}
"""The check of each variable. It returns what is wrong with a nonempty value, as a clause to print,
or "" if the value is valid.
"""
_SELF_EXPLAINED = (DECISIONS_VARIABLE, REDACT_VARIABLE)
"""Their problems are whole sentences, which also name the effect. They are never removed: without
its variable, firstfault would act, and the valid rules still hide what they match.
"""


def find_problems() -> dict[str, str]:
    """Return what is wrong with the variables of this process, by variable, as a sentence."""
    problems = {}
    for variable, problem in _find_clauses().items():
        is_explained = variable in _SELF_EXPLAINED
        problems[variable] = (
            problem if is_explained else f"{variable} {problem}: the value is ignored"
        )
    return problems


def drop_invalid() -> None:
    """Remove each variable of firstfault's with an invalid value, and warn:
    a training isn't refused because of it.
    """
    read_decision_mode()
    warn_of_invalid_rules()
    for variable, problem in _find_clauses().items():
        if variable.startswith(SWITCH) and variable not in _SELF_EXPLAINED:
            logger.warning("ignoring %s: it %s", variable, problem)
            del os.environ[variable]


def _find_clauses() -> dict[str, str]:
    given = {name: text for name in VARIABLES if (text := os.environ.get(name))}
    problems = {name: VARIABLES[name](text) for name, text in given.items()}
    return {name: problem for name, problem in problems.items() if problem}
