"""Run pytest as a script: in a job of several machines it is the master's."""

import sys

import pytest

if __name__ == "__main__":  # doctests import it
    sys.exit(pytest.main(sys.argv[1:]))
