"""``python -m firstfault``: the same as the command ``firstfault``."""

from firstfault.cli import main

main()
