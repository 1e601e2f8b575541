"""Exceptions with their causes: formatted as Python prints them, found in a text, and traced to the first cause.

A DataLoader, a process pool, ``torch.multiprocessing``, joblib, Ray and many programs raise an exception whose text, or
whose cause's text, has the traceback of a worker process. What a program raises is often a wrapper:
`TrainingError("training failed")` from the error that tells why. Or it is the failure of a clean-up, which ran while
the first exception was being handled.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from firstfault.model import ExceptionInfo, FrameInfo
from firstfault.text import counted

REMOTE = "remote"
"""The relation of an exception to the one that was raised for it in this process."""
_LIBRARY = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|lib/python\d[\d.]*|flytekitplugins/firstfault|firstfault_torch)/"
    r"|^<(?!dynamic-code>|ipython-input)"  # a function that cloudpickle made, a notebook's cell
)
_OURS = re.compile(r"(?:flytekitplugins/firstfault|firstfault_torch)/")
_PACKAGE = re.compile(r"(?:site-packages|dist-packages)/(?P<name>[^/]+)")
_FRAMEWORKS = {"Python", "torch", "flytekit", "firstfault", "numpy"}
_MAX_BLOCKS = 16
_MAX_FRAMES = 200
_NESTED = 4
"""How often a traceback may be in the text of an exception that was itself found in a text."""
_WRAPPERS = re.compile(
    r"^Caught [\w.]{1,100} in |^-- Process \d{1,9} terminated with the following error:|^CheckpointException ranks:",
    re.MULTILINE,
)
"""Texts above a traceback that torch writes: all that follows the traceback belongs to the exception."""
_OF_A_RANK = "(RANK "
"""torch's checkpoints list the tracebacks of several ranks one after the other."""
_BEGIN = re.compile(
    r"^(?P<indent>[ \t]*)(?:Original )?Traceback \(most recent call last\):.*$"
    r"|^[^\n]{0,20}ray::[^\n]{0,200}\(pid=\d{1,10}[^\n]{0,200}$",
    re.MULTILINE,
)
_FRAME = re.compile(
    r'^\s{1,20}File "(?P<file>[^"\n]{1,500})", line (?P<line>\d{1,9})(?:, in (?P<function>[^\n]{1,200}))?$'
)
RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]{0,200})(?::(?: (?P<message>.*))?)?$", re.DOTALL)
_LEFT_OUT = re.compile(r"\.\.\. \d{1,12} characters left out \.\.\.")
"""Where a stored text was cut."""
_OF_POOLS = "RemoteTraceback"
"""How the types end that `multiprocessing`, `concurrent.futures` and joblib give to the text of a traceback."""
_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"
_ENDS = {_CAUSE, _CONTEXT, '"""'}
"""Lines after the message of an exception in a text."""
_BETWEEN = {
    REMOTE: "The traceback above is in the text of the following exception:",
    "cause": _CAUSE,
    "context": _CONTEXT,
}


# --- as Python prints them ------------------------------------------------------------------------------------------


def is_library(file: str) -> bool:
    """Whether a file belongs to an installed package, to Python or to firstfault."""
    return _LIBRARY.search(file) is not None


def library_of(frame: FrameInfo) -> str:
    """Return the package of a frame, "torch"; empty for the user's code."""
    if not is_library(frame.file):
        return ""
    package = _PACKAGE.search(frame.file)
    if package:
        return package["name"].removesuffix(".py")
    return "firstfault" if _OURS.search(frame.file) else "Python"


def place_of(frame: FrameInfo) -> str:
    """Return "train.py:41 in step": the file without its folders."""
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line} in {frame.function}"


def runs(exception: ExceptionInfo) -> list[tuple[str, list[FrameInfo]]]:
    """Return the frames in their order, consecutive ones of a library together; the user's code has no name.

    Where frames were left out is a text that counts them, without frames.
    """
    half = len(exception.frames) // 2 if exception.frames_omitted else 0
    before, after = (
        [(library, list(run)) for library, run in itertools.groupby(frames, library_of)]
        for frames in (exception.frames[:half], exception.frames[half:])
    )
    gap: list[tuple[str, list[FrameInfo]]] = []
    if exception.frames_omitted:
        gap.append((f"{exception.frames_omitted} frames left out", []))
    return before + gap + after


def chain(exception: ExceptionInfo) -> list[tuple[str, ExceptionInfo]]:
    """Return an exception's causes and the exception, in Python's order: the deepest cause first.

    Before each is Python's sentence between the previous one and it; empty for the first. An exception of another
    process is a cause of the one that has its traceback in its text.
    """
    exception = with_remote(exception)
    # `causes` is nearest first; the relation of each is to the exception before it
    shown = [*itertools.takewhile(lambda cause: cause.relation != "suppressed", exception.causes)][::-1]
    sentences = ["", *(_BETWEEN.get(cause.relation, "") for cause in shown)]
    return list(zip(sentences, [*shown, exception], strict=True))


def format_exception(exception: ExceptionInfo, *, folded: bool = False) -> str:
    """Return an exception as Python prints it: causes first, then its own traceback, message and notes.

    Args:
        exception: to print.
        folded: consecutive frames of a library are one line, unless there are no other frames.
    """
    links = chain(exception)
    fold = folded and not all(is_library(frame.file) for _, link in links for frame in link.frames)
    parts: list[str] = []
    for sentence, link in links:
        parts += ["", sentence, ""] if sentence else []
        parts += _traceback(link, fold=fold)
        for index, member in enumerate(link.members, 1):
            text = format_exception(member, folded=folded)
            parts += [f"  ---- member {index} ----", *(f"  {line}" for line in text.splitlines())]
    return "\n".join(parts).rstrip("\n")


def _traceback(exception: ExceptionInfo, *, fold: bool) -> Iterator[str]:
    if exception.frames:
        yield "Traceback (most recent call last):"
    found = runs(exception)
    for number, (library, frames) in enumerate(found, 1):
        if not frames:
            yield f"  ... {library} ..."
        elif library and fold:
            where = f", the last is {place_of(frames[-1])}" if number == len(found) else ""
            yield f"  ... {counted(len(frames), 'frame')} of {library}{where}"
        else:
            for frame in frames:
                yield f'  File "{frame.file}", line {frame.line}, in {frame.function}'
                if frame.code:
                    yield f"    {frame.code}"
    yield f"{exception.type}: {exception.message}" if exception.message else exception.type
    yield from exception.notes


# --- exceptions of other processes ----------------------------------------------------------------------------------


def original_of(exception: ExceptionInfo) -> ExceptionInfo:
    """Return the exception of the other process; `exception` itself if it tells of none."""
    remote = [cause for cause in with_remote(exception).causes if cause.relation == REMOTE]
    return remote[-1] if remote else exception


def exceptions_in(text: str, *, whole: bool) -> tuple[ExceptionInfo, ...]:
    """Return the exceptions of a traceback in a text, nearest first; empty if there is none.

    Args:
        text: ends with a traceback.
        whole: it is a traceback and nothing else, so all that follows its last frame is the exception's message.
    """
    return _parsed(text, _NESTED, whole=whole)[1]


def short_name(exception: ExceptionInfo) -> str:
    """Return the name of an exception's type without its module."""
    return exception.type.rsplit(".", 1)[-1]


def with_remote(exception: ExceptionInfo) -> ExceptionInfo:
    """Return an exception with that of the other process among its causes, related by `REMOTE`.

    Its text is what stood above the traceback. An exception that tells of no other process is returned as it is; so is
    one with the traceback of its own cause in its text.
    """
    head, found = _parsed(exception.message, _NESTED)
    found = _with_lines(found, exception)
    if found and not any(
        (short_name(found[0]), found[0].message) == (short_name(cause), cause.message) for cause in exception.causes
    ):
        return replace(exception, message=head, causes=(*found, *exception.causes))
    nearest = exception.causes[0] if exception.causes else None
    if nearest is not None and nearest.type.endswith(_OF_POOLS):
        found = _with_lines(_parsed(nearest.message, _NESTED, whole=True)[1], exception)
        if found:
            return replace(exception, causes=(*found, *exception.causes[1:]))
    return exception


def _with_lines(found: tuple[ExceptionInfo, ...], exception: ExceptionInfo) -> tuple[ExceptionInfo, ...]:
    """Return exceptions of a text with the lines around their frames, as far as they were recorded."""
    known = {(frame.file, frame.line): frame for frame in exception.text_frames}

    def with_lines(frame: FrameInfo) -> FrameInfo:
        recorded = known.get((frame.file, frame.line), frame)
        return replace(frame, context=recorded.context, context_line=recorded.context_line)

    return tuple(replace(one, frames=tuple(map(with_lines, one.frames))) for one in found) if known else found


def _parsed(text: str, depth: int, *, whole: bool = False) -> tuple[str, tuple[ExceptionInfo, ...]]:
    """Return the text above a traceback, and the exceptions in it, nearest first; none if there is no traceback.

    Args:
        text: of an exception.
        depth: how many tracebacks may be in each other.
        whole: it is a traceback and nothing else. In the text of a program, what stands below a traceback may be
            something else, so the exception counts only if it is the last line.
    """
    begins = [match for _, match in zip(range(_MAX_BLOCKS), _BEGIN.finditer(text), strict=False)]
    found: list[ExceptionInfo] = []
    for index, match in enumerate(begins):
        end = begins[index + 1].start() if index + 1 < len(begins) else len(text)
        between = text[match.end() : end].rstrip()
        follows = "cause" if between.endswith(_CAUSE) else "context" if between.endswith(_CONTEXT) else ""
        # without Python's sentence between them, the next traceback belongs to the text of this exception
        body = between if follows or _OF_A_RANK in match[0] else text[match.end() :]
        block = block_of(body, len(match["indent"] or ""))
        if block is None:
            return text, ()
        found.insert(0, replace(block, relation=follows or REMOTE))
        if not follows:
            break
    if not found:
        return text, ()
    head, deeper = _parsed(found[0].message, depth - 1) if depth else ("", ())
    if deeper and (head.endswith(":") or _WRAPPERS.search(head)):  # else it only stands below
        found = [replace(found[0], message=head), *deeper, *found[1:]]
    elif "\n" in found[0].message and not (whole or match["indent"] is None or _WRAPPERS.search(text[: match.start()])):
        return text, ()
    return text[: begins[0].start()].strip(), tuple(found)


def block_of(body: str, indent: int = 0) -> ExceptionInfo | None:
    """Return the exception of one traceback; None if it has no frame, or does not end as tracebacks do."""
    frames: list[FrameInfo] = []
    lines = body.split("\n")
    margin = 0
    is_code = is_cut = False  # whether a line is the code of the frame before it, or may lack its beginning
    for index, whole in enumerate(lines):
        line = whole[indent:] if whole[:indent].isspace() else whole
        match = _FRAME.match(line)
        if match is not None:
            frames[_MAX_FRAMES - 1 :] = []  # the innermost one counts
            frames.append(FrameInfo(match["file"], int(match["line"]), match["function"] or ""))
        elif is_code and line.startswith((" ", "\t")):
            frames[-1], margin = replace(frames[-1], code=line.strip()), len(line) - len(line.lstrip())
        elif frames and frames[-1].code and line.strip() and not line.strip(" ~^") and line.startswith(" "):
            marked = (len(line) - len(line.lstrip()) - margin, len(line.rstrip()) - margin)
            frames[-1] = replace(frames[-1], marked=marked)
        elif line.strip() and not line.startswith((" ", "\t")) and not is_cut and frames and not _LEFT_OUT.match(line):
            raised = RAISED.match(line.rstrip())
            if raised is None:
                return None
            more = itertools.takewhile(lambda other: other.strip() not in _ENDS, lines[index + 1 :])
            message = "\n".join([raised["message"] or "", *more]).rstrip()
            return ExceptionInfo(raised["type"], message, frames=tuple(frames))
        is_code, is_cut = match is not None, _LEFT_OUT.match(line) is not None
    return None


# --- the first cause --------------------------------------------------------------------------------------------------

_INTERRUPTIONS = {"CancelledError", "GeneratorExit", "StopIteration", "StopAsyncIteration", "SystemExit"}
"""Exceptions that tell how a task or an iterator ended, not why."""
_LOOKUPS = {
    "AttributeError",
    "Empty",
    "FileExistsError",
    "FileNotFoundError",
    "Full",
    "ImportError",
    "IndexError",
    "KeyError",
    "LookupError",
    "ModuleNotFoundError",
    "NotImplementedError",
}
"""Exceptions that programs expect: they try one way, and take another one in the handler."""
_WORDLESS = {"Empty", "Full", "IndexError", "KeyError", "LookupError"}
"""Those whose texts tell little: what a program raises in their place tells more."""
_OTHER_WAYS = {"ImportError", "ModuleNotFoundError", "NotImplementedError"}
"""Those that ask for another way, whatever else the handler does."""
_GENERAL = {"BaseException", "Exception", "OSError", "RuntimeError", "TypeError", "ValueError"}
"""Those of which a clause does not tell what the program expected."""
_CLEAN_UPS = {"__exit__", "__aexit__", "__del__", "close", "aclose", "shutdown"}
_TIDIES = re.compile(
    r"(?:\b|_)(?:abort|alert|atexit|cancel|clean|clear|clos|destroy|dump|error|exception|exit|fail|finali|finish|flush|"
    r"handle|kill|log|notif|print|record|releas|report|rollback|save|send|shut_?down|stop|tear|terminat|unlock)",
    re.IGNORECASE,
)
"""Begins a word in the names of what programs do after a failure, and not in its stead."""
_OF_PEERS = re.compile(
    r"\b(?:peers?|gloo|nccl|process group|monitoredBarrier|timed out waiting|wait timeout|store)\b", re.IGNORECASE
)
"""Found in the texts of errors between ranks, where a clean-up fails that all ranks take part in."""
_BLOCK = re.compile(r"\s*(?:(?P<handler>except|finally)|(?:async\s+)?def|class)\b")
_CLAUSE = re.compile(r"^\s*except\*?\s+\(?(?P<types>[\w., ]+?)\)?\s*(?:as\s+(?P<name>\w+)\s*)?:")
_LONGEST_HANDLER = 20
"""Lines of a handler that are looked at."""
_GIVES = re.compile(r"(?:return|yield|await|import|from)\b|[\w.\[\], ]+(?::[^=]+)?=(?!=)")
"""Begins a line that gives something in place of what failed."""
_LEAVES = re.compile(r"\s*(?:raise\b|(?:sys\.|os\.)?_?exit\()")


@dataclass(frozen=True, slots=True)
class Causes:
    """An exception's first cause, and what was raised because of it."""

    wrappers: tuple[ExceptionInfo, ...]
    """What was raised because of it, outermost first; empty if the exception has no cause."""
    first: ExceptionInfo
    """The first cause. Its own `causes` are what libraries raised and replaced before it reached the program."""

    @property
    def told(self) -> tuple[ExceptionInfo, ...]:
        """The first cause, and what libraries raised before it: all that tells what failed."""
        return (self.first, *(link for link in self.first.causes if not _tells_nothing(link)))


def causes_of(exception: ExceptionInfo) -> Causes:
    """Return the first cause of an exception, and its wrappers.

    That is the innermost exception of the chain that came out of the program's code: a library may have caught and
    replaced others, whose texts tell less. A group counts as its first member. A lookup that failed as the program
    expects it to, in a clause for that, is not the cause of what failed in the handler.
    """
    links = (exception, *exception.causes)
    handled = (number for number in range(1, len(links)) if _was_handled(links[number - 1], links[number]))
    links = links[: next(handled, len(links))]
    last_first = range(len(links) - 1, -1, -1)
    counting = (at for belongs in (_is_own, _is_of_a_package) for at in last_first if _counts(links[at], belongs))
    at = _before_clean_ups(links, next(counting, 0))
    wrappers, first = links[:at], links[at]
    members = [member for member in first.members if short_name(member) not in _INTERRUPTIONS] or first.members
    if members:
        inner = causes_of(members[0])
        return Causes((*wrappers, first, *inner.wrappers), inner.first)
    return Causes(wrappers, replace(first, causes=tuple(links[at + 1 :])))


def first_cause(exception: ExceptionInfo) -> ExceptionInfo:
    """Return the first cause; if its text has the traceback of another process, the exception of that process."""
    return original_of(causes_of(exception).first)


def is_wrapper(outer: ExceptionInfo, inner: ExceptionInfo) -> bool:
    """Whether `outer` was raised to report `inner`; else it failed by itself while `inner` was being handled."""
    if inner.relation not in {"context", "suppressed"} or not outer.frames or not inner.frames:
        return True
    innermost = outer.frames[-1]
    return innermost.code.startswith("raise") and _place(innermost) == _place(inner.frames[0])


def all_links(exception: ExceptionInfo) -> Iterator[ExceptionInfo]:
    """Yield an exception, its causes, and all members with theirs."""
    for link in (exception, *exception.causes):
        yield link
        for member in link.members:
            yield from all_links(member)


def own_frames(exception: ExceptionInfo) -> tuple[FrameInfo, ...]:
    """Return the frames of the user's code on the way to the first cause, outermost first.

    If it has none, those of the nearest wrapper that has any. The user's code may be an installed package: if no other
    frame is found, frames of packages count, except those of Python, torch, flytekit, firstfault and numpy.
    """
    causes, first = causes_of(exception), first_cause(exception)
    path = [*causes.wrappers, *([] if first is causes.first else [causes.first]), first]
    for belongs in (_is_own, _is_of_a_package):
        for end in range(len(path), 0, -1):
            if any(map(belongs, path[end - 1].frames)):
                return tuple(filter(belongs, frames_to(path[:end])))
        for link in first.causes:
            if found := tuple(filter(belongs, link.frames)):
                return found
    return ()


def frames_to(path: Sequence[ExceptionInfo]) -> tuple[FrameInfo, ...]:
    """Return all frames on the way to the last exception of a path of wrappers.

    The traceback of a cause begins where it was caught; the frames around that are in the wrapper's.
    """
    frames: tuple[FrameInfo, ...] = ()
    is_member = False
    for link in path:
        if link.frames:
            caught = [number for number, frame in enumerate(frames) if _place(frame) == _place(link.frames[0])]
            if caught and link.relation != REMOTE:
                frames = frames[: caught[-1]]
            elif not is_member:
                frames = ()
            frames += link.frames
        is_member = bool(link.members)
    return frames


def _was_handled(outer: ExceptionInfo, context: ExceptionInfo) -> bool:
    """Whether `context` was dealt with, and `outer` is the failure of what was done in its stead."""
    caught_at = [frame for frame in outer.frames if context.frames and _place(frame) == _place(context.frames[0])]
    return _was_expected(outer, context, caught_at) or (
        context.relation == "context"
        and bool(caught_at)
        and not is_wrapper(outer, context)
        and _has_another_way(outer, context, caught_at[-1])
    )


def _was_expected(outer: ExceptionInfo, context: ExceptionInfo, caught_at: list[FrameInfo]) -> bool:
    """Whether `context` is a lookup that failed in the program's own line, in a clause for lookups alone."""
    is_reported = context.relation != "suppressed" and is_wrapper(outer, context)
    if short_name(context) not in (_WORDLESS if is_reported else _LOOKUPS) or not context.frames:
        return False
    own = [frame for frame in context.frames if _is_own(frame)]
    if len(own) > 1 or any(frame.code.startswith("raise") for frame in own):
        return False
    if is_library(context.frames[0].file):
        return len(context.frames) == 1  # no lines are recorded around it
    clause = _CLAUSE.match(_handler(caught_at[-1])[0]) if caught_at else None
    return clause is not None and _names_of(clause) <= _LOOKUPS


def _has_another_way(outer: ExceptionInfo, context: ExceptionInfo, caught_at: FrameInfo) -> bool:
    """Whether the handler, as far as it is known, tried another way, and did not only tidy up after `context`."""
    below = outer.frames[len(outer.frames) - outer.frames[::-1].index(caught_at) :]
    called = caught_at.code.partition("(")[0]
    if any(map(_TIDIES.search, [called, *(frame.function for frame in below)])):
        return False
    is_other_way = short_name(context) in _OTHER_WAYS
    if not is_other_way and (_OF_PEERS.search(outer.message) or _OF_PEERS.search(context.message)):
        return False
    if not any(map(_is_own, context.frames)):
        return True  # a library's handler
    clause, after = _handler(caught_at)
    expects = _CLAUSE.match(clause)
    is_again = any(_is_own(frame) for frame in below[:1] if _place(frame) in map(_place, context.frames[1:2]))
    if is_again and (expects is None or not _names_of(expects).isdisjoint(_GENERAL)):
        return False
    if not clause:
        return is_other_way or _GIVES.match(caught_at.code) is not None
    if "finally" in clause or any(map(_LEAVES.match, after)):
        return False
    return not (expects and expects["name"] and re.search(rf"\b{expects['name']}\b", caught_at.code))


def _names_of(clause: re.Match[str]) -> set[str]:
    return {name.strip().rsplit(".", 1)[-1] for name in clause["types"].split(",")}


def _handler(frame: FrameInfo) -> tuple[str, tuple[str, ...]]:
    """Return the clause in whose block a frame's line is, and the recorded lines after it; empty: not known."""
    at = frame.line - frame.context_line
    above = handler_above(frame.context, at)
    return ("", ()) if above is None else (frame.context[above], frame.context[at + 1 :])


def handler_above(lines: Sequence[str], at: int) -> int | None:
    """Return where the clause, `except` or `finally`, stands in whose block a line is; None: there is none."""
    margin = _margin(lines[at]) if at < len(lines) else 0
    for number in range(min(at, len(lines)) - 1, max(at - _LONGEST_HANDLER, 0) - 1, -1):
        if lines[number].strip() and _margin(lines[number]) < margin:
            margin = _margin(lines[number])
            if block := _BLOCK.match(lines[number]):
                return number if block["handler"] else None
    return None


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip())


def _before_clean_ups(links: Sequence[ExceptionInfo], at: int) -> int:
    """Return the link during which a library's clean-up failed: what it hides is why."""
    while at + 1 < len(links) and not is_wrapper(links[at], links[at + 1]) and not _tells_nothing(links[at + 1]):
        if not any(frame.function in _CLEAN_UPS for frame in links[at].frames):
            break
        at += 1
    return at


def _counts(link: ExceptionInfo, belongs: Callable[[FrameInfo], bool]) -> bool:
    if _tells_nothing(link):
        return False
    return not link.frames or any(map(belongs, link.frames)) or any(_counts(member, belongs) for member in link.members)


def _tells_nothing(link: ExceptionInfo) -> bool:
    name = short_name(link)
    if name == "SystemExit" and link.relation == "context" and link.frames:
        return not _is_own(link.frames[-1])  # the program wanted to end, and then its clean-up failed
    return name in _INTERRUPTIONS or name.endswith(_OF_POOLS)


def _place(frame: FrameInfo) -> tuple[str, str]:
    return frame.file, frame.function


def _is_own(frame: FrameInfo) -> bool:
    return not is_library(frame.file)


def _is_of_a_package(frame: FrameInfo) -> bool:
    return library_of(frame) not in _FRAMEWORKS
