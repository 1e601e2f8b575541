"""A chain calls its parts from the last to the first, and is an instance of what they have in common."""

from __future__ import annotations

import re
import warnings

import pytest

from firstfault_torch.inprocess.hooks import (
    Compose,
    CudaHealthCheck,
    FaultCounter,
    Finalize,
    HealthCheck,
    RetryController,
)
from firstfault_torch.inprocess.rank_assignment import ActivateAllRanks, RankAssignment, RankFilter, ShiftRanks
from firstfault_torch.inprocess.state import State


class Add:
    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, text: str) -> str:
        """Return the text with this part's."""
        return text + self.text


class Forgets:
    def __call__(self, value: object) -> None:
        """Return nothing."""

    def __repr__(self) -> str:
        return "Forgets()"


class Counts:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        """Count."""
        self.calls += 1


def test_order() -> None:
    """The last part is called first, and each gets the result of the part before."""
    assert Compose(Add("a"), Add("b"), Add("c"))(">") == ">cba"


def test_tuples_are_several_arguments() -> None:
    """A tuple that a part returns is passed as several arguments."""
    assert Compose(lambda low, high: high - low, lambda low, high: (low * 10, high * 10))(1, 3) == 20


def test_parts_without_arguments() -> None:
    """Parts without arguments and results are all called, without a warning."""
    part = Counts()
    assert Compose(part, part, part)() is None
    assert part.calls == 3


def test_a_result_after_parts_without_arguments() -> None:
    """A part gets the result of a part that takes no arguments."""
    assert Compose(lambda number: number + 1, lambda: 1)() == 2


def test_a_forgotten_result_warns() -> None:
    """A warning names the part that got an argument and returned None."""
    with pytest.warns(UserWarning, match=re.escape("Forgets() got an argument and returned None")):
        assert Compose(Forgets())(1) is None


def test_none_may_be_passed_on() -> None:
    """A part that got None may return None."""
    assert Compose(Forgets(), Forgets())(None) is None


def test_built_in_functions() -> None:
    """Functions that have no signature can be parts."""
    assert Compose(dict, zip)("ab", "cd") == {"a": "c", "b": "d"}


@pytest.mark.parametrize(
    ("parts", "is_instance_of", "is_none_of"),
    [
        ((CudaHealthCheck(), FaultCounter()), (HealthCheck,), (FaultCounter, CudaHealthCheck)),
        ((FaultCounter(), FaultCounter()), (FaultCounter, HealthCheck), ()),
        ((ActivateAllRanks(), ShiftRanks()), (RankAssignment,), (RankFilter, ShiftRanks)),
        ((FaultCounter(), RetryController()), (), (HealthCheck, Finalize)),
        ((len, str), (), (type,)),
    ],
)
def test_class(parts: tuple[object, ...], is_instance_of: tuple[type, ...], is_none_of: tuple[type, ...]) -> None:
    """A chain is an instance of the nearest class that all parts share."""
    chain = Compose(*parts)
    assert isinstance(chain, Compose)
    assert all(isinstance(chain, cls) for cls in is_instance_of)
    assert not any(isinstance(chain, cls) for cls in is_none_of)


def test_constructors_of_the_parts_classes_are_not_called() -> None:
    """A chain of parts whose constructor needs arguments can be made."""
    chain = Compose(Add("a"), Add("b"))
    assert isinstance(chain, Add)
    assert not hasattr(chain, "text")


def test_chains_of_chains() -> None:
    """A chain within a chain counts as its parts, and keeps their class."""
    counters = [FaultCounter() for _ in range(3)]
    chain = Compose(Compose(counters[0], CudaHealthCheck()), Compose(counters[1], counters[2]))
    assert isinstance(chain, HealthCheck)
    assert len(chain.instances) == 4
    state = State(0, 1, fn_exception=ValueError())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chain(state) is state
    assert [counter.faults_count for counter in counters] == [1, 1, 1]


def test_refusals() -> None:
    """A chain needs parts that can be called."""
    with pytest.raises(ValueError, match="at least one part"):
        Compose()
    with pytest.raises(TypeError, match="cannot call 3"):
        Compose(len, 3)  # type: ignore[arg-type]
