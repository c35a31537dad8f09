"""Run pytest as a script: in a job of several machines it is the master's."""

import os
import sys

import pytest

if __name__ == "__main__":  # doctests import it
    if "SYNKHRONOS_TEST_BUCKET" in os.environ:
        from synkhronos._host.theano import overlapping

        overlapping.BUCKET_BYTES = int(os.environ["SYNKHRONOS_TEST_BUCKET"])
    sys.exit(pytest.main(sys.argv[1:]))
