"""Find out who printed a line from the prefixes of launchers, collectors and torch,
nested in any order.

A prefix that most lines share, with a varying part, is learned from the log itself, so unlisted
launchers work, too.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any, NamedTuple

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs import launchers
from firstfault_logs.framing.exports import MESSAGE_KEYS, TIME_KEYS, parse_object
from firstfault_logs.framing.lines import TRACEBACK, without_bars, without_colors

_PREFIX_CHARACTERS_READ = 100
_LABEL_FORMS = tuple(
    map(
        re.compile,
        (
            r"\s{0,5}(?P<name>\d{1,5}): ?",
            r"\[(?P<name>\d{1,5})\] ",
            r"[<\[](?P<name>[^\s\]>\[]{1,120})[>\]]:? ?",
            r"(?P<name>[A-Za-z0-9][\w./#@-]{0,120}): ?",
            r"(?P<name>[A-Za-z0-9][\w./#@-]{0,120})[ \t]*[|>][ \t]?",
            r"(?P<name>[A-Za-z0-9][\w./#@-]{0,120}) \[std(?:err|out)\](?: |$)",
            "(?P<name>[a-z0-9][a-z0-9.]*(?:-[a-z0-9.]+){1,12}-[a-z0-9]{1,10} [a-z][a-z0-9-]{1,62})(?: |$)",
            r"(?P<name>[a-z][a-z0-9]{0,40}(?:-[a-z0-9]{1,20}){0,6}-\d{1,5})[ \t]",
        ),
    )
)
"""The forms of labels that are learned if most lines have one; the first two are numbers."""
_MIN_LABEL_SHARE = 0.6
"""Share of the lines that have a label."""
_NEARLY_ALL_SHARE = 0.9
_MIN_LINES_OF_COLLECTOR = 20
_MIN_LABELED_LINES, _MIN_LABELED_LINES_OF_RANKS = 4, 2
_HOURS_PER_DAY = 24
_MINUTES = re.compile(r"[0-5]\d(?=[:\s.,\]]|$)")
"""Behind an hour and a colon."""

# Ends the name of a log.
LOG_SUFFIX = LazyPattern(r"\.(?:log|out|err|txt|stderr|stdout|gz)$")

# A rank in the name of a log, or in a label.
RANK_WORD = LazyPattern(r"(?i)(?:^|[^a-z])(?:global[_-]?)?rank[^a-z0-9]{0,2}(\d{1,6})(?!\d)")

# A date and a time, at the begin of a line.
_STAMP = LazyPattern(r"""
\s*[\[(]?
(?P<date>\d{4}[-/]\d\d[-/]\d\d)[T ]
(?P<time>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?
(?P<zone>Z|[+-]\d\d:?\d\d)?
[\])]?(?=[\s:|,]|$)[ \t]?(?:[-|:,][ \t])?
""")

# Other forms of times: without a date, without a year, or seconds since 1970.
_OTHER_STAMP = LazyPattern(r"""
\s*[\[(]?
(?:
  \d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?
| (?:\w{3}[ ])?\w{3}[ ]+\d{1,2}[ ]\d\d:\d\d:\d\d(?:[ ]\d{4})?
| \d{2}/\d{2}(?:/\d{2,4})?[ ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?
| 1\d{9}(?:\.\d{1,9})?
)
[\])]?(?:[ \t](?:[-|][ \t])?|(?=\[\d{1,6}\]<std))
""")

# Begins a line of native code: level, date without a year, time.
GLOG_STAMP = LazyPattern(
    r"\[?[EWFI](?P<month>\d{1,2}?)(?P<day>\d\d)[ ](?P<time>\d\d:\d\d:\d\d)\.(?P<part>\d{1,9})"
)

# Words and times before a colon, which label no process.
_NO_LABEL = LazyPattern(r"""(?i)
^(?:
  \w*(?:info|warn|warning|error|debug|critical|trace|notice|fatal|note|step|epoch|iter|loss|file|usage|http|https
    |srun|slurmstepd|traceback|torch|python)
| \d{4}-.*
| .*\d\d:\d\d.*
| [EWFI]\d{3,4}
)$
| Error$
| Exception$
""")

# What a program's logger puts before each of its lines: a time, a level and names, and the rank.
# torch's own prefix isn't one. Only one space is taken behind it: frames are indented.
_RANKED_RECORD = LazyPattern(r"""
(?P<before>
  (?:[\[(]?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?[\])]?[ |,:-]*)?
  (?:
    \[?[ ]{0,4}(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)[ ]{0,5}\]?[ :|-]{1,9}
  | \[(?![^\]\n]{0,60}[Rr]ank|R\d)[^\]\n]{1,60}\][ :|-]{0,9}
  | (?![Rr]ank|R\d)[\w.]{1,60}(?::|[ ][|:-])[ ]{0,3}
  ){0,4}
  (?:(?![Rr]ank|R\d)[\w.]{1,60}[ ](?=[\[(]))?
)
(?!\[rank\d{1,6}\]:)
(?:
  [\[(](?P<local>local[ _-]?)?(?:global[ _-]?)?(?:[Rr]ank[ =:_-]{0,2}|(?P<short>R))(?P<rank>\d{1,6})(?:/\d{1,6})?[\])]:?
| (?P<local2>local[ _-]?)?(?:global[ _-]?)?[Rr]ank=(?P<rank2>\d{1,6})
| (?:[Rr]ank[ _-]?|(?P<short2>R))(?P<rank3>\d{1,6})(?=:[ ]|[ ][|-][ ])
)
(?P<after>
  (?:[ ]{0,3}[|:-](?=[ ]|$))?
  (?:[ ]\[?(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)[ ]{0,5}(?:\]:?|:|[ ][|-](?=[ ]|$)))?
  (?:[ ][\w.<>]{1,80}:[\w.<>]{1,80}:\d{1,6}[ ]?[|:-](?=[ ]|$))?
)
(?:[ ]|$)
""")
_RECORD_LEVEL = LazyPattern(r"\b(?:ERROR|CRITICAL|FATAL)\b")

_TRACEBACK_KEYS = (
    "exc_info",
    "exception",
    "traceback",
    "stack_trace",
    "stacktrace",
    "stack",
    "error.stack_trace",
    "exc_text",
)
"""Names that programs and collectors give to a traceback."""
_RANK_KEYS = (
    "rank",
    "global_rank",
    "RANK",
    "worker_rank",
    "process_index",
)
"""The same for a rank."""
_NODE_KEYS = (
    "pod",
    "pod_name",
    "host",
    "hostname",
    "node",
    "node_name",
    "instance",
    "machine",
    "task_name",
)
"""The same for a node."""


class Label(NamedTuple):
    """The process that printed a line, according to the line."""

    node: str = ""
    """A pod, a host, a file, or a label that is none of a rank."""
    rank: int | None = None
    task: int | None = None
    """A number before the line: of a task, which is a rank if each task is one process."""
    local_rank: int | None = None
    pid: int | None = None
    ip: str = ""
    node_index: int | None = None
    """A number of the node, which is a rank if each node has one process."""
    by_logger: bool = False
    """Whether the program's own logger printed the rank, so the line is about the job as much as a
    line without a rank.
    """

    @property
    def number(self) -> int | None:
        """The number that distinguishes the process best."""
        numbers = (self.rank, self.task, self.local_rank, self.pid)
        return next((number for number in numbers if number is not None), None)

    @property
    def is_process(self) -> bool:
        """Whether it distinguishes one process from the rest of its node."""
        return not (
            self.rank is None and self.task is None and self.local_rank is None and self.pid is None
        )


def get_file_label(path: str) -> Label:
    """Return the label of a log according to its name: a rank, or a node and perhaps its number."""
    name = LOG_SUFFIX.sub("", path.rpartition("/")[2])
    if ranked := RANK_WORD.search(name):
        return Label(rank=int(ranked[1]))
    numbers = re.findall(r"\d+", name)
    return Label(node=name, node_index=int(numbers[0]) if len(numbers) == 1 else None)


class LogRecord(NamedTuple):
    """A line without its prefixes."""

    number: int
    text: str
    label: Label
    time_ns: int | None
    by_torch: bool = False
    """Whether torch put the rank before it: of a traceback, that it was uncaught."""


# What Kubernetes' containers write behind the time
_CRI_PREFIX = LazyPattern(r"(?:stdout|stderr)[ ][FP][ ]")

# A label with a node and the number of a task on it or in the job: "10.0.0.249 [0]".
_NUMBERED_NODE = LazyPattern(r"(?P<node>[\w.-]{1,120})[ ]?[\[(\#](?P<number>\d{1,5})[\])]?:?")

# A level in a label. The text before it is a logger's name.
_LEVEL_IN_LABEL = LazyPattern(r"\b(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL)\b")

# A level before a date, at the begin of a line.
_LEVEL_BEFORE_DATE = LazyPattern(r"[A-Z]{4,8}[ ]\d\d-")


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The prefixes of the lines of one log."""

    stamped: bool = False
    """Whether each line begins with a time, those of tracebacks too: a collector put it there."""
    learned_form: re.Pattern[str] | None = None
    """The form of labels that most lines of the log have."""
    is_number: bool = False
    """Whether labels are numbers of tasks."""
    year: int = 0
    """The year for times without one; 0 if unknown."""
    is_learned: bool = False
    """Whether these are all prefixes of the log."""
    is_ranked: bool = False
    """Whether the program's logger puts the rank before each of its lines."""
    inner: Prefixes | None = None
    """The prefixes behind the learned label, which then is a collector's and names no process."""
    learned_names: set[str] = field(default_factory=set)
    """Nodes in learned labels: the lines that were read don't show what they are."""

    @property
    def has_ranks(self) -> bool:
        """Whether a logger puts the rank before its lines, perhaps behind a collector's label."""
        return self.is_ranked or (self.inner is not None and self.inner.is_ranked)

    def parse(self, number: int, line: str, inherited: Label) -> Iterable[LogRecord]:
        """Return a line without its prefixes; a line of JSON may have several lines.

        Args:
            number: of the line in its file.
            line: its text.
            inherited: who wrote the file, according to its name.
        """
        form = self.learned_form
        if self.inner is not None and form is not None and (label_match := form.match(line)):
            return self.inner.parse(number, line[label_match.end() :], inherited)
        return self._parse(number, line, inherited)

    def _parse(self, number: int, line: str, inherited: Label) -> Iterator[LogRecord]:
        label, text, time_ns, by_torch = inherited, line, None, False
        is_labeled = self.learned_form is None
        is_ranked = False
        for _ in range(8):
            if self.is_ranked and not is_ranked and (record := _RANKED_RECORD.match(text)):
                is_ranked = True
                time_ns = time_ns or parse_time_ns(text)
                label = _apply_rank(label, record)
                text = _keep_level(record, text[record.end() :])
                break
            # before times, because syslog's and Horovod's prefixes begin with one
            if (
                text[:1] in "[("
                or "|" in text[:100]
                or "]<std" in text[:40]
                or text[6:7] == " "
                or _LEVEL_BEFORE_DATE.match(text)
            ):
                prefix = launchers.TABLE.prefix.match(text)
                if prefix is not None:
                    label, is_of_torch = read_prefix(label, prefix[0])
                    text = text[prefix.end() :]
                    by_torch = by_torch or is_of_torch
                    continue
            match = _STAMP.match(text)
            if match is not None:
                time_ns = time_ns or _to_ns(
                    match["date"],
                    match["time"],
                    match["part"],
                    match["zone"],
                )
                if self.stamped or not text[match.end() :].strip():
                    text = text[match.end() :]
                    continue
                break
            if self.stamped and (other := _OTHER_STAMP.match(text) or _CRI_PREFIX.match(text)):
                text = text[other.end() :]
                continue
            if (
                not is_labeled
                and self.learned_form is not None
                and (label_match := self.learned_form.match(text))
            ):
                label = self._apply_label(label, label_match["name"])
                is_labeled = True
                text = text[label_match.end() :]
                continue
            break
        if (
            self.is_learned
            and not by_torch
            and not is_ranked
            and "[rank" in text[:_PREFIX_CHARACTERS_READ]
        ):
            label, text, by_torch = _find_torch_prefix(label, text)
        time_ns = time_ns or self._glogs(text)
        yield from _split_object(LogRecord(number, text, label, time_ns, by_torch))

    def _glogs(self, text: str) -> int | None:
        """Return the time in a line of native code, which has no year."""
        stamp = GLOG_STAMP.match(text) if self.year and text[:2].lstrip("[")[:1] in "EWFI" else None
        if stamp is None:
            return None
        return _to_ns(
            f"{self.year}-{int(stamp['month']):02}-{stamp['day']}",
            stamp["time"],
            stamp["part"],
            None,
        )

    def _apply_label(self, label: Label, name: str) -> Label:
        if self.is_number:
            return label._replace(task=int(name))
        named = RANK_WORD.search(name)
        if named is not None:
            return label._replace(rank=int(named[1]))
        if (numbered := _NUMBERED_NODE.fullmatch(name)) is not None:
            self.learned_names.add(numbered["node"])
            return label._replace(node=label.node or numbered["node"], task=int(numbered["number"]))
        if _NO_LABEL.search(name.strip("[]<>() :")) or _LEVEL_IN_LABEL.search(name):
            return label
        self.learned_names.add(name.partition(" ")[0])
        return label._replace(node=label.node or name.partition(" ")[0])  # stern: "pod container"


_PLAIN = Prefixes()


def learn_prefixes(lines: Sequence[str]) -> Prefixes:
    """Return the prefixes of a log, learned from some of its lines.

    If all lines have the same label, a collector put it there, so the text behind it is learned as
    well.
    """
    outer = _learn_prefixes(lines)
    form = outer.learned_form
    labeled = [
        label_match for line in lines if form is not None and (label_match := form.match(line))
    ]
    if (
        len(labeled) < _MIN_LINES_OF_COLLECTOR
        or len({label_match["name"] for label_match in labeled}) > 1
    ):
        return outer
    inner = _learn_prefixes([label_match.string[label_match.end() :] for label_match in labeled])
    return replace(outer, inner=inner) if inner.stamped or inner.learned_form is not None else outer


# The program's own words before a traceback.
_NO_PREFIX = LazyPattern(r"""(?i)
\s*(?:
  Original
| traceback[ ]*:
| [EWFI]\d{4}[ ].*
| \w*(?:ERROR|WARN\w*|INFO|CRITICAL)\b.*
| .*\b[a-z]{2,}[ ][a-z]{2,}\b[^\[\]()]*:
)\s*$
""")

# The text before a frame in the same line.
_BEFORE_FRAME = LazyPattern(r'^(?P<before>.{1,120}?)[ ][ ]File[ ]"[^"]+",[ ]line[ ]\d+')


def _learn_prefixes(lines: Sequence[str]) -> Prefixes:
    years = Counter(stamp["date"][:4] for line in lines if (stamp := _STAMP.search(line)))
    year = int(years.most_common(1)[0][0]) if years else 0
    of_frames = [frame["before"] for line in lines if (frame := _BEFORE_FRAME.match(line))]
    above = (line.partition(TRACEBACK)[0].partition('{"')[0] for line in lines if TRACEBACK in line)
    of_frames += list(above)
    texts = [line for line in lines if line.strip()]
    stamped = any(_is_stamped(line_start) for line_start in of_frames)
    if not of_frames and texts:
        stamped = sum(map(_is_stamped, texts)) > _NEARLY_ALL_SHARE * len(texts)
    if _are_ranked(texts):
        return Prefixes(stamped=stamped, year=year, is_learned=True, is_ranked=True)
    known_prefixes = Prefixes(stamped=stamped, year=year)
    bare = [record.text for line in texts for record in known_prefixes.parse(0, line, Label())]
    rests = [
        record.text
        for line_start in of_frames
        for record in known_prefixes.parse(0, line_start, Label())
    ]
    rests = [text for text in rests if text.strip(" |+") and not _NO_PREFIX.match(text)]
    for form in _LABEL_FORMS:
        if _fits(form, bare, rests):
            return replace(
                known_prefixes,
                is_learned=True,
                learned_form=form,
                is_number=form in _LABEL_FORMS[:2],
            )
    return replace(
        known_prefixes, is_learned=True, learned_form=_skeleton([_outer(text) for text in rests])
    )


def _are_ranked(lines: Sequence[str]) -> bool:
    """Whether the program's logger puts the rank before each of its lines, as most lines that begin
    a record show, or frames with such a prefix.
    """
    starts = [_skip_collector(line) for line in lines]
    matches = [match for text in starts if (match := _RANKED_RECORD.match(text))]
    if any(map(_is_short, matches)):
        # "R3" may be anything: of ranks, all numbers are there
        numbers = {_get_rank(match) for match in matches}
        if len(numbers) == 1 or numbers != set(range(len(numbers))):
            return False
    frames = sum(
        match.string[match.end() :].startswith('  File "') and bool(match["before"])
        for match in matches
    )
    # a traceback below a record has no prefix
    records = sum(bool(text[:1].strip()) for text in starts)
    enough = max(_MIN_LABELED_LINES, _MIN_LABEL_SHARE * records)
    return bool(frames) or len(matches) >= enough


def _skip_collector(line: str) -> str:
    """Return a line without what a launcher or a collector put before it."""
    prefix = launchers.TABLE.prefix.match(line)
    if prefix is None or "rank" in prefix[0].lower():
        return line
    return line[prefix.end() :]


def _is_short(record: re.Match[str]) -> bool:
    return bool(record["short"] or record["short2"])


def _get_rank(record: re.Match[str]) -> int:
    return int(record["rank"] or record["rank2"] or record["rank3"])


def _apply_rank(label: Label, record: re.Match[str]) -> Label:
    rank = _get_rank(record)
    if record["local"] or record["local2"]:
        return label._replace(local_rank=rank, by_logger=True)
    return label._replace(rank=rank, by_logger=True)


def _keep_level(record: re.Match[str], text: str) -> str:
    """Return the text of a record below the level of an error, which shows that it is one."""
    level = _RECORD_LEVEL.search(record["before"]) or _RECORD_LEVEL.search(record["after"])
    return text if level is None else f"{level[0]}: {text}"


# torch's own prefix, anywhere in a line.
_TORCH_PREFIX = LazyPattern(r"(?:^|[\s:>|])\[rank(?P<rank>\d{1,6})\]:[ ]?")


def _find_torch_prefix(label: Label, text: str) -> tuple[Label, str, bool]:
    """Find torch's own prefix behind one that is too rare to be learned."""
    prefix = _TORCH_PREFIX.search(text[: _PREFIX_CHARACTERS_READ + 20])
    if prefix is None:
        return label, text, False
    return label._replace(rank=int(prefix["rank"])), text[prefix.end() :], True


def _is_stamped(text: str) -> bool:
    return (_STAMP.match(text) or _OTHER_STAMP.match(text)) is not None


def _fits(form: re.Pattern[str], lines: Sequence[str], of_frames: Sequence[str]) -> bool:
    """Whether a form of label begins most lines, or the lines of tracebacks."""
    matches = [match for line in lines if line.strip() and (match := form.match(line))]
    if _are_times_or_counters(matches):
        return False
    names = Counter(match["name"] for match in matches if not _NO_LABEL.search(match["name"]))
    is_of_each_rank = form in _LABEL_FORMS[:2] and len(matches) >= _NEARLY_ALL_SHARE * len(lines)
    min_lines = _MIN_LABELED_LINES_OF_RANKS if is_of_each_rank else _MIN_LABELED_LINES
    count = names.total()
    enough = max(min_lines, _MIN_LABEL_SHARE * sum(bool(line.strip()) for line in lines))
    if of_frames:
        labeled = [(text, match) for text in of_frames if (match := form.match(f"{text} "))]
        at_line_starts = [match for text, match in labeled if _is_prefix(text[match.end() :])]
        names_none = map(_NO_LABEL.search, (match["name"] for match in at_line_starts))
        return len(at_line_starts) * 2 > len(of_frames) and not any(names_none)
    # a single name that only a part of the lines has is that of a program which writes between
    # others
    is_of_several = len(names) > 1 or count >= _NEARLY_ALL_SHARE * len(lines)
    return count >= enough and is_of_several and (is_of_each_rank or len(names) * 2 <= count)


def _are_times_or_counters(matches: Sequence[re.Match[str]]) -> bool:
    """Whether numbers before lines are hours, or count the lines or the steps of one process."""
    numbered = [match for match in matches if match["name"].isdecimal()]
    if 2 * len(numbered) <= len(matches):
        return False
    numbers = [int(match["name"]) for match in numbered]
    times = sum(_MINUTES.match(match.string, match.end()) is not None for match in numbered)
    if times >= _NEARLY_ALL_SHARE * len(numbered) and max(numbers) < _HOURS_PER_DAY:
        return True
    is_rising = all(earlier < later for earlier, later in itertools.pairwise(numbers))
    # tasks are numbered from 0, and a file of one task repeats its number
    return len(numbers) >= _MIN_LABELED_LINES and is_rising and numbers[0] > 1


def _is_prefix(text: str) -> bool:
    """Whether a text has nothing but prefixes that are known."""
    return not any(record.text.strip() for record in Prefixes(stamped=True).parse(0, text, Label()))


def _outer(prefix: str) -> str:
    """Return the part before the known prefixes."""
    ends = (match.end() for match in re.finditer(r"\s+", prefix))
    return next((prefix[:end] for end in ends if _is_prefix(prefix[end:])), prefix)


def _skeleton(prefixes: Sequence[str]) -> re.Pattern[str] | None:
    """Return a pattern for the prefixes of tracebacks, with any words in their places;
    None without prefixes.
    """
    if not prefixes:
        return None
    forms = Counter(re.sub(r"[\w.@#-]+", "w", prefix) for prefix in prefixes)
    form, count = forms.most_common(1)[0]
    # no prefix is so long
    if count * 2 <= len(prefixes) or form.strip() == "w" or "w" not in form or len(form) > 40:  # noqa: PLR2004
        return None
    pattern = re.escape(form.rstrip()).replace("w", r"[\w.@#-]+")
    return re.compile(rf"(?P<name>{pattern})(?: |$)")


# A rank in the name that a program gave to an actor of Ray.
_ACTOR_RANK = LazyPattern(r"\brank[ =:]{1,2}(?P<rank>\d{1,6})")


@lru_cache(maxsize=10_000)
def read_prefix(label: Label, prefix: str) -> tuple[Label, bool]:
    """Return a label with what a launcher's prefix contains, and whether torch put it there."""
    parts = launchers.TABLE.read_prefix(prefix)
    rank = parts.get("torch_rank", parts.get("rank"))
    if rank is None and (named := _ACTOR_RANK.search(parts.get("actor", ""))):
        rank = named["rank"]
    numbers: dict[str, Any] = {
        name: int(parts[name]) for name in ("local_rank", "pid", "node_index") if name in parts
    }
    if rank is not None:
        numbers["rank"] = int(rank)
    ip = parts.get("ip", label.ip)
    return (
        label._replace(node=parts.get("node") or label.node or ip, ip=ip, **numbers),
        "torch_rank" in parts,
    )


@lru_cache(maxsize=256)
def _seconds(date: str, time: str) -> int | None:
    try:
        moment = datetime.fromisoformat(f"{date.replace('/', '-')}T{time}").replace(
            tzinfo=timezone.utc
        )
    except ValueError:
        return None
    return int(moment.timestamp())


def _to_ns(date: str, time: str, part: str | None, zone: str | None) -> int | None:
    """Return a time as nanoseconds since the Unix epoch; without a zone it counts as UTC."""
    seconds = _seconds(date, time)
    if seconds is None:
        return None
    if zone and zone != "Z":
        seconds -= (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60) * (1 if zone[0] == "+" else -1)
    return seconds * 1_000_000_000 + int((part or "0").ljust(9, "0"))


def parse_time_ns(text: str) -> int | None:
    """Return the time with which a text begins, nanoseconds since the Unix epoch, or None if the
    text doesn't begin with a time.
    """
    stamp = _STAMP.match(text)
    return _to_ns(stamp["date"], stamp["time"], stamp["part"], stamp["zone"]) if stamp else None


_SUCCESSES = {"success", "successful", "succeeded", "completed", "finished", "ok"}
"""Values of the field "status" that are kept:
the message of a record may have no word on its outcome.
"""

# A level at which an object of JSON is about a failure.
_FAILURE_LEVEL = LazyPattern(r"(?i)error|fatal|critical")

# Begins a line of a text that is a traceback.
_TRACEBACK_LINE = LazyPattern(r"\s|\[|Traceback|\w+:[ ]")


# --- lines of JSON --------------------------------------------------------------------------------


def _split_object(record: LogRecord) -> Iterable[LogRecord]:
    """Yield the lines in a record that is an object, or the record itself."""
    fields = parse_object(record.text)
    if not fields:
        return [record]
    return _split_json(record.number, fields, record.label, record.time_ns)


def _split_json(
    number: int,
    fields: dict[str, Any],
    label: Label,
    time_ns: int | None,
) -> Iterable[LogRecord]:
    """Yield the lines in an object: its message and its traceback."""
    inner = [value for value in fields.values() if isinstance(value, dict)]
    inner = [
        *(deep for value in inner for deep in value.values() if isinstance(deep, dict)),
        *inner,
    ]
    values = {key: value for part in (*inner, fields) for key, value in part.items()}
    values |= {key.lower(): value for key, value in values.items() if key.lower() not in values}
    rank = next(
        (values[name] for name in _RANK_KEYS if str(values.get(name, "")).isdecimal()), None
    )
    node = next((str(values[name]) for name in _NODE_KEYS if isinstance(values.get(name), str)), "")
    label = label._replace(rank=label.rank if rank is None else int(rank), node=label.node or node)
    if str(values.get("local_rank", "")).isdecimal():
        label = label._replace(local_rank=int(values["local_rank"]))
    for name in TIME_KEYS:
        time_ns = time_ns or parse_time_ns(str(values.get(name, "")))
    texts = [value for value in values.values() if isinstance(value, str) and " " in value]
    named = (values[name] for name in MESSAGE_KEYS if isinstance(values.get(name), str))
    message = next(named, max(texts, key=len, default=""))
    outcome = str(values.get("status") or values.get("outcome") or "")
    if outcome.lower() in _SUCCESSES and "\n" not in message:
        message = f"{message} status={outcome}"
    level = str(values.get("level", values.get("levelname", values.get("severity", ""))))
    traces = (values[name] for name in _TRACEBACK_KEYS if isinstance(values.get(name), str))
    trace = next(filter(str.strip, traces), "")
    # a collector's level is about the stream that a line was printed to
    is_program_level = _FAILURE_LEVEL.fullmatch(level) and values.keys().isdisjoint(
        {"severity", "log"}
    )
    head = (
        f"{level}: {message}"
        if is_program_level and not _TRACEBACK_LINE.match(message)
        else message
    )
    for line in (*head.split("\n"), *(trace.split("\n") if trace != message else ())):
        for text in without_bars(without_colors(line)):
            for record in _PLAIN.parse(number, text, label):
                yield record._replace(time_ns=record.time_ns or time_ns)
