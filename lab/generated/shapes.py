"""Pieces of source from which a training is composed: loops, wrappers, communication, handlers,
clean-ups, decoys.
"""

from pathlib import Path
from typing import Any

from firstfault.utils.toml import parse_toml

_SHAPES: dict[str, Any] = parse_toml(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
HEAD, COMMON, TURN = (str(_SHAPES[name]) for name in ("head", "common", "turn"))
PLACES_OF: dict[str, list[str]] = _SHAPES["places"]
"""Where a fault may be met besides a step, by loop."""
LOOPS: dict[str, str] = _SHAPES["loops"]
WRAPPERS: dict[str, str] = _SHAPES["wrappers"]
TRIED_STEPS = {"retried-steps": LOOPS["retried-steps"], **_SHAPES["retried-loops"]}
"""Loops that try a step again."""
TRIED_TRAININGS = {
    **{name: WRAPPERS[name] for name in ("retried", "retried-anew")},
    **_SHAPES["retried-wrappers"],
}
"""What tries the training again."""
HANDLED_STEPS: dict[str, str] = _SHAPES["handled-loops"]
"""Loops that handle a step's exception and continue, out of step with their peers."""
COMMUNICATIONS = {
    name: text if "def prepare" in text else f"def prepare():\n    pass\n\n\n{text}"
    for name, text in _SHAPES["communications"].items()
}
HANDLERS: dict[str, str] = _SHAPES["handlers"]
CLEAN_UPS: dict[str, str] = _SHAPES["clean-ups"]
DECOYS = {name: text.strip("\n") + "\n" for name, text in _SHAPES["decoys"].items()}
"""What a rank does that looks like a fault, and is none."""
