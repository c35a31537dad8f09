"""The time of importing Theano, then Synkhronos, and of a fork; in fresh interpreters."""

from benchmarks import groups
from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options, programs

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
    options.add(parser, "--rounds", options.count, 9, "interpreters to start")
    options.add(parser, "--ranks", options.count, 2, "ranks to fork")


def measure(args, report):
    """Show the milliseconds of each step: the median and the least, and the median of CPU time.

    CPU time is that of the first process. It says more where other programs keep the cores busy.
    """
    seconds, cpu = ({step: [] for step in STEPS} for _ in range(2))
    for _ in turns.progress("interpreters", range(args.rounds)):
        times = run(args.ranks)
        for step, (begin, begin_cpu), (end, end_cpu) in zip(STEPS, times, times[1:]):
            seconds[step].append(end - begin)
            cpu[step].append(end_cpu - begin_cpu)
    table = frame.Table("milliseconds", "median", "least", "CPU", first=20, least=9)
    lines, report.results["steps"] = [table.head], {}
    for step in STEPS:
        found = turns.spread(seconds[step])
        figures = [found["median"], found["least"], turns.spread(cpu[step])["median"]]
        report.results["steps"][step] = dict(zip(("median", "least", "cpu"), figures))
        lines.append(table.line(step, *(f"{1e3 * each:.1f}" for each in figures)))
    report.show("\n".join(lines))


def run(n_ranks):
    """Return pairs (clock, CPU time) between the steps, in seconds, of a fresh interpreter."""
    steps = [f"{step.format(ranks=n_ranks)}; times += now()" for step in STEPS.values()]
    code = "\n".join([NOW, *steps, "print(*times)"])
    numbers = list(map(float, groups.last_words(programs.interpreter(code))))
    return list(zip(numbers[::2], numbers[1::2]))
