"""Exit codes that carry the decision on a failed job to its scheduler: ``--ff-exit-codes``.

All nodes agree on one verdict, so all exit with the same code, also those that were only stopped.
"""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError
from collections.abc import Mapping
from typing import TYPE_CHECKING

from firstfault.decision_mode import ACT, OBSERVE, OFF, read_decision_mode
from firstfault.model.job import Action

if TYPE_CHECKING:
    from firstfault_torch.engine import Publication

CODES_VARIABLE = "FIRSTFAULT_EXIT_CODES"
FAILED = 1
"""torchrun's own exit code."""
PRESETS = {
    "default": "retry:75,system:79,stop:93",
    # Kubeflow's PyTorchJob with restartPolicy ExitCode restarts a pod after codes from 128 on, and
    # never counts that: backoffLimit adds up restarts of containers, and the operator replaces
    # pods. So a failure of unknown cause, which may come again each time, keeps torchrun's 1: the
    # job fails, as without firstfault.
    "pytorchjob": "retry:203,system:207,stop:93",
}
_CODE_LIST = re.compile(r"(?:(?:retry|system|stop|unknown):\d{1,3}(?:,(?!$)|$))+")
_MAX_CODE = 255


def parse_exit_codes(text: str) -> dict[Action, int]:
    """Return the exit code of each action in a list like "retry:75,system:79,stop:93",
    or in a preset of that name.

    Raises:
        ArgumentTypeError: it is neither, or has a code that isn't from 1 to 255.
    """
    code_list = PRESETS.get(text, text)
    is_valid = _CODE_LIST.fullmatch(code_list) is not None
    pairs = [item.split(":") for item in code_list.split(",")] if is_valid else []
    codes = {Action(name): int(code) for name, code in pairs}
    if not codes or not all(0 < code <= _MAX_CODE for code in codes.values()):
        presets = ", ".join(PRESETS)
        raise ArgumentTypeError(
            f"must be {presets}, or codes from 1 to 255 as in {PRESETS['default']}, not {text!r}"
        )
    return codes


def choose_exit_code(
    publication: Publication | None, engine_codes: Mapping[Action, int]
) -> tuple[int, str]:
    """Return the exit code of a failed job, and in the mode "observe" a sentence about what
    "act" would have done.

    `engine_codes`: the engine's codes. Its scheduler understands only these, so they override the
    user's, who may have set these for all jobs of an image.
    """
    given = os.environ.get(CODES_VARIABLE, "")
    mode = read_decision_mode()
    codes = {**(parse_exit_codes(given) if given else {}), **engine_codes}
    if not codes or mode == OFF:
        return FAILED, ""
    if publication is None:  # firstfault itself has failed, and so knows nothing
        return (codes.get(Action.UNKNOWN, FAILED) if mode == ACT else FAILED), ""
    decision = publication.sealed.decision
    code = codes.get(decision.action, FAILED)
    attempt = publication.node_context.identity.attempt
    sentence = (
        f"would have exited with {code} ({decision.action.value}) after attempt {attempt}:"
        f" {decision.reason}"
    )
    # A line about a decision that changes nothing would only be noise.
    return (FAILED, sentence if code != FAILED else "") if mode == OBSERVE else (code, "")
