"""The command line of these benchmarks: ``PYTHONPATH=tests python -m benchmarks NAME ...``."""

import sys

from benchmarks import BENCHMARKS
from synkhronos.tools.bench import frame

if __name__ == "__main__":
    name, *rest = sys.argv[1:] or [None]
    try:
        sys.exit(frame.main("benchmarks", BENCHMARKS, name, rest))
    except KeyboardInterrupt:
        sys.exit(130)
