"""Weighs the evidence for and against an attempt's completion in its logs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.credentials import redact
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault.utils.text import one_line
from firstfault_logs.attempts import VARYING_PART, Progress, find_progress, find_step_position
from firstfault_logs.completion.noise import (
    drop_ignored_exceptions,
    drop_teardown_noise,
    find_doubts,
    is_at_exit,
)
from firstfault_logs.completion.rounds import (
    find_end_of_last_round,
    find_outer_bar,
    find_summary,
    get_shape,
    is_last_round_cut,
)
from firstfault_logs.completion.words import (
    FAILURE_REPORT,
    NEGATION,
    CompletionKind,
    find_completion_kind,
    is_early_stop,
    is_noise,
    is_success_of_anything,
    shows_more_work,
)
from firstfault_logs.framing.lines import EXCEPTION_LINE, FINISHED_BAR
from firstfault_logs.framing.ranks import DECLARED_RANK, LOGGED_RANK
from firstfault_logs.launchers import ReportKind
from firstfault_logs.tracebacks import MAX_LINES_AFTER_END, find_tracebacks, starts_at_program

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt, Stream
    from firstfault_logs.completion.loops import Loop
    from firstfault_logs.framing.labels import LogRecord
    from firstfault_logs.tracebacks import Traceback


MIN_STEPS_RESUMED = 2
"""Steps that a training prints if it goes on; a line below its end may name one,
as "best epoch 7" does.
"""
MAX_LATER_LINES = 40
"""Lines, apart from noise and repetitions, that a program may print below a sentence about its end.
"""
_MIN_RANKS = 2
_MAX_TAIL_LINES = 1000
"""Lines at the end of each stream that are weighed; of many streams, fewer."""
_MAX_STREAMS_WITH_LONG_TAILS = 64
_MAX_LINES_DOUBTED = 100
"""Lines above a result in which a failure takes its value away."""

# A measure of what was done: "loss 0.1", "step_avg:173.82ms"
_MEASURE = LazyPattern(
    r"(?i)\b(?:\w*loss|\w*acc\w*|\w*time\w*|ppl|perplexity|score|reward|f1|\w*avg|error)\b\W{0,3}\d"
)

# A counter without a total
_OPEN_COUNTER = LazyPattern(
    r"(?i)\b(?P<what>epoch|step|iteration|iter|batch)\b\W{0,3}\d+(?![\d.]*\d?\s*(?:/|of\b))(?!\d)"
)

# The last words of ranks that end
_LAST_WORDS = LazyPattern(
    r"(?i)\b(?:done|finish\w*|complet\w*|exit\w*|bye|destroy\w*|shut\w*|succe\w+)\b"
)
_TEST_METRIC = LazyPattern(
    r"""(?i)
            \btest(?:ing)?[ _](?:\w+[ _]){0,2}
            (?:accuracy|acc|loss|score|error|bleu|perplexity|ppl|m?ap|auc|wer|f1|rmse)\b
            [^\n]{0,20}\d
        """
)
_ONE_OF_SEVERAL = LazyPattern(
    r"(?i)\b(?:fold|trial|run|patient|subject|seed|split|repeat|task)\b\W{0,3}\d"
)
_METRIC = LazyPattern(
    r"""(?i)
            \b(?:accuracy|acc|loss|score|bleu|perplexity|ppl|m?ap|auc|wer|f1|rmse|metric\w*)\b[^\n]{0,40}\d
        """
)


@dataclass(frozen=True, slots=True)
class CompletionProof:
    """The lines that prove that a job had finished."""

    kind: CompletionKind
    file: str
    number: int
    """Number of the first line of the proof. Failures below it are of the teardown."""
    last: int
    """Number of the last line of the proof."""
    text: str
    doubt: str = ""
    """A line below that reports a failure."""
    noise: str = ""
    """A line below that reports what matters no more."""

    def describe(self) -> str:
        """Return a sentence with the proof."""
        return f"line {self.number} reports its end: {_quote(self.text)}"

    def describe_with_noise(self) -> str:
        """Return the same with what is ignored below it."""
        return (
            f"{self.describe()}; ignored below it: {_quote(self.noise)}"
            if self.noise
            else self.describe()
        )


def find_completion(attempt: Attempt) -> CompletionProof | None:
    """Return the proof that an attempt had finished, or None if there is none."""
    for file, _, report in attempt.reports:
        if report.kind is ReportKind.SUCCEEDED:
            return CompletionProof(
                CompletionKind.STATUS,
                file,
                report.number,
                report.number,
                report.text,
            )
    by_file: dict[str, list[Stream]] = {}
    for stream in attempt.streams.values():
        by_file.setdefault(stream.file, []).append(stream)
    proofs = [one for streams in by_file.values() if (one := _weigh(attempt, streams)) is not None]
    return max(proofs, key=lambda one: one.kind, default=None)


def _weigh(attempt: Attempt, streams: Sequence[Stream]) -> CompletionProof | None:
    """Return the proof in the lines of one file."""
    max_lines = _MAX_TAIL_LINES if len(streams) <= _MAX_STREAMS_WITH_LONG_TAILS else MAX_LATER_LINES
    tails = [list(itertools.islice(reversed(stream.tail), max_lines))[::-1] for stream in streams]
    tail = sorted(itertools.chain.from_iterable(tails), key=lambda record: record.number)
    last_step = _find_last_step(streams, tail)
    opening = attempt.openings.get(streams[0].file, [])
    candidates = {
        record.number: (kind, record) for kind, record in _list_candidates(streams, tails)
    }
    words = [number for number, (kind, _) in candidates.items() if kind >= CompletionKind.WORD]
    if words and (last_word := max(words)) < last_step:
        tail = list(drop_steps_of_peers(tail, last_word))
        last_step = _find_last_step(streams, tail)
    later = [one for number, one in sorted(candidates.items()) if number >= last_step]
    for least in (
        CompletionKind.STATUS,
        CompletionKind.WORD,
        CompletionKind.RESULT,
        CompletionKind.COUNTER,
    ):
        proofs = [(kind, record) for kind, record in later if kind >= least]
        if not proofs:
            continue
        (kind, first), (_, last) = proofs[0], proofs[-1]
        if least <= CompletionKind.RESULT:
            above = [record for record in tail if last_step < record.number < last.number][
                -_MAX_LINES_DOUBTED:
            ]
            if _has_failed_before(attempt, streams[0].file, above, last.number):
                continue
        if is_started_again(opening, tail, last.number):
            continue
        if least < CompletionKind.STATUS and _has_raised_before(streams, last_step, last.number):
            continue
        if is_success_of_anything(last.text) and not _is_below_training(streams, tail, last):
            continue
        if least is CompletionKind.STATUS or _is_near_end(tail, last.number):
            last_number = max(
                record.number
                for kind, record in later
                if kind >= CompletionKind.RESULT or record is last
            )
            below = drop_ignored_exceptions(
                record for record in tail if record.number > last_number
            )
            doubts = (
                [] if least is CompletionKind.STATUS else find_doubts(drop_teardown_noise(below))
            )
            noise = _find_noise([record for record in tail if record.number > first.number])
            doubt = doubts[-1].text if doubts else ""
            return CompletionProof(
                kind,
                streams[0].file,
                first.number,
                last_number,
                first.text,
                doubt,
                noise,
            )
    return None


def _find_noise(records: Sequence[LogRecord]) -> str:
    """Return the last line about an exception that ended nothing, or "" if there is none."""
    noise = (
        record.text for record in reversed(records) if EXCEPTION_LINE.match(record.text.strip())
    )
    return next(noise, "")


def _quote(text: str) -> str:
    return repr(one_line(redact(text.strip()), 100))


def _find_last_step(streams: Sequence[Stream], tail: Sequence[LogRecord]) -> int:
    """Return the number of the line from which on the training printed at most one further step.

    A line below its end may name a step, as "best epoch: 7" does.
    """
    begin = tail[0].number if tail else 0
    above = [
        one.progress.number
        for one in streams
        if one.progress is not None and one.progress.number < begin
    ]
    places: set[tuple[float, ...]] = set()
    for record in reversed(tail):
        step = find_training_step(record)
        if step is not None:
            places.add(find_step_position(step, record.text))
            if len(places) >= MIN_STEPS_RESUMED:
                return record.number
    return max(above, default=0)


def _is_below_training(
    streams: Sequence[Stream], tail: Sequence[LogRecord], end: LogRecord
) -> bool:
    """Whether a line is below all steps of a training. Earlier phases may succeed, too."""
    has_trained = any(stream.progress is not None for stream in streams)
    return has_trained and not any(
        one.number > end.number and _is_step_of_training(one) for one in tail
    )


def _is_step_of_training(record: LogRecord) -> bool:
    return find_training_step(record) is not None


def _list_candidates(
    streams: Sequence[Stream], tails: Sequence[Sequence[LogRecord]]
) -> Iterator[tuple[CompletionKind, LogRecord]]:
    """Yield lines that may prove a completion: the ends of streams, and lines kept from above."""
    last_lines: list[LogRecord] = []
    for stream, tail in zip(streams, tails, strict=True):
        near_end = list(
            itertools.islice(
                (one for one in reversed(tail) if not is_noise(one.text)), MAX_LATER_LINES
            )
        )
        begin = near_end[-1].number if near_end else 0
        kept = (
            record for record in stream.completions or () if record.number < begin or not near_end
        )
        loop = stream.loops.find_finished()
        for record in itertools.chain(kept, near_end):
            if (kind := find_completion_kind(record.text)) is not None:
                yield from [(kind, record)] if _ends_last_training(stream, record) else []
            elif _is_finished_bar(record.text) or (
                loop is not None
                and record.number == loop.number
                and _has_only_full_counters(record.text, loop)
                and not is_last_round_cut(tail, loop)
            ):
                yield CompletionKind.COUNTER, record
        yield from ((CompletionKind.COUNTER, end) for end in _find_ends_of_rounds(stream, streams))
        # a test follows the last epoch, also where only the heading of that epoch has its number
        has_tested = near_end and _TEST_METRIC.search(near_end[0].text) is not None
        if has_tested and loop is not None and loop.number < near_end[0].number:
            yield CompletionKind.COUNTER, near_end[0]
        if stream.label.is_process and near_end:
            last_lines.append(near_end[0])
    if alike := _find_last_words(streams, last_lines):
        yield CompletionKind.WORD, alike


def _ends_last_training(stream: Stream, stop: LogRecord) -> bool:
    """Whether a line isn't about the early stop of a training that others may follow:
    each fold may stop early.
    """
    if not is_early_stop(stop.text):
        return True
    shape = get_shape(stop.text)
    records = [*(stream.completions or ()), *stream.tail]
    if not any(one.number < stop.number and get_shape(one.text) == shape for one in records):
        return True
    earlier = {get_shape(one.text) for one in records if one.number <= stop.number}
    below = [one for one in stream.tail if one.number > stop.number and not is_noise(one.text)]
    if any(get_shape(one.text) not in earlier for one in below):
        return True
    has_tested = any(_TEST_METRIC.search(one.text) for one in below)
    return has_tested and not any(_ONE_OF_SEVERAL.search(one.text) for one in stream.tail)


def _find_ends_of_rounds(stream: Stream, streams: Sequence[Stream]) -> Iterator[LogRecord]:
    """Yield what shows that an outer loop has ended: its last round is whole, its bar is full,
    or a summary follows.
    """
    totals: dict[str, set[int]] = {}
    for one in streams:
        for unit, configured in one.loops.configured.items():
            totals.setdefault(unit, set()).update(configured)
    for loop in stream.loops.list_ended(totals):
        if (end := find_end_of_last_round(stream.tail, loop)) is not None:
            yield end
    for record in (
        find_outer_bar(stream.tail, stream.loops),
        find_summary(stream.tail, stream.loops),
    ):
        if record is not None:
            yield record


def _find_last_words(streams: Sequence[Stream], last: Sequence[LogRecord]) -> LogRecord | None:
    """Return the last of the lines with which all ranks of a job ended,
    if they are alike and about an end.
    """
    ranks = {
        stream.label.rank if stream.label.rank is not None else stream.label.task
        for stream in streams
    }
    ranks.discard(None)
    shapes = {VARYING_PART.sub("#", record.text.strip()) for record in last}
    if (
        len(shapes) != 1
        or len(ranks) < _MIN_RANKS
        or ranks != set(range(len(ranks)))
        or len(last) < len(ranks)
    ):
        return None
    text = last[0].text
    is_end = _LAST_WORDS.search(text) and find_progress(last[0]) is None
    if not is_end or FAILURE_REPORT.search(text) or NEGATION.search(text):
        return None
    return max(last, key=lambda record: record.number)


def _is_finished_bar(text: str) -> bool:
    """Whether a line has the bar of an outer loop at its end."""
    bar = FINISHED_BAR.match(text) if "100%|" in text else None
    return bar is not None and bar["step"] == bar["total"]


def _has_only_full_counters(text: str, loop: Loop) -> bool:
    """Whether a line is about finished steps, none of its counters is below its end,
    and none lacks one.

    A counter alone may be the heading of the last epoch, which begins. The epoch needs no end if
    the loop counts steps beyond the end of an epoch.
    """
    if not _MEASURE.search(text):
        return False
    pairs = re.findall(r"(?<![\d.])(\d{1,9}) ?/ ?(\d{1,9})(?![\d.])", text)
    if not all(int(step) >= int(total) for step, total in pairs):
        return False
    counters = (counter["what"].lower() for counter in _OPEN_COUNTER.finditer(text))
    return all(what == "epoch" and loop.spans_epochs for what in counters)


def _has_failed_before(
    attempt: Attempt,
    file: str,
    above: Iterable[LogRecord],
    number: int,
) -> bool:
    """Whether something failed between the last step and a result,
    which a wrapper prints in any case.
    """
    ends = {ReportKind.ENDED, ReportKind.LOST, ReportKind.TERMINATED, ReportKind.OOM}
    has_end = any(
        of == file and report.kind in ends and report.number < number
        for of, _, report in attempt.reports
    )
    return has_end or bool(attempt.entries) or bool(find_doubts(above))


def _has_raised_before(streams: Sequence[Stream], last_step: int, number: int) -> bool:
    """Whether a traceback is above a line and below the last step, and nothing shows
    that the program went on.

    A program that logs its exception and exits, and one that goes on to its end, print the same.
    The script that started it may print the line.
    """
    return any(
        last_step < traceback.lines[0] < number
        and not traceback.is_handled
        and not is_at_exit([frame.function for frame in traceback.exception.frames])
        and not _was_survived(traceback, streams)
        and not _prints_much_between(traceback.stream, traceback.lines[1], number)
        for stream in streams
        for traceback in find_tracebacks(stream)
    )


def _was_survived(traceback: Traceback, streams: Sequence[Stream]) -> bool:
    """Whether the same process caught an exception and then reported its success,
    or another process trained on without it.
    """
    if not traceback.stream.label.is_process:
        return False
    trained_on = any(
        one.label.is_process
        and one.progress is not None
        and one.progress.number > traceback.lines[1]
        for one in streams
    )
    return trained_on or (
        traceback.is_before_success and not starts_at_program(traceback.exception)
    )


def _prints_much_between(stream: Stream, begin: int, end: int) -> bool:
    """Whether a process printed steps or many other lines between two lines."""
    # of more lines than are kept, the last ones are
    if stream.has_steps_after(begin) or (stream.tail and stream.tail[0].number > begin):
        return True
    between = (record for record in stream.tail if begin < record.number < end)
    return sum(not is_noise(record.text) for record in between) > MAX_LINES_AFTER_END


def _is_near_end(tail: Sequence[LogRecord], number: int) -> bool:
    """Whether little but noise follows a line, and no other work that isn't finished, too."""
    below = [record for record in tail if record.number > number and not is_noise(record.text)]
    shapes = {VARYING_PART.sub("#", record.text)[:80] for record in below}
    if len(shapes) > MAX_LATER_LINES:
        return False
    work = [at for at, record in enumerate(below) if shows_more_work(record.text)]
    return not work or any(_METRIC.search(record.text) for record in below[work[-1] :])


_NOT_OF_TRAINING = LazyPattern(
    r"""(?i)
        \b(?:eval\w*|val|valid\w*|test\w*|infer\w*|predict\w*|best)\b
        [^\n]{0,40}?(?:step|iter\w*|epoch|batch)\W{0,3}\d
    """
)


def find_training_step(record: LogRecord) -> Progress | None:
    """Return the training step in a line, or None if it has none or that of an evaluation."""
    progress = find_progress(record)
    if progress is None or is_noise(record.text):
        return None
    return None if _NOT_OF_TRAINING.search(record.text) else progress


def drop_steps_of_peers(tail: Sequence[LogRecord], number: int) -> Sequence[LogRecord]:
    """Return the lines without steps below an end that show no further work; otherwise all lines.

    A program may print all its lines when it exits if its stdout is a file or a pipe, so each
    rank's steps are in one piece. Steps below the end belong to the same training if each line has
    a rank, each rank's steps are above or below the end, and all ranks stop at the same step.

    Args:
        tail: the last lines of a file, in order.
        number: of the line that reports the end.
    """
    last_steps: dict[int, dict[str, int]] = {}
    above: set[int] = set()
    dropped: set[int] = set()
    for record in tail:
        step = find_training_step(record)
        if step is None:
            continue
        rank = _find_rank(record)
        unit = step.what.lower()
        is_below = record.number > number
        if rank is None or (is_below and rank in above):
            return tail
        last_of_rank = last_steps.setdefault(rank, {})
        if step.step < last_of_rank.get(unit, 0):
            return tail
        last_of_rank[unit] = step.step
        dropped.update([record.number] if is_below else [])
        above.update([] if is_below else [rank])
    first = next(iter(last_steps.values()), None)
    if not above or any(one != first for one in last_steps.values()):
        return tail
    return [record for record in tail if record.number not in dropped]


def _find_rank(record: LogRecord) -> int | None:
    """Return the rank that a line gives as its process's, or None if it gives none."""
    if record.label.rank is not None:
        return record.label.rank
    forms = (LOGGED_RANK, DECLARED_RANK)
    named = next(filter(None, (form.match(record.text) for form in forms)), None)
    return int(named["rank"]) if named is not None else record.label.task


_MIN_OPENING_LINES = 3
"""Different lines of an opening that show a start when they come again."""
_MIN_OPENING_SHARE = 0.5
"""A start prints at least this part of its opening again; the rest may depend on options."""
_MIN_LETTERS = 8
"""Shorter lines, such as a closing bracket, may be anywhere in a log."""
_MAX_STEPS_BEHIND = 1
"""A slow rank may print an earlier step than the fastest one did."""

_NO_LETTER = re.compile(r"[^a-zA-Z]+")
_MENTIONED = re.compile(
    r"(?i)\b(?:best|eval\w*|valid\w*|test\w*|infer\w*|predict\w*"
    r"|load\w*|resum\w*|sav\w*|checkpoint\w*)\b"
)


def is_started_again(opening: Iterable[LogRecord], tail: Sequence[LogRecord], number: int) -> bool:
    """Whether below a line the first lines of a log came again, or a step far below earlier ones.

    Args:
        opening: the first lines of a file.
        tail: its last lines, in order.
        number: of a line that reports an end.
    """
    below = [record for record in tail if record.number > number]
    if not below:
        return False
    if _repeats_opening(opening, below, number):
        return True
    return any(find_progress(record) is not None for record in below) and _falls_back(tail, number)


def _repeats_opening(opening: Iterable[LogRecord], below: Iterable[LogRecord], number: int) -> bool:
    first = _list_shapes(record for record in opening if record.number < number)
    again = first & _list_shapes(below)
    return len(again) >= max(_MIN_OPENING_LINES, len(first) * _MIN_OPENING_SHARE)


def _list_shapes(records: Iterable[LogRecord]) -> set[str]:
    shapes = (get_shape(record.text) for record in records if not is_noise(record.text))
    return {shape for shape in shapes if len(_NO_LETTER.sub("", shape)) >= _MIN_LETTERS}


def _falls_back(tail: Iterable[LogRecord], number: int) -> bool:
    max_steps: dict[tuple[str, str], int] = {}
    for record in tail:
        progress = find_progress(record)
        if progress is None or is_noise(record.text) or _MENTIONED.search(record.text):
            continue
        kind = (progress.what.lower(), get_shape(record.text))
        if record.number > number and progress.step < max_steps.get(kind, -1) - _MAX_STEPS_BEHIND:
            return True
        if record.number < number:
            max_steps[kind] = max(max_steps.get(kind, -1), progress.step)
    return False
