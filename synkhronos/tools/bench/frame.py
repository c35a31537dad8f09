"""The frame of all benchmarks: their command line, their output, and their tables.

A benchmark is a module with a docstring that explains its figures, and

    add_arguments(parser)       its options, but for --json and --plot
    measure(args, report)       puts figures into ``report.results``, and shows tables of them
    plot(results, file)         optional: draws the picture of --plot
    LOAD_MATTERS = False        optional: for figures that don't depend on other programs

A benchmark begins when other programs leave the cores alone, or if --busy-ok is given, and says at
its end if they did not. Systems that are compared take turns in rounds (`turns.Turns`): other
programs disturb all alike.
"""

import argparse
import ast
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

from synkhronos._host import pythons
from synkhronos._machine import cores, load
from synkhronos._wording import printable
from synkhronos.errors import SessionError, SharedMemoryFull
from synkhronos.tools import turns

_LOOK_SECONDS = 6


class Refused(Exception):
    """Arguments can't be used; the message is for the user."""


class Failed(Exception):
    """A system did not start, failed, or computed a wrong result; the message is for the user."""


def main(program, benchmarks, name, rest) -> int:
    """Run a benchmark with its arguments, or list all without a name; return the exit status."""
    if name is None:
        width = max(map(len, benchmarks)) + 1
        for each, module in benchmarks.items():
            print(f"  {each:{width}} {_summary(module)}")
        return 0
    if name not in benchmarks:
        print(f"no benchmark {name!r}; there are: {', '.join(benchmarks)}", file=sys.stderr)
        return 2
    os.environ.setdefault("SYNKHRONOS_CHECK", "0")  # it would take time in first calls
    module = importlib.import_module(benchmarks[name])
    args = parser(f"{program} {name}", module).parse_args(rest)
    try:
        run(module, args)
    except Refused as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    except (Failed, SessionError, SharedMemoryFull) as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
    return 0


def _summary(module):
    """Return the first line of a module's docstring without importing it, which takes seconds."""
    source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]


def parser(program, module):
    """Return the parser of a benchmark's options, with those of its output."""
    found = argparse.ArgumentParser(
        prog=program,
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(found)
    if _load_matters(module):
        text = f"measure although other programs keep {load.BUSY_CORES} cores busy, or more"
        found.add_argument("--busy-ok", action="store_true", help=text)
    text = "print a JSON object"
    if any(not action.option_strings for action in found._actions):
        # It would take a FILE that is meant for the other argument.
        found.add_argument("--json", action="store_const", const="-", help=text)
    else:
        text += ", or write it to a file beside the tables"
        found.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)
    if hasattr(module, "plot"):
        found.add_argument("--plot", metavar="FILE.png", help="draw the figures")
    return found


def run(module, args):
    """Measure, and print, write and draw what was found."""
    # Checked before the measurements, which take minutes.
    picture = getattr(args, "plot", None)
    check_picture("--plot", picture)
    if args.json not in (None, "-"):
        _check_folder("--json", args.json)
    report = Report(args.json)
    matters = _load_matters(module)
    with report.watching(args.busy_ok) if matters else contextlib.nullcontext():
        module.measure(args, report)
    report.end()
    if picture:
        module.plot(report.results, picture)
        print(f"wrote {picture}", file=sys.stderr)


def _load_matters(module):
    return getattr(module, "LOAD_MATTERS", True)


def check_picture(option, file):
    """Raise Refused if a picture is asked for that can't be drawn."""
    if file:
        if importlib.util.find_spec("matplotlib") is None:
            raise Refused(f"{option} needs Matplotlib: {pythons.install('plot')}")
        _check_folder(option, file)


def _check_folder(option, file):
    folder = Path(file).parent
    if Path(file).is_dir():
        raise Refused(f"{option} can't write {file}: it is a folder; name a file")
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise Refused(f"{option} can't write {file}: {folder} is no folder to write to")


class Report:
    """The figures of a benchmark, and where they go.

    Attributes
    ----------
    results : dict or list
        The figures, which can be written as JSON.
    """

    def __init__(self, file):
        self.results = {}
        self._file = file

    @contextlib.contextmanager
    def watching(self, busy_ok=False):
        """Look what other programs do before the block and in it; refuse to begin if it is much.

        Raises
        ------
        Refused
            If they keep the cores busy, unless `busy_ok`.
        """
        with turns.shown("waiting for a quiet moment"):
            before = load_of_quiet_second(1 if busy_ok else _LOOK_SECONDS)
        text = f"Other programs keep {before}."
        if before.is_high and not busy_ok:
            raise Refused(f"{text} Times would tell little. End them, or measure with --busy-ok.")
        print(f"{text} Times tell little." if before.is_high else text, file=sys.stderr)
        self.results.update(cores=os.cpu_count(), busy_cores=round(before.cores, 2))
        self.results["machine"] = cores.described()
        watch = load.LoadWatch()
        yield
        during = watch.others()
        self.results["busy_cores_during"] = round(during.cores, 2)
        if during.is_high:
            text = f"While this was measured, other programs kept {during}. Times tell little."
            print(text, file=sys.stderr)

    def show(self, text):
        """Print a part of the tables, unless JSON is printed, and write the figures so far."""
        if self._file != "-":
            print(printable(text), flush=True)
        self._write()

    def end(self):
        """Print or write all figures."""
        if self._file == "-":
            print(json.dumps(self.results, indent=2))
        self._write()

    def _write(self):
        if self._file not in (None, "-"):
            Path(self._file).write_text(json.dumps(self.results, indent=2) + "\n")


class Table:
    r"""A table, of which lines can be printed as they are known.

    Parameters
    ----------
    heads : str
        Of the columns. The first column is flush left, all others are flush right.
    first, least : int
        The width of the first column, and of others at least.
    widths : list of int, optional
        Of the other columns, in place of `least`.

    Examples
    --------
    >>> table = Table("bytes", "us", first=8, least=6)
    >>> print(table.head, table.line("1,024", "7.3"), sep="\n")
    bytes       us
    1,024      7.3
    """

    def __init__(self, *heads, first=24, least=10, widths=None):
        widths = widths or [max(least, len(head) + 2) for head in heads[1:]]
        self._widths = [-first, *widths]
        self.head = self.line(*heads)

    def line(self, *cells):
        """Return a line; cells at its end may be left out."""
        shown = zip(cells, self._widths)
        return "".join(
            f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, width in shown
        ).rstrip()


@contextlib.contextmanager
def session(n_ranks, device=None, **options):
    """Yield `synkhronos` with a session on a device, or on those that fork() chooses."""
    import synkhronos as synk

    try:
        synk.fork(n_ranks, devices=device and [device] * n_ranks, **options)
    except ValueError as error:
        raise Refused(f"{error} Here: --device cuda0, or --device cpu.") from None
    try:
        yield synk
    finally:
        synk.close()


def load_of_quiet_second(seconds):
    """Return the load of the first quiet second, or of the last of `seconds` if none is quiet."""
    for _ in range(seconds):
        watch = load.LoadWatch()
        time.sleep(1)
        found = watch.others()
        if not found.is_high:
            break
    return found
