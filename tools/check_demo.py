"""Check what `make demo` left: rank 3's recoverable error, a second attempt with outputs;
and that ddp.py learns.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from firstfault import MultiErrorFileOutputReader
from firstfault.model import Kind, Origin

FIRST_EPOCH, SLOPE = 4, 3
"""Where the second attempt continues, and what it learns; see examples/recoverable.py."""
ROOT = Path(__file__).parents[1]
STORE = ROOT / "build" / "demo"


def main() -> None:
    """Read both attempts of the last run."""
    run = max(
        (path for path in STORE.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime
    )
    first, second = (MultiErrorFileOutputReader(str(run / number)) for number in ("0", "1"))
    conclusion = first.conclude()
    assert conclusion is not None
    verdict, decision = conclusion.verdict, conclusion.decision
    assert verdict.ranks == (3,), verdict
    assert verdict.headline.startswith("DataUnavailableError, rank 3"), verdict
    assert verdict.category == "recoverable", verdict
    assert (decision.kind, decision.origin, decision.enforced) == (
        Kind.RECOVERABLE,
        Origin.USER,
        True,
    ), decision
    assert not second.is_error()
    outputs, error = second.read()
    assert error is None, error
    assert outputs is not None
    fields = outputs.literals["o0"].map.literals
    found = {name: fields[name].scalar.primitive.float_value for name in ("first_epoch", "slope")}
    assert found["first_epoch"] == FIRST_EPOCH, (
        "the second attempt did not continue from the checkpoint"
    )
    assert abs(found["slope"] - SLOPE) < 0.01, found  # noqa: PLR2004 - it learns, it does not solve
    command = [
        sys.executable,
        "-m",
        "firstfault",
        "run",
        str(ROOT / "examples" / "ddp.py"),
        "train",
        "--json",
    ]
    command += [
        "--nodes",
        "1",
        "--inputs",
        '{"epochs": 20}',
        "--store",
        str(ROOT / "build" / "ddp"),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    accuracy = json.loads(done.stdout.splitlines()[-1])["outputs"]["o0"]
    assert accuracy > 0.9, accuracy  # noqa: PLR2004 - far above chance


if __name__ == "__main__":
    main()
