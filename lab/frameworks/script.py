"""A training of the framework lab as a program: ``script.py FRAMEWORK FAULT RANK``."""

import sys

from training import run

if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
