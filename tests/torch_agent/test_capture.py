"""A live exception becomes data, however hostile it is."""

import builtins
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import firstfault_torch
from firstfault.exceptions.exceptions_in_text import format_exception
from firstfault.exceptions.first_cause import iter_exceptions
from firstfault.model import ExceptionInfo
from firstfault_torch.failures.capture import capture, find_exception_behind_exit, qualified_name

MEGABYTES_10 = 10 * 1024 * 1024


def _raised(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - the hostile ones are not Exceptions
        return error
    raise AssertionError("nothing was raised")


def _raise(error: BaseException) -> None:
    raise error


def _captured(error: BaseException) -> ExceptionInfo:
    return capture(_raised(lambda: _raise(error)))


_UNCOMPILED = """
import importlib, sys
importlib.import_module(sys.argv[1])
from firstfault import credentials, exceptions
from firstfault.utils.lazy_pattern import find_patterns
patterns = find_patterns(exceptions) | find_patterns(credentials) | credentials.shapes.PATTERNS
assert len(patterns) > 120, patterns
print([name for name, pattern in patterns.items() if not pattern.is_compiled])
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["run", "torchrun.rank", "worker.worker_monitor"])
def test_patterns_are_compiled_before_a_failure(module: str) -> None:
    """An agent, a worker and a rank without an agent compile no pattern when they fail:
    they may lack the memory.
    """
    program = [sys.executable, "-c", _UNCOMPILED, f"firstfault_torch.{module}"]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout == "[]\n"


# --- texts ----------------------------------------------------------------------------------------


class _RaisesError(Exception):
    def __str__(self) -> str:
        raise ValueError("not telling")


class _ExitsError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class _NoTextError(Exception):
    def __str__(self) -> str:
        return 7  # noqa: PLE0307 - that is the fault


class _Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise ValueError("not telling")

    def __getitem__(self, key: Any) -> str:
        raise ValueError("not telling")


class _SubclassTextError(Exception):
    def __str__(self) -> str:
        return _Text("a text of its own class")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("boom"), "boom"),
        (ValueError(), ""),
        (ValueError("a", 2), "('a', 2)"),
        (KeyError("key"), "'key'"),
        (OSError(2, "No such file", "/data/shard"), "[Errno 2] No such file: '/data/shard'"),
        (_SubclassTextError(), "a text of its own class"),
        (_RaisesError(), "<no text: str() raised ValueError>"),
        (_ExitsError(), "<no text: str() raised SystemExit>"),
        (_NoTextError(), "<no text: str() raised TypeError>"),
        (ValueError("\ud800"), "\ud800"),
        (ValueError("x" * MEGABYTES_10), "x" * 64 * 1024),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_message_is_the_result_of_str(error: BaseException, text: str) -> None:
    """The message is the result of str(), or the reason why there is none."""
    assert _captured(error).message == text


# --- names ----------------------------------------------------------------------------------------


class _Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in {"__module__", "__qualname__", "__mro__", "__name__"}:
            raise RuntimeError("not telling")
        return super().__getattribute__(name)


class _HostileMetaError(Exception, metaclass=_Meta):
    pass


class _OtherClassError(Exception):
    @property
    def __class__(self) -> Any:
        raise RuntimeError("not telling")


class _ListModuleError(Exception):
    __module__ = ["no", "name"]  # noqa: RUF012 - that is the fault


class _Outer:
    class InnerError(Exception):
        pass


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ValueError, "ValueError"),
        (_Outer.InnerError, f"{__name__}._Outer.InnerError"),
        (_HostileMetaError, f"{__name__}._HostileMetaError"),
        (_OtherClassError, f"{__name__}._OtherClassError"),
        (_ListModuleError, "unknown"),
    ],
    ids=["builtin", "nested", "metaclass", "class", "module"],
)
def test_a_type_is_the_qualified_name_of_the_class(kind: type[BaseException], name: str) -> None:
    """The type is the qualified name, without a module for builtins,
    also if the class overrides it.
    """
    assert qualified_name(kind) == name
    assert _captured(kind()).type == name


def test_base_classes_come_nearest_first() -> None:
    """The base classes come nearest first, without object."""
    assert _captured(FileNotFoundError()).bases == ("OSError", "Exception", "BaseException")
    assert _captured(_HostileMetaError()).bases == ("Exception", "BaseException")


# --- attributes that fight back -------------------------------------------------------------------


class _DelegatingError(Exception):
    """A common mistake: what it delegates to has not been set."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _LockedError(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise PermissionError(name)


class _GroupWithoutError(Exception):
    @property
    def exceptions(self) -> Any:
        raise RuntimeError("no members yet")


@pytest.mark.parametrize("kind", [_DelegatingError, _LockedError, _GroupWithoutError])
def test_an_exception_with_raising_attributes_is_captured(kind: type[Exception]) -> None:
    """An exception whose attributes raise is captured with its type and text."""
    captured = _captured(kind("boom"))
    assert captured.type == f"{__name__}.{kind.__name__}"
    assert captured.message == "boom"
    assert captured.notes == ()
    assert captured.members == ()


# --- notes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        (["first", "second"], ("first", "second")),
        ([], ()),
        (("a", "tuple"), ("a", "tuple")),
        ("no list", ("no list",)),
        (7, ("7",)),
        ([7, _RaisesError()], ("7", "<no text: str() raised ValueError>")),
        ([str(number) for number in range(60)], tuple(str(number) for number in range(20))),
    ],
)
def test_notes_are_kept_up_to_a_limit(notes: object, expected: tuple[str, ...]) -> None:
    """At most 50 notes are kept, also if __notes__ is not a list of texts."""
    error = ValueError("boom")
    error.__notes__ = notes  # as on Python 3.10, where it is a plain attribute
    assert _captured(error).notes == expected


# --- causes ---------------------------------------------------------------------------------------


def _from_cause() -> None:
    try:
        _raise(KeyError("inner"))
    except KeyError as error:
        raise ValueError("outer") from error


def _in_context() -> None:
    try:
        _raise(KeyError("inner"))
    except KeyError:
        raise ValueError("outer")  # noqa: B904 - the implicit context is the point


def _from_none() -> None:
    try:
        _raise(KeyError("inner"))
    except KeyError:
        raise ValueError("outer") from None


def _three() -> None:
    try:
        _from_cause()
    except ValueError:
        raise RuntimeError("outermost")  # noqa: B904


@pytest.mark.parametrize(
    ("call", "chain"),
    [
        (lambda: _raise(ValueError()), []),
        (_from_cause, [("KeyError", "cause")]),
        (_in_context, [("KeyError", "context")]),
        (_from_none, [("KeyError", "suppressed")]),
        (_three, [("ValueError", "context"), ("KeyError", "cause")]),
    ],
    ids=["none", "cause", "context", "from None", "three"],
)
def test_causes_are_the_chain_that_python_prints(
    call: Callable[[], None], chain: list[tuple[str, str]]
) -> None:
    """The chain is the one that Python prints: a cause, else the context; nearest first."""
    captured = capture(_raised(call))
    assert ("KeyError" in format_exception(captured)) is any(
        relation != "suppressed" for _, relation in chain
    )
    assert [(cause.type, cause.relation) for cause in captured.causes] == chain
    assert all(cause.causes == () for cause in captured.causes), "the chain is flat"
    assert all(cause.frames for cause in captured.causes)


def _exit_after(error: BaseException | None) -> None:
    try:
        if error is not None:
            _raise(error)
    except Exception:  # noqa: BLE001 - as frameworks do
        sys.exit(1)
    sys.exit(2)


@pytest.mark.parametrize("error", [ValueError("bad batch"), None], ids=repr)
def test_an_exit_is_about_the_exception_behind_it(error: BaseException | None) -> None:
    """An exit that the program made of an exception is about that exception;
    another exit is about itself.
    """
    left = _raised(lambda: _exit_after(error))
    assert isinstance(left, SystemExit)
    assert find_exception_behind_exit(left) is (error or left)
    first = SystemExit(1)
    second = SystemExit(2)
    first.__context__ = second
    second.__context__ = error
    assert find_exception_behind_exit(first) is (error or second)
    second.__context__ = first
    assert isinstance(find_exception_behind_exit(first), SystemExit)


def test_a_cycle_of_causes_ends() -> None:
    """Exceptions that are each other's causes appear once each;
    of a long chain the nearest and the first ones do.
    """
    first = ValueError("first")
    second = KeyError("second")
    first.__cause__, second.__cause__ = second, first
    assert [cause.type for cause in capture(first).causes] == ["KeyError"]
    first.__cause__ = first
    assert capture(first).causes == ()
    outermost = error = ValueError("0")
    for number in range(1, 30):
        error.__cause__ = ValueError(str(number))
        error = error.__cause__
    causes = capture(outermost).causes
    assert [int(cause.message) for cause in causes] == [*range(1, 6), *range(25, 30)]
    assert {cause.message: cause.notes for cause in causes if cause.notes} == {
        "25": ("19 exceptions left out after this one",)
    }


# --- groups ---------------------------------------------------------------------------------------


class _Group(Exception):  # noqa: N818 - named as what it stands for
    """An exception group as Python 3.10 sees the backport's:
    an exception with a tuple of exceptions.
    """

    def __init__(self, message: str, exceptions: object) -> None:
        super().__init__(message)
        self.exceptions = exceptions


GROUPS = [_Group]
if sys.version_info >= (3, 11):
    GROUPS.append(builtins.ExceptionGroup)


@pytest.mark.parametrize("group", GROUPS, ids=lambda kind: kind.__name__)
def test_members_of_a_group_are_captured_down_to_six_levels(group: type[_Group]) -> None:
    """The members of a group are captured, groups within it too, down to six levels."""
    deep = group("4", (group("5", (group("6", (ValueError("deepest"),)),)),))
    captured = _captured(group("1", (group("2", (group("3", (deep,)), KeyError("k"))),)))
    (second,) = captured.members
    third, key = second.members
    assert (key.type, key.message) == ("KeyError", "'k'")
    sixth = third.members[0].members[0].members[0]
    assert sixth.message.startswith("6")
    assert sixth.members == ()


@pytest.mark.parametrize("group", GROUPS, ids=lambda kind: kind.__name__)
def test_groups_and_causes_are_captured_within_each_other(group: type[_Group]) -> None:
    """A group that is a cause is captured with its members, and these with their causes."""
    key = KeyError("k")
    raised = RuntimeError("training failed")
    key.__cause__ = OSError("disk")
    grouped = group("tasks failed", (key,))
    raised.__cause__ = grouped
    (cause,) = capture(raised).causes
    (member,) = cause.members
    assert (member.type, [(link.type, link.relation) for link in member.causes]) == (
        "KeyError",
        [("OSError", "cause")],
    )


def test_a_tree_of_groups_is_cut() -> None:
    """At most 60 exceptions are kept, and ten members of each group;
    a group that contains itself ends.
    """
    tree: Exception = ValueError("leaf")
    for _ in range(4):
        tree = _Group("ten", [tree] * 10)
    assert len(list(iter_exceptions(_captured(tree)))) == 60
    assert (
        len(_captured(_Group("wide", [ValueError(str(number)) for number in range(100)])).members)
        == 10
    )
    endless = _Group("endless", [])
    endless.exceptions = [endless]
    assert len(list(iter_exceptions(_captured(endless)))) == 6


@pytest.mark.parametrize("members", [7, "text", {"a": ValueError()}, [1, "two", None]])
def test_a_foreign_exceptions_attribute_makes_no_group(members: object) -> None:
    """An attribute of that name that holds no exceptions makes no group."""
    assert _captured(_Group("boom", members)).members == ()


# --- frames ---------------------------------------------------------------------------------------


def _deep(levels: int) -> None:
    if levels == 0:
        raise ValueError("bottom")
    _deep(levels - 1)


def _endless() -> None:
    _endless()


def test_frames_come_outermost_first() -> None:
    """Frames come outermost first, each with file, line, function and source text."""
    frames = capture(_raised(lambda: _deep(2))).frames
    assert [frame.function for frame in frames] == [
        "_raised",
        "<lambda>",
        "_deep",
        "_deep",
        "_deep",
    ]
    assert {frame.file for frame in frames} == {__file__}
    assert frames[-1].code == 'raise ValueError("bottom")'
    assert frames[-1].line > 0


_SCRIPT = """\
def divide(row):
    batch = [1, 2, 3]
    if batch:
        # the third column
        return sum(batch) / row["größe"] + len(batch)
    return 0


def several(rows):
    return (
        rows[0]
        + rows[0]["nothing"]
    )


def whole(row):
    raise ValueError("bad")
"""


@pytest.fixture
def script(tmp_path: Path) -> dict[str, Any]:
    """Return the functions of a script outside of any library."""
    file = tmp_path / "train.py"
    file.write_text(_SCRIPT, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(_SCRIPT, str(file), "exec"), names)  # noqa: S102 - our own
    return names


def test_an_own_frame_has_two_lines_before_and_after(script: dict[str, Any]) -> None:
    """A frame of the program has two lines before its own and two after,
    without the indentation that they share.
    """
    frame = capture(_raised(lambda: script["divide"]({"größe": 0}))).frames[-1]
    assert frame.code == 'return sum(batch) / row["größe"] + len(batch)'
    assert frame.context == (
        "if batch:",
        "    # the third column",
        '    return sum(batch) / row["größe"] + len(batch)',
        "return 0",
        "",
    )
    assert frame.context_line == 3
    assert frame.context[frame.line - frame.context_line].strip() == frame.code


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 knows no columns")
@pytest.mark.parametrize(
    ("function", "row", "marked"),
    [
        ("divide", {"größe": 0}, 'sum(batch) / row["größe"]'),
        ("divide", {}, 'row["größe"]'),
        ("several", [{}], 'rows[0]["nothing"]'),
        ("whole", {}, ""),
    ],
)
def test_the_characters_that_python_marks_are_known(
    script: dict[str, Any], function: str, row: object, marked: str
) -> None:
    """The characters that Python marks with carets are known;
    none where it marks the whole line.
    """
    frame = capture(_raised(lambda: script[function](row))).frames[-1]
    assert frame.code[slice(*frame.marked)] == marked


def test_a_loader_that_gives_bytes_costs_only_the_lines(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source code comes from third-party loaders; one that gives bytes costs the lines,
    and nothing else.
    """
    error = _raised(lambda: script["whole"]({}))
    monkeypatch.setattr("linecache.getlines", lambda _: [b"raise"] * 99)
    frame = capture(error).frames[-1]
    assert (frame.function, frame.code, frame.context) == ("whole", "", ())


def test_library_frames_have_no_lines_around() -> None:
    """A library's frames have their line alone,
    and of many frames of the program the innermost have more.
    """

    def deep(number: int) -> None:
        json.loads("{") if number == 0 else deep(number - 1)

    frames = capture(_raised(lambda: deep(20))).frames
    own = [frame for frame in frames if frame.function == "deep"]
    assert [bool(frame.context) for frame in own] == [False] * 13 + [True] * 8
    assert [bool(frame.context) for frame in frames if "json/" in frame.file] == [False] * 3


def test_code_without_a_file_has_frames_without_text() -> None:
    """Code without a file has frames without text;
    an exception that was never raised has no frames.
    """
    code = compile("def broken():\n    raise ValueError('boom')\nbroken()\n", "<nowhere>", "exec")
    frames = capture(_raised(lambda: exec(code, {}))).frames  # noqa: S102 - a frame without a file
    found = [(frame.file, frame.function, frame.code) for frame in frames[-2:]]
    assert found == [("<nowhere>", "<module>", ""), ("<nowhere>", "broken", "")]
    assert capture(ValueError("made, not raised")).frames == ()


def test_a_recursion_error_keeps_both_ends_of_the_stack() -> None:
    """A RecursionError keeps both ends of the stack and the number of frames left out."""
    error = _raised(_endless)
    captured = capture(error)
    assert captured.type == "RecursionError"
    assert len(captured.frames) == 200
    assert captured.frames[0].function == "_raised"
    assert {frame.function for frame in captured.frames[1:]} == {"_endless"}
    assert captured.frames_omitted + 200 == _depth(error)


def _depth(error: BaseException) -> int:
    trace, count = error.__traceback__, 0
    while trace is not None:
        trace, count = trace.tb_next, count + 1
    return count


def test_a_package_with_a_similar_name_keeps_its_frames() -> None:
    """A package whose folder's name only begins like ours is the user's."""
    file = str(Path(firstfault_torch.__file__).parent) + "_models/train.py"
    code = compile("def train():\n    raise ValueError('boom')\n", file, "exec")
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - a frame with a file of this name
    error = _raised(names["train"])
    error.__traceback__ = error.__traceback__.tb_next  # without the frame of this test
    assert [frame.file for frame in capture(error).frames] == [file]
