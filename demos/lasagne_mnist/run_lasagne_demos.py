"""Train on MNIST with serial Theano and in two ways with ranks, and compare times and curves.

All three take the same minibatches, each in a process of its own, one after the other.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from demos._arguments import add_common_arguments, positive
from demos._reports import plot_runs, times_table
from demos._shared import Log, count
from demos.lasagne_mnist import runs

HERE = Path(__file__).resolve().parent
PROGRAM = Path(__file__).stem


def main(argv=None):
    """Run the three demos; return their measurements."""
    arguments = parse(argv)
    # This demo is first, because the others take their minibatches as its ranks do.
    gpu_data = run("train_mnist_gpu_data", arguments)
    n_ranks = gpu_data["ranks"]
    cpu_data = run("train_mnist_cpu_data", arguments, parts=n_ranks)
    serial = run("train_mnist_theano", arguments, parts=n_ranks, parallel=False)
    results = [serial, cpu_data, gpu_data]

    print(f"\n{arguments.model}, minibatches of {arguments.batch}:\n")
    speedups = [serial["milliseconds"] / result["milliseconds"] for result in results]
    logs = [Log(**{name: result[name] for name in runs.LOGGED}) for result in results]
    columns = {**runs.scores(logs), "speedup": [f"{speedup:.2f}" for speedup in speedups]}
    print(times_table(logs, columns))
    difference = largest_difference(results)
    print("\n" + agreement(difference, n_ranks, serial["has_dropout"]))
    if arguments.plot:
        plot_runs(arguments.plot, logs)
    return {
        "ranks": n_ranks,
        "serial": serial,
        "cpu_data": cpu_data,
        "gpu_data": gpu_data,
        "difference": difference,
        "speedups": {"cpu_data": speedups[1], "gpu_data": speedups[2]},
    }


def parse(argv):
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    add = parser.add_argument
    add("batch", nargs="?", type=positive, default=500, metavar="BATCH_SIZE", help="rows (500)")
    add("--model", type=runs.model, default="cnn", help=runs.MODEL_HELP.replace("(mlp)", "(cnn)"))
    add("--epochs", type=positive, default=10, metavar="N", help="passes over the rows (10)")
    add_common_arguments(parser)
    runs.add_data_arguments(parser)
    return parser.parse_args(argv)


def run(program, arguments, parts=None, parallel=True):
    """Run a demo in a process of its own; return its measurements."""
    options = {"seed": arguments.seed, "data": arguments.data, "rows": arguments.rows}
    options["parts"] = parts
    if parallel:
        options["ranks"] = arguments.ranks
        options["devices"] = arguments.devices and ",".join(arguments.devices)
    positional = [arguments.model, arguments.batch, arguments.epochs]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        command = [HERE / f"{program}.py", *positional, *given, f"--json={file}"]
        print(f"\n$ {program}.py", *command[1:-1], flush=True)
        child = subprocess.run([sys.executable, *map(str, command)])
        if child.returncode:
            sys.exit(f"{PROGRAM}: {program}.py failed, with exit status {child.returncode}")
        return json.loads(file.read_text())


def largest_difference(results):
    """Return the largest difference between the runs' training losses of an epoch."""
    return max(
        max(losses) - min(losses) for losses in zip(*(result["losses"] for result in results))
    )


def agreement(difference, n_ranks, has_dropout):
    """Return a sentence that says whether the training losses agree."""
    if has_dropout and n_ranks > 1:
        return (
            f"The training losses differ by up to {difference:.1e}: the network has dropout, and "
            "each rank draws\nits own masks. Without, as in --model custom_mlp:2,800,0,0, they are "
            "those of serial Theano."
        )
    return (
        f"The training losses {'agree' if difference < 1e-3 else 'DIFFER'}: "
        f"those of {count(n_ranks, 'rank')} are at most {difference:.1e} from serial Theano's.\n"
        "Ranks add in another order, so they round otherwise, as another number of threads does."
    )


if __name__ == "__main__":
    main()
