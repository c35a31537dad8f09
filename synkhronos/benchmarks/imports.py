"""What importing costs over importing Theano, and what a fork adds; in fresh interpreters."""

import json
import statistics
import subprocess
import sys

from synkhronos.benchmarks.options import count

WAYS = {
    "theano": "import theano",
    "synkhronos": "import synkhronos, theano",
    # Modules are imported with the first of their names that is used.
    "names": "import synkhronos, theano; [getattr(synkhronos, n) for n in synkhronos.__all__]",
}
FORK = "synkhronos.fork({ranks}); forked = clock(); synkhronos.close()"


def add_arguments(parser):
    """Add the options of this benchmark."""
    parser.add_argument(
        "--rounds", type=count, default=9, help="interpreters to start of each kind (default: 9)"
    )
    parser.add_argument("--ranks", type=count, default=2, help="ranks to fork (default: 2)")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def main(args) -> int:
    """Measure, print, and return the exit status."""
    found = measure(args.rounds, args.ranks)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(text(found, args.ranks))
    return 0


def measure(rounds, n_ranks):
    """Return the seconds, median and least, of each import, and of a fork and a close after it."""
    seconds = {name: [] for name in (*WAYS, "fork", "close")}
    # In turns, so that all meet the same noise.
    for _ in range(rounds):
        for name, way in WAYS.items():
            fork = FORK.format(ranks=n_ranks) if name == "names" else "forked = clock()"
            begin, imported, forked, closed = _run(way, fork)
            seconds[name].append(imported - begin)
            if name == "names":
                seconds["fork"].append(forked - imported)
                seconds["close"].append(closed - forked)
    kinds = {"median": statistics.median, "least": min}
    return {kind: {n: f(each) for n, each in seconds.items()} for kind, f in kinds.items()}


def _run(way, fork):
    code = (
        "from time import perf_counter as clock; begin = clock()\n"
        f"{way}\nimported = clock()\n{fork}\nprint(begin, imported, forked, clock())"
    )
    child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    if child.returncode:
        raise SystemExit(f"an interpreter failed at: {way}")
    return map(float, child.stdout.split()[-4:])


def text(found, n_ranks):
    """Return the table."""
    rows = {
        "import theano": lambda of: of["theano"],
        "import synkhronos, theano": lambda of: of["synkhronos"],
        "  over Theano's": lambda of: of["synkhronos"] - of["theano"],
        "  and all its names": lambda of: of["names"] - of["theano"],
        f"fork({n_ranks})": lambda of: of["fork"],
        "close()": lambda of: of["close"],
    }
    lines = [f"{'milliseconds':28}{'median':>9}{'least':>9}"]
    for what, pick in rows.items():
        cells = [f"{1e3 * pick(found[kind]):9.1f}" for kind in ("median", "least")]
        lines.append(f"{what:28}{''.join(cells)}")
    return "\n".join(lines)
