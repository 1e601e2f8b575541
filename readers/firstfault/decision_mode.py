"""Whether firstfault acts on its decisions: ``FIRSTFAULT_DECISIONS``,
read here for every engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from firstfault.utils.loggers import get_logger

logger = get_logger(__name__)

DECISION_MODES, DECISIONS_VARIABLE = ("off", "observe", "act"), "FIRSTFAULT_DECISIONS"
"""Whether firstfault acts on a decision, for example by an exit code. In the mode "observe" it only
prints what it would do.
"""
ACT, OBSERVE, OFF = "act", "observe", "off"
_warned: set[str] = set()
"""Invalid values that this process has warned about: several places read the mode,
some of them repeatedly.
"""


def find_mode_problem(text: str) -> str:
    """Return what is wrong with a value of `DECISIONS_VARIABLE`, as a sentence for a person, or an
    empty string if the value is valid.
    """
    if not text.strip() or text.strip().lower() in DECISION_MODES:
        return ""
    modes = f"{', '.join(DECISION_MODES[:-1])} or {DECISION_MODES[-1]}"
    return f"{DECISIONS_VARIABLE} must be {modes}, not {text!r}: decisions are only observed"


def read_decision_mode(environment: Mapping[str, str] = os.environ) -> str:
    """Return the user's choice of `DECISION_MODES`: "act" if there is none,
    "observe" if it is invalid.

    Somebody who has misspelled the value wanted something else than the default, and "observe"
    changes nothing. An invalid value gives one warning per process.
    """
    text = environment.get(DECISIONS_VARIABLE, "")
    if not text.strip():
        return ACT
    if problem := find_mode_problem(text):
        if text not in _warned:
            _warned.add(text)
            logger.warning("%s", problem)
        return OBSERVE
    return text.strip().lower()
