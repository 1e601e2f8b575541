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
from firstfault.utils.text import counted

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
    """Return an exception as Python prints it, causes first.

    If `folded`, consecutive frames of a library are one line, unless there are no other frames.
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
    """Return the exceptions of a text that ends with a traceback, nearest first; `whole`: as for `_parsed`."""
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

    At most `depth` tracebacks may be in each other. If the text is not a traceback as a `whole`, what stands below one
    may be something else, so the exception counts only if it is the last line.
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

_HIDES_ITS_CAUSE = re.compile(
    r"failed to run (?:stage backward|(?:full )?backward|forward|stage)|^Error (?:locating target|in call to target)"
    r"|^An error occurred while generating the dataset|^RetryError\b|when making fake tensor call",
    re.IGNORECASE | re.MULTILINE,
)
"""Found in texts of wrappers that libraries raise for an error of any kind."""
_INTERRUPTIONS = {"CancelledError", "GeneratorExit", "StopIteration", "StopAsyncIteration", "SystemExit"}
"""Exceptions that tell how a task or an iterator ended, not why."""
_WORDLESS = {"Empty", "Full", "IndexError", "KeyError", "LookupError"}
"""Lookups whose texts tell little: what a program raises in their place tells more."""
_OTHER_WAYS = {"ImportError", "ModuleNotFoundError", "NotImplementedError"}
"""Exceptions that ask for another way, whatever else the handler does."""
_LOOKUPS = {"AttributeError", "FileExistsError", "FileNotFoundError"} | _WORDLESS | _OTHER_WAYS
"""Exceptions that programs expect: they try one way, and take another one in the handler."""
_CLEAN_UPS = {"__exit__", "__aexit__", "__del__", "close", "aclose", "shutdown"}
_TIDIES = re.compile(
    r"(?:\b|_)(?:abort|alert|cancel|cle?a|clos|destroy|dump|error|exception|exit|fail|finali|finish|flush|handle|kill|log|notif"
    r"|print|record|releas|report|rollback|save|send|shut_?down|stop|tear|terminat|unlock)",
    re.IGNORECASE,
)
"""Begins a word in the names of what programs do after a failure, and not in its stead."""
_OF_PEERS = re.compile(r"(?i)\b(?:peers?|gloo|nccl|process group|monitored|timed out waiting|wait timeout|store)\b")
"""Found in the texts of errors between ranks, which a handler meets that all ranks take part in."""
_BLOCK = re.compile(r"\s*(?:(?P<handler>except|finally)|(?:async\s+)?def|class)\b")
_CLAUSE = re.compile(r"^\s*except\*?\s+\(?(?P<types>[\w., ]+?)\)?\s*(?:as\s+(?P<name>\w+)\s*)?:")
_LONGEST_HANDLER = 12
"""Lines of a handler that are looked at."""
_ANY = {"", "BaseException", "Exception"}
_GIVES = re.compile(r"(?:return|yield|import|from)\b|[\w.\[\], '\"]+(?::[^=]+)?=(?!=)")
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
    links = [exception]
    for link in exception.causes:
        outer = next((outer for outer in reversed(links) if not _tells_nothing(outer)), exception)
        links += [] if _was_handled(outer, link) else [link]
    last_first = range(len(links) - 1, -1, -1)
    counting = (at for belongs in (_is_own, _is_of_a_package) for at in last_first if _counts(links[at], belongs))
    at = _behind(links, next(counting, 0))
    wrappers, first = tuple(links[:at]), links[at]
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


def raised_in(exception: ExceptionInfo) -> list[str]:
    """Return the files and functions of libraries, innermost first, from the program's last line to the first cause."""
    causes = causes_of(exception)
    frames = frames_to([*causes.wrappers, causes.first])[::-1]
    inner = itertools.takewhile(lambda frame: is_library(frame.file), frames)
    return [f"{frame.file} {frame.function}" for frame in inner]


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
    places = [_place(frame) for frame in outer.frames]
    # a program that exits takes no other way
    if short_name(outer) == "SystemExit" or not context.frames or _place(context.frames[0]) not in places:
        return False
    below = outer.frames[len(places) - places[::-1].index(_place(context.frames[0])) :]
    at = outer.frames[-len(below) - 1]
    here = at.line - at.context_line
    above = handler_above(at.context, here)
    clause = _CLAUSE.match(at.code if above is None else at.context[above])
    expected = {name.strip().rsplit(".", 1)[-1] for name in clause["types"].split(",")} if clause else {""}
    code = _CLAUSE.sub("", at.code).strip()
    name, own = short_name(context), [frame for frame in context.frames if _is_own(frame)]
    # a lookup that failed in the program's own line, in a clause for lookups alone, or in a library's
    is_lookup = name in _LOOKUPS and (expected <= _LOOKUPS if _is_own(context.frames[0]) else len(context.frames) == 1)
    is_lookup = is_lookup and len(own) <= 1 and not any(frame.code.startswith("raise") for frame in own)
    if is_lookup or context.relation != "context" or is_wrapper(outer, context):
        is_told = context.relation == "suppressed" or not is_wrapper(outer, context)
        return is_lookup and (is_told or name in _WORDLESS)
    if any(_TIDIES.search(text) for text in (code.partition("(")[0], *(frame.function for frame in below))):
        return False
    if name not in _OTHER_WAYS and any(_OF_PEERS.search(link.message) for link in (outer, context)):
        return False
    is_own = bool(below) and _is_own(below[0])
    is_again = is_own and _place(below[0]) in map(_place, context.frames[1:2])
    if not own or (is_again and not expected <= _LOOKUPS):
        return not own  # else a library's handler
    # a clause for any exception, or none that is known
    if expected & _ANY and name not in _OTHER_WAYS and not (is_own and _GIVES.match(code)):
        return False
    after = (n for n in range(here + 1, len(at.context)) if above is not None and handler_above(at.context, n) == above)
    if (above is not None and "finally" in at.context[above]) or any(_LEAVES.match(at.context[n]) for n in after):
        return False
    return not (clause and clause["name"] and re.search(rf"\b{clause['name']}\b", code))


def handler_above(lines: Sequence[str], at: int) -> int | None:
    """Return where the clause, `except` or `finally`, stands in whose block a line is; None: there is none."""
    near = lines[max(at - _LONGEST_HANDLER, 0) : at + 1]
    margins = [len(line) - len(line.lstrip()) if line.strip() else 1000 for line in near]
    for number in range(at - 1, at - len(margins), -1):
        margin = margins[number - at - 1]
        if margin < min(margins[number - at :]) and (block := _BLOCK.match(lines[number])):
            return number if block["handler"] else None
    return None


def _behind(links: Sequence[ExceptionInfo], at: int) -> int:
    """Return the link during which a library's clean-up failed, or that a library wrapped: what they hide is why."""
    while at + 1 < len(links) and not _tells_nothing(links[at + 1]):
        is_wrapped = is_wrapper(links[at], links[at + 1])
        is_tidied = not is_wrapped and any(frame.function in _CLEAN_UPS for frame in links[at].frames)
        if not is_tidied and not (is_wrapped and _HIDES_ITS_CAUSE.search(links[at].message)):
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
