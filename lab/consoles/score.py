"""Scores how the recorded console logs are read,
and prints the tables of docs/project/accuracy.md.
"""

import contextlib
import gzip
import io
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # started as a script

from collections.abc import Iterable

from firstfault.cli import main as command
from lab.cascades import replay

RECORDED = Path(__file__).parent / "recorded"
INDEX = RECORDED / "index.jsonl"
OUTCOMES = ("right", "story", "partial", "undetermined", "wrong", "sure", "unread")
"""story: the ranks are right, and the word is missing; sure: wrong with high confidence; unread:
no answer.
"""
FAILED = (10, 11)
"""The command's exit codes for a failure: not to be retried, and retryable."""
_BOX = re.compile(
    rb"Root Cause \(first observed failure\):.*?time +: (\S+).*?rank +: (\d+) \(local_rank",
    re.DOTALL,
)


class Scored(NamedTuple):
    """What became of one log."""

    truth: dict[str, Any]
    outcome: str
    more: tuple[str, ...]
    """"category" if it is right, or as good; "retry" if the decision is right."""
    box: bool | None
    """Whether torch's box names a guilty rank; None without one."""
    answer: str


def index() -> dict[str, dict[str, Any]]:
    """Return the truth of each log, by name."""
    rows = map(json.loads, INDEX.read_text(encoding="utf-8").splitlines()) if INDEX.exists() else ()
    return {row["name"]: row for row in rows}


def judge(truth: dict[str, Any], code: int, answer: dict[str, Any]) -> str:
    """Return one of `OUTCOMES`.

    `ranks` of the truth is None if nothing failed, and empty if no rank is guilty: then no ranks
    are right, and so is the `node` if there is one. `any`: some of the ranks are enough.
    """
    verdict = answer.get("verdict") or {}
    wrong = "sure" if verdict.get("confidence") == "high" else "wrong"
    if code not in {0, *FAILED}:
        return "unread"
    if truth["ranks"] is None or code == 0:
        return "right" if truth["ranks"] is None and code == 0 else wrong
    said = set(verdict["ranks"])
    want = set(truth["ranks"])
    number = int(truth["node"] == "gpu-b")
    if (
        not want
        and said
        and verdict["node"] not in {truth["node"], f"llama-worker-{number}", f"worker-{number + 1}"}
    ):
        return wrong
    if want and not said:
        return "undetermined"
    if want and said != want and not (truth["any"] and said < want):
        return "partial" if said < want else wrong
    return "right" if re.search(truth["word"], json.dumps(answer, ensure_ascii=False)) else "story"


def read_recorded(name: str) -> bytes:
    """Return a recorded log."""
    return gzip.decompress((RECORDED / f"{name}.log.gz").read_bytes())


def score_log(truth: dict[str, Any], data: bytes) -> Scored:
    """Read a log and compare the answer with the truth."""
    with tempfile.TemporaryDirectory() as folder:
        return _scored(truth, data, Path(folder, f"{truth['name']}.log"))


def _scored(truth: dict[str, Any], data: bytes, log: Path) -> Scored:
    log.write_bytes(data)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = command(["show", "--json", str(log)]) or 0
        except SystemExit as end:
            code = int(end.code or 0)
    answer = json.loads(out.getvalue()) if out.getvalue().startswith("{") else {}
    verdict = answer.get("verdict") or {}
    decision = answer.get("decision") or {}
    more = ("category",) * (verdict.get("category", "") in {truth["category"], *truth["also"]})
    more += ("retry",) * (decision.get("retry", truth["ranks"] is not None) == truth["retry"])
    boxes = [(when, int(rank)) for when, rank in _BOX.findall(data)]
    box = min(boxes)[1] in (truth["ranks"] or ()) if boxes else None
    headline = f"{verdict.get('confidence', code)}: {verdict.get('headline', '')}"
    return Scored(truth, judge(truth, code, answer), more, box, headline)


def all_scored(wanted: Iterable[str] = (), every: int = 1) -> list[Scored]:
    """Score every so many-th of the logs whose names begin with one of `wanted`, or of all."""
    starts = tuple(wanted) or ("",)
    rows = [(name, row) for name, row in sorted(index().items()) if name.startswith(starts)][
        ::every
    ]
    return [score_log(row, read_recorded(name)) for name, row in rows]


def by_launcher(rows: list[Scored]) -> str:
    """Return a table of the outcomes by launcher."""
    columns = (*OUTCOMES, "category", "retry")
    lines = ["| | logs | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for name in (*sorted({row.truth["launcher"] for row in rows}), "all"):
        these = [row for row in rows if name in {row.truth["launcher"], "all"}]
        counts = Counter(word for row in these for word in (row.outcome, *row.more))
        lines.append(
            f"| {name} | {len(these)} | "
            + " | ".join(str(counts[column]) for column in columns)
            + " |"
        )
    return "\n".join(lines)


def by_category(rows: list[Scored]) -> str:
    """Return a table of right answers on the same faults: with firstfault in the job, from a log,
    and torch's box.
    """
    found: dict[str, list[list[bool]]] = defaultdict(lambda: [[], [], []])
    categories = {}
    for row in rows:
        fault = ("nccl-" if row.truth["launcher"].endswith("nccl") else "") + row.truth["fault"]
        categories[fault] = row.truth["category"] or "no failure"
        found[categories[fault]][1].append(row.outcome == "right")
        found[categories[fault]][2] += [row.box] if row.box is not None else []
    for file in (*replay.RECORDED.glob("*.zip"), *replay.OF_PROGRAMS.glob("*.zip")):
        if (cascade := replay.load(file)).truth["fault"] in categories:
            right = replay.judge(cascade.truth, replay.verdict_of(cascade, "evidence")) == "right"
            found[categories[cascade.truth["fault"]]][0].append(right)
    lines = [
        "| category | with firstfault in the job | from the console log | torch's box |",
        "|---|---|---|---|",
    ]
    everything = [
        [right for these in found.values() for right in these[column]] for column in range(3)
    ]
    for category, columns in (*sorted(found.items()), ("all", everything)):
        cells = (f"{sum(these)} of {len(these)}" if these else "" for these in columns)
        lines.append(f"| {category} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the tables; -v explains what is not right. Return 1 if an answer is
    wrong with high confidence.
    """
    rows = all_scored(name for name in arguments if name != "-v")
    for row in rows if "-v" in arguments else ():
        if row.outcome != "right":
            print(
                f"{row.outcome:<13} {row.truth['name']:<52} {row.truth['ranks']} {row.answer[:120]}"
            )
    print(by_launcher(rows), by_category(rows), sep="\n\n")
    return int(any(row.outcome == "sure" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
