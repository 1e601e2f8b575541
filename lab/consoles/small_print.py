"""Checks the small print of reports on logs: flags each line that the log doesn't prove,
as far as a program can.

It reads the log itself, with expressions of its own, so that it doesn't repeat a mistake of the
reader.
"""

import argparse
import contextlib
import gzip
import io
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # started as a script

from firstfault.cli import main as command
from lab.consoles.score import RECORDED, read_recorded

MAX_COLUMNS = 80
"""Of a headline, and of each line of a report whose text isn't quoted."""

_RANKS_STATED = re.compile(
    r"(?:world[_"
    r" ]?size|nranks|SLURM_NTASKS|SLURM_NPROCS|num_processes|--ntasks|process_count(?:\(\))?)"
    r"[\"')]*[ =:]{1,3}[\"'(]*(\d{1,6})\b"
    r"|MEMBER: \d+/(\d{1,6})|with (\d{1,6}) processes|\b[Rr]ank[ :=]{1,2}\d{1,6}(?:/| of"
    r" )(\d{1,6})\b|world=(\d{1,6})"
    r"|(?:mpirun|mpiexec|prterun|horovodrun)\b[^\n]{0,200}? -np? (\d{1,6})\b|\bsrun\b[^\n]{0,200}?"
    r" -n ?(\d{1,6})\b",
    re.IGNORECASE,
)
"""What states the number of ranks."""
_NODES_STATED = re.compile(
    r"(?:--nnodes|--nodes|\bnnodes|SLURM_(?:JOB_)?(?:NUM_NODES|NNODES)|\bNNODES)[\"')]*["
    r" =:]{1,3}[\"'(]*(\d{1,5})\b"
    r"|(?:srun|sbatch|salloc)[^\n]{0,200}? -N ?(\d{1,5})\b|\bon (\d{1,5}) nodes?\b",
    re.IGNORECASE,
)
"""What states the number of nodes."""
_PER_NODE = re.compile(r"--nproc[-_]per[-_]node[= ](\d{1,3})\b")
_RANK_NAMED = re.compile(
    r"(?<![a-z])(?<!local[_ -])(?<!node[_ -])(?:\[rank ?|(?:global_)?rank[ =:]{1,3})(\d{1,6})\b(?!,"
    r" pid=)",
    re.IGNORECASE,
)
_CURRENT_RANK = re.compile(r"[Rr]ank of (?:the )?(?:current|this) process:? (\d{1,6})")
_RANK_LIST = re.compile(r"[Rr]anks?[:= ]{0,3}(?:\w+\()?\[(\d+(?:, ?\d+)+)\]")
_HOST_NAMED = re.compile(
    r"^\W*([A-Za-z][\w.-]*-?\d[\w.-]*):\d+:\d+ \[\d+\]|srun: error: ([\w.-]+): tasks?|\*\*\*"
    r" (?:JOB|STEP) \S+ ON (\S+) "
    r"|^ *host +: (\S+)|Node failure on ([\w.-]+)",
    re.MULTILINE,
)
_LAUNCHER_STOPS = re.compile(
    r"closing signal|srun: (?:launch/slurm: _step_signal: )?(?:Terminating|Force Terminated|error:"
    r" [^\n]*: Terminated"
    r"|Job step aborted)|CANCELLED|Killing subprocess|job to be terminated|terminated by the"
    r" (?:runtime|launcher)"
    r"|Terminating (?:remaining|all|process|worker)|[Ss]topping (?:all|remaining)"
    r"|: tasks? [\d,\[\]-]+: (?:Terminated|Killed)"
    r"|processes were sent|SIGTERM|signal 15|terminated normally, but|APPLICATION TERMINATED|BAD"
    r" TERMINATION"
    r"|kill(?:ed|ing) (?:all|the other|remaining)|sent an abort|exited on signal|TERM_|PBS: job"
    r" killed"
    r"|ended|exited with|failed|died",
    re.IGNORECASE,
)
"""What a launcher prints that ends processes."""
_PROCESS_STOPPED = re.compile(r"Sending process (\d+) closing signal")
_TERMINATED_IN_BOX = re.compile(r"^ *exitcode +: -15 ", re.MULTILINE)
_BOX_HOST = re.compile(r"^ *host +: (\S+)", re.MULTILINE)
_STAMP = re.compile(r"\d{4}-\d\d-\d\d[T_ ]\d\d:\d\d:\d\d|(?<![\d:])\d\d:\d\d:\d\d(?![\d:])")
_LOG_PREFIX = re.compile(
    r"^\W{0,2}(?:"
    r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d"
    r"|\[?[EWFI]\d{3,4} \d\d:\d\d"
    r"|\[\d{1,5}\] ?:"
    r"|\[?rank ?\d+\]:"
    r"|\d{1,5}: "
    r"|srun: |slurmstepd: "
    r"|[\w.-]+:\d+:\d+ \[\d+\] "
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[: ]"
    r"|\([\w.]+ pid=\d+"
    r")"
)
_DRAWING = re.compile(r"[\u2500-\u259f]")
_RANKS_IN_TEXT = re.compile(r"\branks? ([\d ,-]*\d)")
_FRAME = re.compile(
    r'File \\{0,3}"([^"\\]+)\\{0,3}", line \d+'
    r"|(?:^\W*|\u2502 |\\u2502 )(/\S+\.py):\d+ in ",
    re.MULTILINE,
)
"""A frame of a traceback, also in a string of JSON or in rich's box."""
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|^<frozen ")
_MAX_CITATIONS = 8
_UNPROVEN = {
    "not its agent": "a log shows no agent",
    "not sent by its agent": "a log shows no agent",
    "not by its agent": "a log shows no agent",
    "nodes: no report": "nodes don't report in a log",
    "probably": "a guess",
}
"""Words that no log supports."""


class Flag(NamedTuple):
    """One line of a report that the log doesn't prove."""

    kind: str
    text: str


def check_report(report: dict[str, Any], text: str, log: str) -> Iterator[Flag]:
    """Yield what is wrong with a report: its JSON, its text at 80 columns, and the log."""
    if report.get("verdict"):
        yield from _check_size(report, log)
        yield from _check_missing(report, log)
        yield from _check_stops(report, log)
        yield from _check_times(report, log)
        yield from _check_words(report, text)
        yield from check_cause(report, text, log)
    yield from _check_columns(text)


# --- sizes ----------------------------------------------------------------------------------------


def _numbers(form: re.Pattern[str], log: str) -> list[int]:
    return [int(next(filter(None, found.groups()))) for found in form.finditer(log)]


def _check_size(report: dict[str, Any], log: str) -> Iterator[Flag]:
    job = report["job"]
    minimums = set(job.get("at_least") or ())
    nodes_stated = set(_numbers(_NODES_STATED, log))
    per_node = set(_numbers(_PER_NODE, log))
    ranks_stated = set(_numbers(_RANKS_STATED, log)) | {
        a * b for a in nodes_stated | {1} for b in per_node
    }
    named = {rank for rank in _numbers(_RANK_NAMED, log) if rank < 100_000}
    hosts = {
        next(filter(None, found.groups())).partition(".")[0] for found in _HOST_NAMED.finditer(log)
    }
    if (ranks := job["ranks"]) and "ranks" not in minimums:
        if ranks not in ranks_stated:
            yield Flag(
                "ranks", f"{ranks} ranks, but the log states {sorted(ranks_stated) or 'no number'}"
            )
        elif named and max(named) >= ranks and not any(size > ranks for size in ranks_stated):
            yield Flag("ranks", f"{ranks} ranks, but the log names rank {max(named)}")
    if (
        ranks
        and "ranks" in minimums
        and ranks > 1 + max(named, default=-1)
        and ranks not in ranks_stated
    ):
        known = {rank for ranks in report["victims_by_state"].values() for rank in ranks}
        if ranks > 1 + max({*known, *report["verdict"]["ranks"]}, default=0):
            yield Flag(
                "ranks",
                f"at least {ranks} ranks, but the highest named one is {max(named, default=None)}",
            )
    if (nodes := job["nodes"]) and "nodes" not in minimums and nodes not in nodes_stated:
        yield Flag(
            "nodes", f"{nodes} nodes, but the log states {sorted(nodes_stated) or 'no number'}"
        )
    if (nodes := job["nodes"]) and "nodes" not in minimums and len(hosts) > nodes:
        yield Flag("nodes", f"{nodes} nodes, but lines are from {len(hosts)} hosts")


# --- ranks ----------------------------------------------------------------------------------------


def _parse_ranks(text: str) -> set[int]:
    found: set[int] = set()
    for listed in _RANKS_IN_TEXT.findall(text):
        for part in listed.split(","):
            first, _, last = part.strip().partition("-")
            if first.isdecimal():
                found |= set(range(int(first), int(last or first) + 1))
    return found


def _check_missing(report: dict[str, Any], log: str) -> Iterator[Flag]:
    named = set(_numbers(_RANK_NAMED, log)) | set(_numbers(_CURRENT_RANK, log))
    named |= {int(rank) for ranks in _RANK_LIST.findall(log) for rank in ranks.split(",")}
    for sentence in report["unknown"]:
        if sentence.endswith("names none") and named:
            yield Flag("not in the log", f"{sentence!r}, but lines name ranks {sorted(named)[:9]}")
        if sentence.endswith("not named in the log") and (known := _parse_ranks(sentence) & named):
            yield Flag("not in the log", f"{sentence!r}, but lines name ranks {sorted(known)[:9]}")


def _check_stops(report: dict[str, Any], log: str) -> Iterator[Flag]:
    stopped = report["victims_by_state"].get("stopped", [])
    listed = set(_PROCESS_STOPPED.findall(log))
    hosts = set(_BOX_HOST.findall(log))
    if (
        listed
        and len(hosts) > 1
        and len(stopped) > len(listed) + len(_TERMINATED_IN_BOX.findall(log))
    ):
        yield Flag(
            "stopped",
            f"ranks {stopped[:9]} were stopped, but the agents list only {len(listed)} processes",
        )
    is_said = stopped or "stopped by" in (report["followers"] or "")
    if is_said and not _LAUNCHER_STOPS.search(log):
        yield Flag(
            "stopped", f"ranks {stopped[:9]} were stopped, but no line of a launcher ends them"
        )
    for rank in stopped:
        ended = (
            rf"\brank[ =:\[]*{rank}\b[^\n]{{0,80}}\b(?:exited normally|finished successfully|exit"
            r" code:? 0\b)"
        )
        if re.search(ended, log, re.IGNORECASE):
            yield Flag("stopped", f"rank {rank} was stopped, but it ended normally")


# --- times ----------------------------------------------------------------------------------------


def _cited_lines(names: list[str], lines: list[str], around: int) -> list[str]:
    found: list[str] = []
    for name in names:
        if numbers := re.search(r":(\d+)(?:-(\d+))?$", name):
            first = int(numbers[1])
            last = int(numbers[2] or numbers[1])
            found += lines[max(first - 1 - around, 0) : last + around]
    return found


def _check_times(report: dict[str, Any], log: str) -> Iterator[Flag]:
    root = report["root"] or {}
    unknown = report["unknown"]
    cited_names: list[str] = next(filter(None, report["sources"] or []), [])
    # an error above a traceback, and the message below it, are about the same failure
    cited = _cited_lines(cited_names, log.split("\n"), 1)
    begins = _cited_lines(cited_names[:1], log.split("\n"), 0)[:1]
    when = root.get("time") or report["verdict"]["timestamp"]
    if when and not any(
        found[0][-8:]
        for line in cited
        for found in _STAMP.finditer(line)
        if found[0][-8:-3] in when
    ):
        # a zone moves hours
        minutes = {found[0][-5:] for line in cited for found in _STAMP.finditer(line)}
        if when[14:19] not in minutes:
            yield Flag(
                "time", f"{when}, but the cited lines have {sorted(minutes)[:5] or 'no time'}"
            )
    if "when it happened" in unknown and any(
        re.search(r"\d{4}-\d\d-\d\d[T_ ]\d\d:\d\d", line) for line in begins
    ):
        yield Flag("time", "when it happened is unknown, but the cited lines have a date")
    hosts = {next(filter(None, found.groups())) for found in _HOST_NAMED.finditer(log)}
    for sentence in unknown:
        if "their clocks" in sentence and len(hosts) < 2 and " on 1 " in sentence:
            yield Flag("order", sentence)


# --- words ----------------------------------------------------------------------------------------


def _check_words(report: dict[str, Any], text: str) -> Iterator[Flag]:
    first, what, verdict = report["first_line"], report["what"], report["verdict"]
    for name, line in (("first line", first), ("cause", what), ("headline", verdict["headline"])):
        if _DRAWING.search(line):
            yield Flag("drawing", f"{name}: {line}")
        said = line.split(": ", 1)
        if any(map(_LOG_PREFIX.match, (line, *said[1:]))):
            yield Flag("prefix", f"{name}: {line[:100]}")
    code = (line for line in text.splitlines() if line.startswith("Code "))
    yield from (Flag("drawing", line) for line in code if _DRAWING.search(line))
    yield from _check_repetitions(report)
    flat = " ".join(text.split())
    is_cut = any(len(names) >= _MAX_CITATIONS for names in report["sources"] or [])
    if is_cut and f", and {_MAX_CITATIONS - 3} more]" in flat:
        yield Flag("citations", "a count of citations that were cut")
    for words, why in _UNPROVEN.items():
        if words in flat:
            at = flat.index(words)
            yield Flag("unproven", f"{flat[max(at - 60, 0) : at + 40]!r}: {why}")


def check_cause(report: dict[str, Any], text: str, log: str) -> Iterator[Flag]:
    """Yield what is wrong with whose fault it is, and with words about the cause."""
    files = (next(filter(None, found.groups())) for found in _FRAME.finditer(log))
    if report.get("fault") == "your code" and not any(
        _LIBRARY.search(file) is None for file in files
    ):
        yield Flag("your code", "the log has no frame outside of libraries")
    if report["verdict"].get("code") == "USER:Cancelled" and re.search(
        r"\broot cause\b|\bpreempt", text
    ):
        yield Flag(
            "root cause",
            "the job was canceled, so nothing failed first, and nothing shows a preemption",
        )
    if "all were at" in str(report.get("next")) and report["job"].get("at_least"):
        yield Flag("all were at", "the log doesn't state how many ranks there are")


def _check_repetitions(report: dict[str, Any]) -> Iterator[Flag]:
    first, verdict = report["first_line"], report["verdict"]
    if (
        "undetermined" in first
        and not verdict["headline"].startswith("undetermined")
        and not verdict["suspects"]
    ):
        yield Flag("undetermined", f"{first!r}, but the cause is known")
    for sentence, count in Counter(report["unknown"]).items():
        if count > 1:
            yield Flag("repeated", sentence)
    if "unnamed process or an unnamed" in report["where"]:
        yield Flag("repeated", report["where"])


def _check_columns(text: str) -> Iterator[Flag]:
    for line in text.splitlines():
        if len(line) > MAX_COLUMNS and not line.startswith(("firstfault: ", "no error")):
            yield Flag("columns", f"{len(line)} in {line[:60]!r}")


# --- logs -----------------------------------------------------------------------------------------


def _show(*arguments: str) -> str:
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        command(["show", *arguments])
    return out.getvalue()


def check_log(path: Path) -> list[Flag]:
    """Read a log, and check the report on it."""
    data = path.read_bytes()
    log = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", "replace")
    said = _show("--json", str(path))
    report = json.loads(said) if said.startswith("{") else {}
    return list(check_report(report, _show(str(path)), log))


def _recorded() -> Iterator[tuple[str, list[Flag]]]:
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(RECORDED.glob("*.log.gz")):
            name = file.name.removesuffix(".log.gz")
            log = Path(folder, f"{name}.log")
            log.write_bytes(read_recorded(name))
            yield name, check_log(log)


def main(arguments: list[str]) -> int:
    """Check logs, folders of logs, or the recorded ones; return 1 if a line is flagged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "logs",
        nargs="*",
        type=Path,
        help="logs, or folders of *.log; default: the recorded ones",
    )
    given = parser.parse_args(arguments).logs
    paths = [
        file for path in given for file in (sorted(path.glob("*.log")) if path.is_dir() else [path])
    ]
    kinds: Counter[str] = Counter()
    count = 0
    for name, flags in ((path.stem, check_log(path)) for path in paths) if given else _recorded():
        count += 1
        kinds.update(flag.kind for flag in flags)
        for flag in flags:
            print(f"{name}: {flag.kind}: {flag.text}")
    listed = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common())
    print(f"{kinds.total()} flags in {count} reports{f': {listed}' if listed else ''}")
    return int(bool(kinds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
