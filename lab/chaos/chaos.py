"""Kills each process of a failing job at each step, breaks the storage, tries bad inputs,
and counts what held.

    python lab/chaos/chaos.py [PYTEST-ARGUMENT...]

It runs tests and prints one table, faults by promises. It fails if a promise was broken or a test
failed.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started as a script

from lab.chaos.steps import (  # noqa: E402 - the path comes first
    CASES,
    EXIT_CODE,
    NO_HALF,
    PROMISES,
    TEXT_KEPT,
)

KILLS = ["tests/lab/test_chaos.py"]
STORAGE = [
    "tests/plugin/test_faulty_storage.py",
    "tests/torch_agent/test_faulty_storage.py",
    "tests/storage/test_faulty_reads.py",
]
BAD_INPUTS = [
    "tests/readers/test_hostile_files.py",
    "tests/readers/test_hostile_attempts.py",
    "tests/readers/test_wire.py",
    "tests/readers/test_credentials.py",
    "tests/reports/test_hostile_text.py",
]
PROMISED = {
    "test_an_unreadable_document_is_named_and_the_other_judged": NO_HALF,
    "test_a_repeated_answer_is_not_taken_for_the_next_one": NO_HALF,
    "test_a_failed_listing_is_an_error_of_one_line": EXIT_CODE,
    "test_no_document_can_be_read": EXIT_CODE,
    "test_a_terminated_node_seals_although_the_storage_hangs": EXIT_CODE,
    "test_an_upload_is_given_up_in_time_and_stays_in_the_spool": TEXT_KEPT,
    "test_sealing": TEXT_KEPT,
    "test_the_entrypoint_uploads_the_verdict_after_refused_connections": TEXT_KEPT,
    "test_a_peer_names_the_rank_of_a_node_that_died_with_the_storage": TEXT_KEPT,
}
"""What a test of the storage is about; each of its cases is one fault."""
STORAGE_FAULTS = {
    "500": "storage: every request fails with 500",
    "503": "storage: every request fails with 503, slow down",
    "403": "storage: every request is forbidden",
    "refused": "storage: refuses connections",
    "drop": "storage: closes connections without an answer",
    "reset": "storage: resets connections",
    "truncate": "storage: ends an answer early",
    "half": "storage: an answer's body is half as long",
    "stall": "storage: does not answer",
    "trickle": "storage: answers a byte at a time",
    "twice": "storage: answers twice",
}
ONE_FAULT = {
    "test_a_repeated_answer_is_not_taken_for_the_next_one": "twice",
    "test_the_entrypoint_uploads_the_verdict_after_refused_connections": "refused",
    "test_a_peer_names_the_rank_of_a_node_that_died_with_the_storage": "stall",
    "test_a_terminated_node_seals_although_the_storage_hangs": "stall",
}
"""The faults of the tests that have only one."""

Table = dict[str, dict[str, Counter[str]]]
"""Fault, promise, and how often it was held or broken."""


def main(arguments: list[str]) -> int:
    """Run the tests, print the table, and return the exit code."""
    began = time.monotonic()
    table: Table = defaultdict(lambda: defaultdict(Counter))
    tried = failed = 0
    for files, spread in ((KILLS, "load"), (STORAGE, "loadfile")):
        for name, case, properties, passed in _results(files, spread, arguments):
            fault = _fault(name, case)
            if fault is not None:
                tried += 1
                for promise, result in _promises(name, properties, passed).items():
                    table[fault][promise][result] += 1
            failed += not passed
    inputs = [passed for *_, passed in _results(BAD_INPUTS, "loadfile", arguments)]
    failed += inputs.count(False)
    print(f"\n{as_markdown(table)}\n")
    held = sum(counts["held"] for row in table.values() for counts in row.values())
    broken = sum(counts["broken"] for row in table.values() for counts in row.values())
    seconds = time.monotonic() - began
    print(
        f"{tried} faults tried, {held} promises held, {broken} broken, in {seconds / 60:.1f}"
        " minutes"
    )
    print(f"{len(inputs)} tests of bad inputs, {inputs.count(True)} passed")
    return 1 if failed or broken or not tried else 0


def as_markdown(table: Table) -> str:
    lines = ["| Fault | " + " | ".join(PROMISES) + " |", "|---|" + "---|" * len(PROMISES)]
    for fault, row in table.items():
        cells = [
            f"{row[name]['held']} of {row[name].total()}" if name in row else ""
            for name in PROMISES
        ]
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _results(
    files: list[str], spread: str, arguments: list[str]
) -> list[tuple[str, str, dict[str, str], bool]]:
    """Run tests, two at a time; return each one's name, case, properties, and whether it passed."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        report = Path(folder) / "results.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "--dist",
            spread,
            f"--junitxml={report}",
        ]
        environment = {**os.environ, "FIRSTFAULT_CHAOS": "all"}
        ended = subprocess.run(
            [*command, *files, *arguments],
            cwd=ROOT,
            env=environment,
            check=False,
        )
        if ended.returncode not in {0, 1, 5}:
            raise SystemExit(ended.returncode)  # pytest has said why
        # pytest has just written it
        tests = ET.parse(report).getroot().iter("testcase")  # noqa: S314
        return [
            (
                *_split(test.get("name", "")),
                {item.get("name", ""): item.get("value", "") for item in test.iter("property")},
                not any(child.tag in {"failure", "error"} for child in test),
            )
            for test in tests
        ]


def _split(name: str) -> tuple[str, str]:
    function, _, case = name.partition("[")
    return function, case.removesuffix("]")


def _promises(name: str, properties: dict[str, str], passed: bool) -> dict[str, str]:
    """Return each promise that a test is about, and whether it held;
    all are broken if it came to no result.
    """
    if name in PROMISED:
        return {PROMISED[name]: "held" if passed else "broken"}
    return properties or dict.fromkeys(PROMISES, "broken")


def _fault(name: str, case: str) -> str | None:
    """Return the fault of a test's case; None if it has none."""
    struck = {item.name: item.fault for item in CASES}
    if case in struck:
        return struck[case]
    if name in PROMISED:
        return STORAGE_FAULTS[ONE_FAULT.get(name) or case.partition("-")[0]]
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
