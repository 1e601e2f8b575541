"""The contents of a job's logs by process and by attempt: one log may have several."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from firstfault.job_logs.attempts import OF_AGENT, Course, Progress, Split, progress_in
from firstfault.job_logs.boxes import Boxes, Entry
from firstfault.job_logs.exports import FrameIndenter, read_export
from firstfault.job_logs.launchers import Told, code_below, told_by
from firstfault.job_logs.lines import TRACEBACK, read_ahead
from firstfault.job_logs.owners import Owner, Said, learned, owner_of_file

if TYPE_CHECKING:
    from firstfault.job_logs.attempts import Where
    from firstfault.job_logs.lines import NumberedLine

_AHEAD = 1000
"""Lines from which prefixes are learned."""
_TAIL = 32 * 1024
"""Characters of the end of what each owner printed."""
_SMALL_TAIL = 4 * 1024
_OF_A_LINE = 16
"""What a line costs besides its characters."""
_MANY = 512
"""With more owners than this, less of each is kept."""
_MOST = 20_000
"""Owners, and statements of launchers, of one attempt."""
_EXCERPT = 200
"""Lines from a traceback on."""
_EXCERPTS = 64
"""Tracebacks of one owner, of which the first ones and the last ones are kept."""
_LINK = re.compile(
    r"The above exception was the direct cause|During handling of the above exception"
    r"|terminated with the following error|\bCaught [\w.]+ in |^\s*Original Traceback|RemoteTraceback|^\s*\"\"\""
    r"|\(RANK \d+\)"
)
"""Found above a traceback that belongs to the one before it."""
_OF_TORCHRUN = re.compile(
    r"torch/distributed/(?:elastic/(?!multiprocessing/errors)|launcher|run)|torch\.distributed\.(?:elastic|run|launcher)"
    r"|\bChildFailedError\b|\btorchrun\b"
)
_WORLD = re.compile(
    r"(?:\b|_)(?i:world(?:[_ ]?size)?)\W{1,3}(?P<world>\d{1,6})\b|\bnranks[ =:](?P<nranks>\d{1,6})\b"
    r"|MEMBER: \d+/(?P<member>\d{1,6})|Starting with (?P<starting>\d{1,6}) processes"
    r"|\b[Rr]ank[ :=]{1,2}\d{1,6}(?:/| of )(?P<of>\d{1,6})\b|process_count(?:\(\))?[=: ]{1,2}(?P<count>\d{1,6})\b"
)
_FILE_HEADER = re.compile(r"==> (?P<path>\S+) <==\s*$")
"""Printed by tail and head before the lines of each file."""
_RANK_OF_PID = re.compile(
    r"\b(?:world_|global_)?rank[ =:]{1,2}(?P<rank>\d{1,6})\b[^\n]{0,60}?\bpid[ =:]{1,2}(?P<pid>\d{2,10})\b"
    r"|\bpid[ =:]{1,2}(?P<pid2>\d{2,10})\)?,? (?:world_|global_)?rank[ =:]{1,2}(?P<rank2>\d{1,6})\b"
)
"""A line in which a program or its launcher prints both numbers of a process."""
_HAS_CODE_BELOW = re.compile(r"(?:Exit code|EXIT CODE|KILLED BY SIGNAL):|with errorcode ")
_HAS_WORLD_SIZE = re.compile(r"(?i:orld)|nranks|MEMBER|Starting with|ank.{1,8}(?:/| of )|process_count")
_DECLARED_RANK = re.compile(
    r"^\W{0,3}(?:INFO\W+)?(?:[\w.]+\.)?(?i:(?:global[_ ]?)?rank|process_index(?:\(\))?)\W{1,2}(?P<rank>\d{1,6})\b"
)
_INLINE = re.compile(
    r"^(?:\[[EWIF][^\]\n]{1,120}\] )?\[(?:PG [^\]\n]{0,80}\(default_pg\) )?Rank (?P<rank>\d{1,6})\]"
    r"|\bRankID:(?P<rank_id>\d{1,6})\b|\[rank=(?P<rank_is>\d{1,6}), world=\d|GLOBAL_RANK: (?P<global>\d{1,6}), MEMBER"
)
_PIDS = re.compile(r"\(PID: ?(?P<pid>\d{1,10}),|^\S{0,12} ?\[PID: ?(?P<pid2>\d{1,10})\]")
_OF_NCCL = re.compile(r"^(?P<host>[\w.-]{1,120}):(?P<pid>\d{1,10}):\d{1,10} \[\d{1,3}\] (?:\S+ \S+ )?NCCL ")


@dataclass(slots=True)
class Excerpt:
    """A traceback in a log, with the line above it and some below it."""

    lines: list[Said]
    is_mixed: bool = False
    """Whether another traceback begins before this one has named its exception."""

    @property
    def at(self) -> int:
        """Where it begins in `lines`."""
        return next((at for at, said in enumerate(self.lines[:2]) if TRACEBACK in said.text), 0)


@dataclass(slots=True)
class Stream:
    """What one owner printed in one file."""

    where: Where
    owner: Owner
    tail: deque[Said] = field(default_factory=deque)
    by_torch: deque[Said] = field(default_factory=lambda: deque(maxlen=_EXCERPT * 2))
    """Lines before which torch put the rank: tracebacks among them were uncaught."""
    excerpts: list[Excerpt] = field(default_factory=list)
    progress: Progress | None = None
    """The last one that was printed."""
    declared_ranks: set[int] = field(default_factory=set)
    """Ranks that it printed as its own; several: it's shared by several processes."""
    _size: int = 0
    _since: int = 0
    """Lines since the last traceback began."""
    _named: bool = True
    """Whether the last traceback has named its exception."""

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.where[0]

    def take(self, said: Said, most: int, progress: Progress | None) -> None:
        """Keep a line as far as there is room."""
        self.progress = progress or self.progress
        self.tail.append(said)
        self._size += len(said.text) + _OF_A_LINE
        while self._size > most and len(self.tail) > 1:
            self._size -= len(self.tail.popleft().text) + _OF_A_LINE
        if said.by_torch:
            self.by_torch.append(said)
        if ("ank" in said.text or "process_in" in said.text) and (found := _DECLARED_RANK.match(said.text)):
            self.declared_ranks.add(int(found["rank"]))
        self._excerpt(said)

    def parts(self, split: Split) -> dict[int, Stream]:
        """Return what was printed in each attempt, by its number."""
        found: dict[int, Stream] = {}

        def part(number: int) -> Stream:
            return found.setdefault(
                split.number_of(self.where, number), Stream(self.where, self.owner, declared_ranks=self.declared_ranks)
            )

        for said in self.tail:
            part(said.number).tail.append(said)
        for said in self.by_torch:
            part(said.number).by_torch.append(said)
        for excerpt in self.excerpts:
            begin = excerpt.lines[excerpt.at].number
            of = split.number_of(self.where, begin)
            lines = [said for said in excerpt.lines if split.number_of(self.where, said.number) == of]
            part(begin).excerpts.append(replace(excerpt, lines=lines))
        if self.progress is not None:
            part(self.progress.number).progress = self.progress
        return found

    def _excerpt(self, said: Said) -> None:
        self._since += 1
        is_begin = TRACEBACK in said.text
        if is_begin and not self._is_linked(said.text):
            mixed = not self._named and self._since < _EXCERPT
            if mixed and self.excerpts:
                self.excerpts[-1].is_mixed = True
            above = list(self.tail)[-2:-1]
            del self.excerpts[_EXCERPTS // 2 : -_EXCERPTS // 2]
            self.excerpts.append(Excerpt([*above, said], is_mixed=mixed))
            self._since, self._named = 0, False
        elif self.excerpts and self._since <= _EXCERPT:
            self.excerpts[-1].lines.append(said)
            self._named = self._named or (bool(said.text.strip()) and not said.text[:1].isspace())

    def end_excerpt(self) -> None:
        """Leave out of the last traceback what follows: the last line is another process's."""
        if self.excerpts and self._since <= _EXCERPT:
            self._since, self._named = _EXCERPT + 1, True

    def _is_linked(self, text: str) -> bool:
        if not self.excerpts or self._since > _EXCERPT:
            return False
        return any(_LINK.search(line) for line in (text, *(said.text for said in self.excerpts[-1].lines[-4:])))


@dataclass(slots=True)
class Attempt:
    """One attempt of a job, or all of them, as its logs show it."""

    streams: dict[tuple[Where, Owner], Stream] = field(default_factory=dict)
    told: list[tuple[str, str, Told]] = field(default_factory=list)
    """File and node of a statement, and the statement."""
    entries: list[tuple[str, str, Entry]] = field(default_factory=list)
    """The same of entries in torch's boxes."""
    world_size: int = 0
    """As a process printed it; 0: not known."""
    is_torchrun: bool = False
    rank_by_pid: dict[int, int] = field(default_factory=dict)
    labels_are_nodes: bool = False
    """Whether numbers before lines are those of launchers, not of ranks."""


class Book:
    """Sorts the lines of a job's logs."""

    def __init__(self) -> None:
        self.lines = 0
        self.notes: list[str] = []
        self._indenter = FrameIndenter()
        self._all = Attempt()
        self._courses: dict[Where, Course] = {}
        self._boxes: dict[Where, Boxes] = {}

    def read(self, lines: Iterable[NumberedLine], file: str, owner: Owner) -> None:
        """Take all lines of one file.

        Args:
            lines: of the file.
            file: its name, for references.
            owner: who wrote it, according to its name.
        """
        lines, is_reversed = read_export(lines)
        if is_reversed:
            self.notes.append(f"{file} has its newest line first; lines are numbered from its end")
        first, everything = read_ahead(lines, _AHEAD)
        prefixes = learned([line for _, line in first])
        for number, line in everything:
            self.lines += 1
            if line.startswith("==> ") and (header := _FILE_HEADER.match(line)):
                owner = owner_of_file(header["path"])
                continue
            for said in prefixes.said(number, line, owner):
                self._take(file, said)

    def attempts(self) -> list[Attempt]:
        """Return the attempts in the logs, in order."""
        split, everything = Split(self._courses), self._all
        everything.entries = [(*where, entry) for where, boxes in self._boxes.items() for entry in boxes.entries]
        if split.count == 1:
            return [everything]
        made = [replace(everything, streams={}, told=[], entries=[]) for _ in range(split.count)]
        for key, stream in everything.streams.items():
            for number, part in stream.parts(split).items():
                made[number].streams[key] = part
        for file, node, told in everything.told:
            made[split.number_of((file, node), told.number)].told.append((file, node, told))
        for file, node, entry in everything.entries:
            made[split.number_of((file, node), entry.number)].entries.append((file, node, entry))
        return made

    def _take(self, file: str, said: Said) -> None:
        said = said._replace(text=self._indenter.indent(said.owner, said.text))
        text, owner, everything = said.text, said.owner, self._all
        where = (file, owner.node or ("" if owner.label is None else f"task {owner.label}"))
        course = self._courses.get((file, owner.node)) or self._courses.setdefault((file, owner.node), Course())
        boxes = self._boxes.get(where) or self._boxes.setdefault(where, Boxes())
        is_boxed = boxes.take(said.number, text)
        if is_boxed or (("torch" in text or "ChildFailed" in text) and _OF_TORCHRUN.search(text)):
            everything.is_torchrun = True
            everything.labels_are_nodes |= owner.label is not None
        if boxes.ended:
            course.take_box(said.number, boxes.first_rank)
            boxes.ended = False
        if is_boxed or not text.strip():
            return
        progress = progress_in(said)
        is_told = self._take_told(said, where, course)
        if not is_told:
            course.take(said, progress)
        owner = _with_inline(owner, text)
        everything.labels_are_nodes |= owner.label is not None and owner.rank not in {None, owner.label}
        if len(everything.streams) >= _MOST:
            owner = Owner(node=owner.node)
        key = ((file, said.owner.node), owner)
        stream = everything.streams.get(key) or everything.streams.setdefault(key, Stream(*key))
        if is_told or OF_AGENT.match(text):
            stream.end_excerpt()
        if not is_told:
            stream.take(said, _TAIL if len(everything.streams) < _MANY else _SMALL_TAIL, progress)

    def _take_told(self, said: Said, where: Where, course: Course) -> bool:
        """Take a line's statements about processes and the job; return whether it had one about processes."""
        text, everything, told = said.text, self._all, told_by(said.number, said.text)
        if everything.told and _HAS_CODE_BELOW.search(text):
            everything.told[-1] = (*everything.told[-1][:2], code_below(everything.told[-1][2], text))
        if told is not None and len(everything.told) < _MOST:
            course.take_told(said, told)
            if not (told.ranks or told.tasks or told.local_rank is not None):  # its prefix may name it
                ranks, tasks = ((one,) if one is not None else () for one in (said.owner.rank, said.owner.label))
                told = replace(told, ranks=ranks, tasks=() if ranks else tasks)
            everything.told.append((*where, told))
        if _HAS_WORLD_SIZE.search(text):
            for size in _WORLD.finditer(text):
                everything.world_size = max(everything.world_size, int(next(filter(None, size.groups()))))
        if "ank" in text and "pid" in text and (found := _RANK_OF_PID.search(text)):
            everything.rank_by_pid[int(found["pid"] or found["pid2"])] = int(found["rank"] or found["rank2"])
        return told is not None


def _with_inline(owner: Owner, text: str) -> Owner:
    """Return an owner with the rank and the process that a line of native code names as its own."""
    names_a_rank = owner.rank is None and ("Rank" in text or "RANK" in text or "[rank=" in text)
    if names_a_rank and (found := _INLINE.search(text)):
        owner = owner._replace(rank=int(next(filter(None, found.groups()))))
    if owner.pid is None and "PID" in text and (found := _PIDS.search(text)):
        owner = owner._replace(pid=int(found["pid"] or found["pid2"]))
    if " NCCL " in text and (found := _OF_NCCL.match(text)):
        owner = owner._replace(pid=owner.pid or int(found["pid"]), node=owner.node or found["host"])
    return owner
