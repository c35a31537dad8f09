"""Run a benchmark; without a name, list them."""

import argparse

from synkhronos.tools import bench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``synkhronos bench`` to its parser."""
    name = parser.add_argument("name", metavar="NAME", nargs="?", help=", ".join(bench.BENCHMARKS))
    name.completer = lambda **_: list(bench.BENCHMARKS)  # for argcomplete
    what = "its arguments; NAME --help lists them"
    parser.add_argument("rest", metavar="...", nargs=argparse.REMAINDER, help=what)
    parser.set_defaults(run=_run)


def _run(arguments):
    from synkhronos.tools.bench import frame

    return frame.main("synkhronos bench", bench.BENCHMARKS, arguments.name, arguments.rest)
