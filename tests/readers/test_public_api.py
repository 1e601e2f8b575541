"""The library's public names, its errors and its import time."""

import inspect
import subprocess
import sys

import pytest

import firstfault
from firstfault import errors

_SECONDS = 0.2
_ROOMS = (
    "model",
    "layout",
    "retry",
    "strategies",
    "strategies.earliest",
    "report",
    "reading.assemble",
)
_NOT_WHILE_DYING = (
    *("asyncio", "fsspec", "google.protobuf", "stamina", "subprocess", "tempfile", "ssl"),
    *(
        "firstfault.wire.documents",
        "firstfault.store",
        "firstfault.recorder.process",
        "firstfault.recorder.uploads",
    ),
)


def _python(code: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return ran.stdout.strip()


@pytest.mark.timing
def test_importing_is_cheap() -> None:
    """Importing the library takes less than a fifth of a second,
    best of three fresh interpreters.
    """
    code = "import time; t = time.perf_counter(); import firstfault; print(time.perf_counter() - t)"
    assert min(float(_python(code)) for _ in range(3)) < _SECONDS


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("firstfault", ("s3fs", "rich", "fsspec", "google.protobuf", "click", "asyncio")),
        *((f"firstfault.{room}", ("google.protobuf", "fsspec", "click")) for room in _ROOMS),
        ("firstfault.wire.documents", ("fsspec", "click")),
        ("firstfault.store", ("google.protobuf", "s3fs", "botocore", "click")),
        ("firstfault.cli", ("google.protobuf", "fsspec", "firstfault.credentials")),
        # a dying worker imports these
        ("firstfault.recorder.folder", _NOT_WHILE_DYING),
    ],
)
def test_a_module_loads_only_what_it_needs(module: str, absent: tuple[str, ...]) -> None:
    """Each package imports only its own dependencies; none imports flytekit,
    its messages or torch.
    """
    wanted = (*absent, "flyteidl", "flytekit", "torch", "flytekitplugins.firstfault", "pytest")
    # an installed package may import some at every start of Python
    code = (
        f"import sys; before = set(sys.modules); import {module}; found = set(sys.modules) - before"
    )
    code += f"; print([name for name in {wanted!r} if name in found])"
    assert _python(code) == "[]"


def test_public_names_are_at_most_fifteen_and_documented() -> None:
    """The root has at most fifteen names, each of which is there, documented, and listed."""
    assert len(firstfault.__all__) <= 15
    assert sorted(firstfault.__all__) == firstfault.__all__ == dir(firstfault)
    for name in firstfault.__all__:
        assert inspect.getdoc(getattr(firstfault, name)), name
    with pytest.raises(AttributeError, match="no_such_name"):
        firstfault.no_such_name  # noqa: B018 - looking is what is tested


_ERRORS = [value for value in vars(errors).values() if isinstance(value, type)]


@pytest.mark.parametrize("error", _ERRORS, ids=lambda error: error.__name__)
def test_every_error_has_one_base(error: type) -> None:
    """Every error has the common base, a built-in base, and the message it was given."""
    assert issubclass(error, firstfault.FirstFaultError)
    assert str(error("what to do")) == "what to do"
    others = [
        base
        for base in error.__mro__
        if base.__module__ == "builtins" and base not in {object, BaseException}
    ]
    assert error is firstfault.FirstFaultError or len(others) > 1


def test_every_error_has_a_unique_slug_and_its_exit_code() -> None:
    """Every error has a slug of its own, of letters and hyphens; a usage error has exit code 2,
    every other 1.
    """
    slugs = [error.slug for error in _ERRORS]
    assert len(set(slugs)) == len(slugs)
    assert all(slug.replace("-", "").isalpha() and slug.islower() for slug in slugs)
    assert all(
        error.exit_code == (2 if issubclass(error, errors.UsageError) else 1) for error in _ERRORS
    )
