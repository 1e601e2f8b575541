"""A program for ``flyte run python-script``, which fails at its last rank."""

import sys

from tests.flyte2.tasks import fail

fail(sys.argv[1])
