"""The conformance suite for strategies, and builders of test data.

Needs pytest. A suite is a class of tests; a subclass names what to test::

    from firstfault.testing import StrategyTests

    class TestMyStrategy(StrategyTests):
        strategy = staticmethod(my_strategy)
"""

import pytest

# before the imports, so that a failing assert shows its operands
pytest.register_assert_rewrite("firstfault.testing._suites")

from firstfault.testing._suites import (  # noqa: E402 - see above
    START_NS,
    StrategyTests,
    make_error,
    make_job,
    make_presence,
)

__all__ = ["START_NS", "StrategyTests", "make_error", "make_job", "make_presence"]
