"""Print the CPU time of each rank of the ported programs, relative to serial Theano.

Run from the root of the repository: ``PYTHONPATH=tests python -m support.ported_cpu [NAME ...]``.
Each program runs with a few steps and with many; the difference is the CPU time (user and system)
of the steps, without that of compiling. All processes have one thread.
"""

import argparse
import os

import psutil

from support import ported

# For each program: what sets the number of its steps, few and many, and its other sizes.
SIZES = {
    "logistic": (
        ("epochs", 2, 12),
        {"length": 4000, "sizes": (784, 500, 10), "size": 500, "patience": 99},
    ),
    "lenet": (("steps", 5, 65), {"size": 200, "side": 28, "filters": (10, 20)}),
    "lstm": (("steps", 2, 22), {"rows": 200, "times": 20, "columns": 50, "hidden": 100}),
    "rbm": (("steps", 10, 110), {"size": 500, "visible": 784, "hidden": 200, "k": 5}),
    "da": (("epochs", 2, 12), {"size": 500, "visible": 784, "hidden": 300, "minibatches": 8}),
    "sda": (("epochs", 2, 22), {"size": 1000, "sizes": (784, 300, 300), "classes": 10}),
    "conjugate": (("maxiter", 2, 42), {"rows": 20000, "columns": 784, "classes": 10}),
    "lasagne": (
        ("epochs", 1, 11),
        {"rows": 6000, "columns": 784, "hidden": 400, "classes": 10, "size": 500},
    ),
    "network": (
        ("epochs", 2, 12),
        {"rows": 5000, "columns": 784, "classes": 10, "hidden": 400, "size": 500},
    ),
    "trainer": (
        ("epochs", 2, 12),
        {"rows": 4000, "columns": 784, "hidden": 400, "size": 500, "patience": 99},
    ),
}


def seconds(process):
    times = process.cpu_times()
    return times.user + times.system


def serial(name, **sizes):
    """Return the results of a serial program, and its CPU seconds in a list."""
    before = seconds(psutil.Process())
    results = ported.run(name, **sizes)
    return results, [seconds(psutil.Process()) - before]


def parallel(name, ranks, **sizes):
    """Return the results of a ported program, and the CPU seconds of each rank."""
    with ported.session(ranks, parallel=not ported.CHANGES[name]):
        processes = [psutil.Process(), *psutil.Process().children()]
        before = [seconds(each) for each in processes]
        results = ported.run(name, changed=True, **sizes)
        return results, [seconds(each) - start for each, start in zip(processes, before)]


def of_steps(run, steps, *args, **sizes):
    """Return the results of many steps, and the CPU seconds that they took beyond a few."""
    keyword, few, many = steps
    _, first = run(*args, **{keyword: few}, **sizes)
    results, last = run(*args, **{keyword: many}, **sizes)
    return results, [after - before for before, after in zip(first, last)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", metavar="NAME", nargs="*", choices=[[], *SIZES])
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print("program     lines  difference  serial s  each rank s        serial / each rank")
    for name in options.names or SIZES:
        steps, sizes = SIZES[name]
        serial(name, **{steps[0]: 1}, **sizes)  # compiles
        expected, [alone] = of_steps(serial, steps, name, **sizes)
        found, each = of_steps(parallel, steps, name, options.ranks, **sizes)
        print(
            f"{name:10}  {len(ported.changed_lines(name)):5}  "
            f"{ported.difference(found, expected):10.1e}  {alone:8.2f}  "
            f"{' '.join(f'{value:.2f}' for value in each):17}  "
            f"{' '.join(f'{alone / value:.2f}' for value in each)}",
            flush=True,
        )


if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    main()
