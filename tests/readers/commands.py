"""The command line, run in this process; a fixture of conftest."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from firstfault.cli import main


@dataclass(frozen=True)
class Ran:
    """The result of a run of the command line."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command line in this process."""

    def call(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        out, err = capsys.readouterr()
        return Ran(int(caught.value.code or 0), out, err)

    return call
