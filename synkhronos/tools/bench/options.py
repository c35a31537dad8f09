"""Types of command line options, and checks of the machine, for all benchmarks."""

import argparse
import contextlib
import importlib.util
import os
import sys
import time
from pathlib import Path

from synkhronos._machine.devices import python_command


def interpreter(code, *arguments):
    """Return the command that runs code that imports Synkhronos in a fresh interpreter."""
    # Last on the path: a checkout that is not installed may hold a theano.py.
    checkout = str(Path(__file__).parents[3])
    return python_command(f"sys.path.append({checkout!r})\n{code}", *arguments)


def count(text):
    """Return the integer that a text gives, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)


def counts(text):
    """Return the integers of a list such as ``1,2,4``, each at least 1."""
    return [count(word.strip()) for word in text.split(",")]


def whole(text):
    """Return the integer that a text gives, at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, got {text!r}")
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
    if not file:
        return True
    if importlib.util.find_spec("matplotlib") is None:
        print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return False
    folder = Path(file).parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        print(f"--plot can't write {file}: {folder} is no folder to write to", file=sys.stderr)
        return False
    return True


@contextlib.contextmanager
def shown(text):
    """Show on a terminal what the block does, in one line of standard error."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    clear = "\r\x1b[K"  # to the begin of the line, and erase it
    print(clear + text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(clear, end="", file=sys.stderr, flush=True)


def progress(what, steps):
    """Yield each of `steps`; show on a terminal how many are done."""
    for done, step in enumerate(steps):
        with shown(f"{what}: {done} of {len(steps)}"):
            yield step


def busy_cores(seconds=0.5):
    """Return the number of cores that all processes of this machine use while this one sleeps."""
    # The line "cpu" of proc(5): fields 4 and 5 are idle time. The two last are part of others.
    before = [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
    time.sleep(seconds)
    after = [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
    used = [end - begin for begin, end in zip(before, after)]
    return max(0, sum(used) - used[3] - used[4]) / os.sysconf("SC_CLK_TCK") / seconds
