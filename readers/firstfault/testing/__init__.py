"""Conformance suites that the author of a strategy or a store inherits, and builders for test data.

Needs pytest. A suite is a class of tests; a subclass says what to test::

    from firstfault.testing import StrategyTests

    class TestMyStrategy(StrategyTests):
        strategy = staticmethod(my_strategy)
"""

import pytest

# before they are imported: a failing assert should say what it compared
pytest.register_assert_rewrite("firstfault.testing._store", "firstfault.testing._strategy")

from firstfault.testing._build import START_NS, make_error, make_job, make_presence  # noqa: E402 - see above
from firstfault.testing._store import StoreTests  # noqa: E402
from firstfault.testing._strategy import StrategyTests  # noqa: E402

__all__ = ["START_NS", "StoreTests", "StrategyTests", "make_error", "make_job", "make_presence"]
