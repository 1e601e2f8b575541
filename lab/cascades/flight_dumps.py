"""Judges real flight recorder dumps with a known truth,
by firstfault and by torch's own analyzer beside it.

``python -m lab.cascades.flight_dumps FOLDER`` takes a folder with one folder for each job: dumps
named ``_dump_<rank>``, and ``fault_injection.log`` with a line "Fault ranks: [12, 14]".
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from firstfault.conclude import conclude
from firstfault.reading.assemble import Snapshot, assemble
from firstfault_logs.flight import documents_of, dumps_at

_TRUTH = re.compile(r"Fault ranks: (\[[\d, ]*\])")
_MISSING = re.compile(r"missing ranks: \{([\d, ]+)\}")


def ours(job: Path) -> tuple[list[int], str]:
    """Return the ranks that the rules name, and the confidence."""
    documents, unreadable = documents_of(dumps_at(job))
    conclusion = conclude(
        assemble(Snapshot(documents=tuple(documents), unreadable=tuple(unreadable)))
    )
    return (
        (sorted(conclusion.verdict.ranks), conclusion.verdict.confidence)
        if conclusion is not None
        else ([], "")
    )


def torchs(job: Path) -> list[int]:
    """Return all ranks that torch's analyzer reports as missing from a collective."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.flight_recorder.fr_trace",
        "-p",
        "_dump_",
        str(job),
    ]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return sorted(
        {
            int(rank)
            for found in _MISSING.findall(told.stdout + told.stderr)
            for rank in found.split(",")
        }
    )


def main() -> None:
    for log in sorted(Path(sys.argv[1]).glob("*/fault_injection.log")):
        truth = _TRUTH.search(log.read_text(encoding="utf-8"))
        named, confidence = ours(log.parent)
        guilty = json.loads(truth[1]) if truth is not None else []
        print(
            f"{log.parent.name}: guilty {guilty}, named {named} ({confidence}), torch's analyzer"
            f" {torchs(log.parent)}"
        )


if __name__ == "__main__":
    main()
