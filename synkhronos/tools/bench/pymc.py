"""The likelihood of PyMC models on ranks, beside the plain model with one thread.

Value and gradient: the log-probability of the whole model with its gradients, as NUTS evaluates
it; "one rank" is this process alone, with the function that ranks have. Plain model and ranks take
turns. A gain is the median of the ratios of neighboring turns, a time that of the fifth of turns
that are fastest: other guests of the same machine slow down whole seconds, to half of the speed.
"Reading" is how much faster as many processes as ranks read the same data than one: no division of
work over cores gains more where memory is the limit and the data are read from it.

Sampling: pm.sample, without compilation: one chain, plain and on ranks; and as many chains as
ranks, plain in a process each, which is what PyMC does by itself, and one after the other on ranks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import numpy as np

from synkhronos._host import pythons
from synkhronos.tools.bench import options, stan

MODELS = {"logistic": 500_000, "hierarchical": 200_000, "poisson": 200_000, "student": 100_000}
ROWS = [100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000]
_TURNS = 50  # of each way, for one measurement
_QUANTILE = 20  # percent of turns that are faster than the times that are printed
_COLUMNS, _GROUPS = 20, 300


def add_arguments(parser):
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--ranks", type=options.count, default=2, metavar="N", help="ranks (2)")
    add(
        "--models", type=options.names(MODELS, "model"), default=list(MODELS), metavar="LIST",
        help=f"models ({','.join(MODELS)})",
    )  # fmt: skip
    add("--rows", type=options.count, metavar="N", help="rows of each model, instead of its own")
    add(
        "--pays", type=options.counts, default=ROWS, metavar="LIST",
        help="rows of the logistic regression, to find where ranks begin to pay",
    )  # fmt: skip
    add("--seconds", type=options.positive, default=5.0, help="to measure each evaluation (5)")
    add(
        "--draws", type=options.whole, default=150, metavar="N",
        help="draws of a chain, after as many to tune; 0: no sampling (150)",
    )  # fmt: skip
    add(
        "--stan", action="store_true",
        help="compile and time Stan programs of the same models, with reduce_sum (pip install "
        "httpstan); minutes",
    )  # fmt: skip
    add("--json", action="store_true", help="print a JSON object")


def main(args) -> int:
    """Measure, print, and return the exit status."""
    if importlib.util.find_spec("pymc") is None:
        print(f"bench pymc needs PyMC: {pythons.install('pymc')}", file=sys.stderr)
        return 2
    from threadpoolctl import threadpool_limits

    importlib.import_module("pymc")  # and the BLAS libraries whose threads are limited
    try:
        if args.stan:
            for name in args.models:
                with options.shown(f"compiling {name}.stan"):
                    stan.compiled(name, _cache())
    except stan.StanError as error:
        print(f"synkhronos bench pymc --stan: {error}", file=sys.stderr)
        return 2
    with threadpool_limits(1):
        results = {
            "ranks": args.ranks,
            "cores": os.cpu_count(),
            "evaluations": [
                _evaluation(name, args.rows or MODELS[name], args) for name in args.models
            ],
            "pays": [_evaluation("logistic", rows, args, reading=False) for rows in args.pays],
            "sampling": [
                _sampling(name, args.rows or MODELS[name], args)
                for name in (args.models if args.draws else ())
            ],
        }
    print(json.dumps(results, indent=2)) if args.json else _print(results)
    return 0


def make_model(name, rows):
    """Return a PyMC model and its random data, by their names in the programs of `stan`."""
    import pymc as pm

    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 1 if name == "hierarchical" else _COLUMNS))
    data = {"n": rows, "k": x.shape[1], "x": x}
    linear = x @ (random.normal(size=x.shape[1]) / 5)
    with pm.Model() as model:
        weights = pm.Normal("weights", 0, 1, shape=x.shape[1])
        if name == "logistic":
            y = (random.random(rows) < 1 / (1 + np.exp(-linear))).astype("int64")
            pm.Bernoulli("y", logit_p=pm.math.dot(x, weights), observed=y)
        elif name == "poisson":
            y = random.poisson(np.exp(linear / 2))
            pm.Poisson("y", pm.math.exp(pm.math.dot(x, weights)), observed=y)
        elif name == "student":
            y = linear + random.standard_t(4, rows)
            nu, sigma = pm.Gamma("nu", 2, 0.1), pm.HalfNormal("sigma", 1)
            pm.StudentT("y", nu=nu, mu=pm.math.dot(x, weights), sigma=sigma, observed=y)
        else:
            group = random.integers(0, _GROUPS, rows)
            y = random.normal(size=_GROUPS)[group] + linear + random.normal(size=rows)
            mu, tau = pm.Normal("mu", 0, 1), pm.HalfNormal("tau", 1)
            effect = mu + tau * pm.Normal("effect", 0, 1, shape=_GROUPS)
            mean = effect[group] + weights[0] * x[:, 0]
            pm.Normal("y", mean, pm.HalfNormal("sigma", 1), observed=y)
            data.update(k=_GROUPS, x=x[:, 0], g=group + 1)
    return model, {**data, "y": y}


def _evaluation(name, rows, args, reading=True):
    """Return the microseconds of an evaluation: plain, of one rank, and of all ranks, in turns."""
    from synkhronos.extensions import pymc as parallel

    model, data = make_model(name, rows)
    plain = _compiled(model)
    result = {"model": name, "rows": rows}
    for way, n_ranks in (("one", 1), ("ranks", args.ranks)):
        with parallel.likelihood(model, ranks=n_ranks):
            divided = _compiled(model)
            with options.shown(f"{name}, {rows:,} rows: ranks={n_ranks}"):
                turns = _take_turns([plain, divided], args.seconds)
        times = np.percentile(turns, _QUANTILE, axis=0)
        result["plain_us"], result[f"{way}_us"] = times.tolist()
        result[f"gain_of_{way}"] = float(np.median(turns[:, 0] / turns[:, 1]))
    if reading and args.stan:
        result.update(_stan(name, data, args))
    if reading:
        result["reading"] = _gain_of_reading(data["x"], args.ranks)
    return result


def _cache():
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "synkhronos"


def _stan(name, data, args):
    """Return the microseconds of an evaluation by Stan: with one thread, and one for each rank."""
    library = stan.compiled(name, _cache())
    times = {1: [], args.ranks: []}
    with contextlib.ExitStack() as stack:
        programs = {n: stack.enter_context(stan.Stan(library, data, n)) for n in times}
        with options.shown(f"{name}, {data['n']:,} rows: Stan"):
            end = time.perf_counter() + args.seconds
            while time.perf_counter() < end:
                for n, program in programs.items():
                    times[n] += program.times(5)
    seconds = [float(np.percentile(each, _QUANTILE)) for each in times.values()]
    return {"stan_us": 1e6 * seconds[0], "stan_ranks_us": 1e6 * seconds[-1]}


def _compiled(model):
    """Return a function without arguments that evaluates value and gradient."""
    from pymc.blocking import DictToArrayBijection

    function = model.logp_dlogp_function(ravel_inputs=True)
    start = model.initial_point(random_seed=0)
    names = [each.name for each in function._grad_vars]
    point = DictToArrayBijection.map({name: start[name] + 0.01 for name in names}).data
    function([point])  # compiles
    return lambda: function([point])


def _take_turns(functions, seconds):
    """Call functions in turns; return the microseconds of a call of each, in each turn."""
    turns = []
    end = time.perf_counter() + seconds
    while len(turns) < 3 or time.perf_counter() < end:
        turns.append([_microseconds(each, seconds / _TURNS / len(functions)) for each in functions])
    return np.array(turns)


def _microseconds(function, seconds):
    """Return the median microseconds of calls that take so many seconds together, or of one."""
    times = []
    begin, until = 0.0, time.perf_counter() + seconds
    while begin < until:
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return 1e6 * float(np.median(times))


def _gain_of_reading(x, n_processes, passes=15):
    """Return how much faster several processes read their parts of an array than one all of it."""
    context = multiprocessing.get_context("fork")
    barrier, seconds = context.Barrier(n_processes), context.Array("d", n_processes * passes)
    parts = np.array_split(x, n_processes)

    def read(part, count=1):
        for number in range(passes):
            if count > 1:
                barrier.wait()
            begin = time.perf_counter()
            part.sum()
            seconds[place * passes + number] = time.perf_counter() - begin

    place = 0
    read(x)
    alone = np.percentile(seconds[:passes], _QUANTILE)
    processes = []
    for place in range(n_processes):
        processes.append(context.Process(target=read, args=(parts[place], n_processes)))
        processes[-1].start()
    for each in processes:
        each.join()
    slowest = np.array(seconds[:]).reshape(n_processes, passes).max(axis=0)
    return float(alone / np.percentile(slowest, _QUANTILE))


def _sampling(name, rows, args):
    """Return the seconds that pm.sample takes, and the means of the posterior."""
    import pymc as pm

    from synkhronos.extensions import pymc as parallel

    model, _ = make_model(name, rows)
    result = {"model": name, "rows": rows, "draws": args.draws, "chains": args.ranks}
    given = {
        "draws": args.draws, "tune": args.draws, "random_seed": 1, "progressbar": False,
        "nuts_sampler": "pymc", "compute_convergence_checks": False, "quiet": True,
    }  # fmt: skip

    def sample(way, chains, cores):
        with options.shown(f"{name}, {rows:,} rows: {way}"):
            idata = pm.sample(chains=chains, cores=cores, **given)
        result[f"{way}_s"] = float(idata.posterior.attrs["sampling_time"])
        result[f"{way}_means"] = [
            float(idata.posterior[each].mean()) for each in sorted(idata.posterior.data_vars)
        ]

    with model:
        sample("plain", 1, 1)
        sample("plain_chains", args.ranks, args.ranks)
    with parallel.likelihood(model, ranks=args.ranks):
        sample("ranks", 1, 1)
        sample("ranks_chains", args.ranks, 1)
    return result


def _print(results):
    ranks = results["ranks"]
    print(f"Value and gradient, {ranks} ranks; {results['cores']} cores; milliseconds")
    print(f"  {'model':14}{'rows':>10}{'plain':>10}{'one rank':>10}{'ranks':>10}"
          f"{'gain':>8}{'of ranks':>10}{'reading':>9}")  # fmt: skip
    for each in results["evaluations"]:
        _print_row(each)
    for each in results["evaluations"]:
        if "stan_us" in each:
            print(
                f"Stan, {each['model']}: one thread {each['stan_us'] / 1e3:.3f} ms, "
                f"{ranks} threads with reduce_sum {each['stan_ranks_us'] / 1e3:.3f} ms "
                f"({each['stan_us'] / each['stan_ranks_us']:.2f})"
            )
    print("Where ranks begin to pay: logistic regression; the last columns are gains")
    for each in results["pays"]:
        _print_row(each)
    if results["pays"]:
        fewest = min(results["pays"], key=lambda each: each["rows"])
        over = fewest["ranks_us"] - fewest["plain_us"]
        print(f"  an evaluation of {fewest['rows']:,} rows takes {over:+.1f} us with ranks")
    for each in results["sampling"]:
        chains = each["chains"]
        print(
            f"pm.sample, {each['model']}, {each['rows']:,} rows, {each['draws']} + {each['draws']} "
            f"draws: one chain {each['plain_s']:.1f} s plain, {each['ranks_s']:.1f} s on ranks "
            f"({each['plain_s'] / each['ranks_s']:.2f} times as fast); {chains} chains "
            f"{each['plain_chains_s']:.1f} s plain in {chains} processes, "
            f"{each['ranks_chains_s']:.1f} s one after the other on ranks "
            f"({each['plain_chains_s'] / each['ranks_chains_s']:.2f})"
        )


def _print_row(each):
    reading = f"{each['reading']:9.2f}" if "reading" in each else ""
    print(
        f"  {each['model']:14}{each['rows']:10,}{each['plain_us'] / 1e3:10.3f}"
        f"{each['one_us'] / 1e3:10.3f}{each['ranks_us'] / 1e3:10.3f}"
        f"{each['gain_of_ranks']:8.2f}{each['gain_of_ranks'] / each['gain_of_one']:10.2f}" + reading
    )
