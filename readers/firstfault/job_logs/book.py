"""What a job's logs tell, sorted by who printed it, and by attempt: several may be in one log."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from firstfault.evidence.signatures import Pattern
from firstfault.job_logs.boxes import Boxes
from firstfault.job_logs.launchers import About, Told, told_by, with_code_below
from firstfault.job_logs.lines import read_ahead
from firstfault.job_logs.owners import Owner, Said, learned

if TYPE_CHECKING:
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
"""Tracebacks of one owner, of which the first are kept, and the last one."""
_APART_NS = 1_000_000_000
"""Lines of one attempt are not so much later than its first failure, if a step is printed again."""
_OPENING = 20
"""First lines of an attempt that tell where another one begins."""
_BEGINS = "Traceback (most recent call last)"
_LINK = re.compile(
    r"The above exception was the direct cause|During handling of the above exception"
    r"|terminated with the following error|\bCaught [\w.]+ in |^\s*Original Traceback|RemoteTraceback|^\s*\"\"\""
    r"|\(RANK \d+\)"
)
"""Found above a traceback that belongs to the one before it."""
_OF_FAILURES = Pattern(
    r"(?-i:^\s|^$|Traceback|Error|rror:|^\W*$|^[EWIF]\d{4} |^\[\w*\d*\]?:?\[?[EWF]\d{3,4} |^terminate called"
    r"|^frame #|^Exception |^srun|^slurmstepd|^<|^[-=*]{4}| FAILED *$|_handler\])"
)
"""Found in lines that may follow a failure in the same attempt."""
_VARYING = re.compile(r"0x[0-9a-f]+|\d+|[0-9a-f]{8,}")
_OF_TORCHRUN = re.compile(
    r"torch/distributed/(?:elastic/(?!multiprocessing/errors)|launcher|run)|torch\.distributed\.(?:elastic|run|launcher)"
    r"|\bChildFailedError\b|\btorchrun\b"
)
_OF_AGENT = re.compile(r"[EWIF]\d{4} \d\d:\d\d:\d\d\.\d+ (?P<pid>\d+)?")
"""Begins a line of torch's log in Python."""
_WORLD = re.compile(
    r"\bworld(?:[_ ]?size)?\W{1,3}(?P<world>\d{1,6})\b|\bnranks[ =:](?P<nranks>\d{1,6})\b"
    r"|MEMBER: \d+/(?P<member>\d{1,6})|Starting with (?P<starting>\d{1,6}) processes"
)
_INLINE = re.compile(
    r"^(?:\[[EWIF][^\]\n]{1,120}\] )?\[(?:PG [^\]\n]{0,80}\(default_pg\) )?Rank (?P<rank>\d{1,6})\]"
    r"|\bRankID:(?P<rank_id>\d{1,6})\b|\[rank=(?P<rank_is>\d{1,6}), world=\d|GLOBAL_RANK: (?P<global>\d{1,6}), MEMBER"
)
_PIDS = re.compile(r"\(PID: ?(?P<pid>\d{1,10}),|^\S{0,12} ?\[PID: ?(?P<pid2>\d{1,10})\]")
_OF_NCCL = re.compile(r"^(?P<host>[\w.-]{1,120}):(?P<pid>\d{1,10}):\d{1,10} \[\d{1,3}\] (?:\S+ \S+ )?NCCL ")
_PROGRESS = re.compile(r"(?i)\b(?P<what>global[_ ]?step|step|iteration|iter|batch|epoch)\b\W{0,3}(?P<step>\d{1,9})\b")


class Progress(NamedTuple):
    """A step that a process printed."""

    what: str
    """"step", "epoch"."""
    step: int
    number: int
    """Of the line."""


def progress_in(said: Said) -> Progress | None:
    """Return the step that a line tells; None: it tells none."""
    text = said.text
    if not ("tep" in text or "poch" in text or "iter" in text or "atch" in text):
        return None
    found = _PROGRESS.search(text)
    return Progress(found["what"], int(found["step"]), said.number) if found is not None else None


@dataclass(slots=True)
class Excerpt:
    """A traceback in a log, with the line above it and some below it."""

    lines: list[Said]
    is_mixed: bool = False
    """Whether another traceback begins before this one has named its exception."""
    after: int = 0
    """Lines that its owner printed later, and that are not kept."""


@dataclass(slots=True)
class Stream:
    """What one owner printed in one file and one attempt."""

    file: str
    owner: Owner
    tail: deque[Said] = field(default_factory=deque)
    by_torch: deque[Said] = field(default_factory=lambda: deque(maxlen=_EXCERPT * 2))
    """Lines before which torch put the rank: tracebacks among them were uncaught."""
    excerpts: list[Excerpt] = field(default_factory=list)
    progress: Progress | None = None
    """The last one that was printed."""
    _size: int = 0
    _since: int = 0
    """Lines since the last traceback began."""
    _named: bool = True
    """Whether the last traceback has named its exception."""

    def take(self, said: Said, most: int, progress: Progress | None) -> None:
        """Keep a line as far as there is room."""
        self.progress = progress or self.progress
        self.tail.append(said)
        self._size += len(said.text) + _OF_A_LINE
        while self._size > most and len(self.tail) > 1:
            self._size -= len(self.tail.popleft().text) + _OF_A_LINE
        if said.by_torch:
            self.by_torch.append(said)
        self._excerpt(said)

    def after(self, number: int) -> Stream:
        """Return what was printed from a line on, and keep the rest."""
        later = Stream(self.file, self.owner, progress=self.progress)
        for name in ("tail", "by_torch"):
            lines: deque[Said] = getattr(self, name)
            getattr(later, name).extend(said for said in lines if said.number >= number)
            kept = [said for said in lines if said.number < number]
            lines.clear()
            lines.extend(kept)
        for stream in (self, later):
            stream._size = sum(len(said.text) + _OF_A_LINE for said in stream.tail)  # noqa: SLF001 - its own class
        later.excerpts = [found for found in self.excerpts if found.lines[-1].number >= number]
        self.excerpts = [found for found in self.excerpts if found.lines[-1].number < number]
        return later

    def _excerpt(self, said: Said) -> None:
        self._since += 1
        is_begin = _BEGINS in said.text
        if is_begin and not self._is_linked(said.text):
            mixed = not self._named and self._since < _EXCERPT
            if mixed and self.excerpts:
                self.excerpts[-1].is_mixed = True
            above = list(self.tail)[-2:-1]
            del self.excerpts[_EXCERPTS - 1 :]
            self.excerpts.append(Excerpt([*above, said], is_mixed=mixed))
            self._since, self._named = 0, False
        elif self.excerpts and self._since <= _EXCERPT:
            self.excerpts[-1].lines.append(said)
            self._named = self._named or (bool(said.text.strip()) and not said.text[:1].isspace())
        elif self.excerpts:
            self.excerpts[-1].after += 1

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
    """One attempt of a job, as its logs tell it."""

    streams: dict[tuple[str, Owner], Stream] = field(default_factory=dict)
    told: list[tuple[str, str, Told]] = field(default_factory=list)
    """File and node in which a statement stands, and the statement."""
    boxes: dict[tuple[str, str], Boxes] = field(default_factory=dict)
    """By file and node."""
    world_size: int = 0
    """As a process printed it; 0: not known."""
    is_torchrun: bool = False
    labels_are_nodes: bool = False
    """Whether numbers before lines are those of launchers, not of ranks."""
    failed_at: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """By file, node and agent: the line in which an agent of torch told that a worker had failed."""
    went_on: dict[tuple[str, str], int] = field(default_factory=dict)
    """By file and node: the first line after that in which something else than a failure is told."""

    def move(self, to: Attempt, file: str, node: str) -> None:
        """Move what was printed after its agents had gone on into another attempt."""
        begin = self.went_on.pop((file, node))
        for (of, owner), stream in list(self.streams.items()):
            if of == file and owner.node == node:
                to.streams[of, owner] = later = stream.after(begin)
                if not stream.tail:
                    del self.streams[of, owner]
                if not later.tail:
                    del to.streams[of, owner]
        for told in [told for told in self.told if told[:2] == (file, node) and told[2].number >= begin]:
            self.told.remove(told)
            to.told.append(told)
        to.is_torchrun, to.labels_are_nodes = self.is_torchrun, self.labels_are_nodes
        to.world_size = max(to.world_size, self.world_size)


class Book:
    """Sorts the lines of a job's logs."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = [Attempt()]
        self.lines = 0

    def read(self, lines: Iterable[NumberedLine], file: str, owner: Owner, attempt: int = 0) -> None:
        """Take all lines of one file.

        Args:
            lines: of the file.
            file: its name, for references.
            owner: who wrote it, as far as its name tells.
            attempt: the number of its first attempt.
        """
        first, everything = read_ahead(lines, _AHEAD)
        prefixes = learned([line for _, line in first])
        of_nodes: dict[str, _Boundaries] = defaultdict(lambda: _Boundaries(attempt))
        for number, line in everything:
            self.lines += 1
            for said in prefixes.said(number, line, owner):
                boundaries, progress = of_nodes[said.owner.node], progress_in(said)
                if boundaries.begins_another(said, progress, self._at(boundaries.attempt)):
                    boundaries.attempt += 1
                self._take(self._at(boundaries.attempt), said, progress, (file, boundaries))
        for node, boundaries in of_nodes.items():
            last = self._at(boundaries.attempt)
            # an agent that gives up prints a box
            has_box = any(boxes.entries for (of, _), boxes in last.boxes.items() if of == file)
            if last.failed_at and (file, node) in last.went_on and not has_box:
                last.move(self._at(boundaries.attempt + 1), file, node)

    def _at(self, number: int) -> Attempt:
        while len(self.attempts) <= number:
            self.attempts.append(Attempt())
        return self.attempts[number]

    def _take(self, attempt: Attempt, said: Said, progress: Progress | None, where: tuple[str, _Boundaries]) -> None:
        text, owner, (file, boundaries) = said.text, said.owner, where
        node = owner.node or ("" if owner.label is None else f"task {owner.label}")
        boxes = attempt.boxes.get((file, node)) or attempt.boxes.setdefault((file, node), Boxes())
        is_boxed = boxes.take(said.number, text)
        if is_boxed or (("torch" in text or "ChildFailed" in text) and _OF_TORCHRUN.search(text)):
            attempt.is_torchrun = True
            attempt.labels_are_nodes |= owner.label is not None
        if is_boxed or not text.strip():
            boundaries.ended |= boxes.ended
            return
        attempt, is_told = self._take_told(attempt, said, (file, node), boundaries)
        owner = _with_inline(owner, text)
        attempt.labels_are_nodes |= owner.label is not None and owner.rank not in {None, owner.label}
        if len(attempt.streams) >= _MOST:
            owner = Owner(node=owner.node)
        stream = attempt.streams.get((file, owner)) or attempt.streams.setdefault((file, owner), Stream(file, owner))
        if attempt.failed_at and not said.by_torch and _OF_FAILURES.search(text) is None:
            attempt.went_on.setdefault((file, node), said.number)
        if is_told or _OF_AGENT.match(text):
            stream.end_excerpt()
        if not is_told:
            stream.take(said, _TAIL if len(attempt.streams) < _MANY else _SMALL_TAIL, progress)

    def _take_told(
        self, attempt: Attempt, said: Said, where: tuple[str, str], boundaries: _Boundaries
    ) -> tuple[Attempt, bool]:
        """Take what a line tells about processes and the job; return its attempt, and whether it told of processes."""
        text, is_told = said.text, False
        if attempt.told and ("Exit code" in text or "EXIT CODE" in text):
            attempt.told[-1] = (*attempt.told[-1][:2], with_code_below(attempt.told[-1][2], text))
        for told in told_by(said.number, text):
            is_told = True
            if not (told.ranks or told.tasks or told.local_rank is not None):  # its prefix may name it
                ranks, tasks = ((one,) if one is not None else () for one in (said.owner.rank, said.owner.label))
                told = replace(told, ranks=ranks, tasks=() if ranks else tasks)  # noqa: PLW2901
            attempt = self._after_restart(attempt, told, where, boundaries)
            if len(attempt.told) < _MOST:
                attempt.told.append((*where, told))
            boundaries.restarted |= told.about is About.RESTARTED
            is_end = told.about is About.ENDED and told.local_rank is None
            boundaries.ended |= is_end or told.about is About.TERMINATED
            boundaries.failed_ns = boundaries.failed_ns or said.time_ns or 0
        if "orld" in text or "nranks" in text or "MEMBER" in text or "Starting with" in text:
            for found in _WORLD.finditer(text):
                attempt.world_size = max(attempt.world_size, int(next(filter(None, found.groups()))))
        return attempt, is_told

    def _after_restart(self, attempt: Attempt, told: Told, where: tuple[str, str], boundaries: _Boundaries) -> Attempt:
        """Return the attempt to which a statement belongs: torch's agent tells once in each that a worker failed."""
        agent = _OF_AGENT.match(told.text)
        key = (*where, (agent["pid"] or "") if agent is not None else "")
        has_failed = key in attempt.failed_at
        if told.about is About.ENDED and told.local_rank is not None:
            if has_failed and where in attempt.went_on:
                boundaries.attempt += 1
                attempt.move(self._at(boundaries.attempt), *where)
                attempt = self._at(boundaries.attempt)
            attempt.failed_at[key] = told.number
        # an agent that has told of a failure stops workers of the next attempt
        if told.about is About.ENDED or (told.about is About.STOPPED and not has_failed):
            attempt.went_on.pop(where, None)
        return attempt


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


@dataclass(slots=True)
class _Boundaries:
    """Tells where another attempt of one node begins in one file."""

    attempt: int = 0
    """The current one."""
    ended: bool = False
    """Whether a launcher has told that its processes ended."""
    restarted: bool = False
    failed_ns: int | None = None
    """When something was told of a process's end; 0: it was, without a time; None: nothing was."""
    _steps: dict[Owner, int] = field(default_factory=dict)
    _opening: set[str] = field(default_factory=set)
    _count: int = 0
    """Lines of the attempt that may begin one."""

    def begins_another(self, said: Said, progress: Progress | None, attempt: Attempt) -> bool:
        """Whether a line begins another attempt: the launcher said so, or the log's first lines come again."""
        if self.restarted:
            self.restarted = False
            is_first = any(stream.excerpts for stream in attempt.streams.values()) or any(
                told.about is About.ENDED for _, _, told in attempt.told
            )
            if is_first:
                self.ended = False
                return True
        if progress is not None and not said.by_torch:
            return self._starts_over(said, progress.step)
        if not self.ended and self._count > _OPENING and not self._opening:
            return False
        if said.by_torch or _OF_FAILURES.search(said.text) is not None:
            self._count += _OPENING * bool(said.text.strip())  # what follows may be of the failure
            return False
        shape = _VARYING.sub("#", said.text.strip())[:200]
        self._count += 1
        if self.ended and shape in self._opening:
            self.ended, self.failed_ns, self._count, self._steps = False, None, 1, {}
            return True
        if self._count <= _OPENING:
            self._opening.add(shape)
        elif not self.ended:
            self._opening.discard(shape)  # any part of a log may have it
        return False

    def _starts_over(self, said: Said, step: int) -> bool:
        """Whether an owner prints an earlier step than before, after something was told of a process's end."""
        last = self._steps.get(said.owner, -1)
        self._steps[said.owner] = step
        if self.failed_ns is None or step >= last:
            return False
        # of several processes one may be behind the others
        is_later = bool(self.failed_ns) and (said.time_ns or 0) - self.failed_ns > _APART_NS
        if said.owner.is_process or is_later:
            self.ended, self.failed_ns, self._count, self._steps = False, None, 0, {said.owner: step}
            return True
        return False


def streams_in_order(attempt: Attempt) -> Iterator[Stream]:
    """Yield the streams by file and first line that is kept."""
    kept = (stream for stream in attempt.streams.values() if stream.tail)
    yield from sorted(kept, key=lambda stream: (stream.file, stream.tail[0].number))
