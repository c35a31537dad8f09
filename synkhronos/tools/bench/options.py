"""Types of command line options, and checks of the machine, for all benchmarks."""

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path


def count(text):
    """Return the integer that a text gives, at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)


def positive(text):
    """Return the number above zero that a text gives."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def names(known, what):
    """Return a function that parses a list of names such as ``a,b``, all of them known."""

    def parse(text):
        found = [name.strip() for name in text.split(",")]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name!r} is no {what}; there are: {', '.join(known)}"
                )
        return found

    return parse


def can_plot(file):
    """Return whether `file`, if given, can be drawn; if not, print what is missing."""
    if file and importlib.util.find_spec("matplotlib") is None:
        print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return False
    return True


def busy_cores(seconds=0.5):
    """Return the number of cores that all processes of this machine use while this one sleeps."""
    # The line "cpu" of proc(5): fields 4 and 5 are idle time. The two last are part of others.
    before = [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
    time.sleep(seconds)
    after = [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
    used = [end - begin for begin, end in zip(before, after)]
    return max(0, sum(used) - used[3] - used[4]) / os.sysconf("SC_CLK_TCK") / seconds
