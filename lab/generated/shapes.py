"""Pieces of source from which a training is composed: loops, wrappers, communication, handlers,
clean-ups, decoys. Each is a file of `pieces/`, and uses names of others.
"""

from pathlib import Path

_PIECES = Path(__file__).with_name("pieces")


def _read(name: str) -> str:
    return (_PIECES / f"{name}.py").read_text(encoding="utf-8")


def _read_all(kind: str) -> dict[str, str]:
    """Return the pieces of one kind, by name."""
    names = sorted(file.stem for file in (_PIECES / kind).glob("*.py"))
    return {name: _read(f"{kind}/{name}") for name in names}


HEAD = _read("head")
COMMON = _read("common")
TURN = _read("turn")
PLACES_OF = {
    "loader": ["data", "collate"],
    "iterator": ["data", "collate"],
    "trainer": ["data", "collate"],
    "prefetch": ["data", "thread"],
    "generator": ["data"],
    "async-save": ["save"],
}
"""Where a fault may be met besides a step, by loop."""
LOOPS = _read_all("loops")
WRAPPERS = _read_all("wrappers")
TRIED_STEPS = {"retried-steps": LOOPS["retried-steps"], **_read_all("retried-loops")}
"""Loops that try a step again."""
TRIED_TRAININGS = {
    **{name: WRAPPERS[name] for name in ("retried", "retried-anew")},
    **_read_all("retried-wrappers"),
}
"""What tries the training again."""
HANDLED_STEPS = _read_all("handled-loops")
"""Loops that handle a step's exception and continue, out of step with their peers."""
COMMUNICATIONS = {
    name: text if "def prepare" in text else f"def prepare():\n    pass\n\n\n{text}"
    for name, text in _read_all("communications").items()
}
HANDLERS = _read_all("handlers")
CLEAN_UPS = _read_all("clean-ups")
DECOYS = _read_all("decoys")
"""What a rank does that looks like a fault, and is none."""
