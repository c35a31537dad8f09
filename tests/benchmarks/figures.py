"""All measured figures of the documentation: docs/figures.json, and what is drawn from it.

Each run is a command of the pages, in the environment that it needs: this one, .venv-pytensor or
.venv-samplers. What it printed, and the numbers that pages quote, are written after each run, with
date, commit and machine; README.md and the pictures follow. Without names those runs are left out
that this commit has measured before, and those that take long: name them.
"""

import datetime
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Callable, Dict, NamedTuple

from benchmarks import groups
from synkhronos._machine import load
from synkhronos.tools.bench import frame

ROOT = Path(__file__).parents[2]
HOSTS = {"theano": "venv", "pytensor": "test-pytensor", "samplers": "test-samplers"}
_MACHINE = """
import os, platform
from importlib import metadata
model = [line for line in open("/proc/cpuinfo") if line.startswith("model name")]
found = [model[0].split(":")[1].strip() if model else platform.machine()]
found += [f"{os.cpu_count()} cores", f"Linux {platform.release().split('-')[0]}"]
found += [f"Python {platform.python_version()}"]
for name in ("Theano", "PyTensor", "PyMC", "JAX", "NumPy"):
    try:
        found.append(f"{name} {metadata.version(name)}")
    except metadata.PackageNotFoundError:
        pass
print(", ".join(found))
"""

_WRITTEN = [f":!{name}" for name in ("docs/figures.json", "docs/*.png", "README.md")]


class Run(NamedTuple):
    """A command, as a user types it, and what pages need of it.

    Attributes
    ----------
    numbers : dict
        For each name a function of the results that ``--json`` writes.
    host : str
        The environment: a key of `HOSTS`.
    shown : bool
        Whether a page shows what it printed.
    looks : bool
        Whether it refuses to run beside other programs.
    left_out : str
        Of what dots stand for; a regular expression.
    by_name : bool
        Whether it is measured only if it is named.
    peer : str
        A package that it needs, here or in a Python of ``--peer-python``.
    """

    command: str
    numbers: Dict[str, Callable] = types.MappingProxyType({})
    host: str = "theano"
    shown: bool = True
    looks: bool = True
    left_out: str = ""
    by_name: bool = False
    peer: str = ""


def _of(*path, times=1):
    """Return a function that finds a number of the results."""

    def find(found):
        for key in path:
            found = found[key]
        return times * found

    return find


def _speedups(*networks):
    one, two, ranks = "serial, 1 thread", "serial, 2 threads", "2 ranks"
    pairs = {"threads": (two, one), "over_one": (ranks, one), "over_two": (ranks, two)}
    pairs["rank"] = "1 rank", one

    def speedup(network, system, other):
        def find(found):
            systems = found["networks"][network]["systems"]
            return systems[other]["seconds"] / systems[system]["seconds"]

        return find

    return {
        f"{network}_{name}": speedup(network, *pair)
        for network in networks
        for name, pair in pairs.items()
    }


def _cells(names):
    """Return the times of an all_reduce of each size, by each system."""

    def cell(nbytes, system):
        return lambda found: next(
            1e6 * each["seconds"]
            for each in found["cells"]
            if (each["collective"], each["bytes"], each["system"]) == ("all_reduce", nbytes, system)
        )

    sizes = [1 << n for n in (10, 14, 18, 20, 22, 24, 26)]
    return {
        f"{short}_{nbytes}": cell(nbytes, system)
        for short, system in names.items()
        for nbytes in sizes
    }


def _of_model(kind, name, model):
    return lambda found: next(each[name] for each in found[kind] if each["model"] == model)


def _gain(model):
    """Return how many times as fast a chain of a PyMC model is sampled on ranks."""
    seconds = [_of_model("sampling", name, model) for name in ("plain_s", "ranks_s")]
    return lambda found: seconds[0](found) / seconds[1](found)


def _extremes(name, values):
    return {f"{name}_{each.__name__}": lambda found, each=each: each(values(found)) for each in
            (min, max)}  # fmt: skip


_REGRESSIONS = ("logistic", "poisson", "student")
_ON_HOSTS = "PYTHONPATH=tests python -m support.on_hosts"
_SAMPLERS = "PYTHONPATH=tests .venv-samplers/bin/python -m benchmarks"

RUNS = {
    "call": Run(
        "synkhronos bench call",
        {
            name: _of(name)
            for name in ("call_us", "sliced_us", "theano_us", "pipe_us", "profile_us",
                         "profile_percent")
        },
    ),
    "training": Run(
        "synkhronos bench training --rule sgd --plain-graphs --seconds 5 --plot docs/training.png "
        "--json training.json",
        _speedups("mlp", "cnn", "resnet"),
    ),
    "training_small": Run(
        "synkhronos bench training --networks mlp --rule sgd --plain-graphs --batch 128 "
        "--seconds 5",
        _speedups("mlp"),
    ),
    "training_torch": Run(
        'make bench BENCH="training --networks mlp --rows 512,128 --rule sgd --peer-python PATH"',
        {
            f"torch_{rows}": lambda found, rows=rows: (
                found["networks"][f"mlp, {rows} rows"]["systems"]["PyTorch, 1 thread"]["seconds"]
                / found["networks"][f"mlp, {rows} rows"]["systems"]["PyTorch, 2 ranks"]["seconds"]
            )
            for rows in (512, 128)
        },
        shown=False,
        by_name=True,
        peer="torch",
    ),
    "clusters": Run(
        'make bench BENCH="clusters training.json --plot docs/scaling.png"', looks=False
    ),
    "clusters_machines": Run(
        'make bench BENCH="clusters training.json --latency 100us --bandwidth 10Gbit"',
        looks=False,
    ),
    "updates": Run(
        'make bench BENCH="updates --rules adam,rmsprop,momentum --units 512,512"',
        {
            "adam_over_serial": lambda found: (
                found["updates"][0]["ms"]["ranks"] / found["updates"][0]["ms"]["serial"]
            )
        },
    ),
    "busy": Run('make bench BENCH="busy --seconds 1"'),
    "compile": Run(
        "make bench BENCH=compile",
        {
            "times_as_fast": lambda found: (
                found["compiled_theano_s"] / found["compiled_ahead_s"]
            )
        },
    ),
    "import": Run(
        "make bench BENCH=import",
        {
            "theano_s": _of("steps", "import theano", "median"),
            "synkhronos_s": lambda found: sum(
                found["steps"][step]["median"] for step in ("import synkhronos", "all its names")
            ),
        },
    ),
    "collectives": Run(
        'make bench BENCH="collectives --seconds 0.2 --plot docs/collectives.png"',
        {
            **_cells({"synkhronos": "synk", "mpi": "Open MPI", "memcpy": "memcpy"}),
            **{f"many_{name}_us": _of("many", "seconds", name, "median", times=1e6)
               for name in ("all_reduce", "broadcast", "gather")},
            "resnet_ms": _of("model", "seconds", "161 variables at once", "median", times=1e3),
            "vector_ms": _of("model", "seconds", "one vector", "median", times=1e3),
            "scatter_us": _of("small scatter", "seconds", "scatter", times=1e6),
            "copy_us": _of("small scatter", "seconds", "memcpy", times=1e6),
        },
        shown=False,
    ),
    "collectives_8": Run(
        'make bench BENCH="collectives --ranks 8 --sizes 1K --collectives all_reduce --no-models"',
        {name: value for name, value in _cells({"synkhronos": "synk", "mpi": "Open MPI"}).items()
         if name.endswith("_1024")},
        shown=False,
    ),
    "rules": Run('make bench BENCH="rules --ranks 1,2 --pairs 3"', {"ratio": _of("ratio")}),
    "parameter_server": Run('make bench BENCH="parameter_server --no-peers --seconds 0.5"'),
    "pymc": Run(
        "synkhronos bench pymc --draws 40 --seconds 1 --pays 300,3000,30000 "
        "--plot docs/pymc_gains.png",
        {
            "logistic_value": _of_model("evaluations", "gain_of_ranks", "logistic"),
            "logistic_ranks": lambda found: (
                _of_model("evaluations", "gain_of_ranks", "logistic")(found)
                / _of_model("evaluations", "gain_of_one", "logistic")(found)
            ),
            **_extremes("value", lambda found: [
                _of_model("evaluations", "gain_of_ranks", name)(found) for name in _REGRESSIONS
            ]),
            **_extremes("chain", lambda found: [_gain(name)(found) for name in _REGRESSIONS]),
            "hierarchical_value": _of_model("evaluations", "gain_of_ranks", "hierarchical"),
            "hierarchical_chain": _gain("hierarchical"),
            "plain_chain_s": _of_model("sampling", "plain_s", "logistic"),
            "plain_chains_s": _of_model("sampling", "plain_chains_s", "logistic"),
        },
        host="pytensor",
    ),
    "jax": Run(
        f"{_SAMPLERS} jax --seconds 2",
        _extremes("times", lambda found: [
            each["jax_ms"] / each["ranks_ms"] for each in found["evaluations"]
        ]),
        host="samplers",
    ),
    "samplers": Run(
        "synkhronos bench pymc --samplers --models logistic --rows 100000 --draws 100",
        host="samplers",
    ),
    "digits": Run(
        "python demos/train_digits.py --ranks 2",
        looks=False,
        left_out=r"^epoch +4 .*?(?=^epoch +29 )",
    ),
    "lasagne": Run(
        "python demos/lasagne_mnist/run_lasagne_demos.py --ranks 2 --model custom_mlp:2,800,0,0 "
        "--data digits --plot docs/lasagne_curves.png",
        looks=False,
        left_out=r"^Epoch 2 of.*?(?=^Final)|^\$ train_mnist_cpu.*?(?=^custom_mlp:\S+ minibatches)",
    ),
    "resnet": Run(
        "python demos/resnet/train_resnet.py --ranks 2 --synchronized --depth 8 --examples 512 "
        "--epochs 4 --plot docs/resnet_curves.png",
        looks=False,
        left_out=r"^Epoch:  2.*?(?=^Epoch:  4)|(?<=minibatches of 64\n).*?(?=^ +examples/s)",
    ),
    "keras": Run(
        "python demos/keras_mnist.py --ranks 2 --data digits",
        looks=False,
        left_out=r"^Epoch 3/10.*?(?=^Epoch 10/10)|^serial Keras, 1 thread\nTrain.*?(?=^ +ms/minib)",
    ),
    "machines": Run(
        f"{_ON_HOSTS} --ranks 2 --rate 100mbit 2 bench machines --threads-per-rank 1 "
        "--sizes 1K,1M,16M --networks dense",
        by_name=True,
    ),
    "machines_fast": Run(
        f"{_ON_HOSTS} 2 bench machines --ranks 1 --sizes 1K,16M --no-training --seconds 1",
        {
            "call_ms": _of("layouts", 0, "rows", 0, "synkhronos", "median", times=1e3),
            "all_reduce_ms": _of("layouts", 0, "rows", -1, "synkhronos", "median", times=1e3),
            "mpi_ms": _of("layouts", 0, "rows", -1, "mpi", "median", times=1e3),
        },
        shown=False,
    ),
    "machines_count": Run(
        f"{_ON_HOSTS} 12 bench machines --count --ranks 1 --sizes 1K,16K,33K,64K,256K,1M,16M",
        by_name=True,
    ),
    "simulate": Run('make bench BENCH="simulate --machines 64,256"', looks=False, by_name=True),
    "start": Run('make bench BENCH="start --hosts 2"'),
    "overlap": Run(
        f"{_ON_HOSTS} --rate 100mbit 2 benchmarks overlap --batch 4096", by_name=True
    ),
}  # fmt: skip


def add_arguments(parser):
    """Add the options of this benchmark."""
    what = "the runs to measure (default: all but those that take long)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=what)
    groups.add_python(parser)


def measure(args, report):
    """Measure runs, one after the other, and write each."""
    unknown = set(args.names) - set(RUNS)
    if unknown:
        raise frame.Refused(f"no run {sorted(unknown)[0]!r}; there are: {', '.join(RUNS)}")
    pages = runpy.run_path(str(ROOT / "docs" / "figures.py"))
    try:
        pages["read"]()
    except (OSError, ValueError) as error:
        file = pages["FILE"].relative_to(ROOT)
        raise frame.Refused(f"can't read {file} ({error}): git checkout {file}") from None
    commit = _printed_by(["git", "log", "-1", "--format=%h", "--", ".", *_WRITTEN])
    kept, begin = [], time.monotonic()
    for name in args.names or RUNS:
        run, before = RUNS[name], pages["read"]().get(name, {})
        is_new = before.get("commit") == commit and not before.get("busy")
        if not args.names and (run.by_name or is_new):
            continue
        print(f"[{(time.monotonic() - begin) / 60:.1f} min] {name}: {run.command}", flush=True)
        try:
            entry = _entry(name, run, commit, args)
        except frame.Failed as error:
            kept.append(name)
            print(f"{name} keeps its former figures: {error}", flush=True)
            continue
        _write({**pages["read"](), name: entry}, pages)
        if name == "training":
            runpy.run_path(str(ROOT / "docs" / "speedup.py"), run_name="__main__")
    report.results["kept"] = kept
    if kept:
        raise frame.Failed(f"not measured: {', '.join(kept)}")


def _entry(name, run, commit, args):
    """Run a command; return what the file has of it."""
    python = _python_of(run.host)
    peer = run.peer and groups.find(run.peer, args.peer_python)
    results = _results_of(name)
    results.parent.mkdir(parents=True, exist_ok=True)
    line = _line(run, python, args.busy_ok, results, peer)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    paths = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])
    given = {**os.environ, "PYTHONPATH": path, "PATH": paths}
    given.pop("SYNKHRONOS_CHECK", None)  # which the frame of benchmarks has set
    done = subprocess.run(line, cwd=ROOT, env=given, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise frame.Failed(f"exit status {done.returncode}")
    found = json.loads(results.read_text()) if run.numbers else {}
    try:
        numbers = {key: rounded(value(found)) for key, value in run.numbers.items()}
    except (LookupError, StopIteration):
        raise frame.Failed("a system that the pages quote was not measured") from None
    entry = {
        "command": run.command,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "machine": _printed_by([python, "-c", _MACHINE]),
    }
    if args.busy_ok or found.get("busy_cores_during", 0) > load.BUSY_CORES:
        entry["busy"] = True
    if numbers:
        entry["numbers"] = numbers
    if run.shown:
        entry["output"] = shortened(done.stdout, run.left_out)
    return entry


def _python_of(host):
    if host == "theano":
        return sys.executable
    python = ROOT / f".venv-{host}" / "bin" / "python"
    if not python.exists():
        raise frame.Failed(f"there is no .venv-{host}: make {HOSTS[host]} makes it")
    return str(python)


def _line(run, python, busy_ok, results, peer):
    """Return the command line of a run, which writes its results to a file."""
    bench = re.search(r'(?:BENCH=|-m benchmarks )"?(.*?)"?$', run.command)
    module, _, rest = run.command.partition("synkhronos ")
    if bench:
        line = ["-m", "benchmarks", *shlex.split(bench[1])]
    elif not module:
        line = ["-m", "synkhronos", *shlex.split(rest)]
    else:
        line = shlex.split(run.command.partition("python ")[2])
    others = {f"{other}.json": str(_results_of(other)) for other in RUNS}
    line = [python, *(others.get(word, word) for word in line)]
    line = [peer if word == "PATH" else word for word in line]
    line += ["--busy-ok"] * (busy_ok and run.looks)
    return line + ["--json", str(results)] * (bool(run.numbers) and "--json" not in line)


def _results_of(name):
    return ROOT / "build" / "figures" / f"{name}.json"


def rounded(value):
    """Return a number with three digits.

    >>> rounded(0.12345), rounded(1234.5)
    (0.123, 1230)
    """
    value = float(f"{value:.3g}")
    return int(value) if abs(value) >= 100 else value


def shortened(text, left_out):
    """Return the lines of a text, with dots for what an expression finds.

    >>> shortened("one\\ntwo\\nthree\\nfour\\n", "^two.*?(?=^four)")
    ['one', '...', 'four']
    """
    if left_out:
        text = re.sub(left_out, "...\n", text, flags=re.DOTALL | re.MULTILINE)
    return [line.expandtabs().rstrip() for line in text.strip("\n").split("\n")]


def _printed_by(line):
    return subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.strip()


def _write(known, pages):
    """Write the file, and README.md."""
    ordered = {name: known[name] for name in [*RUNS, *known] if name in known}
    text = json.dumps(ordered, indent=1, ensure_ascii=False) + "\n"
    new = pages["FILE"].with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, pages["FILE"])
    readme = ROOT / "README.md"
    readme.write_text(
        pages["in_readme"](readme.read_text(encoding="utf-8"), ordered), encoding="utf-8"
    )
