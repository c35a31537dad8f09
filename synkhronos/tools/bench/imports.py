"""The time of importing Theano, then Synkhronos, and of a fork; in fresh interpreters."""

import json
import statistics
import subprocess

from synkhronos.tools.bench.options import count, interpreter

# One after another in one interpreter: the time of a step is what it adds to the steps before.
STEPS = {
    "import theano": "import theano",
    "import synkhronos": "import synkhronos",
    # A module is imported when the first of its names is used.
    "all its names": "[getattr(synkhronos, name) for name in synkhronos.__all__]",
    "fork": "synkhronos.fork({ranks})",
    "close": "synkhronos.close()",
}
NOW = "import time; now = lambda: [time.perf_counter(), time.process_time()]; times = now()"


def add_arguments(parser):
    """Add the options of this benchmark."""
    parser.add_argument(
        "--rounds", type=count, default=9, help="interpreters to start (default: 9)"
    )
    parser.add_argument("--ranks", type=count, default=2, help="ranks to fork (default: 2)")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def main(args) -> int:
    """Measure, print, and return the exit status."""
    found = measure(args.rounds, args.ranks)
    print(json.dumps(found, indent=2) if args.json else text(found))
    return 0


def measure(rounds, n_ranks):
    """Return the seconds of each step: the median and the least, and the median of CPU time.

    CPU time is that of the first process. It says more where other programs keep the cores busy.
    """
    passed, busy = ({step: [] for step in STEPS} for _ in range(2))
    for _ in range(rounds):
        times = _run(n_ranks)
        for step, (begin, begin_cpu), (end, end_cpu) in zip(STEPS, times, times[1:]):
            passed[step].append(end - begin)
            busy[step].append(end_cpu - begin_cpu)
    return {
        step: {
            "median": statistics.median(passed[step]),
            "least": min(passed[step]),
            "cpu": statistics.median(busy[step]),
        }
        for step in STEPS
    }


def _run(n_ranks):
    """Return pairs (clock, CPU time) between the steps, in seconds, of a fresh interpreter."""
    steps = [f"{step.format(ranks=n_ranks)}; times += now()" for step in STEPS.values()]
    code = "\n".join([NOW, *steps, "print(*times)"])
    child = subprocess.run(interpreter(code), stdout=subprocess.PIPE, text=True)
    if child.returncode:
        raise SystemExit("an interpreter failed: see above")
    numbers = list(map(float, child.stdout.splitlines()[-1].split()))
    return list(zip(numbers[::2], numbers[1::2]))


def text(found):
    """Return the table."""
    lines = [f"{'milliseconds':20}{'median':>9}{'least':>9}{'CPU':>9}"]
    for step, seconds in found.items():
        lines.append(f"{step:20}" + "".join(f"{1e3 * each:9.1f}" for each in seconds.values()))
    return "\n".join(lines)
