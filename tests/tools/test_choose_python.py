"""tools/choose_python.sh chooses among interpreters, before anything is downloaded."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "choose_python.sh"
_PYTHON = "case $2 in *version_info*) echo {minor};; *) {venv};; esac"
_SHIM = "exit 127"
_UV = 'case "$1 $2" in "python install") {install};; "python find") echo /uv/python3.12;; esac'
UV = _UV.format(install=":")
BROKEN_UV = _UV.format(install="exit 2")


def _python(minor: int, *, has_venv: bool = True) -> str:
    return _PYTHON.format(minor=minor, venv=":" if has_venv else "exit 1")


def run_script(
    folder: Path, programs: dict[str, str], given: str = ""
) -> tuple[int, list[str], str]:
    """Return exit code, lines and error of the script on a machine that has these programs only."""
    for name in ("bash", "dirname", "sed"):
        (folder / name).symlink_to(shutil.which(name) or name)
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    environment = {"PATH": str(folder), **({"PYTHON": given} if given else {})}
    ran = subprocess.run(
        [SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | environment,
    )
    return ran.returncode, ran.stdout.splitlines(), ran.stderr


@pytest.mark.parametrize(
    ("programs", "python", "extra", "note"),
    [
        ({"python3": _python(11)}, "python3", "elastic", ""),
        ({"python3": _python(10), "python3.12": _python(12)}, "python3", "elastic", ""),
        ({"python3": _python(13), "python3.12": _python(12)}, "python3.12", "elastic", "python3 is 3.13"),
        ({"python3": _python(14), "python3.12": _SHIM, "python3.11": _python(11)}, "python3.11", "elastic", "is 3.14"),
        (
            {"python3": _python(13), "python3.11": _python(11, has_venv=False), "python3.10": _python(10)},
            "python3.10",
            "elastic",
            "using python3.10: ",
        ),
        ({"python3": _python(9), "python3.12": _python(12)}, "python3.12", "elastic", "needs 3.10 or later"),
        ({"python3.11": _python(11)}, "python3.11", "elastic", "python3 does not run"),
        ({"python3": _python(13), "uv": UV}, "/uv/python3.12", "elastic", "using uv's Python 3.12: python3 is 3.13"),
        ({"python3": _python(13), "uv": BROKEN_UV}, "python3", "torch", "the environment gets no flytekit"),
        ({"python3": _python(14)}, "python3", "torch", "flytekit supports only 3.10 to 3.12"),
    ],
    ids=[
        "old enough", "of several", "newer", "a shim that does not run", "without venv", "too old", "none", "uv",
        "uv without a network", "newer, alone",
    ],
)  # fmt: skip
def test_python3_is_chosen_if_flytekit_supports_it_else_another(  # noqa: PLR0917 - a table
    programs: dict[str, str],
    python: str,
    extra: str,
    note: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreter is python3 if flytekit supports it, else another;
    a sentence says why it is another one.
    """
    monkeypatch.delenv("PYTHON", raising=False)
    code, lines, _ = run_script(tmp_path, programs)
    assert (code, lines[:2]) == (0, [python, extra])
    (said,) = lines[2:]
    assert note in said
    assert bool(said) == bool(note)


@pytest.mark.parametrize(("minor", "extra"), [(12, "elastic"), (13, "torch")])
def test_an_interpreter_that_the_user_names_is_used(minor: int, extra: str, tmp_path: Path) -> None:
    """An interpreter that the user names is used, without Flyte if flytekit does not support it."""
    others = {"python3": _python(13), "python3.12": _python(12), "theirs": _python(minor)}
    code, lines, _ = run_script(tmp_path, others, given=str(tmp_path / "theirs"))
    assert (code, lines[:2]) == (0, [str(tmp_path / "theirs"), extra])
    assert (lines[2] == "") == (extra == "elastic")


@pytest.mark.parametrize("given", ["", "python3", "nowhere"])
def test_without_a_usable_interpreter_one_line_says_which_to_name(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an interpreter that can be used the script fails,
    and says in one line which one to name.
    """
    monkeypatch.delenv("PYTHON", raising=False)
    code, lines, error = run_script(tmp_path, {"python3": _python(9)}, given)
    assert (code, lines) == (1, [])
    (line,) = error.splitlines()
    assert "3.10 or later" in line
    assert "make test PYTHON=" in line
