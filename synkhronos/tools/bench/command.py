"""Run a benchmark; without a name, list them."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``synkhronos bench`` to its parser."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="which one")
    parser.add_argument(
        "rest",
        metavar="...",
        nargs=argparse.REMAINDER,
        help="its arguments; NAME --help lists them",
    )
    parser.set_defaults(run=_run)


def _run(arguments):
    from synkhronos.tools.bench import BENCHMARKS, frame

    return frame.main("synkhronos bench", BENCHMARKS, arguments.name, arguments.rest)
